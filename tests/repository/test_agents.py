"""docs/agents.md: its commands with their output, its tables beside the code, and a program that knows that page."""

import ast
import importlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import FAULTY, ROOT, TOY, succeed, wait_until
from robot_tasks import TINY_ACT

from engine import errors
from engine.errors import FAULT, LockstepError
from plugins import resilience
from tools import arguments, running
from tools.signals import ended_by_signals

PAGE = (ROOT / "docs" / "agents.md").read_text()
HAR = "har model.mode=flatten device=cpu global_batch=128 virtual_workers=4".split()
INTERNAL = {"trial", "probe", "prepare_watch"}
"""Commands that other tools start, and the one that has made data/watch."""
MAIN = r"^from (tools\.\w+\.\w+) import main$"
COMMANDS = {path.stem for path in (ROOT / "tools").glob("*.py") if re.search(MAIN, path.read_text(), re.M)} - INTERNAL


def rows(heading):
    """The cells of the first column, and the lines, of the table after the row `| heading |`."""
    table = PAGE.split(f"\n| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in table}


# ---- the tables ------------------------------------------------------------------------------------------------------


def numbers_in(tree):
    """The exit codes that a file raises: `exit_code=`, which is a number, or a name of errors or of arguments."""
    known = vars(arguments) | vars(errors)
    for node in ast.walk(tree):
        if not isinstance(node, ast.keyword) or node.arg != "exit_code":
            continue
        if isinstance(node.value, ast.Constant):
            yield node.value.value
        name = getattr(node.value, "id", getattr(node.value, "attr", ""))
        if name.isupper():
            yield known[name]


def test_the_table_has_each_exit_code_of_the_code():
    files = [
        path for folder in ("engine", "plugins", "tools", "formats", "tasks") for path in (ROOT / folder).rglob("*.py")
    ]
    raised = {code for path in files for code in numbers_in(ast.parse(path.read_text()))} - {None}
    named = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    table = {int(code) for code in rows("code | of a training") if code.isdigit()}
    assert table == raised | named | {0, 1, arguments.NOT_KNOWN}
    assert len(rows("code | of a training")) == len(table) + 1, "and signals"
    for page in ("troubleshooting.md", "agents.md"):
        first = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / page).read_text(), flags=re.M)
        assert len(first) == len({*first}), "a code has one row"


def source_of(command):
    """The program of tools/COMMAND.py, and the module that it starts; None for a module of the tools."""
    found = re.search(MAIN, (ROOT / "tools" / f"{command}.py").read_text(), re.M)
    return found and (ROOT / f"{found[1].replace('.', '/')}.py").read_text()


def test_every_tool_has_json_and_the_table_has_its_keys():
    without = [name for name in COMMANDS if not re.search(r'"--json"|add_json\(', source_of(name))]
    assert not without, "a program can read its text only"
    described = {}
    for names, line in rows("tool | keys of the JSON").items():
        for name in re.findall(r"`(\w+)\.py`", names):
            described[name] = re.findall(r"`(\w+)`", line.split(" | ")[1])
    assert described.keys() == COMMANDS
    sources = "".join(path.read_text() for path in (ROOT / "tools").rglob("*.py"))
    verdicts = {"same", "differ", "rounding", "differs"}
    keys = {key for keys in described.values() for key in keys} - verdicts
    assert not [key for key in keys if not re.search(rf'"{key}"|\b{key}\b *[:=]', sources)]


# ---- an exit code has one meaning ------------------------------------------------------------------------------------


def test_a_tool_that_breaks_has_not_said_no(capfd):
    def main(argv):
        raise ZeroDivisionError("division by zero")

    assert resilience.guarded(main, FAULT)([]) == FAULT and resilience.guarded(main)([]) == 1

    def refused(argv):
        raise LockstepError("the exported model is off", exit_code=1)

    assert resilience.guarded(refused, FAULT)([]) == 1, "a verdict"
    assert running.guarded([TOY, "device=cpu"], main) == FAULT, "each tool of a task"
    assert capfd.readouterr().err.count("error: ZeroDivisionError: division by zero") == 3


@pytest.mark.slow
def test_a_task_that_breaks_is_no_verdict_of_prove(launch):
    words = [FAULTY, "fault.kind=raise", "fault.rank=0", "fault.step=1", "device=cpu"]
    done = launch.python("tools/prove.py", "--json", "--processes", "1", "--steps", "2", *words)
    assert (done.code, done.out) == (FAULT, "") and "ZeroDivisionError" in done.errors[0], done.err


# ---- stdout has one JSON value, or nothing ---------------------------------------------------------------------------

NOISY = """
import os, subprocess
print("the import")
os.write(1, b"from C\\n")
from tests.tasks.toy import Task as Toy, Waves


class Loud(Waves):
    def __getitems__(self, indices):
        os.write(1, b"a sample, in a loader process\\n")
        return super().__getitems__(indices)


class Task(Toy):
    def datasets(self):
        print("the data")
        return Loud(61, 0), Loud(23, 1)

    def model(self):
        subprocess.run(["echo", "a child"])
        return super().model()

    def report(self, sums):
        return super().report(sums) | {"odd": float("nan")}
"""


def strict(text):
    """The value of a JSON text, which has no NaN and no Infinity."""

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_what_a_task_and_its_children_print_is_not_in_the_json(launch, tmp_path):
    task, run = tmp_path / "noisy.py", tmp_path / "run"
    task.write_text(NOISY)
    succeed(launch.train(str(task), "steps=4", "device=cpu", "num_workers=1", f"save_dir={run}"))
    done = succeed(launch.python("tools/evaluate.py", run, "--json"))
    assert strict(done.out)["metrics"]["odd"] is None
    for words in ("the import", "from C", "the data", "a child", "a sample, in a loader process"):
        assert words in done.err.splitlines(), words
    assert "the import" in launch.python("tools/evaluate.py", run).out, "without --json it is for people"


AGAIN = """
import os, sys
from engine import launch
from tools.output import print_json, reserve_stdout
with reserve_stdout(True):
    print("the first process" if "AGAIN" not in os.environ else "the second", flush=True)
    if "AGAIN" not in os.environ:
        os.environ["AGAIN"] = "1"
        launch.replace_process()
    print_json({"rate": float("inf")})
"""


@pytest.mark.real
def test_a_process_that_replaces_itself_has_its_stdout_again(launch):
    """As after a lack of memory, and for `arithmetic=capped`."""
    done = succeed(launch.python("-c", AGAIN))
    assert strict(done.out) == {"rate": None} and done.err.split("\n")[:2] == ["the first process", "the second"]


EARLY = """
import os, signal, sys, torch.distributed.run
torch.distributed.run.run = lambda args: os.kill(os.getpid(), signal.{name})
from plugins.resilience import agent
sys.exit(agent.main(["--standalone", "--nproc_per_node=2", "train.py"]))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_launcher_before_its_ranks_is_a_line_and_a_code(launch, name):
    """And its temporary folder is gone, for which `launch` looks."""
    done = launch.python("-c", EARLY.format(name=name))
    assert done.code == 128 + signal.Signals[name] and done.out == ""
    assert done.err.startswith(f"error: ended by {name} before the first step: start the same command again")
    assert "Traceback" not in done.err


WAITING = NOISY.replace('print("the data")', 'open(os.environ["BEGUN"], "w").close(); time.sleep(60)').replace(
    "import os,", "import time, os,"
)


def test_a_forked_child_of_a_tool_ends_by_a_signal_however_early():
    """A pool of processes ends its children at once, when the last one may have begun a moment before."""
    with ended_by_signals():
        for _ in range(200):
            child = os.fork()
            if not child:
                try:
                    time.sleep(30)
                finally:
                    os._exit(1)
            os.kill(child, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_tool_is_a_line_and_a_code_and_leaves_nothing(launch, tmp_path, number):
    """Its temporary folder is gone, for which `launch` looks."""
    task, run, begun = tmp_path / "task.py", tmp_path / "run", tmp_path / "begun"
    task.write_text(NOISY)
    succeed(launch.train(str(task), "steps=2", "epochs=0", "device=cpu", f"save_dir={run}"))
    task.write_text(WAITING)
    for words in (
        ["evaluate", run],
        ["report", run, "--out", tmp_path / "r.html"],
        ["write_shards", task, "--to", begun],
    ):
        begun.unlink(missing_ok=True)
        tool = launch.start(sys.executable, f"tools/{words[0]}.py", *words[1:], "--json", BEGUN=str(begun))
        wait_until(begun.exists)
        tool.signal(number)
        done = tool.wait()
        assert (done.code, done.out) == (128 + number, ""), done.err
        assert done.errors == [f"error: ended by {signal.Signals(number).name}"], done.err
    assert not (tmp_path / "r.html").exists()


def main_of(command):
    return importlib.import_module(re.search(MAIN, (ROOT / "tools" / f"{command}.py").read_text(), re.M)[1]).main


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_wrong_command_line_is_an_error_line(command, capfd):
    """For a program it is the same to argparse and to a training's settings: exit code 2, and the line."""
    before = {"write_shards": [TOY, "--to", "gone"], "doctor": [TOY], "prove": [TOY], "study": [TOY]}
    before |= {"tune": [TOY], "benchmark": [TOY]}
    try:
        code = main_of(command)([*before.get(command, []), "--json", "--no-such-option"])
    except SystemExit as end:
        code = end.code
    printed = capfd.readouterr()
    assert (code, printed.out) == (2, "")
    assert [line for line in printed.err.splitlines() if line.startswith("error: ")], printed.err


@pytest.mark.parametrize("command", sorted({"compare", "evaluate", "replay", "runs", "save_pretrained"}))
def test_a_name_that_no_file_can_have_is_a_mistake_of_usage(command, capfd):
    long = "/" + 300 * "a"
    assert main_of(command)([long, *([long] if command == "compare" else []), "--json"]) == 2
    assert capfd.readouterr().err.startswith("error: File name too long (/aaa")


@pytest.mark.parametrize(("command", "option"), [
    ("tune", "--seconds=nan"), ("tune", "--max-batch=-1"), ("benchmark", "--seconds=-1"), ("benchmark", "--rounds=0"),
])  # fmt: skip
def test_a_number_that_cannot_be_is_refused_before_a_process_starts(command, option, capfd):
    with pytest.raises(SystemExit) as end:
        main_of(command)([TOY, "--json", option])
    assert end.value.code == 2 and f"error: argument {option.partition('=')[0]}: must be " in capfd.readouterr().err


def test_a_tool_without_its_stdout_has_failed(launch, tmp_path):
    run = tmp_path / "run"
    succeed(launch.train(TOY, "steps=2", "epochs=0", "device=cpu", f"save_dir={run}"))
    for words in (["runs", run], ["compare", run, run, "--no-replay"]):
        with open("/dev/full", "w") as full:
            done = launch.start(
                sys.executable, f"tools/{words[0]}.py", *words[1:], "--json", output=full.fileno()
            ).wait()
        assert done.code == FAULT and "error: stdout cannot be written (No space left on device)" in done.err


class Preparing:
    """What `printed` does with the result of a tool that writes a file."""

    def __init__(self, capfd):
        self.capfd = capfd

    def __call__(self, work, as_json=True):
        code = arguments.printed(work, Path("out.npz"), as_json)
        return code, *self.capfd.readouterr()


def test_a_preparation_that_breaks_is_an_error_of_its_own(capfd):
    printed = Preparing(capfd)

    def loud():
        os.write(1, b"from a library\n")
        return "a\nb"

    def broken():
        raise ZeroDivisionError("division by zero")

    def stopped():
        os.kill(os.getpid(), signal.SIGTERM)

    def on_a_full_disk():
        raise OSError(28, "No space left on device", "out.npz")

    code, out, err = printed(loud)
    assert (code, strict(out), err) == (0, {"output": "out.npz", "lines": ["a", "b"]}, "from a library\n")
    code, out, err = printed(broken)
    assert (code, out) == (FAULT, "") and err.endswith("\nerror: ZeroDivisionError: division by zero\n")
    code, out, err = printed(stopped)
    assert (code, out, err) == (143, "", "error: ended by SIGTERM\n")
    code, out, err = printed(on_a_full_disk)
    assert (code, out) == (2, "") and err.startswith("error: cannot write: No space left on device (out.npz)")


def test_a_run_without_the_best_checkpoint_is_code_3(launch, tmp_path, capfd):
    """Not the weights of another step without a word."""
    run = tmp_path / "run"
    succeed(launch.train(TOY, "steps=12", "epochs=0", "device=cpu", f"save_dir={run}"))
    manifest = run / "manifest.json"
    whole, best = manifest.read_bytes(), run / json.loads(manifest.read_bytes())["best"]
    evaluate, report = main_of("evaluate"), main_of("report")

    def refused():
        assert evaluate([str(run), "--json"]) == 3
        printed = capfd.readouterr()
        assert printed.out == ""
        return printed.err

    for damaged in (whole[:50], b"\0" * len(whole), b"[1]"):
        manifest.write_bytes(damaged)
        assert "manifest.json is damaged, so the best checkpoint is not known" in refused()
    page = ["--json", "--no-samples", "--out", str(tmp_path / "page.html")]
    assert report([str(run), *page]) == 0
    printed = capfd.readouterr()
    assert "manifest.json is missing or damaged" in printed.err and strict(printed.out)["report"] == page[-1]
    manifest.write_bytes(whole)
    best.rename(tmp_path / "away.pt")
    assert f"the best checkpoint, {best.name}, is gone" in refused()
    for path in run.glob("*.pt"):
        path.unlink()
    manifest.unlink()
    assert "the run has no checkpoint yet" in refused()
    assert report([str(run), *page, "width=no"]) == 2 and "error: width=no (command line)" in capfd.readouterr().err


def test_a_checkpoint_that_is_replaced_meanwhile_is_no_mistake_of_the_caller(tmp_path, capfd):
    """A running training removes the best checkpoint when it has a better one."""
    path = tmp_path / "best.pt"

    def replaced(args):
        path.unlink(missing_ok=True)
        raise LockstepError("the checkpoint cannot be read", str(path), exit_code=3)

    words = [TOY, "device=cpu", f"resume={path}"]
    assert running.guarded(words, replaced) == 3, "it was never there"
    path.touch()
    assert running.guarded(words, replaced) == 6
    assert f"error: the run has replaced this checkpoint meanwhile ({path}): start it again" in capfd.readouterr().err


# ---- every tool answers in JSON --------------------------------------------------------------------------------------


def keys_of(tool):
    """The keys of the page's table."""
    (line,) = [line for names, line in rows("tool | keys of the JSON").items() if f"`{tool}.py`" in names]
    return {*re.findall(r"`(\w+)`", line.split(" | ")[1])}


@pytest.mark.slow
def test_a_policy_is_saved_with_its_folder_in_the_json(launch, tmp_path, walks):
    run, out = tmp_path / "run", tmp_path / "policy"
    words = ["robot", "policy.type=act", f"dataset.root={walks}", *TINY_ACT, "batch_size=4", "steps=1"]
    succeed(launch.train(*words, f"save_dir={run}"))
    answer = strict(succeed(launch.python("tools/save_pretrained.py", run, out, "--json")).out)
    assert answer == {"output": str(out)} and strict((out / "config.json").read_text())["type"] == "act"
    assert strict(succeed(launch.torchrun(2, "tools/save_pretrained.py", run, "--json")).out) == {
        "output": f"{run}/pretrained_model"
    }
    (run / "best.txt").write_text("")
    refused = launch.python("tools/save_pretrained.py", run, run / "best.txt" / "policy", "--json")
    assert (refused.code, refused.out) == (2, "") and refused.errors


@pytest.mark.slow
def test_the_measurements_are_those_of_the_page(launch, tmp_path):
    words = ["--json", "--seconds=0.05", "device=cpu"]
    benchmark = ["--processes=1", "--rounds=1", "--scaling=weak"]
    answer = strict(succeed(launch.python("tools/benchmark.py", TOY, *words, *benchmark)).out)
    assert answer.keys() == {"measured", "predicted"} <= keys_of("benchmark") and answer["predicted"] is None
    (case,) = answer["measured"]
    assert case["processes"] == 1 and case["found"][0]["samples_per_s"] > 0
    out = tmp_path / "tuned.yaml"
    answer = strict(succeed(launch.python("tools/tune.py", TOY, *words, "--max-batch=12", f"--out={out}")).out)
    assert answer.keys() == {"settings", "largest", "best", "tried"} and out.is_file()
    again = launch.python("tools/tune.py", TOY, *words, f"--out={tmp_path}/gone/tuned.yaml", "--max-batch=12")
    assert (again.code, again.out) == (2, ""), "no result, because it could not be written"


@pytest.mark.slow
def test_a_study_prints_its_file_or_its_plan(launch, tmp_path):
    people, folder = str(ROOT / "tests" / "tasks" / "people.py"), tmp_path / "study"
    words = [people, "--folds=2", "epochs=1", "device=cpu", "--out", folder, "--json"]
    plan = strict(succeed(launch.python("tools/study.py", *words, "--dry-run")).out)
    assert len(plan["folds"]) == 2 and not folder.exists()
    done = succeed(launch.python("tools/study.py", *words))
    assert strict(done.out) == strict((folder / "study.json").read_text()) and "Wrote " in done.err
    broken = launch.python("tools/study.py", people, *words[1:5], tmp_path / "other", "--json", "optim.lr=x")
    assert (broken.code, broken.out) == (2, "")


def test_a_preparation_names_its_file_and_its_lines(launch, tmp_path):
    table = tmp_path / "walks.csv"
    lines = [f"{n / 50:.2f},{'walk' if n < 300 else 'run'},{n % 7},{n % 5}" for n in range(600)]
    table.write_text("\n".join(["time,label,x,y", *lines]))
    out = tmp_path / "walks.npz"
    done = succeed(launch.python("tools/prepare_windows.py", table, out, "--json"))
    answer = json.loads(done.out)
    assert answer["output"] == str(out) and out.is_file()
    assert any(f"python train.py har dataset.root={out}" in line for line in answer["lines"])
    again = launch.python("tools/prepare_windows.py", table, out, "--json")
    assert (again.code, again.out) == (2, "") and "it exists" in again.errors[0]


@pytest.mark.slow
def test_tools_of_a_run_answer_with_the_keys_of_the_page(launch, tmp_path):
    run = tmp_path / "run"
    succeed(launch.train(*HAR, "steps=3", "epochs=0", f"save_dir={run}"))
    given = {
        "evaluate": [run],
        "provenance": [run],
        "report": [run, "--out", tmp_path / "report.html", "--no-samples"],
        "decide": [run],
        "export": [run, "--out", tmp_path / "net.pt2"],
        "runs": [run],
    }
    for tool, words in given.items():
        done = succeed(launch.python(f"tools/{tool}.py", *words, "--json"))
        answer = json.loads(done.out)
        answer = answer[0] if tool == "runs" else answer
        for names, line in rows("tool | keys of the JSON").items():
            if f"`{tool}.py`" not in names:
                continue
            keys = {*re.findall(r"`(\w+)`", line.split(" | ")[1])} - {"predictions", "file", "report", "output"}
            assert keys <= answer.keys(), tool
        written = {"report": "report", "decide": "output", "export": "file"}.get(tool)
        assert not written or Path(answer[written]).exists(), tool


# ---- a program -------------------------------------------------------------------------------------------------------


class Program:
    """What a program does that has read the page: it starts commands, and reads exit codes, JSON and two files."""

    def __init__(self, launch, folder):
        self.launch, self.folder = launch, folder

    def start(self, processes, run, steps):
        return self.launch.start_launcher(processes, *HAR, f"steps={steps}", f"save_dir={self.folder / run}")

    def status(self, run):
        path = self.folder / run / "status.json"
        return json.loads(path.read_text()) if path.exists() else {"pid": None, "time": None}

    def has_begun(self, run, before):
        """Whether the process that has just been started is running: the earlier one has left another pid or time."""
        now = self.status(run)
        is_new = (now["pid"], now["time"]) != (before["pid"], before["time"])
        return is_new and now["state"] == "running"

    def steps(self, run):
        """The steps of the log's complete lines."""
        path = self.folder / run / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def ask(self, tool, *words):
        """The exit code, and the JSON; None for an empty stdout."""
        done = self.launch.python(f"tools/{tool}.py", "--json", *words, cwd=self.folder)
        return done.code, json.loads(done.out) if done.out else None


@pytest.fixture
def program(launch, tmp_path):
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    return Program(launch, tmp_path)


@pytest.mark.slow
def test_a_program_drives_a_run_from_its_start_to_its_publication(program, tmp_path):
    before = program.status("a")
    first = program.start(2, "a", 150)
    wait_until(lambda: program.has_begun("a", before) and program.steps("a"))
    os.kill(program.status("a")["pid"], signal.SIGTERM)
    assert first.wait().code == 75
    stopped = program.status("a")
    assert (stopped["state"], stopped["exit_code"], stopped["reason"]) == ("stopped", 75, "SIGTERM")
    assert 0 < stopped["step"] < stopped["total_steps"] == 150 and Path(stopped["checkpoint"]).is_file()

    second = program.start(2, "a", 150)
    wait_until(lambda: program.has_begun("a", stopped) or second.process.poll() is not None)
    assert second.wait().code == 0
    done = program.status("a")
    assert (done["state"], done["exit_code"], done["step"]) == ("done", 0, 150) and program.steps("a")[-1] == 150
    assert program.start(2, "a", 150).wait().code == 0 and program.status("a") == done, "it was done before"

    assert program.start(1, "b", 150).wait().code == 0
    assert program.status("b")["weights"] == done["weights"], "the same bits on one process, without a stop"
    code, compared = program.ask("compare", "a", "b")
    assert (code, compared["verdict"], compared["same"]) == (0, "same", True)
    code, replayed = program.ask("replay", "a", "--step", "150", "--processes", "1")
    assert (code, replayed["verdict"]) == (0, "same bits")
    code, proof = program.ask("prove", "--seconds", "20", "--processes", "1,2", "--steps", "2", *HAR[:3])
    assert (code, proof["exit_code"]) in ((0, 0), (7, 7)), "on a busy machine 20 s may be too few"
    assert proof["verdict"] == {0: "holds", 7: "not known"}[code]
    code, published = program.ask("publish", "a", "--to", "watch", "--license", "mit")
    assert code == 0 and sorted(os.listdir(tmp_path / "watch")) == sorted(published["files"])
    code, runs = program.ask("runs", ".")
    assert code == 0 and {run["folder"]: run["state"] for run in runs} == {"a": "complete", "b": "complete"}
    assert program.ask("compare", "a", "nowhere") == (2, None)


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_killed_run_is_found(program, launch):
    before = program.status("c")
    run = program.start(2, "c", 10**6)
    wait_until(lambda: program.has_begun("c", before) and program.steps("c"))
    assert program.ask("runs", "c")[1][0]["state"] == "running"
    now = program.status("c")
    second = program.start(2, "c", 10**6).wait()
    assert second.code == 2 and "another run owns this folder" in second.errors[0]
    assert program.status("c")["pid"] == now["pid"] and program.status("c")["state"] == "running"
    launch.may_stay.append("lockstep_")  # of the killed launcher
    launch.signal_all(signal.SIGKILL)
    assert run.wait().code == -signal.SIGKILL
    assert program.status("c")["state"] == "running", "nobody could write the end"
    assert program.ask("runs", "c")[1][0]["state"] == "killed"


# ---- the page itself -------------------------------------------------------------------------------------------------


def commands():
    """(command, output) of the page, in order."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S):
        for part in block.removeprefix("$ ").split("\n$ "):
            command, _, output = part.partition("\n")
            found.append((command, output.removesuffix("\n")))
    return found


def assert_shown(output, shown, command):
    """The output is as shown, where `...` stands for anything."""
    pattern = ".*".join(map(re.escape, shown.split("...")))
    assert re.fullmatch(pattern, output.removesuffix("\n"), re.S), f"$ {command}\n{output}\nthe page shows\n{shown}"


@pytest.mark.slow
@pytest.mark.real
def test_the_commands_of_the_page_for_programs_print_what_it_shows(launch, tmp_path):
    """In one shell, in a folder that has what the repository has."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("runs", "checkpoints"):
            (tmp_path / path.name).symlink_to(path)
    until_it_trains = "until grep -q train runs/a/metrics.jsonl 2>/dev/null; do sleep 0.05; done"
    script = []
    for number, (command, _) in enumerate(commands()):
        if command.startswith("cat "):
            script.append(until_it_trains)
        script += [f"exec > {number}.out 2> {number}.err", command]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHON": sys.executable}
    launch("bash", "-c", "\n".join(script), cwd=tmp_path, timeout=600, **environment)
    for number, (command, shown) in enumerate(commands()):
        assert_shown((tmp_path / f"{number}.out").read_text(), shown, command)
    fields = {*re.findall(r"`(\w+)`", " ".join(rows("field of `status.json` | content")))}
    status = json.loads((tmp_path / "runs/a/status.json").read_text())
    assert status.keys() == fields - {"warning"}
    assert status["weights"] == re.search(r"sha256 (\w+)", (tmp_path / "a.log").read_text())[1]
