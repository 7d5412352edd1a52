"""The sums of a task add up over parts of a batch, or the run ends before its first step; which wrong ones are found,
which right ones are not taken for wrong, and that the training does not notice."""

import random
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, cases, succeed
from first_step import first_steps
from test_shards import indexed, of_the_robot

from engine.contract import LockstepError
from plugins.preflight import adds_up

HEAD = """
import random, torch
import torch.nn.functional as F
from torch import nn
from engine import contract
from engine.contract import Loss, Sums, gather_batch, uniform
from tests.tasks import toy

def zero(net):
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    return net

class Net(toy.Net):
    def __init__(self, *more):
        super().__init__(16, 0.0)
        self.more = nn.ModuleList(more)

    def forward(self, x):
        x = super().forward(x)
        for layer in self.more:
            x = layer(x)
        return x

class Texts(list):
    def collate(self, samples):
        pad = lambda name: nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True)
        return {"ids": pad("ids"), "weights": pad("weights"), "row": torch.arange(len(samples))}

def texts(self):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (40,), generator=draw).tolist()
    return Texts({"ids": torch.randint(1, 11, (n,), generator=draw),
                  "weights": torch.rand(n, generator=draw) + 0.1} for n in lengths), None

class Words(nn.Sequential):
    def forward(self, ids, mask=None):
        return self[2](self[1](self[0](ids), mask=mask))

def transformer(self):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return Words(nn.Embedding(11, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 11))

def mean_over_tokens(self, net, batch):
    ids = batch['ids']
    labels = ids.masked_fill(ids == 0, -100).flatten()
    return Loss(F.cross_entropy(net[2](net[0](ids)).flatten(0, 1), labels) * len(ids), len(ids))

def diffusion(net, x):
    t, noise = torch.rand(len(x), 1), torch.randn_like(x)
    return (net(x + t * noise)[:, :4] - noise[:, :4]).square()

class Task(toy.Task):
"""


RIGHT = r"""
# a mean times the samples
def loss(self, net, batch):
  return Loss(self._errors(net, batch).mean() * len(batch['x']), len(batch['x']))
# BatchNorm and dropout
def model(self):
  return Net(nn.BatchNorm1d(4), nn.Dropout(0.5))
# token weights, padded
datasets, model = texts, transformer
def loss(self, net, batch):
  ids, w = batch['ids'], batch['weights'][:, 1:]
  output = net(ids, nn.Transformer.generate_square_subsequent_mask(ids.shape[1]))
  each = F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction='none')
  return Loss((each * w.flatten()).sum(), w.sum(), Sums(count=(ids > 0).sum()))
# nothing in it: whether the loss adds up is not known: it is 0 of these \d+ samples
def loss(self, net, batch):
  return Loss(self._errors(net, batch).sum() * 0, 0)
# almost nothing left, beside large numbers: the loss adds up
def loss(self, net, batch):
  out = 40 * F.normalize(net(batch['x']).float()) @ torch.eye(4)
  return Loss(F.cross_entropy(out, out.detach().argmax(1), reduction='sum').mul(1e-9)
              + (1e4 + out).sum() - 1e4 * 4 * len(out) - out.sum(), len(out))
# parts that cancel out, such as advantages of both signs
def loss(self, net, batch):
  sign = torch.tensor([1, 1, 1, -1.5, -1.5])[batch['lockstep'].position % 5]
  return Loss((sign * (1e4 + net(batch['x']).float().mean(1))).sum(), len(sign))
# all with all: the loss adds up: 5 samples = 3 \+ 2, each compared with all, to
def loss(self, net, batch):
  x = F.normalize(net(batch['x'])); whole, rows = gather_batch(x)
  return Loss(F.cross_entropy(x @ whole.T * 5, rows, reduction='sum'), len(x))
# noise by the seeds
def loss(self, net, batch):
  noise = uniform(batch['lockstep'].seed, 8)
  return Loss(self._errors(net, batch | {'x': batch['x'] + noise}).sum(), batch['mask'].sum())
# noise of torch: the loss adds up only to [0-9e.+-]+, 5 samples = 3 \+ 2: it draws from a generator, and not from
def loss(self, net, batch):
  x = batch['x'] + 0.3 * torch.randn_like(batch['x'])
  return Loss(self._errors(net, batch | {'x': x}).sum(), batch['mask'].sum())
# dropout of a function: the loss adds up only to [0-9e.+-]+, 5 samples = 3 \+ 2: it draws from a generator
def loss(self, net, batch):
  return Loss((F.dropout(net(batch['x']), 0.5, True) - batch['y']).square().sum(), len(batch['x']))
# a ramp from zero: the loss adds up: 5 samples = 3 \+ 2, to
def loss(self, net, batch):
  return Loss(self._errors(net, batch).sum() * batch['lockstep'].progress, batch['mask'].sum())
# all in the first step alone: the loss adds up: 5 samples = 3 \+ 2, to
def loss(self, net, batch):
  return Loss(self._errors(net, batch).sum() * (batch['lockstep'].step < 1), batch['mask'].sum())
# a score by the progress
def score(self, model, batch):
  assert batch['lockstep'].progress == 1.0 and batch['lockstep'].epoch == 2
  return super().score(model, batch)
# a norm of weights, times the samples
def loss(self, net, batch):
  norm = len(batch['x']) * sum(p.square().sum() for p in net.parameters())
  return Loss(self._errors(net, batch).sum() + 1e-3 * norm, len(batch['x']))
# diffusion: the loss adds up only to [0-9e.+-]+, 5 samples = 3 \+ 2: it draws from a generator
def loss(self, net, batch):
  return Loss(diffusion(net, batch['x']).sum(), len(batch['x']))
# a warm-up and a teacher that each call moves
def __init__(self, cfg):
  super().__init__(cfg)
  self.kept, self.teacher = {'calls': [0]}, nn.BatchNorm1d(8)
def loss(self, net, batch):
  self.kept['calls'][0] += 1
  self.teacher.calls = getattr(self.teacher, 'calls', 0) + 1
  self.teacher.momentum = self.teacher.momentum / 2
  with torch.no_grad():
    self.teacher.weight += 1; self.teacher.running_mean += 1
  x = self.teacher.eval()(batch['x'].float())
  return Loss(net(x).square().sum() * self.kept['calls'][0] * self.teacher.momentum, len(x))
# terms
loss = contract.Task.loss
def losses(self, net, batch):
  errors = self._errors(net, batch); some = batch['x'][:, 0] > 1
  return {'a': Loss(errors.sum(), batch['mask'].sum()), 'b': Loss(errors[some].sum(), some.sum())}
# training mode only
def loss(self, net, batch):
  assert net.training
  return super().loss(net, batch)
# training mode only, and BatchNorm: whether the loss adds up is not known: AssertionError: no \(in eval mode\)
def model(self):
  return Net(nn.BatchNorm1d(4))
def loss(self, net, batch):
  assert net.training, 'no'
  return super().loss(net, batch)
# a batch of one: the loss adds up: 2 samples = 1 \+ 1, to
defaults = toy.Task.defaults | {'batch_size': 1}
# a batch of one, which no other goes with: whether the loss adds up is not known: a pass of 1 sample cannot be cut
defaults = toy.Task.defaults | {'batch_size': 1, 'eval_batch_size': 1}
def datasets(self):
  return [{'x': torch.randn(3 + n, 8)} for n in range(9)], None
def loss(self, net, batch):
  return Loss(net(batch['x'][0].float()).square().sum(), 1)
# three samples: the loss adds up: 3 samples = 1 \+ 2, to
def datasets(self):
  return toy.Waves(3, 0), None
# a mean of an empty mask: whether the loss adds up is not known: the loss of 5 .*, of 3 and 2 of them nan and
def loss(self, net, batch):
  some = batch['lockstep'].position > 3
  return Loss(self._errors(net, batch)[some].mean() * some.sum(), some.sum())
# whole numbers at a tie
def loss(self, net, batch):
  out = net(batch['x'])
  return Loss(out.square().sum(), len(out), Sums(hits=(out.float() > out.float().mean(1, True)).sum()))
# a score of all with all: the loss adds up
def score(self, model, batch):
  x = F.normalize(model(batch['x'])); whole, rows = gather_batch(x)
  return super().score(model, batch) | {'x': F.cross_entropy(x @ whole.T, rows, reduction='sum')}
# a score with noise: warning: `score` adds up only to [0-9e.+-]+, 5 samples = 3 \+ 2: it draws from a generator
def score(self, model, batch):
  return super().score(model, batch | {'x': batch['x'] + 0.1 * torch.randn_like(batch['x'])})
# a score that changes each time: warning: whether `score` adds up is not known: `x` of the same 5 samples is different
def __init__(self, cfg):
  super().__init__(cfg); self.draw = torch.Generator()
def score(self, model, batch):
  return super().score(model, batch) | {'x': torch.rand((), generator=self.draw)}
"""
RIGHT = cases(RIGHT, r"the loss adds up: 5 samples = 3 \+ 2, to ")

WRONG = r"""
# a mean
def loss(self, net, batch):
  return Loss(self._errors(net, batch).mean(), batch['mask'].sum())
# a mean that begins with zero
def loss(self, net, batch):
  return Loss(self._errors(net, batch).mean() * batch['lockstep'].progress, batch['mask'].sum())
# a mean that begins with zero, by the clock
def loss(self, net, batch):
  return Loss(self._errors(net, batch).mean() * batch['lockstep'].clock[1], batch['mask'].sum())
# a mean in the first epoch
def loss(self, net, batch):
  factor = 1 - batch['lockstep'].epoch / 2
  return Loss(self._errors(net, batch).mean() * factor, batch['mask'].sum())
# a mean and one: the (loss|weight) of 5 samples is .* \(the task's `loss`\): a mean\?
def loss(self, net, batch):
  return Loss(self._errors(net, batch).mean(), 1)
# a mean in a watched sum: `right` of 5 samples is \S+, of 3 and 2 of them \S+ and \S+ \(the task's `loss`\): a mean\?
def loss(self, net, batch):
  right = (net(batch['x']) > 0).float().mean()
  return super().loss(net, batch)._replace(sums=Sums(right=right, count=len(batch['x'])))
# a count of batches: `count` of 5 samples is 1, of 3 and 2 of them 1 and 1 \(the task's `loss`\): a mean\?
def loss(self, net, batch):
  return super().loss(net, batch)._replace(sums=Sums(count=1))
# a mean of noise
def loss(self, net, batch):
  x = batch['x'] + 0.03 * torch.randn_like(batch['x'])
  return Loss(self._errors(net, batch | {'x': x}).mean(), len(batch['x']))
# in-batch contrast: the loss of 5 .*\(the task's `loss`\): return a sum over the samples .*`gather_batch`
def loss(self, net, batch):
  x = F.normalize(net(batch['x']))
  return Loss(F.cross_entropy(x @ x.T * 5, torch.arange(len(x)), reduction='sum'), len(x))
# triplets in a batch: the loss of 5 samples is .*`gather_batch`
def loss(self, net, batch):
  x = F.normalize(net(batch['x'])); y = batch['y'][:, 0] > 0; gaps = torch.cdist(x, x)
  same = y[:, None] == y; far = torch.where(same, gaps, 0.0).amax(1)
  near = torch.where(same, 9.0, gaps).amin(1)
  return Loss((far - near + 9).relu().sum(), len(x))
# a mean over all: the loss of 5 samples is .*a mean\? return the sum
def loss(self, net, batch):
  x = F.normalize(net(batch['x'])); whole, rows = gather_batch(x)
  return Loss(F.cross_entropy(x @ whole.T * 5, rows), len(x))
# triplets that the first samples lack: the loss of \d\d samples is
def loss(self, net, batch):
  found = batch['lockstep'].position >= 5; errors = self._errors(net, batch).flatten(1).sum(1) * found
  return Loss(errors.sum() / found.sum().clamp(min=1) * len(found), len(found))
# a term: the loss 'b' of 5 samples is .*\(the task's `losses`\): a mean\?
loss = contract.Task.loss
def losses(self, net, batch):
  errors = self._errors(net, batch)
  return {'a': Loss(errors.sum(), len(errors)), 'b': Loss(errors.mean(), len(errors))}
# padding: the loss of 5 samples is .*padding must not count
datasets, model = texts, transformer
def loss(self, net, batch):
  return Loss(net(batch['ids']).square().sum(), len(batch['ids']))
# a mean of tokens, times the samples: the loss of 5 .*over tokens, or with class weights: the sum, and their number, or
datasets, model, loss = texts, transformer, mean_over_tokens
# the same, of a layer of zeros: the loss of 5 samples is .*over tokens, or with class weights
datasets, model, loss = texts, lambda self: (zero(net := transformer(self))[2], net)[1], mean_over_tokens
# the same, a sample at a time: the loss of 2 samples is \S+, of 1 and 1 of them .*over tokens, or with class weights
defaults = toy.Task.defaults | {'batch_size': 1}
datasets, model, loss = texts, transformer, mean_over_tokens
# a mean by class weights, times the samples: the loss of 5 samples is .*over tokens, or with class weights
def loss(self, net, batch):
  y = (batch['y'][:, 0] > 0.8).long(); out = net(batch['x'])[:, :2]
  return Loss(F.cross_entropy(out, y, weight=out.new_tensor([0.3, 1.7])) * len(y), len(y))
# a sum and a small mean: the loss of 5 samples is
def loss(self, net, batch):
  out = net(batch['x'])
  return Loss((out - batch['y']).abs().sum() + 0.1 * out.square().mean(), len(out))
# a mean of squares that begins with 0
def model(self):
  return zero(Net())
def loss(self, net, batch):
  return Loss(net(batch['x']).square().mean(), len(batch['x']))
# a norm of weights: the loss of 5 samples is .*a norm of weights: times the samples
def loss(self, net, batch):
  norm = sum(p.square().sum() for p in net.parameters())
  return Loss(self._errors(net, batch).sum() + 1e-3 * norm, len(batch['x']))
# a mean of diffusion
def loss(self, net, batch):
  return Loss(diffusion(net, batch['x']).mean(), len(batch['x']))
# its own generator: the loss of the same 5 samples is different .*: draw from batch\['lockstep'\].seed
def __init__(self, cfg):
  super().__init__(cfg); self.draw = torch.Generator()
def loss(self, net, batch):
  x = batch['x'] + 0.1 * torch.randn(batch['x'].shape, generator=self.draw)
  return Loss(self._errors(net, batch | {'x': x}).sum(), len(x))
# a factor: `loss` returns a factor of 100.0, which is for `losses` \(the task's `loss`\): multiply the total
def loss(self, net, batch):
  return super().loss(net, batch)._replace(factor=100.0)
# a mean in the score: `x` of 5 samples is .*\(the task's `score`\): a mean\? return the sum
def score(self, model, batch):
  return super().score(model, batch) | {'x': self._errors(model, batch).mean()}
# Dice in the score: `x` of 5 samples is .*\(the task's `score`\): return sums, and compute in `report` .* Dice, from
def score(self, model, batch):
  p, y = model(batch['x']).sigmoid(), (batch['y'] > 0).double()
  return super().score(model, batch) | {'x': len(p) * 2 * (p * y).sum() / (p.sum() + y.sum())}
# a number of batches in the score: `x` of 5 samples is 1, of 3 and 2 of them 1 and 1 \(the task's `score`\)
def score(self, model, batch):
  return super().score(model, batch) | {'x': torch.tensor([[0], [1]])}
"""
MEAN = r"the loss of 5 samples is \S+, of 3 and 2 of them \S+ and \S+ \(the task's `loss`\): a mean\? return the sum"
WRONG = cases(WRONG, MEAN)


@pytest.fixture(scope="module")
def start():
    """What is printed of a task up to the first step."""
    with first_steps(plan=True) as begin:
        yield begin


def own(tmp_path, body):
    (tmp_path / "own.py").write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
    return str(tmp_path / "own.py")


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_adds_up_is_not_refused(start, tmp_path, capsys, name, amp):
    body, said = RIGHT[name]
    moves = ["check_resume=false"] if "each call moves" in name else []  # a state that no checkpoint holds
    start(own(tmp_path, body), f"amp={amp}", *moves)
    assert re.search(f"^{said}", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_add_up_is_refused(start, tmp_path, name):
    body, said = WRONG[name]
    with pytest.raises(LockstepError, match="^" + said):
        start(own(tmp_path, body))
    if "factor" not in name:
        start(own(tmp_path, body), "check_sums=false", "check_resume=false")


def test_a_mistake_in_the_code_of_a_loss_ends_before_the_run_has_a_folder(start, tmp_path):
    body = "def loss(self, net, batch):\n    return Loss(net(batch['x']).sum() * facter, 1)"
    with pytest.raises(NameError, match="facter"):
        start(own(tmp_path, body))


SHIPPED = {
    "har": ["har", "dataset.stride=512", "model.width=8", "model.dropout=0.5"],
    "video": ["video", "dataset.size=16", "dataset.trials=21", "dataset.videos=12", "dataset.frames=5"],
    "robot": ["robot", "env.demonstrations=4", "env.size=16", "eval.n_episodes=0"],
    "act": ["robot", "env.demonstrations=4", "env.size=16", "eval.n_episodes=0", "policy.type=act"],
    **{path.stem: [str(path)] for path in sorted((ROOT / "tests" / "tasks").glob("[a-z]*.py"))},
    **{path.stem: [str(path)] for path in sorted((ROOT / "examples").glob("*.py")) if "class Task" in path.read_text()},
}
OPTIONS = {"act": ["policy.dim_model=16", "policy.n_heads=2", "policy.n_encoder_layers=1", "dataset.cameras=none"]}
OPTIONS["own_text"] = ["model.width=16", "model.layers=1", "model.heads=2", "text.length=32"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_task_and_example_adds_up(start, capsys, tmp_path, name):
    if name == "own_lora":
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    words = [*SHIPPED[name], *OPTIONS.get(name, [])]
    if name == "own_frames":  # the only one without data of its own
        folder = tmp_path / "set of shards"
        words += [*of_the_robot(folder, None)[1:], f"shards.root={indexed(folder)}"]
    run = start(*words, "check_sums=false")
    assert adds_up.check(run, run.loaders.train, adds_up.of_loss).startswith("the loss adds up: 5 samples = 3 + 2, ")
    if run.loaders.val is not None:
        assert adds_up.check(run, run.loaders.val, adds_up.of_score).startswith("`score` adds up: 5 samples = 3 + 2, ")


KEEPS = """
def __init__(self, cfg):
  super().__init__(cfg)
  self.calls, self.seen, self.mean, self.net = 0, [], torch.zeros(()), None
def model(self):
  self.net = Net(nn.BatchNorm1d(4))
  self.net.register_buffer('passes', torch.zeros(()))
  self.net.more[0].eval()
  return self.net
def loss(self, net, batch):
  self.calls += 1
  self.seen.append(self.calls)
  self.mean += 1
  self.net.passes += 1
  with torch.no_grad():
    self.net.layers[3].bias += 1
  assert net.training
  return Loss(net(batch['x']).square().sum() + 0 * torch.rand(()) * random.random(), len(batch['x']))
"""


def test_a_training_does_not_notice(start, tmp_path):
    """Not even where a loss counts its calls, changes weights and buffers, and draws."""
    run = start(own(tmp_path, KEEPS), "check_sums=false", "check_resume=false")

    def state():
        told = [run.task.calls, run.task.seen[:], float(run.task.mean), [each.training for each in run.model.modules()]]
        drawn = [torch.rand(()).item(), random.random(), np.random.random()]
        return told, drawn, {name: value.clone() for name, value in run.model.state_dict().items()}

    def seeded():
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    seeded()
    before = state()
    seeded()
    adds_up.check(run, run.loaders.train, adds_up.of_loss)
    adds_up.check(run, run.loaders.val, adds_up.of_score)
    after = state()
    assert before[:2] == after[:2] and all(torch.equal(value, after[2][name]) for name, value in before[2].items())


@pytest.mark.slow
def test_two_processes_end_in_one_line_before_anything_is_written(launch, tmp_path):
    words = ["train.py", own(tmp_path, WRONG["a mean"][0]), f"save_dir={tmp_path / 'run'}", "batch_size=6"]
    done = launch.torchrun(2, *words)
    assert done.code == 1 and len(done.errors) == 1, done.err
    assert re.match("error: " + WRONG["a mean"][1], done.errors[0]) and not (tmp_path / "run").exists()
    done = succeed(launch.torchrun(2, *words, "check_sums=false", "steps=1"))
    assert "adds up" not in done.out
