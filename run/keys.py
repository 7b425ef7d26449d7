"""Define every configuration key: its name, its default, its unit and its meaning.

The comment at the end of a key's line is the key's help text. `python train.py --help` prints every key with its
default and its comment. The keys of `gconfig` are defined in `inference/io_struct.py`, and the keys of `actor` in
`training/config.py`.

The type of a numeric key contains the interval of its allowed values: for example, the type Share stands for [0, 1].
The intervals exclude values that would harm a run without an error message. For example, the interval of the learning
rate excludes values below 0, which make the model worse. A clip bound of NaN has no effect, because every comparison
with NaN is false. No interval contains NaN.

Three tables follow the definitions of the keys. ALIASES lists alternative names of keys. SYNONYMS lists wrong names for
which an error message suggests a key. NEEDS lists keys that have an effect only if other keys have certain values. Most
keys have the names that AReaL uses. The page docs/differences.md lists the keys with different names.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from calls.sessions import Limits
from calls.side_conversations import PATTERNS
from inference.io_struct import GenerationHyperparameters
from inference.fields import Count, CountOrZero, NonNegative, Positive, Seed, Share
from training.config import PPOActorConfig


@dataclass
class OpenAIConfig:
    """How agents run ("Execution Modes" in AReaL's documents), and how their calls become training rows ("Export
    Styles")."""

    mode: Literal["inline", "subproc"] = "inline"  # an agent runs in the trainer (inline) or in a worker (subproc)
    subproc_max_workers: Count = 4  # maximum number of worker processes in which agents run, if mode=subproc
    subproc_prefix: list[str] = field(default_factory=list)  # command that starts a worker in a sandbox: [bwrap, ...]
    turn_discount: Share = 1.0  # gamma in: final reward = reward + gamma * mean(children's final rewards); 0: reward
    chat_template_type: Literal["hf", "concat"] = "concat"  # with `concat`, prompts reuse the tokens of earlier turns
    export_style: Literal["individual", "concat"] = "concat"  # a row per turn (individual) or per conversation (concat)
    tool_call_parser: str | None = None  # format of the model's tool calls; default: the tokenizer's format, or qwen
    reasoning_parser: str | None = None  # format of the model's reasoning; default: <think> ... </think>
    limits: Limits = field(default_factory=Limits)  # limits on the requests and answers of one session
    side_conversations: list[str] = field(default_factory=lambda: [*PATTERNS])  # regexes that find side conversations
    store: Literal["honour", "ignore"] = "ignore"  # honour: do not train calls with `store: false`; ignore: train them
    fixed_sampling: list[str] = field(default_factory=list)  # names of gconfig fields that agents cannot override
    session_timeout_seconds: Positive = 3600.0  # seconds for which a session may be idle before the proxy deletes it
    episode_timeout_seconds: Positive = 3600.0  # seconds that an episode may take; a longer episode counts as failed


@dataclass
class RolloutConfig:
    """How many episodes run, and how stale their data may become (AReaL's InferenceEngineConfig)."""

    max_head_offpolicyness: CountOrZero = 2  # eta, the maximum age of a group in versions; 0: synchronous training
    max_concurrent_rollouts: Count | None = None  # maximum number of running groups; default: batch size * (eta + 1)
    consumer_batch_size: Count | None = None  # number of prompt groups in a step; default: train_dataset.batch_size
    queue_size: Count | None = None  # limit of running and of waiting groups; default: 16 * max_concurrent_rollouts
    group_size: Count | None = None  # number of episodes per prompt; another name for gconfig.n_samples
    stale: Literal["wait", "mask", "drop"] = "wait"  # how to exclude tokens older than eta from training (staleness.py)
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"  # how weight updates interrupt a server (engine.py)
    request_timeout: Positive = 3600.0  # seconds to wait for the reply to one generation request
    request_retries: CountOrZero = 3  # maximum number of retries after a lost connection or a 5xx status; 0: no retry
    enable_tracing: bool = True  # true: write the events of all groups to trace.json, for a trace viewer
    check_trajectory_format: bool = True  # true: check the keys and shapes of the tensors that workflows return
    dump_to_file: bool = True  # true: write every trajectory as text to rollout/{version}/{task_id}.jsonl
    server_addrs: list[str] = field(default_factory=list)  # URLs of inference servers; if empty, the run starts servers
    server_key: str = ""  # API key of the servers; default: $POCKET_AREAL_SERVER_KEY, or a new key if the run starts them
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)  # settings of agents and of their calls


@dataclass
class ServerConfig:
    """The inference servers that train.py starts when rollout.server_addrs is empty."""

    backend: Literal["auto", "tiny", "sglang"] = "auto"  # auto: sglang if SGLang and a GPU are available, else tiny
    count: Count = 1  # number of servers to start
    tp_size: Count = 1  # number of GPUs per server (tensor parallelism)
    colocate: bool | None = None  # true: servers share the trainer's GPUs; default: true if there are too few GPUs
    port: Annotated[int, "[0, 65535]"] = 0  # port of the first server; others use the next ports; 0: any free ports
    mem_fraction: Annotated[float, "(0, 1)"] | None = None  # share of GPU memory; default: 0.85, or 0.6 on a shared GPU
    fp32_head: bool = True  # true: on GPUs, SGLang computes logits in float32, as the trainer does; false: bfloat16
    command: str = ""  # command that starts SGLang; default: the run's Python with -m sglang.launch_server
    args: list[str] = field(default_factory=list)  # further command-line arguments for every server
    release_memory: bool = False  # true: during a training step, servers free their GPU memory and generate nothing
    max_restarts: CountOrZero = 3  # maximum number of restarts of a server that fails in a training run; 0: no restart
    max_running_requests: Count = 64  # maximum number of sequences that a server decodes at the same time
    max_total_tokens: Count = 16384  # maximum number of tokens in a server's key-value cache


@dataclass
class ProxyConfig:
    """The proxy processes, which answer the agents' requests."""

    workers: Count = 1  # number of proxy processes; each episode uses one of them


@dataclass
class RefConfig:
    """The frozen reference model of the KL penalty."""

    path: str | None = None  # folder of the reference model, or its name on the hub; default: model_path


@dataclass
class DatasetConfig:
    """The training prompts: a JSONL file, or a function that returns a list of dicts."""

    path: str | None = None  # FILE.jsonl, or a module.function that returns the prompts; default: the task's dataset
    batch_size: Count = 8  # number of prompt groups in a training step
    shuffle: bool = True  # true: every epoch has a new random order of the prompts, determined by the run's seed


@dataclass
class ValidDatasetConfig:
    """The validation prompts, on which the agents are evaluated."""

    path: str | None = None  # FILE.jsonl or module.function; default: train_dataset.path, else the task's dataset


@dataclass
class EvaluatorConfig:
    """The evaluation: one episode per validation prompt, without the staleness gate."""

    interval: CountOrZero = 0  # number of steps between two evaluations; 0: never
    base_url: str | None = None  # with mode=eval: OpenAI endpoint that agents call; default: the run's own proxy


@dataclass
class EvalSampling:
    """The sampling parameters of evaluations. A key that is null takes the value of the key of the same name in
    gconfig."""

    max_new_tokens: Count | None = None  # maximum number of generated tokens in a turn of an evaluation
    temperature: NonNegative | None = None  # divisor of the logits; 0: always sample the likeliest token
    top_p: Annotated[float, "(0, 1]"] | None = None  # sample only the likeliest tokens with this total probability
    top_k: Annotated[int, "[-1, -1] or [1, inf)"] | None = None  # number of likeliest tokens to sample from; -1: all
    greedy: bool | None = None  # true: always sample the likeliest token, whatever temperature an agent asks for


@dataclass
class SaverConfig:
    """The Hugging Face checkpoints in the folder checkpoints/ of a run. The last step always saves a checkpoint."""

    interval: CountOrZero = 0  # number of steps between two checkpoints; 0: only after the last step
    keep: Count = 2  # number of newest checkpoints to keep; the checkpoint with the best evaluation is kept, too


@dataclass
class WeightUpdateConfig:
    """How new weights reach the inference servers: in files, by a process group, or in shared GPU memory."""

    mode: Literal["auto", "disk", "distributed", "tensor"] = "auto"  # auto: the run chooses a mode that fits the GPUs
    path: str | None = None  # in mode disk: folder for new weights, such as /dev/shm/new; default: the run's folder
    bucket_mb: Positive = 512.0  # in modes distributed and tensor: maximum size of a bucket of tensors, in MiB
    address: str = "127.0.0.1"  # in mode distributed: address at which the servers reach this machine


@dataclass
class LoggerConfig:
    """How often a run prints and writes its results."""

    live: bool = True  # true: show a live table if there is a terminal; false: print one line per step
    sample_interval: CountOrZero = 20  # number of steps between two printed sample conversations; 0: never
    report_interval: CountOrZero = 10  # minimum number of steps between two updates of report.html; 0: only at the end
    tokens_interval: CountOrZero = 1  # number of steps between two batches saved in tokens/{step}.safetensors; 0: never
    tracker: str | None = None  # Python module that also gets the metrics: wandb, trackio or a compatible module
    keep_steps: Count | None = None  # number of newest steps whose files in tokens/ and rollout/ are kept; default: all


@dataclass
class TrainConfig:
    """The whole configuration of a run."""

    mode: Literal["train", "eval"] = "train"  # train the model, or only evaluate on the validation prompts (eval)
    recover: Literal["auto", "off"] = "auto"  # auto: if the run exists, it continues from its last checkpoint
    doctor: Literal["warn", "strict", "off"] = "warn"  # warn: report problems after each step; strict: also end the run
    recover_interval: Count = 10  # number of training steps between two checkpoints for recovery
    task: str | None = "tasks.guess"  # module that defines data, workflow and model; null: other keys define them
    experiment_name: str = "guess"  # experiment's name; the run's folder is {fileroot}/{experiment_name}/{trial_name}
    trial_name: str = "auto"  # name of the run; auto: the date and time
    fileroot: str = "runs"  # folder that holds all runs
    seed: Seed = 1  # seed of the data order, the sampling and the task's base model; 0 is a valid seed
    max_steps: Count = 80  # number of training steps
    model_path: str | None = None  # folder of the model, or its name on the hub; default: the task's small model
    model_revision: str | None = None  # branch, tag or commit of model_path on the hub; default: the newest commit
    tokenizer_path: str | None = None  # Hugging Face folder of the tokenizer; default: model_path
    workflow: str | None = None  # import path (module.Class) of an agent or workflow; default: the task's workflow
    workflow_kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the workflow's class
    should_accept_fn: str | None = None  # module.function that accepts (true) or rejects (false) a group's trajectory
    success_above: Annotated[float, "(-inf, inf)"] = 0.0  # rewards above this number count as successes
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)  # sampling parameters
    eval_gconfig: EvalSampling = field(default_factory=EvalSampling)
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
    replay: str = ""  # folder of the run that this run repeats; set by --replay (run/replay.py)
    replay_until: Count | None = None  # last step of a replay (--replay-until); default: the repeated run's last step
    dry_run: bool = False  # true, or --dry-run: print the plan (processes, GPUs, ports, memory) and start nothing
    quiet: bool = False  # true, or --quiet: print only warnings, errors and the results at the end
    gpus: Count | None = None  # with --dry-run: number of GPUs to plan for; default: the GPUs of this machine
    gpu_memory: Positive = 80.0  # with --dry-run: memory of each planned GPU, in GiB

    @property
    def run_dir(self) -> Path:
        """The folder that the run writes to."""
        return Path(self.fileroot) / self.experiment_name / self.trial_name

    @property
    def evaluation_gconfig(self) -> GenerationHyperparameters:
        """The sampling parameters of an evaluation: those of gconfig, changed by the keys of eval_gconfig."""
        return self.gconfig.new(**{k: value for k, value in vars(self.eval_gconfig).items() if value is not None})


# Alternative names of keys, as in AReaL's documents, and the key that each name sets.
ALIASES = {
    "model": "model_path",
    "data": "train_dataset.path",
    "actor.recompute_logprobs": "actor.recompute_logprob",
    "rollout.drop_stale": "rollout.stale",
    **{f"rollout.{name}": name for name in ("fileroot", "experiment_name", "trial_name", "tokenizer_path")},
    "eval_interval": "evaluator.interval",
}


# Wrong names that users give to keys, and the key that the error message suggests for each name.
SYNONYMS = {"learning_rate": "actor.optimizer.lr", "staleness": "rollout.max_head_offpolicyness", "steps": "max_steps"}

# Each row has a condition and a regular expression. A key whose name matches the regular expression has an effect only
# if the condition holds.
NEEDS = {
    "rollout.server_addrs=[]": r"server\..*",
    "rollout.pause_mode=retract|abort": r"server\.release_memory",
    "server.release_memory=false": r"server\.max_restarts",
    "rollout.openai.mode=subproc": r"rollout\.openai\.subproc_.*",
    "gconfig.greedy=false": r"gconfig\.(temperature|top_p|top_k)",
    "dry_run=true": r"gpus|gpu_memory",
    "mode=eval": r"evaluator\.base_url",
    "mode=eval or evaluator.interval": r"valid_dataset\.path|eval_gconfig\..*",
    "recover=auto": r"recover_interval",
    "saver.interval": r"saver\.keep",
    "weight_update.mode=auto|disk": r"weight_update\.path",
    "weight_update.mode=auto|distributed": r"weight_update\.address",
    "weight_update.mode=auto|distributed|tensor": r"weight_update\.bucket_mb",
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
