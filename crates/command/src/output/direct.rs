//! Outputs that are not regular files. Such outputs are written in place, without a rename.

use std::fs::File;
use std::path::Path;

/// Whether a path belongs to the system. Such a path is written in place, whatever it refers to, such as a shell's file behind
/// `/dev/stdout`.
pub(super) fn is_device_path(path: &Path) -> bool {
    let in_memory = path.starts_with("/dev/shm");
    cfg!(unix) && (path.starts_with("/dev") || path.starts_with("/proc")) && !in_memory
}

/// Opens an existing path for writing. This function never waits for a reader.
///
/// # Errors
/// Returns the reason why the path cannot be written to, and what the user can do.
#[cfg(unix)]
pub(super) fn open(path: &Path) -> Result<File, String> {
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
    let own = |stream: std::os::fd::BorrowedFd<'_>| stream.try_clone_to_owned().map(File::from);
    let kind = std::fs::metadata(path).map(|there| there.file_type());
    let opened = if path == Path::new("/dev/stdout") {
        // Standard output is already open, and a socket could not be opened by this name.
        own(std::io::stdout().as_fd())
    } else if path == Path::new("/dev/stderr") {
        own(std::io::stderr().as_fd())
    } else if kind.as_ref().is_ok_and(FileTypeExt::is_socket) {
        std::os::unix::net::UnixStream::connect(path).map(|stream| File::from(OwnedFd::from(stream)))
    } else {
        File::options().append(true).custom_flags(libc::O_NONBLOCK).open(path).and_then(waiting)
    };
    opened.map_err(|error| match error.raw_os_error() {
        Some(libc::ENXIO) if kind.is_ok_and(|kind| kind.is_fifo()) => {
            format!("is a pipe that nobody reads ({error}); start its reader first, or name a file")
        }
        _ => format!("cannot be written: {error}"),
    })
}

#[cfg(not(unix))]
pub(super) fn open(path: &Path) -> Result<File, String> {
    File::options().append(true).open(path).map_err(|error| format!("cannot be written: {error}"))
}

/// Makes writes to the file block while a reader is slow.
#[cfg(unix)]
fn waiting(file: File) -> std::io::Result<File> {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor belongs to the open file, and both commands take and return plain numbers.
    let done = unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        if flags < 0 {
            flags
        } else {
            libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK)
        }
    };
    if done < 0 { Err(std::io::Error::last_os_error()) } else { Ok(file) }
}
