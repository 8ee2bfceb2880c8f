"""Code points whose ids differ between Nibble and Python's `tokenizers`, in a few contexts, for each tokenizer here.

    cargo build --release -p nibble-train --example tokenize
    python code_points.py [PROGRAM]

The two differ in their engines of regular expressions, Oniguruma in Python's package and fancy-regex here, and in the Unicode version that each was made with.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unicodedata

from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).parent
PROGRAM = HERE.parents[3] / "target/release/examples/tokenize"
# A code point alone, doubled, within words, after a space, beside digits, white space, line breaks and marks, and after an apostrophe.
CONTEXTS = "{0}", "a{0}{0}b", " {0}A{0} ", "1{0}2", "\n{0} \t{0}\n", ".{0}.", "'{0} 's{0}", "A\u0301{0}\u0301"


# Planes that have characters. Of the others, which are private or empty, each 64th code point is tried.
ASSIGNED = 0, 1, 2, 3, 14


def spans(points):
    """Neighbours as one."""
    out = []
    for point in points:
        if out and out[-1][1] == point - 1:
            out[-1][1] = point
        else:
            out.append([point, point])
    return out


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else PROGRAM
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000 and (point >> 16 in ASSIGNED or point % 64 == 0)]
    texts = ["\0".join(CONTEXTS).format(chr(point)) for point in points]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps(text) + "\n" for text in texts)
        file.flush()
        for folder in sorted(path.parent for path in HERE.glob("*/tokenizer.json")):
            path = folder / "tokenizer.json"
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.encode_special_tokens = True
            ours = subprocess.run([program, path, file.name, "--ids"], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
            differ = []
            for start in range(0, len(points), 8192):
                encoded = tokenizer.encode_batch_fast(texts[start : start + 8192], add_special_tokens=False)
                for i, one in enumerate(encoded, start):
                    if json.loads(ours[i]) != one.ids:
                        differ.append(points[i])
            print(f"{folder.name}: {len(differ)} of {len(points)} code points differ", flush=True)
            for first, last in spans(differ):
                name = unicodedata.name(chr(first), "no name")
                print(f"    U+{first:04X}..U+{last:04X}  {unicodedata.category(chr(first))}  {name}")


if __name__ == "__main__":
    main()
