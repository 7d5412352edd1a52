"""What the fingerprint of data covers, and who compares it."""

import re

import numpy as np
import pytest
import torch
from conftest import succeed
from torch.utils.data import Subset, TensorDataset

from engine.contract import LockstepError
from engine.data.fingerprint import Fingerprint, compare, fingerprint, rounding_text


def rows(count=200):
    draw = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=draw), "y": torch.tensor(n % 2)} for n in range(count)]


class Held:
    """A long recording, read in windows: the arrays are in memory, the samples overlap."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.signal = torch.from_numpy(rng.normal(size=(40_000, 3)).astype(np.float32))
        self.labels = rng.integers(0, 3, 9990)
        self.weights = np.ones(9990)
        self.sources = np.array([f"person {n // 1000}" for n in range(9990)])
        self.held = {"signal": self.signal}

    def __len__(self):
        return 9990

    def __getitem__(self, n):
        return {"x": self.signal[4 * n : 4 * n + 32], "y": torch.tensor(self.labels[n])}


class Lazy:
    """Samples from a disk: counts what is read."""

    def __init__(self, count=100_000, cost=0.0, changed=None):
        self.count, self.cost, self.changed, self.read = count, cost, changed, []

    def __len__(self):
        return self.count

    def __getitem__(self, n):
        self.read.append(n)
        return {"x": torch.full((1000,), 1.0 + n % 7) * (2 if n == self.changed else 1)}


def exchange(data):
    data[30], data[41] = data[41], data[30]


def turn(data):
    data[77] = data[77] | {"y": 1 - data[77]["y"]}


def scale(data):
    data[50] = data[50] | {"x": data[50]["x"] * 1.001}


@pytest.mark.parametrize(
    ("edit", "parts"), [(exchange, {"x", "y"}), (turn, {"y"}), (scale, {"x"})], ids=["exchange", "turn", "scale"]
)
@pytest.mark.parametrize("side", ["train", "val"])
def test_every_sample_of_data_in_memory_is_covered(edit, parts, side):
    other = rows()
    train, val = other[:120], other[120:] + rows(60)
    before = fingerprint(train, val)
    edit(train if side == "train" else val)
    found = compare(before, fingerprint(train, val))
    size = len(train if side == "train" else val)
    assert set(found.parts) == {f"{side}: {name} of all {size} samples" for name in parts} and not found.rounding
    assert before.text == fingerprint(train, val).text, "which is of three samples"


def edit_signal(data):
    data.signal[33_333, 1] *= 1.001


def edit_label(data):
    data.labels[5001] = (data.labels[5001] + 1) % 3


def edit_weight(data):
    data.weights[7] = 2


def edit_source(data):
    data.sources[8] = "person 3"


@pytest.mark.parametrize(
    ("edit", "name"),
    [(edit_signal, "signal"), (edit_label, "labels"), (edit_weight, "weights"), (edit_source, "sources")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_and_facts_of_samples_are_covered_whole(edit, name):
    data = Held()
    before = fingerprint(data)
    assert compare(before, fingerprint(Held())).parts == ()
    edit(data)
    assert compare(before, fingerprint(data)).parts == (f"train: {name}",)


def test_the_tensors_of_a_tensor_dataset_and_the_rows_of_a_subset_are_covered():
    x = torch.arange(30_000.0).view(10_000, 3)
    before = fingerprint(TensorDataset(x))
    x[4321, 2] += 1e-3
    assert compare(before, fingerprint(TensorDataset(x))).parts == ("train: tensor 0",)
    picked = fingerprint(Subset(rows(), [4, 9, 3, 8, 7, 1]))
    assert compare(picked, fingerprint(Subset(rows(), [4, 9, 3, 7, 8, 1]))).parts


def test_of_data_that_are_not_held_some_hundred_samples_over_the_whole_length_are_read():
    data = Lazy(10_000_000)
    before = fingerprint(data)
    seen = np.unique(data.read)
    assert 100 < len(seen) < 1000 and np.diff(seen).max() < 10_000_000 / 50
    assert any("of 128 samples" in name for name in before.facts)
    found = compare(before, fingerprint(Lazy(10_000_000, changed=int(seen[len(seen) // 3]))))
    assert len(found.parts) == 1 and found.parts[0].startswith("train: x of ")


def test_the_samples_are_as_many_as_can_be_read_in_the_time_and_the_common_ones_are_compared(monkeypatch):
    complete = fingerprint(Lazy(600))
    assert any("of all 600 samples" in name for name in complete.facts)
    monkeypatch.setattr("engine.data.fingerprint.READ_S", 0)
    short, other = fingerprint(Lazy(600)), fingerprint(Lazy(600, changed=300))
    assert not any(" of " in name.replace("number of samples", "") for name in short.facts)
    assert compare(complete, short) == compare(short, complete) == ((), {})
    assert short.text != other.text and len(fingerprint(Lazy(601)).facts) == 2
    assert compare(short, fingerprint(Lazy(601))).parts == ("train: number of samples",)


def test_what_another_processor_rounds_otherwise_is_the_same_and_printed():
    x = np.random.default_rng(0).normal(size=(3000, 16)).astype(np.float32)

    def data(values):
        return [{"x": torch.from_numpy(row)} for row in values]

    before = fingerprint(data(x))
    rounded = compare(before, fingerprint(data(np.nextafter(x, np.float32(9)))))
    assert not rounded.parts and 0 < max(rounded.rounding.values()) < 1e-6
    assert re.search(
        r"the data differ from the checkpoint's by \de-\d\d of their size \(train: x", rounding_text(rounded)
    )
    for other in (x * np.float32(1.001), x[::-1]):
        assert compare(before, fingerprint(data(other))).parts


def test_a_checkpoint_of_an_earlier_release_is_compared_by_its_three_samples():
    data = rows()
    now = fingerprint(data)
    earlier = Fingerprint(now.text, {})
    scale(data)
    assert compare(earlier, fingerprint(data)).parts == ()
    data[0] = data[1]
    assert compare(earlier, fingerprint(data)).parts == ("data",)


def test_a_sample_in_eight_that_changes_at_random_is_found():
    class Flipped(Lazy):
        def __getitem__(self, n):
            self.read.append(n)
            noise = torch.from_numpy(np.random.default_rng().normal(size=4))  # of the system's entropy
            return {"x": noise if n % 8 == 3 else torch.zeros(4)}

    data = Flipped(80)
    with pytest.raises(LockstepError, match=r"'x' of sample .* changes between two fetches"):
        fingerprint(data)
    warned = fingerprint(data, random_samples="warn")
    assert warned == fingerprint(data, random_samples="warn") and not any(": x of " in name for name in warned.facts)


def test_a_sample_that_cannot_be_loaded_and_samples_of_several_shapes_do_not_end_the_run():
    class Broken(Lazy):
        def __getitem__(self, n):
            if n == 33:
                raise OSError("no such file")
            return {"x": torch.zeros(1 + n % 3)}

    assert fingerprint(Broken(100)) == fingerprint(Broken(100))


def test_a_sample_that_one_rank_cannot_load_is_no_other_data():
    """The training on that rank names the sample; a difference from the other ranks would hide the cause."""

    class Broken(Lazy):
        readable = True

        def __getitem__(self, n):
            if n == 33 and not self.readable:
                raise OSError("no such file")
            return super().__getitem__(n)

    whole, broken = Broken(100), Broken(100)
    broken.readable = False
    assert not compare(fingerprint(whole), fingerprint(broken)).parts
    assert fingerprint(broken) != fingerprint(whole)


TASK = """
import os
import torch
from torch import nn
from engine.contract import Loss, Sums, Task as Base


class Task(Base):
    defaults = {"epochs": 1, "amp": "off", "optim.lr": 0.1, "global_batch": 16, "device": "cpu"}

    def datasets(self):
        draw = torch.Generator().manual_seed(0)
        rows = [{"x": torch.randn(8, generator=draw), "y": torch.tensor(n % 2)} for n in range(96)]
        if os.environ.get("EXCHANGED") in ("all", os.environ.get("RANK", "none")):
            rows[30], rows[41] = rows[41], rows[30]
        if os.environ.get("TURNED"):
            rows[90] = rows[90] | {"y": 1 - rows[90]["y"]}
        return rows[:64], rows[64:]

    def model(self):
        return nn.Linear(8, 2)

    def loss(self, net, batch):
        losses = nn.functional.cross_entropy(net(batch["x"]), batch["y"], reduction="sum")
        return Loss(losses, len(batch["y"]))

    def score(self, model, batch):
        losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return Sums(loss=losses, count=torch.tensor(len(batch["y"])))

    def report(self, sums):
        return {"loss": sums["loss"] / sums["count"]}
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(TASK)
    return str(tmp_path / "own.py")


def test_a_rank_with_two_samples_exchanged_is_named(launch, own, tmp_path):
    done = launch.torchrun(2, "train.py", own, f"save_dir={tmp_path / 'run'}", EXCHANGED="1")
    said = "error: rank 1 differs from rank 0 in the data: train: x of all 64 samples, train: y of all 64 samples"
    assert done.code and any(line.startswith(said) for line in done.err.splitlines()), done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_edit_between_two_starts_is_named_by_a_resume_and_by_an_evaluation(launch, own, tmp_path):
    run = tmp_path / "run"
    succeed(launch.train(own, f"save_dir={run}"))
    done = launch.train(own, "epochs=2", f"save_dir={run}", TURNED="1")
    assert done.code == 2 and "other data (val: y of all 32 samples) (" in done.errors[0], done.err
    done = launch.train(own, "epochs=2", f"save_dir={run}", EXCHANGED="all")
    assert done.code == 2 and "other data (train: x of all 64 samples, train: y" in done.errors[0], done.err
    scored = launch.python("tools/evaluate.py", str(run), TURNED="1")
    assert "are not those of the checkpoint (val: y of all 32 samples)" in scored.err + scored.out
    of_train = ("tools/evaluate.py", str(run), "--split", "train")
    scored = launch.python(*of_train, EXCHANGED="all")
    assert "the data are not those of the checkpoint (train: x of all 64" in scored.err + scored.out
    scored = succeed(launch.python(*of_train, TURNED="1"))
    assert "not those of the checkpoint" not in scored.err + scored.out
    succeed(launch.train(own, "epochs=2", f"save_dir={run}"))
