"""What a machine, its C library or its container reports in another form: no start ends for that reason."""

import os
import pwd
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TOY, succeed

from engine import private
from engine.contract import LockstepError
from formats import home
from formats.weights import hub
from plugins.performance import cached_data, capped, cores
from plugins.resilience import watchdog
from plugins.security import listen
from tools.machine import tune

MEMINFO = "MemTotal:       16000 kB\nMemFree:         9000 kB\n"


@pytest.fixture
def files(monkeypatch):
    """Bytes in place of files of the system, by path; None: no such file."""
    contents = {}

    def read_bytes(path):
        content = contents.get(str(path), b"")
        if content is None:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return content

    def read_text(path, encoding=None, errors=None):
        return read_bytes(path).decode(encoding or "utf-8", errors or "strict")

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(Path, "read_text", read_text)
    return contents


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (b"model name\t: Intel\xae Xeon\n", "Intel\N{REPLACEMENT CHARACTER} Xeon"),
        (b"processor\t: 0\nCPU part\t: 0xd40\n", os.uname().machine),
        (b"", os.uname().machine),
        (None, os.uname().machine),
    ],
)
def test_the_name_of_a_cpu(files, cpuinfo, name):
    files["/proc/cpuinfo"] = cpuinfo
    assert private.cpu_model.__wrapped__() == name


def row(memory_mb):
    return {"batch_size": 1, "memory_mb": memory_mb, "out_of_memory": False, "device": "cpu"}


@pytest.mark.parametrize("text", [MEMINFO.encode(), b"garbage\n", b"\xff\n", b"", None])
def test_without_a_number_of_available_memory_nothing_is_refused(files, text):
    files["/proc/meminfo"] = text
    device = torch.device("cpu")
    assert cached_data._free_bytes(device) > 1e15
    assert not tune.would_not_fit([row(1e9)], 2, 4)
    files["/proc/meminfo"] = MEMINFO.encode() + b"MemAvailable:    9500 kB\n"
    assert cached_data._free_bytes(device) == 9500 * 1024
    assert tune.would_not_fit([row(5)], 2, 4)
    assert not tune.would_not_fit([row(1)], 2, 4)


def test_names_of_processes_and_interfaces_have_any_bytes(files):
    files["/proc/7/stat"] = b"7 (pyth\xc3) S 3 7 7"  # a name is cut after 15 bytes
    assert watchdog._state(7) == ("S", 3)
    row = b"fe800000000000000000000000000001 02 40 20 80 "
    files["/proc/net/if_inet6"] = row + b"n\xe9t\n" + row.replace(b"1 02", b"2 02") + b"eth0\n"
    assert listen._interface_of("fe80::2", None) == "eth0" and listen._interface_of("fe80::1", None) == "n\udce9t"


def test_a_sandbox_without_a_load(monkeypatch):
    def unknown():
        raise OSError("Load averages are unobtainable")

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert cores.contention_warning(float("nan")) == "" and "80 % of their time" in cores.contention_warning(0.8)


@pytest.mark.parametrize("config", [None, {}])
def test_a_numpy_that_lists_nothing_starts_and_is_refused_as_capped(monkeypatch, config):
    monkeypatch.setattr(np, "show_config", lambda mode: config)
    assert capped._variables()["NPY_DISABLE_CPU_FEATURES"] == ""
    assert "does not list the extensions" in capped._lack()[0]
    monkeypatch.setattr(np, "show_config", lambda: None)  # NumPy 1.26, built by setuptools
    assert capped._extensions() == {}


def test_a_user_without_a_name_and_a_home(monkeypatch):
    """As in a container that is started with a number of a user."""

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "LOCKSTEP_CACHE", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for folder in (home.cache_folder, hub.home, lambda: home.expand("~/data")):
        with pytest.raises(LockstepError, match=r"the home folder is not known .*: set HOME"):
            folder()
    monkeypatch.setenv("LOCKSTEP_CACHE", "/caches")
    assert home.cache_folder() == Path("/caches") and home.cache_folder("/mine") == Path("/mine")
    assert home.expand("data") == Path("data")


def test_lines_of_onednn_need_no_folder(monkeypatch, capfd):
    def unknown():
        raise FileNotFoundError(2, "No usable temporary directory found")

    lines = []
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "_get_default_tempdir", unknown)
        patch.setattr(tempfile, "tempdir", None)
        with capped.onednn_lines(lines):
            print("a line of the task")
        patch.delattr(os, "memfd_create")
        with pytest.raises(FileNotFoundError), capped.onednn_lines(lines):
            pass
    assert capfd.readouterr().out == "a line of the task\n" and not lines


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("words", [[], ["arithmetic=capped"]])
def test_a_start_with_an_almost_empty_environment(launch, tmp_path, words):
    """As of a scheduler's job: no PATH, no HOME, no locale, one core, a terminal that is gone."""
    run = tmp_path / "run"
    command = [os.sys.executable, "train.py", TOY, "steps=2", "device=cpu", f"save_dir={run}", *words]
    core = min(os.sched_getaffinity(0))
    done = launch("bash", "-c", f'taskset -c {core} env -i "$@" >&- 2>&- <&-', "bash", *command)
    succeed(done)
    assert (run / "last.pt").exists()
