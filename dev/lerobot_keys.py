#!/usr/bin/env python3
"""The table of LeRobot's keys in docs/robots.md, made from tasks/robots/lerobot_keys.py.

python dev/lerobot_keys.py            write it into the page
python dev/lerobot_keys.py --check    exit 1 if the page has another one
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tasks  # noqa: E402
from engine import config  # noqa: E402
from tasks.robots import lerobot_keys as _lerobot_keys  # noqa: E402

PAGE = ROOT / "docs" / "robots.md"
BEGIN, END = "<!-- keys: python dev/lerobot_keys.py -->\n", "<!-- end -->\n"
SAME = (
    "steps batch_size num_workers seed resume dataset.repo_id dataset.root dataset.revision "
    "dataset.episodes "
    "dataset.exclude_episodes dataset.use_imagenet_stats dataset.eval_split rename_map policy.type "
    "policy.pretrained_path policy.pretrained_revision policy.push_to_hub "
    "policy.normalization_mapping "
    "eval.n_episodes env.type wandb.enable wandb.project wandb.entity wandb.mode wandb.run_id "
    "wandb.notes"
).split()
"""LeRobot's keys that are keys here under their own name, besides those of ACT's network."""


def table() -> str:
    cfg = config.parse(["robot", "policy.type=act"], tasks.load).cfg
    known = config.flatten(config.to_dict(cfg))
    for name in SAME:
        assert any(key == name or key.startswith(f"{name}.") for key in known), name
    rows = [
        "| LeRobot's key | here |",
        "|---|---|",
        f"| {', '.join(f'`{name}`' for name in SAME)} | the same |",
    ]
    rows.append(
        "| `policy.` and the names of ACT's network and training | the same, with "
        "`policy.type=act` |"
    )
    meanings: dict[str, list[str]] = {}  # {what a key does: the keys}
    for name, key in _lerobot_keys.ALIASES.items():
        meanings.setdefault(f"`{key}`", []).append(name)
    for name, (only, why) in _lerobot_keys.without_effect(cfg).items():
        value = str(only).lower() if isinstance(only, bool) else only
        what = "sets nothing" if only is None else f"only `{value}`" if value != "" else "refused"
        meanings.setdefault(f"{what}: {why}", []).append(name)
    rows += [
        f"| {', '.join(f'`{name}`' for name in names)} | {meaning} |"
        for meaning, names in meanings.items()
    ]
    return "\n".join(rows) + "\n"


def main(argv: list[str]) -> int:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    now, _, after = rest.partition(END)
    if argv == ["--check"]:
        if now != table():
            print(
                "error: docs/robots.md has another table: python dev/lerobot_keys.py",
                file=sys.stderr,
            )
        return int(now != table())
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
