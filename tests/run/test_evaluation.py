"""Every sample is scored once, on any number of ranks, ranks without samples included, and the numbers are the same to
the last bit. tools/evaluate.py: any split of any run."""

import functools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, launching, succeed

from engine.comm.world import World
from engine.contract import LockstepError, Sums
from engine.gathered import Gathered
from tasks.har import SHIPPED
from tasks.shared.classification import Classification, LossSettings, class_weights, precision_recall_f1
from tools.use.evaluate import _matrix, of_run

SIZES = [1, 2, 7, 61, 196]

ALONE = World(0, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def results(once):
    def evaluate(folder):
        script, sizes = str(ROOT / "tests" / "ranks" / "evaluate.py"), [str(size) for size in SIZES]
        with launching() as launch:
            for ranks in (1, 2, 3):
                words = [script, str(folder / f"{ranks}.pt"), *sizes]
                succeed(launch.torchrun(ranks, *words) if ranks > 1 else launch.python(*words))

    folder = once("evaluation", evaluate)
    return {ranks: torch.load(folder / f"{ranks}.pt", weights_only=True) for ranks in (1, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_ranks_reports_the_same(results, ranks, size):
    """Sums, trials, and in the order of the dataset a tensor, texts, and tensors of several lengths; with ranks that
    have no batch."""
    one, many = results[1][size], results[ranks][size]
    assert many["metrics"] == one["metrics"] and many["metrics"]["count"] == size, "bit for bit, the loss too"
    assert torch.equal(many["sums"]["confusion"], one["sums"]["confusion"])
    assert many["sums"]["drawn"] == one["sums"]["drawn"], "seeded by the batch, whichever rank has it"
    assert many["sums"]["tried"].tolist() == [1] * 33, "each trial once"
    assert many["sums"]["luck"] == one["sums"]["luck"], "seeded by the trial"
    found, scores = many["collected"], one["collected"]["score"]
    assert found["text"] == [f"sample {n}" for n in range(size)]
    assert scores.shape == (size, 7) and torch.equal(found["score"], scores)
    assert [len(some) for some in found["some"]] == [n % 4 for n in range(size)]
    assert all(torch.equal(some, score[: len(some)]) for some, score in zip(found["some"], scores, strict=True))


def test_what_is_collected_stays_as_it_was_given():
    """A task may fill the same tensors, an array among them, for each batch."""
    collection, kept, array = Gathered("collect", 1.0), torch.empty(4, 2), np.empty(2)
    for number in range(3):
        kept.fill_(number)
        array.fill(number)
        batch = {"whole": kept[:2], "array": array, "each": [*kept[:2]], "some": [kept[:1, 0], kept[:, 0]]}
        collection.collect(batch, 2)
    found = collection.joined(ALONE)
    assert found["whole"][:, 0].tolist() == found["array"].tolist() == [0, 0, 1, 1, 2, 2]
    for name in ("each", "some"):
        assert [values.tolist()[0] for values in found[name]] == [0, 0, 1, 1, 2, 2]


def test_ranks_may_not_hold_too_much_together(monkeypatch):
    """Of tensors of several lengths also these, 8 bytes each."""
    held = Gathered("collect", limit_mb=2e-3)
    held.collect({"a": torch.zeros(100), "b": [torch.zeros(1)] * 100}, 100)
    monkeypatch.setattr(World, "gather", lambda self, mine: [mine, mine])
    with pytest.raises(LockstepError, match=r"returns 0\.0032 MB, and rank 0 may hold 0\.002") as caught:
        held.joined(ALONE)
    assert caught.value.everywhere


def test_the_metric_that_is_no_sum_is_scikit_learns(results):
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    found = results[3][196]
    theirs = sklearn.roc_auc_score(found["collected"]["y"] == 0, found["collected"]["score"][:, 0])
    assert found["metrics"]["auc"] == pytest.approx(theirs, rel=1e-12) and 0.2 < theirs < 0.8


def test_metrics_agree_with_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(0)
    truth, guess = rng.choice(5, 300, p=[0.6, 0.2, 0.1, 0.07, 0.03]), rng.choice(5, 300)
    matrix = sklearn.confusion_matrix(truth, guess)
    theirs = sklearn.precision_recall_fscore_support(truth, guess)[:3]
    np.testing.assert_allclose(precision_recall_f1(matrix)[:3], theirs, rtol=1e-12)
    task = Classification(SimpleNamespace())
    task.classes, truth[truth == 3] = list("abcdef"), 0  # d is predicted only, f does not occur at all
    matrix = torch.tensor(sklearn.confusion_matrix(truth, guess, labels=range(6)))
    report = task.report(Sums(confusion=matrix, loss_total=torch.tensor(1.0), loss_weight=torch.tensor(2.0)))
    assert report["macro_f1"] == pytest.approx(sklearn.f1_score(truth, guess, average="macro"))
    assert report["accuracy"] == pytest.approx(sklearn.accuracy_score(truth, guess)) and report["loss"] == 0.5


@pytest.mark.parametrize(("labels", "val_labels", "said"), [
    ([0, 1, 7, 2], [0], "sample 2 has the label 7, and there are 3 classes"),
    ([0, 1], [2, -1], "sample 1 has the label -1, and there are 3 classes"),
])  # fmt: skip
def test_a_label_that_is_no_class_is_named_before_a_gpu_asserts(labels, val_labels, said):
    task = Classification(SimpleNamespace())
    task.classes = ["a", "b", "c"]
    with pytest.raises(LockstepError, match=f"^{said} \\(file\\): name all"):
        task.count(np.array(labels), "file", np.array(val_labels))


@pytest.mark.parametrize("kind", ["inverse", "effective", "none"])
def test_the_loss_is_torchs_whatever_its_settings(kind):
    """In training and in evaluation, in batches that differ in their weights: torch's own weighted mean of all."""
    task = Classification(SimpleNamespace(loss=LossSettings(kind, label_smoothing=0.2)))
    task.classes, net = ["a", "b", "c"], torch.nn.Linear(4, 3)
    y = torch.tensor([0] * 20 + [1] * 8 + [2] * 2)
    task.count(y.numpy(), "")
    x, weight = torch.randn(30, 4), torch.as_tensor(class_weights(task.train_counts, kind)).float()
    truth = F.cross_entropy(net(x), y, weight, label_smoothing=0.2).item()
    batches = [{"x": a, "y": b} for a, b in zip(x.split(13), y.split(13), strict=True)]
    trained = [task.loss(net, batch) for batch in batches]
    with torch.no_grad():
        scored = functools.reduce(Sums.__add__, [task.score(net, batch) for batch in batches])
    mean = sum(loss.total for loss in trained) / sum(loss.weight for loss in trained)
    assert [mean.item(), task.report(scored)["loss"]] == pytest.approx([truth, truth], 1e-5)


def test_class_weights_are_the_guides():
    """Guide 002: a class with 54.32 % of ten classes' samples gets 0.1828 or so, one with 1.01 % gets 9.9."""
    counts = np.array([45678, 850] + [4695] * 8)
    weights = class_weights(counts, "inverse")
    np.testing.assert_allclose(weights, counts.sum() / (10 * counts), rtol=1e-12)
    assert weights[:2] == pytest.approx([0.1841, 9.89], abs=0.01)
    assert class_weights(np.array([3, 0, 1]), "none").tolist() == [1, 0, 1]
    effective = class_weights(np.array([1000, 10, 0]), "effective")
    assert effective[2] == 0 and 1 < effective[1] / effective[0] < 100
    assert (effective * [1000, 10, 0]).sum() == pytest.approx(1010)


@pytest.mark.parametrize(("dtype", "values", "total"), [
    (torch.float64, [1.0, 1e16, -1e16], 0.0),  # 1 from behind
    (torch.bfloat16, [1.0] * 300, 300.0),  # in bf16 256 + 1 is 256
    (torch.uint8, [200, 100], 300),
])  # fmt: skip
def test_sums_are_added_up_in_64_bits_in_the_order_of_the_parts(dtype, values, total):
    sums = Gathered("score")
    for value in values:
        sums.add(Sums(total=torch.tensor(value, dtype=dtype), count=torch.tensor(1)))
    totals = sums.summed(ALONE)
    assert totals == {"total": total, "count": len(values)} and totals["count"].dtype == torch.int64
    assert len(sums.parts) == len(values) and not any("count" in part for part in sums.parts), "of floats alone"


@pytest.mark.parametrize(("first", "then", "said"), [
    ({}, {"n1": torch.tensor(2)}, "gives count int64, n1 int64 once and count int64 another time"),
    ({"n0": torch.tensor(2)}, {}, "gives count int64 once and count int64, n0 int64 another time"),
    ({"a": torch.ones(8)}, {"a": torch.ones(4)}, "gives a float64 (4), count int64 once and a float64 (8), count "),
    ({"a": torch.tensor(0.0)}, {"a": torch.tensor(0)}, "gives a int64, count int64 once and a float64, count "),
])  # fmt: skip
def test_parts_of_another_form_are_not_added_up(first, then, said):
    sums = Gathered("score")
    sums.add(Sums(first, count=torch.tensor(3)))
    with pytest.raises(LockstepError, match="^" + re.escape(f"`score` {said}")):
        sums.add(Sums(then, count=torch.tensor(3)))


NAMES = """
import torch
from tests.tasks.toy import Task as Toy

class Task(Toy):
    def score(self, model, batch):
        sums, which = super().score(model, batch), batch["lockstep"].index[0] // 8
        return sums | {f"n{which}": torch.tensor(1)}
"""


def test_parts_of_another_form_on_another_rank(launch, tmp_path):
    """One batch each: no rank sees a difference of its own."""
    (tmp_path / "own.py").write_text(NAMES)
    words = ["eval_batch_size=8", "steps=1", "check_sums=false", f"save_dir={tmp_path / 'run'}"]
    done = launch.torchrun(3, "train.py", str(tmp_path / "own.py"), *words)
    said = "`score` gives count int64, n1 int64, total float64, weight int64 once and count int64, n0 int64, total "
    assert done.code and len(done.errors) == 1 and said in done.errors[0], done.err


UP_AND_DOWN = """
from tests.tasks.toy import Task as Toy

class Task(Toy):
    values = iter([0.0, float("nan"), 3.0, 1.0, 3.0, 1.0])  # of the rehearsal, and of five epochs

    def report(self, sums):
        return {{"loss": next(self.values)}}

    higher_is_better = {higher}
"""


@pytest.mark.parametrize(("higher", "best", "epoch"), [(True, 3.0, 1), (False, 1.0, 2)])
def test_the_best_is_the_best(launch, tmp_path, higher, best, epoch):
    """Of two that are as good the first, and never what is not a number. The end is kept, too."""
    (tmp_path / "own.py").write_text(UP_AND_DOWN.format(higher=higher))
    run = tmp_path / "run"
    done = succeed(launch.python("train.py", str(tmp_path / "own.py"), "epochs=5", "save_every=100", f"save_dir={run}"))
    assert f"best loss {best:.4f} ({run / f'best_model_epoch{epoch}.pt'})" in done.out
    state = torch.load(run / f"best_model_epoch{epoch}.pt", weights_only=True)
    assert (state["progress"]["best"], state["progress"]["epoch"]) == (best, epoch)
    last = torch.load(run / "last.pt", weights_only=True)["progress"]
    assert (last["best"], last["stale"]) == (best, 4 - epoch)


# ---- tools/evaluate.py ----


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small run on sensor windows, of which an evaluation takes several batches, the last one short. A perceptron,
    whose last bits depend on the number of samples in a batch. Three processes could not train on its global batch."""
    folder = tmp_path_factory.mktemp("har") / "run"
    words = "--mode flatten dataset.stride=512 model.width=8 batch_size=16 global_batch=16 steps=6 optim.ema_decay=0.5"
    with launching() as launch:
        succeed(launch.python("train.py", "har", *words.split(), f"save_dir={folder}"))
    return folder


def evaluate(launch, processes, run, *words, **env):
    start = launch.python if processes == 1 else lambda *words, **env: launch.torchrun(processes, *words, **env)
    done = succeed(start("tools/evaluate.py", str(run), *words, "--json", **env))
    return json.loads(done.out)  # nothing else on stdout


@pytest.mark.slow
def test_the_same_digits_on_any_number_of_processes(launch, run):
    """And as the training itself has logged. Alone and under torchrun, where nobody sets the number of threads."""
    found = {n: evaluate(launch, n, run, OMP_NUM_THREADS=None) for n in (1, 2, 3)}
    assert found[2] == found[1] and found[3] == found[1]
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = next(record for record in reversed(logged) if record["event"] == "eval")
    assert found[1]["metrics"] == {name: last[name] for name in found[1]["metrics"]}
    assert found[1]["metrics"]["count"] == np.sum(found[1]["confusion"]) > 64


@pytest.mark.slow
def test_every_split_and_data_from_elsewhere(launch, run, tmp_path):
    """Classes in another order, and without any that would do for validation: they go by their names."""
    arrays = dict(np.load(SHIPPED))
    classes = arrays["classes"]
    third = arrays | {"classes": classes[::-1], "label": len(classes) - 1 - arrays["label"]}
    np.savez(tmp_path / "third.npz", **{name: value for name, value in third.items() if name != "subject"})
    parts = {split: evaluate(launch, 1, run, "--split", split) for split in ("train", "val")}
    whole = evaluate(launch, 1, run, f"dataset.root={tmp_path / 'third.npz'}", "--split=all")
    assert whole["classes"] == classes.tolist() and whole["split"] == "all"
    assert np.array_equal(whole["confusion"], np.add(parts["train"]["confusion"], parts["val"]["confusion"]))
    np.savez(tmp_path / "third.npz", **(third | {"classes": np.array([*classes[:0:-1], "JUMP"])}))
    done = launch.python("tools/evaluate.py", str(run), f"dataset.root={tmp_path / 'third.npz'}", "--split", "all")
    assert done.code == 2 and "class 'JUMP' is not one of the model's" in done.err and len(done.errors) == 1


@pytest.mark.slow
def test_the_table_for_people(launch, run):
    done = succeed(launch.python("tools/evaluate.py", str(run / "last.pt"), "eval_batch_size=64"))
    assert "  parameters " in done.out and "steps per epoch" not in done.out and "Class Dist" not in done.out
    rows = [line.split() for line in done.out.splitlines()]
    assert ["precision", "recall", "f1"] in rows and any(row[:1] == ["accuracy"] for row in rows)
    assert done.out.count("TRAP") >= 2, "in the table of metrics and in that of confusions"
    assert "step 6, split val" in done.out and "not those of the checkpoint" not in done.out
    done = succeed(launch.python("tools/evaluate.py", str(run), "dataset.val_subjects=1,2"))
    assert "warning: the data, or their split, are not those of the checkpoint" in done.out, "it was trained on these"


@pytest.mark.slow
def test_a_checkpoint_that_does_not_know_its_classes(launch, run, tmp_path):
    """From before they were in it: its own splits are scored, other data cannot be."""
    state = torch.load(run / "last.pt", weights_only=True)
    del state["known"]
    torch.save(state, tmp_path / "old.pt")
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    old, new = (evaluate(launch, 1, path) for path in (tmp_path / "old.pt", run / "last.pt"))
    assert old | {"checkpoint": new["checkpoint"]} == new
    done = launch.python("tools/evaluate.py", str(tmp_path / "old.pt"), "--split=all")
    assert done.code == 3 and "does not hold the names of its classes" in done.err


def test_rows_of_the_printed_confusion_are_the_truth():
    lines = _matrix(["rest", "walk"], [[5, 1], [0, 7]])
    assert [line.split() for line in lines[-3:]] == [["rest", "walk"], ["rest", "5", "1"], ["walk", "0", "7"]]


OPENED = """
import sys
from tools.use import evaluate
from tools.use import export
from tools.use import predict
from tools.use import save_pretrained
for tool, words in ((evaluate, []), (export, []), (predict, ["new.npz"]), (save_pretrained, [])):
    for trust in ([], ["--trust"]):
        assert tool.main([sys.argv[1], *words, *trust]) == 2
"""


def test_a_task_inside_a_runs_folder_is_not_run(launch, tmp_path):
    """A run from elsewhere may name a program that it brings along: every tool that opens a run refuses it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.py").write_text("open('ran', 'a').write('.')\nraise ValueError('so far')\n")
    (tmp_path / "run/config.yaml").write_text("task: run/mine.py\n")
    (tmp_path / "run/last.pt").touch()
    done = succeed(launch.python("-c", OPENED, str(tmp_path / "run"), cwd=tmp_path))
    refused, ran = done.errors[::2], done.errors[1::2]
    assert len(refused) == len(ran) == 4 and (tmp_path / "ran").read_text() == "....", done.err
    what = "error: the run's task is a program in its own folder, run/mine.py"
    assert set(refused) == {f"{what} ({tmp_path}/run/config.yaml): read it, then give --trust to run it"}
    assert all(line.startswith("error: cannot import the task: ValueError: so far") for line in ran)


def test_where_a_task_may_lie(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    (run / "beside.py").symlink_to(tmp_path / "mine.py")

    def refused(task, folder):
        (run / "config.yaml").write_text(f"task: {task}\n")
        try:
            return not of_run(False, [folder])
        except LockstepError as error:
            return "--trust" in str(error)

    inside = ["runs/a/mine.py", f"{run}/deep/mine.py", "link/mine.py", "mine/../runs/a/mine.py", f"{run}/beside.py"]
    for folder in ("runs/a", str(run), "link", "runs/a/best.pt"):
        assert [task for task in inside if not refused(task, folder)] == []
        assert [task for task in ("har", "mine.py", "runs/mine.py", "runs/ab/mine.py") if refused(task, folder)] == []
