"""A training pass is looked at before the first step: what it may not keep, change or call, each with its cure, and
what is no fault: caches, counters for a log, outputs that are read in the same pass."""

import re

import numpy as np
import pytest
import torch
from conftest import cases, succeed
from first_step import first_steps
from runs import weights

import tasks
import train
from engine import config
from engine.contract import LockstepError
from plugins.preflight.snapshot import Snapshot

HEAD = """
import copy, itertools, random
from collections import deque
import numpy as np
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from engine.contract import Loss
from tests.tasks import toy

COUNTS = {'passes': 0}
NUMBERS = itertools.count(1)

class Average:
    def __init__(self, net):
        self.weights = [p.detach().clone() for p in net.parameters()]

    def update(self, net):
        for average, p in zip(self.weights, net.parameters()):
            average.lerp_(p.detach(), 1e-3)

class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient / gradient.abs().max()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def encode(self, x):
        return self.one(x.float()).tanh()

    def forward(self, x):
        return self.two(self.encode(x))

def net_of(forward, **buffers):
    class Own(Net):
        pass
    Own.forward = forward
    net = Own()
    for name, persistent in buffers.items():
        net.register_buffer(name, torch.zeros(8), persistent=persistent)
    return net

class Task(toy.Task):
    def datasets(self):
        return super().datasets()[0], None
    def model(self):
        return Net()
"""

REFUSED = r"""
# a ramp by a count: the loss depends on self.n, which a pass changes and no checkpoint holds
def loss(self, net, batch):
  self.n = getattr(self, 'n', 0) + 1
  return Loss(self._errors(net, batch).sum() * min(1, self.n / 1000), len(batch['x']))
# turns: the loss depends on self.kept\['turn'\]
def __init__(self, cfg):
  super().__init__(cfg); self.kept = {'turn': 0}
def loss(self, net, batch):
  self.kept['turn'] += 1
  return Loss(self._errors(net, batch).sum() * (-1) ** self.kept['turn'], len(batch['x']))
# a count of a module, a tensor: the loss depends on one.n
def model(self):
  net = Net(); net.one.n = torch.zeros(()); return net
def loss(self, net, batch):
  n = getattr(net, 'module', net).one.n; n += 1
  return Loss(self._errors(net, batch).sum() / n, len(batch['x']))
# a teacher: the loss depends on self.teacher.one.weight
def model(self):
  net = Net(); self.teacher = copy.deepcopy(net).requires_grad_(False); return net
def loss(self, net, batch):
  with torch.no_grad():
    for t, p in zip(self.teacher.parameters(), net.parameters()): t.lerp_(p, 1e-3)
  return Loss((net(batch['x']) - self.teacher(batch['x']) + 1).square().sum(), len(batch['x']))
# a teacher of the first pass: the loss depends on self.average.weights\[0\]
def loss(self, net, batch):
  if not hasattr(self, 'average'): self.average = Average(net)
  self.average.update(net)
  gaps = sum((p - a).square().sum() for p, a in zip(net.parameters(), self.average.weights))
  return Loss(self._errors(net, batch).sum() + len(batch['x']) * gaps, len(batch['x']))
# a target network inside of the model: a forward pass changes the weight two.weight
def model(self):
  def forward(self, x):
    for t, p in zip(self.two.parameters(), self.one.parameters()): t.data = .9 * t.data + .1 * p.data[:len(t)]
    return self.encode(x)[:, :4] - self.two(self.encode(x))
  net = net_of(forward); net.two.requires_grad_(False); return net
# a mean that begins with the first batch: a forward pass changes the weight one.bias
def model(self):
  def forward(self, x):
    if self.training and not hasattr(self, 'made'): self.made = True; self.one.bias.data.copy_(x.mean(0))
    return self.two(self.encode(x))
  return net_of(forward)
# a running mean that no checkpoint holds: the loss depends on mean
def model(self):
  def forward(self, x):
    if self.training: self.mean.lerp_(x.float().detach().mean(0), .1)
    return self.two(self.encode(x) - self.mean)
  return net_of(forward, mean=False)
# a queue: the loss depends on self.queue\[0\]
def __init__(self, cfg):
  super().__init__(cfg); self.queue = deque(maxlen=3)
def loss(self, net, batch):
  out = net(batch['x'])
  far = self.queue[0][:1] if net.training and self.queue else torch.zeros(1, 4)
  if net.training: self.queue.append(out.detach())
  return Loss((out - batch['y']).square().sum() + (out @ far.T).sum(), len(out))
# a generator: the loss depends on self.draw
def __init__(self, cfg):
  super().__init__(cfg); self.draw = np.random.default_rng(0)
def loss(self, net, batch):
  return Loss(self._errors(net, batch).sum() * (self.draw.random() + 1 if net.training else 1), len(batch['x']))
# a count of Python: the loss of the same 4 samples is different the second time, in training mode
def loss(self, net, batch):
  return Loss(self._errors(net, batch).sum() * (next(NUMBERS) if net.training else 1), len(batch['x']))
# rows with a largest norm: nn.Embedding\(max_norm=...\) changes its weight table.weight
def model(self):
  def forward(self, x):
    return self.two(self.table(x[:, 0].abs().long()))
  net = net_of(forward); net.table = nn.Embedding(9, 8, max_norm=1.0); return net
# a backward pass: a gradient of one.weight and 3 more is there before the backward pass: `loss` calls .backward\(\)
def loss(self, net, batch):
  each = self._errors(net, batch).sum(); each.backward(retain_graph=True)
  return Loss(each, len(batch['x']))
# the model itself: `loss` does not call `net`
def model(self):
  self.net = Net(); return self.net
def loss(self, net, batch):
  return Loss(self._errors(self.net, batch).sum(), len(batch['x']))
# the model in DDP: `loss` does not call `net`
def loss(self, net, batch):
  return Loss(getattr(net, 'module', net).encode(batch['x']).square().sum(), len(batch['x']))
# a method: `loss` uses net.encode, which `net` lacks on several processes
def loss(self, net, batch):
  return Loss(net.encode(batch['x']).square().sum(), len(batch['x']))
# a layer set free: the weight one.weight and 1 more was set free during the training
def model(self):
  net = Net(); net.one.requires_grad_(False); return net
def loss(self, net, batch):
  if net.training: getattr(net, 'module', net).one.requires_grad_(True)
  return super().loss(net, batch)
# a rate set by hand: a pass changes param_groups\[0\]\['lr'\] of the optimizer
def optimizer(self, model):
  self.own = torch.optim.SGD(model.parameters(), lr=.1); return self.own
def loss(self, net, batch):
  for group in self.own.param_groups: group['lr'] *= .9
  return super().loss(net, batch)
# a schedule of its own: OneCycleLR is made for the optimizer, .*: return it from the task.s `scheduler
def optimizer(self, model):
  own = torch.optim.SGD(model.parameters(), lr=.1)
  self.own = torch.optim.lr_scheduler.OneCycleLR(own, .1, total_steps=9); return own
# a schedule that nobody keeps: a learning-rate scheduler is made for the optimizer
def optimizer(self, model):
  own = torch.optim.SGD(model.parameters(), lr=.1)
  torch.optim.lr_scheduler.StepLR(own, 3); return own
# a plateau: ReduceLROnPlateau is made for the optimizer
def optimizer(self, model):
  own = torch.optim.SGD(model.parameters(), lr=.1)
  self.own = torch.optim.lr_scheduler.ReduceLROnPlateau(own); return own
# a collective: `loss` calls a collective \(all_?reduce\)
def model(self):
  def forward(self, x):
    mean = x.float().mean(0)
    if self.training: dist.all_reduce(mean)
    return self.two(self.encode(x) - mean if self.training else self.encode(x))
  return net_of(forward)
# a hook: the gradient of one.weight of 5 samples sums to .*make it linear in the gradient
def model(self):
  net = Net(); net.one.weight.register_hook(lambda g: g / g.norm()); return net
# a backward pass of its own: the gradient of two.\w+ of 5 samples sums to
def model(self):
  return net_of(lambda self, x: Clipped.apply(self.two(self.encode(x))))
"""
REFUSED = cases(REFUSED, "")

KEPT = r"""
# nothing
# a mask, a table and an output
def model(self):
  def forward(self, x):
    n = len(x)
    if n not in self.table: self.table[n] = torch.ones(n, 1)
    if len(self.mask) < n: self.mask = torch.ones(n, 8)
    self.last = self.encode(x) * self.mask[:n]
    self.penalty = self.last.square().sum()
    return self.two(self.last * self.table[n])
  net = net_of(forward); net.table = {}; net.register_buffer('mask', torch.zeros(0, 8), persistent=False); return net
def loss(self, net, batch):
  out = net(batch['x'])
  return Loss(out.square().sum() + getattr(net, 'module', net).penalty, len(out))
# a count for a log: warning: each training pass changes self.calls, which no checkpoint holds
def __init__(self, cfg):
  super().__init__(cfg); self.calls, self.seen = 0, []
def loss(self, net, batch):
  self.calls += 1; self.seen.append(self.calls)
  return super().loss(net, batch)
# a limit that no first step reaches: warning: each training pass changes Task.n, which no checkpoint holds
n = 0
def loss(self, net, batch):
  type(self).n += 1
  return Loss(self._errors(net, batch).sum() * (2 if self.n > 400 else 1), len(batch['x']))
# layers left out at random: warning: the cut matters: a training pass draws from the generator of random
def model(self):
  def forward(self, x):
    x = x.float()
    return self.two(x + self.encode(x) if not self.training or random.random() < .5 else x)
  return net_of(forward)
# pairs at random: warning: the cut matters: a training pass draws from the generator of NumPy
def loss(self, net, batch):
  assert len(batch['x']) % 2 == 0
  return Loss(self._errors(net, batch).sum() * (1 + np.random.rand()), len(batch['x']))
# a mean in a checkpoint: warning: the cut matters: each training pass changes the buffer mean
def model(self):
  def forward(self, x):
    if self.training: self.mean.lerp_(x.float().detach().mean(0), .1)
    return self.two(self.encode(x) - self.mean)
  return net_of(forward, mean=True)
# a count once a step
def model(self):
  def forward(self, x):
    return self.two(self.encode(x) - self.steps.clamp(max=3))
  return net_of(forward, steps=True)
def optimizer(self, model):
  own = torch.optim.SGD(model.parameters(), lr=.1)
  own.register_step_post_hook(lambda *_: model.steps.add_(1)); return own
# norms, dropout, spectral norm
def model(self):
  parts = nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(.5)
  return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), *parts).double()
# a ramp and a curriculum
def loss(self, net, batch):
  info = batch['lockstep']
  each = (net(batch['x']) - batch['y']).square().sum(1) * (info.index % 3 <= info.epoch)
  return Loss(each.sum() * (1 + info.step) + info.clock[2] * each.sum(), len(each))
# noise that begins later: warning: the cut matters: a training pass draws from the generator of torch
def loss(self, net, batch):
  x = batch['x']
  if batch['lockstep'].epoch: x = x + .1 * torch.randn_like(x)
  return Loss((net(x) - batch['y']).square().sum(), len(x))
# a penalty on a gradient
def loss(self, net, batch):
  x = batch['x'].float().requires_grad_()
  each = (net(x) - batch['y']).square()
  g, = torch.autograd.grad(each.sum(), x, create_graph=True)
  return Loss(each.sum() + g.square().sum(), len(x))
# layers computed again
def model(self):
  from torch.utils.checkpoint import checkpoint
  return net_of(lambda self, x: self.two(checkpoint(self.encode, x, use_reentrant=False)))
# tied weights
def model(self):
  net = net_of(lambda self, x: self.one(self.encode(x))[:, :4]); net.three = net.one; return net
# a rare expert
def model(self):
  def forward(self, x):
    out = self.encode(x)
    return self.two(out) if float(x[0, 0]) < 9 else self.rare(out)
  net = net_of(forward); net.rare = nn.Linear(8, 4); return net
# noise of torch: warning: the cut matters: a training pass draws from the generator of torch
def loss(self, net, batch):
  x = batch['x'] + .1 * torch.randn_like(batch['x'])
  return Loss((net(x) - batch['y']).square().sum(), len(x))
"""
KEPT = cases(KEPT, "")


@pytest.fixture(scope="module")
def start():
    """Prepare a training up to the first step."""
    with first_steps() as begin:
        yield begin


def own(tmp_path, body):
    (tmp_path / "own.py").write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
    return str(tmp_path / "own.py")


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_is_named_with_its_cure(start, tmp_path, name):
    body, said = REFUSED[name]
    with pytest.raises(LockstepError, match="^" + said) as error:
        start(own(tmp_path, body))
    assert re.search(r" \(\S.*\): \S", str(error.value)), "no place, or no cure"


@pytest.mark.parametrize("name", KEPT)
def test_what_does_not_matter_is_no_fault(start, tmp_path, capsys, name):
    body, said = KEPT[name]
    start(own(tmp_path, body))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(lines) == bool(said) and re.match(said, "".join(lines)), lines


EVERYTHING = """
def __init__(self, cfg):
  super().__init__(cfg)
  self.calls, self.seen, self.mean, self.draw = 0, [], torch.zeros(()), np.random.default_rng(0)
def model(self):
  net = Net(); net.calls = 0; net.register_buffer('passes', torch.zeros(()), persistent=False)
  return net
def loss(self, net, batch):
  model = getattr(net, 'module', net)
  self.calls += 1; self.seen.append(self.calls); self.mean += 1; self.draw.random(); COUNTS['passes'] += 1
  model.calls += 1; model.passes += 1; type(self).some = self.calls
  return super().loss(net, batch)
"""


def test_all_is_put_back(start, tmp_path):
    run = start(own(tmp_path, EVERYTHING))
    task, model = run.task, run.model
    assert (task.calls, task.seen, float(task.mean), model.calls, float(model.passes)) == (0, [], 0.0, 0, 0.0)
    assert task.draw.random() == np.random.default_rng(0).random() and not hasattr(task, "some")
    fresh = train.build(config.parse([own(tmp_path, EVERYTHING), "device=cpu"], tasks.load), run.world)
    before = dict(fresh.model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_snapshot_restores_what_it_has_seen():
    inner = torch.nn.Linear(2, 2)
    kept = {"a": [1, {"b": torch.zeros(2)}], "net": inner, "n": 1.5}
    weight, tensor = inner.weight, kept["a"][1]["b"]
    before = Snapshot({"it": kept})
    first = inner.weight.detach().clone()
    with torch.no_grad():
        inner.weight.add_(1)
        tensor += 1
    kept["a"].append(3)
    kept["n"], kept["new"], inner.extra = 2.5, 0, "text"
    changed = {*before.changes(Snapshot({"it": kept}, copies=False))}
    names = {"it['a'][1]['b']", "it['a'][2]", "it['n']", "it['new']", "it['net'].weight", "it['net'].extra"}
    assert names < changed and changed - names == {"len(it)", "len(it['a'])"}
    before.put_back()
    assert not [*before.changes(Snapshot({"it": kept}))]
    assert inner.weight is weight and torch.equal(weight, first) and kept["a"][1]["b"] is tensor
    assert float(tensor.sum()) == 0 and "new" not in kept and not hasattr(inner, "extra")


class Sealed(dict):
    def clear(self):
        raise TypeError("sealed")


def test_a_value_that_cannot_be_restored_stays_as_it_is():
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    kept = {"fixed": fixed, "sealed": Sealed(a=1), "n": 1}
    before = Snapshot({"it": kept})
    kept["sealed"]["b"], kept["n"] = 2, 2
    before.put_back()
    assert kept["n"] == 1 and kept["sealed"] == {"a": 1, "b": 2} and kept["fixed"] is fixed


FROZEN = """
def loss(self, net, batch):
  self.steps = getattr(self, 'steps', 0) + (not hasattr(batch, 'never'))
  if net.training and self.steps > 60: getattr(net, 'module', net).one.requires_grad_(False)
  return super().loss(net, batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_layer_frozen_later_is_refused_alike(launch, tmp_path, processes):
    words = ["train.py", own(tmp_path, FROZEN), "batch_size=6", "epochs=90", "check_resume=false", "check_sums=false"]
    start = launch.python if processes == 1 else lambda *words: launch.torchrun(processes, *words)
    done = start(*words, f"save_dir={tmp_path / 'run'}")
    assert done.code != 0 and "the weight one.weight and 1 more was frozen during the training" in done.errors[0]
    assert "in the task's `turns`" in done.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the model in DDP", "a teacher", "a collective"])
def test_two_processes_refuse_in_the_same_line(launch, tmp_path, name):
    body, said = REFUSED[name]
    lines = []
    for start in (launch.python, lambda *words: launch.torchrun(2, *words)):
        done = start("train.py", own(tmp_path, body), "batch_size=12", f"save_dir={tmp_path / 'run'}")
        assert done.code != 0 and len(done.errors) == 1, done.err
        lines.append(done.errors[0])
        assert re.match(f"error: {said}", lines[-1]) and not (tmp_path / "run").exists()
    assert lines[0] == lines[1]


ONCE_A_STEP = """
def model(self):
  net = Net(); net.teacher = copy.deepcopy(net).requires_grad_(False)
  return net
def optimizer(self, model):
  own = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=self.cfg.optim.lr)
  def update(*_):
    with torch.no_grad():
      for t, p in zip(model.teacher.parameters(), model.parameters()): t.lerp_(p, .1)
  own.register_step_post_hook(update)
  return own
def loss(self, net, batch):
  model = getattr(net, 'module', net)
  return Loss((net(batch['x']) - model.teacher(batch['x']) + 1).square().sum(), len(batch['x']))
"""


@pytest.mark.slow
def test_the_cure_is_the_same_run_on_any_cut_and_after_a_resume(launch, tmp_path):
    """A teacher in the model, moved by a hook of the optimizer: beside a plain loop."""
    path = own(tmp_path, ONCE_A_STEP)
    common = ["train.py", path, "amp=off", "global_batch=12", "steps=6", "epochs=0", "schedule.horizon=6"]
    runs = {
        "one": (launch.python, ["batch_size=12"]),
        "passes": (launch.python, ["batch_size=3"]),
        "two": (lambda *words: launch.torchrun(2, *words), ["batch_size=6"]),
    }
    for name, (start, words) in runs.items():
        succeed(start(*common, *words, f"save_dir={tmp_path / name}"))
    succeed(launch.python(*common[:4], "steps=3", *common[5:], f"save_dir={tmp_path / 'again'}"))
    succeed(launch.python(*common, f"save_dir={tmp_path / 'again'}"))
    expected = weights(tmp_path / "one")
    assert any("teacher" in name for name in expected)
    for name in ("passes", "two", "again"):
        for key, value in weights(tmp_path / name).items():
            torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(expected[key]), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_rates_of_groups_are_printed(launch, tmp_path):
    body = (
        "def optimizer(self, model):\n"
        "  rest = {'params': [*model.two.parameters()], 'lr': .004}\n"
        "  return torch.optim.SGD([{'params': [*model.one.parameters()]}, rest], lr=.1)"
    )
    done = succeed(launch.python("train.py", own(tmp_path, body), "optim.lr=0.1", "--dry-run"))
    assert "; by groups: 0.1 for 2 weights, 0.004 for 2 weights" in done.out
