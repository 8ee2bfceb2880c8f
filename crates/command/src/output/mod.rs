//! Output files of commands: which paths a command may write, and how files are written.
//!
//! No output replaces a file by accident. All outputs of a command are [checked](Outputs::named) and opened before its work starts.
//! [`Outputs`] knows the command's inputs and the files of runs, which are never replaced. A file that the command itself has written has a
//! mark (`mark.rs`) and may be replaced. Replacing any other file requires `--force`.
//!
//! Outputs are written after the work: regular files atomically, and devices, pipes and sockets in place.

mod direct;
mod mark;

pub use mark::Mark;

use crate::error::{Error, Result};
use nibble_train::files::{WholeFile, make_folder, require_no_loose_link};
use nibble_train::trainer::is_of_a_run;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The option `--force`.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Force {
    /// Replaces existing output files, even files that another program wrote. Input files and the files of a run are never replaced.
    #[arg(long, global = true)]
    pub force: bool,
}

/// The outputs of a command, each of which is checked against the command's inputs and other outputs.
#[derive(Debug)]
pub struct Outputs {
    force: bool,
    inputs: Vec<PathBuf>,
    /// Resolved paths that inputs or other outputs use.
    taken: Vec<PathBuf>,
}

/// The path of an output, after it was checked.
#[derive(Debug)]
#[must_use = "an output that is not written was asked for"]
pub struct Output {
    path: PathBuf,
    /// The open file, if the output is not a regular file. The file stays open, because a close would signal the end of the data to its
    /// reader.
    direct: Option<File>,
}

impl Outputs {
    /// Creates the outputs of a command that reads the files `inputs`. Inputs that do not exist are ignored, because no output can
    /// overwrite them.
    pub fn new(force: Force, inputs: impl IntoIterator<Item = PathBuf>) -> Self {
        Self { force: force.force, inputs: inputs.into_iter().collect(), taken: Vec::new() }
    }

    /// Whether `--force` was given.
    pub fn forced(&self) -> bool {
        self.force
    }

    /// Checks the path of an output whose file has this mark.
    ///
    /// # Errors
    /// Returns a usage error if the path is an input, another output or a file of a run, if the file exists without the mark and `--force`
    /// is not given, or if the path cannot be written.
    pub fn named(&mut self, path: &Path, mark: &Mark) -> Result<Output> {
        let place = resolved(path);
        if is_of_a_run(&place) {
            let why = "is a file of a run, which the run alone writes; name another file";
            return Err(refused(path, why));
        }
        let known = || Ok(mark.is_on(path)? || is_empty(path)?);
        self.checked(path, place, &known, &format!("is there already and is no {mark}"))
    }

    /// Checks the path of a file that a run wrote and that this command rewrites.
    ///
    /// # Errors
    /// Returns a usage error if the path is an input or another output, or cannot be written.
    pub fn of_run(&mut self, path: &Path) -> Result<Output> {
        self.checked(path, resolved(path), &|| Ok(true), "")
    }

    /// Checks a path. `known` says whether an existing file may be replaced, and `foreign` describes a file that may not.
    fn checked(
        &mut self,
        path: &Path,
        place: PathBuf,
        known: &dyn Fn() -> io::Result<bool>,
        foreign: &str,
    ) -> Result<Output> {
        let there = fs::metadata(path).ok();
        if there.as_ref().is_some_and(fs::Metadata::is_dir) {
            return Err(refused(path, "is a directory, expected a file to write"));
        }
        let is_special = there.as_ref().is_some_and(|there| !there.is_file());
        if !is_special && self.inputs.iter().any(|input| is_same(input, path)) {
            return Err(refused(path, "the output would overwrite the input; name another file"));
        }
        if is_special || direct::is_device_path(&named_place(path)) {
            let file = direct::open(path).map_err(|why| refused(path, &why))?;
            return Ok(Output { path: path.to_owned(), direct: Some(file) });
        }
        require_no_loose_link(path).map_err(|e| refused(path, &e.to_string()))?;
        if self.taken.iter().any(|other| *other == place || is_same(other, path)) {
            return Err(refused(path, "two outputs of the command would be this file; name another one"));
        }
        if there.is_some() && !self.force {
            let is_known = known().map_err(|e| refused(path, &format!("cannot be read: {e}")))?;
            if !is_known {
                let what = format!("{foreign}; name another file, or give --force to replace it");
                return Err(refused(path, &what));
            }
        }
        require_writable(path).map_err(|e| refused(path, &format!("cannot be written: {e}")))?;
        self.taken.push(place);
        Ok(Output { path: path.to_owned(), direct: None })
    }
}

impl Output {
    /// The path in the form in which the user gave it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the output is a device, a pipe or a socket.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Writes the whole content.
    ///
    /// # Errors
    /// Returns the error of the operating system; an existing file is then unchanged.
    pub fn write(self, content: impl AsRef<[u8]>) -> Result<()> {
        self.write_with(|to| to.write_all(content.as_ref()))
    }

    /// Writes the content that `fill` produces, piece by piece.
    ///
    /// # Errors
    /// Returns the errors of [`Output::write`], and the error of `fill`.
    pub fn write_with(self, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        let Self { path, direct } = self;
        let written = match direct {
            Some(file) => buffered(file, fill).map(drop),
            None => make_parents(&path)
                .and_then(|()| WholeFile::create(&path))
                .and_then(|file| buffered(file, fill))
                .and_then(WholeFile::finish),
        };
        written.map_err(Error::io(&path))
    }
}

/// Writes the content that `fill` produces through a buffer, and flushes the buffer.
fn buffered<W: Write>(to: W, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<W> {
    let mut to = BufWriter::with_capacity(1 << 16, to);
    fill(&mut to)?;
    to.into_inner().map_err(io::IntoInnerError::into_error)
}

fn refused(path: &Path, why: &str) -> Error {
    // Messages have the form `x.json is there already` or `x.json: two outputs`.
    let separator = if ["is ", "lies "].iter().any(|verb| why.starts_with(verb)) { "" } else { ":" };
    Error::usage(format!("{}{separator} {why}", path.display()))
}

/// The directory that a file is in.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn make_parents(path: &Path) -> io::Result<()> {
    make_folder(parent(path))
}

/// The path without symlinks. For a missing file, the result is its resolved directory and its name.
fn resolved(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| named_place(path))
}

/// The path with its directory resolved; the last component may be a symlink.
fn named_place(path: &Path) -> PathBuf {
    let place = || Some(fs::canonicalize(parent(path)).ok()?.join(path.file_name()?));
    place().unwrap_or_else(|| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
}

/// Whether two paths lead to the same existing file.
fn is_same(a: &Path, b: &Path) -> bool {
    let (Ok(one), Ok(other)) = (fs::metadata(a), fs::metadata(b)) else { return false };
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        (one.dev(), one.ino()) == (other.dev(), other.ino())
    }
    #[cfg(not(unix))]
    {
        drop((one, other));
        matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
    }
}

fn is_empty(path: &Path) -> io::Result<bool> {
    Ok(fs::metadata(path)?.len() == 0)
}

/// Checks that a file can be written: creates and removes a temporary file in its directory, or where a missing directory will be created.
fn require_writable(path: &Path) -> io::Result<()> {
    let name = path.file_name().ok_or(io::Error::from(io::ErrorKind::InvalidInput))?;
    let there = parent(path).ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("."));
    WholeFile::create(&there.join(name)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIGURES: Mark = Mark::Figures("nibble verify");

    fn outputs(force: bool, inputs: &[&Path]) -> Outputs {
        Outputs::new(Force { force }, inputs.iter().map(|path| path.to_path_buf()))
    }

    fn why(result: Result<Output>) -> String {
        result.map(|output| output.path).unwrap_err().to_string()
    }

    #[test]
    fn what_the_command_has_written_is_replaced_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (own, mine) = (dir.path().join("new/own.json"), dir.path().join("mine.json"));
        let content = FIGURES.json(serde_json::json!({ "ops": [1] }));
        outputs(false, &[]).named(&own, &FIGURES).unwrap().write(&content).unwrap();
        outputs(false, &[]).named(&own, &FIGURES).unwrap().write(&content).unwrap();
        assert_eq!(fs::read_to_string(&own).unwrap(), content);
        let error = why(outputs(false, &[]).named(&own, &Mark::Figures("nibble bench")));
        assert!(
            error.contains("is no file of figures by `nibble bench`; name another file, or give --force")
        );
        fs::write(&mine, "{}").unwrap();
        assert!(why(outputs(false, &[]).named(&mine, &FIGURES)).contains("mine.json is there already"));
        assert_eq!(fs::read(&mine).unwrap(), b"{}");
        fs::write(&mine, "").unwrap();
        outputs(false, &[]).named(&mine, &FIGURES).unwrap().write("1").unwrap();
        outputs(true, &[]).named(&mine, &FIGURES).unwrap().write("2").unwrap();
        assert_eq!(fs::read(&mine).unwrap(), b"2");
        assert!(why(outputs(true, &[]).named(dir.path(), &FIGURES)).contains("is a directory"));
        assert!(why(outputs(true, &[]).named(&mine.join("x"), &FIGURES)).contains("cannot be written"));
    }

    #[test]
    fn an_input_is_no_output_by_whatever_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("in"), "mine").unwrap();
        fs::hard_link(at("in"), at("hard")).unwrap();
        let mut names = vec![at("in"), at("hard"), dir.path().join("./in")];
        if cfg!(unix) {
            #[cfg(unix)]
            std::os::unix::fs::symlink(at("in"), at("link")).unwrap();
            names.push(at("link"));
        }
        for name in names {
            let error = why(outputs(true, &[&at("in")]).named(&name, &FIGURES));
            assert!(error.contains("overwrite the input"), "{error}");
        }
        assert_eq!(fs::read(at("in")).unwrap(), b"mine");
    }

    #[test]
    fn two_outputs_are_two_files() {
        let dir = tempfile::tempdir().unwrap();
        let mut outputs = outputs(true, &[]);
        let _first = outputs.named(&dir.path().join("a"), &FIGURES).unwrap();
        let error = why(outputs.named(&dir.path().join("./a"), &FIGURES));
        assert!(error.contains("two outputs"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn devices_and_pipes_are_written_to_and_stay() {
        use std::os::unix::fs::FileTypeExt;
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let error = why(outputs(true, &[]).named(&pipe, &FIGURES));
        assert!(error.contains("nobody reads"), "{error}");
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| fs::read(&pipe).unwrap());
            // The reader thread opens the pipe at an unknown time.
            let output = loop {
                match outputs(false, &[]).named(&pipe, &FIGURES) {
                    Ok(output) => break output,
                    Err(_) => std::thread::yield_now(),
                }
            };
            assert!(output.is_direct());
            // The content is larger than a pipe's buffer.
            output.write(vec![7; 1 << 20]).unwrap();
            assert_eq!(reader.join().unwrap(), vec![7; 1 << 20]);
        });
        assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
        outputs(false, &[]).named(Path::new("/dev/null"), &FIGURES).unwrap().write("x").unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        // A regular file counts as a file even if its path starts with `/dev/`.
        let around = Path::new("/dev/..").join(dir.path().strip_prefix("/").unwrap()).join("a");
        outputs(false, &[]).named(&around, &FIGURES).unwrap().write("x").unwrap();
        assert_eq!(fs::read(dir.path().join("a")).unwrap(), b"x");
    }
}
