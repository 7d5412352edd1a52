#!/usr/bin/env python3
"""Compare what is no plain sum on 1, 2 and 3 processes: a metric over a whole split, and two
losses' gradients.

python benchmarks/beyond_sums.py               two minutes on the CPU; pip install -e '.[bench]'
scikit-learn

AUC of 197 samples in batches of 16; the norm of the gradient of 24 samples for 5 * mean over masked
entries + mean over samples, and for InfoNCE over all pairs. Model, data and global batch are the
same for all, in float64. The others do it as their documentation shows; whatever is not installed
is left out and named.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine import contract  # noqa: E402
from engine.config import option, section  # noqa: E402
from engine.contract import Loss, Sums, gather_batch  # noqa: E402

SUBJECTS, COUNTS = ("auc", "two means", "all pairs"), (1, 2, 3)


class Rows(Dataset[Any]):
    def __init__(self, count: int):
        rng = np.random.default_rng(count)
        self.x = torch.from_numpy(rng.normal(size=(count, 8)))
        self.y = (self.x[:, 0] + torch.from_numpy(rng.normal(size=count)) > 0).long()
        self.mask = torch.from_numpy(rng.random((count, 4)) < rng.random((count, 1)))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i], "mask": self.mask[i]}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def two_means(out: Any, batch: Any) -> Any:
    masked = (out.square() * batch["mask"]).sum() / batch["mask"].sum()
    return 5 * masked + F.cross_entropy(out[:, :2], batch["y"])


def views(net: Any, batch: Any) -> Any:
    """Two embeddings of each sample, in one forward pass."""
    return F.normalize(net(torch.cat([batch["x"], batch["x"].flip(1)]))).chunk(2)


def norm(net: nn.Module) -> float:
    return float(
        torch.linalg.vector_norm(
            torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None])
        )
    )


# ---- the usual ways
# --------------------------------------------------------------------------------------------------


class Tutorial:
    """DistributedSampler and DDP; the ranks' metrics are averaged."""

    def __init__(self) -> None:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        self.net = nn.parallel.DistributedDataParallel(network())

    def loader(self, data: Any, size: int) -> Any:
        return DataLoader(data, size, sampler=DistributedSampler(data, shuffle=False))

    def auc(self, data: Any, size: int) -> float:
        from sklearn.metrics import roc_auc_score

        with torch.no_grad():
            found = [
                (self.net.module(batch["x"])[:, 1], batch["y"]) for batch in self.loader(data, size)
            ]
        score, y = (torch.cat(each) for each in zip(*found, strict=True))
        mean = torch.tensor(roc_auc_score(y, score))
        torch.distributed.all_reduce(mean)
        return float(mean / torch.distributed.get_world_size())

    def loss(self, subject: str, batch: Any) -> Any:
        if subject == "two means":
            return two_means(self.net(batch["x"]), batch)
        here, there = views(self.net, batch)
        return F.cross_entropy(here @ there.T, torch.arange(len(here)))

    def gradient(self, subject: str, data: Any, size: int) -> float:
        for batch in self.loader(data, size):
            self.loss(subject, batch).backward()
        return norm(self.net)


class Accelerate:
    """gather_for_metrics; gather, which has no gradient, for all pairs."""

    def __init__(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.net = self.accelerator.prepare(network())

    def auc(self, data: Any, size: int) -> float:
        from sklearn.metrics import roc_auc_score

        loader, found = self.accelerator.prepare(DataLoader(data, size)), []
        with torch.no_grad():
            for batch in loader:
                found.append(
                    self.accelerator.gather_for_metrics((self.net(batch["x"])[:, 1], batch["y"]))
                )
        score, y = (torch.cat(each) for each in zip(*found, strict=True))
        return float(roc_auc_score(y, score))

    def loss(self, subject: str, batch: Any) -> Any:
        if subject == "two means":
            return two_means(self.net(batch["x"]), batch)
        here, there = views(self.net, batch)
        first = self.accelerator.process_index * len(here)
        everyone = self.accelerator.gather(there)
        return F.cross_entropy(here @ everyone.T, first + torch.arange(len(here)))

    def gradient(self, subject: str, data: Any, size: int) -> float:
        for batch in self.accelerator.prepare(DataLoader(data, size)):
            self.accelerator.backward(self.loss(subject, batch))
        return norm(self.net)


class Lightning:
    """torchmetrics; all_gather with gradients."""

    def auc(self, data: Any, size: int) -> float:
        return self.run("auc", data, size)

    def gradient(self, subject: str, data: Any, size: int) -> float:
        return self.run(subject, data, size)

    def run(self, subject: str, data: Any, size: int) -> float:
        import lightning
        from torchmetrics.classification import BinaryAUROC

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.metric = network(), BinaryAUROC()

            def validation_step(self, batch: Any, number: int) -> None:
                self.metric.update(self.net(batch["x"])[:, 1].sigmoid(), batch["y"])

            def on_validation_epoch_end(self) -> None:
                self.value = float(self.metric.compute())

            def training_step(self, batch: Any, number: int) -> Any:
                if subject == "two means":
                    return two_means(self.net(batch["x"]), batch)
                here, there = views(self.net, batch)
                everyone = self.all_gather(there, sync_grads=True).reshape(-1, here.shape[1])
                return F.cross_entropy(
                    here @ everyone.T, self.global_rank * len(here) + torch.arange(len(here))
                )

            def on_before_optimizer_step(self, optimizer: Any) -> None:
                self.value = norm(self.net)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        ddp = "ddp" if int(os.environ["WORLD_SIZE"]) > 1 else "auto"
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=ddp,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module, loader = Module(), DataLoader(data, size)
        trainer.validate(module, loader, verbose=False) if subject == "auc" else trainer.fit(
            module, loader
        )
        return float(module.value)


# ---- Lockstep
# --------------------------------------------------------------------------------------------------


@dataclass
class Own:
    subject: str = option("two means", "which loss")


class Task(contract.Task):
    @dataclass
    class Settings(contract.Settings):
        own: Own = section(Own)

    monitor = "auc"

    def datasets(self) -> Any:
        return Rows(24), Rows(197)

    def model(self) -> nn.Module:
        return network()

    def loss(self, net: nn.Module, batch: Any) -> Loss:
        if self.cfg.own.subject != "all pairs":
            return super().loss(net, batch)
        here, there = views(net, batch)
        everyone, rows = gather_batch(there)
        return Loss(
            F.cross_entropy(here @ everyone.T, rows, reduction="sum"), torch.tensor(len(here))
        )

    def losses(self, net: nn.Module, batch: Any) -> dict[str, Loss]:
        out, mask = net(batch["x"]), batch["mask"]
        classes = F.cross_entropy(out[:, :2], batch["y"], reduction="sum")
        return {
            "masked": Loss((out.square() * mask).sum(), mask.sum(), factor=5.0),
            "classes": Loss(classes, torch.tensor(len(out))),
        }

    def score(self, model: nn.Module, batch: Any) -> Sums:
        self.out = model(batch["x"])
        return Sums(count=torch.tensor(len(self.out)))

    def collect(self, model: nn.Module, batch: Any) -> Any:
        return {"score": self.out[:, 1], "y": batch["y"]}

    def report(self, sums: Sums) -> dict[str, float]:
        from sklearn.metrics import roc_auc_score

        return {"loss": 0.0, "auc": roc_auc_score(sums.collected["y"], sums.collected["score"])}


# ---- side by side
# --------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Any, str]] = {
    "plain DDP": (Tutorial, "torch"),
    "accelerate": (Accelerate, "accelerate"),
    "Lightning": (Lightning, "lightning"),
}


def numbers(name: str) -> None:
    """In one of the processes that `main` starts: print a contestant's numbers."""
    torch.set_num_threads(1)
    size, found = 24 // int(os.environ["WORLD_SIZE"]), []
    for subject in SUBJECTS:
        contestant = OTHERS[name][0]()
        known = (
            contestant.auc(Rows(197), 16)
            if subject == "auc"
            else contestant.gradient(subject, Rows(24), size)
        )
        found.append(known)
    if os.environ["RANK"] == "0":
        print(f"RESULT {json.dumps(found)}", flush=True)


def started(processes: int, *words: str) -> str:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        *words,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def of_others(name: str, processes: int) -> list[float]:
    output = started(processes, __file__, "--as", name)
    if "RESULT " not in output:
        sys.exit(f"{name} on {processes} processes has failed:\n{output}")
    return json.loads(output.rpartition("RESULT ")[2].splitlines()[0])


def of_lockstep(processes: int) -> list[float]:
    found: dict[str, float] = {}
    for subject in SUBJECTS[1:]:
        with tempfile.TemporaryDirectory() as folder:
            words = [
                __file__,
                f"own.subject={subject}",
                "steps=1",
                f"batch_size={24 // processes}",
                "device=cpu",
            ]
            words += [
                "eval_batch_size=16",
                "optim.lr=1e-12",
                "amp=off",
                "log_every=1",
                f"save_dir={folder}/run",
            ]
            started(processes, "train.py", *words)
            lines = [
                json.loads(line)
                for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()
            ]
        train, scored = (
            next(line for line in lines if line["event"] == event) for event in ("train", "eval")
        )
        found |= {"auc": scored["auc"], subject: train["grad_norm"]}
    return [found[subject] for subject in SUBJECTS]


def lines_of(contestant: type) -> int:
    """Return the lines of a class without blank ones and docstrings."""
    source = inspect.getsource(contestant).splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith('"""') for line in source)


def main() -> int:
    rows: dict[str, list[list[float]]] = {}
    for name, (_, package) in OTHERS.items():
        if find_spec(package):
            rows[name] = [of_others(name, count) for count in COUNTS]
        else:
            print(
                f"{name} is not installed, and left out (pip install -e '.[bench]')",
                file=sys.stderr,
            )
    rows["Lockstep"] = [of_lockstep(count) for count in COUNTS]
    print(
        "| | | "
        + " | ".join(f"{count} process{'es' if count > 1 else ''}" for count in COUNTS)
        + " |"
    )
    print("|---|---|" + "---|" * len(COUNTS))
    for number, subject in enumerate(SUBJECTS):
        for name, found in rows.items():
            print(f"| {subject} | {name} | {' | '.join(f'{each[number]:.9f}' for each in found)} |")
    code = {name: lines_of(kind) for name, (kind, _) in OTHERS.items() if name in rows} | {
        "Lockstep": lines_of(Task)
    }
    print(
        "\nLines of code of each one's class: "
        + ", ".join(f"{name} {count}" for name, count in code.items())
    )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        numbers(*sys.argv[2:])
    else:
        sys.exit(main())
