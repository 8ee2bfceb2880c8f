//! The thread that runs a template.
//!
//! A compiled template borrows its text, which a thread can hold on its stack. The thread's stack also has a fixed size, so that the
//! deepest allowed template and value behave the same for every caller.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use minijinja::machinery::{CodeGenerator, Instructions, Vm, make_string_output, parse};
use minijinja::{AutoEscape, Environment, Error, Value};

use super::bounds::{Bounds, Warrant};
use super::{builtins, guard};

/// Stack size of the thread in bytes. The operating system commits this memory only as it is used.
const STACK: usize = 64 << 20;

/// The reason why a template gives no text.
#[derive(Debug)]
pub(super) enum Failure {
    /// The engine returned an error.
    Said(Error),
    /// The engine panicked.
    Broken,
}

/// A request to the thread.
struct Job {
    /// Index of one of the thread's templates.
    program: usize,
    context: Value,
    warrant: Warrant,
    answer: Sender<Result<String, Failure>>,
}

/// A running thread, which ends when this value is dropped.
#[derive(Debug)]
pub(super) struct Engine {
    jobs: Mutex<Sender<Job>>,
    pub bounds: Arc<Bounds>,
}

impl Engine {
    /// Starts a thread that renders these templates, each of which has a name.
    ///
    /// # Errors
    /// Returns an error for invalid templates.
    pub fn start(texts: Vec<(&'static str, String)>, time: Option<SystemTime>) -> Result<Self, Failure> {
        let bounds = Arc::new(Bounds::default());
        bounds.begin_file();
        let (jobs, asked) = channel();
        let (ready, started) = channel();
        let of = Arc::clone(&bounds);
        let run = move || {
            let done = catch_unwind(AssertUnwindSafe(|| serve(&texts, time, &of, &asked, &ready)));
            if done.is_err() {
                // After a successful start, no thread receives this error.
                let _ = ready.send(Err(Failure::Broken));
            }
        };
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(STACK);
        thread.spawn(run).map_err(|_| Failure::Broken)?;
        started.recv().unwrap_or(Err(Failure::Broken))?;
        Ok(Self { jobs: Mutex::new(jobs), bounds })
    }

    /// Renders the template with this index.
    ///
    /// # Errors
    /// Returns the errors of the engine.
    pub fn run(&self, program: usize, context: Value, warrant: Warrant) -> Result<String, Failure> {
        let (answer, answered) = channel();
        let job = Job { program, context, warrant, answer };
        {
            let jobs = self.jobs.lock().map_err(|_| Failure::Broken)?;
            jobs.send(job).map_err(|_| Failure::Broken)?;
        }
        answered.recv().unwrap_or(Err(Failure::Broken))
    }
}

/// A template that has been compiled for the engine.
struct Program<'a> {
    main: Instructions<'a>,
    blocks: BTreeMap<&'a str, Instructions<'a>>,
}

impl<'a> Program<'a> {
    fn of(name: &'a str, text: &'a str) -> Result<Self, Error> {
        guard::check_source(text)?;
        let parsed = parse(text, name, minijinja::syntax::SyntaxConfig, guard::WHITESPACE)?;
        let mut compiler = CodeGenerator::new(name, text);
        compiler.compile_stmt(&guard::guarded(&parsed));
        let (main, blocks) = compiler.finish();
        Ok(Self { main, blocks })
    }
}

fn serve(
    texts: &[(&'static str, String)],
    time: Option<SystemTime>,
    bounds: &Arc<Bounds>,
    asked: &Receiver<Job>,
    ready: &Sender<Result<(), Failure>>,
) {
    let environment = builtins::environment(bounds, time);
    let programs: Result<Vec<Program<'_>>, Error> =
        texts.iter().map(|(name, text)| Program::of(name, text)).collect();
    let programs = match programs {
        Ok(programs) => programs,
        Err(error) => {
            let _ = ready.send(Err(Failure::Said(error)));
            return;
        }
    };
    if ready.send(Ok(())).is_err() {
        return;
    }
    for Job { program, context, warrant, answer } in asked {
        let run = || run(&environment, &programs[program], context, warrant, bounds);
        // The engine's state is rebuilt for each text, so that no state is reused after a panic.
        let text = catch_unwind(AssertUnwindSafe(run));
        // The caller may have stopped waiting for the text.
        let _ = answer.send(text.unwrap_or(Err(Failure::Broken)));
    }
}

fn run<'a>(
    environment: &'a Environment<'a>,
    program: &'a Program<'a>,
    context: Value,
    warrant: Warrant,
    bounds: &Bounds,
) -> Result<String, Failure> {
    let mut text = String::new();
    bounds.begin(warrant);
    let done = {
        let mut out = make_string_output(&mut text);
        Vm::new(environment).eval(&program.main, context, &program.blocks, &mut out, AutoEscape::None)
    };
    let instructions = match &done {
        Ok((_, state)) => state.fuel_levels().unwrap_or_default().0,
        Err(_) => 0,
    };
    bounds.settle(warrant, instructions);
    match done {
        Ok(_) => Ok(text),
        Err(error) => Err(Failure::Said(error)),
    }
}
