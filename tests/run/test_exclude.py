"""A run without some samples is the same run without them: everything else keeps its place.

The truth here is a plain loop over numpy's own permutation, from which the excluded samples are struck out.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TOY, succeed
from runs import progress, records, same_bits, weights

import tasks
from data_loader import create_data_loaders
from engine import config, contract, plan
from engine.comm.world import World
from engine.contract import LockstepError, kept
from plugins.preflight.prepare_check import check_prepare

TERMS, CONTRAST = (str(ROOT / "tests" / "tasks" / name) for name in ("terms.py", "contrast.py"))


def order_of(seed, epoch, count=61):
    return np.random.default_rng((seed, epoch)).permutation(count)


def world(rank=0, size=1):
    return World(rank, rank, size, torch.device("cpu"))


# ---- what `exclude` names ----


class Named:
    """Ten samples of five mice, whose names are numbers and texts."""

    sources = ["7", "7", "8", "17", "17", "17", "mouse 9", "8", "7", "8"]

    def __len__(self):
        return 10


@pytest.mark.parametrize(
    ("dataset", "exclude", "gone"),
    [
        (Named(), [], []),
        (Named(), ["7"], [0, 1, 8]),
        (Named(), ["mouse 9", "sample:7"], [6, 7]),
        (Named(), ["8", "8", "sample:2"], [2, 7, 9]),
        (range(10), ["7"], [7]),
        (range(10), ["sample:7", "0"], [0, 7]),
    ],
)
def test_what_is_named_is_left_out(dataset, exclude, gone):
    assert np.flatnonzero(~kept(dataset, exclude)).tolist() == gone


@pytest.mark.parametrize(
    ("dataset", "exclude", "told"),
    [
        (Named(), ["mouse 8"], "no 'mouse 8' to leave out (exclude): give a source to train on, such as mouse 9, or"),
        (Named(), ["3"], "no '3' to leave out (exclude): give a source to train on, such as 7, 8, 17, mouse 9, or"),
        (Named(), ["sample:10"], "or a sample, sample:0 to sample:9"),
        (Named(), ["7", "8", "17", "mouse 9"], "no sample is left to train on (exclude): name fewer"),
        (range(10), ["10"], "no '10' to leave out (exclude): give a sample, sample:0 to sample:9"),
        (range(10), ["-1"], "no '-1' to leave out"),
        (range(10), ["mouse"], "no 'mouse' to leave out"),
    ],
)
def test_what_is_not_there_is_refused(dataset, exclude, told):
    """A number is a source where there are sources: else a slip would leave out a sample of that number."""
    with pytest.raises(LockstepError) as caught:
        kept(dataset, exclude)
    assert told in str(caught.value) and "\n" not in str(caught.value)


OWN = """
from dataclasses import dataclass
from engine import config, contract


@dataclass
class Dataset:
    exclude: str = config.option("none", "a key of the task's own")


@dataclass
class Settings(contract.Settings):
    dataset: Dataset = config.section(Dataset)


class Task(contract.Task):
    Settings = Settings
    datasets = model = loss = score = report = None
"""


def test_the_key_has_two_spellings_with_and_without_a_section_dataset(tmp_path):
    """A task's own `dataset.exclude` stays its own."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "c.yaml").write_text("dataset: {exclude: [7, a b]}\n")
    for task in ("har", "video", "robot", "examples/own_task.py", TOY):
        for words in (["exclude=7,a b"], ["--dataset.exclude", "7,a b"], ["--config", str(tmp_path / "c.yaml")]):
            assert config.parse([task, *words], tasks.load).cfg.exclude == ["7", "a b"]
    both = config.parse([str(tmp_path / "own.py"), "dataset.exclude=mine", "exclude=7"], tasks.load).cfg
    assert (both.dataset.exclude, both.exclude) == ("mine", ["7"])


# ---- the order ----


class Drawn:
    """Samples that are random by their seeds, with labels and weights."""

    labels = np.repeat([0, 1, 2], [40, 15, 6])
    weights = np.arange(61) + 1.0
    sources = np.array([f"mouse{n % 6}" for n in range(61)])

    def __len__(self):
        return 61

    def __getitems__(self, indices, seeds):
        return {"x": torch.tensor(indices), "seed": seeds.clone()}


CUTS = [(1, 12, 1, 0), (1, 2, 6, 0), (2, 6, 1, 0), (3, 2, 2, 0), (1, 2, 0, 4), (2, 2, 0, 4), (3, 2, 0, 4)]
"""processes, samples of a pass, passes a step, virtual workers: twelve samples a step each"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"sampler": "balanced"}, {"num_workers": 1}])
def test_a_step_is_the_same_step_without_the_excluded(options):
    """On any cut, from any position, in two epochs: who is in it, at which place, with which random numbers."""
    exclude, gone = ["mouse2", "mouse5", "sample:6"], {n for n in range(61) if n % 6 in (2, 5) or n == 6}
    cuts = CUTS[:1] if "num_workers" in options else CUTS
    for (size, batch, passes, workers), epoch, done in itertools.product(cuts, (0, 1), (0, 2)):
        cfg = config.Config(
            batch_size=batch, gradient_accumulation_steps=passes, virtual_workers=workers,
            global_batch=12 * (workers > 0), seed=5, **options,
        )  # fmt: skip
        the_plan = plan.make_plan(cfg, world(size=size), 61)
        steps, everyones = {}, {}
        for rank, without in itertools.product(range(size), (False, True)):
            there = config.changed(cfg, {"exclude": exclude if without else []})
            loader, _ = create_data_loaders(there, world(rank, size), the_plan, Drawn(), None)
            loader.set_epoch(epoch, 12 * done)
            pairs = [(number, pair) for number, step in enumerate(loader, done) for pair in step]
            del loader  # and its processes with it: a failure below would wait for them
            everyones.setdefault(without, []).append([number for number, _ in pairs])
            for number, (batch_, micro) in pairs:
                given = batch_["lockstep"]
                rows = zip(*(given.position.tolist(), micro.indices, given.seed.tolist()), strict=True)
                assert batch_["x"].tolist() == given.index.tolist() == micro.indices
                if not micro.empty:
                    step = steps.setdefault((without, number), [])
                    step += zip(rows, batch_["seed"].tolist(), given.mean_weight.tolist(), strict=True)
                assert not without or not gone & {*micro.indices}, "not even as padding"
                assert not micro.empty or size > 1 or workers or not micro.samples, "no pass of nothing"
        # Ranks that take part a different number of times hang.
        assert all(len(each) == len(mine[0]) or workers for mine in everyones.values() for each in mine)
        count = 5 if "drop_last" in options else 6
        assert {number for _, number in steps} == {*range(done, count)}
        for number in range(done, count):
            whole, rest = (sorted(steps.get((without, number), [])) for without in (False, True))
            left = [row for row in whole if row[0][1] not in gone]
            assert [row[:2] for row in rest] == [row[:2] for row in left], "same place, same seeds"
            mean = np.mean([index + 1.0 for (_, index, _), _, _ in left]) if left else 0
            assert all(row[2] == pytest.approx(mean, rel=1e-14) for row in rest)
            if not options:
                expected = [index for index in order_of(5, epoch)[12 * number :][:12] if index not in gone]
                assert [index for (_, index, _), _, _ in rest] == expected


def test_trials_before_the_first_step_see_none_of_the_excluded():
    """Also where the first steps are left without any sample."""
    order = order_of(0, 0)
    cfg = config.Config(batch_size=2, exclude=[f"sample:{n}" for n in order[:20]], check_sums=True)
    sees = []
    task = SimpleNamespace(prepare=lambda batch: (sees.extend(batch["x"].tolist()), batch)[1])
    loader, _ = create_data_loaders(cfg, world(), plan.make_plan(cfg, world(), 61), Drawn(), None, None)
    loader.prepare = task.prepare
    check_prepare(loader, "stop")
    example = loader.example(5, 1, least=6)
    assert example["x"].tolist() == order[21:25].tolist()
    assert example["lockstep"].position.tolist() == [21, 22, 23, 24] and not {*sees} & {*order[:20].tolist()}


# ---- the training ----


def dataset_and_truth(task, exclude, steps, **settings):
    """The weights after a plain loop of SGD, and how many of its steps had samples."""
    made = config.parse([task, "model.double=true", *[f"{k}={v}" for k, v in settings.items()]], tasks.load)
    given = tasks.load(task)(made.cfg)
    data, _ = given.datasets()
    torch.manual_seed(made.cfg.seed)
    net, taken = given.model(), 0
    for step in range(steps):
        epoch, number = divmod(step, 6)
        places = [p for p in range(12 * number, min(12 * number + 12, 61)) if order_of(0, epoch)[p] not in exclude]
        if not places:
            continue
        rows, places = torch.tensor(order_of(0, epoch)[places]), torch.tensor(places)
        info = contract.BatchInfo(rows, places, contract.sample_seeds(0, epoch, places))
        loss = given.loss(net, data.__getitems__(rows.tolist()) | {"lockstep": info})
        net.zero_grad()
        (loss.total / loss.weight).backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.05 * p.grad
        taken += 1
    return net.state_dict(), taken


PLAIN = "model.double=true optim.name=sgd optim.momentum=0 optim.lr=0.05 optim.weight_decay=0 optim.grad_clip=0".split()
PLAIN += "schedule.kind=constant steps=9 log_every=1 device=cpu".split()
ALONE = int(order_of(0, 0)[60])  # the only sample of step 6
GONE = {ALONE, *order_of(0, 0)[12:20].tolist(), *order_of(0, 1)[3:5].tolist()}
EXCLUDE = "exclude=" + ",".join(map(str, sorted(GONE)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "processes", "cut"),
    [
        (TOY, 1, ["batch_size=12"]),
        (TOY, 2, ["batch_size=3", "gradient_accumulation_steps=2"]),
        (TOY, 3, ["batch_size=4", "cache=host"]),
        (TERMS, 2, ["batch_size=3", "gradient_accumulation_steps=2"]),
        (CONTRAST, 2, ["batch_size=6"]),
    ],
)
def test_a_run_ends_as_a_plain_loop_without_these_samples(launch, tmp_path, task, processes, cut):
    """In float64, with a step that has no sample left: it is not taken, and no reason to end the run."""
    words = [task, *PLAIN, *cut, EXCLUDE, "max_skipped_steps=1", f"save_dir={tmp_path}"]
    done = succeed(launch.train(*words, processes=processes))
    truth, taken = dataset_and_truth(task, GONE, 9)
    ours = weights(tmp_path)
    assert taken == 8 and ours.keys() == truth.keys()
    for name, value in truth.items():
        assert (ours[name] - value).abs().max() < 1e-9, name
    other, _ = dataset_and_truth(task, set(), 9)
    assert max((other[name] - truth[name]).abs().max() for name in truth) > 1e-4, "they matter"
    end = progress(tmp_path / "last.pt")
    assert (end["step"], end["samples"], end["position"], end["skipped"]) == (9, 61 + 36, 36, 1)
    (skipped,) = records(tmp_path, "skipped")
    assert (skipped["skipped_step"], skipped["why"]) == (6, "exclude leaves it no sample")
    assert f"excluded         {len(GONE)} of 61 samples; the others keep" in done.out and not done.err


BITS = "log_every=1 digest_every=1 device=cpu virtual_workers=4 global_batch=12 batch_size=2 model.dropout=0.3".split()


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_processes_and_until_the_first_of_them_comes(launch, tmp_path):
    """Beside the run with all samples: digests are equal until a step holds one that is excluded, and rates always are.
    A run that is resumed ends in the same bits, and is refused with another `exclude`."""
    first = int(order_of(0, 0)[40])  # comes at step 4, and the only sample of an epoch's last step
    words = [TOY, *BITS, f"exclude={first},{ALONE}"]
    for processes in (1, 2, 3):
        succeed(launch.train(*words, "steps=14", f"save_dir={tmp_path / str(processes)}", processes=processes))
    succeed(launch.train(TOY, *BITS, "steps=14", f"save_dir={tmp_path / 'whole'}"))
    again = [*words, f"save_dir={tmp_path / 'again'}", "schedule.horizon=14"]
    succeed(launch.train(*again, "steps=5", processes=2))
    refused = launch.train(TOY, *BITS, "steps=14", *again[-2:], f"exclude={first}")
    assert refused.code == 2 and len(refused.errors) == 1 and "exclude: ['" in refused.err
    succeed(launch.train(*again, "steps=14"))
    logs = {name: records(tmp_path / name, "train") for name in ("1", "2", "3", "whole", "again")}
    for name in ("2", "3", "again"):
        assert same_bits(weights(tmp_path / name), weights(tmp_path / "1")), name
        assert [line["digest"] for line in logs[name]] == [line["digest"] for line in logs["1"]]
    pairs = [*zip(logs["whole"], logs["1"], strict=True)]
    equal = [a["digest"] == b["digest"] for a, b in pairs]
    assert equal == [True] * 3 + [False] * 11
    assert [line["digest"] for line in logs["1"]][4] == logs["1"][5]["digest"], "step 6 has no sample"
    assert all(a["lr"] == b["lr"] and a["samples"] == b["samples"] for a, b in pairs)


@pytest.mark.slow
def test_running_statistics_are_of_the_workers_that_have_samples(launch, tmp_path):
    """Two of four, in a step of which ten samples are excluded; also where loader processes fetch them."""
    task, order = str(ROOT / "tests" / "tasks" / "norms.py"), order_of(0, 0)
    words = [task, "steps=1", "device=cpu", "amp=off", "virtual_workers=4", "global_batch=12", "batch_size=3"]
    words.append("exclude=" + ",".join(map(str, order[2:12])))
    for processes, more in ((1, []), (2, ["num_workers=1"])):
        succeed(launch.train(*words, *more, f"save_dir={tmp_path / str(processes)}", processes=processes))
    assert same_bits(weights(tmp_path / "1"), weights(tmp_path / "2"))
    given = tasks.load(task)(config.parse([task], tasks.load).cfg)
    torch.manual_seed(0)
    first = given.model().layers[1]
    noise = contract.uniform(contract.sample_seeds(0, 0, torch.arange(2)), 8) * 0.01
    x = (given.datasets()[0].x[order[:2]] + noise).float()[:, None]
    expected = 0.1 * first(x).mean((0, 2))  # of both, as each has as many positions
    torch.testing.assert_close(weights(tmp_path / "1")["layers.2.running_mean"], expected, rtol=1e-4, atol=1e-6)


def test_many_steps_without_a_sample_are_no_divergence(launch, tmp_path):
    """One sample a step, of which most are excluded."""
    exclude = ",".join(map(str, range(1, 61)))
    words = [TOY, "batch_size=1", "epochs=2", "device=cpu", "max_skipped_steps=3", f"exclude={exclude}"]
    succeed(launch.train(*words, f"save_dir={tmp_path}"))
    assert progress(tmp_path / "last.pt")["skipped"] == 120


# ---- what tasks compute from their training data ----


def made(task, *words):
    found = tasks.load(task)(config.parse([task, *words], tasks.load).cfg)
    return found, found.datasets()[0]


def test_har_knows_nothing_of_whom_it_leaves_out(tmp_path):
    with np.load(ROOT / "data" / "watch" / "watch.npz") as file:
        arrays = dict(file)
    owner = np.repeat(arrays["subject"].astype(str), arrays["lengths"])
    steps = ~np.isin(owner, ["7", "9", "10"])
    task, train = made("har", "dataset.stride=128", "exclude=7")
    assert {*train.sources.tolist()} == {*"12345678"}
    counts = np.bincount(train.labels[train.sources != "7"])
    assert task.train_counts.tolist() == counts.tolist() and counts.sum() < len(train)
    # Leftover steps at the end of a recording are in no window.
    lengths = arrays["lengths"] // 128 * 128
    inside = np.concatenate([np.arange(n) < m for n, m in zip(arrays["lengths"], lengths, strict=True)])
    chosen = arrays["signal"][steps & inside].astype(np.float64)
    assert np.allclose(task.mean, chosen.mean(0), rtol=1e-5) and np.allclose(task.std, chosen.std(0), rtol=1e-5)


@pytest.mark.slow
def test_har_ends_in_the_same_bits_whatever_they_had_recorded(launch, tmp_path):
    """The strongest form of "it has not seen them": their signals replaced by noise change no bit."""
    with np.load(ROOT / "data" / "watch" / "watch.npz") as file:
        arrays = dict(file)
    theirs = np.repeat(arrays["subject"].astype(str) == "7", arrays["lengths"])
    noise = np.random.default_rng(0).normal(size=arrays["signal"].shape).astype(arrays["signal"].dtype)
    np.savez(tmp_path / "other.npz", **arrays | {"signal": np.where(theirs[:, None], 50 * noise, arrays["signal"])})
    words = ["har", "device=cpu", "dataset.stride=512", "model.width=8", "steps=8"]
    for name, more in (("a", ["exclude=7"]), ("b", ["exclude=7"]), ("c", [])):
        data = [f"dataset.root={tmp_path / 'other.npz'}"] if name == "b" else []
        succeed(launch.train(*words, *more, *data, f"save_dir={tmp_path / name}"))
    assert same_bits(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same_bits(weights(tmp_path / "a"), weights(tmp_path / "c"))


VIDEO = "dataset.size=16 dataset.trials=61 dataset.videos=12 dataset.frames=5 model.width=4".split()


def test_video_counts_its_classes_without_them():
    task, train = made("video", *VIDEO)
    name = train.sources[0]
    without, again = made("video", *VIDEO, f"exclude={name}")
    assert len(again) == len(train) and (again.sources == train.videos).all()
    assert without.train_counts.tolist() == np.bincount(train.labels[train.videos != name], minlength=5).tolist()
    assert {*task.about["videos"]["trained on"]} - {*without.about["videos"]["trained on"]} == {name}


ROBOT = "env.demonstrations=8 env.size=16 eval.n_episodes=0 policy.chunk_size=5".split()


def test_robot_measures_its_statistics_without_them():
    pytest.importorskip("pyarrow")
    task, train = made("robot", *ROBOT)
    name = train.sources[0]
    assert {*train.sources.tolist()} == {*map(str, {*train.indices["episode_index"][train.rows].tolist()})}
    without, again = made("robot", *ROBOT, f"exclude={name},sample:{len(train) - 1}")
    columns = without.demos.columns
    left = columns["episode_index"] != int(name)
    left[again.rows[-1]] = False
    for feature, stats in without.demos.stats.items():
        if feature not in without.cameras:
            assert np.array_equal(stats["mean"], columns[feature][left].astype(np.float64).mean(0)), feature
            assert np.array_equal(stats["max"], columns[feature][left].max(0)), feature
    trained = again.rows.numpy()[without.kept(again)]
    assert np.allclose(without.mean_action, columns["action"][trained].astype(np.float64).mean(0), rtol=1e-12)
    assert not np.array_equal(without.mean_action, task.mean_action)
    assert not {*without.cameras} & without.demos.stats.keys()
    with pytest.raises(LockstepError, match="statistics of pictures are known of all episodes together"):
        own = ["dataset.use_imagenet_stats=false", "policy.normalization_mapping.VISUAL=MEAN_STD"]
        made("robot", *ROBOT, *own, f"exclude={name}")
