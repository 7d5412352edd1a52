"""Choose on validation data how a trained run's probabilities become labels: a temperature,
thresholds, a smoothing.

python tools/decide.py RUN
    temperature (and thresholds, where labels overlap)
python tools/decide.py RUN recordings --annotations seen.csv
    and the smoothing, on videos that were validated
python tools/decide.py RUN data/mice.npz
    the same of tracks with a label per frame

The temperature calibrates the probabilities and changes no label. The smoothing is a median over
frames, and for each behaviour a number of frames: gaps of at most so many frames are filled, then
bouts of at most so many frames are dropped. The chosen smoothing has the highest F1 of bouts. Of
DATA only the sources that were held out count. Sources of the training data or of the test set are
not read. The result is a file beside the checkpoint, valid for this checkpoint alone, and
tools/predict.py applies the result. key=value changes the run's config (device=cpu).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_loader import EvalLoader, EvalSampler
from engine import config, errors
from engine.comm.world import World
from engine.errors import LockstepError, amount
from formats.lab import bouts
from formats.lab.behaviour import BACKGROUND
from plugins.resilience import status
from tasks import har
from tasks.shared.calibration import bins_of, ece, fit_temperature
from tasks.shared.classification import Classification
from tools.arguments import Parser, whole_number
from tools.lab.prepare_clips import add_labels
from tools.output import print_json
from tools.running import alone, guarded
from tools.use import decisions
from tools.use.decisions import Decision
from tools.use.evaluate import TRUST, of_run
from tools.use.predict import LoadedModel, Prediction, load, of_steps, of_videos

HELD_OUT = "held out"


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="decide.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, or a checkpoint")
    add(
        "data",
        metavar="DATA",
        type=Path,
        nargs="?",
        help="videos, or recordings with a label per step",
    )
    add(
        "--annotations",
        type=Path,
        metavar="FILE",
        help="what people saw in the videos, as for tools/prepare_clips.py",
    )
    only = (
        "leave temperature and thresholds as they are: the data that RUN was trained on are "
        "not needed"
    )
    add("--only-smoothing", action="store_true", help=only)
    add(
        "--stride",
        type=whole_number(1),
        default=0,
        metavar="N",
        help="frames or steps from one trial to the next",
    )
    add_labels(parser.add_argument_group("of the annotations").add_argument)
    add("--json", action="store_true", help="print one JSON object: the file, and the choices")
    add("--trust", action="store_true", help=TRUST)
    keys = [
        word
        for word in argv
        if "=" in word and not word.startswith("-") and not Path(word).exists()
    ]
    options, rest = parser.parse_known_args([word for word in argv if word not in keys])
    options.every, options.crop = 0, None
    return guarded(
        [options.run, *rest, *keys],
        lambda args: _decide(args, options),
        partial(of_run, options.trust),
        options.json,
    )


def _decide(args: config.Args, options: argparse.Namespace) -> int:
    alone("one process chooses", "decide.py")
    if options.only_smoothing and not options.data:
        raise LockstepError(
            "a smoothing is chosen on videos or recordings", "--only-smoothing", "give DATA, too"
        )
    loaded, _ = load(args)
    if not isinstance(loaded.task, Classification):
        raise LockstepError("the task predicts no classes", "task", "there is nothing to decide")
    lines = [f"{loaded.checkpoint}, step {loaded.step}, chosen on validation:"]
    if options.only_smoothing:
        decision = decisions.read(loaded.checkpoint)
    else:
        decision, texts = _of_samples(args, loaded)
        lines += texts
    if options.data:
        lines += _smoothing(decision, loaded, options)
    path = decisions.write(loaded.checkpoint, decision)
    if options.json:
        print_json({"output": str(path), "step": loaded.step} | asdict(decision))
    else:
        print("\n".join([*lines, f"Wrote {path}"]))
    return status.set_exit_code(errors.DONE)


def _of_samples(args: config.Args, of_data: LoadedModel) -> tuple[Decision, list[str]]:
    """Choose temperature and thresholds on the samples of the validation split."""
    loaded, val = load(args, "val")
    sides = getattr(of_data.task, "about", {}).get(
        "subjects" if isinstance(of_data.task, har.Task) else "videos", {}
    )
    names = sorted({*map(str, val.sources)})
    if sides and (other := [name for name in names if name not in sides.get(HELD_OUT, [])]):
        todo = "give the run's own data: what is trained on chooses nothing"
        raise LockstepError(
            f"{other[0]} was not held out when the run was trained", "dataset.root", todo
        )
    logits, labels = outputs(loaded, val)
    decision = Decision()
    lines = _temperature(decision, logits, labels)
    if not loaded.task.exclusive:
        lines += _thresholds(decision, loaded.task.classes, logits, labels)
    return decision, lines


def outputs(loaded: LoadedModel, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return logits (N, C) and labels, (N,) or (N, C), of a dataset's samples."""
    world, found = World(0, 0, 1, loaded.device), []
    for batch in EvalLoader(dataset, EvalSampler(dataset, world, loaded.batch_size), world, None):
        with torch.inference_mode(), loaded.precision.autocast():
            found.append((loaded.model(batch["x"]).float().cpu().numpy(), batch["y"].cpu().numpy()))
    logits, labels = (np.concatenate(each) for each in zip(*found, strict=True))
    return logits, labels


def _temperature(decision: Decision, logits: np.ndarray, labels: np.ndarray) -> list[str]:
    binary = labels.ndim == 2
    try:
        decision.temperature = fit_temperature(logits, labels, binary)
    except ValueError as error:
        return [f"  no temperature: {error}"]
    if binary:
        return [f"  temperature {decision.temperature:.4g}, of {amount(len(labels), 'sample')}"]
    errors = []
    for scale in (1.0, decision.temperature):
        shares = torch.from_numpy(logits).double().div(scale).softmax(1)
        counts, sums = bins_of(shares.max(1).values, shares.argmax(1) == torch.from_numpy(labels))
        errors.append(ece(counts.numpy(), sums.numpy()))
    decision.about["ece"] = errors
    what = f"expected calibration error {errors[0]:.4f}, then {errors[1]:.4f}"
    return [f"  temperature {decision.temperature:.4g}: {what}, of {amount(len(labels), 'sample')}"]


def _thresholds(
    decision: Decision, classes: list[str], logits: np.ndarray, labels: np.ndarray
) -> list[str]:
    decision.thresholds, shares = {}, 1 / (1 + np.exp(-logits.astype(np.float64)))
    for c, name in enumerate(classes):
        decision.thresholds[name] = best_threshold(shares[:, c], labels[:, c])
    return [
        "  thresholds: "
        + ", ".join(f"{name} {each:.2f}" for name, each in decision.thresholds.items())
    ]


def best_threshold(shares: np.ndarray, labels: np.ndarray) -> float:
    """Return the threshold of .01, .02 to .99 with the highest F1. Of equal thresholds, return the
    nearest to one half. The result is .5 for an absent class.

    shares  (N,) probabilities
    labels  (N,) 1, 0, or -1, which does not count
    """
    shares, labels = shares[labels >= 0], labels[labels >= 0]
    best = 0.0, 0.0, 0.5
    for n in range(1, 100):
        on = shares >= n / 100
        hits, size = int((on & (labels == 1)).sum()), int(on.sum() + (labels == 1).sum())
        if hits:
            best = max(best, (2 * hits / size, -abs(n - 50) / 100, n / 100))
    return best[2]


def _smoothing(decision: Decision, loaded: LoadedModel, options: argparse.Namespace) -> list[str]:
    """Choose the smoothing on the sources of DATA that were held out."""
    of_sensors, classes = isinstance(loaded.task, har.Task), loaded.task.classes
    if not of_sensors and not options.annotations:
        raise LockstepError(
            "nothing says what is seen in the videos",
            "--annotations",
            "give the table or the labels",
        )
    found = [*(of_steps if of_sensors else of_videos)(loaded, options, HELD_OUT)]
    if errors := [each for each in found if isinstance(each, LockstepError)]:
        raise errors[0]
    labelled = [each for each in found if isinstance(each, Prediction) and each.truth is not None]
    if not labelled:
        what = "what was held out has no labels"
        if not found:
            what = "nothing there was held out when the run was trained"
        todo = (
            "give the videos or recordings that it was validated on: on others it would be no "
            "honest choice"
        )
        raise LockstepError(what, str(options.data), todo)
    thresholds = None
    if not loaded.task.exclusive:
        thresholds = [(decision.thresholds or {}).get(name, 0.5) for name in classes]
    videos = [
        (each.probabilities, each.truth, each.fps or 0.0)
        for each in labelled
        if each.truth is not None
    ]
    chosen, f1, plain = bouts.choose(videos, classes, BACKGROUND, thresholds)
    decision.smoothing = chosen
    names = [each.name for each in labelled]
    decision.about |= {"sources": names, "bout_f1": f1, "bout_f1_without": plain}
    some = ", ".join(names[:5])
    if len(names) > 5:
        some += ", ..."
    return [f"  smoothing: {chosen}", f"  F1 of bouts {plain:.4f}, then {f1:.4f}, in {some}"]
