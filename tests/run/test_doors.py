"""Two doors, one loop; a task dropped anywhere; who writes; what precision really runs."""

import multiprocessing
import os
import re
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TOY, by_hand, succeed
from runs import records, same_bits, weights

import tasks
from engine import config
from engine.comm.session import session
from engine.contract import LockstepError
from engine.errors import headline
from engine.launch import Environment, environment, explained, pick_backend, pick_device, rendezvous
from engine.plan import data_parallel_devices
from engine.precision import Autocast, choose
from plugins.resilience import command, failure_report, scratch
from plugins.security import listen
from plugins.security.handshake import _meet

SPY = """
import torch
from tests_toy import Task as Toy

class Task(Toy):
    defaults, seen = Toy.defaults | {"check_sums": False}, False
    def loss(self, net, batch):
        if not Task.seen:
            Task.seen = True
            out = net(batch["x"])
            print("SPY net", type(net).__name__, "out", out.dtype, "weights", next(net.parameters()).dtype, flush=True)
        return super().loss(net, batch)
"""


@pytest.fixture
def spy(tmp_path):
    """A task file outside the repository, which says what it was called with."""
    shutil.copy(TOY, tmp_path / "tests_toy.py")
    path = tmp_path / "spy.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + SPY)
    return str(path)


def test_a_task_dropped_anywhere_trains_through_both_doors_with_the_same_weights(launch, tmp_path, spy):
    plain = succeed(launch.python("train.py", spy, "--save-dir", str(tmp_path / "a")))
    ddp = succeed(launch.python("train_ddp.py", f"task={spy}", f"save_dir={tmp_path / 'b'}"))
    assert "SPY net Net out" in plain.out, "no DDP in plain train.py"
    assert "SPY net DistributedDataParallel out" in ddp.out, "DDP in plain train_ddp.py"
    assert "Preflight: 1 rank agrees on" in ddp.out
    assert same_bits(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.slow
def test_both_doors_are_one_under_torchrun(launch, tmp_path):
    (tmp_path / "toy.yaml").write_text(f"task: {TOY}\nbatch_size: 6\namp: off\nmodel: {{width: 8}}\n")
    words = "--config", str(tmp_path / "toy.yaml")
    for door in ("train.py", "train_ddp.py"):
        succeed(launch.torchrun(2, door, *words, f"save_dir={tmp_path / door[:-3]}"))
    assert same_bits(weights(tmp_path / "train"), weights(tmp_path / "train_ddp"))
    alone = succeed(launch.python("train.py", *words, "global_batch=12", f"save_dir={tmp_path / 'one'}"))
    assert "1 process x 2 accumulation = 12" in alone.out
    for name, value in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "train")[name], value, rtol=1e-4, atol=1e-6)


WATCHER = """
import os, sys
def watch(event, args):
    # Opening for writing, and everything else that changes a folder.
    if event == "open" and isinstance(args[0], str) and (args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        path = args[0]
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink"):
        path = os.fsdecode(args[0])
    else:
        return
    if "run_folder" in path:
        line = f"{os.environ.get('RANK')} {event} {os.path.basename(path)}\\n"
        os.write(int(os.environ["WATCH_FD"]), line.encode())
if "WATCH" in os.environ:
    os.environ["WATCH_FD"] = str(os.open(os.environ["WATCH"], os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    sys.addaudithook(watch)
"""


@pytest.mark.slow
def test_rank_0_alone_writes(launch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WATCHER)
    run, record = tmp_path / "run_folder", tmp_path / "record.txt"
    done = succeed(
        launch.torchrun(2, "train.py", TOY, f"--save-dir={run}", PYTHONPATH=f"{tmp_path}:{ROOT}", WATCH=str(record))
    )
    lines = record.read_text().splitlines()
    assert {line.split()[0] for line in lines} == {"0"}, lines
    assert any("config.yaml" in line for line in lines), "the watcher saw nothing"
    names = {path.name for path in run.iterdir()}
    best = {name for name in names if name.startswith("best_model_epoch")}
    assert len(best) == 2, "of the earlier ones keep_checkpoints=1 is kept"
    kept = {"config.yaml", "environment.json", "metrics.jsonl", "logs", "last.pt", "manifest.json", "status.json"}
    assert names - best == kept | {"run.lock"}
    assert len(list((run / "logs").iterdir())) == 1, "one TensorBoard file"
    assert done.out.count("Starting training...") == 1, "one voice"


@pytest.mark.parametrize(("amp", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("off", "float32")])
def test_amp_is_real(launch, tmp_path, spy, amp, dtype):
    done = succeed(launch.python("train.py", spy, "--amp", amp, "--epochs", "2", f"--save-dir={tmp_path / 'run'}"))
    assert f"out torch.{dtype} weights torch.float32" in done.out
    assert f"precision        {'fp32' if amp == 'off' else amp} (" in done.out
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert state["precision"] == amp
    assert bool(state["scaler"]) == (amp == "fp16"), "fp16 alone has a scaler"
    losses = [line["loss"] for line in records(tmp_path / "run", "eval")]
    assert losses[-1] < losses[0]


def test_accelerates_precision_is_followed(launch, tmp_path, spy):
    done = launch.python("train.py", spy, f"--save-dir={tmp_path / 'run'}", ACCELERATE_MIXED_PRECISION="bf16")
    assert "out torch.bfloat16" in succeed(done).out


COUNTING = """
import sys
import torch
import torch.distributed as dist
import tasks, train
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from engine import config, launch
from plugins.performance import shm_backend

args = config.parse(sys.argv[1:], tasks.load)
world = train.setup_distributed(args.cfg)
calls = []
def counting(mean):
    def count(state, bucket):
        calls.append(1)
        return mean(state, bucket)
    return count
shm_backend.Channel.sum_then_divide = staticmethod(counting(shm_backend.Channel.sum_then_divide))
run = train.build(args, world)
if not shm_backend.channel():
    run.net.register_comm_hook(None, counting(allreduce_hook))
per_step, before = [], 0
run.loaders.train.set_epoch(0)
for passes in run.steps():
    train.train_step(run, passes)
    per_step.append(len(calls) - before)
    before = len(calls)
# One write: torchrun's workers are unbuffered, and the pieces of two prints would mix.
print(f"CALLS {world.rank} {per_step}\\n", end="", flush=True)
del run
launch.leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_gradients_meet_once_per_step(launch, tmp_path, backend):
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)
    size = ["batch_size=3", "gradient_accumulation_steps=4", f"ddp.backend={backend}"]
    done = succeed(launch.torchrun(2, str(script), TOY, *size))
    for rank in (0, 1):
        # 61 samples: two steps of 24 and one of 13, which is three forward passes; one bucket.
        assert f"CALLS {rank} [1, 1, 1]" in done.out


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is no whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK and MASTER_ADDR and MASTER_PORT not"),
    ],
)
def test_a_half_set_environment_is_an_error_in_words(monkeypatch, env, words):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LockstepError, match=words) as caught:
        environment()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("door", ["train.py", "train_ddp.py"])
def test_a_half_set_environment_stops_the_doors(launch, tmp_path, door):
    done = launch.python(door, TOY, f"--save-dir={tmp_path / 'run'}", RANK="0")
    assert done.code == 2 and done.err == (
        "error: RANK=0 is set but WORLD_SIZE is not (environment): "
        "start with torchrun, or `unset RANK` to train in one process\n"
    )
    assert not (tmp_path / "run").exists()


STARTED = [
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),
    ("PMI_SIZE", "PMI_RANK", "mpirun"),
]


@pytest.mark.parametrize(("count", "number", "starter"), STARTED)
def test_copies_that_srun_or_mpirun_starts_are_no_trainings(launch, tmp_path, count, number, starter):
    """One line of the first, none of the others, and no folder."""
    for n in (0, 1):
        env = {count: "4", number: str(n), "SLURM_NTASKS": "4"}
        done = launch.python("train.py", TOY, f"save_dir={tmp_path / 'run'}", **env)
        assert done.code == 2 and not (tmp_path / "run").exists()
        assert len(done.errors) == (n == 0) and "Traceback" not in done.err, done.err
        if n == 0:
            assert done.errors[0].startswith(f"error: {starter} has started 4 copies of this command"), done.err
            assert "`srun --ntasks-per-node=1 ./train_multigpu.sh`" in done.errors[0]


def test_a_shell_within_a_job_of_slurm_trains_with_a_warning(launch, tmp_path):
    """As of salloc or sbatch: the number of tasks is set, and nothing was started by srun."""
    env = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    done = succeed(launch.python("train.py", TOY, "steps=1", f"save_dir={tmp_path / 'run'}", **env))
    assert "warning: SLURM_NTASKS=4 but RANK is not set" in done.err


def test_nccl_without_cuda_is_refused(launch, tmp_path):
    done = launch.python("train_ddp.py", TOY, "ddp.backend=nccl", f"save_dir={tmp_path / 'run'}")
    assert done.code == 2 and "ddp.backend=nccl needs CUDA" in done.errors[0]


DP, DDP = {"multi_gpu": "dp"}, {"multi_gpu": "ddp"}
FOURTH = Environment(3, 3, 4, launched=True)


@pytest.mark.parametrize(
    ("gpus", "settings", "env", "slurm", "device"),
    [
        (2, {}, Environment(1, 1, 2, launched=True), "", 1),
        (2, {}, Environment(2, 2, 3, launched=True), "", "LOCAL_RANK=2, but 2 GPUs visible.*at most 2 processes"),
        (2, DP | {"gpu_ids": [1, 0]}, Environment(), "", 1),
        (2, DP | {"gpu_ids": [0, 3]}, Environment(), "", r"gpu_ids=\[3\] asked, 2 visible"),
        (2, DP | {"gpu_ids": [0, 2]}, Environment(), "", r"gpu_ids=\[2\] asked, 2 visible"),  # numbers are from 0
        # torchrun's children see only the GPUs of `--multi-gpu ddp --gpu-ids 1,3`, counted from 0.
        (2, DDP | {"gpu_ids": [1, 3]}, Environment(1, 1, 2, launched=True), "", 1),
        # Slurm with --gpus-per-task=1: each task sees its own GPU, and no other.
        (1, {}, FOURTH, "", "LOCAL_RANK=3, but 1 GPU visible"),
        (1, {}, FOURTH, "3", 0),
    ],
)
def test_which_gpu(monkeypatch, gpus, settings, env, slurm, device):
    """Without a GPU here, with the number of GPUs that torch would report."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("SLURM_LOCALID", slurm) if slurm else monkeypatch.delenv("SLURM_LOCALID", raising=False)
    cfg = config.Config(**settings)
    if isinstance(device, str):
        with pytest.raises(LockstepError, match=device):
            pick_device(cfg, env)
        return
    assert pick_device(cfg, env) == torch.device("cuda", device)
    if settings.get("multi_gpu") == "dp":
        assert data_parallel_devices(cfg, torch.device("cuda", device)) == (1, 0)


@pytest.mark.parametrize(("visible", "given"), [(None, "2,0"), ("4,6,GPU-7f", "GPU-7f,4")])
def test_the_numbers_of_gpus_count_among_those_that_are_visible(monkeypatch, visible, given):
    """As CUDA itself counts: GPU 2 of `CUDA_VISIBLE_DEVICES=4,6,GPU-7f` is the third of these, not the machine's."""
    monkeypatch.setattr(os, "environ", {"PATH": ""} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    started = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append((os.environ["CUDA_VISIBLE_DEVICES"], words)))
    command.become_torchrun(config.Config(multi_gpu="ddp", gpu_ids=[2, 0]), strict=False)
    ((found, words),) = started
    assert found == given and "--nproc_per_node=2" in words


@pytest.fixture
def no_nccl(monkeypatch, tmp_path):
    """No variable and no file of NCCL's, and no InfiniBand; what is set here is unset again."""
    theirs = {name for name in os.environ if "NCCL_" in name} | {"GLOO_SOCKET_IFNAME", "MASTER_ADDR"}
    mine = {name: value for name, value in os.environ.items() if name not in theirs}
    monkeypatch.setattr(os, "environ", mine | {"HOME": str(tmp_path)})
    monkeypatch.setattr(listen, "INFINIBAND", tmp_path / "infiniband")
    return tmp_path


@pytest.mark.parametrize("known", ["", "file", "home", "infiniband"])
def test_nccl_is_given_the_interface_unless_it_finds_its_own(no_nccl, monkeypatch, known):
    """That one alone: without the = it would take eth10 for eth1."""
    monkeypatch.setattr(listen, "way_to", lambda host: ("10.0.0.2", "eth1"))
    if known == "infiniband":
        (listen.INFINIBAND / "mlx5_0").mkdir(parents=True)
    elif known:
        file = no_nccl / {"file": "nccl.conf", "home": ".nccl.conf"}[known]
        file.write_text("# of the cluster\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=ib0\n")
        os.environ |= {"NCCL_CONF_FILE": str(file)} if known == "file" else {}
    assert listen.choose_network(["10.0.0.1", "10.0.0.2"]) == "eth1 (10.0.0.2)"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1" and os.environ.get("NCCL_SOCKET_IFNAME") == (
        None if known else "=eth1"
    )


def test_gloo_is_given_the_interface_though_that_of_nccl_is_set(no_nccl, monkeypatch):
    """On GPUs both are used, and gloo would take that of the machine's own name."""
    monkeypatch.setattr(listen, "way_to", lambda host: ("10.0.0.2", "eth1"))
    os.environ |= {"NCCL_SOCKET_IFNAME": "ib0", "MASTER_ADDR": "10.0.0.1"}
    assert listen.choose_network([]) == "eth1 (10.0.0.2)"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth1", "ib0")
    assert listen.choose_network([]) == "", "the user's own"


@pytest.mark.parametrize(
    ("size", "asked", "device", "backend"),
    [
        (2, "auto", "cuda", "cpu:gloo,cuda:nccl"),
        (2, "nccl", "cuda", "cpu:gloo,cuda:nccl"),
        (2, "gloo", "cuda", "gloo"),
        (1, "auto", "cuda", "nccl"),
        (2, "auto", "cpu", "shm"),
        (2, "gloo", "cpu", "gloo"),
    ],
)
def test_several_gpus_have_gloo_beside_nccl(size, asked, device, backend):
    cfg = config.Config(ddp=config.DDP(backend=asked))
    environment = Environment(size=size, local_size=size, launched=True)
    assert pick_backend(cfg, environment, torch.device(device), False) == backend


JOINS = {
    # what is amiss: (secrets, backends, what ranks 0 and 1 say; whether all say the same)
    "nothing": ("aa", ["gloo", "gloo"], [None, None], False),
    "a backend": ("aa", ["gloo", "shm"], ["rank 1 joins with shm, rank 0 with gloo (ddp.backend)"] * 2, True),
    "a secret": ("ab", ["gloo"] * 2, [f"rank {one} and rank {two} have diff" for one, two in ("10", "01")], False),
    "a rank": (
        "a",
        ["gloo"],
        ["rank 1 of 2 could not join the others within 0.1 s (one:29500): check that all pro"],
        True,
    ),
}


@pytest.mark.parametrize("amiss", JOINS)
def test_who_cannot_join_is_named(monkeypatch, amiss):
    """By rank 0, which alone reads what all have sent."""
    secrets, backends, said, alike = JOINS[amiss]
    monkeypatch.setenv("MASTER_ADDR", "one"), monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(session, "local_ranks", [])
    store = dist.HashStore()
    cfg = SimpleNamespace(ddp=SimpleNamespace(init_timeout_s=0.1 if amiss == "a rank" else 9))

    def join(rank):
        env = Environment(rank, rank, 2, local_size=2, launched=True)
        try:
            return _meet(store, env, cfg, backends[rank], secrets[rank].encode())
        except LockstepError as error:
            return error

    with ThreadPoolExecutor(len(secrets)) as ranks:
        found = [*ranks.map(join, range(len(secrets)))]
    if amiss == "nothing":
        assert found[0] == found[1] and session.local_ranks == [0, 1]
        return
    for error, words in zip(found, said, strict=True):
        assert str(error).startswith(words) and error.exit_code == 6
    assert found[0].everywhere and found[-1].everywhere is alike


def test_objects_go_over_gloo_beside_another_backend_for_gpus(launch):
    """The other one here delivers nothing, and its device holds no data."""
    succeed(launch.torchrun(3, str(ROOT / "tests/ranks/objects.py")))


def test_nccl_leaves_the_last_word_to_the_watchdog(no_nccl, monkeypatch):
    """Nothing of it ends this process before the watchdog would; what the user has set stays."""
    monkeypatch.setattr(session, "attempt_store", None), monkeypatch.setattr(session, "job_store", None)
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    cfg = config.parse([TOY, "ddp.timeout_s=1800"], tasks.load).cfg
    rendezvous(Environment(), cfg, "gloo")
    assert not [name for name in os.environ if "NCCL_" in name]
    rendezvous(Environment(), cfg, "cpu:gloo,cuda:nccl")
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert int(os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > 1800
    for name in ("nccl2", "cuda:nccl2", "cuda:nccl2,cpu:gloo"):  # torch's other engine
        del os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"]
        rendezvous(Environment(), cfg, name)
        assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0", name
    os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "1"
    rendezvous(Environment(), cfg, "nccl")
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "1"
    scratch.remove_scratch(orphaned=False)


NCCL_SAYS = """NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled system error, NCCL version 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. 
Last error:
socketPollConnect: connect to 10.0.0.2<45000> returned No route to host
"""


NCCL2_SAYS = """NCCL error in: /torch/csrc/distributed/c10d/nccl2/NCCLBootstrap.cpp:9, system error, NCCL version 2.27.5
NCCL Last Error: socketPollConnect: connect to 10.0.0.2<45000> returned No route to host
"""


@pytest.mark.parametrize(
    "text", [NCCL_SAYS, NCCL_SAYS.replace("\n", "\n\n"), NCCL2_SAYS], ids=["nccl", "gaps", "nccl2"]
)
def test_an_error_of_nccl_keeps_its_reason(text):
    for error in (dist.DistBackendError(text), RuntimeError(text)):
        with (
            pytest.raises(
                LockstepError, match=r"could not join.*NCCL version 2\.27\.5: socketPollConnect: .*to host \("
            ),
            explained(Environment(1, 1, 2, launched=True)),
        ):
            raise error
        assert "version 2.27.5: socketPollConnect: " in str(failure_report.to_user_error(error, None))
    assert headline(RuntimeError("\none\ntwo")) == "one" and headline(RuntimeError("Last error:")) == "Last error:"


def test_a_port_in_use_is_named(launch, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = launch.python("train_ddp.py", TOY, f"save_dir={tmp_path / 'run'}", **by_hand(0, port, size=1))
    assert done.code == 2 and done.errors[0].startswith(f"error: port {port} is in use"), done.err


@pytest.mark.slow
def test_a_rank_that_never_comes_is_waited_for_no_longer_than_asked(launch, tmp_path):
    words = ["train.py", TOY, "ddp.init_timeout_s=2", f"--save-dir={tmp_path / 'run'}"]
    done = launch.python(*words, **by_hand(0, "0"), timeout=60)
    assert done.code == 6 and "could not join the others" in done.errors[0] and "1/2" in done.errors[0], done.err


@pytest.mark.slow
def test_torchrun_too_waits_for_a_missing_rank_no_longer_than_asked(launch, tmp_path):
    """Rank 1 goes away before it joins; gloo itself would wait for ddp.timeout_s."""
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, signal, sys, train\n"
        "if os.environ['RANK'] == '1': signal.pause()\n"
        "sys.exit(train.main(sys.argv[1:]))\n"
    )
    words = ["ddp.init_timeout_s=2", "ddp.timeout_s=200", f"save_dir={tmp_path / 'run'}"]
    done = launch.torchrun(2, str(wrapper), TOY, *words, timeout=100)
    assert done.code != 0 and "rank 1 of 2 could not join the others within 2 s" in done.errors[0], done.err


def test_started_alone_a_group_of_one_needs_no_address_and_is_left(launch, tmp_path):
    script = "import sys, train_ddp, torch.distributed as dist; code = train_ddp.main(sys.argv[1:]); "
    script += "sys.exit(code or dist.is_initialized())"
    succeed(launch.python("-c", script, TOY, "epochs=1", f"save_dir={tmp_path / 'run'}", MASTER_ADDR="localhost"))


def test_ranks_that_disagree_are_named_before_the_first_step(launch, tmp_path):
    """Rank 1 gets another learning rate, through a wrapper that looks at RANK."""
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, sys, train_ddp\n"
        "extra = ['lr=0.5'] if os.environ['RANK'] == '1' else []\n"
        "sys.exit(train_ddp.main(sys.argv[1:] + extra))\n"
    )
    agent = ("plugins/resilience/agent.py", "--standalone", "--nproc_per_node=2")
    done = launch.python(*agent, str(wrapper), TOY, f"save_dir={tmp_path / 'run'}")
    assert done.code == 2, "the same start would end in the same way"
    assert len(done.errors) == 1 and "rank 1 differs from rank 0 in config" in done.errors[0], done.err
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_code_are_named_with_the_file_before_the_first_step(launch, tmp_path):
    """The neighbour of rank 1's task is another, as on a machine whose checkout lags behind."""
    for rank, size in ((0, 8), (1, 9)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "near.py").write_text(f"UNUSED = {size}\n")
        own = "import near\nfrom tests.tasks.toy import Task as Toy\nclass Task(Toy):\n    size = near.UNUSED\n"
        (tmp_path / str(rank) / "own.py").write_text(own)
    wrapper = tmp_path / "wrapper.py"
    text = "import os, sys, train_ddp\nos.chdir(sys.argv[1] + os.environ['RANK'])\n"
    wrapper.write_text(text + "sys.exit(train_ddp.main(sys.argv[2:]))\n")
    done = launch.torchrun(2, str(wrapper), f"{tmp_path}/", "own.py", f"save_dir={tmp_path / 'run'}")
    assert done.code != 0
    assert len(done.errors) == 1 and "rank 1 differs from rank 0 in code of near.py: " in done.errors[0], done.err
    assert not (tmp_path / "run").exists()


def test_missing_data_is_one_message_from_all_ranks(launch, tmp_path):
    done = launch.torchrun(2, "train.py", "har", f"dataset.root={tmp_path / 'nowhere'}", f"save_dir={tmp_path / 'run'}")
    assert done.code != 0 and len(done.errors) == 1, done.err
    assert str(tmp_path / "nowhere") in done.errors[0]


def test_data_parallel_keeps_the_dtype_of_autocast_and_takes_inputs_by_name():
    """Its threads start without autocast: here a thread stands for one of them. `net(**inputs(batch))` is what
    `contract.inputs` calls."""
    inner = Autocast(torch.nn.Linear(2, 2), choose("bf16", torch.device("cpu")))
    with ThreadPoolExecutor() as threads:
        assert threads.submit(inner, torch.ones(1, 2)).result().dtype == torch.bfloat16
    assert torch.nn.DataParallel(inner)(input=torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.slow
@pytest.mark.real
def test_what_is_not_used_is_not_loaded(launch, tmp_path):
    """Torch's compiler takes as long to import as torch; a DDP, an optimizer and a checkpoint would each load it."""
    script = (
        "import sys, train_ddp; code = train_ddp.main(sys.argv[1:]); "
        "unused = {'torch._dynamo', 'torch.distributed.optim', 'sympy', 'wandb', 'av', 'pyarrow'}; "
        "print('loaded', *sorted(unused & set(sys.modules))); "
        "sys.exit(code)"
    )
    words = [TOY, "optim.ema_decay=0.9", f"save_dir={tmp_path / 'run'}"]
    done = succeed(launch.python("-c", script, *words, "steps=3"))
    assert done.out.splitlines()[-1] == "loaded"
    done = succeed(launch.python("-c", script, *words, "steps=6", "deterministic=true"))  # from a checkpoint
    assert "Resuming" in done.out and done.out.splitlines()[-1] == "loaded"


@pytest.mark.slow
def test_the_tools_that_will_refuse_a_task_are_named_before_it_trains(launch, tmp_path):
    bare = "from tests.tasks.toy import Task as Toy\nclass Task(Toy):\n    pass\n"
    (tmp_path / "bare.py").write_text(bare)
    done = succeed(launch.python("train.py", str(tmp_path / "bare.py"), "steps=1", f"save_dir={tmp_path / 'run'}"))
    (row,) = [line for line in done.out.splitlines() if line.strip().startswith("tools ")]
    named = dict(re.findall(r"(\w+) needs `(\w+)`", row))
    assert named == {"export": "export_module", "publish": "metadata", "predict": "predict"}, row
    for tool, method in named.items():
        words = {"predict": ["--split", "val"], "publish": ["--to", tmp_path / "out", "--license", "mit"]}.get(tool, [])
        tried = launch.python(f"tools/{tool}.py", tmp_path / "run", *words, "device=cpu")
        assert tried.code == 2 and f"`{method}`" in tried.errors[0], tried.err
