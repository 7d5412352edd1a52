"""Command lines for LeRobot's own policies, typed here with the package installed: ../lerobot_lines.py."""

import importlib.util

import pytest

if importlib.util.find_spec("lerobot") is None:
    pytest.skip("lerobot is not installed (make peer)", allow_module_level=True)

import lerobot_lines
from test_lerobot_lines import folder, test_thirty_nine_lines_do_what_is_told

__all__ = ["folder", "test_thirty_nine_lines_do_what_is_told"]


def test_some_are_answered_by_the_package():
    assert sum("beside" in entry for entry in lerobot_lines.lines()) > 10
