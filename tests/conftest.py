"""Real processes for the tests, and the proof that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOY = str(ROOT / "tests" / "tasks" / "toy.py")
sys.path.insert(0, str(ROOT))


@dataclass
class Done:
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Launcher:
    """Starts commands from the repository's root, each marked in its environment, and looks for the mark afterwards."""

    def __init__(self, cwd: Path):
        self.mark = f"LOCKSTEP_TEST_{uuid.uuid4().hex}"
        self.cwd = cwd

    def environment(self, **more: str | None) -> dict[str, str]:
        dropped = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "ACCELERATE_",
            "SLURM_",
            "TORCHELASTIC",
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        # One thread: two on a busy machine take ten times as long, and the number of threads changes the last bits.
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), self.mark: "1"}
        env |= {name: value for name, value in more.items() if value is not None}
        return {name: value for name, value in env.items() if name not in more or more[name] is not None}

    def __call__(self, *command: str, timeout: float = 240, cwd: Path | None = None, **env: str | None) -> Done:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd or self.cwd,
            env=self.environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{command} ran longer than {timeout} s\n{out}\n{err}")
        return Done(process.returncode, out, err)

    def python(self, *words: str, **how) -> Done:
        return self(sys.executable, *words, **how)

    def torchrun(self, processes: int, *words: str, **how) -> Done:
        run = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
        return self(sys.executable, *run, *words, **how)

    def left_behind(self) -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue
        return found


@pytest.fixture
def launch(tmp_path):
    """Run real commands; a process that outlives the test fails it."""
    launcher = Launcher(ROOT)
    yield launcher
    deadline = time.monotonic() + 10  # a process that is just now being reaped is not left behind
    while launcher.left_behind() and time.monotonic() < deadline:
        time.sleep(0.1)
    left = launcher.left_behind()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"


def succeed(done: Done) -> Done:
    assert done.code == 0, f"exit code {done.code}\n{done.out[-4000:]}\n{done.err[-4000:]}"
    return done
