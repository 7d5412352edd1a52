"""Buffers beside the weights: the same on all ranks, or the run ends before it is scored with rank 0's."""

import copy
import json
import re

import pytest
import torch
from conftest import ROOT, launching, succeed
from torch import nn

from engine.comm.buffers import Buffers
from plugins.preflight import partition

TASK = str(ROOT / "tests" / "tasks" / "buffers.py")
MANY = str(ROOT / "tests" / "ranks" / "many.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "step"),
    [("check_every=0", 1), ("check_every=0 own.begins=1", 6), ("check_every=3 own.begins=1", 3)],
    ids=["first step", "evaluation", "check"],
)
def test_buffers_that_differ_end_the_run_before_it_is_scored(launch, tmp_path, words, step):
    """And what is drawn at random, such as dropout, is another on each rank."""
    done = launch.torchrun(2, "train.py", TASK, "batch_size=6", *words.split(), f"save_dir={tmp_path / 'run'}")
    assert done.code and len(done.errors) == 1, done.err
    said = f"error: the buffer centre.mean of rank 1 differs from rank 0's (step {step}): change it by"
    assert done.errors[0].startswith(said) and "ddp.buffers=mean" in done.errors[0] and "Epoch 1" not in done.out
    assert json.loads((tmp_path / "run/status.json").read_text())["exit_code"] == 2
    assert not list((tmp_path / "run").glob("*.pt"))
    assert "\n  the cut matters  InstanceNorm's running statistics (norm): other processes or anoth" in done.out
    drawn = dict(re.findall(r"DRAWN (\d) (\S+)", done.out))
    assert len(drawn) == 2 and drawn["0"] != drawn["1"]


COUNTS = """
import torch
from tests.tasks import toy

class Net(toy.Net):
    def __init__(self):
        super().__init__(16, 0.0)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = self.mean.lerp(x.detach().to(self.mean).mean(0), 0.0 if self.training else 0.5)
        return super().forward(x - self.mean)

class Task(toy.Task):
    def model(self):
        return Net()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ema", ["0", "0.9"])
def test_an_evaluation_leaves_buffers_as_they_were(launch, tmp_path, ema):
    """Also where a module moves them in eval mode: straight, stopped and resumed, and on two processes."""
    (tmp_path / "own.py").write_text(COUNTS)
    words = [
        str(tmp_path / "own.py"),
        "global_batch=12",
        "schedule.horizon=8",
        "eval_every=2",
        f"optim.ema_decay={ema}",
    ]
    words += ["eval_batch_size=6", "virtual_workers=2", "amp=off", "log_every=1"]
    folders = {name: [*words, f"save_dir={tmp_path / name}"] for name in ("straight", "resumed", "two")}
    one = [[*folders["straight"], "steps=8"], [*folders["resumed"], "steps=3"], [*folders["resumed"], "steps=8"]]
    succeed(launch.python(MANY, json.dumps(one)))
    succeed(launch.torchrun(2, MANY, json.dumps([[*folders["two"], "steps=8"]])))
    straight, *others = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in folders)
    for part in ("model", "ema"):
        for name, value in (straight[part] or {}).items():
            assert all(torch.equal(value, other[part][name]) for other in others), (part, name)
    assert not straight["model"]["mean"].any()


def test_a_buffer_that_an_evaluation_changes_is_named(launch, tmp_path):
    (tmp_path / "own.py").write_text(COUNTS)
    done = succeed(launch.python("train.py", str(tmp_path / "own.py"), "steps=1", f"save_dir={tmp_path / 'run'}"))
    said = (
        "warning: the evaluation changes the buffer mean, so a batch's numbers depend on those before: change it only"
    )
    assert done.out.count(said) == 1
    assert "whether `score` adds up" not in done.out  # for the same reason: said once


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two ranks in float64: straight, and stopped after four steps of eight, with each way to make buffers one; with
    buffers that nobody changes; and what of it one process can do."""
    folder = tmp_path_factory.mktemp("buffers")
    common = [
        TASK,
        "global_batch=12",
        "dataset.samples=96",
        "schedule.horizon=8",
        "eval_every=4",
        "optim.ema_decay=0.9",
    ]
    ways = {"mean": ["ddp.buffers=mean"], "rank0": ["ddp.buffers=rank0"], "frozen": ["own.begins=99"]}

    def argvs(prefix, **steps):
        for name, stops in steps.items():
            way = ways[name.split("_")[0]]
            yield from ([*common, *way, f"steps={n}", f"save_dir={folder / (prefix + name)}"] for n in stops)

    with launching() as launch:
        two = argvs("", mean=[8], mean_stopped=[4, 8], rank0=[8], rank0_stopped=[4, 8], frozen=[8])
        succeed(launch.torchrun(2, MANY, json.dumps([*two])))
        succeed(launch.python(MANY, json.dumps([*argvs("one_", mean=[8], frozen=[8])])))
    return {path.name: torch.load(path / "last.pt", weights_only=True) for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mean", "rank0"])
def test_buffers_made_one_after_each_step_resume_as_they_were(runs, way):
    """Another tensor in a buffer's place, whole numbers, and the average, too: bit for bit."""
    straight, stopped = runs[way], runs[f"{way}_stopped"]
    for part in ("model", "ema"):
        assert straight[part].keys() == stopped[part].keys()
        assert all(torch.equal(value, stopped[part][name]) for name, value in straight[part].items()), part
    assert straight["model"]["centre.count"] > 0 and "centre.cache" not in straight["model"]
    assert straight["progress"] == stopped["progress"]


@pytest.mark.slow
def test_the_mean_of_buffers_is_one_processs(runs):
    """Where they are means themselves; rank 0's are not."""
    gaps = {way: (runs[way]["model"]["centre.mean"] - runs["one_mean"]["model"]["centre.mean"]).abs().max()
            for way in ("mean", "rank0")}  # fmt: skip
    assert gaps["mean"] < 1e-12 < 1e-3 < gaps["rank0"]
    for name in ("layers.0.weight", "norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(runs["mean"]["model"][name], runs["one_mean"]["model"][name], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_instance_norms_statistics_are_averaged(runs):
    """And scored so: the metrics are one process's."""
    ours, theirs = runs["frozen"], runs["one_frozen"]
    for part, prefix in (("model", ""), ("ema", "module.")):
        for name in ("norm.running_mean", "norm.running_var"):
            torch.testing.assert_close(ours[part][prefix + name], theirs[part][prefix + name], rtol=1e-9, atol=1e-12)
    assert ours["progress"]["best"] == pytest.approx(theirs["progress"]["best"], rel=1e-9)


def test_buffers_are_kept_in_the_memory_of_the_step_before():
    """But not where a module has put another tensor in the place of its own, or has resized it."""
    norm = nn.BatchNorm1d(3)
    buffers = Buffers(norm)

    def keep():
        now, before = copy.deepcopy(buffers()), buffers.kept
        buffers.keep()
        assert buffers.kept.keys() == now.keys() and all(torch.equal(now[name], buffers.kept[name]) for name in now)
        norm.running_mean += 1.0
        norm.num_batches_tracked += 1
        assert not torch.equal(norm.running_mean, buffers.kept["running_mean"])
        return buffers.kept is before

    assert not keep() and keep() and keep()
    buffers.put_back(torch.tensor(1.0))
    assert all(torch.equal(value, buffers.kept[name]) for name, value in buffers().items())
    norm.running_mean = torch.ones(3)
    assert not keep() and keep()
    norm.running_mean.resize_(5).fill_(2.0)
    assert not keep() and keep()
    without = Buffers(nn.Linear(1, 1))
    without.keep()
    assert not without.kept


class Scaled(nn.Module):
    """A norm, and a scale that no pass changes."""

    constant_buffers = ("scale",)

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(3))


def test_a_constant_buffer_is_neither_kept_nor_put_back():
    net = Scaled()
    buffers = Buffers(net)
    buffers.keep()
    assert buffers.kept.keys() == buffers().keys() - {"scale"} and "scale" in buffers()
    assert not buffers.changed_constants()
    net.norm.running_mean += 1.0
    net.scale += 1.0
    buffers.put_back(torch.tensor(1.0))
    assert not net.norm.running_mean.any() and net.scale.tolist() == [2.0] * 3
    assert buffers.changed_constants() == ["scale"]


CONSTANT = """
import torch
from torch import nn
from tests.tasks import toy

class Scale(nn.Module):
    constant_buffers = ("scale",)

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        if self.training:
            self.scale.data.mul_(0.999)
        return x * self.scale

class Task(toy.Task):
    def model(self):
        return nn.Sequential(Scale(), super().model())
"""


def test_a_constant_buffer_that_changes_ends_the_run(launch, tmp_path):
    """After the first step, and although torch counts no change of `data`."""
    (tmp_path / "own.py").write_text(CONSTANT)
    task = [str(tmp_path / "own.py"), "check_sums=false", "steps=3"]
    done = launch.python("train.py", *task, f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and not (tmp_path / "run" / "last.pt").exists()
    assert "error: the buffer 0.scale has changed, and its module names it in `constant_buffers` (step 1)" in done.err


class Parts(nn.Module):
    """What depends on the cut, and beside each its like that does not."""

    def __init__(self):
        super().__init__()
        self.drop, self.through = nn.Dropout1d(0.1), nn.Dropout(0.0)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        self.plain_attention = nn.MultiheadAttention(8, 2)
        self.norms = nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(5)))
        self.frozen = nn.BatchNorm1d(8)
        self.instance, self.forgetful = nn.InstanceNorm1d(8, track_running_stats=True), nn.InstanceNorm1d(8)
        self.sync, self.groups, self.layer = nn.SyncBatchNorm(8), nn.GroupNorm(2, 8), nn.LayerNorm(8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.hooked = nn.utils.spectral_norm(nn.Linear(8, 8))

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self


def test_the_parts_that_depend_on_the_cut_are_named():
    both = (
        "dropout (drop, attention), BatchNorm (norms.0, norms.1, norms.2 and 2 more), "
        "InstanceNorm's running statistics (instance)"
    )
    assert partition.partition_dependent(Parts().eval(), 1) == both
    assert (
        partition.partition_dependent(Parts(), 2) == f"{both}, SyncBatchNorm (sync), spectral_norm (spectral, hooked)"
    )
    assert partition.partition_dependent(nn.BatchNorm2d(3), 1) == "BatchNorm (BatchNorm2d)"
    assert partition.partition_dependent(nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3)), 2) == ""


QUEUE = """
import torch
from torch import nn
from tests.tasks.toy import Task as Toy


class Queue(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("{name}", torch.zeros(4, 4))

    def forward(self, x):
        out = self.inner(x)
        if self.training:
            self.{name}.copy_(torch.cat([out.detach()[:1], self.{name}[:-1]]))
        return out


class Task(Toy):
    def model(self):
        inner = super().model()
        return {model}
"""


@pytest.mark.parametrize(
    ("model", "named"), [("Queue(inner)", True), ("nn.Sequential(inner, nn.BatchNorm1d(4))", False)]
)
def test_a_queue_that_virtual_workers_would_average_is_named(launch, tmp_path, model, named):
    """Once. A norm's statistics are meant to be averaged."""
    (tmp_path / "own.py").write_text(QUEUE.format(name="queue", model=model))
    words = [str(tmp_path / "own.py"), "virtual_workers=2", "steps=3", f"save_dir={tmp_path / 'run'}"]
    done = succeed(launch.train(*words))
    assert done.out.count("note: the buffer queue takes the mean of the virtual workers' changes") == named, done.out
