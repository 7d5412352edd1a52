"""init_from: weights from any file, by name and shape, and nothing in the file is run."""

import os
import re
import zipfile
from collections import Counter

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
    model = network(classes=3).apply(lambda module: [nn.init.zeros_(p) for p in module.parameters()])
    assert weights.load_matching(model, weights.read(tmp_path / "it.pt"), "it.pt") == "it.pt: 9 of 9 loaded"
    assert_same_weights(model.state_dict(), state)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["all of it", "a part of it"])
def test_a_model_that_is_compiled_gets_what_one_that_is_not_has_saved(compiled):
    given, model = network().state_dict(), network().apply(lambda each: [nn.init.zeros_(p) for p in each.parameters()])
    if compiled == "all of it":
        model = torch.compile(model)
    else:
        model[0] = torch.compile(model[0])
    assert weights.load_matching(model, given, "it.pt") == "it.pt: 9 of 9 loaded"
    assert all(map(torch.equal, model.state_dict().values(), given.values()))
    other = network(classes=3).apply(lambda each: [nn.init.zeros_(p) for p in each.parameters()])
    weights.load_matching(other, {f"module.{name}": value for name, value in model.state_dict().items()}, "it.pt")
    assert_same_weights(other.state_dict(), given)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_that_fit_as_they_are_stay(prefix):
    """What the model itself calls `module`, or torch.compile within its `model`, and one of the two more around it."""
    own = {f"{prefix}{name}" for name in ("a", "b")}
    for before in ("", "module.", "_orig_mod."):
        assert weights.fitted({f"{before}{name}": 0 for name in own}, own).keys() == own
    assert weights.fitted(dict.fromkeys(own), {"a", "b", "c"}).keys() == {"a", "b"}
    nested = {f"{prefix}a", f"{prefix}{prefix}a"}
    assert weights.fitted({f"module.{name}": 0 for name in nested}, nested).keys() == nested


@pytest.mark.slow
def test_a_run_begins_with_the_best_weights_of_another(launch, tmp_path):
    """Which ends with worse ones: its rate is far too high. The new run's moves nothing."""
    first = ["train.py", TOY, "lr=2", "schedule.kind=constant", "optim.name=sgd", "optim.momentum=0", "steps=6"]
    succeed(launch.python(*first, "eval_every=1", "amp=off", f"save_dir={tmp_path / 'first'}"))
    (best,) = (tmp_path / "first").glob("best_model_*.pt")
    best, last = (torch.load(path, weights_only=True) for path in (best, tmp_path / "first" / "last.pt"))
    assert best["progress"]["step"] < last["progress"]["step"]
    words = ["train.py", TOY, f"init_from={tmp_path / 'first'}", "lr=1e-12", "steps=1", "amp=off"]
    done = succeed(launch.python(*words, f"save_dir={tmp_path / 'second'}"))
    ours = torch.load(tmp_path / "second" / "last.pt", weights_only=True)["model"]
    for name, value in best["model"].items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9)
        assert (value - last["model"][name]).abs().max() > 1e-3
    assert "4 of 4 loaded" in done.out


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
        (lambda path: torch.save({0: torch.ones(3)}, path), "no weights by name in it"),
        (lambda path: path.mkdir(), "no weights there"),
        (lambda path: None, "no weights there"),
    ],
    ids=["code", "module", "damaged", "list", "numbers", "numbered", "folder", "missing"],
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


BAD = {
    # what a file may hold for a weight, and what is printed of it
    "quantised": (("0.weight", torch.ones(5, 4, dtype=torch.int64)), "0.weight is int64 there and float32 here"),
    "a mask": (("0.bias", torch.ones(5, dtype=torch.bool)), "0.bias is bool there and float32 here"),
    "packed": (("0.bias", torch.ones(5).to(torch.float8_e4m3fn)), "0.bias is float8_e4m3fn there and float32 here"),
    "complex": (("0.bias", torch.ones(5, dtype=torch.complex64)), "0.bias is complex64 there and float32 here"),
    "a float counter": (("1.num_batches_tracked", torch.tensor(0.5)), "is float32 there and int64 here"),
    "NaN": (("0.weight", torch.full((5, 4), torch.nan)), "0.weight holds NaN or infinity"),
    "infinity": (("2.bias", torch.tensor([0.0, -torch.inf, 1.0])), "2.bias holds NaN or infinity"),
    "NaN statistics": (("1.running_var", torch.full((5,), torch.nan)), "1.running_var holds NaN or infinity"),
    "infinite statistics": (("1.running_var", torch.full((5,), torch.inf)), "1.running_var holds NaN or infinity"),
    "sparse": (("0.weight", torch.eye(5, 4).to_sparse()), "0.weight is sparse_coo there and strided here"),
    "huge": (("0.bias", torch.full((5,), 1e30)), r"0.bias holds numbers up to 1e\+30"),
    "too much here": (("0.bias", torch.full((5,), 1e300, dtype=torch.float64)), "0.bias holds NaN or infinity"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_can_be_no_weight_is_refused_by_name(kind):
    (name, value), message = BAD[kind]
    model, given = network(), network().state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LockstepError, match=rf"{message} \(init_from=it.pt\): give "):
        weights.load_matching(model, given | {name: value}, "it.pt")
    assert_same_weights(model.state_dict(), before)
    weights.load_matching(model, given | {f"old.{name}": value}, "it.pt")


def test_weights_of_other_floats_are_loaded_and_so_are_masks():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("mask", torch.zeros(2))
            self.register_buffer("seen", torch.tensor(0))

    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model, mask = Masked(), torch.tensor([0, -torch.inf])
        given = {"weight": torch.ones(2, 3, dtype=dtype), "mask": mask, "seen": torch.tensor(7, dtype=torch.int32)}
        weights.load_matching(model, given, "it.pt")
        assert model.weight.dtype == torch.float32 and model.weight.sum() == 6
        assert model.seen == 7 and torch.equal(model.mask, mask)
        with pytest.raises(LockstepError, match=r"^mask holds NaN \("):
            weights.load_matching(model, given | {"mask": mask * torch.nan}, "it.pt")


def test_a_file_that_would_take_more_memory_than_it_is_long_is_not_unpacked(tmp_path):
    """Zeros, packed a thousandfold, which torch would unpack; what others keep beside the weights is no fault."""
    state = {"w": torch.ones(3), "schedule": Counter([30]), "name": "x"}
    torch.save(state, tmp_path / "plain.pt")
    assert {*weights.read(tmp_path / "plain.pt")} == {"w"}
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "it.pt", "w") as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name), zipfile.ZIP_DEFLATED)
    with pytest.raises(LockstepError, match=r"cannot be read \(a compressed archive, which torch.save never writes\)"):
        weights.read(tmp_path / "it.pt")


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
