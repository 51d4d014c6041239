"""Two hosts on one machine, joined by a link that can be slow or cut, for tests and for measurements.

    python tests/two_hosts.py --rate 1gbit --ranks 2 -- tests/bench/steps.py model=resnet18

starts a torchrun on each, and prints what they print. What follows ``--`` is torchrun's. It needs root.

A host is a set of Linux namespaces, so what differs between machines differs here: host names and process
numbers, network devices with their loopback, abstract Unix sockets, ``/dev/shm``. It has half of the cores.
Both see the same files. A third set is the switch between them: a host that dies is no lost carrier to the
other. No namespace has a name, and the first process of each ends with this process, however that ends. Then
the kernel ends the other processes of the namespace and removes its devices.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
# What a host has of its own. Its first process waits for the end of ours, at the other end of a pipe.
FIRST = """
set -e
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
for name in "127.0.0.1 localhost" "10.0.0.1 host0" "10.0.0.2 host1"; do echo $name; done > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
hostname $0
ip link set lo up
echo ready
exec cat
"""
# Options of torchrun with which a host that was lost may join again.
MEET = "--nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint host0:29500 --rdzv-id run"
MEET += " --rdzv-conf last_call_timeout=2"
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


class Host:
    def __init__(self, name: str, cores: Sequence[int]) -> None:
        self._cores = ",".join(map(str, cores))
        self._started = list[subprocess.Popen[str]]()
        command = ["unshare", *NAMESPACES, "--fork", "sh", "-c", FIRST, name]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._first = subprocess.Popen(command, **pipes, start_new_session=True)  # a Ctrl-C is not for it
        if self._first.stdout.readline() != "ready\n":
            raise OSError("there are no namespaces here: they need root, and unshare and ip")
        with open(f"/proc/{self._first.pid}/task/{self._first.pid}/children") as children:
            self.process = int(children.read())

    def kill(self) -> None:
        """End all processes of the host at once, as ``kill -9`` does, and remove its devices."""
        self._first.communicate()  # closes the pipe, and waits
        for each in self._started:
            each.wait()

    def end_all(self) -> None:
        """Kill all processes of the host but its first.

        Raises OSError if they would be those of this machine.
        """
        names = [os.readlink(f"/proc/{process}/ns/pid") for process in ("self", self.process)]
        if names[0] == names[1]:
            raise OSError("the host has no process namespace of its own")
        # Once more inside: the shell that kills, not the one that was asked for, must be in the namespace.
        command = f'[ "$(readlink /proc/self/ns/pid)" = "{names[1]}" ] && kill -9 -1'
        self.start("sh", "-c", command).wait()

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on the host. ``options``: those of `Popen`."""
        inside = ["nsenter", "--target", str(self.process), *NAMESPACES, "--wd=."]
        command = (*inside, "taskset", "-c", self._cores, *command)
        self._started.append(subprocess.Popen(command, start_new_session=True, text=True, **options))
        return self._started[-1]

    def network(self, line: str) -> None:
        """Run one line of ``ip`` or ``tc`` in the host's network."""
        command = ["nsenter", "--target", str(self.process), "--net", *line.split()]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise OSError(f"{line}: {done.stderr.strip()}")


class TwoHosts:
    """``hosts``: the two; ``switch``: what is between them."""

    def __init__(self, hosts: list[Host], switch: Host) -> None:
        self.hosts = hosts
        self.switch = switch

    def link(self, state: str) -> None:
        """Cut the link (down) or mend it (up). What is under way is lost, and nobody is told."""
        self.switch.network(f"ip link set port1 {state}")

    def torchrun(self, side: int, ranks: int, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start a torchrun of ``ranks`` ranks on a host, as on the first (0) or the second of two machines.

        ``arguments``: options of torchrun, which replace those here; the program and its arguments.
        """
        environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
        sizes = ["--nnodes", "2", "--node-rank", str(side), "--nproc-per-node", str(ranks)]
        launcher = [sys.executable, "-m", "torch.distributed.run", *sizes, "--master-addr", "host0"]
        options["env"] = environment | {"GLOO_SOCKET_IFNAME": "eth0"} | options.pop("env", {})
        return self.hosts[side].start(*launcher, *arguments, **options)


@contextlib.contextmanager
def two_hosts(rate: str | None = None) -> Iterator[TwoHosts]:
    """Make two hosts, which are gone after the block.

    ``rate``: of the link in each direction, as `tc` has it (1gbit, 100mbit); None: as fast as the machine.
    Raises OSError if that is not possible here.
    """
    cores = sorted(os.sched_getaffinity(0))
    shape = shaped(rate) if rate else ""
    with contextlib.ExitStack() as held:

        def host(name: str, cores: Sequence[int]) -> Host:
            made = Host(name, cores)
            held.callback(made.kill)
            return made

        switch = host("switch", cores)
        switch.network("ip link add bridge type bridge")
        switch.network("ip link set bridge up")
        hosts = [host(f"host{side}", cores[side::2] or cores) for side in (0, 1)]
        for side, made in enumerate(hosts):
            switch.network(f"ip link add port{side} type veth peer name eth0 netns {made.process}")
            switch.network(f"ip link set port{side} master bridge up")
            made.network(f"ip address add 10.0.0.{side + 1}/24 dev eth0")
            made.network("ip link set eth0 up")
            if shape:
                made.network(f"tc qdisc add dev eth0 root {shape}")
        yield TwoHosts(hosts, switch)


def shaped(rate: str) -> str:
    """Return what `tc` makes of a device: bursts of 4 ms, or of one large packet, and a queue of 100 ms."""
    match = re.fullmatch(r"([0-9.]+)([kmg])bit", rate)
    if match is None:
        raise ValueError(f"expected a rate like 1gbit or 100mbit, found {rate}")
    burst = max(65_536, int(float(match[1]) * UNITS[match[2]] * 0.004 / 8))
    return f"tbf rate {rate} burst {burst} latency 100ms"


def main() -> int:
    """Start the command line's program on two hosts. Return 1 if either torchrun fails."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rate", help="of the link in each direction, as 1gbit or 100mbit")
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--flap", type=float, default=0.0, help="cut it often, for up to so many seconds")
    parser.add_argument("program", nargs="+", help="what torchrun starts, as -m shardtrain.train")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with two_hosts(given.rate) as two:
            started = [two.torchrun(side, given.ranks, *given.program) for side in (0, 1)]
            while None in (codes := [each.poll() for each in started]):
                time.sleep(0.1)
                if given.flap:
                    time.sleep(random.uniform(0, 2 * given.flap))
                    two.link("down")
                    time.sleep(random.uniform(0, given.flap))
                    two.link("up")
            return int(any(codes))
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
