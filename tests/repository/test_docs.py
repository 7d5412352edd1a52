"""The pages in docs/: their links, and the scripts for one's own data."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT, succeed

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["links.py", "lerobot_keys.py"])
def test_lines_and_tables_of_the_pages_are_those_of_the_code(script):
    command = [sys.executable, f"dev/{script}", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\nfixed by: python dev/{script}"


def test_the_six_places_lead_to_code():
    text = (ROOT / "docs/what-ddp-adds.md").read_text()
    parts = re.split(r"^## (\d)\. ", text, flags=re.M)[1:]
    assert parts[::2] == list("123456")
    assert all(len(re.findall(r"\]\(\.\./\w[^)]*#L\d+\)", part)) >= 3 for part in parts[1::2])


def test_the_index_has_each_page_once():
    listed = re.findall(r"^\| \[.*?\]\((.*?)\) \|", (ROOT / "docs/README.md").read_text(), flags=re.M)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_are_there(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", text)
    assert not [link for link in links if not (page.parent / link).exists()]
    rooms = "configs|docs|dev|engine|examples|formats|models|plugins|tasks|tests|tools"
    named = re.findall(rf"`((?:{rooms})/[\w/-]+\.(?:py|md|yaml))`", text)
    assert not [name for name in named if not (ROOT / name).exists() and "mine" not in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "short", "metric"),
    [("sensors", "epochs=3", "macro_f1"), ("videos", "epochs=2 model.width=4", "macro_f1"),
     ("robot", "steps=4", "action_l1")],
)  # fmt: skip
def test_own_data_from_raw_files_to_metrics(launch, tmp_path, name, short, metric):
    if name == "videos":
        pytest.importorskip("av")
    words = [f"examples/own_{name}.py", str(tmp_path / "own"), *short.split()]
    done = succeed(launch.python(*words, LOCKSTEP_CACHE=str(tmp_path / "cache")))
    trained, scored = done.out.split("$ python tools/evaluate.py")
    assert "Done: " in trained and re.search(rf"^  {metric} +[\d.]+$", scored, re.M)
    assert "the data are made up" in done.out and [*(tmp_path / "own/made_up/raw").iterdir()], "what the user replaces"


@pytest.mark.slow
def test_a_task_of_ones_own_learns(launch, tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("price,size\n" + "".join(f"{n % 7},{n % 7 + 1}\n" for n in range(200)))
    runs = {"made_up": [], "own": [f"table.path={table}", "table.target=price"]}
    for name, words in runs.items():
        done = succeed(launch.python("train.py", "examples/own_task.py", *words, f"save_dir={tmp_path / name}"))
        assert float(re.search(r"best rmse ([\d.]+)", done.out)[1]) < 0.5, name
    done = launch.python("train.py", "examples/own_task.py", f"table.path={table}")
    assert done.code == 2 and done.errors == ["error: no column 'y' (table.target): choose of price, size"]
