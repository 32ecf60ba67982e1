"""Several hosts on one Linux machine: network namespaces, joined by links of limited bandwidth and latency.

    python benchmarks/hosts.py --hosts 2 --rate 1gbit -- examples/train.py runs/community-2 --model gat --epochs 3
    python benchmarks/hosts.py --hosts 2 --rate 1gbit --delay 100us -- examples/train.py runs/community-2

What follows ``--`` runs under ``torch.distributed.run`` in every host: ranks are those of the hosts, in order. The
output of host 0 is shown, that of another one where it fails. All hosts share the processors and the memory of the
machine, the network is their own: each has one link, to a switch, which takes ``rate`` in either direction, and packets
leave ``delay`` late.

Exit status 77 says that the machine does not permit this, and why: it takes root, ``ip`` and ``tc``, and a kernel with
namespaces, veth, bridge, tbf and, for ``--delay``, netem.
"""

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77  # as in automake's tests
LINK = "eth0"  # the link of a host, by its name inside
REFUSALS = ("permitted", "denied", "unknown", "not supported", "read-only")  # what tools say of rights and kernels
GRACE = 5.0  # seconds in which hosts may end by themselves after one has failed, to say what they saw


class Unavailable(RuntimeError):
    """The machine does not permit hosts."""


class Hosts:
    """Makes hosts and a switch when entered, and removes them with all that runs there when left.

    Everything, the switch included, is inside namespaces of unique names, so that several of these coexist and nothing
    else on the machine sees them.

    Args:
        count: Number of hosts.
        rate: Bandwidth of every link in either direction, as ``tc`` writes it, or None for no limit.
        delay: What every packet waits before it leaves a host, as ``tc`` writes it, or None.
    """

    def __init__(self, count: int, rate: str | None = None, delay: str | None = None) -> None:
        self.rate, self.delay = rate, delay
        name = f"sar-{os.getpid()}-{secrets.token_hex(2)}"
        self.switch, self.names = f"{name}-switch", [f"{name}-{k}" for k in range(count)]

    def __enter__(self) -> "Hosts":
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise Unavailable("Simulated hosts need Linux and root.")
        absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if absent:
            raise Unavailable(f"Simulated hosts need {' and '.join(absent)} (package iproute2).")
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def address(self, host: int) -> str:
        """Address of a host; other simulated networks may use the same ones."""
        return f"10.77.0.{host + 1}"

    def _make(self) -> None:
        for name in (self.switch, *self.names):
            tool("ip netns add", name)
        tool("ip -n", self.switch, "link add switch type bridge")
        tool("ip -n", self.switch, "link set switch up")
        for k, name in enumerate(self.names):
            port = f"port{k}"
            tool("ip -n", self.switch, "link add", port, "type veth peer name", LINK, "netns", name)
            tool("ip -n", self.switch, "link set", port, "master switch up")
            tool("ip -n", name, "link set lo up")
            tool("ip -n", name, "link set", LINK, "addrgenmode none")  # or it had an address of IPv6, too
            tool("ip -n", name, "addr add", f"{self.address(k)}/24", "dev", LINK)
            tool("ip -n", name, "link set", LINK, "up")
            self._limit(name, LINK, self.delay)
            self._limit(self.switch, port, None)

    def _limit(self, name: str, device: str, delay: str | None) -> None:
        """Limit what a device sends."""
        parent = "root"
        if self.rate:
            # A burst above the largest packet that travels whole (64 KiB), or the kernel would cut each of them.
            tool("tc -n", name, "qdisc add dev", device, "root handle 1: tbf burst 128kb latency 50ms rate", self.rate)
            parent = "parent 1:1"
        if delay:
            tool("tc -n", name, "qdisc add dev", device, parent, "handle 2: netem limit 100000 delay", delay)

    def run(
        self, command: Sequence[str], nproc: int = 1, env: Mapping[str, str] | None = None, echo: bool = True
    ) -> list[str]:
        """Run a script under ``torch.distributed.run`` in every host and return what each has written to its output.

        Args:
            command: The script and its arguments.
            nproc: Processes of a host.
            env: Environment variables, or None for those of this process.
            echo: Whether to show what host 0 writes.

        Raises:
            RuntimeError: When a host fails; what runs in the others has then ended, too.
        """
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.names))]
        launch += ["--nproc-per-node", str(nproc), "--rdzv-backend", "c10d", "--rdzv-id", secrets.token_hex(4)]
        launch += ["--rdzv-endpoint", f"{self.address(0)}:29500"]
        settings = {**(os.environ if env is None else env), "GLOO_SOCKET_IFNAME": LINK, "NCCL_SOCKET_IFNAME": LINK}
        running = []
        try:
            for k, name in enumerate(self.names):
                # Ranks follow the order of these addresses. The hosts have one name, by which none could be found.
                own = ["--local-addr", self.address(k), "--rdzv-conf", f"is_host={int(k == 0)}"]
                words = ["ip", "netns", "exec", name, *launch, *own, *command]
                running.append(Running(words, settings, echo and k == 0))
            failed = wait(running)
        finally:
            self._kill()
            for one in running:
                one.join()
        if failed is not None:
            told = [f"host {k}:\n{one.text()}" for k, one in enumerate(running) if not (echo and k == 0)]
            status = f"Host {failed} failed with exit status {running[failed].process.returncode}"
            raise RuntimeError("\n".join([f"{status}: {' '.join(command)}", *told]))
        return [bytes(one.written[0]).decode() for one in running]

    def _kill(self) -> None:
        """End what runs in the hosts; workers have sessions of their own, so that a process group is not enough."""
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        """Remove the hosts; links vanish with the namespaces that hold them."""
        self._kill()
        for name in (self.switch, *self.names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def tool(*words: str) -> None:
    """Run ``ip`` or ``tc``."""
    line = " ".join(words)
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode == 0:
        return
    said = f"'{line}': {done.stderr.strip()}"
    if not any(word in said.lower() for word in REFUSALS):
        raise RuntimeError(f"Could not make a simulated host: {said}")
    hint = " This kernel has no netem: do without a delay." if "netem" in line else ""
    raise Unavailable(f"The machine does not permit simulated hosts: {said}{hint}")


class Running:
    """A process whose output and errors are kept while it runs, and shown if somebody wants to see them."""

    def __init__(self, words: list[str], env: Mapping[str, str], echo: bool) -> None:
        self.process = subprocess.Popen(words, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.written = (bytearray(), bytearray())
        ways: list[tuple[Any, Any]] = [(self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)]
        self.threads = [
            threading.Thread(target=keep, args=(pipe, kept, shown.buffer if echo else None))
            for (pipe, shown), kept in zip(ways, self.written, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def text(self) -> str:
        return "\n".join(bytes(kept).decode(errors="replace") for kept in self.written)

    def join(self) -> None:
        self.process.wait()
        for thread in self.threads:
            thread.join()


def keep(pipe: BinaryIO, kept: bytearray, shown: BinaryIO | None) -> None:
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            kept += data
            if shown is not None:
                shown.write(data)
                shown.flush()


def wait(running: list[Running]) -> int | None:
    """Wait until all have ended, or for a short while after one has failed; return which one did first."""
    failed, deadline = None, float("inf")
    while time.monotonic() < deadline:
        states = [one.process.poll() for one in running]
        if failed is None and any(states):
            failed, deadline = next(k for k, state in enumerate(states) if state), time.monotonic() + GRACE
        if None not in states:
            break
        time.sleep(0.05)
    return failed


def end_in_order() -> None:
    """Have this process, if it is terminated, remove its hosts before it ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main(args: argparse.Namespace) -> int:
    end_in_order()
    try:
        with Hosts(args.hosts, args.rate, args.delay) as hosts:
            hosts.run(args.command, args.nproc_per_host)
    except Unavailable as error:
        print(f"hosts.py: skipped: {error}", file=sys.stderr)
        return SKIPPED
    except RuntimeError as error:
        print(f"hosts.py: error: {error}", file=sys.stderr)
        return 1
    return 0


def links(parser: argparse.ArgumentParser, rate: str | None) -> None:
    """Add the options that say what the links are like."""
    parser.add_argument("--rate", default=rate, help=f"bandwidth of a link, such as 1gbit (default: {rate or 'any'})")
    parser.add_argument("--delay", help="latency of a link, such as 100us (default: none but the kernel's own)")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--nproc-per-host", type=int, default=1)
    links(parser, None)
    parser.add_argument("command", nargs="+", help="after '--': a script and its arguments")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(parse()))
