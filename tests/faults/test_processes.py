"""Real processes that are killed, frozen, stopped or fail: how the run ends, what it says, what it leaves.

Every run here is `./train_multigpu.sh`, on CPUs. What breaks comes from tests/tasks/faulty.py or from signals.
"""

import multiprocessing
import os
import re
import signal
import sys
import tempfile
from typing import NamedTuple

import pytest
import torch
from conftest import FAULTY, ROOT, TOY, by_hand, free_port, launching, succeed, wait_until
from runs import progress, records, same_bits, status, weights

from engine.data.samples import Fetcher, Request
from engine.errors import LockstepError
from plugins.resilience import failure_report, scratch
from tests.tasks.faulty import FAULTS

TIMEOUT = "ddp.timeout_s=2"
LONG = ["epochs=100000", "log_every=5"]


def words_of(kind, folder, *more):
    return [FAULTY, f"fault.kind={kind}", f"save_dir={folder}", *more]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def fail(launch, folder):
    """Return a function that runs the faulty task in two processes, or alone, without torchrun."""

    def run(kind, *more, alone=False, **how):
        words = words_of(kind, folder, *more)
        return launch.python("train.py", *words, "fault.rank=0") if alone else launch.launcher(2, *words, **how)

    return run


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()], ids=repr)
def test_a_loader_process_that_is_gone_is_no_damaged_sample(error):
    """What this process meets first depends on the moment; the dataset's own such error comes as text."""

    def fetched(error):
        raise error
        yield

    fetcher = Fetcher([{"x": torch.zeros(2)}] * 9)
    with pytest.raises(RuntimeError, match=r"^DataLoader worker was killed, or has ended$") as gone:
        fetcher.get(Request([7]), fetched(error))
    said = str(failure_report.to_user_error(gone.value, None))
    assert said.startswith(
        "a loader process failed: DataLoader worker was killed, or has ended (engine/data/samples.py"
    )
    assert "fewer num_workers" in said
    own = type(error)("Caught it in DataLoader worker process 0.\nOriginal Traceback\nEOFError: short file")
    with pytest.raises(LockstepError, match=r"^sample 7 cannot be loaded: EOFError: short file"):
        fetcher.get(Request([7]), fetched(own))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_one_rank_fails(launch, fail, folder, kind):
    """All processes end, one line says who and where, the exit code says what, the run's status holds both."""
    expected = FAULTS[kind]
    if kind == "worker killed":
        launch.may_stay.append("torch_")
    done = fail(kind, "save_every=2", *expected.settings.split())
    assert done.code == expected.code, done.err
    assert len(done.errors) == 1 and re.search(expected.line, done.errors[0]), done.err
    assert "Traceback" not in done.err + done.out, "the traceback is in error.txt"
    if expected.step is None:
        assert not (folder / "status.json").exists()
        return
    now = status(folder)
    assert (now["state"], now["exit_code"], f"error: {now['reason']}") == ("failed", expected.code, done.errors[0])
    kept = progress(now["checkpoint"])["step"] if now["checkpoint"] else 0
    assert now["step"] == kept == expected.step
    if expected.traceback:
        assert expected.traceback in (folder / "error.txt").read_text()
    if kind in ("freeze", "hang", "hang in validation"):
        stacks = (folder / "stacks.txt").read_text()
        assert "==== rank 0" in stacks and done.err.count("warning: rank 1") == 1
        assert ("in misbehave" in stacks) == (kind == "hang"), "a frozen process cannot tell its stack"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "freeze", "raise"])
def test_rank_0_fails(fail, folder, kind):
    """The one that keeps the status is the dead one: another writes it, and knows of the last checkpoint."""
    done = fail(kind, TIMEOUT, "fault.rank=0", "save_every=1")
    assert done.code == (1 if kind == "raise" else 6) and len(done.errors) == 1 and "rank 0" in done.errors[0], done.err
    now = status(folder)
    assert now["state"] == "failed" and now["step"] in (1, 2)
    assert progress(now["checkpoint"])["step"] == now["step"]


def test_rank_0_is_killed_before_the_folder_exists(fail, folder):
    """There is no status to write, nor to take over from it. Where torchrun ends rank 1 before it has noticed, torchrun
    says it."""
    done = fail("kill in data", "fault.rank=0")
    assert done.code in (6, 128 + signal.SIGKILL) and len(done.errors) == 1, done.err
    assert re.match(r"error: rank 0 (died without an error|\(process \d+\) was killed by SIGKILL)", done.errors[0])
    assert "Traceback" not in done.err and not folder.exists()


def test_whoever_reports_a_rank_0_that_never_had_a_folder():
    from plugins.resilience.status import Status

    status = Status()
    status.adopt()
    status.update(state="failed", exit_code=6, reason="rank 0 is gone")
    assert status.folder is None and status.fields == {}


def last_lines(done):
    return "\n".join(done.err.splitlines()[-10:])


@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_under_plain_torchrun(launch, folder, processes):
    """torchrun flattens the exit code and adds its table, which ends with the rank that it has seen to end first. The
    processes' one line is in the table, too: each rank writes the first cause."""
    words = words_of("raise", folder, f"fault.rank={processes - 1}")
    done = launch.torchrun(processes, "train_ddp.py", *words)
    assert done.code == 1 and len(done.errors) == 1 and "ZeroDivisionError" in done.errors[0]
    assert done.errors[0] in last_lines(done), done.err
    assert "To enable traceback" not in done.err
    now = status(folder)
    assert now["exit_code"] == 1 and f" --standalone --nproc_per_node={processes} train_ddp" in now["resume_command"]


IN_TABLE = {
    # what ends a run under plain torchrun: (a word of its line in torchrun's table, the task's settings, more)
    "kill": ("rank 1 died without an error message", "fault.kind=kill"),
    "a typing error": ("unknown key 'epochz'", "epochz=3"),
    "no model": ("there is no such model", "fault.kind=no model"),
    "diverged": ("the training has diverged", "fault.kind=nan loss", "fault.step=1", "fault.times=100", "steps=3"),
    "stopped": ("no error: the run was stopped; resume with ", "fault.kind=term"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", IN_TABLE)
def test_what_torchruns_table_says(launch, folder, what):
    word, *settings = IN_TABLE[what]
    done = launch.torchrun(2, "train_ddp.py", FAULTY, f"save_dir={folder}", *settings)
    table = done.err[done.err.index("train_ddp.py FAILED") :]
    assert done.code == 1 and word in table, done.err
    assert "To enable traceback" not in table


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_launchers_last_line_is_the_error(launch, folder, processes):
    words = words_of("raise", folder, f"fault.rank={processes - 1}")
    done = launch.launcher(processes, *words)
    assert done.err.splitlines()[-1] == done.errors[0], done.err


def test_a_single_process_fails_in_the_same_words(launch, fail, tmp_path):
    done = fail("raise", alone=True)
    assert done.code == 1 and len(done.err.splitlines()) == 1 and "faulty.py" in done.errors[0], done.err
    debug = launch.python("train.py", *words_of("raise", tmp_path / "other", "fault.rank=0", "--debug"))
    assert "Traceback" in debug.err and debug.errors == [done.errors[0].replace("/run/", "/other/")]


@pytest.mark.slow
def test_a_single_process_does_not_wait_for_a_loader_that_hangs(fail):
    """A loader process ignores SIGTERM, and Python would join it at the end."""
    done = fail("worker hangs", "num_workers=1", "loader_timeout_s=1", alone=True)
    assert done.code == 5 and "timed out after 1.0 seconds" in done.errors[0]
    assert done.err.splitlines() == done.errors[:1]


@pytest.mark.slow
def test_a_single_process_that_hangs_tells_where(launch, folder):
    run = launch.start(sys.executable, "train.py", *words_of("hang", folder, TIMEOUT, "fault.rank=0"))
    run.wait_for("warning: forward has taken ")
    assert "in misbehave" in (folder / "stacks.txt").read_text()
    run.signal(signal.SIGKILL)
    assert run.wait().code == -signal.SIGKILL


def test_links_planted_in_a_run_folder_lead_nowhere(fail, folder, tmp_path):
    """Each file of a run takes the place of the link; what it led to is as it was, or not there as before."""
    folder.mkdir()
    names = ["error.txt", "status.json", "metrics.jsonl", "config.yaml", "environment.json", "last.pt"]
    for name in names:
        (folder / name).symlink_to(tmp_path / f"of {name}")
    (tmp_path / "of error.txt").write_text("somebody's own")
    assert fail("raise", "save_every=1", "log_every=1", alone=True).code == 1
    assert [path.name for path in tmp_path.iterdir() if path != folder] == ["of error.txt"]
    assert (tmp_path / "of error.txt").read_text() == "somebody's own"
    assert "ZeroDivisionError" in (folder / "error.txt").read_text() and records(folder, "train")
    assert os.readlink(folder / "last.pt") == "step_2.pt" and status(folder)["exit_code"] == 1


@pytest.mark.parametrize("name", ["logs", "wandb", "trace.json"])
def test_a_link_that_leads_out_of_a_run_folder_is_refused(launch, folder, tmp_path, name):
    """TensorBoard, wandb and the profiler would write where it leads to; a link within the folder is the user's."""
    outside = tmp_path / "outside"
    folder.mkdir(), outside.mkdir(), (folder / "inside").mkdir()
    (folder / name).symlink_to(outside)
    words = ["train.py", FAULTY, "steps=1", f"save_dir={folder}"]
    done = launch.python(*words)
    (error,) = done.errors
    expected = f"{name} is a link that leads out of the folder, to {outside} ({folder}): remove it"
    assert done.code == 2 and expected in error
    assert not [*outside.iterdir()] and {path.name for path in folder.iterdir()} == {name, "inside"}
    if name == "logs":
        (folder / name).unlink(), (folder / name).symlink_to("inside")
        succeed(launch.python(*words))
        assert [*(folder / "inside").iterdir()]


def test_pictures_that_fail_lose_no_training(fail, folder):
    done = fail("raise in pictures", alone=True)
    assert done.code == 1 and len(done.errors) == 1 and "an error in the pictures" in done.errors[0]
    now = status(folder)
    assert now["step"] == 6 and progress(now["checkpoint"])["evaluation_due"] is True


# ---- restarts ----


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The weights of 2 processes that nothing happened to."""
    run = tmp_path_factory.mktemp("straight")
    with launching() as launch:
        succeed(launch.launcher(2, *words_of("", run, "save_every=1")))
    return weights(run)


RESTARTS = [(kind, rank) for kind in ("raise", "hang", "worker killed once") for rank in (0, 1)] + [("kill", 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [*RESTARTS, pytest.param("kill", 1, marks=pytest.mark.real)])
def test_a_restart_joins_and_ends_in_the_same_weights(launch, fail, folder, tmp_path, straight, kind, rank):
    """Eight restarts, all of which must join: torchrun's own do in one of six, see CONTRIBUTING.md."""
    more = ["save_every=1", TIMEOUT, "ddp.init_timeout_s=30", f"fault.rank={rank}"]
    if kind == "worker killed once":
        more += ["num_workers=1"]
        # Torch's loader opens files to see whether there are descriptors left; its process may be ended meanwhile.
        launch.may_stay += ["tmp", "torch_"]
    done = succeed(fail(kind, *more, f"fault.once={tmp_path / 'once'}", TORCHRUN_ARGS="--max-restarts=2"))
    assert "Started again by torchrun: restart 1 of 2" in done.out
    assert same_bits(weights(folder), straight) and status(folder)["state"] == "done"


@pytest.mark.slow
def test_a_restart_finds_the_folder_that_nobody_named(launch, tmp_path, straight):
    (tmp_path / "here").mkdir()
    words = [FAULTY, "fault.kind=kill", "save_every=1", f"fault.once={tmp_path / 'once'}"]
    how = {"PYTHON": sys.executable, "TORCHRUN_ARGS": "--max-restarts=1", "cwd": tmp_path / "here"}
    done = succeed(launch.start(str(ROOT / "train_multigpu.sh"), "2", *words, **how).wait(100))
    (run,) = (tmp_path / "here" / "checkpoints").iterdir()
    assert f"Resuming checkpoints/{run.name}/" in done.out
    assert same_bits(weights(run), straight)
    assert status(run)["resume_command"].endswith(f" --save-dir=checkpoints/{run.name}")


@pytest.mark.slow
def test_a_restart_resumes_from_its_own_checkpoint(launch, folder, tmp_path, straight):
    """Not from the other run's, where resume= let it begin."""
    begun, run = tmp_path / "begun", folder
    more = ["save_every=1", "schedule.horizon=9", f"fault.once={tmp_path / 'once'}"]
    succeed(launch.launcher(2, *words_of("kill", begun, "steps=2", *more)))
    words = words_of("kill", run, f"resume={begun}", *more)
    done = succeed(launch.launcher(2, *words, TORCHRUN_ARGS="--max-restarts=1"))
    assert f"Resuming {begun}/" in done.out and f"Resuming {run}/" in done.out
    assert same_bits(weights(run), straight)
    assert status(run)["resume_command"].endswith(f" save_dir={run} {' '.join(more)}"), "it says no resume="


def two_nodes(launch, *words, **how):
    """Two launchers on this machine, one process each, meeting at a free port."""
    meeting = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [launch.start_launcher(1, *words, NODE_RANK=str(node), **meeting, **how) for node in (0, 1)]


@pytest.mark.slow
def test_a_restart_of_two_nodes(launch, folder, tmp_path, straight):
    words = words_of("kill", folder, "save_every=1", TIMEOUT, f"fault.once={tmp_path / 'once'}")
    for node in two_nodes(launch, *words, TORCHRUN_ARGS="--max-restarts=2"):
        succeed(node.wait(120))
    assert same_bits(weights(folder), straight)


@pytest.mark.slow
def test_a_frozen_process_is_killed_by_another_rank(launch, folder):
    """Its own torchrun sees nothing wrong, and would wait for ever."""
    done = [node.wait(60) for node in two_nodes(launch, *words_of("freeze", folder, TIMEOUT))]
    assert done[0].code == 6 and len(done[0].errors) == 1 and "rank 1 gives no sign of life" in done[0].errors[0]
    assert done[1].code != 0 and "was killed by SIGKILL" in done[1].err, done[1].err


@pytest.mark.slow
def test_a_stop_or_a_bad_config_is_not_restarted(launch, fail):
    done = fail("term", TORCHRUN_ARGS="--max-restarts=3")
    assert done.code == 75 and "Started again" not in done.out
    done = launch.launcher(2, TOY, "dataset.samples=0", TORCHRUN_ARGS="--max-restarts=3")
    assert done.code == 2 and len(done.errors) == 1 and "Started again" not in done.out


# ---- stops ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [f"{name} to launcher" for name in ("SIGTERM", "SIGHUP", "SIGUSR1")]
    + ["SIGTERM to rank 1", "SIGTERM to everybody", "SIGINT to everybody"],
)
def test_a_signal_stops_all_ranks_after_the_same_step(launch, folder, sent):
    """One checkpoint, exit code 75, and the same command resumes. Everybody is each process by itself, the loader's
    included, as Slurm signals them; the ranks get it from torchrun, too."""
    words = [TOY, f"save_dir={folder}", *LONG, "num_workers=1"]
    run = launch.start_launcher(2, *words)
    run.wait_for("Saved best model")
    name, _, to = sent.partition(" to ")
    number = getattr(signal, name)
    if to == "rank 1":
        os.kill(launch.rank_pid(1), number)
    else:
        launch.signal_all(number) if to == "everybody" else run.signal(number)
    done = run.wait(40)
    assert done.code == 75 and not done.errors, done.err
    assert done.err.count("stopping after this step") == (number == signal.SIGINT), "one of the ranks says so"
    now = status(folder)
    assert now["state"] == "stopped" and name in now["reason"]
    assert weights(folder) and f"Stopped after step {now['step']} of" in done.out
    after = done.out[done.out.index("\nStopped after") :]
    assert len(after.splitlines()) <= 5 and "  resume with  ./train_multigpu.sh 2 " in after
    if to == "everybody":
        done = succeed(launch.launcher(2, TOY, f"save_dir={folder}", "num_workers=1", f"steps={now['step'] + 1}"))
        assert f"Resuming {now['checkpoint']}: step {now['step']}," in done.out


FORKS = """
import os, signal
from plugins.resilience.signals import StopRequest
stop = StopRequest()
stop.install_handlers()
if not (loader := os.fork()):
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(0)
print(os.waitpid(loader, 0)[1])
os.kill(os.getpid(), signal.SIGINT)
print(stop.reason)
"""


def test_a_loader_that_has_just_been_forked_says_nothing_of_a_signal(launch):
    """It holds its rank's handlers until it sets its own."""
    done = succeed(launch.python("-c", FORKS))
    assert done.out == "0\nSIGINT\n" and done.err.count("stopping after this step") == 1


SLOW = """
import os, sys, time
import train
from engine.errors import console
from plugins.resilience.signals import StopRequest
ready, install, info = sys.argv.pop(), StopRequest.install_handlers, console.info
def slowly(self):
    if os.environ["RANK"] == "1":
        time.sleep(1)  # what is slow
        open(ready, "w").close()
    install(self)
def said(text):
    info(f"{text} READY {os.path.exists(ready)}" if text.startswith("Starting") else text)
StopRequest.install_handlers, console.info = slowly, said
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_every_rank_takes_signals_when_rank_0_says_that_it_starts(launch, folder, tmp_path):
    """A rank that was slow to get there died of a signal to the whole run, which then ended with an error."""
    (tmp_path / "slow.py").write_text(SLOW)
    words = [str(tmp_path / "slow.py"), TOY, "steps=1", f"save_dir={folder}", str(tmp_path / "ready")]
    assert "READY True" in succeed(launch.torchrun(2, *words)).out


@pytest.mark.slow
def test_a_signal_to_one_rank_breaks_off_the_validation_of_all(fail, folder):
    """Rank 1 gets it in its first batch of very many: rank 0 must not go through its own to the end."""
    done = fail("term in validation", TIMEOUT, "dataset.val_samples=1000000", "eval_batch_size=1")
    assert done.code == 75 and not done.errors, done.err
    now = status(folder)
    kept = progress(now["checkpoint"])
    assert (now["state"], now["step"], kept["step"]) == ("stopped", 3, 3) and kept["evaluation_due"]


@pytest.mark.slow
def test_a_time_limit_stops_the_run(launch, folder):
    done = launch.python("train.py", TOY, f"save_dir={folder}", "epochs=100000", "max_time=2")
    assert done.code == 75 and "max_time_s is over" in done.out
    assert status(folder)["exit_code"] == 75


@pytest.mark.slow
def test_a_second_ctrl_c_quits_at_once(launch, folder):
    """The first one waits for a step that takes an hour; SIGINT is ignored at the start, as a shell does after `&`."""
    words = words_of("hang", folder, "fault.rank=0", "fault.step=30", "save_every=5", "log_every=1")
    run = launch.start(sys.executable, "train.py", *words, "epochs=1000", ignored=(signal.SIGINT,))
    run.wait_for("step 29/")
    wait_until(lambda: progress(folder / "last.pt")["step"] >= 25, 60)  # a thread writes it
    before = weights(folder)
    run.signal(signal.SIGINT)
    run.wait_for("stopping after this step; Ctrl-C again quits at once")
    run.signal(signal.SIGINT)
    done = run.wait(10)
    assert done.code == 130 and "quitting at once; the last checkpoint is as it was" in done.err
    assert "Traceback" not in done.err
    assert same_bits(weights(folder), before)


@pytest.mark.slow
def test_a_ctrl_c_that_arrives_twice_is_one(launch, folder):
    """A rank gets it from whoever signals all processes, and from torchrun: here both in the middle of one step."""
    words = words_of("slow", folder, "fault.rank=0", "fault.seconds=2", "log_every=1")
    run = launch.start_launcher(2, *words)
    run.wait_for("Starting training")
    rank_0 = launch.rank_pid(0)
    run.wait_for("step 2/")
    os.kill(rank_0, signal.SIGINT)
    run.wait_for("stopping after this step")
    os.kill(rank_0, signal.SIGINT)
    done = run.wait(40)
    assert done.code == 75 and not done.errors and "quitting at once" not in done.err, done.err
    assert (status(folder)["state"], status(folder)["step"]) == ("stopped", 3)


def test_ctrl_c_before_the_first_step_leaves_nothing(launch, folder):
    words = words_of("hang in data", folder, "fault.rank=0")
    run = launch.start(sys.executable, "train.py", *words)
    run.wait_for("Loading data...")
    run.signal(signal.SIGINT)
    done = run.wait(10)
    assert done.code == -signal.SIGINT and not done.err and not folder.exists()


@pytest.mark.real
@pytest.mark.slow
def test_ranks_whose_torchrun_is_killed_stop_by_themselves(launch, folder):
    run = launch.start_launcher(2, TOY, f"save_dir={folder}", *LONG, "num_workers=1")
    run.wait_for("Saved best model")
    ranks = [launch.rank_pid(rank) for rank in (0, 1)]
    run.signal(signal.SIGKILL)
    assert run.wait().code == -signal.SIGKILL
    wait_until(lambda: not {*ranks} & {*launch.left_behind()}, 15)
    now = status(folder)
    assert (now["state"], now["reason"]) == ("stopped", "torchrun is gone")
    assert "Stopped after step" in run.said()


@pytest.mark.slow
def test_loader_processes_die_with_their_rank(launch, folder):
    """Even one that hangs, and torch's own watchdog would not notice. Nobody is left to remove the folder of their
    sockets; under the launcher torchrun's agent does."""
    launch.may_stay += ["lockstep_", "torch_"]
    words = words_of("worker hangs", folder, "fault.rank=0", "num_workers=2", "loader_timeout_s=600")
    run = launch.start(sys.executable, "train.py", *words)
    run.wait_for("Starting training")
    wait_until(lambda: len(launch.left_behind()) == 5, 20)  # two for training, two for validation
    run.signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not launch.left_behind(), 3)


# ---- numbers that are not finite ----


@pytest.mark.slow
def test_steps_with_nan_are_skipped_by_all_ranks_together(fail, folder):
    """Weights and BatchNorm's statistics are those of a run that took the other steps alone; step, rank and samples
    are logged."""
    more = "fault.step=2 fault.times=2 save_every=1 keep_checkpoints=99 log_every=1".split()
    done = succeed(fail("nan loss", *more))
    skipped = records(folder, "skipped")
    assert [line["skipped_step"] for line in skipped] == [2, 3]
    assert all(list(line["ranks"]) == ["1"] and len(line["ranks"]["1"]) >= 6 for line in skipped)
    assert "warning: step 2 skipped: the loss is not finite (rank 1, samples " in done.out
    assert "), but each of these samples is: look at the loss" in done.out
    states = [torch.load(folder / f"step_{n}.pt", weights_only=True)["model"] for n in (1, 2)]
    assert same_bits(*states)
    assert all(value.isfinite().all() for value in weights(folder).values())
    assert any("running_mean" in name for name in states[0])
    train = {line["step"]: line for line in records(folder, "train")}
    assert train[2]["loss"] is None and train[2]["skipped_steps"] == 1, "a skipped step has no loss"
    assert train[4]["loss"] > 0 and all(line["loss"] is not None for line in records(folder, "eval"))


UNFIT = "had a gradient that is not finite"


class Divergence(NamedTuple):
    """Settings, and the begin of what follows `the training has diverged: ` in the error."""

    settings: str
    why: str
    kind: str = "nan loss"
    processes: int = 1


DIVERGES = {
    "no step counts": Divergence(
        "steps=3", f"3 steps, all there were, {UNFIT} (step 3): there is no checkpoint yet; lower lr or grad_clip"
    ),
    "bad weights": Divergence(
        "max_skipped_steps=3 save_every=1",
        f"3 steps in a row {UNFIT} (step 3): layers.0.bias is not finite itself",
        kind="nan weights",
    ),
    "two ranks": Divergence(
        "fault.step=4 max_skipped_steps=5 epochs=10 save_every=1",
        f"5 steps in a row {UNFIT} (step 8): the last checkpoint holds",
        processes=2,
    ),
    "fp16": Divergence(
        "max_skipped_steps=0 amp=fp16 epochs=20 drop_last=true", "the loss scale of fp16 has fallen to 0.0009"
    ),
}


@pytest.mark.parametrize("what", DIVERGES)
def test_a_run_that_can_only_skip_ends(fail, folder, what):
    """It names the weights where no sample is to blame: a checkpoint of those is of no use."""
    case = DIVERGES[what]
    settings = ["fault.times=1000", *case.settings.split()]
    if "fault.step" not in case.settings:
        settings.append("fault.step=1")
    done = fail(case.kind, *settings, alone=case.processes == 1)
    (error,) = done.errors
    assert done.code == status(folder)["exit_code"] == 4, done.err
    assert f"the training has diverged: {case.why}" in error
    if case.processes == 2:
        assert all(value.isfinite().all() for value in weights(folder).values())


@pytest.mark.slow
@pytest.mark.parametrize("more", [["batch_size=1"], ["num_workers=1"], ["cache=host"]], ids=" ".join)
def test_a_sample_with_nan_is_named(fail, folder, more):
    """Among those of its pass, once an epoch. The second time there is advice; the end counts the steps, those before
    a stop, too."""
    found = "sample 7 has NaN in x"
    advice = ", again: repair it or leave it out of the dataset, or this step is lost in"
    for epochs, count, begins in ((2, 2, [found, f"{found}{advice} each epoch"]), (3, 3, [found])):
        done = succeed(fail("nan sample", "max_skipped_steps=2", *more, f"epochs={epochs}", alone=True))
        assert [line.partition(" skipped: ")[2] for line in done.out.splitlines() if "warning: step" in line] == begins
        assert f"steps ({count} of them skipped), {61 * epochs} samples" in done.out
    assert [line["found"] for line in records(folder, "skipped")] == [{"7": "NaN in x"}] * 3


@pytest.mark.slow
def test_each_rank_looks_into_its_own_samples(fail, folder):
    done = succeed(fail("nan sample", "epochs=1", "batch_size=6"))
    (skipped,) = records(folder, "skipped")
    assert [7 in samples for samples in skipped["ranks"].values()] == [True], "of one rank alone"
    assert skipped["found"] == {"7": "NaN in x"} and "skipped: sample 7 has NaN in x\n" in done.out


# ---- what stays open ----

STAYS_OPEN = """
import atexit, gc, io, socket, sys, threading
import train

def is_open(each):
    if isinstance(each, io.FileIO):
        return not each.closed and each.closefd
    return isinstance(each, socket.socket) and each.fileno() >= 0

def all_open():
    return [each for each in gc.get_objects() if is_open(each)]

PATCH
before = all_open()
code = train.main(sys.argv[1:])
atexit._run_exitfuncs()
gc.unfreeze()
gc.collect()
for each in all_open():
    if all(each is not other for other in before):
        print("stays open:", each)
for thread in threading.enumerate():
    if not thread.daemon and thread is not threading.main_thread():
        print("still runs:", thread)
print("looked, code", code)
"""

NO_TRACKER = """
from engine import hooks
from engine.errors import LockstepError
def opened(*about):
    raise LockstepError("no tracker")
hooks.sinks.add(opened)
"""


class End(NamedTuple):
    code: int
    kind: str = ""
    settings: str = ""


ENDS = {
    # how a single process ends
    "done": End(0),
    "stopped": End(75, "term"),
    "diverged": End(4, "nan loss", "fault.step=1 fault.times=1000 max_skipped_steps=2"),
    "raise": End(1, "raise"),
    "raise in data": End(1, "raise in data"),
    "raise in validation": End(1, "raise in validation"),
    "a sample": End(5, "corrupt sample"),
    "a loader process": End(5, "corrupt sample", "num_workers=1"),
    "out of memory": End(1, "out of memory"),
    "exit": End(1, "exit"),
    "no such step to record": End(2, settings="record=100000"),
    "no tracker": End(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_no_file_stays_open_however_a_run_ends(launch, folder, how):
    """A file that nobody closes is a ResourceWarning at the end of the process, and a log that may lack its end."""
    code, kind, more = ENDS[how]
    program = STAYS_OPEN.replace("PATCH", NO_TRACKER if how == "no tracker" else "")
    words = words_of(kind, folder, "fault.rank=0", "log_every=1", "epochs=2", *more.split())
    done = launch.python("-c", program, *words)
    assert f"looked, code {code}\n" in done.out, done.err
    assert not re.findall("stays open: .*|still runs: .*", done.out), done.err


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("how", ["done", "raise"])
def test_an_interpreter_that_looks_for_open_files_finds_none(launch, folder, how):
    code, kind, more = ENDS[how]
    words = words_of(kind, folder, "fault.rank=0", "log_every=1", "epochs=2", *more.split())
    done = launch.python("-X", "dev", "-W", "always::ResourceWarning", "train.py", *words)
    assert done.code == code and "ResourceWarning" not in done.err, done.err


# ---- who is slow ----


@pytest.mark.slow
def test_a_slow_rank_is_named_with_its_phase(fail):
    done = succeed(fail("slow", "fault.seconds=0.1", "fault.step=1", "fault.times=1000", "epochs=15"))
    assert re.search(r"warning: rank 1 takes \d+.\d times as long as the others, in computing", done.out), done.out
    assert "rank 0 takes" not in done.out


# ---- full disks ----


A_FULL_LOG = """
import sys, train
from engine.report import log
begin = log.Log.__init__
def full(self, *about):
    begin(self, *about)
    self.lines.file.close()
    self.lines.file = open("/dev/full", "a", buffering=1)
log.Log.__init__ = full
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_log_that_cannot_be_written_costs_one_warning(launch, folder):
    """The training ends well, its checkpoints are there."""
    done = succeed(launch.python("-c", A_FULL_LOG, TOY, "log_every=1", f"save_dir={folder}"))
    assert done.err.count("warning: metrics.jsonl cannot be written") == 1 and "No space left" in done.err
    assert status(folder)["state"] == "done" and weights(folder)


def test_tensorboard_on_a_full_disk_costs_a_warning_and_no_traceback(launch, folder):
    """It writes in a thread of its own, whose errors nobody else sees."""
    (folder / "logs").mkdir(parents=True)
    words = ["train.py", TOY, "epochs=5", "log_every=1", "save_every=4", f"save_dir={folder}"]
    done = succeed(launch.on_a_small_disk(folder / "logs", "4k", *words))
    assert "warning: TensorBoard cannot be written" in done.err and "No space left" in done.err
    assert all(line.startswith("warning: ") for line in done.err.splitlines()), done.err
    assert len(done.err.splitlines()) == 1 and status(folder)["state"] == "done"


FULL = "/dev/shm is full (the loader's processes): give it more (docker run --shm-size=8g)"
READ_ONLY = "/dev/shm cannot be used: Read-only file system (the loader's processes): mount it so that"


@pytest.mark.parametrize(("size", "said"), [("4k", FULL), ("64k", FULL), ("64k,ro", READ_ONLY)])
def test_a_dev_shm_without_room_is_named_with_the_cure(launch, folder, size, said):
    """4k has room for nothing; 64k for the loader's semaphores, but for no batch."""
    words = ["train.py", TOY, "batch_size=60", "num_workers=2", f"save_dir={folder}"]
    done = launch.on_a_small_disk("/dev/shm", size, *words)
    assert done.code == 5 and done.err.splitlines() == done.errors, done.err
    assert done.errors[0].startswith(f"error: {said}") and "num_workers=0" in done.errors[0]


def test_no_folder_for_temporary_files_is_named_with_the_cure(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_SCRATCH", raising=False)
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(LockstepError, match=r"loader processes: No usable .* \(TMPDIR\): mount one .* num_workers=0"):
        scratch.own_scratch()


@pytest.mark.parametrize("length", [2, 60])
def test_loader_processes_of_a_long_tmpdir_deliver(launch, tmp_path, length):
    """A socket's path has at most 107 bytes: with a longer one no batch would arrive."""
    place = tmp_path / ("x" * length)
    place.mkdir()
    words = [TOY, "steps=2", "num_workers=1", f"save_dir={tmp_path / 'run'}"]
    done = succeed(launch.python("train.py", *words, TMPDIR=str(place)))
    assert "Done: 2 steps" in done.out and not [*place.iterdir()]


# ---- who can read it ----


def test_a_run_tells_no_secrets_and_obeys_the_umask(launch, folder):
    words = ["-c", "import os, sys; os.umask(0o027); import train; sys.exit(train.main(sys.argv[1:]))", TOY]
    succeed(launch.python(*words, f"save_dir={folder}", WANDB_API_KEY="open-sesame", HF_TOKEN="open-sesame"))
    files = [path for path in folder.rglob("*") if not path.is_symlink()]
    assert len(files) > 6 and {path.stat().st_mode & 0o777 for path in (folder, *files) if path.is_dir()} == {0o750}
    assert {path.stat().st_mode & 0o777 for path in files if path.is_file()} == {0o640}
    assert not [path for path in files if path.is_file() and b"open-sesame" in path.read_bytes()]


# ---- who can reach it ----


def test_a_single_process_needs_no_network(launch, folder):
    """Its group of one makes nothing of gloo's, which would look for an interface."""
    succeed(launch.python("train.py", TOY, "steps=2", f"save_dir={folder}", GLOO_SOCKET_IFNAME="nowhere"))


def test_ranks_that_join_by_different_backends_are_told(launch, folder):
    """Started by hand: torchrun gives all of them the same words."""
    words, port = ["train.py", TOY, f"save_dir={folder}"], free_port()
    ranks = [
        launch.start(sys.executable, *words, f"ddp.backend={backend}", **by_hand(rank, port))
        for rank, backend in enumerate(("auto", "gloo"))
    ]
    done = [rank.wait() for rank in ranks]
    assert [each.code for each in done] == [6, 6]
    assert done[0].errors == [
        "error: rank 1 joins with gloo, rank 0 with shm (ddp.backend): start the same command on all of them"
    ]
    assert not folder.exists()
