"""`record=N`: a small file with what step N has computed, by which two machines are compared; see
tools/compare.py.

The file is NumPy's .npz. `about` is a JSON text: the step, config, environment, types of modules,
and `entries`: the tensors of the step in their order. Of each pass these are the batch's leaves,
every module's output in forward order, and the loss; then the gradients as the optimizer got them
(divided, clipped), and the weights and buffers after the step. An entry has `rows` rows from
`first` on in the arrays: one for each sample if its leading axis is that of the pass's samples.

positions  (R,) int64: the sample's position in the epoch, or -1
indices    (R,) int64: the sample's number in the dataset, or -1
digests    (R,) int64: of bits and places
norms      (R,) float64
sketches   (R, 8) float64: sums with random signs. The root of the mean square of the difference of
           two sketches
           estimates the norm of the difference of the rows, to about a quarter.
"""

from __future__ import annotations

import collections
import io
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine import config
from engine.comm import digests
from engine.comm.shards import to_full
from engine.contract import INFO_KEY
from engine.data.batches import tree_leaves
from engine.environment import environment
from engine.errors import LockstepError, console
from engine.files.atomic import write_atomically
from engine.run import Run

SIGNS, COLUMNS = 8, 1 << 17
"""Numbers of a sketch, and columns that are sketched at once: their signs take 8 MB."""

ARRAYS = ("positions", "indices", "digests", "norms", "sketches")


class StepRecord:
    """(all ranks) Watch the step `cfg.record`, and write the file when it has been taken."""

    def __init__(self, run: Run, folder: Path):
        plan, self.run, self.number = run.plan, run, run.cfg.record
        self.path = folder / f"record_step_{self.number}.npz"
        self.entries: list[dict[str, Any]] = []  # of this rank, each with its arrays
        self.micro: Any = None  # of the pass under way
        hidden = {
            "compile": plan.compile != "off",
            "cuda_graph": run.cfg.cuda_graph,
            "multi_gpu=dp": plan.devices,
        }
        if why := next((name for name, hides in hidden.items() if hides), ""):
            raise LockstepError(
                f"the modules of a step cannot be seen with {why}", "record", f"drop {why}"
            )
        if self.number > plan.total_steps:
            raise LockstepError(
                f"the run ends at step {plan.total_steps}",
                f"record={self.number}",
                "record one of it",
            )

    def follow(self, steps: Iterable[Any]) -> Iterable[Any]:
        """Return the steps of an epoch, each with its passes followed."""
        return map(self.follow_passes, steps)

    def finish(self) -> None:
        """The file is written at the end of its step."""

    def follow_passes(self, passes: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the passes of the coming step, watched if it is the one."""
        if self.run.progress.step + 1 != self.number:
            yield from passes
            return
        modules = self.run.model.named_modules()
        hooks = [
            each.register_forward_hook(partial(self._output, name or "the model"))
            for name, each in modules
        ]
        for batch, self.micro in passes:
            self.calls: collections.Counter[str] = collections.Counter()
            for name, leaf in tree_leaves(batch):
                if name.split(".")[0] != INFO_KEY:
                    self._add("batch", name, leaf)
            yield batch, self.micro
        for hook in hooks:
            hook.remove()

    def _output(self, name: str, module: Any, given: Any, output: Any) -> None:
        self.calls[name] += 1
        call = f" (call {self.calls[name]})" if self.calls[name] > 1 else ""
        for part, leaf in tree_leaves(output):
            self._add("forward", f"{name}{call}{part and f': {part}'}", leaf)

    def _add(self, kind: str, name: str, value: Any) -> None:
        """Note a tensor of the pass under way, or of the whole step if there is none."""
        micro = self.micro
        if (
            not isinstance(value, Tensor)
            or not value.numel()
            or (micro is not None and micro.empty)
        ):
            return
        places, indices = [-1], [-1]
        if micro is not None and value.shape[:1] == (len(micro.indices),):
            places, indices = [*range(micro.positions.stop)[micro.positions]], micro.indices
        with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
            found = [
                each.cpu().numpy() for each in sketched(value.detach().reshape(len(places), -1))
            ]
        arrays = dict(zip(ARRAYS, [np.array(places), np.array(indices), *found], strict=True))
        at = (
            [*range(micro.positions.stop)[micro.positions][:1], micro.worker]
            if micro is not None
            else []
        )
        about = {
            "kind": kind,
            "name": name,
            "pass": at,
            "shape": [*value.shape],
            "dtype": str(value.dtype),
        }
        self.entries.append(about | {"arrays": arrays})

    def end(self, totals: Tensor) -> None:
        """(all ranks) Write the file, if the step just taken is the one.

        totals  (3 + sums,) of the step, see `Run.loss_vector`
        """
        run = self.run
        if run.progress.step != self.number:
            return
        for self.micro, loss in run.meter.losses:
            self._add("loss", "of the pass", loss)
        of_passes = run.world.gather_on_main(self.entries)
        if not (run.world.main or run.plan.sharded):
            return
        self.micro, self.entries = (
            None,
            sorted((e for rank in of_passes for e in rank), key=lambda e: e["pass"]),
        )
        self._add("loss", "of the step: total and weight", totals[1:3])
        for kind, tensors in (
            ("gradient", ((name, p.grad) for name, p in run.model.named_parameters())),
            ("weight", (*run.model.named_parameters(), *run.model.named_buffers())),
        ):
            for name, tensor in tensors:
                self._add(kind, name, tensor if tensor is None else to_full(tensor.detach()))
        if not run.world.main:
            return
        try:
            write_atomically(self.path, lambda file: file.write(self._content()))
        except OSError as error:
            console.warning(f"the record of step {self.number} was not written: {error.strerror}")
        else:
            console.info(f"  record       {self.path} ({self.path.stat().st_size / 1e3:.0f} kB)")

    def _content(self) -> bytes:
        run, first, file = self.run, 0, io.BytesIO()
        arrays = {
            name: np.concatenate([entry["arrays"][name] for entry in self.entries])
            for name in ARRAYS
        }
        for entry in self.entries:
            entry |= {"first": first, "rows": len(entry.pop("arrays")["norms"])}
            first += entry["rows"]
        about = {
            "step": self.number,
            "processes": run.world.size,
            "lr": run.plan.lr(self.number - 1),
            "config": config.to_dict(run.cfg),
            "environment": environment(run),
            "code": digests.code(run.task),
            "data": run.record.fingerprint,
            "modules": {name: type(module).__name__ for name, module in run.model.named_modules()},
            "entries": self.entries,
        }
        arrays["about"] = np.array(json.dumps(about))
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        return file.getvalue()


def sketched(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(R, F) -> their digests (R,) int64, norms (R,) and sketches (R, SIGNS) float64."""
    squares, sums = (
        torch.zeros(len(rows), n, dtype=torch.float64, device=rows.device) for n in (1, SIGNS)
    )
    for begin in range(0, rows.shape[1], COLUMNS):
        part = rows[:, begin : begin + COLUMNS]
        part = (part.abs() if part.is_complex() else part).double()
        places = torch.arange(begin, begin + part.shape[1], device=rows.device)
        bits = digests.hashed(places)[:, None] >> torch.arange(SIGNS, device=rows.device)
        squares += part.square().sum(1, keepdim=True)
        sums += part @ ((bits & 1) * 2 - 1).double()
    return digests.of_rows(rows), squares[:, 0].sqrt(), sums
