"""Encoding by Nibble and by Python's `tokenizers`, in turns on the same cores: MB/s of each, and their ratio.

    pip install tokenizers==0.23.3
    cargo build --release -p nibble-train --example tokenize
    python benchmarks/peers/tokenizers_speed.py TEXT [TURNS]

Each line of TEXT is a document. Vocabularies of 32,000 tokens are trained on TEXT first, with the pre-tokenizers of crates/train/tests/tokenizers/make.py.
Python's time is that of `encode_batch_fast` alone; the ids stay in its objects.
"""

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "crates/train/tests/tokenizers"))
import make  # noqa: E402

PARTS = {
    "gpt2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama3": (None, make.split(make.LLAMA3)),
    "qwen": (normalizers.NFC(), make.split(make.QWEN)),
    "deepseek": (None, make.split(r"\p{N}{1,3}", r"[一-龥\u3040-ゟ゠-ヿ]+", make.DEEPSEEK)),
    "o200k": (None, make.split(make.O200K)),
}


def trained(name, documents):
    """A tokenizer of 32,000 tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    normalizer, tokenizer.pre_tokenizer = PARTS[name]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=32000, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def main():
    text, turns = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7
    documents = [line for line in pathlib.Path(text).read_text(encoding="utf-8").split("\n") if line]
    program = ROOT / "target/release/examples/tokenize" if len(sys.argv) < 4 else pathlib.Path(sys.argv[3])
    print(f"{len(documents)} documents, {sum(len(d.encode()) for d in documents) / 1e6:.1f} MB")
    print("| pre-tokenizer | Nibble MB/s | Python MB/s | Nibble / Python, median of turns (least, most) |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in PARTS:
            path = pathlib.Path(folder) / f"{name}.json"
            trained(name, documents).save(str(path))
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.encode_special_tokens = True
            ours = subprocess.Popen([program, path, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            pairs = []
            for turn in range(turns + 1):
                ours.stdin.write("\n")
                ours.stdin.flush()
                tokens, size, seconds = ours.stdout.readline().split()
                start = time.perf_counter()
                encoded = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
                theirs = time.perf_counter() - start
                assert int(tokens) == sum(len(one) for one in encoded), name
                # The first turn fills both caches.
                if turn > 0:
                    pairs.append((int(size) / float(seconds) / 1e6, int(size) / theirs / 1e6))
            ours.stdin.close()
            ours.wait()
            ratios = sorted(a / b for a, b in pairs)
            mean = [statistics.median(pair[i] for pair in pairs) for i in (0, 1)]
            print(f"| {name} | {mean[0]:.1f} | {mean[1]:.1f} | {statistics.median(ratios):.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f}) |", flush=True)


if __name__ == "__main__":
    main()
