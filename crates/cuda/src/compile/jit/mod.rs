//! Compiles kernel instances to cubins with NVRTC.
//!
//! An instance is a [`KernelSpec`]: a source, a kernel, and its template arguments by name. The [`Key`] of an instance
//! is the SHA-256 of every source that it includes (without comments), the options, NVRTC's version and the instance
//! itself. So an entry of the cache on disk is never stale, and no timestamps are compared. If several threads need the
//! same instance, one of them compiles it.

pub use crate::compile::cubin::{Cubin, Key, Resources};
use crate::compile::cubin_cache::CubinCache;
use crate::compile::source::{Sources, num_arguments, template_parameters};
use crate::driver::symbols;
use cudarc::nvrtc::{result, sys};
use nibble_core::{Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The compiler options for every kernel. `--fmad=false` is set because the sources write a fused multiply-add
/// explicitly if one is intended.
pub const OPTIONS: &[&str] =
    &["--gpu-architecture=sm_90a", "--std=c++20", "--fmad=false", "--ptxas-options=--verbose"];

/// The digest of `text` compiled by this version of NVRTC with `source` included. The digest covers the text, every included source
/// (without comments) and the options.
///
/// # Errors
/// [`Error::Jit`] if a source does not exist.
pub fn digest(sources: &Sources, source: &str, text: &str, nvrtc: (u32, u32)) -> Result<Key> {
    Ok(Key::of(text, &sources.reached(source)?, OPTIONS, nvrtc))
}

/// The value of a template argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TemplateArg {
    /// An integer.
    Int(i64),
    /// `true` or `false`.
    Bool(bool),
    /// A type, by its full C++ name.
    Type(&'static str),
}

impl fmt::Display for TemplateArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Type(name) => write!(f, "{name}"),
        }
    }
}

/// One instance of a kernel template.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KernelSpec {
    /// The source, by its path under `csrc/`.
    pub source: &'static str,
    /// The kernel's name, including its namespace.
    pub name: &'static str,
    /// Template arguments by their names in the source, in any order.
    pub args: Vec<(&'static str, TemplateArg)>,
}

impl KernelSpec {
    /// The name of the instance in C++, for example `nib::kernel<256, 4>`, with the arguments in the order of the template parameters in
    /// the source. Returns an error if an argument is unknown, or if a template parameter has no argument.
    pub fn expression(&self, sources: &Sources) -> Result<String> {
        let wrong = |log: String| Error::Jit { kernel: self.to_string(), log };
        let parameters = template_parameters(sources.text(self.source)?, self.name)
            .ok_or_else(|| wrong(format!("{} has no __global__ function {}", self.source, self.name)))?;
        if let Some((name, _)) = self.args.iter().find(|(name, _)| !parameters.contains(name)) {
            return Err(wrong(format!(
                "no template parameter `{name}`; there are: {}",
                parameters.join(", ")
            )));
        }
        let mut values = Vec::new();
        for parameter in &parameters {
            let mut given = self.args.iter().filter(|(name, _)| name == parameter);
            match (given.next(), given.next()) {
                (Some((_, value)), None) => values.push(value.to_string()),
                (None, _) => return Err(wrong(format!("template parameter `{parameter}` is not given"))),
                _ => return Err(wrong(format!("template parameter `{parameter}` is given twice"))),
            }
        }
        Ok(if values.is_empty() {
            self.name.to_owned()
        } else {
            format!("{}<{}>", self.name, values.join(", "))
        })
    }
}

impl fmt::Display for KernelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let args: Vec<_> = self.args.iter().map(|(name, value)| format!("{name}={value}")).collect();
        write!(f, "{}<{}>", self.name, args.join(", "))
    }
}

/// The loaded compiler library NVRTC.
#[derive(Debug, Clone, Copy)]
pub struct Nvrtc {
    /// NVRTC's version, such as (13, 0).
    pub version: (u32, u32),
}

impl Nvrtc {
    /// Loads NVRTC, from the path `NIBBLE_NVRTC` if that is set. Returns an error (and does not panic) if the library is missing.
    pub fn load() -> Result<Self> {
        Self::found().map_err(|why| Error::Device { call: "loading NVRTC".into(), why })
    }

    /// Loads NVRTC like [`Nvrtc::load`]; the error is only the reason.
    pub(crate) fn found() -> Result<Self, String> {
        static LOADED: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        LOADED.get_or_init(Self::load_now).clone()
    }

    fn load_now() -> Result<Self, String> {
        if let Some(path) = crate::env::nvrtc() {
            preload(path)?;
        }
        // SAFETY: loading NVRTC runs its initialisers, which are safe to run.
        if !unsafe { sys::is_culib_present() } {
            return Err("libnvrtc.so cannot be loaded; install the CUDA runtime compiler (its Python wheel will do) or \
                        point NIBBLE_NVRTC at it"
                .into());
        }
        // SAFETY: the library was just found, so loading it is safe.
        symbols::missing("libnvrtc.so", unsafe { sys::culib() }, symbols::NVRTC)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the call writes two ints.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(|error| error.to_string())?;
        Ok(Self { version: (major as u32, minor as u32) })
    }

    /// Compiles one instance. The method also returns the log of ptxas, including all warnings.
    pub fn compile(&self, spec: &KernelSpec, sources: &Sources) -> Result<(Cubin, String)> {
        let expression = spec.expression(sources)?;
        let reached = sources.reached(spec.source)?;
        compile_program(spec.source, &reached, &expression)
            .map_err(|log| Error::Jit { kernel: spec.to_string(), log })
    }
}

/// Loads NVRTC from a path, so that a later search by name finds the loaded library. The library of built-in
/// functions in the same directory is loaded first, because NVRTC searches for it by name.
#[cfg(unix)]
fn preload(path: PathBuf) -> Result<(), String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    let folder =
        if path.is_dir() { path.clone() } else { path.parent().map(PathBuf::from).unwrap_or_default() };
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .map_err(|error| format!("NIBBLE_NVRTC: {}: {error}", folder.display()))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("libnvrtc") && name.contains(".so") && !name.contains(".alt"))
        .collect();
    names.sort_by_key(|name| !name.starts_with("libnvrtc-builtins"));
    if names.iter().all(|name| name.starts_with("libnvrtc-builtins")) {
        return Err(format!("NIBBLE_NVRTC: no libnvrtc.so* in {}", folder.display()));
    }
    for name in names {
        let file = folder.join(name);
        // SAFETY: loading NVRTC runs its initialisers, which are safe to run.
        let library = unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_GLOBAL) }
            .map_err(|error| format!("NIBBLE_NVRTC: {}: {error}", file.display()))?;
        // The library stays loaded for the life of the process.
        std::mem::forget(library);
    }
    Ok(())
}

#[cfg(not(unix))]
fn preload(_: PathBuf) -> Result<(), String> {
    Err("NIBBLE_NVRTC is read on Unix only; put NVRTC on the loader's search path".into())
}

fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| "a zero byte in a kernel source".to_owned())
}

/// An NVRTC program, which is destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created once and is destroyed once. If the program cannot be destroyed, it
        // leaks, because nothing else can be done.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn compile_program(
    source: &str,
    reached: &BTreeMap<&str, &str>,
    expression: &str,
) -> Result<(Cubin, String), String> {
    let main = c_string(&format!("#include \"{source}\"\n"))?;
    let paths = reached.keys().map(|path| c_string(path)).collect::<Result<Vec<_>, _>>()?;
    let texts = reached.values().map(|text| c_string(text)).collect::<Result<Vec<_>, _>>()?;
    let options = OPTIONS.iter().map(|option| c_string(option)).collect::<Result<Vec<_>, _>>()?;
    let expression = c_string(expression)?;
    let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (path_ptrs, text_ptrs, option_ptrs) = (pointers(&paths), pointers(&texts), pointers(&options));

    let mut raw = std::ptr::null_mut();
    // SAFETY: every pointer points to a live, zero-terminated string, and the counts are the lengths of
    // the arrays.
    unsafe {
        sys::nvrtcCreateProgram(
            &mut raw,
            main.as_ptr(),
            c"instance.cu".as_ptr(),
            path_ptrs.len() as i32,
            text_ptrs.as_ptr(),
            path_ptrs.as_ptr(),
        )
    }
    .result()
    .map_err(|error| error.to_string())?;
    let program = Program(raw);

    // SAFETY: the program, the strings and the array of options live until the end of this function.
    let compiled = unsafe {
        sys::nvrtcAddNameExpression(program.0, expression.as_ptr()).result().and_then(|()| {
            sys::nvrtcCompileProgram(program.0, option_ptrs.len() as i32, option_ptrs.as_ptr()).result()
        })
    };
    // SAFETY: the size is queried first, and the buffer has that size.
    let log = unsafe {
        read(|size| sys::nvrtcGetProgramLogSize(program.0, size), |to| sys::nvrtcGetProgramLog(program.0, to))
    }
    .map(|bytes| String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
    .unwrap_or_default();
    if let Err(error) = compiled {
        return Err(format!("{error}\n{log}"));
    }

    let mut lowered = std::ptr::null();
    // SAFETY: the expression is the one added above; the returned name lives as long as the program and is copied at once.
    let symbol = unsafe {
        sys::nvrtcGetLoweredName(program.0, expression.as_ptr(), &mut lowered)
            .result()
            .map_err(|e| e.to_string())?;
        CStr::from_ptr(lowered).to_string_lossy().into_owned()
    };
    // SAFETY: the size is queried first, and the buffer has that size.
    let image = unsafe {
        read(|size| sys::nvrtcGetCUBINSize(program.0, size), |to| sys::nvrtcGetCUBIN(program.0, to))
    }?;
    Ok((Cubin { image, symbol, resources: Resources::parse(&log) }, log))
}

/// Reads bytes as NVRTC returns them: first the size, then the content.
///
/// # Safety
/// `content` must write no more bytes than `size` returns.
unsafe fn read(
    size: impl FnOnce(*mut usize) -> sys::nvrtcResult,
    content: impl FnOnce(*mut std::ffi::c_char) -> sys::nvrtcResult,
) -> Result<Vec<u8>, String> {
    let mut len = 0;
    size(&mut len).result().map_err(|error| error.to_string())?;
    let mut bytes = vec![0u8; len];
    content(bytes.as_mut_ptr().cast()).result().map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// The slot of one instance in [`Jit`]. A slot stays locked while its instance is compiled, so that other threads
/// wait instead of compiling the same instance.
type Slot = Arc<Mutex<Option<Arc<Cubin>>>>;

/// Provides compiled kernels from a cache in memory, from a cache on disk, or by compiling them.
#[derive(Debug)]
pub struct Jit {
    nvrtc: Nvrtc,
    sources: Sources,
    disk: Option<CubinCache>,
    slots: Mutex<HashMap<Key, Slot>>,
}

impl Jit {
    /// Takes the sources, the compiler and the cache from the environment variables.
    pub fn from_env() -> Result<Self> {
        Ok(Self::new(Nvrtc::load()?, Sources::from_env()?, crate::env::cubin_cache()))
    }

    /// Uses the given sources, compiler and cache directory. If the cache is `None`, compiled kernels are kept in memory only.
    pub fn new(nvrtc: Nvrtc, sources: Sources, cache: Option<PathBuf>) -> Self {
        Self { nvrtc, sources, disk: cache.map(CubinCache::new), slots: Mutex::default() }
    }

    /// The number of arguments of the kernel.
    pub fn num_arguments(&self, spec: &KernelSpec) -> Result<usize> {
        num_arguments(self.sources.text(spec.source)?, spec.name).ok_or_else(|| Error::Jit {
            kernel: spec.to_string(),
            log: format!("{} has no __global__ function {}", spec.source, spec.name),
        })
    }

    /// The key of the instance in the cache.
    pub fn key(&self, spec: &KernelSpec) -> Result<Key> {
        digest(&self.sources, spec.source, &spec.expression(&self.sources)?, self.nvrtc.version)
    }

    /// The compiled instance. The method takes it from memory if possible, otherwise from disk, and otherwise compiles it.
    pub fn cubin(&self, spec: &KernelSpec) -> Result<Arc<Cubin>> {
        let key = self.key(spec)?;
        let slot = self.slot(key);
        // A panic during compilation leaves the slot empty, which is a valid state.
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cubin) = slot.as_ref() {
            return Ok(cubin.clone());
        }
        let cubin = match self.disk.as_ref().and_then(|disk| disk.read(&key)) {
            Some(cubin) => cubin,
            None => self.compile(spec, &key)?,
        };
        Ok(slot.insert(Arc::new(cubin)).clone())
    }

    /// Compiles an instance again and replaces the cached cubin, for example because the driver
    /// refused it.
    pub fn rebuild(&self, spec: &KernelSpec) -> Result<Arc<Cubin>> {
        let key = self.key(spec)?;
        let slot = self.slot(key);
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = None;
        if let Some(disk) = &self.disk {
            disk.evict(&key);
        }
        Ok(slot.insert(Arc::new(self.compile(spec, &key)?)).clone())
    }

    fn slot(&self, key: Key) -> Slot {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone()
    }

    fn compile(&self, spec: &KernelSpec, key: &Key) -> Result<Cubin> {
        let (cubin, _) = self.nvrtc.compile(spec, &self.sources)?;
        if let Some(disk) = &self.disk {
            disk.write(key, &cubin);
        }
        Ok(cubin)
    }
}

#[cfg(test)]
mod tests;
