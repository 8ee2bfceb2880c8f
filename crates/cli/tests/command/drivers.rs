//! Libraries that bear the names of NVIDIA's and lack what is called in them.

use crate::Place;
use std::process::Command;

/// Makes a library of functions that return 0, `library.so` in the place's folder `stubs`; false where no compiler is found.
fn stub(place: &Place, library: &str, functions: &[&str]) -> bool {
    let body = |name: &&str| match *name {
        // The version is the one thing that is told.
        "cuDriverGetVersion" => {
            format!(
                "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn {name}(v: *mut i32) -> i32 {{ unsafe {{ *v = 13000 }}; 0 }}\n"
            )
        }
        name => format!("#[unsafe(no_mangle)] pub extern \"C\" fn {name}() -> i32 {{ 0 }}\n"),
    };
    let source: String = functions.iter().map(body).collect();
    std::fs::create_dir_all(place.path("stubs")).unwrap();
    std::fs::write(place.path("stub.rs"), source).unwrap();
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--edition=2024", "--crate-type=cdylib", "-Cpanic=abort", "stub.rs", "-o"]);
    let made = rustc.arg(format!("stubs/{library}")).current_dir(place.path(".")).output();
    let Ok(made) = made else { return false };
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    true
}

#[test]
fn a_library_that_lacks_a_function_is_not_used() {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    let version = ["cuDriverGetVersion", "cuGetErrorString"];
    for (driver, lacks) in [(&[][..], "lacks cuDriverGetVersion"), (&version, "lacks cuInit")] {
        let nvrtc = ["nvrtcVersion"];
        let libraries = [("libcuda.so", driver), ("libnvrtc.so", &nvrtc), ("libcublasLt.so", &[])];
        if !libraries.iter().all(|(name, functions)| stub(&place, name, functions)) {
            println!("skipped: libraries that lack functions (no rustc on this machine)");
            return;
        }
        let nibble = |args: &[&str]| {
            let out = place.command(args).env("LD_LIBRARY_PATH", place.path("stubs")).output().unwrap();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            crate::Done { code: out.status.code(), stdout: text(&out.stdout), stderr: text(&out.stderr) }
        };
        let told = format!("libcuda.so {lacks}");
        let doctor = nibble(&["doctor"]).ok();
        doctor.contains(&format!("CUDA driver: unusable: {told}"));
        doctor.contains("NVRTC: unusable: libnvrtc.so lacks nvrtc");
        doctor.contains("cuBLASLt: unusable: libcublasLt.so lacks cublasLt");
        nibble(&["train", "small.toml", "--set", "run.device=auto", "--dry-run"])
            .ok()
            .contains(&format!("no Hopper GPU to use: {told}"));
        let error = nibble(&["train", "small.toml", "--set", "run.device=cuda:0"]).failed(2);
        assert!(error.contains(&told), "{error}");
    }
}
