"""Run import-linter on the house: it takes packages only, so the scripts of the top level are shown
to it as such.

python dev/layers.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        view = Path(folder)
        for package in ("engine", "plugins", "tasks", "formats", "models", "tools"):
            shutil.copytree(
                ROOT / package, view / package, ignore=shutil.ignore_patterns("__pycache__")
            )
        for script in ("train", "train_ddp", "data_loader"):
            (view / script).mkdir()
            shutil.copy(ROOT / f"{script}.py", view / script / "__init__.py")
        shutil.copy(ROOT / "pyproject.toml", view)
        program = (
            "import sys; sys.path.insert(0, '.'); from importlinter.cli import "
            "lint_imports_command as run; run()"
        )
        return subprocess.run([sys.executable, "-c", program, "--no-cache"], cwd=view).returncode


if __name__ == "__main__":
    sys.exit(main())
