"""Several LeRobot datasets in one training: which frames come how often and in which order, their joint statistics and
tasks, and that the steps are the same on any cut and after a kill.

The truth is what was recorded, NumPy over all of it end to end, and plain loops.
"""

import collections
import csv
import json
import os
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from conftest import launching, succeed
from lerobot_data import change_feature
from robot_tasks import parse, task_of
from runs import records, weights
from saved import assert_same, assert_same_bits, load
from test_the_idea import MANY, SMALL_ACT, distance

from data_loader import TrainSampler
from engine import config, plan
from engine.comm.world import World
from engine.contract import LockstepError
from formats.robots import lerobot, lerobot_mix
from formats.robots.frames import Frames
from formats.robots.lerobot_writer import Recorder

CAM, WRIST, STATE = "observation.images.top", "observation.images.wrist", "observation.state"
NUMBERS = {"action": 3, "observation.state": 3}
SETS = {  # frames of each episode, and its task
    "a": ([9, 4, 12], ["push", "pull", "push"]),
    "b": ([20, 15, 11, 17, 13], ["pull", "turn", "pull", "turn", "lift"]),
    "c": ([7, 6], ["turn", "push"]),
}
TINY = [*SMALL_ACT, "policy.chunk_size=5"]

pytestmark = pytest.mark.usefixtures("robot_caches")


def record(root, lengths, tasks, seed=0, fps=10, numbers=NUMBERS, cameras=(), size=(16, 24)):
    """Record random walks; return [{feature: (T, ...)} of each episode]."""
    rng, episodes = np.random.default_rng(seed), []
    features = {name: ("float32", (dim,)) for name, dim in numbers.items()}
    features |= dict.fromkeys(cameras, ("image", (3, *size)))
    with Recorder(root, fps, features) as recorder:
        for length, task in zip(lengths, tasks, strict=True):
            walks = {n: rng.normal(seed, 1 + seed, (length, dim)).astype(np.float32) for n, dim in numbers.items()}
            shots = {name: rng.integers(0, 256, (length, 3, *size), dtype=np.uint8) for name in cameras}
            episodes.append(walks | shots)
            recorder.add_episode(walks | shots, task)
    return episodes


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of the three sets, and {set: its episodes}."""
    folder = tmp_path_factory.mktemp("sets")
    return folder, {n: record(folder / n, *of, seed=k, cameras=[CAM]) for k, (n, of) in enumerate(SETS.items())}


def roots(folder, names="abc"):
    return f"dataset.root=[{','.join(str(folder / name) for name in names)}]"


# ---- what is typed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["repo_id", "root"])
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("me/x", "me/x"),
        ("[me/x,me/y]", ["me/x", "me/y"]),
        ("[me/x, me/y]", ["me/x", "me/y"]),
        ("['me/x','me/y']", ["me/x", "me/y"]),
        ('["me/x", "me/y"]', ["me/x", "me/y"]),
        ("me/x, y", "me/x, y"),
        ("", ""),
    ],
)
def test_one_set_is_a_text_and_several_are_a_list(tmp_path, key, typed, meant):
    cfg = parse("robot", f"--dataset.{key}={typed}", "--dataset.weights=[0.7, .3]", "--dataset.episodes=[0,x/y:2]")
    assert vars(cfg.dataset)[key] == meant and cfg.dataset.weights == [0.7, 0.3]
    assert cfg.dataset.episodes == [0, "x/y:2"]
    (tmp_path / "config.yaml").write_text(config.to_yaml(cfg))
    assert config.to_dict(parse("--config", str(tmp_path / "config.yaml"))) == config.to_dict(cfg)


def test_the_settings_of_one_set_are_written_as_they_were():
    lines = config.to_yaml(parse("robot", "dataset.root=x", "dataset.episodes=1,2")).splitlines()
    at = lines.index("dataset:")
    assert lines[at + 1 : at + 3] == ["  root: x", "  repo_id: ''"] and "  - 1" in lines


def test_sets_are_found_by_folder_by_id_and_below_one_root(made, tmp_path, monkeypatch):
    folder, _ = made
    a, b = folder / "a", folder / "b"
    monkeypatch.setenv("HF_LEROBOT_HOME", str(folder))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").symlink_to(folder / "c")
    for root, ids, found in (
        ([str(a), str(b)], "", {"a": a, "b": b}),
        (str(folder), ["a", "b"], {"a": a, "b": b}),
        ("", ["a", "b"], {"a": a, "b": b}),
        ([str(a), str(b)], ["me/x", "me/y"], {"me/x": a, "me/y": b}),
        (str(a), "", {"a": a}),
        ([str(a)], [], {"a": a}),
        ("", "b", {"b": b}),
    ):
        assert lerobot_mix.places(root, ids) == found
    (tmp_path / "one" / "a").mkdir(parents=True)
    for name in ("one/a", "two/a"):  # of one name: as much of the path as tells them apart
        (tmp_path / name / "meta").mkdir(parents=True)
        (tmp_path / name / "meta" / "info.json").write_text("{}")
    assert [*lerobot_mix.places([str(tmp_path / "one/a"), str(tmp_path / "two/a")], "")] == ["one/a", "two/a"]


SAME_SIZE = "the size of observation.images.top is 16x24 in a and 24x16 in tall"
REFUSED = [
    ("a,a", [], "a and a are the same dataset"),
    ("a,nowhere", [], "no dataset: no meta/info.json in"),
    ("a,b", ["dataset.repo_id=[x,y,z]"], "2 folders for 3 ids (dataset.root, dataset.repo_id)"),
    ("a,b", ["dataset.weights=[1,2,3]"], "3 weights for 2 datasets (dataset.weights): give one for each of a, b"),
    ("a", ["dataset.weights=[1]"], "1 weight for 1 dataset (dataset.weights): drop it"),
    ("a,b", ["dataset.weights=[1,0]"], "must be above 0"),
    ("a,b", ["dataset.weights=[1,1e-9]"], "the weight of b is too small: none of the 78 samples of an epoch"),
    ("a,fast", [], "fps is 10 in a and 30 in fast (dataset): "),
    ("a,wide", [], "the size of action is 3 in a and 7 in wide"),
    ("a,stateful", [], "the size of observation.state is 3 in a and 4 in stateful"),
    ("a,aimless", [], "a has action, aimless has none (dataset)"),
    ("aimless,a", [], "a has action, aimless has none (dataset)"),
    ("a,tall", ["policy.type=act"], f"{SAME_SIZE} (dataset): give dataset.resize=16,24"),
    ("a,gray", [], f"the number of channels of {CAM} is 3 in a and 1 in gray (dataset): give dataset.cameras="),
    ("a,b", ["dataset.cameras=x"], f"no camera x (dataset.cameras, a, b): there are {CAM}"),
    ("a,b", ["dataset.episodes=1"], "'1' names no episode (dataset.episodes): give NAME:3, such as a:3; the datasets"),
    ("a,b", ["dataset.exclude_episodes=c:1"], "'c:1' names no episode (dataset.exclude_episodes)"),
    ("a,b", ["dataset.episodes=b:5"], "dataset.episodes asks for episode 5, which is not there"),
    ("a", ["dataset.episodes=-1"], "'-1' names no episode (dataset.episodes): give their numbers"),
    ("a,b", ["exclude=b"], "there is no 'b' to leave out (exclude): give a source to train on, such as"),
]


@pytest.fixture(scope="module")
def odd(made):
    """Beside the three sets, those that do not fit `a`."""
    folder, _ = made
    one = ([5, 5], ["push", "push"])
    record(folder / "fast", *one, fps=30)
    record(folder / "wide", *one, numbers=NUMBERS | {"action": 7})
    record(folder / "stateful", *one, numbers=NUMBERS | {"observation.state": 4})
    record(folder / "aimless", *one, numbers={"observation.state": 3})
    record(folder / "tall", *one, cameras=[CAM], size=(24, 16))
    record(folder / "gray", *one, cameras=[CAM])
    record(folder / "more", *one, numbers=NUMBERS | {"observation.environment_state": 2}, cameras=[CAM, WRIST])
    change_feature(folder / "gray", CAM, shape=[16, 24, 1])
    return folder


@pytest.mark.parametrize(("names", "words", "says"), REFUSED)
def test_what_does_not_fit_is_refused_by_the_names_of_the_sets(odd, names, words, says):
    with pytest.raises(LockstepError) as caught:
        task_of("robot", "policy.chunk_size=5", roots(odd, names.split(",")), *words)
    said = str(caught.value).replace(f"{odd}/", "")
    assert says in said and "\n" not in said, said


def test_a_refusal_ends_a_training_with_one_line_and_nothing_written(launch, odd, tmp_path):
    done = launch.python("train.py", "robot", roots(odd, ["a", "fast"]), f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and len(done.errors) == 1 and "fps is 10 in a and 30 in fast" in done.errors[0]
    assert not (tmp_path / "run").exists()


def test_what_only_some_have_is_left_out_and_told(odd):
    task, train, _ = task_of("robot", roots(odd, ["more", "a"]), "policy.chunk_size=5")
    assert train.__getitems__([0]).keys() >= {CAM, "observation.state"}
    assert not train.__getitems__([0]).keys() & {WRIST, "observation.environment_state"}
    said = task.summary()
    assert (
        "  observation.environment_state is left out: not in a" in said and f"  {WRIST} is left out: not in a" in said
    )
    assert "Found 5 episodes with 35 frames at 10 Hz in 2 datasets (v3.0)" in said
    said = task_of("robot", roots(odd, ["more", "a"]), "policy.chunk_size=5", f"dataset.cameras={CAM}")[0].summary()
    assert "environment_state is left out" in said and WRIST not in said, "nobody has asked for it"
    said = task_of("robot", roots(odd, ["a", "gray"]), "policy.chunk_size=5", "dataset.cameras=none")[0].summary()
    assert "0 cameras" in said


def test_joints_of_other_names_are_told(made, tmp_path):
    folder, _ = made
    for name, joints in (("x", ["hip", "knee", "ankle"]), ("y", ["a", "b", "c"])):
        record(tmp_path / name, [5, 5], ["push", "push"])
        change_feature(tmp_path / name, "action", names=joints)
    said = task_of("robot", roots(tmp_path, "xy"), "policy.chunk_size=5")[0].summary()
    assert "warning: the numbers of action are called otherwise: hip, knee, ankle (x); a, b, c (y)" in said
    assert "otherwise" not in task_of("robot", roots(folder, "ab"), "policy.chunk_size=5")[0].summary()


# ---- what is joined --------------------------------------------------------------------------------------------------


def test_statistics_are_of_all_frames_each_once_whatever_the_weights(made):
    folder, episodes = made
    for more in ([], ["dataset.weights=[8,1,1]"]):
        task, *_ = task_of("robot", roots(folder), "policy.chunk_size=5", *more)
        for name in NUMBERS:
            whole = np.concatenate([each[name] for of in episodes.values() for each in of]).astype(np.float64)
            stats = task.demos.stats[name]
            for key, truth in (("mean", whole.mean(0)), ("std", whole.std(0)), ("min", whole.min(0))):
                np.testing.assert_allclose(stats[key], truth, rtol=1e-12)
            np.testing.assert_allclose(stats["q10"], np.quantile(whole, 0.1, axis=0), rtol=1e-12)
        pixels = np.concatenate([each[CAM] for of in episodes.values() for each in of]) / 255
        stats = task.demos.stats[CAM]
        np.testing.assert_allclose(stats["mean"].ravel(), pixels.mean((0, 2, 3)), rtol=1e-9)
        np.testing.assert_allclose(stats["std"].ravel(), pixels.std((0, 2, 3)), rtol=1e-9)
        np.testing.assert_allclose(stats["max"].ravel(), pixels.max((0, 2, 3)), rtol=1e-9)


@pytest.mark.parametrize("cache", ["memmap", "none"])
def test_each_sample_is_that_of_its_own_set(made, cache):
    """Numbers, windows, pictures, task; with whole episodes left out, by set."""
    folder, episodes = made
    words = ["dataset.eval_split=0", "policy.chunk_size=5", "policy.type=act", f"dataset.cache={cache}"]
    chosen = ["dataset.episodes=b:1,b:3,b:4", "dataset.exclude_episodes=a:1,b:3"]
    task, train, _ = task_of("robot", roots(folder), *words, *chosen)
    assert task.demos.tasks == ["push", "pull", "turn", "lift"]
    expected = [(n, e) for n, e in (("a", 0), ("a", 2), ("b", 1), ("b", 4), ("c", 0), ("c", 1))]
    assert list(dict.fromkeys(train.sources.tolist())) == [f"{name}:{e}" for name, e in expected]
    rows = [(name, e, t) for name, e in expected for t in range(len(episodes[name][e]["action"]))]
    shuffled = np.random.default_rng(0).permutation(len(rows)).tolist()
    batch = train.__getitems__(shuffled)
    assert len(rows) == len(train) and len({*train.__getitems__(range(len(rows)))["row"].tolist()}) == len(rows)
    for at, n in enumerate(shuffled):
        name, e, t = rows[n]
        own = episodes[name][e]
        window = own["action"][np.minimum(np.arange(t, t + 5), len(own["action"]) - 1)]
        assert np.array_equal(batch["action"][at], window)
        assert batch["action_is_pad"][at].sum() == max(0, t + 5 - len(own["action"])) == 5 - train.weights[n]
        assert np.array_equal(batch["observation.state"][at], own["observation.state"][t])
        assert np.array_equal(batch[CAM][at], own[CAM][t])
        told = [int(batch[f"{key}_index"][at]) for key in ("dataset", "episode", "frame")]
        assert told == ["abc".index(name), e, t]
        assert task.demos.tasks[int(batch["task_index"][at])] == SETS[name][1][e]
    assert task.demos.name_of(len(episodes["a"][0]["action"])) == "a episode 2 frame 0"
    assert task.demos.name_of(len(rows) - 1) == "c episode 1 frame 5"


def test_cameras_of_other_names_in_each_set_become_one(made, odd, tmp_path):
    """`rename_map` is of each set by itself; what is in no set, or twice in one, is refused."""
    folder, episodes = made
    front = "observation.images.front"
    of_front = record(tmp_path / "front", *SETS["c"], seed=9, cameras=[front])
    words = ["robot", "policy.type=act", "policy.chunk_size=5", "dataset.eval_split=0"]
    both = f"dataset.root=[{folder / 'a'},{tmp_path / 'front'}]"
    with pytest.raises(LockstepError, match=r"a camera|no camera"):
        task_of(*words, both, f"dataset.cameras={front}")
    for new, pairs in ((CAM, [f"{front}:{CAM}"]), (WRIST, [f"{front}:{WRIST}", f"{CAM}:{WRIST}"])):
        more = ["rename_map=" + ",".join(pairs), f"dataset.cameras={','.join(pair.split(':')[0] for pair in pairs)}"]
        for cameras in more[:1], more:
            task, train, _ = task_of(*words, both, *cameras)
            assert task.cameras == [new]
            batch = train.__getitems__([0, len(train) - 1])
            assert np.array_equal(batch[new][0], episodes["a"][0][CAM][0])
            assert np.array_equal(batch[new][1], of_front[-1][front][-1])
    with pytest.raises(LockstepError, match=r"no feature observation\.x"):
        task_of(*words, both, f"rename_map=observation.x:{CAM}")
    with pytest.raises(LockstepError, match=r"would be there twice"):
        task_of(*words, roots(odd, ["a", "more"]), f"rename_map={WRIST}:{CAM}")


def test_the_pictures_are_those_that_a_set_alone_has_decoded(made, tmp_path, monkeypatch):
    folder, _ = made
    words = ["robot", "policy.chunk_size=5", f"dataset.cache_dir={tmp_path}"]
    for name in "abc":
        task_of(*words, f"dataset.root={folder / name}")
    there = sorted(path.name for path in tmp_path.iterdir())
    assert len(there) == 3
    decoded = []
    monkeypatch.setattr(Frames, "decode", lambda *given, **how: decoded.append(given) or iter(()))
    task_of(*words, roots(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == there and not decoded


def test_sizes_that_differ_are_brought_to_one(odd):
    _, train, _ = task_of("robot", "policy.type=act", roots(odd, ["a", "tall"]), "dataset.resize=16,16")
    assert train.__getitems__([0, len(train) - 1])[CAM].shape == (2, 3, 16, 16)


def test_each_set_is_split_as_if_it_were_alone(made):
    folder, _ = made
    for seed in range(3):
        words = ["robot", "policy.chunk_size=5", "dataset.eval_split=0.4", f"dataset.split_seed={seed}"]
        _, train, val = task_of(*words, roots(folder))
        alone = {name: task_of(*words, f"dataset.root={folder / name}")[1:] for name in "abc"}
        for number, ours in enumerate((train, val)):
            theirs = {f"{name}:{e}" for name, of in alone.items() for e in of[number].sources.tolist()}
            assert {*ours.sources.tolist()} == theirs


# ---- how often, and in which order -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [
        ([0.7, 0.3], 10, [7, 3]),
        ([0.1, 0.2, 0.7], 10, [1, 2, 7]),
        ([1, 1, 1], 10, [4, 3, 3]),  # equal remainders: the first
        ([2.0, 1.0], 100, [67, 33]),
        ([0.5, 0.3, 0.2], 77, [39, 23, 15]),  # 38.5, 23.1, 15.4
        ([0.2, 0.3, 0.5], 77, [15, 23, 39]),
        ([0.1, 0.1, 0.1], 3, [1, 1, 1]),
        ([0.7, 0.1, 0.2], 15, [11, 1, 3]),  # 10.5 and 1.5; as floats 0.7 is below seven tenths, and 0.1 above one
        ([1e-3, 1.0], 1001, [1, 1000]),
    ],
)
def test_shares_are_whole_numbers_by_largest_remainder(weights, total, counts):
    assert lerobot_mix.shares([float(each) for each in weights], total, "abc").tolist() == counts


def plain_order(owner, counts, seed, epoch):
    """A plain loop: for each place the set that was drawn for it, and from that set's pile the next sample; a pile that
    is empty is shuffled anew. All epochs up to this one are dealt."""
    sets = len(counts)
    members = [[n for n, k in enumerate(owner) if k == which] for which in range(sets)]
    piles, shuffles, order = [[] for _ in range(sets)], [0] * sets, []
    for now in range(epoch + 1):
        places = [k for k in range(sets) for _ in range(counts[k])]
        places = [places[n] for n in np.random.default_rng((seed, now)).permutation(len(places))]
        order = []
        for k in places:
            if not piles[k]:
                shuffles[k] += 1
                drawn = np.random.default_rng((seed, k, shuffles[k])).permutation(len(members[k]))
                piles[k] = [members[k][n] for n in drawn]
            order.append(piles[k].pop(0))
    return order


def sampler_of(dataset, seed=3, **more):
    cfg = config.changed(config.Config(), {"batch_size": 12, "seed": seed} | more)
    the_plan = plan.make_plan(cfg, World(0, 0, 1, torch.device("cpu")), len(dataset))
    return TrainSampler(dataset, the_plan, 0, cfg.seed, None, cfg.exclude)


@pytest.mark.parametrize("weights", ["[.5,.3,.2]", "[1,20,1]", "[30,1,1]"])
def test_the_order_is_that_of_a_plain_loop_and_no_sample_comes_twice_before_the_others(made, weights):
    folder, _ = made
    task, train, val = task_of("robot", roots(folder), f"dataset.weights={weights}", "policy.chunk_size=5")
    parts = [float(each) for each in weights.strip("[]").split(",")]
    counts = lerobot_mix.shares(parts, len(train), task.demos.names).tolist()
    owner, sampler, times = train.owner.tolist(), sampler_of(train), collections.Counter()
    for epoch in (0, 1, 2, 3, 4):
        sampler.set_epoch(epoch)
        order = sampler.order().tolist()
        assert order == plain_order(owner, counts, 3, epoch)
        assert [sum(owner[n] == k for n in order) for k in range(3)] == counts and len(order) == len(train)
        times.update(order)
        for k in range(3):
            of_set = [times[n] for n in range(len(train)) if owner[n] == k]
            assert max(of_set) - min(of_set) <= 1 and sum(of_set) == (epoch + 1) * counts[k]
        said = f"{counts[0]} of {len(train)} samples of an epoch"
        assert said in task.summary()
    assert val.epoch_order is None and task_of("robot", roots(folder), "policy.chunk_size=5")[1].epoch_order is None


def test_a_set_without_a_sample_to_train_on_has_no_share(made):
    """Of policies that skip the last frames of each episode."""
    folder, _ = made
    sets = lerobot_mix.read(lerobot_mix.places([str(folder / "c"), str(folder / "b")], ""))
    demos, deltas = lerobot_mix.joined(sets), {"action": range(5)}
    train = lerobot_mix.chunks(demos, range(7), deltas, None, [1.0, 1.0], 6)
    assert train.counts.tolist() == [24, 23] and collections.Counter(train.owner.tolist())[0] == 1
    with pytest.raises(LockstepError, match=r"c has no sample .*: an episode needs more than 7 frames here"):
        lerobot_mix.chunks(demos, range(7), deltas, None, [1.0, 1.0], 7)
    alone = lerobot_mix.chunks(demos, range(7), deltas, None, [], 7)
    assert alone.counts.tolist() == [0, 41]
    assert "c  0 episodes to train on (0 frames)" in lerobot_mix.describe_sets(demos, alone, alone)[0]


def test_without_weights_each_frame_comes_once(made):
    _, train, _ = task_of("robot", roots(made[0]), "policy.chunk_size=5")
    assert sampler_of(train).order().tolist() == np.random.default_rng((3, 0)).permutation(len(train)).tolist()


# ---- trainings -------------------------------------------------------------------------------------------------------


def words_of(folder, save_dir, *more):
    mix = [roots(folder), "dataset.weights=[.5,.3,.2]"]
    return ["robot", *mix, *TINY, "log_every=1", "seed=3", *more, f"save_dir={save_dir}"]


@pytest.mark.slow
def test_a_union_takes_the_steps_of_one_set_of_the_same_frames(launch, made, tmp_path):
    """Without weights, to the last bit; that set's numbers are measured, too."""
    folder, episodes = made
    tasks = [task for _, those in SETS.values() for task in those]
    numbers = {name: ("float32", (dim,)) for name, dim in NUMBERS.items()}
    with Recorder(tmp_path / "whole", 10, numbers) as recorder:
        for each, task in zip((each for of in episodes.values() for each in of), tasks, strict=True):
            recorder.add_episode({name: each[name] for name in NUMBERS}, task)
    (tmp_path / "whole" / "meta" / "stats.json").unlink()
    small = ["dataset.eval_split=0", "steps=12", "batch_size=12", "dataset.weights=[]"]
    for name, root in (("one", f"dataset.root={tmp_path / 'whole'}"), ("several", roots(folder))):
        words = [word for word in words_of(folder, tmp_path / name) if not word.startswith("dataset.")]
        succeed(launch.python("train.py", *words, *small, root, "dataset.cameras=none"))
    assert_same(weights(tmp_path / "several"), weights(tmp_path / "one"))
    assert load(tmp_path / "one")["progress"]["step"] == 12
    losses = [[line["loss"] for line in records(tmp_path / name, "train")] for name in ("one", "several")]
    assert losses[0] == losses[1] and len({*losses[0]}) > 6


@pytest.mark.slow
def test_other_cuts_take_the_same_steps(launch, made, tmp_path):
    """In float64, to 1e-9, as tests/step/test_the_idea.py; with the tutorials' normalisation the same check fails."""
    cuts = {"1x12": (1, 12, 1), "1x3x4": (1, 3, 4), "2x6": (2, 6, 1)}
    for cut, (processes, batch, passes) in cuts.items():
        size = ["steps=8", f"batch_size={batch}", f"gradient_accumulation_steps={passes}"]
        run = [
            words_of(made[0], tmp_path / cut / "ours", *size),
            ["naive", *words_of(made[0], tmp_path / cut / "naive", *size, "optim.grad_clip=0")],
        ]
        words = MANY, json.dumps(run)
        succeed(launch.python(*words) if processes == 1 else launch.torchrun(processes, *words))
    for cut in ("1x3x4", "2x6"):
        assert distance(weights(tmp_path / cut / "ours"), weights(tmp_path / "1x12/ours")) < 1e-9
        assert distance(weights(tmp_path / cut / "naive"), weights(tmp_path / "1x12/naive")) > 1e-3
    assert load(tmp_path / "2x6/ours")["progress"]["epoch"] >= 1, "into the second epoch"


@pytest.mark.slow
def test_killed_on_four_and_resumed_on_three_is_the_straight_run_on_one(launch, made, tmp_path):
    """With dropout: the bits of all state and of the log; `tools/provenance.py` tells what was seen."""
    more = ["policy.dropout=0.1", "global_batch=12", "virtual_workers=4", "steps=18", "save_every=2", "eval_every=9"]
    words = [each for each in words_of(made[0], tmp_path / "cut", *more) if each != "policy.dropout=0"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    run = launch.start(sys.executable, *torchrun, "4", "train.py", *words)
    run.wait_for("step 7/")
    os.kill(launch.rank_pid(2), signal.SIGKILL)
    assert run.wait().code
    done = succeed(launch.python(*torchrun, "3", "train.py", *words))
    assert "Resuming" in done.out and 0 < int(done.out.split(": step ")[1].split(",")[0]) < 18
    words[-1] = f"save_dir={tmp_path / 'straight'}"
    succeed(launch.python("train.py", *words))
    assert_same_bits(tmp_path / "cut", tmp_path / "straight")
    progress = load(tmp_path / "cut")["progress"]
    assert progress["epoch"] >= 2

    _, train, _ = task_of(*words)
    counts = lerobot_mix.shares([0.5, 0.3, 0.2], len(train), "abc").tolist()
    seen = collections.Counter()
    for epoch in range(progress["epoch"] + 1):
        order = plain_order(train.owner.tolist(), counts, 3, epoch)
        seen.update(order[: progress["position"]] if epoch == progress["epoch"] else order)
    last = str(tmp_path / "cut" / "last.pt")
    found = json.loads(succeed(launch.python("tools/provenance.py", last, "--json", "--list", str(tmp_path / "l"))).out)
    for source, one in found["sources"].items():
        assert one["uses"] == sum(seen[n] for n in np.flatnonzero(train.sources == source).tolist())
    with open(tmp_path / "l") as file:
        assert collections.Counter(int(row["sample"]) for row in csv.DictReader(file)) == seen


@pytest.fixture(scope="module")
def trained(once, made):
    """The folder of a short training on the three sets, and on a set with features that the others lack."""
    folder, _ = made
    if not (folder / "extra").exists():
        more = NUMBERS | {"observation.environment_state": 2}
        record(folder / "extra", [8, 9], ["push", "lift"], seed=5, numbers=more)

    def train(into):
        words = ["robot", roots(folder, ["a", "b", "extra"]), "dataset.weights=[2,1,1]", *TINY, "steps=6", "seed=3"]
        with launching() as launch:
            succeed(launch.python("train.py", *words, "batch_size=12", f"save_dir={into / 'run'}"))

    return folder, once("mixed", train) / "run"


@pytest.mark.slow
def test_each_set_is_scored_by_itself_exactly(launch, trained, tmp_path):
    """Beside the joint error that of each set, from what `tools/predict.py` writes; on two processes the same."""
    folder, run = trained
    words = ["tools/evaluate.py", str(run), "--json"]
    one, two = (json.loads(succeed(launch.torchrun(n, *words, "eval_batch_size=3")).out) for n in (1, 2))
    assert one == two
    succeed(launch.python("tools/predict.py", str(run), "--split", "val", "--out", str(tmp_path / "p.npz")))
    arrays, off, numbers = np.load(tmp_path / "p.npz"), collections.Counter(), collections.Counter()
    truth = {name: lerobot.read(folder / name) for name in ("a", "b", "extra")}
    assert {*arrays["dataset"].tolist()} == {*truth}
    for name, e, t, chunk in zip(*(arrays[key] for key in ("dataset", "episode", "frame", "action")), strict=True):
        demos = truth[str(name)]
        real = demos.columns["action"][demos.start[e] + t : demos.end[e]][:5].astype(np.float64)
        off[name] += np.abs(chunk[: len(real)] - real).sum()
        numbers[name] += real.size
    for name in truth:
        assert one["metrics"][f"action_l1/{name}"] == pytest.approx(off[name] / numbers[name], rel=1e-5)
    joint = sum(off.values()) / sum(numbers.values())
    assert one["metrics"]["action_l1"] == pytest.approx(joint, rel=1e-5)
    by = json.loads(succeed(launch.python(*words, "--by", "datasets", "eval_batch_size=3")).out)["sources"]
    for name, each in by.items():
        assert each["metrics"]["action_l1"] == pytest.approx(one["metrics"][f"action_l1/{name}"], rel=1e-6)
    logged = records(run, "eval")[-1]
    assert {f"action_l1/{name}" for name in truth} <= logged.keys()


@pytest.mark.slow
def test_one_of_the_sets_alone_is_scored_and_predicted_with_what_all_have(launch, trained, tmp_path):
    """The model takes the features that all sets have in common; weights and names of the training do not matter."""
    folder, run = trained
    words = ["tools/evaluate.py", str(run), "--split", "all", "--json", f"dataset.root={folder / 'extra'}"]
    scored = json.loads(succeed(launch.python(*words)).out)["metrics"]
    out, page = tmp_path / "p.npz", tmp_path / "page.html"
    succeed(launch.python("tools/predict.py", str(run), str(folder / "extra"), "--out", str(out)))
    arrays, demos = np.load(out), lerobot.read(folder / "extra")
    assert "dataset" not in arrays and len(arrays["action"]) == scored["count"] == 17
    chunks = lerobot.Chunks(demos, demos.episodes, {"action": range(5)}).__getitems__(range(17))
    valid = ~chunks["action_is_pad"].numpy()
    off = np.abs(arrays["action"] - chunks["action"].numpy()).sum(-1)[valid].sum() / valid.sum() / 3
    assert scored["action_l1"] == pytest.approx(off, rel=1e-5)
    succeed(launch.python("tools/report.py", str(run), "--out", str(page)))
    assert "extra:" in page.read_text() and "action_l1/extra" in page.read_text()
    succeed(launch.python("tools/save_pretrained.py", str(run)))
    inputs = json.loads((run / "pretrained_model" / "config.json").read_text())["input_features"]
    assert inputs.keys() == {STATE}


@pytest.mark.slow
def test_an_episode_of_one_set_is_excluded_by_its_name(launch, made, tmp_path):
    """What it holds changes nothing: with other numbers in it the run ends in the same bits."""
    folder, _ = made
    held = task_of(*words_of(folder, tmp_path / "x"))[1].sources
    assert "b:0" in held
    noisy = tmp_path / "noisy"
    for k, (name, of) in enumerate(SETS.items()):
        episodes = record(noisy / name, *of, seed=k, cameras=[CAM])
        if name == "b":
            episodes[0]["action"] += 7
            episodes[0]["observation.state"] *= 3
            shutil.rmtree(noisy / "b")
            features = {n: ("float32", (dim,)) for n, dim in NUMBERS.items()} | {CAM: ("image", (3, 16, 24))}
            with Recorder(noisy / "b", 10, features) as recorder:
                for each, task in zip(episodes, of[1], strict=True):
                    recorder.add_episode(each, task)
    runs = {}
    for name, root in (("clean", folder), ("noisy", noisy)):
        words = words_of(root, tmp_path / name, "batch_size=12", "steps=9", "exclude=b:0")
        done = succeed(launch.python("train.py", *words))
        assert "b:0" in done.out
        runs[name] = weights(tmp_path / name)
    assert_same(runs["clean"], runs["noisy"])
    done = succeed(launch.python("train.py", *words_of(folder, tmp_path / "all", "batch_size=12", "steps=9")))
    with pytest.raises(AssertionError):
        assert_same(weights(tmp_path / "all"), runs["clean"])


@pytest.mark.slow
def test_other_weights_are_another_run(launch, made, tmp_path):
    words = words_of(made[0], tmp_path / "run", "batch_size=12")
    succeed(launch.python("train.py", *words, "steps=3"))
    changed = [word.replace("[.5,.3,.2]", "[.4,.4,.2]") for word in words]
    done = launch.python("train.py", *changed, "steps=5")
    assert done.code and "dataset.weights: [0.5, 0.3, 0.2] -> [0.4, 0.4, 0.2]" in done.err
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in "abc":
        (moved / name).symlink_to(made[0] / name)
    elsewhere = [roots(moved) if word.startswith("dataset.root=") else word for word in words]
    assert "Done: 5 steps" in succeed(launch.python("train.py", *elsewhere, "steps=5")).out
    done = launch.python(
        "train.py", *(w.replace("/c]", "/a]").replace("moved/a,", "moved/c,") for w in elsewhere), "steps=6"
    )
    assert done.code and "data" in done.err
