"""The doctor looks at a run after each step, and names what is wrong, why, and what to do.

A rule is a row of RULES: a name, a number of steps, a measure of so many last lines of
metrics.jsonl, and a limit. It fires above its limit, and also at NaN. For example, if kl was 0,
0.05, 0.3, 0.3 and 0.4 in the last five steps, its median 0.3 is above 0.2, so `kl` fires. Its entry
in docs/doctor.md begins with the text that is printed: the cause and the remedy. Each rule speaks
once a run.

Two things no metric of the run shows. A server may have missed an update, so the trainer and every
server score the canary, two short sequences, after each update. And a step may never end, so a
thread looks every second for a function that blocks the event loop, and for groups that are all
rejected.

`callbacks=[extras.doctor.Doctor]` warns. `extras.doctor.Strict` ends the run, except for `waiting`:
a run that waits is slow and correct. `python -m extras.doctor runs/guess/one` checks a run
afterwards; it exits with 1 if a rule fires and with 2 if there is no run. A rule whose metric is
missing is silent, so a run of an older revision can be checked as well.
"""

import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine import EngineError
from extras import Record, append_record, printable, read_config, read_records

# The largest rounding error of a log-probability, in nats.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.5}
SOLVED = 0.9  # with so much success, advantages of 0 and a low entropy are normal
BLOCKED_SECONDS = 5.0  # the limit of `blocked_loop`
TICK = 0.05  # seconds between two looks at a loop that does not answer
# A step that has rejected so many batches of groups is looked at before it ends.
REJECTED_BATCHES = 10
CANARY_ROWS, CANARY_TOKENS = 2, 16  # two rows, so that a server that swaps rows is noticed
CANARY_MOVE = 1e-4  # an update that moves a score of the trainer so far must move each server's
PAGE = Path(__file__).resolve().parent.parent / "docs" / "doctor.md"
TEXTS = {
    name: " ".join(text.split())
    for name, text in re.findall(r"## (\w+)\n\n(.+?)\n\n", PAGE.read_text(), re.S)
}
LIBRARY = sysconfig.get_path("stdlib")


class Unhealthy(RuntimeError):
    """A rule has fired, and the doctor is strict."""

    is_verdict = True  # the message says everything: no traceback


# ---- the rules


class Rule(NamedTuple):
    """Fires if `measure(last lines, config)` is above `limit`, given `steps` lines."""

    name: str
    steps: int
    measure: Callable[[list[Record], Any], float]
    limit: float


def share(lines: list[Record], part: str, *whole: str) -> float:
    total = sum(line[metric] for line in lines for metric in whole)
    return sum(line[part] for line in lines) / total if total else 0.0


def is_solved(lines: list[Record]) -> bool:
    return fmean(line["success"] for line in lines) >= SOLVED


def entropy_fall(lines: list[Record], config: Any) -> float:
    """Lowest entropy of the first five lines / highest of the last two."""
    before, after = (f(m["entropy"] for m in x) for f, x in ((min, lines[:5]), (max, lines[-2:])))
    return 0.0 if is_solved(lines[-2:]) else before / max(after, 1e-9)


def steps_without_gradient(lines: list[Record], config: Any) -> int:
    """Steps with a gradient of 0, or with advantages of 0 although the rewards differ."""
    return sum(
        m["grad_norm"] < 1e-8 or (m["no_signal_share"] == 1 and m["reward_std"] > 0) for m in lines
    )


def steps_without_correction(lines: list[Record], config: Any) -> int:
    """Steps that trained tokens of older versions with behaviour weights of exactly 1."""
    exact = [
        m["behave_weight_mean"] == m["behave_ess"] == 1 and m["staleness_mean"] > 0 for m in lines
    ]
    return config.actor.use_decoupled_loss * sum(exact)


def failed_share(lines: list[Record], config: Any) -> float:
    """The share of episodes that raised. A failed group counts as all of its members."""
    members = share(lines, "failed_members", "accepted", "rejected") / config.gconfig.n_samples
    return share(lines, "failed", "accepted", "rejected") + members


def is_constant(lines: list[Record], config: Any) -> bool:
    """Whether the first steps of the run have brought one and the same reward."""
    first = lines[0]
    same = all(m["reward"] == first["reward"] and m["reward_std"] == 0 for m in lines)
    return first["step"] == 1 and same


def group_bias(lines: list[Record], config: Any) -> float:
    return (config.actor.adv_norm.mean_level == "group") * lines[0]["baseline_bias"]


def signal_lost(lines: list[Record], config: Any) -> float:
    return 0 if is_solved(lines) else fmean(m["no_signal_share"] for m in lines)


RULES = (
    Rule("stale_weights", 1, lambda m, c: m[0]["canary_mismatch"] / ROUNDING[c.actor.dtype], 1),
    Rule("unchanged_weights", 2, lambda m, c: min(x["canary_unchanged"] for x in m), 0),
    Rule("logp_mismatch", 1, lambda m, c: m[0]["logp_mismatch"] / ROUNDING[c.actor.dtype], 1),
    Rule("lag", 1, lambda m, c: m[0]["staleness_max"] - c.rollout.max_head_offpolicyness, 0),
    Rule("effective_samples", 3, lambda m, c: 1 - median(x["behave_ess"] for x in m), 0.5),
    Rule("no_correction", 3, steps_without_correction, 1),
    Rule("baseline", 1, group_bias, 0.05),
    Rule("kl", 5, lambda m, c: median(x["kl"] for x in m), 0.2),
    Rule("entropy", 10, entropy_fall, 5),
    Rule("truncated", 5, lambda m, c: share(m, "truncated", "rows"), 0.5),
    Rule("no_signal", 5, signal_lost, 0.8),
    Rule("zero_gradients", 3, steps_without_gradient, 2),
    Rule("rejection", 3, lambda m, c: share(m, "rejected", "accepted", "rejected"), 0.8),
    Rule("failing", 3, failed_share, 0.1),
    Rule("constant_reward", 5, is_constant, 0),
    Rule("waiting", 10, lambda m, c: share(m, "rollout_wait_s", "step_s"), 0.9),
)


def examine(lines: list[Record], config: Any) -> list[Record]:
    """A finding for each rule that fires on the step of the last line."""
    found = []
    for rule in RULES:
        last = lines[-rule.steps :]
        try:
            value = rule.measure(last, config) if len(last) == rule.steps else 0
        except (KeyError, TypeError, AttributeError):  # the run lacks the metric or the key
            continue
        if not value <= rule.limit:  # NaN fires, too
            measured = f"{value:.3g}, limit {rule.limit:g}"
            found.append(describe(last[-1]["step"], rule.name, measured))
    return found


def describe(step: int, rule: str, measured: str) -> Record:
    text = f"doctor: step {step}, {rule} = {measured}. {TEXTS[rule]}"
    return {"step": step, "rule": rule, "text": text}


def bottleneck(lines: list[Record]) -> str:
    """Which side limits the speed, and what to change."""
    waited, trained = (share(lines[-10:], part, "step_s") for part in ("rollout_wait_s", "train_s"))
    shares = f"waiting {waited:.0%}, training {trained:.0%} of the last steps"
    if waited > trained:
        remedy = "raise rollout.max_concurrent_rollouts, server.count or max_head_offpolicyness"
        return f"generation limits the speed ({shares}): {remedy}"
    remedy = "raise actor.mb_tokens, lower actor.ppo_epochs, or add ranks"
    return f"training limits the speed ({shares}): {remedy}"


# ---- the canary


class Canary:
    """Two short sequences that the trainer and every server score after each update.

    The programs differ, so equal weights give scores that differ by rounding, about 1e-6 nats in
    float32. Larger differences mean other weights. Scores with the same bits as before the update
    reveal a missed one even where an update moves them by less than bfloat16 rounds. A request
    waits behind all others at a busy server; the trainer reads the answer one step later, so it
    does not wait.
    """

    def __init__(self, actor: Any, engine: Any) -> None:
        self.actor, self.engine = actor, engine  # no engine on ranks above 0
        self.threads = ThreadPoolExecutor(CANARY_ROWS, "canary")
        self.rows: dict[str, Tensor] = {}  # from the first batch of the run
        self.asked: list[Future[list[list[float]]]] = []  # one request for each row
        self.trainer = self.before = torch.empty(0)  # scores: the trainer's; all, one update ago

    def start(self, batch: dict[str, Tensor]) -> None:
        """Score with the trainer, and ask the servers. All ranks call this."""
        if not self.rows:
            first = {key: x[:CANARY_ROWS] for key, x in batch.items()}
            cut = {k: x[:, :CANARY_TOKENS] if x.dim() > 1 else x for k, x in first.items()}
            cut["temperatures"] = torch.ones_like(cut["temperatures"])
            self.rows = cut | {"loss_mask": cut["attention_mask"]}  # every token has a score
        ids, mask = self.rows["input_ids"], self.rows["attention_mask"]
        self.trainer = self.actor.compute_logp(self.rows)[mask]  # (L,)
        if self.engine is not None:
            rows = [row[real].tolist() for row, real in zip(ids, mask)]
            self.asked = [self.threads.submit(self.engine.score, row) for row in rows]

    def finish(self) -> dict[str, float]:
        """The verdict on the last update: {} if none was asked for, or a server did not answer."""
        asked, self.asked = self.asked, []
        try:
            rows = [answer.result() for answer in asked]
        except EngineError:
            rows = []
        if not rows:
            return {}
        servers = [torch.cat([*map(torch.tensor, scores)]) for scores in zip(*rows)]  # (L,) each
        before, self.before = self.before, torch.stack([self.trainer, *servers])
        return compare_scores(before, self.before)


def compare_scores(before: Tensor, now: Tensor) -> dict[str, float]:
    """Scores before and after an update, (1 + servers, L): the trainer's are row 0.

    canary_mismatch is in nats; canary_unchanged counts servers whose scores kept every bit although
    the trainer's moved.
    """
    mismatch = (now[1:] - now[0]).abs().nan_to_num(torch.inf).max().item()
    unchanged = 0
    if before.shape == now.shape and (now[0] - before[0]).abs().max() > CANARY_MOVE:
        unchanged = int((now[1:] == before[1:]).all(1).sum())
    return {"canary_mismatch": mismatch, "canary_unchanged": unchanged}


# ---- a blocked event loop


def own_frames(thread: threading.Thread, machinery: str) -> list[FrameType]:
    """A thread's frames outside of libraries and of the loop's own file, innermost first."""
    foreign = (LIBRARY, "<", machinery)
    frames = traceback.walk_stack(sys._current_frames().get(thread.ident or 0))
    paths = [(frame, frame.f_code.co_filename) for frame, _ in frames]
    return [f for f, path in paths if not path.startswith(foreign) and "-packages" not in path]


def cpu_seconds(thread: threading.Thread) -> float:
    """How long a thread has computed. macOS does not tell: 0, as if it always slept."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def find_blocker(loop: Any, seconds: float, over: threading.Event) -> str | None:
    """The call that keeps the event loop from answering, as "name (file:line)", or None.

    On a starved machine every call takes long, and the code that happens to run is innocent. So the
    same call must be there at every look, for `seconds`; the time is counted in looks, because a
    starved process cannot look, either. And meanwhile its thread must have slept (less than a tenth
    of the time on a core: it waits inside the call) or have computed for half of `seconds`. A
    thread between the two wants a core and does not get it.
    """
    answered = threading.Event()
    loop.call_soon(answered.set)
    suspects: list[FrameType] = []
    looks, begin = 0, 0.0
    machinery = sys.modules[type(loop).__module__].__file__ or ""
    while not answered.wait(TICK) and loop.thread.is_alive() and not over.is_set():
        frames = own_frames(loop.thread, machinery)
        suspects = [frame for frame in suspects if frame in frames]
        if not suspects:
            suspects, looks, begin = frames, 0, cpu_seconds(loop.thread)
            continue
        looks += 1
        passed, computed = looks * TICK, cpu_seconds(loop.thread) - begin
        if passed >= seconds and not 0.1 * passed <= computed < seconds / 2:
            code = suspects[0].f_code
            return f"{code.co_name} ({code.co_filename}:{suspects[0].f_lineno})"
    return None


# ---- the callbacks


class Doctor:
    """Reports each finding once, on the terminal and in doctor.jsonl."""

    strict = False

    def __init__(self, config: Any) -> None:
        self.config, self.path = config, config.run_dir / "doctor.jsonl"
        # A run that continues does not repeat its findings.
        self.said = {finding["rule"] for finding in read_records(self.path)}
        self.over = threading.Event()

    def on_start(self, run: Any) -> None:
        self.run, self.step = run, run.step
        self.canary = Canary(run.actor, run.engine)
        if run.rank == 0:
            threading.Thread(target=self.watch, name="doctor", daemon=True).start()

    def on_batch(self, batch: dict[str, Tensor]) -> dict[str, float]:
        self.batch = batch
        return self.canary.finish()  # on the update of the step before

    def on_step(self, metrics: Record) -> None:
        self.step = metrics["step"]
        self.canary.start(self.batch)
        if self.run.rank == 0:
            lines = self.run.history[-max(rule.steps for rule in RULES) :]
            self.report(examine(lines, self.config))
            if self.step == self.run.last_step:  # no later step will read the answer
                self.report(examine([*lines[:-1], metrics | self.canary.finish()], self.config))

    def on_end(self, error: BaseException | None) -> None:
        self.over.set()

    def report(self, findings: list[Record]) -> None:
        for finding in findings:
            if finding["rule"] not in self.said:
                self.said.add(finding["rule"])
                append_record(self.path, finding)
                print(printable(finding["text"]), file=sys.stderr, flush=True)
                if self.strict and finding["rule"] != "waiting":
                    raise Unhealthy(finding["text"])

    def watch(self) -> None:
        """Look at the running step every second, until the run ends or a strict doctor ends it."""
        executor = self.run.executor
        step, before = self.step, asdict(executor.stats)
        while not self.over.wait(1.0):
            found = []
            if where := find_blocker(executor.loop, BLOCKED_SECONDS, self.over):
                measured = f"{BLOCKED_SECONDS:g} s in {where}"
                found = [describe(self.step + 1, "blocked_loop", measured)]
            now = asdict(executor.stats)
            if step != self.step:
                step, before = self.step, now
            line = {"step": step + 1} | {k: now[k] - before[k] for k in ("accepted", "rejected")}
            if line["rejected"] >= REJECTED_BATCHES * self.config.train_dataset.batch_size:
                found += examine([line] * 3, self.config)
            try:
                self.report(found)
            except Unhealthy as error:
                return executor.fail(error)


class Strict(Doctor):
    """A doctor that ends the run at its first finding."""

    strict = True


# ---- the command


def main(words: list[str]) -> int:
    """Check every step of a run. Return the exit code."""
    folder = Path(*words)
    lines = read_records(folder / "metrics.jsonl")
    if not lines:
        print(
            f"error: {folder}/metrics.jsonl holds no step; "
            "the command is python -m extras.doctor FOLDER, with the folder of a run",
            file=sys.stderr,
        )
        return 2
    config = read_config(folder)
    findings = {f["rule"]: f for f in read_records(folder / "doctor.jsonl")}
    for end in range(1, len(lines) + 1):
        for finding in examine(lines[:end], config):
            findings.setdefault(finding["rule"], finding)
    for finding in findings.values():
        print(printable(finding["text"]))
    print(f"{len(lines)} steps; {len(findings)} of {len(TEXTS)} rules fire; {bottleneck(lines)}")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
