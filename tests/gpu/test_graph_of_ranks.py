"""The recorded steps of several processes: the bits of DDP on two, and of virtual workers on any number. On CPUs, where
`recording.py` stands in for torch's graphs; none has been seen on a GPU. A pass is recorded without DDP."""

import re

import pytest
from conftest import ROOT
from saved import assert_same_parts, load

GRAPHED = str(ROOT / "tests/tasks/graphed.py")
SCRIPT = """
import os, sys, torch
from tests.kit import recording
if "BEFORE_TORCH_2_13" in os.environ:
    vars(torch.autograd.graph).pop("set_override_stale_capture_stream", None)
recording.install()
from plugins import parallel
from plugins.parallel import grad_norm
parallel.use_exact_kernels = lambda optimizer: None  # those of CPUs read the counters; a GPU has its own
grad_norm.sqrt_correctly_rounded = torch.sqrt
import train
if os.environ.get("MOVES"):
    from tests.kit import moving
    moving.install()
code = train.main(sys.argv[1:])
print("LAUNCHED", recording.Graph.launched, flush=True)
assert not recording.spoilt
sys.exit(code)
"""
COMMON = ["epochs=5", "model.dropout=0.3", "optim.grad_clip=1", "optim.ema_decay=0.9", "amp=off"]
TWO_PASSES = ["dataset.samples=54", "batch_size=3", "gradient_accumulation_steps=2"]
WORKERS = ["dataset.samples=57", "batch_size=3", "virtual_workers=4"]
WORKERS_IN_PASSES = ["dataset.samples=54", "batch_size=2", "virtual_workers=3", "gradient_accumulation_steps=2"]


@pytest.fixture
def ranks(launch, tmp_path):
    """Train on some processes; returns (the last checkpoint, what was printed, the launches of each process)."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def train(name, processes, *words, code=0, **env):
        folder = tmp_path / name
        done = launch.torchrun(processes, str(tmp_path / "script.py"), *words, f"save_dir={folder}", **env)
        assert bool(code) == bool(done.code), done.out + done.err
        return load(folder), done.out, [*map(int, re.findall(r"LAUNCHED (\d+)", done.out))]

    return train


def assert_same(one, other):
    assert_same_parts(one[0], other[0], "model", "ema", "optimizer", "progress", "tally")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "cuts"),
    [
        ([GRAPHED, *COMMON, *TWO_PASSES, "own.kind=clock"], [2]),
        ([GRAPHED, *COMMON, *WORKERS], [1, 2, 3]),
        ([GRAPHED, *COMMON, *WORKERS_IN_PASSES], [2]),
    ],
    ids=["ddp in two passes", "workers", "workers in two passes"],
)
def test_recorded_steps_of_ranks_take_the_same_bits(ranks, words, cuts):
    eager = ranks("eager", 2, *words, "cuda_graph=false")
    assert eager[2] == [0, 0]
    for processes in cuts:
        recorded = ranks(f"recorded {processes}", processes, *words, "cuda_graph=true")
        assert recorded[1].count("from step 4 on, a step is") == 1, recorded[1]
        assert "stays many launches" not in recorded[1] and min(recorded[2]) >= 20
        assert_same(eager, recorded)


@pytest.mark.slow
def test_a_ddp_is_made_on_the_stream_of_the_records(ranks):
    """Before torch 2.13, which takes the nodes of the gradients to the stream of a record."""
    words = [GRAPHED, *COMMON, *WORKERS]
    eager = ranks("eager", 2, *words, "cuda_graph=false")
    recorded = ranks("recorded", 2, *words, "cuda_graph=true", BEFORE_TORCH_2_13="1")
    assert "stays many launches" not in recorded[1] and min(recorded[2]) >= 20, recorded[1]
    assert_same(eager, recorded)


@pytest.mark.slow
def test_recorded_steps_take_the_same_bits_while_workers_move(ranks):
    """The pieces of a record are passes, so a process may take more or fewer of them in later steps."""
    words = [GRAPHED, *COMMON, *WORKERS]
    eager = ranks("eager", 1, *words, "cuda_graph=false")
    for shares in ("3,1", "auto"):
        more = ["cuda_graph=true", "log_every=1", f"ddp.shares={shares}"]
        recorded = ranks(f"recorded {shares}", 2, *words, *more, MOVES="1")
        assert "from step 4 on, a step is" in recorded[1] and "stays many launches" not in recorded[1], recorded[1]
        assert len({*recorded[2]}) == 2, "a process takes more passes"
        assert recorded[1].count("workers move") >= 6 or shares == "3,1", recorded[1]
        assert_same(eager, recorded)


OWN = """
import os, signal, torch
from engine.phases import phase
from tests.tasks import graphed
class Waves(graphed.Waves):
    def __getitems__(self, indices):
        if os.environ.get("STOP") == str(phase.step):
            del os.environ["STOP"]  # one signal: the second would end the process
            os.kill(os.getpid(), signal.SIGTERM)
        odd = 7 in indices and phase.step >= int(os.environ.get("ODD_FROM", 1000))
        return super().__getitems__(indices) | {"more": torch.zeros(len(indices), 2 if odd else 1)}
class Task(graphed.Task):
    def datasets(self):
        data, own = self.cfg.dataset, self.cfg.own
        self.waves = Waves(own, data.samples, 0)
        return self.waves, Waves(graphed.Own(), 23, 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("cut", [TWO_PASSES, WORKERS], ids=["ddp in two passes", "workers"])
def test_a_rank_whose_batch_has_another_form_computes_its_passes(ranks, tmp_path, cut):
    """The other rank launches: both add up in the same way."""
    (tmp_path / "own.py").write_text(OWN)
    words = [str(tmp_path / "own.py"), *COMMON, *cut, "cache=none", "num_workers=0"]
    eager = ranks("eager", 2, *words, "cuda_graph=false")
    recorded = ranks("recorded", 2, *words, "cuda_graph=true", ODD_FROM="8")
    assert "stays many launches" not in recorded[1] and len({*recorded[2]}) == 2, recorded[2]
    assert_same(eager, recorded)


@pytest.mark.slow
def test_all_ranks_give_up_for_the_reason_of_one(ranks, tmp_path):
    """One rank has a batch of another form before the recording."""
    (tmp_path / "own.py").write_text(OWN)
    words = [str(tmp_path / "own.py"), *COMMON, *TWO_PASSES, "cache=none", "num_workers=0"]
    eager = ranks("eager", 2, *words, "cuda_graph=false")
    recorded = ranks("recorded", 2, *words, "cuda_graph=true", ODD_FROM="0")
    assert recorded[1].count("stays many launches, because its batches have several forms") == 1
    assert recorded[2] == [0, 0]
    assert_same(eager, recorded)


@pytest.mark.slow
def test_a_recorded_run_of_ranks_is_stopped_and_continued_on_others(ranks, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    cut = ["dataset.samples=240", *WORKERS[1:]]
    words = [str(tmp_path / "own.py"), "epochs=2", *COMMON[1:], *cut, "cache=none", "num_workers=0"]
    straight = ranks("straight", 2, *words, "cuda_graph=false")
    stopped = ranks("stopped", 2, *words, "cuda_graph=true", code=75, STOP="12")
    # known by the votes of launches: step 19 is the next that is compared, kernel by kernel
    assert 12 < stopped[0]["progress"]["step"] < 18 and "from step 4 on" in stopped[1]
    resumed = ranks("stopped", 3, *words, "cuda_graph=true")
    assert "Resuming" in resumed[1] and min(resumed[2]) > 4
    assert_same(straight, resumed)


OTHERS = """
from engine.contract import gather_batch
from tests.tasks import graphed
class Task(graphed.Task):
    def loss(self, net, batch):
        loss = super().loss(net, batch)
        rows, mine = gather_batch(net(batch["x"]))
        return loss._replace(total=loss.total + rows.square().mean() * len(mine))
"""


@pytest.mark.slow
def test_a_loss_that_reads_samples_of_other_ranks_is_not_recorded(ranks, tmp_path):
    (tmp_path / "own.py").write_text(OTHERS)
    words = [str(tmp_path / "own.py"), *COMMON, "batch_size=6", "dataset.samples=60"]
    eager, recorded = ranks("eager", 2, *words, "cuda_graph=false"), ranks("recorded", 2, *words, "cuda_graph=true")
    why = "recording it failed: LockstepError: the loss reads samples of other processes"
    assert recorded[1].count(why) == 1 and recorded[2] == [0, 0]
    assert_same(eager, recorded)


@pytest.mark.slow
def test_auto_records_only_where_the_bits_stay(ranks):
    """DDP adds up in buckets: on three processes the sums of flat gradients are rounded in another way."""
    found = ranks("auto", 2, GRAPHED, *COMMON, "batch_size=6", "dataset.samples=60", "steps=6", "cuda_graph=auto")
    assert found[2] == [0, 0] and "because" not in found[1], "without a GPU auto prints no reason"
