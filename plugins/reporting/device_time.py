"""How long the GPU waits for the host in a step, and the settings that shorten the wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.autograd import DeviceType

from engine import hooks
from engine.run import Run

NOTABLE = 1 / 3
"""Share of a step that the GPU must wait before a setting is advised."""

LAUNCHES_OF_GRAPHS = ("cudaGraphLaunch", "cuGraphLaunch")
"""Names of the host's events of the launch of a graph."""

NOTHING_SEEN = (
    "torch's profiler has seen no kernel, so the GPU's wait for the host is unknown: does the "
    "driver allow profiling?"
)


class Interval(NamedTuple):
    """Begin and end of a kernel or a copy on the GPU, in microseconds."""

    begin: float
    end: float


class StepTime(NamedTuple):
    """Milliseconds of a mean step.

    whole    from the begin of the step to the begin of the next
    kernels  in which the GPU runs at least one kernel or copy
    loading  in which the host waits for a batch, or copies the batch to the GPU
    """

    whole: float
    kernels: float
    loading: float

    @property
    def waiting(self) -> float:
        """The GPU runs nothing."""
        return max(0.0, self.whole - self.kernels)


def kernel_intervals(events: Iterable[Any], annotations: Iterable[str]) -> list[Interval]:
    """Return the intervals of the work on the GPU, of the events of torch's profiler.

    annotations  names of ranges: the profiler shows each range on the GPU, too, with the idle time
                 within the range
    """
    ranges = {*annotations}
    return [
        Interval(event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and event.name not in ranges
    ]


def covered(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals: kernels of several streams run at the same
    time."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def describe_waiting(run: Run, step: StepTime, launches_graphs: bool) -> str:
    """Return the line about the GPU's wait for the host, with the setting to type.

    launches_graphs  the traced steps launch CUDA graphs
    """
    share = step.waiting / step.whole
    measured = f"(kernels {step.kernels:.2f} ms of {step.whole:.2f} ms)"
    line = f"the GPU waits for the host {100 * share:.0f} % of a step {measured}"
    if share < NOTABLE:
        return f"{line}: the kernels take most of the step"
    return f"{line}: {_advice(run, step, launches_graphs)}"


def _advice(run: Run, step: StepTime, launches_graphs: bool) -> str:
    """Return the setting to type for a GPU that waits for most of a step."""
    dataset = run.loaders.train.dataset
    held = getattr(dataset, "in_memory", False)
    on_gpu = held and dataset.device.type == "cuda"
    if step.loading > step.waiting / 2 and not on_gpu:
        return f"data loading takes {step.loading:.2f} ms: {_faster_loading(run, held)}"
    if launches_graphs:
        return f"steps are launches of a graph already; {_larger_batch(run)}"
    reason = next(iter(hooks.find_conflicts("graph", run=run, on_gpu=True)), None)
    if reason is not None:
        return f"cuda_graph does not apply, because {reason}; {_fewer_launches(run)}"
    if run.cfg.cuda_graph in (False, "false"):
        return "type cuda_graph=true"
    return f"the line `cuda_graph:` of this run has the reason; {_fewer_launches(run)}"


def _faster_loading(run: Run, held: bool) -> str:
    """Return the setting for a GPU that waits for data.

    held  the data are in the host's memory
    """
    if held:
        return "type cache=device"
    return f"type num_workers={2 * run.cfg.num_workers or 4}, or cache=device if the GPU has room"


def _fewer_launches(run: Run) -> str:
    """Return the setting for a step that cannot be recorded."""
    if run.plan.compile == "off":
        return "type compile=default"
    return _larger_batch(run)


def _larger_batch(run: Run) -> str:
    """Return the batch size for a step of few, longer kernels."""
    plan = run.plan
    if plan.accumulation > 1 and not plan.workers:
        at_once = plan.micro_batch * plan.accumulation
        return f"type batch_size={at_once} gradient_accumulation_steps=1: the same steps"
    return f"type batch_size={2 * plan.micro_batch}, which is a different training"
