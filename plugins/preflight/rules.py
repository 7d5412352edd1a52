"""The table of settings that exclude each other.

A setting excludes a second setting, or a fact about the machine, the data or the model. A caller
states the moment and the facts that are known by then (`engine.hooks.check_settings`). The rules of
the moment are judged in the order of RULES.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from engine import hooks
from engine.config import Schedule
from engine.contract import Task
from engine.errors import LockstepError
from engine.optim.make import name_of, skips_itself
from engine.partition import deal_workers

MOMENTS = {
    "config": "after parsing, from the config alone: cfg",
    "command": "before the agent starts: cfg, strict (the command is train_ddp.py), forgotten (the "
    "warning of a launch without RANK)",
    "launch": "with the GPUs and the launcher: cfg, env, visible (the number of GPUs)",
    "plan": "with the world: cfg, world, accumulation, devices (the GPUs of DataParallel)",
    "data": "with the data: cfg, labels, train_set, val_set",
    "model": "with the model: cfg, model, task, group, processes, precision, through_gloo, torch, "
    "lacking (the missing methods of FSDP2)",
    "optimizer": "with an optimizer of the task: optim (the section of the config)",
    "scheduler": "with a scheduler of the task: schedule (the section of the config)",
    "graph": "with the run, before its first step: run, on_gpu",
    "record": "with the plan: cfg, plan",
}
"""When a rule can be judged, with the facts of the moment."""

RAISED_BY_ALL_RANKS = ("model",)
"""Moments at which all ranks raise the error, outside of `sync_errors`."""

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes in which torch.compile records CUDA graphs."""


@dataclass(frozen=True)
class Condition:
    """A setting or a fact.

    text   the name in messages. Fields in braces are facts, or `value`
    holds  a function of the facts: whether the condition holds. The result is the field `value`
    """

    text: str
    holds: Callable[[Any], Any]


@dataclass(frozen=True)
class Rule:
    """Two conditions that exclude each other, and the error. The texts may have the fields
    `setting`, `excluded` and `key`: the texts of the two conditions, and the key of the setting.

    moment    when the rule can be judged, see MOMENTS
    setting   the setting
    excluded  the second setting, or the fact
    fix       an instruction to the user
    where     the place in the message
    what      the message
    """

    moment: str
    setting: Condition
    excluded: Condition
    fix: str
    where: str = "{key}"
    what: str = "{setting} with {excluded}"


# ---- settings

SHARDS = Condition("ddp.strategy={cfg.ddp.strategy}", lambda facts: facts.cfg.ddp.strategy != "ddp")
WORKERS = Condition(
    "virtual_workers={cfg.virtual_workers}", lambda facts: facts.cfg.virtual_workers > 0
)
CUDA_GRAPH = Condition("cuda_graph=true", lambda facts: facts.cfg.cuda_graph is True)
COMPILE = Condition("compile={cfg.compile}", lambda facts: facts.cfg.compile not in ("off", "auto"))
DATA_PARALLEL = Condition("multi_gpu=dp", lambda facts: facts.cfg.multi_gpu == "dp")
COMM_HOOK = Condition(
    "ddp.comm_hook={cfg.ddp.comm_hook}", lambda facts: facts.cfg.ddp.comm_hook != "none"
)
SYNC_BN = Condition("ddp.sync_bn=true", lambda facts: facts.cfg.ddp.sync_bn)
STATIC_GRAPH = Condition("ddp.static_graph=true", lambda facts: facts.cfg.ddp.static_graph)
BALANCED = Condition("sampler=balanced", lambda facts: facts.cfg.sampler == "balanced")
RECORD = Condition("record={cfg.record}", lambda facts: facts.cfg.record > 0)
CAPPED = Condition("arithmetic=capped", lambda facts: facts.cfg.arithmetic == "capped")
RECORDED_STEP = Condition("cuda_graph=true", lambda facts: True)

SHARES = Condition("ddp.shares={value}", lambda facts: ",".join(facts.cfg.ddp.shares))
AUTO_SHARES = Condition("ddp.shares=auto", lambda facts: facts.cfg.ddp.shares == ["auto"])

# ---- facts

ALWAYS = Condition("any setting", lambda facts: True)
STRICT = Condition("train_ddp.py", lambda facts: facts.strict)
SEVERAL_PASSES = Condition(
    "{accumulation} forward passes a step", lambda facts: facts.accumulation > 1
)
NO_GPU = Condition("no GPU is visible", lambda facts: not facts.visible)


def _several_types(model: nn.Module) -> str:
    """Return the names of the weights' types, or an empty text if all weights have one type."""
    types = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    return " and ".join(sorted(types)) if len(types) > 1 else ""


def _scalar_weight(model: nn.Module) -> str:
    """Return the name of the first weight without an axis, or an empty text."""
    return next((name for name, p in model.named_parameters() if not p.ndim), "")


def _whole_copy(model: nn.Module, task: Task) -> str:
    """Return the name of the first module in the task's state that has weights with names and
    shapes of a part of the model, or an empty text."""
    parts = {_forms(part) for part in model.modules()} - {()}
    for name in task.state_attributes:
        value = getattr(task, name)
        if isinstance(value, nn.Module) and _forms(value) in parts:
            return name
    return ""


def _forms(module: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, p.shape) for name, p in module.named_parameters())


def _of_other_ranks(run: Any) -> str:
    """Return why the steps of several processes cannot be recorded, or an empty text."""
    cfg = run.cfg.ddp
    if run.world.size == 1:
        return ""
    choices = {
        "ddp.strategy": run.plan.sharded,
        "ddp.comm_hook": cfg.comm_hook != "none",
        "ddp.find_unused_parameters": cfg.find_unused_parameters,
        "ddp.sync_bn": cfg.sync_bn,
        "the task's `losses`, whose weights are sums over the processes,": bool(run.meter.terms),
    }
    for name, applies in choices.items():
        if applies:
            return f"{name} needs other processes within a pass"
    types = _several_types(run.model)
    if types and run.plan.workers:
        return f"it adds up weights of several types, {types}, over virtual workers"
    if run.cfg.cuda_graph == "auto" and not run.plan.workers:
        return "other roundings than DDP's would follow; cuda_graph=true allows them"
    return ""


KINDS_OF = {
    "decay_share": "wsd",
    "power": "polynomial",
    "gamma": "exponential step multistep plateau",
    "period_epochs": "exponential step warm-restarts",
    "period_steps": "exponential step warm-restarts",
    "period_factor": "warm-restarts",
    "milestone_epochs": "multistep",
    "milestone_steps": "multistep",
    "start_share": "one-cycle",
    "peak_momentum": "one-cycle",
    "plateau_patience": "plateau",
    "plateau_threshold": "plateau",
}
"""{key of `schedule`: the kinds that read it}; all kinds read the keys that are not here."""


def _settings(schedule: Schedule) -> dict[str, str]:
    """Return {key: text} of the settings of `schedule` that are not at their defaults."""
    texts = {}
    for name, default in vars(Schedule()).items():
        value = getattr(schedule, name)
        if value != default:
            texts[name] = f"schedule.{name}={value}"
    return texts


def _unread_setting(schedule: Schedule) -> str:
    """Return the first setting that the kind of schedule does not read, or an empty text."""
    for name, text in _settings(schedule).items():
        if name in KINDS_OF and schedule.kind not in KINDS_OF[name].split():
            return text
    return ""


def _setting_of_rates(schedule: Schedule) -> str:
    """Return the first setting that gives rates, or an empty text. A task's scheduler may read the
    horizon."""
    texts = _settings(schedule)
    texts.pop("horizon", None)
    return next(iter(texts.values()), "")


NEEDS = {
    "exponential": ("period_epochs", "period_steps"),
    "step": ("period_epochs", "period_steps"),
    "warm-restarts": ("period_epochs", "period_steps"),
    "multistep": ("milestone_epochs", "milestone_steps"),
    "inverse-sqrt": ("warmup_epochs", "warmup_steps"),
}
"""{kind: the keys of `schedule` of which the kind needs one}."""


def _missing_length(schedule: Schedule) -> str:
    """Return the keys of which the kind of schedule needs one and none is given."""
    names = NEEDS.get(schedule.kind, ())
    if any(getattr(schedule, name) for name in names):
        return ""
    return " or ".join(f"schedule.{name}" for name in names)


LARGEST_SHARE = 1e6
"""The largest share of a process, and its reciprocal the least: their sums and quotients are
finite."""


def _numbers(shares: list[str]) -> list[float]:
    """Return the shares as numbers; 0 for a text that is no number, or for a negative number."""
    numbers: list[float] = []
    for text in shares:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        numbers.append(min(number, LARGEST_SHARE) if number > 0 else 0.0)
    return numbers


def _nearest_shares(facts: Any) -> str:
    """Return the shares that are nearest to `ddp.shares` and can be dealt, as the numbers of
    workers. A process without a share takes the mean share."""
    # as in 3:1 and 75%,25%
    texts = re.split("[:; ]+", " ".join(facts.cfg.ddp.shares).replace("%", "").strip())
    numbers = _numbers(texts)[: facts.world.size]
    numbers += [sum(numbers) / len(numbers)] * (facts.world.size - len(numbers))
    if not any(numbers):
        numbers = [1.0] * len(numbers)
    return ",".join(map(str, deal_workers(facts.cfg.virtual_workers, numbers)))


def _shares_for_wrong_values(facts: Any) -> str:
    """Return the nearest shares if a share is no number between the limits, or an empty text."""
    shares = facts.cfg.ddp.shares
    if shares == ["auto"]:
        return ""
    for text, number in zip(shares, _numbers(shares), strict=True):
        if number < 1 / LARGEST_SHARE or float(text) > LARGEST_SHARE:
            return _nearest_shares(facts)
    return ""


def _shares_for_wrong_length(facts: Any) -> str:
    """Return the nearest shares if there is not one share for each process, or an empty text."""
    shares = facts.cfg.ddp.shares
    if shares == ["auto"] or len(shares) == facts.world.size:
        return ""
    return _nearest_shares(facts)


# ---- the table

KIND = Condition("schedule.kind={cfg.schedule.kind}", lambda facts: True)
PLATEAU = Condition("schedule.kind=plateau", lambda facts: facts.cfg.schedule.kind == "plateau")

ModelRule = partial(Rule, moment="model", setting=SHARDS, what="{excluded}", where="{setting}")
OptimizerRule = partial(
    Rule,
    moment="optimizer",
    excluded=ALWAYS,
    what="the task brings its own optimizer",
    fix="drop the key, or change the task's `optimizer`",
)
GraphRule = partial(
    Rule, moment="graph", setting=RECORDED_STEP, what="{excluded}", where="", fix=""
)
RecordRule = partial(
    Rule,
    moment="record",
    setting=RECORD,
    what="the modules of a step cannot be seen with {excluded}",
    fix="drop {excluded}",
)

BY_THEMSELVES = "drop it: virtual workers sum gradients and average buffers by themselves"

RULES = (
    Rule(
        moment="config",
        setting=Condition("epochs=0", lambda facts: not facts.cfg.epochs),
        excluded=Condition("steps=0", lambda facts: not facts.cfg.steps),
        what="{setting} and {excluded}",
        where="config",
        fix="the run would never end; give one of them",
    ),
    Rule(
        moment="config",
        setting=Condition(
            "schedule.lr_scaling={cfg.schedule.lr_scaling}",
            lambda facts: facts.cfg.schedule.lr_scaling != "none",
        ),
        excluded=Condition(
            "schedule.base_batch_size=0", lambda facts: not facts.cfg.schedule.base_batch_size
        ),
        what="{setting} without schedule.base_batch_size",
        where="config",
        fix="give the global batch at which optim.lr was tuned",
    ),
    Rule(
        moment="config",
        setting=Condition("{value}", lambda facts: _unread_setting(facts.cfg.schedule)),
        excluded=KIND,
        where="config",
        fix="drop it: this kind does not read it",
    ),
    Rule(
        moment="config",
        setting=KIND,
        excluded=Condition("{value}", lambda facts: _missing_length(facts.cfg.schedule)),
        what="{setting} needs {excluded}",
        where="config",
        fix="give one of them",
    ),
    Rule(
        moment="config",
        setting=Condition("gpu_ids={cfg.gpu_ids}", lambda facts: len(facts.cfg.gpu_ids) > 1),
        excluded=Condition(
            "a GPU that is named twice",
            lambda facts: len({*facts.cfg.gpu_ids}) < len(facts.cfg.gpu_ids),
        ),
        what="{setting}",
        where="config",
        fix="name each GPU once",
    ),
    Rule(
        moment="config",
        setting=CAPPED,
        excluded=Condition("threads={cfg.threads}", lambda facts: facts.cfg.threads > 1),
        fix="drop threads, and start more processes",
    ),
    Rule(
        moment="config",
        setting=CAPPED,
        excluded=COMPILE,
        fix="drop compile: the compiler writes code for this CPU alone",
    ),
    Rule(
        moment="launch",
        setting=CAPPED,
        excluded=Condition("a GPU", lambda facts: facts.visible),
        what="{setting} is of CPUs, and this run would use {excluded}",
        fix="add device=cpu, or drop it",
    ),
    Rule(
        moment="command",
        setting=DATA_PARALLEL,
        excluded=STRICT,
        what="{excluded} has no DataParallel",
        fix="use `python train.py --multi-gpu dp`, or drop it",
    ),
    Rule(
        moment="command",
        setting=STRICT,
        excluded=Condition("{forgotten}", lambda facts: facts.forgotten),
        what="{excluded}",
        where="environment",
        fix="or use train.py, which adapts",
    ),
    Rule(
        moment="launch",
        setting=Condition("device=cuda", lambda facts: facts.cfg.device == "cuda"),
        excluded=NO_GPU,
        what="{setting}, but {excluded}",
        fix="drop it, or check nvidia-smi",
    ),
    Rule(
        moment="launch",
        setting=Condition("ddp.backend=nccl", lambda facts: facts.cfg.ddp.backend == "nccl"),
        excluded=NO_GPU,
        what="{setting} needs CUDA, and {excluded}",
        fix="leave it at auto: gloo is used on the CPU",
    ),
    Rule(
        moment="launch",
        setting=DATA_PARALLEL,
        excluded=Condition("torchrun", lambda facts: facts.env.launched),
        what="--multi-gpu dp is for one process, but {excluded} started this one",
        fix="use `python train.py --multi-gpu dp`, or --multi-gpu ddp with torchrun",
    ),
    Rule(
        moment="plan",
        setting=Condition("optim.zero=true", lambda facts: facts.cfg.optim.zero),
        excluded=ALWAYS,
        what="{setting} is no longer there",
        fix="use ddp.strategy=fsdp, which shards moments, gradients and weights",
    ),
    Rule(moment="plan", setting=CUDA_GRAPH, excluded=SHARDS, fix="drop it"),
    Rule(moment="plan", setting=COMPILE, excluded=SHARDS, fix="drop it"),
    Rule(
        moment="plan",
        setting=Condition(
            "memory_format=channels_last", lambda facts: facts.cfg.memory_format == "channels_last"
        ),
        excluded=SHARDS,
        fix="drop it: rows are contiguous",
    ),
    Rule(moment="plan", setting=DATA_PARALLEL, excluded=SHARDS, fix="use --multi-gpu ddp"),
    Rule(
        moment="plan",
        setting=COMM_HOOK,
        excluded=SHARDS,
        fix="drop it, or use ddp.gather_dtype=bf16",
    ),
    Rule(moment="plan", setting=SYNC_BN, excluded=SHARDS, fix="drop it, or use GroupNorm"),
    Rule(moment="plan", setting=STATIC_GRAPH, excluded=SHARDS, fix="drop it"),
    Rule(
        moment="plan",
        setting=WORKERS,
        excluded=Condition("ddp.strategy=hsdp", lambda facts: facts.cfg.ddp.strategy == "hsdp"),
        fix="use ddp.strategy=fsdp",
    ),
    Rule(
        moment="plan",
        setting=Condition(
            "{world.size} processes", lambda facts: facts.world.size > facts.cfg.virtual_workers
        ),
        excluded=WORKERS,
        where="virtual_workers",
        fix="start at most {cfg.virtual_workers}, or a new run with more workers than there ever "
        "will be processes",
    ),
    Rule(
        moment="plan",
        setting=SHARES,
        excluded=Condition("virtual_workers=0", lambda facts: not facts.cfg.virtual_workers),
        what="{setting} without virtual_workers",
        fix="start a new run with virtual_workers=8, say, which are dealt by the shares; or drop "
        "it: without them each process has an equal part",
    ),
    Rule(
        moment="plan",
        setting=SHARES,
        excluded=Condition("{value}", _shares_for_wrong_values),
        what="{setting}: a share is a number from 1e-6 to 1e6, or all are auto",
        fix="use ddp.shares={excluded}, the nearest that can be dealt, or ddp.shares=auto",
    ),
    Rule(
        moment="plan",
        setting=SHARES,
        excluded=Condition("{value}", _shares_for_wrong_length),
        what="{setting} has not one share for each process, of which there are {world.size}",
        fix="use ddp.shares=auto, which fits any number, or ddp.shares={excluded}",
    ),
    Rule(
        moment="plan",
        setting=AUTO_SHARES,
        excluded=Condition(
            "ddp.strategy=fsdp on a GPU",
            lambda facts: facts.cfg.ddp.strategy == "fsdp" and facts.world.device.type == "cuda",
        ),
        fix="give one share for each process, such as 3,1: there all processes wait for each other "
        "within each pass, so no time of one alone is known",
    ),
    Rule(
        moment="plan",
        setting=AUTO_SHARES,
        excluded=Condition(
            "plugins/resilience, which takes the times of the processes",
            lambda facts: "resilience" not in hooks.load(),
        ),
        what="{setting} without {excluded}",
        fix="restore the folder, or give one share for each process, such as 3,1",
    ),
    Rule(
        moment="plan",
        setting=Condition("multi_gpu=dp", lambda facts: bool(facts.devices)),
        excluded=WORKERS,
        fix=BY_THEMSELVES,
    ),
    Rule(moment="plan", setting=SYNC_BN, excluded=WORKERS, fix=BY_THEMSELVES),
    Rule(
        moment="plan",
        setting=Condition(
            "ddp.buffers={cfg.ddp.buffers}", lambda facts: facts.cfg.ddp.buffers != "same"
        ),
        excluded=WORKERS,
        fix=BY_THEMSELVES,
    ),
    Rule(moment="plan", setting=COMM_HOOK, excluded=WORKERS, fix=BY_THEMSELVES),
    Rule(
        moment="plan",
        setting=Condition(
            "ddp.static_graph=true",
            lambda facts: (
                facts.cfg.ddp.static_graph and (facts.world.size > 1 or facts.cfg.virtual_workers)
            ),
        ),
        excluded=SEVERAL_PASSES,
        fix="drop it, or use a larger batch_size: DDP's no_sync() rules it out",
    ),
    Rule(
        moment="plan",
        setting=Condition(
            "compile={cfg.compile}",
            lambda facts: facts.world.device.type == "cuda" and facts.cfg.compile in GRAPH_MODES,
        ),
        excluded=SEVERAL_PASSES,
        # pytorch#169545
        fix="use compile=default or max-autotune-no-cudagraphs, or a larger batch_size: each pass "
        "would overwrite the gradients of the one before, which lie in the memory of a CUDA graph",
    ),
    Rule(
        moment="plan",
        setting=COMPILE,
        excluded=Condition("DataParallel on a GPU", lambda facts: bool(facts.devices)),
        what="a compiled model cannot be copied to other GPUs by DataParallel",
        fix="use --multi-gpu ddp, or compile=off",
    ),
    Rule(
        moment="data",
        setting=BALANCED,
        excluded=Condition("data without labels", lambda facts: facts.labels is None),
        what="{setting}, but the data of task {cfg.task} have no labels",
        fix="give the dataset an attribute `labels` (N,), or use sampler=shuffle",
    ),
    Rule(
        moment="data",
        setting=BALANCED,
        excluded=Condition(
            "an order of the data", lambda facts: getattr(facts.train_set, "epoch_order", None)
        ),
        what="{setting}, but the data have an order of their own",
        fix="use sampler=shuffle",
    ),
    Rule(
        moment="data",
        setting=Condition("patience={cfg.patience}", lambda facts: facts.cfg.patience > 0),
        excluded=Condition("validation data", lambda facts: facts.val_set is None),
        what="{setting} without {excluded}",
        fix="drop it: nothing is evaluated",
    ),
    Rule(
        moment="data",
        setting=PLATEAU,
        excluded=Condition("validation data", lambda facts: facts.val_set is None),
        what="{setting} without {excluded}",
        fix="use another kind: nothing is evaluated",
    ),
    ModelRule(
        # A segmentation fault of two processes on one H200 (torch 2.11).
        excluded=Condition("shards on GPUs through gloo", lambda facts: facts.through_gloo),
        fix="give each process a GPU and use NCCL, or ddp.strategy=ddp",
    ),
    ModelRule(
        excluded=Condition(
            "trials call the model on each rank by itself", lambda facts: facts.task.num_trials
        ),
        fix="make none, or use ddp.strategy=ddp",
    ),
    ModelRule(
        excluded=Condition(
            "ddp.gather_dtype=bf16 without autocast",
            lambda facts: facts.cfg.ddp.gather_dtype == "bf16" and facts.precision != "bf16",
        ),
        fix="add amp=bf16",
    ),
    ModelRule(
        excluded=Condition(
            "weights of several types, {value}", lambda facts: _several_types(facts.model)
        ),
        fix="give all of them one type",
    ),
    ModelRule(
        # FSDP2 keeps the `requires_grad` of the first gathered weights.
        excluded=Condition("turns, which free and freeze weights", lambda facts: facts.task.turns),
        fix="use ddp.strategy=ddp, or drop the turns",
    ),
    ModelRule(
        excluded=Condition(
            "ddp.find_unused_parameters=true", lambda facts: facts.cfg.ddp.find_unused_parameters
        ),
        fix="use every weight, or ddp.strategy=ddp",
    ),
    ModelRule(
        excluded=Condition(
            "{value} of the task's state is a whole copy of weights, of which each process holds "
            "some rows",
            lambda facts: _whole_copy(facts.model, facts.task),
        ),
        fix="use ddp.strategy=ddp, or keep tensors that are no copies, such as a centre",
    ),
    ModelRule(
        excluded=Condition(
            "the weight {value} has no rows to shard", lambda facts: _scalar_weight(facts.model)
        ),
        fix="give it the shape (1,)",
    ),
    ModelRule(
        excluded=Condition(
            "{processes} processes are no groups of {group} (ddp.shards)",
            lambda facts: facts.processes % facts.group,
        ),
        fix="give a divisor",
    ),
    ModelRule(
        excluded=Condition("torch {torch} lacks {lacking[0]}", lambda facts: facts.lacking),
        fix="update it to 2.11",
    ),
    OptimizerRule(
        setting=Condition("optim.lr_scale", lambda facts: facts.optim.lr_scale),
        where="{setting}",
    ),
    OptimizerRule(
        setting=Condition(
            "optim.layer_decay={optim.layer_decay:g}", lambda facts: facts.optim.layer_decay != 1
        ),
        where="{setting}",
    ),
    OptimizerRule(
        setting=Condition("optim.name={optim.name}", lambda facts: facts.optim.name != "adamw"),
        where="{setting}",
    ),
    Rule(
        moment="scheduler",
        setting=Condition("{value}", lambda facts: _setting_of_rates(facts.schedule)),
        excluded=ALWAYS,
        what="the task brings its own scheduler",
        where="{setting}",
        fix="drop the key, or the task's `scheduler`",
    ),
    GraphRule(excluded=Condition("there is no GPU", lambda facts: not facts.on_gpu)),
    GraphRule(
        excluded=Condition(
            "the model is in DataParallel",
            lambda facts: isinstance(facts.run.net, nn.DataParallel),
        )
    ),
    GraphRule(excluded=Condition("{value}", lambda facts: _of_other_ranks(facts.run))),
    GraphRule(
        excluded=Condition(
            "the task's `scheduler` sets the rates on the host",
            lambda facts: facts.run.rates.scheduler is not None,
        )
    ),
    GraphRule(
        excluded=Condition(
            "the schedule moves momentum or weight decay on the host",
            lambda facts: facts.run.plan.moves_values,
        )
    ),
    GraphRule(
        excluded=Condition(
            "the turns of the task train other weights in each", lambda facts: facts.run.task.turns
        )
    ),
    GraphRule(
        excluded=Condition(
            "record keeps what the modules of a step return", lambda facts: facts.run.cfg.record
        )
    ),
    GraphRule(
        excluded=Condition(
            "exclude makes steps of several sizes", lambda facts: facts.run.cfg.exclude
        )
    ),
    GraphRule(
        excluded=Condition(
            "compile={run.plan.compile} records graphs of its own",
            lambda facts: facts.run.plan.compile in GRAPH_MODES,
        )
    ),
    GraphRule(
        excluded=Condition(
            "with {value} the host reads whether to skip it",
            lambda facts: not skips_itself(facts.run.optimizer) and name_of(facts.run.optimizer),
        )
    ),
    RecordRule(excluded=Condition("compile", lambda facts: facts.plan.compile != "off")),
    RecordRule(excluded=CUDA_GRAPH),
    RecordRule(excluded=Condition("multi_gpu=dp", lambda facts: facts.plan.devices)),
    Rule(
        moment="record",
        setting=RECORD,
        excluded=Condition(
            "a run of {plan.total_steps} steps",
            lambda facts: facts.cfg.record > facts.plan.total_steps,
        ),
        what="the run ends at step {plan.total_steps}",
        where="{setting}",
        fix="record one of it",
    ),
)
"""Pairs that exclude each other. At a moment the first error counts."""


def find_conflicts(moment: str, named_facts: dict[str, Any]) -> list[LockstepError]:
    """Return the errors of all rules of the moment that apply."""
    facts = SimpleNamespace(**named_facts)
    conflicts = []
    for rule in RULES:
        if rule.moment != moment:
            continue
        setting = _text_if(rule.setting, facts)
        excluded = setting and _text_if(rule.excluded, facts)
        if excluded:
            conflicts.append(_error(rule, setting, excluded, named_facts))
    return conflicts


def _text_if(condition: Condition, facts: SimpleNamespace) -> str:
    """Return the text of a condition that holds, or an empty text."""
    value = condition.holds(facts)
    if not value:
        return ""
    return condition.text.format(**vars(facts), value=value)


def _error(rule: Rule, setting: str, excluded: str, facts: dict[str, Any]) -> LockstepError:
    fields = {**facts, "setting": setting, "excluded": excluded, "key": setting.partition("=")[0]}
    return LockstepError(
        rule.what.format(**fields),
        rule.where.format(**fields),
        rule.fix.format(**fields),
        everywhere=rule.moment in RAISED_BY_ALL_RANKS,
    )
