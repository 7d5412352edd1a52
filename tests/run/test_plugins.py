"""The plugins are optional: a copy without them, or without one of them, ends in the same bits."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TOY, launching, succeed

from engine import hooks

CODE = ("engine", "plugins", "tasks", "formats", "envs", "models", "configs", "data", "examples")

# Several trainings in one process group: (words, ...). A run that stops at half of its steps is continued later.
SCRIPT = """
import json, sys
import tasks, train
from engine import config, launch
from engine.guarantees import check_plugins
from engine.report.open_log import open_log

world = None
for argv in json.loads(sys.argv[1]):
    args = config.parse(argv, tasks.load)
    check_plugins(args.cfg, strict=False)
    world = world or train.setup_distributed(args.cfg)
    run = train.build(args, world)
    with open_log(run):
        train.train(run)
    del run
launch.leave()
"""

HAR = ["har", "global_batch=24", "schedule.horizon=6", "amp=off", "eval_every=6"]
VIDEO = ["video", "dataset.size=16", "dataset.frames=5", "global_batch=12", "steps=2"]
OWN = ["examples/own_task.py", "table.target=price", "global_batch=8", "steps=6"]


def copy_without(folder, *plugins):
    """Copy the code that trains, without these folders of plugins/."""
    folder.mkdir()
    for name in CODE:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "generated")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for script in ("train.py", "train_ddp.py", "data_loader.py"):
        shutil.copy(ROOT / script, folder)
    for name in plugins:
        shutil.rmtree(folder / "plugins" / name)
    return folder


def table(folder):
    rows = [f"{area},{rooms},{area * 3 + rooms}" for area in range(40) for rooms in (1, 2)]
    (folder / "mine.csv").write_text("\n".join(["area,rooms,price", *rows]))
    return f"table.path={folder / 'mine.csv'}"


def trainings(data, runs):
    """Return (processes, words of each training) in order: each task on one and on two processes; a run on two is
    continued on one, a run on one on two."""
    own, har = [*OWN, data], [*HAR, f"save_dir={runs / 'stopped'}"]
    more = [*HAR, f"save_dir={runs / 'grown'}"]
    return [
        (2, [[*har, "steps=3"], [*VIDEO, f"save_dir={runs / 'video_2'}"], [*own, f"save_dir={runs / 'own_2'}"]]),
        (1, [[*har, "steps=6"], [*more, "steps=3"], [*VIDEO, f"save_dir={runs / 'video_1'}"]]),
        (2, [[*more, "steps=6"]]),
        (1, [[*own, f"save_dir={runs / 'own_1'}"]]),
    ]


def train_all(start, runs, data):
    for processes, words in trainings(data, runs):
        start(processes, json.dumps(words))
    return weights(runs)


def weights(runs):
    return {path.parent.name: torch.load(path, weights_only=True) for path in sorted(runs.glob("*/last.pt"))}


@pytest.fixture(scope="module")
def whole(once):
    """The weights of all trainings with all plugins."""

    def build(folder):
        (folder / "several.py").write_text(SCRIPT)

        def start(processes, words):
            with launching() as launch:
                command = str(folder / "several.py"), words
                succeed(launch.python(*command) if processes == 1 else launch.torchrun(processes, *command))

        train_all(start, folder / "runs", table(folder))

    return weights(once("whole_suite", build) / "runs")


def in_copy(folder):
    """Return a function that starts a training in a copy, in new processes."""
    (folder / "several.py").write_text(SCRIPT)
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in hidden}

    def start(processes, words):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(torchrun if processes > 1 else []), "several.py", words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    return start


def assert_same(copy, whole):
    assert copy.keys() == whole.keys() and len(whole) == 6
    for name, state in whole.items():
        for part in ("model", "optimizer"):
            pairs = zip(leaves(copy[name][part]), leaves(state[part]), strict=True)
            assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs), name


def leaves(value):
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]


@pytest.mark.slow
def test_a_copy_without_plugins_ends_in_the_same_bits(tmp_path, whole):
    folder = copy_without(tmp_path / "copy")
    shutil.rmtree(folder / "plugins")
    assert_same(train_all(in_copy(folder), tmp_path / "runs", table(tmp_path)), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", hooks.ORDER)
def test_a_copy_without_one_plugin_ends_in_the_same_bits(name, tmp_path, whole):
    folder = copy_without(tmp_path / "copy", name)
    assert_same(train_all(in_copy(folder), tmp_path / "runs", table(tmp_path)), whole)


NEEDED = {
    "resilience": ["max_time_s=5", "oom=shrink"],
    "parallel": ["virtual_workers=4", "ddp.strategy=fsdp", "ddp.comm_hook=fp16"],
    "performance": ["compile=default", "cuda_graph=true", "cache=host"],
    "reporting": ["record=2", "wandb.enable=true"],
}

REFUSED = """
import json, sys
import tasks
from engine import config, hooks
from engine.errors import LockstepError
from engine.guarantees import check_plugins

hooks.load()
def error(words, strict):
    try:
        check_plugins(config.parse(words, tasks.load).cfg, strict)
    except LockstepError as error:
        return str(error)
    return ""
print(json.dumps([error([sys.argv[1], word], False) for word in sys.argv[2:]] + [error([sys.argv[1]], True)]))
"""


@pytest.mark.slow
def test_a_setting_of_an_absent_plugin_is_refused(tmp_path):
    """By one line that names the plugin; train_ddp.py needs two of them."""
    folder = copy_without(tmp_path / "copy")
    shutil.rmtree(folder / "plugins")
    (folder / "refused.py").write_text(REFUSED)
    words = [word for each in NEEDED.values() for word in each]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "refused.py", TOY, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    *errors, strict = json.loads(done.stdout.splitlines()[-1])
    expected = [(name, word) for name, each in NEEDED.items() for word in each]
    for error, (name, word) in zip(errors, expected, strict=True):
        key, _, value = word.partition("=")
        value = {"true": "True", "5": "5.0"}.get(value, value)
        if key.endswith("enable"):
            value = "True"
        assert error.startswith(f"{key}={value} needs plugins/{name} ({key}): "), error
    assert strict == "train_ddp.py needs plugins/resilience (plugins): restore the folder, or use train.py"


def test_all_plugins_are_on():
    assert hooks.load() == list(hooks.ORDER)


def test_the_image_carries_all_plugins():
    """The Dockerfile copies the whole context, and .dockerignore leaves no folder of plugins/ out."""
    assert "COPY . .\n" in (ROOT / "Dockerfile").read_text()
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert not [pattern for pattern in left_out if pattern.strip("/*").startswith("plugins")]
    assert all((ROOT / "plugins" / name / "__init__.py").is_file() for name in hooks.ORDER)
