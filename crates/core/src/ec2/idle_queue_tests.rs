//! Tables of inputs, and what the state machine makes of each.

use super::*;
use crate::ec2::matching::{
    EMPTY_POLLS, SEEN_LIMIT,
    tests::{NOW, idle_message, needs},
};

/// A machine whose type starts with the first letter of its id.
pub(super) fn machine(id: &str) -> IdleMessage {
    idle_message(id, "medium", &format!("{}6i.large", &id[..1]))
}

fn message(id: &str) -> Received {
    Received { receipt: format!("receipt of {id}"), body: machine(id).write() }
}

fn messages(ids: &[&str]) -> Vec<Received> {
    ids.iter().map(|id| message(id)).collect()
}

fn selected(id: &str) -> Selected {
    Selected { machine: machine(id), message: Some(message(id)) }
}

fn known_to_ledger(id: &str) -> Selected {
    Selected { machine: machine(id), message: None }
}

fn request(id: RequestId, types: &str, count: u32) -> Input {
    Input::Request { id, needs: needs(types), count }
}

fn received(ids: &[&str]) -> Input {
    Input::Received { messages: messages(ids), failed: false }
}

fn listed(ids: &[&str]) -> Input {
    Input::Listed(ids.iter().map(|id| machine(id)).collect())
}

fn settled(id: &str, disposition: Disposition) -> Input {
    Input::Settled(selected(id), disposition)
}

fn answer(request: RequestId, selected: Vec<Selected>) -> Output {
    Output::Answer { request, selected, exhausted: false }
}

fn exhausted(request: RequestId, selected: Vec<Selected>) -> Output {
    Output::Answer { request, selected, exhausted: true }
}

fn put_back(ids: &[&str]) -> Output {
    Output::PutBack(messages(ids), PUT_BACK_DELAY)
}

fn show_at_once(ids: &[&str]) -> Output {
    Output::PutBack(messages(ids), Duration::ZERO)
}

const GO_ON: Output = Output::Wait(Duration::ZERO);

pub(super) fn at(millis: u64) -> Timestamp {
    NOW + Duration::from_millis(millis)
}

/// Feeds inputs at their times, in milliseconds, and compares all that comes out.
#[track_caller]
fn check_with(availability: impl Fn(&IdleMessage) -> Availability, table: Vec<(u64, Input, Vec<Output>)>) {
    let mut queue = IdleQueue::default();
    for (row, (millis, input, outputs)) in table.into_iter().enumerate() {
        assert_eq!(queue.step(input.clone(), &availability, at(millis)), outputs, "row {row}: {input:?}");
    }
}

#[track_caller]
fn check(table: Vec<(u64, Input, Vec<Output>)>) {
    check_with(|_| Availability::Free, table);
}

/// Polls that bring nothing, before the one that exhausts the queue.
fn empty_polls(count: u32) -> impl Iterator<Item = (u64, Input, Vec<Output>)> {
    (0..count).flat_map(|_| [(0, Input::Tick, vec![Output::Receive(1)]), (0, received(&[]), vec![GO_ON])])
}

#[test]
fn one_request_is_served_at_once_and_its_message_deleted_after_a_while() {
    check(vec![
        (0, request(1, "c*", 1), vec![GO_ON]),
        (0, Input::Tick, vec![Output::Receive(1)]),
        (5, received(&["c-1"]), vec![answer(1, vec![selected("c-1")])]),
        (9, settled("c-1", Disposition::Over), vec![GO_ON]),
        (9, Input::Tick, vec![Output::Wait(DELETE_DELAY)]),
        (1009, Input::Tick, vec![Output::Delete(messages(&["c-1"]))]),
    ]);
}

#[test]
fn requests_share_a_batch_first_come_first_served() {
    check(vec![
        (0, request(1, "c*", 1), vec![GO_ON]),
        (0, request(2, "*", 2), vec![GO_ON]),
        (0, Input::Tick, vec![Output::Receive(1)]),
        (
            0,
            received(&["m-1", "c-1", "c-2"]),
            vec![answer(1, vec![selected("c-1")]), answer(2, vec![selected("m-1"), selected("c-2")])],
        ),
    ]);
}

#[test]
fn as_many_batches_are_received_as_machines_are_missing() {
    for (counts, batches) in [([1, 0], 1), ([10, 0], 1), ([10, 1], 2), ([15, 30], 5), ([100, 1], 10), ([5000, 0], 10)] {
        check(vec![
            (0, request(1, "c*", counts[0]), vec![GO_ON]),
            (0, request(2, "m*", counts[1]), vec![GO_ON]),
            (0, Input::Tick, vec![Output::Receive(batches)]),
        ]);
    }
}

#[test]
fn a_mismatch_is_put_back_and_recalled_until_shortly_before_it_becomes_visible() {
    for (millis, recalled) in [(2499, vec![answer(2, vec![selected("m-1")])]), (2500, vec![Output::Receive(1)])] {
        check(vec![
            (0, request(1, "c*", 1), vec![GO_ON]),
            (0, Input::Tick, vec![Output::Receive(1)]),
            (0, received(&["m-1", "c-1"]), vec![put_back(&["m-1"]), answer(1, vec![selected("c-1")])]),
            (millis, request(2, "m*", 1), vec![GO_ON]),
            (millis, Input::Tick, recalled),
        ]);
    }
}

#[test]
fn useless_messages_are_discarded_with_their_reason() {
    let garbage = Received { receipt: "receipt of garbage".into(), body: "garbage".into() };
    let expired = IdleMessage { threshold: "1969-12-31T00:00:00Z".into(), ..machine("c-expired") };
    let expired = Received { receipt: "receipt of expired".into(), body: expired.write() };
    let all = vec![garbage.clone(), expired.clone(), message("c-foreign"), message("c-taken"), message("c-outdated")];
    let malformed = IdleMessage::read("garbage", NOW).unwrap_err();
    assert_eq!(malformed.reason(), "malformed");
    let availability = |machine: &IdleMessage| match machine.instance_id.as_str() {
        "c-foreign" => Availability::Foreign,
        "c-taken" => Availability::Taken,
        "c-outdated" => Availability::Outdated,
        _ => Availability::Free,
    };
    let discarded = vec![
        Output::Discarded(garbage, malformed),
        Output::Discarded(expired, Discard::Expired),
        Output::Discarded(message("c-foreign"), Discard::Foreign),
        Output::Discarded(message("c-taken"), Discard::Taken),
        Output::Discarded(message("c-outdated"), Discard::Outdated),
        GO_ON,
    ];
    check_with(
        availability,
        vec![
            (0, request(1, "c*", 1), vec![GO_ON]),
            (0, Input::Tick, vec![Output::Receive(1)]),
            (0, Input::Received { messages: all.clone(), failed: false }, discarded),
            (0, Input::Tick, vec![Output::Delete(all), Output::Receive(1)]),
        ],
    );
}

#[test]
fn empty_polls_in_a_row_exhaust_the_queue() {
    let mut table = vec![(0, request(1, "c*", 1), vec![GO_ON])];
    table.extend(empty_polls(EMPTY_POLLS - 1));
    table.extend([
        (0, Input::Tick, vec![Output::Receive(1)]),
        (0, received(&[]), vec![Output::ListFree(vec![needs("c*")])]),
        (0, listed(&[]), vec![exhausted(1, vec![])]),
    ]);
    check(table);
}

#[test]
fn one_id_seen_too_often_exhausts_the_queue() {
    let mut table = vec![(0, request(1, "c*", 1), vec![GO_ON])];
    for _ in 1..SEEN_LIMIT {
        table.push((0, Input::Tick, vec![Output::Receive(1)]));
        table.push((0, received(&["m-1"]), vec![put_back(&["m-1"]), GO_ON]));
    }
    table.extend([
        (0, Input::Tick, vec![Output::Receive(1)]),
        (0, received(&["m-1"]), vec![put_back(&["m-1"]), Output::ListFree(vec![needs("c*")])]),
        (0, listed(&[]), vec![exhausted(1, vec![])]),
    ]);
    check(table);
}

#[test]
fn free_machines_that_only_the_ledger_knows_come_before_new_ones() {
    let first = known_to_ledger("c-1");
    for (count, answered) in [(1, answer(1, vec![first.clone()])), (2, exhausted(1, vec![first.clone()]))] {
        let mut table = vec![(0, request(1, "c*", count), vec![GO_ON])];
        table.extend(empty_polls(EMPTY_POLLS - 1));
        table.extend([
            (0, Input::Tick, vec![Output::Receive(1)]),
            (0, received(&[]), vec![Output::ListFree(vec![needs("c*")])]),
            (0, listed(&["m-1", "c-1"]), vec![answered]),
            (0, Input::Settled(first.clone(), Disposition::Over), vec![GO_ON]),
            // There is no message to delete.
            (0, Input::Tick, vec![]),
        ]);
        check(table);
    }
}

#[test]
fn a_machine_handed_out_to_an_earlier_request_is_waited_for() {
    let mut table = vec![
        (0, request(1, "c*", 1), vec![GO_ON]),
        (0, Input::Tick, vec![Output::Receive(1)]),
        (0, received(&["c-1"]), vec![answer(1, vec![selected("c-1")])]),
        (0, request(2, "c*", 1), vec![GO_ON]),
    ];
    table.extend(empty_polls(EMPTY_POLLS - 1));
    table.extend([
        (0, Input::Tick, vec![Output::Receive(1)]),
        (0, received(&[]), vec![Output::ListFree(vec![needs("c*")])]),
        (0, listed(&["c-1"]), vec![Output::Wait(SETTLE_WAIT)]),
        (20, Input::Tick, vec![Output::Receive(1)]),
        // Another message of the same machine does not hand it out twice.
        (20, received(&["c-1"]), vec![put_back(&["c-1"]), GO_ON]),
        (20, settled("c-1", Disposition::Unused), vec![GO_ON]),
        // The message that was put back is recalled at once.
        (20, Input::Tick, vec![show_at_once(&["c-1"]), answer(2, vec![selected("c-1")])]),
    ]);
    check(table);
}

#[test]
fn a_machine_handed_out_to_a_later_request_is_not_waited_for() {
    let poll = |outputs| [(0, Input::Tick, vec![Output::Receive(1)]), (0, received(&[]), outputs)];
    let mut table = vec![
        (0, request(1, "c*", 1), vec![GO_ON]),
        (0, Input::Tick, vec![Output::Receive(1)]),
        (0, received(&["c-1"]), vec![answer(1, vec![selected("c-1")])]),
        (0, request(2, "c*", 1), vec![GO_ON]),
    ];
    table.extend(poll(vec![GO_ON]));
    table.push((0, request(3, "*", 2), vec![GO_ON]));
    table.extend(poll(vec![GO_ON]));
    // Request 2 waits for c-1 and polls again from the start; request 3 is exhausted first and gets c-2, which has become
    // free, but still wants another one.
    table.extend(poll(vec![Output::ListFree(vec![needs("c*")])]));
    table.push((0, listed(&["c-1"]), vec![Output::Wait(SETTLE_WAIT)]));
    table.extend(poll(vec![Output::ListFree(vec![needs("*")])]));
    table.push((0, listed(&["c-1", "c-2"]), vec![Output::Wait(SETTLE_WAIT)]));
    table.extend(poll(vec![GO_ON]));
    table.push((0, settled("c-1", Disposition::Over), vec![GO_ON]));
    table.extend(poll(vec![Output::ListFree(vec![needs("c*")])]));
    table.push((0, listed(&["c-2"]), vec![exhausted(2, vec![]), GO_ON]));
    check(table);
}

#[test]
fn a_failed_receive_answers_all_and_frees_what_they_had() {
    check(vec![
        (0, request(1, "c*", 2), vec![GO_ON]),
        (0, request(2, "m*", 1), vec![GO_ON]),
        (0, Input::Tick, vec![Output::Receive(1)]),
        // One receive of several may fail.
        (0, Input::Received { messages: messages(&["c-1"]), failed: true }, vec![GO_ON]),
        (0, Input::Tick, vec![Output::Receive(1)]),
        (0, Input::Received { messages: vec![], failed: true }, vec![Output::Fail(1), Output::Fail(2), GO_ON]),
        (0, Input::Tick, vec![show_at_once(&["c-1"])]),
        (0, request(3, "c*", 1), vec![GO_ON]),
        (0, Input::Tick, vec![Output::Receive(1)]),
        (0, received(&["c-1"]), vec![answer(3, vec![selected("c-1")])]),
    ]);
}

#[test]
fn a_machine_that_was_not_claimed_is_shown_again() {
    for (disposition, shown) in [(Disposition::Unused, show_at_once(&["c-1"])), (Disposition::Busy, put_back(&["c-1"]))]
    {
        check(vec![
            (0, request(1, "c*", 1), vec![GO_ON]),
            (0, Input::Tick, vec![Output::Receive(1)]),
            (0, received(&["c-1"]), vec![answer(1, vec![selected("c-1")])]),
            (0, settled("c-1", disposition), vec![GO_ON]),
            (0, Input::Tick, vec![shown]),
        ]);
    }
}

#[test]
fn a_full_batch_of_deletions_does_not_wait() {
    let ids: Vec<_> = (0..BATCH).map(|number| format!("c-{number}")).collect();
    let ids: Vec<_> = ids.iter().map(String::as_str).collect();
    let all = ids.iter().map(|id| selected(id)).collect();
    let mut table = vec![
        (0, request(1, "c*", BATCH as u32), vec![GO_ON]),
        (0, Input::Tick, vec![Output::Receive(1)]),
        (0, received(&ids), vec![answer(1, all)]),
    ];
    table.extend(ids.iter().map(|id| (0, settled(id, Disposition::Over), vec![GO_ON])));
    table.push((0, Input::Tick, vec![Output::Delete(messages(&ids))]));
    check(table);
}
