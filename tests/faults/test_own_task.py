"""Mistakes in a task of one's own are errors of one line, before the first step."""

import re
import textwrap
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOY, cases, succeed
from runs import same_bits, weights

import data_loader
from engine import contract
from engine.contract import LockstepError
from engine.data.fingerprint import fingerprint
from plugins.resilience import failure_report

HEAD = """
import torch
from torch.utils.data import IterableDataset
from engine.contract import Loss, Sums
from tests.tasks.toy import Net, Task as Toy

class Task(Toy):
"""
SUMS = """\
def loss(self, net, batch):
    loss = super().loss(net, batch)
    often = dict(hits=loss.weight, count=loss.weight)
    return loss._replace(sums=Sums(often if {seldom} else dict(reversed(often.items()))))
"""


MISTAKES = cases("""
# a bare loss: `loss` returns a Tensor of shape () (the task's `loss`): return Loss(total, weight)
def loss(self, net, batch):
    return super().loss(net, batch).total
# a number for a sum: `score` returns a float as 'total' (the task's `score`): return Sums(
def score(self, model, batch):
    return Sums(total=1.0, count=torch.tensor(3), weight=torch.tensor(1))
# the log's own name in a sum: `loss` returns the sum 'epoch', which each step has already (the task's `loss`): give it
def loss(self, net, batch):
    return super().loss(net, batch)._replace(sums=Sums(epoch=torch.tensor(1.0)))
# a method's old name: has `known`, which is called `metadata` now (task): rename it: nothing asks for it
def known(self):
    return {'classes': ['a']}
# an attribute's old name: has `free`, which is called `resumable_keys` now (task)
free = ('dataset.',)
# a typo in the report: KeyError: 'totl' (
def report(self, sums):
    return {'loss': sums['totl']}
# nothing to train: no parameter to train
def model(self):
    return Net(4, 0.0).requires_grad_(False)
# a key that is not there: validation at step 0): the batch has 'x', 'y', 'mask'
def score(self, model, batch):
    return batch['label']
# a label of no output: ): the label of sample 17 is none of the model's 4 outputs, numbered from 0
def loss(self, net, batch):
    y = torch.where(batch['lockstep'].index == 17, 4, 3)
    return Loss(torch.nn.functional.cross_entropy(net(batch['x']), y, reduction='sum'), len(y))
# a negative label: ): the label of sample 0 is none of the model's 4 outputs
def score(self, model, batch):
    torch.nn.functional.cross_entropy(net := model(batch['x']), torch.full((len(batch['x']),), -1))
# sparse gradients: words gives sparse gradients (the task's `model`): make it sparse=False
def model(self):
    net = Net(4, 0.0); net.words = torch.nn.Embedding(9, 8, sparse=True); return net
# complex weights: the weight phase is complex (the task's `model`): keep its real and imaginary parts in
def model(self):
    net = Net(4, 0.0); net.phase = torch.nn.Parameter(torch.ones(8) * 1j); return net
""")
# Or of the same names in another order, which would go unnoticed.
MISTAKES["sums of other names"] = (
    SUMS.format(seldom="batch['lockstep'].position[0] < 16"),
    "the sums of the loss are ['count', 'hits'] once and ['hits', 'count']",
)


@pytest.fixture
def own(launch, tmp_path):
    """Returns a function that trains a task with such a body."""

    def run(body, *words, processes=1, head=HEAD):
        (tmp_path / "own.py").write_text(head + textwrap.indent(body, "    ") + "\n")
        return launch.train(str(tmp_path / "own.py"), f"save_dir={tmp_path / 'run'}", *words, processes=processes)

    return run


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(own, tmp_path, mistake):
    body, error = MISTAKES[mistake]
    done = own(body)
    assert done.code in (1, 2) and len(done.err.splitlines()) == 1 and error in done.errors[0], done.err
    assert "Traceback" not in done.out + done.err and "✓" not in done.out
    assert not (tmp_path / "run").exists() or "def loss" in body, "only a loss is not rehearsed"


def test_sums_of_other_names_on_another_rank_are_not_added_up(own):
    done = own(SUMS.format(seldom="batch['lockstep'].position[0] % 2"), processes=2)
    assert done.code and len(done.errors) == 1, done.err
    assert "the sums of the loss are ['hits', 'count'] once and ['count', 'hits']" in done.errors[0]


RIGHT = cases("""
# a report that one batch is too few for, such as an AUC of one class: eval_batch_size=8
def report(self, sums):
    if sums['count'] < 23:
        raise ValueError('one class')
    return super().report(sums)
# a number for a weight: epochs=1
def loss(self, net, batch):
    return Loss(self._errors(net, batch).sum(), len(batch['x']))
""")


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_no_mistake(own, what):
    body, setting = RIGHT[what]
    succeed(own(body, "steps=1", setting))


class Waves:
    def __init__(self, more):
        self.more = more

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"x": torch.zeros(3)} | self.more


@pytest.mark.parametrize("where", ["training", "validation"])
def test_the_loaders_own_name_in_a_sample_is_refused(where):
    sets = [Waves({contract.INFO_KEY: 0} if where == name else {}) for name in ("training", "validation")]
    said = "a sample has a 'lockstep', the one name that the loader itself uses in a batch (Waves): give it ano"
    with pytest.raises(LockstepError, match="^" + re.escape(said)):
        fingerprint(*sets)


def test_a_gpu_that_asserts_is_explained():
    """Its words come late and from anywhere."""
    error = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")
    said = str(failure_report.to_user_error(error, None))
    assert said.startswith("RuntimeError: CUDA error: device-side assert triggered: mostly a label"), said
    assert said.endswith("device=cpu names it")


TRANSLATED = {
    # a text of torch: (exit code, the line)
    "aten.add: got mixed torch.Tensor and DTensor": (2, "a weight is used past the module that FSDP2 makes it whole"),
    "setStorage: out of bounds for storage of size 0": (2, "a backward pass needs a weight that FSDP2 has cut again:"),
    "Expected to have finished reduction in the prior iteration": (2, "some parameters got no gradient: torch does no"),
    "DataLoader timed out after 4 seconds": (5, "a loader process failed: DataLoader timed out after 4 seconds: one"),
    "[gloo/transport/tcp/pair.cc:1] Connection closed": (6, "the connection to the other ranks is lost: [gloo/trans"),
    "DefaultCPUAllocator: can't allocate memory": (1, "out of memory: DefaultCPUAllocator: can't allocate memory: fr"),
    "shape '[2]' is invalid": (1, "RuntimeError: shape '[2]' is invalid: --debug shows the traceback"),
}


@pytest.mark.parametrize("text", TRANSLATED)
def test_an_error_of_another_subsystem_has_its_own_line(text, monkeypatch):
    monkeypatch.setattr(failure_report.status, "current", failure_report.status.Status())
    code, line = TRANSLATED[text]
    error = failure_report.to_user_error(RuntimeError(text), None)
    assert error.exit_code == code and str(error).startswith(line)


def test_a_batch_larger_than_the_data_and_a_task_mistyped_are_said(launch, tmp_path):
    done = succeed(launch.python("train.py", TOY, "--dry-run", "batch_size=64"))
    assert done.out.count("warning: a step may take 64 samples, and there are 61: an epoch is one smaller step") == 1
    assert "warning: a step" not in succeed(launch.python("train.py", TOY, "--dry-run", "batch_size=61")).out
    done = launch.python("train.py", "hra")
    assert done.errors[0].startswith("error: no task 'hra' (task): did you mean har? choose one of har, robot,")


def test_numbers_for_other_samples_are_refused():
    waves, plan = Waves({}), SimpleNamespace(processes=1)
    waves.weights = [1.0, 2.0]
    with pytest.raises(
        LockstepError, match=r"^the `weights` of the dataset have the shape \(2,\), and it has 10 sampl"
    ):
        data_loader.TrainSampler(waves, plan, 0, 0)


DRAWN = """
import torch
from tests.tasks.toy import Task as Toy, Waves

class Drawn(Waves):
    def __getitems__(self, indices):
        batch = super().__getitems__(indices)
        return batch | {"x": batch["x"] + torch.randn(len(indices), 8)}

class Task(Toy):
    def datasets(self):
        return Drawn(61, 0), Waves(23, 1)
"""


def test_data_drawn_at_random_are_refused_or_warned_of(own, tmp_path):
    done = own("", "steps=2", head=DRAWN)
    assert done.code == 2 and len(done.err.splitlines()) == 1, done.err
    assert done.errors[0].startswith("error: 'x' of sample 0 changes between two fetches (Drawn): draw from")
    assert not (tmp_path / "run").exists()
    done = succeed(own("", "steps=2", "random_samples=warn", head=DRAWN))
    assert done.out.count("warning: 'x' of sample 0 changes between two fetches (Drawn)") == 1


def test_the_evaluation_changes_nothing_for_the_training(own, launch, tmp_path):
    """However often it happens, and whatever it draws at random."""
    words = ["model.dropout=0.3", "epochs=2"]
    draws = "def score(self, model, batch):\n  torch.randn(3)\n  return super().score(model, batch)"
    succeed(own(draws, *words, "eval_every=1"))
    succeed(launch.train(TOY, *words, "eval_every=0", f"save_dir={tmp_path / 'other'}"))
    assert same_bits(weights(tmp_path / "run"), weights(tmp_path / "other"))


def test_the_task_of_the_readme_trains(launch, tmp_path):
    text = (ROOT / "README.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    (tmp_path / "mine.py").write_text(next(block for block in blocks if "class Task(Base)" in block))
    words = [str(tmp_path / "mine.py"), "epochs=1", f"save_dir={tmp_path / 'run'}"]
    assert "accuracy" in (tmp_path / "mine.py").read_text() and succeed(launch.torchrun(2, "train_ddp.py", *words))
