"""What a run has left in its folder."""

import json

import torch


def status(folder):
    return json.loads((folder / "status.json").read_text())


def weights(folder):
    return torch.load(folder / "last.pt", weights_only=True)["model"]


def progress(checkpoint):
    return torch.load(checkpoint, weights_only=True)["progress"]


def records(folder, event):
    """The log's lines of one kind."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
