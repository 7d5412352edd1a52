"""Reports: the plan of a run, its profile, the record of a step, trackers."""

from __future__ import annotations

from pathlib import Path

from engine import hooks
from engine.run import Run
from plugins.reporting import plan_text, trackers
from plugins.reporting.plan_text import announce as announce
from plugins.reporting.plan_text import check_trackers as check_trackers
from plugins.reporting.plan_text import print_plan as print_plan
from plugins.reporting.plan_text import training as training
from plugins.reporting.profile import Profile
from plugins.reporting.step_record import StepRecord


def open_profile(run: Run, folder: Path, wanted: bool) -> Profile | None:
    return Profile(run.world, folder) if wanted else None


def open_step_record(run: Run, folder: Path, wanted: bool) -> StepRecord | None:
    return StepRecord(run, folder) if run.cfg.record else None


hooks.recorders.add(open_profile)
hooks.recorders.add(open_step_record)
hooks.sinks.add(trackers.open_trackers)
hooks.events.add(plan_text.on_event)
