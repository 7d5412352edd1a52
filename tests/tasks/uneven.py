"""The toy task, slower on one process: it sleeps while a file exists, or shares its core with other processes."""

import os
import time
from dataclasses import dataclass

from engine.config import option, section
from tests.tasks import toy


@dataclass
class Slow:
    seconds: float = option(0.0, "of a pass on each process", low=0)
    times: float = option(1.0, "as long on the slow process", low=0)
    flag: str = option("", "a file; the process is slow while it exists")
    core: int = option(-1, "a core that the slow process is bound to, and no other; -1: none", low=-1)


@dataclass
class Settings(toy.Task.Settings):
    slow: Slow = section(Slow)


class Task(toy.Task):
    Settings = Settings
    defaults = toy.Task.defaults | {"check_sums": False, "check_resume": False}
    resumable_keys = ("slow.",)
    is_slow = os.environ.get("RANK") == "1"

    def model(self):
        core = self.cfg.slow.core
        if core >= 0:
            os.sched_setaffinity(0, {core} if self.is_slow else os.sched_getaffinity(0) - {core})
        return super().model()

    def loss(self, net, batch):
        slow = self.cfg.slow
        is_held_back = self.is_slow and os.path.exists(slow.flag)
        time.sleep(slow.seconds * (slow.times if is_held_back else 1))
        return super().loss(net, batch)
