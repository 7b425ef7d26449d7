"""Every key of the configuration, with its default, its range and its meaning.

A key's type gives its range, and the text below the key is its help. `load` merges YAML recipes
(configs/) and the command line's `key=value` words, and later values win.
`TrainConfig.model_validate` checks all values before any process starts.
"""

import argparse
import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)
from pydantic.fields import FieldInfo

from inference.fields import check_name
from inference.io_struct import CHECKED, GenerationHyperparameters
from inference.process import ROOT, has_bfloat16

Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
FolderName = Annotated[str, Field(pattern=r"^\w[^/]*$")]
Named = Annotated[str, AfterValidator(check_name)]  # module.function, module.Class or FILE.jsonl


class Keys(BaseModel):
    model_config = CHECKED


class OpenAIConfig(Keys):
    """Where agents run, and how their calls become rows."""

    mode: Literal["inline", "subproc"] = "inline"
    """inline: agents run in the trainer's event loop; subproc: in processes of their own"""
    subproc_max_workers: PositiveInt = 4
    """processes for agents, with mode=subproc"""
    turn_discount: Share = 1.0
    """gamma in R(i) = r(i) + gamma * mean R(calls that read i)"""
    compaction: Literal["link", "cut"] = "link"
    """link: rewards also reach answers that later calls quote; cut: only continued or named ones"""
    export_style: Literal["individual", "concat"] = "concat"
    """individual: one row per turn; concat: one row per conversation"""
    tool_call_parser: str | None = None
    """module.function that reads the model's tool calls; null: the format of Hermes and Qwen"""
    episode_timeout_seconds: PositiveFloat = 3600.0
    """an episode that takes longer fails"""


class RolloutConfig(Keys):
    """How many rollouts run, and how old their tokens may become."""

    max_head_offpolicyness: NonNegativeInt = 2
    """eta: a trained token is at most this many versions old; 0: synchronous training"""
    max_concurrent_rollouts: PositiveInt | None = None
    """limit on prompt groups that run at once; default: batch size * (eta + 1)"""
    stale: Literal["wait", "mask", "drop"] = "wait"
    """how eta is enforced: wait, mask or drop (staleness.py)"""
    pause_mode: Literal["retract", "abort"] = "retract"
    """how a weight update interrupts the servers: retract or abort (engine.py)"""
    enable_tracing: bool = False
    """write every event of every group to trace.json"""
    dump_to_file: bool = True
    """write trajectories as text to rollout/{version}/{task_id}.jsonl"""
    server_addrs: list[str] = []
    """URLs of running servers; empty: the run starts its own"""
    openai: OpenAIConfig = OpenAIConfig()


class ServerConfig(Keys):
    """The inference servers that a run starts."""

    backend: Literal["tiny", "sglang"] = "tiny"
    """tiny: the small server; sglang: SGLang, on GPUs"""
    count: PositiveInt = 1
    """number of servers"""
    tp_size: PositiveInt = 1
    """GPUs per server"""
    args: list[str] = []
    """more command-line arguments for every server"""
    max_running_requests: PositiveInt = 64
    """sequences that a server decodes at once"""
    max_total_tokens: PositiveInt = 16384
    """tokens in a server's key-value cache"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where the small server computes; auto: cuda if a GPU is visible, else cpu; mps is untested"""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """number format of the small server's weights; auto: bfloat16 where the processor has it"""
    threads: NonNegativeInt = 1
    """threads of a small server; 0: half of the machine's"""


class NormConfig(Keys):
    """The advantage of a turn with final reward R: A = (R - mean) / std."""

    mean_level: Literal["group", "batch", "none"] = "group"
    """whose mean is the baseline: the group's, the batch's, or none"""
    std_level: Literal["group", "batch", "none"] = "group"
    """whose std divides: the group's, the batch's, or none"""
    per_turn: bool = True
    """compare a k-th turn only with other k-th turns"""


class OptimizerConfig(Keys):
    """AdamW and its learning rate."""

    lr: NonNegativeFloat = 1e-5
    """largest learning rate"""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """decay of AdamW's averages of gradients, and of their squares"""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay, of matrices only"""
    lr_scheduler_type: Literal["constant", "linear"] = "constant"
    """learning rate after the warm-up: constant, or linear down to a tenth"""
    warmup_steps: NonNegativeInt = 0
    """steps over which the learning rate rises from 0"""
    gradient_clipping: NonNegativeFloat = 1.0
    """largest norm of a gradient; 0: no limit"""


class PPOActorConfig(Keys):
    """The trained model, its objective and its optimizer."""

    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """number format of the forward pass; auto: bfloat16 where the processor has it"""
    threads: NonNegativeInt = 1
    """threads of the trainer on a CPU; 0: half of the machine's"""
    frozen_layers: NonNegativeInt = 0
    """number of first layers that, like the embeddings, do not learn; 0: all learn"""
    ppo_n_minibatches: PositiveInt = 4
    """optimizer steps in a pass over the batch"""
    ppo_epochs: PositiveInt = 1
    """passes over a batch"""
    mb_tokens: PositiveInt = 16384
    """token limit of a forward pass"""
    gradient_checkpointing: bool = False
    """save memory: recompute layers in the backward pass"""
    enable_tree_training: bool | None = None
    """compute shared prefixes of rows only once; null: on a CPU, if the model allows it"""
    use_decoupled_loss: bool = True
    """decoupled PPO; false: standard PPO"""
    recompute_logprob: bool = True
    """standard PPO: compute log pi_old again; false: take the server's"""
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = "recompute"
    """how log pi_prox is found: by a pass (recompute), a guess (loglinear) or both (metrics)"""
    eps_clip: Share = 0.2
    """the clip raises u = pi_theta / pi_prox to at least 1 - eps_clip"""
    eps_clip_higher: NonNegativeFloat | None = None
    """the clip lowers u to at most 1 + eps_clip_higher; default: eps_clip"""
    c_clip: Annotated[float, Field(gt=1)] | None = None
    """dual clip: for A < 0, objective >= c_clip A"""
    behave_imp_weight_cap: Annotated[float, Field(ge=1)] | None = 5.0
    """tokens with a larger pi_prox / pi_behav add 0 to the objective; null: no cap"""
    loss: Named = "ppo.ppo_actor_loss_fn"
    """module.function of the loss (extras/losses.py)"""
    advantages: Named = "ppo.compute_advantages"
    """module.function of the advantages (extras/advantages.py)"""
    entropy_coeff: NonNegativeFloat = 0.0
    """weight of the entropy bonus"""
    kl_ctl: NonNegativeFloat = 0.0
    """weight of the KL to the reference model; 0: load that model only if ref.path is set"""
    anneal: bool = False
    """let entropy_coeff and kl_ctl fall linearly to 0"""
    reward_scaling: PositiveFloat = 1.0
    """multiplies every reward"""
    adv_norm: NormConfig = NormConfig()
    optimizer: OptimizerConfig = OptimizerConfig()


class RefConfig(Keys):
    """The frozen model for the KL penalty."""

    path: str | None = None
    """folder of the model; default: model_path"""


class DatasetConfig(Keys):
    """Where prompts come from."""

    path: Named | None = None
    """FILE.jsonl or module.function; default: the task's data"""


class TrainDatasetConfig(DatasetConfig):
    batch_size: PositiveInt = 8
    """prompt groups in a step (B)"""
    shuffle: bool = True
    """shuffle the prompts; false: keep their order"""


class EvaluatorConfig(Keys):
    """Evaluations run each validation prompt eval_gconfig.n_samples times."""

    interval: NonNegativeInt = 0
    """steps between two evaluations; 0: never"""
    base_url: str | None = None
    """with mode=eval: evaluate this OpenAI endpoint; of eval_gconfig, only n_samples applies"""


class SaverConfig(Keys):
    """Models saved in checkpoints/, as Hugging Face folders."""

    interval: NonNegativeInt = 0
    """steps between two saved models; 0: only the last"""


class WeightUpdateConfig(Keys):
    """How new weights reach the servers."""

    mode: Literal["disk", "distributed"] = "disk"
    """disk: through files; distributed: over a process group, if the servers have their own GPUs"""
    path: str | None = None
    """folder for the files, such as /dev/shm; default: the run's folder"""
    address: str = "127.0.0.1"
    """where servers reach the trainer, with mode=distributed"""


class TrainConfig(Keys):
    """All keys of a run."""

    mode: Literal["train", "eval"] = "train"
    """train, or eval: evaluate without training"""
    task: str | None = "tasks.guess"
    """module with data, agent and model; null: other keys name them"""
    experiment_name: FolderName = "guess"
    """the run's folder is fileroot/experiment_name/trial_name"""
    trial_name: FolderName = "auto"
    """an existing name continues that run; auto: date, time and process id"""
    fileroot: str = "runs"
    """folder of all runs"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """fixes the data's order and the sampling"""
    max_steps: PositiveInt = 80
    """training steps"""
    model_path: str | None = None
    """folder or hub name of the model; default: the task's"""
    tokenizer_path: str | None = None
    """folder of the tokenizer; default: model_path"""
    workflow: Named | None = None
    """module.Class of an agent or workflow; default: the task's"""
    workflow_kwargs: dict[str, Any] = {}
    """arguments of the workflow's class"""
    should_accept_fn: Named | None = None
    """module.function (no coroutine) that accepts or rejects a group"""
    callbacks: list[Named] = []
    """classes that observe the run, such as extras.doctor.Doctor"""
    recover_interval: NonNegativeInt = 10
    """steps between two checkpoints; 0: only at the end"""
    gconfig: GenerationHyperparameters = GenerationHyperparameters()
    eval_gconfig: dict[str, Any] = {}
    """fields of gconfig that differ in evaluations; n_samples is 1 unless set here"""
    rollout: RolloutConfig = RolloutConfig()
    server: ServerConfig = ServerConfig()
    actor: PPOActorConfig = PPOActorConfig()
    ref: RefConfig = RefConfig()
    train_dataset: TrainDatasetConfig = TrainDatasetConfig()
    valid_dataset: DatasetConfig = DatasetConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    saver: SaverConfig = SaverConfig()
    weight_update: WeightUpdateConfig = WeightUpdateConfig()

    @property
    def run_dir(self) -> Path:
        return Path(self.fileroot) / self.experiment_name / self.trial_name

    @property
    def concurrent_groups(self) -> int:
        most = self.train_dataset.batch_size * (self.rollout.max_head_offpolicyness + 1)
        return self.rollout.max_concurrent_rollouts or most

    @property
    def evaluation_gconfig(self) -> GenerationHyperparameters:
        merged = self.gconfig.model_dump() | {"n_samples": 1} | self.eval_gconfig
        return GenerationHyperparameters(**merged)


# ---- from the command line to a configuration

ALIASES = {  # other names for keys, from AReaL's documents
    "model": "model_path",
    "data": "train_dataset.path",
    "actor.recompute_logprobs": "actor.recompute_logprob",
    "eval_interval": "evaluator.interval",
    "rollout.consumer_batch_size": "train_dataset.batch_size",
    "rollout.group_size": "gconfig.n_samples",
    **{f"rollout.{x}": x for x in ("fileroot", "experiment_name", "trial_name", "tokenizer_path")},
}

# the keys that --help shows
MAIN_KEYS = """mode task workflow callbacks seed max_steps trial_name model_path train_dataset.path
train_dataset.batch_size gconfig.n_samples gconfig.max_new_tokens gconfig.temperature
rollout.max_head_offpolicyness rollout.stale server.backend actor.eps_clip actor.loss
actor.optimizer.lr evaluator.interval"""


class ConfigError(ValueError):
    """The configuration is wrong. The message is one line, and says what to change."""

    is_verdict = True  # no traceback is printed


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Turn an exception in the user's code into a one-line ConfigError that starts with `what`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{what}: {type(error).__name__}: {text}") from error


def list_keys(group: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    for name, declared in type(group).model_fields.items():
        value = getattr(group, name)
        if isinstance(value, BaseModel):
            yield from list_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, declared


def flatten(value: Any, *path: Any) -> Iterator[Any]:
    """Yield every setting of a nested dict as path and value, such as ("actor", "eps_clip") and
    0.2. A path is a tuple, because names in workflow_kwargs may contain dots."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for name, inner in value.items():
        yield from flatten(inner, *path, name)


def merge(settings: dict[str, Any], given: Iterable[Any]) -> None:
    """Put (path, value) pairs into the nested dict `settings`, and replace aliases. Raises
    ConfigError if one key is given under two names."""
    names: dict[str, str] = {}  # the name by which each key was given
    for path, value in given:
        name = ".".join(map(str, path))
        key = ALIASES.get(name, name)
        if (other := names.setdefault(key, name)) != name:
            raise ConfigError(f"{other} and {name} are one key: give one of them")
        *groups, last = path if key == name else key.split(".")
        group = settings
        for part in groups:
            if not isinstance(group.get(part), dict):
                group[part] = {}
            group = group[part]
        group[last] = value


def load(argv: list[str]) -> tuple[TrainConfig, argparse.Namespace]:
    """Read the command line `argv`. Return the configuration, and the options such as --force.
    Raises ConfigError if a key is wrong."""
    keys = [*list_keys(TrainConfig())]
    lines = [
        f"  {name}={value}\n      {key.description}"
        for name, value, key in keys
        if name in MAIN_KEYS.split() or "--help-all" in argv
    ]
    parser = argparse.ArgumentParser(
        usage="python train.py [options] [key=value ...]",
        epilog="\n".join(["the keys and their defaults, which a recipe overrides:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--help-all", action="help", help="show this message with all keys")
    add("--config", action="append", metavar="FILE", help="a recipe, or a name in configs/ (demo)")
    add("--force", action="store_true", help="continue a run that other code or data began")
    add("words", nargs="*", metavar="key=value", help="a key, without dashes")
    options = parser.parse_intermixed_args(argv)
    settings: dict[str, Any] = {}
    for name in options.config or ["demo"]:
        path = Path(name) if Path(name).is_file() else ROOT / "configs" / f"{name}.yaml"
        with one_line(f"--config {name}"):
            if recipe := yaml.safe_load(path.read_text()):
                merge(settings, flatten(recipe))
    words: list[Any] = []
    for word in options.words:
        name, _, value = word.partition("=")
        if word == f"{name}=":
            raise ConfigError(f"{word} lacks its value")
        with one_line(name):  # YAML would read the names 1.10 and 20261127_101010 as numbers
            is_name = name.endswith(("experiment_name", "trial_name"))
            words += flatten(value if is_name else yaml.safe_load(value), *name.split("."))
    merge(settings, words)
    try:
        config = resolve(TrainConfig.model_validate(settings))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] != "extra_forbidden":
            raise ConfigError(f"{name}={first['input']!r}: {first['msg']}") from error
        near = difflib.get_close_matches(name, [known for known, _, _ in keys])
        hint = " or ".join(map(repr, near)) or "one of --help-all"
        raise ConfigError(f"unknown key {name!r}: did you mean {hint}?") from error
    return config, options


def resolve(config: TrainConfig) -> TrainConfig:
    """Return a copy of the configuration, with this machine's values for dtype=auto and threads=0.
    Raises ConfigError if keys contradict each other."""
    config = type(config).model_validate(
        config.model_dump() | {"workflow_kwargs": config.workflow_kwargs}  # keeps objects in them
    )
    for group in (config.server, config.actor):
        if group.dtype == "auto":
            group.dtype = "bfloat16" if has_bfloat16() else "float32"
        group.threads = group.threads or max(1, (os.cpu_count() or 1) // 2)
    _ = config.evaluation_gconfig
    if config.server.backend == "tiny" and not config.rollout.server_addrs:
        if config.server.tp_size > 1:
            raise ConfigError("server.tp_size: a small server uses one GPU; raise server.count")
        if config.weight_update.mode != "disk":
            raise ConfigError("weight_update.mode: a small server reads weights from disk only")
    if config.mode == "train" and not config.gconfig.trains_exactly:
        raise ConfigError(
            "gconfig: training cannot reproduce samples of top_p, top_k, penalties, greedy or"
            " temperature 0: omit them, or set mode=eval"
        )
    return config
