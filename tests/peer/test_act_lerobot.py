"""ACT against LeRobot's own: the same weights give the same numbers, and each opens the other's folders.

Written for lerobot 0.4.4, and skipped where it is not installed. It need not be part of the environment: with it in a
folder of its own, PYTHONPATH=<that folder> python -m pytest tests/peer
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest

if importlib.util.find_spec("lerobot") is None:
    pytest.skip("lerobot is not installed (pip install lerobot==0.4.4)", allow_module_level=True)

import torch

from formats import pretrained
from models.act import ACT, ACTConfig, TemporalEnsemble
from models.layers import Normalizer, normal_quantiles


def import_torchvision():
    """Also where its compiled half does not load, as beside a torch without CUDA: no operator of it is used here."""
    try:
        import torchvision
    except RuntimeError:
        home = Path(importlib.util.find_spec("torchvision").origin).parent
        named = re.findall(r'(?:torchvision::|register_meta\(")(\w+)', (home / "_meta_registrations.py").read_text())
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in set(named):
            library.define(f"{name}(Tensor x) -> Tensor")
        import torchvision
    return torchvision


import_torchvision()
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature  # noqa: E402
from lerobot.policies.act.configuration_act import ACTConfig as TheirConfig  # noqa: E402
from lerobot.policies.act.modeling_act import ACTPolicy, ACTTemporalEnsembler  # noqa: E402
from lerobot.policies.factory import make_pre_post_processors  # noqa: E402

TINY = {"chunk_size": 6, "n_action_steps": 6, "dim_model": 32, "n_heads": 4, "dim_feedforward": 48, "latent_dim": 5}
TINY |= {"n_encoder_layers": 2, "n_vae_encoder_layers": 2, "dropout": 0.0}
STATE, ENV, ACTION, TOP, WRIST = (
    "observation.state",
    "observation.environment_state",
    "action",
    "observation.images.top",
    "observation.images.wrist",
)
SHAPES = {STATE: (4,), ENV: (3,), ACTION: (2,), TOP: (3, 64, 96), WRIST: (3, 40, 56)}
TYPES = {STATE: "STATE", ENV: "ENV", ACTION: "ACTION", TOP: "VISUAL", WRIST: "VISUAL"}
CASES = {
    "as published": ({}, [STATE, TOP]),
    "pre-norm": ({"pre_norm": True, "feedforward_activation": "gelu", "n_decoder_layers": 2}, [STATE, TOP, WRIST]),
    "no VAE": ({"use_vae": False}, [STATE, TOP]),
    "no camera": ({}, [STATE, ENV]),
    "no state": ({"n_decoder_layers": 3}, [ENV, WRIST]),
}


def described(names):
    return {name: {"type": TYPES[name], "shape": list(SHAPES[name])} for name in names}


def ours(options, names):
    cameras = [name for name in names if TYPES[name] == "VISUAL"]
    return ACT(ACTConfig(**options), 4 * (STATE in names), 3 * (ENV in names), 2, cameras)


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


def a_batch(names, chunk=6):
    inputs = {name: torch.randn(3, *SHAPES[name]) for name in names}
    inputs |= {ACTION: torch.randn(3, chunk, 2), "action_is_pad": torch.arange(chunk) >= torch.tensor([[6], [1], [4]])}
    return inputs


@pytest.fixture(params=CASES.values(), ids=CASES)
def pair(request):
    options, names = TINY | request.param[0], request.param[1]
    torch.manual_seed(0)
    policy = theirs(options, names)
    for name, buffer in policy.named_buffers():  # norms as a training of their own would leave them
        if "backbone" in name:
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    net = ours(options, names)
    weights = {name.removeprefix("model."): value for name, value in policy.state_dict().items()}
    assert pretrained.fit(net, weights) == ""
    return net, policy, names, options


def test_the_same_loss_pieces_and_gradients(pair, monkeypatch):
    net, policy, names, options = pair
    inputs = a_batch(names)
    draws = torch.rand(3, net.num_draws)
    monkeypatch.setattr(torch, "randn_like", lambda like: normal_quantiles()(draws))
    policy.train()
    for parameter in policy.parameters():
        parameter.grad = None
    seen = inputs | {STATE: inputs.get(STATE, torch.zeros(3, 4))}  # even without a state, they look for its device
    loss, pieces = policy(seen)
    loss.backward()
    sums = net(inputs, draws)
    count, dim = inputs[ACTION].shape[:2], inputs[ACTION].shape[2]
    error = sums["error"].sum() / (count.numel() * dim)  # padded steps count in 0.4.4, and no longer in the newest
    kl = sums["kl"].mean() if net.num_draws else torch.zeros(())
    (error + net.penalty * kl).backward()
    torch.testing.assert_close(error.item(), pieces["l1_loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kl.item(), pieces.get("kld_loss", 0.0), rtol=1e-5, atol=1e-6)
    assert ("kl" in sums) == options.get("use_vae", True)
    expected = {name.removeprefix("model."): parameter.grad for name, parameter in policy.named_parameters()}
    assert expected.keys() == dict(net.named_parameters()).keys()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_the_newest_loss(pair, monkeypatch):
    """Its formula (September 2026), from the actions that LeRobot's network gives."""
    net, policy, names, _ = pair
    inputs = a_batch(names)
    draws = torch.rand(3, net.num_draws)
    monkeypatch.setattr(torch, "randn_like", lambda like: normal_quantiles()(draws))
    policy.train()
    images = [inputs[name] for name in net.cameras]
    seen = inputs | {STATE: inputs.get(STATE, torch.zeros(3, 4))} | ({"observation.images": images} if images else {})
    with torch.no_grad():
        actions, (mean, log_var) = policy.model(seen)
        valid = ~inputs["action_is_pad"][..., None]
        expected = ((actions - inputs[ACTION]).abs() * valid).sum() / (valid.sum() * 2)
        if mean is not None:
            expected += 10.0 * (-0.5 * (1 + log_var - mean.pow(2) - log_var.exp())).sum(-1).mean()
        sums = net(inputs, draws)
    mean_valid = valid.sum() / 3
    loss = (sums["error"] / (mean_valid * 2) + net.penalty * sums.get("kl", torch.zeros(3))).sum() / 3
    torch.testing.assert_close(loss, expected)


def test_the_same_chunk(pair):
    net, policy, names, _ = pair
    inputs = {name: value for name, value in a_batch(names).items() if name in names}
    seen = inputs | {STATE: inputs.get(STATE, torch.zeros(3, 4))}
    torch.testing.assert_close(net.eval().sample(inputs), policy.predict_action_chunk(seen), rtol=1e-4, atol=1e-5)


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
    net, _, names, options = pair
    stats = statistics([*names, ACTION])
    modes = {name: "IDENTITY" if TYPES[name] == "ENV" else "MEAN_STD" for name in [*names, ACTION]}
    pretrained.save(tmp_path / "ours", "act", options, net, stats, described([*names, ACTION]), modes)
    policy = ACTPolicy.from_pretrained(tmp_path / "ours", strict=True)
    before, after = make_pre_post_processors(policy.config, str(tmp_path / "ours"))
    recorded = {name: torch.randn(SHAPES[name]) for name in names}
    normalizer = Normalizer(stats, modes)
    inputs = {name: normalizer(name, value[None]) for name, value in recorded.items()}
    chunk = normalizer.inverse(ACTION, net.eval().sample(inputs))
    seen = before(recorded)
    if STATE not in names:
        seen[STATE] = torch.zeros(1, 4)
    torch.testing.assert_close(after(policy.predict_action_chunk(seen)), chunk, rtol=1e-4, atol=1e-4)


def test_we_open_their_folder(pair, tmp_path):
    net, policy, names, options = pair
    stats = statistics([*names, ACTION])
    before, after = make_pre_post_processors(policy.config, dataset_stats=stats)
    for part in (policy, before, after):
        part.save_pretrained(tmp_path / "theirs")
    config, weights, read = pretrained.load(pretrained.find(str(tmp_path / "theirs")))
    fresh = ours(options, names)
    assert pretrained.fit(fresh, weights) == ""
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in fresh.state_dict().items())
    assert read.keys() == stats.keys()
    assert all(torch.equal(read[name][what], value) for name in stats for what, value in stats[name].items())
    # And what we write of it is what they wrote.
    modes = {name: config["normalization_mapping"].get(TYPES[name], "IDENTITY") for name in [*names, ACTION]}
    pretrained.save(tmp_path / "ours", "act", options, fresh, stats, described([*names, ACTION]), modes)
    written = {path.name for path in (tmp_path / "ours").iterdir()}
    assert written == {path.name for path in (tmp_path / "theirs").iterdir()}
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        mine, other = (json.loads((tmp_path / which / name).read_text()) for which in ("ours", "theirs"))
        for step in (*mine["steps"], *other["steps"]):  # a type that no feature has needs no mode
            for kind in NormalizationMode and ("ENV", "VISUAL", "STATE"):
                step["config"].get("norm_map", {}).pop(kind, None)
        assert mine == other
    mine, other = (json.loads((tmp_path / which / "config.json").read_text()) for which in ("ours", "theirs"))
    mine.pop("normalization_mapping"), other.pop("normalization_mapping")
    assert {name: other[name] for name in mine} == mine
