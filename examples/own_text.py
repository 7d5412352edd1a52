"""Text as a task: a GPT learns to write the next character of a text. Fork this file.

    python train.py examples/own_text.py
    torchrun --standalone --nproc_per_node=2 train.py examples/own_text.py text.path=mine.txt
        model.layers=6
    python train.py examples/own_text.py shards.root=https://host/texts
        # for texts larger than a disk: {"text": ...} lines

Without `text.path` the text is the documentation that comes with Python. The loss on the last tenth
ends below 1.6 nats a character, after some 175 s of CPU time with bf16, or 103 s on two processes
with global_batch=16. engine/contract.py is the complete interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import contract
from engine.config import option, section
from engine.contract import Batch, LockstepError, Loss, Sums, uniform
from formats.shards import RESUMABLE, Options, Shards, pair


@dataclass(frozen=True)
class Text:
    path: str = option("", "a text file, UTF-8; empty: Python's documentation")
    length: int = option(128, "characters of a window", low=2)
    val_share: float = option(0.1, "share of the text to validate on: its end", low=0.001, high=0.9)
    indent_weight: float = option(0.1, "weight of a space that follows another one", low=0)


@dataclass(frozen=True)
class Model:
    width: int = option(128, "channels of the residual stream", low=8)
    layers: int = option(4, "blocks", low=1)
    heads: int = option(4, "attention heads", low=1)


@dataclass
class Settings(contract.Settings):
    text: Text = section(Text)
    shards: Options = section(Options)
    model: Model = section(Model)


class Windows:
    """A dataset of the windows of a text.

    drawn  in every epoch move the beginning of each window by up to `length` characters; the move
           depends on the loader's seeds alone: equal on any number of processes, in loader
           processes, and after a resume
    """

    def __init__(self, text: Tensor, weight: Tensor, length: int, drawn: bool):
        # (N,) int64, (N,) float32
        self.text, self.weight, self.length, self.drawn = text, weight, length, drawn

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitems__(self, indices: list[int], seeds: Tensor) -> Batch:
        first = torch.tensor(indices) * self.length  # (B,)
        if self.drawn:
            first += (uniform(seeds, 1)[:, 0] * self.length).long()
        first = first.clamp(max=len(self.text) - self.length - 1)
        places = first[:, None] + torch.arange(self.length + 1)  # (B, T + 1)
        chars = self.text[places]
        return {"x": chars[:, :-1], "y": chars[:, 1:], "weight": self.weight[places[:, 1:]]}


class Documents(Shards):
    """A dataset of texts in shards, {"text": ...} each, with one window per text.

    The loader's seeds decide the first character of a window. Characters are bytes here, because
    numbering the characters would need a pass over all texts.
    """

    length, indent_weight = 128, 0.1

    def __getitems__(self, indices: list[int], seeds: Tensor) -> Batch:
        texts = [text_of(sample) for sample in self.read(indices)]
        draws = uniform(seeds, 1)[:, 0].tolist()
        chars = torch.zeros(len(texts), self.length + 1, dtype=torch.int64)
        weight = torch.zeros(len(texts), self.length)
        for n, text in enumerate(texts):
            first = int(draws[n] * max(1, len(text) - self.length))
            part = torch.tensor([*text[first : first + self.length + 1]])
            chars[n, : len(part)] = part
            # Characters after the end of a short text have weight 0.
            weight[n, : len(part) - 1] = 1.0
        spaces = chars == ord(" ")
        weight[spaces[:, 1:] & spaces[:, :-1]] *= self.indent_weight
        return {"x": chars[:, :-1], "y": chars[:, 1:], "weight": weight}


def text_of(sample: dict[str, Any]) -> bytes:
    """Return the text of a line of jsonl, a row of parquet, or a tar's sample (the file .txt)."""
    return sample["txt"] if "txt" in sample else sample["text"].encode()


class Task(contract.Task):
    Settings = Settings
    resumable_keys = tuple(f"shards.{key}" for key in RESUMABLE)
    defaults = {"epochs": 5, "batch_size": 16, "optim.lr": 3e-3, "schedule.warmup_epochs": 0.5}

    def datasets(self) -> tuple[Any, Any]:
        cfg = self.cfg.text
        if self.cfg.shards.root:
            sets = pair(self.cfg.shards, kind=Documents)
            for each in filter(None, sets):
                each.length, each.indent_weight = cfg.length, cfg.indent_weight
            self.chars, self.text = "".join(map(chr, range(256))), sets[0].summary()
            return sets
        text = read(cfg.path) if cfg.path else documentation()
        self.chars = "".join(sorted(set(text)))
        number = {char: n for n, char in enumerate(self.chars)}
        chars = torch.tensor([number[char] for char in text])
        spaces = torch.tensor([char == " " for char in text])
        weight = torch.ones(len(text))
        # The loss is a mean over weights, not over characters.
        weight[1:][spaces[1:] & spaces[:-1]] = cfg.indent_weight
        cut = len(text) - int(cfg.val_share * len(text))
        if min(cut, len(text) - cut) <= cfg.length:
            raise LockstepError(
                f"a text of {len(text)} characters", "text", "a longer one, or text.length"
            )
        train = Windows(chars[:cut], weight[:cut], cfg.length, drawn=True)
        val = Windows(chars[cut:], weight[cut:], cfg.length, drawn=False)
        self.text = (
            f"{len(text)} characters, {len(self.chars)} different; {len(train)} windows "
            f"of {cfg.length} to train on"
        )
        return train, val

    def metadata(self) -> dict[str, Any]:
        return {"chars": self.chars}

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        self.chars = metadata["chars"]

    def summary(self) -> str:
        return self.text

    def model(self) -> nn.Module:
        cfg = self.cfg.model
        return GPT(len(self.chars), self.cfg.text.length, cfg.width, cfg.layers, cfg.heads)

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Return two sums, the loss and the weight: windows differ in weight.

        The engine divides over all passes and processes.
        """
        return Loss(self._losses(net, batch).sum(), batch["weight"].sum())

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        total, weight = self._losses(model, batch).double().sum(), batch["weight"].double().sum()
        return Sums(total=total, weight=weight, count=torch.tensor(len(batch["x"])))

    def report(self, sums: Sums) -> dict[str, float]:
        nats = float(sums["total"] / sums["weight"])
        return {"loss": nats, "bits_per_character": nats / 0.6931471805599453}

    def _losses(self, net: nn.Module, batch: Batch) -> Tensor:
        logits = net(batch["x"]).float()  # (B, T, C)
        return (
            F.cross_entropy(logits.transpose(1, 2), batch["y"], reduction="none") * batch["weight"]
        )


class GPT(nn.Module):
    """YOUR MODEL goes here.

    A decoder with learned positions, and the embedding as the last layer.
    """

    def __init__(self, chars: int, length: int, width: int, layers: int, heads: int):
        super().__init__()
        self.embed = nn.Embedding(chars, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, chars, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, chars) logits of the next character for (B, T) character numbers."""
        return self.head(self.norm(self.blocks(self.embed(x) + self.place[: x.shape[1]])))


class Block(nn.Module):
    """An attention block with a causal mask, normalised before each part."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, width) for (B, T, width)."""
        # (B, H, T, D)
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise LockstepError(
            f"cannot read the text: {error}", path, "give a text file in UTF-8"
        ) from None


def documentation() -> str:
    from pydoc_data.topics import topics  # what `help("while")` shows

    return "".join(topics[name] for name in sorted(topics))
