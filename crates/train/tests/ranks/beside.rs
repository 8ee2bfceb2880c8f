//! What is computed while rows travel between ranks.

use crate::rig;

use nibble_core::ops::Cast;
use nibble_core::{Comm, DType, Mesh, MeshShape, Recipe, Tensor};
use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_train::cx::Cx;
use nibble_train::layers::Layer;
use nibble_train::model::Feed;
use nibble_train::moe::{Combine, MoeShape};
use nibble_train::shards::Shards;
use nibble_train::spec::{FeedSpec, Group, MlpSpec, MoeSpec};

const TOKENS: usize = 128;
const SHAPE: MoeShape =
    MoeShape { d_model: 64, ffn: 32, experts: 4, top_k: 2, normalize: true, aux_coef: 0.0, z_coef: 0.0 };

/// A name for what is looked at here. A communicator through the host's memory downloads what it sends when an exchange begins, and writes
/// what has come when that is waited for.
fn named(op: &str) -> Option<&'static str> {
    let names = [
        ("download", "send"),
        ("write", "arrive"),
        ("begin_download", "ask for counts"),
        ("finish_download", "know counts"),
        ("quantize_pack", "quantize"),
        ("gemm", "product"),
        ("grouped_gemm", "experts' product"),
        ("grouped_wgrad", "wgrad"),
        ("combine_slots", "sum"),
        ("combine_tree", "sum"),
    ];
    names.into_iter().find(|(of, _)| *of == op).map(|(_, name)| name)
}

/// The forward and the backward pass of a layer with a shared expert on so many ranks, as the first one does it.
fn passes(recipe: &str, combine: Combine, ranks: usize) -> [Vec<&'static str>; 2] {
    let recipe = Recipe::builtin(recipe).unwrap();
    let all = rig::on_axes(MeshShape { dp: 1, ep: ranks }, |axes| {
        let b = Recorder::eager(Cpu::new(1).unwrap());
        let rank = Comm::<Cpu>::rank(&axes.all);
        let shards = Shards::new(&b, 1, TOKENS, rank).unwrap();
        let cx = Cx {
            training: true,
            seed: 3,
            combine,
            ..Cx::inference(&b, Mesh::new(&axes.all), &recipe, shards, 0.0)
        };
        let shared = MlpSpec::new("mlp.shared_expert", Group::SharedExperts, (64, 32), [0.02; 2]);
        let moe = MoeSpec::new("mlp", SHAPE, [0.02; 2]);
        let mut feed = Feed::new(&cx, &FeedSpec::Experts { moe, shared: Some(shared) }).unwrap();
        feed.prepare(&cx).unwrap();
        let values = rig::normals(&format!("x{rank}"), TOKENS * 64);
        let x = Tensor::from_f32(&b, &values, TOKENS, 64).unwrap();
        let x = Cast { x: &x, dtype: DType::Bf16 }.run(&b).unwrap();
        b.watch();
        let done = || b.take_log().iter().filter_map(|event| named(event.op)).collect::<Vec<_>>();
        let (y, saved) = feed.forward(&cx, x).unwrap();
        let forward = done();
        feed.backward(&cx, saved, y).unwrap();
        [forward, done()]
    });
    all.into_iter().next().unwrap()
}

/// As it is written here, in groups that belong together.
fn in_order(groups: &[&[&'static str]]) -> Vec<&'static str> {
    groups.concat()
}

const MLP_BACKWARD: [&str; 4] = ["product", "wgrad", "product", "wgrad"];

#[test]
fn a_shared_expert_is_computed_while_rows_come_back_from_the_others() {
    for combine in [Combine::Slots, Combine::Tree] {
        let of_tree: &[&str] = if combine == Combine::Tree { &["sum"] } else { &[] };
        let [forward, backward] = passes("bf16", combine, 2);
        let routed = ["product", "send", "ask for counts", "know counts", "send", "arrive"];
        let experts = ["send", "arrive", "experts' product", "experts' product"];
        let back = ["send", "product", "product", "arrive", "sum"];
        assert_eq!(forward, in_order(&[&routed, &experts, of_tree, &back]), "{combine:?}");
        // Gate weights' gradients go before the rows, and are what the router waits for.
        let back = ["send", "wgrad", "wgrad", "arrive", "product", "wgrad"];
        let expected = in_order(&[&experts, &["send"], of_tree, &back, &MLP_BACKWARD, &["arrive", "sum"]]);
        assert_eq!(backward, expected, "{combine:?}");
    }
}

#[test]
fn alone_a_rank_sums_before_it_computes_a_shared_expert() {
    for combine in [Combine::Slots, Combine::Tree] {
        let experts = ["experts' product"; 2];
        let [forward, backward] = passes("bf16", combine, 1);
        assert_eq!(forward, in_order(&[&["product"], &experts, &["sum"], &["product"; 2]]), "{combine:?}");
        let router = ["product", "wgrad"];
        let expected = in_order(&[&experts, &["wgrad"; 2], &router, &["sum"], &MLP_BACKWARD]);
        assert_eq!(backward, expected, "{combine:?}");
    }
}

#[test]
fn rows_are_quantized_while_counts_are_on_their_way() {
    let [forward, _] = passes("fp8-flow", Combine::Slots, 2);
    let asked = ["ask for counts", "quantize", "know counts"];
    assert!(forward.windows(3).any(|done| done == asked), "{forward:?}");
}
