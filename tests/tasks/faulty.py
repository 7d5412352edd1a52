"""The toy task, misbehaving at a given rank and step: what breaks comes from here, not from switches in the engine."""

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn

from engine.config import option, section
from engine.contract import LockstepError
from tests.tasks import toy

SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM}


@dataclass
class Fault:
    kind: str = option("", "what to do, see `Task.misbehave`")
    rank: int = option(1, "on which rank", low=0)
    step: int = option(3, "in which forward pass of this process, from 1", low=0)
    times: int = option(1, "in how many forward passes from there on", low=1)
    once: str = option("", "a file that says it has happened already; it is made then")
    attempt: int = option(0, "in which attempt of torchrun's", low=0)
    fits: int = option(
        10**9, "the most samples of a pass that memory is there for: in training, or in validation", low=0
    )
    seconds: float = option(3600.0, "how long a hang lasts", low=0)


@dataclass
class Settings(toy.Task.Settings):
    fault: Fault = section(Fault)


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("cannot be pickled")
        self.lock = lambda: None


class Waves(toy.Waves):
    def __init__(self, samples, seed, fault):
        super().__init__(samples, seed)
        self.fault = fault

    def __getitems__(self, indices):
        fault, worker = self.fault, torch.utils.data.get_worker_info()
        if 7 in indices and fault.rank == int(os.environ.get("RANK", "0")):
            if fault.kind == "corrupt sample":
                raise ValueError("corrupt recording wave_0007.bin")
            if worker:
                self.misbehave()
        batch = super().__getitems__(indices)
        if fault.kind == "nan sample":
            batch["x"][torch.tensor(indices) == 7] = float("nan")
        return batch

    def misbehave(self):
        """In a loader process."""
        fault = self.fault
        if fault.kind == "worker killed once" and not os.path.exists(fault.once):
            open(fault.once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "worker killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "worker hangs":
            time.sleep(fault.seconds)
        if fault.kind == "worker unpicklable":
            raise Unpicklable
        if fault.kind == "worker crashes":
            ctypes.string_at(0)


class NormNet(toy.Net):
    """BatchNorm, a parameter that nothing uses, and one that only some steps use."""

    def __init__(self, width, kind):
        super().__init__(width, 0.0)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float32)
        if "unused" in kind:
            self.spare = nn.Linear(8, 4)
        self.kind, self.calls = kind, 0

    def forward(self, x):
        self.calls += self.training
        y = super().forward(self.norm(x.float()))
        used = {
            "sometimes unused": self.calls < 3,
            "unused at times": self.calls % 2,  # in every step, but not in the micro-batch that closes it
            "unused on rank 1": os.environ.get("RANK") != "1",
        }
        return y + self.spare(x.float()) if used.get(self.kind) else y


class Task(toy.Task):
    Settings = Settings
    defaults = toy.Task.defaults | {"check_sums": False}  # or a fault would come there

    def __init__(self, cfg):
        super().__init__(cfg)
        self.calls = 0

    def datasets(self):
        if self.fires("raise in data"):
            raise RuntimeError("the disk is on fire")
        if self.fires("kill in data"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fires("hang in data"):
            time.sleep(self.cfg.fault.seconds)
        data, fault = self.cfg.dataset, self.cfg.fault
        return Waves(data.samples, 0, fault), Waves(data.val_samples, 1, Fault())

    def model(self):
        kind = self.cfg.fault.kind
        if self.fires("no model"):
            raise LockstepError("there is no such model", "model.name", "take another")
        if kind == "nan loss" or "unused" in kind:
            return NormNet(self.cfg.model.width, kind)
        net = super().model()
        if kind == "nan weights":
            net.layers[0].bias.data[3] = torch.nan
        return net

    def fires(self, *kinds):
        fault = self.cfg.fault
        here = fault.rank == int(os.environ.get("RANK", "0"))
        now = fault.attempt == int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if not (fault.kind in kinds and here and now) or (fault.once and os.path.exists(fault.once)):
            return False
        if fault.once:
            open(fault.once, "w").close()
        return True

    def misbehave(self, net):
        fault = self.cfg.fault
        if not fault.step <= self.calls < fault.step + fault.times:
            return
        if self.fires("raise"):
            raise ZeroDivisionError("an error in the task")
        if self.fires("exit"):
            sys.exit(0)
        if self.fires("leave"):
            os._exit(7)
        if self.fires("hang", "slow"):
            time.sleep(fault.seconds)
        if self.fires("out of memory") or (len(self.indices) > fault.fits and self.fires("memory for so many")):
            torch.empty(1 << 60)
        if self.fires("another sum"):
            torch.distributed.all_reduce(torch.ones(7))
        if self.fires("drift"):
            with torch.no_grad():
                next(net.parameters()).add_(1.0)
        if self.fires(*SIGNALS):
            os.kill(os.getpid(), SIGNALS[fault.kind])
        if fault.kind == "record":
            with open(f"{fault.once}.{os.environ.get('RANK', '0')}", "a") as file:
                file.write(" ".join(map(str, self.indices)) + "\n")

    def loss(self, net, batch):
        self.calls += 1
        self.indices = batch["lockstep"].index.tolist()
        self.misbehave(net)
        loss = super().loss(net, batch)
        fault = self.cfg.fault
        now = fault.step <= self.calls < fault.step + fault.times
        return loss._replace(total=loss.total * float("nan")) if now and self.fires("nan loss") else loss

    def score(self, model, batch):
        if not self.calls:  # the rehearsal
            return super().score(model, batch)
        if len(batch["x"]) > self.cfg.fault.fits and self.fires("memory for so many in validation"):
            torch.empty(1 << 60)
        if self.fires("raise in validation"):
            raise ZeroDivisionError("an error in the validation")
        if self.fires("term in validation"):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.fires("hang in validation"):
            time.sleep(self.cfg.fault.seconds)
        return super().score(model, batch)

    def pictures(self, model, batch, sums):
        if self.fires("raise in pictures"):
            raise ZeroDivisionError("an error in the pictures")
        return super().pictures(model, batch, sums)


@dataclass(frozen=True)
class Ending:
    """How a run of two processes, which saves every second step, ends where rank 1 has a fault.

    code       exit code of the launcher
    line       pattern of the one error line
    step       of the status and of its checkpoint; 0: there is no checkpoint; None: there is no status either
    settings   further settings
    traceback  what error.txt has to hold
    """

    code: int
    line: str
    step: int | None = 2
    settings: str = "ddp.timeout_s=2"
    traceback: str = ""


# A loader process starts slowly beside many others, and no such fault waits for a timeout.
PATIENT = "ddp.timeout_s=20 num_workers=1"
SMALL_EVALUATION = "ddp.timeout_s=2 eval_batch_size=8"
DIED = "rank 1 died without an error message"
HUNG = r"rank 1 has been in {} for \d+ s; waiting: rank 0 in {}"
UNUSED = r"some parameters got no gradient: spare.weight, spare.bias \(.*rank {}, gradient sync at step {}"
LOADER = r"a loader process failed: .* {} \(.* rank 1"
IN_TASK = r"\(tests/tasks/faulty.py:\d+ in {}, rank 1"

FAULTS = {
    "kill": Ending(6, DIED + r" \(process \d+, last seen in [a-z_ ]+ at step \d\): killed from outside"),
    "leave": Ending(6, DIED),
    "exit": Ending(1, r"sys.exit\(0\) in the middle of the training " + IN_TASK.format("misbehave")),
    "raise": Ending(
        1,
        r"^error: ZeroDivisionError: an error in the task " + IN_TASK.format("misbehave") + ", forward",
        traceback="ZeroDivisionError",
    ),
    "raise in data": Ending(1, "RuntimeError: the disk is on fire " + IN_TASK.format("datasets") + ", prep", None),
    "no model": Ending(2, r"there is no such model \(model.name\): take another", None),
    "raise in validation": Ending(
        1,
        r"an error in the validation \(.* rank 1, validation at step 3\)",
        step=3,
        settings=SMALL_EVALUATION,
        traceback="ZeroDivisionError",
    ),
    "out of memory": Ending(
        1, r"out of memory, 12 samples .* rank 1, forward at step 2\): global_batch=24 batch_size=6 takes"
    ),
    "freeze": Ending(
        6, r"rank 1 gives no sign of life \(process \d+ on .*\); waiting: rank 0 in gradient sync \(step 2, ddp"
    ),
    "hang": Ending(6, HUNG.format("forward", r"gradient sync \(step 2, ddp.timeout_s=2\)")),
    "hang in data": Ending(6, HUNG.format("preparing", "all_gather"), None),
    "hang in validation": Ending(6, HUNG.format("validation", "all_gather"), 3, SMALL_EVALUATION),
    "drift": Ending(
        6,
        r"rank 1 differs from rank 0 in .* layers.0.weight: \w+ instead of \w+ \(step 4\)",
        step=3,
        settings="ddp.timeout_s=2 check_every=2",
    ),
    "another sum": Ending(
        2, r"rank (0: .* rank 1 28 bytes, rank 0 \d+|1: .* rank 0 \d+ bytes, rank 1 28) \(a sum over the"
    ),
    "unused": Ending(2, UNUSED.format(".", 0), 0),
    "sometimes unused": Ending(2, UNUSED.format(".", 2)),
    "unused at times": Ending(
        2, UNUSED.format(".", 0), 0, "ddp.timeout_s=2 gradient_accumulation_steps=2 check_resume=false"
    ),
    "unused on rank 1": Ending(2, UNUSED.format("1", 0), 0),
    "corrupt sample": Ending(
        5, r"rank 1: sample 7 cannot be loaded: ValueError: corrupt recording wave_0007.bin \(Waves\)", 0
    ),
    "worker killed": Ending(5, LOADER.format("killed by signal: Killed"), 0, "ddp.timeout_s=20 num_workers=2"),
    "worker crashes": Ending(5, LOADER.format("Segmentation fault"), 0, PATIENT),
    "worker hangs": Ending(5, r"timed out after 4.0 seconds \(.* rank 1, data", 0, f"{PATIENT} loader_timeout_s=4"),
    "worker unpicklable": Ending(5, r"rank 1: sample .* cannot be loaded: .*Unpicklable: cannot be", 0, PATIENT),
}
"""By kind of fault."""
