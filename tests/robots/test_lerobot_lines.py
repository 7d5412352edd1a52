"""LeRobot's own command lines, as its documentation and issues have them: what each does here (lerobot_lines.py)."""

import shutil

import lerobot_lines
import pytest
from conftest import ROOT, succeed

LINES = lerobot_lines.lines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with their datasets, weights and runs."""
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("lines")
    lerobot_lines.load_lerobot()
    with lerobot_lines.world(folder):
        answers = {entry["line"]: lerobot_lines.answer(entry["line"], folder) for entry in LINES}
    return folder, answers


@pytest.mark.slow
def test_thirty_nine_lines_do_what_is_told(folder):
    """And what is told, is told in the documentation: `python tests/robots/lerobot_lines.py --update` writes both."""
    _, answers = folder
    assert len(answers) == 39
    assert answers == {entry["line"]: lerobot_lines.expected(entry) for entry in LINES}
    page = (ROOT / "docs/robots.md").read_text()
    assert f"{lerobot_lines.BEGIN}{lerobot_lines.table(LINES)}{lerobot_lines.END}" in page


def short(words, steps):
    """So many steps of a small network; nothing is sent to wandb."""
    typed = {word.lstrip("-").partition("=")[0] for word in words}
    changed = {"steps": steps}
    if "config_path" not in typed:
        changed |= {"batch_size": 2, "wandb.enable": "false", "policy.device": "cpu", "dataset.cache": "none"}
    kept, is_value = [], False
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        key, equals, _ = word.lstrip("-").partition("=")
        if key in changed:
            is_value = not equals and not after.startswith("--")  # of `--steps 100000`, the number
        elif not is_value:
            kept.append(word)
        else:
            is_value = False
    sizes = dict(size.split("=") for size in lerobot_lines.SIZES.split())
    if not typed & {"policy.path", "config_path"}:
        changed |= {key: size for key, size in sizes.items() if key not in typed}
    return [*kept, *(f"--{key}={value}" for key, value in changed.items())]


@pytest.mark.slow
def test_a_handful_trains(launch, tmp_path):
    """The guide's line for ACT, and the one by which it resumes; the one that fine-tunes; one with `--steps 100000`."""

    def run(*parts, steps=2):
        (line,) = (entry["line"] for entry in LINES if all(part in entry["line"] for part in parts))
        words = short(lerobot_lines.words(line, tmp_path), steps)
        return succeed(launch.python(str(ROOT / "train.py"), *words, cwd=tmp_path)).out

    with lerobot_lines.world(tmp_path):
        shutil.rmtree("outputs")
        assert "Done: 2 steps" in run("me/so101_test ", "output_dir")
        out = run("act_so101_test/checkpoints/last", steps=3)
        assert "Resuming outputs/train/act_so101_test/" in out and "Done: 3 steps" in out
        shutil.rmtree("outputs")
        out = run("the_policy_to_finetune")
        assert "Weights from username/the_policy_to_finetune" in out and "Done: 2 steps" in out
        assert "Done: 2 steps" in run("--steps 100000", "--policy.use_vae=false")
