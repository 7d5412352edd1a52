"""Base of tasks whose model may be a published backbone.

The module loads the backbone's weights from a file, sets its rates and caches its features.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from engine import contract
from engine.config import option
from engine.contract import Batch, LockstepError
from formats import home
from formats.weights import backbones
from formats.weights.features import VERSION, Features, compute_once, statistics
from models.backbone import Backbone
from tasks.shared.classification import Classification


@dataclass
class BackboneSettings:
    pretrained: str = option(
        "", "local file of a backbone's published weights; nothing is downloaded"
    )
    features: Literal["trained", "cached"] = option(
        "trained",
        (
            "cached: the backbone is frozen, computes the features of each sample once, and the "
            "head "
            "is trained"
        ),
    )
    views: int = option(
        1, "cached: versions of each sample, the first as it is, the others augmented", low=1
    )
    batch_norm: Literal["auto", "fixed", "batch"] = option(
        "auto",
        (
            "a backbone's BatchNorm: running statistics, fixed, or the batch's; auto: fixed "
            "where it "
            "is pretrained"
        ),
    )


class FromWeights(Classification):
    """A task whose config has `model: BackboneSettings` and whose model may be a `Backbone`.

    choose_by  key that chooses a backbone, for messages
    shard      samples per file of cached features, and per pass through the backbone
    """

    # The digests in a checkpoint show whether the pretrained weights are equal.
    resumable_keys = (*Classification.resumable_keys, "model.pretrained")
    choose_by = "model"
    shard = 16
    # (D,) mean and (D,) standard deviation of cached features
    _statistics: tuple[Tensor, Tensor] | None = None
    _note_on_features = ""  # a line on the cached features

    @classmethod
    def backbone(cls, cfg: Any) -> type[Backbone] | None:
        """Return the class of the config's backbone, None for a model of the task itself."""
        raise NotImplementedError

    def published_name(self) -> str:
        """Return the name of the chosen backbone in `backbones.PUBLISHED`."""
        raise NotImplementedError

    def new_backbone(self, fixed_norms: bool) -> Backbone:
        raise NotImplementedError

    @classmethod
    def defaults_for(cls, cfg: Any) -> dict[str, Any]:
        """Return the rates: a tenth of the head's rate for a pretrained backbone.

        On cached features, only the head is trained.
        """
        kind, model = cls.backbone(cfg), cfg.model
        if kind is None:
            return {}
        if model.features == "cached":
            return {
                "model.batch_norm": "fixed",
                "optim.lr": 3e-3,
                "epochs": 30,
                "schedule.warmup_epochs": 0.0,
            }
        if model.pretrained:
            scales = [f"{name}:0.1" for name in kind.parts]
            return {"model.batch_norm": "fixed", "optim.lr": 1e-3, "optim.lr_scale": scales}
        return {"model.batch_norm": "batch", "optim.lr": 1e-3}

    @property
    def _cached(self) -> bool:
        return bool(self.cfg.model.features == "cached")

    def check_backbone(self) -> None:
        """Raise LockstepError for contradictory keys of a backbone, or keys without a backbone."""
        model = self.cfg.model
        if self.backbone(self.cfg) is None:
            usual = BackboneSettings()
            for name in vars(usual):
                if (value := getattr(model, name)) != getattr(usual, name):
                    raise LockstepError(
                        "this model is no backbone",
                        f"model.{name}={value}",
                        f"give {self.choose_by}",
                    )
        elif self._cached and model.batch_norm == "batch":
            what = "cached features are computed sample by sample"
            raise LockstepError(
                what, "model.batch_norm=batch", "drop it, or give model.features=trained"
            )
        elif not self._cached and model.views > 1:
            what = "views are of cached features"
            raise LockstepError(
                what,
                f"model.views={model.views}",
                "give model.features=cached; else all is augmented",
            )

    # ---- the network ----

    def model(self) -> nn.Module:
        net = self._backbone_net()
        if self._statistics:
            net.standardise(*self._statistics)
        return net

    def _backbone_net(self) -> Backbone:
        """Return the backbone and its head with published weights, or with random weights.

        Random weights depend on the seed only, because cached features are computed before the
        engine seeds the model.
        """
        model = self.cfg.model
        fixed = model.batch_norm == "fixed" or (
            model.batch_norm == "auto" and bool(model.pretrained)
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.cfg.seed)
            net = self.new_backbone(fixed)
        self._is_part = net.is_part
        lines: list[str] = []
        # A checkpoint of a trained backbone has all weights.
        if model.pretrained and (self._cached or not self.resuming):
            weights, line = backbones.read(
                Path(model.pretrained).expanduser(), self.published_name(), net.shapes()
            )
            net.load_state_dict(weights, strict=False)
            lines = [line, f"  licence  {backbones.PUBLISHED[self.published_name()].licence}"]
        if self._cached:
            net.freeze()
        if lines:
            lines.append(f"  new      fc {tuple(net.fc.weight.shape)}, the head" + self._rates())
            lines.append(
                "  BatchNorm: "
                f"{'running statistics, which stay as they are' if fixed else 'by the batch'}"
            )
        self.started_from = "\n".join(lines)
        return net

    def _rates(self) -> str:
        scales = ",".join(self.cfg.optim.lr_scale)
        return (
            ": all else is frozen"
            if self._cached
            else f"; optim.lr_scale={scales}"
            if scales
            else ""
        )

    def saved(self, name: str) -> bool:
        """Return whether a checkpoint has the full values of a weight.

        For a frozen backbone, a checkpoint has only digests, as for any external weights.
        """
        return not (self._cached and self.backbone(self.cfg) and self._is_part(name))

    # ---- cached features ----

    def in_features(self, everything: Any, *parts: tuple[Any, np.ndarray]) -> list[Any]:
        """Convert the datasets of `parts` to features if features are cached.

        parts  (dataset, (n,) rows of `everything`): first the training part, then validation, then
               the rest

        Features cover all samples, whatever the split, so that the next split can use the cache.
        """
        self.check_backbone()
        if not self._cached:
            return [samples for samples, _ in parts]
        net = self._backbone_net().eval()
        on_gpu = torch.cuda.is_available() and self.cfg.device != "cpu"
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        net.to(device)
        about, folder = self._about(net)
        table, note, threads = [], "", 1 if on_gpu else torch.get_num_threads()
        for view in range(self.cfg.model.views):

            def compute(x: Tensor, net: Backbone = net) -> Tensor:
                with (
                    torch.inference_mode(),
                    torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
                ):
                    return net.features(x.to(device)).float().cpu()

            def fetch(begin: int, end: int, view: int = view) -> Tensor:
                x: Tensor = everything.__getitems__(list(range(begin, end)))["x"]
                # The seed depends only on the sample's number in all data, so every run uses equal
                # views.
                return (
                    self.augment(x, contract.sample_seeds(0, view, torch.arange(begin, end)))
                    if view
                    else x
                )

            sizes = len(everything), self.shard, net.num_features
            found, line = compute_once(folder, about, fetch, *sizes, compute, threads)
            table.append(found)
            note = note or line
        both = torch.stack(table)  # (V, M, D)
        made = [
            Features(both, rows, samples, views=n == 0) for n, (samples, rows) in enumerate(parts)
        ]
        self._raw = parts[1][0]
        self._statistics = statistics(both, parts[0][1][self.kept(parts[0][0])])
        by = self.published_name() + (
            "" if self.cfg.model.pretrained else ", whose weights are random"
        )
        self._note_on_features = f"Features: {net.num_features} of each sample by {by}; {note}"
        return made

    def raw(self, batch: Batch) -> Batch:
        """Return a batch of the validation split as raw samples, for an export."""
        if not self._cached:
            return batch
        return batch | {"x": self._raw.__getitems__(batch["lockstep"].index.tolist())["x"]}

    def _about(self, net: Backbone) -> tuple[bytes, Path]:
        """Return a digest of the features' inputs and the folder.

        The digest excludes the samples' bytes.
        """
        digest = hashlib.sha256(f"{VERSION} {type(net).__name__} {self.published_name()}".encode())
        for name, value in net.state_dict(keep_vars=False).items():
            if net.is_part(name):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        for kind in (Backbone, type(net)):  # includes the input's normalisation
            digest.update(Path(inspect.getfile(kind)).read_bytes())
        name = f"{self.published_name()}-{digest.hexdigest()[:16]}"
        return digest.digest(), home.cache_folder() / "features" / name

    def prepare(self, batch: Batch) -> Batch:
        """Choose a cached version of each sample by its seed, or augment the sample."""
        if not self._cached:
            return super().prepare(batch)
        if "views" not in batch:
            return batch
        every = torch.cat([batch["x"][:, None], batch["views"]], 1)  # (B, V, D)
        u = contract.uniform(batch["lockstep"].seed, 1)[:, 0]
        chosen = (u * every.shape[1]).long()
        x = every.gather(1, chosen[:, None, None].expand(-1, 1, every.shape[2])).squeeze(1)
        return {name: value for name, value in batch.items() if name != "views"} | {"x": x}

    def export_module(
        self, model: nn.Module
    ) -> tuple[nn.Module, Callable[[Batch], Tensor | dict[str, Tensor]]]:
        module, input_of = super().export_module(model)
        return module, lambda batch: input_of(self.raw(batch))

    def class_summary(self) -> str:
        lines = [super().class_summary(), self.backbone_note() if self.backbone(self.cfg) else ""]
        return "\n".join(filter(None, [*lines, self._note_on_features]))

    def backbone_note(self) -> str:
        """Return a line that compares the data with the training data of the published weights."""
        return ""
