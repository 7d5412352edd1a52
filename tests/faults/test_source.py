"""No call in our own sources can run what stands in a file or a word of the command line."""

import ast

import pytest
from conftest import ROOT

SOURCES = sorted(
    path
    for path in ROOT.rglob("*.py")
    if not any(
        part.startswith(".") or part in ("tests", "checkpoints", "wandb", "site-packages")
        for part in path.relative_to(ROOT).parts
    )
)
ALLOWED = {
    ("tools/lab/prepare_watch.py", "load(allow_pickle=True)"),  # from a wheel whose checksum is verified before
    ("benchmarks/loaders.py", "pickle.loads()"),  # the states of loaders that it has just written itself
    ("engine/comm/exchange.py", "pickle.loads()"),  # what ranks send each other; plugins/security checks it before
}

FORBIDDEN_CALLS = {  # eval only as a builtin: Module.eval is something else
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "shelve.open", "marshal.load", "marshal.loads"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all"),
}
FORBIDDEN_ARGUMENTS = {("weights_only", False), ("allow_pickle", True), ("shell", True)}


def unsafe_calls(source: str) -> list[str]:
    """Return what a source calls that it must not, however the module or the function was renamed at its import."""
    tree = ast.parse(source)
    renamed = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            renamed |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            renamed |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        head, dot, rest = ast.unparse(node.func).partition(".")
        name = renamed.get(head, head) + dot + rest
        if name.removeprefix("builtins.") in FORBIDDEN_CALLS:
            found.append(f"{name}()")
        for word in node.keywords:
            # Not a constant is as bad: nobody can see what it will be.
            if word.arg in ("weights_only", "allow_pickle", "shell"):
                said = word.value.value if isinstance(word.value, ast.Constant) else "?"
                if said == "?" or (word.arg, said) in FORBIDDEN_ARGUMENTS:
                    found.append(f"{name.rpartition('.')[2]}({word.arg}={said})")
        if name == "torch.load" and not any(word.arg == "weights_only" for word in node.keywords):
            found.append("torch.load() without weights_only")
    return found


def test_there_are_sources():
    names = {str(path.relative_to(ROOT)) for path in SOURCES}
    assert {
        "train.py",
        "engine/config/parse.py",
        "formats/arrays.py",
        "tools/lab/prepare_watch.py",
        "dev/layers.py",
    } <= names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_is_read_can_be_run(path):
    name = str(path.relative_to(ROOT))
    assert not [what for what in unsafe_calls(path.read_text()) if (name, what) not in ALLOWED]


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=False)",
        "torch.load(path)",
        "torch.load(path, weights_only=careful)",
        "import torch as t\nt.load(path)",
        "import pickle\npickle.load(file)",
        "from pickle import loads as read\nread(raw)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "from yaml import load\nload(text, Loader=SafeLoader)",
        "eval(text)",
        "import builtins\nbuiltins.exec(text)",
        "subprocess.run(words, shell=True)",
        "import os\nos.system('ls')",
        "from os import system\nsystem('ls')",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_search_finds_it(source):
    assert unsafe_calls(source)


def test_the_search_finds_nothing_in_what_is_safe():
    safe = "model.eval()\nself.eval(job)\nyaml.compose(t, Loader=yaml.BaseLoader)\nre.compile('a')\n"
    assert not unsafe_calls(safe + "torch.load(path, weights_only=True)")
