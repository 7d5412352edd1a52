"""ddp.strategy=fsdp and hsdp: a model larger than one GPU takes the same steps, with virtual workers the same bits."""

import copy
import json
import os
import re
import signal
import sys

import pytest
import torch
from conftest import FAULTY, ROOT, TOY, launching, succeed
from saved import assert_same, assert_same_bits, load
from test_same_bits import BITS, CONV, NORMS, complete, interrupt_thrice
from test_the_idea import TERMS

import tasks
from engine import config, plan
from engine.comm.world import World
from engine.contract import LockstepError
from engine.optim import ema, fused
from plugins.parallel import exact as exact_kernels
from plugins.parallel import fsdp
from plugins.parallel.exact import use_exact_kernels
from plugins.parallel.virtual import VirtualWorkers

SHARDED, FORWARDS, UNUSED = (
    str(ROOT / "tests" / place) for place in ("tasks/sharded.py", "ranks/forwards.py", "ranks/unused.py")
)
ALONE = World(0, 0, 1, torch.device("cpu"))

CUTS = {"ddp 1": ["ddp"], "ddp 2": ["ddp"], "fsdp 1": ["fsdp"], "fsdp 3": ["fsdp"], "fsdp 4": ["fsdp"]}

RUNS = {
    "conv": [*CONV, "global_batch=13", "batch_size=2", "amp=fp16"],
    "idle workers": [*CONV, "global_batch=5"],
    "attention": [NORMS, "model.network=attention", "global_batch=14", "amp=bf16"],
    "perceptron": [NORMS, "model.network=perceptron", "global_batch=15", "drop_last=true", "optim.name=sgd"],
    "blocks": [SHARDED, "global_batch=13", "model.width=10"],
    "recomputed": [SHARDED, "global_batch=13", "model.width=10", "model.kind=recomputed"],
    "terms": [TERMS, "model.dropout=0.3", "global_batch=20", "batch_size=2"],
}
"""Six workers: on four processes a round has two passes without a worker; weights of 10 rows are 3 + 3 + 3 + 1."""


@pytest.fixture(scope="module")
def trained(once):
    def build(folder):
        for cut, (strategy,) in CUTS.items():
            processes = int(cut.split()[1])
            more = ["virtual_workers=6", "memory_format=contiguous", f"ddp.strategy={strategy}"]
            runs = [[*complete(words), *more, f"save_dir={folder / cut / name}"] for name, words in RUNS.items()]
            with launching() as launch:
                words = BITS, json.dumps(runs)
                succeed(launch.python(*words) if processes == 1 else launch.torchrun(processes, *words))

    return once("sharded_bits", build)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "ddp 1"])
def test_every_strategy_and_number_of_processes_ends_in_the_same_bits(trained, cut, name):
    ours, straight = trained / cut / name, trained / "ddp 1" / name.replace("recomputed", "blocks")
    assert load(straight)["progress"]["step"] >= 5
    assert_same_bits(ours, straight)


@pytest.mark.slow
def test_killed_on_one_strategy_and_resumed_on_another(launch, tmp_path):
    """The plug is pulled on ddp on 3, a rank of fsdp on 4 is killed, fsdp on 2 is stopped in good order, ddp on 1 ends
    the run: the bits and the log of the straight run on one."""
    words = ["train.py", *CONV, "global_batch=13", "batch_size=2", "amp=off", "virtual_workers=4", "steps=40"]
    words += "log_every=2 eval_every=10 seed=3 optim.ema_decay=0.9 epochs=50 save_every=2".split()
    words += ["memory_format=contiguous"]
    folder, strategies = tmp_path / "run", ("ddp", "fsdp", "fsdp")
    more = [[f"ddp.strategy={name}"] for name in strategies]
    interrupt_thrice(launch, [*words, f"save_dir={folder}"], folder, (3, 4, 2), (6, 14, 24), 40, more)
    succeed(launch.python(*words, f"save_dir={folder}"))
    succeed(launch.python(*words, f"save_dir={tmp_path / 'straight'}"))
    assert_same_bits(folder, tmp_path / "straight")


@pytest.mark.slow
def test_one_file_for_all_strategies(launch, tmp_path):
    """In float64, without virtual workers: the last one differs from the straight run by rounding."""
    words = ["train.py", SHARDED, "model.double=true", "model.width=10", "global_batch=12", "optim.ema_decay=0.9"]
    words += ["schedule.horizon=12", "epochs=0", "optim.grad_clip=0.5", "check_every=1"]
    for steps, processes, strategy in ((3, 2, "ddp"), (6, 3, "fsdp"), (9, 4, "hsdp"), (12, 2, "ddp")):
        more = [f"steps={steps}", f"ddp.strategy={strategy}", "ddp.shards=2", f"save_dir={tmp_path / 'run'}"]
        done = succeed(launch.torchrun(processes, *words, *more))
        assert steps == 3 or f"step {steps - 3}," in done.out
    succeed(launch.python(*words, "steps=12", f"save_dir={tmp_path / 'straight'}"))
    ours, straight = load(tmp_path / "run"), load(tmp_path / "straight")
    for part in ("model", "ema"):
        for name, value in straight[part].items():
            torch.testing.assert_close(ours[part][name], value, rtol=1e-9, atol=1e-12, msg=name)
    kept = ours["optimizer"]["state"]
    for number, state in straight["optimizer"]["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(kept[number][name], value, rtol=1e-8, atol=1e-12)


@pytest.mark.slow
def test_a_run_of_shards_is_scored_and_exported_like_any_other(launch, tmp_path):
    """By one process with the whole model; and by several that hold rows, to the last digit."""
    run = tmp_path / "run"
    words = ["har", "dataset.stride=512", "ddp.strategy=fsdp", "steps=3", "optim.ema_decay=0.5", "amp=off"]
    succeed(launch.torchrun(2, "train.py", *words, f"save_dir={run}"))
    alone = succeed(launch.python("tools/evaluate.py", str(run), "--json"))
    rows = succeed(
        launch.torchrun(3, "tools/evaluate.py", str(run), "--json", "ddp.strategy=fsdp", "eval_batch_size=48")
    )
    whole = succeed(launch.python("tools/evaluate.py", str(run), "--json", "eval_batch_size=48"))
    said = [json.loads(done.out[done.out.index("{") :]) for done in (alone, rows, whole)]
    for each in said:
        each.pop("processes", None)
    assert said[1] == said[2] and said[1].keys() == said[0].keys()
    succeed(launch.python("tools/export.py", str(run), "--out", str(tmp_path / "model.pt2")))
    assert (tmp_path / "model.pt2").exists()


FORWARD_CASES = {
    "a rank has more batches": (2, [TOY, "eval_batch_size=8"]),
    "a rank has none": (3, [TOY, "eval_batch_size=8", "dataset.val_samples=5"]),
    "terms": (2, [TERMS, "gradient_accumulation_steps=2", "batch_size=3"]),
    "virtual workers": (3, [TOY, "virtual_workers=4", "global_batch=10", "eval_batch_size=9"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FORWARD_CASES)
def test_every_rank_calls_the_model_equally_often(launch, tmp_path, case):
    """Through training, evaluation, a stop by a signal of one rank, a resume and the exit: else a rank would wait for
    ever in an all-gather. The counts are compared for each phase of each step."""
    processes, words = FORWARD_CASES[case]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", FORWARDS]
    words = [
        *words,
        "ddp.strategy=fsdp",
        "optim.ema_decay=0.9",
        "eval_every=5",
        "log_every=2",
        "epochs=0",
        "check_every=2",
    ]
    counts = tmp_path / "counts"
    run = launch.start(
        sys.executable, *torchrun, *words, "steps=100000", f"save_dir={tmp_path / 'run'}", COUNTS=str(counts)
    )
    run.wait_for("step 12/")
    os.kill(launch.rank_pid(processes - 1), signal.SIGTERM)
    assert run.wait().code
    stopped = load(tmp_path / "run")["progress"]["step"]
    succeed(
        launch(sys.executable, *torchrun, *words, f"steps={stopped + 7}", "schedule.horizon=100000",
               f"save_dir={tmp_path / 'run'}", COUNTS=str(counts))
    )  # fmt: skip
    of_ranks = [
        [json.loads(line) for line in (tmp_path / f"counts.{rank}").read_text().splitlines()]
        for rank in range(processes)
    ]
    assert len(of_ranks[0]) == 2 and all(len(each) > 10 for each in of_ranks[0])
    assert {name.split()[0] for each in of_ranks[0] for name in each} >= {"forward", "validation"}
    for other in of_ranks[1:]:
        assert other == of_ranks[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch's switch", "by hand"])
@pytest.mark.parametrize("processes", [2, 3])
def test_a_weight_that_one_rank_leaves_out_counts_as_zeros(launch, processes, way):
    """Ranks would sum buffers of other sizes, which hangs or adds up what does not belong together."""
    done = succeed(launch.torchrun(processes, UNUSED, way))
    assert done.out.count("has the plain gradients") == processes


@pytest.mark.slow
def test_ranks_agree_to_leave_an_evaluation(launch, tmp_path):
    """One is asked to stop as it begins to score: the others must not wait for its forward passes."""
    run = [TOY, "ddp.strategy=fsdp", "eval_every=5", "steps=10", "eval_batch_size=2", "ddp.timeout_s=20"]
    run.append(f"save_dir={tmp_path}")
    stopped = launch.torchrun(2, BITS, json.dumps([run]), "SIGTERM:1:5:evaluated")
    assert stopped.code and "Stopped after step 5 of 10: " in stopped.out, stopped.out + stopped.err[-2000:]
    assert load(tmp_path)["progress"]["evaluation_due"]
    done = succeed(launch.torchrun(2, "train.py", *run))
    assert "Done: 10 steps" in done.out


@pytest.mark.slow
def test_a_vote_in_a_pass_beyond_the_last_worker_counts(launch, tmp_path):
    """Four workers on three: the last rank's second pass has no worker, and ends the step; no evaluation is near."""
    run = [TOY, "ddp.strategy=fsdp", "virtual_workers=4", "global_batch=10", "steps=20", f"save_dir={tmp_path}"]
    stopped = launch.torchrun(3, BITS, json.dumps([run]), "SIGTERM:2:2:end_step")
    assert stopped.code and "Stopped after step 4 of 20: " in stopped.out, stopped.out + stopped.err[-2000:]


REFUSED = {
    "model.kind=scalar": "the weight scale has no rows to shard (ddp.strategy=fsdp): give it the shape (1,)",
    "model.kind=tied_units": "blocks.0, whose weight blocks.0.inner.weight another module has, too",
    "model.kind=trials": "trials call the model on each rank by itself (ddp.strategy=fsdp)",
    "model.kind=parts": "a weight is used past the module that FSDP2 makes it whole for",
    "model.optimizer=wrong": "a step of Rowwise on rows of end.bias is not that on the whole weight",
    "optim.name=adafactor": "Adafactor cannot take a step on rows of weights",
    "ddp.gather_dtype=bf16": "ddp.gather_dtype=bf16 without autocast (ddp.strategy=fsdp): add amp=bf16",
    "ddp.strategy=hsdp ddp.shards=3": "2 processes are no groups of 3 (ddp.shards) (ddp.strategy=hsdp)",
    "optim.zero=true": "optim.zero=true is no longer there (optim.zero): use ddp.strategy=fsdp, which shards moments, ",
}


@pytest.mark.slow
def test_what_cannot_be_sharded_is_refused_before_anything_is_written(launch, tmp_path):
    common = [SHARDED, "ddp.strategy=fsdp", "steps=2", "batch_size=6", f"save_dir={tmp_path / 'run'}", "amp=off"]
    for words, says in REFUSED.items():
        done = launch.torchrun(2, "train.py", *(word for word in common if word[:12] != words[:12]), *words.split())
        assert done.code and any(says in line for line in done.errors), (words, done.err[-3000:])
        assert not (tmp_path / "run" / "last.pt").exists(), words
    base = [SHARDED, "steps=2", "amp=off"]
    for word in ("model.kind=tied", "model.kind=units", "model.optimizer=right", "optim.name=muon"):
        ours, whole = tmp_path / word, tmp_path / f"{word}.whole"
        more = [word, "batch_size=6", "ddp.strategy=fsdp", f"save_dir={ours}"]
        succeed(launch.torchrun(2, "train.py", *base, *more))
        succeed(launch.python("train.py", *base, word, "batch_size=12", f"save_dir={whole}"))
        for name, value in load(whole)["model"].items():
            near = 1e-3 if "muon" in word else 1e-5  # it computes in bf16
            torch.testing.assert_close(load(ours)["model"][name], value, rtol=1e-3, atol=near, msg=f"{word} {name}")


@pytest.mark.parametrize(("backend", "refused"), [("gloo", True), ("cpu:gloo,cuda:nccl", False), ("nccl", False)])
def test_shards_on_gpus_need_nccl(monkeypatch, backend, refused):
    """Two processes that shared a GPU by gloo ended in a segmentation fault. A later refusal stands for the rest."""
    cfg = config.parse([SHARDED, "ddp.strategy=fsdp", "ddp.gather_dtype=bf16"], tasks.load).cfg
    task = tasks.load(SHARDED)(cfg)
    monkeypatch.setattr(fsdp.dist, "get_backend", lambda: backend)
    words = "shards on GPUs through gloo" if refused else "ddp.gather_dtype=bf16 without autocast"
    with pytest.raises(LockstepError, match=words):
        fsdp.shard(task.model(), cfg, World(0, 0, 2, torch.device("cuda")), task, "fp32")


TOLD = {
    "a copy that drifts": (
        "fault.kind=drift fault.rank=1 fault.step=2 check_every=1 ddp.strategy=hsdp ddp.shards=1 check_resume=false",
        "rank 1 differs from rank 0 in parameter layers.0.weight: ",
    ),
    "a rank that hangs": (
        "fault.kind=hang fault.rank=1 fault.step=3 ddp.timeout_s=8",
        r"rank 1 has been in forward for \d+ s; waiting: rank 0 in all_gather \(step 2",
    ),
    "a weight that nothing uses": ("fault.kind=unused", "some parameters got no gradient: spare.weight, spare.bias"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TOLD)
def test_what_goes_wrong_among_shards_is_told_as_without(launch, tmp_path, what):
    words, says = TOLD[what]
    strategy = [] if "strategy" in words else ["ddp.strategy=fsdp"]
    words = [FAULTY, *words.split(), *strategy, "steps=6", "batch_size=8", "amp=off", f"save_dir={tmp_path}"]
    done = launch.torchrun(2, "train.py", *words)
    assert done.code and any(re.search(says, line) for line in done.errors), done.err[-3000:]


@pytest.mark.slow
def test_a_record_and_weights_that_no_checkpoint_holds(launch, tmp_path):
    """Whole tensors of all ranks are noted, and compared when the run goes on."""
    words = ["train.py", SHARDED, "model.kind=left_out", "batch_size=6", "amp=off", "schedule.horizon=6"]
    records = []
    for strategy, processes in (("ddp", 1), ("fsdp", 2)):
        folder = tmp_path / strategy
        for steps in (3, 6):
            more = [f"ddp.strategy={strategy}", f"save_dir={folder}", f"steps={steps}", "record=2", "global_batch=12"]
            succeed(launch.torchrun(processes, *words, *more))
        assert not any(name.startswith("begin.") for name in load(folder)["model"])
        records.append(*(path for path in folder.glob("*step*") if path.suffix != ".pt"))
    assert all(path.stat().st_size > 1000 for path in records)
    for name, value in load(tmp_path / "ddp")["model"].items():
        torch.testing.assert_close(load(tmp_path / "fsdp")["model"][name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("words", "key"), [
    (["cuda_graph=true"], "cuda_graph"), (["compile=default"], "compile"),
    (["memory_format=channels_last"], "memory_format"), (["ddp.comm_hook=fp16"], "ddp.comm_hook"),
    (["ddp.sync_bn=true"], "ddp.sync_bn"), (["ddp.static_graph=true"], "ddp.static_graph"),
    (["ddp.strategy=hsdp", "virtual_workers=4"], "virtual_workers"),
])  # fmt: skip
def test_settings_that_exclude_shards(words, key):
    strategy = [] if "strategy" in words[0] else ["ddp.strategy=fsdp"]
    cfg = config.parse([TOY, *strategy, *words], tasks.load).cfg
    with pytest.raises(LockstepError, match=rf"^{key}=\w+ with ddp.strategy=\w+ \({key}\): "):
        plan.make_plan(cfg, ALONE, 100)


@pytest.mark.slow
def test_bf16_weights_are_another_recipe(launch, tmp_path):
    """With gather_dtype=bf16 each weight is rounded before it is used; the weights themselves stay float32."""
    common = [SHARDED, "ddp.strategy=fsdp", "steps=4", "batch_size=6", "amp=bf16", "optim.lr=1e-3"]
    for dtype in ("weights", "bf16"):
        words = [*common, f"ddp.gather_dtype={dtype}", f"save_dir={tmp_path / dtype}"]
        succeed(launch.torchrun(2, "train.py", *words))
    whole, half = (load(tmp_path / dtype)["model"] for dtype in ("weights", "bf16"))
    assert all(value.dtype == torch.float32 for value in half.values())
    gap = max(float((whole[name] - half[name]).abs().max()) for name in whole)
    assert 1e-6 < gap < 1e-2, gap


def test_the_norm_by_rows_is_the_norm():
    """In float64 to rounding, for weights of one axis, of none, of widths that are no power of two, and more than fits
    into one table at once."""
    torch.manual_seed(0)
    for shapes in ([(7, 3), (5,), (2, 3, 5, 2), ()], [(1, 1)], [(3, 2_000_000)]):
        grads = [torch.randn(shape) for shape in shapes]
        found = VirtualWorkers(3, ALONE, torch.nn.Linear(1, 1)).grad_norm(grads)
        exact = torch.cat([grad.flatten().double() for grad in grads]).square().sum().sqrt()
        kept = [grad.double() for grad in grads]
        torch.testing.assert_close(
            VirtualWorkers(3, ALONE, torch.nn.Linear(1, 1)).grad_norm(kept), exact, rtol=1e-12, atol=0
        )
        assert all(torch.equal(a, b.double()) for a, b in zip(kept, grads, strict=True)), "they are only read"
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    bad = [torch.tensor([[1.0, float("nan")]]), torch.ones(2)]
    assert VirtualWorkers(3, ALONE, torch.nn.Linear(1, 1)).grad_norm(bad).isnan()


@pytest.mark.parametrize("optimizer", [
    lambda p: fused.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    lambda p: fused.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True),
    lambda p: fused.SGD(p, lr=1e-2, fused=True),
])  # fmt: skip
def test_the_exact_step_does_not_depend_on_where_a_weight_is_cut(monkeypatch, optimizer):
    """Nor on the pieces that it works on. It is the fused kernel's up to rounding, and leaves all alone if the step is
    to be skipped."""
    torch.manual_seed(0)
    begin, grads = torch.randn(101), [torch.randn(101) for _ in range(4)]

    def stepped(lengths, exact):
        parameters = [torch.nn.Parameter(part.clone()) for part in begin.split(lengths)]
        own = optimizer(parameters)
        if exact:
            use_exact_kernels(own)
        for number, grad in enumerate(grads):
            for p, part in zip(parameters, grad.split(lengths), strict=True):
                p.grad = part.clone()
            own.grad_scale, own.found_inf = torch.tensor(2.0), torch.tensor(float(number == 2))
            own.step()
        return torch.cat([p.detach() for p in parameters])

    whole = stepped([101], True)
    for lengths in ([7, 94], [12, 36, 53], [1] * 101):
        assert torch.equal(stepped(lengths, True), whole)
    torch.testing.assert_close(stepped([101], False), whole, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(exact_kernels, "CACHED", 30)
    for lengths in ([101], [12, 36, 53], [1] * 101):
        assert torch.equal(stepped(lengths, True), whole)


FROZEN = """
import os
from tests.tasks import sharded

if os.environ["RANK"] == "1":
    os.chdir("/")

class Task(sharded.Task):
    def saved(self, name):
        return not name.startswith("begin")
"""
"""Rank 1 works in another folder, as on a node whose disk lacks a file."""


@pytest.mark.slow
def test_a_rank_without_the_file_of_weights_ends_all_at_once(launch, tmp_path):
    """Between the file and the first step, ranks compare the weights that no checkpoint holds: a collective with
    shards, for which the others must not wait."""
    (tmp_path / "frozen.py").write_text(FROZEN)
    torch.save({"begin.weight": torch.zeros(16, 8)}, tmp_path / "w.pt")
    done = launch.torchrun(
        *(2, str(ROOT / "train.py"), str(tmp_path / "frozen.py"), "ddp.strategy=fsdp", "ddp.timeout_s=12"),
        *("init_from=/proc/self/cwd/w.pt", "optim.freeze=begin.*", f"save_dir={tmp_path / 'run'}"),
        cwd=tmp_path,
    )
    assert done.code == 1 and "hangs" not in done.err
    assert "no weights there" in done.err and "init_from=/proc/self/cwd/w.pt" in done.err
    assert not (tmp_path / "run").exists()


def test_a_buffer_with_two_names_is_swapped_once():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    average = ema.EMA(model, 0.5)
    model[0].running_mean.fill_(1.0)
    average.update(torch.tensor(0.0))
    model[0].running_mean.fill_(2.0)
    average.update(torch.tensor(0.0))
    with average.swapped():
        assert model[1].running_mean.tolist() == [1.5, 1.5]
    assert model[0].running_mean.tolist() == [2.0, 2.0]
    assert average.state_dict()["module.1.running_mean"].tolist() == [1.5, 1.5]


def test_the_average_is_swapped_in_and_out():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    average = ema.EMA(model, 0.5)
    own = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.add_(1.0)
    average.update(torch.tensor(0.0))
    average.update(torch.tensor(0.0))
    with torch.no_grad():
        model[0].weight.add_(1.0)
    now, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(average.state_dict())
    with pytest.raises(KeyError), average.swapped():
        torch.testing.assert_close(model[0].weight, own["0.weight"] + 1.0)
        torch.testing.assert_close(average.values["0.weight"], now["0.weight"])
        raise KeyError("the evaluation fails")
    assert_same(dict(model.state_dict()), dict(now))
    assert_same(average.state_dict(), kept)
