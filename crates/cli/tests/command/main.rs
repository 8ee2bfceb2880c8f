//! The command as people run it: a process, its arguments, what it prints, its exit code and the files it leaves.

mod data;
mod dense;
#[cfg(target_os = "linux")]
mod drivers;
mod endings;
#[cfg(target_os = "linux")]
mod every;
mod fidelity;
#[cfg(debug_assertions)]
mod full_disk;
mod generating;
mod gpu;
mod guide;
#[cfg(unix)]
mod inputs;
mod keys;
#[cfg(debug_assertions)]
mod kill;
#[cfg(all(unix, debug_assertions))]
mod launch_ends;
#[cfg(unix)]
mod launchers;
#[cfg(unix)]
mod links;
#[cfg(target_os = "linux")]
mod memory;
mod mistakes;
mod models;
mod outputs;
#[cfg(unix)]
mod processes;
mod quantize;
#[cfg(unix)]
mod reading;
mod replay;
mod report;
mod runs;
#[cfg(target_os = "linux")]
mod scoring;
#[cfg(all(unix, debug_assertions))]
mod signals;
#[cfg(target_os = "linux")]
mod streams;
mod study;
mod tokenizers;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// What the names of variables begin with that are no test's own: those of Nibble and those of the launcher under which the tests may run, a step
/// of Slurm for one.
const CLEARED: [&str; 22] = [
    "NIBBLE_ISA",
    "NIBBLE_THREADS",
    "NIBBLE_FAULT",
    "NIBBLE_SIGNAL_WINDOW",
    "NIBBLE_RANK",
    "NIBBLE_WORLD_SIZE",
    "NIBBLE_LOCAL_",
    "NIBBLE_RENDEZVOUS",
    "NIBBLE_SECRET",
    "NIBBLE_DEADLINE",
    "NIBBLE_JOIN_DEADLINE",
    "NIBBLE_LAUNCH_DIR",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI_LOCAL",
];

/// Takes these variables from a command.
fn clear(command: &mut Command) {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in names.filter(|name| CLEARED.iter().any(|cleared| name.starts_with(cleared))) {
        command.env_remove(name);
    }
}

/// What a command did.
#[derive(Debug, Clone)]
struct Done {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Done {
    /// Asserts success.
    fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}\n{}", self.stdout, self.stderr);
        // Where texts are the output, this says what they are computed in.
        let told = |line: &&str| !line.starts_with("computed under recipe ");
        assert_eq!(self.stderr.lines().filter(told).collect::<Vec<_>>(), [""; 0]);
        self
    }

    /// Asserts a failure with this exit code, told in one `error:` line without a trace of a panic, and returns it.
    fn failed(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{}\n{}", self.stdout, self.stderr);
        assert!(self.stderr.starts_with("error: "), "{}", self.stderr);
        assert!(
            !self.stderr.contains("panicked") && !self.stderr.contains("internal error"),
            "{}",
            self.stderr
        );
        self.stderr
    }

    /// Asserts what was printed.
    fn contains(&self, text: &str) -> &Self {
        assert!(self.stdout.contains(text), "no {text:?} in\n{}", self.stdout);
        self
    }
}

/// The command in a directory of its own.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    /// A place with `text.txt` in it, 12 kB.
    fn with_text() -> Self {
        let place = Self::new();
        std::fs::write(place.path("text.txt"), text()).unwrap();
        place
    }

    /// Removes every checkpoint of a run; the run itself stays.
    fn forget_checkpoints(&self, run: &str) {
        for entry in self.path(run).join("checkpoints").read_dir().unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                std::fs::remove_dir_all(path).unwrap();
            }
        }
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.program(env!("CARGO_BIN_EXE_nibble"));
        command.args(args);
        command
    }

    /// Another program, in the place.
    fn program(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        clear(&mut command);
        command
    }

    fn nibble(&self, args: &[&str]) -> Done {
        let out = self.command(args).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Done { code: out.status.code(), stdout: text(&out.stdout), stderr: text(&out.stderr) }
    }

    /// `nibble train small.toml` with more arguments.
    fn train(&self, args: &[&str]) -> Done {
        std::fs::write(self.path("small.toml"), SMALL).unwrap();
        self.nibble(&[&["train", "small.toml"], args].concat())
    }
}

/// A question of a task.
const QUESTION: &str = "{\"question\": \"one\", \"choices\": [\"two\", \"three\"], \"answer\": 0}\n";

/// A model that trains in a fraction of a second, on shards of 128 tokens as the block recipes ask.
const SMALL: &str = r#"
[model]
d_model = 32
layers = 1
heads = 2
kv_heads = 1
head_dim = 16
experts = 4
top_k = 2
expert_ffn = 32

[data]
source = "text.txt"
seq_len = 64

[train]
steps = 12
batch_size = 4
shards = 2
warmup_steps = 2

[eval]
every = 5
batches = 1

[checkpoint]
every = 4

[run]
log_every = 1
threads = 1
device = "cpu"
"#;

/// Text in which there is something to learn.
fn text() -> Vec<u8> {
    let words = ["nibble ", "trains ", "experts ", "in ", "four ", "bits, ", "and ", "eight.\n"];
    let mut state = 1u32;
    let mut text = Vec::new();
    while text.len() < 12_000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        text.extend_from_slice(words[(state >> 29) as usize].as_bytes());
    }
    text
}

fn read(path: impl AsRef<Path>) -> Vec<u8> {
    let path = path.as_ref();
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Steps and losses of a metrics file's training lines.
fn losses(path: impl AsRef<Path>) -> Vec<(u64, f64)> {
    let metrics = nibble_train::metrics::read_metrics(path.as_ref()).unwrap().metrics;
    metrics.into_iter().filter_map(|m| Some((m.step, m.loss?))).collect()
}

/// The lines of a run that go layer by layer.
fn layers(path: impl AsRef<Path>) -> Vec<nibble_train::metrics::LayerMetrics> {
    nibble_train::metrics::read_layers(path.as_ref()).unwrap().metrics
}
