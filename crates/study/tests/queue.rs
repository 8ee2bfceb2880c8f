//! Several processes at one study.

use crate::rig::{plain, row, study};
use nibble_study::{Cell, Claim, Holder, Next, Outcome, Provenance, Queue, Row, rows_dir, write_row};
use std::fs;
use std::path::Path;
use std::sync::Mutex;

fn take(queue: &Queue) -> Claim {
    match queue.next().unwrap() {
        Next::Cell(claim) => claim,
        other => panic!("{other:?}"),
    }
}

fn mark(dir: &Path, cell: &Cell, text: &str) {
    fs::write(rows_dir(dir).join(format!("{}.running", cell.id)), text).unwrap();
}

#[test]
fn a_cell_is_taken_once_and_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let cells = plain(&["other"], 1).cells();
    let open = || Queue::open(dir.path(), cells.clone(), "here").unwrap();
    let (one, two) = (open(), open());
    let (first, second) = (take(&one), take(&two));
    assert_eq!([&first.cell().id, &second.cell().id], [&cells[0].id, &cells[1].id]);
    let Next::Wait { running, branches: 0 } = two.next().unwrap() else { panic!("both are taken") };
    assert_eq!(running.len(), 2);
    assert_eq!(running[0].holder, Some(Holder::this("here", "")));
    drop(first);
    let again = take(&two);
    assert_eq!(again.cell().id, cells[0].id);
    assert!(again.finish(&row(&cells[1], 2.0)).unwrap_err().to_string().contains("is given as that of"));
    take(&one).finish(&row(&cells[0], 2.0)).unwrap();
    second.finish(&row(&cells[1], 2.0)).unwrap();
    assert!(matches!(one.next().unwrap(), Next::Done { blocked } if blocked.is_empty()));
    // Two rows and the lock's file.
    assert_eq!(fs::read_dir(rows_dir(dir.path())).unwrap().count(), 3);
}

#[cfg(target_os = "linux")]
#[test]
fn marks_of_dead_processes_are_removed_and_others_stay() {
    let dir = tempfile::tempdir().unwrap();
    let cells = plain(&["other"], 3).cells();
    let queue = Queue::open(dir.path(), cells.clone(), "here").unwrap();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    let me = std::process::id();
    let holder = |pid: u32, host: &str, started: &str| {
        format!("{{\"pid\":{pid},\"host\":\"{host}\",\"started\":{started}}}")
    };
    mark(dir.path(), &cells[0], &holder(pid, "elsewhere", "5"));
    mark(dir.path(), &cells[1], &serde_json::to_string(&Holder::this("here", "")).unwrap());
    mark(dir.path(), &cells[2], &holder(pid, "here", "5"));
    // The number is taken again, by a process that started at another time.
    mark(dir.path(), &cells[3], &holder(me, "here", "1"));
    // It died while it wrote its mark.
    mark(dir.path(), &cells[4], "{\"pid\":");
    let claims: Vec<Claim> = (0..4).map(|_| take(&queue)).collect();
    let taken: Vec<&str> = claims.iter().map(|claim| &*claim.cell().id).collect();
    assert_eq!(taken, [&cells[2].id, &cells[3].id, &cells[4].id, &cells[5].id]);
    let Next::Wait { running, branches: 0 } = queue.next().unwrap() else { panic!("two are others'") };
    let hosts: Vec<_> =
        running.iter().map(|running| running.holder.as_ref().unwrap().host.as_str()).collect();
    assert_eq!(hosts, ["elsewhere", "here", "here", "here", "here", "here"]);
}

/// Eight threads with queues of their own run every cell exactly once, though every second cell begins with the mark of a dead process.
#[test]
fn many_run_every_cell_once() {
    let dir = tempfile::tempdir().unwrap();
    let cells = plain(&["a", "b", "c"], 16).cells();
    Queue::open(dir.path(), cells.clone(), "here").unwrap();
    for cell in cells.iter().step_by(2).filter(|_| cfg!(target_os = "linux")) {
        mark(dir.path(), cell, "{\"pid\":4294967295,\"host\":\"here\",\"started\":1}");
    }
    let taken = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let queue = Queue::open(dir.path(), cells.clone(), "here").unwrap();
                // A thread that finds nothing to take leaves: those that run the other cells ask again behind them.
                while let Next::Cell(claim) = queue.next().unwrap() {
                    taken.lock().unwrap().push(claim.cell().id.clone());
                    let row = row(claim.cell(), 2.0);
                    claim.finish(&row).unwrap();
                }
            });
        }
    });
    let mut taken = taken.into_inner().unwrap();
    taken.sort();
    let mut expected: Vec<String> = cells.iter().map(|cell| cell.id.clone()).collect();
    expected.sort();
    assert_eq!(taken, expected);
}

#[test]
fn branches_wait_for_their_trunk() {
    let text = "name = \"s\"\nbaseline = \"base\"\nconfigs = [\"c\"]\nseeds = 2\n[[branch]]\ntrunk = { recipe = \"base\", steps = 100 }\nrecipes = [\"base\", \"other\"]\nschedule = \"new\"\n";
    let cells = study(text).cells();
    let dir = tempfile::tempdir().unwrap();
    let queue = Queue::open(dir.path(), cells.clone(), "here").unwrap();
    let (first, second) = (take(&queue), take(&queue));
    assert_eq!([first.cell(), second.cell()], [&cells[0], &cells[3]]);
    assert!(matches!(queue.next().unwrap(), Next::Wait { running, branches: 4 } if running.len() == 2));
    first.finish(&row(&cells[0], 2.0)).unwrap();
    let diverged = Row::of(&cells[3], Provenance::default(), Outcome::Diverged { step: 9 });
    second.finish(&diverged).unwrap();
    for cell in &cells[1..3] {
        let claim = take(&queue);
        assert_eq!(claim.cell(), cell);
        claim.finish(&row(cell, 2.0)).unwrap();
    }
    assert!(matches!(queue.next().unwrap(), Next::Done { blocked } if blocked == cells[4..]));
}

/// Speed and energy are measured by runs that have their device to themselves.
#[cfg(target_os = "linux")]
#[test]
fn a_queue_knows_who_else_uses_its_device() {
    let dir = tempfile::tempdir().unwrap();
    let cells = plain(&["other"], 1).cells();
    let queue = Queue::open(dir.path(), cells.clone(), "here").unwrap().on_device("cuda:0");
    let own = take(&queue);
    assert!(!queue.shares_device(&own).unwrap());
    let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let started = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().to_owned();
    let pid = child.id();
    let told = |host: &str, device: &str| {
        let text = serde_json::json!({ "pid": pid, "host": host, "started": started.parse::<u64>().unwrap(), "device": device });
        mark(dir.path(), &cells[1], &text.to_string());
        queue.shares_device(&own).unwrap()
    };
    assert!(told("here", "cuda:0") && told("here", "cuda") && told("here", ""));
    assert!(!told("here", "cuda:1") && !told("elsewhere", "cuda:0"));
    told("here", "cuda:0");
    // `cat` ends when its input does.
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(!queue.shares_device(&own).unwrap(), "that process has ended");
}

#[test]
fn failed_runs_are_run_again_on_demand() {
    let dir = tempfile::tempdir().unwrap();
    let cells = plain(&["other"], 1).cells();
    let queue = Queue::open(dir.path(), cells.clone(), "here").unwrap();
    let ended =
        |cell: &Cell, outcome| write_row(dir.path(), &Row::of(cell, Provenance::default(), outcome)).unwrap();
    ended(&cells[0], Outcome::Failed { why: "no memory".into() });
    ended(&cells[1], Outcome::Diverged { step: 3 });
    assert!(matches!(queue.next().unwrap(), Next::Done { .. }));
    assert_eq!(queue.forget_failed().unwrap(), [cells[0].id.clone()]);
    assert_eq!(take(&queue).cell(), &cells[0]);
}
