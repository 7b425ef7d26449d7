"""Every configuration key: its default, its unit and its meaning.

A run is configured in three layers, and a later layer wins over an earlier one:

1. the defaults of the dataclasses below,
2. one YAML recipe or several, such as `--config configs/maze.yaml`,
3. `key=value` words on the command line, such as `actor.eps_clip=0.1`.

The comment at the end of a key's line is its help text: `python train.py --help` prints every key with its default and
this comment. The keys of `gconfig` stand in `inference/io_struct.py`. A key that does not exist is an error, and the
error names the nearest key that does.

`load` also checks the values (`resolve`), so that a run that cannot work is refused before anything starts. Example:
`python train.py lr=0.1` ends with "unknown key 'lr' in the command line; did you mean 'actor.optimizer.lr'?".

The keys are AReaL's keys where AReaL has them. docs/differences.md lists the keys with another name.
"""

import argparse
import dataclasses
import difflib
import inspect
import re
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from calls.side_conversations import PATTERNS
from inference.io_struct import GenerationHyperparameters


class ConfigError(ValueError):
    """The run cannot work as it is configured. The message is one line that says what is wrong and what to do."""


@dataclass
class OpenAIConfig:
    """How agents run and how their calls become training rows (Agent Workflow, "Execution Modes", "Export Styles")."""

    mode: Literal["inline", "subproc"] = "inline"  # where agents run: in the trainer's process, or each in its own
    subproc_max_workers: int = 4  # mode subproc: agent processes; further episodes wait for a free one
    turn_discount: float = 1.0  # gamma: share of a turn's reward that is passed on to the turn before it
    chat_template_type: Literal["hf", "concat"] = "concat"  # concat: reuse earlier turns' tokens; hf: render all anew
    export_style: Literal["individual", "concat"] = "concat"  # one training row per turn, or per whole conversation
    tool_call_parser: str | None = None  # format of the model's tool calls; default: the tokenizer's, else qwen
    reasoning_parser: str | None = None  # format of the model's reasoning; default: <think> ... </think>
    side_conversations: list[str] = field(default_factory=lambda: [*PATTERNS])  # patterns of calls that take no reward
    fixed_sampling: list[str] = field(default_factory=list)  # names of gconfig fields that agents cannot override
    session_timeout_seconds: float = 3600.0  # seconds without a request after which a session is deleted
    episode_timeout_seconds: float = 3600.0  # seconds after which a running episode is cancelled and counted as failed


@dataclass
class RolloutConfig:
    """The rollout side: how many episodes run, and how stale they may become (AReaL: InferenceEngineConfig)."""

    max_head_offpolicyness: int = 2  # eta: largest age, in policy versions, of trained tokens; 0 is synchronous
    max_concurrent_rollouts: int | None = None  # most prompt groups running at once; default (eta + 1) * batch size
    consumer_batch_size: int | None = None  # prompt groups per training step; default train_dataset.batch_size
    queue_size: int | None = None  # most groups that may run or wait to run; default 16 * max_concurrent_rollouts
    group_size: int | None = None  # episodes per prompt; another name for gconfig.n_samples
    drop_stale: bool = False  # what happens to a group older than eta: true drops and replaces it, false is an error
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"  # how a weight update interrupts completions
    request_timeout: float = 3600.0  # seconds to wait for the answer to one generation request
    request_retries: int = 3  # how often a request is sent again after a connection error or a 5xx answer
    enable_tracing: bool = True  # write the life of every prompt group to trace.json, for a trace viewer
    check_trajectory_format: bool = True  # check keys and shapes of what workflows return
    dump_to_file: bool = True  # write every trajectory as text to rollout/{version}/{task_id}.jsonl
    server_addrs: list[str] = field(default_factory=list)  # URLs of running inference servers; default: start our own
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)  # agents that speak to the proxy


@dataclass
class ServerConfig:
    """The inference servers that train.py starts when rollout.server_addrs is empty."""

    backend: Literal["auto", "tiny", "sglang"] = "auto"  # auto: sglang if it is installed and there is a GPU, else tiny
    count: int = 1  # number of servers to start
    tp_size: int = 1  # GPUs per server, which split every layer among them (tensor parallelism)
    colocate: bool | None = None  # true: share the trainer's GPUs; default: share them only if there are too few
    port: int = 0  # port of the first server, the others take the next ones; 0: any free ports
    mem_fraction: float | None = None  # share of a GPU's memory that a server takes; default 0.85, or 0.4 if shared
    command: str = ""  # command that starts SGLang; default: this Python with -m sglang.launch_server
    args: list[str] = field(default_factory=list)  # further command-line arguments for every server
    max_running_requests: int = 64  # most sequences that a server decodes at once
    max_total_tokens: int = 16384  # most tokens that a server keeps in its key-value cache


@dataclass
class ProxyConfig:
    """The proxies, which agents send their requests to."""

    workers: int = 1  # number of proxy processes; each episode uses one of them


@dataclass
class NormConfig:
    """The advantage A = (R - mean) / std: over which rows the mean and the std are taken (AReaL: NormConfig)."""

    mean_level: Literal["group", "batch", "none"] = "group"  # rows whose mean return is the baseline
    std_level: Literal["group", "batch", "constant", "none"] = "group"  # rows whose standard deviation is the divisor
    mean_leave1out: bool = False  # true: leave a row out of its own baseline (RLOO)
    std_constant: float = 1.0  # the divisor if std_level is constant
    per_turn: bool = True  # true: compare a return only with the returns of the same turn number
    eps: float = 1e-5  # added to the standard deviation, against division by 0


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate schedule."""

    lr: float = 1e-5  # largest learning rate
    beta1: float = 0.9  # decay of AdamW's mean of gradients, per optimizer step
    beta2: float = 0.95  # decay of AdamW's mean of squared gradients, per optimizer step
    eps: float = 1e-8  # added to AdamW's divisor, against division by 0
    weight_decay: float = 0.01  # AdamW's weight decay
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # shape of the learning rate after warm-up
    warmup_steps: int = 0  # training steps in which the learning rate rises from 0 to lr
    min_lr_ratio: float = 0.0  # last learning rate of the schedule, as a share of lr
    gradient_clipping: float = 1.0  # largest gradient norm, longer gradients are scaled down; 0: no clipping


@dataclass
class PPOActorConfig:
    """The trainer: its forward passes, the decoupled PPO objective, and the optimizer (AReaL: PPOActorConfig)."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # number format of forward passes; parameters are float32
    ppo_n_minibatches: int = 4  # optimizer steps per pass over the batch
    ppo_epochs: int = 1  # passes over the batch
    mb_tokens: int = 16384  # most tokens, padding included, in one forward pass; larger mini-batches take several
    layout: Literal["padded", "packed"] = "padded"  # padded: one row per sequence; packed: sequences end to end
    gradient_checkpointing: bool = False  # true: recompute layers in the backward pass, which saves memory
    enable_tree_training: bool = False  # true: compute tokens once that several rows share at their beginning
    offload: bool = False  # true: keep parameters, gradients and optimizer state in host memory (FSDP2 CPU offload)
    use_decoupled_loss: bool = True  # true: decoupled PPO, made for stale data; false: standard PPO
    recompute_logprob: bool = True  # standard PPO: old logprobs by a forward pass; false: take the server's
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = "recompute"  # how pi_prox is computed
    eps_clip: float = 0.2  # lower bound of the ratio pi_theta / pi_prox is 1 - eps_clip
    eps_clip_higher: float | None = None  # upper bound of that ratio is 1 + eps_clip_higher; default eps_clip
    c_clip: float | None = None  # dual clip, above 1: bounds the loss by c_clip * |A| where A < 0; null: off
    behave_imp_weight_cap: float | None = 5.0  # largest weight pi_prox / pi_behav; null: no limit
    behave_imp_weight_level: Literal["token", "sequence"] = "token"  # one weight per token, or one per sequence
    behave_imp_weight_action: Literal["mask", "clamp"] = "mask"  # above the cap: drop the token, or use the cap
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"  # what has equal weight in the loss (ppo.py)
    max_new_tokens: int | None = None  # longest turn, for loss_aggregation=constant; default gconfig.max_new_tokens
    entropy_coeff: float = 0.0  # weight of the entropy bonus in the loss
    kl_ctl: float = 0.0  # weight of the KL penalty towards the reference model; 0: no reference model
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # formula for the KL of one token (training/advantages.py)
    kl_placement: Literal["reward", "loss"] = "reward"  # subtract the KL from rewards, or add it to the loss (k2 or k3)
    anneal: bool = False  # true: entropy_coeff and kl_ctl fall linearly to 0 over max_steps
    overlong_tokens: int | None = None  # penalise the last this many tokens before max_new_tokens; null: off
    overlong_penalty_factor: float = 1.0  # penalty of a turn with max_new_tokens, subtracted from its reward
    gamma: float = 1.0  # discount of the advantage, per token, from the end of a turn to its beginning
    gae_lambda: float = 1.0  # multiplied with gamma; without a critic the two act as one number
    reward_bias: float = 0.0  # added to every reward, before scaling
    reward_scaling: float = 1.0  # multiplies every reward, after the bias and before clipping
    reward_clip: float = 20.0  # scaled rewards are cut to the range from -reward_clip to reward_clip
    adv_norm: NormConfig = field(default_factory=NormConfig)  # baseline and divisor of the advantages
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # AdamW and its schedule


@dataclass
class RefConfig:
    """The frozen reference model of the KL penalty."""

    path: str | None = None  # folder of the reference model, used if kl_ctl > 0; default: model_path


@dataclass
class DatasetConfig:
    """The training prompts: a JSONL file, or a function that returns a list of dicts."""

    path: str | None = None  # FILE.jsonl or module.function; default: the task's dataset
    batch_size: int = 8  # prompt groups per training step
    shuffle: bool = True  # true: a new random order in every epoch, from the run's seed


@dataclass
class ValidDatasetConfig:
    """The prompts of the evaluation."""

    path: str | None = None  # FILE.jsonl or module.function; default: train_dataset.path, else the task's dataset


@dataclass
class EvaluatorConfig:
    """The evaluation: one episode per validation prompt, without the staleness gate."""

    interval: int = 0  # evaluate every this many steps; 0: never
    base_url: str | None = None  # mode=eval: OpenAI endpoint to evaluate agents on; default: a server with model_path


@dataclass
class SaverConfig:
    """The Hugging Face checkpoints in the run's folder checkpoints/."""

    interval: int = 0  # save every this many steps, and after the last one; 0: only after the last one
    keep: int = 2  # number of newest checkpoints to keep; older ones are deleted


@dataclass
class WeightUpdateConfig:
    """How new weights reach the inference servers."""

    mode: Literal["disk", "distributed", "tensor"] = "disk"  # by files, by a process group, or by shared memory
    bucket_mb: float = 512.0  # MiB that are gathered and sent at once (modes distributed and tensor)
    address: str = "127.0.0.1"  # address at which the servers reach this machine (mode distributed)


@dataclass
class LoggerConfig:
    """What a run prints and writes."""

    live: bool = True  # true: show a live table if there is a terminal; false: print one line per step
    sample_interval: int = 20  # print a sample conversation every this many steps; 0: never
    tokens_interval: int = 1  # write the batch to tokens/{step}.safetensors every this many steps; 0: never


@dataclass
class TrainConfig:
    """The whole configuration of a run."""

    mode: Literal["train", "eval"] = "train"  # train, or evaluate once on the validation prompts and end
    recover: Literal["auto", "off"] = "auto"  # auto: a run with the same trial_name goes on from its last checkpoint
    recover_interval: int = 10  # training steps between two checkpoints for recovery
    task: str | None = "tasks.guess"  # Python module with data, workflow and model; null: each has a key of its own
    experiment_name: str = "guess"  # the run's files go to {fileroot}/{experiment_name}/{trial_name}
    trial_name: str = "auto"  # name of this run; auto: the date and time
    fileroot: str = "runs"  # folder that holds all runs
    seed: int = 1  # seed of the data order, of sampling and of the task's base model
    max_steps: int = 80  # number of training steps
    model_path: str | None = None  # Hugging Face folder of the model; default: a small model that the task makes
    tokenizer_path: str | None = None  # Hugging Face folder of the tokenizer; default: model_path
    workflow: str | None = None  # module.Class of an agent or a RolloutWorkflow; default: the task's
    workflow_kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the workflow's class
    should_accept_fn: str | None = None  # module.function that gets a trajectory and returns false to reject it
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)  # sampling
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    valid_dataset: ValidDatasetConfig = field(default_factory=ValidDatasetConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    saver: SaverConfig = field(default_factory=SaverConfig)
    weight_update: WeightUpdateConfig = field(default_factory=WeightUpdateConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    dry_run: bool = False  # true, or --dry-run: print the plan (processes, GPUs, ports, memory) and start nothing

    @property
    def run_dir(self) -> Path:
        """The folder that the run writes to."""
        return Path(self.fileroot) / self.experiment_name / self.trial_name


DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"

# Other names of keys, as the documents write them, and the key that each one sets.
ALIASES = {
    "model": "model_path",
    "data": "train_dataset.path",
    "actor.recompute_logprobs": "actor.recompute_logprob",
    "rollout.fileroot": "fileroot",
    "rollout.experiment_name": "experiment_name",
    "rollout.trial_name": "trial_name",
    "rollout.tokenizer_path": "tokenizer_path",
    "eval_interval": "evaluator.interval",
}


# The smallest value that each of these keys may have, unless it is null.
AT_LEAST = {
    1: """max_steps recover_interval saver.keep server.count server.tp_size proxy.workers train_dataset.batch_size
    gconfig.n_samples gconfig.max_new_tokens actor.ppo_n_minibatches actor.ppo_epochs actor.overlong_tokens
    rollout.group_size rollout.max_concurrent_rollouts rollout.openai.subproc_max_workers""",
    0: """rollout.max_head_offpolicyness actor.eps_clip actor.optimizer.lr actor.gamma actor.gae_lambda
    gconfig.temperature evaluator.interval saver.interval""",
}


class Key(NamedTuple):
    """One configuration key as `--help` shows it."""

    name: str
    default: Any
    meaning: str


def list_keys(cls: type = TrainConfig, prefix: str = "") -> list[Key]:
    """Return every key of the configuration, in the order of this file.

    A key's meaning is the comment at the end of its line, which is read from the source of the dataclass `cls`.
    """
    meanings = dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(cls), re.MULTILINE))
    keys = []
    for name, default in vars(cls()).items():
        if dataclasses.is_dataclass(default):
            keys += list_keys(type(default), f"{prefix}{name}.")
        else:
            keys.append(Key(prefix + name, default, meanings[name]))
    return keys


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Turn {"actor": {"eps_clip": 0.2}} into {"actor.eps_clip": 0.2}.

    The value of workflow_kwargs is not flattened, since its keys are the user's own.
    """
    if not isinstance(tree, dict) or prefix == "workflow_kwargs.":
        return {prefix.rstrip("."): tree}
    return {k: v for name, child in tree.items() for k, v in flatten(child, f"{prefix}{name}.").items()}


def set_keys(config: DictConfig, given: Any, source: str) -> None:
    """Write the given keys into `config`. `source` says where they come from, for error messages.

    Raises ConfigError for an unknown key, with the nearest known key as a hint.
    """
    known = [key.name for key in list_keys()]
    for name, value in flatten(OmegaConf.to_container(given)).items():
        name = ALIASES.get(name, name)
        if name not in known:
            last = name.rpartition(".")[2]
            near = [key for key in known if key.rpartition(".")[2] == last]
            near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "`python train.py --help` lists the keys."
            raise ConfigError(f"unknown key {name!r} in {source}; {hint}")
        if name == "recover" and value is False:
            value = "off"  # YAML reads the word off as false
        OmegaConf.update(config, name, value)


def resolve(config: TrainConfig) -> None:
    """Check the values, and fill in the defaults that depend on other keys. Raises ConfigError.

    The filled-in values become part of `config`, so the run's config.yaml shows every value that was used.
    """
    for least, names in AT_LEAST.items():
        for name in names.split():
            value = attrgetter(name)(config)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value}; it must be at least {least}")
    actor, rollout, gconfig, batch = config.actor, config.rollout, config.gconfig, config.train_dataset.batch_size
    actor.max_new_tokens = actor.max_new_tokens or gconfig.max_new_tokens
    if actor.c_clip is not None and actor.c_clip <= 1:
        raise ConfigError(f"actor.c_clip={actor.c_clip}; dual clip needs a value above 1, or null")
    if (actor.overlong_tokens or 1) > actor.max_new_tokens:
        both = f"actor.overlong_tokens={actor.overlong_tokens} and max_new_tokens={actor.max_new_tokens}"
        raise ConfigError(f"{both}: make the first at most the second")
    if actor.gamma == 0 or max(actor.gamma, actor.gae_lambda) > 1:
        raise ConfigError("actor.gamma and actor.gae_lambda must lie between 0 and 1")
    if strange := set(rollout.openai.fixed_sampling) - vars(gconfig).keys():
        raise ConfigError(f"rollout.openai.fixed_sampling: {', '.join(sorted(strange))} is no field of gconfig")
    for pattern in rollout.openai.side_conversations:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"side_conversations: {pattern!r} is no regular expression: {error}") from error
    if rollout.group_size not in (None, gconfig.n_samples) and gconfig.n_samples != 1:
        both = f"rollout.group_size={rollout.group_size} and gconfig.n_samples={gconfig.n_samples}"
        raise ConfigError(f"{both} are one number under two names; give only one of them")
    if rollout.consumer_batch_size not in (None, batch):
        both = f"rollout.consumer_batch_size={rollout.consumer_batch_size} and train_dataset.batch_size={batch}"
        raise ConfigError(f"{both} must be equal: both are the prompt groups of a step; give only the second")
    rollout.group_size = gconfig.n_samples = rollout.group_size or gconfig.n_samples
    rollout.consumer_batch_size = batch
    rollout.max_concurrent_rollouts = rollout.max_concurrent_rollouts or (rollout.max_head_offpolicyness + 1) * batch
    rollout.queue_size = rollout.queue_size or 16 * rollout.max_concurrent_rollouts
    gconfig.seed = config.seed if gconfig.seed is None else gconfig.seed


def changed(path: Path, config: TrainConfig) -> list[str]:
    """Return the keys of the config.yaml at `path` that `config` sets otherwise, each as "key=before -> now".

    Returns an empty list if there is no file at `path`, as in a new run.
    """
    before = flatten(OmegaConf.to_container(OmegaConf.load(path))) if path.exists() else {}
    now = flatten(dataclasses.asdict(config))
    return [f"{k}={before[k]} -> {now[k]}" for k in now if k in before and before[k] != now[k]]


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; options are --config FILE, --dry-run, --help and key=value words")


def load(argv: list[str]) -> TrainConfig:
    """Return the run's configuration, read from the words of the command line. `--help` prints the keys and exits.

    Raises ConfigError.
    """
    keys = (f"  {k.name}={'null' if k.default is None else k.default}\n      {k.meaning}" for k in list_keys())
    epilog = "keys, their defaults and meanings:\n" + "\n".join(keys)
    parser = Parser("python train.py", epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter)
    meaning = f"a YAML recipe; may be given several times, later ones win; default: configs/{DEMO.name}"
    parser.add_argument("--config", type=Path, action="append", metavar="FILE", help=meaning)
    parser.add_argument("--dry-run", action="store_true", help="print the plan of the run, and start nothing")
    parser.add_argument("words", nargs="*", metavar="key=value", help="a key and its value, which win over the recipes")
    args = parser.parse_intermixed_args(argv)
    if bare := [word for word in args.words if "=" not in word]:
        parser.error(f"cannot read {bare[0]!r}")
    recipes = args.config or [DEMO]
    if missing := [recipe for recipe in recipes if not recipe.is_file()]:
        raise ConfigError(f"no recipe at {missing[0]}; configs/ holds the ones that come with the project")
    merged = OmegaConf.structured(TrainConfig)
    source = ""
    try:
        for recipe in recipes:
            source = str(recipe)
            set_keys(merged, OmegaConf.load(recipe), source)
        source = "the command line"
        set_keys(merged, OmegaConf.from_dotlist(args.words), source)
        config: Any = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError) as error:
        where = getattr(error, "full_key", None) or source
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error
    config.dry_run = config.dry_run or args.dry_run
    resolve(config)
    return config
