"""The doctor checks a run after each step, and names each problem, its cause and its remedy.

A rule is a row of RULES: a name, a number of steps, a measure and a limit. The measure is a pure function of the
configuration and of the last lines of metrics.jsonl. A rule fires if its measure is above its limit or is NaN. For
example, if the metric kl is 0, 0.05, 0.3, 0.3 and 0.4 in the last five lines, its median 0.3 is above the limit 0.2, so
the rule `kl` fires.

The page docs/doctor.md has an entry for each rule, and the doctor prints the first paragraph of the entry. In each run
the doctor reports a rule at most once: on the terminal, and as one line of doctor.jsonl. With doctor=strict, the run
ends if any rule except `waiting` fires.

If an agent blocks the event loop, or if every group is rejected, a step may never end. `watch` starts a thread that
checks the rules `blocked_loop` and `rejection` every second while a step runs.

The limits are far from the values of a normal run, so that a normal run causes no alarm. A rule does not fire if
metrics.jsonl lacks the rule's metric, for example because an earlier revision of the code wrote this file.

`python -m run.doctor runs/guess/one` checks a finished run. The exit code is 1 if a rule fires, and 2 if there is no
run.
"""

import json
import re
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from run.report import read_records

Line = dict[str, Any]  # one line of metrics.jsonl
Finding = dict[str, Any]  # one line of doctor.jsonl, with the keys step, rule and text
ROUNDING = {
    "float32": 1e-3,
    "bfloat16": 0.5,
}  # for each dtype, the largest rounding error of a log-probability (nats)
# If the metric `success` is at least SOLVED, little is left to learn, so advantages of 0 and a low entropy are normal.
SOLVED = 0.9
BLOCKED_SECONDS = 5.0  # limit of the rule `blocked_loop`, in seconds
# If a step has rejected REJECTED_BATCHES times the number of groups in a batch, the doctor checks `rejection` at once.
REJECTED_BATCHES = 10
PAGE = Path(__file__).resolve().parent.parent / "docs" / "doctor.md"
TEXTS = {
    name: " ".join(text.split())
    for name, text in re.findall(r"## (\w+)\n\n(.+?)\n\n", PAGE.read_text(), re.S)
}


class Unhealthy(RuntimeError):
    """A rule has fired in a run with doctor=strict, so the run ends."""


class Rule(NamedTuple):
    """A check of the last `steps` lines of metrics.jsonl. The rule fires if `measure(lines, config)` is above
    `limit`."""

    name: str
    steps: int
    measure: Callable[[list[Line], Any], float]
    limit: float


def share(lines: list[Line], part: str, *whole: str) -> float:
    """Divide the sum of the metric `part` by the sum of the metrics `whole`. Return 0 if the sum of `whole` is 0."""
    total = sum(line[metric] for line in lines for metric in whole)
    return sum(line[part] for line in lines) / total if total else 0.0


def is_solved(lines: list[Line]) -> bool:
    """Return whether the policy succeeds so often that little is left to learn."""
    return fmean(line["success"] for line in lines) >= SOLVED


def entropy_fall(lines: list[Line], config: Any) -> float:
    """Return the lowest entropy of the first five lines divided by the highest entropy of the last two lines."""
    before, after = (
        min(line["entropy"] for line in lines[:5]),
        max(line["entropy"] for line in lines[-2:]),
    )
    return 0.0 if is_solved(lines[-2:]) else before / max(after, 1e-9)


def steps_without_gradient(lines: list[Line], config: Any) -> int:
    """Count the steps whose gradient is 0, or whose advantages are all 0 although the rewards in the batch differ."""
    return sum(
        m["grad_norm"] < 1e-8 or (m["no_signal_share"] == 1 and m["reward_std"] > 0) for m in lines
    )


def steps_without_correction(lines: list[Line], config: Any) -> int:
    """Count the steps in which tokens of older versions were trained with a behaviour weight of exactly 1."""
    exact = [
        m["behave_weight_mean"] == m["behave_ess"] == 1 and m["staleness_mean"] > 0 for m in lines
    ]
    return config.actor.use_decoupled_loss * sum(exact)


def failed_share(lines: list[Line], config: Any) -> float:
    """Return the share of episodes that raised an exception. A failed group counts as n_samples episodes."""
    members = share(lines, "failed_members", "accepted", "rejected") / config.gconfig.n_samples
    return share(lines, "failed", "accepted", "rejected") + members


def is_constant(lines: list[Line], config: Any) -> bool:
    """Return whether all rewards of the run's first five steps are the same."""
    first = lines[0]
    return first["step"] == 1 and all(
        m["reward"] == first["reward"] and m["reward_std"] == 0 for m in lines
    )


RULES = (
    Rule("stale_weights", 1, lambda m, c: m[0]["canary_mismatch"] / ROUNDING[c.actor.dtype], 1),
    Rule("unchanged_weights", 2, lambda m, c: min(x["canary_unchanged"] for x in m), 0),
    Rule("logp_mismatch", 1, lambda m, c: m[0]["logp_mismatch"] / ROUNDING[c.actor.dtype], 1),
    Rule("lag", 1, lambda m, c: m[0]["staleness_max"] - c.rollout.max_head_offpolicyness, 0),
    Rule("effective_samples", 3, lambda m, c: 1 - median(x["behave_ess"] for x in m), 0.5),
    Rule("no_correction", 3, steps_without_correction, 1),
    Rule(
        "baseline",
        1,
        lambda m, c: (c.actor.adv_norm.mean_level == "group") * m[0]["baseline_bias"],
        0.05,
    ),
    Rule("kl", 5, lambda m, c: median(x["kl"] for x in m), 0.2),
    Rule("entropy", 10, entropy_fall, 5),
    Rule("truncated", 5, lambda m, c: share(m, "truncated", "rows"), 0.5),
    Rule(
        "no_signal",
        5,
        lambda m, c: 0 if is_solved(m) else fmean(x["no_signal_share"] for x in m),
        0.8,
    ),
    Rule("zero_gradients", 3, steps_without_gradient, 2),
    Rule("rejection", 3, lambda m, c: share(m, "rejected", "accepted", "rejected"), 0.8),
    Rule("failing", 3, failed_share, 0.1),
    Rule("constant_reward", 5, is_constant, 0),
    Rule("waiting", 10, lambda m, c: share(m, "rollout_wait_s", "step_s"), 0.9),
)


def examine(lines: list[Line], config: Any) -> list[Finding]:
    """Check every rule on the step of the last line in `lines`, and return one finding for each rule that fires."""
    found = []
    for rule in RULES:
        last = lines[-rule.steps :]
        try:
            value = rule.measure(last, config) if len(last) == rule.steps else 0
        # A rule is skipped if its metric is null, or if the run's files lack a metric or a key that the rule reads.
        except (KeyError, TypeError, AttributeError):
            continue
        if not value <= rule.limit:  # NaN also fires
            found.append(
                describe(last[-1]["step"], rule.name, f"{value:.3g}, limit {rule.limit:g}")
            )
    return found


def describe(step: int, rule: str, measured: str) -> Finding:
    """Return the finding that is printed if a rule fires. The finding's text ends with the first paragraph of the
    rule's entry in docs/doctor.md."""
    return {
        "step": step,
        "rule": rule,
        "text": f"doctor: step {step}, {rule} = {measured}. {TEXTS[rule]}",
    }


def bottleneck(lines: list[Line]) -> str:
    """Return a sentence that says whether generation or training limits the speed, and what to change."""
    waited, trained = (share(lines[-10:], part, "step_s") for part in ("rollout_wait_s", "train_s"))
    side, remedy = "training", "raise actor.mb_tokens, lower actor.ppo_epochs, or add ranks"
    if waited > trained:
        side, remedy = (
            "generation",
            "raise rollout.max_concurrent_rollouts, server.count or max_head_offpolicyness",
        )
    return f"{side} limits the speed (waiting {waited:.0%}, training {trained:.0%} of the last steps): {remedy}"


class Doctor:
    """Reports each finding of a run once, on the terminal and in the run's doctor.jsonl."""

    def __init__(self, config: Any) -> None:
        self.config, self.path = config, config.run_dir / "doctor.jsonl"
        # A restarted run does not report the findings that its doctor.jsonl already contains.
        self.said = {finding["rule"] for finding in read_records(self.path)}
        self.step = 0  # the last finished step

    def check(self, lines: list[Line]) -> None:
        """Check the rules after a step; the last item of `lines` holds the metrics of this step. With doctor=strict, a
        finding raises Unhealthy."""
        self.step = lines[-1]["step"]
        self.report(examine(lines, self.config) if self.config.doctor != "off" else [])

    def report(self, findings: list[Finding]) -> None:
        """Print and write a finding if its rule has not fired before. With doctor=strict, a finding raises
        Unhealthy."""
        for finding in findings:
            if finding["rule"] not in self.said:
                self.said.add(finding["rule"])
                with self.path.open("a") as file:
                    file.write(json.dumps(finding) + "\n")
                print(finding["text"], file=sys.stderr, flush=True)
                # The rule `waiting` ends no run, because a run that waits for generation trains correctly, but slowly.
                if self.config.doctor == "strict" and finding["rule"] != "waiting":
                    raise Unhealthy(finding["text"])

    def watch(self, executor: Any, stack: ExitStack) -> None:
        """Start a thread that checks every second for a blocked event loop and for rejected groups. The thread ends
        when `stack` closes. With doctor=strict, a finding stops the executor."""
        if self.config.doctor != "off":
            over = threading.Event()
            thread = threading.Thread(
                target=self._look_on, args=(executor, over), name="doctor", daemon=True
            )
            thread.start()
            stack.callback(thread.join)
            stack.callback(over.set)  # the stack calls its last callback first

    def _look_on(self, executor: Any, over: threading.Event) -> None:
        step, before = self.step, executor.stats
        while not over.wait(1.0):
            try:
                if where := executor.dispatcher.runner.find_blocker(BLOCKED_SECONDS):
                    self.report(
                        [
                            describe(
                                self.step + 1, "blocked_loop", f"{BLOCKED_SECONDS:g} s in {where}"
                            )
                        ]
                    )
                if step != self.step:
                    step, before = self.step, executor.stats
                counts = {
                    k: getattr(executor.stats, k) - getattr(before, k)
                    for k in ("accepted", "rejected")
                }
                if counts["rejected"] >= REJECTED_BATCHES * self.config.train_dataset.batch_size:
                    # After a stop, cancelled tasks count as rejected, and `check_alive` raises RuntimeError.
                    executor.dispatcher.check_alive()
                    self.report(examine([{"step": step + 1, **counts}] * 3, self.config))
            except Unhealthy as error:
                return executor.fail(error)
            except RuntimeError:
                return None


def main(folders: list[str]) -> int:
    """Check every step of an existing run, print the findings, and return the exit code."""
    if "--help" in folders:
        print(__doc__)
        return 0
    folder = Path(*folders)
    try:
        text = (folder / "metrics.jsonl").read_text()
        if not text.endswith("\n"):
            raise ValueError(
                f"{folder}/metrics.jsonl has no step, or its last line is cut short: delete that line"
            )
        lines, config = (
            list(map(json.loads, text.splitlines())),
            OmegaConf.load(folder / "config.yaml"),
        )
    except (OSError, ValueError) as error:
        print(
            f"error: {error}; the command is python -m run.doctor FOLDER, with the folder of a run",
            file=sys.stderr,
        )
        return 2
    findings = read_records(folder / "doctor.jsonl")
    for end in range(1, len(lines) + 1):
        known = {finding["rule"] for finding in findings}
        findings += [
            finding for finding in examine(lines[:end], config) if finding["rule"] not in known
        ]
    for finding in findings:
        print(finding["text"])
    print(f"{len(lines)} steps; {len(findings)} of {len(TEXTS)} rules fire; {bottleneck(lines)}")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
