"""Real-time chunking: actions that are given in training and in late trials, counted, drawn, kept and obeyed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import succeed
from refusals import refused
from robot_tasks import DISCS, seeded, task_of
from tiny_vla import policy, some_draws, some_inputs

from engine.contract import sample_seeds, uniform
from models.vla import VLA, VLASettings
from tasks.envs.discs import HORIZON, Discs
from tasks.envs.trials import roll_out


def delays_of(draws, pads, most):
    """By the text: uniform in 0 .. most, and at least one step is left to learn."""
    valid = (~pads).sum(1).tolist()
    return [min(int(draw * (most + 1)), count - 1) for draw, count in zip(draws[:, -1].tolist(), valid, strict=True)]


def test_given_actions_enter_clean_and_carry_no_loss(double):
    """Against the formulas, in NumPy, with a velocity field that is known: v(x, t) = 3 x - t, t of each step."""
    net, inputs, seen = policy(rtc_max_delay=3), some_inputs(), []

    def velocity(x, time, prefix):
        seen.append((x, time))
        return 3 * x - time[:, :, None]

    net.expert.forward = velocity
    draws = some_draws(6, net)
    assert draws.shape == (6, 1 + 5 * 2 + 1)
    out = net(inputs, draws)
    delays = delays_of(draws, inputs["action_is_pad"], 3)
    assert len(set(delays)) > 2
    action, (mixed, times) = inputs["action"].numpy(), (part.numpy() for part in seen[0])
    at = (np.floor(draws.numpy().astype(np.float64) * 2**16) + 0.5) / 2**16
    time = 0.999 * at[:, 0] ** (1 / 1.5) + 0.001
    noise = torch.special.ndtri(torch.tensor(at[:, 1:-1])).numpy().reshape(action.shape)
    for n, delay in enumerate(delays):
        expected, count = 0.0, 0
        for step in range(5):
            if step < delay:
                assert times[n, step] == 0 and np.array_equal(mixed[n, step], action[n, step])
            elif not inputs["action_is_pad"][n, step]:
                x = time[n] * noise[n, step] + (1 - time[n]) * action[n, step]
                expected += ((3 * x - time[n] - (noise[n, step] - action[n, step])) ** 2).sum()
                count += 1
        assert int(out["weight"][n]) == 2 * count >= 2
        assert float(out["error"][n]) == pytest.approx(expected, rel=2e-6)


def test_delays_are_uniform_and_a_matter_of_the_samples_own_seed():
    net, count = policy(rtc_max_delay=3), 4000
    draws = uniform(sample_seeds(0, 0, torch.arange(count)), net.num_draws)
    delays = np.array(delays_of(draws, torch.zeros(count, 5, dtype=torch.bool), 3))
    assert (np.bincount(delays) / count == pytest.approx(0.25, abs=0.03)) and len(np.bincount(delays)) == 4
    assert policy().num_draws == net.num_draws - 1, "nothing is drawn where it is off"


def test_off_is_what_it_was(double):
    """The same weights, the same draws: no delay, and a network that knows of none, err alike."""
    plain, able, inputs = policy(), policy(rtc_max_delay=3), some_inputs()
    able.load_state_dict(plain.state_dict())
    draws = some_draws(6, plain)
    never = torch.cat([draws, torch.zeros(6, 1)], 1)
    torch.testing.assert_close(able(inputs, never)["error"], plain(inputs, draws)["error"], rtol=1e-12, atol=0)
    assert "weight" not in plain(inputs, draws)
    torch.testing.assert_close(able.sample(inputs, draws[:, 1:], torch.zeros(6, 0, 2)),
                               plain.sample(inputs, draws[:, 1:]), rtol=1e-9, atol=1e-12)  # fmt: skip


def test_the_loss_is_a_mean_over_the_steps_that_carry_it(own_recordings, double):
    """However the batch is cut: two sums; the quotient is the mean over all steps and dimensions that are not given."""
    task, train, _ = task_of(*DISCS, "policy.rtc_max_delay=3")
    policy = task.model().double()
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)

    def batch_of(indices):
        info = seeded(20)
        rows = {name: getattr(info, name)[indices] for name in ("index", "position", "seed")}
        return train.__getitems__(indices.tolist()) | {"lockstep": type(info)(**rows)}

    whole, cut = torch.arange(20), torch.tensor([3, 4, 13])
    one = task.loss(policy, batch_of(whole))
    parts = [task.loss(policy, batch_of(part)) for part in torch.tensor_split(whole, cut)]
    assert sum(int(part.weight) for part in parts) == int(one.weight)
    assert sum(part.total.item() for part in parts) == pytest.approx(one.total.item(), rel=1e-12)
    out = policy(task._with_words(batch_of(whole)), uniform(seeded(20).seed, policy.net.num_draws))
    valid = int((~batch_of(whole)["action_is_pad"]).sum())
    assert int(out["weight"].sum()) == int(one.weight) < 2 * valid
    assert (one.total / one.weight).item() == pytest.approx(float(out["error"].detach().sum() / out["weight"].sum()))
    scored = task.score(policy, batch_of(whole))
    told = task.report(scored | {"kl": torch.zeros(())})
    assert float(scored["weight"]) < float(scored["numbers"]) == valid * 2
    assert told["loss"] == pytest.approx(float(scored["error"]) / float(scored["weight"]))


@pytest.mark.parametrize("given", [0, 1, 3])
def test_sampling_keeps_what_is_given_and_reaches_the_rest(double, given):
    """v = (x - a) / t is the flow to one action a; of what is given the time is 0, and nothing moves."""
    net, inputs, times = policy(num_steps=4, rtc_max_delay=3), some_inputs(), []
    goal, committed = torch.randn(6, 5, 2), torch.randn(6, given, 2)

    def velocity(x, time, prefix):
        times.append(time.clone())
        assert torch.equal(x[:, :given], committed)
        return (x - goal) / time[:, :, None].clamp(min=1e-3)

    net.expert.forward = velocity
    found = net.sample(inputs, some_draws(6, net)[:, 1:-1], committed)
    assert torch.equal(found[:, :given], committed) and (found[:, given:] - goal[:, given:]).abs().max() < 1e-12
    assert all((time[:, :given] == 0).all() and (time[:, given:] == time[0, -1]).all() for time in times)
    assert [float(time[0, -1]) for time in times] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.slow
def test_one_of_two_ways_is_kept_to():
    """A chunk goes left or right, by chance. Given its beginning, a policy goes on the same way; ignorant of it, it
    takes either, which is a jump for a robot that executes the beginning."""
    torch.manual_seed(0)
    small = VLASettings("test", width=32, depth=1, expert_width=32, expert_depth=2, head_width=16, vocabulary=8)
    net = VLA(replace(small, chunk_size=4, num_words=1, rtc_max_delay=2), 0, 0, 1, ())
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, betas=(0.9, 0.95))
    inputs = {"words": torch.ones(64, 1).long(), "action_is_pad": torch.zeros(64, 4, dtype=torch.bool)}
    for step in range(100):
        way = uniform(sample_seeds(1, step, torch.arange(64)), 1)[:, :, None].round() * 2 - 1
        optimizer.zero_grad()
        net(inputs | {"action": way.expand(64, 4, 1)}, some_draws(64, net, step))["error"].mean().backward()
        optimizer.step()
    way = torch.ones(200, 1, 1)
    way[::2] = -1
    seen, draws = {"words": torch.ones(200, 1).long()}, uniform(sample_seeds(9, 0, torch.arange(200)), 4)
    told, ignorant = net.sample(seen, draws, way.expand(200, 2, 1)), net.sample(seen, draws)
    assert torch.equal(told[:, :2], way.expand(200, 2, 1))
    kept, jumped = ((found[:, 2:].sign() == way).double().mean().item() for found in (told, ignorant))
    assert kept > 0.97 and 0.35 < jumped < 0.65, (kept, jumped)


# ---- late trials ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "delay"), [(3, 1), (3, 3), (4, 2), (3, 0)])
def test_a_late_rollout_executes_what_a_robot_would(monkeypatch, steps, delay):
    """Against a robot with a queue: a look is answered `delay` steps later, what the answer has for these is lost."""
    told, given = [], []
    monkeypatch.setattr("tasks.envs.discs.Discs.step", lambda self, actions: told.append(actions.copy()))

    def chunk(look):
        return np.random.default_rng(look).uniform(-1, 1, (2, 7, 2))

    def drive(observations, commands, committed=None):
        given.append(committed)
        return chunk(len(given))

    roll_out(drive, Discs(np.arange(2)), steps, delay=delay)
    queue, expected, looks, waiting = [], [], 0, {}
    for now in range(HORIZON):
        if now % steps == 0:  # it looks; at the start the world waits
            looks += 1
            waiting[now + (delay if now else 0)] = looks, now
        if now in waiting:
            look, asked = waiting.pop(now)
            queue = list(np.moveaxis(chunk(look), 1, 0))[now - asked :]
        expected.append(queue.pop(0))
    assert np.array_equal(told, expected) and len(given) == -(-HORIZON // steps)
    assert given[0] is None
    for look in range(1, len(given)):
        if delay:
            executed = expected[look * steps : look * steps + delay]  # fewer at the end
            assert np.array_equal(np.moveaxis(given[look], 1, 0)[: len(executed)], executed)
        else:
            assert given[look] is None


@pytest.mark.parametrize(("most", "late", "told"), [(2, 2, True), (3, 1, True), (1, 2, False), (0, 1, False)])
def test_late_trials_tell_a_policy_that_has_learned_it(own_recordings, most, late, told):
    """In recorded units; a policy that has not learned from given actions gets none, and is late all the same."""
    task, *_ = task_of(*DISCS, f"policy.rtc_max_delay={most}", "policy.n_action_steps=3", f"eval.delay={late}")
    model, given, chunks = task.model(), [], []
    act = model.act

    def spied(batch, draws, *committed):
        given.extend(committed)
        chunks.append(act(batch, draws, *committed))
        return chunks[-1]

    model.act = spied
    task.trials(model, range(3), lambda: False)
    assert len(given) == (len(chunks) - 1) * told
    if told:  # what remains of the chunk before
        torch.testing.assert_close(given[0], chunks[0][:, 3 : 3 + late].float())
        torch.testing.assert_close(chunks[1][:, :late], given[0], rtol=1e-5, atol=1e-6)
    how = "given" if told else "ignorant of"
    assert f"4 in the simulation discs, {late} step{'s' * (late > 1)} late, {how} what is executed" in task.summary()


BLENDED = "policy.type=act policy.dim_model=16 policy.n_heads=2 policy.temporal_ensemble_coeff=0.1"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("eval.delay=2 policy.n_action_steps=4", "4 of 5 predicted actions are executed, and 2 more would be"),
        ("eval.delay=3 policy.n_action_steps=2", ["2 of 5", "3 more", "give at most n_action_steps"]),
        (f"{BLENDED} policy.n_action_steps=1 eval.delay=1", "blended chunks are"),
        ("policy.rtc_max_delay=5", "rtc_max_delay 5 must be below chunk_size 5"),
    ],
)
def test_what_cannot_be_late_is_refused(own_recordings, words, says):
    refused(says, lambda: task_of(*DISCS, *words.split()))


@pytest.mark.slow
def test_the_same_bits_on_one_and_on_two_processes(launch, tmp_path):
    words = [*DISCS, "policy.rtc_max_delay=3", "policy.n_action_steps=2", "eval.delay=2", "steps=6", "batch_size=8"]
    words += ["virtual_workers=2", "device=cpu", "threads=1"]
    ended = []
    for n in (1, 2):
        start = ["train.py", *words, f"save_dir={tmp_path / str(n)}"]
        done = succeed(launch.torchrun(n, *start) if n > 1 else launch.python(*start))
        ended.append([line for line in done.out.splitlines() if "sha256" in line or "Val Loss" in line])
        assert "the loss adds up" in done.out and len(ended[-1]) > 1
    assert ended[0] == ended[1]
