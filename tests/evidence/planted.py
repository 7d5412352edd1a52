"""The mistakes of tests/tasks/planted.py, and what tools/prove.py says of each.

python tests/evidence/planted.py [MISTAKE ...]     a table: the mistake, what differs, the likely cause
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TASK = str(ROOT / "tests" / "tasks" / "planted.py")

WORDS = ["--steps", "6", "--processes", "1,2", TASK]
ALONE = ["--steps", "6", "--processes", "1", TASK]

REFUSED = {
    "mean": "a mean",
    "mean in score": "a mean",
    "weight by the batch": "no sum over the samples",
    "generator of the loss": "a generator of its own",
    "generator of the dataset": "a generator of the dataset's own",
    "sample changed in place": "changed in place",
    "generator of a module": r"depends on 1\.own.*keeps between steps",
    "running mean": r"depends on 1\.mean.*keeps between steps",
    "optimizer that forgets": "an optimizer that forgets",
}
"""Mistakes that the training itself refuses before, or at, its first step -> what must be said of the cause."""

MEASURED = {
    "clock": "clock.*reads the clock",
    "a set's order": "the order of a set",
    "data without a seed": "dataset depends on .* a generator without a seed",
    "order by rank": "the rank",
    "noise once warm": "dataset depends on .*the state of the generator `own` of the dataset",
    "momenta in the file": "the optimizer keeps something",
    "global counter": "something it keeps.*`PASSES` of the task's file",
    "cache by process": "`SEEN` of the task's file.*reads the number of its process",
    "average of the loss": r"`loss` \(after the model\).*`average` of the task",
    "WORLD_SIZE": "`loss`.*reads the rank or the number of processes",
    "buffer that counts": r"forward: 1 \(Counts\).*something it keeps.*`passes` of the model's 1",
    "centred by the batch": r"forward: 1 \(Centre\).*statistics over the batch",
}
"""Mistakes that only a comparison shows -> what must be said of where and why."""


OF_ONE_PROCESS = {"clock", "data without a seed", "buffer that counts", "centred by the batch", *REFUSED}
"""Mistakes for which one process is enough."""


def words(name: str) -> list[str]:
    return [*(ALONE if name in OF_ONE_PROCESS else WORDS), f"plant.mistake={name}"]


def said(finding: dict) -> str:
    return " ".join([finding["what"], finding["where"], finding["cause"], *finding["seen"]])


def main(names: list[str]) -> int:
    print("| planted | what differs | where | likely |\n|---|---|---|---|")
    for name in names or [*REFUSED, *MEASURED]:
        command = [sys.executable, "tools/prove.py", "--json", *words(name)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found = json.loads(done.stdout)["finding"]
        cause = "; ".join([found["cause"], *found["seen"]])
        cells = [name, found["what"], found["where"], cause]
        print("| " + " | ".join(cell.replace("|", "\\|").replace(f"{ROOT}/", "") for cell in cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
