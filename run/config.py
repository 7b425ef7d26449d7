"""Every configuration key, its default, its unit and its meaning: the comment at a field's end is its help text.

A run is configured by these dataclasses, then by a YAML recipe (`--config configs/maze.yaml`), then by
`key=value` words on the command line; later ones win. An unknown key is an error that names the nearest
known one. `python train.py --help` prints these comments (those of gconfig stand in inference/io_struct.py), so there
is one place where a key is explained.

The names are AReaL's where AReaL has the key; docs/differences.md lists what is named otherwise.
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
    """What the user configured cannot run; the message is one line that says what to do."""


@dataclass
class OpenAIConfig:
    """How agents reach the policy (docs: "Execution Modes", "Export Styles")."""

    mode: Literal["inline", "subproc"] = "inline"  # where agents run: in the rollout loop, or in processes of their own
    subproc_max_workers: int = 4  # mode subproc: episodes at once, each in a process; the others wait for one
    turn_discount: float = 1.0  # gamma by which a turn's reward reaches the turn before it
    chat_template_type: Literal["hf", "concat"] = "concat"  # concat: parent's tokens + rendered tail; hf: render all
    export_style: Literal["individual", "concat"] = "concat"  # a row for every turn, or for every leaf of the tree
    tool_call_parser: str | None = None  # form of the model's tool calls; default: what the tokenizer says, else qwen
    reasoning_parser: str | None = None  # form of its reasoning; default: <think> ... </think>
    side_conversations: list[str] = field(default_factory=lambda: [*PATTERNS])  # patterns of calls that take no reward
    fixed_sampling: list[str] = field(default_factory=list)  # fields of gconfig that hold whatever an agent asks for
    session_timeout_seconds: float = 3600.0  # an idle session is dropped after this long
    episode_timeout_seconds: float = 3600.0  # an episode that runs longer is cancelled and counted as failed


@dataclass
class RolloutConfig:
    """The rollout side: admission, concurrency, agents (AReaL: InferenceEngineConfig)."""

    max_head_offpolicyness: int = 2  # eta: tokens trained on are at most this many versions old; 0 is synchronous
    max_concurrent_rollouts: int | None = None  # prompt groups in flight; default (eta + 1) * batch size
    consumer_batch_size: int | None = None  # prompt groups a training step consumes; default train_dataset.batch_size
    queue_size: int | None = None  # tasks the runner holds at most; default 16 * max_concurrent_rollouts
    group_size: int | None = None  # rollouts per prompt; the same number as gconfig.n_samples
    drop_stale: bool = False  # a group that is older than eta when consumed: true: drop and replace it; false: an error
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"  # how an update interrupts
    request_timeout: float = 3600.0  # seconds for one generation request
    request_retries: int = 3  # tries after a connection error or a 5xx
    enable_tracing: bool = True  # write every submit, start, finish, accept, reject, fail, drop to trace.json
    check_trajectory_format: bool = True  # verify keys and shapes of what workflows return; in groups always
    dump_to_file: bool = True  # write every trajectory as text to rollout/{version}/{task_id}.jsonl
    server_addrs: list[str] = field(default_factory=list)  # servers that are up already; mode=eval keeps their weights
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)  # the proxy approach


@dataclass
class ServerConfig:
    """The inference servers that train.py launches when rollout.server_addrs is empty."""

    backend: Literal["auto", "tiny", "sglang"] = "auto"  # auto: sglang where it is installed and a GPU is there
    count: int = 1  # servers to launch
    tp_size: int = 1  # GPUs of one server, which share each layer (SGLang's tensor parallelism)
    colocate: bool | None = None  # true: servers share the trainer's GPUs; default: only where there are too few
    port: int = 0  # of the first server, the next ones follow; 0: any free ones
    mem_fraction: float | None = None  # share of a GPU's memory for a server; default 0.85, colocated 0.4
    command: str = ""  # what starts SGLang, e.g. in a venv of its own; default: this Python -m sglang.launch_server
    args: list[str] = field(default_factory=list)  # more arguments for a server, as it reads them
    max_running_requests: int = 64  # sequences decoded together
    max_total_tokens: int = 16384  # tokens of all running sequences together; bounds the KV cache


@dataclass
class ProxyConfig:
    """What the agents speak to."""

    workers: int = 1  # processes; an episode keeps to one of them


@dataclass
class NormConfig:
    """A = (R - mean over mean_level) / std over std_level (AReaL: NormConfig)."""

    mean_level: Literal["group", "batch", "none"] = "group"  # over what the baseline is taken
    std_level: Literal["group", "batch", "constant", "none"] = "group"  # and the spread
    mean_leave1out: bool = False  # true: the baseline is the mean of the others (RLOO)
    std_constant: float = 1.0  # the divisor when std_level is constant
    per_turn: bool = True  # true: returns are compared with those of the same turn only
    eps: float = 1e-5  # added to the spread


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = 1e-5  # peak learning rate
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    eps: float = 1e-8  # AdamW
    weight_decay: float = 0.01  # AdamW
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # after warm-up
    warmup_steps: int = 0  # training steps of linear warm-up from 0
    min_lr_ratio: float = 0.0  # where the schedule ends, as a share of lr
    gradient_clipping: float = 1.0  # largest gradient norm; 0: no clipping


@dataclass
class PPOActorConfig:
    """The trainer: the policies of section 5, and the optimizer (AReaL: PPOActorConfig)."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # compute type of the forward pass; parameters stay float32
    ppo_n_minibatches: int = 4  # optimizer steps per epoch over the batch
    ppo_epochs: int = 1  # passes over the batch
    mb_tokens: int = 16384  # tokens (padding included) in one forward pass; more are accumulated
    layout: Literal["padded", "packed"] = "padded"  # rows one under another, or end to end without padding
    gradient_checkpointing: bool = False  # keep a layer's input only and compute the rest again in the backward pass
    enable_tree_training: bool = False  # compute once what rows share at their beginning
    offload: bool = False  # true: parameters, gradients and optimizer live in host memory (FSDP2 CPU offload)
    use_decoupled_loss: bool = True  # the paper's objective; false: standard PPO
    recompute_logprob: bool = True  # standard PPO: pi_old by a forward pass; else the server's (recompute_logprobs)
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = "recompute"  # pi_prox: asked, guessed, or compared
    eps_clip: float = 0.2  # the ratio pi_theta/pi_prox is clipped below at 1 - eps_clip
    eps_clip_higher: float | None = None  # and above at 1 + eps_clip_higher; default eps_clip
    c_clip: float | None = None  # dual clip: where A < 0 the loss is at most c_clip * |A|; > 1
    behave_imp_weight_cap: float | None = 5.0  # the largest pi_prox/pi_behav; null: no cap
    behave_imp_weight_level: Literal["token", "sequence"] = "token"  # a token's own weight, or its row's geometric mean
    behave_imp_weight_action: Literal["mask", "clamp"] = "mask"  # above the cap: out of the loss, or the cap itself
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"  # what counts the same; constant: see ppo.py
    max_new_tokens: int | None = None  # longest turn: of loss_aggregation constant, overlong_tokens; default gconfig's
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    kl_ctl: float = 0.0  # weight of the KL penalty to the reference model (ref.path)
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # how a token's KL is estimated (advantages.kl_estimate)
    kl_placement: Literal["reward", "loss"] = "reward"  # a turn pays for its KL, or the loss has a term (use k2 or k3)
    anneal: bool = False  # true: entropy_coeff and kl_ctl fall linearly to 0 over max_steps
    overlong_tokens: int | None = None  # the last tokens before max_new_tokens in which a turn pays more and more
    overlong_penalty_factor: float = 1.0  # what a turn of max_new_tokens pays
    gamma: float = 1.0  # discount of a turn's advantage, per token, towards its first
    gae_lambda: float = 1.0  # multiplies gamma: without a critic they do the same
    reward_bias: float = 0.0  # r <- (r + bias) * scaling, before clipping
    reward_scaling: float = 1.0  # see reward_bias
    reward_clip: float = 20.0  # rewards are clipped to +- this
    adv_norm: NormConfig = field(default_factory=NormConfig)  # baseline and spread of the advantages
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # AdamW


@dataclass
class RefConfig:
    """The frozen reference model of the KL penalty."""

    path: str | None = None  # a model directory; default: the model that training starts from, where kl_ctl > 0


@dataclass
class DatasetConfig:
    """Prompts: a JSONL file, or a function of one of your modules that returns a list of dicts."""

    path: str | None = None  # file.jsonl or "module.function"; default: what the task offers
    batch_size: int = 8  # prompt groups per training step
    shuffle: bool = True  # a new order every epoch, from the run's seed


@dataclass
class ValidDatasetConfig:
    """Prompts of the evaluation."""

    path: str | None = None  # as train_dataset.path; default: that one, else what the task offers


@dataclass
class EvaluatorConfig:
    """Evaluation: the same workflow under is_eval, without the staleness gate."""

    interval: int = 0  # evaluate every so many steps; 0: never
    base_url: str | None = None  # mode=eval: an OpenAI endpoint to evaluate agents on; default: model_path on a server


@dataclass
class SaverConfig:
    """Hugging Face checkpoints under checkpoints/."""

    interval: int = 0  # save every so many steps; 0: only the last one
    keep: int = 2  # how many are kept


@dataclass
class WeightUpdateConfig:
    """How new weights reach the servers."""

    mode: Literal["disk", "distributed", "tensor"] = "disk"  # a directory, a process group, or handles on one machine
    bucket_mb: float = 512.0  # MiB gathered and sent at once (distributed, tensor)
    address: str = "127.0.0.1"  # of this machine as the servers reach it (distributed)


@dataclass
class LoggerConfig:
    """What a run prints and writes."""

    live: bool = True  # a table that follows the run; false, or no terminal: one line a step
    sample_interval: int = 20  # print a sample conversation every so many steps; 0: never
    tokens_interval: int = 1  # write tokens/{step}.safetensors every so many steps; 0: never


@dataclass
class TrainConfig:
    """One run."""

    mode: Literal["train", "eval"] = "train"  # eval: one episode per validation prompt, then the end
    recover: Literal["auto", "off"] = "auto"  # auto: a run started again under its trial_name goes on where it was
    recover_interval: int = 10  # training steps between the checkpoints that it goes on from
    task: str | None = "tasks.guess"  # module with make_model, dataset, WORKFLOW, summary; null: give them by keys
    experiment_name: str = "guess"  # the run is written to {fileroot}/{experiment_name}/{trial_name}
    trial_name: str = "auto"  # auto: the date and time
    fileroot: str = "runs"  # where runs are written
    seed: int = 1  # of the data order, the sampling and the base model
    max_steps: int = 80  # training steps
    model_path: str | None = None  # a Hugging Face model directory; default: what the task makes
    tokenizer_path: str | None = None  # default: model_path
    workflow: str | None = None  # "module.Class", a RolloutWorkflow or an agent with async run(); default: the task's
    workflow_kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the workflow's class
    should_accept_fn: str | None = None  # "module.function": trajectory -> bool; false rejects it
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
    dry_run: bool = False  # true, or --dry-run: print processes, GPUs, ports and memory, and start nothing

    @property
    def run_dir(self) -> Path:
        """Where the run is written."""
        return Path(self.fileroot) / self.experiment_name / self.trial_name


DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"

# Spellings of the documents, and where the key lives here.
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


# The least that a number may be, where it is not null.
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
    """Every key of the configuration, in the order of this file. What it means is the comment at its line's end."""
    meanings = dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(cls), re.MULTILINE))
    keys = []
    for name, default in vars(cls()).items():
        if dataclasses.is_dataclass(default):
            keys += list_keys(type(default), f"{prefix}{name}.")
        else:
            keys.append(Key(prefix + name, default, meanings[name]))
    return keys


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"actor": {"eps_clip": 0.2}} -> {"actor.eps_clip": 0.2}; the free-form workflow_kwargs stay whole."""
    if not isinstance(tree, dict) or prefix == "workflow_kwargs.":
        return {prefix.rstrip("."): tree}
    return {k: v for name, child in tree.items() for k, v in flatten(child, f"{prefix}{name}.").items()}


def set_keys(config: DictConfig, given: Any, source: str) -> None:
    """Write the given keys into `config`. Aliases are known; an unknown key is an error that names the nearest one."""
    known = [key.name for key in list_keys()]
    for name, value in flatten(OmegaConf.to_container(given)).items():
        name = ALIASES.get(name, name)
        if name not in known:
            last = name.rpartition(".")[2]
            near = [key for key in known if key.rpartition(".")[2] == last]
            near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "`python train.py --help` lists the keys."
            raise ConfigError(f"unknown key {name!r} in {source}; {hint}")
        OmegaConf.update(config, name, "off" if name == "recover" and value is False else value)  # YAML: off is false


def resolve(config: TrainConfig) -> None:
    """Refuse what can be seen to be wrong; write derived defaults back, so that the run's config.yaml shows every value
    that was used."""
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
        raise ConfigError(f"{both}: the last tokens of a turn are not more than all of it")
    if actor.gamma == 0 or max(actor.gamma, actor.gae_lambda) > 1:
        raise ConfigError("actor.gamma and actor.gae_lambda must lie between 0 and 1")
    if strange := set(rollout.openai.fixed_sampling) - vars(gconfig).keys():
        raise ConfigError(f"rollout.openai.fixed_sampling: {', '.join(sorted(strange))} is no field of gconfig")
    for pattern in rollout.openai.side_conversations:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"rollout.openai.side_conversations: {pattern!r} is no regular expression: {error}"
            ) from error
    if rollout.group_size not in (None, gconfig.n_samples) and gconfig.n_samples != 1:
        both = f"rollout.group_size={rollout.group_size} and gconfig.n_samples={gconfig.n_samples}"
        raise ConfigError(f"{both} are one number; give one of them")
    if rollout.consumer_batch_size not in (None, batch):
        both = f"rollout.consumer_batch_size={rollout.consumer_batch_size} and train_dataset.batch_size={batch}"
        raise ConfigError(f"{both} must be equal: a step consumes what the gate counts per version")
    rollout.group_size = gconfig.n_samples = rollout.group_size or gconfig.n_samples
    rollout.consumer_batch_size = batch
    rollout.max_concurrent_rollouts = rollout.max_concurrent_rollouts or (rollout.max_head_offpolicyness + 1) * batch
    rollout.queue_size = rollout.queue_size or 16 * rollout.max_concurrent_rollouts
    gconfig.seed = config.seed if gconfig.seed is None else gconfig.seed


def changed(path: Path, config: TrainConfig) -> list[str]:
    """What was set otherwise in the config.yaml of a run that `config` goes on with: "key=before -> now"."""
    before = flatten(OmegaConf.to_container(OmegaConf.load(path))) if path.exists() else {}
    now = flatten(dataclasses.asdict(config))
    return [f"{k}={before[k]} -> {now[k]}" for k in now if k in before and before[k] != now[k]]


class Parser(argparse.ArgumentParser):
    """Its errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; options are --config FILE, --dry-run, --help and key=value words")


def load(argv: list[str]) -> TrainConfig:
    """The run's configuration from the command line. Raises ConfigError; `--help` prints and exits."""
    keys = (f"  {k.name}={'null' if k.default is None else k.default}\n      {k.meaning}" for k in list_keys())
    epilog = "keys, their defaults and meanings:\n" + "\n".join(keys)
    parser = Parser("python train.py", epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter)
    meaning = f"a recipe; may be repeated, and later ones win; default: configs/{DEMO.name}"
    parser.add_argument("--config", type=Path, action="append", metavar="FILE", help=meaning)
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    parser.add_argument("words", nargs="*", metavar="key=value", help="wins over the recipes")
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
