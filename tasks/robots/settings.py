"""Settings of the robot task, under LeRobot's names where possible, and their joint checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from engine import contract
from engine.config import choice, option, section
from engine.contract import LockstepError, amount
from formats.arrays import is_file_name
from formats.robots import lerobot
from formats.robots.lerobot import Demonstrations
from formats.weights import pretrained
from models import act, vla
from models.policy import Policy
from tasks.envs import discs
from tasks.robots import imagenet, simulation
from tasks.robots import lerobot as _lerobot

NEVER = 10**9  # steps: evaluate only at the end
Kind = Literal["act", "vla"]
Mode = Literal["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY"]


@dataclass
class DatasetSettings:
    root: str | list[str] = option(
        "", "folder of a LeRobot dataset (v2.0, v2.1 or v3.0), or [a,b] of several"
    )
    repo_id: str | list[str] = option(
        "",
        (
            "its id, or [a,b], looked for below root and in the local caches; both empty: "
            "simulated "
            "discs"
        ),
    )
    revision: str = option("", "branch, tag or commit of repo_id on the hub; empty = main")
    weights: list[float] = option(
        [], "of several datasets, their shares of an epoch; empty = each frame once", above=0
    )
    episodes: list[int | str] = option(
        [],
        "numbers of the episodes to use, such as 1,2,4, of several datasets NAME:1; empty = all",
        low=0,
    )
    exclude_episodes: list[int | str] = option(
        [], "numbers of the episodes to leave out, or NAME:1", low=0
    )
    eval_split: float = option(
        0.1,
        "share of the episodes to validate on; 0 = validate on the training data",
        low=0,
        high=0.9,
    )
    split_seed: int = option(0, "of the choice of these episodes", low=0)
    tolerance_s: float = option(
        1e-4, "largest distance of a time stamp from frame / fps, in seconds", above=0
    )
    use_imagenet_stats: bool = option(
        True, "normalise pictures by ImageNet's statistics, not by the data's own"
    )
    cameras: list[str] = option(
        [], "cameras to use, by their features' names; empty = all, none = without any"
    )
    command: Literal["task", "task_aug", "subtask"] = option(
        "task",
        (
            "what a policy hears: the task, one of its wordings at random, or the subtask of the "
            "moment"
        ),
    )
    resize: list[int] = option(
        [],
        "height,width to shrink pictures to; empty = what the policy needs, or as recorded",
        low=8,
    )
    cache: Literal["memmap", "none"] = option(
        "memmap", "pictures decoded once into files, or at every use"
    )
    cache_dir: str = option(
        "", "where these files go; empty = $LOCKSTEP_CACHE or ~/.cache/lockstep"
    )


@dataclass
class Modes:
    VISUAL: Mode = option("MEAN_STD", "normalisation of pictures")
    STATE: Mode = option("MEAN_STD", "normalisation of observation.state")
    ENV: Mode = option("MEAN_STD", "normalisation of observation.environment_state")
    ACTION: Mode = option("MEAN_STD", "normalisation of action")


@dataclass
class VisualRange(Modes):
    VISUAL: Mode = option("MIN_MAX", "normalisation of pictures; MIN_MAX is from -1 to 1")


@dataclass
class PolicySettings:
    """Settings of every policy."""

    type: Kind = option(
        "vla", "act, vla, or any policy of the lerobot package, where it is installed"
    )
    pretrained_path: str = option(
        "",
        "weights to start from: a pretrained_model folder, a run's folder, or an id on the hub; "
        "its config.json has "
        "the policy's type, sizes and normalisation",
    )
    pretrained_revision: str = option("", "branch, tag or commit of that id; empty = main")
    pretrained_strict: bool = option(
        True, "refuse weights whose names or shapes are not all the policy's"
    )
    push_to_hub: bool = option(False, "only false: nothing is uploaded")


@dataclass
class ActSettings(PolicySettings):
    """Settings with LeRobot's names and defaults.

    The exception is the normalisation of ENV, which is IDENTITY in LeRobot.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 8,
        "epochs": 0,
        "steps": 100_000,
        "optim.lr": 1e-5,
        "optim.weight_decay": 1e-4,
        "optim.grad_clip": 10.0,
        "schedule.kind": "constant",
    }
    type: Kind = option(
        "act", "act, vla, or any policy of the lerobot package, where it is installed"
    )
    vision_backbone: Literal["resnet18", "resnet34"] = option(
        "resnet18", "network that pictures go through"
    )
    pretrained_backbone_weights: str = option(
        "",
        (
            "local file of its ImageNet weights, torchvision's or timm's; nothing is downloaded; "
            "empty = random"
        ),
    )
    optimizer_lr_backbone: float = option(
        0.0, "its learning rate; 0 = optim.lr, as of all else", low=0
    )
    replace_final_stride_with_dilation: bool = option(
        False, "its last stage keeps twice the resolution"
    )
    chunk_size: int = option(100, "actions predicted at once", low=1)
    n_action_steps: int = option(0, "of these, executed before the next prediction; 0 = all", low=0)
    dim_model: int = option(512, "width of the transformers", low=8)
    n_heads: int = option(8, "attention heads", low=1)
    dim_feedforward: int = option(3200, "width inside their perceptrons", low=1)
    feedforward_activation: Literal["relu", "gelu"] = option("relu", "their activation function")
    n_encoder_layers: int = option(4, "layers of the encoder", low=1)
    n_decoder_layers: int = option(1, "layers of the decoder", low=1)
    n_vae_encoder_layers: int = option(4, "layers of the encoder of actions", low=1)
    use_vae: bool = option(
        True, "train with a latent variable that says in which of many ways to act"
    )
    latent_dim: int = option(32, "its dimensions", low=1)
    kl_weight: float = option(10.0, "weight of its KL divergence from a standard normal", low=0)
    dropout: float = option(0.1, "share of activations dropped in training", low=0, high=0.9)
    temporal_ensemble_coeff: float = option(
        0.0,
        (
            "in trials, blend the last chunks with weights exp(-this * i), i = 0 the oldest; 0 = "
            "do "
            "not"
        ),
    )
    pre_norm: bool = option(False, "normalise before attention and perceptron instead of after")
    normalization_mapping: Modes = section(Modes)


@dataclass
class VlaSettings(PolicySettings):
    defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 64,
        "epochs": 0,
        "steps": 1200,
        "optim.lr": 2e-3,
        "optim.beta2": 0.95,
        "schedule.warmup_steps": 100,
        "eval_every": 300,
    }
    preset: Literal["test", "tiny", "small", "base"] = option(
        "test", "0.4, 2, 35 or 200 million parameters"
    )
    chunk_size: int = option(8, "actions predicted at once", low=1)
    n_action_steps: int = option(4, "of these, executed before the next prediction; 0 = all", low=0)
    num_steps: int = option(10, "Euler steps from noise to actions", low=1)
    rtc_max_delay: int = option(
        0,
        (
            "real-time chunking: train with up to so many first actions given, by each sample's "
            "own "
            "draw"
        ),
        low=0,
    )
    freeze_vision_encoder: bool = option(False, "train everything but the picture encoder")
    train_expert_only: bool = option(False, "train the action expert alone")
    gradient_checkpointing: bool = option(
        False, "compute activations again in the backward pass: less memory, slower"
    )
    normalization_mapping: Modes = section(VisualRange)


@dataclass
class EnvSettings:
    type: Literal["auto", "none", "discs", "pusht"] = option(
        "auto",
        (
            "simulation to try the policy in, and to record when no dataset is given; auto: discs "
            "where none is"
        ),
    )
    command: str = option(
        "",
        f"the only command to give, such as {discs.COMMANDS[0]!r}; empty = all six. ACT hears none",
    )
    demonstrations: int = option(600, "simulated demonstrations to record", low=4)
    size: int = option(
        0, "height and width of the simulated camera in pixels; 0 = 32, of pusht 96", low=0
    )
    data_seed: int = option(0, "of the demonstrations", low=0, high=999)
    noise: float = option(
        0.1, "noise in the demonstrator's hand, so that recovering is seen", low=0
    )


@dataclass
class EvalSettings:
    n_episodes: int = option(20, "simulated trials at each evaluation; 0 = none", low=0)
    delay: int = option(
        0, "steps that a prediction takes in them: the last chunk is executed on meanwhile", low=0
    )
    loss_every: int = option(
        -1,
        "optimizer steps between evaluations, as eval_every; 0 = at the end; -1 = not set",
        low=-1,
    )
    trials_every: int = option(
        -1,
        "optimizer steps between evaluations with trials; 0 = no trials; -1 = at each evaluation",
        low=-1,
    )


@dataclass
class Augment:
    enabled: bool = option(False, "change the training pictures at random")
    brightness: float = option(0.2, "largest change of brightness, as a share", low=0, high=1)
    contrast: float = option(0.2, "largest change of contrast, as a share", low=0, high=1)
    saturation: float = option(0.5, "largest change of saturation, as a share", low=0, high=1)


POLICIES = _lerobot.Kinds({"act": ActSettings, "vla": VlaSettings}, PolicySettings, Modes)


@dataclass
class Settings(contract.Settings):
    dataset: DatasetSettings = section(DatasetSettings)
    policy: PolicySettings = choice("vla", POLICIES)
    env: EnvSettings = section(EnvSettings)
    eval: EvalSettings = section(EvalSettings)
    augment: Augment = section(Augment)
    rename_map: list[str] = option(
        [],
        (
            "other names of observations in the policy, such as "
            "observation.image:observation.images.top"
        ),
    )
    download: bool = option(
        False, "fetch dataset.repo_id and policy.pretrained_path from the hub if they are not here"
    )


def settings_of(policy: Any) -> Any:
    """Return the config's section as the network's hyper-parameters.

    Raises ValueError for an inconsistent combination.
    """
    cls: Any = act.ACTConfig if policy.type == "act" else vla.VLASettings
    fields = {
        name: value for name, value in vars(policy).items() if name in cls.__dataclass_fields__
    }
    full = cls(**fields | {"n_action_steps": steps_of(policy)})
    return full if policy.type == "act" else full.resolved()


def steps_of(policy: Any) -> int:
    """Return the number of executed actions per chunk."""
    if _lerobot.is_lerobots(policy):
        return _lerobot.steps_of(policy)
    return int(policy.n_action_steps or policy.chunk_size)


NOT_THE_NETWORK = frozenset(
    "n_action_steps kl_weight dropout num_steps rtc_max_delay gradient_checkpointing "
    "freeze_vision_encoder "
    "train_expert_only".split()
)
"""Hyper-parameters that may differ from the pretrained weights' config."""


def eval_every(cfg: Any) -> int:
    """Return the optimizer steps between evaluations from LeRobot's two cadences.

    The result is 0 if neither cadence is set.
    """
    simulated = simulation.which(cfg.env, bool(cfg.dataset.root or cfg.dataset.repo_id))
    asked = [cfg.eval.loss_every, cfg.eval.trials_every if simulated else -1]
    asked = [every for every in asked if every >= 0]
    return next(filter(None, asked), NEVER) if asked else 0


def start_from(cfg: Any, policy: Policy) -> str:
    """Load the weights of `cfg.pretrained_path` into `policy` and return a description.

    The normalisation stays the dataset's. Raises LockstepError for weights of another network, even
    if all shapes match.
    """
    found = pretrained.load(pretrained.find(cfg.pretrained_path, cfg.pretrained_revision))
    where, there = "policy.pretrained_path", found.config
    if there.get("type") != cfg.type:
        todo = f"its config.json says policy.type={there.get('type')}"
        raise LockstepError(f"the pretrained weights are not of {cfg.type}", where, todo)
    sees = _cameras_of(there)
    if sees and {*sees} != {*policy.cameras} and cfg.pretrained_strict:
        what = (
            f"the weights see {', '.join(sees)}, and the dataset gives "
            f"{', '.join(policy.cameras) or 'no camera'}"
        )
        todo = (
            "rename_map renames, dataset.cameras chooses; policy.pretrained_strict=false goes "
            "on with other cameras"
        )
        raise LockstepError(what, where, todo)
    differing = _differing(cfg, there, policy.cameras)
    settings = " ".join(f"{key}={value}" for key, value in differing.items())
    refused = {
        key: value
        for key, value in differing.items()
        if not key.startswith("policy.normalization_mapping.")
    }
    if refused and cfg.pretrained_strict:
        what = "the pretrained weights are of another network"
        raise LockstepError(what, where, f"its config.json says {settings}")
    misfits = pretrained.fit(policy.net, found.weights, cfg.pretrained_strict)
    rest = (f", the rest at random: {misfits}" if misfits else "") + (
        f"; trained with {settings}" if differing else ""
    )
    return f"{cfg.pretrained_path}{rest}"


def _cameras_of(there: dict[str, Any]) -> list[str]:
    """Return the cameras in a config.json."""
    return [
        name for name, f in (there.get("input_features") or {}).items() if f.get("type") == "VISUAL"
    ]


def _differing(cfg: Any, there: dict[str, Any], cameras: list[str]) -> dict[str, Any]:
    """Return {key: config.json's value} of the settings that differ and change the function.

    Only settings count that change the function of the same weights.
    """
    here = asdict(settings_of(cfg))
    names = [
        name
        for name in here
        if name not in NOT_THE_NETWORK and there.get(name, here[name]) != here[name]
    ]
    # The sizes of a preset follow from the preset's name.
    names = [name for name in names if hasattr(cfg, name)] or names
    differing = {f"policy.{name}": there[name] for name in names}
    features, ours = there.get("input_features") or {}, cfg.normalization_mapping
    # In LeRobot, a type without an entry in the mapping is not normalised. No policy's mapping has
    # an entry for ENV.
    default = {mode.name: mode.default for mode in fields(ours)} | {"ENV": "IDENTITY"}
    modes = there.get("normalization_mapping", default) or {}
    for kind in sorted(
        {"ACTION", *(feature["type"] for feature in features.values())} & default.keys()
    ):
        if (mode := modes.get(kind, "IDENTITY")) != getattr(ours, kind):
            differing[f"policy.normalization_mapping.{kind}"] = mode
    theirs = _cameras_of(there)
    if theirs != cameras and set(theirs) == set(cameras):
        differing["dataset.cameras"] = ",".join(theirs)
    return differing


def renaming(pairs: list[str], demos: Demonstrations, root: Path) -> dict[str, str]:
    """Return {name of a feature in the dataset: name in the policy}.

    Raises LockstepError for a missing feature, a feature that is not an observation, and a
    duplicate name.
    """
    names = dict[str, str]()
    for pair in pairs:
        old, _, new = (part.strip() for part in pair.partition(":"))
        if (
            not new.startswith("observation.")
            or old.startswith("action")
            or old in lerobot.BOOKKEEPING
        ):
            what, todo = (
                f"{pair} renames no observation",
                "give OLD:observation.NEW; actions keep their name",
            )
        elif old not in demos.features:
            there = ", ".join(name for name in demos.features if name not in lerobot.BOOKKEEPING)
            what, todo = f"no feature {old}", f"{root} has {there}"
        elif demos.features[old].is_picture and not is_file_name(new):
            what, todo = f"{new} cannot be a camera's name", "give one without /"
        elif old in names or new in {
            *names.values(),
            *(demos.features.keys() - {p.partition(":")[0] for p in pairs}),
        }:
            what, todo = (
                f"{new if old not in names else old} would be there twice",
                "give each its own name",
            )
        else:
            names[old] = new
            continue
        raise LockstepError(what, "rename_map", todo)
    return names


def renamed(
    pairs: list[str], sets: dict[str, Demonstrations]
) -> tuple[dict[str, Demonstrations], dict[str, str]]:
    """Return the datasets with renamed observations, and {old: new}.

    Each dataset is renamed separately, so cameras with different names can become one camera. Each
    pair must fit at least one dataset.
    """
    found, all_names = dict[str, Demonstrations](), dict[str, str]()
    for name, demos in sets.items():
        others = {
            feature for each in sets.values() if each is not demos for feature in each.features
        }
        names = renaming(
            [
                p
                for p in pairs
                if (old := p.partition(":")[0].strip()) in demos.features or old not in others
            ],
            demos,
            demos.root,
        )
        found[name] = lerobot.renamed(demos, names)
        all_names |= names
    return found, all_names


def check(cfg: Any) -> None:
    """Raise LockstepError for inconsistent settings."""
    policy = cfg.policy
    if policy.type == "act":
        imagenet.check(policy)
    if cfg.eval.loss_every >= 0 and cfg.eval_every != eval_every(cfg):
        what = f"eval_every={cfg.eval_every} and eval.loss_every={cfg.eval.loss_every}"
        raise LockstepError(
            what, "eval_every", "drop one: eval_steps is LeRobot's word for eval.loss_every"
        )
    if cfg.env.command and cfg.env.command not in discs.COMMANDS:
        todo = f"choose one of: {', '.join(discs.COMMANDS)}"
        raise LockstepError(f"no command {cfg.env.command!r}", "env.command", todo)
    if cfg.env.type == "none" and not (cfg.dataset.root or cfg.dataset.repo_id):
        todo = "give dataset.root or dataset.repo_id, or drop it"
        raise LockstepError("there is no data to learn from", "env.type=none", todo)
    if cfg.env.command and cfg.env.type == "pusht":
        raise LockstepError("PushT has one command only", "env.command", "drop it")
    if 0 < cfg.env.size < 16:
        raise LockstepError(f"{cfg.env.size} is too small", "env.size", "give 16 or more, or 0")
    if len(cfg.dataset.resize) not in (0, 2):
        what = f"{amount(len(cfg.dataset.resize), 'number')} where two belong"
        raise LockstepError(what, "dataset.resize", "give height,width")
    if policy.push_to_hub:
        raise LockstepError("nothing is uploaded", "policy.push_to_hub", "drop it, or give false")
    if _lerobot.is_lerobots(policy):
        if cfg.eval.delay:
            raise LockstepError(
                "late predictions are for act and vla", f"eval.delay={cfg.eval.delay}", "drop it"
            )
        return  # LeRobot's class checks the rest
    if steps_of(policy) > policy.chunk_size:
        what = f"n_action_steps {steps_of(policy)} of a chunk of {policy.chunk_size}"
        raise LockstepError(what, "policy.n_action_steps", "give at most chunk_size")
    if (delay := cfg.eval.delay) > min(steps_of(policy), policy.chunk_size - steps_of(policy)):
        what = (
            f"{steps_of(policy)} of {policy.chunk_size} predicted actions are executed, and "
            f"{delay} more would be"
        )
        todo = "give at most n_action_steps, and chunk_size at least their sum"
        raise LockstepError(what, f"eval.delay={delay}", todo)
    if delay and getattr(policy, "temporal_ensemble_coeff", 0.0):
        raise LockstepError(
            "blended chunks are computed at each step", f"eval.delay={delay}", "drop one of the two"
        )
    if policy.type == "vla" and not policy.pretrained_path:
        for name in ("train_expert_only", "freeze_vision_encoder"):
            if getattr(policy, name):
                what, todo = (
                    "it would freeze weights that never learned",
                    "give policy.pretrained_path",
                )
                raise LockstepError(what, f"policy.{name}", todo)
    if policy.type == "act" and cfg.dataset.command != "task":
        todo = "drop it, or choose policy.type=vla or one of LeRobot's that hears"
        raise LockstepError("ACT hears no command", f"dataset.command={cfg.dataset.command}", todo)
    if policy.type == "act" and policy.temporal_ensemble_coeff and steps_of(policy) != 1:
        todo = "give policy.n_action_steps=1: blending needs a look at every step"
        raise LockstepError(
            f"{steps_of(policy)} actions a look", "policy.temporal_ensemble_coeff", todo
        )
    try:
        settings_of(policy)
    except ValueError as error:
        raise LockstepError(str(error), "policy", "change one of them") from None


def refuse_depths(demos: Demonstrations, cameras: list[str]) -> None:
    """Raise LockstepError for a depth camera: the networks use colours with 8 bits per channel."""
    if depths := [camera for camera in cameras if demos.features[camera].depth]:
        rest = ",".join(camera for camera in cameras if camera not in depths) or "none"
        what = f"{depths[0]} is a depth camera, and the policies see colours"
        raise LockstepError(what, str(demos.root), f"leave it out: dataset.cameras={rest}")
