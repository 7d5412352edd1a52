"""Policies of LeRobot's own classes: tiny ones made here are trained, cut, exported and run by LeRobot itself.

Written for lerobot 0.6.1 (`python tests/peer/install.py FOLDER`); skipped where it is not installed. Then
PYTHONPATH=FOLDER HF_HUB_OFFLINE=1 python -m pytest tests/peer
"""

import importlib.util
import os
from typing import Any, NamedTuple

import pytest

if lacking := [name for name in ("lerobot", "transformers", "diffusers") if importlib.util.find_spec(name) is None]:
    pytest.skip(f"not installed: {', '.join(lacking)} (tests/peer/install.py)", allow_module_level=True)

import numpy as np
import torch
import torchvision_shim
from conftest import ROOT, succeed

torchvision_shim.load()
from lerobot.configs.policies import PreTrainedConfig  # noqa: E402
from lerobot.configs.types import NormalizationMode  # noqa: E402
from lerobot.policies.factory import get_policy_class, make_pre_post_processors  # noqa: E402
from robot_tasks import TINY_ACT, parse, record, task_of  # noqa: E402
from tiny_policies import TINY, words_of  # noqa: E402

from engine.contract import BatchInfo, LockstepError, sample_seeds, uniform  # noqa: E402
from engine.seeds import seed_everything  # noqa: E402
from formats.robots.frames import Frames  # noqa: E402
from formats.robots.lerobot import read  # noqa: E402
from models.lerobot_policy import Drawn, _seeds  # noqa: E402

SHARED = "env.type=none device=cpu dataset.cache=none amp=off".split()


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return record(tmp_path_factory.mktemp("walks") / "set", episodes=6, frames=14)


class Made(NamedTuple):
    kind: str
    words: list
    task: Any
    train: Any
    model: Any
    patch: Any


@pytest.fixture(scope="module", params=TINY)
def made(request, walks, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        words = words_of(request.param, tmp_path_factory.mktemp(request.param), patch)
        task, train, _ = task_of("robot", f"dataset.root={walks}", *SHARED, *words)
        torch.manual_seed(0)
        model = task.model()
        if request.param == "vqbet":  # its codes are learned first
            for _ in range(2):
                task.loss(model.train(), batch_of(task, train, range(8)))
        yield Made(request.param, words, task, train, model, patch)


def batch_of(task, train, rows):
    rows = torch.as_tensor(list(rows))
    info = BatchInfo(rows, rows, sample_seeds(0, 0, rows))
    return train.__getitems__(rows) | {"lockstep": info}


def some_rows(train):
    """Of episodes' ends, too, where chunks are padded."""
    return [0, len(train) - 1, 3, len(train) - 2, 9]


def theirs_of(made, rows):
    """(LeRobot's input for these samples by its own pipeline, the seeds of their noise)."""
    batch = made.task._with_words(batch_of(made.task, made.train, rows))
    seen = {name: value for name, value in batch.items() if name.startswith(("observation.", "action"))}
    seen |= {name: seen[name].float() / 255 for name in made.task.cameras}
    seen["task"] = [made.task.demos.tasks[n] for n in batch["task_index"].tolist()]
    before, _ = make_pre_post_processors(made.model.net.policy.config, dataset_stats=made.model.normalizer.stats())
    return before(seen), _seeds(uniform(batch["lockstep"].seed, 2))


def quiet(model):
    """No dropout: its masks depend on the cut of a batch."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def step(task, model, batches):
    """(the loss, all gradients) of a step in so many passes."""
    model.zero_grad()
    losses = [task.loss(model, batch) for batch in batches]
    loss = sum(loss.total for loss in losses) / sum(float(loss.weight) for loss in losses)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def near(one, other, tolerance):
    size = torch.cat([value.flatten() for value in one.values()]).norm()
    assert one.keys() == other.keys() and size > 0
    away = torch.cat([(one[name] - other[name]).flatten() for name in one]).norm()
    assert away <= tolerance * size, f"off by {away / size:.1e} of the gradient"


def test_the_step_does_not_depend_on_the_cut_and_is_lerobots(made):
    """The loss of the whole batch by LeRobot's own forward pass, from the sums of two parts and of five."""
    rows = some_rows(made.train)
    model = quiet(made.model).train()
    inputs, seeds = theirs_of(made, rows)
    with Drawn(seeds, uniform, spread=made.kind == "xvla"):
        expected = made.model.net.policy.forward(inputs)[0].item()
    whole = step(made.task, model, [batch_of(made.task, made.train, rows)])
    for cut in ([rows[:3], rows[3:]], [[row] for row in rows]):
        parts = step(made.task, model, [batch_of(made.task, made.train, some) for some in cut])
        assert parts[0] == pytest.approx(whole[0], rel=2e-6)
        near(whole[1], parts[1], 2e-5)
    assert whole[0] == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("made", ["xvla"], indirect=True)  # its dropout is written into its code
def test_one_sample_at_a_time_dropout_is_the_samples_own(made):
    rows, model = some_rows(made.train), made.model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    model.exact = True
    whole = step(made.task, model, [batch_of(made.task, made.train, rows)])
    parts = step(made.task, model, [batch_of(made.task, made.train, some) for some in (rows[:3], rows[3:])])
    model.exact = False
    other = step(made.task, model, [batch_of(made.task, made.train, rows)])
    quiet(model)
    assert parts[0] == pytest.approx(whole[0], rel=2e-6) and other[0] != pytest.approx(whole[0], rel=1e-3)
    near(whole[1], parts[1], 2e-5)


def test_lerobot_runs_what_was_saved(made, tmp_path):
    """The commands that a robot is driven with: its own pipelines and `select_action`, over an episode."""
    task, model, out = made.task, made.model.eval(), tmp_path / "out"
    task.save_pretrained(model, out)
    config = PreTrainedConfig.from_pretrained(str(out))
    assert config.type == made.kind and config.pretrained_path is None
    theirs = get_policy_class(made.kind).from_pretrained(str(out), config=config, strict=True)
    saved, mine = theirs.state_dict(), model.net.policy.state_dict()
    assert all(torch.equal(saved[name], mine[name]) for name in saved)
    before, after = make_pre_post_processors(config, pretrained_path=str(out))
    draws = torch.rand(1, 2, generator=torch.Generator().manual_seed(1))
    past = task.windows.history
    for row in (0, 5):
        batch = task._with_words(batch_of(task, made.train, [row]))
        ours = model.act(batch, draws)
        theirs.reset()
        for at in range(len(past)):  # of row 0, LeRobot repeats the first frame itself
            seen = {name: batch[name][0, at] if len(past) > 1 else batch[name][0] for name in task.dims}
            shot = {name: batch[name][0, at] if len(past) > 1 else batch[name][0] for name in task.cameras}
            seen |= {name: picture.float() / 255 for name, picture in shot.items()}
            seen["task"] = task.demos.tasks[int(batch["task_index"])]
            if len(past) > 1:
                theirs._queues["action"].clear()
            with Drawn(_seeds(draws), uniform):
                actions = [after(theirs.select_action(before(dict(seen))))]
        with Drawn(_seeds(draws), uniform):
            actions += [after(theirs.select_action(before(dict(seen)))) for _ in range(2)]
        torch.testing.assert_close(torch.stack(actions, 1), ours[:, :3], rtol=1e-4, atol=1e-4)


def test_it_starts_from_what_was_saved(made, tmp_path):
    """Type apart, everything is in the folder: sizes, normalisation, weights."""
    made.task.save_pretrained(made.model, tmp_path / "out")
    where = [f"policy.path={tmp_path / 'out'}", f"dataset.root={made.task.demos.root}", *SHARED]
    again, *_ = task_of("robot", f"policy.type={made.kind}", *where)
    model = again.model()
    for name, value in made.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert again.cfg.policy.normalization_mapping == made.task.cfg.policy.normalization_mapping


def test_renamed_and_empty_cameras_are_in_the_folder(walks, tmp_path):
    """LeRobot takes what the robot sees under its own name, and fills the cameras that the robot has not."""
    with pytest.MonkeyPatch.context() as patch:
        words = [*words_of("smolvla", tmp_path, patch), "policy.empty_cameras=1"]
    seen, named = "observation.images.cam0", "observation.images.camera1"
    asked = f'--rename_map={{"{seen}": "{named}"}}'
    task, train, _ = task_of("robot", f"dataset.root={walks}", *SHARED, *words, asked)
    model = task.model().eval()
    task.save_pretrained(model, tmp_path / "out")
    config = PreTrainedConfig.from_pretrained(str(tmp_path / "out"))
    assert [*config.image_features] == [named, "observation.images.empty_camera_0"]
    theirs = get_policy_class("smolvla").from_pretrained(str(tmp_path / "out"), config=config, strict=True)
    before, after = make_pre_post_processors(config, pretrained_path=str(tmp_path / "out"))
    batch, draws = task._with_words(batch_of(task, train, [4])), torch.full((1, 2), 0.3)
    on_robot = {name: batch[name][0] for name in task.dims} | {seen: batch[named][0].float() / 255}
    with Drawn(_seeds(draws), uniform):
        action = after(theirs.select_action(before(on_robot | {"task": task.demos.tasks[int(batch["task_index"])]})))
    torch.testing.assert_close(action, model.act(batch, draws)[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_pictures_are_shrunk_on_the_robot_as_in_training(walks, tmp_path, kind):
    """By LeRobot's own step, to a level of 255: of our ACT, and of its own policy."""
    with pytest.MonkeyPatch.context() as patch:
        words = ["policy.type=act", *TINY_ACT] if kind == "act" else words_of(kind, tmp_path, patch)
    task, train, _ = task_of("robot", f"dataset.root={walks}", *SHARED, *words, "dataset.resize=24,24")
    task.save_pretrained(task.model(), tmp_path / "out")
    config = PreTrainedConfig.from_pretrained(str(tmp_path / "out"))
    before, _ = make_pre_post_processors(config, pretrained_path=str(tmp_path / "out"))
    for step in before.steps:
        if "Normalizer" in type(step).__name__:
            step.norm_map = dict.fromkeys(step.norm_map, NormalizationMode.IDENTITY)
    camera = task.cameras[0]
    raw = Frames(read(walks), {}, "none", "unused").get(camera, np.array([4]))[0]
    seen = {name: torch.zeros(dim) for name, dim in task.dims.items()} | {camera: torch.from_numpy(raw).float() / 255}
    shrunk = before(seen | {"task": "walk 0"})[camera]
    trained = train.__getitems__([train.rows.tolist().index(4)])[camera].reshape(-1, 3, 24, 24)[-1]
    assert raw.shape == (3, 32, 40) and (shrunk[0] * 255 - trained).abs().max() < 1.01


def run_by(launch, tmp_path, processes, words, out):
    shim = tmp_path / "shim"  # the real environments of users have a torchvision that loads
    shim.mkdir(exist_ok=True)
    (shim / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(ROOT / 'tests/peer')!r})\nimport torchvision_shim\ntorchvision_shim.load()\n"
    )
    launch.may_stay.append("tmp")
    path = os.pathsep.join([str(shim), str(ROOT), os.environ.get("PYTHONPATH", "")])
    size = f"batch_size={8 // processes}"
    return succeed(launch.torchrun(processes, "train_ddp.py", *words, size, f"save_dir={out}", PYTHONPATH=path)), path


@pytest.mark.parametrize("kind", ["diffusion", "multi_task_dit", "smolvla"])
def test_two_processes_train_as_one(launch, tmp_path, walks, kind):
    """By the ordinary command; and what stays as it is: a frozen vision-language model."""
    with pytest.MonkeyPatch.context() as patch:
        words = ["robot", f"dataset.root={walks}", *SHARED, *words_of(kind, tmp_path, patch)]
        words += ["global_batch=8", "steps=4", "optim.name=sgd", "lr=1e-2", "schedule.warmup_steps=1"]
    last = []
    for processes in (1, 2):
        done, path = run_by(launch, tmp_path, processes, words, tmp_path / f"run{processes}")
        assert "Done: 4 steps" in done.out and "the same step on any cut of the batch" in done.out
        last.append(torch.load(tmp_path / f"run{processes}/last.pt", weights_only=True)["model"])
    one, two = last
    task, *_ = task_of(*words)
    seed_everything(0)
    first = task.model().state_dict()
    changed = {name for name, value in first.items() if not torch.equal(value, one[name])}
    assert changed and not any(".vlm." in name or ".text_encoder.text_encoder." in name for name in changed)
    for name, value in one.items():
        if value.is_floating_point():
            torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5, msg=name)
    out = tmp_path / "out"
    succeed(launch.python("tools/save_pretrained.py", str(tmp_path / "run2"), str(out), PYTHONPATH=path))
    saved = get_policy_class(kind).from_pretrained(str(out), strict=True).state_dict()
    assert all(torch.equal(saved[name], two[f"net.policy.{name}"]) for name in saved)


def test_what_is_not_there_is_one_line(walks, tmp_path):
    mistakes = {
        "policy.type=difusion": "mean diffusion? choose one of act, vla, or of lerobot 0.6.1: diffusion, eo1, evo1",
        "policy.type=tdmpc": "tdmpc cannot be trained here: it learns from rewards",
        "policy.type=diffusion policy.horizn=8": "unknown key 'policy.horizn' (command line): did you mean 'policy",
        "policy.type=diffusion policy.horizon=9": "The horizon should be an integer multiple of the downsampling",
        "policy.type=diffusion policy.num_inference_steps=many": "LeRobot cannot take 'many'",
        "policy.type=diffusion policy.down_dims=[8,x]": "policy.down_dims=[8,x] (command line): give a whole number",
    }
    for words, message in mistakes.items():
        with pytest.raises(LockstepError) as caught:
            parse("robot", *words.split())
        assert message in str(caught.value) and "\n" not in str(caught.value), words
    diffusion = ["robot", f"dataset.root={walks}", "policy.type=diffusion", *SHARED]
    with pytest.raises(LockstepError, match=r"no config\.json in nowhere"):
        task_of(*diffusion, "policy.path=nowhere")
    task, *_ = task_of(*diffusion, "policy.pretrained_backbone_weights=ResNet18_Weights.IMAGENET1K_V1")
    with pytest.raises(LockstepError, match="copy the file there, or drop it"):
        task.model()
    task, *_ = task_of("robot", f"dataset.root={walks}", "policy.type=multi_task_dit", *SHARED)
    with pytest.raises(LockstepError, match="nothing is downloaded"):
        task.model()


def test_lerobots_own_optimizer_and_schedule_are_the_defaults():
    cfg = parse("robot", "policy.type=smolvla")
    assert (cfg.optim.lr, cfg.optim.beta2, cfg.optim.weight_decay, cfg.optim.grad_clip) == (1e-4, 0.95, 1e-10, 10.0)
    assert (cfg.schedule.warmup_steps, cfg.schedule.horizon, cfg.schedule.final_share) == (1000, 30_000, 0.025)
    cfg = parse("robot", "policy.type=smolvla", "steps=3000", "policy.optimizer_lr=3e-4")  # LeRobot shortens both
    assert (cfg.optim.lr, cfg.schedule.warmup_steps, cfg.schedule.horizon) == (3e-4, 100, 0)
    assert parse("--config", str(ROOT / "configs/policy/smolvla.yaml")).policy.type == "smolvla"
    cfg = parse("robot", "policy.type=multi_task_dit", "optim.beta1=0.9")
    assert (cfg.optim.beta1, cfg.optim.beta2, cfg.schedule.kind) == (0.9, 0.999, "cosine")
    assert cfg.optim.lr_scale == ["net.policy.observation_encoder.vision_encoder.*:0.1"]
