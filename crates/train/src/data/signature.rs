//! Binary file formats, recognized by their first bytes.

use Mark::{At, Both, Safetensors, Zlib};

/// The format of a file, with advice, if the file begins like a known binary format.
pub(super) fn kind_of(bytes: &[u8]) -> Option<String> {
    let (what, advice, _) = KINDS.iter().find(|(.., marks)| marks.iter().any(|mark| mark.is_of(bytes)))?;
    Some(format!("is {what}, expected a text: {advice}"))
}

/// A binary format: its name, the advice on the format, and the marks that identify it.
type Kind = (&'static str, &'static str, &'static [Mark]);

/// Bytes at a fixed offset in every file of a format.
enum Mark {
    /// The mark consists of these bytes at this offset.
    At(usize, &'static [u8]),
    /// The mark consists of the first bytes, and of other bytes at an offset.
    Both(&'static [u8], usize, &'static [u8]),
    /// The mark is a zlib header (RFC 1950, 2.2) with a window of 32 KiB: two bytes, then a deflate block that no text contains.
    Zlib,
    /// The mark is a safetensors header: a length, then JSON of that length.
    Safetensors,
}

impl Mark {
    fn is_of(&self, bytes: &[u8]) -> bool {
        let stands = |at: usize, mark: &[u8]| bytes.get(at..).is_some_and(|rest| rest.starts_with(mark));
        match self {
            Self::At(at, mark) => stands(*at, mark),
            Self::Both(first, at, second) => stands(0, first) && stands(*at, second),
            Self::Zlib => {
                let [0x78, level @ (0x01 | 0x5e | 0x9c | 0xda), ..] = bytes else { return false };
                // A text may begin with "x^", but the output of zlib soon contains bytes that are not ASCII.
                *level != 0x5e || bytes.iter().take(64).any(|byte| !byte.is_ascii())
            }
            Self::Safetensors => {
                let Some((length, rest)) = bytes.split_first_chunk::<8>() else { return false };
                let length = u64::from_le_bytes(*length);
                length < 1 << 32 && length as usize <= rest.len() && rest.starts_with(b"{\"")
            }
        }
    }
}

/// Advice for files of other formats that contain text.
const EXPORT: &str = "export what it holds as text";

/// Advice for files without text.
const NO_TEXT: &str = "name another file";

/// The known binary formats, with the most specific marks first.
const KINDS: &[Kind] = &[
    (
        "a zip archive",
        "unpack it with `unzip`",
        &[At(0, b"PK\x03\x04"), At(0, b"PK\x05\x06"), At(0, b"PK\x07\x08")],
    ),
    ("packed with xz", "unpack it with `xz -d`", &[At(0, b"\xfd7zXZ\0")]),
    // After the compression level, a bzip2 file contains the digits of pi, or of the square root of pi if the file is empty.
    (
        "packed with bzip2",
        "unpack it with `bzip2 -d`",
        &[Both(b"BZh", 4, b"1AY&SY"), Both(b"BZh", 4, b"\x17\x72\x45\x38\x50\x90")],
    ),
    ("a 7z archive", "unpack it with `7z x`", &[At(0, b"7z\xbc\xaf\x27\x1c")]),
    ("packed with lz4", "unpack it with `lz4 -d`", &[At(0, b"\x04\x22\x4d\x18")]),
    ("packed with zlib", "unpack it with `zlib-flate -uncompress` or `pigz -dz`", &[Zlib]),
    ("a tar archive", "unpack it with `tar -x`", &[At(257, b"ustar")]),
    ("a RAR archive", "unpack it with `unrar x`", &[At(0, b"Rar!\x1a\x07")]),
    ("an Arrow file", "export its column of text", &[At(0, b"ARROW1\0\0")]),
    ("an SQLite database", EXPORT, &[At(0, b"SQLite format 3\0")]),
    ("an HDF5 file", EXPORT, &[At(0, b"\x89HDF\r\n\x1a\n")]),
    ("an array of NumPy", EXPORT, &[At(0, b"\x93NUMPY")]),
    ("a PDF document", "export it with `pdftotext`", &[At(0, b"%PDF-")]),
    ("a PNG picture", NO_TEXT, &[At(0, b"\x89PNG\r\n\x1a\n")]),
    ("a JPEG picture", NO_TEXT, &[At(0, b"\xff\xd8\xff")]),
    ("a program (ELF)", NO_TEXT, &[At(0, b"\x7fELF")]),
    ("a GGUF model", NO_TEXT, &[Both(b"GGUF", 6, b"\0\0")]),
    ("a file of tensors (safetensors)", NO_TEXT, &[Safetensors]),
];
