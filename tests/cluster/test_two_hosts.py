"""One run on two hosts: two ways to meet, and what happens when one of them is gone.

The hosts are those of tests/kit/hosts.py: other processes, another name that stands for 127.0.1.1, one cable.
"""

import json
import re
import signal
import time

import pytest
from cluster_run import RUN, assert_the_same, slowly, train_straight
from conftest import launching, succeed
from hosts import CABLE, two_hosts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    with launching() as launch:
        return train_straight(launch, tmp_path_factory.mktemp("straight") / "run")


@pytest.fixture
def hosts(launch):
    with two_hosts() as hosts:
        yield hosts


def start(launch, host, node, *words, **env):
    """The launcher on one of the hosts; the other names it by its name."""
    together = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "one"}
    chosen = {"GLOO_SOCKET_IFNAME": None, "NCCL_SOCKET_IFNAME": None, "CUDA_VISIBLE_DEVICES": ""}
    return launch.start("./train_multigpu.sh", "1", *RUN, *words, host=host, **together | chosen | env)


def start_both(launch, hosts, *words, **env):
    return [start(launch, host, node, *words, **env) for node, host in enumerate(hosts)]


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_hosts_take_the_steps_of_one_process(launch, hosts, tmp_path, straight, rendezvous):
    runs = start_both(launch, hosts, f"save_dir={tmp_path / 'run'}", RDZV=rendezvous)
    first, second = [succeed(run.wait(60)) for run in runs]
    said = first.out + second.out
    assert said.count("Distributed training: 2 CPU processes") == 1
    assert f"Network: {CABLE} (10.93.0." in said, "both names stand for 127.0.1.1 at home"
    assert "sums through shared memory" not in said
    assert_the_same(tmp_path / "run", straight)
    if rendezvous == "static":  # the same line once more, where one of them sees another folder
        hosts[1].run("mount", "-t", "tmpfs", "none", str(tmp_path))
        first, second = [run.wait(60) for run in start_both(launch, hosts, f"save_dir={tmp_path / 'run'}")]
        assert first.code == second.code == 2 and len(first.errors + second.errors) == 1
        assert "two doesn't see the checkpoint that rank 0 resumes (rank 1)" in first.err + second.err


GONE = {
    # (how it is lost, which host): what the other one says of it in one line
    ("killed", 1): r"rank 1 on two is gone \(last seen in [a-z_ ]+ at step \d+\): see what that machine says",
    ("killed", 0): r"rank 0, or the torchrun beside it, is gone: see what its machine says",
    ("unplugged", 1): r"rank 1 gives no sign of life \(process \d+ on two, .*waiting: rank 0 in [a-z_ ]+ \(step \d",
    ("unplugged", 0): r"rank 0, or the torchrun beside it, is gone: see what its machine says",
}


@pytest.mark.parametrize(("how", "lost"), GONE)
def test_a_host_is_lost_and_the_same_commands_resume(launch, tmp_path, straight, how, lost):
    """The survivor ends with an error; then both start again (once: the folder is the same whoever is lost)."""
    launch.may_stay.append("lockstep_")  # a machine that is killed removes nothing
    run, words = tmp_path / "run", [f"save_dir={tmp_path / 'run'}", *slowly(0.05)]
    with two_hosts() as hosts:
        runs = start_both(launch, hosts, *words)
        runs[0].wait_for("step 10/")
        hosts[lost].kill_all() if how == "killed" else hosts[lost].unplug()
        survivor = runs[1 - lost].wait(30)
        if how == "killed":
            assert runs[lost].wait(10).code == -signal.SIGKILL
        else:
            assert runs[lost].wait(30).code == 6
    assert survivor.code == 6 and len(survivor.errors) == 1, survivor.err
    assert re.search(GONE[how, lost], survivor.errors[0]) and "Traceback" not in survivor.err, survivor.err
    now = json.loads((run / "status.json").read_text())
    assert now["state"] == "failed" and 5 <= now["step"] < 60
    if (how, lost) == ("killed", 1):
        with two_hosts() as hosts:
            again = [succeed(process.wait(60)) for process in start_both(launch, hosts, *words)]
        assert f"Resuming {run}/" in again[0].out
        assert_the_same(run, straight)


def test_a_killed_host_comes_back_alone(launch, hosts, tmp_path, straight):
    """With c10d and restarts: the other one waits for it and resumes."""
    launch.may_stay.append("lockstep_")
    words = [f"save_dir={tmp_path / 'run'}", *slowly(0.05)]
    # Torch takes a silent node for dead after three times as long.
    env = {"RDZV": "c10d", "NODE_RANK": None, "TORCHRUN_ARGS": "--max-restarts=1 --rdzv_conf=keep_alive_interval=1"}
    stays, dies = start_both(launch, hosts, *words, **env)
    while "step 10/" not in stays.said() + dies.said():  # either may have rank 0
        assert stays.process.poll() is None, stays.said()
        time.sleep(0.05)  # polling
    hosts[1].kill_all()
    assert dies.wait(10).code == -signal.SIGKILL
    returns = start(launch, hosts[1], 1, *words, **env)
    done = [succeed(run.wait(90)) for run in (stays, returns)]
    assert "Resuming" in done[0].out + done[1].out
    assert_the_same(tmp_path / "run", straight)
