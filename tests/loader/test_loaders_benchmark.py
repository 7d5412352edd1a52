"""What `benchmarks/loaders.py` counts, of a loader that loses and repeats known samples."""

import os
import signal
import sys

import pytest
from conftest import ROOT, succeed

sys.path.insert(0, str(ROOT / "benchmarks"))

import loader_kinds
import loaders
from loader_kinds import Data, Kind


class Known(Kind):
    """Deals the samples in their order. Resumed, it leaves out the next `lost`, and ends with the first `twice`."""

    lost, twice = 0, 0

    def __init__(self, data, place, reach):
        self.data, self.place, self.step, self.numbers = data, place, 0, [*range(data.count)]

    def __iter__(self):
        (self.data.folder / "tar" / "index.json").read_text()  # no shard
        batch, rank, size = self.place.global_batch, self.place.rank, self.place.processes
        for start in range(0, len(self.numbers), batch):
            self.step += 1
            mine = self.numbers[start : start + batch][rank::size]
            for number in mine:
                with open(self.data.tars[number // self.data.per_shard], "rb"):
                    pass
            if mine:
                yield [(number, self.data.payload(number)) for number in mine]

    def state(self):
        return {"rank": self.place.rank, "seen": self.step * self.place.global_batch}

    def load(self, state):
        (self.data.folder / f"{self.place.rank} has the state of").write_text(str(state["rank"]))
        self.numbers = [
            *range(state["seen"] + self.lost, self.data.count),
            *(number % self.data.count for number in range(self.twice)),
        ]


@pytest.fixture
def data(tmp_path):
    """Ten shards of five samples."""
    made = Data(tmp_path, count=50, size=16, per_shard=5)
    Kind.write(made)
    (tmp_path / "tar" / "index.json").write_text("{}")
    return made


@pytest.mark.parametrize(
    ("lost", "twice", "same", "batches", "shards"),
    [
        (0, 0, (6, 6), [6, 6, 5], [3]),  # 18 to 49, six a step: the last one has two, and rank 2 none of them
        (4, 0, (0, 6), [5, 5, 5], []),  # 22 to 49
        (0, 7, (5, 7), [7, 7, 7], [0, 1, 3]),
        (1, 2, (0, 6), [6, 6, 6], [0, 3]),
        (0, 60, (5, 16), [16, 16, 15], [0, 1, 2, 3]),  # ten of them for the third time
    ],
)
def test_what_a_loader_loses_and_repeats_is_counted(data, lost, twice, same, batches, shards):
    kind = type("Given", (Known,), {"lost": lost, "twice": twice})
    found = loaders.resumed(kind, data, before=2, after=3, batch=6, steps=3)
    again = sum(os.path.getsize(data.tars[shard]) for shard in shards)
    assert found == loaders.Found(lost, twice, same, again, batches)
    given = [(data.folder / f"{rank} has the state of").read_text() for rank in range(3)]
    assert given == ["0", "1", "0"]


def test_an_epoch_is_compared_with_that_of_another_number_of_processes(data):
    assert loaders.whole(Known, data, 3) == loaders.Found(0, 0, (5, 5), 0, [5, 5, 4])


def end_by(how):
    class Ends(Known):
        def __iter__(self):
            if self.place.rank == 0:  # the one that is heard first
                how()
            yield from super().__iter__()

    return Ends


def refuse():
    raise ValueError("not on 2\nprocesses")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (refuse, "rank 0: ValueError: not on 2"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 0: died"),
        (signal.pause, "rank 0: no end after 1 s"),
    ],
)
def test_a_rank_that_does_not_come_to_its_end_is_a_result(data, how, why, monkeypatch):
    if how is signal.pause:
        monkeypatch.setattr(loaders, "PATIENCE_S", 1.0)
    assert loaders.ranks(end_by(how), data, 2, 12).error == why
    assert loaders.cells(why) == f"– | – | none: {why} | –"


def test_a_sample_with_the_bytes_of_another_is_no_sample(data):
    class Mixed(Known):
        def __iter__(self):
            for (first, held), *rest in super().__iter__():
                yield [(first + 1, held), *rest]

    assert loaders.ranks(Mixed, data, 1, 6).error == "rank 0: AssertionError: a sample has another's bytes"


def test_a_loader_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(loader_kinds.WebDataset, "needs", "no_such_module")
    names = [kind.name for kind in loaders.chosen(["webdataset", "12 lanes"])]
    assert "webdataset" not in names and "Lockstep, 12 lanes" in names
    assert (
        "webdataset is not measured: no_such_module is not installed (--install prints how)" in capsys.readouterr().out
    )


@pytest.mark.slow
@pytest.mark.real
def test_the_tables_of_our_own_loader(launch):
    done = succeed(launch.python("benchmarks/loaders.py", "--only", "Lockstep,", "--rounds", "1"))
    rows = [[*map(str.strip, line.split("|")[1:-1])] for line in done.out.splitlines() if line.startswith("| Lockstep")]
    epochs, cases = 2 * len(loaders.PROCESSES), 2 * len(loaders.CASES)  # of 12 lanes, and of virtual workers
    assert len(rows) == epochs + cases + 1
    for row in rows[:epochs]:
        assert row[2:5] == ["0", "0", "168 of 168"]
    for row, (_, after, batch, steps) in zip(rows[epochs:-1], 2 * loaders.CASES, strict=True):
        left = -(-2015 // batch) - steps
        if batch % after and "lanes" in row[0]:
            assert row[5] == "none: rank 0: LockstepError: global_batch=16 does not divide by 3 processes"
        else:
            assert row[2:7] == [str(batch), "0", "0", f"{left} of {left}", f"{left} each"]
    assert float(rows[-1][2]) > 0
