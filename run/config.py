"""The configuration of a run: every key with its default, its range and its meaning.

A key's type is its range and its description is its help text, so there is one place to look a key
up and one validator. YAML recipes and `key=value` words merge first, the later one wins; then one
`TrainConfig.model_validate` checks everything before any process starts.
"""

import argparse
import difflib
import importlib.util
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from inference.io_struct import GenerationHyperparameters


def find_source(module: str) -> Path:
    """The file of a module, which is not imported: torch takes seconds. Raises ValueError."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its package
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no module {module!r}")
    return Path(spec.origin)


def check_name(path: str) -> str:
    module, _, name = path.rpartition(".")
    if name == "jsonl":
        if not Path(path).is_file():
            raise ValueError("there is no such file")
    elif not re.search(rf"\b{name}\b", find_source(module).read_text()):
        raise ValueError(f"{module} has no {name}")
    return path


Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
FolderName = Annotated[str, Field(pattern=r"^\w[^/]*$")]
Named = Annotated[str, AfterValidator(check_name)]  # module.function, module.Class or FILE.jsonl


def key(default: Any, meaning: str) -> Any:
    """One key: its default and its meaning. A mutable default is copied for every configuration."""
    return Field(default, description=meaning)


class Keys(BaseModel):
    """A group of keys. Unknown keys and wrong values are errors, also when they are set later."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class OpenAIConfig(Keys):
    """Agents: where they run, and how their calls become rows."""

    mode: Literal["inline", "subproc"] = key(
        "inline", "agents run in the trainer's event loop, or each episode in a process of its own"
    )
    subproc_max_workers: Count = key(4, "processes for agents, with mode=subproc")
    turn_discount: Share = key(1.0, "gamma in R = r + gamma * mean R(children)")
    export_style: Literal["individual", "concat"] = key(
        "concat", "one row per turn, or one row per conversation"
    )
    tool_call_parser: str | None = key(
        None, "form of the model's tool calls: hermes, a parser of SGLang, or module.function"
    )
    episode_timeout_seconds: Positive = key(3600.0, "an episode that takes longer has failed")


class RolloutConfig(Keys):
    """Rollouts: how many run, and how old their tokens may become."""

    max_head_offpolicyness: CountOrZero = key(
        2, "eta: how many versions a trained token may be old; 0: synchronous training"
    )
    max_concurrent_rollouts: Count | None = key(
        None, "prompt groups that run at once; default: batch size * (eta + 1)"
    )
    consumer_batch_size: Count | None = key(
        None, "prompt groups of a step (B); the same number as train_dataset.batch_size"
    )
    group_size: Count | None = key(
        None, "episodes per prompt; the same number as gconfig.n_samples"
    )
    stale: Literal["wait", "mask", "drop"] = key("wait", "how eta is kept (staleness.py)")
    pause_mode: Literal["retract", "abort", "in_place"] = key(
        "retract", "how a weight update interrupts the servers (engine.py)"
    )
    enable_tracing: bool = key(False, "write every event of every group to trace.json")
    dump_to_file: bool = key(True, "write trajectories as text, rollout/{version}/{task_id}.jsonl")
    server_addrs: list[str] = key([], "URLs of running servers; empty: the run starts its own")
    openai: OpenAIConfig = OpenAIConfig()


class ServerConfig(Keys):
    """The inference servers that a run starts."""

    backend: Literal["auto", "tiny", "sglang"] = key(
        "auto", "auto: SGLang where it is installed and there is a GPU, else the small server"
    )
    count: Count = key(1, "number of servers")
    tp_size: Count = key(1, "GPUs per server")
    args: list[str] = key([], "more words for the command line of every server")
    max_running_requests: Count = key(64, "sequences that a server decodes at once")
    max_total_tokens: Count = key(16384, "tokens in a server's key-value cache")


class NormConfig(Keys):
    """The advantage A = (R - mean) / std of a return R."""

    mean_level: Literal["group", "batch", "none"] = key("group", "whose mean is the baseline")
    std_level: Literal["group", "batch", "none"] = key("group", "whose std divides; none: 1")
    per_turn: bool = key(True, "compare turn k only with turns that have the number k")


class OptimizerConfig(Keys):
    """AdamW and its learning rate."""

    lr: NonNegative = key(1e-5, "largest learning rate")
    beta2: Annotated[float, Field(ge=0, lt=1)] = key(0.95, "memory of the squared gradients")
    weight_decay: NonNegative = key(0.01, "decay of the weights")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "constant", "course of the learning rate after the warm-up"
    )
    warmup_steps: CountOrZero = key(0, "steps in which the learning rate rises from 0")
    gradient_clipping: NonNegative = key(1.0, "largest norm of a gradient; 0: no limit")


class PPOActorConfig(Keys):
    """The trainer: its model, the decoupled objective and the optimizer."""

    dtype: Literal["float32", "bfloat16"] = key(
        "float32", "numbers in the forward pass; the parameters are float32"
    )
    ppo_n_minibatches: Count = key(4, "optimizer steps in a pass over the batch")
    ppo_epochs: Count = key(1, "passes over a batch")
    mb_tokens: Count = key(16384, "most tokens in one forward pass")
    gradient_checkpointing: bool = key(False, "recompute the layers in the backward pass")
    enable_tree_training: bool = key(False, "compute the shared beginning of rows only once")
    offload: bool = key(False, "keep parameters and optimizer in host memory")
    use_decoupled_loss: bool = key(True, "decoupled PPO; false: standard PPO")
    recompute_logprob: bool = key(
        True, "standard PPO: compute log pi_old again; false: take the server's"
    )
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = key(
        "recompute", "how log pi_prox is found"
    )
    eps_clip: Share = key(0.2, "clip u = pi_theta / pi_prox below 1 - eps_clip")
    eps_clip_higher: NonNegative | None = key(None, "clip u above 1 + this; default: eps_clip")
    c_clip: Annotated[float, Field(gt=1)] | None = key(None, "dual clip: for A < 0, J >= c_clip A")
    behave_imp_weight_cap: Annotated[float, Field(ge=1)] | None = key(
        5.0, "tokens with a larger pi_prox / pi_behav are left out; null: none"
    )
    loss: Named = key("ppo.ppo_actor_loss_fn", "module.function of the loss (extras/losses.py)")
    advantages: Named = key(
        "ppo.compute_advantages", "module.function of the advantages (extras/advantages.py)"
    )
    entropy_coeff: NonNegative = key(0.0, "weight of the entropy bonus")
    kl_ctl: NonNegative = key(0.0, "weight of the KL to the reference model; 0: no such model")
    anneal: bool = key(False, "let entropy_coeff and kl_ctl fall linearly to 0")
    reward_scaling: Positive = key(1.0, "multiplied with every reward")
    adv_norm: NormConfig = NormConfig()
    optimizer: OptimizerConfig = OptimizerConfig()


class ProxyConfig(Keys):
    """The proxies."""

    workers: Count = key(1, "number of proxy processes; an episode stays with one of them")


class RefConfig(Keys):
    """The frozen model of the KL penalty."""

    path: str | None = key(None, "its folder; default: model_path")


class DatasetConfig(Keys):
    """The prompts to train on."""

    path: Named | None = key(None, "FILE.jsonl or module.function; default: the task's")
    batch_size: Count = key(8, "prompt groups in a step (B)")
    shuffle: bool = key(True, "a new order in every epoch")


class ValidDatasetConfig(Keys):
    """The prompts to evaluate on."""

    path: Named | None = key(None, "FILE.jsonl or module.function; default: the task's")


class EvaluatorConfig(Keys):
    """Evaluations: one episode per validation prompt."""

    interval: CountOrZero = key(0, "steps between two evaluations; 0: never")
    base_url: str | None = key(None, "with mode=eval: any OpenAI endpoint to evaluate instead")


class SaverConfig(Keys):
    """Models in checkpoints/, as Hugging Face folders."""

    interval: CountOrZero = key(0, "steps between two models; 0: only the last one")


class WeightUpdateConfig(Keys):
    """How new weights reach the servers."""

    mode: Literal["disk", "distributed"] = key(
        "disk", "files, or a process group, if the servers have GPUs of their own"
    )
    path: str | None = key(None, "folder for the files, such as /dev/shm; default: the run's")
    address: str = key("127.0.0.1", "where servers reach the trainer, with mode=distributed")


class TrainConfig(Keys):
    """A run."""

    mode: Literal["train", "eval"] = key("train", "train, or only evaluate")
    task: str | None = key("tasks.guess", "module with data, agent and model; null: keys say it")
    experiment_name: FolderName = key(
        "guess", "the run's folder is fileroot/experiment_name/trial_name"
    )
    trial_name: FolderName = key("auto", "an existing one continues; auto: date and time")
    fileroot: str = key("runs", "folder of all runs")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = key(1, "order of the data, and sampling")
    max_steps: Count = key(80, "training steps")
    model_path: str | None = key(None, "folder or hub name of the model; default: the task's")
    tokenizer_path: str | None = key(None, "folder of the tokenizer; default: model_path")
    workflow: Named | None = key(None, "module.Class of an agent or workflow; default: the task's")
    workflow_kwargs: dict[str, Any] = key({}, "arguments of that class")
    should_accept_fn: Named | None = key(None, "module.function that accepts or rejects a group")
    callbacks: list[Named] = key([], "classes that observe the run, such as extras.doctor.Doctor")
    recover_interval: CountOrZero = key(10, "steps between two checkpoints; 0: none")
    gconfig: GenerationHyperparameters = GenerationHyperparameters()
    eval_gconfig: dict[str, Any] = key({}, "fields of gconfig that differ in evaluations")
    rollout: RolloutConfig = RolloutConfig()
    server: ServerConfig = ServerConfig()
    proxy: ProxyConfig = ProxyConfig()
    actor: PPOActorConfig = PPOActorConfig()
    ref: RefConfig = RefConfig()
    train_dataset: DatasetConfig = DatasetConfig()
    valid_dataset: ValidDatasetConfig = ValidDatasetConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    saver: SaverConfig = SaverConfig()
    weight_update: WeightUpdateConfig = WeightUpdateConfig()

    @property
    def run_dir(self) -> Path:
        """The folder that the run writes to."""
        return Path(self.fileroot) / self.experiment_name / self.trial_name

    @property
    def evaluation_gconfig(self) -> GenerationHyperparameters:
        """The sampling of an evaluation: gconfig, changed by eval_gconfig."""
        merged = self.gconfig.model_dump() | self.eval_gconfig
        return GenerationHyperparameters.model_validate(merged)


# ---- from the command line to a configuration

ROOT = Path(__file__).resolve().parent.parent

ALIASES = {  # other names of a key: those of AReaL's documents
    "model": "model_path",
    "data": "train_dataset.path",
    "actor.recompute_logprobs": "actor.recompute_logprob",
    "eval_interval": "evaluator.interval",
    "rollout.consumer_batch_size": "train_dataset.batch_size",
    "rollout.group_size": "gconfig.n_samples",
    **{f"rollout.{x}": x for x in ("fileroot", "experiment_name", "trial_name", "tokenizer_path")},
}
MAIN = (  # what --help shows
    *("task", "model_path", "workflow", "train_dataset.path", "train_dataset.batch_size"),
    *("gconfig.n_samples", "gconfig.max_new_tokens", "gconfig.temperature", "max_steps", "seed"),
    *("rollout.max_head_offpolicyness", "rollout.max_concurrent_rollouts", "rollout.stale"),
    *("rollout.server_addrs", "rollout.openai.mode", "server.backend", "actor.optimizer.lr"),
    *("actor.dtype", "evaluator.interval", "trial_name"),
)


class ConfigError(ValueError):
    """The configuration is wrong. The message is one line that says what to change."""


def list_keys(group: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """Yield the full name, the value and the declaration of every key."""
    for name, declared in type(group).model_fields.items():
        value = getattr(group, name)
        if isinstance(value, BaseModel):
            yield from list_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, declared


def describe_keys(every: bool) -> str:
    lines = ["the keys:" if every else "the keys that matter most (--help-all shows all):"]
    for name, value, declared in list_keys(TrainConfig()):
        if every or name in MAIN:
            choices = [x for x in get_args(declared.annotation) if isinstance(x, str)]
            lines += [
                f"  {name}={value}",
                f"      {' '.join([declared.description or '', *choices])}",
            ]
    return "\n".join(lines)


def parse_words(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="python train.py [options] [key=value ...]",
        epilog=describe_keys("--help-all" in argv),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--help-all", action="help", help="show all keys, too")
    add("--config", action="append", metavar="FILE", help="a recipe, or its name in configs/")
    add("--dry-run", action="store_true", help="print the plan of the run, and start nothing")
    add("--gpus", type=int, metavar="N", help="with --dry-run: plan for so many GPUs")
    add("--gpu-memory", type=float, metavar="GIB", help="with --dry-run: the memory of each")
    add("--quiet", action="store_true", help="print only warnings and errors")
    add("--force", action="store_true", help="continue a run that was started with other code")
    add("--replay", metavar="RUN", help="repeat the run in this folder, bit by bit")
    add("--replay-until", type=int, metavar="N", help="with --replay: stop after step N")
    add("words", nargs="*", metavar="key=value", help="a key, without dashes")
    return parser.parse_intermixed_args(argv)


def nest(name: str, value: Any) -> dict[str, Any]:
    """Turn actor.eps_clip and 0.2 into {"actor": {"eps_clip": 0.2}}."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def merge(below: Any, above: Any) -> Any:
    """Lay the settings `above` over those `below`, group by group."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {name: merge(below.get(name), value) for name, value in above.items()}


def rename(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of one source without aliases. Raises ConfigError for two values of a key."""
    for alias, name in ALIASES.items():
        group, _, last = alias.rpartition(".")
        place = settings.get(group) if group else settings
        if isinstance(place, dict) and last in place:
            found = nest(name, place.pop(last))
            if merge(found, settings) != merge(settings, found):
                raise ConfigError(f"{alias} and {name} are one key: give one of them")
            settings = merge(settings, found)
    return settings


def parse(text: str, where: Any) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error


def read_recipe(name: str) -> dict[str, Any]:
    """The settings of a recipe: a file, or its name in configs/. Raises ConfigError."""
    path = next((p for p in (Path(name), ROOT / "configs" / f"{name}.yaml") if p.is_file()), None)
    if path is None:
        raise ConfigError(f"no recipe at {name}, nor in {ROOT / 'configs'}")
    settings = parse(path.read_text(), path) or {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: lines of the form `key: value` are needed")
    return settings


def load(argv: list[str]) -> tuple[TrainConfig, argparse.Namespace]:
    """Return the configuration and the options of a command line. --help prints and exits.

    Raises ConfigError if a key is wrong.
    """
    options = parse_words(argv)
    recipes = [f"{options.replay}/config.yaml"] if options.replay else []
    recipes += options.config or ([] if options.replay else ["demo"])
    given: dict[str, Any] = {}
    for word in options.words:
        name, _, value = word.partition("=")
        given = merge(given, nest(name, parse(value, name)))
    settings = reduce(merge, map(rename, [*map(read_recipe, recipes), given]))
    try:
        config = TrainConfig.model_validate(settings)
        resolve(config)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"unknown key {name!r}; {did_you_mean(name)}") from error
        raise ConfigError(f"{name}={first['input']!r}: {first['msg']}") from error
    return config, options


def did_you_mean(name: str) -> str:
    known = [key for key, _, _ in list_keys(TrainConfig())]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    near += [key for key in known if key.endswith("." + name.rpartition(".")[2])]
    return f"did you mean {near[0]!r}?" if near else "python train.py --help-all lists the keys"


def resolve(config: TrainConfig) -> None:
    """Set the defaults that depend on other keys, and refuse keys that contradict each other."""
    rollout, gconfig, data = config.rollout, config.gconfig, config.train_dataset
    rollout.consumer_batch_size, rollout.group_size = data.batch_size, gconfig.n_samples
    waves = rollout.max_head_offpolicyness + 1
    rollout.max_concurrent_rollouts = rollout.max_concurrent_rollouts or data.batch_size * waves
    _ = config.evaluation_gconfig
    if config.mode == "eval":
        return
    if gconfig.n_samples == 1 and config.actor.adv_norm.mean_level == "group":
        raise ConfigError(
            "a group of one is its own baseline: raise gconfig.n_samples, or set"
            " actor.adv_norm.mean_level to batch or none"
        )
    if not gconfig.trains_exactly:
        raise ConfigError(
            "gconfig: training cannot reproduce samples of top_p, top_k, penalties, greedy or"
            " temperature 0: omit them, or set mode=eval"
        )
