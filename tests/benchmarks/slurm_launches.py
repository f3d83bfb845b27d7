"""The launch scripts under a real SLURM: `make test-slurm`, on a machine with Debian's slurm-wlm and munge.

The cluster is four virtual nodes on this machine, 127.0.0.1 to 127.0.0.4, with a key, ports and files of its own. Not
part of `make test`, which needs no SLURM: there stubs stand for its commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.support import zygote
from tests.support.elastic_runs import balanced_stages
from tests.support.launch import ROOT, free_port

LAUNCH = ROOT / "examples" / "launch"
QUICK = ["--iterations=2", "--n_layer=2", "--n_embd=32", "--vocab_size=64", "--block_size=16", "--batch_size=8"]
NODES = [f"127.0.0.{number}" for number in (1, 2, 3, 4)]
CONFIGURATION = """\
ClusterName=penstock
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
KillWait=30
PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=60
"""


class Cluster:
    """A SLURM of four virtual nodes in a folder."""

    def __init__(self, folder: Path) -> None:
        missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
        assert not missing, f"no {', '.join(missing)} on this machine: apt-get install slurm-wlm munge"
        self.folder = folder
        host = socket.gethostname()
        text = CONFIGURATION.format(host=host, port=free_port(), user="root", folder=folder)
        for node in NODES:
            text += f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={free_port()} CPUs=4 RealMemory=1000\n"
        (folder / "slurm.conf").write_text(text)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self.environment = {
            **zygote.environment(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "EXAMPLES": str(ROOT / "examples"),
            "HF_HUB_OFFLINE": "1",
        }
        files = [f"--{name}={folder}/munge.{end}" for name, end in (("pid-file", "pid"), ("log-file", "log"))]
        files += [f"--seed-file={folder}/munge.seed", f"--key-file={key}", f"--socket={folder}/munge.socket"]
        self._munge = ["munged", "--force", *files]

    def open(self) -> None:
        self.run(*self._munge)
        self.run("slurmctld")
        for node in NODES:
            self.start(node)
        for node in NODES:
            self.await_idle(node)

    def run(self, *command: str) -> str:
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, f"{command}: {result.stdout[-3000:]}{result.stderr[-3000:]}"
        return result.stdout

    def start(self, node: str) -> None:
        (self.folder / f"spool.{node}").mkdir(exist_ok=True)
        self.run("slurmd", "-N", node)

    def await_idle(self, node: str) -> None:
        wait_until(lambda: self.state_of(node) == "idle", f"{node} is idle, but {self.state_of(node)}", 60)

    def state_of(self, node: str) -> str:
        return self.run("sinfo", "-h", "-n", node, "-o", "%T").strip()

    def lose(self, node: str) -> None:
        """What an outage of the node does: nothing that ran there goes on."""
        mine = f"SLURMD_NODENAME={node}\0".encode()
        tasks = {int(path.name) for path in Path("/proc").glob("[0-9]*") if mine in read(path / "environ")}
        parents = {int(read(Path(f"/proc/{task}/stat")).rpartition(b")")[2].split()[1]) for task in tasks}
        steps = {parent for parent in parents if b"slurmstepd" in read(Path(f"/proc/{parent}/cmdline"))}
        for process in [int((self.folder / f"slurmd.{node}.pid").read_text()), *steps, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def submit(self, *command: str | Path, nodes: int = 1, **variables: str) -> Job:
        """A job whose script's headers for GPUs and cores are overridden."""
        output = self.folder / f"output.{time.monotonic_ns()}"
        words = ["sbatch", "--parsable", "-o", str(output), "--open-mode=append", f"--nodes={nodes}"]
        words += ["--gpus-per-node=0", "--cpus-per-task=1", "--mem=100"]
        words.append(",".join(["--export=ALL", *(f"{name}={value}" for name, value in variables.items())]))
        return Job(self, self.run(*words, *map(str, command)).strip(), output)

    def close(self) -> None:
        for name in ["slurmctld", *(f"slurmd.{node}" for node in NODES), "munge"]:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGTERM)


class Job:
    def __init__(self, cluster: Cluster, number: str, output: Path) -> None:
        self._cluster, self.number, self._output = cluster, number, output

    def printed(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def state(self) -> str:
        listed = self._cluster.run("scontrol", "show", "job", self.number)
        return listed.partition("JobState=")[2].split()[0]

    def reaches(self, text: str, seconds: float = 120) -> None:
        wait_until(
            lambda: text in self.printed(), f"{text!r} is printed; printed was {self.printed()[-3000:]}", seconds
        )

    def ends(self, state: str, seconds: float = 240) -> str:
        """What it printed, once it has ended in this state."""
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        wait_until(lambda: self.state() not in running, f"job {self.number} ends: {self.printed()[-3000:]}", seconds)
        assert self.state() == state, f"{self.state()}: {self.printed()[-4000:]}"
        return self.printed()


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended, or is the kernel's
        return b""


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"after {seconds} s it is not so that {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.open()
            yield cluster
            cluster.run("scancel", "--user", "root")
        finally:
            cluster.close()
            time.sleep(2)


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text((ROOT / "src/penstock/api/plugin.py").read_text() * 2)
    return str(file)


def trained(output: Path) -> int:
    """The parameters of the ordinary checkpoint that an example leaves."""
    return AutoModelForCausalLM.from_pretrained(output / "gpt2").num_parameters()


def test_one_node_trains(cluster: Cluster, tmp_path: Path, text: str) -> None:
    command = [LAUNCH / "slurm_one_node.sh", "run_gpt2.py", "--pipelines", "2x4", "--steps", "2", "--dataset", text]
    job = cluster.submit(*command, "--output", tmp_path, PROCESSES_PER_NODE="2")
    assert "GPT2LMHeadModel: 1 pipeline(s) on 2 rank(s)" in job.ends("COMPLETED") and trained(tmp_path) > 0


def assert_no_trace(printed: str) -> None:
    """But for that of torchrun's exit barrier: its store goes with the first agent, maybe before all have read it."""
    lines = [line for line in printed.splitlines() if "elastic/agent/server/api.py" not in line]
    assert not any("Traceback" in line or "rendezvous" in line for line in lines), printed[-4000:]


def test_two_nodes_of_two_processes_train_unlike_pipelines(cluster: Cluster, tmp_path: Path, text: str) -> None:
    command = [LAUNCH / "slurm_many_nodes.sh", "run_gpt2.py", "--pipelines", "1x2,3x6", "--steps", "2"]
    job = cluster.submit(*command, "--dataset", text, "--output", tmp_path, nodes=2, PROCESSES_PER_NODE="2")
    printed = job.ends("COMPLETED")
    assert "2 pipeline(s) on 4 rank(s)" in printed and trained(tmp_path) > 0
    assert_no_trace(printed)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "pp", "pipeline"])
def test_the_benchmark_runs_on_four_nodes(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    output = tmp_path / "figures.json"
    options = ["--pipelines=2x4,2x4"] if kind == "pp" else []
    script = ROOT / "benchmarks/suite/launch/benchmark.sbatch"
    gpus = "2" if kind == "pipeline" else "1"  # its processes drive two devices each
    before, here = Path.cwd(), ROOT / "benchmarks/suite"
    os.chdir(here)
    try:
        job = cluster.submit(script, kind, *QUICK, f"--output={output}", *options, nodes=4, GPUS_PER_NODE=gpus)
    finally:
        os.chdir(before)
    printed = job.ends("COMPLETED")
    assert_no_trace(printed)
    content = json.loads(output.read_text())
    assert content["world"]["size"] == 4 and len(content["step_seconds"]) == 2


def test_a_cancelled_job_leaves_a_whole_checkpoint_and_the_next_goes_on(
    cluster: Cluster, tmp_path: Path, text: str
) -> None:
    command = [LAUNCH / "slurm_one_node.sh", "run_gpt2.py", "--pipelines", "2x4", "--dataset", text]
    command += ["--output", tmp_path, "--save-every", "100000", "--resume"]
    job = cluster.submit(*command, "--steps", "100000", PROCESSES_PER_NODE="2")
    job.reaches("step    1")
    cluster.run("scancel", job.number)
    job.ends("CANCELLED")
    (saved,) = (tmp_path / "gpt2/checkpoints").glob("step-*")
    steps = int(saved.name.partition("-")[2])
    assert steps > 0
    cluster.run("penstock", "inspect", str(saved))  # compares every value with its checksum
    again = cluster.submit(*command, "--steps", str(steps + 2), PROCESSES_PER_NODE="2")
    printed = again.ends("COMPLETED")
    assert f"step {steps + 2:4d}" in printed and "step    1 " not in printed and trained(tmp_path) > 0


def test_a_job_that_is_requeued_goes_on_from_its_checkpoint(cluster: Cluster, tmp_path: Path, text: str) -> None:
    command = [LAUNCH / "slurm_one_node.sh", "run_gpt2.py", "--pipelines", "2x4", "--dataset", text, "--resume"]
    command += ["--output", tmp_path, "--save-every", "1", "--steps", "300"]
    job = cluster.submit("--requeue", *command, PROCESSES_PER_NODE="2")
    wait_until(lambda: any((tmp_path / "gpt2/checkpoints").glob("step-*")), "a checkpoint is there", 120)
    cluster.run("scontrol", "requeue", job.number)
    printed = job.ends("COMPLETED", 600)
    assert printed.count("step    1 ") == 1 and printed.count("step  300 ") == 1 and trained(tmp_path) > 0


@pytest.mark.timeout(600)
def test_an_elastic_run_survives_a_lost_node_and_takes_in_a_new_one(cluster: Cluster, tmp_path: Path) -> None:
    steps = 1500
    script = tmp_path / "elastic_job.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.support.elastic_script import main\n"
        f"main(os.environ['STORE'], {str(tmp_path)!r}, {steps}, int(os.environ['START']))\n"
    )
    templates = [balanced_stages("gpt2", "{}", depth) for depth in (1, 2, 3)]
    (tmp_path / "templates.json").write_text(json.dumps(templates))
    store = f"tcp://{socket.gethostname()}:{free_port()}"
    os.environ["TEMPLATES"] = cluster.environment["TEMPLATES"] = json.dumps(templates)

    def notes(name: str) -> set[str]:
        """The values of this kind that any process of the run has noted."""
        lines = [line for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines() if line[-1] == "}"]
        return {str(note[name]) for note in map(json.loads, lines) if name in note}

    # The store of the first job serves the second one too, so its port is said in advance.
    keeper = subprocess.Popen(["penstock", "store", "--port", store.rpartition(":")[2]], env=cluster.environment)
    try:
        variables = {"STORE": store, "START": "3", "PROCESSES_PER_NODE": "1"}
        job = cluster.submit(LAUNCH / "elastic_slurm.sh", script, nodes=3, **variables)
        wait_until(lambda: "5" in notes("done"), f"five steps are done: {job.printed()[-3000:]}", 120)
        cluster.lose(NODES[2])
        wait_until(lambda: "1" in notes("generation"), f"the others go on: {job.printed()[-3000:]}", 30)
        added = cluster.submit(LAUNCH / "elastic_slurm.sh", script, nodes=1, **variables)
        wait_until(lambda: "2" in notes("generation"), f"the new one is in: {added.printed()[-3000:]}", 90)
        assert "Traceback" not in added.ends("COMPLETED")
        job.ends("COMPLETED")
    finally:
        keeper.kill()
    assert str(steps - 1) in notes("done")
    cluster.start(NODES[2])
    cluster.await_idle(NODES[2])
