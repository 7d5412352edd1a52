"""tools/export.py: one file that takes what was recorded and gives what the model gives, in two formats."""

import json
import os

import numpy as np
import pytest
import torch
from conftest import launching, succeed

import tasks
from engine import config
from tools.use import export

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
SMALL = {
    "har": "har dataset.stride=512 model.width=8",
    "video": "video dataset.size=16 dataset.trials=61 dataset.videos=12 dataset.frames=5 model.width=4",
    "act": "robot env.demonstrations=8 env.size=16 eval.n_episodes=0 dataset.cameras=none policy.type=act "
    "policy.chunk_size=5 policy.dim_model=16 policy.n_heads=2 policy.dim_feedforward=16 policy.n_encoder_layers=1 "
    "policy.n_vae_encoder_layers=1",
    "vla": "robot env.demonstrations=8 env.size=16 eval.n_episodes=0 policy.chunk_size=5 policy.num_steps=1",
}
FILES = [*((name, "onnx") for name in SMALL), ("har", "pt2"), ("act", "pt2")]
"""The runs that are exported. ONNX goes through torch.export, too, so one input and several are enough for .pt2."""

EVERYTHING = """
import json, sys
import train
from tools.use import export
runs, files = map(json.loads, sys.argv[1:])
codes = [train.main(words) for words in runs]
codes += [export.main([run, "--format", kind]) for run, kind in files]
if any(codes):
    sys.exit(str(codes))
"""


@pytest.fixture(scope="module")
def exported(once):
    """Return the folder of the runs after two steps of training and the exports: all in one process, because importing
    the exporters takes longer than most of what they do."""

    def train_and_export(folder):
        runs = [[*words.split(), "steps=2", "optim.ema_decay=0.5", f"save_dir={folder / name}"]
                for name, words in SMALL.items()]  # fmt: skip
        files = [(str(folder / name), kind) for name, kind in FILES]
        with launching() as launch:
            done = succeed(launch.python("-c", EVERYTHING, json.dumps(runs), json.dumps(files)))
        assert done.out.count("  batch of 1 ") == done.out.count("Wrote ") == len(FILES)

    return once("exported", train_and_export)


def the_model_and_real_samples(run):
    """The task, the weights that an evaluation takes, and a batch of the validation split."""
    cfg = config.parse(["--config", str(run / "config.yaml")], tasks.load).cfg
    task = tasks.load(cfg.task)(cfg)
    _, val = task.datasets()
    task.resuming = True
    model = task.model().eval()
    weights = torch.load(run / "last.pt", weights_only=True)["ema"]
    del weights["n_averaged"]
    model.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
    return task, model, val.__getitems__([0, 1, 2, 3, 4, 5, 6])


def answers(kind, run, x):
    """Return what the file computes and what it knows of itself; loaded without any of our code."""
    if kind == "pt2":
        known = {export.META: ""}
        loaded = torch.export.load(run / "model.pt2", extra_files=known)
        return loaded.module()(x), json.loads(known[export.META])
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession((run / "model.onnx").read_bytes())
    given = x if isinstance(x, dict) else {"x": x}
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {name: value.numpy() for name, value in given.items()})
    known = json.loads(session.get_modelmeta().custom_metadata_map[export.META])
    return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}, known


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), FILES)
def test_the_file_says_what_the_model_says(exported, name, kind):
    run = exported / name
    assert {path.name for path in run.glob("model.*")} == {f"model.{kind}" for each, kind in FILES if each == name}
    task, model, batch = the_model_and_real_samples(run)
    if name in ("act", "vla"):
        x = {camera: batch[camera] for camera in [*task.dims, *task.cameras]}
        x |= {"words": task.encode([task.demos.tasks[t] for t in batch["task_index"]])} if name == "vla" else {}
        assert name == "act" or any(value.dtype == torch.uint8 for value in x.values()), (
            "pictures as they were recorded"
        )
        ours = {"actions": model.act(x)}
    else:
        with torch.no_grad():
            logits = model(batch["x"])
        ours = {"logits": logits, "probabilities": logits.softmax(1)}
        x = batch["x"] if name == "video" else batch["x"].transpose(1, 2).contiguous()
        assert x.dtype == (torch.uint8 if name == "video" else torch.float32)
    theirs, known = answers(kind, run, x)
    assert theirs.keys() == ours.keys()
    for key, value in ours.items():
        torch.testing.assert_close(theirs[key], value, rtol=1e-4, atol=1e-5)
    assert known["known"].get("classes", []) == getattr(task, "classes", [])
    assert "videos" not in known["known"], "names of recordings stay at home"
    assert known["inputs"][0]["shape"][0] == "batch" and known["step"] == 2


@pytest.mark.slow
def test_what_cannot_be_exported_is_said_in_words(launch, exported, tmp_path):
    run = exported / "har"
    blocked = "import sys; sys.modules['onnxruntime'] = None; sys.argv[0] = 'export.py'; "
    script = blocked + "from tools.use import export; sys.exit(export.main(sys.argv[1:]))"
    out = tmp_path / "model.onnx"
    done = launch.python("-c", script, str(run), "--format=onnx", "--out", str(out))
    assert done.code == 2 and "pip install onnx onnxscript onnxruntime" in done.err and len(done.errors) == 1
    # A file whose answers are off by more than rounding is none.
    worse = (
        "import sys; from tools.use import export; pt2 = export.pt2\n"
        "def off(*words):\n"
        "    made = pt2(*words)\n"
        "    return export.Exported(made.data, lambda x: {name: y + 1e-3 for name, y in made.run(x).items()})\n"
        "export.FORMATS['pt2'] = off\n"
        "sys.exit(export.main(sys.argv[1:]))"
    )
    done = launch.python("-c", worse, str(run), "--out", str(out))
    assert done.code == 1 and "the exported model is off by 0.001" in done.err and not out.exists()


def test_a_difference_is_seen_wherever_it_is():
    ours = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([100.0])}
    assert export.differences(ours, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([100.0])}) == (0, 0)
    largest, relative = export.differences(ours, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([101.0])})
    assert largest == 1 and relative == pytest.approx(0.01)
    for a, b in ((np.nan, 100.0), (2.0, np.nan)):
        broken = export.differences(ours, {"a": torch.tensor([1.0, a]), "b": torch.tensor([b])})[1]
        assert not broken <= 1e-4
