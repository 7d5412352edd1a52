"""Wrap any policy of the installed `lerobot` package as a network of Lockstep.

LeRobot's classes draw random numbers in a forward pass from torch's generator, in the order of the
batch: a different partition of the batch gives different noise. Here the noise and the time of a
sample are a function of the sample's seed; see `Drawn`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.layers import Quantiles, normal_quantiles
from models.policy import STATES, Policy

Uniform = Callable[[Tensor, int], Tensor]
"""(seeds (B,) int64, count) -> (B, count) draws in [0, 1), a function of each seed alone."""

IMAGES = "observation.images"  # LeRobot's name of all cameras' pictures together
SEED_BITS = 24  # of each of the two draws that make a seed


class Drawn(TorchFunctionMode):
    """A context in which torch's random tensors are functions of the seeds of B samples.

    A tensor of B rows, or of a multiple of B rows, is replaced. Dropout's masks are not replaced,
    because the layout of a mask does not show the rows of a sample.

    seeds    (B,) int64
    uniform  see `Uniform`
    spread   `torch.rand(1)` is a start from which a forward pass spreads B times evenly over [0,
             1): `torch.rand(1)` then returns B numbers, so that the times are B independent draws
    """

    def __init__(self, seeds: Tensor, uniform: Uniform, spread: bool = False):
        super().__init__()
        self.seeds, self.uniform, self.spread, self.calls = seeds, uniform, spread, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (turn := DRAWS.get(func)) is None:
            return made
        size = len(self.seeds)
        if self.spread and func is torch.rand and made.shape == (1,) and size > 1:
            places = torch.arange(size, device=made.device, dtype=made.dtype) / size
            return self._uniform(made.new_empty(size)).to(made.dtype) - places
        rows = 0 if turn is _dirichlet and made.ndim < 2 else len(made) if made.ndim else 0
        if not rows or rows % size or not made.numel():
            return made  # not a tensor of samples, for example a matrix of random weights
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if turn is _dirichlet:
                made.copy_(_dirichlet(self._uniform(made[..., 0]), args[0]))
            else:
                made.copy_(turn(self._uniform(made), made, *args, **(kwargs or {})))
        return made

    def _uniform(self, like: Tensor) -> Tensor:
        """Return draws in the shape of `like`, on the device of `like`.

        Each call has different draws.
        """
        self.calls += 1
        draws = self.uniform(
            self.seeds + (self.calls << 2 * SEED_BITS), like.numel() // len(self.seeds)
        )
        return draws.to(like.device).reshape(like.shape)


# ---- from uniform draws, in the shape of `made`, to what a function of torch's gives
# ---------------------------------


def _as_drawn(u: Tensor, made: Tensor, *args: Any, **options: Any) -> Tensor:
    return u


def _normal(u: Tensor, made: Tensor, *args: Any, **options: Any) -> Tensor:
    return _table("normal", 0, 0, u.device)(u)


def _normal_of(
    u: Tensor, made: Tensor, mean: Any = 0.0, std: Any = 1.0, *args: Any, **options: Any
) -> Tensor:
    return mean + std * _normal(u, made)


def _normal_in_place(
    u: Tensor, made: Tensor, x: Tensor, mean: float = 0.0, std: float = 1.0, **options: Any
) -> Tensor:
    return mean + std * _normal(u, made)


def _uniform_in_place(
    u: Tensor, made: Tensor, x: Tensor, low: float = 0.0, high: float = 1.0, **options: Any
) -> Tensor:
    low, high = options.get("from", low), options.get("to", high)
    return low + (high - low) * u


def _whole(
    u: Tensor, made: Tensor, *args: Any, low: int = 0, high: int | None = None, **options: Any
) -> Tensor:
    # randint(high, size), randint(low, high, size)
    given = [each for each in args if isinstance(each, int)]
    if high is None:
        low, high = (low, given[0]) if len(given) == 1 else (given[0], given[1])
    elif given:
        low = given[0]
    return low + (u.double() * (high - low)).long()


def _whole_like(u: Tensor, made: Tensor, like: Tensor, *args: Any, **options: Any) -> Tensor:
    return _whole(u, made, *args, **options)


def _one_of(u: Tensor, made: Tensor, shares: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return (N, n) numbers drawn with replacement by (N, C) shares: torch.multinomial."""
    edges = shares.double().cumsum(-1)
    found = torch.searchsorted(
        edges.contiguous(), (u.double() * edges[..., -1:]).contiguous(), right=True
    )
    return found.clamp(max=shares.shape[-1] - 1)


def _dirichlet(u: Tensor, concentration: Tensor) -> Tensor:
    """Return (..., 2): x, 1 - x of torch's Beta distribution. All rows have the same parameters."""
    assert concentration.shape[-1] == 2, "a Dirichlet distribution of more than two shares"
    a, b = concentration.reshape(-1, 2)[0].tolist()
    x = _table("beta", a, b, u.device)(u)
    return torch.stack([x, 1 - x], -1)


DRAWS: dict[Any, Any] = {
    torch.rand: _as_drawn,
    torch.rand_like: _as_drawn,
    torch.randn: _normal,
    torch.randn_like: _normal,
    torch.normal: _normal_of,
    Tensor.normal_: _normal_in_place,
    Tensor.uniform_: _uniform_in_place,
    torch.randint: _whole,
    torch.randint_like: _whole_like,
    torch.multinomial: _one_of,
    torch._sample_dirichlet: _dirichlet,
}


@functools.lru_cache(16)
def _table(kind: str, a: float, b: float, device: torch.device) -> Quantiles:
    """Return the quantiles of a distribution on a device."""
    return (
        normal_quantiles()
        if kind == "normal"
        else Quantiles(functools.partial(beta_quantiles, a, b))
    ).to(device)


def beta_quantiles(a: float, b: float, p: Tensor) -> Tensor:
    """Return the inverse of the Beta(a, b) distribution function at p, float64, for a, b >= 1/2.

    The error is at most 1e-5. The density of t in x = sin(t)^2 is finite. The density is summed
    over 2^16 steps.
    """
    edges = torch.linspace(0, math.pi / 2, 2**16 + 1, dtype=torch.float64)
    t = (edges[1:] + edges[:-1]) / 2
    mass = (t.sin().log() * (2 * a - 1) + t.cos().log() * (2 * b - 1)).exp().cumsum(0)
    mass = torch.cat([mass.new_zeros(1), mass / mass[-1]])
    at = torch.searchsorted(mass, p).clamp(1, len(edges) - 1)
    share = (p - mass[at - 1]) / (mass[at] - mass[at - 1]).clamp(min=1e-300)
    return (edges[at - 1] + share * (edges[at] - edges[at - 1])).sin().square()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators as `torch.manual_seed(seed)` does, for the draws that `Drawn` keeps.

    Dropout uses such draws. On exit the generators have the former states.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    kept = [each.get_state() for each in generators]
    try:
        for each in generators:
            each.manual_seed(seed)
        yield
    finally:
        for each, state in zip(generators, kept, strict=True):
            each.set_state(state)


# ---- the network
# --------------------------------------------------------------------------------------------------


class Statistics(nn.Module):
    """The statistics of a dataset, {feature: {mean, std, min, max, q01, ...}}, as buffers.

    LeRobot's pipelines normalise by the statistics. As buffers, the statistics are in every
    checkpoint.
    """

    def __init__(self, stats: dict[str, dict[str, Any]], modes: dict[str, str]):
        super().__init__()
        self.modes = modes
        self.names = {name: sorted(values) for name, values in stats.items()}
        for feature, values in stats.items():
            for name, value in values.items():
                self.register_buffer(
                    self._name(feature, name), torch.as_tensor(value, dtype=torch.float32).clone()
                )
        self.constant_buffers = [name for name, _ in self.named_buffers()]

    @staticmethod
    def _name(feature: str, what: str) -> str:
        return f"{feature.replace('.', '_')}__{what}"  # a buffer's name may hold no dot

    def stats(self) -> dict[str, dict[str, Tensor]]:
        """Return {feature: {statistic: tensor}}."""
        return {
            f: {name: getattr(self, self._name(f, name)) for name in names}
            for f, names in self.names.items()
        }


class Net(nn.Module):
    """LeRobot's module, with the members of a network that `models.policy.Policy` needs."""

    num_draws = num_noise = 2
    penalty = 0.0

    def __init__(self, policy: Any):
        super().__init__()
        self.policy = policy
        self.texts: list[str] = []

    def encode(self, commands: list[str]) -> Tensor:
        """Return (N, 1) int64, the number of each command among all commands so far."""
        self.texts += [text for text in dict.fromkeys(commands) if text not in self.texts]
        return torch.tensor([[self.texts.index(command)] for command in commands])


class Adapted(Policy):
    """A policy of LeRobot with LeRobot's pipelines; see `models.policy.Policy`.

    policy     LeRobot's module, on the CPU
    pipelines  {feature: statistics} -> LeRobot's pre- and postprocessor
    weigh      the batch as the input of the policy -> (B,), the number of elements in the mean of
               each sample's loss; the mean of several samples is divided by the sum
    exact      compute one sample at a time
    """

    def __init__(
        self,
        policy: Any,
        statistics: Statistics,
        cameras: list[str],
        pipelines: Callable[[dict[str, dict[str, Tensor]]], tuple[Any, Any]],
        weigh: Callable[[dict[str, Any]], Tensor],
        uniform: Uniform,
        spread: bool = False,
        exact: bool = False,
    ):
        super().__init__(Net(policy), statistics, cameras)  # type: ignore[arg-type]
        self.make = pipelines
        self.weigh = weigh
        self.uniform = uniform
        self.spread = spread
        self.exact = exact
        self.made: tuple[Any, Any] | None = None
        self.of_each = "reduction" in inspect.signature(policy.forward).parameters
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "made", None))

    def pipelines(self) -> tuple[Any, Any]:
        """Return LeRobot's pre- and postprocessor with the statistics of the model."""
        if self.made is None:
            self.made = self.make(
                {f: {n: v.cpu() for n, v in s.items()} for f, s in self.normalizer.stats().items()}
            )
        return self.made

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch as the input of LeRobot's policy, after LeRobot's preprocessor.

        Pictures are from 0 to 1, commands are texts.
        """
        found = {name: batch[name] for name in (*STATES, "action") if name in batch}
        found |= {name: value for name, value in batch.items() if name.endswith("_is_pad")}
        found |= {name: batch[name].to(self.like.dtype) / 255 for name in self.cameras}
        words = batch["words"]
        if len(self.net.texts) == 1:
            found["task"] = self.net.texts * len(words)
        else:
            found["task"] = [
                self.net.texts[n] for n in words[:, 0].tolist()
            ]  # sync point: tokens are made on the host
        self.net.policy.config.device = str(words.device)
        processed: dict[str, Any] = self.pipelines()[0](found)
        return {
            name: value for name, value in found.items() if name.endswith("_is_pad")
        } | processed

    def forward(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Tensor]:
        """Return {"error": (B,) the sum of each sample, "weight": (B,) the number of summands}.

        If LeRobot's class returns one mean for all samples, each sample has a share by weight. Then
        only the sum over the samples has a meaning.
        """
        if not self.exact:
            return self._sums(batch, draws)
        parts = [self._one(batch, draws, n) for n in range(len(draws))]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _one(self, batch: dict[str, Any], draws: Tensor, n: int) -> dict[str, Tensor]:
        """Return the sums of sample `n` alone."""
        some = {
            name: value[n : n + 1] for name, value in batch.items() if isinstance(value, Tensor)
        }
        with seeded(int(_seeds(draws[n : n + 1])), draws.device):
            return self._sums(some, draws[n : n + 1])

    def _sums(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Tensor]:
        """Return the sums of a batch."""
        inputs = self.inputs(batch)
        weight = self.weigh(inputs).to(draws.device)
        options = {"reduction": "none"} if self.of_each else {}
        with Drawn(_seeds(draws), self.uniform, self.spread):
            loss = self.net.policy.forward(inputs, **options)[0]
        if loss.dtype != torch.float64:
            loss = loss.float()
        return {"error": loss * weight.to(loss.dtype), "weight": weight}

    @torch.no_grad()
    def act(
        self, batch: dict[str, Any], draws: Tensor | None = None, committed: Tensor | None = None
    ) -> Tensor:
        """Return (B, T, A) actions in recorded units, from now on.

        Without draws, all samples have the same noise.
        """
        assert committed is None, (
            "LeRobot's policies are given no actions that are executed meanwhile"
        )
        names = [*STATES, *self.cameras, "words"]
        inputs = self.inputs({name: batch[name] for name in names if name in batch})
        inputs = {name: value for name, value in inputs.items() if name != "action"}
        seeds = torch.zeros(len(batch["words"]), dtype=torch.int64, device=batch["words"].device)
        policy = self.net.policy
        training = policy.training
        policy.eval()
        with Drawn(seeds if draws is None else _seeds(draws), self.uniform):
            actions = policy.predict_action_chunk(self._seen(inputs))
        policy.train(training)
        found: Tensor = self.pipelines()[1](actions)
        return found.to(actions.device)

    def _seen(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Fill the queues of a policy with the observations (B, T, ...) of a batch.

        Return the inputs.
        """
        policy = self.net.policy
        policy.reset()
        queues = getattr(policy, "_queues", None) or {}
        if IMAGES in queues and self.cameras:
            inputs = inputs | {IMAGES: torch.stack([inputs[name] for name in self.cameras], -4)}
        for name, queue in queues.items():
            if name in inputs:
                many = inputs[name] if queue.maxlen > 1 else inputs[name][:, None]
                queue.extend(many.unbind(1))
        return inputs


def _seeds(draws: Tensor) -> Tensor:
    """Return (B,) int64 seeds of 48 bits for (B, 2) uniform draws of 24 bits."""
    high, low = (draws.double() * 2**SEED_BITS).long().unbind(1)
    return (high << SEED_BITS) + low
