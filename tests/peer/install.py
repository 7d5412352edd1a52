"""Install LeRobot 0.6.1 into a folder of its own, beside the environment's torch and numpy, for the tests in here.

    python tests/peer/install.py FOLDER
    PYTHONPATH=FOLDER python -m pytest tests/peer

It asks for Python 3.12 and a torch below 2.12: five of its files have type parameters in the syntax of 3.12 and are
rewritten, and nothing here needs an older torch. 0.8 GB.
"""

import re
import subprocess
import sys
from pathlib import Path

# These would bring a torch of their own.
ALONE = ("lerobot==0.6.1", "torchvision==0.28.0", "accelerate==1.15.0", "timm==1.0.28", "peft==0.21.2", "av==15.1.0")
WITH_WHAT_THEY_NEED = (
    "draccus==0.11.6",
    "transformers==5.5.4",
    "datasets==4.8.5",
    "pandas==2.3.3",
    "einops==0.8.2",
    "opencv-python-headless==4.13.0.92",
    "num2words==0.5.14",
    "diffusers==0.39.0",
    "jsonlines==4.0.0",
    "deepdiff==8.6.2",
    "termcolor==3.3.0",
    "huggingface-hub==1.33.0",
    "gymnasium==1.2.3",
)


def install(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(folder)]
    subprocess.run([*pip, "--no-deps", "--ignore-requires-python", *ALONE], check=True)
    import numpy

    constraints = folder / "constraints.txt"
    constraints.write_text(f"numpy=={numpy.__version__}\n")
    subprocess.run([*pip, "--constraint", str(constraints), *WITH_WHAT_THEY_NEED], check=True)
    for path in (folder / "lerobot").rglob("*.py"):
        old = path.read_text(encoding="utf-8")
        if (new := without_type_parameters(old)) != old:
            path.write_text(new, encoding="utf-8")


def without_type_parameters(source: str) -> str:
    """Rewrite `type X = ...`, `class X[T](...)` and `def f[T](...)` for Python 3.11."""
    lines = list[str]()
    for line in source.splitlines(keepends=True):
        line = re.sub(r"^type (\w+) = ", r"\1 = ", line)
        if found := re.match(r"(class|def) (\w+)\[([^\]]+)\](.*)$", line, re.DOTALL):
            kind, name, parameters, rest = found.groups()
            names = [parameter.split(":")[0].strip() for parameter in parameters.split(",")]
            at = len(lines)
            while lines[at - 1].startswith("@"):
                at -= 1
            lines[at:at] = [f'{each} = __import__("typing").TypeVar("{each}")\n' for each in names]
            if kind == "class":
                generic = f'__import__("typing").Generic[{", ".join(names)}]'
                rest = rest.replace("):", f", {generic}):", 1) if rest.startswith("(") else f"({generic}){rest}"
            line = f"{kind} {name}{rest}"
        lines.append(line)
    return "".join(lines)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
