"""Fixtures of the tests of robots, in each test file through tests/conftest.py."""

import shutil

import pytest


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Return a function: {maker of lerobot_data.MAKERS: folder}, each written once; a test that changes one copies."""
    from lerobot_data import MAKERS

    folders = {}

    def get(kind):
        if kind not in folders:
            folders[kind] = MAKERS[kind](tmp_path_factory.mktemp("lerobot") / "set")
        return folders[kind]

    return get


@pytest.fixture
def copied(made, tmp_path):
    """A copy of the dataset of version 2.1 to damage."""
    return shutil.copytree(made("v2.1"), tmp_path / "copy")


@pytest.fixture(scope="session")
def walks(tmp_path_factory):
    """A dataset of 4 random walks with one camera."""
    from robot_tasks import record

    return record(tmp_path_factory.mktemp("walks") / "set")


@pytest.fixture
def robot_caches(tmp_path, monkeypatch):
    """A folder of its own for decoded pictures."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def own_recordings(monkeypatch, tmp_path):
    """A folder of its own for the demonstrations of the simulation."""
    monkeypatch.setattr("tasks.robots.simulation.GENERATED", tmp_path)


@pytest.fixture
def double():
    """Compute in float64."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
