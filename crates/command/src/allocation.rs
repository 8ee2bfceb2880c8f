//! Out-of-memory handling: the process ends with an error that says what needed the memory, instead of a bare abort.
//!
//! If a tensor's buffer gets no memory, its op returns an error that names the arena and the largest sizes. Any other refused allocation
//! ends the process with an error that states the current phase and the number of bytes. The allocator in this module does that, unless the
//! caller is within `may_be_refused` of [`nibble_core::allocation`].

use nibble_core::allocation::{takes_refusals, with_phase};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// The system's allocator, with which a refused allocation ends the process with an error, unless the caller handles refusals
/// ([`nibble_core::allocation::may_be_refused`]).
#[derive(Debug)]
pub struct Telling;

// SAFETY: every method passes its arguments to the system's allocator, and returns its result or does not return.
unsafe impl GlobalAlloc for Telling {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller guarantees the allocator's requirements.
        given(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller guarantees the allocator's requirements.
        given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees the allocator's requirements.
        given(unsafe { System.realloc(memory, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees the allocator's requirements.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[inline]
fn given(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() && !takes_refusals() {
        refused(bytes);
    }
    memory
}

#[cold]
fn refused(bytes: usize) -> ! {
    end(|to, phase| write!(to, "out of memory: {phase}: the system refused this process {bytes} bytes"))
}

/// Ends the process after an error from which it cannot recover. This function allocates nothing, and removes unfinished files.
pub(crate) fn end(why: impl FnOnce(&mut &mut [u8], &str) -> std::io::Result<()>) -> ! {
    static ENDS: AtomicBool = AtomicBool::new(false);
    thread_local! {
        static ENDS_HERE: Cell<bool> = const { Cell::new(false) };
    }
    if ENDS_HERE.replace(true) {
        // The removal of a file with a long name allocates.
        exit();
    }
    if ENDS.swap(true, Ordering::Relaxed) {
        // Another thread is already ending the process.
        loop {
            std::thread::yield_now();
        }
    }
    let mut text = [0; 512];
    let mut room = &mut text[..];
    // Text beyond the buffer is cut off.
    let _ = room.write_all(b"error: ").and_then(|()| {
        with_phase(|phase, _| why(&mut room, if phase.is_empty() { "starting" } else { phase }))
    });
    let _ = room.write_all(b"\n");
    let left = room.len();
    let told = 512 - left;
    write_aside(&text[..told]);
    nibble_train::files::remove_unfinished();
    exit()
}

/// From now on, makes an abort end the process with an error and exit code 1, because libc aborts if it finds no memory for a thread's
/// data.
pub fn tell_aborts() {
    #[cfg(unix)]
    {
        extern "C" fn aborted(_: libc::c_int) {
            end(|to, phase| {
                write!(to, "{phase}: the process aborted, probably out of memory; the line above says why")
            })
        }
        let handler: extern "C" fn(libc::c_int) = aborted;
        // SAFETY: the handler does not allocate, wait or return.
        unsafe { libc::signal(libc::SIGABRT, handler as libc::sighandler_t) };
    }
}

/// Undoes [`tell_aborts`], so that an injected kill ends the process at once.
#[cfg(debug_assertions)]
pub(crate) fn leave_aborts() {
    #[cfg(unix)]
    // SAFETY: the default action is always valid.
    unsafe {
        libc::signal(libc::SIGABRT, libc::SIG_DFL)
    };
}

#[cfg(unix)]
fn write_aside(text: &[u8]) {
    // SAFETY: the call reads `text.len()` bytes of a slice. (The standard library's handle may be locked by this very thread.)
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}

#[cfg(not(unix))]
fn write_aside(text: &[u8]) {
    let _ = std::io::stderr().write_all(text);
}

#[cfg(unix)]
fn exit() -> ! {
    // SAFETY: the call ends the process. Exit handlers are skipped, because they may allocate or wait for this thread.
    unsafe { libc::_exit(1) }
}

#[cfg(not(unix))]
fn exit() -> ! {
    std::process::exit(1)
}
