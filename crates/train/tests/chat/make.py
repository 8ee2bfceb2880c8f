"""What Python's `transformers` makes of conversations by the templates here: text, and which characters are in `{% generation %}` blocks.

    pip install transformers==5.24.0 jinja2==3.1.6
    python make.py            writes cases.json, rows.json and turns.json

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
PLAIN = [{"role": message["role"], "content": message["content"]} for message in THINK]
ADD = {"type": "function", "function": {"name": "add", "description": "a + b <&>", "parameters": {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "number"}}}}}
# Rows as TRL reads them: `tools` a list or a text of JSON, and variables of the template.
ROWS = [
    {"messages": TALK, "tools": [ADD, ADD]},
    {"messages": TALK[1:3], "tools": json.dumps([ADD])},
    {"messages": TALK[1:3], "tools": None, "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": TALK[1:4], "tools": [], "chat_template_kwargs": {"enable_thinking": True}},
]
# Answers of several rounds, with thoughts and calls, which some templates write otherwise as the conversation goes on.
TURNS = [
    TALK,
    TALK[1:4],
    THINK,
    TOOLS,
    TOOLS + [{"role": "user", "content": "And there?"}, {"role": "assistant", "reasoning_content": "far", "content": "20 degrees."}],
    THINK + TALK[1:],
]
BAD = [{"role": "user", "content": "x"}, {"role": "robot", "content": "y"}]


class Then(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, 9, 1, 1, tzinfo=tz)


def render(name, talk, **given):
    template = (HERE / f"{name}.jinja").read_text(encoding="utf-8")
    talk = chat_template_utils._normalize_chat_messages(talk)
    return chat_template_utils.render_jinja_template([talk], chat_template=template, **TOKENS, **given)[0][0]


def row_case(row):
    """The text of a row by the template of Qwen's kind, and the beginning of its first answer, as TRL gives both."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    given = {"tools": tools, **row.get("chat_template_kwargs", {})}
    first = [message["role"] for message in row["messages"]].index("assistant")
    return {
        "row": json.dumps(row, ensure_ascii=False),
        "text": render("qwen", row["messages"], **given),
        "prompt": render("qwen", row["messages"][:first], add_generation_prompt=True, **given),
    }


def turn_case(name, talk):
    """What a model sees before each answer, and the text with it, at the time when it answers."""
    answers = []
    for at, message in enumerate(talk):
        if message["role"] == "assistant":
            answers.append([render(name, talk[:at], add_generation_prompt=True), render(name, talk[: at + 1])])
    return {"template": name, "messages": json.dumps(talk, ensure_ascii=False), "whole": render(name, talk), "answers": answers}


def main():
    chat_template_utils.datetime = Then
    cases = []
    for name, talks in {
        "qwen": [TALK, THINK, TOOLS, TALK[:2]],
        "llama3": [TALK, TOOLS, TALK[1:3]],
        "deepseek": [TALK, TEXT_TOOLS, TALK[:2]],
        "gpt_oss": [TALK, THINK, TOOLS, TALK[1:3], [{"role": "tool", "content": "x"}]],
        "generation": [TALK, PLAIN, TALK[1:4]],
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
    (HERE / "rows.json").write_text(json.dumps([row_case(row) for row in ROWS], ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    turns = [turn_case(name, talk) for name in ["qwen", "gpt_oss"] for talk in TURNS]
    (HERE / "turns.json").write_text(json.dumps(turns, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (HERE / "cases.json").write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for case in cases:
        if "error" in case:
            print(case["template"], case["error"])


if __name__ == "__main__":
    main()
