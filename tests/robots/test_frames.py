"""Pictures of LeRobot datasets: decoded or from the cache, on a full disk, after a kill, in several processes."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import lerobot_data
import numpy as np
import pytest
import torch
from films import turn
from forks import kill_before, run_in_fork
from lerobot_data import CAMERA, DELTAS, FRAMES, LENGTHS, MAKERS, V3, flat, grays, level, pa, pq, write_video
from refusals import refused

from engine.contract import LockstepError
from engine.data.processes import starting_processes
from formats.robots import frames as frames_module
from formats.robots import lerobot_mix
from formats.robots.frames import Frames
from formats.robots.lerobot import Chunks, read

Image = pytest.importorskip("PIL.Image")

EVERY = np.arange(FRAMES)
STARTS = np.cumsum(LENGTHS) - LENGTHS


def decoded(demos, sizes=None):
    """Return pictures that are decoded at each use."""
    return Frames(demos, sizes or {}, "none", "unused")


def cached(demos, folder, sizes=None):
    return Frames(demos, sizes or {}, "memmap", folder)


def levels(rows):
    """Return the gray of each row of a dataset of lerobot_data."""
    e = np.searchsorted(np.cumsum(LENGTHS), rows, "right")
    return level(e, rows - STARTS[e])


def old_video(root, e):
    return root / f"videos/chunk-{e // 2:03d}/{CAMERA}/episode_{e:06d}.mp4"


def open_files(root):
    """Return how many files of a folder this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith(str(root))
    return count


@pytest.fixture
def writes(monkeypatch):
    """A list that grows with each picture that is written into a cache."""
    counted = []
    real = frames_module._write_all
    monkeypatch.setattr(frames_module, "_write_all", lambda *args: (counted.append(1), real(*args)))
    return counted


# ---- pictures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("size", [None, (8, 12)])
def test_both_caches_give_the_same_bytes(made, tmp_path, kind, size, writes):
    demos = read(made(kind))
    sizes = {CAMERA: size} if size else {}
    cache, fresh = cached(demos, tmp_path, sizes), decoded(demos, sizes)
    rows = np.random.default_rng(0).integers(0, FRAMES, 60)
    pictures = cache.get(CAMERA, rows)
    assert pictures.shape[2:] == (size or demos.features[CAMERA].shape[1:]) and pictures.dtype == np.uint8
    assert np.array_equal(pictures, fresh.get(CAMERA, rows))
    assert np.abs(grays(pictures) - levels(rows)).max() < 2
    again = cached(read(made(kind), episodes=[3, 1]), tmp_path, sizes)
    assert len(writes) == FRAMES, "the same cache serves any choice of episodes"
    assert np.array_equal(again.get(CAMERA, np.arange(9)), fresh.get(CAMERA, np.r_[7:11, 20:25]))
    assert fresh.get(CAMERA, np.arange(0)).shape[0] == 0


def test_the_pictures_of_the_next_batch_are_read_ahead(made, tmp_path, monkeypatch):
    """Of all cameras, and just the rows that the batch will take from the memory map."""
    demos, ahead, taken, take = read(made("v3.0 images"), episodes=[3, 1]), [], [], np.take
    chunks = Chunks(demos, [3, 1], DELTAS, cached(demos, tmp_path))
    monkeypatch.setattr(frames_module, "read_ahead", lambda *given: ahead.append(given))
    monkeypatch.setattr(np, "take", lambda *given, **how: taken.append(given) or take(*given, **how))
    some = [0, len(chunks) - 1, 3]
    chunks.prefetch(some)
    assert not taken
    chunks.__getitems__(some)
    (mapped, first, count), (same, rows) = ahead[0], taken[0]
    assert len(ahead) == len(taken) == len(demos.cameras) and mapped is same and count == 1
    assert sorted(set(rows.tolist())) == first.tolist() and len(first) > len(some)
    Chunks(demos, [3, 1], DELTAS, decoded(demos)).prefetch(some)
    assert len(ahead) == 1, "what is decoded at every use has no map"


def test_images_are_lossless_and_resized_by_pillow(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 20, 30), dtype=np.uint8)
    demos = read(lerobot_data.record_one(tmp_path / "set", top=pixels))
    rows = np.array([4, 0, 4, 5])
    assert np.array_equal(decoded(demos).get(CAMERA, rows), pixels[rows])
    small = [Image.fromarray(p.transpose(1, 2, 0)).resize((12, 8), Image.Resampling.BILINEAR) for p in pixels[rows]]
    expected = np.stack([np.asarray(image).transpose(2, 0, 1) for image in small])
    assert np.array_equal(cached(demos, tmp_path, {CAMERA: (8, 12)}).get(CAMERA, rows), expected)


@pytest.mark.parametrize(("gop", "most"), [(1, 9), (2, 13), (12, 60), (250, 160)])
def test_frames_between_key_frames_and_how_many_are_decoded_to_reach_some(tmp_path, monkeypatch, gop, most):
    root, every = lerobot_data.build(tmp_path / "set", lengths=[40]), np.arange(40)
    write_video(old_video(root, 0), np.stack([np.full((3, 16, 24), 20 + 5 * f, np.uint8) for f in every]), gop=gop)
    demos = read(root)
    frames = decoded(demos)
    for rows in ([39, 0, 20], [5], [0, 39], every, [38, 39]):
        assert np.abs(grays(frames.get(CAMERA, np.array(rows))) - 20 - 5 * np.array(rows)).max() < 2
    assert np.array_equal(cached(demos, tmp_path).get(CAMERA, every), frames.get(CAMERA, every))
    taken, real = [], frames_module._Video._from

    def counted(self, *where):
        for frame in real(self, *where):
            taken.append(1)
            yield frame

    monkeypatch.setattr(frames_module._Video, "_from", counted)
    decoded(demos).get(CAMERA, np.array([1, 14, 27, 39]))
    assert len(taken) <= most, len(taken)


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("cache", ["none", "memmap"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (Path.unlink, ["frame 0", "no pictures"]),
        (lambda path: path.write_bytes(b"no video"), ["frame 0", "cannot be decoded"]),
        (lambda path: path.write_bytes(b""), ["frame 0", "cannot be decoded"]),
        (cut, ["episode 1 frame"]),
        (lambda path: write_video(path, flat(1, 3)), ["frame 3 is at 0.3000 s", "0.2000 s, the last"]),
        (lambda path: write_video(path, flat(1, 4), fps=11), ["frame 1 is at 0.1", "tolerance_s"]),
        (lambda path: write_video(path, flat(1, 4, (32, 24))), ["frame 0", "32x24 pixels, not 16x24"]),
    ],
)
def test_a_damaged_video_is_refused_in_one_line(copied, tmp_path, cache, damage, says):
    damage(old_video(copied, 1))
    demos, says = read(copied), ["episode 1 frame", "episode_000001.mp4", *says]
    refused(says, lambda: Frames(demos, {}, cache, tmp_path / "c").get(CAMERA, EVERY))
    assert Frames(read(copied, exclude=[1]), {}, cache, tmp_path / "c").get(CAMERA, np.arange(21)).shape[0] == 21


def test_all_missing_videos_are_named_at_once(copied, tmp_path):
    """With the settings to type: a run with each goes on."""
    for e in (1, 3):
        old_video(copied, e).unlink()
    says = ["no pictures of observation.images.top in episodes 1, 3", "episode_000001.mp4", "episode_000003.mp4"]
    says += ["dataset.exclude_episodes=1,3, or with dataset.cameras=none"]
    refused(says, lambda: decoded(read(copied)))
    assert len(decoded(read(copied, exclude=[1, 3])).places[CAMERA]) == len(read(copied).episodes) - 2
    refused(["dataset.exclude_episodes=0,1,3"], lambda: decoded(read(copied, exclude=[0])))
    other = tmp_path / "other"
    shutil.copytree(copied, other)
    both = lerobot_mix.joined(lerobot_mix.read({"a": copied, "b": other}))
    says = ["in episodes a:1, a:3, b:1, b:3", "dataset.exclude_episodes=a:1,a:3,b:1,b:3, or"]
    refused(says, lambda: lerobot_mix.Pictures(both, {}, "none", "unused"))
    for e in read(copied).episodes:
        old_video(copied, e).unlink(missing_ok=True)
    refused(["go on with dataset.cameras=none"], lambda: decoded(read(copied)))


@pytest.mark.parametrize("cache", ["none", "memmap"])
def test_turned_videos_are_upright_as_players_show_them(copied, tmp_path, cache):
    """180 degrees, and 90 degrees with the size of info.json as shown."""
    pictures = np.full((4, 3, 16, 24), 20, np.uint8)
    pictures[:, :, :8, :12] = 220
    path = old_video(copied, 1)
    write_video(path, pictures)
    plain = path.with_name("plain.mp4")
    path.rename(plain)
    rows = np.flatnonzero(read(copied, exclude=[0, 2, 3]).columns["episode_index"] == 1)
    lower, upper = (slice(8, 16), slice(12, 24)), (slice(8), slice(12))
    for matrix, (high, wide) in (((-1, 0, 0, -1), lower), ((1, 0, 0, 1), upper)):
        turn(plain, matrix, path)
        found = Frames(read(copied, exclude=[0, 2, 3]), {}, cache, tmp_path / "c").get(CAMERA, rows)
        assert (found[:, :, high, wide] > 190).all() and found.mean() < 90
    turn(plain, (0, 1, -1, 0), path)
    refused(["24x16 pixels, not 16x24"], lambda: decoded(read(copied)).get(CAMERA, np.arange(1, 21)))


def test_flipped_bytes_in_a_video_are_refused_in_one_line(tmp_path):
    """The decoder conceals them: the picture comes, made up, with a mark."""
    root = lerobot_data.build(tmp_path / "set", lengths=[40])
    rng, path, every = np.random.default_rng(0), old_video(root, 0), np.arange(40)
    write_video(path, rng.integers(0, 255, (40, 3, 64, 96), dtype=np.uint8))
    assert decoded(read(root), {CAMERA: (16, 24)}).get(CAMERA, every).std() > 5
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = rng.integers(0, 256, 4000, dtype=np.uint8).tobytes()
    path.write_bytes(content)
    fresh = decoded(read(root), {CAMERA: (16, 24)})
    refused(["episode 0 frame 20", "a damaged picture", "dataset.exclude"], lambda: fresh.get(CAMERA, every))
    assert len(fresh.get(CAMERA, np.arange(19))) == 19


def test_a_failed_build_leaves_no_file_open(copied, tmp_path):
    """A decoder's threads do not survive a fork, and a forked process that ends it would wait for them."""
    write_video(old_video(copied, 1), flat(1, 3))
    demos = read(copied)
    gc.collect()  # the encoder above may still hold its file
    before = open_files(copied)
    with pytest.raises(LockstepError) as caught:
        cached(demos, tmp_path / "c")
    assert open_files(copied) == before, caught.value


@pytest.mark.parametrize("channels", [1, 4])
def test_other_numbers_of_channels(made, tmp_path, channels):
    root = shutil.copytree(made("v3.0 images"), tmp_path / "set")
    lerobot_data.change_feature(root, CAMERA, shape=[16, 24, channels])
    pictures = cached(read(root), tmp_path / "c", {CAMERA: (8, 12)}).get(CAMERA, EVERY)
    assert pictures.shape == (FRAMES, channels, 8, 12) and pictures[9, 0].mean() == level(1, 2)
    lerobot_data.change_feature(root, CAMERA, shape=[16, 24, 2], names=["h", "w", "channels"])
    refused("2 channels", lambda: decoded(read(root)))


@pytest.fixture
def put(made, tmp_path):
    """Return a function that replaces the picture of episode 1 frame 2, and reads this and its neighbours."""
    root = shutil.copytree(made("v3.0 images"), tmp_path / "set")
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    rows = table.column(CAMERA).to_pylist()
    at = table.schema.get_field_index(CAMERA)

    def put(content, beside="beside.png"):
        rows[9] = {"bytes": content, "path": beside}
        column = pa.array(rows, table.schema.field(at).type)
        pq.write_table(table.set_column(at, table.schema.field(at), column), path, row_group_size=4)
        return decoded(read(root)).get(CAMERA, np.arange(8, 11))

    put.root, put.neighbour = root, rows[8]["bytes"]
    return put


def test_a_damaged_picture_is_refused_in_one_line(put):
    for content in (b"no picture", put.neighbour[:60], None):
        refused(["episode 1 frame 2", "file-000.parquet"], lambda content=content: put(content))
    wide = io.BytesIO()
    Image.fromarray(np.zeros((16, 24), np.uint16)).save(wide, "PNG")
    refused(["episode 1 frame 2", "more than 8 bits"], lambda: put(wide.getvalue()))


def test_a_picture_may_lie_in_a_file_of_its_own_within_the_dataset(put, tmp_path):
    beside = put.root / "beside.png"
    beside.write_bytes(put.neighbour)
    assert put(None)[1].mean() == level(1, 1)
    outside = beside.rename(tmp_path / "beside.png")
    for where in ("../beside.png", str(outside)):
        refused(["episode 1 frame 2", "outside of the dataset"], lambda where=where: put(None, where))


def test_wrong_settings_of_pictures(made, tmp_path):
    demos = read(made("v2.1"))
    refused("'ram'", lambda: Frames(demos, {}, "ram", tmp_path))
    refused("(0, 8)", lambda: decoded(demos, {CAMERA: (0, 8)}))


# ---- the cache ------------------------------------------------------------------------------------------------------


# An episode takes two calls of fsync: its bytes, then its line.
@pytest.mark.parametrize(
    ("name", "count", "done"),
    [("pwrite", 1, 0), ("pwrite", 4, 0), ("fsync", 1, 0), ("fsync", 2, 1), ("pwrite", 9, 1), ("fsync", 3, 1),
     ("pwrite", 25, 3), ("fsync", 8, 4)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["v2.1", "v3.0 images"])
def test_a_killed_build_is_resumed(made, tmp_path, writes, kind, name, count, done):
    demos, size = read(made(kind)), {CAMERA: (8, 12)}

    def build_until_killed():
        kill_before(count, {os: [name]})
        cached(demos, tmp_path, size)

    run_in_fork(build_until_killed, exitcode=-signal.SIGKILL)
    cache = cached(demos, tmp_path, size)
    assert len(writes) == sum(LENGTHS[done:]), "what was finished is not decoded again"
    assert np.array_equal(cache.get(CAMERA, EVERY), decoded(demos, size).get(CAMERA, EVERY))


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(8 * 3 * 16 * 24)  # in episode 1
        file.write(b"\0" * 10)


@pytest.mark.parametrize(
    ("file", "damage", "lost"),
    [
        ("episodes.jsonl", lambda path: path.write_bytes(path.read_bytes()[:-10]), [3]),
        ("*.u8", overwrite, [1]),
        ("*.u8", cut, [2, 3]),
        ("*.u8", Path.unlink, [0, 1, 2, 3]),
    ],
    ids=["a line cut short", "other bytes", "cut", "gone"],
)
def test_what_is_not_as_it_was_written_is_decoded_again(made, tmp_path, writes, file, damage, lost):
    """Also of episodes that are not used just now: a later run would trust them."""
    demos = read(made("v2.1"))
    good = cached(demos, tmp_path).get(CAMERA, EVERY)
    damage(next(tmp_path.glob(f"*/{file}")))
    writes.clear()
    if 0 not in lost:
        cached(read(made("v2.1"), episodes=[0]), tmp_path)
        assert not writes
    for _ in range(2):
        assert np.array_equal(cached(demos, tmp_path).get(CAMERA, EVERY), good)
        assert len(writes) == sum(LENGTHS[e] for e in lost), "once"


def test_a_bar_is_for_terminals_only(made, tmp_path, capfd):
    cached(read(made("v2.1")), tmp_path)
    assert capfd.readouterr() == ("", "")


def test_checksums_are_read_once(made, tmp_path, monkeypatch):
    demos, calls, real = read(made("v2.1")), [], frames_module._Cache._crc
    cached(demos, tmp_path)
    os.utime(next(tmp_path.glob("*/episodes.jsonl")), (1, 1))
    monkeypatch.setattr(frames_module._Cache, "_crc", lambda *args: calls.append(1) or real(*args))
    for _ in range(2):
        cached(demos, tmp_path)
    assert len(calls) == len(LENGTHS), "once, because the journal was touched"


def test_a_changed_dataset_is_not_served_stale(copied, tmp_path, writes):
    demos = read(copied)
    cached(demos, tmp_path / "c")
    write_video(old_video(copied, 1), flat(2, 4))
    writes.clear()
    pictures = cached(demos, tmp_path / "c").get(CAMERA, EVERY)
    assert len(writes) == LENGTHS[1], "that episode alone"
    assert abs(pictures[7].mean() - level(2, 0)) < 2 and abs(pictures[6].mean() - level(0, 6)) < 2
    # Only the time differs: the length in bytes is the same.
    stat = old_video(copied, 3).stat()
    os.utime(old_video(copied, 3), ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    writes.clear()
    cached(demos, tmp_path / "c")
    assert len(writes) == LENGTHS[3]


def exchange(one, other):
    """Exchange the contents of two files; their sizes and times of modification stay."""
    contents = [path.read_bytes() for path in (one, other)]
    size = max(map(len, contents)) + 8
    for path, content in zip((other, one), contents, strict=True):
        gap = size - len(content)
        path.write_bytes(content + gap.to_bytes(4, "big") + b"free" + bytes(gap - 8))  # an empty box of MP4
        os.utime(path, ns=(10**18, 10**18))


def test_exchanged_videos_of_one_size_and_time_are_decoded_again(copied, tmp_path):
    files = old_video(copied, 1), old_video(copied, 3)
    exchange(*files)
    exchange(*files)  # the same sizes from now on
    rows = np.r_[7:11]
    assert np.abs(grays(cached(read(copied), tmp_path / "c").get(CAMERA, rows)) - levels(rows)).max() < 2
    before = [path.stat() for path in files]
    contents = [path.read_bytes() for path in files]
    for path, content, stat in zip(files, contents[::-1], before, strict=True):
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert [(s.st_size, s.st_mtime_ns) for s in before] == [
        (s.st_size, s.st_mtime_ns) for s in (path.stat() for path in files)
    ]
    pictures = cached(read(copied, exclude=[3]), tmp_path / "c").get(CAMERA, rows)
    assert np.abs(grays(pictures) - [level(3, f) for f in range(4)]).max() < 2


def test_a_changed_picture_in_a_file_of_its_own_is_decoded_again(put, tmp_path, writes):
    """The table is unchanged, and the picture's size and time of modification, too."""
    beside = put.root / "beside.png"
    beside.write_bytes(put.neighbour)
    put(None)
    rows = np.arange(8, 11)
    assert grays(cached(read(put.root), tmp_path / "c").get(CAMERA, rows))[1] == level(1, 1)
    stat, size = beside.stat(), len(put.neighbour)
    buffer = io.BytesIO()
    Image.fromarray(np.full((16, 24, 3), 99, np.uint8)).save(buffer, "PNG")
    beside.write_bytes(buffer.getvalue() + bytes(size))
    os.truncate(beside, max(size, len(buffer.getvalue())))
    os.utime(beside, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    writes.clear()
    assert grays(cached(read(put.root), tmp_path / "c").get(CAMERA, rows))[1] == 99
    assert len(writes) == LENGTHS[1], "that episode alone"
    writes.clear()
    cached(read(put.root), tmp_path / "c")
    beside.unlink()
    assert not writes
    refused(["episode 1 frame 2", "file-000.parquet"], lambda: cached(read(put.root), tmp_path / "c"))


def test_another_size_or_dataset_has_a_cache_of_its_own(copied, tmp_path):
    cached(read(copied), tmp_path / "c")
    cached(read(copied), tmp_path / "c", {CAMERA: (8, 8)})
    other = shutil.copytree(copied, tmp_path / "other" / "copy")  # of the same name and lengths
    cached(read(other), tmp_path / "c")
    assert len(list((tmp_path / "c").iterdir())) == 3


@pytest.mark.parametrize(("kind", "change"), [("v3.0 images", {"first_row": 0}), (V3, {"start_s": 0.3, "end_s": 0.7})])
def test_an_episode_that_moved_within_its_file_is_decoded_again(made, tmp_path, writes, kind, change):
    demos = read(made(kind), episodes=[1])
    cached(demos, tmp_path)
    writes.clear()
    demos.places[CAMERA][0] = replace(demos.places[CAMERA][0], **change)  # to episode 0
    pictures = cached(demos, tmp_path).get(CAMERA, np.arange(LENGTHS[1]))
    assert len(writes) == LENGTHS[1]
    assert np.abs(grays(pictures) - [level(0, f) for f in range(4)]).max() < 2


def test_two_processes_build_once(made, tmp_path, monkeypatch):
    """The first holds its first picture until the second waits for the lock, or writes as well."""
    demos, log, real = read(made("v2.1")), tmp_path / "log", frames_module._write_all
    log.touch()

    def wait_until(is_true):
        deadline = time.monotonic() + 60
        while not is_true():
            assert time.monotonic() < deadline
            time.sleep(0.01)  # polling with a deadline

    def second_is_there():
        return len(set(log.read_text().split())) > 1 or "-> FLOCK" in Path("/proc/locks").read_text()

    def build(first):
        def write(*args):
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\n")
            if first:
                wait_until(second_is_there)
            real(*args)

        monkeypatch.setattr(frames_module, "_write_all", write)
        if not first:
            wait_until(log.read_text)
        (tmp_path / f"{first}.bin").write_bytes(cached(demos, tmp_path / "c").get(CAMERA, EVERY).tobytes())

    processes = [multiprocessing.get_context("fork").Process(target=build, args=(first,)) for first in (True, False)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    written = log.read_text().split()
    assert len(written) == FRAMES and len(set(written)) == 1
    expected = decoded(demos).get(CAMERA, EVERY).tobytes()
    assert (tmp_path / "True.bin").read_bytes() == (tmp_path / "False.bin").read_bytes() == expected


def test_a_full_disk_is_reported_before_and_after(made, tmp_path, monkeypatch):
    demos, usage = read(made("v2.1")), shutil.disk_usage(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=FRAMES * 3 * 16 * 24 - 1))
        refused(["take 0.00 GB", "are free", "cache=none"], lambda: cached(demos, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        refused(["No space left on device", "make room"], lambda: cached(demos, tmp_path))
    assert cached(demos, tmp_path).get(CAMERA, np.arange(3)).shape[0] == 3
    (tmp_path / "file").touch()
    refused("cannot write the cache", lambda: cached(demos, tmp_path / "file"))


# ---- several processes and open files -------------------------------------------------------------------------------


def _as_it_is(batch):
    return batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "kind", "cache"),
    [
        *(("fork", kind, cache) for kind in ("v2.1", "v3.0 images", "v3.0 video") for cache in ("none", "memmap")),
        ("spawn", "v3.0 images", "none"),
        ("spawn", "v3.0 video", "memmap"),
    ],
)
def test_loader_processes_read_the_same(made, tmp_path, kind, cache, context):
    """Though the parent has the files open already."""
    demos = read(made(kind))
    chunks = Chunks(demos, [0, 1, 3], DELTAS, Frames(demos, {}, cache, tmp_path))
    expected = chunks.__getitems__(list(range(16)))
    workers = 1 if context == "spawn" else 2  # such a process takes two seconds to begin
    loader = torch.utils.data.DataLoader(
        chunks, batch_size=4, num_workers=workers, collate_fn=_as_it_is, multiprocessing_context=context, timeout=600
    )
    with starting_processes():
        started = iter(loader)
    batches = list(started)
    assert all(torch.equal(torch.cat([batch[name] for batch in batches]), expected[name]) for name in expected)
    assert torch.equal(chunks.__getitems__([5])[CAMERA], expected[CAMERA][[5]])


def test_a_fork_opens_its_own_files(made):
    frames = decoded(read(made("v2.1")))
    frames.get(CAMERA, np.arange(1))
    before = frames._videos

    def child():
        frames.get(CAMERA, np.arange(1))
        assert frames._videos is not before

    run_in_fork(child)
    assert frames._videos is before


@pytest.mark.parametrize("kind", ["v2.1", "v3.0 many files"])
def test_open_files_are_bounded(made, monkeypatch, kind):
    monkeypatch.setattr(frames_module, "OPEN_VIDEOS", 2)
    monkeypatch.setattr(frames_module, "PNG_BYTES", 2 * 2**20)
    demos = read(made(kind))
    frames = decoded(demos)
    before = open_files(demos.root)
    for rows in np.random.default_rng(0).integers(0, FRAMES, (20, 10)):
        frames.get(CAMERA, rows)
        tables = frames._tables
        assert len(frames._videos._kept) <= 2 and tables.cost <= 2 * 2**20
        assert tables.cost == sum(cost for _, cost in tables._kept.values())
        assert open_files(demos.root) <= before + 2


def test_a_cache_smaller_than_a_row_group_still_reads(made, monkeypatch):
    monkeypatch.setattr(frames_module, "PNG_BYTES", 1)
    rows = np.array([24, 0, 8, 1, 20])
    assert np.allclose(grays(decoded(read(made("v3.0 many files"))).get(CAMERA, rows)), levels(rows))
