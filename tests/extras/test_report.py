"""The report shows what a run's files hold: curves, the timeline, and every token.

Most tests read the data inside the page. Where Chromium is installed, the last ones open the page
and read what its script has drawn.
"""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_trace import start

from extras import read_records
from extras.report import MAX_TOKENS, Report, fill_gaps, main, make_page, read_timeline
from extras.trace import Trace

TEXTS = {1: "<user>", 2: "guess", 5: "</script><b>bad</b>", 6: "é", 7: "\n", 8: " eight", 9: "nine"}
BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
CHROMIUM = next(filter(None, BROWSERS), "")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="the page's script needs a browser")


def make_batch() -> dict[str, torch.Tensor]:
    """Return the batch of step 5, which trains version 4. Group 7 is a conversation whose first
    turn (tokens 3 and 5, with an update between them) has two continuations: the tokens 6 and 7, of
    which the clip acts on 6, and the token 8, whose behaviour weight is above the cap. The rows of
    group 8 have equal rewards."""
    ids = torch.tensor([[1, 2, 3, 5, 1, 6, 7], [1, 2, 3, 5, 1, 8, 0], *[[1, 2, 9, 0, 0, 0, 0]] * 2])
    alone = [-1, -1, 4, -1, -1, -1, -1]
    versions = torch.tensor([[-1, -1, 2, 3, -1, 3, 3], [-1, -1, 2, 3, -1, 4, -1], alone, alone])
    made = versions >= 0
    mask = made.clone()
    mask[1, :4] = False  # the first row trains the turn that both rows have
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    batch = {"input_ids": ids, "attention_mask": ids > 0, "loss_mask": mask, "versions": versions}
    batch |= {"turn_ids": torch.where(made, (torch.arange(7) > 4).long(), -1), "rewards": rewards}
    batch |= {"turn_rewards": rewards[:, None] * made, "advantages": torch.zeros(4, 7)}
    batch |= {"logprobs": -0.5 * made, "prox_logp": -0.5 * made + 0.1 * mask}
    batch |= {"parents": torch.tensor([-1, 0, -1, -1]), "task_ids": torch.tensor([7, 7, 8, 8])}
    batch["turn_rewards"][:2, 2:4] = 0.25  # half the mean of its continuations
    batch["advantages"][0, 5:], batch["advantages"][1, 5] = 0.5, -0.5
    batch["theta_logp"] = batch["prox_logp"].clone()
    batch["theta_logp"][0, 5] += 1.0  # log(pi_theta / pi_prox) = 1 and A > 0
    batch["prox_logp"][1, 5] += 3.0
    return batch


def save_batch(path: Path, batch: dict[str, torch.Tensor]) -> None:
    ids = batch["input_ids"].unique().tolist()
    words = json.dumps({i: TEXTS.get(i, f"t{i}") for i in ids})
    save_file({key: x.contiguous() for key, x in batch.items()}, path, {"words": words})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run with the steps 5 to 7, which all have the same batch."""
    folder = tmp_path / "e" / "t"
    (folder / "tokens").mkdir(parents=True)
    keys = "{eps_clip: 0.2, eps_clip_higher: 0.2, behave_imp_weight_cap: 5.0, dtype: x}"
    rollout = "{max_head_offpolicyness: 2, openai: {turn_discount: 0.5}}"
    config = f"max_steps: 3\nactor: {keys}\nrollout: {rollout}\n"
    (folder / "config.yaml").write_text(config)
    lines = []
    for step, reward in ((5, 0.25), (6, 0.5), (7, 1.0)):
        save_batch(folder / "tokens" / f"{step:05d}.safetensors", make_batch())
        line: dict[str, Any] = {"step": step, "version": step - 1, "reward": reward}
        line |= {"loss": float("nan"), "logp_mismatch": 1e-6, "wall_s": 1.0 * step}
        line |= {"lag_counts": [3, 3, 1], "staleness_mean": 0.7, "entropy": 0.5}
        lines.append(line | ({"eval_reward": 0.75, "eval_reward_sem": 0.1} if step == 6 else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_trace(folder)
    return folder


def make_trace(folder: Path) -> None:
    """Write the trace of one step and three groups: consumed, rejected and still running."""
    (trace, _), begin = start(Trace, folder), time.monotonic()
    told = {"reward": {"versions": [0, 1], "rewards": [1.0, 0.0]}}
    for event in ("start 7", "start 8", "reward 7", "finish 7", "accept 7", "start 9"):
        trace.on_event(event[:-2], int(event[-1]), told.get(event[:-2], {}))
    for event in ("finish 8", "reject 8", "consume 7"):
        trace.on_event(event[:-2], int(event[-1]), {})
    step_s = time.monotonic() - begin
    shares = {"rollout_wait_s": 0.3, "train_s": 0.4, "sync_s": 0.1, "step_s": 1.0}
    trace.on_step({"step": 1, **{key: share * step_s for key, share in shares.items()}})
    trace.on_end(None)


def read_page(page: str) -> list[dict[str, Any]]:
    """Return the runs on a page, which has two script elements: the data and the script."""
    data, _ = re.findall(r"<script[^>]*>(.*?)</script", page, re.DOTALL | re.IGNORECASE)
    return json.loads(data)["runs"]


# ---------------------------------------------------------------- the trajectories


def test_every_token_has_its_version_and_its_numbers(folder: Path) -> None:
    """A turn has the batch's tokens, versions, log-probabilities, advantages and states, and its
    final reward."""
    [run] = read_page(make_page([folder]))
    step, batch = run["steps"][-1], make_batch()
    a, b, c = (turn for turn in step["turns"] if turn["task"] == 7)
    assert (a["ids"], a["prompt"], a["versions"]) == ([1, 2, 3, 5], 2, [2, 3])
    assert (b["ids"], b["prompt"], b["versions"]) == ([1, 6, 7], 1, [3, 3])
    assert (c["ids"], c["prompt"], c["versions"]) == ([1, 8], 1, [4])
    assert (a["states"], b["states"], c["states"]) == ([1, 1], [2, 1], [3])
    for key, found in zip(("logprobs", "prox_logp", "theta_logp"), b["logps"]):
        assert found == pytest.approx(batch[key][0, 5:7].tolist(), abs=1e-4)
    assert b["advantages"] == pytest.approx(batch["advantages"][0, 5:7].tolist(), abs=1e-4)
    assert b["advantages"][0] > 0
    # Two rows contain turn `a`; the page has it once, with two children.
    at = step["turns"].index(a)
    assert [turn["parent"] for turn in (a, b, c)] == [-1, at, at]
    assert [turn["reward"] for turn in (a, b, c)] == [0.25, 1.0, 0.0]
    signals = {group["task"]: group["signal"] for group in step["groups"]}
    assert signals == {7: True, 8: False}, "equal rewards have advantages of 0"


def test_an_agents_text_stays_text(folder: Path) -> None:
    """A token `</script>` does not end the page's script, and the data holds it unchanged, like the
    doctor's findings."""
    text = "doctor: step 3, kl = 0.3, limit 0.1. </script> The policy moved far."
    (folder / "doctor.jsonl").write_text(json.dumps({"step": 3, "rule": "kl", "text": text}) + "\n")
    page = make_page([folder])
    assert "<b>bad" not in page
    [run] = read_page(page)
    assert (run["words"]["5"], run["doctor"]) == (TEXTS[5], [text])


def test_a_page_is_small(folder: Path) -> None:
    """A page has at most MAX_TOKENS tokens, but the rewards of all rows."""
    wide = {key: x.repeat(200, *[1] * (x.dim() - 1)) for key, x in make_batch().items()}
    wide["task_ids"] = torch.arange(len(wide["task_ids"])).int() // 20
    wide["parents"].fill_(-1)
    for step in range(8, 50):
        save_file(wide, folder / "tokens" / f"{step:05d}.safetensors")
    page = make_page([folder])
    [run] = read_page(page)
    tokens = sum(len(turn["ids"]) for step in run["steps"] for turn in step["turns"])
    assert 0.5 * MAX_TOKENS < tokens <= MAX_TOKENS
    assert sum(len(group["rewards"]) for group in run["steps"][-1]["groups"]) == 800
    assert [step["step"] for step in run["steps"]][:: len(run["steps"]) - 1] == [5, 49]
    assert len(page) < 5e6


# Version 2 at the middle of step 7, which began at version 6: alpha = 4 / 4.5.
@pytest.mark.parametrize(("decoupled", "prox"), [(True, -0.5 - 4 / 4.5 * 0.5), (False, -0.5)])
def test_a_batch_without_a_proximal_policy(folder: Path, decoupled: bool, prox: float) -> None:
    """If no forward pass computed log pi_prox, the page estimates it from the versions; in standard
    PPO it is the server's."""
    batch = make_batch()
    del batch["prox_logp"]
    batch["theta_logp"] = torch.full((4, 7), -1.0)
    config = folder / "config.yaml"
    keys = f"actor: {{use_decoupled_loss: {decoupled}, "
    config.write_text(config.read_text().replace("actor: {", keys))
    save_batch(folder / "tokens" / "00007.safetensors", batch)
    [run] = read_page(make_page([folder]))
    assert run["steps"][-1]["turns"][0]["logps"][1][0] == pytest.approx(prox, abs=1e-4)


# ---------------------------------------------------------------- the timeline


def test_the_timeline_says_what_became_of_each_group(folder: Path) -> None:
    """A group has its end, its versions and its mean reward; updates have their version."""
    [run] = read_page(make_page([folder]))
    timeline = run["timeline"]
    by_task = {group["task"]: group for group in timeline["groups"]}
    states = {task: group["state"] for task, group in by_task.items()}
    assert states == {7: "consume", 8: "reject", 9: "running"}
    assert (by_task[7]["versions"], by_task[7]["reward"]) == ([0, 1], 0.5)
    assert by_task[7]["begin"] <= by_task[7]["end"] <= by_task[7]["used"] <= timeline["seconds"]
    assert [version for _, version in timeline["weights"]] == [1]
    lanes = {task: group["lane"] for task, group in by_task.items()}
    assert lanes[8] != lanes[7] == lanes[9], "group 9 started when the lane of group 7 was free"


def test_no_second_is_unexplained() -> None:
    """Phases follow each other without a gap: the time before a restart is `not running`."""
    spans = [["train", 2.0, 1.0], ["sync", 0.5, 0.5], ["sync", 9.0, 1.0]]
    phases = fill_gaps(spans, [0.0, 8.0], last=12.0)
    names = ["start", "sync", "other", "train", "not running", "sync", "stop"]
    assert [phase[0] for phase in phases] == names
    now = 0.0
    for _, begin, duration in phases:
        assert begin == now
        now = begin + duration
    assert now == 12.0
    assert read_timeline([])["phases"] == []


# ---------------------------------------------------------------- run files


def test_the_curves_are_the_metrics(folder: Path) -> None:
    """The page has every metric of every step; NaN and missing ones are null."""
    [run] = read_page(make_page([folder]))
    metrics = run["metrics"]
    assert metrics["reward"] == [0.25, 0.5, 1.0]
    assert metrics["loss"] == [None] * 3
    assert metrics["eval_reward"] == [None, 0.75, None]
    assert metrics["lag_counts"] == [[3, 3, 1]] * 3
    assert (run["eta"], run["discount"], run["max_steps"]) == (2, 0.5, 3)


GONE = ["config.yaml", "metrics.jsonl", "trace.json", "tokens", "cut", "pipes"]


@pytest.mark.parametrize("gone", GONE)
def test_a_crashed_run_has_a_report(folder: Path, gone: str) -> None:
    """Files may be missing or cut by a kill, and a pipe in the place of one does not hang the
    report."""
    names = ("metrics.jsonl", "trace.json", "tokens/00005.safetensors")
    if gone == "cut":
        for name in names:
            (folder / name).write_bytes((folder / name).read_bytes()[:-40])
        assert len(read_records(folder / "metrics.jsonl")) == 2
    elif gone == "pipes":
        for name in (*names, "config.yaml", "doctor.jsonl", "report.html"):
            (folder / name).unlink(missing_ok=True)
            os.mkfifo(folder / name)
    elif gone == "tokens":
        shutil.rmtree(folder / gone)
    else:
        (folder / gone).unlink()
    assert main([str(folder)]) == 0
    [run] = read_page((folder / "report.html").read_text())
    assert len(run["steps"]) == {"tokens": 0, "cut": 2, "pipes": 2}.get(gone, 3)


@pytest.mark.parametrize("words", [["{tmp}/nowhere"], ["a", "b", "c"], []])
def test_a_wrong_folder_is_one_line(tmp_path: Path, capsys, words: list[str]) -> None:
    """The command says in one line which folder it wants, and returns 2."""
    assert main([word.format(tmp=tmp_path) for word in words]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "runs/guess/NAME" in said.err


def test_two_runs_are_on_one_page(folder: Path, tmp_path: Path, capsys) -> None:
    """The page of two folders is written into the first one, under the name of the second."""
    assert main([str(folder), str(shutil.copytree(folder, tmp_path / "other"))]) == 0
    path = folder / "beside-other.html"
    assert capsys.readouterr().out.strip() == str(path)
    assert [run["name"] for run in read_page(path.read_text())] == ["e/t", f"{tmp_path.name}/other"]


# ---------------------------------------------------------------- the callback


def test_a_run_that_failed_says_why(folder: Path) -> None:
    """If an exception has ended a run, its report names the exception."""
    start(Report, folder)[0].on_end(ValueError("no"))
    [run] = read_page((folder / "report.html").read_text())
    assert run["timeline"]["end"] == "ValueError('no')"
    assert len(run["timeline"]["groups"]) == 3, "the records of the earlier start"


def test_reports_take_a_small_share_of_the_time(tmp_path: Path, monkeypatch) -> None:
    """If a step and a report take 1 s each, the first 120 steps have reports at steps 10, 50 and
    100."""
    seconds, written = [0.0], list[int]()

    def write(self: Report) -> None:
        written.append(step)
        seconds[0] += 1

    monkeypatch.setattr("extras.report.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(Report, "write_report", write)
    report, _ = start(Report, tmp_path)
    phases = dict.fromkeys(("step_s", "rollout_wait_s", "train_s", "sync_s"), 0.0)
    for step in range(1, 121):
        report.on_step({"step": step, "wall_s": step, **phases})
    assert written == [10, 50, 100]


def test_a_report_that_fails_ends_no_run(tmp_path: Path, capsys) -> None:
    """One line says why there is no page, and the run goes on."""
    report: Any = start(Report, tmp_path)[0]
    (tmp_path / "trace.json").unlink()
    report.write_report()
    assert not (tmp_path / "report.html").exists()
    assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------- browser


def draw(path: Path, tmp_path: Path, script: str = "") -> str:
    """Return the document after the page's script and `script` have run. An error in either
    fails."""
    path.write_text(path.read_text().replace("</body>", f"<script>{script}</script></body>"))
    flags = "--headless=new --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom"
    size = f"--window-size=1200,900 --virtual-time-budget=5000 --user-data-dir={tmp_path}/chrome"
    command = [CHROMIUM, *flags.split(), *size.split(), path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def found(pattern: str, page: str) -> str:
    match = re.search(pattern, page, re.DOTALL)
    assert match is not None, pattern
    return match[1]


@needs_chromium
def test_a_browser_draws_the_run(folder: Path, tmp_path: Path) -> None:
    """The page has curves, a timeline, and tokens coloured by version. An arrow key or a click
    chooses a token, and a panel shows its numbers."""
    finding = {"step": 3, "rule": "kl", "text": "the policy moved"}
    (folder / "doctor.jsonl").write_text(json.dumps(finding) + "\n")
    main([str(folder)])
    key = "new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true})"
    press = f"document.activeElement.dispatchEvent({key})"
    read = "document.body.dataset.{} = document.getElementById('token').textContent"
    click = "document.querySelectorAll('[data-j]')[4].click()"
    steps = ["document.getElementById('trees').focus()", press, press, read.format("keys")]
    steps += [click, read.format("click")]
    page = draw(folder / "report.html", tmp_path, ";".join(steps))
    curve = found(r'data-curve="reward".*?<path d="([^"]*)"', page)
    a, b, c = (float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)", curve))
    assert (a - b) * 2 == pytest.approx(b - c, abs=0.3), "rewards .25, .5 and 1"
    assert page.count('class="eval"') == 1
    expected = ['data-phase="rollout_wait"', 'data-weights="1"', "no signal"]
    expected.append('<p class="doctor">the policy moved</p>')
    assert [text for text in expected if text not in page] == []
    colours = re.findall(r'class="tok ([^"]*)"[^>]*data-version="(\d+)"[^>]*>([^<]*)', page)
    second = "&lt;/script&gt;&lt;b&gt;bad&lt;/b&gt;"
    assert colours[:2] == [("made v2 ", "2", "t3"), ("made v3 ", "3", second)]
    numbers = "version3 (lag 1)log π_behav-0.5000log π_prox-0.4000"
    assert numbers in found(r'data-keys="([^"]*)"', page)
    clicked = found(r'data-click="([^"]*)"', page)
    assert "dropped" in clicked
    assert "π_prox/π_behav22.198" in clicked


@needs_chromium
def test_a_browser_draws_two_runs_and_an_empty_one(folder: Path, tmp_path: Path) -> None:
    """Two runs share a chart, and each has a timeline. A run without a step has a page."""
    shutil.copytree(folder, tmp_path / "other")
    main([str(folder), str(tmp_path / "other")])
    page = draw(folder / "beside-other.html", tmp_path)
    assert re.findall(r'data-timeline="(\d)"', page) == ["0", "1"]
    curve = found(r'(data-curve="reward".*?</svg>)', page)
    assert re.findall(r'data-run="(\d)"', curve) == ["0", "1"]
    make_trace(tmp_path)
    main([str(tmp_path)])
    page = draw(tmp_path / "report.html", tmp_path)
    assert "no step was finished" in page
    assert "has saved no tokens" in page
