"""tools/tune.py and tools/benchmark.py: real runs in processes of their own, and the model behind the prediction."""

import argparse
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import FAULTY, TOY, succeed

from engine import config
from engine.config.schema import DDP
from engine.contract import LockstepError
from tools.machine import benchmark, probe, scaling, tune
from tools.machine.scaling import Link, Passes, Place, Ring, Step, Unit

SO_MANY = ["fault.kind=memory for so many", "fault.times=1000000", "fault.step=1"]


# ---- the model ----


def test_a_ring_of_the_textbook():
    link = Link(alpha=1e-5, beta=1e9)
    assert scaling.all_reduce_s(link, 1, 1e6) == 0
    assert scaling.all_reduce_s(link, 2, 1e6) == pytest.approx(2e-5 + 1e-3)
    assert scaling.all_reduce_s(link, 4, 1e6) == pytest.approx(6e-5 + 1.5e-3)


def test_a_fit_finds_the_link_that_made_the_times():
    link = Link(alpha=3e-5, beta=2.5e8)
    times = {1 << n: scaling.all_reduce_s(link, 3, 1 << n) for n in range(10, 25, 2)}
    assert scaling.fit(3, times) == pytest.approx(link, rel=1e-6)
    delayed = times | {size: 5 * times[size] for size in (1 << 10, 1 << 14, 1 << 20)}
    assert scaling.fit(3, delayed) == pytest.approx(link, rel=1e-6), "something else ran meanwhile"
    flat, steep = (scaling.fit(2, {1024: 1e-4, 2048: seconds}) for seconds in (1e-4, 4e-4))
    assert flat.beta > 0 and steep.alpha == 0, "noise gives no negative latency"


def test_all_bytes_are_in_a_bucket():
    assert scaling.buckets(60 << 20, 25) == [25 << 20, 25 << 20, 10 << 20]
    assert scaling.buckets(0.4e6, 25) == [0.4e6] and scaling.buckets(50 << 20, 25) == [25 << 20] * 2


def test_sums_hide_behind_the_backward_pass_but_for_the_last():
    step, fast, slow = Step(backward=0.1, rest=0.05), Link(0.0, 1e12), Link(0.0, 1e8)

    def took(num_bytes, bucket_cap_mb, processes, link):
        place = Place(1, processes, link, link)
        return scaling.predict_s(step, scaling.ddp_sums(num_bytes, bucket_cap_mb, place), place)

    assert took(20e6, 5, 1, fast) == pytest.approx(0.15)
    assert took(20e6, 5, 8, fast) == pytest.approx(0.15, rel=0.001)
    # Three buckets of 5 MiB and a rest, 10 ms a MB: the first is ready after 26 ms, from there on they wait in a row.
    assert took(20e6, 5, 2, slow) == pytest.approx(0.05 + 0.1 * (5 << 20) / 20e6 + 0.2)
    # As one bucket nothing would be hidden.
    assert took(1e6, 25, 2, slow) == pytest.approx(0.15 + 0.01)


INSIDE, CABLE = Link(alpha=1e-6, beta=1e10), Link(alpha=1e-4, beta=1e8)
FOUR_BY_TWO = Place(2, 4, INSIDE, CABLE)
"""Two machines of four processes."""


def test_a_ring_over_two_machines_takes_the_pace_of_the_cable():
    """Eight ranks, 8 MB: a round carries 1 MB, 10 ms over the cable and .1 ms inside."""
    assert scaling.all_reduce(Ring(8, 2), 8e6).seconds(FOUR_BY_TWO) == pytest.approx(14 * (1e-4 + 1e-2))
    assert scaling.all_gather(Ring(8, 2), 8e6).seconds(FOUR_BY_TWO) == pytest.approx(7 * (1e-4 + 1e-2))
    assert scaling.all_gather(Ring(4, 1), 8e6).seconds(FOUR_BY_TWO) == pytest.approx(3 * (1e-6 + 2e-4))
    four_rings = scaling.all_reduce(Ring(2, 2, sharing=4), 2e6)  # each has a quarter of the cable
    assert four_rings.seconds(FOUR_BY_TWO) == pytest.approx(2 * (1e-4 + 4e-2))
    assert four_rings.sent == 2e6 and four_rings.crossing == 8e6
    assert scaling.all_gather(Ring(4, 1), 8e6).crossing == 0, "it stays inside"


def test_what_each_strategy_sends():
    """By hand, for two units of 8 MB on two machines of four: 7/8 of the weights for a gather over all, 3/4 inside."""
    units = [Unit(8e6, 8e6), Unit(8e6, 4e6)]  # half of the second is frozen

    def sent(strategy, gloo=False, number=1, every=1):
        passes = Passes(number, every)
        found = scaling.collectives(scaling.shards(units, FOUR_BY_TWO, strategy, gloo), passes)
        return sum(one.sent for one in found), sum(one.crossing for one in found)

    ddp = scaling.ddp_sums(12e6, 25, FOUR_BY_TWO)
    assert [one.sent for one in ddp] == [one.crossing for one in ddp] == [2 * 7 / 8 * 12e6]
    gather, scatter = 7 / 8 * 16e6, 7 / 8 * 12e6
    assert sent("fsdp") == pytest.approx((2 * gather + scatter,) * 2)
    assert sent("fsdp", gloo=True) == pytest.approx((2 * gather + 2 * scatter,) * 2), "gloo scatters by an all-reduce"
    inside, between = 3 / 4 * (2 * 16e6 + 12e6), 2 * 1 / 2 * 12e6 / 4
    assert sent("hsdp") == pytest.approx((inside + between, 4 * between))
    for every, sums in ((1, 5), (2, 3), (3, 2), (0, 1)):
        assert sent("fsdp", number=5, every=every)[0] == pytest.approx(5 * 2 * gather + sums * scatter)
        assert sent("hsdp", number=5, every=every)[1] == pytest.approx(4 * between), "copies are added up once a step"
    assert scaling.shards(units, Place(1, 1, INSIDE, CABLE), "fsdp", False)[0].gather.sent == 0, "alone"


def test_units_are_gathered_one_ahead_and_scattered_behind():
    """Four equal units and the root's none: forward 4 s, backward 8 s; a gather takes 1/2 s, a scatter 1 s."""
    link = Link(0.0, 1.0)
    place, step = Place(1, 2, link, link), Step(backward=8.0, rest=1.0, forward=4.0)

    def took(gather_s, scatter_s, passes=1, gloo=False, every=1):
        units = [Unit(2 * gather_s, 2 * scatter_s)] * 4
        each = scaling.shards(units, place, "fsdp", gloo)
        return scaling.sharded_s(step, units, each, Passes(passes, every), place, gloo)

    assert took(1e-9, 0.0) == pytest.approx(13.0)
    # The first gather and the last scatter are waited for; all others hide.
    assert took(0.5, 1.0) == pytest.approx(13.0 + 0.5 + 1.0)
    assert took(0.25, 0.5, passes=2) == pytest.approx(13.0 + 2 * 0.75)
    assert took(0.25, 0.5, passes=2, every=0) == pytest.approx(13.0 + 2 * 0.25 + 0.5)
    # A link that is slower than all never waits: eight gathers and four scatters.
    assert took(10.0, 20.0) == pytest.approx(1.0 + 8 * 10.0 + 4 * 20.0)
    # gloo waits for each, and sends a scatter twice.
    assert took(0.5, 1.0, gloo=True) == pytest.approx(13.0 + 4 * (0.5 + 0.5 + 2 * 1.0))


def test_the_units_of_a_model():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Linear(10, 10, bias=False)
            self.blocks = torch.nn.ModuleList(torch.nn.ModuleDict({"one": torch.nn.Linear(5, 5)}) for _ in range(2))
            self.blocks[1].requires_grad_(False)

    def sizes(**ddp):
        task = SimpleNamespace(fsdp_units=lambda model: None)
        return probe.units_mb(SimpleNamespace(model=Model(), task=task, cfg=config.Config(ddp=DDP(**ddp))))

    assert sizes() == [pytest.approx(pair) for pair in ((4e-4, 4e-4), (1.2e-4, 1.2e-4), (1.2e-4, 0))]
    assert sizes(gather_dtype="bf16") == [pytest.approx(pair) for pair in ((2e-4, 4e-4), (6e-5, 1.2e-4), (6e-5, 0))]


@pytest.mark.parametrize(
    ("text", "link"),
    [("10gbit", (0, 1.25e9)), ("200mbit,50us", (5e-5, 25e6)), ("1gbit,2ms", (2e-3, 1.25e8)), ("2tbit", (0, 2.5e11))],
)
def test_a_link_in_words(text, link):
    assert scaling.parse_link(text) == pytest.approx(link)


@pytest.mark.parametrize("text", ["10", "10gbit,5", "fast", "gbit", "10gb"])
def test_no_link(text):
    with pytest.raises(LockstepError, match="is no link"):
        scaling.parse_link(text)


# ---- tools/tune.py ----


@pytest.mark.slow
def test_the_largest_batch_and_a_delta_that_trains(launch, tmp_path):
    """Memory runs out on rank 1 alone, from 12 samples on."""
    out = tmp_path / "tuned.yaml"
    words = [FAULTY, *SO_MANY, "fault.fits=11", "batch_size=4", "dataset.samples=200"]
    done = succeed(launch.python("tools/tune.py", "--processes", "2", "--seconds", "0.2", "--out", out, *words))
    assert "| out of memory |" in done.out and "largest batch that fits: 8 (memory runs out at 16)" in done.out
    tuned = yaml.safe_load(out.read_text())
    assert tuned["task"] == FAULTY and tuned["batch_size"] in (4, 8)
    run = succeed(
        launch.torchrun(2, "train.py", "--config", out, *SO_MANY, "fault.fits=11", f"save_dir={tmp_path / 'r'}")
    )
    assert f"{tuned['batch_size']} per process x 2 processes" in run.out
    again = launch.python("tools/tune.py", "--out", out, *words)
    assert again.code == 2 and again.errors == [
        f"error: {out} is there already (--out): remove it, or give another name"
    ]


@pytest.mark.parametrize(("before", "code", "batch"), [(0, 130, None), (2, 130, 24), (5, 130, 24)])
def test_what_was_measured_before_ctrl_c_is_written(monkeypatch, tmp_path, capfd, before, code, batch):
    """While batches are tried, and while the rest is."""
    rates, out = iter([100, 200, 50, 40, 90]), tmp_path / "tuned.yaml"

    def probe(words, settings, *about):
        if len(tried) == before:
            raise LockstepError("interrupted", exit_code=130)
        tried.append(settings)
        more = {"global_batch": 12, "num_samples": 999, "memory_mb": 1.0, "phases_ms": {"forward": 1.0}}
        about = {"device": "cpu", "precision": "off", "memory_format": "auto", "compile": "off", "waited_share": 0.0}
        return {"samples_per_s": next(rates), "batch_size": settings["batch_size"], "gradients_mb": 0.0} | more | about

    tried = []
    monkeypatch.setattr(tune, "probe", probe)
    assert tune.main([TOY, "--out", str(out), "--max-batch", "48"]) == code
    assert out.exists() is bool(batch) and (batch or capfd.readouterr().err.startswith("error: interrupted"))
    if batch:
        assert "# interrupted: the fastest of what was tried" in out.read_text()
        assert yaml.safe_load(out.read_text())["batch_size"] == batch


@pytest.mark.slow
def test_a_global_batch_is_kept_and_only_cut(launch, tmp_path):
    words = [TOY, "global_batch=6", "--max-batch", "3", "--out", "", "--json", "--seconds", "0.1"]
    done = succeed(launch.python("tools/tune.py", *words))
    found = json.loads(done.out)
    cuts = [row["batch_size"] for row in found["tried"] if "num_workers" not in row["settings"]]
    assert cuts[:3] == [1, 2, 3] and {row["global_batch"] for row in found["tried"]} == {6}
    assert found["settings"]["batch_size"] in cuts and found["settings"]["global_batch"] == 6


@pytest.mark.parametrize(
    ("processes", "batch", "fits"), [(1, 100, True), (1, 101, False), (4, 17, True), (4, 18, False), (4, 100, False)]
)
def test_the_next_batch_is_not_tried_where_all_processes_together_would_fill_memory(
    monkeypatch, processes, batch, fits
):
    """Each has taken 100 MB and 10 MB a sample, and 1100 MB are free: then the kernel kills, whom it likes."""
    free = "MemTotal:   9999999 kB\nMemFree:       9999 kB\nMemAvailable: 1100000 kB\n"
    monkeypatch.setattr(
        tune, "Path", lambda name: SimpleNamespace(read_text={"/proc/meminfo": lambda errors: free}[name])
    )
    rows = [{"batch_size": n, "memory_mb": 100.0 + 10 * n, "device": "cpu", "out_of_memory": False} for n in (4, 8)]
    assert tune.would_not_fit(rows, batch, processes) is not fits
    assert not tune.would_not_fit([rows[0], rows[1] | {"device": "cuda:0"}], batch, processes), "there it is tried"


def test_what_is_chance_is_not_taken(monkeypatch):
    """Of batches that are about as fast the smallest. Then all gets faster from one measurement to the next, as on a
    machine whose neighbours leave; of the settings only two loader processes make it so, and four by a chance more."""
    pace = itertools.chain([1.0] * 5, (1.05**n for n in itertools.count()))

    def measured(words, settings, processes, seconds, threads):
        rate = {4: 1.0, 8: 1.02, 16: 2.0, 32: 2.02, 64: 2.04}[settings["batch_size"]]
        rate *= next(pace) * {2: 1.5, 4: 1.6}.get(settings.get("num_workers"), 1.0)
        about = {"device": "cpu", "precision": "off", "memory_format": "contiguous", "compile": "off"}
        about |= {"memory_mb": 1.0, "gradients_mb": 1.0, "phases_ms": {"forward": 1.0}, "global_batch": 0}
        return about | settings | {"num_samples": 64, "samples_per_s": rate}

    monkeypatch.setattr(tune, "probe", measured)
    options = argparse.Namespace(processes=1, seconds=1.0, max_batch=0, json=True)
    tuning = tune.Tuning(options, [], config.Config(batch_size=4))
    tuning.cores = 4
    best, largest = tuning.find_batch()
    assert best["settings"] == {"batch_size": 16} and largest.startswith("largest batch that fits: 64 (there are no")
    assert tuning.find_rest(best)["settings"] == {"batch_size": 16, "num_workers": 2}


def test_a_training_that_cannot_start_is_said_once(launch, tmp_path):
    done = launch.python("tools/tune.py", "--out", "", TOY, "dataset.samples=0")
    assert done.code == 2 and len(done.errors) == 1 and "the training set is empty" in done.errors[0], done.err


# ---- tools/benchmark.py ----


@pytest.mark.slow
def test_the_tables_of_the_guides(launch):
    words = ["--processes", "1,2", "--rounds", "1", "--seconds", "0.2", "--predict", "8", "--link", "10gbit,50us"]
    done = succeed(launch.python("tools/benchmark.py", *words, "--machines", "2", TOY))
    rows = [line.split("|")[1:4] for line in done.out.splitlines() if line.startswith(("| 1 ", "| 2 "))]
    assert [[int(cell) for cell in row] for row in rows] == [[1, 12, 12], [2, 12, 24], [1, 12, 12], [2, 6, 12]]
    firsts = [line.split("|") for line in done.out.splitlines() if line.startswith("| 1 ")]
    assert all(row[6].strip() == "1.00" and row[7].strip() == "100%" for row in firsts)
    found = [line.split("|")[1:4] for line in done.out.splitlines() if line.startswith(("| ddp", "| fsdp", "| hsdp"))]
    assert [row[0].strip() for row in found] == ["ddp", "fsdp", "hsdp"]
    sent, crossing = zip(*[(float(row[1]), float(row[2])) for row in found], strict=True)
    assert sent[1] >= sent[0] == crossing[0] and crossing[1] == sent[1] and 0 < crossing[2] < crossing[0], found
    assert (
        "Predicted for 8 processes on 2 machines" in done.out
        and "latency 50.0 us, 10 Gbit/s" in done.out
        and "commit" in done.out
    )


@pytest.mark.slow
def test_benchmark_as_json_with_the_link_that_was_measured(launch):
    words = ["--processes", "1,2", "--rounds", "1", "--seconds", "0.2", "--scaling", "weak", "--predict", "2", "--json"]
    done = succeed(launch.python("tools/benchmark.py", *words, TOY, "model.width=512"))
    found = json.loads(done.out)
    one, two = (case["found"][0] for case in found["measured"])
    assert (one["processes"], two["processes"]) == (1, 2) and set(two["sum_ms"]) == {
        str(1 << n) for n in range(10, 25, 2)
    }
    assert one["gradients_mb"] == pytest.approx(4 * (8 * 512 + 512 + 512 * 4 + 4) / 1e6)
    assert one["phases_ms"].get("gradient sync", 0) == 0 < two["phases_ms"]["gradient sync"]
    assert [row["strategy"] for row in found["predicted"]["strategies"]] == ["ddp", "fsdp"]
    assert found["predicted"]["beta_gbit"] > 0 and 0 < found["predicted"]["efficiency"] <= 1
    assert {"git_commit", "packages", "cpu_cores"} <= one["environment"].keys()


def test_where_there_are_gpus_dataparallel_stands_beside():
    """And with 3 processes, of which there are no GPUs for, it does not; what ran out of memory keeps its row."""
    rows = benchmark.cases(config.Config(batch_size=8, global_batch=0), [1, 2, 3], ["weak"], gpus=2)
    assert [(case.processes, case.with_dp) for case in rows] == [(1, False), (2, False), (2, True), (3, False)]
    assert rows[2].settings["multi_gpu"] == "dp" and rows[2].settings["gpu_ids"] == "0,1"
    for case, rates in zip(rows, ([90, 100, 130], [150, 160, 170], [120], []), strict=True):
        spent = {"data loading": 1, "host to device": 1, "forward": 5, "backward": 2, "gradient sync": 1}
        more = {"batch_size": 8, "global_batch": 8 * case.processes, "memory_mb": 70, "phases_ms": spent}
        case.found = [{"samples_per_s": rate, "step_ms": 8e3 * case.processes / rate} | more for rate in rates]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in benchmark.table(rows).splitlines()[2:]]
    assert cells[0] == ["1", "8", "8", "12.5", "100 (90 - 130)", "1.00", "100%", "70", "20%", "10%"]
    assert cells[1][:7] == ["2", "8", "16", "10", "160 (150 - 170)", "1.60", "80%"]
    assert cells[2][0] == "2 (DP)" and cells[2][5:7] == ["1.20", "60%"] and cells[3] == ["3", "8", "out of memory"]


@pytest.mark.parametrize(("tool", "words", "said"), [
    (benchmark, ["--link", "fast"], "'fast' is no link"),
    (benchmark, ["--processes", "1,x"], "'1,x' are no numbers of processes"),
    (benchmark, ["--processes", "2,0"], "'2,0' are no numbers of processes"),
    (benchmark, ["--processes", "2", "--predict", "4"], "a prediction starts from one process"),
    (benchmark, ["--predict", "6", "--machines", "4"], "6 processes are not the same number on each of 4 machines"),
    (benchmark, ["--machines", "0"], "of 0 machines (--machines)"),
    (benchmark, ["--inside", "fast"], "'fast' is no link (--inside)"),
    (benchmark, ["lr=x"], "lr=x (command line): give a number"),
    (tune, ["--processes", "0"], "0 is no number of processes (--processes): give"),
])  # fmt: skip
def test_what_a_person_can_get_wrong(capfd, tool, words, said):
    assert tool.main(words) == 2
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and said in errors[0]
