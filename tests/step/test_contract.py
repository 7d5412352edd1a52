"""What a task may ask for beyond sums: several terms, the whole global batch, values of each sample, no validation."""

import json
import os
import re
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, succeed
from saved import logged
from test_loop import steps  # noqa: F401
from test_the_idea import CONTRAST, TERMS
from torch import nn

import tasks
import train
from engine import gathered
from engine.config import parse
from engine.contract import LockstepError, Loss, gather_batch, sample_seeds, uniform
from engine.global_loss import join
from plugins.resilience.stragglers import GpuClock
from tests.tasks.contrast import info_nce

SETTINGS = (
    "seed=3 steps=12 amp=off log_every=1 model.double=true optim.lr=0.02 optim.weight_decay=0 "
    "optim.grad_clip=0 warmup_epochs=0 schedule.kind=constant"
).split()


def three_means(out, batch):
    """The toy's three terms as anybody would write them for one process."""
    y, mask, labels = batch["y"], batch["mask"], (batch["y"][:, 0] > 0.8).long()
    means = {
        "masked": ((out(batch) - y).square() * mask).sum() / mask.sum(),
        "classes": nn.functional.cross_entropy(out(batch)[:, :2], labels, weight=y.new_tensor([0.3, 1.7])),
        "rare": ((out(batch)[:, 3] - 1).square() * labels).sum() / max(1, labels.sum()),
    }
    return 5 * means["masked"] + means["classes"] + means["rare"], means


def pairs(net, batch):
    x, y, scale = net(batch["x"], batch["y"])
    return info_nce(x, y, x, y, scale, torch.arange(len(x))) / len(x), {}


def plain_loop(task, loss_of, words):
    """Twelve steps in plain torch; returns the model and each step's numbers."""
    task = tasks.load(task)(parse(words, tasks.load).cfg)
    torch.manual_seed(3)
    (data, _), model, numbers = task.datasets(), task.model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    for step in range(12):
        epoch, first = step // 6, 12 * (step % 6)
        rows = np.random.default_rng((3, epoch)).permutation(len(data))[first : first + 12]
        batch = data.__getitems__(rows.tolist())
        noise = 0.01 * uniform(sample_seeds(3, epoch, first + torch.arange(len(rows))), 8)
        loss, means = loss_of(model, batch | {"noisy": batch["x"] + noise})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers.append({"loss": loss.item()} | {name: mean.item() for name, mean in means.items()})
    return model, numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "loss_of", "cut"),
    [
        (TERMS, lambda net, batch: three_means(lambda b: net(b["noisy"]), batch), "global_batch=12 batch_size=2"),
        (CONTRAST, pairs, "global_batch=12 batch_size=4"),
        (CONTRAST, pairs, "global_batch=12 batch_size=4 dataset.samples=62"),
    ],
    ids=["several terms, accumulated", "all pairs of the batch", "all pairs, two in the last"],
)
def test_three_processes_take_the_steps_of_a_plain_loop(launch, tmp_path, task, loss_of, cut):
    """Twelve steps of 12 samples, at the end of an epoch of one: two ranks have none then. Losses, and each term's.
    Of one pair nothing is learnt: of two the rank that has none must leave the gradients to those that have."""
    words = [task, *SETTINGS, *cut.split()]
    succeed(launch.torchrun(3, "train_ddp.py", *words, f"save_dir={tmp_path}"))
    model, numbers = plain_loop(task, loss_of, words)
    ours = torch.load(tmp_path / "last.pt", weights_only=True)["model"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["event"] == "train"]
    for line, step in zip(found, numbers, strict=True):
        assert {name: line[name] for name in step} == pytest.approx(step, rel=1e-9, abs=1e-15)


def shown():
    """The methods that docs/your-own-data.md shows, for the task of the README, by the first one's name."""
    page = (ROOT / "docs/your-own-data.md").read_text().partition("\n## Add metrics, loss terms and predictions\n")[2]
    blocks = re.findall(r"^```python\n(.*?)^```$", page.partition("\n## ")[0], re.M | re.S)
    return {re.match(r"def (\w+)", block)[1]: textwrap.indent(block, "    ") for block in blocks}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["score", "losses", "loss", "predict"])
def test_what_the_page_shows_trains(launch, tmp_path, name):
    """Two processes that accumulate, where it may be, score as one does."""
    if name == "score":
        pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    readme = re.search(r"```python\n(import torch\n.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    methods = "    loss = Base.loss\n" * (name == "losses") + shown()[name]
    begin = "from engine.contract import gather_batch\nReadme = Task\n\nclass Task(Readme):\n"
    (tmp_path / "own.py").write_text(readme + begin + methods)
    common = [str(tmp_path / "own.py"), "global_batch=32", "epochs=2", "amp=off", "digest_every=0"]
    succeed(launch.python("train.py", *common, "batch_size=32", f"save_dir={tmp_path / 'one'}"))
    each = "batch_size=16" if name == "loss" else "batch_size=8"
    succeed(launch.torchrun(2, "train.py", *common, each, "eval_batch_size=64", f"save_dir={tmp_path / 'two'}"))
    one, two = (logged(tmp_path / run) for run in ("one", "two"))
    assert len(one) == len(two) > 2
    for a, b in zip(one, two, strict=True):
        assert a.pop("event") == b.pop("event") and a == pytest.approx(b, rel=1e-3)
    if name == "predict":
        out = tmp_path / "a.csv"
        succeed(launch.python("tools/predict.py", str(tmp_path / "one"), "--split", "val", "--out", str(out)))
        assert out.read_text().splitlines()[0] == "index,label"


# ---- several terms ----

AS_DRAWN = """
import torch
from engine.contract import Loss, Task as Base
from tests.tasks.norms import Task as Norms

class Task(Norms):
    loss, seen = Base.loss, []

    def losses(self, net, batch):
        out = net(batch["x"])  # through BatchNorm and dropout
        weight = (out > 0).sum()
        self.seen.append(weight.item())
        return {"one": Loss(out.square().sum(), weight), "two": Loss(out.sum(), len(out))}
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["virtual_workers=2"]])
def test_weights_are_those_of_the_passes_that_count(steps, tmp_path, more):  # noqa: F811
    """Where they depend on random numbers, and the forward pass changes buffers."""
    (tmp_path / "drawn.py").write_text(AS_DRAWN)
    words = ["global_batch=12", "batch_size=3", *more]
    run, _ = steps(*words, task=str(tmp_path / "drawn.py"))
    buffers = {name: value.clone() for name, value in run.reducer.buffers().items()}
    run.loaders.train.set_epoch(0)
    run.task.seen.clear()
    passes = next(iter(run.steps()))
    assert all(torch.equal(value, buffers[name]) for name, value in run.reducer.buffers().items()), "put back"
    train.train_step(run, passes)
    seen = run.task.seen
    assert len(seen) == 8 and seen[:4] == seen[4:] and run.meter.terms.known.tolist() == [sum(seen[:4]), 12]
    tracked = [value for name, value in run.reducer.buffers().items() if name.endswith("num_batches_tracked")]
    assert tracked[0] == (2 if more else 4), "BatchNorm's: once for each pass"


def test_the_sums_of_all_terms_are_for_the_state():
    x, count = torch.ones((), requires_grad=True), torch.tensor(2)
    terms = {name: Loss(x, count, for_state={f"of {name}": torch.ones(3)}) for name in ("one", "two")}
    found = join(terms | {"three": Loss(x, count)}).for_state
    assert [*found] == ["of one", "of two"] and all(torch.equal(value, torch.ones(3)) for value in found.values())


def test_totals_to_watch_may_be_numbers(steps):  # noqa: F811
    run, _ = steps()
    run.begin_step()
    loss = Loss(torch.ones((), requires_grad=True), 2.0, {"hits": 3.0, "count": 4, "off": np.float32(0.5)})
    micro = SimpleNamespace(empty=False, indices=[0], closes_step=False, worker=0)
    assert run.loss_vector(loss, micro).tolist() == [0, 1, 2, 3, 4, 0.5, 0, 0]


# ---- the whole global batch ----


def test_beside_a_step_a_batch_stands_for_itself():
    x = torch.randn(5, 3)
    everyone, rows = gather_batch(x)
    assert everyone is x and rows.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("more", [["gradient_accumulation_steps=2"], ["virtual_workers=4"]])
def test_where_no_pass_sees_all_it_is_refused(launch, tmp_path, more):
    words = [CONTRAST, "batch_size=3", *more, f"save_dir={tmp_path / 'run'}"]
    done = launch.torchrun(2, "train.py", *words)
    said = "error: gather_batch in a step of 2 forward passes, none of which sees the whole global batch (the task's"
    assert done.code and len(done.errors) == 1 and done.errors[0].startswith(said), done.err
    assert "batch_size=6" in done.errors[0] and not (tmp_path / "run/last.pt").exists()


def test_a_gpus_clock_begins_once_a_pass(monkeypatch):
    """Although the ranks meet within its forward pass."""
    recorded = []
    event = lambda enable_timing: SimpleNamespace(record=lambda: recorded.append(phases[-1]))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Event", event)
    clock, phases = GpuClock(), []
    for name in ["data loading", "forward", "all_reduce", "forward", "backward"] * 2 + ["all_reduce", "backward"]:
        phases.append(name)
        clock(name)
    assert recorded == ["forward"] * 2 and clock.passes == 2


def test_rows_that_are_not_the_samples_are_refused(launch, tmp_path):
    (tmp_path / "own.py").write_text(
        "from engine.contract import gather_batch\nfrom tests.tasks.toy import Task as Toy\n"
        "class Task(Toy):\n    def loss(self, net, batch):\n        gather_batch(batch['x'][1:])\n"
    )
    done = launch.python("train.py", str(tmp_path / "own.py"), f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and "gather_batch was given 4 rows in a batch of 5 samples" in done.errors[0]


# ---- values of each sample ----


def test_batches_that_do_not_fit_together_and_too_many_are_said():
    held = gathered.Gathered("collect", limit_mb=1e-3)
    held.collect({"a": torch.zeros(2, 3), "b": [torch.zeros(1), torch.zeros(5)]}, 2)
    for other in ({"a": torch.zeros(2, 4)}, {"a": torch.zeros(2, 3, dtype=torch.float64)}, {"a": ["text", "text"]}):
        with pytest.raises(LockstepError, match="`collect` gives"):
            held.collect({"b": [torch.zeros(0), torch.zeros(2)]} | other, 2)
    with pytest.raises(LockstepError, match="rank 0 may hold 0"):
        held.collect({"a": torch.zeros(200, 3), "b": [torch.zeros(1)] * 200}, 200)


def test_numpy_can_take_what_was_bf16():
    found = {
        "score": torch.tensor([0.5, 1.5], dtype=torch.bfloat16),
        "boxes": [torch.ones(2).bfloat16(), torch.ones(1)],
    }
    part = gathered.packed(found)
    assert part["score"].numpy().tolist() == [0.5, 1.5] and part["boxes"].whole.dtype == torch.float32


def test_a_view_does_not_keep_what_it_is_a_part_of():
    part = gathered.packed({"a": torch.zeros(10, 1000)[:, 0], "b": [torch.zeros(100)[:2]] * 10})
    assert part["a"].untyped_storage().nbytes() == 40 and part["b"].whole.untyped_storage().nbytes() == 80
    assert isinstance(part["b"], gathered.Ragged) and part["b"].lengths == [2] * 10


# ---- without validation data ----

ALONE = """
from engine.contract import Loss, Task as Base
from tests.tasks import toy

class Task(Base):
    Settings, defaults = toy.Task.Settings, toy.Task.defaults
    model, loss, _errors = toy.Task.model, toy.Task.loss, toy.Task._errors

    def datasets(self):
        return toy.Waves(self.cfg.dataset.samples, 0), None
"""


@pytest.mark.slow
def test_without_validation_data_the_last_checkpoint_counts(launch, tmp_path):
    (tmp_path / "own.py").write_text(ALONE)
    words = ["train.py", str(tmp_path / "own.py"), "global_batch=12", "optim.ema_decay=0.9", "eval_every=2", "amp=off"]
    straight, run = tmp_path / "straight", tmp_path / "run"
    done = succeed(launch.python(*words, "epochs=3", f"save_dir={straight}"))
    assert "No validation data: nothing is evaluated, and the last checkpoint is the one that counts" in done.out
    assert "Done: 18 steps, 183 samples\n" in done.out and "best" not in done.out and "Epoch" not in done.out
    succeed(launch.torchrun(2, *words, "steps=7", "schedule.horizon=18", "save_every=100", f"save_dir={run}"))
    done = succeed(launch.torchrun(3, *words, "epochs=3", "schedule.horizon=18", f"save_dir={run}"))
    assert "run/step_7.pt: step 7" in done.out
    ours, theirs = (torch.load(folder / "last.pt", weights_only=True) for folder in (run, straight))
    for name, value in theirs["ema"].items():
        torch.testing.assert_close(ours["ema"][name], value)
    assert json.loads((run / "manifest.json").read_text())["best"] == ""
    done = succeed(launch.python(*words, "epochs=3", "schedule.horizon=18", f"save_dir={run}"))
    assert "Already complete: " in done.out
    events = {json.loads(line)["event"] for line in (run / "metrics.jsonl").read_text().splitlines()}
    assert events == {"train"}
    done = launch.python("tools/evaluate.py", str(run))
    assert done.code == 2 and "the task has no validation data (split val): score others" in done.errors[0]
    done = launch.python("tools/evaluate.py", str(run), "--split", "train")
    assert done.code == 2 and done.errors[0].endswith("own.py lacks score, report (task): " + FOR_A_SPLIT)


FOR_A_SPLIT = "see engine/contract.py; give it these methods to score a split"


TWO_LOSSES = """
from engine.contract import Loss, Task as Base
from tests.tasks.toy import Task as Toy

class Task(Toy):
    def losses(self, net, batch):
        return {{"one": Toy.loss(self, net, batch)}}
{loss}
"""


@pytest.mark.parametrize(
    ("loss", "used"),
    [
        ("", False),  # the one of a base class
        ("    def loss(self, net, batch):\n        return Loss(net(batch['x']).sum(), 1)\n", False),
        ("    def loss(self, net, batch):\n        return super().loss(net, batch)\n", True),
        ("    def loss(self, net, batch):\n        return self.losses(net, batch)['one']\n", True),
        ("    loss = Base.loss\n", True),
    ],
)
def test_terms_that_nothing_uses_are_refused(tmp_path, loss, used):
    (tmp_path / "own.py").write_text(TWO_LOSSES.format(loss=loss))
    if used:
        assert tasks.load(str(tmp_path / "own.py"))
    else:
        with pytest.raises(LockstepError, match=r"own.py has `losses`, and a `loss` that does not use them \(task\)"):
            tasks.load(str(tmp_path / "own.py"))


@pytest.mark.parametrize(
    ("body", "words", "said"),
    [
        ("    def x(self): ...\n", ["patience=3"], "patience=3 without validation data (patience): drop it"),
        ("    def datasets(self):\n        return [toy.Waves(5, 0)] * 2\n", [], "own.py lacks score, report (task)"),
    ],
)
def test_what_needs_validation_data_is_said(launch, tmp_path, body, words, said):
    (tmp_path / "own.py").write_text(ALONE + "\n" + body)
    done = launch.python("train.py", str(tmp_path / "own.py"), *words, f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and said in done.errors[0] and not (tmp_path / "run").exists()


DIRECTIONS = {
    "a metric alone": ('monitor = "accuracy"', "accuracy"),
    "an error alone": ('monitor = "rmse"', "rmse"),
    "both": ('monitor, higher_is_better = "accuracy", True', ""),
    "an error and its direction": ('monitor, higher_is_better = "rmse", False', ""),
    "the loss": ('monitor = "loss"', ""),
    "a direction of a base class for another metric": ("base = Scored; monitor = 'loss'", "loss"),
    "a direction of a base class for its metric": ("base = Scored; monitor = 'auc'", ""),
    "a direction beside the metric of a base class": ("base = Named; higher_is_better = True", ""),
    "a direction of a class without a metric": ("base = Higher; monitor = 'f1'", ""),
}
BASES = """
from tests.tasks.toy import Task as Toy
class Scored(Toy):
    monitor, higher_is_better = "auc", True
class Named(Toy):
    monitor = "auc"
class Higher:
    higher_is_better = True
"""


@pytest.mark.parametrize("name", DIRECTIONS)
def test_a_metric_needs_a_direction(tmp_path, name):
    """Otherwise the lowest accuracy is the best checkpoint, and `patience` ends a run that gets better."""
    body, refused = DIRECTIONS[name]
    body, bases = body.removeprefix("base = "), "Toy"
    for base in ("Scored", "Named", "Higher"):
        if body.startswith(base):
            body, bases = body.removeprefix(f"{base}; "), {"Higher": "Higher, Toy"}.get(base, base)
    path = tmp_path / "own.py"
    path.write_text(f"{BASES}class Task({bases}):\n    {body}\n")
    if refused:
        said = f"^`monitor` is '{refused}', and nothing gives the direction .*own.py\\): write higher_is_better = True"
        with pytest.raises(LockstepError, match=said):
            tasks.load(str(path))
    else:
        assert tasks.load(str(path))


def test_a_metric_that_the_config_chooses_needs_a_direction(launch, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        f"{BASES}class Task(Toy):\n    def __init__(self, cfg):\n"
        "        super().__init__(cfg)\n        self.monitor = 'accuracy'\n"
    )
    done = launch.python("train.py", str(path), f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and "`monitor` is 'accuracy', and nothing gives the direction" in done.errors[0]
    assert not (tmp_path / "run").exists()


def test_an_edit_within_a_second_of_a_start_is_seen(tmp_path, monkeypatch):
    """Also where Python writes bytecode, which it finds by size and second of the last change."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "own.py"
    for version in ("one", "two"):
        path.write_text(f"from tests.tasks import toy\nclass Task(toy.Task):\n    version = {version!r}\n")
        os.utime(path, (1e9, 1e9))
        task = tasks.load(str(path))
        assert task.version == version
        del sys.modules[task.__module__]
