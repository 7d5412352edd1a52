"""Turns: a step trains the weights of one turn, on any processes, as a plain loop would; killed, resumed, refused."""

import functools
import itertools
import json
import re
import signal
import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, cases, launching, succeed
from refusals import refused
from runs import records
from saved import assert_same, assert_same_bits, load

import tasks
import train
from engine import config, launch
from engine.config import parse
from engine.contract import LockstepError, sample_seeds, uniform
from engine.files.archive import EXACT_PARTS
from plugins import preflight
from plugins.resilience import status
from tests.tasks.turns import SHARES

TASK = str(ROOT / "tests" / "tasks" / "turns.py")
BITS, MANY = (str(ROOT / "tests" / "ranks" / name) for name in ("bits.py", "many.py"))

KINDS = {
    "gan": ["own.each=true"],
    "penalty": ["own.kind=penalty", "own.each=true"],
    "one optimizer": ["own.kind=gan"],
    "factors": ["own.kind=factors", "optim.name=sgd", "optim.momentum=0.9"],
    "unfreeze": ["own.kind=unfreeze"],
    "freeze": ["own.kind=freeze"],
}
CUTS = {"1x3x4": (1, 3, 4), "2x6": (2, 6, 1), "2x3x2": (2, 3, 2), "3x4": (3, 4, 1)}
"""processes, samples per process and pass, passes per step"""


def plain_optimizer(kind, task, model):
    """Of each turn that of torch, over the weights that have a gradient."""
    if task.cfg.own.each:
        return {
            "critic": torch.optim.RMSprop(model.critic.parameters(), lr=0.02),
            "generator": torch.optim.AdamW(model.generator.parameters(), lr=0.01, weight_decay=0.1),
        }
    if kind == "factors":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    matrices, biases = ([p for p in model.parameters() if (p.ndim > 1) == two] for two in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.02)


def plain_loss(kind, model, x, noise, turn):
    if kind not in ("gan", "penalty", "one optimizer"):
        return (model(x) - x).square().sum(1).mean()
    fake = model.generator(noise[:, :2])
    if turn == "generator":
        return F.softplus(-model.critic(fake)).mean()
    loss = F.softplus(-model.critic(x)).mean() + F.softplus(model.critic(fake.detach())).mean()
    if kind == "penalty":
        points = torch.lerp(x, fake.detach(), noise[:, 2:]).requires_grad_()
        (slopes,) = torch.autograd.grad(model.critic(points).sum(), points, create_graph=True)
        loss = loss + (slopes.norm(dim=1) - 1).square().mean()
    return loss


def plain_turn(kind, step):
    """The turn of a step, and the modules that it trains."""
    if kind == "factors":
        return (name := ("left", "right")[step % 2]), (name,)
    if kind in ("unfreeze", "freeze"):
        head = (step // 6 < 2) == (kind == "unfreeze")
        return ("head", ("head",)) if head else ("all", ("head", "body"))
    return (name := ("critic", "critic", "generator")[step % 3]), (name,)


@functools.cache
def plain_loop(kind):
    """Eighteen steps in plain torch and float64; returns the weights, their averages, and each step's numbers."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        task = tasks.load(TASK)(parse([TASK, *KINDS[kind]], tasks.load).cfg)
        torch.manual_seed(3)
        (data, _), model, numbers = task.datasets(), task.model(), []
        optimizer = plain_optimizer(kind, task, model)
        averages = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in range(18):
            epoch, first = step // 6, 12 * (step % 6)
            rows = np.random.default_rng((3, epoch)).permutation(61)[first : first + 12]
            noise = uniform(sample_seeds(3, epoch, first + torch.arange(len(rows))), 3).double()
            turn, modules = plain_turn(kind, step)
            mine = [p for name in modules for p in getattr(model, name).parameters()]
            for p in model.parameters():
                p.grad = None
            loss = plain_loss(kind, model, data.x[rows], noise, turn)
            for p, grad in zip(mine, torch.autograd.grad(loss, mine), strict=True):
                p.grad = grad
            norm = torch.nn.utils.clip_grad_norm_(mine, 0.5)
            if kind == "factors":  # the decay of the shipped SGD is decoupled
                torch._foreach_mul_([p.data for p in mine], 1 - 0.02 * 0.1)
            (optimizer[turn] if isinstance(optimizer, dict) else optimizer).step()
            for name, p in model.named_parameters():
                if name.partition(".")[0] in modules:
                    averages[name].lerp_(p.detach(), 0.1 if step else 1.0)
            numbers.append({f"loss/{turn}": loss.item(), "grad_norm": norm.item()})
        return model.state_dict(), averages, numbers
    finally:
        torch.set_default_dtype(dtype)


def runs_of(cut, folder):
    _, batch, passes = CUTS[cut]
    size = [f"batch_size={batch}", f"grad_accum_steps={passes}", "global_batch=12", "log_every=1", "seed=3", "amp=off"]
    backend = ["ddp.backend=gloo"] if cut == "2x6" else []
    for name, words in KINDS.items():
        yield [TASK, *words, *size, *backend, "optim.ema_decay=0.9", f"save_dir={folder}/{name}"]


@pytest.fixture(scope="module")
def trained(once):
    """Returns a function: the folder of a cut, where all kinds are trained once."""

    def train_all(cut, folder):
        runs = json.dumps(list(runs_of(cut, folder)))
        with launching() as launch:
            processes = CUTS[cut][0]
            succeed(launch.python(MANY, runs) if processes == 1 else launch.torchrun(processes, MANY, runs))

    return lambda cut: once(f"turns {cut}", functools.partial(train_all, cut))


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_are_those_of_a_plain_loop(trained, kind, cut):
    """Weights, averages, the loss and the norm of each step, with the name of its turn."""
    folder = trained(cut) / kind
    model, averages, numbers = plain_loop(kind)
    ours = load(folder)
    for name, value in model.items():
        torch.testing.assert_close(ours["model"][name], value, rtol=1e-9, atol=1e-12)
    for name, value in averages.items():
        torch.testing.assert_close(ours["ema"][f"module.{name}"], value, rtol=1e-9, atol=1e-12)
    found = records(folder, "train")
    assert len(found) == 18
    for line, step in zip(found, numbers, strict=True):
        turn, of_loss = line.pop("turn"), [name for name in line if name.startswith("loss")]
        assert of_loss == [f"loss/{turn}"] and ("accuracy/critic" in line) == (turn == "critic")
        assert {name: line[name] for name in step} == pytest.approx(step, rel=1e-9, abs=1e-13)


@pytest.mark.slow
def test_the_numbers_of_turns_are_not_mixed(launch, tmp_path):
    """In a line for several steps, in TensorBoard's names, on the terminal, and in the plan."""
    words = ["train.py", TASK, "own.each=true", "steps=12", "seed=3", "amp=off"]
    succeed(launch.python(*words, "log_every=1", f"save_dir={tmp_path / 'one'}"))
    done = succeed(launch.python(*words, "log_every=6", f"save_dir={tmp_path / 'six'}"))
    steps, line = records(tmp_path / "one", "train"), records(tmp_path / "six", "train")[0]
    samples = [12, 12, 12, 12, 12, 1]
    for turn in SHARES:
        mine = [(step[f"loss/{turn}"], n) for step, n in zip(steps, samples, strict=False) if step["turn"] == turn]
        mean = sum(loss * n for loss, n in mine) / sum(n for _, n in mine)
        assert line[f"loss/{turn}"] == pytest.approx(mean, rel=1e-12)
    assert line["turn"] == "generator" and "loss/critic " in done.out and "Train Loss/critic: " in done.out
    assert "turns            critic 41 parameters, 8 steps; generator 51 parameters, 4 steps" in done.out
    assert "turn critic: the loss adds up: 5 samples = 3 + 2" in done.out
    assert "turn generator: the loss adds up: 5 samples = 3 + 2" in done.out


# ---- the same bits, killed and resumed ----

HARD = ["virtual_workers=4", "global_batch=12", "batch_size=2", "optim.ema_decay=0.9", "seed=3", "log_every=2"]
HARD += ["schedule.kind=cosine", "schedule.horizon=18", "own.bad=5"]
BITWISE = {
    "gan": ["own.each=true", "amp=fp16"],
    "penalty": ["own.kind=penalty", "amp=off"],
    "unfreeze": ["own.kind=unfreeze", "amp=off"],
    "freeze": ["own.kind=freeze", "amp=off", "optim.name=muon"],
}
WAY = ((2, 4), (3, 11), (1, 14), (2, 18))
"""Processes, and the step up to which they train. Each stop is in the middle of a cycle of turns."""


@pytest.fixture(scope="module")
def bits(once):
    def train_all(folder):
        with launching() as launch:
            for processes, last, place in ((1, 18, "straight"), *((*leg, "way") for leg in WAY)):
                runs = []
                for name, words in BITWISE.items():
                    runs.append(
                        [TASK, *HARD, *words, "eval_every=1", f"steps={last}", f"save_dir={folder / place / name}"]
                    )
                words = BITS, json.dumps(runs)
                succeed(launch.python(*words) if processes == 1 else launch.torchrun(processes, *words))

    return once("turns in bits", train_all)


@pytest.mark.slow
@pytest.mark.parametrize("name", BITWISE)
def test_turns_end_in_the_same_bits_on_any_processes(bits, name):
    """Straight on 1; and stopped in the middle of a cycle, and resumed on 2, 3, 1 and 2. Steps are skipped: a sample is
    not finite."""
    straight, way = load(bits / "straight" / name), load(bits / "way" / name)
    assert straight["progress"]["step"] == 18 and straight["progress"]["skipped"] > 0
    for part in EXACT_PARTS:
        assert_same(way.get(part), straight.get(part), part)


@pytest.mark.slow
def test_killed_within_a_cycle_it_ends_in_the_same_bits(launch, tmp_path):
    words = [TASK, *HARD, "own.each=true", "amp=off", "save_every=5", "eval_every=5"]
    straight, ours = tmp_path / "straight", tmp_path / "ours"
    succeed(launch.python("train.py", *words, f"save_dir={straight}"))
    words += [f"own.kill={ours}", f"save_dir={ours}"]
    assert launch.python("train.py", *words).code == -signal.SIGKILL
    done = succeed(launch.torchrun(2, "train.py", *words))
    assert re.search(r"Resuming .*: step 5,", done.out), "in the middle of a cycle"
    assert_same_bits(ours, straight)


# ---- the page ----


def shown():
    """The blocks of code of the section in docs/your-own-data.md: the GAN, and the unfreezing."""
    page = (ROOT / "docs/your-own-data.md").read_text()
    section = page.partition("## Train parts of a model in turns")[2].partition("## Define samples")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)


@pytest.mark.slow
def test_the_gan_of_the_page_makes_points_as_the_data(launch, tmp_path):
    (tmp_path / "gan.py").write_text(shown()[0])
    words = [str(tmp_path / "gan.py"), "global_batch=60", "epochs=60", "schedule.kind=constant", "log_every=50"]
    succeed(launch.torchrun(2, "train.py", *words, "amp=off", f"save_dir={tmp_path / 'run'}"))
    line = records(tmp_path / "run", "train")[0]
    assert {"loss/critic", "loss/generator"} <= line.keys() and "loss" not in line
    task = tasks.load(words[0])(parse(words, tasks.load).cfg)
    model = task.model()
    model.load_state_dict(load(tmp_path / "run")["model"])
    made = model.generator(uniform(torch.arange(500), 4))
    assert (made.mean(0) - 3).abs().max() < 1, "the data have the mean 3"


def test_the_head_of_the_page_trains_before_the_body(launch, tmp_path):
    body = textwrap.indent(shown()[1], "    ")
    (tmp_path / "own.py").write_text(f"from tests.tasks import turns as base\nclass Task(base.Task):\n{body}")
    words = ["train.py", str(tmp_path / "own.py"), "own.kind=unfreeze", "seed=3", "amp=off"]
    succeed(launch.python(*words, "steps=24", "save_every=18", f"save_dir={tmp_path / 'run'}", "keep_checkpoints=9"))
    early, late = (
        torch.load(tmp_path / "run" / name, weights_only=True)["model"] for name in ("step_18.pt", "last.pt")
    )
    torch.manual_seed(3)
    first = tasks.load(words[1])(parse(words[1:], tasks.load).cfg).model().state_dict()
    moved = lambda a, b: {name.partition(".")[0] for name in a if not torch.equal(a[name], b[name])}  # noqa: E731
    assert moved(first, early) == {"head"} and moved(early, late) == {"head", "body"}


# ---- what cannot be, in one line ----

HEAD = """
import os, torch
from torch import nn
from engine import contract
from engine.contract import Loss
from tests.tasks import turns

class Task(turns.Task):
    turns = {"critic": ("critic",), "generator": ("generator",)}
    calls = 0
    def turn(self, step, epoch):
        return "generator" if step % 3 == 2 else "critic"
"""

REFUSED = r"""
# a pattern without a weight: 'critc' matches no weight (turns['critic']): choose of names such as critic.0.0.weight
turns = {"critic": ("critc",), "generator": ("generator",)}
# a weight in no turn: critic.1.bias would never be trained: in no turn (the task's `turns`): add it to a turn, or
turns = {"critic": ("critic.0", "critic.1.weight"), "generator": ("generator",)}
# a text: the patterns of 'critic' are 'critic' (the task's `turns`): give a tuple of texts
turns = {"critic": ("critic"), "generator": ("generator",)}
# a list: it is a list (the task's `turns`): give {name: patterns of the weights}
turns = ["critic", "generator"]
# a name with a slash: 'a/b' is no name of a turn (the task's `turns`): give a text without a slash
turns = {"a/b": ("critic",), "generator": ("generator",)}
# no turns: the task has a method `turn`, and no turns (the task's `turns`): name them
turns = {}
# a frozen turn: the turn 'critic' trains no weight: all that it names are frozen
def model(self):
    net = super().model()
    net.critic.requires_grad_(False)
    return net
# an unknown name: step 17 belongs to 'both', and the turns are critic, generator (the task's `turn`): return one of
def turn(self, step, epoch):
    return "both" if step == 17 else "critic"
# no name: turn(2, 0) raises IndexError: tuple index out of range (the task's `turn`): return a name of `turns` for
def turn(self, step, epoch):
    return ("critic", "generator")[step]
# a counter: another time (the task's `turn`): let it depend on its two arguments alone
def turn(self, step, epoch):
    self.calls += 1
    return ("critic", "generator")[self.calls % 2]
# other keys: it returns optimizers for critic, and the turns are critic, generator (the task's `optimizer`): return
def optimizer(self, model):
    return {"critic": torch.optim.SGD(model.critic.parameters())}
# an optimizer of all weights: the optimizer of the turn critic holds generator.0.0.weight, which the turn does not
def optimizer(self, model):
    return {name: torch.optim.SGD(model.parameters(), lr=1.0) for name in self.turns}
# too few weights: generator.0.0.weight and 3 more in no group (the task's `optimizer`): add what is to be trained
def optimizer(self, model):
    return {name: torch.optim.SGD(model.critic.parameters(), lr=1.0) for name in self.turns}
# a weight of two turns: the weight critic.0.0.weight belongs to the turns critic and generator, and has an optimizer in
turns = {"critic": ("critic",), "generator": ("*",)}
def optimizer(self, model):
    return {"critic": torch.optim.SGD(model.critic.parameters()), "generator": torch.optim.SGD(model.parameters())}
# no optimizer: it returns a int (the task's `optimizer`): return a torch.optim.Optimizer
def optimizer(self, model):
    return {"critic": torch.optim.SGD(model.critic.parameters()), "generator": 3}
# the sums of one turn: the loss of 5 samples is
def loss(self, net, batch):
    loss = super().loss(net, batch)
    return loss if batch["lockstep"].turn == "critic" else loss._replace(total=loss.total / len(batch["x"]))
# no gradient in one turn: a Loss whose total has no graph
def loss(self, net, batch):
    loss = super().loss(net, batch)
    return loss if batch["lockstep"].turn == "critic" else loss._replace(total=loss.total.detach())
# a weight set free: the weight generator.0.0.weight and 3 more was set free during the training
def loss(self, net, batch):
    net.requires_grad_()
    return super().loss(net, batch)
"""
FAULTS = cases(REFUSED)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Returns a function that prepares the run of a task up to the first step."""
    monkeypatch.setattr(status, "current", status.Status())
    world = train.setup_distributed(config.Config(device="cpu"))

    def build(body, *words):
        path = tmp_path / "own.py"
        path.write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
        run = train.build(parse([str(path), "amp=off", f"save_dir={tmp_path / 'run'}", *words], tasks.load), world)
        preflight.check_sums(run)
        return run

    yield build
    launch.leave()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_turns_that_cannot_be_are_refused(prepared, tmp_path, name):
    body, text = FAULTS[name]
    refused(text, lambda: prepared(body))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both", "", None, ["critic"]], ids=repr)
def test_a_step_of_an_unknown_turn_is_refused(prepared, monkeypatch, name):
    """Before the first step not all steps of a long run are examined. An empty name would train all weights."""
    run = prepared("")
    monkeypatch.setattr(run.task, "turn", lambda step, epoch: name)
    text = f"step 0 belongs to {name!r}, and the turns are critic, generator (the task's `turn`): return one of"
    refused(text, run.begin_step)


def test_the_weights_of_all_turns_are_prepared(prepared):
    """And after the checks nothing is frozen: the first step begins its turn."""
    run = prepared("")
    assert all(p.requires_grad for p in run.model.parameters()) and run.trained.required == run.trained.by_turn[""]
    assert [*run.trained.turns()] == ["critic", "generator"]
    assert all(p.requires_grad for p in run.model.parameters()) and run.trained.required == run.trained.by_turn[""]


def take(run, steps):
    """Take the first steps of an epoch, with the checks that are due."""
    run.loaders.train.set_epoch(0)
    for passes in itertools.islice(run.steps(), steps):
        if train.train_step(run, passes).check:
            preflight.compare_weights(run)


FORGETS = """
class Counting(torch.optim.SGD):
    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        super().step()
def optimizer(self, model):
    critic, generator = model.critic.parameters(), model.generator.parameters()
    return {"critic": torch.optim.SGD(critic, lr=0.1), "generator": self.Counting(generator, lr=0.1)}
"""


def test_the_optimizer_of_each_turn_is_compared_after_its_first_step(prepared):
    run = prepared(FORGETS)
    with pytest.raises(LockstepError, match=r"^Counting has changed its calls, which no checkpoint holds"):
        take(run, 6)
    assert run.progress.step == 3


TERMS = """
loss = contract.Task.loss
def losses(self, net, batch):
    loss = turns.Task.loss(self, net, batch)
    terms = {batch["lockstep"].turn: loss._replace(sums=contract.Sums())}
    return terms if "generator" in terms else terms | {"half": terms["critic"]._replace(factor=0.5)}
"""


def test_the_terms_of_a_loss_are_of_its_turn(prepared):
    """Names, number and weights; of several passes, whose weights are added up before."""
    run = prepared(TERMS, "batch_size=6", "grad_accum_steps=2")
    take(run, 3)
    assert run.meter.terms.names == {"critic": ["critic", "half"], "generator": ["generator"]}


def test_virtual_workers_hold_no_gradients_of_other_turns(prepared, monkeypatch):
    """41 elements of the critic, and one for each of the four weights of the generator; the other way round 51 + 4."""
    run = prepared("", "virtual_workers=4", "batch_size=3", "global_batch=12")
    held, keep = set(), run.reducer._take_gradients

    def keep_gradients():
        keep()
        held.add((run.meter.turn, sum(grad.numel() for grad in run.reducer.nodes[-1].sums)))

    monkeypatch.setattr(run.reducer, "_take_gradients", keep_gradients)
    take(run, 3)
    assert held == {("critic", 41 + 4), ("generator", 51 + 4)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ddp.static_graph=true"], "ddp.static_graph=true with turns (ddp.static_graph): drop it"),
        (["ddp.strategy=fsdp"], "turns, which free and freeze weights (ddp.strategy=fsdp): use ddp.strategy=ddp"),
    ],
)
def test_settings_that_turns_exclude(prepared, words, text):
    refused(text, lambda: prepared("", *words))


@pytest.mark.slow
def test_ranks_with_other_turns_are_refused(launch, tmp_path):
    body = "return ('critic', 'generator')[(step + int(os.environ['RANK'])) % 2]"
    head = HEAD.rpartition("        return")[0]
    (tmp_path / "own.py").write_text(f"{head}        {body}\n")
    done = launch.torchrun(2, "train.py", str(tmp_path / "own.py"), f"save_dir={tmp_path / 'run'}")
    (error,) = done.errors
    assert done.code and "rank 1 differs from rank 0 in the turn of step 0: generator instead of critic" in error
