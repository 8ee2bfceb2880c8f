"""What Python's `transformers` makes of conversations by the templates here: text, and which characters are in `{% generation %}` blocks.

    pip install transformers==5.24.0 jinja2==3.1.6
    python make.py            writes cases.json

The templates are our own. They use what those of Qwen3, Llama 3, DeepSeek-V3 and GPT-OSS use.
"""

import datetime
import json
import pathlib

from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich \"<&>\"", "days": 3, "b": [True, None, 1.5]}}}]
TALK = [
    {"role": "system", "content": " You are brief. "},
    {"role": "user", "content": "Hello, it's me\n"},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "日本語 \U0001f600?"},
    {"role": "assistant", "content": "  No.\n\n"},
]
THINK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nadd them\n</think>\n\n4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "reasoning_content": "again", "content": "6"},
]
TOOLS = [
    {"role": "user", "content": "How warm is it?"},
    {"role": "assistant", "content": None, "tool_calls": CALL},
    {"role": "tool", "content": "{\"warm\": 21}"},
    {"role": "assistant", "content": "21 degrees."},
]
TEXT_TOOLS = [dict(message) for message in TOOLS]
TEXT_TOOLS[1]["tool_calls"] = [{"type": "function", "function": {"name": "weather", "arguments": "{\"place\": 1}"}}]
VALUES = [
    {"role": "user", "content": " a b\nc ", "data": {"z": 1, "a": 2.50, "t": True, "n": None, "l": ["it's", 'x"y', 1e-7, 1e22, {}], "é": "\n\u2028\x07"}},
    {"role": "assistant", "content": "banana"},
]
BAD = [{"role": "user", "content": "x"}, {"role": "robot", "content": "y"}]


class Then(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, 9, 1, 1, tzinfo=tz)


def main():
    chat_template_utils.datetime = Then
    cases = []
    for name, talks in {
        "qwen": [TALK, THINK, TOOLS, TALK[:2]],
        "llama3": [TALK, TOOLS, TALK[1:3]],
        "deepseek": [TALK, TEXT_TOOLS, TALK[:2]],
        "gpt_oss": [TALK, THINK, TOOLS, TALK[1:3], [{"role": "tool", "content": "x"}]],
        "generation": [TALK, THINK, TALK[1:4]],
        "values": [VALUES, BAD],
    }.items():
        template = (HERE / f"{name}.jinja").read_text(encoding="utf-8")
        for talk in talks:
            for prompt in [False, True]:
                case = {"template": name, "messages": json.dumps(talk, ensure_ascii=False), "prompt": prompt}
                try:
                    texts, spans = chat_template_utils.render_jinja_template(
                        [chat_template_utils._normalize_chat_messages(talk)],
                        chat_template=template, add_generation_prompt=prompt, return_assistant_tokens_mask="generation %}" in template, **TOKENS,
                    )
                    case["text"] = texts[0]
                    if spans and not prompt:
                        case["answers"] = [texts[0][a:b] for a, b in spans[0]]
                except Exception as error:
                    case["error"] = str(error)
                cases.append(case)
    (HERE / "cases.json").write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for case in cases:
        if "error" in case:
            print(case["template"], case["error"])


if __name__ == "__main__":
    main()
