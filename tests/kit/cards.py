"""The GPUs of this machine. They are hidden from pytest and from each process that a test starts; what a test marked
`gpu` starts sees them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

NONE_VISIBLE = "no GPU is visible (python -m pytest -m gpu, on a machine with one)"

HIDING = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": ""}
"""For CUDA and ROCm. HIP takes an empty list for no list."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Two processes of two threads each on two cores spin waiting for each other: a test of 30 s took twelve minutes. And
the number of threads changes the last bits."""

BEFORE = "LOCKSTEP_TESTS_BEFORE"
"""Environment variable: JSON of the variables that `hide` changes, as the user has set them, for pytest's workers."""

shown = False
"""Whether the test that runs is one that sees the GPUs."""


def hide() -> None:
    """Hide the GPUs, and limit the threads, of this process and of all that it starts.

    Call it before torch is imported: CUDA reads its variable once.
    """
    changes = HIDING | ONE_THREAD
    os.environ.setdefault(BEFORE, json.dumps({name: os.environ.get(name) for name in changes}))
    os.environ.update(changes)


def as_user_has_set() -> dict[str, str | None]:
    """Return the variables that `hide` changes, as they were before; None: unset."""
    return json.loads(os.environ[BEFORE])


def check_hidden(env: dict[str, str]) -> None:
    """Raise AssertionError if a process with this environment would see the GPUs, in a test that may not."""
    assert shown or HIDING.keys() <= env.keys(), "the test has removed what hides the GPUs from the processes it starts"


@functools.cache
def visible() -> int:
    """Return the number of GPUs that torch sees where they are not hidden. Takes as long as importing torch."""
    env = {name: value for name, value in (os.environ | as_user_has_set()).items() if value is not None}
    count = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", count], env=env, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0
