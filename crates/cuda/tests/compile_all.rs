//! Every kernel instance compiles, without a GPU, and needs what `resources.txt` says. Needs libnvrtc (its Python wheel will do).
//!
//! To re-pin after a deliberate change: `NIBBLE_UPDATE=1 cargo test --test compile_all`, and commit the file with the change.

use nibble_cuda::jit::{KernelSpec, Nvrtc, TemplateArg};
use nibble_cuda::ops::gemm_fp8_block::Config;
use nibble_cuda::source::Sources;
use std::fmt::Write;

/// Every instance with its dynamic shared memory in bytes.
fn instances() -> Vec<(KernelSpec, usize)> {
    let mut all = vec![(nibble_cuda::timing::flush_spec(), 0)];
    all.extend(Config::ALL.iter().map(|config| (config.spec(), config.shared_bytes())));
    all.extend(conversions().into_iter().map(|spec| (spec, 0)));
    all
}

/// The conversions that the recipes ask for. No operation launches them yet; their dynamic shared memory is the launch's.
fn conversions() -> Vec<KernelSpec> {
    use TemplateArg::{Bool, Int, Type};
    const AMAX: i64 = 0;
    const RCEIL: i64 = 2;
    let mut all = Vec::new();
    let mut add = |source, name, args: &[(&'static str, TemplateArg)]| {
        all.push(KernelSpec { source, name, args: args.to_vec() });
    };
    for input in ["nib::Bf16", "nib::F32"] {
        for (element, rule) in [("nib::E2m1", RCEIL), ("nib::E4m3", AMAX), ("nib::E4m3", RCEIL)] {
            let args =
                [("In", Type(input)), ("E", Type(element)), ("kRule", Int(rule)), ("kAligned", Bool(true))];
            add("kernels/quantize.cuh", "nib::quantize_rows", &args);
            if element == "nib::E4m3" {
                for rows in [true, false] {
                    let args = [&args[..], &[("kRows", Bool(rows))]].concat();
                    add("kernels/quantize.cuh", "nib::quantize_cols", &args);
                }
            }
        }
    }
    for whole in [true, false] {
        let whole = ("kWhole", Bool(whole));
        for chunks in [2, 4] {
            add("kernels/transcode.cuh", "nib::lift_rows", &[whole, ("kChunks", Int(chunks))]);
        }
        add("kernels/transcode.cuh", "nib::lift_cols", &[whole]);
        add("kernels/transcode.cuh", "nib::shift_cols", &[whole]);
    }
    for rule in [AMAX, RCEIL] {
        let (element, rule) = (Type("nib::E4m3"), ("kRule", Int(rule)));
        for save_h in [true, false] {
            let args = [("A", element), rule, ("kSaveH", Bool(save_h)), ("kChunks", Int(2))];
            add("kernels/swiglu.cuh", "nib::swiglu_rows", &args);
        }
        for name in ["nib::swiglu_backward_rows", "nib::swiglu_backward_cols"] {
            add("kernels/swiglu_backward.cuh", name, &[("E", element), rule]);
        }
    }
    for (codes, scales) in [(16, 16), (16, 8), (16, 4), (16, 1)] {
        add("kernels/permute.cuh", "nib::gather_rows", &[("kCodes", Int(codes)), ("kScales", Int(scales))]);
    }
    all
}

#[test]
fn every_instance_compiles_and_needs_no_more_than_before() {
    let nvrtc = match Nvrtc::load() {
        Ok(nvrtc) => nvrtc,
        Err(error) => return println!("skipped, compiling every kernel instance: {error}"),
    };
    let sources = Sources::embedded();
    let mut table = String::from(
        "# registers, spilled bytes (stored + loaded), static + dynamic shared memory in bytes; NVRTC 13.0, sm_90a\n",
    );
    for (spec, dynamic_shared_bytes) in instances() {
        let (cubin, log) = nvrtc.compile(&spec, &sources).unwrap();
        assert!(cubin.image.starts_with(b"\x7FELF"), "{spec}: not an ELF image");
        assert!(!log.to_lowercase().contains("warning"), "{spec}: {log}");
        let r = cubin.resources;
        let (spills, shared) = (r.spill_store_bytes + r.spill_load_bytes, r.static_shared_bytes);
        writeln!(table, "{spec} {} {spills} {shared} + {dynamic_shared_bytes}", r.registers).unwrap();
        assert!(r.registers > 0, "{spec}: no resources in the log: {log}");
    }
    print!("{table}");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/resources.txt");
    if nibble_cuda::env::update() {
        std::fs::write(path, &table).unwrap();
    }
    if nvrtc.version == (13, 0) {
        assert_eq!(
            table,
            std::fs::read_to_string(path).unwrap(),
            "resources changed: re-pin if that is meant"
        );
    } else {
        println!("not compared with resources.txt: that is of NVRTC 13.0, this is {:?}", nvrtc.version);
    }
}
