"""The robot task: LeRobot's command lines, its data, the loss of two quotients, trials, evaluation, exact resume."""

import json
import os
import signal
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, succeed
from test_resume import assert_same_run, load

import tasks
from engine import config
from engine.contract import LockstepError, sample_seeds
from envs import discs
from formats import lerobot
from formats.lerobot_writer import Recorder

TINY_ACT = (
    "policy.dim_model=16 policy.n_heads=2 policy.dim_feedforward=16 policy.n_encoder_layers=1 "
    "policy.n_vae_encoder_layers=1 policy.chunk_size=6 policy.latent_dim=4"
).split()
DISCS = ["robot", "env.demonstrations=8", "env.size=16", "policy.chunk_size=5", "eval.n_episodes=4"]


def record(root, episodes=4, frames=9, dim=3, cameras=1):
    """A dataset of random walks; returns its folder."""
    rng = np.random.default_rng(0)
    pictures = {f"observation.images.cam{n}": ("image", (3, 32, 40)) for n in range(cameras)}
    features = {"observation.state": ("float32", (dim,)), "action": ("float32", (dim,)), **pictures}
    with Recorder(root, 10, features) as recorder:
        for episode in range(episodes):
            length = frames + episode
            walk = rng.normal(size=(length, dim)).cumsum(0).astype(np.float32)
            shots = {name: rng.integers(0, 256, (length, 3, 32, 40), dtype=np.uint8) for name in pictures}
            recorder.add_episode({"observation.state": walk, "action": walk + 1, **shots}, f"walk {episode % 2}")
    return root


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return record(tmp_path_factory.mktemp("walks") / "set")


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def parse(*words):
    return config.parse(list(words), tasks.load).cfg


def task_of(*words):
    cfg = parse(*words)
    task = tasks.load(cfg.task)(cfg)
    return task, *task.datasets()


# ---- the command line -----------------------------------------------------------------------------------------------


def test_the_type_of_policy_brings_its_own_keys_and_defaults():
    act = parse("robot", "policy.type=act")
    assert act.policy.dim_model == 512 and act.optim.lr == 1e-5 and act.steps == 100_000 and act.batch_size == 8
    assert parse("robot", "policy.type=act", "lr=3e-4", "steps=7").optim.lr == 3e-4
    vla = parse("robot")
    assert vla.policy.type == "vla" and vla.policy.preset == "test" and not hasattr(vla.policy, "dim_model")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("policy.type=akt", "policy.type=akt (command line): did you mean act?"),
        ("policy.kl_weight=1", "unknown key 'policy.kl_weight' (command line)"),
        (
            "policy.type=act policy.dim_modle=8",
            "unknown key 'policy.dim_modle' (command line): did you mean 'policy.dim_model'",
        ),
        ("policy.type=act policy.preset=tiny", "unknown key 'policy.preset'"),
    ],
)
def test_a_key_of_another_policy_is_unknown(words, message):
    with pytest.raises(LockstepError) as caught:
        parse("robot", *words.split())
    assert message in str(caught.value)


def test_lerobots_spellings():
    words = (
        "--policy.type=act --dataset.repo_id=user/name --steps=20 --batch_size=4 --num_workers=2 --seed=7 "
        "--output_dir=out --job_name=first --log_freq=5 --save_freq=10 --eval_freq=10 --resume=true "
        "--policy.device=cpu --policy.use_amp=true --policy.push_to_hub=false --optimizer.lr=1e-4 "
        "--optimizer.grad_clip_norm=5 --dataset.episodes=[0,2] --dataset.image_transforms.enable=true "
        "--accelerator.gradient_accumulation.steps=2 --wandb.enable=false --wandb.entity=lab --tolerance_s=1e-3 "
        "--policy.normalization_mapping.STATE=MIN_MAX --cudnn_deterministic=true"
    )
    cfg = parse("--task", "robot", *words.split())
    assert (cfg.steps, cfg.save_dir, cfg.wandb.name, cfg.log_every) == (20, "out", "first", 5)
    assert (cfg.save_every, cfg.eval_every, cfg.resume, cfg.device, cfg.amp) == (10, 10, "auto", "cpu", "auto")
    assert (cfg.optim.lr, cfg.optim.grad_clip, cfg.dataset.episodes) == (1e-4, 5, [0, 2])
    assert cfg.augment.enabled and cfg.gradient_accumulation_steps == 2 and cfg.wandb.entity == "lab"
    assert cfg.policy.normalization_mapping.STATE == "MIN_MAX" and cfg.deterministic
    assert cfg.dataset.tolerance_s == 1e-3 and cfg.seed == 7
    assert parse("robot", "--resume=false").resume == "never"


def test_what_is_written_is_read_again(tmp_path):
    """config.yaml names the type of policy inside its section."""
    cfg = parse("robot", "policy.type=act", "policy.dim_model=64", "policy.normalization_mapping.ENV=IDENTITY")
    (tmp_path / "config.yaml").write_text(config.to_yaml(cfg))
    assert config.to_dict(parse("--config", str(tmp_path / "config.yaml"))) == config.to_dict(cfg)


@pytest.mark.parametrize("name", ["act", "vla", "smolvla"])
def test_the_shipped_configs_parse(name):
    assert parse("--config", str(ROOT / f"configs/policy/{name}.yaml")).policy.type == name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dataset.repo_id=nobody/nothing", "nobody/nothing"),
        ("policy.type=smolvla", "the lerobot package is not installed (policy.type=smolvla): pip install"),
        ("policy.push_to_hub=true", "nothing is uploaded (policy.push_to_hub)"),
        ("policy.n_action_steps=9", "n_action_steps 9"),
        ("policy.type=act policy.dim_model=30", "dim_model 30"),
        (
            "policy.type=act policy.temporal_ensemble_coeff=0.1",
            "5 actions a look (policy.temporal_ensemble_coeff): give policy.n_action_steps=1",
        ),
        ("env.type=none", "there is no data to learn from (env.type=none)"),
        ("env.type=pusht env.command=dance", "env.command"),
        ("env.size=4", "4 is too small (env.size)"),
        ("policy.pretrained_path=nowhere", "nowhere"),
        ("env.command=dance", "no command 'dance' (env.command): choose one of: move to the red disc"),
    ],
)
def test_mistakes_are_one_line(launch, tmp_path, words, message):
    given = dict(word.split("=", 1) for word in [*DISCS[1:], *words.split(), f"save_dir={tmp_path / 'run'}"])
    done = launch.python("train.py", "robot", *(f"{key}={value}" for key, value in given.items()))
    lines = [line for line in done.err.splitlines() if line]
    assert done.code == 2 and len(lines) == 1 and message in lines[0], done.err
    assert not (tmp_path / "run").exists()


# ---- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["act", "vla"])
def test_the_loss_is_a_quotient_of_the_whole_batch(walks, policy):
    """Cut in pieces of unequal padding, with the mean weight that the loader gives, it comes to the same."""
    torch.manual_seed(0)
    small = [*TINY_ACT, "policy.dropout=0"] if policy == "act" else ["policy.chunk_size=6"]
    task, train, _ = task_of("robot", f"policy.type={policy}", f"dataset.root={walks}", *small)
    net = task.model().double()
    indices = list(range(0, len(train), 2))
    batch = train.__getitems__(indices)
    batch["seed"] = sample_seeds(0, 0, torch.arange(len(indices)))
    whole = task.loss(net, batch)
    assert train.weights[indices].mean() < 6, "nothing is padded"
    batch["mean_weight"] = torch.full((len(indices),), float(train.weights[indices].mean()))
    pieces = [
        {name: value[part] for name, value in batch.items()} for part in (slice(0, 1), slice(1, 7), slice(7, None))
    ]
    losses = [task.loss(net, piece) for piece in pieces]
    total, weight = sum(loss.total for loss in losses), sum(loss.weight for loss in losses)
    torch.testing.assert_close(total / weight, whole.total / whole.weight, rtol=1e-10, atol=0)


def test_acts_loss_is_lerobots(walks):
    """The masked mean of the absolute error plus kl_weight times the mean divergence, worked out apart."""
    torch.manual_seed(0)
    task, train, _ = task_of("robot", "policy.type=act", f"dataset.root={walks}", *TINY_ACT, "policy.dropout=0")
    policy = task.model().double()
    batch = train.__getitems__(list(range(len(train))))
    batch["seed"] = sample_seeds(0, 0, torch.arange(len(train)))
    loss = task.loss(policy, batch)
    from engine.contract import uniform

    out = policy.net(policy.inputs(batch), uniform(batch["seed"], policy.net.num_draws))
    steps = (~batch["action_is_pad"]).sum()
    expected = out["error"].sum() / (steps * 3) + 10 * out["kl"].mean()
    torch.testing.assert_close(loss.total / loss.weight, expected)


# ---- training and evaluation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_act_trains_on_a_dataset_of_its_own(launch, tmp_path, walks, processes):
    words = ["--config", "configs/policy/act.yaml", f"dataset.root={walks}", "batch_size=4", "steps=3", *TINY_ACT]
    done = succeed(launch.torchrun(processes, "train_ddp.py", *words, f"save_dir={tmp_path / 'run'}"))
    assert "Found 4 episodes with 42 frames at 10 Hz" in done.out and "Train episodes: 3, Val episodes: 1" in done.out
    last = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][-1]
    assert last["step"] == 3 and np.isfinite(last["action_l1"])
    demos = lerobot.read(walks)
    held_out = int(lerobot.split(demos.episodes, 0.1, 0)[1][0])
    a, b = demos.start[held_out], demos.end[held_out]
    states, actions = (demos.columns[name][a:b] for name in ("observation.state", "action"))
    off = [abs(actions[t : t + 6] - states[t]) for t in range(len(states))]
    assert last["baseline/hold_state_l1"] == pytest.approx(np.concatenate(off).mean(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_resume_is_exact_in_the_middle_of_an_epoch(launch, tmp_path, walks, processes):
    """With dropout, augmentation and accumulation; SIGTERM arrives at a rank while a step is under way."""
    words = ["train.py", "robot", "policy.type=act", f"dataset.root={walks}", *TINY_ACT, "augment.enabled=true"]
    words += ["batch_size=2", "gradient_accumulation_steps=2", "steps=40", "optim.lr=1e-3", "log_every=1"]
    start = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    succeed(launch.python(*start, *words, f"save_dir={tmp_path / 'straight'}"))
    again = [*start, *words, f"save_dir={tmp_path / 'stopped'}"]
    run = launch.start(sys.executable, *again)
    run.wait_for("step 5/")
    os.kill(launch.rank_pid(processes - 1), signal.SIGTERM)
    run.wait()
    assert 5 <= load(tmp_path / "stopped")["progress"]["step"] < 40
    succeed(launch.python(*again))
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")


def test_evaluate_gives_the_same_numbers_on_any_number_of_processes(launch, tmp_path):
    run = tmp_path / "run"
    succeed(launch.python("train.py", *DISCS, "steps=3", f"save_dir={run}"))
    words = ["tools/evaluate.py", str(run), "eval.n_episodes=5"]
    one, two = succeed(launch.python(*words)), succeed(launch.torchrun(2, *words))
    tables = [[line for line in done.out.splitlines() if line.startswith("  ")] for done in (one, two)]
    numbers = [
        [row for row in table if row.split()[0] in ("loss", "action_l1", "success_rate", "count")] for table in tables
    ]
    assert len(numbers[0]) == 4 and numbers[0] == numbers[1]
    torch.save(load(run) | {"format": 99}, run / "newer.pt")
    done = launch.python("tools/evaluate.py", str(run / "newer.pt"))
    assert done.code == 3 and "the checkpoint has format 99" in done.err and "update Lockstep" in done.err


def test_chunks_are_blended_in_trials(monkeypatch, tmp_path):
    monkeypatch.setattr("tasks._simulation.GENERATED", tmp_path)
    words = [*TINY_ACT, "policy.n_action_steps=1", "policy.temporal_ensemble_coeff=0.5", "env.demonstrations=8"]
    task, *_ = task_of("robot", "policy.type=act", "env.size=32", *words)
    model = task.model()
    calls, told = iter(range(1, 100)), []
    monkeypatch.setattr(model, "act", lambda batch: torch.full((3, 6, 2), float(next(calls))))
    monkeypatch.setattr("envs.discs.Discs.step", lambda self, actions: told.append(actions.copy()))
    assert task.trials(model, range(3))["trials"] == 3 and len(told) == discs.HORIZON
    expected = (1 + 2 * np.exp(-0.5)) / (1 + np.exp(-0.5))  # the older prediction counts more
    assert np.allclose(told[0], 1) and np.allclose(told[1], expected)
    assert task.trials(model, range(0))["trials"] == 0


def test_each_command_has_a_recording_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr("tasks._simulation.GENERATED", tmp_path)
    for command in ("", *discs.COMMANDS[:2]):
        task, *_ = task_of("robot", "env.demonstrations=8", "env.size=16", f"env.command={command}")
        assert task.demos.tasks == [command] if command else len(task.demos.tasks) > 1


def test_a_trial_shows_in_tensorboard(launch, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    succeed(launch.python("train.py", *DISCS, "steps=2", f"save_dir={tmp_path / 'run'}"))
    events = EventAccumulator(str(tmp_path / "run/logs")).Reload()
    assert {"trial", "trial_strip"} <= set(events.Tags()["images"])
    assert any("success_rate" in tag for tag in events.Tags()["scalars"])


def test_a_run_becomes_a_pretrained_policy_for_the_next(launch, tmp_path, walks):
    """Its weights are those that the next run starts from; other options than its own are told by name."""
    common = ["train.py", "robot", "policy.type=act", f"dataset.root={walks}", *TINY_ACT, "batch_size=4"]
    run = tmp_path / "first"
    succeed(launch.python(*common, "steps=3", "optim.lr=1e-2", f"save_dir={run}"))
    assert f"Saved {run}/pretrained_model" in succeed(launch.python("tools/save_pretrained.py", str(run))).out
    assert json.loads((run / "pretrained_model/config.json").read_text())["type"] == "act"
    words = [*common, f"policy.pretrained_path={run}", "steps=1", "optim.lr=1e-9", f"save_dir={tmp_path / 'second'}"]
    assert f"Weights from {run}\n" in succeed(launch.python(*words)).out
    before, after = (load(path)["model"] for path in (run, tmp_path / "second"))
    best = torch.load(next(run.glob("best*.pt")), weights_only=True)["model"]
    assert all(torch.allclose(best[name], after[name], atol=1e-7) for name in best if best[name].is_floating_point())
    assert before.keys() == after.keys()
    wider = [word.replace("dim_model=16", "dim_model=32").replace("second", "third") for word in words]
    done = launch.python(*wider)
    assert done.code == 2 and "its config.json says policy.dim_model=16" in done.err
    deeper = [word.replace("n_encoder_layers=1", "n_encoder_layers=2").replace("second", "fourth") for word in words]
    deeper.append("policy.pretrained_strict=false")
    assert (
        f"Weights from {run}, the rest at random: 12 missing: encoder.layers.1." in succeed(launch.python(*deeper)).out
    )
    done = launch.python("train.py", "robot", f"dataset.root={walks}", f"policy.pretrained_path={run}")
    assert done.code == 2 and "not of vla" in done.err and "policy.type=act" in done.err


def test_a_mode_without_its_statistics_and_a_foreign_simulation_are_told(walks):
    task, *_ = task_of("robot", f"dataset.root={walks}", "policy.normalization_mapping.VISUAL=QUANTILES")
    with pytest.raises(LockstepError, match=r"tells no q01, q99 of observation.images.cam0, which QUANTILES needs"):
        task.model()
    with pytest.raises(
        LockstepError, match=r"not of this simulation: it has observation.state of shape \(3,\) \(env.type=discs\)"
    ):
        task_of("robot", f"dataset.root={walks}", "env.type=discs")


def test_every_normalisation_brings_the_data_to_its_range(walks):
    for mode, check in {
        "MEAN_STD": lambda x: abs(x.mean()) < 1e-4 and abs(x.std() - 1) < 0.02,
        "MIN_MAX": lambda x: (float(x.min()), float(x.max())) == pytest.approx((-1, 1), abs=1e-5),
        "QUANTILES": lambda x: 0.01 < (x.abs() > 1).float().mean() < 0.05,
        "QUANTILE10": lambda x: 0.15 < (x.abs() > 1).float().mean() < 0.25,
        "IDENTITY": lambda x: abs(x.mean()) > 0.5,
    }.items():
        task, *_ = task_of("robot", f"dataset.root={walks}", f"policy.normalization_mapping.ACTION={mode}")
        actions = torch.from_numpy(task.demos.columns["action"])[:, :1]
        normalizer = task.model().normalizer
        whole = torch.from_numpy(task.demos.columns["action"])
        assert check(normalizer("action", whole)[:, 0]), mode
        back = normalizer.inverse("action", normalizer("action", whole))
        torch.testing.assert_close(back[:, :1], actions, rtol=1e-5, atol=1e-5)


def test_cameras_can_be_left_out(tmp_path):
    root = record(tmp_path / "set", cameras=2)
    both, one, none = (
        task_of("robot", f"dataset.root={root}", *words)[1].__getitems__([0]).keys()
        for words in ([], ["dataset.cameras=observation.images.cam1"], ["dataset.cameras=none"])
    )
    assert both - one == {"observation.images.cam0"} and one - none == {"observation.images.cam1"}
    with pytest.raises(LockstepError, match=r"no camera observation.images.cam7 .*there are observation.images.cam0"):
        task_of("robot", f"dataset.root={root}", "dataset.cameras=observation.images.cam7")
