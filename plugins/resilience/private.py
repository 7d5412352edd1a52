"""Private names of torch's DDP and torchrun, read in torch 2.13.

`tests/repository/test_private.py` fails when a name is gone.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def check_all_reduced(net: DistributedDataParallel) -> None:
    """Raise RuntimeError if the last backward pass has not all-reduced a bucket, because a gradient
    is missing. Without the check this rank would answer the sum of the other ranks with the next
    bucket. DDP itself raises the error in the next forward pass."""
    net._check_reducer_finalized()


def meet_other_agents(agent: Any, most_s: float) -> None:
    """(all agents) Report that this agent of torchrun has ended, and wait for the other agents, at
    most `most_s` seconds."""
    agent._exit_barrier_timeout = most_s
    agent._exit_barrier()
