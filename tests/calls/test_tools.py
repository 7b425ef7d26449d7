"""If the model's text contains a complete and valid tool call, the reply contains this call."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SGLANG

from calls.tools import Call, OutputParser, Parsed
from inference.fields import Refusal


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
    """The method parse splits the model's output into reasoning, text and calls."""
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
    f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 250 + "]" * 250}}}}}</tool_call>',
    f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 100_000}}}}}</tool_call>',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_malformed_call_stays_text(text: str) -> None:
    """A malformed call stays text."""
    assert PARSER.parse(text, TOOLS) == Parsed(text)
    if text.endswith("</tool_call>"):
        assert PARSER.parse(text + call("g"), TOOLS) == Parsed(text, calls=[Call("g", "{}")])


def test_without_tools_nothing_is_a_call() -> None:
    """If the agent offers no tools or forbids calls, a call in the model's text stays text."""
    assert PARSER.parse(call(), []) == Parsed(call())


# Forced calls


@pytest.mark.parametrize("begun", ["", "<think>"])
@pytest.mark.parametrize(
    ("choice", "tools", "written"),
    [
        ("f", TOOLS, '{"a": 1}}\n</tool_call>'),
        ("required", TOOLS[:1], '{"a": 1}}</tool_call>'),
        ("required", TOOLS, 'f", "arguments": {"a": 1}}</tool_call>'),
    ],
)
def test_a_forced_call_is_begun_for_the_model(
    begun: str, choice: str, tools: list, written: str
) -> None:
    """To force a call, the proxy writes the beginning of the call into the prompt, and the model
    writes the rest."""
    opening = PARSER.opening(choice, tools, begun)
    assert (begun + opening).count("</think>") == bool(begun)
    assert PARSER.parse(begun + opening + written, tools) == Parsed(
        "", calls=[Call("f", '{"a": 1}')]
    )
    assert PARSER.parse(begun + opening + "nonsense", tools).calls == []
    assert [PARSER.opening(word, tools, begun) for word in ("auto", "none")] == ["", ""]


# ---- other forms


def brackets(text: str, tools: Any) -> tuple[str, list[dict[str, Any]]]:
    """A parser of calls like [f {"a": 1}]."""
    name, _, arguments = text.removeprefix("[").removesuffix("]").partition(" ")
    return "", [{"name": name, "arguments": json.loads(arguments)}]


def test_a_function_may_read_the_calls() -> None:
    """`module.function` gets the text after the reasoning."""
    parser = OutputParser(f"{__name__}.brackets")
    whole = parser.parse('<think>hm</think>[f {"a": 1}]', TOOLS)
    assert whole == Parsed("", "hm", [Call("f", '{"a": 1}')])
    for broken in ("[f 1]", "[unknown {}]", "f"):
        assert parser.parse(broken, TOOLS) == Parsed(broken)
    assert parser.parse("[f {}]", []) == Parsed("[f {}]")
    with pytest.raises(Refusal, match=r"^tool_choice"):
        parser.opening("required", TOOLS, "")


@pytest.mark.parametrize("name", ["no such form", "no.such.module", "calls.tools.nothing"])
def test_a_parser_that_is_not_there_is_an_error_at_once(name: str) -> None:
    """Not when the first call arrives."""
    with pytest.raises(ValueError, match=rf"^tool_call_parser: {name}"):
        OutputParser(name)


READ_BY_SGLANG = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import launch  # replaces modules that SGLang imports but does not need on a CPU
from transformers import AutoTokenizer
from inference.io_struct import GenerationHyperparameters
from calls.prompts import read_text
from calls.tools import OutputParser
tokenizer, tools, said = AutoTokenizer.from_pretrained(sys.argv[3]), json.loads(sys.argv[4]), json.loads(sys.argv[5])
for form, text in said:
    parser = OutputParser(form)
    tokens = [*tokenizer.encode(text), tokenizer.eos_token_id]
    gconfig = GenerationHyperparameters(stop_token_ids=[tokenizer.eos_token_id])
    read, _ = read_text(tokenizer, tokens, gconfig, special_tokens=parser.foreign(tools))
    parsed = parser.parse(read, tools)
    print(json.dumps([parsed.text, parsed.calls]))
    try:
        parser.opening("f", tools, "")
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(not SGLANG, reason="needs SGLang: make test-sglang")
def test_sglangs_parsers_serve_other_forms(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """If `tool_call_parser` names a parser of SGLang, this parser gets the model's text including
    the special tokens."""
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
    call = ["", [["f", '{"a": 1}']]]
    read = [json.loads(line) for line in lines[::2]]
    assert read == [call, call, call, ["<|python_tag|>nonsense", []], ["Hello", []]]
    assert all(line.startswith("tool_choice: ") for line in lines[1::2])
