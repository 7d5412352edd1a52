#!/usr/bin/env python3
"""The same training with DDP as its subject: always wrapped, a world of one included, checked
before the first step.

    torchrun --standalone --nproc_per_node=2 train_ddp.py --config configs/har.yaml lr=4e-3
    ddp.bucket_cap_mb=50

Where train.py adapts (no GPU, a GPU without bf16, a launcher that sets no RANK), this script
refuses and says what to change. Before step one it prints what the ranks agree on and what DDP will
do: buckets, bytes a step, hook.
"""

import sys

import train


def main(argv: list[str]) -> int:
    return train.main(argv, strict=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
