"""A whole step as one CUDA graph: the same bits as kernel by kernel, or a line that says why not. On a CPU, where
`recording.py` stands in for torch's graphs; none has been seen on a GPU."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOY, place_of, succeed
from saved import assert_same_parts, load, logged

from engine import config
from engine.config import Optim
from engine.optim import make_optimizer
from plugins.performance import compiler, cuda_graph

GRAPHED, TERMS, FORMS = (str(ROOT / f"tests/tasks/{name}.py") for name in ("graphed", "terms", "forms"))
TWO = ["gradient_accumulation_steps=2", "batch_size=6"]
ODD = [GRAPHED, "dataset.samples=57", "epochs=6"]
HAR = ["har", "dataset.stride=512", "model.width=8", "schedule.warmup_steps=6", "eval_every=9", "steps=20"]
SCRIPT = """
import gc, sys
from tests.kit import recording
recording.install()
import train
[stream] = recording.current
code = train.main(sys.argv[1:])
assert recording.current == [stream] and gc.isenabled()
assert not recording.spoilt and not recording.overrides[0]
print("LAUNCHED", recording.Graph.launched)
sys.exit(code)
"""


@pytest.fixture
def run(launch, tmp_path):
    """Train as on a GPU; returns (what the last checkpoint holds, what was logged, what was said)."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def train(name, *words, code=0):
        words = words if any(word.startswith("amp=") for word in words) else (*words, "amp=off")
        words = words if any("cuda_graph" in word for word in words) else (*words, "cuda_graph=false")
        done = launch.python(str(tmp_path / "script.py"), *words, "log_every=5", f"save_dir={tmp_path / name}")
        assert done.code == code, done.out + done.err
        return load(tmp_path / name), logged(tmp_path / name), done.out

    return train


def assert_same(one, other):
    assert one[1] == other[1], "what was logged"
    assert_same_parts(one[0], other[0], "model", "ema", "optimizer", "progress", "tally")


def launched(said):
    """The launches: one for a step of one pass."""
    return int(said.rpartition("LAUNCHED ")[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [*HAR, "optim.ema_decay=0.9", "model.dropout=0.2"],
        [*HAR, "mode=flatten", "optim.lr_scale=head:0.5", "drop_last=true"],
        [*HAR, "mode=flatten", "amp=bf16"],
        [TERMS, "epochs=6"],
        [*ODD, "model.dropout=0.3"],
        [*ODD, "optim.name=sgd", "optim.weight_decay=0"],
        [*ODD, "own.kind=clock"],
        [*ODD, "model.dropout=0.3", *TWO],
        [TERMS, "epochs=6", *TWO, "optim.grad_clip=0.1"],
        [*ODD, "amp=fp16", *TWO],
    ],
    ids=["conv", "perceptron", "bf16", "terms", "norm", "sgd", "clock", "two passes", "terms in two passes", "fp16"],
)
def test_a_recorded_step_takes_the_same_bits(run, words):
    """Of weights, their average, moments and all that is logged, through warm-up and decay of the learning rate, with
    dropout, evaluations, and the short batch at the end of an epoch."""
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    said = recorded[2]
    assert "steps recorded as CUDA graphs" in said and "from step 4 on, a step is" in said, said
    assert launched(eager[2]) == 0 and launched(recorded[2]) >= 12
    assert_same(eager, recorded)


@pytest.mark.slow
def test_a_loss_scale_that_changes_in_each_step(run, tmp_path):
    """It grows after each step, and shrinks after a step that overflows; a comparison undoes its change, too."""
    grows = "import torch\ntorch.amp.GradScaler.__init__.__defaults__ = ('cuda', 2.0**14, 2.0, 0.5, 1, True)\n"
    script = (tmp_path / "script.py").read_text().replace("import train\n", f"{grows}import train\n")
    (tmp_path / "script.py").write_text(script)
    words = [*ODD, "amp=fp16", *TWO]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    assert "stays many launches" not in recorded[2] and launched(recorded[2]) >= 12
    assert eager[0]["progress"]["skipped"] > 2
    assert_same(eager, recorded)
    assert_same_parts(eager[0], recorded[0], "scaler")


def test_a_step_that_is_not_finite_is_skipped_and_its_samples_are_named(run):
    """With its statistics; read one launch later, when the loss of the next one is in the graph's memory."""
    words = [*ODD, "own.kind=nan"]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    skipped = [line["ranks"]["0"] for line in eager[1] if line["event"] == "skipped"]
    assert all(line["found"] == {"7": "NaN in x"} for line in eager[1] if line["event"] == "skipped")
    assert len(skipped) >= 4 and all(7 in samples and len(samples) <= 12 for samples in skipped)
    assert launched(recorded[2]) >= 17
    assert_same(eager, recorded)


@pytest.mark.slow
def test_a_recorded_run_is_stopped_and_resumed(run):
    """SIGTERM comes while a batch is made for a launch: it is the host's vote, and the graph holds none."""
    words = [*ODD, "model.dropout=0.3"]
    straight = run("straight", *words)
    stopped = run("resumed", *words, "cuda_graph=true", "own.ends=9", code=75)
    assert launched(stopped[2]) == 7 and stopped[0]["progress"]["step"] == 12, "known one step late"
    resumed = run("resumed", *words, "cuda_graph=true")
    assert launched(resumed[2]) >= 1 and "Resuming" in resumed[2]
    assert_same_parts(straight[0], resumed[0])


SAVED = """
import math
from engine.files.writer import CheckpointWriter
from engine.phases import phase
from tests.tasks import graphed
class Task(graphed.Task):
    pass
CheckpointWriter.due_at = CheckpointWriter.epoch_due_at = property(
    lambda self: 0.0 if phase.step + 1 in (4, 12) else math.inf, lambda self, value: None
)
"""


def test_the_clock_saves_amid_recorded_steps(run, tmp_path):
    """Also where it is time as a step is recorded: the graph holds no vote for good. Known one step late."""
    (tmp_path / "own.py").write_text(SAVED)
    words = [str(tmp_path / "own.py"), "dataset.samples=204", "epochs=1", "keep_checkpoints=99"]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    for name in ("eager", "recorded"):
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert [entry["step"] for entry in manifest["checkpoints"]] == [5, 13, 17]
    assert launched(recorded[2]) == 14
    assert_same(eager, recorded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["optim.name=adafactor"], "with Adafactor the host reads whether to skip it"),
        (["own.kind=read"], f"{place_of(GRAPHED, 'isnan().item()')} waits for the GPU"),
        (["own.kind=object"], "a batch is no dict of nothing but tensors"),
        (["own.kind=progress"], "the loss reads batch['lockstep'].progress, which a graph would hold as it was: read"),
        (["own.kind=replaced"], "the model puts other tensors in the place of its buffers"),
        (
            ["own.kind=read once", "own.after=3", "model.dropout=0.3"],
            "recording it failed: RuntimeError: CUDA error: operation",
        ),
    ],
)
def test_what_cannot_be_recorded_is_taken_kernel_by_kernel(run, words, why):
    words = [*ODD, "steps=12", *words]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    assert recorded[2].count("cuda_graph: a step stays many launches, because " + why) == 1
    assert "cuda_graph:" not in eager[2] and launched(recorded[2]) == 0
    assert_same(eager, recorded)


KEEPING = """
import torch
from engine.contract import Loss, rows_of_global_batch
from tests.tasks import graphed
class Task(graphed.Task):
    state_attributes = ("centre", "queue")
    def __init__(self, cfg):
        super().__init__(cfg)
        self.centre, self.queue = torch.zeros(4), torch.zeros(24, 4)
    def loss(self, net, batch):
        out = net(batch["x"])
        errors = (out - batch["y"] - self.centre).square() + (out * self.queue.mean(0)).square()
        sums = {"out": out.sum(0), "rows": rows_of_global_batch(out)}
        return Loss(errors.sum(), batch["mask"].sum(), for_state=sums)
    def after_step(self, model, step):
        self.centre.lerp_(self.step_sums["out"].float() / 12, 0.3)
        queue = torch.cat([self.queue[12:], self.step_sums["rows"].float()])
        if self.cfg.own.kind == "another tensor":
            self.queue = queue
        else:
            self.queue.copy_(queue)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "another tensor"])
def test_a_graph_reads_the_state_that_the_host_changes(run, tmp_path, kind):
    (tmp_path / "own.py").write_text(KEEPING)
    words = [str(tmp_path / "own.py"), "dataset.samples=57", "epochs=4", f"own.kind={kind}"]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    assert recorded[2].count("own.py:12 reads another tensor than in a step before") == bool(kind)
    assert launched(recorded[2]) == (0 if kind else 13)
    assert_same(eager, recorded)
    assert_same_parts(eager[0], recorded[0], "task")


def test_rows_of_the_global_batch_in_three_passes_are_noticed(run, tmp_path):
    """A graph of the further passes would write the rows of the second pass. Loss and gradient are right."""
    (tmp_path / "own.py").write_text(KEEPING)
    words = [str(tmp_path / "own.py"), "dataset.samples=60", "epochs=4"]
    words += ["gradient_accumulation_steps=3", "batch_size=4"]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    assert recorded[2].count("something changes on the host, which a graph holds as it was") == 1
    assert_same(eager, recorded)
    assert_same_parts(eager[0], recorded[0], "task")


LOOKING = """
import torch
from engine.contract import Loss
from tests.tasks import graphed
class Task(graphed.Task):
    state_attributes = ("moved",)
    def __init__(self, cfg):
        super().__init__(cfg)
        self.moved, self.kept = torch.zeros(4).double(), torch.zeros(4)
    def loss(self, net, batch):
        loss = super().loss(net, batch)
        return loss._replace(for_state={"out": net(batch["x"]).sum(0)})
    def after_step(self, model, step):
        self.moved += self.kept + model.norm.weight.grad.norm()
        self.kept = self.step_sums["out"]
"""


def test_after_step_reads_gradients_and_keeps_sums(run, tmp_path):
    """They lie in the graph's memory, which the next launch overwrites; a step kernel by kernel has others."""
    (tmp_path / "own.py").write_text(LOOKING)
    words = [str(tmp_path / "own.py"), "dataset.samples=57", "epochs=5", "check_resume=false"]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    assert launched(recorded[2]) >= 16
    assert_same(eager, recorded)
    assert_same_parts(eager[0], recorded[0], "task")


OWN_OPTIMIZER = """
import torch
from tests.tasks import graphed
class Task(graphed.Task):
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.cfg.optim.lr, fused=True)
"""


@pytest.mark.slow
def test_torchs_own_fused_optimizer_is_recorded(run, tmp_path):
    """It refuses a capture unless it is marked as capturable; the mark is not in the checkpoint."""
    (tmp_path / "own.py").write_text(OWN_OPTIMIZER)
    words = [str(tmp_path / "own.py"), "dataset.samples=57", "epochs=4"]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    assert launched(recorded[2]) >= 12 and "many launches" not in recorded[2]
    assert_same(eager, recorded)


KEEPS_A_GRAPH = """
from tests.tasks import graphed
class Task(graphed.Task):
    def loss(self, net, batch):
        self.last = super().loss(net, batch)
        return self.last
"""
OLD_TORCH = "import torch\nvars(torch.autograd.graph).pop('set_override_stale_capture_stream', None)\n"
TORCHES = ["2.12"] + ["2.13"] * hasattr(torch.autograd.graph, "set_override_stale_capture_stream")


@pytest.mark.slow
@pytest.mark.parametrize("version", TORCHES)
def test_a_loss_that_the_task_keeps(run, tmp_path, version):
    """Its nodes that accumulate gradients were made on the default stream."""
    (tmp_path / "own.py").write_text((OLD_TORCH if version == "2.12" else "") + KEEPS_A_GRAPH)
    words = [str(tmp_path / "own.py"), "dataset.samples=57", "epochs=4"]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    assert recorded[2].count("autograd node 'AccumulateGrad' has a stale reference") == (version == "2.12")
    assert (launched(recorded[2]) >= 12) == (version == "2.13")
    assert_same(eager, recorded)


@pytest.mark.slow
@pytest.mark.parametrize("version", TORCHES)
def test_a_ddp_alone_is_recorded(run, tmp_path, version):
    """It holds the nodes that accumulate gradients. Its steps have the bits of those without it."""
    words = [*ODD, "optim.grad_clip=0.1"]
    plain = run("plain", *words)
    script = (tmp_path / "script.py").read_text().replace("(sys.argv[1:])", "(sys.argv[1:], strict=True)")
    (tmp_path / "script.py").write_text((OLD_TORCH if version == "2.12" else "") + script)
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    assert launched(recorded[2]) >= 16 and "stays many launches" not in recorded[2], recorded[2]
    assert_same(eager, recorded)
    assert_same_parts(plain[0], eager[0], "model", "ema", "optimizer")


BRANCHES = """
import torch
from tests.tasks import graphed
class Net(graphed.Net):
    def __init__(self, *about):
        super().__init__(*about)
        self.more = torch.nn.Parameter(torch.ones(8))
    def forward(self, x):
        return super().forward(x * self.more if len(x) == 12 else x)
class Task(graphed.Task):
    def model(self):
        return Net(self.cfg.model.width, self.cfg.model.dropout, self.cfg.own.kind)
"""


def test_a_short_batch_that_leaves_a_weight_alone(run, tmp_path):
    """The optimizer then gives the other weights counters of their own, which the graph does not advance."""
    (tmp_path / "own.py").write_text(BRANCHES)
    words = [str(tmp_path / "own.py"), "dataset.samples=57", "epochs=6"]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    assert recorded[2].count("a step of another form has put other tensors in the place of those") == 1
    assert_same(eager, recorded)


def test_batches_of_another_form_are_taken_kernel_by_kernel(run):
    """One that is no dict, too: what the loader adds to it is no part of it."""
    words = [FORMS, "own.form=tuple", "steps=8"]
    done = run("recorded", *words, "cuda_graph=true")
    assert "a batch is no dict" in done[2] and launched(done[2]) == 0


def test_turns_are_taken_kernel_by_kernel(run, launch, tmp_path):
    """The numbers of a step, which are read a step late, keep the names of its turn."""
    words = [str(ROOT / "tests/tasks/turns.py"), "steps=12"]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    why = "cuda_graph: a step stays many launches, because the turns of the task train other weights in each\n"
    assert recorded[2].count(why) == 1 and launched(recorded[2]) == 0
    assert_same(eager, recorded)
    succeed(launch.python("train.py", *words, "amp=off", "log_every=5", f"save_dir={tmp_path / 'cpu'}"))
    for late, line in zip(eager[1], logged(tmp_path / "cpu"), strict=True):
        names = [name for name in line if name.startswith(("loss", "accuracy"))]
        assert {name: late[name] for name in names} == pytest.approx({name: line[name] for name in names}, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["number", "backward"])
@pytest.mark.parametrize(("after", "perhaps"), [(4, ""), (8, ", perhaps in the 3 steps before, too")])
def test_a_number_that_changes_on_the_host_is_noticed(run, kind, after, perhaps):
    """In the loss, or in its gradient alone. The second launch is undone, and nothing is lost; later some steps are."""
    words = [*ODD, f"own.kind={kind}", f"own.after={after}"]
    eager, recorded = run("eager", *words), run("recorded", *words, "cuda_graph=true")
    (line,) = (line for line in recorded[2].splitlines() if "many launches" in line)
    assert "something changes on the host, which a graph holds as it was" in line and line.endswith("was" + perhaps)
    text = {"number": "loss.total * 1.5)", "backward": "grad * 1.5"}[kind]
    assert f"{place_of(GRAPHED, text)} computes mul in place of" in line
    if not perhaps:
        assert_same_parts(eager[0], recorded[0])


AUTO = {
    "records": ("cuda_graph.BUSY = float('inf')", ""),
    "busy": ("cuda_graph.BUSY = 0.0", "launches of a graph take "),
    "no room": (
        "torch.cuda.mem_get_info = lambda device: (0, 2)",
        "the GPU has no room for the memory of a second step",
    ),
    "long": (
        "cuda_graph.StepGraph._now = lambda self, now=[0]: now.__setitem__(0, now[0] + 1e6) or now[0]",
        "the GPU computes longer than the host launches",
    ),
}
"""Statements before a training with cuda_graph=auto, and the reason to give up."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*AUTO])
def test_auto_records_where_the_gpu_waits(run, tmp_path, kind):
    """The bits are those kernel by kernel, whatever the measurement was."""
    statement, why = AUTO[kind]
    words = [*ODD, "model.dropout=0.3", "steps=18"]
    eager = run("eager", *words)
    import_it = "from plugins.performance import cuda_graph\nimport torch\n"
    script = (tmp_path / "script.py").read_text().replace("import train\n", f"{import_it}{statement}\nimport train\n")
    (tmp_path / "script.py").write_text(script)
    auto = run("auto", *words, "cuda_graph=auto")
    said = auto[2]
    assert "steps recorded as CUDA graphs if the GPU waits" in said
    assert said.count("a step stays many launches, because " + why) == bool(why)
    assert launched(said) == {"records": 7, "busy": 2}.get(kind, 0)
    assert_same(eager, auto)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_rate_in_memory_has_the_bits_of_the_number(name):
    """On a GPU each rate is a float32; a graph reads it from memory."""
    model = torch.nn.Linear(1, 1)
    optimizer = make_optimizer(model, Optim(name=name, weight_decay=0.03))
    optimizer.found_inf = torch.zeros(())
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.7)
    found = {False: [], True: []}
    for in_memory, weights in found.items():
        optimizer.state.clear()
        vars(optimizer).pop("kept_lists", None)
        for step in range(20_000):
            rate = torch.tensor(0.3 * (1 - step / 20_000))
            for group in optimizer.param_groups:
                group["lr"] = rate if in_memory else float(rate)
            torch.nn.init.ones_(model.weight)
            optimizer.step()
            weights.append(model.weight.item())
    assert found[False] == found[True]


def test_without_a_gpu_it_says_so(launch, tmp_path):
    words = [TOY, "steps=2", "cuda_graph=true", "device=cpu", f"save_dir={tmp_path / 'run'}"]
    assert "many launches, because there is no GPU\n" in succeed(launch.python("train.py", *words)).out


def test_each_obstacle_has_its_words():
    compiler.stay_unloaded()

    def about(processes=1, workers=0, compile="default", moves=False, graph="auto", record=0, exclude=(), **other):
        model = torch.nn.Linear(2, 2)
        ddp = config.DDP(**{name: other.pop(name) for name in [*other] if hasattr(config.DDP, name)})
        run = SimpleNamespace(
            world=SimpleNamespace(device=torch.device("cuda"), size=processes),
            plan=SimpleNamespace(workers=workers, compile=compile, moves_values=moves, sharded=False),
            task=SimpleNamespace(turns={}), rates=SimpleNamespace(scheduler=None), meter=SimpleNamespace(terms=None),
            net=model, model=model, optimizer=make_optimizer(model, Optim()),
            cfg=SimpleNamespace(exclude=[*exclude], record=record, cuda_graph=graph, ddp=ddp),
        )  # fmt: skip
        vars(run).update(other)
        return cuda_graph.unsupported_reason(run)

    assert about() == about(workers=4) == about(scaler=torch.amp.GradScaler("cpu")) == ""
    assert about(exclude=["7"]) == "exclude makes steps of several sizes"
    assert about(record=3) == "record keeps what the modules of a step return"
    assert about(net=torch.nn.DataParallel(torch.nn.Linear(2, 2))) == "the model is in DataParallel"
    assert about(rates=SimpleNamespace(scheduler=1)) == "the task's `scheduler` sets the rates on the host"
    assert about(moves=True) == "the schedule moves momentum or weight decay on the host"
    for mode in ("reduce-overhead", "max-autotune"):
        assert about(compile=mode) == f"compile={mode} records graphs of its own"
    assert about(2, workers=4) == about(2, graph=True) == ""
    assert about(2) == "other roundings than DDP's would follow; cuda_graph=true allows them"
    for setting in ({"find_unused_parameters": True}, {"sync_bn": True}, {"comm_hook": "fp16"}):
        (name,) = setting
        assert about(2, workers=4, **setting) == f"ddp.{name} needs other processes within a pass"
    terms = SimpleNamespace(terms=True)
    why = "the task's `losses`, whose weights are sums over the processes, needs other processes within a pass"
    assert about(2, graph=True, meter=terms) == why and about(meter=terms) == ""
    several = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    assert about(2, workers=4, model=several, net=several).startswith("it adds up weights of several types, ")
