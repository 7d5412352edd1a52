"""Small networks of the vision-language-action policy, and batches."""

from dataclasses import replace

import torch

from engine.contract import sample_seeds, uniform
from models.vla import VLA, VLASettings, hash_words

TOP = "observation.images.top"
SMALL = VLASettings(preset="test", chunk_size=5, patch_size=8)


def shaken(net):
    """Weights as training leaves them: nothing that starts at zero is still zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        net.words.weight[0] = 0
    return net


def policy(settings=SMALL, state=2, cameras=(TOP,), seed=0, environment=0, **changes):
    torch.manual_seed(seed)
    return VLA(replace(settings, **changes), state, environment, 2, cameras)


def some_inputs(count=6, chunk=5, cameras=(TOP,), size=32, seed=0):
    torch.manual_seed(seed)
    words = [hash_words(text, 9, 512) for text in ("move to the red disc", "bring the blue disc to the centre", "")]
    pads = torch.arange(chunk) >= torch.arange(chunk, chunk - count, -1).clamp(min=1)[:, None]
    return {
        "observation.state": torch.randn(count, 2),
        **{name: torch.rand(count, 3, size, size) * 2 - 1 for name in cameras},
        "words": torch.tensor([words[i % 3] for i in range(count)]),
        "action": torch.randn(count, chunk, 2),
        "action_is_pad": pads,
    }


def some_draws(count, net, seed=0):
    return uniform(sample_seeds(seed, 0, torch.arange(count)), net.num_draws)
