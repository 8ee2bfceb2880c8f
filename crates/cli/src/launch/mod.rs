//! `nibble launch`: starts the ranks of a run as processes of this host, watches them, and restarts failed runs.

pub mod children;

use crate::{Cli, Command, train};
use children::{Children, Ended, Signals};
use clap::Parser;
use nibble_command::error::{Error, Result};
use nibble_command::{console, warn};
use nibble_control::{Failure, Limits};
use nibble_train::config::folder_argument;
use std::path::Path;
use std::time::Duration;

/// Starts and supervises a run's ranks as processes of this host
///
/// If one rank dies, hangs or fails, all ranks end, and `nibble launch` prints one error message.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "On GPUs, each rank has its own GPU; on a CPU, the ranks share the host's cores and memory. After Ctrl-C, SIGTERM or \
    SIGHUP all ranks finish the current step, \
    write a checkpoint and end. `nibble launch` starts ranks on one host only; on several hosts, torchrun, srun or mpirun can start the \
    ranks, as the guide's page \"Several processes\" explains.\n\n\
    Examples:\n  \
    nibble launch --ranks 2 -- train tiny\n  \
    nibble launch --ranks 4 --max-restarts 10 -- train my.toml --set run.dp=2\n  \
    nibble launch --ranks 4 --max-restarts 10 --min-ranks 2 -- train runs/my --resume"
)]
pub struct Args {
    /// Number of ranks to start; each rank is one process.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// Maximum number of times that a failed run is restarted from its newest undamaged checkpoint.
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_restarts: u32,
    /// Restarts a failed run on fewer ranks, but on at least N ranks. Each restart uses the largest proper divisor of the previous
    /// number of ranks.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    min_ranks: Option<u32>,
    /// Number of seconds within which all ranks end after one rank has failed. A rank that sends no heartbeat for half of SECONDS counts
    /// as failed.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(2..=86_400))]
    deadline: u64,
    /// Number of seconds within which all ranks must join the run after `nibble launch` has started.
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(2..=86_400))]
    join_deadline: u64,
    /// Command that every rank runs: `train` and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub fn run(args: Args) -> Result<()> {
    if let Some(asked) = require_training(&args.command)? {
        console::keep(asked.print());
        return Ok(());
    }
    if let Some(least) = args.min_ranks.filter(|least| *least > args.ranks) {
        let ranks = args.ranks;
        return Err(Error::usage(format!("--min-ranks {least}: is more than --ranks {ranks}")));
    }
    let seconds = Duration::from_secs;
    let limits = Limits { deadline: seconds(args.deadline), join: seconds(args.join_deadline) };
    let (mut ranks, mut command) = (args.ranks, args.command.clone());
    let mut signals = Signals::start()?;
    for restart in 0..=args.max_restarts {
        let children = Children::start((ranks as usize, restart), &command, limits)?;
        let (ended, run) = children.watch(&mut signals)?;
        let why = match ended {
            Ended::Done => return Ok(()),
            Ended::Stopped(code) => return Err(Error::Told(code)),
            Ended::Failed(why) => why,
        };
        if why.is_user_error || restart == args.max_restarts || signals.have_asked() {
            return Err(error_of(&why));
        }
        ranks = args.min_ranks.map_or(ranks, |least| fewer(ranks, least));
        command = again(command, run.as_deref());
        let (now, of) = (restart + 1, args.max_restarts);
        let from = if run.is_some() { "goes on from the newest whole checkpoint" } else { "begins" };
        warn!("{why}\nrestart {now} of {of}: the run {from}, on {ranks} ranks");
    }
    // This point is never reached, because the last restart returns its outcome above.
    Ok(())
}

/// Validates the ranks' arguments once for all ranks. Returns the help or version text that the arguments request, if any.
fn require_training(command: &[String]) -> Result<Option<clap::Error>> {
    let words = ["nibble"].into_iter().chain(command.iter().map(String::as_str));
    match Cli::try_parse_from(words) {
        Ok(Cli { command: Command::Train(args) }) => train::require_launchable(&args).map(|()| None),
        Ok(_) => {
            let name = command.first().map_or("", String::as_str);
            Err(Error::usage(format!("nibble launch starts `train`, and not `{name}`")))
        }
        Err(asked) if !asked.use_stderr() => Ok(Some(asked)),
        Err(wrong) => Err(Error::usage(wrong.render().to_string().trim_start_matches("error: ").trim_end())),
    }
}

/// The command of a restart, which resumes the run in this folder. If no run has started, it is the original command.
fn again(command: Vec<String>, run: Option<&Path>) -> Vec<String> {
    match run {
        Some(dir) => {
            let checks_links = command.into_iter().filter(|word| word == "--check-links");
            let again = ["train".to_owned(), folder_argument(dir), "--resume".to_owned()];
            again.into_iter().chain(checks_links).collect()
        }
        None => command,
    }
}

/// The largest proper divisor of `ranks`, or `ranks` if that divisor is below `least`.
fn fewer(ranks: u32, least: u32) -> u32 {
    (least..ranks).rev().find(|fewer| ranks.is_multiple_of(*fewer)).unwrap_or(ranks)
}

fn error_of(why: &Failure) -> Error {
    if why.is_user_error { Error::usage(why) } else { Error::Failed(why.to_string()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_ranks_divide_those_before() {
        assert_eq!(
            [(4, 1), (2, 1), (1, 1), (6, 2), (8, 5), (7, 1)].map(|(n, least)| fewer(n, least)),
            [2, 1, 1, 3, 8, 1]
        );
    }

    #[test]
    fn a_run_that_has_begun_goes_on_in_its_folder_and_no_other() {
        let called_so = again(vec!["train".into(), "tiny".into()], Some(Path::new("tiny")));
        assert_eq!(called_so, ["train", "./tiny", "--resume"]);
        let asked = || ["train", "tiny", "--set", "train.steps=9"].map(str::to_owned).to_vec();
        assert_eq!(again(asked(), None), asked());
        let run = Some(Path::new("runs/tiny-2"));
        assert_eq!(again(asked(), run), ["train", "runs/tiny-2", "--resume"]);
        let checked = [asked(), vec!["--check-links".to_owned()]].concat();
        assert_eq!(again(checked, run), ["train", "runs/tiny-2", "--resume", "--check-links"]);
    }

    #[test]
    fn what_cannot_be_launched_is_refused_before_a_process_is_started() {
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        require_training(&words("train tiny")).unwrap();
        for (line, part) in [
            ("plot x", "and not `plot`"),
            ("train --stesp 3", "--stesp"),
            ("train --dry-run", "--dry-run"),
            ("launch --ranks 2 -- train", "and not `launch`"),
        ] {
            let error = require_training(&words(line)).unwrap_err();
            assert!(matches!(error, Error::Usage(_)) && error.to_string().contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn the_message_names_who_failed() {
        let why = Failure { rank: Some(1), cause: "x".into(), ..Failure::default() };
        assert_eq!(error_of(&why).to_string(), "rank 1: x");
        assert!(matches!(error_of(&Failure { is_user_error: true, ..why }), Error::Usage(_)));
    }
}
