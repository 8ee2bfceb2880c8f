//! What happens where the system gives a process no more memory: an error that says so, no file lost, nothing left over.

use crate::Place;
use crate::every::{self, Command};
use nibble_testkit::Breadth;
use std::os::unix::process::CommandExt;
use std::process::{Command as Process, Output};

/// Steps below what a command needs.
fn steps() -> u64 {
    Breadth::of_tests().either(20, 5)
}

/// Runs a process that may have so many KiB of addresses, without a compiler of kernels, which gives up in words of its own.
fn within(process: &mut Process, kib: u64) -> Output {
    process.env_remove("NIBBLE_NVRTC");
    let limit = libc::rlimit { rlim_cur: kib << 10, rlim_max: kib << 10 };
    // SAFETY: between fork and exec it calls nothing but `setrlimit`, which is allowed there.
    unsafe {
        process.pre_exec(move || match libc::setrlimit(libc::RLIMIT_AS, &limit) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    };
    process.output().unwrap()
}

/// The least room above `from` in which a process succeeds, nearly: to a fraction of a step.
fn need(from: u64, mut process: impl FnMut() -> Process) -> u64 {
    let (mut less, mut enough) = (from, 8 << 20);
    assert!(within(&mut process(), enough).status.success());
    while enough - less > 128 + (enough - from) / (3 * steps()) {
        let kib = less.midpoint(enough);
        match within(&mut process(), kib).status.success() {
            true => enough = kib,
            false => less = kib,
        }
    }
    enough
}

/// What is compared without room for it has not been compared: out of memory, and no operation that differs.
#[test]
fn verify_without_memory_says_so() {
    let place = Place::new();
    // Where the threads of the jobs find no room, and where the cases do not.
    for jobs in ["2", "4"] {
        let verify = || place.command(&["verify", "--cpu", "--only", "cast", "--jobs", jobs]);
        for kib in (84_000..160_000).step_by(2000) {
            let out = within(&mut verify(), kib);
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            match out.status.code() {
                Some(0) => break,
                Some(1) => assert_memory(&said, kib),
                // The program has not begun.
                _ => assert!(said.contains("shared libraries") || said.is_empty(), "{kib} KiB: {said}"),
            }
        }
    }
}

fn assert_memory(said: &str, kib: u64) {
    assert!(
        said.contains("memory") && !said.contains("internal error") && !said.contains("differ"),
        "{kib} KiB: {said}"
    );
}

/// Checks how a process with too little room has ended.
fn assert_told(out: &Output, what: &str) {
    let said = String::from_utf8_lossy(&out.stderr);
    match out.status.code() {
        Some(0) => assert_eq!(said, "", "{what}"),
        Some(1 | 2) => {
            // The system's library, and Rust's for what it takes past the program's allocator, say a line of their own where they give up,
            // on one thread while another one may tell of an error: after that line, or within it, as it is written in pieces.
            let theirs = ["Fatal glibc error: ", "memory allocation of "];
            let ours = |line| match theirs.iter().find_map(|begin| str::strip_prefix(line, begin)) {
                Some(rest) => rest.find("error: ").map(|at| &rest[at..]),
                None => Some(line),
            };
            let said = said.lines().filter_map(ours).collect::<Vec<_>>().join("\n");
            assert!(said.starts_with("error: ") && said.contains("memory"), "{what}: {said}");
            assert!(!said.contains("internal error") && !said.contains("panicked"), "{what}: {said}");
        }
        other => panic!("{what}: {other:?} {:?}: {said}", out.status),
    }
}

fn starve(place: &Place, command: &Command, floor: u64) {
    let process = || {
        command.clear(place);
        command.process(place)
    };
    let need = need(floor, process);
    let before = {
        command.clear(place);
        every::files(place.path("."))
    };
    assert!(command.process(place).output().unwrap().status.success());
    let whole = command.out.filter(|out| !place.path(out).is_dir()).map(|out| crate::read(place.path(out)));
    for step in 1..=steps() {
        let kib = need - (need - floor) * step / steps();
        let what = format!("{:?} in {kib} KiB of {need}", command.args);
        assert_told(&within(&mut process(), kib), &what);
        if let (Some(whole), Some(out)) = (&whole, command.out)
            && place.path(out).exists()
        {
            assert_eq!(crate::read(place.path(out)).len(), whole.len(), "{what}: {out} is not whole");
        }
        assert!(every::unfinished(place).is_empty(), "{what}: left: {:?}", every::unfinished(place));
        if command.out == Some("out") {
            resume(place, kib, &what);
        }
        command.clear(place);
        assert!(every::files(place.path(".")) == before, "{what}: other files have changed");
    }
}

/// Goes on with the run that had too little room, if it has begun: with as little, and then with enough, to the very same weights.
fn resume(place: &Place, kib: u64, what: &str) {
    let resume = || place.command(&["train", "small.toml", "--resume", "--set", "run.dir=out"]);
    let has_begun = nibble_train::trainer::has_begun(&place.path("out"));
    if has_begun {
        assert_told(&within(&mut resume(), kib), &format!("{what}, resumed"));
    }
    let done = resume().output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(if has_begun { 0 } else { 2 }), "{what}: cannot be resumed: {said}");
    if has_begun {
        let model =
            |run: &str| crate::read(place.path(run).join("checkpoints/step-00000012/model.safetensors"));
        assert!(model("out") == model("run"), "{what}: other weights");
    }
}

/// Each of these commands with less and less room.
fn starve_all(wanted: impl Fn(&Command) -> bool) {
    let place = every::place();
    // Below it the system's loader finds no room for the program.
    let floor = need(4 << 10, || place.command(&["--version"]));
    // Daily about half of them: most of the time goes into finding what each needs.
    let taken = every::ALL.iter().filter(|command| wanted(command)).enumerate();
    let taken = taken.filter(|(nth, _)| Breadth::of_tests().takes(*nth, 2));
    taken.for_each(|(_, command)| starve(&place, command, floor));
}

#[test]
fn refused_memory_is_an_error_and_no_file_is_lost() {
    starve_all(|command| command.out.is_some());
}

#[test]
fn refused_memory_is_an_error_of_what_only_prints_too() {
    starve_all(|command| command.out.is_none());
}

#[test]
fn what_was_being_done_and_how_much_was_asked_for_are_told() {
    let place = every::place();
    // One matrix of 64 MiB, of which the file is a hole.
    let header = br#"{"w":{"dtype":"BF16","shape":[4096,8192],"data_offsets":[0,67108864]}}  "#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    std::fs::write(place.path("big.st"), &file).unwrap();
    let big = std::fs::File::options().write(true).open(place.path("big.st")).unwrap();
    big.set_len(file.len() as u64 + 67_108_864).unwrap();
    let quantize =
        || place.command(&["quantize", "big.st", "out.st", "--format", "mxfp4", "--device", "cpu"]);
    // The system's library would set 64 MiB aside for each thread that comes to it first.
    let alone = |mut process: Process| {
        process.env("NIBBLE_THREADS", "1").env("MALLOC_ARENA_MAX", "1");
        process
    };
    // Beside the program there is room for less than the file, and for the file and less than its values in F32.
    let program = need(4 << 10, || alone(place.command(&["environment"])));
    for (more, part) in [
        (32 << 10, "reading big.st: "),
        (128 << 10, "quantizing `w`: the system refused this process 134217728 bytes"),
    ] {
        let out = within(&mut alone(quantize()), program + more);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(said.starts_with("error: out of memory: ") && said.contains(part), "{said}");
        assert!(!place.path("out.st").exists());
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error() {
    let place = every::place();
    for command in every::ALL.iter().filter(|command| command.out.is_some()) {
        let mut process = command.process(&place);
        let limit = libc::rlimit { rlim_cur: 1 << 10, rlim_max: 1 << 10 };
        // SAFETY: between fork and exec it calls nothing but `setrlimit`, which is allowed there.
        unsafe {
            process.pre_exec(move || match libc::setrlimit(libc::RLIMIT_FSIZE, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            })
        };
        let out = process.output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{:?}: {said}", command.args);
        assert!(said.starts_with("error: ") && said.contains("File too large"), "{:?}: {said}", command.args);
        assert!(every::unfinished(&place).is_empty(), "{:?}", command.args);
        command.clear(&place);
    }
}
