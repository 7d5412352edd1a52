"""A stream (IterableDataset, generator) is refused with a command; the command leads to a training by number."""

import re
import shlex
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import succeed
from runs import progress, same_bits, weights
from torch.utils.data import DataLoader, IterableDataset

from engine.contract import LockstepError
from formats.shards import Order, stream
from formats.shards.stream import Limits, decode, encode, stored
from plugins.preflight import returned
from tools.lab import write_shards

STREAM = """
import torch
from torch.utils.data import IterableDataset, get_worker_info
from tests.tasks.toy import Task as Toy, Waves

class Rows(IterableDataset):
    '''As in torch's documentation: each loader process gives its own part.'''

    def __init__(self, count, seed):
        self.waves = Waves(count, seed)

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for n in range(first, len(self.waves), step):
            batch = self.waves.__getitems__([n])
            yield {name: value[0] for name, value in batch.items()}

class Task(Toy):
    def datasets(self):
        return Rows(61, 0), Rows(23, 1)
"""


def read(shards):
    return shards.__getitems__(range(len(shards)))


@pytest.mark.slow
def test_the_refusal_leads_from_a_stream_to_the_same_bits_on_any_processes(launch, tmp_path):
    """The command of the message, and the line of the message, as they stand there."""
    task, folder = tmp_path / "mine.py", tmp_path / "shards"
    task.write_text(STREAM)
    done = launch.train(str(task), "steps=4", f"save_dir={tmp_path / 'run'}")
    (error,) = done.errors
    assert error.startswith("error: the training set is a Rows, which gives no sample by its number (the task's")
    command = re.search("write it once: python (.*?), and return", error)[1]
    line = re.search(r"and return (stored\(.*?\)) \((from .*?)\)$", error)
    assert not (tmp_path / "run").exists()
    words = shlex.split(command)
    assert words[1:-2] == [str(task), "steps=4", f"save_dir={tmp_path / 'run'}"]
    assert words[-2:] == ["--to", "data/mine_shards"]
    words[-1] = str(folder)  # and not into this repository
    done = succeed(launch.python(*words, "--shard-samples", "7"))
    assert re.search(rf"^9 tar shards of [\d.]+ kB, 61 samples: {folder}/train/shards.json$", done.out, re.M)
    assert f"in the task: `return stored('{folder}')` from `datasets`" in done.out
    returns = line[1].replace("data/mine_shards", str(folder))
    task.write_text(STREAM.replace("return Rows(61, 0), Rows(23, 1)", f"{line[2]}\n        return {returns}"))
    for place, processes, steps in (("one", 1, 12), ("three", 3, 5), ("three", 2, 12)):
        same = ["virtual_workers=4", "global_batch=8", "schedule.horizon=12"]
        run = [str(task), *same, f"steps={steps}", f"save_dir={tmp_path / place}"]
        succeed(launch.train(*run, processes=processes))
    assert progress(tmp_path / "three" / "last.pt")["step"] == 12
    assert same_bits(weights(tmp_path / "one"), weights(tmp_path / "three"))


class Endless:
    """No class of torch: what Hugging Face's streaming gives."""

    def __iter__(self):
        n = 0
        while True:
            yield {"text": f"number {n}", "label": n % 3}
            n += 1


def command_of(dataset):
    task = SimpleNamespace(cfg=SimpleNamespace(task="my tasks/mine.py"))
    with pytest.raises(LockstepError) as error:
        returned.check_returned("datasets", (dataset, None), task)
    return str(error.value)


class Torchs(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    "dataset",
    [Endless(), Torchs(), DataLoader(Torchs()), (n for n in ()), iter([])],
    ids=lambda each: type(each).__name__,
)
def test_each_kind_of_stream_is_refused_with_the_command(dataset):
    said = command_of(dataset)
    name = type(dataset).__name__
    assert said.startswith(
        f"the training set is a {name}, which gives no sample by its number (the task's `datasets`): "
    )
    assert "python tools/write_shards.py 'my tasks/mine.py' --to data/mine_shards, and return stored('data/mi" in said


SAMPLES = {
    "dict": {"x": torch.randn(3, 4), "y": torch.tensor(2), "n": 3, "f": 0.1, "name": "é\n", "none": None, "yes": True},
    "arrays": {"a": np.arange(6.0).reshape(2, 3), "b": np.float32(0.1), "c": np.array([True]), "d": np.zeros((0, 3))},
    "tuple": (torch.arange(4, dtype=torch.uint8), 1),
    "single": torch.ones(2, dtype=torch.float64).t(),
    "bytes": {"jpg": b"\xff\xd8", "cls": b"3", "x.npy": b"not an array", "y.json": b"{", "__key__": "a/b.c"},
    "bf16": {"h": torch.randn(3).bfloat16(), "z": torch.tensor([1j])},
    "lists": {"boxes": [[1, 2.5], []], "map": {"a": None}, "pair": (1, 2), "parts": [torch.ones(2), torch.zeros(1)]},
    "names": {"Label": 1, "a b/c": 2, "x.tensor": np.ones(1), "x": torch.ones(1), "label": 3, "%4c": 4, "": 5},
    "nan": {"x": float("nan"), "y": float("-inf")},
    "strided": {"x": torch.arange(6).reshape(2, 3).t(), "grad": torch.ones(2, requires_grad=True) * 2},
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.detach(), b)
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_sample_is_read_as_it_was(kind, tmp_path):
    """Through a real tar, its index and the reader."""
    sample = SAMPLES[kind]
    assert same(sample, decode(encode(sample)))
    written(tmp_path / "s", [sample, sample], None)
    train, val = stored(tmp_path / "s")
    assert val is None
    first, second = read(train)
    assert same(sample, first)
    assert same(sample, second)


def written(folder, train, val, *words):
    """What the tool prints, for these streams."""
    task = type("Task", (), {"__init__": lambda self, cfg: None, "datasets": lambda self: (train, val)})
    options, _ = write_shards.parse(["--to", str(folder), *words])
    config = SimpleNamespace(parse=lambda *words: SimpleNamespace(cfg=SimpleNamespace(task="own")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_shards, "config", config)
        patch.setattr(write_shards.tasks, "load", lambda name: task)
        return write_shards.write(options, [])


@pytest.mark.parametrize(("sample", "said"), [
    ({"x": object()}, "the field 'x' is a object, which no file holds (sample 2 of the stream): give a dict"),
    ({"x": [object()]}, "the field 'x' is a list, which no file holds"),
    ({"x": np.array([object()])}, "the field 'x' is a numpy.ndarray, which no file holds"),
    ({0: 1}, "the fields [0] are no names (sample 2 of the stream)"),
    ({"0": 1, "1": 2}, "the fields ['0', '1'] are no names"),
    ({"_": 1}, "the fields ['_'] are no names"),
])  # fmt: skip
def test_a_sample_that_no_file_holds_is_refused_by_its_number(tmp_path, sample, said):
    with pytest.raises(LockstepError, match="^" + re.escape(said)):
        stream.write([{"x": 1}, {"x": 2}, sample], tmp_path, Limits())


def numbers(count, start=0):
    return [{"n": n} for n in range(start, start + count)]


def failing(samples, at):
    for number, sample in enumerate(samples):
        if number == at:
            raise OSError("the bucket is away")
        yield sample


def test_a_command_that_was_stopped_continues_and_compares(tmp_path):
    folder = tmp_path / "s"
    words = ["--shard-samples", "4"]
    with pytest.raises(LockstepError, match=r"^OSError: the bucket is away \(the stream, after 9 samples\)"):
        written(folder, failing(numbers(11), 9), numbers(5), *words)
    with pytest.raises(LockstepError, match=r"^no complete stream there: .*tools/write_shards.py TASK --to "):
        stored(folder)
    kept = {path.name: path.stat().st_mtime_ns for path in (folder / "train").iterdir()}
    assert [*sorted(kept)] == ["000000.tar", "000001.tar"]
    for other in (numbers(11, start=1), numbers(3), numbers(4)):
        with pytest.raises(LockstepError, match="the stream gives other samples than before"):
            written(folder, other, numbers(5), *words)
    written(folder, iter(numbers(11)), iter(numbers(5)), *words)
    assert {name: (folder / "train" / name).stat().st_mtime_ns for name in kept} == kept
    train, val = stored(folder)
    assert read(train) == numbers(11)
    assert read(val) == numbers(5)
    with pytest.raises(LockstepError, match=r"^the shards are complete already"):
        written(folder, numbers(11), numbers(5))
    shutil.rmtree(folder)
    assert "kB, 3 samples: " in written(folder, Endless(), None, "--limit", "3")
    assert [sample["text"] for sample in read(stored(folder)[0])] == ["number 0", "number 1", "number 2"]


def test_a_set_that_has_numbers_is_written_too_and_an_empty_stream_is_refused(tmp_path):
    """Beside a stream. A DataLoader's samples are those of its dataset."""
    written(tmp_path / "s", DataLoader(Torchs2(), batch_size=2), numbers(3))
    train, val = stored(tmp_path / "s", transform=lambda sample: sample | {"twice": 2})
    assert read(train) == [{"n": n, "twice": 2} for n in range(5)]
    assert len(val) == 3
    with pytest.raises(LockstepError, match=r"^the stream has no sample"):
        written(tmp_path / "t", Torchs(), None)


class Torchs2(IterableDataset):
    def __iter__(self):
        return iter(numbers(5))


def test_the_order_is_that_of_shards(tmp_path):
    written(tmp_path / "s", numbers(40), None, "--shard-samples", "5")
    train, _ = stored(tmp_path / "s", options=stream.Options(lanes=4))
    order = train.epoch_order(3, 1)
    assert isinstance(order, Order)
    assert order.lanes == 4
    assert sorted(order[:40].tolist()) == [*range(40)]
