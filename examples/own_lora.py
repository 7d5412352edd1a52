"""Fine-tune a language model of Hugging Face with LoRA: train and save adapters only.

Fork this file.

    pip install transformers peft                       (the extra [lora])
    python train.py examples/own_lora.py
    torchrun --standalone --nproc_per_node=2 train.py examples/own_lora.py text.path=mine.txt
        text.base=models/gpt2

`text.base` is the folder of a pretrained model. Without `text.base` the base is a tiny GPT-2 with
random weights and bytes as tokens. Without `text.path` the text is made up. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine import contract
from engine.config import option, section
from engine.contract import Batch, LockstepError, Loss, Sums


@dataclass
class Text:
    path: str = option("", "a text in UTF-8; empty: a made-up one")
    base: str = option(
        "", "folder of a pretrained model with its tokenizer; empty: a tiny one with random weights"
    )
    length: int = option(32, "tokens of a sample", low=2)
    rank: int = option(8, "rank of the adapters", low=1)


@dataclass
class Settings(contract.Settings):
    text: Text = section(Text)


class Windows:
    """A dataset of the pieces of a text, (length + 1,) tokens each."""

    def __init__(self, tokens: Tensor, length: int):
        self.tokens = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, indices: list[int]) -> Batch:
        return {"tokens": self.tokens[indices]}


class Task(contract.Task):
    Settings = Settings
    defaults = {"epochs": 8, "batch_size": 16, "optim.lr": 1e-2, "optim.weight_decay": 0.0}

    def datasets(self) -> tuple[Windows, Windows]:
        cfg = self.cfg.text
        tokens = tokenize(read(cfg.path) if cfg.path else made_up(), cfg.base)
        cut = int(0.9 * len(tokens))  # the end of the text is validated on
        return Windows(tokens[:cut], cfg.length), Windows(tokens[cut:], cfg.length)

    def model(self) -> nn.Module:
        """Return a frozen base with adapters.

        Every start loads the base here, also the start of a resumed run.
        """
        transformers, peft = needed("transformers"), needed("peft")
        base = self.cfg.text.base
        if base:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                base, local_files_only=True, dtype=torch.float32
            )
        # The random weights are equal on every start, because of `seed`. Without dropout the
        # result does not depend on the partition of the batch.
        else:
            sizes = {"vocab_size": 256, "n_positions": 256, "n_embd": 48, "n_layer": 2, "n_head": 2}
            others = {
                "initializer_range": 0.2,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            }
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **others))
        model.config.use_cache = False
        adapters = peft.LoraConfig(
            task_type="CAUSAL_LM", r=self.cfg.text.rank, target_modules="all-linear"
        )
        return peft.get_peft_model(model, adapters)

    def saved(self, name: str) -> bool:
        return "lora_" in name

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Return sums, never means: the engine divides, once, over all passes and ranks."""
        tokens = batch["tokens"]
        return Loss(_loss(net, tokens), torch.tensor(tokens[:, 1:].numel()))

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        tokens = batch["tokens"]
        return Sums(
            loss=_loss(model, tokens),
            tokens=torch.tensor(tokens[:, 1:].numel()),
            count=torch.tensor(len(tokens)),
        )

    def report(self, sums: Sums) -> dict[str, float]:
        loss = float(sums["loss"] / sums["tokens"])
        return {"loss": loss, "perplexity": float(torch.tensor(loss).exp())}


def _loss(net: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross entropy, summed over all tokens."""
    logits = net(input_ids=tokens[:, :-1]).logits.float()  # (B, length, vocabulary)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )


def needed(package: str) -> Any:
    """Import a package. Raises LockstepError if the package is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise LockstepError(
            f"this needs {package}", "examples/own_lora.py", f"pip install {package}"
        ) from None


def tokenize(text: str, base: str) -> Tensor:
    if not base:
        return torch.tensor([*text.encode()])
    tokenizer = needed("transformers").AutoTokenizer.from_pretrained(base, local_files_only=True)
    return torch.tensor(tokenizer(text)["input_ids"])


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise LockstepError(
            f"cannot read the text: {error}", path, "give a text in UTF-8"
        ) from None


def made_up() -> str:
    return "".join(f"{a} and {b} are {a + b}. " for a in range(40) for b in range(12))
