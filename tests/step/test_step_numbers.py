"""`batch["lockstep"]` has the step, the epoch and the progress: a loss and a `prepare` that follow them take the steps
of a plain loop on any number of processes, through kill and resume."""

import functools
import json
import re
import textwrap

import numpy as np
import pytest
import torch
from conftest import ROOT, killed_and_resumed, succeed
from runs import records
from saved import assert_same_bits, load

import tasks
from engine import api
from engine.config import parse
from engine.contract import sample_seeds, uniform
from tests.tasks.clocked import curriculum
from tools.use.place import place_of

TASK = str(ROOT / "tests" / "tasks" / "clocked.py")
TRAIN = [TASK, "seed=3", "epochs=3"]
STEPS = 18
"""Three epochs of six steps: of 12 samples, the last of each epoch of one."""

CUTS = {
    "1x12": (1, 12, 1),
    "1x4x3": (1, 4, 3),
    "2x6": (2, 6, 1),
    "2x2x3": (2, 2, 3),
    "3x4": (3, 4, 1),
}
"""Processes, samples of a process and pass, passes of a step."""


@functools.cache
def plain_loop():
    """The weights after the steps that anybody would write in plain torch."""
    task = tasks.load(TASK)(parse(TRAIN, tasks.load).cfg)
    torch.manual_seed(3)
    (data, _), model = task.datasets(), task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    for step in range(STEPS):
        epoch, first = divmod(step, 6)
        place = 12 * first + torch.arange(12 if first < 5 else 1)
        rows = torch.from_numpy(np.random.default_rng((3, epoch)).permutation(61))[place]
        x = data.x[rows] + step / STEPS * uniform(sample_seeds(3, epoch, place), 8).double()
        output, weights = model(x), data.mask[rows] * curriculum(rows, epoch)[:, None]
        total = ((output - data.y[rows]).square() * weights).sum()
        total = total + 0.1 * min(1.0, step / 10) * output.square().mean(1).sum()
        optimizer.zero_grad()
        (total / weights.sum()).backward()
        optimizer.step()
    return model.state_dict()


def trained(launch, folder, processes, *words):
    succeed(launch.train(*TRAIN, *words, f"save_dir={folder}", processes=processes))
    return folder


def assert_plain(folder, steps=STEPS):
    """The weights of a run are those of the plain loop, and its log has the number of each step."""
    found = load(folder)["model"]
    for name, value in plain_loop().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
    assert_numbered(folder, steps)


def assert_numbered(folder, steps=STEPS):
    lines = records(folder, "train")
    assert [line["step"] for line in lines][-1] == steps
    for line in lines:
        if "at_step" not in line:  # no sample of the step is left
            continue
        expected = [line["step"] - 1, line["epoch"], (line["step"] - 1) / STEPS]
        for kind in ("at", "clock"):
            assert [line[f"{kind}_{name}"] for name in ("step", "epoch", "progress")] == pytest.approx(expected)
    for line in records(folder, "eval"):
        assert (line["at_step"], line["at_epoch"]) == (line["step"], line["epoch"])
        assert line["at_progress"] == pytest.approx(line["step"] / STEPS)


@pytest.mark.parametrize("cut", [pytest.param(cut, marks=pytest.mark.slow if cut != "2x2x3" else ()) for cut in CUTS])
def test_the_steps_are_those_of_a_plain_loop(launch, tmp_path, cut):
    processes, batch, passes = CUTS[cut]
    folder = trained(launch, tmp_path / "run", processes, f"batch_size={batch}", f"grad_accum_steps={passes}")
    assert_plain(folder)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["cache=host"], ["num_workers=2"], ["cache=host", "virtual_workers=4"]])
def test_wherever_the_batches_come_from(launch, tmp_path, words):
    """A `prepare` that reads the progress gets the passes of one step."""
    assert_plain(trained(launch, tmp_path / "run", 2, "global_batch=12", "batch_size=2", *words))


@pytest.mark.slow
def test_virtual_workers_have_the_same_bits(launch, tmp_path):
    words = ["global_batch=12", "batch_size=2", "virtual_workers=4"]
    one, three = (trained(launch, tmp_path / str(processes), processes, *words) for processes in (1, 3))
    assert_plain(one)
    assert_same_bits(three, one)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_number_of_its_step(launch, tmp_path):
    """In the middle of an epoch, and on another number of processes."""
    words = [
        *TRAIN,
        "global_batch=12",
        "batch_size=2",
        "virtual_workers=4",
        "save_every=4",
        f"save_dir={tmp_path / 'run'}",
    ]
    killed_and_resumed(launch, words, ["step 9/18", "step 16/18"], processes=2)
    assert_plain(tmp_path / "run")
    straight = trained(launch, tmp_path / "straight", 1, *words[3:-1])
    assert_same_bits(tmp_path / "run", straight)


@pytest.mark.slow
def test_the_last_batch_is_dropped(launch, tmp_path):
    """An epoch of five steps: the progress counts the steps that are taken."""
    trained(launch, tmp_path / "run", 2, "global_batch=12", "batch_size=6", "drop_last=true", "steps=9")
    for line in records(tmp_path / "run", "train"):
        assert (line["at_step"], line["at_epoch"]) == pytest.approx((line["step"] - 1, (line["step"] - 1) // 5))
        assert line["at_progress"] == pytest.approx((line["step"] - 1) / 9)


@pytest.mark.slow
def test_excluded_samples_do_not_count(launch, tmp_path):
    """Their steps do: the number of a step does not depend on the samples that are left out."""
    exclude = f"exclude={','.join(map(str, range(20)))}"
    trained(launch, tmp_path / "run", 2, "global_batch=12", "batch_size=2", exclude)
    assert_numbered(tmp_path / "run")


@pytest.mark.slow
def test_another_global_batch_by_force(launch, tmp_path):
    """The steps go on with their number, in the middle of an epoch; the progress is of the new length."""
    folder = trained(launch, tmp_path / "run", 1, "batch_size=12", "steps=8")
    words = ["batch_size=6", "--force", f"save_dir={folder}"]
    succeed(launch.train(*TRAIN, *words))
    lines = records(folder, "train")
    assert [line["step"] for line in lines] == [*range(1, 34)], "8 steps, then 25 of 33: three epochs of eleven"
    assert [line["at_step"] for line in lines] == pytest.approx([*range(33)])
    assert [line["at_progress"] for line in lines[8:]] == pytest.approx([step / 33 for step in range(8, 33)])


@pytest.mark.slow
def test_a_checkpoint_is_scored_at_its_step(launch, tmp_path):
    """With the numbers of the training's own evaluation, whatever the batch, the split and the processes."""
    folder = trained(launch, tmp_path / "run", 2, "batch_size=6", "keep_checkpoints=9")
    logged = {line["step"]: line for line in records(folder, "eval")}
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["checkpoints"]:
        done = succeed(launch.python("tools/evaluate.py", str(folder / entry["file"]), "--json", "batch_size=5"))
        found, line = json.loads(done.out)["metrics"], logged[entry["step"]]
        assert found == pytest.approx({name: line[name] for name in found}, rel=1e-14)
        place = place_of(api.read(folder / entry["file"]), parse(TRAIN, tasks.load).cfg)
        assert (place.step, place.epoch) == (line["at_step"], line["at_epoch"]), "of a prediction"
        assert place.progress == line["at_progress"]
    done = succeed(launch.python("tools/evaluate.py", str(folder / "last.pt"), "--json", "--split", "train"))
    found = json.loads(done.out)["metrics"]
    assert (found["at_step"], found["at_epoch"], found["at_progress"]) == (18, 2, 1.0)


@pytest.mark.slow
def test_a_replay_and_the_proof(launch, tmp_path):
    words = [
        "global_batch=12",
        "batch_size=2",
        "virtual_workers=4",
        "digest_every=1",
        "keep_checkpoints=9",
        "save_every=5",
    ]
    folder = trained(launch, tmp_path / "run", 2, *words)
    done = succeed(launch.python("tools/replay.py", str(folder), "--all", "--processes", "1"))
    assert re.search("same bits|identical", done.out + done.err), done.out


# ---- the page ----


def shown():
    """The methods that docs/your-own-data.md shows, for the task of the README."""
    page = (ROOT / "docs/your-own-data.md").read_text()
    section = page.partition("## Change the loss, the samples")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_the_page_shows_takes_the_same_steps(launch, tmp_path, number):
    """On two processes that accumulate, as on one; and other steps than without it."""
    readme = re.search(r"```python\n(import torch\n.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    (tmp_path / "plain.py").write_text(readme)
    begin = "from engine.contract import uniform\nReadme = Task\n\nclass Task(Readme):\n"
    (tmp_path / "own.py").write_text(readme + begin + textwrap.indent(shown()[number], "    "))
    losses = {}
    for name, task, processes, batch in (("one", "own", 1, 32), ("two", "own", 2, 8), ("plain", "plain", 1, 32)):
        words = [str(tmp_path / f"{task}.py"), "global_batch=32", f"batch_size={batch}", "epochs=3", "amp=off"]
        words += ["log_every=1", "optim.lr=0.01", f"save_dir={tmp_path / name}"]
        succeed(launch.train(*words, processes=processes))
        losses[name] = [line["loss"] for line in records(tmp_path / name, "train")]
    assert len(shown()) == 3 and losses["one"] == pytest.approx(losses["two"], rel=1e-5)
    assert losses["one"] != pytest.approx(losses["plain"], rel=1e-3)
