//! SIGKILL at twenty moments of a run: each resumed run ends with exactly the weights of an undisturbed one.

use crate::{Place, losses, read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MODEL: &str = "checkpoints/step-00000060/model.safetensors";
const MOMENTS: u32 = 20;

/// A run that writes a checkpoint every other step, so that many kills fall into the writing of one.
fn train(place: &Place, dir: &str, more: &[&str]) -> Command {
    let dir = format!("run.dir={dir}");
    let args =
        ["train", "small.toml", "--set", "train.steps=60", "--set", "checkpoint.every=2", "--set", &dir];
    let mut command = place.command(&[&args, more].concat());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

#[test]
fn a_kill_costs_no_bit() {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    let start = Instant::now();
    assert!(train(&place, "whole", &[]).status().unwrap().success());
    let duration = start.elapsed();
    let (model, metrics) = (read(place.path("whole").join(MODEL)), losses(place.path("whole/metrics.jsonl")));
    assert_eq!(metrics.len(), 60);
    let (mut killed, mut jitter) = (0, 12345u32);
    for moment in 0..MOMENTS {
        let dir = format!("run-{moment}");
        jitter = jitter.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // One moment in each twentieth of the run, at random within it.
        let share = (f64::from(moment) + f64::from(jitter) / 2f64.powi(32)) / f64::from(MOMENTS);
        let mut run = train(&place, &dir, &[]).spawn().unwrap();
        std::thread::sleep(Duration::from_secs_f64(share * duration.as_secs_f64()));
        run.kill().unwrap(); // SIGKILL
        killed += u32::from(!run.wait().unwrap().success());
        // Killed before it had begun, there is nothing to resume.
        let resume: &[&str] =
            if nibble_train::trainer::has_begun(&place.path(&dir)) { &["--resume"] } else { &[] };
        assert!(
            train(&place, &dir, resume).status().unwrap().success(),
            "moment {moment}: cannot be resumed"
        );
        assert!(read(place.path(&dir).join(MODEL)) == model, "moment {moment}: other weights");
        assert_eq!(losses(place.path(&dir).join("metrics.jsonl")), metrics, "moment {moment}: other metrics");
        let left = std::fs::read_dir(place.path(&dir).join("checkpoints")).unwrap();
        let left: Vec<_> = left.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        assert!(left.iter().all(|name| !name.starts_with(".tmp")), "moment {moment}: {left:?}");
    }
    assert!(killed >= MOMENTS / 2, "only {killed} runs were still running when they were killed");
}
