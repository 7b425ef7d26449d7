"""Write report.html, a page about one run, or about two runs side by side. The page works offline.

`python -m extras.report runs/guess/one` writes runs/guess/one/report.html. With a second folder,
runs/guess/other, it writes runs/guess/one/beside-other.html. The callback extras.report.Report
writes the page every few steps and when the run ends, even after Ctrl-C or a failure. The page is
made from the run's files:

    metrics.jsonl   the curves and the lags
    trace.json      the timeline: the trainer's phases, the prompt groups, the weight updates
    tokens/         the trajectories: each token's version, log-probabilities and advantage
    config.yaml     the keys of the loss, to find the clipped tokens
    doctor.jsonl    the doctor's findings

This module turns the files into one JSON object, which the script in report.html draws. A page must
stay small, so it shows at most MAX_STEPS steps of a run, and MAX_TOKENS tokens in all.
"""

import json
import math
import sys
import time
from collections import defaultdict
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from extras import Record, read_config, read_records
from extras.trace import Trace
from ppo import clip
from run.config import PPOActorConfig
from training.proximal import interpolation, loglinear

MAX_STEPS, MAX_TOKENS, MAX_GROUPS = 24, 60_000, 4000  # tokens per page; steps and groups per run
# The (rows, T) tensors that the page shows.
COLUMNS = "input_ids versions turn_ids turn_rewards logprobs prox_logp theta_logp advantages states"
TEMPLATE = Path(__file__).with_suffix(".html")
INTERVAL = 10  # steps between two reports of a run
TIME_SHARE = 0.02  # no report while reports have taken more than this share of the run's time


def spread(items: list, count: int) -> list:
    last = len(items) - 1
    return [items[round(k)] for k in torch.linspace(0, last, min(count, last + 1)).tolist()]


def clean(value: Any) -> Any:
    """Round floats to five digits. NaN and infinity become None: JSON has neither."""
    if isinstance(value, float):
        short = round(value, 2) if abs(value) > 999 else float(f"{value:.5g}")
        return short if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: clean(x) for key, x in value.items()}
    return [clean(x) for x in value] if isinstance(value, list) else value


# ---- the timeline


def read_timeline(records: list[Record]) -> Record:
    """Return the parts of a trace. Times are seconds since the trace's first record.

    phases: [name, begin, duration], without gaps
    weights: [time, version]
    groups: {task, lane, begin, end, used, state, versions, reward}
    """
    zero = min((record["ts"] for record in records if "ts" in record), default=0)
    spans: list[list] = []
    starts = []
    weights = []
    groups: dict[str, Record] = {}
    end = ""
    last = 0.0
    for record in records:
        kind = record.get("ph", "")
        args = record.get("args", {})
        at = (record.get("ts", zero) - zero) / 1e6
        before, last = last, max(last, at + record.get("dur", 0) / 1e6)
        if kind == "X":
            spans.append([record["name"], at, record["dur"] / 1e6])
        elif kind == "M" and args.get("name") == "trainer":
            starts.append(at)
            end = ""
            for lost in groups.values():  # groups that still ran when their process ended
                lost.setdefault("end", before)
        elif kind == "i" and "version" in args:
            weights.append([at, args["version"]])
        elif kind == "i":
            end = args.get("error", "")
        elif kind == "b":
            groups[record["id"]] = {"task": args["task"], "begin": at, "state": "running"}
        elif group := groups.get(record.get("id", "")):
            group |= args
            if kind == "e":
                group["end"] = at
            else:
                group["state"] = record["name"]
            if record["name"] == "consume":
                group["used"] = at  # when a step consumed the group
    return {
        "phases": fill_gaps(spans, starts, last),
        "weights": weights,
        "groups": pack(list(groups.values())[-MAX_GROUPS:], last),
        "seconds": last,
        "end": end,
    }


def fill_gaps(spans: list[list], starts: list[float], last: float) -> list[list]:
    """Sort the phases, and fill each gap over 1 ms between 0 and `last` with a new phase.

    A gap is named "start" at the beginning, "not running" around a restart, "stop" at the end, and
    "other" between two phases.
    """
    phases, now = [], 0.0
    for span in [*sorted(spans, key=lambda span: span[1]), ["", last, 0.0]]:
        if span[1] - now > 1e-3:
            restarted = any(now < start <= span[1] for start in starts)
            name = "not running" if restarted else "other" if span[0] else "stop"
            phases.append([name if now else "start", now, span[1] - now])
        phases.append(span)
        now = max(now, span[1] + span[2])
    return phases[:-1]


def pack(groups: list[Record], last: float) -> list[Record]:
    """Give each group its mean reward, and the first lane that is free when the group starts."""
    ends: list[float] = []
    for group in sorted(groups, key=lambda group: group["begin"]):
        end = group.setdefault("end", last)
        lane = next((k for k, free in enumerate(ends) if free <= group["begin"]), len(ends))
        ends[lane : lane + 1] = [end]  # appends the end if the lane is new
        group["lane"] = lane
        if rewards := group.pop("rewards", None):
            group["reward"] = sum(rewards) / len(rewards)
    return groups


# ---- the trajectories


def token_states(batch: dict[str, Tensor], keys: PPOActorConfig) -> Tensor:
    """Return states (rows, T): 0 untrained, 1 trained, 2 clipped, 3 left out by the cap on w.

    A state says what the default loss (ppo.py) does with the token in the step's last pass.
    """
    prox = batch["prox_logp"]
    A = batch["advantages"]
    u = (batch["theta_logp"] - prox).exp()  # pi_theta / pi_prox, (rows, T)
    bounded = clip(u, keys.eps_clip, keys.eps_clip_higher)
    clipped = torch.minimum(u * A, bounded * A) != u * A
    if keys.c_clip is not None:
        clipped |= (A < 0) & (u > keys.c_clip)
    states = 1 + clipped.int()
    if keys.use_decoupled_loss and keys.behave_imp_weight_cap:
        # w = pi_prox / pi_behav
        states[(prox - batch["logprobs"]).exp() > keys.behave_imp_weight_cap] = 3
    return states * (batch["loss_mask"] > 0)


def read_step(
    path: Path, keys: PPOActorConfig, budget: int, words: dict[str, str]
) -> Record | None:
    """Read a step's groups, with as many turns as `budget` tokens allow. Return None for a damaged
    file. Add the tokens' texts to `words`."""
    try:
        with safe_open(path, "pt") as file:
            batch = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            texts = json.loads((file.metadata() or {}).get("words", "{}"))
    except (SafetensorError, OSError):
        return None
    step = int(path.stem)
    if "prox_logp" not in batch:  # standard PPO, or loglinear
        old = batch["logprobs"]
        fraction = batch.get("step_fraction", torch.tensor([0.5]))[:, None]  # (rows, 1)
        alpha = interpolation(batch["versions"], step - 1, fraction)  # (rows, T)
        estimate = loglinear(old, batch["theta_logp"], alpha)
        batch["prox_logp"] = estimate if keys.use_decoupled_loss else old
    batch["states"] = token_states(batch, keys)
    rows_of = defaultdict(list)  # the rows of each task
    for row, task in enumerate(batch["task_ids"].tolist()):
        rows_of[task].append(row)
    groups = []
    for task, rows in rows_of.items():
        rewards = batch["rewards"][rows].tolist()
        signal = bool((batch["advantages"][rows].abs() > 1e-6).any())
        groups.append({"task": task, "rewards": rewards, "signal": signal})
    # The first row of every group, then the second of every group, until the budget is spent.
    order = sorted((k, task, row) for task, rows in rows_of.items() for k, row in enumerate(rows))
    turns = list[Record]()
    paths = dict[tuple[int, int], list]()
    for k, task, row in order:
        real = batch["attention_mask"][row]
        budget -= int(real.sum())
        if budget < 0 and turns:
            break
        lists = {key: batch[key][row][real].tolist() for key in COLUMNS.split()}
        above = paths.get((task, int(batch["parents"][row])), [])
        paths[task, k] = add_turns(turns, lists, above, {"task": task, "row": k})
    words |= {str(i): texts.get(str(i), f"#{i}") for turn in turns for i in turn["ids"]}
    for turn in turns:
        del turn["whole"]
    return {"step": step, "groups": groups, "turns": turns}


def add_turns(turns: list[Record], row: Record, above: list[int], names: Record) -> list[int]:
    """Append a row's turns to `turns`. Return the indices of all turns of the row.

    A turn holds the messages that are new in its prompt, and the sampled tokens. A row may continue
    another row, whose turns have the indices `above`. Turns that both rows share are not appended
    again.
    """
    ids = row["input_ids"]
    states = row["states"]
    path = [
        i
        for i in above
        if ids[: turns[i]["end"]] == turns[i]["whole"] and not any(states[: turns[i]["end"]])
    ]
    begin = turns[path[-1]]["end"] if path else 0
    for number, run in groupby(range(len(ids)), row["turn_ids"].__getitem__):
        places = list(run)
        at, end = places[0], places[-1] + 1
        if number < 0 or end <= begin:
            continue
        earlier = path[-1:] or [i for i in above if turns[i]["turn"] == number - 1] or [-1]
        turn = names | {
            "turn": number,
            "parent": earlier[0],
            "reward": row["turn_rewards"][at],
            "ids": ids[begin:end],
        }
        turn |= {key: row[key][at:end] for key in ("versions", "advantages", "states")}
        turn["logps"] = [row[key][at:end] for key in ("logprobs", "prox_logp", "theta_logp")]
        turns.append(turn | {"prompt": at - begin, "end": end, "whole": ids[:end]})
        begin, path = end, [*path, len(turns) - 1]
    return path


# ---- the page


def read_run(folder: Path, share: float = 1.0) -> Record:
    """Return a run's data, with the fraction `share` of the tokens that a page may show. Raises
    ValueError if `folder` has no run."""
    lines = read_records(folder / "metrics.jsonl")
    trace = read_records(folder / "trace.json")
    files = sorted(path for path in (folder / "tokens").glob("*.safetensors") if path.is_file())
    if not (lines or trace or files):
        missing = "metrics.jsonl, trace.json and tokens/ are missing"
        raise ValueError(f"{folder}: {missing}; give the folder of a run, like runs/guess/NAME")
    config = read_config(folder)
    keys = PPOActorConfig.model_construct(**vars(getattr(config, "actor", SimpleNamespace())))
    rollout = getattr(config, "rollout", None)
    words: dict[str, str] = {}
    files = spread(files, MAX_STEPS)
    budget = int(MAX_TOKENS * share / max(1, len(files)))
    steps = [step for file in files if (step := read_step(file, keys, budget, words))]
    return {
        "name": "/".join(folder.resolve().parts[-2:]),  # the experiment and the trial
        "max_steps": getattr(config, "max_steps", None),
        "eta": getattr(rollout, "max_head_offpolicyness", None),
        "discount": getattr(getattr(rollout, "openai", None), "turn_discount", None),
        "metrics": {
            key: [line.get(key) for line in lines]
            for key in dict.fromkeys(key for line in lines for key in line)
        },
        "timeline": read_timeline(trace),
        "doctor": [finding["text"] for finding in read_records(folder / "doctor.jsonl")],
        "steps": steps,
        "words": words,
    }


def make_page(folders: list[Path]) -> str:
    """Return the page about the runs as HTML. Raises ValueError if a folder holds no run."""
    runs = [read_run(folder, 1 / len(folders)) for folder in folders]
    data = json.dumps({"runs": clean(runs)}, allow_nan=False, separators=(",", ":"))
    # Escape "<", so that no agent's text can close the script element that holds the data.
    data = data.replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", data)


def write_page(folders: list[Path], path: Path) -> None:
    """Write the page to a new file and rename it, so that `path` never holds half a page."""
    part = path.with_suffix(".part")
    part.write_text(make_page(folders), encoding="utf-8")
    part.replace(path)


class Report(Trace):
    """The callback that writes the trace and the page."""

    seconds = 0.0  # spent on reports

    def on_step(self, metrics: Record) -> None:
        super().on_step(metrics)
        if metrics["step"] % INTERVAL == 0 and self.seconds <= TIME_SHARE * metrics["wall_s"]:
            begin = time.monotonic()
            self.write_report()
            self.seconds += time.monotonic() - begin

    def on_end(self, error: BaseException | None) -> None:
        super().on_end(error)
        self.write_report()

    def write_report(self) -> None:
        if self.is_rank_0:
            folder = self.path.parent
            try:
                write_page([folder], folder / "report.html")
            except Exception as error:
                print(f"no report was written: {error!r}", file=sys.stderr, flush=True)


def main(words: list[str]) -> int:
    folders = [Path(word) for word in words]
    try:
        if not 1 <= len(folders) <= 2:
            raise ValueError(
                "give one run folder, or two to compare: "
                "python -m extras.report runs/guess/NAME [OTHER]"
            )
        name = "report" if len(folders) == 1 else f"beside-{folders[1].resolve().name}"
        path = folders[0] / f"{name}.html"
        write_page(folders, path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
