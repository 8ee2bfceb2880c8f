//! Every kernel instance compiles, without a GPU, and needs what `resources.txt` says. Needs libnvrtc (its Python wheel will do). Instances of sources that are
//! as they were when `compiled.txt` was written are not compiled again, but in an exhaustive run.
//!
//! To re-pin after a deliberate change: `NIBBLE_UPDATE=1 cargo test --test compile_all`, and commit both files with the change. With
//! `NIBBLE_ONLY="nib::Nvfp4 nib::cast"` only instances of which a word is part are compiled, and held to their lines.

use nibble_cuda::KernelSpec;
use nibble_cuda::compile::jit::{self, Nvrtc};
use nibble_cuda::compile::source::{EMBEDDED, Sources};
use nibble_cuda::ops::{Instance, SharedSize};
use nibble_testkit::Breadth;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

const RESOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/resources.txt");
/// [`digests`], when all instances of a source were compiled last.
const COMPILED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/compiled.txt");

/// The NVRTC that both files are of.
const PINNED: (u32, u32) = (13, 0);

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

/// The lines of these, in their order, compiled on all processors.
fn compiled_lines(nvrtc: &Nvrtc, sources: &Sources, of: Vec<&Instance>) -> Vec<String> {
    let (next, lines) = (AtomicUsize::new(0), vec![OnceLock::new(); of.len()]);
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(instance) = of.get(at) else { return };
            lines[at].set(compiled_line(nvrtc, sources, instance)).unwrap();
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    lines.into_iter().map(|line| line.into_inner().unwrap()).collect()
}

/// The compiler of kernels; without one, a line that says what is skipped.
fn compiler(what: &str) -> Option<Nvrtc> {
    match Nvrtc::load() {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) if nibble_cuda::env::nvrtc().is_some() => panic!("{error}"),
        Err(error) => {
            println!("skipped: {what}: {error}");
            None
        }
    }
}

/// Path of a source and a digest, for every source of an instance: of all that decides what compiling its instances gives, of its lines of
/// `resources.txt`, and of what is asserted of its shared memory.
fn digests(sources: &Sources, table: &str) -> BTreeMap<&'static str, String> {
    let lines: BTreeMap<&str, &str> = table.lines().map(|line| (instance_of(line), line)).collect();
    let mut texts = asserts(&[]);
    for Instance { spec, .. } in instances() {
        let line = lines.get(&*spec.to_string()).copied().unwrap_or_default();
        writeln!(texts.entry(spec.source).or_default(), "{line}").unwrap();
    }
    let digest = |(source, text): (&'static str, String)| {
        (source, jit::digest(sources, source, &text, PINNED).unwrap().to_string())
    };
    texts.into_iter().map(digest).collect()
}

/// The sources of which nothing has changed since all their instances were compiled: none in an exhaustive run, or with another compiler.
fn unchanged(nvrtc: &Nvrtc, sources: &Sources, table: &str) -> BTreeSet<&'static str> {
    if nvrtc.version != PINNED || Breadth::of_tests() == Breadth::Whole {
        return BTreeSet::new();
    }
    let before = std::fs::read_to_string(COMPILED).unwrap_or_default();
    let before: BTreeMap<&str, &str> = before.lines().filter_map(|line| line.split_once(' ')).collect();
    let now = digests(sources, table).into_iter();
    now.filter(|(source, digest)| before.get(source) == Some(&digest.as_str()))
        .map(|(source, _)| source)
        .collect()
}

#[test]
fn every_instance_compiles_and_needs_no_more_than_before() {
    let Some(nvrtc) = compiler("compiling every kernel instance") else { return };
    let (sources, only) = (Sources::embedded(), nibble_cuda::env::only());
    let before = std::fs::read_to_string(RESOURCES).unwrap();
    let (head, old) = before.split_once('\n').unwrap();
    let lines: BTreeMap<&str, &str> = old.lines().map(|line| (instance_of(line), line)).collect();
    // Words ask for instances whatever is known of them.
    let known = if only.is_empty() { unchanged(&nvrtc, &sources, old) } else { BTreeSet::new() };
    let (mut table, mut compiled, mut kept) = (String::new(), 0, BTreeMap::new());
    let instances = instances();
    let is_due =
        |instance: &Instance| is_asked_for(&instance.spec, &only) && !known.contains(instance.spec.source);
    let mut made =
        compiled_lines(&nvrtc, &sources, instances.iter().filter(|i| is_due(i)).collect()).into_iter();
    for instance in &instances {
        let spec = &instance.spec;
        if is_due(instance) {
            let line = made.next().unwrap();
            println!("{line}");
            writeln!(table, "{line}").unwrap();
            compiled += 1;
        } else if let Some(line) = lines.get(&*spec.to_string()) {
            writeln!(table, "{line}").unwrap();
            *kept.entry(spec.source).or_insert(0) += 1;
        }
    }
    println!(
        "{compiled} instances compiled; {} are of sources as they were when theirs were",
        kept.values().sum::<usize>()
    );
    assert!(compiled > 0 || only.is_empty(), "no instance has one of {only:?}");
    if nvrtc.version != PINNED {
        return println!(
            "not compared with resources.txt: that is of NVRTC {PINNED:?}, this is {:?}",
            nvrtc.version
        );
    }
    let mut now = digests(&sources, &table);
    if nibble_cuda::env::update() {
        assert_layouts(&nvrtc, &only, &known);
        // Of a source of which some instance was not compiled, it stays as it was.
        let old = std::fs::read_to_string(COMPILED).unwrap_or_default();
        let old: BTreeMap<&str, &str> = old.lines().filter_map(|line| line.split_once(' ')).collect();
        now.retain(|source, digest| {
            !kept.contains_key(source) || known.contains(source) || old.get(source) == Some(&digest.as_str())
        });
        let listed: String = now.iter().map(|(source, digest)| format!("{source} {digest}\n")).collect();
        std::fs::write(RESOURCES, format!("{head}\n{table}")).unwrap();
        return std::fs::write(COMPILED, listed).unwrap();
    }
    assert_eq!(table, old, "resources changed: re-pin if that is meant");
    if only.is_empty() {
        let listed = std::fs::read_to_string(COMPILED).unwrap_or_default();
        let now: String = now.iter().map(|(source, digest)| format!("{source} {digest}\n")).collect();
        assert_eq!(listed, now, "compiled.txt is not of these sources: NIBBLE_UPDATE=1 writes it");
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

/// What is asserted of the shared memory of the instances that are asked for, by source.
fn asserts(only: &[String]) -> BTreeMap<&'static str, String> {
    let mut asserts: BTreeMap<&str, String> = BTreeMap::new();
    let mut compared = 0;
    for Instance { spec, shared_bytes } in instances() {
        if !is_asked_for(&spec, only) {
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
    asserts
}

/// Compiles what is asserted of all sources but these.
fn assert_layouts(nvrtc: &Nvrtc, only: &[String], known: &BTreeSet<&str>) {
    for (source, asserts) in asserts(only).into_iter().filter(|(source, _)| !known.contains(source)) {
        let text = format!("#include \"{source}\"\n{asserts}__global__ void sizes() {{}}\n");
        let embedded = EMBEDDED.iter().map(|&(path, text)| (path.to_owned(), text.into()));
        let sources = Sources::from_files(embedded.chain([("sizes.cuh".to_owned(), text.into())]));
        let spec = KernelSpec { source: "sizes.cuh", name: "sizes", args: vec![] };
        nvrtc.compile(&spec, &sources).unwrap_or_else(|error| panic!("{source}: {error}"));
    }
}

#[test]
fn every_instance_has_the_shared_memory_that_its_kernel_lays_out() {
    let Some(nvrtc) = compiler("sizes of shared memory") else { return };
    let only = nibble_cuda::env::only();
    let before = std::fs::read_to_string(RESOURCES).unwrap();
    let (_, old) = before.split_once('\n').unwrap();
    let known = if only.is_empty() { unchanged(&nvrtc, &Sources::embedded(), old) } else { BTreeSet::new() };
    assert_layouts(&nvrtc, &only, &known);
}
