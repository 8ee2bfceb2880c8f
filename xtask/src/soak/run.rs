//! The run whose ranks are killed again and again, and the checks on it.

use super::Options;
use super::processes::{self, Holds};
use super::samples::{MOST_KIB, Random, grows, growth};
use crate::moved::remove;
use crate::run::{command, root};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const RANKS: usize = 4;
const EVERY: u64 = 10;
/// Time between two polls.
const LOOK: Duration = Duration::from_millis(5);
/// The longest wait for a part of the run.
const MOST: Duration = Duration::from_secs(600);
/// The kill comes up to this long after a step's line, so that it hits any part of the next step.
const WITHIN_MS: u64 = 60;

const CONFIG: &str = r#"
[model]
d_model = 32
layers = 1
heads = 2
kv_heads = 1
head_dim = 16
experts = 8
top_k = 2
expert_ffn = 32

[data]
source = "text.txt"
seq_len = 128

[train]
batch_size = 8
shards = 8
expert_shards = 8
warmup_steps = 2

[eval]
every = 0

[run]
log_every = 100
threads = 1
device = "cpu"
"#;

/// A kill, and the state after it.
struct Kill {
    step: u64,
    rank: usize,
    on: Duration,
    launcher: Holds,
    first: Holds,
    /// The names of rank 0's open files.
    files: Vec<String>,
}

/// Trains once undisturbed and once under `nibble launch` with its ranks killed, and compares.
///
/// # Errors
/// If weights or moments differ, if anything grows or is left over, or if a run does not continue.
pub fn soak(options: &Options) -> Result<(), String> {
    let built = command("cargo", &["build", "--release", "--locked", "--package", "nibble-cli"]).status();
    if !built.map_err(|why| format!("cargo did not start: {why}"))?.success() {
        return Err("nibble does not build".to_owned());
    }
    let place = root().join("target/soak");
    remove(&place)?;
    let temporary = place.join("tmp");
    fs::create_dir_all(&temporary).map_err(|why| format!("{}: {why}", temporary.display()))?;
    let soak = Soak { options: options.clone(), program: program(), place, temporary };
    for (name, text) in [("text.txt", text()), ("soak.toml", CONFIG.to_owned())] {
        fs::write(soak.place.join(name), text).map_err(|why| format!("{name}: {why}"))?;
    }
    let Options { steps, kills, seed } = options;
    println!("{steps} steps, {kills} kills, seed {seed}, {RANKS} ranks, a checkpoint every {EVERY} steps");
    let begun = Instant::now();
    let mut alone = soak.train(&[], "alone")?;
    if !alone.0.wait().map_err(|why| why.to_string())?.success() {
        return Err(format!("the undisturbed run failed:\n{}", soak.said("alone")));
    }
    println!("undisturbed, on one rank: {:.1} s\n", begun.elapsed().as_secs_f64());
    let found = soak.killed()?;
    soak.judge(&found)
}

/// The folders of a soak.
struct Soak {
    options: Options,
    program: PathBuf,
    place: PathBuf,
    temporary: PathBuf,
}

impl Soak {
    /// Starts `nibble .. train` that writes to this folder; its output goes to a log file next to the folder.
    fn train(&self, before: &[&str], dir: &str) -> Result<Guard, String> {
        let log = File::create(self.log(dir)).map_err(|why| format!("{dir}.log: {why}"))?;
        let also = log.try_clone().map_err(|why| format!("{dir}.log: {why}"))?;
        let mut process = Command::new(&self.program);
        process.args(before).args(["train", "soak.toml"]);
        let (steps, every) = (self.options.steps, EVERY);
        for change in
            [format!("run.dir={dir}"), format!("train.steps={steps}"), format!("checkpoint.every={every}")]
        {
            process.args(["--set", &change]);
        }
        process.current_dir(&self.place).env("TMPDIR", &self.temporary).env_remove("NIBBLE_THREADS");
        process.stdin(Stdio::null()).stdout(log).stderr(also);
        process.spawn().map(Guard).map_err(|why| format!("{}: {why}", self.program.display()))
    }

    fn log(&self, dir: &str) -> PathBuf {
        self.place.join(format!("{dir}.log"))
    }

    /// The last lines of a run's output.
    fn said(&self, dir: &str) -> String {
        let text = fs::read_to_string(self.log(dir)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// The run whose ranks are killed.
    fn killed(&self) -> Result<Vec<Kill>, String> {
        let Options { kills, seed, .. } = self.options;
        let restarts = (2 * kills).to_string();
        let ranks = RANKS.to_string();
        let mut launcher = self.train(
            &["launch", "--ranks", &ranks, "--max-restarts", &restarts, "--deadline", "6", "--"],
            "many",
        )?;
        let (mut random, part) = (Random(seed), self.options.part());
        let mut found = Vec::new();
        println!(
            "| kill | step | rank | s until it went on | launcher KiB | without files | its descriptors | its threads | rank 0 KiB | its descriptors |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|");
        for kill in 0..kills {
            // The run settles in the last quarter of a part.
            let step = kill * part + 1 + random.below(part - part / 4);
            self.wait(&mut launcher, |at| at.step >= step)?;
            sleep(Duration::from_millis(random.below(WITHIN_MS)));
            let rank = random.below(RANKS as u64) as usize;
            let done = self.kill(&mut launcher, rank, (kill + 1) * part)?;
            let Kill { step, rank, on, launcher, first, .. } = &done;
            println!(
                "| {} | {step} | {rank} | {:.2} | {} | {} | {} | {} | {} | {} |",
                kill + 1,
                on.as_secs_f64(),
                launcher.rss_kib,
                launcher.anon_kib,
                launcher.fds,
                launcher.threads,
                first.rss_kib,
                first.fds
            );
            found.push(done);
        }
        let ended = launcher.0.wait().map_err(|why| why.to_string())?;
        if !ended.success() {
            return Err(format!("the launcher ended with {ended}:\n{}", self.said("many")));
        }
        Ok(found)
    }

    /// Kills a rank, and samples the processes once the run has reached step `settled`.
    fn kill(&self, launcher: &mut Guard, rank: usize, settled: u64) -> Result<Kill, String> {
        let number = launcher.0.id();
        let ranks = processes::ranks_of(number);
        let Some((process, _)) = ranks.iter().find(|(_, of)| *of == rank) else {
            return Err(format!("rank {rank} is no child of the launcher, which has {ranks:?}"));
        };
        let before = self.at();
        let begun = Instant::now();
        processes::kill(*process)?;
        let again = self.wait(launcher, |at| at.file != before.file)?;
        self.wait(launcher, |at| at.step > again.step)?;
        let on = begun.elapsed();
        self.wait(launcher, |at| at.step >= settled)?;
        let first = processes::ranks_of(number).into_iter().find(|(_, rank)| *rank == 0);
        let (first, files) = first
            .and_then(|(process, _)| Some((processes::holds(process)?, processes::files_of(process))))
            .ok_or("rank 0 is gone")?;
        let launcher = processes::holds(number).ok_or("the launcher is gone")?;
        Ok(Kill { step: before.step, rank, on, launcher, first, files })
    }

    /// Waits until the run has reached a point.
    fn wait(&self, launcher: &mut Guard, is_there: impl Fn(&At) -> bool) -> Result<At, String> {
        let until = Instant::now() + MOST;
        while Instant::now() < until {
            let at = self.at();
            if is_there(&at) {
                return Ok(at);
            }
            if let Some(status) = launcher.0.try_wait().map_err(|why| why.to_string())? {
                return Err(format!("the launcher ended with {status} at {at:?}:\n{}", self.said("many")));
            }
            sleep(LOOK);
        }
        Err(format!("nothing goes on at {:?}:\n{}", self.at(), self.said("many")))
    }

    /// The run's current position.
    fn at(&self) -> At {
        let path = self.place.join("many/metrics.jsonl");
        let file = fs::metadata(&path).map_or(0, |metadata| metadata.ino());
        let text = fs::read_to_string(&path).unwrap_or_default();
        let whole = &text[..text.rfind('\n').unwrap_or(0)];
        At { file, step: whole.lines().next_back().and_then(step_of).unwrap_or(0) }
    }

    fn judge(&self, found: &[Kill]) -> Result<(), String> {
        let last = format!("checkpoints/step-{:08}", self.options.steps);
        let mut wrong = Vec::new();
        println!();
        for file in ["model.safetensors", "optim.safetensors"] {
            let of = |run: &str| {
                let path = self.place.join(run).join(&last).join(file);
                fs::read(&path).map_err(|why| format!("{}: {why}", path.display()))
            };
            let (alone, many) = (of("alone")?, of("many")?);
            println!("{file}: {} bytes, {}", many.len(), same(alone == many));
            if alone != many {
                wrong.push(format!("{file} differs from the undisturbed run's"));
            }
        }
        let column = |of: &dyn Fn(&Kill) -> u64| -> Vec<u64> { found.iter().map(of).collect() };
        // Only the launcher: ranks are new processes after each kill.
        let resident = column(&|kill| kill.launcher.rss_kib);
        let (own, _) = growth(&column(&|kill| kill.launcher.anon_kib));
        println!("launcher's memory without pages of files: {own:+.2} KiB a restart");
        let (slope, error) = growth(&resident);
        println!(
            "launcher's memory: {slope:+.2} KiB a restart over the second half of the restarts, with a standard error of {error:.2}; more than \
             {MOST_KIB} by two of them would be growth"
        );
        if grows(&resident) {
            wrong.push(format!("the launcher's memory grows by {slope:.1} KiB a restart"));
        }
        for (what, samples) in [
            ("launcher's descriptors", column(&|kill| kill.launcher.fds)),
            ("launcher's threads", column(&|kill| kill.launcher.threads)),
        ] {
            println!(
                "{what}: {}",
                if is_flat(&samples) { "the same after every restart" } else { "not the same" }
            );
            if !is_flat(&samples) {
                wrong.push(format!("the {what} are {samples:?}"));
            }
        }
        // A new process each time, at times with a checkpoint file open: more than the minimum is printed by name, and must not stay.
        let descriptors = column(&|kill| kill.first.fds);
        let fewest = |of: &[u64]| of.iter().copied().min().unwrap_or(0);
        let (early, late) = descriptors.split_at(descriptors.len() / 2);
        println!("rank 0's descriptors: {} at the least", fewest(&descriptors));
        for (i, kill) in found.iter().enumerate().filter(|(_, kill)| kill.first.fds > fewest(&descriptors)) {
            println!("after kill {}: {} of them: {}", i + 1, kill.first.fds, kill.files.join(", "));
        }
        if !early.is_empty() && fewest(late) > fewest(early) {
            wrong.push(format!("rank 0's descriptors are {descriptors:?}"));
        }
        let processes = processes::with_variable("TMPDIR=", &self.temporary);
        println!("processes left: {}", processes.len());
        wrong.extend(processes.iter().map(|process| format!("process {process} is left")));
        let files = names(&self.temporary)?;
        println!("temporary files left: {}", files.len());
        wrong.extend(files.iter().map(|file| format!("{file} is left in {}", self.temporary.display())));
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\nxtask: ")) }
    }
}

/// A run's position by its metrics: the identity of the metrics file, which every start replaces, and the last step.
#[derive(Debug)]
struct At {
    file: u64,
    step: u64,
}

/// Stops a process that still runs, such that its ranks end as well.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = processes::signal("TERM", self.0.id());
            let until = Instant::now() + Duration::from_secs(20);
            while Instant::now() < until && matches!(self.0.try_wait(), Ok(None)) {
                sleep(LOOK);
            }
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

fn same(same: bool) -> &'static str {
    if same { "those of the undisturbed run" } else { "other than the undisturbed run's" }
}

fn is_flat(samples: &[u64]) -> bool {
    samples.iter().all(|sample| *sample == samples[0])
}

fn names(folder: &Path) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(folder).map_err(|why| format!("{}: {why}", folder.display()))?;
    Ok(entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

/// The step in a line of metrics.
fn step_of(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once("\"step\":")?;
    rest[..rest.find(|c: char| !c.is_ascii_digit())?].parse().ok()
}

/// The release build of `nibble`.
fn program() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    target.join("release/nibble")
}

/// Text with something to learn.
fn text() -> String {
    let words = ["nibble ", "trains ", "experts ", "in ", "four ", "bits, ", "and ", "eight.\n"];
    let mut random = Random(1);
    (0..20_000).map(|_| words[random.below(8) as usize]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_read_off_lines_of_metrics() {
        assert_eq!(step_of(r#"{"step":12,"loss":3.5}"#), Some(12));
        assert_eq!(step_of(r#"{"loss":3.5}"#), None);
        assert_eq!(step_of(r#"{"step":1"#), None);
    }

    #[test]
    fn this_process_is_found_with_what_it_holds() {
        let own = std::process::id();
        assert!(processes::all().contains(&own));
        let holds = processes::holds(own).unwrap();
        assert!(holds.rss_kib > 0 && holds.fds >= 3 && holds.threads >= 1, "{holds:?}");
        assert!(processes::ranks_of(own).is_empty());
        let home = std::env::var("CARGO_MANIFEST_DIR").unwrap();
        assert!(processes::with_variable("CARGO_MANIFEST_DIR=", Path::new(&home)).contains(&own));
    }
}
