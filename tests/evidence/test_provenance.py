"""tools/provenance.py against what a training itself notes down, batch by batch, and against RFC 6962."""

import csv
import hashlib
import json
from collections import Counter

import numpy as np
import pytest
from conftest import TOY, succeed
from runs import progress

import tasks
from engine import config
from tools.evidence.provenance import holds, merkle, use_hash

TOOL = "tools/provenance.py"

NOTES = """
import json
from pathlib import Path

from engine import contract, global_loss
from tests.tasks import toy


class Data(toy.Waves):
    def __init__(self, *given):
        super().__init__(*given)
        self.sources = [f"mouse {n % 5}" for n in range(len(self))]


class Task(toy.Task):
    classes = ["low", "high"]

    def datasets(self):
        return Data(61, 0), Data(23, 1)

    def loss(self, net, batch):
        now = global_loss.current_pass
        if isinstance(now, tuple) and not now[1].empty:  # no trial, no padding
            run, given = now[0], batch["lockstep"]
            with open(Path(__file__).with_name(f"seen_{run.world.rank}"), "a") as file:
                for position, index in zip(given.position.tolist(), given.index.tolist()):
                    print(run.progress.step + 1, run.progress.epoch, position, index, file=file)
        return super().loss(net, batch)
"""


@pytest.fixture
def noting(tmp_path):
    (tmp_path / "noting.py").write_text(NOTES)
    return str(tmp_path / "noting.py")


def told(launch, *words):
    done = succeed(launch.python(TOOL, *map(str, words), "--json"))
    return json.loads(done.out)


def table(path):
    with open(path) as file:
        return [*csv.DictReader(file)]


# ---- the tree ----

LEAVES = [bytes.fromhex(text) for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657",
          "606162636465666768696a6b6c6d6e6f")]  # fmt: skip
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
"""Of the first 0 to 8 leaves: the vectors that certificate-transparency's own tests use."""


def sha256(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def naive(hashes):
    """RFC 6962, 2.1, word by word."""
    if len(hashes) < 2:
        return hashes[0] if hashes else sha256()
    half = 1
    while 2 * half < len(hashes):
        half *= 2
    return sha256(b"\x01", naive(hashes[:half]), naive(hashes[half:]))


def test_the_tree_is_that_of_the_rfc():
    hashes = [sha256(b"\x00", leaf) for leaf in LEAVES]
    assert [merkle(hashes[:n])[0].hex() for n in range(9)] == ROOTS


def test_every_audit_path_leads_to_the_root_and_no_other_does():
    digest = [sha256(bytes([n])) for n in range(21)]
    for count in range(1, 22):
        leaves = [use_hash(digest[n], n // 7, n % 7) for n in range(count)]
        for n in range(count):
            root, path = merkle(iter(leaves), n)
            assert root == naive(leaves)
            proof = {"digest": digest[n].hex(), "epoch": n // 7, "position": n % 7, "leaf": n, "leaves": count}
            proof |= {"root": root.hex(), "path": [node.hex() for node in path]}
            assert holds(proof)
            wrong = [{"digest": sha256(b"other").hex()}, {"epoch": 9}, {"position": 9}, {"leaf": count}]
            wrong += [{"root": sha256().hex()}, {"path": [*proof["path"], sha256().hex()]}]
            wrong += [{"path": proof["path"][:-1]}, {"path": proof["path"][::-1]}] if len({*path}) > 1 else []
            assert not any(holds(proof | change) for change in wrong)


# ---- a run ----

MORE = {
    "shuffle": [],
    "balanced": ["sampler=balanced", "drop_last=true"],
    "exclude": ["exclude=mouse 2,mouse 3,sample:5", "cache=host"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_the_list_is_what_the_training_has_seen(launch, tmp_path, noting, case):
    """Stopped in the middle of an epoch and resumed on two processes; the root is recomputed by hand."""
    words = [noting, "log_every=1", "device=cpu", "schedule.horizon=20", f"save_dir={tmp_path / 'run'}", *MORE[case]]
    succeed(launch.train(*words, "steps=8", "batch_size=12"))
    first = told(launch, tmp_path / "run" / "last.pt")
    succeed(launch.train(*words, "steps=15", "batch_size=6", processes=2))
    found = told(launch, tmp_path / "run" / "last.pt", "--list", tmp_path / "seen.csv", "--proof", 1)
    rows = table(tmp_path / "seen.csv")
    noted = [line for path in tmp_path.glob("seen_?") for line in path.read_text().splitlines()]
    ours = [tuple(map(int, line.split())) for line in noted]
    theirs = [tuple(int(row[name]) for name in ("step", "epoch", "position", "sample")) for row in rows]
    assert theirs == sorted(ours) and len(ours) == found["uses"] == found["leaves"]
    assert found["step"] == 15 == progress(tmp_path / "run" / "last.pt")["step"]
    # Counts, by themselves.
    data = tasks.load(noting)(config.parse([noting], tasks.load).cfg).datasets()[0]
    times = Counter(sample for *_, sample in ours)
    so_far = Counter()
    for row, (*_, sample) in zip(rows, theirs, strict=True):
        so_far[sample] += 1
        expected = data.sources[sample], ["low", "high"][data.labels[sample]], str(so_far[sample])
        assert (row["source"], row["class"], row["times"]) == expected
    assert found["never"] == [n for n in range(61) if not times[n]]
    early = {sample for *_, sample in theirs[: first["uses"]]}
    assert first["never"] == [n for n in range(61) if n not in early] and bool(found["never"]) == (case == "exclude")
    for kind, names in (("sources", data.sources), ("classes", [["low", "high"][n] for n in data.labels])):
        assert [*found[kind]] == sorted({*names})
        for name, about in found[kind].items():
            mine = [n for n in range(61) if names[n] == name]
            uses = [use for use in sorted(ours) if use[3] in mine]
            assert (about["samples"], about["uses"]) == (len(mine), len(uses))
            assert about["seen"] == sum(times[n] > 0 for n in mine)
            assert (about["fewest"], about["most"]) == (min(times[n] for n in mine), max(times[n] for n in mine))
            if uses:
                ends = {"step": uses[0][0], "epoch": uses[0][1]}, {"step": uses[-1][0], "epoch": uses[-1][1]}
                assert (about["first"], about["last"]) == ends
    if case == "exclude":
        assert all(found["sources"][f"mouse {n}"]["uses"] == 0 for n in (2, 3)) and not times[5]
        assert "first" not in found["sources"]["mouse 2"]

    # The root.
    def digest(n):
        parts = []
        for name in ("mask", "x", "y"):
            value = getattr(data, name)[n : n + 1]
            content = f"{tuple(value.shape)} {value.dtype}".encode() + value.numpy().tobytes()
            parts += [len(name).to_bytes(8, "big"), name.encode(), len(content).to_bytes(8, "big"), content]
        return sha256(*parts)

    places = [(epoch, position, sample) for _, epoch, position, sample in theirs]
    leaves = [sha256(b"\0", digest(n), epoch.to_bytes(8, "big"), at.to_bytes(8, "big")) for epoch, at, n in places]
    assert found["root"] == naive(leaves).hex()
    assert first["root"] == naive(leaves[: first["leaves"]]).hex() and first["leaves"] < found["leaves"]
    proof = found["proof"]
    assert holds(proof) and proof["digest"] == digest(1).hex() and proof["leaf"] == [n for *_, n in places].index(1)


@pytest.mark.slow
def test_partners_in_mixtures_were_seen_too(launch, tmp_path):
    """In a dataset with sources that are left out, which are partners of nobody."""
    text = NOTES.replace("return Data(61, 0), Data", "train = Data(61, 0)\n        "
                         "return Mixed(train, 0.5, self.kept(train)), Data")  # fmt: skip
    text = text.replace("from engine import", "from formats.lab.mixup import Mixed\nfrom engine import")
    text = text.replace(
        "        return super().loss",
        """            own = Data(61, 0).x
            with open(Path(__file__).with_name("seen_0"), "a") as file:
                for position, x2, share in zip(given.position.tolist(), batch["x2"], batch["share"].tolist()):
                    if share < 1:
                        other = int((own == x2).all(1).nonzero())
                        print(run.progress.step + 1, run.progress.epoch, position, other, file=file)
        return super().loss""",
    )
    (tmp_path / "mixing.py").write_text(text)
    words = [str(tmp_path / "mixing.py"), "device=cpu", "steps=8", "batch_size=12", "exclude=mouse 2"]
    succeed(launch.train(*words, f"save_dir={tmp_path / 'run'}"))
    found = told(launch, tmp_path / "run" / "last.pt", "--list", tmp_path / "seen.csv", "--proof", 1)
    theirs = [tuple(int(row[name]) for name in ("step", "epoch", "position", "sample")) for row in
              table(tmp_path / "seen.csv")]  # fmt: skip
    ours = [tuple(map(int, line.split())) for line in (tmp_path / "seen_0").read_text().splitlines()]
    assert sorted(theirs) == sorted(ours) and len(ours) == found["leaves"] > 100 and holds(found["proof"])
    assert found["sources"]["mouse 2"]["uses"] == 0


def test_without_contents_no_sample_but_those_of_the_fingerprint_is_read(launch, tmp_path, noting):
    """And in words for a person: what is printed of a run with a skipped step and borrowed weights."""
    words = [noting, "device=cpu", "steps=6", "log_every=1"]
    succeed(launch.train(*words, f"save_dir={tmp_path / 'a'}"))
    alone = int(np.random.default_rng((0, 0)).permutation(61)[60])
    more = [f"exclude=sample:{alone}", f"init_from={tmp_path / 'a'}"]
    succeed(launch.train(*words, *more, f"save_dir={tmp_path / 'b'}"))
    done = succeed(launch.python(TOOL, str(tmp_path / "b" / "last.pt"), "--no-contents"))
    lines = done.out.splitlines()
    assert lines[0].endswith("last.pt, step 6 (epoch 0, position 61), global batch 12:")
    assert lines[1:5] == [
        "  60 of 61 samples seen, 60 times together",
        f"  1 never seen ({alone}); 1 of them excluded",
        "  1 step moved no weight: 6; samples of such steps count as seen",
        f"  the weights began as those of {tmp_path / 'a'}: what these had seen is not counted",
    ]
    assert "  root  " not in done.out and not done.err


@pytest.mark.slow
def test_what_is_refused(launch, tmp_path, noting):
    run = tmp_path / "run"
    words = [noting, "device=cpu", "log_every=1", "schedule.horizon=20", f"save_dir={run}"]
    succeed(launch.train(*words, "steps=3"))
    code = (tmp_path / "noting.py").read_text()

    def error(*more, of="last.pt"):
        done = launch.python(TOOL, str(run / of), *more)
        assert done.code and not done.out and len(done.errors) == 1, done.err
        return done.errors[0]

    assert "sample 61 was never seen (--proof): give one that was" in error("--proof", "61")
    assert "a proof is of contents (--no-contents)" in error("--proof", "1", "--no-contents")
    assert "cannot write the list: No such file or directory" in error("--list", str(tmp_path / "no" / "l.csv"))
    assert not (tmp_path / "no").exists()
    (tmp_path / "noting.py").write_text(code.replace("Data(61, 0)", "Data(61, 5)"))
    assert "the data are not those of the checkpoint (" in error() and "say where they lie" in error()
    (tmp_path / "noting.py").write_text(code)
    succeed(launch.train(*words, "steps=5", "seed=1", "--force", "seed"))
    assert "the run was changed by --force on its way, so one order does not tell what it has seen (seed: 0" in error()


@pytest.mark.parametrize(("sampler", "words"), [("shuffle", []), ("balanced", ["sampler=balanced"])])
def test_a_dataset_without_sources_still_has_its_counts(launch, tmp_path, sampler, words):
    succeed(launch.train(TOY, "device=cpu", "steps=9", f"save_dir={tmp_path / 'run'}", *words))
    found = told(launch, tmp_path / "run" / "last.pt", "--no-contents")
    assert found["sources"] is None and [*found["classes"]] == ["0", "1"]
    assert found["uses"] == 61 + 36 and (found["most"] > 2) == (sampler == "balanced")
