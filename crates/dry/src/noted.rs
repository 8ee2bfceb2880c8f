//! What is noted of some work, while somebody asks for it.

use std::sync::{Mutex, PoisonError};

/// A list that is there while somebody collects it.
#[derive(Debug)]
pub(crate) struct Noted<T>(Mutex<Option<Vec<T>>>);

impl<T> Default for Noted<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T> Noted<T> {
    /// Runs `work` and says what was noted, in order. Inside another such call the outer one is not told of what the inner one is.
    pub fn collect<R, E>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<(R, Vec<T>), E> {
        let outer = self.replace(Some(Vec::new()));
        let done = work();
        let noted = self.replace(outer).unwrap_or_default();
        Ok((done?, noted))
    }

    /// Whether somebody collects.
    pub fn is_asked(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// How much was noted since somebody began to collect.
    pub fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, Vec::len)
    }

    pub fn note(&self, one: T) {
        if let Some(noted) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            noted.push(one);
        }
    }

    fn replace(&self, noted: Option<Vec<T>>) -> Option<Vec<T>> {
        std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), noted)
    }
}
