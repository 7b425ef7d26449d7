"""Train a language-model agent with asynchronous reinforcement learning: the loop of AReaL, top to bottom.

    python train.py                                   the demo: an agent learns to guess a number
    python train.py --config configs/maze.yaml        long answers, generation and training overlapped
    python train.py seed=2 rollout.max_head_offpolicyness=0      the same loop, synchronous

The processes. This one trains, and runs the agents' episodes in a thread of its own. An inference server generates
tokens in a second process, the proxy turns agents' HTTP requests into token-exact prompts in a third. While a step
is trained here, the next episodes are already being generated there, by weights that are up to
`rollout.max_head_offpolicyness` versions older.

The loop (`train`, appendix A.1 of the write-up). Each step takes a batch in the order in which its episodes
started, recomputes the log-probabilities of its tokens under the current weights (the proximal policy), makes
advantages of rewards, takes a few optimizer steps of decoupled PPO, and pushes the weights: pause, push, version + 1,
resume. Running generations are interrupted at that moment and go on afterwards; every token keeps the version of
the weights that computed it. Versions count from 0, steps from 1: step s consumes at version s - 1 and makes s.

Synchronous training is not another program: with max_head_offpolicyness=0 the gate lets the next episodes start
only when the new weights are there.

How it ends. Everything that is started is entered in one ExitStack and ended in reverse: the episodes, the engine's
connections, the child processes. Ctrl-C, an exception and a dead server all leave through it.
"""

import asyncio
import importlib
import json
import signal
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from actor import FSDPEngine, FSDPPPOActor, describe_mode
from engine import ModelRequest, RemoteInfEngine
from executor import ProxyAddress, WorkflowExecutor
from plumbing.config import ConfigError, TrainConfig, load
from plumbing.launch import ROOT, Fleet, ProcessDied, start_proxy, start_servers
from plumbing.logger import Logger, Trace, describe_batch
from weights import WeightUpdateMeta
from workflow import import_string


@dataclass
class Parts:
    """What the loop works with, all of it running."""

    actor: FSDPPPOActor
    ref: FSDPEngine | None
    rollout: RemoteInfEngine
    evaluation: WorkflowExecutor
    train_dataloader: DataLoader
    valid_data: list[dict]
    workflow: Any
    workflow_kwargs: dict[str, Any]
    weight_update_meta: WeightUpdateMeta
    task: Any
    logger: Logger
    trace: Trace
    run_dir: Path


def train(config: TrainConfig, parts: Parts) -> None:
    """Appendix A.1."""
    actor, ref, rollout, trace, logger = parts.actor, parts.ref, parts.rollout, parts.trace, parts.logger
    assert rollout.executor is not None
    start, counts = time.monotonic(), asdict(rollout.executor.stats)
    for step in range(1, config.max_steps + 1):
        begin, seconds = time.monotonic(), dict[str, float]()

        # 1. A batch, in the order of start: at most eta versions old, or an error says so.
        with trace.span("rollout_wait", seconds):
            batch = actor.prepare_batch(
                parts.train_dataloader,
                group_size=config.rollout.group_size,
                workflow=parts.workflow,
                workflow_kwargs=parts.workflow_kwargs,
                should_accept_fn=config.should_accept_fn,
            )
        metrics = {"step": step, "version": actor.get_version(), **describe_batch(batch, actor.get_version())}

        with trace.span("train", seconds):
            # 2. pi_prox: the policy at the start of this step, the centre of the clip.
            if actor.should_compute_prox_logp():
                batch["prox_logp"] = actor.compute_logp(batch)
            # 3. The reference policy of the KL penalty.
            if ref is not None:
                batch["ref_logp"] = ref.compute_logp(batch)
            metrics["logp_mismatch"] = logp_mismatch(batch, actor, rollout)
            # 4. and 5. Advantages, then a few optimizer steps.
            actor.compute_advantages(batch)
            metrics |= actor.ppo_update(batch)
            actor.step_lr_scheduler()

        # 6. New weights for the servers. What is being generated goes on under them, token by token.
        with trace.span("sync", seconds):
            rollout.pause()
            actor.update_weights(parts.weight_update_meta.with_version(step))
            actor.set_version(step)
            rollout.set_version(step)
            rollout.resume()

        # 7. Evaluate, save, report.
        if config.evaluator.interval and step % config.evaluator.interval == 0:
            metrics["eval_reward"] = evaluate(parts)
        if step == config.max_steps or (config.saver.interval and step % config.saver.interval == 0):
            save(config, parts, step)
        before, counts = counts, asdict(rollout.executor.stats)
        metrics |= {k: counts[k] - before[k] for k in ("accepted", "rejected", "failed", "dropped")}
        metrics |= {"success": success(parts.task, batch["rewards"]), **seconds}
        metrics |= {"step_s": time.monotonic() - begin, "wall_s": time.monotonic() - start}
        logger.tokens(step, batch)
        logger.log(metrics)
        if config.logger.sample_interval and step % config.logger.sample_interval == 1:
            logger.say(sample_text(batch, rollout.executor.tokenizer))


def success(task: Any, rewards: Tensor) -> float:
    """The share of rows whose reward the task calls a success (default: a positive one)."""
    judge = getattr(task, "success", lambda reward: reward > 0)
    return sum(bool(judge(r)) for r in rewards.tolist()) / len(rewards)


def logp_mismatch(batch: dict[str, Tensor], actor: FSDPPPOActor, rollout: RemoteInfEngine) -> float:
    """max |log p_server - log p_trainer| over tokens that both computed with the same weights.

    Those are the batch's own tokens of the current version, and, since an asynchronous batch may hold none, a row
    or two of it that the server scores now.
    """
    worst = 0.0
    if "prox_logp" in batch:
        own = batch["loss_mask"].bool() & (batch["versions"] == actor.get_version())
        worst = (batch["logprobs"] - batch["prox_logp"])[own].abs().max().item() if own.any() else 0.0
    rows = {k: v[:2] for k, v in batch.items()}
    rows["temperatures"] = torch.ones_like(rows["temperatures"])
    trainer = actor.compute_logp(rows)  # (2, T)
    ids = [row[mask].tolist() for row, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)]
    for mine, theirs in zip(trainer, rollout.score(ids), strict=True):
        difference = mine[1 : len(theirs)] - torch.tensor(theirs[1:])
        worst = max(worst, difference.abs().max().item())
    return worst


def evaluate(parts: Parts) -> float:
    """Mean reward of one episode per validation prompt, under is_eval, without the staleness gate."""
    batch = parts.evaluation.rollout_batch(
        parts.valid_data, parts.workflow, parts.workflow_kwargs, group_size=1, is_eval=True
    )
    return batch["rewards"].mean().item()


def save(config: TrainConfig, parts: Parts, step: int) -> None:
    """A Hugging Face directory under checkpoints/; only the newest `saver.keep` stay."""
    folder = parts.run_dir / "checkpoints"
    parts.actor.save(folder / f"step{step:05d}")
    for old in sorted(folder.glob("step*"))[: -config.saver.keep]:
        for file in old.iterdir():
            file.unlink()
        old.rmdir()


def sample_text(batch: dict[str, Tensor], tokenizer: Any) -> str:
    """The batch's first row as the agent and the environment spoke it."""
    text = tokenizer.decode(batch["input_ids"][0][batch["attention_mask"][0]], skip_special_tokens=False)
    return f"a sample, reward {batch['rewards'][0]:.2f}: {text}"


def load_dataset(path: str | None, task: Any, split: str) -> list[dict]:
    """Samples from a JSONL file, from a "module.function", or from the task."""
    if path is None:
        if not hasattr(task, "dataset"):
            raise ConfigError("no data: set train_dataset.path to a JSONL file or to module.function")
        return task.dataset(split)
    if not path.endswith(".jsonl"):
        return import_string(path)()
    if not Path(path).is_file():
        raise ConfigError(f"no dataset at {path}")
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def prepare_model(config: TrainConfig, task: Any, logger: Logger) -> None:
    """Fill in model_path and tokenizer_path; the task's base model is made once a seed and kept under .cache/."""
    if config.model_path is None:
        if not hasattr(task, "make_model"):
            raise ConfigError(
                "no model: set model_path to a Hugging Face directory, or task to a module that makes one"
            )
        path = Path(".cache") / f"{config.task}-{config.seed}"
        if not path.is_dir():
            logger.say(f"making the base model {path} (once)")
            task.make_model(path, config.seed)
        config.model_path = str(path)
    if not (Path(config.model_path) / "config.json").is_file():
        raise ConfigError(
            f"no model at model_path={config.model_path}: a directory with config.json and weights is needed"
        )
    config.tokenizer_path = config.tokenizer_path or config.model_path


def build(config: TrainConfig, run_dir: Path, fleet: Fleet, logger: Logger, trace: Trace, stack: ExitStack) -> Parts:
    """Start everything; `stack` ends it in reverse."""
    task = importlib.import_module(config.task) if config.task else None
    prepare_model(config, task, logger)
    dataset = load_dataset(config.train_dataset.path, task, "train")
    validation = load_dataset(config.valid_dataset.path or config.train_dataset.path, task, "valid")
    workflow = import_string(config.workflow) if config.workflow else getattr(task, "WORKFLOW", None)
    if workflow is None:
        raise ConfigError("no workflow: set workflow to module.Class, an agent with async run() or a RolloutWorkflow")
    OmegaConf.save(OmegaConf.create({**asdict(config), "revision": revision()}), run_dir / "config.yaml")

    # 1. The processes. One that dies fails the run through the executor, wherever the loop is waiting.
    logger.say("starting the inference server and the proxy")
    servers = start_servers(config, fleet)
    proxy = ProxyAddress(*start_proxy(config, fleet, servers))

    # 2. The rollout side: the engine speaks to the servers, the executor runs the episodes.
    rollout = RemoteInfEngine(
        servers,
        pause_mode=config.rollout.pause_mode,
        request_timeout=config.rollout.request_timeout,
        request_retries=config.rollout.request_retries,
    )
    stack.callback(rollout.destroy)
    rollout.initialize()
    executor = WorkflowExecutor(
        rollout,
        config.rollout,
        tokenizer=AutoTokenizer.from_pretrained(config.tokenizer_path),
        gconfig=config.gconfig.new(seed=config.seed if config.gconfig.seed is None else config.gconfig.seed),
        proxy=proxy,
        dump_dir=run_dir,
        trace=trace.event,
    )
    stack.callback(executor.destroy)
    evaluation = executor.for_evaluation()
    stack.callback(evaluation.destroy)
    fleet.watch(on_death=lambda death: (executor.fail(death), evaluation.fail(death)))

    # 3. The training side.
    assert config.model_path is not None
    logger.say("\n".join(describe_mode(config.actor)))
    actor = FSDPPPOActor(config.actor, config.model_path)
    stack.callback(actor.destroy)
    actor.create_process_group()
    actor.initialize(max_steps=config.max_steps)
    meta = WeightUpdateMeta(mode=config.weight_update.mode, path=str(run_dir / "weights"))
    actor.connect_engine(rollout, meta)
    ref = None
    if config.ref.path is not None:
        ref = FSDPEngine(config.ref.path, config.ref.dtype)
        stack.callback(ref.destroy)
        ref.initialize()

    shuffled = torch.Generator().manual_seed(config.seed)
    loader: DataLoader = DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=config.train_dataset.batch_size,
        shuffle=config.train_dataset.shuffle,
        generator=shuffled,
        collate_fn=list,
    )
    return Parts(
        actor=actor,
        ref=ref,
        rollout=rollout,
        evaluation=evaluation,
        train_dataloader=loader,
        valid_data=validation,
        workflow=workflow,
        workflow_kwargs={**getattr(task, "WORKFLOW_KWARGS", {}), **config.workflow_kwargs},
        weight_update_meta=meta,
        task=task,
        logger=logger,
        trace=trace,
        run_dir=run_dir,
    )


def revision() -> str:
    """The commit of this checkout, or unknown."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def ask_greedily(parts: Parts, conversations: list[list[dict]]) -> list[str]:
    """What the trained policy, on its server, answers at temperature 0."""
    assert parts.rollout.executor is not None
    tokenizer, gconfig = parts.rollout.executor.tokenizer, parts.rollout.executor.gconfig

    async def ask(messages: list[dict]) -> str:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        request = ModelRequest(ids, gconfig=gconfig.new(n_samples=1, greedy=True), tokenizer=tokenizer)
        response = await parts.rollout.agenerate(request)
        return tokenizer.decode(response.output_tokens, skip_special_tokens=True)

    async def ask_all() -> list[str]:
        return list(await asyncio.gather(*map(ask, conversations)))

    return asyncio.run(ask_all())


def summarise(parts: Parts) -> None:
    """What was learnt, how stale the data was, and where everything is."""
    history, say = parts.logger.history, parts.logger.say
    final = [line["success"] for line in history[-5:]]
    say(f"\nsuccess {history[0]['success']:.3f} in the first step, {sum(final) / len(final):.3f} in the last five")
    oldest = max(line["staleness_max"] for line in history)
    mean = sum(line["staleness_mean"] for line in history) / len(history)
    total = sum(parts.logger.lag_counts.values())
    lags = ", ".join(f"lag {lag} {n / total:.0%}" for lag, n in sorted(parts.logger.lag_counts.items()))
    say(f"staleness mean {mean:.2f}, max {oldest:.0f}; {total} trained tokens by version lag: {lags}")
    if hasattr(parts.task, "summary"):
        parts.task.summary(lambda conversations: ask_greedily(parts, conversations), parts.logger.console)
    say(f"{len(history)} steps in {history[-1]['wall_s']:.0f} s; everything is in {parts.run_dir}")


def run(config: TrainConfig) -> None:
    """One run, from the configuration to the summary."""
    name = time.strftime("%Y%m%d-%H%M%S") if config.trial_name == "auto" else config.trial_name
    run_dir = Path(config.fileroot) / config.experiment_name / name
    if (run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"{run_dir} already holds a run; give another trial_name")
    run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        trace = Trace(run_dir / "trace.json" if config.rollout.enable_tracing else None)
        stack.callback(trace.close)
        live, interval = config.logger.live, config.logger.tokens_interval
        logger = Logger(run_dir, config.max_steps, live=live, tokens_interval=interval)
        stack.callback(logger.close)
        fleet = Fleet(run_dir / "logs")
        stack.callback(fleet.stop)
        try:
            parts = build(config, run_dir, fleet, logger, trace, stack)
            with logger:
                train(config, parts)
            summarise(parts)
        except Exception as error:
            fleet.raise_death(error)  # the reason behind a refused connection
            raise


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0; 1 for a run that failed, 2 for a configuration that cannot run, 130 for Ctrl-C."""
    torch.set_num_threads(1)  # small models: more threads on shared cores are slower
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(load(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ProcessDied as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; every process of the run has ended", file=sys.stderr)
        return 130
    except Exception:  # the one place that ends a failed run: everything it started has ended
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
