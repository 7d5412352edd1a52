"""benchmarks/lerobot_processes.py: what two processes do against one, by LeRobot's own script and by ours."""

import importlib.util
import re

import pytest

if importlib.util.find_spec("lerobot") is None:
    pytest.skip("lerobot is not installed (make peer)", allow_module_level=True)

import noting
from conftest import succeed


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one_here_alone(launch, tmp_path):
    """The table, over one epoch: LeRobot's two processes average two quotients, and pad the last batch."""
    done = succeed(launch.python("benchmarks/lerobot_processes.py", "11", **noting.environment(tmp_path)))
    rows = {cells[0]: cells[1:] for cells in re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", done.out, re.MULTILINE)}
    assert rows["samples of a step the same"] == ("10 of 11", "11 of 11")
    theirs, ours = rows["an epoch of 167 samples"]
    assert theirs == "167 on one, 176 on two, 9 of them seen twice"
    assert ours == "167 on one, 167 on two, 0 of them seen twice"

    def differences(row):
        """Of LeRobot, of ours; in a table they are `1.8 %` or `1.2e-07`."""
        found = [re.findall(r"([\d.e-]+)( %)?", cell.rpartition("(")[2]) for cell in rows[row]]
        return [max(float(number) * (0.01 if percent else 1) for number, percent in cell) for cell in found]

    for row in rows.keys() - {"samples of a step the same", "an epoch of 167 samples"}:
        if "valid" not in row and "processes" not in row:
            theirs, ours = differences(row)
            assert theirs > 1e-3 and ours < 5e-6, row
    assert len(rows) == 8
