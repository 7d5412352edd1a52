"""Reports: the plan of a run, its profile, the record of a step, trackers."""

from __future__ import annotations

from pathlib import Path

from engine import hooks
from engine.run import Run
from plugins.reporting import plan_text, trackers
from plugins.reporting.plan_text import announce, check_trackers, print_plan, training
from plugins.reporting.profile import Profile
from plugins.reporting.step_record import StepRecord

__all__ = ["announce", "check_trackers", "print_plan", "training"]


def open_profile(run: Run, folder: Path, wanted: bool) -> Profile | None:
    return Profile(run, folder) if wanted else None


def open_step_record(run: Run, folder: Path, wanted: bool) -> StepRecord | None:
    return StepRecord(run, folder) if run.cfg.record else None


hooks.recorders.add(open_profile)
hooks.recorders.add(open_step_record)
hooks.sinks.add(trackers.open_trackers)
hooks.events.add(plan_text.on_event)
