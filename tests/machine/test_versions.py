"""Versions of torch as its builds have them: with a local part, of a nightly, of a build from source."""

import json
from types import SimpleNamespace

import pytest
import torch

from engine.comm.world import World
from engine.files import run_folder
from tools.evidence import compare, replay
from tools.machine import checks as machine

VERSIONS = ["2.11.0+cu130", "2.14.1+cu130", "2.15.0a0+git123", "2.13.0.post1", "2.14.0.dev20261101+cpu", "2.7.0"]


@pytest.fixture(params=VERSIONS)
def here(request, monkeypatch):
    """The version of this torch."""
    monkeypatch.setattr(torch, "__version__", request.param)
    return request.param


def package(version):
    """The version of the package, as PyPI has it."""
    return version.split("+")[0]


def test_none_is_too_old(here, monkeypatch):
    for installed in (here, package(here)):
        monkeypatch.setattr(machine, "installed", lambda name, it=installed: it if name == "torch" else "99")
        (line,) = machine.versions()
        assert line.text.startswith(f"torch {package(here)} (")


@pytest.mark.parametrize("version", ["2.6.1+cu130", "2.6.0a0+git99", "1.13.1+cu117", "2.6.9.post9"])
def test_one_that_is_too_old_is_refused(monkeypatch, version):
    monkeypatch.setattr(machine, "installed", lambda name: version if name == "torch" else "99")
    assert next(machine.versions()).text == f"torch {version}, and 2.7 is the least"


def test_the_run_folder_has_the_version_of_the_build(here):
    record = run_folder.environment(World(0, 0, 1, torch.device("cpu")))
    assert record["packages"]["torch"] == here == run_folder.torch_version(record)
    assert record["packages"]["numpy"]


@pytest.fixture
def run_with(tmp_path):
    """Returns a function that makes the folder of a run without checkpoints, begun by a torch of this version."""

    def make(version):
        record = {"packages": {"torch": version}}
        (tmp_path / "environment.json").write_text(json.dumps(record))
        (tmp_path / "config.yaml").write_text("task: har\n")
        cfg = SimpleNamespace(device="cpu", virtual_workers=0, arithmetic="native")
        return SimpleNamespace(folder=tmp_path, environment=record, cfg=cfg)

    return make


def machine_of(run):
    """What tools/replay.py notes about the machine."""
    found = replay.Anyway()
    replay._look_at_machine(run, [], found)
    return found


def test_an_older_record_without_the_local_part_is_of_the_same_torch(here, run_with):
    for recorded in {here, package(here)}:
        run = run_with(recorded)
        assert machine_of(run).explains == []
        assert compare._of_folder("A", run.folder).environment["torch"] == here


def test_another_version_is_another_torch(here, run_with):
    for other in ("2.12.0", f"{package(here)}+other"):
        run = run_with(other)
        assert machine_of(run).explains == ["machine"]
        assert compare._of_folder("A", run.folder).environment["torch"] == other
