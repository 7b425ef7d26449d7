"""Talk to the model that a run has trained.

    python -m extras.chat runs/guess/NAME

The command serves the newest model in checkpoints/ and reads messages until Ctrl-D. An empty line
begins a new conversation. Answers are greedy. To play the demo, think of a number from 1 to 6, type
`guess a number`, and answer each guess with `higher` or `lower`.

Messages with words unknown to the tokenizer are not sent.

If the run's agent has a method `converse(client, question)`, as in tasks/calculator.py, the agent
answers with its tools, and every message is a new question. Otherwise the model itself answers, and
reads the whole conversation.
"""

import asyncio
import json
import secrets
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine import RemoteInfEngine
from extras import printable, read_config
from extras.direct import ArealOpenAI
from extras.episode import start_server, text_of
from inference.fields import import_name
from inference.io_struct import GenerationHyperparameters, ModelRequest


def unknown_words(tokenizer: Any, text: str) -> list[str]:
    unknown = tokenizer.unk_token_id
    ids = {word: tokenizer(word, add_special_tokens=False).input_ids for word in text.split()}
    return [word for word in ids if unknown is not None and unknown in ids[word]]


def find_agent(path: str) -> Any:
    # A script may have passed its agent as an object, which no path names.
    with suppress(ImportError, AttributeError):
        named: Any = import_name(path)
        return named if hasattr(named, "run") else None
    return None


async def show(conversation: AsyncIterator[dict]) -> None:
    async for message in conversation:
        print(f"{message['role']}: {printable(text_of(message))}", flush=True)


def main(words: list[str]) -> int:
    if "--help" in words:
        print(__doc__)
        return 0
    folder = Path(*words)
    config = read_config(folder)
    try:
        model = max((folder / "checkpoints").glob("step*[0-9]"))  # a kill may leave step*.partial
        max_new_tokens = config.gconfig.max_new_tokens
    except (ValueError, AttributeError):
        hint = "give the folder of a run that has checkpoints (one is written at its end)"
        print(f"error: no model in {folder.resolve()}; {hint}", file=sys.stderr)
        return 2
    print(f"the model of {model.name}; an empty line begins a new conversation, Ctrl-D ends")
    path = config.workflow or f"{config.task}.WORKFLOW"
    kwargs = json.loads(json.dumps(config.workflow_kwargs, default=vars))
    agent = find_agent(path)
    if agent:
        command = [sys.executable, "-m", "extras.episode", path, "--model-path", str(model)]
        command += ["--kwargs", json.dumps(kwargs)] if kwargs else []
        if (data := Path(str(config.train_dataset.path))).is_file():
            command += ["--data", data.read_text().partition("\n")[0]]
        print(f"its tools and turns: {shlex.join(command)}")
    key = secrets.token_urlsafe()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens, greedy=True)
    messages: list[dict] = []
    tool_user = agent(**kwargs) if hasattr(agent, "converse") else None
    with ExitStack() as stack, asyncio.Runner() as runner:
        engine = RemoteInfEngine([start_server(stack, str(model), key)], key=key)
        engine.initialize()
        client = ArealOpenAI(engine, tokenizer, sampling=gconfig.model_dump())
        for line in map(str.strip, sys.stdin):
            if not line:
                messages.clear()
                continue
            if unknown := unknown_words(tokenizer, line):
                print(f"the model does not know: {', '.join(unknown)}", flush=True)
                continue
            try:
                if tool_user:
                    runner.run(show(tool_user.converse(client, line)))
                    continue
                messages.append({"role": "user", "content": line})
                prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
                response = runner.run(engine.agenerate(ModelRequest(prompt, gconfig=gconfig)))
            except Exception as error:  # of the engine, the template or the agent
                print(f"error: {error}; the next line begins a new conversation", flush=True)
                messages.clear()
                continue
            text = tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            print(printable(text), flush=True)
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
