//! Filters, tests, functions and methods that templates may use. Each is wrapped in code that counts its work.

use std::sync::Arc;
use std::time::SystemTime;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters, functions, tests};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::bounds::{Bounds, ITEM_BYTES, exceeded, is_namespace};
use super::{date, guard, python};
use crate::words;

/// The names of the filters that replace `{% generation %}` blocks.
pub(super) const BARE_FILTER: &str = "nibble_answer";
pub(super) const MARK_FILTER: &str = "nibble_marked_answer";

/// Marks before and after an answer: code points that Unicode excludes from texts.
pub(super) const BEGIN: char = '\u{fdd0}';
pub(super) const END: char = '\u{fdd1}';

/// Largest number of instructions per conversation. A third-party template need not terminate, but `bounds` stops most templates earlier.
pub(super) const MOST_WORK: u64 = 100_000_000;

/// Prefix of the errors that a template itself raises.
pub(super) const RAISED: &str = "raised: ";

/// Number of bytes charged for a macro, because a macro lives until its template ends.
const MACRO_BYTES: u64 = 1024;
/// Largest width that a format may specify.
const MOST_WIDTH: u64 = 10_000;

/// Functions whose results nest their arguments one level deeper.
const NESTING: &str = "batch dictsort groupby items map slice zip";

/// Functions that compare items with each other.
const SORTING: &str = "dictsort groupby sort unique";

/// Functions that split a text into a list.
const TAKING_APART: &str = "\
    batch groupby lines list map max min reject rejectattr reverse select selectattr slice sort split \
    splitlines sum unique zip";

/// Functions that read only the outermost level of a value.
const SHALLOW: &str = "count d default first get items keys last length values";

type Result<T, E = Error> = std::result::Result<T, E>;

/// The environment of templates. `strftime_now` returns `time`, or the current time if `time` is `None`.
pub(super) fn environment(bounds: &Arc<Bounds>, time: Option<SystemTime>) -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_debug(false);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(MOST_WORK));
    add_filters(&mut environment, bounds);
    add_own(&mut environment, bounds, time);
    add_tests(&mut environment, bounds);
    add_hooks(&mut environment, bounds);
    let of = Arc::clone(bounds);
    environment.set_unknown_method_callback(move |state, value, method, args| {
        let all: Vec<Value> = std::iter::once(value).chain(args).cloned().collect();
        before(&of, state, method, &all)?;
        // The engine's implementation does not terminate if the search text is empty. Python counts a match before each character and one
        // match at the end.
        if let ("count", Some(text), [what]) = (method, value.as_str(), args)
            && what.as_str() == Some("")
        {
            return Ok(Value::from(text.chars().count() + 1));
        }
        after(&of, state, method, unknown_method_callback(state, value, method, args)?)
    });
    let of = Arc::clone(bounds);
    environment.set_formatter(move |out, state, value| {
        let write = |out: &mut minijinja::Output<'_>, text: &str| -> Result<()> {
            of.make_text(text.len() as u64)?;
            out.write_str(text).map_err(Error::from)
        };
        // The code adds one extra step, so that empty output also counts.
        let read = value.as_str().map_or(0, |text| text.len() as u64 / 64);
        of.step(state, 1 + read)?;
        match value.as_str() {
            Some(text) => write(out, text),
            None => {
                of.read(state, value)?;
                write(out, &python::text(value))
            }
        }
    });
    environment
}

/// Counts the work of a filter, test or method before it is called with `args`. The first argument is the receiver.
fn before(bounds: &Bounds, state: &State<'_, '_>, name: &str, args: &[Value]) -> Result<()> {
    let Some((of, others)) = args.split_first() else { return Ok(()) };
    let mut read = 0;
    match of.as_str() {
        None if words::has(SHALLOW, name) => bounds.step(state, of.len().unwrap_or(0) as u64 / 8)?,
        _ => read += bounds.read(state, of)?,
    }
    if words::has(SORTING, name) {
        bounds.step(state, read / 4)?;
    }
    let mut given = 0;
    for other in others {
        if is_namespace(other) {
            return Err(exceeded("gives a namespace to what may keep it"));
        }
        given += bounds.read(state, other)?;
    }
    let text = |at: usize| args.get(at).and_then(Value::as_str);
    let items = of.len().unwrap_or(0) as u64;
    // These functions convert a text to a list of characters, or split the text.
    if let Some(whole) = of.as_str()
        && words::has(TAKING_APART, name)
    {
        let parts = parts(name, whole, text(1));
        bounds.step(state, parts)?;
        bounds.make(parts.saturating_mul(ITEM_BYTES))?;
    }
    match (name, of.as_str()) {
        ("map" | "select" | "selectattr" | "reject" | "rejectattr", _) => {
            bounds.step(state, items.saturating_mul(given) / 64)
        }
        ("replace", Some(whole)) => {
            let (from, to) = (text(1).unwrap_or_default(), text(2).unwrap_or_default());
            let count = whole.matches(from).count() as u64;
            bounds.make_text((to.len() as u64).saturating_mul(count).saturating_add(whole.len() as u64))
        }
        ("join", None) => {
            let between = text(1).map_or(0, str::len) as u64;
            bounds.make_text(items.saturating_mul(between).saturating_add(read))
        }
        // This branch handles the method `join`, as in `", ".join(items)`.
        ("join", Some(between)) => {
            let items = others.first().and_then(Value::len).unwrap_or(0) as u64;
            bounds.make_text(items.saturating_mul(between.len() as u64).saturating_add(given))
        }
        ("batch" | "slice", _) => {
            let count = others.first().and_then(Value::as_usize).unwrap_or(0) as u64;
            bounds.step(state, count)?;
            bounds.make(count.saturating_mul(2 * ITEM_BYTES))
        }
        ("format", Some(format)) => widths(bounds, format, others, given),
        _ => Ok(()),
    }
}

/// Number of items into which a text is split.
fn parts(name: &str, whole: &str, between: Option<&str>) -> u64 {
    let count = match (name, between) {
        ("split", Some(between)) => whole.matches(between).count() + 1,
        ("split", None) => whole.split_whitespace().count(),
        ("lines" | "splitlines", _) => whole.matches('\n').count() + 1,
        _ => whole.chars().count(),
    };
    count as u64
}

/// Counts the largest output that a format can write, before the format is applied.
fn widths(bounds: &Bounds, format: &str, args: &[Value], given: u64) -> Result<()> {
    let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let widest = numbers.map(|digits| digits.parse().unwrap_or(u64::MAX)).max().unwrap_or(0);
    // A width may be given as an argument: `%*d`.
    let given_widths = args.iter().filter(|_| format.contains('*')).filter_map(Value::as_usize);
    let widest = given_widths.map(|width| width as u64).max().unwrap_or(0).max(widest);
    if widest > MOST_WIDTH {
        return Err(exceeded(&format!("formats with a number of more than {MOST_WIDTH}")));
    }
    let fields = format.bytes().filter(|byte| matches!(byte, b'%' | b'{')).count() as u64;
    let each = given.saturating_mul(2).saturating_add(4 * widest).saturating_add(400);
    bounds.make_text(fields.saturating_mul(each).saturating_add(format.len() as u64))
}

/// Counts the size of a result.
fn after(bounds: &Bounds, state: &State<'_, '_>, name: &str, made: Value) -> Result<Value> {
    let made = bounds.made(state, made)?;
    if words::has(NESTING, name) {
        bounds.read(state, &made)?;
    }
    Ok(made)
}

/// Lists functions of a module of the engine, with their names.
macro_rules! named {
    ($module:ident { $($name:ident)* }) => {
        [$((stringify!($name), Value::from_function($module::$name)),)*]
    };
}

/// Adds the engine's filters.
fn add_filters(environment: &mut Environment<'static>, bounds: &Arc<Bounds>) {
    let own = named!(filters {
        safe escape lower upper title capitalize replace length dictsort items reverse trim join split lines default
        round abs int float attr first last min max sort list bool batch slice sum select reject selectattr rejectattr
        map groupby unique zip pprint format
    });
    let others = [
        ("e", Value::from_function(filters::escape)),
        ("count", Value::from_function(filters::length)),
        ("d", Value::from_function(filters::default)),
        ("string", Value::from_function(|value: Value| python::text(&value))),
        (BARE_FILTER, Value::from_function(|value: Value| value)),
        (MARK_FILTER, Value::from_function(|value: String| format!("{BEGIN}{value}{END}"))),
    ];
    for (name, filter) in own.into_iter().chain(others) {
        let of = Arc::clone(bounds);
        environment.add_filter(name, move |state: &State<'_, '_>, args: Rest<Value>| {
            before(&of, state, name, &args)?;
            after(&of, state, name, filter.call(state, &args)?)
        });
    }
}

/// Adds Nibble's own filters and functions.
fn add_own(environment: &mut Environment<'static>, bounds: &Arc<Bounds>, time: Option<SystemTime>) {
    let of = Arc::clone(bounds);
    let indent = move |state: &State<'_, '_>, text: String, width: Option<usize>, options: Kwargs| {
        of.step(state, text.len() as u64 / 8)?;
        let indented = python::indent(text, width, options, &|bytes| of.make_text(bytes as u64))?;
        Ok::<_, Error>(indented)
    };
    environment.add_filter("indent", indent);
    let of = Arc::clone(bounds);
    environment.add_filter("tojson", move |state: &State<'_, '_>, value: Value, options: Kwargs| {
        let indent: Option<usize> = options.get("indent")?;
        // Python's function has these arguments, which are accepted here but ignored.
        let _: (Option<bool>, Option<bool>, Option<Value>) =
            (options.get("ensure_ascii")?, options.get("sort_keys")?, options.get("separators")?);
        options.assert_all_used()?;
        of.read(state, &value)?;
        let json = python::json(&value, indent, &|spaces| of.make_text(spaces as u64))?;
        of.made(state, Value::from(json))
    });
    environment.add_function("raise_exception", |message: &str| -> Result<Value> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    environment.add_function("strftime_now", move |format: &str| {
        date::strftime(time.unwrap_or_else(SystemTime::now), format)
    });
    for (name, function) in named!(functions { range dict namespace }) {
        let of = Arc::clone(bounds);
        environment.add_function(name, move |state: &State<'_, '_>, args: Rest<Value>| {
            for arg in args.iter() {
                of.read(state, arg)?;
            }
            let made = function.call(state, &args)?;
            let items = made.len().unwrap_or(0) as u64;
            of.step(state, items / 8)?;
            of.make(256 + items * ITEM_BYTES).map(|()| made)
        });
    }
}

/// Adds the engine's tests.
fn add_tests(environment: &mut Environment<'static>, bounds: &Arc<Bounds>) {
    environment.add_test("undefined", tests::is_undefined);
    environment.add_test("defined", tests::is_defined);
    environment.add_test("none", tests::is_none);
    environment.add_test("safe", tests::is_safe);
    environment.add_test("escaped", tests::is_safe);
    environment.add_test("boolean", tests::is_boolean);
    environment.add_test("odd", tests::is_odd);
    environment.add_test("even", tests::is_even);
    environment.add_test("number", tests::is_number);
    environment.add_test("integer", tests::is_integer);
    environment.add_test("int", tests::is_integer);
    environment.add_test("float", tests::is_float);
    environment.add_test("string", tests::is_string);
    environment.add_test("sequence", |value: &Value| python::has_items(value));
    environment.add_test("iterable", |value: &Value| python::has_items(value));
    environment.add_test("mapping", tests::is_mapping);
    environment.add_test("true", tests::is_true);
    environment.add_test("false", tests::is_false);
    environment.add_test("filter", tests::is_filter);
    environment.add_test("test", tests::is_test);
    // These tests compare their arguments.
    let eq = Value::from_function(tests::is_eq);
    let ne = Value::from_function(tests::is_ne);
    let [lt, le] = [Value::from_function(tests::is_lt), Value::from_function(tests::is_le)];
    let [gt, ge] = [Value::from_function(tests::is_gt), Value::from_function(tests::is_ge)];
    let reading = [
        ("eq", eq.clone()),
        ("equalto", eq.clone()),
        ("==", eq),
        ("ne", ne.clone()),
        ("!=", ne),
        ("lt", lt.clone()),
        ("lessthan", lt.clone()),
        ("<", lt),
        ("le", le.clone()),
        ("<=", le),
        ("gt", gt.clone()),
        ("greaterthan", gt.clone()),
        (">", gt),
        ("ge", ge.clone()),
        (">=", ge),
        ("in", Value::from_function(tests::is_in)),
        ("divisibleby", Value::from_function(tests::is_divisibleby)),
        ("startingwith", Value::from_function(tests::is_startingwith)),
        ("endingwith", Value::from_function(tests::is_endingwith)),
        ("lower", Value::from_function(tests::is_lower)),
        ("upper", Value::from_function(tests::is_upper)),
        ("sameas", Value::from_function(tests::is_sameas)),
    ];
    for (name, test) in reading {
        let of = Arc::clone(bounds);
        environment.add_test(name, move |state: &State<'_, '_>, args: Rest<Value>| {
            for arg in args.iter() {
                of.read(state, arg)?;
            }
            test.call(state, &args)
        });
    }
}

/// Adds the filters that a guarded template applies to operands and results.
fn add_hooks(environment: &mut Environment<'static>, bounds: &Arc<Bounds>) {
    type Hook = fn(&Bounds, &State<'_, '_>, Value) -> Result<Value>;
    let hooks: [(&str, Hook); 8] = [
        (guard::READ, |bounds, state, value| bounds.read(state, &value).map(|_| value)),
        (guard::WRITTEN, |bounds, state, value| {
            let bytes = bounds.read(state, &value)?;
            bounds.make_text(bytes).map(|()| value)
        }),
        (guard::MADE, |bounds, state, value| bounds.made(state, value)),
        (guard::SUM, |bounds, state, value| bounds.sum(state, value)),
        (guard::BUILT, |bounds, state, value| {
            let value = bounds.made(state, value)?;
            bounds.read(state, &value).map(|_| value)
        }),
        (guard::KEPT, |_, _, value| match is_namespace(&value) {
            true => Err(exceeded("keeps a namespace within another value")),
            false => Ok(value),
        }),
        (guard::INDEXED, |bounds, state, value| {
            let is_walked = matches!(value.kind(), ValueKind::Iterable | ValueKind::String);
            let items = if is_walked { value.len().unwrap_or(0) as u64 } else { 0 };
            bounds.step(state, items / 8).map(|()| value)
        }),
        (guard::DEFINED, |bounds, state, value| {
            bounds.step(state, 8)?;
            bounds.make(MACRO_BYTES).map(|()| value)
        }),
    ];
    for (name, hook) in hooks {
        let of = Arc::clone(bounds);
        environment.add_filter(name, move |state: &State<'_, '_>, value: Value| hook(&of, state, value));
    }
}
