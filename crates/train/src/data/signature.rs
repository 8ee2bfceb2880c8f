//! Kinds of files that are no text, known by their first bytes.

/// What a file is and what to do about it, if it begins like one of these.
pub(super) fn kind_of(bytes: &[u8]) -> Option<String> {
    let kind = KINDS.iter().find(|kind| kind.marks.iter().any(|mark| mark.is_of(bytes)))?;
    Some(format!("is {}, expected a text: {}", kind.what, kind.advice))
}

/// A kind of file that is no text.
struct Kind {
    what: &'static str,
    advice: &'static str,
    marks: &'static [Mark],
}

/// What stands at an offset of every file of a kind.
enum Mark {
    /// These bytes.
    At(usize, &'static [u8]),
    /// These, and those at another offset.
    Both(&'static [u8], usize, &'static [u8]),
    /// A header of zlib (RFC 1950, 2.2) with a window of 32 KiB: two bytes, and after them a block of deflate that no text has.
    Zlib,
    /// A header of safetensors: its length, then JSON of so many bytes.
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
                // "x^" begins texts; what zlib makes is not ASCII for long.
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

/// Advice for what holds a text in some form of its own.
const EXPORT: &str = "export what it holds as text";

/// Advice for what holds none.
const NO_TEXT: &str = "name another file";

/// From the most particular mark on.
const KINDS: &[Kind] = &[
    Kind {
        what: "a zip archive",
        advice: "unpack it with `unzip`",
        marks: &[Mark::At(0, b"PK\x03\x04"), Mark::At(0, b"PK\x05\x06"), Mark::At(0, b"PK\x07\x08")],
    },
    Kind { what: "packed with xz", advice: "unpack it with `xz -d`", marks: &[Mark::At(0, b"\xfd7zXZ\0")] },
    // After the level comes the number whose digits are those of pi, or of its root where the file is empty.
    Kind {
        what: "packed with bzip2",
        advice: "unpack it with `bzip2 -d`",
        marks: &[Mark::Both(b"BZh", 4, b"1AY&SY"), Mark::Both(b"BZh", 4, b"\x17\x72\x45\x38\x50\x90")],
    },
    Kind {
        what: "a 7z archive",
        advice: "unpack it with `7z x`",
        marks: &[Mark::At(0, b"7z\xbc\xaf\x27\x1c")],
    },
    Kind {
        what: "packed with lz4",
        advice: "unpack it with `lz4 -d`",
        marks: &[Mark::At(0, b"\x04\x22\x4d\x18")],
    },
    Kind {
        what: "packed with zlib",
        advice: "unpack it with `zlib-flate -uncompress` or `pigz -dz`",
        marks: &[Mark::Zlib],
    },
    Kind { what: "a tar archive", advice: "unpack it with `tar -x`", marks: &[Mark::At(257, b"ustar")] },
    Kind {
        what: "a RAR archive",
        advice: "unpack it with `unrar x`",
        marks: &[Mark::At(0, b"Rar!\x1a\x07")],
    },
    Kind { what: "an Arrow file", advice: "export its column of text", marks: &[Mark::At(0, b"ARROW1\0\0")] },
    Kind { what: "an SQLite database", advice: EXPORT, marks: &[Mark::At(0, b"SQLite format 3\0")] },
    Kind { what: "an HDF5 file", advice: EXPORT, marks: &[Mark::At(0, b"\x89HDF\r\n\x1a\n")] },
    Kind { what: "an array of NumPy", advice: EXPORT, marks: &[Mark::At(0, b"\x93NUMPY")] },
    Kind { what: "a PDF document", advice: "export it with `pdftotext`", marks: &[Mark::At(0, b"%PDF-")] },
    Kind { what: "a PNG picture", advice: NO_TEXT, marks: &[Mark::At(0, b"\x89PNG\r\n\x1a\n")] },
    Kind { what: "a JPEG picture", advice: NO_TEXT, marks: &[Mark::At(0, b"\xff\xd8\xff")] },
    Kind { what: "a program (ELF)", advice: NO_TEXT, marks: &[Mark::At(0, b"\x7fELF")] },
    Kind { what: "a GGUF model", advice: NO_TEXT, marks: &[Mark::Both(b"GGUF", 6, b"\0\0")] },
    Kind { what: "a file of tensors (safetensors)", advice: NO_TEXT, marks: &[Mark::Safetensors] },
];
