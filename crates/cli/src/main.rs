//! `nibble` trains, evaluates and samples MoE and dense language models whose activations are stored in MXFP4. `nibble` also quantizes
//! files, and describes the machine and the recipes. Each subcommand has its own file; this file only dispatches.

mod caching;
mod checkpoint;
mod data;
mod doctor;
mod ending;
mod eval;
mod export;
mod fidelity;
mod generate;
mod inspect;
mod launch;
mod models;
mod options;
mod plot;
mod processes;
mod quantize;
mod recipe;
mod replay;
mod report;
mod run_files;
mod signals;
mod study;
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

/// Stack size of the thread that runs the command: the usual limit of the main thread's stack. The main thread's stack grows on demand, and
/// the system kills the process if it cannot grow. The stack of this thread is allocated at the start, or refused with an error.
const STACK_BYTES: usize = 8 << 20;

/// Trains language models with 4-bit stored activations and 8-bit matrix products
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
    Study(study::Args),
    Fidelity(fidelity::Args),
    Replay(replay::Args),
    Quantize(quantize::Args),
    Models(models::Args),
    Data(data::Args),
    Recipe(recipe::Args),
    Inspect(inspect::Args),
    Doctor(doctor::Args),
    Bench(nibble_bench::Args),
    Verify(verify::Args),
    /// Lists Nibble's environment variables and exit codes
    #[command(after_help = surroundings())]
    Environment,
}

/// Clap's template without empty lines between its parts, and with both options in one line. The help fits a screen of 24 lines, which a test
/// checks.
const HELP: &str = "{about-with-newline}{usage-heading} {usage}; a first run of ten seconds: nibble train\nCommands:\n{subcommands}\n  -h, --help   Print help    -V, --version   Print version";

/// The help text on environment variables and exit codes.
fn surroundings() -> String {
    format!(
        "Environment variables:\n{}\n\
         Exit codes: 0 done; 1 the run failed; 2 the request cannot be carried out as given;\n\
         130 stopped by SIGINT (Ctrl-C); 143 stopped by SIGTERM; 129 stopped by SIGHUP.",
        env::help()
    )
}

fn main() -> ExitCode {
    error::keep_panics();
    allocation::tell_aborts();
    // SAFETY: the call ignores SIGXFSZ. A write beyond the file size limit then fails and is reported, instead of silently killing the
    // process.
    #[cfg(unix)]
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN)
    };
    for (name, value) in nibble_cuda::env::OF_NCCL {
        if std::env::var_os(name).is_none() {
            // SAFETY: there is only one thread at this point, so no other thread reads the environment.
            unsafe { std::env::set_var(name, value) };
        }
    }
    match std::thread::Builder::new().name("nibble".into()).stack_size(STACK_BYTES).spawn(command) {
        // A panic outside of a command is also a bug.
        Ok(thread) => thread.join().unwrap_or_else(|_| ended(Err(error::panicked()))),
        Err(why) => ended(Err(nibble_core::Error::not_started(why).into())),
    }
}

/// Parses the arguments and runs the command.
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

/// Prints an error and returns the exit code.
fn ended(done: Result<()>) -> ExitCode {
    let Err(error) = done else { return ExitCode::SUCCESS };
    error.tell();
    ExitCode::from(error.exit_code())
}

fn run(cli: Cli) -> Result<()> {
    // The commands that list the variables accept any bytes in the variables' values.
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
        Command::Study(args) => study::run(args),
        Command::Fidelity(args) => fidelity::run(args),
        Command::Replay(args) => replay::run(args),
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
