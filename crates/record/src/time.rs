use jiff::Timestamp;

/// Formats a time as ISO-8601 UTC with milliseconds. The fixed width makes the texts sort like the times, as DynamoDB
/// conditions such as `threshold > :now` require.
pub fn stamp(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// Parses any ISO-8601 time with an offset.
pub fn instant(text: &str) -> Option<Timestamp> {
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_sort_like_their_times() {
        let times = [0, 1, 999, 1_000, 1_001, 60_000, 1_748_693_999_999, 1_748_694_000_000];
        let texts: Vec<_> = times.iter().map(|ms| stamp(Timestamp::from_millisecond(*ms).unwrap())).collect();
        assert!(texts.is_sorted(), "{texts:?}");
        assert_eq!(texts[1], "1970-01-01T00:00:00.001Z");
        for (text, ms) in texts.iter().zip(times) {
            assert_eq!(instant(text).unwrap().as_millisecond(), ms);
        }
    }

    #[test]
    fn times_without_a_fraction_are_parsed() {
        assert_eq!(instant("2025-05-31T12:20:00Z").map(stamp).as_deref(), Some("2025-05-31T12:20:00.000Z"));
        assert_eq!(instant("yesterday"), None);
    }
}
