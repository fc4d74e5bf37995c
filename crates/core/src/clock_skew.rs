//! How far clocks differ: what is tolerated, how it is measured and corrected, and what a pool shows of it.

use std::{cmp::Ordering, collections::BTreeMap, fmt};

use jiff::{SignedDuration, Timestamp};

/// A measured skew of the operator's clock up to this is not corrected: `Date` headers have whole seconds, and an answer
/// takes a while. So the instants that two leaders write may differ by twice as much, and no lifetime is that short.
pub const CLOCK_SKEW_TOLERATED: SignedDuration = SignedDuration::from_secs(5);

/// The skew of any clock that does no harm.
pub const CLOCK_SKEW_MAX: SignedDuration = SignedDuration::from_mins(5);

/// A skew beyond this is shown: far more than clocks that are synchronised differ, far less than what does harm.
const CLOCK_SKEW_SHOWN: SignedDuration = SignedDuration::from_secs(30);
/// It is shown until it is less than this, so that one on the limit does not come and go.
const CLOCK_SKEW_CLEARED: SignedDuration = SignedDuration::from_secs(20);
/// A skew that is shown is shown anew when it has changed by this much.
const CLOCK_SKEW_STEP: SignedDuration = SignedDuration::from_secs(10);

/// Answers in a row that contradict the correction before it is changed: all machines depend on it, and one server may be
/// wrong.
const DOUBTS: u32 = 3;

/// A clock that differs from the time at AWS.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum SkewedClock {
    /// The operator's, from that of a service.
    Operator(&'static str),
    /// The machine's, by its id.
    Machine(String),
}

/// The skews that are shown, by clock; positive: it is ahead.
pub type Skews = BTreeMap<SkewedClock, SignedDuration>;

/// What an answer tells about a clock: its time less that of the server is between these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    least: SignedDuration,
    most: SignedDuration,
}

impl Sample {
    /// The server wrote `date`, in whole seconds, between `sent` and `received` by this clock.
    pub fn new(date: Timestamp, sent: Timestamp, received: Timestamp) -> Self {
        let least = sent.duration_since(date) - SignedDuration::from_secs(1);
        Self { least, most: received.duration_since(date).max(least) }
    }

    /// The least skew that explains the answer, so that a slow one tells of none.
    pub fn skew(self) -> SignedDuration {
        SignedDuration::ZERO.clamp(self.least, self.most)
    }

    fn middle(self) -> SignedDuration {
        (self.least + self.most) / 2
    }
}

/// What is subtracted from a clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct Correction {
    by: Option<SignedDuration>,
    doubts: u32,
}

impl Correction {
    /// Takes in an answer. The first one counts at once; the correction stays while it explains the answers.
    pub fn note(&mut self, sample: Sample) {
        let by = self.by.unwrap_or_default();
        let error = (by - by.clamp(sample.least, sample.most)).abs();
        self.doubts = if error > CLOCK_SKEW_TOLERATED { self.doubts + 1 } else { 0 };
        if self.doubts >= if self.by.is_some() { DOUBTS } else { 1 } {
            *self = Self { by: Some(sample.middle()), doubts: 0 };
        }
        self.by.get_or_insert_default();
    }

    /// None before the first answer.
    pub fn by(&self) -> Option<SignedDuration> {
        self.by
    }
}

/// The skews to show: those that are large, and those that were and are not small yet.
pub fn shown(before: &Skews, measured: impl IntoIterator<Item = (SkewedClock, SignedDuration)>) -> Skews {
    let shown = measured.into_iter().filter_map(|(clock, skew)| {
        let last = before.get(&clock).copied();
        let limit = if last.is_some() { CLOCK_SKEW_CLEARED } else { CLOCK_SKEW_SHOWN };
        let same = last.filter(|last| (*last - skew).abs() < CLOCK_SKEW_STEP);
        (skew.abs() > limit).then(|| (clock, same.unwrap_or(skew)))
    });
    shown.collect()
}

/// How many clocks a message names.
const NAMED: usize = 3;

/// Which clocks differ, by how much, and what to do.
pub fn message(skews: &Skews) -> Option<String> {
    if skews.is_empty() {
        return None;
    }
    let mut parts: Vec<_> = skews.iter().take(NAMED).map(|(clock, skew)| described(clock, *skew)).collect();
    if let more @ 1.. = skews.len().saturating_sub(NAMED) {
        parts.push(format!("{more} more machines"));
    }
    let hint = "up to 5 min do no harm; let NTP set it (chrony; on EC2 from 169.254.169.123)";
    Some(format!("{}: {hint}", parts.join(", ")))
}

fn described(clock: &SkewedClock, skew: SignedDuration) -> String {
    let direction = match skew.cmp(&SignedDuration::ZERO) {
        Ordering::Less => "behind",
        Ordering::Equal | Ordering::Greater => "ahead of",
    };
    let (seconds, service) = ((skew.abs() + CLOCK_SKEW_STEP / 2).as_secs() / 10 * 10, clock.service());
    format!("{clock} is {seconds} s {direction} {service}'s")
}

impl SkewedClock {
    fn service(&self) -> &str {
        match self {
            Self::Operator(service) => service,
            Self::Machine(_) => "AWS",
        }
    }
}

impl fmt::Display for SkewedClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operator(_) => f.write_str("the operator's clock"),
            Self::Machine(id) => write!(f, "the clock of {id}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::ec2::at;

    const fn s(seconds: i64) -> SignedDuration {
        SignedDuration::from_secs(seconds)
    }

    #[test]
    fn an_answer_tells_of_no_more_skew_than_it_must() {
        for (date, sent, received, skew) in
            [(10, 10, 10, 0), (9, 10, 10, 0), (0, 300, 301, 299), (300, 0, 1, -299), (300, 0, 30, -270), (5, 0, 9, 0)]
        {
            assert_eq!(Sample::new(at(date), at(sent), at(received)).skew(), s(skew), "{date} {sent} {received}");
        }
    }

    #[test]
    fn a_skew_is_corrected_beyond_the_tolerated_one_and_one_wrong_answer_changes_nothing() {
        let sample = |skew| Sample::new(at(0), at(skew), at(skew) + SignedDuration::from_millis(100));
        let after = |skews: &[i64]| {
            let mut correction = Correction::default();
            skews.iter().for_each(|skew| correction.note(sample(*skew)));
            correction.by().map(|by| by.as_secs())
        };
        assert_eq!(after(&[]), None);
        assert_eq!(after(&[5]), Some(0));
        assert_eq!(after(&[-5]), Some(0));
        assert_eq!(after(&[300]), Some(299), "at once: nothing better is known");
        assert_eq!(after(&[-300]), Some(-300));
        assert_eq!(after(&[300, 303, 297, 300]), Some(299), "no jitter");
        assert_eq!(after(&[0, 3600, 0, 3600, 3600, 0]), Some(0), "a server that is wrong");
        assert_eq!(after(&[0, 300, 300, 300]), Some(299), "the clock was set");
    }

    #[test]
    fn a_skew_is_shown_from_thirty_seconds_until_twenty_and_does_not_flicker() {
        let clock = || SkewedClock::Machine("i-1".into());
        let mut skews = Skews::new();
        for (measured, seconds) in
            [(30, None), (31, Some(31)), (40, Some(31)), (42, Some(42)), (33, Some(42)), (21, Some(21)), (20, None)]
        {
            skews = shown(&skews, [(clock(), s(measured))]);
            assert_eq!(skews.get(&clock()).copied(), seconds.map(s), "{measured}");
        }
        skews = shown(&skews, [(clock(), s(-301))]);
        assert_eq!(skews.get(&clock()).copied(), Some(s(-301)));
        assert!(shown(&skews, []).is_empty(), "the machine is gone");
    }

    #[test]
    fn the_message_names_clocks_and_what_to_do() {
        assert_eq!(message(&Skews::new()), None);
        let machine = |id: &str, skew| (SkewedClock::Machine(id.into()), s(skew));
        let one = message(&Skews::from([(SkewedClock::Operator("AWS"), s(298))])).unwrap();
        assert!(one.starts_with("the operator's clock is 300 s ahead of AWS's: "), "{one}");
        assert!(one.contains("chrony"), "{one}");
        let many = [machine("i-1", -299), machine("i-2", 31), machine("i-3", 60), machine("i-4", 60)];
        let many = message(&Skews::from(many)).unwrap();
        assert!(many.starts_with("the clock of i-1 is 300 s behind AWS's, the clock of i-2 is 30 s ahead"), "{many}");
        assert!(many.contains(", 1 more machines: "), "{many}");
    }
}
