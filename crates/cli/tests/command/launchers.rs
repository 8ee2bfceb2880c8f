//! Ranks that other launchers start, or that are told by hand who they are: they meet and give the bits of one rank, or say why not.

use crate::processes::{left, place, said, set};
use crate::{Done, Place, read};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Output, Stdio};

const NIBBLE: &str = env!("CARGO_BIN_EXE_nibble");
pub const SECRET: &str = "a secret of the tests";

/// How a launcher is called, as this variable says. `None`, and a word of it, where it is not set: the launcher may not be there.
fn launcher(variable: &str, what: &str) -> Option<Vec<String>> {
    let call = std::env::var(variable).unwrap_or_default();
    let words: Vec<String> = call.split_whitespace().map(str::to_owned).collect();
    if words.is_empty() {
        println!("skipped: {what} ({variable} is not set)");
    }
    Some(words).filter(|words| !words.is_empty())
}

/// The arguments of a run that two ranks can divide. Options may stand among the changes.
fn train<'a>(dir: &'a str, changes: &[&'a str]) -> Vec<&'a str> {
    let (options, changes): (Vec<_>, Vec<_>) = changes.iter().partition(|word| word.starts_with("--"));
    let changes = ["train.expert_shards=2", dir].into_iter().chain(changes);
    ["train", "small.toml"].into_iter().chain(set(changes)).chain(options).collect()
}

/// The weights and moments of such a run on one rank.
fn of_one_rank(place: &Place) -> [Vec<u8>; 2] {
    place.nibble(&train("run.dir=one", &[])).ok();
    left(place, "one", 12)
}

/// A port of this host that is nobody's.
pub fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// What the ranks themselves say of a failure.
fn errors(out: &Output) -> Vec<String> {
    said(out).lines().filter(|line| line.starts_with("error: ")).map(str::to_owned).collect()
}

/// Two ranks of this program by torchrun.
fn torchrun(place: &Place, call: &[String], id: &str, options: &[&str], program: &[&str]) -> Command {
    let mut command = place.program(&call[0]);
    let endpoint = format!("--rdzv_endpoint=127.0.0.1:{}", free_port());
    command.args(&call[1..]).args(["--nnodes=1", "--nproc_per_node=2", "--rdzv_backend=c10d", &endpoint]);
    command.arg(format!("--rdzv_id={id}")).args(options).arg("--no_python").args(program);
    command.env("NIBBLE_SECRET", SECRET);
    command
}

/// A process that works in a place.
#[cfg(target_os = "linux")]
#[derive(Debug)]
pub struct Working {
    pub id: u32,
    /// Its variables, `NAME=VALUE`.
    variables: Vec<String>,
}

#[cfg(target_os = "linux")]
impl Working {
    pub fn has(&self, variable: &str) -> bool {
        self.variables.iter().any(|one| one == variable)
    }
}

/// The processes that work in a place.
#[cfg(target_os = "linux")]
pub fn processes_in(place: &Place) -> Vec<Working> {
    let place = place.path(".").canonicalize().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let there =
        processes.filter(|process| std::fs::read_link(process.join("cwd")).is_ok_and(|at| at == place));
    let working = |process: std::path::PathBuf| {
        let id = process.file_name()?.to_str()?.parse().ok()?;
        let set = std::fs::read(process.join("environ")).unwrap_or_default();
        let variables = set.split(|byte| *byte == 0).map(|one| String::from_utf8_lossy(one).into_owned());
        Some(Working { id, variables: variables.collect() })
    };
    there.filter_map(working).collect()
}

#[test]
fn two_runs_of_torchrun_at_once_give_the_bits_of_one_rank() {
    let Some(call) = launcher("NIBBLE_TORCHRUN", "ranks that torchrun starts") else { return };
    let place = place();
    let expected = of_one_rank(&place);
    let runs = ["first", "second"].map(|id| {
        let dir = format!("run.dir={id}");
        let program = [&[NIBBLE], &train(&dir, &[])[..]].concat();
        let mut command = torchrun(&place, &call, id, &[], &program);
        (id, command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    });
    for (id, run) in runs {
        let out = run.wait_with_output().unwrap();
        assert!(out.status.success() && errors(&out).is_empty(), "{id}: {}", said(&out));
        let printed = String::from_utf8_lossy(&out.stdout);
        assert_eq!(printed.matches("done: 12 steps").count(), 1, "{id}: {printed}");
        assert!(left(&place, id, 12) == expected, "{id}: other bits");
    }
}

#[cfg(debug_assertions)]
#[test]
fn torchrun_starts_a_run_again_after_a_kill_and_no_bit_is_lost() {
    let Some(call) = launcher("NIBBLE_TORCHRUN", "ranks that torchrun starts again") else { return };
    let place = place();
    let expected = of_one_rank(&place);
    // The second checkpoint is begun then, which waits for the first one's end.
    let script = "[ \"$TORCHELASTIC_RESTART_COUNT\" = 0 ] || exec \"$NIBBLE\" \"$@\" --resume\n\
                  NIBBLE_FAULT=1/sigkill@before-optimizer:10 exec \"$NIBBLE\" \"$@\"\n";
    std::fs::write(place.path("rank.sh"), script).unwrap();
    let program = [&["sh", "rank.sh"], &train("run.dir=run", &[])[..]].concat();
    let mut command = torchrun(&place, &call, "again", &["--max_restarts=1"], &program);
    let out = command.env("NIBBLE", NIBBLE).output().unwrap();
    assert!(out.status.success(), "{}", said(&out));
    let [error] = &errors(&out)[..] else { panic!("not one error: {}", said(&out)) };
    assert!(error.starts_with("error: rank 1 on host "), "{error}");
    assert!(error.ends_with(": its connection was lost"), "{error}");
    let printed = String::from_utf8_lossy(&out.stdout);
    assert!(printed.contains("resuming the run in run\n"), "{printed}");
    assert!(printed.contains("continuing after step "), "{printed}");
    assert!(left(&place, "run", 12) == expected, "other bits");
    #[cfg(target_os = "linux")]
    assert!(processes_in(&place).is_empty(), "{:?}", processes_in(&place));
}

#[test]
fn torchrun_ends_with_failure_where_the_secret_is_missing_short_or_another() {
    let Some(call) = launcher("NIBBLE_TORCHRUN", "ranks that torchrun starts without a secret") else {
        return;
    };
    let place = place();
    let script = "[ \"$RANK\" = 0 ] || NIBBLE_SECRET='another one of the tests'\nexec \"$NIBBLE\" \"$@\"\n";
    std::fs::write(place.path("rank.sh"), script).unwrap();
    let of = |program: &[&str], secret: Option<&str>| {
        let program = [program, &train("run.dir=run", &[])[..]].concat();
        let mut command = torchrun(&place, &call, "secrets", &[], &program);
        match secret {
            Some(secret) => command.env("NIBBLE_SECRET", secret),
            None => command.env_remove("NIBBLE_SECRET"),
        };
        command.env("NIBBLE", NIBBLE).env("NIBBLE_JOIN_DEADLINE", "3");
        let out = command.output().unwrap();
        assert!(!out.status.success() && !place.path("run").exists(), "{}", said(&out));
        errors(&out)
    };
    // torchrun may end one rank before it has said as much as the other.
    let missing = of(&[NIBBLE], None);
    let line = "export NIBBLE_SECRET=$(head -c 32 /dev/urandom | base64)";
    assert!(!missing.is_empty() && missing.iter().all(|error| error.contains(line)), "{missing:?}");
    assert!(missing[0].contains("torchrun started 2 ranks without a secret"), "{missing:?}");
    let short = of(&[NIBBLE], Some("hunter2"));
    assert!(!short.is_empty() && short.iter().all(|error| error.contains("got 7 characters")), "{short:?}");
    let other = of(&["sh", "rank.sh"], Some(SECRET));
    let told = ["rank 1 of 2 has not joined within 3 s", "the hub has another secret"];
    assert!(!other.is_empty(), "nothing was said");
    assert!(other.iter().all(|error| told.iter().any(|told| error.contains(told))), "{other:?}");
}

#[test]
fn ranks_that_mpirun_starts_give_the_bits_of_one_rank() {
    let Some(call) = launcher("NIBBLE_MPIRUN", "ranks that mpirun starts") else { return };
    let place = place();
    let expected = of_one_rank(&place);
    let run = |more: &[&str]| {
        let mut command = place.program(&call[0]);
        command
            .args(&call[1..])
            .args(["-n", "2", "-x", "NIBBLE_SECRET", NIBBLE])
            .env("NIBBLE_SECRET", SECRET);
        // Read by nobody: one warning, and not one a rank.
        command.env("NIBBLE_UNREAD", "1");
        command.args(train("run.dir=run", &[])).args(more).output().unwrap()
    };
    let out = run(&[]);
    assert!(!out.status.success() && !place.path("run").exists(), "{}", said(&out));
    let told = errors(&out);
    assert!(!told.is_empty(), "{}", said(&out));
    let how = "add --rendezvous 127.0.0.1:29500";
    assert!(told.iter().all(|error| error.contains(how)), "{told:?}");

    let out = run(&["--rendezvous", &format!("127.0.0.1:{}", free_port())]);
    assert!(out.status.success(), "{}", said(&out));
    assert_eq!(
        said(&out),
        "warning: NIBBLE_UNREAD is set, and nothing reads it; `nibble environment` lists what is read\n"
    );
    assert!(left(&place, "run", 12) == expected, "other bits");
}

/// Waits for processes that were started one after the other and work at once.
fn ended(commands: impl IntoIterator<Item = Command>) -> Vec<Done> {
    let start = |mut command: Command| command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started: Vec<_> = commands.into_iter().map(start).collect();
    let done = started.into_iter().map(|process| {
        let out = process.wait_with_output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Done { code: out.status.code(), stdout: text(&out.stdout), stderr: text(&out.stderr) }
    });
    done.collect()
}

/// Gives a command the variables that srun was recorded to set, but for who and where it is: one of two tasks on this host. Where they meet follows from
/// the job's number.
pub fn of_srun(command: &mut Command, job: &str, rank: usize) {
    let recorded = include_str!("../../../command/src/launched/recorded/slurm-rank4.env");
    for (name, value) in recorded.lines().filter_map(|line| line.split_once('=')) {
        let rank = rank.to_string();
        let value = match name {
            "SLURM_JOB_ID" => job,
            "SLURM_PROCID" | "SLURM_LOCALID" => &rank,
            "SLURM_NODEID" => "0",
            "SLURM_NNODES" | "SLURM_STEP_NUM_NODES" => "1",
            "SLURM_STEP_NODELIST" => "localhost",
            "SLURM_STEP_NUM_TASKS" | "SLURM_STEP_TASKS_PER_NODE" => "2",
            // The job's own numbers are larger than the step's.
            _ => value,
        };
        command.env(name, value);
    }
}

#[test]
fn ranks_with_the_variables_of_srun_give_the_bits_of_one_rank() {
    let place = place();
    let expected = of_one_rank(&place);
    let job = free_port().to_string();
    let task = |rank: usize| {
        let mut command = place.command(&train("run.dir=run", &[]));
        command.env("NIBBLE_SECRET", SECRET);
        of_srun(&mut command, &job, rank);
        command
    };
    let done = ended([1, 0].map(task));
    for (rank, done) in [1, 0].into_iter().zip(done) {
        let done = done.ok();
        assert_eq!(done.stdout.contains("done: 12 steps"), rank == 0, "{}", done.stdout);
    }
    assert!(left(&place, "run", 12) == expected, "other bits");
    assert!(String::from_utf8(read(place.path("run/ranks/rank-00001.log"))).unwrap().starts_with("rank 1: "));
}

/// Ranks whose variables are set by hand. All of them must end with exit code 2.
struct ByHand {
    place: Place,
}

/// A rank of so many, changes of its configuration, and its other variables.
type Rank<'a> = (usize, usize, &'a [&'a str], &'a [(&'a str, &'a str)]);

impl ByHand {
    fn command(&self, port: &str, (rank, world, changes, variables): Rank<'_>) -> Command {
        let mut command = self.place.command(&train("run.dir=run", changes));
        for (name, value) in [
            ("RANK", &*rank.to_string()),
            ("WORLD_SIZE", &world.to_string()),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", port),
            ("NIBBLE_SECRET", SECRET),
        ] {
            command.env(name, value);
        }
        command.envs(variables.iter().copied());
        command
    }

    /// What each of them says of its failure.
    fn failed(&self, ranks: &[Rank<'_>]) -> Vec<String> {
        let port = free_port().to_string();
        let done = ended(ranks.iter().map(|rank| self.command(&port, *rank)));
        let _ = std::fs::remove_dir_all(self.place.path("run"));
        let told = done.into_iter().map(|done| {
            assert_eq!(done.code, Some(2), "{ranks:?}: {}{}", done.stdout, done.stderr);
            assert!(!done.stderr.contains("panicked"), "{}", done.stderr);
            done.stderr
        });
        told.collect()
    }

    /// One of them tells why all have failed. Returns what it says.
    fn told_once(&self, ranks: &[Rank<'_>]) -> String {
        let told = self.failed(ranks);
        let mut errors = told.iter().filter(|told| !told.is_empty());
        let (Some(error), None) = (errors.next(), errors.next()) else { panic!("{ranks:?}: {told:?}") };
        assert!(error.starts_with("error: ") && error.lines().count() == 1, "{error}");
        error.clone()
    }
}

fn assert_says(error: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(error.contains(part), "no {part:?} in {error}"));
}

/// What four ranks can divide.
const FOUR: &[&str] = &["train.shards=4", "train.expert_shards=4"];

/// Where a deadline is what ends the wait.
const SOON: [(&str, &str); 2] = [("NIBBLE_JOIN_DEADLINE", "3"), ("NIBBLE_DEADLINE", "4")];

#[test]
fn a_rank_that_does_not_come_is_named() {
    let hand = ByHand { place: place() };
    let soon = &[("NIBBLE_JOIN_DEADLINE", "2")][..];
    let told = hand.failed(&[(0, 4, FOUR, soon)]);
    assert_says(&told[0], &["error: ranks 1, 2 and 3 of 4 have not joined within 2 s"]);
    let told = hand.failed(&[(1, 2, &[], soon)]);
    assert_says(
        &told[0],
        &["error: no hub of this run was found within 2 s: at 127.0.0.1:", "there is no answer"],
    );
}

#[test]
fn ranks_of_two_minds_end_with_one_message() {
    let hand = ByHand { place: place() };
    let two = |changes| [(0, 2, &[][..], &[][..]), (1, 2, changes, &[])];

    let error = hand.told_once(&[(0, 2, &[], &SOON), (1, 2, &[], &SOON), (1, 2, &[], &SOON)]);
    assert_says(&error, &["rank 1 on host ", "has already joined as this rank", "start each rank once"]);

    let error = hand.told_once(&[(0, 2, FOUR, &[]), (1, 4, FOUR, &[])]);
    assert_says(&error, &["it was started as one of 4 ranks, but this run has 2"]);

    let error = hand.told_once(&two(&["train.lr=0.5"]));
    assert_says(
        &error,
        &["train.lr is 0.5, rank 0's is 0.003", "start all ranks with the same configuration"],
    );

    let other: Vec<u8> = crate::text().into_iter().rev().collect();
    std::fs::write(hand.place.path("other.txt"), other).unwrap();
    let error = hand.told_once(&two(&["data.source=other.txt"]));
    assert_says(&error, &["rank 1 has other data: SHA-256 ", "give all ranks the same data"]);

    let error = hand.told_once(&two(&["run.dp=2"]));
    assert_says(&error, &["run.dp: "]);

    let error = hand.told_once(&two(&["--check-links"]));
    assert_says(&error, &["its configuration differs: check_links: "]);
}

#[test]
fn two_first_ranks_are_told_apart() {
    let hand = ByHand { place: place() };
    let told = hand.failed(&[(0, 2, &[], &SOON), (0, 2, &[], &SOON)]);
    // Whichever is the first waits for the second rank.
    let (listens, waits): (Vec<_>, Vec<_>) = told.iter().partition(|told| told.contains("cannot listen"));
    let ([listens], [waits]) = (&listens[..], &waits[..]) else { panic!("{told:?}") };
    assert_says(listens, &["rank 0 cannot listen on 127.0.0.1", "another process"]);
    assert_says(waits, &["rank 1 of 2 has not joined"]);
}

#[test]
fn a_rank_with_another_secret_says_so() {
    let hand = ByHand { place: place() };
    let other = [SOON[0], SOON[1], ("NIBBLE_SECRET", "another one of the tests")];
    let told = hand.failed(&[(0, 2, &[], &SOON), (1, 2, &[], &other)]);
    assert_says(&told[0], &["rank 1 of 2 has not joined within 3 s"]);
    assert_says(&told[1], &["no hub of this run was found", "the hub has another secret"]);
}
