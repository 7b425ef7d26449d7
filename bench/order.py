"""Claim: if a few episodes are very long, waiting costs time, masking costs tokens, and dropping costs groups.

    python bench/order.py --virtual                        a table in virtual time, in a few seconds
    python bench/order.py                                  three runs, one for each value of rollout.stale
    python bench/order.py --steps 40 --modes wait mask     longer, and only two of the runs

**Virtual time.** The shipped DispatchState and StalenessManager run with a clock that jumps from event to event.
Episodes take a lognormal time with a mean of 2 s, and a group writes its tokens evenly over this time. A training step
takes 0.8 s and a weight update 0.02 s. A batch has 8 groups, and only the gate limits the number of running groups. The
table shows the first 24 steps, as medians of nine seeds. A trainer that never waits needs 20 s.

**Real runs.** Each run trains the maze (configs/maze.yaml) for the same number of steps, and therefore on the same
number of samples. The maze's own episodes differ only by the length of a walk. A real agent also waits for tools and
for other people. Therefore each group of walks pauses here after its first cells. The pause has a heavy tail: it is
lognormal, with sigma 1.5 and a mean of --pause seconds. The pauses depend only on the number of the group, so all runs
have the same pauses. While a group pauses, the trainer makes new versions. A newer version then samples the rest of the
walk.

The table shows the seconds up to the last step, how many of them the trainer waited, and the mean reward of the last
five steps. It also shows the share of masked tokens and the number of dropped groups.
"""

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
from bisect import bisect_right
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inference.io_struct import ModelRequest  # noqa: E402
from rollout.dispatcher import DispatchState  # noqa: E402
from rollout.runner import TimedResult  # noqa: E402
from staleness import StalenessManager  # noqa: E402
from workflow import RLVRWorkflow, call_seed, to_row, workflow_context  # noqa: E402

SIGMA, FIRST = 1.5, 12  # sigma of the lognormal pause; tokens before the pause
MODES = ("wait", "mask", "drop")


def pause(task_id: int, mean_s: float) -> float:
    """Return the pause of a group in seconds. The mean over many groups is `mean_s`; the median is a third of it."""
    return random.Random(task_id).lognormvariate(math.log(mean_s) - SIGMA**2 / 2, SIGMA)


@dataclass
class Clock:
    """The policy version, as the gate reads it."""

    version: int = 0

    def get_version(self) -> int:
        return self.version


class Prompt(NamedTuple):
    task_id: int


class PausingWalk(RLVRWorkflow):
    """A walk that pauses after its first FIRST tokens, and then continues."""

    def __init__(self, reward_fn: str, gconfig: Any, tokenizer: Any, pause_s: float) -> None:
        super().__init__(reward_fn, gconfig, tokenizer)
        self.pause_s = pause_s

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        context, prompt = workflow_context.get(), self.prompt_ids(data["messages"])
        whole = None
        for turn, limit in enumerate((FIRST, self.gconfig.max_new_tokens - FIRST)):
            ids = prompt + (whole.output_tokens if whole else [])
            gconfig = self.gconfig.new(
                n_samples=1, seed=call_seed(self.gconfig.seed, context.name, turn), max_new_tokens=limit
            )
            part = await engine.agenerate(
                ModelRequest(ids, gconfig=gconfig, tokenizer=self.tokenizer, session=context.name)
            )
            if whole is not None:
                part = replace(
                    part,
                    input_tokens=prompt,
                    output_tokens=whole.output_tokens + part.output_tokens,
                    output_logprobs=whole.output_logprobs + part.output_logprobs,
                    output_versions=whole.output_versions + part.output_versions,
                )
            whole = part
            if part.stop_reason != "length":
                break
            if turn == 0:
                await asyncio.sleep(pause(context.task_id, self.pause_s))
        assert whole is not None
        return to_row([whole], await self.reward(whole, data))


class Span(NamedTuple):
    """A finished group whose trained tokens were written between two times, in seconds."""

    start: float  # when the group started
    first: float  # when the oldest trained token was written
    end: float


def simulate(mode: str, eta: int, sigma: float, seed: int) -> tuple[float, float, int]:
    """Return the seconds until the 24th step, the share of the tokens that were masked, and the dropped groups."""
    draw, updates, clock, batch = random.Random(seed), list[float](), Clock(), 8
    manager = StalenessManager(clock, 10**6, batch, eta)

    def oldest(group: Span) -> int:
        return bisect_right(updates, group.first)

    def without_older(group: Span, version: int) -> Span | None:
        since = updates[version - 1] if version > 0 else 0.0
        return group._replace(first=max(group.first, since)) if group.end > since else None

    state = DispatchState[Prompt, Span](manager, oldest, 10**6, mode, without_older, 10**6)  # type: ignore[arg-type]
    events: list[tuple[float, int, float]] = []  # end, task id (-1: the trainer), start
    now, number, training, trained = 0.0, 0, False, list[Span]()
    while clock.version < 24:
        while state.may_start() > 0:
            state.enqueue(Prompt(number))
            state.start()
            heappush(events, (now + draw.lognormvariate(math.log(2) - sigma**2 / 2, sigma), number, now))
            number += 1
        if not training and (groups := state.take(batch)):
            training, trained = True, trained + groups
            heappush(events, (now + 0.82, -1, now))
            continue
        now, task_id, start = heappop(events)
        if task_id < 0:
            clock.version, training = clock.version + 1, False
            updates.append(now)
        else:
            state.finish(TimedResult(task_id, 0, Span(start, start, now)))
    written = sum(group.end - group.start for group in trained)
    return now, sum(group.first - group.start for group in trained) / written, manager.get_stats().dropped


def print_virtual() -> None:
    """Print the table in virtual time."""
    print("| sigma | eta | wait, s | mask, s | masked tokens | drop, s | dropped groups |\n" + "|---" * 7 + "|")
    for sigma in (0.5, 1.0, 1.5):
        for eta in (1, 2, 4, 8):
            runs = {mode: [simulate(mode, eta, sigma, seed) for seed in range(9)] for mode in MODES}
            middle = {mode: [median(column) for column in zip(*found)] for mode, found in runs.items()}
            cells = f"{middle['wait'][0]:.0f} | {middle['mask'][0]:.0f} | {middle['mask'][1]:.0%}"
            print(f"| {sigma} | {eta} | {cells} | {middle['drop'][0]:.0f} | {middle['drop'][2]:.0f} |")
            assert all(lost == 0 for mode in ("wait", "mask") for _, _, lost in runs[mode])


def train(mode: str, root: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train one run and return its metrics."""
    words = [
        f"rollout.stale={mode}",
        f"max_steps={args.steps}",
        f"rollout.max_head_offpolicyness={args.eta}",
        "rollout.max_concurrent_rollouts=null",
        f"train_dataset.batch_size={args.batch}",
        "gconfig.n_samples=4",
        "workflow=bench.order.PausingWalk",
        f"workflow_kwargs.pause_s={args.pause}",
        "workflow_kwargs.reward_fn=tasks.maze.reward",
        f"trial_name={mode}",
        f"fileroot={root}",
        "logger.live=false",
        "logger.tokens_interval=0",
        "doctor=off",
    ]
    command = [sys.executable, "train.py", "--config", "configs/maze.yaml", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (root / "maze" / mode / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--eta", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="groups in a batch (B)")
    parser.add_argument("--pause", type=float, default=6.0, help="mean pause of a group, in seconds")
    parser.add_argument("--virtual", action="store_true", help="print the table in virtual time, and train nothing")
    args = parser.parse_args()
    if args.virtual:
        print_virtual()
        return
    print(
        "| rollout.stale | seconds | waited | reward | masked tokens | dropped groups | max age |\n" + "|---" * 7 + "|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for mode in args.modes:
            lines = train(mode, Path(folder), args)
            assert max(line["staleness_max"] for line in lines) <= args.eta
            masked, tokens = (sum(line[key] for line in lines) for key in ("masked", "tokens"))
            cells = (
                mode,
                f"{lines[-1]['wall_s']:.0f}",
                f"{sum(line['rollout_wait_s'] for line in lines):.0f}",
                f"{mean(line['reward'] for line in lines[-5:]):.3f}",
                f"{masked / (masked + tokens):.1%}",
                f"{sum(line['dropped'] for line in lines)}",
                f"{max(line['staleness_max'] for line in lines):.0f}",
            )
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
