"""A real Slurm of several nodes on this machine (Linux, root, Debian's slurm-wlm and munge).

Every node is a set of namespaces (mounts, host name, processes, shared memory, and where asked its own network) with
a munged and a slurmd of its own; the controller lives in another. A node's first process holds everything in it, so
that one kill is a power cut. The kernel ends them with this process, however it ends: no daemon can be left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from egmla_megatron.parallel.child_processes import end_with

__all__ = ["PROGRAMS", "Cluster", "missing_programs"]

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "unshare", "nsenter", "ip", "tc", "pgrep")
HEAD = "head"
START_LIMIT_S = 60.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Each daemon of a node sees its own munge socket, /dev/shm and host name. No unit manager is needed; `wait` reaps what
# Slurm leaves behind.
_NODE_SCRIPT = """
name=$1 folder=$2
until [ -e "$folder/$name/wired" ]; do sleep 0.02; done
hostname "$name"
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$folder/$name/munge" "$folder/munge"
munged -F --force --key-file="$folder/key" --socket="$folder/munge/socket" --seed-file="$folder/munge/seed" \\
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --num-threads=2 &
until [ -S "$folder/munge/socket" ]; do sleep 0.02; done
if [ "$name" = head ]; then slurmctld -D -i -c & else slurmd -D -N "$name" & fi
while :; do sleep 1 & wait -n; done
"""

# Without accounting, cgroups and process affinity: none is needed to launch, signal, kill and requeue.
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MailProg=/bin/true
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdTimeout=15
InactiveLimit=0
KillWait=60
MinJobAge=3600
JobRequeue=1
SlurmdParameters=config_overrides
{addresses_only}
GresTypes=gpu
TaskProlog={folder}/choose_gpu
NodeName=node[1-{nodes}] NodeAddr={network}.[1-{nodes}] Port=[{first}-{last}] CPUs=16 RealMemory=100000 {gres}
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 OverSubscribe=NO
"""


def missing_programs() -> list[str]:
    """Programs that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


class Cluster:
    """N nodes and a controller. `stop` ends all of it; a test session that is killed ends it too.

    Args:
        nodes: node1 .. nodeN.
        networks: give every node a network of its own, whose link `shape` can cap.
        gpus: device files, one for each node's GPU.
    """

    def __init__(self, nodes: int, *, networks: bool = False, gpus: Sequence[str] = ()) -> None:
        assert len(gpus) in (0, nodes), f"one GPU for each of {nodes} nodes, got {gpus}"
        self.nodes, self.networks, self.gpus = nodes, networks, gpus
        self.network = "198.18.77" if networks else "127.77.0"
        self.folder = Path(tempfile.mkdtemp(prefix="egmla-slurm-"))  # short: sockets have paths of at most 107 bytes
        self.held: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._write_files()
            for name in (HEAD, *self.names):
                self.boot(name)
            self.wait_until(self.all_idle, START_LIMIT_S)
        except BaseException:
            print(self.logs(), file=sys.stderr)
            self.stop()
            raise

    @property
    def names(self) -> list[str]:
        """Names of the nodes that compute."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    def _write_files(self) -> None:
        for name in ("munge", "state"):
            (self.folder / name).mkdir()
        key = self.folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        addresses = {"127.0.0.1": "localhost", f"{self.network}.254": HEAD}
        addresses |= {f"{self.network}.{number}": name for number, name in enumerate(self.names, 1)}
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for address, name in addresses.items()))
        port = 26000 + os.getpid() % 500 * 10
        text = _CONFIGURATION.format(
            head=f"{self.network}.254",
            folder=self.folder,
            port=port,
            first=port + 1,
            last=port + self.nodes,
            nodes=self.nodes,
            network=self.network,
            gres="Gres=gpu:1" if self.gpus else "",
            # in one network all daemons share 127.0.0.0/8: each must bind its own address there
            addresses_only="" if self.networks else "CommunicationParameters=NoCtldInAddrAny",
        )
        (self.folder / "slurm.conf").write_text(text)
        devices = zip(self.names, self.gpus, strict=False)
        (self.folder / "gres.conf").write_text(
            "AutoDetect=off\n" + "".join(f"NodeName={name} Name=gpu File={file}\n" for name, file in devices)
        )
        # Slurm counts the GPUs of every node from 0, but the nodes share the machine's
        chooser = self.folder / "choose_gpu"
        chooser.write_text(f"#!/bin/sh\n[ {len(self.gpus)} = 0 ] || echo export CUDA_VISIBLE_DEVICES=$SLURM_NODEID\n")
        chooser.chmod(0o755)
        # looking for cgroups fails where there is no systemd; naming a version stops the search
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    def boot(self, name: str) -> None:
        """Start a node, or the controller."""
        parent = os.getpid()
        shutil.rmtree(self.folder / name, ignore_errors=True)
        for part in ("munge", "spool"):
            (self.folder / name / part).mkdir(parents=True)
        spaces = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        command = ["unshare", *spaces, *(["--net"] if self.networks else []), "bash", "-c", _NODE_SCRIPT, "node"]
        with (self.folder / f"{name}.boot.log").open("wb") as log:
            self.held[name] = subprocess.Popen(
                [*command, name, str(self.folder)],
                env={"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: end_with(parent, signal.SIGKILL),
            )
        if self.networks:
            self._wire(name)
        (self.folder / name / "wired").touch()

    def _first_process(self, name: str) -> int:
        """Process 1 of a node, as this machine counts."""
        pid = self.held[name].pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        self.wait_until(lambda: bool(children.read_text().split()), 10)
        return int(children.read_text().split()[0])

    def _inside(self, name: str, *command: str) -> None:
        """Run a command in the network of a node."""
        inside = ["nsenter", "--net", "--target", str(self._first_process(name)), "--", *command]
        subprocess.run(inside, check=True, capture_output=True)

    def _wire(self, name: str) -> None:
        """A switch in the controller's network, and a cable to it from every node."""
        if name == HEAD:
            self._inside(HEAD, "ip", "link", "add", "switch", "type", "bridge")
            self._inside(HEAD, "ip", "address", "add", f"{self.network}.254/24", "dev", "switch")
            self._inside(HEAD, "ip", "link", "set", "switch", "up")
        else:
            number, port, pid = name.removeprefix("node"), f"to-{name}", str(self._first_process(name))
            self._inside(HEAD, *f"ip link add {port} type veth peer name eth0 netns {pid}".split())
            self._inside(HEAD, *f"ip link set {port} master switch up".split())
            self._inside(name, *f"ip address add {self.network}.{number}/24 dev eth0".split())
            self._inside(name, *["ip", "link", "set", "eth0", "up"])
        self._inside(name, *["ip", "link", "set", "lo", "up"])

    def shape(self, name: str, rate: str) -> None:
        """Cap both directions of a node's link, for example at 100mbit."""
        limits = f"root tbf rate {rate} burst 256kb latency 200ms".split()
        self._inside(HEAD, "tc", "qdisc", "replace", "dev", f"to-{name}", *limits)
        self._inside(name, "tc", "qdisc", "replace", "dev", "eth0", *limits)

    def environment(self) -> dict[str, str]:
        """What a client needs to find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *command: str, on: str = HEAD) -> list[str]:
        """A command line that runs `command` inside a node, in its network and among its processes."""
        return ["nsenter", "--all", "--target", str(self._first_process(on)), "--", *command]

    def kill(self, name: str) -> None:
        """Cut a node's power: everything in it ends at once."""
        process = self.held.pop(name)
        process.kill()
        process.wait()

    def call(self, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """Output of a Slurm command; an AssertionError with what it said when it fails."""
        done = self.attempt(*command, cwd=cwd, env=env)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def run_on(self, node: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside a node, among its processes and mounts."""
        inside = self.command(*command, on=node)
        return subprocess.run(inside, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)

    def attempt(
        self, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as on the login node, which shares the controller's network and munge."""
        inside = ["nsenter", "--net", "--mount", "--uts", "--target", str(self._first_process(HEAD)), "--"]
        where = [f"--wdns={cwd}"] if cwd else []
        return subprocess.run(
            [*inside[:-1], *where, "--", *command],
            env={"PATH": _PATH, "HOME": os.environ.get("HOME", "/root"), **(env or {}), **self.environment()},
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )

    def wait_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait; an AssertionError when it takes too long."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"{condition} took more than {limit_s:.0f} s"
            time.sleep(0.1)

    def all_idle(self) -> bool:
        """Whether every node waits for a job."""
        done = self.attempt("sinfo", "--noheader", "--Node", "--format=%T")
        return done.stdout.split() == ["idle"] * self.nodes

    def logs(self) -> str:
        """Ends of the daemons' logs, for the message of a failure."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            parts.append(f"== {path.name}\n" + path.read_text(errors="replace")[-1500:])
        return "\n".join(parts)

    def stop(self) -> None:
        """End every node and remove all files."""
        for process in self.held.values():
            process.kill()
        for process in self.held.values():
            process.wait()
        self.held.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not self.folder.exists(), f"{self.folder} could not be removed"
