"""A task's scheduler and the moving values of `schedule.*`, beside a plain loop of torch, on any processes."""

import json
import math
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, launching, succeed
from saved import assert_same_parts, load, logged

import tasks
from engine.config import parse
from engine.contract import sample_seeds, uniform
from engine.files.archive import EXACT_PARTS
from tests.tasks.schedulers import MADE

OWN = str(ROOT / "tests" / "tasks" / "schedulers.py")
MANY, BITS = (str(ROOT / "tests" / "ranks" / f"{name}.py") for name in ("many", "bits"))
STEPS, PER_EPOCH = 18, 6
COMMON = ["amp=off", "model.double=true", "lr=0.02", "weight_decay=0.1", "grad_clip=0", "log_every=1"]
COMMON += ["global_batch=12", "epochs=3"]

RUNS = {kind: [f"own.scheduler={kind}"] for kind in MADE}
RUNS["OneCycleLR of sgd"] = ["own.scheduler=OneCycleLR", "own.optimizer=sgd"]
RUNS["SequentialLR of groups"] = ["own.scheduler=SequentialLR", "own.optimizer=groups"]
RUNS["ReduceLROnPlateau of groups"] = ["own.scheduler=ReduceLROnPlateau", "own.optimizer=groups"]


def parsed(words):
    return tasks.load(OWN)(parse([OWN, *words], tasks.load).cfg)


def plain_loop(words, make=None, adjust=None):
    """Three epochs of six steps, the last of one sample. Returns weights, rates and momenta of the steps.

    make    scheduler of (optimizer, task); by default the task's
    adjust  called with the optimizer and the number of each step
    """
    task = parsed([*COMMON, *words])
    task.total_steps, task.steps_per_epoch = STEPS, PER_EPOCH
    torch.manual_seed(0)
    (data, val), model = task.datasets(), task.model()
    matrices, biases = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    optimizer = task.optimizer(model) or torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=0.02, fused=True
    )
    scheduler = make(optimizer, task) if make else task.scheduler(optimizer)
    numbers = []
    for step in range(STEPS):
        if adjust:
            adjust(optimizer, step)
        epoch, first = divmod(step, PER_EPOCH)
        rows = torch.from_numpy(np.random.default_rng((0, epoch)).permutation(61)[12 * first : 12 * first + 12])
        seeds = sample_seeds(0, epoch, 12 * first + torch.arange(len(rows)))
        x = data.x[rows] + 0.01 * uniform(seeds, 8)
        optimizer.zero_grad()
        (((model(x) - data.y[rows]).square() * data.mask[rows]).sum() / data.mask[rows].sum()).backward()
        group = optimizer.param_groups[0]
        momentum = group["betas"][0] if "betas" in group else group["momentum"]
        numbers.append((sorted({group["lr"] for group in optimizer.param_groups}), momentum))
        optimizer.step()
        if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step()
        elif first == PER_EPOCH - 1:
            with torch.no_grad():
                errors = (model(val.x) - val.y).square() * val.mask
            scheduler.step(errors.sum() / val.mask.sum())
    return model.state_dict(), numbers


@pytest.fixture(autouse=True)
def in_float64():
    """As `many.py` does."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_near(ours, truth):
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-13)


def assert_logged(folder, numbers):
    """The smallest and the largest rate of the groups of each step."""
    lines = [line for line in logged(folder) if line["event"] == "train"]
    assert len(lines) == STEPS
    for line, (rates, _) in zip(lines, numbers, strict=True):
        assert line["lr"] == pytest.approx(rates[-1], rel=1e-12, abs=1e-300)
        assert line.get("lr_min", line["lr"]) == pytest.approx(rates[0], rel=1e-12, abs=1e-300)


@pytest.fixture(scope="module")
def folder(once):
    def train_all(folder):
        with launching() as launch:
            for processes in (1, 2):
                cut = ["batch_size=3"] if processes == 2 else ["batch_size=12"]
                place = folder / str(processes)
                settings = RUNS | {name: words.split() for name, (words, *_) in KINDS.items()}
                runs = [[OWN, *COMMON, *cut, *words, f"save_dir={place / name}"] for name, words in settings.items()]
                words = MANY, json.dumps(runs)
                succeed(launch.python(*words) if processes == 1 else launch.torchrun(processes, *words))

    return once("schedulers", train_all)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_tasks_scheduler_sets_the_rates_of_a_plain_loop(folder, processes, name):
    """Of each group and step, and momentum: the weights are those of the loop."""
    truth, numbers = plain_loop(RUNS[name])
    rates = [rates[-1] for rates, _ in numbers]
    assert len({*rates}) > 1, "the scheduler does something"
    assert_near(load(folder / str(processes) / name)["model"], truth)
    assert_logged(folder / str(processes) / name, numbers)


@pytest.mark.slow
def test_the_scheduler_of_the_guide_is_that_of_a_plain_loop(launch, tmp_path):
    page = (ROOT / "docs/your-own-data.md").read_text().partition("### A scheduler of your own")[2]
    code = page.partition("```python\n")[2].partition("```")[0]
    imports, _, method = code.partition("\n\n")
    task = tmp_path / "guide.py"
    method = "".join(f"    {line}\n" for line in method.splitlines())
    task.write_text(f"{imports}\nfrom tests.tasks import toy\n\nclass Task(toy.Task):\n{method}")
    words = [str(task), *COMMON, f"save_dir={tmp_path / 'run'}"]
    succeed(launch.torchrun(2, MANY, json.dumps([[*words, "batch_size=6"]])))
    made = tasks.load(str(task)).scheduler
    truth, numbers = plain_loop([], lambda optimizer, task: made(task, optimizer))
    assert_near(load(tmp_path / "run")["model"], truth)
    assert_logged(tmp_path / "run", numbers)


# ---- schedule.*, in whole runs --------------------------------------------------------------------------------------

lr_scheduler = torch.optim.lr_scheduler


def moving_decay(optimizer, step):
    """As DINO's script sets it: of the groups with decay."""
    for group in optimizer.param_groups:
        if group["weight_decay"]:
            group["weight_decay"] = 0.5 + 0.5 * (0.1 - 0.5) * (1 + math.cos(math.pi * step / STEPS))


def plateau(optimizer, task):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)


def one_cycle(optimizer, task):
    return lr_scheduler.OneCycleLR(optimizer, 0.02, STEPS, pct_start=4 / STEPS, base_momentum=0.7, max_momentum=0.9)


KINDS = {
    "one-cycle": (
        "schedule.kind=one-cycle warmup_steps=4 schedule.final_share=4e-6 schedule.peak_momentum=0.7",
        one_cycle,
        None,
    ),
    "plateau": (
        "schedule.kind=plateau schedule.gamma=0.5 schedule.plateau_patience=0 schedule.plateau_threshold=0.9",
        plateau,
        None,
    ),
    "weight decay": (
        "schedule.kind=multistep schedule.milestone_epochs=0.5,2 schedule.final_weight_decay=0.5",
        lambda optimizer, task: lr_scheduler.MultiStepLR(optimizer, [3, 12]),
        moving_decay,
    ),
}
"""{name: (settings, torch's scheduler of (optimizer, task), what the loop sets before a step)}."""


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_with_a_schedule_is_the_plain_loop_with_torchs_class(folder, processes, name):
    _, make, adjust = KINDS[name]
    truth, numbers = plain_loop([], make, adjust)
    assert_near(load(folder / str(processes) / name)["model"], truth)
    assert_logged(folder / str(processes) / name, numbers)


# ---- killed and resumed, on other processes, in the same bits -------------------------------------------------------

EXACT = ["amp=off", "virtual_workers=4", "global_batch=12", "epochs=3", "log_every=1", "save_every=1", "digest_every=1"]
EXACT += ["seed=3", "optim.grad_clip=0.5", "optim.ema_decay=0.9", "fault.kind=nan sample"]
EXACT += ["eval_every=7"]

BIT_RUNS = {
    name: RUNS.get(name) or KINDS[name][0].split()
    for name in (
        "OneCycleLR of sgd",
        "CyclicLR",
        "SequentialLR of groups",
        "ChainedScheduler",
        "MultiStepLR",
        "LambdaLR",
        "ReduceLROnPlateau of groups",
        *KINDS,
    )
}

WAY = ((2, 7), (3, 14), (1, 18))
"""Processes, and the step up to which they take each run. The last step of a run is evaluated: here each is anyway,
or plateau would count one evaluation more."""


@pytest.fixture(scope="module")
def bits(once):
    def train_all(folder):
        with launching() as launch:
            for processes, last, place in ((1, STEPS, "straight"), *((*leg, "way") for leg in WAY)):
                now = [*EXACT, f"steps={last}", f"schedule.horizon={STEPS}"]
                runs = [[OWN, *words, *now, f"save_dir={folder / place / name}"] for name, words in BIT_RUNS.items()]
                words = BITS, json.dumps(runs)
                succeed(launch.python(*words) if processes == 1 else launch.torchrun(processes, *words))

    return once("schedulers in bits", train_all)


def assert_same_ends(ours, straight):
    assert_same_parts(ours, straight, *EXACT_PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", BIT_RUNS)
def test_a_schedule_goes_on_in_the_same_bits_on_any_processes(bits, name):
    """On 1, and stopped and resumed on 2, 3 and 1. A step of each epoch is skipped, and still has its number."""
    straight = load(bits / "straight" / name)
    assert straight["progress"]["step"] == STEPS and straight["progress"]["skipped"] == 3
    assert ("scheduler" in straight) == any("own.scheduler" in word for word in BIT_RUNS[name])
    assert_same_ends(load(bits / "way" / name), straight)
    ours, theirs = (
        [(line["step"], line["lr"], line.get("lr_min")) for line in logged(place / name) if line["event"] == "train"]
        for place in (bits / "way", bits / "straight")
    )
    assert ours == theirs and len(ours) == STEPS and len({lr for _, lr, _ in ours}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["8:begin_step", "14:note_score", "14:end_step"])
@pytest.mark.parametrize("name", ["plateau", "ReduceLROnPlateau of groups", "OneCycleLR of sgd"])
def test_a_killed_run_goes_on_with_its_rates(bits, launch, tmp_path, name, signal):
    """Between an evaluation and the next; after an evaluation whose score is not noted; in the step after one."""
    words = [OWN, *BIT_RUNS[name], *EXACT, f"steps={STEPS}", f"schedule.horizon={STEPS}", f"save_dir={tmp_path}"]
    killed = launch.torchrun(2, BITS, json.dumps([words]), f"SIGKILL:1:{signal}")
    assert killed.code and load(tmp_path)["progress"]["step"] < STEPS
    succeed(launch.python("train.py", *words))
    assert_same_ends(load(tmp_path), load(bits / "straight" / name))


def test_the_number_of_a_step_counts_though_steps_are_skipped(launch, tmp_path):
    """The loop has no skipped step, and its rates are those of the run."""
    words = [OWN, "own.scheduler=OneCycleLR", "fault.kind=nan sample", "epochs=3", "log_every=1", "lr=0.02"]
    succeed(launch.python("train.py", *words, f"save_dir={tmp_path}"))
    assert load(tmp_path)["progress"]["skipped"] == 3
    assert_logged(tmp_path, plain_loop(RUNS["OneCycleLR"])[1])
    assert "Already complete" in succeed(launch.python("train.py", *words, f"save_dir={tmp_path}")).out
    assert '"loss"' in succeed(launch.python("tools/evaluate.py", str(tmp_path), "--json")).out


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED = {
    "own.scheduler=number": "it returns a int .the task's `scheduler`.: return a torch",
    "own.scheduler=other": "StepLR is made for another optimizer .*: make it for the argument `optimizer`",
    "own.scheduler=max": "ReduceLROnPlateau has mode='max', and `higher_is_better` of loss is False .*mode='min'",
    "own.scheduler=two": "CosineAnnealingLR gives the rate 0.00099.* at step 2, and by its closed form 0.0099",
    "own.scheduler=short": "OneCycleLR fails at step 7 of 18: Tried to step 6 times.*: make it for self.total_steps",
    "own.scheduler=object": "a checkpoint cannot hold it: .* .the task's `scheduler`.: keep tensors, numbers and texts",
    "own.scheduler=forgetful": "Forgetful does not get back what it has saved .*: mend its state_dict",
    "own.scheduler=StepLR warmup_steps=3": "the task brings its own scheduler .schedule.warmup_steps=3.: drop the key",
    "own.scheduler=StepLR schedule.kind=linear": "own scheduler .schedule.kind=linear.: drop the key, or the task's",
    "own.scheduler=ReduceLROnPlateau own.val=false": "follows the monitor, and nothing is evaluated .*: return validat",
    "schedule.kind=plateau own.val=false": "schedule.kind=plateau without validation data .*: use another kind",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_scheduler_is_refused_in_one_line(launch, tmp_path, words):
    done = launch.python("train.py", OWN, *words.split(), f"save_dir={tmp_path / 'run'}")
    (error,) = done.errors
    assert done.code == 2 and re.search(REFUSED[words], error), error
    assert "Traceback" not in done.err and not (tmp_path / "run").exists()


def test_a_run_keeps_its_kind_of_scheduler(launch, tmp_path):
    """A checkpoint without the state of a scheduler, as each old one is, does not go on with one; nor the reverse."""
    for first, then in ((["steps=3"], ["own.scheduler=StepLR"]), (["own.scheduler=StepLR", "steps=3"], [])):
        folder = tmp_path / str(len(then))
        common = [OWN, "--force", f"save_dir={folder}"]
        succeed(launch.python("train.py", *first, *common))
        done = launch.python("train.py", *then, "own.scheduler=" if not then else "steps=6", *common)
        (error,) = done.errors
        assert done.code == 3 and "only one of task and checkpoint has a `scheduler`" in error and "init_from=" in error


@pytest.mark.slow
def test_a_longer_run_keeps_the_settings_of_its_scheduler(launch, tmp_path):
    """One that has an end is refused before a step beyond it; schedule.horizon gives the length at the start."""
    words = ["train.py", OWN, "own.scheduler=OneCycleLR", "save_every=1"]
    short = [*words, f"save_dir={tmp_path / 'short'}"]
    succeed(launch.python(*short, "steps=3"))
    done = launch.python(*short, "steps=9")
    (error,) = done.errors
    assert "OneCycleLR fails at step 5 of 9: Tried to step 4 times" in error and "schedule.horizon" in error
    long = [*words, "schedule.horizon=9", f"save_dir={tmp_path / 'long'}"]
    succeed(launch.python(*long, "steps=3"))
    done = succeed(launch.python(*long, "steps=9"))
    assert "OneCycleLR of the task: 0.02" in done.out
    cosine = ["train.py", OWN, "own.scheduler=CosineAnnealingLR", f"save_dir={tmp_path / 'cosine'}"]
    succeed(launch.python(*cosine, "steps=3"))
    done = succeed(launch.python(*cosine, "steps=5"))
    assert "5 steps instead of 3; the task's `scheduler` keeps the settings that it was made with" in done.out
    finished = succeed(launch.python(*cosine, "steps=5", "--dry-run"))
    assert "by the task's `scheduler`" in finished.out


@pytest.mark.slow
def test_the_plan_prints_the_shape_of_the_schedule(launch):
    """The first, the highest and the last rate: of a kind, of the groups, and of a task's own scheduler."""
    plan = ["train.py", OWN, "--dry-run", "epochs=3"]
    cosine = succeed(launch.python(*plan, "warmup_steps=4", "schedule.final_weight_decay=0.4")).out
    assert "0.0025 at step 1, at most 0.01 at step 4, 0.0001254 at step 18; weight decay 0.01, 0.4 at the end" in cosine
    scaled = succeed(launch.python(*plan, "optim.lr_scale=layers.0:10", "schedule.kind=constant")).out
    assert "schedule         0.1 at step 1, at most 0.1 at step 1, 0.1 at step 18\n" in scaled
    cycle = succeed(launch.python(*plan, "schedule.kind=one-cycle", "warmup_steps=4")).out
    assert "0.0004 at step 1, at most 0.01 at step 4, 0 at step 18; momentum 0.85 at the peak" in cycle
    own = succeed(launch.python(*plan, "own.scheduler=OneCycleLR")).out
    assert "OneCycleLR of the task: 0.0012 at step 1, at most 0.02983 at step 6, 1.2e-07 at step 18\n" in own


@pytest.mark.slow
def test_a_step_whose_passes_are_computed_twice_moves_the_rate_once(launch, tmp_path):
    """Several terms of a loss weigh the passes first, and begin the step twice."""
    (tmp_path / "own.py").write_text(
        "import torch\nfrom tests.tasks import terms\n\nclass Task(terms.Task):\n    def scheduler(self, optimizer):\n"
        "        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)\n"
    )
    words = ["train.py", str(tmp_path / "own.py"), "global_batch=12", "steps=4", "log_every=1", "amp=off"]
    succeed(launch.python(*words, "batch_size=6", f"save_dir={tmp_path / 'run'}"))
    rates = [line["lr"] for line in logged(tmp_path / "run") if line["event"] == "train"]
    assert rates == pytest.approx([0.01 * 0.9**step for step in range(4)])
