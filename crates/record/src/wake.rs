//! The queue of a machine, which tells its agent that the record has changed in a way that it acts on.
//!
//! A message has no content that counts: the record decides. One that is lost delays its agent until it reads the record
//! by itself, so nothing waits for a message to be sent.

use std::time::Duration;

use crate::{Instance, State};

/// How often an agent reads its record while its queue tells of changes. It bounds what a lost message costs, and is well
/// below the time that a claim gives a machine to register.
pub const RECORD_REFRESH: Duration = Duration::from_secs(15);

/// The tag of a queue that names its machine by the ARN: a machine's policy grants the queue with its own.
pub const MACHINE_TAG: &str = "paddock:machine";

/// What the names of a cluster's machine queues start with.
pub fn wake_queue_prefix(cluster: &str) -> String {
    format!("paddock-{cluster}-wake-i-")
}

/// The name of the machine's queue.
pub fn wake_queue(cluster: &str, instance_id: &str) -> String {
    format!("{}{}", wake_queue_prefix(cluster), instance_id.trim_start_matches("i-"))
}

/// The machine whose queue has this name. An idle queue may have the same prefix, but contains more dashes.
pub fn machine_of_wake_queue(cluster: &str, name: &str) -> Option<String> {
    let number = name.strip_prefix(&wake_queue_prefix(cluster))?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number.then(|| format!("i-{number}"))
}

/// Whether the agent acts on this change of its record at once.
pub fn wakes(seen: &Instance, next: &Instance) -> bool {
    let has_new_token = !next.sealed.is_empty() && next.sealed != seen.sealed;
    next.run_id != seen.run_id || has_new_token || next.state == State::Terminated
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::item::tests::instance;

    #[test]
    fn a_queue_is_named_by_cluster_and_machine() {
        let name = wake_queue("prod", "i-0123456789abcdef0");
        assert_eq!(name, "paddock-prod-wake-i-0123456789abcdef0");
        assert_eq!(machine_of_wake_queue("prod", &name).as_deref(), Some("i-0123456789abcdef0"));
        assert!(wake_queue(&"c".repeat(32), "i-0123456789abcdef0").len() <= 80, "the limit of SQS");
        for other in [wake_queue("prod-wake-i", "i-1"), wake_queue("staging", "i-1")] {
            assert_eq!(machine_of_wake_queue("prod", &other), None, "{other}");
        }
        let idle_queue = "paddock-prod-wake-i-small-0123456789abcdef";
        assert_eq!(machine_of_wake_queue("prod", idle_queue), None, "pool i in namespace wake");
    }

    #[test]
    fn an_agent_is_woken_for_a_run_a_token_and_its_end() {
        let idle = instance(State::Idle);
        let change = |change: fn(&mut Instance)| {
            let mut next = idle.clone();
            change(&mut next);
            wakes(&idle, &next)
        };
        assert!(change(|next| next.run_id = "7891".into()));
        assert!(change(|next| next.sealed = "token".into()));
        assert!(change(|next| next.state = State::Terminated));
        assert!(!change(|next| next.threshold = None), "renewed");
        assert!(!change(|next| next.sealed.clear()), "started or pooled");
    }
}
