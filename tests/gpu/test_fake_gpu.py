"""A training on a GPU that `fake_gpu.py` stands in for: the CPU's bits, no wait in a step, few kernels more than a
plain loop. What a real one adds is seen by `benchmarks/gpu_check.py`."""

import functools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FAULTY, ROOT, TOY, place_of, succeed
from fake_run import HAR, run_on_fake_gpu
from saved import assert_same_parts, load

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check

from engine.contract import BatchInfo
from engine.data import batches
from plugins.performance.recorded_step import Inputs, leaves_of
from plugins.preflight.prepare_check import of_each_row

VIDEO = ["video", "dataset.size=16", "dataset.trials=61", "dataset.videos=12", "dataset.frames=5", "model.width=4"]
ROBOT = ["robot", "env.demonstrations=8", "env.size=16", "eval.n_episodes=0", "policy.chunk_size=5", "batch_size=8"]
ACT = (
    "policy.type=act policy.dim_model=16 policy.n_heads=2 policy.dim_feedforward=16 policy.n_encoder_layers=1 "
    "policy.n_vae_encoder_layers=1 policy.latent_dim=4 dataset.cameras=none"
).split()
BUFFERS, TERMS = (str(ROOT / f"tests/tasks/{name}.py") for name in ("buffers", "terms"))
EMA, TWO, FETCHED = "optim.ema_decay=0.9", ["gradient_accumulation_steps=2", "batch_size=8"], "cache=none"


@pytest.fixture
def gpu(launch, tmp_path):
    return functools.partial(run_on_fake_gpu, launch, tmp_path / "gpu")


KILLED = """
import os, time
from engine.phases import phase
from tasks.har import Task as Har
class Task(Har):
    def loss(self, net, batch):
        if phase.step == 6 and "KILL" in os.environ:
            deadline = time.monotonic() + 60
            while not os.path.exists(f"{self.cfg.save_dir}/last.pt") and time.monotonic() < deadline:
                time.sleep(0.01)  # polling with a deadline: a thread writes the checkpoint of step 4
            os.kill(os.getpid(), 9)
        return super().loss(net, batch)
"""


@pytest.fixture
def of_the_cpu(once, launch):
    """The last checkpoint of the same training on the CPU, in one go."""

    def train(folder):
        (folder / "task.py").write_text(KILLED)
        succeed(launch.python("train.py", *exact(folder), "device=cpu", f"save_dir={folder / 'cpu'}"))

    folder = once("of_the_cpu", train)
    return folder, load(folder / "cpu")


def exact(folder):
    words = [folder / "task.py", *HAR[1:], "amp=off", EMA, "model.dropout=0.2", *TWO, "save_every=4", "steps=10"]
    rate = ["optim.lr=0.0009765625", "schedule.kind=constant", "schedule.warmup_epochs=0"]  # a float32: 2 ** -10
    return [*map(str, words), "log_every=100", "optim.grad_clip=1", *rate]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["device", "none", "host"])
def test_the_bits_of_the_cpu(gpu, of_the_cpu, tmp_path, cache):
    """Of weights, average and moments: killed, and resumed; with copies that are read before they have arrived, or
    tensors of the host among the others, it would fail or end in other numbers."""
    folder, right = of_the_cpu
    gpu(*exact(folder), f"cache={cache}", code=-9, KILL="1")
    assert "step 4," in gpu(*exact(folder), f"cache={cache}").out, "it has not been resumed"
    state = load(tmp_path / "gpu")
    assert state["progress"]["step"] == right["progress"]["step"] == 10
    assert_same_parts(state, right)


STEPS = {
    "conv": [*HAR, "batch_size=16", EMA, "amp=bf16"],
    "perceptron": [*HAR, "mode=flatten", EMA, "amp=fp16", *TWO, FETCHED],
    "transformer": [*HAR, "mode=transformer", "batch_size=16", "amp=bf16", "cache=host"],
    "video": [*VIDEO, "batch_size=4", "amp=bf16", FETCHED],
    "act": [*ROBOT, *ACT, "amp=bf16"],
    "vla": [*ROBOT, "amp=bf16"],
    "norms": [BUFFERS, "batch_size=8", EMA, "amp=bf16", FETCHED, "num_workers=1"],
    "terms": [TERMS, "batch_size=6", "amp=bf16", "gradient_accumulation_steps=2"],
    "virtual": [*HAR, "batch_size=8", EMA, "amp=bf16", "virtual_workers=4", "ddp.backend=gloo"],
}

SAID = {"terms": {f"tests/tasks/{place_of(TERMS, 'out.new_tensor')} a copy from the host"}}
"""Waits that are the task's own."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", STEPS)
def test_no_wait_in_a_step(gpu, kind):
    """The first steps copy class weights, and read the optimizer's counters; the last one is scored and saved. The
    order of the epoch is copied without a wait, too."""
    seen = gpu(*STEPS[kind], "steps=6", "log_every=100")
    assert "is not known" not in seen.out, "whether the score adds up, of samples asked for by number"
    inside = {what for step, what in seen.waits if 3 <= step < 6}
    assert inside == SAID.get(kind, set())
    assert len(seen.kernels) >= 6
    assert not [what for _, what in seen.waits if what.startswith(("data_loader.py", "engine/data/ahead.py"))]


MORE = {"conv": 8, "perceptron": 3, "transformer": 4, "video": 4, "act": 5, "vla": 4}
"""Kernels of a step beyond those of a plain loop of torch's own, at most, without those that make its batch: the sums
of a pass in float64 (a kernel for each type of numbers), the divisor, whether the step is skipped; the average of
weights (4), which a skipped step leaves alone. One that grows is noticed."""

MORE |= {"norms": 22, "terms": 109, "virtual": -10}
"""Those with more than a plain loop has: buffers that change, which are kept, and put back if the step is skipped; the
weights of several terms, by one more forward pass each; virtual workers, beside as many passes of a plain loop."""

PLAIN = {"virtual": [*HAR, "batch_size=2", EMA, "amp=bf16", "gradient_accumulation_steps=4"]}
"""The words of the plain loop, where they are others."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in MORE])
def test_a_step_takes_few_kernels_more_than_a_plain_loop(gpu, kind):
    words = [word for word in PLAIN.get(kind, STEPS[kind]) if not word.startswith("num_workers=")]
    plain = gpu(*words, "num_workers=0", "steps=6", "device=cuda", script="tests/kit/plain_step.py")
    ours = gpu(*STEPS[kind], "steps=6", "log_every=100")
    kernels = {name: [sum(seen.kernels[step].values()) - seen.of_loader.get(step, 0) for step in (4, 5)]
               for name, seen in (("plain", plain), ("ours", ours))}  # fmt: skip
    assert min(kernels["plain"]) > 50
    assert max(kernels["ours"]) <= min(kernels["plain"]) + MORE[kind], kernels


VOTES = """
from engine.phases import phase
from engine.run import Run
from tasks.har import Task as Har
class Task(Har):
    pass
votes = Run.votes
Run.votes = lambda self, consumed: 0.5 if phase.step in (5, 9) else votes(self, consumed)
"""


@pytest.mark.slow
@pytest.mark.parametrize("recorded", ["true", "false"])
def test_no_wait_in_a_step_whose_rank_votes(gpu, tmp_path, recorded):
    """Kernel by kernel, and as the launch of a graph: those of steps 5, 8, 9, 10 and 12 are neither recorded nor
    compared. The votes are for a save, and those of steps 5 and 9. A number that is assigned to a number on the GPU is
    a copy from pageable memory."""
    (tmp_path / "own.py").write_text(VOTES)
    words = [str(tmp_path / "own.py"), *HAR[1:], "mode=flatten", "batch_size=64", "amp=off", EMA, "optim.grad_clip=1"]
    graphs = {"FAKE_GRAPHS": "1"} if recorded == "true" else {}
    seen = gpu(*words, f"cuda_graph={recorded}", "steps=14", "eval_every=20", "log_every=100", **graphs)
    launches = [5, 8, 9, 10, 12]
    assert [seen.kernels[step].get("a graph", 0) for step in launches] == [len(graphs)] * 5
    assert not [(step, what) for step, what in seen.waits if step in launches and "in the thread" not in what]
    saved = [step for step in (7, 11) if any(each == step and "meter.py" in what for each, what in seen.waits)]
    assert saved == [7, 11], "a step late"


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "passes", "launches"), [(3, 2, 7), (1, 1, 2)])
def test_recorded_virtual_workers_take_the_bits_of_those_kernel_by_kernel(
    launch, gpu, tmp_path, workers, passes, launches
):
    """With two passes each, dropout, the norm's statistics, an average of the weights, and the step's clock."""
    words = [str(ROOT / "tests/tasks/graphed.py"), "dataset.samples=54", "epochs=4", "own.kind=clock", "amp=bf16"]
    words += ["model.dropout=0.3", "optim.grad_clip=1", f"virtual_workers={workers}", "batch_size=2"]
    words += [f"gradient_accumulation_steps={passes}", "ddp.backend=gloo"]
    run_on_fake_gpu(launch, tmp_path / "eager", *words, "cuda_graph=false")
    recorded = gpu(*words, "cuda_graph=true", FAKE_GRAPHS="1")
    assert f"from step 4 on, a step is {launches} launches" in recorded.out and "stays" not in recorded.out
    assert max(kernels.get("a graph", 0) for kernels in recorded.kernels.values()) == launches
    assert_same_parts(load(tmp_path / "eager"), load(tmp_path / "gpu"))


@pytest.mark.slow
def test_a_launched_step_of_one_pass_is_few_calls(gpu):
    """The rate, the batch in one piece, and the graph; of another form is the last batch of the epoch."""
    words = [*HAR, "mode=flatten", "batch_size=16", "cache=device", EMA, "amp=bf16", "cuda_graph=true"]
    seen = gpu(*words, "steps=14", "eval_every=20", "log_every=100", FAKE_GRAPHS="1")
    assert "from step 4 on, a step is one launch" in seen.out
    for step in (5, 8, 12):
        assert sum(seen.kernels[step].values()) - seen.of_loader.get(step, 0) == 3, seen.kernels[step]
        assert seen.kernels[step]["a graph"] == seen.kernels[step]["copy_"] == seen.kernels[step]["fill_"] == 1


def test_a_tensor_beside_the_piece_of_its_batch_is_copied():
    """A hook may have put another in its place: the piece then holds the former."""
    x = torch.randn(6, 5)
    batch = {"x": x, "lockstep": BatchInfo(*torch.arange(18).view(3, 6))}
    packed = batches.pack_passes(batch, 2)
    first, second = (packed.part(number) for number in range(2))
    for part, piece in zip((first, second), packed.pieces, strict=True):
        part["lockstep"].packed = piece
    inputs = Inputs(SimpleNamespace(world=SimpleNamespace(device="cpu"), optimizer=SimpleNamespace(param_groups=[]),
                                    meter=SimpleNamespace(terms=None)))  # fmt: skip
    memory = inputs.adopt(first)
    assert torch.equal(memory["x"], x[:3]) and memory["x"].data_ptr() != first["x"].data_ptr()
    inputs.fill(second, leaves_of(second))
    assert torch.equal(memory["x"], x[3:]) and memory["lockstep"].index.tolist() == [3, 4, 5]
    second["x"] = torch.full_like(x[3:], 7.0)
    inputs.fill(second, leaves_of(second))
    assert memory["x"].eq(7).all() and memory["lockstep"].index.tolist() == [3, 4, 5]
    memory = inputs.adopt(second)
    assert memory["x"].eq(7).all() and memory["lockstep"].index.tolist() == [3, 4, 5]
    inputs.fill(first, leaves_of(first))
    assert torch.equal(memory["x"], x[:3]) and memory["lockstep"].index.tolist() == [0, 1, 2]


PRODUCT = """
from tasks.har import Task as Har
class Task(Har):
    def prepare(self, batch):
        batch = super().prepare(batch)
        turn = batch["x"].new_ones(batch["x"].shape[-1]).diag()
        return batch | {"x": batch["x"] @ turn}
"""


@pytest.mark.slow
@pytest.mark.parametrize("product", [False, True])
def test_passes_of_virtual_workers_are_prepared_together(gpu, tmp_path, product):
    """Where no operation of `prepare` depends on the number of rows; a product of matrices does."""
    (tmp_path / "own.py").write_text(PRODUCT)
    words = [*HAR, "mode=flatten", "batch_size=8", "global_batch=16", "virtual_workers=2", "ddp.backend=gloo"]
    if product:
        words[0] = str(tmp_path / "own.py")
    seen = gpu(*words, "cache=device", "amp=off", "steps=14", "eval_every=20", "log_every=100")
    made = [seen.of_loader.get(step, 0) for step in range(4, 13)]
    assert (min(made) > 100) if product else (sorted(made)[4] < 30), made


@pytest.mark.parametrize(
    ("compute", "alike"),
    [
        (lambda x: torch.where(x > 0, x.exp(), x.flip(1))[:, ::2].clamp(0, 1).to(torch.half), True),
        (lambda x: torch.stack([x.roll(1, 1), x[:, [2, 0, 1, 3]], x.gather(1, x.long().abs() % 4)]).bfloat16(), True),
        (lambda x: x @ x.T, False),
        (lambda x: x - x.mean(1, keepdim=True), False),
        (lambda x: x.cumsum(1), False),
        (lambda x: x + torch.randn_like(x), False),
        (lambda x: torch.nn.functional.interpolate(x[None], size=9, mode="linear"), False),
    ],
    ids=["elementwise", "moved", "product", "mean", "cumulative sum", "drawn", "interpolated"],
)
def test_numbers_that_have_the_same_bits_in_a_batch_of_any_size(compute, alike):
    x = torch.randn(6, 4)
    assert of_each_row(lambda: compute(x), torch.device("cuda")) == alike
    assert not of_each_row(lambda: compute(x), torch.device("cpu")), "the last rows may take other instructions"


def test_a_sample_of_held_data_with_nan_is_named(gpu):
    """It is asked for by its number, after the step."""
    words = [FAULTY, "fault.kind=nan sample", "max_skipped_steps=2", "epochs=1", "cache=device"]
    assert "skipped: sample 7 has NaN in x" in gpu(*words).out


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in gpu_check.waiting(gpu_check.Lab(Path(), True)) if "ddp" not in kind])
def test_the_check_of_a_gpu_finds_no_wait_here(gpu, tmp_path, kind):
    """With torch's own warnings, as on a GPU; but for DDP, whose reducer knows only real ones."""
    lab = gpu_check.Lab(tmp_path, True)
    words = [word.replace("device=cpu", "device=cuda") for word in gpu_check.waiting(lab)[kind]]
    if "video" in kind:
        gpu_check.PARTS["clips"](str(tmp_path / "few"), *gpu_check.FEW)
    said = gpu("--part", kind.split()[0], *words, script="benchmarks/gpu_check.py").out
    assert json.loads(said.rpartition("RESULT ")[2].splitlines()[0]) == [[], 6, True]


IN_DDP = "DDP's reducer knows only real GPUs"
NOT_HERE = {"words": "needs NCCL", "pace_in_ddp": IN_DDP, "steps_in_ddp": IN_DDP, "ceiling": "a real GPU's work"}
NOT_HERE |= {"norm": "a real GPU's kernels, times and graphs"}
# the tests beside this
ELSEWHERE = ("clips", "steps", "sanitized_steps", "race", "contestant", "contestant_in_ddp", "racer")


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in gpu_check.PARTS if part not in ELSEWHERE])
def test_the_parts_of_the_check_of_a_gpu_run_here(gpu, part):
    """All that they ask of torch.cuda is there, and their sums come out."""
    if part in NOT_HERE:
        pytest.skip(NOT_HERE[part])
    words = STEPS["perceptron"]
    seconds = ["0.01"] if part in ("pace", "feeds") else []
    training = [] if part == "about" else words
    said = gpu("--part", part, *seconds, *training, "device=cuda", script="benchmarks/gpu_check.py").out
    found = json.loads(said.rpartition("RESULT ")[2].splitlines()[0])
    if part == "about":
        assert found["device"] == "No GPU" and found["memory"] == "80 GiB"
    elif part == "captures":
        *times, megabytes = found
        assert min(times) > 0 and 1e6 * megabytes == pytest.approx(16 * 6407, 0.01), "weights, average, two moments"
    elif part == "feeds":
        assert found[0] / found[1] == pytest.approx(6 * 128 * 4 + 4 * 8), "a window, its class and three numbers"
    else:
        assert min(found["rate"], found["ms"], found["limit"]) > 0 and 0 < found["waits"] < 1
        assert found["kernels"] == found["launches"] > 100


@pytest.mark.slow
def test_the_sanitizer_sees_what_the_loader_does(gpu, tmp_path):
    """Torch's own: no race as it is, and one where no stream waits for another; in the loader's thread, too."""
    words = [TOY, "batch_size=8", "amp=off", "steps=4", "cache=none", "device=cuda", f"save_dir={tmp_path / 'run'}"]
    part = {"script": "benchmarks/gpu_check.py"}
    said = gpu("--part", "sanitized_steps", *words, **part).out
    assert int(said.rpartition("RESULT ")[2].splitlines()[0]) > 400
    assert "FAKE" not in said, "the process leaves before the interpreter ends: a real sanitizer would fail there"
    seen = gpu("--part", "race", *words, code=1, **part)
    assert "CSAN detected a possible data race" in seen.err and "CUDASanitizerErrors" in seen.err


@pytest.mark.slow
def test_a_contestant_answers_each_order(gpu, tmp_path):
    words = STEPS["perceptron"]
    orders = tmp_path / "orders"
    measures = "training", "plain loop", "kernels"
    orders.write_text("".join(f'{{"measure": "{name}", "seconds": 0.01}}\n' for name in measures))
    said = gpu("--part", "contestant", str(orders), "3", *words, "device=cuda", script="benchmarks/gpu_check.py").out
    answers = re.findall("^TURN (.*)$", said.partition("READY\n")[2], re.MULTILINE)
    training, loop, counts = map(json.loads, answers)
    assert 0 < training["least"] <= training["rate"] <= training["most"]
    assert loop["rate"] > 0 and min(counts.values()) > 100


@pytest.mark.parametrize("checked", ["true", "false"])
def test_memory_that_the_checks_have_cached_is_returned_before_the_first_step(gpu, checked):
    """After the last check and before the optimizer, whose state would lie in blocks of the checks."""
    places = [place for _, place in gpu(TOY, "steps=2", f"check_sums={checked}").waits]
    (at,) = (n for n, place in enumerate(places) if "the return of cached memory" in place)
    first_step = next(n for n, place in enumerate(places) if "/optim/" in place)
    checks = [n for n, place in enumerate(places[:first_step])
              if n != at and ("/preflight/" in place or "toy.py" in place)]  # fmt: skip
    assert max(checks) < at < first_step


WAITS = {
    "loss.total.item()": "_local_scalar_dense",
    "(y > 0).nonzero()": "nonzero",
    "y[batch['mask']]": "index",
    "y[torch.arange(2)]": "indices of the host",
    "torch.ones(2).to(y.device, non_blocking=True)": "a copy from the host",
    "torch.ones(2).pin_memory().to(y.device)": "a copy from the host",
    "y.new_tensor([1.0, 2.0])": "a copy from the host",
    "y.detach().clone()[0, 0] = 1.0": "a copy from the host",
    "y.cpu()": "a copy to the host",
    "torch.ones(2, 4, pin_memory=True).copy_(y[:2])": "a copy to the host",
    "torch.cuda.current_stream().synchronize()": "a stream",
}
WRONG = """
import torch
from engine.phases import phase
from tests.tasks import toy
class Task(toy.Task):
    def loss(self, net, batch):
        loss, y = super().loss(net, batch), batch["y"]
        if phase.step == 4:
            {}
        return loss
"""


@pytest.fixture
def wrong(tmp_path):
    """A task that does this in its fifth step, and what trains it."""

    def task(*lines):
        (tmp_path / "wrong.py").write_text(WRONG.format("\n            ".join(lines)))
        return [str(tmp_path / "wrong.py"), "steps=6", "log_every=100", "dataset.samples=200"]

    return task


def test_each_kind_of_wait_is_found(gpu, wrong):
    seen = [(step, what) for step, what in gpu(*wrong(*WAITS)).waits if 3 <= step < 6]
    assert all(step == 4 and what.startswith("train.py:") for step, what in seen), seen
    assert [what.partition(" ")[2] for _, what in seen] == [*WAITS.values()]


def test_what_waits_for_nothing_is_no_wait(gpu, wrong):
    free = (
        "y.to('cpu', non_blocking=True)",
        "torch.ones(2).pin_memory().to(y.device, non_blocking=True)",
        "y + torch.ones(())",
        "y.detach().clone()[0].fill_(1.0)",
        "y.detach().clone()[0] = 1.0",
    )
    assert not [what for step, what in gpu(*wrong(*free)).waits if 3 <= step < 6]


ERRORS = {
    "y + torch.ones(4)": "Expected all tensors to be on the same device: add of cuda:0 and cpu (4,)",
    "with torch.cuda.stream(torch.cuda.Stream()): y + 1": "add uses a tensor of another stream",
}


@pytest.mark.parametrize("line", ERRORS)
def test_a_tensor_of_the_host_or_of_another_stream_is_an_error(gpu, wrong, line):
    assert ERRORS[line] in gpu(*wrong(line), code=1).errors[0]


def test_a_copy_that_is_read_too_early_holds_rubbish(gpu, wrong):
    lines = "late = y.to('cpu', non_blocking=True)", "early = late.clone(); event = torch.cuda.Event(); event.record()"
    more = "after = y.to('cpu', non_blocking=True)", "event.synchronize()"
    says = "print('READ', bool((early == 113).all()), torch.equal(late, y.detach().inner), bool((after == 113).all()))"
    assert "READ True True True" in gpu(*wrong(*lines, *more, says)).out
