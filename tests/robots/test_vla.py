"""The vision-language-action policy: sizes, frozen parts, flow matching, masks, sampling, and that it learns."""

import ast
import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT
from tiny_vla import SMALL, TOP, policy, shaken, some_draws, some_inputs

from models.vla import PRESETS, VLA, VLASettings, fit, grid_positions, hash_words
from tasks.envs import discs, trials


def started(shake=True, cameras=(TOP,), **changes):
    """A network, a batch of 6 for it, and draws."""
    net = policy(cameras=cameras, **changes)
    net = shaken(net) if shake else net
    return net, some_inputs(cameras=cameras), some_draws(6, net)


# Sizes and settings


@pytest.mark.parametrize(
    ("preset", "cameras", "millions"),
    [("test", 1, 0.3905), ("tiny", 1, 2.058), ("small", 2, 34.47), ("base", 3, 200.1)],
)
def test_presets_have_the_stated_size(preset, cameras, millions):
    with torch.device("meta"):
        net = VLA(VLASettings(preset=preset), 6, 0, 6, [f"camera_{i}" for i in range(cameras)])
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(millions, rel=0.002)
    assert net.num_draws == 1 + 50 * 6 and net.penalty == 0.0


def test_zero_means_the_presets_own_and_all_else_wins():
    full = VLASettings(preset="small", depth=3, chunk_size=20).resolved()
    assert (full.depth, full.width, full.n_action_steps) == (3, 384, 20)
    assert full.resolved() == full
    assert VLASettings(chunk_size=20, n_action_steps=4).resolved().n_action_steps == 4


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"preset": "huge"}, "no preset 'huge'"),
        ({"width": 100}, "width 100"),
        ({"expert_width": 100}, "expert_width 100"),
        ({"patch_size": 12}, "patch_size 12"),
        ({"patch_size": 1}, "patch_size 1"),
        ({"image_size": 36}, "36 pixels"),
        ({"n_action_steps": 51}, "n_action_steps 51"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        VLASettings(**({"preset": "tiny"} | wrong)).resolved()


# Words


@pytest.mark.slow
def test_words_are_hashed_alike_everywhere():
    """Checkpoints outlive a process: the numbers themselves are pinned, and asked of a Python with another salt."""
    command = "from models.vla import hash_words; print(hash_words('Move to the RED disc!', 8, 512))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    expected = [130, 171, 438, 247, 391, 0, 0, 0]
    assert ast.literal_eval(done.stdout) == hash_words("move to the red disc", 8, 512) == expected
    assert hash_words("move to the red disc", 2, 512) == expected[:2]


def test_no_word_is_padding_and_scripts_without_spaces_have_words():
    many = {hash_words(f"word{i}", 1, 7)[0] for i in range(300)}
    assert many == set(range(1, 7))
    assert np.count_nonzero(hash_words("把红盘推到中间 now", 10, 512)) == 8
    assert hash_words("", 3, 512) == hash_words("?!", 3, 512) == [0, 0, 0]


def test_the_commands_of_the_discs_do_not_collide():
    words = {word for verb in discs.VERBS for colour in discs.COLOURS for word in verb.format(colour).split()}
    for vocabulary in {preset["vocabulary"] for preset in PRESETS.values()}:
        assert len({hash_words(word, 1, vocabulary)[0] for word in words}) == len(words)


# What is trained and what is not


@pytest.mark.parametrize(
    ("freeze", "expert", "checkpointing", "state", "cameras"),
    list(itertools.product((False, True), (False, True), (False, True), (0, 2), ((TOP,), (TOP, "b"), ()))),
)
def test_every_trainable_parameter_is_used_and_no_other(freeze, expert, checkpointing, state, cameras):
    settings = replace(
        SMALL, freeze_vision_encoder=freeze, train_expert_only=expert, gradient_checkpointing=checkpointing
    )
    net = shaken(policy(settings, state, cameras))
    inputs = some_inputs(cameras=cameras)
    net(inputs, some_draws(6, net))["error"].sum().backward()
    for name, parameter in net.named_parameters():
        frozen = (freeze and name.startswith("eyes.")) or (expert and not name.startswith("expert."))
        assert parameter.requires_grad == (not frozen), name
        assert (parameter.grad is None) == frozen, name
        assert frozen or parameter.grad.any(), name


def test_a_checkpoint_holds_weights_only():
    net = policy()
    assert set(net.state_dict()) == {name for name, _ in net.named_parameters()}


# Flow matching


def test_the_expert_is_silent_at_first():
    """Output and AdaLN start at zero: the first velocity is 0, and each block lets its input through."""
    net, inputs = policy(), some_inputs()
    assert not net.sample(inputs).any()
    prefix = net.prefix(inputs)
    x, code = torch.randn(6, 5, 64), torch.randn(6, 64)
    for block in net.expert.blocks:
        assert torch.equal(block(x, code, prefix.memory, prefix.mask), x)


def test_the_loss_is_flow_matching(double):
    """Against the formulas of SmolVLA, in NumPy, with a velocity field that is known: v(x, t) = 3 x - t."""
    net, inputs = policy(), some_inputs()
    net.expert.forward = lambda x, time, prefix: 3 * x - time[:, None, None]
    draws = some_draws(6, net)
    error = net(inputs, draws)["error"]
    action, valid = inputs["action"].numpy(), ~inputs["action_is_pad"].numpy()
    at = (np.floor(draws.numpy().astype(np.float64) * 2**16) + 0.5) / 2**16
    time = (0.999 * at[:, 0] ** (1 / 1.5) + 0.001)[:, None, None]
    noise = torch.special.ndtri(torch.tensor(at[:, 1:])).numpy().reshape(action.shape)
    mixed = time * noise + (1 - time) * action
    expected = (((3 * mixed - time - (noise - action)) ** 2).sum(2) * valid).sum(1)
    assert error.shape == (6,)
    np.testing.assert_allclose(error.numpy(), expected, rtol=2e-6)  # the tables are float32


def test_times_follow_beta():
    time = policy().time(torch.rand(200_000, generator=torch.Generator().manual_seed(0)).double())
    assert time.mean() == pytest.approx(0.999 * 0.6 + 0.001, abs=2e-3)  # Beta(1.5, 1): mean 3/5, variance 12/175
    assert time.var() == pytest.approx(12 / 175, rel=0.02)
    assert time.min() >= 0.001 and time.max() <= 1.0


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_sampling_a_straight_flow_is_exact(double, steps):
    """v = (x - a) / t is the flow to one action a: Euler reaches it in any number of steps, from any noise."""
    net, inputs = policy(num_steps=steps), some_inputs()
    goal, times = torch.randn(6, 5, 2), []

    def velocity(x, time, prefix):
        times.append(float(time[0]))
        return (x - goal) / time[:, None, None]

    net.expert.forward = velocity
    draws = some_draws(6, net)[:, 1:]
    assert (net.sample(inputs, draws) - goal).abs().max() < 1e-12
    assert times == pytest.approx([i / steps for i in range(steps, 0, -1)])


def test_sampling_starts_from_the_noise_of_the_draws():
    net, inputs, draws = started(shake=False)
    draws = draws[:, 1:]
    assert torch.equal(net.sample(inputs, draws), net.noise(draws).view(6, 5, 2))  # it is silent yet
    assert net.sample(inputs, draws).requires_grad is False


def test_the_prefix_is_computed_once():
    net, calls = policy(), []
    net.trunk[0].register_forward_hook(lambda *_: calls.append("trunk"))
    for block in net.expert.blocks:
        block.cross.kv.register_forward_hook(lambda *_: calls.append("memory"))
    net.sample(some_inputs())
    assert sorted(calls) == ["memory", "memory", "trunk"]


def test_the_time_and_each_input_matter():
    """The velocity depends on both."""
    net, inputs, draws = started(environment=3)
    inputs["observation.environment_state"] = torch.randn(6, 3)
    error = net(inputs, draws)["error"]
    for name, changed in {
        "observation.environment_state": inputs["observation.environment_state"] + 1,
        TOP: inputs[TOP].flip(3),
        "observation.state": inputs["observation.state"] + 1,
        "words": inputs["words"].roll(1, 0),
    }.items():
        assert ((net(inputs | {name: changed}, draws)["error"] - error).abs() > 1e-4).all(), name
    prefix = net.prefix(inputs)
    x = torch.randn(6, 5, 2)
    early, late = (net.expert(x, torch.full((6,), t), prefix) for t in (0.3, 0.8))
    assert ((early - late).abs().amax((1, 2)) > 1e-3).all()


def test_the_order_of_words_and_of_cameras_matters():
    net, inputs, draws = started(cameras=(TOP, "b"))
    error = net(inputs, draws)["error"]
    swapped = net(inputs | {TOP: inputs["b"], "b": inputs[TOP]}, draws)["error"]
    assert (swapped - error).abs().min() > 1e-5
    backwards = inputs | {"words": torch.cat([inputs["words"][:, :5].flip(1), inputs["words"][:, 5:]], 1)}
    assert (net(backwards, draws)["error"] - error)[0].abs() > 1e-5


# Masks and batches


def test_padded_steps_have_no_influence(double):
    """Neither on the error nor, through the attention over the chunk, on the steps before them."""
    net, inputs, draws = started()
    pad = inputs["action_is_pad"]
    error = net(inputs, draws)["error"]
    other = inputs | {"action": torch.where(pad[:, :, None], torch.randn(6, 5, 2) * 100, inputs["action"])}
    assert pad.any(1).sum() == 5 and (net(other, draws)["error"] - error).abs().max() < 1e-12
    real = inputs | {"action": torch.where(pad[:, :, None], inputs["action"], inputs["action"] + 1)}
    assert (net(real, draws)["error"] - error).abs().min() > 1e-2


def test_padded_words_have_no_influence(double):
    """Not even their number: neither on the trunk nor on the expert."""
    net, inputs = shaken(policy()), some_inputs()
    with torch.no_grad():
        net.words.weight[0] = 7.0  # a padded word may say anything
    draws = some_draws(6, net)
    error = net(inputs, draws)["error"]
    longer = inputs | {"words": torch.nn.functional.pad(inputs["words"], (0, 6))}
    assert (net(longer, draws)["error"] - error).abs().max() < 1e-12
    assert (net.sample(longer) - net.sample(inputs)).abs().max() < 1e-12


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_sample_does_not_depend_on_the_others(double, checkpointing):
    net, inputs, draws = started(gradient_checkpointing=checkpointing)
    together, sampled = net(inputs, draws)["error"], net.sample(inputs, draws[:, 1:])
    for i in range(6):
        one = {name: value[i : i + 1] for name, value in inputs.items()}
        assert (net(one, draws[i : i + 1])["error"] - together[i]).abs().max() < 1e-12
        assert (net.sample(one, draws[i : i + 1, 1:]) - sampled[i]).abs().max() < 1e-12


def test_checkpointing_gives_the_same_gradient(double):
    plain, thrifty = shaken(policy()), shaken(policy(gradient_checkpointing=True))
    inputs = some_inputs()
    kept = [0, 0]

    def count(index):
        def pack(tensor):
            kept[index] += tensor.numel()
            return tensor

        return pack

    for index, net in enumerate((plain, thrifty)):
        with torch.autograd.graph.saved_tensors_hooks(count(index), lambda tensor: tensor):
            net(inputs, some_draws(6, net))["error"].sum().backward()
    for a, b in zip(plain.parameters(), thrifty.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-12 * a.grad.abs().max()
    assert kept[1] < 0.7 * kept[0]


def test_dropout_is_off_in_evaluation_and_on_in_training():
    net, inputs, draws = started(dropout=0.5)
    assert not torch.equal(net(inputs, draws)["error"], net(inputs, draws)["error"])
    net.eval()
    assert torch.equal(net(inputs, draws)["error"], net(inputs, draws)["error"])


# Pictures


def test_pictures_of_another_shape_are_fitted_in():
    picture = torch.full((2, 3, 20, 40), 0.5)
    small = fit(picture, 16)
    assert small.shape == (2, 3, 16, 16)
    assert ((small[:, :, 4:12] - 0.5).abs() < 1e-6).all()
    assert (small[:, :, :4] == -1).all() and (small[:, :, 12:] == -1).all()
    assert fit(small, 16) is small
    tall = fit(picture.transpose(2, 3), 16)
    assert torch.allclose(tall, small.transpose(2, 3))
    net = policy()
    assert net.sample(some_inputs(size=48)).shape == (6, 5, 2)


def test_places_are_told_apart():
    """Row-major, and one linear map reads row and column off."""
    codes = grid_positions(8, 64).double()
    assert codes.shape == (64, 64) and torch.cdist(codes, codes)[~torch.eye(64, dtype=torch.bool)].min() > 1
    place = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"), 2).flatten(0, 1).double()
    centred = place - place.mean(0)
    # Ridge: the codes of 64 places span far fewer dimensions, and what lstsq makes of that is chance.
    solution = torch.linalg.solve(codes.T @ codes + 1e-6 * torch.eye(64).double(), codes.T @ centred)
    assert (codes @ solution - centred).abs().max() < 0.05
    rows = codes[:, :32].view(8, 8, 32)
    assert torch.equal(rows[:, 0], rows[:, 7]) and not torch.equal(rows[0, 0], rows[1, 0])


# Learning


@pytest.mark.slow
def test_it_learns_to_repeat_what_it_was_shown():
    """Six demonstrations by heart: driven by the policy, their worlds end as their commands say. (On new worlds it
    takes many more demonstrations, and minutes.)"""
    seeds = np.arange(6)
    episodes = list(trials.demonstrate(discs.Discs(seeds), seeds, 0.1))
    frames = {name: np.concatenate([e.features[name] for e in episodes]) for name in (discs.STATE, TOP, discs.ACTION)}
    words = np.concatenate([[hash_words(e.command, 9, 512)] * len(e.features[discs.ACTION]) for e in episodes])
    net = policy(chunk_size=1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.9, 0.95))

    def normalised(state, image, words):
        picture = torch.as_tensor(image) / 127.5 - 1
        return {discs.STATE: torch.as_tensor(state) / 0.5, TOP: picture, "words": torch.as_tensor(words)}

    def drive(seen, commands):
        said = np.array([hash_words(command, 9, 512) for command in commands])
        return net.sample(normalised(seen[discs.STATE], seen[TOP], said)).numpy() * 0.5

    assert trials.roll_out(drive, discs.Discs(seeds), 1)[0].mean() < 0.1
    for step in range(250):
        at = torch.randint(len(words), (32,), generator=torch.Generator().manual_seed(step)).numpy()
        batch = normalised(frames[discs.STATE][at], frames[TOP][at], words[at])
        batch |= {"action": torch.as_tensor(frames[discs.ACTION][at])[:, None] / 0.5}
        batch |= {"action_is_pad": torch.zeros(32, 1, dtype=torch.bool)}
        optimizer.zero_grad()
        net(batch, some_draws(32, net, step))["error"].mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    success = trials.roll_out(drive, discs.Discs(seeds), 1)[0].mean()
    assert success > 0.4, success  # by luck: 0, above
