"""One schema: what a person can get wrong is found before anything starts, all of it at once, in one line each that
tells what, where and what to do."""

import importlib.util
import re

import pytest
import yaml
from conftest import ROOT, TOY, succeed

import tasks
from engine import config, hooks
from engine.contract import LockstepError


def parse(*argv):
    return config.parse(list(argv), tasks.load).cfg


def problems(*argv):
    with pytest.raises(LockstepError) as caught:
        parse(*argv)
    assert caught.value.exit_code == 2
    lines = str(caught.value).split("\n")
    assert all(line.isprintable() and ": " in line for line in lines), lines
    return lines


def in_file(tmp_path, content):
    (tmp_path / "c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    # As seen from its folder: a line shortens a long path, and how long pytest's is depends on the machine.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        return problems("har", "--config", "c.yaml")


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        ("--batch-size 16", "batch_size", 16),
        ("--batch_size=16", "batch_size", 16),
        ("batch_size=16", "batch_size", 16),
        ("--lr 1e-4", "optim.lr", 1e-4),
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("--optim.lr 3e-4", "optim.lr", 3e-4),
        ("learning_rate=3e-4", "optim.lr", 3e-4),
        ("--warmup-epochs 2", "schedule.warmup_epochs", 2.0),
        ("--weight-decay 1e-4", "optim.weight_decay", 1e-4),
        ("--grad-accum-steps 4", "gradient_accumulation_steps", 4),
        ("gradient_accumulation_steps=4", "gradient_accumulation_steps", 4),
        ("--gpu-ids 0,1,3", "gpu_ids", [0, 1, 3]),
        ("--multi-gpu ddp", "multi_gpu", "ddp"),
        ("--use_amp", "amp", "auto"),
        ("--use-amp --epochs 3", "amp", "auto"),
        ("use_amp=false", "amp", "off"),
        ("amp=no", "amp", "off"),
        ("--amp bf16", "amp", "bf16"),
        ("wandb.enable=true", "wandb.enable", True),
        ("wandb.project=my-robot-project", "wandb.project", "my-robot-project"),
        ("--deterministic", "deterministic", True),
        ("--deterministic no", "deterministic", False),
        ("steps=1e4", "steps", 10000),
        ("--save-dir=a;touch\u00a0x", "save_dir", "a;touch\u00a0x"),
        ("--save-dir runs/lr=1", "save_dir", "runs/lr=1"),
        ("--mode flatten", "model.mode", "flatten"),
        ("resume=True", "resume", "auto"),
        ("--resume false", "resume", "never"),
        ("--local-rank=1", "epochs", 12),
        ("--local-rank 1", "epochs", 12),
    ],
)
def test_every_spelling_of_the_guides(argv, key, value):
    assert config.flatten(config.to_dict(parse("har", *argv.split(" "))))[key] == value


@pytest.mark.parametrize(
    ("word", "refused"),
    [
        ("--policy.repo_id=me/act", ""),
        ("--policy.n_obs_steps=1", "2"),
        ("--use_policy_training_preset=true", "false"),
        ("--dataset.video_backend=torchcodec", ""),
        ("--prefetch_factor=4", ""),
        ("--save_checkpoint=True", "no"),
        ("--wandb.disable_artifact=true", "false"),
        ("--eval.batch_size=10", ""),
        ("--env.task=PushT-v0", "AlohaInsertion-v0"),
    ],
)
def test_keys_of_lerobot_that_set_nothing(word, refused):
    """Those of another place are accepted with a note, where they ask for what is so anyway, and refused otherwise."""
    common = ["robot", "--policy.type=act", "--env.type=pusht"]
    asked = config.parse([*common, word], tasks.load, others=tasks.names())
    assert config.to_dict(asked.cfg) == config.to_dict(parse(*common))
    name = word[2:].partition("=")[0]
    assert len(asked.notes) == 1 and asked.notes[0].startswith(f"{word[2:]} (command line) sets nothing here: ")
    why = asked.notes[0].partition("here: ")[2]
    if refused:
        (line,) = problems(*common, f"--{name}={refused}")
        assert line.startswith(f"{name}={refused[:70]}") and line.endswith(f": {why}"), line


def test_mappings_in_json_and_in_yaml(tmp_path):
    """As LeRobot's documentation types them: for a section, and for a list of pairs."""
    names = "observation.image:observation.images.top"
    (tmp_path / "c.yaml").write_text("rename_map:\n  observation.image: observation.images.top\n")
    for words in (
        ["--config", str(tmp_path / "c.yaml")],
        ['--rename_map={"observation.image": "observation.images.top"}'],
        ["--rename_map", '{"observation.image": "observation.images.top"}'],
        [f"rename_map={names}"],
    ):
        assert parse("robot", *words).rename_map == [names]
    assert parse("robot", "--rename_map={}").rename_map == []
    modes = '--policy.normalization_mapping={"ACTION": "MIN_MAX", "STATE": "QUANTILES"}'
    mapping = parse("robot", "policy.type=act", modes).policy.normalization_mapping
    assert (mapping.ACTION, mapping.STATE, mapping.VISUAL) == ("MIN_MAX", "QUANTILES", "MEAN_STD")
    (line,) = problems("robot", "policy.type=act", modes.replace("MIN_MAX", "MINMAX"))
    assert "policy.normalization_mapping.ACTION=MINMAX (command line): did you mean MIN_MAX" in line
    (line,) = problems("robot", '--policy.normalization_mapping={"ACTION": "MEAN_STD"')
    assert line == "not valid YAML: expected ',' or '}', but got '<stream end>' (command line:1:52): fix that line"
    (line,) = problems("robot", "--policy.chunk_size={a: 1}")
    assert line == "policy.chunk_size={a: 1} (command line): give a whole number"


def test_a_run_stands_for_its_config_and_lerobots_file_for_the_run(tmp_path):
    """`--config RUN` goes on with a run, and so does the file that LeRobot's documentation names for it."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("task: har\nepochs: 7\nsave_dir: elsewhere\n")
    inside = f"{run}/checkpoints/last/pretrained_model/train_config.json"
    for name in (str(run), inside):
        cfg = parse(f"--config_path={name}", "--resume=true", "batch_size=3")
        assert (cfg.epochs, cfg.save_dir, cfg.resume, cfg.batch_size) == (7, str(run), "auto", 3)
    (tmp_path / "my arm/pretrained_model").mkdir(parents=True)
    theirs = tmp_path / "my arm/pretrained_model/train_config.json"
    theirs.write_text(
        '{"dataset": {"repo_id": "me/x", "root": null}, "batch_size": 8, "steps": 20, "seed": 1000, '
        '"rename_map": {"observation.images.front": "observation.images.top"}}'
    )
    (line,) = problems("robot", f"--config_path={theirs}", "--resume=true")
    folder = theirs.parent
    names = '{"observation.images.front": "observation.images.top"}'
    typed = f"'policy.path={folder}' dataset.repo_id=me/x batch_size=8 steps=20 seed=1000 '--rename_map={names}'"
    assert line == (
        "this is LeRobot's own config, and its optimizer and its place in the data cannot be taken over "
        f"({theirs}): start a new run from its weights: `python train.py robot {typed}`"
    )
    (line,) = problems("--config_path=nowhere/train_config.json")
    assert line.startswith("no config file 'nowhere/train_config.json'")


def test_keys_of_another_task_name_it():
    lerobot = "--policy.type=act --dataset.repo_id=x --eval.n_episodes=3 --env.type=pusht --policy.n_obs_steps=1"
    with pytest.raises(LockstepError) as caught:
        config.parse([*lerobot.split(), "epochss=3", "--output_dir=o"], tasks.load, others=tasks.names())
    first, second = str(caught.value).splitlines()
    names = ["policy.type", "dataset.repo_id", "eval.n_episodes", "env.type", "policy.n_obs_steps", "output_dir"]
    assert first.startswith(", ".join(map(repr, names)) + " (command line): keys of task robot: begin with its name")
    assert "unknown key 'epochss'" in second
    with pytest.raises(LockstepError, match=r"'dataset.trials' .*: a key of task video: .* `python train.py video"):
        config.parse(["har", "dataset.trials=3"], tasks.load, others=tasks.names())


@pytest.mark.parametrize("before", ["", "epochs: 3\n", "# a remark\n\n"])
def test_lines_of_python_in_a_yaml(tmp_path, before):
    """Guide 000 gives the first two as YAML."""
    (tmp_path / "c.yaml").write_text(
        f"{before}torch.backends.cudnn.benchmark = True  # Auto-select\n"
        "torch.backends.cuda.matmul.allow_tf32 = True  # Use TF32\n"
    )
    where = f"{tmp_path / 'c.yaml'}:{before.count(chr(10)) + 1}"
    what = "`torch.backends.cudnn.benchmark = True` is not YAML"
    todo = "drop it: cuDNN tries its kernels; deterministic=true ends that"
    assert problems("--config", str(tmp_path / "c.yaml")) == [f"{what} ({where}): {todo}"]
    (tmp_path / "c.yaml").write_text(f"{before}batch_size = 3\n")
    assert problems("--config", str(tmp_path / "c.yaml"))[0].endswith("): write `batch_size: 3`")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("epoch=3", r"unknown key 'epoch' \(command line\): did you mean 'epochs'\?"),
        ("--optim.learning_rat 3", "did you mean 'learning_rate' or"),
        ("ddp.buket_cap_mb=3", r"did you mean 'ddp.bucket_cap_mb'\?"),
        ("model.widht=3", "did you mean 'model.width'"),
        ("nonsense=3", r"unknown key 'nonsense' \(command line\): see --print-config"),
        ("optim=3", r"'optim' is a section \(command line\): set a key in it, such as optim.name"),
        ("batch_size=two", r"^batch_size=two \(command line\): give a whole number$"),
        ("deterministic=perhaps", "give true or false"),
        ("amp=fp61", r"did you mean fp16\? choose one of auto, bf16, fp16, off"),
        ("amp=fast", "choose one of auto, bf16, fp16, off"),
        ("gpu_ids=0,x", "give a whole number"),
        ("gpu_ids=0,0", "name each GPU once"),
        ("gpu_ids=-1", "must be at least 0"),
        ("lr=0", "must be above 0 and at most 1000"),
        ("optim.ema_decay=1.5", "must be at least 0 and at most 1"),
        ("lr=1 optim.lr=2", r"'optim.lr' is given twice, as lr and optim.lr \(command line and .*\): keep one"),
        ("har video", "unexpected 'video'"),
        ("--epochs", "a value is missing"),
        ("epochs=0", "the run would never end"),
        ("lr_scaling=linear", "without schedule.base_batch_size"),
        ("schedule.power=2", r"schedule.power=2.0 with schedule.kind=cosine \(config\): drop it"),
        ("schedule.kind=wsd schedule.milestone_epochs=3", r"milestone_epochs=\[3.0\] with schedule.kind=wsd"),
        ("schedule.kind=step", r"kind=step needs schedule.period_epochs or schedule.period_steps \(config\): give"),
        ("schedule.kind=warm-restarts", "needs schedule.period_epochs or schedule.period_steps"),
        ("schedule.kind=multistep", "needs schedule.milestone_epochs or schedule.milestone_steps"),
        ("schedule.kind=inverse-sqrt warmup_epochs=0", "needs schedule.warmup_epochs or schedule.warmup_steps"),
        ("schedule.kind=one_cycle", "did you mean one-cycle"),
        ("hra", "no task 'hra'"),
        ("nowhere.py", "no task file 'nowhere.py'"),
        *((f"task={name}", "no task") for name in ("../har", "x" * 5000 + ".py", "a\0.py", ".py", "shared", "envs")),
        ("task=", "no task ''"),
        ("--config=nowhere.yaml", "no config file 'nowhere.yaml'"),
        ("--config", r"--config without a file \(command line\): write"),
        *((f"--config={path}", "config file.*: give ") for path in ("", ".", "gone/c.yaml", "x" * 5000, "a\0b")),
        ("har --force=no", r"--force=no \(command line\): give --force alone, or not"),
        ("har --dry-run=false", r"--dry-run=false \(command line\): give --dry-run alone, or not"),  # was a dry run
        ("har --force lr,optim.rate", r"^--force optim.rate \(command line\): name keys of --print-config, or data"),
    ],
)  # fmt: skip
def test_what_a_person_can_get_wrong(argv, expected):
    (line,) = problems(*argv.split(" "))
    assert re.search(expected, line), line


@pytest.mark.parametrize("value", "0 -1 -1e-3 nan .nan inf -inf .inf 1e400 abc 1.5 1e-3 1e30 many".split())
@pytest.mark.parametrize(
    ("key", "takes"),
    [("lr", "1.5 1e-3"), ("batch_size", ""), ("epochs", "0"), ("grad_accum_steps", "0"), ("global_batch", "0")],
)
def test_a_number_that_does_not_fit(tmp_path, key, takes, value):
    other = ["steps=1"] if key == "epochs" else []
    if value in takes.split():
        parse("har", f"{key}={value}", *other)
        return
    for line in (*in_file(tmp_path, f"{key}: {value}\n"), *problems("har", f"{key}={value}")):
        assert line.startswith(f"{key}={value} (")
        assert re.search(
            r"must be (above|at least|at most) |give a (finite )?number|give a (finite|whole) number", line
        )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("just words\n", r"holds no keys \(.*c.yaml\): write lines such as"),
        ("42\n", "holds no keys"),
        ("- a\n- b\n", "holds no keys"),
        ("epochs: 3\n\tlr: 1\n", r"not valid YAML: .*\(.*c.yaml:2:1\): fix that line"),
        ("epochs: 3\nlr: [1, 2\nsteps: 4\n", r"not valid YAML: .*\(.*c.yaml:3:\d+\): fix that line"),
        ("epochs: 3\n lr: 1\n", r"not valid YAML: .*\(.*c.yaml:2:\d+\)"),
        ("a: 1\n---\nb: 2\n", r"not valid YAML: .*\(.*c.yaml:2:1\)"),
        ("epochs: *gone\n", r"not valid YAML: .*gone.*\(.*c.yaml:1:9\)"),
        ("epochs: 3\nsave_dir: a\0b\n", r"not valid YAML: unacceptable character #x0000: .*\(.*c.yaml:2\): fix"),
        (b"save_dir: caf\xe9\n", r"cannot read the config file: 'utf-8' codec .*\(.*c.yaml\): give a text file"),
        ("epochs: 3\n".encode("utf-16"), r"cannot read the config file: .*UTF-8"),
        ("#" * 300_000, r"it has more than 200000 bytes \(.*c.yaml\)"),
        ("[" * 5000, "not valid YAML: maximum recursion"),
        ('save_dir: "\\UFFFFFFFF"\n', r"not valid YAML: .*\(.*c.yaml\)"),
        ("epochs: 1e-3\n", "epochs=1e-3 .*:1.: give a whole number"),
        ("lr: [1, 2]\n", "lr=1,2 .*:1.: give one value, not a list"),
        ("policy: {type: [act]}\n", "unknown key 'policy.type'"),
        ("gpu_ids: [[0], 1]\n", "not plain data"),
        ("dataset: {val_subjects: [{a: 1}]}\n", "'dataset.val_subjects' has a value that is not plain data"),
        ("? [a, b]\n: 3\n", "not plain data"),
        ('save_dir: "a\\nb"\n', r"save_dir=a\\nb .*: give text without control characters"),
        ('save_dir: "\\uD800"\n', "without control characters"),
        ("steps: 1\nsteps: 1\n", "'steps' is given twice .*:1 and .*:2.: keep one"),
        ("optim: {lr: 1}\noptim: {eps: 1}\nlr: 2\n", "given twice, as optim.lr and lr .*:1 and .*:3.: keep one"),
        ("optim: 3\n", "is a section"),
        ("lr: {x: 1}\n", "unknown key 'lr.x'"),
        ("Epochs: 3\n", "unknown key 'Epochs' .*:1.: did you mean 'epochs'"),
        ("a\u200bb: 3\n", r"unknown key 'a\\+u200bb'"),
        (f"{'x' * 900}: 3\n", r"unknown key 'x{77}\.\.\.'"),
        # A tag is never obeyed.
        ("save_dir: !!python/object/apply:os.system ['touch pwned']\n", "not plain data"),
        ("gpu_ids: [!!python/object/apply:os.system ['touch pwned']]\n", "not plain data"),
        ("!!python/object/apply:os.system ['touch pwned']: 3\n", "not plain data"),
        ("!!python/object/apply:os.system {args: ['touch pwned']}\n", "holds no keys"),
        ("!!python/object/new:os.system\nargs: ['touch pwned']\n", "holds no keys"),
        ("optim: !!python/object:os.environ {lr: 1}\n", "not plain data"),
        ("lr: !!python/name:os.system\n", "not plain data"),
        ("lr: !mine 3\n", "not plain data"),
    ],
    ids=lambda value: repr(value[:20]),
)  # fmt: skip
def test_what_a_file_can_get_wrong(tmp_path, monkeypatch, content, expected):
    monkeypatch.chdir(tmp_path)
    (line,) = in_file(tmp_path, content)
    assert re.search(expected, line) and not (tmp_path / "pwned").exists(), line


def levels(first, form, count, items):
    """Lines of YAML, each an alias many times over of the one before."""
    each = (", ".join(items.format(n=n, i=i - 1) for n in range(count)) for i in range(1, 30))
    return [f"a0: &a0 {first}", *(f"a{i}: &a{i} {form[0]}{inner}{form[1]}" for i, inner in enumerate(each, 1))]


BOMBS = {
    "lists": levels("[x,x,x,x,x,x,x,x,x]", "[]", 9, "*a{i}"),
    "sections": levels("{k: v, l: w}", "{}", 30, "k{n}: *a{i}"),
    "empty sections": levels("{}", "{}", 30, "k{n}: *a{i}"),
    "keys": [*levels("[x,x]", "[]", 9, "*a{i}"), "? *a29", ": 1"],
    "itself": ["a: &a {" + ",".join(f"k{n}: *a" for n in range(200)) + "}"],
    "a long list again and again": [f"a: &a [{','.join('x' * 5000)}]"] + [f"b{n}: *a" for n in range(5000)],
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", BOMBS)
def test_aliases_that_multiply_end_at_once(tmp_path, name):
    lines = in_file(tmp_path, "\n".join(BOMBS[name]))
    assert any("more than 2000 values" in line or "not plain data" in line for line in lines) and len(lines) < 100


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def broken(:\n", r"SyntaxError: .*mine.py:1\): fix it; --debug shows the traceback"),
        ("x = 1\nimport no_such_module_at_all\n", r"ModuleNotFoundError: No module named .*mine.py:2\)"),
        ("open('/nowhere/at/all')\n", r"FileNotFoundError: .*mine.py:1\)"),
        ("x = 'a\0b'\n", "cannot import the task"),
        ("x = 1\n", "has no class Task"),
        (
            "from engine import contract\nclass Task(contract.Task):\n"
            "    def model(self): ...\n    def loss(self, net, batch): ...\n",
            r"lacks datasets \(task\)",
        ),
    ],
)
def test_a_task_file_that_cannot_be_used(tmp_path, source, expected):
    (tmp_path / "mine.py").write_text(source)
    for _ in range(2):  # the second time there is no half-imported module to be found
        (line,) = problems(str(tmp_path / "mine.py"))
        assert re.search(expected, line), line


def test_all_problems_are_reported_together_in_their_order(tmp_path):
    text = "batch_siz: 16\nlr: abc\noptim:\n  lr: 3\n  weight_decay: -1\nsteps: 1\nsteps: 2\nseed: !!python/name:x\n"
    (tmp_path / "c.yaml").write_text(text)
    found = problems("--config", str(tmp_path / "c.yaml"), "--epochz", "3", "--force=no", "seed=x", "gpu_ids=0,0")
    start = (
        "unknown key 'batch_siz'|lr=abc|'optim.lr' is given twice|optim.weight_decay=-1|'steps' is given twice|'seed'"
    )
    start += "|unknown key 'epochz'|--force=no|seed=x|gpu_ids="
    assert all(line.startswith(words) for line, words in zip(found, start.split("|"), strict=True)), found
    assert f"{tmp_path / 'c.yaml'}:1" in found[0], "the place is the file and the line"
    found = problems("--config", str(tmp_path / "c.yaml"), "hra", "x")  # without a task there is no schema
    assert [line[:15] for line in found] == ["'seed' has a va", "unexpected 'x' ", "no task 'hra' ("]


def test_a_config_is_frozen_and_changed_by_a_copy():
    cfg = parse("robot", "policy.type=act")
    for section in (cfg, cfg.optim):  # a task's own sections are what its author has made
        with pytest.raises(AttributeError, match="cannot assign to field 'VISUAL'"):
            section.VISUAL = 3
    new = config.changed(cfg, {"optim.lr": 3.0, "policy.normalization_mapping.VISUAL": "IDENTITY"})
    ours, theirs = (config.flatten(config.to_dict(each)) for each in (cfg, new))
    assert {key: value for key, value in theirs.items() if ours[key] != value} == {
        "optim.lr": 3.0,
        "policy.normalization_mapping.VISUAL": "IDENTITY",
    }
    assert isinstance(new.policy, type(cfg.policy)) and cfg.policy.type == "act"
    with pytest.raises(AssertionError, match=r"optim\.rate"):
        config.changed(cfg, {"optim.rate": 3.0})


PLAIN = """
from dataclasses import dataclass
from engine import contract
from engine.config import option, section

@dataclass
class Model:
    width: int = option(4, "features", low=1)

@dataclass
class Settings(contract.Settings):
    model: Model = section(Model)
    batch_size: int = option(5, "the task's own default", low=2)

class Task(contract.Task):
    Settings = Settings
    defaults = {"epochs": 3}
    def datasets(self): ...
    def model(self): ...
    def loss(self, net, batch): ...
"""


def test_the_sections_of_a_task_may_be_plain_dataclasses(tmp_path):
    """The config itself is frozen; a task may declare a common key again."""
    (tmp_path / "plain.py").write_text(PLAIN)
    task = str(tmp_path / "plain.py")
    cfg = parse(task, "model.width=7")
    assert (cfg.model.width, cfg.batch_size, cfg.epochs, cfg.optim.lr) == (7, 5, 3, 1e-3)
    with pytest.raises(AttributeError, match="cannot assign to field 'batch_size'"):
        cfg.batch_size = 8
    new = config.changed(cfg, {"model.width": 9, "batch_size": 6})
    assert (new.model.width, new.batch_size, cfg.model.width, cfg.batch_size) == (9, 6, 7, 5)
    assert list(config.to_dict(cfg)) == [*config.to_dict(config.Config()), "model"]
    (line,) = problems(task, "batch_size=1")
    assert line == "batch_size=1 (command line): must be at least 2"


def test_without_advice_a_wrong_setting_is_one_line(tmp_path, monkeypatch):
    """plugins/preflight adds the advice; the core names key and place."""
    for hook in (hooks.unknown_keys, hooks.closest_choices, hooks.yaml_errors, hooks.usages):
        monkeypatch.setattr(hook, "functions", [])
    assert problems("har", "epoch=3") == ["unknown key 'epoch' (command line): see --print-config"]
    assert problems("har", "amp=fp61") == ["amp=fp61 (command line): choose one of auto, bf16, fp16, off"]
    assert in_file(tmp_path, "epochs: 3\n\tlr: 1\n") == [
        "not a mapping in YAML (c.yaml): write lines such as `steps: 9`"
    ]
    assert in_file(tmp_path, "- a\n") == ["not a mapping in YAML (c.yaml): write lines such as `steps: 9`"]
    text = config.usage(parse("har"), "train.py", tasks.names(), tasks.load("har"))
    assert text == "usage: train.py [TASK] [--config FILE] [--flag VALUE ...] [key=value ...]"


def test_settings_of_a_restart_precede_all_others():
    cfg = config.parse(["har", "batch_size=8"], tasks.load, {"batch_size": 4}).cfg
    assert (cfg.batch_size, cfg.epochs) == (4, 12)


@pytest.mark.parametrize(
    ("words", "force", "task"),
    [
        ("--force video", True, "video"),
        ("video --force", True, "video"),
        ("--force optim.lr video", ("optim.lr",), "video"),
        ("--force lr,weight-decay video", ("optim.lr", "optim.weight_decay"), "video"),
        ("--force=lr --force data video", ("optim.lr", "data"), "video"),
        ("video --force model.width", ("model.width",), "video"),
        ("video --force --force lr", True, "video"),
        ("video --force lr --force", True, "video"),
        ("--force lr=0.5 video", True, "video"),
        ("video", False, "video"),
    ],
)
def test_force_may_name_keys(words, force, task):
    asked = config.parse(words.split(), tasks.load)
    assert (asked.force, asked.cfg.task) == (force, task)
    again = config.resume_arguments(words.split(), tasks.load(task), "runs/a")
    assert config.parse(again, tasks.load).force == force


def test_a_switch_takes_no_word():
    asked = config.parse(["--force", "video", "--deterministic", "epochs=3"], tasks.load)
    assert asked.force and (asked.cfg.task, asked.cfg.epochs, asked.cfg.deterministic) == ("video", 3, True)


@pytest.mark.parametrize("content", ["", "\n\n", "# a remark\n", "---\n"])
def test_an_empty_file_is_an_empty_delta(tmp_path, content):
    (tmp_path / "c.yaml").write_text(content)
    assert config.to_dict(parse("har", "--config", str(tmp_path / "c.yaml"))) == config.to_dict(parse("har"))


def test_yaml_means_what_it_says(tmp_path):
    """A later file is a delta over an earlier one, and the command line over both."""
    (tmp_path / "a.yaml").write_text("task: har\nlr: 1e-3\nseed: 3\noptim: {lr_scale: {head: 10, '*.x': 2}}\n")
    (tmp_path / "b.yaml").write_text(
        "lr: &rate 1e-4\namp: no\nwandb: {enable: yes, project: 'on'}\ngpu_ids: [0, 2]\nbatch-size: 8\n"
        "optim: {eps: *rate}\n"
    )
    cfg = parse("--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}", "batch_size=16")
    assert (cfg.optim.lr, cfg.amp, cfg.wandb.enable, cfg.wandb.project) == (1e-4, "off", True, "on")
    assert (cfg.gpu_ids, cfg.seed, cfg.optim.lr_scale, cfg.optim.eps) == ([0, 2], 3, ["head:10", "*.x:2"], 1e-4)
    assert cfg.batch_size == 16


@pytest.mark.parametrize("words", [["save_dir=~/x"], ["--save-dir=~/x"], ["--save-dir", "~/x"], ["--config=~/c.yaml"]])
def test_a_path_may_begin_at_home(tmp_path, monkeypatch, words):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("save_dir: ~/x\ntask: ~/mine.py\ndataset: {samples: 5}\n")
    (tmp_path / "mine.py").write_text("from tests.tasks.toy import Task as Toy\nclass Task(Toy): ...\n")
    cfg = parse(*words)
    assert cfg.save_dir == str(tmp_path / "x") and (words[0] != "--config=~/c.yaml" or cfg.dataset.samples == 5)


def test_the_resolved_tree_is_a_config_again(tmp_path):
    for task in [*tasks.names(), TOY]:
        cfg = parse(task, "lr=1e-5", "gpu_ids=0,1")
        path = tmp_path / "resolved.yaml"
        path.write_text(config.to_yaml(cfg))
        assert config.to_dict(parse("--config", str(path))) == config.to_dict(cfg)
        assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("**/*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_parse(path):
    if path.name == "smolvla.yaml" and importlib.util.find_spec("lerobot") is None:
        pytest.skip("it is LeRobot's own class: tests/peer/test_policies_lerobot.py")
    assert parse("--config", str(path)).task in tasks.names()


@pytest.mark.parametrize("name", ["har", "video_small", "policy/vla"])
def test_a_config_of_a_tasks_own_size_is_the_task_as_it_comes(name):
    """Its header tells the score of a bare `python train.py TASK`, so each number in it must be the task's."""
    cfg = parse("--config", str(ROOT / f"configs/{name}.yaml"))
    ours, bare = (config.flatten(config.to_dict(each)) for each in (cfg, parse(cfg.task)))
    assert {key: value for key, value in ours.items() if bare[key] != value} == {}


def test_help_lists_every_everyday_flag_with_its_default(launch):
    done = succeed(launch.python("train.py", "har", "--help"))
    cfg = parse("har")
    flat = config.flatten(config.to_dict(cfg))
    for name in [*config.EVERYDAY, "mode"]:
        key = {**config.ALIASES, **tasks.load("har").aliases}.get(name, name)
        line = next(line for line in done.out.splitlines() if line.startswith(f"  --{name.replace('_', '-')} "))
        assert f"[{flat[key] if flat[key] not in ('', []) else 'empty'}]" in line


@pytest.mark.parametrize("door", ["train.py", "train_ddp.py"])
def test_errors_come_before_any_process_group_and_before_any_file(launch, tmp_path, door):
    done = launch.python(door, "har", "--epochz", "3", "lr=abc", f"save_dir={tmp_path / 'run'}")
    assert done.code == 2
    assert len(done.errors) == 2 and len(done.err.splitlines()) == 2, done.err
    assert done.out == "" and not (tmp_path / "run").exists()


def test_print_config_and_dry_run_write_nothing(launch, tmp_path):
    shown = succeed(launch.python("train.py", TOY, "--print-config", "--lr", "3e-4", f"--save-dir={tmp_path / 'run'}"))
    assert yaml.safe_load(shown.out)["optim"]["lr"] == pytest.approx(3e-4)
    already = "torch.backends.cudnn.benchmark=True"
    dry = launch.python("train.py", TOY, already, "--dry-run", "global_batch=24", f"--save-dir={tmp_path / 'run'}")
    note = f"note: {already} (command line) sets nothing here: cuDNN tries its kernels; deterministic=true ends that"
    assert note in succeed(dry).err.splitlines()
    assert "12 per process x 1 process x 2 accumulation = 24" in dry.out
    assert "3 of 61 samples, the last of 13; 0 samples dropped" in dry.out
    assert not (tmp_path / "run").exists()


def test_the_length_that_is_asked_for_goes_before_the_default_of_the_other(tmp_path):
    """har starts from 12 epochs, the robot from 1200 steps."""

    def length(*words):
        cfg = config.parse(list(words), tasks.load).cfg
        return cfg.epochs, cfg.steps

    assert length("har") == (12, 0) and length("robot") == (0, 1200)
    assert length("har", "steps=900") == (0, 900) and length("robot", "epochs=3") == (3, 0)
    assert length("har", "epochs=3", "steps=900") == (3, 900)
    (tmp_path / "c.yaml").write_text("task: har\nepochs: 30\n")
    assert length("--config", str(tmp_path / "c.yaml")) == (30, 0)
    assert length("--config", str(tmp_path / "c.yaml"), "steps=5") == (0, 5)
    assert length("robot", "epochs=0") == (0, 1200)


def test_a_task_of_ones_own_extends_the_section_of_a_shipped_task(tmp_path):
    """By a plain dataclass, as a user writes it."""
    path = tmp_path / "own.py"
    path.write_text(
        "from dataclasses import dataclass, field\nfrom tasks import har\n"
        "@dataclass\nclass Dataset(type(har.Task.Settings().dataset)):\n    extra: int = 3\n"
        "@dataclass\nclass Settings(har.Task.Settings):\n    dataset: Dataset = field(default_factory=Dataset)\n"
        "class Task(har.Task):\n    Settings = Settings\n"
    )
    assert config.parse([str(path), "dataset.extra=4"], tasks.load).cfg.dataset.extra == 4
