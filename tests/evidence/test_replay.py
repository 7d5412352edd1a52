"""tools/replay.py: steps of real runs are taken again; what was changed in a run is found and named."""

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, TOY, succeed
from forked_tools import fork_trainings
from runs import records
from tampering import (
    change_checkpoint,
    change_line,
    checkpoint_at,
    contents,
    copied,
    delete_checkpoint,
    delete_checkpoints,
    drop_digests,
    keep_checkpoint,
    keep_lines,
    log_of,
    replace_text,
    write_log,
)

from engine import errors
from tools import running
from tools.evidence import replay as tool
from tools.use import evaluate

RUN = {"steps": 24, "log_every": 4, "save_every": 12, "eval_every": 12, "virtual_workers": 4, "global_batch": 8}
RUN |= {"digest_every": 1, "keep_checkpoints": 9, "device": "cpu", "model.dropout": 0.2, "amp": "off"}


def words(folder, task=TOY, **changes):
    settings = RUN | {name.replace("__", "."): value for name, value in changes.items()} | {"save_dir": folder}
    return [str(task), *(f"{name}={value}" for name, value in settings.items())]


@pytest.fixture
def original(launch, once):
    """A run on two processes, with checkpoints at steps 12 and 24: nobody may write there."""
    return once("replayed", lambda folder: succeed(launch.train(*words(folder), processes=2)))


@pytest.fixture
def run(original, tmp_path):
    """A copy, to be changed."""
    return copied(original, tmp_path / "run")


@pytest.fixture
def replay(launch, monkeypatch, capfd):
    """The tool in this process. Return the exit code, the result, and what was printed for a person."""
    fork_trainings(launch, monkeypatch)

    def call(*words):
        capfd.readouterr()
        code = tool.main([*map(str, words), "--json"])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else None, err

    return call


def change_config(run, **settings):
    tree = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(tree | settings))


def remove_line(run, step, event="train"):
    keep_lines(run, lambda line: (line["event"], line["step"]) != (event, step))


def flip_a_bit(state):
    state["model"]["layers.0.weight"].view(torch.int32)[3, 5] ^= 1


@pytest.mark.slow
def test_every_step_of_a_run_again(original, replay, tmp_path):
    before = contents(original)
    code, found, err = replay(original, "--jobs", 2, "--processes", 1, "--out", tmp_path / "out.json")
    assert code == 0, err
    lines = [*records(original, "train"), *records(original, "eval")]
    assert found["points"] == found["equal"] == len(lines) + 2, "and a state at either checkpoint"
    assert (found["from"], found["to"], found["verdict"], found["processes"]) == (0, 24, "same bits", 1)
    assert found["whole_run"] and found["digest"] == records(original, "train")[-1]["digest"]
    assert [part["state"] for part in found["stretches"]] == [True, True] and found["first_difference"] is None
    assert json.loads((tmp_path / "out.json").read_text()) == found
    assert "this proves the whole run" in err and re.search(r"^  code +the same: ", err, re.M)
    assert contents(original) == before, "the run's folder is only read"


class Changed(NamedTuple):
    """A change of a run, and what is found: equal points of all, the first step that differs, and in what."""

    change: Callable
    options: list[str]
    equal: int
    points: int
    step: int
    name: str


def flip_a_weight(run):
    change_checkpoint(checkpoint_at(run, 12), flip_a_bit)


CHANGED = {
    "bit of a weight": Changed(flip_a_weight, ["--to", "12"], 4, 5, 12, "model/layers.0.weight"),
    "and what follows from it": Changed(flip_a_weight, ["--step", "16"], 0, 1, 16, "digest"),
    "number in the log": Changed(
        lambda run: change_line(run, 8, lambda line: line.update(loss=line["loss"] * (1 + 1e-15))),
        ["--to", "12"], 4, 5, 8, "loss",
    ),
    "of an evaluation": Changed(
        lambda run: change_line(run, 12, lambda line: line.update(count=22), "eval"),
        ["--to", "12"], 4, 5, 12, "count",
    ),
    "progress": Changed(
        lambda run: change_checkpoint(checkpoint_at(run, 12), lambda state: state["progress"].update(samples=99)),
        ["--to", "12"], 4, 5, 12, "progress/samples",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_what_was_changed_in_a_run_is_named(run, replay, name):
    case = CHANGED[name]
    case.change(run)
    code, found, err = replay(run, *case.options)
    assert code == 1 and found["verdict"] == "differs" and not found["whole_run"], err
    assert (found["equal"], found["points"]) == (case.equal, case.points)
    first = found["first_difference"]
    assert (first["step"], first["differences"][0]["name"]) == (case.step, case.name)
    assert f"step {case.step}, " in err and case.name in err


@pytest.mark.slow
def test_another_learning_rate_in_the_config_is_named_although_the_steps_are_the_same(run, replay):
    replace_text(run / "config.yaml", "  lr: 0.01\n", "  lr: 0.011\n")
    code, found, err = replay(run, "--to", 12)
    assert code == 1 and found["verdict"] == "differs" and found["equal"] == found["points"] == 5
    assert found["first_difference"] == {"what": "config.yaml", "name": "optim.lr", "run": 0.01, "replay": 0.011}
    assert "optim.lr=0.011 (best_model_epoch1.pt: 0.01)" in err


OWN = """
import sys
import numpy as np
import torch
sys.path.append({tests!r})
import toy

class Task(toy.Task):
    def datasets(self):
        train, val = super().datasets()
        train.x = torch.from_numpy(np.load({data!r}))
        train.digest = {digest!r}
        return train, val
"""


@pytest.mark.slow
@pytest.mark.parametrize(("sample", "seen"), [(0, "fingerprint"), (7, "digest")])
def test_a_changed_sample_is_found(launch, replay, tmp_path, sample, seen):
    """One that the fingerprint covers, before a step is taken; another by the first step whose batch has it:
    of a dataset whose own digest hides the change."""
    task, data, folder = tmp_path / "own.py", tmp_path / "x.npy", tmp_path / "run"
    task.write_text(OWN.format(tests=str(ROOT / "tests/tasks"), data=str(data), digest="v1" * (seen == "digest")))
    x = np.random.default_rng(0).normal(size=(61, 8))
    np.save(data, x)
    succeed(launch.train(*words(folder, task, log_every=1, steps=8)))
    x[sample, 3] += 1e-3
    np.save(data, x)
    code, found, err = replay(folder)
    assert code == 1 and found["verdict"] == "differs"
    if seen == "fingerprint":
        assert found["points"] == 0 and found["first_difference"]["what"] == "data"
        assert re.search(r"^  data +fingerprint \w{12} in .*other data", err, re.M)
    else:
        succeed(launch.train(*words(tmp_path / "truth", task, log_every=1, steps=8)))
        logs = [records(each, "train") for each in (folder, tmp_path / "truth")]
        first = next(a["step"] for a, b in zip(*logs, strict=True) if a["digest"] != b["digest"])
        assert found["first_difference"]["step"] == first and found["equal"] == first - 1, err
        assert found["first_difference"]["differences"][0]["name"] == "digest"
        assert re.search(r"^  data +the same", err, re.M)


@pytest.mark.slow
def test_a_step_without_a_line_is_proven_by_the_next(original, launch, replay, tmp_path):
    code, found, err = replay(original, "--step", 17, "--keep", tmp_path / "kept")
    assert code == 0 and (found["from"], found["to"], found["points"]) == (12, 20, 2), err
    assert "Step 17 has no line in the log" in err
    succeed(launch.train(*words(tmp_path / "truth", log_every=1)))
    truth = {line["step"]: line["digest"] for line in records(tmp_path / "truth", "train")}
    assert found["stretches"][0]["digest_at_step"] == truth[17] and found["digest"] == truth[20]
    assert [path.name for path in (tmp_path / "kept").iterdir() if path.is_dir()] == ["steps_12_to_20"]


@pytest.mark.slow
def test_lines_that_a_log_lacks_are_said(run, replay):
    """With other lines the means are over other steps, but the digests and the norms are still compared."""
    remove_line(run, 4)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"event": "tra')  # torn
    code, found, err = replay(run, "--to", 12)
    assert code == 0 and found["equal"] == found["points"] == 4, err
    assert "the run's log lacks 1 line, the first of step 4" in err
    assert found["stretches"][0]["left_out"] == "progress/epoch_totals, tally"


@pytest.mark.slow
def test_means_over_other_steps_are_not_compared(run, replay):
    """As where log_every was changed on the way: of a line that begins elsewhere only what is of its own step."""
    change_checkpoint(checkpoint_at(run, 12), lambda state: state["config"].update(log_every=2))
    code, found, err = replay(run, "--to", 12)
    assert code == 0 and found["equal"] == found["points"] == 5, err
    assert found["stretches"][0]["missing"] == [2, 6, 10]


def test_the_shares_of_machines_are_all_stretches(run, replay, monkeypatch):
    taken = []

    def judged(taker, anyway, stretch):
        taken.append((stretch.start, stretch.to))
        about = {"from": stretch.start, "to": stretch.to, "points": 1, "equal": 1, "verdict": "same bits"}
        return about | {"text": "", "digest": "", "first_difference": None}

    monkeypatch.setattr(tool, "_judged", judged)
    for share in ("1/2", "2/2"):
        code, found, _ = replay(run, "--stretch", share)
        assert code == 0 and found["share"] == share and not found["whole_run"]
    assert taken == [(0, 12), (12, 24)]
    code, found, _ = replay(run, "--write")
    assert json.loads((run / "replay.json").read_text()) == found


@pytest.mark.slow
def test_a_run_that_was_stopped_before_an_evaluation(run, replay):
    before = torch.load(checkpoint_at(run, 12), weights_only=True)["progress"]
    held = {name: before[name] for name in ("best", "stale")} | {"evaluation_due": True}
    change_checkpoint(checkpoint_at(run, 24), lambda state: state["progress"].update(held))
    remove_line(run, 24, "eval")
    code, found, err = replay(run, "--from", 12)
    assert code == 0 and found["points"] == 4 and not found["stretches"][0]["missing"], err
    assert found["stretches"][0]["left_out"] == (
        "progress/best, progress/ended, progress/evaluation_due, progress/plateau, progress/stale, scheduler, task"
    )


@pytest.mark.slow
def test_a_run_that_had_optim_zero_is_scored_and_replayed(run, replay, capfd):
    """Its config.yaml and its checkpoints have a key that is an error in a new run."""
    replace_text(run / "config.yaml", "  zero: false\n", "  zero: true\n")
    for step in (12, 24):
        change_checkpoint(checkpoint_at(run, step), lambda state: state["config"]["optim"].update(zero=True))
    code, found, err = replay(run, "--to", 12)
    assert code == 0 and found["equal"] == found["points"] == 5, err
    assert evaluate.main([str(run)]) == 0
    assert evaluate.main([str(run), "optim.zero=true"]) == 2
    assert "error: optim.zero=true is no longer there (optim.zero): use ddp.strategy=fsdp" in capfd.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_names_no_program_to_run(run, replay, tmp_path):
    """Only the task of config.yaml was checked, see `of_run`."""
    (tmp_path / "planted").mkdir()
    (planted := tmp_path / "planted" / "toy.py").write_text("raise SystemExit('run')")
    change_checkpoint(checkpoint_at(run, 12), lambda state: state["config"].update(task=str(planted)))
    code, _, err = replay(run, "--to", 12)
    assert code == 0, err


@pytest.mark.slow
def test_without_a_digest_or_a_checkpoint_nothing_is_known_of_the_bits(run, replay):
    drop_digests(run)
    delete_checkpoints(run)
    code, found, err = replay(run, "--to", 8)
    assert code == 7 and found["verdict"] == "not known" and not found["whole_run"], err
    assert found["equal"] == found["points"] == 2 and found["to"] == 8, "no later step has bits to compare, either"
    assert "at step 8 no bits of the weights could be compared (digests, checkpoints): there are none" in err


@pytest.mark.slow
def test_a_step_is_proven_by_the_next_that_has_bits(run, replay):
    """The line of step 8 has numbers alone: those of the checkpoint of step 12 are needed."""
    change_line(run, 8, lambda line: line.pop("digest"))
    code, found, err = replay(run, "--step", 8)
    assert code == 0 and found["to"] == 12 and found["stretches"][0]["state"], err
    assert "Step 8 has no digest of the weights: it is proven by the next that has, of step 12" in err


@pytest.mark.slow
def test_a_run_whose_end_is_not_recorded_is_not_proven_whole(run, replay):
    """The last lines of its log are gone, and its last checkpoint."""
    keep_checkpoint(run, 12)
    keep_lines(run, lambda line: line["step"] <= 12)
    code, found, err = replay(run)
    assert code == 7 and found["verdict"] == "not known" and found["equal"] == found["points"] == 5, err
    assert not found["whole_run"] and "this proves" not in err
    assert "status.json has step 24: of the last 12 steps the run has no record" in err
    code, found, err = replay(run, "--to", 12)
    assert code == 0 and found["verdict"] == "same bits", "of these there is a record"


@pytest.mark.parametrize("ended", [running.Trained(-9, ""), running.Trained(75, "Stopped"), running.Trained(1, "x")])
def test_a_replay_that_was_ended_shows_no_other_numbers(run, replay, monkeypatch, ended):
    monkeypatch.setattr(tool, "train_in", lambda *words, **how: ended)
    code, found, err = replay(run, "--to", 12)
    assert code == 7 and found is None and "steps 0 to 12 could not be taken: " in err, err


def test_a_replay_that_ended_before_is_not_known(run, original, replay, monkeypatch):
    """It has written some of the lines, and no checkpoint of the last step."""

    def train_in(folder, words, *more, **how):
        folder.mkdir()
        write_log(folder, [line for line in log_of(original) if line["step"] <= 8])
        return running.Trained(0, "")

    monkeypatch.setattr(tool, "train_in", train_in)
    code, found, err = replay(run, "--to", 12)
    assert code == 7 and found["verdict"] == "not known" and found["points"] == 2, err
    assert "at step 12 no bits of the weights could be compared (digests, checkpoints): the last are of step 8" in err


class Refused(NamedTuple):
    says: str
    options: list[str] = []
    change: Callable = lambda run: None
    code: int = 2


def with_own_task(run):
    shutil.copy(TOY, run / "toy.py")
    change_config(run, task=str(run / "toy.py"))


def without_checkpoints_and_log(run):
    for path in [*run.glob("*.pt"), run / "metrics.jsonl"]:
        path.unlink()


REFUSED = [
    Refused("step 25 (command line): the run has recorded steps 0 to 24", ["--step", "25"]),
    Refused("steps 8 to 8", ["--from", "8", "--to", "8"]),
    Refused("--step and --to", ["--step", "8", "--to", "9"]),
    Refused("5 processes with virtual_workers=4 (--processes): give 4 at most", ["--processes", "5"]),
    Refused("--jobs 0", ["--jobs", "0"]),
    Refused("--stretch 3/2", ["--stretch", "3/2"]),
    Refused("fewer stretches than shares", ["--stretch", "3/3"]),
    Refused("is not empty (--keep)", ["--keep", str(ROOT / "docs")]),
    Refused("nowhere/out.json cannot be written (--out)", ["--out", "nowhere/out.json"]),
    Refused("optim.lir", ["optim.lir=1"]),
    Refused(
        " processes, and others add up in another order",
        ["--processes", "1"],
        lambda run: change_config(run, virtual_workers=0),
    ),
    Refused(
        "the checkpoint is damaged: No such file or directory",
        change=lambda run: checkpoint_at(run, 12).unlink(),
        code=3,
    ),
    Refused(
        "the checkpoint is damaged: SHA-256 is",
        change=lambda run: checkpoint_at(run, 24).write_bytes(b"no"),
        code=3,
    ),
    Refused("the run's task is a program in its own folder", change=with_own_task),
    Refused("no run at", change=lambda run: shutil.rmtree(run) or run.mkdir()),
    Refused("damaged: No such file or directory", change=without_checkpoints_and_log, code=3),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.says)
def test_bad_input_is_one_line_before_a_step_is_taken(run, monkeypatch, case, capfd):
    monkeypatch.setattr(tool, "train_in", None)
    case.change(run)
    before = contents(run)
    assert tool.main([str(run), *case.options, "--json"]) == case.code
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert not out and len(lines) == 1 and case.says in lines[0], err
    assert contents(run) == before


@pytest.mark.slow
def test_a_run_that_is_still_running_is_left_alone(launch, replay, tmp_path):
    folder = tmp_path / "run"
    going = launch.start(sys.executable, "train.py", *words(folder, steps=100000))
    going.wait_for("step 12/")
    code, _, err = replay(folder)
    going.signal(signal.SIGTERM)
    assert code == 2 and "the run is still running: process " in err
    assert going.wait().code == errors.STOPPED


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.01, 0.0101])
def test_on_another_machine_the_verdict_is_about_rounding(launch, replay, tmp_path, lr):
    """Other CPU instructions are real, in the run; a learning rate that is off by a percent is no rounding."""
    folder = tmp_path / "run"
    succeed(launch.train(*words(folder, model__width=256, optim__lr=lr), ATEN_CPU_CAPABILITY="default"))
    for step in (12, 24):
        change_checkpoint(checkpoint_at(folder, step), lambda state: state["config"]["optim"].update(lr=0.01))
    replace_text(folder / "config.yaml", f"lr: {lr}\n", "lr: 0.01\n")
    code, found, err = replay(folder, "--to", 12)
    assert re.search(r"^  machine +CPU instructions DEFAULT -> .*the verdict is about rounding", err, re.M)
    assert code == 1 and found["equal"] < found["points"], err
    assert found["verdict"] == ("rounding" if lr == 0.01 else "differs"), err


@pytest.mark.slow
def test_the_square_root_of_an_older_version_explains_rounding(run, replay):
    """A checkpoint without the entry is of a version that took torch's; one bit of a weight stands for its rounding."""
    for step in (12, 24):
        change_checkpoint(checkpoint_at(run, step), lambda state: state["environment"].pop("square root"))
    change_checkpoint(checkpoint_at(run, 12), flip_a_bit)
    code, found, err = replay(run, "--to", 12)
    assert re.search(
        r"^  machine +square root torch's -> correctly rounded: .*the verdict is about rounding", err, re.M
    )
    assert code == 1 and found["verdict"] == "rounding", err


@pytest.mark.slow
def test_a_run_that_was_killed_and_resumed_on_other_numbers(launch, replay, tmp_path):
    folder = tmp_path / "run"
    for processes, at in ((4, 10), (2, 26), (3, 0)):
        done = running.train_in(folder, words(folder, steps=40, save_every=8)[:-1], processes, kill_at=at)
        assert done.code == (-signal.SIGKILL if at else 0), done.text
    code, found, err = replay(folder, "--jobs", 2, "--processes", 1)
    assert code == 0 and found["whole_run"] and found["to"] == 40, err
    assert len(found["stretches"]) >= 5 and all(part["state"] for part in found["stretches"])


@pytest.mark.slow
def test_without_virtual_workers_the_runs_own_number_has_its_bits(launch, replay, tmp_path):
    folder = tmp_path / "run"
    succeed(launch.train(*words(folder, virtual_workers=0), processes=2))
    code, found, err = replay(folder, "--from", 12)
    assert code == 0 and found["processes"] == 2, err


@pytest.fixture
def restarted(once):
    """A run without virtual workers that is stopped after step 12 and continued from there on two processes."""

    def build(folder):
        for processes, steps in ((1, 12), (2, 24)):
            own = words(folder, steps=steps, virtual_workers=0, save_every=4, model__dropout=0)[:-1]
            done = running.train_in(folder, [*own, "schedule.horizon=24"], processes)
            assert done.code == 0, done.text

    return once("restarted", build)


@pytest.mark.slow
def test_each_stretch_is_taken_on_the_processes_that_it_had(restarted, replay):
    assert json.loads((restarted / "environment.json").read_text())["starts"] == [[0, 1], [12, 2]]
    code, found, err = replay(restarted)
    assert code == 0 and [part["processes"] for part in found["stretches"]] == [1, 1, 1, 2, 2, 2], err


@pytest.mark.slow
def test_a_stretch_with_a_start_on_other_processes_is_not_judged(restarted, replay, tmp_path):
    """Without the checkpoint of that start, no number of processes takes the steps of the stretch."""
    folder = copied(restarted, tmp_path / "run")
    delete_checkpoint(folder, 12)
    code, found, err = replay(folder)
    part = found["stretches"][2]
    assert code == 7 and (part["from"], part["to"], part["verdict"]) == (8, 16, "not known"), err
    assert "the run was started again at step 12 on 2 processes" in part["text"]


@pytest.mark.slow
def test_a_start_on_other_processes_explains_other_bits(restarted, launch, tmp_path):
    """Without the checkpoint of that start the first steps are taken again on two processes; the data are the same."""
    folder, straight = copied(restarted, tmp_path / "run"), tmp_path / "straight"
    for step in (4, 8, 12):
        delete_checkpoint(folder, step)
    own = words(straight, virtual_workers=0, save_every=4, model__dropout=0)[:-1]
    done = running.train_in(straight, [*own, "schedule.horizon=24"], 1)
    assert done.code == 0, done.text
    shown = launch.python("tools/compare.py", straight, folder)
    assert "B was started again at step 12 on 2 processes, not 1" in shown.out
    assert "data may have changed" not in shown.out


@pytest.mark.slow
def test_ctrl_c_ends_all_stretches(original, launch):
    """The fixture sees that neither a process nor a file is left."""
    running = launch.start(sys.executable, "tools/replay.py", original, "--jobs", "2", "--processes", "2")
    running.wait_for("machine")
    running.signal(signal.SIGINT)
    done = running.wait()
    assert done.code == 130 and done.errors == ["error: interrupted"], done.err


@pytest.mark.parametrize(
    ("at_first", "largest", "rounding"),
    [
        (1e-6, 1e-4, True),
        (5.5e-3, 5.5e-3, False),  # a changed sample, though rounding grows as large later
        (1e-6, 1.0, False),
    ],
)
def test_a_jump_at_the_first_point_is_no_rounding(at_first, largest, rounding):
    """Bits are equal up to step 3. Rounding is 1e-6 at step 4, and grows to 1e-3."""
    found, yardstick = tool.Compared(), tool.Compared()
    for comparison, sizes in ((found, [0, at_first, largest]), (yardstick, [1e-7, 1e-6, 1e-3])):
        for step, size in zip((3, 4, 9), sizes, strict=True):
            differences = [{"name": "loss", "run": 1.0, "replay": 1.0 + size, "relative": size}] if size else []
            comparison.add(step, "train", differences)
    assert found.first_point == (4, "train")
    assert tool._is_rounding(found, yardstick, 2.0**-20) is rounding
