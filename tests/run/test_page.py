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

GUARANTEES = ("resilience", "performance", "preflight", "reporting", "parallel")
"""Modules whose calls a script can do without."""


def test_it_shows_the_calls_of_ddp_and_amp():
    assert [words for words in SHOWN if words not in PAGE] == []


def test_it_is_read_over_a_coffee():
    statements = [node for node in ast.walk(ast.parse(PAGE)) if isinstance(node, ast.stmt)]
    docstrings = [each for each in statements if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)]
    assert len(statements) - len(docstrings) <= 170
    assert not any(isinstance(node, ast.Lambda) for node in ast.walk(ast.parse(PAGE)))
    long = {f.name: sum(isinstance(node, ast.stmt) for node in ast.walk(f)) for f in FUNCTIONS}
    assert max(long.values()) <= 30, long


def test_the_readme_shows_the_step_as_it_is():
    """Without its docstring."""
    (step,) = (f for f in FUNCTIONS if f.name == "train_step")
    lines = PAGE.splitlines()
    shown = [*lines[step.lineno - 1 : step.body[0].lineno - 1], *lines[step.body[0].end_lineno : step.end_lineno]]
    assert "```python\n" + "\n".join(shown) + "\n```" in (ROOT / "README.md").read_text()


class WithoutGuarantees(ast.NodeTransformer):
    """Delete the calls of GUARANTEES: a statement goes, a `with` becomes a plain block, and where a call wraps a value,
    the value stays."""

    def is_call(self, node):
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in GUARANTEES
        )

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.decorator_list = [each for each in node.decorator_list if not ast.unparse(each).startswith(GUARANTEES)]
        return node

    def visit_Expr(self, node):
        return ast.Pass() if self.is_call(node.value) else node

    def visit_With(self, node):
        self.generic_visit(node)
        if self.is_call(node.items[0].context_expr):
            return ast.If(ast.Constant(True), node.body, [])
        return node

    def visit_Assign(self, node):
        if not self.is_call(node.value):
            return self.generic_visit(node)
        target, arguments = ast.unparse(node.targets[0]), [ast.unparse(each) for each in node.value.args]
        kept = {"stop": "NoStop()", "take_step": "train_step"}.get(target)
        if kept is None and (target in arguments or target == "run.plan"):
            return ast.Pass()  # it returns its argument
        return ast.Assign(node.targets, ast.parse(kept).body[0].value)

    def visit_Return(self, node):
        if self.is_call(node.value):
            node.value = node.value.args[0]
        return node

    def visit_BoolOp(self, node):
        node.values = [ast.parse("NoStop()").body[0].value if self.is_call(each) else each for each in node.values]
        return node


def without_guarantees(page):
    """The page without the lines that call one of GUARANTEES."""
    tree = ast.fix_missing_locations(WithoutGuarantees().visit(ast.parse(page)))
    text = ast.unparse(tree).replace("from engine.guarantees import ", "from engine.guarantees import NoStop, ")
    body = text.replace("from engine.guarantees import NoStop", "")
    assert not re.search(rf"\b({'|'.join(GUARANTEES)})\.", body), "a guarantee takes more than its line"
    return text


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

for path in sorted([*pathlib.Path("engine").rglob("[a-z]*.py"), *pathlib.Path("plugins").rglob("[a-z]*.py")]):
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    classes = [each for each in vars(module).values() if inspect.isclass(each)]
    for owner in [module, *(each for each in classes if each.__module__ == module.__name__)]:
        for name, function in list(vars(owner).items()):
            if inspect.isfunction(function) and (function.__doc__ or "").startswith("(rank 0)"):
                setattr(owner, name, watched(function, f"{owner.__name__}.{name}"))
for name in ("sum", "gather", "broadcast"):
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
