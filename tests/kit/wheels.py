"""Packages of others whose files tests read: fetched for the test, not installed and not kept."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def unpacked(requirement: str, folder: Path, chosen=lambda name: True) -> Path:
    """Unpack the files of a wheel, such as aeon==1.6.0, that are `chosen` by name, in `folder`; skip without it."""
    fetch = f"pip download --no-deps --quiet --disable-pip-version-check {requirement} --dest"
    got = subprocess.run([sys.executable, "-m", *fetch.split(), folder], capture_output=True, text=True, timeout=300)
    if got.returncode:
        pytest.skip(f"{requirement} cannot be downloaded: {(got.stderr.strip() or 'no reason given').splitlines()[-1]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, filter(chosen, wheel.namelist()))
    return folder
