"""The toy, judged by a rate of success that rises once and then stays, as of few trials: 0.25, 0.5, 0.5, 0.5, ..."""

from tests.tasks import toy


class Task(toy.Task):
    monitor, higher_is_better = "success_rate", True
    reports = 0

    def report(self, sums):
        self.reports += 1
        return super().report(sums) | {"success_rate": 0.25 if self.reports == 1 and not self.resuming else 0.5}
