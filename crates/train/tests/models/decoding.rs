//! Tokens against a cache: the logits that all tokens at once give, to the last bit on a CPU.

use crate::rig;

use nibble_core::recipe::{Section, Site};
use nibble_core::{Kernels, Mesh, MeshShape, Recipe};
use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_train::config::Config;
use nibble_train::trainer::Trainer;
use rig::{FOUR_PARTS, FOUR_RANKS, SOLO, on_mesh, small};

fn bits(logits: &[f32]) -> Vec<u32> {
    // Adding 0 makes -0 of a sum that underflowed +0.
    logits.iter().map(|x| (x + 0.0).to_bits()).collect()
}

/// Windows of a text as `generate` takes them, from a prompt of so many tokens on, past the length of a sequence.
fn check<B: Kernels>(b: &B, recipe: &str, prompt: usize, tokens: usize) {
    check_run(b, &small(recipe, &[]), prompt, tokens);
}

fn check_run<B: Kernels>(b: &B, config: &Config, prompt: usize, tokens: usize) {
    check_rank(b, Mesh::new(&SOLO), config, prompt, tokens);
}

/// The same of a rank; the bits of the logits of all windows.
fn check_rank<B: Kernels>(
    b: &B,
    mesh: Mesh<'_, B>,
    config: &Config,
    prompt: usize,
    tokens: usize,
) -> Vec<Vec<u32>> {
    let recipe = &config.recipe;
    let mut trainer = Trainer::new(b, mesh, config).unwrap();
    trainer.train_step().unwrap();
    let (seq_len, vocab) = (trainer.config().data.seq_len, trainer.config().model.vocab_size);
    let text: Vec<i32> = (0..prompt + tokens).map(|i| (i * i * 7 + 3 * i) as i32 % vocab as i32).collect();
    let windows: Vec<&[i32]> =
        (prompt..text.len()).map(|end| &text[end.saturating_sub(seq_len)..end]).collect();
    let whole: Vec<_> = windows.iter().map(|ids| bits(&trainer.next_logits(ids).unwrap())).collect();
    let mut decoding = trainer.decoding().unwrap();
    for (ids, whole) in windows.iter().zip(&whole) {
        assert!(bits(&decoding.next_logits(ids).unwrap()) == *whole, "{recipe}: {} tokens", ids.len());
    }
    // Another text, an error, and the first text again.
    decoding.next_logits(&text[1..3]).unwrap();
    assert!(decoding.next_logits(&[text[1], text[2], -1]).is_err());
    assert!(decoding.next_logits(&vec![0; seq_len + 1]).is_err());
    assert!(bits(&decoding.next_logits(windows[0]).unwrap()) == whole[0], "{recipe}: again");
    drop(decoding);
    trainer.train_step().unwrap();
    whole
}

/// Whether a scale is of all tokens that are computed at a time, so that a cache changes it.
fn has_scale_of_all_tokens(recipe: &str) -> bool {
    let of_all = |section: &Section| {
        let x = section.at(Site::FpropX);
        x.format.is_block() && x.format.scale_kind(x.scale).has_tensor_scale()
    };
    let Recipe { linear, expert, .. } = Recipe::builtin(recipe).unwrap();
    of_all(&linear) || of_all(&expert)
}

#[test]
fn a_cache_changes_no_bit() {
    for recipe in rig::recipes().into_iter().filter(|recipe| !has_scale_of_all_tokens(recipe)) {
        check(&Cpu::new(2).unwrap(), recipe, 1, 11);
    }
}

/// A text that begins as the one before it did is computed whole, where its first tokens against caches would have other logits.
#[test]
fn a_forgotten_text_changes_no_bit_of_the_next() {
    let b = Cpu::new(2).unwrap();
    let mut depends = 0;
    for recipe in rig::recipes().into_iter().filter(|recipe| has_scale_of_all_tokens(recipe)) {
        let mut trainer = Trainer::new(&b, Mesh::new(&SOLO), &small(recipe, &[])).unwrap();
        trainer.train_step().unwrap();
        let text = [3, 1, 4, 1, 5, 9, 2, 6];
        let whole = bits(&trainer.next_logits(&text).unwrap());
        let mut decoding = trainer.decoding().unwrap();
        decoding.next_logits(&text[..7]).unwrap();
        depends += usize::from(bits(&decoding.next_logits(&text).unwrap()) != whole);
        decoding.next_logits(&text[..7]).unwrap();
        decoding.forget();
        assert!(bits(&decoding.next_logits(&text).unwrap()) == whole, "{recipe}");
    }
    assert!(depends > 0, "no recipe needs it");
}

/// Every rank of every mesh has the logits of one rank, with a cache and without.
#[test]
fn a_mesh_changes_no_bit_either() {
    let changes = [FOUR_PARTS];
    for (i, recipe) in rig::some_recipes(2).into_iter().enumerate() {
        let config = if i % 3 == 2 { rig::mixed(recipe, &changes) } else { small(recipe, &changes) };
        let decode = |mesh: Mesh<'_, Cpu>| {
            let b = Cpu::new(1).unwrap();
            if !has_scale_of_all_tokens(recipe) {
                return check_rank(&b, mesh, &config, 1, 4);
            }
            let mut trainer = Trainer::new(&b, mesh, &config).unwrap();
            trainer.train_step().unwrap();
            [3, 1].map(|tokens| bits(&trainer.next_logits(&[5, 50, 7][..tokens]).unwrap())).to_vec()
        };
        let one = &on_mesh(MeshShape::ONE, decode)[0];
        // All of them under the recipe that mixes formats, else one of two and one of four.
        let meshes = match recipe {
            "mxfp4-hopper" => FOUR_RANKS[1..].to_vec(),
            _ => vec![FOUR_RANKS[1 + i % 2], FOUR_RANKS[3 + i % 3]],
        };
        for mesh in meshes {
            for (rank, logits) in on_mesh(mesh, decode).iter().enumerate() {
                assert!(logits == one, "{recipe}, mesh {mesh}, rank {rank}");
            }
        }
    }
}

/// A window that moves is computed again on every rank.
#[test]
fn nor_does_one_past_the_length_of_a_sequence() {
    let config = small("bf16", &[FOUR_PARTS]);
    let decode =
        |mesh: Mesh<'_, Cpu>| check_rank(&Cpu::new(1).unwrap(), mesh, &config, config.data.seq_len - 1, 3);
    let one = &on_mesh(MeshShape::ONE, decode)[0];
    for mesh in [FOUR_RANKS[1], FOUR_RANKS[4]] {
        assert!(on_mesh(mesh, decode).iter().all(|logits| logits == one), "mesh {mesh}");
    }
}

#[test]
fn nor_does_one_of_dense_layers() {
    for recipe in ["f32", "bf16", "mxfp4-hopper"] {
        check_run(&Cpu::new(2).unwrap(), &rig::dense(recipe, &[]), 1, 11);
    }
}

#[test]
fn nor_does_one_of_any_model() {
    for recipe in ["f32", "bf16", "mxfp4-hopper"] {
        for (i, changes) in rig::choices().into_iter().enumerate() {
            let (prompt, tokens) = if i % 2 == 0 { (1, 9) } else { (3, 5) };
            check_run(&Cpu::new(2).unwrap(), &small(recipe, &changes), prompt, tokens);
        }
        for changes in rig::dense_choices() {
            check_run(&Cpu::new(2).unwrap(), &rig::dense(recipe, &changes), 3, 5);
        }
    }
}

#[test]
fn a_window_that_moves_is_computed_again() {
    let seq_len = small("bf16", &[]).data.seq_len;
    check(&Cpu::new(2).unwrap(), "bf16", seq_len - 3, 6);
    check(&Recorder::new(Cpu::new(2).unwrap()), "mxfp4-hopper", seq_len - 2, 4);
}
