"""The adapter of LeRobot's policies, by a package of that name with two small ones: tests/lerobot_stub.

LeRobot's own are in tests/peer/test_policies_lerobot.py, where it is installed.
"""

import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, succeed
from refusals import refused
from robot_tasks import parse, record, task_of
from runs import weights
from scipy import stats

from engine.contract import BatchInfo, mix, sample_seeds, uniform
from models.lerobot_policy import Drawn, _seeds, beta_quantiles
from tasks.robots import lerobot as _lerobot
from tasks.robots.simulation import GENERATED

STUB = ROOT / "tests/lerobot_stub"
SHARED = ["env.type=none", "device=cpu", "dataset.cameras=none"]
MANY = mix(torch.arange(4000)) >> 16  # seeds of 48 bits


@pytest.fixture
def stub(monkeypatch):
    """A package `lerobot` on the path, whatever else is installed."""
    names = [name for name in sys.modules if name.split(".")[0] in ("lerobot", "draccus")]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(STUB))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("lerobot", "draccus")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return record(tmp_path_factory.mktemp("walks") / "set", episodes=5)


# ---- random numbers -------------------------------------------------------------------------------------------------

RANDOM = {
    "rand": (lambda n: torch.rand(n, 2), stats.uniform()),
    "rand_like": (lambda n: torch.rand_like(torch.zeros(n, 2)), stats.uniform()),
    "randn": (lambda n: torch.randn(n, 2), stats.norm()),
    "randn_like": (lambda n: torch.randn_like(torch.zeros(n, 2)), stats.norm()),
    "normal": (lambda n: torch.normal(mean=1.0, std=3.0, size=(n, 2)), stats.norm(1, 3)),
    "normal_": (lambda n: torch.empty(n, 2).normal_(1, 3), stats.norm(1, 3)),
    "uniform_": (lambda n: torch.empty(n, 2).uniform_(-2, 1), stats.uniform(-2, 3)),
    "Normal": (lambda n: torch.distributions.Normal(1.0, 3.0).sample((n,)), stats.norm(1, 3)),
    "Beta": (lambda n: torch.distributions.Beta(1.5, 1.0).sample((n,)), stats.beta(1.5, 1)),
    "Beta of tensors": (lambda n: torch.distributions.Beta(*torch.tensor([2.0, 2.0])).sample([n]), stats.beta(2, 2)),
    "randint": (lambda n: torch.randint(3, 40, (n, 2)), stats.randint(3, 40)),
    "randint by name": (lambda n: torch.randint(low=0, high=100, size=(n,)), stats.randint(0, 100)),
    "randint to": (lambda n: torch.randint(7, (n,)), stats.randint(0, 7)),
    "randint_like": (lambda n: torch.randint_like(torch.zeros(n), 2, 9), stats.randint(2, 9)),
    "multinomial": (
        lambda n: torch.multinomial(torch.tensor([1.0, 0.0, 3.0, 4.0]).expand(2 * n, 4), 1),
        stats.rv_discrete(values=([0, 2, 3], [0.125, 0.375, 0.5])),
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_what_a_policy_draws_is_of_the_right_distribution_and_of_the_sample(name):
    draw, expected = RANDOM[name]

    def drawn(seeds):
        with Drawn(seeds, uniform):
            draw(len(seeds))  # another call has other numbers
            return draw(len(seeds))

    whole = drawn(MANY)
    assert torch.equal(whole, torch.cat([drawn(some) for some in (MANY[:1], MANY[1:1500], MANY[1500:])]))
    with Drawn(MANY, uniform):
        assert not torch.equal(draw(len(MANY)), whole)
    values = whole.flatten().double().numpy()
    if hasattr(expected, "pdf"):
        assert stats.kstest(values, expected.cdf).pvalue > 1e-3
    else:
        found, counts = np.unique(values, return_counts=True)
        shares = expected.pmf(found)
        assert shares.sum() == pytest.approx(1) and stats.chisquare(counts, shares * len(values)).pvalue > 1e-3
    pairs = whole.double().view(len(MANY), -1)
    if pairs.shape[1] == 2:
        assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.06


def test_what_is_not_of_samples_stays_torchs():
    def drawn():
        torch.manual_seed(0)
        return torch.randn(3, 4), torch.rand(()), torch.zeros(5, 2), torch.nn.functional.dropout(torch.ones(9), 0.5)

    with Drawn(MANY[:5], uniform):
        inside = drawn()
    assert all(torch.equal(a, b) for a, b in zip(inside, drawn(), strict=True))


def test_times_that_are_spread_over_a_pass_are_each_samples_own():
    def times(seeds):
        with Drawn(seeds, uniform, spread=True):
            size = len(seeds)
            return (torch.rand(1) + torch.arange(size) / size) % (1 - 1e-5)

    whole = times(MANY)
    parts = torch.cat([times(MANY[:1]), times(MANY[1:70]), times(MANY[70:])])
    torch.testing.assert_close(whole, parts, rtol=0, atol=2e-7)
    assert stats.kstest(whole.double().numpy(), stats.uniform().cdf).pvalue > 1e-3


@pytest.mark.parametrize(("a", "b"), [(1.5, 1.0), (2.0, 2.0), (0.5, 0.5), (1.0, 3.0)])
def test_beta_quantiles(a, b):
    p = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    np.testing.assert_allclose(beta_quantiles(a, b, p).numpy(), stats.beta.ppf(p.numpy(), a, b), atol=1e-8)


# ---- settings -------------------------------------------------------------------------------------------------------


def test_any_field_of_its_own_is_a_key(stub):
    usual = parse("robot", "policy.type=blunt")
    policy = usual.policy
    assert (policy.width, policy.sizes, policy.crop, policy.limit, policy.kind) == (16, [3, 2], [8, 8], "", "noise")
    assert (policy.normalization_mapping.STATE, policy.normalization_mapping.VISUAL) == ("MIN_MAX", "IDENTITY")
    assert (usual.optim.lr, usual.optim.beta1, usual.schedule.warmup_steps, usual.steps) == (1e-2, 0.95, 1, 100_000)
    words = "policy.sizes=[4] policy.crop=null policy.limit=7 --policy.optimizer_lr=0.5 policy.kind=none".split()
    words += ["policy.normalization_mapping.ACTION=MIN_MAX"]
    cfg = parse("robot", "policy.type=blunt", *words)
    config = _lerobot.config_of(cfg.policy)
    assert (config.sizes, config.crop, config.limit, config.kind, config.device) == ((4,), None, 7, "none", "cpu")
    assert cfg.optim.lr == 0.5 and parse("robot", "policy.type=blunt", "lr=3").optim.lr == 3
    assert {kind: mode.value for kind, mode in config.normalization_mapping.items()} == {
        "STATE": "MIN_MAX",
        "ACTION": "MIN_MAX",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("policy.type=blnt", "there is no policy 'blnt' (policy.type): choose one of act, vla, or of lerobot"),
        ("policy.type=vqbt", "did you mean vqbet?"),
        ("policy.type=blunt policy.widht=3", "unknown key 'policy.widht' (command line): did you mean 'policy.width'"),
        ("policy.type=blunt policy.width=big", "policy.width=big (command line): give a whole number"),
        ("policy.type=blunt policy.kind=all", "policy.kind=all (command line): choose one of noise, none"),
        ("policy.type=blunt policy.limit=some", "LeRobot cannot take 'some'"),
        ("policy.type=blunt policy.horizon=5", "ValueError: the horizon must be even, not 5 (policy)"),
        ("policy.type=tdmpc", "tdmpc cannot be trained here: it learns from rewards"),
    ],
)
def test_mistakes_are_one_line(stub, monkeypatch, words, message):
    sys.modules.pop("lerobot", None)
    if "tdmpc" in words:
        from lerobot.configs.policies import PreTrainedConfig

        monkeypatch.setitem(PreTrainedConfig.known, "tdmpc", PreTrainedConfig)
    refused(message, lambda: parse("robot", *words.split()))


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(_lerobot, "find_spec", lambda name: None)
    message = "not installed (policy.type=diffusion): pip install 'lerobot[diffusion]'"
    refused(message, lambda: parse("robot", "policy.type=diffusion"))
    message = "did you mean diffusion? choose one of act, vla, with the lerobot package (pip "
    refused(message, lambda: parse("robot", "policy.type=difusion"))


# ---- samples and steps ----------------------------------------------------------------------------------------------


def batch_of(task, train, rows):
    rows = torch.as_tensor(list(rows))
    info = BatchInfo(rows, rows, sample_seeds(0, 0, rows))
    return train.__getitems__(rows) | {"lockstep": info}


def step(task, model, batches):
    model.zero_grad()
    losses = [task.loss(model, batch) for batch in batches]
    loss = sum(loss.total for loss in losses) / sum(float(loss.weight) for loss in losses)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


CASES = {
    "blunt": ["policy.type=blunt"],
    "masked": ["policy.type=blunt", "policy.do_mask_loss_for_padding=true"],
    "fine": ["policy.type=fine"],
    "exact": ["policy.type=blunt", "policy.exact=true", "policy.dropout=0.5"],
}


@pytest.mark.parametrize("case", CASES)
def test_the_step_does_not_depend_on_the_cut_and_is_lerobots(stub, walks, case):
    task, train, _ = task_of("robot", f"dataset.root={walks}", *SHARED, *CASES[case])
    torch.manual_seed(0)
    model = task.model().train()
    rows = [0, len(train) - 1, 3, len(train) - 2, 9]
    padded = (~batch_of(task, train, rows)["action_is_pad"]).sum(1)
    assert len({*padded.tolist()}) > 2  # or a wrong weight would not show
    whole = step(task, model, [batch_of(task, train, rows)])
    for cut in ([rows[:3], rows[3:]], [[row] for row in rows]):
        loss, grads = step(task, model, [batch_of(task, train, some) for some in cut])
        assert loss == pytest.approx(whole[0], rel=1e-6)
        torch.testing.assert_close(grads, whole[1], rtol=1e-4, atol=1e-6)
    if case == "exact":
        return
    batch = task._with_words(batch_of(task, train, rows))
    with Drawn(_seeds(uniform(batch["lockstep"].seed, 2)), uniform):
        inputs = model.pipelines()[0]({**batch, "task": [task.demos.tasks[n] for n in batch["task_index"].tolist()]})
        expected = model.net.policy.forward(inputs)[0].item()
    assert whole[0] == pytest.approx(expected, rel=1e-6)


def test_windows_and_frames_that_are_left_out(stub, walks):
    """Two looks, chunks that begin in the past, and the last two frames of an episode are not trained from."""
    task, train, val = task_of("robot", f"dataset.root={walks}", "dataset.eval_split=0", *SHARED, "policy.type=blunt")
    lengths = [9, 10, 11, 12, 13]
    assert len(train) == sum(lengths) - 2 * 5 and len(val) == sum(lengths)
    states, actions = (task.demos.columns[name] for name in ("observation.state", "action"))
    batch = train.__getitems__([0, 7 + 4])
    for n, row in enumerate((0, 9 + 4)):
        first, last = (0, 8) if n == 0 else (9, 18)
        see = [max(row - 1, first), row]
        act = [min(max(row - 1 + t, first), last) for t in range(6)]
        np.testing.assert_array_equal(batch["observation.state"][n], states[see])
        np.testing.assert_array_equal(batch["action"][n], actions[act])
    assert batch["action_is_pad"][0].tolist() == [True] + [False] * 5  # before the episode


def test_actions_are_of_the_present_and_noise_of_the_sample(stub, walks):
    task, train, _ = task_of("robot", f"dataset.root={walks}", *SHARED, "policy.type=blunt")
    torch.manual_seed(0)
    model = task.model().eval()
    batch = task._with_words(batch_of(task, train, [4, 9, 20]))
    draws = torch.rand(3, 2)
    actions = model.act(batch, draws)
    assert actions.shape == (3, 4, 3)
    recorded = model.normalizer.stats()
    mean, std = (recorded["observation.state"][key].float() for key in ("mean", "std"))
    state = (batch["observation.state"] - mean) / std
    with Drawn(_seeds(draws), uniform):  # the network's own formula, from two looks
        noise = torch.randn(3, 6, 3)
    lengths = torch.tensor([[float(len(task.demos.tasks[n]))] for n in batch["task_index"].tolist()])
    expected = (noise - model.net.policy._net(state, lengths, noise, torch.ones(3)))[:, 1:5]
    expected = expected * recorded["action"]["std"].float() + recorded["action"]["mean"].float()
    torch.testing.assert_close(actions, expected, rtol=1e-5, atol=1e-5)
    one = {name: value[1:2] for name, value in batch.items() if name != "lockstep"}
    torch.testing.assert_close(model.act(one, draws[1:2]), actions[1:2])
    same = {name: value[[1, 1]] for name, value in batch.items() if name != "lockstep"}
    torch.testing.assert_close(*model.act(same))
    assert not torch.allclose(*model.act(same, draws[:2]))
    sums = task.score(model, batch)
    truth, valid = batch["action"][:, 1:5], ~batch["action_is_pad"][:, 1:5, None]
    off = ((model.act(batch) - truth).abs() * valid).sum()
    assert float(sums["off"]) == pytest.approx(float(off)) and float(sums["numbers"]) == float(valid.sum() * 3)


@pytest.mark.parametrize("history", [[0], [-1, 0], [-3, -1, 0]])
def test_a_trial_remembers(history):
    asked = []

    def predict(observations, commands):
        asked.append(observations["x"])
        return np.arange(8.0).reshape(1, 4, 2) + 100 * len(asked)

    policy, every = _lerobot.with_history(predict, history, 3)
    done = [policy({"x": np.array([[now]])}, ["go"])[:, now % every] for now in range(0, 8) if now % every == 0]
    if history == [0]:
        assert every == 3 and [x.tolist() for x in asked] == [[[0]], [[3]], [[6]]]
        return
    assert every == 1
    assert [x[0, :, 0].tolist() for x in asked] == [[max(0, now + at) for at in history] for now in (0, 3, 6)]
    assert [float(action[0, 0]) for action in done] == [100, 102, 104, 200, 202, 204, 300, 302]


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_trains_on_one_and_two_processes_makes_trials_and_is_saved(launch, tmp_path):
    path = f"{STUB}:{ROOT}"
    words = ["robot", "policy.type=blunt", "env.demonstrations=8", "env.size=16", "dataset.cameras=none", "device=cpu"]
    words += ["eval.n_episodes=2", "steps=6", "global_batch=8", "amp=off"]
    for processes in (1, 2):
        run = tmp_path / f"run{processes}"
        own = [f"batch_size={8 // processes}", f"save_dir={run}"]
        done = succeed(launch.torchrun(processes, "train.py", *words, *own, PYTHONPATH=path))
        assert "LeRobot's blunt: its mean times the number of entries" in done.out and "Success: " in done.out
        assert "the loss adds up" in done.out
    one, two = weights(tmp_path / "run1"), weights(tmp_path / "run2")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6, msg=name)
    out = tmp_path / "out"
    succeed(launch.python("tools/save_pretrained.py", str(tmp_path / "run2"), str(out), PYTHONPATH=path))
    assert {each.name for each in out.iterdir()} == {"config.json", "model.pt", "before.pt", "after.pt", "README.md"}
    saved = torch.load(out / "model.pt")
    assert all(torch.equal(value, two[f"net.policy.{name}"]) for name, value in saved.items())
    data = next(GENERATED.glob("discs_*_8x16_seed0_noise0.1"))
    predict = ["tools/predict.py", str(tmp_path / "run2"), str(data), "--out", str(tmp_path / "p.csv")]
    succeed(launch.python(*predict, PYTHONPATH=path))
    rows = (tmp_path / "p.csv").read_text().splitlines()
    assert len(rows) > 80 and "action" in rows[0]
