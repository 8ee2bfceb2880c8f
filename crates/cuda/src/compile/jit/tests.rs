use super::*;

fn sources(texts: [(&str, &'static str); 2]) -> Sources {
    Sources::from_files(texts.map(|(path, text)| (path.to_owned(), text.into())))
}

const A: &str = "#include \"b\"\ntemplate <int kX, bool kY>\n__global__ void k() {}";

fn spec(args: &[(&'static str, TemplateArg)]) -> KernelSpec {
    KernelSpec { source: "a", name: "k", args: args.to_vec() }
}

#[test]
fn arguments_go_by_name() {
    let sources = sources([("a", A), ("b", "")]);
    let (x, y) = (("kX", TemplateArg::Int(-3)), ("kY", TemplateArg::Bool(true)));
    assert_eq!(spec(&[x, y]).expression(&sources).unwrap(), "k<-3, true>");
    assert_eq!(spec(&[y, x]).expression(&sources).unwrap(), "k<-3, true>");
    for (args, message) in [
        (vec![x], "`kY` is not given"),
        (vec![x, y, x], "`kX` is given twice"),
        (vec![x, y, ("kZ", TemplateArg::Int(0))], "no template parameter `kZ`; there are: kX, kY"),
    ] {
        let error = spec(&args).expression(&sources).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    let absent = KernelSpec { source: "a", name: "absent", args: vec![] };
    assert!(absent.expression(&sources).unwrap_err().to_string().contains("no __global__ function absent"));
}

#[test]
fn every_input_changes_the_key() {
    let key = |expression: &str, a: &'static str, b: &'static str, options: &[&str], nvrtc| {
        Key::of(expression, &sources([("a", a), ("b", b)]).reached("a").unwrap(), options, nvrtc)
    };
    let (b, options) = ("int b;", ["-o", "-p"]);
    let base = key("k<1>", A, b, &options, (13, 0));
    assert_eq!(base, key("k<1>", A, b, &options, (13, 0)), "the key is a function of its inputs");
    let changed = [
        key("k<2>", A, b, &options, (13, 0)),
        key(
            "k<1>",
            "#include \"b\"\ntemplate <int kX, bool kY>\n__global__ void k() { }",
            b,
            &options,
            (13, 0),
        ),
        key("k<1>", A, "int c;", &options, (13, 0)),
        key("k<1>", A, b, &["-o"], (13, 0)),
        key("k<1>", A, b, &["-p", "-o"], (13, 0)),
        key("k<1>", A, b, &["-o-p"], (13, 0)),
        key("k<1>", A, b, &options, (13, 1)),
        key("k<1>", A, b, &options, (12, 0)),
    ];
    let mut all: Vec<_> = changed.iter().chain([&base]).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), changed.len() + 1, "two inputs share a key");
}

#[test]
fn a_source_that_is_not_reached_leaves_the_key_alone() {
    let key = |b: &'static str| {
        let sources = sources([("a", "__global__ void k() {}"), ("b", b)]);
        Key::of("k", &sources.reached("a").unwrap(), OPTIONS, (13, 0))
    };
    assert_eq!(key("x"), key("y"));
}

#[test]
fn resources_are_read_from_the_log() {
    let log = "ptxas info    : 24 bytes gmem\nptxas info : Compiling entry function 'k' for 'sm_90a'\n    0 bytes stack frame, \
               12 bytes spill stores, 34 bytes spill loads\nptxas info    : Used 168 registers, used 1 barriers, 1040 bytes smem";
    let expected =
        Resources { registers: 168, spill_store_bytes: 12, spill_load_bytes: 34, static_shared_bytes: 1040 };
    assert_eq!(Resources::parse(log), expected);
}

/// Loads the compiler. If `NIBBLE_NVRTC` is set, loading must succeed.
fn nvrtc() -> Option<Nvrtc> {
    match Nvrtc::load() {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) if crate::env::nvrtc().is_some() => panic!("{error}"),
        Err(error) => {
            println!("skipped: a test that compiles: {error}");
            None
        }
    }
}

#[test]
fn compiles_once_keeps_on_disk_and_replaces_a_refused_entry() {
    let Some(nvrtc) = nvrtc() else { return };
    let folder = tempfile::tempdir().unwrap();
    let jit = || Jit::new(nvrtc, sources([("a", A), ("b", "")]), Some(folder.path().to_owned()));
    let spec = spec(&[("kX", TemplateArg::Int(1)), ("kY", TemplateArg::Bool(false))]);
    let first = jit();
    let all: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| first.cubin(&spec).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(all.iter().all(|cubin| Arc::ptr_eq(cubin, &all[0])), "eight threads, one compilation");
    assert!(all[0].image.starts_with(b"\x7FELF") && all[0].symbol.contains('k'));

    // A file with the right key and a wrong image stands for a cubin that the driver refuses.
    let key = first.key(&spec).unwrap();
    let disk = CubinCache::new(folder.path().to_owned());
    let planted = Cubin { image: vec![1], ..(*all[0]).clone() };
    disk.write(&key, &planted);
    let second = jit();
    assert_eq!(*second.cubin(&spec).unwrap(), planted, "the entry on disk is used");
    assert_eq!(second.rebuild(&spec).unwrap().image, all[0].image, "and replaced");
    assert_eq!(disk.read(&key).unwrap().image, all[0].image);
    assert_eq!(second.cubin(&spec).unwrap().image, all[0].image);
}

#[test]
fn a_source_that_does_not_compile_says_why() {
    let Some(nvrtc) = nvrtc() else { return };
    let broken = sources([("a", "__global__ void k() { undeclared(); }"), ("b", "")]);
    let error = nvrtc.compile(&spec(&[]), &broken).unwrap_err().to_string();
    assert!(error.contains("undeclared") && error.contains('k'), "{error}");
}

/// An instance and its sources; the kernel writes a single number.
fn one_number() -> (Sources, KernelSpec) {
    let text = "__global__ void k(float* out) { *out = 7.0f; }";
    (sources([("a", text), ("b", "")]), spec(&[]))
}

#[test]
fn many_processes_keep_one_folder() {
    let Some(nvrtc) = nvrtc() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (sources, spec) = one_number();
    let jit = || Jit::new(nvrtc, sources.clone(), Some(folder.path().to_owned()));
    let process = || {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "compile::jit::tests::one_process_of_many"]);
        command.env("NIBBLE_CUBIN_CACHE", folder.path()).stdout(std::process::Stdio::piped());
        command.spawn().unwrap()
    };
    let processes = [process(), process()];
    // Each thread has its own slots, so that all of them compile; one thread rewrites the entry repeatedly while
    // others read it.
    let images: Vec<_> = std::thread::scope(|scope| {
        let build = || jit().cubin(&spec).unwrap().image.clone();
        let replace = || (0..4).map(|_| jit().rebuild(&spec).unwrap().image.clone()).next_back().unwrap();
        let threads = [scope.spawn(build), scope.spawn(replace), scope.spawn(build)];
        threads.map(|thread| thread.join().unwrap()).to_vec()
    });
    for process in processes {
        let output = process.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().file_name()).collect();
    let key = jit().key(&spec).unwrap();
    assert_eq!(files, [format!("{key}.cubin").as_str()], "one entry, and nothing that was written beside it");
    let kept = CubinCache::new(folder.path().to_owned()).read(&key).unwrap();
    assert!(images.iter().all(|image| *image == kept.image), "whoever made it, the same instance");
}

#[test]
#[ignore = "run by many_processes_keep_one_folder"]
fn one_process_of_many() {
    let (sources, spec) = one_number();
    let jit = || Jit::new(Nvrtc::load().unwrap(), sources.clone(), crate::env::cubin_cache());
    for _ in 0..4 {
        jit().cubin(&spec).unwrap();
    }
}

/// This test needs a GPU. Without a GPU the test prints that it was skipped, or fails if
/// `NIBBLE_REQUIRE_GPU=1`.
#[test]
fn a_cubin_that_the_driver_refuses_is_built_again() {
    let Some(gpu) = crate::probe().usable().next().map(|gpu| gpu.ordinal) else {
        assert!(!crate::env::require_gpu(), "NIBBLE_REQUIRE_GPU=1, and no Hopper GPU");
        return nibble_testkit::skip("a cubin that the driver refuses: no Hopper GPU");
    };
    let folder = tempfile::tempdir().unwrap();
    let (sources, spec) = one_number();
    let jit = || Jit::new(Nvrtc::load().unwrap(), sources.clone(), Some(folder.path().to_owned()));
    let good = jit().cubin(&spec).unwrap();
    // Both entries have correct digests: one is for a machine that is not a GPU (an ELF header's `e_machine`), and one lacks
    // the kernel.
    let mut foreign = (*good).clone();
    foreign.image[18..20].fill(0);
    let nameless = Cubin { symbol: "absent".into(), ..(*good).clone() };
    let (disk, key) = (CubinCache::new(folder.path().to_owned()), jit().key(&spec).unwrap());
    for planted in [foreign, nameless] {
        disk.write(&key, &planted);
        let device = crate::Device::with_jit(gpu, jit()).unwrap();
        let out = device.filled::<f32>(1, 0).unwrap();
        let launch = crate::launch::Launch { ctas: 1, threads: 1, cluster: 1, shared_bytes: 0 };
        // SAFETY: the kernel writes a single number to a buffer that lives until it is read.
        unsafe { device.kernel(&spec).unwrap().launch(launch, &[&out]) }.unwrap();
        assert_eq!(out.download().unwrap(), [7.0], "the kernel runs");
        assert_eq!(disk.read(&key).unwrap(), *good, "and its entry is replaced");
    }
}
