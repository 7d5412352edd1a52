"""init_from: weights from any file, by name and shape, and nothing in the file is run."""

import os
import re

import pytest
import torch
from conftest import TOY, succeed
from torch import nn

from engine.contract import LockstepError
from engine.files import weights


def network(classes=3):
    torch.manual_seed(classes)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, classes))


def assert_same_weights(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["plain", "wrapped", "nested", "compiled", "ours", "average", "legacy"])
def test_a_state_dict_is_found_wherever_it_is(tmp_path, kind):
    state = dict(network().state_dict())
    wrapped = {f"module.{name}": value for name, value in state.items()}
    other = {name: torch.zeros(1) for name in state}
    content = {
        "plain": state,
        "wrapped": wrapped,
        "nested": {"epoch": 3, "state_dict": state, "optimizer": {"state": {}}},
        "compiled": {f"_orig_mod.{name}": value for name, value in state.items()},
        "ours": {"format": 3, "model": state, "ema": None},
        "average": {"format": 3, "model": other, "ema": {"n_averaged": torch.tensor(2), **wrapped}},
        "legacy": state,
    }[kind]
    torch.save(content, tmp_path / "it.pt", _use_new_zipfile_serialization=kind != "legacy")
    assert_same_weights(weights.read(tmp_path / "it.pt"), state)


def test_safetensors_are_read_where_they_can_be(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    state = dict(network().state_dict())
    save_file(state, tmp_path / "it.safetensors")
    assert_same_weights(weights.read(tmp_path / "it.safetensors"), state)
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(LockstepError, match=r"this needs safetensors \(init_from=.*\): pip install safetensors"):
        weights.read(tmp_path / "it.safetensors")


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda path: torch.save({"w": Trap()}, path), "the weights cannot be read"),
        (lambda path: torch.save(network(), path), "the weights cannot be read"),
        (lambda path: path.write_bytes(b"PK\3\4" + bytes(90)), "the weights cannot be read .*: the file is damaged"),
        (lambda path: torch.save([torch.ones(3)], path), "the weights cannot be read"),
        (lambda path: torch.save({"lr": 0.1}, path), "no weights by name in it"),
        (lambda path: path.mkdir(), "no weights there"),
        (lambda path: None, "no weights there"),
    ],
    ids=["code", "module", "damaged", "list", "numbers", "folder", "missing"],
)
def test_what_holds_no_plain_weights_is_refused_in_one_line(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    content(tmp_path / "it.pt")
    with pytest.raises(LockstepError, match=rf"^{message}.*init_from=.*it.pt.*\): give [^\n]*$"):
        weights.read(tmp_path / "it.pt")
    assert not (tmp_path / "sprung").exists()


def test_what_fits_is_loaded_and_the_rest_is_named():
    model, given = network(7), network(3).state_dict() | {"old.bias": torch.ones(2)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = weights.load_matching(model, given, "it.pt")
    assert said.splitlines() == [
        "it.pt: 7 of 10 loaded",
        "  skipped  2.weight (3, 5), here (7, 5), 2.bias (3,), here (7,), old.bias",
        "  new      2.weight, 2.bias",
    ]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] if name.startswith("2.") else given[name])
    with pytest.raises(
        LockstepError, match=r"no weight fits by name and shape: it has such as a, b, the model such as 0"
    ):
        weights.load_matching(model, {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, "it.pt")


def test_a_run_starts_from_another_with_a_new_head(launch, tmp_path):
    """On two processes, beside frozen weights, an average and shares of the optimizer; once started it needs the file
    no more."""
    first = {
        "layers.0.weight": torch.randn(16, 8),
        "layers.0.bias": torch.randn(16),
        "layers.3.weight": torch.ones(9, 16),
    }
    torch.save(first, tmp_path / "it.pt")
    words = ["train.py", TOY, f"init_from={tmp_path / 'it.pt'}", "optim.freeze=layers.0", "optim.ema_decay=0.5"]
    words += ["optim.zero=true", f"save_dir={tmp_path / 'run'}", "schedule.horizon=4", "global_batch=12"]
    done = succeed(launch.torchrun(2, *words, "steps=2"))
    assert re.search(
        r"Weights from .*it.pt: 2 of 3 loaded\n  skipped  layers.3.weight \(9, 16\), here \(4, 16\)\n", done.out
    )
    (tmp_path / "it.pt").unlink()
    words[2] = "init_from=gone.pt"
    done = succeed(launch.python(*words, "steps=4"))
    assert "Weights from" not in done.out
    state = torch.load(tmp_path / "run/last.pt", weights_only=True)
    assert state["progress"]["step"] == 4
    for name in ("layers.0.weight", "layers.0.bias"):
        assert torch.equal(state["model"][name], first[name]) and torch.equal(
            state["ema"][f"module.{name}"], first[name]
        )
    done = launch.python(*words[:2], f"init_from={tmp_path / 'run'}", "steps=1", f"save_dir={tmp_path / 'next'}")
    assert "run: 4 of 4 loaded" in succeed(done).out
