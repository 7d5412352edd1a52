"""The doctor: that each thing it looks for is found where it is made to be there, and nothing where all is well."""

import json
import math
import os
import re
import socket
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import FAULTY, TOY, launching, succeed
from nvidia_smi import nvidia_smi

import tasks
import train
from engine import config, launch, threads
from engine.comm.world import World
from engine.contract import LockstepError
from plugins.parallel import strategies
from tools.machine import checks as machine
from tools.machine import doctor, nvidia
from tools.machine.doctor import Speed

DOCTOR = "tools/doctor.py"
GIVEN = ("MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCH_DISTRIBUTED_DEBUG")


@pytest.fixture(autouse=True)
def nobodys_environment(monkeypatch):
    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)


def lines_of(done, level):
    return [line for line in done.out.splitlines() if line.startswith(level)]


def only(lines):
    (line,) = lines
    return line


def told(lines, *beginnings):
    """Whether there are as many lines, each as a table shows it with the beginning that is given, `…` for any text."""
    rows = [f"{line.level} {line.text}: {line.remedy}" for line in lines]
    patterns = [".*".join(map(re.escape, words.split("…"))) for words in beginnings]
    assert len(rows) == len(patterns) and all(map(re.match, patterns, rows)), rows
    return True


# ---- the whole of it -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A run of one step, what the doctor says to its continuation as a table and as JSON, and the run."""
    run = tmp_path_factory.mktemp("doctor") / "run"
    words = [TOY, "model.width=3000", "optim.ema_decay=0.9", f"save_dir={run}", "epochs=0"]
    with launching() as launch:
        succeed(launch.python("train.py", *words, "steps=1"))
        before = sorted(run.iterdir())
        table = succeed(launch.python(DOCTOR, *words, "steps=2"))
        as_json = succeed(launch.python(DOCTOR, "--json", *words, "steps=2"))
        assert sorted(run.iterdir()) == before, "it writes nothing there"
    return table, as_json, run


@pytest.mark.slow
def test_where_all_is_well_nothing_fails(healthy):
    table, _, run = healthy
    assert not lines_of(table, "failure") and not table.err
    for words in (
        r"ok +torch \d+\.\d+\S* \(.* build\), Python \d+\.\d+\.\d+, NumPy \d",
        r"ok +CUDA_VISIBLE_DEVICES=: no GPU is looked at",
        r"ok +one process, as plain python starts it",
        r"(ok|warning) +port 29500 is ",
        rf"ok +task {re.escape(TOY)}: 61 training and 23 validation samples can be read; resumes {run}/best_",
        r"ok +1 process x \(1 thread\) on \d+ core",
        r"ok +ulimit -n is ",
        r"ok +/dev/shm has \d+ MB free; no loader process needs it",
        r"ok +\d+ MB free at .*, the run keeps up to 4 checkpoints of ",
        r"(ok|warning) +the loader gives \d+ samples/s \(num_workers=0\), forward and backward take \d+: ",
        r"ok +one process: nothing to sum",
        r"0 failures, \d warning",
    ):
        assert re.search(f"^{words}", table.out, re.M), (words, table.out)


@pytest.mark.slow
def test_json_and_the_table_say_the_same(healthy):
    table, as_json, _ = healthy
    found = json.loads(as_json.out)
    assert found["exit_code"] == found["failures"] == 0
    rows = [line for line in table.out.splitlines() if re.match("ok|warning|failure", line)]
    for row, line in zip(rows, found["lines"], strict=True):
        if line["check"] not in ("loader", "busy"):  # measured anew
            text = f"{line['level']:<8} " + ": ".join(filter(None, [line["text"], line["remedy"]]))
            assert re.sub(r"[0-9.]+", "N", row) == re.sub(r"[0-9.]+", "N", text)


def test_a_checkpoint_is_as_large_as_it_says(healthy):
    _, as_json, run = healthy
    text = only([line["text"] for line in json.loads(as_json.out)["lines"] if line["check"] == "disk"])
    size = float(re.search(r"checkpoints of ([\d.e+]+) MB", text)[1]) * 1e6
    (written,) = json.loads((run / "manifest.json").read_text())["checkpoints"]
    assert 0.9 < size / written["bytes"] <= 1.0, "the rest are names, config and random state"


@pytest.mark.parametrize(
    ("there", "free", "level"),
    [(0, 39, "failure"), (0, 79, "warning"), (0, 80, "ok"), (3, 9, "failure"), (3, 19, "warning"), (3, 20, "ok")],
)
def test_a_run_that_goes_on_has_room_for_the_checkpoints_it_has(monkeypatch, tmp_path, there, free, level):
    """One is kept, and the last, the best, and one that is being written: four of 10 MB. Those of the run before are
    replaced, so only the rest needs room; a link to one of them is none."""
    for n in range(there):
        (tmp_path / f"best_model_epoch{n}.pt").write_bytes(bytes(10_000_000))
        (tmp_path / "best_model.pt").unlink(missing_ok=True)
        (tmp_path / "best_model.pt").symlink_to(f"best_model_epoch{n}.pt")
    monkeypatch.setattr(doctor, "checkpoint_bytes", lambda run: 10_000_000)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free * 1_000_000))
    line = only(doctor.disk(SimpleNamespace(cfg=config.Config(save_dir=str(tmp_path), keep_checkpoints=1))))
    assert line.level == level and line.text.startswith(f"{free} MB free at {tmp_path}, the run keeps up to 4 check")


@pytest.mark.parametrize(("memory", "level", "todo"), [
    (100, "ok", ""), (50, "warning", "ddp.strategy=hsdp"), (39, "failure", "ddp.strategy=hsdp"),
    (19, "failure", "ddp.strategy=fsdp"), (9, "failure", "more processes with ddp.strategy=fsdp, a smaller model"),
])  # fmt: skip
def test_a_model_that_does_not_fit_names_the_strategy_to_type(monkeypatch, memory, level, todo):
    found = strategies.Footprint({"ddp": 40, "fsdp": 10, "hsdp in groups of 2": 20}, 40, memory, memory)
    monkeypatch.setattr(strategies, "footprint", lambda run: found)
    line = only(doctor.model_memory(SimpleNamespace(cfg=config.Config())))
    assert (line.level, line.remedy) == (level, todo) and "hsdp in groups of 2 0.0 MB" in line.text


@pytest.mark.slow
def test_two_processes_are_started_compared_and_timed(launch):
    done = launch.python(DOCTOR, "--launch", "2", "--json", TOY, OMP_NUM_THREADS=None)
    lines = {line["check"]: line["text"] for line in json.loads(succeed(done).out)["lines"]}
    assert lines["launch"] == "2 processes, 2 on this machine"
    assert "2 ranks agree on config, code, data and weights" in lines["data"]
    speeds = [float(text) for text in re.findall(r"([\d.e+]+) GB/s", lines["sums"])]
    assert speeds and min(speeds) > 0 and "through gloo" in lines["sums"] and "the gradients" in lines["sums"]
    assert "port" not in lines, "they have met at one"


LEFT_OUT = "not checked for that reason: /dev/shm, disk, speed of the loader"


@pytest.mark.slow
def test_a_failure_on_several_processes_ends_all_of_them(launch, tmp_path):
    done = launch.python(DOCTOR, "--launch", "2", "har", f"dataset.root={tmp_path / 'gone'}")
    assert done.code == 1 and not done.err and "gone" in only(lines_of(done, "failure")), done.err
    assert LEFT_OUT in done.out and "bus bandwidth" in done.out, "the rest is"
    done = launch.python(DOCTOR, "--launch", "2", FAULTY, "fault.kind=raise in data", "fault.rank=1")
    assert done.code == 70 and "RuntimeError: the disk is on fire" in only(done.errors), done.err
    assert "rank 1" in done.errors[0] and "2 processes, 2 on this machine" in done.out


@pytest.mark.parametrize(
    ("words", "env", "failure", "left_out"),
    [
        (["har", "dataset.root=/gone"], {}, "/gone", True),
        # The middle one is looked at as the data are read; this one only when batches are.
        ([FAULTY, "fault.kind=corrupt sample", "fault.rank=0"], {}, "sample 7 cannot be loaded: ValueError", False),
        ([TOY], {"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not", False),
    ],
)
def test_what_fails_is_a_line(launch, words, env, failure, left_out):
    done = launch.python(DOCTOR, *words, **env)
    assert done.code == 1 and not done.err and failure in only(lines_of(done, "failure")), done.out
    assert (LEFT_OUT in done.out) is left_out


def test_words_that_no_training_takes(launch, capsys):
    done = launch.python(DOCTOR, TOY, "epoch=3")
    assert done.code == 2 and not done.out and "did you mean 'epochs'?" in only(done.errors)
    for count in ("0", "two"):
        with pytest.raises(SystemExit, match="2"):
            doctor.main(["--launch", count])
        assert count in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.real
def test_a_missing_package(launch):
    program = "import runpy, sys; sys.modules['yaml'] = None; runpy.run_path('tools/doctor.py', run_name='x')"
    done = launch.python("-c", program)
    assert done.code == 1 and not done.out
    assert re.fullmatch(r"failure  yaml is not installed: .* -m pip install -r .*requirements.txt\n", done.err)


@pytest.mark.slow
def test_little_of_everything(launch, tmp_path):
    """Few open files, more workers than cores, more checkpoints than any disk holds."""
    words = [TOY, "num_workers=100", "keep_checkpoints=1e15", f"save_dir={tmp_path / 'run'}"]
    limited = ("sh", "-c", 'ulimit -n 100 && exec "$@"', "sh", sys.executable, DOCTOR, *words)
    done = launch(*limited)
    assert done.code == 1, done.out + done.err
    failures = lines_of(done, "failure")
    files, disk, loader = failures
    assert "ulimit -n is 100, and a process of this run opens up to" in files
    assert re.search(r": (ulimit -n 4096|the hard limit is \d+: raise it .*)$", files)
    assert "keeps up to 1000000000000003 checkpoints" in disk and "a smaller keep_checkpoints" in disk
    assert "Too many open files" in loader
    cores = len(os.sched_getaffinity(0))
    assert f"warning  1 process x 100 workers = 100 on {cores} cores: num_workers=" in done.out


def test_a_small_disk_and_little_shared_memory(launch):
    """One disk is both."""
    words = [TOY, "model.width=20000", "batch_size=60", "num_workers=2", "save_dir=/dev/shm/run"]
    done = launch.on_a_small_disk("/dev/shm", "24k", DOCTOR, *words)
    assert done.code == 1, done.out + done.err
    failures = "\n".join(lines_of(done, "failure"))
    assert re.search(r"/dev/shm has 0 MB free, loader processes need up to [\d.]+ MB .*--shm-size=1g", failures)
    assert re.search(r"0 MB free at /dev/shm, the run keeps up to 4 checkpoints of [\d.]+ MB: free some", failures)


SLOW_DATA = """
import time
from tests.tasks import toy

class Slow(toy.Waves):
    def __getitems__(self, indices):
        time.sleep(0.1)
        return super().__getitems__(indices)

class Task(toy.Task):
    def datasets(self):
        return Slow(61, 0), Slow(23, 1)
"""


@pytest.mark.slow
def test_slow_data_are_said_with_what_helps(launch, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_DATA)
    done = succeed(launch.python(DOCTOR, str(tmp_path / "slow.py")))
    line = only([line for line in lines_of(done, "warning") if "waiting for data" in line])
    share = int(re.search(r"(\d+) % of the time is waiting", line)[1])
    # It sleeps, and needs no core for that.
    assert share > 50 and int(re.search(r": num_workers=(\d+)$", line)[1]) >= 2


# ---- ports and processes ---------------------------------------------------------------------------------------------


def test_a_busy_port_names_its_process_and_a_free_one(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(number))
        line = only(machine.port())
        assert told([line], f"failure port {number} is in use by process {os.getpid()} (")
        other = int(re.search(r"MASTER_PORT=(\d+)", line.remedy)[1])
        assert other != number and not machine._taken(other)
        monkeypatch.delenv("MASTER_PORT")  # nobody asks for this one, and --standalone does without
        monkeypatch.setattr(machine, "DEFAULT_PORT", number)
        assert told(machine.port(), f"warning port {number} is in use")
    assert only(machine.port()) == machine.ok(f"port {number} is free")
    for wrong in ("0", "70000", "http"):
        monkeypatch.setenv("MASTER_PORT", wrong)
        assert told(machine.port(), f"failure MASTER_PORT={wrong} is no port")


def test_a_file_that_is_closed_during_the_search_hides_no_other_file(tmp_path):
    """The list of a process's open files is open itself while it is read."""
    files = tmp_path / "fd"
    files.mkdir()
    for number in ("0", "2", "4"):
        (files / number).touch()  # no link, so that `readlink` fails as for a file that is gone
    (files / "3").symlink_to("socket:[77]")
    assert [*machine._open_files(tmp_path)] == ["socket:[77]"]


def world(device="cpu"):
    return World(0, 0, 1, torch.device(device))


def start(monkeypatch, processes):
    """As a launcher that starts so many on this machine."""
    env = launch.Environment(0, 0, processes, local_size=processes, launched=True)
    monkeypatch.setattr(launch, "environment", lambda: env)


@pytest.mark.parametrize(
    ("count", "workers", "line"),
    [
        (4, 0, "ok 2 processes x (2 threads) on 4 cores"),
        (3, 0, "warning 2 processes x 2 threads = 4 on 3 cores…: OMP_NUM_THREADS=1"),
        (6, 4, "warning 2 processes x 4 workers = 8 on 6 cores: num_workers=2"),
        (1, 0, "warning 2 processes on 1 core: they take turns: start at most 1"),
    ],
)
def test_cores_are_counted_against_threads_and_workers(monkeypatch, count, workers, line):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    start(monkeypatch, 2)
    assert told(doctor.check_threads(config.Config(num_workers=workers), world(), count), line)


def test_a_containers_share_of_the_cores_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "CPU_QUOTA", tmp_path / "cpu.max")
    all_of_them = len(os.sched_getaffinity(0))
    for text, count in (("max 100000\n", all_of_them), ("100000 100000\n", 1), ("50000 100000\n", 1)):
        (tmp_path / "cpu.max").write_text(text)
        assert threads.available() == count


def test_what_ranks_and_machines_have_different_is_said():
    same = {"torch": "2.13.0", "NCCL": "2.27.5", "GPU": "H200"}
    assert told(machine.differences([same, dict(same)]))
    found = machine.differences([same, same, same | {"NCCL": "2.26.2", "GPU": "A100"}])
    assert told(found, "failure rank 2 has NCCL 2.26.2, rank 0 has 2.27.5: ", "warning rank 2 has GPU A100, rank 0 has")
    full, fine = machine.failure("/dev/shm is full", "more"), machine.ok("port 29500 is free")
    everyones = [("one", [full, fine]), ("one", []), ("two", [fine, full])]
    assert told(doctor.complaints(everyones), "failure two: /dev/shm is full: more")


def test_old_packages_are_refused(monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda name: {"torch": "2.6.1", "numpy": "2.0"}.get(name, "99"))
    assert told(machine.versions(), "failure torch 2.6.1, and 2.7 is the least: ", "ok torch ")
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.9.18")
    assert next(machine.versions()).text == "Python 3.9.18, and 3.10 is the least"


def test_a_check_that_breaks_has_no_result(capsys):
    def open_files():
        yield machine.ok("before")
        yield {}["what a driver said"]

    assert told(machine.attempt(open_files), "ok before", "unknown open files: could not be checked: KeyError")
    for lines, code, summary in (
        ([machine.warning("w")], 0, "0 failures, 1 warning"),
        ([machine.warning("w"), machine.unknown("u")], 7, "0 failures, 1 warning, 1 check not made"),
        ([machine.failure("f"), machine.unknown("u")], 1, "1 failure, 0 warnings, 1 check not made"),
    ):
        report = doctor.Report(True, False)
        report.add("some", lines)
        assert report.close() == code and capsys.readouterr().out.splitlines()[-1] == summary


def test_a_check_that_breaks_is_no_success(launch):
    """As where the kernel's files are others: all else is well, and the tool does not say so of the whole."""
    program = "import sys; from tools.machine import doctor; doctor.busy = lambda share: 1 / 0\n"
    program += "sys.exit(doctor.main(sys.argv[1:]))"
    done = launch.python("-c", program, TOY)
    assert done.code == 7 and "could not be checked: ZeroDivisionError" in only(lines_of(done, "unknown")), done.err
    assert re.search(r"^0 failures, \d warnings?, 1 check not made$", done.out, re.M)


def test_a_gpu_that_nvidia_smi_does_not_list_was_not_looked_at(smi, monkeypatch):
    """A container without the tool, or one that lists nothing: torch uses the GPU, and nobody has seen its users."""
    smi(gpus="")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "_cuda", lambda there: iter(()))
    says = "unknown nvidia-smi lists no GPU, and torch uses one: its memory and its users were not checked"
    assert told(shown_as(monkeypatch, "0"), says)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert told(machine.attempt(machine.cards, config.Config()), says)


@pytest.mark.parametrize(
    "speed, spare, on_gpu, expected",
    [
        (Speed(0.01, 0.01, 0.01, 1.0), 8, False, 0),  # a small part of a step
        (Speed(0.5, 0.5, 0.5, 1.0), 8, False, 1),  # a CPU fetches in between
        (Speed(0.5, 0.5, 0.5, 1.0), 8, True, 0),  # a GPU's thread fetches meanwhile
        (Speed(3.5, 3.5, 3.5, 1.0), 8, True, 4),
        (Speed(3.5, 3.5, 3.5, 1.0), 2, True, 2),  # as many as there are cores for
        (Speed(3.5, 3.5, 3.5, 1.0), 0, False, 0),
        (Speed(3.5, 0.1, 3.5, 1.0), 0, False, 2),  # who waits for a disk needs no core
        (Speed(1e-3, 1e-3, 1e-3, 1e-4), 8, True, 0),  # to hand it over takes as long
    ],
)
def test_how_many_workers(speed, spare, on_gpu, expected):
    assert doctor.recommend(speed, spare, on_gpu) == expected


def test_how_long_a_training_waits_for_data():
    assert doctor.waiting(1.0, 1.0, meanwhile=False) == 0.5
    assert doctor.waiting(1.0, 1.0, meanwhile=True) == doctor.waiting(0.25, 1.0, meanwhile=True) == 0.0
    assert doctor.waiting(4.0, 1.0, meanwhile=True) == 0.75


# ---- GPUs: what nvidia-smi and torch would say -----------------------------------------------------------------------

CARDS = """\
0, GPU-aaaa-1, NVIDIA H200, 580.65.06, 143771, 4, 5, 16, 16
1, GPU-aabb-2, NVIDIA H200, 580.65.06, 143771, 4, 5, 16, 16
2, GPU-cccc-3, NVIDIA L40S, 580.65.06, 46068, 40000, 4, 8, 16
3, GPU-dddd-4, NVIDIA H200, 580.65.06, 143771, 30000, [N/A], [N/A], [N/A]
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNODE\tSYS\tPXB\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\tPXB\t0-15\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tSYS\tPXB\t0-15\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tPXB\tPXB\tPXB\tSYS\t X \t

Legend:

  X    = Self
"""


@pytest.fixture
def cpu_build(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)


def shown_as(monkeypatch, visible):
    """The lines about GPUs where the user shows these."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return machine.attempt(machine.cards, config.Config())


NVLINK = "GPU 0: NVIDIA H200\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n\t Link 2: <inactive>\n"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """The stand-in for nvidia-smi, first on the PATH; give it other answers. This process, not those that it starts by
    `launch`, takes the GPUs for visible."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def answer(**other):
        usual = {"gpus": CARDS, "users": "", "paths": TOPOLOGY, "links": NVLINK}
        nvidia_smi(tmp_path / "bin", **usual | other)
        nvidia.cards.cache_clear()
        nvidia.users.cache_clear()

    answer()
    yield answer
    nvidia.cards.cache_clear()
    nvidia.users.cache_clear()


BUILD = "failure nvidia-smi lists 4 GPUs, but this torch is built for the CPU: install torch for CUDA"


def test_gpus_that_this_torch_cannot_use(smi, cpu_build, monkeypatch):
    first = "ok GPU 0 (NVIDIA H200): 0.0 of 140 GiB in use, driver 580.65.06"
    assert told(shown_as(monkeypatch, "0,1"), first, "ok GPU 1", BUILD)
    assert told(machine.cards(config.Config(device="cpu")), "ok device=cpu: no GPU is looked at")
    assert told(shown_as(monkeypatch, ""), "ok CUDA_VISIBLE_DEVICES=: no GPU is looked at")
    smi(users=f"GPU-aaaa-1, 4242, /usr/bin/python, other, 1200\nGPU-aabb-2, {os.getpid()}, python, 300\n")
    lines = shown_as(monkeypatch, "0,1,3")
    used = "warning GPU 0 (NVIDIA H200) is used by process 4242 (python, other, 1200 MiB)"
    assert told(lines, used, "ok GPU 1", "warning GPU 3 …cannot be seen from here", BUILD)
    smi(users="GPU-cccc-3, 1, python, 39000\n")
    lines, kinds = shown_as(monkeypatch, "1,GPU-cccc"), "warning GPUs of different kinds: NVIDIA H200, NVIDIA L40S;"
    assert told(lines, "ok GPU 1", "warning GPU 2 …is used", "warning GPU 2 …has 8 of 16 PCIe lanes", kinds, BUILD)
    smi(gpus="Failed to initialize NVML: Driver/library version mismatch\n", code=1)
    assert told(shown_as(monkeypatch, "0"), "failure …Driver/library version mismatch")


def test_a_driver_too_old_for_torch(smi, monkeypatch):
    def unavailable():
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old\nmore", stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    reason = "can use no GPU: CUDA initialization: The NVIDIA driver on your system is too old: a newer driver"
    assert told(shown_as(monkeypatch, "0"), "ok GPU 0", f"failure …{reason}")


@pytest.mark.parametrize(
    ("plain", "cudnn", "warned"),
    [("2.13.0", 92000, False), ("2.9.1", 91500, False), ("2.9.1", 91300, True), ("2.9.0", 91500, True),
     ("2.8.0", 91002, True), ("2.7.0", 90501, False), ("2.9.0a0", 91500, True), ("2.9.0.post1", 91500, True),
     ("2.9.1.post1", 91500, False), ("2.19.0", 91500, False)],
)  # fmt: skip
def test_versions_that_cannot_do_3d_convolutions_in_bf16(smi, monkeypatch, plain, cudnn, warned):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch, "__version__", f"{plain}+cu128")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 5)))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    found = f"torch {plain} with cuDNN {cudnn // 10000}.{cudnn // 100 % 100}: 3-D convolutions in bf16 are wrong"
    expected = ["ok GPU 0", "ok CUDA 12.8 of torch works with the driver; NCCL 2.27.5"]
    if warned:
        expected.append(f"warning {found}")
    assert told(shown_as(monkeypatch, "0"), *expected)


@pytest.mark.parametrize(
    "asked, shown, invalid",
    [
        (None, [0, 1, 2, 3], ""),
        ("2, 0", [2, 0], ""),
        ("0,7,1", [0], "7"),  # CUDA ends the list there
        ("1,1", [], "1"),
        ("GPU-aa", [], "GPU-aa"),  # of two cards
        ("GPU-aabb,0", [1, 0], ""),
        ("", [], ""),
    ],
)
def test_the_rules_of_cuda_visible_devices(smi, cpu_build, monkeypatch, asked, shown, invalid):
    cards, wrong = nvidia.visible(asked)
    assert [card.index for card in cards] == shown and wrong == invalid
    if invalid:
        assert f"{invalid!r} is none of the 4 GPUs" in shown_as(monkeypatch, asked)[0].text


def test_more_processes_than_gpus(smi, monkeypatch):
    env = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    for name, value in (env | {"MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "0,1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    launch, lines = machine.launch_of(config.Config())
    assert launch.local_size == 3
    assert told(lines, "failure 3 processes on this machine, but 2 GPUs visible (…=0,1): …ddp.backend=gloo")
    shared = config.parse([TOY, "ddp.backend=gloo"], tasks.load).cfg
    assert told(machine.launch_of(shared)[1], "warning 3 processes share 2 GPUs by gloo: …ddp.backend=gloo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert told(machine.launch_of(config.Config())[1], "ok 3 processes, 3 on this machine")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert told(machine.launch_of(config.Config())[1], "ok 3 processes, 3 on this machine")
    assert told(machine.launch_of(config.Config(device="cpu"))[1], "failure …segmentation fault")


@pytest.mark.slow
def test_more_processes_than_gpus_under_torchrun(smi, launch):
    """Rank 0, which says so, has more to do before than the others: torchrun must not end it with them."""
    smi(before='test "$LOCAL_RANK" != 0 || sleep 2')
    not_of_this_machine = "GPU-aaaa-1,GPU-aabb-2"  # whose own GPUs torch would find by their numbers
    done = launch.python(DOCTOR, "--launch", "3", TOY, CUDA_VISIBLE_DEVICES=not_of_this_machine)
    assert done.code == 1, done.out + done.err
    assert any("3 processes on this machine, but 2 GPUs visible" in line for line in lines_of(done, "failure"))


def test_how_gpus_are_joined(smi, monkeypatch):
    assert nvidia.paths()[0, 1] == nvidia.paths()[1, 0] == "NV18" and nvidia.paths()[1, 3] == "SYS"
    assert nvidia.nvlink_gb_s(0) == pytest.approx(53.124)
    gpus = world("cuda:0")
    start(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    assert told(machine.peers(gpus), "ok 2 GPUs, joined by NV18; each reaches the others' memory")
    start(monkeypatch, 4)
    far = "warning 4 GPUs, joined by NODE, NV18, SYS; no direct access between 0 and 2: "
    assert told(machine.peers(gpus), far, "warning GPUs of different NUMA nodes")


def test_bandwidth_is_compared_with_the_link(smi):
    cards = nvidia.cards()
    for speed, some, line in (
        (40.0, cards[:2], "ok t; NVLink carries 53.1 GB/s"),
        (20.0, cards[:2], "warning t; NVLink carries 53.1 GB/s"),
        (3.0, cards[:3], "warning t; PCIe carries 15.8 GB/s"),  # by way of the L40S, 8 lanes of PCIe 4
        (3.0, cards, "ok t; what the link should give is not known"),  # one does not say
    ):
        assert told([doctor._against_the_link("t", speed, some)], line)
    smi(paths="", gpus="")
    assert "is not known" in doctor._against_the_link("t", 3.0, nvidia.cards()).text
    assert math.isnan(cards[3].pcie_gb_s)


def test_a_gpu_that_does_not_compute(monkeypatch):
    about = SimpleNamespace(name="NVIDIA Tesla P4", major=6, minor=1)
    for name, value in {
        "get_device_properties": lambda device: about,
        "mem_get_info": lambda device: (7 << 30, 8 << 30),
        "is_bf16_supported": lambda including_emulation: False,
        "device": lambda device: torch.no_grad(),
        "get_arch_list": lambda: ["sm_75", "sm_90"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def no_kernel(*shape, device):
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution on the device")

    gpu, ones, name = world("cuda:1"), torch.ones, "cuda:1 (NVIDIA Tesla P4, compute capability 6.1)"
    fails = f"failure {name} cannot compute: CUDA error: no kernel image…made for sm_75 sm_90"
    for stand_in, amp, line in (
        (no_kernel, "auto", fails),
        (lambda *shape, device: 2 * ones(*shape), "auto", f"failure {name} adds up 64 ones to something else"),
        (lambda *shape, device: ones(*shape), "auto", f"ok {name} computes: 7.0 of 8.0 GiB free, no bf16"),
        (lambda *shape, device: ones(*shape), "bf16", f"warning {name} computes…, but amp=bf16: amp=fp16, or auto"),
    ):
        monkeypatch.setattr(torch, "ones", stand_in)
        assert told(machine.device(config.Config(amp=amp), gpu), line)


def test_variables_that_make_gpus_slow(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    why = "GPUs don't send to each other, but by way of the host's memory: unset NCCL_P2P_DISABLE"
    assert told(machine.variables(), f"warning NCCL_P2P_DISABLE=1: {why}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert told(machine.variables())


def test_a_world_that_cannot_be_joined_is_a_failure(monkeypatch, capsys):
    def refuse(cfg):
        raise LockstepError("port 1 is in use", todo="take another")

    monkeypatch.setattr(train, "setup_distributed", refuse)
    args = config.parse(["har", "device=cpu"], tasks.load)
    assert doctor.examine(args, as_json=False) == 1
    assert "failure  port 1 is in use: take another" in capsys.readouterr().out
