//! Golden vectors: safetensors files produced by independent implementations.

use half::bf16;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

/// The folder of real texts and of golden vectors from public implementations: `$NIBBLE_TESTDATA`, or `testdata/` at the root of the
/// repository if the variable is not set. The result is `None` if the folder does not exist.
///
/// # Panics
/// Panics if the variable is set but does not name a folder, because the tests that need the folder were then explicitly requested.
pub fn testdata() -> Option<PathBuf> {
    match std::env::var_os("NIBBLE_TESTDATA") {
        Some(path) => {
            let path = PathBuf::from(path);
            assert!(path.is_dir(), "NIBBLE_TESTDATA is {}, which is not a folder", path.display());
            Some(path)
        }
        None => {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
            path.is_dir().then_some(path)
        }
    }
}

/// Prints that a test, or a part of a test, was not run.
pub fn skip(what: &str) {
    println!("skipped: {what}");
}

/// One safetensors file.
#[derive(Debug, Clone)]
pub struct Vectors {
    name: String,
    bytes: Vec<u8>,
}

impl Vectors {
    /// Opens the golden vectors of this name, which public implementations produced, and returns them with the file's path,
    /// `vectors/NAME.safetensors` in [`testdata()`]. Without the folder [`testdata()`], the function opens the repository's small vectors
    /// and prints a skip message.
    ///
    /// # Panics
    /// Panics if the folder exists but lacks this file.
    pub fn open(name: &str) -> (Self, PathBuf) {
        let folder = testdata().map(|root| root.join("vectors")).unwrap_or_else(|| {
            skip(&format!("golden vectors {name} of public implementations (NIBBLE_TESTDATA is not set)"));
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../formats/tests/vectors")
        });
        let path = folder.join(format!("{name}.safetensors"));
        (Self::read(&path), path)
    }

    /// Opens any safetensors file.
    ///
    /// # Panics
    /// Panics if the file cannot be read, or is not a safetensors file.
    pub fn read(path: &Path) -> Self {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{name}: {e}"));
        let vectors = Self { name, bytes };
        vectors.file();
        vectors
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    fn with<T>(&self, tensor: &str, read: impl FnOnce(Dtype, &[usize], &[u8]) -> T) -> T {
        let file = self.file();
        let view = file.tensor(tensor).unwrap_or_else(|e| panic!("{}: {tensor}: {e}", self.name));
        read(view.dtype(), view.shape(), view.data())
    }

    fn typed<T: bytemuck::Pod>(&self, tensor: &str, dtypes: &[Dtype]) -> Vec<T> {
        self.with(tensor, |dtype, _, data| {
            assert!(
                dtypes.contains(&dtype),
                "{}: {tensor} holds {dtype:?}, expected one of {dtypes:?}",
                self.name
            );
            bytemuck::pod_collect_to_vec(data)
        })
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.file().names().into_iter().map(str::to_owned).collect();
        names.sort();
        names
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, tensor: &str) -> bool {
        self.file().tensor(tensor).is_ok()
    }

    /// A tensor's shape.
    ///
    /// # Panics
    /// Panics if no tensor has this name. The following functions also panic in this case, and if the tensor has another type.
    pub fn shape(&self, tensor: &str) -> Vec<usize> {
        self.with(tensor, |_, shape, _| shape.to_vec())
    }

    /// A matrix's shape.
    pub fn matrix_shape(&self, tensor: &str) -> [usize; 2] {
        let shape = self.shape(tensor);
        shape.try_into().unwrap_or_else(|s| panic!("{}: {tensor} is {s:?}, expected a matrix", self.name))
    }

    /// The bytes of a tensor whose elements are unsigned or signed bytes.
    pub fn u8s(&self, tensor: &str) -> Vec<u8> {
        self.typed(tensor, &[Dtype::U8, Dtype::I8])
    }

    /// The values of a BF16 tensor.
    pub fn bf16s(&self, tensor: &str) -> Vec<bf16> {
        self.typed(tensor, &[Dtype::BF16])
    }

    /// The values of an F32 or BF16 tensor, converted to F32.
    pub fn f32s(&self, tensor: &str) -> Vec<f32> {
        match self.with(tensor, |dtype, _, _| dtype) {
            Dtype::BF16 => self.bf16s(tensor).into_iter().map(bf16::to_f32).collect(),
            _ => self.typed(tensor, &[Dtype::F32]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    fn sample() -> Vectors {
        let (codes, x) = ([1u8, 2, 255], [1.5f32, -2.0].map(f32::to_le_bytes).concat());
        let y = [bf16::from_f32(0.5)].map(|v| v.to_bits().to_le_bytes()).concat();
        let tensors = [
            ("codes", TensorView::new(Dtype::U8, vec![3], &codes).unwrap()),
            ("x", TensorView::new(Dtype::F32, vec![1, 2], &x).unwrap()),
            ("y", TensorView::new(Dtype::BF16, vec![1], &y).unwrap()),
        ];
        Vectors { name: "sample".into(), bytes: safetensors::serialize(tensors, None).unwrap() }
    }

    #[test]
    fn tensors_come_out_typed() {
        let v = sample();
        assert_eq!(v.names(), ["codes", "x", "y"]);
        assert_eq!(v.u8s("codes"), [1, 2, 255]);
        assert_eq!((v.f32s("x"), v.matrix_shape("x")), (vec![1.5, -2.0], [1, 2]));
        assert_eq!((v.f32s("y"), v.shape("y")), (vec![0.5], vec![1]));
        assert!(v.has("x") && !v.has("z"));
    }

    #[test]
    #[should_panic(expected = "sample: codes holds U8, expected one of [F32]")]
    fn a_wrong_type_is_named() {
        sample().f32s("codes");
    }

    #[test]
    fn golden_vectors_open() {
        let (v, _) = Vectors::open("decode_tables");
        assert_eq!(v.f32s("decode_e8m0").len(), 256);
    }
}
