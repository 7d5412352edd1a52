"""Batches of any form, and samples drawn from seeds: in loader processes, on any cut, after a resume."""

import json
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, launching, succeed
from loading import Rows, loaders_of, make_plan, places_of, world
from saved import assert_same_bits, load
from test_the_idea import distance
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Subset, default_collate

import tasks
from data_loader import create_data_loaders
from engine import config, contract
from engine.contract import BatchInfo, LockstepError
from engine.data import batches
from engine.data.ahead import to_device
from engine.data.fingerprint import fingerprint
from engine.data.samples import Fetcher, Request
from plugins.resilience.skipped_steps import not_finite
from plugins.resilience.task_errors import suggest_fix
from tests.tasks.forms import FORMS, Drawn, Encoding, Pair, Ragged, Wave, parts
from tests.tasks.toy import Waves

TASK, OWN_TEXT = str(ROOT / "tests" / "tasks" / "forms.py"), str(ROOT / "examples" / "own_text.py")
MANY, BITS = (str(ROOT / "tests" / "ranks" / f"{name}.py") for name in ("many", "bits"))


@dataclass
class Grown:
    """Has a field that its `__init__` does not take."""

    x: Any
    about: Any = field(init=False, default="before")


class Answer(OrderedDict):
    """A dict with attributes, as the outputs of Hugging Face's models are."""


def everything(i):
    return {
        "tensor": torch.full((2,), i),
        "array": np.full((3,), float(i), np.float32),
        "number": i,
        "truth": i > 1,
        "text": f"number {i}",
        "none": None,
        "object": complex(i),
        "ragged": [*range(i)],
        "list": [torch.tensor(i), f"{i}"],
        "tuple": (torch.tensor(i), i),
        "pair": Pair(torch.tensor(i), i, "z"),
        "wave": Wave(torch.tensor([i]), i, {"deep": torch.tensor(i)}),
        "encoding": Encoding({"ids": torch.tensor([i])}, "kept"),
        "answer": Answer(logits=torch.tensor(i)),
    }


def test_samples_of_one_form_become_a_batch_of_that_form():
    batch = batches.collate([everything(i) for i in range(3)])
    numbers = torch.arange(3)
    assert torch.equal(batch["tensor"], numbers[:, None].expand(3, 2)) and batch["array"].dtype == torch.float32
    assert torch.equal(batch["number"], numbers) and batch["truth"].tolist() == [False, False, True]
    assert batch["text"] == ["number 0", "number 1", "number 2"] and batch["none"] == [None] * 3
    assert batch["object"] == [0j, 1 + 0j, 2 + 0j] and batch["ragged"] == [[], [0], [0, 1]]
    assert torch.equal(batch["list"][0], numbers) and batch["list"][1] == ["0", "1", "2"]
    assert type(batch["tuple"]) is tuple and torch.equal(batch["tuple"][1], numbers)
    assert type(batch["pair"]) is Pair and torch.equal(batch["pair"].x, numbers) and batch["pair"].about == ["z"] * 3
    assert type(batch["wave"]) is Wave and torch.equal(batch["wave"].about["deep"], numbers)
    assert type(batch["encoding"]) is Encoding and torch.equal(batch["encoding"].ids, numbers[:, None])
    assert batch["encoding"]._encodings == "kept" and type(batch["answer"]) is Answer
    known = ("tensor", "array", "number", "truth", "text")
    torchs = default_collate([{name: everything(i)[name] for name in known} for i in range(3)])
    for name in known:
        same = torch.equal if isinstance(torchs[name], torch.Tensor) else list.__eq__
        assert same(batch[name], torchs[name]), name


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ({"x": 1}, {"x": 1, "y": 2}, "one sample has x, and another has x, y"),
        ({"x": (1, 2)}, {"x": 3}, "one sample has 0, 1, and another has an object"),
    ],
)
def test_samples_of_other_forms_are_no_batch(one, other, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        batches.collate([one, other])


def test_tensors_of_another_length_want_a_collate():
    with pytest.raises(
        LockstepError, match=r"^sample 0, 1 cannot be loaded: RuntimeError: .* of one shape\? a method `col"
    ):
        Fetcher([{"x": torch.zeros(n)} for n in (1, 2)]).get(Request([0, 1]))


class Shorter(Rows):
    def __getitems__(self, indices):
        return {"x": torch.tensor(indices), "deep": (torch.zeros(7, 2),)}


class TwoLists(Rows):
    def __getitems__(self, indices):
        return [torch.tensor(indices), torch.tensor(indices)]


class Dropping(Rows):
    def __getitem__(self, i):
        return None if i == 6 else {"x": torch.tensor(i)}

    def collate(self, samples):
        return default_collate([each for each in samples if each is not None])


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (Shorter(), r"'deep.0' of a batch of 4 samples .* has 7 rows \(Shorter\): give every tensor a row"),
        (TwoLists(), r"'value' of a batch of 4 samples .* has 2 rows \(TwoLists\): .* a tuple \(x, y\)"),
        (Dropping(), r"'x' of a batch of 4 samples .* has 3 rows \(Dropping\): let `collate` drop and add none"),
    ],
)
def test_a_batch_of_another_length_than_asked_for_is_refused(dataset, says):
    train, _ = loaders_of(dataset)
    with pytest.raises(LockstepError, match=rf"^{says}"):
        list(train.passes())


class Packed(Rows):
    def collate(self, samples):
        rows = torch.cat([each["x"].view(1).repeat(3) for each in samples])
        return {"rows": rows, "boxes": [rows, *[rows[:2]] * (len(samples) - 1)]}


def test_what_a_collate_packs_needs_one_part_with_a_row_for_each_sample():
    assert [len(batch["rows"]) for batch, _ in loaders_of(Packed())[0].passes()] == [12, 12, 6]


@pytest.mark.parametrize("missing", [3, 8])
def test_a_sample_that_is_none_is_named(missing):
    rows = [{"x": i, "deep": {"mask": torch.ones(2)}, "text": "a" if i % 2 else None} for i in range(12)]
    without = [None if i == missing else row for i, row in enumerate(rows)]
    half = [row | {"deep": {"mask": None}} if i == missing else row for i, row in enumerate(rows)]
    part = rf"'deep.mask' of sample {missing} is None, and of others it is not \(list\)"
    for dataset, says in ((without, rf"^sample {missing} cannot .*: it is None"), (half, part)):
        with pytest.raises(LockstepError, match=says):
            list(loaders_of(dataset)[1])


def test_a_task_by_its_path_imports_its_neighbours_and_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "its_neighbour.py").write_text("from tests.tasks.forms import Task as Forms\n")
    (tmp_path / "data_loader.py").write_text("raise ImportError('in place of the engine's')\n")
    own = tmp_path / "own.py"
    own.write_text("import data_loader\nfrom its_neighbour import Forms\n\nclass Task(Forms):\n    pass\n")
    assert tasks.load(str(own)).__name__ == "Task" and sys.path[-1] == str(tmp_path)


def test_every_tensor_is_changed_and_nothing_else():
    batch = batches.collate([everything(i) for i in range(3)]) | {"packed": pack_sequence([torch.ones(2)])}
    grown = Grown(torch.ones(2))
    grown.about = "after"
    batch["grown"] = grown
    changed = batches.map_tensors(batch, lambda value: value[:2] + 0)
    before, after = dict(batches.tree_leaves(batch)), dict(batches.tree_leaves(changed))
    assert [*before] == [*after] and sum(isinstance(leaf, torch.Tensor) for leaf in before.values()) == 15
    for name, leaf in before.items():
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(after[name], leaf[:2]) and len(leaf) == 2 + (name != "grown.x"), "and it is as it was"
        else:
            assert after[name] is leaf
    assert changed["grown"].about == "after" and changed["encoding"]._encodings == "kept"
    assert next(batches.tensors(batch)) is batch["tensor"]


def test_a_copy_to_a_device_takes_the_tensors_and_leaves_the_rest(monkeypatch):
    """As to a GPU; here to torch's device without memory."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    batch = batches.collate([everything(i) for i in range(3)])
    there = to_device(batch, torch.device("meta"))
    assert {leaf.device.type for leaf in batches.tensors(there)} == {"meta"} and type(there["wave"]) is Wave
    assert there["text"] is batch["text"] and there["ragged"] == batch["ragged"]
    assert next(batches.tensors(to_device(there, torch.device("meta")))) is there["tensor"], "what is there stays"


def net(**inputs):
    return inputs.keys()


def test_the_loaders_numbers_change_nothing_else():
    given = BatchInfo(*[torch.arange(2)] * 3)
    x = torch.arange(6).view(2, 3)
    for batch in ({"x": x}, Answer(x=x)):
        told = batches.attach_info(batch, given)
        assert told["lockstep"] is given is batches.batch_info(told) and type(told) is type(batch) and len(batch) == 1
    a, b = batches.attach_info((x, "a text"), given)
    assert a is x and b == "a text"
    for batch in ((x, 1), [x, 1], Pair(x, 1, 2), Wave(x[0], 1, {}), Ragged.__new__(Ragged), Encoding({"x": x}), x):
        told = batches.attach_info(batch, given)
        assert told.lockstep is given is batches.batch_info(told) and isinstance(told, type(batch))
        assert not hasattr(batch, "lockstep"), "a dataset may give the same one again"
    assert net(**batches.attach_info(Encoding({"x": x}), given)) == {"x"}, "as it goes into a model"
    assert net(**contract.inputs(batches.attach_info({"x": x}, given))) == {"x"}
    assert torch.equal(batches.attach_info(x, given), x)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


@dataclass(slots=True)
class Roomy:
    x: Any
    lockstep: Any = None


@pytest.mark.parametrize("batch", [None, "a text", 3, Slotted(1)])
def test_a_batch_without_room_for_them_is_refused(batch):
    dataset = type("Odd", (Rows,), {"__getitems__": lambda self, indices: batch})()
    with pytest.raises(LockstepError, match=rf"^a batch is a {type(batch).__name__}, to which .* \(Odd\): give a dict"):
        fingerprint(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_any_form_is_loaded(form):
    dataset = Drawn(Waves(10, 0), form)
    seen = []
    for workers in (0, 2):
        train, val = loaders_of(dataset, workers)
        for batch in [*(batch for batch, _ in train.passes()), *val]:
            assert isinstance(batch, Ragged) is (form == "collate")
            given, (x, y, about) = batches.batch_info(batch), parts(batch)
            names = about["name"] if isinstance(about, dict) else [each["name"] for each in about]
            assert names == [f"wave {i}" for i in given.index.tolist()] and len(given.index) == len(x) == len(y)
            seen.append((workers, [*map(str, dict(batches.tree_leaves([x, y, about])).values())]))
    assert [leaves for w, leaves in seen if w] == [leaves for w, leaves in seen if not w], "processes make the same"
    assert fingerprint(dataset) == fingerprint(Drawn(Waves(10, 0), form)) != fingerprint(Drawn(Waves(10, 1), form))


class Windows:
    """Windows of a row of numbers, many at once."""

    def __len__(self):
        return 61

    def __getitems__(self, indices, seeds):
        return {"i": torch.tensor(indices), "start": (contract.uniform(seeds, 1)[:, 0] * 1e6).long()}


class OneByOne(Windows):
    __getitems__ = None

    def __getitem__(self, i, seed):
        return {name: values[0] for name, values in Windows.__getitems__(self, [i], torch.tensor([seed])).items()}


def drawn(dataset, epoch, size=1, batch=12, passes=1, position=0, workers=0):
    """{position: (index, start)} of an epoch, over all ranks."""
    found = {}
    for rank in range(size):
        the_plan = make_plan(61, size, batch=batch, accumulation=passes)
        cfg = config.Config(seed=5, num_workers=workers, eval_batch_size=7)
        train, _ = create_data_loaders(cfg, world(rank, size), the_plan, dataset, Rows())
        train.set_epoch(epoch, position)
        for batch_, micro in train.passes():
            if not micro.empty:
                pairs = zip(batch_["i"].tolist(), batch_["start"].tolist(), strict=True)
                found |= dict(zip(places_of(micro), pairs, strict=True))
    return dict(sorted(found.items()))


def test_samples_are_drawn_from_seed_epoch_and_position_alone():
    straight = drawn(Windows(), 0)
    assert len(straight) == 61 and len({start for _, start in straight.values()}) == 61
    for size, batch, passes in ((2, 6, 1), (3, 2, 2), (1, 3, 4), (4, 3, 1)):
        assert drawn(Windows(), 0, size, batch, passes) == straight
    assert drawn(OneByOne(), 0, 3, 4) == drawn(Windows(), 0, 2, 6, workers=1) == straight
    assert drawn(Windows(), 0, 2, 6, position=24) == {at: each for at, each in straight.items() if at >= 24}
    another = drawn(Windows(), 1)
    assert not {start for _, start in straight.values()} & {start for _, start in another.values()}


def test_a_sample_and_the_noise_in_the_loss_are_never_drawn_from_one_seed():
    """Of one place they would be the same numbers, of two places of an epoch, too."""
    loader, crops, noise = loaders_of(Windows())[0], list[int](), list[int]()
    for batch, _ in loader.passes():
        crops += batch["start"].tolist()
        noise += (contract.uniform(batch["lockstep"].seed, 1)[:, 0] * 1e6).long().tolist()
    assert len({*crops, *noise}) == len(crops) + len(noise) == 2 * 61


class Gaps(Windows):
    """A row with places that were not measured: a window has NaN or not, by where it begins."""

    def __getitems__(self, indices, seeds):
        place = contract.uniform(seeds, 1)
        return {"x": torch.where(place < 0.25, torch.nan, place)}


def test_a_window_drawn_onto_a_gap_is_found_again():
    """Which samples of a pass had NaN is asked after the step, and each is drawn once more: as it was, in any epoch."""
    named = {}
    for epoch in (0, 1):
        train, _ = loaders_of(Gaps(), epoch=epoch)
        for batch, micro in train.passes():
            had = [i for i, x in zip(micro.indices, batch["x"], strict=True) if x.isnan()]
            assert not_finite(train, micro) == dict.fromkeys(had, "NaN in x")
            named.setdefault(epoch, set()).update(had)
    assert 0 < len(named[0]) < 61 and named[0] != named[1], "other windows each epoch"


def test_an_evaluation_draws_the_same_for_a_sample_whatever_the_cut():
    def scored(size, batch, seed, workers=0):
        cfg = config.Config(seed=seed, eval_batch_size=batch, num_workers=workers)
        found = {}
        for rank in range(size):
            _, val = create_data_loaders(cfg, world(rank, size), make_plan(10, size), Rows(), Windows())
            for each in val:
                seeds = each["lockstep"].seed
                found |= zip(each["i"].tolist(), zip(each["start"].tolist(), seeds.tolist(), strict=True), strict=True)
        return dict(sorted(found.items()))

    whole = scored(1, 61, 0)
    assert whole == scored(3, 7, 1) == scored(2, 8, 2, workers=1)
    assert len({start for start, _ in whole.values()}) == len({seed for _, seed in whole.values()}) == 61


def test_a_part_of_such_a_dataset_passes_the_seeds_on():
    part = Subset(Subset(Windows(), range(5, 30)), [20, 3])
    (batch, _), *_ = loaders_of(part)[0].passes()
    whole = drawn(part.dataset.dataset, 0)
    assert sorted(batch["i"].tolist()) == [8, 25] and whole


def test_such_a_dataset_is_not_held():
    assert create_data_loaders(config.Config(cache="none"), world(), make_plan(61, 1), Windows(), Rows())
    with pytest.raises(LockstepError, match=r"^cache=host, but Windows draws its samples from seeds: .* each epoch"):
        loaders_of(Windows(), cache="host")


def test_what_is_held_may_be_nested(monkeypatch):
    class Nested(Rows):
        def __getitem__(self, i):
            return Pair(torch.tensor(i), {"deep": (torch.full((2, 2), i),)}, [torch.tensor([i])])

    seen = []
    for cache in ("none", "host"):
        train, val = loaders_of(Nested(), cache=cache)
        assert type(train.dataset) is (Nested if cache == "none" else type(val.dataset))
        seen.append([*(batch for batch, _ in train.passes()), *val])
    for one, other in zip(*seen, strict=True):
        assert type(one).__name__ == type(other).__name__ == "Pair"
        assert all(map(torch.equal, batches.tensors(one), batches.tensors(other)))
    for kind in (tuple, list):
        for batch in loaders_of([kind((torch.tensor(i), torch.tensor(-i))) for i in range(10)], cache="host")[1]:
            assert (
                isinstance(batch, kind) and batch[0].tolist() == (-batch[1]).tolist() == batch.lockstep.index.tolist()
            )
    with pytest.raises(LockstepError, match=r"^cache=host, but Texts gives more than tensors with the batch"):
        loaders_of(type("Texts", (Rows,), {"__getitem__": lambda self, i: {"x": i, "name": "a"}})(), cache="host")


def test_arrays_of_a_ready_batch_become_tensors():
    class Arrays(Rows):
        def __getitems__(self, indices):
            return {"x": np.array(indices), "deep": [np.ones(len(indices)), np.array(["a"])], "rows": [[1], []]}

    (batch, _), *_ = loaders_of(Arrays())[0].passes()
    assert batch["x"].dtype == torch.int64 and batch["deep"][0].dtype == torch.float64
    assert isinstance(batch["deep"][1], np.ndarray) and batch["rows"] == [[1], []]


@dataclass
class Signals:
    x: torch.Tensor
    labels: list[Any]
    odd: torch.Tensor


@pytest.mark.parametrize("kind", [dict, "dataclass"])
def test_passes_of_one_size_are_packed_and_each_is_what_its_rows_were(kind):
    """Of all types; each tensor of a pass begins where a batch of its own would."""
    x = torch.randn(12, 5, 3)
    parts = {"x": x, "labels": [x.half(), x[:, 0] > 0, {"name": "a text"}], "odd": torch.arange(12, dtype=torch.int8)}
    parts["labels"].append(torch.complex(x[:, 0, 0], x[:, 0, 1]))
    index = torch.arange(12)
    info = BatchInfo(index, index + 1, index * 3)
    batch = batches.attach_info(parts if kind is dict else Signals(**parts), info)
    packed = batches.pack_passes(batch, 3)
    for number in range(3):
        part, rows = packed.part(number), slice(4 * number, 4 * number + 4)
        right = batches.map_tensors(batch, lambda leaf, rows=rows: leaf[rows])
        pairs = [*zip(batches.tree_leaves(part), batches.tree_leaves(right), strict=True)]
        assert len(pairs) == (10 if kind is dict else 6)
        for (name, leaf), (other, expected) in pairs:
            assert name == other and type(leaf) is type(expected)
            if isinstance(leaf, torch.Tensor):
                assert leaf.dtype == expected.dtype and torch.equal(leaf, expected)
                place = leaf.data_ptr() - packed.pieces[number].data_ptr()
                assert place % 512 == 0 and place + leaf.numel() * leaf.element_size() <= len(packed.pieces[number])
                assert leaf.is_contiguous()
    assert isinstance(part, kind if kind is dict else Signals)


@pytest.mark.parametrize("kind", [dict, "dataclass", torch.Tensor])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 4, 3)])
def test_a_pass_has_the_loaders_numbers_of_its_own_samples(kind, sizes):
    """Also in a batch that is no dict, as `prepare` may return one: there they are an attribute."""
    x, index = torch.randn(sum(sizes), 5), torch.arange(sum(sizes))
    whole = {dict: {"x": x}, "dataclass": Signals(x, [], x[:, 0]), torch.Tensor: x}[kind]
    whole = batches.attach_info(whole, BatchInfo(index, index + 1, index * 3))
    micros = [SimpleNamespace(indices=[0] * size, step=n) for n, size in enumerate(sizes)]
    begin = 0
    for part, micro in zip(batches.split_rows(whole, micros, lambda of: of[0].step), micros, strict=True):
        rows = slice(begin, begin := begin + len(micro.indices))
        info = batches.batch_info(part)
        assert info.index.tolist() == index[rows].tolist() and info.seed.tolist() == (index * 3)[rows].tolist()
        assert info.step_info == micro.step
    assert batches.batch_info(whole).index.tolist() == index.tolist()


def test_objects_are_told_apart_by_what_is_the_same_in_every_process():
    def digest(value):
        return fingerprint([{"x": 0, "value": value}] * 3)

    assert digest("a") != digest("b") and digest([1, 2]) != digest([1, 3]) and digest(None) != digest(1j)
    one, same, other = (SimpleNamespace(a=n) for n in (1, 1, 2))
    assert digest(one) == digest(same) != digest(other), "not by their place in memory"
    assert digest({1, 2}) == digest({3}), "the order of a set is another in each process"


def test_the_loader_takes_two_samples_to_try_something():
    train, _ = loaders_of(Drawn(Waves(10, 0), "dict"))
    two, whole = train.example(2), train.example()
    assert two["about"]["name"] == whole["about"]["name"][:2] and len(whole["x"]) == 4
    assert torch.equal(two["x"], whole["x"][:2]) and torch.equal(two["lockstep"].seed, whole["lockstep"].seed[:2])


MISTAKES = [  # an error of a task, and what it is told
    (lambda batch: batch["seed"], {}, "the loader's own numbers have one name: batch['lockstep'].seed"),
    (lambda batch: batch["mean_weight"], {}, "the loader's own numbers have one name: batch['lockstep'].mean_weight"),
    (lambda batch: (lambda x: 0)(**batch), {"x": 1, "lockstep": 2}, "leave that out: net(**contract.inputs(batch))"),
    (lambda batch: batch["lockstep"], Encoding({}), "of a batch that is no dict it is an attribute: batch.lockstep"),
    (lambda batch: batch.lockstep, {}, "of a dict it is a key: batch['lockstep']"),
    (lambda batch: batch["seeds"], {}, ""),
    (lambda batch: batch.lockstep, Grown(1), ""),
]


@pytest.mark.parametrize(("mistake", "batch", "todo"), MISTAKES)
def test_a_task_that_looks_for_the_loaders_numbers_elsewhere_is_told(mistake, batch, todo):
    with pytest.raises((KeyError, TypeError, AttributeError)) as caught:
        mistake(batch)
    assert suggest_fix(caught.value) == todo


def test_it_is_told_where_it_looks(launch, tmp_path):
    own = "from tests.tasks.forms import Task as Forms\n\nclass Task(Forms):\n    def loss(self, net, batch):\n"
    (tmp_path / "own.py").write_text(own + "        return batch['seed']\n")
    done = launch.python("train.py", str(tmp_path / "own.py"), f"save_dir={tmp_path / 'run'}")
    assert done.code == 1 and len(done.errors) == 1 and "own.py:5 in loss" in done.errors[0], done.err
    assert done.errors[0].startswith("error: KeyError: 'seed' (")
    assert done.errors[0].endswith("have one name: batch['lockstep'].seed"), done.err


def train(processes, *words):
    with launching() as launch:
        succeed(launch.python(*words) if processes == 1 else launch.torchrun(processes, *words))


CUTS = {
    1: ["batch_size=12"],
    2: ["batch_size=3", "gradient_accumulation_steps=2", "num_workers=1"],
    3: ["batch_size=4"],
}


@pytest.mark.slow
def test_every_cut_takes_the_same_steps(tmp_path):
    """In float64. Crops and masks, text and ragged lists beside tensors; two processes load theirs in processes."""
    forms = ["tuple", "encoding", "collate"]
    for processes, size in CUTS.items():
        words = [TASK, *size, "steps=8", "optim.ema_decay=0.9"]
        runs = [[*words, f"own.form={form}", f"save_dir={tmp_path}/{processes}/{form}"] for form in forms]
        train(processes, MANY, json.dumps(runs))
    straight = load(tmp_path / "1" / "tuple")
    for run in [tmp_path / str(n) / form for n in CUTS for form in forms]:
        for part in ("model", "ema"):
            assert distance(load(run)[part], straight[part]) < 1e-9, run


@pytest.mark.slow
def test_resumed_amid_an_epoch_on_other_processes_to_the_same_bits(launch, tmp_path):
    """With virtual workers, accumulation, bf16 and an average of weights; two legs have loader processes."""
    common = [TASK, "own.form=nested", "virtual_workers=3", "global_batch=12", "batch_size=2", "amp=bf16", "seed=3"]
    common += ["optim.ema_decay=0.9", "model.dropout=0.2", "log_every=1", "eval_every=4", "steps=9"]
    ours, straight = ([[*common, f"save_dir={tmp_path / name}"]] for name in ("ours", "straight"))
    with_workers = json.dumps([[*ours[0], "num_workers=1"]])
    launch.torchrun(2, BITS, with_workers, "SIGTERM:1:2:seed_pass")
    assert 0 < load(tmp_path / "ours")["progress"]["step"] < 4
    assert launch.torchrun(3, BITS, json.dumps(ours), "SIGKILL:0:7:loss_vector").code
    assert 0 < load(tmp_path / "ours")["progress"]["step"] < 9
    succeed(launch.python(BITS, with_workers))
    succeed(launch.python(BITS, json.dumps(straight)))
    assert_same_bits(tmp_path / "ours", tmp_path / "straight")


def losses_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def text(tmp_path):
    """examples/own_text.py on a small text: (the text, the task with its data, the windows to validate on)."""
    words = "def f(x):\n        return  x\n" * 40
    (tmp_path / "text.txt").write_text(words)
    own = ["text.length=16", "text.val_share=0.4", "model.width=16", "model.layers=2", "model.heads=2"]
    cfg = config.parse([OWN_TEXT, f"text.path={tmp_path / 'text.txt'}", *own], tasks.load).cfg
    task = tasks.load(OWN_TEXT)(cfg)
    return words, task, task.datasets()[1]


def test_each_character_of_a_text_is_to_be_told_with_its_own_weight(text):
    """Against a plain loop over the text: of two spaces the second counts a tenth, where it is what comes next."""
    words, task, val = text
    begin = len(words) - int(0.4 * len(words))
    batch = val.__getitems__([0, 3], torch.zeros(2, dtype=torch.int64))
    for row, window in enumerate((0, 3)):
        places = range(begin + 16 * window, begin + 16 * window + 16)
        assert "".join(task.chars[n] for n in batch["x"][row]) == "".join(words[at] for at in places)
        assert "".join(task.chars[n] for n in batch["y"][row]) == "".join(words[at + 1] for at in places)
        weights = [0.1 if words[at : at + 2] == "  " else 1.0 for at in places]
        assert 0.1 in weights and batch["weight"][row].tolist() == pytest.approx(weights)


def test_a_language_model_sees_nothing_of_what_it_is_to_tell(text):
    """The characters from a place on change no output before it; all that are there reach the last one."""
    _, task, val = text
    model = task.model()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    x = val.__getitems__([0], torch.zeros(1, dtype=torch.int64))["x"]
    for place in range(16):
        other = x.clone()
        other[:, place:] = (other[:, place:] + 1) % len(task.chars)
        off = (model(other) - model(x)).abs().amax((0, 2))
        assert (off[:place] < 1e-6).all() and (off[place:] > 1e-6).all()


@pytest.mark.slow
def test_a_text_is_learned_on_any_processes_and_after_a_kill(launch, tmp_path):
    """Characters of Python's documentation, in windows drawn from the seeds."""
    small = "model.width=16 model.layers=1 model.heads=2 text.length=32 text.val_share=0.02 amp=off".split()
    small += "schedule.warmup_epochs=0 optim.lr=0.02 global_batch=24".split()
    words = ["examples/own_text.py", *small, "steps=12", "log_every=2", "save_every=3", "eval_every=6"]
    succeed(launch.python("train.py", *words, f"save_dir={tmp_path / 'one'}"))
    two = [[*words, "batch_size=4", "num_workers=1", f"save_dir={tmp_path / 'two'}"]]
    launch.may_stay += ["lockstep_", "torch_"]  # of the loader process of a rank that is killed
    assert launch.torchrun(2, BITS, json.dumps(two), "SIGKILL:1:8:loss_vector").code
    assert 0 < load(tmp_path / "two")["progress"]["step"] < 12
    succeed(launch.torchrun(2, "train.py", *two[0]))
    one, again = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert again == pytest.approx(one, rel=1e-5) and len(one) == 8 and one[-1] < one[0] - 0.1
