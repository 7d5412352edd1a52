"""Find, read, load and write LeRobot's `pretrained_model` folders.

    config.json                 the policy's type, features and hyper-parameters
    model.safetensors           the weights, each name with a leading `model.`
    README.md                   a model card, so that the folder can be uploaded to the hub
    policy_preprocessor.json    the processing steps of an observation. The statistics are in
                                policy_preprocessor_step_3_normalizer_processor.safetensors (with
                                the step's number), named `<feature>.<stat>`
    policy_postprocessor.json   the processing steps of an action. The statistics are in
                                policy_postprocessor_step_0_...

Until LeRobot 0.3 the statistics were among the weights. Such folders are supported. No file is ever
unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.contract import LockstepError
from formats.partial import Partial
from formats.robots.lerobot import need
from formats.weights import hub

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"

_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OLD = re.compile(r"(?:normalize_inputs|normalize_targets|unnormalize_outputs)\.buffer_(.+)\.(\w+)")
_DTYPES = {
    getattr(torch, name)
    for name in "float64 float32 float16 bfloat16 int64 int32 uint8 bool".split()
}

Stats = dict[str, dict[str, Tensor]]
"""{feature: {"mean": ..., "std": ..., "min": ..., ...}}"""


class Pretrained(NamedTuple):
    """The contents of a folder.

    config   config.json: "type", "input_features", "output_features", "normalization_mapping",
             hyper-parameters
    weights  the network's state, without the leading `model.`
    stats    of the training data; {} if the folder has none
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    stats: Stats


# ---- find
# --------------------------------------------------------------------------------------------------


def find(path_or_id: str, revision: str = "", download: bool = False) -> Path:
    """Find the folder with config.json.

    path_or_id is one of
    - a `pretrained_model` folder, or a file in the folder
    - the surrounding checkpoint folder, or the run folder (last checkpoint)
    - a `user/name` in the hub's local cache; `download` fetches a missing id

    Raises LockstepError with every place of the search.
    """
    tried: list[Path] = []
    try:
        if download and not any(
            (folder / CONFIG).is_file() for folder in _candidates(path_or_id, revision)
        ):
            if not _ID.fullmatch(path_or_id):
                what, todo = (
                    f"{_plain(path_or_id)!r} is no id on the hub",
                    "give user/name, or a folder that is there",
                )
                raise LockstepError(what, "policy.pretrained_path", todo)
            hub.download("models", path_or_id, revision)
        for folder in _candidates(path_or_id, revision):
            tried.append(folder)
            if (folder / CONFIG).is_file():
                return folder
    except (OSError, RuntimeError) as error:  # a name too long, or an unknown `~user`
        why = getattr(error, "strerror", None) or error
        raise LockstepError(
            f"cannot look there: {why}", f"policy.pretrained_path={_plain(path_or_id)}"
        ) from None
    todo = f"give a folder with {CONFIG} and {WEIGHTS}"
    if Path(path_or_id, "config.yaml").is_file():
        todo = f"`python tools/save_pretrained.py {path_or_id}` makes one of this run"
    if _ID.fullmatch(path_or_id):
        todo += ", or --download, which fetches it from the hub"
    what = (
        f"no pretrained policy: there is no {CONFIG} in "
        f"{'; '.join(map(str, tried)) or 'such a name'}"
    )
    raise LockstepError(what, f"policy.pretrained_path={_plain(path_or_id)}", todo)


def _candidates(path_or_id: str, revision: str = "") -> Iterable[Path]:
    if not path_or_id or not path_or_id.isprintable():
        return
    path = Path(path_or_id).expanduser()
    if path.is_file():
        path = path.parent
    yield path
    yield from (path / inside / "pretrained_model" for inside in ("", "last", "checkpoints/last"))
    if _ID.fullmatch(path_or_id):
        model = hub.repository("models", path_or_id)
        yield model / "snapshots" / hub.commit(model, revision)


# ---- read
# --------------------------------------------------------------------------------------------------


def load(folder: Path) -> Pretrained:
    """Read a `pretrained_model` folder to the CPU.

    Raises LockstepError with the file's name for a missing or invalid file.
    """
    config = read_json(folder / CONFIG)
    weights = _read_tensors(folder / WEIGHTS)
    stats: Stats = {}
    for path in sorted(folder.glob(f"{PREPROCESSOR}*.safetensors")):
        for key, value in _read_tensors(path).items():
            feature, _, stat = key.rpartition(".")
            stats.setdefault(feature, {})[stat] = value
    weights, old_stats = _split_old(weights, config)
    bad = sorted(name for name, value in weights.items() if not value.isfinite().all())
    if bad:
        what = (
            f"{len(bad)} of {len(weights)} tensors hold NaN or infinity, such as {_plain(bad[0])}"
        )
        raise LockstepError(what, str(folder / WEIGHTS), "take an earlier checkpoint")
    return Pretrained(config, weights, stats or old_stats)


def _split_old(
    tensors: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], Stats]:
    """Return the weights without prefix, and the statistics among the weights (LeRobot until 0.3).

    The stored names have underscores for the dots of a feature. The config resolves the dots.
    """
    features = [
        name for key in ("input_features", "output_features") for name in _mapping(config.get(key))
    ]
    dotted = {name.replace(".", "_"): name for name in features}
    weights: dict[str, Tensor] = {}
    stats: Stats = {}
    for key, value in tensors.items():
        old = _OLD.fullmatch(key)
        if old is None:
            weights[key.removeprefix("model.")] = value
        elif value.isfinite().all():  # infinity marks an unset value
            stats.setdefault(dotted.get(old[1], old[1]), {})[old[2]] = value
    return weights, stats


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of the folder. Raises LockstepError if the content is not a mapping."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise _cannot("read", path, error) from None
    except (ValueError, RecursionError) as error:
        why = _plain(str(error))
        raise LockstepError(
            f"{path.name} is no JSON: {why}", str(path), "copy the folder again"
        ) from None
    if not isinstance(value, dict):
        what = f"{path.name} holds a {type(value).__name__}, not a mapping"
        raise LockstepError(what, str(path), "copy the folder again")
    return value


def _read_tensors(path: Path) -> dict[str, Tensor]:
    load_file = need("safetensors.torch", "policy.pretrained_path").load_file
    try:
        with open(path, "rb") as file:
            if file.read(64).startswith(b"version https://git-lfs"):
                what = f"{path.name} is a git-lfs pointer, not the file itself"
                raise LockstepError(what, str(path), "run `git lfs pull` in that repository")
        tensors: dict[str, Tensor] = load_file(path)
        if strange := {value.dtype for value in tensors.values()} - _DTYPES:
            raise ValueError(f"it holds {strange.pop()}")
        return tensors
    except OSError as error:
        raise _cannot("read", path, error) from None
    except LockstepError:
        raise
    # safetensors raises its own error for damaged bytes, torch and Python for absurd shapes.
    except Exception as error:
        why = _plain(str(error) or type(error).__name__)
        what = f"{path.name} is cut short or no safetensors file: {why}"
        raise LockstepError(what, str(path), "copy the folder again") from None


def _cannot(verb: str, path: Path, error: Exception) -> LockstepError:
    what = f"cannot {verb} {path.name}: {getattr(error, 'strerror', None) or _plain(str(error))}"
    return LockstepError(
        what, str(path), "see that it is there, that it may be used, and that there is room"
    )


# ---- fit
# --------------------------------------------------------------------------------------------------


def fit(net: nn.Module, weights: dict[str, Tensor], strict: bool = True) -> str:
    """Load `weights` into `net` and return a line on mismatches, or "".

    Raises LockstepError with the line if `strict`, and always if no weight fits; `net` is then
    unchanged.
    """
    expected = net.state_dict()
    missing = [
        f"{name} {tuple(value.shape)}" for name, value in expected.items() if name not in weights
    ]
    good, unexpected, misshaped = {}, [], []
    for name, value in weights.items():
        if name not in expected:
            unexpected.append(f"{_plain(name)} {tuple(value.shape)}")
        elif value.shape != expected[name].shape:
            misshaped.append(f"{name} {tuple(value.shape)}, not {tuple(expected[name].shape)}")
        else:
            good[name] = value
    kinds = {"missing": missing, "unexpected": unexpected, "of a different shape": misshaped}
    report = "; ".join(
        f"{len(names)} {kind}: {_first(names)}" for kind, names in kinds.items() if names
    )
    if report and (strict or not good):
        what = (
            f"the pretrained weights do not fit ({len(good)} of {len(expected)} tensors do): "
            f"{report}"
        )
        todo = "set the policy's options as it was trained"
        todo += ", or policy.pretrained_strict=false to start the rest afresh" if good else ""
        raise LockstepError(what, "policy.pretrained_path", todo)
    net.load_state_dict(good, strict=False)
    return report


def _first(names: list[str]) -> str:
    """Return the first three names."""
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += ", ..."
    return text


def _plain(text: str) -> str:
    """Return the start of `text`, printable in a one-line message."""
    return text[:120] if text.isprintable() else ascii(text[:120])


# ---- write
# --------------------------------------------------------------------------------------------------


def save(
    folder: Path,
    policy_type: str,
    config: Mapping[str, Any],
    net: nn.Module,
    stats: Mapping[str, Mapping[str, Any]],
    features: Mapping[str, Mapping[str, Any]],
    modes: Mapping[str, str],
    names: Mapping[str, str] | None = None,
    card: str = "",
    resize: Sequence[int] = (),
) -> None:
    """Write a `pretrained_model` folder in LeRobot's format, atomically.

    An existing folder is replaced.

    config    hyper-parameters: names and values of LeRobot's own config for the type
    stats     {feature: {"mean": ..., ...}} in recorded units
    features  {feature: {"type": "STATE" | "VISUAL" | "ENV" | "ACTION", "shape": [...]}}, channels
              first
    modes     {feature: mode} as for `Normalizer`; a missing feature is IDENTITY
    names     {name of an observation on the robot: name in `features`}, where the names differ
    card      README.md, see `card_of`
    resize    (height, width) for pictures as the first step; empty = unchanged camera size

    Raises LockstepError if writing fails, if the features of one type have several modes (not
    expressible in the format), or if `folder` exists and is not a `pretrained_model` folder.
    """

    by_type = _modes_by_type(features, modes)
    flat = {
        f"{feature}.{name}": torch.as_tensor(value, dtype=torch.float32)
        for feature in features
        for name, value in stats.get(feature, {}).items()
    }

    def write(new: Path) -> None:
        _write_json(new / CONFIG, _config(policy_type, config, features, by_type))
        _write_tensors(
            new / WEIGHTS, {f"model.{name}": value for name, value in net.state_dict().items()}
        )
        for name, steps in _processors(features, by_type, names or {}, resize).items():
            _write_json(new / f"{name}.json", {"name": name, "steps": steps})
            for file in (step["state_file"] for step in steps if "state_file" in step):
                _write_tensors(new / file, flat)

    write_folder(folder, write, card)


def card_of(
    policy_type: str, features: Mapping[str, Mapping[str, Any]], datasets: list[str]
) -> str:
    """Return a model card: front matter for the hub, features, and a line of code for use.

    features, policy_type  as for `save`
    datasets  their ids on the hub, or the names of their folders
    """
    ids = [name for name in datasets if _ID.fullmatch(name)]
    front = {
        "library_name": "lockstep" if policy_type == "vla" else "lerobot",
        "pipeline_tag": "robotics",
    }
    tags = {"tags": ["robotics", "imitation-learning", policy_type]} | (
        {"datasets": ids} if ids else {}
    )
    rows = [
        f"| `{name}` | {f['type']} | {' x '.join(map(str, f['shape']))} |"
        for name, f in features.items()
    ]
    used = f"--dataset.repo_id={ids[0]}" if ids else "dataset.root=DIR"
    lines = [
        "---",
        *(f"{key}: {value}" for key, value in (front | tags).items()),
        "---",
        "",
        f"# {policy_type}",
        "",
    ]
    lines += [
        f"A policy of the type {policy_type}, trained with Lockstep on {', '.join(datasets)}.",
        "",
    ]
    lines += [
        "| feature | kind | shape |",
        "|---|---|---|",
        *rows,
        "",
        "Train it further, where this folder is:",
        "",
    ]
    lines += ["```", f"python train.py robot --policy.path=FOLDER {used}", "```", ""]
    return "\n".join(lines)


def write_folder(folder: Path, write: Callable[[Path], None], card: str = "") -> None:
    """Create a `pretrained_model` folder atomically; replace an existing folder.

    `write` fills an empty folder, and `card` becomes README.md. Raises LockstepError if writing
    fails, or if `folder` is not a `pretrained_model` folder.
    """
    folder = Path(folder).resolve()  # replace the target of a link, not the link
    need("safetensors.torch", "policy.pretrained_path")
    partial = Partial(folder)
    new = partial.path
    try:
        if (
            folder.exists()
            and not (folder / CONFIG).is_file()
            and (not folder.is_dir() or any(folder.iterdir()))
        ):
            raise LockstepError(
                "the folder holds something else than a policy", str(folder), "choose a new folder"
            )
        partial.begin()
        write(new)
        (new / "README.md").write_text(card, encoding="utf-8")
        for path in new.iterdir():
            with open(path, "rb") as opened:
                os.fsync(opened.fileno())  # the rename may reach the disk before the contents
        _replace(new, folder)
    except (OSError, need("safetensors").SafetensorError) as error:
        raise _cannot("write", folder, error) from None
    finally:
        partial.end()


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


def _write_tensors(path: Path, values: Mapping[str, Tensor]) -> None:
    # Copy, because safetensors rejects tensors that share memory.
    own = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in values.items()}
    need("safetensors.torch").save_file(own, path, metadata={"format": "pt"})


def _replace(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`.

    No system call swaps folders portably. A crash between the two renames leaves the old folder as
    `.NAME.old` beside the new folder.
    """
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _modes_by_type(
    features: Mapping[str, Mapping[str, Any]], modes: Mapping[str, str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, feature in features.items():
        mode = modes.get(name, "IDENTITY")
        if found.setdefault(feature["type"], mode) != mode:
            what = (
                f"{name} is normalised by {mode}, other {feature['type']} features by "
                f"{found[feature['type']]}"
            )
            raise LockstepError(
                what, "policy", "LeRobot's layout has one mode for a type: choose one"
            )
    return found


def _config(
    policy_type: str,
    config: Mapping[str, Any],
    features: Mapping[str, Mapping[str, Any]],
    by_type: Mapping[str, str],
) -> dict[str, Any]:
    # LeRobot's default would download ImageNet's weights and then overwrite them with the folder's.
    quiet = {"pretrained_backbone_weights": None} if policy_type == "act" else {}
    return {
        "type": policy_type,
        "n_obs_steps": 1,
        "input_features": {name: dict(f) for name, f in features.items() if f["type"] != "ACTION"},
        "output_features": {name: dict(f) for name, f in features.items() if f["type"] == "ACTION"},
        "normalization_mapping": dict(by_type),
        "device": "cpu",
        "push_to_hub": False,
        **config,
        **quiet,
    }


def _processors(
    features: Mapping[str, Mapping[str, Any]],
    by_type: Mapping[str, str],
    names: Mapping[str, str],
    resize: Sequence[int],
) -> dict[str, list[dict[str, Any]]]:
    """Return {pipeline: steps} in the form of LeRobot's own writer."""
    actions = {name: feature for name, feature in features.items() if feature["type"] == "ACTION"}
    rename = _step("rename_observations_processor", rename_map=dict(names))
    to_cpu = _step("device_processor", device="cpu", float_dtype=None)
    scale: dict[str, Any] = {"eps": 1e-8, "norm_map": by_type}
    steps = {
        PREPROCESSOR: [
            rename,
            _step("to_batch_processor"),
            *(
                [_step("image_crop_resize_processor", crop_params_dict=None, resize_size=[*resize])]
                if resize
                else []
            ),
            to_cpu,
            _step("normalizer_processor", features=features, **scale),
        ],
        POSTPROCESSOR: [_step("unnormalizer_processor", features=actions, **scale), to_cpu],
    }
    for name, pipeline in steps.items():
        for n, step in enumerate(pipeline):
            if "norm_map" in step["config"]:
                step["state_file"] = f"{name}_step_{n}_{step['registry_name']}.safetensors"
    return steps


def _step(registry_name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": registry_name, "config": config}
