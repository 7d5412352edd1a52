"""tools/compare.py: what is planted in one of two runs is named in its first lines."""

import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, launching, succeed

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
BASE = ["global_batch=8", "batch_size=8", "steps=10", "log_every=5", "digest_every=1", "amp=off", "device=cpu"]
BASE += ["keep_checkpoints=9", "check_sums=false"]
VIRTUAL = "virtual_workers=4"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A task in a file of its own, one of its runs, and a function that makes others: named, with these words."""
    folder = tmp_path_factory.mktemp("compare")
    inputs = np.random.default_rng(0).normal(size=(61, 8))
    np.save(folder / "x.npy", inputs)
    inputs[17, 3] += 0.5
    np.save(folder / "y.npy", inputs)
    (folder / "task.py").write_text(TASK)
    (folder / "other.py").write_text(TASK.replace("nn.Tanh()", "nn.Softsign()"))
    with launching() as launch:

        def run(name, *words, processes=1, task="task.py", virtual=True):
            if not (folder / name).exists():
                given = [f"save_dir={folder / name}", f"dataset.root={folder / 'x.npy'}", *BASE]
                given += [*[VIRTUAL] * virtual, *words]
                by_key = {word.split("=")[0]: word for word in given}
                succeed(launch.train(str(folder / task), *by_key.values(), processes=processes))
            return folder / name

        run("a", "save_every=5")
        yield SimpleNamespace(folder=folder, run=run)


@pytest.fixture
def say(launch, monkeypatch, capfd):
    """Compare two; the trainings that this starts are forked from the warm parent."""
    popen = lambda command, **how: launch.popen(command, cwd=ROOT, **how)  # noqa: E731
    monkeypatch.setattr(running, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))

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


PLANTED = {
    # what is planted: words of the training, what the verdict begins with, what a line says
    "seed": (["seed=1"], "They part at step 1: batch: x, other samples: at position 0 of the epoch", "seed: 0 in A, 1"),
    "rate": (
        ["optim.lr=0.02"],
        "They part at step 1: weights after the step: layers.0.weight, 3",
        "optim.lr: 0.01 in A, 0.02 in B",
    ),
    "dropout": (
        ["model.dropout=0.3"],
        "They part at step 1: forward: layers.3 (Dropout), ",
        "model.dropout: 0.0 in A, 0.3 in B",
    ),
    "bf16": (
        ["amp=bf16"],
        "They part at step 1: forward: layers.0 (Linear), float32 in A, bfloat16 in B, all 8 samples; ",
        "precision: off in A, bf16 in B",
    ),
}


@pytest.mark.parametrize(
    "planted", [pytest.param(name, marks=[pytest.mark.slow] * (name != "rate")) for name in PLANTED]
)
def test_what_is_planted_in_a_config_is_named_first(place, say, planted):
    words, verdict, line = PLANTED[planted]
    found = first_lines(say(place.folder / "a", place.run(planted, *words), "--trust"))
    assert found[0].startswith(verdict), found
    assert any(line in each for each in found[1:]), found


def test_a_changed_sample_is_named_at_the_step_that_takes_it(place, say):
    """Its file has the same form, and the fingerprint, which reads three samples, is the same."""
    other = place.run("sample", f"dataset.root={place.folder / 'y.npy'}")
    text = say(place.folder / "a", other, "--trust")
    order = np.random.default_rng((0, 0)).permutation(61).tolist()
    at = order.index(17) // 8 + 1
    assert at > 1, "or nothing has to be searched"
    verdict = first_lines(text)[0]
    assert verdict.startswith(f"They part at step {at}: batch: x, "), text
    truth = 0.5 / np.linalg.norm(np.load(place.folder / "x.npy")[17])
    told = float(verdict.split("batch: x, ")[1].split()[0])
    assert truth / 2 < told < truth * 2 and ", sample 17" in verdict, (truth, text)
    assert "alike" in text and "data" in text.split("alike")[1].splitlines()[0], "the fingerprint has not seen it"


@pytest.mark.slow
def test_another_line_of_code_is_named_and_where_it_acts(place, say):
    found = first_lines(say(place.folder / "a", place.run("code", task="other.py"), "--trust"))
    assert found[0].startswith("They part at step 1: forward: layers.2 (Softsign)") or "layers.2 (Tanh)" in found[0]
    assert "everything before is equal in bits" in found[0]
    assert any(line.startswith("code") and "source files" in line for line in found), found


@pytest.mark.slow
def test_code_that_is_no_longer_there_is_found_by_taking_the_step_again(place, say):
    """As after another commit: the file of both has one path, and its contents have changed between the runs."""
    path = place.folder / "moved.py"
    path.write_text(TASK)
    before = place.run("before", task="moved.py")
    path.write_text(TASK.replace("nn.Tanh()", "nn.Softsign()"))
    text = say(before, place.run("after", task="moved.py"), "--trust")
    assert "both take the same bits up to step 5: the difference lies in what was not taken again: code" in text, text
    assert "A does not take its own bits: source files: " in text and "B does not" not in text
    again = say(before, place.folder / "after", "--trust", "--no-replay")
    assert first_lines(again)[0] == "They part, at step 5 at the latest.", again


def flipped(source, target, name="layers.0.weight", index=(3, 5), bit=12):
    state = torch.load(source, weights_only=True)
    state["model"][name].view(torch.int32)[index] ^= 1 << bit
    torch.save(state, target)
    return target


@pytest.mark.slow
def test_a_flipped_bit_is_named_in_a_checkpoint_and_in_the_run_that_began_with_it(place, say):
    right = place.folder / "a" / "step_5.pt"
    wrong = flipped(right, place.folder / "wrong.pt")
    shutil.copy(place.folder / "a" / "config.yaml", place.folder)
    said = "model: layers.0.weight[3, 5]: bit 12 is flipped ("
    assert said in first_lines(say(right, wrong))[0]
    runs = [place.run(name, f"resume={path}", "steps=10") for name, path in (("whole", right), ("broken", wrong))]
    found = first_lines(say(*runs, "--trust"))
    assert found[0].startswith("They part at step 6: forward: layers.0 (Linear), "), found
    assert any(said in line for line in found[1:]), found
    assert say(place.folder / "a", runs[0], "--trust", code=0), "resumed by another folder, the same run"


def test_another_machine_is_named_even_if_the_bits_are_the_same(place, say):
    """Versions and GPUs that are not here: the environment of a copy says so."""
    copy = place.folder / "copy"
    shutil.copytree(place.folder / "a", copy, symlinks=True)
    for path in copy.glob("step_*.pt"), copy.glob("best*.pt"):
        for file in path:
            state = torch.load(file, weights_only=True)
            state["environment"] |= {"torch": "2.12.0", "TF32": "True", "threads": "2"}
            torch.save(state, file)
    known = json.loads((copy / "environment.json").read_text())
    (copy / "environment.json").write_text(json.dumps(known | {"git_commit": "1234567890abcdef", "code": "0"}))
    text = say(place.folder / "a", copy, "--trust", code=0)
    for line in ("torch: 2.13.0+cpu in A, 2.12.0 in B", "TF32: False in A, True in B", "threads: 1 in A, 2 in B"):
        assert f"environment  {line.replace('2.13.0+cpu', torch.__version__)}" in text
    assert "commit: " in text and "1234567890ab" in text
    assert "The same bits: 3 log points, the checkpoints of step 10." in text


def test_the_square_root_of_an_older_version_is_named(place, say):
    """Its checkpoints lack the entry."""
    copy = place.folder / "older"
    shutil.copytree(place.folder / "a", copy, symlinks=True)
    for file in {path.resolve() for path in copy.glob("*.pt")}:  # last.pt is a link
        state = torch.load(file, weights_only=True)
        assert state["environment"].pop("square root") == "correctly rounded"
        torch.save(state, file)
    text = say(place.folder / "a", copy, "--no-replay", code=0)
    assert "environment  square root: correctly rounded in A, torch's in B" in text


@pytest.mark.slow
def test_a_step_is_taken_again_in_the_precision_that_auto_has_chosen_then(place, say):
    """On a CPU with bf16 auto would choose bf16; where A has run, it chose float32."""
    then = place.folder / "then"
    shutil.copytree(place.folder / "a", then, symlinks=True)
    text = (then / "config.yaml").read_text()
    (then / "config.yaml").write_text(text.replace("amp: 'off'", "amp: auto"))
    assert "amp: auto" in (then / "config.yaml").read_text()
    found = say(then, place.run("rate", *PLANTED["rate"][0]), "--trust")
    assert (
        first_lines(found)[0].startswith(PLANTED["rate"][1]) and "cannot change the numbers: amp (auto, off)" in found
    )


@pytest.mark.slow
def test_a_step_of_a_run_that_had_optim_zero_is_taken_again_without(place, say):
    """The key is an error in a new run."""
    then = shutil.copytree(place.folder / "a", place.folder / "zero", symlinks=True)
    text = (then / "config.yaml").read_text()
    assert text.count("  zero: false\n") == 1
    (then / "config.yaml").write_text(text.replace("  zero: false\n", "  zero: true\n"))
    found = say(then, place.run("rate", *PLANTED["rate"][0]), "--trust")
    assert first_lines(found)[0].startswith(PLANTED["rate"][1]), found
    assert "cannot change the numbers: save_every (5, 0), optim.zero (True, False)" in found, found


@pytest.mark.slow
def test_other_cuts_are_told_apart_rounding_from_batch_norm(place, say):
    plain = place.run("one", virtual=False)
    text = say(plain, place.run("two", virtual=False, processes=2), "--trust")
    assert first_lines(text)[0].startswith("They part at step 1, by rounding: "), text
    assert "nothing is beyond rounding" in text and "processes: 1 in A, 2 in B (without virtual_workers" in text
    words = ["model.norm=true"]
    text = say(
        place.run("one norm", *words, virtual=False),
        place.run("two norm", *words, virtual=False, processes=2),
        "--trust",
    )
    found = first_lines(text)
    assert found[0].startswith("They part at step 1: forward: layers.1 (BatchNorm1d), "), text
    assert found[1].startswith("why  ") and "BatchNorm1d computes with the samples of its pass" in found[1], text
    bits = [*words, "drop_last=true"]
    say(place.run("bits", *bits), place.run("two bits", *bits, processes=2), code=0)


def test_records_are_compared_with_each_other_and_with_a_run(place, say):
    one, other = (place.run(name, f"record={n}", *words) for name, n, *words in (("r", 3), ("s", 3, "optim.lr=0.02")))
    text = say(one / "record_step_3.npz", other / "record_step_3.npz")
    assert "Step 3 differs: forward: layers.0 (Linear), " in text and "the weights may differ before the step" in text
    assert "The same bits: the records of step 3." in say(one / "record_step_3.npz", one, code=0)
    assert "The same bits: the records of step 3." in say(
        one / "record_step_3.npz", place.folder / "a", "--trust", code=0
    )
    found = json.loads(say(one, other, "--no-replay", "--json"))
    assert found["step"]["step"] == 3 and found["differs"]["config"] == {"optim.lr": [0.01, 0.02]}
    third = place.run("t", "record=4") / "record_step_4.npz"
    said = (
        f"error: the records are of step 3 and of step 4 ({one / 'record_step_3.npz'}, {third}): give two of the same"
    )
    assert say(one / "record_step_3.npz", third, code=2).startswith(said)


def test_what_cannot_be_compared_is_said_in_one_line(place, say, tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK")
    for name, file, text in (("list", "environment.json", "[1]"), ("log", "metrics.jsonl", "x\n{}\n")):
        shutil.copytree(place.folder / "a", tmp_path / name, symlinks=True)
        (tmp_path / name / file).write_text(text)
    for words, text in (
        ([tmp_path, tmp_path], "no run in A"),
        ([tmp_path / "gone", place.folder / "a"], "A is not there"),
        ([tmp_path / "list", place.folder / "a"], "the run cannot be read"),
        ([tmp_path / "log", place.folder / "a"], "a line of the log is damaged"),
        ([tmp_path / "x.npz", place.folder / "a"], "the record cannot be read"),
        ([place.folder / "a", place.folder / "x.npy"], "the checkpoint cannot be read"),
        ([place.folder / "a", place.folder / "a", "--step", "-1"], "steps count from 1"),
        ([place.folder / "a", place.folder / "a", "--picture", "x.pdf"], "a picture is .png or .svg"),
    ):
        said = say(*words, code=3 if "checkpoint" in text else 2)
        assert said.startswith("error: " + text) and said.count("\n") == 1, said


# ---- not known ----


def changed_log(run, wanted):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if wanted(json.loads(line))))


def without_digests(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    texts = (json.dumps({name: value for name, value in line.items() if name != "digest"}) for line in lines)
    (run / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))


def without_checkpoints(run):
    """As a folder whose checkpoints were deleted, with what names them."""
    for path in [*run.glob("*.pt"), run / "manifest.json", run / "status.json"]:
        path.unlink()


GONE = {
    "a line": (lambda run: changed_log(run, lambda line: line["step"] != 5), "B's log lacks 1 line, the first of"),
    "last lines": (lambda run: changed_log(run, lambda line: line["step"] < 10), "B's log lacks 1 line, the first of"),
    "evaluations": (lambda run: changed_log(run, lambda line: line["event"] == "train"), "B's log lacks 2 evaluations"),
    "the whole log": (lambda run: (run / "metrics.jsonl").write_text(""), "B's log lacks 2 lines, the first of step 5"),
    "a checkpoint": (lambda run: (run / "step_5.pt").unlink(), "B's checkpoint step_5.pt is gone"),
    "the last checkpoint": (
        lambda run: [path.unlink() for path in [*run.glob("*.pt"), run / "manifest.json"]], "B's checkpoint best_model"
    ),
    "digests": (
        lambda run: [without_digests(run), without_checkpoints(run)], "no digest of the weights is in both logs"
    ),
}  # fmt: skip


@pytest.mark.parametrize("gone", GONE)
def test_what_is_gone_is_named_and_nothing_is_assured(place, say, tmp_path, gone):
    change, words = GONE[gone]
    copy = shutil.copytree(place.folder / "a", tmp_path / "copy", symlinks=True)
    say(place.folder / "a", copy, code=0)
    change(copy)
    text = say(place.folder / "a", copy, code=7)
    assert first_lines(text)[0].startswith("Not known to be the same: ") and words in first_lines(text)[0], text
    found = json.loads(say(place.folder / "a", copy, "--json", code=7))
    assert found["verdict"] == "not known" and not found["same"]
    if gone != "evaluations":  # of these no config says at which steps they were
        assert any(words in each for each in json.loads(say(copy, copy, "--json", code=7))["missing"])


def test_a_run_that_was_killed_early_is_not_the_whole_one(place, say, tmp_path):
    """Its log and its checkpoints end with step 5, and so does what is the same."""
    copy = shutil.copytree(place.folder / "a", tmp_path / "copy", symlinks=True)
    changed_log(copy, lambda line: line["step"] <= 5)
    manifest = json.loads((copy / "manifest.json").read_text())
    kept = [entry for entry in manifest["checkpoints"] if entry["step"] == 5]
    manifest |= {"checkpoints": kept, "last": kept[0]["file"], "best": kept[0]["file"]}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    (copy / "status.json").write_text(json.dumps({"step": 5, "checkpoint": kept[0]["file"]}))
    said = "Not known to be the same: A ends at step 10, B at step 5; the same where both can be compared: 1 log point"
    assert first_lines(say(place.folder / "a", copy, code=7))[0].startswith(said)


def test_weights_of_the_last_steps_that_were_not_compared(place, say, tmp_path):
    copy = shutil.copytree(place.folder / "a", tmp_path / "copy", symlinks=True)
    without_checkpoints(copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    texts = (json.dumps({n: v for n, v in line.items() if n != "digest" or line["step"] == 5}) for line in lines)
    (copy / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    text = say(place.folder / "a", copy, code=7)
    assert "the bits of the weights are compared up to step 5, of the 10 that both have" in text


@pytest.mark.parametrize(("code", "ends"), [(1, 7), (130, 130), (143, 143)])
def test_a_step_that_could_not_be_taken_is_not_the_same(place, say, monkeypatch, code, ends):
    """Its training was killed; and a signal that ends this tool is no result."""

    def train_in(*words, **how):
        if code > 128:
            raise LockstepError("interrupted", exit_code=code)
        return running.Trained(-9, "")

    monkeypatch.setattr(compare, "train_in", train_in)
    text = say(place.folder / "a", place.folder / "a", "--trust", "--step", "3", code=ends)
    said = "Not known to be the same: step 3 was not compared: A cannot be taken again here: exit code -9"
    assert said in text if code == 1 else text.startswith("error: interrupted")


def test_a_step_that_nobody_has_recorded_is_not_the_same(place, say):
    text = say(place.folder / "a", place.folder / "a", "--no-replay", "--step", "3", code=7)
    assert "step 3 was not compared: no record of both" in text


def test_other_settings_without_a_step_in_common_are_not_known(place, say, tmp_path):
    for name, more in (("one", {}), ("other", {"seed": 5})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "environment.json").write_text("{}")
        (tmp_path / name / "config.yaml").write_text(json.dumps({"task": "toy"} | more))
    text = say(tmp_path / "one", tmp_path / "other", code=7)
    assert "no step is there of both; they differ in what is around the numbers" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optim.lr=0.0100001"], "; the learning rate is 0.01 in A, 0.0100001 in B"),
        (
            ["optim.weight_decay=0.0101"],
            "nothing is larger than rounding, but optim.weight_decay is 0.01 in A, 0.0101",
        ),
    ],
)
def test_a_small_difference_of_a_setting_is_no_rounding(place, say, words, says):
    name = words[0].partition("=")[0]
    runs = [place.run(f"{name} {n}", "optim.weight_decay=0.01", *(words if n else [])) for n in (0, 1)]
    text = say(*runs, "--trust")
    assert "nothing is beyond rounding" not in text and ", by rounding" not in text and says in text, text


# ---- the arithmetic -------------------------------------------------------------------------------------------------


def test_a_weight_after_a_step_at_another_rate_is_no_rounding(tmp_path):
    """In half precision the update of a usual rate is smaller than what rounding makes of a weight."""
    rows = torch.ones(1, 50)
    entries = lambda by: [("gradient", "w", [], [-1], rows), ("weight", "w", [], [-1], rows * (1 + by))]  # noqa: E731
    for rates, cuts, beyond in (((0.1, 0.1), 1, False), ((0.1, 0.2), 1, True), ((0.1, 0.2), 2, True)):
        records_ = []
        for n, rate in enumerate(rates):
            passes = [("forward", "f", [p, 0], [p], rows) for p in range(cuts if n else 1)]
            records_.append(written(tmp_path / "r.npz", [*passes, *entries(n * 5e-7)], lr=rate))
        found = records.compare(*records_)
        assert bool(found.beyond) is beyond
        assert ("nothing is beyond rounding" in found.sentence()) is not beyond
        assert ("but clip is 1 in A" in found.sentence("clip is 1 in A, 2 in B")) is not beyond


def written(path, entries, step=1, **about):
    """A record of (kind, name, pass, positions, rows (R, F)) entries."""
    listed, arrays, first = [], {name: [] for name in ARRAYS}, 0
    for kind, name, at, positions, rows in entries:
        rows = torch.as_tensor(rows)
        parts = [np.array(positions), np.array(positions) % 7, *(part.numpy() for part in sketched(rows))]
        for each, part in zip(ARRAYS, parts, strict=True):
            arrays[each].append(part)
        shape = [*rows.shape] if positions[0] >= 0 else [*rows.shape[1:]]
        listed.append({"kind": kind, "name": name, "pass": at, "shape": shape, "dtype": str(rows.dtype)})
        listed[-1] |= {"first": first, "rows": len(rows)}
        first += len(rows)
    known = {"step": step, "processes": 1, "lr": 0.1, "config": {}, "environment": {}, "entries": listed} | about
    np.savez_compressed(path, about=np.array(json.dumps(known)), **{n: np.concatenate(v) for n, v in arrays.items()})
    return records.read(path)


def test_the_relative_difference_is_the_true_one_to_a_factor_of_two(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for n, size in enumerate((1e-7, 1e-4, 0.1, 1.0) * 3):
        x = torch.randn(3, 500, generator=generator)
        y = x + size * torch.randn(3, 500, generator=generator)
        y[1] = x[1]
        a, b = (written(tmp_path / "r.npz", [("forward", "f", [0, 0], [0, 1, 2], each)]) for each in (x, y))
        (found,) = records.compare(a, b).differences
        rows = [0, 2]
        truth = float((x[rows].double() - y[rows].double()).norm() / x[rows].double().norm())
        assert truth / 2 < found.relative < truth * 2, n
        assert found.samples == (0, 2) and found.of == 3


def test_bits_decide_also_where_norms_and_values_are_the_same(tmp_path):
    x = torch.zeros(2, 6)
    x[0, 1], x[1, 1] = 2.0, 2.0
    y = x.clone()
    y[0], y[1, 0] = x[0].roll(1), -0.0
    for row, words in ((0, "forward: f, 1.[0-9]e.00 of its norm"), (1, "forward: f, other bits of the same values")):
        entries = ([("forward", "f", [0, 0], [0], each[row : row + 1])] for each in (x, y))
        found = records.first_difference(*(written(tmp_path / "r.npz", each) for each in entries))
        assert re.match(words, found), found


def one_step(path, cut, broken=(), rounding=0.0, seed=0):
    """A network of three modules whose output is drawn by position; `broken`: kind or name -> what is added."""
    broken = dict(broken)
    draw = lambda name, n, width: torch.from_numpy(  # noqa: E731
        np.random.default_rng([*name.encode(), n]).normal(size=(1, width))
    )
    noise = np.random.default_rng(seed)
    entries = []
    for positions in cut:
        for kind, name in (("batch", "x"), ("forward", "one"), ("forward", "two"), ("forward", "the model")):
            rows = torch.cat([draw(name, n, 50) for n in positions])
            rows = rows * (1 + (kind == "forward") * rounding * torch.from_numpy(noise.normal(size=rows.shape)))
            entries.append((kind, name, [positions[0], 0], positions, (rows * (1 + broken.get(name, 0))).float()))
    for kind, name in (("gradient", "one.weight"), ("gradient", "two.weight"), ("weight", "one.weight")):
        rows = draw(kind + name, 0, 50)
        entries.append((kind, name, [], [-1], rows.float() * (1 + broken.get(f"{kind} {name}", 0))))
    return written(path, entries, modules={"two": "Dropout"})


WHOLE, HALVES = [[0, 1, 2, 3]], [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("cuts", "broken", "rounding", "sentence"),
    [
        ([WHOLE, WHOLE], {}, 0, None),
        ([WHOLE, HALVES], {}, 0, None),
        (
            [WHOLE, WHOLE],
            {"two": 0.1},
            0,
            r"forward: two \(Dropout\), .*e-0[12] of its norm, all 4 samples; everything",
        ),
        ([WHOLE, WHOLE], {"two": 1e-6}, 0, r"forward: two .*before is equal in bits; nothing is beyond rounding$"),
        (
            [WHOLE, HALVES],
            {"two": 0.1},
            1e-7,
            r"forward: two .* before it is only rounding, at first in forward: one, ",
        ),
        ([WHOLE, HALVES], {}, 1e-7, r"forward: one, .*e-0[78] of .* nothing is beyond rounding"),
        # In the backward pass the second module comes first.
        ([WHOLE, WHOLE], {"gradient one.weight": 0.1, "gradient two.weight": 0.1}, 0, r"gradient: two\.weight, "),
        ([WHOLE, WHOLE], {"gradient one.weight": 0.1, "weight one.weight": 0.1}, 0, r"gradient: one\.weight, "),
        ([WHOLE, WHOLE], {"weight one.weight": 0.1}, 0, r"weights after the step: one\.weight, "),
    ],
)
def test_the_first_that_differs_is_named(tmp_path, cuts, broken, rounding, sentence):
    a = one_step(tmp_path / "a.npz", cuts[0])
    b = one_step(tmp_path / "b.npz", cuts[1], broken.items(), rounding)
    found = records.first_difference(a, b)
    assert (found is None) if sentence is None else re.match(sentence, found), found


def test_a_damaged_record_is_one_line(tmp_path):
    path = tmp_path / "a.npz"
    one_step(path, WHOLE)
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


def test_the_first_log_point_that_differs_is_that_of_a_plain_loop():
    rng = np.random.default_rng(0)
    for _ in range(200):
        logs = []
        for _ in range(2):
            steps = sorted(rng.choice(np.arange(1, 30), rng.integers(1, 15), replace=False).tolist())
            logs.append(
                {n: {"step": n, "grad_norm": float(rng.integers(5) > 0) + n, "time_s": rng.random()} for n in steps}
            )
        a, b = logs
        first = last = 0
        for n in sorted({*a} & {*b}):
            if a[n]["grad_norm"] != b[n]["grad_norm"]:
                first = n
                break
            last = n
        found = compare.numbers(a, b)
        assert (found["first"], found["last equal"], found["points"]) == (first, last, len({*a} & {*b}))
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
    a = {n: line | ({"digest": "x"} if n == 10 else {}) for n in (10, 20, 30)}
    b = a | {30: {"grad_norm": 2.0}}
    found = compare.numbers(a, b)
    assert (found["first"], found["last equal"], found["digests"]) == (30, 10, 1)


def test_the_picture(place, say, tmp_path):
    pytest.importorskip("matplotlib")
    say(place.folder / "a", place.run("rate", *PLANTED["rate"][0]), "--no-replay", "--picture", tmp_path / "growth.svg")
    assert "<svg" in (tmp_path / "growth.svg").read_text()
