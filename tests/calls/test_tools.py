"""If the model's text contains a complete and valid tool call, the reply contains this call. All text outside valid
tool calls stays text. A stream never takes back a part of the reply that it has sent."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SGLANG
from hypothesis import given, settings
from hypothesis import strategies as st

from calls import tools
from calls.tools import Call, OutputParser, Parsed, without_partial
from inference.fields import Refusal, read_json


def tool(name: str) -> dict[str, Any]:
    """Return the definition of a tool in the format of OpenAI's chat completions."""
    return {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object"}},
    }


TOOLS = [tool("f"), tool("g")]
PARSER = OutputParser()


def call(name: str = "f", arguments: str = "{}") -> str:
    """Return the text that a model generates for a tool call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("", Parsed("")),
        (" It is  sunny in Zürich.\n", Parsed(" It is  sunny in Zürich.\n")),
        (call(), Parsed("", calls=[Call("f", "{}")])),
        (
            "Let me see.\n" + call() + "\n" + call("g"),
            Parsed("Let me see.", calls=[Call("f", "{}"), Call("g", "{}")]),
        ),
        (call() + "\nDone. ", Parsed("\nDone.", calls=[Call("f", "{}")])),
        ("<think>\nhm\n</think>\n\nYes.\n", Parsed("Yes.\n", "hm")),
        ("\n<think>hm</think>" + call(), Parsed("", "hm", [Call("f", "{}")])),
        ("<think>cut of", Parsed("", "cut of")),
        ("So <think>hm</think>", Parsed("So <think>hm</think>")),
        (
            call(arguments='{"a": "</think>", "b": [1, 2.0]}'),
            Parsed("", calls=[Call("f", '{"a": "</think>", "b": [1, 2]}')]),
        ),
        ("<think>" + call() + "</think>ok", Parsed("ok", call())),
    ],
)
def test_a_text_is_taken_apart(text: str, parsed: Parsed) -> None:
    """The method parse splits the model's output into reasoning, text and calls. Output without reasoning and calls is
    not changed."""
    assert PARSER.parse(text, TOOLS) == parsed


BROKEN = [
    "<tool_call>",
    "</tool_call>",
    '<tool_call>{"name": "f", "arguments": {}}',
    "<tool_call></tool_call>",
    "<tool_call>f(1)</tool_call>",
    '<tool_call>{"name": "f", "arguments": {}</tool_call>',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
    '<tool_call>["f"]</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
    f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 201 + "]" * 201}}}}}</tool_call>',
    f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 100_000}}}}}</tool_call>',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_malformed_call_stays_text(text: str) -> None:
    """A malformed call stays text. If a valid call follows a malformed call, the parser finds the valid call."""
    assert PARSER.parse(text, TOOLS) == Parsed(text)
    if text.endswith("</tool_call>"):
        assert PARSER.parse(text + call("g"), TOOLS) == Parsed(text, calls=[Call("g", "{}")])


def test_without_tools_nothing_is_a_call() -> None:
    """If the agent offers no tools or forbids calls, a call in the model's text stays text."""
    assert PARSER.parse(call(), []) == Parsed(call())
    assert PARSER.certain(call(), []) == Parsed(call())


# Streams

PIECES = st.sampled_from(
    [
        *BROKEN[:6],
        call(),
        call("g", '{"a": "b"}'),
        "<think>",
        "</think>",
        "\n",
        " ",
        "a",
        "<",
        "<tool",
        "ü",
        "\ufffd",
    ]
) | st.text(max_size=3)


@settings(deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join), st.booleans())
def test_what_is_certain_is_never_taken_back(text: str, offered: bool) -> None:
    """While a text grows, `certain` never returns a shorter text or a shorter reasoning than before. The returned text
    and reasoning are always prefixes of the final text and reasoning."""
    tools = TOOLS if offered else []
    whole, before = PARSER.parse(text, tools), Parsed("")
    for end in range(len(text) + 1):
        sure = PARSER.certain(text[:end], tools)
        assert sure.calls == []
        for now, then, last in (
            (sure.text, before.text, whole.text),
            (sure.reasoning, before.reasoning, whole.reasoning),
        ):
            assert now.startswith(then)
            assert last.startswith(now)
        before = sure


def test_a_stream_says_what_it_can() -> None:
    """A stream holds back only text that may be the beginning of a tag such as <tool_call>, and spaces that may come
    before a call."""
    assert PARSER.certain("Hello wor", TOOLS) == Parsed("Hello wor")
    assert PARSER.certain("Hello \n", TOOLS) == Parsed("Hello")
    assert PARSER.certain("Hello \n", []) == Parsed("Hello \n")
    assert PARSER.certain("1 <tool", TOOLS) == Parsed("1")
    assert PARSER.certain("1 <tools", TOOLS) == Parsed("1 <tools")
    assert PARSER.certain("1 <tool_call>{", TOOLS) == Parsed("1")
    assert PARSER.certain("1 <tool_call>{</tool_call>", TOOLS) == Parsed(
        "1 <tool_call>{</tool_call>"
    )
    assert PARSER.certain("<thin", TOOLS) == Parsed("")
    assert PARSER.certain("<think>so </thi", TOOLS) == Parsed("", "so")
    assert PARSER.certain("Z\ufffd", TOOLS) == Parsed("Z")
    assert PARSER.certain("<think>so it", TOOLS) == Parsed("", "so it")


def test_a_call_in_a_stream_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream parses its text after every token, but decodes the JSON of each call only once."""
    read: list[str] = []

    def counting(body: str) -> Any:
        read.append(body)
        return read_json(body)

    monkeypatch.setattr(tools, "read_json", counting)
    tools.read_call.cache_clear()
    text = "".join(call("f", f'{{"once": {k}}}') + call("no such tool", str(k)) for k in range(50))
    for end in range(len(text) + 1):
        PARSER.certain(text[:end], TOOLS)
    assert len(PARSER.parse(text, TOOLS).calls) == 50
    assert len(read) == len({*read}) == 100


@settings(deadline=None)
@given(st.text("ab", max_size=6), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_the_beginning_of_a_mark_is_held_back(text: str, marks: list[str]) -> None:
    """If a text ends with an incomplete mark such as `<tool_`, without_partial removes only this mark. If a text ends
    with several incomplete marks, without_partial removes the longest."""
    held = [
        n
        for n in range(1, len(text) + 1)
        if any(m.startswith(text[-n:]) and m != text[-n:] for m in marks)
    ]
    assert without_partial(text, marks) == text[: len(text) - max(held, default=0)]


# Forced calls


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|im_start|>assistant\n", ""),
        ("<|im_start|>assistant\n<think>\n", "<think>"),
        ("assistant<think>", "<think>"),
        ("assistant\n<think>\n\n</think>\n\n", ""),
    ],
)
@pytest.mark.parametrize(
    ("choice", "tools", "written"),
    [
        ("f", TOOLS, '{"a": 1}}\n</tool_call>'),
        ("required", TOOLS[:1], '{"a": 1}}</tool_call>'),
        ("required", TOOLS, 'f", "arguments": {"a": 1}}</tool_call>'),
    ],
)
def test_a_forced_call_is_begun_for_the_model(
    prompt: str, begun: str, choice: str, tools: list, written: str
) -> None:
    """To force a call, the proxy writes the beginning of the call into the prompt, and the model writes the rest. If
    the prompt ends with <think>, the proxy writes </think> before the beginning of the call."""
    assert PARSER.begun(prompt) == begun
    opening = PARSER.opening(choice, tools, begun)
    assert (begun + opening).count("</think>") == bool(begun)
    assert PARSER.parse(begun + opening + written, tools) == Parsed(
        "", calls=[Call("f", '{"a": 1}')]
    )
    assert PARSER.parse(begun + opening + "nonsense", tools).calls == []
    assert [PARSER.opening(word, tools, begun) for word in ("auto", "none")] == ["", ""]


# Other forms

TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": {"open": "[CALL]", "close": "[/CALL]", "content": "json", "repeats": True},
    },
}


@pytest.fixture
def templated(tiny_tokenizer: Any) -> Any:
    """Return a tokenizer with a response template, which describes how the model writes calls and reasoning."""
    tokenizer = copy.copy(tiny_tokenizer)
    tokenizer.response_template = TEMPLATE
    return tokenizer


def test_a_tokenizers_own_template_is_used(templated: Any) -> None:
    """A tokenizer's response template can parse only finished text, so a stream sends nothing before the answer is
    finished. If the tokenizer has a response template, a tool call cannot be forced."""
    parser = OutputParser(templated)
    text = '[THINK]hm[/THINK]Well.[CALL]{"name": "f", "arguments": {"a": 1}}[/CALL]'
    assert parser.special_tokens
    assert parser.parse(text, TOOLS) == Parsed("Well.", "hm", [Call("f", '{"a": 1}')])
    assert parser.certain(text, TOOLS) == Parsed("")
    for broken in (
        "[CALL]f(1)[/CALL]",
        '[CALL]{"name": "unknown", "arguments": {}}[/CALL]',
        "[CALL][1][/CALL]",
    ):
        assert parser.parse(broken, TOOLS) == Parsed(broken)
    assert parser.opening("auto", TOOLS, "") == ""
    with pytest.raises(Refusal, match=r"^tool_choice"):
        parser.opening("required", TOOLS, "")
    assert not OutputParser(templated, "hermes").special_tokens


def test_a_parser_that_is_not_there_is_an_error_at_once() -> None:
    """An unknown parser name raises an error when the parser is made, and the error lists the known names."""
    with pytest.raises(ValueError, match=r"^tool_call_parser: .*hermes"):
        OutputParser(tool_call_parser="no such form")
    with pytest.raises(ValueError, match=r"^reasoning_parser: .*qwen3"):
        OutputParser(reasoning_parser="no such form")


READ_BY_SGLANG = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import launch  # replaces modules that SGLang imports but does not need on a CPU
from transformers import AutoTokenizer
from inference.io_struct import GenerationHyperparameters
from calls.prompts import TextReader
from calls.tools import OutputParser
tokenizer, tools, said = AutoTokenizer.from_pretrained(sys.argv[3]), json.loads(sys.argv[4]), json.loads(sys.argv[5])
for form, text in said:
    parser = OutputParser(tokenizer, form)
    tokens = [*tokenizer.encode(text), tokenizer.eos_token_id]
    gconfig = GenerationHyperparameters(stop_token_ids=[tokenizer.eos_token_id])
    reader = TextReader(tokenizer, gconfig, special_tokens=parser.foreign(tools))
    parsed = parser.parse(reader.whole(tokens), tools)
    print(json.dumps([parsed.text, parsed.calls, parser.certain("Hello", tools).text]))
    try:
        parser.opening("f", tools, "")
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(not SGLANG, reason="needs SGLang: make test-sglang")
def test_sglangs_parsers_serve_other_forms(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """If `tool_call_parser` names a parser of SGLang, this parser gets the model's text including the special
    tokens."""
    own = type(tiny_tokenizer)(
        tokenizer_object=tiny_tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"],
    )
    own.save_pretrained(tmp_path)
    said = [
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
        ("llama3", "<|python_tag|>nonsense"),
        ("llama3", "Hello"),
    ]
    words = [
        str(ROOT),
        str(ROOT / "tests/sglang_cpu"),
        str(tmp_path),
        json.dumps(TOOLS),
        json.dumps(said),
    ]
    ended = subprocess.run(
        [SGLANG, "-c", READ_BY_SGLANG, *words], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = ended.stdout.splitlines()[-2 * len(said) :]
    call = ["", [["f", '{"a": 1}']], ""]
    read = [json.loads(line) for line in lines[::2]]
    assert read == [call, call, call, ["<|python_tag|>nonsense", [], ""], ["Hello", [], ""]]
    assert all(line.startswith("tool_choice: ") for line in lines[1::2])
