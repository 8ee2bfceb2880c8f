//! Log-likelihoods of given texts.

use crate::rig;

use nibble_cpu::Cpu;
use nibble_train::config::Config;
use nibble_train::evaluation::{Beginning, Request, Scored, Task};
use nibble_train::metrics::{Metrics, read_metrics};
use nibble_train::tokenizer::{Bytes, Symbols, Tokenizer};
use nibble_train::trainer::{Observer, Options, Start, Trainer, run};
use rig::{FOUR_PARTS, FOUR_RANKS, SOLO, few_held_out, on_mesh, small};
use std::path::Path;

fn requests() -> Vec<Request> {
    let ids = |from: usize, len: usize| (from..from + len).map(|i| (i * i % 61) as i32).collect();
    let one = |i: usize| Request::behind(1 + i % 3, ids(i, 3 + i * 7 % 40));
    (0..25).map(one).collect()
}

/// Packed among others, a request has the log-likelihood that its tokens have one by one, each behind those before it.
#[test]
fn log_likelihoods_are_those_of_the_logits() {
    let cpu = Cpu::new(2).unwrap();
    let mut trainer = Trainer::new(&cpu, &SOLO, &small("f32", &["train.batch_size=4"])).unwrap();
    let requests = requests();
    let mut told = Vec::new();
    let found = trainer.log_likelihoods(&requests, &mut |done, of| told.push((done, of))).unwrap();
    assert!(told.len() > 1 && told.last().is_some_and(|(done, of)| done == of), "{told:?}");
    for (Request { ids, scored }, found) in requests.iter().zip(&found) {
        let mut sum = 0.0;
        for at in scored.iter().flat_map(Clone::clone) {
            let logits = trainer.next_logits(&ids[..at]).unwrap();
            let of = |id: i32| f64::from(logits[id as usize]);
            let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            sum += of(ids[at]) - total.ln();
        }
        assert!((sum - found).abs() < 1e-5 * sum.abs().max(1.0), "{sum} and {found}");
    }
}

/// In another order, beside others and in other sequences: the same bits.
#[test]
fn no_request_depends_on_the_others() {
    let cpu = Cpu::new(2).unwrap();
    let mut trainer = Trainer::new(&cpu, &SOLO, &small("mxfp4-hopper", &["data.seq_len=128"])).unwrap();
    let mut requests = requests();
    let forward = trainer.log_likelihoods(&requests, &mut |_, _| {}).unwrap();
    requests.reverse();
    let mut backward = trainer.log_likelihoods(&requests, &mut |_, _| {}).unwrap();
    backward.reverse();
    let bits = |all: &[f64]| all.iter().map(|nats| nats.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&forward), bits(&backward));
}

/// The perplexity of documents is that of the logits behind as much as there is room for; bytes are those of the text.
#[test]
fn perplexity_is_that_of_the_logits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("two.jsonl");
    let texts = ["one é two, three and four and so on", "x"];
    let rows: String = texts.iter().map(|text| format!("{{\"text\": \"{text}\"}}\n")).collect();
    std::fs::write(&path, rows).unwrap();
    let cpu = Cpu::new(2).unwrap();
    let book = dir.path().join("book.txt");
    std::fs::write(&book, "what the run itself reads. ".repeat(20)).unwrap();
    let source = format!("data.source={}", book.display());
    let config = small("f32", &["data.seq_len=16", "model.vocab_size=256", &source]);
    let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
    let (stride, seq_len) = (5, 16);
    let beginning = || Beginning::of_run(&config).unwrap();
    let (found, _) = trainer.perplexity(path.to_str().unwrap(), (beginning(), stride), &mut ()).unwrap();
    let mut nats = 0.0;
    for text in texts {
        let ids = [Bytes.opening().unwrap(), Bytes.encode(text).unwrap()].concat();
        for at in 1..ids.len() {
            // The end of the window that predicts it.
            let end = match at <= seq_len {
                true => seq_len,
                false => seq_len + (at - seq_len).next_multiple_of(stride),
            };
            let first = end.min(ids.len() - 1).saturating_sub(seq_len);
            let logits = trainer.next_logits(&ids[first..at]).unwrap();
            let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            nats += total.ln() - f64::from(logits[ids[at] as usize]);
        }
    }
    let bytes = texts.iter().map(|text| text.len() as u64).sum::<u64>();
    assert_eq!((found.documents, found.tokens, found.bytes), (2, bytes, bytes));
    assert!((found.nats - nats).abs() < 1e-5 * nats, "{} and {nats}", found.nats);
    assert!((found.by_byte().unwrap().log2() - found.bits_per_byte().unwrap()).abs() < 1e-12);
    std::fs::write(&path, "{\"text\": \"\"}\n").unwrap();
    let error =
        trainer.perplexity(path.to_str().unwrap(), (beginning(), stride), &mut ()).unwrap_err().to_string();
    assert!(error.contains("two.jsonl") && error.contains("no token"), "{error}");
}

/// Documents of token ids end where the token is that ends texts; whose ids they are has to be known.
#[test]
fn documents_of_ids_are_predicted_apart() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokenizers/llama3");
    let end = nibble_train::tokenizer::open(Path::new(tokenizer)).unwrap().token_id("<|endoftext|>").unwrap();
    let book = dir.path().join("ids.bin");
    let ids = [300, 301, 302, end, 400, 401, end];
    let bytes = |ids: &[i32]| ids.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect::<Vec<u8>>();
    std::fs::write(&book, bytes(&ids.repeat(40))).unwrap();
    let [source, caches] = ["data.source", "data.cache_dir"].map(|key| {
        let at = if key == "data.source" { book.clone() } else { dir.path().join("caches") };
        format!("{key}={}", at.display())
    });
    let named = format!("data.tokenizer={tokenizer}");
    let cpu = Cpu::new(2).unwrap();
    let of = |more: &[&str]| {
        let sets = ["data.seq_len=16", "data.valid_fraction=0.2", "model.vocab_size=1003", &source, &caches];
        let config = small("bf16", &[&sets, more].concat());
        let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
        let beginning = Beginning::of_run(&config).unwrap();
        trainer.perplexity(book.to_str().unwrap(), (beginning, 16), &mut ())
    };
    let (found, _) = of(&[&named, "data.eos_token=<|endoftext|>"]).unwrap();
    assert_eq!((found.documents, found.tokens), (80, 280));
    // Of ids whose tokenizer is not named nobody knows the text: a token has a perplexity, and a byte none.
    let (found, _) = of(&["data.eos_token=1000"]).unwrap();
    assert_eq!((found.bytes, found.by_byte(), found.bits_per_byte()), (0, None, None));
    assert!(found.by_token().is_finite());
}

#[test]
fn texts_are_encoded_as_one_and_parted_behind_the_context() {
    let of_bytes = Beginning::of_run(&Config::default()).unwrap();
    let Request { ids, scored } = of_bytes.request(&Bytes, "one two  ", " three").unwrap();
    assert_eq!((Bytes.decode(&ids).as_str(), scored[0].clone()), ("one two   three", 7..15));
    // A text without a beginning has one.
    let of_symbols = Beginning::of_run(&small("f32", &["data.source=synthetic"])).unwrap();
    let Request { ids, scored } = of_symbols.request(&Symbols, "", "Aab").unwrap();
    assert_eq!((Symbols.decode(&ids).as_str(), scored[0].clone()), ("(Aab", 1..4));
}

#[test]
fn a_task_is_read_and_its_broken_lines_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("quiz.jsonl");
    let good = r#"{"question": "1 and 1?", "choices": ["2", "three"], "answer": 0}"#;
    std::fs::write(&path, format!("{good}\n\n{good}\n")).unwrap();
    let task = Task::open(&path).unwrap();
    assert_eq!((task.name.as_str(), task.questions.len()), ("quiz", 2));
    let texts: Vec<String> = task
        .requests(&Bytes, &Beginning::of_run(&Config::default()).unwrap())
        .unwrap()
        .iter()
        .map(|one| Bytes.decode(&one.ids))
        .collect();
    assert_eq!(texts, ["1 and 1? 2", "1 and 1? three", "1 and 1? 2", "1 and 1? three"]);
    std::fs::write(&path, format!("{good}\n{{}}\n")).unwrap();
    let error = Task::open(&path).unwrap_err().to_string();
    assert!(error.contains("quiz.jsonl") && error.contains("line 2: has no \"question\""), "{error}");
    std::fs::write(&path, "\n").unwrap();
    assert!(Task::open(&path).unwrap_err().to_string().contains("has no questions"));
}

/// Notes what tasks have come to.
#[derive(Default)]
struct Told(Vec<(u64, String, Scored)>);

impl Observer for Told {
    fn start(&mut self, _: &Start<'_>) {}
    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, _: &Metrics) {}
    fn evaluation(&mut self, _: u64, _: Option<f64>) {}
    fn task(&mut self, step: u64, name: &str, scored: &Scored) {
        self.0.push((step, name.to_owned(), *scored));
    }
    fn checkpoint(&mut self, _: &Path) {}
}

/// A run scores its tasks whenever it evaluates, on any mesh alike, and the scores are in its metrics; they change no weight.
#[test]
fn a_run_scores_its_tasks() {
    let dir = tempfile::tempdir().unwrap();
    let quiz = dir.path().join("quiz.jsonl");
    let row = |i: usize| {
        format!(
            "{{\"question\": \"{i} and\", \"choices\": [\"one\", \"{i}\", \"three\"], \"answer\": {}}}\n",
            i % 3
        )
    };
    std::fs::write(&quiz, (0..40).map(row).collect::<String>()).unwrap();
    let [source, held_out] = few_held_out(dir.path());
    let tasks = format!("eval.tasks=[{:?}]", quiz.display().to_string());
    let mut first = None;
    let mut of = |mesh, tasks: &[&str]| {
        let run_dir = dir.path().join("run");
        let at = format!("run.dir={}", run_dir.display());
        let changes =
            [FOUR_PARTS, "train.steps=3", "train.warmup_steps=1", "eval.every=2", &*source, &*held_out, &*at];
        let config = small("bf16", &[&changes, tasks].concat());
        let options = Options { digest: true, ..Options::default() };
        let ranks = on_mesh(mesh, |mesh| {
            let mut told = Told::default();
            (run(&Cpu::new(1).unwrap(), mesh, &config, options, &mut told).unwrap(), told.0)
        });
        let metrics = read_metrics(&run_dir.join("metrics.jsonl")).unwrap().metrics;
        std::fs::remove_dir_all(&run_dir).unwrap();
        assert!(ranks[1..].iter().all(|(_, told)| told.is_empty()));
        let (outcome, told) = ranks.into_iter().next().unwrap();
        let digest = outcome.summary.unwrap().digest.unwrap();
        assert_eq!(first.get_or_insert_with(|| digest.clone()), &digest, "mesh {mesh}");
        let lines = metrics.into_iter().filter(|line| line.valid_loss.is_some());
        (told, lines.map(|line| (line.step, line.other)).collect::<Vec<_>>())
    };
    let (told, lines) = of(FOUR_RANKS[0], &[]);
    assert!(told.is_empty() && lines.iter().all(|(_, other)| other.is_empty()));
    let (told, lines) = of(FOUR_RANKS[0], &[&tasks]);
    assert_eq!(
        told.iter().map(|(step, name, _)| (*step, name.as_str())).collect::<Vec<_>>(),
        [(2, "quiz"), (3, "quiz")]
    );
    for ((step, _, scored), (at, other)) in told.iter().zip(&lines) {
        assert_eq!(step, at);
        let wanted = scored.named().map(|(score, of)| (format!("eval/quiz/{score}"), of.share));
        assert_eq!(*other, wanted.into());
    }
    for mesh in &FOUR_RANKS[1..] {
        assert_eq!(of(*mesh, &[&tasks]), (told.clone(), lines.clone()), "mesh {mesh}");
    }
    std::fs::write(&quiz, "{}\n").unwrap();
    let config = small("bf16", &[&*source, &*held_out, &tasks]);
    let error =
        run(&Cpu::new(1).unwrap(), &SOLO, &config, Options::default(), &mut Told::default()).unwrap_err();
    assert!(error.to_string().contains("quiz.jsonl: line 1"), "{error}");
}

/// A loss of a part of the held-out data is of the same sequences, and so the same to the last bit, whatever the batch size; so is that of all of it.
#[test]
fn held_out_losses_do_not_depend_on_the_batch_size() {
    let dir = tempfile::tempdir().unwrap();
    let [source, held_out] = few_held_out(dir.path());
    let of = |size: usize, batches: usize| {
        let size = format!("train.batch_size={size}");
        // 126 held-out sequences.
        let config = small("f32", &[&source, &held_out, "data.seq_len=16", "train.shards=1", &size]);
        Trainer::new(&Cpu::new(2).unwrap(), &SOLO, &config).unwrap().evaluate(batches).unwrap()
    };
    let mut losses = Vec::new();
    for batches in [1, 3, 0] {
        let loss = of(16, batches);
        for size in [1, 5, 8, 64] {
            let other = of(size, batches);
            assert_eq!(
                other.to_bits(),
                loss.to_bits(),
                "{batches} batches, {size} at once: {other} and {loss}"
            );
        }
        losses.push(loss);
    }
    assert!(losses[0] != losses[1] && losses[1] != losses[2], "{losses:?}");
}
