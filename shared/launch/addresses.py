"""The address at which rank 0 listens."""

from __future__ import annotations

import ipaddress
import socket

from shared.errors import ConfigError


def reachable_address(one_node: bool, master: str) -> str:
    """Return the address to bind, as in a tcp:// address: loopback when the whole launch is on this node, else one by
    which the others reach this host, that of the rendezvous; where the host's own name is 127.0.1.1 (Debian) the one
    from which it reaches others. Raises ConfigError if it has none.
    """
    if one_node:
        return "127.0.0.1"
    addresses = dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(master, None, type=socket.SOCK_DGRAM))
    on_this_host = master == "localhost" or master in addresses  # a literal address is meant as it stands
    candidates = [each for each in addresses if on_this_host or not ipaddress.ip_address(each).is_loopback]
    for address in [*candidates, *map(_speaks_from, ("192.0.2.1", "2001:db8::1"))]:
        if address and _is_ours(address):
            return f"[{address}]" if ":" in address else address
    raise ConfigError(
        f"the launch has several nodes, but {master} (--master-addr, or torchrun's --rdzv-endpoint) is no address "
        "of this host by which others could reach it: give the address of its network interface there"
    )


def _speaks_from(target: str) -> str:
    """Return this host's address on the route to `target` (nothing is sent); "" without a route or on loopback."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
    return "" if ipaddress.ip_address(address).is_loopback else address


def _is_ours(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
