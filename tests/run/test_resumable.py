"""What a checkpoint would not bring back is named after the first step, in one line."""

import re

import pytest
import torch
from conftest import cases, succeed
from test_loop import steps  # noqa: F401, a fixture

from engine.contract import LockstepError
from plugins import preflight
from plugins.preflight import resume_check

HEAD = """
from collections import namedtuple
from dataclasses import dataclass
import numpy
import torch
from torch import nn
from engine import global_loss
from engine.contract import ChainedOptimizer
from tests.tasks.toy import Task as Toy

Pair = namedtuple("Pair", "a b")

class Own(torch.optim.Optimizer):
    t, factor = 0, 1.0

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.t, self.seen, self.noise = 0, {"steps": torch.tensor(0)}, torch.Generator()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.one(p, self.state[p])
                p.add_(p.grad, alpha=-group["lr"])

    def one(self, p, state):
        state["moment"] = torch.zeros_like(p, dtype=torch.float64)

class Lookahead(torch.optim.Optimizer):
    # slow weights beside those of another optimizer, as people paste it

    def __init__(self, base):
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.param_groups = base, base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                p.copy_(slow.lerp_(p, 0.5))

def wrapped(kind):
    def optimizer(self, model):
        return kind(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    return optimizer

class Whole(Lookahead):
    def state_dict(self):
        return super().state_dict() | {"base": self.base.state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict({key: value for key, value in state.items() if key != "base"})
        self.base.load_state_dict(state["base"])

class Shared(Whole):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.param_groups = self.base.param_groups

class Task(Toy):
    def optimizer(self, model):
        return Own(model.parameters(), self.cfg.optim.lr)
"""

BAD_AT_FIRST = """

def loss(self, net, batch):
    self.calls = getattr(self, "calls", 0) + isinstance(global_loss.current_pass, tuple)  # not of the pre-flight
    loss = Toy.loss(self, net, batch)
    return loss._replace(total=loss.total / 0) if self.calls == 1 else loss
Task.loss = loss
"""

NOT_HELD = (
    "Own has changed its t, which no checkpoint holds (the task's `optimizer`): keep it in self.state[p], or in a "
    "param_group: these are restored; check_resume=false trains all the same"
)
COUNTS = "Own.one = lambda self, p, state: vars(self).update(t=self.t + 1)"

FORGOTTEN = r"""
# a tensor: Own has changed its seen.steps, which
Own.one = lambda self, p, state: self.seen['steps'].add_(1)
# a counter made by the first step: Own has changed its late, which
Own.one = lambda self, p, state: vars(self).update(late=getattr(self, 'late', 0) + 1)
# moments made by the first step: Own has changed its moments, which
Own.one = lambda self, p, state: vars(self).setdefault('moments', {}).update({p: p.grad.clone()})
# a generator made by the first step: Own has changed its late, which
Own.one = lambda self, p, state: torch.rand(1, generator=vars(self).setdefault('late', torch.Generator()))
# one tensor twice: Own keeps one tensor as 0.m and 0.v of its state: a checkpoint makes two of it .*: keep one for
def one(self, p, state):
    state['m'] = state['v'] = p.grad.clone()
Own.one = one
# one tensor for all parameters: Own keeps one tensor as 0.step and 1.step of its state: a checkpoint makes two of it
def begin(self, params, lr):
    super(Own, self).__init__(params, {'lr': lr})
    self.shared = torch.zeros(())
Own.one, Own.__init__ = lambda self, p, state: state.update(step=self.shared), begin
# a moment by parameter: Own has changed its seen, which
def begin(self, params, lr):
    super(Own, self).__init__(params, {'lr': lr})
    self.seen = {p: torch.zeros_like(p) for group in self.param_groups for p in group['params']}
Own.one, Own.__init__ = lambda self, p, state: self.seen[p].add_(p.grad), begin
# a generator: Own has changed its noise, which
Own.one = lambda self, p, state: torch.rand(1, generator=self.noise)
# one in a chain: Own has changed its t, which
Own.one = lambda self, p, state: vars(self).update(t=self.t + 1)
def optimizer(self, model):
    first, *rest = model.parameters()
    return ChainedOptimizer(torch.optim.SGD([first], lr=0.01), Own(rest, 0.01))
Task.optimizer = optimizer
# the state below a wrapper: a checkpoint does not hold 'momentum_buffer' of SGD, an optimizer inside of Lookahead
Task.optimizer = wrapped(Lookahead)
# groups of its own after loading: the rates of the schedule do not reach SGD, an optimizer inside of Whole, after load
Task.optimizer = wrapped(Whole)
# a named tuple: hold it: it holds \w+\.Pair: neither a tensor nor a plain value \(what Own keeps\): keep tensors,
Own.one = lambda self, p, state: state.update(m=Pair(p + 1, p + 2))
# a number of NumPy: a checkpoint cannot hold it: it holds numpy
Own.one = lambda self, p, state: state.update(n=numpy.float64(1))
# what its own loading loses: Own does not get state.0.moment back as it was saved \(.*: mend its load_state_dict
def load(self, state):
    torch.optim.Optimizer.load_state_dict(self, state)
    for kept in self.state.values():
        kept['moment'] = kept['moment'].double() + 1
Own.load_state_dict = load
# what its own loading drops: Own does not get state.0.moment back as it was saved
Own.load_state_dict = lambda self, state: self.state.clear()
# what cannot be loaded: Own cannot load what it has saved: KeyError: 'own' \(the task's `optimizer`\): mend its
def load(self, state):
    raise KeyError('own')
Own.load_state_dict = load
# a buffer that comes late: 0.cache is not there at first, and float32 \(12,\) after a step \(the task's `model`\): give
class Late(nn.Linear):
    def forward(self, x):
        if self.training:
            self.register_buffer('cache', torch.zeros(len(x)))
        return super().forward(x.float())
Task.model = lambda self: nn.Sequential(Late(8, 4))
# a module's own state: \(the extra state of a module\): keep tensors
class Odd(nn.Linear):
    def get_extra_state(self):
        return numpy.int64(3)
    def set_extra_state(self, state):
        pass
    def forward(self, x):
        return super().forward(x.float())
Task.model = lambda self: nn.Sequential(Odd(8, 4))
# metadata: \(the task's `metadata`\): keep tensors
Task.metadata = lambda self: {'mean': numpy.float32(2)}
"""
FORGOTTEN = cases(FORGOTTEN) | {"a counter": (COUNTS, re.escape(NOT_HELD))}


@pytest.fixture
def own(tmp_path):
    """Return the path of a task of which a text tells what it changes."""

    def write(code):
        (tmp_path / "own.py").write_text(HEAD + code)
        return str(tmp_path / "own.py")

    return write


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORGOTTEN)
def test_what_a_new_process_would_not_have_is_named(steps, own, kind):  # noqa: F811
    code, printed = FORGOTTEN[kind]
    run, outcomes = steps("global_batch=12", "batch_size=12", task=own(code))
    preflight.compare_ranks(run)
    next(outcomes)
    with pytest.raises(LockstepError, match=printed):
        preflight.compare_weights(run)
    run, outcomes = steps("check_resume=false", task=own(code))
    next(outcomes)
    preflight.compare_weights(run)


EMPTIES = """
def one(self, p, state):
    state["moment"] = 0.9 * state.get("moment", torch.zeros_like(p)) + p.grad

def load(self, state):
    moments = [kept.pop("moment") for kept in state["state"].values()]
    torch.optim.Optimizer.load_state_dict(self, state)
    for p, moment in zip((p for group in self.param_groups for p in group["params"]), moments, strict=True):
        self.state[p]["moment"] = moment.clone()

Own.one, Own.load_state_dict = one, load
"""


FINE = """
# what a step makes anew
def one(self, p, state):
    self.trained = [p]
    self.begun = True
Own.one = one
# its own state
Own.one = lambda self, p, state: state.update(m=(p.grad.clone(), {'n': 1}))
# a wrapper that saves all
Task.optimizer = wrapped(Shared)
# AdamW with other attributes
class Own(torch.optim.AdamW):
    pass
Task.optimizer = lambda self, model: Own(model.parameters(), lr=0.01, fused=True)
"""
FINE = cases(FINE) | {"what empties the state that it loads": (EMPTIES, "")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FINE)
def test_what_a_new_process_has_is_not(steps, own, kind):  # noqa: F811
    """What runs is compared, and not changed: the inner dicts of a state dict are the optimizer's own."""
    run, outcomes = steps("global_batch=12", "batch_size=12", task=own(FINE[kind][0]))
    next(outcomes)
    preflight.compare_weights(run)
    assert run.record.fresh is None, "it has been compared"
    if FINE[kind][0] == EMPTIES:
        assert all(torch.equal(run.optimizer.state[p]["moment"], p.grad) for p in run.model.parameters())


@pytest.mark.parametrize("resumed", [False, True], ids=["from the start", "resumed"])
def test_an_optimizer_that_has_not_begun_is_looked_at_after_its_first_step(launch, own, tmp_path, resumed):
    """Where the first step is skipped, as fp16's often are, and of a resumed run; and not only at check_every."""
    run = tmp_path / "run"
    words = ["train.py", own(COUNTS + BAD_AT_FIRST), "save_every=1", "check_every=0", f"save_dir={run}"]
    if resumed:
        succeed(launch.python(*words, "check_resume=false", "steps=3", "schedule.horizon=40"))
    done = launch.python(*words, "steps=40")
    first = 4 if resumed else 1  # it is skipped
    assert done.errors == [f"error: {NOT_HELD}"] and not (run / f"step_{first + 1}.pt").exists()
    assert (run / f"step_{first}.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["save", "load_state"])
def test_a_loader_process_that_is_killed_meanwhile_is_no_fault_of_the_task(steps, monkeypatch, call):  # noqa: F811
    """torch raises it from a signal handler, wherever the main thread is."""

    def interrupted(*given):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    run, outcomes = steps("global_batch=12", "batch_size=12")
    next(outcomes)
    owner = resume_check.torch if call == "save" else resume_check
    monkeypatch.setattr(owner, call, interrupted)
    with pytest.raises(RuntimeError, match="is killed by signal"):
        resume_check.check(run)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["ddp.strategy=fsdp", "virtual_workers=2"]], ids=["plain", "shares"])
def test_all_ranks_end_with_one_line_before_anything_is_lost(launch, own, tmp_path, words):
    save = f"save_dir={tmp_path / 'run'}"
    done = launch.torchrun(2, "train.py", own(COUNTS), *words, save)
    assert done.errors == [f"error: {NOT_HELD}"] and not list(tmp_path.glob("run/*.pt"))
    assert "Done: " in succeed(launch.python("train.py", own(COUNTS), "check_resume=false", save)).out
