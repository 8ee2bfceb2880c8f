#!/usr/bin/env python3
"""Holds the tokenizer that `transformers` makes of a checkpoint to the ids that Nibble trained on.

    pip install transformers
    python3 tokenizer.py runs/NAME/checkpoints/STEP

A token of a text is a byte, whatever the bytes: composed and decomposed letters, line ends, names of other tokenizers' special tokens. A
token of the built-in language is a symbol, numbered as in `tokenizer.json`. Exit code 1 if an id is another one.
"""

import json
import pathlib
import sys

from transformers import AutoTokenizer

TEXTS = [
    "First Citizen: hello",
    "\u00e9 e\u0301 \ufb01 \u212b",
    "\U0001f600 ok",
    "a\r\nb\n\n  c\t",
    "  leading and trailing  ",
    "<|endoftext|> <s> </s> <unk>",
    "it 's n't , so . no ?",
    bytes(range(1, 128)).decode(),
]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    checkpoint = sys.argv[1]
    vocab = json.loads((pathlib.Path(checkpoint) / "tokenizer.json").read_text())["model"]["vocab"]
    texts = TEXTS if len(vocab) == 256 else ["".join(vocab)]
    ids = (lambda text: list(text.encode())) if len(vocab) == 256 else (lambda text: [vocab[c] for c in text])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    wrong = [text for text in texts if tokenizer(text)["input_ids"] != ids(text) or tokenizer.decode(ids(text)) != text]
    extra = set(tokenizer(texts[0])) - {"input_ids", "attention_mask"}
    good = not wrong and not extra and len(tokenizer) == len(vocab)
    print(f"{type(tokenizer).__name__}: {len(tokenizer)} tokens, {len(texts)} texts: {'PASS' if good else 'FAIL'}", *map(ascii, wrong), *extra)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
