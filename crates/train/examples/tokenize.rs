//! How fast a tokenizer encodes the lines of a text, each a document, on all cores; or which ids it gives.
//!
//! ```sh
//! cargo run --release -p nibble-train --example tokenize -- TOKENIZER TEXT
//! cargo run --release -p nibble-train --example tokenize -- TOKENIZER TEXTS --ids
//! ```
//!
//! The first encodes the text once for each line on its standard input, and prints tokens, bytes and seconds: so that another program can take
//! turns with it, as `benchmarks/peers/tokenizers_speed.py` does. The second prints the ids of each line of TEXTS, a JSON text, for
//! `tests/tokenizers/code_points.py`.

use nibble_train::tokenizer;
use rayon::prelude::*;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(path), Some(text)) = (args.next(), args.next()) else {
        return Err("usage: tokenize TOKENIZER TEXT [--ids]".into());
    };
    let tokenizer = tokenizer::open(Path::new(&path))?;
    let text = std::fs::read_to_string(text)?;
    if args.next().as_deref() == Some("--ids") {
        for line in text.lines() {
            let ids = tokenizer.encode(&serde_json::from_str::<String>(line)?)?;
            println!("{}", serde_json::to_string(&ids)?);
        }
        return Ok(());
    }
    let documents: Vec<&str> = text.split('\n').filter(|line| !line.is_empty()).collect();
    let bytes: usize = documents.iter().map(|document| document.len()).sum();
    for _ in std::io::stdin().lines() {
        let start = Instant::now();
        let ids = documents.par_iter().map(|document| tokenizer.encode(document));
        let ids: Vec<Vec<i32>> = ids.collect::<Result<_, _>>()?;
        let seconds = start.elapsed().as_secs_f64();
        let tokens: usize = ids.iter().map(Vec::len).sum();
        println!("{tokens} {bytes} {seconds}");
        std::io::stdout().flush()?;
    }
    Ok(())
}
