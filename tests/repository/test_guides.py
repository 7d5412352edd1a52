"""Every way in that the three guides show, see tests/kit/guides.py."""

import shlex
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import cards
import pytest
from conftest import free_port, succeed
from guides import COMMANDS, SHORT_HAR, TWO, assert_trained, command

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


@pytest.mark.slow
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
