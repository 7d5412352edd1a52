"""Export a trained model as a file that runs without this code, and compare file and model on real
batches.

python tools/export.py RUN                        RUN/model.pt2, for torch.export.load
python tools/export.py RUN --format onnx          RUN/model.onnx; pip install onnx onnxscript
                                                  onnxruntime

RUN is the folder of a run (the best checkpoint is read) or a checkpoint. Inputs are raw and of any
batch size: gray clips (B, T, H, W) uint8, sensor windows (B, T, C) float32 in the sensor's units, a
robot's observation in recorded units, pictures as uint8 of the trained size, and the command as
numbers. The file normalises the inputs. Outputs are logits and probabilities, or actions. The file
also holds the classes' names and a description of the inputs, as JSON under "lockstep".

Batches of several sizes go through the file and the model. The batches are from the validation
split, or else from the training data. The largest difference is printed. Nothing is written for a
difference above --tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import train
from engine import config, kernels
from engine.comm.world import World
from engine.errors import LockstepError
from engine.files.atomic import write_atomically
from plugins.reporting import plan_text
from tools.arguments import Parser
from tools.output import print_json
from tools.running import alone, folder_of, guarded, in_world
from tools.use.evaluate import TRUST, of_run
from tools.use.published import shown

Input = Tensor | dict[str, Tensor]
Run = Callable[[Input], dict[str, Tensor]]
META = "lockstep"
"""Name of the model's description in the file: an extra file of a .pt2, metadata in ONNX."""


@dataclass
class Exported:
    """The bytes of a file, and the function of the loaded file."""

    data: bytes
    run: Run


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="export.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, or a checkpoint")
    add("--format", choices=FORMATS, default="pt2", help="pt2 (torch.export) or onnx")
    add("--out", type=Path, help="the file (default: model.pt2 or model.onnx in the run's folder)")
    add(
        "--tolerance",
        type=float,
        default=1e-4,
        help="largest difference, where outputs are about 1 (default: 1e-4)",
    )
    add("--json", action="store_true", help="one JSON object on stdout")
    add("--trust", action="store_true", help=TRUST)
    options, rest = parser.parse_known_args(argv)

    def work(args: config.Args) -> int:
        return _export(args, options)

    return guarded([options.run, *rest], work, partial(of_run, options.trust), options.json)


def _export(args: config.Args, options: argparse.Namespace) -> int:
    alone("a model is exported by one process", "export.py")
    out = options.out or folder_of(Path(options.run)) / f"model.{options.format}"
    fixed: dict[str, Any] = {"device": "cpu", "cache": "none", "compile": "off"}
    fixed |= {"cuda_graph": False, "ddp.shares": []}
    args = args._replace(cfg=config.changed(args.cfg, fixed))
    with contextlib.redirect_stdout(sys.stderr):  # of the exporter, too
        about, exported, found = in_world(
            args.cfg, lambda world, _: _compared(args, world, options.format)
        )
    worst = float(np.max([relative for _, _, relative in found]))
    if not worst <= options.tolerance:  # NaN fails too, and Python's own max would lose it
        what = f"the exported model is off by {worst:.3g} of its largest output"
        todo = f"nothing was written; --tolerance is {options.tolerance:g}"
        raise LockstepError(what, options.format, todo, exit_code=1)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, lambda file: file.write(exported.data))
    except OSError as error:
        raise LockstepError(
            f"cannot write: {error.strerror}", str(out), "give another --out"
        ) from None
    path = about.pop("path")
    sizes = [{"batch": size, "largest_difference": largest} for size, largest, _ in found]
    if options.json:
        print_json(about | {"file": str(out), "format": options.format, "differences": sizes})
        return 0
    print(f"{path}, step {about['step']}:")
    for row in sizes:
        print(
            f"  batch of {row['batch']:<4}  largest difference to the model "
            f"{row['largest_difference']:.3g}"
        )
    for name in ("inputs", "outputs"):
        for one in about[name]:
            print(
                f"  {name[:-1]:<7} {one['name']}: {one['dtype']} "
                f"({', '.join(map(str, one['shape']))})"
            )
    print(f"Wrote {out} ({len(exported.data) / 1e6:.1f} MB)")
    return 0


def _compared(
    args: config.Args, world: World, kind: str
) -> tuple[dict[str, Any], Exported, list[Any]]:
    """Return (the file's description, the file, (size, largest difference, relative) of each real
    batch)."""
    run = train.build(args, world, split="any")
    plan_text.print_plan(run, steps=False)
    with run.evaluated() as averaged:
        model = kernels.apply_memory_format(copy.deepcopy(averaged).float().eval(), "contiguous")
    module, input_of = run.task.export_module(model)
    module.eval()
    with torch.no_grad():
        inputs = list(real_inputs(input_of(batch) for batch in run.loaders.val))
        outputs = module(inputs[-1])
        about = {
            "task": args.cfg.task,
            "checkpoint": run.record.resumed.path.name if run.record.resumed.path else "",
            "step": run.progress.step,
            "inputs": _described(inputs[-1]),
            "outputs": _described(outputs),
            # Not the names of the recordings: the file is handed on.
            "known": {
                name: value for name, value in run.task.metadata().items() if name != "videos"
            },
        }
        exported = FORMATS[kind](module, _two_at_least(inputs[-1]), [*outputs], json.dumps(about))
        found = [(_size(x), *differences(module(x), exported.run(x))) for x in inputs]
    return about | {"path": shown(run.record.resumed.path or "")}, exported, found


# ---- real batches
# --------------------------------------------------------------------------------------------------


def real_inputs(whole: Iterator[Input]) -> Iterator[Input]:
    """Yield one sample, three, and up to three whole batches, with the first batch last."""
    first = next(whole)
    yield _mapped(first, lambda x: x[:1])
    yield _mapped(first, lambda x: x[:3])
    yield from (_mapped(batch, Tensor.contiguous) for batch in islice(whole, 2))
    yield _mapped(first, Tensor.contiguous)


def _mapped(x: Input, change: Callable[[Tensor], Tensor]) -> Input:
    if isinstance(x, dict):
        return {name: change(value).contiguous() for name, value in x.items()}
    return change(x)


def _size(x: Input) -> int:
    return len(next(iter(x.values()))) if isinstance(x, dict) else len(x)


def _two_at_least(x: Input) -> Input:
    """Return an example to trace. The exporter would fix the size of a batch of 1."""
    return x if _size(x) > 1 else _mapped(x, lambda value: torch.cat([value, value]))


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, float]:
    """Return the largest absolute difference over all outputs, and the largest relative difference.

    The divisor is the output's largest number, at least 1. Raises LockstepError for different
    outputs.
    """
    if ours.keys() != theirs.keys():
        raise LockstepError(
            f"the exported model gives {', '.join(theirs)} instead of {', '.join(ours)}",
            exit_code=1,
        )
    pairs = [(ours[name].double(), theirs[name].double()) for name in ours]
    gaps = [(float((a - b).abs().max()), max(1.0, float(a.abs().max()))) for a, b in pairs]
    return float(np.max([gap for gap, _ in gaps])), float(
        np.max([gap / size for gap, size in gaps])
    )


def _described(values: Input) -> list[dict[str, Any]]:
    named = values if isinstance(values, dict) else {"x": values}
    return [
        {
            "name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": ["batch", *value.shape[1:]],
        }
        for name, value in named.items()
    ]


# ---- formats
# --------------------------------------------------------------------------------------------------


def _traced(module: nn.Module, example: Input) -> Any:
    batch = torch.export.Dim("batch", min=1)
    shape: Any = {name: {0: batch} for name in example} if isinstance(example, dict) else {0: batch}
    return torch.export.export(module, (example,), dynamic_shapes=(shape,))


def pt2(module: nn.Module, example: Input, outputs: list[str], about: str) -> Exported:
    """Write torch's format: `torch.export.load(file).module()(x)`."""
    file = io.BytesIO()
    torch.export.save(_traced(module, example), file, extra_files={META: about})
    data = file.getvalue()
    return Exported(data, torch.export.load(io.BytesIO(data)).module())


def onnx(module: nn.Module, example: Input, outputs: list[str], about: str) -> Exported:
    """Write ONNX in one file, weights included."""
    # telemetry is on by default and leaves a file in /tmp
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
        import onnxscript  # noqa: F401, torch's exporter needs it
    except ImportError as error:
        todo = "pip install onnx onnxscript onnxruntime"
        raise LockstepError(
            f"the ONNX format needs more packages: {error}", "--format onnx", todo
        ) from None
    names = [*example] if isinstance(example, dict) else ["x"]
    logging.disable(logging.WARNING)  # about packages that are not needed
    warnings.simplefilter("ignore", FutureWarning)  # torch warns about torch's own code
    program: Any = torch.onnx.export(
        _traced(module, example),
        input_names=names,
        output_names=outputs,
        dynamo=True,
        verbose=False,
    )
    model = program.model_proto
    model.metadata_props.add(key=META, value=about)
    data = model.SerializeToString()
    onnxruntime.set_default_logger_severity(3)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def run(x: Input) -> dict[str, Tensor]:
        given = x if isinstance(x, dict) else {"x": x}
        found = session.run(outputs, {name: value.numpy() for name, value in given.items()})
        return {name: torch.from_numpy(value) for name, value in zip(outputs, found, strict=True)}

    return Exported(data, run)


FORMATS: dict[str, Callable[[nn.Module, Input, list[str], str], Exported]] = {
    "pt2": pt2,
    "onnx": onnx,
}
