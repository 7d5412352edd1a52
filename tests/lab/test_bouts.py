"""Bouts: scores against a slow loop and scikit-learn, smoothing, BORIS' files, and the command lines that use them."""

import csv
import itertools
import json
import shutil
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import launching, succeed
from lab_files import FILES

from engine.contract import LockstepError
from formats.clock import Clock
from formats.lab import behaviour, boris, boris_writer, bouts
from formats.lab.bouts import Smoothing
from formats.lab.mixup import Mixed
from tools.use import bout_files, decide, decisions

FPS = 20.0


def sequence(rng, count, classes, longest=12, unknown=0.1):
    """(count,) labels in runs, some of them -1."""
    found = []
    while len(found) < count:
        label = -1 if rng.random() < unknown else int(rng.integers(classes))
        found += [label] * int(rng.integers(1, longest))
    return np.array(found[:count])


def slow_runs(labels, c):
    found, at = [], 0
    for value, group in itertools.groupby(labels):
        size = len([*group])
        found += [(at, at + size)] * int(value == c)
        at += size
    return found


def slow_matches(true, predicted, value_of):
    """Greedy, one to one: again and again the best pair that is left."""
    found = []
    while True:
        left = [
            (value_of(a, b), -n, -m)
            for n, a in enumerate(true)
            for m, b in enumerate(predicted)
            if value_of(a, b) is not None and n not in {p for p, _ in found} and m not in {q for _, q in found}
        ]
        if not left:
            return sorted(found)
        _, n, m = max(left)
        found.append((-n, -m))


def overlap(a, b):
    one, two = {*range(*a)}, {*range(*b)}
    share = Fraction(len(one & two), len(one | two))
    return share if share >= Fraction(1, 2) else None


def onset(a, b):
    return -abs(a[0] - b[0]) if abs(a[0] - b[0]) <= 5 else None  # .25 s at 20 frames/s


def test_scores_are_those_of_a_slow_loop_and_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(60):
        classes, count = int(rng.integers(2, 5)), int(rng.integers(1, 120))
        true = sequence(rng, count, classes)
        shifted = np.roll(true, int(rng.integers(0, 4)))
        predicted = np.where(rng.random(count) < 0.1, rng.integers(classes, size=count), shifted).clip(0)
        found = bouts.score(bouts.one_hot(true, classes), bouts.one_hot(predicted, classes), Clock.even(count, FPS))
        seen = np.where(true < 0, -1, predicted)
        for c in range(classes):
            a, b = slow_runs(true, c), slow_runs(seen, c)
            assert (found.true[c], found.predicted[c]) == (len(a), len(b))
            pairs = np.array(a).reshape(-1, 2), np.array(b).reshape(-1, 2)
            assert bouts.by_overlap(*pairs) == slow_matches(a, b, overlap)
            assert bouts.by_onset(*(each[:, 0] for each in pairs), 5) == slow_matches(a, b, onset)
            assert found.overlap[c] == len(slow_matches(a, b, overlap))
            assert found.onset[c] == len(slow_matches(a, b, onset))
            assert sorted(found.durations[1][c]) == sorted((stop - start) / FPS for start, stop in b)
            assert found.latencies[0][c] == [start / FPS for start, _ in a[:1]]
        for side, labels in enumerate((true, seen)):
            steps = np.zeros((classes, classes), dtype=int)
            for before, after in itertools.pairwise(labels.tolist()):
                if before != after and before >= 0 and after >= 0:
                    steps[before, after] += 1
            assert (found.transitions[side] == steps).all()
        looked = true >= 0
        if len({*true[looked], *predicted[looked]}) > 1:
            report = found.report([*"abcd"[:classes]], "none")
            kappa = metrics.cohen_kappa_score(true[looked], predicted[looked])
            assert report["all"]["kappa"] == pytest.approx(kappa, abs=1e-12)
            for c in range(classes):
                one, two = true[looked] == c, predicted[looked] == c
                if len({*one, *two}) > 1:
                    assert report["abcd"[c]]["kappa"] == pytest.approx(metrics.cohen_kappa_score(one, two), abs=1e-12)


def test_two_halves_of_a_bout_that_overlap_it_equally_are_one_match():
    true, halves = np.array([[0, 4]]), np.array([[0, 2], [2, 4]])
    assert bouts.by_overlap(true, halves) == [(0, 0)]
    assert bouts.by_overlap(halves, true) == [(0, 0)]
    assert bouts.by_overlap(true, np.array([[0, 1], [1, 9]])) == []


def test_any_cut_of_the_videos_gives_the_same_report():
    rng = np.random.default_rng(1)
    parts = []
    for _ in range(9):
        count = int(rng.integers(1, 90))
        sides = [bouts.one_hot(sequence(rng, count, 3, unknown=u), 3) for u in (0.2, 0.0)]
        parts.append(bouts.score(*sides, Clock.even(len(sides[0]), float(rng.integers(10, 60)) / 3)))
    whole = sum(parts[1:], start=parts[0]).report([*"abc"], "a")
    assert whole["all"]["videos"] == 9
    for _ in range(5):
        order = [parts[n] for n in rng.permutation(9)]
        cut = int(rng.integers(1, 8))
        groups = [sum(some[1:], start=some[0]) for some in (order[:cut], order[cut:])]
        assert (groups[1] + groups[0]).report([*"abc"], "a") == whole


def test_labels_that_overlap_are_scored_class_by_class():
    true = np.array([[1, 0], [1, 1], [1, 1], [0, 1], [-1, 1], [-1, 0]])
    predicted = np.array([[1, 0], [1, 0], [1, 1], [0, 1], [1, 1], [1, 1]])
    found = bouts.score(true, predicted, Clock.even(len(true), FPS), exclusive=False)
    assert found.true.tolist() == [1, 1] and found.predicted.tolist() == [1, 1]
    assert found.overlap.tolist() == [1, 1] and not found.confusion.any() and not found.transitions.any()
    assert found.frames.tolist() == [[[1, 0], [0, 3]], [[1, 1], [1, 3]]]
    assert found.report(["a", "b"], "none")["all"]["kappa"] is None


# ---- smoothing ----


def test_a_median_is_that_of_each_window():
    rng = np.random.default_rng(2)
    values = rng.random((50, 3))
    for width in (1, 3, 9, 61):
        truth = [
            np.median([values[min(max(k, 0), 49)] for k in range(n - width // 2, n + width // 2 + 1)], axis=0)
            for n in range(50)
        ]
        assert (bouts.median(values, width) == np.array(truth)).all()


@pytest.mark.parametrize(
    ("before", "least", "after"),
    [("110111", 1, "111111"), ("11000111", 2, "00000111"), ("0100010", 0, "0100010"), ("0100010", 1, "0000000"),
     ("1101", 1, "1111"), ("0010100", 1, "0011100"), ("0110010", 2, "0111110"), ("", 3, ""), ("000", 3, "000"),
     ("0011", 2, "0000"), ("1000", 0, "1000")],
)  # fmt: skip
def test_gaps_are_filled_first_and_then_short_bouts_dropped(before, least, after):
    on = np.array([letter == "1" for letter in before], dtype=bool)
    assert "".join("01"[each] for each in bouts.filled(on, least).astype(int)) == after


def test_what_is_dropped_is_background_or_what_was_before():
    labels = np.array([0, 1, 1, 1, 1, 2, 1, 1, 0, 0, 2, 2, 2])
    shares = bouts.one_hot(labels, 3) * 0.8 + 0.1
    rule = Smoothing(least={"b": 1, "c": 1})
    with_background = bouts.decide(shares, ["a", "b", "c"], "a", rule).argmax(1)
    assert with_background.tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2]
    without = bouts.decide(shares, ["a", "b", "c"], "none", Smoothing(least={"a": 2, "c": 3})).argmax(1)
    assert without.tolist() == [1] * 13, "the first frames take what follows"
    shares = np.array([[0.9, 0.6, 0.2], [0.9, 0.6, 0.7], [0.9, 0.1, 0.1]])
    many = bouts.decide(shares, [*"abc"], "a", Smoothing(), [0.5, 0.5, 0.6])
    assert many.tolist() == [[0, 1, 0], [0, 1, 1], [1, 0, 0]], "background is none of the others, however sure"


def test_the_smoothing_that_is_chosen_helps_and_none_is_chosen_where_none_helps():
    rng = np.random.default_rng(3)
    videos = []
    for _ in range(2):
        true = bouts.one_hot(sequence(rng, 500, 3, longest=60, unknown=0.0), 3)
        noise = rng.random((500, 3))
        videos.append(((true * 0.7 + noise) / (true * 0.7 + noise).sum(1, keepdims=True), true, FPS))
    chosen, f1, plain = bouts.choose(videos, ["background", "b", "c"], "background")
    assert f1 > plain + 0.3 and chosen.fps == FPS and (chosen.median > 1 or any(chosen.least.values()))
    rule = Smoothing(chosen.median, {name: chosen.least.get(name, 0) for name in "bc"}, FPS)
    parts = [
        bouts.score(true, bouts.decide(shares, [*"abc"], "a", rule), Clock.even(len(true), FPS))
        for shares, true, _ in videos
    ]
    again = sum(parts[1:], start=parts[0])
    assert again.report([*"abc"], "a")["all"]["overlap_f1"] == pytest.approx(f1, abs=1e-12), "what it says it brings"
    sure = [(true * 0.9 + 0.05, true, FPS) for _, true, _ in videos]
    chosen, f1, plain = bouts.choose(sure, ["background", "b", "c"], "background")
    assert f1 == plain == 1 and chosen == Smoothing(1, {}, FPS) and str(chosen) == "none helps"


def test_frames_are_counted_at_the_rate_they_were_chosen_at():
    chosen = Smoothing(5, {"b": 10}, 20.0)
    assert chosen.at(20.1) == chosen and chosen.at(0.0) == chosen
    assert (chosen.at(40.0).median, chosen.at(40.0).least) == (9, {"b": 20})
    assert (chosen.at(10.0).median, chosen.at(10.0).least) == (3, {"b": 5})


# ---- BORIS ----


def videos_of(rng, count):
    """Videos of odd frame rates, with bouts that touch, and of one frame."""
    for number in range(count):
        fps = float(rng.choice([29.97, 30000 / 1001, 120.0, 7.5]))
        labels = sequence(rng, 400, 4, longest=30, unknown=0)
        found = [
            (name, *run) for c, name in enumerate(["groom", "rear, high", "walk"], 1) for run in slow_runs(labels, c)
        ]
        variables = {"predicted by": "run/best.pt", "this video was": "held out"}
        ordered = sorted(found, key=lambda each: each[1])
        yield boris_writer.Video(f"day {number}/v.mp4", Clock.even(400, fps), ordered, variables), labels


@pytest.mark.parametrize("kind", ["csv", "tsv", "xlsx"])
def test_what_is_written_for_boris_is_read_back_frame_by_frame(tmp_path, kind):
    names = np.array(["background", "groom", "rear, high", "walk"])
    for number, (video, labels) in enumerate(videos_of(np.random.default_rng(4), 3)):
        path = tmp_path / f"{number}.{kind}"
        if kind == "xlsx":
            pytest.importorskip("openpyxl")
            path.write_bytes(boris_writer.imported(video))
        else:
            path.write_text(boris_writer.aggregated([video], "\t" if kind == "tsv" else ","))
        (back,) = behaviour.read(path)
        assert (back.per_frame(video.clock).sum(1) <= 1).all()
        assert (back.names(video.clock) == names[labels]).all()
        assert kind == "xlsx" or (back.video, back.fps) == ("v.mp4", pytest.approx(video.clock.fps))


def test_the_spreadsheet_has_the_five_columns_and_each_state_twice(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    video = boris_writer.Video(
        "a.mp4",
        Clock.even(40, 20.0),
        [("groom", 2, 30), ("walk", 4, 10), ("rear", 10, 12)],
        {"this video was": "new"},
        "m1",
    )
    (tmp_path / "a.xlsx").write_bytes(boris_writer.imported(video))
    rows = [*openpyxl.load_workbook(tmp_path / "a.xlsx").worksheets[0].iter_rows(values_only=True)]
    assert rows[0] == ("time", "subject", "code", "modifier", "comment")
    assert [row[:3] for row in rows[1:]] == [
        (0.1, "m1", "groom"), (0.2, "m1", "walk"), (0.5, "m1", "walk"), (0.5, "m1", "rear"), (0.6, "m1", "rear"),
        (1.5, "m1", "groom")]  # fmt: skip
    assert rows[1][4] == "this video was: new"


def test_the_table_has_the_columns_of_boris_in_their_order():
    video = boris_writer.Video("a.mp4", Clock.even(40, 20.0), [("groom", 2, 10)], {"this video was": "new"})
    rows = [*csv.reader(boris_writer.aggregated([video], ",").splitlines())]
    exported = FILES / "annotations/boris_aggregated/input/events.tsv"
    columns = exported.read_text().splitlines()[0].split("\t")
    own = [name for name in columns if name != "Modifier #1"]
    assert [name for name in rows[0] if name != "this video was"] == own
    row = dict(zip(*rows, strict=True))
    assert (row["Start (s)"], row["Stop (s)"], row["Image index stop"]) == ("0.1", "0.5", "10")
    assert row["Subject"] == "No focal subject" and row["this video was"] == "new"
    assert boris.layout_of([",".join(rows[0])]) == "aggregated"


def test_a_state_that_ends_nowhere_is_refused_in_a_spreadsheet(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["time", "subject", "code", "modifier", "comment"])
    for time, code in ((1, "groom"), (2, "rear"), (3, "rear")):
        book.active.append([time, "", code, "", ""])
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(LockstepError, match=r"groom starts at 1 s and has no STOP .*a.xlsx:2"):
        boris.read(tmp_path / "a.xlsx")


# ---- the command lines ----


def recordings(path, seed=0, multi=False):
    """Noisy tracks of six mice, whose windows tell three classes; frames without a label and without a mouse."""
    rng = np.random.default_rng(seed)
    signal, labels = [], []
    for _ in range(6):
        seen = sequence(rng, 400, 3, longest=60, unknown=0)
        x = rng.normal(0, 1, (400, 3))
        x[:, 0] += 3 * (seen == 1)
        x[:, 1] += 3 * (seen == 2)
        valid = np.ones((400, 1))
        valid[100:105] = 0
        seen[50:60] = seen[100:105] = -1
        signal.append(np.concatenate([x * valid, valid], 1))
        labels.append(seen)
    mice = np.array([f"m{n}" for n in range(6)])
    arrays = {
        "signal": np.concatenate(signal).astype(np.float32),
        "step_label": np.concatenate(labels).astype(np.int16),
        "lengths": np.full(6, 400),
        "subject": mice,
        "recording": np.char.add(mice, ".mp4"),
        "channels": np.array(["a_x", "a_y", "speed", "valid"]),
        "classes": np.array(["background", "groom", "rear"]),
        "axes": np.array(0),
        "rate_hz": np.array(FPS),
    }
    if multi:
        many = bouts.one_hot(arrays["step_label"].astype(int), 3)
        many[many[:, 1] == 1, 2] = rng.integers(0, 2, (many[:, 1] == 1).sum())
        many[200:220, 2] = -1
        arrays["labels"] = many
    np.savez(path, **arrays)
    return arrays


WORDS = "dataset.length=16 dataset.stride=4 model.width=8 steps=80 device=cpu".split()


@pytest.fixture(scope="module")
def tracks_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracks")
    recordings(folder / "mice.npz")
    with launching() as launch:
        words = ["har", f"dataset.root={folder / 'mice.npz'}", *WORDS]
        succeed(launch.python("train.py", *words, f"save_dir={folder / 'run'}"))
    return folder


def table(path, delimiter=","):
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def predict_words(run, data, folder):
    tables = ["--out", folder / "p.csv", "--bouts", folder / "b.csv", "--events", folder / "e.tsv"]
    return ["tools/predict.py", run, data, *tables, "device=cpu"]


@dataclass(frozen=True)
class Predicted:
    """The tables of a prediction of six mice, and what was printed of it."""

    folder: Path
    truth: np.ndarray  # (6, 400) labels
    said: dict[str, Any]

    @property
    def sides(self) -> dict[str, str]:
        return {one["name"]: one["side"] for one in self.said["found"]}

    @property
    def held_out(self) -> list[str]:
        return [name for name, side in self.sides.items() if side == "held out"]

    @property
    def frames(self) -> list[dict[str, str]]:
        return table(self.folder / "p.csv")

    @property
    def names(self) -> np.ndarray:
        """(6, 400) label of each frame, empty where no mouse is."""
        return np.array([row["label"] for row in self.frames]).reshape(6, 400)

    def scores(self) -> dict[str, dict[str, Any]]:
        """The scores of the held-out mice, from the table of frames."""
        number = {"": -1, "background": 0, "groom": 1, "rear": 2}
        labels = np.vectorize(number.get)(self.names)
        chosen = [n for n in range(6) if f"m{n}.mp4" in self.held_out]
        sides = [(bouts.one_hot(self.truth[n], 3), bouts.one_hot(labels[n], 3) == 1) for n in chosen]
        parts = [bouts.score(*side, Clock.even(len(side[0]), FPS)) for side in sides]
        return sum(parts[1:], start=parts[0]).report(["background", "groom", "rear"], "background")

    def check_scores(self) -> dict[str, dict[str, Any]]:
        """Compare what was printed with the scores of the table; return them."""
        scores = self.scores()
        printed = self.said["bouts"]["held out"]
        assert {name: printed[name] for name in scores} == scores
        return scores


@pytest.fixture(scope="module")
def predicted(tracks_run, tmp_path_factory) -> Predicted:
    pytest.importorskip("openpyxl")
    folder = tmp_path_factory.mktemp("predicted")
    data = tracks_run / "mice.npz"
    words = [*predict_words(tracks_run / "run", data, folder), "--json", "--boris", folder / "xlsx"]
    with launching() as launch:
        said = json.loads(succeed(launch.python(*words)).out)
        again = launch.python(*words)
    assert again.code == 2 and "the folder exists already" in again.err
    return Predicted(folder, np.load(data)["step_label"].reshape(6, 400), said)


@pytest.mark.slow
def test_bouts_of_tracks_from_the_command_line(predicted):
    """Scores of the held-out mice alone, the same from the written table."""
    assert {*predicted.said["bouts"]} == {"held out"} and len(predicted.sides) == 6
    assert 0 < len(predicted.held_out) < 6
    columns = "file recording step time_s subject side label p_background p_groom p_rear"
    assert [*predicted.frames[0]] == columns.split()
    names = predicted.names
    assert (names[:, 100:105] == "").all() and (np.delete(names, range(100, 105), 1) != "").all()
    scores = predicted.check_scores()
    rows = [row for row in table(predicted.folder / "b.csv") if row["source"] in predicted.held_out]

    def is_annotated(row):
        """A predicted bout is cut where nobody looked."""
        seen = predicted.truth[int(row["source"][1]), int(row["first_frame"]) : int(row["stop_frame"])]
        return row["by"] == "annotated" or len({*seen} - {-1})

    for name in ("groom", "rear"):
        for by, key in (("annotated", "true"), ("predicted", "predicted")):
            mine = [row for row in rows if row["behaviour"] == name and row["by"] == by and is_annotated(row)]
            assert abs(len(mine) - scores[name][key]) <= 2


@pytest.mark.slow
def test_predicted_labels_come_back_from_boris(predicted):
    """Those of every frame, and which videos were trained on."""
    names = np.where(predicted.names[0] == "", "background", predicted.names[0])
    events = predicted.folder / "e.tsv"
    back = {one.video: one for one in behaviour.read(events)}
    assert (back["m0.mp4"].names(Clock.even(400, FPS)) == names).all()
    of_events = {row["Media file name"]: row["this video was"] for row in table(events, "\t")}
    assert of_events == predicted.sides
    (sheet,) = behaviour.read(predicted.folder / "xlsx" / "m3.mp4.xlsx")
    assert (sheet.per_frame(Clock.even(400, FPS)) == back["m3.mp4"].per_frame(Clock.even(400, FPS))).all()


@pytest.mark.slow
def test_predictions_are_smoothed_as_validation_chose_it(launch, tracks_run, predicted, tmp_path):
    data, run = tracks_run / "mice.npz", tmp_path / "run"
    shutil.copytree(tracks_run / "run", run, symlinks=True)
    words = predict_words(run, data, tmp_path)

    def predict(*more):
        return Predicted(tmp_path, predicted.truth, json.loads(succeed(launch.python(*words, "--json", *more)).out))

    done = succeed(launch.python("tools/decide.py", run, data, "device=cpu"))
    assert f"in {', '.join(sorted(predicted.held_out))}" in done.out and "smoothing: " in done.out
    (kept,) = run.glob("*.decision.json")
    about = json.loads(kept.read_text())["about"]
    plain = predicted.scores()
    assert about["sources"] == sorted(predicted.held_out) and about["bout_f1"] > about["bout_f1_without"] + 0.1
    assert about["bout_f1_without"] == pytest.approx(plain["all"]["overlap_f1"])
    smooth = predict()
    assert smooth.check_scores()["all"]["overlap_f1"] == pytest.approx(about["bout_f1"])
    assert len(smooth.said["applied"]) == 1
    labels = [row["label"] for row in smooth.frames]
    done = succeed(launch.python(*words, "--calibrated"))
    for text in ("Calibrated: temperature", "Smoothed: ", "Not scored, because trained on: ", "Bouts, held out"):
        assert text in done.out
    calibrated = smooth.frames
    assert [row["label"] for row in calibrated] == labels, "a temperature changes no label"
    assert [row["p_rear"] for row in calibrated] != [row["p_rear"] for row in predicted.frames]
    raw = predict("--raw").said["bouts"]["held out"]
    assert {name: raw[name] for name in plain} == plain


@pytest.mark.slow
def test_a_decision_is_for_its_own_checkpoint(launch, tracks_run, tmp_path):
    """Another one of the same name does not use it, and says so."""
    data, run = tracks_run / "mice.npz", tmp_path / "run"
    shutil.copytree(tracks_run / "run", run, symlinks=True)
    answer = json.loads(succeed(launch.python("tools/decide.py", "--json", run, data, "device=cpu")).out)
    (kept,) = run.glob("*.decision.json")
    assert answer["output"] == str(kept)
    written = json.loads(kept.read_text())
    choices = ("temperature", "thresholds", "smoothing")
    assert [answer[name] for name in choices] == [written[name] for name in choices]
    assert kept.with_suffix("").with_suffix(".pt").is_file()
    kept.write_text(kept.read_text().replace('"sha256": "', '"sha256": "0'))
    words = predict_words(run, data, tmp_path)
    other = succeed(launch.python(*words, "--json"))
    assert f"warning: {kept} was chosen for another checkpoint, and is not used" in other.err
    assert "applied" not in json.loads(other.out)
    kept.write_text("{}")
    broken = launch.python(*words)
    assert broken.code == 2 and "no decision: KeyError" in broken.err and len(broken.errors) == 1


@pytest.mark.slow
def test_nothing_is_chosen_on_what_was_trained_on(launch, tracks_run, tmp_path):
    arrays = dict(np.load(tracks_run / "mice.npz"))
    run = tracks_run / "run"
    words = ["tools/decide.py", run]
    trained = {*range(6)} - {n for n in range(6) if f"m{n}" in _held_out(run)}
    chosen = sorted(trained)[:2]
    part = np.concatenate([np.arange(400 * n, 400 * n + 400) for n in chosen])
    some = {name: arrays[name][part] for name in ("signal", "step_label")}
    some |= {name: arrays[name][chosen] for name in ("lengths", "subject", "recording")}
    np.savez(tmp_path / "trained.npz", **(arrays | some))
    done = launch.python(*words, tmp_path / "trained.npz", "device=cpu")
    assert done.code == 2 and "nothing there was held out when the run was trained" in done.err
    np.savez(tmp_path / "new.npz", **(arrays | {"subject": np.array([f"n{n}" for n in range(6)])}))
    done = launch.python(*words, tmp_path / "new.npz", "device=cpu")
    assert done.code == 2 and "nothing there was held out" in done.err, "nor on new ones, which may be a test"
    done = launch.python(*words, f"dataset.root={tmp_path / 'trained.npz'}", "device=cpu")
    assert done.code == 2 and "was not held out when the run was trained" in done.err
    assert not [*run.glob("*.decision.json")] and len(done.errors) == 1


def _held_out(run):
    return torch.load(run / "last.pt", weights_only=True)["known"]["subjects"]["held out"]


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--calibrated"], "no temperature was fitted"), (["--bouts", "b.txt"], "b.txt is not the name of a table"),
     (["--events", "e.xlsx"], "ends in .csv or .tsv"), (["--bouts", "p.csv"], "one name for two tables"),
     (["--annotations", "a.csv", "--bouts", "b.csv"], "label tracks by tools/prepare_tracks.py --labels")],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_written(launch, tracks_run, tmp_path, words, says):
    words = [str(tmp_path / word) if "." in word else word for word in words]
    out = ["--out", tmp_path / "p.csv", "device=cpu"]
    done = launch.python("tools/predict.py", tracks_run / "run", tracks_run / "mice.npz", *words, *out)
    assert done.code == 2 and says in done.err and len(done.errors) == 1 and not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_labels_that_overlap_from_training_to_bouts(launch, tmp_path):
    recordings(tmp_path / "mice.npz", multi=True)
    words = ["har", f"dataset.root={tmp_path / 'mice.npz'}", *WORDS, "dataset.test_subjects=m5"]
    done = launch.python("train.py", *words, "save_dir=")
    assert done.code == 2 and "the labels of these data may overlap (loss.kind=softmax)" in done.err
    run = tmp_path / "run"
    done = succeed(launch.python("train.py", *words, "loss.kind=binary", f"save_dir={run}"))
    assert "the loss adds up" in done.out
    done = succeed(launch.python("tools/decide.py", run, tmp_path / "mice.npz", "device=cpu"))
    assert "thresholds: background " in done.out
    (kept,) = run.glob("*.decision.json")
    chosen_on = json.loads(kept.read_text())["about"]["sources"]
    assert chosen_on and "m5.mp4" not in chosen_on, "the test chooses nothing"
    out = ["--out", tmp_path / "p.csv", "--bouts", tmp_path / "b.csv", "device=cpu"]
    done = succeed(launch.python("tools/predict.py", run, tmp_path / "mice.npz", *out, "--json"))
    scores = json.loads(done.out)["bouts"]
    report = scores["held out"]
    assert {*scores} == {"held out", "test"} and scores["test"]["all"]["videos"] == 1
    assert report["all"]["overlap_f1"] > 0.3 and "transitions" not in report
    labels = {row["label"] for row in table(tmp_path / "p.csv")}
    assert "groom+rear" in labels and not any("background" in label and "+" in label for label in labels)
    scored = json.loads(succeed(launch.python("tools/evaluate.py", run, "device=cpu", "--json")).out)
    assert {"mean_ap", "ap/groom", "f1/rear"} <= scored["metrics"].keys() and "confusion" not in scored


def test_thresholds_are_those_with_the_highest_f1():
    rng = np.random.default_rng(5)
    labels = rng.integers(-1, 2, 300)
    shares = np.clip(0.2 + 0.2 * (labels == 1) + rng.normal(0, 0.1, 300), 0, 1)

    def f1(threshold):
        on, seen = shares[labels >= 0] >= threshold, labels[labels >= 0] == 1
        return 2 * (on & seen).sum() / (on.sum() + seen.sum())

    best = decide.best_threshold(shares, labels)
    assert f1(best) == max(f1(n / 100) for n in range(1, 100)) and 0.2 < best < 0.4
    assert decide.best_threshold(shares, np.zeros(300, int)) == 0.5


def test_a_decision_is_read_back_as_it_was(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"weights")
    (tmp_path / "last.pt").symlink_to("a.pt")
    kept = decisions.Decision(1.7, {"b": 0.3}, Smoothing(5, {"b": 3}, 30.0), {"sources": ["v"]})
    assert decisions.write(tmp_path / "last.pt", kept) == (tmp_path / "a.decision.json").resolve()
    assert decisions.read(tmp_path / "a.pt") == decisions.read(tmp_path / "last.pt") == kept
    (tmp_path / "b.pt").write_bytes(b"others")
    assert decisions.read(tmp_path / "b.pt") == decisions.Decision()


def test_a_video_without_a_frame_rate_is_not_for_boris(tmp_path):
    made = bout_files.Bouts(["background", "b"], True, "run")
    made.add("v.mp4", "new", Clock.even(2, 0.0), np.array([[1, 0], [0, 1]]), None, True)
    with pytest.raises(LockstepError, match=r"v\.mp4 has no frame rate"):
        made.write(None, Path(tmp_path / "e.csv"), None)
    assert not [*tmp_path.iterdir()]


def test_mixed_samples_depend_on_their_own_seed_alone():
    class Numbers:
        labels = np.arange(20) % 3

        def __len__(self):
            return 20

        def __getitems__(self, indices):
            return {"x": torch.tensor(indices).float()[:, None], "y": torch.tensor(self.labels[np.array(indices)])}

    kept = np.ones(20, dtype=bool)
    mixed = Mixed(Numbers(), 0.4, kept)
    seeds = [17, 2**62 + 5, 99, 3, 12345]
    whole = mixed.__getitems__([4, 5, 6, 7, 4], seeds)
    for n, (index, seed) in enumerate(zip([4, 5, 6, 7, 4], seeds, strict=True)):
        alone = mixed.__getitems__([index], [seed])
        assert all((alone[name][0] == whole[name][n]).all() for name in alone)
    assert len(mixed) == 20 and mixed.labels is Numbers.labels and not hasattr(mixed, "collate")
    partners = {seed: mixed.partner(seed) for seed in range(400)}
    kept[7] = False
    assert 7 in {other for other, _ in partners.values()}
    for seed, (other, share) in partners.items():
        assert mixed.partner(seed) == (other, 1.0 if other == 7 else share)
