//! EC2's query protocol: a flat form whose dotted, numbered keys are a tree.

use std::{collections::BTreeSet, fmt};

/// The fields of a request, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Form(Vec<(String, String)>);

impl Form {
    pub fn parse(body: &[u8]) -> Self {
        Self(form_urlencoded::parse(body).into_owned().collect())
    }

    pub fn action(name: &str) -> Self {
        Self::default().with("Action", name).with("Version", "2016-11-15")
    }

    #[must_use]
    pub fn with(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.push((key.into(), value.into()));
        self
    }

    pub fn encode(&self) -> String {
        form_urlencoded::Serializer::new(String::new()).extend_pairs(&self.0).finish()
    }

    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    pub fn number(&self, key: &str) -> Option<u32> {
        self.get(key)?.parse().ok()
    }

    /// Removes a field and everything below it.
    pub fn remove(&mut self, key: &str) {
        let below = format!("{key}.");
        self.0.retain(|(k, _)| k != key && !k.starts_with(&below));
    }

    /// The fields below `key`, without that prefix.
    pub fn below(&self, key: &str) -> Form {
        let prefix = format!("{key}.");
        Self(self.0.iter().filter_map(|(k, v)| Some((k.strip_prefix(&prefix)?.to_owned(), v.clone()))).collect())
    }

    /// The field `key` itself, under an empty key, and those below it.
    pub fn part(&self, key: &str) -> Form {
        let strip = |(k, v): &(String, String)| {
            let rest = k.strip_prefix(key)?;
            let rest = if rest.is_empty() { rest } else { rest.strip_prefix('.')? };
            Some((rest.to_owned(), v.clone()))
        };
        Self(self.0.iter().filter_map(strip).collect())
    }

    /// The members of a list, plain or not, by their numbers.
    pub fn parts(&self) -> Vec<Form> {
        self.indices().iter().map(|index| self.part(&index.to_string())).collect()
    }

    /// The first parts of all keys, each once.
    pub fn heads(&self) -> BTreeSet<&str> {
        self.0.iter().filter_map(|(key, _)| key.split('.').next()).collect()
    }

    /// The members of a list of structures, by their numbers.
    pub fn items(&self, key: &str) -> Vec<Form> {
        let below = self.below(key);
        below.indices().iter().map(|index| below.below(&index.to_string())).collect()
    }

    /// The members of a list of plain values, by their numbers.
    pub fn values(&self, key: &str) -> Vec<String> {
        let below = self.below(key);
        below.indices().iter().filter_map(|index| below.get(&index.to_string()).map(str::to_owned)).collect()
    }

    /// The tags for one resource type from `TagSpecification.N`.
    pub fn tags(&self, resource: &str) -> Vec<(String, String)> {
        let specifications = self.items("TagSpecification");
        let wanted = specifications.iter().filter(|spec| spec.get("ResourceType") == Some(resource));
        wanted.flat_map(|spec| spec.items("Tag")).filter_map(|tag| Form::tag(&tag)).collect()
    }

    /// A `Key` and its optional `Value`.
    pub fn tag(&self) -> Option<(String, String)> {
        Some((self.get("Key")?.to_owned(), self.get("Value").unwrap_or_default().to_owned()))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    fn indices(&self) -> Vec<u32> {
        let heads = self.0.iter().filter_map(|(key, _)| key.split('.').next()?.parse().ok());
        let mut indices: Vec<u32> = heads.collect();
        indices.sort_unstable();
        indices.dedup();
        indices
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(key, value)| writeln!(f, "{key}={value}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbered_keys_are_lists_in_the_order_of_their_numbers() {
        let form = Form::parse(b"L.10.A=ten&L.2.A=two&L.2.B=b&V.2=y&V.1=x%20&L.20=stray");
        let names: Vec<_> = form.items("L").iter().filter_map(|item| item.get("A").map(str::to_owned)).collect();
        assert_eq!(names, ["two", "ten"]);
        assert_eq!(form.values("V"), ["x ", "y"]);
        assert_eq!(form.below("L.2").get("B"), Some("b"));
    }
}
