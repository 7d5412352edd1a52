"""The discs: the same seeds the same bits, an expert that can do it, pictures that show what is there."""

import numpy as np
import pytest

from tasks.envs import trials
from tasks.envs.discs import (
    ACTION,
    CAMERA,
    COLOURS,
    COMMANDS,
    HORIZON,
    LINGER,
    RADIUS,
    REACH,
    SPEED,
    STATE,
    TOLERANCE,
    Discs,
)
from tasks.envs.trials import roll_out

MANY = np.arange(200)


def drive(worlds, steps=HORIZON):
    for _ in range(steps):
        worlds.step(worlds.expert())
    return worlds


def demonstrate(seeds, size=32, noise=0.05, command=None):
    return list(trials.demonstrate(Discs(seeds, size, command), seeds, noise))


def pixel(place, size):
    """Table units -> (row, column) of the pixel there."""
    column, row = np.floor((np.asarray(place) + 1) / 2 * size).astype(int)
    return row, column


def test_a_world_is_a_pure_function_of_its_seed():
    one, two, alone = Discs(MANY), Discs(MANY), Discs(MANY[7:8])
    for worlds in (one, two, alone):
        drive(worlds, 9)
    assert one.commands == two.commands and one.commands[7:8] == alone.commands
    for name in ("magnet", "discs", "held", "success"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
        assert np.array_equal(getattr(one, name)[7:8], getattr(alone, name))
    assert np.array_equal(one.observe()[CAMERA][7:8], alone.observe()[CAMERA])


def test_the_worlds_of_a_seed_are_pinned():
    """A recording and a rate of success mean the same worlds tomorrow."""
    worlds = Discs(np.array([0, -1, 2**63 - 1]))
    assert worlds.commands == [
        "bring the green disc to the centre",
        "bring the blue disc to the centre",
        "move to the red disc",
    ]
    np.testing.assert_allclose(
        worlds.magnet,
        [[-0.186115913, 0.795535897], [-0.542696939, 0.050508092], [-0.030536613, -0.697555820]],
        atol=1e-9,
    )


def test_seeds_differ_and_each_command_is_asked_for():
    worlds = Discs(MANY)
    assert len(np.unique(worlds.magnet, axis=0)) == len(MANY)
    counts = {command: worlds.commands.count(command) for command in worlds.commands}
    assert len(counts) == 2 * len(COLOURS) and min(counts.values()) > 20
    assert worlds.commands == [
        f"bring the {colour} disc to the centre" if bring else f"move to the {colour} disc"
        for bring, colour in zip(worlds.bring, np.array(list(COLOURS))[worlds.target], strict=True)
    ]


def test_the_expert_obeys_both_verbs():
    worlds = drive(Discs(np.arange(500)))
    assert worlds.success[worlds.bring].mean() > 0.99 and worlds.success[~worlds.bring].mean() > 0.99
    goal = worlds.discs[np.arange(500), worlds.target]
    assert (np.hypot(*(worlds.magnet - goal).T) < 1e-9).all()
    assert (np.hypot(*goal[worlds.bring].T) < TOLERANCE).all()


def test_doing_nothing_or_anything_does_not_succeed():
    for action in (None, np.zeros(2), np.ones(2), np.array([-1.0, 1.0])):
        worlds = Discs(MANY)
        assert not worlds.success.any()
        for _ in range(HORIZON):
            worlds.step(worlds.magnet if action is None else np.broadcast_to(action, (200, 2)))
        assert worlds.success.mean() < 0.15
        assert action is not None or not worlds.success.any()


def test_the_wrong_disc_is_a_failure_for_good():
    worlds = Discs(MANY)
    worlds.target = (worlds.target + 1) % len(COLOURS)
    drive(worlds)
    asked = worlds.success
    worlds.target = (worlds.target - 1) % len(COLOURS)
    drive(worlds)
    assert asked.mean() > 0.5  # in straight lines that were not cleared for this disc
    assert not (worlds.success & ~asked & (worlds.held != worlds.target)).any()
    assert (worlds.held[asked] == (worlds.target[asked] + 1) % len(COLOURS)).all(), "it clings for good"
    lost = worlds.held != worlds.target
    goal = worlds.discs[np.arange(200), worlds.target]
    assert np.array_equal(worlds.expert()[lost], goal[lost]), "and the expert brings no other"


def test_bringing_is_more_than_touching():
    worlds = Discs(MANY)
    goal = worlds.discs[np.arange(200), worlds.target].copy()
    for _ in range(HORIZON):
        worlds.step(goal)
    assert (worlds.success == ~worlds.bring).all() and (worlds.held == worlds.target).all()


def test_the_magnet_has_a_speed_and_stays_on_the_table():
    worlds = Discs(MANY)
    before = worlds.magnet
    worlds.step(np.full((200, 2), 9.0))
    way = worlds.magnet - before
    assert np.hypot(*way.T).max() <= SPEED + 1e-12
    aim = 1.0 - before
    assert np.abs(aim[:, 0] * way[:, 1] - aim[:, 1] * way[:, 0]).max() < 1e-12  # straight on
    for _ in range(HORIZON):
        worlds.step(np.full((200, 2), 9.0))
    assert np.abs(worlds.magnet - 1).max() < 1e-12
    near = worlds.magnet - 0.01
    worlds.step(near)
    assert np.abs(worlds.magnet - near).max() < 1e-12  # a place within reach is reached


def test_the_disc_goes_with_the_magnet_and_the_others_stay():
    worlds = Discs(MANY)
    start = worlds.discs
    drive(worlds)
    held = np.arange(len(COLOURS)) == worlds.target[:, None]
    assert np.array_equal(worlds.discs[~held], start[~held])
    assert np.array_equal(worlds.discs[held], worlds.magnet)


@pytest.mark.parametrize("size", [32, 64])
def test_the_picture_shows_the_discs_where_they_are(size):
    worlds = Discs(MANY[:100], size)
    seen = worlds.observe()
    assert seen[STATE].shape == (100, 2) and seen[CAMERA].shape == (100, 3, size, size)
    image = seen[CAMERA].astype(float)
    for world in range(100):
        for number, colour in enumerate(COLOURS.values()):
            row, column = pixel(worlds.discs[world, number], size)
            assert np.array_equal(image[world, :, row, column], colour)
        row, column = pixel(worlds.magnet[world], size)
        assert image[world, :, row, column].max() < 120  # dark, if smoothed
        assert np.ptp(image[world, :, 0, 0]) < 20  # the table is no disc's colour


def test_the_pictures_centre_of_mass_is_exact():
    """Anti-aliased: a disc is found to a fraction of a pixel, and its area is right."""
    worlds = Discs(MANY[:50], 64)
    worlds.discs[:, 1:] = 5.0  # only the first is in sight, and neither mark nor magnet lies on it
    worlds.magnet[:] = -5.0
    background = worlds.render().astype(float)[:, 2]
    colour, table = 49.0, 211.0  # blue of the red disc and of the table
    cover = np.where(np.hypot(*np.moveaxis(grid(64) - worlds.discs[:, None, None, 0], 3, 0)) < RADIUS + 0.1, 1, 0)
    weight = (table - background) / (table - colour) * cover
    centre = (weight[..., None] * grid(64)).sum((1, 2)) / weight.sum((1, 2))[:, None]
    assert np.abs(centre - worlds.discs[:, 0]).max() < 0.01  # a third of a pixel is 0.01
    assert weight.sum((1, 2)) * (2 / 64) ** 2 == pytest.approx(np.pi * RADIUS**2, rel=0.03)


def grid(size):
    """(size, size, 2): x and y of each pixel's middle, in table units."""
    middles = (np.arange(size) + 0.5) / size * 2 - 1
    return np.stack(np.meshgrid(middles, middles), 2)


def test_demonstrations_show_the_expert_and_its_recovery():
    episodes, again = demonstrate(MANY[:60], 32, 0.1), demonstrate(MANY[:60], 32, 0.1)
    assert len(episodes) >= 59
    for one, two in zip(episodes, again, strict=True):
        assert one.command == two.command
        assert all(np.array_equal(one.features[name], two.features[name]) for name in one.features)
        steps = len(one.features[ACTION])
        shapes = {name: track.shape for name, track in one.features.items()}
        assert shapes == {STATE: (steps, 2), CAMERA: (steps, 3, 32, 32), ACTION: (steps, 2)}
        assert {track.dtype for track in one.features.values()} == {np.dtype("float32"), np.dtype("uint8")}
        assert 2 + LINGER <= steps <= HORIZON
    assert np.array_equal(demonstrate(MANY[20:30], 32, 0.1)[3].features[CAMERA], episodes[23].features[CAMERA])
    # Noise moves the magnet and not the recorded wish: until it holds something, a place on the way to the disc.
    worlds, checked = Discs(MANY[:60], 32), 0
    kept = [n for n, command in enumerate(worlds.commands) if len(episodes) == 60 or command == episodes[n].command]
    for n, episode in zip(kept, episodes, strict=True):
        goal = worlds.discs[n, worlds.target[n]]
        for place, wish in zip(episode.features[STATE], episode.features[ACTION], strict=True):
            way = goal - place
            if np.hypot(*way) < RADIUS:
                break
            expected = place + way * min(1.0, REACH / np.hypot(*way))
            assert np.allclose(wish, expected, atol=1e-5)
            checked += 1
    assert checked > 100
    quiet = demonstrate(MANY[:60], 32, 0.0)
    assert all(not np.array_equal(a.features[STATE], b.features[STATE]) for a, b in zip(episodes, quiet, strict=False))
    frames = [sum(len(e.features[ACTION]) for e in demos) for demos in (quiet, episodes)]
    assert frames[0] <= frames[1]


def test_a_demonstration_ends_shortly_after_success():
    for episode, seed in zip(demonstrate(MANY[:20], 32, 0.0), MANY[:20], strict=True):
        worlds = Discs(np.array([seed]), 32)
        for step, action in enumerate(episode.features[ACTION]):
            assert np.array_equal(worlds.observe()[STATE][0], episode.features[STATE][step])
            assert np.array_equal(worlds.observe()[CAMERA][0], episode.features[CAMERA][step])
            assert np.array_equal(worlds.expert()[0].astype(np.float32), action)
            assert worlds.success[0] == (step >= len(episode.features[ACTION]) - LINGER)
            worlds.step(worlds.expert())
        assert worlds.success[0] and worlds.commands == [episode.command]


def test_a_rollout_executes_what_the_policy_says():
    """The first steps of each chunk and no others, in table units, on the worlds of the seeds."""
    seen = []

    def policy(observations, commands):
        seen.append((observations, commands))
        chunk = np.random.default_rng(len(seen)).uniform(-1, 1, (20, 7, 2))
        chunk[:, 3:] = np.nan  # what lies beyond is never used
        return chunk

    success, (film,) = roll_out(policy, Discs(MANY[:20]), chunk_steps=3)
    worlds = Discs(MANY[:20], 32)
    for now in range(HORIZON):
        if now % 3 == 0:
            observations, commands = seen[now // 3]
            assert commands == worlds.commands
            assert np.array_equal(observations[STATE], worlds.observe()[STATE])
            assert np.array_equal(observations[CAMERA], worlds.observe()[CAMERA])
            chunk = np.random.default_rng(now // 3 + 1).uniform(-1, 1, (20, 7, 2))
        assert now >= len(film) or np.array_equal(film[now], worlds.observe()[CAMERA][0])
        worlds.step(chunk[:, now % 3])
    assert len(seen) == -(-HORIZON // 3) and np.array_equal(success, worlds.success)
    assert film.dtype == np.uint8 and (success[0] or len(film) == HORIZON)


def test_an_expert_policy_succeeds_in_a_rollout():
    """A policy that does what the expert does succeeds as the expert does: the interface loses nothing."""
    twin = Discs(MANY[:40])

    def policy(observations, commands):
        assert np.array_equal(observations[STATE], twin.observe()[STATE])
        action = twin.expert()
        twin.step(action)
        return action[:, None]

    success, (film,) = roll_out(policy, Discs(MANY[:40]), chunk_steps=1)
    assert success.all()
    episode = demonstrate(MANY[:1], noise=0.0)[0]
    assert np.array_equal(film, episode.features[CAMERA]), "it ends as a recording does"


def test_a_chunk_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="a chunk of 2 actions"):
        roll_out(lambda seen, commands: np.zeros((3, 2, 2)), Discs(MANY[:3]), chunk_steps=3)


def test_one_command_alone():
    """The same worlds but for what is asked; a demonstration obeys it."""
    worlds = Discs(MANY[:40], 32, "bring the blue disc to the centre")
    assert set(worlds.commands) == {"bring the blue disc to the centre"} and worlds.bring.all()
    assert (worlds.target == 2).all() and set(Discs(MANY[:40]).commands) == set(COMMANDS)
    assert {episode.command for episode in demonstrate(MANY[:5], command=COMMANDS[1])} == {COMMANDS[1]}
