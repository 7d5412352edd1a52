"""train.py as a page: it is short, it shows DDP's calls, and its guarantees are lines that one may delete."""

import ast
import re
import sys

import pytest
import torch
from conftest import ROOT, TOY, succeed

PAGE = (ROOT / "train.py").read_text()
FUNCTIONS = [node for node in ast.walk(ast.parse(PAGE)) if isinstance(node, ast.FunctionDef)]

SHOWN = (
    "dist.init_process_group(", "DistributedDataParallel(", "torch.amp.GradScaler(", "torch.autocast(", ".no_sync()",
    "dist.all_reduce(", ").backward()", "if run.world.main:", "RANK, LOCAL_RANK and WORLD_SIZE",
)  # fmt: skip
"""The calls that a reader of a native DDP script looks for."""

GUARANTEES = ("survive", "speed", "preflight")
"""Modules whose calls a script can do without."""


def test_it_shows_the_calls_of_ddp_and_amp():
    assert [words for words in SHOWN if words not in PAGE] == []


def test_it_is_read_over_a_coffee():
    statements = [node for node in ast.walk(ast.parse(PAGE)) if isinstance(node, ast.stmt)]
    assert len(statements) <= 170
    assert not any(isinstance(node, ast.Lambda) for node in ast.walk(ast.parse(PAGE)))
    long = {f.name: sum(isinstance(node, ast.stmt) for node in ast.walk(f)) for f in FUNCTIONS}
    assert max(long.values()) <= 30, long


def test_the_readme_shows_the_step_as_it_is():
    """Without its docstring."""
    (step,) = (f for f in FUNCTIONS if f.name == "train_step")
    lines = PAGE.splitlines()
    shown = [*lines[step.lineno - 1 : step.body[0].lineno - 1], *lines[step.body[0].end_lineno : step.end_lineno]]
    assert "```python\n" + "\n".join(shown) + "\n```" in (ROOT / "README.md").read_text()


def without_guarantees(page):
    """The page without the lines that call one of GUARANTEES; a `with` of theirs becomes a plain block."""
    names = "|".join(GUARANTEES)
    kept = []
    for line in page.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if re.match(rf"\s*with ({names})\.", line):
            line = f"{indent}if True:"
        elif found := re.match(rf"(\s*take_step = )({names})\.\w+\(run, (\w+)\)", line):  # it wraps what is left
            line = found[1] + found[3]
        elif re.match(rf"\s*(run\.)?(plan = )?({names})\.", line):
            line = f"{indent}pass"
        elif re.match(rf"@({names})\.", line):
            continue
        elif found := re.match(rf"(\s*return) ({names})\.", line):
            line = f"{found[1]} 0"
        kept.append(line)
    assert not [line for line in kept if re.search(rf"(?<!engine\.)\b({names})\.", line)], (
        "a guarantee takes more than its line"
    )
    return "\n".join(kept)


@pytest.mark.slow
def test_what_is_left_without_its_guarantees_is_a_correct_ddp_trainer(launch, tmp_path):
    """On two ranks, to the same bits; deleted are the preflight, what makes it fast, and what survives failures."""
    plain = tmp_path / "plain.py"
    plain.write_text(without_guarantees(PAGE))
    weights = []
    for script in ("train.py", plain):
        run = tmp_path / f"of_{str(script)[-8:-3]}"
        words = ["epochs=2", "global_batch=12", "gradient_accumulation_steps=2", "threads=1", f"save_dir={run}"]
        succeed(launch.torchrun(2, str(script), TOY, *words))
        weights.append(torch.load(run / "last.pt", weights_only=True)["model"])
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


ALONE = """
import importlib, inspect, pathlib, sys
import train
from engine.comm.world import World

inside, seen = [], set()

def watched(function, name):
    def call(*args, **more):
        inside.append(name)
        seen.add(name)
        try:
            return function(*args, **more)
        finally:
            inside.pop()
    return call

def forbidden(name):
    real = getattr(World, name)
    def collective(*args, **more):
        assert not inside, f"World.{name} in {inside[-1]}, which rank 0 alone calls"
        return real(*args, **more)
    return collective

for path in sorted(pathlib.Path("engine").rglob("[a-z]*.py")):
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    classes = [each for each in vars(module).values() if inspect.isclass(each)]
    for owner in [module, *(each for each in classes if each.__module__ == module.__name__)]:
        for name, function in list(vars(owner).items()):
            if inspect.isfunction(function) and (function.__doc__ or "").startswith("(rank 0)"):
                setattr(owner, name, watched(function, f"{owner.__name__}.{name}"))
for name in ("sum", "gather", "broadcast", "broadcast_or_mean"):
    setattr(World, name, forbidden(name))
code = train.main(sys.argv[1:])
print("SEEN", *sorted(seen))
sys.exit(code)
"""


def test_what_rank_0_calls_alone_holds_no_collective(launch, tmp_path):
    """Every function that says (rank 0), in a training that saves, evaluates and logs."""
    (tmp_path / "alone.py").write_text(ALONE)
    words = [TOY, "epochs=2", "log_every=1", f"save_dir={tmp_path / 'run'}"]
    done = succeed(launch.python(str(tmp_path / "alone.py"), *words))
    seen = done.out.rpartition("SEEN ")[2].split()
    assert len(seen) >= 5, seen


if __name__ == "__main__":
    sys.stdout.write(without_guarantees(PAGE))
