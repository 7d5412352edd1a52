"""Every way in that the three guides show, literally; with 2 processes where a guide has 3, 4 or 8.

Names: main.py, main_multi_gpu.py and lerobot_train.py are train.py, lerobot_train_ddp.py is train_ddp.py,
scripts/train_multi_gpu.sh is train_multigpu.sh. What makes a run short stands behind the guide's own words.
"""

import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import cards
import pytest
import torch
from conftest import free_port, succeed

SHORT_HAR = "dataset.stride=1024 steps=2"
SHORT_VIDEO = "dataset.size=16 dataset.trials=61 dataset.videos=12 dataset.frames=5 model.width=4 steps=2"
SHORT_ROBOT = (
    "env.demonstrations=8 env.size=16 eval.n_episodes=2 policy.chunk_size=5 policy.dim_model=16 policy.n_heads=2 "
    "policy.dim_feedforward=16 policy.n_encoder_layers=1 policy.n_vae_encoder_layers=1 steps=2"
)


def command(words, tmp_path):
    """The guide's line as an argument list, with this Python for python and torchrun."""
    python = sys.executable
    stand_ins = {
        "python": [python],
        "torchrun": [python, "-m", "torch.distributed.run"],
        "accelerate": [python, "-m", "accelerate.commands.accelerate_cli"],
    }
    first, *rest = shlex.split(words)
    return [*stand_ins.get(first, [first]), *rest, f"save_dir={tmp_path / 'run'}"]


def assert_trained(done, tmp_path, processes):
    succeed(done)
    said = f"Distributed training: {processes} CPU processes\n" if processes > 1 else "one CPU process\n"
    assert said in done.out
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["progress"]["step"] > 0


TWO = "torchrun --standalone --nproc_per_node=2"
COMMANDS = [  # (processes, command)
    (1, f"python train.py {SHORT_HAR}"),
    (1, f"python train.py video {SHORT_VIDEO}"),
    (1, f"python train.py har --epochs 5 --batch-size 32 --lr 1e-3 {SHORT_HAR}"),
    (1, f"python train.py --config configs/har.yaml batch_size=16 optim.lr=3e-4 {SHORT_HAR}"),
    (2, f"{TWO} train.py {SHORT_HAR}"),
    (2, f"{TWO} train.py --multi-gpu ddp --mode flatten --epochs 30 --batch-size 32 --lr 4e-3 --warmup-epochs 3 "
        f"--weight-decay 1e-4 --num-workers 1 --grad-accum-steps 4 {SHORT_HAR}"),
    (2, f"{TWO} train_ddp.py --config configs/har.yaml batch_size=16 gradient_accumulation_steps=2 num_workers=0 "
        f"{SHORT_HAR}"),
    (1, f"python train_ddp.py --use_amp {SHORT_HAR}"),
    (1, "python train.py robot env.demonstrations=8 env.size=16 eval.n_episodes=2 steps=2"),
    (2, f"{TWO} train_ddp.py --config configs/policy/act.yaml batch_size=8 wandb.enable=true "
        f"wandb.project=robot-learning wandb.mode=offline {SHORT_ROBOT}"),
    (2, "accelerate launch --multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no --dynamo_backend=no "
        f"train.py --config configs/policy/act.yaml gradient_accumulation_steps=2 {SHORT_ROBOT}"),
    (1, f"python train.py --task=robot --policy.type=act --batch_size=4 --seed=1000 --log_freq=1 --save_freq=2 "
        f"{SHORT_ROBOT}"),
    (1, f"python train.py --multi-gpu none --mode transformer {SHORT_HAR}"),
    (1, f"python train.py --multi-gpu auto {SHORT_HAR}"),
    (1, f"python train.py --multi-gpu ddp --epochs 20 --batch-size 32 --lr 1e-3 {SHORT_HAR}"),
    (1, f"python train.py --multi-gpu dp --gpu-ids 0,1,3 --mode flatten {SHORT_HAR}"),
    (1, f"./train_multigpu.sh {SHORT_HAR}"),
    (1, f"./train_multigpu.sh 1 {SHORT_HAR}"),
    (2, f"./train_multigpu.sh 2 {SHORT_HAR}"),
    (2, f"./train_multigpu.sh 2 --config configs/video_small.yaml {SHORT_VIDEO}"),
]  # fmt: skip


REAL = [f"python train.py {SHORT_HAR}", f"{TWO} train.py {SHORT_HAR}"]
"""Started anew, as a person would; the launcher is in faults/test_processes.py."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "words"),
    [pytest.param(*each, marks=[pytest.mark.real] * (each[1] in REAL)) for each in COMMANDS],
    ids=lambda value: str(value)[:60],
)
def test_the_guides_commands_train(launch, tmp_path, processes, words):
    done = launch(*command(words, tmp_path))
    assert_trained(done, tmp_path, processes)
    if "--multi-gpu dp" in words:
        assert "warning: --multi-gpu dp, but no GPU is visible" in done.err
    if "--multi-gpu ddp" in words and "torchrun" not in words:
        assert "Starting torchrun --standalone --nproc_per_node=1" in done.out
    if words.startswith("./train_multigpu.sh 2"):
        assert "Multi-GPU Training Launcher" in done.out and "warning" in done.err


@pytest.mark.slow
def test_two_nodes_as_two_launchers(launch, tmp_path):
    """One process on the first node, two on the second; here both nodes are this machine."""
    shared = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ThreadPoolExecutor() as nodes:
        first, second = (
            nodes.submit(
                launch, "./train_multigpu.sh", processes, *shlex.split(SHORT_HAR), f"save_dir={tmp_path / 'run'}",
                NODE_RANK=str(node), **shared,
            )
            for node, processes in ((0, "1"), (1, "2"))
        )  # fmt: skip
    assert_trained(first.result(), tmp_path, 3)
    succeed(second.result())
    assert "Node 0 of 2, meeting at 127.0.0.1" in first.result().out
    assert "Starting training" not in second.result().out, "rank 0 alone is_local_rank0"


def test_the_deprecated_launch_module(launch, tmp_path):
    """It passes --local-rank to the script besides setting the variables, and needs a port."""
    port = free_port()
    words = f"python -m torch.distributed.launch --nproc_per_node=2 --master_port={port} train.py {SHORT_HAR}"
    assert_trained(launch(*command(words, tmp_path)), tmp_path, 2)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_accelerate_launch(launch, tmp_path):
    """As the README has it, without the options that accelerate warns of."""
    words = f"accelerate launch --multi_gpu --num_processes=2 train.py --config configs/har.yaml {SHORT_HAR}"
    assert_trained(launch(*command(words, tmp_path), HF_HOME=str(tmp_path)), tmp_path, 2)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_accelerate_cpu_that_starts_one_process_is_warned_about(launch, tmp_path):
    words = f"accelerate launch --cpu --num_processes=2 --num_machines=1 train.py {SHORT_HAR}"
    done = launch(*command(words, tmp_path), HF_HOME=str(tmp_path))
    assert_trained(done, tmp_path, 1)
    assert "warning: accelerate started this process without RANK" in done.err


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("words", "expected", "gpus"),
    [
        ("--multi-gpu dp --gpu-ids 0,1 ", "2 GPUs of DataParallel", 2),
        ("--multi-gpu ddp --gpu-ids 0,1 ", "Distributed training: 2 GPUs", 2),
        ("", "Using device: cuda:0", 1),
    ],
)
def test_on_gpus(launch, tmp_path, words, expected, gpus):
    if cards.visible() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    done = succeed(launch(*command(f"python train.py {words}{SHORT_HAR}", tmp_path)))
    assert expected in done.out and "precision        fp32" not in done.out
