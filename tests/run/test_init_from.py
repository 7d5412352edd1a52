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


def emptied():
    return network().apply(lambda module: [nn.init.zeros_(p) for p in module.parameters()])


def assert_same_weights(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


STATE = dict(network().state_dict())
WRAPPED = {f"module.{name}": value for name, value in STATE.items()}
AVERAGE = {"n_averaged": torch.tensor(2), **WRAPPED}
FILES = {
    "plain": STATE,
    "legacy": STATE,
    "wrapped": WRAPPED,
    "nested": {"epoch": 3, "state_dict": STATE, "optimizer": {"state": {}}},
    "compiled": {f"_orig_mod.{name}": value for name, value in STATE.items()},
    "ours": {"format": 3, "model": STATE, "ema": None},
    "average": {"format": 3, "model": {name: torch.zeros(1) for name in STATE}, "ema": AVERAGE},
}


@pytest.mark.parametrize("kind", FILES)
def test_a_state_dict_is_found_wherever_it_is(tmp_path, kind):
    torch.save(FILES[kind], tmp_path / "it.pt", _use_new_zipfile_serialization=kind != "legacy")
    model = emptied()
    assert weights.load_matching(model, weights.read(tmp_path / "it.pt"), "it.pt") == "it.pt: 9 of 9 loaded"
    assert_same_weights(model.state_dict(), STATE)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["all of it", "a part of it"])
def test_a_model_that_is_compiled_gets_what_one_that_is_not_has_saved(compiled):
    model, back = emptied(), emptied()
    if compiled == "all of it":
        model = torch.compile(model)
    else:
        model[0] = torch.compile(model[0])
    assert weights.load_matching(model, STATE, "it.pt") == "it.pt: 9 of 9 loaded"
    assert all(map(torch.equal, model.state_dict().values(), STATE.values()))
    weights.load_matching(back, {f"module.{name}": value for name, value in model.state_dict().items()}, "it.pt")
    assert_same_weights(back.state_dict(), STATE)


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
    first = [TOY, "lr=2", "schedule.kind=constant", "optim.name=sgd", "optim.momentum=0", "steps=6"]
    succeed(launch.train(*first, "eval_every=1", "amp=off", f"save_dir={tmp_path / 'first'}"))
    (best,) = (tmp_path / "first").glob("best_model_*.pt")
    best, last = (torch.load(path, weights_only=True) for path in (best, tmp_path / "first" / "last.pt"))
    assert best["progress"]["step"] < last["progress"]["step"]
    words = [TOY, f"init_from={tmp_path / 'first'}", "lr=1e-12", "steps=1", "amp=off"]
    done = succeed(launch.train(*words, f"save_dir={tmp_path / 'second'}"))
    ours = torch.load(tmp_path / "second" / "last.pt", weights_only=True)["model"]
    for name, value in best["model"].items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9)
        assert (value - last["model"][name]).abs().max() > 1e-3
    assert "4 of 4 loaded" in done.out


def test_safetensors_are_read_where_they_can_be(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    save_file(STATE, tmp_path / "it.safetensors")
    assert_same_weights(weights.read(tmp_path / "it.safetensors"), STATE)
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(LockstepError, match=r"this needs safetensors \(init_from=.*\): pip install safetensors"):
        weights.read(tmp_path / "it.safetensors")


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


DAMAGED = "the weights cannot be read"
NO_WEIGHTS = {
    "code": (lambda path: torch.save({"w": Trap()}, path), DAMAGED),
    "module": (lambda path: torch.save(network(), path), DAMAGED),
    "damaged": (lambda path: path.write_bytes(b"PK\3\4" + bytes(90)), f"{DAMAGED} .*: the file is damaged"),
    "list": (lambda path: torch.save([torch.ones(3)], path), DAMAGED),
    "tensor": (lambda path: torch.save(torch.ones(3), path), DAMAGED),
    "numbers": (lambda path: torch.save({"lr": 0.1}, path), "no weights by name in it"),
    "numbered": (lambda path: torch.save({0: torch.ones(3)}, path), "no weights by name in it"),
    "folder": (lambda path: path.mkdir(), "no weights there"),
    "missing": (lambda path: None, "no weights there"),
}


@pytest.mark.parametrize("kind", NO_WEIGHTS)
def test_what_holds_no_plain_weights_is_refused_in_one_line(tmp_path, monkeypatch, kind):
    content, message = NO_WEIGHTS[kind]
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
    with pytest.raises(LockstepError, match=r"no weight fits .*: it has such as a, b, the model such as 0"):
        weights.load_matching(model, dict.fromkeys("abc", torch.ones(1)), "it.pt")


BAD = {
    # what a file may hold for a weight, and what is printed of it
    "quantised": (("0.weight", torch.ones(5, 4, dtype=torch.int64)), "0.weight is int64 there and float32 here"),
    "a mask": (("0.bias", torch.ones(5, dtype=torch.bool)), "0.bias is bool there and float32 here"),
    "packed": (("0.bias", torch.ones(5).to(torch.float8_e4m3fn)), "0.bias is float8_e4m3fn there and float32 here"),
    "complex": (("0.bias", torch.ones(5, dtype=torch.complex64)), "0.bias is complex64 there and float32 here"),
    "a float counter": (("1.num_batches_tracked", torch.tensor(0.5)), "is float32 there and int64 here"),
    "NaN": (("0.weight", torch.full((5, 4), torch.nan)), "0.weight holds nan"),
    "infinity": (("2.bias", torch.tensor([0.0, -torch.inf, 1.0])), "2.bias holds inf"),
    "NaN statistics": (("1.running_var", torch.full((5,), torch.nan)), "1.running_var holds nan"),
    "infinite statistics": (("1.running_var", torch.full((5,), torch.inf)), "1.running_var holds inf"),
    "sparse": (("0.weight", torch.eye(5, 4).to_sparse()), "0.weight is sparse_coo there and strided here"),
    "huge": (("0.bias", torch.full((5,), 1e30)), r"0.bias holds 1e\+30"),
    "too much here": (("0.bias", torch.full((5,), 1e300, dtype=torch.float64)), "0.bias holds inf"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_can_be_no_weight_is_refused_by_name(kind):
    (name, value), message = BAD[kind]
    model = network()
    with pytest.raises(LockstepError, match=rf"{message} \(init_from=it.pt\): give "):
        weights.load_matching(model, STATE | {name: value}, "it.pt")
    assert_same_weights(model.state_dict(), STATE)
    weights.load_matching(model, STATE | {f"old.{name}": value}, "it.pt")


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
        with pytest.raises(LockstepError, match=r"^mask holds nan \("):
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


@pytest.mark.slow
def test_a_run_starts_from_another_with_a_new_head(launch, tmp_path):
    """On two processes, with frozen weights, an average and shards of all; once started it needs the file no more."""
    first = {"layers.0.weight": torch.randn(16, 8), "layers.0.bias": torch.randn(16)}
    torch.save(first | {"layers.3.weight": torch.ones(9, 16)}, tmp_path / "it.pt")
    words = [TOY, "optim.freeze=layers.0", "optim.ema_decay=0.5", "schedule.horizon=4"]
    words += ["ddp.strategy=fsdp", "global_batch=12", f"save_dir={tmp_path / 'run'}"]
    done = succeed(launch.train(*words, f"init_from={tmp_path / 'it.pt'}", "steps=2", processes=2))
    told = r"Weights from .*it.pt: 2 of 3 loaded\n  skipped  layers.3.weight \(9, 16\), here \(4, 16\)\n"
    assert re.search(told, done.out)
    (tmp_path / "it.pt").unlink()
    done = succeed(launch.train(*words, "init_from=gone.pt", "steps=4"))
    assert "Weights from" not in done.out
    state = torch.load(tmp_path / "run/last.pt", weights_only=True)
    assert state["progress"]["step"] == 4
    for name, value in first.items():
        assert torch.equal(state["model"][name], value) and torch.equal(state["ema"][f"module.{name}"], value)
    done = launch.train(TOY, f"init_from={tmp_path / 'run'}", "steps=1", f"save_dir={tmp_path / 'next'}")
    assert "run: 4 of 4 loaded" in succeed(done).out
