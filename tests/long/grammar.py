"""Train random networks in random ways, interrupted at random, and hold them to what the README promises.

    MINUTES=60 [SEED=0] python tests/long/grammar.py         make grammar MINUTES=60

Each seed is a training: layers, inputs, loss, optimizer, schedule and data of `tests/tasks/grammar.py`, how it is cut,
and legs, each on some processes and killed at some place. It is one of three kinds:

    bits   with virtual workers, on any number of processes: the bits of a straight run on one
    cuts   in float64, without what depends on the cut: a straight run with another cut, and a plain loop, to 1e-9
    again  whatever the network, resumed on the same cut: the bits of a straight run

The metrics of all evaluations are compared, too. The seed is printed before its training begins; MINUTES=0 SEED=7 tries
seed 7 alone. A difference does not end the others; the exit code says whether there was one.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

# A script of its own: pytest's `pythonpath` does not apply.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "kit", "step", "run"))

from conftest import ROOT, Done, adopt_orphans, launching
from saved import assert_same_bits, load, logged
from test_same_bits import BITS
from test_the_idea import distance

sys.path.insert(0, str(ROOT))

import tasks
from engine import config
from engine.contract import sample_seeds
from tests.tasks.grammar import LAYERS, OF_THE_CUT

TASK = str(ROOT / "tests" / "tasks" / "grammar.py")
STEPS = 8
TOLERANCE = 1e-9

Leg = tuple[int, list[str], list[str]]
"""How many processes, the arguments of this leg alone, and what interrupts it, as bits.py takes it."""


@dataclass
class Training:
    kind: str
    words: list[str]
    straight: tuple[int, list[str]]
    legs: list[Leg] = field(default_factory=list)
    plain: bool = False  # a plain loop takes these steps, too

    def __str__(self) -> str:
        legs = " then ".join(" ".join([f"{n}:", *more, *kill]) for n, more, kill in self.legs)
        words = [word for word in self.words[1:] if not word.endswith(("=false", "=", "=0"))]
        return f"{self.kind}: {' '.join(words)} | {legs} | straight {self.straight[0]}: {' '.join(self.straight[1])}"


def draw(seed: int) -> Training:
    dice = random.Random(seed)
    one_of, sometimes = dice.choice, lambda share: dice.random() < share
    kind = one_of(["bits", "cuts", "again"])
    exact, workers = kind == "cuts", one_of([1, 2, 3, 4, 5, 6, 8]) if kind != "cuts" else 0
    if kind == "again" and sometimes(0.6):
        workers = 0
    layers = [one_of([*LAYERS] if exact else [*LAYERS, *OF_THE_CUT]) for _ in range(dice.randint(1, 4))]
    tokens = sometimes(0.25)
    own = one_of(["", "", "odd", "chained", "odd chained", "rates", "counting"])
    shipped = one_of(["adamw", "adamw", "sgd", "muon", "adafactor"])
    if exact:  # Muon computes in bf16, where rounding is not far below 1e-9
        own, shipped = own.replace("counting", "").replace("chained", "rates"), shipped.replace("muon", "sgd")
        own = "odd chained" if own == "odd rates" else own
    own = "" if own == "counting" and kind == "bits" else own
    kinds = ["constant", "cosine", "linear", *([] if exact else ["wsd"])]
    words = [
        TASK,
        f"own.layers={','.join(layers)}",
        f"own.wrapped={str(sometimes(0.3)).lower()}",
        f"own.tokens={str(tokens).lower()}",
        f"own.terms={str(sometimes(0.3)).lower()}",
        f"own.collect={str(sometimes(0.3)).lower()}",
        f"own.seeded={str(not tokens and sometimes(0.2)).lower()}",
        f"own.prepare={'' if tokens else one_of(['', '', 'noise', 'matmul'])}",
        f"own.optimizer={own}" if own else f"optim.name={shipped}",
        f"model.double={str(exact or sometimes(0.2)).lower()}",
        f"amp={'off' if exact else one_of(['off', 'off', 'fp16', 'bf16'])}",
        f"dataset.samples={(samples := dice.randint(20, 70))}",
        f"virtual_workers={workers}",
        f"drop_last={str(sometimes(0.3)).lower()}",
        f"sampler={one_of(['shuffle', 'balanced'])}",
        f"schedule.kind={one_of(kinds)}",
        f"warmup_steps={one_of([0, 0, 3])}",
        f"optim.grad_clip={one_of([0, 0.1, 1])}",
        f"optim.ema_decay={one_of([0, 0.9])}",
        f"memory_format={one_of(['auto', 'auto', 'contiguous', 'channels_last'])}",
        f"seed={dice.randint(0, 1000)}",
        f"log_every={dice.randint(1, 4)}",
        f"eval_every={dice.randint(2, 6)}",
        f"eval_batch_size={dice.randint(3, 30)}",
        f"steps={STEPS}",
        f"schedule.horizon={STEPS}",
    ]
    if "rare" in layers:
        words.append("ddp.find_unused_parameters=true")
    batch, processes = dice.randint(1, 5), dice.randint(1, min(4, workers or 4))
    if exact or sometimes(0.5):
        words.append(f"global_batch={(whole := dice.randint(1, 24) if workers else one_of([12, 12, 24]))}")
        size = lambda: [f"batch_size={dice.randint(1, 7)}"]  # noqa: E731
        sizes = size() if not exact else []
    else:
        sizes = [f"batch_size={batch}", f"gradient_accumulation_steps={(passes := dice.randint(1, 3))}"]
        whole = batch * passes * (workers or processes)
    words += sizes
    if samples < whole:  # no step would be left
        words = [word for word in words if word != "drop_last=true"]
    if "centre" in layers and not workers:
        words.append("ddp.buffers=mean")
    fixed = [] if kind == "bits" else ddp_of(dice)  # the order in which ranks are added up
    training = Training(kind, words, (1 if kind != "again" else processes, []))
    if exact:
        training.straight = (dice.randint(1, 3), [*size(), *ddp_of(dice)])
        training.plain = not {"sampler=balanced", "own.seeded=true"} & {*words}
    elif kind == "again":
        words += [
            word for word in fixed if processes < 3 or word != "ddp.backend=gloo"
        ]  # sums in the order of the ranks
        if not workers and {"batchnorm", "mean batchnorm", "instancenorm"} & {*layers}:
            words.append("save_every=1")  # a checkpoint averages statistics over the ranks
    for step in [*sorted(dice.sample(range(1, STEPS), dice.randint(0, 2))), None]:
        processes = processes if kind == "again" else dice.randint(1, min(4, workers or 4))
        method = one_of(["begin_step", "seed_pass", "loss_vector", "end_step"])
        kill = f"{one_of(['SIGKILL', 'SIGTERM'])}:{dice.randrange(processes)}:{step}:{method}"
        more = [] if kind == "again" else ddp_of(dice)
        more += [f"num_workers={one_of([0, 0, 0, 1])}"]
        more += [f"save_every={dice.randint(1, 4)}"] if "save_every=1" not in words else []
        cache = one_of(["none", "host", "device"])
        more += [f"cache={cache}"] if "num_workers=0" in more and "own.seeded=true" not in words else []
        more += size() if exact else []
        training.legs.append((processes, more, [kill] if step else []))
    return training


def ddp_of(dice: random.Random) -> list[str]:
    return [
        f"ddp.backend={dice.choice(['auto', 'gloo'])}",
        f"ddp.bucket_cap_mb={dice.choice([0.001, 0.004, 25])}",
        f"ddp.gradient_as_bucket_view={dice.choice(['true', 'true', 'false'])}",
    ]


# ---- a plain loop ----------------------------------------------------------------------------------------------------


def plain_loop(words: list[str]) -> tuple[dict, dict]:
    """Return weights and their average after steps of whole global batches by torch's own optimizers."""
    cfg = config.parse(words, tasks.load).cfg
    task, o = tasks.load(TASK)(cfg), cfg.optim
    torch.manual_seed(cfg.seed)
    (data, _), net, average = task.datasets(), task.model(), None
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = (
        task.optimizer(net)
        or {
            "adamw": lambda: torch.optim.AdamW(trained, lr=o.lr, weight_decay=0.0),
            "sgd": lambda: torch.optim.SGD(trained, lr=o.lr, momentum=o.momentum),
            "adafactor": lambda: torch.optim.Adafactor(trained, lr=o.lr, weight_decay=0.0),
        }[o.name]()
    )
    scales = [group["lr"] / o.lr for group in optimizer.param_groups]
    step = epoch = 0
    while step < STEPS:
        order = np.random.default_rng((cfg.seed, epoch)).permutation(len(data))
        for first in range(0, len(order), cfg.global_batch):
            rows = order[first : first + cfg.global_batch].tolist()
            if step == STEPS or (cfg.drop_last and len(rows) < cfg.global_batch):
                break
            seeds = sample_seeds(cfg.seed, epoch, first + torch.arange(len(rows)))
            batch = data.__getitems__(rows) | {"lockstep": SimpleNamespace(seed=seeds)}
            batch = task.prepare(batch)
            terms = task.losses(net, batch).values() if cfg.own.terms else [task.loss(net, batch)]
            if not any(term.weight for term in terms):  # nothing to learn from: no step
                step += 1
                continue
            optimizer.zero_grad()
            sum(term.factor * term.total / term.weight for term in terms if term.weight).backward()
            if o.grad_clip:
                torch.nn.utils.clip_grad_norm_(trained, o.grad_clip)
            for group, scale in zip(optimizer.param_groups, scales, strict=True):
                group["lr"] = scale * rate(cfg, step)
            optimizer.step()
            state, step = net.state_dict(), step + 1
            kept = average or state
            average = {name: kept[name] * o.ema_decay + state[name] * (1 - o.ema_decay) for name in state}
            average = copy.deepcopy(state if step == 1 else average)
        epoch += 1
    return net.state_dict(), average


def rate(cfg, step: int) -> float:
    warm = cfg.schedule.warmup_steps
    if step < warm:
        return cfg.optim.lr * (step + 1) / warm
    share = (step - warm) / (STEPS - warm)
    shapes = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}
    return cfg.optim.lr * shapes[cfg.schedule.kind]


# ---- what is promised ------------------------------------------------------------------------------------------------


def assert_close(ours: dict, theirs: dict, whose: str) -> None:
    floats = {name for name, value in theirs.items() if value.is_floating_point()}
    gaps = {name: distance({name: ours[name]}, {name: theirs[name]}) for name in floats}
    worst = max(gaps, key=lambda name: gaps[name])
    assert gaps[worst] < TOLERANCE, f"{gaps[worst]:.1e} from {whose}, {worst}"


def said(done: Done) -> str:
    return "\n".join(done.errors or [done.err[-2000:]])


def evaluations(folder: Path) -> list[dict]:
    return [line for line in logged(folder) if line["event"] == "eval"]


def check(training: Training, scratch: Path, launch) -> None:
    ours, straight = scratch / "ours", scratch / "straight"

    def leg(folder: Path, processes: int, more: list[str], kill: list[str]):
        words = BITS, json.dumps([[*training.words, *more, f"save_dir={folder}"]]), *kill
        return launch.python(*words) if processes == 1 else launch.torchrun(processes, *words)

    if "own.optimizer=counting" in training.words:
        done = leg(straight, *training.straight, [])
        assert done.code and "calls" in done.errors[0], said(done)
        return
    for processes, more, kill in training.legs:
        done = leg(ours, processes, more, kill)
        assert kill or not done.code, said(done)
    done = leg(straight, *training.straight, [])
    assert not done.code, said(done)
    if training.kind != "cuts":
        assert_same_bits(ours, straight)
    a, b = load(ours), load(straight)
    assert a["progress"]["step"] == b["progress"]["step"] == STEPS
    if training.kind == "cuts":
        assert_close(a["model"], b["model"], "a straight run")
    for line, other in zip(evaluations(ours), evaluations(straight), strict=True):
        del line["event"], other["event"]
        assert line == pytest.approx(other, rel=1e-9, abs=1e-12)
    if training.plain:
        weights, average = plain_loop(training.words)
        assert_close(a["model"], weights, "a plain loop")
        if a["ema"]:
            assert_close(
                {name.removeprefix("module."): value for name, value in a["ema"].items()}, average, "an average"
            )


def try_one(seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="grammar_") as scratch, launching() as launch:
        launch.may_stay += ["lockstep_", "torch_"]  # of a process that was killed
        check(draw(seed), Path(scratch), launch)


def main(minutes: float, seed: int) -> int:
    ends_at, tried, different = time.monotonic() + 60 * minutes, 0, []
    while not tried or time.monotonic() < ends_at:
        print(f"{time.strftime('%H:%M:%S')} seed {seed + tried}: {draw(seed + tried)}", flush=True)
        try:
            try_one(seed + tried)
        except (Exception, pytest.fail.Exception):
            print(f"DIFFERENT seed {seed + tried}: {traceback.format_exc()[-3000:]}", flush=True)
            different.append(seed + tried)
        tried += 1
    print(f"{tried} trainings; different: {different or 'none'}")
    return bool(different)


if __name__ == "__main__":
    adopt_orphans()
    sys.exit(main(float(os.environ.get("MINUTES") or 10), int(os.environ.get("SEED") or 0)))
