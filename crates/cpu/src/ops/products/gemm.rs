//! The CPU code of [`nibble_core::ops::Gemm`] and the grouped GEMMs, on the engine of [`crate::gemm`].

use crate::Cpu;
use crate::gemm::{Engine, GemmError, Group, Output};
use crate::ops::products::lowered::sides;
use half::bf16;
use nibble_core::ops::{Gemm, GroupedGemm, GroupedWgrad};
use nibble_core::{Data, Error, Groups, Operand, Result, Tensor, round_up};

pub(crate) fn gemm(cpu: &Cpu, op: Gemm<'_, Cpu>) -> Result<Tensor<Cpu>> {
    const OP: &str = "gemm";
    let (dims, mut d) = (op.check()?, op.result(cpu)?);
    let (a, b) = sides(cpu, op.a, (op.b, 1))?;
    let (a, b) = (a.view(OP, 0)?, b.view(OP, 0)?);
    product(cpu, OP, &mut d, |engine, out| engine.gemm(dims, &a, &b, out))?;
    Ok(d)
}

pub(crate) fn grouped_gemm(cpu: &Cpu, op: GroupedGemm<'_, Cpu>) -> Result<Tensor<Cpu>> {
    const OP: &str = "grouped_gemm";
    let (dims, mut d) = (op.check()?, op.result(cpu)?);
    // Rows of the output outside all groups are zero.
    match &mut d.data {
        Data::F32(d) => d.as_mut_slice().fill(0.0),
        Data::Bf16(d) => d.as_mut_slice().fill(bf16::ZERO),
    }
    let groups = host_groups(op.groups);
    let (x, w) = sides(cpu, op.x, (op.w, groups.len()))?;
    let a = x.view(OP, 0)?;
    let b = (0..groups.len()).map(|g| w.view(OP, g * dims.n)).collect::<Result<Vec<_>>>()?;
    product(cpu, OP, &mut d, |engine, out| engine.grouped(&groups, dims.n, dims.k, &a, &b, out))?;
    Ok(d)
}

pub(crate) fn grouped_wgrad(cpu: &Cpu, op: GroupedWgrad<'_, Cpu>) -> Result<()> {
    const OP: &str = "grouped_wgrad";
    let dims = op.check()?;
    let mut groups = host_groups(op.groups);
    // Plain rows after a group's end may hold any values, so only quantized groups are extended.
    if matches!((op.dy, op.x), (Operand::Block(_), Operand::Block(_))) {
        to_whole_blocks(&mut groups, op.groups);
    }
    let (dy, x) = sides(cpu, op.dy, (op.x, 1))?;
    let (dy, x) = (dy.down_rows(OP)?, x.down_rows(OP)?);
    let engine = engine(cpu, OP)?;
    let out = match &mut op.grad.data {
        Data::F32(grad) => Output::f32(grad.as_mut_slice(), dims.n),
        Data::Bf16(grad) => Output::bf16(grad.as_mut_slice(), dims.n),
    };
    let out = if op.accumulate { out.accumulate() } else { out };
    cpu.pool().install(|| engine.ragged(&groups, dims.m, dims.n, &dy, &x, out)).map_err(|e| refused(OP, e))
}

/// Runs a GEMM that writes to a tensor.
fn product(
    cpu: &Cpu,
    op: &'static str,
    d: &mut Tensor<Cpu>,
    run: impl FnOnce(Engine, Output<'_>) -> Result<(), GemmError> + Send,
) -> Result<()> {
    let (engine, cols) = (engine(cpu, op)?, d.cols);
    let output = match &mut d.data {
        Data::F32(d) => Output::f32(d.as_mut_slice(), cols),
        Data::Bf16(d) => Output::bf16(d.as_mut_slice(), cols),
    };
    cpu.pool().install(|| run(engine, output)).map_err(|e| refused(op, e))
}

/// The engine of the backend. The scalar specification is the engine on portable code, which computes the dot products of
/// [`crate::gemm::spec`] tile by tile.
pub(in crate::ops) fn engine(cpu: &Cpu, op: &'static str) -> Result<Engine> {
    Engine::with_isa(cpu.isa()).map_err(|e| refused(op, e))
}

pub(in crate::ops) fn refused(op: &'static str, e: GemmError) -> Error {
    Error::shape(op, e.argument, e.got, e.expected)
}

fn host_groups(groups: &Groups<Cpu>) -> Vec<Group> {
    let (start, len) = (groups.start.as_slice(), groups.len.as_slice());
    start.iter().zip(len).map(|(s, n)| Group { start: *s as usize, len: *n as usize }).collect()
}

/// Extends groups of columns to whole blocks, as far as the next group allows. The added rows are zeros; after a Hadamard transform, which
/// spreads a group over whole blocks, they belong to the group.
fn to_whole_blocks(host: &mut [Group], groups: &Groups<Cpu>) {
    let next = groups.start.as_slice().iter().skip(1);
    for (group, next) in host.iter_mut().zip(next) {
        let whole = round_up(group.len, groups.align.max(1));
        group.len = whole.min((*next as usize).saturating_sub(group.start)).max(group.len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::convert::quantize::fixture::groups;
    use crate::ops::plain::elementwise::tests::normals;
    use nibble_core::DType;
    use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
    use nibble_core::ops::{Hadamard, Planes, Quantize};

    /// A transform spreads a group over whole blocks, and the GEMM includes all of their rows: (H dy)ᵀ (H x) is dyᵀ x for any group length.
    #[test]
    fn weight_gradients_under_a_transform_take_whole_blocks() {
        const COLS: usize = 8;
        let cpu = Cpu::new(2).unwrap();
        let lens = [10, 0, 128, 70];
        let groups = groups(&cpu, &lens, 128, 0);
        let rows = groups.capacity;
        let tensor = |seed| Tensor::from_f32(&cpu, &normals(seed, rows * COLS), rows, COLS).unwrap();
        let (dy, x) = (tensor(1), tensor(2));
        let codec = Codec::new(Format::E4m3, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
        let columns = |x: &Tensor<Cpu>| {
            let hadamard = Some(Hadamard::new(3, 64));
            let op = Quantize { groups: Some(&groups), hadamard, ..Quantize::new(x, codec, Planes::Cols) };
            op.run(&cpu).unwrap().take_cols("test").unwrap()
        };
        let mut grad = Tensor::zeros(&cpu, DType::F32, lens.len() * COLS, COLS).unwrap();
        let (dy_cols, x_cols) = (columns(&dy), columns(&x));
        GroupedWgrad { dy: &dy_cols, x: &x_cols, groups: &groups, grad: &mut grad, accumulate: false }
            .run(&cpu)
            .unwrap();
        let [dy, x, grad] = [dy, x, grad].map(|x| x.to_f32_vec(&cpu).unwrap());
        for (g, &len) in lens.iter().enumerate() {
            let start = groups.start.as_slice()[g] as usize;
            let (mut wrong, mut all) = (0.0, 0.0);
            for (i, j) in (0..COLS * COLS).map(|at| (at / COLS, at % COLS)) {
                let rows = start..start + len;
                let want: f64 = rows.map(|r| f64::from(dy[r * COLS + i]) * f64::from(x[r * COLS + j])).sum();
                let got = f64::from(grad[(g * COLS + i) * COLS + j]);
                (wrong, all) = (wrong + (got - want).powi(2), all + want * want);
            }
            assert!(wrong <= 0.01 * all, "{len} rows: {wrong} of {all}");
        }
    }
}
