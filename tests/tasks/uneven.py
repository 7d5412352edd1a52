"""The toy task, slower on one process in some of its steps: it sleeps, or shares its core with other processes."""

import os
import time
from dataclasses import dataclass

from engine.config import option, section
from tests.tasks import toy


@dataclass
class Slow:
    seconds: float = option(0.0, "of a pass on each process", low=0)
    times: float = option(1.0, "as long on the slow process", low=0)
    rank: int = option(1, "the slow process", low=0)
    begin: int = option(0, "its first slow step", low=0)
    end: int = option(10**9, "the step after its last slow step", low=0)
    core: int = option(-1, "a core that the slow process is bound to, and no other; -1: none", low=-1)


@dataclass
class Settings(toy.Task.Settings):
    slow: Slow = section(Slow)


class Task(toy.Task):
    Settings = Settings
    defaults = toy.Task.defaults | {"check_sums": False, "check_resume": False}
    resumable_keys = ("slow.",)

    def model(self):
        slow = self.cfg.slow
        if slow.core >= 0:
            mine = {slow.core}
            os.sched_setaffinity(0, mine if self.is_slow() else os.sched_getaffinity(0) - mine)
        return super().model()

    def is_slow(self):
        return self.cfg.slow.rank == int(os.environ.get("RANK", "0"))

    def loss(self, net, batch):
        slow = self.cfg.slow
        held_back = self.is_slow() and slow.begin <= batch["lockstep"].step < slow.end
        time.sleep(slow.seconds * (slow.times if held_back else 1))
        return super().loss(net, batch)
