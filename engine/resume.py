"""Compare a run with the checkpoint that it resumes."""

from __future__ import annotations

from typing import Any

from engine import code_digest, config
from engine.code_digest import code_of as code_of
from engine.contract import Task
from engine.data.fingerprint import Fingerprint, compare, rounding_text
from engine.errors import LockstepError, console, few
from engine.files.archive import CheckpointState
from engine.plan import Plan


def check_same_run(
    saved: CheckpointState,
    args: config.Args,
    task: Task,
    plan: Plan,
    data: Fingerprint,
    split: str = "",
) -> CheckpointState:
    """Raise LockstepError, with the differences, under a config that would make a different run. If
    a split is scored, compare its data and warn. Return `saved` with the changes that --force
    allows."""
    if saved.path is None:
        return saved
    changed_code = code_changes(saved, args.cfg.task)
    if changed_code:
        console.warning(f"{changed_code}\n")
    if split == "test":
        check_test(saved, data)
    if split in ("val", "any", "train"):
        _warn_of_other_data(saved, data, split)
    if split:
        return saved
    differences = _differences(saved, args.cfg, task, plan, data)
    named = args.force if isinstance(args.force, tuple) else ()
    refused = {key: text for key, text in differences.items() if key not in named}
    if refused and args.force is True:
        console.warning(
            f"--force: this is not the run of {saved.path}: {'; '.join(refused.values())}"
        )
    elif refused:
        hint = ""
        if saved.global_batch != plan.global_batch:
            hint = f" (global_batch={saved.global_batch} keeps it)"
        what = f"this is not the run of the checkpoint: {'; '.join(refused.values())}"
        todo = f"change these back{hint}, start a new run with another save_dir, or insist with "
        todo += f"--force {','.join([*named, *refused])}"
        raise LockstepError(what, str(saved.path), todo)
    if changed_code:
        differences["code"] = changed_code
    return saved._replace(changes=differences)


def _warn_of_other_data(saved: CheckpointState, data: Fingerprint, split: str) -> None:
    """Print a warning if the data of an evaluation are not the data of the checkpoint."""
    side = "train" if split == "train" else ""
    difference = compare(data_of(saved), data, side)
    if difference.parts and side:
        console.warning(f"the data are not those of the checkpoint ({difference})\n")
    elif difference.parts:
        console.warning(
            f"the data, or their split, are not those of the checkpoint ({difference}): the "
            "scored data may overlap the training data\n"
        )
    elif difference.rounding:
        console.info(f"{rounding_text(difference)}\n")


def data_of(saved: CheckpointState) -> Fingerprint:
    """Return the fingerprint of the data in a checkpoint."""
    return Fingerprint(saved.data, saved.data_facts)


def code_changes(saved: CheckpointState, task_name: str) -> str:
    """Return a line about code that has changed since the checkpoint, or an empty text."""
    changes = code_digest.changes(saved.code, str(saved.config.get("task", "")), task_name)
    if not changes:
        return ""
    return f"the code has changed since the checkpoint of step {saved.step}: {few(changes)}"


def check_test(saved: CheckpointState, data: Fingerprint) -> None:
    """Raise LockstepError unless the data are the data that the checkpoint's training has set
    aside."""
    then = Fingerprint(saved.test.get("fingerprint", ""), saved.test.get("facts", {}))
    difference = compare(then, data)
    if difference.parts:
        what = "its training set none aside"
        todo = "train anew with a test set"
        if saved.test:
            what = f"these are not the data that its training set aside ({difference})"
            todo = "give the data and the split of its config"
        raise LockstepError(f"no test of this checkpoint: {what}", str(saved.path), todo)


def _differences(
    saved: CheckpointState, cfg: Any, task: Task, plan: Plan, data: Fingerprint
) -> dict[str, str]:
    """Return the differences between this run and the saved one: key -> text."""
    now = config.flatten(config.to_dict(cfg))
    # a key that did not exist then had its default
    then = config.defaults(cfg) | config.flatten(saved.config)
    if now["task"] != then["task"]:  # nothing else would be comparable
        return {"task": f"task: {then['task']} -> {now['task']}"}
    found = {
        key: [f"{key}: {then.get(key, 'absent')} -> {now.get(key, 'absent')}"]
        for key in sorted(now.keys() | then.keys())
        if now.get(key) != then.get(key) and not config.may_differ(key, task.resumable_keys)
    }
    # else it follows from epochs and steps
    moved = now["schedule.horizon"] != then.get("schedule.horizon")
    for key, name, old, new in (
        (
            "schedule.horizon",
            "schedule.horizon",
            saved.horizon,
            plan.horizon if moved else saved.horizon,
        ),
        ("global_batch", "global batch", saved.global_batch, plan.global_batch),
        ("data", "training samples", saved.num_samples, plan.num_samples),
    ):
        if old != new:
            found.setdefault(key, []).append(f"{name}: {old} -> {new}")
    difference = compare(data_of(saved), data)
    if difference.parts:
        found.setdefault("data", []).append(f"other data ({difference})")
    elif difference.rounding:
        console.info(f"{rounding_text(difference)}\n")
    return {key: "; ".join(texts) for key, texts in found.items()}
