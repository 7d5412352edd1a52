"""The calls of train.py that plugins fill. Each class stands for one plugin where its folder is
absent: then a call does nothing, or returns its argument.

`resilience`, `parallel`, `performance`, `preflight` and `reporting` are the modules of plugins/, or
these classes. A training without the plugins takes the same steps, with less protection and less
output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from engine import hooks
from engine.errors import LockstepError


class NoStop:
    """A run that nobody stops.

    reason  why this process wants to stop; empty
    """

    reason = ""

    def __init__(self, max_time_s: float = 0.0):
        pass

    def install_handlers(self) -> None:
        """No signal is handled."""


class Resilience:
    """Failures become one line and an exit code, hangs are found, signals stop a run."""

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

NEEDS: dict[str, tuple[tuple[str, tuple[Any, ...]], ...]] = {
    "resilience": (("max_time_s", (0.0,)), ("oom", ("stop",)), ("multi_gpu", ("auto", "none"))),
    "parallel": (
        ("virtual_workers", (0,)),
        ("ddp.strategy", ("ddp",)),
        ("ddp.comm_hook", ("none",)),
        ("ddp.sync_bn", (False,)),
    ),
    "performance": (
        ("compile", ("auto", "off")),
        ("cuda_graph", (False,)),
        ("cache", ("auto", "none")),
        ("ddp.backend", ("auto", "gloo")),
    ),
    # The table of excluded settings keeps a CUDA graph from a step of several parts, and refuses
    # sampler=balanced for data without labels.
    "preflight": (("cuda_graph", (False,)), ("sampler", ("shuffle",))),
    "reporting": (("record", (0,)), ("wandb.enable", (False,)), ("mlflow.enable", (False,))),
}
"""By plugin: the settings that need it, each with the values that do without it."""


def check_plugins(cfg: Any, strict: bool) -> None:
    """Raise LockstepError for a setting whose plugin is absent. `strict`: train_ddp.py, which needs
    resilience and preflight."""
    present = hooks.load()
    for name in ("resilience", "preflight"):
        if strict and name not in present:
            todo = "restore the folder, or use train.py"
            raise LockstepError(f"train_ddp.py needs plugins/{name}", "plugins", todo)
    for name, settings in NEEDS.items():
        for key, without in settings if name not in present else ():
            value = cfg
            for part in key.split("."):
                value = getattr(value, part)
            if value not in without:
                setting = f"{key}={value}"
                todo = "restore the folder, or drop the setting"
                raise LockstepError(f"{setting} needs plugins/{name}", key, todo)
