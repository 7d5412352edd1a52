"""MLflow as a tracker. The package is imported only if `mlflow.enable` is true; mlflow-skinny is
enough."""

from __future__ import annotations

import atexit
import os
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from engine import config
from engine.errors import LockstepError
from engine.report.tensorboard import encoded


def require() -> None:
    """Raise LockstepError if the package mlflow is missing. Send nothing."""
    if not find_spec("mlflow"):
        raise LockstepError(
            "the package mlflow is not installed",
            "mlflow.enable",
            "pip install mlflow; or mlflow-skinny, which has no database of its own",
        )


class MLflow:
    """A run at MLflow.

    earlier  the id of the run to continue; empty: begin a run
    logged   the last step that an earlier process has logged, or -1
    """

    name = "mlflow"
    todo = "set mlflow.uri or MLFLOW_TRACKING_URI, or mlflow.enable=false"

    def __init__(self, cfg: Any, folder: Path, earlier: str):
        import mlflow

        self.mlflow = mlflow
        uri = cfg.mlflow.uri or mlflow.get_tracking_uri()
        if "://" not in uri or uri.startswith("file:"):
            # newer versions refuse a folder without the variable
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment(cfg.mlflow.experiment)
        name = cfg.mlflow.name or folder.name
        active = mlflow.start_run(run_id=earlier or None, run_name=name)
        # An error ends the process without a call of `close`. MLflow's own handler is called later,
        # and would set the status FINISHED.
        atexit.register(mlflow.end_run, "FAILED")
        self.id = active.info.run_id
        # A number that is logged twice is shown twice. A new run has no metrics.
        history = mlflow.MlflowClient().get_metric_history
        metrics = active.data.metrics
        logged = [entry.step for metric in metrics for entry in history(self.id, metric)]
        self.logged = max(logged, default=-1)
        if not earlier:
            mlflow.log_params(config.flatten(config.to_dict(cfg)))

    def scalars(self, step: int, numbers: dict[str, float]) -> None:
        if step > self.logged:  # in a thread of MLflow
            # the name of a class may hold any character
            clean = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in numbers.items()}
            self.mlflow.log_metrics(clean, step=step, synchronous=False)

    def picture(self, step: int, name: str, picture: np.ndarray) -> None:
        data, kind, _ = encoded(picture)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / (re.sub(r"[^-. \w]", "_", name) + f".{kind.lower()}")
            path.write_bytes(data)
            self.mlflow.log_artifact(str(path), f"pictures/step_{step}")

    def close(self, status: str) -> None:
        self.mlflow.flush_async_logging()
        self.mlflow.end_run("FINISHED" if status == "done" else "KILLED")
