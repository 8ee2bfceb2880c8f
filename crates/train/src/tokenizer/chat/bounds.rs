//! Limits on the work and the output of a template.
//!
//! There are two counters, which are independent of the machine. A step is an instruction of the template engine, 64 bytes of text that are
//! read, or an item of a list. Output is counted in bytes, whether it stays in memory or not; this count also bounds memory. A
//! conversation's length determines its step budget. A template's excess steps are taken from a reserve per file, so that many rows cannot
//! each take a long time.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

/// Prefix of the error for a template that exceeds a limit.
pub(super) const EXCEEDED: &str = "exceeded: ";

/// Number of steps per file in addition to the budgets of the file's conversations.
const RESERVE: u64 = 2_000_000;
/// Number of bytes of text that are read in one step.
const STEP_BYTES: u64 = 64;
/// Number of bytes that the template may produce for a conversation. Each byte of the conversation adds to this limit.
const MOST_MADE: u64 = 64 << 20;
/// Number of bytes of a single text. Each byte of the conversation adds to this limit.
const MOST_TEXT: u64 = 4 << 20;
/// Largest nesting depth of lists.
const MOST_DEPTH: usize = 200;
/// Number of bytes charged per list item.
pub(super) const ITEM_BYTES: u64 = 32;

/// The size of a conversation. This size determines the conversation's budget.
#[derive(Debug, Clone, Copy)]
pub(super) struct Warrant {
    /// Number of rendered messages.
    pub messages: usize,
    /// Number of bytes of the conversation as JSON.
    pub bytes: usize,
}

impl Warrant {
    /// The step budget of the conversation. Templates of published models take some hundred steps per message, and compare each message
    /// with every other message.
    fn steps(self) -> u64 {
        let (messages, bytes) = (self.messages as u64, self.bytes as u64);
        100_000 + 1000 * messages + 10 * messages.min(1000).pow(2) + bytes / 2
    }
}

/// The counters of one template. The template runs on one thread.
#[derive(Debug, Default)]
pub(super) struct Bounds {
    reserve: AtomicU64,
    most_steps: AtomicU64,
    /// Number of steps other than instructions.
    steps: AtomicU64,
    /// Number of instructions when the counter was last read.
    instructions: AtomicU64,
    most_made: AtomicU64,
    made: AtomicU64,
    most_text: AtomicU64,
}

pub(super) fn exceeded(why: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{EXCEEDED}{why}"))
}

impl Bounds {
    /// Resets the reserve of work at the beginning of a file.
    pub fn begin_file(&self) {
        self.reserve.store(RESERVE, Relaxed);
    }

    /// Whether the reserve of work is used up.
    pub fn is_spent(&self) -> bool {
        self.reserve.load(Relaxed) == 0
    }

    pub fn begin(&self, warrant: Warrant) {
        self.most_steps.store(warrant.steps() + self.reserve.load(Relaxed), Relaxed);
        self.most_made.store(MOST_MADE + 16 * warrant.bytes as u64, Relaxed);
        self.most_text.store(MOST_TEXT + 4 * warrant.bytes as u64, Relaxed);
        for count in [&self.steps, &self.instructions, &self.made] {
            count.store(0, Relaxed);
        }
    }

    /// Takes from the reserve the steps by which a conversation exceeds its own budget.
    pub fn settle(&self, warrant: Warrant, instructions: u64) {
        let taken = self.steps.load(Relaxed) + self.instructions.load(Relaxed).max(instructions);
        let beyond = taken.saturating_sub(warrant.steps());
        self.reserve.store(self.reserve.load(Relaxed).saturating_sub(beyond), Relaxed);
    }

    /// Number of remaining steps.
    fn left(&self, state: &State<'_, '_>) -> u64 {
        let (instructions, _) = state.fuel_levels().unwrap_or_default();
        self.instructions.store(instructions, Relaxed);
        self.most_steps.load(Relaxed).saturating_sub(self.steps.load(Relaxed) + instructions)
    }

    /// Counts `steps` steps.
    pub fn step(&self, state: &State<'_, '_>, steps: u64) -> Result<(), Error> {
        // Reading a short text counts as no step, but each loop iteration and each call counts as one step.
        if steps == 0 {
            return Ok(());
        }
        let left = self.left(state);
        // Only one thread updates the counter.
        self.steps.store(self.steps.load(Relaxed) + steps.min(left.saturating_add(1)), Relaxed);
        if steps < left { Ok(()) } else { Err(exceeded("takes more steps than its conversations warrant")) }
    }

    /// Counts bytes of output against the limit before the bytes are produced.
    pub fn make(&self, bytes: u64) -> Result<(), Error> {
        let most = self.most_made.load(Relaxed);
        let made = self.made.load(Relaxed).saturating_add(bytes);
        self.made.store(made, Relaxed);
        if made <= most {
            Ok(())
        } else {
            Err(exceeded(&format!("makes more than {} MiB of a conversation", most >> 20)))
        }
    }

    /// Counts the bytes of a text against the limit before the text is produced.
    pub fn make_text(&self, bytes: u64) -> Result<(), Error> {
        let most = self.most_text.load(Relaxed);
        if bytes > most {
            return Err(exceeded(&format!("makes a text of more than {} MiB", most >> 20)));
        }
        self.make(bytes)
    }

    /// Counts the reading of a whole value, and returns its approximate size as text.
    pub fn read(&self, state: &State<'_, '_>, value: &Value) -> Result<u64, Error> {
        if let Some(text) = value.as_str() {
            let bytes = text.len() as u64;
            return self.step(state, bytes / STEP_BYTES).map(|()| bytes);
        }
        let left = self.left(state);
        let mut weight = Weight { left, steps: 0, bytes: 0 };
        let weighed = weight.add(value, 0);
        self.step(state, weight.steps)?;
        weighed.map(|()| weight.bytes)
    }

    /// Counts a new value. A lazy iterable is evaluated first, because it may be built on another lazy iterable, and so on without limit.
    pub fn made(&self, state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
        if let Some(text) = value.as_str() {
            let bytes = text.len() as u64;
            self.step(state, bytes / STEP_BYTES)?;
            return self.make_text(bytes).map(|()| value);
        }
        match value.kind() {
            ValueKind::Iterable => {}
            ValueKind::Seq | ValueKind::Map => {
                let items = value.len().unwrap_or(0) as u64;
                self.step(state, items)?;
                return self.make(items.saturating_mul(ITEM_BYTES)).map(|()| value);
            }
            _ => return Ok(value),
        }
        self.computed(state, &value)
    }

    /// Counts the result of an addition against the limits. The template engine itself limits the depth of non-empty lazy sums.
    pub fn sum(&self, state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
        match value.len() {
            Some(items @ 1..) if value.kind() == ValueKind::Iterable => {
                self.step(state, items as u64 / 32)?;
                self.make(ITEM_BYTES + items as u64).map(|()| value)
            }
            _ => self.made(state, value),
        }
    }

    /// Evaluates the items of a lazy iterable.
    fn computed(&self, state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
        let left = self.left(state);
        let known = value.len().map_or(0, |len| len as u64);
        let mut items = Vec::new();
        if known < left {
            let most = usize::try_from(left).unwrap_or(usize::MAX);
            items.extend(value.try_iter()?.take(most));
        }
        let count = known.max(items.len() as u64);
        self.step(state, count)?;
        self.make(count.saturating_mul(ITEM_BYTES))?;
        Ok(Value::make_object_iterable(items, |items| Box::new(items.iter().cloned())))
    }
}

/// The cost of reading a value.
struct Weight {
    /// Limit of the number of steps.
    left: u64,
    steps: u64,
    bytes: u64,
}

impl Weight {
    fn add(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let kind = value.kind();
        self.steps += 1;
        self.bytes += 8;
        if let Some(text) = value.as_str() {
            self.steps += text.len() as u64 / STEP_BYTES;
            self.bytes += text.len() as u64;
            return Ok(());
        }
        if !matches!(kind, ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
            return Ok(());
        }
        if depth > MOST_DEPTH {
            return Err(exceeded(&format!("has lists within lists, {MOST_DEPTH} deep")));
        }
        // A namespace that contained itself would never be freed.
        if depth > 0 && is_namespace(value) {
            return Err(exceeded("keeps a namespace within another value"));
        }
        self.steps = self.steps.saturating_add(value.len().unwrap_or(0) as u64 / 8);
        for item in value.try_iter()? {
            // The caller counts these steps and returns an error.
            if self.steps > self.left {
                return Ok(());
            }
            if kind == ValueKind::Map {
                self.add(&value.get_item(&item).unwrap_or_default(), depth + 1)?;
            }
            self.add(&item, depth + 1)?;
        }
        Ok(())
    }
}

pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}
