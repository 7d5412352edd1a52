"""Every way to get the config wrong ends in one line that says what, where and what to do, before anything is written.

What is wrong with keys, types and ranges is in test_config.py; here stands what is wrong with files, and with values.
"""

import re

import pytest

import tasks
from engine import config
from engine.contract import LockstepError


def problems(*argv):
    with pytest.raises(LockstepError) as caught:
        config.parse(list(argv), tasks.load)
    assert caught.value.exit_code == 2
    lines = str(caught.value).split("\n")
    assert all(line.isprintable() and ": " in line for line in lines), lines
    return lines


def in_file(tmp_path, content):
    path = tmp_path / "c.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return problems("har", "--config", str(path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("just words\n", r"holds no keys \(.*c.yaml\): write lines such as"),
        ("42\n", "holds no keys"),
        ("epochs: 3\n\tlr: 1\n", r"not valid YAML: .*\(.*c.yaml:2:1\): fix that line"),
        ("epochs: 3\nlr: [1, 2\nsteps: 4\n", r"not valid YAML: .*\(.*c.yaml:3:\d+\): fix that line"),
        ("epochs: 3\n lr: 1\n", r"not valid YAML: .*\(.*c.yaml:2:\d+\)"),
        ("a: 1\n---\nb: 2\n", r"not valid YAML: .*\(.*c.yaml:2:1\)"),
        ("epochs: *gone\n", r"not valid YAML: .*gone.*\(.*c.yaml:1:9\)"),
        ("epochs: 3\nsave_dir: a\0b\n", r"not valid YAML: unacceptable character #x0000: .*\(.*c.yaml:2\)"),
        (
            b"save_dir: caf\xe9\n",
            r"cannot read the config file: 'utf-8' codec .*\(.*c.yaml\): give a text file in UTF-8",
        ),
        ("epochs: 3\n".encode("utf-16"), r"cannot read the config file: .*UTF-8"),
        ("#" * 300_000, r"it has more than 200000 bytes \(.*c.yaml\)"),
        ("[" * 5000, "not valid YAML: maximum recursion"),
        ('save_dir: "\\UFFFFFFFF"\n', r"not valid YAML: .*\(.*c.yaml\)"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_file_that_is_no_config(tmp_path, content, says):
    (line,) = in_file(tmp_path, content)
    assert re.search(says, line), line


@pytest.mark.parametrize("content", ["", "\n\n", "# a remark\n", "---\n"])
def test_an_empty_file_is_an_empty_delta(tmp_path, content):
    (tmp_path / "c.yaml").write_text(content)
    assert config.parse(["har", "--config", str(tmp_path / "c.yaml")], tasks.load).cfg.task == "har"


@pytest.mark.parametrize("path", ["", ".", "gone.yaml", "gone/c.yaml", "x" * 5000, "a\0b"])
def test_a_path_that_is_no_file(path):
    (line,) = problems("--config=" + path)
    assert "config file" in line and "give " in line


@pytest.mark.parametrize("value", ["0", "-1", "-1e-3", "nan", "NaN", ".nan", "inf", "-inf", ".inf", "1e400"])
@pytest.mark.parametrize("key", ["lr", "batch_size"])
def test_a_rate_or_a_size_that_is_none(tmp_path, key, value):
    for line in (*in_file(tmp_path, f"{key}: {value}\n"), *problems("har", f"{key}={value}")):
        assert line.startswith(f"{key}={value} (")
        assert re.search("must be (above 0|at least 1)|give a (finite )?number|give a whole number", line), line


@pytest.mark.parametrize("key", ["epochs", "steps", "gradient_accumulation_steps", "grad_accum_steps", "global_batch"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1.5", "1e-3", "1e30", "many"])
def test_a_count_that_is_none(key, value):
    (line,) = problems("har", f"{key}={value}")
    assert line.startswith(f"{key}={value} (command line): ")
    assert re.search(r"must be at least 0|must be at most 2\^53|give a (finite|whole) number", line), line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("epochs: 1e-3\n", "epochs=1e-3 .*:1.: give a whole number"),
        ("deterministic: maybe\n", "give true or false"),
        ("amp: fast\n", "choose one of auto, bf16, fp16, off"),
        ("gpu_ids: [a]\n", "give a whole number"),
        ("gpu_ids: [[0], 1]\n", "not plain data"),
        ("dataset: {val_subjects: [{a: 1}]}\n", "'dataset.val_subjects' has a value that is not plain data"),
        ("? [a, b]\n: 3\n", "not plain data"),
        ('save_dir: "a\\nb"\n', r"save_dir=a\\nb .*: give text without control characters"),
        ('save_dir: "\\uD800"\n', "without control characters"),
        (
            "optim: {lr: 1}\noptim: {eps: 1}\nlr: 2\n",
            "'optim.lr' is given twice, as optim.lr and lr .*:1 and .*:3.: keep",
        ),
        ("policy: {type: [act]}\n", "unknown key 'policy.type'"),
        ("steps: 1\nsteps: 1\n", "'steps' is given twice .*:1 and .*:2.: keep one"),
        ("lr: 1\noptim: {lr: 1}\n", "'optim.lr' is given twice"),
        ("widht: 3\n", "unknown key 'widht' .*:1.: "),
        ("Epochs: 3\n", "unknown key 'Epochs' .*:1.: did you mean 'epochs'"),
        ("a\u200bb: 3\n", r"unknown key 'a\\+u200bb'"),
        (f"{'x' * 900}: 3\n", r"unknown key 'x{77}\.\.\.'"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_value_that_does_not_fit(tmp_path, content, says):
    (line,) = in_file(tmp_path, content)
    assert re.search(says, line), line


@pytest.mark.parametrize(
    "content",
    [
        "save_dir: !!python/object/apply:os.system ['touch pwned']\n",
        "save_dir: !!python/object/apply:subprocess.check_output [[touch, pwned]]\n",
        "gpu_ids: [!!python/object/apply:os.system ['touch pwned']]\n",
        "!!python/object/apply:os.system ['touch pwned']: 3\n",
        "!!python/object/apply:os.system {args: ['touch pwned']}\n",
        "!!python/object/new:os.system\nargs: ['touch pwned']\n",
        "optim: !!python/object:os.environ {lr: 1}\n",
        "lr: !!python/name:os.system\n",
        "lr: !mine 3\n",
    ],
)
def test_a_tag_is_never_obeyed(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    assert re.search("not plain data|not valid YAML|holds no keys", in_file(tmp_path, content)[0])
    assert not (tmp_path / "pwned").exists()


BOMBS = {
    "lists": ["a0: &a0 [x,x,x,x,x,x,x,x,x]"] + [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)],
    "sections": ["a0: &a0 {k: v, l: w}"]
    + [f"a{i}: &a{i} {{{','.join(f'k{n}: *a{i - 1}' for n in range(30))}}}" for i in range(1, 30)],
    "empty sections": ["a0: &a0 {}"]
    + [f"a{i}: &a{i} {{{','.join(f'k{n}: *a{i - 1}' for n in range(30))}}}" for i in range(1, 30)],
    "keys": ["a0: &a0 [x,x]"]
    + [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    + ["? *a29", ": 1"],
    "itself": ["a: &a {" + ",".join(f"k{n}: *a" for n in range(200)) + "}"],
    "a long list again and again": [f"a: &a [{','.join('x' * 5000)}]"] + [f"b{n}: *a" for n in range(5000)],
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", BOMBS)
def test_aliases_that_multiply_end_at_once(tmp_path, name):
    lines = in_file(tmp_path, "\n".join(BOMBS[name]))
    assert any("more than 2000 values" in line or "not plain data" in line for line in lines) and len(lines) < 100


@pytest.mark.parametrize("word", ["--force=no", "--dry-run=false", "--print_config=0"])
def test_a_switch_takes_no_value(word):
    """`--dry-run=false` would have been a dry run."""
    (line,) = problems("har", word)
    assert f"{word} (command line): give --" in line and "alone, or not" in line


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def broken(:\n", r"SyntaxError: .*mine.py:1\): fix it; --debug shows the traceback"),
        ("x = 1\nimport no_such_module_at_all\n", r"ModuleNotFoundError: No module named .*mine.py:2\)"),
        ("open('/nowhere/at/all')\n", r"FileNotFoundError: .*mine.py:1\)"),
        ("x = 'a\0b'\n", "cannot import the task"),
    ],
)
def test_a_task_file_that_cannot_be_imported(tmp_path, source, says):
    (tmp_path / "mine.py").write_text(source)
    for _ in range(2):  # the second time there is no half-imported module to be found
        (line,) = problems(str(tmp_path / "mine.py"))
        assert re.search(says, line), line


@pytest.mark.parametrize("name", ["", "../har", "x" * 5000 + ".py", "a\0.py", ".py", "_classification"])
def test_a_task_that_is_none(name):
    assert re.search("no task", problems(f"task={name}")[0])


def test_all_of_a_file_and_the_command_line_at_once(tmp_path):
    (tmp_path / "c.yaml").write_text("optim: {lr: nan}\nepochs: 1e-3\nwidht: 3\nsave_dir: !!python/name:os.system\n")
    lines = problems("har", "--config", str(tmp_path / "c.yaml"), "batch_size=-3", "--force=no", "sampler=balancd")
    for says in ("lr=nan", "epochs=1e-3", "'widht'", "'save_dir'", "batch_size=-3", "--force=no", "sampler=balancd"):
        assert sum(says in line for line in lines) == 1, says
    assert len(lines) == 7
