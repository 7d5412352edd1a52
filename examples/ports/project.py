"""The part of a project that a port leaves as it is: data and networks."""

import torch
from torch import nn
from torch.utils.data import Dataset

CLASSES = 4
CHUNK = 6


class Pictures(Dataset):
    """Noisy pictures (1, 8, 8), brighter in the quarter that is the label."""

    def __init__(self, count, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.y = torch.randint(CLASSES, (count,), generator=draw)
        self.x = torch.randn(count, 1, 8, 8, generator=draw)
        for picture, quarter in zip(self.x, self.y):
            row, column = divmod(4 * int(quarter), 8)
            picture[0, row : row + 4, column : column + 4] += 0.5

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(nn.Module):
    """(B, 1, 8, 8) -> (B, CLASSES)."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 32), nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.head(self.hidden(x.flatten(1)).relu())


class Words(Dataset):
    """Sentences; the label is whether word 3 is more frequent than word 4."""

    def __init__(self, count, seed=0):
        draw = torch.Generator().manual_seed(seed)
        length = torch.randint(8, 24, (count, 1), generator=draw)
        self.mask = (torch.arange(24) < length).long()
        self.words = torch.randint(3, 8, (count, 24), generator=draw)
        self.words *= self.mask
        threes, fours = (self.words == 3).sum(1), (self.words == 4).sum(1)
        self.labels = (threes > fours).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {
            "input_ids": self.words[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


def small_bert():
    """Return a BERT of Hugging Face for two classes, without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **dropout))


def small_act(meta):
    """Return LeRobot's ACT for a dataset, and its function for the inputs."""
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.utils.feature_utils import dataset_to_policy_features

    features = dataset_to_policy_features(meta.features)
    outputs = {"action": features.pop("action")}
    sizes = {"dim_model": 32, "dim_feedforward": 64, "n_heads": 2}
    config = ACTConfig(
        input_features=features, output_features=outputs, device=None,
        chunk_size=CHUNK, n_action_steps=CHUNK, n_encoder_layers=1, **sizes,
        use_vae=False, dropout=0.0,
    )  # fmt: skip
    normalize, _ = make_pre_post_processors(config, dataset_stats=meta.stats)
    return ACTPolicy(config), normalize


class Masks(Dataset):
    """Noisy pictures (1, 16, 16) with a bright square, and its mask."""

    def __init__(self, count, seed=0):
        draw = torch.Generator().manual_seed(seed)
        corners = torch.randint(0, 12, (count, 2), generator=draw).tolist()
        self.mask = torch.zeros(count, 1, 16, 16)
        for mask, (row, column) in zip(self.mask, corners):
            mask[0, row : row + 5, column : column + 5] = 1
        noise = torch.randn(count, 1, 16, 16, generator=draw)
        self.x = self.mask + noise / 2

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.mask[index]


class Segmenter(nn.Module):
    """A small U-Net: (B, 1, H, W) -> logits (B, 1, H, W)."""

    def __init__(self):
        super().__init__()
        self.fine = nn.Conv2d(1, 4, 3, padding=1)
        self.coarse = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        fine = self.fine(x).relu()
        coarse = self.coarse(fine).relu()
        return self.head(torch.cat([fine, self.up(coarse).relu()], 1))


STREAMS, WINDOW, LETTERS = 12, 16, 10


class Streams(Dataset):
    """A text in STREAMS parts; sample w * STREAMS + s is window w of part s."""

    def __init__(self, windows=10):
        draw = torch.Generator().manual_seed(0)
        shape = (STREAMS, windows * WINDOW + 1)
        steps = torch.randint(0, 3, shape, generator=draw)
        self.text = steps.cumsum(1) % LETTERS
        self.windows = windows

    def __len__(self):
        return STREAMS * self.windows

    def __getitem__(self, index):
        window, stream = divmod(index, STREAMS)
        letters = self.text[stream, window * WINDOW : (window + 1) * WINDOW + 1]
        return {"x": letters[:-1], "y": letters[1:], "stream": stream}

    def epoch_order(self, seed, epoch):
        return range(len(self))


class Recurrent(nn.Module):
    """(B, T) letters, (B, width) state -> logits (B, T, LETTERS), state."""

    width = 16

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, self.width)
        self.cells = nn.GRU(self.width, self.width, batch_first=True)
        self.head = nn.Linear(self.width, LETTERS)

    def forward(self, x, state):
        states, last = self.cells(self.letters(x), state[None])
        return self.head(states), last[0]


class Ring(Dataset):
    """Points (2,) near a circle."""

    def __init__(self, count, seed=0):
        draw = torch.Generator().manual_seed(seed)
        angle = 2 * torch.pi * torch.rand(count, generator=draw)
        self.x = torch.stack([angle.cos(), angle.sin()], 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index]}


class Denoiser(nn.Module):
    """(B, 2) points, (B,) time in [0, 1) -> the noise (B, 2)."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(3, 32), nn.Linear(32, 2)

    def forward(self, x, time):
        inputs = torch.cat([x, time[:, None].to(x)], 1)
        return self.head(nn.functional.silu(self.hidden(inputs)))
