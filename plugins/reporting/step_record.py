"""The record of a step (`record=N`): a small file with the results of step N, to compare two
machines; see tools/compare.py.

The file has NumPy's format .npz. `about` is a JSON text: the step, config, environment, types of
modules, and `entries`, the tensors of the step in their order. For each pass the entries are the
leaves of the batch, the output of each module in forward order, and the loss. Then follow the
gradients of the optimizer (divided, clipped), and the weights and buffers after the step. An entry
has `rows` rows from `first` on in the arrays: a row for each sample, if the leading axis is that of
the pass's samples.

positions  (R,) int64: the position of the sample in the epoch, or -1
indices    (R,) int64: the number of the sample in the dataset, or -1
digests    (R,) int64: of bits and places
norms      (R,) float64
sketches   (R, 8) float64: sums with random signs. The root of the mean square of the difference of
           two sketches estimates the norm of the difference of the rows, to about a quarter.
"""

from __future__ import annotations

import collections
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine import code_digest, config, hooks
from engine.comm import digests
from engine.comm.shards import to_full
from engine.contract import INFO_KEY
from engine.data.batches import tree_leaves
from engine.environment import environment
from engine.errors import console
from engine.files.atomic import write_atomically
from engine.optim.rates import rates_of
from engine.run import Run

SIGNS, COLUMNS = 8, 1 << 17
"""Numbers of a sketch, and columns that are sketched at once. The signs take 8 MB."""

ARRAYS = ("positions", "indices", "digests", "norms", "sketches")


class StepRecord:
    """(all ranks) Follow the step `cfg.record`, and write the file at the end of the step.

    entries  the tensors of this rank, each with the arrays of the tensor
    micro    the pass under way; None outside of a pass
    calls    calls of each module in the pass
    """

    def __init__(self, run: Run, folder: Path):
        self.run = run
        self.number = run.cfg.record
        self.path = folder / f"record_step_{self.number}.npz"
        self.entries: list[dict[str, Any]] = []
        self.micro: Any = None
        hooks.check_settings("record", cfg=run.cfg, plan=run.plan)

    def follow(self, steps: Iterable[Any]) -> Iterator[Any]:
        """Yield the steps of an epoch; the passes of the recorded step are followed."""
        for passes in steps:
            recorded = self.run.progress.step + 1 == self.number
            yield self._follow_passes(passes) if recorded else passes

    def finish(self) -> None:
        """Do nothing: `end` writes the file."""

    def _follow_passes(self, passes: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the passes of the recorded step, and record the outputs of modules."""
        handles = []
        for name, module in self.run.model.named_modules():
            add_output = partial(self._add_output, name or "the model")
            handles.append(module.register_forward_hook(add_output))
        for batch, self.micro in passes:
            self.calls: collections.Counter[str] = collections.Counter()
            for name, leaf in tree_leaves(batch):
                if name.split(".")[0] != INFO_KEY:
                    self._add("batch", name, leaf)
            yield batch, self.micro
        for handle in handles:
            handle.remove()

    def _add_output(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        self.calls[name] += 1
        if self.calls[name] > 1:
            name = f"{name} (call {self.calls[name]})"
        for part, leaf in tree_leaves(output):
            self._add("forward", f"{name}: {part}" if part else name, leaf)

    def _add(self, kind: str, name: str, value: Any) -> None:
        """Add an entry with a tensor of the pass under way, or of the whole step outside of a
        pass."""
        micro = self.micro
        if not isinstance(value, Tensor) or not value.numel() or (micro and micro.empty):
            return
        positions, indices = [-1], [-1]
        place = []
        if micro:
            of_pass = [*range(micro.positions.stop)[micro.positions]]
            place = [*of_pass[:1], micro.worker]
            if value.shape[:1] == (len(micro.indices),):
                positions, indices = of_pass, micro.indices
        with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
            sketches = sketched(value.detach().reshape(len(positions), -1))
        columns = [positions, indices, *(each.cpu() for each in sketches)]
        self.entries.append(
            {
                "kind": kind,
                "name": name,
                "pass": place,
                "shape": [*value.shape],
                "dtype": str(value.dtype),
                "arrays": dict(zip(ARRAYS, map(np.asarray, columns), strict=True)),
            }
        )

    def end(self, totals: Tensor) -> None:
        """(all ranks) At the end of the recorded step, write the file.

        totals  (3 + sums,) of the step, see `Run.loss_vector`
        """
        run = self.run
        if run.progress.step != self.number:
            return
        for self.micro, loss in run.meter.losses:
            self._add("loss", "of the pass", loss)
        entries_of_ranks = run.world.gather_on_main(self.entries)
        if not (run.world.main or run.plan.sharded):
            return
        self.micro = None
        self.entries = sorted(itertools.chain(*entries_of_ranks), key=lambda entry: entry["pass"])
        self._add("loss", "of the step: total and weight", totals[1:3])
        for name, p in run.model.named_parameters():
            self._add_whole("gradient", name, p.grad)
        for name, tensor in (*run.model.named_parameters(), *run.model.named_buffers()):
            self._add_whole("weight", name, tensor)
        if not run.world.main:
            return
        try:
            write_atomically(self.path, lambda file: file.write(self._content()))
        except OSError as error:
            console.warning(f"the record of step {self.number} was not written: {error.strerror}")
        else:
            console.info(f"  record       {self.path} ({self.path.stat().st_size / 1e3:.0f} kB)")

    def _add_whole(self, kind: str, name: str, tensor: Tensor | None) -> None:
        """(all ranks with shards) Add a tensor of which each rank may hold rows."""
        if tensor is not None:
            self._add(kind, name, to_full(tensor.detach()))

    def _content(self) -> bytes:
        """Return the bytes of the file."""
        run = self.run
        arrays = {}
        for name in ARRAYS:
            arrays[name] = np.concatenate([entry["arrays"][name] for entry in self.entries])
        first = 0
        for entry in self.entries:
            rows = len(entry.pop("arrays")["norms"])
            entry |= {"first": first, "rows": rows}
            first += rows
        about = {
            "step": self.number,
            "processes": run.world.size,
            "lr": rates_of(run.optimizer)[-1],
            "config": config.to_dict(run.cfg),
            "environment": environment(run),
            **code_digest.described(run.record.code),
            "data": run.record.fingerprint.text,
            "data_facts": run.record.fingerprint.facts,
            "modules": {name: type(module).__name__ for name, module in run.model.named_modules()},
            "entries": self.entries,
        }
        arrays["about"] = np.array(json.dumps(about))
        file = io.BytesIO()
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        return file.getvalue()


def sketched(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the digests (R,) int64, norms (R,) and sketches (R, SIGNS) float64 of rows (R, F)."""
    squares = torch.zeros(len(rows), 1, dtype=torch.float64, device=rows.device)
    sums = torch.zeros(len(rows), SIGNS, dtype=torch.float64, device=rows.device)
    for begin in range(0, rows.shape[1], COLUMNS):
        part = rows[:, begin : begin + COLUMNS]
        if part.is_complex():
            part = part.abs()
        part = part.double()
        places = torch.arange(begin, begin + part.shape[1], device=rows.device)
        bits = digests.hashed(places)[:, None] >> torch.arange(SIGNS, device=rows.device)
        squares += part.square().sum(1, keepdim=True)
        sums += part @ ((bits & 1) * 2 - 1).double()
    return digests.of_rows(rows), squares[:, 0].sqrt(), sums
