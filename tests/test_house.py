"""The house keeps its own rules of what may stand where; lint, format, types and layers are `make lint`."""

import ast
import re
import sys

from conftest import ROOT

ROOMS = ("", "engine/", "tasks/", "formats/", "envs/", "models/", "tools/", "dev/")
SOURCES = sorted(path for room in ROOMS for path in ROOT.glob(f"{room}**/*.py" if room else "*.py"))


def test_amounts_are_written_out():
    """`2 processes`, not `2 process(es)`: engine.contract.amount knows how."""
    texts = [(path.name, node.value) for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    assert len(texts) > 1000 and not [text for text in texts if re.search(r"\w\((s|es)\)", text[1])]


def test_bars_are_for_terminals():
    """In a pipe or a file each of their steps would stay, behind a carriage return."""
    calls = [
        (path.name, node.lineno, [word.arg for word in node.keywords])
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tqdm"
    ]
    assert len(calls) >= 4 and not [call for call in calls if "disable" not in call[2]]


def test_the_floors_are_those_of_the_contract():
    """CONTRIBUTING.md names each room of the engine, on the floor where the import contract has it."""
    table = re.findall(r"^\| (\d) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    told = {int(floor): {*re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", rooms))} for floor, rooms in table}
    layers = re.findall(r'^    "(engine\.[^",]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    held = {len(layers) - n: {*re.findall(r"engine\.(\w+)", rooms)} for n, rooms in enumerate(layers)}
    rooms = {
        path.stem for path in (ROOT / "engine").glob("[!_]*") if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert told == held and set().union(*held.values()) == rooms


COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "barrier",
    "init_process_group",
}
LAUNCH_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}


def imports_distributed(tree):
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(name.startswith("torch.distributed") for name in names)


def calls_collectives(tree):
    """Those of torch: `World` has a `broadcast` of its own, for everybody."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return any(a.attr in COLLECTIVES and isinstance(a.value, ast.Name) and a.value.id == "dist" for a in attributes)


def test_few_files_know_the_ranks():
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES}
    reading = {
        name
        for name, tree in trees.items()
        if {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} & LAUNCH_VARIABLES
    }
    assert reading == {"engine/launch.py"}
    calling = {name.removeprefix("engine/") for name, tree in trees.items() if calls_collectives(tree)}
    assert calling == {
        "train.py",
        "comm/world.py",
        "comm/sealed.py",
        "launch.py",
        "optim/zero.py",
        "comm/virtual.py",
        "comm/shm_backend.py",
        "tools/probe.py",
    }, "the step, what ranks tell each other, their end, ZeRO, virtual workers, the backend, and what times a sum"
    importing = {name.removeprefix("engine/") for name, tree in trees.items() if imports_distributed(tree)}
    assert importing - calling == {
        "comm/network.py",
        "survive/agent.py",
        "comm/ddp.py",
        "survive/blame.py",
        "tools/doctor.py",
    }, "where stores listen, torchrun itself; DDP's hooks and errors, and tools with a group"


def test_nothing_unsafe_is_called():
    for path in SOURCES:
        text = path.read_text()
        for word in ("weights_only=False", "yaml.load(", "shell=True", "os.system", "static_graph=True"):
            assert word not in text, f"{word} in {path}"
        # Pickles come from a wheel whose checksum is verified, and from ranks that know the secret of the run.
        if path.name not in ("prepare_watch.py", "sealed.py"):
            assert "allow_pickle=True" not in text and "pickle.load" not in text, path


def test_only_the_core_packages_are_imported_at_the_top():
    core = {"torch", "numpy", "yaml", "tensorboard", "tqdm", *sys.stdlib_module_names}
    ours = {"engine", "tasks", "formats", "envs", "models", "data_loader", "train", "train_ddp", "tools"}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert {name.split(".")[0] for name in names} <= core | ours, path


def test_torchs_range_is_open_and_what_is_tested_is_pinned():
    pinned = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line.split("==")[0] for line in pinned if "==" in line] == [
        "torch",
        "numpy",
        "pyyaml",
        "tensorboard",
        "tqdm",
    ]
    assert '"torch>=2.7"' in (ROOT / "pyproject.toml").read_text()


def test_every_scenario_names_tests_that_exist():
    text = (ROOT / "tests/faults/README.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 72
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 90 and not {name for name in named if f"def {name}(" not in source}
