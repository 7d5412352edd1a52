"""Models that call a block twice, not at all, or in another order: with each strategy the gradient
of a plain loop, with virtual workers the same bits, or a refusal by name. There is one launch for
each strategy and number of processes."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, launching, succeed

from plugins.parallel import fsdp
from tests.tasks import repeated

RANKS, TASK = (str(ROOT / "tests" / place) for place in ("ranks/repeated.py", "tasks/repeated.py"))

CUTS = {
    "ddp 1": (1, ["ddp.strategy=ddp"]),
    "ddp 2": (2, ["ddp.strategy=ddp"]),
    "fsdp 1": (1, ["ddp.strategy=fsdp"]),
    "fsdp 2": (2, ["ddp.strategy=fsdp"]),
    "fsdp 3": (3, ["ddp.strategy=fsdp"]),
    "hsdp 2x1": (2, ["ddp.strategy=hsdp", "ddp.shards=1"]),
    "hsdp 2x2": (4, ["ddp.strategy=hsdp", "ddp.shards=2", "ddp.reduce_every=0"]),
}

KINDS = (
    "once listed twice albert siamese views raw stopped target recomputed reentrant turned depth rare nested parents "
    "method"
).split()

SOME = {
    "ddp 2": "twice depth rare".split(),
    "fsdp 2": "listed twice siamese views raw stopped reentrant turned depth rare nested parents method".split(),
    "fsdp 3": "twice rare".split(),
    "hsdp 2x1": "twice views depth".split(),
    "hsdp 2x2": "recomputed depth".split(),
}
"""The kinds that a cut takes without virtual workers, where it does not take all."""

SOME_OF_WORKERS = {
    "ddp 2": "twice rare".split(),
    "fsdp 3": "twice albert depth nested parents".split(),
}
"""The same with virtual workers."""

WORKERS = {
    "once": [(4, 6)],
    "listed": [(3, 4)],
    "twice": [(3, 8), (4, 6), (5, 2), (8, 3)],
    "albert": [(3, 3), (5, 5), (8, 3)],
    "siamese": [(5, 5)],
    "views": [(3, 4)],
    "raw": [(4, 6)],
    "stopped": [(5, 5)],
    "target": [(8, 3)],
    "recomputed": [(5, 2)],
    "reentrant": [(3, 3)],
    "turned": [(5, 5)],
    "depth": [(4, 2)],
    "rare": [(5, 5)],
    "nested": [(5, 5)],
    "parents": [(3, 8)],
    "method": [(4, 3)],
}
"""Numbers of virtual workers, and samples of a pass: workers of eight samples take 1 to 4
passes."""

REFUSED = {
    "drops": "blocks.1 was not called in a pass",
    "drops_later": "blocks.1 was not called in a pass",
    "drops_by_rank": "rank 1 calls blocks.0 where rank 0 calls blocks.1",
    "drops_on_one_rank": "rank 1 ends its forward pass where rank 0 calls blocks.2",
    "counts_by_rank": "rank 1 calls blocks.0 where rank 0 ends its forward pass",
    "backwards": "the gradients of blocks.2 were added up 2 times in a pass (virtual_workers)",
}


def plain_rows(cut):
    """{name: words} of runs without virtual workers, of two passes a step."""
    processes, strategy = CUTS[cut]
    cut_words = [*strategy, f"batch_size={repeated.SAMPLES // processes // 2}"]
    return {kind: [f"model.kind={kind}", *cut_words, *unused(cut, kind)] for kind in SOME.get(cut, KINDS)}


def unused(cut, kind):
    return ["ddp.find_unused_parameters=true"] if cut == "ddp 2" and kind == "rare" else []


def worker_rows(cut):
    rows = {}
    for kind in SOME_OF_WORKERS.get(cut, KINDS) if "hsdp" not in cut else ():
        for workers, batch in WORKERS[kind]:
            words = [
                f"virtual_workers={workers}",
                f"batch_size={batch}",
                *CUTS[cut][1],
                *unused(cut, kind),
            ]
            rows[f"{kind} {workers}"] = [f"model.kind={kind}", *words]
    return rows


def refused_rows(cut):
    kinds = {
        "fsdp 1": ["drops_later"],
        "fsdp 2": REFUSED,
        "fsdp 3": ["drops", "drops_by_rank"],
        "hsdp 2x1": ["drops_later", "drops_by_rank", "counts_by_rank"],
        "hsdp 2x2": ["drops_on_one_rank"],
    }
    processes, strategy = CUTS[cut]
    rows = {}
    for kind in kinds.get(cut, ()):
        words = [f"model.kind={kind}", *strategy]
        if kind != "backwards":  # without virtual workers it is a sum of two gradients
            rows[kind] = [*words, f"batch_size={repeated.SAMPLES // processes}"]
        if kind in ("drops_by_rank", "backwards") and "fsdp" in cut:
            rows[f"{kind} 5"] = [*words, "virtual_workers=5", "batch_size=5"]
    return rows


def other_rows(cut):
    """Sums of gradients after each, each second, the last of four passes; and weights that are sent
    as bf16."""
    rows = {}
    if cut == "fsdp 2":
        for every in (1, 2, 0):
            words = ["model.kind=twice", *CUTS[cut][1], "batch_size=3", f"ddp.reduce_every={every}"]
            rows[f"every {every}"] = words
        # Some passes of some ranks use all weights, others do not.
        rows["rare, often"] = ["model.kind=rare", *CUTS[cut][1], "batch_size=2"]
    if "fsdp" in cut:
        words = [
            "virtual_workers=5",
            "batch_size=2",
            "model.double=false",
            "amp=bf16",
            "ddp.gather_dtype=bf16",
        ]
        rows["bf16 5"] = ["model.kind=twice", *words, *CUTS[cut][1]]
    return rows


def take(folder, processes, rows):
    """Run the rows in one process group, and return by name what each rank has written of it."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [[TASK, *words, "ddp.timeout_s=60", f"save_dir={folder / name}"] for name, words in rows.items()]
    with launching() as launch:
        words = RANKS, str(folder / "outcomes"), json.dumps(runs)
        succeed(launch.python(*words) if processes == 1 else launch.torchrun(processes, *words))
    lines = (folder / "outcomes").read_text().splitlines()
    return dict(zip(rows, map(json.loads, lines), strict=True))


@pytest.fixture(scope="module")
def taken(once):
    """{cut: {row: outcomes of the ranks}}; the folder has a run's checkpoint at cut/row."""

    def build(folder):
        for cut, (processes, _) in CUTS.items():
            rows = plain_rows(cut) | worker_rows(cut) | refused_rows(cut) | other_rows(cut)
            (folder / f"{cut}.json").write_text(json.dumps(take(folder / cut, processes, rows)))

    folder = once("repeated_units", build)
    return folder, {cut: json.loads((folder / f"{cut}.json").read_text()) for cut in CUTS}


def assert_as_the_plain_loop(run, kind):
    ours, truth = torch.load(run / "last.pt", weights_only=True)["model"], repeated.plain_loop(kind)
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9, msg=f"{run.parent.name} {run.name} {name}")


def assert_refused(everyone, text):
    assert all(text in each.get("refused", "") for each in everyone), everyone


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_each_strategy_has_the_gradient_of_a_plain_loop(taken, cut):
    folder, outcomes = taken
    for row in plain_rows(cut):
        assert all("digest" in each for each in outcomes[cut][row]), (row, outcomes[cut][row])
        assert_as_the_plain_loop(folder / cut / row, row)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [cut for cut in CUTS if "hsdp" not in cut])
def test_virtual_workers_have_it_in_the_same_bits(taken, cut):
    folder, outcomes = taken
    for row in worker_rows(cut):
        digests = {each["digest"] for each in outcomes[cut][row]}
        assert digests == {outcomes["ddp 1"][row][0]["digest"]}, row
        assert_as_the_plain_loop(folder / cut / row, row.split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("cut", [cut for cut in CUTS if "ddp" not in cut])
def test_a_unit_that_is_left_out_is_refused_by_all_ranks(taken, cut):
    _, outcomes = taken
    for row in refused_rows(cut):
        assert_refused(outcomes[cut][row], REFUSED[row.split()[0]])


@pytest.mark.slow
def test_a_unit_is_added_up_once_in_each_pass_that_is_due(taken):
    """Three blocks and what is left of the model; a step has four passes."""
    folder, outcomes = taken
    for every, sums in ((1, 4), (2, 2), (0, 1)):
        assert {each["reduced"] for each in outcomes["fsdp 2"][f"every {every}"]} == {4 * sums * repeated.STEPS}, every
        assert_as_the_plain_loop(folder / "fsdp 2" / f"every {every}", "twice")


@pytest.mark.slow
def test_a_rank_may_leave_out_a_weight_of_a_unit(taken):
    folder, outcomes = taken
    assert all("digest" in each for each in outcomes["fsdp 2"]["rare, often"])
    assert_as_the_plain_loop(folder / "fsdp 2" / "rare, often", "rare")


@pytest.mark.slow
def test_weights_sent_as_bf16_have_the_same_bits_on_any_number_of_processes(taken):
    _, outcomes = taken
    digests = {each["digest"] for cut in ("fsdp 1", "fsdp 2", "fsdp 3") for each in outcomes[cut]["bf16 5"]}
    assert len(digests) == 1


LEFT_OUT = "rank 0 calls blocks.1, and rank 1 does not; the pass before calls blocks.0 there"

ENDED = {
    "drops_by_rank_later": LEFT_OUT,
    "drops_by_rank_later virtual_workers=5": LEFT_OUT,
    "stops_by_rank": "(and other ranks do not|and rank 1 does not); the pass before",
    "penalty": "a backward pass needs a weight that FSDP2 has cut again",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDED)
def test_ranks_that_part_later_are_ended_by_name(launch, tmp_path, case):
    kind, *workers = case.split()
    words = [
        TASK,
        f"model.kind={kind}",
        "ddp.strategy=fsdp",
        "ddp.timeout_s=12",
        f"save_dir={tmp_path}",
        *workers,
    ]
    done = launch.torchrun(2, "train.py", *words, "batch_size=" + ("5" if workers else "12"))
    assert done.code and any(re.search(ENDED[case], line) for line in done.errors), done.err[-3000:]


def test_a_block_that_a_list_holds_three_times_is_one_unit():
    net = repeated.Net("listed")
    assert fsdp.units(net, SimpleNamespace(fsdp_units=lambda model: None)) == [net.blocks[0]]


@pytest.mark.slow
def test_a_unit_that_runs_twice_or_as_often_as_the_step_says(tmp_path):
    """The rows of the tables above that show most, in the quick tests."""
    rows = {
        "twice 3": ["model.kind=twice", "virtual_workers=3", "batch_size=4", "steps=2"],
        "depth 5": ["model.kind=depth", "virtual_workers=5", "batch_size=5", "steps=2"],
    }
    whole = take(tmp_path / "ddp", 1, rows)
    cut = {name: [*words, "ddp.strategy=fsdp"] for name, words in rows.items()}
    cut["drops_by_rank"] = ["model.kind=drops_by_rank", "ddp.strategy=fsdp", "batch_size=12"]
    ours = take(tmp_path / "fsdp", 2, cut)
    assert_refused(ours.pop("drops_by_rank"), REFUSED["drops_by_rank"])
    for name, everyone in ours.items():
        assert {each["digest"] for each in everyone} == {whole[name][0]["digest"]}, name
