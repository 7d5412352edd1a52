"""With virtual_workers a training ends in the same bits on any number of processes, and however it is interrupted."""

import copy
import json
import os
import signal
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TOY, launching, succeed
from saved import assert_same_bits, load
from test_the_idea import SMALL, SMALL_ACT, TERMS

import tasks
from engine import config
from engine.contract import sample_seeds, uniform

BITS = str(ROOT / "tests" / "ranks" / "bits.py")
NORMS = str(ROOT / "tests" / "tasks" / "norms.py")

CUTS = {4: [1, 2, 3], 6: [1, 4], 8: [1, 5]}
"""Processes of each number of virtual workers: blocks of one node of the tree and of several, of one size and not."""

GLOO = ((4, 2), (8, 5))
"""Cuts that sum through gloo alone, as between machines; the others through shared memory."""

CONV, PERCEPTRON, ATTENTION = ([NORMS, f"model.network={name}"] for name in ("conv", "perceptron", "attention"))
ACT = [word.replace("dropout=0", "dropout=0.1") for word in SMALL_ACT]
SMALL_BUCKETS = "ddp.bucket_cap_mb=0.002"

RUNS = {
    4: {
        "har": ["har", *SMALL["har"], "batch_size=5", "sampler=balanced"],
        "act": ["robot", *SMALL["robot"], *ACT, "global_batch=12", "sampler=balanced"],
        "conv": [*CONV, "batch_size=3", "amp=fp16", SMALL_BUCKETS],
        "more workers than samples": [*CONV, "global_batch=3"],
        "perceptron": [*PERCEPTRON, "global_batch=13", "drop_last=true"],
    },
    6: {
        "video": ["video", *SMALL["video"], "global_batch=12", "memory_format=channels_last"],
        "attention": [*ATTENTION, "global_batch=13", "amp=bf16", SMALL_BUCKETS],
        "perceptron": [
            *PERCEPTRON,
            "batch_size=2",
            "gradient_accumulation_steps=2",
            "sampler=balanced",
            "drop_last=true",
        ],
        "terms": [TERMS, "model.dropout=0.3", "global_batch=20", "batch_size=2"],
        "toy": [TOY, "model.dropout=0.3", "global_batch=20", "batch_size=2", "drop_last=true"],
    },
    8: {
        "vla": ["robot", *SMALL["robot"], "policy.type=vla", "global_batch=12"],
        "conv": [*CONV, "batch_size=1", "gradient_accumulation_steps=2"],
        "attention": [*ATTENTION, "global_batch=13", SMALL_BUCKETS],
        "more workers than samples": [*CONV, "global_batch=5", "amp=bf16"],
    },
}
"""61 samples of the toy task: the last batch of an epoch is short in every run that keeps it."""

COMMON = "steps=6 log_every=2 eval_every=4 seed=3 optim.ema_decay=0.9 optim.grad_clip=0.5".split()

BROKEN = {
    "flat": {"flat": "virtual_workers=8", "without virtual_workers": "virtual_workers=0"},
    "rank": {"rank": "virtual_workers=4"},
}
"""The words that tell bits.py what to break, and the runs that are broken so."""


def complete(words):
    return [*words, *COMMON, *([] if any(word.startswith("amp=") for word in words) else ["amp=off"])]


def train(processes, runs, *how):
    """All of `runs`, lists of arguments, in one group."""
    with launching() as launch:
        words = BITS, json.dumps(runs), *how
        succeed(launch.python(*words) if processes == 1 else launch.torchrun(processes, *words))


@pytest.fixture(scope="module")
def trained(once):
    def folder_of(workers):
        def build(folder):
            for processes in CUTS[workers]:
                backend = "gloo" if (workers, processes) in GLOO else "auto"
                more = [f"virtual_workers={workers}", f"ddp.backend={backend}"]
                runs = [[*complete(words), *more, f"save_dir={folder / str(processes) / name}"]
                        for name, words in RUNS[workers].items()]  # fmt: skip
                train(processes, runs)

        return once(f"same_bits_{workers}", build)

    return folder_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "processes", "name"),
    [(workers, n, name) for workers, cuts in CUTS.items() for n in cuts[1:] for name in RUNS[workers]],
)
def test_every_number_of_processes_ends_in_the_same_bits(trained, workers, processes, name):
    folder = trained(workers)
    assert load(folder / "1" / name)["progress"]["step"] >= 5
    assert_same_bits(folder / str(processes) / name, folder / "1" / name)


@pytest.mark.slow
def test_the_steps_are_those_of_a_run_without(launch, tmp_path):
    """In float64, where rounding is far below 1e-9; without BatchNorm and dropout, which see other passes."""
    words = ["train.py", TOY, "model.double=true", "global_batch=13", "sampler=balanced", *COMMON]
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    succeed(launch.torchrun(2, *words, "batch_size=2", "virtual_workers=5", f"save_dir={ours}"))
    succeed(launch.python(*words, "batch_size=13", f"save_dir={plain}"))
    for part in ("model", "ema"):
        for name, value in load(plain)[part].items():
            torch.testing.assert_close(load(ours)[part][name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.fixture(scope="module")
def broken(once):
    def build(folder):
        for how, runs in BROKEN.items():
            for processes in (1, 2):
                saved = {name: f"save_dir={folder / name / str(processes)}" for name in runs}
                train(processes, [[*complete(CONV), "global_batch=12", runs[name], saved[name]] for name in runs], how)

    return once("same_bits_broken", build)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for runs in BROKEN.values() for name in runs])
def test_the_same_check_is_red_for_other_rules(broken, name):
    """Today's cuts, a process that adds up its workers in a row, and random numbers by rank: else the test above could
    not have failed."""
    ours, straight = load(broken / name / "2"), load(broken / name / "1")
    assert ours["progress"]["step"] == straight["progress"]["step"] == 6
    assert not all(torch.equal(ours["model"][key], straight["model"][key]) for key in straight["model"])
    with pytest.raises(AssertionError):
        assert_same_bits(broken / name / "2", broken / name / "1")


def interrupt_thrice(launch, words, folder, processes, said, last, more=((), (), ())):
    """Start a run, and go on with it, on so many processes with `more` words: the plug is pulled, a rank is killed, and
    the third is stopped in good order, each as it says such a step."""
    kills = (
        lambda run: launch.signal_all(signal.SIGKILL),
        lambda run: os.kill(launch.rank_pid(1), signal.SIGKILL),
        lambda run: run.signal(signal.SIGTERM),
    )
    steps = []
    for count, step, own, kill in zip(processes, said, more, kills, strict=True):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        run = launch.start(sys.executable, *torchrun, *words, *own)
        run.wait_for(f"step {step}/")
        kill(run)
        assert run.wait().code
        steps.append(load(folder)["progress"]["step"])
    assert steps == sorted(set(steps)) and steps[0] > 0 and steps[-1] < last, "interrupted in the middle"


@pytest.mark.slow
def test_killed_and_resumed_on_other_numbers_of_processes(launch, tmp_path):
    """The plug is pulled on 3, a rank is killed on 4, 2 are stopped in good order, 1 ends the run: the bits, and the
    log, of the straight run on one. Dropout, running statistics, accumulation, short last steps; a checkpoint at every
    other step, while it trains."""
    words = ["train.py", *CONV, "global_batch=13", "batch_size=2", "amp=off", "virtual_workers=4"]
    words += [*COMMON[1:], "steps=60", "epochs=50", "save_every=2"]
    words[words.index("eval_every=4")] = "eval_every=10"
    folder = tmp_path / "run"
    interrupt_thrice(launch, [*words, f"save_dir={folder}"], folder, (3, 4, 2), (8, 20, 34), 60)
    succeed(launch.python(*words, f"save_dir={folder}"))
    succeed(launch.python(*words, f"save_dir={tmp_path / 'straight'}"))
    assert_same_bits(folder, tmp_path / "straight")


def test_running_statistics_of_a_step_are_the_mean_of_the_workers_that_have_samples(launch, tmp_path):
    """Five workers, three samples, one after the other through the network as it begins; to compare a number of
    processes with another cannot see who else was counted."""
    words = [*CONV, "virtual_workers=5", "global_batch=3", "steps=1", "seed=3", "amp=off", "model.double=true"]
    succeed(launch.python("train.py", *words, f"save_dir={tmp_path}"))
    task = tasks.load(NORMS)(config.parse(words, tasks.load).cfg)
    torch.manual_seed(3)
    (data, _), begins, found = task.datasets(), task.model(), []
    rows = np.random.default_rng((3, 0)).permutation(len(data))[:3].tolist()
    noise = uniform(sample_seeds(3, 0, torch.arange(3)), 8) * 0.01
    for row, each in zip(rows, noise, strict=True):
        net = copy.deepcopy(begins)
        net(data.__getitems__([row])["x"] + each)
        found.append(net.state_dict())
    ours = load(tmp_path)["model"]
    for name in ("layers.2.running_mean", "layers.2.running_var"):
        torch.testing.assert_close(ours[name], sum(state[name] for state in found) / 3)
    assert ours["layers.2.num_batches_tracked"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 50503])
def test_random_trainings(seed):
    """As grammar.py draws them for as long as asked: one of each kind."""
    import grammar

    assert grammar.draw(seed).kind == {0: "cuts", 1: "bits", 50503: "again"}[seed]
    grammar.try_one(seed)
