"""A start from weights: published layouts, what is refused, rates and norms, features that are kept in files."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, launching, succeed
from published import LAYOUT, as_published, harnet_features, harnet_state, shaken, torchvision_classes, with_hash
from robot_tasks import parse, task_of
from runs import weights

import tasks
from benchmarks import pretrained
from engine import config
from engine.contract import LockstepError, sample_seeds
from formats.lab.clips import Clips
from formats.weights import backbones
from formats.weights.features import Features
from models.harnet import HarNet
from models.resnet3d import KINDS, MEAN, STD, ResNet3d
from tools.paper import report
from tools.use import evaluate, predict

MANY = str(ROOT / "tests" / "ranks" / "many.py")
CLIPS = "dataset.size=16 dataset.trials=33 dataset.videos=8 dataset.frames=5".split()
VIDEO = ["video", "device=cpu", *CLIPS, "model.name=mc3_18"]
CACHED = [*VIDEO, "model.features=cached", "epochs=2", "batch_size=8"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def published_mc3(folder):
    """Random weights of mc3_18, 400 classes and all, in a file that is named as torchvision names its own."""
    torch.manual_seed(7)
    state = shaken(ResNet3d("mc3_18", 400)).state_dict()
    state = {name: value for name, value in state.items() if not name.startswith("feature_")}
    torch.save(state, folder / "weights.pth")
    return with_hash(folder / "weights.pth", "mc3_18")


@pytest.fixture(scope="session")
def mc3(tmp_path_factory):
    return published_mc3(tmp_path_factory.mktemp("published"))


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def torchvision(tmp_path_factory):
    with torchvision_classes(tmp_path_factory.mktemp("wheel")) as module:
        yield module


@pytest.mark.parametrize(
    "name", ["mc3_18", *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name != "mc3_18")]
)
def test_the_outputs_are_those_of_torchvisions_own_class(torchvision, cache, tmp_path, name):
    """Its weights, saved by its class and read by the task, key by key; of gray clips that stand in three channels."""
    torch.manual_seed(1)
    theirs = shaken(getattr(torchvision, name)(weights=None)).eval()
    file = tmp_path / "own.pth"
    torch.save(theirs.state_dict(), file)
    task, _, val = task_of("video", *CLIPS, f"model.name={name}", f"model.pretrained={file}")
    ours = task.model().eval()
    state = {each: value for each, value in ours.state_dict().items() if not each.startswith("feature_")}
    assert [*state] == [*theirs.state_dict()]
    parts = {each: value for each, value in state.items() if not each.startswith("fc.")}
    assert all(torch.equal(value, theirs.state_dict()[each]) for each, value in parts.items())
    ours.load_state_dict(theirs.state_dict() | {"fc.weight": ours.fc.weight, "fc.bias": ours.fc.bias}, strict=False)
    clips = val.__getitems__([0, 1])["x"]
    pixels = clips.float().div(255).unsqueeze(1).expand(-1, 3, -1, -1, -1)
    mean, std = (torch.tensor(values).view(3, 1, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        theirs.fc = torch.nn.Identity()
        assert torch.allclose(ours.features(clips), theirs((pixels - mean) / std), atol=1e-6)
        logits = torch.nn.functional.linear(theirs((pixels - mean) / std), ours.fc.weight, ours.fc.bias)
        assert torch.allclose(ours(clips), logits, atol=1e-6)
    weights_of = getattr(torchvision, {"mc3_18": "MC3_18", "r3d_18": "R3D_18"}.get(name, "R2Plus1D_18") + "_Weights")
    url, meta = weights_of.KINETICS400_V1.url, weights_of.KINETICS400_V1.meta
    published = backbones.PUBLISHED[name]
    assert url == published.where + published.file and published.size == f"{meta['_file_size']:.1f} MB"
    assert meta["num_params"] == sum(p.numel() for p in ResNet3d(name, 400).parameters())


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [("mc3_18", 122, 11_695_440), ("r3d_18", 122, 33_371_472), ("r2plus1d_18", 224, 31_505_325)],
)
def test_the_layout_is_the_published_one(name, tensors, parameters):
    net = ResNet3d(name, 400)
    state = {each: value for each, value in net.state_dict().items() if not each.startswith("feature_")}
    assert len(state) == tensors and sum(p.numel() for p in net.parameters()) == parameters
    assert state["fc.weight"].shape == (400, 512)


@pytest.mark.parametrize("length", LAYOUT)
def test_harnet_gives_what_plain_functions_give_from_the_published_layout(tmp_path, length):
    """With the word before all names, and with the heads of its own tasks, which are not read."""
    state = harnet_state(length)
    file = as_published(state, tmp_path / "mtl.mdl")
    net = HarNet(length, 4)
    assert len(state) == 131 and net.shapes() == {name: tuple(value.shape) for name, value in state.items()}
    numbers = sum(p.numel() for name, p in net.named_parameters() if net.is_part(name))
    assert numbers == (4_227_904 if length == 150 else 10_457_408)
    found, line = backbones.read(file, f"harnet{length // 30}", net.shapes())
    assert "131 of 139 tensors" in line and "a name without a hash" in line
    net.load_state_dict(found, strict=False)
    x = torch.randn(3, 3, length, generator=torch.Generator().manual_seed(1)).mul(2).double()
    with torch.no_grad():
        theirs = harnet_features({each: value.double() for each, value in state.items()}, x.clamp(-3, 3))
        assert theirs.std() > 0.1 and torch.allclose(net.double().eval().features(x), theirs, atol=1e-9)


# ---- files that are refused -----------------------------------------------------------------------------------------


def replaced(name, value):
    return lambda state: state | {name: value}


def without(name):
    return lambda state: {other: value for other, value in state.items() if other != name}


ONE = "layer3.0.conv1.0.weight"
OTHER_SHAPE = f"{ONE} is (256, 128, 3, 3, 3), and would be (256, 128, 1, 3, 3)"
REFUSED = {
    "no such file": (None, "no such file"),
    "a text": (b"not weights", "cannot be read"),
    "a list": ([torch.zeros(3)], "a list, not weights by name"),
    "around it": (lambda state: {"model": state}, "'model' in it is no tensor"),
    "a part is missing": (without(ONE), f"{ONE} (256, 128, 1, 3, 3) is missing"),
    "another shape": (replaced(ONE, torch.zeros(256, 128, 3, 3, 3)), OTHER_SHAPE),
    "not a number": (replaced("stem.1.running_var", torch.full((64,), torch.nan)), "stem.1.running_var holds NaN"),
    "whole numbers": (replaced("stem.1.bias", torch.ones(64, dtype=torch.int64)), "stem.1.bias is of int64"),
    "more": (replaced("layer5.0.weight", torch.zeros(2)), "'layer5.0.weight' is none of theirs"),
    "one of another network": (lambda state: {f"x.{n}": torch.zeros(1) for n in range(9)}, "stem.0.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_file_is_refused_in_one_line(tmp_path, mc3, case):
    content, says = REFUSED[case]
    file = tmp_path / "own.pth"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content(torch.load(mc3, weights_only=True)) if callable(content) else content, file)
    with pytest.raises(LockstepError) as caught:
        backbones.read(file, "mc3_18", ResNet3d("mc3_18", 5).shapes())
    text = str(caught.value)
    assert says in text and f"model.pretrained={file}" in text and "\n" not in text
    if "cannot" not in says and case not in ("a text", "a list", "around it"):
        assert "mc3_18-a90a0ba3.pth (44.7 MB, SHA-256 a90a0ba3...; " in text and "nothing is downloaded here" in text


def test_a_file_is_what_the_hash_in_its_name_says(tmp_path, mc3):
    shapes = ResNet3d("mc3_18", 5).shapes()
    digits = mc3.stem[-8:]
    _, line = backbones.read(mc3, "mc3_18", shapes)
    assert f"SHA-256 {digits}... (as its name says)" in line
    named = tmp_path / "mc3_18-a90a0ba3.pth"
    named.write_bytes(mc3.read_bytes())
    with pytest.raises(LockstepError, match=rf"SHA-256 begins with {digits}, and its name says a90a0ba3"):
        backbones.read(named, "mc3_18", shapes)
    cut = tmp_path / "cut.pth"
    cut.write_bytes(mc3.read_bytes()[:-1000])
    with pytest.raises(LockstepError, match=r"cannot be read .*: the file is damaged"):
        backbones.read(cut, "mc3_18", shapes)


def test_no_code_in_a_file_runs(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"stem.0.weight": Evil()}, tmp_path / "own.pth")
    with pytest.raises(LockstepError, match="cannot be read"):
        backbones.read(tmp_path / "own.pth", "mc3_18", {})
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_missing_file_ends_a_training_before_anything_is_written(launch, tmp_path):
    done = launch.train(*VIDEO, "model.pretrained=mc3_18-a90a0ba3.pth", f"save_dir={tmp_path / 'run'}")
    (line,) = done.errors
    assert done.code == 2 and not (tmp_path / "run").exists()
    for fact in ("44.7 MB", "a90a0ba3", "BSD-3", "Kinetics", "https://download.pytorch.org/models/mc3_18-a90a0ba3.pth"):
        assert fact in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("video model.pretrained=x.pth", "this model is no backbone (model.pretrained=x.pth): give model.name=mc3_18"),
        ("har model.features=cached", "this model is no backbone (model.features=cached): give model.mode=harnet"),
        ("video model.name=mc3_18 model.views=2", "views are of cached features"),
        ("video model.name=mc3_18 model.features=cached model.batch_norm=batch", "computed sample by sample"),
    ],
)
def test_keys_that_do_not_fit_together(words, says):
    with pytest.raises(LockstepError, match=re.escape(says)):
        task_of(*words.split(), *(CLIPS if "video" in words else []))


# ---- training -------------------------------------------------------------------------------------------------------


def test_a_pretrained_backbone_has_defaults_of_its_own_which_may_change():
    cfg = parse("video", "model.name=mc3_18", "model.pretrained=x.pth")
    assert cfg.optim.lr_scale == [f"{name}:0.1" for name in ("stem", "layer1", "layer2", "layer3", "layer4")]
    assert (cfg.model.batch_norm, cfg.optim.lr) == ("fixed", 1e-3)
    cfg = parse("video", "model.name=mc3_18", "model.pretrained=x.pth", "optim.lr_scale=", "lr=7e-4")
    assert (cfg.optim.lr_scale, cfg.optim.lr) == ([], 7e-4)
    assert parse("har", "model.mode=harnet", "model.pretrained=x").optim.lr_scale == ["feature_extractor:0.1"]
    assert parse("video", "model.name=mc3_18").model.batch_norm == "batch"
    cfg = parse("video", "model.name=mc3_18", "model.features=cached", "steps=9")
    assert (cfg.epochs, cfg.steps, cfg.optim.lr_scale) == (0, 9, [])
    for task in ("video", "har"):  # without a backbone all is as it was
        given, asked = config.flatten(config.to_dict(parse(task))), tasks.load(task).defaults
        assert all(given[key] == value for key, value in asked.items()) and given["optim.lr_scale"] == []


@pytest.mark.slow
def test_a_pretrained_backbone_is_trained_at_a_tenth_and_its_norms_keep_their_statistics(launch, tmp_path, mc3):
    words = [*VIDEO, f"model.pretrained={mc3}", "steps=3", "batch_size=12", "optim.freeze=stem,layer1"]
    done = succeed(launch.train(*words, f"save_dir={tmp_path / 'run'}"))
    assert f"Weights from {mc3}: 120 of 122 tensors" in done.out and "optim.lr_scale=stem:0.1,layer1:0.1" in done.out
    assert "BatchNorm: running statistics, which stay as they are" in done.out
    assert (
        "the cut matters" not in done.out and "16 frames at 15 fps of 112 x 112 pixels; these are 5 of 16" in done.out
    )
    began, ended = torch.load(mc3, weights_only=True), weights(tmp_path / "run")
    parts = [name for name in began if name[:2] != "fc"]
    moved = {name for name in parts if not torch.equal(ended[name], began[name])}
    trained = ("layer2", "layer3", "layer4")
    of_norms = ("running_mean", "running_var", "num_batches_tracked")
    assert moved == {name for name in parts if name.startswith(trained) and not name.endswith(of_norms)}
    # AdamW moves a weight by the rate in each of its first steps, whatever the gradient; the rate decays from 1e-3.
    step = max(float((ended[name] - began[name]).abs().max()) for name in moved)
    assert 0.1e-3 < step < 3.1 * 0.1e-3
    # The checkpoint holds all of it: the file is not read again.
    assert evaluate.main([str(tmp_path / "run"), "model.pretrained=gone.pth", "device=cpu", "--json"]) == 0


# ---- cached features ------------------------------------------------------------------------------------------------


def test_features_and_views_are_those_of_a_plain_loop(cache):
    task, train_set, val_set = task_of(*CACHED, "model.views=3", "exclude=sample:0")
    assert isinstance(train_set, Features) and isinstance(val_set, Features)
    net = task.model().eval()
    for samples, is_train in ((train_set, True), (val_set, False)):
        batch = samples.__getitems__([*range(len(samples))])
        raw = samples.raw.__getitems__([*range(len(samples))])
        assert torch.equal(batch["y"], raw["y"]) and ("views" in batch) == is_train
        with torch.no_grad():
            assert torch.allclose(batch["x"], net.features(raw["x"]), atol=1e-5)
            seeds = sample_seeds(0, 1, samples.rows), sample_seeds(0, 2, samples.rows)
            for n, each in enumerate(seeds if is_train else ()):
                changed_clips = task.augment(raw["x"], each)
                assert not torch.equal(changed_clips, raw["x"])
                assert torch.allclose(batch["views"][:, n], net.features(changed_clips), atol=1e-5)
    all_views = torch.stack([train_set.table[v, train_set.rows[1:]] for v in range(3)]).flatten(0, 1).double()
    assert torch.allclose(net.feature_mean.double(), all_views.mean(0), atol=1e-5)
    std = all_views.std(0, correction=0)
    assert torch.allclose(net.feature_std.double(), torch.where(std > 0, std, 1.0), atol=1e-5)
    torch.nn.init.normal_(net.fc.weight)
    x = train_set.__getitems__([*range(9)])["x"]
    logits = ((x - net.feature_mean) / net.feature_std) @ net.fc.weight.T + net.fc.bias
    assert torch.allclose(net(x), logits, atol=1e-3)
    assert torch.allclose(net(train_set.raw.__getitems__([0])["x"]), net(x[:1]), atol=1e-2)
    # Each version is chosen, by the sample's seed.
    batch = train_set.__getitems__([5] * 300)
    info = type("Info", (), {"seed": sample_seeds(0, 0, torch.arange(300))})()
    chosen = task.prepare(batch | {"lockstep": info})["x"]
    # An export's input are the clips that were scored.
    info = type("Info", (), {"index": torch.arange(4)})()
    _, input_of = task.export_module(net)
    clips = input_of(val_set.__getitems__([0, 1, 2, 3]) | {"lockstep": info})
    assert torch.equal(clips, val_set.raw.__getitems__([0, 1, 2, 3])["x"])
    every = torch.cat([batch["x"][:1, None], batch["views"][:1]], 1)[0]  # (V, D)
    numbers = [int((every == x).all(1).nonzero()[0]) for x in chosen]
    assert np.bincount(numbers, minlength=3).min() > 60


def found_line(task):
    return re.search(r"(\d+) of (\d+) found", task.summary()).groups()


@pytest.mark.slow
def test_what_is_there_is_found_and_what_is_damaged_or_changed_is_made_anew(cache, tmp_path):
    task, first, _ = task_of(*CACHED)
    assert found_line(task) == ("0", "33")
    files = sorted(cache.rglob("*.features"))
    assert len(files) == 3
    task, *_ = task_of(*CACHED, "dataset.split_seed=5", "lr=1e-4")  # another split
    assert found_line(task) == ("33", "33")
    assert found_line(task_of(*CACHED, "seed=1")[0]) == ("0", "33")  # other random weights
    assert found_line(task_of(*CACHED, "dataset.data_seed=1")[0]) == ("0", "33")  # other clips
    good = files[0].read_bytes()
    for damaged in (good[:-3], b"\1" + good[1:], good[:-1] + b"\1", b""):
        files[0].write_bytes(damaged)
        task, again, _ = task_of(*CACHED)
        assert found_line(task)[0] in ("17", "32")  # the file of 16 clips, or the last one, of one
        assert "1 of 3 files were damaged and are made anew" in task.summary()
        assert files[0].read_bytes() == good and torch.equal(again.table, first.table)
    folder = files[0].parent
    assert not [*folder.glob("*.lock")] and not [*folder.glob(".*")]


def test_a_full_or_forbidden_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file"))
    with pytest.raises(LockstepError, match=r"cannot write features: .* give another folder by LOCKSTEP_CACHE"):
        task_of(*CACHED)


@pytest.fixture(scope="module")
def cached_runs(once):
    """{name: folder} of the same training on one process, on two with a cache of their own, stopped and resumed; and
    its file of weights."""

    def build(folder):
        (folder / "elsewhere").mkdir()
        file = published_mc3(folder)
        moved = shutil.copy(file, folder / "elsewhere")
        words = [*CACHED, "model.views=2", "virtual_workers=2", "model.dropout=0.2"]
        with launching() as launch:
            for name, processes, weights, more, code in (
                ("one", 1, file, [], 0),
                ("two", 2, file, [], 0),
                ("resumed", 2, file, ["max_time_s=0.001"], 1),  # which plain torchrun ends with, and train.py with 75
                ("resumed", 1, moved, [], 0),
            ):
                how = {"processes": processes, "LOCKSTEP_CACHE": str(folder / f"cache_{name}")}
                given = [*words, f"model.pretrained={weights}", *more, f"save_dir={folder / name}"]
                done = launch.train(*given, **how)
                assert done.code == code, done.err
                (folder / f"{name}.txt").write_text(done.out)

    return once("cached_runs", build)


@pytest.mark.slow
def test_cached_features_end_in_the_same_bits_on_any_number_of_processes(cached_runs):
    one, two, resumed = (weights(cached_runs / name) for name in ("one", "two", "resumed"))
    assert one.keys() == {"feature_mean", "feature_std", "fc.weight", "fc.bias"}
    for other in (two, resumed):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert "Resuming" in (cached_runs / "resumed.txt").read_text()
    caches = [cached_runs / f"cache_{name}" for name in ("one", "two")]
    files = [sorted(file.name for file in cache.rglob("*.features")) for cache in caches]
    assert files[0] == files[1] and len(files[0]) == 6
    assert (cached_runs / "one" / "last.pt").stat().st_size < 100_000  # the backbone is not in it, but its digests are
    state = torch.load(cached_runs / "one" / "last.pt", weights_only=True)
    assert len(state["left_out"]) == 120 and all(not name.startswith("fc") for name in state["left_out"])
    text = (cached_runs / "one.txt").read_text()
    for line in ("120 of 122 tensors", "(as its name says)", "licence  torchvision's BSD-3", "all else is frozen"):
        assert line in text


@pytest.mark.slow
def test_the_tools_build_backbone_and_head(cached_runs, monkeypatch, capfd, tmp_path):
    """Scores of cached features (val, train) and of raw clips (all) add up; predict reads clips; other weights are
    refused."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(cached_runs / "cache_one"))
    run, matrices = str(cached_runs / "one"), {}
    for split in ("val", "train", "all"):
        assert evaluate.main([run, "--split", split, "--json", "device=cpu"]) == 0
        matrices[split] = np.array(json.loads(capfd.readouterr().out)["confusion"])
    assert matrices["all"].sum() == 33 and np.array_equal(matrices["val"] + matrices["train"], matrices["all"])
    clips = task_of(*CACHED)[1].raw.folder
    assert predict.main([run, str(clips), "--out", str(tmp_path / "p.csv"), "--json", "device=cpu"]) == 0
    labels = json.loads(capfd.readouterr().out)["found"][0]["labels"]
    assert [*labels.values()] == matrices["all"].sum(0).tolist()
    for package in ("matplotlib", "jinja2"):
        pytest.importorskip(package)
    assert report.main([run, "--out", str(tmp_path / "page.html"), "device=cpu"]) == 0
    assert "data:image/webp" in (tmp_path / "page.html").read_text()  # films of clips, not curves of their features
    capfd.readouterr()
    torch.manual_seed(8)
    other = {name: value for name, value in ResNet3d("mc3_18", 400).state_dict().items() if name[:8] != "feature_"}
    torch.save(other, tmp_path / "other.pth")
    words = [run, str(clips), "--out", str(tmp_path / "q.csv"), f"model.pretrained={tmp_path / 'other.pth'}"]
    assert predict.main(words)
    assert "is not the weight it was trained with" in capfd.readouterr().err


@pytest.mark.slow
def test_a_head_on_cached_features_is_the_start_of_fine_tuning(cached_runs, launch, tmp_path):
    (file,) = cached_runs.glob("*.pth")
    start = cached_runs / "one" / "last.pt"
    words = [*VIDEO, f"model.pretrained={file}", f"init_from={start}", "steps=1", "batch_size=8", "lr=1e-9"]
    done = succeed(launch.train(*words, f"save_dir={tmp_path / 'fine'}"))
    assert "4 of 4 loaded" in done.out
    head, fine = weights(cached_runs / "one"), weights(tmp_path / "fine")
    assert len(fine) == 124 and torch.allclose(fine["fc.weight"], head["fc.weight"], atol=1e-6)


def test_the_benchmark_packs_no_frame_on_both_sides(tmp_path):
    """Its packing, of two made-up videos; its measurements are trainings as above."""
    av = pytest.importorskip("av")
    for n, name in enumerate(("rearing", "body groom L")):
        with av.open(str(tmp_path / f"{name}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=60)
            stream.width, stream.height, stream.pix_fmt, stream.options = 384, 384, "yuv420p", {"crf": "0"}
            for number in range(90):  # the gray level tells the frame
                picture = np.full((384, 384, 3), 20 + 2 * number + n, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
    ends = pretrained.pack(tmp_path, tmp_path / "clips", 16)
    assert ends == ["body groom L end", "rearing end"]
    clips = Clips(tmp_path / "clips", pretrained.FRAMES)
    assert [clips.classes[c] for c in sorted({*clips.labels})] == ["body groom", "rearing"]
    for video in ("body groom L", "rearing"):
        chosen = [np.flatnonzero(clips.videos == f"{video} {side}") for side in ("beginning", "end")]
        sides = [clips.__getitems__(numbers)["x"] for numbers in chosen]
        assert sides[0].max() < sides[1].min() and min(map(len, sides)) >= 5
    left_out = pretrained.leave_out(tmp_path / "clips", 3).removeprefix("exclude=").split(",")
    assert len(left_out) == int(np.sum([name.endswith("beginning") for name in clips.videos])) - 2 * 3
    pretrained.pack(tmp_path, tmp_path / "still", 16, still=True)
    still = Clips(tmp_path / "still")
    assert len(still) == len(clips) and still.shape[0] == 2
    x = still.__getitems__([*range(len(still))])["x"]
    assert torch.equal(x[:, 0], x[:, 1])


# ---- harnet ---------------------------------------------------------------------------------------------------------


def recordings(path, rate=30.0, channels=3, size=1.0, gravity=1.0, steps=400):
    """Six recordings of three people who wave, slowly or quickly, as tools/prepare_watch.py writes its own."""
    draw = np.random.default_rng(0)
    signals, labels = [], []
    for n in range(12):
        t = np.arange(steps) / 30.0
        wave = 0.3 * np.sin(2 * np.pi * (0.5 + 2.0 * (n % 2)) * t + draw.uniform(0, 6))
        signal = draw.normal(0, 0.02, (steps, channels))
        signal[:, 0] += wave
        signal[:, 2 % channels] += gravity
        signals.append(signal * size)
        labels.append(n % 2)
    arrays = {
        "signal": np.concatenate(signals).astype(np.float32), "lengths": np.full(12, steps), "label": np.array(labels),
        "subject": np.arange(12) // 4, "classes": np.array(["slow", "quick"]),
    }  # fmt: skip
    np.savez(path, **arrays | ({"rate_hz": np.array(rate)} if rate else {}))
    return path


HARNET = "har device=cpu model.mode=harnet dataset.length=150 dataset.stride=125 dataset.val_subjects=2".split()


@pytest.mark.parametrize(
    ("how", "words", "says"),
    [
        ({"channels": 6}, [], "6 channels (*): choose x, y, z of one accelerometer"),
        ({"rate": 50.0}, [], "a rate of 50 Hz (*): resample with tools/prepare_windows.py --rate 30"),
        ({"rate": None}, [], "a rate that the data do not tell (*): resample with tools/prepare_windows.py --rate 30"),
        ({}, ["dataset.length=128"], "windows of 128 steps (*): give dataset.length=150, 300, 900"),
        ({"size": 9.80665}, [], "values about *: they look like m/s2: divide by 9.81 with tools/prepare_windows.py"),
        ({"gravity": 0.0}, [], "in size, where gravity alone is 1 (*): give acceleration in g with gravity in it"),
    ],
)
def test_what_harnet_does_not_take_is_refused_with_the_cure(tmp_path, how, words, says):
    path = recordings(tmp_path / "own.npz", **how)
    given = {word.partition("=")[0] for word in words}
    usual = [word for word in HARNET if word.partition("=")[0] not in given]
    with pytest.raises(LockstepError) as caught:
        task_of(*usual, *words, f"dataset.root={path}")
    assert re.search(".*".join(map(re.escape, says.split("*"))), str(caught.value)), caught.value


@pytest.mark.slow
def test_every_cut_takes_the_same_steps_where_norms_are_fixed(launch, tmp_path):
    """In float64 to 1e-9; with the batch's statistics the same check fails."""
    data = recordings(tmp_path / "own.npz")
    file = as_published(harnet_state(150), tmp_path / "mtl_5_best.mdl")
    cuts = {"whole": ["batch_size=12"], "cut": ["batch_size=4", "gradient_accumulation_steps=3"]}
    kinds = {"fixed": [], "batch": ["model.batch_norm=batch"]}
    common = [*HARNET, f"dataset.root={data}", f"model.pretrained={file}", "steps=2", "seed=1"]
    runs = [[*common, *how, *cut, f"save_dir={tmp_path / kind / name}"] for kind, how in kinds.items()
            for name, cut in cuts.items()]  # fmt: skip
    succeed(launch.python(MANY, json.dumps(runs)))
    gaps = {}
    for kind in kinds:
        whole, cut = (weights(tmp_path / kind / name) for name in cuts)
        gaps[kind] = max(float((value - cut[name]).abs().max()) for name, value in whole.items())
    assert gaps["fixed"] < 1e-9 and gaps["batch"] > 1e-6, gaps


@pytest.mark.slow
def test_harnet_is_trained_on_cached_features_and_whole(launch, tmp_path):
    data = recordings(tmp_path / "own.npz")
    file = as_published(harnet_state(150), tmp_path / "mtl_5_best.mdl")
    words = [*HARNET, f"dataset.root={data}", f"model.pretrained={file}", "batch_size=16"]
    how = {"LOCKSTEP_CACHE": str(tmp_path / "cache")}
    done = succeed(launch.train(*words, "model.features=cached", "model.views=2", f"save_dir={tmp_path / 'a'}", **how))
    assert "Oxford's academic licence" in done.out and "131 of 139 tensors" in done.out
    assert float(re.search(r"best macro_f1 ([\d.]+)", done.out)[1]) > 0.9
    export = [str(tmp_path / "a"), "--format", "onnx", "--json"]
    about = json.loads(succeed(launch.python("tools/export.py", *export, **how)).out)
    assert about["inputs"][0]["shape"] == ["batch", 150, 3]
    done = succeed(launch.train(*words, "steps=2", f"save_dir={tmp_path / 'b'}"))
    ended, began = weights(tmp_path / "b"), harnet_state(150)
    fixed = ("kernel", "running_mean", "running_var", "num_batches_tracked")
    moved = {name for name, value in began.items() if not torch.equal(ended[name], value)}
    assert moved == {name for name in began if not name.endswith(fixed)} and "the cut matters" not in done.out
