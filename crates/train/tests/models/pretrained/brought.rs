//! What people's folders have that none of ours has: a head of its own beside a tied embedding, one expert, other files in the place of weights.

use super::{SOLO, dense, digest_at_start, exported, from, small, trained};
use nibble_cpu::Cpu;
use nibble_train::export::ExportType;
use nibble_train::pretrained::Pretrained;
use nibble_train::trainer::Trainer;
use safetensors::SafeTensors;
use std::fs;

#[test]
fn a_head_is_kept_beside_another_embedding_that_it_would_be_tied_to() {
    let config = dense("bf16", &["model.tie_embeddings=false"]);
    let (digest, checkpoint, dir) = trained(&config);
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::F32, 0, &folder);
    let file = folder.join("config.json");
    let json = fs::read_to_string(&file).unwrap();
    let tied = json.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    assert_ne!(json, tied);
    fs::write(&file, &tied).unwrap();
    let read = Pretrained::open(&folder).unwrap();
    assert!(!read.model.tie_embeddings, "the head is another tensor");
    assert!(read.notes.len() == 1 && read.notes[0].contains("lm_head.weight"), "{:?}", read.notes);
    assert_eq!(digest_at_start(&from(&config, &folder), 1), digest);
    // The same numbers are one tensor.
    let weights = folder.join("model.safetensors");
    let mut whole = fs::read(&weights).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&whole).unwrap();
    let bytes = |name: &str| {
        let (from, to) = metadata.info(name).unwrap().data_offsets;
        8 + header + from..8 + header + to
    };
    let (embedding, head) = (bytes("model.embed_tokens.weight"), bytes("lm_head.weight"));
    whole.copy_within(embedding, head.start);
    fs::write(&weights, whole).unwrap();
    let read = Pretrained::open(&folder).unwrap();
    assert!(read.model.tie_embeddings && read.notes.is_empty(), "{:?}", read.notes);
    let config = dense("bf16", &["model.tie_embeddings=true"]);
    Trainer::new(&Cpu::new(1).unwrap(), &SOLO, &from(&config, &folder)).map(drop).unwrap();
}

/// A matrix of one row is a matrix, as others write it.
#[test]
fn the_router_of_one_expert_is_a_matrix() {
    let config = small("bf16", &["model.shared_ffn=0", "model.experts=1", "model.top_k=1"]);
    let (digest, checkpoint, dir) = trained(&config);
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::F32, 0, &folder);
    let tensors = Pretrained::open(&folder).unwrap().tensors().unwrap();
    let (_, shape) = tensors.shapes().find(|(name, _)| name.ends_with("1.mlp.gate.weight")).unwrap();
    assert_eq!(shape, [1, config.model.d_model]);
    assert_eq!(digest_at_start(&from(&config, &folder), 1), digest);
}

#[test]
fn other_files_in_the_place_of_weights_are_told_with_what_makes_them_weights() {
    let (_, checkpoint, dir) = trained(&dense("bf16", &[]));
    let folder = dir.path().join("model");
    exported(&checkpoint, ExportType::F32, 0, &folder);
    let at = |name: &str| folder.join(name);
    let error = || {
        let opened =
            Pretrained::open(&folder).and_then(|folder| folder.tokenizer().and(folder.tensors()).map(drop));
        opened.unwrap_err().to_string()
    };
    for other in ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "any.gguf"] {
        let kept = dir.path().join("kept");
        fs::rename(at("model.safetensors"), &kept).unwrap();
        fs::write(at(other), "").unwrap();
        // An optimizer's is no model.
        fs::write(at("optimizer.bin"), "").unwrap();
        let error = error();
        assert!(error.contains(other) && error.contains("save_pretrained"), "{error}");
        fs::remove_file(at(other)).unwrap();
        fs::rename(kept, at("model.safetensors")).unwrap();
    }
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        let whole = fs::read(at(name)).unwrap();
        fs::write(at(name), pointer).unwrap();
        let error = error();
        assert!(error.contains(name) && error.contains("git lfs pull"), "{error}");
        fs::write(at(name), whole).unwrap();
    }
    Pretrained::open(&folder).unwrap().tensors().unwrap();
}
