"""The configuration of a run: every key with its default, its range and its meaning.

A key's type is its range and its description is its help text, so there is one place to look a key
up and one validator. YAML recipes and `key=value` words merge first, the later one wins; then one
`TrainConfig.model_validate` checks everything before any process starts.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from inference.io_struct import GenerationHyperparameters

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


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
    side_conversations: list[str] | None = key(
        None, "regular expressions that find title requests; null: the built-in ones; []: none"
    )


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
    check_trajectory_format: bool = key(True, "check what workflows return")
    dump_to_file: bool = key(True, "write trajectories as text, rollout/{version}/{task_id}.jsonl")
    server_addrs: list[str] = key([], "URLs of running servers; empty: the run starts its own")
    openai: OpenAIConfig = key(OpenAIConfig(), "agents")


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
    loss: str = key("ppo.ppo_actor_loss_fn", "module.function of the loss (extras/losses.py)")
    advantages: str = key(
        "ppo.compute_advantages", "module.function of the advantages (extras/advantages.py)"
    )
    entropy_coeff: NonNegative = key(0.0, "weight of the entropy bonus")
    kl_ctl: NonNegative = key(0.0, "weight of the KL to the reference model; 0: no such model")
    anneal: bool = key(False, "let entropy_coeff and kl_ctl fall linearly to 0")
    reward_scaling: Positive = key(1.0, "multiplied with every reward")
    adv_norm: NormConfig = key(NormConfig(), "baseline and divisor")
    optimizer: OptimizerConfig = key(OptimizerConfig(), "AdamW")


class ProxyConfig(Keys):
    """The proxies."""

    workers: Count = key(1, "number of proxy processes; an episode stays with one of them")


class RefConfig(Keys):
    """The frozen model of the KL penalty."""

    path: str | None = key(None, "its folder; default: model_path")


class DatasetConfig(Keys):
    """The prompts to train on."""

    path: str | None = key(None, "FILE.jsonl or module.function; default: the task's")
    batch_size: Count = key(8, "prompt groups in a step (B)")
    shuffle: bool = key(True, "a new order in every epoch")


class ValidDatasetConfig(Keys):
    """The prompts to evaluate on."""

    path: str | None = key(None, "FILE.jsonl or module.function; default: the task's")


class EvaluatorConfig(Keys):
    """Evaluations: one episode per validation prompt."""

    interval: CountOrZero = key(0, "steps between two evaluations; 0: never")
    base_url: str | None = key(None, "with mode=eval: any OpenAI endpoint to evaluate instead")


class SaverConfig(Keys):
    """Models in checkpoints/, as Hugging Face folders."""

    interval: CountOrZero = key(0, "steps between two models; 0: only the last one")


class WeightUpdateConfig(Keys):
    """How new weights reach the servers."""

    mode: Literal["auto", "disk", "distributed"] = key(
        "auto", "files, or a process group; auto: files on one machine or for one GPU"
    )
    path: str | None = key(None, "folder for the files; default: /dev/shm, else the run's folder")
    address: str = key("127.0.0.1", "where servers reach the trainer, with mode=distributed")


class TrainConfig(Keys):
    """A run."""

    mode: Literal["train", "eval"] = key("train", "train, or only evaluate")
    task: str | None = key("tasks.guess", "module with data, agent and model; null: keys say it")
    experiment_name: str = key("guess", "the run's folder is fileroot/experiment_name/trial_name")
    trial_name: str = key("auto", "an existing one continues; auto: date and time")
    fileroot: str = key("runs", "folder of all runs")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = key(1, "order of the data, and sampling")
    max_steps: Count = key(80, "training steps")
    model_path: str | None = key(None, "folder or hub name of the model; default: the task's")
    tokenizer_path: str | None = key(None, "folder of the tokenizer; default: model_path")
    workflow: str | None = key(None, "module.Class of an agent or workflow; default: the task's")
    workflow_kwargs: dict[str, Any] = key({}, "arguments of that class")
    should_accept_fn: str | None = key(None, "module.function that accepts or rejects a group")
    callbacks: list[str] = key([], "classes that observe the run, such as extras.doctor.Doctor")
    recover_interval: CountOrZero = key(10, "steps between two checkpoints; 0: none")
    gconfig: GenerationHyperparameters = key(GenerationHyperparameters(), "sampling")
    eval_gconfig: dict[str, Any] = key({}, "fields of gconfig that differ in evaluations")
    rollout: RolloutConfig = key(RolloutConfig(), "rollouts")
    server: ServerConfig = key(ServerConfig(), "servers")
    proxy: ProxyConfig = key(ProxyConfig(), "proxies")
    actor: PPOActorConfig = key(PPOActorConfig(), "trainer")
    ref: RefConfig = key(RefConfig(), "reference model")
    train_dataset: DatasetConfig = key(DatasetConfig(), "training prompts")
    valid_dataset: ValidDatasetConfig = key(ValidDatasetConfig(), "validation prompts")
    evaluator: EvaluatorConfig = key(EvaluatorConfig(), "evaluation")
    saver: SaverConfig = key(SaverConfig(), "saved models")
    weight_update: WeightUpdateConfig = key(WeightUpdateConfig(), "weight updates")

    @property
    def run_dir(self) -> Path:
        """The folder that the run writes to."""
        return Path(self.fileroot) / self.experiment_name / self.trial_name

    @property
    def evaluation_gconfig(self) -> GenerationHyperparameters:
        """The sampling of an evaluation: gconfig, changed by eval_gconfig."""
        return self.gconfig.new(**self.eval_gconfig)
