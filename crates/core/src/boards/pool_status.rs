//! The status of a board pool.

use std::sync::Arc;

use jiff::Timestamp;

use super::worker::state;
use crate::api::{
    PoolKind, PoolReason, RunnerPool, RunnerPoolStatus, Slots, Worker, WorkerCounts, WorkerState, ready_condition,
    set_condition,
};

/// `slots`: total and free. `obstacle`: what keeps the pool from creating workers.
pub fn status(
    pool: &RunnerPool,
    workers: &[Arc<Worker>],
    (total, free): (u32, u32),
    obstacle: Option<String>,
    now: Timestamp,
) -> RunnerPoolStatus {
    let mut status = pool.status.clone().unwrap_or_default();
    status.kind = Some(PoolKind::Board);
    status.workers = counts(workers);
    status.slots = Some(Slots::new(total, free));
    status.observed_generation = pool.metadata.generation;
    let board = pool.spec.board.as_ref().map(|board| board.board.as_str()).unwrap_or_default();
    let (ready, reason, message) = match obstacle {
        Some(why) => (false, PoolReason::CredentialsMissing, why),
        None if total == 0 => (false, PoolReason::NoBoards, format!("no ready node with slots carries board {board}")),
        None => (true, PoolReason::Ready, "jobs are served".into()),
    };
    set_condition(&mut status.conditions, ready_condition(ready, reason, message, pool.metadata.generation, now));
    status
}

/// The status of a deleted pool that waits for the runners of these workers.
pub fn deleting(pool: &RunnerPool, workers: &[Arc<Worker>], now: Timestamp) -> RunnerPoolStatus {
    let mut status = pool.status.clone().unwrap_or_default();
    status.workers = counts(workers);
    let message = format!("waiting for {} workers to give their runners back", workers.len());
    let condition = ready_condition(false, PoolReason::Deleting, message, pool.metadata.generation, now);
    set_condition(&mut status.conditions, condition);
    status
}

fn counts(workers: &[Arc<Worker>]) -> WorkerCounts {
    let of = |wanted| workers.iter().filter(|worker| state(worker) == wanted).count() as u32;
    WorkerCounts {
        pending: of(WorkerState::Pending),
        running: of(WorkerState::Running),
        completed: of(WorkerState::Completed),
        failed: of(WorkerState::Failed),
        ..WorkerCounts::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::READY, fixtures::boards::board_pool};

    #[test]
    fn a_pool_without_slots_or_credentials_is_not_ready_and_says_why() {
        let pool = board_pool("p");
        for (slots, obstacle, expected) in [
            ((4, 1), None, ("True", "Ready", "jobs are served")),
            ((0, 0), None, ("False", "NoBoards", "no ready node with slots carries board b")),
            ((4, 4), Some("no Secret".to_owned()), ("False", "CredentialsMissing", "no Secret")),
        ] {
            let status = status(&pool, &[], slots, obstacle, Timestamp::UNIX_EPOCH);
            let ready = status.conditions.iter().find(|condition| condition.type_ == READY).unwrap();
            assert_eq!((ready.status.as_str(), ready.reason.as_str(), ready.message.as_str()), expected);
            assert_eq!(status.slots, Some(Slots::new(slots.0, slots.1)));
        }
    }
}
