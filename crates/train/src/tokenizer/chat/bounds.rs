//! How much a template may do, and what counts it.
//!
//! There are two counts, neither of which depends on the machine. A step is an instruction of the engine, 64 bytes of text that are read, or an item of a
//! list. What is made is counted in bytes, whether it is kept or not, so that memory is bounded by it too. A conversation warrants so many steps by its
//! length; what a template takes beyond comes out of a reserve for the whole file, so that many rows cannot each take long.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

/// Before what is said of a template that does too much.
pub(super) const EXCEEDED: &str = "exceeded: ";

/// Steps beyond those that conversations warrant, for all of a file.
const RESERVE: u64 = 2_000_000;
/// Bytes of text that are read in one step.
const STEP_BYTES: u64 = 64;
/// Bytes that a conversation's template may make, besides some for each byte of the conversation.
const MOST_MADE: u64 = 64 << 20;
/// Bytes of one text, likewise.
const MOST_TEXT: u64 = 4 << 20;
/// Lists within lists.
const MOST_DEPTH: usize = 200;
/// Bytes of an item of a list.
pub(super) const ITEM_BYTES: u64 = 32;

/// What a conversation warrants.
#[derive(Debug, Clone, Copy)]
pub(super) struct Warrant {
    /// Messages that are written.
    pub messages: usize,
    /// Bytes of the conversation as JSON.
    pub bytes: usize,
}

impl Warrant {
    /// Templates of published models take some hundred steps for a message, and look at each message from each other.
    fn steps(self) -> u64 {
        let (messages, bytes) = (self.messages as u64, self.bytes as u64);
        100_000 + 1000 * messages + 10 * messages.min(1000).pow(2) + bytes / 2
    }
}

/// The counts of one template. It is run by one thread.
#[derive(Debug, Default)]
pub(super) struct Bounds {
    reserve: AtomicU64,
    most_steps: AtomicU64,
    /// Steps that are no instructions.
    steps: AtomicU64,
    /// Instructions, when they were last looked at.
    instructions: AtomicU64,
    most_made: AtomicU64,
    made: AtomicU64,
    most_text: AtomicU64,
}

pub(super) fn exceeded(why: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{EXCEEDED}{why}"))
}

impl Bounds {
    /// The reserve of a file that is begun.
    pub fn begin_file(&self) {
        self.reserve.store(RESERVE, Relaxed);
    }

    /// Whether the reserve is used up.
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

    /// Takes what a conversation took beyond its warrant from the reserve.
    pub fn settle(&self, warrant: Warrant, instructions: u64) {
        let taken = self.steps.load(Relaxed) + self.instructions.load(Relaxed).max(instructions);
        let beyond = taken.saturating_sub(warrant.steps());
        self.reserve.store(self.reserve.load(Relaxed).saturating_sub(beyond), Relaxed);
    }

    /// Steps that are left.
    fn left(&self, state: &State<'_, '_>) -> u64 {
        let (instructions, _) = state.fuel_levels().unwrap_or_default();
        self.instructions.store(instructions, Relaxed);
        self.most_steps.load(Relaxed).saturating_sub(self.steps.load(Relaxed) + instructions)
    }

    /// Counts steps.
    pub fn step(&self, state: &State<'_, '_>, steps: u64) -> Result<(), Error> {
        // A short text is none; each turn of a loop, and each call, is.
        if steps == 0 {
            return Ok(());
        }
        let left = self.left(state);
        // One thread counts: no other comes between.
        self.steps.store(self.steps.load(Relaxed) + steps.min(left.saturating_add(1)), Relaxed);
        if steps < left { Ok(()) } else { Err(exceeded("takes more steps than its conversations warrant")) }
    }

    /// Counts bytes that are about to be made.
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

    /// Counts a text that is about to be made.
    pub fn make_text(&self, bytes: u64) -> Result<(), Error> {
        let most = self.most_text.load(Relaxed);
        if bytes > most {
            return Err(exceeded(&format!("makes a text of more than {} MiB", most >> 20)));
        }
        self.make(bytes)
    }

    /// Counts a value that is read whole; its bytes as text, more or less.
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

    /// Counts a value that is new. What would compute its items when asked has them computed: it may be made of another such, and so on without an end.
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

    /// What an addition gives. The engine itself sees to it that a list of sums is not too deep, unless there is nothing in it.
    pub fn sum(&self, state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
        match value.len() {
            Some(items @ 1..) if value.kind() == ValueKind::Iterable => {
                self.step(state, items as u64 / 32)?;
                self.make(ITEM_BYTES + items as u64).map(|()| value)
            }
            _ => self.made(state, value),
        }
    }

    /// The items of what computes them when asked.
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

/// What reading a value takes.
struct Weight {
    /// Steps, at most.
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
        // One that held itself would never be freed.
        if depth > 0 && is_namespace(value) {
            return Err(exceeded("keeps a namespace within another value"));
        }
        self.steps = self.steps.saturating_add(value.len().unwrap_or(0) as u64 / 8);
        for item in value.try_iter()? {
            // Who called counts these steps, and fails.
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
