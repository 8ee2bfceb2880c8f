//! Trials of the grouped products' instances, for who measures them: what a call asks for, and the same on another instance
//! than the chosen one.

use super::grouped_product::{Config, Desc};
use crate::probe::GpuInfo;
use std::cell::{Cell, RefCell};

thread_local! {
    static CONFIG: Cell<Option<Config>> = const { Cell::new(None) };
    static ASKED: RefCell<Option<Vec<Desc>>> = const { RefCell::new(None) };
}

/// Runs `work` with this thread's grouped products on one instance.
pub fn with<R>(config: Config, work: impl FnOnce() -> R) -> R {
    let before = CONFIG.replace(Some(config));
    let result = work();
    CONFIG.set(before);
    result
}

/// Runs `work` and says which grouped products this thread ran meanwhile.
pub fn asked<R>(work: impl FnOnce() -> R) -> (R, Vec<Desc>) {
    ASKED.set(Some(Vec::new()));
    let result = work();
    (result, ASKED.take().unwrap_or_default())
}

/// The instance for a product: that on trial, or the chosen one.
pub(super) fn config(desc: &Desc, gpu: &GpuInfo) -> Config {
    ASKED.with_borrow_mut(|asked| {
        if let Some(asked) = asked {
            asked.push(*desc);
        }
    });
    CONFIG.get().unwrap_or_else(|| Config::choose(desc, gpu))
}
