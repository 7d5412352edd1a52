"""A stand-in for nvidia-smi: a shell script that prints a file for each question."""

from __future__ import annotations

import shutil
from pathlib import Path

SCRIPT = """#!{sh}
case "$*" in
    -L) what=listing ;; *query-gpu*) what=gpus ;; *query-comp*) what=users ;; topo*) what=paths ;; *) what=links ;;
esac
{before}
{cat} "{folder}/smi_$what"
exit {code}
"""


def nvidia_smi(folder: Path, before: str = "", code: int = 0, **answers: str) -> None:
    """Make `folder`/nvidia-smi, or give it other answers.

    before   shell commands that run before an answer
    code     exit code
    answers  the output for -L (listing), --query-gpu (gpus), --query-compute-apps (users), topo (paths), nvlink (links)
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in answers.items():
        (folder / f"smi_{name}").write_text(text)
    program = folder / "nvidia-smi"
    tools = {name: shutil.which(name) for name in ("sh", "cat")}
    program.write_text(SCRIPT.format(folder=folder, before=before, code=code, **tools))
    program.chmod(0o755)
