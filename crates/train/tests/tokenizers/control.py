"""Which control tokens `AutoTokenizer` of Python's `transformers` has by the files beside a `tokenizer.json`.

    pip install transformers==5.24.0
    python control.py         writes control.json
"""

import json
import logging
import pathlib
import shutil
import tempfile

from transformers import AutoTokenizer

HERE = pathlib.Path(__file__).parent
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
TEXTS = ["<|im_start|>user\nthe cat<|im_end|>\n", "a <tool> b</tool> <|pad|>", "<|endoftext|> the  <|eot|>  end<mask> <|im_end|>x"]


def token(content, **flags):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}


def cases(size, known):
    """`size`: the first free id; `known`: the ids of the tokens that are there."""
    im_end, start = token("<|im_end|>"), known["<|im_start|>"]
    return {
        "nothing": {},
        "a list with ids": {"tokenizer_config.json": {"added_tokens_decoder": {
            str(start): token("<|im_start|>"), str(size): im_end, str(size + 1): token("<tool>", special=False, normalized=True)}, "eos_token": "<|im_end|>"}},
        "other flags": {"tokenizer_config.json": {"added_tokens_decoder": {
            str(start): token("<|im_start|>", special=False, rstrip=True), str(size): token("<|eot|>", lstrip=True, rstrip=True)}}},
        "additional ones": {"tokenizer_config.json": {"additional_special_tokens": ["<|im_end|>", "<|im_start|>"], "eos_token": "<|im_end|>"}},
        "additional objects": {"tokenizer_config.json": {
            "extra_special_tokens": [{"__type": "AddedToken", **token("<|eot|>", rstrip=True)}, "<tool>"], "pad_token": "<|pad|>"}},
        "an end of the vocabulary": {"tokenizer_config.json": {"eos_token": "a"}},
        "names of older files": {"tokenizer_config.json": {"eos_token": "<|endoftext|>"}, "special_tokens_map.json": {
            "eos_token": {"content": "<|im_start|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}}},
        "ids of older files": {"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "added_tokens.json": {"<|im_end|>": size, "<tool>": size + 1}},
        "both older files": {"special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<tool>"]},
                             "added_tokens.json": {"<|im_end|>": size + 1, "<tool>": size, "<|pad|>": size + 2}},
        "older files yield": {"tokenizer_config.json": {"added_tokens_decoder": {str(size): im_end}, "eos_token": "<|im_end|>"},
                              "special_tokens_map.json": {"eos_token": "<|im_start|>"}, "added_tokens.json": {"<tool>": size}},
    }


def main():
    logging.disable(logging.WARNING)
    file = json.loads((HERE / "qwen" / "tokenizer.json").read_text(encoding="utf-8"))
    known = {token["content"]: token["id"] for token in file["added_tokens"]}
    size = max([*known.values(), *file["model"]["vocab"].values()]) + 1
    out = []
    for name, files in cases(size, known).items():
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(HERE / "qwen" / "tokenizer.json", folder)
            files = {"tokenizer_config.json": {}, **files}
            files["tokenizer_config.json"] = {**CLASS, **files["tokenizer_config.json"]}
            for path, content in files.items():
                (pathlib.Path(folder) / path).write_text(json.dumps(content), encoding="utf-8")
            tokenizer = AutoTokenizer.from_pretrained(folder)
            ids = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
            out.append({"name": name, "files": files, "eos": tokenizer.eos_token_id, "size": len(tokenizer), "texts": TEXTS, "ids": ids})
    text = ",\n".join(json.dumps(case, ensure_ascii=False) for case in out)
    (HERE / "control.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")
    for case in out:
        print(case["name"], case["eos"], case["size"])


if __name__ == "__main__":
    main()
