"""The schema of the config: a tree of dataclasses with the defaults in one place. A task adds
sections.

A YAML file changes defaults, and the command line changes both; see parse.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from typing import Any, Literal

# The effect of a different value of an option on a step.
NOTHING = "nothing"
PARTITION = "bits by rounding, and nothing with virtual workers"
ROUNDING = "bits by rounding"
NUMBERS = "numbers"


def option(
    default: Any,
    help: str,
    *,
    low: float = -inf,
    high: float = inf,
    above: float = -inf,
    free: bool = False,
    changes: str = NUMBERS,
    resolved: str = "",
    group: str = "",
) -> Any:
    """Declare a config field: default and line of help.

    low, high  the range of a number, inclusive
    above      the lower bound of a number, exclusive
    free       a resumed run may have a different value; `Task.resumable_keys` lists a task's own
    changes    the effect of a different value on a step: NOTHING, PARTITION, ROUNDING or NUMBERS
    resolved   the entry of the environment with the choice, for an option that may be `auto`
    group      the name of the value in the groups of an optimizer
    """
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "above": above,
        "free": free,
        "changes": changes,
        "resolved": resolved,
        "group": group,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, free: bool = False, changes: str = NUMBERS) -> Any:
    """Declare a config field that is a dataclass of options. `free` and `changes` hold for all
    options of the section."""
    return field(default_factory=cls, metadata={"free": free, "changes": changes})


def choice(default: str, classes: dict[str, type]) -> Any:
    """Declare a config field that is one of several dataclasses, chosen by the key `type`. A class
    may have `defaults` for keys of the common config, as a task has."""
    return field(default_factory=classes[default], metadata={"classes": classes})


@dataclass(frozen=True)
class Optim:
    name: Literal["adamw", "sgd", "muon", "adafactor"] = option(
        "adamw", "the optimizer; muon is torch's for matrices and AdamW for the rest"
    )
    lr: float = option(1e-3, "learning rate at the base batch size", above=0, high=1000)
    weight_decay: float = option(
        1e-2, "decoupled weight decay; never on norms and biases", low=0, group="weight_decay"
    )
    beta1: float = option(0.9, "AdamW's first moment", low=0, high=0.99999, group="betas")
    beta2: float = option(0.999, "AdamW's second moment", low=0, high=0.99999, group="betas")
    eps: float = option(1e-8, "AdamW's epsilon", above=0, group="eps")
    momentum: float = option(0.9, "momentum of sgd and muon", low=0, high=0.99999, group="momentum")
    lr_scale: list[str] = option(
        [],
        (
            "factors of the learning rate of weights and modules by name, such as "
            "backbone.*:0.1,head:10; ?*x: if any"
        ),
    )
    layer_decay: float = option(
        1.0,
        "layer-wise rate decay: the factor of the rate from a block to the block before; 1 = none",
        above=0,
        high=1,
    )
    freeze: list[str] = option(
        [], "weights and modules that are not trained, by name, such as backbone.*"
    )
    grad_clip: float = option(1.0, "largest global norm of the gradient; 0 = no clipping", low=0)
    ema_decay: float = option(
        0.0, "decay of the exponential moving average that is evaluated; 0 = none", low=0, high=1
    )
    zero: bool = option(
        False, "replaced by ddp.strategy=fsdp; true is an error", free=True, changes=PARTITION
    )


@dataclass(frozen=True)
class Schedule:
    kind: Literal[
        "cosine",
        "linear",
        "constant",
        "wsd",
        "polynomial",
        "exponential",
        "step",
        "multistep",
        "one-cycle",
        "warm-restarts",
        "inverse-sqrt",
        "plateau",
    ] = option(
        "cosine", "what follows the warm-up; wsd: constant, then linear over the last decay_share"
    )
    decay_share: float = option(
        0.2, "share of the steps, the last ones, in which wsd decays", above=0, high=1
    )
    power: float = option(1.0, "exponent of polynomial", above=0)
    gamma: float = option(
        0.1,
        "factor of the rate at each period (exponential, step), milestone (multistep) or plateau",
        above=0,
        high=1,
    )
    period_epochs: float = option(
        0.0,
        "period of exponential, step and warm-restarts (the first one), in epochs",
        low=0,
    )
    period_steps: int = option(
        0, "this period in optimizer steps; goes before period_epochs", low=0
    )
    period_factor: int = option(
        1, "length of a period of warm-restarts, as a multiple of the period before", low=1
    )
    milestone_epochs: list[float] = option(
        [], "epochs of the run after which multistep lowers the rate, such as 30,80", low=0
    )
    milestone_steps: list[int] = option(
        [], "these milestones in optimizer steps; go before milestone_epochs", low=0
    )
    start_share: float = option(
        0.04, "first rate of one-cycle, as a share of the peak", low=0, high=1
    )
    peak_momentum: float = option(
        0.85,
        "momentum or beta1 at the peak of one-cycle, if optim.momentum or optim.beta1 is larger",
        above=0,
        high=0.99999,
    )
    plateau_patience: int = option(
        10, "evaluations without a better monitor after which plateau lowers the rate", low=0
    )
    plateau_threshold: float = option(
        1e-4, "least relative change of the monitor that plateau counts as better", low=0
    )
    final_weight_decay: float = option(
        -1.0,
        "weight decay at the end, reached by a cosine from optim.weight_decay; -1 = constant",
        low=-1,
    )
    warmup_epochs: float = option(0.0, "linear warm-up, in epochs", low=0)
    warmup_steps: int = option(
        0, "linear warm-up, in optimizer steps; goes before warmup_epochs", low=0
    )
    final_share: float = option(
        0.0,
        "learning rate at the end, as a share of the peak; of kinds without an end the least rate",
        low=0,
        high=1,
    )
    horizon: int = option(
        0, "optimizer steps the schedule spans; 0 = as long as this run", low=0, free=True
    )
    lr_scaling: Literal["none", "sqrt", "linear"] = option(
        "none", "how optim.lr follows the global batch"
    )
    base_batch_size: int = option(
        0, "the global batch at which optim.lr was tuned; lr_scaling needs it", low=0
    )


@dataclass(frozen=True)
class DDP:
    backend: Literal["auto", "nccl", "gloo"] = option(
        "auto",
        "NCCL on GPUs, with gloo for objects; gloo on CPUs, there with shared memory for sums",
    )
    timeout_s: float = option(
        300.0, "seconds a collective may wait for the slowest rank", above=0, changes=NOTHING
    )
    init_timeout_s: float = option(
        120.0, "seconds to wait for all ranks to join", above=0, changes=NOTHING
    )
    bucket_cap_mb: float = option(25.0, "size of a gradient bucket", above=0)
    gradient_as_bucket_view: bool = option(True, "gradients live in the buckets: one copy less")
    comm_hook: Literal["none", "fp16", "bf16"] = option(
        "none", "send gradients in half as many bytes; other cuts are then other runs"
    )
    find_unused_parameters: bool = option(
        False, "only for models that skip some parameters in some steps"
    )
    static_graph: bool = option(
        False,
        (
            "the same parameters in every step: lets checkpointed layers recompute; not with "
            "accumulation"
        ),
    )
    bind_cores: bool = option(
        True,
        (
            "let train_multigpu.sh keep each process on its GPU's NUMA node, where the machine has "
            "several nodes (torchrun's --numa-binding=node)"
        ),
        changes=NOTHING,
    )
    buffers: Literal["same", "rank0", "mean"] = option(
        "same",
        "what modules keep in buffers, but for BatchNorm's kin: the ranks must hold the same, or "
        "take rank 0's or the "
        "mean after each step",
    )
    sync_bn: bool = option(False, "turn BatchNorm into SyncBatchNorm (GPU only)")
    strategy: Literal["ddp", "fsdp", "hsdp"] = option(
        "ddp",
        "what a process holds: ddp the whole model; fsdp some rows of each weight, gradient and "
        "moment (FSDP2); hsdp "
        "the same within groups of ddp.shards processes",
    )
    shares: list[str] = option(
        [],
        (
            "shares of the virtual workers by process, such as 3,1; auto: as fast as each process "
            "is, measured at log points; empty: even"
        ),
        changes=NOTHING,
    )
    shards: int = option(
        0,
        "processes that hold one copy of the model together (hsdp); 0 = those of a machine",
        low=0,
    )
    reduce_every: int = option(
        1,
        (
            "forward passes between sums of gradients (fsdp, hsdp); in between each process holds "
            "whole ones; 0 = a step"
        ),
        low=0,
    )
    gather_dtype: Literal["weights", "bf16"] = option(
        "weights",
        (
            "what weights are sent as (fsdp, hsdp); bf16: half as many bytes, and all layers "
            "compute "
            "in it"
        ),
    )


@dataclass(frozen=True)
class Wandb:
    enable: bool = option(False, "log to Weights & Biases too (`pip install wandb`)")
    project: str = option("lockstep", "the project's name")
    name: str = option("", "the run's name; empty = the run folder's")
    entity: str = option("", "the account or team that the run belongs to; empty = your own")
    notes: str = option("", "text about the run")
    run_id: str = option(
        "", "the id of a run to go on with; empty = a new one, or that of the checkpoint"
    )
    mode: Literal["auto", "online", "offline"] = option(
        "auto",
        (
            "offline writes to the run folder, `wandb sync` sends it later; auto: the mode in "
            "WANDB_MODE, or online"
        ),
    )


@dataclass(frozen=True)
class MLflow:
    enable: bool = option(False, "log to MLflow too (`pip install mlflow`)")
    uri: str = option(
        "",
        (
            "server, database or folder, such as file:mlruns; empty: that of MLFLOW_TRACKING_URI, "
            "or MLflow's own"
        ),
    )
    experiment: str = option("lockstep", "the experiment's name")
    name: str = option("", "the run's name; empty = the run folder's")


@dataclass(frozen=True)
class Config:
    """The settings of every task. The `Settings` of a task add sections (`dataset`, `model`,
    ...)."""

    task: str = option("har", "a name in tasks/, or the path of a .py file with a class Task")
    seed: int = option(0, "of weights, order, augmentation and dropout", low=0, high=2**31 - 1)
    epochs: int = option(
        20,
        "passes over the training set; where steps are given, too, whichever ends first",
        low=0,
        free=True,
    )
    steps: int = option(
        0, "optimizer steps; where epochs are given, too, whichever ends first", low=0, free=True
    )
    batch_size: int = option(
        32, "samples per process (per GPU) and forward pass", low=1, free=True, changes=ROUNDING
    )
    global_batch: int = option(
        0,
        "samples per optimizer step over all processes; 0 = what the others give",
        low=0,
        free=True,
    )
    gradient_accumulation_steps: int = option(
        0,
        "forward passes per step; 0 = 1, or what global_batch needs",
        low=0,
        free=True,
        changes=ROUNDING,
    )
    virtual_workers: int = option(
        0,
        (
            "deal each step to so many workers, run by any number of processes: the same bits on "
            "any; 0 = off"
        ),
        low=0,
        changes=ROUNDING,
    )
    drop_last: bool = option(
        False, "drop the last, shorter global batch of an epoch instead of training on it"
    )
    sampler: Literal["shuffle", "balanced"] = option(
        "shuffle", "each sample once, or each class equally often"
    )
    exclude: list[str] = option(
        [],
        (
            "sources to train without, such as 7,9, or samples by number: all others keep their "
            "step "
            "and random numbers"
        ),
    )
    random_samples: Literal["stop", "warn"] = option(
        "stop",
        (
            "a dataset that gives another sample each time: refuse it, or train all the same, no "
            "two "
            "runs alike"
        ),
        free=True,
        changes=NOTHING,
    )
    num_workers: int = option(
        0,
        "loader processes per process; 0 = none, right for data one gather away",
        low=0,
        free=True,
        changes=NOTHING,
    )
    cache: Literal["auto", "device", "host", "none"] = option(
        "auto",
        (
            "hold the samples on the device, or in each process's memory; auto: on a GPU with "
            "room, "
            "if num_workers=0"
        ),
        free=True,
        changes=PARTITION,
    )
    eval_batch_size: int = option(
        0,
        "samples per forward pass in evaluation; 0 = twice batch_size",
        low=0,
        free=True,
        changes=NOTHING,
    )
    save_dir: str = option(
        "", "the run's folder; empty = a new checkpoints/<task>_<time>", free=True, changes=NOTHING
    )
    resume: str = option(
        "auto",
        "auto = resume where save_dir stands; never; or the path of a checkpoint",
        free=True,
        changes=NOTHING,
    )
    init_from: str = option(
        "",
        "weights of a new run, by name and shape: of a run, a checkpoint, .safetensors or .pt",
        free=True,
        changes=NOTHING,
    )
    threads: int = option(
        0,
        (
            "threads a process computes in, on a CPU; 0 = the number in OMP_NUM_THREADS, or one "
            "for a small model"
        ),
        low=0,
        free=True,
        changes=ROUNDING,
        resolved="threads",
    )
    amp: Literal["auto", "bf16", "fp16", "off"] = option(
        "auto",
        "mixed precision: auto takes what the device is fast at",
        free=True,
        changes=ROUNDING,
        resolved="precision",
    )
    oom: Literal["stop", "shrink"] = option(
        "stop",
        (
            "when memory runs out: print a batch that would fit, or start all ranks again with it, "
            "the same steps"
        ),
        free=True,
        changes=NOTHING,
    )
    compile: Literal[
        "off", "auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = option(
        "off",
        "compile the model with torch.compile: for long runs, as the first steps take half a "
        "minute; auto: on a "
        "GPU, in runs of 5000 steps and more",
        free=True,
        changes=ROUNDING,
        resolved="compile",
    )
    cuda_graph: Literal["auto"] | bool = option(
        "auto",
        "record the steps of a small model as CUDA graphs: auto where a GPU waits for the host; "
        "the same bits",
        free=True,
        changes=ROUNDING,
    )
    memory_format: Literal["auto", "channels_last", "contiguous"] = option(
        "auto",
        "layout of convolutions: auto is the faster one, channels_last if the model has no "
        "GroupNorm (on GPUs: of 2-D "
        "and 3-D ones, with mixed precision, also with the norms of models/layers.py if Triton is "
        "installed); contiguous if the model calls `view` on features",
        free=True,
        changes=ROUNDING,
        resolved="memory_format",
    )
    allocator: Literal["keep", "system"] = option(
        "keep",
        "memory that is freed on the CPU: keep it for the next step, or give it back to the system",
        free=True,
        changes=NOTHING,
    )
    deterministic: bool = option(
        False,
        "same seed, same hardware, same bits; may be slower",
        free=True,
        changes=ROUNDING,
        resolved="deterministic kernels",
    )
    arithmetic: Literal["native", "capped"] = option(
        "native",
        "capped: the bits of a CPU with AVX2 on every newer x86-64 CPU, of Intel or AMD; slower",
        free=True,
        changes=ROUNDING,
    )
    device: Literal["auto", "cuda", "cpu"] = option(
        "auto", "auto = GPU if there is one", free=True, changes=ROUNDING, resolved="device"
    )
    multi_gpu: Literal["none", "auto", "ddp", "dp"] = option(
        "none",
        (
            "plain python on several GPUs: ddp starts torchrun, dp is DataParallel, auto is ddp if "
            "there are several"
        ),
        free=True,
        changes=ROUNDING,
    )
    gpu_ids: list[int] = option(
        [],
        "the GPUs that --multi-gpu uses, such as 0,1,3; empty = all",
        low=0,
        free=True,
        changes=ROUNDING,
    )
    digest_every: int = option(
        50,
        "steps between digests of the weights in the log, to compare runs; 0 = none",
        low=0,
        free=True,
        changes=NOTHING,
    )
    record: int = option(
        0,
        "a step whose tensors are noted, in a small file for tools/compare.py; 0 = none",
        low=0,
        free=True,
        changes=NOTHING,
    )
    log_every: int = option(
        0,
        "optimizer steps between log lines; 0 = 10, and 50 on GPUs",
        low=0,
        free=True,
        changes=NOTHING,
    )
    eval_every: int = option(
        0,
        "optimizer steps between evaluations; 0 = once an epoch",
        low=0,
        free=True,
        changes=NOTHING,
    )
    save_every: int = option(
        0,
        "optimizer steps between checkpoints; 0 = once an epoch, or less often",
        low=0,
        free=True,
        changes=NOTHING,
    )
    save_minutes: float = option(
        10.0,
        "without it, minutes between checkpoints in an epoch, or longer; 0 = none",
        low=0,
        free=True,
        changes=NOTHING,
    )
    patience: int = option(
        0,
        "evaluations without a better one before the run ends; 0 = never",
        low=0,
        free=True,
        changes=NOTHING,
    )
    max_time_s: float = option(
        0.0,
        "seconds after which the run stops with a checkpoint; 0 = never",
        low=0,
        free=True,
        changes=NOTHING,
    )
    max_skipped_steps: int = option(
        20,
        "steps in a row without a finite gradient that end the run; 0 = never",
        low=0,
        free=True,
        changes=NOTHING,
    )
    check_every: int = option(
        500,
        "optimizer steps between checks that ranks hold the same weights; 0 = never",
        low=0,
        free=True,
        changes=NOTHING,
    )
    check_resume: bool = option(
        True,
        (
            "try whether the loss depends on a value that no checkpoint holds; after the first "
            "step, compare what a resumed run would restore with what runs"
        ),
        free=True,
        changes=NOTHING,
    )
    check_sums: bool = option(
        True,
        (
            "before the first step, compute some samples together and in two parts: loss and score "
            "must add up"
        ),
        free=True,
        changes=NOTHING,
    )
    keep_checkpoints: int = option(
        1,
        "older checkpoints to keep beside the last and the best",
        low=0,
        free=True,
        changes=NOTHING,
    )
    loader_timeout_s: float = option(
        180.0,
        "seconds a batch may take a loader process (num_workers > 0)",
        above=0,
        free=True,
        changes=NOTHING,
    )
    optim: Optim = section(Optim)
    schedule: Schedule = section(Schedule)
    ddp: DDP = section(DDP, free=True, changes=PARTITION)
    wandb: Wandb = section(Wandb, free=True, changes=NOTHING)
    mlflow: MLflow = section(MLflow, free=True, changes=NOTHING)


ALIASES = {
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "grad_clip": "optim.grad_clip",
    "warmup_epochs": "schedule.warmup_epochs",
    "warmup_steps": "schedule.warmup_steps",
    "lr_scaling": "schedule.lr_scaling",
    "grad_accum_steps": "gradient_accumulation_steps",
    "use_amp": "amp",
    "max_time": "max_time_s",
    "dataset.exclude": "exclude",
}
"""{short spelling: key}, with the spellings of the guides."""

SETS_NOTHING: dict[str, tuple[Any, str]] = {
    "torch.backends.cudnn.benchmark": (
        True,
        "cuDNN tries its kernels; deterministic=true ends that",
    ),
    "torch.backends.cuda.matmul.allow_tf32": (True, "TF32 is on; amp=off ends that"),
    "torch.backends.cudnn.allow_tf32": (True, "TF32 is on; amp=off ends that"),
    # of older versions: each has it in config.yaml
    "gc_every": (None, "Python collects its garbage when it likes"),
}
"""{key: (the only accepted value, None for any; the reason)} of settings in the guides without an
effect here, because the settings always hold."""


def _facts(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return {key: metadata of the option}; a section has the key `ddp.`, with a dot at its end."""
    facts: dict[str, Any] = {}
    for declared in fields(cls):
        key = prefix + declared.name
        if is_dataclass(declared.default_factory):
            key += "."
            facts |= _facts(declared.default_factory, key)
        facts[key] = declared.metadata
    return facts


def _keys(fact: str, value: Any) -> tuple[str, ...]:
    """Return the keys and sections with this value of a fact."""
    return tuple(key for key, facts in FACTS.items() if facts.get(fact) == value)


def _values(fact: str) -> dict[str, str]:
    """Return {key: value of the fact}, of the options that have a value."""
    return {key: facts[fact] for key, facts in FACTS.items() if facts.get(fact)}


def is_in(key: str, keys: Collection[str]) -> bool:
    """Return whether `keys` holds the key, or a section of the key."""
    return key in keys or any(key.startswith(name) for name in keys if name.endswith("."))


def may_differ(key: str, own: Collection[str]) -> bool:
    """Return whether a resumed run may have a different value of this key.

    own  `Task.resumable_keys`
    """
    return is_in(key, FREE_KEYS) or is_in(key, own)


FACTS = _facts(Config)
FREE_KEYS = (*_keys("free", True), *SETS_NOTHING)
"""Keys and sections that may differ from the checkpoint's config. The resolved values of
global_batch and schedule.horizon are compared, and the data by fingerprint."""
NO_NUMBERS = _keys("changes", NOTHING)
"""Keys and sections that change no step."""
NO_BITS = _keys("changes", PARTITION)
"""Keys and sections that change no bit of a step with virtual workers; docs/same-bits.md."""
ONLY_ROUNDING = (*NO_BITS, *_keys("changes", ROUNDING))
"""Keys and sections that may change the bits of a step by rounding: the partition of the global
batch, and the arithmetic of the machine."""
RESOLVED = _values("resolved")
"""{key that may be `auto`: the entry of the environment with the choice}."""
GROUP_NAMES = _values("group")
"""{key: the name of the value in an optimizer's groups}."""

EVERYDAY = (
    "epochs steps batch_size lr warmup_epochs weight_decay grad_accum_steps global_batch "
    "num_workers save_dir resume "
    "amp seed multi_gpu gpu_ids log_every eval_every save_every patience max_time_s deterministic"
).split()
"""Keys in the text of --help, in order; --print-config prints all keys."""

MAPPINGS = ("optim.lr_scale", "rename_map")
"""Lists of NAME:VALUE; a YAML file may have a mapping instead."""

SWITCHES = ("help", "print_config", "dry_run", "debug", "force", "profile")
FILES = ("config", "config_path")
BOOLS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
"""The spellings of a yes and of a no."""
