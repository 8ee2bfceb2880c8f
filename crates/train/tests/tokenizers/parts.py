"""What Python's `tokenizers` gives to texts that follow one another: the ids of all of them together, and which part each stands in.

    pip install tokenizers==0.23.3
    python parts.py           writes parts.json

Where a token lies across two parts, the parts before the cut are what a model sees as its prompt, and the rest is encoded behind a text with which it
does not join: the ids of that text are left out.
"""

import json
import pathlib

from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).parent
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": False}
VARIANTS = {
    "llama2": ("llama2", {}),
    "llama2, first": ("llama2", {"normalizer": None, "pre_tokenizer": METASPACE}),
    "llama2, always": ("llama2", {"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "always", "split": True}}),
    "gpt2": ("gpt2", {}),
    "gpt2, prefix": ("gpt2", {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}}),
    "gpt2, strip": ("gpt2", {"normalizer": STRIP}),
    "qwen": ("qwen", {}),
    "llama3": ("llama3", {}),
    "deepseek": ("deepseek", {}),
}
PARTS = [
    ["is five odd?\n", "yes it is"],
    ["the cat", " and the dog", "\n", "ran over\n\n", "日本語 \U0001f600", " "],
    ["[INST] is it a cat? [/INST]", " the answer ", "CONTROL", "[INST] and", " now? [/INST]", " it was "],
    ["CONTROLuser\nthe sun", "CONTROL\n", "CONTROLassistant\n", "it isCONTROL", "\n"],
    ["CONTROL", "the word", "CONTROL", " the word", "CONTROL"],
    ["", "the", "", " end.", ""],
    ["Answer: ", "the end"],
    ["an", "other answer"],
    ["one\n", "\ntwo  ", " three", "'s 12", "34 more"],
]
BEFORE = "\n", "a", ".", "1"


def spans(tokenizer, text):
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return list(zip(encoding.ids, encoding.offsets))


def together(tokenizer, before, parts):
    """The ids of each part, and the first part that a token lies across the beginning of."""
    text, ends, end = before + "".join(parts), [], len(before)
    for part in parts:
        end += len(part)
        ends.append(end)
    given, across = [[] for _ in parts], None
    for id, (begin, finish) in spans(tokenizer, text):
        if begin < len(before):
            if finish > len(before):
                return None, 0
            continue
        at = next(i for i, end in enumerate(ends) if begin < end)
        if finish > ends[at] and across is None:
            across = at + 1
        given[at].append(id)
    return given, across


def of(tokenizer, parts):
    given, first, before = [], 0, ""
    while first < len(parts):
        for candidate in BEFORE if first else [""]:
            ids, across = together(tokenizer, candidate, parts[first:])
            if ids is not None:
                break
        if across:
            # What stands before the cut is encoded by itself.
            ids, again = together(tokenizer, candidate, parts[first : first + across])
            assert again is None, parts
            given += ids
            first += across
        else:
            given += ids
            break
    return given, first > 0


def main():
    cases = []
    for name, (folder, changes) in VARIANTS.items():
        file = json.loads((HERE / folder / "tokenizer.json").read_text(encoding="utf-8"))
        file.update(changes, post_processor=None)
        tokenizer = Tokenizer.from_str(json.dumps(file))
        control = next(token["content"] for token in file["added_tokens"] if token["special"])
        for parts in PARTS:
            parts = [part.replace("CONTROL", control) for part in parts]
            ids, is_cut = of(tokenizer, parts)
            if not is_cut:
                assert sum(ids, []) == tokenizer.encode("".join(parts), add_special_tokens=False).ids
            cases.append({"name": name, "folder": folder, "changes": changes, "parts": parts, "ids": ids, "is_cut": is_cut})
    text = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (HERE / "parts.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")
    print(len(cases), sum(case["is_cut"] for case in cases))


if __name__ == "__main__":
    main()
