//! Documents of a packed sequence, on any backend: what one token of a document changes, and what a document has by itself.

use super::{loss_scale, normals};
use nibble_core::{Kernels, Mesh, Recipe, SoloComm};
use nibble_train::config::ModelConfig;
use nibble_train::cx::Cx;
use nibble_train::model::Decoder;
use nibble_train::param::GradientPlan;
use nibble_train::shards::{Shards, Sight};

/// Ids of a document: no other document has one of them, so that a row of the embedding's gradient is of one document alone.
const IDS: usize = 6;

/// Sequences cut into documents, one after the other.
#[derive(Debug, Clone)]
pub struct Packed {
    /// Tokens of each document.
    pub lengths: Vec<usize>,
    /// Tokens of a sequence: a multiple of it ends with a document.
    pub seq_len: usize,
}

/// What a pass over tokens gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Passed {
    /// Nats of each token, its bits.
    pub nats: Vec<u64>,
    /// The embedding's gradient, a row an id, its bits.
    pub rows: Vec<Vec<u32>>,
}

impl Packed {
    /// One sequence.
    pub fn one(lengths: &[usize]) -> Self {
        Self { lengths: lengths.to_vec(), seq_len: lengths.iter().sum() }
    }

    /// Where each document lies.
    pub fn documents(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end - length..*end)
        })
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Random tokens, each document of its own.
    pub fn ids(&self) -> Vec<i32> {
        let draws = normals("documents", self.tokens());
        let of = |(number, document): (usize, std::ops::Range<usize>)| {
            let id = move |x: &f32| (number * IDS + (x.abs() * 1000.0) as usize % IDS) as i32;
            draws[document].iter().map(id).collect::<Vec<_>>()
        };
        self.documents().enumerate().flat_map(of).collect()
    }

    /// The same with another token in the middle of a document.
    pub fn changed(&self, number: usize) -> Vec<i32> {
        let mut ids = self.ids();
        let document = self.documents().nth(number).unwrap();
        let (first, at) = ((number * IDS) as i32, document.start + document.len() / 2);
        ids[at] = first + (ids[at] - first + 1) % IDS as i32;
        ids
    }

    /// What follows each token in its document; nothing follows the last.
    fn targets(&self, ids: &[i32]) -> Vec<i32> {
        let of = |document: std::ops::Range<usize>| {
            let next = ids[document.start + 1..document.end].iter().copied();
            next.chain([nibble_train::data::NO_TARGET])
        };
        self.documents().flat_map(of).collect()
    }

    /// Of each token where its document begins in its sequence.
    fn starts(&self) -> Vec<i32> {
        let of = |document: std::ops::Range<usize>| {
            let start = (document.start % self.seq_len) as i32;
            document.map(move |_| start)
        };
        self.documents().flat_map(of).collect()
    }

    /// A model for these documents: a head of its own, and no losses of routers, which are means over all tokens.
    pub fn model(&self, model: &ModelConfig) -> ModelConfig {
        ModelConfig {
            vocab_size: (self.lengths.len() * IDS).next_multiple_of(16),
            tie_embeddings: false,
            aux_loss_coef: 0.0,
            z_loss_coef: 0.0,
            ..model.clone()
        }
    }

    /// The losses of these tokens and the gradient of the embedding, of a model that this configuration says. Documents are kept apart
    /// unless a sequence is one.
    pub fn pass<B: Kernels>(&self, b: &B, recipe: &Recipe, model: &ModelConfig, ids: &[i32]) -> Passed {
        let (mesh, tokens) = (Mesh::new(&SoloComm), self.tokens());
        let mut model = Decoder::new(b, mesh, recipe, model, self.seq_len, 1).unwrap();
        let apart = self.documents().any(|document| document.len() != self.seq_len);
        let starts = apart.then(|| b.upload(&self.starts()).unwrap());
        let sight = Sight::find(b, &model.config, starts.as_ref(), (tokens, self.seq_len)).unwrap();
        let context = |training| {
            let shards = Shards::new(b, 1, tokens, 0).unwrap().with_sequences_of(self.seq_len);
            Cx { training, seed: 3, ..Cx::inference(b, mesh, recipe, shards, 0.0) }.with_sight(sight.clone())
        };
        let (ids, targets) = (b.upload(ids).unwrap(), b.upload(&self.targets(ids)).unwrap());
        let cx = context(false);
        model.prepare(&cx).unwrap();
        let losses = model.losses(&cx, &ids, &targets, tokens).unwrap();
        losses.verify_ids(b, "documents", model.config.vocab_size).unwrap();
        let nats = b.download(&losses.shard_nats).unwrap().into_iter().map(f64::to_bits).collect();
        model.release();

        let cx = context(true);
        model.prepare(&cx).unwrap();
        for param in model.optimized() {
            param.place_gradient(b, GradientPlan::default(), param.placement.shards(&cx.shards)).unwrap();
        }
        let scale = loss_scale(b, 1.0 / 64.0);
        let (_, saved) = model.forward(&cx, ids, &targets, &scale).unwrap();
        model.backward(&cx, saved).unwrap();
        let (embed, d) = (&mut model.embed.weight, model.config.d_model);
        embed.reduce_gradient(&cx).unwrap();
        let gradient = embed.reduced().unwrap().to_f32_vec(b).unwrap();
        let rows = gradient.chunks(d).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect();
        Passed { nats, rows }
    }

    /// How far the documents are from what they are as sequences of their own: the largest difference of a token's nats, and the relative
    /// L2 error of the embedding's gradient, the sum over all of them.
    pub fn differences_alone<B: Kernels>(&self, b: &B, recipe: &Recipe, model: &ModelConfig) -> [f64; 2] {
        let (model, ids) = (self.model(model), self.ids());
        let together = self.pass(b, recipe, &model, &ids);
        let (mut most, mut sums) = (0.0f64, vec![0.0; model.vocab_size * model.d_model]);
        for document in self.documents() {
            let alone = Self::one(&[document.len()]).pass(b, recipe, &model, &ids[document.clone()]);
            for (together, alone) in together.nats[document].iter().zip(&alone.nats) {
                most = most.max((f64::from_bits(*together) - f64::from_bits(*alone)).abs());
            }
            let row = alone.rows.iter().flatten();
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(f32::from_bits(*x)));
        }
        let (mut error, mut size) = (0.0, 0.0);
        for (x, sum) in together.rows.iter().flatten().zip(sums) {
            error += (f64::from(f32::from_bits(*x)) - sum).powi(2);
            size += sum * sum;
        }
        assert!(size > 0.0, "there is a gradient");
        [most, (error / size).sqrt()]
    }

    /// Asserts that a changed token of one document changes its losses and gradients, and no bit of those of any other.
    #[track_caller]
    pub fn assert_apart<B: Kernels>(&self, b: &B, recipe: &Recipe, model: &ModelConfig, changed: usize) {
        let model = &self.model(model);
        let before = self.pass(b, recipe, model, &self.ids());
        let after = self.pass(b, recipe, model, &self.changed(changed));
        for (number, document) in self.documents().enumerate() {
            let what = format!("{}: {:?}, document {number}, of {changed}", recipe.name, self.lengths);
            let rows = number * IDS..(number + 1) * IDS;
            let same = (
                before.nats[document.clone()] == after.nats[document],
                before.rows[rows.clone()] == after.rows[rows],
            );
            // A document of one token has no target.
            let expected = number != changed || self.lengths[number] == 1;
            assert_eq!(same, (expected, expected), "{what}: losses and gradients are the same");
        }
    }
}

/// Recipes in which no scale is that of a whole tensor: such a scale is of all documents.
pub fn recipes_of_lines() -> impl Iterator<Item = Recipe> {
    use nibble_core::recipe::LayerKind;
    let has_one = |recipe: &Recipe| {
        [LayerKind::Linear, LayerKind::Expert, LayerKind::Head, LayerKind::Router].into_iter().any(|kind| {
            kind.sites().any(|site| {
                let precision = recipe.of(kind).at(site);
                precision.codec().is_ok_and(|codec| codec.scale_kind().has_tensor_scale())
            })
        })
    };
    Recipe::all_names().map(|name| Recipe::builtin(name).unwrap()).filter(move |recipe| !has_one(recipe))
}
