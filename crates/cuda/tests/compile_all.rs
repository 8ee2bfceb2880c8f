//! Every kernel instance compiles, without a GPU, and needs what `resources.txt` says. Needs libnvrtc (its Python wheel will do).
//!
//! To re-pin after a deliberate change: `NIBBLE_UPDATE=1 cargo test --test compile_all`, and commit the file with the change. With
//! `NIBBLE_ONLY="nib::Nvfp4 nib::cast"` only instances of which a word is part are compiled, and held to their lines.

use nibble_cuda::KernelSpec;
use nibble_cuda::compile::jit::Nvrtc;
use nibble_cuda::compile::source::{EMBEDDED, Sources};
use nibble_cuda::ops::{Instance, SharedSize};
use std::collections::BTreeMap;
use std::fmt::Write;

const RESOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/resources.txt");

/// Every instance: those of the operations, and the one that timing needs.
fn instances() -> Vec<Instance> {
    let flush = Instance { spec: nibble_cuda::measure::timing::flush_spec(), shared_bytes: 0 };
    [vec![flush], nibble_cuda::ops::instances()].concat()
}

/// Whether an instance is to be compiled: all are, unless `NIBBLE_ONLY` says which.
fn is_asked_for(spec: &KernelSpec, only: &[String]) -> bool {
    let name = spec.to_string();
    only.is_empty() || only.iter().any(|word| name.contains(word.as_str()))
}

/// The instance of a line of the table: what stands before registers, spills, and two numbers of shared memory around a `+`.
fn instance_of(line: &str) -> &str {
    line.rsplitn(6, ' ').nth(5).unwrap_or_else(|| panic!("no line of resources.txt: {line}"))
}

/// An instance's line of the table, by compiling it.
fn compiled_line(nvrtc: &Nvrtc, sources: &Sources, Instance { spec, shared_bytes }: &Instance) -> String {
    let (cubin, log) = nvrtc.compile(spec, sources).unwrap();
    assert!(cubin.image.starts_with(b"\x7FELF"), "{spec}: not an ELF image");
    assert!(!log.to_lowercase().contains("warning"), "{spec}: {log}");
    let r = cubin.resources;
    assert!(r.registers > 0, "{spec}: no resources in the log: {log}");
    let (spills, shared) = (r.spill_store_bytes + r.spill_load_bytes, r.static_shared_bytes);
    format!("{spec} {} {spills} {shared} + {shared_bytes}", r.registers)
}

#[test]
fn every_instance_compiles_and_needs_no_more_than_before() {
    let nvrtc = match Nvrtc::load() {
        Ok(nvrtc) => nvrtc,
        Err(error) if nibble_cuda::env::nvrtc().is_some() => panic!("{error}"),
        Err(error) => return println!("skipped: compiling every kernel instance: {error}"),
    };
    let (sources, only) = (Sources::embedded(), nibble_cuda::env::only());
    let before = std::fs::read_to_string(RESOURCES).unwrap();
    let lines = before.lines().filter(|line| !line.starts_with('#'));
    let lines: BTreeMap<&str, &str> = lines.map(|line| (instance_of(line), line)).collect();
    let mut table = String::from(
        "# registers, spilled bytes (stored + loaded), static + dynamic shared memory in bytes; NVRTC 13.0, sm_90a\n",
    );
    let mut compiled = 0;
    for instance in instances() {
        if is_asked_for(&instance.spec, &only) {
            let line = compiled_line(&nvrtc, &sources, &instance);
            println!("{line}");
            writeln!(table, "{line}").unwrap();
            compiled += 1;
        } else if let Some(line) = lines.get(&*instance.spec.to_string()) {
            writeln!(table, "{line}").unwrap();
        }
    }
    assert!(compiled > 0, "no instance has one of {only:?}");
    if nibble_cuda::env::update() {
        std::fs::write(RESOURCES, &table).unwrap();
    } else if nvrtc.version == (13, 0) {
        assert_eq!(table, before, "resources changed: re-pin if that is meant");
    } else {
        println!("not compared with resources.txt: that is of NVRTC 13.0, this is {:?}", nvrtc.version);
    }
}

/// An instance that was added, renamed or dropped is noticed without a compiler.
#[test]
fn resources_list_every_instance_in_order() {
    if nibble_cuda::env::update() {
        return println!("skipped: resources.txt is being written");
    }
    let resources = std::fs::read_to_string(RESOURCES).unwrap();
    let lines = resources.lines().filter(|line| !line.starts_with('#'));
    let listed: Vec<&str> = lines.map(instance_of).collect();
    let instances: Vec<String> = instances().iter().map(|instance| instance.spec.to_string()).collect();
    for (listed, instance) in listed.iter().zip(&instances) {
        assert_eq!(listed, instance, "instances changed: compile them, and re-pin");
    }
    assert_eq!(listed.len(), instances.len(), "instances changed: compile them, and re-pin");
}

/// The kernels whose shared memory follows from the sizes of the problem: those of [`nibble_cuda::ops::shared_sizes`], and three that
/// have an array of one number for each of as many as are counted.
const COMPUTED: [&str; 11] = [
    "nib::assign_ranks",
    "nib::attention_decode",
    "nib::combine_tree",
    "nib::cross_entropy",
    "nib::head_rows",
    "nib::plan_count",
    "nib::plan_place",
    "nib::rms_backward_long",
    "nib::rms_backward_wide",
    "nib::route_backward",
    "nib::route_tokens",
];

/// The struct that a kernel lays out in dynamic shared memory, and how many bytes its launch has more at least and at most: to start
/// on a multiple of 1024. None of kernels whose launch computes it from the problem's sizes: [`nibble_cuda::ops::shared_sizes`].
fn layout(spec: &KernelSpec) -> Option<(String, usize, usize)> {
    let arg = |name: &str| {
        let found = spec.args.iter().find(|(key, _)| *key == name);
        found.unwrap_or_else(|| panic!("{spec} has no {name}")).1.to_string()
    };
    let all = |names: &[&str]| names.iter().map(|name| arg(name)).collect::<Vec<_>>().join(", ");
    const STAGES: [&str; 3] = ["kStages", "kOutBuffers", "kBoxes"];
    let (layout, least, most) = match spec.name {
        "nib::attention_wgmma" => {
            (format!("nib::ForwardShared<{}>", all(&["kDim", "kValueDim", "kGroups"])), 1008, 1152)
        }
        "nib::attention_wgmma_backward_kv" => {
            (format!("nib::KeyGradsShared<{}, false>", all(&["kDim", "kValueDim"])), 1008, 1152)
        }
        "nib::attention_wgmma_backward_once" => {
            (format!("nib::OnceShared<{}>", all(&["kDim", "kValueDim"])), 1008, 1152)
        }
        "nib::attention_wgmma_backward_q" => {
            (format!("nib::BackwardQShared<{}>", all(&["kDim", "kValueDim"])), 1008, 1152)
        }
        "nib::attention" => (format!("nib::AttentionShared<{}>", arg("kDim")), 0, 0),
        "nib::attention_backward_kv" | "nib::attention_backward_q" => {
            (format!("nib::AttentionGradShared<{}>", all(&["kDim", "kRows"])), 0, 0)
        }
        "nib::quantize_cols" => (format!("nib::ColumnShared<{}>", all(&["In", "E", "kF32Scales"])), 0, 0),
        "nib::quantize_tiles" => (format!("nib::SquareShared<{}>", arg("In")), 0, 0),
        "nib::quantize_units" => {
            (format!("nib::QuantizeUnitsShared<{}>", all(&["F", "In", "kAcross"])), 0, 0)
        }
        "nib::quantize_units_decoded" => {
            (format!("nib::DecodedUnitsShared<{}>", all(&["F", "In", "kRound", "kAcross"])), 0, 0)
        }
        "nib::dequantize_units" => {
            let across = if arg("kDown") == "true" { 2 } else { 16 };
            (format!("nib::DecodedShared<{}, {across}>", all(&["F", "Out"])), 0, 0)
        }
        "nib::measure_quantization" => (format!("nib::UnitCodes<{}>", arg("F")), 0, 0),
        "nib::quantize_hadamard_cols" => {
            (format!("nib::QuantizeHadamardShared<{}>", all(&["E", "Round"])), 0, 0)
        }
        "nib::quantize_hadamard_cols_lifted" => {
            (format!("nib::QuantizeHadamardShared<nib::E2m1, {}>", arg("Round")), 0, 0)
        }
        "nib::quantize_hadamard_rows" => (format!("nib::UnitsShared<{}>", arg("E")), 0, 1023),
        "nib::lift_cols" => (format!("nib::TurnShared<nib::kTile / 2, 4, {}>", arg("kPanels")), 0, 0),
        "nib::shift_cols" => (format!("nib::ShiftShared<{}>", arg("kPanels")), 0, 0),
        "nib::lift_tiles" => ("nib::LiftTilesShared".into(), 0, 0),
        "nib::swiglu_backward" => (format!("nib::BackwardShared<{}>", arg("H")), 0, 0),
        "nib::swiglu_backward_plain" if arg("Chunk") != "nib::AnyChunk" => ("nib::SigmoidTable".into(), 0, 0),
        "nib::swiglu_rows_cols" => ("nib::RowsColsShared".into(), 0, 0),
        "nib::grouped_fp8_block" => {
            let args = all(&[STAGES[0], STAGES[1], STAGES[2], "kScalesB", "Out"]);
            (format!("nib::SharedLayout<{args}>"), 1008, 1024)
        }
        "nib::grouped_fp8_mixed" => {
            // The queue of tiles is counted with what aligns it.
            let args = all(&[STAGES[0], STAGES[1], STAGES[2], "Out"]);
            (format!("nib::MixedLayout<{args}>"), 1008, 1024 + 512)
        }
        "nib::grouped_bf16" | "nib::grouped_bf16_scaled" => {
            let args = all(&[STAGES[0], STAGES[1], STAGES[2], "Out"]);
            (format!("nib::SharedLayout<{args}>"), 1008, 1024)
        }
        _ => return None,
    };
    Some((layout, least, most))
}

#[test]
fn every_instance_has_the_shared_memory_that_its_kernel_lays_out() {
    let nvrtc = match Nvrtc::load() {
        Ok(nvrtc) => nvrtc,
        Err(error) if nibble_cuda::env::nvrtc().is_some() => panic!("{error}"),
        Err(error) => return println!("skipped: sizes of shared memory: {error}"),
    };
    let only = nibble_cuda::env::only();
    let mut asserts: BTreeMap<&str, String> = BTreeMap::new();
    let mut compared = 0;
    for Instance { spec, shared_bytes } in instances() {
        if !is_asked_for(&spec, &only) {
            continue;
        }
        let Some((layout, least, most)) = layout(&spec) else {
            assert!(shared_bytes == 0 || COMPUTED.contains(&spec.name), "{spec}: nothing holds its size");
            continue;
        };
        let text = asserts.entry(spec.source).or_default();
        writeln!(
            text,
            "static_assert(sizeof({layout}) + {least} <= {shared_bytes}, \"{spec} has too little\");"
        )
        .unwrap();
        writeln!(
            text,
            "static_assert({shared_bytes} <= sizeof({layout}) + {most}, \"{spec} has too much\");"
        )
        .unwrap();
        compared += 1;
    }
    if only.is_empty() {
        for SharedSize { source, expression, bytes } in nibble_cuda::ops::shared_sizes() {
            let text = asserts.entry(source).or_default();
            writeln!(text, "static_assert({expression} == {bytes}, \"the launch asks for {bytes}\");")
                .unwrap();
        }
        assert!(compared > 120, "{compared}");
    }
    for (source, asserts) in asserts {
        let text = format!("#include \"{source}\"\n{asserts}__global__ void sizes() {{}}\n");
        let embedded = EMBEDDED.iter().map(|&(path, text)| (path.to_owned(), text.into()));
        let sources = Sources::from_files(embedded.chain([("sizes.cuh".to_owned(), text.into())]));
        let spec = KernelSpec { source: "sizes.cuh", name: "sizes", args: vec![] };
        nvrtc.compile(&spec, &sources).unwrap_or_else(|error| panic!("{source}: {error}"));
    }
}
