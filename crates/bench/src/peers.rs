//! The projects with which Nibble is compared, and the sources of their figures. The figures are constants: no other project's code runs
//! here.

/// The machine on which all these figures were measured, and the dates.
pub const MEASURED: &str = "an NVIDIA H200 (700 W, driver 580.159, CUDA 13.0) on 2026-11-21 and 22";

/// A project with which Nibble is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Who {
    /// The project's name in tables.
    pub name: &'static str,
    /// The repository and its commit or release, and a description of what was measured.
    pub source: &'static str,
    /// Whether the measured kernel is one that the project has released, as opposed to compiler output or a quickly written kernel.
    pub published: bool,
    /// The script under `benchmarks/peers` that measures the project, and a list of what the script leaves out.
    pub script: Option<(&'static str, &'static str)>,
}

impl Who {
    /// The lines about the project below a table.
    pub fn lines(&self) -> String {
        let again = match self.script {
            None => "no script here".to_owned(),
            Some((script, left_out)) => format!("by benchmarks/peers/{script}{left_out}"),
        };
        let line = format!("  {:<14} {};", self.name, self.source);
        let fits = line.chars().count() + again.chars().count() < super::figures::WIDTH;
        format!("{line}{}{again}", if fits { " ".to_owned() } else { format!("\n{:17}", "") })
    }
}

/// Asserts that the project's script exists.
#[cfg(test)]
pub fn assert_is_where_it_says(who: &Who) {
    if let Some((script, _)) = who.script {
        let path = format!("{}/../../benchmarks/peers/{script}", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let whose = if who.source.contains("Triton") { "triton" } else { "torch" };
        assert!(text.contains(whose), "{path} does not time {}", who.name);
    }
    assert!(who.lines().lines().all(|line| line.chars().count() <= super::figures::WIDTH), "{}", who.lines());
}
