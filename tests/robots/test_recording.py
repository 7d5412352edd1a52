"""The recorder of LeRobot datasets: its files, its errors, and what is left after a kill at any step."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lerobot_data
import numpy as np
import pytest
from conftest import ROOT
from forks import exit_code_of_fork, kill_before, run_in_fork
from lerobot_data import (
    CAMERA,
    FEATURES,
    LENGTHS,
    ONE_NUMBER,
    episode_of,
    grays,
    level,
    numbers,
    record,
    task_of_episode,
)
from refusals import refused

from formats.robots import recording
from formats.robots.frames import Frames
from formats.robots.lerobot import read
from formats.robots.lerobot_writer import Recorder


def add_one(recorder, value=0, task="push"):
    """Add an episode of five frames of one number."""
    recorder.add_episode({"action": np.full((5, 1), value)}, task)


def folders(path):
    return sorted(each.name for each in path.iterdir())


# ---- the files of a recording ---------------------------------------------------------------------------------------


def test_frame_by_frame_is_the_same_as_whole_episodes(made, tmp_path):
    with Recorder(tmp_path / "set", 10, FEATURES) as recorder:
        for e, n in enumerate(LENGTHS):
            for f in range(n):
                frame = {name: array[f] for name, array in episode_of(e).items()}
                recorder.add_frame(frame, task_of_episode(e))
            recorder.end_episode()
    whole = made("v3.0 images")
    for path in sorted(whole.rglob("*.json")):
        assert (tmp_path / "set" / path.relative_to(whole)).read_text() == path.read_text()
    a, b = read(tmp_path / "set"), read(whole)
    assert all(np.array_equal(a.columns[name], b.columns[name]) for name in b.columns)


def test_files_roll_over(made):
    assert len(list(made("v3.0 many files").glob("data/*/*.parquet"))) == 4
    assert len(list(made("v3.0 images").glob("data/*/*.parquet"))) == 1
    demos = read(made("v3.0 images"))
    assert [place.first_row for place in demos.places[CAMERA]] == [0, 7, 11, 20]


@pytest.mark.parametrize("many", [False, True])
def test_what_lerobot_alone_reads_of_a_recording(tmp_path, many):
    """Where episodes begin and end in the dataset and in the videos, and statistics of the bookkeeping."""
    root = record(tmp_path / "set", "video", (64, 64), file_mb=0 if many else 100)
    rows = lerobot_data.pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    end = np.cumsum(LENGTHS)
    for e, (row, n) in enumerate(zip(rows, LENGTHS, strict=True)):
        begin, file = (0.0, e) if many else ((end[e] - n) / 10, 0)
        expected = {"length": n, "dataset_from_index": end[e] - n, "dataset_to_index": end[e], "data/file_index": file}
        expected |= {f"videos/{CAMERA}/file_index": file, f"videos/{CAMERA}/from_timestamp": pytest.approx(begin)}
        expected |= {f"videos/{CAMERA}/to_timestamp": pytest.approx(begin + n / 10)}
        assert {name: row[name] for name in expected} == expected
    demos = read(root)
    first = grays(Frames(demos, {}, "none", "unused").get(CAMERA, demos.start))
    assert np.abs(first - [level(e, 0) for e in range(4)]).max() < 2
    info = json.loads((root / "meta/info.json").read_text())
    assert (info["total_tasks"], info["splits"]) == (2, {"train": "0:4"})
    middles = [np.median(np.arange(a, b)) for a, b in zip(end - LENGTHS, end, strict=True)]
    index = json.loads((root / "meta/stats.json").read_text())["index"]
    assert index["q50"] == pytest.approx([middles @ np.array(LENGTHS) / 25])


def test_all_kinds_of_numbers(tmp_path):
    kinds = {"a.float64": "float64", "a.int32": "int32", "a.int64": "int64", "a.bool": "bool"}
    features = {name: (dtype, (2, 2)) for name, dtype in kinds.items()} | ONE_NUMBER
    arrays = {name: (np.arange(12).reshape(3, 2, 2) % 2).astype(dtype) for name, dtype in kinds.items()}
    with Recorder(tmp_path / "set", 12.5, features, robot_type="arm") as recorder:
        recorder.add_episode(arrays | {"action": np.ones((3, 1))}, "count")
    demos = read(tmp_path / "set")
    assert all(np.array_equal(demos.columns[name], arrays[name]) for name in arrays) and demos.fps == 12.5
    assert json.loads((tmp_path / "set/meta/info.json").read_text())["robot_type"] == "arm"
    with Recorder(tmp_path / "set", 12.5, features, resume=True):
        pass  # the type of the robot need not be given again


def test_names_are_kept(tmp_path):
    names = {"action": {"motors": ["x", "y", "z"]}, "observation.state": ["a.pos", "b.pos"]}
    record(tmp_path / "set", names=names)
    features = json.loads((tmp_path / "set/meta/info.json").read_text())["features"]
    assert {name: features[name]["names"] for name in names} == names and features["timestamp"]["names"] is None
    assert read(tmp_path / "set").features["action"].names == ["x", "y", "z"]
    other = names | {"action": ["u", "v", "w"]}
    refused("names of action", lambda: Recorder(tmp_path / "set", 10, FEATURES, names=other, resume=True).__enter__())


def test_frames_are_dropped(tmp_path):
    with Recorder(tmp_path / "set", 10, ONE_NUMBER) as recorder:
        for value, keeps in ((1, True), (2, False), (3, True)):
            for _ in range(4):
                recorder.add_frame({"action": np.full(1, value)}, f"task {value}")
            recorder.end_episode() if keeps else recorder.drop_episode()
    demos = read(tmp_path / "set")
    assert demos.columns["action"][:, 0].tolist() == [1] * 4 + [3] * 4 and demos.tasks == ["task 1", "task 3"]


def test_the_recording_of_the_guide(tmp_path, monkeypatch, capsys):
    """Stopped by Ctrl-C, started again; the guide has the printed lines, too."""
    page = (ROOT / "docs" / "robots.md").read_text()
    program = re.search(r"## Record a dataset\n\n```python\n(.*?)```", page, re.S)[1]
    program = program.replace("< 50", "< 3").replace("range(300)", "range(4)")
    monkeypatch.chdir(tmp_path)

    class Robot:
        steps = 0

        def step(self):
            self.steps += 1
            if self.steps == 10:
                raise KeyboardInterrupt
            numbers = {name: np.full(6, self.steps) for name in ("observation.state", "action")}
            pictures = {"top": np.zeros((3, 240, 320), np.uint8), "depth": np.full((1, 240, 320), 700, np.uint16)}
            return numbers | {f"observation.images.{name}": picture for name, picture in pictures.items()}

    given = {"robot": Robot()}
    with pytest.raises(KeyboardInterrupt):
        exec(program, given)
    line = capsys.readouterr().err
    assert line == "kept: 2 finished episodes in data/.pick.recording; resume=True goes on after them\n"
    assert line.replace(" 2 ", " 12 ") in page
    error = refused("interrupted", lambda: exec(program.replace(", resume=True", ""), given))
    assert f"error: {error.replace(' 2 ', ' 12 ')}\n" in page
    exec(program, given)
    demos = read("data/pick")
    steps = demos.columns["action"][:, 0].tolist()
    assert list(demos.lengths.values()) == [4, 4, 4] and steps == [*range(1, 9), *range(11, 15)]
    assert demos.features["action"].names[-1] == "gripper.pos"


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="Linux only")
def test_writing_a_video_leaves_this_process_its_priority(tmp_path):
    """Run by root, SVT-AV1 would make it a real-time one, and all that it starts later."""
    before = os.sched_getscheduler(0)
    lerobot_data.record_one(tmp_path / "data", kind="video", top=np.zeros((3, 3, 64, 64), np.uint8))
    assert os.sched_getscheduler(0) == before == os.SCHED_OTHER


# ---- what is refused ------------------------------------------------------------------------------------------------

Call = Callable[[Recorder], None]


def frame(value, task="push") -> Call:
    return lambda recorder: recorder.add_frame({"action": value}, task)


def episode(value, task="push") -> Call:
    return lambda recorder: recorder.add_episode({"action": value}, task)


def pictures(**changed) -> Call:
    """Add an episode of seven frames with pictures, with changed or missing arrays."""
    usual = {"action": np.zeros((7, 3)), "observation.state": np.zeros((7, 2)), CAMERA: np.zeros((7, 3, 16, 24), "u1")}
    changed = {CAMERA if name == "top" else name: array for name, array in changed.items()}
    arrays = {name: array for name, array in (usual | changed).items() if array is not None}
    return lambda recorder: recorder.add_episode(arrays, "push")


class Misuse(NamedTuple):
    """A declaration and calls of a recorder, the last of which is refused."""

    says: str
    features: Mapping[str, Any] = ONE_NUMBER
    calls: tuple[Call, ...] = ()
    names: Mapping[str, Any] = {}
    fps: Any = 10


ONE, INT = np.zeros(1), {"action": ("int32", (1,))}
MISUSES = [
    Misuse("no pair of a dtype and a shape", {"a": "float32"}),
    Misuse("no pair of a dtype and a shape", {"a": ("float32", 3)}),
    Misuse("fps no number", fps="10"),
    Misuse("fps 0", fps=0),
    Misuse("no features", {}),
    Misuse("'a/b'", {"a/b": ("float32", (1,))}),
    Misuse("'..'", {"..": ("image", (3, 16, 24))}),
    Misuse("'index'", {"index": ("float32", (1,))}),
    Misuse("'text'", {"a": ("text", (1,))}),
    Misuse("shape ()", {"a": ("float32", ())}),
    Misuse("(3, H, W)", {"a": ("image", (16, 24, 3))}),
    Misuse("even", {"a": ("video", (3, 15, 24))}),
    Misuse("action has 2 names and the shape (3,)", FEATURES, names={"action": ["x", "y"]}),
    Misuse(f"names of {CAMERA}, which is no feature of numbers", FEATURES, names={CAMERA: ["a", "b", "c"]}),
    Misuse("names of arm", FEATURES, names={"arm": ["x"]}),
    Misuse("action has numbers that int32 does not hold", INT, (frame([2**40]),)),
    Misuse("action has numbers that int32 does not hold", INT, (episode([[2**40]]),)),
    Misuse("action has numbers that float32 does not hold", calls=(frame([1e300]),)),
    Misuse("action has numbers that float32 does not hold", calls=(episode([[1e300]]),)),
    Misuse("no array", {"action": ("float32", (2,))}, (frame([[1], [1, 2]]),)),
    Misuse("the task 3 is no text", calls=(frame([1.0], 3),)),
    Misuse("the task None is no text", calls=(episode([[1.0]], None),)),
    Misuse("is no text", calls=(frame([1.0], " "),)),
    Misuse("is no text", calls=(episode([[1.0]], "\ud800"),)),
    Misuse("no episode was written"),
    Misuse("without frames", calls=(Recorder.end_episode,)),
    Misuse("without frames", calls=(episode(np.zeros((0, 1))),)),
    Misuse("call end_episode() first", calls=(frame(ONE), episode(np.zeros((1, 1))))),
    Misuse("'pull' in an episode of 'push'", calls=(frame(ONE), frame(ONE, "pull"))),
    Misuse("was not ended", calls=(frame(ONE),)),
    Misuse("action has frames of (2,)", FEATURES, (pictures(action=np.zeros((7, 2))),)),
    Misuse("has 7 frames, others 6", FEATURES, (pictures(top=np.zeros((6, 3, 16, 24), "u1")),)),
    Misuse("action is complex128", FEATURES, (pictures(action=np.zeros((7, 3), complex)),)),
    Misuse("(NaN or infinity) at frame 0", FEATURES, (pictures(action=np.full((7, 3), np.nan)),)),
    Misuse(f"{CAMERA} is float32", FEATURES, (pictures(top=np.zeros((7, 3, 16, 24), "f4")),)),
    Misuse("(16, 24, 3)", FEATURES, (pictures(top=np.zeros((7, 16, 24, 3), "u1")),)),
    Misuse("arm is not declared", FEATURES, (pictures(arm=np.zeros((7, 3))),)),
    Misuse("action is missing", FEATURES, (pictures(action=None),)),
]


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.says)
def test_misuse_of_a_recorder(tmp_path, misuse):
    """A mistake is refused at once, not at the end of a recording."""

    def act():
        with Recorder(tmp_path / "set", misuse.fps, misuse.features, names=misuse.names) as recorder:
            for call in misuse.calls:
                call(recorder)

    error = refused(misuse.says, act)
    assert "episode 0" in error or not misuse.calls
    assert not list(tmp_path.iterdir()), "nothing stays"


def test_no_recording_over_a_folder(tmp_path):
    refused("exists already", lambda: Recorder(tmp_path, 10, FEATURES))


# ---- a recording that is stopped ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_recording_on_a_full_disk(tmp_path, kind):
    """The limit on the size of a file refuses bytes as a full disk does; it holds for a process of its own."""

    def record_noise():
        noise = np.random.default_rng(0).integers(0, 256, (60, 3, 64, 64), dtype=np.uint8)
        with Recorder(tmp_path / "set", 10, ONE_NUMBER | {CAMERA: (kind, (3, 64, 64))}) as recorder:
            for _ in range(3):
                recorder.add_episode({CAMERA: noise, "action": np.zeros((60, 1))}, "push")

    def record_on_a_full_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        refused(["cannot write", "make room"], record_noise)

    run_in_fork(record_on_a_full_disk)
    assert not list(tmp_path.iterdir())


STEPS = {  # of a recording, on the disk
    os: ("rename", "replace", "link", "mkdir", "unlink", "rmdir"),
    recording: ("_exchanged",),
}


def is_killed_at(number, act):
    """Run `act` in a process that dies before the step of this number; return whether the process got there."""

    def act_until_killed():
        kill_before(number, STEPS)
        act()

    code = exit_code_of_fork(act_until_killed)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def assert_same_dataset(a, b):
    """But for how the pictures lie in files."""
    left, right = read(a), read(b)
    assert left.lengths == right.lengths and left.tasks == right.tasks
    assert all(np.array_equal(left.columns[name], right.columns[name]) for name in right.columns)
    pictures = [Frames(demos, {}, "none", "unused").get(CAMERA, demos.columns["index"]) for demos in (left, right)]
    assert np.array_equal(*pictures)
    for name, stats in right.stats.items():
        for key in stats:
            assert np.allclose(left.stats[name][key], stats[key], rtol=1e-9), (name, key)
    infos = [json.loads((root / "meta/info.json").read_text()) for root in (a, b)]
    assert infos[0] == infos[1]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "exchange"), [(0, True), (1, True), (1, False)])
def test_a_recording_killed_anywhere_goes_on(tmp_path, monkeypatch, before, exchange):
    """After a kill at each of its steps a reader finds the dataset as it was, or whole, and the same program, started
    again, ends in the same dataset; each finished episode is taken from the disk. Some systems cannot exchange."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no power is lost here, and it takes most of the time
    if not exchange:
        monkeypatch.setattr(recording, "_exchanged", lambda a, b: False)
    root, start, expected = (tmp_path / name for name in ("set", "start", "expected"))
    recorded_again, whole_at_a_kill = [], set()

    def record_to(count, root=root):
        with Recorder(root, 10, FEATURES, names={"action": ["x", "y", "z"]}, resume=True) as recorder:
            for e in range(recorder.num_episodes, count):
                recorded_again.append(e)
                recorder.add_episode(episode_of(e), task_of_episode(e))

    def begin_again(root=root):
        shutil.rmtree(root, ignore_errors=True)
        if before:
            shutil.copytree(start, root)

    if before:
        record_to(before, start)
    begin_again(expected)
    record_to(3, expected)
    for step in range(1, 1000):
        begin_again()
        if not is_killed_at(step, lambda: record_to(3)):
            break
        assert root.exists() or not (exchange and before)
        count = len(read(root).episodes) if root.exists() else before
        assert count in (before, 3)
        finished = len(list(tmp_path.glob(".set.recording/[0-9]*[0-9]/episode.json")))
        recorded_again.clear()
        record_to(3)
        if count == 3:
            assert not recorded_again
        elif exchange:
            assert recorded_again == list(range(before + finished, 3))
        whole_at_a_kill.add(count == 3)
        assert_same_dataset(root, expected)
        assert not (tmp_path / ".set.recording").exists()
    assert 25 < step < 999 and whole_at_a_kill == {False, True}


def test_an_interrupted_recording_is_not_recorded_over(tmp_path):
    root = tmp_path / "set"

    def record_until_killed():
        with Recorder(root, 10, ONE_NUMBER) as recorder:
            for value in range(3):
                add_one(recorder, value)
            recorder.add_frame({"action": np.zeros(1)}, "push")
            os.kill(os.getpid(), signal.SIGKILL)

    run_in_fork(record_until_killed, exitcode=-signal.SIGKILL)
    assert folders(tmp_path) == [".set.recording"]
    refused("cannot read info.json", lambda: read(root))

    def begin(fps=10, features=ONE_NUMBER, **how):
        Recorder(root, fps, features, **how).__enter__()

    refused(["interrupted", "3 finished episodes", ".set.recording", "resume=True"], begin)
    refused(["has fps 10", "recorder 5"], lambda: begin(fps=5, resume=True))
    two = {"action": ("float32", (2,))}
    refused(["recording has action (float32, (1,))", "(2,)"], lambda: begin(features=two, resume=True))
    with Recorder.resume(root) as recorder:
        assert recorder.num_episodes == 3
    assert read(root).columns["action"][:, 0].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    with Recorder.resume(root) as recorder:
        add_one(recorder, 3, "pull")
    assert read(root).tasks == ["push", "pull"] and folders(tmp_path) == ["set"]


def test_an_error_keeps_what_was_finished_and_prints_where(tmp_path, capsys):
    def interrupt(**how):
        with pytest.raises(KeyboardInterrupt), Recorder(tmp_path / "set", 10, ONE_NUMBER, **how) as recorder:
            add_one(recorder)
            raise KeyboardInterrupt
        return capsys.readouterr().err

    assert interrupt(keep=False) == "" and not list(tmp_path.iterdir())
    line = interrupt()
    assert "1 finished episode in" in line and "resume=True" in line
    interrupt(keep=False)
    assert not list(tmp_path.iterdir()), "a recording that can be made again begins again"


def test_an_interrupt_after_the_last_step_adds_no_episode_twice(tmp_path, monkeypatch):
    def record_two():
        with Recorder(tmp_path / "set", 10, ONE_NUMBER, resume=True) as recorder:
            while recorder.num_episodes < 2:
                add_one(recorder, recorder.num_episodes)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recording.Recording, "clear", lambda self: signal.raise_signal(signal.SIGINT))
        record_two()
    signal.signal(signal.SIGINT, before)
    assert len(read(tmp_path / "set").episodes) == 2
    record_two()
    assert len(read(tmp_path / "set").episodes) == 2 and folders(tmp_path) == ["set"]


# ---- episodes added to a dataset ------------------------------------------------------------------------------------


def test_one_process_records_a_dataset_at_a_time(tmp_path):
    (tmp_path / ".set2.recording").mkdir()
    with Recorder(tmp_path / "set", 10, ONE_NUMBER) as recorder:
        add_one(recorder)
        run_in_fork(lambda: refused("another process is recording it", lambda: record(tmp_path / "set")))
    assert len(read(tmp_path / "set").episodes) == 1 and folders(tmp_path) == [".set2.recording", "set"]


def test_a_dataset_that_others_change_while_it_is_added_to(tmp_path):
    root = lerobot_data.record_one(tmp_path / "set", action=np.zeros((5, 1)))
    other = lerobot_data.record_one(tmp_path / "other", task="other", action=np.zeros((7, 1)))

    def add_two():
        with Recorder.resume(root) as slow:
            add_one(slow, 1, "pull")
            root.rename(tmp_path / "was")
            other.rename(root)

    refused(["has changed", "resume=True"], add_two)
    assert read(root).lengths == {0: 7}
    with Recorder.resume(root):
        pass
    assert read(root).lengths == {0: 7, 1: 5} and read(root).tasks == ["other", "pull"]


FIRST_NEW_FILE = {"v3.0 images": 1, "v3.0 video": 1, lerobot_data.V3: 2, "v3.0 many files": 4}


@pytest.mark.parametrize("kind", FIRST_NEW_FILE)
def test_episodes_added_to_a_dataset(made, tmp_path, kind):
    """The old files stay what they are, bit by bit; new ones have the next numbers."""
    root, link = shutil.copytree(made(kind), tmp_path / "set"), tmp_path / "link"
    link.symlink_to(root)
    if kind == lerobot_data.V3:
        lerobot_data.change_info(root, lambda info: info.update(total_tasks=2))
    before = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    size = read(root).features[CAMERA].shape[1:]
    with Recorder.resume(link, file_mb=0) as recorder:
        assert recorder.num_episodes == 4
        for e in (1, 2):
            recorder.add_episode(episode_of(e, size), ("push", "turn")[e % 2])
    assert link.is_symlink()
    for name, content in before.items():
        if str(name) not in ("meta/info.json", "meta/stats.json", "meta/tasks.parquet"):
            assert (root / name).read_bytes() == content
    added = {path.relative_to(root) for path in root.rglob("data/*/file-*")} - before.keys()
    first = FIRST_NEW_FILE[kind]
    assert sorted(path.name for path in added) == [f"file-{first + n:03d}.parquet" for n in range(2)]
    assert_episodes(read(root), [0, 1, 2, 3, 1, 2])


def assert_episodes(demos, chosen):
    """The dataset has these episodes of `numbers`, one after the other."""
    assert list(demos.lengths.values()) == [LENGTHS[e] for e in chosen]
    assert demos.tasks == ["push", "pull", "turn"]
    for name in ("action", "observation.state"):
        assert np.array_equal(demos.columns[name], np.concatenate([numbers()[e][name] for e in chosen]))
        every = demos.columns[name].astype(np.float64)
        assert np.allclose(demos.stats[name]["q90"], np.quantile(every, 0.9, axis=0))
    levels = np.concatenate([level(e, np.arange(LENGTHS[e])) for e in chosen])
    pictures = Frames(demos, {}, "none", "unused").get(CAMERA, np.arange(len(levels)))
    assert np.abs(grays(pictures) - levels).max() < 2
    assert np.array_equal(demos.columns["index"], np.arange(len(levels)))


@pytest.mark.parametrize(
    ("kind", "fps", "says"),
    [
        ("v2.1", 10, ["it is v2.1", "v3.0 only"]),
        ("v3.0 images", 5, ["the dataset has fps 10", "recorder 5"]),
        ("v3.0 video", 10, ["(video, (3, 64, 64))", "(image, (3, 16, 24))"]),
    ],
)
def test_what_episodes_are_not_added_to(made, tmp_path, kind, fps, says):
    root = shutil.copytree(made(kind), tmp_path / "set")
    refused(says, lambda: Recorder(root, fps, FEATURES, resume=True).__enter__())
    assert folders(tmp_path) == ["set"]


def test_files_with_names_of_their_own_are_not_added_to(made, tmp_path):
    root = shutil.copytree(made("v3.0 images"), tmp_path / "set")
    (root / "data/chunk-000/file-000.parquet").rename(root / "data/0-0.parquet")
    lerobot_data.change_info(root, lambda info: info.update(data_path="data/{chunk_index}-{file_index}.parquet"))
    refused("names of their own", lambda: Recorder(root, 10, FEATURES, resume=True).__enter__())
