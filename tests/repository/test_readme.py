"""Every command in a fenced block of these pages, and in a table of the README, runs: literally, with what makes it
short behind it. A command that neither these tests, nor those of test_guides.py, nor those that commands.txt names run
fails a test."""

import os
import re
import shlex
import signal

import pytest
import torch
from conftest import ROOT, succeed
from guides import COMMANDS, SHORT_HAR, SHORT_VIDEO, assert_trained, command
from saved import load

TOPICS = """
agents behaviour config larger launching nothing-lost port-your-loop pretrained publish robots same-bits study tools
troubleshooting your-own-data
"""
PAGES = ("README.md", *(f"docs/{name}.md" for name in TOPICS.split()))
PROGRAMS = re.compile(
    r"((\w+=\S* )*)(python|torchrun|accelerate|make|srun|sbatch|pip|\./train_multigpu\.sh|\.venv/bin/python)\b"
)

TRAINED = {  # command: processes
    "./train_multigpu.sh 3 har --epochs 20": 3,
    "./train_multigpu.sh 3 --config configs/video.yaml": 3,
    "torchrun --standalone --nproc_per_node=2 train_ddp.py --config configs/har.yaml ddp.bucket_cap_mb=50": 2,
    "CUDA_VISIBLE_DEVICES=0,1,3 torchrun --standalone --nproc_per_node=3 train.py video": 3,
}


def commands_run_elsewhere():
    """{command: the test that runs it} of commands.txt"""
    found, test = {}, ""
    for line in (ROOT / "tests" / "repository" / "commands.txt").read_text().splitlines():
        if line.startswith("["):
            test = line.strip("[]")
        elif line and not line.startswith("#"):
            found[line] = test
    return found


def shown():
    """{command: page} of all fenced blocks, and of the tables of the README."""
    found = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
        lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
        if page == "README.md":
            rows = re.findall(r"^\|.*\|$", text, re.M)
            lines += [words for row in rows for words in re.findall(r"`([^`]+)`", row)]
        for line in lines:
            if PROGRAMS.match(line):
                found.setdefault(re.sub(r"\s+#.*", "", line), page)
    return found


def in_the_guides(words):
    """Return whether tests/kit/guides.py has the command, with nothing but settings behind it."""
    found = (line.removeprefix(f"{words} ") for _, line in COMMANDS if line.startswith(f"{words} "))
    return any(all("=" in more for more in rest.split()) for rest in found)


PLANS = {  # command: how many lines of its plan are shown
    "python train.py har --dry-run global_batch=256 batch_size=64": 8,
    "torchrun --standalone --nproc_per_node=3 train.py har --dry-run virtual_workers=8": 3,
    "torchrun --standalone --nproc_per_node=2 train.py har --dry-run virtual_workers=8 ddp.shares=3,1": 3,
}

HERE = {
    "make train",
    "make test",
    "./train_multigpu.sh --print 2 har",
    *PLANS,
    "python train.py har epoch=3 --lr abc optim.wieght_decay=0",
}
"""The tests below run these, and those of `the_proof`."""


def the_proof():
    """The commands that end in one hash; those with a folder are one run, killed twice."""
    return [words for words in shown() if "virtual_workers=4 model.dropout" in words]


def the_same_steps():
    """The commands that train the README's task with one global batch on different numbers of processes."""
    return [words for words in shown() if words.endswith(" mine.py global_batch=48")]


def test_no_command_is_left_out():
    elsewhere = commands_run_elsewhere()
    known = {*TRAINED, *HERE, *the_proof(), *the_same_steps(), *elsewhere}
    left_out = {words: page for words, page in shown().items() if words not in known and not in_the_guides(words)}
    assert not left_out, "run them here, or say why not"
    assert known <= shown().keys(), "no page shows these any more"
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name in elsewhere.values() if f"def {name}(" not in tests]


@pytest.mark.slow
@pytest.mark.parametrize("words", TRAINED)
def test_a_command_trains(launch, tmp_path, words):
    short = SHORT_VIDEO if "video" in words else SHORT_HAR
    settings = dict(re.findall(r"(\w+)=(\S*) ", PROGRAMS.match(words)[1]))
    line = f"{words.removeprefix(PROGRAMS.match(words)[1])} {short}"
    assert_trained(launch(*command(line, tmp_path), **settings), tmp_path, TRAINED[words])


@pytest.mark.slow
def test_all_end_in_the_same_bits(launch, tmp_path):
    """Small batches, with three times the stride; a rank is killed at step 6, and at step 12."""
    hashes, kills = [], 2
    for words in the_proof():
        line, _, folder = words.partition(" save_dir=")
        line = line.replace("global_batch=256", "global_batch=32")
        line += " dataset.stride=192 batch_size=8 epochs=1 log_every=2 save_every=2"
        run = launch.start(*command(line, tmp_path / (folder or str(len(hashes)))))
        if folder and kills:
            run.wait_for(f"step {6 * (3 - kills)}/")  # then an earlier checkpoint is whole
            os.kill(launch.rank_pid(1), signal.SIGKILL)
            assert run.wait().code and "sha256" not in run.said()
            kills -= 1
            continue
        done = succeed(run.wait())
        assert ("Resuming" in done.out) == bool(folder)
        hashes.append(re.search(r"weights +sha256 (\w+)", done.out)[1])
    assert len(hashes) == 3 and len(set(hashes)) == 1


@pytest.mark.slow
def test_the_own_task_takes_the_same_steps_on_other_numbers_of_processes(launch, tmp_path):
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    program = next(block.split("```")[0] for block in blocks if "class Task(Base)" in block)
    (tmp_path / "mine.py").write_text(program)
    weights = []
    for number, words in enumerate(the_same_steps()):
        line = words.replace("mine.py", str(tmp_path / "mine.py")) + " amp=off epochs=4"
        folder = tmp_path / str(number)
        succeed(launch(*command(line, folder)))
        weights.append(load(folder / "run")["model"])
    one, three = weights
    for name, weight in one.items():
        torch.testing.assert_close(three[name], weight, rtol=0, atol=1e-6)


def test_make_starts_what_it_says(launch):
    make = ("make", "-n", "-B", "--no-print-directory")
    train, test, gpu = (succeed(launch(*make, target)).out for target in ("train", "test", "gpu"))
    assert "./train_multigpu.sh" in train and "pip install" in train and "requirements.txt" in train
    assert "-m pytest -n " in test and "requirements-dev.txt" in test
    assert "-m pytest -m gpu" in gpu and "requirements-dev.txt" in gpu


def test_the_launcher_prints_its_command(launch):
    done = succeed(launch("./train_multigpu.sh", "--print", "2", "har"))
    assert "--nproc_per_node=2" in done.out and shlex.split(done.out)[-2].endswith("/train.py")


def blocks_after(words):
    """The lines that a page shows behind a command."""
    text = (ROOT / shown()[words]).read_text()
    return text.split(f"$ {words}\n")[1].split("```")[0].splitlines()


def test_mistakes_are_told_as_shown(launch):
    words = "python train.py har epoch=3 --lr abc optim.wieght_decay=0"
    done = launch.python(*shlex.split(words)[1:])
    assert done.code == 2 and done.errors == blocks_after(words)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "lines"), PLANS.items())
def test_the_arithmetic_is_as_shown(launch, tmp_path, words, lines):
    done = succeed(launch(*command(words, tmp_path)))
    expected = [line for line in blocks_after(words) if not line.startswith(("  precision", "  device"))]
    assert len(expected) == lines and not [line for line in expected if line not in done.out.splitlines()]
