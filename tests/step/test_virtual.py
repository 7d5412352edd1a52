"""virtual.py: the tree, the exchange, the buffers; and what the plan says of them."""

import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TOY, succeed
from torch import nn

import tasks
from engine import config, partition, plan
from engine.comm.world import World
from engine.contract import LockstepError
from plugins.parallel import rows, tree, virtual
from plugins.performance.cached_data import same_bits
from tests.tasks import rare

NORMS = TOY.replace("toy.py", "norms.py")


def grouped(first, last):
    """The tree over workers `first` to `last` - 1, as text: halves of a power of two, the largest first."""
    if last - first == 1:
        return str(first)
    half = 1
    while 2 * half < last - first:
        half *= 2
    return f"({grouped(first, first + half)}+{grouped(first + half, last)})"


class Term:
    """Stands in for a list of tensors: says in which order it was added up."""

    def __init__(self, text):
        self.text = text


@pytest.fixture
def terms(monkeypatch):
    monkeypatch.setattr(tree, "_add", lambda left, right, in_place: Term(f"({left.text}+{right.text})"))


@pytest.mark.parametrize("workers", range(1, 34))
def test_the_tree_is_the_same_wherever_its_nodes_lie(terms, workers):
    """Against a naive recursion: on every number of processes, each of which adds up its own block first."""
    straight = tree.tree_sum(tree.Node(w, w + 1, Term(str(w))) for w in range(workers)).text
    assert straight == grouped(0, workers)
    for processes in range(1, workers + 1):
        blocks = partition.blocks_of(partition.deal_workers(workers, [1] * processes), in_rounds=False)
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1, "as even as can be"
        everyone = []
        for block in blocks:
            mine = []
            for worker in block:
                tree.push_node(mine, tree.Node(worker, worker + 1, Term(str(worker))))
            everyone += mine
        assert tree.tree_sum(everyone).text == straight, processes


def test_spans_are_what_is_left_of_a_block():
    def roots(*counts, in_rounds=False):
        return [*map(tree.subtree_roots, partition.blocks_of(counts, in_rounds))]

    assert roots(8) == [([(0, 8)], 3)]
    assert roots(2, 3, 3)[1] == ([(2, 4), (4, 5)], 1)
    assert roots(6) == [([(0, 4), (4, 6)], 2)]
    assert roots(*[1] * 8)[::7] == [([(0, 1)], 0), ([(7, 8)], 0)]
    assert partition.blocks_of([2, 2, 1], in_rounds=True) == [[0, 3], [1, 4], [2, 5]]
    assert roots(2, 2, 1, in_rounds=True)[1] == ([(1, 2), (4, 5)], 1)


@pytest.mark.parametrize("in_place", [True, False])
def test_sums_in_place_are_the_sums(in_place):
    torch.manual_seed(0)
    values = [torch.randn(5) for _ in range(7)]
    copies = [value.clone() for value in values]
    a, b, c, d, e, f, g = copies
    total = tree.tree_sum((tree.Node(n, n + 1, [value]) for n, value in enumerate(values)), in_place)[0]
    assert torch.equal(total, ((a + b) + (c + d)) + ((e + f) + g))
    assert in_place or all(map(torch.equal, values, copies)), "others read them, too"


# ---- buffers ----


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("mask", torch.tensor([float("-inf"), float("nan"), 1.0]))
        self.register_buffer("calls", torch.tensor(0))


def step(change, workers=3, busy=3, check=True):
    """One step of `workers` in one process; `change(net, worker)` is the forward pass."""
    net = Net()
    ours = virtual.WorkerReducer(workers, World(0, 0, 1, torch.device("cpu")), net)
    ours.check = check
    ours.begin_step()
    for worker in range(workers):
        ours.begin_worker(worker, worker >= busy)
        change(net, worker)
    ours.add_changes(min(busy, workers))
    return net


def test_running_statistics_are_the_mean_of_the_workers():
    """Each begins as the step does; one without samples does not count; counters advance once."""

    def change(net, worker):
        net.mean += worker + 1
        net.calls += 1

    net = step(change)
    assert net.mean.tolist() == [2, 2] and net.calls == 1
    assert step(change, busy=2).mean.tolist() == [1.5, 1.5]


def test_a_constant_that_is_not_finite_stays():
    mask = step(lambda net, worker: None).mask
    assert mask[0] == float("-inf") and mask[1].isnan() and mask[2] == 1


def test_a_buffer_that_cannot_be_averaged_must_be_the_same_after_every_worker():
    def change(net, worker):
        net.calls += worker

    with pytest.raises(
        LockstepError, match="the buffer calls differs after virtual worker 1 from that after the one be"
    ):
        step(change)
    step(change, check=False)


# ---- gradients ----


def begin(ours, worker, done=0, passes=1, in_ddp=False):
    """One of the passes of a worker."""
    closes = done == passes - 1
    micro = SimpleNamespace(
        worker=worker, opens_worker=not done, closes_worker=closes, empty=False, samples=ours.workers, step=0
    )
    micro.closes_step = closes and worker == ours.workers - 1
    ours.in_ddp = in_ddp
    ours.begin_pass(micro)


@pytest.mark.parametrize("used", [{0, 3}, {1, 2}, {4}, {0, 2, 3, 4}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, set()])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("at_end", [False, True])
def test_a_worker_that_does_not_use_a_parameter_adds_zeros(used, passes, at_end):
    """Also to the last bit: zeros make 0.0 of -0.0, and the shape of the tree is the same. Of several passes only a
    worker's first one uses it."""
    torch.manual_seed(0)
    net = nn.Linear(70, 30, bias=False)
    ours = virtual.WorkerReducer(5, World(0, 0, 1, torch.device("cpu")), net, unused=at_end)
    ours.begin_step()
    grads = torch.randn(5, 30, 70) * torch.tensor([1.0, 0.0])[torch.randint(2, (5, 30, 70))]
    for worker, done in itertools.product(range(5), range(passes)):
        begin(ours, worker, done, passes)
        if worker in used and not done:
            (net.weight * grads[worker]).sum().backward()
    assert ours.sum_workers(torch.eye(5)).tolist() == [1.0] * 5
    if not used:
        assert net.weight.grad is None
        return
    a, b, c, d, e = (grads[worker] if worker in used else torch.zeros(30, 70) for worker in range(5))
    assert same_bits(net.weight.grad, ((a + b) + (c + d)) + e)


@pytest.mark.parametrize(("used", "sign"), [({0}, 1.0), ({0, 1}, -1.0)])
def test_a_parameter_that_the_last_worker_does_not_use_gets_zeros_in_ddp(used, sign):
    """-0.0 + 0.0 is 0.0, but -0.0 + -0.0 is not: as on any other number of processes."""
    net = nn.Linear(1, 1, bias=False)
    ours = virtual.WorkerReducer(2, World(0, 0, 1, torch.device("cpu")), net, unused=True)
    ours.begin_step()
    for worker in range(2):
        begin(ours, worker, in_ddp=True)
        if worker in used:
            (net.weight * -0.0).sum().backward()
    flat = net.weight.grad.flatten().clone()
    bucket = SimpleNamespace(  # DDP's only one
        buffer=lambda: flat, gradients=lambda: [flat.view(1, 1)], parameters=lambda: [net.weight], is_last=lambda: True
    )
    total = virtual.WorkerReducer.hook(ours, bucket).value()
    assert total.item() == 0.0 and torch.copysign(torch.ones(1), total).item() == sign


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def plain_loop(seed, terms):
    """Five steps of 12 samples, 6 where an epoch of 30 ends."""
    task = (rare.Terms if terms else rare.Task)(None)
    torch.manual_seed(seed)
    net, (samples, _) = task.model(), task.datasets()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        epoch, first = step // 3, 12 * (step % 3)
        rows = np.random.default_rng((seed, epoch)).permutation(30)[first : first + 12]
        batch = {"x": torch.stack([samples[row]["x"] for row in rows])}
        losses = task.losses(net, batch).values() if terms else [task.loss(net, batch)]
        optimizer.zero_grad()
        sum(loss.total / loss.weight for loss in losses).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_gradients_of_what_few_passes_use_are_those_of_a_plain_loop(launch, tmp_path, float64, processes):
    """A branch that is used in a worker's first passes, but not in its last; on one process only; in no pass."""
    (tmp_path / "terms.py").write_text("from tests.tasks.rare import Terms as Task")
    files = {False: ROOT / "tests/tasks/rare.py", True: tmp_path / "terms.py"}
    words = "batch_size=1 global_batch=12 steps=5 lr=0.1 weight_decay=0 ddp.find_unused_parameters=true".split()
    cases = [*itertools.product([False, True], [1, 4])]
    runs = [
        [str(files[terms]), *words, "virtual_workers=4", f"seed={seed}", f"save_dir={tmp_path}/{terms}{seed}"]
        for terms, seed in cases
    ]
    many = str(ROOT / "tests/ranks/many.py"), json.dumps(runs)
    succeed(launch.python(*many) if processes == 1 else launch.torchrun(processes, *many))
    for terms, seed in cases:
        ours = torch.load(tmp_path / f"{terms}{seed}" / "last.pt", weights_only=True)["model"]
        for name, value in plain_loop(seed, terms).items():
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12, msg=f"{name} {terms} {seed}")


# ---- the plan, and what people are told ----


def plan_of(*words, processes=1, samples=61):
    args = config.parse([TOY, *words], tasks.load)
    return plan.make_plan(args.cfg, World(0, 0, processes, torch.device("cpu")), samples)


@pytest.mark.parametrize(
    ("words", "processes", "says"),
    [
        ([], 5, "5 processes with virtual_workers=4 (virtual_workers): start at most 4, or a new run with more work"),
        (["ddp.sync_bn=true"], 1, "ddp.sync_bn=true with virtual_workers=4 (ddp.sync_bn): drop it: "),
        (["ddp.buffers=mean"], 2, "ddp.buffers=mean with virtual_workers=4 (ddp.buffers): drop it: "),
        (["ddp.comm_hook=bf16"], 2, "ddp.comm_hook=bf16 with virtual_workers=4 (ddp.comm_hook): drop it: "),
    ],
)
def test_what_virtual_workers_rule_out(words, processes, says):
    with pytest.raises(LockstepError) as error:
        plan_of("virtual_workers=4", *words, processes=processes)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "dealt"),
    [
        (["batch_size=3"], (3, 1, 12)),
        (["batch_size=3", "gradient_accumulation_steps=2"], (3, 2, 24)),
        (["global_batch=13", "batch_size=12"], (4, 1, 13)),
        (["global_batch=13", "batch_size=3"], (2, 2, 13)),
        (["global_batch=3", "batch_size=3"], (1, 1, 3)),
    ],
)
def test_the_number_of_processes_changes_nothing_that_is_dealt(words, dealt):
    for processes in (1, 2, 3, 4):
        made = plan_of("virtual_workers=4", *words, processes=processes)
        assert (made.micro_batch, made.passes, made.global_batch) == dealt
        assert made.accumulation == made.passes * -(-4 // processes)


def test_the_plans_rows():
    """Three processes: blocks of 3, 3 and 2 of 8, two nodes at most; in the second one 3 and (4+5) are left."""
    made = plan_of("virtual_workers=8", "global_batch=20", "batch_size=2", processes=3)
    found = rows.describe_workers(made, 3_000_000)
    assert found == {
        "global batch": "20, dealt to 8 virtual workers: up to 3 samples each, in 2 passes of up to 2",
        "virtual workers": "2 or 3 of 8 per process x 3 processes; the same bits on 1 to 8 processes",
        "tree of sums": "2 of 3.0 MB waiting in a process at most; 6 MB per process and step out and back "
        "(an all-reduce: 4)",
    }
    one = plan_of("virtual_workers=8", "global_batch=20", "batch_size=2")
    alone = rows.describe_workers(one, 3_000_000)
    assert alone["tree of sums"].startswith("3 of 3.0 MB waiting") and "8 of 8 per" in alone["virtual workers"]


def test_more_processes_than_workers_are_refused_before_anything_is_written(launch, tmp_path):
    done = launch.torchrun(2, "train.py", TOY, "virtual_workers=1", f"save_dir={tmp_path / 'run'}")
    assert done.code and len(done.errors) == 1, done.err
    assert done.errors[0].startswith("error: 2 processes with virtual_workers=1 (virtual_workers): start at most 1, ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resume_says_what_changes_the_bits(launch, tmp_path):
    """Threads, the processor, the samples of a pass; nothing where nothing has changed. One hash at the end."""
    run = tmp_path / "run"
    words = ["train.py", NORMS, "virtual_workers=4", "global_batch=12", "amp=off", f"save_dir={run}"]
    note = "note: no longer the same bits, but the same run up to rounding: "
    first = succeed(launch.python(*words, "steps=2"))
    assert re.search(r"weights      sha256 [0-9a-f]{16}\n", first.out)
    assert note not in succeed(launch.python(*words, "steps=3", "schedule.horizon=2")).out
    said = succeed(launch.python(*words, "steps=4", "schedule.horizon=2", "threads=2", "batch_size=2")).out
    assert note + "threads 1 -> 2, samples of a pass 3, 1 pass of a worker -> 2, 2 passes of a worker\n" in said
    script = (
        "import sys, train; from engine import private; "
        "private.cpu_model = lambda: 'Z80'; sys.exit(train.main(sys.argv[1:]))"
    )
    said = succeed(
        launch.python("-c", script, *words[1:], "steps=5", "schedule.horizon=2", "threads=2", "batch_size=2")
    )
    assert re.search(re.escape(note) + r"device .+ -> Z80\n", said.out)


def test_a_gpu_takes_the_norm_of_aligned_gradients():
    """DDP keeps them behind each other in a bucket; one process without DDP has them in memory of their own."""
    model = torch.nn.Sequential(torch.nn.Linear(7, 1), torch.nn.Linear(1, 8), torch.nn.Linear(8, 2))
    workers = virtual.WorkerReducer(2, SimpleNamespace(rank=0, size=1, device=torch.device("cuda")), model)
    workers.in_ddp, bucket, begin = True, torch.randn(100), 0
    for p in model.parameters():
        p.grad = bucket.as_strided(p.shape, p.stride(), begin)
        begin += p.numel()
    before = [p.grad for p in model.parameters()]
    workers.sum_workers(torch.zeros(2, 3))
    assert [a is p.grad for a, p in zip(before, model.parameters(), strict=True)] == [
        grad.data_ptr() % 32 == 0 for grad in before
    ]
    assert sum(a is p.grad for a, p in zip(before, model.parameters(), strict=True)) < 6
    for a, p in zip(before, model.parameters(), strict=True):
        assert p.grad.data_ptr() % 32 == 0 and torch.equal(a, p.grad) and a.stride() == p.grad.stride()
