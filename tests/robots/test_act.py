"""The Action Chunking Transformer: LeRobot's numbers, sums that add up, and the ensemble in time."""

import math

import pytest
import torch
from tiny_act import (
    ACTION,
    CASES,
    DIMS,
    ENV,
    PADDED,
    STATE,
    TINY,
    TOP,
    WRIST,
    a_batch,
    build,
    fill,
    golden,
    noise,
    some_draws,
)

from models.act import ACT, ACTConfig, Attention, TemporalEnsemble
from models.layers import normal_quantiles
from models.resnet import FrozenBatchNorm2d, ResNet


def small(names=(STATE, ENV), **options):
    """Return a network, a batch for it, and draws."""
    net = build(names, **options)
    return net, a_batch(names), some_draws(net)


@pytest.fixture(params=CASES)
def case(request):
    options, names = CASES[request.param]
    return request.param, *small(names, **options)


def close(got, expected, **how):
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(expected), **how)


# ---- LeRobot's network ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@torch.no_grad()
def test_the_numbers_of_lerobot(case):
    name, net, inputs, draws = case
    fill(net.state_dict())
    expected = golden(name)
    got = net(inputs, draws) | {"sample": net.sample(inputs)[0].flatten()[:4]}
    assert got.keys() == expected.keys()
    for what, value in expected.items():
        close(got[what], value, rtol=0, atol=2e-4)


def test_as_many_parameters_as_lerobot():
    with torch.device("meta"):
        net = ACT(ACTConfig(), 14, 0, 14, [TOP])
    count = sum(parameter.numel() for parameter in net.parameters())
    assert count == 51_613_582
    # Until LeRobot 0.3 the normalisers were frozen parameters: mean and std of the state, of the action twice, of RGB.
    assert count + 2 * (14 + 2 * 14 + 3) == 51_613_672


def test_dropout_is_there_in_training_alone():
    net, inputs, _ = small(dropout=0.5)
    attention, x = Attention(16, 4, 0.5), noise(2, 5, 16)
    for part, run in ((attention, lambda: attention(x, x, x)), (net, lambda: net.sample(inputs))):
        assert not torch.equal(run(), run())
        part.eval()
        assert torch.equal(run(), run())


@pytest.mark.parametrize("pre_norm", [False, True])
def test_dropout_is_on_every_branch_and_inside_the_feed_forward_part(pre_norm):
    net, inputs, draws = small(pre_norm=pre_norm, n_vae_encoder_layers=1)
    calls = []
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda *_: calls.append(1))
    net(inputs, draws)
    assert len(calls) == 3 * (1 + 2) + 4, "three encoder layers, and a decoder layer with one branch more"


def test_the_start_is_the_published_codes():
    """Xavier in the transformer, whose bound is sqrt(6 / (in + out)), and torch's 1 / sqrt(in) in the VAE's encoder."""
    net = build([STATE, ENV], dim_feedforward=200)
    for part, bound in ((net.vae_encoder, 200**-0.5), (net.encoder, (6 / 232) ** 0.5), (net.decoder, (6 / 232) ** 0.5)):
        assert 0.95 * bound < part.layers[0].linear2.weight.abs().max() <= bound


# ---- training -------------------------------------------------------------------------------------------------------


def test_every_parameter_learns(case):
    _, net, inputs, draws = case
    sum(value.sum() for value in net(inputs, draws).values()).backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []


def lerobots_loss(prediction, mean, log_var, inputs):
    """LeRobot's since 0.5, from its source: the mean absolute error where it counts, and ten times the mean KL."""
    error = torch.nn.functional.l1_loss(prediction, inputs[ACTION], reduction="none")[~inputs[PADDED]].mean()
    posterior = torch.distributions.Normal(mean, (log_var / 2).exp())
    kl = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0))
    return error + 10.0 * kl.sum(1).mean()


@torch.no_grad()
def test_the_sums_make_lerobots_loss_however_the_batch_is_cut():
    net, inputs = build([STATE, ENV]), a_batch([STATE, ENV], count=6)
    draws = some_draws(net, 6)
    mean, log_var = net.posterior(inputs)
    prediction = net.decode(inputs, mean + (log_var / 2).exp() * normal_quantiles()(draws))
    expected = lerobots_loss(prediction, mean, log_var, inputs)
    mean_valid = (~inputs[PADDED]).sum() / 6
    for cut in ([6], [3, 3], [1, 2, 3]):
        total = 0.0
        for part in torch.arange(6).split(cut):
            sums = net({name: value[part] for name, value in inputs.items()}, draws[part])
            assert {name: value.shape for name, value in sums.items()} == {"error": (len(part),), "kl": (len(part),)}
            total += (sums["error"] / (mean_valid * DIMS[ACTION]) + net.penalty * sums["kl"]).sum()
        close(total / 6, expected)


def test_the_latent_is_drawn_and_used():
    net, inputs, _ = small()
    assert net.num_draws == 5 and net.penalty == 10.0
    without = build(use_vae=False)
    assert without.num_draws == 0 and without.penalty == 0.0
    a, b = (net(inputs, torch.full((3, 5), draw)) for draw in (0.1, 0.9))
    assert (a["error"] - b["error"]).abs().min() > 1e-3, "the draws move the prediction"
    assert torch.equal(a["kl"], b["kl"]), "and not the posterior"
    net(inputs, torch.full((3, 5), 0.1))["error"].sum().backward()
    assert net.vae_encoder_action_input_proj.weight.grad.abs().max() > 0, "the error alone teaches the encoder"
    other = net(inputs | {ACTION: -inputs[ACTION]}, torch.full((3, 5), 0.1))
    assert (a["kl"] - other["kl"]).abs().min() > 1e-4, "which sees the actions"


def test_padding_counts_for_nothing():
    net, inputs, draws = small()
    other = inputs | {ACTION: inputs[ACTION].masked_fill(inputs[PADDED][..., None], 77.0)}
    a, b = net(inputs, draws), net(other, draws)
    assert all(torch.equal(a[name], b[name]) for name in a)
    seen = inputs | {ACTION: inputs[ACTION] + 1.0}
    assert all((net(seen, draws)[name] != a[name]).all() for name in a)


def test_a_sample_is_of_what_is_seen_alone():
    net, inputs, _ = small()
    chunk = net.sample({name: inputs[name] for name in (STATE, ENV)}, torch.rand(3, 5))
    assert chunk.shape == (3, 6, 2) and not chunk.requires_grad
    close(chunk, net.decode(inputs, torch.zeros(3, 5)))
    assert torch.equal(net.sample(inputs), chunk)


def test_cameras_of_any_size_in_their_order():
    net, inputs, _ = small([TOP, WRIST], use_vae=False)
    chunk = net.sample(inputs)
    odd = net.sample(inputs | {TOP: noise(3, 3, 33, 20)})
    assert chunk.shape == odd.shape and not torch.equal(chunk, odd)
    one = build([TOP], use_vae=False)
    one.load_state_dict(net.state_dict())
    assert (one.sample({TOP: inputs[TOP]}) - chunk).abs().max() > 1e-3, "the second camera is looked at"
    swapped = ACT(net.config, 0, 0, DIMS[ACTION], [WRIST, TOP])
    swapped.load_state_dict(net.state_dict())
    close(swapped.sample(inputs), chunk, atol=1e-5, rtol=1e-4)  # attention has no order of its own


@pytest.mark.slow
def test_a_random_backbone_learns():
    """Nothing pretrained: which of two pictures it is must reach the action, through gradients from the first layer."""
    net = build([TOP], use_vae=False, n_encoder_layers=1, dim_model=32)
    inputs = {TOP: noise(2, 3, 32, 32), ACTION: torch.ones(2, 6, 2), PADDED: torch.zeros(2, 6, dtype=torch.bool)}
    inputs[ACTION][1] = -1.0
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    first = net.backbone.conv1.weight.detach().clone()
    errors = []
    for _ in range(12):
        error = net(inputs, torch.zeros(2, 0))["error"].sum() / 24
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.25 * errors[0], errors
    assert (net.backbone.conv1.weight - first).abs().max() > 1e-4, "down to the first layer"


@pytest.mark.slow
def test_no_step_waits_for_the_device(case):
    """Tensors without contents: whoever asks one for a number fails."""
    _, net, inputs, draws = case
    net = net.to("meta")
    inputs = {name: value.to("meta") for name, value in inputs.items()}
    sum(value.sum() for value in net(inputs, draws.to("meta")).values()).backward()
    assert net.sample(inputs).shape == (3, 6, 2)


def test_under_autocast_the_sums_keep_their_digits():
    net, inputs, draws = small([STATE, TOP])
    exact = net(inputs, draws)
    with torch.autocast("cpu", torch.bfloat16):
        assert net.backbone(inputs[TOP]).dtype == torch.bfloat16, "half the memory, to the last feature map"
        rough = net(inputs, draws)
    for name, value in exact.items():
        assert rough[name].dtype == torch.float32
        close(rough[name], value, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim_model": 30}, "multiple of 4"),
        ({"n_heads": 5}, "n_heads 5"),
        ({"n_action_steps": 7}, "chunk_size 6"),
        ({"n_action_steps": 0}, "n_action_steps 0 must be at least 1"),
        ({"n_heads": 0}, "n_heads 0"),
        ({"vision_backbone": "resnet50"}, "resnet18, resnet34"),
        ({"feedforward_activation": "glu"}, "relu, gelu"),
    ],
)
def test_what_no_network_can_be_made_of(options, words):
    with pytest.raises(ValueError, match=words):
        ACTConfig(**TINY | options)


def test_a_policy_must_see_something():
    with pytest.raises(ValueError, match="camera"):
        ACT(ACTConfig(**TINY), 0, 0, 2, [])
    assert build([STATE]).sample({STATE: noise(3, 4)}).shape == (3, 6, 2)


# ---- the residual network -------------------------------------------------------------------------------------------


def test_frozen_norms_are_batch_norms_in_evaluation_and_stay():
    theirs, ours = torch.nn.BatchNorm2d(5), FrozenBatchNorm2d(5)
    for i, value in enumerate(ours.buffers()):
        value.copy_(noise(5, seed=i) / 2 + 1)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    x = noise(3, 5, 4, 4)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    close(ours.train()(x), theirs.eval()(x))
    assert list(before) == ["weight", "bias", "running_mean", "running_var"]
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    assert not list(ours.parameters())


@pytest.mark.parametrize(("size", "features"), [((64, 96), (2, 3)), ((33, 20), (2, 1)), ((1, 1), (1, 1))])
def test_features_are_a_thirty_second(size, features):
    assert ResNet()(noise(1, 3, *size)).shape == (1, 512, *features)


@torch.no_grad()
def test_dilation_sees_what_the_stride_saw_and_what_lies_between():
    torch.manual_seed(0)
    strided, dilated = ResNet(), ResNet(dilate=True)
    dilated.load_state_dict(strided.state_dict())
    x = noise(1, 3, 128, 96)
    assert dilated(x).shape == (1, 512, 8, 6)
    x = dilated.layer3(dilated.layer2(dilated.layer1(noise(1, 64, 32, 24))))
    close(dilated.layer4(x)[..., ::2, ::2], strided.layer4(x), atol=1e-3, rtol=1e-3)


def test_a_deeper_backbone():
    with torch.device("meta"):
        counts = [sum(p.numel() for p in ResNet(name).parameters()) for name in ("resnet18", "resnet34")]
    assert counts == [11_166_912, 21_267_648]  # torchvision's, without the head and the norms


# ---- the ensemble in time -------------------------------------------------------------------------------------------


def blended(history, now, coefficient):
    """Algorithm 2 by its text: all predictions of moment `now`, oldest first, weighted by exp(-coefficient * i)."""
    found = [chunk[now - start] for start, chunk in history if 0 <= now - start < len(chunk)]
    weights = torch.tensor([math.exp(-coefficient * i) for i in range(len(found))])
    return (torch.stack(found) * weights[:, None]).sum(0) / weights.sum()


@pytest.mark.parametrize("coefficient", [0.01, 0.0, 0.7, -0.3])
def test_the_ensemble_is_the_weighted_mean(coefficient):
    ensemble, history = TemporalEnsemble(coefficient), [[], [], []]
    for now in range(14):
        chunk = noise(3, 4, 2, seed=now)
        for b in range(3):
            history[b].append((now, chunk[b]))
        close(ensemble(chunk), torch.stack([blended(history[b], now, coefficient) for b in range(3)]))
