"""A run that stopped and was resumed is the run that never stopped."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from conftest import FAULTY, ROOT, TOY, killed_and_resumed, launching, succeed
from saved import assert_same, assert_same_run, load, logged

import tasks
from engine import config, errors, plan, resume
from engine.comm.world import World
from engine.data.fingerprint import Fingerprint
from engine.files.archive import CheckpointState


def saved_steps(path):
    return [entry["step"] for entry in json.loads((path / "manifest.json").read_text())["checkpoints"]]


HARD = "model.dropout=0.3 optim.ema_decay=0.9 batch_size=3 gradient_accumulation_steps=2 seed=4 log_every=4".split()
HARD.append("eval_batch_size=2")
"""Dropout, EMA, accumulation, augmentation; 61 samples: short last steps, with empty passes on two processes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "more"), [(1, ["amp=fp16", "eval_every=3"]), (2, ["num_workers=2", "save_every=2"])]
)
def test_stopped_anywhere_equals_straight(launch, tmp_path, processes, more):
    """SIGTERM to the last rank in the n-th forward pass of every start: in the first and the second half of an
    accumulation window, at the first and last step of an epoch, and once in a validation."""
    per_epoch = 2 * -(-61 // (6 * processes))  # forward passes
    last = f"fault.rank={processes - 1}"
    variants = [["fault.kind=term", f"fault.step={n}", last] for n in (2, 5, per_epoch - 1, per_epoch + 1)]
    variants += [["fault.kind=term in validation", f"fault.once={tmp_path / 'once'}", last]]
    words = [str(ROOT / "tests/ranks/stops.py"), str(tmp_path), json.dumps([FAULTY, *HARD, "epochs=2", *more])]
    words.append(json.dumps(variants))
    done = succeed(launch.torchrun(processes, *words) if processes > 1 else launch.python(*words))
    starts = dict(line.split()[1:] for line in done.out.splitlines() if line.startswith("STARTS"))
    assert starts["straight"] == "1" and int(starts["0"]) > 10 and starts["4"] == "2", starts
    for n in range(len(variants)):
        assert_same_run(tmp_path / str(n), tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("task", [[FAULTY], [str(ROOT / "tests/tasks/optimizers.py"), "own.optimizer=lion"]])
def test_killed_anywhere_equals_straight(launch, tmp_path, task):
    """SIGKILL to a real process at several moments, in the middle of background saves; its log beyond the checkpoint
    is taken back, a torn line is dropped. An own optimizer keeps float64 and whole numbers, in a tuple and in dicts."""
    words = [*task, *HARD, "epochs=18", "save_every=1", "eval_every=7"]
    succeed(launch.train(*words, f"save_dir={tmp_path / 'straight'}"))
    killed = tmp_path / "killed"

    def tear():
        assert load(killed)["progress"]["step"] < 198
        with open(killed / "metrics.jsonl", "a") as file:
            file.write('{"event": "train", "step": 99999, "time_s": 1}\n{"event": "train", "st')

    killed_and_resumed(launch, [*words, f"save_dir={killed}"], ["step 4/", "step 60/", "step 110/"], between=tear)
    assert_same_run(killed, tmp_path / "straight")
    assert not list(killed.glob(".*")), "no temporary file is left"


@pytest.mark.slow
def test_other_numbers_of_processes_continue_the_same_run(launch, tmp_path):
    """4 -> 2 -> 3 -> 1 in float64, mid-epoch: each epoch sees all samples once, each number is the straight run's."""
    seen = tmp_path / "seen"
    common = f"{FAULTY} global_batch=12 schedule.horizon=20 optim.ema_decay=0.9 dataset.samples=60 log_every=1 epochs=4"
    common += " eval_every=5 fault.kind=record fault.times=1000 fault.step=1 save_every=1 sampler=shuffle patience=3"

    def train(processes, folder, steps):
        argv = [*common.split(), f"steps={steps}", f"save_dir={tmp_path / folder}", f"fault.once={seen}_{folder}"]
        words = [str(ROOT / "tests/ranks/many.py"), json.dumps([argv])]
        succeed(launch.torchrun(processes, *words) if processes > 1 else launch.python(*words))

    train(1, "straight", 20)
    for processes, steps in ((4, 3), (2, 8), (3, 12), (1, 20)):
        train(processes, "moved", steps)
    order = [int(i) for line in Path(f"{seen}_straight.0").read_text().splitlines() for i in line.split()]
    assert [sorted(order[n : n + 60]) for n in range(0, 240, 60)] == [list(range(60))] * 4
    moved = [int(i) for path in tmp_path.glob("seen_moved.*") for i in path.read_text().split()]
    assert sorted(moved) == sorted(order), "each sample as often as in the straight run"
    steps = {line["step"]: line for line in logged(tmp_path / "moved") if line["event"] == "train"}
    evals = {line["step"]: line for line in logged(tmp_path / "moved") if line["event"] == "eval"}
    for line in logged(tmp_path / "straight"):
        other = (steps if line.pop("event") == "train" else evals)[line["step"]]
        del other["event"]
        assert other == pytest.approx(line, rel=1e-9), "loss, lr, gradient norm, metrics"
    a, b = load(tmp_path / "moved"), load(tmp_path / "straight")
    for part in ("model", "ema"):
        for name, value in b[part].items():
            torch.testing.assert_close(a[part][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_checkpoint_holds_the_batchnorm_statistics_of_all_ranks(launch, tmp_path):
    """Of the inputs, so that they depend on nothing but the samples: rank 0's alone would be others."""
    common = [FAULTY, "fault.kind=nan loss", "fault.step=1000", "global_batch=12", "dataset.samples=60"]
    common += ["schedule.horizon=4"]
    succeed(launch.train(*common, "steps=4", f"save_dir={tmp_path / 'one'}"))
    for steps in (2, 4):
        succeed(launch.train(*common, f"steps={steps}", f"save_dir={tmp_path / 'two'}", processes=2))
    one, two = (load(tmp_path / name)["model"]["norm.running_mean"] for name in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_patience_ends_a_run_and_is_the_same_after_a_stop(launch, tmp_path):
    common = [FAULTY, "lr=0.3", "epochs=50", "patience=2", "fault.rank=0", f"fault.once={tmp_path / 'once'}"]
    straight = succeed(launch.train(*common, f"save_dir={tmp_path / 'straight'}"))
    assert json.loads((tmp_path / "straight/status.json").read_text())["step"] < 300
    stopped = [*common, "fault.kind=term", "fault.step=9", f"save_dir={tmp_path / 'stopped'}"]
    assert launch.train(*stopped).code == 75
    succeed(launch.train(*stopped))
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")
    again = succeed(launch.train(*stopped))
    assert "Already complete" in again.out and "no better evaluation in the last 2; raise patience" in again.out
    assert "Done: " in straight.out


@pytest.mark.parametrize("kind", [pytest.param("raise in pictures", marks=pytest.mark.slow), "raise in validation"])
def test_an_evaluation_that_failed_is_made_again_and_stands_once(launch, tmp_path, kind):
    """It fails after the last step, before or after it was logged: the checkpoint holds that it is due, because the
    last epoch's weights may be the best. Garbage at the end of the log is no reason not to resume."""
    run, pictures = tmp_path / "run", kind == "raise in pictures"
    words = [FAULTY, f"fault.kind={kind}", "fault.rank=0", f"fault.once={tmp_path / 'once'}", "log_every=2"]
    words += [f"epochs={1 + pictures}"]
    assert launch.train(*words, f"save_dir={run}").code == 1
    before = load(run)["progress"]
    assert before["step"] == 6 and before["evaluation_due"] and before["best"] is None
    if pictures:
        with open(run / "metrics.jsonl", "ab") as file:
            file.write(b'5\n{"hello": 1}\n\xff\xfe')
    done = succeed(launch.train(*words, f"save_dir={run}"))
    assert "Resuming" in done.out and ("2 lines of" in done.err) is pictures
    times = [json.loads(line)["time_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert times == sorted(times), "the clock continues, too"
    succeed(launch.train(*words, f"save_dir={tmp_path / 'straight'}"))
    assert_same_run(run, tmp_path / "straight")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(launch, tmp_path):
    for name in ("one", "two"):
        succeed(launch.train(TOY, *HARD, "epochs=2", "deterministic=true", f"save_dir={tmp_path / name}"))
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    with launching() as launch:
        succeed(launch.train(TOY, "epochs=1", f"save_dir={folder}"))
    return folder


@pytest.fixture
def finished(one_epoch, tmp_path):
    """A run that is complete."""
    return shutil.copytree(one_epoch, tmp_path / "run", symlinks=True)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_started_again_changes_nothing(launch, finished):
    before = contents(finished)
    done = succeed(launch.train(TOY, "epochs=1", f"save_dir={finished}"))
    assert f"Already complete: {finished / 'best_model_epoch0.pt'} stands at step 6 of 6; raise epochs" in done.out
    assert "optimizer steps" not in done.out, "a plan of nothing"
    assert contents(finished) == before
    more = succeed(launch.train(TOY, "epochs=2", f"save_dir={finished}"))
    assert "Resuming" in more.out and load(finished)["progress"]["step"] == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lr=0.5", "optim.lr: 0.01 -> 0.5"),
        ("model.width=8", "model.width: 16 -> 8"),
        ("seed=1", "seed: 0 -> 1"),
        ("batch_size=6", "global batch: 12 -> 6"),
        ("dataset.samples=60", "dataset.samples: 61 -> 60; training samples: 61 -> 60"),
        ("resume=never", "resume=never, but the folder holds a run"),
        ("resume=nowhere.pt", "no checkpoint 'nowhere.pt'"),
        ("task=har", f"not the run of the checkpoint: task: {TOY} -> har ("),
    ],
)
def test_a_config_that_contradicts_the_checkpoint_is_refused(launch, finished, change, words):
    before = contents(finished)
    words_of_task = [] if change.startswith("task=") else [TOY]
    done = launch.train(*words_of_task, "epochs=2", change, f"save_dir={finished}")
    assert done.code == 2 and len(done.errors) == 1 and words in done.errors[0], done.err
    assert contents(finished) == before


OWN_DATA = """
from tests.tasks.toy import Task as Toy, Waves

class Task(Toy):
    def datasets(self):
        return Waves(61, SEED), Waves(23, 1)
"""


def test_other_data_of_the_same_size_are_refused(launch, tmp_path):
    task, run = tmp_path / "own.py", tmp_path / "run"
    task.write_text(OWN_DATA.replace("SEED", "0"))
    succeed(launch.train(str(task), "epochs=1", f"save_dir={run}"))
    before = contents(run)
    task.write_text(OWN_DATA.replace("SEED", "1000"))
    done = launch.train(str(task), "epochs=2", f"save_dir={run}")
    assert done.code == 2 and re.search(r"not the run of the checkpoint: other data \(train: ", done.errors[0]), (
        done.err
    )
    assert contents(run) == before


def foreign(finished, change):
    """The finished run's checkpoint, changed as another program might have, outside of any run."""
    state = load(finished)
    change(state)
    torch.save(state, finished.parent / "foreign.pt")
    return finished.parent / "foreign.pt"


FOREIGN = {
    # what another program's checkpoint is: how it differs, exit code, error
    "newer": (
        lambda state: state.update(format=4),
        3,
        "the checkpoint has format 4, this version reads 2 and 3 (PATH): update",
    ),
    "older": (
        lambda state: state.update(format=1),
        3,
        "has format 1, this version reads 2 and 3 (PATH): resume with the version",
    ),
    "of another optimizer": (
        lambda state: state.update(optimizer_name="SGD"),
        3,
        "the checkpoint's optimizer is SGD, not AdamW (PATH): change it back, or start a new run with init_from=PATH",
    ),
    "younger than a key": (
        lambda state: state["config"]["optim"].pop("beta2"),
        2,
        "beta2: 0.999 -> 0.9 (PATH): change",
    ),
    "without its progress": (
        lambda state: state.pop("progress"),
        3,
        "the checkpoint lacks progress (PATH): resume another one",
    ),
    "lacks a weight": (
        lambda state: state["model"].pop("layers.0.bias"),
        3,
        'Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "layers.0.bias"',
    ),
    "has one more": (
        lambda state: state["model"].update(head=torch.ones(1)),
        3,
        'Unexpected key(s) in state_dict: "head"',
    ),
    "has another shape": (
        lambda state: state["model"].update({"layers.0.bias": torch.ones(3)}),
        3,
        "size mismatch for layers.0.bias: copying a param with shape torch.Size([3]) from checkpoint",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_another_programs_checkpoint_is_refused_in_words(launch, finished, kind):
    change, code, words = FOREIGN[kind]
    path, new = foreign(finished, change), finished.parent / "new"
    beta = ["optim.beta2=0.9"] if code == 2 else []
    done = launch.train(TOY, "epochs=2", *beta, f"resume={path}", f"save_dir={new}")
    assert done.code == code and words.replace("PATH", str(path)) in done.err and str(path) in done.err, done.err
    assert ("the checkpoint is of another model: " in done.err) is kind.startswith(("lacks", "has"))
    assert len(done.errors) == 1 and not new.exists()
    if beta:
        assert "Resuming" in succeed(launch.train(TOY, "epochs=2", f"resume={path}", f"save_dir={new}")).out


def test_a_resumed_run_keeps_what_was_decided_for_it(launch, finished):
    """On a machine that would decide something else."""
    flips = {"precision": ("off", "bf16"), "memory_format": ("contiguous", "channels_last")}
    other = {name: pair[load(finished)[name] == pair[0]] for name, pair in flips.items()}
    path, new = foreign(finished, lambda state: state.update(other)), finished.parent / "new"
    succeed(launch.train(TOY, "epochs=2", f"resume={path}", f"save_dir={new}"))
    assert {name: load(new)[name] for name in other} == other


def test_names_as_a_ddp_wrapper_gives_them_are_understood(launch, finished):
    def prefix(state):
        state["model"] = {f"module.{name}": value for name, value in state["model"].items()}

    path, new = foreign(finished, prefix), finished.parent / "new"
    succeed(launch.train(TOY, "epochs=2", f"resume={path}", f"save_dir={new}"))
    succeed(launch.train(TOY, "epochs=2", f"save_dir={finished}"))
    assert_same(load(new)["model"], load(finished)["model"])


WRAPPED = """
from torch import nn
from tests.tasks.toy import Task as Toy

class Wrapped(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.module = net

    def forward(self, x):
        return self.module(x)

class Task(Toy):
    def model(self):
        return Wrapped(super().model())
"""


@pytest.mark.slow
@pytest.mark.parametrize("ema", ["0", "0.9"])
def test_a_module_of_the_models_own_is_no_wrapper(launch, tmp_path, ema):
    """A model may keep its network as `self.module`, the name that DDP and averages put before all others."""
    (tmp_path / "own.py").write_text(WRAPPED)
    words = [str(tmp_path / "own.py"), "schedule.horizon=12", f"optim.ema_decay={ema}"]
    for epochs, name in ((2, "straight"), (1, "run"), (2, "run")):
        succeed(launch.train(*words, f"epochs={epochs}", f"save_dir={tmp_path / name}"))
    assert_same_run(tmp_path / "run", tmp_path / "straight")
    scored = json.loads(succeed(launch.python("tools/evaluate.py", str(tmp_path / "run/last.pt"), "--json")).out)
    assert scored["metrics"]["loss"] == pytest.approx(logged(tmp_path / "run")[-1]["loss"], rel=1e-6)
    done = launch.train(*words, f"init_from={tmp_path / 'run'}", "--dry-run")
    assert "run: 4 of 4 loaded" in succeed(done).out


def test_force_resumes_all_the_same(launch, finished):
    done = succeed(launch.train(TOY, "epochs=2", "lr=0.005", "--force", f"save_dir={finished}"))
    assert "warning: --force: this is not the run of" in done.out and "optim.lr: 0.01 -> 0.005" in done.out
    assert load(finished)["progress"]["step"] == 12


def test_force_without_names_reaches_the_optimizer_too(launch, finished):
    """A checkpoint holds the decay in the optimizer's groups: those that train on have the one that is asked for."""
    words = ["train.py", TOY, "epochs=2", "weight_decay=0.5", "--force", f"save_dir={finished}"]
    succeed(launch.python(*words))
    assert {group["weight_decay"] for group in load(finished)["optimizer"]["param_groups"]} == {0.5, 0.0}
    changes = [line["change"] for line in logged(finished) if line["event"] == "changed"]
    assert "optim.weight_decay: 0.01 -> 0.5" in changes


def test_force_lets_the_keys_that_it_names_differ_and_no_other(launch, finished):
    """The rate and what a checkpoint holds in the optimizer's groups; the log tells both, once."""
    words = ["train.py", TOY, "lr=0.005", "weight_decay=0.5", "schedule.horizon=18", f"save_dir={finished}"]
    words += ["--force", "lr,optim.weight_decay", "--force=schedule.horizon"]
    before = contents(finished)
    done = launch.python(*words, "epochs=2", "seed=1")
    (error,) = done.errors
    assert done.code == 2 and "not the run of the checkpoint: seed: 0 -> 1 (" in error and contents(finished) == before
    assert error.endswith("or insist with --force optim.lr,optim.weight_decay,schedule.horizon,seed")
    done = succeed(launch.python(*words, "epochs=2"))
    assert "  optim.lr: 0.01 -> 0.005 from step 6 on\n" in done.out and "warning: --force" not in done.out
    assert {group["weight_decay"] for group in load(finished)["optimizer"]["param_groups"]} == {0.5, 0.0}
    assert "from step" not in succeed(launch.python(*words, "epochs=3")).out
    lines = logged(finished)
    assert [line["change"] for line in lines if line["event"] == "changed"] == [
        "optim.lr: 0.01 -> 0.005",
        "optim.weight_decay: 0.01 -> 0.5",
        "schedule.horizon: 6 -> 18",
    ]
    rates = {line["step"]: line["lr"] for line in lines if line["event"] == "train"}
    assert 0 < rates[12] < 0.005


def test_what_may_change_may(launch, finished):
    changes = "epochs=2 batch_size=6 global_batch=12 num_workers=1 log_every=1 ddp.bucket_cap_mb=1 wandb.name=x".split()
    succeed(launch.python("train_ddp.py", TOY, *changes, f"save_dir={finished}"))
    assert load(finished)["progress"]["step"] == 12


def test_optim_zero_ends_with_one_line_and_a_run_that_had_it_is_resumed_without(launch, finished):
    """A checkpoint holds whole moments, with `optim.zero` as without."""
    path = foreign(finished, lambda state: state["config"]["optim"].update(zero=True))
    words, new = [TOY, "epochs=2", f"resume={path}"], finished.parent / "new"
    done = launch.train(*words, "optim.zero=true", f"save_dir={new}")
    todo = "use ddp.strategy=fsdp, which shards moments, gradients and weights"
    assert done.code == 2 and not new.exists()
    assert done.errors == [f"error: optim.zero=true is no longer there (optim.zero): {todo}"]
    assert "Resuming" in succeed(launch.train(*words, f"save_dir={new}")).out
    succeed(launch.train(TOY, "epochs=2", f"save_dir={finished}"))
    ours, straight = load(new), load(finished)
    assert ours["progress"]["step"] == 12 and ours["config"]["optim"]["zero"] is False
    for part in ("model", "optimizer"):
        assert_same(ours[part], straight[part])


NUMPY = """
import numpy as np
from tests.tasks.toy import Task as Toy

class Task(Toy):
    def report(self, sums):
        return {"loss": np.float64(super().report(sums)["loss"])}
"""


def test_numpy_metrics_do_not_spoil_a_checkpoint(launch, tmp_path):
    """weights_only=True refuses NumPy's scalars: the run would end well and its checkpoints never be read again."""
    (tmp_path / "numpy_task.py").write_text(NUMPY)
    succeed(launch.train(str(tmp_path / "numpy_task.py"), "epochs=1", f"save_dir={tmp_path / 'run'}"))
    assert load(tmp_path / "run")["progress"]["best"] > 0


def test_amp_may_change_and_a_new_horizon_is_said(launch, finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    done = succeed(launch.train(TOY, "epochs=2", "amp=fp16", f"save_dir={finished}"))
    assert "the schedule now spans 12 steps instead of 6; schedule.horizon=6 keeps it as it was" in done.out
    assert load(finished)["scaler"]["scale"] > 0
    advice = re.search(r"schedule\.horizon=\d+", done.out)[0]
    done = succeed(launch.train(TOY, "epochs=2", advice, f"save_dir={copy}"))
    assert "Resuming" in done.out and "the schedule now spans" not in done.out
    assert load(copy)["horizon"] == 6 and load(copy)["progress"]["step"] == 12


@pytest.mark.parametrize(
    ("then", "now", "difference"),
    [
        ("epochs=1", "epochs=2", ""),  # longer, and so is the schedule: a note says so
        ("epochs=1", "epochs=2 schedule.horizon=6", ""),
        ("epochs=1 schedule.horizon=6", "epochs=1", ""),
        ("epochs=1 schedule.horizon=6", "epochs=2", "schedule.horizon: 6 -> 12"),
        ("epochs=1", "epochs=1 schedule.horizon=7", "schedule.horizon: 6 -> 7"),
    ],
)
def test_horizons_are_compared_by_what_they_come_to(capsys, then, now, difference):
    def planned(words):
        args = config.parse([TOY, "--force", *words.split()], tasks.load)
        return args, plan.make_plan(args.cfg, World(0, 0, 1, torch.device("cpu")), 61)

    (old, before), (new, after) = planned(then), planned(now)
    keys = config.to_dict(old.cfg) | {"gc_every": 100}  # of an older version: sets nothing
    saved = CheckpointState(Path("run/last.pt"), keys, horizon=before.horizon, data="same")
    saved = saved._replace(global_batch=before.global_batch, num_samples=before.num_samples)
    errors.set_up(main=True)
    found = resume.check_same_run(saved, new, tasks.load(TOY)(new.cfg), after, Fingerprint("same"))
    assert [*found.changes.values()] == ([difference] if difference else [])
    said = capsys.readouterr().out.splitlines()
    assert [text.partition("run/last.pt: ")[2] for text in said] == ([difference] if difference else [])


@pytest.mark.slow
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(launch, tmp_path):
    run, straight = tmp_path / "run", tmp_path / "straight"
    horizon = ["schedule.horizon=18"]
    succeed(launch.train(TOY, "epochs=3", *horizon, f"save_dir={straight}"))
    succeed(launch.train(TOY, "epochs=2", *horizon, f"save_dir={run}"))
    newest = Path(os.path.realpath(run / "last.pt"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    asked = launch.train(TOY, "epochs=3", *horizon, f"resume={newest}", f"save_dir={run}")
    assert (
        asked.code == 3 and "SHA-256" in asked.errors[0] and f"resume={run / 'best_model_epoch0.pt'}" in asked.errors[0]
    )
    done = succeed(launch.train(TOY, "epochs=3", *horizon, f"save_dir={run}"))
    assert f"warning: {newest} is damaged" in done.out and "resuming from best_model_epoch0.pt" in done.out
    for part in ("model", "optimizer"):
        assert_same(load(run)[part], load(straight)[part])
    assert logged(run) == logged(straight)


def test_two_runs_cannot_own_one_folder(launch, tmp_path):
    first = launch.start(sys.executable, "train.py", TOY, "epochs=100000", f"save_dir={tmp_path / 'run'}")
    first.wait_for("✓ Saved best model")
    second = launch.train(TOY, "epochs=100000", f"save_dir={tmp_path / 'run'}")
    assert second.code == 2 and f"another run owns this folder: process {first.process.pid} on " in second.errors[0]
    first.signal(signal.SIGTERM)
    assert first.wait().code == 75, "the first one continued undisturbed"


WITHOUT_LOCKS = """
import errno, fcntl, os, sys
def no_locks(*how):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
fcntl.lockf = no_locks
import train
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_runs_cannot_own_one_folder_of_a_disk_without_locks(launch, tmp_path):
    """As Lustre mounted without flock. What a killed run leaves behind stops nobody on its own machine."""
    lock = tmp_path / "run/run.lock"
    words = [TOY, "device=cpu", f"save_dir={tmp_path / 'run'}"]
    first = launch.start(sys.executable, "-c", WITHOUT_LOCKS, *words, "epochs=100000")
    first.wait_for("✓ Saved best model")
    second = launch.python("-c", WITHOUT_LOCKS, *words, "epochs=100000")
    assert second.code == 2 and f"another run owns this folder: process {first.process.pid} on " in second.errors[0]
    first.signal(signal.SIGKILL)
    first.wait()
    assert f"process {first.process.pid} on " in lock.read_text()
    other = ["-c", WITHOUT_LOCKS, TOY, "device=cpu", f"save_dir={tmp_path / 'other'}"]
    third = succeed(launch.python(*other, "epochs=1"))
    assert "other has no locks, so runs on other machines are not seen: one run at a time may use" in third.err
    assert (tmp_path / "other/run.lock").read_text() == "", "a run that has ended names nobody"
    (tmp_path / "other/run.lock").write_text("process 1 on elsewhere, started 2020-01-01 00:00:00\n")
    fourth = succeed(
        launch.python("-c", WITHOUT_LOCKS, TOY, "device=cpu", "epochs=2", f"save_dir={tmp_path / 'other'}")
    )
    assert "run.lock names process 1 on elsewhere, started 2020-01-01 00:00:00: make sure" in fourth.err
    succeed(launch.python("-c", WITHOUT_LOCKS, *words, "epochs=1", "--force"))


def test_a_full_disk_keeps_the_older_checkpoint(launch, finished):
    """A file size limit stands in for the disk: the write fails in the middle, with torch's error about positions."""
    before = Path(os.path.realpath(finished / "last.pt")).read_bytes()
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000)); "
        "import train; sys.exit(train.main(sys.argv[1:]))"
    )
    done = launch.python("-c", limited, TOY, "epochs=3", f"save_dir={finished}")
    assert done.code == 3 and "the checkpoint could not be written" in done.errors[0], done.err
    assert "warning: the checkpoint could not be written: File too large" in done.out, "said when it happened"
    assert json.loads((finished / "status.json").read_text())["exit_code"] == 3
    assert Path(os.path.realpath(finished / "last.pt")).read_bytes() == before
    assert not list(finished.glob(".*")), "no temporary file is left"
    assert "Resuming" in succeed(launch.train(TOY, "epochs=3", f"save_dir={finished}")).out


OLD = ROOT / "tests" / "data" / "run_of_3205ab3"
"""Seven of twelve steps, in float64 with an average of weights, by the commit before train.py became the page."""

AS_RECORDED = f"""
import numpy as np
import torch
from tests.tasks import toy
START = {{name: torch.from_numpy(a) for name, a in np.load({str(ROOT / "tests/data/start_of_3205ab3.npz")!r}).items()}}
class Task(toy.Task):
    def datasets(self):
        sets = super().datasets()
        for samples, name in zip(sets, ("train", "val")):
            torch.testing.assert_close(samples.y, START[name], rtol=1e-12, atol=1e-12)
            samples.y = START[name]
        return sets
    def model(self):
        net = super().model()
        for name, weight in net.state_dict().items():
            torch.testing.assert_close(weight, START[name].double(), rtol=1e-5, atol=1e-7)
            weight.copy_(START[name])
        return net
"""
"""The toy task with the targets and the first weights that the recorded run had. On another processor their last bits
are others: the fingerprint of the data has those of a matrix product, and weights are drawn in float32."""


@pytest.mark.slow
def test_a_run_of_before_the_page_is_resumed(launch, tmp_path):
    """Rounding apart: it was begun on another processor."""
    old, straight = tmp_path / "old", tmp_path / "straight"
    shutil.copytree(OLD, old)
    task = tmp_path / "tests/tasks/toy.py"  # in this folder the task's name is the recorded one
    task.parent.mkdir(parents=True)
    task.write_text(AS_RECORDED)
    words = ["tests/tasks/toy.py", "model.double=true", "amp=off", "optim.ema_decay=0.9", "epochs=2", "eval_every=30"]
    script = str(ROOT / "train.py")
    done = succeed(launch.torchrun(2, script, *words, "global_batch=12", f"save_dir={old}", cwd=tmp_path))
    assert f"Resuming {old}/" in done.out and "step 7, epoch 2" in done.out
    succeed(launch.python(script, *words, f"save_dir={straight}", cwd=tmp_path))
    ours, theirs = (torch.load(folder / "last.pt", weights_only=True) for folder in (old, straight))
    assert ours["progress"]["step"] == theirs["progress"]["step"] == 12
    assert ours["data"] == theirs["data"] == "1fdb1e63ba6a", "as recorded"
    for part in ("model", "ema"):
        for name, value in theirs[part].items():
            torch.testing.assert_close(ours[part][name], value, rtol=1e-9, atol=1e-9)


IMPATIENT = """
from engine.files import writer
from tests.tasks import toy
writer.LOST_S, writer.SHARE = {lost}, 1e-9
class Task(toy.Task):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "more", "steps"),
    [(1e9, "", [3, 12]), (0.0, "", [3, 6, 9, 12]), (1e9, "save_every=4 save_minutes=1e-6", [4, 8, 12])],
    ids=["seldom", "often", "save_every"],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_ends_of_epochs_are_saved_by_time_unless_save_every_says_more(
    launch, tmp_path, processes, lost, more, steps
):
    """By the clock of rank 0, and the last step in any case; evaluations are at other times here."""
    (tmp_path / "own.py").write_text(IMPATIENT.format(lost=lost))
    words = [str(tmp_path / "own.py"), "global_batch=24", "dataset.samples=72", "epochs=4", "eval_every=1000"]
    words += ["keep_checkpoints=99", *more.split(), f"save_dir={tmp_path / 'run'}"]
    succeed(launch.train(*words, processes=processes))
    assert saved_steps(tmp_path / "run") == steps


KILLED_ONCE_SAVED = """
import json, os, signal, time
from pathlib import Path
from engine.files import writer
from tests.tasks import toy
writer.SHARE = 1e9
class Task(toy.Task):
    calls = 0
    def loss(self, net, batch):
        self.calls += 1
        seen, until = os.environ.get("SEEN"), time.monotonic() + 60
        while self.calls == 30 and os.environ["RANK"] == "0" and seen and time.monotonic() < until:
            manifest = Path(self.cfg.save_dir, "manifest.json")
            if manifest.exists() and json.loads(manifest.read_text())["checkpoints"][-1]["step"] > int(seen):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
        return super().loss(net, batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "processes"), [("virtual_workers=3", (2, 3, 1)), ("", (2, 2, 2))], ids=["virtual workers", "one cut"]
)
def test_a_kill_within_an_epoch_repeats_minutes_of_it(launch, tmp_path, more, processes):
    """Killed twice within the first epoch, and ended: the bits and numbers of a run that is saved at its end."""
    own, run = tmp_path / "own.py", tmp_path / "run"
    own.write_text(KILLED_ONCE_SAVED)
    words = [str(own), "global_batch=6", "batch_size=1", "dataset.samples=255", "epochs=1", "log_every=4"]
    words += ["optim.ema_decay=0.9", "model.dropout=0.3" if more else "model.dropout=0", *more.split()]
    straight = [*words, "save_minutes=0", f"save_dir={tmp_path / 'straight'}"]
    succeed(launch.torchrun(processes[-1], "train.py", *straight))
    assert saved_steps(tmp_path / "straight") == [43], "no clock within an epoch"
    words += ["save_minutes=1e-6", f"save_dir={run}"]
    seen, steps = 0, []
    for count in processes[:-1]:
        assert launch.torchrun(count, "train.py", *words, SEEN=str(seen)).code
        steps.append(seen := saved_steps(run)[-1])
    done = succeed(launch.torchrun(processes[-1], "train.py", *words))
    assert 0 < steps[0] < steps[1] < 43 and f"step {steps[1]}, epoch 1" in done.out
    assert_same_run(run, tmp_path / "straight")
