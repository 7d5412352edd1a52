"""Learning is real: each task reaches a stated metric within a stated number of epochs, through the ordinary door."""

import json

import pytest
from conftest import TOY, succeed


def best(folder, name):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = [(record[name], record["epoch"]) for record in records if record["event"] == "eval"]
    return values, records


@pytest.mark.slow
def test_toy_halves_its_loss(launch, tmp_path):
    succeed(launch.python("train.py", TOY, "epochs=15", f"save_dir={tmp_path}"))
    values, _ = best(tmp_path, "loss")
    assert values[-1][0] < 0.5 * values[0][0]


@pytest.mark.slow
def test_har_on_two_unseen_people(launch, tmp_path):
    """The default of a bare `python train.py`, as it comes: 12 epochs on real recordings."""
    done = succeed(launch.python("train.py", f"save_dir={tmp_path}"))
    values, records = best(tmp_path, "macro_f1")
    accuracy, _ = best(tmp_path, "accuracy")
    assert "held-out subjects" in done.out
    assert len(values) == 12
    assert max(values)[0] > 0.89 and max(accuracy)[0] > 0.88
    assert [r["count"] for r in records if r["event"] == "eval"] == [773] * 12


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "epochs"), [("flatten", 6), ("transformer", 3)])
def test_hars_other_modes(launch, tmp_path, mode, epochs):
    words = ["har", "--mode", mode, "--epochs", str(epochs), "dataset.stride=128"]
    succeed(launch.python("train.py", *words, f"save_dir={tmp_path}"))
    assert max(best(tmp_path, "macro_f1")[0])[0] > 0.72


@pytest.mark.slow
def test_video_small_on_two_processes(launch, tmp_path):
    """The laptop's config on clips of half its size and length, for seven epochs, with its batch cut in two."""
    words = [
        "--config",
        "configs/video_small.yaml",
        "global_batch=32",
        "dataset.size=32",
        "dataset.frames=9",
        "epochs=7",
    ]
    words += [f"save_dir={tmp_path}"]
    succeed(launch.torchrun(2, "train_ddp.py", *words, timeout=280))
    values, _ = best(tmp_path, "accuracy")
    assert len(values) == 7
    assert max(values)[0] > 0.85, "the most frequent class is 0.6 of them, and one has four clips: macro F1 jumps"
