"""Check this machine from one process: a line for each check, ok, warning or failure, with a
remedy."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import launch as launching
from engine.comm.world import World
from engine.errors import LockstepError, amount
from tools.machine import cards as sharing
from tools.machine import nvidia

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_PORT = 29500
GIB = 2**30


class Line(NamedTuple):
    """A check's result.

    level   ok, warning, unknown (the check was impossible) or failure
    remedy  the action to take
    """

    level: str
    text: str
    remedy: str = ""


ok, warning, unknown, failure = (
    functools.partial(Line, level) for level in ("ok", "warning", "unknown", "failure")
)


def attempt(check: Callable[..., Iterable[Line]], *given: Any) -> list[Line]:
    """Run a check of this process alone. After an error in the check, the result is unknown."""
    lines: list[Line] = []
    try:
        lines.extend(check(*given))
    except LockstepError as error:
        lines.append(failure(str(error)))
    # such as unknown output of a driver or files of a kernel: the next checks still run
    except Exception as error:
        what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        lines.append(
            unknown(
                f"{check.__name__.replace('_', ' ')}: could not be checked: {what}",
                "look for yourself",
            )
        )
    return lines


def versions() -> Iterator[Line]:
    """Compare the versions of Python and the packages with pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = re.search(r'^requires-python = ">=([\d.]+)"', project, re.M)
    python = platform.python_version()
    if oldest and _numbers(python) < _numbers(oldest[1]):
        yield failure(
            f"Python {python}, and {oldest[1]} is the least", "make .venv with a newer one"
        )
    required = re.search(r"^dependencies = .*$", project, re.M)
    for name, least in re.findall(r'"([\w-]+)>=([\d.]+)"', required[0] if required else ""):
        if _numbers(found := installed(name)) < _numbers(least):
            todo = f"{sys.executable} -m pip install -r {ROOT / 'requirements.txt'}"
            yield failure(f"{name} {found or 'is not installed'}, and {least} is the least", todo)
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = next((f"{name} {number}" for name, number in kinds.items() if number), "CPU")
    plain = torch.__version__.split("+")[0]
    yield ok(f"torch {plain} ({built} build), Python {python}, NumPy {installed('numpy')}")


def installed(name: str) -> str:
    """Return the version of a package; empty for an absent package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text.split("+")[0])]


# ---- how this process was started
# ------------------------------------------------------------------------------------


def launch_of(cfg: Any) -> tuple[launching.Environment, list[Line]]:
    """Return the rank of the process and a report on the launcher. A failure concerns all processes
    of the machine."""
    try:
        launch = launching.environment()
        forgotten = launching.forgotten_launch()
    except LockstepError as error:
        return launching.Environment(), [failure(str(error))]
    if not launch.launched:
        usual = ok("one process, as plain python starts it (--launch N: as torchrun does)")
        return launch, [warning(forgotten, "or start with --launch N") if forgotten else usual]
    lines = []
    gpus = 0 if cfg.device == "cpu" else torch.cuda.device_count() or len(shown_cards())
    if sharing.shares(gpus, launch.local_size) and cfg.ddp.backend == "gloo":
        todo = "give the training ddp.backend=gloo, too; a GPU for each process is faster"
        lines.append(warning(sharing.shared_by(gpus, launch.local_size), todo))
    elif sharing.shares(gpus, launch.local_size):
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f"{amount(gpus, 'GPU')} visible"
        if chosen:
            seen += f" (CUDA_VISIBLE_DEVICES={chosen})"
        todo = (
            f"start at most {gpus}, show more with CUDA_VISIBLE_DEVICES, or let them share "
            "it: ddp.backend=gloo"
        )
        lines.append(failure(f"{launch.local_size} processes on this machine, but {seen}", todo))
    if not gpus and os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        what = "TORCH_DISTRIBUTED_DEBUG=DETAIL: DDP on the CPU dies of a segmentation fault"
        lines.append(failure(what, "TORCH_DISTRIBUTED_DEBUG=INFO"))
    return launch, lines or [
        ok(
            f"{amount(launch.size, 'process')}, {launch.local_size or 'an unknown number'} on "
            "this machine"
        )
    ]


SLOWS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs don't send to each other, but by way of the host's memory",
    "NCCL_SHM_DISABLE": "what cannot go from GPU to GPU takes the network",
}


def variables() -> Iterator[Line]:
    """Warn about environment variables that slow down a training on GPUs."""
    for name, why in SLOWS.items():
        if (value := os.environ.get(name, "0")) not in ("0", "") and torch.cuda.is_available():
            yield warning(f"{name}={value}: {why}", f"unset {name}, if nothing needs it")


def port() -> list[Line]:
    """Check the fixed port for the rendezvous. torchrun --standalone takes a free port."""
    setting = os.environ.get("MASTER_PORT", "")
    number = int(setting) if setting.isdigit() else DEFAULT_PORT
    if setting and not (setting.isdigit() and 0 < number < 65536):
        return [
            failure(
                f"MASTER_PORT={setting} is no port",
                "give a number from 1024 to 65535, or unset MASTER_PORT",
            )
        ]
    if not (taken := _taken(number)):
        return [ok(f"port {number} is free")]
    other = next((n for n in range(max(number, 1023) + 1, 65536) if not _taken(n)), 0)
    todo = f"./train_multigpu.sh and torchrun --standalone take a free one, or MASTER_PORT={other}"
    return [(failure if setting else warning)(f"port {number} {taken}", todo)]


def _taken(number: int) -> str:
    """Return why a process cannot listen on a port; empty if the port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", number))
        except PermissionError:
            return "is for the administrator"
        except OSError:
            return f"is in use by {_listener(number)}"
    return ""


def _listener(number: int) -> str:
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            # The ninth field is the socket's number; state 0A is a listening socket.
            here = [
                row
                for row in rows
                if int(row[1].rpartition(":")[2], 16) == number and row[3] == "0A"
            ]
            sockets |= {f"socket:[{row[9]}]" for row in here}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or access is denied
            if sockets.intersection(_open_files(process)):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return "a process that cannot be seen from here"


def _open_files(process: Path) -> Iterator[str]:
    """Yield the open files of a process, by its folder in /proc."""
    for file in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, such as the list itself
            yield os.readlink(file)


# ---- GPUs
# --------------------------------------------------------------------------------------------------


def cards(cfg: Any) -> Iterator[Line]:
    """List the GPUs of the driver. Report the reason if torch cannot use the GPUs."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cfg.device == "cpu" or setting == "":
        reason = "device=cpu" if cfg.device == "cpu" else "CUDA_VISIBLE_DEVICES="
        yield ok(f"{reason}: no GPU is looked at")
        return
    there = nvidia.cards()
    if not there and not torch.cuda.is_available():
        yield ok("no GPU here: training on the CPU, with gloo between processes")
        return
    shown, invalid = nvidia.visible(setting) if there else ([], "")
    if invalid:
        what = (
            f"CUDA_VISIBLE_DEVICES={setting}: {invalid!r} is none of the "
            f"{amount(len(there), 'GPU')} here, or comes twice"
        )
        yield failure(
            f"{what}; CUDA shows {len(shown)}",
            f"give numbers from 0 to {len(there) - 1}, each once",
        )
    if not there:
        todo = "install nvidia-smi, or look for yourself"
        yield unknown(
            (
                "nvidia-smi lists no GPU, and torch uses one: its memory and its users were not "
                "checked"
            ),
            todo,
        )
    for card in shown:
        yield from _card(card)
    if len(kinds := sorted({card.name for card in shown})) > 1:
        todo = (
            "choose equal ones with CUDA_VISIBLE_DEVICES; CUDA_DEVICE_ORDER=PCI_BUS_ID "
            "numbers them as nvidia-smi"
        )
        yield warning(
            f"GPUs of different kinds: {', '.join(kinds)}; the slowest sets the pace",
            f"{todo} does; or let a slow GPU do less, with virtual_workers and ddp.shares=auto",
        )
    yield from _cuda(there)


def shown_cards() -> list[nvidia.Card]:
    """Return the GPUs that CUDA will show. Return none if nvidia-smi fails; `cards` reports the
    failure."""
    with contextlib.suppress(LockstepError):
        return nvidia.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
    return []


def _card(card: nvidia.Card) -> Iterator[Line]:
    name, leave = f"GPU {card.index} ({card.name})", "leave that GPU out with CUDA_VISIBLE_DEVICES"
    memory = f"{card.used_mib / 1024:.1f} of {card.total_mib / 1024:.0f} GiB in use"
    users = [
        f"process {pid} ({program}, {mib:.0f} MiB)"
        for pid, program, mib in nvidia.users().get(card.uuid, [])
    ]
    if users:
        yield warning(f"{name} is used by {', '.join(users)}: {memory}", f"wait for it, or {leave}")
    elif card.used_mib > 0.1 * card.total_mib:
        what = (
            f"{name} is used by a process that cannot be seen from here, in another container "
            f"perhaps: {memory}"
        )
        yield warning(what, f"ask who shares this machine, or {leave}")
    else:
        yield ok(f"{name}: {memory}, driver {card.driver}")
    if card.lanes < card.most_lanes:
        what = f"{name} has {card.lanes:.0f} of {card.most_lanes:.0f} PCIe lanes"
        yield warning(what, "another slot, or the card seated again, may give it the rest")


def _cuda(there: list[nvidia.Card]) -> Iterator[Line]:
    """Check that torch works with the driver, and warn about faulty versions of cuDNN.

    Some versions compute 3-D convolutions wrongly (pytorch#163539). With other versions torch
    avoids the cuDNN kernels at several times the time and memory (pytorch#166122, #166643).
    """
    if not (torch.version.cuda or torch.version.hip):
        what = f"nvidia-smi lists {amount(len(there), 'GPU')}, but this torch is built for the CPU"
        yield failure(what, "install torch for CUDA (pytorch.org/get-started), or say device=cpu")
        return
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        works = torch.cuda.is_available()
    if not works:
        reason = next((str(note.message).splitlines()[0] for note in notes), "without a reason")
        what = f"torch, built for CUDA {torch.version.cuda}, can use no GPU: {reason}"
        yield failure(
            what, "a newer driver, or torch for an older CUDA; for a container, --gpus all"
        )
    elif not torch.version.hip:
        yield ok(f"CUDA {torch.version.cuda} of torch works with the driver; NCCL {nccl()}")
        plain, cudnn = torch.__version__.split("+")[0], torch.backends.cudnn.version() or 0
        if _numbers(plain)[:3] == [2, 9, 0] or 90800 <= cudnn < 91500:
            what = (
                f"torch {plain} with cuDNN {cudnn // 10000}.{cudnn // 100 % 100}: 3-D "
                "convolutions in bf16 are wrong"
            )
            todo = "torch 2.9.1 or newer with cuDNN 9.15 or newer, or amp=off where there are such"
            yield warning(f"{what} or slow", todo)


def nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def device(cfg: Any, world: World) -> Iterator[Line]:
    """Describe the GPU of the process and check a computation."""
    if world.device.type != "cuda":
        return
    gpu, about = world.device, torch.cuda.get_device_properties(world.device)
    free, total = torch.cuda.mem_get_info(gpu)
    with torch.cuda.device(gpu):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    name = f"{gpu} ({about.name}, compute capability {about.major}.{about.minor})"
    try:
        right = torch.ones(64, device=gpu).sum().item() == 64
    except RuntimeError as error:
        todo = (
            f"this torch is made for {' '.join(torch.cuda.get_arch_list())}: install one for "
            "that GPU, or leave it out"
        )
        yield failure(f"{name} cannot compute: {str(error).splitlines()[0]}", todo)
        return
    if not right:
        yield failure(
            f"{name} adds up 64 ones to something else",
            "the card or its driver is broken: leave it out",
        )
        return
    text = f"{name} computes: {free / GIB:.1f} of {total / GIB:.1f} GiB free, "
    text += "bf16" if bf16 else "no bf16"
    if cfg.amp == "bf16" and not bf16:
        yield warning(f"{text}, but amp=bf16", "amp=fp16, or auto")
    else:
        yield ok(text)


def peers(world: World) -> Iterator[Line]:
    """Check whether the machine's GPUs can access the memory of a neighbour, and name the
    connections."""
    on_gpu, here = world.device.type == "cuda", max(1, launching.environment().local_size)
    count = min(torch.cuda.device_count(), here) if on_gpu else 0
    if count < 2:
        return
    pairs = itertools.combinations(range(count), 2)
    far = [f"{a} and {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    ways = sorted(set(ways_between(shown_cards()[:count])))
    text = f"{count} GPUs, joined by {', '.join(ways) or 'a way that nvidia-smi does not print'}"
    if far:
        todo = (
            "`nvidia-smi topo -m` shows the way; ACS or the IOMMU in the firmware, or a "
            "virtual machine, may be between"
        )
        yield warning(
            f"{text}; no direct access between {', '.join(far)}: sums take the host's memory", todo
        )
    else:
        yield ok(f"{text}; each reaches the others' memory")
    if "SYS" in ways:
        todo = (
            "where not all GPUs are needed, choose those of one NUMA node with CUDA_VISIBLE_DEVICES"
        )
        yield warning(
            "GPUs of different NUMA nodes: sums cross the link between the processors", todo
        )


def ways_between(some: list[nvidia.Card]) -> list[str]:
    """Return the connection of each pair of GPUs, as nvidia-smi names it."""
    chosen = {card.index for card in some}
    return [way for (a, b), way in nvidia.paths().items() if a < b and {a, b} <= chosen]


# ---- beside the other processes
# --------------------------------------------------------------------------------------


def facts(world: World) -> dict[str, str]:
    """Return versions and devices that should be the same on all ranks."""
    found = {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "NumPy": installed("numpy"),
    }
    if world.device.type == "cuda":
        found |= {
            "CUDA": str(torch.version.cuda),
            "NCCL": nccl(),
            "GPU": torch.cuda.get_device_name(world.device),
        }
        found["driver"] = ", ".join(sorted({card.driver for card in shown_cards()}))
    return found | {"CPU threads": str(torch.get_num_threads())}


MAY_DIFFER = {
    "GPU": "the slowest sets the pace, unless virtual_workers and ddp.shares=auto let it do less",
    "driver": "",
    "CPU threads": "set OMP_NUM_THREADS alike",
}


def differences(everyone: list[dict[str, str]]) -> Iterator[Line]:
    """Compare rank 0's facts with the facts of the first different rank."""
    for name, value in everyone[0].items():
        rank = next(
            (rank for rank, theirs in enumerate(everyone) if theirs.get(name) != value), None
        )
        if rank is not None:
            what = f"rank {rank} has {name} {everyone[rank].get(name, 'none')}, rank 0 has {value}"
            todo = MAY_DIFFER.get(name) or "install the same on all machines"
            yield (warning if name in MAY_DIFFER else failure)(what, todo)
