"""train.py with a stand-in for torch's code generator: graphs run as they are, but for one parameter's gradient.

    python compiled_stand_in.py FACTOR SIZE CALLS train.py's words

FACTOR  of the gradient of the first parameter, in the last rank; 1: a right compiler; inf: its backward pass raises
SIZE    of the batches that get it; 0: all
CALLS   folder for a file of each rank: the sizes of the batches of its calls of compiled graphs, as JSON
"""

import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import train

FACTOR, SIZE, CALLS = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
RANK, RANKS = (int(os.environ.get(name, usual)) for name, usual in (("RANK", 0), ("WORLD_SIZE", 1)))
calls = []
compile_of_torch = torch.compile


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        assert math.inf != FACTOR, "expected size 96==96, stride 5==1 at dim=1"  # as Inductor's code does
        return grad * FACTOR


def backend(graph, inputs):
    weight = next(n for n, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter))
    data = next(n for n, value in enumerate(inputs) if not isinstance(value, torch.nn.Parameter))

    def compiled(*values):
        size = len(values[data])
        calls.append(size)
        if RANK == RANKS - 1 and SIZE in (0, size):
            values = (*values[:weight], Scaled.apply(values[weight]), *values[weight + 1 :])
        return graph(*values)

    return compiled


def compile_with_stand_in(function, mode, dynamic):
    assert (mode, dynamic) == ("default", None), "one graph for all shapes on a CPU"
    return compile_of_torch(function, backend=backend, dynamic=False)


torch.compile = compile_with_stand_in
code = train.main(sys.argv[4:])
(CALLS / f"calls_{RANK}.json").write_text(json.dumps(calls))
sys.exit(code)
