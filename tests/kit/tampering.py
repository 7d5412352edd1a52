"""Changes in the folder of a run, as by one who can write there."""

import hashlib
import json
import shutil

import torch


def log_of(run):
    """All lines of the log."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_log(run, lines):
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def keep_lines(run, wanted):
    write_log(run, [line for line in log_of(run) if wanted(line)])


def change_line(run, step, change, event="train"):
    lines = log_of(run)
    (line,) = [each for each in lines if (each["event"], each["step"]) == (event, step)]
    change(line)
    write_log(run, lines)


def drop_digests(run, keep=()):
    """Remove the digests of the weights from the log, but for these steps."""
    lines = log_of(run)
    for line in lines:
        if line["step"] not in keep:
            line.pop("digest", None)
    write_log(run, lines)


def delete_checkpoints(run):
    for path in [*run.glob("*.pt"), run / "manifest.json"]:
        path.unlink()


def manifest_of(run):
    return json.loads((run / "manifest.json").read_text())


def checkpoint_at(run, step):
    return next(run / each["file"] for each in manifest_of(run)["checkpoints"] if each["step"] == step)


def delete_checkpoint(run, step):
    """As the limit of `keep_checkpoints` does."""
    manifest, gone = manifest_of(run), checkpoint_at(run, step)
    manifest["checkpoints"] = [each for each in manifest["checkpoints"] if each["file"] != gone.name]
    (run / "manifest.json").write_text(json.dumps(manifest))
    gone.unlink()


def change_checkpoint(file, change):
    """The manifest agrees with the changed file."""
    state = torch.load(file, weights_only=True)
    change(state)
    torch.save(state, file)
    manifest = manifest_of(file.parent)
    for entry in manifest["checkpoints"]:
        if entry["file"] == file.name:
            entry |= {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    (file.parent / "manifest.json").write_text(json.dumps(manifest))


def keep_checkpoint(run, step):
    """Name no other checkpoint in the manifest; return the name of its file."""
    (kept,) = [each for each in manifest_of(run)["checkpoints"] if each["step"] == step]
    left = {"checkpoints": [kept], "last": kept["file"], "best": kept["file"]}
    (run / "manifest.json").write_text(json.dumps(manifest_of(run) | left))
    return kept["file"]


def replace_text(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
    file.write_text(text.replace(old, new))


def copied(run, to):
    return shutil.copytree(run, to, symlinks=True)


def sha256_of(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def contents(folder, pattern="*"):
    """{file: SHA-256}"""
    return {path: sha256_of(path) for path in folder.rglob(pattern) if path.is_file()}
