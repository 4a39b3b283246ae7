"""Two hosts with a link between them, as network namespaces of this machine.

The storage is shared, and stays so: a file system of the network may outlive the link between the hosts.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack

from tests.saving.ranks.faults import Fault

# The first two ranks are on one host, the last is on the other.
HOSTS, FAR = ("near", "near", "far"), 2
ADDRESSES = {"near": "10.213.7.1", "far": "10.213.7.2"}
INTERFACE = "host0"
LEFT_OUT = "left out: network namespaces need root and iproute2"


def linked_hosts(stack: ExitStack) -> dict[str, str]:
    """Make two network namespaces that a stack removes, and return their names; none where they cannot be made."""
    names = {host: f"safepoint-{os.getpid()}-{host}" for host in ADDRESSES}
    try:
        for name in names.values():
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        near, far = names.values()
        ip("-n", near, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", far)
    except (OSError, subprocess.CalledProcessError):
        return {}
    for host, name in names.items():
        ip("-n", name, "address", "add", f"{ADDRESSES[host]}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            ip("-n", name, "link", "set", device, "up")
    return names


def cut(hosts: dict[str, str], *, rank: int, phase: str) -> Fault:
    """Return the case of a link that goes down where a rank begins a phase, and comes up before the next start."""
    link = f"ip -n {hosts[HOSTS[rank]]} link set {INTERFACE}"
    return Fault(
        cut_name(rank, phase),
        rank,
        phase,
        f"{link} down",
        hosts=[hosts[host] for host in HOSTS],
        address=ADDRESSES["near"],
        interface=INTERFACE,
        mend=f"{link} up",
    )


def cut_name(rank: int, phase: str) -> str:
    """Return the name of such a case."""
    return f"rank-{rank}-{phase}-cut"


def ip(*arguments: str) -> None:
    """Call iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
