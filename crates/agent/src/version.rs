//! Versions of the GitHub runner, such as `2.330.0`.

/// Whether the first version is older than the second. What is no version is not older than anything.
pub fn is_older(version: &str, than: &str) -> bool {
    matches!((numbers(version), numbers(than)), (Some(version), Some(than)) if version < than)
}

fn numbers(version: &str) -> Option<Vec<u32>> {
    let version = version.trim().trim_start_matches('v');
    version.split('.').map(|part| part.parse().ok()).collect::<Option<Vec<_>>>().filter(|numbers| numbers.len() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_number_by_number() {
        assert!(is_older("2.330.0", "2.336.0") && is_older("2.9.0", "v2.10.0"));
        assert!(!is_older("2.336.0", "2.336.0") && !is_older("2.337.0", "2.336.0") && !is_older("3.0.0", "2.336.0"));
        assert!(!is_older("", "2.336.0") && !is_older("2.330.0", "") && !is_older("7", "2.336.0"));
    }
}
