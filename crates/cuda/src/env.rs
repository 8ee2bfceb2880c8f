//! All environment variables that this crate and its tests read.

use std::path::PathBuf;

/// The meaning of each variable, for `--help` pages and `doctor`.
pub const HELP: &[(&str, &str)] = &[
    (
        "NIBBLE_NVRTC",
        "path of libnvrtc.so, or of the folder that contains libnvrtc.so; unset: the loader's search path is used",
    ),
    (
        "NIBBLE_CUPTI",
        "path of libcupti.so, with which `nibble bench step` traces a step; unset: the loader's search path is used",
    ),
    ("NIBBLE_NCCL", "path of libnccl.so.2, for ranks on GPUs; unset: the loader's search path is used"),
    (
        "NIBBLE_CUBIN_CACHE",
        "folder of the cache of compiled GPU kernels; with `off`, compiled kernels stay in memory only; unset: $XDG_CACHE_HOME/nibble/cubins or ~/.cache/nibble/cubins",
    ),
    ("NIBBLE_CSRC", "folder of GPU kernel sources, which replace the kernel sources in the binary"),
    (
        "NIBBLE_UPDATE",
        "tests only: if set, the tests rewrite tests/resources.txt instead of comparing with this file",
    ),
    (
        "NIBBLE_ONLY",
        "tests only: words separated by spaces; the tests compile only kernel instances whose name in tests/resources.txt contains one of the words, and leave all other lines of this file unchanged; unset: all instances",
    ),
    ("NIBBLE_REQUIRE_GPU", "tests only: with 1, a test that finds no GPU fails instead of being skipped"),
    (
        "NIBBLE_RANDOM_ELEMENTS",
        "tests only: number of random elements that the test random_billion converts with each conversion of an expert layer; all other conversions get an eighth of this number; unset: the test is skipped",
    ),
];

/// Variables that NCCL reads. A program with ranks on GPUs sets these variables to these values before the program starts a second
/// thread, unless the variables are already set.
///
/// NVLink multicast is useless here, because every message has one receiver, and NCCL's probe for multicast can fail on hosts that do not
/// allow multicast. Messages between ranks of one process go through NCCL's own buffers, because this crate's memory is not mapped on the
/// other GPUs.
pub const OF_NCCL: [(&str, &str); 2] = [("NCCL_NVLS_ENABLE", "0"), ("NCCL_P2P_DIRECT_DISABLE", "1")];

fn path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The value of `NIBBLE_NVRTC`.
pub fn nvrtc() -> Option<PathBuf> {
    path("NIBBLE_NVRTC")
}

/// The value of `NIBBLE_CUPTI`.
pub fn cupti() -> Option<PathBuf> {
    path("NIBBLE_CUPTI")
}

/// The value of `NIBBLE_NCCL`.
pub fn nccl() -> Option<PathBuf> {
    path("NIBBLE_NCCL")
}

/// The value of `NIBBLE_CSRC`.
pub fn csrc() -> Option<PathBuf> {
    path("NIBBLE_CSRC")
}

/// Whether `NIBBLE_REQUIRE_GPU` is `1`.
pub fn require_gpu() -> bool {
    std::env::var_os("NIBBLE_REQUIRE_GPU").is_some_and(|value| value == "1")
}

/// Whether `NIBBLE_UPDATE` is set.
pub fn update() -> bool {
    std::env::var_os("NIBBLE_UPDATE").is_some()
}

/// The words in the environment variable `NIBBLE_ONLY`; an empty list if the variable is not set.
pub fn only() -> Vec<String> {
    let words = std::env::var("NIBBLE_ONLY").unwrap_or_default();
    words.split_whitespace().map(str::to_owned).collect()
}

/// The value of `NIBBLE_RANDOM_ELEMENTS`, if it is a number above zero.
pub fn random_elements() -> Option<usize> {
    std::env::var("NIBBLE_RANDOM_ELEMENTS").ok()?.parse().ok().filter(|&elements| elements > 0)
}

/// The directory of compiled kernels, or `None` if kernels are kept in memory only.
pub fn cubin_cache() -> Option<PathBuf> {
    match path("NIBBLE_CUBIN_CACHE") {
        Some(value) if value.as_os_str() == "off" => None,
        Some(value) => Some(value),
        None => path("XDG_CACHE_HOME")
            .or_else(|| path("HOME").map(|home| home.join(".cache")))
            .map(|cache| cache.join("nibble").join("cubins")),
    }
}
