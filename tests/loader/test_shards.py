"""Data larger than a disk: what is in a shard, the order of an epoch, the cache, and addresses that misbehave."""

import collections
import contextlib
import fcntl
import hashlib
import http.server
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tarfile
import threading
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from conftest import succeed, wait_until
from loading import loaded_steps
from runs import same_bits, weights
from shard_server import served, write_shards

from engine.contract import LockstepError
from engine.data.fingerprint import fingerprint
from engine.data.order import LazyOrder
from formats import shards
from formats.robots.lerobot_writer import Recorder
from formats.shards import Options, Order, Shards
from formats.shards import cache as shard_cache
from formats.shards import files as shard_files
from plugins import preflight
from tools.lab import index_shards


@pytest.fixture(autouse=True)
def few_waits(monkeypatch):
    """A server that stays broken is given up after two tries, instead of six within a quarter of a minute."""
    monkeypatch.setattr(shard_cache, "TRIES", 2)


def indexed(folder, *words):
    assert index_shards.main([str(folder), "--processes", "1", *map(str, words)]) == 0
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """{kind: (folder, number of samples)}"""
    pytest.importorskip("pyarrow")
    made = {}
    for kind in ("tar", "jsonl", "parquet"):
        folder = tmp_path_factory.mktemp(kind)
        count = write_shards(folder, kind)
        made[kind] = indexed(folder), count
    return made


def number_of(sample):
    return {"id": int(sample["id"]), "size": len(sample.get("x.bin", b""))}


def ids(samples):
    return [int(sample["id"]) for sample in samples]


# ---- what is in a shard ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_is_read_as_tarfile_reads_it(tmp_path, form):
    rng, truth = np.random.default_rng(0), []
    names = ["a", "b/c", "d" * 60 + "/" + "e" * 60, "f" * 90, "g/h"]
    if form != tarfile.USTAR_FORMAT:
        names += ["long/" + "n" * 180, "ü/é" * 40]
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        folder = tarfile.TarInfo("b")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for key in names:
            sample = {}
            for kind in ("JPG", "seg.png", "json"):
                data = rng.bytes(int(rng.choice([0, 1, 511, 512, 513, 2000])))
                about = tarfile.TarInfo(f"{key}.{kind}")
                about.size, about.mtime = len(data), 1e9 + 0.5
                tar.addfile(about, io.BytesIO(data))
                sample[kind.lower()] = data
            for other in (".hidden", "README", "__meta__/x.json"):  # WebDataset leaves these out
                tar.addfile(tarfile.TarInfo(other))
            truth.append({"__key__": key} | sample)
    data = Shards(indexed(tmp_path))
    assert data.read(range(len(data))) == truth
    assert data.read([4, 0, 4]) == [truth[4], truth[0], truth[4]]


def test_sizes_beyond_eight_gigabytes_are_in_base_256():
    about = tarfile.TarInfo("a.bin")
    about.size = 9 << 30
    header = about.tobuf(tarfile.GNU_FORMAT)
    assert shard_files._number(header[124:136]) == 9 << 30


@pytest.mark.parametrize("kind", ["tar", "jsonl", "parquet"])
def test_a_sample_has_the_number_of_its_place(sets, kind):
    folder, count = sets[kind]
    data, rng = Shards(folder, number_of), np.random.default_rng(1)
    assert len(data) == count
    wanted = rng.integers(0, count, 200).tolist()
    assert [each["id"] for each in data.__getitems__(wanted)] == wanted
    assert ids(data.read(range(count))) == [*range(count)]


BAD_TARS = {
    "a header is damaged": (lambda data: data[:3] + b"?" + data[4:], "the header at byte 0 has a wrong checksum"),
    "cut off": (lambda data: data[:-10240], "it has no end, which is two blocks of zeros: was it cut off?"),
    "cut in a file": (lambda data: data[: 3 * 512 + 1], "it ends within set/000000.x.bin"),
    "compressed": (lambda data: b"\x1f\x8b" + data, "it is compressed by gzip, so no sample can be read by its place"),
    "empty": (lambda data: b"", "it is empty"),
    "no sample": (lambda data: bytes(10240), "it has no sample"),
    "no tar": (lambda data: b"hello" * 3000, "is no number: a header is damaged, or this is no tar"),
}


def tar_of(*names, kind=tarfile.REGTYPE):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in names:
            about = tarfile.TarInfo(name)
            about.type = kind if name.startswith("z") else tarfile.REGTYPE
            about.linkname = names[0]
            tar.addfile(about)
    return file.getvalue()


BAD = {name: ({"a.tar": change}, said) for name, (change, said) in BAD_TARS.items()} | {
    "apart": ({"a.tar": tar_of("a.x", "b.x", "a.y")}, "the files of sample a do not lie together"),
    "twice": ({"a.tar": tar_of("a.x", "a.X")}, "a.X comes twice"),
    "link": ({"a.tar": tar_of("a.x", "z.x", kind=tarfile.LNKTYPE)}, "z.x is a link or no plain file (type '1')"),
    "mixed": ({"a.tar": tar_of("a.x"), "b.jsonl": b"{}\n"}, "shards of several kinds: 1 .jsonl and 1 .tar"),
    "none": ({"a.txt": b""}, "no shards there"),
    "line": ({"a.jsonl": b'{"a": 1}\n{"a": \n'}, "line 2 is no JSON"),
    "list": ({"a.jsonl": b"[1]\n"}, "line 1 is no object"),
    "parquet": ({"a.parquet": b"PAR1nothing"}, "the shard cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_shard_is_told_in_one_line(sets, tmp_path, capsys, name):
    files, said = BAD[name]
    for path, data in files.items():
        whole = (sets["tar"][0] / "0000.tar").read_bytes()
        (tmp_path / path).write_bytes(data(whole) if callable(data) else data)
    assert index_shards.main([str(tmp_path), "--processes", "1"]) in (2, 5)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert said in printed.err and str(tmp_path) in printed.err
    assert {path.name for path in tmp_path.iterdir()} == {*files}


def test_the_index_is_verified(sets, tmp_path, capsys):
    count = write_shards(tmp_path, "tar", shards=4)
    indexed(tmp_path)
    capsys.readouterr()
    assert index_shards.main([str(tmp_path), "--verify"]) == 0
    assert "4 tar shards" in capsys.readouterr().out
    for name, change, said in (
        ("0001.tar", lambda data: data[:600] + bytes([data[600] ^ 1]) + data[601:], "the SHA-256"),
        ("0002.tar", lambda data: data + bytes(512), "and the index says"),
    ):
        with kept(tmp_path / name) as right:
            (tmp_path / name).write_bytes(change(right))
            assert index_shards.main([str(tmp_path), "--verify"]) == 5
            printed = capsys.readouterr().err
            assert said in printed and name in printed and printed.count("\n") == 1
            with pytest.raises(LockstepError, match=f"{name}.*make the index anew"):
                Shards(tmp_path).read(range(count))
    (tmp_path / "0003.tar").unlink()
    assert index_shards.main([str(tmp_path), "--verify"]) == 5
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(LockstepError, match=r"the shard is not there .*0003.tar"):
        Shards(tmp_path).read([count - 1])


def test_names_are_counted():
    assert index_shards.counted("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert index_shards.counted("{0..1}/{1..2}.tar") == ["0/1.tar", "0/2.tar", "1/1.tar", "1/2.tar"]
    assert index_shards.counted("one.tar") == ["one.tar"]
    with pytest.raises(LockstepError, match=r"\{3\.\.1\} counts down"):
        index_shards.counted("{3..1}.tar")


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "no index of shards: No such file"), ("<html>", "no index"), ('{"format": 9}', "of format 9")],
)
def test_an_index_that_is_none_names_the_tool(tmp_path, text, said):
    if text:
        (tmp_path / "shards.json").write_text(text)
    with pytest.raises(LockstepError, match=f"{said}.*tools/index_shards.py {tmp_path}$"):
        Shards(tmp_path)


# ---- the order -------------------------------------------------------------------------------------------------------

COUNTS = {
    "even": (np.full(40, 25), 12, 10),
    "uneven": (np.random.default_rng(3).integers(1, 80, 50), 12, 64),
    "one lane": (np.array([5, 1, 7]), 1, 4),
    "one sample each": (np.ones(24, np.int64), 12, 1),
    "a large one": (np.array([1000, 1, 1, 1, 1, 1]), 6, 8192),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_order_has_each_sample_once_and_is_entered_anywhere(name):
    counts, lanes, window = COUNTS[name]
    order, rng = Order(counts, 7, 2, lanes, window), np.random.default_rng(0)
    whole = order[:]
    assert whole.dtype == np.int64 and len(order) == counts.sum()
    assert sorted(whole.tolist()) == [*range(counts.sum())]
    for _ in range(60):
        first, last = sorted(rng.integers(0, len(order) + 1, 2))
        step = int(rng.integers(1, 9))
        entered = Order(counts, 7, 2, lanes, window)
        assert np.array_equal(entered[first:last:step], whole[first:last:step])
    some = rng.integers(0, len(order), 30)
    assert np.array_equal(order[some], whole[some])
    others = [Order(counts, *key, lanes, window)[:] for key in ((7, 3), (8, 2))]
    assert len(order) < 4 or not any(np.array_equal(each, whole) for each in others)


def lane_of(order, number):
    """The truth by listing: {sample: its lane}."""
    return {n: k % order.lanes for k, n in enumerate(order[:].tolist())}[number]


def test_a_lane_is_one_process_alone_and_only_cut_shards_are_read_twice():
    counts = np.random.default_rng(0).integers(20, 60, 60)
    order, ends = Order(counts, 1, 3, 12, 40), np.cumsum(counts)
    for size in (1, 2, 3, 4, 6, 12):
        opened = 0
        for rank in range(size):
            mine = np.concatenate([order[start + rank : start + 24 : size] for start in range(0, len(order), 24)])
            opened += len(np.unique(np.searchsorted(ends, mine, side="right")))
        assert 60 <= opened <= 60 + (11 if size > 1 else 0)


def test_the_next_shards_are_those_that_a_lane_comes_to():
    """Walked through: after the first window each shard has been announced before its first sample is read."""
    counts = np.random.default_rng(0).integers(20, 60, 60)
    order, ends = Order(counts, 1, 3, 6, 40), np.cumsum(counts)
    whole, early, late = order[:], 0, 0
    for lane in range(6):
        opened, announced, told = set(), set(), 0
        numbers = whole[lane::6]
        mine = {*np.searchsorted(ends, numbers, side="right").tolist()}
        for depth, number in enumerate(numbers.tolist()):
            shard = int(np.searchsorted(ends, number, side="right"))
            if shard not in opened:
                early += depth >= 40 and shard in announced
                late += depth >= 40 and shard not in announced
                opened.add(shard)
                there = order.next_shards(shard, number)
                announced |= {*there}
                told += len(there)
        assert announced <= mine, "no shard of another lane is fetched"
    assert late == 0 and early > 30


def test_millions_of_samples_take_no_memory_and_come_once():
    import tracemalloc

    counts = np.full(10_000, 400)
    tracemalloc.start()
    order = Order(counts, 0, 0, 120, 4096)
    order[len(order) - 960 :]
    order[2_000_000:2_000_960:8]
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()
    seen = np.zeros(len(order), bool)
    for start in range(0, len(order), 500_000):
        seen[order[start : start + 500_000]] = True
    assert seen.all()


def test_one_that_is_cut_into_shards_of_their_own_has_no_shard_in_both(sets):
    folder, count = sets["tar"]
    train, val = shards.pair(Options(root=str(folder), val_share=0.2), number_of)
    seen = [[each["id"] for each in data.__getitems__(range(len(data)))] for data in (train, val)]
    assert sorted(seen[0] + seen[1]) == [*range(count)] and 0.15 < len(val) / count < 0.3
    assert not {*train.which} & {*val.which} and train.digest != val.digest
    assert sorted(train.epoch_order(1, 0)[:].tolist()) == [*range(len(train))]
    assert shards.pair(Options(root=str(folder), val_share=0), number_of)[1] is None
    other = shards.pair(Options(root=str(folder), val=str(sets["jsonl"][0])), number_of)
    assert len(other[0]) == count and len(other[1]) == sets["jsonl"][1]


# ---- the loader ------------------------------------------------------------------------------------------------------


def steps_of(folder, size, done, epoch=1, **words):
    def make():
        return Shards(folder, number_of, options=Options(lanes=12, window=9))

    return loaded_steps(make, "id", size, epoch, done, seed=5, global_batch=12, **words)


@pytest.fixture(scope="module")
def straight(sets):
    """The steps of an epoch on one rank."""
    return steps_of(sets["tar"][0], 1, 0)


def test_an_epoch_is_the_order_of_the_shards(sets, straight):
    folder, count = sets["tar"]
    everything = [pair for step in straight.values() for pair in step]
    assert [place for place, _ in everything] == [*range(count)]
    samples = [sample for _, sample in everything]
    assert sorted(samples) == [*range(count)]
    assert samples == Order(Shards(folder).counts, 5, 1, 12, 9)[:].tolist()


@pytest.mark.parametrize(
    ("size", "done", "words"),
    [
        (2, 0, {}),
        (3, 1, {}),
        (4, 7, {}),
        (3, 20, {"batch_size": 2}),
        (3, 2, {"virtual_workers": 6}),
        (2, 3, {"num_workers": 2}),
    ],
)
def test_any_cut_takes_the_same_steps_from_any_position(sets, straight, size, done, words):
    rest = {number: step for number, step in straight.items() if number >= done}
    assert steps_of(sets["tar"][0], size, done, **words) == rest


def test_samples_that_are_left_out_change_no_step_of_the_others(sets, straight):
    folder, count = sets["tar"]
    rest = steps_of(folder, 2, 0, exclude=["sample:4", "sample:9"])
    assert rest.keys() == straight.keys()
    samples = sorted(sample for step in rest.values() for _, sample in step)
    assert samples == [n for n in range(count) if n not in (4, 9)]


def test_stretches_change_nothing(monkeypatch, sets):
    """A stretch as short as a step, and one longer than the epoch: also of a shuffle, with samples left out."""
    import data_loader

    for more in ({}, {"exclude": ["sample:3", *(f"sample:{n}" for n in range(30, 60))]}):
        found = []
        for stretch in (1, 100, 1 << 20):
            monkeypatch.setattr(data_loader, "CHUNK", stretch)
            found.append(steps_of(sets["tar"][0], 2, 1, **more))
        assert found[0] == found[1] == found[2]


def test_orders_that_differ_between_ranks_are_told_by_pieces():
    counts = np.full(100, 300)
    same, other = (LazyOrder(Order(counts, 1, epoch, 12, 100), 30_000) for epoch in (0, 1))
    pieces = preflight._parts(same)
    assert [len(each) for each in pieces] == [4096] * 3
    assert all(torch.equal(a, b) for a, b in zip(pieces, preflight._parts(same), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(pieces, preflight._parts(other), strict=True))


def test_the_data_are_told_by_the_index(sets, tmp_path):
    """One sample is fetched, of one shard; any change of the shards changes the digest."""
    folder, _ = sets["tar"]
    data = Shards(folder, number_of)
    told = fingerprint(data)
    assert len(data.opened) == 1 and fingerprint(Shards(folder, number_of)) == told
    other = shutil.copytree(folder, tmp_path / "other", ignore=shutil.ignore_patterns("shards*"))
    right = (other / "0007.tar").read_bytes()
    (other / "0007.tar").write_bytes(right[:600] + b"?" + right[601:])
    assert fingerprint(Shards(indexed(other), number_of)) != told, "of as many samples and bytes"
    orders = [fingerprint(Shards(folder, number_of, which=which)) for which in ([0, 1, 2], [0, 2, 1])]
    assert orders[0] != orders[1]


# ---- addresses that misbehave ----------------------------------------------------------------------------------------


def far(server, cache, gb=1.0, **more):
    return Shards(server.url, number_of, options=Options(cache=str(cache), cache_gb=gb, **more))


@pytest.fixture
def site(sets, tmp_path):
    with served(sets["tar"][0]) as server:
        yield server, tmp_path / "cache", sets["tar"][1]


@pytest.fixture
def slept(monkeypatch):
    """The seconds that the cache would have slept between two tries."""
    seconds = []
    monkeypatch.setattr(shard_cache.time, "sleep", seconds.append)
    return seconds


BUSY = {
    "resets": [-3000, -2500, -1, None],
    "cut short": ["cut", "cut", None],
    "slow": ["slow"],
    "503": [(503, 7), None],
    "503 until a date": [(503, "Wed, 21 Oct 2015 07:28:00 GMT"), None],
    "500": [500, None],
    "a page": ["page", None],
    "no ranges": [-3000, "no ranges"],
}


@pytest.mark.parametrize("name", BUSY)
def test_what_passes_is_waited_for_and_taken_up_where_it_broke_off(slept, site, name):
    server, cache, count = site
    server.trouble = {"0004.tar": [*BUSY[name]]}
    data = far(server, cache)
    assert ids(data.read(range(count))) == [*range(count)]
    asked = [begin for file, begin in server.asked if file == "0004.tar"]
    whole = (server.root / "0004.tar").stat().st_size
    if name == "resets":
        assert asked == [0, 3000, 5500, 5501] and server.bytes["0004.tar"] == whole
    assert (7.0 in slept) == (name == "503")
    if name == "cut short":
        assert asked[1] == whole // 2 and len(asked) == 3 and server.bytes["0004.tar"] == whole


BROKEN = {
    "503": ([503], r"the file cannot be read, tried 2 times: .*HTTP 503"),
    "a page": (["page"], r"the server gives 26 bytes, a web page, and the index says [\d,]+"),
    "404": ([404], r"the file is not there: HTTP 404"),
    "401": ([401], r"the file is not there: HTTP 401"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_stays_broken_ends_in_one_line_that_names_the_shard(slept, site, name):
    server, cache, count = site
    todo, said = BROKEN[name]
    server.trouble = {"0004.tar": todo}
    data = far(server, cache)
    with pytest.raises(LockstepError, match=said) as caught:
        data.read(range(count))
    assert "/0004.tar)" in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 5
    path = data.source.path(data.shards[4])
    assert not path.exists() and not (cache / "unfinished" / path.name).exists()


@contextlib.contextmanager
def kept(path):
    """Put the bytes of a served file back at the end."""
    right = path.read_bytes()
    try:
        yield right
    finally:
        path.write_bytes(right)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:600] + b"?" + data[601:], "its SHA-256 is"),
        (lambda data: data + bytes(1024), "and the index says"),
        (lambda data: data[:-1024], "and the index says"),
    ],
)
def test_a_shard_that_was_changed_is_named(slept, site, change, said):
    server, cache, count = site
    path = server.root / "0007.tar"
    with kept(path) as right:
        path.write_bytes(change(right))
        with pytest.raises(LockstepError, match=rf"{said}.*0007.tar.*was it changed after its index was made"):
            far(server, cache).read(range(count))
    assert ids(far(server, cache).read(range(count))) == [*range(count)]


def test_a_shard_that_changes_during_its_download_is_not_put_together_of_two(slept, site):
    """The tag of the version is asked for; the other version comes from its beginning, and has another digest."""
    server, cache, count = site
    path = server.root / "0007.tar"
    with kept(path) as right:

        def change():
            path.write_bytes(right[:-1] + b"?")

        server.trouble = {"0007.tar": [-3000, change, None]}
        with pytest.raises(LockstepError, match=r"its SHA-256 is .*0007.tar"):
            far(server, cache).read(range(count))
    assert [begin for name, begin in server.asked if name == "0007.tar"][:3] == [0, 3000, 0]
    assert {status for name, status in server.answers if name == "0007.tar"} == {200}


def test_other_addresses_are_read_by_fsspec(sets, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    folder, count = sets["tar"]
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe(f"/set/{path.name}", path.read_bytes())
    data = Shards("memory://set", number_of, options=Options(cache=str(tmp_path / "cache")))
    assert ids(data.read(range(count))) == [*range(count)]
    memory.rm("/set/0004.tar")
    with pytest.raises(LockstepError, match="the file is not there"):
        Shards("memory://set", options=Options(cache=str(tmp_path / "other"))).read(range(count))
    with pytest.raises(LockstepError, match="fsspec cannot read it"):
        Shards("nosuch://set")


# ---- the cache -------------------------------------------------------------------------------------------------------


def in_processes(size, work):
    """Return what `work(rank)` returns in so many processes."""
    context = multiprocessing.get_context("fork")
    out = context.Queue()

    def run(rank):
        try:
            out.put((rank, work(rank)))
        except BaseException as error:
            out.put((rank, repr(error)))
            raise

    children = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for child in children:
        child.start()
    found = dict(out.get(timeout=120) for _ in children)
    for child in children:
        child.join()
    return [found[rank] for rank in range(size)]


def read_as(server, cache, rank, size, gb=1.0, position=0):
    data = far(server, cache, gb, lanes=12, window=9)
    order, taken = data.epoch_order(1, 3), []
    for start in range(position, len(order), 24):
        mine = order[start + rank : min(start + 24, len(order)) : size]
        taken.append([each["id"] for each in data.__getitems__(mine.tolist())])
    return taken


def joined(parts):
    return [sorted(itertools.chain(*step)) for step in zip(*parts, strict=True)]


def test_each_shard_is_downloaded_once_by_all_processes_of_a_machine(site):
    server, cache, count = site
    steps = joined(in_processes(3, lambda rank: read_as(server, cache, rank, 3)))
    assert sorted(itertools.chain(*steps)) == [*range(count)]
    asked = collections.Counter(name for name, _ in server.asked if name != "shards.json")
    assert len(asked) == 31 and set(asked.values()) == {1}, "30 shards and the offsets"
    server.asked.clear()
    assert joined(in_processes(2, lambda rank: read_as(server, cache, rank, 2, position=48))) == steps[2:]
    assert {name for name, _ in server.asked} == {"shards.json"}, "the next run reads the cache"


def test_a_small_file_is_right_though_its_download_began_again(monkeypatch):
    """The server knows no ranges, and breaks off at several places: what came before must not stay behind it."""
    monkeypatch.setattr(shard_cache, "TRIES", 6)
    body, cuts = bytes(range(256)) * 40, iter([9000, 3000, 5000, None])

    class Whole(http.server.BaseHTTPRequestHandler):
        def log_message(self, *about):
            pass

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: next(cuts)])

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Whole) as there:
        thread = threading.Thread(target=there.serve_forever)
        thread.start()
        try:
            assert shard_cache.read_whole(f"http://127.0.0.1:{there.server_port}", "shards.json") == body
        finally:
            there.shutdown()
            thread.join()


@pytest.mark.parametrize("processes", [2, 4])
def test_a_small_cache_is_never_over_its_limit_and_loses_no_sample(site, processes):
    """A third of all shards for two processes; for four the room of two shards: they wait for each other."""
    server, cache, count = site
    sizes = {each["name"]: each["bytes"] for each in json.loads((server.root / "shards.json").read_text())["shards"]}
    limit, most = sum(sizes.values()) / 3 if processes == 2 else 2 * max(sizes.values()) + 1, []

    def look():
        with contextlib.suppress(FileNotFoundError), open(cache / "unfinished/room") as room:
            fcntl.flock(room, fcntl.LOCK_EX)  # while one is removed for another, both would be counted
            most.append(sum(path.stat().st_size for path in [*cache.glob("*.*"), *cache.glob("unfinished/*")]))
            fcntl.flock(room, fcntl.LOCK_UN)  # a process that is forked now has a copy of the file

    server.look = look
    ranks = in_processes(processes, lambda rank: read_as(server, cache, rank, processes, gb=limit / 1e9))
    assert sorted(itertools.chain(*joined(ranks))) == [*range(count)]
    assert limit / 2 < max(most) <= limit
    with pytest.raises(LockstepError, match=r"a cache of .*, and a shard has up to .*shards.cache_gb"):
        far(server, cache, gb=1.9 * max(sizes.values()) / 1e9)


def begin_download(server, cache):
    """Start a process that downloads the first shard, and is half way when this returns."""
    child = multiprocessing.get_context("fork").Process(target=lambda: far(server, cache).read([0]))
    child.start()
    assert server.half_way.wait(60)
    return child


def test_what_a_killed_process_has_left_counts_for_nothing(site):
    server, cache, count = site
    goes_on = threading.Event()
    server.trouble = {"0000.tar": [goes_on, None]}
    child = begin_download(server, cache)

    def parts():
        return [path for path in (cache / "unfinished").iterdir() if path.name != "room"]

    assert len(parts()) == 1
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    goes_on.set()
    assert len(parts()) == 1, "the dead process has left it"
    data = far(server, cache)
    assert parts() == [], "the next one has swept it"
    assert ids(data.read(range(count))) == [*range(count)]
    for shard in data.shards:
        assert hashlib.sha256(data.source.path(shard).read_bytes()).hexdigest() == shard.sha256


def test_a_process_waits_for_one_that_downloads_and_takes_over_if_it_dies(site):
    server, cache, _ = site
    goes_on = threading.Event()
    server.trouble = {"0000.tar": [goes_on, None]}
    first = begin_download(server, cache)
    found = []
    second = threading.Thread(target=lambda: found.extend(far(server, cache).read([0])))
    second.start()
    wait_until(lambda: any(line.split()[1] == "->" for line in locks_of(os.getpid())))
    assert not found and [name for name, _ in server.asked].count("0000.tar") == 1
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    second.join(60)
    goes_on.set()
    assert ids(found) == [0]


def test_a_process_that_is_forked_during_a_download_keeps_no_lock(site):
    server, cache, _ = site
    goes_on, over, found = threading.Event(), multiprocessing.get_context("fork").Event(), []
    server.trouble = {"0000.tar": [goes_on]}
    readers = [threading.Thread(target=lambda: found.append(ids(far(server, cache).read([0])))) for _ in range(2)]
    for reader in readers:
        reader.start()
    assert server.half_way.wait(60)
    wait_until(lambda: any(line.split()[1] == "->" for line in locks_of(os.getpid())))
    child = multiprocessing.get_context("fork").Process(target=over.wait, args=(60,))
    child.start()
    goes_on.set()
    for reader in readers:
        reader.join(30)
    stuck = [reader for reader in readers if reader.is_alive()]
    over.set()
    child.join()
    assert not stuck and found == [[0], [0]]


def locks_of(process):
    """The kernel's list: `->` marks who waits."""
    lines = Path("/proc/locks").read_text().splitlines()
    return [line for line in lines if f" {process} " in line and "FLOCK" in line]


def test_a_shard_that_was_damaged_in_the_cache_is_fetched_again(site, capsys):
    server, cache, count = site
    data = far(server, cache)
    data.read(range(count))
    damaged = [data.source.path(data.shards[n]) for n in (3, 5, 8)]
    for path in damaged:
        about = path.stat()
        right = path.read_bytes()
        path.write_bytes(right[:700] + bytes([right[700] ^ 1]) + right[701:])
    os.truncate(damaged[1], about.st_size // 2)
    server.asked.clear()
    assert ids(far(server, cache).read(range(count))) == [*range(count)], "another process checks the digests"
    assert sorted(name for name, _ in server.asked if name.endswith(".tar")) == ["0003.tar", "0005.tar", "0008.tar"]
    # The same process: it was open, and is opened again.
    path = data.source.path(data.shards[3])
    path.write_bytes(b"?" * path.stat().st_size)
    for opened in data.opened.values():
        opened.close()
    data.opened.clear()
    assert ids(data.read(range(count))) == [*range(count)]
    assert sum(name == "0003.tar" for name, _ in server.asked) == 2


def test_the_next_shards_are_there_before_they_are_asked_for(site):
    """By the end of the first batches the shards that come next have been asked for, and no batch waits for them."""
    server, cache, _ = site
    data = far(server, cache, lanes=2, window=9)
    order = data.epoch_order(1, 0)
    data.__getitems__(order[:2].tolist())
    nexts = {name for n in order[:2].tolist() for name in data_names(data, order, n)}
    assert nexts
    wait_until(lambda: all(data.source.path(data.shards[s]).exists() for s in nexts))


def data_names(data, order, number):
    return order.next_shards(int(np.searchsorted(data.ends, number, side="right")), number)


def test_loader_processes_know_the_epoch_and_what_was_checked(sets):
    """They are forked once, and live through all epochs."""
    data, context = Shards(sets["tar"][0]), multiprocessing.get_context("fork")
    begin, out = context.Event(), context.Queue()

    def work():
        begin.wait(60)
        data.read([0])
        out.put(data.now.tolist())

    child = context.Process(target=work)
    child.start()
    data.epoch_order(4, 2)
    begin.set()
    assert out.get(timeout=60) == [4, 3]
    child.join()
    assert data.checked[0] == (sets["tar"][0] / "0000.tar").stat().st_mtime_ns and not data.checked[1]


def test_nothing_is_written_where_all_is_local(sets, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    data = Shards(sets["tar"][0])
    data.read([1])
    assert not (tmp_path / "cache").exists() and "cache" not in data.summary()


# ---- trainings -------------------------------------------------------------------------------------------------------

TASK = """
import torch
from dataclasses import dataclass
from torch import nn
from engine import contract
from engine.config import section
from engine.contract import Loss, Sums
from formats.shards import RESUMABLE, Options, pair


@dataclass
class Settings(contract.Settings):
    shards: Options = section(Options)


def decode(sample):
    n = int(sample["id"])
    return {"x": torch.tensor([n % 7, n % 3, n % 2], dtype=torch.float32), "y": torch.tensor(n % 2)}


class Task(contract.Task):
    Settings = Settings
    resumable_keys = tuple(f"shards.{key}" for key in RESUMABLE)

    def datasets(self):
        self.sets = pair(self.cfg.shards, decode)
        return self.sets

    def summary(self):
        return self.sets[0].summary()

    def model(self):
        return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))

    def loss(self, net, batch):
        return Loss(nn.functional.cross_entropy(net(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))

    def score(self, model, batch):
        losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return Sums(loss=losses, count=torch.tensor(len(batch["y"])))

    def report(self, sums):
        return {"loss": sums["loss"] / sums["count"]}
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    return str(tmp_path / "mine.py")


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, 1])
def test_a_run_ends_where_a_shard_is_broken(launch, site, mine, tmp_path, loaders):
    server, cache, _ = site
    words = [mine, f"shards.root={server.url}", f"shards.cache={cache}", "shards.val_share=0", f"num_workers={loaders}"]
    words += ["epochs=1", "batch_size=8", f"save_dir={tmp_path / 'run'}"]
    path = server.root / "0007.tar"
    with kept(path) as right:
        path.write_bytes(right[:600] + b"?" + right[601:])
        done = launch.python("train.py", *words)
    assert done.code == 5 and len(done.errors) == 1, done.err
    assert done.errors[0].startswith("error: the file cannot be read: its SHA-256 is")
    assert f"({server.url}/0007.tar)" in done.errors[0]
    succeed(launch.python("train.py", *words))


def of_the_sample_task(folder, mine):
    write_shards(folder)
    return [mine, "shards.cache_gb=0.0003"]


def of_the_texts(folder, mine):
    folder.mkdir()
    texts = [part for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) > 40][:600]
    for n in range(30):
        lines = [json.dumps({"text": text}) for text in texts[n::30]]
        (folder / f"{n:02}.jsonl").write_text("\n".join(lines))
    return ["examples/own_text.py", "text.length=16", "model.layers=1", "model.width=16", "model.heads=2"]


def of_the_robot(folder, mine):
    """LeRobot's own files, as they are: pictures of 32 x 32 and numbers."""
    rng = np.random.default_rng(0)
    features = {"observation.state": ("float32", (2,)), "observation.images.top": ("image", (3, 32, 32))}
    with Recorder(folder.parent / "set", 10, features | {"action": ("float32", (2,))}, file_mb=0.06) as recorder:
        for _ in range(30):
            state = rng.normal(size=(12, 2)).astype(np.float32)
            pictures = rng.integers(0, 255, (12, 3, 32, 32), dtype=np.uint8)
            recorder.add_episode(
                {"observation.state": state, "observation.images.top": pictures, "action": state / 2}, "go"
            )
    (folder.parent / "set" / "data").rename(folder)
    return ["examples/own_frames.py", "model.width=16"]


@pytest.mark.slow
@pytest.mark.parametrize("make", [of_the_sample_task, of_the_texts, of_the_robot])
def test_killed_and_resumed_on_other_processes_is_the_same_run(launch, mine, tmp_path, make):
    """From an address, through a cache, with loader processes or none; and straight, from the folder."""
    words = [*make(tmp_path / "set of shards", mine), "shards.lanes=12", "shards.window=9", "steps=60"]
    words += ["global_batch=12", "batch_size=3", "virtual_workers=4", "save_every=5", "log_every=1", "eval_every=30"]
    with served(indexed(tmp_path / "set of shards")) as server:
        killed = [*words, f"shards.root={server.url}", f"shards.cache={tmp_path / 'cache'}"]
        killed += [f"save_dir={tmp_path / 'killed'}"]
        run = launch.start(*launch_words(3), *killed)
        run.wait_for("step 20/", timeout=120)
        os.kill(launch.rank_pid(1), signal.SIGKILL)
        assert run.wait().code
        succeed(launch.torchrun(2, "train.py", *killed, "num_workers=1"))
        assert server.bytes
    straight = [*words, f"shards.root={tmp_path / 'set of shards'}", f"save_dir={tmp_path / 'straight'}"]
    succeed(launch.python("train.py", *straight))
    assert same_bits(weights(tmp_path / "killed"), weights(tmp_path / "straight"))


def launch_words(processes):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "train.py"]
