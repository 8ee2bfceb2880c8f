//! Every kernel instance compiles, without a GPU, and needs what `resources.txt` says. Needs libnvrtc (its Python wheel will do).
//!
//! To re-pin after a deliberate change: `NIBBLE_UPDATE=1 cargo test --test compile_all`, and commit the file with the change.

use nibble_cuda::jit::Nvrtc;
use nibble_cuda::ops::Instance;
use nibble_cuda::source::Sources;
use std::fmt::Write;

/// Every instance: those of the operations, and the one that timing needs.
fn instances() -> Vec<Instance> {
    let flush = Instance { spec: nibble_cuda::timing::flush_spec(), shared_bytes: 0 };
    [vec![flush], nibble_cuda::ops::instances()].concat()
}

#[test]
fn every_instance_compiles_and_needs_no_more_than_before() {
    let nvrtc = match Nvrtc::load() {
        Ok(nvrtc) => nvrtc,
        Err(error) if nibble_cuda::env::nvrtc().is_some() => panic!("{error}"),
        Err(error) => return println!("skipped, compiling every kernel instance: {error}"),
    };
    let sources = Sources::embedded();
    let mut table = String::from(
        "# registers, spilled bytes (stored + loaded), static + dynamic shared memory in bytes; NVRTC 13.0, sm_90a\n",
    );
    for Instance { spec, shared_bytes } in instances() {
        let (cubin, log) = nvrtc.compile(&spec, &sources).unwrap();
        assert!(cubin.image.starts_with(b"\x7FELF"), "{spec}: not an ELF image");
        assert!(!log.to_lowercase().contains("warning"), "{spec}: {log}");
        let r = cubin.resources;
        let (spills, shared) = (r.spill_store_bytes + r.spill_load_bytes, r.static_shared_bytes);
        writeln!(table, "{spec} {} {spills} {shared} + {shared_bytes}", r.registers).unwrap();
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
