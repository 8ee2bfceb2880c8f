//! Trials of the grouped products' instances, for who measures them: what a call asks for, and the same on another instance
//! than the chosen one.

use super::grouped_config::GroupedConfig;
use crate::probe::GpuInfo;
use nibble_choice::products::GroupedDesc;
use std::cell::RefCell;
use std::thread::LocalKey;

thread_local! {
    static CONFIG: RefCell<Option<GroupedConfig>> = const { RefCell::new(None) };
    static ASKED: RefCell<Option<Vec<GroupedDesc>>> = const { RefCell::new(None) };
}

/// Gives a cell of this thread back what it held, also where the work between panics.
struct Restore<T: 'static> {
    cell: &'static LocalKey<RefCell<Option<T>>>,
    before: Option<T>,
}

impl<T> Restore<T> {
    fn holding(cell: &'static LocalKey<RefCell<Option<T>>>, now: T) -> Self {
        Self { cell, before: cell.replace(Some(now)) }
    }
}

impl<T> Drop for Restore<T> {
    fn drop(&mut self) {
        self.cell.set(self.before.take());
    }
}

/// Runs `work` with this thread's grouped products on one instance.
pub fn with<R>(config: GroupedConfig, work: impl FnOnce() -> R) -> R {
    let _restore = Restore::holding(&CONFIG, config);
    work()
}

/// Runs `work` and says which grouped products this thread ran meanwhile, but for those that a call of this within it says.
pub fn asked<R>(work: impl FnOnce() -> R) -> (R, Vec<GroupedDesc>) {
    let _restore = Restore::holding(&ASKED, Vec::new());
    let result = work();
    (result, ASKED.take().unwrap_or_default())
}

/// The instance for a product: the one that is measured, or the chosen one.
pub(crate) fn config(desc: &GroupedDesc, gpu: &GpuInfo) -> GroupedConfig {
    ASKED.with_borrow_mut(|asked| {
        if let Some(asked) = asked {
            asked.push(*desc);
        }
    });
    CONFIG.with_borrow(|config| *config).unwrap_or_else(|| GroupedConfig::choose(desc, gpu))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::catch_unwind;

    fn measured() -> Option<GroupedConfig> {
        CONFIG.with_borrow(|config| *config)
    }

    #[test]
    fn a_trial_ends_with_its_work_even_if_that_panics() {
        let band = |band| GroupedConfig { band, ..GroupedConfig::USUAL };
        with(band(2), || {
            with(band(4), || assert_eq!(measured(), Some(band(4))));
            assert_eq!(measured(), Some(band(2)));
            assert!(catch_unwind(|| with(band(8), || panic!("on purpose"))).is_err());
            assert_eq!(measured(), Some(band(2)));
        });
        let ((), outer) = asked(|| assert!(asked(|| ()).1.is_empty()));
        assert!(outer.is_empty() && measured().is_none() && ASKED.with_borrow(Option::is_none));
    }
}
