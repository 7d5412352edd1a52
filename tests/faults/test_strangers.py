"""Who is no part of a run may end it, but not run programs as its user, nor make its outcome look like another.

The stranger is tests/ranks/stranger.py, on another host, or as another user of this machine.
"""

import os
import re
import signal
import sys

import pytest
from cluster_run import slowly
from conftest import FAULTY, ROOT, succeed
from hosts import two_hosts
from listening import LOOPBACK, listening

STRANGER = str(ROOT / "tests" / "ranks" / "stranger.py")
NOBODY = "65534"

THEIRS = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from tests.tasks.toy import *
"""

RUN = [FAULTY, "global_batch=12", "epochs=1000", "log_every=1", *slowly(0.1)]


def visit(launch, tmp_path, kind, address, ports, user, **how):
    """Returns (stores that answered, notes written in them)."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    words = [STRANGER, address, ",".join(map(str, ports)), kind, str(tmp_path), user]
    done = succeed(launch.python(*words, **how))
    return tuple(map(int, re.search(r"stores (\d+) written (\d+)", done.out).groups()))


def stop_later(run):
    """After so many steps that the ranks have had time to follow a note."""
    steps = run.said().count("step ")
    run.wait_for("step ", times=steps + 40)
    run.signal(signal.SIGTERM)
    return run.wait(60)


WAYS = {
    "launcher": ["./train_multigpu.sh", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"],
}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root")
@pytest.mark.parametrize(("way", "kind"), [("launcher", "pickle again"), ("torchrun", "code")])
def test_another_user_of_the_machine(launch, tmp_path, way, kind):
    run = launch.start(*WAYS[way], *RUN, f"save_dir={tmp_path / 'run'}", CUDA_VISIBLE_DEVICES="")
    run.wait_for("step 10/")
    ports = listening("self", launch.left_behind())  # not those of tests that run meanwhile
    stores, written = visit(launch, tmp_path, kind, "127.0.0.1", ports, NOBODY)
    assert stores and written
    done = stop_later(run)
    assert not (tmp_path / "ran").exists() and "\x1b" not in done.err
    assert "Stopped after step" in done.out and done.code == (75 if way == "launcher" else 1), done.err
    assert "a note in the store is not this run's" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_on_one_machine_listens_nowhere_else(launch, tmp_path, processes):
    launch.may_stay.append("lockstep_")  # the machine is killed at the end
    with two_hosts() as (one, two):
        way = ["./train_multigpu.sh", "2"] if processes == 2 else [sys.executable, "train.py"]
        run = launch.start(*way, *RUN, f"save_dir={tmp_path / 'run'}", host=one, CUDA_VISIBLE_DEVICES="")
        run.wait_for("step 10/")
        found = listening(one.holder.pid)
        if processes == 2:
            assert found, "else there is nothing to reach"
            reached = visit(launch, tmp_path, "again", one.address, found, "0", host=two)
            assert reached == (0, 0)
        assert not {port: where for port, where in found.items() if where - LOOPBACK}
        one.kill_all()
        run.wait(60)
