"""optim.zero: each process keeps a share of the optimizer's moments, and nothing else changes."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import FAULTY, ROOT, TOY, launching, succeed
from test_resume import assert_same, load, logged
from test_the_idea import SMALL
from torch import nn

from engine import optim
from engine.comm.world import World
from engine.config import Optim
from engine.contract import LockstepError
from engine.optim.fused import AdamW
from engine.optim.zero import Zero

MANY, SHARES = (str(ROOT / "tests" / "ranks" / name) for name in ("many.py", "shares.py"))

COMMON = ["seed=3", "log_every=1", "global_batch=12", "schedule.warmup_steps=2", "optim.ema_decay=0.9"]
COMMON += ["optim.grad_clip=0.1", "optim.weight_decay=0.1", "check_every=1"]

TASKS = {"toy": [TOY], "nan": [FAULTY, "fault.kind=nan sample"], "video": ["video", *SMALL["video"]]}

STRAIGHT = {"toy": ["steps=8"], "nan": ["steps=8"], "video": ["steps=3", "memory_format=channels_last"]}
"""The kernels of a video's network do not lie in the usual order."""

CUTS = {"2x3x2": (2, 3), "3x4": (3, 4)}
"""processes, samples per process and pass"""


@pytest.fixture(scope="module")
def folder(once):
    """A run per cut, task and kind, all in float64: <cut>/<task>_<zero>, and <task> on one process."""

    def train_all(folder):
        with launching() as launch:
            tasks = {name: [*words, *STRAIGHT[name], *COMMON] for name, words in TASKS.items()}
            straight = [[*words, f"save_dir={folder / name}"] for name, words in tasks.items()]
            succeed(launch.python(MANY, json.dumps(straight)))
            for cut, (processes, batch) in CUTS.items():
                runs = [
                    [*words, f"batch_size={batch}", f"optim.zero={zero}", f"save_dir={folder / cut / name}_{zero}"]
                    for name, words in tasks.items()
                    for zero in ("true", "false")
                ]
                succeed(launch.torchrun(processes, MANY, json.dumps(runs)))

    return once("zero", train_all)


def assert_equal_but_for_zero(ours, theirs):
    """The whole checkpoint, its optimizer too, and the log, bit for bit."""
    a, b = load(ours), load(theirs)
    assert (a["config"]["optim"].pop("zero"), b["config"]["optim"].pop("zero")) == (True, False)
    a["config"]["save_dir"] = b["config"]["save_dir"]
    assert_same(a, b)
    assert logged(ours) == logged(theirs)


def assert_near(ours, theirs):
    a, b = load(ours), load(theirs)
    for part in ("model", "ema"):
        for name, value in b[part].items():
            torch.testing.assert_close(a[part][name], value, rtol=1e-9, atol=1e-11)
    one, two = a["optimizer"]["state"], b["optimizer"]["state"]
    assert one.keys() == two.keys()
    for number, state in two.items():
        assert one[number]["step"] == state["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one[number][name], state[name], rtol=1e-6, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("task", TASKS)
def test_the_same_bits_with_and_without(folder, task, cut):
    """Accumulation, clipping, average, short last steps, warm-up, weight decay on some; a step that is skipped."""
    ours, theirs = (folder / cut / f"{task}_{zero}" for zero in ("true", "false"))
    assert_equal_but_for_zero(ours, theirs)
    assert_near(ours, folder / task)
    skipped = len([line for line in logged(ours) if line["event"] == "skipped"])
    counters = {state["step"].item() for state in load(ours)["optimizer"]["state"].values()}
    assert skipped == (task == "nan") and counters == {load(folder / task)["progress"]["step"] - skipped}


LAST, USUAL = "memory_format=channels_last", "memory_format=contiguous"

WAY = [
    # processes, and the runs that resume there: task, up to which step, optim.zero, layout
    (2, [("toy", 1, "true", USUAL), ("video", 1, "false", LAST)]),
    (3, [("toy", 2, "true", USUAL), ("video", 2, "true", USUAL)]),
    (1, [("toy", 3, "true", USUAL)]),
    (2, [("toy", 4, "true", USUAL), ("toy", 8, "false", USUAL), ("video", 3, "true", LAST)]),
]


@pytest.mark.slow
def test_runs_resume_with_other_processes_and_zero(launch, folder, tmp_path):
    """Moments follow kernels that change their layout at the resume."""
    straight = {task: load(folder / task) for task in ("toy", "video")}
    last = {task: state["progress"]["step"] for task, state in straight.items()}
    for processes, legs in WAY:
        runs = []
        for task, step, zero, layout in legs:
            now = [f"steps={step}", f"schedule.horizon={last[task]}", f"optim.zero={zero}", layout]
            runs.append([*TASKS[task], *COMMON, *now, f"save_dir={tmp_path / task}"])
        words = MANY, json.dumps(runs)
        succeed(launch.torchrun(processes, *words) if processes > 1 else launch.python(*words))
        for task, step, *_ in legs:
            state = load(tmp_path / task)
            assert state["progress"]["step"] >= step
            assert state["optimizer"]["state"].keys() == straight[task]["optimizer"]["state"].keys()
    for task in straight:
        assert_near(tmp_path / task, folder / task)


@pytest.mark.slow
def test_fp16_and_its_scale_are_the_same(launch, tmp_path):
    """GradScaler finds what it wants of the optimizer: a step that overflows is left to the kernel, and halves it."""
    runs = [
        [FAULTY, "fault.kind=nan sample", "amp=fp16", "steps=8", f"optim.zero={zero}", f"save_dir={tmp_path / zero}"]
        for zero in ("true", "false")
    ]
    succeed(launch.torchrun(2, SHARES, str(tmp_path / "held.json"), json.dumps(runs)))
    assert_equal_but_for_zero(tmp_path / "true", tmp_path / "false")
    assert load(tmp_path / "true")["scaler"]["scale"] < 2**16
    held, _ = json.loads((tmp_path / "held.json").read_text())
    assert all(len(rank["waited"]) == 8 for rank in held), "a skipped step is the kernel's business, not the host's"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 5])
def test_each_rank_holds_its_share_and_no_more(launch, tmp_path, processes):
    """Of four parameters; on five processes one has none. Nor does a checkpoint leave anything behind."""
    run = [TOY, "model.width=3000", "schedule.horizon=4", f"save_dir={tmp_path / 'zero'}", "optim.zero=true"]
    runs = [[*run, "steps=2"], [*run, "steps=4"]]  # the second resumes it
    runs.append([*run[:3], "steps=2", f"save_dir={tmp_path / 'plain'}"])
    done = succeed(launch.torchrun(processes, SHARES, str(tmp_path / "held.json"), json.dumps(runs)))
    ours, resumed, plain = json.loads((tmp_path / "held.json").read_text())
    whole = 2 * 4 * (8 * 3000 + 3000 + 3000 * 4 + 4)
    assert {(rank["class"], rank["moments"]) for rank in plain} == {("AdamW", whole)}
    shares = [rank["moments"] for rank in ours]
    sizes = [8 * size for size in (24000, 12000, 3000, 4)]
    assert sorted(shares) == sorted([sizes[0], sum(sizes[1:])] if processes == 2 else [0, *sizes])
    assert f"optimizer (largest of {processes} shares) {max(shares) / 1e6:.1f} MB" in done.out
    assert f"optimizer {whole / 1e6:.1f} MB" in done.out
    for zero in (ours, resumed):
        assert [rank["moments"] for rank in zero] == shares
        assert {rank["class"] for rank in zero} == {"Zero"}
        assert all(rank["waited"] == [True, True] for rank in zero), "the watch must know that a rank waits for others"
        for rank, share in enumerate(shares):
            saved = plain[rank]["live"] - zero[rank]["live"]
            assert saved == pytest.approx(whole - share, abs=2000), f"rank {rank} keeps something else"


@pytest.mark.parametrize("world", [None, World(0, 0, 1, torch.device("cpu"))])
def test_one_process_has_the_plain_optimizer(world):
    optimizer = optim.make_optimizer(nn.Linear(3, 2), Optim(zero=True), world)
    assert type(optimizer) is AdamW and len(optimizer.param_groups) == 2


def test_a_model_of_two_types_is_refused_in_words():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double())
    with pytest.raises(LockstepError, match=r"the model has float32 and float64 \(optim.zero\): drop it"):
        optim.make_optimizer(model, Optim(zero=True), World(0, 0, 2, torch.device("cpu")))


def test_a_rank_loads_its_share_and_the_state_of_no_parameter(monkeypatch):
    def share_out(groups, keep_share, **_):
        return keep_share([{"params": group["params"][1:]} for group in groups])

    monkeypatch.setattr("torch.distributed.optim.ZeroRedundancyOptimizer", share_out)
    net = nn.Linear(3, 2)
    zero = Zero(torch.optim.SGD(net.parameters(), lr=1.0), World(1, 1, 2, torch.device("cpu")))
    saved = {0: {"momentum_buffer": net.weight.data}, 1: {"momentum_buffer": net.bias.data}, "count": torch.tensor(3.0)}
    zero.load_state_dict(zero.state_dict() | {"state": saved})
    assert zero.state.keys() == {net.bias, "count"} and zero.state["count"] == 3
    assert torch.equal(zero.state[net.bias]["momentum_buffer"], net.bias)


def test_state_of_any_type_travels_as_bytes(monkeypatch):
    values = [torch.tensor([True, False, True]), torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0), torch.zeros(0)]
    values.append(torch.randn(2, 3, 2, 2).bfloat16().to(memory_format=torch.channels_last))
    sent = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda flat, src: sent.append(flat.clone()))
    sender = SimpleNamespace(world=World(1, 1, 2, torch.device("cpu")))
    kept = [Zero._on_rank0(sender, 1, value) for value in values]
    assert all(flat.dtype == torch.uint8 for flat in sent) and all(map(torch.equal, kept, values))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda flat, src: flat.copy_(sent.pop(0)))
    receiver = SimpleNamespace(world=World(0, 0, 2, torch.device("cpu")))
    out = [Zero._on_rank0(receiver, 1, value.to("meta")) for value in values]
    assert all(map(torch.equal, out, values)) and [value.dtype for value in out] == [value.dtype for value in values]
