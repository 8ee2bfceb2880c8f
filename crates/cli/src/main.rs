//! `nibble`: train, evaluate and sample language models, mixtures of experts and dense ones, whose activations are stored in MXFP4, quantize
//! files, and look at what the machine and the recipes do. One file a subcommand; this one only chooses.

mod caching;
mod checkpoint;
mod data;
mod doctor;
mod ending;
mod eval;
mod export;
mod generate;
mod inspect;
mod launch;
mod models;
mod options;
mod plot;
mod processes;
mod quantize;
mod recipe;
mod report;
mod run_files;
mod signals;
mod tensor_cores;
mod train;
mod verify;

use clap::{Parser, Subcommand};
use nibble_command::error::{self, Result};
use nibble_command::{allocation, console, env, joined, say, warn};
use nibble_core::allocation::phase;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: allocation::Telling = allocation::Telling;

/// Of the thread that runs the command: as large as the first thread's is at most on most systems. That one grows where it lies, and
/// the process is killed where it cannot; this one is there from the start or is refused with an error.
const STACK_BYTES: usize = 8 << 20;

/// Trains language models with activations in four bits and products in eight
#[derive(Debug, Parser)]
#[command(name = "nibble", version, propagate_version = true, help_template = HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(train::Args),
    Launch(launch::Args),
    Eval(eval::Args),
    Generate(generate::Args),
    Export(export::Args),
    Plot(plot::Args),
    Report(report::Args),
    Quantize(quantize::Args),
    Models(models::Args),
    Data(data::Args),
    Recipe(recipe::Args),
    Inspect(inspect::Args),
    Doctor(doctor::Args),
    Bench(nibble_bench::Args),
    Verify(verify::Args),
    /// Lists the environment variables and the exit codes
    #[command(after_help = surroundings())]
    Environment,
}

/// As clap has it, without empty lines around its parts. The whole of it fits a screen of 24 lines; a test counts them.
const HELP: &str = "{about-with-newline}{usage-heading} {usage}\nCommands:\n{subcommands}\nOptions:\n{options}\n\
    Examples: nibble train, a first run of ten seconds; nibble train --help";

/// What a process is told besides its arguments, and what it tells besides its output.
fn surroundings() -> String {
    format!(
        "Environment variables:\n{}\n\
         Exit codes: 0 done, 1 the run failed, 2 the request cannot be followed as it stands,\n\
         130, 143, 129 a run was stopped by SIGINT (Ctrl-C), SIGTERM, SIGHUP.",
        env::help()
    )
}

fn main() -> ExitCode {
    error::keep_panics();
    allocation::tell_aborts();
    // SAFETY: a limit on the size of files makes a write fail then, and the error is told, instead of ending the process without a word.
    #[cfg(unix)]
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN)
    };
    for (name, value) in nibble_cuda::env::OF_NCCL {
        if std::env::var_os(name).is_none() {
            // SAFETY: there is one thread yet, so nobody reads the environment meanwhile.
            unsafe { std::env::set_var(name, value) };
        }
    }
    match std::thread::Builder::new().name("nibble".into()).stack_size(STACK_BYTES).spawn(command) {
        // What panics outside of a command is no less a defect.
        Ok(thread) => thread.join().unwrap_or_else(|_| ended(Err(error::panicked()))),
        Err(why) => ended(Err(nibble_core::Error::not_started(why).into())),
    }
}

/// The command that the arguments ask for, from its first line to its exit code.
fn command() -> ExitCode {
    let cli = match options::parse::<Cli>() {
        Ok(cli) => cli,
        Err(wrong) if wrong.use_stderr() => {
            warn!("{}", wrong.render().to_string().trim_end());
            return ExitCode::from(2);
        }
        Err(help) => {
            console::keep(help.print());
            return ended(console::require_said());
        }
    };
    if joined::is_first() {
        env::unknown().iter().for_each(|unread| warn!("warning: {unread}"));
    }
    ended(error::catch(|| run(cli).and_then(|()| console::require_said())))
}

/// Tells of an error, and gives the exit code.
fn ended(done: Result<()>) -> ExitCode {
    let Err(error) = done else { return ExitCode::SUCCESS };
    error.tell();
    ExitCode::from(error.exit_code())
}

fn run(cli: Cli) -> Result<()> {
    // Those that show the variables show whatever there is.
    if !matches!(cli.command, Command::Environment | Command::Doctor(_)) {
        env::require_text()?;
    }
    #[cfg(debug_assertions)]
    env::arm_faults(joined::rank())?;
    phase(format_args!("nibble {}", std::env::args().nth(1).unwrap_or_default()));
    if !matches!(cli.command, Command::Train(_) | Command::Launch(_)) {
        ending::leave_nothing_unfinished().map_err(nibble_core::Error::not_started)?;
    }
    match cli.command {
        Command::Train(args) => train::run(args),
        Command::Launch(args) => launch::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Export(args) => export::run(args),
        Command::Plot(args) => plot::run(args),
        Command::Report(args) => report::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Models(args) => models::run(args),
        Command::Data(args) => data::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Recipe(args) => recipe::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(args) => nibble_bench::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Environment => {
            say!("{}", surroundings());
            Ok(())
        }
    }
}
