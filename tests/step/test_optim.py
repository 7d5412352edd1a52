"""The step itself, as functions: groups, schedule, normalising, clipping, skipping, averaging."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engine import config, kernels, optim, plan
from engine.comm.reducer import LocalReducer
from engine.comm.world import World
from engine.config import Optim, Schedule
from engine.optim import make


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()


def plain(model):
    return LocalReducer(World(0, 0, 1, torch.device("cpu")), model, "same")


def take(model, divisor, grad_clip=0.0, scaler=None):
    optimizer = optim.make_optimizer(model, Optim())
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    return optim.step(
        optimizer, scaler, plain(model), 0.1, torch.tensor(divisor, dtype=torch.float64), grad_clip
    ), optimizer


def with_gradients(scale, dtype=torch.float64):
    model = small().to(dtype)
    (model(torch.ones(5, 4, dtype=dtype)).square().sum() * scale).backward()
    return model


def test_norms_and_biases_do_not_decay():
    groups = optim.make_optimizer(small(), Optim(weight_decay=0.3)).param_groups
    assert [(sorted(p.ndim for p in g["params"]), g["weight_decay"]) for g in groups] == [
        ([2, 2], 0.3),
        ([1, 1, 1, 1], 0.0),
    ]


@pytest.mark.parametrize("grad_clip", [0.0, 0.5, 100.0])
@pytest.mark.parametrize(("dtype", "near", "scale"), [
    (torch.float64, 1e-12, 0), (torch.float32, 1e-5, 0), (torch.float32, 1e-5, 1024),
])  # fmt: skip
def test_the_divisor_turns_sums_into_means_before_clipping(grad_clip, dtype, near, scale):
    """float32: in the optimizer's kernel, which leaves the gradient as it has used it. fp16's come with a scale, and
    are divided by it and by the divisor once. A gradient shorter than the limit keeps its length."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
    scaler.scale(torch.zeros(()))  # which makes the scale
    summed, mean = with_gradients(100.0 * (scale or 1), dtype), with_gradients(1.0, dtype)
    (norm_a, skipped), _ = take(summed, 100.0, grad_clip, scaler)
    (norm_b, _), _ = take(mean, 1.0, grad_clip)
    assert norm_a.item() == pytest.approx(norm_b.item(), rel=near) and not skipped
    expected = torch.nn.utils.get_total_norm([p.grad for p in with_gradients(1.0).parameters()])
    assert norm_b.item() == pytest.approx(expected.item(), rel=near), "the norm before clipping is reported"
    for a, b in zip(summed.parameters(), mean.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e1 * near, atol=near)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e1 * near, atol=near)
    if grad_clip:
        clipped = torch.nn.utils.get_total_norm([p.grad for p in mean.parameters()])
        assert clipped.item() == pytest.approx(min(grad_clip, expected.item()), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("bad", "scale", "divisor"), [(math.nan, 1.0, 1.0), (math.inf, 1.0, 1.0), (0.0, 0.0, 0.0)])
def test_a_step_that_is_not_finite_changes_nothing(bad, scale, divisor, dtype):
    """Nor does a global batch without weight."""
    model = with_gradients(scale, dtype)
    before = copy.deepcopy(model.state_dict())
    next(model.parameters()).grad[0, 0] = bad
    (_, skipped), optimizer = take(model, divisor, grad_clip=1.0)
    assert skipped.item() == 1.0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(state["step"] == 0 for state in optimizer.state.values())
    assert not any(state[name].any() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_the_learning_rate_is_a_function_of_the_step(kind):
    cfg = Schedule(kind=kind, final_share=0.1, decay_share=0.25)
    sizes = dict.fromkeys("num_samples micro_batch processes accumulation global_batch steps_per_epoch".split(), 1)
    the_plan = plan.Plan(**sizes, dropped=0, total_steps=0, warmup_steps=10, horizon=110, peak_lr=2.0, schedule=cfg)
    lrs = [the_plan.lr(step) for step in range(130)]
    assert lrs[0] == pytest.approx(0.2) and lrs[9] == lrs[10] == 2.0
    assert lrs[9:] == sorted(lrs[9:], reverse=True)
    middle, last = {"constant": (2.0, 2.0), "wsd": (2.0, 0.2)}.get(kind, (1.1, 0.2))
    assert lrs[60] == pytest.approx(middle) and lrs[110] == lrs[129] == pytest.approx(last)
    if kind == "wsd":  # the last quarter of 110 steps
        assert lrs[82] == 2.0 and lrs[83] < 2.0 and lrs[96] == pytest.approx(1.1)
    short = dataclasses.replace(the_plan, warmup_steps=5, horizon=5)
    assert [short.lr(step) for step in (5, 6)] == [2.0, pytest.approx(last)], "all of it warm-up"


def test_learning_rates_scale_as_asked():
    def peak(rule):
        schedule = Schedule(lr_scaling=rule, base_batch_size=32)
        cfg = config.Config(batch_size=32, optim=Optim(lr=1e-3), schedule=schedule)
        return plan.make_plan(cfg, World(0, 0, 4, torch.device("cpu")), 1000).peak_lr

    assert peak("linear") == pytest.approx(4e-3)  # guide 001: four GPUs, four times
    assert peak("sqrt") == pytest.approx(2e-3)
    assert peak("none") == 1e-3


def test_the_average_is_torchs_own_but_of_skipped_steps():
    """Not the first one, which copies, either. A counter has no average, nor has a mask of infinities."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).double())
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    ours = optim.make_ema(model, Optim(ema_decay=0.9))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for skipped in (1.0, 0.0, 0.0, 1.0, 0.0, 0.0):
        before = copy.deepcopy(ours.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        model[:2](torch.randn(8, 4) + 1)
        ours.update(torch.tensor(skipped))
        if not skipped:
            ours.begun = True
            theirs.update_parameters(model)
        for name, value in ours.state_dict().items():
            if name.endswith("num_batches_tracked"):
                assert value == model[1].num_batches_tracked
            elif name.endswith("mask"):
                assert torch.equal(value, model.mask)
            else:
                assert torch.equal(value, (before if skipped else theirs.state_dict())[name]), name


def test_the_optimizer_is_torchs_bit_for_bit():
    """Through a state dict, too, and where a parameter has no gradient at times, or only from some step on."""
    ours, theirs = small().float(), small().float()
    cfg = Optim(lr=3e-3, weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-3)  # each with another effect than the default
    a = optim.make_optimizer(ours, cfg)
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in optim.make_optimizer(theirs, cfg).param_groups
    ]
    b = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95), eps=1e-3, fused=True)
    for n in range(12):
        for model in (ours, theirs):
            torch.manual_seed(n)
            for k, p in enumerate(model.parameters()):
                p.grad = None if (k == 1 and n < 2) or (k == 2 and n in (2, 5, 8)) else torch.randn_like(p)
        a.step()
        b.step()
        if n == 6:
            fresh = optim.make_optimizer(ours, cfg)
            fresh.load_state_dict(copy.deepcopy(a.state_dict()))
            a = fresh
        if n == 10:
            a.load_state_dict(copy.deepcopy(a.state_dict()))  # into the one that is in use
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q), n
    one, two = a.state_dict()["state"], b.state_dict()["state"]
    for number, state in one.items():
        assert all(torch.equal(value, two[number][name]) for name, value in state.items()), number
    assert len({state["step"].item() for state in one.values()}) == 3, "the counters did go apart"
    other = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    other.load_state_dict(a.state_dict())
    for p in theirs.parameters():
        p.grad = torch.ones_like(p)
    other.step()
    after = sorted(state["step"].item() for state in other.state_dict()["state"].values())
    assert after == sorted(state["step"].item() + 1 for state in one.values()), "torch's moves each counter once"


def test_equal_counters_are_one():
    model = with_gradients(1.0)
    _, optimizer = take(model, 1.0)
    assert len({id(state["step"]) for state in optimizer.state.values()}) == 2, "one for each group"
    again = optim.make_optimizer(model, Optim())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len({id(state["step"]) for state in again.state.values()}) == 2


def test_moments_take_the_layout_of_their_weights():
    """A checkpoint from contiguous kernels, continued with channels-last ones, and the other way round."""

    def network(last):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 2))
        if last:
            kernels.apply_memory_format(net, "channels_last")
        return net, optim.make_optimizer(net, Optim())

    def train(net, optimizer, steps):
        for n in steps:
            torch.manual_seed(n)
            optimizer.zero_grad()
            net(torch.randn(5, 3, 6, 6)).square().sum().backward()
            optimizer.step()

    for before, after in ((False, True), (True, False)):
        straight, changed = network(before), network(before)
        train(*straight, range(8))
        train(*changed, range(5))
        fresh = network(after)
        fresh[0].load_state_dict(changed[0].state_dict())
        make.load_state(fresh[1], copy.deepcopy(changed[1].state_dict()))
        train(*fresh, range(5, 8))
        for p, q in zip(straight[0].parameters(), fresh[0].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
