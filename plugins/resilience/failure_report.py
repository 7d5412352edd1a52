"""Explain failures: every exception becomes one line, `error: what (where): what to do`, and an
exit code."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from engine import launch
from engine.comm.digests import ROOT
from engine.comm.session import session
from engine.comm.world import World
from engine.contract import INFO_KEY
from engine.errors import DATA, DISTRIBUTED, USAGE, LockstepError, headline
from engine.phases import phase
from plugins.resilience import status, terminal, watchdog
from plugins.resilience.signals import cleanup
from plugins.resilience.store_client import Failure


def handle_fatal(error: BaseException, debug: bool) -> int:
    """Print what happened, once for all ranks, and return the exit code. With a launcher, or DDP,
    end the process: an interpreter that shuts down while gloo's threads live may hang or abort, and
    the exit code would be lost."""
    world = None
    if dist.is_initialized():
        world = World(
            dist.get_rank(),
            launch.environment().local_rank,
            dist.get_world_size(),
            torch.device("cpu"),
        )
    alone = world is None or not (launch.environment().launched or session.wrapped)
    if not alone:
        # torchrun sends it as soon as one rank is dead; without a handler it would end this one
        # before it reports.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    details = "".join(traceback.format_exception(error))
    mine = to_user_error(error, world)
    secondary = lost_connection(error) and not ran_out(error)
    if debug and not secondary:
        terminal.write_stderr(details)
    if world is None:
        code = status.set_exit_code(mine.exit_code, mine.everywhere)
        status.fill_in_error_file(f"error: {mine}")
        if launch.is_local_rank0() or not mine.everywhere:
            watchdog.print_error(str(mine))
        return code
    if not status.current.ended.acquire(blocking=False):
        time.sleep(60)  # the watchdog is ending this process
    everywhere = mine.everywhere or world.size == 1
    own = isinstance(error, LockstepError)
    text = f"rank {world.rank}: {mine}" if own and not everywhere else str(mine)
    cause = Failure(world.rank, text, mine.exit_code, "" if own else details, mine.again)
    cause, claimed = (
        (cause, world.main) if everywhere else watchdog.find_cause(world, cause, secondary)
    )
    watchdog.announce(world, cause, claimed)
    if not alone or cause.again:
        watchdog.exit_process(world, cause)
    # half-built loaders raise errors when they are destroyed
    sys.unraisablehook = lambda about: None
    cleanup()  # or torch waits five seconds and more for a loader process that hangs
    dist.destroy_process_group()
    return status.set_exit_code(cause.exit_code)


def lost_connection(error: BaseException) -> bool:
    """Return whether this is what a rank raises when another has failed; gloo and NCCL have no
    class for it."""
    if isinstance(error, torch.distributed.DistError):
        return True
    # torchrun sends SIGTERM to a failing job's loader processes too; one that has just begun
    # doesn't ignore it yet.
    signs = (
        "gloo",
        "NCCL",
        "Connection closed by peer",
        "Connection reset by peer",
        "Timed out waiting",
        "Terminated",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def ran_out(error: BaseException) -> bool:
    """Return whether memory of the GPU or of the host has run out; only torch's allocator has an
    error class for it."""
    signs = (
        "can't allocate memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "2 'out of memory'",
    )
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        sign in str(error) for sign in signs
    )


def to_user_error(error: BaseException, world: World | None) -> LockstepError:
    """Return the error as one for the user. Exit code 1: an error in the code, or memory has run
    out."""
    if isinstance(error, LockstepError):
        return error
    text, code = headline(error), 1
    places = [_frame(error)]
    if world is not None:
        places += [f"rank {world.rank}"] * (world.size > 1) + [f"{phase.name} at step {phase.step}"]
    where = ", ".join(filter(None, places))
    if ran_out(error):
        return _out_of_memory(text or "no words", where, world)
    if text.startswith(("DataLoader worker", "DataLoader timed out")):
        what, code = (
            f"a loader process failed: {str(error.__cause__ or text).strip(' .')}",
            DATA,
        )
        todo = (
            "one that was killed was likely out of memory: fewer num_workers, or smaller "
            "batches; one that timed "
            "out has hung, or needs a longer loader_timeout_s"
        )
    elif lost_connection(error):
        what, code = f"the connection to the other ranks is lost: {text}", DISTRIBUTED
        todo = (
            "see what the other processes and machines say; start the same command again to resume"
        )
    elif "Expected to have finished reduction in the prior iteration" in str(error):
        what, code = f"some parameters got no gradient: {_unused(str(error))}", USAGE
        todo = "set ddp.find_unused_parameters=true, or use every parameter in every step"
    elif "mixed torch.Tensor and DTensor" in str(error):
        what, code = "a weight is used past the module that FSDP2 makes it whole for", USAGE
        todo = (
            "call `net(...)`, or name the method in the task's `forward_methods`, or use "
            "ddp.strategy=ddp"
        )
    elif "out of bounds for storage of size 0" in str(error):
        what, code = "a backward pass needs a weight that FSDP2 has cut again", USAGE
        todo = "take no gradient of a gradient, and one backward pass of each forward pass, "
        todo += "or use ddp.strategy=ddp"
    elif isinstance(error, SystemExit):
        what, todo = f"sys.exit({error.code}) in the middle of the training", "remove that call"
    else:
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        folder = status.current.folder
        traced = (
            f"the traceback is in {folder / 'error.txt'}"
            if folder
            else "--debug shows the traceback"
        )
        todo = suggest_fix(error) or _batch_advice(error) or traced
    return LockstepError(what, where, todo, exit_code=code)


def _batch_advice(error: BaseException) -> str:
    """Return the keys of the batch after a KeyError, or the sample whose label is none of the
    model's outputs."""
    # the innermost first
    scopes = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    batches = [
        [value for value in there.values() if type(value) is dict and INFO_KEY in value]
        for there in scopes
    ]
    batch = batches[0][0] if batches and batches[0] else None  # that of the line that failed
    if isinstance(error, KeyError) and batch and error.args and error.args[0] not in batch:
        return f"the batch has {', '.join(repr(name) for name in batch if name != INFO_KEY)}"
    if found := isinstance(error, IndexError) and re.match(
        r"Target (-?\d+) is out of bounds", str(error)
    ):
        # torch's own names; a label may be of a part of a sample
        with contextlib.suppress(Exception):
            logits, y = next(
                (there["input"], there["target"])
                for there in scopes
                if {"input", "target"} <= {*there}
            )
            index = next(each[INFO_KEY].index for held in batches for each in held)
            sample = index[(y.reshape(len(index), -1) == int(found[1])).any(1)][0]
            return (
                f"the label of sample {sample} is none of the model's {logits.shape[1]} "
                "outputs, numbered from 0"
            )
    if "device-side assert" in str(error):
        return (
            "mostly a label that is no output of the model, or an index beyond an embedding: "
            "device=cpu names it"
        )
    return ""


def _out_of_memory(text: str, where: str, world: World | None) -> LockstepError:
    if world is None or not status.current.smaller or phase.name == "preparing":
        return LockstepError(
            f"out of memory: {text}", where, "free some, or use cache=none", exit_code=1
        )
    batch, smaller = status.current.smaller[phase.name in ("validation", "loading validation data")]
    words = " ".join(f"{key}={value}" for key, value in smaller.items() if value)
    if not smaller:
        todo = (
            "no smaller batch takes the same steps: use a smaller model, smaller samples, or "
            "another global_batch"
        )
    elif status.current.shrinks:
        todo = f"all processes start again with {words}, from the last checkpoint"
    else:
        todo = (
            f"{words} takes the same steps with less memory (oom=shrink does so by itself); "
            "so may cache=none"
        )
    todo += f"; {status.current.less}" if status.current.less else ""
    error = LockstepError(
        f"out of memory, {batch} samples a forward pass: {text}", where, todo, exit_code=1
    )
    error.again = smaller if status.current.shrinks else {}
    return error


def _frame(error: BaseException) -> str:
    """Return the innermost line that is not a library's: file:line in function."""
    libraries = (
        str(Path(torch.__file__).parent),
        sys.base_prefix + os.sep,
        os.sep + "site-packages" + os.sep,
    )
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in libraries):
            path = Path(frame.filename)
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            return f"{shown}:{frame.lineno} in {frame.name}"
    return ""


def _unused(text: str) -> str:
    """Return the names of the parameters that DDP's error names by their index among the trained
    ones."""
    found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", text)
    names = status.current.parameter_names
    return (
        ", ".join(names[int(index)] for index in found[1].split())
        if found
        else "torch does not say which"
    )


HINTS = (
    ("KeyError: 'lockstep'", "of a batch that is no dict it is an attribute: batch.lockstep"),
    (
        "KeyError: '(index|position|seed|mean_weight)'",
        r"the loader's own numbers have one name: batch['lockstep'].\1",
    ),
    (
        "AttributeError: 'dict' object has no attribute 'lockstep'",
        "of a dict it is a key: batch['lockstep']",
    ),
    (
        "TypeError: .*unexpected keyword argument 'lockstep'",
        "leave that out: net(**contract.inputs(batch))",
    ),
)


def suggest_fix(error: BaseException) -> str:
    """Suggest a fix if a task looks up the loader's metadata in the wrong place, or passes it on;
    else return ""."""
    words = f"{type(error).__name__}: {error}"
    return next(
        (found.expand(todo) for form, todo in HINTS if (found := re.match(form, words, re.DOTALL))),
        "",
    )
