"""Talk to the model that a run has trained.

    python -m run.chat runs/guess/NAME

The command starts the small inference server with the newest model in the run's folder checkpoints/, and reads messages
from the standard input until the input ends (Ctrl-D). Each request to the server contains the whole conversation so
far. An empty line begins a new conversation. The server answers at temperature 0. The demo's model guesses a number
that the user thinks of. Think of a number from 1 to 6, and type `guess a number`. Then answer each guess with `higher`
or `lower`.
"""

import secrets
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from engine import RemoteInfEngine
from inference.io_struct import GenerationHyperparameters
from inference.wire import EngineError
from run.launch import Fleet, Planned, own_command
from run.recover import folders_of_steps
from run.summary import ask_greedily


def main(words: list[str]) -> int:
    """Talk to the model of a run. Return the exit code, which is 2 if there is no run or no checkpoint."""
    if "--help" in words:
        print(__doc__)
        return 0
    folder = Path(*words)
    try:
        config: Any = OmegaConf.load(folder / "config.yaml")
        step, model = max(folders_of_steps(folder / "checkpoints").items())
    except (OSError, ValueError):
        hint = "give the folder of a run that has checkpoints (written at its end, or every saver.interval steps)"
        print(f"error: no model in {folder.resolve()}; {hint}", file=sys.stderr)
        return 2
    hint = " To play the demo, type: guess a number" if config.get("task") == "tasks.guess" else ""
    print(
        f"the model of step {step}; an empty line begins a new conversation, Ctrl-D ends.{hint}",
        flush=True,
    )
    key, messages = secrets.token_urlsafe(), list[dict]()
    command = own_command("inference.tiny.server", {"--model-path": model, "--api-key": "-"})
    with tempfile.TemporaryDirectory() as logs, closing(Fleet(Path(logs))) as fleet:
        engine = RemoteInfEngine(
            [fleet.start(Planned("server", command, keys=(key,))).wait_ready()], key=key
        )
        engine.initialize()
        tokenizer = AutoTokenizer.from_pretrained(model)
        sampling = GenerationHyperparameters(max_new_tokens=config.gconfig.max_new_tokens)
        for line in map(str.strip, sys.stdin):
            if not line:
                messages.clear()
                continue
            messages.append({"role": "user", "content": line})
            try:
                answer = ask_greedily(engine, tokenizer, sampling, messages)
                messages.append({"role": "assistant", "content": answer})
            except EngineError as error:
                answer = f"error: {error}; the next line begins a new conversation"
                messages.clear()
            print(answer, flush=True)
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
