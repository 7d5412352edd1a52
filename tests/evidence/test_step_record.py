"""record=N: the file holds what step N has computed, and the training does not notice."""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT, TOY, succeed
from runs import records, same_bits, weights
from torch import nn

import tasks
from engine import config
from engine.code_digest import code_of
from engine.comm import digests
from engine.contract import sample_seeds, uniform
from plugins.reporting.step_record import SIGNS, sketched

TERMS = str(ROOT / "tests" / "tasks" / "terms.py")
COMMON = ["log_every=2", "seed=3", "model.double=true"]
WORDS = [TOY, "global_batch=12", "batch_size=3", "steps=4", *COMMON]


def read(folder, step=2):
    with np.load(folder / f"record_step_{step}.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    about = json.loads(str(arrays.pop("about")))
    for entry in about["entries"]:
        rows = slice(entry["first"], entry["first"] + entry["rows"])
        entry["rows"] = {name: values[rows] for name, values in arrays.items()}
    return about


def test_it_is_what_a_plain_loop_computes(launch, tmp_path):
    """The second step, of the weights of the first one's checkpoint: four passes of three samples."""
    words = [
        *WORDS,
        "save_every=1",
        "keep_checkpoints=9",
        "record=2",
        "optim.grad_clip=0.05",
        "optim.lr_scale=layers.0:0.5",
    ]
    done = succeed(launch.python("train.py", *words, f"save_dir={tmp_path}"))
    assert f"  record       {tmp_path / 'record_step_2.npz'} (" in done.out
    about = read(tmp_path)
    before, after = (torch.load(tmp_path / f"step_{n}.pt", weights_only=True)["model"] for n in (1, 2))
    task = tasks.load(TOY)(config.parse(WORDS, tasks.load).cfg)
    (data, _), net = task.datasets(), task.model()
    net.load_state_dict(before)
    order = np.random.default_rng((3, 0)).permutation(len(data))
    noise, outputs = uniform(sample_seeds(3, 0, torch.arange(61)), 8).double() * 0.01, {}
    for name, module in net.named_modules():
        module.register_forward_hook(lambda m, i, output, name=name: outputs.setdefault(name, []).append(output))
    total = weight = 0
    for worker in range(4):
        at = [*range(12 + 3 * worker, 15 + 3 * worker)]
        batch = data.__getitems__(order[at].tolist())
        total = total + task._errors(net, batch | {"x": batch["x"] + noise[at]}).sum()
        weight += batch["mask"].sum()
    (total / weight).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    assert norm > 0.05
    entries = about["entries"]
    assert [e["kind"] for e in entries[:10]] == ["batch"] * 3 + ["forward"] * 6 + ["loss"], "in their order"
    forward = [e for e in entries if e["kind"] == "forward" and e["name"] == "layers.1"]
    assert sorted(np.concatenate([e["rows"]["positions"] for e in forward])) == [*range(12, 24)]
    for e in forward:
        rows = [position - 12 for position in e["rows"]["positions"]]
        assert e["rows"]["indices"].tolist() == order[12:24][rows].tolist()
        truth = torch.cat(outputs["layers.1"])[rows].norm(dim=1)
        torch.testing.assert_close(torch.from_numpy(e["rows"]["norms"]), truth.detach(), rtol=1e-9, atol=0)
    assert {e["name"] for e in entries if e["kind"] == "forward"} == {"the model", *filter(None, outputs)}
    for name, p in net.named_parameters():
        (e,) = [e for e in entries if (e["kind"], e["name"]) == ("gradient", name)]
        torch.testing.assert_close(e["rows"]["norms"][0], p.grad.norm().item(), rtol=1e-9, atol=0)
        (e,) = [e for e in entries if (e["kind"], e["name"]) == ("weight", name)]
        assert e["rows"]["digests"][0] == digests.of_rows(after[name].view(1, -1))[0]
    (loss,) = [e for e in entries if e["name"].startswith("of the step")]
    parts = torch.stack([total.detach(), weight.double()])
    torch.testing.assert_close(loss["rows"]["norms"][0], parts.norm().item(), rtol=1e-9, atol=0)
    line = records(tmp_path, "train")[0]
    assert line["step"] == 2 and about["lr"] == line["lr"] > line["lr_min"], "the largest rate of the groups"
    assert about["step"] == 2 and about["code_files"] == code_of(TOY, task, net) and about["config"]["seed"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("task", [TOY, TERMS])
def test_any_cut_writes_the_same_file_and_the_training_does_not_notice(launch, tmp_path, task):
    """With dropout, several passes of a worker, and a loss of several terms."""
    words = ["train.py", task, "log_every=2", "seed=3", "model.dropout=0.3", "steps=6"]
    words += ["virtual_workers=4", "batch_size=2", "global_batch=12"]
    succeed(launch.python(*words, f"save_dir={tmp_path / 'plain'}"))
    succeed(launch.python(*words, "record=5", f"save_dir={tmp_path / '1'}"))
    succeed(launch.torchrun(3, *words, "record=5", f"save_dir={tmp_path / '3'}"))
    assert same_bits(weights(tmp_path / "plain"), weights(tmp_path / "1"))
    ours, theirs = read(tmp_path / "3", 5), read(tmp_path / "1", 5)
    assert (ours["processes"], theirs["processes"]) == (3, 1)
    assert len(ours["entries"]) == len(theirs["entries"]) > 20
    for a, b in zip(ours["entries"], theirs["entries"], strict=True):
        rows, others = a.pop("rows"), b.pop("rows")
        assert a == b
        for name in ("positions", "indices", "digests"):
            assert rows[name].tolist() == others[name].tolist(), a


def test_the_difference_of_sketches_is_that_of_the_rows():
    dice = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 3000, generator=dice)
    other = rows + 1e-3 * torch.randn(50, 3000, generator=dice) * torch.arange(50)[:, None]
    (_, norms, a), (_, _, b) = sketched(rows), sketched(other)
    torch.testing.assert_close(norms, rows.double().norm(dim=1))
    truth, estimate = (rows.double() - other).norm(dim=1), (a - b).square().mean(1).sqrt()
    assert a.shape == (50, SIGNS) and estimate[0] == 0
    assert 0.75 < (estimate[1:] / truth[1:]).mean() < 1.15, "to about a quarter each, so to a twentieth in the mean"
    assert (estimate[1:] / truth[1:]).std() < 0.4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["record=9"], "the run ends at step 4 (record=9): record one of it"),
        (["record=2", "compile=default"], "the modules of a step cannot be seen with compile (record): drop compile"),
    ],
)
def test_what_cannot_be_recorded_is_refused(launch, tmp_path, words, said):
    done = launch.python("train.py", *WORDS, *words, f"save_dir={tmp_path}")
    assert done.code == 2 and done.errors == [f"error: {said}"]


@pytest.mark.slow
def test_it_is_written_after_a_resume_and_not_again_later(launch, tmp_path):
    words = ["train.py", TOY, *COMMON, "global_batch=12", "schedule.horizon=9", f"save_dir={tmp_path}"]
    succeed(launch.python(*words, "steps=4"))
    words.append("record=5")
    succeed(launch.python(*words, "steps=5"))
    path = tmp_path / "record_step_5.npz"
    path.unlink()
    succeed(launch.python(*words, "steps=6"))
    assert not path.exists()
