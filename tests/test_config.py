"""One schema: what a person can get wrong is found before anything starts, all of it at once."""

import pytest
import yaml
from conftest import ROOT, TOY, succeed

import tasks
from engine import config
from engine.contract import LockstepError


def parse(*argv):
    return config.parse(list(argv), tasks.load).cfg


def problems(*argv):
    with pytest.raises(LockstepError) as caught:
        parse(*argv)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--batch-size", "16"], "batch_size", 16),
        (["--batch_size=16"], "batch_size", 16),
        (["batch_size=16"], "batch_size", 16),
        (["--lr", "1e-4"], "optim.lr", 1e-4),
        (["optim.lr=3e-4"], "optim.lr", 3e-4),
        (["--optim.lr", "3e-4"], "optim.lr", 3e-4),
        (["learning_rate=3e-4"], "optim.lr", 3e-4),
        (["--warmup-epochs", "2"], "schedule.warmup_epochs", 2.0),
        (["--weight-decay", "1e-4"], "optim.weight_decay", 1e-4),
        (["--grad-accum-steps", "4"], "gradient_accumulation_steps", 4),
        (["gradient_accumulation_steps=4"], "gradient_accumulation_steps", 4),
        (["--gpu-ids", "0,1,3"], "gpu_ids", [0, 1, 3]),
        (["--multi-gpu", "ddp"], "multi_gpu", "ddp"),
        (["--use_amp"], "amp", "auto"),
        (["--use-amp", "--epochs", "3"], "amp", "auto"),
        (["use_amp=false"], "amp", "off"),
        (["amp=no"], "amp", "off"),
        (["--amp", "bf16"], "amp", "bf16"),
        (["wandb.enable=true"], "wandb.enable", True),
        (["wandb.project=my-robot-project"], "wandb.project", "my-robot-project"),
        (["--deterministic"], "deterministic", True),
        (["--deterministic", "no"], "deterministic", False),
        (["steps=1e4"], "steps", 10000),
        (["--save-dir", "a b;touch x"], "save_dir", "a b;touch x"),
        (["--save-dir", "runs/lr=1"], "save_dir", "runs/lr=1"),
        (["--mode", "flatten"], "model.mode", "flatten"),
        (["--local-rank=1"], "epochs", None),
        (["--local-rank", "1"], "epochs", None),
    ],
)
def test_every_spelling_of_the_guides(argv, key, value):
    flat = config.flatten(config.to_dict(parse("har", *argv)))
    assert value is None or flat[key] == value


@pytest.mark.parametrize(
    ("word", "refused"),
    [
        ("--policy.repo_id=me/act", ""),
        ("--policy.n_obs_steps=1", "2"),
        ("--policy.optimizer_lr_backbone=1e-5", "1e-4"),
        ("--policy.pretrained_backbone_weights=null", "ResNet18_Weights.IMAGENET1K_V1"),
        ("--use_policy_training_preset=true", "false"),
        ("--dataset.video_backend=torchcodec", ""),
        ("--rename_map={}", '{"observation.image": "observation.images.top"}'),
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


def test_a_map_of_names_in_a_yaml_is_refused_as_a_whole(tmp_path):
    (tmp_path / "c.yaml").write_text("rename_map:\n  observation.image: observation.images.top\n")
    (line,) = problems("robot", "--config", str(tmp_path / "c.yaml"))
    assert "c.yaml:2): only {}: features keep the names" in line


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
        (["epoch=3"], "unknown key 'epoch' (command line): did you mean 'epochs'?"),
        (["--optim.learning_rat", "3"], "did you mean 'learning_rate' or"),
        (["ddp.buket_cap_mb=3"], "did you mean 'ddp.bucket_cap_mb'?"),
        (["model.widht=3"], "did you mean 'model.width'"),
        (["nonsense=3"], "unknown key 'nonsense' (command line): see --print-config"),
        (["optim=3"], "'optim' is a section (command line): set a key in it"),
        (["batch_size=two"], "batch_size=two (command line): give a whole number"),
        (["batch_size=2.5"], "give a whole number"),
        (["batch_size=0"], "must be at least 1"),
        (["lr=0"], "must be above 0"),
        (["lr=-1"], "must be above 0"),
        (["lr=nan"], "give a finite number"),
        (["lr=abc"], "give a number"),
        (["optim.ema_decay=1.5"], "must be at least 0 and at most 1"),
        (["amp=fp61"], "did you mean fp16?"),
        (["deterministic=perhaps"], "give true or false"),
        (["gpu_ids=0,x"], "give a whole number"),
        (["gpu_ids=0,0"], "name each GPU once"),
        (["gpu_ids=-1"], "must be at least 0"),
        (["lr=1", "optim.lr=2"], "'optim.lr' is given twice"),
        (["har", "video"], "unexpected 'video'"),
        (["--epochs"], "a value is missing"),
        (["epochs=0"], "the run would never end"),
        (["lr_scaling=linear"], "without schedule.base_batch_size"),
        (["hra"], "no task 'hra'"),
        (["nowhere.py"], "no task file 'nowhere.py'"),
        (["--config", "nowhere.yaml"], "no config file 'nowhere.yaml'"),
    ],
)
def test_what_a_person_can_get_wrong(argv, expected):
    assert any(expected in line for line in problems(*argv)), problems(*argv)


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


def test_force_names_no_key_that_there_is_not():
    with pytest.raises(
        LockstepError, match=r"^--force optim.rate \(command line\): name keys of --print-config, or data"
    ):
        config.parse(["har", "--force", "lr,optim.rate"], tasks.load)


def test_a_switch_takes_no_word():
    asked = config.parse(["--force", "video", "--deterministic", "epochs=3"], tasks.load)
    assert asked.force and (asked.cfg.task, asked.cfg.epochs, asked.cfg.deterministic) == ("video", 3, True)


def test_all_problems_are_reported_together(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("batch_siz: 16\nlr: abc\noptim:\n  lr: 3\n  weight_decay: -1\nsteps: 1\nsteps: 2\n")
    found = problems("--config", str(path), "--epochz", "3", "seed=x")
    expected = [
        "batch_siz'",
        "lr=abc",
        "'optim.lr' is given twice",
        "weight_decay=-1",
        "'steps' is given twice",
        "epochz",
        "seed=x",
    ]
    assert len(found) == len(expected)
    for line, words in zip(found, expected, strict=True):
        assert words in line
    assert f"{path}:1" in found[0], "the place is the file and the line"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n- b\n", "holds no keys"),
        ("a: [1\n", "not valid YAML"),
        ("a:\t- b\n: {", ":1:3): fix that line"),
        ("lr: !!python/object/apply:os.system ['touch pwned']\n", "not plain data"),
        ("lr: [1, 2]\n", "give one value, not a list"),
        ("optim: 3\n", "is a section"),
        ("lr: {x: 1}\n", "unknown key 'lr.x'"),
        ("a: &a [x,x]\n" + "".join(f"b{i}: *a\n" for i in range(3)), "unknown key 'b2'"),
    ],
)
def test_bad_yaml_is_named_with_its_place(tmp_path, monkeypatch, text, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    assert any(expected in line for line in problems("--config", "c.yaml")), problems("--config", "c.yaml")
    assert not (tmp_path / "pwned").exists()


def test_nested_aliases_do_not_eat_the_memory(tmp_path):
    levels = ["a: &a0 {k: v, l: w}"] + [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 40)]
    (tmp_path / "c.yaml").write_text("\n".join(levels))
    assert any("aliases" in line or "not plain data" in line for line in problems("--config", str(tmp_path / "c.yaml")))


def test_yaml_means_what_it_says(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "task: har\nlr: 1e-4\namp: no\nwandb: {enable: yes, project: 'on'}\ngpu_ids: [0, 2]\nbatch-size: 8\n"
    )
    cfg = parse("--config", str(path), "batch_size=16")
    assert (cfg.optim.lr, cfg.amp, cfg.wandb.enable, cfg.wandb.project) == (1e-4, "off", True, "on")
    assert cfg.gpu_ids == [0, 2]
    assert cfg.batch_size == 16, "the command line is a delta over the file"


@pytest.mark.parametrize("words", [["save_dir=~/x"], ["--save-dir=~/x"], ["--save-dir", "~/x"], ["--config=~/c.yaml"]])
def test_a_path_may_begin_at_home(tmp_path, monkeypatch, words):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("save_dir: ~/x\ntask: ~/mine.py\ndataset: {samples: 5}\n")
    (tmp_path / "mine.py").write_text("from tests.tasks.toy import Task as Toy\nclass Task(Toy): ...\n")
    cfg = parse(*words)
    assert cfg.save_dir == str(tmp_path / "x") and (words[0] != "--config=~/c.yaml" or cfg.dataset.samples == 5)


def test_files_are_layers_and_may_be_empty(tmp_path):
    (tmp_path / "none.yaml").write_text("# nothing but a remark\n")
    (tmp_path / "a.yaml").write_text("task: har\nlr: 1e-4\nseed: 3\n")
    (tmp_path / "b.yaml").write_text("lr: 2e-4\n")
    cfg = parse(*(word for name in ("none", "a", "b") for word in ("--config", str(tmp_path / f"{name}.yaml"))))
    assert (cfg.optim.lr, cfg.seed) == (2e-4, 3), "a later file is a delta over an earlier one"


def test_the_resolved_tree_is_a_config_again(tmp_path):
    for task in [*tasks.names(), TOY]:
        cfg = parse(task, "lr=1e-5", "gpu_ids=0,1")
        path = tmp_path / "resolved.yaml"
        path.write_text(config.to_yaml(cfg))
        assert config.to_dict(parse("--config", str(path))) == config.to_dict(cfg)
        assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_a_file_without_a_whole_task_is_refused(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "half.py").write_text(
        "from engine import contract\nclass Task(contract.Task):\n"
        "    def model(self): ...\n    def loss(self, net, batch): ...\n"
    )
    assert "has no class Task" in problems(str(tmp_path / "empty.py"))[0]
    assert "lacks datasets (task)" in problems(str(tmp_path / "half.py"))[0]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("**/*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_parse(path):
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
