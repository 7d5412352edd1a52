"""Run a loop of examples/ports, or the plain loop of the same training, in the order of the task.

    python tests/kit/port_loop.py loop quickstart FOLDER
    python tests/kit/port_loop.py plain quickstart FOLDER

A loop shuffles with torch's generator, a task by (seed, epoch). Here `shuffle=True` takes the task's order; the file
runs as it stands otherwise, and leaves model.pth in FOLDER. All numbers are float64, also of LeRobot's samples.
"""

import os
import runpy
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import RandomSampler

ROOT = Path(__file__).resolve().parents[2]
PORTS = ROOT / "examples" / "ports"
LOOPS = {
    "quickstart": "quickstart.py",
    "lightning": "lightning_module.py",
    "trainer": "trainer.py",
    "accelerate": "accelerate_script.py",
    "lerobot": "lerobot_policy.py",
}


def order_of_the_task(sampler):
    epoch = sampler.__dict__.setdefault("epochs", 0)
    sampler.epochs += 1
    return iter(np.random.default_rng((0, epoch)).permutation(len(sampler.data_source)).tolist())


def prepare(name):
    """Set the precision, and the path of the project; load what LeRobot needs."""
    sys.path.insert(0, str(PORTS))
    torch.set_default_dtype(torch.float64)
    if name == "lerobot" and "lerobot_stub" not in os.environ["PYTHONPATH"]:
        sys.path.append(str(ROOT / "tests" / "peer"))
        import torchvision_shim

        torchvision_shim.load()
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        LeRobotDataset.__getitem__ = in_float64(LeRobotDataset.__getitem__)
        torch.nn.Linear.forward = linear  # ACT makes its latent of zeros in float32


def linear(module, x):
    return torch.nn.functional.linear(x.to(module.weight.dtype), module.weight, module.bias)


def in_float64(getitem):
    def sample(data, index):
        values = getitem(data, index).items()
        return {
            name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in values
        }

    return sample


if __name__ == "__main__":
    kind, name, folder = sys.argv[1:]
    prepare(name)
    os.chdir(folder)
    if kind == "loop":
        RandomSampler.__iter__ = order_of_the_task
        runpy.run_path(str(PORTS / LOOPS[name]), run_name="__main__")
    else:
        import plain_ports
        import project

        torch.manual_seed(0)
        model = getattr(plain_ports, name)(project)
        torch.save(model.state_dict(), "model.pth")
