"""The way of a checkpoint from a GPU to the host: the same file by each way, and what the training waits for."""

import functools
import json
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, succeed
from fake_run import FAKE, HAR, run_on_fake_gpu

from engine.errors import LockstepError
from engine.files import archive
from engine.files.store import Checkpoints
from engine.files.writer import CheckpointWriter
from plugins.performance import snapshot

TASK = """
import torch
from torch import nn
from tests.tasks.toy import Net as ToyNet, Task as Toy

class Net(ToyNet):
    def __init__(self):
        super().__init__(16, 0.0)
        self.first = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8, bias=False)
        self.base = nn.Linear(8, 5000).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(30, 8).t())
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("gaps", torch.arange(40.0)[::2])
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("wide", torch.ones(700, dtype=torch.float64))

    def forward(self, x):
        x = self.norm(x.float())
        self.gaps.add_(1)
        more = self.base(x).mean(1, keepdim=True) + (x @ self.turned).mean(1, keepdim=True)
        return super().forward(x + self.again(self.first(x)) + more)

class Task(Toy):
    def model(self):
        return Net()
"""

WAYS = """
import contextlib, gc, hashlib, io, json, sys
import torch
sys.path.insert(0, sys.argv[1])
import gpu_parts
from engine import checkpoint, hooks
from plugins.performance import snapshot
from tools.machine.probe import endless
from torch.multiprocessing.reductions import StorageWeakRef

snapshot.BUFFER, snapshot.LARGE, snapshot.PART = 4096, 1024, 512
run = gpu_parts.built(tuple(sys.argv[2:]))
steps = endless(run)
for _ in range(3):
    next(steps)
Copies, room, empty_like, on_device = snapshot.Copies, snapshot.room, torch.empty_like, snapshot.Copies._on_device
held, tries = [], []

def out_of_memory(value, **how):
    if how:
        return empty_like(value, **how)
    tries.append(1)
    torch.empty_like = empty_like
    raise torch.OutOfMemoryError("CUDA out of memory")

def noted(self):
    copies = on_device(self)
    held.extend(StorageWeakRef(copy.inner.untyped_storage()) for copy, _ in copies)
    return copies

def captured(way):
    snapshot.room, torch.empty_like = room, empty_like
    hooks.device_copies.functions[:] = [lambda run: Copies(run.world.device, at_once=way == "at once")]
    snapshot.Copies._on_device = noted if way == "with room" else on_device
    if way == "one by one":
        hooks.device_copies.functions[:] = []
    if way == "without room":
        snapshot.room = lambda device: 0
    if way in ("out of memory", "and again"):
        torch.empty_like = out_of_memory
    return checkpoint.capture(run)

ways = ["on the CPU"]
if run.world.device.type == "cuda":
    ways = ["one by one", "without room", "at once", "out of memory", "and again"]
states = {way: captured(way) for way in ways}
torch.empty_like = empty_like
buffers = contextlib.nullcontext()
if run.world.device.type == "cuda":
    staging = snapshot.staging(run.world.device)
    staging.tight, buffers = False, staging.lock
with buffers:  # the copy on the GPU is read after two more steps
    if run.world.device.type == "cuda":
        states["with room"] = captured("with room")
    for _ in range(2):
        next(steps)
found = {}
for way, state in states.items():
    file = io.BytesIO()
    state = getattr(state, "on_host", lambda: state)() | {"config": 0, "environment": 0}
    torch.save(state, file)
    found[way] = hashlib.sha256(file.getvalue()).hexdigest()
gc.collect()
print("FOUND", json.dumps([found, len(held), sum(not memory.expired() for memory in held), len(tries)]))
"""


@pytest.fixture
def ways(launch, tmp_path):
    """Capture the same state in each way; returns (SHA-256 of the file by way, copies on the GPU, those that are still
    alive, how often memory ran out)."""
    (tmp_path / "own.py").write_text(TASK)
    (tmp_path / "ways.py").write_text(WAYS)

    def run(*words):
        script = [str(tmp_path / "ways.py"), str(ROOT / "benchmarks"), str(tmp_path / "own.py")]
        script += ["optim.ema_decay=0.5", "amp=off", "batch_size=12", "cache=none", "digest_every=1", *words]
        # a rate that is a float32, because those of a GPU are
        script += ["optim.lr=0.0009765625", "schedule.kind=constant", "schedule.warmup_epochs=0"]
        script += ["memory_format=contiguous", "cuda_graph=false"]
        done = succeed(launch.python(*([FAKE] if "device=cuda" in words else []), *script, PYTHONPATH=str(ROOT)))
        line = next(line for line in done.out.splitlines() if line.startswith("FOUND "))
        return json.loads(line.removeprefix("FOUND "))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["virtual_workers=2", "ddp.backend=gloo"]], ids=["plain", "virtual workers"])
def test_each_way_makes_the_file_of_the_cpu(ways, words):
    """In its bytes: with frozen weights, gaps in memory, and tensors larger than a buffer. Two steps are taken
    before a state is read, and each copy beside the training reads the GPU's memory as late as it may."""
    found, copies, alive, tries = ways("device=cuda", *words)
    assert found == dict.fromkeys(found, found["one by one"])
    if not words:  # with virtual workers a CPU's optimizer rounds in another way
        assert ways("device=cpu")[0] == {"on the CPU": found["one by one"]}
    assert copies > 5 and alive == 0, "its memory is given back, though the state is held"
    assert tries == 1, "where memory has run out once, it is not tried again"


@pytest.fixture
def gpu(launch, tmp_path):
    return functools.partial(run_on_fake_gpu, launch, tmp_path / "gpu")


@pytest.mark.slow
def test_saves_pin_no_memory_and_wait_for_nothing(gpu):
    """But for the numbers of the step that is saved. Two buffers are pinned for all saves, and the copies on the GPU
    are as many kernels in each of them."""
    words = [*HAR, "mode=flatten", "batch_size=64", "optim.ema_decay=0.9", "amp=fp16", "cache=device"]
    seen = gpu(*words, "steps=14", "save_every=2", "eval_every=20", "log_every=100", "keep_checkpoints=99")
    saves = [4, 6, 8, 10, 12]  # that of step 2 is among the first steps
    assert seen.pinned[snapshot.BUFFER] == 2
    assert not [size for size in seen.pinned if size > 1 << 16 and size != snapshot.BUFFER]
    waits = [(step, what) for step, what in seen.waits if step in saves and "in the thread" not in what]
    assert [(step, what.partition(":")[0], what.partition(" ")[2]) for step, what in waits] == [
        (step, "engine/meter.py", "an event") for step in saves
    ]
    usual = seen.kernels[9]
    more = [Counter(seen.kernels[step]) - Counter(usual) for step in saves if step != 8]  # 7 ends an epoch
    assert all(each == more[0] for each in more)
    types = 3  # float32, the int32 of the digest, the int64 of the average's counter
    assert more[0]["cat"] == types + 1 and more[0].total() < 20, "of each type one; the digest has one of its own"


NO_ROOM = """
from plugins.performance import snapshot
from tasks.har import Task
snapshot.room = lambda device: 0
class Task(Task): ...
"""


@pytest.mark.slow
def test_a_state_without_room_is_waited_for_and_whole(gpu, tmp_path):
    """By the training itself, and by no thread."""
    (tmp_path / "own.py").write_text(NO_ROOM)
    words = [str(tmp_path / "own.py"), *HAR[1:], "mode=flatten", "batch_size=64", "amp=off"]
    seen = gpu(*words, "steps=6", "save_every=2", "eval_every=20", "log_every=100")
    assert seen.pinned[snapshot.BUFFER] == 2 and not [what for _, what in seen.waits if "thread snapshot" in what]
    assert [what.split(":")[0] for step, what in seen.waits if step == 4] == [
        "engine/meter.py",
        "plugins/performance/snapshot.py",
    ]


# ---- without a GPU ---------------------------------------------------------------------------------------------------


def state_of(step):
    return {
        "format": 3,
        "progress": {"step": step, "epoch": 0},
        "model": {"weight": torch.arange(4.0) + step},
        "task": {},
    }


def on_its_way(step, finish=lambda state: None):
    arrival = Future()
    return snapshot.Snapshot(state_of(step), arrival, finish), arrival


def test_a_copy_that_fails_is_a_save_that_fails(tmp_path):
    """The next one counts again; progress is known before the tensors are."""
    writer = CheckpointWriter(Checkpoints(tmp_path), SimpleNamespace(sync=lambda: None), "loss")
    state, arrival = on_its_way(1)
    writer.write(state)
    arrival.set_exception(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(LockstepError, match="could not be written: RuntimeError"):
        writer.wait()
    assert not writer.checkpoints.entries and not [*tmp_path.glob("*.pt")]
    state, arrival = on_its_way(2, lambda state: state.update(digest="of the copies"))
    state["progress"] = {"step": 3, "epoch": 1}  # as after an evaluation
    writer.write(state)
    assert not writer.pending.done()
    arrival.set_result(None)
    writer.wait()
    writer.close()
    held = archive.read(writer.checkpoints.last)
    assert type(held) is dict and held["digest"] == "of the copies" and held["progress"]["step"] == 3
    assert torch.equal(held["model"]["weight"], torch.arange(4.0) + 2)


def test_reading_a_tensor_waits_for_it_and_finishes_once():
    finished = []
    state, arrival = on_its_way(1, finished.append)
    assert state["progress"]["step"] == 1 and not finished
    arrival.set_exception(RuntimeError("gone"))
    for part in ("model", "task"):
        with pytest.raises(RuntimeError, match="gone"):
            state[part]
    state, arrival = on_its_way(1, finished.append)
    arrival.set_result(None)
    assert [*state["model"]] == ["weight"] and state.on_host()["format"] == 3
    assert finished == [state]


def test_memory_of_the_host_is_used_again_once_no_tensor_has_it(monkeypatch):
    monkeypatch.setattr(snapshot, "LARGE", 1024)
    made = []
    monkeypatch.setattr(snapshot.np, "empty", lambda *form: made.append(np.zeros(*form)) or made[-1])
    memory = snapshot.HostMemory()
    last = torch.empty(2, 3, 8, 8).to(memory_format=torch.channels_last)
    first = memory.like(last)
    assert first.stride() == last.stride() and first.untyped_storage().nbytes() == last.nbytes
    again = memory.like(last)
    assert len(made) == 2 and first.data_ptr() != again.data_ptr(), "a state that is held keeps its own"
    place, view = first.data_ptr(), first.view(-1) if first.is_contiguous() else first[0]
    del first
    assert memory.like(last).data_ptr() != place and len(made) == 3, "a view of it lives"
    del view
    assert memory.like(last).data_ptr() in {each.ctypes.data for each in made} and len(made) == 3
    assert memory.like(torch.ones(2)).shape == (2,) and len(made) == 3, "small ones are torch's own"


def test_the_room_is_what_the_training_never_needed(monkeypatch):
    about = {"mem_get_info": (50 << 30, 80 << 30), "memory_reserved": 30 << 30, "max_memory_allocated": 24 << 30}
    for name, value in about.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert snapshot.room(torch.device("cuda", 0)) == (50 + 30 - 24 - 5) << 30
