//! Bindings to the functions of NCCL that this crate calls. The library is loaded on first use.
//!
//! Functions are looked up here and not by `cudarc`, because `cudarc` only knows the name `libnccl.so`. Development packages install
//! that name, but runtime packages install `libnccl.so.2`.

use libloading::Library;
use nibble_core::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

/// The library's opaque communicator.
#[repr(C)]
pub(super) struct Opaque {
    _private: [u8; 0],
}

/// The type `ncclComm_t`.
pub(super) type Handle = *mut Opaque;
/// The type `cudaStream_t`, which is a `CUstream`.
type Stream = *mut c_void;

/// The type `ncclUniqueId`, by which the ranks of a communicator find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub [u8; UniqueId::BYTES]);

impl UniqueId {
    pub const BYTES: usize = 128;
}

/// The value of `ncclUint8`.
const BYTES_TYPE: c_int = 1;

/// The values of `ncclFloat32` and `ncclSum`.
const SUM_OF_F32: (c_int, c_int) = (7, 0);

/// The oldest version of NCCL that is accepted. NCCL 2.18 has every function that is called here; older
/// versions were not tested.
const OLDEST: Version = Version { major: 2, minor: 18, patch: 0 };

/// A version of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The first number of the version, such as 2.
    pub major: u32,
    /// The second number of the version, such as 28.
    pub minor: u32,
    /// The last number of the version.
    pub patch: u32,
}

impl Version {
    /// The version that NCCL encodes as `code`: 22809 is 2.28.9.
    fn of_code(code: u32) -> Self {
        Self { major: code / 10_000, minor: code / 100 % 100, patch: code % 100 }
    }

    /// The number by which NCCL encodes this version.
    pub fn code(self) -> u32 {
        10_000 * self.major + 100 * self.minor + self.patch
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The functions of NCCL. The library stays loaded for the life of the process.
pub(super) struct Nccl {
    /// The version of the loaded library.
    pub version: Version,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int,
    split: unsafe extern "C" fn(Handle, c_int, c_int, *mut Handle, *mut c_void) -> c_int,
    async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(Handle) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Stream) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Stream) -> c_int,
    reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Handle, Stream) -> c_int,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {}", self.version)
    }
}

/// One message of a group: bytes in device memory, and the rank to which they are sent or from
/// which they are received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Message {
    pub peer: usize,
    pub address: u64,
    pub bytes: usize,
}

/// A sum of F32 values over the ranks of a communicator; one rank receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sum {
    pub from: u64,
    /// The address of the result. Only the rank that receives the sum uses this field.
    pub to: u64,
    pub values: usize,
    /// The number of the receiving rank in the communicator.
    pub rank: usize,
}

impl Nccl {
    /// The loaded library, or why it cannot be used.
    pub fn found() -> std::result::Result<&'static Self, String> {
        static NCCL: OnceLock<std::result::Result<Nccl, String>> = OnceLock::new();
        NCCL.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> std::result::Result<Self, String> {
        let named = crate::env::nccl();
        let mut tried = String::new();
        let mut open = |place: &std::ffi::OsStr| {
            // SAFETY: loading NCCL runs its initialisers, which are safe to run.
            unsafe { Library::new(place) }.inspect_err(|why| tried = why.to_string()).ok()
        };
        let library = match &named {
            Some(path) => open(path.as_os_str()),
            None => ["libnccl.so.2", "libnccl.so"].iter().find_map(|name| open(name.as_ref())),
        };
        let library = library.ok_or_else(|| match &named {
            Some(path) => format!("NIBBLE_NCCL: {} cannot be loaded: {tried}", path.display()),
            None => "libnccl.so.2 cannot be loaded; install NCCL (its Python wheel will do), or point NIBBLE_NCCL at it"
                .into(),
        })?;
        Self::of(Box::leak(Box::new(library)))
    }

    fn of(library: &'static Library) -> std::result::Result<Self, String> {
        fn call<F: Copy>(library: &'static Library, name: &str) -> std::result::Result<F, String> {
            // SAFETY: `F` is the function's type, as in nccl.h.
            let found = unsafe { library.get::<F>(name.as_bytes()) };
            let symbol = found.map_err(|_| {
                format!(
                    "the library lacks {name}: it is too old, or not NCCL; NCCL {OLDEST} or newer is needed"
                )
            })?;
            Ok(*symbol)
        }
        let version: unsafe extern "C" fn(*mut c_int) -> c_int = call(library, "ncclGetVersion")?;
        let mut code = 0;
        // SAFETY: the call writes one int.
        unsafe { version(&mut code) };
        let version = Version::of_code(code.max(0) as u32);
        if version < OLDEST {
            return Err(format!("NCCL {version} is too old: {OLDEST} or newer is needed"));
        }
        Ok(Self {
            version,
            error_text: call(library, "ncclGetErrorString")?,
            last_error: call(library, "ncclGetLastError")?,
            unique_id: call(library, "ncclGetUniqueId")?,
            init: call(library, "ncclCommInitRank")?,
            async_error: call(library, "ncclCommGetAsyncError")?,
            abort: call(library, "ncclCommAbort")?,
            split: call(library, "ncclCommSplit")?,
            group_start: call(library, "ncclGroupStart")?,
            group_end: call(library, "ncclGroupEnd")?,
            send: call(library, "ncclSend")?,
            receive: call(library, "ncclRecv")?,
            reduce: call(library, "ncclReduce")?,
        })
    }

    /// Converts a return code of NCCL to a result.
    fn answer(&self, call: &str, handle: Handle, code: c_int) -> Result<()> {
        match code {
            0 => Ok(()),
            _ => {
                // SAFETY: the function accepts any code and returns a string that is never freed.
                let mut why = text(unsafe { (self.error_text)(code) });
                // SAFETY: the handle is alive or null (no communicator); the string lives until this thread's next call.
                let more = text(unsafe { (self.last_error)(handle) });
                if !more.is_empty() {
                    why += &format!(": {more}");
                }
                Err(Error::Device { call: call.into(), why })
            }
        }
    }

    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: the call writes the id.
        let code = unsafe { (self.unique_id)(&mut id) };
        self.answer("ncclGetUniqueId", std::ptr::null_mut(), code).map(|_| id)
    }

    /// Creates a communicator on the device whose context is current. The call waits for all ranks,
    /// without a time limit.
    pub fn begin(&self, id: UniqueId, rank: usize, world: usize) -> Result<Handle> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the call writes the handle.
        let code = unsafe { (self.init)(&mut handle, world as c_int, id, rank as c_int) };
        self.answer("ncclCommInitRank", handle, code).map(|()| handle)
    }

    /// Returns the asynchronous error of a communicator, if there is one.
    ///
    /// # Safety
    /// The handle must be alive.
    pub unsafe fn check(&self, handle: Handle) -> Result<()> {
        let mut state = 0;
        // SAFETY: the caller guarantees the handle; the call writes one code.
        let code = unsafe { (self.async_error)(handle, &mut state) };
        self.answer("ncclCommGetAsyncError", handle, code)?;
        self.answer("messages", handle, state)
    }

    /// Issues messages on a stream, as one NCCL group.
    ///
    /// # Safety
    /// The handle must be alive, and its device's context current. All memory must be on that device and alive, and must not be used by
    /// other work until the stream has passed the messages.
    pub unsafe fn exchange(
        &self,
        handle: Handle,
        stream: Stream,
        (sent, received): (&[Message], &[Message]),
    ) -> Result<()> {
        self.grouped(handle, |first| {
            for Message { peer, address, bytes } in sent {
                // SAFETY: the caller guarantees the handle and the memory.
                let code =
                    unsafe { (self.send)(*address as _, *bytes, BYTES_TYPE, *peer as c_int, handle, stream) };
                first(self.answer("ncclSend", handle, code));
            }
            for Message { peer, address, bytes } in received {
                // SAFETY: the caller guarantees the handle and the memory.
                let code = unsafe {
                    (self.receive)(*address as _, *bytes, BYTES_TYPE, *peer as c_int, handle, stream)
                };
                first(self.answer("ncclRecv", handle, code));
            }
        })
    }

    /// Issues sums over ranks on a stream, as one NCCL group. Every rank of the communicator issues the same sums.
    ///
    /// # Safety
    /// The caller must meet the same conditions as for [`Nccl::exchange`].
    pub unsafe fn reduce(&self, handle: Handle, stream: Stream, sums: &[Sum]) -> Result<()> {
        let (of, by) = SUM_OF_F32;
        self.grouped(handle, |first| {
            for Sum { from, to, values, rank } in sums.iter().filter(|sum| sum.values > 0) {
                // SAFETY: the caller guarantees the handle and the memory.
                let code = unsafe {
                    (self.reduce)(*from as _, *to as _, *values, of, by, *rank as c_int, handle, stream)
                };
                first(self.answer("ncclReduce", handle, code));
            }
        })
    }

    /// Makes calls as one group and returns the first error. The group is always ended, even after a failed call.
    fn grouped(&self, handle: Handle, calls: impl FnOnce(&mut dyn FnMut(Result<()>))) -> Result<()> {
        // SAFETY: the call has no arguments.
        self.answer("ncclGroupStart", handle, unsafe { (self.group_start)() })?;
        let mut first = Ok(());
        calls(&mut |done| first = std::mem::replace(&mut first, Ok(())).and(done));
        // SAFETY: the call has no arguments; a group was started.
        let ended = self.answer("ncclGroupEnd", handle, unsafe { (self.group_end)() });
        first.and(ended)
    }

    /// Creates the communicator of the ranks that pass the same `group`, in the order of `rank`. The call
    /// waits for all ranks.
    ///
    /// # Safety
    /// The handle must be alive, and its device's context current.
    pub unsafe fn split(&self, handle: Handle, group: usize, rank: usize) -> Result<Handle> {
        let mut part = std::ptr::null_mut();
        // SAFETY: the caller guarantees the handle; the call writes the new handle. Without its own settings the new communicator takes
        // those of its parent.
        let code =
            unsafe { (self.split)(handle, group as c_int, rank as c_int, &mut part, std::ptr::null_mut()) };
        self.answer("ncclCommSplit", handle, code).map(|()| part)
    }

    /// Aborts a communicator and all of its operations in flight. Other work on the device continues.
    ///
    /// # Safety
    /// The handle must be alive, and must not be used afterwards.
    pub unsafe fn abort(&self, handle: Handle) {
        // SAFETY: the caller guarantees the handle. An error here cannot be reported.
        unsafe { (self.abort)(handle) };
    }
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: NCCL's strings end with a zero byte.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_the_librarys_number() {
        let of = |major, minor, patch| Version { major, minor, patch };
        for (code, version, text) in [(22809, of(2, 28, 9), "2.28.9"), (21800, of(2, 18, 0), "2.18.0")] {
            assert_eq!(Version::of_code(code), version);
            assert_eq!((version.code(), version.to_string().as_str()), (code, text));
        }
        assert!(Version::of_code(21706) < OLDEST && Version::of_code(21801) > OLDEST);
    }
}
