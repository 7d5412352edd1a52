"""Look at one training pass of a few samples, before the first step.

The step is the same on any number of processes, and after a resume, only if a pass depends on the
weights, on its samples and on their seeds. This module tries the training `loss` in training mode,
and looks at the values that a pass changes, the gradients, the calls of `net`, the generators and
the collectives. All values are put back.

A value that a pass changes is no fault by itself: a cache, a counter for a log, the output of a
layer that the loss reads in the same pass. Whether the value matters is tried: the same pass, after
another pass and without it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine import global_loss
from engine.data.batches import batch_info, map_tensors
from engine.errors import LockstepError, few
from engine.hooks import check as check_returned
from engine.private import NORM_WITH_STATISTICS, PlainDispatchMode, non_persistent_buffers
from engine.run import Run
from engine.seeds import seed_generators
from engine.trial import project_gradients, rng_states
from plugins.preflight.partition import partition_dependent
from plugins.preflight.snapshot import (
    Snapshot,
    isolated,
    numbers_of_data,
    raise_changed_data,
    snapshot_of,
)
from plugins.preflight.state_trial import try_after_step

SAMPLES = 4
"""Samples of a pass; an even number, because timm's Mixup refuses an odd one."""

PERTURBED = 0.5
"""The noise that is added to the weights, as a share of their size. A teacher that is an average of
the weights, with a momentum of .999, then moves the loss by more than rounding does."""

CLOSE = 2e-6
"""The relative difference that rounding explains in float32."""

COLLECTIVES = {
    "allreduce", "allgather", "_allgather_base", "alltoall", "alltoall_base", "broadcast", "gather",
    "reduce", "reduce_scatter", "_reduce_scatter_base", "scatter", "send", "recv",
}  # fmt: skip

SKIP = "check_resume=false trains a run that is never resumed"
SKIP_SUMS = "(check_sums=false skips this check)"
ONCE_A_STEP = (
    "name it in `state_attributes`, and change it once a step, in `after_step`, from the weights "
    "and from sums of the global batch (`for_state` of the Loss); the number of the step is "
    "batch['lockstep'].step"
)


class Cure(NamedTuple):
    """The message for a fault.

    what   the problem; the field `names` holds the places
    where  the place in the code of the task
    todo   what to do
    """

    what: str
    where: str
    todo: str

    def error(self, names: str = "") -> LockstepError:
        return LockstepError(
            self.what.format(names=names), self.where.format(names=names), self.todo
        )


CURES = {
    "backward": Cure(
        "a gradient of {names} is there before the backward pass: `loss` calls .backward() itself",
        "the task's `loss`",
        "drop that call, and return the sum in the Loss: the engine computes the gradients "
        "(torch.autograd.grad is allowed, for a penalty)",
    ),
    "bypass": Cure(
        "`loss` does not call `net`: on several processes no gradients would be added up",
        "the task's `loss`",
        "call net(...), the argument, and nothing of net.module or self; what else the loss needs "
        "of the model goes into its `forward`",
    ),
    "attribute": Cure(
        "`loss` uses net{names}, which `net` lacks on several processes, where it is DDP",
        "the task's `loss`",
        "call net(...), and let `forward` of the model do the rest",
    ),
    "groups": Cure(
        "a pass changes {names} of the optimizer, and the next step would overwrite it",
        "the task's `loss`",
        "use optim.* and schedule.*, a group with an `lr` of its own in `optimizer`, or return a "
        "scheduler of torch from `scheduler`",
    ),
    "collective": Cure(
        "`loss` calls a collective ({names}): its passes would not be those of one process",
        "the task's `loss`, or the model",
        "return sums, which the engine adds up over passes and processes; to compare with all "
        f"samples of the global batch: gather_batch {SKIP_SUMS}",
    ),
    "max_norm": Cure(
        "nn.Embedding(max_norm=...) changes its weight {names} in each forward pass, on each "
        "process other rows",
        "the task's `model`",
        "drop max_norm, and scale the rows that are looked up: "
        "x * (max_norm / x.norm(dim=-1, keepdim=True).clamp(min=max_norm))",
    ),
    "weight": Cure(
        "a forward pass changes the weight {names}: another number of passes or processes, other "
        "weights",
        "the task's `loss`, or the model",
        "change it once a step, in `after_step`, from the weights and from sums of the global "
        "batch (`for_state` of the Loss); what is computed from the first batch goes into `model`",
    ),
    "state": Cure(
        "the loss depends on {names}, which a pass changes and no checkpoint holds",
        "the task's `loss`, or the model",
        f"{ONCE_A_STEP}; {SKIP}",
    ),
    "declared": Cure(
        "a pass changes {names}, a state of the task: another number of passes or processes, "
        "another state",
        "the task's `loss`",
        "change it in `after_step`, from the weights and from sums of the global batch "
        "(`for_state` of the Loss); give a module with statistics `.eval()`",
    ),
    "hidden": Cure(
        "the loss of the same {names} samples is different the second time, in training mode",
        "the task's `loss`, or the model",
        "draw from batch['lockstep'].seed, and keep nothing that changes it; random_samples=warn "
        "trains all the same",
    ),
}
"""{fault: its message}"""


class Outcome(NamedTuple):
    """The numbers of a pass.

    numbers  {name: total, weight, a sum, or projections of a gradient}, float64
    trained  names of the weights that require a gradient after the pass
    error    the type of an exception that the pass has raised, or an empty text
    """

    numbers: dict[str, Tensor]
    trained: frozenset[str]
    error: str = ""

    def distance(self, other: Outcome) -> float:
        """Return the largest relative difference; infinity if the outcomes are of two kinds."""
        kinds = (self.trained, self.error, self.numbers.keys())
        if kinds != (other.trained, other.error, other.numbers.keys()):
            return float("inf")
        largest = 0.0
        for name, mine in self.numbers.items():
            theirs = other.numbers[name]
            scale = float(torch.maximum(mine.abs(), theirs.abs()).max())
            apart = float((mine - theirs).abs().nan_to_num(nan=0.0).max())
            if scale > 0:
                largest = max(largest, apart / scale)
        return largest


class Net(nn.Module):
    """Stand for DDP: a module without the model's attributes, which counts its calls.

    module  the model
    calls   number of forward passes
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.module = model
        self.calls = 0

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return self.module(*arguments, **named)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise CURES["attribute"].error(f".{name}") from None

    def __getitem__(self, key: Any) -> Any:
        """Refuse an item, such as a layer of an nn.Sequential.

        DDP has no items.
        """
        raise CURES["attribute"].error(f"[{key!r}]")


class Collectives(PlainDispatchMode):
    """Record the names of the collectives that run.

    The collectives of a backend in C++ are operations of torch. The methods of a backend in Python
    are not, and are wrapped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.wrapped = contextlib.ExitStack()

    def __enter__(self) -> Any:
        kind: Any = type(dist.group.WORLD)
        if kind.__module__.startswith("torch."):  # its methods are in C++
            return super().__enter__()
        for name, method in [*vars(kind).items()]:
            if name in COLLECTIVES:
                self.wrapped.callback(setattr, kind, name, method)
                setattr(kind, name, self._recorded(name, method))
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.wrapped.close()
        return super().__exit__(*error)

    def _recorded(self, name: str, method: Any) -> Callable[..., Any]:
        def record(group: Any, *arguments: Any, **options: Any) -> Any:
            self.names.append(name.strip("_"))
            return method.__get__(group)(*arguments, **options)

        return record

    def __torch_dispatch__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            self.names.append(str(function).removeprefix("c10d.").partition(".")[0].rstrip("_"))
        return function(*args, **(kwargs or {}))


def look(run: Run) -> list[str]:
    """(all ranks) Try training passes of a few samples. Returns notes, a line each.

    Raises LockstepError if a pass depends on more than weights, samples and seeds. Weights,
    buffers, random numbers, and the values in modules and in the task are put back.
    """
    with isolated(run) as stack:
        trial = PassTrial(run)
        stack.callback(setattr, global_loss, "current_pass", None)
        stack.callback(trial.begin.put_back)
        return trial.notes()


def raise_changed_weights(run: Run, changed: list[str]) -> None:
    """Raise LockstepError if values that forward passes have changed are weights of the model."""
    weights = {name for name, _ in run.model.named_parameters()}
    names = [name for name in changed if name in weights]
    if not names or run.plan.sharded:
        return
    for path, module in run.model.named_modules():
        name = f"{path}.weight".removeprefix(".")
        limited = getattr(module, "max_norm", None) is not None
        if limited and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and name in names:
            raise CURES["max_norm"].error(name)
    raise CURES["weight"].error(few([*dict.fromkeys(names)], 1))


class Pass(NamedTuple):
    """A pass of a history.

    samples  the range of the samples: first, last + 1
    weights  the number of the noise in the weights
    """

    samples: tuple[int, int]
    weights: int


class PassTrial:
    """Passes of a few samples, from a state that is set for each.

    begin    the values of model and task at the start
    trained  names of the weights that require a gradient
    drawn    the generators that the last pass has drawn from
    for_state  the sums of the last pass for the task's `after_step`
    one      the samples of a pass
    other    the samples of another pass; the same samples, if there are too few
    """

    def __init__(self, run: Run):
        self.run = run
        self.parameters: dict[str, Tensor] = dict(run.model.named_parameters())
        self.trained = self._trained()
        self.half = any(p.dtype in (torch.bfloat16, torch.float16) for p in run.model.parameters())
        self.begin = snapshot_of(run)
        self.net: Any = run.model
        if run.cfg.check_sums and not run.plan.sharded:
            self.net = Net(run.model)
        self.drawn: list[str] = []
        self.for_state: dict[str, Tensor] = {}
        samples = 1
        with contextlib.suppress(Exception):  # two samples are no batch if a pass is one sample
            samples = len(batch_info(run.loaders.train.example(2 * SAMPLES, least=2)).index)
        self.one = self.other = (0, samples)
        if samples >= 4:
            self.one = (0, samples // 2)
            self.other = (samples // 2, samples)

    def snapshot(self) -> Snapshot:
        return snapshot_of(self.run, copies=False)

    def _trained(self) -> frozenset[str]:
        return frozenset(name for name, p in self.parameters.items() if p.requires_grad)

    # ---- passes

    @torch.no_grad()
    def perturb(self, number: int) -> None:
        """Set the trained weights to the weights at the start, plus the noise of this number."""
        if self.run.plan.sharded:
            return
        for place, name in enumerate(sorted(self.trained)):
            p = self.parameters[name]
            first = self.begin.copies[name]
            if p.is_floating_point() and p.numel():
                seed_generators(p.device, "look", number, place)
                size = first.float().square().mean().sqrt().clamp(min=0.02)
                p.copy_(first + (PERTURBED * size).to(first.dtype) * torch.randn_like(first))

    def compute(self, samples: tuple[int, int]) -> Outcome:
        """Compute the loss and the gradients of some samples, in training mode."""
        run = self.run
        first, end = samples
        run.model.train()
        batch = run.loaders.train.example(end, first, least=2)

        def gather(rows: Tensor, gathers: bool = True) -> tuple[Tensor, Tensor]:
            numbers = torch.arange(len(rows), device=rows.device)
            if gathers:
                return rows, numbers
            size = max(run.plan.global_batch, len(rows))
            return rows.new_zeros(size, *rows.shape[1:]), numbers

        global_loss.current_pass = gather
        seed_generators(run.world.device, "look at a pass", first)
        states = rng_states(run.world.device)
        data = numbers_of_data(run)
        try:
            with run.precision.autocast() if self.half else contextlib.nullcontext():
                loss = check_returned("loss", run.task.loss(self.net, batch))
        except LockstepError:
            raise
        except Exception as error:
            return Outcome({}, self._trained(), type(error).__name__)
        if run.cfg.check_resume:
            raise_changed_data("loss", data, numbers_of_data(run))
        now = rng_states(run.world.device)
        self.drawn = [name for name in now if now[name] != states[name]]
        self.for_state = map_tensors(dict(loss.for_state), Tensor.detach)
        numbers = {"": torch.stack([_double(loss.total), _double(loss.weight)])}
        for name, value in loss.sums.items():
            numbers[f"sum {name}"] = _double(value).reshape(1)
        if not run.plan.sharded:
            numbers |= project_gradients(loss.total, self.parameters)
        return Outcome(numbers, self._trained())

    def compute_after(self, *history: Pass, set_state: Callable[[], None] | None = None) -> Outcome:
        """Compute the passes of a history, from the state at the start. Returns the last outcome.

        set_state  a function that changes the state before the last pass
        """
        self.begin.put_back()
        for number, each in enumerate(history):
            self.perturb(each.weights)
            if set_state is not None and number == len(history) - 1:
                set_state()
            outcome = self.compute(each.samples)
        return outcome

    # ---- judgement

    def notes(self) -> list[str]:
        """Return the notes; raise LockstepError for a fault."""
        run = self.run
        self._raise_gradients()
        self.perturb(1)
        before = self.snapshot()
        with Collectives() as collectives:
            outcome = self.compute(self.one)
        after = self.snapshot()
        if outcome.error:  # the check of the sums has named it, or the first step will
            return []
        if run.cfg.check_sums:
            self._raise_faults_of_sums(outcome, collectives.names)
        changed = [*before.changes(after)]
        # A write counts, even of equal values: a teacher that equals the weights at first.
        touched = [*changed, *before.written(after)]
        raise_changed_weights(run, touched)
        self._raise_faults_of_state(touched)
        notes = self._note_draws()
        if not run.cfg.check_resume:
            return notes
        again = self.compute_after(Pass(self.one, 1))
        if run.has_after_step:
            notes += try_after_step(run, self.for_state)
        noise = outcome.distance(again)
        close = max(5e-2 if self.half else CLOSE, 10 * noise)
        if noise > 1e-3:
            if run.cfg.random_samples == "warn":
                return notes
            raise CURES["hidden"].error(str(self.one[1]))
        kept = [name for name in changed if name not in self._expected()]
        if kept:
            notes += self._judge_state(kept, after, close)
        return notes

    def _raise_gradients(self) -> None:
        names = [name for name, p in self.parameters.items() if p.grad is not None]
        if names:
            raise CURES["backward"].error(few(names, 1))

    def _raise_faults_of_sums(self, outcome: Outcome, collectives: list[str]) -> None:
        """Raise LockstepError for what `loss` may not do with the model and the processes."""
        self._raise_gradients()
        run = self.run
        run.trained.check()
        if isinstance(self.net, Net) and not self.net.calls and not run.task.forward_methods:
            raise CURES["bypass"].error()
        norms = any(isinstance(module, nn.SyncBatchNorm) for module in run.model.modules())
        if collectives and not norms and not run.plan.sharded:
            raise CURES["collective"].error(collectives[0])

    def _raise_faults_of_state(self, changed: list[str]) -> None:
        """Raise LockstepError if a pass changes a declared state, or computes sums for nobody."""
        for attribute in self.run.task.state_attributes:
            names = self._of_state(attribute, changed)
            if names:
                raise CURES["declared"].error(few(names, 1))
        if self.for_state and not self.run.has_after_step:
            raise LockstepError(
                f"the sum {few([*self.for_state], 1)} is for `after_step`, which the task lacks",
                "`for_state` of the task's `loss`",
                "write `after_step`, or log it: `sums`",
            )

    def _of_state(self, attribute: str, changed: list[str]) -> list[str]:
        """Return the changed values of a declared state. The plain attributes of a module are none:
        `torch.nn.utils.weight_norm` computes `weight` there in each pass."""
        value = getattr(self.run.task, attribute)
        if isinstance(value, nn.Module):
            tensors = dict(value.named_parameters()) | dict(value.named_buffers())
            held = {f"self.{attribute}.{name}" for name in tensors}
            return [name for name in dict.fromkeys(changed) if name in held]
        place = re.compile(rf"(len\()?self\.{attribute}\b")
        return [name for name in dict.fromkeys(changed) if place.match(name)]

    def _note_draws(self) -> list[str]:
        """Return a note on draws that no part of the model explains."""
        if self.run.plan.workers:
            return []
        known = partition_dependent(self.run.model, self.run.plan.accumulation)
        drawn = [name for name in self.drawn if not (name == "torch" and "dropout" in known)]
        if not drawn:
            return []
        return [
            f"the cut matters: a training pass draws from the generator of {' and '.join(drawn)}, "
            "which the first sample of the pass seeds: other processes or another batch_size, "
            "other numbers (virtual_workers=V makes them the same, and so does "
            "batch['lockstep'].seed)"
        ]

    def _expected(self) -> set[str]:
        """Return the names of the values that a pass may change: weights, which are judged by
        themselves, and the statistics of norms."""
        names = {*self.parameters}
        for path, module in self.run.model.named_modules():
            is_norm = isinstance(module, NORM_WITH_STATISTICS)
            if is_norm or type(module).__name__.endswith("SpectralNorm"):
                for name, _ in module.named_buffers(recurse=False):
                    names.add(f"{path}.{name}".removeprefix("."))
        return names

    def _judge_state(self, kept: list[str], after: Snapshot, close: float) -> list[str]:
        """Try whether the values that a pass changes matter. Returns notes.

        kept   the names of the values
        after  the state after the first pass
        """
        groups = [name for name in kept if name.startswith("param_groups")]
        if groups:
            raise CURES["groups"].error(groups[0])
        self.begin.put_back()
        persistent = self._persistent_buffers()

        def reset_buffers() -> None:
            for name, buffer in self._persistent_buffers().items():  # a pass may replace them
                first = self.begin.copies.get(name)
                if first is not None and first.shape == buffer.shape:
                    buffer.detach().copy_(first)

        last = Pass(self.one, 2)
        fresh = self.compute_after(last)
        for samples in (self.one, self.other):
            later = self.compute_after(Pass(samples, 1), last, set_state=reset_buffers)
            if fresh.distance(later) > close:
                raise CURES["state"].error(self._names_of(kept, persistent))
        notes = []
        moved = [name for name in kept if name in persistent]
        if moved and fresh.distance(self.compute_after(Pass(self.one, 1), last)) > close:
            notes.append(
                f"the cut matters: each training pass changes the buffer {few(moved, 1)}: other "
                "processes or another batch_size, other numbers (change it once a step, in "
                "`after_step`)"
            )
        counters = self._counters(kept, after, persistent)
        if counters:
            notes.append(
                f"each training pass changes {few(counters, 1)}, which no checkpoint holds: it "
                "counts the passes of one process, and begins anew in a resumed run. The loss was "
                f"the same after one pass more; if it depends on the count later, {ONCE_A_STEP}"
            )
        return notes

    def _counters(
        self, kept: list[str], after: Snapshot, persistent: dict[str, Tensor]
    ) -> list[str]:
        """Return the names of the numbers that the same pass changes once more. The others are
        outputs of the pass."""
        self.compute_after(Pass(self.one, 1), Pass(self.one, 1))
        again = {*after.changes(self.snapshot())}
        counters = []
        for name in kept:
            is_value = name not in persistent and not name.startswith("len(")
            if is_value and name in again and _is_number(after.values.get(name)):
                counters.append(name)
        return counters

    def _persistent_buffers(self) -> dict[str, Tensor]:
        buffers = dict(self.run.model.named_buffers())
        for path, module in self.run.model.named_modules():
            for name in non_persistent_buffers(module):
                buffers.pop(f"{path}.{name}".removeprefix("."), None)
        return buffers

    def _names_of(self, kept: list[str], persistent: dict[str, Tensor]) -> str:
        """Return the names of values that may matter, the tensors of modules last."""
        names = [name for name in kept if name not in persistent and not name.startswith("len(")]
        return few(names or kept, 2)


def _double(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().double().cpu()


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
