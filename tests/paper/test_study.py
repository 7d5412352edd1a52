"""tools/study.py: folds that cut nobody, numbers as scikit-learn's and scipy's, trainings that are ordinary ones."""

import csv
import io
import itertools
import json
import re
import shlex
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, TOY, succeed
from forked_tools import fork_trainings
from grouped_clips import write_clips
from runs import same_bits, status, weights
from tampering import contents

import tasks
from engine import code_digest, config
from formats.lab.folds import folds, part_to_validate
from tools import running
from tools.paper import report
from tools.paper import study as tool
from tools.paper.study_numbers import of_confusion, of_study, paired, t_probability, t_quantile
from tools.paper.study_tables import escaped, latex, lines, load, summary

PEOPLE = str(ROOT / "tests" / "tasks" / "people.py")

# ---- folds ----


def cost(fold, counts, number):
    """What is to be small, in exact arithmetic: squares of the folds' shares of each class, and of all samples."""
    total, weight = 0, round(counts.shape[1] ** 0.5) ** 2
    for n in range(number):
        mine = [row for row, f in zip(counts.tolist(), fold, strict=True) if f == n]
        for c, whole in enumerate(counts.sum(0).tolist()):
            total += sum(1_000_000 * row[c] // whole for row in mine) ** 2
        total += weight * sum(1_000_000 * sum(row) // int(counts.sum()) for row in mine) ** 2
    return total


@pytest.mark.parametrize(("groups", "number"), [(4, 2), (5, 2), (6, 3), (7, 3), (7, 6), (12, 5), (30, 4)])
def test_no_move_and_no_swap_makes_a_fold_better(groups, number):
    for seed in range(4):
        counts = np.random.default_rng(seed).integers(1, 40, (groups, 3))
        fold = folds(counts, number, seed)
        assert fold.tolist() == folds(counts.copy(), number, seed).tolist()
        assert {*fold.tolist()} == {*range(number)}, "none is empty"
        best, sizes = cost(fold, counts, number), Counter(fold.tolist())
        for group, to in itertools.product(range(groups), range(number)):
            if sizes[fold[group]] > 1:
                other = fold.copy()
                other[group] = to
                assert cost(other, counts, number) >= best
        for one, two in itertools.combinations(range(groups), 2):
            other = fold.copy()
            other[[one, two]] = other[[two, one]]
            assert cost(other, counts, number) >= best
        if groups <= 6:  # near the best of all
            every = (np.array(f) for f in itertools.product(range(number), repeat=groups) if len({*f}) == number)
            assert best <= 1.06 * min(cost(f, counts, number) for f in every)


def test_folds_are_balanced_drawn_from_a_seed_and_the_same_on_any_machine():
    counts = np.random.default_rng(0).integers(2, 9, (100, 4))
    drawn = [folds(counts, 5, seed) for seed in range(3)]
    assert len({tuple(fold.tolist()) for fold in drawn}) == 3
    for fold in drawn:
        sums = np.array([counts[fold == n].sum(0) for n in range(5)])
        assert np.abs(sums / sums.mean(0) - 1).max() < 0.03
    assert folds(np.ones((5, 1)), 5, 3).tolist() == [0, 1, 2, 3, 4], "leave one out"
    assert folds(np.array([[3, 0, 1], [0, 0, 2], [1, 0, 1]]), 2, 0).shape == (3,), "a class that nobody has"
    assert {*folds(np.array([[9_000_000], [1], [1], [1]]), 3, 0).tolist()} == {0, 1, 2}, "people of next to nothing"
    literal = folds(np.arange(1, 19).reshape(9, 2), 3, 7)
    assert literal.tolist() == LITERAL


LITERAL = [1, 0, 2, 0, 2, 1, 2, 1, 0]


@pytest.mark.parametrize(
    ("groups", "share", "count"), [(9, 0.125, {1, 2}), (2, 0.125, {1}), (24, 0.125, {3}), (8, 0.5, {4})]
)
def test_some_of_the_others_validate(groups, share, count):
    counts, chosen = np.full((groups, 2), 5), set()
    for fold in range(8):
        inside = part_to_validate(counts, share, 0, fold)
        assert inside.sum() in count
        chosen.add(tuple(inside.tolist()))
    assert len(chosen) > 1, "not always the same"


# ---- numbers ----


def test_kappa_and_f1_are_scikit_learns():
    sklearn, rng = pytest.importorskip("sklearn.metrics"), np.random.default_rng(0)
    for classes in (2, 3, 6):
        truth, guess = rng.integers(0, classes, 200), rng.integers(0, classes, 200)
        guess[:120] = truth[:120]
        truth[truth == 1] = 0  # it is only guessed
        found = of_confusion(sklearn.confusion_matrix(truth, guess, labels=range(classes)))
        assert found["kappa"] == pytest.approx(sklearn.cohen_kappa_score(truth, guess), rel=1e-12)
        assert found["macro_f1"] == pytest.approx(sklearn.f1_score(truth, guess, average="macro"), rel=1e-12)
        assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(truth, guess), rel=1e-12)
    matrix = np.array([[5, 0, 1], [0, 0, 0], [2, 0, 3]])  # the second class never occurs
    assert of_confusion(matrix)["macro_f1"] == of_confusion(matrix[::2, ::2])["macro_f1"]
    assert np.isnan(of_confusion(np.diag([5, 0, 0]))["kappa"]), "by chance they would agree as often"
    assert np.isnan(of_confusion(np.zeros((2, 2), int))["accuracy"])


def test_the_interval_is_scipys():
    stats, rng = pytest.importorskip("scipy.stats"), np.random.default_rng(1)
    for dof in [*range(1, 31), 99, 100, 1000]:
        for p in (0.5, 0.9, 0.95, 0.975, 0.995, 0.9999):
            assert t_quantile(p, dof) == pytest.approx(stats.t.ppf(p, dof), rel=1e-9, abs=1e-12)
        assert t_probability(-1.3, dof) == pytest.approx(stats.t.cdf(-1.3, dof), rel=1e-9)
    for n in (2, 3, 10, 25):
        one, other = rng.normal(size=n), rng.normal(size=n) + 0.3
        found, truth = paired(one, other), stats.ttest_rel(other, one).confidence_interval(0.95)
        assert (found["low"], found["high"]) == pytest.approx((truth.low, truth.high), rel=1e-9)
        assert found["mean"] == pytest.approx(np.mean(other - one)) and found["n"] == n
        wider = paired(one, other, tested=1 / 4)  # Nadeau and Bengio: 1 / n + 1 / (5 - 1)
        assert wider["high"] - wider["low"] == pytest.approx((truth.high - truth.low) * np.sqrt(1 + n / 4))
    alone = paired([1.0], [2.0])
    assert alone["mean"] == 1 and np.isnan([alone["low"], alone["high"], alone["sd"]]).all()
    assert paired([1.0, np.nan, 2.0], [2.0, 5.0, np.nan])["n"] == 1, "only whole pairs"


CLASSES = ["low", "mid_1", "high & up"]


def synthetic():
    """Tests of 2 configs x 3 folds x 2 seeds on 7 people, and all (config, fold, seed, person, truth, guess)."""
    rng, runs, samples = np.random.default_rng(3), [], []
    for n, fold, seed in itertools.product(range(2), range(3), range(2)):
        confusion, sources = np.zeros((3, 3), int), {}
        for person in [f"p_{k}" for k in range(7) if k % 3 == fold]:
            truth = np.random.default_rng(ord(person[-1])).integers(0, 3, 20 + ord(person[-1]) % 7)
            guess = np.where(rng.random(len(truth)) < 0.5 + 0.1 * n, truth, rng.integers(0, 3, len(truth)))
            own = np.zeros((3, 3), int)
            np.add.at(own, (truth, guess), 1)
            confusion += own
            sources[person] = {
                "metrics": {"macro_f1": 0.1, "loss": 1.0 + n, "count": len(truth)},
                "confusion": own.tolist(),
            }
            samples += [(n, fold, seed, person, t, g) for t, g in zip(truth, guess, strict=True)]
        metrics = {"loss": 1.0 + n + 0.1 * fold + 0.01 * seed, "macro_f1": of_confusion(confusion)["macro_f1"]}
        about = {"config": n, "fold": fold, "seed": seed, "folder": f"{n}/{fold}/{seed}", "classes": CLASSES}
        about |= {"checkpoint": "best.pt", "step": 5, "sha256": {"weights": "0"}, "looks": 1}
        metrics |= {"count": int(confusion.sum()), "f1/low": 0.3}
        runs.append(about | {"metrics": metrics, "confusion": confusion.tolist(), "sources": sources})
    return runs, samples


def test_a_studys_numbers_are_those_of_plain_loops():
    sklearn = pytest.importorskip("sklearn.metrics")
    runs, samples = synthetic()
    found = of_study(["A", "B"], runs, 3)
    people = {}
    for n, config_ in enumerate(found["configs"]):
        mine = [row for row in samples if row[0] == n]
        truth, guess = ([row[k] for row in mine] for k in (4, 5))
        assert config_["pooled"]["kappa"] == pytest.approx(sklearn.cohen_kappa_score(truth, guess), rel=1e-12)
        assert config_["pooled"]["macro_f1"] == pytest.approx(sklearn.f1_score(truth, guess, average="macro"))
        theirs = sklearn.precision_recall_fscore_support(truth, guess)
        for row, *values in zip(config_["classes"], *theirs, strict=True):
            assert [row["precision"], row["recall"], row["f1"], row["count"]] == pytest.approx(values)
        for source in config_["sources"]:
            scores = []
            for seed in (0, 1):
                rows = [row for row in mine if row[2] == seed and row[3] == source["name"]]
                scores.append(sklearn.f1_score([r[4] for r in rows], [r[5] for r in rows], average="macro"))
            assert source["macro_f1"] == pytest.approx(np.mean(scores)), "not what is reported, 0.1"
            assert source["count"] == len(rows)
            people.setdefault(n, {})[source["name"]] = source["macro_f1"]
        assert len(people[n]) == 7
        over = config_["over_sources"]["macro_f1"]
        values = [*people[n].values()]
        assert (over["mean"], over["sd"], over["n"]) == pytest.approx((np.mean(values), np.std(values, ddof=1), 7))
        folds_, seeds = config_["metrics"]["loss"], config_["seeds"]["loss"]
        assert (folds_["mean"], folds_["sd"], folds_["n"]) == pytest.approx((1.105 + n, 0.1, 3))
        assert (seeds["mean"], seeds["sd"], seeds["n"]) == pytest.approx((1.105 + n, np.std([0, 0.01], ddof=1), 2))
    by = {(each["metric"], each["over"]): each for each in found["differences"]}
    truth = [people[1][name] - people[0][name] for name in people[0]]
    assert by["macro_f1", "sources"]["mean"] == pytest.approx(np.mean(truth)) and by["macro_f1", "sources"]["n"] == 7
    assert by["loss", "folds"]["n"] == 3 and by["loss", "folds"]["mean"] == pytest.approx(1.0)
    assert by["macro_f1", "folds"]["of"] == ["A", "B"]
    scores = np.array([run["metrics"]["macro_f1"] for run in runs]).reshape(2, 3, 2).mean(2)  # (config, fold)
    change = scores[1] - scores[0]
    half = t_quantile(0.975, 2) * change.std(ddof=1) * np.sqrt(1 / 3 + 1 / 2)  # of folds that share their training data
    assert by["macro_f1", "folds"]["high"] == pytest.approx(change.mean() + half)


def about(found, **more):
    """What a study writes, with these numbers."""
    told = {"task": "own_task.py", "monitor": "macro_f1", "higher_is_better": True, "what": "3 folds", "by": "people"}
    told |= {"seeds": [0, 1], "folds": [{"test": ["p_0", "p_1"]}] * 3, "trainings": 12, "tested": 12}
    return told | {"words": ["x"], "val_share": 0.1} | found | more


def test_latex_is_whole_and_names_are_escaped():
    assert escaped(r"50% of a_b & #1 {x} \n ~^$") == (
        r"50\% of a\_b \& \#1 \{x\} \textbackslash{}n \textasciitilde{}\textasciicircum{}\$"
    )
    text = latex(about(of_study(["m=a_b", "50%"], synthetic()[0], 3)))
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == text.count(r"\toprule") == 7
    assert r"mid\_1 & " in text and r"high \& up & " in text and r"p\_6 & " in text
    for table in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end", text, re.DOTALL):
        rows = [line for line in table[1].splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(table[0])}, "a cell for each column"
        assert not re.search(r"(?<!\\)[%#_]", "".join(rows))


def test_a_task_without_classes_or_sources_has_its_own_metrics():
    runs = [
        {"config": n, "fold": -1, "seed": seed, "folder": "", "checkpoint": "", "step": 1, "sha256": {}, "looks": 1}
        | {"metrics": {"loss": 1.0 + n + seed, "count": 9}}
        for n in range(2) for seed in range(3)
    ]  # fmt: skip
    found = about(of_study(["A", "B"], runs, 0), monitor="loss", folds=[], seeds=[0, 1, 2])
    (difference,) = found["differences"]
    assert (difference["over"], difference["mean"], difference["low"]) == ("seeds", 1.0, 1.0)
    assert found["configs"][0]["metrics"]["loss"] == {"mean": 2.0, "sd": 1.0, "n": 3}
    text = "\n".join(lines(found))
    assert "2.000 ± 1.000" in text and "mean ± sd of 3 seeds" in text and "pooled" not in text and latex(found)


def test_a_mean_of_fewer_values_than_folds_says_so():
    """A fold whose number is none is not in the mean."""
    runs, _ = synthetic()
    for run in runs:
        if (run["config"], run["fold"]) == (0, 1):
            run["metrics"]["loss"] = float("nan")
    found = about(of_study(["A", "B"], runs, 3), monitor="loss")
    (_, row, other), *_ = [rows for title, rows in summary(found) if title == "mean ± sd of 3 folds"]
    assert row[1] == "1.105 ± 0.141 (2 of 3)" and other[1] == "2.105 ± 0.100"


def test_the_tables_of_a_part_of_a_study_say_so():
    whole = about(of_study(["A", "B"], synthetic()[0], 3))
    assert "NOT COMPLETE" not in latex(whole)
    assert "% NOT COMPLETE: 7 of 12 trainings are tested" in latex(whole | {"tested": 7})
    assert "7 of 12 tested" in lines(whole | {"tested": 7})[0]


# ---- the tool ----


class Called(NamedTuple):
    """What a call has printed, and what it has started: `train` and `evaluate`."""

    code: int
    out: str
    err: str
    started: list[str]


@pytest.fixture
def study(launch, monkeypatch, capfd, tmp_path):
    """The tool in this process; the trainings that it starts are processes like those of the other tests."""
    started = fork_trainings(launch, monkeypatch)

    def call(*words, task=PEOPLE, out=tmp_path / "study"):
        started.clear()
        capfd.readouterr()
        code = tool.main([task, "device=cpu", *map(str, words), f"--out={out}"])
        kinds = ["evaluate" if "evaluate.py" in str(each) else "train" for each in started]
        return Called(code, *capfd.readouterr(), kinds)

    call.started, call.folder = started, tmp_path / "study"
    return call


COMPARED = ["--folds=2", "--seeds=0,1", "--compare", "model.width=0", "model.width=4 optim.lr=0.02"]


@pytest.mark.slow
def test_a_study_from_its_folds_to_its_page(launch, study, tmp_path, monkeypatch):
    code, out, err, started = study(*COMPARED, "--jobs=2")
    assert code == 0, err
    assert started.count("train") == started.count("evaluate") == 8
    found, plan = load(study.folder), json.loads((study.folder / "plan.json").read_text())
    people = [name for cut in plan["folds"] for name in cut["test"]]
    assert sorted(people) == sorted({*people}) and len(people) == 9, "each is tested once"
    for cut in plan["folds"]:
        assert cut["val"] and not {*cut["val"]} & {*cut["test"]}
    counts = Counter()
    for path in study.folder.rglob("test.json"):
        tested, settings = json.loads(path.read_text()), yaml.safe_load((path.parent / "config.yaml").read_text())
        number = int(re.search(r"fold_(\d)_seed", str(path))[1])
        assert settings["dataset"] == plan["folds"][number] and {*tested["sources"]} == {*plan["folds"][number]["test"]}
        assert settings["model"]["width"] == (4 if "1_model" in str(path) else 0) and tested["looks"] == 1
        held = torch.load(path.parent / "last.pt", weights_only=True)["test"]["sources"]
        counts.update(held)
    assert {*counts} == {*people} and counts["ida"] == 4 * 30, "2 configs x 2 seeds x her points"
    # One of them by hand: the same weights, the same number.
    run = next(path for path in study.folder.glob("1_*/fold_1_seed_1"))
    settings = ["--config", str(run) + ".yaml", "model.width=4", "optim.lr=0.02", "device=cpu"]
    succeed(launch.train(PEOPLE, *settings, f"save_dir={tmp_path / 'own'}"))
    assert same_bits(weights(run), weights(tmp_path / "own"))
    tested = json.loads((run / "test.json").read_text())
    task = tasks.load(PEOPLE)(config.parse([PEOPLE, *settings], tasks.load).cfg)
    task.datasets()
    net, rows = task.model(), task.test_dataset().__getitems__([*range(len(task.test))])
    net.load_state_dict(torch.load(run / tested["checkpoint"], weights_only=True)["model"])
    truth = float((net(rows["x"]).argmax(1) == rows["y"]).float().mean())
    (told,) = [each for each in found["configs"][1]["runs"] if (each["fold"], each["seed"]) == (1, 1)]
    assert told["metrics"]["accuracy"] == pytest.approx(truth)
    # What is written.
    assert f"| {told['metrics']['macro_f1']:.4f}" not in out and f"macro_f1 {told['metrics']['macro_f1']:.4f}" in out
    assert "mean ± sd of 9 people" in out and "pair by pair, with 95% interval" in out
    rows = [*csv.DictReader(io.StringIO((study.folder / "study.csv").read_text()))]
    name = "model.width=4 optim.lr=0.02 - model.width=0"
    (row,) = [r for r in rows if (r["config"], r["of"], r["metric"]) == (name, "difference over sources", "kappa")]
    (difference,) = [d for d in found["differences"] if (d["metric"], d["over"]) == ("kappa", "sources")]
    assert [float(row[key]) for key in ("mean", "low", "high")] == [difference[key] for key in ("mean", "low", "high")]
    assert len([*csv.reader(io.StringIO((study.folder / "runs.csv").read_text()))]) == 9
    assert (study.folder / "study.pdf").read_bytes()[:5] == b"%PDF-" and (
        study.folder / "study.png"
    ).stat().st_size > 9e3
    # The page of it.
    monkeypatch.chdir(tmp_path)
    assert report.main([str(study.folder), "--out=page.html"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "mean ± sd of 9 people" in page and "bob &amp; co" in page and page.count('<h2 id="run-') == 8
    # Again: nothing is started, and nothing has changed.
    before = contents(study.folder, "*.pt")
    code, again, err, started = study(*COMPARED)
    assert code == 0 and started == [] and "8 of 8 are done" in again and contents(study.folder, "*.pt") == before
    assert again.splitlines()[-20:] == out.splitlines()[-20:]


@pytest.mark.slow
def test_what_is_done_stays_and_what_was_begun_is_resumed(study, monkeypatch, tmp_path):
    """Ctrl-C in the middle of the second training: the same command ends it as if nothing had happened, and repeats
    nothing of the first."""
    words = ["--folds=2", "epochs=40", "save_every=5", "log_every=1"]
    tell, at = tool.last_step, []

    def last_step(folder):
        step = tell(folder)
        if folder.name == "fold_1_seed_0" and step > 20 and not at:
            at.append(step)
            signal.raise_signal(signal.SIGINT)
        return step

    monkeypatch.setattr(tool, "last_step", last_step)
    monkeypatch.setattr(running, "last_step", last_step)
    code, _, err, started = study(*words)
    assert code == 130 and at and re.search(r"error: interrupted \(.*study\): the same command continues", err), err
    assert started == ["train", "evaluate", "train"] and signal.getsignal(signal.SIGINT) is not tool.Study._end
    assert status(study.folder / "fold_1_seed_0")["state"] in ("stopped", "done")
    assert not (study.folder / "study.json").exists() and not (study.folder / "fold_1_seed_0/test.json").exists()
    before = contents(study.folder / "fold_0_seed_0", "*.pt")
    code, out, err, started = study(*words)
    assert code == 0 and "1 of 2 are done" in out, err
    assert contents(study.folder / "fold_0_seed_0", "*.pt") == before and started == ["train", "evaluate"]
    code, _, err, _ = study(*words, out=tmp_path / "straight")
    assert code == 0, err
    for fold in range(2):
        one, other = (folder / f"fold_{fold}_seed_0" for folder in (study.folder, tmp_path / "straight"))
        assert same_bits(weights(one), weights(other))
        tested = [json.loads((each / "test.json").read_text()) for each in (one, other)]
        assert tested[0]["metrics"] == tested[1]["metrics"] and tested[0]["looks"] == 1


@pytest.mark.slow
def test_a_study_that_is_killed_leaves_no_training_behind_and_goes_on(launch, tmp_path):
    """The fixture fails where a process is left. With Ctrl-C, too, which ends what has begun and says how to go on."""
    launch.may_stay += ["lockstep_", "torch_"]  # of a training that ends before it hears signals
    words = [PEOPLE, "device=cpu", "epochs=6", "--leave-one-out=people", "--seeds=3", f"--out={tmp_path / 's'}"]
    run = launch.start(sys.executable, "tools/study.py", *words)
    run.wait_for("fold_0_seed_3: macro_f1")
    run.signal(signal.SIGKILL)
    assert run.wait().code == -signal.SIGKILL
    before = json.loads((tmp_path / "s/fold_0_seed_3/test.json").read_text())
    done = launch.python("tools/study.py", *words, "--dry-run")
    assert done.code == 0 and "leave one of 9 people out, 1 seed: 9 trainings" in done.out
    again = launch.start(sys.executable, "tools/study.py", *words)
    again.wait_for(" of 9 are done")
    again.signal(signal.SIGINT)
    ended = again.wait()
    assert ended.code == 130 and "the same command continues" in ended.err, ended.err
    assert json.loads((tmp_path / "s/fold_0_seed_3/test.json").read_text()) == before, "looked at once"


@pytest.fixture
def made_up(study, monkeypatch):
    """Trainings and tests that take no time; `made_up.tests`: fold -> what its test writes, `made_up.code` of it."""

    def train_in(folder, *words, **how):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "status.json").write_text('{"state": "done"}')
        return running.Trained(0, "")

    def run_script(words, *more):
        run = Path(words[1])
        plan = json.loads((run.parent / "plan.json").read_text())
        people = plan["folds"][int(run.name.split("_")[1])]["test"]
        text = made_up.tests.get(run.name, json.dumps(tested(people)))
        if text:
            (run / "test.json").write_text(text)
        return running.Trained(made_up.code, "")

    def tested(people):
        sources = {name: {"metrics": {"accuracy": 0.5, "count": 1}} for name in people}
        about = {"checkpoint": "best.pt", "step": 1, "sha256": {}, "looks": 1, "sources": sources}
        return about | {"monitor": "accuracy", "metrics": {"accuracy": 0.5, "count": len(people)}}

    monkeypatch.setattr(tool, "train_in", train_in)
    monkeypatch.setattr(tool, "run_script", run_script)
    made_up = SimpleNamespace(tests={}, code=0, tested=tested)
    return made_up


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "[", '{"monitor": "accuracy", "metrics": {}}'])
def test_a_fold_without_a_result_is_named(study, made_up, text):
    made_up.tests = {"fold_1_seed_0": text}
    code, out, err, _ = study("--folds=3")
    assert code == 1 and re.search("1 training of 3 failed, fold_1_seed_0: the test: ", err), err
    assert "3 of 3 tested" not in out
    made_up.tests = {}
    code, out, err, _ = study("--folds=3")
    assert code == 0 and "3 of 3 tested, each once" in out, err


@pytest.mark.parametrize("code", [-9, 75])
def test_a_test_that_is_ended_from_outside_is_no_result(study, made_up, code):
    """Although there is a file."""
    made_up.code = code
    ended, out, err, _ = study("--folds=3")
    assert ended == 1 and "failed, fold_0_seed_0: the test: " in err and "3 of 3" not in out


def test_a_result_of_other_people_is_none_of_a_fold(study, made_up):
    """A copy of another fold's file: it is tested again."""
    code, out, err, _ = study("--folds=3")
    assert code == 0, err
    one, other = (study.folder / f"fold_{n}_seed_0/test.json" for n in (0, 1))
    right = other.read_text()
    other.write_text(one.read_text())
    code, out, err, _ = study("--folds=3")
    assert code == 0 and "2 of 3 are done" in out and other.read_text() == right, err


def test_a_result_that_is_gone_at_the_end_is_not_in_the_numbers(study, made_up, monkeypatch):
    """It was there when its training ended; somebody has removed it meanwhile."""

    def results(*given):
        (study.folder / "fold_1_seed_0/test.json").unlink()
        return plain(*given)

    plain = tool.results
    monkeypatch.setattr(tool, "results", results)
    code, out, err, _ = study("--folds=3")
    assert code == 7 and "2 of 3 tested" in out and "1 test of 3 cannot be read: they are not in these numbers" in err


@pytest.fixture
def own_people(tmp_path):
    """A task of one's own that imports one file beside it, of a name that no other test has imported."""
    near = tmp_path / f"near_{tmp_path.name}.py"
    near.write_text("WIDTH = 1\n")
    text = f"import {near.stem}\nfrom tests.tasks.people import Task as People\n\n\n"
    text += f"class Task(People):\n    width = {near.stem}.WIDTH\n"
    (tmp_path / "own.py").write_text(text)
    return SimpleNamespace(task=str(tmp_path / "own.py"), near=near)


def trained_with(folder, task):
    (folder / "environment.json").write_text(json.dumps(code_digest.described(code_digest.code_of(task))))


@pytest.mark.slow
def test_a_study_does_not_mix_codes(study, made_up, own_people):
    """It is killed after its first fold, the neighbour of the task is edited, and the same command is typed again."""
    made_up.tests = {"fold_1_seed_0": ""}
    assert study("--folds=3", task=own_people.task)[0] == 1
    trained_with(study.folder / "fold_0_seed_0", own_people.task)
    plan = json.loads((study.folder / "plan.json").read_text())
    assert {"./own.py", f"./{own_people.near.name}", "Lockstep"} <= {*plan["code"]}
    own_people.near.write_text("WIDTH = 1  # a comment\n")
    made_up.tests = {"fold_2_seed_0": ""}
    code, _, err, _ = study("--folds=3", task=own_people.task)
    assert code == 1 and "fold_2_seed_0: the test: " in err, "a comment is no other code"
    own_people.near.write_text("WIDTH = 2\n")
    made_up.tests = {}
    code, out, err, _ = study("--folds=3", task=own_people.task)
    assert code == 2 and err.startswith(
        f"error: the code has changed since fold_0_seed_0 had it: {own_people.near.name} ("
    ), err
    assert "--force" in err and not (study.folder / "fold_2_seed_0/test.json").exists()
    assert json.loads((study.folder / "plan.json").read_text()) == plan
    code, out, err, _ = study("--folds=3", "--force", task=own_people.task)
    assert code == 0 and "warning: --force: the code has changed since fold_0_seed_0 had it: near_" in out, err
    assert "--force" not in json.loads((study.folder / "plan.json").read_text())["words"]
    own_people.near.write_text("WIDTH = 3\n")
    code, out, err, _ = study("--folds=3", task=own_people.task)
    assert code == 0 and "3 of 3 are done" in out, "the table of a finished study is printed all the same"


def test_code_that_changes_between_a_training_and_its_test_ends_the_study(study, made_up, own_people, monkeypatch):
    """Or the test would be of a network that was not trained."""
    plain = tool.train_in

    def train_in(folder, *words, **how):
        if folder.name == "fold_1_seed_0":
            own_people.near.write_text("WIDTH = 2\n")
        return plain(folder, *words, **how)

    monkeypatch.setattr(tool, "train_in", train_in)
    code, _, err, _ = study("--folds=3", task=own_people.task)
    what = "fold_1_seed_0: trained, not tested: the code has changed while the study ran: near_"
    assert code == 1 and what in err, err
    assert (study.folder / "fold_0_seed_0/test.json").exists()
    assert not (study.folder / "fold_1_seed_0/test.json").exists()


def test_the_table_names_trainings_and_tests_with_other_code(study, made_up):
    """As they are after --force, or where somebody has run tools/evaluate.py by hand."""
    cut = {"fold_0_seed_0": ("1", []), "fold_1_seed_0": ("2", []), "fold_2_seed_0": ("1", ["near.py"])}
    assert study("--folds=3")[0] == 0
    for name, (digest, changed) in cut.items():
        path = study.folder / name / "test.json"
        tested = json.loads(path.read_text())
        code = {"files": {"models/x.py": digest, "tasks/y.py": "0"}, "changed": changed}
        path.write_text(json.dumps(tested | {"code": code}))
    code, out, _, _ = study("--folds=3")
    assert code == 0
    assert "warning: other code than the first training: models/x.py of fold_1_seed_0\n" in out
    assert "warning: other code than the first training: near.py of fold_2_seed_0 (its test)\n" in out
    assert "tasks/y.py" not in out


def refused(study, says, *words, **how):
    code, _, err, started = study(*words, **how)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and re.search(says, errors[0]), err
    assert not started


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "nothing to test on .command line.: give --folds, --leave-one-out, or a test set"),
        ("--folds=10", "10 folds of 9 people: ann, .*: give at least three people, and as many as folds"),
        ("--folds=3 --leave-one-out=people", "--folds and --leave-one-out .*: give one"),
        ("--leave-one-out=mice", "a split of mice .--leave-one-out.: give one of people"),
        ("--folds=3 --by=mice", "a split of mice .--by.: give one of people"),
        ("--folds=3 save_dir=x", "save_dir is set by the study .*: give --out FOLDER"),
        ("--folds=3 resume=never", "resume is set by the study"),
        ("--folds=3 dataset.test=eva", r"dataset.test is \[.eva.\], and the study sets .*: leave it out"),
        ("--folds=3 seed=4", "seed is 4, and the study sets 0 .*: leave it out"),
        ("--folds=3 --val-share=1", "--val-share 1 .*: give a share such as 0.125"),
        ("--folds=3 --compare optim.lr=1 optim.lr=1", "two configs are the same"),
        ("--folds=3 --compare optim.lr=1 optim.lrr=1", "unknown key 'optim.lrr'"),
        ("--folds=3 nonsense=1", "unknown key 'nonsense'"),
    ],
)
def test_a_study_that_cannot_be_is_refused_before_anything_is_written(study, words, says):
    refused(study, says, "epochs=1", *words.split())
    assert not study.folder.exists()


SWAPPED = """
from tests.tasks import people

class Task(people.Task):
    split_keys = {"people": ("dataset.test", "dataset.val")}
"""


def test_keys_that_split_otherwise_are_found_before_the_first_training(study, tmp_path):
    """Of a task whose keys are swapped; and of videos, a cut that its groups do not allow."""
    (tmp_path / "swapped.py").write_text(SWAPPED)
    refused(study, "dataset.test=.* gives .* .the task's `split_keys`.: give the keys to validate and to test on",
            "--folds=3", task=str(tmp_path / "swapped.py"))  # fmt: skip
    write_clips(tmp_path / "clips", "abcde")
    refused(study, "is of group ., and so is .*test_groups=", f"dataset.root={tmp_path / 'clips'}", "--folds=3",
            "--by=videos", task="video")  # fmt: skip
    assert not study.folder.exists()
    code, out, err, _ = study(f"dataset.root={tmp_path / 'clips'}", "--leave-one-out=groups", "--dry-run", task="video")
    assert code == 0 and "leave one of 5 groups out, 1 seed: 5 trainings" in out and not study.folder.exists(), err


def test_a_task_that_names_no_split_is_told_what_it_lacks(study):
    refused(
        study, "toy.py does not name the keys that choose a split .task.: give it `split_keys`", "--folds=3", task=TOY
    )


@pytest.mark.slow
def test_one_folder_is_one_study(study, tmp_path):
    words = ["dataset.val=ann", "dataset.test=eva,gus", "epochs=1", "--seeds=0,1"]
    code, out, err, started = study(*words)
    assert code == 0 and len(started) == 4 and "one test set, 2 seeds: 2 trainings" in out and "of 2 people" in out, err
    assert [path.name for path in sorted(study.folder.glob("seed_*/test.json"))] == ["test.json"] * 2
    (study.folder / "seed_1/test.json").unlink()  # as if it was killed before its test
    code, out, err, started = study(*words)
    assert code == 0 and started == ["evaluate"] and "1 of 2 are done" in out, err
    refused(study, r"not the study of that folder: seeds: \[0, 1\] -> \[0, 2\] .*: change it back, or give another",
            *words[:-1], "--seeds=0,2")  # fmt: skip
    refused(study, "not the study of that folder: words: ", *words[:-2], "epochs=2", words[-1])
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    refused(study, "the folder holds something else .*other.: give a new --out", *words, out=tmp_path / "other")
    (tmp_path / "other/plan.json").write_text("[")
    refused(study, "not the plan of a study", *words, out=tmp_path / "other")


@pytest.mark.slow
def test_a_training_that_fails_is_named_and_the_rest_is_written(study, tmp_path):
    """No other begins then; without the fault the same command goes on."""
    text = (ROOT / "tests/tasks/people.py").read_text()
    broken = text.replace(
        "    def model(self):", "    def model(self):\n        assert 'ann' not in self.cfg.dataset.test", 1
    )
    (tmp_path / "broken.py").write_text(broken)
    code, out, err, started = study(
        "--leave-one-out=people", "epochs=1", "--fold-seed=2", task=str(tmp_path / "broken.py")
    )
    assert code == 1 and re.search("error: 1 training of 9 failed, fold_0_seed_0: .*the same command continues", err), (
        err
    )
    assert "0 of 9 tested" in out and (study.folder / "study.json").exists() and started == ["train"]
    (tmp_path / "broken.py").write_text(text)
    code, out, err, started = study("--folds=3", "epochs=1", task=str(tmp_path / "broken.py"), out=tmp_path / "new")
    assert code == 0 and "3 of 3 tested, each once" in out, err
    assert "2 of 3 tested" not in out and started == ["train", "evaluate"] * 3


@pytest.mark.slow
def test_the_command_that_resumes_a_training_of_a_study_is_whole(study):
    """What tools/runs.py prints of it has the split that the study has set, and the number of processes."""
    code, _, err, _ = study("--folds=2", "epochs=1", "--processes=2")
    assert code == 0, err
    assert all(any("--nproc_per_node=2" in word for word in command) for command in study.started)
    words = shlex.split(status(study.folder / "fold_1_seed_0")["resume_command"])
    assert "--nproc_per_node=2" in words
    assert str(study.folder / "fold_1_seed_0.yaml") in words
