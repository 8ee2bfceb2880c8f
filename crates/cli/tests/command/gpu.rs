//! What needs a GPU, and what is said where there is none.

use super::Place;

/// Whether the machine that runs the tests has a GPU the kernels run on, and what compiles them: otherwise `nibble` takes the CPU, and
/// under `NIBBLE_REQUIRE_GPU=1` the test fails.
pub fn has_gpu() -> bool {
    let found = nibble_cuda::probe();
    let is_there = found.driver.is_ok() && found.nvrtc.is_ok() && found.usable().next().is_some();
    assert!(
        is_there || !nibble_cuda::env::require_gpu(),
        "NIBBLE_REQUIRE_GPU=1, and no Hopper GPU:\n{found}"
    );
    is_there
}

#[test]
fn verify_compares_the_cpu_with_its_specification() {
    let place = Place::new();
    let done = place
        .nibble(&["verify", "--cpu", "--only", "cast", "--only", "plan_permute", "--json", "v.json"])
        .ok();
    done.contains("PASS  cast").contains("PASS  plan_permute").contains("2 of 2 operations agree");
    let json = std::fs::read_to_string(place.path("v.json")).unwrap();
    assert!(json.contains("\"passed\": true") && json.contains("\"op\": \"cast\""), "{json}");
    let error = place.nibble(&["verify", "--cpu", "--only", "casts"]).failed(2);
    assert!(error.contains("`casts`") && error.contains("plan_permute"), "{error}");
}

#[test]
fn without_a_gpu_the_gpu_commands_say_what_was_found_and_what_to_do() {
    if has_gpu() {
        return println!("skipped: there is a GPU here");
    }
    let place = Place::new();
    let commands = [
        (vec!["verify"], "--cpu"),
        (vec!["bench", "kernels"], "bench ops"),
        (vec!["bench", "gemm"], "bench step"),
        (vec!["bench", "experts"], "bench step"),
    ];
    for (command, instead) in commands {
        let error = place.nibble(&command).failed(2);
        assert!(error.contains("Hopper GPU") && error.contains("CUDA driver"), "{error}");
        assert!(error.contains(instead), "{error}");
    }
}

#[test]
fn a_name_or_shape_that_makes_no_sense_is_refused_before_the_gpu_is_looked_for() {
    let place = Place::new();
    let error = place.nibble(&["verify", "--only", "frobnicate"]).failed(2);
    assert!(error.contains("`frobnicate`") && error.contains("transcode"), "{error}");
    let error = place.nibble(&["bench", "kernels", "--only", "frobnicate"]).failed(2);
    assert!(error.contains("`frobnicate`") && error.contains("MXFP4 → E4M3 rows (lift)"), "{error}");
    let error = place.nibble(&["bench", "gemm", "--only", "frobnicate"]).failed(2);
    assert!(
        error.contains("`frobnicate`") && error.contains("fprop 4096x7168 32768 8 uneven FP8"),
        "{error}"
    );
    let error = place.nibble(&["bench", "gemm", "--tune", "t.json", "--plot", "p.svg"]).failed(2);
    assert!(error.contains("--tune") && error.contains("--plot"), "{error}");
    let error = place.nibble(&["bench", "kernels", "--shapes", "10x10"]).failed(2);
    assert!(error.contains("multiple of MXFP4's block of 32"), "{error}");
}

#[test]
fn a_device_that_cannot_be_had_is_refused_with_what_there_is() {
    let place = Place::with_text();
    let error = place.train(&["--device", "gpu"]).failed(2);
    assert!(error.contains("\"gpu\"") && error.contains("auto, cpu"), "{error}");
    let error = place.train(&["--set", "run.device=gpus"]).failed(2);
    assert!(error.contains("`run.device`") && error.contains("cuda:0"), "{error}");
    let error = place.train(&["--device", "cuda:0", "--set", "run.ranks=2"]).failed(2);
    assert!(error.contains("is one GPU") && error.contains("run.device=cuda"), "{error}");
    // No machine has so many.
    let error = place.train(&["--device", "cuda:4000"]).failed(2);
    assert!(error.contains("run.device = cuda:4000") && error.contains("CUDA driver"), "{error}");
    assert!(!place.path("runs").exists());
}

#[test]
fn a_run_says_where_it_computes_and_why() {
    let place = Place::with_text();
    place.train(&["--dry-run"]).ok().contains("device: cpu").contains("(run.device = cpu)");
    if !has_gpu() {
        let auto = place.train(&["--dry-run", "--device", "auto", "--set", "run.ranks=2"]).ok();
        auto.contains("(run.device = auto: fewer Hopper GPUs to use than the 2 ranks of this host: ");
        let error = place.train(&["--device", "cuda", "--set", "run.ranks=2"]).failed(2);
        assert!(error.contains("run.device = cuda") && error.contains("CUDA driver"), "{error}");
        let auto = place.train(&["--dry-run", "--device", "auto"]).ok();
        auto.contains("device: cpu").contains("(run.device = auto: no Hopper GPU to use: ");
    }
}
