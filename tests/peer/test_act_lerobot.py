"""ACT against LeRobot's own: the same weights give the same numbers, and each opens the other's folders.

For lerobot 0.6.1, and skipped where it is not installed: README.md tells how.
"""

import importlib.util
import json
from typing import NamedTuple

import pytest

if importlib.util.find_spec("lerobot") is None:
    pytest.skip("lerobot is not installed (make peer)", allow_module_level=True)

import torch
import torchvision_shim
from tiny_act import ACTION, CASES, DIMS, ENV, PADDED, SIZES, STATE, TINY, TOP, a_batch, build, fill, golden, some_draws

from formats.weights import pretrained
from models.act import ACT, ACTConfig, TemporalEnsemble
from models.layers import Normalizer, normal_quantiles

SHAPES = {name: (dim,) for name, dim in DIMS.items()} | {name: (3, *size) for name, size in SIZES.items()}
TYPES = {STATE: "STATE", ENV: "ENV", ACTION: "ACTION"} | dict.fromkeys(SIZES, "VISUAL")

torchvision_shim.load()
from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.act.configuration_act import ACTConfig as TheirConfig  # noqa: E402
from lerobot.policies.act.modeling_act import ACTPolicy, ACTTemporalEnsembler  # noqa: E402
from lerobot.policies.factory import make_pre_post_processors  # noqa: E402


class Pair(NamedTuple):
    case: str
    names: list
    options: dict
    net: ACT
    policy: ACTPolicy
    inputs: dict
    draws: torch.Tensor
    seen: dict


def described(names):
    return {name: {"type": TYPES[name], "shape": list(SHAPES[name])} for name in names}


def theirs(options, names):
    features = {name: PolicyFeature(FeatureType(TYPES[name]), SHAPES[name]) for name in names}
    return ACTPolicy(
        TheirConfig(
            input_features=features,
            output_features={ACTION: PolicyFeature(FeatureType.ACTION, SHAPES[ACTION])},
            pretrained_backbone_weights=None,
            device="cpu",
            push_to_hub=False,
            **options,
        )
    )


@pytest.fixture(params=CASES)
def pair(request, monkeypatch):
    options, names = CASES[request.param]
    net, policy = build(names, **options), theirs(TINY | options, names)
    weights = {name.removeprefix("model."): value for name, value in policy.state_dict().items()}
    fill(weights)  # in place: the policy's own
    assert pretrained.fit(net, weights) == ""
    inputs, draws = a_batch(names), some_draws(net)
    monkeypatch.setattr(torch, "randn_like", lambda like: normal_quantiles()(draws))
    # Even without a state, they look for its device.
    seen = inputs | {STATE: inputs.get(STATE, torch.zeros(3, DIMS[STATE]))}
    return Pair(request.param, names, TINY | options, net, policy, inputs, draws, seen)


def test_the_same_loss_pieces_and_gradients(pair):
    """In float64 where LeRobot can: a ReLU that rounds to the other side of zero changes a whole channel's gradient."""
    exact = pair.net.num_draws > 0  # without the VAE, they have a latent of float32 whatever the rest is
    dtype, near = (torch.float64, 1e-6) if exact else (torch.float32, 1e-3)
    policy, net = pair.policy.train().to(dtype), pair.net.to(dtype)
    seen, inputs = (
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in x.items()} for x in (pair.seen, pair.inputs)
    )
    loss, pieces = policy(seen)
    loss.backward()
    sums = net(inputs, pair.draws)
    error = sums["error"].sum() / ((~pair.inputs[PADDED]).sum() * DIMS[ACTION])
    kl = sums["kl"].mean() if net.num_draws else torch.zeros(())
    ours = error + net.penalty * kl
    ours.backward()
    assert ("kl" in sums) == ("kld_loss" in pieces)
    assert error.item() == pytest.approx(pieces["l1_loss"], rel=1e-5)
    assert kl.item() == pytest.approx(pieces.get("kld_loss", 0.0), rel=1e-5)
    torch.testing.assert_close(ours, loss)
    expected = {name.removeprefix("model."): parameter.grad for name, parameter in policy.named_parameters()}
    assert expected.keys() == dict(net.named_parameters()).keys()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=100 * near, atol=near, msg=name)


def test_the_numbers_in_our_own_tests_are_theirs(pair):
    expected = golden(pair.case)
    with torch.no_grad():
        images = [pair.inputs[name] for name in pair.net.cameras]
        seen = pair.seen | ({"observation.images": images} if images else {})
        actions, (mean, log_var) = pair.policy.train().model(seen)
    valid = ~pair.inputs[PADDED][..., None]
    assert ((actions - pair.inputs[ACTION]).abs() * valid).sum((1, 2)).tolist() == pytest.approx(
        expected["error"], abs=1e-4
    )
    if mean is not None:
        kl = (-0.5 * (1 + log_var - mean.pow(2) - log_var.exp())).sum(-1)
        assert kl.tolist() == pytest.approx(expected["kl"], abs=1e-4)
    chunk = pair.policy.predict_action_chunk(pair.seen)
    assert chunk[0].flatten()[:4].tolist() == pytest.approx(expected["sample"], abs=1e-4)


def test_the_same_chunk(pair):
    inputs = {name: pair.inputs[name] for name in pair.names}
    chunk = pair.policy.predict_action_chunk(pair.seen)
    torch.testing.assert_close(pair.net.eval().sample(inputs), chunk, rtol=1e-4, atol=1e-5)


def test_the_same_names_and_as_many_parameters():
    shapes = {STATE: (14,), TOP: (3, 64, 96)}
    with torch.device("meta"):
        net = ACT(ACTConfig(), 14, 0, 14, [TOP])
        policy = ACTPolicy(
            TheirConfig(
                input_features={name: PolicyFeature(FeatureType(TYPES[name]), shape) for name, shape in shapes.items()},
                output_features={ACTION: PolicyFeature(FeatureType.ACTION, (14,))},
                pretrained_backbone_weights=None,
                device="cpu",
            )
        )
    expected = {name: value.shape for name, value in policy.state_dict().items()}
    assert {f"model.{name}": value.shape for name, value in net.state_dict().items()} == expected
    assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in policy.parameters())


def test_the_same_ensemble():
    torch.manual_seed(0)
    mine, other = TemporalEnsemble(0.3), ACTTemporalEnsembler(0.3, 5)
    for _ in range(12):
        chunk = torch.randn(2, 5, 3)
        torch.testing.assert_close(mine(chunk), other.update(chunk))


def statistics(names):
    channels = {name: (3, 1, 1) if TYPES[name] == "VISUAL" else SHAPES[name] for name in names}
    return {name: {"mean": torch.randn(shape), "std": torch.rand(shape) + 0.5} for name, shape in channels.items()}


def test_they_open_our_folder(pair, tmp_path):
    names = [*pair.names, ACTION]
    stats = statistics(names)
    modes = {name: "IDENTITY" if TYPES[name] == "ENV" else "MEAN_STD" for name in names}
    pretrained.save(tmp_path / "ours", "act", pair.options, pair.net, stats, described(names), modes)
    policy = ACTPolicy.from_pretrained(tmp_path / "ours", strict=True)
    before, after = make_pre_post_processors(policy.config, str(tmp_path / "ours"))
    recorded = {name: torch.randn(SHAPES[name]) for name in pair.names}
    normalizer = Normalizer(stats, modes)
    inputs = {name: normalizer(name, value[None]) for name, value in recorded.items()}
    chunk = normalizer.inverse(ACTION, pair.net.eval().sample(inputs))
    seen = {STATE: torch.zeros(1, DIMS[STATE])} | before(recorded)
    torch.testing.assert_close(after(policy.predict_action_chunk(seen)), chunk, rtol=1e-4, atol=1e-4)


def test_we_open_their_folder_and_write_the_same(pair, tmp_path):
    names = [*pair.names, ACTION]
    stats = statistics(names)
    processors = make_pre_post_processors(pair.policy.config, dataset_stats=stats)
    for part in (pair.policy, *processors):
        part.save_pretrained(tmp_path / "theirs")
    config, weights, read = pretrained.load(pretrained.find(str(tmp_path / "theirs")))
    fresh = build(pair.names, **pair.options)
    assert pretrained.fit(fresh, weights) == ""
    assert all(torch.equal(value, pair.net.state_dict()[name]) for name, value in fresh.state_dict().items())
    assert {name: set(values) for name, values in read.items()} == {name: {"mean", "std"} for name in names}
    assert all(torch.equal(read[name][what], value) for name in names for what, value in stats[name].items())

    modes = {name: config["normalization_mapping"].get(TYPES[name], "IDENTITY") for name in names}
    pretrained.save(tmp_path / "ours", "act", pair.options, fresh, stats, described(names), modes)
    written = {who: {p.name for p in (tmp_path / who).iterdir()} for who in ("ours", "theirs")}
    assert written["ours"] == written["theirs"] | {"README.md"}  # theirs is written as it is uploaded
    for name in ("policy_preprocessor.json", "policy_postprocessor.json", "config.json"):
        mine, other = (forget_modes(json.loads((tmp_path / who / name).read_text())) for who in ("ours", "theirs"))
        assert mine.items() <= other.items() if name == "config.json" else mine == other, name


def forget_modes(written):
    """Without the modes: theirs name types that no feature has."""
    if isinstance(written, list):
        return [forget_modes(item) for item in written]
    if not isinstance(written, dict):
        return written
    left = {key: value for key, value in written.items() if key not in ("norm_map", "normalization_mapping")}
    return {key: forget_modes(value) for key, value in left.items()}
