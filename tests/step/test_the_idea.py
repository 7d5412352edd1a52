"""The same global batch, however it is cut, takes the same step: on every task, through real processes, in float64."""

import functools
import json

import pytest
import torch
from conftest import ROOT, TOY, launching, succeed

import tasks

MANY = str(ROOT / "tests" / "ranks" / "many.py")
TERMS, CONTRAST = (str(ROOT / "tests" / "tasks" / name) for name in ("terms.py", "contrast.py"))

CUTS = {"1x12": (1, 12, 1), "1x3x4": (1, 3, 4), "2x6": (2, 6, 1), "2x3x2": (2, 3, 2), "3x4": (3, 4, 1)}
CUTS |= {"fsdp 2x3x2": (2, 3, 2), "fsdp 3x4": (3, 4, 1), "hsdp 4x1x3": (4, 1, 3)}
"""processes, samples per process and pass, passes per step: all of them twelve samples per step"""

STRATEGIES = {
    "fsdp 2x3x2": ["ddp.strategy=fsdp"],
    "fsdp 3x4": ["ddp.strategy=fsdp"],
    "hsdp 4x1x3": ["ddp.strategy=hsdp", "ddp.shards=2", "ddp.reduce_every=2"],
}

NAIVE = ("1x3x4", "2x6")
"""Cuts that also take the tutorials' steps: several passes, and several processes."""

SMALL = {
    "har": ["dataset.stride=512", "model.width=8"],
    "video": ["dataset.size=16", "dataset.trials=61", "dataset.videos=12", "dataset.frames=5", "model.width=4"],
    "robot": ["env.demonstrations=8", "env.size=16", "eval.n_episodes=0", "policy.chunk_size=5"],
    TOY: [],
    TERMS: [],
    CONTRAST: [],
}
"""The settings that make a task quick; a task that is not named here runs at its own size, and is held to the same."""

SMALL_ACT = (
    "policy.type=act policy.dropout=0 policy.dim_model=16 policy.n_heads=2 policy.dim_feedforward=16 "
    "policy.n_encoder_layers=1 policy.n_vae_encoder_layers=1 policy.latent_dim=4 optim.lr=1e-3 dataset.cameras=none"
).split()

EVERY_TASK = [*tasks.names(), TOY, TERMS, CONTRAST]


def fits(task, cut):
    """Whether the whole global batch meets in one pass, where a loss compares all of its samples."""
    return "contrast" not in task or CUTS[cut][2] == 1


def runs_of(cut, folder):
    _, batch, passes = CUTS[cut]
    # One cut through gloo alone, as between machines; the others sum through shared memory.
    backend = "gloo" if cut == "2x6" else "auto"
    size = [f"batch_size={batch}", f"gradient_accumulation_steps={passes}", "log_every=1", f"ddp.backend={backend}"]
    size += STRATEGIES.get(cut, [])
    for task in (task for task in EVERY_TASK if fits(task, cut)):
        name = task.rpartition("/")[2]
        common = [task, *SMALL.get(task, []), *size, "seed=3", "optim.ema_decay=0.9"]
        # Eight steps reach into the second epoch, after a short step: 61 samples are five batches of twelve and one of
        # one. The robot's network is the slowest.
        common.append(f"steps={4 if task == 'robot' else 8}")
        yield [*common, f"save_dir={folder}/{cut}/{name}"]
        if task in ("har", TOY):
            yield [*common, "sampler=balanced", f"save_dir={folder}/{cut}/{name}_balanced"]
        if task in ("har", "video"):  # partners and their shares, a focal loss, and sigmoids
            kind = "binary" if task == "video" else "softmax"
            yield [
                *common,
                "augment.mixup=0.4",
                "loss.focal=2",
                f"loss.kind={kind}",
                f"save_dir={folder}/{cut}/{name}_mixup",
            ]
        if task == "robot":
            yield [*common, *SMALL_ACT, "sampler=balanced", f"save_dir={folder}/{cut}/{name}_act"]
        if cut in ("1x12", *NAIVE):
            yield ["naive", *common, "optim.grad_clip=0", f"save_dir={folder}/{cut}/{name}_naive"]


@pytest.fixture(scope="module")
def weights(once):
    """Returns a function: {run: checkpoint} of a cut, all trained once, when the cut is first asked for."""

    def train(cut, folder):
        processes = CUTS[cut][0]
        runs = json.dumps(list(runs_of(cut, folder)))
        with launching() as launch:
            succeed(launch.python(MANY, runs) if processes == 1 else launch.torchrun(processes, MANY, runs))

    @functools.cache
    def of(cut):
        folder = once(f"cut {cut}", functools.partial(train, cut))
        return {path.parent.name: torch.load(path, weights_only=True) for path in folder.glob(f"{cut}/*/last.pt")}

    return of


def distance(a, b):
    """The largest difference of two models, relative to the largest weight."""
    gaps = [(a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-3) for name in b]
    return float(max(gaps))


TOLERANCE = 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "cut"),
    [(task.rpartition("/")[2], cut) for task in EVERY_TASK for cut in CUTS if cut != "1x12" and fits(task, cut)],
)
def test_every_cut_ends_in_the_same_weights(weights, task, cut):
    straight, cut_weights = weights("1x12"), weights(cut)
    runs = [name for name in straight if name.removeprefix(task) in ("", "_balanced", "_mixup", "_act")]
    assert task in runs
    for run in runs:
        ours, theirs = cut_weights[run], straight[run]
        assert ours["progress"]["step"] == theirs["progress"]["step"]
        assert ours["progress"]["samples"] == theirs["progress"]["samples"]
        assert ours["global_batch"] == 12
        assert distance(ours["model"], theirs["model"]) < TOLERANCE
        assert distance(ours["ema"], theirs["ema"]) < TOLERANCE
        for key, state in theirs["optimizer"]["state"].items():
            torch.testing.assert_close(
                ours["optimizer"]["state"][key]["exp_avg"], state["exp_avg"], rtol=1e-6, atol=1e-12
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "cut"), [(task.rpartition("/")[2], cut) for task in EVERY_TASK for cut in NAIVE if fits(task, cut)]
)
def test_the_tutorials_normalisation_fails_the_same_check(weights, task, cut):
    """If this passes with a small distance, the test above could not have failed."""
    straight = weights("1x12")[f"{task}_naive"]["model"]
    assert distance(weights(cut)[f"{task}_naive"]["model"], straight) > 1e6 * TOLERANCE
