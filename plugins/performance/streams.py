"""The stream of records, and the accumulators of gradients.

Autograd adds up the gradients of a weight on the stream that was current when the weight's node
AccumulateGrad was made. The node lives as long as an autograd graph of the weight, and a DDP holds
the node for good. A node of the default stream cannot be recorded. Since torch 2.13 a record may
take the node to the record's stream; before, a DDP must be made on that stream.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def nodes_follow() -> bool:
    """Return whether torch can take the accumulators to the stream of a record."""
    return hasattr(torch.autograd.graph, "set_override_stale_capture_stream")


@functools.cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all records of a GPU."""
    return torch.cuda.Stream(device)


@contextmanager
def accumulating_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make the accumulators of a DDP on a stream. Steps on another stream have the same bits: torch
    lets the streams wait for each other at each weight."""
    _warn_of_streams(False)
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Record in the block. Python collects no garbage there: CUDA may refuse to end an old graph
    during a record, and an old autograd graph would keep its accumulators alive.

    The current stream is the same after the block, also if a record fails.
    """
    graph: Any = torch.autograd.graph
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    if nodes_follow():
        _warn_of_streams(False)
        graph.set_override_stale_capture_stream(True)
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):
            yield
    finally:
        if nodes_follow():
            graph.set_override_stale_capture_stream(False)
            _warn_of_streams(True)
        if collects:
            gc.enable()


def _warn_of_streams(wanted: bool) -> None:
    """Set whether torch warns of an accumulator on another stream than its gradient's."""
    graph: Any = torch.autograd.graph
    if hasattr(graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # torch 2.10
        graph.set_warn_on_accumulate_grad_stream_mismatch(wanted)
