"""LeRobot's folders: found wherever they lie, read without believing them, fitted or refused, and written whole."""

import errno
import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from tiny_act import DIMS, ENV, STATE, TINY, build

from engine.contract import LockstepError
from formats.weights import pretrained
from models.layers import Normalizer

safetensors = pytest.importorskip("safetensors.torch")

ACTION, CAMERA = "action", "observation.images.top_left"
FEATURES = {
    STATE: {"type": "STATE", "shape": [4]},
    ENV: {"type": "ENV", "shape": [3]},
    ACTION: {"type": "ACTION", "shape": [2]},
}
MODES = {STATE: "MEAN_STD", ENV: "IDENTITY", ACTION: "MIN_MAX"}
STATS = {
    name: {"mean": np.arange(dim) / 7, "std": np.ones(dim), "min": -np.ones(dim), "max": np.full(dim, 3.0)}
    for name, dim in DIMS.items()
}


def save(folder, net):
    pretrained.save(folder, "act", TINY, net, STATS, FEATURES, MODES)


@pytest.fixture
def net():
    return build([STATE, ENV])


@pytest.fixture
def folder(net, tmp_path):
    path = tmp_path / "pretrained_model"
    save(path, net)
    return path


def fails(action, *words):
    with pytest.raises(LockstepError) as caught:
        action()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2000
    return str(caught.value)


# ---- find -----------------------------------------------------------------------------------------------------------


def test_a_folder_is_found_from_wherever_one_points(folder, tmp_path):
    run = tmp_path / "run"
    step = run / "checkpoints" / "000020"
    step.mkdir(parents=True)
    inside = shutil.copytree(folder, step / "pretrained_model")
    (run / "checkpoints" / "last").symlink_to("000020")
    for given in (inside, step, inside / "model.safetensors", inside / "config.json"):
        assert pretrained.find(str(given)) == inside
    for given in (run, run / "checkpoints"):
        assert pretrained.find(str(given)) == run / "checkpoints" / "last" / "pretrained_model"


def put_into_cache(folder, cache, commit="0a1b2c"):
    model = cache / "models--lab--act_cubes"
    shutil.copytree(folder, model / "snapshots" / commit)
    shutil.copytree(folder, model / "snapshots" / "ffffff")  # another revision
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit + "\n")
    return model / "snapshots" / commit


CACHES = {"HF_HUB_CACHE": ".", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub", "HOME": ".cache/huggingface/hub"}


@pytest.mark.parametrize(("variable", "below"), CACHES.items())
def test_an_id_is_found_in_the_hubs_cache(variable, below, folder, tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "place"))
    snapshot = put_into_cache(folder, tmp_path / "place" / below)
    assert pretrained.find("lab/act_cubes").resolve() == snapshot.resolve()


def test_what_is_not_found_names_every_place(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    said = fails(lambda: pretrained.find("lab/act_cubes"), "give a folder with", "or --download, which fetches")
    for place in (
        "lab/act_cubes",
        "lab/act_cubes/pretrained_model",
        "lab/act_cubes/checkpoints/last/pretrained_model",
        str(tmp_path / "cache" / "models--lab--act_cubes" / "snapshots" / "<refs/main>"),
    ):
        assert place in said
    model = put_into_cache(folder, tmp_path / "cache").parent.parent
    (model / "refs" / "main").write_text("../../../secret")
    assert "secret" not in fails(lambda: pretrained.find("lab/act_cubes"), "<refs/main>")
    assert "hf download" not in fails(lambda: pretrained.find(str(tmp_path / "nowhere")), "nowhere")


@pytest.mark.parametrize("given", ["", "x" * 5000, "~nobody-of-that-name/run", "a\0b"])
def test_absurd_names_are_refused_in_words(given):
    fails(lambda: pretrained.find(given))


# ---- save and load --------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(net, folder):
    config, weights, stats = pretrained.load(folder)
    assert config["type"] == "act" and all(config[name] == value for name, value in TINY.items())
    assert config["input_features"] == {STATE: FEATURES[STATE], ENV: FEATURES[ENV]}
    assert config["output_features"] == {ACTION: FEATURES[ACTION]}
    assert config["normalization_mapping"] == {"STATE": "MEAN_STD", "ENV": "IDENTITY", "ACTION": "MIN_MAX"}
    assert config["pretrained_backbone_weights"] is None, "LeRobot would download ImageNet's"
    other = build([STATE, ENV])
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    assert pretrained.fit(other, weights) == ""
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())
    assert stats.keys() == STATS.keys()
    for feature, values in STATS.items():
        for name, value in values.items():
            torch.testing.assert_close(stats[feature][name], torch.tensor(value, dtype=torch.float32))
    Normalizer(stats, MODES)


def test_the_layout_is_lerobots(net, folder):
    """File by file as LeRobot writes them, and a card; tests/peer compares with LeRobot itself where it is there."""
    scale = {"eps": 1e-8, "norm_map": {"STATE": "MEAN_STD", "ENV": "IDENTITY", "ACTION": "MIN_MAX"}}
    to_cpu = ("device_processor", {"device": "cpu", "float_dtype": None})
    before = [("rename_observations_processor", {"rename_map": {}}), ("to_batch_processor", {}), to_cpu]
    pipelines = {
        "policy_preprocessor": [*before, ("normalizer_processor", {"features": FEATURES} | scale)],
        "policy_postprocessor": [("unnormalizer_processor", {"features": {ACTION: FEATURES[ACTION]}} | scale), to_cpu],
    }
    names = {"config.json", "model.safetensors", "README.md"}
    for name, steps in pipelines.items():
        found = json.loads((folder / f"{name}.json").read_text())
        assert found["name"] == name
        assert [(step["registry_name"], step["config"]) for step in found["steps"]] == steps
        at = len(before) if name == "policy_preprocessor" else 0
        file = f"{name}_step_{at}_{steps[at][0]}.safetensors"
        assert {n: step["state_file"] for n, step in enumerate(found["steps"]) if "state_file" in step} == {at: file}
        assert sorted(safetensors.load_file(folder / file)) == sorted(f"{n}.{s}" for n in STATS for s in STATS[n])
        names |= {f"{name}.json", file}
    assert {path.name for path in folder.iterdir()} == names
    assert all(name.startswith("model.") for name in safetensors.load_file(folder / "model.safetensors"))


def test_statistics_among_the_weights(net, tmp_path):
    """As LeRobot wrote them until 0.3: underscores for a feature's dots, and infinity for what was never set."""
    features = {"input_features": {STATE: {}, CAMERA: {}}, "output_features": {ACTION: {}}}
    (tmp_path / "config.json").write_text(json.dumps({"type": "act"} | features))
    tensors = {f"model.{name}": value.clone() for name, value in net.state_dict().items()}
    tensors |= {"normalize_inputs.buffer_observation_state.mean": torch.arange(4.0)}
    tensors |= {"normalize_inputs.buffer_observation_images_top_left.std": torch.ones(3, 1, 1)}
    for where in ("normalize_targets.buffer_action", "unnormalize_outputs.buffer_action"):
        tensors |= {f"{where}.mean": torch.arange(2.0), f"{where}.max": torch.full((2,), torch.inf)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    _, weights, stats = pretrained.load(tmp_path)
    assert pretrained.fit(net, weights) == ""
    shapes = {feature: {name: tuple(v.shape) for name, v in values.items()} for feature, values in stats.items()}
    assert shapes == {STATE: {"mean": (4,)}, CAMERA: {"std": (3, 1, 1)}, ACTION: {"mean": (2,)}}


def test_without_statistics(net, tmp_path):
    pretrained.save(tmp_path / "a", "vla", {}, net, {}, FEATURES, {})
    config, _, stats = pretrained.load(tmp_path / "a")
    assert stats == {} and config["type"] == "vla" and "pretrained_backbone_weights" not in config
    for path in (tmp_path / "a").glob("policy_*"):
        path.unlink()
    assert pretrained.load(tmp_path / "a").stats == {}


# ---- what is wrong with a folder ------------------------------------------------------------------------------------


HUGE = json.dumps({"x": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}).encode()
CONTENTS = {  # of a damaged file, from what it was
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) * 2 // 3],
    "noise": lambda data: bytes(range(256)) * 40,
    "long header": lambda data: b"\xff" * 8 + data[8:],
    "huge shape": lambda data: len(HUGE).to_bytes(8, "little") + HUGE + b"1234",
    "complex": lambda data: safetensors.save({"model.x": torch.zeros(2, dtype=torch.complex64)}),
    "pickle": lambda data: b"\x80\x02}q\x00.",
    "git lfs pull": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n",
}


@pytest.mark.parametrize("how", ["gone", "a folder", *CONTENTS])
@pytest.mark.parametrize("name", ["model.safetensors", "policy_preprocessor_step_3_normalizer_processor.safetensors"])
def test_damaged_tensors(name, how, folder):
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if how == "gone" and name.startswith("policy"):
        assert pretrained.load(folder).stats == {}
        return
    if how == "a folder":
        (folder / name).mkdir()
    elif how != "gone":
        (folder / name).write_bytes(CONTENTS[how](data))
    fails(lambda: pretrained.load(folder), name, *([how] if how == "git lfs pull" else []))


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '"x"', "[" * 100_000, "\udcff", '{"a": \x00}', "NaN"])
def test_damaged_config(text, folder):
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    fails(lambda: pretrained.load(folder), "config.json")


def test_a_config_that_says_little_is_enough(folder):
    (folder / "config.json").write_text('{"type": "act", "input_features": null, "output_features": [1]}')
    assert pretrained.load(folder).weights


def test_weights_that_are_no_numbers(net, tmp_path):
    with torch.no_grad():
        net.action_head.bias[0] = torch.nan
    save(tmp_path / "a", net)
    fails(lambda: pretrained.load(tmp_path / "a"), "1 of", "action_head.bias", "earlier checkpoint")


def test_without_the_package(folder, net, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    fails(lambda: pretrained.load(folder), "pip install safetensors")
    fails(lambda: pretrained.save(tmp_path / "b", "act", {}, net, {}, {}, {}), "pip install safetensors")


# ---- fit ------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_told_and_nothing_is_touched(net, folder):
    weights = pretrained.load(folder).weights
    weights["action_head.weight"] = torch.ones(7, 32)
    del weights["action_head.bias"], weights["decoder.norm.bias"]
    weights |= {f"extra.{i}": torch.zeros(i) for i in range(5)}
    weights["decoder.norm.weight"] = torch.full((32,), 5.0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    said = fails(lambda: pretrained.fit(net, weights), "policy.pretrained_strict=false", "2 missing", "5 unexpected")
    assert "action_head.weight (7, 32), not (2, 32)" in said and "action_head.bias (2,)" in said
    assert "extra.2 (2,), ..." in said and "extra.3" not in said
    assert f"{len(before) - 3} of {len(before)} tensors" in said
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    report = pretrained.fit(net, weights, strict=False)
    assert report and report in said
    changed = [name for name, value in net.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["decoder.norm.weight"]


def test_weights_of_something_else_are_refused_even_so(net):
    said = fails(lambda: pretrained.fit(net, {"x": torch.ones(2)}, strict=False), "(0 of")
    assert "pretrained_strict" not in said
    fails(lambda: pretrained.fit(net, {}, strict=False), "(0 of")
    fails(lambda: pretrained.fit(net, {"x\n\x1b[2J" * 99: torch.ones(2)}), "1 unexpected")


def test_half_precision_weights_fit_too(net, folder):
    weights = {name: value.bfloat16() for name, value in pretrained.load(folder).weights.items()}
    assert pretrained.fit(net, weights) == ""
    assert net.action_head.weight.dtype == torch.float32


# ---- writing --------------------------------------------------------------------------------------------------------


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_replaced_whole(net, folder, tmp_path):
    with torch.no_grad():
        net.action_head.bias.fill_(4.0)
    (folder / "stale").touch()
    (tmp_path / ".pretrained_model.partial-elsewhere-1").mkdir()  # of a process that was killed
    save(folder, net)
    assert pretrained.load(folder).weights["action_head.bias"].tolist() == [4.0, 4.0]
    assert left(tmp_path) == ["pretrained_model"] and "stale" not in left(folder)


@pytest.mark.parametrize("when", ["safetensors.torch.save_file", "os.fsync", "os.rename"])
def test_a_failure_leaves_the_old_folder(when, net, folder, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    place, _, name = when.rpartition(".")
    module = {"os": os, "safetensors.torch": safetensors}[place]
    real, calls = getattr(module, name), []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, full)
    with torch.no_grad():
        net.action_head.bias.fill_(4.0)
    fails(lambda: save(folder, net), "No space left", "cannot write")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert left(tmp_path) == ["pretrained_model"]
    monkeypatch.undo()
    save(tmp_path / "new", net)


def test_a_new_folder_has_its_name_only_when_it_is_whole(net, tmp_path, monkeypatch):
    real = safetensors.save_file

    def look(tensors, path, **kwargs):
        assert not (tmp_path / "new").exists()
        real(tensors, path, **kwargs)

    monkeypatch.setattr(safetensors, "save_file", look)
    save(tmp_path / "new", net)
    assert left(tmp_path) == ["new"]


def test_what_is_no_policy_is_never_replaced(net, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        fails(lambda path=path: save(path, net), "something else")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", net)
    (tmp_path / "link").symlink_to("empty")
    save(tmp_path / "link", net)
    assert left(tmp_path) == ["empty", "link", "thesis.tex"] and (tmp_path / "link").is_symlink()


def test_one_mode_for_a_type(net, tmp_path):
    features = {**FEATURES, "observation.velocity": {"type": "STATE", "shape": [4]}}
    modes = {**MODES, "observation.velocity": "QUANTILES"}
    fails(lambda: pretrained.save(tmp_path / "a", "act", TINY, net, STATS, features, modes), "QUANTILES", "MEAN_STD")
    assert left(tmp_path) == []


def test_tied_and_sliced_tensors_are_written(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = torch.nn.Parameter(torch.arange(3.0))
            self.c = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)

    pretrained.save(tmp_path / "a", "vla", {}, Tied(), {}, {}, {})
    weights = pretrained.load(tmp_path / "a").weights
    assert weights["a"].tolist() == weights["b"].tolist() == [0.0, 1.0, 2.0]
    assert weights["c"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
