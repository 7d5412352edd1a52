"""The digest of the code: what changes it, what does not, and the line that each tool prints."""

import ast
import gc
import json
import shutil
import sys

import pytest
import torch
from conftest import ROOT, TOY, succeed

from engine import code_digest
from engine.code_digest import changes, code_of, differences, file_digest, files_beside, short

OWN = """
import nets.blocks
from tests.tasks.toy import Task as Toy


class Task(Toy):
    def model(self):
        return nets.blocks.Net(super().model())

    def metadata(self):
        return {}

    def load_metadata(self, known):
        pass
"""

BLOCKS = '''
"""Blocks of the network."""
from torch import nn


class Net(nn.Module):
    """A network with an activation."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.act = inner, nn.{act}()

    def forward(self, x):
        return self.inner(self.act(x))  # {comment}
'''


def write(folder, act="ReLU", comment="a comment"):
    (folder / "nets").mkdir(parents=True, exist_ok=True)
    (folder / "nets/__init__.py").write_text("")
    (folder / "nets/blocks.py").write_text(BLOCKS.format(act=act, comment=comment))
    (folder / "own.py").write_text(OWN)
    return str(folder / "own.py")


# ---- what counts ----

SOURCE = "import math\n\n\ndef f(x, y=1):\n    return math.exp(x) + y\n"
SAME = {
    "a comment": "import math  # a module\n\n\n# f\ndef f(x, y=1):\n    return math.exp(x) + y\n",
    "a docstring": '"""Of."""\nimport math\n\n\ndef f(x, y=1):\n    "f"\n    return math.exp(x) + y\n',
    "the layout": "import math\ndef f(\n    x,\n    y=1,\n):\n    return (math.exp(x)\n        + y)\n",
}
OTHER = {
    "a number": SOURCE.replace("y=1", "y=2"),
    "an operator": SOURCE.replace("+", "-"),
    "a name": SOURCE.replace("exp", "log"),
    "an order": SOURCE.replace("math.exp(x) + y", "y + math.exp(x)"),
    "a text": SOURCE.replace("y=1", "y='1'"),
    "no line": "",
}


@pytest.mark.parametrize(("name", "text"), [*SAME.items(), *OTHER.items()])
def test_code_counts_and_comments_do_not(tmp_path, name, text):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(SOURCE)
    other.write_text(text)
    assert (file_digest(one) == file_digest(other)) == (name in SAME)


def test_a_statement_that_moves_out_of_a_block_counts(tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("if x:\n    a()\n    b()\n")
    other.write_text("if x:\n    a()\nb()\n")
    assert file_digest(one) != file_digest(other)


def test_what_is_no_python_counts_by_its_bytes(tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("def (:\n")
    other.write_text("def (:  # a comment\n")
    assert file_digest(one) != file_digest(other)


def test_a_long_sum_is_read(tmp_path):
    """Its tree is deeper than Python recurses."""
    path = tmp_path / "long.py"
    path.write_text(f"x = {' + '.join(map(str, range(5000)))}\n")
    first = file_digest(path)
    path.write_text(f"x = {' + '.join(map(str, range(1, 5001)))}\n")
    assert file_digest(path) != first


class ParsesWhenCollected:
    def __init__(self):
        self.cycle = self

    def __del__(self):
        ast.parse("a + b")


@pytest.mark.slow
def test_a_finalizer_may_parse_code_meanwhile(tmp_path):
    """Python 3.11 raises SystemError where a collection within `ast.parse` runs such a finalizer."""
    path = tmp_path / "f.py"
    path.write_text("\n".join(f"a{i} = [b, c(d)]" for i in range(2000)))
    expected, before = file_digest(path), gc.get_threshold()
    gc.set_threshold(50)
    try:
        for _ in range(20):
            ParsesWhenCollected()
            assert file_digest(path) == expected
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()


def test_lockstep_counts_without_comments_and_formats_by_their_text(tmp_path, monkeypatch):
    for name in ("engine", "plugins", "formats"):
        (tmp_path / name).mkdir()
    for name in ("train.py", "data_loader.py", "plugins/a.py"):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(code_digest, "ROOT", tmp_path)
    seen = {}
    for kind, text in {"plain": "x = '#1'\n", "comment": "# y\n\nx = '#1'  # z\n", "other": "x = '#2'\n"}.items():
        (tmp_path / "engine/step.py").write_text(text)
        (tmp_path / "formats/read.py").write_text(text)
        seen[kind] = code_digest.lockstep_digest(), file_digest(tmp_path / "formats/read.py")
    assert seen["plain"] == seen["comment"]
    assert seen["plain"][0] != seen["other"][0] and seen["plain"][1] != seen["other"][1]


# ---- which files ----


def test_the_code_of_a_task_is_all_that_it_imports():
    """Also within a function, as the models of har."""
    keys = {*code_of("har")}
    files = {"tasks/har.py", "tasks/shared/classification.py", "models/conv1d.py", "models/layers.py"}
    assert {"Lockstep", "formats/lab/windows.py", *files} <= keys
    assert not [key for key in keys if key.startswith(("engine", "tests", "tools", "tasks/video", "package"))]


IMPORTS = {
    "import near": {"./near.py"},
    "import near as n, far": {"./near.py", "./far.py"},
    "from near import (\n    a,\n    b,\n)": {"./near.py"},
    "def f():\n    from pack.inner import thing": {"./pack/__init__.py", "./pack/inner.py"},
    "from pack import inner": {"./pack/__init__.py", "./pack/inner.py"},
    "import pack.chain": {"./pack/__init__.py", "./pack/chain.py", "./pack/inner.py", "./far.py"},
    "if True: import near": {"./near.py"},
    "from near \\\n    import a": {"./near.py"},
    "try:\n    import near\nexcept ImportError:\n    import far": {"./near.py", "./far.py"},
    "'''\nimport near\n'''": set(),
    "# import near": set(),
    "import os, json, torch, numpy": set(),
    "import no_such_module": set(),
}


@pytest.mark.parametrize("line", IMPORTS)
def test_each_form_of_an_import_is_followed(tmp_path, monkeypatch, line):
    (tmp_path / "pack").mkdir()
    texts = {"near": "a = b = 1", "far": "", "pack/__init__": "", "pack/inner": "thing = 1", "own": line}
    texts["pack/chain"] = "from . import inner\nfrom .inner import thing\nimport far"
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code_digest._find.cache_clear()
    assert {*code_of(str(tmp_path / "own.py"))} == {"Lockstep", "./own.py", *IMPORTS[line]}
    code_digest._find.cache_clear()


def test_a_class_that_no_import_names_counts(tmp_path, monkeypatch):
    """A model that a registry has made, of a module on another path."""
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo/__init__.py").write_text("")
    (tmp_path / "zoo/net.py").write_text("from torch import nn\nclass Odd(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from zoo.net import Odd

    model = torch.nn.Sequential(Odd(2, 2))
    code = code_of(TOY, model)
    assert "module zoo/net.py" in code and "module zoo/net.py" not in code_of(TOY)
    assert changes(code, TOY, TOY) == []
    (tmp_path / "zoo/net.py").write_text("from torch import nn\nclass Odd(nn.Linear):\n    bias = 1\n")
    assert changes(code, TOY, TOY) == ["zoo/net.py"]
    del sys.modules["zoo"], sys.modules["zoo.net"]


def test_an_installed_package_counts_by_its_version(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    (site / "oddnets").mkdir(parents=True)
    (site / "odd_nets-1.0.dist-info").mkdir()
    (site / "oddnets/__init__.py").write_text("")
    (site / "odd_nets-1.0.dist-info/top_level.txt").write_text("oddnets\n")
    (site / "odd_nets-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: odd-nets\nVersion: 1.0\n")
    (tmp_path / "own.py").write_text("import oddnets, torch\n")
    monkeypatch.syspath_prepend(str(site))
    code_digest._find.cache_clear()
    code_digest._version.cache_clear()
    own = str(tmp_path / "own.py")
    code = code_of(own)
    assert code["package oddnets"] == "1.0" and len(code) == 3
    (site / "odd_nets-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: odd-nets\nVersion: 1.1\n")
    code_digest._version.cache_clear()
    assert changes(code, own, own) == ["package oddnets 1.0 -> 1.1"]
    code_digest._version.cache_clear()
    code_digest._find.cache_clear()


def test_a_task_that_has_moved_or_has_another_name_is_the_same(tmp_path):
    own = write(tmp_path / "a")
    code = code_of(own)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    moved = (tmp_path / "b/own.py").rename(tmp_path / "b/mine.py")
    assert changes(code, own, str(moved)) == []
    moved.write_text(f"{OWN}    size = 9\n")
    assert changes(code, own, str(moved)) == ["own.py"]


def test_a_file_that_is_gone_is_named(tmp_path, monkeypatch):
    own = write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code_digest._find.cache_clear()
    code = code_of(own)
    assert {*files_beside(own)} == {"nets/__init__.py", "nets/blocks.py"}
    (tmp_path / "nets/blocks.py").unlink()
    assert changes(code, own, own) == ["nets/blocks.py (absent)"]
    code_digest._find.cache_clear()


def test_two_codes_are_compared_by_file():
    a, b = {"./own.py": "1", "models/x.py": "2", "package timm": "1.0"}, {"./own.py": "3", "models/x.py": "2"}
    assert differences(a, b) == {"own.py": ("1", "3"), "package timm": ("1.0", "absent")}
    assert short(a) != short(b) and short({}) == ""


# ---- at the tools ----


def train(launch, folder, *words):
    return launch.python(ROOT / "train.py", "own.py", *words, "device=cpu", "save_dir=run", cwd=folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from conftest import launching

    folder = tmp_path_factory.mktemp("code")
    write(folder)
    with launching() as launch:
        succeed(train(launch, folder, "steps=4", "save_every=4"))
    return folder


@pytest.fixture
def place(trained, tmp_path):
    """A copy of a trained run and of its task: (folder, path of the task)."""
    shutil.copytree(trained, tmp_path / "place")
    return tmp_path / "place"


def lines_about_code(done):
    return [line for line in f"{done.out}\n{done.err}".splitlines() if "the code has changed" in line]


CHANGED = "warning: the code has changed since the checkpoint of step 4: nets/blocks.py"


def test_a_resume_with_other_code_prints_it_and_notes_it(launch, place):
    own = write(place, act="Tanh")
    done = succeed(train(launch, place, "steps=8"))
    assert lines_about_code(done) == [CHANGED]
    lines = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    (change,) = [line for line in lines if line["event"] == "changed"]
    assert change["step"] == 4 and change["change"] == CHANGED.removeprefix("warning: ")
    saved = torch.load(place / "run/last.pt", weights_only=True)
    assert changes(saved["code"], own, own) == [], "the checkpoint has the code of its last steps"


def test_a_changed_comment_prints_nothing(launch, place):
    write(place, comment="another comment")
    done = succeed(train(launch, place, "steps=8"))
    assert lines_about_code(done) == []


def test_code_that_changes_while_a_run_trains_is_that_of_the_start(launch, place):
    """The modules in memory are those of the start: the checkpoint must not have the digest of the new file."""
    shutil.rmtree(place / "run")
    write(place)
    (place / "own.py").write_text(
        f"{OWN}\n    def report(self, sums):\n"
        f"        path = {str(place / 'nets/blocks.py')!r}\n"
        "        text = open(path).read()\n"
        "        open(path, 'w').write(text.replace('nn.ReLU', 'nn.Tanh'))\n"
        "        return super().report(sums)\n"
    )
    succeed(train(launch, place, "steps=4", "eval_every=2"))
    done = succeed(launch.python(ROOT / "tools/evaluate.py", "run", "device=cpu", cwd=place))
    assert lines_about_code(done) == [CHANGED.replace("step 4", f"step {step_of(done)}")]


def step_of(done):
    return done.out.split(", step ")[1].split(",")[0]


@pytest.mark.parametrize("tool", ["evaluate", "predict", "publish", "provenance"])
def test_each_tool_that_loads_a_checkpoint_prints_it(launch, place, tool):
    write(place, act="Tanh")
    words = {"predict": ["--split", "val"], "publish": ["--to", place / "out", "--license", "mit"]}.get(tool, [])
    done = launch.python(ROOT / f"tools/{tool}.py", "run", *words, "device=cpu", cwd=place)
    assert lines_about_code(done) == [CHANGED], (done.out, done.err)


def test_a_checkpoint_of_an_older_version_prints_nothing(launch, place):
    write(place, act="Tanh")
    for path in (place / "run").glob("*.pt"):
        if not path.is_symlink():
            state = torch.load(path, weights_only=True)
            del state["code"]
            torch.save(state, path)
    (place / "run/manifest.json").unlink()
    done = train(launch, place, "steps=8")
    assert lines_about_code(done) == [], done.err


def test_the_environment_of_a_run_has_the_digest_of_each_file(place):
    known = json.loads((place / "run/environment.json").read_text())
    assert known["code"] == short(known["code_files"])
    assert {"Lockstep", "./own.py", "./nets/blocks.py"} <= {*known["code_files"]}
