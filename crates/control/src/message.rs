//! The messages of the protocol: one message per frame, followed by the bytes of rows, if any.

use crate::failure::{Failure, NAME, Status, cut};
use crate::secret::{Nonce, Proof};
use bytes::{Buf, Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio_util::codec::LengthDelimitedCodec;

/// The first bytes of the first message of a hub.
pub const MAGIC: [u8; 8] = *b"nibble\0c";
/// Version of the protocol, which must be increased when a message changes.
pub const PROTOCOL: u16 = 1;
/// Maximum length of a frame before authentication, in bytes.
pub const SMALL_FRAME: usize = 64 << 10;
/// Maximum length in bytes of a frame that contains rows, including its message.
pub const FRAME: usize = PIECE + SMALL_FRAME;
/// Maximum number of bytes of rows in one frame; the limit keeps other messages from waiting long.
pub const PIECE: usize = 1 << 20;

/// The hub's first message.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    pub magic: [u8; 8],
    pub protocol: u16,
    pub nonce: Nonce,
}

/// The client's answer to [`Hello`]. `join` contains the encoded bytes of a [`Join`](crate::Join), because the proof is computed from these
/// bytes.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub nonce: Nonce,
    pub proof: Proof,
    pub join: Vec<u8>,
}

/// The hub's answer to an [`Entry`].
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// The client has authenticated; `proof` authenticates the hub.
    Welcome { proof: Proof },
    /// The client has not authenticated.
    Stranger,
}

/// Messages from a rank to the hub.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Up {
    /// Heartbeat with the rank's status.
    Alive(Status),
    /// Rows for another rank.
    Rows { to: usize, piece: Piece },
    /// The rank has failed.
    Failed { status: Status, cause: String, is_user_error: bool },
    /// The rank's work is done, and it leaves the run.
    Leave,
}

/// Messages from the hub to a rank.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Down {
    /// Heartbeat with the status of rank 0.
    Alive(Status),
    /// All ranks have joined; `host_0` is the host of rank 0.
    AllHere { host_0: String },
    /// Rows from another rank.
    Rows { from: usize, piece: Piece },
    /// Another rank has left without an error.
    Left(usize),
    /// The run has failed.
    Failed(Failure),
    /// Confirms that the rank has left.
    Goodbye,
}

/// The kind of bytes that follow a message.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Piece {
    /// The first piece of rows, which have `bytes` bytes in total.
    First { circle: u32, number: u64, call: String, bytes: u64 },
    /// A later piece of the same rows.
    More,
}

/// A piece of the rows that a rank sends to another rank in the `number`-th collective of a circle (a group of ranks).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// Index of the circle (the group of ranks).
    pub circle: u32,
    /// Number of the collective in the circle.
    pub number: u64,
    /// The collective's name, for error messages; the name is cut at 1 KiB.
    pub call: String,
    /// The sent bytes.
    pub bytes: Vec<u8>,
}

/// A message, and the bytes that follow the message.
#[derive(Debug)]
pub struct Frame<M> {
    pub message: M,
    pub body: Bytes,
}

impl<M> From<M> for Frame<M> {
    fn from(message: M) -> Self {
        Self { message, body: Bytes::new() }
    }
}

/// A codec of length-prefixed frames of at most `most` bytes.
pub fn codec(most: usize) -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder().max_frame_length(most).new_codec()
}

/// Encodes a message and the bytes that follow the message as a frame.
pub fn encode<M: Serialize>(message: &M, body: &[u8]) -> std::io::Result<Bytes> {
    let head = postcard::to_stdvec(message).map_err(std::io::Error::other)?;
    let mut bytes = BytesMut::with_capacity(head.len() + body.len());
    bytes.extend_from_slice(&head);
    bytes.extend_from_slice(body);
    Ok(bytes.freeze())
}

/// Decodes a frame into its message and the bytes that follow; the error describes what is invalid.
pub fn decode<M: DeserializeOwned>(mut frame: Bytes) -> Result<Frame<M>, String> {
    let (message, rest) = postcard::take_from_bytes(&frame).map_err(|error| error.to_string())?;
    let body = rest.len();
    frame.advance(frame.len() - body);
    Ok(Frame { message, body: frame })
}

/// Decodes a frame that contains only a message.
pub fn decode_whole<M: DeserializeOwned>(frame: Bytes) -> Result<M, String> {
    let frame = decode(frame)?;
    match frame.body.len() {
        0 => Ok(frame.message),
        more => Err(format!("{more} bytes follow a message")),
    }
}

/// Splits the bytes of rows into frames, in order.
pub fn pieces(rows: Rows) -> impl Iterator<Item = Frame<Piece>> {
    let Rows { circle, number, mut call, bytes } = rows;
    cut(&mut call, NAME);
    let mut rest = Bytes::from(bytes);
    let mut head = Some(Piece::First { circle, number, call, bytes: rest.len() as u64 });
    std::iter::from_fn(move || {
        let message = match head.take() {
            None if rest.is_empty() => return None,
            first => first.unwrap_or(Piece::More),
        };
        Some(Frame { message, body: rest.split_to(PIECE.min(rest.len())) })
    })
}

/// Counts the bytes of rows that have been announced but have not arrived yet. The hub uses this counter to check a sender, and
/// [`Assembly`] uses it to reassemble rows.
#[derive(Debug, Default)]
pub struct Flow {
    left: u64,
}

impl Flow {
    /// Accepts a piece of `bytes` bytes; the error says why the piece does not fit the earlier pieces.
    pub fn take(&mut self, piece: &Piece, bytes: usize) -> Result<(), String> {
        let bytes = bytes as u64;
        let left = match piece {
            Piece::First { .. } if self.left > 0 => {
                return Err(format!("{} bytes of rows are missing", self.left));
            }
            Piece::More if self.left == 0 => return Err("bytes that belong to no rows".to_owned()),
            // The check refuses empty frames, of which a rank could otherwise send any number.
            _ if bytes == 0 && !matches!(piece, Piece::First { bytes: 0, .. }) => {
                return Err("a piece without bytes".to_owned());
            }
            Piece::First { bytes, .. } => *bytes,
            Piece::More => self.left,
        };
        self.left = left
            .checked_sub(bytes)
            .ok_or_else(|| format!("{bytes} bytes where {left} are left of some rows"))?;
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.left == 0
    }
}

/// Reassembles the rows of one sending rank from their pieces.
#[derive(Debug, Default)]
pub struct Assembly {
    flow: Flow,
    rows: Option<Rows>,
}

impl Assembly {
    /// Adds a piece; if the piece is the last one, returns the complete rows. The error says why a piece does not fit the earlier pieces.
    pub fn take(&mut self, piece: Piece, body: &[u8]) -> Result<Option<Rows>, String> {
        self.flow.take(&piece, body.len())?;
        if let Piece::First { circle, number, call, bytes } = piece {
            // The buffer starts small, because a sender may announce more bytes than it sends.
            let room = usize::try_from(bytes).unwrap_or(usize::MAX).min(PIECE);
            self.rows = Some(Rows { circle, number, call, bytes: Vec::with_capacity(room) });
        }
        if let Some(rows) = &mut self.rows {
            rows.bytes.extend_from_slice(body);
        }
        Ok(self.rows.take_if(|_| self.flow.is_done()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(bytes: usize) -> Rows {
        let bytes = (0..bytes).map(|i| (i % 251) as u8).collect();
        Rows { circle: 1, number: 7, call: "all_gather".into(), bytes }
    }

    fn first(bytes: u64) -> Piece {
        Piece::First { circle: 0, number: 0, call: String::new(), bytes }
    }

    #[test]
    fn rows_are_cut_and_put_together() {
        for (bytes, frames) in [(0, 1), (1, 1), (PIECE, 1), (PIECE + 1, 2), (3 * PIECE, 3)] {
            let mut assembly = Assembly::default();
            let mut seen = Vec::new();
            for (i, piece) in pieces(rows(bytes)).enumerate() {
                let frame = encode(&Up::Rows { to: 3, piece: piece.message }, &piece.body).unwrap();
                assert!(frame.len() <= FRAME);
                let Frame { message: Up::Rows { to: 3, piece }, body } = decode(frame).unwrap() else {
                    panic!("another message")
                };
                seen.extend(assembly.take(piece, &body).unwrap().map(|rows| (i, rows)));
            }
            assert_eq!(seen, [(frames - 1, rows(bytes))]);
        }
    }

    #[test]
    fn pieces_that_do_not_fit_are_found() {
        let taken = |pieces: &[(u64, usize)]| {
            let mut flow = Flow::default();
            // 0 stands for a later piece, and n for a first piece of n - 1 bytes.
            pieces
                .iter()
                .try_for_each(|(n, body)| flow.take(&n.checked_sub(1).map_or(Piece::More, first), *body))
        };
        assert_eq!(taken(&[(5, 2), (0, 2), (1, 0), (2, 1)]), Ok(()));
        assert_eq!(taken(&[(0, 1)]).unwrap_err(), "bytes that belong to no rows");
        assert_eq!(taken(&[(5, 2), (5, 2)]).unwrap_err(), "2 bytes of rows are missing");
        assert_eq!(taken(&[(5, 2), (0, 3)]).unwrap_err(), "3 bytes where 2 are left of some rows");
        assert_eq!(taken(&[(5, 5)]).unwrap_err(), "5 bytes where 4 are left of some rows");
        assert_eq!(taken(&[(5, 2), (0, 0)]).unwrap_err(), "a piece without bytes");
    }

    #[test]
    fn rows_of_any_length_take_no_memory_before_they_come() {
        let mut assembly = Assembly::default();
        assert_eq!(assembly.take(first(u64::MAX), b"x"), Ok(None));
    }

    #[test]
    fn a_message_stands_alone_unless_it_is_of_rows() {
        let bytes = encode(&Down::Left(3), b"").unwrap();
        assert_eq!(decode_whole::<Down>(bytes), Ok(Down::Left(3)));
        let more = encode(&Down::Left(3), b"xy").unwrap();
        assert_eq!(decode_whole::<Down>(more).unwrap_err(), "2 bytes follow a message");
        assert!(decode::<Down>(Bytes::from_static(b"\xff")).is_err());
    }
}
