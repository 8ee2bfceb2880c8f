//! The text of `make.py`: a function of a counter alone. Each function here is the one of its name there.

/// Chunks of the text.
pub const CHUNKS: u64 = 160;

/// Bytes of a chunk, at least.
const CHUNK_BYTES: u64 = 1 << 16;

const CONTRACTIONS: [&str; 12] =
    ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "’s", "'x", "n't"];
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<think>"];
const PUNCTUATION: &str = ".,;:!?-()[]{}<>/\\|@#$%^&*_+=~`\"'";
const ENDS: [&str; 8] = ["\n", "\r\n", "\n\n", " \n", "\n  ", "\t", "\r", " \t \n"];
#[rustfmt::skip]
const SCRIPTS: [(u32, u64); 34] = [
    (0x00C0, 64), (0x0391, 57), (0x0410, 64), (0x05D0, 27), (0x0627, 42), (0x0660, 10), (0x0915, 37), (0x093E, 15), (0x0E01, 46),
    (0x3041, 86), (0x30A1, 90), (0x4E00, 512), (0xAC00, 512), (0x1100, 64), (0x0300, 112), (0x1F600, 80), (0x1D400, 64), (0x2000, 16),
    (0x2028, 8), (0x0085, 1), (0x00A0, 1), (0x3000, 1), (0x200B, 5), (0x2150, 60), (0xFB00, 7), (0x1E9E, 1), (0x0130, 2), (0x017F, 1),
    (0x212A, 2), (0x01C4, 9), (0x2160, 40), (0x24B6, 52), (0xFF21, 58), (0x10400, 80),
];

/// 64 bits of this counter (splitmix64).
pub fn draw(counter: u64) -> u64 {
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut z = counter.wrapping_mul(STEP).wrapping_add(STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn word(bits: u64) -> String {
    let letter = |i: u64| match (bits >> (8 + 5 * i)) & 31 {
        letter @ 0..26 => char::from(b"etaoinshrdlucmfw"[letter as usize & 15]),
        letter => char::from(b'a' + letter as u8 - 6),
    };
    let text: String = (0..=(bits & 7)).map(letter).collect();
    match bits >> 61 {
        0 => text[..1].to_uppercase() + &text[1..],
        1 => text.to_uppercase(),
        _ => text,
    }
}

fn any_point(bits: u64) -> char {
    let span = [0x800, 0x10000, 0x20000, 0x11_0000][(bits >> 40) as usize & 3];
    char::from_u32((((bits & 0xFFFF_FFFF) * span) >> 32) as u32).unwrap_or('A')
}

fn piece(counter: u64) -> String {
    let (kind, bits) = (draw(counter) & 31, draw(counter ^ (1 << 63)));
    let of = |all: &[&str], bits: u64| all[(bits % all.len() as u64) as usize].to_owned();
    let space = |is: u64| if is != 0 { " " } else { "" };
    match kind {
        0..12 => " ".to_owned() + &word(bits),
        12 | 13 => word(bits),
        14 => of(&CONTRACTIONS, bits),
        15 => {
            space(bits & 1).to_owned() + &((bits >> 8) % 10u64.pow(1 + ((bits >> 1) % 12) as u32)).to_string()
        }
        16 => " ".repeat(1 + (bits % 9) as usize),
        17 => of(&ENDS, bits & 7),
        18 => {
            let all = PUNCTUATION.as_bytes();
            let mark = char::from(all[(bits % all.len() as u64) as usize]);
            mark.to_string().repeat(1 + ((bits >> 8) % 4) as usize)
        }
        19 if bits.is_multiple_of(8) => of(&CONTROL, bits >> 8),
        19 => ".".to_owned(),
        20..28 => {
            let (first, count) = SCRIPTS[(bits % SCRIPTS.len() as u64) as usize];
            let point =
                |i: u64| char::from_u32(first + ((bits >> (8 + 7 * i)) % count) as u32).unwrap_or('A');
            let points: String = (0..=(bits >> 60) % 5).map(point).collect();
            space(bits & (1 << 59)).to_owned() + &points
        }
        _ => {
            let second = (bits & (1 << 63) != 0).then(|| any_point(draw(bits)));
            [Some(any_point(bits)), second].into_iter().flatten().collect()
        }
    }
}

/// The text of this chunk.
pub fn chunk(number: u64) -> String {
    let mut text = String::new();
    let mut counter = number * CHUNK_BYTES;
    while (text.len() as u64) < CHUNK_BYTES {
        text += &piece(counter);
        counter += 1;
    }
    text
}
