//! Lists of words that are separated by spaces.

/// Whether a list contains this word.
pub(crate) fn has(list: &str, word: &str) -> bool {
    list.split(' ').any(|one| one == word)
}
