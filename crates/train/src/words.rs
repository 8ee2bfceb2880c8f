//! Lists of words, with spaces between.

/// Whether a list has this word.
pub(crate) fn has(list: &str, word: &str) -> bool {
    list.split(' ').any(|one| one == word)
}
