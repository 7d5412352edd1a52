"""The files that a run leaves to read, as other programs read them."""

import contextlib
import fcntl
import itertools
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import FAULTY, ROOT, TOY, launching, succeed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tasks
from engine import config, errors
from engine.comm.world import World
from engine.contract import LockstepError
from engine.files import run_folder
from engine.record import Record
from engine.report import log
from engine.report.lines import truncate_log
from engine.run import Progress
from plugins.reporting import wandb
from plugins.resilience.stragglers import Straggler
from tools.use.evaluate import of_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of the toy and a small one of video, both finished."""
    folder = tmp_path_factory.mktemp("runs")
    small = ["dataset.size=16", "dataset.trials=61", "dataset.videos=12", "dataset.frames=5", "model.width=4"]
    with launching() as launch:
        done = succeed(launch.python("train.py", TOY, "epochs=3", "log_every=2", f"save_dir={folder / 'toy'}"))
        succeed(launch.python("train.py", "video", *small, "epochs=2", "batch_size=16", f"save_dir={folder / 'video'}"))
    return folder, done


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_metrics_jsonl_has_what_others_rely_on(runs):
    records = lines(runs[0] / "toy")
    train, evals = ([r for r in records if r["event"] == event] for event in ("train", "eval"))
    assert all({"event", "step", "epoch", "samples", "time_s"} <= record.keys() for record in records)
    assert {"loss", "lr", "grad_norm", "samples_per_s", "data_wait_share"} <= train[0].keys()
    assert [r["step"] for r in train] == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert [r["samples"] for r in train] == [24, 48, 61, 85, 109, 122, 146, 170, 183]
    assert [(r["count"], r["epoch"]) for r in evals] == [(23, 0), (23, 1), (23, 2)]
    assert all(a["time_s"] <= b["time_s"] for a, b in itertools.pairwise(records))
    video = next(r for r in lines(runs[0] / "video") if r["event"] == "eval")
    assert {"loss", "accuracy", "macro_f1", "precision/rest", "recall/rest", "f1/paw_withdraw"} <= video.keys()


def test_the_lines_of_the_guide_are_on_the_terminal(runs):
    _, done = runs
    for words in ("Using device: cpu", "Loading data...", "Creating model...", "Starting training..."):
        assert words in done.out
    assert "Epoch 1/3 - Train Loss: 0." in done.out and "| Val Loss: 0." in done.out
    assert "  ✓ Saved best model: best_model_epoch0.pt (Loss: " in done.out
    line = r"\d\d:\d\d:\d\d  step 2/18  epoch 1/3  loss \d.*  \d+ samples/s  data wait \d+%  ETA \d:\d\d:\d\d"
    assert re.search(f"^{line}$", done.out, re.M), "a line per log interval where there is no terminal"
    assert re.search(r" step 18/18 .* ETA 0:00:00$", done.out, re.M)
    assert "\r" not in done.out + done.err, "no bar where there is no terminal"


@pytest.mark.slow
def test_a_terminal_gets_bars(launch, tmp_path):
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))  # rows, columns, pixels
    words = ["har", "dataset.stride=512", "epochs=1", "log_every=1", f"save_dir={tmp_path / 'run'}"]
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    environment = launch.environment(NO_COLOR=None, TERM="xterm")
    with subprocess.Popen([sys.executable, "train.py", *words], cwd=launch.cwd, env=environment, **streams) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed: the process has ended
            while piece := os.read(main, 65536):
                shown += piece
    os.close(main)
    assert process.returncode == 0, shown.decode()
    text = shown.decode()
    for words in ("Epochs:", "Training:", "Validation:", "acc="):
        assert words in text
    rest = text.rpartition("Epochs:")[2]
    assert "1/1" in rest and "100%" in rest and "\nDone: " in rest.replace("\r", ""), "the full bar, above the summary"
    assert "\x1b[32m✓\x1b[0m Saved best model" in text


def test_tensorboard_reads_scalars_pictures_and_hparams(runs):
    folder, _ = runs
    events = EventAccumulator(str(folder / "video" / "logs"), size_guidance={"images": 0})
    events.Reload()
    tags = events.Tags()
    train = {f"train/{name}" for name in ("loss", "lr", "grad_norm", "samples_per_s", "memory_mb")}
    assert train | {"val f1/paw_withdraw", "val/macro_f1", "val/loss"} <= set(tags["scalars"])
    assert any("config" in tag for tag in tags["tensors"])
    assert "val/confusion_matrix" in tags["images"]
    kinds = {events.Images(tag)[-1].encoded_image_string[:4] for tag in tags["images"]}
    assert b"GIF8" in kinds, "a clip is a GIF"
    assert b"\x89PNG" in kinds
    assert [e.step for e in events.Scalars("val/macro_f1")] == [4, 8]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_the_folder_tells_what_was_run(runs):
    folder, _ = runs
    config = yaml.safe_load((folder / "toy" / "config.yaml").read_text())
    assert config["epochs"] == 3 and config["model"]["width"] == 16
    environment = json.loads((folder / "toy" / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["processes"] == 1
    assert environment["command"][0] == "train.py"
    git = [subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
           for words in (["rev-parse", "--verify", "-q", "HEAD"], ["status", "--porcelain"])]  # fmt: skip
    assert [environment["git_commit"] or "", environment["git_dirty"]] == [git[0], bool(git[1])]


def opened(folder, board=False, **more):
    """A log whose only sink is metrics.jsonl, with `board` the trackers, too; and the run that it is of."""
    world, plan = World(0, 0, 1, torch.device("cpu")), SimpleNamespace(epochs=1, total_steps=136)
    task, record = SimpleNamespace(monitor="loss", turns={}), Record()
    job = SimpleNamespace(cfg=config.Config(digest_every=0), plan=plan, world=world, progress=Progress(**more))
    job.task, job.record = task, record
    found = log.Log(folder, job)
    found.sinks, found.bars = found.sinks if board else [found.lines], False
    return found, job


def test_an_evaluation_that_is_made_again_is_in_tensorboard_once(tmp_path):
    """TensorBoard purges whole steps, so the training's numbers of that step are written again."""
    for start, steps in ((0, ("train", "train", "eval", "train")), (2, ("eval", "train"))):
        found, job = opened(tmp_path, board=True, step=start, evaluation_due=start > 0)
        for event in steps:
            job.progress.step += event == "train"
            found._write(event, job, {"loss": float(job.progress.step)})
        found.close()
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    seen = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in ("train/loss", "val/loss")}
    assert seen == {"train/loss": [(1, 1.0), (2, 2.0), (3, 3.0)], "val/loss": [(2, 2.0)]}
    kept = [(line["event"], line["step"]) for line in lines(tmp_path)]
    assert kept == [("train", 1), ("train", 2), ("eval", 2), ("train", 3)]


def test_lines_that_nobody_can_read_are_dropped_and_counted(tmp_path, capfd):
    """A start keeps what the run has logged up to its step, whatever stands in between or at the end."""
    line = '{"event": "%s", "step": %d, "epoch": 0, "samples": 0, "time_s": %d.5}\n'
    trained = line % ("train", 1, 1) + line % ("train", 2, 2)
    good, beyond, torn = trained + line % ("eval", 2, 3), line % ("train", 3, 4), '{"event": "tra'
    odd = ["\xff\xfe\x00", "5", '{"hello": 1}', "[]", "null", '{"event": "train", "step": "two", "time_s": 1}']
    odd = [*odd, "[" * 9999]
    path = tmp_path / "metrics.jsonl"
    warning = f"warning: {len(odd)} lines of {path} cannot be read and are dropped: training continues\n"
    for text, due, expected in (
        ("", False, ("", (0.0, None), "")),
        (good + beyond + torn, False, (good, (3.5, None), "")),
        (good.strip(), False, (good, (3.5, None), "")),  # only its line break is missing
        ("\n".join([*odd, good]), False, (good, (3.5, None), warning)),
        (good + "\n".join([*odd, ""]), False, (good, (3.5, None), warning)),
        (good, True, (trained, (2.5, {}), "")),  # its evaluation is made again
    ):
        path.write_bytes(text.encode("latin-1"))
        found = truncate_log(path, 2, due)
        assert (path.read_text(), found, capfd.readouterr().err) == expected, text[:40]


def test_a_line_that_failed_half_way_spoils_no_other(tmp_path, capfd):
    found, job = opened(tmp_path)
    whole = found.lines.file

    def half(text):
        whole.write(text[:20])
        raise OSError("no room")

    for event, file in (("train", whole), ("train", SimpleNamespace(write=half)), ("eval", whole), ("eval", whole)):
        found.lines.file = file
        found._write(event, job, {})
    found.close()
    first, torn, *rest = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in (first, *rest)] == ["train", "eval", "eval"] and len(torn) == 20
    assert capfd.readouterr().err.count("warning: metrics.jsonl cannot be written") == 1


def test_a_slow_rank_is_named_once_and_again_when_it_changes(tmp_path, capsys):
    found, job = opened(tmp_path)
    errors.set_up(main=True)
    computing, loading = (Straggler(1, 2.0, phase) for phase in ("computing", "data loading"))
    for slow in (
        None,
        computing,
        computing._replace(ratio=1.9),
        None,
        computing,
        loading,
        Straggler(2, 4.0, "computing"),
    ):
        found.straggler(job, slow)
    found.close()
    assert re.sub(r"\d\.\d", "N", capsys.readouterr().out).splitlines() == [
        f"warning: rank {rank} takes N times as long as the others, in {phase}; with virtual_workers, ddp.shares=auto "
        "gives it fewer of them"
        for rank, phase in ((1, "computing"), (1, "data loading"), (2, "computing"))
    ]


def test_the_time_that_is_left_is_told_from_the_steps_since_the_resume(tmp_path, monkeypatch, capsys):
    """Six steps in a minute, and thirty to go."""
    now = [0.0]
    monkeypatch.setattr(log, "time", SimpleNamespace(perf_counter=lambda: now[0], strftime=time.strftime))
    found, job = opened(tmp_path, step=100)
    errors.set_up(main=True)
    job.progress.step, now[0] = 106, 60.0
    found.train(job, {"lr": 0.1, "grad_norm": 1.0, "samples_per_s": 1.0, "data_wait_share": 0.0})
    found.close()
    (said,) = capsys.readouterr().out.splitlines()
    assert " step 106/136 " in said and said.endswith(" ETA 0:05:00")


def test_json_holds_no_nan(launch, tmp_path):
    """Losses that are not finite: skipped steps are counted, the log stays JSON."""
    run = tmp_path / "run"
    fault = ["fault.kind=nan loss", "fault.rank=0", "fault.step=2", "fault.times=2", "drop_last=true"]
    succeed(launch.python("train.py", FAULTY, *fault, "log_every=1", "epochs=1", f"save_dir={run}"))

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    records = [json.loads(line, parse_constant=refuse) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(r.get("skipped_steps", 0) for r in records) > 0
    assert any(r.get("loss") is None for r in records)
    assert all(r["grad_norm"] is None or math.isfinite(r["grad_norm"]) for r in records if r["event"] == "train")


def test_a_new_folder_for_every_run_without_a_name(launch, tmp_path, monkeypatch):
    for _ in range(2):
        succeed(launch.python(str(launch.cwd / "train.py"), TOY, "epochs=1", cwd=tmp_path))
    assert len(list((tmp_path / "checkpoints").glob("toy_*/last.pt"))) == 2
    monkeypatch.chdir(tmp_path)
    names = [run_folder.new_folder(Path("checkpoints"), "toy_now").name for _ in range(3)]
    assert names == ["toy_now", "toy_now-2", "toy_now-3"], "in the same second"


def test_evaluations_may_fall_between_log_lines(launch, tmp_path):
    """And the end is evaluated, wherever it falls; an epoch here has six steps."""
    words = ["eval_every=5", "log_every=10", "save_every=4", "optim.ema_decay=0.5", "epochs=2"]
    succeed(launch.python("train.py", TOY, *words, f"save_dir={tmp_path / 'run'}"))
    records = lines(tmp_path / "run")
    assert [r["step"] for r in records if r["event"] == "eval"] == [5, 10, 12]
    assert [r["step"] for r in records if r["event"] == "train"] == [5, 6, 10, 12]


@pytest.mark.parametrize(
    ("in_the_way", "code", "error"),
    [("run/logs", 3, "the log cannot be opened: FileExistsError"), ("run", 2, "run is not a folder")],
)
def test_a_log_that_cannot_be_opened_is_an_error_in_words(launch, tmp_path, in_the_way, code, error):
    (tmp_path / in_the_way).parent.mkdir(exist_ok=True)
    (tmp_path / in_the_way).write_text("in the way")
    done = launch.torchrun(2, "train.py", TOY, f"save_dir={tmp_path / 'run'}")
    assert len(done.errors) == 1 and error in done.errors[0], done.err
    done = launch.python("train.py", TOY, f"save_dir={tmp_path / 'run'}")
    assert done.code == code and done.err.count("\n") == 1 and error in done.err, done.err


@pytest.mark.slow
def test_wandb_logs_offline(launch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    run = tmp_path / "run"
    words = ["wandb.enable=true", "wandb.project=my-robot-project", "wandb.run_id=abc123"]
    env = {"WANDB_SILENT": "true", "WANDB_MODE": "offline"}
    succeed(launch.torchrun(2, "train.py", TOY, *words, f"save_dir={run}", **env))
    (written,) = run.glob("wandb/offline-run-*/*.wandb")  # of rank 0 alone
    assert written.name == "run-abc123.wandb"
    opened = config.parse(of_run(False, [str(run)]), tasks.load).cfg
    assert not opened.wandb.enable, "to look at a run takes no login"


NO_WANDB = "(wandb.enable): `wandb login`, or WANDB_MODE=offline, or wandb.enable=false"


def test_wandb_without_a_login_is_refused_before_anything_is_loaded(launch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    env = dict.fromkeys(["WANDB_MODE", "WANDB_API_KEY", "NETRC"]) | {"HOME": str(tmp_path)}
    done = launch.python("train.py", TOY, "wandb.enable=true", f"save_dir={tmp_path / 'run'}", **env)
    assert done.code == 2 and done.errors == [f"error: wandb has no login on this machine {NO_WANDB}"], done.err
    assert "Loading data" not in done.out and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("asked", "said", "known", "refused"),
    [
        ("auto", "offline", None, ""),
        ("offline", "online", None, ""),
        ("online", "offline", False, "wandb has no login on this machine"),
        ("auto", "", True, ""),
        ("auto", "", ValueError("the API key is too short"), "wandb: the API key is too short"),
        ("auto", "", "key", ""),  # of a version whose `login` cannot be told not to ask
        ("auto", "", "", "wandb has no login on this machine"),
    ],
)
def test_who_decides_on_wandb(monkeypatch, asked, said, known, refused):
    class Wandb:
        __spec__ = object()
        api = SimpleNamespace(api_key=known)
        setup = staticmethod(lambda: SimpleNamespace(settings=SimpleNamespace(mode=os.environ["WANDB_MODE"] or None)))

        @staticmethod
        def login(prompt, verify):
            if isinstance(known, str):
                raise TypeError("an unexpected argument")
            if isinstance(known, Exception):
                raise known
            return known

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    monkeypatch.setenv("WANDB_MODE", said)
    with pytest.raises(LockstepError) if refused else contextlib.nullcontext() as caught:
        wandb.require(SimpleNamespace(wandb=config.Wandb(enable=True, mode=asked)))
    assert not refused or (str(caught.value), caught.value.exit_code) == (f"{refused} {NO_WANDB}", 2)


@pytest.mark.parametrize(("earlier", "asked", "went"), [("", "", {}), ("", "b", {"id": "b"}), ("a", "b", {"id": "a"})])
def test_what_wandb_is_told_of_a_run(monkeypatch, tmp_path, earlier, asked, went):
    """The run of the checkpoint goes on, before one that is asked for."""
    told = {}
    run = SimpleNamespace(id="new")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: told.update(given) or run))
    words = [f"wandb.run_id={asked}", "wandb.notes=the left arm", "wandb.entity=lab"]
    cfg = config.parse(["har", *words], tasks.load).cfg
    assert wandb.Wandb(cfg, tmp_path / "runs/a", earlier).id == "new"
    assert {name: told[name] for name in ("id", "resume") if name in told} == (
        went | {"resume": "allow"} if went else {}
    )
    assert (told["notes"], told["entity"], told["name"]) == ("the left arm", "lab", "a")


def test_wandb_missing_is_an_error_before_training(launch, tmp_path):
    script = "import sys, train; from plugins.reporting import wandb; wandb.find_spec = lambda name: None; "
    script += "sys.exit(train.main(sys.argv[1:]))"
    done = launch.python("-c", script, TOY, "wandb.enable=true", f"save_dir={tmp_path / 'run'}")
    todo = "error: the package wandb is not installed (wandb.enable): pip install wandb"
    assert done.code == 2 and done.errors == [todo], done.err
    assert not (tmp_path / "run").exists()


STORE = "mlflow.uri=file:"


def in_mlflow(store):
    """The only run of a store: (its data, its state, {metric: steps}, its pictures), read by the package itself."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    client = mlflow.MlflowClient(f"file:{store}")
    (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
    number = run.info.run_id
    steps = {name: [m.step for m in client.get_metric_history(number, name)] for name in run.data.metrics}
    folders = [each.path for each in client.list_artifacts(number, "pictures")]
    pictures = [each.path for folder in folders for each in client.list_artifacts(number, folder)]
    return run.data, run.info.status, steps, pictures


@pytest.mark.slow
def test_mlflow_has_a_run_that_was_killed_and_resumed_once(launch, tmp_path, monkeypatch):
    """Steps that are taken again after a kill are not logged again: MLflow would show both."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run, store = tmp_path / "run", tmp_path / "store"
    words = [
        "mlflow.enable=true",
        f"{STORE}{store}",
        "mlflow.experiment=lab",
        "log_every=1",
        "epochs=1",
        "save_every=2",
    ]
    words += ["global_batch=12", f"save_dir={run}"]
    died = launch.python("train.py", FAULTY, *words, "fault.kind=raise", "fault.rank=0", "fault.step=4")
    assert died.code == 1 and in_mlflow(store)[1] == "FAILED", died.err
    assert in_mlflow(store)[2]["train/loss"] == [1, 2, 3]
    succeed(launch.torchrun(2, "train.py", FAULTY, *words, "--force", "fault.kind,fault.rank,fault.step"))
    data, state, steps, _ = in_mlflow(store)
    total = lines(run)[-1]["step"]
    assert state == "FINISHED" and steps["train/loss"] == [*range(1, total + 1)], steps
    assert data.params["optim.lr"] == str(yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"])
    ours = [line for line in lines(run) if line["event"] == "eval"]
    assert steps["val/loss"] == [line["step"] for line in ours] and data.metrics["val/loss"] == ours[-1]["loss"]


@pytest.mark.slow
def test_pictures_and_names_of_classes_are_in_mlflow(launch, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    words = ["dataset.trials=40", "dataset.videos=8", "dataset.size=16", "dataset.frames=4", "epochs=1", "device=cpu"]
    words += ["mlflow.enable=true", f"{STORE}{tmp_path / 'store'}", "mlflow.experiment=lab"]
    succeed(launch.python("train.py", "video", *words, f"save_dir={tmp_path / 'run'}"))
    _, _, steps, pictures = in_mlflow(tmp_path / "store")
    assert "val f1/paw_withdraw" in steps and {Path(path).name for path in pictures} >= {
        "clips.gif",
        "confusion_matrix.png",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uri", "error"),
    [("nowhere://x", "mlflow cannot be started"), ("file:/proc/nowhere", "mlflow cannot be started")],
)
def test_a_store_that_cannot_be_reached_ends_the_run_before_its_first_step(launch, tmp_path, uri, error):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    done = launch.python("train.py", TOY, "mlflow.enable=true", f"mlflow.uri={uri}", f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and len(done.errors) == 1 and error in done.errors[0], done.err
    assert "set mlflow.uri or MLFLOW_TRACKING_URI" in done.errors[0] and not (tmp_path / "run" / "last.pt").exists()


def test_mlflow_missing_is_an_error_before_training(launch, tmp_path):
    script = "import sys, train; from plugins.reporting import mlflow; mlflow.find_spec = lambda name: None; "
    script += "sys.exit(train.main(sys.argv[1:]))"
    done = launch.python("-c", script, TOY, "mlflow.enable=true", f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and "the package mlflow is not installed (mlflow.enable): pip install" in done.errors[0]
    assert not (tmp_path / "run").exists()
