//! Ranks and hubs that are lost, fail, or are silent.

use super::support::{
    Event, Hand, calm, ears, framed, hub, join, join_at, ranks, refused, secret, short, status,
};
use nibble_control::fuzz::{self, rank_of};
use nibble_control::{Client, Ears, Failure, Join, Rows};
use std::io::Write;
use std::net::TcpListener;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[test]
fn a_rank_that_is_dropped_ends_all_others_with_one_message() {
    // What ends this test is the moment that the hub gives those who may know better.
    let hub = hub(4, short(Duration::from_secs(30)));
    let mut ranks = ranks(&hub, 0..4, 4);
    drop(ranks.remove(2));
    for rank in &ranks {
        assert_eq!(
            rank.failed().to_string(),
            "rank 2 on host a, step 12, forward exchange: its connection was lost"
        );
    }
    let failure = hub.failure().unwrap();
    assert_eq!(ranks[0].client.failure(), Some(failure.clone()));
    let left: Vec<_> = ranks.into_iter().map(|rank| rank.client.leave()).collect();
    assert_eq!(left, vec![Err(failure.clone()); 3]);
    assert_eq!(hub.wait(), Err(failure));
}

#[test]
fn who_started_a_process_knows_best_how_it_ended() {
    let hub = hub(2, calm());
    let mut ranks = ranks(&hub, 0..2, 2);
    drop(ranks.remove(0));
    hub.ended(0, "it was killed by SIGKILL");
    let failure = ranks[0].failed();
    assert_eq!(failure.to_string(), "rank 0 on host a, step 12, forward exchange: it was killed by SIGKILL");
    drop(ranks);
    assert_eq!(hub.wait(), Err(failure));
}

#[test]
fn a_rank_that_fails_says_why_and_is_heard() {
    let hub = hub(3, calm());
    let ranks = ranks(&hub, 0..3, 3);
    assert!(ranks[1].client.fail("the loss is not finite", true));
    assert!(ranks[2].client.fail("an echo", false), "the run has failed, and the hub knows");
    for rank in &ranks {
        let failure = rank.failed();
        assert_eq!(
            failure.to_string(),
            "rank 1 on host a, step 12, forward exchange: the loss is not finite"
        );
        assert!(failure.is_user_error);
        assert_eq!(rank.client.failure(), Some(failure));
    }
}

#[test]
fn a_connection_that_is_cut_is_seen_from_both_sides() {
    let hub = hub(2, calm());
    let ranks = ranks(&hub, 0..2, 2);
    ranks[1].client.disconnect();
    let lost = format!("the connection to the hub at {} was lost", hub.address());
    assert_eq!(ranks[1].failed().to_string(), lost);
    assert!(!ranks[1].client.fail("nobody hears this", false));
    hub.ended(1, "it exited with status 1");
    assert_eq!(
        ranks[0].failed().to_string(),
        "rank 1 on host a, step 12, forward exchange: it exited with status 1"
    );
}

#[test]
fn a_hub_that_vanishes_is_named_or_else_rank_0_that_has_it() {
    for hub_is_rank_0 in [false, true] {
        let hub = hub(1, calm());
        let address = hub.address();
        let rank = join(&hub, Join { hub_is_rank_0, ..rank_of(0, 1) }).unwrap();
        drop(hub);
        let failure = rank.failed();
        let lost = format!("the connection to the hub at {address} was lost");
        assert_eq!(failure.cause, lost);
        assert_eq!(failure.rank, hub_is_rank_0.then_some(0));
        assert_eq!(failure.host, if hub_is_rank_0 { "a" } else { "" });
        assert_eq!(rank.client.leave(), Err(failure));
    }
}

#[test]
fn a_rank_that_is_silent_has_failed() {
    // The deadline is what ends this test: nothing else is said.
    let hub = hub(1, short(Duration::from_secs(4)));
    let (mut rank, _) = Hand::rank(&hub, &rank_of(0, 1));
    rank.write(&fuzz::rank_says(0, 12, "optimizer", 0));
    let failure = rank.failure();
    assert_eq!(
        failure.to_string(),
        "rank 0 on host a, step 12, optimizer: nothing was heard from it for 2 s"
    );
    drop(rank);
    assert_eq!(hub.wait(), Err(failure));
}

/// A hub by hand, which lets a rank in, says some things, and then nothing. The connection is given back.
fn silent_hub(listener: TcpListener, says: &[Vec<u8>]) -> Hand {
    let mut hand = Hand(listener.accept().unwrap().0);
    hand.write(&fuzz::hub_greets([7; 32]));
    let (answer, enters) = fuzz::hub_answers([7; 32], &secret(), &hand.read().unwrap()).unwrap();
    assert!(enters);
    hand.write(&answer);
    says.iter().for_each(|frame| hand.write(frame));
    hand
}

#[test]
fn a_hub_that_is_silent_has_failed_and_a_rank_that_stays_is_overdue() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let says = [fuzz::hub_says_all_here("b"), fuzz::hub_is_alive(status())];
    let hub = std::thread::spawn(move || silent_hub(listener, &says));
    let alone = Join { hub_is_rank_0: true, ..rank_of(1, 2) };
    let rank =
        join_at(std::slice::from_ref(&address), &secret(), alone, short(Duration::from_secs(4))).unwrap();
    let failure = rank.failed();
    assert_eq!(
        failure.to_string(),
        format!(
            "rank 0 on host b, step 12, forward exchange: nothing was heard from the hub at {address} for 2 s"
        )
    );
    assert_eq!(rank.heard.recv().unwrap(), Event::Overdue(failure));
    drop(hub.join().unwrap());
}

#[test]
fn a_hub_that_is_lost_before_all_have_come_fails_those_that_have() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let hub = std::thread::spawn(move || drop(silent_hub(listener, &[])));
    let failure = refused(join_at(std::slice::from_ref(&address), &secret(), rank_of(0, 1), calm()));
    assert_eq!(failure.to_string(), format!("the connection to the hub at {address} was lost"));
    hub.join().unwrap();
}

#[test]
fn a_hub_that_sends_no_message_is_given_up() {
    for (wrong, why) in [
        (fuzz::hub_says(5, 0, "x", 0)[..1].to_vec(), "Hit the end of buffer"),
        (fuzz::hub_says(3, 0, "", 0), "bytes that belong to no rows"),
        (fuzz::hub_says(4, 9, "", 0), "unexpected message: Left(9)"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let says = [fuzz::hub_says_all_here("a"), wrong];
        let hub = std::thread::spawn(move || silent_hub(listener, &says));
        let rank = join_at(std::slice::from_ref(&address), &secret(), rank_of(0, 1), calm()).unwrap();
        let said = rank.failed().to_string();
        assert!(said.starts_with(&format!("the hub at {address} sent an invalid message: {why}")), "{said}");
        drop(hub.join().unwrap());
    }
}

#[test]
fn a_known_rank_that_sends_no_message_fails_the_run() {
    let long = [&(2u32 << 20).to_be_bytes()[..], &[0; 64]].concat();
    for (wrong, why) in [
        (framed(&[0xff; 8]), "it sent an invalid message"),
        (long, "it sent an invalid message: frame size too big"),
        (framed(&fuzz::rank_says(1, 7, "x", 1)), "it sent an invalid message: rows for rank 7 of 2"),
    ] {
        let hub = hub(2, calm());
        let (mut wild, _) = Hand::rank(&hub, &rank_of(1, 2));
        let rank = ranks(&hub, [0], 2).remove(0);
        wild.0.write_all(&wrong).unwrap();
        let failure = rank.failed();
        assert!(failure.to_string().starts_with(&format!("rank 1 on host a: {why}")), "{failure}");
        assert_eq!(wild.failure(), failure, "it is told as well");
    }
}

#[test]
fn what_a_rank_does_is_known_before_its_rows_travel() {
    let hub = hub(2, calm());
    let doing = Arc::new(Mutex::new(String::from("start")));
    let told = Arc::clone(&doing);
    let (ears, _heard) = ears();
    let (mut other, _) = Hand::rank(&hub, &rank_of(1, 2));
    let (asked, answers) = channel();
    let status = move || {
        let status = nibble_control::Status { step: Some(3), phase: told.lock().unwrap().clone() };
        // Nobody listens after the first.
        let _ = asked.send(());
        status
    };
    let addresses = [hub.address().to_string()];
    let client = Client::join(&addresses, &secret(), rank_of(0, 2), calm(), status, ears).unwrap();
    // What it did at first is told by the first word; the next one of these is far away.
    answers.recv().unwrap();
    *doing.lock().unwrap() = "backward exchange".into();
    client.send(1, fuzz::rows(0, vec![1, 2, 3]));
    // Once the rows have passed the hub, it knows.
    while !other.read().unwrap().ends_with(&[1, 2, 3]) {}
    drop(client);
    hub.ended(0, "it was killed by SIGKILL");
    assert_eq!(
        other.failure().to_string(),
        "rank 0 on host a, step 3, backward exchange: it was killed by SIGKILL"
    );
}

/// Ears that cannot take rows, and say so.
struct Broken(Sender<()>);

impl Ears for Broken {
    fn rows(&self, _: usize, _: Rows) {
        self.0.send(()).unwrap();
        panic!("this ear is broken, as the test wants it");
    }
    fn left(&self, _: usize) {}
    fn failed(&self, _: &Failure) {}
    fn overdue(&self, _: &Failure) {}
}

#[test]
fn an_ear_that_panics_fails_its_rank_and_nobody_waits() {
    let (sender, heard) = channel();
    let hub = hub(2, calm());
    let addresses = [hub.address().to_string()];
    let (mut other, _) = Hand::rank(&hub, &rank_of(1, 2));
    let client =
        Client::join(&addresses, &secret(), rank_of(0, 2), calm(), status, Arc::new(Broken(sender))).unwrap();
    client.send(0, fuzz::rows(0, vec![1]));
    heard.recv().unwrap();
    let failure = client.leave().unwrap_err();
    assert_eq!(failure.to_string(), "the thread of its connection to the hub has panicked");
    hub.ended(0, "it exited with status 101");
    assert_eq!(
        other.failure().to_string(),
        "rank 0 on host a, step 12, forward exchange: it exited with status 101"
    );
}

#[test]
fn whoever_hosts_the_hub_ends_the_run() {
    let hub = hub(1, calm());
    let rank = ranks(&hub, [0], 1).remove(0);
    let failure = Failure { cause: "the launcher was interrupted".into(), ..Failure::default() };
    hub.fail(failure.clone());
    assert_eq!(rank.failed(), failure);
    assert_eq!(refused(join(&hub, rank_of(0, 1))), failure, "who comes late is told");
}
