"""What is shown of a robot: films of its trials, held-out episodes beside the policy, the rate of success and ties."""

import io
import json

import numpy as np
import pytest
import torch
from conftest import ROOT, launching, succeed
from lerobot_data import change_json
from robot_tasks import DISCS, TINY_ACT, record, task_of
from runs import records

from engine.contract import Sums
from engine.report.log import _shown, of_trials
from tasks.envs.discs import LINGER, Discs
from tasks.envs.trials import roll_out
from tasks.robots import held_out, trials
from tasks.shared import pictures as drawing


def film(value, frames, number=0, success=False):
    """A trial whose every frame tells its number: the k-th is of one colour."""
    shots = np.stack([np.full((3, 32, 32), value + k, np.uint8) for k in range(frames)])
    return trials.Trial(number, "move to the red disc", success, shots)


# ---- the rate of success --------------------------------------------------------------------------------------------


def test_the_interval_is_wilsons():
    """Of every outcome of up to 40 trials, beside SciPy's."""
    binomtest = pytest.importorskip("scipy.stats").binomtest
    for count in (1, 2, 7, 20, 40):
        for successes in range(count + 1):
            expected = binomtest(successes, count).proportion_ci(0.95, method="wilson")
            assert trials.interval(successes / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_rate_is_told_as_people_write_it():
    counts = {"successes": 18.0, "trials": 20.0, "rewards": 19}
    sums = Sums({name: torch.tensor(value) for name, value in counts.items()})
    found = trials.metrics(sums)
    assert found["success_rate"] == 0.9 and found["avg_max_reward"] == 0.95 and found["trials"] == 20
    assert of_trials(found) == "18 of 20 (70-97 %)" and _shown(found) == {"Success": "18 of 20 (70-97 %)"}
    of_another_task = {"success_rate": 0.5, "loss": 1}
    assert _shown(of_another_task) == {"Loss": "1.0000", "Success": "50.00%"}
    assert trials.metrics(Sums()) == {} == trials.metrics(Sums(trials=torch.tensor(0.0)))


def test_of_equal_rates_the_earlier_step_is_the_best(launch, tmp_path):
    """Also after a resume, and with the checkpoints between removed; a better one would still count."""
    run = tmp_path / "run"
    words = ["train.py", str(ROOT / "tests" / "tasks" / "ties.py"), f"save_dir={run}", "keep_checkpoints=0"]
    succeed(launch.python(*words, "epochs=3"))
    best = json.loads((run / "manifest.json").read_text())["best"]
    assert best == "best_model_epoch1.pt", "0.25, 0.5, 0.5"
    done = succeed(launch.python(*words, "epochs=6"))
    assert json.loads((run / "manifest.json").read_text())["best"] == best and (run / best).exists()
    assert [line["success_rate"] for line in records(run, "eval")] == [0.25, *[0.5] * 5]
    assert f"best success_rate 0.5000 ({run / best})" in done.out and "Saved best" not in done.out


# ---- films ----------------------------------------------------------------------------------------------------------


def test_a_film_shows_those_that_failed_first():
    made = [film(10 * n, 4 + n, n, success=n not in (3, 5)) for n in range(6)]
    shown = trials.pictures(made)
    moving = shown["trial"]
    side, head = 288 + 4, 36 + 6 + 288 + 4
    assert moving.shape == (9, 2 * head, 2 * side, 3), "as long as the longest, two rows of two"
    for place, number in enumerate((3, 5, 0, 1)):
        row, column = divmod(place, 2)
        tile = moving[:, row * head : (row + 1) * head, column * side : (column + 1) * side]
        frames = tile[:, 2 + 42 : -2, 2:-2]
        assert (frames == frames[:, :1, :1]).all()
        last = 3 + number
        assert frames[:, 0, 0, 0].tolist() == [10 * number + min(k, last) for k in range(9)], "the last frame stays"
        assert tuple(tile[0, 2 + 36 + 2, 100]) == (trials.ORANGE if number in (3, 5) else trials.GREEN)
        assert (tile[:, 2:38, 2:-2] > 128).any(), "words above"
    assert shown["trial_strip"].shape == (18 + 292, 10 * 292, 3)
    assert trials.pictures([]) == {}
    assert trials.pictures(made[:1])["trial"].shape[1:] == (head, side, 3), "alone"
    assert trials.pictures(made[:3])["trial"].shape[1:] == (2 * head, 2 * side, 3)


def test_each_world_is_filmed_to_its_own_end():
    twin, films = Discs(np.arange(5)), [[] for _ in range(3)]

    def expert(observations, commands):
        return worlds.expert()[:, None]

    worlds = Discs(np.arange(5))
    success, found = roll_out(expert, worlds, 1, filmed=3)
    end = [None] * 3
    for now in range(40):
        for n, shots in enumerate(films):
            if end[n] is None or now < end[n]:
                shots.append(twin.render()[n])
        twin.step(twin.expert())
        end = [now + 1 + LINGER if end[n] is None and twin.success[n] else end[n] for n in range(3)]
    assert success.all() and len({len(each) for each in found}) > 1
    for ours, theirs in zip(found, films, strict=True):
        assert np.array_equal(ours, theirs)


def test_a_long_trial_is_filmed_in_a_hundred_frames():
    worlds = Discs(np.arange(2))
    worlds.horizon = 300
    _, (only,) = roll_out(lambda seen, commands: worlds.magnet[:, None], worlds, 1)
    assert len(only) == 100


def test_the_films_are_of_the_first_trials_on_any_number_of_processes(own_recordings):
    task, *_ = task_of(*DISCS[:-1], "eval.n_episodes=14")
    model = task.model()
    for which in (range(10), range(10, 14)):  # as one process makes them
        task.trials(model, which, lambda: False)
    assert [each.number for each in task.films] == [*range(10)]
    alone = task.films
    task.films = []
    task.trials(model, range(10), lambda: False)  # the share of rank 0 of two
    assert all(np.array_equal(a.film, b.film) and a[:3] == b[:3] for a, b in zip(alone, task.films, strict=True))


# ---- held-out episodes ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return record(tmp_path_factory.mktemp("walks") / "set", episodes=5, frames=20)


@pytest.mark.parametrize(("steps", "looks"), [(4, 64), (6, 64), (1, 64), (4, 3), (2, 4)])
def test_an_episode_is_predicted_as_it_would_be_executed(walks, monkeypatch, steps, looks):
    """Against a plain loop over the dataset's own table, with a policy that tells the frame it has looked at."""
    monkeypatch.setattr(held_out, "LOOKS", looks)
    monkeypatch.setattr(held_out, "AT_ONCE", 2)
    task, _, val = task_of("robot", "policy.type=act", *TINY_ACT, f"dataset.root={walks}", "dataset.cache=none")
    model = task.model()
    told = 100 * torch.arange(30)[:, None, None] + torch.arange(6)[:, None].expand(6, 3)  # of each frame
    monkeypatch.setattr(model, "act", lambda batch: told[batch["frame_index"]])
    source = val.sources[0]
    members = np.flatnonzero(val.sources == source)
    recorded, predicted, every = held_out.beside(task, model, val, members, steps)
    rows = task.demos.columns["episode_index"] == int(source)
    truth, length = task.demos.columns["action"][rows], len(members)
    assert every == max(steps, -(-length // looks)) and recorded.shape == predicted.shape == truth.shape
    for frame in range(length):
        look, after = frame // every * every, frame % every
        if after < 6:  # of the chunk
            assert np.array_equal(recorded[frame], truth[frame].astype(np.float64))
            assert (predicted[frame] == 100 * look + after).all()
        else:
            assert np.isnan(recorded[frame]).all() and np.isnan(predicted[frame]).all()
    assert np.isnan(predicted).any() == (every > 6)


def test_each_number_has_a_plot_under_its_name(tmp_path, monkeypatch):
    root, asked = record(tmp_path / "set"), []
    info = root / "meta" / "info.json"
    joints = ["shoulder", "elbow", "wrist"]
    change_json(info, lambda there: there["features"]["action"].update(names={"motors": joints}))
    words = ["robot", "policy.type=act", *TINY_ACT, f"dataset.root={root}", "dataset.cache=none"]
    torch.manual_seed(0)
    task, _, val = task_of(*words)
    real = held_out.plots
    monkeypatch.setattr(held_out, "plots", lambda *given: asked.append(given) or real(*given))
    shown = task.pictures(task.model().eval(), None, {})
    source = str(val.sources[0])
    assert list(shown) == ["episode_0"], "no simulation, one held-out episode"
    (title, given), picture = asked[0], shown["episode_0"]
    assert title.startswith(f"episode {source}, held out: recorded (blue), predicted (orange) every 6 of")
    names, errors = zip(*(name.split("   L1 ") for name, _ in given), strict=True)
    assert list(names) == joints and len(set(errors)) == 3
    lines = [line.values for _, lines in given for line in lines]
    assert float(errors[1]) == pytest.approx(np.abs(lines[2] - lines[3]).mean(), rel=6e-3)  # three digits are shown
    assert picture.dtype == np.uint8 and picture.ndim == 3
    shared, *_ = task_of(*words, "dataset.eval_split=0")
    shared.pictures(shared.model().eval(), None, {})
    assert "trained on" in asked[-1][0], "there is none to hold out"


def test_a_plot_is_where_its_numbers_are():
    """Points at the left, the middle and the right, low, high and at half height; a gap is one."""
    left, top, right, bottom = drawing._MARGIN
    (width, height), red, blue = drawing.PLOT, (255, 0, 0), (0, 0, 255)
    nan = np.nan
    points = drawing.Line(np.array([1.0, nan, 3.0, nan, 2.0]), red, 6)
    plot = drawing._plot("", [points, drawing.Line(np.array([nan, 1, 1, nan, nan]), blue, 4)]).astype(int)
    seen = (plot[..., 0] > 200) & (plot[..., 1] < 60) & (plot[..., 2] < 60)
    rows, columns = np.nonzero(seen)
    wide, high = width - left - right, height - top - bottom
    for x, y in ((0, 1.0), (0.5, 0.0), (1.0, 0.5)):
        near = np.abs(columns - (left + x * wide)) < 20
        assert columns[near].mean() == pytest.approx(left + x * wide, abs=1.0), (x, y)
        assert rows[near].mean() == pytest.approx(top + y * high, abs=1.0), (x, y)
    _, columns = np.nonzero((plot[..., 2] > 200) & (plot[..., 0] < 60))
    assert columns.min() == pytest.approx(left + 0.25 * wide, abs=2) and columns.max() <= left + 0.5 * wide + 2
    flat = drawing._plot("flat", [drawing.Line(np.zeros(3), red, 2)])
    empty = drawing._plot("nothing", [drawing.Line(np.full(3, nan), red, 2)])
    assert flat.shape == empty.shape == (height, width, 3) and not np.array_equal(flat, empty)
    many = drawing.plots("title", [("", [points])] * 30)
    assert many.shape == (18 + 8 * height, 3 * width, 3), "24 of them, in three columns"


# ---- a training, its log, its report --------------------------------------------------------------------------------


def images(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs"), size_guidance={"images": 0}).Reload()
    return {
        (tag, each.step): each.encoded_image_string for tag in events.Tags()["images"] for each in events.Images(tag)
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The same training on one and on two processes, and what each printed."""
    folder = tmp_path_factory.mktemp("runs")
    with launching(folder / "launch") as launch:
        words = "eval.n_episodes=12 steps=4 eval_every=2 batch_size=8 virtual_workers=2 threads=1 policy.num_steps=2"
        start = ["train.py", *DISCS[:-1], *words.split(), "device=cpu"]
        one = succeed(launch.python(*start, f"save_dir={folder / 'one'}")).out
        two = succeed(launch.torchrun(2, *start, f"save_dir={folder / 'two'}")).out
    return folder, one, two


@pytest.mark.slow
def test_the_pictures_are_the_same_on_two_processes(trained):
    from PIL import Image

    folder, *_ = trained
    found = images(folder / "one")
    tags = {"val/trial", "val/trial_strip", "val/episode_0"}
    assert {tag for tag, _ in found} == tags and {step for _, step in found} == {2, 4}
    assert found == images(folder / "two")
    assert found["val/episode_0", 2] != found["val/episode_0", 4], "another policy"
    assert Image.open(io.BytesIO(found["val/trial", 4])).n_frames > 5


@pytest.mark.slow
def test_the_log_tells_the_interval_and_tools_agree(launch, trained):
    folder, one, _ = trained
    line = records(folder / "one", "eval")[-1]
    low, high = trials.interval(line["success_rate"], 12)
    assert (line["trials"], line["success_rate_low"], line["success_rate_high"]) == (12, low, high)
    words = f"{line['success_rate'] * 12:.0f} of 12 ({100 * low:.0f}-{100 * high:.0f} %)"
    assert f"Success: {words}, action_l1" in one
    last = str(folder / "one" / "last.pt")
    evaluated = succeed(launch.python("tools/evaluate.py", last)).out
    assert f"success in {words}: the rate's 95 % interval, by Wilson" in evaluated
    page = folder / "page.html"
    told = json.loads(succeed(launch.python("tools/report.py", last, "--out", str(page), "--json")).out)["runs"][0]
    for name in ("success_rate", "success_rate_low", "trials"):
        assert told["metrics"][name] == line[name]
    text = page.read_text()
    assert f"Success in {words}" in text and 'alt="film of trials"' in text
    assert all(each["differences"].keys() == {"0", "1"} for each in told["episodes"])
