//! Gathers all rows of sharded weights, one layer at a time, while earlier layers run.
//!
//! A layer lists the weights that it reads, and the form in which it reads them (`Layer::wanted`). `Decoder::begin_prepare` first converts
//! this rank's own rows of all weights, in the order of the weights, so the step's record has the same sites as on one rank. Then the rows
//! of a group of weights are sent in one message to each rank. The groups are the embedding, each layer, the last norm, and the head.
//!
//! The forward pass finishes a group right before it needs the group's weights, and then sends the group after the next. So the rows of a
//! layer are transferred during the GEMMs of the previous layer, and at most two groups are in memory twice. Later micro-batches and the
//! backward pass use the same copies. Outside of training, `Decoder::prepare` finishes all groups at once. All rows of norms and of the
//! embedding stay in memory until the optimizer changes them.

use super::shipment::{Cargo, Rows, Shipment, Whole};
use super::{Param, Placement, Shadow, codes};
use crate::cx::Cx;
use nibble_core::allocation::in_part;
use nibble_core::formats::Codec;
use nibble_core::recipe::WeightPlan;
use nibble_core::{Comm, DType, Error, Kernels, Result, Tensor};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Number of groups in flight at once: the group that is awaited, and the next group, which is transferred while the previous layer runs.
/// Each group needs memory for its message until its rows are at their final place. A third group would not arrive earlier, because
/// messages are sent one after the other.
const UNDER_WAY: usize = 2;

/// A weight that passes need, and the form in which passes read it: [`Param::as_it_is`] or [`Param::for_products`].
#[derive(Debug)]
pub struct Wanted<'a, B: Kernels> {
    pub(super) param: &'a Param<B>,
    pub(super) copies: Copies,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Copies {
    /// All rows of the weight, in F32.
    AsItIs,
    /// The copies that GEMMs read.
    Products(ProductCopies),
}

/// The copies of a weight for GEMMs.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProductCopies {
    /// The plan of the copies of the weight.
    pub plan: WeightPlan,
    /// Hash of the linear layer's name. The hash seeds the random signs of the layer's Hadamard transforms.
    pub linear: u32,
}

impl ProductCopies {
    /// The codec of the codes that ranks send; `None` if ranks do not send codes. Each rank computes the codes of its own rows.
    fn as_codes(&self) -> Result<Option<Codec>> {
        // Stochastically rounded codes are not sent, because random bits depend on the place in the whole weight.
        let travels = self.plan.is_one && self.plan.w.dtype().is_none() && !self.plan.w.draws();
        Ok(travels.then(|| self.plan.w.codec()).transpose()?.filter(|codec| codes::travel(*codec)))
    }

    /// The type of the rows that ranks send if they do not send codes: the type of both copies if they have the same type, otherwise F32.
    fn as_plain(&self) -> DType {
        self.plan.w.dtype().filter(|_| self.plan.is_one).unwrap_or(DType::F32)
    }
}

/// The copies of weights that are being gathered from all ranks, in groups, in the order in which the groups are finished. All ranks have
/// the same groups.
///
/// When a gathering begins, each rank converts its own rows, in the order of the weights.
#[derive(Debug)]
pub struct Gathering<B: Kernels> {
    groups: VecDeque<Group<B>>,
}

impl<B: Kernels> Default for Gathering<B> {
    fn default() -> Self {
        Self { groups: VecDeque::new() }
    }
}

/// A transfer in flight belongs to the gathering that waits for it, so a clone waits for nothing.
impl<B: Kernels> Clone for Gathering<B> {
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// Weights that are needed at the same time.
#[derive(Debug)]
struct Group<B: Kernels> {
    weights: Vec<Weight<B>>,
    replicated: Lane<B>,
    experts: Lane<B>,
}

/// The rows of a group's weights that are sent among the same ranks.
#[derive(Debug)]
enum Lane<B: Kernels> {
    Waiting(Vec<Cargo<B>>),
    UnderWay(Shipment<B>),
}

/// A weight whose copies are still missing.
#[derive(Debug)]
struct Weight<B: Kernels> {
    name: String,
    copies: Copies,
    from: Source<B>,
}

/// The source of a weight's copies.
#[derive(Debug)]
enum Source<B: Kernels> {
    /// The copies already exist.
    Made(Shadow<B>),
    /// All rows of the weight, which this rank will have when the group is finished.
    Here,
    /// The next rows that arrive in the lane of this placement.
    Coming(Placement),
}

/// The way in which a weight gets its copies.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// No copy is needed, because this rank already has all rows.
    There,
    /// The copies are computed from the master, which has all rows.
    Alone,
    /// The copies are computed from all rows, which this rank will have when the copies are needed.
    Here,
    /// All rows are received in this type.
    Plain(DType),
    /// All rows are received as codes of this codec.
    Codes(Codec),
}

impl<B: Kernels> Wanted<'_, B> {
    /// The way in which this weight gets its copies. `is_here` says that this rank will have all rows when the copies are needed, even if
    /// some rows are missing now.
    fn way(&self, is_here: bool) -> Result<Way> {
        let (is_divided, is_here) = (self.param.slices.is_divided(), is_here || self.param.whole.is_some());
        Ok(match self.copies {
            Copies::AsItIs if is_here || !is_divided => Way::There,
            Copies::AsItIs => Way::Plain(DType::F32),
            Copies::Products(_) if !is_divided => Way::Alone,
            // The rows of a tied embedding are sent only once.
            Copies::Products(_) if is_here => Way::Here,
            Copies::Products(to) => to.as_codes()?.map_or(Way::Plain(to.as_plain()), Way::Codes),
        })
    }
}

impl<B: Kernels> Gathering<B> {
    /// Converts the rows that this rank stores, and sends the converted rows of the first groups.
    ///
    /// # Errors
    /// Returns the errors of the backend and other ranks.
    pub fn begin(cx: &Cx<'_, B>, groups: Vec<Vec<Wanted<'_, B>>>) -> Result<Self> {
        let mut here = BTreeSet::new();
        let mut ways = Vec::with_capacity(groups.len());
        for group in groups {
            let mut of_group = Vec::with_capacity(group.len());
            for wanted in group {
                let way = wanted.way(here.contains(&wanted.param.name))?;
                if let Copies::AsItIs = wanted.copies {
                    here.insert(&wanted.param.name);
                }
                of_group.push((wanted, way));
            }
            ways.push(of_group);
        }
        let mut largest = largest(cx, ways.iter().flatten())?;
        let group = |wanted: Vec<_>| Group::of(cx, wanted, &mut largest);
        let mut gathering = Self { groups: ways.into_iter().map(group).collect::<Result<_>>()? };
        gathering.send(cx)?;
        Ok(gathering)
    }

    /// Whether any group is not finished yet.
    pub fn is_under_way(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Finishes the next group: waits for the rows of other ranks, stores the copies of the group's weights in `params`, and sends the rows
    /// of a later group. Does nothing if every group is finished.
    ///
    /// # Errors
    /// Returns the errors of the backend and other ranks.
    pub fn finish_next(&mut self, cx: &Cx<'_, B>, params: Vec<&mut Param<B>>) -> Result<()> {
        match self.groups.pop_front() {
            None => Ok(()),
            Some(group) if !group.travels() => group.finish(cx, params),
            Some(group) => in_part("gather", || {
                group.finish(cx, params)?;
                self.send(cx)
            }),
        }
    }

    /// Sends the rows of the next groups.
    fn send(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        self.groups.iter_mut().take(UNDER_WAY).try_for_each(|group| {
            group.replicated.send(cx, cx.mesh.all)?;
            group.experts.send(cx, cx.mesh.dp)
        })
    }
}

impl<B: Kernels> Group<B> {
    fn of(
        cx: &Cx<'_, B>,
        wanted: Vec<(Wanted<'_, B>, Way)>,
        largest: &mut BTreeMap<String, B::Buf<f32>>,
    ) -> Result<Self> {
        let [replicated, experts] = [(); 2].map(|()| Lane::Waiting(Vec::new()));
        let mut group = Self { weights: Vec::new(), replicated, experts };
        for (Wanted { param, copies }, way) in wanted {
            let from = match (way, copies) {
                (Way::There, _) => continue,
                (Way::Alone, Copies::Products(to)) => Source::Made(param.products(cx, &to, &param.master)?),
                (Way::Codes(codec), Copies::Products(to)) => {
                    let amax = largest.remove(&param.name);
                    group.put(param, Rows::Codes(param.own_codes(cx, &to.plan.w, codec, amax)?))
                }
                (Way::Plain(dtype), _) => group.put(param, Rows::Plain(cx.cast(&param.master, dtype)?)),
                _ => Source::Here,
            };
            group.weights.push(Weight { name: param.name.clone(), copies, from });
        }
        Ok(group)
    }

    fn put(&mut self, param: &Param<B>, rows: Rows<B>) -> Source<B> {
        let lane = match param.placement {
            Placement::Replicated => &mut self.replicated,
            Placement::Experts(_) => &mut self.experts,
        };
        if let Lane::Waiting(cargo) = lane {
            cargo.push(Cargo { slices: param.slices.clone(), rows });
        }
        Source::Coming(param.placement)
    }

    fn travels(&self) -> bool {
        let is_empty = |lane: &Lane<B>| matches!(lane, Lane::Waiting(cargo) if cargo.is_empty());
        !is_empty(&self.replicated) || !is_empty(&self.experts)
    }

    fn finish(self, cx: &Cx<'_, B>, mut params: Vec<&mut Param<B>>) -> Result<()> {
        let mut replicated = self.replicated.wait(cx.b)?.into_iter();
        let mut experts = self.experts.wait(cx.b)?.into_iter();
        for Weight { name, copies, from } in self.weights {
            let known = params.iter_mut().find(|param| param.name == name);
            let param = known.ok_or_else(|| {
                Error::shape("prepare", "parameter", &name, "one of the layer that is next to be prepared")
            })?;
            match from {
                Source::Made(copies) => param.shadow = Some(copies),
                Source::Here => param.take(cx, copies, Whole::Plain(param.plain()?.clone()))?,
                Source::Coming(placement) => {
                    let came = match placement {
                        Placement::Replicated => replicated.next(),
                        Placement::Experts(_) => experts.next(),
                    };
                    let missing =
                        Error::Defect { place: "gathering", what: "fewer weights came than were sent" };
                    param.take(cx, copies, came.ok_or(missing)?)?;
                }
            }
        }
        Ok(())
    }
}

impl<B: Kernels> Lane<B> {
    /// Sends the rows, unless they have been sent already.
    fn send(&mut self, cx: &Cx<'_, B>, replicas: &dyn Comm<B>) -> Result<()> {
        if let Self::Waiting(cargo) = self
            && !cargo.is_empty()
        {
            *self = Self::UnderWay(Shipment::begin(
                cx.b,
                replicas,
                cx.copies_for_dgrad(),
                std::mem::take(cargo),
            )?);
        }
        Ok(())
    }

    /// Waits for the rows of all ranks.
    fn wait(self, b: &B) -> Result<Vec<Whole<B>>> {
        match self {
            Self::Waiting(_) => Ok(Vec::new()),
            Self::UnderWay(shipment) => shipment.wait(b),
        }
    }
}

/// The largest magnitude of each matrix, by the weight's name, for weights that are sent as codes with a tensor scale.
fn largest<'a, B: Kernels + 'a>(
    cx: &Cx<'_, B>,
    wanted: impl Iterator<Item = &'a (Wanted<'a, B>, Way)>,
) -> Result<BTreeMap<String, B::Buf<f32>>> {
    // Weights that have the same ranks and the same codec are measured together.
    let mut alike: Vec<(Codec, Vec<&Param<B>>)> = Vec::new();
    for (Wanted { param, .. }, way) in wanted {
        let Way::Codes(codec) = *way else { continue };
        if !codec.scale_kind().has_tensor_scale() {
            continue;
        }
        let is_of_experts = |param: &Param<B>| matches!(param.placement, Placement::Experts(_));
        let known = alike.iter_mut().find(|(of, params)| {
            *of == codec && params.iter().all(|of| is_of_experts(of) == is_of_experts(param))
        });
        match known {
            Some((_, params)) => params.push(param),
            None => alike.push((codec, vec![param])),
        }
    }
    let mut largest = BTreeMap::new();
    for (codec, params) in alike {
        let Some(replicas) = params.first().map(|param| param.replicas(cx.mesh)) else { continue };
        let rows: Vec<(_, &Tensor<B>)> = params.iter().map(|param| (&param.slices, &param.master)).collect();
        let found = codes::largest(cx.b, replicas, codec, &rows)?;
        largest.extend(params.iter().map(|param| param.name.clone()).zip(found));
    }
    Ok(largest)
}
