"""A compiled step: compared with the bare one, dropped where it is wrong, and compiled where it seems to be."""

import json
import math
import re
import shutil

import pytest
import torch
from conftest import ROOT, TOY, succeed
from runs import same_bits, weights
from torch import nn

from models.layers import largest
from plugins.performance import compiled_step, compiler
from plugins.performance.compiled_step import NEAR, Pass, disagreement

STAND_IN = str(ROOT / "tests" / "kit" / "compiled_stand_in.py")
CONTRAST, TURNS = (str(ROOT / "tests" / "tasks" / f"{name}.py") for name in ("contrast", "turns"))

# ---- a compiler that is right, or not ----


@pytest.fixture
def trained(launch, tmp_path):
    """Train with the stand-in for the compiler, and return what was printed, the weights and rank 0's calls."""

    def train(name, *words, factor=1.0, size=0, processes=1, compiled=True):
        run = tmp_path / name
        mode = "default" if compiled else "off"
        command = [STAND_IN, str(factor), str(size), str(tmp_path), *words, f"compile={mode}", f"save_dir={run}"]
        done = launch.torchrun(processes, *command) if processes > 1 else launch.python(*command)
        succeed(done)
        return done.out, weights(run), json.loads((tmp_path / "calls_0.json").read_text())

    return train


def wrong_step(out):
    """The one line about it."""
    (line,) = re.findall(r"warning: compile=default makes a wrong step.*", out)
    return line


def near(a, b):
    return all(torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-5) for name in a)


def toy(**changes):
    """The words of a short training; `__` in a key is a dot."""
    settings = {"threads": 1, "log_every": 1, "steps": 8, "amp": "off"} | changes
    return [TOY, *(f"{key.replace('__', '.')}={value}" for key, value in settings.items())]


WAYS = {
    "one process": (1, {}),
    "passes": (1, {"batch_size": 4, "gradient_accumulation_steps": 3}),
    "virtual workers": (1, {"batch_size": 3, "virtual_workers": 4}),
    "average and dropout": (1, {"optim__ema_decay": 0.9, "model__dropout": 0.3}),
    "fp16": (1, {"amp": "fp16"}),
    "two ranks": (2, {"batch_size": 6}),
    "two ranks, passes": (2, {"batch_size": 2, "gradient_accumulation_steps": 3, "model__dropout": 0.3}),
    "two ranks, static graph": (2, {"batch_size": 6, "ddp__static_graph": "true"}),
    "two ranks, virtual workers": (2, {"batch_size": 3, "virtual_workers": 4}),
}
SLOW = [name for name in WAYS if name != "one process"]


@pytest.mark.parametrize("way", ["one process", *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW)])
def test_a_wrong_step_is_dropped_and_leaves_nothing(trained, way):
    """The last rank alone is wrong; all continue with the bare model, to the bits of a run without the compiler."""
    processes, changes = WAYS[way]
    out, found, calls = trained("wrong", *toy(**changes), factor=math.nan, processes=processes)
    _, expected, _ = trained("off", *toy(**changes), processes=processes, compiled=False)
    line = wrong_step(out)
    assert "from step 1 on" in line and "the gradient of layers.0.weight is not finite" in line
    assert ("EMULATE_PRECISION_CASTS" in line) is (way == "fp16")
    assert same_bits(found, expected)
    assert 1 <= len(calls) <= 2, "the passes of the comparison"


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_compiled_step_that_raises_is_dropped(trained, processes):
    """Code of torch 2.11 did so on a GPU, of a layout that it had not expected."""
    out, found, _ = trained("raises", *toy(), factor=math.inf, processes=processes)
    _, expected, _ = trained("off", *toy(), processes=processes, compiled=False)
    line = wrong_step(out)
    assert "from step 1 on" in line and "its code raises AssertionError: expected size 96==96, stride" in line
    assert same_bits(found, expected)


@pytest.mark.slow
def test_a_right_step_is_compiled_and_nothing_else(trained):
    """Of five steps of twelve samples, one of one, and two more; a pass of each size is compared. The 23 samples that
    are scored, and those of the checks, are not."""
    out, found, calls = trained("right", *toy(model__dropout=0.3))
    assert "warning: compile" not in out
    assert sorted(calls) == [1] * 2 + [12] * 8
    _, expected, _ = trained("off", *toy(model__dropout=0.3), compiled=False)
    assert near(found, expected), "also in the random numbers of dropout"


@pytest.mark.slow
def test_a_step_of_each_turn_is_compared(trained):
    """Of two turns, each trains other weights."""
    words = [TURNS, "own.kind=factors", "threads=1", "steps=4", "amp=off"]
    out, _, calls = trained("right", *words)
    assert "warning: compile" not in out and calls == [12] * (4 + 2)


@pytest.mark.slow
def test_a_short_batch_is_compared_too(trained):
    out, found, calls = trained("wrong", *toy(), factor=2.5, size=1)
    _, expected, _ = trained("off", *toy(), compiled=False)
    line = wrong_step(out)
    assert "from step 6 on" in line and "layers.0.weight is off by 1.5 of its norm" in line
    assert calls == [12] * 6 + [1]
    assert near(found, expected)


@pytest.mark.slow
def test_a_resumed_run_compares_its_first_step(trained):
    trained("run", *toy(steps=4))
    out, found, _ = trained("run", *toy(), factor=math.nan)
    trained("off", *toy(steps=4), compiled=False)
    _, expected, _ = trained("off", *toy(), compiled=False)
    assert "from step 5 on" in out
    assert near(found, expected)


@pytest.mark.slow
def test_a_loss_with_collectives_is_compared_by_all_ranks_together(trained):
    words = [CONTRAST, "amp=off", "threads=1", "steps=4", "batch_size=6"]
    out, found, calls = trained("right", *words, processes=2)
    _, expected, _ = trained("off", *words, processes=2, compiled=False)
    assert "warning: compile" not in out and len(calls) >= 5
    assert near(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["har", "dataset.stride=512", "model.width=8"],
     ["video", "dataset.size=16", "dataset.trials=61", "dataset.videos=12", "dataset.frames=5", "model.width=4"]],
)  # fmt: skip
def test_each_step_of_a_shipped_network_is_compiled(trained, words):
    """The checks score and train on other numbers of samples before the first step."""
    usual = ["amp=off", "threads=1", "steps=4", "batch_size=12", "eval_every=2"]
    out, _, calls = trained("right", *words, *usual)
    assert "warning: compile" not in out
    assert calls == [12] * 5, "four steps, and one that is compared"


# ---- its comparison ----

NAMES = ["layer.weight", "layer.bias"]
GRADIENTS = [torch.linspace(-1, 1, 64), torch.linspace(0.5, 1, 8)]


def passed(first, second=GRADIENTS[1], loss=2.0):
    return Pass(torch.tensor(loss), torch.tensor(64), [first, second])


SAME = passed(GRADIENTS[0])
UNLIKE = {
    "not finite": (passed(GRADIENTS[0] * math.nan), "gradient of layer.weight is not finite"),
    "all not finite": (passed(GRADIENTS[0] * math.inf, GRADIENTS[1] * math.nan), "and so are 1 more of 2"),
    "zero": (passed(GRADIENTS[0] * 0), "layer.weight is off by 1 of its norm"),
    "missing": (passed(None), "layer.weight is off by 1 of its norm"),
    "turned": (passed(GRADIENTS[0], -GRADIENTS[1]), "layer.bias is off by 2 of its norm"),
    "larger": (passed(GRADIENTS[0] * 1.5, GRADIENTS[1] * 1.5), "the norm of all gradients is"),
    "another loss": (passed(GRADIENTS[0], loss=2.2), "loss of a pass is 2.2 instead of 2"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_what_rounding_does_not_explain_is_named(case):
    compiled, words = UNLIKE[case]
    assert words in disagreement(NAMES, SAME, compiled, NEAR["bf16"])


def test_what_rounding_explains_is_not_named():
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert disagreement(NAMES, SAME, passed(GRADIENTS[0] + 0.1 * noise), NEAR["bf16"]) == ""
    assert disagreement(NAMES, SAME, passed(GRADIENTS[0] + 0.1 * noise), NEAR["off"]) != ""
    assert disagreement(NAMES, SAME, passed(GRADIENTS[0] * (1 + 1e-3)), NEAR["off"]) == ""
    tiny, other = torch.full((8,), 1e-4), torch.full((8,), -1e-4)
    before_norm = passed(GRADIENTS[0], tiny), passed(GRADIENTS[0], other)
    assert disagreement(NAMES, *before_norm, NEAR["bf16"]) == "", "the bias before a norm has noise for a gradient"
    infinite = passed(GRADIENTS[0] * math.inf)
    assert disagreement(NAMES, infinite, SAME, NEAR["bf16"]) == "", "the bare one is no better"
    unused = passed(GRADIENTS[0], None)
    assert disagreement(NAMES, unused, unused, NEAR["off"]) == ""


# ---- what is compiled ----


@pytest.fixture
def compiled(monkeypatch):
    """Returns a function: a model -> (its compiled form, the sizes of the batches that its graphs have run)."""
    from torch import _dynamo as dynamo
    from torch._inductor import config as generated

    calls, real = [], torch.compile

    def record(graph, inputs):
        """Run graphs as they are, and list the sizes of their batches."""
        data = next(n for n, value in enumerate(inputs) if not isinstance(value, nn.Parameter))
        return lambda *values: calls.append(len(values[data])) or graph(*values)

    monkeypatch.setattr(torch, "compile", lambda f, mode, dynamic=None: real(f, backend=record, dynamic=dynamic))
    dynamo.reset()
    usual = dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256)
    with generated.patch(fallback_random=False), usual:  # as they were, after the test
        yield lambda model: (compiler.Compiled(model, "default", torch.device("cuda")), calls)
    dynamo.reset()


def test_a_network_that_is_a_sequential_is_compiled(compiled):
    """`nn.Module.compile` compiles nothing of it in torch 2.13, and prints nothing."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    form, calls = compiled(model)
    for size in (4, 4, 7):
        with form.used():
            model(torch.ones(size, 2)).sum().backward()
        model(torch.ones(5, 2))
    assert calls == [4, 4, 7], "one graph for each pass, and none outside of `used`"
    assert "forward" not in vars(model)


def test_a_forward_of_its_own_comes_back(compiled):
    model = nn.Linear(2, 2)
    own = model.forward = lambda x: x + 1
    form, _ = compiled(model)
    with form.used():
        assert torch.equal(model(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    assert model.forward is own


@pytest.mark.slow
def test_a_graph_for_each_shape_of_a_training_is_allowed(compiled):
    """Of a network of blocks that the compiler must take one by one, because the host reads something between them."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.Linear(width, width + 1)

        def forward(self, x):
            y = self.inner(x)
            torch._dynamo.graph_break()
            return y * 2

    model = nn.Sequential(*(Block(2 + n) for n in range(6)))
    form, calls = compiled(model)
    for size in (6, 6, 5, 4, 3):
        calls.clear()
        with form.used():
            model(torch.ones(size, 2)).sum().backward()
        assert len(calls) >= 6, "torch's own limit is 8 graphs of a function"


def test_a_line_where_the_compiler_gives_up(compiled, caplog):
    model = nn.Sequential(nn.Linear(2, 2))
    form, calls = compiled(model)
    torch._dynamo.config.recompile_limit = 2
    for size in (6, 5, 4, 3):
        with form.used(), caplog.at_level("WARNING", "lockstep"):
            model(torch.ones(size, 2)).sum().backward()
    lines = [record.getMessage() for record in caplog.records if record.name == "lockstep"]
    assert len(lines) == 1 and lines[0].startswith("compile: torch's compiler has made 2 graphs of a function")
    assert calls == [6, 5]


@pytest.mark.slow
def test_a_line_where_nothing_is_compiled(trained, tmp_path):
    """The model forbids it."""
    task = tmp_path / "forbidden.py"
    text = (ROOT / "tests" / "tasks" / "toy.py").read_text()
    forward = "    def forward(self, x):"
    assert text.count(forward) == 1
    task.write_text(text.replace(forward, f"    @torch.compiler.disable\n{forward}"))
    out, _, calls = trained("forbidden", str(task), *toy()[1:])
    assert "compile: torch's compiler has compiled nothing" in out and calls == []


# ---- torch's own compiler ----

SEES = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


def gradient(function, x):
    x = x.clone().requires_grad_()
    function(x).sum().backward()
    return x.grad


def through(pool):
    return lambda x: pool(nn.functional.gelu(x), 1)


@pytest.mark.slow
@SEES
@pytest.mark.parametrize(
    "pool",
    [largest,
     pytest.param(torch.amax, marks=pytest.mark.xfail(
         reason="torch 2.11 (CUDA) and 2.13 (CPU) compare the maximum, in bf16, with elements that are not rounded"))],
)  # fmt: skip
def test_the_gradient_of_a_maximum_in_bf16_compiles(pool):
    """Of `amax` it is NaN in each element, which made 25 of 27 gradients of the 1-D network NaN."""
    torch._dynamo.reset()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = gradient(torch.compile(through(pool)), x)
    assert torch.allclose(found, gradient(through(pool), x), atol=1e-2)


@pytest.mark.slow
@SEES
def test_the_compiled_dropout_is_the_bare_one():
    """Else a right step could not be told from a wrong one."""
    from torch._inductor import config as generated

    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.ones(4, 8)
    with generated.patch(fallback_random=False):  # as it was, after the test
        form = compiler.Compiled(model, "default", torch.device("cpu"))
        torch.manual_seed(0)
        with form.used():
            found = model(x)
    torch.manual_seed(0)
    assert torch.equal(found == 0, model(x) == 0)


def test_the_largest_is_that_of_torch():
    """Bare to the bit, ties included; its compiled form picks one of equal elements."""
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])
    assert torch.equal(largest(x, 1), x.amax(1))
    assert torch.equal(gradient(lambda x: largest(x, 1), x), gradient(lambda x: x.amax(1), x))


def test_the_tolerances_are_of_each_precision():
    from engine.precision import DTYPES

    assert NEAR.keys() == {"off", *DTYPES} and compiled_step.FLOOR < 1


class Timed(nn.Module):
    """Its output depends on a number that changes with the step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, time):
        return torch.relu(self.layer(x)) * time


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("most", "time"), [(3, float), (3, int), (2, lambda n: torch.tensor(float(n)))])
def test_a_number_of_the_step_makes_no_graph_for_each_step(device, most, time):
    """Two graphs for a number, one for the clock, and one for the shape of a short batch; on a GPU as in `Compiled`."""
    torch.compiler.reset()
    before, net = compiler.graphs(), Timed()
    compiled = compiler.Compiled(net, "default", torch.device(device))
    for step, rows in enumerate([16, 16, 16, 3, 16, 16, 3, 16]):
        x = torch.randn(rows, 8)
        with compiled.used():
            found = net(x, time(step))
        torch.testing.assert_close(found, torch.relu(net.layer(x)) * step)
    assert compiler.graphs() - before == most
    with compiled.used():
        net(torch.randn(5, 8), time(8))
    assert compiler.graphs() - before == most + (device == "cuda"), "the shape is a constant on a GPU alone"
