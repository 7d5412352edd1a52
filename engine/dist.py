"""The processes: who am I, and what do we say to each other. No other file reads RANK or calls a collective.

Without a process group every operation of `World` does nothing, so the loop needs no `if ddp`.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from engine import agent, compiler, cores, oom, shm_backend
from engine.config import DDP, Config
from engine.contract import LockstepError, amount
from engine.phases import phase

T = TypeVar("T")

# A broadcast per forward otherwise; engine/loop.py makes buffers equal before they are used. Torch 2.13 renamed it.
_NO_BUFFER_SYNC: dict[str, Any] = {
    name: False
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
}
if len(_NO_BUFFER_SYNC) > 1:
    del _NO_BUFFER_SYNC["broadcast_buffers"]


@dataclass(frozen=True)
class World:
    """This process among all; made once, by `join`.

    devices  GPUs that DataParallel spreads one process over; empty without --multi-gpu dp
    grouped  whether there is a process group (of one, perhaps)
    store    what the ranks leave notes for each other in; None without a process group
    memory   the same, but shared with the attempts of torchrun that were before
    place    the part of the machine whose cores it keeps to, in words; empty: all of it
    local_size  processes on this machine, 1 where the launcher doesn't say
    network  how this machine and the others find each other, in words, where `join` has chosen it
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    devices: tuple[int, ...] = ()
    grouped: bool = False
    store: Any = None
    memory: Any = None
    place: str = ""
    local_size: int = 1
    network: str = ""

    @property
    def main(self) -> bool:
        """Rank 0: the only one that writes files and prints."""
        return self.rank == 0

    def sharers(self, memory: torch.device) -> int:
        """How many processes of this machine keep their own copy of something in `memory`."""
        return -(-self.local_size // torch.cuda.device_count()) if memory.type == "cuda" else self.local_size

    def sum(self, *tensors: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Add up over all ranks, in place; every tensor on `device`. Stays on the device: no host sync."""
        if self.size > 1:
            with phase.during("all_reduce", waits=True):
                for tensor in tensors:
                    dist.all_reduce(tensor, group=group)

    def begin_sum(self, tensor: Tensor) -> Callable[[], Any]:
        """The same for one tensor, but it goes on meanwhile; call what this returns before `tensor` is used."""
        if self.size == 1:
            return lambda: None
        work = dist.all_reduce(tensor, async_op=True)
        return lambda: work.wait()

    def time_sum(self, count: int, rounds: int = 8, backend: str | None = None) -> float:
        """(all ranks) Seconds that a `sum` of so many bytes takes, in the median; 0 in a world of one.

        backend  measure another one than that of the run
        """
        if self.size == 1:
            return 0.0
        numbers, start = torch.zeros(max(1, count // 4), device=self.device), torch.zeros(1, device=self.device)
        group = dist.new_group(backend=backend) if backend else None
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda device: None
        times = []
        for _ in range(rounds + 1):  # the first one connects
            self.sum(start, group=group)  # all begin together
            wait(self.device)
            began = time.perf_counter()
            self.sum(numbers, group=group)
            wait(self.device)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Around a copy from the device to the host: on GPUs this, and not the collective, is where a rank waits."""
        return phase.during("waiting for the device", waits=self.size > 1)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank (pickled: for small things, now and then)."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with phase.during("all_gather", waits=True):
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with phase.during("broadcast", waits=not self.main):
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def collect(self, flats: list[Tensor], like: Tensor) -> list[list[Tensor]]:
        """Every rank's flat tensors, of the type of `like`, by rank, in the memory of rank 0's host; nothing on the
        others. In pieces, for the device need not have room for another's at once."""
        everyones = []
        for rank, lengths in enumerate(self.gather([len(flat) for flat in flats])):
            collected: list[Tensor] = []
            while len(collected) < len(lengths):
                first, last = len(collected), len(collected) + 1
                while last < len(lengths) and sum(lengths[first : last + 1]) <= 1 << 24:
                    last += 1
                mine = rank == self.rank
                piece = torch.cat(flats[first:last]) if mine else like.new_empty(sum(lengths[first:last]))
                with phase.during("broadcast", waits=True):  # gloo has no other way from a GPU
                    dist.broadcast(piece, src=rank)
                collected += piece.cpu().split(lengths[first:last]) if self.main else [like] * (last - first)
            everyones.append(collected)
        return everyones if self.main else []

    def share_out(self, groups: list[dict[str, Any]], kind: type[Optimizer], **settings: Any) -> Any:
        """torch's ZeroRedundancyOptimizer around `kind`, with a group of several ranks; it takes a second to load.

        The parameters move into one piece of memory per rank: one broadcast for each, and not one per parameter.
        """
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, kind, parameters_as_bucket_view=True, **settings)

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; where one fails in words, all stop with the first such error."""
        return self._agree(work, self.gather)

    def on_main(self, work: Callable[[], T], local: bool = False) -> T:
        """Run `work` on rank 0 alone and give its result, or its error, to all; with `local` the others get None."""
        work = work if self.main else lambda: None  # type: ignore[assignment, return-value]
        return self._agree(work, lambda outcome: [self.broadcast(outcome)], share=not local)

    def _agree(self, work: Callable[[], Any], exchange: Callable[[Any], list[Any]], share: bool = False) -> Any:
        result, problem = None, None
        try:
            result = work()
        except LockstepError as raised:
            problem = (str(raised), raised.exit_code)
        outcomes = exchange((problem, result if share else None))
        failed = next((outcome[0] for outcome in outcomes if outcome[0]), None)
        if failed:
            error = LockstepError(failed[0], exit_code=failed[1])
            error.everywhere = True
            raise error
        return outcomes[0][1] if share else result

    def wrap(self, model: nn.Module, cfg: DDP, warn: Callable[[str], Any]) -> nn.Module:
        """The `net` of a `model` on `device`: DDP where there is a group, DataParallel over `devices`, else itself."""
        if self.grouped and any(p.requires_grad for p in model.parameters()):
            if cfg.sync_bn and self.device.type == "cpu":
                raise LockstepError(
                    "ddp.sync_bn=true, but torch's SyncBatchNorm runs on GPUs only",
                    where="ddp.sync_bn",
                    todo="drop it, or use GroupNorm, which needs no synchronising",
                )
            if cfg.sync_bn:
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            _parameter_names[:] = [name for name, p in model.named_parameters() if p.requires_grad]
            with compiler.unloaded():
                net = DistributedDataParallel(
                    model,
                    device_ids=[self.device.index] if self.device.type == "cuda" else None,
                    bucket_cap_mb=cfg.bucket_cap_mb,
                    gradient_as_bucket_view=cfg.gradient_as_bucket_view,
                    find_unused_parameters=cfg.find_unused_parameters,
                    static_graph=cfg.static_graph,
                    **_NO_BUFFER_SYNC,
                )
            self._compress(net, cfg.comm_hook, warn)
            return net
        if len(self.devices) > 1:
            return DataParallel(model, device_ids=list(self.devices))
        return model

    def _compress(self, net: DistributedDataParallel, kind: str, warn: Callable[[str], Any]) -> None:
        """Let DDP sum before it divides, where sums cost little, or send fewer bytes, by torch's own hooks."""
        if self.size == 1:
            return
        if kind == "bf16" and dist.get_backend() != "nccl":  # torch itself asks what it was built with
            backend = dist.get_backend().replace("shm", "gloo")
            warn(f"warning: ddp.comm_hook=bf16 is for NCCL, not for {backend}: gradients are sent as they are")
            kind = "none"
        if kind == "none":
            if shm_backend.in_use():
                net.register_comm_hook([], shm_backend.sum_then_divide)
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if kind == "powersgd":
            # Without memory from step to step: it would not be in a checkpoint, and a gradient that is not finite would
            # stay in it for ever.
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=2, start_powerSGD_iter=2, use_error_feedback=False, warm_start=False
            )
            net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            return
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        net.register_comm_hook(None, hooks[kind])

    def accumulate(self, net: nn.Module, closes_step: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward *and* backward of a micro-batch: gradients meet only in the one that closes the step.

        The forward belongs inside: DDP decides there whether its hooks will all-reduce.
        """
        if isinstance(net, DistributedDataParallel) and not closes_step:
            return net.no_sync()
        return contextlib.nullcontext()

    def check_all_reduced(self, net: nn.Module) -> None:
        """After the backward passes of a step, before anything else meets. DDP all-reduces a bucket once all its
        gradients are there: a rank that lacks one would answer the others' all-reduce with the next thing it sums."""
        if isinstance(net, DistributedDataParallel):
            net._check_reducer_finalized()

    def unify(self, tensors: Iterable[Tensor], mean: bool) -> None:
        """Give all ranks rank 0's, or the mean of theirs; of whole numbers always rank 0's."""
        for tensor in tensors if self.size > 1 else ():
            if mean and tensor.is_floating_point():
                self.sum(tensor)
                tensor.div_(self.size)
            else:
                whole = tensor.contiguous()
                with phase.during("broadcast", waits=True):
                    dist.broadcast(whole, src=0)
                tensor.copy_(whole)

    def remember(self, key: str, value: str) -> None:
        """(main only) Keep a text for the next attempt, if torchrun makes one."""
        if self.memory is not None:
            self.memory.set(key, value)

    def recall(self, key: str) -> str:
        """(main only) What an attempt before this one has remembered, or nothing."""
        return self.memory.get(key).decode() if self.memory is not None and self.memory.check([key]) else ""

    def own_random_numbers(self) -> contextlib.AbstractContextManager[Any]:
        """What is drawn inside doesn't move the stream of the training."""
        gpus = list(self.devices) or ([self.device.index] if self.device.type == "cuda" else [])
        return torch.random.fork_rng(devices=gpus)

    def leave(self) -> None:
        """Tear the group down after success. On failure don't: destroying a group whose peers are gone can hang."""
        if self.grouped:
            # Autograd graphs that still hold DDP's hooks abort the process when they die after the group.
            gc.collect()
            with phase.during("barrier", waits=True):
                dist.barrier()
            dist.destroy_process_group()
            global _joined
            _joined = None


def joined() -> World | None:
    """The world this process is in, if it has come that far: for whoever must say what went wrong."""
    return _joined


_joined: World | None = None


def parameter_names() -> list[str]:
    """Of what DDP trains, in its order: its errors give numbers."""
    return _parameter_names


_parameter_names: list[str] = []


@dataclass(frozen=True)
class Launch:
    """What a launcher said through the environment."""

    rank: int
    local_rank: int
    size: int
    local_size: int = 0  # processes on this machine; 0 where the launcher doesn't say


def environment() -> Launch | None:
    """RANK, WORLD_SIZE and LOCAL_RANK, checked; None for a plain `python`. A half-set environment is an error."""
    env = os.environ
    if "RANK" not in env:
        if _number("WORLD_SIZE", "1") > 1:
            raise LockstepError(
                f"WORLD_SIZE={env['WORLD_SIZE']} is set but RANK is not",
                where="environment",
                todo="start with torchrun, or `unset WORLD_SIZE` to train in one process",
            )
        return None
    if "WORLD_SIZE" not in env:
        raise LockstepError(
            f"RANK={env['RANK']} is set but WORLD_SIZE is not",
            where="environment",
            todo="start with torchrun, or `unset RANK` to train in one process",
        )
    rank, size = _number("RANK", "0"), _number("WORLD_SIZE", "1")
    if not 0 <= rank < size:
        raise LockstepError(f"RANK={rank} with WORLD_SIZE={size}", where="environment", todo="RANK counts from 0")
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 and name not in env]
    if missing:
        raise LockstepError(
            f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not",
            where="environment",
            todo="start with torchrun, which sets them all",
        )
    return Launch(rank, _number("LOCAL_RANK", "0"), size, _number("LOCAL_WORLD_SIZE", "0"))


def _number(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise LockstepError(f"{name}={text!r} is no whole number", where="environment", todo=f"unset {name}") from None


def speaks() -> bool:
    """Whether this process prints what all processes of its machine meet, before there is a World: one per machine."""
    return os.environ.get("LOCAL_RANK", "0") in ("0", "")


def forgotten_launch() -> str:
    """A warning where another launcher clearly wanted several processes but set no RANK; empty otherwise."""
    env = os.environ
    if "RANK" in env:
        return ""
    if any(name.startswith("ACCELERATE_") for name in env):
        return (
            "accelerate started this process without RANK (its --cpu mode starts one process only): training in ONE "
            "process; use `accelerate launch --multi_gpu --num_processes=N` or torchrun"
        )
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        if env.get(name, "1").isdigit() and int(env.get(name, "1")) > 1:
            return (
                f"{name}={env[name]} but RANK is not set: each task would train alone; start one task per node with "
                "`srun --ntasks-per-node=1 ./train_multigpu.sh`"
            )
    return ""


def join(cfg: Config, launch: Launch | None, always: bool = False) -> World:
    """Pick this process's device and, if a launcher started it (or `always`), join the process group."""
    global _joined
    device, devices = _device(cfg, launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before any other CUDA call, or every rank opens a context on GPU 0
    if launch is None and not always:
        _joined = World(0, 0, 1, device, devices)
        return _joined
    alone = launch is None  # a group of one needs no address
    place = ""
    if launch is not None and cfg.ddp.bind_cores:  # before most threads, which stay where they are
        place = cores.bind(device, launch.local_rank, launch.local_size)
    launch = launch or Launch(0, 0, 1)
    backend: str = cfg.ddp.backend
    if backend == "auto":
        one_machine = launch.size == launch.local_size or not launch.local_size  # or unknown
        backend = "nccl" if device.type == "cuda" else "shm" if launch.size > 1 and one_machine else "gloo"
    try:
        lasting = dist.HashStore() if alone else _meet(launch, timedelta(seconds=cfg.ddp.init_timeout_s))
        store = lasting if alone else _of_this_attempt(lasting, launch, timedelta(seconds=cfg.ddp.init_timeout_s))
        network = "" if launch.size == launch.local_size or alone else _choose_network(store, launch)
        dist.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.size,
            # A backstop: watch.py notices first, and knows whom to name.
            timeout=timedelta(seconds=cfg.ddp.timeout_s + 15),
            device_id=device if device.type == "cuda" and backend == "nccl" else None,
        )
    except (dist.DistError, RuntimeError) as error:
        raise _cannot_join(error, launch) from error
    # A name space of our own: the group's keys are none of our business.
    notes = dist.PrefixStore("lockstep", store)
    memory = dist.PrefixStore("lockstep", lasting)
    _joined = World(
        launch.rank, launch.local_rank, launch.size, device,
        grouped=True, store=notes, memory=memory, place=place,
        local_size=max(1, launch.local_size), network=network,
    )  # fmt: skip
    return _joined


def _meet(launch: Launch, timeout: timedelta) -> dist.Store:
    """The key-value store the ranks meet in; under torchrun it is the agent's, the same for all attempts."""
    if launch.size == 1 and "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.size, timeout=timeout))
    return store


def _of_this_attempt(store: dist.Store, launch: Launch, timeout: timedelta) -> dist.Store:
    """The part of the store in which a restarted rank doesn't read the addresses of the dead ones (pytorch#167288)."""
    # With a dynamic rendezvous over several nodes the count of restarts may differ between them: no prefix there.
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" or agent.STATIC in os.environ:
        store = dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store = dist.PrefixStore(f"time{oom.times()}", store)
    # Under torchrun the store is the agent's and always there: see here that the ranks are, or gloo waits timeout_s.
    store.set(f"rank{launch.rank}_is_at", agent.way_to(os.environ.get("MASTER_ADDR", "localhost"))[0])
    store.wait([f"rank{rank}_is_at" for rank in range(launch.size)], timeout)
    return store


def _choose_network(store: dist.Store, launch: Launch) -> str:
    """Name to gloo and NCCL, unless the person has, the network interface by which this machine and the others find
    each other; returns it in words. Gloo would take the one that this machine's own name stands for, on many 127.0.0.1;
    NCCL the first it finds, which may be a bridge that leads nowhere.
    """
    if {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & os.environ.keys():
        return ""
    # For its own machine MASTER_ADDR may be 127.0.0.1, which leads nowhere: there the way to somebody else counts.
    others = (store.get(f"rank{rank}_is_at").decode() for rank in range(launch.size))
    for there in itertools.chain([os.environ.get("MASTER_ADDR", "")], others):
        address, interface = agent.way_to(there) if there else ("", "")
        if interface and not agent.is_loopback(address):
            os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
            return f"{interface} ({address})"
    return ""  # all on one machine, or no Linux


def _cannot_join(error: Exception, launch: Launch) -> LockstepError:
    text = str(error).splitlines()[0]
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return LockstepError(
            f"port {os.environ.get('MASTER_PORT')} is in use",
            where=where,
            todo="start with `torchrun --standalone` or ./train_multigpu.sh, which take a free port, or give another",
        )
    todo = "check that all processes start and reach that address; ddp.init_timeout_s is how long to wait for them"
    if "connectFullMesh" in text:
        todo = (
            "they reach that address, but not each other: let the firewall pass all ports between the machines; "
            f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')} is the network interface"
        )
    return LockstepError(
        f"rank {launch.rank} of {launch.size} could not join the others: {text}", where=where, todo=todo, exit_code=6
    )


def check_gpu_ids(gpu_ids: list[int], visible: int) -> None:
    wrong = [gpu for gpu in gpu_ids if gpu >= visible]
    if wrong:
        raise LockstepError(
            f"gpu_ids={wrong} asked, {visible} visible", where="gpu_ids", todo=f"choose from 0..{visible - 1}"
        )


def _device(cfg: Config, launch: Launch | None) -> tuple[torch.device, tuple[int, ...]]:
    """(device of this process, devices of DataParallel)."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() and cfg.device != "cpu" else 0
    if cfg.device == "cuda" and not visible:
        raise LockstepError("device=cuda, but no GPU is visible", where="device", todo="drop it, or check nvidia-smi")
    if cfg.ddp.backend == "nccl" and not visible:
        raise LockstepError(
            "ddp.backend=nccl needs CUDA, and no GPU is visible",
            where="ddp.backend",
            todo="leave it at auto: gloo is used on the CPU",
        )
    if cfg.multi_gpu == "dp" and launch is not None:
        raise LockstepError(
            "--multi-gpu dp is for one process, but torchrun started this one",
            where="multi_gpu",
            todo="use `python train.py --multi-gpu dp`, or --multi-gpu ddp with torchrun",
        )
    if visible and launch is None:  # under torchrun they were chosen by whoever started it
        check_gpu_ids(cfg.gpu_ids, visible)
    if not visible:
        return torch.device("cpu"), ()
    if launch is None:
        devices = tuple(cfg.gpu_ids or range(visible)) if cfg.multi_gpu == "dp" else ()
        return torch.device("cuda", devices[0] if devices else (cfg.gpu_ids or [0])[0]), devices
    if launch.local_rank >= visible and cfg.ddp.backend != "gloo":
        raise LockstepError(
            f"LOCAL_RANK={launch.local_rank}, but {amount(visible, 'GPU')} visible",
            where="environment",
            todo=f"start at most {visible} processes on this machine, or check CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", launch.local_rank % visible), ()
