//! Pagination of lists with the `Link` header.

use serde::Deserialize;

/// `?per_page=30&page=1`, with GitHub's defaults and bounds. Strings, because GitHub ignores values that are no number.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Page {
    per_page: Option<String>,
    page: Option<String>,
}

impl Page {
    pub fn size(&self) -> usize {
        let asked = self.per_page.as_deref().and_then(|text| text.parse().ok()).unwrap_or(30);
        asked.clamp(1, 100)
    }

    pub fn number(&self) -> usize {
        self.page.as_deref().and_then(|text| text.parse().ok()).unwrap_or(1).max(1)
    }

    pub fn of<'a, T>(&self, all: &'a [T]) -> &'a [T] {
        let start = (self.number() - 1).saturating_mul(self.size()).min(all.len());
        &all[start..(start + self.size()).min(all.len())]
    }

    /// The value of the `Link` header for a list of `total` at `url` (with its other query parameters).
    pub fn link(&self, url: &str, total: usize) -> Option<String> {
        let last = total.div_ceil(self.size()).max(1);
        let number = self.number();
        let separator = if url.contains('?') { '&' } else { '?' };
        let size = self.size();
        let to = |page, rel| format!("<{url}{separator}per_page={size}&page={page}>; rel=\"{rel}\"");
        let mut links = Vec::new();
        if number > 1 {
            links.push(to((number - 1).min(last), "prev"));
        }
        if number < last {
            links.push(to(number + 1, "next"));
            links.push(to(last, "last"));
        }
        if number > 1 {
            links.push(to(1, "first"));
        }
        (!links.is_empty()).then(|| links.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(per_page: &str, page: &str) -> Page {
        Page { per_page: Some(per_page.into()), page: Some(page.into()) }
    }

    #[test]
    fn sizes_are_bounded_and_nonsense_is_ignored() {
        assert_eq!((page("1000", "0").size(), page("1000", "0").number()), (100, 1));
        assert_eq!((page("x", "-1").size(), page("x", "-1").number()), (30, 1));
    }

    #[test]
    fn pages_cover_the_list_once_and_end() {
        let all: Vec<_> = (0..5).collect();
        assert_eq!(page("2", "1").of(&all), [0, 1]);
        assert_eq!(page("2", "3").of(&all), [4]);
        assert!(page("2", "4").of(&all).is_empty());
        assert!(page("100", "18446744073709551615").of(&all).is_empty());
    }

    #[test]
    fn links_lead_on_and_back() {
        assert_eq!(page("2", "1").link("http://x/y?name=z", 2), None);
        assert_eq!(
            page("2", "2").link("http://x/y", 5).unwrap(),
            "<http://x/y?per_page=2&page=1>; rel=\"prev\", <http://x/y?per_page=2&page=3>; rel=\"next\", \
             <http://x/y?per_page=2&page=3>; rel=\"last\", <http://x/y?per_page=2&page=1>; rel=\"first\""
        );
    }
}
