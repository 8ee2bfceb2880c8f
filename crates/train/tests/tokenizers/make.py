"""Small tokenizers with the pre-tokenizers of published ones, and digests of the ids that Python's `tokenizers` gives to 10 MB of made-up text.

    pip install tokenizers==0.23.3
    python make.py            writes NAME/tokenizer.json and NAME/ids.txt for each
    python make.py ids        the digests alone, of the tokenizers as they are

The text is a function of a counter alone (`piece`), and the test makes the same: tests/tokenizers.rs.
"""

import hashlib
import json
import pathlib
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
CHUNKS = 160
CHUNK_BYTES = 1 << 16
MASK = (1 << 64) - 1

CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "’s", "'x", "n't"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<think>"]
PUNCTUATION = ".,;:!?-()[]{}<>/\\|@#$%^&*_+=~`\"'"
# Alphabets, marks, digits, symbols and white space of many kinds: first code point and how many.
SCRIPTS = [
    (0x00C0, 64), (0x0391, 57), (0x0410, 64), (0x05D0, 27), (0x0627, 42), (0x0660, 10), (0x0915, 37), (0x093E, 15), (0x0E01, 46),
    (0x3041, 86), (0x30A1, 90), (0x4E00, 512), (0xAC00, 512), (0x1100, 64), (0x0300, 112), (0x1F600, 80), (0x1D400, 64), (0x2000, 16),
    (0x2028, 8), (0x0085, 1), (0x00A0, 1), (0x3000, 1), (0x200B, 5), (0x2150, 60), (0xFB00, 7), (0x1E9E, 1), (0x0130, 2), (0x017F, 1),
    (0x212A, 2), (0x01C4, 9), (0x2160, 40), (0x24B6, 52), (0xFF21, 58), (0x10400, 80),
]


def draw(counter):
    """64 bits of this counter (splitmix64)."""
    z = (counter * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def word(bits):
    """A word of ASCII letters, long ones rarer, capital or not."""
    length = 1 + (bits & 7)
    text = ""
    for i in range(length):
        # A few letters are frequent, so that there is something to merge.
        letter = (bits >> (8 + 5 * i)) & 31
        text += "etaoinshrdlucmfw"[letter & 15] if letter < 26 else chr(ord("a") + letter - 6)
    case = bits >> 61
    return text.capitalize() if case == 0 else text.upper() if case == 1 else text


def any_point(bits):
    """A code point of any plane, none of the surrogates; planes 0 and 1 more often than others."""
    span = (0x800, 0x10000, 0x20000, 0x110000)[(bits >> 40) & 3]
    point = (bits & 0xFFFFFFFF) * span >> 32
    return chr(point if not 0xD800 <= point < 0xE000 else 0x41)


def piece(counter):
    """The piece of text of this number."""
    bits = draw(counter)
    kind, bits = bits & 31, draw(counter ^ (1 << 63)) 
    if kind < 12:
        return " " + word(bits)
    if kind < 14:
        return word(bits)
    if kind == 14:
        return CONTRACTIONS[bits % len(CONTRACTIONS)]
    if kind == 15:
        return (" " if bits & 1 else "") + str((bits >> 8) % 10 ** (1 + (bits >> 1) % 12))
    if kind == 16:
        return " " * (1 + bits % 9)
    if kind == 17:
        return ("\n", "\r\n", "\n\n", " \n", "\n  ", "\t", "\r", " \t \n")[bits & 7]
    if kind == 18:
        return PUNCTUATION[bits % len(PUNCTUATION)] * (1 + (bits >> 8) % 4)
    if kind == 19:
        return CONTROL[(bits >> 8) % len(CONTROL)] if bits % 8 == 0 else "."
    if kind < 28:
        first, count = SCRIPTS[bits % len(SCRIPTS)]
        parts = [chr(first + (bits >> (8 + 7 * i)) % count) for i in range(1 + (bits >> 60) % 5)]
        return (" " if bits & (1 << 59) else "") + "".join(parts)
    return any_point(bits) + (any_point(draw(bits)) if bits & (1 << 63) else "")


def chunk(number):
    """The text of this chunk: pieces from `number * CHUNK_BYTES` on, until there are as many bytes."""
    parts, size, counter = [], 0, number * CHUNK_BYTES
    while size < CHUNK_BYTES:
        part = piece(counter)
        parts.append(part)
        size += len(part.encode())
        counter += 1
    return "".join(parts)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])


def split(*patterns):
    """These splits, one after the other, and then bytes."""
    parts = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return pre_tokenizers.Sequence(parts + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def made(name):
    """The tokenizer of this name, trained."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    special = [AddedToken(text, special=True, normalized=False) for text in CONTROL[:2]]
    if name == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name == "llama3":
        tokenizer.pre_tokenizer = split(LLAMA3)
    elif name == "qwen":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = split(QWEN)
    elif name == "deepseek":
        tokenizer.pre_tokenizer = split(r"\p{N}{1,3}", r"[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK)
    elif name == "o200k":
        tokenizer.pre_tokenizer = split(O200K)
    elif name == "llama2":
        # SentencePiece: a space is a letter, the first of a text is put there and taken away, and what is no token is its bytes.
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
        ])
    if name == "llama2":
        first = ["<unk>", "<s>", "</s>"]
        trainer = trainers.BpeTrainer(
            vocab_size=800, special_tokens=first + [f"<0x{byte:02X}>" for byte in range(256)], limit_alphabet=200,
            max_token_length=8, show_progress=False,
        )
    else:
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=1000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
        )
    # Half of it without what the test is made of, or the merges are of noise.
    words = "".join(" " + word(draw(3 * i)) for i in range(40000))
    tokenizer.train_from_iterator([words] + [chunk(number) for number in range(1000, 1004)], trainer)
    if name == "llama2":
        # A trainer makes bytes control tokens; they are tokens of the vocabulary.
        whole = json.loads(tokenizer.to_str())
        whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < 3]
        tokenizer = Tokenizer.from_str(json.dumps(whole))
        bos = ("<s>", 1)
    else:
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens([AddedToken(CONTROL[2], special=False, normalized=False)])
        bos = (CONTROL[0], tokenizer.token_to_id(CONTROL[0]))
    if name in ["llama2", "llama3"]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]} $B", special_tokens=[bos]
        )
    return tokenizer


def digest(ids):
    """The first eight bytes of the SHA-256 of the ids, each four bytes."""
    return hashlib.sha256(b"".join(id.to_bytes(4, "little") for id in ids)).hexdigest()[:16]


def main():
    texts = [chunk(number) for number in range(CHUNKS)]
    for name in ["gpt2", "llama3", "qwen", "deepseek", "o200k", "llama2"]:
        folder = HERE / name
        path = folder / "tokenizer.json"
        if sys.argv[1:] != ["ids"]:
            folder.mkdir(exist_ok=True)
            path.write_text(json.dumps(json.loads(made(name).to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")
        lines = []
        tokenizer = Tokenizer.from_file(str(path))
        for plain in [True, False]:
            tokenizer.encode_special_tokens = plain
            lines.append([digest(one.ids) for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)])
        rows = [f"{plain} {control}\n" for plain, control in zip(*lines)]
        (folder / "ids.txt").write_text("".join(rows))
        print(name, tokenizer.get_vocab_size(), path.stat().st_size, sum(a != b for a, b in zip(*lines)))
    print(hashlib.sha256("".join(texts).encode()).hexdigest())


if __name__ == "__main__":
    main()
