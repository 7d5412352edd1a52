"""The plugins that train.py calls: `resilience`, `parallel`, `performance`, `preflight`,
`reporting`.

Each is a module of plugins/ or, if the folder is absent, a class of this file. The methods of the
classes do nothing, or return an argument. A training without plugins takes the same steps, with
less protection and less output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from engine import hooks
from engine.errors import LockstepError


class NoStop:
    """The absent request to stop.

    reason  the reason for a stop; empty, because there is none
    """

    reason = ""

    def __init__(self, max_time_s: float = 0.0):
        pass

    def install_handlers(self) -> None:
        """Handle no signal."""


class Resilience:
    """Failures in one line and an exit code, a search for hangs, a stop by signals."""

    StopRequest = NoStop

    def guarded(self, main: Callable[..., int]) -> Callable[..., int]:
        return main

    def Watchdog(self, *arguments: Any) -> Any:
        return nullcontext()

    def become_torchrun(self, cfg: Any, strict: bool) -> None: ...
    def prepare_advice(self, run: Any) -> None: ...
    def check_all_reduced(self, net: Any) -> None: ...

    def check_outcomes(self, run: Any, outcomes: Any) -> None: ...

    @contextmanager
    def keep(self, run: Any, state: Any) -> Iterator[None]:
        yield


class Parallel:
    """Virtual workers, FSDP2, and the options of DDP."""

    def shard(self, model: nn.Module, *arguments: Any) -> nn.Module:
        return model

    def check_strategy(self, run: Any) -> None: ...

    def sync_batch_norm(self, model: nn.Module, world: Any) -> nn.Module:
        return model

    def add_comm_hook(self, net: Any, kind: str, workers: Any) -> Any:
        return net


class Performance:
    """Speed without a change of the steps: compilation, CUDA graphs."""

    def resolve(self, cfg: Any, world: Any, plan: Any) -> Any:
        return plan

    def recorded(self, run: Any, step: Any) -> Any:
        return step

    def unloaded(self) -> Any:
        return nullcontext()

    def finish(self, run: Any) -> Any:
        return run.plan


class Preflight:
    """Checks before the first step, and comparisons of the ranks."""

    def compare_ranks(self, run: Any) -> None: ...
    def compare_weights(self, run: Any) -> None: ...
    def sanity_check(self, run: Any) -> None: ...
    def check_sums(self, run: Any) -> None: ...


class Reporting:
    """The plan before the first step, and trackers."""

    def announce(self, world: Any, cfg: Any, always: bool) -> None: ...
    def check_trackers(self, cfg: Any, world: Any) -> None: ...
    def training(self, run: Any, strict: bool) -> None: ...


resilience: Any = hooks.plugin("resilience") or Resilience()
parallel: Any = hooks.plugin("parallel") or Parallel()
performance: Any = hooks.plugin("performance") or Performance()
preflight: Any = hooks.plugin("preflight") or Preflight()
reporting: Any = hooks.plugin("reporting") or Reporting()


class Need(NamedTuple):
    """A setting that needs a plugin, except with the values `without`."""

    plugin: str
    key: str
    without: tuple[Any, ...]


NEEDS = (
    Need("resilience", "max_time_s", (0.0,)),
    Need("resilience", "oom", ("stop",)),
    Need("resilience", "multi_gpu", ("auto", "none")),
    Need("parallel", "virtual_workers", (0,)),
    Need("parallel", "ddp.strategy", ("ddp",)),
    Need("parallel", "ddp.comm_hook", ("none",)),
    Need("parallel", "ddp.sync_bn", (False,)),
    Need("performance", "compile", ("auto", "off")),
    Need("performance", "cuda_graph", (False,)),
    Need("performance", "cache", ("auto", "none")),
    Need("performance", "ddp.backend", ("auto", "gloo")),
    # The table of excluded settings keeps a CUDA graph from a step of several parts, and refuses
    # sampler=balanced for data without labels.
    Need("preflight", "cuda_graph", (False,)),
    Need("preflight", "sampler", ("shuffle",)),
    Need("reporting", "record", (0,)),
    Need("reporting", "wandb.enable", (False,)),
    Need("reporting", "mlflow.enable", (False,)),
)


def check_plugins(cfg: Any, strict: bool) -> None:
    """Raise LockstepError for a setting that needs an absent plugin.

    strict  the page is train_ddp.py, which needs resilience and preflight
    """
    present = hooks.load()
    for name in ("resilience", "preflight"):
        if strict and name not in present:
            todo = "restore the folder, or use train.py"
            raise LockstepError(f"train_ddp.py needs plugins/{name}", "plugins", todo)
    for need in NEEDS:
        value = attrgetter(need.key)(cfg)
        if need.plugin not in present and value not in need.without:
            what = f"{need.key}={value} needs plugins/{need.plugin}"
            raise LockstepError(what, need.key, "restore the folder, or drop the setting")
