"""The report shows the contents of a run's files: curves, the timeline, and every token with its version and numbers.

Most tests read the data inside the page, without a browser. If Chromium is installed, the last tests open the page in
Chromium and read what the page's script has drawn.
"""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from omegaconf import OmegaConf
from safetensors.torch import save_file

from cache import InteractionCache, InteractionWithTokenLogpReward
from inference.io_struct import ModelResponse
from ppo import compute_advantages
from rollout.trajectory import complete, concat_padded_tensors
from run.load import load
from run.logger import Logger, Trace, describe_batch
from run.report import (
    MAX_TOKENS,
    fill_gaps,
    main,
    make_page,
    read_records,
    read_timeline,
    write_report,
)
from staleness import RolloutStat
from workflow import to_tensors

TEXTS = {1: "<user>", 2: "guess", 5: "</script><b>bad</b>", 6: "é", 7: "\n", 8: " eight", 9: "nine"}
TOKENIZER: Any = SimpleNamespace(
    decode=lambda ids, **_: "".join(TEXTS.get(int(i), f"t{int(i)}") for i in ids)
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def turn(
    prompt: list[int], output: list[int], versions: list[int], *said: str
) -> InteractionWithTokenLogpReward:
    """Return a finished call. The last text of `said` is the answer, and the earlier texts are the messages."""
    messages = [
        {"role": "assistant" if k % 2 else "user", "content": text} for k, text in enumerate(said)
    ]
    response = ModelResponse(prompt, output, [-0.5] * len(output), versions)
    return InteractionWithTokenLogpReward(
        messages[:-1], model_response=response, output_message_list=messages[-1:]
    )


def make_batch() -> dict[str, torch.Tensor]:
    """Return the batch of step 5, which trains the policy of version 4. Group 7 is a conversation with a branch, and
    the two rows of group 8 have equal rewards."""
    tree = InteractionCache()
    tree.enter(
        "a", turn([1, 2], [3, 5], [2, 3], "q", "a")
    )  # a weight update took place between tokens 3 and 5
    tree.enter("b", turn([1, 2, 3, 5, 1], [6, 7], [3, 3], "q", "a", "more", "b"))
    tree.enter("c", turn([1, 2, 3, 5, 1], [8], [4], "q", "a", "more", "c"))
    tree.set_reward("b", 1.0)
    tree.set_reward("c", 0.0)
    tree.apply_reward_discount(0.5)
    alone = InteractionCache()
    for name in "de":
        alone.enter(name, turn([1, 2], [9], [4], "q", name))
        alone.set_reward(name, 1.0)
    groups = [to_tensors(cache.export_interactions("concat")) for cache in (tree, alone)]
    batch = concat_padded_tensors([complete(group, 7 + k) for k, group in enumerate(groups)])
    trained = batch["loss_mask"] > 0
    config = load(
        ["actor.eps_clip=0.2", "actor.eps_clip_higher=0.2", "actor.behave_imp_weight_cap=5"]
    ).actor
    config.adv_norm.std_level, config.adv_norm.per_turn = "none", True
    batch["prox_logp"] = batch["logprobs"] + 0.1 * trained
    batch["theta_logp"] = batch["prox_logp"].clone()
    batch["theta_logp"][0, 5] += (
        1.0  # token 6: log(pi_theta / pi_prox) = 1 and A > 0, so the clip acts on the token
    )
    batch["prox_logp"][1, 5] += 3.0  # token 8: pi_prox / pi_behav is above the cap
    batch["advantages"] = compute_advantages(batch, config)
    return batch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run with three lines of metrics. In tokens/, the files of the steps 5 to 7 all contain the
    same batch."""
    words = [
        f"fileroot={tmp_path}",
        "experiment_name=e",
        "trial_name=t",
        "logger.live=false",
        "max_steps=3",
    ]
    config = load(
        [
            *words,
            "actor.eps_clip_higher=0.2",
            "rollout.openai.turn_discount=0.5",
            "rollout.max_head_offpolicyness=2",
        ]
    )
    config.logger.report_interval = config.logger.sample_interval = 0
    config.run_dir.mkdir(parents=True)
    OmegaConf.save(OmegaConf.structured(config), config.run_dir / "config.yaml")
    logger = Logger(config, SimpleNamespace(tokenizer=TOKENIZER, stats=RolloutStat()))
    keys = ("success", "entropy", "clip_frac", "step_s", "rollout_wait_s", "train_s", "sync_s")
    batch = make_batch()
    for step, reward in ((5, 0.25), (6, 0.5), (7, 1.0)):
        line = (
            {"step": step, "version": step - 1}
            | describe_batch(batch, 4)
            | dict.fromkeys(keys, 0.5)
        )
        extra = {"reward": reward, "loss": float("nan"), "logp_mismatch": 1e-6}
        logger.log(
            batch,
            line | extra | ({"eval_reward": 0.75, "eval_reward_sem": 0.1} if step == 6 else {}),
        )
    make_trace(config.run_dir / "trace.json")
    return config.run_dir


def make_trace(path: Path) -> None:
    """Write the trace of a run with one group that a step consumed, one rejected group and one group that is still
    running."""
    trace = Trace(path)
    with trace.span("start"):
        trace.event("start", 7)
        trace.event("start", 8)
    trace.mark("weights", version=1)
    trace.event("reward", 7, versions=[0, 1], rewards=[1.0, 0.0])
    trace.event("finish", 7)
    trace.event("accept", 7)
    trace.event("start", 9)
    trace.event("finish", 8)
    trace.event("reject", 8)
    with trace.span("rollout_wait", {}):
        trace.event("consume", 7)
    trace.close()


class Scripts(HTMLParser):
    """Collects the texts of the page's script elements with an HTML parser, as a browser does."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.inside = tag == "script"
        self.texts += [""] * self.inside

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data


def read_page(page: str) -> list[dict[str, Any]]:
    """Return the data of the runs on a page. The page must have two script elements: one for the data and one for the
    script."""
    scripts = Scripts()
    scripts.feed(page)
    assert len(scripts.texts) == 2
    return json.loads(scripts.texts[0])["runs"]


# ---------------------------------------------------------------- the trajectories


def test_every_token_has_its_version_and_its_numbers(folder: Path) -> None:
    """Each turn on the page has the tokens, versions, log-probabilities, advantages and states of the batch."""
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


def test_a_shared_turn_is_shown_once_with_its_final_reward(folder: Path) -> None:
    """Both rows of group 7 contain turn `a`, but the page has this turn once, with two children. The reward of turn `a`
    is half the mean of the rewards of its two children."""
    [run] = read_page(make_page([folder]))
    a, b, c = (turn for turn in run["steps"][-1]["turns"] if turn["task"] == 7)
    places = {id(turn): k for k, turn in enumerate(run["steps"][-1]["turns"])}
    assert (a["parent"], b["parent"], c["parent"]) == (-1, places[id(a)], places[id(a)])
    assert (a["reward"], b["reward"], c["reward"]) == (0.25, 1.0, 0.0)


def test_a_group_without_signal_is_marked(folder: Path) -> None:
    """Group 8 has equal rewards, so all of its advantages are 0 and the page marks the group."""
    [run] = read_page(make_page([folder]))
    assert {group["task"]: group["signal"] for group in run["steps"][-1]["groups"]} == {
        7: True,
        8: False,
    }


def test_an_agents_text_stays_text(folder: Path) -> None:
    """A token with the text `</script>` does not end the page's script, and the data holds the unchanged text."""
    page = make_page([folder])
    assert "<b>bad" not in page
    assert read_page(page)[0]["words"]["5"] == TEXTS[5]


def test_the_doctors_warnings_are_on_the_page(folder: Path) -> None:
    """The page has the text of every warning in doctor.jsonl."""
    text = "doctor: step 3, kl = 0.3, limit 0.1. </script> The policy moved far."
    (folder / "doctor.jsonl").write_text(json.dumps({"step": 3, "rule": "kl", "text": text}) + "\n")
    [run] = read_page(make_page([folder]))
    assert run["doctor"] == [text]


def test_a_page_is_small(folder: Path) -> None:
    """A page has at most MAX_TOKENS tokens, even for a run with many long rows. The page has the rewards of all groups,
    even of groups whose tokens are not on the page."""
    batch = make_batch()
    wide = {key: x.repeat(500, *[1] * (x.dim() - 1)) for key, x in batch.items()}
    wide["task_ids"] = torch.arange(len(wide["task_ids"])).int() // 20
    wide["parents"].fill_(-1)
    for step in range(8, 80):
        save_file(wide, folder / "tokens" / f"{step:05d}.safetensors")
    page = make_page([folder])
    [run] = read_page(page)
    assert (
        0.5 * MAX_TOKENS
        < sum(len(turn["ids"]) for step in run["steps"] for turn in step["turns"])
        <= MAX_TOKENS
    )
    assert sum(len(group["rewards"]) for group in run["steps"][-1]["groups"]) == 2000
    assert [step["step"] for step in run["steps"]][:: len(run["steps"]) - 1] == [5, 79]
    assert len(page) < 5e6


# ---------------------------------------------------------------- the timeline


def test_the_trace_is_json_after_every_record(tmp_path: Path) -> None:
    """trace.json is valid JSON after every record, so the file of a killed run can be parsed."""
    trace = Trace(tmp_path / "trace.json")
    for task in range(3):
        trace.event("start", task)
        events = json.loads((tmp_path / "trace.json").read_text())
        assert events[-1]["args"] == {"task": task}
    trace.mark("weights", version=4)
    trace.event("reward", 0, versions=[3, 4], rewards=[1.0])
    trace.close()
    *_, mark, reward = json.loads((tmp_path / "trace.json").read_text())
    assert (mark["ph"], mark["args"]) == ("i", {"version": 4})
    assert reward["args"] == {"task": 0, "versions": [3, 4], "rewards": [1.0]}


def test_a_phase_that_fails_is_recorded(tmp_path: Path) -> None:
    """If a phase of the trainer raises an exception, the trace still contains the phase."""
    trace = Trace(tmp_path / "trace.json")
    with pytest.raises(KeyboardInterrupt), trace.span("train", {}):
        raise KeyboardInterrupt
    trace.close()
    assert json.loads((tmp_path / "trace.json").read_text())[-1]["name"] == "train"


def test_the_timeline_says_what_became_of_each_group(folder: Path) -> None:
    """The timeline contains the weight updates and the groups. For each group, the timeline has the versions, the mean
    reward and the end."""
    [run] = read_page(make_page([folder]))
    timeline = run["timeline"]
    by_task = {group["task"]: group for group in timeline["groups"]}
    assert {task: group["state"] for task, group in by_task.items()} == {
        7: "consume",
        8: "reject",
        9: "running",
    }
    assert (by_task[7]["versions"], by_task[7]["reward"]) == ([0, 1], 0.5)
    assert by_task[7]["begin"] <= by_task[7]["end"] <= by_task[7]["used"] <= timeline["seconds"]
    assert [version for _, version in timeline["weights"]] == [1]
    assert len({by_task[7]["lane"], by_task[8]["lane"]}) == 2
    assert by_task[9]["lane"] == by_task[7]["lane"], (
        "group 9 started when the lane of group 7 was free"
    )


def test_no_second_is_unexplained() -> None:
    """The phases of the timeline follow each other without a gap. The time before a restart is the phase `not running`,
    and the time after the last phase is the phase `stop`."""
    phases = fill_gaps(
        [["train", 2.0, 1.0], ["start", 0.5, 0.5], ["start", 9.0, 1.0]], [0.0, 8.0], last=12.0
    )
    assert [phase[0] for phase in phases] == [
        "other",
        "start",
        "other",
        "train",
        "not running",
        "start",
        "stop",
    ]
    now = 0.0
    for _, begin, duration in phases:
        assert begin == now
        now = begin + duration
    assert now == 12.0


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    """If an exception ended a run, the run's page contains the exception."""
    trace = Trace(tmp_path / "trace.json")
    trace.mark("end", error="ValueError('no')")
    trace.close()
    assert read_page(make_page([tmp_path]))[0]["timeline"]["end"] == "ValueError('no')"


# ---------------------------------------------------------------- run files


def test_the_curves_are_the_metrics(folder: Path) -> None:
    """The page has every metric of every step. NaN and missing metrics become null."""
    [run] = read_page(make_page([folder]))
    metrics = run["metrics"]
    assert metrics["reward"] == [0.25, 0.5, 1.0]
    assert metrics["loss"] == [None] * 3
    assert metrics["eval_reward"] == [None, 0.75, None]
    assert metrics["lag_counts"] == [[3, 3, 1]] * 3
    assert (run["eta"], run["discount"], run["max_steps"]) == (2, 0.5, 3)


@pytest.mark.parametrize("gone", ["config.yaml", "metrics.jsonl", "trace.json", "tokens", "cut"])
def test_a_crashed_run_has_a_report(folder: Path, gone: str) -> None:
    """A report is written even if one of the run's files is missing. A report is written even if the ends of
    metrics.jsonl, of trace.json and of a batch's file are missing, for example because the run was killed."""
    if gone == "cut":
        for path in (
            folder / "metrics.jsonl",
            folder / "trace.json",
            folder / "tokens" / "00005.safetensors",
        ):
            path.write_bytes(path.read_bytes()[:-40])
        assert len(read_records(folder / "metrics.jsonl")) == 2
    elif gone == "tokens":
        shutil.rmtree(folder / gone)
    else:
        (folder / gone).unlink()
    assert main([str(folder)]) == 0
    assert len(read_page((folder / "report.html").read_text())) == 1


@pytest.mark.parametrize("words", [["{tmp}"], ["{tmp}/nowhere"], ["a", "b", "c"]])
def test_a_wrong_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """For a folder without a run, or for three folders, run/report.py prints one line and returns exit code 2."""
    assert main([word.format(tmp=tmp_path) for word in words]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "runs/guess/NAME" in said.err


def test_no_folder_is_one_line() -> None:
    """Without an argument, `python -m run.report` prints one line and ends with exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "run.report"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "runs/guess/NAME" in done.stderr


def test_two_runs_are_on_one_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report of two run folders contains the data of both runs. If the second folder is named `other`, the report's
    file is beside-other.html in the first folder."""
    other = shutil.copytree(folder, tmp_path / "other")
    assert main([str(folder), str(other)]) == 0
    path = folder / "beside-other.html"
    assert capsys.readouterr().out.strip() == str(path)
    assert [run["name"] for run in read_page(path.read_text())] == ["e/t", f"{tmp_path.name}/other"]


def test_a_report_that_fails_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a run cannot write its report, the run prints one line and continues."""
    write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------- browser


def draw(path: Path, tmp_path: Path, script: str = "") -> str:
    """Run the page's script and then `script` in Chromium, and return the resulting document as HTML. An error in the
    page's script or in `script` fails the test."""
    path.write_text(path.read_text().replace("</body>", f"<script>{script}</script></body>"))
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--window-size=1200,900",
    ]
    command = [
        CHROMIUM,
        *flags,
        f"--user-data-dir={tmp_path / 'chrome'}",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=200)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: the page's script is not run without it")
def test_a_browser_draws_the_run(folder: Path, tmp_path: Path) -> None:
    """Chromium draws the reward curve, the evaluation point, the timeline, and the tokens in the colours of their
    versions."""
    (folder / "doctor.jsonl").write_text(
        json.dumps({"step": 3, "rule": "kl", "text": "the policy moved"}) + "\n"
    )
    write_report(folder)
    page = draw(folder / "report.html", tmp_path)
    curve = re.search(r'data-curve="reward".*?<path d="([^"]*)"', page, re.DOTALL)
    assert curve is not None
    heights = [float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)", curve[1])]
    assert len(heights) == 3
    assert (heights[0] - heights[1]) * 2 == pytest.approx(heights[1] - heights[2], abs=0.3), (
        "rewards .25, .5 and 1"
    )
    assert page.count('class="eval"') == 1
    assert 'data-phase="rollout_wait"' in page
    assert 'data-weights="1"' in page
    colours = re.findall(r'class="tok ([^"]*)"[^>]*data-version="(\d+)"[^>]*>([^<]*)', page)
    assert colours[:2] == [
        ("made v2 ", "2", "t3"),
        ("made v3 ", "3", "&lt;/script&gt;&lt;b&gt;bad&lt;/b&gt;"),
    ]
    assert "no signal" in page
    assert '<p class="doctor">the policy moved</p>' in page


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: the page's script is not run without it")
def test_keys_and_the_pointer_choose_a_token(folder: Path, tmp_path: Path) -> None:
    """In Chromium an arrow key selects the next token, a click selects a token, and a panel shows the numbers of the
    selected token."""
    write_report(folder)
    press = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))"
    read = "document.body.dataset.{} = document.getElementById('token').textContent"
    click = "document.querySelectorAll('[data-j]')[4].click()"
    steps = [
        "document.getElementById('trees').focus()",
        press,
        press,
        read.format("keys"),
        click,
        read.format("click"),
    ]
    page = draw(folder / "report.html", tmp_path, ";".join(steps))
    keys, clicked = (re.search(rf'data-{name}="([^"]*)"', page) for name in ("keys", "click"))
    assert keys is not None
    assert clicked is not None
    assert "version3 (lag 1)log π_behav-0.5000log π_prox-0.4000" in keys[1]
    assert "dropped" in clicked[1]
    assert "π_prox/π_behav22.198" in clicked[1]


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: the page's script is not run without it")
def test_a_browser_draws_two_runs(folder: Path, tmp_path: Path) -> None:
    """For a report of two runs, Chromium draws the reward curves of both runs in one chart, and a timeline for each
    run."""
    shutil.copytree(folder, tmp_path / "other")
    main([str(folder), str(tmp_path / "other")])
    page = draw(folder / "beside-other.html", tmp_path)
    assert re.findall(r'data-timeline="(\d)"', page) == ["0", "1"]
    curve = re.search(r'data-curve="reward".*?</svg>', page, re.DOTALL)
    assert curve is not None
    assert re.findall(r'data-run="(\d)"', curve[0]) == ["0", "1"]


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: the page's script is not run without it")
def test_a_browser_draws_an_empty_run(tmp_path: Path) -> None:
    """Chromium shows a page for a run that ended before its first step."""
    make_trace(tmp_path / "trace.json")
    write_report(tmp_path)
    page = draw(tmp_path / "report.html", tmp_path)
    assert "no step was finished" in page
    assert "has saved no tokens" in page


def test_the_timeline_of_no_trace() -> None:
    """If the trace is missing, the timeline is empty."""
    assert read_timeline([])["phases"] == []
