use super::*;
use crate::ops::plain::elementwise::tests::{below, bits, every_cpu, normals, same_everywhere};
use half::bf16;
use nibble_core::{Backend, DType};

/// Tokens whose slots are at random leaves of the tree; some slots are missing.
#[derive(Debug, Clone, Copy)]
struct Case {
    tokens: usize,
    top_k: usize,
    leaves: usize,
    cols: usize,
    /// Average number of slots out of four that have no row or no leaf.
    missing: i32,
    /// Whether a leaf may have several slots of a token.
    repeats: bool,
}

impl Case {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for leaves in [1, 2, 3, 5, 7, 8, 12, 31, 48, 64] {
            for top_k in 1..=8 {
                let of = |cols, missing, repeats| Self { tokens: 9, top_k, leaves, cols, missing, repeats };
                all.extend([of(5, 0, false), of(3, 1, true), of(17, 2, false)]);
            }
        }
        let of = |tokens, cols| Self { tokens, top_k: 8, leaves: 256, cols, missing: 1, repeats: true };
        all.extend([of(0, 4), of(3, 255), of(5, 257), of(100, 600)]);
        all.extend([Self { top_k: 40, leaves: 100, ..of(6, 9) }, Self { leaves: (1 << 31) - 1, ..of(6, 9) }]);
        all
    }

    fn slots(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Row and leaf of each slot; no two slots share a row.
    fn slots_of(&self) -> (Vec<i32>, Vec<i32>) {
        let site = (self.top_k * 1000 + self.leaves % 1000 + self.cols) as u32;
        let mut leaf = below(site, self.leaves, self.slots());
        if !self.repeats {
            for leaf in leaf.chunks_mut(self.top_k) {
                for i in 1..leaf.len() {
                    while leaf[..i].contains(&leaf[i]) && i < self.leaves {
                        leaf[i] = (leaf[i] + 1) % self.leaves as i32;
                    }
                }
            }
        }
        // Rows are in another order than slots, as experts produce them.
        let mut index: Vec<i32> = (0..self.slots() as i32).rev().collect();
        let [miss, how] = [1, 2].map(|i| below(site + i, 4, self.slots()));
        for i in (0..self.slots()).filter(|i| miss[*i] < self.missing) {
            match how[i] {
                0 => index[i] = -1,
                1 => leaf[i] = -1,
                2 => leaf[i] = self.leaves as i32,
                _ => index[i] = self.slots() as i32,
            }
        }
        (index, leaf)
    }
}

/// The type of the addends. Each type implements rounding on bits, independently of the code under test.
trait Number: Copy {
    fn bits(self) -> u32;
    fn add(self, other: Self) -> Self;
    const ZERO: Self;
}

impl Number for f32 {
    const ZERO: Self = 0.0;
    fn bits(self) -> u32 {
        self.to_bits()
    }
    fn add(self, other: Self) -> Self {
        self + other
    }
}

impl Number for bf16 {
    const ZERO: Self = bf16::ZERO;
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
    fn add(self, other: Self) -> Self {
        bf16::from_f32(self.to_f32() + other.to_f32())
    }
}

/// The definition: an array of all leaves is halved until one leaf is left.
fn tree<T: Number>(leaves: &[Option<T>]) -> Option<T> {
    if let [leaf] = leaves {
        return *leaf;
    }
    let (left, right) = leaves.split_at(leaves.len() / 2);
    match (tree(left), tree(right)) {
        (Some(left), Some(right)) => Some(left.add(right)),
        (left, right) => left.or(right),
    }
}

/// The expected sum of one column of one token.
fn want<T: Number>(rows: &[Option<T>], leaf: &[i32], leaves: usize) -> T {
    // Larger trees do not fit an array and are summed without the subtrees that have no slot.
    if leaves > 1000 {
        return sparse(&leaf.iter().copied().zip(rows.iter().copied()).collect::<Vec<_>>(), 0, leaves as i64)
            .unwrap_or(T::ZERO);
    }
    let mut table = vec![None; leaves];
    for (row, &leaf) in rows.iter().zip(leaf).filter(|(_, leaf)| (0..leaves as i32).contains(leaf)) {
        let at: &mut Option<T> = &mut table[leaf as usize];
        *at = match (*at, *row) {
            (Some(sum), Some(row)) => Some(sum.add(row)),
            (sum, row) => sum.or(row),
        };
    }
    tree(&table).unwrap_or(T::ZERO)
}

fn sparse<T: Number>(slots: &[(i32, Option<T>)], lo: i64, hi: i64) -> Option<T> {
    let here: Vec<_> = slots.iter().copied().filter(|(leaf, _)| (lo..hi).contains(&(*leaf).into())).collect();
    if here.is_empty() {
        return None;
    }
    if hi - lo == 1 {
        return here.into_iter().filter_map(|(_, row)| row).reduce(T::add);
    }
    let mid = lo + (hi - lo) / 2;
    match (sparse(&here, lo, mid), sparse(&here, mid, hi)) {
        (Some(left), Some(right)) => Some(left.add(right)),
        (left, right) => left.or(right),
    }
}

fn tensor(cpu: &Cpu, x: &[f32], dtype: DType, cols: usize) -> Tensor<Cpu> {
    match dtype {
        DType::F32 => Tensor::from_f32(cpu, x, x.len() / cols, cols).unwrap(),
        DType::Bf16 => {
            let x: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            Tensor::from_bf16(cpu, &x, x.len() / cols, cols).unwrap()
        }
    }
}

fn run(cpu: &Cpu, case: &Case, rows: &Tensor<Cpu>, plus: Option<&Tensor<Cpu>>) -> Tensor<Cpu> {
    let (index, leaf) = case.slots_of();
    let (index, leaf) = (&cpu.upload(&index).unwrap(), &cpu.upload(&leaf).unwrap());
    let op = CombineTree { rows, index, leaf, leaves: case.leaves, plus, top_k: case.top_k };
    combine_tree(cpu, op).unwrap()
}

fn expected<T: Number>(case: &Case, x: &[T], plus: Option<&[T]>) -> Vec<u32> {
    let (index, leaf) = case.slots_of();
    let at = |i: usize| {
        let (slots, col) = ((i / case.cols) * case.top_k..(i / case.cols + 1) * case.top_k, i % case.cols);
        let row = |slot: usize| {
            usize::try_from(index[slot]).ok().and_then(|row| x.get(row * case.cols + col)).copied()
        };
        let rows: Vec<_> = slots.clone().map(row).collect();
        let sum = want(&rows, &leaf[slots], case.leaves);
        plus.map_or(sum, |plus| sum.add(plus[i])).bits()
    };
    (0..case.tokens * case.cols).map(at).collect()
}

#[test]
fn rows_are_summed_up_the_tree_and_rounded_at_each_node() {
    for case in Case::all() {
        let mut x = normals(case.top_k as u32, case.slots() * case.cols);
        // The rows contain zeros of both signs: −0 must stay −0 if nothing is added to it.
        x.iter_mut().step_by(7).for_each(|x| *x = -0.0);
        let plus = normals(77, case.tokens * case.cols);
        let half = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        for with in [false, true] {
            let got = same_everywhere(|cpu| {
                [DType::F32, DType::Bf16].map(|dtype| {
                    let plus = tensor(cpu, &plus, dtype, case.cols);
                    bits(&run(cpu, &case, &tensor(cpu, &x, dtype, case.cols), with.then_some(&plus)))
                })
            });
            assert!(got[0] == expected(&case, &x, with.then_some(&plus[..])), "{case:?}");
            let (x, plus) = (half(&x), half(&plus));
            assert!(got[1] == expected(&case, &x, with.then_some(&plus[..])), "{case:?} in BF16");
        }
    }
}

#[test]
fn a_row_alone_is_passed_on_as_it_is() {
    // The only row has a NaN that no rounding would preserve, and one token has no rows.
    let nan = f32::from_bits(0xFFA1_2345);
    for cpu in every_cpu() {
        let rows = Tensor::from_f32(&cpu, &[nan, -0.0], 1, 2).unwrap();
        let half = Tensor::from_bf16(&cpu, &[bf16::from_bits(0xFF81), bf16::NEG_ZERO], 1, 2).unwrap();
        let sum = |rows: &Tensor<Cpu>| {
            let index = &cpu.upload(&[-1, 0, 0, 0, 0, -1]).unwrap();
            let leaf = &cpu.upload(&[3, 4, -1, 9, 7, 2]).unwrap();
            let op = CombineTree { rows, index, leaf, leaves: 7, plus: None, top_k: 3 };
            bits(&combine_tree(&cpu, op).unwrap())
        };
        assert_eq!(sum(&rows), [0xFFA1_2345, 0x8000_0000, 0, 0]);
        assert_eq!(sum(&half), [0xFF81, 0x8000, 0, 0]);
    }
}

#[test]
fn each_sum_is_rounded_and_neighbours_meet_first() {
    let cpu = Cpu::new(1).unwrap();
    let rows = Tensor::from_bf16(&cpu, &[256.0, 1.0, 1.0].map(bf16::from_f32), 3, 1).unwrap();
    let sum = |leaf: [i32; 3]| {
        let (index, leaf) = (&cpu.upload(&[0, 1, 2]).unwrap(), &cpu.upload(&leaf).unwrap());
        let op = CombineTree { rows: &rows, index, leaf, leaves: 4, plus: None, top_k: 3 };
        combine_tree(&cpu, op).unwrap().to_f32_vec(&cpu).unwrap()[0]
    };
    // 256 + 1 rounds to 256 in BF16.
    assert_eq!(sum([0, 1, 2]), 256.0);
    assert_eq!(sum([1, 2, 3]), 258.0);
    assert_eq!(sum([3, 0, 1]), 258.0);
    assert_eq!(sum([2, 2, 2]), 256.0, "at one leaf in slot order");
}

/// If sums are computed first within each rank's leaves and then over ranks, the bits are those of the whole tree. The bits are equal for
/// every power of two of ranks that divides the number of leaves.
#[test]
fn parts_of_a_tree_may_be_summed_elsewhere() {
    let cpu = Cpu::new(2).unwrap();
    for (leaves, top_k) in [(8, 8), (12, 3), (48, 6), (64, 8), (256, 8), (96, 5)] {
        let case = Case { tokens: 20, top_k, leaves, cols: 3, missing: 1, repeats: true };
        let (index, leaf) = case.slots_of();
        for dtype in [DType::F32, DType::Bf16] {
            let rows = tensor(&cpu, &normals(5, case.slots() * case.cols), dtype, case.cols);
            let plus = tensor(&cpu, &normals(6, case.tokens * case.cols), dtype, case.cols);
            let one = bits(&run(&cpu, &case, &rows, Some(&plus)));
            for ranks in [1, 2, 4, 8, 16, 32].into_iter().filter(|ranks| leaves % ranks == 0) {
                let (each, tokens) = (leaves / ranks, case.tokens);
                // There is a row for each token and rank, in rank order. The rows of tokens without a slot on the rank do not count.
                let (mut sums, mut is_there) = (Vec::new(), vec![false; tokens * ranks]);
                for rank in 0..ranks {
                    let local = |(slot, leaf): (usize, &i32)| {
                        let here = leaf - (rank * each) as i32;
                        let counts = (0..each as i32).contains(&here)
                            && (0..case.slots() as i32).contains(&index[slot]);
                        is_there[slot / top_k * ranks + rank] |= counts;
                        if counts { here } else { -1 }
                    };
                    let leaf: Vec<i32> = leaf.iter().enumerate().map(local).collect();
                    let (index, leaf) = (&cpu.upload(&index).unwrap(), &cpu.upload(&leaf).unwrap());
                    let op = CombineTree { rows: &rows, index, leaf, leaves: each, plus: None, top_k };
                    sums.extend(combine_tree(&cpu, op).unwrap().to_f32_vec(&cpu).unwrap());
                }
                let sums = tensor(&cpu, &sums, dtype, case.cols);
                let place = |i: usize| if is_there[i] { (i % ranks * tokens + i / ranks) as i32 } else { -1 };
                let index = cpu.upload(&(0..tokens * ranks).map(place).collect::<Vec<_>>()).unwrap();
                let leaf = cpu.upload(&(0..tokens * ranks).map(|i| (i % ranks) as i32).collect::<Vec<_>>());
                let (index, leaf) = (&index, &leaf.unwrap());
                let (rows, plus) = (&sums, Some(&plus));
                let op = CombineTree { rows, index, leaf, leaves: ranks, plus, top_k: ranks };
                assert_eq!(bits(&combine_tree(&cpu, op).unwrap()), one, "{leaves} leaves on {ranks} ranks");
            }
        }
    }
}

#[test]
fn what_cannot_be_summed_is_an_error() {
    let cpu = Cpu::new(1).unwrap();
    let rows = Tensor::from_f32(&cpu, &[1.0, 2.0], 1, 2).unwrap();
    let of = |index: &[i32], leaf: &[i32], leaves, plus: Option<&Tensor<Cpu>>| {
        let (index, leaf) = (&cpu.upload(index).unwrap(), &cpu.upload(leaf).unwrap());
        let op = CombineTree { rows: &rows, index, leaf, leaves, plus, top_k: 2 };
        combine_tree(&cpu, op).map(drop).unwrap_err().to_string()
    };
    assert_eq!(
        of(&[0; 3], &[0; 3], 4, None),
        "combine_tree: `index.len()` is 3, expected a multiple of top_k = 2"
    );
    assert_eq!(of(&[0; 4], &[0; 2], 4, None), "combine_tree: `leaf.len()` is 2, expected 4");
    assert!(of(&[0; 4], &[0; 4], 0, None).contains("`leaves` is 0"));
    assert!(of(&[0; 4], &[0; 4], 4, Some(&rows)).contains("shape of plus"));
}

#[test]
fn each_slot_finds_its_row() {
    let cpu = Cpu::new(1).unwrap();
    let row_slot = cpu.upload(&[4, -1, 0, 9, 2, i32::MIN]).unwrap();
    let found = find_slots(&cpu, FindSlots { row_slot: &row_slot, slots: 6 }).unwrap();
    assert_eq!(found.as_slice(), [2, -1, 4, -1, 0, -1]);
    let none = find_slots(&cpu, FindSlots { row_slot: &row_slot, slots: 0 }).unwrap();
    assert!(none.as_slice().is_empty());
}
