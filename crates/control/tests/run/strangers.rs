//! Whoever else finds the hub's port.

use super::support::{Event, Hand, calm, framed, hub, part, ranks, secret, short};
use nibble_control::fuzz::{self, rank_of, rank_says, rows};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::net::Shutdown;
use std::time::Duration;

const SCANNERS: [&[u8]; 5] = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a hello of TLS",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x00\x00\x00\x00",
    b"\x00\x00\x00\x05hello",
];

#[test]
fn scanners_do_not_disturb_a_run() {
    let hub = hub(2, calm());
    // These say nothing, or not enough, and are still there when the run ends.
    let mut waiting = [Hand::to(&hub), Hand::to(&hub)];
    waiting[1].0.write_all(b"\x00\x00").unwrap();
    waiting[1].0.shutdown(Shutdown::Read).unwrap();
    let scan = |hub: &_| {
        for bytes in SCANNERS {
            let mut scanner = Hand::to(hub);
            scanner.0.write_all(bytes).unwrap();
            assert!(scanner.frames_until_closed() <= 1, "no more than the hub's greeting");
        }
    };
    scan(&hub);
    let ranks = ranks(&hub, 0..2, 2);
    scan(&hub);
    ranks[0].client.send(1, rows(0, vec![1]));
    assert_eq!(ranks[1].heard.recv().unwrap(), Event::Rows(0, rows(0, vec![1])));
    part(hub, ranks);
    drop(waiting);
}

#[test]
fn who_says_nothing_is_closed() {
    // The deadline is what ends this test: half of it is given to strangers.
    let hub = hub(1, short(Duration::from_millis(400)));
    let mut half = Hand::to(&hub);
    half.0.write_all(b"\x00\x00\x00\x20half").unwrap();
    assert_eq!([Hand::to(&hub), half].map(Hand::frames_until_closed), [1, 1]);
}

#[test]
fn strangers_beyond_the_limit_are_sent_away_and_ranks_come_in_after_them() {
    let hub = hub(1, calm());
    // Each has been greeted, so has its place.
    let strangers: Vec<Hand> = (0..64)
        .map(|_| {
            let mut stranger = Hand::to(&hub);
            stranger.read().unwrap();
            stranger
        })
        .collect();
    assert_eq!(Hand::to(&hub).frames_until_closed(), 0);
    drop(strangers);
    let ranks = ranks(&hub, [0], 1);
    part(hub, ranks);
}

#[test]
fn random_messages_do_not_disturb_a_run() {
    let hub = hub(2, calm());
    let ranks = ranks(&hub, 0..2, 2);
    let honest = fuzz::rank_enters(&fuzz::hub_greets([1; 32]), &secret(), &rank_of(0, 2)).unwrap();
    for number in 0..10_000u32 {
        let random = Sha256::digest(number.to_le_bytes());
        let repeated: Vec<u8> = random.iter().copied().cycle().take(usize::from(random[0]) * 3).collect();
        let bytes = match number % 3 {
            0 => repeated,
            1 => framed(&repeated),
            // An entry that was made for another greeting, with a bit of damage.
            _ => {
                let mut entry = honest.clone();
                let at = usize::from(random[1]) % entry.len();
                entry[at] ^= random[2];
                framed(&entry)
            }
        };
        let mut stranger = Hand::to(&hub);
        // The hub may have closed the connection before all is written.
        let _ = stranger.0.write_all(&bytes).and_then(|()| stranger.0.shutdown(Shutdown::Write));
        assert!(stranger.frames_until_closed() <= 2, "a greeting, and that it is a stranger: {number}");
    }
    ranks[1].client.send(0, rows(0, vec![2]));
    assert_eq!(ranks[0].heard.recv().unwrap(), Event::Rows(1, rows(0, vec![2])));
    part(hub, ranks);
}

#[test]
fn a_handshake_that_was_recorded_is_worth_nothing() {
    let hub = hub(2, calm());
    let (mut hand, recorded) = Hand::rank(&hub, &rank_of(0, 2));
    let rank = ranks(&hub, [1], 2).remove(0);
    let mut replay = Hand::to(&hub);
    replay.write(&recorded);
    assert_eq!(replay.frames_until_closed(), 2, "a greeting, and that it is a stranger");
    // The run goes on.
    let frame = [rank_says(1, 1, "all_gather", 3), vec![4, 5, 6]].concat();
    hand.write(&frame);
    assert_eq!(rank.heard.recv().unwrap(), Event::Rows(0, rows(0, vec![4, 5, 6])));
    hand.write(&rank_says(4, 0, "", 0));
    assert_eq!(rank.heard.recv().unwrap(), Event::Left(0));
    drop(hand);
    part(hub, vec![rank]);
}
