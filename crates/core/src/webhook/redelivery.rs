//! Webhooks that GitHub could not deliver: which entries of an App's delivery log are still to be processed.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;

use super::event;

/// How far back a log is read at first. GitHub cancels a job that no runner took for a day, so older events need no
/// runner.
const LOG_LOOKBACK: SignedDuration = SignedDuration::from_hours(24);
/// How far each read overlaps the one before: a delivery appears in the log some time after it began, and GitHub waits
/// 10 s for an answer.
const LOG_OVERLAP: SignedDuration = SignedDuration::from_mins(2);

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Delivery {
    pub id: u64,
    /// The same for every attempt to deliver the same event.
    pub guid: String,
    pub delivered_at: Timestamp,
    pub status: String,
    pub status_code: u16,
    pub event: String,
    pub action: Option<String>,
}

impl Delivery {
    /// Whether it was accepted, which is answered only once its change is stored in the API server.
    fn arrived(&self) -> bool {
        (200..300).contains(&self.status_code)
    }

    /// Whether GitHub has given up.
    fn failed(&self) -> bool {
        !self.arrived() && self.status != "pending"
    }
}

/// Whether the App's webhooks are refused for their signature, judged by the newest one.
pub fn is_not_trusted(log: &[Delivery]) -> bool {
    log.iter().find(|one| one.arrived() || one.failed()).is_some_and(|newest| newest.status_code == 401)
}

/// How far the log of one App has been read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    since: Timestamp,
    /// Failed deliveries that were processed, and when they were sent.
    taken: BTreeMap<String, Timestamp>,
}

impl Reading {
    /// `retention` is how long the claims of finished jobs are kept. Older entries must not be read: without its claim
    /// a finished job looks like a new one.
    pub fn new(now: Timestamp, retention: SignedDuration) -> Self {
        let since = now.saturating_sub(LOG_LOOKBACK.min(retention)).unwrap_or(Timestamp::MIN);
        Self { since, taken: BTreeMap::new() }
    }

    /// Whether older pages than this one have to be read. The log starts with the newest entry.
    pub fn goes_on_after(&self, page: &[Delivery]) -> bool {
        page.last().is_some_and(|oldest| oldest.delivered_at >= self.since)
    }

    /// One delivery of each event that did not arrive, oldest first.
    pub fn lost<'a>(&self, log: &'a [Delivery]) -> Vec<&'a Delivery> {
        let arrived: BTreeSet<_> = log.iter().filter(|one| one.arrived()).map(|one| &one.guid).collect();
        let mut lost: BTreeMap<&str, &Delivery> = BTreeMap::new();
        for one in log {
            let wanted = one.failed()
                && one.delivered_at >= self.since
                && event::is_used(&one.event, one.action.as_deref())
                && !arrived.contains(&one.guid)
                && !self.taken.contains_key(&one.guid);
            if wanted {
                lost.insert(&one.guid, one);
            }
        }
        let mut lost: Vec<_> = lost.into_values().collect();
        lost.sort_by_key(|one| (one.delivered_at, one.id));
        lost
    }

    /// Marks an event as processed.
    pub fn took(&mut self, delivery: &Delivery) {
        self.taken.insert(delivery.guid.clone(), delivery.delivered_at);
    }

    /// Completes a read that began at `began`; `left` are events that are still to be processed.
    pub fn ended<'a>(&mut self, began: Timestamp, left: impl IntoIterator<Item = &'a Delivery>) {
        let recent = began.saturating_sub(LOG_OVERLAP).unwrap_or(Timestamp::MIN);
        let oldest = left.into_iter().map(|delivery| delivery.delivered_at).min();
        self.since = self.since.max(oldest.map_or(recent, |oldest| oldest.min(recent)));
        self.taken.retain(|_, sent| *sent >= self.since);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_750_000_000 + second).unwrap()
    }

    fn delivery(id: u64, guid: &str, second: i64, status_code: u16) -> Delivery {
        Delivery {
            id,
            guid: guid.into(),
            delivered_at: at(second),
            status: if status_code == 0 { "pending" } else { "whatever" }.into(),
            status_code,
            event: "workflow_job".into(),
            action: Some("queued".into()),
        }
    }

    fn ids(reading: &Reading, log: &[Delivery]) -> Vec<u64> {
        reading.lost(log).into_iter().map(|one| one.id).collect()
    }

    fn day() -> Reading {
        Reading::new(at(0), SignedDuration::from_hours(240))
    }

    #[test]
    fn what_did_not_arrive_is_taken_once_and_oldest_first() {
        let log = [
            delivery(9, "twice", -10, 502),
            delivery(8, "late", -20, 504),
            delivery(7, "again", -30, 200),
            delivery(6, "redirected", -40, 301),
            delivery(5, "again", -50, 503),
            delivery(4, "under way", -60, 0),
            delivery(3, "twice", -70, 401),
            delivery(2, "fine", -80, 202),
            delivery(1, "two days old", -170_000, 502),
        ];
        let mut reading = day();
        assert_eq!(ids(&reading, &log), [3, 6, 8], "by the first attempt of each, and not what arrived in the end");
        reading.took(&log[3]);
        assert_eq!(ids(&reading, &log), [3, 8]);
    }

    #[test]
    fn the_newest_delivery_shows_whether_the_secret_is_right() {
        let log = |codes: &[u16]| -> Vec<_> {
            codes.iter().zip(1..).map(|(code, id)| delivery(id, "x", -i64::from(*code), *code)).collect()
        };
        for (codes, not_trusted) in
            [(&[][..], false), (&[401, 200], true), (&[200, 401], false), (&[0, 401], true), (&[502, 401], false)]
        {
            assert_eq!(is_not_trusted(&log(codes)), not_trusted, "{codes:?}");
        }
    }

    #[test]
    fn unused_events_are_not_fetched() {
        let with = |event: &str, action: &str| Delivery {
            event: event.into(),
            action: Some(action.into()),
            ..delivery(1, "x", -10, 502)
        };
        for (event, action, used) in [
            ("workflow_job", "in_progress", true),
            ("workflow_job", "completed", true),
            ("workflow_job", "waiting", false),
            ("workflow_run", "completed", true),
            ("workflow_run", "requested", false),
            ("push", "completed", false),
        ] {
            assert_eq!(ids(&day(), &[with(event, action)]).len() == 1, used, "{event} {action}");
        }
    }

    #[test]
    fn a_reading_goes_back_to_the_one_before_and_to_what_could_not_be_taken() {
        let page = |second| [delivery(1, "x", second, 200)];
        let mut reading = day();
        assert!(reading.goes_on_after(&page(-80_000)) && !reading.goes_on_after(&page(-90_000)));
        assert!(!reading.goes_on_after(&[]));
        let stuck = delivery(2, "stuck", -5_000, 503);
        let done = delivery(3, "done", -4_000, 503);
        reading.took(&done);
        reading.ended(at(0), [&stuck]);
        assert!(reading.goes_on_after(&page(-5_000)) && !reading.goes_on_after(&page(-5_001)));
        assert_eq!(ids(&reading, &[done.clone(), stuck.clone()]), [2]);
        reading.took(&stuck);
        reading.ended(at(60), []);
        assert!(reading.goes_on_after(&page(-60)) && !reading.goes_on_after(&page(-61)));
        assert_eq!(ids(&reading, &[done, stuck]), [0; 0], "older than the read window");
        assert!(reading.taken.is_empty(), "nothing is remembered for ever");
    }

    #[test]
    fn i9_what_is_older_than_finished_claims_are_kept_is_not_read() {
        let reading = Reading::new(at(0), SignedDuration::from_secs(60));
        assert_eq!(ids(&reading, &[delivery(1, "x", -61, 502), delivery(2, "y", -60, 502)]), [2]);
    }
}
