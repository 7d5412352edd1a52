"""Measure the house: the engine's size, floors and rings, and how far a step and a save travel.

python dev/house.py

A room is a file at the engine's root, or a folder of it. Imports for types count, too. A room
stands above all that it imports; rooms that import each other, a ring, share a floor.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "engine"

SAVING = """
import concurrent.futures.thread as pools, pathlib, sys, tempfile, torch, traceback
sys.path.insert(0, ".")
import train
here = pathlib.Path.cwd()

def ours():
    engine, page = here / "engine", str(here / "train.py")
    frames = [each for each in traceback.extract_stack()
        if pathlib.Path(each.filename).is_relative_to(engine) or each.filename == page]
    return [f"{pathlib.Path(each.filename).stem}.{each.name}" for each in frames]

handed, write, submit = [], torch.save, pools.ThreadPoolExecutor.submit

def submitted(pool, *given, **named):
    handed[:] = ours()
    return submit(pool, *given, **named)

def saved(*given, **named):
    if ours():
        chains.append([*handed, *ours()])
    return write(*given, **named)

chains, pools.ThreadPoolExecutor.submit, torch.save = [], submitted, saved
with tempfile.TemporaryDirectory() as folder:
    train.main(["har", "epochs=1", "steps=2", "check_resume=false", f"save_dir={folder}/run"])
print("CHAIN", *chains[0][chains[0].index("train.main"):])
"""


def lines(paths: Iterator[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def sources() -> list[Path]:
    return sorted(ENGINE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ENGINE).parts[0].removesuffix(".py")


def imports() -> set[tuple[Path, Path]]:
    """Return who imports whom, file by file."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources()}
    modules |= {name.removesuffix(".__init__"): path for name, path in modules.items()}
    found = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [
                    whole if (whole := f"{node.module}.{alias.name}") in modules else node.module
                    for alias in node.names
                ]
            found |= {(path, modules[name]) for name in names if modules.get(name, path) != path}
    return found


def rings_and_floors(arrows: set[tuple[str, str]]) -> tuple[list[set[str]], dict[str, int]]:
    """Return the rooms that import each other, and the floor of each room, 1 the ground."""
    rooms = {room(path) for path in sources()}
    reached = {each: {each} for each in rooms}
    while any(not reached[b] <= reached[a] for a, b in arrows):
        for a, b in arrows:
            reached[a] |= reached[b]
    together = {
        each: frozenset(other for other in reached[each] if each in reached[other])
        for each in rooms
    }

    def floor(each: str) -> int:
        below = {b for a, b in arrows if a in together[each] and b not in together[each]}
        return 1 + max(map(floor, below), default=0)

    return [{*ring} for ring in {*together.values()} if len(ring) > 1], {
        each: floor(each) for each in rooms
    }


def attributes_of_run() -> set[str]:
    """Return the fields of Run, and what is set on one later, here or by anybody else."""
    tree = ast.parse((ENGINE / "run.py").read_text())
    run = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run")
    found = {
        node.target.id
        for node in run.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for path in (*sources(), *ROOT.glob("*.py"), *(ROOT / "tools").glob("*.py")):
        parsed = ast.parse(path.read_text())
        if path.stem != "run" and any(
            isinstance(node, ast.ClassDef) and node.name == "Run" for node in parsed.body
        ):
            continue  # a class of its own by this name
        for node in ast.walk(run if path.stem == "run" else parsed):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
            ):
                owner = "self" if path.stem == "run" else "run"
                found |= {node.attr} if node.value.id == owner else set()
    return found


def shared_state() -> list[str]:
    """Return module-level names that change: rebound by `global` or from another file, and
    instances or empty containers by a name in lower case."""
    found = set()
    own = {
        node.name
        for path in sources()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    for path in (*sources(), ROOT / "data_loader.py"):
        tree = ast.parse(path.read_text())
        found |= {
            f"{path.stem}.{name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Global)
            for name in node.names
        }
        for node in tree.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            made = (
                isinstance(value, ast.Call)
                and isinstance(value.func, ast.Name)
                and value.func.id in own
            )
            empty = isinstance(value, ast.Dict | ast.List) and not ast.unparse(value).strip("[]{}")
            for target in targets:
                if isinstance(target, ast.Name) and not target.id.isupper() and (made or empty):
                    found.add(f"{path.stem}.{target.id}")
    for path in (*sources(), ROOT / "data_loader.py", ROOT / "train.py"):
        tree = ast.parse(path.read_text())
        modules = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("engine")
            for alias in node.names
            if any(each.stem == alias.name for each in sources())
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
            ):
                found |= {f"{node.value.id}.{node.attr}"} if node.value.id in modules else set()
    return sorted(found)


def variables() -> list[str]:
    """Return the LOCKSTEP_ variables by which the project's own processes tell each other
    something."""
    scripts = [*sources(), ROOT / "train.py", ROOT / "data_loader.py", ROOT / "train_multigpu.sh"]
    return sorted(
        {name for path in scripts for name in re.findall(r"\bLOCKSTEP_[A-Z_]+\b", path.read_text())}
    )


def contract() -> str:
    text = (ROOT / "pyproject.toml").read_text()
    levels = re.findall(r"^layers = \[\n(.*?)\n\]", text, re.DOTALL | re.MULTILINE)[0].splitlines()
    forbidden = max(
        each.count('"') // 2
        for each in re.findall(r"forbidden_modules = \[(.*?)\]", text, re.DOTALL)
    )
    return f"{len(levels)} levels, {forbidden} forbidden names"


def printed(*command: str) -> str:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def main() -> int:
    files = imports()
    arrows = {(room(a), room(b)) for a, b in files if room(a) != room(b)}
    rings, floors = rings_and_floors(arrows)
    within = [
        (a, b)
        for a, b in files
        if room(a) != room(b) and any({room(a), room(b)} <= ring for ring in rings)
    ]
    page = (ROOT / "train.py").read_text()
    step = printed("dev/trace_step.py", "har", "batch_size=16", "amp=off").splitlines()[-1]
    chain = next(
        line for line in printed("-c", SAVING).splitlines() if line.startswith("CHAIN")
    ).split()[1:]
    root = [path for path in ENGINE.glob("*.py") if path.stem != "__init__"]
    code = [path for path in sources() if path.stat().st_size]
    for name, value in (
        ("engine", f"{lines(iter(code)):,} lines, {len(code)} files, {len(root)} at its root"),
        ("floors", f"{max(floors.values())}, {len(floors)} rooms, {len(arrows)} arrows"),
        (
            "rings",
            f"{len(rings)}, {len(within)} imports in them"
            + "".join(f"\n{'':20}{sorted(ring)}" for ring in rings),
        ),
        ("Run", f"{len(attributes_of_run())} attributes"),
        ("a step of HAR", step),
        ("a save", f"{len(chain)} calls: {' > '.join(chain)}"),
        ("shared state", f"{len(shared_state())}: {' '.join(shared_state())}"),
        ("variables", f"{len(variables())}: {' '.join(variables())}"),
        ("import contract", contract()),
        ("tests", f"{lines((ROOT / 'tests').rglob('*.py')):,} lines"),
        (
            "train.py",
            f"{len(page.splitlines())} lines, {len(re.findall(r'^ *(?:el)?if ', page, re.M))} ifs",
        ),
    ):
        print(f"{name:<20}{value}")
    for level in range(max(floors.values()), 0, -1):
        print(
            "  floor "
            f"{level:<12}{' '.join(sorted(each for each in floors if floors[each] == level))}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
