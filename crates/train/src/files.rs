//! Files that are written completely or not at all, and reads of files that have an end. Runs, checkpoints and commands use this module to
//! write all files that must be complete.
//!
//! A file is written under a temporary name in the same directory, synced, and renamed, so no program reads a half-written file. This
//! module neither reads nor replaces devices, directories and named pipes.

use crate::fault::{Point, reach, writing};
use nibble_core::allocation::phase;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Prefix of the names of files and folders that are not yet complete.
pub const UNFINISHED_PREFIX: &str = ".nibble-tmp-";

/// Unfinished files of this process, which are removed if the process ends early.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A file that is written under a temporary name in the directory of its final path. [`WholeFile::finish`] renames the file to its final
/// path. If a [`WholeFile`] is dropped before `finish`, the file is removed.
#[derive(Debug)]
pub struct WholeFile {
    file: File,
    unfinished: Unfinished,
    path: PathBuf,
}

/// A temporary path. A drop removes the file at this path, unless the file has been renamed.
#[derive(Debug)]
struct Unfinished(PathBuf);

impl Unfinished {
    /// Lists the path before the file exists. A process that ends between these two events therefore removes the file.
    fn named(path: PathBuf) -> Self {
        UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
        Self(path)
    }

    /// Renames the file to its final name.
    fn rename(&self, to: &Path) -> io::Result<()> {
        reach(Point::FileUnnamed).map_err(|error| io::Error::other(error.to_string()))?;
        fs::rename(&self.0, to)?;
        self.forget();
        sync_dir(folder_of(to))
    }

    fn forget(&self) -> bool {
        let mut all = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
        let place = all.iter().position(|path| *path == self.0);
        place.map(|place| all.swap_remove(place)).is_some()
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if self.forget() {
            // The error of this removal is ignored: only the error that caused the drop is reported.
            let _ = remove(&self.0);
        }
    }
}

/// Removes a file, or a folder with its contents.
///
/// # Errors
/// The error of the operating system.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Checks that neither the path itself nor one of its directories is a dangling symbolic link. Writing through a dangling link would not
/// create the file that the user expects at the link's target.
///
/// # Errors
/// The error names the dangling link and its target.
pub fn require_no_loose_link(path: &Path) -> io::Result<()> {
    for place in path.ancestors().filter(|place| !place.as_os_str().is_empty()) {
        let (Ok(target), Err(why)) = (fs::read_link(place), fs::metadata(place)) else { continue };
        let target = target.display();
        let whose =
            if place == path { String::new() } else { format!("lies in {}, which ", place.display()) };
        let why = match why.kind() {
            io::ErrorKind::NotFound => "which does not exist".to_owned(),
            _ => format!("which cannot be followed ({why})"),
        };
        let why = format!("{whose}is a link to {target}, {why}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    Ok(())
}

/// Creates a folder and its missing parents.
///
/// # Errors
/// Returns the errors of [`require_no_loose_link`] and of the operating system.
pub fn make_folder(path: &Path) -> io::Result<()> {
    require_no_loose_link(path)?;
    fs::create_dir_all(path)
}

/// The folder that contains a path.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A folder that is filled under a temporary name in the directory of its path. [`WholeFolder::finish`] renames the folder; a drop before
/// the rename removes the folder.
#[derive(Debug)]
pub(crate) struct WholeFolder {
    unfinished: Unfinished,
    path: PathBuf,
}

impl WholeFolder {
    /// Starts a folder that will replace `path`. At `path`, there must be nothing or an empty folder. Also removes unfinished files that
    /// killed processes left in the same directory.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    pub fn create(path: &Path) -> io::Result<Self> {
        phase(format_args!("writing {}", path.display()));
        require_no_loose_link(path)?;
        make_folder(folder_of(path))?;
        remove_abandoned(folder_of(path))?;
        let unfinished = Unfinished::named(path.with_file_name(own_prefix()));
        fs::create_dir(&unfinished.0)?;
        Ok(Self { unfinished, path: path.to_owned() })
    }

    /// The temporary path of the folder.
    pub fn unfinished(&self) -> &Path {
        &self.unfinished.0
    }

    /// Renames the folder to its final name. The caller must have written the folder's files to disk (`fsync`).
    ///
    /// # Errors
    /// Returns the error of the operating system. Until the rename succeeds, nothing at `path` changes.
    pub fn finish(self) -> io::Result<()> {
        sync_dir(&self.unfinished.0)?;
        self.unfinished.rename(&self.path)
    }
}

impl WholeFile {
    /// Creates a temporary file that will replace the file at `path`. If `path` is a symbolic link, the new file replaces the link's target
    /// and not the link.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    pub fn create(path: &Path) -> io::Result<Self> {
        phase(format_args!("writing {}", path.display()));
        require_no_loose_link(path)?;
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let there = fs::metadata(&path).ok();
        // A rename over a device or a pipe would remove the device or pipe for all processes.
        if let Some(what) = there.as_ref().and_then(|there| what_else(there.file_type())) {
            return Err(no_file(what));
        }
        let unfinished = Unfinished::named(path.with_file_name(own_prefix()));
        let file = File::create(&unfinished.0)?;
        if let Some(there) = there {
            file.set_permissions(there.permissions())?;
        }
        Ok(Self { file, unfinished, path })
    }

    /// Waits until the file's contents are on the disk, and renames the file to its final name.
    ///
    /// # Errors
    /// Returns the error of the operating system. Until the rename succeeds, the file at `path` does not change.
    pub fn finish(self) -> io::Result<()> {
        self.file.sync_all()?;
        self.unfinished.rename(&self.path)
    }
}

/// An empty file with a unique name, by which other processes recognize the file's directory. A drop removes the file.
#[derive(Debug)]
pub(crate) struct Mark(Unfinished);

impl Mark {
    /// Creates a marker file in this directory.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    pub fn in_dir(dir: &Path) -> io::Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mark = Unfinished::named(dir.join(format!("{}-{:x}", own_prefix(), now.as_nanos())));
        File::options().write(true).create_new(true).open(&mark.0)?;
        Ok(Self(mark))
    }

    /// Path of the mark.
    pub fn path(&self) -> &Path {
        &self.0.0
    }
}

/// The prefix of the next temporary name of this process. All prefixes differ. The prefixes have equal lengths, because ranks send
/// temporary names to each other.
fn own_prefix() -> String {
    static TURN: AtomicU64 = AtomicU64::new(0);
    format!("{UNFINISHED_PREFIX}{}-{:08}", std::process::id(), TURN.fetch_add(1, Ordering::Relaxed))
}

impl Write for WholeFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        writing()?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes a file completely, or leaves the file at `path` unchanged.
///
/// # Errors
/// Returns the error of the operating system.
pub fn write_whole(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    let mut file = WholeFile::create(path)?;
    file.write_all(content.as_ref())?;
    file.finish()
}

/// Appends all bytes to a file, or returns an error.
///
/// # Errors
/// The error of the operating system. After an error, the file may contain some of the bytes.
pub(crate) fn append(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    if let Err(error) = writing() {
        // A full disk accepts only the first bytes.
        file.write_all(&bytes[..bytes.len() / 2])?;
        return Err(error);
    }
    file.write_all(bytes)
}

/// Removes unfinished files and folders of ended processes from a directory.
///
/// # Errors
/// The error of the operating system.
pub(crate) fn remove_abandoned(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(UNFINISHED_PREFIX)?.split('-').next());
        // A process that still runs may be writing this file.
        if process.is_some_and(|id| !Path::new("/proc").join(id).exists()) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Waits until changes of a directory's entries are on the disk.
///
/// # Errors
/// Returns the error of the operating system.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    // Other systems cannot open a directory as a file, and write renames to disk at once.
    if cfg!(unix) { File::open(dir)?.sync_all() } else { Ok(()) }
}

/// Removes the unfinished files and folders of this process. The process calls this function before it ends. Files that another thread
/// creates during the call may remain.
pub fn remove_unfinished() {
    if let Ok(mut all) = UNFINISHED.try_lock() {
        for path in all.drain(..) {
            let _ = remove(&path);
        }
    }
}

/// Opens a file for reading, unless reading it might never end. The function refuses objects that may never end or may block a reader
/// forever: directories, devices, sockets and named pipes. The function accepts an unnamed pipe, such as a shell's `<(...)`, because an
/// unnamed pipe has a writer. The function refuses a Git LFS pointer, because the actual contents of the file are not there.
///
/// # Errors
/// Returns the error of the operating system, or an error that says which kind of object is at the path instead of a file.
pub fn open_to_read(path: &Path) -> io::Result<File> {
    let file = open_with_an_end(path)?;
    let mut start = [0; LFS_POINTER.len()];
    // A pointer is short. Nothing may be read from a pipe, because the bytes would be lost to the caller.
    let about = file.metadata()?;
    if about.is_file()
        && about.len() < 1024
        && read_full_at(&file, &mut start, 0)? == start.len()
        && start == *LFS_POINTER
    {
        let why = "is a Git LFS pointer, which stands for the file: `git lfs pull` in its folder fetches it";
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(file)
}

/// First bytes of a Git LFS pointer, the text that Git stores in place of a file.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

fn open_with_an_end(path: &Path) -> io::Result<File> {
    phase(format_args!("reading {}", path.display()));
    match what_else(fs::metadata(path)?.file_type()) {
        // A pipe without a name has a writer, so reading it ends.
        Some(PIPE) if fs::canonicalize(path).is_err() => File::open(path),
        Some(what) => Err(no_file(what)),
        None => File::open(path),
    }
}

/// Reads bytes of a file from position `at`, until `to` is full or the file ends. Returns the number of bytes read. On Unix the file's
/// cursor does not move.
///
/// # Errors
/// The error of the operating system.
pub(crate) fn read_full_at(file: &File, to: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < to.len() {
        #[cfg(unix)]
        let read = std::os::unix::fs::FileExt::read_at(file, &mut to[done..], at + done as u64);
        #[cfg(windows)]
        let read = std::os::windows::fs::FileExt::seek_read(file, &mut to[done..], at + done as u64);
        match read {
            Ok(0) => break,
            Ok(now) => done += now,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

const PIPE: &str = "a pipe";

/// The kind of a path that is not a regular file.
fn what_else(kind: fs::FileType) -> Option<&'static str> {
    if kind.is_file() {
        None
    } else if kind.is_dir() {
        Some("a directory")
    } else if is_pipe(kind) {
        Some(PIPE)
    } else {
        Some("a device or a socket")
    }
}

fn no_file(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("is {what}, expected a file"))
}

/// Reads all bytes of a file that [`open_to_read`] accepts. The file must have at most `most` bytes.
///
/// # Errors
/// Returns the errors of [`open_to_read`] and of the operating system, and an error for a longer file.
pub fn read_whole(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    phase(format_args!("reading {}", path.display()));
    let mut bytes = Vec::new();
    open_to_read(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        false => Ok(bytes),
        true => {
            let why = format!("is longer than {most} bytes, which no file of its kind is");
            Err(io::Error::new(io::ErrorKind::InvalidInput, why))
        }
    }
}

/// Like [`read_whole`], but returns the contents as UTF-8 text.
///
/// # Errors
/// Returns the errors of [`read_whole`], and an error for contents that are not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read_whole(path, most)?).map_err(|e| {
        let why = format!("is no UTF-8 text (byte {} is none), expected one", e.utf8_error().valid_up_to());
        io::Error::new(io::ErrorKind::InvalidData, why)
    })
}

/// SHA-256 of a whole file. On Unix the file's cursor does not move, so that other threads may read the file at the same time.
///
/// # Errors
/// The error of the operating system.
pub(crate) fn sha256_of_file(file: &File) -> io::Result<String> {
    let (mut hash, mut piece, mut at) = (Sha256::new(), vec![0; 1 << 20], 0);
    loop {
        match read_full_at(file, &mut piece, at)? {
            0 => return Ok(hexadecimal(&hash.finalize())),
            len => hash.update(&piece[..len]),
        }
        at += piece.len() as u64;
    }
}

/// SHA-256 in hexadecimal digits.
pub(crate) fn sha256_hex(content: &[u8]) -> String {
    hexadecimal(&Sha256::digest(content))
}

/// The bytes in hexadecimal, with two digits per byte.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Size limit in bytes of configurations, recipes and other texts that people write.
pub const MOST_TEXT: u64 = 16 << 20;

/// Size limit in bytes of logs and lists that a run writes.
pub const MOST_LOG: u64 = 1 << 36;

#[cfg(unix)]
fn is_pipe(kind: fs::FileType) -> bool {
    std::os::unix::fs::FileTypeExt::is_fifo(&kind)
}

#[cfg(not(unix))]
fn is_pipe(_: fs::FileType) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_whole_or_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        let mut half = WholeFile::create(&path).unwrap();
        half.write_all(b"half").unwrap();
        assert!(!path.exists());
        drop(half);
        assert!(names(dir.path()).is_empty());
        write_whole(&path, "whole").unwrap();
        write_whole(&path, "again").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "again");
        assert_eq!(names(dir.path()), ["a.txt"]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_others_have_left_unfinished_goes_and_what_somebody_writes_stays() {
        let dir = tempfile::tempdir().unwrap();
        let mine = WholeFile::create(&dir.path().join("a.txt")).unwrap();
        // No system has a process with this number.
        fs::write(dir.path().join(format!("{UNFINISHED_PREFIX}4294967295-0")), "").unwrap();
        fs::write(dir.path().join("b.txt"), "").unwrap();
        assert_eq!(names(dir.path()).len(), 3);
        remove_abandoned(dir.path()).unwrap();
        assert_eq!(names(dir.path()).len(), 2);
        mine.finish().unwrap();
        assert_eq!(names(dir.path()), ["a.txt", "b.txt"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_stay_and_so_do_permissions() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&file, &link).unwrap();
        write_whole(&link, "new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_that_leads_nowhere_is_no_place_for_a_file() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let (link, turn) = (dir.path().join("link"), dir.path().join("turn"));
        symlink("gone/file", &link).unwrap();
        symlink("turn", &turn).unwrap();
        let inside = link.join("a.txt");
        for (path, expected) in [
            (&link, "is a link to gone/file, which does not exist".to_owned()),
            (
                &inside,
                format!("lies in {}, which is a link to gone/file, which does not exist", link.display()),
            ),
            (&turn, "is a link to turn, which cannot be followed".to_owned()),
        ] {
            let error = write_whole(path, "new").unwrap_err().to_string();
            assert!(error.starts_with(&expected), "{error}");
            let error = WholeFolder::create(path).unwrap_err().to_string();
            assert!(error.starts_with(&expected), "{error}");
        }
        assert!(names(dir.path()) == ["link", "turn"] && fs::symlink_metadata(&link).unwrap().is_symlink());
        symlink(dir.path(), dir.path().join("whole")).unwrap();
        write_whole(&dir.path().join("whole/a.txt"), "new").unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_file_is_not_replaced_by_one() {
        use std::os::unix::fs::{FileTypeExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let (pipe, link) = (dir.path().join("pipe"), dir.path().join("link"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        symlink(&pipe, &link).unwrap();
        for path in [&pipe, &link, &dir.path().to_owned()] {
            assert!(write_whole(path, "new").unwrap_err().to_string().contains("expected a file"));
        }
        assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
        assert_eq!(names(dir.path()), ["link", "pipe"]);
    }

    #[test]
    fn what_is_no_file_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        assert!(open_to_read(dir.path()).unwrap_err().to_string().contains("is a directory"));
        if cfg!(unix) {
            assert!(open_to_read(Path::new("/dev/null")).unwrap_err().to_string().contains("is a device"));
            let pipe = dir.path().join("pipe");
            assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
            assert!(open_to_read(&pipe).unwrap_err().to_string().contains("is a pipe"));
        }
    }
}
