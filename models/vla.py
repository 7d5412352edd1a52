"""A compact vision-language-action policy.

A transformer encodes cameras, command and state. An action expert samples a chunk of actions by
flow matching. All weights are trained from scratch, the expert by the recipe of SmolVLA (Shukor et
al., arXiv 2506.01844).
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.layers import Quantiles, activated_norm, normal_quantiles, sine_code

PRESETS: dict[str, dict[str, Any]] = {
    "test": {  # 0.39 million parameters
        "image_size": 32,
        "patch_size": 4,
        "width": 64,
        "depth": 2,
        "expert_width": 64,
        "expert_depth": 2,
        "head_width": 32,
        "vocabulary": 512,
    },
    "tiny": {  # 2.06 million
        "image_size": 64,
        "patch_size": 8,
        "width": 128,
        "depth": 4,
        "expert_width": 96,
        "expert_depth": 4,
        "head_width": 32,
        "vocabulary": 1024,
    },
    "small": {  # 34.5 million
        "image_size": 224,
        "patch_size": 16,
        "width": 384,
        "depth": 8,
        "expert_width": 288,
        "expert_depth": 8,
        "head_width": 48,
        "vocabulary": 4096,
    },
    "base": {  # 200 million
        "image_size": 256,
        "patch_size": 16,
        "width": 768,
        "depth": 12,
        "expert_width": 576,
        "expert_depth": 12,
        "head_width": 64,
        "vocabulary": 8192,
    },
}


@dataclass(frozen=True)
class VLASettings:
    """The hyper-parameters. A size of 0 means the size of the preset, see `resolved`.

    image_size    H = W of the resized picture of each camera, a multiple of patch_size
    patch_size    pixels of a token's side, a power of two: one stride-2 convolution per doubling
    width, depth  of the trunk; a width is a multiple of head_width and of 4
    vocabulary    rows of the word table, 0 = padding among the rows
    num_words     length of the longest command
    chunk_size    actions predicted at once
    n_action_steps          actions to execute before the next prediction; 0 = all
    num_steps     Euler steps of sampling
    rtc_max_delay           in training, the maximum number of first actions that are given, as a
                            robot executes actions during the computation; 0 = none
    gradient_checkpointing  recompute the blocks' activations in the backward pass: a third more
                            time, far less memory
    freeze_vision_encoder   the convolutions, positions and camera embeddings keep their weights
    train_expert_only       all weights outside of the action expert stay constant
    """

    preset: str = "tiny"
    image_size: int = 0
    patch_size: int = 0
    width: int = 0
    depth: int = 0
    expert_width: int = 0
    expert_depth: int = 0
    head_width: int = 0
    vocabulary: int = 0
    num_words: int = 32
    chunk_size: int = 50
    n_action_steps: int = 0
    num_steps: int = 10
    rtc_max_delay: int = 0
    dropout: float = 0.0
    gradient_checkpointing: bool = False
    freeze_vision_encoder: bool = False
    train_expert_only: bool = False

    def resolved(self) -> VLASettings:
        """Return a copy with every 0 replaced.

        Raises ValueError for sizes that do not fit together.
        """
        if self.preset not in PRESETS:
            raise ValueError(f"no preset {self.preset!r}: choose one of {', '.join(PRESETS)}")
        own = PRESETS[self.preset] | {"n_action_steps": self.chunk_size}
        full = replace(
            self, **{name: value for name, value in own.items() if not getattr(self, name)}
        )
        for name in ("width", "expert_width"):
            if getattr(full, name) % full.head_width or getattr(full, name) % 4:
                raise ValueError(
                    f"{name} {getattr(full, name)} is no multiple of head_width "
                    f"{full.head_width} and 4"
                )
        if (
            full.patch_size < 2
            or full.patch_size & (full.patch_size - 1)
            or full.image_size % full.patch_size
        ):
            raise ValueError(
                f"patch_size {full.patch_size} is no power of two that divides {full.image_size} "
                "pixels"
            )
        if not 1 <= full.n_action_steps <= full.chunk_size:
            raise ValueError(
                f"n_action_steps {full.n_action_steps} of a chunk of {full.chunk_size}"
            )
        if not 0 <= full.rtc_max_delay < full.chunk_size:
            raise ValueError(
                f"rtc_max_delay {full.rtc_max_delay} must be below chunk_size {full.chunk_size}"
            )
        return full


# An ideograph or a kana is a word by itself, because such text has no spaces.
_WORD = re.compile(r"[\u3040-\u9fff]|[^\W\u3040-\u9fff]+")


def hash_words(text: str, length: int, vocabulary: int) -> list[int]:
    """Return `length` numbers: CRC-32 of each word modulo `vocabulary`, then 0 for padding.

    Words after `length` are dropped. Case and punctuation do not count. No tokeniser file is
    needed, and no word is unknown, but two words may share a number.
    """
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())[:length]
    # Python's hash() is salted
    numbers = [zlib.crc32(word.encode()) % (vocabulary - 1) + 1 for word in words]
    return numbers + [0] * (length - len(numbers))


def grid_positions(side: int, width: int) -> Tensor:
    """Return (side^2, width) float32 in row-major order: sines and cosines of row and column.

    The slowest wave is half a turn over the picture, so that a linear map can decode a place. The
    fastest wave separates neighbours.
    """
    rates = math.pi * torch.logspace(0, math.log2(max(2, side / 2)), width // 4, base=2)
    angles = ((torch.arange(side) + 0.5) / side)[:, None] * rates  # (side, width / 4)
    waves = torch.cat([angles.sin(), angles.cos()], 1)  # (side, width / 2)
    rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
    return torch.cat([rows, columns], 2).flatten(0, 1)


def fit(images: Tensor, size: int) -> Tensor:
    """Return (B, C, size, size) of pictures (B, C, H, W): same aspect ratio, padding of -1."""
    height, width = images.shape[2:]
    if height == width == size:
        return images
    scale = size / max(height, width)
    shape = max(1, round(height * scale)), max(1, round(width * scale))
    small = F.interpolate(images, shape, mode="bilinear", antialias=True)
    top, left = (size - shape[0]) // 2, (size - shape[1]) // 2
    return F.pad(small, (left, size - shape[1] - left, top, size - shape[0] - top), value=-1.0)


def linear(before: int, after: int) -> nn.Linear:
    """Return a layer with DiT's initialisation, Xavier's.

    With torch's initialisation, attention starts flat, and learns to relate words to places far
    slower.
    """
    layer = nn.Linear(before, after)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def silent(before: int, after: int) -> nn.Linear:
    """Return a layer whose weights and bias start at 0."""
    layer = nn.Linear(before, after)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Eyes(nn.Module):
    """Pictures (B, N, C, S, S) of N cameras -> tokens (B, N * (S / patch)^2, width).

    Pixels are about -1 to 1.
    """

    positions: Tensor

    def __init__(self, cameras: int, channels: int, image_size: int, patch_size: int, width: int):
        super().__init__()
        steps = patch_size.bit_length() - 1
        # The channels double, up to the width.
        sizes = [max(8, width >> (steps - 1 - i)) for i in range(steps)]
        stem: list[nn.Module] = []
        for before, after in zip([channels, *sizes], sizes, strict=False):
            stem += [nn.Conv2d(before, after, 3, stride=2, padding=1)]
            stem += activated_norm(after, "gelu")
        self.stem = nn.Sequential(*stem)
        self.out = linear(sizes[-1], width)
        # Fixed, because a learned table takes far longer to encode places. The linear map learns
        # the scale.
        positions = grid_positions(image_size // patch_size, width).to(torch.get_default_dtype())
        self.register_buffer("positions", positions, persistent=False)
        self.place = linear(width, width)
        self.camera = nn.Parameter(0.02 * torch.randn(cameras, 1, width))

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images.flatten(0, 1)).flatten(2).transpose(1, 2)  # (B * N, P, width)
        tokens = self.out(features) + self.place(self.positions)
        # (B, N * P, width)
        return (tokens.unflatten(0, images.shape[:2]) + self.camera).flatten(1, 2)


class Attention(nn.Module):
    """Attention of (B, L, width) to a source (B, M, source width).

    `recall` computes keys and values of the source once.
    """

    def __init__(self, width: int, head_width: int, source_width: int):
        super().__init__()
        self.head_width = head_width
        self.q = linear(width, width)
        self.kv = linear(source_width, 2 * width)
        self.out = linear(width, width)

    def recall(self, source: Tensor) -> Tensor:
        """Return keys and values (2, B, H, M, width / H) of a source."""
        # (2, B, H, M, width / H)
        return self.kv(source).unflatten(2, (2, -1, self.head_width)).permute(2, 0, 3, 1, 4)

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Return (B, L, width).

        memory  keys and values of `recall`
        mask    (B, 1, 1, M) bool: True for tokens of the source to attend to
        """
        q = self.q(x).unflatten(2, (-1, self.head_width)).transpose(1, 2)  # (B, H, L, width / H)
        mixed = F.scaled_dot_product_attention(
            q, memory[0], memory[1], attn_mask=mask, is_causal=causal
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def feed_forward(width: int) -> nn.Sequential:
    """Return a feed-forward layer (..., width) -> (..., width)."""
    return nn.Sequential(linear(width, 4 * width), nn.GELU(), linear(4 * width, width))


class TrunkBlock(nn.Module):
    """(B, M, width) -> (B, M, width).

    Masked self-attention and a feed-forward layer, each after a norm.
    """

    def __init__(self, width: int, head_width: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, head_width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = feed_forward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.dropout(self.attention(normed, self.attention.recall(normed), mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Modulation(nn.Module):
    """AdaLN-zero (Peebles & Xie, ICCV 2023): a code -> `parts` tensors, all 0 at first.

    A code (B, width) gives tensors (B, 1, width). A code for each step of a chunk (B, T, width)
    gives tensors (B, T, width).
    """

    def __init__(self, width: int, parts: int):
        super().__init__()
        self.parts = parts
        self.linear = silent(width, parts * width)

    def forward(self, code: Tensor) -> tuple[Tensor, ...]:
        found = self.linear(F.silu(code))
        return (found if code.ndim == 3 else found[:, None]).chunk(self.parts, 2)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return the normalised x with a shift and a scale."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


Memory = Callable[[Attention], Tensor]
"""Maps a cross-attention to its keys and values of the trunk's output, computed anew or cached."""


class ExpertBlock(nn.Module):
    """(B, T, width) -> (B, T, width).

    Each step of the chunk attends to earlier steps, then to the output of the trunk.

    The attention is causal as in SmolVLA, so that padding at the end of an episode cannot affect
    earlier steps.
    """

    def __init__(self, width: int, head_width: int, source_width: int, dropout: float):
        super().__init__()
        self.modulation = Modulation(width, 9)
        self.attention = Attention(width, head_width, width)
        self.cross = Attention(width, head_width, source_width)
        self.mlp = feed_forward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, code: Tensor, memory: Memory, mask: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2, shift3, scale3, gate3 = self.modulation(code)
        normed = modulated(x, shift1, scale1)
        x = x + gate1 * self.dropout(
            self.attention(normed, self.attention.recall(normed), causal=True)
        )
        x = x + gate2 * self.dropout(
            self.cross(modulated(x, shift2, scale2), memory(self.cross), mask)
        )
        return x + gate3 * self.dropout(self.mlp(modulated(x, shift3, scale3)))


class Prefix(NamedTuple):
    """The expert's inputs besides the actions.

    memory   the trunk's output
    mask     (B, 1, 1, M) bool, False at padded words
    command  (B, width), the mean of the words
    """

    memory: Memory
    mask: Tensor
    command: Tensor


class Expert(nn.Module):
    """The velocity field: noisy chunk (B, T, A), time in [0, 1] and prefix -> (B, T, A).

    The time is (B,), or (B, T) for a time of each step.
    """

    positions: Tensor
    rates: Tensor

    def __init__(self, settings: VLASettings, action_dim: int):
        super().__init__()
        width = settings.expert_width
        self.checkpointing = settings.gradient_checkpointing
        self.enter = linear(action_dim, width)
        positions = sine_code(torch.arange(settings.chunk_size), width).to(
            torch.get_default_dtype()
        )
        self.register_buffer("positions", positions, persistent=False)
        # Periods from 0.004 to 4, as in SmolVLA.
        rates = torch.logspace(
            math.log10(2 * math.pi / 4), math.log10(2 * math.pi / 0.004), width // 2
        )
        self.register_buffer("rates", rates.to(torch.get_default_dtype()), persistent=False)
        self.time = nn.Sequential(linear(width, width), nn.SiLU(), linear(width, width))
        self.command = linear(settings.width, width)
        self.blocks = nn.ModuleList(
            ExpertBlock(width, settings.head_width, settings.width, settings.dropout)
            for _ in range(settings.expert_depth)
        )
        self.modulation = Modulation(width, 2)
        self.out = silent(width, action_dim)

    def forward(self, x: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        angles = time[..., None] * self.rates
        command = self.command(prefix.command)  # (B, width)
        # With the words in the query, the expert finds the named object in one layer instead of
        # two.
        code = self.time(torch.cat([angles.sin(), angles.cos()], -1)) + (
            command if time.ndim == 1 else command[:, None]
        )
        x = self.enter(x) + self.positions
        for block in self.blocks:
            x = run(self.checkpointing, block, x, code, prefix.memory, prefix.mask)
        return self.out(modulated(x, *self.modulation(code)))


def run(checkpointing: bool, block: nn.Module, *inputs: Any) -> Tensor:
    """Return the output of a block, with gradient checkpointing if set."""
    if checkpointing and torch.is_grad_enabled():
        return checkpoint(block, *inputs, use_reentrant=False)
    return block(*inputs)


class VLA(nn.Module):
    """The policy. All inputs and outputs are in normalised units.

    `inputs` contains "observation.state" (B, S), "observation.environment_state" (B, E), the
    picture of each camera (B, channels, H, W) of about -1 to 1, and "words" (B, L) int64 of
    `hash_words`, with L at most num_words; for training also "action" (B, chunk, A) and
    "action_is_pad" (B, chunk) bool, True after the end of an episode.

    state_dim, env_dim, action_dim  S and E, both may be 0, and A
    cameras        the names of the pictures in `inputs`, e.g. "observation.images.top"
    num_draws      uniform draws in [0, 1) per training sample: 1 for the time, num_noise = chunk *
                   A for the noise, and 1 for the delay if rtc_max_delay is set
    penalty        weight of "kl" in the loss; `forward` returns no "kl"
    max_committed  maximum number of given actions in `sample`
    """

    penalty = 0.0
    order: Tensor

    def __init__(
        self,
        settings: VLASettings,
        state_dim: int,
        env_dim: int,
        action_dim: int,
        cameras: Sequence[str],
        channels: int = 3,
    ):
        super().__init__()
        settings = self.settings = settings.resolved()
        self.cameras = tuple(cameras)
        self.shape = (settings.chunk_size, action_dim)
        self.num_noise = settings.chunk_size * action_dim
        self.max_committed = settings.rtc_max_delay
        self.num_draws = 1 + self.num_noise + bool(self.max_committed)
        # SmolVLA's Beta(1.5, 1), with inverse distribution function p^(1 / 1.5), kept away from
        # time 0 (no noise).
        self.time = Quantiles(lambda p: 0.999 * p ** (1 / 1.5) + 0.001)
        self.noise = normal_quantiles()
        width = settings.width
        self.eyes = (
            Eyes(len(cameras), channels, settings.image_size, settings.patch_size, width)
            if cameras
            else None
        )
        self.words = nn.Embedding(settings.vocabulary, width, padding_idx=0)
        order = sine_code(torch.arange(settings.num_words), width).to(torch.get_default_dtype())
        self.register_buffer("order", order, persistent=False)
        self.state = linear(state_dim, width) if state_dim else None
        self.environment = linear(env_dim, width) if env_dim else None
        self.trunk = nn.ModuleList(
            TrunkBlock(width, settings.head_width, settings.dropout) for _ in range(settings.depth)
        )
        self.norm = nn.LayerNorm(width)
        self.expert = Expert(settings, action_dim)
        if settings.train_expert_only:
            self.requires_grad_(False)
            self.expert.requires_grad_(True)
        if settings.freeze_vision_encoder and self.eyes is not None:
            self.eyes.requires_grad_(False)

    def encode(self, commands: list[str]) -> Tensor:
        """Return (N, num_words) int64, the "words" of `inputs`."""
        settings = self.settings
        return torch.tensor(
            [hash_words(text, settings.num_words, settings.vocabulary) for text in commands]
        )

    def prefix(self, inputs: dict[str, Tensor]) -> Prefix:
        """Encode all inputs but the actions."""
        is_word = inputs["words"] != 0  # (B, L)
        words = self.words(inputs["words"]) * is_word[:, :, None]  # (B, L, width)
        tokens = [words + self.order[: words.shape[1]]]
        if self.state is not None:
            tokens.append(self.state(inputs["observation.state"])[:, None])
        if self.environment is not None:
            tokens.append(self.environment(inputs["observation.environment_state"])[:, None])
        if self.eyes is not None:
            images = [fit(inputs[name], self.settings.image_size) for name in self.cameras]
            tokens.append(self.eyes(torch.stack(images, 1)))
        x = torch.cat(tokens, 1)  # (B, M, width)
        mask = F.pad(is_word, (0, x.shape[1] - words.shape[1]), value=True)[:, None, None]
        for block in self.trunk:
            x = run(self.settings.gradient_checkpointing, block, x, mask)
        source = self.norm(x)
        # Keys and values are computed inside the expert's blocks. Otherwise they would be most of
        # the memory of checkpointed blocks.
        command = words.sum(1) / is_word.sum(1, keepdim=True).clamp(min=1)
        return Prefix(lambda attention: attention.recall(source), mask, command)

    def forward(self, inputs: dict[str, Tensor], draws: Tensor) -> dict[str, Tensor]:
        """Return {"error": (B,)} of a training batch with draws (B, num_draws).

        The error is the squared error of the velocity, summed over unpadded steps and dimensions.
        With rtc_max_delay the sum is over steps that are not given, and "weight" (B,) is the number
        of summands.

        The delay d of a sample is uniform in 0..rtc_max_delay, and leaves at least one step to
        learn. The first d actions enter unchanged, at time 0 (training-time action conditioning:
        Black et al., arXiv 2512.05964).
        """
        action = inputs["action"]  # (B, T, A)
        time = self.time(draws[:, 0]).to(action.dtype)  # (B,)
        noise = self.noise(draws[:, 1 : 1 + self.num_noise]).to(action.dtype).view_as(action)
        silent, sums = inputs["action_is_pad"], {}  # (B, T): steps without loss
        if self.max_committed:
            wanted = (draws[:, -1] * (self.max_committed + 1)).long()
            delay = wanted.minimum((~silent).sum(1) - 1)
            given = torch.arange(self.shape[0], device=delay.device) < delay[:, None]
            time, silent = time[:, None].masked_fill(given, 0.0), silent | given
            sums["weight"] = (~silent).sum(1) * self.shape[1]
        mixed = torch.lerp(action, noise, time.view(len(time), -1, 1))
        velocity = self.expert(mixed, time, self.prefix(inputs))
        errors = (velocity - (noise - action)).square()
        return sums | {"error": errors.masked_fill(silent[:, :, None], 0.0).sum((1, 2))}

    @torch.no_grad()
    def sample(
        self,
        inputs: dict[str, Tensor],
        draws: Tensor | None = None,
        committed: Tensor | None = None,
    ) -> Tensor:
        """Return (B, chunk, A), computed by Euler steps from time 1 to time 0.

        draws      (B, chunk * A) of the noise at time 1; None: zero noise
        committed  (B, d, A), d at most max_committed: given first actions, returned unchanged; a
                   robot executes given actions during the computation
        """
        prefix = self.prefix(inputs)
        prefix = prefix._replace(memory=functools.cache(prefix.memory))  # the same at every step
        # len() is a constant in an export
        x = self.words.weight.new_zeros(inputs["words"].shape[0], *self.shape)
        if draws is not None:
            x = self.noise(draws).to(x.dtype).view_as(x)
        steps = self.settings.num_steps
        if committed is not None:
            count = committed.shape[1]
            x = torch.cat([committed.to(x.dtype), x[:, count:]], 1)
            moving = (torch.arange(self.shape[0], device=x.device) >= count).to(x.dtype)  # (T,)
            for i in range(steps, 0, -1):
                velocity = self.expert(x, (i / steps * moving).expand(x.shape[:2]), prefix)
                x = x - velocity * moving[:, None] / steps
            return x
        for i in range(steps, 0, -1):
            time = x.new_full(x.shape[:1], i / steps)
            x = x - self.expert(x, time, prefix) / steps
        return x
