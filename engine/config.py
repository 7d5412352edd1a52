"""One schema: a tree of dataclasses with the defaults in one place; YAML is a delta over it, the command line another.

Values arrive as text, from YAML too (PyYAML would read `1e-4` as a string and `no` as False), and are coerced by the
type that the field declares. Every problem is found before anything starts, and all are reported together.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import math
import os
import re
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import yaml

from engine.contract import Task
from engine.errors import LockstepError


def option(
    default: Any, help: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A config field: its default, its line of help, and its range (`low`, `high` inclusive, `above` exclusive)."""
    metadata = {"help": help, "low": low, "high": high, "above": above}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type) -> Any:
    """A config field that is itself a dataclass of options."""
    return field(default_factory=cls)


def choice(default: str, classes: dict[str, type]) -> Any:
    """A config field that is one of several such dataclasses: the key `type` in it says which. A class may have
    `defaults`, as a task has: keys of the common config that this choice starts from."""
    return field(default_factory=classes[default], metadata={"classes": classes})


@dataclass
class Optim:
    lr: float = option(1e-3, "learning rate of AdamW at the base batch size", above=0, high=1000)
    weight_decay: float = option(1e-2, "decoupled weight decay; never on norms and biases", low=0)
    beta1: float = option(0.9, "AdamW's first moment", low=0, high=0.99999)
    beta2: float = option(0.999, "AdamW's second moment", low=0, high=0.99999)
    eps: float = option(1e-8, "AdamW's epsilon", above=0)
    grad_clip: float = option(1.0, "largest global norm of the gradient; 0 = no clipping", low=0)
    ema_decay: float = option(0.0, "decay of the exponential moving average that is evaluated; 0 = none", low=0, high=1)
    zero: bool = option(False, "each process keeps the moments of its share of the parameters only (ZeRO, stage 1)")


@dataclass
class Schedule:
    kind: Literal["cosine", "linear", "constant"] = option("cosine", "what follows the warm-up")
    warmup_epochs: float = option(0.0, "linear warm-up, in epochs", low=0)
    warmup_steps: int = option(0, "linear warm-up, in optimizer steps; goes before warmup_epochs", low=0)
    final_share: float = option(0.0, "learning rate at the end, as a share of the peak", low=0, high=1)
    horizon: int = option(0, "optimizer steps the schedule spans; 0 = as long as this run", low=0)
    lr_scaling: Literal["none", "sqrt", "linear"] = option("none", "how optim.lr follows the global batch")
    base_batch_size: int = option(0, "the global batch at which optim.lr was tuned; lr_scaling needs it", low=0)


@dataclass
class DDP:
    backend: Literal["auto", "nccl", "gloo"] = option(
        "auto", "NCCL on GPUs, gloo on CPUs, there with shared memory for sums"
    )
    timeout_s: float = option(300.0, "seconds a collective may wait for the slowest rank", above=0)
    init_timeout_s: float = option(120.0, "seconds to wait for all ranks to join", above=0)
    bucket_cap_mb: float = option(25.0, "size of a gradient bucket", above=0)
    gradient_as_bucket_view: bool = option(True, "gradients live in the buckets: one copy less")
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = option(
        "none", "send gradients compressed: half as many bytes, or low-rank matrices; other cuts are then other runs"
    )
    find_unused_parameters: bool = option(False, "only for models that skip some parameters in some steps")
    static_graph: bool = option(
        False, "the same parameters in every step: lets checkpointed layers recompute; not with accumulation"
    )
    bind_cores: bool = option(
        True, "keep each process on its GPU's NUMA node, where the machine has several and no one else has bound it"
    )
    buffers: Literal["same", "rank0", "mean"] = option(
        "same",
        "what modules keep in buffers, but for BatchNorm's kin: the ranks must hold the same, or take rank 0's or the "
        "mean after each step",
    )
    sync_bn: bool = option(False, "turn BatchNorm into SyncBatchNorm (GPU only)")


@dataclass
class Wandb:
    enable: bool = option(False, "log to Weights & Biases too (`pip install wandb`)")
    project: str = option("lockstep", "the project's name")
    name: str = option("", "the run's name; empty = the run folder's")
    entity: str = option("", "the account or team that the run belongs to; empty = your own")
    mode: Literal["auto", "online", "offline"] = option(
        "auto", "offline writes to the run folder, `wandb sync` sends it later; auto: as WANDB_MODE says, or online"
    )


@dataclass
class Config:
    """What every task has. A task's `Settings` adds its own sections (`dataset`, `model`, ...)."""

    task: str = option("har", "a name in tasks/, or the path of a .py file with a class Task")
    seed: int = option(0, "of weights, order, augmentation and dropout", low=0, high=2**31 - 1)
    epochs: int = option(20, "passes over the training set; where steps are given, too, whichever ends first", low=0)
    steps: int = option(0, "optimizer steps; where epochs are given, too, whichever ends first", low=0)
    batch_size: int = option(32, "samples per process (per GPU) and forward pass", low=1)
    global_batch: int = option(0, "samples per optimizer step over all processes; 0 = what the others give", low=0)
    gradient_accumulation_steps: int = option(0, "forward passes per step; 0 = 1, or what global_batch needs", low=0)
    drop_last: bool = option(False, "drop the last, shorter global batch of an epoch instead of training on it")
    sampler: Literal["shuffle", "balanced"] = option("shuffle", "each sample once, or each class equally often")
    random_samples: Literal["stop", "warn"] = option(
        "stop", "a dataset that gives another sample each time: refuse it, or train all the same, no two runs alike"
    )
    num_workers: int = option(
        0, "loader processes per training process; 0 = none, right for data one gather away", low=0
    )
    cache: Literal["auto", "device", "host", "none"] = option(
        "auto",
        "hold the samples on the device, or in each process's memory; auto: on a GPU with room, if num_workers=0",
    )
    eval_batch_size: int = option(0, "samples per forward pass in evaluation; 0 = twice batch_size", low=0)
    save_dir: str = option("", "the run's folder; empty = a new checkpoints/<task>_<time>")
    resume: str = option("auto", "auto = go on where save_dir stands; never; or the path of a checkpoint")
    threads: int = option(
        0,
        "threads a process computes in, on a CPU; 0 = what OMP_NUM_THREADS says, or one for a small model",
        low=0,
    )
    amp: Literal["auto", "bf16", "fp16", "off"] = option(
        "auto", "mixed precision: auto takes what the device is fast at"
    )
    oom: Literal["stop", "shrink"] = option(
        "stop", "when memory runs out: say which batch would fit, or start all ranks again with it, the same steps"
    )
    compile: Literal["off", "auto", "default", "reduce-overhead", "max-autotune"] = option(
        "off",
        "compile the model with torch.compile: for long runs, as the first steps take half a minute; auto: on a GPU, "
        "in runs of 5000 steps and more",
    )
    memory_format: Literal["auto", "channels_last", "contiguous"] = option(
        "auto",
        "layout of 2-D and 3-D convolutions: auto is the faster one, on CPUs channels_last if the model has no "
        "GroupNorm, on GPUs channels_last with mixed precision",
    )
    allocator: Literal["keep", "system"] = option(
        "keep", "memory that is freed on the CPU: keep it for the next step, or give it back to the system"
    )
    deterministic: bool = option(False, "same seed, same hardware, same bits; may be slower")
    device: Literal["auto", "cuda", "cpu"] = option("auto", "auto = GPU if there is one")
    multi_gpu: Literal["none", "auto", "ddp", "dp"] = option(
        "none",
        "plain python on several GPUs: ddp starts torchrun, dp is DataParallel, auto is ddp if there are several",
    )
    gpu_ids: list[int] = option([], "the GPUs that --multi-gpu uses, such as 0,1,3; empty = all", low=0)
    log_every: int = option(10, "optimizer steps between log lines", low=1)
    eval_every: int = option(0, "optimizer steps between evaluations; 0 = once an epoch", low=0)
    save_every: int = option(0, "optimizer steps between checkpoints; 0 = once an epoch", low=0)
    patience: int = option(0, "evaluations without a better one before the run ends; 0 = never", low=0)
    max_time_s: float = option(0.0, "seconds after which the run stops with a checkpoint; 0 = never", low=0)
    max_skipped_steps: int = option(
        20, "steps in a row without a finite gradient before the run ends (exit code 4); 0 = never", low=0
    )
    check_every: int = option(
        500, "optimizer steps between checks that all ranks hold the same weights; 0 = never", low=0
    )
    keep_checkpoints: int = option(1, "older checkpoints to keep beside the last and the best", low=0)
    loader_timeout_s: float = option(180.0, "seconds a batch may take a loader process (num_workers > 0)", above=0)
    optim: Optim = section(Optim)
    schedule: Schedule = section(Schedule)
    ddp: DDP = section(DDP)
    wandb: Wandb = section(Wandb)


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
}
"""Everyday spellings, the guides' among them."""

SETS_NOTHING: dict[str, tuple[Any, str]] = {
    "torch.backends.cudnn.benchmark": (True, "cuDNN tries its kernels; deterministic=true ends that"),
    "torch.backends.cuda.matmul.allow_tf32": (True, "TF32 is on; amp=off ends that"),
    "torch.backends.cudnn.allow_tf32": (True, "TF32 is on; amp=off ends that"),
}
"""What the guides advise and is so already: {key: (the only value that it may have, None for any; why)}."""

EVERYDAY = (
    "epochs steps batch_size lr warmup_epochs weight_decay grad_accum_steps global_batch num_workers save_dir resume "
    "amp seed multi_gpu gpu_ids log_every eval_every save_every patience max_time_s deterministic"
).split()
"""What --help lists, in this order; --print-config shows the rest."""

SWITCHES = ("help", "print_config", "dry_run", "debug", "force", "profile")
FILES = ("config", "config_path")


class Args(NamedTuple):
    """What the command line says: the resolved config and the switches that are about this call, not about the run."""

    cfg: Any
    help: bool
    print_config: bool
    dry_run: bool
    debug: bool
    force: bool
    profile: bool
    notes: tuple[str, ...] = ()  # what was accepted, and sets nothing


class Setting(NamedTuple):
    key: str
    value: str | list[str] | None  # None: a flag without a value
    where: str


def parse(
    argv: list[str],
    load_task: Callable[[str], type[Task]],
    again: Mapping[str, Any] | None = None,
    others: Iterable[str] = (),
) -> Args:
    """argv -> resolved config. Raises one LockstepError with a line per problem, exit code 2.

    again   settings that this process was started again with: a delta over the command line
    others  tasks to look in for keys that this one doesn't have
    """
    problems: list[str] = []
    switches, files, given = _tokens(argv, problems)
    layers = [
        *(_read_yaml(path, problems) for path in files),
        given,
        [Setting(key, str(value), "started again with") for key, value in (again or {}).items()],
    ]
    named = (str(s.value) for layer in reversed(layers) for s in layer if s.key == "task" and s.value is not None)
    task_name = _at_home(next(named, Config.task))
    try:
        task = load_task(task_name)
    except LockstepError as error:
        raise LockstepError("\n".join([*problems, str(error)])) from error
    cfg = schema(task)()
    aliases = _aliases(task)
    for key, value in (task.defaults | _choose(cfg, layers)).items():
        _assign(cfg, key, value)
    unknown: dict[int, Setting] = {}
    for layer in layers:
        _apply(cfg, layer, aliases, problems, unknown)
    notes = _settle(unknown, problems, cfg, task)
    _name_another_task(unknown, problems, layers, load_task, others)
    problems = [line for line in problems if line]
    cfg.resume = {"true": "auto", "false": "never"}.get(cfg.resume.lower(), cfg.resume)  # LeRobot's is a switch
    problems += _contradictions(cfg)
    if problems and not switches & {"help"}:
        raise LockstepError("\n".join(problems))
    return Args(cfg, **{name: name in switches for name in SWITCHES}, notes=tuple(notes))


class _Frozen:
    """Mixed into a config once it is parsed: what was asked for stays apart from what is decided, see `Plan`."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"the config is not changed after parsing: see config.changed ({name})")


@functools.cache
def _frozen_kind(kind: Any) -> Any:
    return type(kind.__name__, (_Frozen, kind), {})


def frozen(cfg: Any) -> Any:
    """Make a tree of settings one that cannot be changed, and return it."""
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if dataclasses.is_dataclass(value):
            frozen(value)
    if not isinstance(cfg, _Frozen):
        kind: Any = type(cfg)
        cfg.__class__ = _frozen_kind(kind)
    return cfg


class Answered(Exception):
    """The command line asked a question, such as --help, and it was answered: there is nothing to run."""


def _aliases(task: Task | type[Task]) -> dict[str, str]:
    return ALIASES | task.compat_aliases | task.aliases


def _choose(cfg: Any, layers: list[list[Setting]]) -> dict[str, Any]:
    """Put the dataclasses in place that the layers name in `<section>.type`; returns their defaults of other keys."""
    defaults: dict[str, Any] = {}
    for f in dataclasses.fields(cfg):
        classes = f.metadata.get("classes", {})
        named = (s.value for layer in reversed(layers) for s in layer if s.key == f"{f.name}.type")
        if (name := next(named, None)) in classes:  # else it is refused later, like any wrong value
            setattr(cfg, f.name, classes[name](type=name))
        defaults |= getattr(getattr(cfg, f.name), "defaults", {}) if classes else {}
    return defaults


def schema(task: type[Task]) -> type:
    """The dataclass that holds the common config and the task's own sections."""
    return dataclass(type("Config", (task.Settings, Config), {"__doc__": Config.__doc__}))


def to_dict(cfg: Any) -> dict[str, Any]:
    """The resolved tree as plain values, in the order of the schema: what config.yaml and the checkpoints hold."""
    return dataclasses.asdict(cfg)


def changed(cfg: Any, settings: Mapping[str, Any]) -> Any:
    """Return a frozen copy of the tree in which these dotted keys have other values."""
    copied = copy.deepcopy(cfg)
    for key, value in settings.items():
        _assign(copied, key, value)
    return frozen(copied)


def defaults(cfg: Any) -> dict[str, Any]:
    """{key: its default} of all keys that `cfg` has, whatever a task or a choice within it starts from."""
    fields = {key: each for key, (_, each) in _fields(cfg).items()}
    missing = dataclasses.MISSING
    return {
        key: each.default if each.default_factory is missing else each.default_factory()
        for key, each in fields.items()
        if each.default is not missing or each.default_factory is not missing
    }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def task_in(path: str) -> str:
    """The task that a YAML names; nothing of it is run."""
    named = (str(setting.value) for setting in _read_yaml(path, []) if setting.key == "task")
    return _at_home(next(named, Config.task))


def to_yaml(cfg: Any) -> str:
    return yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True)


def usage(cfg: Any, prog: str, tasks: list[str], task: type[Task]) -> str:
    """The text of --help: every everyday flag with the default that it has for this task."""
    aliases = ALIASES | task.aliases  # the foreign ones are accepted, and not listed
    flat, fields = flatten(to_dict(cfg)), _fields(cfg)
    lines = [
        f"usage: {prog} [TASK] [--config FILE] [--flag VALUE ...] [key=value ...]",
        "",
        f"TASK is one of {', '.join(tasks)}, or the path of a .py file with a class Task (now: {cfg.task}).",
        "",
    ]
    for name in [*task.aliases, *EVERYDAY]:
        key = aliases.get(name, name)
        value = flat[key]
        shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        lines.append(f"  --{name.replace('_', '-'):<18} {fields[key][1].metadata['help']} [{shown or 'empty'}]")
        choices = typing.get_args(fields[key][0]) if typing.get_origin(fields[key][0]) is Literal else ()
        if choices:
            lines[-1] += f" one of {', '.join(choices)}"
    lines += [
        "",
        "  --config FILE        a YAML file: a delta over the defaults; flags and key=value are a delta over it",
        "  --print-config       print the resolved tree (every key there is) and stop",
        "  --dry-run            print the arithmetic of the run and stop",
        "  --debug              show the traceback of an error",
        "  --force              go on from a checkpoint although the config is another",
        "  --profile            say where the time of a step goes, and leave a trace of some steps in the run's folder",
        "",
        "Every key of --print-config can be given as key=value or --key value, such as ddp.bucket_cap_mb=50.",
    ]
    return "\n".join(lines)


# ---- from text to settings ------------------------------------------------------------------------------------------


def _items(argv: list[str]) -> Iterator[tuple[str | None, str | None, list[str]]]:
    """The command line piece by piece: (the name that is set, None for a word by itself; its value, None without one;
    the words that say so)."""
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag = word.startswith("--")
        name, equals, value = (word[2:] if flag else word).partition("=")
        name = name.replace("-", "_")
        if not flag and not equals:
            yield None, None, [word]
        elif not equals and name not in SWITCHES and _takes_a_value(name, rest):
            yield name, rest[0], [word, rest.pop(0)]
        else:
            yield name, value if equals else None, [word]


def _tokens(argv: list[str], problems: list[str]) -> tuple[set[str], list[str], list[Setting]]:
    """The command line as (switches, config files, settings)."""
    switches: set[str] = set()
    files: list[str] = []
    settings: list[Setting] = []
    for name, value, (word, *_) in _items(argv):
        flag = word.startswith("--")
        if word == "-h":
            switches.add("help")
        elif name is None and any(setting.key == "task" for setting in settings):
            problems.append(f"unexpected {_shown(word)!r} (command line): give settings as --flag value or key=value")
        elif name is None:
            settings.append(Setting("task", word, "command line"))
        elif flag and name in SWITCHES:
            switches.add(name)
            if value is not None:
                problems.append(f"--{_shown(word[2:])} (command line): give --{name.replace('_', '-')} alone, or not")
        elif flag and name in FILES:
            files.append(value) if value is not None else problems.append(
                "--config needs a file: --config configs/har.yaml"
            )
        elif not flag or name != "local_rank":  # torch.distributed.launch passes it; LOCAL_RANK says the same
            settings.append(Setting(name, value, "command line"))
    return switches, files, settings


def to_go_on(argv: list[str], task: Task | type[Task], folder: str) -> list[str]:
    """The words of a command line `argv` that goes on with its run in `folder`, from the run's own last checkpoint,
    wherever it once started."""
    aliases = _aliases(task)
    words: list[str] = []
    found: set[str] = set()
    for name, value, said in _items(argv):
        key = aliases.get(name or "", name)
        if key in ("resume", "local_rank") or (key == "save_dir" and not value):
            continue
        words += said
        found.add(str(key))
        if said[0].startswith("--") and key in FILES and value:
            with contextlib.suppress(LockstepError):  # it was read once
                found |= {f"{setting.key} in a file" for setting in _read_yaml(value, [])}
    if "save_dir" not in found:
        words.append(f"--save-dir={folder}")  # as a flag: the launcher takes another script where it sees key=value
    return [*words, "--resume=auto"] if "resume in a file" in found else words


def _takes_a_value(name: str, rest: list[str]) -> bool:
    """Whether the word after --name is its value; a yes/no flag takes one only if it is a yes or a no."""
    if not rest or rest[0].startswith("--"):
        return False
    key = ALIASES.get(name, name)
    is_flag = name == "use_amp" or _fields(Config()).get(key, (None,))[0] is bool
    return rest[0].lower() in _BOOLS if is_flag else True


_MAX_BYTES = 200_000  # the longest config anybody wrote has a hundredth of it; PyYAML takes seconds for a megabyte
_MAX_VALUES = 2_000  # aliases in YAML can multiply without end
_MAX_DEPTH = 8
_PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp")}


def _read_yaml(path: str, problems: list[str]) -> list[Setting]:
    """The leaves of a YAML file, as text, each with its file and line."""
    try:
        with open(_at_home(path), "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise LockstepError(f"no config file {path!r}", todo="give the path of an existing .yaml file") from None
    except (OSError, ValueError) as error:
        what = f"cannot read the config file: {error}"
        raise LockstepError(
            what, where=_shown(path), todo="give a text file in UTF-8 with one setting a line"
        ) from None
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise _as_python(path, text) or _no_yaml(error, path, text) from None
    if root is None or root.value == "":  # comments only, or a lone `---`: an empty delta
        return []
    if not isinstance(root, yaml.MappingNode):
        none = LockstepError("the config file holds no keys", where=path, todo="write lines such as `batch_size: 32`")
        raise _as_python(path, text) or none
    settings: list[Setting] = []
    for count, setting in enumerate(_leaves(root, path, "", 0)):
        if count == _MAX_VALUES:
            what = f"more than {_MAX_VALUES} values"
            raise LockstepError(what, where=path, todo="give fewer, and no alias within an alias")
        if isinstance(setting, Setting):
            settings.append(setting)
        elif setting:
            problems.append(setting)
    return settings


def _as_python(path: str, text: str) -> LockstepError | None:
    """What to say of a line such as `a.b = c` in what is no YAML."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*([A-Za-z_][\w.]*)\s*=\s*([^\s#]+)", line):
            key, value = found.groups()
            todo = f"drop it: {SETS_NOTHING[key][1]}" if key in SETS_NOTHING else f"write `{key}: {value}`"
            return LockstepError(f"`{_shown(found[0].strip())}` is not YAML", where=f"{path}:{number}", todo=todo)
    return None


def _no_yaml(error: Exception, path: str, text: str) -> LockstepError:
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.reader.ReaderError):  # a character that YAML does not allow has a position, but no mark
        before = text[: error.position]
        place = f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        return LockstepError(f"not valid YAML: the character #x{error.character:04x}", where=place, todo="remove it")
    place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
    what = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return LockstepError(f"not valid YAML: {_shown(what)}", where=place, todo="mend that line")


def _leaves(node: yaml.MappingNode, path: str, prefix: str, depth: int) -> Iterator[Setting | str]:
    """The settings below `node`, problems as text, and "" for each section and list item: whoever reads them counts."""
    sections: set[str] = set()
    for key_node, value in node.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        key = prefix + _text(key_node).replace("-", "_")
        items = value.value if isinstance(value, yaml.SequenceNode) else []
        nested = [item for item in (key_node, *items) if not isinstance(item, yaml.ScalarNode)]
        if not {part.tag for part in (node, key_node, value, *items)} <= _PLAIN or nested or depth > _MAX_DEPTH:
            yield f"{_shown(key)!r} has a value that is not plain data ({where}): write a number, a text or a list"
        elif isinstance(value, yaml.MappingNode):
            if key in sections:
                yield f"{_shown(key)!r} is given twice ({where}): write each section once"
            sections.add(key)
            yield ""
            yield from _leaves(value, path, key + ".", depth + 1)
        elif isinstance(value, yaml.SequenceNode):
            yield from ("" for _ in items)
            yield Setting(key, [_text(item) for item in items], where)
        else:
            yield Setting(key, _text(value), where)


def _text(node: yaml.Node) -> str:
    """A scalar as it is written; anything else has no text (and its repr may be of any length)."""
    return node.value if isinstance(node, yaml.ScalarNode) else "?"


def _shown(text: str) -> str:
    """As it can stand in a message of one line."""
    plain = text if text.isprintable() else text.encode("unicode_escape").decode()
    return plain if len(plain) <= 80 else plain[:77] + "..."


# ---- from settings to the tree --------------------------------------------------------------------------------------


def _fields(cfg: Any, prefix: str = "") -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """Dotted key -> (type, field) of every leaf of the schema."""
    hints = typing.get_type_hints(type(cfg))
    found: dict[str, tuple[Any, dataclasses.Field[Any]]] = {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if dataclasses.is_dataclass(value):
            found |= _fields(value, f"{prefix}{f.name}.")
        else:
            found[prefix + f.name] = (hints[f.name], f)
    return found


def _assign(cfg: Any, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for part in sections:
        cfg = getattr(cfg, part)
    assert hasattr(cfg, name), f"a task's defaults name {key!r}, which the config does not have"
    object.__setattr__(cfg, name, value)  # past `frozen`: of a copy


def _apply(
    cfg: Any, layer: list[Setting], aliases: dict[str, str], problems: list[str], unknown: dict[int, Setting]
) -> None:
    """Set what one layer (a file, the command line) says; `unknown` gets {its place among the problems: setting}."""
    fields = _fields(cfg)
    said: dict[str, Setting] = {}
    for setting in layer:
        key = aliases.get(setting.key, setting.key)
        if key not in fields:
            unknown[len(problems)] = setting
            problems.append("")
            continue
        if key in said:
            problems.append(f"{key!r} is given twice ({said[key].where} and {setting.where}): keep one")
            continue
        said[key] = setting
        kind, f = fields[key]
        try:
            value = _coerce(setting.value, kind)
            _check_range(value, f.metadata)
        except ValueError as error:
            problems.append(f"{_given(setting)}: {error}")
        else:
            _assign(cfg, key, value)
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in said and other not in said and getattr(cfg, one):
            _assign(cfg, other, 0)  # the one that is asked for, not the default of the other


def _given(setting: Setting) -> str:
    value = ",".join(setting.value) if isinstance(setting.value, list) else setting.value or ""
    return f"{setting.key}={_shown(value)} ({setting.where})"


def _settle(unknown: dict[int, Setting], problems: list[str], cfg: Any, task: type[Task]) -> list[str]:
    """Take out of `unknown` what sets nothing, and put the problems with it and with the rest into their places;
    returns notes on what is accepted."""
    fields, aliases, nothing = _fields(cfg), _aliases(task), SETS_NOTHING | task.sets_nothing(cfg)
    notes = []
    for place, setting in list(unknown.items()):
        key = next((key for key in nothing if f"{setting.key}.".startswith(f"{key}.")), "")
        if not key:
            problems[place] = _unknown(setting, fields, aliases)
            continue
        only, why = nothing[key]
        if only is None or (setting.key == key and _is(setting.value, only)):
            notes.append(f"{_given(setting)} sets nothing here: {why}")
        else:
            shown = str(only).lower() if isinstance(only, bool) else only
            problems[place] = f"{_given(setting)}: {f'only {shown}' if shown != '' else 'drop it'}: {why}"
        del unknown[place]
    return notes


def _is(raw: str | list[str] | None, value: Any) -> bool:
    with contextlib.suppress(ValueError):
        return bool(_coerce(raw, type(value)) == value)
    return False


def _name_another_task(
    unknown: dict[int, Setting],
    problems: list[str],
    layers: list[list[Setting]],
    load_task: Callable[[str], type[Task]],
    others: Iterable[str],
) -> None:
    """Keys of another task become one problem, which names it: the task that knows most of them."""
    theirs: dict[str, list[int]] = {}
    for name in others if unknown else ():
        with contextlib.suppress(LockstepError):
            task = load_task(name)
            cfg = schema(task)()
            _choose(cfg, layers)
            known = {*_fields(cfg), *_aliases(task), *task.sets_nothing(cfg)}
            theirs[name] = [place for place, setting in unknown.items() if setting.key in known]
    name = max(theirs, key=lambda name: len(theirs[name]), default="")
    places = theirs.get(name, [])
    if places:
        keys = ", ".join(repr(unknown[place].key) for place in places)
        which = f"a key of task {name}" if len(places) == 1 else f"keys of task {name}"
        todo = f"begin with its name, as in `python train.py {name} ...`"
        problems[places[0]] = f"{keys} ({unknown[places[0]].where}): {which}: {todo}"
        for place in places[1:]:
            problems[place] = ""


def _unknown(setting: Setting, fields: dict[str, Any], aliases: dict[str, str]) -> str:
    sections = {key.rpartition(".")[0] for key in fields} - {""}
    if setting.key in sections:
        example = next(key for key in fields if key.startswith(setting.key + "."))
        return f"{setting.key!r} is a section ({setting.where}): set a key in it, such as {example}"
    known = [*fields, *aliases]
    leaves = {key.rpartition(".")[2]: key for key in fields}
    near = difflib.get_close_matches(setting.key, known, n=2, cutoff=0.6)
    near += [
        leaves[leaf] for leaf in difflib.get_close_matches(setting.key.rpartition(".")[2], leaves, n=2, cutoff=0.75)
    ]
    hint = f"did you mean {' or '.join(repr(key) for key in dict.fromkeys(near))}?" if near else "see --print-config"
    return f"unknown key {_shown(setting.key)!r} ({setting.where}): {hint}"


_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _coerce(raw: str | list[str] | None, kind: Any) -> Any:
    """Text to the declared type; ValueError in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        items = raw if isinstance(raw, list) else [part for part in (raw or "").strip("[] ").split(",") if part.strip()]
        return [_coerce(item, args[0]) for item in items]
    if origin in (typing.Union, types.UnionType):
        raise AssertionError("config fields have one type each")
    if isinstance(raw, list):
        raise ValueError("give one value, not a list")
    if raw is None:
        if kind is bool or (origin is Literal and "auto" in args):
            raw = "true"
        else:
            raise ValueError("a value is missing")
    text = raw.strip()
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        raise ValueError("give text without control characters")  # no file has such a name, and no terminal shows it
    if kind is str:
        return "" if text in ("null", "~") else _at_home(text)
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ValueError("give true or false")
        return _BOOLS[text.lower()]
    if origin is Literal:
        if text not in args and text.lower() in _BOOLS and {"auto", "off"} <= set(args):
            text = "auto" if _BOOLS[text.lower()] else "off"  # --use_amp, `amp: no`
        if text not in args:
            near = difflib.get_close_matches(text, args, n=1)
            raise ValueError(
                (f"did you mean {near[0]}? " if near else "") + f"choose one of {', '.join(map(str, args))}"
            )
        return text
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"give {'a whole number' if kind is int else 'a number'}") from None
    if not math.isfinite(number):
        raise ValueError("give a finite number")
    if kind is int:
        if number != int(number):
            raise ValueError("give a whole number")
        if abs(number) > 2**53:
            raise ValueError("must be at most 2^53")  # beyond it the float before is not exact, and nothing needs more
        return int(number)
    return number


def _at_home(text: str) -> str:
    """~/x as a shell means it: of key=~/x or --key=~/x no shell expands it, and nobody does in a YAML."""
    return os.path.expanduser(text) if text.startswith("~/") else text


def _check_range(value: Any, limits: typing.Mapping[str, Any]) -> None:
    low, high, above = limits.get("low"), limits.get("high"), limits.get("above")
    for item in value if isinstance(value, list) else [value]:
        if (
            (low is not None and item < low)
            or (high is not None and item > high)
            or (above is not None and item <= above)
        ):
            bounds = [
                f"{word} {bound:g}"
                for word, bound in (("at least", low), ("above", above), ("at most", high))
                if bound is not None
            ]
            raise ValueError("must be " + " and ".join(bounds))


def _contradictions(cfg: Config) -> list[str]:
    """What no single field can know."""
    problems = []
    if not cfg.epochs and not cfg.steps:
        problems.append("epochs=0 and steps=0 (config): the run would never end; give one of them")
    if cfg.schedule.lr_scaling != "none" and not cfg.schedule.base_batch_size:
        problems.append(
            f"schedule.lr_scaling={cfg.schedule.lr_scaling} without schedule.base_batch_size (config): "
            "say at which global batch optim.lr was tuned"
        )
    if cfg.gpu_ids and len(set(cfg.gpu_ids)) < len(cfg.gpu_ids):
        problems.append(f"gpu_ids={cfg.gpu_ids} (config): name each GPU once")
    return problems
