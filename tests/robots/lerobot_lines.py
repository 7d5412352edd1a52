#!/usr/bin/env python3
"""Type command lines of LeRobot's documentation and issues (data/lerobot_lines.yaml), and tell what they do here.

python tests/robots/lerobot_lines.py             print a table
python tests/robots/lerobot_lines.py --update    write the answers into the file, and the table into docs/robots.md

A line is typed as it stands, in a folder of its own where its datasets, weights and runs exist: parsed, its dataset
read and, of our own policies, its network built and its weights loaded ("works"); of LeRobot's, whose weights are on
the Hub, no network is built ("accepted"). With the lerobot package on PYTHONPATH the answers are written as `beside`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402

import tasks  # noqa: E402
from engine import config  # noqa: E402
from engine.errors import LockstepError  # noqa: E402
from formats.robots.lerobot_writer import Recorder  # noqa: E402

FILE = ROOT / "tests" / "data" / "lerobot_lines.yaml"
PAGE = ROOT / "docs" / "robots.md"
BEGIN, END = "<!-- lines: python tests/robots/lerobot_lines.py --update -->\n", "<!-- end of lines -->\n"
USUAL = "dataset.repo_id output_dir job_name policy.repo_id policy.device wandb.enable steps batch_size".split()
"""Keys that the table leaves out."""

CAMERAS = ("observation.images.front", "observation.images.eagle", "observation.images.glove")
KINDS = {"smolvla_base": "smolvla", "xvla-base": "xvla", "pi0_base": "pi0", "pi05_base": "pi05"}
KINDS |= {"pi05_libero_base": "pi05", "pi0fast-base": "pi0_fast", "the_policy_to_finetune": "act"}
SIZES = "policy.chunk_size=6 policy.dim_model=16 policy.n_heads=2 policy.dim_feedforward=16 policy.n_encoder_layers=1 "
SIZES += "policy.n_vae_encoder_layers=1 policy.latent_dim=4"


def lines() -> list[dict[str, str]]:
    found: list[dict[str, str]] = yaml.safe_load(FILE.read_text())
    return found


def has_lerobot() -> bool:
    return importlib.util.find_spec("lerobot") is not None


def load_lerobot() -> None:
    """Where it is, but beside a torch without CUDA its torchvision does not load by itself."""
    if has_lerobot():
        sys.path.append(str(ROOT / "tests" / "peer"))
        importlib.import_module("torchvision_shim").load()


def typed(line: str) -> list[str]:
    """The words behind the name of the script, and behind what launches it."""
    return shlex.split(re.sub(r"^.*?(lerobot[-_]train|train\.py)\)? ", "", line))


def words(line: str, folder: Path) -> list[str]:
    """What is typed after `python train.py`: on a CPU, and with home folders within `folder`."""
    here = [word.replace("/home/me/", f"{folder}/home/") for word in typed(line)]
    return ["robot", *(re.sub(r"^(--policy.device)=(cuda|mps)$", r"\1=cpu", word) for word in here)]


def record(root: Path, state: str = "observation.state", cameras: Sequence[str] = CAMERAS) -> Path:
    """A dataset with the features that the lines name."""
    rng = np.random.default_rng(0)
    features = {state: ("float32", (6,)), "action": ("float32", (6,))}
    with Recorder(root, 10, features | dict.fromkeys(cameras, ("image", (3, 32, 40)))) as recorder:
        for length in (9, 10, 11, 12):
            walk = rng.normal(size=(length, 6)).cumsum(0)
            shots = {name: rng.integers(0, 256, (length, 3, 32, 40), dtype=np.uint8) for name in cameras}
            recorder.add_episode({state: walk, "action": walk + 1, **shots}, "walk")
    return root


@contextmanager
def world(folder: Path) -> Iterator[Path]:
    """The working folder in which all that the lines name exists: datasets, weights and runs."""
    text, before = "\n".join(entry["line"] for entry in lines()), dict(os.environ)
    os.environ |= {"HF_HOME": f"{folder}/hf", "HF_LEROBOT_HOME": f"{folder}/hf/lerobot", "HOME": f"{folder}/home"}
    os.environ |= {"LOCKSTEP_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
    os.environ.pop("HF_HUB_CACHE", None)
    here = Path.cwd()
    os.chdir(folder)
    try:
        dataset = record(folder / "set")
        named = " ".join(re.findall(r"dataset\.repo_id=(\S+)", text))
        ids = set(re.findall(r"[\w./-]+/[\w.-]+", named))  # of a list, too
        for each in ids:
            shutil.copytree(dataset, folder / "hf/lerobot" / each)
        for place in homes(text, "dataset.root", folder):
            record(place, "state", ("image", "wrist_image_l", "wrist_image_r"))
        policies = re.findall(r"policy\.(?:pretrained_)?path=\"?([\w-]+/[\w.-]+)", text)
        hub = [folder / f"hf/hub/models--{each.replace('/', '--')}" for each in policies]
        for model in dict.fromkeys(hub):
            (model / "refs").mkdir(parents=True)
            (model / "refs/main").write_text("abc")
            weights(model / "snapshots/abc", KINDS[model.name.rpartition("--")[2]], dataset)
        for place in homes(text, "policy.path", folder):
            weights(place, KINDS[place.name], dataset)
        for run in set(re.findall(r"config_path=(outputs/train/\w+)", text)):
            Path(run).mkdir(parents=True)
            cfg = config.parse(["robot", "policy.type=act", f"dataset.root={dataset}", *SIZES.split()], tasks.load).cfg
            Path(run, "config.yaml").write_text(config.to_yaml(cfg))
        yield folder
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


def homes(text: str, key: str, folder: Path) -> list[Path]:
    return [folder / "home" / each for each in set(re.findall(rf"{re.escape(key)}=/home/me/(\S+)", text))]


def weights(folder: Path, kind: str, dataset: Path) -> None:
    """A policy's folder: of ours its weights, too, of LeRobot's the config.json that says whose they are."""
    if kind == "act":
        task = task_of(
            config.parse(["robot", "policy.type=act", f"dataset.root={dataset}", *SIZES.split()], tasks.load)
        )
        task.datasets()
        task.save_pretrained(task.model(), folder)
    else:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"type": kind}))


def task_of(args: config.Args) -> Any:
    return tasks.load(args.cfg.task)(args.cfg)


def answer(line: str, folder: Path) -> str:
    """What a line does: "works" or "accepted", with the keys that set nothing, or "refused" and the error."""
    try:
        args = config.parse(words(line, folder), tasks.load, others=tasks.names())
        task, ours = task_of(args), args.cfg.policy.type in ("act", "vla")
        with redirect_stdout(StringIO()):
            task.datasets()
            # Of a full network the names and shapes alone; what is loaded is small here.
            with nullcontext() if args.cfg.policy.pretrained_path else torch.device("meta"):
                _ = task.model() if ours else None
    except LockstepError as error:
        return "refused: " + "; ".join(str(error).replace(f"{folder}/", "").splitlines())
    keys = [note.partition("=")[0] for note in args.notes]
    return ("works" if ours else "accepted") + (f"; sets nothing: {', '.join(keys)}" if keys else "")


def expected(entry: dict[str, str]) -> str:
    return entry.get("beside", entry["here"]) if has_lerobot() else entry["here"]


def telling(line: str) -> str:
    """The words that make a line what it is, cut where it gets long."""
    found = list[str]()
    for word in typed(line):
        if word.startswith("--") or not found or "=" in found[-1]:
            found.append(word)
        else:
            found[-1] += f" {word}"
    found = [word for word in found if re.split("[= ]", word.lstrip("-"))[0] not in USUAL or "[" in word]
    text = " ".join(shlex.quote(word) if {*'{["'} & {*word} else word for word in found)
    return text if len(text) <= 200 else f"{text[:200].rpartition(' ')[0]} ..."


def table(entries: list[dict[str, str]]) -> str:
    rows = ["| from | line | what it does here |", "|---|---|---|"]
    for entry in entries:
        says = entry.get("beside", entry["here"])
        says = says if len(says) <= 240 else f"{says[:240].rpartition(' ')[0]} ..."
        rows.append(f"| {entry['from']} | `{telling(entry['line'])}` | {says.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def main(argv: list[str]) -> int:
    entries = lines()
    load_lerobot()
    with tempfile.TemporaryDirectory() as name, world(Path(name).resolve()) as folder:
        for entry in entries:
            found = answer(entry["line"], folder)
            if not has_lerobot():
                entry["here"] = found
            elif found != entry.get("here"):
                entry["beside"] = found
            else:
                entry.pop("beside", None)
    if argv != ["--update"]:
        print(table(entries))
        return 0
    head = "".join(f"{line}\n" for line in FILE.read_text().splitlines() if line.startswith("#"))
    FILE.write_text(head + yaml.safe_dump(entries, sort_keys=False, width=10**6, allow_unicode=True))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{table(entries)}{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
