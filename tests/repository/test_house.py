"""The house keeps its own rules of what may stand where; lint, format, types and layers are `make lint`."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT

ROOMS = ("", "engine/", "plugins/", "tasks/", "formats/", "models/", "tools/", "dev/")
SOURCES = sorted(path for room in ROOMS for path in ROOT.glob(f"{room}**/*.py" if room else "*.py"))
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES}


def test_the_floors_are_those_of_the_contract():
    """CONTRIBUTING.md names each room of the engine, on the floor where the import contract has it."""
    table = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    told = {int(floor): {*re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", rooms))} for floor, rooms in table}
    layers = re.findall(r'^    "(engine\.[^",]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    held = {len(layers) - n: {*re.findall(r"engine\.(\w+)", rooms)} for n, rooms in enumerate(layers)}
    rooms = {
        path.stem for path in (ROOT / "engine").glob("[!_]*") if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert told == held and set().union(*held.values()) == rooms


COLLECTIVES = {"all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all_single"}
COLLECTIVES |= {"broadcast", "broadcast_object_list", "barrier", "init_process_group"}


def files_with(holds):
    return {name for name, tree in TREES.items() if any(holds(node) for node in ast.walk(tree))}


def test_few_files_know_the_ranks():
    variables = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    assert files_with(lambda node: isinstance(node, ast.Constant) and node.value in variables) == {"engine/launch.py"}
    calling = files_with(lambda node: isinstance(node, ast.Attribute) and node.attr in COLLECTIVES
                         and isinstance(node.value, ast.Name) and node.value.id == "dist")  # fmt: skip
    comm = {f"engine/comm/{name}.py" for name in ("world", "exchange", "buffers")}
    comm |= {f"plugins/{name}.py" for name in ("parallel/virtual", "parallel/fsdp", "performance/shm_backend")}
    assert calling == comm | {"train.py", "engine/launch.py", "tools/machine/probe.py"}


def test_nothing_unsafe_is_called():
    for path in SOURCES:
        text = path.read_text()
        for word in ("weights_only=False", "yaml.load(", "shell=True", "os.system", "static_graph=True"):
            assert word not in text, f"{word} in {path}"
        # Pickles come from a wheel whose checksum is verified, and from ranks that know the secret of the run.
        if path.name not in ("prepare_watch.py", "exchange.py"):
            assert "allow_pickle=True" not in text and "pickle.load" not in text, path


def test_only_the_core_packages_are_imported_at_the_top():
    known = {"torch", "numpy", "yaml", "tensorboard", "tqdm", *sys.stdlib_module_names}
    known |= {"engine", "plugins", "tasks", "formats", "models", "data_loader", "train", "train_ddp", "tools"}
    known |= {"measures"}  # the folder beside dev/house.py
    for name, tree in TREES.items():
        imports = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
        imports += [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
        # The kernels are in a module of their own, which is imported where Triton is installed.
        more = {"triton"} if name == "models/norm_kernels.py" else set()
        assert {module.split(".")[0] for module in imports} <= known | more, name


def test_every_scenario_names_tests_that_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "tests/faults/README.md").read_text()))
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named and not {name for name in named if f"def {name}(" not in source}


SCRIPTS = [p for folder in ("tools", "benchmarks", "dev") for p in sorted((ROOT / folder).glob("*.py"))]
OWN = {path.stem for path in ROOT.glob("*.py")} | {"engine", "plugins", "formats", "models", "tasks", "tools"}


@pytest.mark.parametrize("path", [p for p in SCRIPTS if "__main__" in p.read_text()], ids=lambda path: path.name)
def test_a_script_finds_the_project_before_it_imports_it(path):
    """Python puts the folder of the script on the path, not the project; the tests' own PYTHONPATH would hide that."""
    own, found = [], None
    for node in ast.parse(path.read_text()).body:
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        own += [node.lineno for name in names if name.partition(".")[0] in OWN]
        found = found or (node.lineno if "sys.path.insert" in ast.unparse(node) else None)
    assert not own or (found and found < min(own))


COMMANDS = [p for p in SCRIPTS if p.parent.name == "tools" and "__main__" in p.read_text()]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_a_command_of_tools_holds_no_code(path):
    """It imports its `main` from a package of tools/, so that nothing is defined twice, in `__main__` and by name."""
    kinds = {type(node) for node in TREES[str(path.relative_to(ROOT))].body}
    assert kinds <= {ast.Expr, ast.Import, ast.ImportFrom, ast.If}


@pytest.mark.parametrize("room", ["formats", "tasks", "tools"])
def test_no_folder_is_crowded(room):
    """At most 15 modules, besides the commands of tools/ and `__init__.py`."""
    for folder in [ROOT / room, *(path for path in (ROOT / room).iterdir() if (path / "__init__.py").exists())]:
        assert len({*folder.glob("[a-z]*.py")}.difference(COMMANDS)) <= 15, folder


@pytest.mark.slow
def test_no_held_measurement_is_over_its_bar():
    """The rows that need a training are left out: they take twenty seconds."""
    done = subprocess.run(
        [sys.executable, "dev/house.py", "--check", "--static"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\* imports from the core to plugins +0 +<= 0  ok$", done.stdout, re.MULTILINE), done.stdout
