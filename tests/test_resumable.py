"""What a checkpoint would not bring back is named after the first step, in one line."""

import re

import pytest
import torch
from conftest import succeed
from test_loop import steps  # noqa: F401, a fixture

from engine import preflight
from engine.contract import LockstepError
from engine.preflight import resumable

HEAD = """
from collections import namedtuple
from dataclasses import dataclass
import numpy
import torch
from torch import nn
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

class Task(Toy):
    def optimizer(self, model):
        return Own(model.parameters(), self.cfg.optim.lr)
"""

BAD_AT_FIRST = """
def loss(self, net, batch):
    self.calls = getattr(self, "calls", 0) + 1
    loss = Toy.loss(self, net, batch)
    return loss._replace(total=loss.total / 0) if self.calls == 1 else loss
Task.loss = loss
"""

NOT_HELD = (
    "Own has changed its {}, which no checkpoint holds (the task's `optimizer`): keep it in self.state[p], or in a "
)
NOT_HELD += "param_group: these are restored; check_resume=false trains all the same"
PLAIN = "a checkpoint cannot hold it: it holds {}: neither a tensor nor a plain value (what Own keeps): keep tensors,"

FORGOTTEN = {
    "a counter": ("Own.one = lambda self, p, state: vars(self).update(t=self.t + 1)", NOT_HELD.format("t")),
    "a tensor": ("Own.one = lambda self, p, state: self.seen['steps'].add_(1)", NOT_HELD.format("seen.steps")),
    "a counter made by the first step": (
        "Own.one = lambda self, p, state: vars(self).update(late=getattr(self, 'late', 0) + 1)",
        NOT_HELD.format("late"),
    ),
    "moments made by the first step": (
        "def one(self, p, state):\n    vars(self).setdefault('moments', {})[p] = p.grad.clone()\nOwn.one = one",
        NOT_HELD.format("moments"),
    ),
    "a generator made by the first step": (
        "Own.one = lambda self, p, state: torch.rand(1, generator=vars(self).setdefault('late', torch.Generator()))",
        NOT_HELD.format("late"),
    ),
    "one tensor twice": (
        "def one(self, p, state):\n    state['m'] = state['v'] = p.grad.clone()\nOwn.one = one",
        "Own keeps one tensor as 0.m and 0.v of its state: a checkpoint makes two of it (the task's `optimizer`): keep "
        "one for each; check_resume=false trains all the same",
    ),
    "one tensor for all parameters": (
        "def one(self, p, state):\n    state['step'] = vars(self).setdefault('shared', torch.zeros(()))\n"
        "def begin(self, params, lr):\n    super(Own, self).__init__(params, {'lr': lr})\n"
        "    self.shared = torch.zeros(())\nOwn.one, Own.__init__ = one, begin",
        "Own keeps one tensor as 0.step and 1.step of its state: a checkpoint makes two of it",
    ),
    "a moment by parameter": (
        "def one(self, p, state):\n    self.seen[p] += p.grad\n"
        "def begin(self, params, lr):\n    super(Own, self).__init__(params, {'lr': lr})\n"
        "    self.seen = {p: torch.zeros_like(p) for group in self.param_groups for p in group['params']}\n"
        "Own.one, Own.__init__ = one, begin",
        NOT_HELD.format("seen"),
    ),
    "a generator": ("Own.one = lambda self, p, state: torch.rand(1, generator=self.noise)", NOT_HELD.format("noise")),
    "one in a chain": (
        "Own.one = lambda self, p, state: vars(self).update(t=self.t + 1)\n"
        "Task.optimizer = lambda self, model: ChainedOptimizer("
        "torch.optim.SGD(list(model.parameters())[:2], lr=0.01), Own(list(model.parameters())[2:], 0.01))",
        NOT_HELD.format("t"),
    ),
    "a named tuple": (
        "Own.one = lambda self, p, state: state.update(m=Pair(p + 1, p + 2))",
        PLAIN.format("REALM.Pair"),
    ),
    "a number of NumPy": (
        "Own.one = lambda self, p, state: state.update(n=numpy.float64(1))",
        "a checkpoint cannot hold it: it holds numpy",
    ),
    "what its own loading loses": (
        "def load(self, state):\n"
        "    torch.optim.Optimizer.load_state_dict(self, state)\n"
        "    for kept in self.state.values():\n        kept['moment'] = kept['moment'].double() + 1\n"
        "Own.load_state_dict = load",
        "Own does not get state.0.moment back as it was saved (the task's `optimizer`): mend its load_state_dict",
    ),
    "what its own loading drops": (
        "Own.load_state_dict = lambda self, state: self.state.clear()",
        "Own does not get state.0.moment back as it was saved",
    ),
    "what cannot be loaded": (
        "def load(self, state):\n    raise KeyError('own')\nOwn.load_state_dict = load",
        "Own cannot load what it has saved: KeyError: 'own' (the task's `optimizer`): mend its load_state_dict; check_",
    ),
    "a buffer that comes late": (
        "class Late(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if self.training:\n            self.register_buffer('cache', torch.zeros(len(x)))\n"
        "        return super().forward(x.float())\n"
        "Task.model = lambda self: nn.Sequential(Late(8, 4))",
        "no checkpoint of this model can be loaded: 0.cache is not there at first, and float32 (12,) after a step (the "
        "task's `model`): give it that form in `__init__`, or register it with persistent=False",
    ),
    "a module's own state": (
        "class Odd(nn.Linear):\n"
        "    def get_extra_state(self):\n        return numpy.int64(3)\n"
        "    def set_extra_state(self, state):\n        pass\n"
        "    def forward(self, x):\n        return super().forward(x.float())\n"
        "Task.model = lambda self: nn.Sequential(Odd(8, 4))",
        "(the extra state of a module): keep tensors",
    ),
    "metadata": ("Task.metadata = lambda self: {'mean': numpy.float32(2)}", "(the task's `metadata`): keep tensors"),
}


@pytest.mark.parametrize("kind", FORGOTTEN)
def test_what_a_new_process_would_not_have_is_named(steps, tmp_path, kind):  # noqa: F811
    code, said = FORGOTTEN[kind]
    (tmp_path / "own.py").write_text(HEAD + code)
    run, outcomes = steps("global_batch=12", "batch_size=12", task=str(tmp_path / "own.py"))
    preflight.compare_ranks(run)
    next(outcomes)
    said = re.escape(said).replace("REALM", r"\w+")
    with pytest.raises(LockstepError, match=said):
        preflight.compare_weights(run)
    run, outcomes = steps("check_resume=false", task=str(tmp_path / "own.py"))
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


def test_an_optimizer_that_empties_what_it_loads_keeps_its_moments(steps, tmp_path):  # noqa: F811
    """What runs is compared, and not changed: the inner dicts of a state dict are the optimizer's own."""
    (tmp_path / "own.py").write_text(HEAD + EMPTIES)
    run, outcomes = steps(task=str(tmp_path / "own.py"))
    next(outcomes)
    preflight.compare_weights(run)
    assert run.record.fresh is None, "it has been compared"
    for p in run.model.parameters():
        assert torch.equal(run.optimizer.state[p]["moment"], p.grad)


@pytest.mark.parametrize("resumed", [False, True], ids=["from the start", "resumed"])
def test_an_optimizer_that_has_not_begun_is_looked_at_after_its_first_step(launch, tmp_path, resumed):
    """Where the first step is skipped, as fp16's often are, and of a resumed run; and not only at check_every."""
    code, said = FORGOTTEN["a counter"]
    (tmp_path / "own.py").write_text(HEAD + code + BAD_AT_FIRST)
    words = ["train.py", str(tmp_path / "own.py"), "save_every=1", "check_every=0", f"save_dir={tmp_path / 'run'}"]
    if resumed:
        succeed(launch.python(*words, "check_resume=false", "steps=3", "schedule.horizon=40"))
    done = launch.python(*words, "steps=40")
    (error,) = done.errors
    first = 4 if resumed else 1  # it is skipped
    assert said in error and not (tmp_path / f"run/step_{first + 1}.pt").exists()
    assert (tmp_path / f"run/step_{first}.pt").exists()


FINE = {
    "what a step makes anew": "def one(self, p, state):\n    self.trained = [p]\n    self.begun = True\nOwn.one = one",
    "its own state": "def one(self, p, state):\n    state['m'] = p.grad.clone(), {'n': 1}\nOwn.one = one",
    "AdamW with other attributes": (
        "class Own(torch.optim.AdamW):\n    pass\n"
        "Task.optimizer = lambda self, model: Own(model.parameters(), lr=0.01, fused=True)"
    ),
}


@pytest.mark.parametrize("kind", FINE)
def test_what_a_new_process_has_is_not(steps, tmp_path, kind):  # noqa: F811
    (tmp_path / "own.py").write_text(HEAD + FINE[kind])
    run, outcomes = steps("global_batch=12", "batch_size=12", task=str(tmp_path / "own.py"))
    next(outcomes)
    preflight.compare_weights(run)
    assert run.record.fresh is None


@pytest.mark.parametrize("call", ["save", "load_state"])
def test_a_loader_process_that_is_killed_meanwhile_is_no_fault_of_the_task(steps, monkeypatch, call):  # noqa: F811
    """torch raises it from a signal handler, wherever the main thread is."""

    def interrupted(*given):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    run, outcomes = steps("global_batch=12", "batch_size=12")
    next(outcomes)
    owner = resumable.torch if call == "save" else resumable
    monkeypatch.setattr(owner, call, interrupted)
    with pytest.raises(RuntimeError, match="is killed by signal"):
        resumable.check(run)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["optim.zero=true", "virtual_workers=2"]], ids=["plain", "shares"])
def test_all_ranks_end_with_one_line_before_anything_is_lost(launch, tmp_path, words):
    (tmp_path / "own.py").write_text(HEAD + FORGOTTEN["a counter"][0])
    done = launch.torchrun(2, "train.py", str(tmp_path / "own.py"), *words, f"save_dir={tmp_path / 'run'}")
    (error,) = done.errors
    assert error == f"error: {NOT_HELD.format('t')}" and not list(tmp_path.glob("run/*.pt"))
    done = launch.python("train.py", str(tmp_path / "own.py"), "check_resume=false", f"save_dir={tmp_path / 'run'}")
    assert "Done: " in succeed(done).out
