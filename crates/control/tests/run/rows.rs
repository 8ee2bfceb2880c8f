//! Rows of bytes from rank to rank.

use super::support::{Event, Hand, calm, hub, part, ranks};
use nibble_control::fuzz::{rank_of, rank_says, rows};

/// Some MiB that no other pair and number have.
fn content(from: usize, to: usize, number: u64) -> Vec<u8> {
    let seed = (from * 64 + to * 8) as u64 + number;
    let len = (3 << 20) * usize::from(number < 3) + from + to;
    (0..len as u64).map(|i| ((i ^ seed) * 31 + (i >> 12)) as u8).collect()
}

#[test]
fn four_ranks_exchange_rows_in_order() {
    let hub = hub(4, calm());
    let ranks = ranks(&hub, 0..4, 4);
    for number in 0..4 {
        for (from, rank) in ranks.iter().enumerate() {
            (0..4).for_each(|to| rank.client.send(to, rows(number, content(from, to, number))));
        }
    }
    for (to, rank) in ranks.iter().enumerate() {
        let mut next = [0; 4];
        for _ in 0..16 {
            let Event::Rows(from, heard) = rank.heard.recv().unwrap() else { panic!("no rows") };
            assert_eq!(heard.number, next[from], "from {from} to {to}");
            assert!(
                heard == rows(next[from], content(from, to, next[from])),
                "{from} to {to}: {}",
                heard.number
            );
            next[from] += 1;
        }
    }
    part(hub, ranks);
}

#[test]
fn eight_ranks_pass_rows_on() {
    let hub = hub(8, calm());
    let ranks = ranks(&hub, 0..8, 8);
    ranks[0].client.send(1, rows(0, vec![0]));
    for (i, rank) in ranks.iter().enumerate().cycle().skip(1).take(8) {
        let Event::Rows(from, mut rows) = rank.heard.recv().unwrap() else { panic!("no rows") };
        assert_eq!(from, (i + 7) % 8);
        rows.bytes.push(i as u8);
        rank.client.send((i + 1) % 8, rows);
    }
    let Event::Rows(0, passed) = ranks[1].heard.recv().unwrap() else { panic!("no rows of rank 0") };
    assert_eq!(passed.bytes, [0, 1, 2, 3, 4, 5, 6, 7, 0]);
    part(hub, ranks);
}

#[test]
fn a_rank_that_leaves_is_heard_to_the_end() {
    let hub = hub(2, calm());
    let mut ranks = ranks(&hub, 0..2, 2);
    let [stays, leaves] = [ranks.remove(0), ranks.remove(0)];
    leaves.client.send(0, rows(0, content(1, 0, 0)));
    leaves.client.leave().unwrap();
    assert!(stays.heard.recv().unwrap() == Event::Rows(1, rows(0, content(1, 0, 0))));
    assert_eq!(stays.heard.recv().unwrap(), Event::Left(1));
    // Nobody is there to take them, and nothing is wrong.
    stays.client.send(1, rows(1, vec![1, 2, 3]));
    part(hub, vec![stays]);
}

#[test]
fn no_rank_waits_for_one_that_does_not_read() {
    let hub = hub(3, calm());
    let (mut silent, _) = Hand::rank(&hub, &rank_of(2, 3));
    let ranks = ranks(&hub, 0..2, 3);
    // More than sockets hold.
    (0..16).for_each(|number| ranks[0].client.send(2, rows(number, vec![7; 4 << 20])));
    ranks[0].client.send(1, rows(16, vec![8]));
    assert_eq!(ranks[1].heard.recv().unwrap(), Event::Rows(0, rows(16, vec![8])));
    // A failure is told past what waits.
    silent.write(&rank_says(3, 5, "out of memory", 0));
    assert_eq!(ranks[0].failed().to_string(), "rank 2 on host a, step 5, out of memory: out of memory");
    assert_eq!(ranks[1].failed(), silent.failure());
}
