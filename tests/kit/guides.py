"""The commands of the three guides, literally, with what makes a run short behind their own words; with 2 processes
where a guide has 3, 4 or 8.

Names: main.py, main_multi_gpu.py and lerobot_train.py are train.py, lerobot_train_ddp.py is train_ddp.py,
scripts/train_multi_gpu.sh is train_multigpu.sh.
"""

import shlex
import sys

import torch
from conftest import succeed

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
