"""tools/report.py: one page of a run, that holds what it says, and that no name in it can break, or make a program."""

import base64
import io
import json
import re
import shutil
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chromium import chromium
from conftest import ROOT, TOY, launching, succeed
from robot_tasks import TINY_ACT, record
from runs import records
from tampering import copied, log_of, manifest_of, replace_text

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from dev.screenshot import CHROMIUM
from tools.paper import report
from tools.paper import report_figures as figures

SHOWN = str(ROOT / "tests" / "tasks" / "shown.py")
EMPTY = {"meta", "link", "br", "img", "source", "input", "hr", "rect", "area", "base", "col", "embed", "wbr"}


class Page(HTMLParser):
    """A page as a parser sees it that is not ours. Raises AssertionError where elements are not closed in order.

    text    all of it;   elements  (name, attributes)
    tables  by the heading above: rows of cells
    """

    def __init__(self, path):
        super().__init__()
        self.open, self.elements, self.heading, self.tables = [], [], "", {}
        self.text, self.cell = "", None
        self.size = Path(path).stat().st_size
        self.feed(Path(path).read_text(encoding="utf-8"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "table":
            self.tables.setdefault(self.heading, []).append([])
        if tag == "tr":
            self.tables[self.heading][-1].append([])
        if tag in ("td", "th"):
            self.tables[self.heading][-1][-1].append("")
        if tag in ("h2", "h3"):
            self.heading = ""

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.open[-3:], self.getpos())

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.text += data
        if {"td", "th"} & {*self.open}:
            self.tables[self.heading][-1][-1][-1] += data
        elif {"h2", "h3"} & {*self.open}:
            self.heading += data.strip()

    def images(self):
        return [value for _, has in self.elements for name, value in has.items() if name in ("src", "srcset")]


def names_of(task_file):
    """The class names of tests/tasks/shown.py, as they can be in a page."""
    found = {}
    exec(compile(Path(task_file).read_text().split("\n\n\nclass Sourced")[0], task_file, "exec"), found)
    return [re.sub("[\x00\u202e\u2067]", "\N{REPLACEMENT CHARACTER}", name) for name in found["NAMES"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs: of signals, whose name is hostile, too; of films; of numbers, without classes."""
    folder = tmp_path_factory.mktemp("runs")
    words = {'a"><img src=x onerror=alert(1)> & $x^$': [SHOWN], "films": [SHOWN, "dataset.form=film"], "toy": [TOY]}
    with launching() as launch:
        for name, task in words.items():
            succeed(launch.train(*task, "log_every=2", "amp=off", "optim.ema_decay=0.5", f"save_dir={folder / name}"))
    return [folder / name for name in words]


@pytest.fixture(scope="module")
def page(runs):
    """The page of all three, the JSON of it, and where it is."""
    path = runs[0].parent / "page.html"
    with launching() as launch:
        words = [*map(str, runs), "--out", str(path), "--json", "--worst", "4"]
        done = succeed(launch.python("tools/report.py", *words))
    return Page(path), json.loads(done.out), path


def plain_loop(run):
    """(N,) true and predicted classes of the validation samples and their losses, by nothing of ours but the data."""
    from tests.tasks.shown import NAMES, Scale, Sourced

    state = torch.load(run / manifest_of(run)["best"], weights_only=True)
    average = {name.removeprefix("module."): value for name, value in state["ema"].items() if name != "n_averaged"}
    model = torch.nn.Sequential(Scale(), torch.nn.Linear(*reversed(average["1.weight"].shape)))
    model.load_state_dict(average)
    data = Sourced("signal", 47, 1)
    with torch.no_grad():
        logits = model(data.x)
    losses = F.cross_entropy(logits, torch.from_numpy(data.labels), reduction="none").numpy()
    return data, logits.argmax(1).numpy(), losses, len(NAMES)


@pytest.mark.slow
def test_the_numbers_are_those_of_scikit_learn_and_of_the_log(page, runs):
    from sklearn import metrics

    found, told, _ = page
    data, guesses, losses, count = plain_loop(runs[0])
    about, names = told["runs"][0], names_of(SHOWN)
    every = list(range(count))
    assert about["confusion"] == metrics.confusion_matrix(data.labels, guesses, labels=every).tolist()
    rows = metrics.precision_recall_fscore_support(data.labels, guesses, labels=every, zero_division=0)
    cells = found.tables["Each class"][0][1:]
    assert [row[0] for row in cells] == names
    assert [[float(cell) for cell in row[1:5]] for row in cells] == [
        [round(float(x), 4) for x in row] for row in zip(*rows, strict=True)
    ]
    for source, mine in about["per_source"].items():
        of = np.array([name == source for name in data.sources])
        present = sorted({*data.labels[of].tolist(), *guesses[of].tolist()})
        f1 = metrics.f1_score(data.labels[of], guesses[of], labels=present, average="macro", zero_division=0)
        assert mine["count"] == of.sum() and np.isclose(mine["macro_f1"], f1, atol=1e-12)
        assert np.isclose(mine["accuracy"], metrics.accuracy_score(data.labels[of], guesses[of]))
    order = sorted(about["per_source"], key=lambda source: about["per_source"][source]["macro_f1"])
    shown = found.tables["Each source"][0][1:]
    assert len(order) == 3 and [row[0] for row in shown] == order
    assert [float(row[4]) for row in shown] == [round(about["per_source"][name]["macro_f1"], 4) for name in order]
    worst = np.argsort(-losses)[:4].tolist()
    assert [each["index"] for each in about["worst"]] == worst
    assert np.allclose([each["loss"] for each in about["worst"]], losses[worst], rtol=1e-5)
    assert [each["predicted"] for each in about["worst"]] == guesses[worst].tolist()
    assert [each["source"] for each in about["worst"]] == [data.sources[n] for n in worst]
    lines = log_of(runs[0])
    best = max((line for line in lines if line["event"] == "eval"), key=lambda line: line["macro_f1"])
    for name in ("loss", "accuracy", "macro_f1"):
        assert about["metrics"][name] == best[name] == about["best"][name], "scored again, to the last bit"
        assert [f"{best[name]:.4f}", f"{best[name]:.4f} ="] in [row[1:] for row in found.tables[runs[0].name][0]]
    assert about["checkpoint"]["step"] == best["step"] and about["step"] == lines[-1]["step"]
    for run, of_run in zip(runs, told["runs"], strict=True):
        steps = {line["step"]: line for line in records(run, "eval")}
        assert of_run["metrics"] == {name: steps[of_run["checkpoint"]["step"]][name] for name in of_run["metrics"]}
    toy = [each["loss"] for each in told["runs"][2]["worst"]]
    assert None not in toy and toy == sorted(toy, reverse=True), "the one whose whole mask is empty has no loss"
    state = torch.load(about["checkpoint"]["file"], weights_only=True)
    assert about["checkpoint"]["sha256"] in found.text and state["progress"]["step"] == best["step"]


def test_the_page_is_one_file_in_which_no_name_is_more_than_a_name(page, runs):
    found, told, _ = page
    elements = {tag for tag, _ in found.elements}
    assert not elements & {"script", "iframe", "object", "embed", "link", "base", "form", "b onclick=alert(1)"}
    for tag, has in found.elements:
        assert not [name for name in has if name.startswith("on")], (tag, has)
        for name in {"src", "srcset", "href", "action", "xlink:href", "data", "poster"} & has.keys():
            assert re.match(r"data:image/|#run-\d", has[name]), has[name][:80]
    (policy,) = [has["content"] for tag, has in found.elements if has.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")
    for name in names_of(SHOWN):
        assert found.text.count(name) >= 8, name  # matrix, table, ethogram
    assert found.text.count(runs[0].name) >= 4 and "<b onclick=alert(1)>mouse</b> 2" in found.text
    assert told["bytes"] == found.size < 2e6


def test_the_pictures_can_be_opened(page):
    """By an XML parser and Pillow; films move, and each has a picture that does not, for those who want none."""
    from PIL import Image

    found, _, _ = page
    kinds = {"svg+xml": 0, "moving": 0, "still": 0}
    for uri in found.images():
        kind, data = re.match(r"data:image/([\w+]+);base64,(.*)$", uri).groups()
        content = base64.b64decode(data, validate=True)
        if kind == "svg+xml":
            tree = ElementTree.fromstring(content)
            words = " ".join(tree.itertext())
            assert not [each for each in tree.iter() if each.tag.endswith("script")] and "mathdefault" not in words
            kinds[kind] += 1
        else:
            picture = Image.open(io.BytesIO(content))
            picture.load()
            frames = getattr(picture, "n_frames", 1)
            assert frames in (1, 5) and picture.size == (160, 128)
            kinds["moving" if frames > 1 else "still"] += 1
    # Loss, macro F1, accuracy, ECE, rate, norm, speed; four windows. Four films.
    assert kinds == {"svg+xml": 7 + 4, "moving": 4, "still": 4}


LOOK = """JSON.stringify({title: document.title, width: document.documentElement.scrollWidth,
images: [...document.images].map(image => [image.complete, image.naturalWidth]), scripts: document.scripts.length,
hidden: [...document.querySelectorAll("h1, h2, h3, p, dd, figcaption, li, pre")].filter(
    each => each.getBoundingClientRect().right > innerWidth + 1).length})"""


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt install chromium")
@pytest.mark.timeout(300)
def test_a_browser_shows_it_and_asks_for_nothing(page, tmp_path):
    """Headless, as wide as a phone. The control shows that a request, a title and a wide line would be seen."""
    control = tmp_path / "control.html"
    control.write_text(
        "<title>control</title><body><p style='width:900px'>x</p>"
        "<img src=http://planted.test/x onerror=\"document.title='broken'\">"
    )
    with socket.create_server(("127.0.0.1", 0)) as server, chromium(tmp_path / "profile") as (send, events):
        server.setblocking(False)
        results = {}
        for path in (page[2], control):
            target = send("Target.createTarget", url="about:blank")["targetId"]
            session = send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Network", "Page", "Runtime", "Log"):
                send(f"{domain}.enable", session)
            size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            send("Emulation.setDeviceMetricsOverride", session, **size)
            begin = len(events)
            send("Page.navigate", session, url=path.as_uri())
            while not any(event["method"] == "Page.loadEventFired" for event in events[begin:]):
                send("Runtime.evaluate", session, expression="1")
            found = send("Runtime.evaluate", session, expression=LOOK)["result"]["value"]
            asked = [
                e["params"]["request"]["url"] for e in events[begin:] if e["method"] == "Network.requestWillBeSent"
            ]
            methods = {event["method"] for event in events[begin:]}
            results[path] = json.loads(found), [url[:40] for url in asked if not url.startswith("data:")], methods
        with pytest.raises(BlockingIOError):
            server.accept()
    (seen, asked, methods), (control_seen, control_asked, _) = results.values()
    assert control_asked[1:] == ["http://planted.test/x"] and control_seen["title"] == "broken"
    assert control_seen["width"] > 400 and control_seen["hidden"]
    assert len(asked) == 1 and asked[0].startswith("file:///"), "the page itself, and nothing else"
    signs = "Page.javascriptDialogOpening Runtime.consoleAPICalled Runtime.exceptionThrown Log.entryAdded"
    assert not methods & {*signs.split()}
    assert seen["title"].startswith('a"><img src=x') and seen["scripts"] == 0
    assert seen["images"] and all(complete and width > 0 for complete, width in seen["images"])
    assert seen["width"] <= 400 and not seen["hidden"], "nothing is wider than a phone"


def lines_of(*events):
    common = {"epoch": 0, "samples": 8, "time_s": 1.0}
    return "".join(json.dumps({"event": event, "step": step} | common | more) + "\n" for event, step, more in events)


TRAIN = {"loss": 1.25, "lr": 0.1, "grad_norm": 1.0, "samples_per_s": 5.0, "data_wait_share": 0.5}
TRAIN |= {"digest": "0123456789abcdef"}


class Broken(NamedTuple):
    """A damaged log, and what its page says."""

    log: str
    says: list[str]


BROKEN = {
    "empty": Broken("", ["The log is empty: no step has been logged yet."]),
    "one point": Broken(
        lines_of(("train", 5, TRAIN)),
        ["Nothing has been evaluated.", "last training loss 1.2500", "0123456789abcdef"],
    ),
    "not finite": Broken(
        lines_of(
            ("train", 1, TRAIN | {"loss": None, "lr": float("nan"), "grad_norm": float("inf"), "own": "text"}),
            ("train", 2, TRAIN | {"loss": 10**400, "samples_per_s": [1], "data_wait_share": True}),
            ("eval", 2, {"loss": None}),
        ),
        ["not evaluated; last training loss inf"],
    ),
    "torn": Broken(
        lines_of(("train", 1, TRAIN), ("eval", 1, {"loss": 0.75}))
        + '[1]\n{"event": "train"}\n{"event": "train", "step": NaN}\n\x00\n{"event": "tr',
        ["5 lines of metrics.jsonl cannot be read and are left out.", "loss 0.7500 at step 1"],
    ),
    "skipped": Broken(
        lines_of(
            ("skipped", 3, {"skipped_step": 3, "ranks": {"0": [1]}, "found": {"1": "NaN in <i>x</i>"}}),
            ("train", 4, TRAIN),
            ("changed", 4, {"change": "optim.lr: 0.1 is 0.2 now"}),
            ("eval", 4, {"loss": 0.5}),
        ),
        ["2 events", "step 3 skipped: sample 1 has NaN in <i>x</i>", "optim.lr: 0.1 is 0.2 now"],
    ),
}
OTHER_FILES = {
    "damaged": {
        "environment.json": "{",
        "status.json": '{"state": "running", "reason": ["odd"]}',
        "replay.json": "[1]",
    },
    "replayed": {
        "environment.json": '{"devices": 3, "packages": [], "processes": "x", "git_commit": 7}',
        "replay.json": '{"verdict": "the same <bits>", "equal": 7, "points": 9, "to": 18, "from": 0, "x": []}',
    },
}
"""Whole runs, in which these files are damaged."""


def test_the_panel_of_the_rate_shows_the_smallest_and_the_largest_of_the_groups():
    lines = [{"event": "train", "step": step, "lr": 0.1 * step, "lr_min": 0.01 * step} for step in (1, 2)]
    run = report.Run("run", Path("run"), "run", lines)
    largest, smallest = report._curves([run], "lr")
    assert largest.y.tolist() == [0.1, 0.2] and smallest.y.tolist() == [0.01, 0.02]
    assert "lr_min" not in report._panel_names([run])


def test_an_event_of_shares_names_the_workers_and_the_first_step():
    facts = {"from_step": 26, "workers": [6, 2], "why": "process 1 takes 2.1 times as long per worker"}
    lines = [{"event": "shares", "step": 20, "time_s": 1.0} | facts, {"event": "shares", "step": 30}]
    (step, words), (_, of_damaged) = report._events(report.Run("run", Path("run"), "run", lines))
    why = "process 1 takes 2.1 times as long per worker"
    assert (step, words) == (20, f"virtual workers of the processes: [6, 2], from step 26 on ({why})")
    assert of_damaged == "virtual workers of the processes: None, from step None on (None)"


@pytest.mark.slow
def test_a_run_of_which_little_is_left_has_a_page_of_that(launch, runs, tmp_path):
    """Runs whose logs, checkpoints or other files are missing or damaged: one page of all, with a note in each."""
    folders = {name: tmp_path / name for name in [*BROKEN, *OTHER_FILES]}
    for name, broken in BROKEN.items():
        folders[name].mkdir()
        shutil.copy(runs[2] / "config.yaml", folders[name])
        (folders[name] / "metrics.jsonl").write_text(broken.log)
    for name, files in OTHER_FILES.items():
        copied(runs[2], folders[name])
        for file, text in files.items():
            (folders[name] / file).write_text(text)
    best = folders["damaged"] / manifest_of(runs[2])["best"]
    best.write_bytes(best.read_bytes()[:-500])
    out = tmp_path / "page.html"
    words = ["tools/report.py", *map(str, folders.values()), "--out", str(out), "--json"]
    done = succeed(launch.python(*words))
    found, told = Page(out), json.loads(done.out)["runs"]
    assert found.text.count("What proves it") == len(folders)
    top = found.text[: found.text.index("Curves")]
    for name, broken in BROKEN.items():
        assert not [words for words in broken.says if words not in found.text], name
    notes = {name: run["notes"] for name, run in zip(folders, told, strict=True)}
    for name in BROKEN:
        assert "Not scored: there is no checkpoint yet" in notes[name]
    assert any(note.startswith("Not scored: ") and best.name in note for note in notes["damaged"])
    assert "running, on another machine or killed: ['odd']" in top and notes["replayed"] == []
    assert "Replayed: the same <bits>, at 7 of 9 points, of the steps 0 to 18." in found.text
    assert told[-1]["metrics"]["loss"] == told[-1]["best"]["loss"], "that one is scored"
    assert found.text.count("Nothing has been evaluated.") == 1


@pytest.mark.slow
def test_what_cannot_be_a_report_is_said_before_anything_is_written(launch, runs, tmp_path):
    task = tmp_path / "own"
    copied(runs[2], task)
    shutil.copy(TOY, task / "mine.py")
    replace_text(task / "config.yaml", TOY, str(task / "mine.py"))
    run = str(runs[2])
    no_page = f"{tmp_path}/no/a.html"
    for error, *words in (
        (f"no run at '{tmp_path}' (the first word): give the folder of a run", run, str(tmp_path)),
        ("a.pdf is not the name of a page (--out): give one that ends in .html, in a f", run, "--out", "a.pdf"),
        (f"{no_page} is not the name of a page (--out)", run, "--out", no_page),
        (f"the run's task is a program in its own folder, {task}/mine.py ({task}/config.yaml): read", str(task)),
        ("no run (the first word): give the folder of a run", "device=cpu"),
    ):
        before = sorted(tmp_path.rglob("*"))
        done = launch.python(str(ROOT / "tools" / "report.py"), *words, cwd=tmp_path)
        assert done.code == 2 and len(done.errors) == 1 and done.errors[0].startswith(f"error: {error}"), done.err
        assert sorted(tmp_path.rglob("*")) == before
    trusted = [str(task), "--trust", "--no-samples"]
    for name in ("report.html", "report_2.html"):
        succeed(launch.python(str(ROOT / "tools" / "report.py"), *trusted, cwd=tmp_path))
        assert "scored for this page" not in Page(tmp_path / name).text


def test_without_its_packages_it_names_the_command(monkeypatch, runs, capfd):
    from tools.paper import report

    monkeypatch.setattr(report.pages, "find_spec", lambda name: None if name == "matplotlib" else name)
    assert report.main([str(runs[2])]) == 2
    assert capfd.readouterr().err == "error: matplotlib not installed (report.py): pip install matplotlib jinja2\n"


@pytest.mark.slow
def test_a_robot_shows_what_it_would_have_done_beside_what_was_done(launch, tmp_path, monkeypatch):
    """The worst episodes with a film of the camera; the loss of each is that of tools/evaluate.py on it alone."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    data, run, out = record(tmp_path / "set", episodes=5), tmp_path / "run", tmp_path / "page.html"
    words = ["policy.type=act", *TINY_ACT, "amp=off", "batch_size=4", "steps=2"]
    words += [f"dataset.root={data}", "dataset.cache=none", "dataset.eval_split=0.4"]
    succeed(launch.python("train.py", "robot", *words, f"save_dir={run}"))
    told = json.loads(succeed(launch.python("tools/report.py", str(run), "--out", str(out), "--json")).out)["runs"][0]
    found = Page(out)
    assert len(told["per_source"]) == 2 and sum(each["count"] for each in told["per_source"].values()) == told["count"]
    (number, each), *_ = told["per_source"].items()
    alone = ["tools/evaluate.py", str(run), "--split", "all", "--json", f"dataset.episodes={number}"]
    scored = json.loads(succeed(launch.python(*alone)).out)["metrics"]
    for metric in ("loss", "action_l1"):
        assert np.isclose(each[metric], scored[metric], rtol=1e-5), metric
    assert "The worst episodes" in found.text and "The worst samples" not in found.text
    from pyarrow.parquet import read_table

    words = ["tools/predict.py", str(run), "--split", "val", "--out", str(tmp_path / "p.npz")]
    succeed(launch.python(*words))
    taken = np.load(tmp_path / "p.npz")
    table = read_table(data / "data").to_pydict()
    rows = zip(table["episode_index"], table["frame_index"], table["action"], strict=True)
    recorded = {(episode, frame): action for episode, frame, action in rows}
    for each in told["episodes"]:
        of = taken["episode"] == int(each["source"])
        truth = np.array([recorded[int(each["source"]), frame] for frame in taken["frame"][of].tolist()])
        assert np.isclose(each["mean_difference"], np.abs(taken["action"][of][:, 0] - truth).mean(), rtol=1e-5)
    assert len(told["episodes"]) == 2 and told["episodes"][0]["loss"] >= told["episodes"][1]["loss"]
    films = [uri for uri in found.images() if not uri.startswith("data:image/svg")]
    assert len(films) == 2 * 2


def test_curves_keep_their_peaks_and_strips_their_order():
    x, y = np.arange(50_000.0), np.zeros(50_000)
    y[31_234], y[777] = 9, -9
    thin = figures._thinned(x, y)
    assert len(thin[0]) <= 2 * figures.MOST_POINTS and thin[1].max() == 9 and thin[1].min() == -9
    assert (np.diff(thin[0]) > 0).all() and np.isnan(figures._thinned(x[:2], np.array([np.inf, 1]))[1][0])
    labels = np.array([1, 1, 0, -1, 2])
    assert figures.bands(labels) == [(0, 400, 1), (400, 200, 0), (800, 200, 2)]
    long = figures.bands(np.repeat([3, 1, 3], [4000, 2000, 4000]))
    assert long == [(0, 400, 3), (400, 200, 1), (600, 400, 3)]
    assert figures.bands(np.tile([3, 3, 1], 4000)) == [(0, 1000, 3)], "the most frequent of a place"
    assert figures.bands(labels[:0]) == []


@pytest.mark.parametrize(
    ("shape", "kind", "drawn"),
    [((6, 128), "float32", ("signal", (6, 128))), ((40,), "int64", ("signal", (40,))), ((3,), "float32", None),
     ((3, 20, 24), "uint8", ("picture", (20, 24, 3))), ((20, 24, 3), "float32", ("picture", (20, 24, 3))),
     ((1, 28, 28), "float32", ("picture", (28, 28))), ((17, 16, 16), "uint8", ("film", (17, 16, 16))),
     ((9, 3, 16, 18), "uint8", ("film", (9, 16, 18, 3))), ((9, 16, 18, 3), "float32", ("film", (9, 16, 18, 3))),
     ((20, 24), "uint8", ("picture", (20, 24))), ((0, 40), "float32", None), ((2, 2, 2), "float32", None)],
)  # fmt: skip
def test_a_sample_is_drawn_by_its_shape(shape, kind, drawn):
    found = figures.seen(np.ones(shape, kind))
    assert (found and (found[0], found[1].shape)) == drawn
    if found and found[0] == "signal":
        window = found[1].astype(float)
        window.flat[::3] = np.nan
        assert figures.signal(window, figures.ranges([window, np.full_like(window, np.inf)])).startswith(
            "data:image/svg"
        )
    elif found:
        draw = figures.picture if found[0] == "picture" else figures.film
        assert draw(np.where(np.eye(*found[1].shape[:2])[(...,) + (None,) * (found[1].ndim - 2)] > 0, np.nan, found[1]))


@pytest.mark.slow
def test_the_result_stands_above_the_curves_and_progress_is_printed_without_a_terminal(
    launch, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    words = ("har", "device=cpu", "dataset.stride=1024", "steps=2", "epochs=1")
    succeed(launch.train(*words, f"save_dir={run}"))
    page = tmp_path / "page.html"
    succeed(launch.python("tools/report.py", str(run), "--out", str(page), "--no-samples"))
    text = page.read_text()
    result = text.index(">Results<")
    assert result < text.index("macro_f1", result) < text.index('id="curves"')
    assert "commonest class 0.0" in text and text.index("without a model") < text.index('id="curves"')
    monkeypatch.setattr("tools.running.PROGRESS_S", 0)
    from tools.running import show_progress

    assert [*show_progress(range(3), "Scoring", "batch")] == [0, 1, 2]
    assert capsys.readouterr().err.splitlines()[-1] == "Scoring: 2 of 3 (batch)"
