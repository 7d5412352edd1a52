"""Run under torchrun (or plain): one training straight through and others that are stopped again and again.

    torchrun ... stops.py OUT '["arguments", ...]' '[["fault.kind=term", ...], ...]'

Each of the others goes to OUT/0, OUT/1, ... and is started anew until it is done; OUT/straight has no fault. A fault
that is a signal is a real one, to this process.
"""

import json
import sys

import tasks
import train
from engine import config, launch
from engine.report.open_log import open_log
from plugins.resilience.signals import StopRequest

out, common, variants = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
world = None
for name, faults in [("straight", []), *((str(n), faults) for n, faults in enumerate(variants))]:
    argv = [*common, *faults, f"save_dir={out}/{name}"]
    starts, done = 0, False
    while not done:
        starts += 1
        args = config.parse(argv, tasks.load)
        world = world or train.setup_distributed(args.cfg)
        run = train.build(args, world, StopRequest(args.cfg.max_time_s))
        with open_log(run):
            train.train(run)
        done = not run.stopped
    if world.main:
        print(f"STARTS {name} {starts}")
    del run
launch.leave()
