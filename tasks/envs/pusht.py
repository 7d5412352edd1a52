"""PushT (Chi et al., RSS 2023): push a T-shaped block onto its outline with a round finger.

The physics are gym-pusht's. The names of features are the names in lerobot/pusht and
lerobot/pusht_keypoints, so that policies trained on these human demonstrations can be tried here.
Lengths are the simulation's: the table is 512 wide.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from engine.contract import LockstepError

STATE, KEYPOINTS, CAMERA, ACTION = (
    "observation.state",
    "observation.environment_state",
    "observation.image",
    "action",
)
COMMAND = "push the T onto its outline"
GOAL = np.array([256.0, 256.0, np.pi / 4])  # x, y and angle of the block
DT = 0.01  # seconds between two steps of the physics, ten to an action
# In the block's frame: the ends of the bar and of the stem, and the middle of each.
OUTLINE = np.array([[-60.0, 15.0], [0.0, 15.0], [60.0, 15.0], [0.0, 60.0], [0.0, 120.0]])


class PushT:
    """n tables, each a pure function of its seed and its actions.

    seeds     (n,) integers
    size      H = W of the pictures, in pixels
    pictures  whether `observe` returns pictures, the largest part of a step's cost

    Success means that 95 % of the outline is covered, and ends a trial.
    """

    fps, horizon, patience, linger, unit = 10, 300, 120, 0, 256.0

    def __init__(self, seeds: np.ndarray, size: int = 96, pictures: bool = True):
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        try:
            from gym_pusht.envs.pusht import PushTEnv
        except ImportError:
            todo = "pip install gym-pusht==0.1.8, or give env.type=none"
            raise LockstepError(
                "PushT needs the gym-pusht package", "env.type=pusht", todo
            ) from None
        self.size, self.pictures = size, pictures
        kind = "environment_state_agent_pos"
        self.tables = [
            PushTEnv(kind, observation_width=size, observation_height=size) for _ in seeds
        ]
        for table, seed in zip(self.tables, seeds, strict=True):
            table.reset(seed=int(seed) % 2**32)
        self.commands = [COMMAND] * len(seeds)
        self.success = np.zeros(len(seeds), bool)
        self.reward = np.zeros(len(seeds))
        """(n,) the largest covered share of the outline so far, divided by the share for
        success."""
        self._planners = [Planner(int(seed) % 2**32) for seed in seeds]

    @property
    def features(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        numbers = {
            STATE: ("float32", (2,)),
            KEYPOINTS: ("float32", (16,)),
            ACTION: ("float32", (2,)),
        }
        return numbers | ({CAMERA: ("image", (3, self.size, self.size))} if self.pictures else {})

    def observe(self) -> dict[str, np.ndarray]:
        """Return the observations.

        "observation.state" (n, 2) float32 is the finger's position. "observation.environment_state"
        (n, 16) float32 has x and y of the block's eight corners. "observation.image" is (n, 3, H,
        W) uint8.
        """
        seen = [table.get_obs() for table in self.tables]
        found = {
            STATE: np.array([one["agent_pos"] for one in seen], np.float32),
            KEYPOINTS: np.array([one["environment_state"] for one in seen], np.float32),
        }
        return found | ({CAMERA: self.render()} if self.pictures else {})

    def render(self, which: slice = slice(None)) -> np.ndarray:
        """Return the pictures (n, 3, H, W) uint8."""
        # The environment's public render has another size.
        pictures = [table._render() for table in self.tables[which]]
        return np.stack(pictures).transpose(0, 3, 1, 2)

    def expert(self) -> np.ndarray:
        """Return (n, 2) actions, targets of the finger; see Planner."""
        actions = np.zeros((len(self.tables), 2))
        for i in np.flatnonzero(~self.success):
            table = self.tables[i]
            state = np.array([*table.agent.position, *table.block.position, table.block.angle])
            actions[i] = self._planners[i].next(state, np.array(table.agent.velocity))
        return actions

    def step(self, actions: np.ndarray) -> None:
        """Advance one step. A spring pulls the finger to the actions (n, 2), which are targets."""
        for i in np.flatnonzero(~self.success):
            _, reward, _, _, info = self.tables[i].step(
                np.clip(actions[i], 0.0, 512.0).astype(np.float64)
            )
            self.success[i], self.reward[i] = info["is_success"], max(self.reward[i], reward)


class Planner:
    """Plans by simulation: choose the sequence of way-points with the best final pose of the block.

    Each of many sequences runs in a copy of the physics. Some sequences are random walks, some push
    from outside through a point of the block, some are small changes of the last plan. The best few
    sequences are then changed slightly (the cross-entropy method, de Boer et al. 2005). The planner
    plans 1.5 s ahead and keeps the first 0.3 s.
    """

    tries, points, hold = 96, 5, 3  # hold: actions (0.1 s each) per way-point

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.box: Any = None
        self.plan = np.zeros((0, 2))
        self.age = 0

    def next(self, state: np.ndarray, velocity: np.ndarray) -> np.ndarray:
        """Return the current way-point (2,).

        state  (5,): x and y of the finger, x, y and angle of the block
        """
        if self.age % self.hold == 0:
            self.plan = self._search(state, velocity)
        self.age += 1
        return self.plan[0]

    def _search(self, state: np.ndarray, velocity: np.ndarray) -> np.ndarray:
        self.box = self.box or Box()
        third = (self.tries // 3, self.points, 2)
        wander = state[:2] + np.cumsum(self.rng.normal(0, 60, third), 1)
        aim = outline(state[2:])[self.rng.integers(len(OUTLINE), size=third[0])]
        angle = self.rng.uniform(0, 2 * np.pi, third[0])
        way = np.stack([np.cos(angle), np.sin(angle)], 1)
        start = aim - way * self.rng.uniform(40, 100, (third[0], 1))
        end = aim + way * self.rng.uniform(-30, 60, (third[0], 1))
        push = (
            start[:, None] + (end - start)[:, None] * np.array([0.0, 0.0, 0.4, 0.7, 1.0])[:, None]
        )
        plans = [wander, push, np.broadcast_to(state[:2], (1, *third[1:]))]
        if len(self.plan):
            last = np.concatenate([self.plan[1:], self.plan[-1:]])[None]
            plans += [last, last + self._changes(third, [2.0, 8.0, 25.0])]
        plans = [np.clip(np.concatenate(plans), 15, 497)]
        costs = [self._costs(state, velocity, plans[0])]
        best = plans[0][np.argsort(costs[0])[:6]]
        more = best[self.rng.integers(len(best), size=self.tries // 2)]
        plans.append(np.clip(more + self._changes(more.shape, [3.0, 10.0, 25.0]), 15, 497))
        costs.append(self._costs(state, velocity, plans[1]))
        return np.concatenate(plans)[np.concatenate(costs).argmin()]

    def _changes(self, shape: tuple[int, ...], sizes: list[float]) -> np.ndarray:
        return self.rng.normal(0, 1, shape) * self.rng.choice(sizes, (shape[0], 1, 1))

    def _costs(self, state: np.ndarray, velocity: np.ndarray, plans: np.ndarray) -> np.ndarray:
        """Return (n,) costs of plans (n, points, 2).

        The cost is the distance of the block's outline from the goal's: half at the end and half on
        the way, because sooner is better. A small term penalises a finger far from the block.
        """
        moves, finger = glide(state[:2], velocity, plans.repeat(self.hold, 1))
        # (n, points, 3)
        poses = np.array([self.box.run(state, steps, 10 * self.hold) for steps in moves.tolist()])
        off = np.linalg.norm(outline(poses) - outline(GOAL), axis=3).mean(2)  # (n, points)
        return (off[:, -1] + off.mean(1)) / 2 + 0.02 * np.linalg.norm(
            finger - poses[:, -1, :2], axis=1
        )


def outline(pose: np.ndarray) -> np.ndarray:
    """Convert poses (..., 3) of the block to positions (..., points, 2) of its OUTLINE."""
    cos, sin = np.cos(pose[..., 2, None]), np.sin(pose[..., 2, None])
    x, y = OUTLINE.T
    return np.stack(
        [pose[..., 0, None] + cos * x - sin * y, pose[..., 1, None] + sin * x + cos * y], -1
    )


def glide(
    place: np.ndarray, velocity: np.ndarray, actions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the finger's velocities (n, 10 T, 2) and last position (n, 2) for actions (n, T, 2).

    Nothing can stop the finger, so no physics is needed; the spring is gym-pusht's.
    """
    place, velocity = (np.repeat(value[None], len(actions), 0) for value in (place, velocity))
    moves = []
    for now in range(10 * actions.shape[1]):
        velocity = velocity + (100 * (actions[:, now // 10] - place) - 20 * velocity) * DT
        place = place + velocity * DT
        moves.append(velocity)
    return np.stack(moves, 1), place


class Box:
    """gym-pusht's table for the simulation of plans, without pictures and callbacks."""

    def __init__(self) -> None:
        import pymunk
        from gym_pusht.envs.pusht import PushTEnv

        self.space = pymunk.Space()
        self.space.damping = 0.0
        corners = [(5, 5), (506, 5), (506, 506), (5, 506)]
        for a, b in zip(corners, corners[1:] + corners[:1], strict=True):
            self.space.add(PushTEnv.add_segment(self.space, a, b, 2))
        self.finger = PushTEnv.add_circle(self.space, (256, 400), 15)
        self.block, _ = PushTEnv.add_tee(self.space, (256, 300), 0)

    def run(
        self, state: np.ndarray, moves: list[list[float]], every: int
    ) -> list[tuple[float, float, float]]:
        """Return the block's x, y and angle after each `every` steps.

        moves  velocities of the finger by step
        """
        finger, block, space = self.finger, self.block, self.space
        finger.position = state[0], state[1]
        # Set the angle first: the block turns about its centre of mass, not about its position.
        block.angle = state[4]
        block.position = state[2], state[3]
        block.velocity, block.angular_velocity = (0.0, 0.0), 0.0
        space.reindex_shapes_for_body(finger)
        space.reindex_shapes_for_body(block)
        poses = []
        for now, move in enumerate(moves, 1):
            finger.velocity = move[0], move[1]
            space.step(DT)
            if now % every == 0:
                poses.append((block.position.x, block.position.y, block.angle))
        return poses
