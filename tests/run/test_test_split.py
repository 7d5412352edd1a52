"""A third set: who is in it, that no training depends on it, and that nothing else is called a test."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import TOY, launching, succeed
from grouped_clips import write_clips
from runs import records, same_bits, weights

import tasks
from engine import config
from tasks.har import SHIPPED

HAR = "har device=cpu dataset.stride=512 model.mode=flatten model.width=8 steps=8 eval_every=4".split()
PEOPLE = {*"12345678", "9", "10"}


def made(*words):
    task = tasks.load(words[0])(config.parse(list(words), tasks.load).cfg)
    return task, *task.datasets(), task.test_dataset()


def of(dataset):
    return {*dataset.sources.tolist()} if dataset is not None else None


# ---- who is in it ----


@pytest.mark.parametrize(
    ("words", "val", "test"),
    [
        ("", {"9", "10"}, None),
        ("dataset.test_subjects=3,7", {"9", "10"}, {"3", "7"}),
        ("dataset.test_subjects=3,9", {"10"}, {"3", "9"}),
        ("dataset.test_subjects=3 dataset.val_subjects=1,2", {"1", "2"}, {"3"}),
        ("dataset.split=given-test dataset.val_subjects=1", {"1"}, {"9", "10"}),
        ("dataset.split=given-test dataset.val_share=0.25", 2, {"9", "10"}),
        ("dataset.test_share=0.25", {"9", "10"}, 2),
        ("dataset.split=random dataset.test_share=0.3 dataset.val_share=0.3", 2, 3),
    ],
)
def test_people_are_on_one_of_three_sides(words, val, test):
    task, train_set, val_set, test_set = made("har", "dataset.stride=512", *words.split())
    sides = [of(train_set), of(val_set), of(test_set) or set()]
    assert set().union(*sides) == PEOPLE and sum(map(len, sides)) == 10
    for side, expected in ((of(val_set), val), (of(test_set), test)):
        assert side == expected or len(side) == expected
    names = task.summary().partition("test subjects: ")[2].splitlines()[:1]
    assert {*names[0].split(", ")} == of(test_set) if test_set is not None else not names
    steps = np.isin(task.recordings.groups, [task.recordings.subjects.index(each) for each in of(train_set)])
    owner = np.repeat(steps, task.recordings.lengths)
    lengths = task.recordings.windows() * 512 - 512 + 128  # leftover steps are in no window, and nor are gaps between
    inside = np.concatenate([np.arange(n) % 512 < 128 for n in task.recordings.lengths])
    ends = np.concatenate([np.arange(n) < m for n, m in zip(task.recordings.lengths, lengths, strict=True)])
    seen = task.recordings.signal[owner & inside & ends].astype(np.float64)
    assert np.allclose(task.mean, seen.mean(0), rtol=1e-4, atol=1e-5) and np.allclose(task.std, seen.std(0), rtol=1e-4)
    assert task.train_counts.tolist() == np.bincount(train_set.labels, minlength=7).tolist(), "class weights"


def test_another_seed_draws_others_and_the_choice_of_the_test_is_not_that_of_validation():
    words = ["har", "dataset.stride=512", "dataset.split=random", "dataset.test_share=0.2", "dataset.val_share=0.2"]
    drawn = [made(*words, f"dataset.split_seed={seed}")[1:] for seed in range(6)]
    assert len({tuple(sorted(of(test))) for *_, test in drawn}) > 3
    alone = [made(*words[:3], f"dataset.split_seed={seed}")[2] for seed in range(6)]
    assert any(of(test) != of(val) for (*_, test), val in zip(drawn, alone, strict=True))


@pytest.mark.parametrize(
    ("words", "test"),
    [
        ("dataset.test_groups=b", {"b"}),
        ("dataset.test_videos=b_0.mp4,b_1.mp4 dataset.val_groups=a", {"b"}),
        ("dataset.test_share=0.4 dataset.val_share=0.2", 2),
    ],
)
def test_a_cage_is_on_one_of_three_sides(tmp_path, words, test):
    root = write_clips(tmp_path / "clips", "abcde")
    task, *sets = made("video", f"dataset.root={root}", *words.split())
    groups = [{*each.groups.tolist()} for each in sets]
    assert set().union(*groups) == {*"abcde"} and sum(map(len, groups)) == 5
    assert groups[2] == test or len(groups[2]) == test
    assert sum(map(len, sets)) == 30 and task.test_counts.sum() == len(sets[2])
    assert f"Test groups: {', '.join(sorted(groups[2]))} ({len(groups[2])} of 5)" in task.summary()
    assert task.metadata()["videos"]["test"] == sorted(of(sets[2]))


@pytest.mark.slow
def test_cached_features_are_standardised_without_the_test(tmp_path, monkeypatch):
    """Also a batch of them: the third part has the labels, groups and features of its own clips."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    root = write_clips(tmp_path / "clips", "abcde")
    words = [f"dataset.root={root}", "model.name=mc3_18", "model.features=cached", "device=cpu"]
    task, train, _, test = made("video", *words, "dataset.test_groups=b,d", "dataset.val_groups=a")
    mean, std = task._statistics
    x = train.__getitems__([*range(len(train))])["x"]
    assert {*train.groups} == {"c", "e"} and {*test.groups.tolist()} == {"b", "d"} and len(test) == 12
    moving = x.std(0) > 0
    assert torch.allclose(mean, x.mean(0), atol=1e-6)
    assert torch.allclose(std[moving], x.std(0, correction=0)[moving], atol=1e-5)
    whole, first, _, none = made("video", *words, "dataset.val_groups=a")
    chosen = np.flatnonzero(np.isin(first.groups, ["b", "d"]))
    assert none is None and not torch.allclose(whole._statistics[0], mean, atol=1e-6)
    assert torch.equal(first.__getitems__(chosen)["x"], test.__getitems__([*range(12)])["x"])


OWN = """
import torch
from tests.tasks import toy


class Data(toy.Waves):
    def __init__(self, count, seed, who):
        super().__init__(count, seed)
        self.sources = [who[n % len(who)] for n in range(count)]


class Task(toy.Task):
    def datasets(self):
        return Data(61, 0, {train}), Data(23, 1, {val})

    def test_dataset(self):
        return {test}
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("har dataset.test_subjects=3,x", "no subject x .*watch.npz.: dataset.test_subjects may name 1, "),
        ("har dataset.test_subjects=3 dataset.val_subjects=3", "subject 3 is in both validation and test .*: name"),
        ("har dataset.test_subjects=3 dataset.val_subjects=1,2,4,5,6,7,8,9,10", "0 recordings to train on, "),
        ("har dataset.test_subjects=9,10", "0 to validate and 28 to test on"),
        ("har dataset.test_share=1", "test_share=1 .*must be at least 0 and at most 0.9"),
        ("har dataset.root={alone} dataset.split=given-test", "come with no test set of their own .*: give dataset"),
        ("har dataset.root={alone} dataset.test_subjects=1", "test_subjects given, but .*: use dataset.test_share"),
        ("video dataset.root={clips} dataset.test_videos=b_0.mp4", "b_0.mp4 is of group b, and so is b_1.*test_groups"),
        ("video dataset.root={clips} dataset.test_groups=b,x", r"no group x \(dataset.test_groups\): it may name a, b"),
        ("video dataset.root={clips} dataset.test_groups=a,b,c", "every video is to test on .dataset.test_videos"),
        ("video dataset.root={clips} dataset.test_groups=b dataset.val_groups=b", "group b is both to validate and to"),
        ("{leak}", "mouse 3 is both to train and to test on .the task's `test_dataset`.: leave each source in one"),
        ("{leak2}", "mouse 5 is both to validate and to test on"),
        ("{empty}", "the test set is empty"),
        ("{mapping}", "the test set is a dict, which gives no sample by its number .the task's `test_dataset`.: give"),
        ("{stream}", "the test set is a generator, .* .the task's `test_dataset`.: give a list of its samples"),
    ],
)  # fmt: skip
def test_what_is_no_test_set_is_refused_before_anything_is_written(launch, tmp_path, words, says):
    rng = np.random.default_rng(0)
    alone = {"signal": rng.normal(size=(800, 2)), "lengths": np.full(4, 200), "label": np.arange(4) % 2}
    np.savez(tmp_path / "alone.npz", **alone)
    paths = {"alone": tmp_path / "alone.npz", "clips": tmp_path / "clips"}
    if "{clips}" in words:
        write_clips(tmp_path / "clips", "abc")
    sides = {"train": '["mouse 1", "mouse 3"]', "val": '["mouse 5"]'}
    tests = {"leak": 'Data(9, 2, ["mouse 3", "mouse 4"])', "leak2": 'Data(9, 2, ["mouse 5"])', "empty": "[]"}
    tests |= {"mapping": "{}", "stream": "(x for x in [])"}
    for name, test in tests.items():
        (tmp_path / f"{name}.py").write_text(OWN.format(**sides, test=test))
        paths[name] = tmp_path / f"{name}.py"
    done = launch.train(*words.format(**paths).split(), "device=cpu", f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and len(done.errors) == 1, done.err
    assert re.search(says, done.errors[0]), done.errors
    assert not (tmp_path / "run").exists()


# ---- what a training sees ----


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same training three times: as it is, with noise for the people to test on, and without a test set."""
    folder = tmp_path_factory.mktemp("test")
    with np.load(SHIPPED) as file:
        arrays = dict(file)
    theirs = np.repeat(np.isin(arrays["subject"].astype(str), ["3", "7"]), arrays["lengths"])
    noise = 50 * np.random.default_rng(0).normal(size=arrays["signal"].shape).astype(arrays["signal"].dtype)
    np.savez(folder / "other.npz", **arrays | {"signal": np.where(theirs[:, None], noise, arrays["signal"])})
    test = "dataset.test_subjects=3,7"
    given = {"a": [test], "b": [test, f"dataset.root={folder / 'other.npz'}"], "c": []}
    with launching() as launch:
        outs = {
            name: succeed(launch.train(*HAR, *words, f"save_dir={folder / name}")).out for name, words in given.items()
        }
    return folder, outs


@pytest.mark.slow
def test_other_values_of_the_test_change_no_bit_of_a_training(runs):
    folder, outs = runs
    assert same_bits(weights(folder / "a"), weights(folder / "b"))
    assert not same_bits(weights(folder / "a"), weights(folder / "c")), "they would matter"
    for event in ("train", "eval"):
        one, other = (records(folder / name, event) for name in "ab")
        clock = {"time_s", "samples_per_s", "data_wait_share", "memory_mb"}
        assert [{k: v for k, v in line.items() if k not in clock} for line in one] == [
            {k: v for k, v in line.items() if k not in clock} for line in other
        ]
    names = [{path.name for path in (folder / name).glob("*.pt")} for name in "ab"]
    assert names[0] == names[1], "the same checkpoint is the best"
    assert "test set         92 samples, 58 of 7, 34 of 3; only tools/evaluate.py --split test looks at it" in outs["a"]
    assert "test set" not in outs["c"] and "Test" not in outs["c"]
    held = torch.load(folder / "a/last.pt", weights_only=True)["test"]
    assert held["sources"] == {"3": 34, "7": 58} and held["samples"] == 92
    assert "test" not in torch.load(folder / "c/last.pt", weights_only=True)


def evaluate(launch, run, *words, processes=1):
    start = launch.python if processes == 1 else lambda *words: launch.torchrun(processes, *words)
    return start("tools/evaluate.py", str(run), "--split", "test", *words)


@pytest.mark.slow
def test_the_test_is_scored_whole_and_by_person_and_its_looks_are_counted(launch, runs, tmp_path):
    run = shutil.copytree(runs[0] / "a", tmp_path / "run", symlinks=True)
    found = json.loads(succeed(evaluate(launch, run, "--by", "--json")).out)
    table = succeed(launch.python("tools/predict.py", str(run), "--split=test", f"--out={tmp_path / 'p.npz'}"))
    assert "92 rows" in table.out
    with np.load(tmp_path / "p.npz") as file:
        guesses = [found["classes"].index(label) for label in file["label"].tolist()]
    test_set = made("har", "dataset.stride=512", "dataset.test_subjects=3,7")[3]
    for name in ("3", "7"):
        counts, rows = np.zeros((7, 7), int), test_set.sources == name
        np.add.at(counts, (test_set.labels[rows], np.array(guesses)[rows]), 1)
        part = found["sources"][name]
        assert np.array_equal(part["confusion"], counts) and part["metrics"]["count"] == rows.sum()
    assert np.array_equal(np.sum([each["confusion"] for each in found["sources"].values()], 0), found["confusion"])
    held = json.loads((run / "test.json").read_text())
    assert held["metrics"] == found["metrics"] and (held["looks"], held["monitor"]) == (1, "macro_f1")
    both = succeed(evaluate(launch, run, "--by", "--json", processes=2))
    assert json.loads(both.out) == found, "the same digits on two processes"
    assert json.loads((run / "test.json").read_text())["looks"] == 2
    other = next(path for path in run.glob("*.pt") if path.name not in (held["checkpoint"], "last.pt"))
    again = succeed(evaluate(launch, other))
    assert f"warning: the test was looked at before, with {held['checkpoint']}: to choose by it" in again.err
    assert "split test" in again.out and json.loads((run / "test.json").read_text())["looks"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "words", "says"),
    [
        ("c", "", "the run has no test set .split test.: train anew with one"),
        ("c", "dataset.test_subjects=3,7", "no test of this checkpoint: its training set none aside .*train anew"),
        (
            "a",
            "dataset.test_subjects=3",
            "these are not the data that its training set aside .*: give the data and the",
        ),
        ("a", "dataset.test_subjects=1,2", "these are not the data that its training set aside"),
        ("a", "dataset.root={other}", "these are not the data that its training set aside"),
        ("a", "--by color", ""),
    ],
)
def test_nothing_else_is_called_a_test(launch, runs, run, words, says):
    words = words.format(other=runs[0] / "other.npz").split()
    for tool in ("evaluate", "predict") if says else ("evaluate",):
        more = ["--out=/dev/null/x.csv"] if tool == "predict" else []
        done = launch.python(f"tools/{tool}.py", str(runs[0] / run), "--split", "test", *words, *more)
        if not says:  # another name than the dataset's: its sources
            assert done.code == 0 and "\n  7 " in done.out
            continue
        assert done.code == 2 and len(done.errors) == 1 and re.search(says, done.errors[0]), done.err
    assert says == "" or not (runs[0] / run / "test.json").exists()


@pytest.mark.slow
def test_a_task_of_ones_own_has_a_test(launch, tmp_path):
    """By one method; its sources are in the checkpoint, and another set of the same size is refused."""
    given = {"train": '["mouse 1", "mouse 3"]', "val": '["mouse 5"]', "test": 'Data(9, SEED, ["mouse 4", "mouse 6"])'}
    (tmp_path / "own.py").write_text("SEED = 2\n" + OWN.format(**given))
    # `amp=auto` takes bf16 where the CPU has it; the plain network below computes in float32.
    run, words = tmp_path / "run", [str(tmp_path / "own.py"), "steps=3", "device=cpu", "amp=off"]
    done = succeed(launch.train(*words, f"save_dir={run}"))
    assert "test set         9 samples, 5 of mouse 4, 4 of mouse 6; only tools/evaluate.py" in done.out
    found = json.loads(succeed(evaluate(launch, run, "--by", "--json")).out)
    assert found["metrics"]["count"] == 9 and [*found["sources"]] == ["mouse 4", "mouse 6"]
    model, own = (
        torch.load(run / found["checkpoint"].rpartition("/")[2], weights_only=True)["model"],
        tasks.load(words[0]),
    )
    task = own(config.parse(words, tasks.load).cfg)
    net, rows = task.model(), task.test_dataset().__getitems__([*range(9)])
    net.load_state_dict(model)
    errors = ((net(rows["x"]) - rows["y"]).square() * rows["mask"]).detach()
    assert found["metrics"]["loss"] == pytest.approx(float(errors.sum() / rows["mask"].sum()), 1e-5)
    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text().replace("SEED = 2", "SEED = 3"))
    refused = evaluate(launch, run)
    assert refused.code == 2 and "these are not the data that its training set aside" in refused.err
    toy = tmp_path / "toy"
    succeed(launch.train(TOY, "steps=2", "device=cpu", f"save_dir={toy}"))
    refused = evaluate(launch, toy, "--by")
    assert refused.code == 2 and "the run has no test set" in refused.err
