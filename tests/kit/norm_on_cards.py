"""What GPUs would run of `models/norm_kernels.py`, found on a machine without one; prints a line of JSON.

    python tests/kit/norm_on_cards.py

forward, backward  the kernels in the graphs that torch's compiler makes of a norm
written            what each of them writes
kept               shapes of what the forward pass keeps for the backward pass
kernels            {map, GPU and kernel: registers, bytes that are spilled, bytes of the accesses to maps}
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from models import norm_kernels as norm

ARCHITECTURES = (80, 90, 100)  # A100, H100 and H200, B200; all three for one map
EVERYWHERE = "video 64 x 64 channels last"
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MAPS = ("x", "y", "grad", "of_x")
NETWORKS = {
    "video 64 x 64 channels last": ((2, 17, 64, 64, 40), True),
    "video 64 x 64 contiguous": ((2, 40, 17, 64, 64), False),
    "video 16 x 16 channels last": ((2, 17, 16, 16, 160), True),
    "har contiguous": ((2, 48, 1, 64), False),
    "har channels last": ((2, 1, 32, 96), True),
    "odd contiguous": ((2, 21, 31, 31), False),
}


class Driver:
    """The compiler asks for the GPU, to see which of its arguments a kernel writes."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


class Traced(Exception):
    pass


def calls(graph):
    """Names of the Triton kernels, and the arguments that each writes."""
    nodes = [node for node in graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    names = [kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).fn.__name__ for node in nodes]
    return names, [sorted(node.kwargs["tensors_to_clone"]) for node in nodes]


def traced():
    found = {}

    def partition(joint, *args, **more):
        names, found["written"] = calls(joint.graph)
        forward, backward = min_cut_rematerialization_partition(joint, *args, **more)
        found["forward"], found["backward"] = calls(forward.graph)[0], calls(backward.graph)[0]
        assert names == found["forward"] + found["backward"]
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        found["kept"] = sorted([*value.meta["val"].shape] for value in output.args[0][1:])
        return forward, backward

    def compiler(graph, example):
        def run(_):
            raise Traced

        run._boxed_call = True
        return run

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    x = torch.randn(2, 40, 3, 32, 32, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.randn(40, requires_grad=True) for _ in range(2))
    step = torch.compile(lambda x, w, b: norm.group_norm(x, 8, w, b, 1e-5, "relu") * 2, backend=backend, fullgraph=True)
    try:
        step(x, weight, bias)
    except Traced:
        return found
    raise AssertionError("the compiled step ran")


def compiled(kernel, constants, warps, size, architecture):
    signature, divisible = {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        numbers = {"S": "i32", "CHUNKS": "i32", "eps": "fp32"}
        usual = "*bf16" if name in MAPS else "*fp32"
        signature[name] = "constexpr" if parameter.is_constexpr else numbers.get(name, usual)
        if signature[name].startswith("*") or (name == "S" and size % 16 == 0):
            divisible[(place,)] = [["tt.divisibility", 16]]
    values = {(i,): constants[p.name] for i, p in enumerate(kernel.params) if p.is_constexpr}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=divisible)
    target = GPUTarget("cuda", architecture, 32)
    code = triton.compile(source, target=target, options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        said = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK", "LOCAL"))
    accesses = re.findall(r"(?:ld|st)\.global\S*?((?:\.v\d)?\.[bu]\d+)", code.asm["ptx"])
    widths = {".v4.b32": 16, ".v2.b32": 8, ".v2.b64": 16, ".b16": 2, ".u16": 2, ".v2.b16": 4, ".v4.b16": 8}
    maps = sorted({widths[access] for access in accesses if access in widths})
    return {"registers": registers, "spilled": stack + local, "maps": maps}


def kernels():
    found = {}
    for network, (shape, last) in NETWORKS.items():
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        form = norm.form_of(x.movedim(-1, 1) if last else x, 8 if shape[-1 if last else 1] % 8 == 0 else 3)
        columns = min(64, triton.next_power_of_2(form.of_group))
        constants = {
            "C": form.channels, "D": form.of_group, "LAST": form.last, "AFFINE": True, "ACTIVATION": 2,
            "TILES": form.tiles, "BLOCK_S": form.block_s, "BLOCK_C": form.block_c, "CHUNK": form.tiles * form.block_s,
            "BLOCK": 1024, "BLOCK_D": columns, "BLOCK_P": 2048 // columns,
        }  # fmt: skip
        large = "_moments _merged_moments _large_forward _gradient_sums _merged_sums _large_backward".split()
        for name in large if form.chunks else ["_small_forward", "_small_backward"]:
            warps = 4 if "merged" in name else form.warps
            if name in ("_moments", "_gradient_sums"):
                warps = form.warps_of_sums
            for architecture in ARCHITECTURES if network == EVERYWHERE else [90]:
                kernel = getattr(norm, name)
                found[f"{network} {architecture} {name}"] = compiled(kernel, constants, warps, form.size, architecture)
    return found


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    print(json.dumps(traced() | {"kernels": kernels()}))
