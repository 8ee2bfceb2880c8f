//! Log-likelihoods of given texts.

mod rig;

use nibble_cpu::Cpu;
use nibble_train::evaluation::{Request, Task, request};
use nibble_train::tokenizer::{Bytes, Symbols, Tokenizer};
use nibble_train::trainer::Trainer;
use rig::{SOLO, small};

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
    let (found, _) = trainer.perplexity(path.to_str().unwrap(), stride, &mut ()).unwrap();
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
    assert!((found.by_byte().log2() - found.bits_per_byte()).abs() < 1e-12);
    std::fs::write(&path, "{\"text\": \"\"}\n").unwrap();
    let error = trainer.perplexity(path.to_str().unwrap(), stride, &mut ()).unwrap_err().to_string();
    assert!(error.contains("two.jsonl") && error.contains("no token"), "{error}");
}

#[test]
fn texts_are_encoded_as_one_and_parted_behind_the_context() {
    let Request { ids, scored } = request(&Bytes, "one two  ", " three").unwrap();
    assert_eq!((Bytes.decode(&ids).as_str(), scored[0].clone()), ("one two   three", 7..15));
    // A text without a beginning has one.
    let Request { ids, scored } = request(&Symbols, "", "Aab").unwrap();
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
    let texts: Vec<String> =
        task.requests(&Bytes).unwrap().iter().map(|one| Bytes.decode(&one.ids)).collect();
    assert_eq!(texts, ["1 and 1? 2", "1 and 1? three", "1 and 1? 2", "1 and 1? three"]);
    std::fs::write(&path, format!("{good}\n{{}}\n")).unwrap();
    let error = Task::open(&path).unwrap_err().to_string();
    assert!(error.contains("quiz.jsonl") && error.contains("line 2: has no \"question\""), "{error}");
    std::fs::write(&path, "\n").unwrap();
    assert!(Task::open(&path).unwrap_err().to_string().contains("has no questions"));
}
