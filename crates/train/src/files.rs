//! Files that are written whole or not at all, and files that can be read to their end. Files of runs, checkpoints and commands that must
//! be whole are written here.
//!
//! A file is written beside its place, synced, and renamed, so nothing half-written is read back. Devices, directories and pipes with a
//! name are neither read nor replaced.

use crate::fault::{Point, reach, writing};
use nibble_core::allocation::phase;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Prefix of the names of unfinished files.
pub const UNFINISHED_PREFIX: &str = ".nibble-tmp-";

/// Unfinished files of this process, to be removed if it ends early.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A file that is written under a temporary name next to its path. [`WholeFile::finish`] renames it; a drop before that removes it.
#[derive(Debug)]
pub struct WholeFile {
    file: File,
    unfinished: Unfinished,
    path: PathBuf,
}

/// A temporary path. On a drop its file is removed, unless it has been renamed.
#[derive(Debug)]
struct Unfinished(PathBuf);

impl Unfinished {
    /// Lists the path before there is a file, so that a process that ends in between removes the file.
    fn named(path: PathBuf) -> Self {
        UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
        Self(path)
    }

    /// Renames the file for good.
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
            // Only the error that led here is reported.
            let _ = remove(&self.0);
        }
    }
}

/// Removes a file, or a folder with what is in it.
///
/// # Errors
/// What the system says.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Checks that a path that is to be written neither is nor passes through a dangling symbolic link. Somebody expects a file at the link's
/// target, and it would not be there.
///
/// # Errors
/// Which link it is, and where it leads.
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
/// As [`require_no_loose_link`]; what the system says.
pub fn make_folder(path: &Path) -> io::Result<()> {
    require_no_loose_link(path)?;
    fs::create_dir_all(path)
}

/// The folder of a path.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A folder that is filled under a temporary name next to its path. [`WholeFolder::finish`] renames it; a drop before that removes it.
#[derive(Debug)]
pub(crate) struct WholeFolder {
    unfinished: Unfinished,
    path: PathBuf,
}

impl WholeFolder {
    /// Begins a folder that will be at `path`, where there is nothing or an empty folder. Removes what killed processes left next to it.
    ///
    /// # Errors
    /// What the system says.
    pub fn create(path: &Path) -> io::Result<Self> {
        phase(format_args!("writing {}", path.display()));
        require_no_loose_link(path)?;
        make_folder(folder_of(path))?;
        remove_abandoned(folder_of(path))?;
        let unfinished = Unfinished::named(path.with_file_name(own_prefix()));
        fs::create_dir(&unfinished.0)?;
        Ok(Self { unfinished, path: path.to_owned() })
    }

    /// The temporary path.
    pub fn unfinished(&self) -> &Path {
        &self.unfinished.0
    }

    /// Renames the folder. Its files must be on the disk already.
    ///
    /// # Errors
    /// What the system says. Until the rename succeeds, `path` is as it was.
    pub fn finish(self) -> io::Result<()> {
        sync_dir(&self.unfinished.0)?;
        self.unfinished.rename(&self.path)
    }
}

impl WholeFile {
    /// Begins a file that will be at `path`. If `path` is a symbolic link, the link's target is replaced, and not the link.
    ///
    /// # Errors
    /// What the system says.
    pub fn create(path: &Path) -> io::Result<Self> {
        phase(format_args!("writing {}", path.display()));
        require_no_loose_link(path)?;
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let there = fs::metadata(&path).ok();
        // A rename over a device or a pipe would remove it for everybody.
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

    /// Waits until the content is on the disk, and renames the file.
    ///
    /// # Errors
    /// What the system says. Until the rename succeeds, `path` is as it was.
    pub fn finish(self) -> io::Result<()> {
        self.file.sync_all()?;
        self.unfinished.rename(&self.path)
    }
}

/// An empty file with a unique name, by which other processes recognize its directory. A drop removes it.
#[derive(Debug)]
pub(crate) struct Mark(Unfinished);

impl Mark {
    /// Creates a mark in this directory.
    ///
    /// # Errors
    /// What the system says.
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

/// Prefix of the next temporary name of this process. All prefixes differ and have one length, since ranks send such names to each other.
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

/// Writes a file whole, or leaves its place as it was.
///
/// # Errors
/// What the system says.
pub fn write_whole(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    let mut file = WholeFile::create(path)?;
    file.write_all(content.as_ref())?;
    file.finish()
}

/// Appends bytes to a file: all of them, unless it returns an error.
///
/// # Errors
/// What the system says; some of the bytes may be there then.
pub(crate) fn append(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    if let Err(error) = writing() {
        // A full disk takes the first bytes.
        file.write_all(&bytes[..bytes.len() / 2])?;
        return Err(error);
    }
    file.write_all(bytes)
}

/// Removes the unfinished files and folders that processes which have ended left in a directory.
///
/// # Errors
/// What the system says.
pub(crate) fn remove_abandoned(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(UNFINISHED_PREFIX)?.split('-').next());
        // A process that still runs may be writing its file now.
        if process.is_some_and(|id| !Path::new("/proc").join(id).exists()) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Waits until a directory's entries are on the disk.
///
/// # Errors
/// What the system says.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    // Elsewhere a directory cannot be opened as a file, and renames are written through.
    if cfg!(unix) { File::open(dir)?.sync_all() } else { Ok(()) }
}

/// Removes the unfinished files and folders of this process, which is about to end. Those that another thread is adding just now may stay.
pub fn remove_unfinished() {
    if let Ok(mut all) = UNFINISHED.try_lock() {
        for path in all.drain(..) {
            let _ = remove(&path);
        }
    }
}

/// Opens a file that has an end. Refuses files that may never end, or may block their reader forever: directories, devices, sockets and
/// named pipes. Accepts a pipe without a name, such as a shell's `<(...)`, because it has a writer. Refuses a Git LFS pointer, since its
/// content is missing.
///
/// # Errors
/// What the system says, or what the path is instead of a file.
pub fn open_to_read(path: &Path) -> io::Result<File> {
    let file = open_with_an_end(path)?;
    let mut start = [0; LFS_POINTER.len()];
    // A pointer is short, and nothing may be read of a pipe.
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
        // A pipe without a name has a writer.
        Some(PIPE) if fs::canonicalize(path).is_err() => File::open(path),
        Some(what) => Err(no_file(what)),
        None => File::open(path),
    }
}

/// Reads from byte `at` of a file on until `to` is full or the file ends; returns the bytes read. On Unix the file's cursor stays.
///
/// # Errors
/// What the system says.
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

/// What a path is that is no regular file.
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

/// All bytes of a file that [`open_to_read`] opens, if there are at most `most`.
///
/// # Errors
/// What the system says; what the path is instead of a file, or that it is longer.
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

/// [`read_whole`], as text.
///
/// # Errors
/// As [`read_whole`]; for what is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read_whole(path, most)?).map_err(|e| {
        let why = format!("is no UTF-8 text (byte {} is none), expected one", e.utf8_error().valid_up_to());
        io::Error::new(io::ErrorKind::InvalidData, why)
    })
}

/// SHA-256 of a whole file. On Unix the file's cursor stays where it is, so others may read the file as well.
///
/// # Errors
/// What the system says.
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

/// SHA-256, hexadecimal.
pub(crate) fn sha256_hex(content: &[u8]) -> String {
    hexadecimal(&Sha256::digest(content))
}

/// Two digits per byte.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Upper limit of bytes for configurations, recipes and other texts that people write.
pub const MOST_TEXT: u64 = 16 << 20;

/// Upper limit of bytes for logs and lists that a run writes.
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
        // No system has a process of this number.
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
