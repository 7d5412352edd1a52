"""The seal on what the processes of a run tell each other: whose notes are believed, and who knows the secret."""

import pytest
import torch.distributed as dist

from engine.comm import session
from engine.comm.world import World
from engine.errors import LockstepError
from plugins.resilience import oom
from plugins.resilience.store_client import Failure, StoreClient
from plugins.security import agent as security_agent
from plugins.security import listen, sign
from plugins.security.sign import SignedStore


@pytest.fixture(autouse=True)
def nobody_has_written():
    sign.warn_of_other_writers.cache_clear()


def test_only_the_notes_of_this_run_are_read(capfd):
    store = dist.HashStore()
    mine, theirs, stranger = (
        SignedStore(store, b"key"),
        SignedStore(store, b"key"),
        SignedStore(store, b"another run's"),
    )
    theirs.set("a", "1")
    assert mine.get("a") == b"1"
    store.set("b", store.get("a"))  # the note under another name
    stranger.set("c", "1")
    store.set("d", b"\xff")
    assert [mine.get(name) for name in "bcd"] == [None] * 3
    stranger.set("a", "2")
    assert mine.get("a") == b"1", "what it was, where this process has read that"
    assert capfd.readouterr().err.count("warning: a note in the store is not this run's") == 1
    for written in ("", "c", "d"):  # a stranger who is first silences nobody
        name = written or "e"
        assert mine.compare_set(name, "", "mine") == theirs.compare_set(name, "", "theirs") == b"mine"


SAYS = Failure(1, "x", 3).__dict__
SMALLER = {"global_batch": 12, "batch_size": 2, "gradient_accumulation_steps": 0}
"""What each rank would try where memory runs out."""


@pytest.mark.parametrize(
    ("note", "told"),
    [
        (SAYS, Failure(1, "x", 3)),
        (SAYS | {"exit_code": 0}, Failure(1, "x", 1)),
        (SAYS | {"exit_code": 75}, Failure(1, "x", 1)),
        (SAYS | {"text": "\x1b]0;owned\x07\x9b2J" + "x" * 10_000}, Failure(1, ("]0;owned2J" + "x" * 10_000)[:3997], 3)),
        (SAYS | {"details": "x" * 9000}, Failure(1, "x", 3, "x" * 9000)),
        (SAYS | {"again": SMALLER}, Failure(1, "x", 3, again=SMALLER)),
        *((SAYS | {"again": SMALLER | odd}, Failure(1, "x", 3)) for odd in ({"task": "evil.py"}, {"batch_size": 1})),
        (SAYS | {"again": {"global_batch": 7}}, Failure(1, "x", 3)),
        (SAYS | {"rank": "1"}, None),
        ({"text": "x"}, None),
        ([], None),
        (None, None),
    ],
)
def test_a_note_may_change_little(note, told, monkeypatch):
    """Where memory runs out the others do what each of them has computed itself, and only where the run shrinks."""
    batches = {"training": oom.PassBatch(4, SMALLER), "evaluation": oom.PassBatch(4, {})}
    monkeypatch.setattr(oom.advice, "next_batch", batches)
    monkeypatch.setattr(oom.advice, "restart", True)
    notes = StoreClient(World(1, 1, 2, None), 5.0, SignedStore(dist.HashStore(), b"key"))
    assert notes.set_if_absent("failure", note) and notes.first_cause() == told
    monkeypatch.setattr(oom.advice, "restart", False)
    assert told is None or notes.first_cause().again == {}
    notes.thread.shutdown()


@pytest.mark.parametrize("found", ["no JSON", "[]", "[1]", '{"beats": 1}', "7"])
def test_a_note_without_form_ends_no_watch(found):
    store = SignedStore(dist.HashStore(), b"key")
    for key in ("failure", "stop", "beat0", "dump"):
        store.set(key, found)
    notes = StoreClient(World(0, 0, 1, None), 5.0, store)
    assert notes.first_cause() is None and notes.beats() == {} and notes.get_if_present("stop") is None
    notes.thread.shutdown()


def test_who_knows_the_secret(tmp_path, monkeypatch):
    for name in (sign.SECRET, sign.SECRET_FILE, "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert sign.secret(True) == b"", "who has none"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "1" / "error.json"))
    made = sign.secret(True)
    assert len(made) == 64 and sign.secret(True) == made and sign.secret(False) == b""
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    monkeypatch.setenv(sign.SECRET_FILE, str(file))
    assert sign.secret(False) == made, "of several machines"
    short, none = tmp_path / "short", str(tmp_path / "none")
    short.write_text("short"), short.chmod(0o600), file.chmod(0o640)
    for variable, value, problem in [
        (sign.SECRET_FILE, str(file), "is not this user's alone"),
        (sign.SECRET_FILE, str(short), "holds 5 bytes"),
        (sign.SECRET_FILE, none, "cannot be read"),
        (sign.SECRET, "of the launcher", "LOCKSTEP_SECRET holds 15 bytes"),
    ]:
        monkeypatch.setenv(variable, value)
        with pytest.raises(LockstepError, match=problem):
            sign.secret(False)
    monkeypatch.setenv(sign.SECRET, "of the launcher.")
    assert sign.secret(False) == b"of the launcher."


def test_a_text_for_the_next_attempt(monkeypatch):
    """But not one of a stranger's, nor where there is no store."""
    for store in (None, SignedStore(dist.HashStore(), b"key")):
        monkeypatch.setattr(session.session, "job_store", store)
        assert session.recall("folder") == ""
        session.remember("folder", "run")
        assert session.recall("folder") == ("run" if store else "")
    SignedStore(store.store, b"another run's").set("other", "evil")
    assert session.recall("other") == ""


@pytest.mark.parametrize(
    ("host", "stands_for", "one_machine", "address"),
    [
        ("localhost", ["127.0.0.1"], True, "127.0.0.1"),
        ("one", ["10.0.0.1"], True, "127.0.0.1"),
        ("127.0.0.2", ["127.0.0.2"], False, None),  # the loopback, as the own name on Debian
        ("two", ["10.0.0.1", "10.0.0.2"], False, None),
        ("none", OSError, False, None),
        ("203.0.113.9", ["203.0.113.9"], False, "127.0.0.3"),  # translated on the way
    ],
)
def test_where_a_store_listens(monkeypatch, host, stands_for, one_machine, address):
    def found(*_, **__):
        if stands_for is OSError:
            raise OSError("no such name")
        return [(0, 0, 0, "", (each, 0)) for each in stands_for]

    monkeypatch.setattr(security_agent.socket, "getaddrinfo", found)
    monkeypatch.setattr(listen, "way_to", lambda host: ("127.0.0.3", "eth1"))
    listener = listen._listen(host, 0, one_machine)
    assert (listener and listener.getsockname()[0]) == address
    if listener:
        with listener, pytest.raises(RuntimeError, match="Address already in use"):
            listen._listen(host, listener.getsockname()[1], one_machine)
