//! Errors for unknown names.

/// The message that `name` is not a known `what`. The message lists the known names, and suggests the nearest name.
pub(super) fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    // A name that is much longer than all known names is not similar to any of them, and is slow to compare.
    let named = known.clone().filter(|_| name.len() < 200);
    let near = named.max_by(|a, b| strsim::jaro(a, name).total_cmp(&strsim::jaro(b, name)));
    let list = known.collect::<Vec<_>>().join(", ");
    match near.filter(|n| strsim::jaro(n, name) > 0.7) {
        Some(near) => format!("no {what} {name:?}; did you mean {near:?}? There are: {list}"),
        None => format!("no {what} {name:?}; there are: {list}"),
    }
}
