"""The files that a run leaves to read, as other programs read them."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import FAULTY, ROOT, TOY, launching, succeed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tasks
from engine import config
from engine.comm.world import World
from engine.contract import LockstepError
from engine.metrics import Straggler
from engine.report import log
from engine.run import Progress
from tools.evaluate import of_run


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


def test_metrics_jsonl_has_what_others_rely_on(runs):
    folder, _ = runs
    records = lines(folder / "toy")
    for record in records:
        assert {"event", "step", "epoch", "samples", "time_s"} <= record.keys()
    train = [r for r in records if r["event"] == "train"]
    assert {"loss", "lr", "grad_norm", "samples_per_s", "data_wait_share"} <= train[0].keys()
    assert [r["step"] for r in train] == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert [r["samples"] for r in train] == [24, 48, 61, 85, 109, 122, 146, 170, 183]
    evals = [r for r in records if r["event"] == "eval"]
    assert [r["count"] for r in evals] == [23, 23, 23] and [r["epoch"] for r in evals] == [0, 1, 2]
    assert all(a["time_s"] <= b["time_s"] for a, b in itertools.pairwise(records))


def test_video_evaluations_hold_the_tasks_metrics(runs):
    evals = [r for r in lines(runs[0] / "video") if r["event"] == "eval"]
    assert {"loss", "accuracy", "macro_f1", "precision/rest", "recall/rest", "f1/paw_withdraw"} <= evals[0].keys()


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
    import fcntl
    import os
    import pty
    import struct
    import subprocess
    import sys
    import termios

    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))  # rows, columns, pixels
    command = [
        sys.executable,
        "train.py",
        "har",
        "dataset.stride=512",
        "epochs=1",
        "log_every=1",
        f"save_dir={tmp_path / 'run'}",
    ]
    environment = launch.environment(NO_COLOR=None, TERM="xterm")
    with subprocess.Popen(
        command, cwd=launch.cwd, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        shown = b""
        try:
            while piece := os.read(main, 65536):
                shown += piece
        except OSError:
            pass  # the other end is closed: the process has ended
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
    scalars = {
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "train/samples_per_s",
        "train/memory_mb",
        "val f1/paw_withdraw",
        "val/macro_f1",
        "val/loss",
    }
    assert scalars <= set(tags["scalars"])
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


def test_lines_that_nobody_can_read_are_dropped_and_counted(tmp_path, capsys):
    """A start keeps what the run has logged up to its step, whatever stands in between or at the end."""
    line = '{"event": "%s", "step": %d, "epoch": 0, "samples": 0, "time_s": %d.5}\n'
    good = line % ("train", 1, 1) + line % ("train", 2, 2) + line % ("eval", 2, 3)
    path = tmp_path / "metrics.jsonl"

    def taken_back(text, evaluation_due=False):
        path.write_bytes(text.encode("latin-1"))
        found = log._take_back(path, 2, evaluation_due)
        return path.read_text(), found, capsys.readouterr().err

    beyond, torn = line % ("train", 3, 4), '{"event": "tra'
    assert taken_back("") == ("", (0.0, None), "")
    assert taken_back(good + beyond + torn) == (good, (3.5, None), "")
    assert taken_back(good.strip()) == (good, (3.5, None), ""), "only its line break is missing"
    odd = [
        "\xff\xfe\x00",
        "5",
        '{"hello": 1}',
        "[]",
        "null",
        '{"event": "train", "step": "two", "time_s": 1}',
        "[" * 9999,
    ]
    warning = f"warning: {len(odd)} lines of {path} cannot be read and are dropped: training continues\n"
    assert taken_back("\n".join([*odd, good])) == (good, (3.5, None), warning)
    assert taken_back(good + "\n".join([*odd, ""])) == (good, (3.5, None), warning)
    without = line % ("train", 1, 1) + line % ("train", 2, 2)
    assert taken_back(good, evaluation_due=True) == (without, (2.5, {}), ""), "it is made again"


def test_a_line_that_failed_half_way_spoils_no_other(tmp_path, capsys):
    job = SimpleNamespace(cfg=config.Config(), plan=SimpleNamespace(epochs=1), progress=Progress())
    opened = log.Log(tmp_path, job)
    opened.writer = io.BytesIO()  # TensorBoard's is not asked
    opened._record("train", job, {})
    whole = opened.lines

    def half(text):
        whole.write(text[:20])
        raise OSError("no room")

    opened.lines = SimpleNamespace(write=half)
    opened._record("train", job, {})
    opened.lines = whole
    for _ in range(2):
        opened._record("eval", job, {})
    opened.close()
    first, torn, *rest = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in (first, *rest)] == ["train", "eval", "eval"] and len(torn) == 20
    assert capsys.readouterr().err.count("warning: metrics.jsonl cannot be written") == 1


def test_a_slow_rank_is_named_once_and_again_when_it_changes(tmp_path):
    job = SimpleNamespace(cfg=config.Config(), plan=SimpleNamespace(epochs=1), progress=Progress())
    opened = log.Log(tmp_path, job)
    said = []
    opened.say = said.append
    computing, loading = (Straggler(1, 2.0, phase) for phase in ("computing", "data loading"))
    for found in (
        None,
        computing,
        computing._replace(ratio=1.9),
        None,
        computing,
        loading,
        Straggler(2, 4.0, "computing"),
    ):
        opened.slow(job, found)
    assert [re.sub(r"\d\.\d", "N", line) for line in said] == [
        f"  warning: rank {rank} takes N times as long as the others, in {phase}"
        for rank, phase in ((1, "computing"), (1, "data loading"), (2, "computing"))
    ]
    opened.close()


def test_the_time_that_is_left_is_told_from_the_steps_since_the_resume(tmp_path, monkeypatch):
    """Six steps in a minute, and thirty to go."""
    world, now = World(0, 0, 1, torch.device("cpu")), [0.0]
    monkeypatch.setattr(log, "time", SimpleNamespace(perf_counter=lambda: now[0], strftime=time.strftime))
    monkeypatch.setattr(log.Log, "_scalars", lambda *about: None)
    job = SimpleNamespace(cfg=config.Config(), plan=SimpleNamespace(epochs=1, total_steps=136), world=world)
    job.progress = Progress(step=100)
    opened, said = log.Log(tmp_path, job), []
    opened.say, opened.writer, opened.bars = said.append, io.BytesIO(), False
    job.progress.step, now[0] = 106, 60.0
    opened.train(job, {"lr": 0.1, "grad_norm": 1.0, "samples_per_s": 1.0, "data_wait_share": 0.0})
    opened.close()
    assert " step 106/136 " in said[0] and said[0].endswith(" ETA 0:05:00")


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


def test_a_new_folder_for_every_run_without_a_name(launch, tmp_path):
    for _ in range(2):
        succeed(launch.python(str(launch.cwd / "train.py"), TOY, "epochs=1", cwd=tmp_path))
    assert len(list((tmp_path / "checkpoints").glob("toy_*/last.pt"))) == 2


def test_two_runs_of_the_same_second_have_two_folders(tmp_path, monkeypatch):
    from engine.files import run_folder

    monkeypatch.chdir(tmp_path)
    assert [run_folder.new_folder(Path("checkpoints"), "toy_now").name for _ in range(3)] == [
        "toy_now",
        "toy_now-2",
        "toy_now-3",
    ]


def test_evaluations_may_fall_between_log_lines(launch, tmp_path):
    """And the end is evaluated, wherever it falls; an epoch here has six steps."""
    words = ["eval_every=5", "log_every=10", "save_every=4", "optim.ema_decay=0.5", "epochs=2"]
    succeed(launch.python("train.py", TOY, *words, f"save_dir={tmp_path / 'run'}"))
    records = lines(tmp_path / "run")
    assert [r["step"] for r in records if r["event"] == "eval"] == [5, 10, 12]
    assert [r["step"] for r in records if r["event"] == "train"] == [5, 6, 10, 12]


def test_a_log_that_cannot_be_opened_is_an_error_in_words(launch, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("in the way")
    done = launch.torchrun(2, "train.py", TOY, f"save_dir={tmp_path / 'run'}")
    assert len(done.errors) == 1 and "the log cannot be opened" in done.errors[0], done.err


def test_a_folder_that_cannot_be_made_is_an_error_in_words(launch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = launch.python("train.py", TOY, f"save_dir={tmp_path / 'file' / 'run'}")
    assert done.code == 2 and "file is not a folder" in done.errors[0] and len(done.err.splitlines()) == 1, done.err


@pytest.mark.slow
def test_wandb_logs_offline(launch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    run = tmp_path / "run"
    words = ["wandb.enable=true", "wandb.project=my-robot-project"]
    env = {"WANDB_SILENT": "true", "WANDB_MODE": "offline"}
    succeed(launch.torchrun(2, "train.py", TOY, *words, f"save_dir={run}", **env))
    assert len(list(run.glob("wandb/offline-run-*/*.wandb"))) == 1, "rank 0 alone"
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
        log.require_wandb(SimpleNamespace(wandb=config.Wandb(enable=True, mode=asked)))
    assert not refused or (str(caught.value), caught.value.exit_code) == (f"{refused} {NO_WANDB}", 2)


def test_wandb_missing_is_an_error_before_training(launch, tmp_path):
    script = "import sys, train; from engine.report import log; log.find_spec = lambda name: None; "
    script += "sys.exit(train.main(sys.argv[1:]))"
    done = launch.python("-c", script, TOY, "wandb.enable=true", f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and done.errors == [
        "error: the package wandb is not installed (wandb.enable): pip install wandb"
    ], done.err
    assert not (tmp_path / "run").exists()
