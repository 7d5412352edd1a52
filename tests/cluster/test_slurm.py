"""tools/slurm.sbatch under a real Slurm of two hosts: its time is over, or another job wants the hosts: it is requeued,
and the run is resumed.

Needs root and Slurm: apt-get install --no-install-recommends slurm-wlm munge iproute2. The daemons run on the hosts of
tests/kit/hosts.py, with files, sockets and ports of their own: a Slurm of this machine sees nothing of them.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
from cluster_run import RUN, assert_the_same, slowly, train_straight
from conftest import PATIENCE
from hosts import two_hosts

pytestmark = pytest.mark.slow

CONF = """
ClusterName=lockstep
SlurmctldHost=one(10.93.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is requeued waits as long as a credential is valid: 120 s by default, 5 at least.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
NodeName=one NodeAddr=10.93.0.1 CPUs=1
NodeName=two NodeAddr=10.93.0.2 CPUs=1
PartitionName=main Nodes=one,two Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=one,two MaxTime=INFINITE PriorityTier=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


class Slurm:
    """Two nodes, one and two; the controller is on one."""

    def __init__(self, launch, hosts, folder):
        self.launch, self.one, self.folder = launch, hosts[0], folder
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        (folder / "state").mkdir()
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self.daemons = [
            self.start(hosts[0], "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files),
            self.start(hosts[0], "slurmctld", "-D"),
            *(self.start(host, "slurmd", "-D", "-N", host.name) for host in hosts),
        ]
        self.wait(lambda: "idle 2" in self("sinfo", "--noheader", "--format=%T %D"), "two nodes are idle")

    def start(self, host, *daemon):
        (self.folder / f"spool.{host.name}").mkdir(exist_ok=True)
        return self.launch.start(*daemon, host=host, **self.env)

    def __call__(self, *command):
        """Return the output of one of Slurm's commands."""
        done = self.launch(*command, host=self.one, **self.env)
        return done.out + done.err

    def wait(self, true, what, seconds=60):
        deadline = time.monotonic() + seconds * PATIENCE
        while not true():
            dead = [daemon.said() for daemon in self.daemons if daemon.process.poll() is not None]
            assert not dead and time.monotonic() < deadline, f"never: {what}\n{dead}\n{self.logs()}"
            time.sleep(0.2)  # polling with a deadline

    def logs(self):
        return "\n".join(f"==== {file.name}\n{file.read_text()[-3000:]}" for file in self.folder.glob("*.log"))


@pytest.fixture
def slurm(launch):
    missing = [tool for tool in ("slurmctld", "slurmd", "munged") if not shutil.which(tool)]
    if missing or os.geteuid():
        tools = f"{' and '.join(missing)} (apt-get install slurm-wlm munge)"
        pytest.skip(f"needs {tools if missing else 'root'}")
    # Munge wants folders that everybody may pass through, which pytest's are not.
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder, two_hosts() as hosts:
        os.chmod(folder, 0o755)
        yield Slurm(launch, hosts, Path(folder))


def test_a_job_whose_time_is_over_is_requeued_and_resumes(launch, slurm, tmp_path):
    """Slurm looks every 30 s whose time will be over in 90: with a limit of a minute that is first half a minute after
    the controller's start, in the long step. The second start gets more time."""
    run, output = tmp_path / "run", tmp_path / "job.out"
    long_step = ["fault.kind=slow", "fault.step=5", "fault.seconds=25", f"fault.once={tmp_path / 'once'}"]
    words = ["tools/slurm.sbatch", *RUN, *long_step, "--save-dir", str(run)]
    job = slurm("sbatch", "--parsable", "--time=1", f"--output={output}", *words).strip()
    assert job.isdigit(), job

    def is_done():
        state = slurm("scontrol", "show", "job", job)
        assert not re.search("JobState=(FAILED|TIMEOUT|NODE_FAIL|CANCELLED)", state), output.read_text()
        return "JobState=COMPLETED" in state

    slurm.wait(lambda: (output.exists() and "Stopped after" in output.read_text()) or is_done(), "the run has stopped")
    assert not slurm("scontrol", "update", f"jobid={job}", "timelimit=60")
    slurm.wait(is_done, "the job is done")
    said = output.read_text()
    assert said.count(f" of job {job} on one,two") == 2, said
    assert "Stopped after step 5 of 60: SIGUSR1" in said and f"Resuming {run}/step_5.pt" in said, said
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert_the_same(run, train_straight(launch, tmp_path / "straight"))


def test_a_job_makes_room_comes_back_and_can_be_cancelled(launch, slurm, tmp_path):
    run, output = tmp_path / "run", tmp_path / "job.out"
    words = [f"--output={output}", "tools/slurm.sbatch", *RUN, *slowly(0.3), "--save-dir", str(run)]

    def said(*words):
        text = output.read_text() if output.exists() else ""
        return all(word in text for word in words)

    def state(job):
        found = re.search(r"JobState=(\w+)", slurm("scontrol", "show", "job", job))[1]
        assert found not in ("FAILED", "TIMEOUT", "NODE_FAIL"), output.read_text()
        return found

    job = slurm("sbatch", "--parsable", "--partition=main", *words).strip()
    slurm.wait(lambda: said("step 10/60"), "ten steps")
    other = ["--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=true"]
    urgent = slurm("sbatch", "--parsable", *other).strip()
    slurm.wait(lambda: state(urgent) == "COMPLETED", "the urgent job is done")
    stopped = re.search(r"Stopped after step (\d+) of 60: SIGTERM", output.read_text())
    slurm.wait(lambda: state(job) and said(f"Resuming {run}/step_{stopped[1]}.pt"), "the run is resumed")
    slurm.wait(lambda: said(f"step {int(stopped[1]) + 5}/60"), "five more steps")
    assert not slurm("scancel", job)
    slurm.wait(lambda: state(job) == "CANCELLED", "the job has ended")
    assert output.read_text().count(f" of job {job} on one,two") == 2
    now = json.loads((run / "status.json").read_text())
    assert now["state"] == "stopped" and int(stopped[1]) + 5 <= now["step"] < 60
    again = slurm("sbatch", "--parsable", "--partition=main", *words).strip()
    slurm.wait(lambda: state(again) == "COMPLETED", "the same command ends the run")
    assert said(f"Resuming {run}/step_{now['step']}.pt")
    assert_the_same(run, train_straight(launch, tmp_path / "straight"))
