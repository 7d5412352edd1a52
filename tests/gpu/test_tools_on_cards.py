"""Where the tools start their processes: what is decided from the number of GPUs and processes, and who asks."""

import argparse
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOY

import tasks
from engine import config, launch
from engine.errors import LockstepError
from tools import running
from tools.evidence import prove
from tools.machine import cards, doctor, tune
from tools.paper import study

PEOPLE = str(ROOT / "tests" / "tasks" / "people.py")


@pytest.fixture
def gpus(monkeypatch):
    """So many GPUs are visible to torch."""

    def show(number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return show


@pytest.mark.parametrize(
    ("visible", "processes", "backend", "settings"),
    [
        (0, 4, "auto", {}),  # on the CPU
        (1, 1, "auto", {}),
        (4, 4, "auto", {}),
        (1, 3, "auto", {"ddp.backend": "gloo"}),
        (2, 3, "gloo", {"ddp.backend": "gloo"}),
        (0, 4, "nccl", {}),  # the training says what is wrong
        (4, 4, "nccl", {}),
        (2, 3, "nccl", "NCCL needs a GPU for each of 3 processes, and 2 GPUs visible"),
    ],
)
def test_processes_share_where_there_are_fewer_gpus(visible, processes, backend, settings):
    if isinstance(settings, str):
        with pytest.raises(LockstepError, match=settings):
            cards.sharing(visible, processes, backend)
        return
    assert cards.sharing(visible, processes, backend) == settings
    assert cards.shares(visible, processes) is (0 < visible < processes)


@pytest.mark.parametrize(("visible", "processes"), [(1, 3), (2, 3), (3, 3)])
def test_a_process_that_is_started_so_has_a_gpu(gpus, visible, processes):
    """The engine's own choice, with these settings: the GPU of each rank, and gloo where they share it."""
    gpus(visible)
    settings = cards.sharing(visible, processes, "auto")
    cfg = config.parse([TOY, *(f"{key}={value}" for key, value in settings.items())], tasks.load).cfg
    envs = [launch.Environment(rank, rank, processes, processes, launched=True) for rank in range(processes)]
    devices = [launch.pick_device(cfg, env) for env in envs]
    assert devices == [torch.device("cuda", rank % visible) for rank in range(processes)]
    backend = launch.pick_backend(cfg, envs[0], devices[0], always=True)
    assert backend == ("gloo" if visible < processes else "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((0, False, 4, "auto"), "GPUs: none is visible, so nothing was tried of their kernels, TF32, and sums by NCCL"),
        ((2, False, 4, "cpu"), "GPUs: device=cpu was given, so nothing was tried of their kernels, TF32, and sums by"),
        ((1, True, 4, "auto"), "sums by NCCL: 4 processes share 1 GPU by gloo"),
        ((4, True, 4, "auto"), ""),
    ],
)
def test_what_a_proof_does_not_cover(given, words):
    text = cards.not_covered(*given)
    assert text.startswith(words) and bool(text) is bool(words)


@pytest.mark.parametrize(
    ("visible", "processes", "jobs", "places"),
    [
        (0, 2, 3, [[], [], []]),
        (4, 1, 4, [[0], [1], [2], [3]]),
        (4, 2, 2, [[0, 1], [2, 3]]),
        (2, 1, 3, [[0], [1], [0]]),  # as asked for with --jobs
        (1, 2, 1, [[0]]),
        (4, 3, 2, [[0, 1], [2, 3]]),
    ],
)
def test_each_job_has_gpus_of_its_own_as_long_as_there_are_enough(visible, processes, jobs, places):
    assert [cards.place(job, jobs, visible, processes) for job in range(jobs)] == places


def test_how_many_trainings_run_at_once():
    counts = [cards.jobs_for(*given) for given in ((0, 1), (1, 1), (4, 1), (4, 2), (4, 3), (1, 2))]
    assert counts == [1, 1, 4, 2, 1, 1]


def test_gpus_are_shown_by_the_names_that_they_have_here(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cards.showing([]) == {} and cards.showing([1, 0]) == {"CUDA_VISIBLE_DEVICES": "1,0"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa, 3,5")
    assert cards.showing([0]) == {"CUDA_VISIBLE_DEVICES": "GPU-aa"}
    assert cards.showing([1, 2]) == {"CUDA_VISIBLE_DEVICES": "3,5"}


# ---- the tools ask ---------------------------------------------------------------------------------------------------


def parsed(*words):
    return config.parse([*words], tasks.load).cfg


def asked(**options):
    return argparse.Namespace(
        **{"steps": 4, "seconds": 60.0, "processes": "1,2,4", "keep": "", "trust": False, "json": False} | options
    )


@pytest.mark.parametrize(("visible", "alone"), [(1, {1}), (2, {1, 2}), (4, {1, 2, 4}), (0, {1, 2, 4})])
def test_prove_starts_its_runs_on_the_gpus(gpus, monkeypatch, tmp_path, visible, alone):
    """Also the part of a run that is resumed on fewer processes."""
    gpus(visible)
    orders = []
    monkeypatch.setattr(prove, "started", lambda command, env, log: orders.append(env[launch.RESTART]))
    proof = prove.Proof(asked(), [TOY], parsed(TOY), tmp_path)
    for processes in (1, 2, 4):
        for leg, resumed_on in ((0, 0), (1, processes)):
            trial = prove.Trial("virtual", 4 if leg else processes, tmp_path / "run", killed=leg, after=resumed_on)
            proof._child(trial, leg, 0)
            assert ("gloo" not in orders[-1]) is (processes in alone), (processes, leg)
            assert '"device"' not in orders[-1], "it was the CPU, where there were fewer GPUs than processes"


def test_prove_refuses_what_nccl_cannot_do(gpus, tmp_path):
    gpus(1)
    with pytest.raises(LockstepError, match="NCCL needs a GPU for each of 4 processes, and 1 GPU visible"):
        prove.Proof(asked(), [TOY], parsed(TOY, "ddp.backend=nccl"), tmp_path)


@pytest.mark.parametrize(
    ("visible", "words", "more"),
    [
        (1, [TOY], ["ddp.backend=gloo"]),
        (1, [TOY, "device=cpu"], []),
        (1, [TOY, "ddp.backend=nccl"], []),
        (1, [TOY, "no=key"], []),
        (3, [TOY], []),
        (0, [TOY], []),
    ],
)
def test_the_doctors_processes_share_the_gpus(gpus, monkeypatch, visible, words, more):
    gpus(visible)
    commands = []
    monkeypatch.setattr(doctor.os, "execv", lambda program, command: commands.append(command))
    monkeypatch.setattr(doctor, "guarded", lambda *given, **named: 0)
    doctor.main(["--launch", "3", "--json", *words])
    ((*_, script, as_json), given) = commands[0][:6], commands[0][6:]
    assert as_json == "--json" and script == str(ROOT / "tools" / "doctor.py") and given == [*words, *more]


@pytest.mark.parametrize(("visible", "settings"), [(1, {"ddp.backend": "gloo"}), (2, {}), (0, {})])
def test_tune_tries_on_the_gpus(gpus, monkeypatch, visible, settings):
    gpus(visible)
    tried = []
    monkeypatch.setattr(tune, "probe", lambda words, settings, *more: tried.append(settings) or {})
    tuning = tune.Tuning(SimpleNamespace(processes=2, json=True), [TOY], parsed(TOY))
    row = tuning.tried({"batch_size": 4}, 1.0)
    assert tried == [row["settings"]] == [{"batch_size": 4} | settings], "and so does the result"


@pytest.mark.parametrize(
    ("visible", "options", "said", "places", "more"),
    [
        (2, [], "2 trainings at once on 2 GPUs, 1 GPU each", {"0", "1"}, []),
        (2, ["--jobs=1"], "", {"0"}, []),
        (1, ["--processes=2"], "of each training 2 processes share 1 GPU by gloo", {"0"}, ["ddp.backend=gloo"]),
        (2, ["--processes=2"], "", {"0,1"}, []),
        (0, [], "", {None}, []),
        (2, ["device=cpu"], "", {None}, []),
    ],
)
def test_the_trainings_of_a_study_are_on_the_gpus(gpus, monkeypatch, capfd, tmp_path, visible, options, said, places,
                                                  more):  # fmt: skip
    """One on each, unless it is told otherwise; and each test is where its training was."""
    gpus(visible)
    shown = []

    def run_script(words, processes, look, env=None):
        shown.append(((env or {}).get("CUDA_VISIBLE_DEVICES"), words))
        return running.Trained(0, "")

    monkeypatch.setattr(running, "run_script", run_script)
    monkeypatch.setattr(study, "run_script", run_script)
    study.main([PEOPLE, "--folds=3", "--out", str(tmp_path / "study"), *options])
    out = capfd.readouterr().out
    assert {place for place, _ in shown} <= places and shown
    assert all([word for word in words if word.startswith("ddp.backend")] == more for _, words in shown)
    lines = [line for line in out.splitlines() if "GPU" in line]
    assert lines == ([said] if said else [])
