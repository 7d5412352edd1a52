#!/usr/bin/env python3
"""Run the command in `tools/evidence/rewind.py`: the usage and the code are there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.evidence.rewind import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
