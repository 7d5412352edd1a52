"""The robot task: LeRobot's command lines, its data, the loss of two quotients, trials, evaluation, exact resume."""

import json
import operator
import os
import re
import shutil
import signal
import sys

import hub_server
import numpy as np
import pytest
import torch
from conftest import ROOT, succeed
from lerobot_data import change_json, record_one
from refusals import refused
from robot_tasks import DISCS, TINY_ACT, parse, record, seeded, task_of
from runs import records
from saved import assert_same_run, load
from torch.overrides import TorchFunctionMode

from engine import config
from engine.contract import LockstepError, sample_seeds, uniform
from engine.data.batches import map_tensors
from formats.robots import lerobot
from formats.robots.frames import Frames
from models.policy import Policy
from tasks import robot
from tasks.envs import discs
from tasks.robots import simulation

pytestmark = pytest.mark.usefixtures("robot_caches")


# ---- the command line -----------------------------------------------------------------------------------------------


def test_the_type_of_policy_brings_its_own_keys_and_defaults():
    act = parse("robot", "policy.type=act")
    assert act.policy.dim_model == 512 and act.optim.lr == 1e-5 and act.steps == 100_000 and act.batch_size == 8
    assert parse("robot", "policy.type=act", "lr=3e-4", "steps=7").optim.lr == 3e-4
    vla = parse("robot")
    assert vla.policy.type == "vla" and vla.policy.preset == "test" and not hasattr(vla.policy, "dim_model")


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
    assert (cfg.save_every, cfg.eval.trials_every, cfg.resume, cfg.device, cfg.amp) == (10, 10, "auto", "cpu", "auto")
    assert (cfg.optim.lr, cfg.optim.grad_clip, cfg.dataset.episodes) == (1e-4, 5, [0, 2])
    assert cfg.augment.enabled and cfg.gradient_accumulation_steps == 2 and cfg.wandb.entity == "lab"
    assert cfg.policy.normalization_mapping.STATE == "MIN_MAX" and cfg.deterministic
    assert cfg.dataset.tolerance_s == 1e-3 and cfg.seed == 7
    assert parse("robot", "--resume=false").resume == "never"


@pytest.mark.parametrize(
    ("words", "every", "trials_every"),
    [
        ("--env_eval_freq=0", 10**9, 0),  # no trials, and its eval_steps is 0 unless it is given
        ("--eval_freq=0", 10**9, 0),
        ("--eval_steps=0", 10**9, -1),  # at the end alone
        ("--eval_steps=0 --env_eval_freq=0", 10**9, 0),
        ("--eval_steps=7 --env_eval_freq 0", 7, 0),
        ("--env_eval_freq=7", 7, 7),
        ("--env_eval_freq=20 --eval_steps=0", 20, 20),
        ("--eval_steps=5 --env_eval_freq=20", 5, 20),
        ("eval_every=0", 0, -1),  # once an epoch
        ("", 0, -1),
    ],
)
def test_the_two_cadences_of_lerobot(words, every, trials_every):
    cfg = parse("robot", "policy.type=act", *words.split())
    assert (cfg.eval_every, cfg.eval.trials_every, cfg.eval.n_episodes) == (every, trials_every, 20)


def test_the_split_of_the_demonstrations_is_told_and_a_task_without_any_is_named(walks):
    """LeRobot trains on all of them by default; a task may have all of its episodes among those that validate."""
    words = ["robot", f"dataset.root={walks}", "dataset.episodes=0,1,2"]  # 'walk 1' has one episode
    warned = {}
    for seed in range(12):
        task, train, _ = task_of(*words, f"dataset.split_seed={seed}")
        said = task.summary()
        assert "Train episodes: 2, Val episodes: 1 (dataset.eval_split=0.1; LeRobot's default is 0: all train)" in said
        warned[seed] = "warning: nothing to train on of 'walk 1': all episodes validate" in said
        assert warned[seed] == (1 not in train.labels) and ("warning" in said) == warned[seed]
    assert {*warned.values()} == {True, False}
    task, train, _ = task_of(*words, "dataset.eval_split=0")
    assert "Train episodes: 3, Val episodes: 3 (the same" in task.summary() and "LeRobot" not in task.summary()


def test_what_is_written_is_read_again(tmp_path):
    """config.yaml names the type of policy inside its section."""
    cfg = parse("robot", "policy.type=act", "policy.dim_model=64", "policy.normalization_mapping.ENV=IDENTITY")
    (tmp_path / "config.yaml").write_text(config.to_yaml(cfg))
    assert config.to_dict(parse("--config", str(tmp_path / "config.yaml"))) == config.to_dict(cfg)


@pytest.mark.parametrize(
    ("name", "policy", "env"),
    [("act", "act", "auto"), ("vla", "vla", "auto"), ("pusht", "vla", "pusht")],
)
def test_the_shipped_configs_parse(name, policy, env):
    cfg = parse("--config", str(ROOT / f"configs/policy/{name}.yaml"))
    assert (cfg.policy.type, cfg.env.type) == (policy, env)


def test_the_shipped_act_is_asked_for_one_thing_only():
    """It hears no command, so of six it could learn none: in the demonstrations and in the trials there is one."""
    cfg = parse("--config", str(ROOT / "configs/policy/act_discs.yaml"))
    worlds = simulation.worlds(cfg.env, simulation.which(cfg.env, given=False), np.arange(20))
    assert cfg.policy.type == "act" and {*worlds.commands} == {cfg.env.command}


REFUSED = {
    "policy.type=akt": "there is no policy 'akt' (policy.type): did you mean act? choose one of act, vla, ",
    "policy.kl_weight=1": "unknown key 'policy.kl_weight' (command line)",
    "policy.type=act policy.dim_modle=8": "unknown key 'policy.dim_modle' (command line): did you mean",
    "policy.type=act policy.preset=tiny": "unknown key 'policy.preset'",
    "--eval_freq=1 --env_eval_freq=2": "'eval.trials_every' is given twice, as eval_freq and env_eval_freq",
    "--eval_steps=1 eval_every=2": "eval_every=2 and eval.loss_every=1",
    "dataset.repo_id=nobody/nothing": "nobody/nothing",
    "policy.type=smolvla": "the lerobot package is not installed (policy.type=smolvla): pip install",
    "policy.push_to_hub=true": "nothing is uploaded (policy.push_to_hub)",
    "policy.n_action_steps=9": "n_action_steps 9",
    "policy.type=act policy.dim_model=30": "dim_model 30",
    "dataset.resize=16": "1 number where two belong (dataset.resize): give height,width",
    "policy.train_expert_only=true": "freeze weights that never learned (policy.train_expert_only)",
    "dataset.cameras=observation.images.top,observation.images.top": "a camera is named twice",
    "policy.type=act policy.temporal_ensemble_coeff=0.1": "give policy.n_action_steps=1",
    "env.type=none": "there is no data to learn from (env.type=none)",
    "env.type=pusht env.command=dance": "env.command",
    "env.size=4": "4 is too small (env.size)",
    "policy.pretrained_path=nowhere dataset.root=neither": "there is no config.json in nowhere",
    "env.command=dance": "no command 'dance' (env.command): choose one of: move to the red disc",
}


@pytest.mark.parametrize("words", REFUSED)
def test_mistakes_are_one_line(words):
    values = dict(word.split("=", 1) for word in [*DISCS[1:], *words.split()])
    command = ["robot", *(f"{key}={value}" for key, value in values.items())]
    refused(REFUSED[words], lambda: task_of(*command)[0].model())


def test_a_mistake_ends_the_command_before_a_file_is_written(launch, tmp_path):
    done = launch.python("train.py", *DISCS, "env.command=dance", f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and done.err.strip().count("\n") == 0 and REFUSED["env.command=dance"] in done.err
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
    given = seeded(len(indices))
    batch["lockstep"] = given
    whole = task.loss(net, batch)
    assert train.weights[indices].mean() < 6, "nothing is padded"
    given.mean_weight = torch.full((len(indices),), float(train.weights[indices].mean()))
    pieces = [map_tensors(batch, operator.itemgetter(part)) for part in (slice(0, 1), slice(1, 7), slice(7, None))]
    losses = [task.loss(net, piece) for piece in pieces]
    total, weight = sum(loss.total for loss in losses), sum(loss.weight for loss in losses)
    torch.testing.assert_close(total / weight, whole.total / whole.weight, rtol=1e-10, atol=0)


@pytest.mark.slow
def test_acts_loss_is_lerobots(walks):
    """The masked mean of the absolute error plus kl_weight times the mean divergence, worked out apart."""
    torch.manual_seed(0)
    task, train, _ = task_of("robot", "policy.type=act", f"dataset.root={walks}", *TINY_ACT, "policy.dropout=0")
    policy = task.model().double()
    batch = train.__getitems__(list(range(len(train))))
    batch["lockstep"] = seeded(len(train))
    loss = task.loss(policy, batch)

    def expected(seeds):
        out = policy.net(policy.inputs(batch), uniform(seeds, policy.net.num_draws))
        return out["error"].sum() / ((~batch["action_is_pad"]).sum() * 3) + 10 * out["kl"].mean()

    torch.testing.assert_close(loss.total / loss.weight, expected(batch["lockstep"].seed))
    pieces = [map_tensors(batch, operator.itemgetter(part)) for part in (slice(0, 5), slice(5, None))]
    with torch.no_grad():
        scored = task.score(policy, pieces[0]) + task.score(policy, pieces[1])
        truth = expected(sample_seeds(0, 0, batch["row"])).item()
    assert task.report(scored)["loss"] == pytest.approx(truth, rel=1e-9), "in an evaluation, too"


# ---- training and evaluation ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_act_trains_on_a_dataset_of_its_own(launch, tmp_path, walks, processes):
    words = ["--config", "configs/policy/act.yaml", f"dataset.root={walks}", "batch_size=4", "steps=3", *TINY_ACT]
    done = succeed(launch.torchrun(processes, "train_ddp.py", *words, f"save_dir={tmp_path / 'run'}"))
    assert "Found 4 episodes with 42 frames at 10 Hz" in done.out and "Train episodes: 3, Val episodes: 1" in done.out
    last = records(tmp_path / "run", "eval")[-1]
    assert last["step"] == 3 and np.isfinite(last["action_l1"])
    demos = lerobot.read(walks)
    held_out = int(lerobot.split(demos.episodes, 0.1, 0)[1][0])
    a, b = demos.start[held_out], demos.end[held_out]
    states, actions = (demos.columns[name][a:b] for name in ("observation.state", "action"))
    off = [abs(actions[t : t + 6] - states[t]) for t in range(len(states))]
    assert last["baseline/hold_state_l1"] == pytest.approx(np.concatenate(off).mean(), rel=1e-6)


@pytest.mark.slow
def test_the_smallest_policy_trains_on_a_cpu(launch, tmp_path, walks):
    words = ["robot", "--config", "configs/policy/vla.yaml", f"dataset.root={walks}", "device=cpu", "steps=3"]
    done = succeed(launch.train(*words, "schedule.warmup_steps=1", f"save_dir={tmp_path / 'run'}"))
    assert "Done: 3 steps" in done.out and "holding the state" in done.out
    assert int(re.search(r"parameters +([\d,]+)", done.out)[1].replace(",", "")) < 500_000, "0.4 million, as documented"


@pytest.mark.slow
def test_resume_is_exact_in_the_middle_of_an_epoch(launch, tmp_path, walks):
    """With dropout, augmentation and accumulation; SIGTERM arrives at a rank while a step is under way."""
    words = ["train.py", "robot", "policy.type=act", f"dataset.root={walks}", *TINY_ACT, "augment.enabled=true"]
    words += ["batch_size=1", "gradient_accumulation_steps=2", "steps=10", "optim.lr=1e-3", "log_every=1"]
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    succeed(launch.python(*start, *words, f"save_dir={tmp_path / 'straight'}"))
    again = [*start, *words, f"save_dir={tmp_path / 'stopped'}"]
    run = launch.start(sys.executable, *again)
    run.wait_for("step 3/")
    os.kill(launch.rank_pid(1), signal.SIGTERM)
    run.wait()
    assert 3 <= load(tmp_path / "stopped")["progress"]["step"] < 10
    succeed(launch.python(*again))
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")


@pytest.mark.slow
def test_evaluate_gives_the_same_numbers_on_any_number_of_processes(launch, tmp_path):
    run = tmp_path / "run"
    start = ["train.py", *DISCS, "policy.num_steps=2", f"save_dir={run}"]
    succeed(launch.python(*start, "steps=3"))
    words = ["tools/evaluate.py", str(run), "eval.n_episodes=23", "eval_batch_size=8", "--json"]
    one, three = (json.loads(succeed(launch.torchrun(n, *words)).out) for n in (1, 3))
    assert {"loss", "action_l1", "success_rate", "avg_max_reward", "count"} <= one["metrics"].keys()
    assert three == one, "to the last digit"
    whole = json.loads(succeed(launch.python(*words[:2], "eval.n_episodes=0", "--json", "--split=all")).out)
    assert whole["metrics"]["count"] > one["metrics"]["count"] > 8, "several batches; and all episodes"
    resumed = succeed(launch.python(*start, "steps=4", "policy.n_action_steps=3"))
    assert "Done: 4 steps" in resumed.out, "how the trained policy is used is free to change"
    torch.save(load(run) | {"format": 99}, run / "newer.pt")
    done = launch.python("tools/evaluate.py", str(run / "newer.pt"))
    assert done.code == 3 and "the checkpoint has format 99" in done.err and "update Lockstep" in done.err


def test_trials_draw_by_trial_and_look(own_recordings):
    """The draws differ from look to look and from trial to trial, and are the same for any partition."""
    task, *_ = task_of(*DISCS)
    model, seen = task.model(), []
    act = model.act

    def spied(batch, draws):
        seen.append(draws)
        return act(batch, draws)

    model.act = spied
    whole = task.trials(model, range(4), lambda: False)
    looks = len(seen)
    assert looks > 1 and seen[0].shape == (4, model.net.num_noise) and not torch.equal(seen[0], seen[1])
    assert len(seen[0].unique(dim=0)) == 4
    parts = [task.trials(model, range(rank, 4, 2), lambda: False) for rank in range(2)]
    assert torch.equal(seen[looks], seen[0][0::2])
    assert {name: parts[0][name] + parts[1][name] for name in whole} == whole
    seen.clear()
    task.trials(model, range(4), lambda: len(seen) == 2)
    assert len(seen) == 2, "it ends when it is asked to"


def test_trials_start_where_no_demonstration_did(own_recordings):
    task, *_ = task_of(*DISCS)
    model, demos = task.model(), task.demos
    known = {picture.tobytes() for picture in Frames(demos, {}, "none", "").get(task.cameras[0], demos.start)}
    task.trials(model, range(1), lambda: True)
    assert len(known) == len(demos.episodes) > 4 and task.films[0].film[0].tobytes() not in known


def test_trials_speak_the_words_of_the_demonstrations(own_recordings, tmp_path):
    small = ["robot", "env.demonstrations=8", "env.size=16"]
    for command in ("", *discs.COMMANDS[:2]):  # each has a recording of its own
        task, *_ = task_of(*small, f"env.command={command}")
        assert task.demos.tasks == [command] if command else len(task.demos.tasks) > 1
    red = "move to the red disc"
    task, *_ = task_of(*small, f"env.command={red}")
    task.demos.root.rename(tmp_path / "red")
    given = ["robot", "env.type=discs", "env.size=16", f"dataset.root={tmp_path}/red"]
    refused(["no demonstration is of 'move to the green disc'", "give env.command='move"], lambda: task_of(*given))
    task, *_ = task_of(*given, f"env.command={red}")
    task.demos.tasks[0] = "go and get the red one"  # one task, worded otherwise
    model, heard = task.model(), []
    model.act = lambda batch, draws: heard.append(batch["words"]) or torch.zeros(2, 8, 2)
    task.trials(model, range(2), lambda: False)
    assert torch.equal(heard[0], task.words.repeat(2, 1))


def test_trials_of_a_renamed_simulation(own_recordings):
    """The simulation has observation.images.top, the policy observation.image."""
    task, *_ = task_of(*DISCS, "rename_map=observation.images.top:observation.image")
    assert task.trials(task.model(), range(2), lambda: True)["trials"] == 2


def test_chunks_are_blended_in_trials(monkeypatch, own_recordings):
    words = [*TINY_ACT, "policy.n_action_steps=1", "policy.temporal_ensemble_coeff=0.5", "env.demonstrations=8"]
    task, *_ = task_of("robot", "policy.type=act", "env.size=32", *words)
    model = task.model()
    calls, executed = iter(range(1, 100)), []
    monkeypatch.setattr(model, "act", lambda batch, draws: torch.full((3, 6, 2), float(next(calls))))
    monkeypatch.setattr("tasks.envs.discs.Discs.step", lambda self, actions: executed.append(actions.copy()))
    assert task.trials(model, range(3), lambda: False)["trials"] == 3 and len(executed) == discs.HORIZON
    expected = (1 + 2 * np.exp(-0.5)) / (1 + np.exp(-0.5))  # the older prediction counts more
    assert np.allclose(executed[0], 1) and np.allclose(executed[1], expected)
    assert task.trials(model, range(0), lambda: False)["trials"] == 0


def test_leftovers_of_a_killed_recording_go(own_recordings, tmp_path):
    left = tmp_path / f".discs_v{simulation.RECIPE}_8x16_seed0_noise0.1.recording/000000"
    left.mkdir(parents=True)
    (left / "episode.json").write_text(json.dumps({"length": 3, "task": "dance"}))
    task, *_ = task_of("robot", "env.demonstrations=8", "env.size=16")
    assert not list(tmp_path.glob(".*recording")) and "dance" not in task.demos.tasks
    assert "(the successes of 8 tried)" in task.summary() and "20 in the simulation discs" in task.summary()


SLOW_TRIALS = """
import time
from tasks import robot
class Task(robot.Task):
    def trials(self, model, which, stopped):
        print('trials begin', flush=True)
        while not stopped():
            time.sleep(0.01)
        return super().trials(model, which, stopped)
"""


@pytest.mark.slow
def test_a_stop_in_the_trials_is_no_evaluation(launch, tmp_path):
    """Asked to stop between the validation and the end of the trials, all ranks leave; what was trained is saved, and
    the evaluation is made when the run is resumed."""
    words = [*DISCS[:-1], "eval.n_episodes=11", "steps=4", "eval_every=2", f"save_dir={tmp_path / 'run'}"]
    mine = tmp_path / "slow.py"
    mine.write_text(SLOW_TRIALS)
    run = launch.start_launcher(2, str(mine), *words[1:])
    run.wait_for("trials begin", times=2)
    run.signal(signal.SIGTERM)
    assert run.wait().code == 75
    state = load(tmp_path / "run")["progress"]
    assert state["step"] == 2 and state["evaluation_due"]
    assert "success_rate" not in (tmp_path / "run/metrics.jsonl").read_text()


# ---- trials in a training -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "steps_with_trials"), [("eval.trials_every=5", [6, 8]), ("--env_eval_freq=0", []), ("", [2, 4, 6, 8])]
)
def test_trials_have_a_cadence_of_their_own(launch, tmp_path, every, steps_with_trials):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [*DISCS, "steps=8", "eval_every=2", f"save_dir={tmp_path / 'run'}", *every.split()]
    succeed(launch.python("train.py", *words, "save_every=2", "keep_checkpoints=9"))
    evaluations = records(tmp_path / "run", "eval")
    assert [line["step"] for line in evaluations if "action_l1" in line] == [2, 4, 6, 8]
    assert [line["step"] for line in evaluations if "success_rate" in line] == steps_with_trials
    if steps_with_trials:  # whatever its step, a checkpoint that is scored is tried
        assert "success_rate" in succeed(launch.python("tools/evaluate.py", str(tmp_path / "run/step_4.pt"))).out
        events = EventAccumulator(str(tmp_path / "run/logs"), {"images": 0}).Reload()
        assert [each.step for each in events.Images("val/trial")] == steps_with_trials
        assert any("success_rate" in tag for tag in events.Tags()["scalars"])


# ---- weights that a training starts from ----------------------------------------------------------------------------


@pytest.fixture
def first(walks, tmp_path):
    """The folder of a tiny ACT of the walks."""
    task, *_ = task_of("robot", f"dataset.root={walks}", "policy.type=act", *TINY_ACT)
    task.save_pretrained(task.model(), tmp_path / "first")
    return tmp_path / "first"


@pytest.mark.parametrize(
    "change",
    [
        {"n_heads": 4},
        {"n_action_steps": 2, "dropout": 0.3, "kl_weight": 3.0},
        {"normalization_mapping": {"ACTION": "MIN_MAX", "STATE": "MEAN_STD", "VISUAL": "MEAN_STD"}},
    ],
)
def test_weights_bring_their_type_and_sizes(walks, first, change):
    """As LeRobot's policy.path: config.json first, the command line over it."""
    change_json(first / "config.json", lambda there: there.update(change))
    task, *_ = task_of("robot", f"dataset.root={walks}", f"--policy.path={first}")
    task.model()
    policy = task.cfg.policy
    assert task.started_from == str(first)
    assert (policy.type, policy.dim_model, policy.chunk_size) == ("act", 16, 6)
    for name, value in change.items():
        found = getattr(policy, name)
        assert vars(found) | value == vars(found) if isinstance(value, dict) else found == value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "asked", "told"),
    [
        ({"n_heads": 4}, "n_heads=2", "n_heads=4"),
        ({"feedforward_activation": "gelu"}, "feedforward_activation=relu", "feedforward_activation=gelu"),
        ({"replace_final_stride_with_dilation": True}, "replace_final_stride_with_dilation=false",
         "replace_final_stride_with_dilation=True"),
    ],
)  # fmt: skip
def test_weights_of_another_network_are_refused(walks, first, change, asked, told):
    """A network of the same shapes that computes another function."""
    change_json(first / "config.json", lambda there: there.update(change))
    words = ["robot", f"dataset.root={walks}", f"--policy.path={first}", f"policy.{asked}"]
    task, *_ = task_of(*words)
    refused(["of another network", f"its config.json says policy.{told}"], task.model)
    task, *_ = task_of(*words, "policy.pretrained_strict=false")
    task.model()
    assert task.started_from.endswith(f"; trained with policy.{told}")


def test_another_normalisation_than_that_of_the_weights_is_told(walks, first):
    change_json(first / "config.json", lambda there: there["normalization_mapping"].update(ACTION="MIN_MAX"))
    words = ["robot", f"dataset.root={walks}", f"--policy.path={first}", "policy.normalization_mapping.ACTION=MEAN_STD"]
    task, *_ = task_of(*words)
    task.model()
    assert task.started_from.endswith("; trained with policy.normalization_mapping.ACTION=MIN_MAX")
    task.resuming, task.started_from = True, ""
    shutil.rmtree(first)
    task.model()  # a checkpoint follows: where the weights came from once does not matter
    assert task.started_from == ""


@pytest.mark.parametrize("has_mapping", [True, False])  # without any, the policy's own defaults hold
def test_weights_whose_config_names_no_mode_of_a_feature_see_it_as_recorded(tmp_path, has_mapping):
    """LeRobot's ACT writes no mode of `observation.environment_state`, and a type without one is not normalised there:
    the same weights here would see other numbers. With the mode that is asked for, the loss is the net's own."""
    words = ["robot", "policy.type=act", f"dataset.root={record(tmp_path / 'set', env=2)}", "dataset.eval_split=0"]
    words += [*TINY_ACT, "policy.dropout=0", "policy.use_vae=false"]
    task, *_ = task_of(*words)
    first = task.model()
    task.save_pretrained(first, tmp_path / "first")

    def drop_mode(there):
        assert there["normalization_mapping"].pop("ENV") == "MEAN_STD"
        if not has_mapping:
            del there["normalization_mapping"]

    change_json(tmp_path / "first/config.json", drop_mode)
    words.append(f"policy.pretrained_path={tmp_path}/first")
    task, *_ = task_of(*words, "policy.normalization_mapping.ENV=MEAN_STD")
    task.model()
    assert task.started_from.endswith("; trained with policy.normalization_mapping.ENV=IDENTITY")
    task, data, _ = task_of(*words)
    policy = task.model()
    batch = data.__getitems__(list(range(8)))
    assert batch["observation.environment_state"].abs().mean() > 20
    inputs = {name: batch[name] for name in ("observation.environment_state", "action_is_pad")}
    for name in ("observation.state", "action"):
        mean, std = (torch.as_tensor(task.demos.stats[name][key]) for key in ("mean", "std"))
        inputs[name] = ((batch[name] - mean) / (std + 1e-8)).float()
    mean, std = (torch.tensor(robot.IMAGENET[name]) for name in ("mean", "std"))
    inputs["observation.images.cam0"] = (batch["observation.images.cam0"] / 255 - mean) / std
    draws = torch.zeros(8, task.num_draws)
    theirs = first.net(inputs, draws)["error"]
    assert torch.allclose(policy(batch, draws)["error"], theirs, rtol=1e-5)
    assert not torch.allclose(first(batch, draws)["error"], theirs, rtol=1e-3), "as it was: other inputs"


def test_renamed_observations_train_as_if_they_were_recorded_so_and_are_renamed_on_the_robot(tmp_path):
    """The weights' bits are those of a dataset recorded under the new names; the folder tells LeRobot the old ones."""
    words = ["robot", "env.type=none", *TINY_ACT, "policy.type=act"]
    camera = "observation.images.cam0"
    first, second = record(tmp_path / "first"), record(tmp_path / "second", name="camera")
    asked = f'--rename_map={{"{camera}": "observation.images.camera0"}}'
    task, data, _ = task_of(*words, f"dataset.root={first}", asked)
    other, theirs, _ = task_of(*words, f"dataset.root={second}")
    assert task.cameras == other.cameras == ["observation.images.camera0"]
    mine, its = (each.__getitems__([0, 5, 9]) for each in (data, theirs))
    assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)
    torch.manual_seed(0)
    policy = task.model()
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.model().parameters(), strict=True))
    task.save_pretrained(policy, tmp_path / "out")
    steps = json.loads((tmp_path / "out/policy_preprocessor.json").read_text())["steps"]
    assert steps[0] == {
        "registry_name": "rename_observations_processor",
        "config": {"rename_map": {camera: "observation.images.camera0"}},
    }
    assert "observation.images.camera0" in json.loads((tmp_path / "out/config.json").read_text())["input_features"]


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ("observation.images.front:observation.images.camera0", "no feature observation.images.front"),
        ("observation.images.cam0:observation.state", "observation.state would be there twice"),
        ("action:observation.action", "renames no observation"),
        ("observation.images.cam0:observation.a,observation.images.cam0:observation.b", "would be there twice"),
        ("observation.images.cam0:observation.images.a/b", "cannot be a camera's name"),
    ],
)
def test_names_that_cannot_be_given(walks, pairs, says):
    refused(says, lambda: task_of("robot", f"dataset.root={walks}", "env.type=none", f"rename_map={pairs}"))


def test_the_backbone_has_lerobots_rate_of_its_own(tmp_path):
    """Given, or in the config.json of weights; without it, as all else."""
    words = ["robot", "policy.type=act", "--policy.optimizer_lr=1e-3"]
    assert parse(*words).optim.lr_scale == []
    assert parse(*words, "--policy.optimizer_lr_backbone=1e-5").optim.lr_scale == ["?*backbone.*:0.01"]
    (tmp_path / "config.json").write_text('{"type": "act", "optimizer_lr": 1e-3, "optimizer_lr_backbone": 1e-4}')
    cfg = parse("robot", f"policy.path={tmp_path}")
    assert cfg.optim.lr == 1e-3 and cfg.optim.lr_scale == ["?*backbone.*:0.1"]
    assert parse("robot", f"policy.path={tmp_path}", "optim.lr_scale=x:2").optim.lr_scale == ["x:2"]


def test_pictures_that_were_shrunk_are_shrunk_on_the_robot_and_other_cameras_are_refused(tmp_path):
    words = ["robot", "policy.type=act", f"dataset.root={record(tmp_path / 'set', cameras=2)}", *TINY_ACT]
    task, *_ = task_of(*words, "dataset.resize=16,20")
    task.save_pretrained(task.model(), tmp_path / "out")
    steps = json.loads((tmp_path / "out/policy_preprocessor.json").read_text())["steps"]
    wanted = {"crop_params_dict": None, "resize_size": [16, 20]}
    assert [step["config"] for step in steps if step["registry_name"] == "image_crop_resize_processor"] == [wanted]
    words += ["dataset.resize=16,20"]
    one = [*words, f"policy.path={tmp_path / 'out'}", "dataset.cameras=observation.images.cam1"]
    refused("and the dataset gives observation.images.cam1 ", lambda: task_of(*one)[0].model())
    task_of(*one, "policy.pretrained_strict=false")[0].model()
    named, *_ = task_of(*words, "rename_map=observation.images.cam0:observation.front")
    says = "whose name has `image` in it, and observation.front has not"
    refused(says, lambda: named.save_pretrained(named.model(), tmp_path / "other"))


def test_cameras_of_several_datasets(tmp_path):
    one, two = record(tmp_path / "one"), record(tmp_path / "two", name="other")
    words = ["robot", f"dataset.root=[{one},{two}]"]
    refused(["no camera is in all datasets", "rename_map gives them one name"], lambda: task_of(*words))
    task, *_ = task_of(*words, "dataset.cameras=none")
    assert task.cameras == []


def test_what_a_config_of_weights_has_is_checked_like_any_setting(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"type": "act", "chunk_size": -1, "vision_backbone": "resnet50"}')
    with pytest.raises(LockstepError) as caught:
        parse("robot", f"policy.path={tmp_path}")
    chunk, backbone = sorted(str(caught.value).splitlines())
    assert chunk == f"policy.chunk_size=-1 ({path}): must be at least 1"
    assert backbone.startswith(f"policy.vision_backbone=resnet50 ({path}): did you mean resnet")
    path.write_text('{"type": "actt"}')
    refused(["actt", "choose one of act, vla"], lambda: parse("robot", f"policy.path={tmp_path}"))


@pytest.fixture
def hub(walks, first):
    """A server with the walks and with weights."""
    with hub_server.served({"datasets/lab/walks": walks, "models/lab/act": first}) as hub:
        yield hub


@pytest.fixture
def env(hub, tmp_path):
    """The environment of a process beside the server."""
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    return env | {f"HF_HUB_DISABLE_{name}": "1" for name in ("XET", "PROGRESS_BARS", "TELEMETRY")}


WEIGHTS, DATASET, SHORT = "--policy.path=lab/act", "--dataset.repo_id=lab/walks", ["steps=1", "batch_size=2"]


@pytest.mark.slow
def test_what_is_not_here_is_downloaded_where_that_is_asked_for(launch, tmp_path, hub, env):
    """Two processes, a dataset and weights from a server: each file is fetched once, and nothing without --download."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    words = ["robot", WEIGHTS, DATASET, *SHORT]
    done = launch.python("train.py", *words, **env)
    assert done.code == 2 and "--download, which fetches" in done.err and not hub.asked
    run = tmp_path / "run"
    out = succeed(launch.torchrun(2, "train.py", *words, "--download", f"save_dir={run}", **env)).out
    assert "Weights from lab/act" in out and "4 episodes" in out
    fetched = [line for line in hub.asked if line.startswith("GET") and "/resolve/" in line]
    assert len(fetched) == len(set(fetched)) == 11
    assert sum("/revision/" in line for line in hub.asked) == 2, "of two processes one asks"
    hub.asked.clear()
    succeed(launch.python("train.py", *words, f"save_dir={tmp_path / 'second'}", **env))
    assert not hub.asked, "it lies in the cache"
    done = succeed(launch.python("tools/save_pretrained.py", "--json", str(run), **env))
    assert json.loads(done.out) == {"output": f"{run}/pretrained_model"}
    card = huggingface_hub.ModelCard.load(run / "pretrained_model/README.md")
    about = card.data.to_dict()
    assert (about["library_name"], about["datasets"], "act" in about["tags"]) == ("lerobot", ["lab/walks"], True)
    assert "python train.py robot --policy.path=FOLDER --dataset.repo_id=lab/walks" in card.text


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--policy.path=lab/nothing", DATASET], [WEIGHTS, "--dataset.repo_id=lab/nothing"]])
def test_what_no_server_has_is_one_line(launch, env, words):
    pytest.importorskip("huggingface_hub")
    done = launch.python("train.py", "robot", *words, *SHORT, "--download", **env)
    assert done.code == 2 and "cannot download lab/nothing: " in done.err and len(done.err.splitlines()) == 1


@pytest.mark.slow
def test_a_revision_is_downloaded(launch, tmp_path, hub, env):
    """From the server, then from the cache."""
    pytest.importorskip("huggingface_hub")
    words = ["robot", WEIGHTS, DATASET, *SHORT, "--policy.pretrained_revision=v1", "--dataset.revision=v2"]
    for name, more in (("run", ["--download"]), ("again", [])):
        succeed(launch.python("train.py", *words, *more, f"save_dir={tmp_path / name}", **env))
    revisions = {line for line in hub.asked if "/revision/" in line}
    assert revisions == {"GET /api/models/lab/act/revision/v1", "GET /api/datasets/lab/walks/revision/v2"}


def test_two_cameras_of_the_other_order_are_told(tmp_path):
    words = ["robot", "policy.chunk_size=4", f"dataset.root={record(tmp_path / 'set', cameras=2)}"]
    names = [f"observation.images.cam{n}" for n in range(2)]
    task, *_ = task_of(*words)
    task.save_pretrained(task.model(), tmp_path / "first")
    other = [*words, f"policy.pretrained_path={tmp_path}/first", f"dataset.cameras={names[1]},{names[0]}"]
    task, *_ = task_of(*other)
    refused(f"dataset.cameras={names[0]},{names[1]}", task.model)


def test_saved_statistics_are_those_of_the_training(walks, tmp_path):
    """Not those of the dataset as it is today."""
    from safetensors.torch import load_file

    task, *_ = task_of("robot", "policy.type=act", f"dataset.root={walks}", *TINY_ACT)
    model = task.model()
    before = {name: torch.as_tensor(value) for name, value in task.demos.stats["action"].items()}
    task.demos.stats["action"]["std"] = task.demos.stats["action"]["std"] * 5
    task.save_pretrained(model, tmp_path / "first")
    saved = load_file(next((tmp_path / "first").glob("policy_post*.safetensors")))
    assert torch.allclose(saved["action.std"], before["std"].float())
    assert torch.allclose(saved["action.mean"], before["mean"].float())


def test_each_camera_keeps_its_proportions(tmp_path):
    wrist = {"observation.images.wrist": np.zeros((5, 3, 40, 20), np.uint8)}
    top, action = np.zeros((5, 3, 32, 48), np.uint8), np.zeros((5, 2), np.float32)
    root = record_one(tmp_path / "set", top=top, **wrist, action=action)
    task, train, _ = task_of("robot", f"dataset.root={root}", "policy.chunk_size=4")
    batch = train.__getitems__([0, 1])
    assert batch["observation.images.top"].shape[2:] == (21, 32)
    assert batch["observation.images.wrist"].shape[2:] == (32, 16)
    model = task.model()
    task.loss(model, batch | {"lockstep": seeded(2)})
    task.save_pretrained(model, tmp_path / "saved")
    inputs = json.loads((tmp_path / "saved/config.json").read_text())["input_features"]
    shapes = {name: feature["shape"] for name, feature in inputs.items() if feature["type"] == "VISUAL"}
    assert shapes == {name: [*batch[name].shape[1:]] for name in task.cameras}, "as the policy is given them"


def test_whole_numbers_are_learned_from(tmp_path):
    numbers = np.arange(10).reshape(5, 2)
    record_one(tmp_path / "set", **dict.fromkeys(("observation.state", "action"), numbers))
    modes = ["policy.normalization_mapping.ACTION=IDENTITY", "policy.normalization_mapping.STATE=IDENTITY"]
    task, train, _ = task_of("robot", f"dataset.root={tmp_path}/set", "policy.chunk_size=4", *modes)
    batch = train.__getitems__([0, 1]) | {"lockstep": seeded(2)}
    assert torch.isfinite(task.loss(task.model(), batch).total)


def test_what_a_replica_has_is_enough(walks):
    """A replica of nn.DataParallel has no parameters of its own, and buffers."""
    task, train, _ = task_of("robot", f"dataset.root={walks}", "policy.chunk_size=4")
    model = task.model()
    before = model.inputs(train.__getitems__([0, 1]))
    replica = Policy(torch.nn.Identity(), model.normalizer, model.cameras)
    assert not list(replica.parameters())
    after = replica.inputs(train.__getitems__([0, 1]))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_run_becomes_a_pretrained_policy_for_the_next(launch, tmp_path, walks):
    """Its average, which was evaluated, is what the next run starts from; other options than its own are named."""
    common = ["train.py", "robot", "policy.type=act", f"dataset.root={walks}", *TINY_ACT, "batch_size=4"]
    run = tmp_path / "first"
    succeed(launch.python(*common, "steps=3", "optim.lr=1e-2", "optim.ema_decay=0.5", f"save_dir={run}"))
    assert f"Saved {run}/pretrained_model" in succeed(launch.python("tools/save_pretrained.py", str(run))).out
    assert json.loads((run / "pretrained_model/config.json").read_text())["type"] == "act"
    words = [*common, f"policy.pretrained_path={run}", "steps=1", "optim.lr=1e-9", f"save_dir={tmp_path / 'second'}"]
    assert f"Weights from {run}\n" in succeed(launch.python(*words)).out
    before, after = (load(path)["model"] for path in (run, tmp_path / "second"))
    best = torch.load(next(run.glob("best*.pt")), weights_only=True)["ema"]
    floats = [name for name in after if after[name].is_floating_point()]
    assert all(torch.allclose(best[f"module.{name}"], after[name], atol=1e-7) for name in floats)
    assert before.keys() == after.keys()
    deeper = [word.replace("n_encoder_layers=1", "n_encoder_layers=2").replace("second", "fourth") for word in words]
    deeper.append("policy.pretrained_strict=false")
    line = f"Weights from {run}, the rest at random: 12 missing: encoder.layers.1."
    assert line in succeed(launch.python(*deeper)).out
    other = ["robot", f"dataset.root={walks}", f"policy.pretrained_path={run}", "policy.type=vla"]
    refused(["not of vla", "policy.type=act"], lambda: task_of(*other)[0].model())


# ---- data -----------------------------------------------------------------------------------------------------------


def test_a_dataset_of_other_names_is_told_what_it_has(tmp_path):
    numbers = np.zeros((5, 2), np.float32)
    root = record_one(tmp_path / "set", actions=numbers, qpos=numbers)
    says = [f"({root}): imitation", "these names; there are actions, qpos"]
    refused(says, lambda: task_of("robot", f"dataset.root={root}"))


def test_a_mode_without_its_statistics_and_a_foreign_simulation_are_told(walks):
    task, *_ = task_of("robot", f"dataset.root={walks}", "policy.normalization_mapping.VISUAL=QUANTILES")
    task.model()
    for name in ("q01", "q99"):
        del task.demos.stats["observation.images.cam0"][name]
    refused("tells no q01, q99 of observation.images.cam0, which QUANTILES needs", task.model)
    says = "not of this simulation: it has observation.state of shape (3,) (env.type=discs)"
    refused(says, lambda: task_of("robot", f"dataset.root={walks}", "env.type=discs"))


IN_RANGE = {
    "MEAN_STD": lambda x: abs(x.mean()) < 1e-4 and abs(x.std() - 1) < 0.02,
    "MIN_MAX": lambda x: (float(x.min()), float(x.max())) == pytest.approx((-1, 1), abs=1e-5),
    "QUANTILES": lambda x: 0.01 < (x.abs() > 1).float().mean() < 0.05,
    "QUANTILE10": lambda x: 0.15 < (x.abs() > 1).float().mean() < 0.25,
    "IDENTITY": lambda x: abs(x.mean()) > 0.5,
}


@pytest.mark.parametrize("mode", IN_RANGE)
def test_every_normalisation_brings_the_data_to_its_range(walks, mode):
    task, *_ = task_of("robot", f"dataset.root={walks}", f"policy.normalization_mapping.ACTION={mode}")
    normalizer, actions = task.model().normalizer, torch.from_numpy(task.demos.columns["action"])
    normalised = normalizer("action", actions)
    assert IN_RANGE[mode](normalised[:, 0])
    torch.testing.assert_close(normalizer.inverse("action", normalised), actions, rtol=1e-5, atol=1e-5)


def test_act_prints_what_its_backbone_starts_from(walks, tmp_path):
    """LeRobot's starts from ImageNet's weights; with weights of its own, or no picture, the line is not there."""
    act = ["robot", "policy.type=act", f"dataset.root={walks}", "dataset.cache=none"]
    (tmp_path / "config.json").write_text('{"type": "act", "vision_backbone": "resnet34"}')
    line = "The resnet34 that sees starts at random, its norms frozen as they are; LeRobot's starts from ImageNet's"
    for words in (["dataset.cameras=none"], [f"policy.pretrained_path={tmp_path}"]):
        assert "sees starts" not in task_of(*act, *words)[0].summary()
    task, *_ = task_of(*act, "policy.vision_backbone=resnet34")
    assert line in task.summary()
    task.resuming = True
    assert line not in task.summary(), "its weights are the checkpoint's"


def test_cameras_can_be_left_out(tmp_path):
    root = record(tmp_path / "set", cameras=2)
    both, one, none = (
        task_of("robot", f"dataset.root={root}", *words)[1].__getitems__([0]).keys()
        for words in ([], ["dataset.cameras=observation.images.cam1"], ["dataset.cameras=none"])
    )
    assert both - one == {"observation.images.cam0"} and one - none == {"observation.images.cam1"}
    says = ["no camera observation.images.cam7", "there are observation.images.cam0"]
    refused(says, lambda: task_of("robot", f"dataset.root={root}", "dataset.cameras=observation.images.cam7"))


class Copies(TorchFunctionMode):
    """Count the tensors that are made of numbers of the host for a device."""

    made = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.made += func in (torch.tensor, torch.as_tensor) and "device" in (kwargs or {})
        return func(*args, **(kwargs or {}))


def test_each_change_of_colours_is_as_large_as_its_own_setting():
    """Against plain NumPy: brightness scales, saturation keeps the gray of each pixel, contrast that of the picture."""
    u = uniform(sample_seeds(3, 1, torch.arange(300)), 3)
    x = np.random.default_rng(0).integers(110, 140, (300, 3, 6, 5)).astype(np.float64)
    keeps = {"brightness": 0, "saturation": x.mean(1, keepdims=True), "contrast": x.mean((1, 2, 3), keepdims=True)}
    for (name, kept), size in zip(keeps.items(), (0.1, 0.6, 0.3), strict=True):
        wanted = robot.Augment(**dict.fromkeys(keeps, 0.0) | {name: size})
        y = robot.recolour(torch.from_numpy(x).byte(), u, wanted).numpy()
        factor = ((y - kept) * (x - kept)).sum((1, 2, 3)) / ((x - kept) ** 2).sum((1, 2, 3))
        np.testing.assert_allclose(y, kept + (x - kept) * factor[:, None, None, None], atol=1e-3)
        assert abs(factor - 1).max() == pytest.approx(size, rel=0.05) and abs(factor.mean() - 1) < 0.1 * size


def test_augmentation_copies_nothing_to_the_device():
    """Each copy waits for all that is under way there."""
    with (copies := Copies()):
        seeds = sample_seeds(3, 1, torch.arange(4))
        x = robot.recolour(torch.full((4, 3, 2, 2), 100, dtype=torch.uint8), uniform(seeds, 3), robot.Augment())
    assert x.unique().numel() > 1 and not copies.made
