//! Records of some work, while records are collected.

use std::sync::{Mutex, PoisonError};

/// A list of records; it exists only during a collection.
#[derive(Debug)]
pub(crate) struct Noted<T>(Mutex<Option<Vec<T>>>);

impl<T> Default for Noted<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T> Noted<T> {
    /// Runs `work` and returns its records, in order. If calls are nested, the outer call does not get the records of the inner call.
    pub fn collect<R, E>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<(R, Vec<T>), E> {
        let outer = self.replace(Some(Vec::new()));
        let done = work();
        let noted = self.replace(outer).unwrap_or_default();
        Ok((done?, noted))
    }

    /// Whether records are collected.
    pub fn is_asked(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Number of records so far.
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
