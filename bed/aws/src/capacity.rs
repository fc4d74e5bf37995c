//! Limits of the emulated EC2 capacity.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Usage {
    OnDemand,
    Spot,
}

impl Usage {
    pub fn name(self) -> &'static str {
        match self {
            Self::OnDemand => "on-demand",
            Self::Spot => "spot",
        }
    }
}

/// Allows this many more instances where zone, type and usage class match.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// A glob over zones.
    #[serde(default = "any")]
    pub zone: String,
    /// A glob over instance types.
    #[serde(default = "any")]
    pub instance_type: String,
    /// Both usage classes, if omitted.
    #[serde(default)]
    pub usage: Option<Usage>,
    pub available: u32,
}

fn any() -> String {
    "*".to_owned()
}

impl Limit {
    /// In all zones and for all types.
    pub fn everywhere(usage: Option<Usage>, available: u32) -> Self {
        Self { zone: any(), instance_type: any(), usage, available }
    }

    fn covers(&self, zone: &str, instance_type: &str, usage: Usage) -> bool {
        glob(&self.zone, zone)
            && glob(&self.instance_type, instance_type)
            && self.usage.is_none_or(|limited| limited == usage)
    }

    fn same_scope(&self, other: &Limit) -> bool {
        (&self.zone, &self.instance_type, self.usage) == (&other.zone, &other.instance_type, other.usage)
    }
}

/// Capacity without a matching limit is unlimited.
#[derive(Clone, Default)]
pub struct Capacity(Vec<Limit>);

impl Capacity {
    pub fn set(&mut self, limit: Limit) {
        self.0.retain(|other| !other.same_scope(&limit));
        self.0.push(limit);
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn list(&self) -> &[Limit] {
        &self.0
    }

    /// Takes as many of `wanted` as every limit allows.
    pub fn take(&mut self, zone: &str, instance_type: &str, usage: Usage, wanted: u32) -> u32 {
        let covers = |limit: &&mut Limit| limit.covers(zone, instance_type, usage);
        let granted = self.0.iter_mut().filter(covers).map(|limit| limit.available).fold(wanted, u32::min);
        self.0.iter_mut().filter(covers).for_each(|limit| limit.available -= granted);
        granted
    }
}

/// Whether `text` matches a pattern in which `*` stands for anything.
pub fn glob(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, rest)) => text
            .strip_prefix(head)
            .is_some_and(|tail| (0..=tail.len()).any(|at| tail.is_char_boundary(at) && glob(rest, &tail[at..]))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_anything() {
        assert!(glob("m5*.*", "m5a.large") && glob("*", "t3.micro") && glob("c5.large", "c5.large"));
        assert!(!glob("m5.*", "m5a.large") && !glob("c5", "c5.large") && !glob("*.large", "c5.xlarge.x"));
    }

    #[test]
    fn the_tightest_limit_decides_and_every_limit_pays() {
        let limit = |zone: &str, instance_type: &str, usage, available| Limit {
            zone: zone.into(),
            instance_type: instance_type.into(),
            usage,
            available,
        };
        let mut capacity = Capacity::default();
        capacity.set(limit("us-east-1a", "*", None, 5));
        capacity.set(limit("*", "m5.*", Some(Usage::Spot), 2));
        assert_eq!(capacity.take("us-east-1a", "m5.large", Usage::Spot, 9), 2);
        assert_eq!(capacity.take("us-east-1a", "m5.large", Usage::OnDemand, 9), 3);
        assert_eq!(capacity.take("us-east-1a", "c5.large", Usage::OnDemand, 9), 0);
        assert_eq!(capacity.take("us-east-1b", "c5.large", Usage::Spot, 9), 9);
        capacity.set(limit("us-east-1a", "*", None, 1));
        assert_eq!((capacity.list().len(), capacity.take("us-east-1a", "c5.large", Usage::Spot, 9)), (2, 1));
    }
}
