"""Write report.html, one page that shows a run, or two runs side by side. The page needs no server and no network.

    `python -m run.report runs/guess/one` writes runs/guess/one/report.html.
    `python -m run.report runs/guess/one runs/guess/other` writes runs/guess/one/beside-other.html.

A training run writes its report every `logger.report_interval` steps, and once more when the run ends, even after
Ctrl-C or a failure. The report is made only from files in the run's folder, so it can also be written for a run that
crashed. Each file gives a part of the report:

    `metrics.jsonl` gives the curves and the lag histogram.
    `trace.json` gives the timeline: the phases of the trainer, the prompt groups and the weight updates.
    `tokens/` gives the trajectories: each token with its version, its log-probabilities and its advantage.
    `config.yaml` gives the keys of the objective, with which the report computes which tokens were clipped.
    `doctor.jsonl` gives the warnings of the doctor.

This module turns the files of a run into one JSON object. The template run/report.html contains the script that draws
this object in the browser. The report holds at most MAX_TOKENS tokens, from at most MAX_STEPS steps, so that the page
stays small. The page may show the tokens of only some rows of a prompt group. For each group the page shows the rewards
of all rows, and whether any row has an advantage other than 0.
"""

import json
import math
import sys
from collections import defaultdict
from contextlib import suppress
from itertools import compress, groupby
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppo import token_objectives
from training.config import PPOActorConfig
from training.proximal import interpolation, loglinear

MAX_STEPS, MAX_TOKENS, MAX_GROUPS = (
    24,
    60_000,
    4000,
)  # maximum numbers of steps, tokens and groups on a page
FILES = (
    "metrics.jsonl",
    "trace.json",
    "tokens",
)  # every run's folder contains at least one of FILES
# COLUMNS names the (B, T) tensors that the page shows.
COLUMNS = "input_ids versions turn_ids turn_rewards logprobs prox_logp theta_logp advantages states"
TEMPLATE = Path(__file__).with_suffix(".html")
Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Return the JSON objects of a file with one object per line. A line that is incomplete after a kill is left out.

    The lines of a trace may end with a comma. If the file does not exist, the result is an empty list.
    """
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            records.append(json.loads(line.rstrip(", ")))
    return [record for record in records if isinstance(record, dict)]


def spread(items: list, count: int) -> list:
    """Return at most `count` evenly spaced items of the list, including the first and the last item."""
    if len(items) <= count:
        return items
    return [items[round(k * (len(items) - 1) / (count - 1))] for k in range(count)]


def clean(value: Any) -> Any:
    """Return a value with its floats rounded to five significant digits. NaN and infinity become None, because JSON has
    neither."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return [clean(x) for x in value] if isinstance(value, list) else value


# ---- the timeline


def read_timeline(records: list[Record]) -> Record:
    """Return three parts of a trace: the trainer's phases, the weight updates and the prompt groups. Times are seconds.

    `phases` lists each phase as [name, begin, duration], without a gap (`fill_gaps`).
    `weights` lists each weight update as [time, version].
    `groups` lists each group as {task, lane, begin, end, used, state, versions, reward}. Groups in the same lane do not
    overlap in time. `used` is the time at which a step consumed the group, and `reward` is the mean of the group's
    rewards.
    """
    zero = min((record["ts"] for record in records if "ts" in record), default=0)
    spans: list[list] = []
    starts, weights, end = [], [], ""
    groups: dict[str, Record] = {}
    last = 0.0
    for record in records:
        kind, args = record.get("ph", ""), record.get("args", {})
        time = (record.get("ts", zero) - zero) / 1e6
        last = max(last, time + record.get("dur", 0) / 1e6)
        if kind == "X":
            spans.append([record["name"], time, record["dur"] / 1e6])
        elif kind == "M" and args.get("name") == "trainer":
            starts.append(time)
        elif kind == "i" and "version" in args:
            weights.append([time, args["version"]])
        elif kind == "i":
            end = args.get("error", "")
        elif kind == "b":
            groups[record["id"]] = {"task": args["task"], "begin": time, "state": "running"}
        elif group := groups.get(record.get("id", "")):
            group |= args | {"e": {"end": time}, "n": {"state": record["name"]}}[kind]
            group |= {"used": time} if record["name"] == "consume" else {}
    return {
        "phases": clean(fill_gaps(spans, starts, last)),
        "weights": clean(weights),
        "groups": pack(list(groups.values())[-MAX_GROUPS:], last),
        "seconds": last,
        "end": end,
    }


def fill_gaps(spans: list[list], starts: list[float], last: float) -> list[list]:
    """Return the trainer's phases in order of time, with an additional phase in each gap of more than 1 ms between 0
    and `last`.

    If the run was restarted in a gap, the gap becomes a phase "not running". A gap after the last phase becomes a phase
    "stop", and any other gap becomes a phase "other". If a kill interrupts a phase, the phase is missing in the trace,
    and its time becomes a part of a gap.
    """
    phases, now = [], 0.0
    for span in [*sorted(spans, key=lambda span: span[1]), ["", last, 0.0]]:
        if span[1] - now > 1e-3:
            restarted = any(now < start <= span[1] for start in starts)
            phases.append(
                ["not running" if restarted else "other" if span[0] else "stop", now, span[1] - now]
            )
        phases.append(span)
        now = max(now, span[1] + span[2])
    return phases[:-1]


def pack(groups: list[Record], last: float) -> list[Record]:
    """Give each group the first lane of the timeline that is free when the group starts. If the trace lacks the end of
    a group, the group gets the end `last`."""
    ends: list[float] = []
    for group in sorted(groups, key=lambda group: group["begin"]):
        end = group.setdefault("end", last)
        lane = next((k for k, free in enumerate(ends) if free <= group["begin"]), len(ends))
        ends[lane : lane + 1] = [end]  # appends the end if the lane is new
        group |= {"lane": lane, "begin": clean(group["begin"]), "end": clean(end)}
        if rewards := group.pop("rewards", None):
            group["reward"] = clean(sum(rewards) / len(rewards))
    return groups


# ---- the trajectories


def token_states(batch: dict[str, Tensor], config: PPOActorConfig) -> Tensor:
    """Return each token's state (B, T): 0 untrained, 1 trained, 2 clipped, 3 dropped because of its behaviour weight.

    The states describe the last optimizer step on the batch. `batch` must contain log pi_prox, either computed by a
    forward pass or estimated.
    """
    theta, prox = batch["theta_logp"], batch["prox_logp"]  # (B, T)
    mask, old = batch["loss_mask"] > 0, batch["logprobs"] if config.use_decoupled_loss else prox
    ids = torch.arange(len(mask))[:, None]  # (B, 1) the row of each token
    *_, clipped, dropped = token_objectives(
        theta, prox, old, batch["advantages"], mask, config, ids
    )
    return mask * torch.where(dropped, 3, torch.where(clipped, 2, 1))


def read_step(
    path: Path, config: PPOActorConfig, budget: int, words: dict[str, str]
) -> Record | None:
    """Return the groups of a step and as many turns as `budget` tokens allow, or None for a damaged file.

    Adds the text of each shown token to `words`, under the token's id.
    """
    try:
        with safe_open(path, "pt") as file:
            batch = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            texts = json.loads((file.metadata() or {}).get("words", "{}"))
    except (SafetensorError, OSError):
        return None
    step, old = int(path.stem), batch["logprobs"]
    # The batch has no log pi_prox if standard PPO uses the server's log-probabilities, or if log pi_prox is only
    # estimated.
    if "prox_logp" not in batch:
        alpha = interpolation(
            batch["versions"], step - 1, batch["step_fraction"][:, None]
        )  # (B, T)
        batch["prox_logp"] = (
            loglinear(old, batch["theta_logp"], alpha) if config.use_decoupled_loss else old
        )
    batch["states"] = token_states(batch, config)
    rows_of = defaultdict(list)  # for each task id, the task's rows in order
    for row, task in enumerate(batch["task_ids"].tolist()):
        rows_of[task].append(row)
    groups = []
    for task, rows in rows_of.items():
        signal = bool(batch["advantages"][rows].any())
        groups.append({"task": task, "rewards": as_lists(batch["rewards"][rows]), "signal": signal})
    # Until the budget is spent, take the first row of every group, then the second row of every group, and so on.
    order = sorted((k, task, row) for task, rows in rows_of.items() for k, row in enumerate(rows))
    columns = {key: as_lists(batch[key]) for key in COLUMNS.split()}
    real, parents = batch["attention_mask"].tolist(), batch["parents"].tolist()
    turns, paths = list[Record](), dict[tuple[int, int], list]()
    for k, task, row in order:
        budget -= sum(real[row])
        if budget < 0 and turns:
            break
        lists = {key: list(compress(column[row], real[row])) for key, column in columns.items()}
        paths[task, k] = add_turns(
            turns, lists, paths.get((task, parents[row]), []), {"task": task, "row": k}
        )
    words |= {str(i): texts.get(str(i), f"#{i}") for turn in turns for i in turn["ids"]}
    for turn in turns:
        del turn["whole"]
    return {"step": step, "groups": groups, "turns": turns}


def as_lists(x: Tensor) -> list:
    """Return a tensor as nested lists of integers, or of numbers rounded to four decimal places."""
    if not x.is_floating_point():
        return x.tolist()
    return x.double().round(decimals=4).tolist() if x.isfinite().all() else clean(x.tolist())


def add_turns(turns: list[Record], row: Record, above: list[int], names: Record) -> list[int]:
    """Append the turns of a row to `turns`, and return the positions of the row's turns in `turns`.

    Each appended turn contains the entries of the dict `names`. The row continues the conversation of its parent row.
    `above` lists the positions of the parent row's turns in `turns`. If the row and its parent row share a turn,
    `turns` contains the shared turn once. Each turn in `turns` holds only the tokens after the end of its parent turn:
    first the new messages of the turn's prompt, then the sampled tokens.
    """
    ids, states = row["input_ids"], row["states"]
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
        # If `path` is empty, turn `number` - 1 of the parent row becomes the parent of turn `number`.
        earlier = path[-1:] or [i for i in above if turns[i]["turn"] == number - 1] or [-1]
        turn = names | {
            "turn": number,
            "parent": earlier[0],
            "reward": row["turn_rewards"][at],
            "ids": ids[begin:end],
        }
        turn |= {key: row[key][at:end] for key in ("versions", "advantages", "states")}
        turn["logps"] = [row[key][at:end] for key in ("logprobs", "prox_logp", "theta_logp")]
        turns.append(
            turn | {"prompt": at - begin, "end": end, "whole": ids[:end]}
        )  # prompt: number of prompt tokens
        begin, path = end, [*path, len(turns) - 1]
    return path


# ---- the page


def read_run(folder: Path, share: float = 1.0) -> Record:
    """Return the data of a run for the page. `share` is the run's part of the MAX_TOKENS tokens that a page may show.

    Raises ValueError if the folder holds no files of a run.
    """
    if not any((folder / name).exists() for name in FILES):
        raise ValueError(
            f"{folder} holds no run: {', '.join(FILES)} are missing; give a folder such as runs/guess/NAME"
        )
    lines, path = read_records(folder / "metrics.jsonl"), folder / "config.yaml"
    config: Any = OmegaConf.load(path) if path.exists() else OmegaConf.create({})
    actor: Any = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(PPOActorConfig), config.get("actor", {}))
    )
    words: dict[str, str] = {}
    files = spread(sorted((folder / "tokens").glob("*.safetensors")), MAX_STEPS)
    budget = int(MAX_TOKENS * share / max(1, len(files)))
    steps = [step for file in files if (step := read_step(file, actor, budget, words))]
    keys = list(dict.fromkeys(key for line in lines for key in line))
    return {
        "name": "/".join(
            folder.resolve().parts[-2:]
        ),  # the names of the experiment and of the trial
        "max_steps": config.get("max_steps"),
        "eta": OmegaConf.select(config, "rollout.max_head_offpolicyness"),
        "discount": OmegaConf.select(config, "rollout.openai.turn_discount"),
        "metrics": {key: [clean(line.get(key)) for line in lines] for key in keys},
        "timeline": read_timeline(read_records(folder / "trace.json")),
        "doctor": [
            record["text"] for record in read_records(folder / "doctor.jsonl") if "text" in record
        ],
        "steps": steps,
        "words": words,
    }


def make_page(folders: list[Path]) -> str:
    """Return the page of one run or of several runs. Raises ValueError if a folder holds no run.

    Each "<" in the data is escaped, so that no text from an agent can close the script element that holds the data.
    """
    runs = [read_run(folder, 1 / len(folders)) for folder in folders]
    data = json.dumps({"runs": runs}, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    return TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", data)


def write_report(folder: Path) -> None:
    """Write `folder`/report.html. If the page cannot be written, print the error, so that the run continues."""
    try:
        (folder / "report.html").write_text(make_page([folder]), encoding="utf-8")
    except Exception as error:
        print(f"no report was written: {error!r}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Write the report of one or two run folders and return the exit code."""
    if "--help" in argv:
        print(__doc__)
        return 0
    folders = [Path(word) for word in argv]
    try:
        if not 1 <= len(folders) <= 2:
            raise ValueError(
                "give one run folder, or two to compare: python -m run.report runs/guess/NAME [OTHER]"
            )
        page = make_page(folders)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = folders[0] / (
        "report.html" if len(folders) == 1 else f"beside-{folders[1].resolve().name}.html"
    )
    path.write_text(page, encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
