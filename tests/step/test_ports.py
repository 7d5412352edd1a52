"""Ports of loops that people write: equal to the plain loop on any partition, or refused with the way to write them.

The ports are tests/tasks/ports/; docs/ports.md has the table.
"""

import ast
import importlib
import json
import re
import textwrap

import pytest
from conftest import ROOT, cases, launching, succeed
from runs import progress, same_bits, weights

BITS = str(ROOT / "tests" / "ranks" / "bits.py")
FOLDER = ROOT / "tests" / "tasks" / "ports"
PORTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "base")

CUTS = {"one pass": (1, 12), "four passes": (1, 3), "two processes": (2, 6)}
"""Processes, and the samples of a pass."""

CLOSE = 1e-12
"""The largest difference of a weight, in float64; the weights are of size 1."""


@pytest.fixture(scope="module")
def folder(once):
    def train_all(folder):
        with launching() as launch:
            for cut, (processes, batch_size) in CUTS.items():
                size = f"batch_size={batch_size}"
                runs = [[str(FOLDER / f"{name}.py"), size, f"save_dir={folder / cut / name}"] for name in PORTS]
                command = BITS, json.dumps(runs)
                succeed(launch.python(*command) if processes == 1 else launch.torchrun(processes, *command))

    return once("ports", train_all)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", PORTS)
def test_a_port_ends_in_the_weights_of_the_plain_loop(folder, name, cut):
    run = folder / cut / name
    truth = importlib.import_module(f"tests.tasks.ports.{name}").plain()
    trained = weights(run)
    assert trained.keys() == truth.keys()
    assert max((trained[key] - truth[key]).abs().max().item() for key in truth) < CLOSE
    assert progress(run / "last.pt")["skipped"] == 0


def lines_of(source, node):
    """The lines of a class or function, without blank lines and its docstring."""
    text = [line for line in source.splitlines()[node.lineno - 1 : node.end_lineno] if line.strip()]
    return len(text) - (ast.get_docstring(node) is not None)


def lines_of_port(name):
    """The lines of the loop; and of the task, with its optimizers and datasets. The network is in neither."""
    source = (FOLDER / f"{name}.py").read_text()
    tree = ast.parse(source).body
    (plain,) = [each for each in tree if getattr(each, "name", "") == "plain"]
    classes = [each for each in tree if isinstance(each, ast.ClassDef) and ast.unparse(each.bases[0]) != "nn.Module"]
    return lines_of(source, plain), sum(lines_of(source, each) for each in classes)


def test_the_page_lists_each_port_with_its_lines():
    page = (ROOT / "docs" / "ports.md").read_text()
    rows = re.findall(r"^\| \[.*?\]\(\.\./tests/tasks/ports/(\w+)\.py\) \|.*\| (\d+) \| (\d+) \|$", page, re.M)
    assert sorted(name for name, _, _ in rows) == PORTS
    for name, loop, task in rows:
        assert (int(loop), int(task)) == lines_of_port(name), name


HEAD = """
import copy, random
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from engine.contract import Loss
from tests.tasks.ports import base

def updated(average, model):
    for p, q in zip(average.parameters(), model.parameters()):
        p.data.lerp_(q.data, 0.1)

class Task(base.Task):
"""

REFUSED = cases("""
# backward in loss: a gradient of 0.weight and 3 more is there before the backward pass: `loss` calls .back
def loss(self, net, batch):
    loss = super().loss(net, batch)
    loss.total.backward(retain_graph=True)
    return loss
# self.net: `loss` does not call `net`: on several processes no gradients would be added up
def model(self):
    self.net = super().model()
    return self.net
def loss(self, net, batch):
    return super().loss(self.net, batch)
# max_norm: nn.Embedding(max_norm=...) changes its weight words.weight in each forward pass, on each process other rows
def model(self):
    from tests.tasks.ports.max_norm import Words
    return Words(1.0).double()
# non-persistent buffer: the loss depends on mean, which a pass changes and no checkpoint holds
def model(self):
    from tests.tasks.ports.running_mean import Centred
    return Centred()
# a teacher in loss: the loss depends on self.teacher.0.weight, self.teacher.0.bias and 2 more, which a
def model(self):
    net = super().model()
    self.teacher = copy.deepcopy(net).requires_grad_(False)
    return net
def loss(self, net, batch):
    logits = net(batch["x"])
    total = base.cross_entropy(logits, batch["y"]) + (logits - self.teacher(batch["x"])).square().sum()
    updated(self.teacher, net)
    return Loss(total, len(logits))
# a teacher that is not declared: `after_step` changes self.teacher.0.weight, self.teacher.0.b
def model(self):
    net = super().model()
    self.teacher = copy.deepcopy(net).requires_grad_(False)
    return net
def loss(self, net, batch):
    logits = net(batch["x"])
    total = base.cross_entropy(logits, batch["y"]) + (logits - self.teacher(batch["x"])).square().sum()
    return Loss(total, len(logits))
def after_step(self, model, step):
    updated(self.teacher, model)
# a queue in the order of passes: a pass changes self.queue, a state of the task: another number of
state_attributes = ("queue",)
def model(self):
    self.queue = torch.zeros(24, 3, dtype=torch.float64)
    return super().model()
def loss(self, net, batch):
    logits = net(batch["x"])
    total = base.cross_entropy(logits, batch["y"]) + (logits @ self.queue.t()).square().sum()
    self.queue = torch.cat([logits.detach(), self.queue])[:24]
    return Loss(total, len(logits))
# a counter: the loss depends on self.steps_seen, which a pass changes and no checkpoint holds
steps_seen = 0
def loss(self, net, batch):
    self.steps_seen += 1
    loss = super().loss(net, batch)
    return loss._replace(total=loss.total * min(1, self.steps_seen / 5))
# kept activations: the loss depends on last, which a pass changes and no checkpoint holds
def model(self):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.last = base.network(), 0.0
        def forward(self, x):
            logits = self.net(x)
            distance = (logits - self.last).square().sum()
            self.last = logits.detach().mean(0)
            return logits, distance
    return Net()
def loss(self, net, batch):
    logits, distance = net(batch["x"])
    return Loss(base.cross_entropy(logits, batch["y"]) + distance, len(logits))
def score(self, model, batch):
    return super().score(lambda x: model(x)[0], batch)
# unfreezing in loss: the weight 0.weight and 1 more was set free during the training
def model(self):
    net = super().model()
    net[0].requires_grad_(False)
    return net
def loss(self, net, batch):
    if batch["lockstep"].epoch > 0:
        for p in net.parameters():
            p.requires_grad_(True)
    return super().loss(net, batch)
# a scheduler in optimizer: OneCycleLR is made for the optimizer, and the schedule of the run would overwrite its rates
defaults = base.WITHOUT_OPTIMIZER
def optimizer(self, model):
    optimizer = base.sgd(model)
    self.steps = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
    return optimizer
# Lookahead around an optimizer: Lookahead has changed its n, which no checkpoint holds (the task's
defaults = base.WITHOUT_OPTIMIZER
def optimizer(self, model):
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.n = inner, 0
            super().__init__(inner.param_groups, {"lr": base.LR})
            self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        def step(self, closure=None):
            self.inner.step()
            self.n += 1
            if self.n % 5 == 0:
                with torch.no_grad():
                    for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"])):
                        p.copy_(slow.lerp_(p, 0.5))
    return Lookahead(base.sgd(model))
# SAM with a closure: SAM computes the loss several times a step, and a step here is
defaults = base.WITHOUT_OPTIMIZER
def optimizer(self, model):
    class SAM(torch.optim.SGD):
        def step(self, closure):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.05 * p.grad)
            closure()
            super().step()
    return SAM(model.parameters(), lr=base.LR)
""")
"""Loops as people write them: the beginning of the message."""


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_cannot_be_the_same_is_refused_with_the_way_to_write_it(launch, tmp_path, name):
    body, said = REFUSED[name]
    (tmp_path / "own.py").write_text(HEAD + textwrap.indent(body, "    "))
    done = launch.train(str(tmp_path / "own.py"), f"save_dir={tmp_path / 'run'}")
    assert done.code in (1, 2), done.out + done.err
    (error,) = done.errors
    assert said in error, error


WARNED = cases("""
# random.random: random
def model(self):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.skip = base.network(), nn.Linear(6, 3).double()
        def forward(self, x):
            return self.skip(x) + (self.net(x) if random.random() < 0.5 else 0 * self.net(x))
    return Net()
# randn_like: torch
def loss(self, net, batch):
    return super().loss(net, batch | {"x": batch["x"] + torch.randn_like(batch["x"])})
# randperm: torch
def loss(self, net, batch):
    partner = torch.randperm(len(batch["x"]))
    logits = net(0.7 * batch["x"] + 0.3 * batch["x"][partner])
    total = 0.7 * base.cross_entropy(logits, batch["y"]) + 0.3 * base.cross_entropy(logits, batch["y"][partner])
    return Loss(total, len(logits))
""")
"""Random numbers of a pass: the module that draws them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WARNED)
def test_random_numbers_of_a_pass_are_named_and_the_same_with_virtual_workers(launch, tmp_path, name):
    body, module = WARNED[name]
    (tmp_path / "own.py").write_text(HEAD + textwrap.indent(body, "    "))
    done = succeed(launch.train(str(tmp_path / "own.py"), f"save_dir={tmp_path / 'run'}"))
    assert f"warning: the cut matters: a training pass draws from the generator of {module}, which" in done.out
    assert "and so does batch['lockstep'].seed)" in done.out
    for place, processes in (("one", 1), ("two", 2)):
        words = [str(tmp_path / "own.py"), "virtual_workers=4", f"save_dir={tmp_path / place}"]
        succeed(launch.train(*words, processes=processes))
    assert same_bits(weights(tmp_path / "one"), weights(tmp_path / "two"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gan", "moco"])
def test_prove_tries_a_port(launch, name):
    """Kills, virtual workers, float64: two optimizers, and a queue in the order of the global batch."""
    words = ["--processes", "1,2", "--steps", "6", "--seconds", "3000", "--json"]
    done = succeed(launch.python("tools/prove.py", *words, str(FOLDER / f"{name}.py")))
    assert json.loads(done.out)["verdict"] == "holds"
