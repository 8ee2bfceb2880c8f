//! `nibble`: train, evaluate and sample language models, mixtures of experts and dense ones, whose activations are stored in MXFP4, quantize
//! files, and look at what the machine and the recipes do. One file a subcommand; this one only chooses.

mod checkpoint;
mod doctor;
mod eval;
mod generate;
mod inspect;
mod options;
mod plot;
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
use nibble_command::{console, env};
use std::process::ExitCode;

/// Train language models, mixtures of experts and dense ones, with activations stored in four bits and products in eight.
#[derive(Debug, Parser)]
#[command(name = "nibble", version, propagate_version = true, after_help = after_help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(train::Args),
    Eval(eval::Args),
    Generate(generate::Args),
    Plot(plot::Args),
    Report(report::Args),
    Quantize(quantize::Args),
    Recipe(recipe::Args),
    Inspect(inspect::Args),
    Doctor(doctor::Args),
    Bench(nibble_bench::Args),
    Verify(verify::Args),
}

fn after_help() -> String {
    format!(
        "Examples:\n  \
           nibble train                       the default run: a small model on the built-in language\n  \
           nibble train shakespeare --set data.source=tinyshakespeare.txt\n  \
           nibble generate runs/tiny --tokens 256\n  \
           nibble report runs/tiny\n  \
           nibble recipe mxfp4-hopper --trace\n\n\
         Environment variables:\n{}\n\
         Exit codes: 0 done, 1 the run failed, 2 the request cannot be followed as it stands,\n\
         130, 143, 129 a run was stopped by SIGINT (Ctrl-C), SIGTERM, SIGHUP.",
        env::help()
    )
}

fn main() -> ExitCode {
    let cli = match options::parse::<Cli>() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    env::unknown().iter().for_each(|unread| eprintln!("warning: {unread}"));
    match error::catch(|| run(cli).and_then(|()| console::require_said())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !matches!(error, error::Error::Stopped(_)) {
                eprintln!("error: {error}");
            }
            error.exit_code()
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    #[cfg(debug_assertions)]
    env::arm_faults()?;
    match cli.command {
        Command::Train(args) => train::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Plot(args) => plot::run(args),
        Command::Report(args) => report::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Recipe(args) => recipe::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(args) => nibble_bench::run(args),
        Command::Verify(args) => verify::run(args),
    }
}
