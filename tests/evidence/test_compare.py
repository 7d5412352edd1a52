"""tools/compare.py: what is planted in one of two runs is named in its first lines."""

import json
import re
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import launching, succeed
from forked_tools import fork_trainings
from tampering import (
    copied,
    delete_checkpoints,
    drop_digests,
    keep_checkpoint,
    keep_lines,
    replace_text,
    write_log,
)

from engine.errors import LockstepError
from plugins.reporting.step_record import ARRAYS, sketched
from tools import running
from tools.evidence import compare, records

TASK = """
from dataclasses import dataclass
import numpy as np
import torch
from torch import nn
from engine.config import option, section
from tests.tasks import toy


@dataclass
class Data(toy.Data):
    root: str = option("", "a file of inputs")


@dataclass
class Model(toy.Model):
    norm: bool = option(False, "BatchNorm")


class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        norm = nn.BatchNorm1d(16) if cfg.norm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Dropout(cfg.dropout), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x.float())


class Task(toy.Task):
    @dataclass
    class Settings(toy.Task.Settings):
        dataset: Data = section(Data)
        model: Model = section(Model)

    def datasets(self):
        train, val = super().datasets()
        train.x = torch.from_numpy(np.load(self.cfg.dataset.root))
        return train, val

    def model(self):
        return Net(self.cfg.model)
"""
SOFTSIGN = TASK.replace("nn.Tanh()", "nn.Softsign()")
BASE = ["global_batch=8", "batch_size=8", "steps=10", "log_every=5", "digest_every=1", "amp=off"]
BASE += ["keep_checkpoints=9", "check_sums=false", "device=cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A task in a file of its own, its run `a`, and a function that makes others: named, with these words."""
    folder = tmp_path_factory.mktemp("compare")
    inputs = np.random.default_rng(0).normal(size=(61, 8))
    np.save(folder / "x.npy", inputs)
    inputs[17, 3] += 0.5
    np.save(folder / "y.npy", inputs)
    (folder / "task.py").write_text(TASK)
    (folder / "other.py").write_text(SOFTSIGN)
    with launching() as launch:

        def run(name, *words, processes=1, task="task.py", virtual=True):
            if not (folder / name).exists():
                given = [f"save_dir={folder / name}", f"dataset.root={folder / 'x.npy'}", *BASE]
                given += ["virtual_workers=4"] if virtual else []
                by_key = {word.split("=")[0]: word for word in [*given, *words]}
                succeed(launch.train(str(folder / task), *by_key.values(), processes=processes))
            return folder / name

        yield SimpleNamespace(folder=folder, run=run, a=run("a", "save_every=5"))


@pytest.fixture
def say(launch, monkeypatch, capfd):
    """Compare two runs; return what is printed."""
    fork_trainings(launch, monkeypatch)

    def said(*words, code=1):
        capfd.readouterr()
        ended = compare.main([str(word) for word in words])
        printed = capfd.readouterr()
        assert ended == code, f"{printed.out}\n{printed.err}"
        return printed.out or printed.err

    return said


def first_lines(text):
    """The verdict, and what can change the numbers."""
    verdict, _, rest = text.partition("\n\n")[2].partition("\n\n")
    return [verdict, *(line for line in rest.splitlines() if "cannot change" not in line)][:4]


class Planted(NamedTuple):
    words: list[str]
    verdict: str  # how it begins
    line: str  # in a line below


RATE = Planted(
    ["optim.lr=0.02"],
    "They part at step 1: weights after the step: layers.0.weight, 3",
    "optim.lr: 0.01 in A, 0.02 in B",
)
PLANTED = {
    "rate": RATE,
    "seed": Planted(
        ["seed=1"],
        "They part at step 1: batch: x, other samples: at position 0 of the epoch",
        "seed: 0 in A, 1",
    ),
    "dropout": Planted(
        ["model.dropout=0.3"],
        "They part at step 1: forward: layers.3 (Dropout), ",
        "model.dropout: 0.0 in A, 0.3 in B",
    ),
    "bf16": Planted(
        ["amp=bf16"],
        "They part at step 1: forward: layers.0 (Linear), float32 in A, bfloat16 in B, all 8 samples; ",
        "precision: off in A, bf16 in B",
    ),
}


@pytest.mark.parametrize(
    "planted", ["rate", *(pytest.param(name, marks=pytest.mark.slow) for name in PLANTED if name != "rate")]
)
def test_what_is_planted_in_a_config_is_named_first(place, say, planted):
    words, verdict, line = PLANTED[planted]
    found = first_lines(say(place.a, place.run(planted, *words), "--trust"))
    assert found[0].startswith(verdict), found
    assert any(line in each for each in found[1:]), found


@pytest.mark.slow
def test_a_changed_sample_is_named_at_the_step_that_takes_it(place, say):
    """Its file has the same form. The fingerprint names the part of the data."""
    text = say(place.a, place.run("sample", f"dataset.root={place.folder / 'y.npy'}"), "--trust")
    order = np.random.default_rng((0, 0)).permutation(61).tolist()
    at = order.index(17) // 8 + 1
    assert at > 1, "or nothing has to be searched"
    verdict = first_lines(text)[0]
    assert verdict.startswith(f"They part at step {at}: batch: x, "), text
    truth = 0.5 / np.linalg.norm(np.load(place.folder / "x.npy")[17])
    told = float(verdict.split("batch: x, ")[1].split()[0])
    assert truth / 2 < told < truth * 2 and ", sample 17" in verdict, (truth, text)
    assert "data" not in text.split("alike")[1].splitlines()[0] and "train: x of all 61 samples" in text


@pytest.mark.slow
def test_another_line_of_code_is_named_and_where_it_acts(place, say):
    found = first_lines(say(place.a, place.run("code", task="other.py"), "--trust"))
    assert re.match(r"They part at step 1: forward: layers\.2 \((Softsign|Tanh)\)", found[0]), found
    assert "everything before is equal in bits" in found[0]
    assert any(re.match(r"code +source file task\.py: \w{12} in A, \w{12} in B$", line) for line in found), found


@pytest.mark.slow
def test_code_that_is_no_longer_there_is_found_by_taking_the_step_again(place, say):
    """As after another commit: the file of both has one path, and its contents have changed between the runs."""
    path = place.folder / "moved.py"
    path.write_text(TASK)
    before = place.run("before", task="moved.py")
    path.write_text(SOFTSIGN)
    text = say(before, place.run("after", task="moved.py"), "--trust")
    assert "both take the same bits up to step 5: the difference lies in what was not taken again: code" in text, text
    assert "A does not take its own bits: source files: " in text and "B does not" not in text
    again = say(before, place.folder / "after", "--trust", "--no-replay")
    assert first_lines(again)[0] == "They part, at step 5 at the latest.", again


@pytest.mark.slow
def test_a_flipped_bit_is_named_in_a_checkpoint_and_in_the_run_that_began_with_it(place, say):
    right, wrong = place.a / "step_5.pt", place.folder / "wrong.pt"
    state = torch.load(right, weights_only=True)
    state["model"]["layers.0.weight"].view(torch.int32)[3, 5] ^= 1 << 12
    torch.save(state, wrong)
    shutil.copy(place.a / "config.yaml", place.folder)
    said = "model: layers.0.weight[3, 5]: bit 12 is flipped ("
    assert said in first_lines(say(right, wrong))[0]
    whole, broken = (
        place.run(name, f"resume={path}", "steps=10") for name, path in (("whole", right), ("broken", wrong))
    )
    found = first_lines(say(whole, broken, "--trust"))
    assert found[0].startswith("They part at step 6: forward: layers.0 (Linear), "), found
    assert any(said in line for line in found[1:]), found
    assert say(place.a, whole, "--trust", code=0), "resumed by another folder, the same run"


class Environment(NamedTuple):
    """The environment in the checkpoints of a copy, and lines that name it."""

    change: Callable[[dict], object]
    lines: list[str]


ENVIRONMENTS = {
    "another machine": Environment(
        lambda known: known.update({"torch": "2.12.0", "TF32": "True", "threads": "2"}),
        [f"torch: {torch.__version__} in A, 2.12.0 in B", "TF32: False in A, True in B", "threads: 1 in A, 2 in B"],
    ),
    "an older version": Environment(
        lambda known: known.pop("square root"), ["square root: correctly rounded in A, torch's in B"]
    ),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_another_environment_is_named_even_if_the_bits_are_the_same(place, say, tmp_path, name):
    change, lines = ENVIRONMENTS[name]
    copy = copied(place.a, tmp_path / "copy")
    for file in {path.resolve() for path in copy.glob("*.pt")}:  # last.pt is a link
        state = torch.load(file, weights_only=True)
        change(state["environment"])
        state["code"]["Lockstep"] = "0"
        torch.save(state, file)
    known = json.loads((copy / "environment.json").read_text())
    (copy / "environment.json").write_text(json.dumps(known | {"git_commit": "1234567890abcdef"}))
    text = say(place.a, copy, "--trust", code=0)
    assert all(f"environment  {line}" in text for line in lines), text
    assert "commit: " in text and "1234567890ab" in text
    assert "source file Lockstep itself (engine, plugins, train.py, data_loader.py): " in text
    assert "The same bits: 3 log points, the checkpoints of step 10." in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("now", "then", "says"),
    [
        # On a CPU with bf16 auto would choose bf16; where A has run, it chose float32.
        ("amp: 'off'", "amp: auto", "amp (auto, off)"),
        # The key is an error in a new run.
        ("  zero: false\n", "  zero: true\n", "save_every (5, 0), optim.zero (True, False)"),
    ],
)
def test_a_step_is_taken_again_with_what_a_setting_meant_then(place, say, tmp_path, now, then, says):
    old = copied(place.a, tmp_path / "old")
    replace_text(old / "config.yaml", now, then)
    text = say(old, place.run("rate", *RATE.words), "--trust")
    assert first_lines(text)[0].startswith(RATE.verdict) and f"cannot change the numbers: {says}" in text, text


@pytest.mark.slow
def test_other_cuts_are_told_apart_rounding_from_batch_norm(place, say):
    plain, halves = place.run("one", virtual=False), place.run("two", virtual=False, processes=2)
    text = say(plain, halves, "--trust")
    assert first_lines(text)[0].startswith("They part at step 1, by rounding: "), text
    assert "nothing is beyond rounding" in text and "processes: 1 in A, 2 in B (without virtual_workers" in text
    norm = ["model.norm=true"]
    plain = place.run("one norm", *norm, virtual=False)
    halves = place.run("two norm", *norm, virtual=False, processes=2)
    found = first_lines(say(plain, halves, "--trust"))
    assert found[0].startswith("They part at step 1: forward: layers.1 (BatchNorm1d), "), found
    assert found[1].startswith("why  ") and "BatchNorm1d computes with the samples of its pass" in found[1]
    bits = [*norm, "drop_last=true"]
    say(place.run("bits", *bits), place.run("two bits", *bits, processes=2), code=0)


@pytest.mark.slow
def test_records_are_compared_with_each_other_and_with_a_run(place, say):
    one, other = place.run("r", "record=3"), place.run("s", "record=3", *RATE.words)
    mine, theirs = (run / "record_step_3.npz" for run in (one, other))
    text = say(mine, theirs)
    assert "Step 3 differs: forward: layers.0 (Linear), " in text and "the weights may differ before the step" in text
    assert "The same bits: the records of step 3." in say(mine, one, code=0)
    assert "The same bits: the records of step 3." in say(mine, place.a, "--trust", code=0)
    found = json.loads(say(one, other, "--no-replay", "--json"))
    assert found["step"]["step"] == 3 and found["differs"]["config"] == {"optim.lr": [0.01, 0.02]}
    third = place.run("t", "record=4") / "record_step_4.npz"
    said = f"error: the records are of step 3 and of step 4 ({mine}, {third}): give two of the same"
    assert say(mine, third, code=2).startswith(said)


def test_what_cannot_be_compared_is_said_in_one_line(place, say, tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK")
    copied(place.a, tmp_path / "list").joinpath("environment.json").write_text("[1]")
    copied(place.a, tmp_path / "log").joinpath("metrics.jsonl").write_text("x\n{}\n")
    a = place.a
    for code, text, *words in (
        (2, "no run in A", tmp_path, tmp_path),
        (2, "A is not there", tmp_path / "gone", a),
        (2, "the run cannot be read", tmp_path / "list", a),
        (2, "a line of the log is damaged", tmp_path / "log", a),
        (2, "the record cannot be read", tmp_path / "x.npz", a),
        (3, "the checkpoint cannot be read", a, place.folder / "x.npy"),
        (2, "steps count from 1", a, a, "--step", "-1"),
        (2, "a picture is .png or .svg", a, a, "--picture", "x.pdf"),
    ):
        said = say(*words, code=code)
        assert said.startswith(f"error: {text}") and said.count("\n") == 1, said


# ---- not known ----


def without_bits(run, keep=()):
    """As where no digest was logged and the checkpoints were deleted, with what names them."""
    drop_digests(run, keep)
    delete_checkpoints(run)
    (run / "status.json").unlink()


class Gone(NamedTuple):
    remove: Callable
    says: str


GONE = {
    "a line": Gone(lambda run: keep_lines(run, lambda line: line["step"] != 5), "B's log lacks 1 line, the first of"),
    "last lines": Gone(lambda run: keep_lines(run, lambda line: line["step"] < 10), "B's log lacks 1 line, the first"),
    "evaluations": Gone(
        lambda run: keep_lines(run, lambda line: line["event"] == "train"), "B's log lacks 2 evaluations"
    ),
    "the whole log": Gone(lambda run: write_log(run, []), "B's log lacks 2 lines, the first of step 5"),
    "a checkpoint": Gone(lambda run: (run / "step_5.pt").unlink(), "B's checkpoint step_5.pt is gone"),
    "the last checkpoint": Gone(delete_checkpoints, "B's checkpoint best_model"),
    "digests": Gone(without_bits, "no digest of the weights is in both logs"),
    "the last digest": Gone(
        lambda run: without_bits(run, keep=[5]), "weights are compared up to step 5, of the 10 that both have"
    ),
}


@pytest.mark.parametrize("gone", GONE)
def test_what_is_gone_is_named_and_nothing_is_assured(place, say, tmp_path, gone):
    remove, says = GONE[gone]
    copy = copied(place.a, tmp_path / "copy")
    say(place.a, copy, code=0)
    remove(copy)
    verdict = first_lines(say(place.a, copy, code=7))[0]
    assert verdict.startswith("Not known to be the same: ") and says in verdict
    found = json.loads(say(place.a, copy, "--json", code=7))
    assert found["verdict"] == "not known" and not found["same"]
    if gone != "evaluations":  # of these no config says at which steps they were
        assert any(says in each for each in json.loads(say(copy, copy, "--json", code=7))["missing"])


def test_a_run_that_was_killed_early_is_not_the_whole_one(place, say, tmp_path):
    """Its log and its checkpoints end with step 5, and so does what is the same."""
    copy = copied(place.a, tmp_path / "copy")
    keep_lines(copy, lambda line: line["step"] <= 5)
    (copy / "status.json").write_text(json.dumps({"step": 5, "checkpoint": keep_checkpoint(copy, 5)}))
    said = "Not known to be the same: A ends at step 10, B at step 5; the same where both can be compared: 1 log point"
    assert first_lines(say(place.a, copy, code=7))[0].startswith(said)


@pytest.mark.parametrize(("code", "ends"), [(1, 7), (130, 130), (143, 143)])
def test_a_step_that_could_not_be_taken_is_not_the_same(place, say, monkeypatch, code, ends):
    """Its training was killed; and a signal that ends this tool is no result."""

    def train_in(*words, **how):
        if code > 128:
            raise LockstepError("interrupted", exit_code=code)
        return running.Trained(-9, "")

    monkeypatch.setattr(compare, "train_in", train_in)
    text = say(place.a, place.a, "--trust", "--step", "3", code=ends)
    said = "Not known to be the same: step 3 was not compared: A cannot be taken again here: exit code -9"
    assert said in text if code == 1 else text.startswith("error: interrupted")


def test_a_step_that_nobody_has_recorded_is_not_the_same(place, say):
    text = say(place.a, place.a, "--no-replay", "--step", "3", code=7)
    assert "step 3 was not compared: no record of both" in text


def test_other_settings_without_a_step_in_common_are_not_known(say, tmp_path):
    for name, seed in (("one", 0), ("other", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "environment.json").write_text("{}")
        (tmp_path / name / "config.yaml").write_text(f"task: toy\nseed: {seed}\n")
    text = say(tmp_path / "one", tmp_path / "other", code=7)
    assert "no step is there of both; they differ in what is around the numbers" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optim.lr=0.0100001", "; the learning rate is 0.01 in A, 0.0100001 in B"),
        ("optim.weight_decay=0.0101", "nothing is larger than rounding, but optim.weight_decay is 0.01 in A, 0.0101"),
    ],
)
def test_a_small_difference_of_a_setting_is_no_rounding(place, say, word, says):
    name, decay = word.partition("=")[0], "optim.weight_decay=0.01"
    text = say(place.run(f"{name} 0", decay), place.run(f"{name} 1", decay, word), "--trust")
    assert "nothing is beyond rounding" not in text and ", by rounding" not in text and says in text, text


# ---- the arithmetic -------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """What a record holds of one tensor: rows (R, F), a row for each position; -1: no sample's."""

    kind: str
    name: str
    at: list[int]  # the pass
    positions: list[int]
    rows: torch.Tensor


def written(path, entries, **about):
    """A record of these entries, written and read."""
    listed, arrays, first = [], {name: [] for name in ARRAYS}, 0
    for kind, name, at, positions, rows in entries:
        places = np.array(positions)
        parts = [places, places % 7, *(part.numpy() for part in sketched(rows))]
        for each, part in zip(ARRAYS, parts, strict=True):
            arrays[each].append(part)
        shape = [*rows.shape] if positions[0] >= 0 else [*rows.shape[1:]]
        listed.append({"kind": kind, "name": name, "pass": at, "shape": shape, "dtype": str(rows.dtype)})
        listed[-1] |= {"first": first, "rows": len(rows)}
        first += len(rows)
    known = {"step": 1, "processes": 1, "lr": 0.1, "config": {}, "environment": {}, "entries": listed} | about
    np.savez_compressed(path, about=np.array(json.dumps(known)), **{n: np.concatenate(v) for n, v in arrays.items()})
    return records.read(path)


def outputs(rows):
    """The output of one module, for samples in their order."""
    return [Entry("forward", "f", [0, 0], [*range(len(rows))], rows)]


@pytest.mark.parametrize(
    ("rates", "passes", "beyond"), [((0.1, 0.1), 1, False), ((0.1, 0.2), 1, True), ((0.1, 0.2), 2, True)]
)
def test_a_weight_after_a_step_at_another_rate_is_no_rounding(tmp_path, rates, passes, beyond):
    """In half precision the update of a usual rate is smaller than what rounding makes of a weight."""
    rows, pair = torch.ones(1, 50), []
    for count, lr, off in ((1, rates[0], 0.0), (passes, rates[1], 5e-7)):
        entries = [Entry("forward", "f", [p, 0], [p], rows) for p in range(count)]
        entries += [Entry("gradient", "w", [], [-1], rows), Entry("weight", "w", [], [-1], rows * (1 + off))]
        pair.append(written(tmp_path / "r.npz", entries, lr=lr))
    found = records.compare(*pair)
    assert bool(found.beyond) is beyond
    assert ("nothing is beyond rounding" in found.sentence()) is not beyond
    assert ("but clip is 1 in A" in found.sentence("clip is 1 in A, 2 in B")) is not beyond


def test_the_relative_difference_is_the_true_one_to_a_factor_of_two(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for n, size in enumerate((1e-7, 1e-4, 0.1, 1.0) * 3):
        x = torch.randn(3, 500, generator=generator)
        y = x + size * torch.randn(3, 500, generator=generator)
        y[1] = x[1]
        (found,) = records.compare(*(written(tmp_path / "r.npz", outputs(each)) for each in (x, y))).differences
        rows = [0, 2]
        truth = float((x[rows].double() - y[rows].double()).norm() / x[rows].double().norm())
        assert truth / 2 < found.relative < truth * 2, n
        assert found.samples == (0, 2) and found.of == 3


@pytest.mark.parametrize(
    ("mine", "theirs", "sentence"),
    [
        ([0.0, 2.0, 0.0], [0.0, 0.0, 2.0], "forward: f, 1.[0-9]e.00 of its norm"),
        ([0.0, 2.0, 0.0], [-0.0, 2.0, 0.0], "forward: f, other bits of the same values"),
    ],
)
def test_bits_decide_also_where_norms_and_values_are_the_same(tmp_path, mine, theirs, sentence):
    pair = (written(tmp_path / "r.npz", outputs(torch.tensor([row]))) for row in (mine, theirs))
    found = records.first_difference(*pair)
    assert re.match(sentence, found), found


def drawn(name, n, width=50):
    rows = np.random.default_rng([*name.encode(), n]).normal(size=(1, width))
    return torch.from_numpy(rows)


def one_step(path, cut, broken, rounding=0.0):
    """A network of three modules whose output is drawn by position; `broken`: name, or kind and name -> what is added
    to each number, relative to it."""
    noise = np.random.default_rng(0)
    entries = []
    for positions in cut:
        for kind, name in (("batch", "x"), ("forward", "one"), ("forward", "two"), ("forward", "the model")):
            rows = torch.cat([drawn(name, n) for n in positions])
            if kind == "forward":
                rows = rows * (1 + rounding * torch.from_numpy(noise.normal(size=rows.shape)))
            rows = rows * (1 + broken.get(name, 0))
            entries.append(Entry(kind, name, [positions[0], 0], positions, rows.float()))
    for kind, name in (("gradient", "one.weight"), ("gradient", "two.weight"), ("weight", "one.weight")):
        rows = drawn(kind + name, 0).float() * (1 + broken.get(f"{kind} {name}", 0))
        entries.append(Entry(kind, name, [], [-1], rows))
    return written(path, entries, modules={"two": "Dropout"})


WHOLE, HALVES = [[0, 1, 2, 3]], [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("cut", "broken", "rounding", "sentence"),
    [
        (WHOLE, {}, 0, None),
        (HALVES, {}, 0, None),
        (WHOLE, {"two": 0.1}, 0, r"forward: two \(Dropout\), .*e-0[12] of its norm, all 4 samples; everything"),
        (WHOLE, {"two": 1e-6}, 0, r"forward: two .*before is equal in bits; nothing is beyond rounding$"),
        (HALVES, {"two": 0.1}, 1e-7, r"forward: two .* before it is only rounding, at first in forward: one, "),
        (HALVES, {}, 1e-7, r"forward: one, .*e-0[78] of .* nothing is beyond rounding"),
        # In the backward pass the second module comes first.
        (WHOLE, {"gradient one.weight": 0.1, "gradient two.weight": 0.1}, 0, r"gradient: two\.weight, "),
        (WHOLE, {"gradient one.weight": 0.1, "weight one.weight": 0.1}, 0, r"gradient: one\.weight, "),
        (WHOLE, {"weight one.weight": 0.1}, 0, r"weights after the step: one\.weight, "),
    ],
)
def test_the_first_that_differs_is_named(tmp_path, cut, broken, rounding, sentence):
    whole = one_step(tmp_path / "a.npz", WHOLE, {})
    found = records.first_difference(whole, one_step(tmp_path / "b.npz", cut, broken, rounding))
    assert (found is None) if sentence is None else re.match(sentence, found), found


def test_a_damaged_record_is_one_line(tmp_path):
    path = tmp_path / "a.npz"
    one_step(path, WHOLE, {})
    whole, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for n in range(60):
        data = bytearray(whole[: len(whole) - n * 40] if n % 3 else whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        try:
            records.read(path)
        except LockstepError as error:
            refused += str(error).startswith("the record cannot be read (")
    assert refused > 50
    np.savez(path, about=np.array([{}], dtype=object))
    with pytest.raises(LockstepError, match="the record cannot be read"):
        records.read(path)


def drawn_log(rng):
    steps = sorted(rng.choice(np.arange(1, 30), rng.integers(1, 15), replace=False).tolist())
    return {n: {"step": n, "grad_norm": float(rng.integers(5) > 0) + n, "time_s": rng.random()} for n in steps}


def test_the_first_log_point_that_differs_is_that_of_a_plain_loop():
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = drawn_log(rng), drawn_log(rng)
        common = sorted({*a} & {*b})
        differ = [n for n in common if a[n]["grad_norm"] != b[n]["grad_norm"]]
        first = differ[0] if differ else 0
        last = max((n for n in common if not first or n < first), default=0)
        found = compare.numbers(a, b)
        assert (found["first"], found["last equal"], found["points"]) == (first, last, len(common))
        for n, size, _ in compare.growth(a, b):
            x, y = a[n]["grad_norm"], b[n]["grad_norm"]
            assert size == abs(x - y) / max(x, y)


def test_means_over_other_stretches_are_not_compared():
    a = {5: {"loss": 1.0, "grad_norm": 2.0}, 10: {"loss": 3.0, "grad_norm": 4.0}}
    b = {10: {"loss": 2.0, "grad_norm": 4.0}}
    assert compare.numbers(a, b)["first"] == 0
    assert compare.numbers(a, {5: a[5]} | b)["first"] == 10


def test_only_a_digest_makes_a_log_point_surely_equal():
    line = {"grad_norm": 1.0}
    a = {10: line | {"digest": "x"}, 20: line, 30: line}
    found = compare.numbers(a, a | {30: {"grad_norm": 2.0}})
    assert (found["first"], found["last equal"], found["digests"]) == (30, 10, 1)


def test_the_picture(place, say, tmp_path):
    pytest.importorskip("matplotlib")
    say(place.a, place.run("rate", *RATE.words), "--no-replay", "--picture", tmp_path / "growth.svg")
    assert "<svg" in (tmp_path / "growth.svg").read_text()
