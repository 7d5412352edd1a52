"""Small networks of ACT with fixed weights, LeRobot's numbers from these weights, and batches."""

import math
import zlib

import torch

from models.act import ACT, ACTConfig

STATE, ENV, ACTION, PADDED = "observation.state", "observation.environment_state", "action", "action_is_pad"
TOP, WRIST = "observation.images.top", "observation.images.wrist"
DIMS = {STATE: 4, ENV: 3, ACTION: 2}
SIZES = {TOP: (64, 96), WRIST: (40, 56)}
TINY = {"chunk_size": 6, "n_action_steps": 6, "dim_model": 32, "n_heads": 4, "dim_feedforward": 48, "latent_dim": 5}
TINY |= {"n_encoder_layers": 2, "n_vae_encoder_layers": 2, "dropout": 0.0}
CASES = {
    "as published": ({}, [STATE, TOP]),
    "pre-norm": ({"pre_norm": True, "feedforward_activation": "gelu", "n_decoder_layers": 2}, [STATE, TOP, WRIST]),
    "no VAE": ({"use_vae": False}, [STATE, TOP]),
    "no camera": ({}, [STATE, ENV]),
    "no state": ({"n_decoder_layers": 3}, [ENV, WRIST]),
}
GOLDEN = {
    "as published": ([11.9503, 11.9769, 11.0148], [10.3493, 2.4157, 3.6857], [1.3199, -0.5637, 0.7014, -0.1205]),
    "pre-norm": ([12.1161, 12.3841, 12.227], [12.8993, 1.4216, 5.4159], [0.3133, -1.2258, 0.741, -1.5367]),
    "no VAE": (None, [11.6244, 2.5133, 4.1316], [1.3199, -0.5637, 0.7014, -0.1205]),
    "no camera": ([11.9503, 11.9769, 11.0148], [8.6353, 1.8624, 3.4424], [0.5325, -0.2272, 0.4963, -0.208]),
    "no state": ([11.7731, 11.2207, 11.0233], [5.1184, 0.3791, 5.0613], [-0.7585, 0.4419, -0.4848, 0.0797]),
}
"""LeRobot 0.4.4's numbers from `fill`ed weights: `kl` and `error` per sample, the start of the first `sample`."""


def golden(case):
    named = zip(("kl", "error", "sample"), GOLDEN[case], strict=True)
    return {name: value for name, value in named if value is not None}


def build(names=(STATE, TOP), **options):
    torch.manual_seed(0)
    state, env = (DIMS[name] if name in names else 0 for name in (STATE, ENV))
    return ACT(ACTConfig(**TINY | options), state, env, DIMS[ACTION], [name for name in names if name in SIZES])


def noise(*shape, seed=0):
    """Numbers in [-1, 1) that look random, and that no generator's version changes."""
    x = torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) * 12.9898 + seed) * 43758.5453
    return ((x - x.floor()) * 2 - 1).reshape(shape).float()


def fill(state):
    """Give every tensor of a state dict, named without `model.`, numbers of its own that keep a signal alive."""
    for name, value in state.items():
        if name != "vae_encoder_pos_enc":
            numbers = noise(*value.shape, seed=zlib.crc32(name.encode()) % 1000)
            if "embed" in name:
                value.copy_(numbers * 2)
            elif value.ndim > 1:
                value.copy_(numbers * 2 / value[0].numel() ** 0.5)
            else:
                value.copy_(numbers / 2 + name.endswith((".weight", "running_var")))


def a_batch(names, count=3, chunk=6):
    """As a dataset gives it; of the first three samples one is whole, one nearly all padding, one ends early."""
    inputs = {name: noise(count, DIMS[name], seed=1) for name in names if name in DIMS}
    inputs |= {name: noise(count, 3, *SIZES[name], seed=2) for name in names if name in SIZES}
    valid = torch.tensor([chunk, 1, 4]).repeat(count)[:count, None]
    return inputs | {ACTION: noise(count, chunk, DIMS[ACTION], seed=3), PADDED: torch.arange(chunk) >= valid}


def some_draws(net, count=3):
    return noise(count, net.num_draws, seed=4) / 2 + 0.5
