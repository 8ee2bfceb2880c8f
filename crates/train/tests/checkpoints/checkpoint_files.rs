//! Checkpoints on the disk: what is written comes back, and nothing damaged or half-written ever does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use nibble_train::Error;
use nibble_train::checkpoint::{Checkpoint, FILES, Outline, Position, Store, TensorSpec, latest_valid};
use nibble_train::config::Config;
use nibble_train::tokenizer::{Bytes, Tokenizer};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn position(step: u64) -> Result<Position, Error> {
    let config = Config::load("tiny", &[])?;
    Ok(Position {
        step,
        passed_over: 0,
        tokens: step * config.tokens_per_step(),
        seed: u64::MAX - 5,
        cursor: step * config.sequences_per_step(),
        schedule: config.schedule(),
        recipe_toml: "activations = \"bf16\"".into(),
        data_sha256: "1".repeat(64),
        recipe: config.recipe.clone(),
        config: config.resolved_toml()?,
    })
}

fn weights(step: u64) -> Vec<f32> {
    (0..24).map(|i| (i as f32 + step as f32).sin()).collect()
}

/// A tensor's description and its values.
type Described<'a> = (TensorSpec, &'a [f32]);

fn tensor<'a>(name: &str, shape: &[usize], data: &'a [f32]) -> Described<'a> {
    (TensorSpec::f32(name, shape), data)
}

/// Writes a checkpoint of these tensors, each in one piece.
fn save_all(
    store: &Store,
    tensors: [&[Described<'_>]; 2],
    position: Position,
    keep: usize,
) -> Result<PathBuf, Error> {
    save_in_files(store, tensors, position, keep, 0)
}

/// The same in files of so many bytes of values.
fn save_in_files(
    store: &Store,
    [model, optim]: [&[Described<'_>]; 2],
    position: Position,
    keep: usize,
    file_bytes: usize,
) -> Result<PathBuf, Error> {
    let specs = |tensors: &[Described<'_>]| tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let outline = Outline {
        model: specs(model),
        optim: specs(optim),
        scales: Vec::new(),
        file_bytes,
        config_json: "{\"model_type\": \"qwen3_moe\"}".into(),
        tokenizer: Bytes.files(),
        position,
    };
    let mut values = model.iter().chain(optim).map(|(_, data)| *data);
    store.save(&outline, &mut || Ok(values.next().unwrap_or_default()), keep)
}

fn save(store: &Store, step: u64, keep: usize) -> Result<PathBuf, Error> {
    let (a, b) = (weights(step), [f32::NAN, -0.0, f32::MIN_POSITIVE / 2.0]);
    let model = [tensor("model.a", &[2, 3, 4], &a), tensor("model.b", &[3], &b)];
    let optim = [tensor("model.a.exp_avg", &[24], &a), tensor("model.a.exp_avg_sq", &[24], &a)];
    save_all(store, [&model, &optim], position(step)?, keep)
}

fn steps(run: &Path) -> std::io::Result<Vec<String>> {
    let mut names: Vec<String> = fs::read_dir(run.join("checkpoints"))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<std::io::Result<_>>()?;
    names.retain(|name| name != ".lock");
    names.sort();
    Ok(names)
}

#[test]
fn what_is_written_comes_back_to_the_last_bit() -> Outcome {
    let run = tempfile::tempdir()?;
    let path = save(&Store::open(run.path())?, 1000, 0)?;
    assert_eq!(path, run.path().join("checkpoints/step-00001000"));
    let mut names: Vec<String> =
        fs::read_dir(&path)?.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let mut expected = FILES;
    expected.sort_unstable();
    assert_eq!(names, expected);

    let latest = latest_valid(run.path())?;
    assert!(latest.rejected.is_empty());
    let checkpoint = latest.checkpoint.ok_or("no checkpoint found")?;
    assert_eq!(checkpoint.position(), &position(1000)?);
    let config = Config::from_text(&checkpoint.position().config, Path::new("state.json"), &[])?;
    assert_eq!(config, Config::load("tiny", &[])?);
    let mut model = checkpoint.model()?;
    assert_eq!(
        model.shapes().map(|(n, s)| (n.to_owned(), s.to_vec())).collect::<Vec<_>>(),
        [("model.a".to_owned(), vec![2, 3, 4]), ("model.b".to_owned(), vec![3])]
    );
    assert_eq!(model.take("model.a", &[2, 3, 4])?, weights(1000));
    let bits: Vec<u32> = model.take("model.b", &[3])?.iter().map(|x| x.to_bits()).collect();
    assert_eq!(bits, [f32::NAN, -0.0, f32::MIN_POSITIVE / 2.0].map(f32::to_bits));
    model.finish()?;
    assert_eq!(checkpoint.file("config.json")?, b"{\"model_type\": \"qwen3_moe\"}");
    Ok(())
}

/// A large model lies in several files, which an index names; what is read does not depend on that, and damage to any is told.
#[test]
fn tensors_in_several_files_come_back_the_same() -> Outcome {
    let (run, a) = (tempfile::tempdir()?, weights(3));
    let names: Vec<String> = (0..5).map(|i| format!("model.{i}")).collect();
    let model: Vec<Described<'_>> = names.iter().map(|name| tensor(name, &[6, 4], &a)).collect();
    let optim = [tensor("model.0.exp_avg", &[24], &a)];
    let path = save_in_files(&Store::open(run.path())?, [&model, &optim], position(3)?, 0, 2 * 24 * 4)?;
    let file = |i: usize| format!("model-{i:05}-of-00003.safetensors");
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(path.join("model.safetensors.index.json"))?)?;
    assert_eq!(index["metadata"]["total_size"], 5 * 24 * 4);
    for (i, name) in names.iter().enumerate() {
        assert_eq!(index["weight_map"][name], file(i / 2 + 1));
    }
    for i in 1..=3 {
        let bytes = fs::read(path.join(file(i)))?;
        let there = safetensors::SafeTensors::deserialize(&bytes)?;
        assert_eq!(there.len(), if i == 3 { 1 } else { 2 });
    }
    assert!(path.join("optim.safetensors").exists() && !path.join("optim.safetensors.index.json").exists());
    let checkpoint = latest_valid(run.path())?.checkpoint.ok_or("no checkpoint found")?;
    let mut tensors = checkpoint.model()?;
    for name in &names {
        assert_eq!(tensors.take(name, &[6, 4])?, a);
    }
    tensors.finish()?;
    fs::remove_file(path.join(file(2)))?;
    let latest = latest_valid(run.path())?;
    assert!(latest.checkpoint.is_none() && latest.rejected[0].why.to_string().contains(&file(2)));
    Ok(())
}

/// One that was written before `transformers` was told of the tokenizer: `state.json` does not list the file.
#[test]
fn a_checkpoint_without_tokenizer_config_is_whole() -> Outcome {
    let run = tempfile::tempdir()?;
    let path = save(&Store::open(run.path())?, 5, 0)?;
    fs::remove_file(path.join("tokenizer_config.json"))?;
    assert!(latest_valid(run.path())?.checkpoint.is_none(), "it is listed and missing");

    let mut state: serde_json::Value = serde_json::from_slice(&fs::read(path.join("state.json"))?)?;
    let files = state["files"].as_array_mut().ok_or("no files")?;
    files.retain(|file| file["name"] != "tokenizer_config.json");
    assert_eq!(files.len(), FILES.len() - 2);
    let (old, blank) = (state["sha256"].as_str().ok_or("no checksum")?.to_owned(), "0".repeat(64));
    let text = format!("{state:#}\n").replace(&old, &blank);
    let sum: String = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(path.join("state.json"), text.replace(&blank, &sum))?;
    let checkpoint = latest_valid(run.path())?.checkpoint.ok_or("no checkpoint found")?;
    assert_eq!(checkpoint.position(), &position(5)?);
    assert_eq!(checkpoint.model()?.take("model.a", &[2, 3, 4])?, weights(5));
    Ok(())
}

#[test]
fn equal_contents_give_equal_files() -> Outcome {
    let (one, two) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let (a, b) = (save(&Store::open(one.path())?, 7, 0)?, save(&Store::open(two.path())?, 7, 0)?);
    for name in FILES {
        assert_eq!(fs::read(a.join(name))?, fs::read(b.join(name))?, "{name}");
    }
    Ok(())
}

#[test]
fn a_model_that_does_not_fit_is_told_tensor_and_shapes() -> Outcome {
    let run = tempfile::tempdir()?;
    let checkpoint = Checkpoint::open(&save(&Store::open(run.path())?, 1, 0)?)?;
    let mut model = checkpoint.model()?;
    let message = |result: Result<Vec<f32>, Error>| result.err().map(|e| e.to_string()).unwrap_or_default();
    let wrong = message(model.take("model.a", &[4, 6]));
    assert!(wrong.contains("`model.a` has shape [2, 3, 4], expected [4, 6]"), "{wrong}");
    assert!(wrong.contains("model.safetensors"), "{wrong}");
    let missing = message(model.take("model.c", &[1]));
    assert!(missing.contains("has no tensor `model.c`"), "{missing}");
    model.take("model.a", &[2, 3, 4])?;
    let left = model.finish().err().map(|e| e.to_string()).unwrap_or_default();
    assert!(left.contains("1 tensors that the model lacks, such as `model.b`"), "{left}");
    Ok(())
}

#[test]
fn tensors_that_contradict_themselves_are_refused_and_leave_nothing() -> Outcome {
    let run = tempfile::tempdir()?;
    let store = Store::open(run.path())?;
    let data = [1.0; 6];
    for (model, expected) in [
        (vec![tensor("w", &[2, 4], &data)], "was given 0 values where 2 are missing"),
        (vec![tensor("w", &[5], &data)], "was given 6 values where 5 are missing"),
        (vec![tensor("w", &[6], &data), tensor("w", &[2, 3], &data)], "two tensors are called `w`"),
        (vec![tensor("w", &[6], &data), tensor("v", &[6], &data)], "tensor `w` comes before `v`"),
    ] {
        let saved = save_all(&store, [&model, &[]], position(1)?, 0);
        let error = saved.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(expected), "{error}");
        assert_eq!(steps(run.path())?, [""; 0]);
    }
    Ok(())
}

#[test]
fn no_truncation_and_no_changed_byte_is_ever_loaded() -> Outcome {
    let run = tempfile::tempdir()?;
    let store = Store::open(run.path())?;
    save(&store, 10, 0)?;
    let newest = save(&store, 20, 0)?;
    let mut tried = 0;
    for name in FILES {
        let path = newest.join(name);
        let whole = fs::read(&path)?;
        let n = whole.len();
        let mut damaged: Vec<Vec<u8>> =
            [0, 1, n / 3, n / 2, n - 2, n - 1].iter().map(|&cut| whole[..cut].to_vec()).collect();
        damaged.push([whole.as_slice(), b"\n"].concat());
        // Every byte of the file that vouches for the others, a sample of the rest.
        let stride = if name == "state.json" { 1 } else { (n / 40).max(1) };
        for at in (0..n).step_by(stride).chain([n - 1]) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            damaged.push(bytes);
        }
        for bytes in damaged {
            fs::write(&path, &bytes)?;
            let latest = latest_valid(run.path())?;
            let found = latest.checkpoint.ok_or("the older checkpoint is whole")?;
            assert_eq!(found.position().step, 10, "damaged {name} was loaded");
            assert_eq!(latest.rejected.len(), 1);
            assert_eq!(latest.rejected[0].path, newest);
            let why = latest.rejected[0].why.to_string();
            assert!(why.contains(name), "{why} does not name {name}");
            tried += 1;
        }
        fs::remove_file(&path)?;
        let rejected = latest_valid(run.path())?.rejected;
        assert!(rejected[0].why.to_string().contains(name), "{:?}", rejected[0]);
        fs::write(&path, &whole)?;
        let whole_again = latest_valid(run.path())?.checkpoint.map(|c| c.position().step);
        assert_eq!(whole_again, Some(20));
    }
    assert!(tried > 1000, "only {tried} damages tried");
    Ok(())
}

#[test]
fn damage_after_opening_is_noticed_when_the_tensors_are_read() -> Outcome {
    let run = tempfile::tempdir()?;
    let path = save(&Store::open(run.path())?, 1, 0)?;
    let checkpoint = Checkpoint::open(&path)?;
    let file = path.join("model.safetensors");
    let mut bytes = fs::read(&file)?;
    let last = bytes.len() - 1;
    bytes[last] ^= 0x80;
    fs::write(&file, bytes)?;
    let mut model = checkpoint.model()?;
    model.take("model.a", &[2, 3, 4])?;
    model.take("model.b", &[3])?;
    let altered = model.finish().err().map(|e| e.to_string()).unwrap_or_default();
    assert!(altered.contains("is altered"), "{altered}");
    assert!(matches!(checkpoint.file("model.safetensors"), Err(Error::Checkpoint { .. })));
    Ok(())
}

#[test]
fn what_is_removed_after_opening_is_read_all_the_same() -> Outcome {
    let run = tempfile::tempdir()?;
    let checkpoint = Checkpoint::open(&save(&Store::open(run.path())?, 1, 0)?)?;
    fs::remove_dir_all(run.path().join("checkpoints"))?;
    // As often as one likes.
    for _ in 0..2 {
        let mut model = checkpoint.model()?;
        assert_eq!(model.take("model.a", &[2, 3, 4])?, weights(1));
        model.take("model.b", &[3])?;
        model.finish()?;
        assert_eq!(checkpoint.file("config.json")?, b"{\"model_type\": \"qwen3_moe\"}");
    }
    Ok(())
}

#[test]
fn a_checkpoint_under_another_steps_name_is_not_taken_for_it() -> Outcome {
    let run = tempfile::tempdir()?;
    let path = save(&Store::open(run.path())?, 10, 0)?;
    fs::rename(&path, path.with_file_name("step-00000099"))?;
    let latest = latest_valid(run.path())?;
    assert!(latest.checkpoint.is_none());
    assert!(latest.rejected[0].why.to_string().contains("step 99 and holds step 10"));
    Ok(())
}

#[test]
fn only_the_newest_stay() -> Outcome {
    let run = tempfile::tempdir()?;
    let store = Store::open(run.path())?;
    for step in [5, 10, 15, 100] {
        save(&store, step, 2)?;
    }
    assert_eq!(steps(run.path())?, ["step-00000015", "step-00000100"]);
    save(&store, 200, 0)?;
    assert_eq!(steps(run.path())?.len(), 3);
    Ok(())
}

#[test]
fn leftovers_of_a_killed_writer_are_never_read_and_removed_by_the_next() -> Outcome {
    let run = tempfile::tempdir()?;
    let store = Store::open(run.path())?;
    let good = save(&store, 10, 0)?;
    let dir = run.path().join("checkpoints");
    // Killed before the rename, killed while writing, killed while pruning.
    for (name, files) in [(".tmp-step-00000020", 5), (".tmp-step-00000030", 2), (".tmp-pruned", 1)] {
        fs::create_dir(dir.join(name))?;
        for file in FILES.iter().take(files) {
            fs::copy(good.join(file), dir.join(name).join(file))?;
        }
    }
    let found = latest_valid(run.path())?;
    assert_eq!(found.checkpoint.map(|c| c.position().step), Some(10));
    assert!(found.rejected.is_empty());
    drop(store);
    let store = Store::open(run.path())?;
    assert_eq!(steps(run.path())?, ["step-00000010"]);
    // A leftover of the very step that is saved next is no obstacle.
    fs::create_dir(dir.join(".tmp-step-00000020"))?;
    fs::write(dir.join(".tmp-step-00000020/model.safetensors"), "half")?;
    save(&store, 20, 0)?;
    assert_eq!(steps(run.path())?, ["step-00000010", "step-00000020"]);
    Ok(())
}

#[test]
fn a_checkpoint_moved_aside_by_a_killed_writer_comes_back() -> Outcome {
    let run = tempfile::tempdir()?;
    let path = save(&Store::open(run.path())?, 10, 0)?;
    let aside = path.with_file_name(".tmp-replaced-step-00000010");
    fs::rename(&path, &aside)?;
    let store = Store::open(run.path())?;
    assert_eq!(latest_valid(run.path())?.checkpoint.map(|c| c.position().step), Some(10));
    // Saving the same step again replaces it and leaves nothing aside.
    fs::write(path.join("config.json"), "damaged")?;
    save(&store, 10, 0)?;
    assert_eq!(latest_valid(run.path())?.checkpoint.map(|c| c.position().step), Some(10));
    assert_eq!(steps(run.path())?, ["step-00000010"]);
    Ok(())
}

#[test]
fn two_writers_in_one_run_are_refused() -> Outcome {
    let run = tempfile::tempdir()?;
    let first = Store::open(run.path())?;
    let second = Store::open(run.path()).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(second.contains("another process is writing"), "{second}");
    drop(first);
    Store::open(run.path())?;
    Ok(())
}

#[test]
fn a_run_without_checkpoints_has_none() -> Outcome {
    let run = tempfile::tempdir()?;
    assert!(latest_valid(run.path())?.checkpoint.is_none());
    assert!(latest_valid(&run.path().join("nowhere"))?.checkpoint.is_none());
    let error = Checkpoint::open(&run.path().join("step-00000001"));
    assert!(matches!(error, Err(Error::Checkpoint { .. })), "{error:?}");
    Ok(())
}

/// Set in the processes that the tests below start: the run directory to write checkpoints into, one after the other.
const CHILD_RUN: &str = "CHECKPOINT_TEST_RUN";
/// The fault that such a process meets.
#[cfg(debug_assertions)]
const CHILD_FAULT: &str = "CHECKPOINT_TEST_FAULT";

/// Not a test of its own: what the started processes do.
#[test]
fn child_that_saves_until_it_is_stopped() -> Outcome {
    let Some(run) = std::env::var_os(CHILD_RUN) else { return Ok(()) };
    #[cfg(debug_assertions)]
    if let Ok(fault) = std::env::var(CHILD_FAULT) {
        nibble_train::fault::arm(&[fault.parse()?]);
    }
    let store = Store::open(Path::new(&run))?;
    let first = latest_valid(Path::new(&run))?.checkpoint.map_or(0, |c| c.position().step) + 1;
    for step in first.. {
        save(&store, step, 2)?;
        println!("saved {step}");
    }
    Ok(())
}

const CHILD_ARGS: [&str; 3] =
    ["--exact", "checkpoints::checkpoint_files::child_that_saves_until_it_is_stopped", "--nocapture"];

#[cfg(debug_assertions)]
#[test]
fn a_writer_killed_at_any_point_loses_nothing_that_it_had_saved() -> Outcome {
    use nibble_train::fault::Point;
    let run = tempfile::tempdir()?;
    let points = [
        (Point::CheckpointBegins, false),
        (Point::FileBegun, false),
        (Point::FileWritten, false),
        (Point::ManifestWritten, false),
        (Point::BeforeRename, false),
        (Point::Renamed, true),
        (Point::Pruned, true),
        (Point::CheckpointEnds, true),
    ];
    let mut done = 0;
    for (point, in_place) in points {
        let child = Command::new(std::env::current_exe()?)
            .args(CHILD_ARGS)
            .env(CHILD_RUN, run.path())
            .env(CHILD_FAULT, format!("kill@{}:3", point.name()))
            .stderr(Stdio::null())
            .output()?;
        let said = String::from_utf8(child.stdout)?;
        let saved = said.lines().filter_map(|line| line.rsplit_once("saved ")?.1.parse().ok()).max();
        done = saved.unwrap_or(done);
        let latest = latest_valid(run.path())?;
        assert!(latest.rejected.is_empty(), "half a checkpoint under a final name: {:?}", latest.rejected);
        let found = latest.checkpoint.map_or(0, |c| c.position().step);
        // It does not come to say so of the one that it was writing.
        assert_eq!(found, done + u64::from(in_place), "{point:?}");
        done = found;
    }
    Ok(())
}

/// A limit on the size of files stands for a full disk: the system refuses the write half-way.
#[cfg(unix)]
#[test]
fn a_write_that_fails_half_way_is_an_error_and_leaves_the_earlier_checkpoint() -> Outcome {
    let run = tempfile::tempdir()?;
    save(&Store::open(run.path())?, 1, 0)?;
    let exe = std::env::current_exe()?;
    let script = format!("trap '' XFSZ; ulimit -f 2; exec {} {}", exe.display(), CHILD_ARGS.join(" "));
    let output = Command::new("sh").args(["-c", &script]).env(CHILD_RUN, run.path()).output()?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && !said.contains("saved"), "the limit had no effect: {said}");
    assert!(said.contains("tokenizer.json") && said.contains("kind: FileTooLarge"), "{said}");
    assert_eq!(steps(run.path())?, ["step-00000001"]);
    assert_eq!(latest_valid(run.path())?.checkpoint.map(|c| c.position().step), Some(1));
    Ok(())
}

#[test]
fn a_run_that_went_back_keeps_what_it_saves() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let store = Store::open(dir.path())?;
    save(&store, 9, 1)?;
    // Step 9 turned out damaged, say, and the run went on from nothing.
    for step in [2, 4] {
        save(&store, step, 1)?;
    }
    assert_eq!(steps(dir.path())?, ["step-00000004", "step-00000009"]);
    Ok(())
}
