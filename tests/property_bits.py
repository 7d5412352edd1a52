"""Train random configurations with virtual workers on random numbers of processes, interrupted at random, and compare
their bits with those of a straight run on one process.

    MINUTES=10 [SEED=0] python tests/property_bits.py

The seed of each configuration is printed, and the first difference ends it: MINUTES=0 SEED=7 tries configuration 7.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from conftest import ROOT, adopt_orphans, launching, succeed
from test_resume import load
from test_same_bits import BITS, NORMS, assert_same_bits


def configuration(dice: random.Random) -> tuple[list[str], list[list[str]], list[tuple[int, list[str]]]]:
    """Return what a run is, arguments that change no bits for each of its legs, and the legs: on how many processes,
    and what interrupts it, as bits.py takes it."""
    workers = dice.choice([1, 2, 3, 4, 5, 6, 7, 8, 12])
    network = dice.choice(["conv", "perceptron", "attention"])
    passes, batch = dice.choice([1, 1, 2, 3]), dice.randint(2, 4)
    whole = network == "perceptron"  # its BatchNorm takes no pass of one sample
    size = [f"batch_size={batch}", f"gradient_accumulation_steps={passes}"]
    if not whole and dice.random() < 0.5:
        size = [f"global_batch={dice.randint(1, 30)}", f"batch_size={batch}"]
    run = [
        NORMS,
        f"model.network={network}",
        f"model.width={dice.choice([8, 12, 16])}",
        f"virtual_workers={workers}",
        *size,
        f"drop_last={str(whole or dice.random() < 0.3).lower()}",
        f"dataset.samples={max(30, workers * batch * passes) + dice.randint(0, 60)}",
        f"sampler={dice.choice(['shuffle', 'balanced'])}",
        f"amp={dice.choice(['off', 'off', 'fp16', 'bf16'])}",
        f"optim.grad_clip={dice.choice([0, 0.1, 1])}",
        f"optim.ema_decay={dice.choice([0, 0.9])}",
        f"seed={dice.randint(0, 1000)}",
        f"log_every={dice.randint(1, 4)}",
        f"eval_every={dice.randint(2, 6)}",
        "epochs=100",
        "schedule.horizon=20",
    ]
    legs: list[tuple[int, list[str]]] = []
    for step in [*sorted(dice.sample(range(1, 11), dice.randint(0, 3))), None]:
        processes = dice.randint(1, min(5, workers))
        method = dice.choice(["begin_step", "begin_pass", "numbers", "end_step"])
        how = f"{dice.choice(['SIGKILL', 'SIGTERM'])}:{dice.randrange(processes)}:{step}:{method}"
        legs.append((processes, [how] if step else []))
    free = [
        [
            f"ddp.backend={dice.choice(['auto', 'gloo'])}",
            f"ddp.bucket_cap_mb={dice.choice([0.001, 0.004, 25])}",
            f"optim.zero={dice.choice(['true', 'false'])}",
            f"num_workers={dice.choice([0, 0, 0, 1])}",
            f"save_every={dice.randint(1, 5)}",
        ]
        for _ in legs
    ]
    return run, free, legs


def try_one(seed: int) -> str:
    """Return what was tried."""
    run, free, legs = configuration(random.Random(seed))
    run.append("steps=12")
    with tempfile.TemporaryDirectory(prefix="bits_") as scratch, launching() as launch:
        ours, straight = Path(scratch) / "ours", Path(scratch) / "straight"
        launch.may_stay += ["lockstep_", "torch_"]  # of a process that was killed
        for (processes, interrupted), more in zip(legs, free, strict=True):
            words = BITS, json.dumps([[*run, *more, f"save_dir={ours}"]]), *interrupted
            done = launch.python(*words) if processes == 1 else launch.torchrun(processes, *words)
            if not interrupted:
                succeed(done)
        succeed(launch.python(BITS, json.dumps([[*run, f"save_dir={straight}"]])))
        assert_same_bits(ours, straight)
        assert load(straight)["progress"]["step"] == 12
    return " ".join([*run[1:], "on", *(f"{n} {''.join(interrupted)}" for n, interrupted in legs)])


def main(minutes: float, seed: int) -> int:
    ends_at, tried = time.monotonic() + 60 * minutes, 0
    while not tried or time.monotonic() < ends_at:
        print(f"configuration {seed + tried}", end=": ", flush=True)
        print(try_one(seed + tried), flush=True)
        tried += 1
    print(f"{tried} configurations, no difference")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    adopt_orphans()
    sys.exit(main(float(os.environ.get("MINUTES", "10")), int(os.environ.get("SEED", "0"))))
