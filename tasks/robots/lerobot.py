"""Provide the policies of the installed `lerobot` package as values of `policy.type`.

The module has their settings, data, defaults and exactness guarantees. No module of the package is
imported before a config uses such a type.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor

from engine import contract
from engine.config import option, section
from engine.contract import LockstepError
from models.lerobot_policy import Adapted, Statistics

KNOWN = (
    "diffusion eo1 evo1 fastwam groot lingbot_va molmoact2 multi_task_dit pi0 pi05 pi0_fast "
    "smolvla tdmpc vla_jepa "
    "vqbet wall_x xvla gaussian_actor"
).split()
"""Policies of lerobot 0.6.1, for messages without an installed package."""

REFUSED = {
    "gaussian_actor": (
        "it learns from rewards, by an actor and a critic that run beside the training"
    ),
    "tdmpc": (
        "it learns from rewards, and changes a second network after each step by a rule of its own"
    ),
}

OURS = frozenset(
    (
        "input_features output_features device use_amp use_peft push_to_hub repo_id private tags "
        "license"
    ).split()
)
OURS |= {"pretrained_path", "pretrained_revision", "normalization_mapping", "type"}
"""Fields of LeRobot's configs that are not settings of a policy here. Such a field is a key of the
run, or follows from the data."""


BACKBONE = "pretrained_backbone_weights"


class LeRobotSettings:
    """Base class of the generated sections.

    lerobot_fields  {name: annotation in LeRobot's class}
    """

    lerobot_fields: ClassVar[dict[str, Any]]


def is_lerobots(policy: Any) -> bool:
    """Return whether a config's section `policy` belongs to a LeRobot policy."""
    return isinstance(policy, LeRobotSettings)


# ---- types ---------------------------------------------------------------------------------------


class Kinds(dict[str, type]):
    """{policy.type: its section}: the native policies, and each policy of the installed lerobot.

    A section of a lerobot policy is generated at its first use.

    ours   names of the native policies
    base   the settings of every policy, to inherit
    modes  the section of normalisation, to inherit
    """

    def __init__(self, ours: dict[str, type], base: type, modes: type):
        super().__init__(ours)
        self.base, self.modes, self.ours = base, modes, ", ".join(ours)

    def __contains__(self, name: object) -> bool:
        """Return True, or raise LockstepError for an unknown policy."""
        if super().__contains__(name):
            return True
        name, ours = str(name), self.ours
        if find_spec("lerobot") is None:
            if name in KNOWN:
                what = f"{name} is LeRobot's own class, and the lerobot package is not installed"
                todo = f"pip install 'lerobot[{name}]', or choose one of {ours}, which are native"
                raise LockstepError(what, f"policy.type={name}", todo)
            others = "with the lerobot package (pip install lerobot) any of its policies, too"
        else:
            if name in (known := _choices()):
                return True
            others = (
                f"or of lerobot {_version()}: "
                f"{', '.join(sorted({*known} - {*ours.split(', ')} - {*REFUSED}))}"
            )
        near = difflib.get_close_matches(name, [*ours.split(", "), *KNOWN], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise LockstepError(
            f"there is no policy {name!r}", "policy.type", f"{hint}choose one of {ours}, {others}"
        )

    def __missing__(self, name: str) -> type:
        if why := REFUSED.get(name):
            raise LockstepError(
                f"{name} cannot be trained here: {why}",
                "policy.type",
                f"choose one of {', '.join(self)}",
            )
        self[name] = _section_of(name, self.base, self.modes)
        return self[name]


def _choices() -> dict[str, Any]:
    with _theirs("cannot be imported", todo="see that `python -c 'import lerobot.policies'` works"):
        import lerobot.policies  # noqa: F401 (each policy registers its config there)
        from lerobot.configs.policies import PreTrainedConfig

        return dict(PreTrainedConfig.get_known_choices())


def _version() -> str:
    try:
        return version("lerobot")
    except PackageNotFoundError:
        return "of an unknown version"


@contextmanager
def _theirs(what: str, where: str = "policy.type", todo: str = "") -> Iterator[None]:
    """Convert an error of LeRobot's code to one line. Downloads are disabled."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads the variable at its import
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        why = f"{type(error).__name__}: {lines[0]}"[:300]
        if isinstance(error, ImportError):
            todo = todo or (
                "install what it names, such as pip install 'lerobot[NAME]' with the policy's name"
            )
        elif isinstance(error, OSError):
            todo = (
                "nothing is downloaded: `hf download` it before, or give the key that names "
                "it a local folder"
            )
        raise LockstepError(
            f"LeRobot {what}: {why}", where, todo or "change the setting that it names"
        ) from error


def _section_of(name: str, base: type, modes: type) -> type:
    """Generate the dataclass of settings from LeRobot's own dataclass."""
    with _theirs(f"has no settings of {name}", f"policy.type={name}"):
        cls = _choices()[name]
        hints = {
            f.name: _hint(cls, f) for f in dataclasses.fields(cls) if f.init and f.name not in OURS
        }
        plain = {f.name: _default(f) for f in dataclasses.fields(cls)}
        mapping = {
            _name(kind): _name(mode)
            for kind, mode in (plain.get("normalization_mapping") or {}).items()
        }
    about = f"of LeRobot's {cls.__name__}"
    made: list[tuple[str, Any, Any]] = [("type", str, option(name, about))]
    for field, hint in hints.items():
        # LeRobot's default would start a download.
        kind, default = _kind(hint, None if field == BACKBONE else plain[field])
        made.append((field, kind, option(default, about)))
    made.append(
        (
            "exact",
            bool,
            option(False, "compute the loss one sample at a time: exact on any cut, and slow"),
        )
    )
    own = [
        (f.name, f.type, option(mapping.get(f.name, "IDENTITY"), f.metadata["help"]))
        for f in dataclasses.fields(modes)
    ]
    hinted = typing.get_type_hints(modes)
    own = [(field, hinted[field], default) for field, _, default in own]
    made.append(
        (
            "normalization_mapping",
            modes,
            section(dataclasses.make_dataclass("Modes", own, bases=(modes,))),
        )
    )
    defaults = {
        "batch_size": 8,
        "epochs": 0,
        "steps": 100_000,
        "ddp.find_unused_parameters": rule_of(name).unused,
    }
    space = {"defaults": defaults, "lerobot_fields": hints}
    return dataclasses.make_dataclass(
        f"{name}Settings", made, bases=(LeRobotSettings, base), namespace=space
    )


def _name(kind: Any) -> str:
    return str(getattr(kind, "value", kind))


def _hint(cls: type, field: dataclasses.Field[Any]) -> Any:
    try:
        return typing.get_type_hints(cls)[field.name]
    except Exception:  # a type imported under TYPE_CHECKING only
        return field.type


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


PLAIN = (bool, int, float, str)


def _kind(hint: Any, default: Any) -> tuple[Any, Any]:
    """Return the type and the default of a generated field for a field of LeRobot.

    The type is a plain type, a Literal, or a list of plain types. Any other type becomes text,
    parsed as YAML; `null` or empty means None.
    """
    inner = [each for each in typing.get_args(hint) if each is not type(None)]
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType) and len(inner) < len(
        typing.get_args(hint)
    )
    if hint in PLAIN and isinstance(default, (int, float, str)):
        return hint, hint(default)
    if typing.get_origin(hint) is Literal and all(isinstance(each, str) for each in inner):
        return hint, default
    core = inner[0] if optional and len(inner) == 1 else hint
    if core is tuple or typing.get_origin(core) in (tuple, list):
        of = {each for each in typing.get_args(core) if each is not Ellipsis} or {
            type(each) for each in default or ()
        }
        if len(of) == 1 and (each := of.pop()) in PLAIN:
            return list[each], [each(value) for value in default or ()]  # type: ignore[valid-type]
    return str, _as_text(default)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, PLAIN):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, (list, tuple)) and all(isinstance(each, PLAIN) for each in value):
        return f"[{', '.join(map(_as_text, value))}]"
    import draccus

    return json.dumps(draccus.encode(value))


def _values(policy: Any) -> dict[str, Any]:
    """Return the settings as arguments of LeRobot's config.

    Raises LockstepError for a text that is not a valid value.
    """
    found: dict[str, Any] = {}
    for name, hint in policy.lerobot_fields.items():
        value = getattr(policy, name)
        nothing = value in ("", []) and type(None) in typing.get_args(hint)
        if hint not in PLAIN and typing.get_origin(hint) is not Literal:
            with _theirs(f"cannot take {value!r}", f"policy.{name}", f"give {_shown(hint)}"):
                import draccus

                raw = yaml.safe_load(value) if isinstance(value, str) else value
                value = (
                    None if nothing else tuple(raw) if hint is tuple else draccus.decode(hint, raw)
                )
        found[name] = value
    return found


def _shown(hint: Any) -> str:
    return (
        hint.__name__
        if isinstance(hint, type) and not typing.get_args(hint)
        else str(hint).replace("typing.", "")
    )


# ---- LeRobot's config and derived values ---------------------------------------------------------


def config_of(policy: Any, features: dict[str, tuple[str, tuple[int, ...]]] | None = None) -> Any:
    """Return LeRobot's config of these settings.

    features  {name: ("STATE" | "ENV" | "VISUAL" | "ACTION", shape)} of the data
    Raises LockstepError with LeRobot's message if the config rejects the values.
    """
    values = _values(policy)
    with _theirs(f"refuses the settings of {policy.type}", "policy"):
        from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
        from lerobot.policies.factory import make_policy_config

        config = make_policy_config(policy.type, device="cpu", push_to_hub=False, **values)
        if hasattr(config, "normalization_mapping"):
            modes = {
                f.name: getattr(policy.normalization_mapping, f.name)
                for f in dataclasses.fields(policy.normalization_mapping)
            }
            there = config.normalization_mapping.keys()
            config.normalization_mapping = {
                kind: NormalizationMode(mode)
                for kind, mode in modes.items()
                if kind in there or mode != "IDENTITY"
            }
        if features is not None:
            made = {
                name: PolicyFeature(FeatureType(kind), tuple(shape))
                for name, (kind, shape) in features.items()
            }
            config.input_features = {
                name: one for name, one in made.items() if one.type is not FeatureType.ACTION
            }
            config.output_features = {
                name: one for name, one in made.items() if one.type is FeatureType.ACTION
            }
    return config


class Windows(NamedTuple):
    """The frames that a policy uses.

    deltas  {feature: frames relative to the sample's frame}, as for `formats.robots.lerobot.Chunks`
    skipped  frames at the end of each episode without training samples
    first   index of the present in the window of actions
    """

    deltas: dict[str, list[int]]
    skipped: int = 0
    first: int = 0

    @property
    def history(self) -> list[int]:
        """Return the frames of the observations relative to the present.

        The list is [0] if the policy uses only the present.
        """
        return next((steps for name, steps in self.deltas.items() if name != "action"), [0])


def windows(policy: Any, observations: list[str]) -> Windows:
    """Return the time windows of LeRobot's policy."""
    config = config_of(policy)
    with _theirs(f"has no windows of {policy.type}", "policy"):
        action, seen = list(config.action_delta_indices or [0]), config.observation_delta_indices
    # A single frame needs no axis of time: a robot calls these policies without the axis.
    deltas = {"action": action} | {
        name: list(seen) for name in (observations if seen and list(seen) != [0] else [])
    }
    if (future := max([0, *(seen or [])])) > 0:
        what = (
            f"{policy.type} is trained on pictures up to {future} frames ahead, which no trial has"
        )
        raise LockstepError(what, "policy.type", "choose another; see docs/robots.md")
    return Windows(
        deltas,
        int(getattr(config, "drop_n_last_frames", 0) or 0),
        action.index(0) if 0 in action else 0,
    )


def steps_of(policy: Any) -> int:
    """Return the number of executed actions per chunk."""
    return int(getattr(policy, "n_action_steps", 0) or getattr(policy, "action_chunk_size", 0) or 1)


# ---- exactness guarantees ------------------------------------------------------------------------


class Rule(NamedTuple):
    """Properties of a policy's forward pass.

    counts  denominator of the mean loss: "samples" (all entries of all samples), "steps" (unpadded
            steps), or the name of a mask from the preprocessor
    why     reason for an inexact result; empty if the policy is exact
    spread  see `models.lerobot_policy.Drawn`
    unused  whether some weights have no gradients
    buffers  value of `ddp.buffers`, for a policy that learns buffers
    """

    counts: str = "samples"
    why: str = ""
    spread: bool = False
    unused: bool = True
    buffers: str = "same"


RULES = {
    "diffusion": Rule(unused=False),
    "eo1": Rule(),
    "evo1": Rule("action_mask"),
    "groot": Rule("action_mask"),
    "molmoact2": Rule(),
    "multi_task_dit": Rule(),
    "pi0": Rule(),
    "pi05": Rule(),
    "pi0_fast": Rule("action.token_mask"),
    "smolvla": Rule("steps", unused=False),
    "vqbet": Rule(why="its codes are learned from the samples of process 0 alone", buffers="rank0"),
    "xvla": Rule(spread=True),
}


def rule_of(kind: str) -> Rule:
    return RULES.get(
        kind,
        Rule(why="its class is not known here, and its loss taken for a mean over equal samples"),
    )


def counts_of(policy: Any, config: Any) -> str:
    """Return the denominator of a policy's mean loss, see `Rule.counts`."""
    if (
        getattr(config, "do_mask_loss_for_padding", False)
        or getattr(config, "supervise_padding_actions", True) is False
    ):
        return "steps"
    return rule_of(policy.type).counts


def weigh_by(counts: str) -> Callable[[dict[str, Any]], Tensor]:
    """Return the function that computes each sample's denominator from a processed batch."""

    def weigh(batch: dict[str, Any]) -> Tensor:
        if counts == "steps":
            return (~batch["action_is_pad"]).sum(1).double()
        if counts == "samples":
            return torch.ones(
                len(batch["action"]), dtype=torch.float64, device=batch["action"].device
            )
        mask = batch[counts]
        return (mask[:, 1:] if counts == "action.token_mask" else mask).double().flatten(1).sum(1)

    return weigh


def notes(cfg: Any) -> list[str]:
    """Return lines for the start of a run: guarantees, and differences from LeRobot."""
    policy = cfg.policy
    lines = [promise(policy), *(f"{policy.type}: {note}" for note in presets(cfg)[1])]
    backbone = getattr(policy, BACKBONE, None)
    if backbone == "" and not policy.pretrained_path:
        name = getattr(policy, "vision_backbone", "backbone")
        lines.append(f"Its {name} starts at random; LeRobot's starts from ImageNet's weights")
    return lines


def promise(policy: Any) -> str:
    """Return a line on the results that are equal on any partition of a batch."""
    config = config_of(policy)
    rule, counts = rule_of(policy.type), counts_of(policy, config)
    with _theirs(f"has no class of {policy.type}", f"policy.type={policy.type}"):
        from lerobot.policies.factory import get_policy_class

        of_each = "reduction" in inspect.signature(get_policy_class(policy.type).forward).parameters
    if policy.exact:
        return (
            f"LeRobot's {policy.type}, one sample at a time: the same step on any cut of the "
            "batch, dropout included"
        )
    over = {"samples": "entries", "steps": "unpadded steps"}.get(counts, f"entries of its {counts}")
    loss = "its losses of each sample" if of_each else "its mean"
    line = (
        f"LeRobot's {policy.type}: {loss} times the number of {over}, noise and times from "
        "each sample's own seed"
    )
    if rule.why:
        return f"{line}; the same step on any cut is not promised: {rule.why}; see policy.exact"
    more = (
        "; its times are drawn for each sample, where LeRobot spreads them over a pass"
        if rule.spread
        else ""
    )
    return f"{line}: the same step on any cut of the batch{more}"


# ---- defaults of the run -------------------------------------------------------------------------


def presets(cfg: Any) -> tuple[dict[str, Any], list[str]]:
    """Return LeRobot's optimizer and schedule for the policy.

    The result is ({key: value} of LeRobot's preset, notes on differences from the preset).
    """
    config = config_of(cfg.policy)
    with _theirs(f"has no optimizer of {cfg.policy.type}", "policy"):
        optimizer, schedule = config.get_optimizer_preset(), config.get_scheduler_preset()
    found, notes = _optimizer(optimizer, config)
    if not cfg.virtual_workers:  # virtual workers average buffers already
        found["ddp.buffers"] = rule_of(cfg.policy.type).buffers
    if schedule is None:
        return found | {"schedule.kind": "constant"}, notes
    warmup, steps = int(getattr(schedule, "num_warmup_steps", 0) or 0), cfg.steps
    kind, name = getattr(schedule, "name", ""), type(schedule).__name__
    found |= {"schedule.kind": "cosine", "schedule.warmup_steps": warmup}
    if "Constant" in name or kind.startswith("constant"):
        found["schedule.kind"] = "constant"
    elif kind == "linear":
        found["schedule.kind"] = "linear"
    elif (span := int(getattr(schedule, "num_decay_steps", 0) or 0)) > 0:
        found["schedule.final_share"] = float(schedule.decay_lr) / float(schedule.peak_lr)
        short = bool(steps) and steps < span  # LeRobot then shortens both
        found["schedule.horizon"] = 0 if short else span
        found["schedule.warmup_steps"] = warmup * steps // span if short else warmup
    elif kind not in ("", "cosine") or "VQBeT" in name:
        notes.append(
            f"LeRobot's schedule is {kind or name}; here schedule.kind={found['schedule.kind']}"
        )
    return found, notes


def _optimizer(preset: Any, config: Any) -> tuple[dict[str, Any], list[str]]:
    notes = list[str]()
    name = {"SGDConfig": "sgd"}.get(type(preset).__name__, "adamw")
    found: dict[str, Any] = {
        "optim.name": name,
        "optim.lr": float(preset.lr),
        "optim.weight_decay": float(preset.weight_decay),
        "optim.grad_clip": float(preset.grad_clip_norm),
    }
    if name == "sgd":
        return found | {"optim.momentum": float(preset.momentum)}, notes
    betas = tuple(getattr(preset, "betas", (0.9, 0.999)))
    found |= {"optim.beta1": float(betas[0]), "optim.beta2": float(betas[1])}
    found |= {"optim.eps": float(getattr(preset, "eps", 1e-8))}
    if type(preset).__name__ == "AdamConfig" and preset.weight_decay:
        notes.append(
            "LeRobot's Adam adds the weight decay to the gradient; here AdamW keeps it apart"
        )
    if type(preset).__name__ == "XVLAAdamWConfig":
        found["optim.lr_scale"] = ["net.policy.model.vlm.*:0.1"]
    elif (factor := getattr(config, "vision_encoder_lr_multiplier", 1.0)) != 1.0:
        found["optim.lr_scale"] = [f"net.policy.observation_encoder.vision_encoder.*:{factor:g}"]
    elif type(preset).__name__ not in ("AdamConfig", "AdamWConfig"):
        notes.append(
            f"LeRobot's optimizer is {type(preset).__name__}; here optim.name={name} with one "
            "learning rate"
        )
    return found, notes


def texts(cls: Any, there: Mapping[str, Any]) -> dict[str, str]:
    """Return {policy.KEY: text} from LeRobot's config.json, for the keys of the section `cls`."""
    # The folder also has the backbone's weights.
    names = (cls.lerobot_fields.keys() & there.keys()) - {BACKBONE}
    return {f"policy.{name}": _as_text(there[name]) or "null" for name in sorted(names)}


# ---- the model -----------------------------------------------------------------------------------


def build(
    policy: Any,
    features: dict[str, tuple[str, tuple[int, ...]]],
    stats: dict[str, dict[str, Any]],
    folder: Path | None,
) -> Adapted:
    """Return LeRobot's policy of these settings.

    features  see `config_of`
    stats     {feature: {statistic: array}} of the training data
    folder    initial `pretrained_model`, or None
    """
    kind, config = policy.type, config_of(policy, features)
    with _theirs(f"cannot build {kind}", f"policy.type={kind}"):
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors

        cls = get_policy_class(kind)
        _check_backbone(getattr(config, BACKBONE, None))
        tensors = {
            name: {what: torch.as_tensor(v).float() for what, v in of.items()}
            for name, of in stats.items()
        }
        if folder is None:
            theirs: Any = cls(config=config, dataset_stats=tensors)
        else:
            theirs = cls.from_pretrained(
                str(folder), config=config, strict=policy.pretrained_strict
            )
    modes = {
        name: getattr(policy.normalization_mapping, kind) for name, (kind, _) in features.items()
    }
    cameras = [name for name, (kind, _) in features.items() if kind == "VISUAL"]

    def pipelines(stats: dict[str, dict[str, Tensor]]) -> tuple[Any, Any]:
        with _theirs(f"cannot prepare batches of {kind}", f"policy.type={kind}"):
            pair: tuple[Any, Any] = make_pre_post_processors(theirs.config, dataset_stats=stats)
            return pair

    return Adapted(
        theirs,
        Statistics(tensors, modes),
        cameras,
        pipelines,
        weigh_by(counts_of(policy, config)),
        contract.uniform,
        spread=rule_of(kind).spread,
        exact=policy.exact,
    )


def _check_backbone(name: str | None) -> None:
    """Raise LockstepError if torchvision would download the named weights."""
    if name is None:
        return
    import torchvision

    file = Path(
        torch.hub.get_dir(), "checkpoints", Path(torchvision.models.get_weight(name).url).name
    )
    if not file.is_file():
        raise LockstepError(
            f"no weights {name}: there is no {file}",
            f"policy.{BACKBONE}",
            "copy the file there, or drop it",
        )


def save(
    model: Adapted, folder: Path, names: Mapping[str, str], resize: Sequence[int] = ()
) -> None:
    """Write config.json, model.safetensors and both pipelines into an empty folder.

    All files are written by LeRobot's own code.

    names   {name of a feature on the robot: name in the policy}, applied by the first step
    resize  (height, width) for pictures, applied by the second step; empty = unchanged camera size
    """
    with _theirs("cannot save the policy", str(folder)):
        policy, (before, after) = model.net.policy, model.pipelines()
        policy.config.device = "cpu"
        for step in getattr(before, "steps", ()):
            if hasattr(step, "rename_map"):
                step.rename_map = dict(names)
        if resize:
            from lerobot.processor import ImageCropResizeProcessorStep

            before.steps = [
                before.steps[0],
                ImageCropResizeProcessorStep(resize_size=(resize[0], resize[1])),
                *before.steps[1:],
            ]
        for part in (policy, before, after):
            part.save_pretrained(str(folder))


Asked = Callable[[dict[str, Any], list[str]], Any]
"""See `tasks.envs.trials.Policy`."""


def with_history(predict: Asked, history: list[int], steps: int) -> tuple[Asked, int]:
    """Return (a policy for `tasks.envs.trials.roll_out`, number of steps between its calls).

    history  observed frames relative to the present

    With more than the present in `history`, the policy is called at every step and stores the
    observations. Before every `steps` actions, `predict` gets observations (n, T, ...).
    """
    if history == [0]:
        return predict, steps
    seen: list[dict[str, Any]] = []
    chunk, taken = np.zeros((1, 0, 1)), 0

    def policy(observations: dict[str, Any], commands: list[str]) -> Any:
        nonlocal chunk, taken
        now = len(seen)
        seen.append(observations)
        if taken >= min(steps, chunk.shape[1]):
            looks = [seen[max(0, now + at)] for at in history]
            chunk = predict(
                {name: np.stack([look[name] for look in looks], 1) for name in observations},
                commands,
            )
            taken = 0
        if now + min(history) > 0:
            seen[now + min(history) - 1] = {}  # no longer needed
        taken += 1
        return chunk[:, taken - 1 : taken]

    return policy, 1
