"""The number of threads of a process, and the warning about a busy machine."""

import math
import re

import pytest
import torch
from conftest import TOY, succeed

from engine import threads
from plugins.performance import cores

# ---- how many threads ----


@pytest.fixture
def four_cores(monkeypatch):
    """Of which torch would take all; and the number of threads that it is told to take."""
    told = []
    monkeypatch.setattr(threads, "available", lambda: 4)
    monkeypatch.setattr(threads, "_given", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(threads.BY_RULE, raising=False)
    return told


@pytest.mark.parametrize(
    ("gflop", "processes", "number"),
    [(0.0, 1, 1), (9.9, 1, 1), (10.0, 1, 2), (16.0, 1, 3), (1e3, 1, 4), (1e3, 2, 2), (1e3, 3, 1), (1e3, 8, 1)],
)  # fmt: skip
def test_a_small_model_computes_in_one_thread(four_cores, gflop, processes, number):
    said = threads.set_threads(0, gflop, threads.limit_threads(0, processes))
    assert four_cores == [1, number], "until there is a model it is one"
    assert re.search(r"takes ([\d.,]+) GFLOP", said)[1] == {1e3: "1,000", 0.0: "0"}.get(gflop, f"{gflop:g}")


def test_the_limit_is_torchs_own_number_in_a_new_process(launch):
    script = "import torch; own = torch.get_num_threads(); from engine import threads; "
    script += "assert threads.limit_threads(0, 1) == min(own, threads.available()) and torch.get_num_threads() == 1"
    succeed(launch.python("-c", script))


def test_who_asks_for_a_number_of_threads_gets_it(four_cores, monkeypatch):
    """By the key before the variable; a variable that the launcher has set says how many there may be."""
    assert threads.set_threads(3, 0.0, threads.limit_threads(3, 8)) == "set by threads"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads.set_threads(0, 0.0, threads.limit_threads(0, 8)) == "set by OMP_NUM_THREADS"
    assert four_cores == [3, 4]
    four_cores.clear()
    monkeypatch.setenv(threads.BY_RULE, "by_rule")
    threads.set_threads(0, 0.0, threads.limit_threads(0, 1))
    assert four_cores == [1, 1]


def test_new_processes_are_told_how_many_threads_there_may_be(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads.threads_at_most(2) == {}, "somebody has asked"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads.threads_at_most(2) == {"OMP_NUM_THREADS": "2", threads.BY_RULE: "by_rule"}


@pytest.mark.slow
def test_the_plan_says_how_many_threads_and_why(launch, tmp_path):
    """They are counted from the work of a forward pass, the same for a resumed run; evaluations keep to one."""
    from_task = ["har", "dataset.stride=512", "batch_size=64", f"save_dir={tmp_path / 'run'}", "schedule.horizon=2"]
    env = {"OMP_NUM_THREADS": "2", threads.BY_RULE: "by_rule"}
    small = succeed(launch.python("train.py", *from_task, "steps=1", **env)).out
    assert re.search(r"device +cpu, 1 thread per process \(of \d; a forward pass takes 0\.38 GFLOP", small), small
    again = succeed(launch.python("train.py", *from_task, "steps=2", **env)).out
    assert device_line(small) == device_line(again)
    asked = succeed(launch.python("train.py", *from_task, "threads=2", "--dry-run", **env)).out
    assert "2 threads per process (set by threads)" in asked


def device_line(text):
    (line,) = [line for line in text.splitlines() if line.startswith("  device ")]
    return line


# ---- a busy machine ----


@pytest.fixture
def tasks_of(monkeypatch, tmp_path):
    """Sets (ns run, ns waited) of this process's threads."""
    monkeypatch.setattr(cores, "TASKS", tmp_path)

    def tell(*threads):
        for number, (ran, waited) in enumerate(threads):
            (tmp_path / str(number)).mkdir(exist_ok=True)
            (tmp_path / str(number) / "schedstat").write_text(f"{ran} {waited} 17\n")

    return tell


def test_threads_that_wait_for_a_core_are_noticed(tasks_of, monkeypatch):
    tasks_of((100, 100), (0, 0))
    crowd = cores.CpuContention()
    tasks_of((160, 120), (60, 10))
    assert crowd.share() == pytest.approx(30 / 150)
    tasks_of((170, 120), (70, 10))
    assert crowd.share() == 0, "since the last call"
    assert math.isnan(crowd.share()), "nothing to do"


def test_a_busy_machine_is_said_once(tasks_of, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(cores.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cores.os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    tasks_of((0, 0))
    crowd, said = cores.CpuContention(), []
    for second, waited in ((5, 400), (10, 401), (15, 700), (20, 800), (40, 2000)):
        now[0] = float(second)
        tasks_of((second * 100, waited))
        said.append(crowd.warning())
    assert said[0] == "" and "threads wait 29 % of their time for a core, load 9.0" in said[1]
    assert not any(said[2:])


@pytest.mark.parametrize(
    ("share", "load", "busy"),
    [(0.1, 99.0, False), (0.3, 0.1, True), (float("nan"), 5.9, False), (float("nan"), 6.1, True)],
)
def test_what_a_busy_machine_is(monkeypatch, share, load, busy):
    """The process's own clocks count; the load only where the system tells nothing of them."""
    monkeypatch.setattr(cores, "available", lambda: 4)
    monkeypatch.setattr(cores.os, "getloadavg", lambda: (load, load, load))
    assert bool(cores.contention_warning(share)) is busy


TELLS = """
import sys
import train
from plugins.performance import cores
cores.LOOK_EVERY_S, cores.CpuContention.share = 0.0, lambda self: 0.5
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_training_says_once_that_the_machine_is_busy(launch, tmp_path):
    words = [TOY, "steps=9", "log_every=1", f"save_dir={tmp_path / 'run'}"]
    assert succeed(launch.python("-c", TELLS, *words)).out.count("the machine is busy with other processes") == 1
