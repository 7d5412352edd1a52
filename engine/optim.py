"""The optimizer, the average of weights, and the step itself."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engine.config import Optim
from engine.errors import LockstepError
from engine.phases import phase
from engine.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """torch's own, with its fused kernel called directly: the same state and the same bits. What torch's `step` does
    around the kernel takes longer than the kernel where a model is small, and loads torch's compiler.

    The parameters of a group that have taken the same steps share a counter; torch would keep, and move, one for each.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. `grad_scale` and `found_inf`, if set, are GradScaler's: one number each, on the device."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        # The kernel leaves everything alone where found_inf is 1; so do the counters.
        taken = 1.0 if found_inf is None else 1 - found_inf
        for group in self.param_groups:
            known = len(self.state)
            params, grads, first, second, none, counts = self._gathered(group)
            if not params:
                continue
            if len(params) < len(group["params"]):  # the counters of those without a gradient stay where they are
                waiting = {id(self.state[p]["step"]) for p in group["params"] if p.grad is None and self.state.get(p)}
                for p in params:
                    if id(self.state[p]["step"]) in waiting:
                        self.state[p]["step"] = self.state[p]["step"].clone()
                counts = [self.state[p]["step"] for p in params]
            elif len(self.state) > known:
                self._share_counters()
                counts = [self.state[p]["step"] for p in params]
            counters = [*{id(count): count for count in counts}.values()]
            torch._foreach_add_(counters, taken)
            torch._fused_adamw_(
                params, grads, first, second, none, counts,
                lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
                eps=group["eps"], amsgrad=False, maximize=False,
                grad_scale=getattr(self, "grad_scale", None), found_inf=found_inf,
            )  # fmt: skip

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for its profiler

    def _gathered(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Return those with a gradient: parameters, gradients, both moments, nothing, counters."""
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *lists)
        return lists

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for p, state in self.state.items():  # the kernel walks through memory: moments need the layout of their weights
            for name in MOMENTS:
                state[name] = torch.empty_like(p, dtype=state[name].dtype).copy_(state[name])
        self._share_counters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with a counter for each parameter: another optimizer would advance a shared one for each."""
        whole = super().state_dict()
        states = {key: {**state, "step": state["step"].clone()} for key, state in whole["state"].items()}
        return whole | {"state": states}

    def whole_state(self) -> dict[str, Any]:
        """(all ranks) Return a checkpoint's state, on rank 0 at least; a copy gives each its own counter."""
        return super().state_dict()

    @property
    def kept(self) -> list[Tensor]:
        """Return the parameters whose moments this process keeps."""
        return self._parameters()

    def _parameters(self) -> list[Tensor]:
        """Return all of them, by their number in a state dict."""
        return [p for group in self.param_groups for p in group["params"]]

    def _share_counters(self) -> None:
        """Share the counters. Reads them on the host: at the beginning only."""
        for group in self.param_groups:
            shared: dict[float, Tensor] = {}
            for p in group["params"]:
                if "step" in (state := self.state.get(p, {})):
                    state["step"] = shared.setdefault(float(state["step"]), state["step"])


class Zero(AdamW):
    """AdamW of several ranks together, by torch's ZeroRedundancyOptimizer: each keeps the moments of a share of the
    parameters (`kept`; `state` holds no others), takes their step, and sends them to the others.

    Checkpoints hold the whole state, but torch's own way to and from there is not taken. It brings the shares together
    at 100 ns a byte and more, and rank 0 keeps a copy; it puts them back with the counters on the CPU, where a GPU's
    kernel refuses them (pytorch#124133), in any layout, and empties the caller's state.
    """

    def __init__(self, groups: list[dict[str, Any]], world: World, **settings: Any):
        super().__init__(groups, **settings)
        self.world = world
        parameters = self._parameters()
        before = [p.data for p in parameters]
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second to load

        # The parameters move into one piece of memory per rank: one broadcast for each, and not one per parameter.
        self.zero = ZeroRedundancyOptimizer(self.param_groups, AdamW, parameters_as_bucket_view=True, **settings)
        for p, data in zip(parameters, before, strict=True):  # back to their layouts: torch has made them contiguous
            strides = torch.empty_like(data, device="meta").stride()
            p.data = p.data.as_strided(data.shape, strides, p.data.storage_offset()).copy_(data)
        self.state = self.zero.optim.state

    @property
    def kept(self) -> list[Tensor]:
        return [p for group in self.zero.optim.param_groups for p in group["params"]]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        inner = self.zero.optim
        inner.grad_scale, inner.found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        with phase.during("optimizer step", waits=True):  # others' parameters come
            self.zero.step()

    step.hooked = True  # type: ignore[attr-defined]

    def whole_state(self) -> dict[str, Any]:
        own = self.state_dict()
        steps = {number: float(state["step"]) for number, state in own["state"].items()}
        moments = [state[name].reshape(-1) for state in own["state"].values() for name in MOMENTS]
        everyones_steps = self.world.gather(steps)
        parameters, states = self._parameters(), {}
        everyones_moments = gather_to_rank0(self.world, moments, like=parameters[0])
        for steps, flats in zip(everyones_steps, everyones_moments, strict=False):  # none but on rank 0
            pieces = iter(flats)
            for number, step in steps.items():
                states[number] = {"step": torch.tensor(step, dtype=torch.float32)}
                states[number] |= {name: next(pieces).view(parameters[number].shape) for name in MOMENTS}
        return own | {"state": dict(sorted(states.items()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, however it was kept."""
        kept = {id(p) for p in self.kept}
        numbers = {number for number, p in enumerate(self._parameters()) if id(p) in kept}
        share = {number: state for number, state in state_dict["state"].items() if number in numbers}
        super().load_state_dict(state_dict | {"state": share})
        self.zero.param_groups, self.zero.optim.state = self.param_groups, self.state  # both are new


def gather_to_rank0(world: World, flats: list[Tensor], like: Tensor) -> list[list[Tensor]]:
    """(all ranks) Return every rank's flat tensors, of the type of `like`, by rank, in the memory of rank 0's host;
    nothing on the others. In pieces, because the device may lack room for another's at once."""
    everyones = []
    for rank, lengths in enumerate(world.gather([len(flat) for flat in flats])):
        collected: list[Tensor] = []
        while len(collected) < len(lengths):
            first, last = len(collected), len(collected) + 1
            while last < len(lengths) and sum(lengths[first : last + 1]) <= 1 << 24:
                last += 1
            mine = rank == world.rank
            piece = torch.cat(flats[first:last]) if mine else like.new_empty(sum(lengths[first:last]))
            with phase.during("broadcast", waits=True):  # gloo has no other way from a GPU
                dist.broadcast(piece, src=rank)
            collected += piece.cpu().split(lengths[first:last]) if world.main else [like] * (last - first)
        everyones.append(collected)
    return everyones if world.main else []


def make_optimizer(model: nn.Module, cfg: Optim, world: World | None = None) -> AdamW:
    """Return AdamW, fused; weight decay on matrices and kernels only, not on norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": params, "weight_decay": decay}
        for dtype in dict.fromkeys(p.dtype for p in trained)  # one, or the fused kernel would be given several
        for decay, params in (
            (cfg.weight_decay, [p for p in trained if p.dtype == dtype and p.ndim >= 2]),
            (0.0, [p for p in trained if p.dtype == dtype and p.ndim < 2]),
        )
        if params
    ]
    if not groups:
        raise LockstepError("the model has no parameter to train", where="the task's `model`", todo="unfreeze some")
    settings: dict[str, Any] = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps, "fused": True}
    if not cfg.zero or world is None or world.size == 1:
        return AdamW(groups, **settings)
    if len(types := {str(p.dtype).removeprefix("torch.") for p in trained}) > 1:
        raise LockstepError(
            f"ZeroRedundancyOptimizer takes parameters of one type, and the model has {' and '.join(sorted(types))}",
            where="optim.zero",
            todo="drop it, or give all of them one type",
        )
    return Zero(groups, world, **settings)


def make_ema(model: nn.Module, cfg: Optim) -> AveragedModel | None:
    """Return torch's exponential moving average of the weights, or None; all of it is on the model's device."""
    if not cfg.ema_decay:
        return None
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(cfg.ema_decay), use_buffers=True)
    return ema.to(next(model.parameters()).device)


@torch.no_grad()
def update_ema(ema: AveragedModel, model: nn.Module, decay: float, skipped: Tensor) -> None:
    """Take one step of the average, as `ema.update_parameters(model)` does, but not where the optimizer has skipped its
    own; without torch's copies between host and device, which are sync points. Counters, such as BatchNorm's, are
    copied."""
    taken = 1 - skipped.double()
    share = taken * torch.where(ema.n_averaged == 0, 1.0, taken.new_full((), 1 - decay))  # the first copies
    pairs = [
        (average, value.detach())
        for average, value in zip(
            itertools.chain(ema.module.parameters(), ema.module.buffers()),
            itertools.chain(model.parameters(), model.buffers()),
            strict=True,
        )
        if average.shape == value.shape  # a cache that grows with the batch is each module's own
    ]
    lerped = [pair for pair in pairs if pair[0].is_floating_point()]
    shares = {dtype: share.to(dtype) for dtype in {average.dtype for average, _ in lerped}}
    torch._foreach_lerp_([a for a, _ in lerped], [v for _, v in lerped], [shares[a.dtype] for a, _ in lerped])
    for average, value in pairs:
        if not average.is_floating_point():
            average.copy_(value)
    ema.n_averaged += taken.long()


class Buffers:
    """State that a training forward pass may change beside weights: the statistics of BatchNorm and its kin, and other
    modules' buffers that checkpoints hold. Found once, because a walk over all modules takes 0.1 ms."""

    def __init__(self, model: nn.Module):
        self.places = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            for name, _ in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]

    def __call__(self, of_norms: bool | None = None) -> dict[str, Tensor]:
        """Return all by name, or those of norms, or the others, as they are now: a module may replace its own."""
        return {
            key: getattr(module, name)
            for key, module, name in self.places
            if of_norms in (None, isinstance(module, nn.modules.batchnorm._NormBase))
        }

    def copies(self) -> dict[str, Tensor]:
        return {key: buffer.detach().clone() for key, buffer in self().items()}

    @torch.no_grad()
    def put_back(self, copies: dict[str, Tensor], skipped: Tensor) -> None:
        """Restore the values before a step, if it was skipped: its forward passes have seen what is not finite."""
        if skipped.device.type == "cpu" and not skipped:  # elsewhere the test is a sync point
            return
        for key, buffer in self().items():
            if buffer.shape == copies[key].shape:
                buffer.copy_(torch.where(skipped > 0, copies[key], buffer))


def step(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, lr: float, divisor: Tensor, grad_clip: float
) -> tuple[Tensor, Tensor]:
    """Take one optimizer step on summed gradients that divided by `divisor` are the mean's; no host sync.

    Returns (grad_norm before clipping, 1.0 if the step was skipped because it is not finite), both scalars on the
    device. All ranks hold the same reduced gradients, so they all skip or none does.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    divisor = divisor.to(grads[0].dtype)
    if scaler.is_enabled():
        torch._foreach_div_(grads, divisor)  # first, so that unscale_ sees what a bad divisor does
        scaler.unscale_(optimizer)
        divisor = torch.ones_like(divisor)
    grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))) / divisor
    skipped = (grad_norm - grad_norm != 0).float()  # NaN where it is not finite; a third of what `isfinite` takes
    if grad_clip:
        divisor = divisor * ((grad_norm + 1e-6) / grad_clip).clamp(min=1.0)
    # The fused kernel itself divides by grad_scale, in float32 and in the pass it makes anyway, and leaves weights and
    # moments alone where found_inf is 1: GradScaler's own way, which leaves a grad_scale that is there as it is.
    in_kernel = divisor.dtype == torch.float32
    if not in_kernel:
        torch._foreach_div_(grads, divisor)
    optimizer.grad_scale = divisor if in_kernel else None  # type: ignore[attr-defined]
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    return grad_norm, skipped
