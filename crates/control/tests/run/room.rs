//! What a hub concludes from what it hears and when, without sockets and without a clock.

use nibble_control::fuzz::{HubSide, failure_in, rank_of, rank_says};
use nibble_control::{Failure, Join, Limits};
use std::time::Duration;

fn running(world: usize) -> HubSide {
    HubSide::new(world, world, Limits::default())
}

fn said(hub: &HubSide) -> Option<String> {
    hub.failure().map(Failure::to_string)
}

fn leave() -> Vec<u8> {
    rank_says(4, 0, "", 0)
}

#[test]
fn ranks_that_have_not_come_are_named() {
    for (world, here, expected) in [
        (4, 2, "ranks 2 and 3 of 4 have not joined within 300 s"),
        (4, 3, "rank 3 of 4 has not joined within 300 s"),
        (5, 1, "ranks 1, 2, 3 and 4 of 5 have not joined within 300 s"),
        (
            40,
            1,
            "ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 23 others of 40 have not joined within 300 s",
        ),
    ] {
        let mut hub = HubSide::new(world, here, Limits::default());
        hub.pass_time(Duration::from_millis(299_999));
        assert_eq!(said(&hub), None);
        hub.pass_time(Duration::from_millis(1));
        assert_eq!(said(&hub).unwrap(), expected);
        let told: Vec<Failure> = hub.told(0).iter().filter_map(|frame| failure_in(frame)).collect();
        assert_eq!(told, [hub.failure().unwrap().clone()]);
    }
}

#[test]
fn a_rank_that_comes_once_too_often_later_does_not_end_the_run() {
    let mut hub = running(2);
    hub.pass_time(Duration::from_secs(300));
    let refused = hub.enter(Join { pid: 9, ..rank_of(1, 2) }).unwrap();
    assert!(refused.cause.contains("before process 9"), "{refused}");
    assert_eq!(said(&hub), None);
}

#[test]
fn the_cause_of_a_lost_connection_is_waited_for() {
    let mut hub = running(3);
    hub.hear(1, &rank_says(0, 7, "dispatch", 0));
    hub.lost(1);
    // What others say of it meanwhile is a consequence.
    hub.hear(2, &rank_says(3, 7, "the exchange ended", 0));
    hub.lost(0);
    assert_eq!(said(&hub), None);
    hub.ended(1, "it was killed by SIGKILL");
    assert_eq!(said(&hub).unwrap(), "rank 1 on host a, step 7, dispatch: it was killed by SIGKILL");

    let mut hub = running(2);
    hub.lost(0);
    hub.pass(1);
    assert_eq!(said(&hub).unwrap(), "rank 0 on host a: its connection was lost");
}

#[test]
fn a_rank_that_is_lost_before_all_have_come_fails_the_run() {
    let mut hub = HubSide::new(3, 2, Limits::default());
    hub.lost(1);
    hub.pass(1);
    assert_eq!(said(&hub).unwrap(), "rank 1 on host a: its connection was lost");
    assert_eq!(hub.enter(rank_of(2, 3)), hub.failure().cloned());
}

#[test]
fn what_an_ended_process_said_last_comes_first() {
    // It left in peace: the word of its end overtook it.
    let mut hub = running(2);
    hub.ended(1, "it exited with status 0");
    hub.hear(1, &leave());
    hub.pass(16);
    assert_eq!(said(&hub), None);
    // It said why itself.
    let mut hub = running(2);
    hub.ended(1, "it exited with status 1");
    hub.hear(1, &rank_says(3, 4, "no room", 0));
    assert_eq!(said(&hub).unwrap(), "rank 1 on host a, step 4, no room: no room");
    // It said nothing.
    let mut hub = running(2);
    hub.ended(1, "it exited with status 1");
    hub.lost(1);
    assert_eq!(said(&hub).unwrap(), "rank 1 on host a: it exited with status 1");
    // Nor is its connection seen to end.
    let mut hub = running(2);
    hub.ended(1, "it exited with status 1");
    hub.pass(1);
    assert_eq!(said(&hub).unwrap(), "rank 1 on host a: it exited with status 1");
}

#[test]
fn a_failure_is_not_lost_behind_a_suspect_that_left_in_peace() {
    let mut hub = running(3);
    hub.ended(1, "it exited with status 0");
    hub.hear(2, &rank_says(3, 4, "no room", 0));
    assert_eq!(said(&hub), None);
    hub.hear(1, &leave());
    assert_eq!(said(&hub).unwrap(), "rank 2 on host a, step 4, no room: no room");
}

#[test]
fn a_process_that_ends_before_it_has_joined_fails_the_run() {
    let mut hub = HubSide::new(2, 1, Limits::default());
    hub.ended(1, "it exited with status 2");
    assert_eq!(said(&hub).unwrap(), "rank 1: it exited with status 2, before it had joined");
}

#[test]
fn a_run_whose_ranks_have_left_does_not_fail() {
    let mut hub = running(2);
    (0..2).for_each(|rank| hub.hear(rank, &leave()));
    assert!(hub.is_over());
    hub.ended(0, "it exited with status 0");
    hub.lost(1);
    hub.fail(Failure { cause: "too late".into(), ..Failure::default() });
    assert!(hub.enter(rank_of(0, 2)).is_some_and(|failure| failure.cause == "the run has ended"));
    hub.pass(64);
    assert_eq!(said(&hub), None);
}

#[test]
fn the_rank_that_sends_rows_out_of_turn_has_failed_and_the_first_failure_stays() {
    let mut hub = running(2);
    hub.hear(1, &[rank_says(2, 0, "", 0), vec![1]].concat());
    let first = "rank 1 on host a: it sent an invalid message: bytes that belong to no rows";
    assert_eq!(said(&hub).unwrap(), first);
    hub.fail(Failure { cause: "later".into(), ..Failure::default() });
    assert_eq!(said(&hub).unwrap(), first);
}
