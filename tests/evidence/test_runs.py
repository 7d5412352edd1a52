"""tools/runs.py: what became of each run below a folder; whatever lies there, it lists the rest."""

import csv
import io
import json
import os
import shlex
import shutil
import signal
import sys

import pytest
from conftest import ROOT, TOY, succeed, wait_until
from runs import records, status

from tools.paper import runs as tool

OLD = ROOT / "tests" / "data" / "run_of_3205ab3"


@pytest.fixture
def listed(capfd):
    """The tool in this process: (exit code, what it prints)."""

    def call(*words):
        capfd.readouterr()
        code = tool.main([*map(str, words)])
        out, err = capfd.readouterr()
        return code, out + err

    return call


def write(folder, log=(), config="task: har\nepochs: 7\n", **fields):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text("{}")
    if fields:
        (folder / "status.json").write_text(json.dumps(fields))
    if log:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return folder


def line(step, event="train", **more):
    return {"event": event, "step": step, "epoch": step // 10, "samples": 9, "time_s": 0.5 * step} | more


@pytest.mark.slow
def test_real_runs_in_their_states(launch, listed, tmp_path):
    """Complete, stopped, killed, running, and failed; the command that is printed continues the run."""
    words = [TOY, "device=cpu", "log_every=1"]
    succeed(launch.train(*words, "steps=6", f"save_dir={tmp_path / 'a' / 'complete'}"))
    stopped = [*words, "epochs=10000", "max_time_s=0.2", f"save_dir={tmp_path / 'stopped'}"]
    assert launch.train(*stopped).code == 75
    faulty = [str(ROOT / "tests/tasks/faulty.py"), "steps=6", "device=cpu", "fault.kind=raise", "fault.rank=0"]
    assert launch.train(*faulty, f"save_dir={tmp_path / 'failed'}").code == 1
    going = [
        launch.start(sys.executable, "train.py", *words, "epochs=100000", f"save_dir={tmp_path / name}")
        for name in "xy"
    ]
    for run in going:
        run.wait_for("epoch 2/")
    going[0].signal(signal.SIGKILL)
    going[0].wait()
    done = succeed(launch.python("tools/runs.py", str(tmp_path), "--json"))
    found = {os.path.basename(run["folder"]): run for run in json.loads(done.out)}
    states = {name: run["state"] for name, run in found.items()}
    expected = {"complete": "complete", "stopped": "stopped", "x": "killed", "y": "running", "failed": "failed"}
    assert states == expected and "ZeroDivisionError" in found["failed"]["reason"]
    table = succeed(launch.python("tools/runs.py", str(tmp_path))).out
    going[1].signal(signal.SIGTERM)
    assert going[1].wait().code == 75
    last = records(tmp_path / "a/complete", "eval")
    assert found["complete"]["best"] == min(each["loss"] for each in last) and found["complete"]["monitor"] == "loss"
    assert (found["complete"]["step"], found["complete"]["epoch"], found["complete"]["test"]) == (6, 1, None)
    assert found["complete"]["best"] == status(tmp_path / "a/complete")["best"]
    assert "a/complete" in table and "\nx, killed\n  " in table and "\nstopped, stopped: " in table
    assert "\ny, running" in table and f"{found['x']['resume_command']}\n" in table
    command = shlex.split(found["stopped"]["resume_command"])
    again = launch(*command)
    assert again.code == 75 and "Resuming" in again.out, again.err


def test_columns_sorts_and_forms(listed, tmp_path):
    write(tmp_path / "f_10", [line(3), line(6, "eval", macro_f1=0.25), line(9, "eval", macro_f1=0.75), line(12)],
          state="done", step=12, resume_command="again", time="then")  # fmt: skip
    write(tmp_path / "f_9", [line(40)], state="stopped", reason="asked", step=40, monitor="loss", best=0.5)
    write(tmp_path / "deep/f_2", [line(5)], state="failed", reason="a cause", monitor="macro_f1", best=0.9, step=7)
    tested = {"monitor": "macro_f1", "metrics": {"macro_f1": 0.625}, "looks": 2}
    (tmp_path / "f_10/test.json").write_text(json.dumps(tested))
    code, out = listed(tmp_path, "--json")
    found = json.loads(out)
    assert code == 0 and [os.path.relpath(run["folder"], tmp_path) for run in found] == ["deep/f_2", "f_9", "f_10"]
    assert found[2] == dict.fromkeys(tool.COLUMNS) | {
        "folder": str(tmp_path / "f_10"), "task": "har", "state": "complete", "epoch": 2, "epochs": 7, "step": 12,
        "monitor": "macro_f1", "best": 0.75, "test": 0.625, "looks": 2, "time_s": 6.0, "ended": "then",
        "resume_command": "again",
    }  # fmt: skip
    assert found[0]["step"] == 7, "the later of status and log"
    orders = {
        "best": "2 10 9",
        "test": "10 2 9",
        "step": "9 10 2",
        "time": "9 10 2",
        "state": "10 2 9",
        "task": "2 9 10",
    }
    for by, order in orders.items():
        _, out = listed(tmp_path, "--sort", by, "--csv")
        rows = [*csv.DictReader(io.StringIO(out))]
        assert [row["folder"].rpartition("_")[2] for row in rows] == order.split(), by
    assert rows[-1]["test"] == "0.625" and rows[0]["test"] == "" and [*rows[0]] == [*tool.COLUMNS]
    _, out = listed(tmp_path)
    cells = [each.split() for each in out.splitlines()]
    assert ["f_10", "har", "complete", "2/7", "12", "macro_f1", "0.7500", "–", "0.6250", "6", "s"] in cells
    assert "deep/f_2, failed: a cause" in out and "again" not in out, "it is complete"


def test_an_older_run_and_one_folder(listed):
    """From before status.json had the best score: it is read from the log, for a task of the project."""
    for place in (OLD, OLD.parent):
        code, out = listed(place, "--json")
        (run,) = json.loads(out)
        assert code == 0 and run["folder"] == str(OLD) and run["state"] in ("complete", "killed", "stopped", "unknown")
    values = [each[run["monitor"]] for each in records(OLD, "eval")] if run["monitor"] else []
    assert run["best"] == (max(values) if values else None)


ODD = {
    "empty files": {"status.json": "", "metrics.jsonl": "", "config.yaml": ""},
    "other types": {"status.json": "[1]", "metrics.jsonl": "3\n[]\n", "config.yaml": "- a\n- b\n"},
    "values": {
        "status.json": '{"state": ["done"], "step": -3, "best": "high", "monitor": 5, "resume_command": {}, "host": 7}',
        "metrics.jsonl": '{"step": 1e999, "epoch": true, "time_s": NaN}\n',
        "config.yaml": "task: [1, 2]\nepochs: 1.5\n",
        "test.json": '{"monitor": "a", "metrics": {"a": 1e999}, "looks": "two"}',
    },
    "numbers": {
        "status.json": '{"state": "done", "step": ' + "9" * 5000 + "}",
        "metrics.jsonl": "{}\n",
        "test.json": "[]",
    },
    "torn": {"status.json": '{"state": "do', "metrics.jsonl": '{"event": "train", "step": 4}\n{"event": "ev'},
    "deep": {"status.json": "[" * 60000, "config.yaml": "a: " + "[" * 1200, "metrics.jsonl": "{" * 70000},
    "bytes": {"status.json": b"\xff\xfe\0", "metrics.jsonl": b"\xff\n\0\n", "config.yaml": b"\xff\0"},
    "a loop": {"status.json": "{}", "config.yaml": "task: &a [*a]\nepochs: &b {c: *b}\n"},
    "obeyed": {"status.json": '{"state": "failed", "reason": "\\u001b[2Jx\\ny", "resume_command": "\\u202erm"}'},
    "tagged": {"status.json": "{}", "config.yaml": "task: !!python/object/apply:os.system [touch ran]\n"},
}


@pytest.mark.slow
def test_odd_folders_are_listed_and_nothing_of_them_is_obeyed(listed, tmp_path):
    for name, files in ODD.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    for file in ("status.json", "metrics.jsonl", "config.yaml", "test.json", "run.lock"):
        (tmp_path / "folders" / file).mkdir(parents=True)
    (tmp_path / "pipes").mkdir()
    for file in ("status.json", "metrics.jsonl", "config.yaml", "test.json"):
        os.mkfifo(tmp_path / "pipes" / file)
    own = write(tmp_path / "own", [line(2)], "task: mine.py\n", state="running", host="elsewhere")
    (own / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    write(tmp_path / ("\x1b[31m" + "n" * 90), state="done")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff\xfe")
    shutil.copy(own / "status.json", os.fsencode(tmp_path) + b"/\xff\xfe/status.json")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "gone").symlink_to("nowhere")
    for way in (["--sort=best"], ["--json", "--sort=test"], ["--csv", "--sort=time"], ["--sort=state"]):
        code, out = listed(tmp_path, *way)
        assert code == 0 and "\x1b" not in out.replace("\\u001b", "") and "\u202e" not in out, out
        assert out.count("elsewhere") >= 2 or "--csv" in way
    found = {os.path.basename(run["folder"]): run for run in json.loads(listed(tmp_path, "--json")[1])}
    assert len(found) == len(ODD) + 4
    assert found["torn"]["step"] == 4 and found["torn"]["state"] == "unknown"
    assert found["own"]["state"] == "killed" and found["own"]["reason"] == "or running on elsewhere"
    assert found["values"]["best"] is None and found["values"]["test"] is None
    assert found["numbers"]["state"] in ("complete", "unknown") and found["numbers"]["step"] is None
    assert not (tmp_path / "ran").exists() and not (ROOT / "ran").exists()


@pytest.mark.parametrize(("words", "says"), [
    (["{tmp}/nothing"], "error: no such folder (.*nothing): give one with runs in it"),
    (["{tmp}"], "no run below "),
])  # fmt: skip
def test_a_folder_without_runs(listed, tmp_path, words, says):
    code, out = listed(*(word.format(tmp=tmp_path) for word in words))
    assert code == (2 if "error" in says else 0) and says.split("(")[0] in out


def test_a_run_that_another_process_owns_is_running(launch, listed, tmp_path):
    """By its lock, which a killed process loses."""
    folder = write(tmp_path / "run", state="running", host=os.uname().nodename)
    code = "import sys, time; from pathlib import Path; from engine.files import run_folder\n"
    code += f"run_folder.lock(Path({str(folder)!r})); print('held', flush=True); time.sleep(600)"
    owner = launch.start(sys.executable, "-c", code)
    owner.wait_for("held")
    assert json.loads(listed(tmp_path, "--json")[1])[0]["state"] == "running"
    owner.signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: json.loads(listed(tmp_path, "--json")[1])[0]["state"] == "killed")
