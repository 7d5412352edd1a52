#!/usr/bin/env python3
"""Break the product on purpose, one small mistake at a time, and look whether a test fails.

    python tests/mutants/mutants.py check                     locate each text, run nothing
    python tests/mutants/mutants.py run                       every mutant of tests/mutants/mutants.txt
    python tests/mutants/mutants.py run loader resume-meter   these groups and these mutants
    python tests/mutants/mutants.py run --out results.json    also write {id: verdict}; other ids in the file stay

The list has one block per mutant:

    id: loader-epoch
    before: default_rng((self.seed, self.epoch))
    after: default_rng((self.seed, 0))
    test: tests/loader/test_loader.py::test_the_order_changes_with_epoch_and_seed_and_with_nothing_else

A line `[group]` begins a group. Each line `test:` holds a file or `file::test`; of a file without `::` the quick tests
run. `lives: REASON` marks a known gap. The text is searched in all product files, so it does not matter where a
file lies. Line breaks and a comma before a closing bracket do not matter either. The text has to be there exactly once.

A mutant is applied to a copy of the checkout in a temporary folder, never to the checkout. Verdicts:

    killed   a test fails, or takes longer than --timeout
    LIVES    all of its tests pass
    lost     the text is not there, or several times
    broken   all of its tests are skipped, or one fails, without the mutant; or the mutant is no valid Python

The exit code is 1 if a mutant lives that is not marked, or is lost or broken.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "mutants" / "mutants.txt"

FILES = ("train.py", "train_ddp.py", "data_loader.py", "train_multigpu.sh")
FOLDERS = ("engine", "plugins", "formats", "tasks", "tools", "models", "envs")
"""The product: files of the top level, and folders with all that is below them."""

KILLED, LIVES, LOST, BROKEN = "killed", "lives", "lost", "broken"


@dataclass(frozen=True)
class Mutant:
    """One small mistake.

    tests  files, or `file::test`
    lives  why no test sees it; empty where a test should
    """

    id: str
    group: str
    before: str
    after: str
    tests: tuple[str, ...]
    lives: str = ""


@dataclass(frozen=True)
class Place:
    """Where the text of a mutant is: a product file, and the span in it."""

    path: str
    begin: int
    end: int


def read_list(text: str) -> list[Mutant]:
    """Return the mutants of a list. Raises ValueError with the number of a line that has no form."""
    found: list[Mutant] = []
    group, fields, tests = "", dict[str, str](), list[str]()

    def close(number: int) -> None:
        if not fields:
            return
        missing = [name for name in ("id", "before", "after") if name not in fields]
        if missing or not group:
            raise ValueError(f"line {number}: the mutant before lacks {', '.join(missing) or 'a group'}")
        if len({"::" in each for each in tests}) != 1:
            raise ValueError(f"line {number}: the mutant before needs tests or files, and not both")
        texts = fields["id"], group, fields["before"], fields["after"]
        found.append(Mutant(*texts, tuple(tests), fields.get("lives", "")))
        fields.clear()
        tests.clear()

    lines = text.splitlines()
    for number, line in enumerate([*lines, ""], 1):
        if not line.strip():
            close(number)
        elif heading := re.fullmatch(r"\[([\w -]+)\]", line):
            group = heading[1]
        elif not line.startswith("#"):
            name, colon, value = line.partition(":")
            if not colon or name not in ("id", "before", "after", "test", "lives"):
                raise ValueError(f"line {number}: no `id:`, `before:`, `after:`, `test:` or `lives:`")
            if name == "test":
                tests.append(value.strip())
            else:
                fields[name] = value.strip()
    ids = [mutant.id for mutant in found]
    if twice := sorted({each for each in ids if ids.count(each) > 1}):
        raise ValueError(f"given twice: {', '.join(twice)}")
    return found


def product(root: Path) -> dict[str, str]:
    """Return the text of each product file, by its path below the root."""
    paths = [root / name for name in FILES]
    for folder in FOLDERS:
        paths += sorted(path for path in (root / folder).rglob("*.py"))
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def pattern(text: str) -> re.Pattern[str]:
    """Return a pattern for a text that a formatter may have laid out in another way."""
    words, last, gap = "", "", False
    for part in re.findall(r"\w+|\s+|[^\w\s]", text):
        if part.isspace():
            gap = True
            continue
        if gap and last:
            words += r"\s+" if last[-1].isalnum() and part[0].isalnum() else r"\s*"
        elif last and last in "([{":
            words += r"\s*"
        if not gap and part in ")]}":
            words += r"(?:\s*,)?\s*"
        words += re.escape(part)
        last, gap = part, False
    before = r"(?<!\w)" if re.match(r"\w", text) else ""
    after = r"(?!\w)" if re.search(r"\w$", text) else ""
    return re.compile(before + words + after)


def locate(mutant: Mutant, texts: dict[str, str]) -> list[Place]:
    """Return all places of a mutant's text."""
    searched = pattern(mutant.before)
    # A search for one word is a hundred times as fast as the pattern.
    word = max(re.findall(r"\w+", mutant.before), key=len, default="")
    places = []
    for path, text in texts.items():
        if word in text:
            places += [Place(path, *found.span()) for found in searched.finditer(text)]
    return places


def missing_tests(mutant: Mutant, root: Path) -> list[str]:
    """Return the tests of a mutant that no file has."""
    absent = []
    for each in mutant.tests:
        path, _, name = each.partition("::")
        name = name.partition("[")[0].rpartition("::")[2]
        file = root / path
        if not file.is_file() or (name and f"def {name}(" not in file.read_text(encoding="utf-8")):
            absent.append(each)
    return absent


class Copy:
    """A copy of the checkout in a temporary folder, in which one mutant after the other is tried."""

    def __init__(self, folder: Path, timeout_s: float):
        self.folder, self.timeout_s = folder / "checkout", timeout_s
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            source, target = ROOT / name, self.folder / name
            if not source.exists() and not source.is_symlink():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
        environment = ROOT / ".venv"
        if environment.exists():
            (self.folder / ".venv").symlink_to(environment.resolve())

    def pytest(self, tests: list[str], *options: str) -> tuple[int, str]:
        """Run tests in the copy. Returns pytest's exit code, and its output; -1 if it had to be ended."""
        quick = [] if "::" in tests[0] else ["-m", "not slow"]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider"]
        command += [f"--basetemp={self.folder.parent / 'pytest'}", *quick, *options, *tests]
        left_out = ("PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS", "PYTHONPATH")
        env = {name: value for name, value in os.environ.items() if name not in left_out}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        limit_s = None if "--timeout=0" in options else 3 * self.timeout_s
        try:
            out, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            return -1, out
        return process.returncode, out

    def outcomes(self, tests: list[str]) -> dict[str, bool]:
        """Run tests without a mutant. Returns whether each test passed, by its id; skipped tests are left out."""
        report = self.folder.parent / "report.xml"
        found: dict[str, bool] = {}
        for some in ([each for each in tests if "::" in each], [each for each in tests if "::" not in each]):
            code, out = 4, ""
            while some and code == 4:  # pytest runs nothing where one test is not there, or its file fails
                report.unlink(missing_ok=True)
                code, out = self.pytest(some, f"--junitxml={report}", "--timeout=0")
                absent = re.findall(r"^ERROR: (?:not found:|found no collectors for) (.+)$", out, re.MULTILINE)
                left = [each for each in some if str(self.folder / each) not in absent]
                some = left if len(left) < len(some) else []
            if not report.exists():
                continue
            for case in ElementTree.parse(report).getroot().iter("testcase"):
                path = case.attrib["classname"].replace(".", "/") + ".py"
                marks = {child.tag for child in case}
                name = f"{path}::{case.attrib['name']}"
                if "skipped" not in marks:
                    found[name] = found.get(name, True) and not marks & {"failure", "error"}
        return found

    def try_one(self, mutant: Mutant, place: Place) -> tuple[str, str]:
        """Apply a mutant, run its tests, put the file back. Returns the verdict, and what decided it."""
        file = self.folder / place.path
        whole = file.read_bytes()
        text = whole.decode()
        text = text[: place.begin] + mutant.after + text[place.end :]
        if file.suffix == ".py":
            try:
                compile(text, place.path, "exec")
            except SyntaxError as error:
                return BROKEN, f"the mutant is no valid Python: {error.msg}"
        try:
            self._write(file, text.encode())
            code, out = self.pytest([*mutant.tests], "-x", f"--timeout={self.timeout_s:g}")
        finally:
            self._write(file, whole)
        if code == 0:
            return LIVES, mutant.lives
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
        return KILLED, failed[1] if failed else "ended" if code < 0 else f"pytest's exit code {code}"

    def _write(self, file: Path, content: bytes) -> None:
        """Write a file, and drop its bytecode: Python would take an old one of the same second and size."""
        file.write_bytes(content)
        for old in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            old.unlink(missing_ok=True)


def passes(selector: str, outcomes: dict[str, bool]) -> bool:
    """Return whether at least one test of a selector has run without the mutant, and all of them passed."""
    own = [
        good
        for name, good in outcomes.items()
        if name == selector or name.startswith((f"{selector}[", f"{selector}::"))
    ]
    return bool(own) and all(own)


def chosen(mutants: list[Mutant], names: list[str]) -> list[Mutant]:
    """Return the mutants of these ids and groups; all without a name. Raises ValueError for an unknown one."""
    known = {mutant.id for mutant in mutants} | {mutant.group for mutant in mutants}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"neither a group nor a mutant: {', '.join(unknown)}")
    return [mutant for mutant in mutants if not names or mutant.id in names or mutant.group in names]


def check(mutants: list[Mutant]) -> int:
    """Locate all texts. Prints each that is lost, each test that is not there, and the number of mutants by group."""
    texts, bad = product(ROOT), 0
    for mutant in mutants:
        places = locate(mutant, texts)
        if len(places) != 1:
            print(f"lost    {mutant.id}: {_where(places)}")
        if absent := missing_tests(mutant, ROOT):
            print(f"broken  {mutant.id}: no such test: {', '.join(absent)}")
        bad += len(places) != 1 or bool(absent)
    counts = {
        group: sum(mutant.group == group for mutant in mutants) for group in dict.fromkeys(m.group for m in mutants)
    }
    print(f"{len(mutants)} mutants: " + ", ".join(f"{group} {count}" for group, count in counts.items()))
    return 1 if bad else 0


def _where(places: list[Place]) -> str:
    shown = ", ".join(dict.fromkeys(place.path for place in places))
    return f"its text is there {len(places)} times, in {shown}" if places else "its text is not there"


def run(mutants: list[Mutant], jobs: int, out: Path | None, timeout_s: float) -> int:
    """Try mutants, each in a copy of the checkout. Prints a line for each."""
    texts = product(ROOT)
    places = {mutant.id: locate(mutant, texts) for mutant in mutants}
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    verdicts: dict[str, str] = {}
    printing = threading.Lock()

    def report(mutant: Mutant, verdict: str, why: str, seconds: float) -> None:
        with printing:
            verdicts[mutant.id] = verdict
            shown = "LIVES" if verdict == LIVES else verdict
            print(f"{shown:<7} {seconds:6.1f} s  {mutant.id:<28} {why}", flush=True)
            if out is not None:
                _save(out, verdicts)

    with tempfile.TemporaryDirectory(prefix="mutants_", ignore_cleanup_errors=True) as scratch:
        copies = [Copy(Path(scratch) / str(number), timeout_s) for number in range(jobs)]
        located = [mutant for mutant in mutants if len(places[mutant.id]) == 1]
        selectors = [*dict.fromkeys(each for mutant in located for each in mutant.tests)]
        began = time.monotonic()
        outcomes = copies[0].outcomes(selectors) if selectors else {}
        print(f"{len(outcomes)} tests without a mutant: {time.monotonic() - began:.0f} s", flush=True)
        for mutant in mutants:
            failing = [each for each in mutant.tests if not passes(each, outcomes)]
            if len(places[mutant.id]) != 1:
                report(mutant, LOST, _where(places[mutant.id]), 0.0)
            elif failing:
                report(mutant, BROKEN, f"without the mutant fails, or does not run: {', '.join(failing)}", 0.0)
            else:
                waiting.put(mutant)

        def work(copy: Copy) -> None:
            while True:
                try:
                    mutant = waiting.get_nowait()
                except queue.Empty:
                    return
                began = time.monotonic()
                verdict, why = copy.try_one(mutant, places[mutant.id][0])
                report(mutant, verdict, why, time.monotonic() - began)

        threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counts = {name: sum(each == name for each in verdicts.values()) for name in (KILLED, LIVES, LOST, BROKEN)}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(", ".join(f"{count} {name}" for name, count in counts.items()), end="")
    print(f"; {(used.ru_utime + used.ru_stime) / 60:.1f} minutes of CPU time")
    known = {mutant.id for mutant in mutants if mutant.lives}
    bad = {name for name, verdict in verdicts.items() if verdict != KILLED and not (verdict == LIVES and name in known)}
    return 1 if bad else 0


def _save(path: Path, verdicts: dict[str, str]) -> None:
    """Write verdicts by id, in the order of the list; those that the file has of other mutants of the list stay."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    both = before | verdicts
    order = [mutant.id for mutant in read_list(LIST.read_text(encoding="utf-8"))]
    path.write_text(json.dumps({name: both[name] for name in order if name in both}, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("check", "locate each text, run nothing"), ("run", "try mutants")):
        command = commands.add_parser(name, help=text)
        command.add_argument("names", nargs="*", metavar="ID or GROUP", help="all, if none is given")
        if name == "run":
            command.add_argument("--jobs", type=int, default=1, help="mutants at once, each in a copy of its own (1)")
            command.add_argument("--out", type=Path, help="a JSON file: {id: verdict}")
            command.add_argument("--timeout", type=float, default=120.0, help="seconds of a test with a mutant (120)")
    asked = parser.parse_args(argv)
    try:
        mutants = chosen(read_list(LIST.read_text(encoding="utf-8")), asked.names)
    except ValueError as error:
        print(f"error: {LIST.name}: {error}", file=sys.stderr)
        return 2
    if asked.command == "check":
        return check(mutants)
    return run(mutants, max(1, asked.jobs), asked.out, asked.timeout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
