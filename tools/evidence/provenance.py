"""Print the training samples of a checkpoint: which samples, from which sources, how often, when
first and last, and which samples never.

python tools/provenance.py RUN                     counts by source and class, and the root: one
                                                   hash of all uses
python tools/provenance.py RUN --list seen.csv     every use: step, epoch, position, sample, source,
                                                   class, times so far
python tools/provenance.py RUN --proof 17          one line that proves to anybody the use of sample
                                                   17
python tools/provenance.py RUN --no-contents       counts alone: no sample is read, so there is no
                                                   root

RUN is the folder of a run (the best checkpoint is read) or a checkpoint. A following
dataset.root=... is the present place of the data. The order of the samples is a function of (seed,
epoch), so progress and config determine all uses. Steps count from 1; epochs, positions and samples
count from 0, as in metrics.jsonl. A position is a sample's place in the order of the whole epoch.
Uses by the weights of init_from are not counted.

The root is the root of RFC 6962's Merkle tree over the uses, in the order of (epoch, position). The
root does not depend on the number of processes. Hashes are SHA-256. n8 is an unsigned integer of 8
bytes, big-endian.

    use      00 | sample (32 bytes) | n8 epoch | n8 position
    node     01 | left | right; the left half of n uses has the largest power of two below n
    sample   for each tensor or value, by the order of names: n8 length, name, n8 length,
             content
    content  of a tensor: shape and type as text, such as "(1, 6, 128) torch.float32", and the
             bytes of the elements; of texts and numbers in a list: Python's repr

A sample is the dataset's batch of one, before `prepare`. A sample with random numbers is drawn with
the seed of an evaluation.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import tasks
from data_loader import TrainSampler
from engine import api, config, errors, resume
from engine.comm.world import World
from engine.contract import per_sample
from engine.data.fingerprint import Fingerprint, compare, contents, fingerprint
from engine.data.samples import Fetcher
from engine.data.splits import load_datasets
from engine.errors import LockstepError, amount
from engine.files.atomic import write_atomically
from engine.plan import make_plan
from engine.seeds import preserve_rng_state, seed_everything
from formats.lab.mixup import Mixed
from plugins.resilience import status
from tools.arguments import Parser
from tools.output import print_json
from tools.running import alone, guarded, warn_once
from tools.use.evaluate import TRUST, aligned, of_run

ONE_PASS = {
    "virtual_workers": 0,
    "ddp.shares": [],
    "gradient_accumulation_steps": 1,
    "multi_gpu": "none",
    "compile": "off",
}
"""Settings of one process and one pass a step. The order of the samples does not depend on these
settings."""

OF_THE_ORDER = ("seed", "sampler", "drop_last", "exclude")
CHANGED = (*OF_THE_ORDER, "global batch", "data", "training samples", "dataset.")
"""Prefixes of changes by --force after which the order of one config does not determine the
uses."""

ROWS = 40
"""The largest number of printed rows of a table; --json has all rows."""


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="provenance.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, or a checkpoint")
    add("--list", type=Path, metavar="FILE", help="write every use as a row of a CSV")
    add("--proof", type=int, metavar="N", help="print the audit path of sample N's first use")
    add("--no-contents", action="store_true", help="read no sample: counts without a root")
    add(
        "--json",
        action="store_true",
        help="one JSON object on stdout, with all sources and samples never seen",
    )
    add("--trust", action="store_true", help=TRUST)
    options, rest = parser.parse_known_args(argv)

    def work(args: config.Args) -> int:
        return _print_uses(args, options)

    return guarded([options.run, *rest], work, partial(of_run, options.trust), options.json)


def _print_uses(args: config.Args, options: argparse.Namespace) -> int:
    alone("one process counts the samples", "provenance.py")
    if options.proof is not None and options.no_contents:
        raise LockstepError("a proof is of contents", "--no-contents", "drop it, or --proof")
    seen, found = count_uses(args, not options.no_contents, options.proof)
    if options.list:
        _write(seen, options.list)
    if options.json:
        print_json(dict.fromkeys(("sources", "classes", "root")) | found)
    else:
        print("\n".join(_lines(found, options)))
    return status.set_exit_code(errors.DONE)


def count_uses(
    args: config.Args, contents_too: bool, proof: int | None = None
) -> tuple[Seen, dict[str, Any]]:
    """Return the uses of the checkpoint `resume`, and the counts; with `contents_too` also the
    root."""
    seen = _read(args, contents_too)
    return seen, _counts(seen) | (_rooted(seen, proof) if contents_too else {})


# ---- the used samples
# --------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """The samples that a checkpoint has used.

    sampler  of the training, in one process
    sources  (N,) name of the source of each sample; None if the dataset has no names
    labels   (N,) name of the class of each sample, or None
    skipped  steps that changed no weight
    """

    path: Path
    progress: dict[str, Any]
    sampler: TrainSampler
    sources: np.ndarray | None
    labels: np.ndarray | None
    skipped: list[int]
    init_from: str

    def epochs(self) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (epoch, steps, positions, samples) of each epoch; the arrays are (n,), in the order
        of positions. The partner of a sample in a mixture follows the sample at the same position.
        """
        sampler, plan, last = self.sampler, self.sampler.plan, self.progress["epoch"]
        for epoch in range(last + 1):
            sampler.set_epoch(epoch)
            stop = self.progress["position"] if epoch == last else plan.epoch_samples
            order = sampler.order()[:stop]
            positions = np.flatnonzero(~sampler.excluded[order])
            which = order[positions]
            if isinstance(sampler.dataset, Mixed):
                drawn = [sampler.dataset.partner(seed) for seed in sampler.seeds_at(positions)]
                mixed = np.array([share < 1 for _, share in drawn], dtype=bool)
                rows = np.repeat(np.arange(len(which)), 1 + mixed)
                positions, which = positions[rows], which[rows]
                second = np.append(False, rows[1:] == rows[:-1])
                which[second] = np.array([other for other, _ in drawn], dtype=np.int64)[mixed]
            yield (
                epoch,
                epoch * plan.steps_per_epoch + positions // plan.global_batch + 1,
                positions,
                which,
            )


def _read(args: config.Args, contents_too: bool) -> Seen:
    """Load the checkpoint and the data. Raises LockstepError for other data, or for a run with more
    than one order."""
    path = Path(args.cfg.resume)
    saved = api.read(path)
    warn_once(resume.code_changes(saved, args.cfg.task))
    then = api.settings_of(saved, args.cfg)
    cfg = config.changed(args.cfg, {key: then[key] for key in OF_THE_ORDER})
    skipped = _skipped_steps(path, saved.progress)
    task = tasks.load(cfg.task)(cfg)
    task.resuming = True
    train_set, val_set = load_datasets(task, "", None)
    data = fingerprint(train_set, val_set, random_samples="stop" if contents_too else "warn")
    sizes = saved.sizes
    difference = compare(Fingerprint(saved.data, saved.data_facts), data)
    if len(train_set) != sizes.num_samples or difference.parts:
        what = f"the data are not those of the checkpoint ({difference})"
        raise LockstepError(what, str(path), "say where they lie, such as dataset.root=FOLDER")
    one = config.changed(cfg, ONE_PASS | {"batch_size": sizes.global_batch, "global_batch": 0})
    plan = make_plan(one, World(0, 0, 1, torch.device("cpu")), sizes.num_samples)
    labels, sources = (per_sample(train_set, name) for name in ("labels", "sources"))
    balanced = labels if cfg.sampler == "balanced" else None
    sampler = TrainSampler(train_set, plan, 0, cfg.seed, balanced, cfg.exclude)
    progress, names = saved.progress, getattr(task, "classes", [])
    epoch, position = progress["epoch"], progress["position"]
    steps = epoch * plan.steps_per_epoch + -(-position // plan.global_batch)
    if (steps, epoch * plan.epoch_samples + position) != (progress["step"], progress["samples"]):
        raise _not_one_order(path, f"{progress['step']} steps are not {steps}")
    if labels is not None and labels.dtype.kind in "iu" and len(names) > labels.max():
        labels = np.array(names)[labels]
    return Seen(path, progress, sampler, sources, labels, skipped, str(then["init_from"]))


def _not_one_order(path: Path, why: str) -> LockstepError:
    what = (
        "the run was changed by --force on its way, so one order does not tell what it has "
        f"seen ({why})"
    )
    return LockstepError(what, str(path), "give a checkpoint from before the change")


def _skipped_steps(path: Path, progress: dict[str, Any]) -> list[int]:
    """Return the steps up to the checkpoint that changed no weight, from the log.

    Raises LockstepError if --force changed the order before the checkpoint.
    """
    skipped, changes = list[int](), list[str]()
    log = path.parent / "metrics.jsonl"
    for line in log.read_text("utf-8", "replace").splitlines() if log.is_file() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a torn line
            event = json.loads(line)
            if event["event"] == "skipped" and event["skipped_step"] <= progress["step"]:
                skipped.append(int(event["skipped_step"]))
            elif event["event"] == "changed" and event["step"] < progress["step"]:
                changes += event["change"].split("; ")
    if other := next((change for change in changes if change.startswith(CHANGED)), ""):
        raise _not_one_order(path, other)
    return skipped


def _counts(seen: Seen) -> dict[str, Any]:
    """Return the number of uses of the samples, and of each source and class."""
    plan, samples = seen.sampler.plan, len(seen.sampler.excluded)
    times = np.zeros(samples, np.int64)
    first = np.full(samples, sys.maxsize)
    last = np.zeros(samples, np.int64)
    for _, steps, _, which in seen.epochs():
        times += np.bincount(which, minlength=samples)
        np.minimum.at(first, which, steps)
        np.maximum.at(last, which, steps)

    def at(step: int) -> dict[str, int]:
        return {"step": step, "epoch": (step - 1) // plan.steps_per_epoch}

    def of(group: np.ndarray) -> dict[str, Any]:
        some = times[group]
        counts: dict[str, Any] = {
            "samples": len(some),
            "seen": int((some > 0).sum()),
            "uses": int(some.sum()),
            "fewest": int(some.min()),
            "most": int(some.max()),
        }
        if some.any():
            counts["first"] = at(int(first[group].min()))
            counts["last"] = at(int(last[group].max()))
        return counts

    progress = {name: seen.progress[name] for name in ("step", "epoch", "position")}
    found = {
        "checkpoint": str(seen.path),
        **progress,
        "global_batch": plan.global_batch,
        **of(np.arange(samples)),
    }
    for name, column in (("sources", seen.sources), ("classes", seen.labels)):
        if column is not None:
            found[name] = {each: of(group) for each, group in _groups(column.astype(str)).items()}
    found |= {
        "never": np.flatnonzero(times == 0).tolist(),
        "excluded": int(seen.sampler.excluded.sum()),
    }
    found |= {
        "skipped_steps": seen.skipped,
        "skipped": seen.progress["skipped"],
        "init_from": seen.init_from,
    }
    return found


def _groups(names: np.ndarray) -> dict[str, np.ndarray]:
    """Return {name: numbers of the samples}, for (N,) names: first numbers in numeric order, then
    texts."""
    values, number = np.unique(names, return_inverse=True)
    members = np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])
    groups = dict(zip(values.tolist(), members, strict=True))
    return {
        name: groups[name]
        for name in sorted(groups, key=lambda name: (len(name) * name.isdecimal() or 99, name))
    }


def _write(seen: Seen, path: Path) -> None:
    """Write a row for each use."""
    times = np.zeros(len(seen.sampler.excluded), np.int64)

    def fill(file: Any) -> None:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["step", "epoch", "position", "sample", "source", "class", "times"])
        for epoch, *columns in seen.epochs():
            for step, position, sample in zip(
                *(column.tolist() for column in columns), strict=True
            ):
                times[sample] += 1
                of = [
                    "" if names is None else names[sample] for names in (seen.sources, seen.labels)
                ]
                rows.writerow([step, epoch, position, sample, *of, times[sample]])
            file.write(text.getvalue().encode())
            text.seek(text.truncate(0))

    try:
        write_atomically(path, fill)
    except OSError as error:
        raise LockstepError(
            f"cannot write the list: {error.strerror or error}", str(path), "give another"
        ) from error


# ---- the root
# --------------------------------------------------------------------------------------------------


def sample_digest(parts: dict[str, bytes]) -> bytes:
    """Return the SHA-256 of a sample, from the content of each part by name."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        for part in (name.encode(), parts[name]):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def use_hash(digest: bytes, epoch: int, position: int) -> bytes:
    """Return the leaf of one use of a sample."""
    return hashlib.sha256(
        b"\x00" + digest + epoch.to_bytes(8, "big") + position.to_bytes(8, "big")
    ).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def merkle(leaves: Iterable[bytes], number: int = -1) -> tuple[bytes, list[bytes]]:
    """Return the root of RFC 6962's tree over the hashes of the leaves, and the audit path of leaf
    `number`, bottom-up. The memory holds one node of each height."""
    nodes: list[tuple[int, int, bytes]] = []  # (first leaf, number of leaves, hash)
    path: list[bytes] = []

    def join() -> None:
        (begin, left_size, left), (middle, right_size, right) = nodes[-2:]
        if begin <= number < middle + right_size:
            path.append(right if number < middle else left)
        nodes[-2:] = [(begin, left_size + right_size, node_hash(left, right))]

    for count, leaf in enumerate(leaves):
        nodes.append((count, 1, leaf))
        while len(nodes) > 1 and nodes[-2][1] == nodes[-1][1]:
            join()
    while len(nodes) > 1:
        join()
    return (nodes[0][2] if nodes else hashlib.sha256().digest()), path


def holds(proof: dict[str, Any]) -> bool:
    """Return whether a proof leads from the sample's digest to the root.

    The algorithm is RFC 9162, 2.1.3.2. The caller must also compare the root, and the digest of the
    caller's own sample.
    """
    node = use_hash(bytes.fromhex(proof["digest"]), proof["epoch"], proof["position"])
    at, last = proof["leaf"], proof["leaves"] - 1
    if not 0 <= at <= last:
        return False
    for other in map(bytes.fromhex, proof["path"]):
        if not last:
            return False
        if at % 2 or at == last:
            node = node_hash(other, node)
            while not at % 2 and at:
                at, last = at >> 1, last >> 1
        else:
            node = node_hash(node, other)
        at, last = at >> 1, last >> 1
    return not last and node.hex() == proof["root"]


def _rooted(seen: Seen, sample: int | None) -> dict[str, Any]:
    """Return the root, and the proof of a sample's first use. Every used sample is read."""
    uses, first = 0, None
    used = np.zeros(len(seen.sampler.excluded), dtype=bool)
    for epoch, _, positions, which in seen.epochs():
        if first is None and sample is not None and len(at := np.flatnonzero(which == sample)):
            first = uses + int(at[0]), epoch, int(positions[at[0]])
        used[which] = True
        uses += len(which)
    if sample is not None and first is None:
        raise LockstepError(
            f"sample {sample} was never seen", "--proof", "give one that was: --list has them"
        )
    dataset: Any = seen.sampler.dataset
    fetcher = Fetcher(dataset.dataset if isinstance(dataset, Mixed) else dataset)
    digests = np.zeros((len(used), 32), np.uint8)
    with preserve_rng_state():
        seed_everything(0)
        for index in _bar(np.flatnonzero(used).tolist(), int(used.sum()), "Samples"):
            digests[index] = np.frombuffer(sample_digest(contents(fetcher, index)), np.uint8)

    def leaves() -> Iterator[bytes]:
        for epoch, _, positions, which in seen.epochs():
            for position, index in zip(positions.tolist(), which.tolist(), strict=True):
                yield use_hash(digests[index].tobytes(), epoch, position)

    root, path = merkle(_bar(leaves(), uses, "Uses"), first[0] if first else -1)
    found: dict[str, Any] = {"root": root.hex(), "leaves": uses}
    if first:
        about = {
            "sample": sample,
            "digest": digests[sample].tobytes().hex(),
            "epoch": first[1],
            "position": first[2],
        }
        found["proof"] = about | {"leaf": first[0], **found, "path": [node.hex() for node in path]}
    return found


def _bar(items: Iterable[Any], total: int, name: str) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(
        items,
        name,
        total,
        leave=False,
        disable=not sys.stderr.isatty(),
        mininterval=0.5,
        dynamic_ncols=True,
    )


# ---- print
# -------------------------------------------------------------------------------------------------


def _lines(report: dict[str, Any], options: argparse.Namespace) -> list[str]:
    place = f"step {report['step']} (epoch {report['epoch']}, position {report['position']})"
    lines = [f"{report['checkpoint']}, {place}, global batch {report['global_batch']}:"]
    never, skipped = report["never"], report["skipped"]
    some = ", ".join(map(str, never[:8]))
    if len(never) > 8:
        some += ", ..."
    lines.append(
        f"  {report['seen']} of {amount(report['samples'], 'sample')} seen, {report['uses']} times "
        "together"
    )
    lines.append(f"  {len(never)} never seen")
    if never:
        lines[-1] += f" ({some})"
    if report["excluded"]:
        lines[-1] += f"; {report['excluded']} of them excluded"
    if skipped:
        known = ", ".join(map(str, report["skipped_steps"])) or "the log does not name them"
        lines.append(
            f"  {amount(skipped, 'step')} moved no weight: {known}; samples of such steps count "
            "as seen"
        )
    if report["init_from"]:
        lines.append(
            f"  the weights began as those of {report['init_from']}: what these had seen is not "
            "counted"
        )
    for title in ("sources", "classes"):
        if title in report:
            lines += ["", *aligned(_table(title, report[title]))]
            if len(report[title]) > ROWS:
                lines.append(f"  and {len(report[title]) - ROWS} more")
    if "root" in report:
        lines += ["", f"  root  sha256 {report['root']} of {report['leaves']} uses"]
    if options.list:
        lines.append(f"  list  {options.list}")
    if "proof" in report:
        lines.append(json.dumps(report["proof"]))
    return lines


def _table(title: str, groups: dict[str, Any]) -> list[list[str]]:
    rows = [[title, "samples", "never", "uses", "each", "first: step (epoch)", "last"]]
    for name, one in [*groups.items()][:ROWS]:
        each = str(one["fewest"])
        if one["most"] > one["fewest"]:
            each += f" to {one['most']}"
        ends = [
            f"{one[end]['step']} ({one[end]['epoch']})" if end in one else "-"
            for end in ("first", "last")
        ]
        rows.append(
            [
                name,
                str(one["samples"]),
                str(one["samples"] - one["seen"]),
                str(one["uses"]),
                each,
                *ends,
            ]
        )
    return rows
