//! Tests with damaged files of every kind. The result is an error or other tokens, but never a panic, and never fewer documents without an
//! error.

use nibble_formats::philox::{Purpose, Stream, fnv1a32};

use super::kinds::KINDS;
use super::{documents, open, put};

#[test]
fn a_damaged_file_never_panics_and_loses_nothing_silently() {
    let docs = documents(120);
    for (number, kind) in KINDS.iter().enumerate() {
        let files = (kind.write)(&docs);
        let dir = tempfile::tempdir().unwrap();
        let source = put(dir.path(), &files);
        let whole = open(&source).unwrap().given(0).remove(0);
        let mut refused = 0;
        for turn in 0..100u32 {
            let draw = Stream::new(u64::from(turn), Purpose::Data, fnv1a32("mutations"), number as u32);
            let mut changed = files.clone();
            let (_, bytes) = &mut changed[turn as usize % files.len()];
            let at = draw.u32_at(0) as usize % bytes.len();
            let is_cut = turn % 4 == 0;
            if is_cut {
                bytes.truncate(at);
            } else {
                bytes[at] ^= 1 << (draw.u32_at(1) % 8);
            }
            let source = put(dir.path(), &changed);
            match open(&source) {
                Err(error) => {
                    refused += 1;
                    let text = error.to_string();
                    assert!(error.is_user_error() && text.contains(dir.path().to_str().unwrap()), "{text}");
                }
                // A text that was cut between two lines is still valid.
                Ok(_) if is_cut => {}
                Ok(data) => {
                    let given = data.given(0).remove(0);
                    let all = (given.documents as u64 + given.left_out.empty, whole.documents as u64);
                    assert_eq!(all.0, all.1, "{}: bit of byte {at}", source.display());
                    assert!(given.tokens.abs_diff(whole.tokens) <= 300, "{}: byte {at}", source.display());
                }
            }
        }
        println!("{}: {refused} of 100 refused", files[0].0);
    }
}
