"""The plugins that train.py calls: `resilience`, `parallel`, `performance`, `preflight`,
`reporting`.

Each is a module of plugins/ or, if the folder is absent, a class of this file. The functions of the
classes do nothing, or return an argument. A training without plugins takes the same steps, with
less protection and less output.
"""

from __future__ import annotations

from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

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


def do_nothing(*arguments: Any, **options: Any) -> None:
    """Stand for an absent check, or an absent report."""


def return_first(value: Any, *arguments: Any) -> Any:
    """Stand for an absent change of the first argument."""
    return value


def return_last(*arguments: Any) -> Any:
    """Stand for an absent change of the last argument."""
    return arguments[-1]


def empty_context(*arguments: Any) -> Any:
    """Stand for an absent context."""
    return nullcontext()


class Resilience:
    """Failures in one line and an exit code, a search for hangs, a stop by signals."""

    StopRequest = NoStop
    guarded = staticmethod(return_first)
    Watchdog = staticmethod(empty_context)
    keep = staticmethod(empty_context)
    become_torchrun = staticmethod(do_nothing)
    prepare_advice = staticmethod(do_nothing)
    check_all_reduced = staticmethod(do_nothing)
    check_outcomes = staticmethod(do_nothing)


class Parallel:
    """Virtual workers, FSDP2, and the options of DDP."""

    shard = staticmethod(return_first)
    sync_batch_norm = staticmethod(return_first)
    add_comm_hook = staticmethod(return_first)
    check_strategy = staticmethod(do_nothing)


class Performance:
    """Speed without a change of the steps: compilation, CUDA graphs."""

    resolve = staticmethod(return_last)
    fast_step = staticmethod(return_last)
    wrapping = staticmethod(empty_context)

    def finish(self, run: Any) -> Any:
        return run.plan


class Preflight:
    """Checks before the first step, and comparisons of the ranks."""

    compare_ranks = staticmethod(do_nothing)
    compare_weights = staticmethod(do_nothing)
    sanity_check = staticmethod(do_nothing)
    check_sums = staticmethod(do_nothing)


class Reporting:
    """The plan before the first step, and trackers."""

    announce = staticmethod(do_nothing)
    check_trackers = staticmethod(do_nothing)
    training = staticmethod(do_nothing)


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
    Need("performance", "cuda_graph", ("auto", False)),
    Need("performance", "cache", ("auto", "none")),
    Need("performance", "arithmetic", ("native",)),
    Need("performance", "ddp.backend", ("auto", "gloo")),
    # plugins/preflight/rules.py refuses unsuitable uses of these settings: shares that cannot be
    # dealt, a CUDA graph of a step with several parts, sampler=balanced for data without labels,
    # arithmetic=capped on a GPU.
    Need("preflight", "ddp.shares", ([],)),
    Need("preflight", "cuda_graph", ("auto", False)),
    Need("preflight", "sampler", ("shuffle",)),
    Need("preflight", "arithmetic", ("native",)),
    Need("reporting", "record", (0,)),
    Need("reporting", "wandb.enable", (False,)),
    Need("reporting", "mlflow.enable", (False,)),
)


def check_plugins(cfg: Any, strict: bool) -> None:
    """Raise LockstepError for a setting that needs an absent plugin.

    strict  the script is train_ddp.py, which needs resilience and preflight
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
