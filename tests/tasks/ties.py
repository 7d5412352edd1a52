"""The toy, judged by a rate of success that rises once and then stays, as of few trials: 0.25, 0.5, 0.5, 0.5, ..."""

from tests.tasks import toy


class Task(toy.Task):
    monitor, higher_is_better = "success_rate", True

    def report(self, sums):
        metrics = super().report(sums)
        return metrics | {"success_rate": 0.25 if metrics["loss"] > 0.4 else 0.5}  # 0.4566, 0.3495, 0.2926, ...
