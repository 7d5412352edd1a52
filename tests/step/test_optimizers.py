"""Any optimizer: its step, groups, rates, what is frozen; through real processes, killed and continued."""

import copy
import json

import pytest
import torch
from conftest import ROOT, launching, succeed
from saved import assert_same, load, logged
from torch import nn

import tasks
from engine import config, optim
from engine.comm import digests
from engine.comm.reducer import LocalReducer
from engine.comm.world import World
from engine.config import Optim
from engine.contract import ChainedOptimizer, LockstepError
from engine.files.archive import EXACT_PARTS
from engine.left_out import left_out_digests
from engine.optim import make
from plugins.preflight.optimizers import state_bytes

OWN = str(ROOT / "tests" / "tasks" / "optimizers.py")
BITS = str(ROOT / "tests" / "ranks" / "bits.py")

KINDS = ["adamw", "sgd", "muon", "adafactor", "own sgd", "own adafactor", "own chained"]


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).to(dtype)


def made(kind, model, **keys):
    own, name = kind.startswith("own"), kind.removeprefix("own ")
    words = [OWN, *([f"own.optimizer={name}"] if own else []), "optim.lr=0.1"]
    task = tasks.load(OWN)(config.parse(words, tasks.load).cfg)
    return optim.make_optimizer(model, Optim(lr=0.1, name="adamw" if own else name, **keys), task=task)


def fill(model, seed, scale=1.0):
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * scale


def take(optimizer, divisor=1.0, clip=0.0, lr=0.1, scaler=None):
    dtype = optimizer.param_groups[0]["params"][0].dtype
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    workers = LocalReducer(World(0, 0, 1, torch.device("cpu")), torch.nn.Linear(1, 1), "same")
    return optim.step(optimizer, scaler, workers, lr, torch.tensor(divisor, dtype=dtype), clip)


def everything(model, optimizer):
    return copy.deepcopy([dict(model.state_dict()), optimizer.state_dict()["state"]])


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a) if isinstance(a, dict) else a == b


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_torchs_on_clipped_means(kind, scaled, dtype):
    """Beside the loop anybody would write. Two steps are not finite, the first among them: they leave all as it was."""
    ours, theirs = network(dtype), network(dtype)
    a, b = made(kind, ours), made(kind, theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    scaler.scale(torch.zeros(()))  # which makes the scale
    in_bf16 = "muon" in kind or "chained" in kind  # Muon's products
    for n, bad in enumerate([True, False, True, False, False]):
        fill(ours, n, scale=7.0 * scaler.get_scale()), fill(theirs, n)
        if bad:
            next(ours.parameters()).grad[0, 0] = float("inf")
        before = everything(ours, a)
        _, skipped = take(a, divisor=7.0, clip=0.5, lr=0.1 / (n + 1), scaler=scaler)
        assert skipped.item() == bad
        if bad:
            weights, state = everything(ours, a)
            assert same(before[0], weights)
            assert same(before[1], state) if n else not any(v.any() for each in state.values() for v in each.values())
            continue
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in b.param_groups:
            group["lr"] = 0.1 / (n + 1) * group.get("lr_scale", 1.0)
        b.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=3e-3 if in_bf16 else 1e-5)
    assert not scaled or scaler.get_scale() == 256.0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_with_decoupled_decay(momentum):
    ours, theirs = network(), network()
    a = optim.make_optimizer(ours, Optim(name="sgd", lr=0.1, momentum=momentum, weight_decay=0.2))
    b = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, fused=True)
    for n in range(4):
        fill(ours, n), fill(theirs, n)
        a.step()
        with torch.no_grad():
            theirs[0].weight *= 1 - 0.1 * 0.2
            theirs[2].weight *= 1 - 0.1 * 0.2
        b.step()
        assert same(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_only_what_has_no_kernel_for_it_asks_the_host():
    """Elsewhere a host sync: `optim.step` says so. torch's fused SGD would leave its momentum as memory had it."""
    asks = {kind for kind in KINDS if not make.skips_itself(made(kind, network()))}
    assert asks == {"muon", "adafactor", "own sgd", "own adafactor", "own chained"}
    parameters, own = [*network().parameters()], type("Own", (torch.optim.AdamW,), {})
    assert make.skips_itself(torch.optim.Adam(parameters, fused=True))
    for optimizer in (
        torch.optim.AdamW(parameters),
        own(parameters, fused=True),
        torch.optim.SGD(parameters, fused=True),
    ):
        assert not make.skips_itself(optimizer)


@pytest.mark.parametrize("loaded", [False, True])
def test_an_optimizer_from_elsewhere_leaves_all_as_it_was(loaded):
    """One whose kernel cannot skip, and one whose checkpoint is of a kernel that cannot skip."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=loaded)
    if loaded:
        make.load_state(optimizer, torch.optim.AdamW(model.parameters(), fused=False).state_dict())
    before = copy.deepcopy(model.state_dict())
    fill(model, 0, scale=float("inf")), take(optimizer)
    assert same(before, dict(model.state_dict())) and not optimizer.state


def test_groups_keep_their_share_of_the_rate():
    model = network()
    optimizer = made("own sgd", model)
    fill(model, 0), take(optimizer, lr=0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.01 / 4), 0.01]
    assert "lr_scale" not in optimizer.param_groups[1], "a checkpoint of a usual run is as before"
    state = optimizer.state_dict()
    state["param_groups"][0].pop("lr_scale")  # of a version that knew none
    state["param_groups"][1]["lr_scale"] = 3.0  # of a task that has changed
    fresh = made("own sgd", network())
    make.load_state(fresh, state)
    assert [group.get("lr_scale") for group in fresh.param_groups] == [0.25, None]


def test_muon_trains_matrices_and_adamw_all_else():
    """Embeddings are tables of vectors, whatever their shape; also where a layer shares one."""
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "bag": nn.EmbeddingBag(9, 4), "layer": nn.Linear(4, 4)})
    model.update({"conv": nn.Conv1d(4, 4, 3), "norm": nn.LayerNorm(4), "tied": nn.Linear(4, 9, bias=False)})
    model["tied"].weight = model["words"].weight
    names = {id(p): name for name, p in model.named_parameters()}
    parts = optim.make_optimizer(model, Optim(name="muon")).optimizers
    trained = {type(part).__name__: {names[id(p)] for g in part.param_groups for p in g["params"]} for part in parts}
    rest = {"words.weight", "bag.weight", "layer.bias", "conv.weight", "conv.bias", "norm.weight", "norm.bias"}
    assert trained == {"Muon": {"layer.weight"}, "AdamW": rest}


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "adafactor"])
def test_rates_and_freezing_by_name(tmp_path, name):
    (tmp_path / "a.yaml").write_text("optim:\n  lr_scale:\n    0: 0.5\n    2.wei*: 4\n    2: 3\n  freeze: [1.bias]\n")
    read = ["--config", str(tmp_path / "a.yaml")]
    given = ["optim.lr_scale={0: 0.5, 2.wei*: 4, 2: 3}", "optim.freeze=1.bias"]
    listed = ["optim.lr_scale=?*backbone.*:9,0:0.5,2.wei*:4,2:3", "optim.freeze=1.bias"]  # the first may match nothing
    for words in (read, given, listed):
        cfg = config.parse([OWN, f"optim.name={name}", *words], tasks.load).cfg.optim
        model = network()
        optimizer = optim.make_optimizer(model, cfg)
        names = {id(p): name for name, p in model.named_parameters()}
        rates = {names[id(p)]: group.get("lr_scale", 1.0) for group in optimizer.param_groups for p in group["params"]}
        assert rates == {"0.weight": 0.5, "0.bias": 0.5, "1.weight": 1.0, "2.weight": 4.0, "2.bias": 3.0}
        assert not model[1].bias.requires_grad
        decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        assert {name for name, value in decay.items() if value} == {"0.weight", "2.weight"}


OWN_ONE = r"the task brings its own optimizer \(%s\): drop the key"


@pytest.mark.parametrize(("own", "cfg", "message"), [
    ("", {"lr_scale": ["back:2"]}, r"'back' matches no weight \(optim.lr_scale\): choose of names such as 0.wei"),
    ("", {"freeze": ["head"]}, r"'head' matches no weight \(optim.freeze\)"),
    ("", {"lr_scale": ["0"]}, r"'0' is no PATTERN:FACTOR \(optim.lr_scale\): give such as"),
    ("", {"lr_scale": ["0:0"]}, "'0:0' is no PATTERN:FACTOR"),
    ("", {"freeze": ["0", "1", "2"]}, "no parameter to train"),
    ("", {"freeze": ["?.weight"], "name": "muon"}, "the model has no matrix for Muon"),
    ("lbfgs", {}, r"LBFGS computes the loss several times a step, and a step here is one global batch \(the task's"),
    ("half", {}, r"0.bias and 3 more in no group \(the task's `optimizer`\): add what is to be trained"),
    ("strange", {}, "a group holds tensors that are no weights of the model"),
    ("number", {}, "it returns a int"),
    ("sgd", {"lr_scale": ["0:2"]}, OWN_ONE % "optim.lr_scale"),
    ("sgd", {"name": "muon"}, OWN_ONE % "optim.name=muon"),
])  # fmt: skip
def test_what_cannot_be_or_would_do_nothing_is_refused(own, cfg, message):
    task = tasks.load(OWN)(config.parse([OWN, f"own.optimizer={own}"], tasks.load).cfg) if own else None
    with pytest.raises(LockstepError, match=message):
        optim.make_optimizer(network(), Optim(**cfg), task=task)


@pytest.mark.parametrize("kind", ["own chained", "muon", "own lion", "own lions"])
def test_a_chain_is_restored_as_it_was(kind):
    """Also into one that has taken steps, and whose parts keep lists of their state."""
    a, b = network(), network()
    one, two = made(kind, a), made(kind, b)
    fill(b, 9), take(two)
    for n in range(3):
        fill(a, n), take(one)
    b.load_state_dict(a.state_dict())
    make.load_state(two, copy.deepcopy(one.state_dict()))
    assert all(each.state is two.state for each in getattr(two, "optimizers", []))
    for n in range(3, 6):
        fill(a, n), take(one), fill(b, n), take(two)
    assert same(*[everything(*each) for each in ((a, one), (b, two))])
    with pytest.raises(ValueError, match="number of parameter groups"):
        two.load_state_dict(made("sgd", network()).state_dict() | {"param_groups": []})


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as optimizers do whose rates follow from the number."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_an_optimizer_without_gradients_takes_no_step():
    """As that of another turn."""
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    chain = ChainedOptimizer(Counting([first], lr=0.1), Counting([second], lr=0.1))
    first.grad = torch.ones(2)
    chain.step()
    assert [group.get("k") for group in chain.param_groups] == [1, None]


@pytest.mark.parametrize("kind", [*KINDS, "own rmsprop"])
def test_the_bytes_of_its_state_are_known_before_a_step(kind):
    model = network()
    optimizer = made(kind, model)
    fill(model, 0), take(optimizer)
    held = sum(v.nbytes for s in optimizer.state.values() for name, v in s.items() if name != "step")
    assert state_bytes(optimizer) == (None if kind == "own rmsprop" else held)


# ---- whole runs -----------------------------------------------------------------------------------------------------

HARD = ["fault.kind=nan sample", "optim.ema_decay=0.9", "optim.grad_clip=0.5", "seed=3", "log_every=2", "eval_every=4"]
HARD += ["schedule.kind=wsd", "schedule.horizon=8", "schedule.warmup_steps=2", "virtual_workers=4", "global_batch=13"]

RUNS = {
    "sgd": ["optim.name=sgd", "optim.lr_scale=layers.0:0.5", "amp=fp16"],
    "muon": ["optim.name=muon", "batch_size=2", "amp=off"],
    "adafactor": ["optim.name=adafactor", "amp=fp16", "optim.freeze=layers.3.bias"],
    "own sgd": ["own.optimizer=sgd", "amp=off", "batch_size=1", "optim.freeze=layers.3.bias"],
    "own chained": ["own.optimizer=chained", "amp=fp16"],
    "own lion": ["own.optimizer=lion", "amp=off"],
    "own lions": ["own.optimizer=lions", "amp=off"],
    "adapter": ["own.adapter=true", "amp=off"],
}
"""A sample is not finite: its step is skipped. Accumulation, average, clipping, short last steps."""

WAY = ((2, 3), (3, 6), (1, 8))
"""Processes, and the step up to which they take each run that is stopped and resumed."""


@pytest.fixture(scope="module")
def folder(once):
    def train_all(folder):
        with launching() as launch:
            for processes, last, place in ((1, 8, "straight"), *((*leg, "way") for leg in WAY)):
                now = [*HARD, f"steps={last}"]
                runs = [[OWN, *words, *now, f"save_dir={folder / place / name}"] for name, words in RUNS.items()]
                words = BITS, json.dumps(runs)
                succeed(launch.python(*words) if processes == 1 else launch.torchrun(processes, *words))

    return once("optimizers", train_all)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_any_optimizer_learns_in_the_same_bits_on_any_processes(folder, name):
    """On 1, and stopped and resumed on 2, 3 and 1."""
    straight, lines = load(folder / "straight" / name), logged(folder / "straight" / name)
    assert straight["progress"]["step"] == 8
    assert len([line for line in lines if line["event"] == "skipped"]) == 1
    assert not straight["scaler"] or straight["scaler"]["scale"] == 2.0**15
    losses = [line["loss"] for line in lines if line["event"] == "eval"]
    assert losses[-1] < losses[0]
    resumed = load(folder / "way" / name)
    for part in EXACT_PARTS:
        assert_same(resumed.get(part), straight.get(part), part)


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapter_alone(folder, launch):
    path = folder / "straight" / "adapter"
    state = load(path)
    assert {*state["model"]} == {"adapter.weight", "adapter.bias"}
    assert {*state["ema"]} == {"n_averaged", "module.adapter.weight", "module.adapter.bias"}
    assert {*state["left_out"]} == {f"base.layers.{n}.{part}" for n in (0, 3) for part in ("weight", "bias")}
    changed = ["own.adapter=true", "own.base=2", "steps=9", "amp=off", "--force"]
    done = launch.python("train.py", OWN, *HARD, *changed, f"save_dir={path}")
    (error,) = done.errors
    assert done.code == 3 and "base.layers.0.weight, which the checkpoint leaves to the task's `model`, is not" in error


@pytest.mark.slow
def test_the_tools_read_such_runs(folder, launch, tmp_path):
    """Factors by name among them, and a base that comes from the task, whose weights are in no hash."""
    done = succeed(launch.python("train.py", OWN, "own.adapter=true", "steps=1", f"save_dir={tmp_path}"))
    assert f"weights      sha256 {digests.of_tensors(load(tmp_path)['model'].items())[:16]}\n" in done.out
    for name in ("sgd", "adapter"):
        run = folder / "straight" / name
        done = succeed(launch.python("tools/evaluate.py", str(run / "last.pt"), "--state", "--json"))
        shown = json.loads(done.out)["sha256"]["weights"]
        assert shown == digests.of_tensors(load(run)["model"].items())[:16]


@pytest.mark.slow
def test_another_class_of_optimizer_is_another_run(folder, launch):
    words = ["train.py", OWN, *HARD, "own.optimizer=adafactor", "amp=off", "steps=9", "--force"]
    done = launch.python(*words, f"save_dir={folder / 'straight' / 'own sgd'}")
    (error,) = done.errors
    assert done.code == 3 and "the checkpoint's optimizer is SGD, not Adafactor" in error and "init_from=" in error


def test_what_is_trained_must_be_saved():
    model = network()
    model.again = model[0]  # a tied one is saved under its other name
    said = r"it leaves out 0.bias, which is trained \(the task's `saved`\): save it, or"
    with pytest.raises(LockstepError, match=said):
        left_out_digests(model, ["0.weight", "again.weight", "0.bias", "again.bias"][2:])
    assert {*left_out_digests(model, ["0.weight"])} == {"0.weight"}
    model[2].requires_grad_(False)
    assert {*left_out_digests(model, ["2.weight", "2.bias"])} == {"2.weight", "2.bias"}
