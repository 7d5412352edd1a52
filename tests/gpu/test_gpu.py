"""Each check of benchmarks/gpu_check.py, on a GPU; test_gpu_check.py is about the command itself, on the CPU."""

import fcntl
import math
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check

pytestmark = pytest.mark.gpu

SPEEDS = {check.__name__ for check in gpu_check.GROUPS["speed"]}


@pytest.fixture
def turn(request, tmp_path_factory):
    """Among pytest's workers: a check of speeds runs alone, the others side by side."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if hasattr(request.config, "workerinput") else base
    alone = request.getfixturevalue("name") in SPEEDS
    with open(base / "gpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.mark.parametrize("name", gpu_check.CHECKS)
def test_a_check(turn, name):
    """Within its own time limit; the facts of one that fails are printed."""
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as folder:
        found = gpu_check.examine(gpu_check.Lab(Path(folder), False), name, math.inf)
    assert found["state"] == "ok", found["facts"]
