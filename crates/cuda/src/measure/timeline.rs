//! A timeline of the device: kernels, memsets and copies with their start and end in nanoseconds, as CUPTI reports them.
//!
//! Events around an operation ([`Cuda::profiled`]) cannot measure the parts of a replayed recording, but CUPTI can. `libcupti`
//! comes with any CUDA toolkit and as a Python wheel; it is loaded on first use.

use crate::Cuda;
use crate::device::Launched;
use libloading::Library;
use nibble_core::{Error, Result};
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

/// One activity of the device, such as a kernel or a copy.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// The operation that launched the activity, and the kernel's name. For a memset or a copy, both
    /// names are the kind of the activity.
    pub what: Launched,
    /// When the activity started, in nanoseconds of the device's clock.
    pub start_ns: u64,
    /// When the activity ended, in nanoseconds of the device's clock.
    pub end_ns: u64,
}

/// A CUPTI record, from which [`spans`] makes a [`Span`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    kind: u32,
    start_ns: u64,
    end_ns: u64,
    /// The driver's number for the device.
    device: u32,
    whose: Whose,
}

/// The origin of an activity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// A kernel of this crate.
    Ours,
    /// A kernel of NCCL, for messages between ranks.
    Nccl,
    /// The driver, for a memset or a copy; also used for records that are not kernels.
    Driver,
}

/// The operation name of spans that are NCCL messages between ranks.
pub const EXCHANGE: &str = "exchange";

const KIND_COPY: u32 = 1;
const KIND_FILL: u32 = 2;
const KIND_KERNEL: u32 = 10;
const KINDS: [u32; 3] = [KIND_COPY, KIND_FILL, KIND_KERNEL];
const OUT_OF_RECORDS: i32 = 12;
const FLUSH_FORCED: u32 = 1;
/// The size of each buffer that CUPTI fills.
const BUFFER_BYTES: usize = 8 << 20;
/// Alignment of records in a buffer.
const BUFFER_ALIGN: usize = 8;

/// The first fields of a kernel record, which have been the same since CUDA 11
/// (`CUpti_ActivityKernel5` to `13`).
#[repr(C)]
struct KernelRecord {
    kind: u32,
    _settings: [u32; 3],
    start: u64,
    end: u64,
    _completed: u64,
    device: u32,
    _shape: [u32; 13],
    _grid_id: i64,
    name: *const c_char,
}

/// The first fields of copy and memset records (`CUpti_ActivityMemcpy4` to `6`, `CUpti_ActivityMemset3` and
/// `4`).
#[repr(C)]
struct TransferRecord {
    kind: u32,
    _settings: u32,
    _bytes: u64,
    start: u64,
    end: u64,
    device: u32,
}

type Requested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// The functions of CUPTI.
struct Cupti {
    enable: unsafe extern "C" fn(u32) -> i32,
    disable: unsafe extern "C" fn(u32) -> i32,
    flush: unsafe extern "C" fn(u32) -> i32,
    next: unsafe extern "C" fn(*mut u8, usize, *mut *mut u32) -> i32,
    text: unsafe extern "C" fn(i32, *mut *const c_char) -> i32,
}

static CUPTI: OnceLock<std::result::Result<Cupti, String>> = OnceLock::new();
/// The records in the buffers that CUPTI has returned.
static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());

impl Cupti {
    fn get() -> Result<&'static Self> {
        let found = CUPTI.get_or_init(Self::load);
        found.as_ref().map_err(|why| Error::Device { call: "loading CUPTI".into(), why: why.clone() })
    }

    fn load() -> std::result::Result<Self, String> {
        let mut places: Vec<String> =
            crate::env::cupti().map(|path| path.to_string_lossy().into_owned()).into_iter().collect();
        places.extend(
            ["libcupti.so.13", "libcupti.so", "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"]
                .map(String::from),
        );
        // SAFETY: loading CUPTI runs its initialisers, which are safe to run.
        let library = places.iter().find_map(|place| unsafe { Library::new(place) }.ok());
        let library = library.ok_or(
            "libcupti.so cannot be loaded; install it (its Python wheel will do) or point NIBBLE_CUPTI at it",
        )?;
        // The library stays loaded for the life of the process.
        let library: &'static Library = Box::leak(Box::new(library));
        fn call<F: Copy>(library: &'static Library, name: &str) -> std::result::Result<F, String> {
            // SAFETY: `F` is the function's type, as in cupti_activity.h and cupti_result.h.
            unsafe { library.get::<F>(name.as_bytes()) }
                .map(|symbol| *symbol)
                .map_err(|error| error.to_string())
        }
        let cupti = Self {
            enable: call(library, "cuptiActivityEnable")?,
            disable: call(library, "cuptiActivityDisable")?,
            flush: call(library, "cuptiActivityFlushAll")?,
            next: call(library, "cuptiActivityGetNextRecord")?,
            text: call(library, "cuptiGetResultString")?,
        };
        let register: unsafe extern "C" fn(Requested, Completed) -> i32 =
            call(library, "cuptiActivityRegisterCallbacks")?;
        // SAFETY: both callbacks live as long as the program.
        cupti.check("cuptiActivityRegisterCallbacks", unsafe { register(requested, completed) })?;
        Ok(cupti)
    }

    fn check(&self, call: &str, code: i32) -> std::result::Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the call writes a pointer to a string that is never freed, or leaves it null.
        unsafe { (self.text)(code, &mut text) };
        // SAFETY: the string is never freed.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        Err(format!("{call}: {}", text.unwrap_or_else(|| code.to_string())))
    }
}

fn layout() -> std::alloc::Layout {
    // The constants form a valid layout.
    std::alloc::Layout::from_size_align(BUFFER_BYTES, BUFFER_ALIGN).expect("a buffer's layout")
}

/// CUPTI calls this function to get memory for its records.
unsafe extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, most: *mut usize) {
    // SAFETY: CUPTI passes three places to write to; the layout has a non-zero size.
    unsafe {
        *buffer = std::alloc::alloc(layout());
        *size = if (*buffer).is_null() { 0 } else { BUFFER_BYTES };
        *most = 0;
    }
}

/// CUPTI calls this function to return memory; the first `valid` bytes hold records.
unsafe extern "C" fn completed(_: *mut c_void, _: u32, buffer: *mut u8, _: usize, valid: usize) {
    if buffer.is_null() {
        return;
    }
    // Buffers are returned only after the library was loaded.
    if let Some(Ok(cupti)) = CUPTI.get() {
        let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut record = std::ptr::null_mut();
        // SAFETY: the buffer was allocated by `requested`, and its first `valid` bytes hold records. A record starts with its
        // kind. Only three kinds are enabled, and a record of each kind starts with the fields of its struct above.
        unsafe {
            while valid > 0 && (cupti.next)(buffer, valid, &mut record) != OUT_OF_RECORDS && !record.is_null()
            {
                let kind = *record;
                seen.push(match kind {
                    KIND_KERNEL => {
                        let KernelRecord { start, end, device, name, .. } = *record.cast();
                        let name = if name.is_null() { &[] } else { CStr::from_ptr(name).to_bytes() };
                        Seen { kind, start_ns: start, end_ns: end, device, whose: whose(name) }
                    }
                    KIND_COPY | KIND_FILL => {
                        let TransferRecord { start, end, device, .. } = *record.cast();
                        Seen { kind, start_ns: start, end_ns: end, device, whose: Whose::Driver }
                    }
                    _ => continue,
                });
            }
        }
    }
    // SAFETY: `requested` allocated the buffer with this layout, and it is freed once.
    unsafe { std::alloc::dealloc(buffer, layout()) };
}

/// The origin of a kernel, from its mangled name: all of this crate's kernels are in one namespace.
fn whose(name: &[u8]) -> Whose {
    match name {
        [b'_', b'Z', b'N', b'3', b'n', b'i', b'b', ..] => Whose::Ours,
        _ if name.windows(b"ncclDev".len()).any(|part| part == b"ncclDev") => Whose::Nccl,
        _ => Whose::Driver,
    }
}

impl Cuda {
    /// Runs `work`, waits for it, and returns this device's activities for it, ordered by time. Only one thread of a process may call this
    /// function at a time. `launched` has the names of the kernels in order, as [`Cuda::logged`] returns them for the same work.
    ///
    /// # Errors
    /// The error of `work`; [`Error::Device`] if CUPTI cannot be loaded, if another profiler uses it, or if the kernels that ran differ
    /// from `launched`.
    pub fn traced<R>(
        &self,
        launched: &[Launched],
        work: impl FnOnce() -> Result<R>,
    ) -> Result<(R, Vec<Span>)> {
        let cupti = Cupti::get()?;
        let named = |call: &str, code| {
            cupti.check(call, code).map_err(|why| Error::Device { call: "tracing by CUPTI".into(), why })
        };
        self.device().synchronize()?;
        // SAFETY: the library knows these kinds, and the call has no other arguments.
        KINDS.iter().try_for_each(|kind| named("cuptiActivityEnable", unsafe { (cupti.enable)(*kind) }))?;
        SEEN.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let result = work().and_then(|result| self.device().synchronize().map(|()| result));
        // SAFETY: the call has no pointers; the buffers are returned during this call.
        let flushed = named("cuptiActivityFlushAll", unsafe { (cupti.flush)(FLUSH_FORCED) });
        for kind in KINDS {
            // SAFETY: the library knows these kinds, and the call has no other arguments.
            named("cuptiActivityDisable", unsafe { (cupti.disable)(kind) })?;
        }
        let result = result?;
        flushed?;
        let mut seen = std::mem::take(&mut *SEEN.lock().unwrap_or_else(PoisonError::into_inner));
        // Other ranks of this process use other devices.
        let device = self.device().info().ordinal as u32;
        seen.retain(|seen| seen.device == device);
        Ok((result, spans(seen, launched)?))
    }
}

/// Converts the recorded activities to spans with names.
fn spans(mut seen: Vec<Seen>, launched: &[Launched]) -> Result<Vec<Span>> {
    seen.sort_by_key(|seen| (seen.start_ns, seen.end_ns));
    let kernels = seen.iter().filter(|seen| seen.whose == Whose::Ours).count();
    if kernels != launched.len() {
        let got = format!("{kernels} kernels");
        return Err(Error::shape(
            "traced",
            "work",
            got,
            format!("the {} that were launched", launched.len()),
        ));
    }
    let mut names = launched.iter();
    let span = |seen: Seen| {
        let what = match seen.kind {
            // The numbers of kernels were compared above.
            KIND_KERNEL if seen.whose == Whose::Ours => {
                *names.next().unwrap_or(&Launched { op: "kernel", kernel: "kernel" })
            }
            KIND_KERNEL if seen.whose == Whose::Nccl => Launched { op: EXCHANGE, kernel: "nccl" },
            KIND_COPY => Launched { op: "copy", kernel: "copy" },
            KIND_FILL => Launched { op: "fill", kernel: "fill" },
            _ => Launched { op: "driver", kernel: "driver" },
        };
        Span { what, start_ns: seen.start_ns, end_ns: seen.end_ns }
    };
    Ok(seen.into_iter().map(span).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_in_order_and_named_by_their_launches() {
        let seen = |kind, start_ns, end_ns| {
            let whose = if kind == KIND_KERNEL { Whose::Ours } else { Whose::Driver };
            Seen { kind, start_ns, end_ns, device: 0, whose }
        };
        let launched = [("gemm", "a"), ("add", "b")].map(|(op, kernel)| Launched { op, kernel });
        let driver = Seen { whose: Whose::Driver, ..seen(KIND_KERNEL, 22, 23) };
        let nccl = Seen { whose: Whose::Nccl, ..seen(KIND_KERNEL, 12, 33) };
        let ours = [seen(KIND_KERNEL, 30, 40), seen(KIND_KERNEL, 10, 20)];
        let all = vec![ours[0], seen(KIND_FILL, 5, 6), ours[1], driver, nccl];
        let spans = spans(all.clone(), &launched).unwrap();
        let names: Vec<_> = spans.iter().map(|span| (span.what.op, span.start_ns)).collect();
        assert_eq!(names, [("fill", 5), ("gemm", 10), (EXCHANGE, 12), ("driver", 22), ("add", 30)]);
        let error = super::spans(all, &launched[..1]).unwrap_err().to_string();
        assert!(error.contains("2 kernels") && error.contains("the 1 that were launched"), "{error}");
    }

    #[test]
    fn records_begin_as_the_library_writes_them() {
        use std::mem::offset_of;
        assert_eq!([offset_of!(KernelRecord, start), offset_of!(KernelRecord, end)], [16, 24]);
        assert_eq!([offset_of!(KernelRecord, device), offset_of!(KernelRecord, name)], [40, 104]);
        let names: [&[u8]; 3] = [b"_ZN3nib5adamwE", b"_Z6memset", b"_Z22ncclDevKernel_SendRecv24ncclDev"];
        assert_eq!(names.map(whose), [Whose::Ours, Whose::Driver, Whose::Nccl]);
        let of_transfer = [offset_of!(TransferRecord, start), offset_of!(TransferRecord, end)];
        assert_eq!((of_transfer, offset_of!(TransferRecord, device)), ([16, 24], 32));
    }
}
