#!/usr/bin/env python3
"""The same training with DDP as its subject: always wrapped, a world of one included, checked
before the first step.

    torchrun --standalone --nproc_per_node=2 train_ddp.py --config configs/har.yaml lr=4e-3
    ddp.bucket_cap_mb=50

Where train.py adapts (DataParallel, a GPU without bf16, a launcher that sets no RANK), this script
ends with an error and the fix. Before the first step the script prints the facts in which the ranks
agree, and the plan of DDP: buckets, bytes a step, hook.
"""

import sys

import train


def main(argv: list[str]) -> int:
    return train.main(argv, strict=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
