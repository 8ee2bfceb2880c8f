//! Ranks that do not belong to the run, and hubs that are not the rank's.

use super::support::{Hand, address, calm, hub, join, join_at, part, ranks, refused, secret};
use nibble_control::fuzz::rank_of;
use nibble_control::{Client, Error, Failure, Hub, Join, Limits, Secret};
use std::net::TcpListener;
use std::time::Duration;

/// Rank 0 of two has come; then comes another, and both are told the same.
fn refusal(other: Join) -> Failure {
    let hub = hub(2, calm());
    let (mut first, _) = Hand::rank(&hub, &rank_of(0, 2));
    let failure = refused(join(&hub, other));
    assert_eq!(first.failure(), failure);
    assert_eq!(hub.failure(), Some(failure.clone()));
    assert!(failure.is_user_error);
    drop(first);
    assert_eq!(hub.wait(), Err(failure.clone()));
    failure
}

#[test]
fn another_version_is_refused() {
    let other = Join { version: "nibble 2".into(), host: "b".into(), ..rank_of(1, 2) };
    assert_eq!(
        refusal(other).to_string(),
        "rank 1 on host b: it is nibble 2, rank 0 is nibble 1: start all ranks with the same program"
    );
}

#[test]
fn another_configuration_is_refused() {
    let other = Join { config: "[train]\nlr = 0.2\n".into(), ..rank_of(1, 2) };
    assert_eq!(
        refusal(other).to_string(),
        "rank 1 on host a: its configuration differs: train.lr: 0.2 here, 0.1 on rank 0"
    );
}

#[test]
fn another_world_is_refused() {
    assert_eq!(
        refusal(rank_of(1, 3)).to_string(),
        "rank 1 on host a: it was started as one of 3 ranks, but this run has 2"
    );
}

#[test]
fn a_rank_that_has_come_already_is_refused() {
    let other = Join { pid: 7, host: "b".into(), ..rank_of(0, 2) };
    assert_eq!(
        refusal(other).to_string(),
        "rank 0 on host b: process 100 on host a has already joined as this rank, before process 7: start each rank once"
    );
}

#[test]
fn one_rank_too_many_is_refused() {
    assert_eq!(
        refusal(rank_of(2, 2)).to_string(),
        "rank 2 on host a: there is no such rank: the 2 ranks are 0 to 1"
    );
}

#[test]
fn too_few_ranks_end_those_that_have_come() {
    let hub = hub(4, Limits { join: Duration::from_millis(300), ..calm() });
    let failure = refused(join(&hub, rank_of(0, 4)));
    assert!(failure.cause.ends_with("of 4 have not joined within 0.3 s"), "{failure}");
    assert!(failure.is_user_error);
    assert_eq!(hub.wait(), Err(failure));
}

#[test]
fn another_secret_is_refused_at_once_and_the_run_goes_on() {
    let hub = hub(1, calm());
    let other = Secret::random().unwrap();
    let error = join_at(&address(&hub), &other, rank_of(0, 1), calm()).err().unwrap();
    assert!(error.is_user_error());
    assert_eq!(
        error.to_string(),
        format!(
            "no hub of this run was found: at {} the hub has another secret: give all ranks of a run the same one",
            hub.address()
        )
    );
    let ranks = ranks(&hub, [0], 1);
    part(hub, ranks);
}

#[test]
fn where_no_hub_of_the_run_is_found_who_answers_is_named_first() {
    let other = hub(1, calm());
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let addresses = [nobody.clone(), other.address().to_string()];
    let limits = Limits { join: Duration::from_millis(300), ..calm() };
    let error =
        join_at(&addresses, &Secret::random().unwrap(), rank_of(0, 1), limits).err().unwrap().to_string();
    let other = other.address();
    let begins = format!("no hub of this run was found within 0.3 s: at {other} the hub has another secret");
    assert!(error.starts_with(&begins), "{error}");
    assert!(error.contains(&format!("; at {nobody} there is no answer: ")), "{error}");
    let none = join_at(&[], &secret(), rank_of(0, 1), limits).err().unwrap().to_string();
    assert_eq!(none, "no hub of this run was found: no address was given");
}

#[test]
fn two_runs_on_the_same_addresses_do_not_meet() {
    let secrets = [Secret::random().unwrap(), Secret::random().unwrap()];
    let hubs = secrets
        .clone()
        .map(|secret| Hub::start(TcpListener::bind("127.0.0.1:0").unwrap(), secret, 2, calm()).unwrap());
    let addresses: Vec<String> = hubs.iter().map(|hub| hub.address().to_string()).collect();
    let runs = std::thread::scope(|scope| {
        let joining = [(0, 0), (1, 0), (0, 1), (1, 1)].map(|(run, rank)| {
            let (addresses, secret) = (&addresses, &secrets[run]);
            scope.spawn(move || {
                let join = Join { version: format!("run {run}"), ..rank_of(rank, 2) };
                join_at(addresses, secret, join, calm()).unwrap()
            })
        });
        joining.map(|thread| thread.join().unwrap())
    });
    runs.into_iter().for_each(|rank| rank.client.leave().unwrap());
    hubs.into_iter().for_each(|hub| hub.wait().unwrap());
}

#[test]
fn what_cannot_begin_says_why() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let none = Hub::start(listener, secret(), 0, calm()).err().unwrap();
    assert_eq!(none.to_string(), "a run of 0 ranks, expected at least 1");
    let hub = hub(1, calm());
    let long = Join { config: "x".repeat(100_000), ..rank_of(0, 1) };
    let error: Result<Client, Error> = join(&hub, long).map(|rank| rank.client);
    assert_eq!(
        error.err().unwrap().to_string(),
        "the configuration has 100000 bytes, expected at most 57344"
    );
}

#[test]
fn limits_of_any_size_are_taken() {
    for time in [Duration::ZERO, Duration::MAX] {
        let limits = Limits { deadline: time, join: time };
        let hub = hub(1, limits);
        drop(join_at(&address(&hub), &secret(), rank_of(0, 1), limits));
    }
}
