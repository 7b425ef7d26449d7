"""What the model wrote is taken apart into reasoning, text and calls. A call is whole and valid;
everything else stays text."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SGLANG
from harness import said, tool

from calls.tools import find_parser, opening, read_answer, split_calls
from inference.fields import Refusal

TOOLS = [tool("f"), tool("g")]


def read(text: str, tools: list = TOOLS, parser: Any = split_calls) -> dict[str, Any]:
    return read_answer(text, tools, "ab12", parser)


def call(name: str = "f", arguments: str = "{}") -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


F: Any = ("f", {})
G: Any = ("g", {})
NESTED = {"a": "</think>", "b": [1, 2]}
MARKS = ("f", {"a": '<tool_call></tool_call>{</think>"', "b": "<think>"})
MARKED = call(arguments=json.dumps(MARKS[1]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", said("")),
        (" It is  sunny in Zürich.\n", said(" It is  sunny in Zürich.\n")),
        (call(), said("", F)),
        ("Let me see.\n" + call() + "\n" + call("g"), said("Let me see.", F, G)),
        (call() + "\nDone. ", said("\nDone.", F)),
        ("<think>\nhm\n</think>\n\nYes.\n", said("Yes.\n", reasoning="hm")),
        ("\n<think>hm</think>" + call(), said("", F, reasoning="hm")),
        ("<think>cut of", said("", reasoning="cut of")),
        ("So <think>hm</think>", said("So <think>hm</think>")),
        (call(arguments='{"a": "</think>", "b": [1, 2.0]}'), said("", ("f", NESTED))),
        ("<think>" + call() + "</think>ok", said("ok", reasoning=call())),
        (f"{MARKED} and {MARKED}", said(" and", MARKS, MARKS)),
        (f"<think>{MARKED} hm</think>{MARKED}", said("", MARKS, reasoning=f"{MARKED} hm")),
        ('<tool_call>{"name": "f"}</tool_call>', said("", F)),
        (call().replace("arguments", "parameters"), said("", F)),
        ("<tool_call>" + call() + "</tool_call>", said("<tool_call></tool_call>", F)),
    ],
)
def test_a_text_is_taken_apart(text: str, message: dict[str, Any]) -> None:
    """The parts are reasoning, text and calls."""
    assert read(text) == message


def test_reasoning_that_does_not_end_is_the_answer_if_the_answer_has_ended() -> None:
    """The prompt has begun the reasoning, but the model has answered without any."""
    for text, message in (("<think>\n42", said("42")), ("<think>" + MARKED, said("", MARKS))):
        assert read_answer(text, TOOLS, "ab12", ended=True) == message
        assert read(text)["content"] == ""


BROKEN = [
    "<tool_call>",
    "</tool_call>",
    '<tool_call>{"name": "f", "arguments": {}}',
    "<tool_call></tool_call>",
    "<tool_call>f(1)</tool_call>",
    '<tool_call>{"name": "f", "arguments": {}</tool_call>',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
    '<tool_call>["f"]</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
    f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 250 + "]" * 250}}}}}</tool_call>',
    f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 100_000}}}}}</tool_call>',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_malformed_call_stays_text(text: str) -> None:
    """Nothing is repaired."""
    assert read(text) == said(text)
    if text.endswith("</tool_call>"):
        assert read(text + call("g")) == said(text, G)


def test_without_tools_nothing_is_a_call() -> None:
    """The agent offers no tools, or forbids calls."""
    assert read(call(), []) == said(call())


# ---- forced calls


@pytest.mark.parametrize("begun", ["", "<think>"])
@pytest.mark.parametrize(
    ("choice", "tools", "written"),
    [
        ("f", TOOLS, '{"a": 1}}\n</tool_call>'),
        ("required", TOOLS[:1], '{"a": 1}}</tool_call>'),
        ("required", TOOLS, 'f", "arguments": {"a": 1}}</tool_call>'),
    ],
)
def test_a_forced_call_is_begun(begun: str, choice: str, tools: list, written: str) -> None:
    """The prompt ends with the beginning of the call, and the model writes the rest."""
    first = opening(choice, tools, begun)
    assert (begun + first).count("</think>") == bool(begun)
    assert read(begun + first + written, tools) == said("", ("f", {"a": 1}))
    assert "tool_calls" not in read(begun + first + "nonsense", tools)
    assert [opening(word, tools, begun) for word in ("auto", "none")] == ["", ""]


# ---- other forms


def brackets(text: str, tools: Any) -> tuple[str, list[dict[str, Any]]]:
    """A parser of calls like [f {"a": 1}]."""
    name, _, arguments = text.removeprefix("[").removesuffix("]").partition(" ")
    return "", [{"name": name, "arguments": json.loads(arguments)}]


def test_a_function_may_read_the_calls() -> None:
    """`module.function` gets the text after the reasoning."""
    parser = find_parser(f"{__name__}.brackets")
    whole = read('<think>hm</think>[f {"a": 1}]', TOOLS, parser)
    assert whole == said("", ("f", {"a": 1}), reasoning="hm")
    for broken in ("[f 1]", "[unknown {}]", "f"):
        assert read(broken, TOOLS, parser) == said(broken)
    assert read("[f {}]", [], parser) == said("[f {}]")
    with pytest.raises(Refusal, match=r"^tool_choice"):
        opening("required", TOOLS, "", parser)


@pytest.mark.parametrize("name", ["no form", "no.such.module", "calls.tools.nothing"])
def test_a_parser_that_is_not_there_is_an_error_at_once(name: str) -> None:
    """The proxy fails at its start, not at the first call."""
    with pytest.raises((ValueError, ImportError, AttributeError)):
        find_parser(name)


READ_BY_SGLANG = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import launch  # replaces modules that SGLang imports but does not need on a CPU
from transformers import AutoTokenizer
from inference.io_struct import GenerationHyperparameters
from calls.prompts import read_text
from calls.tools import find_parser, opening, read_answer
tokenizer, tools, said = AutoTokenizer.from_pretrained(sys.argv[3]), json.loads(sys.argv[4]), json.loads(sys.argv[5])
for form, text in said:
    parser = find_parser(form)
    tokens = [*tokenizer.encode(text), tokenizer.eos_token_id]
    gconfig = GenerationHyperparameters(stop_token_ids=[tokenizer.eos_token_id])
    read = read_text(tokenizer, tokens, gconfig, keep_special=True)
    print(json.dumps(read_answer(read, tools, "ab12", parser)))
    try:
        opening("f", tools, "", parser)
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(not SGLANG, reason="needs SGLang: make test-sglang")
def test_sglangs_parsers_serve_other_forms(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """SGLang's parser gets the text with its special tokens."""
    own = type(tiny_tokenizer)(
        tokenizer_object=tiny_tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"],
    )
    own.save_pretrained(tmp_path)
    texts = [
        ("extras.parsers.mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
        ("extras.parsers.mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
        ("extras.parsers.llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
        ("extras.parsers.llama3", "<|python_tag|>nonsense"),
        ("extras.parsers.llama3", "Hello"),
    ]
    words = [ROOT, ROOT / "tests/sglang_cpu", tmp_path, json.dumps(TOOLS), json.dumps(texts)]
    command = [SGLANG, "-c", READ_BY_SGLANG, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = ended.stdout.splitlines()[-2 * len(texts) :]
    one = said("", ("f", {"a": 1}))
    read = [json.loads(line) for line in lines[::2]]
    assert read == [one, one, one, said("<|python_tag|>nonsense"), said("Hello")]
    assert all(line.startswith("tool_choice: ") for line in lines[1::2])
