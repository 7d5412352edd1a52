"""What a task's methods may return: the rules, without a process, and that each is asked where a task is called."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_loop import steps  # noqa: F401, a fixture
from torch import nn
from torch.utils.data import ChainDataset, DataLoader

from engine import evaluation, gathered, hooks
from engine.contract import LockstepError, Loss, Sums, Task
from plugins.preflight import returned
from plugins.resilience import task_errors

ONE = torch.ones(())
LOSS = Loss(torch.ones((), requires_grad=True), 1)
ROWS = [{"x": torch.zeros(3)}] * 10
NOT_BY_NUMBER = ", which gives no sample by its number (the task's `datasets`): give "
NOT_BY_NUMBER_OF_A_STREAM = NOT_BY_NUMBER.removesuffix("give ") + "a stream has no length"


def a_loss(**changes):
    return LOSS._replace(**changes)


BROKEN = [
    ("datasets", ROWS[0], (), "a dict of Tensor, not a pair"),
    ("datasets", [ROWS], (), "1 datasets, not a pair (the task's `datasets`): return (train, val)"),
    ("model", None, (), "None (the task's `model`): return the nn.Module"),
    ("model", {"net": nn.Linear(1, 1)}, (), "a dict of Linear"),
    ("loss", ONE, (), "a Tensor of shape () (the task's `loss`): return Loss(total, weight)"),
    ("loss", a_loss(total=3.0), (), "a Loss whose total is a float"),
    ("loss", a_loss(total=torch.ones(3)), (), "a Loss whose total is a Tensor of shape (3,)"),
    ("loss", a_loss(total=ONE), (), "a Loss whose total has no graph (the task's `loss`): return Loss(total, weight)"),
    ("loss", a_loss(weight=None), (), "a Loss whose weight is None"),
    ("loss", a_loss(weight=torch.ones(4)), (), "a Loss whose weight is a Tensor of shape (4,)"),
    ("loss", a_loss(sums=None), (), "a Loss whose sums are None"),
    ("loss", a_loss(sums={"a": torch.ones(3)}), (), "a Loss whose sums are a Tensor of shape (3,) as 'a'"),
    ("loss", a_loss(sums={"a": "x"}), (), "a Loss whose sums are a str as 'a'"),
    ("loss", a_loss(factor=0.0), (), "a factor of 0.0, which is for `losses` (the task's `loss`): multiply the total"),
    *(
        ("loss", a_loss(sums={name: ONE}), (), f"the sum {name!r}, which each step has already")
        for name in ("loss", "weight", "event", "step", "epoch", "samples", "time_s")
    ),
    ("losses", LOSS, (), "a Loss (the task's `losses`): return {"),
    ("losses", {}, (), "an empty dict"),
    ("losses", {"a": LOSS, "b": ONE}, (), "a Tensor of shape () as 'b'"),
    ("losses", {"a": a_loss(total=torch.ones(3))}, (), "a Loss whose total is a Tensor of shape (3,) as 'a'"),
    ("losses", {"a": a_loss(weight=None)}, (), "a Loss whose weight is None as 'a'"),
    ("losses", {"a": a_loss(sums={"b": None})}, (), "a Loss whose sums are None as 'b' as 'a'"),
    ("losses", {"loss": LOSS}, (), "the name 'loss' twice"),
    ("losses", {"a": a_loss(sums={"count": ONE})}, (), "the name 'count' twice"),
    ("losses", {"a": LOSS, "b": a_loss(sums={"a": ONE})}, (), "the name 'a' twice"),
    ("losses", {"epoch": LOSS}, (), "the name 'epoch' twice (the task's `losses`): give it another name; `loss`"),
    ("score", None, (), "None (the task's `score`): return Sums(loss=..., count="),
    ("score", {"loss": 1.0, "count": ONE}, (), "a float as 'loss'"),
    ("score", {"loss": ONE}, (), "no `count`, the number of samples (the task's `score`): return Sums("),
    ("trials", {"loss": 1.0}, (), "a float as 'loss' (the task's `trials`)"),
    ("collect", None, (4,), "None (the task's `collect`): return {name: a tensor (B, ...), or a list of B}"),
    ("collect", {}, (4,), "an empty dict"),
    ("collect", ONE, (4,), "a Tensor of shape ()"),
    ("collect", {"m": ONE}, (4,), "a single number as 'm'"),
    ("collect", {"m": 3.0}, (4,), "a float as 'm'"),
    ("collect", {"m": torch.ones(3)}, (4,), "3 rows for 4 samples as 'm'"),
    ("collect", {"a": ["x"] * 4, "m": ["x"]}, (4,), "1 row for 4 samples as 'm'"),
    ("collect", {"m": [torch.ones(1, 2), torch.ones(5)]}, (2,), "tensors that differ in more than their length"),
    ("predict", {"m": torch.ones(3)}, (4,), "3 rows for 4 samples as 'm' (the task's `predict`)"),
    ("score", {"count": torch.tensor(1), "z": torch.tensor(1j)}, (), "a complex number as 'z' (the task's `score`)"),
    ("report", None, ("auc",), "None (the task's `report`): return one number by each name"),
    ("report", {"auc": 1.0}, ("auc",), "no 'loss'"),
    ("report", {"loss": 1.0}, ("auc",), "no 'auc'"),
    ("report", {"loss": 1.0, "auc": None}, ("auc",), "None as 'auc'"),
    ("report", {"loss": 1.0, "text": "x"}, ("loss",), "a str as 'text'"),
    ("report", {"loss": torch.ones(8)}, ("loss",), "a Tensor of shape (8,) as 'loss'"),
    ("report", {"loss": np.ones(8)}, ("loss",), "a ndarray of shape (8,) as 'loss'"),
    *(
        ("report", {"loss": 1.0, name: 0.5}, ("loss",), f"{name!r}, which each line of the log has already")
        for name in ("event", "step", "epoch", "samples", "time_s")
    ),
]  # fmt: skip

KEPT = [
    ("datasets", [ROWS, None], ()),
    ("loss", a_loss(weight=np.float32(2), sums={"hits": 3, "off": ONE}), ()),
    ("losses", {"a": a_loss(factor=2.0, total=ONE), "b": LOSS}, ()),
    ("score", Sums(count=torch.tensor(3)), ()),
    ("trials", Sums(), ()),
    ("collect", {"a": torch.ones(2, 3), "b": ("x", None), "c": [torch.ones(1, 2), torch.ones(5, 2)]}, (2,)),
    ("predict", {"a": [torch.ones(1), "x"], "d": np.ones(2)}, (2,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "found", "about", "said"), BROKEN, ids=[f"{row[0]}: {row[3][:40]}" for row in BROKEN]
)
def test_what_a_method_may_not_return(method, found, about, said):
    with pytest.raises(LockstepError) as error:
        hooks.check(method, found, *about)
    assert str(error.value).startswith(f"`{method}` returns {said}") and f" (the task's `{method}`): " in str(
        error.value
    )


@pytest.mark.parametrize(("method", "found", "about"), KEPT)
def test_what_it_may_return_is_returned(method, found, about):
    assert hooks.check(method, found, *about) is found


def test_a_report_becomes_plain_numbers():
    found = {"loss": np.float64(0.5), "auc": torch.ones(1, 1), "n": 3}
    told = evaluation.reported(SimpleNamespace(report=lambda sums: found, monitor="auc"), Sums())
    assert told == {"loss": 0.5, "auc": 1.0, "n": 3.0} and {*map(type, told.values())} == {float}
    with pytest.raises(LockstepError, match=r"^`report` returns no 'f1'"):
        evaluation.reported(SimpleNamespace(report=lambda sums: found, monitor="f1"), Sums())


def test_the_count_is_that_of_the_samples():
    gathered.check_count(Sums(count=torch.tensor(20)), 20)
    for count in (torch.tensor(160), torch.ones(20)):
        with pytest.raises(LockstepError, match=r"^the `count` of `score` is .* for 20 samples \(the task's `score`\)"):
            gathered.check_count(Sums(count=count), 20)


class Stream(torch.utils.data.IterableDataset):
    __iter__ = __len__ = None


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (DataLoader(ROWS), "DataLoader" + NOT_BY_NUMBER + "the dataset in it"),
        ({"x": ONE}, "dict" + NOT_BY_NUMBER + "a list of its samples"),
        (Stream(), "Stream" + NOT_BY_NUMBER_OF_A_STREAM),
        (ChainDataset([]), "ChainDataset" + NOT_BY_NUMBER_OF_A_STREAM),
        ((n for n in ()), "generator" + NOT_BY_NUMBER_OF_A_STREAM),
        (3, "int" + NOT_BY_NUMBER + "a dataset with __len__ and __getitem__; a list of dicts will do"),
    ],
)
def test_what_gives_no_sample_by_its_number(dataset, said):
    for name, pair in (("training", (dataset, None)), ("training", (dataset, ROWS)), ("validation", (ROWS, dataset))):
        with pytest.raises(LockstepError, match="^" + re.escape(f"the {name} set is a {said}")):
            returned.check_returned("datasets", pair)
    with pytest.raises(LockstepError, match=r"^the training set is a NoneType, which gives"):
        returned.check_returned("datasets", (None, ROWS))
    assert hooks.check("datasets", (ROWS, None)) == (ROWS, None)


@pytest.mark.parametrize(
    ("split", "said"),
    [("train", "give it these methods to score a split"), ("", "or return (train, None) from `datasets`")],
)
def test_a_task_without_score_is_told_what_it_has_not_done(split, said):
    with pytest.raises(LockstepError, match=re.escape(f"lacks score, report (task): see engine/contract.py; {said}")):
        returned.check_scored(type("Bare", (Task,), {})(SimpleNamespace(task="own")), split)


def test_who_passes_on_the_loaders_numbers_is_told():
    """As it is told from DataParallel; see also tests/loader/test_batches.py."""
    error = TypeError("Caught TypeError in replica 0.\nforward() got an unexpected keyword argument 'lockstep'")
    assert task_errors.suggest_fix(error) == "leave that out: net(**contract.inputs(batch))"
    assert not task_errors.suggest_fix(KeyError("label")) and not task_errors.suggest_fix(ValueError("lockstep"))


# ---- where a task is called, and not only for the first batch, which is tried before the first step -----------------


@pytest.mark.slow
@pytest.mark.parametrize(("change", "said"), [
    ({"weight": None}, "a Loss whose weight is None"),
    ({"weight": torch.ones(4)}, "a Loss whose weight is"),
    ({"factor": 2.0}, "a factor of 2.0"),
    ({"total": ONE}, "a Loss whose total has no graph"),
    ({"total": torch.ones(3)}, "a Loss whose total is"),
    (None, "a dict of float"),
])  # fmt: skip
def test_each_loss_is_checked(steps, change, said):  # noqa: F811
    run, _ = steps()
    micro = SimpleNamespace(empty=False, indices=[0], closes_step=False, worker=0)
    run.begin_step()
    run.loss_vector(LOSS, micro)
    with pytest.raises(LockstepError, match=re.escape(f"`loss` returns {said}")):
        run.loss_vector({"total": 1.0} if change is None else a_loss(**change), micro)
    with pytest.raises(LockstepError, match=r"^the sums of the loss are \['hits'\] once and none another time"):
        run.loss_vector(a_loss(sums={"hits": ONE}), micro)


LATER = """
import torch
from tests.tasks.toy import Task as Toy

class Task(Toy):
    num_trials, collect_limit_mb = 3, 0.05

    def late(self, batch, found):
        return {{"one": 1.0}} if batch["lockstep"].index[0] else found

    def score(self, model, batch):
        return self.late(batch, super().score(model, batch)) if {score} else super().score(model, batch)

    def collect(self, model, batch):
        return self.late(batch, {{"y": batch["y"]}}) if {collect} else {{"y": batch["y"]}}

    def trials(self, model, which, stopped):
        return {{"hits": 1.0}} if {trials} else {{"hits": torch.tensor(1)}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "said"), [
    ("score", "a float as 'one'"), ("collect", "a float as 'one'"), ("trials", "a float as 'hits'"), ("", ""),
])  # fmt: skip
def test_each_batch_of_an_evaluation_is_checked(steps, tmp_path, method, said):  # noqa: F811
    late = {name: name == method for name in ("score", "collect", "trials")}
    (tmp_path / "own.py").write_text(LATER.format(**late))
    run, _ = steps("eval_batch_size=8", "check_sums=false", task=str(tmp_path / "own.py"))
    if not method:
        assert evaluation.evaluate_split(run, run.loaders.val)[1]["hits"] == 1
        return
    with pytest.raises(LockstepError, match=f"^`{method}` returns {said}"):
        evaluation.evaluate_split(run, run.loaders.val)


FIRST = """
import torch
from tests.tasks.toy import Task as Toy

class Task(Toy):
    def collect(self, model, batch):
        return {"y": batch["y"]}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "body", "said"), [
    ("score", "return None", "None"),
    ("score", "return {'total': torch.ones(())}", "no `count`, the number of samples"),
    ("score", "return super().score(model, batch) | {'count': torch.tensor(1)}", ""),
    ("collect", "return {'m': batch['x'][1:]}", "3 rows for 4 samples as 'm'"),
    ("collect", "return {'m': torch.zeros(len(batch['x']), 100000)}", "9.2 MB, and rank 0 may hold 5"),
])  # fmt: skip
def test_the_first_samples_are_checked_before_the_first_step(steps, tmp_path, method, body, said):  # noqa: F811
    limit = "    collect_limit_mb = 5\n"
    (tmp_path / "own.py").write_text(f"{FIRST}{limit}    def {method}(self, model, batch):\n        {body}\n")
    what = f"`{method}` returns {said}" if said else "the `count` of `score` is 1 for 4 samples"
    with pytest.raises(LockstepError, match="^" + re.escape(what)):
        steps(task=str(tmp_path / "own.py"))
