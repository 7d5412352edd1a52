"""`arithmetic=capped`: the arithmetic of a CPU with AVX2, on every x86-64 CPU that has AVX2.

torch, oneDNN, MKL, NumPy and OpenBLAS choose their kernels by the kind of CPU. Each reads a
variable of the environment that limits the choice, once, when it is loaded. So the process sets the
variables and starts itself again.

MKL has an own choice for each maker of CPUs; MKL_CBWR=COMPATIBLE is the only one that CPUs of Intel
and AMD share. Some kernels of that choice begin with the instructions `rcpps` and `rsqrtps`, whose
results the maker of a CPU may choose. NumPy computes these functions in place of MKL.

docs/same-bits.md has the evidence, `python benchmarks/cpu_kinds.py` repeats it.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from engine import launch
from engine.errors import LockstepError, console, few

STARTED = "LOCKSTEP_CAPPED"
"""Environment variable: the process that has started itself again with VARIABLES."""


def _extensions() -> dict[str, list[str]]:
    """Return the extensions of CPUs that NumPy has kernels for; empty if NumPy does not list them,
    as a build of 1.26 by setuptools."""
    config: Any = None
    with suppress(TypeError):  # `show_config` has no `mode`
        config = np.show_config(mode="dicts")
    return (config or {}).get("SIMD Extensions", {})


def _variables() -> dict[str, str]:
    """Return the variables that limit the kernels, with their values."""
    # NumPy leaves out a list that is empty: "not found" on a CPU with all of them
    known = _extensions()
    names = sorted([*known.get("found", ()), *known.get("not found", ())])
    beyond_avx2 = [name for name in names if name == "X86_V4" or "AVX512" in name]
    return {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Haswell",
        # OpenBLAS cuts a product by its threads, of which there are as many as cores
        "OPENBLAS_NUM_THREADS": "1",
        # the names depend on the version of NumPy, and NumPy passes over a name that the CPU lacks
        "NPY_DISABLE_CPU_FEATURES": " ".join(beyond_avx2),
    }


VARIABLES = _variables()

CONFLICTS = (
    "DNNL_MAX_CPU_ISA",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_VML_DEBUG_CPU_TYPE",
    "NPY_ENABLE_CPU_FEATURES",
)
"""Variables that change the kernels, too, and must not be set."""


def set_arithmetic(cfg: Any) -> None:
    """With arithmetic=capped, start the process again unless VARIABLES are set, and replace the
    functions of MKL that depend on the maker of the CPU. Raises LockstepError if the arithmetic
    cannot be capped."""
    if cfg.arithmetic != "capped":
        return
    problem, fix = _conflict() or _lack() or ("", "")
    if problem:
        what = f"arithmetic=capped, but {problem}"
        raise LockstepError(what, "arithmetic", f"{fix}, or drop it", everywhere=True)
    if any(name not in os.environ for name in VARIABLES):
        _start_again()
    _check_in_force()
    replace_functions()


def _conflict() -> tuple[str, str] | None:
    """Return the first variable of the user that contradicts, with a fix."""
    for name, value in VARIABLES.items():
        given = os.environ.get(name, value)
        if given != value:
            return f"{name}={given} is set, in place of {value}", f"unset {name}"
    for name in CONFLICTS:
        if name in os.environ:
            return f"{name}={os.environ[name]} is set", f"unset {name}"
    # glibc's tunables of malloc change no number
    if "glibc.cpu" in os.environ.get("GLIBC_TUNABLES", ""):
        return "GLIBC_TUNABLES chooses the C library's functions", "unset GLIBC_TUNABLES"
    return None


def _lack() -> tuple[str, str] | None:
    """Return what this machine or this build of torch lacks, with a fix."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return f"this CPU is {machine}", "use an x86-64 CPU"
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "this CPU has no AVX2", "use a CPU with AVX2"
    for library in (torch.backends.mkl, torch.backends.mkldnn):
        if not library.is_available():
            name = library.__name__.rpartition(".")[2]
            return f"this torch is built without {name}", "install torch from pytorch.org"
    if not _extensions():
        return "this NumPy does not list the extensions that it uses", "install NumPy from PyPI"
    return None


def _start_again() -> None:
    """Replace this process by one with VARIABLES. Raises LockstepError if the program cannot be
    started again, or if this process is that one already, and something has removed the
    variables."""
    if not launch.can_start_again():
        raise LockstepError(
            "arithmetic=capped starts the program again, and this program is read from the "
            "standard input, typed, or a function that another process has started",
            "arithmetic",
            "start a file with python, or set the variables of plugins/performance/capped.py "
            "before python starts",
            everywhere=True,
        )
    if os.environ.get(STARTED) == str(os.getpid()):
        raise LockstepError(
            "arithmetic=capped, but the variables that it sets are gone after a restart",
            "arithmetic",
            "look for sitecustomize.py, or drop it",
            everywhere=True,
        )
    os.environ.update(VARIABLES)
    os.environ[STARTED] = str(os.getpid())
    launch.replace_process()


def _check_in_force() -> None:
    """Raise LockstepError if torch was loaded before VARIABLES were set."""
    kernels = torch.backends.cpu.get_cpu_capability()
    if kernels != "AVX2":
        raise LockstepError(
            f"arithmetic=capped, but torch has loaded its kernels for {kernels} before",
            "arithmetic",
            "set the variables of plugins/performance/capped.py before torch is imported",
            everywhere=True,
        )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": np.sqrt,
    "acos": np.arccos,
    "asin": np.arcsin,
    "atan": np.arctan,
    "tan": np.tan,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
}
"""The functions of torch that call a kernel of MKL with `rcpps` or `rsqrtps`, and NumPy's."""

_library: list[torch.library.Library] = []
"""The replaced functions: they are torch's again once the object is gone."""


def replace_functions() -> None:
    """Let torch call NumPy for FUNCTIONS on CPUs, in this process and in its forks."""
    if _library:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
        for name, function in FUNCTIONS.items():
            of_numpy = _kernel(function)
            library.impl(name, of_numpy, "CPU", allow_override=True)
            library.impl(f"{name}_", _in_place(of_numpy), "CPU", allow_override=True)
            library.impl(f"{name}.out", _into(of_numpy), "CPU", allow_override=True)
        library.impl("pow.Tensor_Scalar", power, "CPU", allow_override=True)
        library.impl("pow_.Scalar", _in_place(power), "CPU", allow_override=True)
        library.impl("pow.Tensor_Scalar_out", _into(power), "CPU", allow_override=True)
    _library.append(library)


def power(values: Tensor, exponent: Any) -> Tensor:
    """Return `values ** exponent`. torch's kernel for an exponent of 0.5 is its square root."""
    if exponent == 0.5:
        return torch.sqrt(values)
    if exponent == 2 and values.is_floating_point():
        return values * values
    number = torch.tensor(exponent)
    if isinstance(exponent, float):
        if not (values.is_floating_point() or values.is_complex()):
            values = values.to(torch.get_default_dtype())
        number = torch.tensor(exponent, dtype=values.dtype)
    return torch.pow(values, number)


def _kernel(function: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """Return a kernel for tensors on a CPU, of the shape and the type of torch's result."""

    def kernel(values: Tensor) -> Tensor:
        if not (values.is_floating_point() or values.is_complex()):
            values = values.to(torch.get_default_dtype())
        dtype = values.dtype
        if dtype in (torch.bfloat16, torch.float16):  # NumPy lacks bfloat16
            values = values.float()
        with np.errstate(all="ignore"):
            # NumPy returns no array for a single number
            result = np.asarray(function(values.detach().numpy()))
        return torch.from_numpy(result).to(dtype)

    return kernel


def _in_place(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def in_place(values: Tensor, *more: Any) -> Tensor:
        return values.copy_(kernel(values, *more))

    return in_place


def _into(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def into(values: Tensor, *more: Any, out: Tensor) -> Tensor:
        result = kernel(values, *more)
        return out.resize_(result.shape).copy_(result)

    return into


# ---- convolutions by the size of a cache


class FirstStep:
    """A step of a run with arithmetic=capped. The first call prints a warning if oneDNN cuts the
    forward pass of a convolution by the size of the level 2 cache: its bits are those of CPUs with
    an equal cache."""

    def __init__(self, step: Callable[[Any, Any], Any]):
        self.step = step
        self.taken = False

    def __call__(self, run: Any, passes: Any) -> Any:
        if self.taken:
            return self.step(run, passes)
        self.taken = True
        later = iter(passes)
        # The processes of the loader start here: within the block they would get its file as their
        # standard output for ever.
        first = next(later)
        lines: list[str] = []
        with onednn_lines(lines):
            result = self.step(run, itertools.chain([first], later))
        by_cache = convolutions_by_cache(lines)
        if by_cache:
            console.warning(
                f"arithmetic=capped: oneDNN computes the convolution {few(by_cache)} by the size "
                "of the level 2 cache: on a CPU with another cache the last bits may differ "
                "(docs/same-bits.md)\n"
            )
        return result


@contextmanager
def onednn_lines(lines: list[str]) -> Iterator[None]:
    """Add the lines of ONEDNN_VERBOSE=1 of the block to `lines`. oneDNN writes them to the file
    of the standard output, so this file is another one meanwhile; all other lines follow."""
    mkldnn: Any = torch.backends.mkldnn
    with _file_without_name() as file:
        sys.stdout.flush()
        output = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with mkldnn.verbose(mkldnn.VERBOSE_ON):
                yield
        finally:
            sys.stdout.flush()
            os.dup2(output, 1)
            os.close(output)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines(keepends=True):
                if line.startswith("onednn_verbose"):
                    lines.append(line)
                else:
                    sys.stdout.write(line)


def _file_without_name() -> IO[bytes]:
    """Return a new file: in memory, because `docker run --read-only` has no folder for the file; in
    a folder with a Python for older C libraries."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("onednn_lines"), "w+b")
    return tempfile.TemporaryFile()


def convolutions_by_cache(lines: list[str]) -> list[str]:
    """Return the sizes of the convolutions whose forward pass is `gemm:jit`, each once."""
    found = []
    for line in lines:
        if ",convolution," in line and "gemm:jit" in line and ",forward" in line:
            sizes = re.search(r"ic(\d+)oc(\d+)", line)
            kernel = "x".join(re.findall(r"k[dhw](\d+)", line))
            if sizes:
                found.append(f"of {sizes[1]} to {sizes[2]} channels with the kernel {kernel}")
    return [*dict.fromkeys(found)]
