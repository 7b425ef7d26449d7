"""Talk to the model that a run has trained.

    python -m run.chat runs/guess/NAME

The command starts the small inference server with the run's newest checkpoint, and reads messages from the standard
input until the input ends (Ctrl-D). Each request to the server contains the whole conversation so far. The server
answers at temperature 0. The demo's model guesses a number that the user thinks of. Think of a number from 1 to 6, and
type `guess a number`. Then answer each guess with `higher` or `lower`.
"""

import secrets
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from engine import RemoteInfEngine
from inference.io_struct import GenerationHyperparameters
from run.launch import Fleet, Planned, own_command
from run.recover import folders_of_steps
from run.summary import ask_greedily


def main(words: list[str]) -> int:
    """Talk to the model of a run. Return the exit code, which is 2 if there is no run or no checkpoint."""
    folder = Path(*words)
    try:
        gconfig = OmegaConf.load(folder / "config.yaml").gconfig
        step, model = max(folders_of_steps(folder / "checkpoints").items())
    except (OSError, ValueError):
        print(f"error: no model in {folder.resolve()}; give the folder of a run that has checkpoints", file=sys.stderr)
        return 2
    print(f"the model of step {step}; end with Ctrl-D. To play the demo, type: guess a number", flush=True)
    key, messages = secrets.token_urlsafe(), list[dict]()
    command = own_command("inference.tiny.server", {"--model-path": model, "--api-key": "-"})
    with tempfile.TemporaryDirectory() as logs, closing(Fleet(Path(logs))) as fleet:
        engine = RemoteInfEngine([fleet.start(Planned("server", command, keys=(key,))).wait_ready()], key=key)
        engine.initialize()
        tokenizer = AutoTokenizer.from_pretrained(model)
        sampling = GenerationHyperparameters(max_new_tokens=gconfig.max_new_tokens)
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            answer = ask_greedily(engine, tokenizer, sampling, messages)
            messages.append({"role": "assistant", "content": answer})
            print(answer, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
