"""`resume with`: the command that a run leaves behind, fed back to a shell, resumes that run."""

import json
import multiprocessing.util
import os
import shlex
import sys
from pathlib import Path

import pytest
from conftest import FAULTY, succeed
from torch.distributed import run as torchrun

import tasks
from engine import config, launch
from engine.launch import COMMAND
from plugins.resilience import scratch, signals

FOLDER = "checkpoints/a run's  own"


def parsed(words):
    cfg = config.parse(words, tasks.load).cfg
    return config.to_dict(cfg)


@pytest.mark.parametrize(
    ("line", "save_dir"),
    [
        ("har epochs=3", FOLDER),
        ("har --resume 'old run/last.pt' --epochs 3", FOLDER),
        ("har --resume='old run/last.pt' --use_amp --epochs 3 save_dir='my  run'", "my  run"),
        ("har resume=never --save-dir 'my run'", "my run"),
        ("har save_dir= --deterministic no", FOLDER),
        ("har --local-rank=0 --mode flatten", FOLDER),
        ("--task=robot --output_dir='out/my  run' --resume=true --policy.type act", "out/my  run"),
        ("robot --output-dir out --log_freq=1", "out"),
        ("""har dataset.root="it's \\$HOME; \\`here\\`" wandb.name='save_dir=x resume=y'""", FOLDER),
        ("--config c.yaml", FOLDER),
        ("--config=c.yaml --save-dir z", "z"),
    ],
)
def test_the_arguments_resume_the_same_run(line, save_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("task: har\nepochs: 2\nresume: old.pt\nsave_dir: x  y\n")
    argv = shlex.split(line)
    task = tasks.load(parsed(argv)["task"])
    again = shlex.split(shlex.join(config.resume_arguments(argv, task, FOLDER)))
    assert parsed(again) == parsed(argv) | {"save_dir": save_dir, "resume": "auto"}
    assert config.resume_arguments(again, task, FOLDER) == again, "and so on"
    assert not [word for word in again if "local-rank" in word], "another launcher's"


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "1"}
NODES = TORCHRUN | {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}


def test_what_was_typed_before_them(tmp_path, monkeypatch):
    (tmp_path / "torchrun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def said(orig_argv, **env):
        monkeypatch.setattr(sys, "orig_argv", orig_argv)
        monkeypatch.setattr(sys, "argv", ["my scripts/train.py", "har", "lr=1"])
        for name in NODES:
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return shlex.split(launch.typed_command())

    own = ["python3", "-X", "dev", "my scripts/train.py"]
    assert said([*own, "har", "lr=1"]) == own
    single = torchrun.parse_args(said([], **TORCHRUN)[1:])
    assert (single.standalone, single.nproc_per_node, single.training_script) == (True, "3", "my scripts/train.py")
    several = torchrun.parse_args(said([], **NODES)[1:])
    assert (several.standalone, several.nnodes, several.node_rank) == (False, "2", 1)
    assert (several.master_addr, several.master_port) == ("10.0.0.1", 1234)
    assert several.training_script == single.training_script
    monkeypatch.setenv("PATH", "")
    assert said([], **TORCHRUN)[:3] == [sys.executable, "-m", "torch.distributed.run"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "started", ["python", *(pytest.param(how, marks=pytest.mark.slow) for how in ("torchrun", "launcher under Slurm"))]
)
def test_the_printed_command_resumes_in_a_shell(launch, tmp_path, started):
    """Stopped after a step by itself, with a folder's name that a shell would take apart."""
    run = tmp_path / "it's  $HOME"
    words = [FAULTY, "fault.kind=term", "fault.step=5", "fault.rank=0", "epochs=1", "--save-dir", str(run)]
    words.append(f"fault.once={tmp_path / 'once'}")
    env = {COMMAND: None}
    if started == "python":
        done = launch.python("train.py", *words)
    elif started == "torchrun":
        done = launch.torchrun(1, "train.py", *words)
    else:
        srun = tmp_path / "bin" / "srun"
        srun.parent.mkdir()
        srun.write_text('#!/bin/sh\nwhile case $1 in --*) ;; *) false ;; esac; do shift; done\nexec "$@"\n')
        srun.chmod(0o755)
        env |= {"SLURM_STEP_NODELIST": "here", "SLURM_STEP_NUM_NODES": "1", "PYTHON": sys.executable}
        env |= {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{srun.parent}:/usr/bin:/bin"}
        done = launch("./train_multigpu.sh", "1", *words, **env)
    about = json.loads((run / "status.json").read_text())
    assert about["state"] == "stopped" and about["step"] < 6, done.err
    command = about["resume_command"]
    assert f"  resume with  {command}\n" in done.out
    assert command.startswith("srun --nodes=1 ") == (started == "launcher under Slurm")
    again = succeed(launch("bash", "-c", command, **env))
    assert f"Resuming {run}/" in again.out and json.loads((run / "status.json").read_text())["step"] == 6


def test_a_second_training_in_a_process_has_a_folder_for_its_loaders(monkeypatch):
    """The first one's is removed at its end; where it stayed the place for sockets, no batch ever came."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    for _ in range(2):
        scratch.own_scratch()
        assert os.path.isdir(multiprocessing.util.get_temp_dir())
        signals.cleanup()
    assert os.path.isdir(multiprocessing.util.get_temp_dir())
