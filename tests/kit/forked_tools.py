"""Tools of tools/ that run in pytest's own process: the trainings that they start are forked from the warm parent."""

import subprocess
from types import SimpleNamespace

from conftest import ROOT

from tools import running


def fork_trainings(launch, monkeypatch):
    """From now on. Return the list of the commands that are started."""
    started = []

    def popen(command, *, env, **how):
        started.append(command)
        # A fork has the hashes of its parent, whatever the variable says.
        env = {name: value for name, value in env.items() if name != "PYTHONHASHSEED"}
        return launch.popen(command, cwd=ROOT, env=env, **how)

    monkeypatch.setattr(running, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))
    return started
