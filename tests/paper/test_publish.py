"""tools/publish.py: a folder that the Hub takes, by its own reader, and that gives the predictions of the run."""

import json
import math
import os
import re
import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, TOY, launching, succeed
from films import pack
from robot_tasks import TINY_ACT, record
from runs import records
from tampering import copied, delete_checkpoints

from engine.contract import LockstepError
from tools.paper import model_card, publish
from tools.use import published

TOOL = "tools/publish.py"
ODD = ["walk|run", 'it\'s a "jump": ---', "<b>*bold*</b> `x` [a](http://b)", "ümlaut: {x} # $1$ \\"]
PEOPLE = ["anna | b", "---", "o'neil # title", "5", "6"]
FILES = {"README.md", "config.yaml", "checkpoint.json", "eval_results.json", "labels.json", "model.safetensors"}
FILES |= {"proof.json", "provenance.json"}

OWN = """
from dataclasses import dataclass

import torch
from torch import nn

from engine import contract
from engine.config import option, section
from engine.contract import Loss, Sums


class Rows:
    def __init__(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=draw)
        self.labels = (self.x[:, 0] > 0).long().numpy()
        self.sources = [f"mouse {n % 4}\\n---\\n# title | x" for n in range(count)]

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        return {"x": self.x[indices], "y": torch.from_numpy(self.labels[indices])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.other.weight = self.one.weight  # tied
        self.register_buffer("low", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x):
        return self.head(torch.tanh(self.other(torch.tanh(self.one(x)))))


@dataclass
class Data:
    root: str = option("", "where the data lie")
    api_key: str = option("", "of their server")
    pretrained: str = option("", "others' weights")


class Task(contract.Task):
    @dataclass
    class Settings(contract.Settings):
        dataset: Data = section(Data)

    defaults = {"steps": 6, "epochs": 0, "batch_size": 8, "optim.lr": 1e-2}
    classes = ["low\\n---\\nlicense: none", "high"]

    def datasets(self):
        return Rows(40, 0), Rows(20, 1)

    def metadata(self):
        return {"classes": self.classes}

    def full_dataset(self):
        return Rows(30, 2)

    def model(self):
        return Net()

    def saved(self, name):
        return name != "low"

    def loss(self, net, batch):
        return Loss(nn.functional.cross_entropy(net(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))

    def score(self, model, batch):
        output = model(batch["x"])
        losses = nn.functional.cross_entropy(output, batch["y"], reduction="sum")
        return Sums(loss=losses, hits=(output.argmax(1) == batch["y"]).sum(), count=torch.tensor(len(output)))

    def report(self, sums):
        return {"loss": float(sums["loss"] / sums["count"]), "accuracy": float(sums["hits"] / sums["count"])}

    def predict(self, model, batch):
        return {"p": model(batch["x"]).softmax(1)}
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Runs and what was published of them: of sensors with odd names, and of a task of one's own with tied weights and
    an average of them."""
    folder = tmp_path_factory.mktemp("private")
    draw = np.random.default_rng(0)
    rows = [(label, who) for label in ODD for who in PEOPLE]
    labels, people = (np.array(column) for column in zip(*rows, strict=True))
    signal = np.concatenate([draw.normal(n % 4, 1, (64, 3)).astype(np.float32) for n, _ in enumerate(rows)])
    np.savez(folder / "data.npz", signal=signal, lengths=np.full(len(rows), 64), label=labels, subject=people)
    (folder / "own.py").write_text(OWN)
    small = ["model.width=4", "model.depth=1", "dataset.length=16", "dataset.stride=16", "steps=8", "batch_size=16"]
    own = [str(folder / "own.py"), "optim.ema_decay=0.7", "digest_every=1", "dataset.api_key=hunter2"]
    own += [f"dataset.pretrained={folder / 'base_1.pt'}"]
    with launching() as launch:
        words = [f"dataset.root={folder / 'data.npz'}", "dataset.val_subjects=5,6", "wandb.entity=anna"]
        succeed(launch.train("har", *small, *words, "device=cpu", f"save_dir={folder / 'har_run'}"))
        succeed(launch.python(TOOL, folder / "har_run", "--to", folder / "har", "--license", "mit", "device=cpu"))
        succeed(launch.train(*own, "device=cpu", f"save_dir={folder / 'own_run'}"))
        how = ["--to", folder / "own", "--license", "other", "--license-name", "lab: |", "--license-link", "LICENSE.md"]
        how += ["--with-task", "--dataset", "lab/mice", "--source", "https://example.org/x"]
        succeed(launch.python(TOOL, folder / "own_run", *how, "device=cpu"))
    return folder


def card_of(folder):
    """The front matter, as the Hub's own code reads it, and the card's text."""
    hub = pytest.importorskip("huggingface_hub")
    data = hub.metadata_load(folder / "README.md")
    card = hub.ModelCard.load(folder / "README.md")
    assert data == yaml.safe_load(yaml.safe_dump(card.data.to_dict())), "nothing is lost on the way"
    name, results = hub.repocard_data.model_index_to_eval_results(data["model-index"])
    assert name == folder.name
    return data, card.text, {(each.dataset_split, each.metric_type): each for each in results}


def json_of(path):
    def refuse(number):
        raise AssertionError(f"{path} has {number}, which JSON does not")

    return json.loads(path.read_text(), parse_constant=refuse)


def told(launch, tool, *words):
    return json.loads(succeed(launch.python(f"tools/{tool}.py", *map(str, words), "--json", "device=cpu")).out)


# ---- what is written ----


@pytest.mark.slow
def test_the_hub_reads_the_card_and_no_name_breaks_it(places):
    data, text, results = card_of(places / "har")
    found = json_of(places / "har/eval_results.json")["validation"]
    assert data["license"] == "mit" and data["library_name"] == "lockstep" and "pipeline_tag" not in data
    assert {"lockstep", "time-series"} <= set(data["tags"]) and data["metrics"] == ["accuracy", "f1", "ece"]
    assert results["validation", "f1"].metric_value == found["metrics"]["macro_f1"]
    assert set(data) == {"license", "library_name", "tags", "metrics", "model-index"}, "no name has added a key"
    assert list(json_of(places / "har/labels.json")["id2label"].values()) == sorted(ODD)
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines) if line.endswith("---: |")]
    for name in (*ODD, *PEOPLE):  # a row of its own, of as many cells as its head
        begin = f"| {model_card.escaped(name)} |"
        rows = [number for number, line in enumerate(lines) if line.startswith(begin) and number not in heads]
        assert rows, name
        for row in rows:
            head = max(number for number in heads if number < row)
            assert len(re.findall(r"(?<!\\)\|", lines[row])) == lines[head].count("|") > 3
    assert not [line for line in lines if line.startswith(("# title", "license:"))]
    assert not re.search(r"(?<!\\)<b>", text)

    data, text, results = card_of(places / "own")
    assert data["license"] == "other" and data["license_name"] == "lab: |" and data["license_link"] == "LICENSE.md"
    assert data["datasets"] == ["lab/mice"] and results["validation", "accuracy"].source_url == "https://example.org/x"
    assert "--trust" in text and text.count("\n---\n") == 0 and "\n# title" not in text and "\nlicense" not in text
    assert "- Trained on and validated on: mouse 0" in text, "the split of this task cuts them"
    assert "began as those of base\\_1.pt, which have a license" in text and "- Not in it: 1 tensor" in text
    assert "Validated on 2 sources: 5, 6." in (places / "har/README.md").read_text()
    assert "| mouse 1 --- \\# title \\| x | 10 | 10 |" in text


@pytest.mark.slow
def test_the_numbers_are_those_of_the_other_tools(launch, places):
    for name in ("har", "own"):
        run, folder = places / f"{name}_run", places / name
        scored, seen = told(launch, "evaluate", run), told(launch, "provenance", run)
        found = json_of(folder / "eval_results.json")
        assert found["validation"]["metrics"] == scored["metrics"] and found["step"] == scored["step"]
        kept = json_of(folder / "provenance.json")
        assert {**kept, "checkpoint": ""} == {**seen, "checkpoint": ""}
        assert kept["root"] in (folder / "README.md").read_text()
        proof = json_of(folder / "proof.json")
        assert proof["trained_weights_sha256"][:16] == scored["sha256"]["weights"]
        by = found["validation"]["per_source"]
        assert sum(each["count"] for each in by.values()) == scored["metrics"]["count"]
    assert set(json_of(places / "har/eval_results.json")["validation"]["per_source"]) == {"5", "6"}


def test_nothing_private_is_in_it(places):
    secrets = [places, ROOT, Path.home(), socket.gethostname(), "hunter2", "entity", "save_dir", "\nresume:"]
    long = [str(secret).encode() for secret in secrets if len(str(secret)) >= 4]
    for name, more in (("har", set()), ("own", {"own.py"})):
        assert {path.name for path in (places / name).iterdir()} == FILES | more
        for path in (places / name).iterdir():
            content = path.read_bytes()
            assert not [secret for secret in long if secret in content], path
    config = yaml.safe_load((places / "har/config.yaml").read_text())
    assert config["dataset"]["root"] == "data.npz" and config["dataset"]["val_subjects"] == ["5", "6"]
    assert yaml.safe_load((places / "own/config.yaml").read_text())["task"] == "own.py"
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(places / "own/model.safetensors", "pt") as file:
        known, names = file.metadata(), set(file.keys())
    assert names == {"one.weight", "one.bias", "other.bias", "head.weight", "head.bias", "steps"}, "tied: once"
    assert known["format"] == "pt" and known["sha256"] == json_of(places / "own/proof.json")["weights_sha256"]
    best = max(records(places / "own_run", "train"), key=lambda line: line["step"] == int(known["step"]))
    assert int(known["step"]) == best["step"] and known["digest"] == best["digest"]


@pytest.mark.slow
def test_without_the_names_of_people(launch, places, tmp_path):
    how = ["--license", "mit", "--no-sources", "--no-contents", "device=cpu"]
    (tmp_path / "run").mkdir()
    shutil.copy(places / "har_run/config.yaml", tmp_path / "run")
    state = torch.load(places / "har_run/last.pt", weights_only=True)
    test = {"fingerprint": "f", "samples": 4, "sources": {"anna's son": 4}}
    torch.save(state | {"test": test}, tmp_path / "run/tested.pt")
    succeed(launch.python(TOOL, tmp_path / "run/tested.pt", "--to", tmp_path / "named", *how[:2], "device=cpu"))
    assert json_of(tmp_path / "named/provenance.json")["test"] == test
    assert "Tested on 1 source: anna's son." in (tmp_path / "named/README.md").read_text()
    assert published.read(tmp_path / "named")["test"] == test
    succeed(launch.python(TOOL, tmp_path / "run/tested.pt", "--to", tmp_path / "har", *how))
    for path in (tmp_path / "har").iterdir():
        assert not [who for who in ("anna", "neil") if who in path.read_text("utf-8", "replace")], path
    assert "root" not in json_of(tmp_path / "har/provenance.json")
    assert yaml.safe_load((tmp_path / "har/config.yaml").read_text())["dataset"]["val_subjects"] == []
    assert "Add what chose the split: dataset.val_subjects." in (tmp_path / "har/README.md").read_text()


# ---- read back ----


@pytest.mark.slow
def test_the_same_bytes_are_predicted(launch, places, tmp_path):
    new, texts = tmp_path / "new.npz", dict[str, list]()
    shutil.copy(places / "data.npz", new)
    for name, words in (("har", [new]), ("own", ["--split", "all", "--trust"]), ("own", ["--split", "val", "--trust"])):
        for number, folder in enumerate((f"{name}_run", name)):
            out = tmp_path / f"{number}.csv"
            done = succeed(launch.python("tools/predict.py", places / folder, *words, "--out", out, "device=cpu"))
            texts.setdefault(name, []).append(out.read_bytes())
        assert done.out.startswith(f"{places / name}, step ")
        assert texts[name][-1] == texts[name][-2] and len(texts[name][-1].splitlines()) > 20
    one, other = (told(launch, "evaluate", places / folder, "--trust") for folder in ("own_run", "own"))
    assert one["metrics"] == other["metrics"] and other["checkpoint"] == str(places / "own")
    assert other["sha256"]["weights"] == json_of(places / "own/proof.json")["weights_sha256"][:16]
    done = succeed(launch.torchrun(2, "tools/evaluate.py", places / "own", "--trust", "--json", "device=cpu"))
    assert json.loads(done.out)["metrics"] == one["metrics"]
    outs = [tmp_path / f"{name}.pt2" for name in ("har_run", "har")]
    about = [told(launch, "export", places / out.stem, "--out", out, f"dataset.root={new}") for out in outs]
    x = torch.randn(3, 16, 3)
    a, b = (torch.export.load(out).module()(x)["logits"] for out in outs)
    assert torch.equal(a, b) and about[0]["inputs"] == about[1]["inputs"]


def test_a_training_starts_from_it(launch, places, tmp_path):
    hashes = set()
    for folder in ("own_run", "own"):
        words = [places / "own.py", f"init_from={places / folder}", "steps=2", "device=cpu"]
        done = succeed(launch.train(*map(str, words), f"save_dir={tmp_path / folder}"))
        assert f"Weights from {places / folder}: " in done.out
        hashes |= {*re.findall(r"weights +sha256 (\w+)", done.out)}
    assert len(hashes) == 1
    done = launch.train(str(places / "own.py"), f"resume={places / 'own'}", f"save_dir={tmp_path / 'no'}")
    assert done.code == 2 and done.errors[0].startswith("error: no checkpoint"), "it has no optimizer"


@pytest.mark.slow
def test_the_command_of_the_card_ends_in_its_weights(launch, places, tmp_path):
    """The task's own file, config and code alone."""
    shutil.copytree(places / "own", tmp_path / "own")
    text = (tmp_path / "own/README.md").read_text()
    command, start = re.findall(r"^python train\.py .*--config.*$", text, re.M)[::-1]
    assert command == "python train.py own/own.py --config own/config.yaml"
    words, env = shlex.split(command)[2:], {"cwd": tmp_path}
    done = succeed(launch.python(ROOT / "train.py", *shlex.split(start)[2:], "steps=1", **env))
    assert "Weights from own: 6 of 6 loaded\n  new      low, other.weight" in done.out, "which is tied"
    succeed(launch.python(ROOT / "train.py", *words, f"save_dir={tmp_path / 'again'}", **env))
    done = succeed(launch.python(ROOT / "tools/evaluate.py", tmp_path / "again", "--json", **env))
    sha256 = json.loads(done.out)["sha256"]["weights"]
    assert f"prints `weights  sha256 {sha256}` for the checkpoint of step {json.loads(done.out)['step']}" in text


def test_a_program_in_it_is_trusted_by_name_only(launch, places, tmp_path):
    shutil.copytree(places / "own", tmp_path / "own")
    (tmp_path / "own/own.py").write_text("open('ran', 'a')\n" + OWN)
    tools = (["predict", "--split", "val"], ["evaluate"], ["export"], ["provenance"])
    for tool, *words in tools:
        done = launch.python(ROOT / f"tools/{tool}.py", tmp_path / "own", *words, cwd=tmp_path)
        assert done.code == 2 and done.errors[0].endswith("read it, then give --trust to run it"), done.err
        assert f"({tmp_path}/own/config.yaml)" in done.errors[0] and not (tmp_path / "ran").exists()
    config = yaml.safe_load((tmp_path / "own/config.yaml").read_text())
    (tmp_path / "own/config.yaml").write_text(yaml.safe_dump(config | {"task": "../elsewhere/evil.py"}))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/evil.py").write_text("open('ran', 'a')\n")
    done = launch.python(ROOT / "tools/evaluate.py", tmp_path / "own", "--trust", cwd=tmp_path / "own")
    assert done.code == 2 and "its task evil.py is not in it" in done.errors[0]
    assert not [*tmp_path.rglob("ran")]


class Damage(NamedTuple):
    """What is done to a folder, and what is said of it."""

    do: Callable[[Path], object]
    says: str


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-9])


DAMAGES = {
    "a flipped bit": Damage(lambda f: flip(f / "model.safetensors", -5), "SHA-256 of the weights is"),
    "cut short": Damage(lambda f: cut_short(f / "model.safetensors"), "damaged"),
    "no weights": Damage(lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no config": Damage(lambda f: (f / "config.yaml").unlink(), "No such file"),
    "no JSON": Damage(lambda f: (f / "checkpoint.json").write_text("{"), "damaged, or not whole"),
    "another's JSON": Damage(lambda f: (f / "checkpoint.json").write_text("{}"), "damaged, or not whole"),
    "newer": Damage(lambda f: change(f / "checkpoint.json", layout=2), "its layout is 2, this version reads 1"),
    "another name": Damage(lambda f: change(f / "checkpoint.json", names=["x"]), "damaged, or not whole"),
}


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def change(path, **what):
    path.write_text(json.dumps(json.loads(path.read_text()) | what))


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_folder_is_refused(places, tmp_path, case):
    shutil.copytree(places / "har", tmp_path / "har")
    damage = DAMAGES[case]
    damage.do(tmp_path / "har")
    with pytest.raises(LockstepError, match=re.escape(damage.says)) as error:
        published.as_run(tmp_path / "har")
    assert str(tmp_path / "har") in str(error.value) and "\n" not in str(error.value)


# ---- refused ----


class Refusal(NamedTuple):
    says: str
    run: str
    words: list[str]


MIT = ["--license", "mit"]
REFUSALS = [
    Refusal("nobody may use a model without a license (--license): give one such as mit", "har_run", []),
    Refusal("which other license? (--license): give --license-name", "har_run", ["--license", "other"]),
    Refusal("mit needs no name and no link", "har_run", [*MIT, "--license-name", "x"]),
    Refusal("'MIT License' is no license ID of the Hub", "har_run", ["--license", "MIT License"]),
    Refusal("'a\\nb' is no name on the Hub (--tag)", "har_run", [*MIT, "--tag", "a\nb"]),
    Refusal("'x' is no URL", "har_run", [*MIT, "--source", "x"]),
    Refusal("no run at", "nothing", MIT),
    Refusal("the run has no checkpoint yet", "empty", MIT),
    Refusal("the checkpoint is damaged: SHA-256 is", "damaged", MIT),
    Refusal("the task has no `metadata`", "toy_run", MIT),
    Refusal("no results of a study", "har_run", [*MIT, "--study", str(ROOT / "docs")]),
    Refusal("the task har comes with Lockstep (--with-task): drop it", "har_run", [*MIT, "--with-task"]),
    Refusal("exists", "har_run", [*MIT, "--to", str(ROOT / "docs")]),
    Refusal("is no name for a model", "har_run", [*MIT, "--to", "a b"]),
]


@pytest.mark.slow
def test_what_cannot_be_published_is_said_before_anything_is_written(launch, places, tmp_path):
    succeed(launch.train(TOY, "steps=1", "device=cpu", f"save_dir={tmp_path / 'toy_run'}"))
    for name in ("har_run", "empty", "damaged"):
        copied(places / "har_run", tmp_path / name)
    delete_checkpoints(tmp_path / "empty")
    for path in (tmp_path / "damaged").glob("*.pt"):
        if not path.is_symlink():
            flip(path, path.stat().st_size // 2)
    before = sorted(os.listdir(tmp_path))
    for says, run, words in REFUSALS:
        done = launch.python(TOOL, tmp_path / run, "--to", tmp_path / "out", *words, "device=cpu")
        assert done.code in (2, 3) and len(done.errors) == 1 and says in done.err, (says, done.err)
        assert sorted(os.listdir(tmp_path)) == before, says


def test_it_is_written_whole_or_not_at_all(places, tmp_path, monkeypatch):
    weights = {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16).t()}
    texts = {"config.yaml": "task: har\n", "proof.json": '{"digest": ""}'}
    whole = {"layout": 1, "names": ["a", "b"], "tied": {}, "averaged": None}
    whole["sha256"] = publish.digests.of_tensors(weights.items())
    texts["checkpoint.json"] = json.dumps(whole | {"state": {"progress": {"step": 1}}})
    for name in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(LockstepError, match="No space left on device"):
                publish._write(tmp_path / "out", weights, texts, {})
        assert not os.listdir(tmp_path)
    with pytest.raises(LockstepError, match="SHA-256"):  # what was read back is not what was meant
        publish._write(tmp_path / "out", {**weights, "a": torch.zeros(3)}, texts, {})
    assert not os.listdir(tmp_path)
    publish._write(tmp_path / "out", weights, texts, {})
    assert torch.equal(published.read(tmp_path / "out")["model"]["b"], weights["b"])


# ---- other results, other tasks ----


@pytest.mark.slow
def test_of_a_test_a_study_and_a_replay(launch, places, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(places / "own_run", run, symlinks=True)
    sha256 = told(launch, "evaluate", run)["sha256"]["weights"]
    tested = {"checkpoint": "x.pt", "split": "test", "sha256": {"weights": sha256}, "looks": 2}
    tested |= {"metrics": {"loss": 0.5, "accuracy": 0.25, "count": 8}, "by": "sources"}
    tested |= {"sources": {"mouse | 9": {"metrics": {"loss": 0.5, "accuracy": 0.25, "count": 8}}}}
    (run / "test.json").write_text(json.dumps(tested))
    spread = {"accuracy": {"mean": 0.8125, "sd": 0.0625, "n": 3}, "loss": {"mean": 0.5, "sd": None, "n": 1}}
    config = {"name": "dataset.root=/home/anna/mice x=1", "metrics": spread, "over_sources": {}, "runs": []}
    study = {"what": "3 folds of mice, 1 seed", "by": "groups", "monitor": "loss", "trainings": 3, "tested": 3}
    study |= {"seeds": [0], "folds": [{}, {}, {}], "configs": [config], "words": ["/home/anna/x.py"]}
    (tmp_path / "study.json").write_text(json.dumps(study))
    succeed(launch.python("tools/replay.py", run, "--write", "device=cpu"))
    how = ["--license", "mit", "--study", tmp_path, "device=cpu"]
    done = succeed(launch.python(TOOL, run, "--to", tmp_path / "out", *how))
    assert "note: whoever uses it needs own.py, too (--with-task)" in done.out
    _, text, results = card_of(tmp_path / "out")
    assert results["test", "accuracy"].metric_value == 0.25 and results["validation", "accuracy"].dataset_split
    assert "| dataset.root=mice x=1 | 0.8125 ± 0.0625 | 0.5000 |" in text and "3 folds of mice, 1 seed" in text
    assert "| mouse \\| 9 | 0.5000 | 0.2500 | 8 |" in text and "The test was looked at 2 times" in text
    assert re.search(r"Steps 0 to 6 were taken again \(.*\): same bits, (\d+) of \1 points are equal\.", text)
    assert not [path for path in (tmp_path / "out").iterdir() if b"/home/anna" in path.read_bytes()]
    done = launch.python("tools/evaluate.py", tmp_path / "out", "--trust")
    assert done.code == 2 and "its task own.py is not in it" in done.errors[0]
    tested["sha256"] = {"weights": "of another checkpoint"}
    (run / "test.json").write_text(json.dumps(tested))
    succeed(launch.python(TOOL, run, "--to", tmp_path / "two", "--license", "mit", "device=cpu"))
    assert "test" not in json_of(tmp_path / "two/eval_results.json")
    assert "These are of one training" in (tmp_path / "two/README.md").read_text()


@pytest.mark.slow
def test_of_clips_and_of_a_robot(launch, places, tmp_path):
    trials = [(f"{n % 6}.mp4", ("rest", "walk")[n % 2 if n < 12 else n // 6 % 2]) for n in range(24)]
    pack(tmp_path / "packed", trials, shape=(3, 8, 8))
    words = ["video", "model.width=4", "dataset.frames=3", "steps=2", "batch_size=8", "optim.ema_decay=0.5"]
    words += [f"dataset.root={tmp_path / 'packed'}"]
    old, new = (record(tmp_path / name, episodes) for name, episodes in (("old", 4), ("new", 2)))
    robot = ["robot", "policy.type=act", *TINY_ACT, "batch_size=4", "steps=2"]
    robot += [f"dataset.root={old}", "dataset.cache=none"]
    published_of = ("clips", words, tmp_path / "packed", "a.csv"), ("policy", robot, new, "a.npz")
    for name, settings, data, out in published_of:
        succeed(launch.train(*settings, "device=cpu", f"save_dir={tmp_path / f'{name}_run'}"))
        run, folder = tmp_path / f"{name}_run", tmp_path / name
        succeed(launch.python(TOOL, run, "--to", folder, "--license", "cc-by-4.0", "device=cpu"))
        for number, each in enumerate((run, folder)):
            words = [each, data, "--out", tmp_path / f"{number}{out}", "device=cpu"]
            succeed(launch.python("tools/predict.py", *words))
        assert (tmp_path / f"0{out}").read_bytes() == (tmp_path / f"1{out}").read_bytes()
        data, text, _ = card_of(folder)
        assert data["pipeline_tag"] == {"clips": "video-classification", "policy": "robotics"}[name]
    assert "tools/save_pretrained.py" in text
    succeed(launch.python("-c", SAVE, str(folder), str(tmp_path / "lerobot"), str(old)))
    load = published.safetensors().load_file
    ours, theirs = (load(path / "model.safetensors") for path in (folder, tmp_path / "lerobot"))
    assert theirs
    for name, value in theirs.items():
        assert torch.equal(value, ours[f"net.{name.removeprefix('model.')}"])


SAVE = """
import os, sys
from tools.use import save_pretrained
folder, out, data = sys.argv[1:]
os.chdir(os.path.dirname(data))  # the config names the data by the last part of their path
sys.exit(save_pretrained.main([folder, out]))
"""


def test_a_name_is_one_line_of_what_can_be_printed():
    assert model_card.plain("a\x1b[1m\u202eb\n\n---\tc\0") == "a [1m b --- c" and model_card.plain("\n") == "–"


def test_a_path_is_cut_and_no_other_text():
    for text, left in (
        ("/home/anna/mice", "mice"), ("../../x/mice", "mice"), ("~/mice", "mice"), ("data/mice", "data/mice"),
        ("a=/home/anna/mice b", "a=mice b"), ("https://example.org/a/b", "https://example.org/a/b"), ("", ""),
        ("cannot read /home/anna/x.npz (/home/anna)", "cannot read x.npz (anna)"), ("1/2", "1/2"), ("/x/", "x"),
    ):  # fmt: skip
        assert publish.without_paths(text) == left
    secrets = {"wandb": {"entity": "anna"}, "save_dir": "x", "dataset": {"api_key": "k", "token": "t", "tokens": "3"}}
    assert publish.public(secrets) == {"dataset": {"api_key": "", "token": "", "tokens": "3"}}


@pytest.mark.parametrize(
    ("name", "logged", "differs"),
    [
        ("loss", 0.5004, False),
        ("loss", 0.52, True),
        ("accuracy", 0.515, False),
        ("accuracy", 0.58, True),
        ("loss", math.nan, True),
    ],
)
def test_the_validation_scored_now_is_compared_with_the_log(name, logged, differs):
    """Of 100 samples two may fall on the other side by rounding; a loss has no such steps."""
    text = publish._other_numbers({"count": 100, "metrics": {name: 0.5}}, {name: logged, "time": 3.0})
    assert bool(text) is differs and (not differs or f"{name} 0.5, in the log " in text)
