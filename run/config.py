"""Every configuration key: its default, its unit and its meaning.

A run is configured in three layers. Each layer overrides the layers before it:

1. the defaults of the dataclasses below,
2. one or more YAML recipes, such as `--config configs/maze.yaml`,
3. `key=value` arguments on the command line, such as `actor.eps_clip=0.1`.

The comment at the end of a key's line is the key's help text. `python train.py --help` prints every key with its
default and its comment. The keys of `gconfig` are defined in `inference/io_struct.py`, and the keys of `actor` in
`training/config.py`. A key that does not exist is an error, and the error message suggests the nearest existing key.
Example: `python train.py lr=0.1` ends with "unknown key 'lr' in the command line; did you mean 'actor.optimizer.lr'?".

The type of a number contains the interval of its allowed values, for example Share for [0, 1]. For example, a learning
rate below 0 would make the model worse. No interval contains NaN. Every comparison with NaN is false, so a clip of NaN
would have no effect. `load` checks every value (`resolve`), so a wrong value is reported before any process starts.

Most keys have the names that AReaL uses. docs/differences.md lists the keys with different names.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import os
import re
import secrets
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from calls.sessions import Limits
from calls.side_conversations import PATTERNS
from inference.io_struct import GenerationHyperparameters
from run.fields import Count, CountOrZero, Positive, Seed, Share, is_within
from training.config import PPOActorConfig


class ConfigError(ValueError):
    """The configuration is wrong, so the run cannot start. The message is one line with the problem and the remedy."""


@dataclass
class OpenAIConfig:
    """How agents run and how their calls become training rows (Agent Workflow, "Execution Modes", "Export Styles")."""

    mode: Literal["inline", "subproc"] = "inline"  # run agents in the trainer's process, or in worker processes
    subproc_max_workers: Count = 4  # number of worker processes for agents (mode subproc)
    turn_discount: Share = 1.0  # gamma: share of a turn's final reward that is added to its parent's reward; 0: nothing
    chat_template_type: Literal["hf", "concat"] = "concat"  # concat: reuse earlier tokens; hf: tokenise all anew
    export_style: Literal["individual", "concat"] = "concat"  # one training row per turn, or per whole conversation
    tool_call_parser: str | None = None  # format of the model's tool calls; default: the tokenizer's, else qwen
    reasoning_parser: str | None = None  # format of the model's reasoning; default: <think> ... </think>
    limits: Limits = field(default_factory=Limits)  # limits on what one session costs a proxy
    side_conversations: list[str] = field(default_factory=lambda: [*PATTERNS])  # calls trained only if rewarded by id
    store: Literal["honour", "ignore"] = "ignore"  # honour: calls with `store: false` are not trained
    fixed_sampling: list[str] = field(default_factory=list)  # names of gconfig fields that agents cannot override
    session_timeout_seconds: Positive = 3600.0  # time without a request after which the proxy deletes a session
    episode_timeout_seconds: Positive = 3600.0  # time after which a running episode is cancelled and counted as failed


@dataclass
class RolloutConfig:
    """Rollouts: how many episodes run, and how stale their data may become (AReaL: InferenceEngineConfig)."""

    max_head_offpolicyness: CountOrZero = 2  # eta: maximum age of a consumed group, in versions; 0: synchronous
    max_concurrent_rollouts: Count | None = None  # maximum number of running groups; default (eta + 1) * batch size
    consumer_batch_size: Count | None = None  # prompt groups per training step; default train_dataset.batch_size
    queue_size: Count | None = None  # maximum of running plus waiting groups; default 16 * max_concurrent_rollouts
    group_size: Count | None = None  # episodes per prompt; another name for gconfig.n_samples
    stale: Literal["wait", "mask", "drop"] = "wait"  # how eta is kept: by waiting, masking or dropping (staleness.py)
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"  # how a weight update interrupts completions
    request_timeout: Positive = 3600.0  # seconds to wait for the reply to one generation request
    request_retries: CountOrZero = 3  # maximum repeats of a request after a lost connection or 5xx status; 0: none
    enable_tracing: bool = True  # write the states of every prompt group to trace.json, for a trace viewer
    check_trajectory_format: bool = True  # check the keys and shapes of the tensors that workflows return
    dump_to_file: bool = True  # write every trajectory as text to rollout/{version}/{task_id}.jsonl
    server_addrs: list[str] = field(default_factory=list)  # URLs of running inference servers; default: start servers
    server_key: str = ""  # key of the servers; default: $NANO_AREAL_SERVER_KEY, or a new key for started servers
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)  # agents that call the proxy


@dataclass
class ServerConfig:
    """The inference servers that train.py starts when rollout.server_addrs is empty."""

    backend: Literal["auto", "tiny", "sglang"] = "auto"  # auto: sglang if SGLang and a GPU are available, else tiny
    count: Count = 1  # number of servers to start
    tp_size: Count = 1  # GPUs per server (tensor parallelism)
    colocate: bool | None = None  # true: use the trainer's GPUs; default: use them only if there are too few GPUs
    port: Annotated[int, "[0, 65535]"] = 0  # port of the first server; others use the next ports; 0: any
    mem_fraction: Annotated[float, "(0, 1)"] | None = None  # share of GPU memory; default 0.85, or 0.6 on trainer GPUs
    command: str = ""  # command that starts SGLang; default: this Python with -m sglang.launch_server
    args: list[str] = field(default_factory=list)  # further command-line arguments for every server
    max_running_requests: Count = 64  # maximum number of sequences that a server decodes at the same time
    max_total_tokens: Count = 16384  # maximum number of tokens in a server's key-value cache


@dataclass
class ProxyConfig:
    """The proxy processes, which answer the agents' requests."""

    workers: Count = 1  # number of proxy processes; each episode uses one of them


@dataclass
class RefConfig:
    """The frozen reference model of the KL penalty."""

    path: str | None = None  # reference model, a folder or a name on the hub, if kl_ctl > 0; default: model_path


@dataclass
class DatasetConfig:
    """The training prompts: a JSONL file, or a function that returns a list of dicts."""

    path: str | None = None  # FILE.jsonl or module.function; default: the task's dataset
    batch_size: Count = 8  # prompt groups per training step
    shuffle: bool = True  # true: a new random order in every epoch, from the run's seed


@dataclass
class ValidDatasetConfig:
    """The validation prompts, on which the agents are evaluated."""

    path: str | None = None  # FILE.jsonl or module.function; default: train_dataset.path, else the task's dataset


@dataclass
class EvaluatorConfig:
    """The evaluation: one episode per validation prompt, without the staleness gate."""

    interval: CountOrZero = 0  # number of steps between two evaluations; 0: never
    base_url: str | None = None  # mode=eval: OpenAI endpoint that agents call; default: a server with model_path


@dataclass
class SaverConfig:
    """The Hugging Face checkpoints in the folder checkpoints/ of a run. The last step always saves a checkpoint."""

    interval: CountOrZero = 0  # number of steps between two checkpoints; 0: only after the last step
    keep: Count = 2  # number of newest checkpoints to keep; older checkpoints are deleted


@dataclass
class WeightUpdateConfig:
    """How new weights reach the inference servers."""

    mode: Literal["disk", "distributed", "tensor"] = "disk"  # weights go by files, process group, or shared memory
    path: str | None = None  # folder for new weights (mode disk), such as /dev/shm/new; default: the run's folder
    bucket_mb: Positive = 512.0  # size in MiB of the buckets that are sent (modes distributed and tensor)
    address: str = "127.0.0.1"  # address at which the servers reach this machine (mode distributed)


@dataclass
class LoggerConfig:
    """How often a run prints and writes its results."""

    live: bool = True  # true: show a live table if there is a terminal; false: print one line per step
    sample_interval: CountOrZero = 20  # number of steps between two printed sample conversations; 0: never
    report_interval: CountOrZero = 10  # number of steps between two updates of report.html; 0: only at the end
    tokens_interval: CountOrZero = 1  # number of steps between two saved batches, tokens/{step}.safetensors; 0: never


@dataclass
class TrainConfig:
    """The whole configuration of a run."""

    mode: Literal["train", "eval"] = "train"  # eval: only evaluate on the validation prompts, without training
    recover: Literal["auto", "off"] = "auto"  # auto: if this run exists, continue from its last checkpoint
    doctor: Literal["warn", "strict", "off"] = "warn"  # checks after each step; strict: a rule that fires ends the run
    recover_interval: Count = 10  # training steps between two checkpoints for recovery
    task: str | None = "tasks.guess"  # Python module with data, workflow and model; null: other keys set these
    experiment_name: str = "guess"  # part of the run's folder, {fileroot}/{experiment_name}/{trial_name}
    trial_name: str = "auto"  # name of this run; auto: the date and time
    fileroot: str = "runs"  # folder that holds all runs
    seed: Seed = 1  # seed of the data order, the sampling and the task's base model; 0 is a seed, too
    max_steps: Count = 80  # number of training steps
    model_path: str | None = None  # folder of the model, or its name on the hub; default: the task's small model
    model_revision: str | None = None  # branch, tag or commit of model_path on the hub; default: the newest commit
    tokenizer_path: str | None = None  # Hugging Face folder of the tokenizer; default: model_path
    workflow: str | None = None  # module.Class of an agent or a RolloutWorkflow; default: the task's workflow
    workflow_kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the workflow's class
    should_accept_fn: str | None = None  # module.function of a trajectory; returns false to reject the group
    success_above: Annotated[float, "(-inf, inf)"] = 0.0  # rewards above this are successes by default; 0: above 0
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
    gpus: Count | None = None  # with --dry-run: plan as if the machine had this number of GPUs; default: those there
    gpu_memory: Positive = 80.0  # with --dry-run: memory of each of the `gpus`, in GiB

    @property
    def run_dir(self) -> Path:
        """The folder that the run writes to."""
        return Path(self.fileroot) / self.experiment_name / self.trial_name


DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"

# Alternative names of keys, as in AReaL's documents, and the key that each name sets.
ALIASES = {
    "model": "model_path",
    "data": "train_dataset.path",
    "actor.recompute_logprobs": "actor.recompute_logprob",
    "rollout.drop_stale": "rollout.stale",
    "rollout.fileroot": "fileroot",
    "rollout.experiment_name": "experiment_name",
    "rollout.trial_name": "trial_name",
    "rollout.tokenizer_path": "tokenizer_path",
    "eval_interval": "evaluator.interval",
}


# Names that users give to keys, and the key that an error message then suggests.
SYNONYMS = {"learning_rate": "actor.optimizer.lr", "staleness": "rollout.max_head_offpolicyness", "steps": "max_steps"}

# Keys that have an effect only under a condition: condition -> regular expression that matches the keys' names.
NEEDS = {
    "rollout.server_addrs=[]": r"server\..*",
    "rollout.openai.mode=subproc": r"rollout\.openai\.subproc_max_workers",
    "gconfig.greedy=false": r"gconfig\.(temperature|top_p|top_k)",
    "dry_run=true": r"gpus|gpu_memory",
    "mode=eval": r"evaluator\.base_url",
    "mode=eval or evaluator.interval": r"valid_dataset\.path",
    "recover=auto": r"recover_interval",
    "saver.interval": r"saver\.keep",
    "weight_update.mode=disk": r"weight_update\.path",
    "weight_update.mode=distributed": r"weight_update\.address",
    "weight_update.mode=distributed|tensor": r"weight_update\.bucket_mb",
    "actor.use_decoupled_loss=false": r"actor\.recompute_logprob",
    "actor.use_decoupled_loss=true": r"actor\.(prox_logp_method|behave_.*|reject_.*)",
    "actor.enable_tree_training=false": r"actor\.layout",
    "actor.use_cispo_loss=false": r"actor\.c_clip",
    "actor.kl_ctl": r"ref\.path|actor\.kl_(estimator|placement)",
    "actor.kl_ctl or actor.entropy_coeff": r"actor\.anneal",
    "actor.overlong_tokens": r"actor\.overlong_penalty_factor",
    "actor.overlong_tokens or actor.loss_aggregation=constant": r"actor\.max_new_tokens",
    "actor.adv_norm.mean_level=group|batch": r"actor\.adv_norm\.mean_leave1out",
    "actor.adv_norm.std_level=group|batch": r"actor\.adv_norm\.eps",
    "actor.adv_norm.std_level=constant": r"actor\.adv_norm\.std_constant",
    "actor.optimizer.lr_scheduler_type=linear|cosine": r"actor\.optimizer\.min_lr_ratio",
}


class Key(NamedTuple):
    """One configuration key as `--help` prints it: full name, default, help text and, for a number, the interval."""

    name: str
    default: Any
    meaning: str
    interval: str | None


source_of = functools.cache(inspect.getsource)  # reading the source code of all dataclasses takes a second


def list_keys(cls: type = TrainConfig, prefix: str = "") -> list[Key]:
    """Return every key of the configuration, in the order of this file.

    The meaning of a key is the comment after the key in the source code of the dataclass `cls`. The interval of a key
    is part of the key's type.
    """
    meanings = dict(re.findall(r"^    (\w+): .*?  # (.+)$", source_of(cls), re.MULTILINE))
    keys, hints = [], get_type_hints(cls, include_extras=True)
    for name, default in vars(cls()).items():
        if dataclasses.is_dataclass(default):
            keys += list_keys(type(default), f"{prefix}{name}.")
        else:
            options = (hints[name], *get_args(hints[name]))  # the type Count | None has the two options Count and None
            intervals = [option.__metadata__[0] for option in options if get_origin(option) is Annotated]
            keys.append(Key(prefix + name, default, meanings[name], intervals[0] if intervals else None))
    return keys


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Turn {"actor": {"eps_clip": 0.2}} into {"actor.eps_clip": 0.2}.

    The value of workflow_kwargs stays a dictionary, because the user chooses its keys.
    """
    if not isinstance(tree, dict) or prefix == "workflow_kwargs.":
        return {prefix.rstrip("."): tree}
    return {k: v for name, child in tree.items() for k, v in flatten(child, f"{prefix}{name}.").items()}


def without_effect(config: Any, names: list[str]) -> dict[str, str]:
    """Return the keys among `names` whose change in `config` has no effect, each with the condition that it needs."""
    default = TrainConfig()

    def is_met(condition: str) -> bool:
        name, _, values = condition.partition("=")
        value = attrgetter(name)(config)
        return str(value).lower() in values.split("|") if values else bool(value)

    changed = [name for name in names if attrgetter(name)(config) != attrgetter(name)(default)]
    unmet = [need for need in NEEDS if not any(map(is_met, need.split(" or ")))]
    return {name: need for need in unmet for name in changed if re.fullmatch(NEEDS[need], name)}


def set_keys(config: DictConfig, given: Any, source: str) -> dict[str, str]:
    """Write the given keys into `config`. `source` names the recipe or the command line in error messages.

    Return the given keys that have no effect so far, each with the condition that it needs. Raises ConfigError for an
    unknown key. The message suggests the nearest known key.
    """
    known, names = [key.name for key in list_keys()], []
    for name, value in flatten(OmegaConf.to_container(given)).items():
        names.append(name := ALIASES.get(name, name))
        if name not in known:
            last = name.rpartition(".")[2]
            near = [SYNONYMS[last]] if last in SYNONYMS else [key for key in known if key.rpartition(".")[2] == last]
            near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "`python train.py --help` lists the keys."
            raise ConfigError(f"unknown key {name!r} in {source}; {hint}")
        if name in ("recover", "doctor") and value is False:
            value = "off"  # YAML parses the word off as false
        if name == "rollout.stale" and isinstance(value, bool):
            value = "drop" if value else "wait"  # drop_stale=true and drop_stale=false
        OmegaConf.update(config, name, value)
    return without_effect(config, names)


def resolve(config: TrainConfig) -> None:
    """Check the values and set the defaults that depend on other keys. Raises ConfigError for a wrong value.

    The defaults are written into `config`, so the run's config.yaml contains every value that the run uses.
    """
    for key in list_keys():
        value = attrgetter(key.name)(config)
        if key.interval and value is not None and not is_within(value, key.interval):
            raise ConfigError(f"{key.name}={value}; it must be a number in {key.interval}")
    actor, rollout, gconfig, batch = config.actor, config.rollout, config.gconfig, config.train_dataset.batch_size
    if config.model_revision and Path(config.model_path or "").is_dir():
        raise ConfigError("model_revision has no effect on a folder: omit it, or set model_path to a name on the hub")
    actor.max_new_tokens = actor.max_new_tokens or gconfig.max_new_tokens
    if (actor.overlong_tokens or 1) > actor.max_new_tokens:
        raise ConfigError(f"actor.overlong_tokens={actor.overlong_tokens} > max_new_tokens={actor.max_new_tokens}")
    if strange := set(rollout.openai.fixed_sampling) - vars(gconfig).keys():
        raise ConfigError(f"rollout.openai.fixed_sampling: {', '.join(sorted(strange))} is no field of gconfig")
    for pattern in rollout.openai.side_conversations:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"side_conversations: {pattern!r} is no regular expression: {error}") from error
    if rollout.group_size not in (None, gconfig.n_samples) and gconfig.n_samples != 1:
        raise ConfigError("rollout.group_size and gconfig.n_samples are one number; give only one of the two keys")
    if rollout.consumer_batch_size not in (None, batch):
        raise ConfigError(f"rollout.consumer_batch_size must be equal to train_dataset.batch_size={batch}; omit it")
    rollout.group_size = gconfig.n_samples = rollout.group_size or gconfig.n_samples
    if config.mode == "train" and gconfig.n_samples == 1 and actor.adv_norm.mean_level == "group":
        raise ConfigError(
            "a group of one is its own baseline and learns nothing: raise gconfig.n_samples, or set"
            " actor.adv_norm.mean_level to batch or none"
        )
    rollout.consumer_batch_size = batch
    rollout.max_concurrent_rollouts = rollout.max_concurrent_rollouts or (rollout.max_head_offpolicyness + 1) * batch
    rollout.queue_size = rollout.queue_size or 16 * rollout.max_concurrent_rollouts
    gconfig.seed = config.seed if gconfig.seed is None else gconfig.seed
    new_key = "" if rollout.server_addrs else secrets.token_urlsafe(16)
    rollout.server_key = rollout.server_key or os.environ.get("NANO_AREAL_SERVER_KEY") or new_key


def changed(path: Path, config: TrainConfig) -> list[str]:
    """Return the keys whose values differ between the config.yaml at `path` and `config`, as "key=before -> now".

    If there is no file at `path`, as in a new run, the list is empty.
    """
    before = flatten(OmegaConf.to_container(OmegaConf.load(path))) if path.exists() else {}
    now = flatten(dataclasses.asdict(config))
    return [f"{k}={before[k]} -> {now[k]}" for k in now if k in before and before[k] != now[k]]


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; options are --config FILE, --dry-run, --help and key=value words")


def load(argv: list[str]) -> TrainConfig:
    """Return the run's configuration from the arguments of the command line. `--help` prints the keys and exits.

    Raises ConfigError if an argument, a recipe or a value is wrong.
    """
    keys = (
        f"  {k.name}={'null' if k.default is None else k.default}\n      {k.meaning}"
        + (f"; in {k.interval}" if k.interval else "")
        for k in list_keys()
    )
    epilog = "keys, their defaults and meanings:\n" + "\n".join(keys)
    parser = Parser("python train.py", epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter)
    meaning = f"YAML recipe, or a name in configs/; may be repeated, and later recipes win; default: {DEMO.stem}"
    parser.add_argument("--config", type=Path, action="append", metavar="FILE", help=meaning)
    parser.add_argument("--dry-run", action="store_true", help="print the plan of the run, and start nothing")
    parser.add_argument("--gpus", type=int, help="with --dry-run: plan for a machine with this number of GPUs")
    parser.add_argument("--gpu-memory", type=float, help="with --gpus: memory of each GPU in GiB; default: 80")
    parser.add_argument("words", nargs="*", metavar="key=value", help="a key and its value, which win over the recipes")
    args = parser.parse_intermixed_args(argv)
    if bare := [word for word in args.words if "=" not in word]:
        parser.error(f"cannot read {bare[0]!r}")
    recipes = [p if p.is_file() or p.suffix else DEMO.parent / f"{p}.yaml" for p in args.config or [DEMO]]
    if missing := [recipe for recipe in recipes if not recipe.is_file()]:
        raise ConfigError(f"no recipe at {missing[0]}; configs/ holds the ones that come with the project")
    merged, idle = OmegaConf.structured(TrainConfig), dict[str, str]()
    source = ""
    try:
        for recipe in recipes:
            source = str(recipe)
            idle |= set_keys(merged, OmegaConf.load(recipe), source)
        source = "the command line"
        options = [f"{name}={value}" for name, value in vars(args).items() if name not in ("config", "words") and value]
        idle |= set_keys(merged, OmegaConf.from_dotlist(args.words + options), source)
        config: Any = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError) as error:
        where = getattr(error, "full_key", None) or source
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error
    for name, need in without_effect(config, list(idle)).items():
        raise ConfigError(f"{name}={attrgetter(name)(config)} has no effect here: omit it, or set {need}")
    resolve(config)
    return config
