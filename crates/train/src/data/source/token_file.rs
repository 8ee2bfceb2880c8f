//! Files that contain only token ids (`.bin`): files of llm.c, which have a header, and files of nanoGPT, which have none. A document ends
//! with the id of the EOS token.

use std::io::{BufRead, Read};

use super::{Asked, Content, DataFile, MOST_ROW_BYTES, PIECE_BYTES, Piece, Pieces, Row, Source, damaged};
use crate::error::{Error, Result};

/// A file of token ids.
pub(super) struct TokenFile;

/// Size of llm.c's header: 256 words of 32 bits. The first words are the mark, the version, and the number of tokens.
const HEADER_BYTES: usize = 256 * 4;

/// The marks of llm.c's files, each with the file's version and the number of bytes per id.
const LLM_C: [(u32, u32, usize); 2] = [(20_240_520, 1, 2), (20_240_801, 7, 4)];

/// Number of bytes per id in nanoGPT's files.
const NANO_GPT: usize = 2;

/// Word number `number` of the header.
fn word(head: &[u8], number: usize) -> Option<u32> {
    head.get(4 * number..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

/// The entry of [`LLM_C`] whose mark is at the beginning of the file.
fn of_llm_c(head: &[u8]) -> Option<(u32, u32, usize)> {
    LLM_C.into_iter().find(|(mark, ..)| word(head, 0) == Some(*mark))
}

/// Whether 16-bit ids are probably halves of 32-bit ids: every second id is 0, and at least one other id is not 0.
fn has_empty_halves(head: &[u8]) -> bool {
    // A smaller number of pairs may contain zeros by chance.
    const ENOUGH: usize = 16;
    let (pairs, _) = head.as_chunks::<4>();
    pairs.len() >= ENOUGH
        && pairs.iter().all(|[.., third, fourth]| [*third, *fourth] == [0; 2])
        && pairs.iter().any(|[first, second, ..]| [*first, *second] != [0; 2])
}

impl Source for TokenFile {
    fn name(&self) -> &'static str {
        "token ids"
    }

    fn is_of(&self, file: &DataFile) -> bool {
        of_llm_c(&file.head).is_some() || file.is_named(&[".bin"])
    }

    fn id_bits(&self, file: &DataFile) -> Option<u32> {
        Some(8 * of_llm_c(&file.head).map_or(NANO_GPT, |(.., width)| width) as u32)
    }

    fn open(&self, file: &DataFile, asked: &Asked) -> Result<Box<dyn Pieces>> {
        asked.require_no_keys(file, "a file of token ids")?;
        let mut reader = file.reader()?;
        let (width, tokens) = match of_llm_c(&file.head) {
            None if has_empty_halves(&file.head) => {
                let why = "is read as ids of 16 bits, and every second one of its first is 0: its ids have 32 bits; write them with 16, or with \
                           llm.c's header";
                return Err(Error::data(&file.path, why));
            }
            None => (NANO_GPT, None),
            Some((mark, version, width)) => {
                let (Some(said), Some(tokens)) = (word(&file.head, 1), word(&file.head, 2)) else {
                    return Err(damaged(&file.path, "ends within its header"));
                };
                if said != version {
                    let why = format!("is of llm.c, {mark}, in version {said}, expected {version}");
                    return Err(Error::data(&file.path, why));
                }
                let skipped =
                    std::io::copy(&mut (&mut reader).take(HEADER_BYTES as u64), &mut std::io::sink());
                if skipped.map_err(|e| file.broken(&e))? < HEADER_BYTES as u64 {
                    return Err(damaged(&file.path, "ends within its header"));
                }
                (width, Some(u64::from(tokens)))
            }
        };
        let file = file.clone();
        Ok(Box::new(Ids {
            reader,
            file,
            width,
            tokens,
            end: asked.end,
            read: 0,
            rest: Vec::new(),
            begins: true,
            over: false,
        }))
    }
}

struct Ids {
    reader: Box<dyn BufRead + Send>,
    file: DataFile,
    width: usize,
    /// Number of tokens in the header, if there is a header.
    tokens: Option<u64>,
    /// The id that ends a document.
    end: Option<u32>,
    /// Number of ids in the earlier pieces.
    read: u64,
    /// Ids that have been read ahead, in reverse order.
    rest: Vec<u32>,
    /// Whether the next id begins a document.
    begins: bool,
    /// Whether the file has been read to its end.
    over: bool,
}

impl Ids {
    /// Refills `rest`, which must be empty.
    fn fill(&mut self) -> Result<()> {
        let mut bytes = Vec::new();
        let count = (PIECE_BYTES / 4 * self.width) as u64;
        let read = (&mut self.reader).take(count).read_to_end(&mut bytes);
        read.map_err(|e| self.file.broken(&e))?;
        self.over = (bytes.len() as u64) < count;
        if !bytes.len().is_multiple_of(self.width) {
            let at = self.read + (bytes.len() / self.width) as u64;
            let why = format!("ends within token {}, of {} bytes each", at + 1, self.width);
            return Err(damaged(&self.file.path, why));
        }
        let ids = bytes.chunks_exact(self.width).rev().map(|id| match *id {
            [a, b] => u32::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
            // The other widths do not occur, because the width is 2 or 4.
            _ => 0,
        });
        self.rest = ids.collect();
        Ok(())
    }

    /// Checks at the end of the file that the file has as many tokens as its header says.
    fn ended(&self) -> Result<Option<Row>> {
        match self.tokens {
            _ if self.read == 0 => Err(Error::data(&self.file.path, "is empty")),
            Some(tokens) if tokens != self.read => {
                let why = format!("has {} tokens, and its header says {tokens}", self.read);
                Err(damaged(&self.file.path, why))
            }
            _ => Ok(None),
        }
    }
}

impl Pieces for Ids {
    fn unit(&self) -> &'static str {
        "token"
    }

    fn next(&mut self) -> Result<Option<Row>> {
        let (number, begins, mut ids) = (self.read + 1, self.begins, Vec::new());
        let most = if self.end.is_some() { MOST_ROW_BYTES } else { PIECE_BYTES } / 4;
        let mut ends = false;
        while ids.len() < most && !ends {
            if self.rest.is_empty() && !self.over {
                self.fill()?;
            }
            let Some(id) = self.rest.pop() else { break };
            ends = self.end == Some(id);
            ids.push(id);
        }
        if ids.is_empty() {
            return self.ended();
        }
        self.read += ids.len() as u64;
        self.begins = ends;
        // The last document need not end with the EOS id.
        ends |= self.rest.is_empty() && self.over;
        Ok(Some(Row { number, holds: Ok(Piece { begins, ends, content: Content::Ids(ids) }) }))
    }
}
