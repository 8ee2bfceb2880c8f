//! `nibble verify`: checks every operation of this binary against its specification on this machine.
//!
//! With a Hopper GPU, it compares the CUDA backend with the CPU backend, which is the specification. With `--cpu`, it compares the CPU's
//! vectorised, threaded code with the scalar specification on one thread. The cases are those of the conformance suite: sizes of real
//! models, uneven and empty groups, poisoned padding, and values that are difficult for number formats.

use nibble_command::env::Env;
use nibble_command::error::{Error, Result};
use nibble_command::gpu;
use nibble_command::output::{Force, Mark, Output, Outputs};
use nibble_command::say;
use nibble_core::Kernels;
use nibble_cpu::Cpu;
use nibble_cuda::Cuda;
use nibble_testkit::conformance::{Test, every_op};
use nibble_testkit::{Breadth, Cases, Pair, random_elements};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Builder};
use std::time::Instant;

/// Checks every operation on this machine against its specification
///
/// Results of conversions must equal those of the specification bit for bit; results of matrix products must equal those of the
/// specification within stated error bounds.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit code: 0 if every operation agrees with its specification, 1 if an operation does not, 2 if there is no GPU to verify.\n\n\
    Examples:\n  \
    nibble verify\n  \
    nibble verify --only transcode --only swiglu\n  \
    nibble verify --only quantize --random 1000000000\n  \
    nibble verify --cpu --json verified.json"
)]
pub struct Args {
    /// Checks the CPU's vectorised code against the CPU's scalar code, instead of the GPU's code against the CPU's code.
    #[arg(long)]
    cpu: bool,
    /// Verifies only the operation OP. This option may be repeated. Default: all operations.
    #[arg(long, value_name = "OP")]
    only: Vec<String>,
    /// Number of test cases that run concurrently, each on its own CPU threads and GPU stream. With N = 0, one case runs per two CPU
    /// threads, at most 16 cases; with N = 0 and --cpu, one case runs at a time.
    #[arg(long, value_name = "N", default_value_t = 0)]
    jobs: usize,
    /// Also quantizes and dequantizes at least N random elements in every block format, and compares the results with those of the
    /// specification bit for bit.
    #[arg(long, value_name = "N", default_value_t = 0)]
    random: u64,
    /// Also writes the results to this JSON file.
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
}

const MARK: Mark = Mark::Figures("nibble verify");

/// CPU threads per job if `--jobs` is 0; it also limits the number of jobs.
const THREADS_A_JOB: usize = 2;
const MOST_JOBS: usize = 16;

pub fn run(args: Args) -> Result<()> {
    let mut outputs = Outputs::new(args.force, []);
    let json = args.json.as_ref().map(|path| outputs.named(path, &MARK)).transpose()?;
    if args.jobs > MOST_JOBS {
        return Err(Error::usage(format!("--jobs: got {}, expected at most {MOST_JOBS}", args.jobs)));
    }
    let settings = Env::read()?;
    let threads = settings.threads(0);
    if args.cpu {
        let tests = chosen(&every_op(), &args.only)?;
        let pair =
            |threads| Ok(Pair::strict(Cpu::scalar(1)?, settings.cpu(threads)?).with_breadth(Breadth::Whole));
        return verify(&args, (threads, args.jobs.max(1)), &pair, &tests, json);
    }
    let tests = chosen(&every_op(), &args.only)?;
    let first = gpu::open("--cpu verifies the CPU's vectorised code")?;
    let pair = |threads| {
        let gpu = Cuda::on(first.device().reopened()?);
        Ok(Pair::new(settings.cpu(threads)?, gpu).with_breadth(Breadth::Whole))
    };
    let jobs = if args.jobs == 0 { (threads / THREADS_A_JOB).clamp(1, MOST_JOBS) } else { args.jobs };
    verify(&args, (threads, jobs), &pair, &tests, json)
}

/// The tests that `--only` selects.
fn chosen<A, B>(tests: &[Test<A, B>], only: &[String]) -> Result<Vec<Test<A, B>>> {
    if let Some(unknown) = only.iter().find(|name| tests.iter().all(|(op, _)| op != name)) {
        let known: Vec<_> = tests.iter().map(|(op, _)| *op).collect();
        return Err(Error::usage(format!(
            "--only: no operation `{unknown}`; there are: {}",
            known.join(", ")
        )));
    }
    let wanted = |op: &str| only.is_empty() || only.iter().any(|name| name == op);
    Ok(tests.iter().copied().filter(|(op, _)| wanted(op)).collect())
}

/// Runs the tests one after the other. The cases of each test run concurrently, on one pair per job. `pair` creates a pair with n threads.
fn verify<A: Kernels, B: Kernels>(
    args: &Args,
    (threads, jobs): (usize, usize),
    pair: &dyn Fn(usize) -> Result<Pair<A, B>>,
    tests: &[Test<A, B>],
    json: Option<Output>,
) -> Result<()> {
    let pairs = (0..jobs).map(|_| pair((threads / jobs).max(1))).collect::<Result<Vec<_>>>()?;
    // Random elements are converted one matrix at a time, and each matrix uses all threads.
    let pair = pair(threads)?;
    let cases = || pairs.iter().chain([&pair]).map(Pair::cases).sum::<usize>();
    say!("{}, against {}; jobs: {jobs}", pair.b.name(), pair.a.name());
    let (start, mut failed, mut results) = (Instant::now(), 0, Vec::new());
    let mut held = |op: &str, test: &dyn Fn() -> Result<Option<String>>| {
        let (before, begun) = (cases(), Instant::now());
        let report = test()?;
        // A case that ran out of memory was not compared.
        if let Some(why) = report.as_ref().filter(|report| report.contains("out of memory")) {
            return Err(Error::Failed(format!("{op}: {why}")));
        }
        let (cases, seconds) = (cases() - before, begun.elapsed().as_secs_f64());
        let verdict = if report.is_none() { "PASS" } else { "FAIL" };
        say!("{verdict}  {op:<20} {cases:>6} cases  {seconds:>7.2} s");
        for line in report.iter().flat_map(|text| text.lines()) {
            say!("      {line}");
        }
        failed += usize::from(report.is_some());
        results.push(json!({ "op": op, "cases": cases, "seconds": seconds, "passed": report.is_none(), "report": report }));
        Ok(())
    };
    for (op, test) in tests {
        held(op, &|| at_once(&pairs, *test))?;
    }
    if args.random > 0 {
        let random = || {
            random_elements(&pair, args.random);
        };
        held("random elements", &|| Ok(report_of(random)))?;
    }
    let (count, cases) = (results.len(), cases());
    let passed = count - failed;
    say!("{passed} of {count} operations agree, {cases} cases, {:.1} s", start.elapsed().as_secs_f64());
    if let Some(json) = json {
        let figures: Value = json!({ "specification": pair.a.name(), "verified": pair.b.name(), "jobs": jobs, "ops": results });
        json.write(MARK.json(figures))?;
    }
    if failed == 0 { Ok(()) } else { Err(Error::Failed(format!("{failed} of {count} operations differ"))) }
}

/// Runs one test on all pairs concurrently; each case runs on one pair. If a case fails, its pair leaves the remaining cases to the other
/// pairs. Returns the reports in the order in which they arrived, without duplicates, because a device that fails in one pair fails in all
/// pairs.
///
/// # Errors
/// Returns an error if the system cannot start a thread.
fn at_once<A: Kernels, B: Kernels>(pairs: &[Pair<A, B>], test: fn(&Pair<A, B>)) -> Result<Option<String>> {
    let cases = Cases::default();
    let reports = Mutex::new(Vec::new());
    let run = &|pair: &Pair<A, B>| {
        let report = report_of(|| test(&pair.sharing(&cases)));
        // No code panics while it holds the lock.
        let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = report.as_ref().is_some_and(|report| !reports.contains(report));
        reports.extend(report.filter(|_| is_new));
    };
    thread::scope(|scope| {
        let start = |pair| Builder::new().name("verify".into()).spawn_scoped(scope, move || run(pair));
        pairs.iter().try_for_each(|pair| start(pair).map(drop))
    })
    .map_err(nibble_core::Error::not_started)?;
    let reports = reports.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok((!reports.is_empty()).then(|| reports.join("\n")))
}

/// The panic message of a failed test; `None` if it passed. The command's own panic hook prints nothing.
fn report_of(test: impl FnOnce()) -> Option<String> {
    let payload = catch_unwind(AssertUnwindSafe(test)).err()?;
    let text = payload.downcast_ref::<String>().cloned();
    let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
    Some(text.unwrap_or_else(|| "a panic without a message".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_test_leaves_its_report_and_a_passed_one_nothing() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let (report, nothing) = (report_of(|| panic!("value {} differs", 3)), report_of(|| {}));
        std::panic::set_hook(hook);
        assert_eq!((report.as_deref(), nothing), (Some("value 3 differs"), None));
    }

    fn pairs(count: usize) -> Vec<Pair<Cpu, Cpu>> {
        (0..count).map(|_| Pair::strict(Cpu::scalar(1).unwrap(), Cpu::new(1).unwrap())).collect()
    }

    #[test]
    fn each_case_is_compared_by_one_of_the_jobs() {
        let cases = |count| {
            let pairs = pairs(count);
            let tests = chosen(&every_op(), &["permute".to_owned()]).unwrap();
            assert_eq!(at_once(&pairs, tests[0].1).unwrap(), None);
            pairs.iter().map(Pair::cases).sum::<usize>()
        };
        let alone = cases(1);
        assert!(alone > 10);
        assert_eq!(cases(3), alone);
    }

    #[test]
    fn what_jobs_say_alike_is_said_once() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let report = at_once(&pairs(3), |_| panic!("value 3 differs")).unwrap();
        std::panic::set_hook(hook);
        assert_eq!(report.as_deref(), Some("value 3 differs"));
    }

    #[test]
    fn operations_are_chosen_by_name() {
        let tests: Vec<Test<Cpu, Cpu>> = every_op();
        assert!(tests.len() > 30);
        let names = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(ToString::to_string).collect();
            chosen(&tests, &only).map(|t| t.iter().map(|(op, _)| *op).collect::<Vec<_>>())
        };
        assert_eq!(names(&["swiglu", "cast"]).unwrap(), ["cast", "swiglu"]);
        assert_eq!(names(&[]).unwrap().len(), tests.len());
        let why = names(&["castt"]).unwrap_err().to_string();
        assert!(why.contains("`castt`") && why.contains("swiglu_backward"), "{why}");
    }
}
