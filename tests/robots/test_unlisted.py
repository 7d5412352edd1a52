"""Rows in data/ that the table of episodes does not name: one line names episode and file."""

import shutil

import pytest
from conftest import succeed
from lerobot_data import LENGTHS, V3, change_info, pq
from robot_tasks import TINY_ACT

from formats.robots.lerobot import read

LAST = len(LENGTHS) - 1


def shorten(root):
    """Remove the last episode from the table, and from the totals."""
    totals = {"total_episodes": LAST, "total_frames": sum(LENGTHS[:-1])}
    change_info(root, lambda info: info.update(totals))
    lines = root / "meta/episodes.jsonl"
    if lines.is_file():
        lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:LAST]))
        return
    path = sorted(root.glob("meta/episodes/*/*.parquet"))[-1]
    table = pq.read_table(path)
    pq.write_table(table.slice(0, len(table) - 1), path)


def copy_file(name):
    def change(root):
        path = sorted(root.glob("data/*/*.parquet"))[1]
        shutil.copy(path, path.with_name(name))

    return change


def no_table(root):
    (root / "data/chunk-000/notes.parquet").write_text("not a table")


def hidden(root):
    (root / "data/chunk-000/._file-000.parquet").write_bytes(b"of another system")


CASES = {
    "version 3, of a file that is read": (V3, shorten, ["episode 3 is in data/chunk-000/file-001.parquet but not"]),
    "version 2.1": ("v2.1", shorten, ["episode 3 is in data/chunk-001/episode_000003.parquet but not in the table"]),
    "a copy of a file": (
        "v2.1",
        copy_file("episode_000001 (copy).parquet"),
        ["episode 1 is in data/chunk-000/episode_000001 (copy).parquet, while the table names another file"],
    ),
    "a copy of a file of two episodes": (
        V3,
        copy_file("file-007.parquet"),
        ["episodes 2, 3 are in data/chunk-000/file-007.parquet, while the table names another file"],
    ),
    "a file that cannot be read": (V3, no_table, ["data/chunk-000/notes.parquet is not in the table"]),
    "a hidden file": (V3, hidden, []),
    "no change": ("v2.1", lambda root: None, []),
    "no change of version 3": ("v3.0 many files", lambda root: None, []),
}


@pytest.mark.parametrize(("kind", "change", "says"), CASES.values(), ids=CASES)
def test_rows_without_an_episode_are_named(made, tmp_path, caplog, kind, change, says):
    root = shutil.copytree(made(kind), tmp_path / "set")
    change(root)
    read(root)
    warned = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert len(warned) == len(says), warned
    for text in says:
        assert text in warned[0], warned


def test_some_chosen_episodes_are_read_without_a_line(made, tmp_path, caplog):
    """The rows of episodes that are not chosen are of the table."""
    read(made(V3), episodes=[1])
    read(made("v2.1"), exclude=[0])
    assert "not used" not in caplog.text


def test_a_training_names_the_episode_that_it_leaves_out(launch, made, tmp_path, robot_caches):
    root = shutil.copytree(made("v3.0 images"), tmp_path / "set")
    shorten(root)
    words = ["robot", "policy.type=act", *TINY_ACT, "device=cpu", "steps=1", "batch_size=2", "dataset.cameras=none"]
    done = succeed(launch.train(*words, f"dataset.root={root}", f"save_dir={tmp_path / 'run'}"))
    assert done.out.count("episode 3 is in data/chunk-000/file-000.parquet but not in the table") == 1, done.out
    assert "Found 3 episodes" in done.out
