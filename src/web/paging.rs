//! Pagination and date filters of the `.json` variants, as in GitHub's API.

use jiff::{Span, Timestamp, civil::Date, tz::TimeZone};
use serde::Deserialize;

const PER_PAGE: usize = 100;
const PER_PAGE_MAX: usize = 1000;

/// The raw query string.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Query {
    page: Option<String>,
    per_page: Option<String>,
    start: Option<String>,
    end: Option<String>,
}

/// The parsed query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    page: usize,
    per_page: usize,
    start: Option<Timestamp>,
    end: Option<Timestamp>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    #[error("{0} must be a number from 1")]
    Number(&'static str),
    #[error("{0} must be a day such as 2025-05-31, or -7d for seven days ago")]
    Day(&'static str),
}

impl Query {
    pub fn window(&self, now: Timestamp) -> Result<Window, QueryError> {
        let number = |text: &Option<String>, name, default| match text {
            None => Ok(default),
            Some(text) => text.parse().ok().filter(|n| *n > 0).ok_or(QueryError::Number(name)),
        };
        let per_page: usize = number(&self.per_page, "per_page", PER_PAGE)?;
        Ok(Window {
            page: number(&self.page, "page", 1)?,
            per_page: per_page.min(PER_PAGE_MAX),
            start: self.start.as_deref().map(|text| day(text, now, 0).ok_or(QueryError::Day("start"))).transpose()?,
            // An end date includes the whole day.
            end: self.end.as_deref().map(|text| day(text, now, 1).ok_or(QueryError::Day("end"))).transpose()?,
        })
    }
}

fn day(text: &str, now: Timestamp, days_after: i64) -> Option<Timestamp> {
    if let Some(days) = text.strip_prefix('-').and_then(|rest| rest.strip_suffix('d')) {
        let days: i64 = days.parse().ok().filter(|days| (0..=36_500).contains(days))?;
        return now.checked_sub(jiff::SignedDuration::from_hours(24 * days)).ok();
    }
    let date: Date = text.parse().ok()?;
    let date = date.checked_add(Span::new().days(days_after)).ok()?;
    Some(date.to_zoned(TimeZone::UTC).ok()?.timestamp())
}

impl Window {
    pub fn includes(&self, time: Option<Timestamp>) -> bool {
        let after = |time: Timestamp| self.start.is_none_or(|start| time >= start);
        let before = |time: Timestamp| self.end.is_none_or(|end| time < end);
        time.map_or(self.start.is_none() && self.end.is_none(), |time| after(time) && before(time))
    }

    /// The rows of this page, and the `Link` header to the others.
    pub fn paginate<T>(&self, rows: Vec<T>, path: &str, query: &Query) -> (Vec<T>, Option<String>) {
        let last = rows.len().div_ceil(self.per_page).max(1);
        let link = |page: usize, rel: &str| {
            let mut parts = vec![format!("page={page}"), format!("per_page={}", self.per_page)];
            for (name, value) in [("start", &query.start), ("end", &query.end)] {
                parts.extend(value.as_ref().map(|value| format!("{name}={value}")));
            }
            format!("<{path}?{}>; rel=\"{rel}\"", parts.join("&"))
        };
        let mut links = Vec::new();
        if self.page > 1 {
            links.push(link(1, "first"));
            links.push(link((self.page - 1).min(last), "prev"));
        }
        if self.page < last {
            links.push(link(self.page + 1, "next"));
            links.push(link(last, "last"));
        }
        let skip = (self.page - 1).saturating_mul(self.per_page);
        let rows = rows.into_iter().skip(skip).take(self.per_page).collect();
        (rows, (!links.is_empty()).then(|| links.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(page: &str, start: &str, end: &str) -> Query {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Query { page: some(page), per_page: Some("2".into()), start: some(start), end: some(end) }
    }

    fn now() -> Timestamp {
        "2025-06-07T12:00:00Z".parse().unwrap()
    }

    #[test]
    fn pages_are_cut_and_linked_like_githubs() {
        let second = query("2", "", "");
        let (rows, link) = second.window(now()).unwrap().paginate(vec![1, 2, 3, 4, 5], "/jobs.json", &second);
        assert_eq!(rows, [3, 4]);
        assert_eq!(
            link.unwrap(),
            "</jobs.json?page=1&per_page=2>; rel=\"first\", </jobs.json?page=1&per_page=2>; rel=\"prev\", \
             </jobs.json?page=3&per_page=2>; rel=\"next\", </jobs.json?page=3&per_page=2>; rel=\"last\""
        );
        let beyond = query("9", "", "");
        assert_eq!(beyond.window(now()).unwrap().paginate(vec![1], "/x", &beyond).0, Vec::<i32>::new());
        let only = query("1", "", "");
        assert_eq!(only.window(now()).unwrap().paginate(vec![1], "/x", &only), (vec![1], None));
    }

    #[test]
    fn dates_are_days_or_days_ago_and_the_end_day_counts_whole() {
        let window = query("", "2025-05-31", "2025-06-01").window(now()).unwrap();
        let includes = |text: &str| window.includes(Some(text.parse().unwrap()));
        assert!(includes("2025-05-31T00:00:00Z") && includes("2025-06-01T23:59:59Z"));
        assert!(!includes("2025-05-30T23:59:59Z") && !includes("2025-06-02T00:00:00Z"));
        let week = query("", "-7d", "").window(now()).unwrap();
        assert!(week.includes(Some("2025-05-31T12:00:00Z".parse().unwrap())));
        assert!(!week.includes(Some("2025-05-31T11:59:59Z".parse().unwrap())));
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        assert_eq!(query("0", "", "").window(now()), Err(QueryError::Number("page")));
        assert_eq!(query("x", "", "").window(now()), Err(QueryError::Number("page")));
        assert_eq!(query("1", "yesterday", "").window(now()), Err(QueryError::Day("start")));
        assert_eq!(query("1", "", "-999999999999d").window(now()), Err(QueryError::Day("end")));
    }
}
