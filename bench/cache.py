"""Claim: a turn renders only its new messages, and rows are exported as fast as in AReaL.

    python bench/cache.py            # with the package areal, also its cache

The first part counts messages in a conversation of 100 turns, in which every call sends the whole
history. `read` counts the messages that the call brings to canonical form: only the new ones,
because the call continues the latest call. `rendered` counts the messages that the chat template
renders. This count should not grow from turn to turn.

The second part measures the CPU time of this cache and of AReaL's three times each, in turn, and
takes the smallest of each. The last column is the target for this cache's time divided by AReaL's:

    chain       adds the 400 turns of one conversation                      at most 1.2
    siblings    adds 800 turns with the same 200 messages                   at most 0.25
    export      discounts 512 conversations of 4 turns, makes tensors       at most 1
"""

import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers.utils import logging as transformers_logging

import cache as ours
from inference import io_struct

try:
    import areal  # noqa: F401  (imported first, because its imports would otherwise be circular)
    from areal.api.io_struct import ModelResponse as PeerResponse
    from areal.experimental.openai import cache as peer
    from areal.experimental.openai.types import InteractionWithTokenLogpReward as PeerInteraction

    logging.disable(logging.CRITICAL)
except ImportError:
    peer = None

Messages = list[dict[str, Any]]
PROMPT, OUTPUT, TAIL = 128, 48, 16  # tokens


def talk(turns: int, name: str = "") -> Messages:
    """Return the messages of a conversation as a client sends them. Each call of `talk` makes new
    message dicts."""
    roles = ("user", "assistant")
    return [
        {"role": roles[k % 2], "content": f"{name} message {k}, of some dozen words or so"}
        for k in range(2 * turns)
    ]


def tokens(turn: int) -> tuple[list[int], list[int]]:
    """Return the prompt and output tokens of a turn. The prompt begins with the tokens of all
    earlier turns."""
    whole = list(range(PROMPT + turn * (OUTPUT + TAIL) + OUTPUT))
    return whole[:-OUTPUT], whole[-OUTPUT:]


def add_ours(
    cache: Any, name: str, messages: Messages, said: dict[str, Any], turn: int = 0
) -> None:
    prompt, output = tokens(turn)
    call = cache.enter(ours.InteractionWithTokenLogpReward(messages, name))
    cache.finish(call, io_struct.ModelResponse(prompt, output, [-0.5] * OUTPUT, [3] * OUTPUT), said)


def add_peers(
    cache: Any, name: str, messages: Messages, said: dict[str, Any], turn: int = 0
) -> None:
    prompt, output = tokens(turn)
    interaction = PeerInteraction(messages=messages, chat_template_type="concat")
    interaction.interaction_id = name
    cache[name] = interaction
    interaction.output_message_list = [said]
    interaction.model_response = PeerResponse(
        input_tokens=prompt,
        output_tokens=output,
        output_logprobs=[-0.5] * OUTPUT,
        output_versions=[3] * OUTPUT,
    )


def timed(
    make: Callable[[], Any], add: Callable[..., None], fill: Callable[[Callable[..., None]], None]
) -> float:
    """Return how many milliseconds of CPU time a cache needs for a list of calls of `add`. `fill`
    makes the list before the measurement begins."""
    calls: list[tuple] = []
    fill(lambda *call: calls.append(call))
    cache = make()
    gc.collect()
    begin = time.process_time()
    for call in calls:
        add(cache, *call)
    return 1e3 * (time.process_time() - begin)


def chain(add: Callable[..., None]) -> None:
    for k in range(400):
        add(str(k), talk(k + 1)[:-1], talk(k + 1)[-1])


def siblings(add: Callable[..., None]) -> None:
    for k in range(800):
        add(str(k), talk(100), {"role": "assistant", "content": str(k)})


def export(make: Callable[[], Any], add: Callable[..., None]) -> float:
    """Return how many milliseconds it takes to discount rewards, export rows and make tensors for
    512 sessions of 4 turns."""
    caches = []
    for name in range(512):
        cache = make()
        for k in range(4):
            *messages, said = talk(k + 1, str(name))
            add(cache, f"{name}-{k}", messages, said, k)
        cache.set_last_reward(1.0)
        caches.append(cache)
    gc.collect()
    begin = time.process_time()
    for cache in caches:
        cache.apply_reward_discount(0.9)
        for leaf in cache.export_interactions("concat").values():
            leaf.to_tensor_dict()
    return 1e3 * (time.process_time() - begin)


def count() -> None:
    """Print the counts `read` and `rendered` of turns 1, 2, 10 and 100 of one conversation. A real
    PromptBuilder renders the prompts."""
    from conftest import make_byte_model
    from transformers import AutoTokenizer

    from calls.prompts import PromptBuilder

    with tempfile.TemporaryDirectory() as path:
        tokenizer = AutoTokenizer.from_pretrained(make_byte_model(Path(path)))
    counts = {"read": 0, "rendered": 0}
    canonical, render = ours.canonical, tokenizer.apply_chat_template

    def counting(message: Any) -> Any:
        counts["read"] += 1
        return canonical(message)

    def rendering(messages: Any, **kwargs: Any) -> Any:
        counts["rendered"] += len(messages)
        return render(messages, **kwargs)

    prompts = PromptBuilder(tokenizer)
    ours.canonical, tokenizer.apply_chat_template = counting, rendering  # type: ignore[assignment]
    cache = ours.InteractionCache()
    print(
        "one conversation of 100 turns, counted\n\n| turn | messages sent | read | rendered |\n|---|---|---|---|"
    )
    for k in range(100):
        before = dict(counts)
        *messages, said = talk(k + 1)
        turn = cache.enter(ours.InteractionWithTokenLogpReward(messages, str(k)))
        prompt = prompts.prompt(turn)
        output = [*tokenizer.encode(said["content"]), tokenizer.eos_token_id]
        cache.finish(
            turn,
            io_struct.ModelResponse(prompt, output, [0.0] * len(output), [0] * len(output)),
            said,
        )
        if k + 1 in (1, 2, 10, 100):
            row = " | ".join(str(counts[key] - before[key]) for key in counts)
            print(f"| {k + 1} | {len(messages)} | {row} |")
    ours.canonical = canonical  # type: ignore[assignment]
    print("\n(rendered: the new message, and two that stand for those before)\n")


def main() -> None:
    transformers_logging.disable_progress_bar()
    count()
    print("| milliseconds | here | AReaL | here / AReaL |\n|---|---|---|---|")
    mine: Any = (ours.InteractionCache, add_ours)
    theirs: Any = (peer.InteractionCache, add_peers) if peer else None
    ways: dict[str, Callable[[Any], float]] = {
        "chain, 400 turns": lambda who: timed(*who, chain),
        "siblings, 800 over 200 messages": lambda who: timed(*who, siblings),
        "export, 512 conversations": lambda who: export(*who),
    }
    for name, way in ways.items():
        best, best_peer = [], []
        for _ in range(3):
            best.append(way(mine))
            if theirs:
                best_peer.append(way(theirs))
        if theirs:
            print(
                f"| {name} | {min(best):.1f} | {min(best_peer):.1f} | {min(best) / min(best_peer):.2f} |",
                flush=True,
            )
        else:
            print(f"| {name} | {min(best):.1f} | peer absent | |", flush=True)


if __name__ == "__main__":
    main()
