//! `nibble eval --task` and `--perplexity`: what is wrong is told before anything is scored.

use crate::every;
use crate::read;

/// What cannot be predicted is told before anything is scored, and no output replaces what is read.
#[test]
fn what_is_to_be_predicted_is_looked_for_first() {
    let place = every::place();
    let scored = |more: &[&str]| {
        let args = ["eval", "model", "--device", "cpu", "--task", "quiz.jsonl"];
        place.nibble(&[&args, more].concat()).failed(2)
    };
    for stride in ["0", "65"] {
        let error = scored(&["--samples", "out.json", "--perplexity", "text.txt", "--stride", stride]);
        assert!(error.contains(&format!("--stride: got {stride}, expected 1 to 64")), "{error}");
    }
    let error = scored(&["--samples", "out.json", "--perplexity", "missing.txt"]);
    assert!(error.contains("missing.txt") && !place.path("out.json").exists(), "{error}");
    let text = read(place.path("text.txt"));
    scored(&["--samples", "text.txt", "--force", "--perplexity", "text.txt"]);
    assert!(read(place.path("text.txt")) == text);
}
