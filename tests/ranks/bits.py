"""Run under torchrun (or plain): several trainings in one process group, each from its own argv; or a single one by
`train.main`, with all that watches over it.

    torchrun ... bits.py '[["har", "epochs=1", ...], ...]' [flat|rank|moves|SIGNAL:RANK:STEP:METHOD]

With a second word virtual workers are broken on purpose: a process adds up its workers in a row (flat), or draws random
numbers by its rank (rank). Or workers move at log points, whatever the times (moves). Or a rank sends itself a signal,
when it calls a method of `Run` in a step.
"""

import json
import os
import signal
import sys

import torch.distributed as dist

import tasks
import train
from engine import config, launch, run
from engine.report.open_log import open_log
from plugins.parallel import tree, virtual

if "flat" in sys.argv[2:]:

    def push(nodes, node, in_place=True):
        nodes.append(node)
        while len(nodes) > 1:
            left, right = nodes[-2:]
            nodes[-2:] = [tree.Node(left.begin, right.end, tree._add(left.sums, right.sums, in_place))]

    tree.push_node = virtual.push_node = push
if "moves" in sys.argv[2:]:
    from tests.kit import moving

    moving.install()
if "rank" in sys.argv[2:]:
    seed = run.seed_generators
    run.seed_generators = lambda device, *key: seed(device, *key, dist.get_rank())


def interrupt(name, rank, step, method):
    plain, sent = getattr(run.Run, method), []

    def interrupted(self, *args):
        if not sent and self.world.rank == rank and self.progress.step == step:
            sent.append(True)
            os.kill(os.getpid(), getattr(signal, name))
        return plain(self, *args)

    setattr(run.Run, method, interrupted)


for name, rank, step, method in [word.split(":") for word in sys.argv[2:] if ":" in word]:
    interrupt(name, int(rank), int(step), method)

if len(runs := json.loads(sys.argv[1])) == 1:
    sys.exit(train.main(runs[0]))
world = None
for argv in runs:
    args = config.parse(argv, tasks.load)
    world = world or train.setup_distributed(args.cfg)
    training = train.build(args, world)
    with open_log(training):
        train.train(training)
    del training
launch.leave()
