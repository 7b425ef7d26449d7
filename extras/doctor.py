"""The doctor looks at a run after each step, and names what is wrong, why, and what to do.

Each rule in RULES computes a number from the last lines of metrics.jsonl, and fires if this number
is NaN or above a limit. Example: kl was 0, 0.05, 0.3, 0.3 and 0.4 in the last five steps. The
median 0.3 is above 0.2, so the rule `kl` fires. The doctor then prints cause and remedy, once in a
run.

The doctor adds four metrics. `no_signal_share` and `baseline_bias` judge the advantages.
`canary_mismatch` and `canary_unchanged` show a server that has missed an update (class Canary).

Most rules are applied when a step ends, but a step can hang. So a thread checks every second
whether a function blocks the event loop, and whether too many groups are rejected.

With `callbacks=[extras.doctor.Doctor]` the doctor only warns. `extras.doctor.Strict` also ends the
run if any rule except `waiting` fires (a waiting run is slow but correct). `python -m extras.doctor
runs/guess/one` checks a run afterwards. Its exit code is 1 if a rule fires, and 2 if there is no
run.
"""

import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from statistics import fmean, median
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine import EngineError
from extras import Record, append_record, printable, read_config, read_records
from inference.io_struct import ModelResponse, parse_segment, probe
from training.ranks import share

# The largest rounding error of a log-probability, in nats.
ROUNDING = {"float32": 1e-3, "bfloat16": 1.0}
SOLVED = 0.9  # at this success rate or above, advantages of 0 and a low entropy are normal
BLOCKED_SECONDS = 5.0  # the limit of the rule `blocked_loop`
TICK = 0.05  # seconds between two looks at a loop that does not answer
# After this many batches of rejected groups, the rule `rejection` does not wait for the step's end.
REJECTED_BATCHES = 10
CANARY_TOKENS, ANSWER_TOKENS = 32, 16  # at most, in the canary's prompt and in an answer
# If an update changes the trainer's log-probability of a token by more, the server's answer to the
# canary must change, too.
CANARY_MOVE = 1e-4
LIBRARY = sysconfig.get_path("stdlib")


class Unhealthy(RuntimeError):
    """A rule has fired, and the doctor is strict."""

    is_verdict = True  # the message says everything: no traceback


# ---- the rules


class Rule(NamedTuple):
    """A rule fires if `measure` of the last `steps` lines is NaN or above `limit`."""

    name: str
    steps: int
    measure: Callable[[list[Record], Any], float]
    limit: float
    text: str
    unit: Callable[[Any], float] = lambda config: 1.0  # multiplies the limit


def rounding(config: Any) -> float:
    return ROUNDING[config.actor.dtype]


def fraction(lines: list[Record], part: str, *whole: str) -> float:
    total = sum(line[metric] for line in lines for metric in whole)
    return sum(line[part] for line in lines) / total if total else 0.0


def is_solved(lines: list[Record]) -> bool:
    return fmean(line["success"] for line in lines) >= SOLVED


def entropy_fall(lines: list[Record], config: Any) -> float:
    before = min(m["entropy"] for m in lines[:5])
    after = max(m["entropy"] for m in lines[-2:])
    return 0.0 if is_solved(lines[-2:]) else before / max(after, 1e-9)


def steps_without_gradient(lines: list[Record], config: Any) -> int:
    """Count steps whose rewards differ, but whose advantages or gradient are 0."""
    return sum(
        m["reward_std"] > 0 and (m["grad_norm"] < 1e-8 or m["no_signal_share"] == 1) for m in lines
    )


def steps_without_correction(lines: list[Record], config: Any) -> int:
    """Count steps that trained tokens of older versions with behaviour weights of exactly 1."""
    exact = [
        m["behave_weight_mean"] == m["behave_ess"] == 1 and m["staleness_mean"] > 0 for m in lines
    ]
    has_learnt = any(m["grad_norm"] > 0 for m in lines)
    return config.actor.use_decoupled_loss * has_learnt * sum(exact)


def failed_share(lines: list[Record], config: Any) -> float:
    """The share of episodes that raised an exception. All members of a failed group count."""
    members = fraction(lines, "failed_members", "accepted", "rejected") / config.gconfig.n_samples
    return fraction(lines, "failed", "accepted", "rejected") + members


def is_constant(lines: list[Record], config: Any) -> bool:
    first = lines[0]
    same = all(m["reward"] == first["reward"] and m["reward_std"] == 0 for m in lines)
    return first["step"] == 1 and same


RULES = (
    Rule(
        "stale_weights",
        1,
        lambda m, c: m[0]["canary_mismatch"],
        1,
        "A server does not have the trainer's weights: after a weight update, the two computed "
        "different log-probabilities of the same test tokens. Compare the version that each server "
        "reports at GET /server_info with the step, and read the servers' logs.",
        rounding,
    ),
    Rule(
        "unchanged_weights",
        2,
        lambda m, c: min(x["canary_unchanged"] for x in m),
        0,
        "After a weight update, a server's answer to a test prompt is bit for bit the same as "
        "before, although the trainer scores it differently, so the update did not reach the "
        "server. Read the server's log, and try another weight_update.mode.",
    ),
    Rule(
        "logp_mismatch",
        1,
        lambda m, c: m[0]["logp_mismatch"],
        1,
        "Server and trainer disagree on log-probabilities although their weights are equal, so "
        "every importance weight is wrong. Give both the same number format, and compare their "
        "attention masks, packing, positions and temperatures.",
        rounding,
    ),
    Rule(
        "lag",
        1,
        lambda m, c: m[0]["staleness_max"] - c.rollout.max_head_offpolicyness,
        0,
        "A trained token is older than rollout.max_head_offpolicyness allows, so the staleness "
        "gate or the versions of the tokens are wrong. Do not trust this run; look at staleness.py "
        "and at the server's weight_versions.",
    ),
    Rule(
        "effective_samples",
        3,
        lambda m, c: 1 - median(x["behave_ess"] for x in m),
        0.5,
        "The behaviour weights pi_prox / pi_behav are so unequal that more than half of the "
        "trained tokens are as good as lost. Lower rollout.max_head_offpolicyness or "
        "actor.optimizer.lr.",
    ),
    Rule(
        "no_correction",
        3,
        steps_without_correction,
        1,
        "Tokens of older versions are trained as if the current policy had sampled them, because "
        "every behaviour weight is exactly 1. Check that log pi_behav comes from the server, and "
        "log pi_prox from the forward pass.",
    ),
    Rule(
        "baseline",
        1,
        lambda m, c: adds_up_to_0(c.actor) * m[0]["baseline_bias"],
        0.05,
        "The advantages of a prompt group do not add up to 0, so their baseline is not the mean of "
        "this group. Look for code that finds groups by the position or the text of their rows, "
        "and for a mean that leaves out some rows of the group.",
    ),
    Rule(
        "kl",
        5,
        lambda m, c: median(x["kl"] for x in m),
        0.2,
        "A step (median of five) moves the policy far from the one that sampled the data. Lower "
        "actor.optimizer.lr, actor.ppo_epochs or actor.optimizer.gradient_clipping.",
    ),
    Rule(
        "entropy",
        10,
        entropy_fall,
        5,
        "The entropy falls so fast that the policy stops exploring before the task is solved. "
        "Lower actor.optimizer.lr, or raise actor.kl_ctl, actor.entropy_coeff or "
        "actor.eps_clip_higher.",
    ),
    Rule(
        "truncated",
        5,
        lambda m, c: fraction(m, "truncated", "rows"),
        0.75,  # at the start of a healthy run of the maze, up to half of the rows are truncated
        "Three quarters of the rows end at the length limit, so the rewards judge unfinished "
        "answers. Raise gconfig.max_new_tokens, or find out why answers do not end (often because "
        "a stop token is missing).",
    ),
    Rule(
        "no_signal",
        5,
        lambda m, c: 0 if is_solved(m) else fmean(x["no_signal_share"] for x in m),
        0.8,
        "In most prompt groups all members have the same reward, so their advantages are 0 and "
        "they teach nothing. Choose prompts that the policy solves sometimes, raise "
        "gconfig.n_samples, or look at the reward function.",
    ),
    Rule(
        "zero_gradients",
        3,
        steps_without_gradient,
        2,
        "The batches give no gradient: every advantage is 0 although the rewards differ, or the "
        "gradient itself is 0. Do rewards differ only between prompts? Else look for groups of one "
        "row, for a baseline that belongs to one row, and for a loss mask that is 0.",
    ),
    Rule(
        "rejection",
        3,
        lambda m, c: fraction(m, "rejected", "accepted", "rejected"),
        0.8,
        "Most prompt groups are rejected, so most of the generation is thrown away, and a step may "
        "never end. Look at should_accept_fn, and find out why the workflow returns None (with an "
        "agent: why the agent sets no reward).",
    ),
    Rule(
        "failing",
        3,
        failed_share,
        0.1,
        "Many episodes raise an exception. Read the first traceback in logs/failures.log, and "
        "correct the agent or the reward function.",
    ),
    Rule(
        "constant_reward",
        5,
        is_constant,
        0,
        "All rewards so far are the same number, so there is nothing to learn. Call the reward "
        "function by hand with one answer from the folder rollout/: often its parser never finds "
        "an answer.",
    ),
    Rule(
        "waiting",
        10,
        lambda m, c: fraction(m, "rollout_wait_s", "step_s"),
        0.9,
        "The trainer waits for generation nearly all of the time. Raise "
        "rollout.max_concurrent_rollouts or server.count, or raise rollout.max_head_offpolicyness "
        "so that generation and training overlap.",
    ),
)
TEXTS = {rule.name: rule.text for rule in RULES}
TEXTS["blocked_loop"] = (
    "One function blocks the event loop, so all other episodes stand still. In the blocking "
    "function, await an asynchronous client or asyncio.to_thread, or set "
    "rollout.openai.mode=subproc."
)


def examine(lines: list[Record], config: Any) -> list[Record]:
    found = []
    for rule in RULES:
        last = lines[-rule.steps :]
        try:
            value = rule.measure(last, config) if len(last) == rule.steps else 0
            limit = rule.limit * rule.unit(config)
        except (KeyError, TypeError, AttributeError):  # the run lacks the metric or the key
            continue
        if not value <= limit:  # NaN fires, too
            measured = f"{value:.3g}, limit {limit:g}"
            found.append(describe(last[-1]["step"], rule.name, measured))
    return found


def describe(step: int, rule: str, measured: str) -> Record:
    text = f"doctor: step {step}, {rule} = {measured}. {TEXTS[rule]}"
    return {"step": step, "rule": rule, "text": text}


def bottleneck(lines: list[Record]) -> str:
    waited = fraction(lines[-10:], "rollout_wait_s", "step_s")
    trained = fraction(lines[-10:], "train_s", "step_s")
    shares = f"waiting {waited:.0%}, training {trained:.0%} of the last steps"
    if waited > trained:
        remedy = "raise rollout.max_concurrent_rollouts, server.count or max_head_offpolicyness"
        return f"generation limits the speed ({shares}): {remedy}"
    remedy = "raise actor.mb_tokens, lower actor.ppo_epochs, or add ranks"
    return f"training limits the speed ({shares}): {remedy}"


# ---- metrics of the advantages


def no_signal_share(batch: dict[str, Tensor]) -> float:
    signal = batch["advantages"].abs().amax(1) > 1e-6  # (rows,)
    groups = batch["group_ids"]
    return 1 - len(groups[signal].unique()) / len(groups.unique())


def adds_up_to_0(actor: Any) -> bool:
    is_row_mean = actor.advantages == "extras.advantages.row_mean"
    return actor.adv_norm.mean_level == "group" and not is_row_mean


def baseline_bias(batch: dict[str, Tensor]) -> float:
    """The largest |mean advantage| of a prompt group. Each trained turn counts once."""
    turns = batch["turn_ids"].masked_fill(batch["loss_mask"] == 0, -1)  # (rows, T)
    ends = (turns >= 0) & (turns != turns.roll(-1, 1))  # the last token of each trained turn
    # Groups come from task_ids, because group_ids may be wrong.
    _, group = batch["task_ids"][:, None].expand_as(turns)[ends].unique(return_inverse=True)
    means = torch.bincount(group, batch["advantages"][ends]) / torch.bincount(group)
    return means.abs().max().item() if len(means) else 0.0


# ---- the canary


Tokens = tuple[int, ...]


class Canary:
    """A fixed prompt, which every server completes greedily after each update.

    Server and trainer both compute the log-probabilities of the answer at temperature 1. With equal
    weights, the results differ only by rounding, about 1e-6 nats in float32. In bfloat16, rounding
    can hide that a server has missed an update, but then its answer is bit for bit the same as
    before.

    The trainer does not wait for the new answer. Instead it computes the log-probabilities of the
    previous answer under the new weights. After the next batch, they are compared with the server's
    log-probabilities of the new answer, up to the first token that differs.
    """

    def __init__(self, actor: Any, engine: Any) -> None:
        self.actor, self.engine = actor, engine  # no engine on ranks above 0
        self.thread = ThreadPoolExecutor(1, "canary")
        self.prompt: list[int] = []  # from the first batch of the run
        self.asked: Future[list[Any]] | None = None
        self.answers: list[ModelResponse] = []  # the newest of each server
        # Scores of the answers under the trainer's newest and previous weights: (tokens,) each.
        self.scores: dict[Tokens, Tensor] = {}
        self.before: dict[Tokens, Tensor] = {}

    def choose(self, batch: dict[str, Tensor]) -> None:
        self.prompt = batch["input_ids"][0][batch["attention_mask"][0] > 0][:CANARY_TOKENS].tolist()
        self.ask()

    def ask(self) -> None:
        if self.engine is not None:
            body = probe(self.prompt, ANSWER_TOKENS)
            post, timeout = self.engine.servers.post_all, self.engine.request_timeout
            self.asked = self.thread.submit(post, "/generate", body, timeout)

    def start(self) -> None:
        """Score the newest answers with the new weights, and ask the servers for new answers. All
        ranks call this."""
        self.before, self.scores = self.scores, {}
        if self.answers:
            self.scores = self.score(sorted({tuple(a.output_tokens) for a in self.answers}))
        self.ask()

    def score(self, outputs: list[Tokens]) -> dict[Tokens, Tensor]:
        n = len(self.prompt)
        rows = [torch.tensor([*self.prompt, *tokens]) for tokens in outputs]
        ids = pad_sequence(rows, batch_first=True)  # (rows, T)
        real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        batch = {"input_ids": ids, "attention_mask": real, "loss_mask": real}
        logp = self.actor.compute_logp(batch | {"temperatures": torch.ones(ids.shape)})
        return {tokens: row[n : n + len(tokens)] for tokens, row in zip(outputs, logp)}

    def read_answers(self) -> list[ModelResponse]:
        if self.asked is not None:
            with suppress(EngineError):
                return [parse_segment(answer) for answer in self.asked.result()]
        return []

    def finish(self) -> dict[str, float]:
        """Metrics of the last update, or {} if an answer is missing. All ranks call this."""
        now = share(self.read_answers)
        last, self.answers = self.answers, now or self.answers
        if not (now and self.scores):
            return {}
        found = [compare(*pair, self.scores, self.before) for pair in zip(last, now)]
        errors = torch.cat([errors for errors, _ in found])
        mismatch = errors.max().item() if len(errors) else 0.0
        return {"canary_mismatch": mismatch, "canary_unchanged": sum(same for _, same in found)}


def compare(
    last: ModelResponse,
    now: ModelResponse,
    scores: dict[Tokens, Tensor],
    before: dict[Tokens, Tensor],
) -> tuple[Tensor, bool]:
    """Compare a server's answers before and after an update, `last` and `now`.

    `before` and `scores` hold the trainer's scores of `last` under the old and the new weights.
    Return the errors |scores - now.output_logprobs| (n,) in nats for the first n tokens, which both
    answers share. Also return whether the scores have changed although the answer has not.
    """
    tokens = tuple(last.output_tokens)
    pairs = zip(last.output_tokens, now.output_tokens)
    n = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    errors = (scores[tokens][:n] - torch.tensor(now.output_logprobs[:n])).abs()
    moved = tokens in before and (scores[tokens] - before[tokens]).abs().max() > CANARY_MOVE
    same = now.output_tokens == last.output_tokens and now.output_logprobs == last.output_logprobs
    return errors, bool(moved and same)


# ---- a blocked event loop


def own_frames(thread: threading.Thread, machinery: str) -> list[FrameType]:
    foreign = (LIBRARY, "<", machinery)
    frames = traceback.walk_stack(sys._current_frames().get(thread.ident or 0))
    paths = [(frame, frame.f_code.co_filename) for frame, _ in frames]
    return [f for f, path in paths if not path.startswith(foreign) and "-packages" not in path]


def cpu_seconds(thread: threading.Thread) -> float:
    """The CPU time of a thread; 0 on macOS, which does not report it."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def find_blocker(loop: Any, seconds: float, over: threading.Event) -> str | None:
    """Return the function that blocks the event loop, as "name (file:line)", or None.

    While the loop does not answer, we look at its thread's stack every TICK seconds. On an
    overloaded machine every function is slow, and the one that happens to run is innocent. So all
    looks during `seconds` must find one and the same call of a function. We count looks instead of
    measuring time, because a process without a core also looks less often. The thread's CPU time
    shows what the function does. Below a tenth of the time that has passed, the function sleeps,
    and from seconds / 2 on, it computes. In between the thread has waited for a core, so the
    function is innocent.
    """
    answered = threading.Event()
    loop.call_soon(answered.set)
    suspects: list[FrameType] = []
    looks = 0
    begin = 0.0
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
        self.config = config
        self.path = config.run_dir / "doctor.jsonl"
        # A run that continues does not repeat its findings.
        self.said = {finding.get("rule") for finding in read_records(self.path)}
        self.over = threading.Event()

    def on_start(self, run: Any) -> None:
        self.run = run
        self.step = run.step
        self.canary = Canary(run.actor, run.engine)
        if run.rank == 0:
            threading.Thread(target=self.watch, name="doctor", daemon=True).start()

    def on_batch(self, batch: dict[str, Tensor]) -> dict[str, float]:
        found = {"no_signal_share": no_signal_share(batch), "baseline_bias": baseline_bias(batch)}
        if not self.canary.prompt:
            self.canary.choose(batch)
        return found | self.canary.finish()  # about the previous update

    def on_step(self, metrics: Record) -> None:
        self.step = metrics["step"]
        self.canary.start()
        # After the last step, no later batch would read the answer.
        verdict = self.canary.finish() if self.step == self.run.last_step else {}
        if self.run.rank == 0:
            lines = self.run.history[-max(rule.steps for rule in RULES) :]
            self.report(examine(lines, self.config))
            if verdict:
                self.report(examine([*lines[:-1], metrics | verdict], self.config))

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
        executor = self.run.executor
        step = self.step
        before = executor.stats
        while not self.over.wait(1.0) and executor.dispatcher.thread.is_alive():
            found = []
            if where := find_blocker(executor.dispatcher, BLOCKED_SECONDS, self.over):
                measured = f"{BLOCKED_SECONDS:g} s in {where}"
                found = [describe(self.step + 1, "blocked_loop", measured)]
            now = executor.stats
            if step != self.step:
                step, before = self.step, now
            rejected = now.rejected - before.rejected
            if rejected >= REJECTED_BATCHES * self.config.train_dataset.batch_size:
                accepted = now.accepted - before.accepted
                line = {"step": step + 1, "accepted": accepted, "rejected": rejected}
                found += examine([line] * 3, self.config)  # the rule `rejection` needs 3 lines
            try:
                self.report(found)
            except Unhealthy as error:
                return executor.dispatcher.fail(error)


class Strict(Doctor):
    """A doctor that ends the run at the first finding except `waiting`."""

    strict = True


# ---- the command


def main(words: list[str]) -> int:
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
