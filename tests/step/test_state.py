"""What a task keeps between steps: a teacher, a centre, a target network, a queue and a counter are those of a plain
loop on any partition, and after a resume; what a checkpoint would lose is refused with its cure."""

import copy
import math
import re
import textwrap

import numpy as np
import pytest
import torch
from conftest import ROOT, cases, killed_and_resumed, succeed
from first_step import first_steps
from saved import assert_same_bits, assert_same_parts, load
from torch.nn.functional import cosine_similarity, log_softmax, softmax

import tasks
from engine import config
from engine.contract import LockstepError
from engine.seeds import seed_generators
from engine.task_state import move_state

KEPT = str(ROOT / "tests" / "tasks" / "kept.py")
SETTINGS = [KEPT, "seed=3", "epochs=2", "amp=off", "schedule.kind=constant", "grad_clip=0", "log_every=1"]
EXACT = {"rtol": 1e-12, "atol": 1e-12}
STEPS = 12


def plain_loop(skipped=(), clip=None, decay=None):
    """Twelve steps of twelve samples, the last of each epoch of one sample. Returns what a checkpoint holds."""
    task = tasks.load(KEPT)(config.parse(SETTINGS, tasks.load).cfg)
    torch.manual_seed(3)
    (data, _), model = task.datasets(), task.model()
    teacher, target = copy.deepcopy(model.encoder), copy.deepcopy(model.encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    centre, queue = torch.zeros(4, dtype=torch.float64), [torch.zeros(4, dtype=torch.float64)] * 30
    average, taken = {}, 0
    for step in range(STEPS):
        epoch, first = step // 6, 12 * (step % 6)
        places = torch.from_numpy(np.random.default_rng((3, epoch)).permutation(61)[first : first + 12])
        x, y = data.x[places], data.y[places]
        if step in skipped:
            continue
        rows, guesses = model(x)
        with torch.no_grad():
            goals, targets, keys = teacher(x + 0.1), target(x - 0.1), torch.stack(queue)
        loss = (rows - y).square().sum() + (rows - goals).square().sum() / (1 + taken)
        loss -= (softmax((goals - centre) / 0.5, 1) * log_softmax(rows, 1)).sum()
        loss -= cosine_similarity(guesses, targets, 1).sum()
        loss += torch.logsumexp(torch.cat([(rows * goals).sum(1, keepdim=True), rows @ keys.T], 1), 1).sum()
        optimizer.zero_grad()
        (loss / len(x)).backward()
        optimizer.step()
        share = 0.05 * (1 + math.cos(math.pi * step / 12))
        with torch.no_grad():
            for p in model.parameters() if clip else ():
                p.clamp_(-clip, clip)
            for p, old, older in zip(
                model.encoder.parameters(), teacher.parameters(), target.parameters(), strict=True
            ):
                old.mul_(0.9).add_(0.1 * p)
                older.mul_(1 - share).add_(share * p)
            for name, p in model.named_parameters():
                average[name] = (decay * average[name] + (1 - decay) * p) if decay and taken else p.clone()
        centre = 0.8 * centre + 0.2 * goals.mean(0)
        queue = [*queue, *goals][-30:]
        taken += 1
    state = {"teacher": teacher.state_dict(), "target": target.state_dict(), "centre": centre, "taken": taken}
    return {"model": model.state_dict(), "ema": average, "task": state | {"queue": torch.stack(queue)}}


def drawn(step):
    """What `after_step` draws from torch's generator."""
    seed_generators(torch.device("cpu"), "after step", 3, step)
    return torch.rand(()).item()


def assert_close(saved, expected):
    for part in ("model", "task"):
        ours = {name: saved[part][name] for name in expected[part]}
        torch.testing.assert_close(ours, dict(expected[part]), **EXACT)


CUTS = {
    "one process": (1, ["batch_size=12"]),
    "four passes": (1, ["batch_size=3", "gradient_accumulation_steps=4"]),
    "two processes": (2, ["batch_size=3", "gradient_accumulation_steps=2"]),
    "three processes": (3, ["batch_size=4"]),
    "virtual workers": (3, ["batch_size=3", "virtual_workers=4"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_the_state_is_that_of_a_plain_loop(launch, tmp_path, cut):
    processes, words = CUTS[cut]
    done = succeed(launch.train(*SETTINGS, *words, f"save_dir={tmp_path}", processes=processes))
    assert "the loss adds up" in done.out and re.search(r"\n  state +sha256 \w{16}", done.out)
    saved = load(tmp_path)
    assert_close(saved, plain_loop())
    notes = saved["task"]["notes"]
    assert notes["steps"] == [*range(STEPS)] and notes["drawn"] == [drawn(step) for step in range(STEPS)]


@pytest.mark.slow
def test_virtual_workers_and_a_resume_keep_the_bits(launch, tmp_path):
    """Killed on one process and killed in an evaluation of two, continued by three."""
    words = [*SETTINGS, "batch_size=3", "virtual_workers=4", "digest_every=1", "save_every=2", "eval_every=4"]
    succeed(launch.train(*words, f"save_dir={tmp_path / 'one'}"))
    succeed(launch.train(*words, f"save_dir={tmp_path / 'three'}", processes=3))
    assert_same_bits(tmp_path / "three", tmp_path / "one")
    mark, ours = tmp_path / "mark", f"save_dir={tmp_path / 'killed'}"
    mark.touch()
    assert launch.train(*words, ours, f"own.kill={mark}", processes=2).code and not mark.exists()
    killed_and_resumed(launch, [*words, ours], ["step 9/"], processes=3)
    assert_same_parts(load(tmp_path / "killed"), load(tmp_path / "one"), "model", "optimizer", "task", "progress")


@pytest.mark.slow
def test_a_skipped_step_leaves_the_state_alone(launch, tmp_path):
    done = succeed(launch.train(*SETTINGS, "own.bad_at=3", "batch_size=6", f"save_dir={tmp_path}", processes=2))
    assert "(1 of them skipped)" in done.out
    assert_close(load(tmp_path), plain_loop(skipped=(3,)))
    assert load(tmp_path)["task"]["notes"]["steps"] == [step for step in range(STEPS) if step != 3]


CLIPPED = """
    def after_step(self, model, step):
        super().after_step(model, step)
        for p in model.parameters(): p.clamp_(-0.3, 0.3)
"""


def own(folder, body):
    """A file with a subclass of the task."""
    lines = "import copy, torch\nimport numpy as np\nfrom collections import deque\nfrom torch import nn\n"
    lines += "from tests.tasks import kept, toy\nclass Task(kept.Task):\n"
    (folder / "own.py").write_text(lines + body)
    return str(folder / "own.py")


@pytest.mark.slow
def test_clipped_weights_enter_the_average(launch, tmp_path):
    """As the critic of a Wasserstein GAN: weights that `after_step` has clipped."""
    words = [own(tmp_path, CLIPPED), *SETTINGS[1:], "optim.ema_decay=0.5", "batch_size=6"]
    # the parent clips after its teacher has moved, the plain loop before: compare the average alone
    body = CLIPPED.replace("        super().after_step(model, step)\n", "").rstrip()
    words[0] = own(tmp_path, body + "\n        super().after_step(model, step)\n")
    succeed(launch.train(*words, f"save_dir={tmp_path / 'run'}", processes=2))
    saved, expected = load(tmp_path / "run"), plain_loop(clip=0.3, decay=0.5)
    assert_close(saved, expected)
    for name, value in expected["ema"].items():
        torch.testing.assert_close(saved["ema"][f"module.{name}"], value.detach(), **EXACT)
    assert max(float(value.abs().max()) for value in saved["model"].values()) == 0.3


@pytest.mark.slow
def test_a_run_ends_for_the_reason_of_the_task(launch, tmp_path):
    """The last rank alone has one."""
    words = [*SETTINGS, "eval_every=3", "own.enough=0.6", "batch_size=6", f"save_dir={tmp_path}"]
    done = succeed(launch.train(*words, processes=2))
    saved = load(tmp_path)
    [reason] = re.findall(r"ended by the task: (a loss of 0\.\d+ is enough)", done.out)
    step, best = saved["progress"]["step"], saved["task"]["notes"]["best"]
    assert saved["progress"]["ended"] == reason and step % 3 == 0 and 0 < step < STEPS and best < 0.6
    again = succeed(launch.train(*words, processes=2))
    assert f"stands at step {step} of 12: the task has ended the run: {reason}" in again.out
    assert load(tmp_path)["progress"]["step"] == step


@pytest.mark.slow
def test_the_tools_have_the_state_of_the_checkpoint(launch, tmp_path):
    """`score` and `predict` use the teacher, which is in the checkpoint alone, and not in a published model."""
    task = own(tmp_path, "    def metadata(self): return {}\n    def load_metadata(self, metadata): pass\n")
    succeed(launch.train(task, *SETTINGS[1:], f"save_dir={tmp_path / 'run'}"))
    saved = load(tmp_path / "run")
    best = saved["task"]["notes"]["best"]
    done = succeed(launch.python("tools/evaluate.py", str(tmp_path / "run"), "--json"))
    assert f"{best:.6f}"[:7] in done.out, done.out
    words = [str(tmp_path / "run" / "last.pt"), "--split", "val", "--out", str(tmp_path / "out.npz")]
    succeed(launch.python("tools/predict.py", *words))
    (_, data), teacher = kept_task().datasets(), kept_task().teacher
    teacher.load_state_dict(saved["task"]["teacher"])
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_allclose(found["rows"], teacher(data.x).numpy(), rtol=1e-6)
    done = launch.python("tools/publish.py", str(tmp_path / "run"), "--to", str(tmp_path / "hub"), "--license", "mit")
    assert done.code and "the task keeps a state (teacher, target, " in done.errors[0]


@pytest.mark.slow
def test_copies_of_the_weights_follow_init_from(launch, tmp_path):
    succeed(launch.train(*SETTINGS, f"save_dir={tmp_path / 'first'}"))
    first = load(tmp_path / "first")["model"]
    body = "    def after_step(self, model, step): pass\n"
    words = [own(tmp_path, body), *SETTINGS[1:], "steps=1", f"init_from={tmp_path / 'first' / 'last.pt'}"]
    succeed(launch.train(*words, f"save_dir={tmp_path / 'second'}"))
    teacher = load(tmp_path / "second")["task"]["teacher"]
    assert all(torch.equal(value, first[f"encoder.{name}"]) for name, value in teacher.items())


REFUSED = r"""
# a number: `after_step` changes self.number, which no checkpoint holds .*: add "number" to `state_attributes`
def after_step(self, model, step):
  super().after_step(model, step); self.number = step
# a list, every tenth step: `after_step` changes self.seen\[\d+\], .*: add "seen" to `state_attributes`
def model(self):
  self.seen = []; return super().model()
def after_step(self, model, step):
  if (step + 1) % 10 == 0: self.seen.append(step)
# a teacher: `after_step` changes self.other.layers.0.weight.* and 2 more, .*: add "other" to `state_attributes`
def model(self):
  net = super().model(); self.other = copy.deepcopy(net.encoder); return net
def after_step(self, model, step):
  for t, p in zip(self.other.parameters(), model.encoder.parameters()): t.lerp_(p + 1, .1)
# a tensor of the model: `after_step` changes steps, .*: register it with persistent=True
def model(self):
  net = super().model(); net.register_buffer('steps', torch.zeros(()), persistent=False); return net
def after_step(self, model, step): model.steps += 1
# a buffer of a state that is not saved: `after_step` changes self.bank.rows, .*: self.bank.register_buffer\("rows", s
state_attributes = (*kept.Task.state_attributes, 'bank')
def model(self):
  self.bank = nn.Module(); self.bank.register_buffer('rows', torch.zeros(2), persistent=False); return super().model()
def after_step(self, model, step):
  super().after_step(model, step); self.bank.rows += 1
# a plain tensor in a state: `after_step` changes self.bank.rows, .*: make it a buffer of self.bank \(register_buffer\)
state_attributes = (*kept.Task.state_attributes, 'bank')
def model(self):
  self.bank = nn.Module(); self.bank.rows = torch.zeros(2); return super().model()
def after_step(self, model, step):
  super().after_step(model, step); self.bank.rows += 1
# an object with a state: sgd is a SGD, which no checkpoint holds as it is .*: take "sgd" out; add {"sgd": self.sgd.st
state_attributes = (*kept.Task.state_attributes, 'sgd')
def model(self):
  net = super().model(); self.sgd = torch.optim.SGD(net.parameters()); return net
# the epoch of the data: `after_step` changes epoch of the training data, .*: change the batch in `prepare`, by batch
def datasets(self):
  train, val = super().datasets(); train.epoch, self.data = 0, train; return train, val
def after_step(self, model, step):
  super().after_step(model, step); self.data.epoch = step // 6
# the epoch of the data, in passes: `loss` changes epoch of the training data, .*: change the batch in `prepare`
def datasets(self):
  train, val = super().datasets(); train.epoch, self.data = 0, train; return train, val
def loss(self, net, batch):
  self.data.epoch = batch['lockstep'].epoch; return super().loss(net, batch)
# a number of the class: `after_step` changes Task.total, .*: keep it in an attribute of the task
total = 0
def after_step(self, model, step): type(self).total += 1
# a state by hand: `after_step` changes self.taken, .*: add "taken"
def state_dict(self): return {'queue': self.queue}
def load_state_dict(self, state): self.queue = state['queue']
after_evaluation = toy.Task.after_evaluation
# a state that is not given back: the state [a-z.0-9]+ is not given back as it was saved \(the task's `load_state_
def load_state_dict(self, state): pass
after_evaluation = toy.Task.after_evaluation
# scores: `after_evaluation` changes self.scores\[0\], which no checkpoint holds
scores = ()
def after_evaluation(self, metrics): self.scores = [*self.scores, metrics['loss']]
# other arguments: `after_step` cannot be called: too many .*: define after_step\(self, model, step\)
def after_step(self, model): pass
# no arguments: `after_evaluation` cannot be called: too many .*: define after_evaluation\(self, metrics\)
def after_evaluation(self): pass
# a reason: `after_evaluation` returns a bool
def after_evaluation(self, metrics): return True
# a state of passes: a pass changes self.taken, a state of the task: .*: change it in `after_step`
def loss(self, net, batch):
  self.taken += 1; return super().loss(net, batch)
# a centre of passes: a pass changes self.centre, .* give a module with statistics `.eval\(\)`
def loss(self, net, batch):
  if net.training: self.centre.lerp_(batch['y'].mean(0), .1)
  return super().loss(net, batch)
# a name: the task has no attribute 'techer' \(the task's `state_attributes`\)
state_attributes = ('techer',)
# a text: the task has no attribute 't' \(the task's `state_attributes`\): name attributes, \('teacher',\)
state_attributes = 'teacher'
# a deque: a checkpoint cannot hold it: .* \(the task's `state_dict`\): keep tensors, numbers and texts
def __init__(self, cfg):
  super().__init__(cfg); self.notes = deque([1])
# sums for nobody: the sum goals and 2 more is for `after_step`, which the task lacks
after_step = toy.Task.after_step
after_evaluation = toy.Task.after_evaluation
# a mean: `for_state` 'goals' of 5 samples is .*: a mean\? return the sum
def loss(self, net, batch):
  loss = super().loss(net, batch); sums = dict(loss.for_state)
  return loss._replace(for_state=sums | {'goals': sums['goals'] / sums['count']})
# a number in place of a tensor: `loss` returns a Loss whose for_state is a float as 'goals'
def loss(self, net, batch):
  loss = super().loss(net, batch)
  return loss._replace(for_state=dict(loss.for_state) | {'goals': 1.0})
"""
REFUSED = cases(REFUSED, "")


@pytest.fixture(scope="module")
def start():
    """Prepare a training up to the first step."""
    with first_steps() as begin:
        yield begin


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_is_named_with_its_cure(start, tmp_path, name):
    body, said = REFUSED[name]
    with pytest.raises(LockstepError, match="^" + said) as error:
        start(own(tmp_path, "".join(f"    {line}\n" for line in body.splitlines())))
    assert re.search(r" \(\S.*\): \S", str(error.value)), "no place, or no cure"


NORMED = """
    def model(self):
        net = super().model()
        for encoder in (self.teacher, self.target, net.encoder):
            nn.utils.weight_norm(encoder.layers[0]).weight_g.data.fill_(1)
        return net
"""


def test_a_value_that_each_pass_computes_from_the_state_is_no_state(start, tmp_path):
    """torch.nn.utils.weight_norm, as in the head of DINO: `weight` is a plain tensor, made of weight_g and weight_v."""
    task = start(own(tmp_path, NORMED)).task
    assert "layers.0.weight_g" in task.teacher.state_dict() and "layers.0.weight" not in task.teacher.state_dict()


RESET = """
    def __init__(self, cfg):
        super().__init__(cfg); self.seen = 0
    def score(self, model, batch):
        self.seen += len(batch["x"]); return super().score(model, batch)
    def after_evaluation(self, metrics): self.seen = 0
"""


def test_a_metric_that_each_evaluation_resets_is_no_state(start, tmp_path):
    """As the metrics of torchmetrics, which `score` updates and `after_evaluation` resets."""
    assert start(own(tmp_path, RESET)).task.seen == 0


def test_the_trials_put_all_back(start):
    run = start(KEPT)
    task = run.task
    assert (task.taken, task.notes) == (0, {"steps": [], "drawn": [], "best": math.inf})
    assert not task.centre.any() and not task.queue.any()
    weights = dict(run.model.encoder.state_dict())
    for name, value in task.teacher.state_dict().items():
        assert torch.equal(value, weights[name]) and torch.equal(task.target.state_dict()[name], value)


def kept_task():
    """A task with its model, on the CPU."""
    task = tasks.load(KEPT)(config.parse(SETTINGS, tasks.load).cfg)
    task.model()
    return task


def test_the_state_moves_to_the_device():
    task = kept_task()
    task.notes["more"] = [torch.zeros(2)]
    move_state(task, torch.device("meta"))
    assert all(p.is_meta for module in (task.teacher, task.target) for p in module.parameters())
    assert task.centre.is_meta and task.queue.is_meta and task.notes["more"][0].is_meta


@pytest.mark.slow
def test_another_state_than_in_the_checkpoint_is_refused(launch, tmp_path):
    new, third = f"save_dir={tmp_path / 'new'}", f"save_dir={tmp_path / 'third'}"
    succeed(launch.train(*SETTINGS, "steps=4", new))
    done = launch.train(*SETTINGS, "steps=8", "own.kind=fewer", new, "--force")
    assert done.code == 3 and re.search("in the checkpoint is centre, .* of this task .*init_from=", done.errors[0])
    state = torch.load(tmp_path / "new" / "last.pt", weights_only=True)
    del state["task"]
    torch.save(state, tmp_path / "stripped.pt")
    done = launch.train(*SETTINGS, "steps=8", f"resume={tmp_path / 'stripped.pt'}", third)
    assert done.code == 3 and "in the checkpoint is none, and of this task centre" in done.errors[0]


@pytest.mark.slow
def test_a_state_that_differs_between_ranks_is_named(launch, tmp_path):
    done = launch.train(*SETTINGS, "own.kind=rank", "batch_size=6", f"save_dir={tmp_path}", processes=2)
    assert done.code and "rank 1 differs from rank 0 in the state centre" in done.errors[0]
    assert "change it in `after_step` alone" in done.errors[0]


@pytest.mark.slow
def test_shards_and_a_whole_copy_are_refused(launch, tmp_path):
    words = [*SETTINGS, "ddp.strategy=fsdp", "batch_size=6", f"save_dir={tmp_path}"]
    done = launch.train(*words, processes=2)
    assert done.code and "teacher of the task's state is a whole copy of weights" in done.errors[0]


@pytest.mark.slow
def test_what_the_page_shows_trains(launch, tmp_path):
    """The README's task with the methods of docs/your-own-data.md, on two processes that accumulate, and resumed."""
    page = (ROOT / "docs/your-own-data.md").read_text()
    section = page.partition("### Keep a teacher, a centre, a queue")[2].partition("## Train parts of a model")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    readme = re.search(r"```python\n(import torch\n.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    begin = "import copy\nfrom engine.contract import rows_of_global_batch\nReadme = Task\n\nclass Task(Readme):\n"
    methods = textwrap.indent("\n".join(blocks), "    ").replace("> 0.9", "> 0.5")  # the labels are chance
    (tmp_path / "own.py").write_text(readme + begin + methods)
    words = [
        str(tmp_path / "own.py"),
        "global_batch=32",
        "epochs=6",
        "lr=0.001",
        "amp=off",
        "eval_every=4",
        "log_every=1",
    ]
    one = succeed(launch.train(*words, "batch_size=32", f"save_dir={tmp_path / 'one'}"))
    assert "ended by the task: accurate enough" in one.out
    killed_and_resumed(launch, [*words, "batch_size=8", f"save_dir={tmp_path / 'two'}"], ["step 3/"], processes=2)
    saved, expected = load(tmp_path / "two"), load(tmp_path / "one")
    assert saved["progress"]["step"] == expected["progress"]["step"]
    torch.testing.assert_close(saved["task"], expected["task"], rtol=1e-4, atol=1e-5)


CENTRE = """
    state_attributes = ("centre", "queue", "taken", "notes")
    def datasets(self):
        train, val = super().datasets()
        train.sources = np.array([f"s{n % 3}" for n in range(len(train))])
        return train, val
    def after_step(self, model, step):
        count = int(self.step_sums["count"])
        self.centre.lerp_(self.step_sums["goals"] / count, 0.2)
        self.queue = torch.cat([self.queue[count:], self.step_sums["keys"][:count]])
        self.taken += 1
"""


@pytest.mark.slow
def test_shards_and_excluded_samples_keep_the_state(launch, tmp_path):
    """The one sample of an epoch's last step is left out: no step is taken, and the state stays."""
    words = [own(tmp_path, CENTRE), *SETTINGS[1:], "exclude=s1"]
    runs = {
        "one": (1, ["batch_size=12"]),
        "three": (3, ["batch_size=2", "gradient_accumulation_steps=2"]),
        "shards": (2, ["batch_size=6", "ddp.strategy=fsdp"]),
        "workers": (3, ["batch_size=3", "virtual_workers=4"]),
        "sharded workers": (2, ["batch_size=3", "virtual_workers=4", "ddp.strategy=fsdp"]),
    }
    for name, (processes, more) in runs.items():
        succeed(launch.train(*words, *more, f"save_dir={tmp_path / name}", processes=processes))
    saved = {name: load(tmp_path / name) for name in runs}
    assert saved["one"]["task"]["taken"] == STEPS - saved["one"]["progress"]["skipped"] < STEPS
    for name in runs:
        assert_close(saved[name], {part: saved["one"][part] for part in ("model", "task")})
    assert_same_parts(saved["workers"], saved["sharded workers"], "model", "task")
