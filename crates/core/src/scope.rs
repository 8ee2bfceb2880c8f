//! The arena from which a backend allocates.

use crate::{Error, Result};
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};

/// The arena from which a backend currently allocates memory, if [`Backend::within`](crate::Backend::within) has chosen one. Each backend
/// has one `Scope`. While one thread works within an arena, all threads that allocate memory from the backend use this arena, including the
/// threads of a thread pool.
#[derive(Debug)]
pub struct Scope<A> {
    current: Mutex<Option<(A, ThreadId)>>,
}

impl<A> Default for Scope<A> {
    fn default() -> Self {
        Self { current: Mutex::new(None) }
    }
}

impl<A: Clone + Debug> Scope<A> {
    /// The current arena; `None` means that allocations come from the device's pool.
    pub fn current(&self) -> Option<A> {
        self.lock().as_ref().map(|(arena, _)| arena.clone())
    }

    /// Runs `work` with `arena` as the current arena, and restores the previous arena afterwards, even if `work` panics.
    ///
    /// # Errors
    /// Any error of `work`, and [`Error::Device`] if another thread is working within an arena. The method does not wait until the other
    /// thread has finished, because ranks that wait for each other within arenas would deadlock.
    pub fn run<R>(&self, arena: &A, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let mut current = self.lock();
        let me = thread::current().id();
        if let Some((other, _)) = current.as_ref().filter(|(_, thread)| *thread != me) {
            return Err(Error::Device {
                call: format!("within({arena:?})"),
                why: format!("another thread works within {other:?}; one thread at a time may"),
            });
        }
        let _restored = Restored { scope: self, outer: current.replace((arena.clone(), me)) };
        drop(current);
        work()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<(A, ThreadId)>> {
        // The value is replaced as a whole, so it is valid even after a panic.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Restores the outer arena when it is dropped.
struct Restored<'a, A: Clone + Debug> {
    scope: &'a Scope<A>,
    outer: Option<(A, ThreadId)>,
}

impl<A: Clone + Debug> Drop for Restored<'_, A> {
    fn drop(&mut self) {
        let inner = std::mem::replace(&mut *self.scope.lock(), self.outer.take());
        // `inner` is dropped outside the lock, because it may be the arena's last handle.
        drop(inner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn the_innermost_counts_and_the_outer_one_comes_back() {
        let scope = Scope::default();
        assert_eq!(scope.current(), None);
        let done = scope.run(&1, || {
            assert_eq!(scope.current(), Some(1));
            assert_eq!(scope.run(&2, || Ok(scope.current()))?, Some(2));
            assert_eq!(scope.current(), Some(1));
            let refused: Result<()> =
                scope.run(&3, || Err(Error::Device { call: String::new(), why: String::new() }));
            assert!(refused.is_err());
            assert_eq!(scope.current(), Some(1));
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                scope.run(&4, || -> Result<()> { panic!("meant for this test") })
            }));
            assert!(panicked.is_err());
            assert_eq!(scope.current(), Some(1));
            Ok(7)
        });
        assert_eq!((done.unwrap(), scope.current()), (7, None));
    }

    #[test]
    fn another_thread_sees_the_arena_and_may_not_choose_one() {
        let scope = &Scope::default();
        let other = || {
            thread::scope(|threads| {
                threads.spawn(|| (scope.current(), scope.run(&"mine", || Ok(())))).join().unwrap()
            })
        };
        scope
            .run(&"step", || {
                let (current, refused) = other();
                assert_eq!(current, Some("step"));
                let error = refused.unwrap_err().to_string();
                assert!(error.contains("step") && error.contains("mine"), "{error}");
                Ok(())
            })
            .unwrap();
        assert!(other().1.is_ok(), "afterwards it may");
    }
}
