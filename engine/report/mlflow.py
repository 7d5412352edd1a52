"""MLflow as a tracker. The package is imported only where `mlflow.enable` asks for it; mlflow-skinny is enough."""

from __future__ import annotations

import atexit
import os
import re
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from engine import config
from engine.errors import LockstepError
from engine.report.tensorboard import encoded

ENDED = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


def require(cfg: Any) -> None:
    """Raise LockstepError if MLflow is enabled and the package is missing. Sends nothing."""
    if cfg.mlflow.enable and not find_spec("mlflow"):
        todo = "pip install mlflow; or mlflow-skinny, which has no database of its own"
        raise LockstepError("the package mlflow is not installed", "mlflow.enable", todo)


class MLflow:
    name = "mlflow"

    def __init__(self, cfg: Any, folder: Path, earlier: str):
        import mlflow
        from mlflow.entities import Param

        wanted, params = cfg.mlflow, config.flatten(config.to_dict(cfg))
        try:
            uri = wanted.uri or mlflow.get_tracking_uri()
            if "://" not in uri or uri.startswith("file:"):
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer ones refuse a folder without it
            mlflow.set_tracking_uri(uri)
            self.client, self.id, self.logged = mlflow.MlflowClient(), earlier, -1
            if earlier:  # what is logged twice is shown twice
                names = self.client.get_run(earlier).data.metrics
                points = (point for name in names for point in self.client.get_metric_history(earlier, name))
                self.logged = max((point.step for point in points), default=-1)
                self.client.update_run(earlier, "RUNNING")
            else:
                found = self.client.get_experiment_by_name(wanted.experiment)
                number = found.experiment_id if found else self.client.create_experiment(wanted.experiment)
                self.id = self.client.create_run(number, run_name=wanted.name or folder.name).info.run_id
                settings = [Param(name, str(value)[:6000]) for name, value in params.items()]
                for first in range(0, len(settings), 100):  # as many as it takes at once
                    self.client.log_batch(self.id, params=settings[first : first + 100])
        except Exception as error:
            what = f"MLflow cannot be started: {(str(error).splitlines() or [type(error).__name__])[0]}"
            todo = "set mlflow.uri or MLFLOW_TRACKING_URI, or mlflow.enable=false"
            raise LockstepError(what, "mlflow.enable", todo) from error
        atexit.register(self._end, "failed")  # an error ends the process without a call of `close`

    def scalars(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        if step > self.logged:
            now = int(time.time() * 1000)
            metrics = [Metric(_name(name), value, now, step) for name, value in numbers.items()]
            self.client.log_batch(self.id, metrics=metrics, synchronous=False)  # in a thread of MLflow's

    def picture(self, step: int, name: str, picture: np.ndarray) -> None:
        data, kind, _ = encoded(picture)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{_name(name).replace('/', '_')}.{kind.lower()}"
            path.write_bytes(data)
            self.client.log_artifact(self.id, str(path), f"pictures/step_{step}")

    def close(self, status: str) -> None:
        atexit.unregister(self._end)
        self._end(status)

    def _end(self, status: str) -> None:
        import mlflow

        mlflow.flush_async_logging()
        self.client.set_terminated(self.id, ENDED[status])


def _name(name: str) -> str:
    """Return a name of a metric with the characters that MLflow takes: a class may be called anything."""
    return re.sub(r"[^\w\-. :/]", "_", name)
