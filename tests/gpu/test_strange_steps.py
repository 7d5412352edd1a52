"""Steps in which the host does something that a CUDA graph would hold as it was, by changes far below those that the
numbers of a step show: the same bits as kernel by kernel, or a line that names the place. On `fake_gpu.py`."""

import pytest
from conftest import ROOT, place_of
from fake_run import run_on_fake_gpu
from saved import assert_same_parts, load

STRANGE = str(ROOT / "tests/tasks/strange.py")
HELD = "something changes on the host, which a graph holds as it was"
FACTOR = place_of(STRANGE, "self.factor(x)")
WHY = {
    "draws": "the loss draws from the host's generator of random",
    "draws by torch": "the loss draws from the host's generator of torch",
    "counts": "a pass changes calls on the host, which a launch would not",
    "counts in hiding": f"mul at {FACTOR} takes 1.000",
    "number of the host": f"mul at {FACTOR} takes 1.000",
    "row of the host": f"{place_of(STRANGE, '.pin_memory()')} copies a tensor of the host in each pass",
    "keeps": f"{place_of(STRANGE, 'SMALL * before')} reads another tensor than in a step before: {HELD}",
    "hook": f"mul at {place_of(STRANGE, 'lambda grad')} takes 1.000",
    "prepares": "the state of the task is in other tensors than at the recording, or has other numbers",
    "evaluates": f"mul at {place_of(STRANGE, 'self.factors[0])')} takes 1.0001, and 1.0 in a step before",
    "input": "",
    "": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*WHY])
def test_what_the_host_does_is_in_no_graph(launch, tmp_path, kind):
    """No step is taken with a number of another step."""

    def train(name, *words):
        words = [STRANGE, f"own.kind={kind}", "eval_every=10", *words]
        done = run_on_fake_gpu(launch, tmp_path / name, *words, FAKE_GRAPHS="1")
        return load(tmp_path / name), [line for line in done.out.splitlines() if line.startswith("cuda_graph: ")]

    eager, said = train("eager", "cuda_graph=false")
    assert not said
    recorded, said = train("recorded", "cuda_graph=true")
    refusals = [line for line in said if "stays many launches, because" in line]
    assert len(refusals) == bool(WHY[kind]) and all(WHY[kind] in line for line in refusals), said
    assert_same_parts(eager, recorded, "model", "optimizer", "progress", "tally")


MOVED = """
from tests.tasks import toy
class Task(toy.Task):
    def after_step(self, model, step):
        for p in model.parameters():
            p.data = p.data.clamp(-1, 1)
"""


def test_a_weight_in_another_tensor_is_refused(launch, tmp_path):
    """The optimizer would train the former tensor, without an error."""
    (tmp_path / "own.py").write_text(MOVED)
    done = launch.python("train.py", str(tmp_path / "own.py"), "steps=2", "device=cpu", f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and len(done.errors) == 1, done.err
    assert "`after_step` puts another tensor in the place of the weight layers.0.weight" in done.err
    assert not (tmp_path / "run").exists()
