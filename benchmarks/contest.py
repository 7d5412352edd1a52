"""One training of one contestant: the same model on the same arrays, by Lockstep, by others, and at
the limit.

Started by `run.py`, plainly or by torchrun, as

    contest.py CONTESTANT '{"words": [...], "batch_size": 64, "epochs": 2, ...}' RESULT.json

Every contestant trains with cross-entropy (the task's own loss where there is another), AdamW at a
constant learning rate, and calls `clock.step()` after each optimizer step; rank 0 writes the
clock's result. Otherwise a contestant does exactly what its own documentation shows. In a race
(`gpu_race.py`) the clock is an `OrderedClock`, and no training ends.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def seconds_since_start() -> float:
    """Return the seconds since the kernel started this process, so that imports count."""
    started = float(
        Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    ) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


class Clock:
    """Wall and CPU time between the step that ends the warm-up and the last one.

    parts  seconds of the steps in between by phase, of a contestant that calls `phase`
    """

    def __init__(self, warmup: int):
        self.warmup, self.steps, self.first_step_s = warmup, 0, 0.0
        self.at: list[tuple[float, float, int]] = []
        self.parts: dict[str, float] = {}
        self.current, self.since = "", 0.0

    def attach(self, listeners: list[Any]) -> None:
        """Be called with each new phase of a training."""
        listeners.append(self.phase)

    def phase(self, name: str) -> None:
        """Note that the process begins to work on something else."""
        now = time.perf_counter()
        if len(self.at) == 1:
            self.parts[self.current] = self.parts.get(self.current, 0.0) + now - self.since
        self.current, self.since = name, now

    def step(self) -> None:
        self.steps += 1
        if self.steps == 1:
            _wait_for_device()
            self.first_step_s = seconds_since_start()
        if self.steps == self.warmup:
            self.mark()

    def mark(self) -> None:
        _wait_for_device()
        self.at.append((time.perf_counter(), time.process_time(), self.steps))

    def result(self) -> dict[str, Any]:
        if not self.at:  # `start` does not train
            return {"first_step_s": self.first_step_s}
        assert len(self.at) == 2, f"{self.steps} steps are too few for a warm-up of {self.warmup}"
        (wall0, cpu0, step0), (wall1, cpu1, step1) = self.at
        return {
            "first_step_s": self.first_step_s,
            "steps": step1 - step0,
            "step_ms": 1e3 * (wall1 - wall0) / (step1 - step0),
            "cpu_step_ms": 1e3 * (cpu1 - cpu0) / (step1 - step0),
            "parts_ms": {
                name: 1e3 * seconds / (step1 - step0) for name, seconds in self.parts.items()
            },
        }


class OrderedClock(Clock):
    """The clock of a contestant that lives as long as a race. After the warm-up it writes READY.
    Each line of the pipe `orders`, {"seconds": of a window}, is answered with a line TURN. The end
    of the pipe ends the process.

    settling  steps before the first window, at least
    left      steps until the next stage
    """

    def __init__(self, warmup: int, orders: str, settling: int = 0):
        super().__init__(warmup)
        self.settling = settling
        self.stages = self._stages(orders)
        self.left = next(self.stages)

    def attach(self, listeners: list[Any]) -> None:
        """Do nothing: a listener would be a part of the time."""

    def phase(self, name: str) -> None:
        """Do nothing, as `attach`."""

    def step(self) -> None:
        self.left -= 1
        if not self.left:
            self.left = next(self.stages)

    def mark(self) -> None:
        raise AssertionError("a training of a race has no end")

    def _stages(self, orders: str) -> Iterator[int]:
        """Yield the number of steps of each stage. Between stages the device is waited for."""
        yield self.warmup
        _wait_for_device()
        _write("READY")
        with open(orders) as lines:
            for line in lines:
                seconds = json.loads(line)["seconds"]
                if self.settling:
                    yield self.settling
                    self.settling = 0
                pace_s = yield from self._timed(SETTLING_STEPS)
                # until the clocks of a device that has idled have risen
                settling = min(SETTLING_S, seconds) / pace_s
                pace_s = yield from self._timed(max(SETTLING_STEPS, math.ceil(settling)))
                count = max(2, math.ceil(seconds / pace_s))
                step_s = yield from self._timed(count)
                answer = {"step_ms": 1e3 * step_s, "steps": count, "memory_mb": _memory_mb()}
                _write(f"TURN {json.dumps(answer)}")
                _give_back_memory()
        os._exit(0)  # out of the middle of a training

    def _timed(self, count: int) -> Generator[int, None, float]:
        """Yield `count` steps as a stage; return the seconds of one of the steps."""
        _wait_for_device()
        began = time.perf_counter()
        yield count
        _wait_for_device()
        return (time.perf_counter() - began) / count


SETTLING_STEPS, SETTLING_S = 4, 0.1
"""Steps, and seconds, before a window of an `OrderedClock`."""


def _write(line: str) -> None:
    """Write a line to the log, below a progress bar if there is one, at once."""
    os.write(1, f"\n{line}\n".encode())


def _memory_mb() -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_initialized() else 0.0


def _give_back_memory() -> None:
    """Leave the device's memory to those who run next."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Work:
    """The model, the samples in memory, loss and score, all from the project's own task."""

    def __init__(self, about: dict[str, Any]):
        import torch

        import tasks
        from engine import config

        self.about, self.batch_size, self.epochs = about, about["batch_size"], about["epochs"]
        self.lr, self.weight_decay = about["lr"], 0.01
        self.drop_last = about.get("drop_last", False)
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.gpu = torch.cuda.is_available() and not about.get("cpu")
        self.device = (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            if self.gpu
            else torch.device("cpu")
        )
        self.cfg = config.parse(about["words"], tasks.load).cfg
        self.task = tasks.load(self.cfg.task)(self.cfg)
        self.train_set, self.val_set = self.task.datasets()
        expected = about.get("samples", len(self.train_set))
        assert len(self.train_set) == expected, (
            f"{len(self.train_set)} samples: run.py counts steps by them"
        )

    @property
    def lightning_precision(self) -> Any:
        return "bf16-mixed" if self.about.get("mixed_precision") == "bf16" else "32-true"

    def arrays(self) -> dict[str, Any]:
        """Return the training set in memory, by name."""
        import torch

        held = self.train_set.__getitems__(list(range(len(self.train_set))))
        if not hasattr(self.task, "classes"):  # the project's policies draw their noise from it
            held["seed"] = torch.randint(2**62, (len(self.train_set),))
            if hasattr(self.train_set, "weights"):
                mean = float(torch.as_tensor(self.train_set.weights).double().mean())
                held["mean_weight"] = torch.full((len(self.train_set),), mean, dtype=torch.float64)
        return held

    def samples(self) -> Any:
        """Return the training set as in the tutorials: one sample per index."""
        import torch

        held = self.arrays()
        self.train_set = range(len(self.train_set))  # only its length is needed from here on

        class Samples(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return len(next(iter(held.values())))

            def __getitem__(self, index: int) -> dict[str, Any]:
                return {name: values[index] for name, values in held.items()}

        return Samples()

    def model(self) -> Any:
        import torch

        torch.manual_seed(0)
        return self.task.model()

    def loss(self, net: Any, batch: dict[str, Any]) -> Any:
        """Return the mean loss of a batch."""
        import torch.nn.functional as F

        if hasattr(self.task, "classes"):
            logits = net(batch["x"])
            return F.cross_entropy(
                logits.float(), batch["y"], weight=self.task.weights(logits.float())
            )
        loss = self.task.loss(net, _given(batch))
        return loss.total / loss.weight

    def metrics(self, model: Any) -> dict[str, float]:
        """Return the metrics of the whole validation split."""
        import torch

        from engine.contract import Sums

        sums = Sums()
        with torch.no_grad():
            for first in range(0, len(self.val_set), 256):
                chosen = list(range(first, min(first + 256, len(self.val_set))))
                batch = self.val_set.__getitems__(chosen)
                if not hasattr(self.task, "classes"):
                    batch["seed"] = torch.tensor(chosen)
                batch = {name: value.to(self.device) for name, value in batch.items()}
                sums += self.task.score(model.eval(), _given(batch))
        return self.task.report(sums)


def _given(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with the loader's own numbers where a task looks for them."""
    from engine.contract import BatchInfo

    if "seed" not in batch:
        return batch
    seed = batch["seed"]
    return batch | {"lockstep": BatchInfo(seed, seed, seed, batch.get("mean_weight"))}


# ---- the contestants
# ------------------------------------------------------------------------------------------------


def built(about: dict[str, Any]) -> Any:
    """Build the model from sizes that a task would read from its data."""
    import torch

    module, kind, sizes = about["model"]
    sizes = {
        name: torch.tensor(size) if isinstance(size, list) else size for name, size in sizes.items()
    }
    return getattr(import_module(module), kind)(**sizes)


def start(about: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Import torch and put the model on its device, without training: no first step can come
    sooner."""
    import torch

    built(about).to("cuda" if torch.cuda.is_available() and not about.get("cpu") else "cpu")
    clock.step()
    return {}


def lockstep(about: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Lockstep's own script, with its default metrics, TensorBoard, progress bar and
    checkpoints."""
    import train
    import train_ddp
    from engine.phases import phase
    from plugins import performance

    clock.attach(phase.listeners)
    fast_step, evaluate = performance.fast_step, train.evaluate
    kept: dict[str, Any] = {}

    def timed(run: Any, step: Any) -> Any:
        # around the launch of a graph, too, in which there is no `train_step`
        take_step = fast_step(run, step)

        def take(run: Any, passes: Any) -> Any:
            due = take_step(run, passes)
            clock.step()
            return due

        return take

    def last(run: Any, save_due: bool = False) -> None:
        """Evaluate once, after the last step and its log entry and before the last checkpoint."""
        clock.mark()
        evaluate(run, save_due)
        kept.update(run.record.metrics, note=run.precision.name, weights=_weights(run.model))

    performance.fast_step, train.evaluate = timed, last
    sys.stderr.isatty = lambda: True  # type: ignore[method-assign]  # the progress bar counts
    door = train_ddp if "RANK" in os.environ or about.get("ddp") else train
    words = [
        *about["words"],
        f"save_dir={about['folder']}/run",
        f"batch_size={about['batch_size']}",
    ]
    words += [
        f"epochs={about['epochs']}",
        f"lr={about['lr']}",
        "weight_decay=0.01",
        "schedule.kind=constant",
    ]
    words += ["warmup_epochs=0", "grad_clip=0", "eval_every=1000000000", *about.get("lockstep", [])]
    words += ["device=cpu"] if about.get("cpu") else []
    code = door.main(words)
    assert code == 0, f"exit code {code}"
    return kept


def _epochs(
    work: Work, clock: Clock, net: Any, loader: Any, sampler: Any = None, shown: bool = True
) -> Iterator[tuple[Any, Any]]:
    """Yield (progress bar, batch) for the three whose documentation writes the loop out: epochs,
    mode, bar and clock. Each handles a batch as its documentation does."""
    from tqdm import tqdm

    for epoch in range(work.epochs):
        if sampler:
            sampler.set_epoch(epoch)
        net.train()
        bar = tqdm(loader, desc=f"Epoch {epoch + 1}/{work.epochs}", disable=not shown)
        for batch in bar:
            yield bar, batch
            clock.step()
    clock.mark()


def tutorial(about: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """The loop of PyTorch's own tutorials, which read each step's loss; DistributedSampler and DDP
    as there."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    work = Work(about)
    if work.size > 1:
        torch.distributed.init_process_group("nccl" if work.gpu else "gloo")
    samples, model = work.samples(), work.model().to(work.device)
    sampler: Any = DistributedSampler(samples) if work.size > 1 else None
    loader = DataLoader(
        samples,
        batch_size=work.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        drop_last=work.drop_last,
    )
    net = DistributedDataParallel(model) if work.size > 1 else model
    optimizer = torch.optim.AdamW(net.parameters(), lr=work.lr, weight_decay=work.weight_decay)
    for bar, batch in _epochs(work, clock, net, loader, sampler):
        batch = {name: value.to(work.device) for name, value in batch.items()}
        optimizer.zero_grad()
        loss = work.loss(net, batch)
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=loss.item(), refresh=False)
    return _end(work, model)


def tuned(about: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """The tutorials' loop with the advice of PyTorch's tuning guide, on one GPU: loader processes,
    pinned memory, copies that do not wait, bf16, fused AdamW; the loss is not read."""
    import torch
    from torch.utils.data import DataLoader

    work = Work(about)
    samples, model = work.samples(), work.model().to(work.device)
    processes = about.get("loader_processes", 4)
    loader = DataLoader(
        samples,
        batch_size=work.batch_size,
        shuffle=True,
        drop_last=work.drop_last,
        num_workers=processes,
        persistent_workers=processes > 0,
        pin_memory=work.gpu,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=work.lr, weight_decay=work.weight_decay, fused=True
    )
    for _, batch in _epochs(work, clock, model, loader):
        batch = {name: value.to(work.device, non_blocking=True) for name, value in batch.items()}
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(work.device.type, torch.bfloat16):
            loss = work.loss(model, batch)
        loss.backward()
        optimizer.step()
    return _end(work, model)


def accelerate(about: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Hugging Face accelerate, as in its quick tour, which does not read the loss."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(
        cpu=bool(about.get("cpu")), mixed_precision=about.get("mixed_precision", "no")
    )
    work = Work(about)
    model = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, weight_decay=work.weight_decay)
    loader = DataLoader(
        work.samples(), batch_size=work.batch_size, shuffle=True, drop_last=work.drop_last
    )
    net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _, batch in _epochs(work, clock, net, loader, shown=accelerator.is_local_main_process):
        optimizer.zero_grad()
        loss = work.loss(net, batch)
        accelerator.backward(loss)
        optimizer.step()
    return _end(work, accelerator.unwrap_model(net))


def fabric(about: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Lightning Fabric, as in its guide, which does not read the loss."""
    import torch
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader

    work = Work(about)
    fabric = Fabric(
        accelerator="gpu" if work.gpu else "cpu",
        devices=work.size,
        strategy="ddp" if work.size > 1 else "auto",
        precision=work.lightning_precision,
    )
    fabric.launch()
    model = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, weight_decay=work.weight_decay)
    net, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(
            work.samples(), batch_size=work.batch_size, shuffle=True, drop_last=work.drop_last
        )
    )
    for _, batch in _epochs(work, clock, net, loader, shown=fabric.global_rank == 0):
        optimizer.zero_grad()
        loss = work.loss(net, batch)
        fabric.backward(loss)
        optimizer.step()
    return _end(work, model)


def lightning(about: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Lightning's Trainer with its defaults: logger, progress bar, checkpoints."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    work = Work(about)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.model()

        def forward(self, *inputs: Any) -> Any:
            return self.net(*inputs)

        def training_step(self, batch: Any, number: int) -> Any:
            loss = work.loss(self, batch)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=work.lr, weight_decay=work.weight_decay)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.step()

        def on_train_epoch_end(self) -> None:
            # Called before it saves. The last checkpoint is not timed, as Lockstep's is not and the
            # others have none; those of earlier epochs are, for both, because the training
            # continues after them.
            if self.current_epoch + 1 == work.epochs:
                clock.mark()

    module = Module()
    loader = DataLoader(
        work.samples(), batch_size=work.batch_size, shuffle=True, drop_last=work.drop_last
    )
    trainer = L.Trainer(
        max_epochs=work.epochs,
        accelerator="gpu" if work.gpu else "cpu",
        devices=work.size,
        strategy="ddp" if work.size > 1 else "auto",
        precision=work.lightning_precision,
        default_root_dir=about["folder"],
    )
    trainer.fit(module, loader)
    return _end(work, module.net.to(work.device))


def ignite(about: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """pytorch-ignite: an engine, its helpers for distributed runs, a progress bar and a running
    average."""
    import ignite.distributed as idist
    import torch
    from ignite.contrib.handlers import ProgressBar
    from ignite.engine import Engine, Events
    from ignite.metrics import RunningAverage

    work = Work(about)
    if work.size > 1:
        idist.initialize("nccl" if work.gpu else "gloo")
    model = idist.auto_model(work.model().to(work.device))
    optimizer = idist.auto_optim(
        torch.optim.AdamW(model.parameters(), lr=work.lr, weight_decay=work.weight_decay)
    )
    loader = idist.auto_dataloader(
        work.samples(), batch_size=work.batch_size * work.size, shuffle=True
    )

    def step(engine: Any, batch: Any) -> float:
        model.train()
        batch = {name: value.to(work.device) for name, value in batch.items()}
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    if work.rank == 0:
        ProgressBar().attach(trainer, ["loss"])
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: clock.step())
    trainer.run(loader, max_epochs=work.epochs)
    clock.mark()
    return _end(work, getattr(model, "module", model))


def lerobot(about: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """LeRobot's own ACT through `lerobot-train` with its defaults and its own reader, on the folder
    of the same demonstrations. Finding the folder means reading it first as the others do, which
    delays the first step."""
    sys.path.insert(0, str(ROOT / "tests" / "peer"))
    import torchvision_shim

    work = Work(about)
    torchvision_shim.load()
    from lerobot.scripts import lerobot_train

    policy, demos = work.cfg.policy, work.task.demos
    steps = work.epochs * -(-len(work.train_set) // (work.batch_size * work.size))
    episodes = sorted(
        {int(e) for e in work.train_set.indices["episode_index"][work.train_set.rows].tolist()}
    )
    same = (
        "dim_model",
        "n_heads",
        "dim_feedforward",
        "n_encoder_layers",
        "n_decoder_layers",
        "n_vae_encoder_layers",
        "latent_dim",
        "chunk_size",
        "dropout",
        "use_vae",
    )
    sys.argv = [
        "lerobot-train",
        "--dataset.repo_id=local/demonstrations",
        f"--dataset.root={demos.root}",
        f"--dataset.episodes={episodes}",
        f"--output_dir={about['folder']}/lerobot",
        f"--batch_size={work.batch_size}",
        f"--steps={steps}",
        "--policy.type=act",
        "--policy.push_to_hub=false",
        f"--policy.device={work.device.type}",
        "--policy.pretrained_backbone_weights=null",
        f"--policy.n_action_steps={policy.chunk_size}",
        *(f"--policy.optimizer_{name}={work.lr}" for name in ("lr", "lr_backbone")),
        *(f"--policy.{name}={str(getattr(policy, name)).lower()}" for name in same),
    ]
    update = lerobot_train.update_policy

    def timed(*words: Any, **more: Any) -> Any:
        result = update(*words, **more)
        clock.step()
        if clock.steps == steps:
            clock.mark()
        return result

    lerobot_train.update_policy = timed
    lerobot_train.train()
    return {"note": "LeRobot's own network and loader"}


def limit(about: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Arithmetic only: batches already on the device, forward, backward, fused AdamW. As a graph,
    one of the batches again and again."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from engine import kernels
    from plugins.performance import memory

    how = about.get("limit", [])
    if "allocator" in how:
        memory.keep_freed_memory()
    work = Work(about)
    if work.size > 1:
        torch.distributed.init_process_group("nccl" if work.gpu else "gloo")
    model = work.model().to(work.device)
    if "channels_last" in how:
        kernels.apply_memory_format(model, "channels_last")
    net: Any = (
        DistributedDataParallel(model, gradient_as_bucket_view=True) if work.size > 1 else model
    )
    optimizer = torch.optim.AdamW(
        net.parameters(),
        lr=work.lr,
        weight_decay=work.weight_decay,
        fused=True,
        capturable="graph" in how,
    )
    held = work.arrays()
    count = len(work.train_set)
    generator = torch.Generator().manual_seed(work.rank)
    order = [*torch.randperm(count, generator=generator).split(work.batch_size)]
    if work.drop_last and len(order[-1]) < work.batch_size:
        order.pop()
    batches = [
        {name: values[part].to(work.device) for name, values in held.items()} for part in order
    ]
    autocast = torch.autocast(work.device.type, torch.bfloat16, enabled="bf16" in how)
    loss_of = torch.compile(work.loss) if "compile" in how else work.loss
    net.train()

    def step(batch: dict[str, Any]) -> None:
        clock.phase("forward")
        with autocast:
            loss = loss_of(net, batch)
        clock.phase("backward")
        loss.backward()
        clock.phase("optimizer step")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    take = _replayed(step, batches[0]) if "graph" in how else step
    for number in range(work.epochs * len(batches) // work.size):
        take(batches[number % len(batches)])
        clock.step()
    clock.mark()
    return _end(work, model)


def _replayed(
    step: Callable[[dict[str, Any]], None], batch: dict[str, Any]
) -> Callable[[dict[str, Any]], None]:
    """Return a step that replays the graph of `step` on `batch`, whatever its own batch is."""
    from gpu_parts import recorded

    replay = recorded(lambda: step(batch))
    return lambda _: replay()


def _weights(model: Any) -> str:
    from engine.comm import digests

    return digests.of_tensors(model.state_dict().items())


def _end(work: Work, model: Any) -> dict[str, Any]:
    import torch

    metrics = work.metrics(model) | {"weights": _weights(model)} if work.rank == 0 else {}
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return metrics


def main() -> None:
    name, about, result = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    clock = Clock(about["warmup"])
    metrics = globals()[name](about, clock)
    if os.environ.get("RANK", "0") == "0":
        shown = {
            key: metrics[key]
            for key in ("loss", "accuracy", "action_l1", "note", "weights")
            if key in metrics
        }
        # ru_maxrss would start from the parent process's.
        status = dict(
            line.split(":")
            for line in Path("/proc/self/status").read_text().splitlines()
            if "VmHWM" in line
        )
        peak = float(status["VmHWM"].split()[0]) / 1e3
        import torch

        gpu = (
            {"gpu_peak_mb": torch.cuda.max_memory_allocated() / 1e6}
            if torch.cuda.is_initialized()
            else {}
        )
        Path(result).write_text(json.dumps(clock.result() | shown | {"peak_mb": peak} | gpu))


if __name__ == "__main__":
    main()
