"""Which network interface leads to another machine."""

import array
import contextlib
import ipaddress
import socket
import struct
import sys

ANYWHERE = "192.0.2.1"  # of no machine (RFC 5737); the way there is the way out
LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
SIOCGIFCONF = 0x8912  # of Linux: all interfaces with their IPv4 addresses
RECORD = 40  # bytes of one of its answers on 64-bit machines: name (16), family, port, address


def interface_towards(host: str, several_machines: bool) -> str | None:
    """Return the name of the interface that a connection to a host goes through, None where that can't be told.

    On many systems a machine's own name resolves to 127.0.0.1, where no other machine can reach it. If several machines
    take part, the interface of the default route stands in for loopback then, unless loopback was named.

    Args:
        host: name or address.
        several_machines: whether others than this one have to reach this process.
    """
    address = _source_address(host)
    if address is None:
        return None
    if several_machines and ipaddress.ip_address(address).is_loopback and not _is_loopback_by_name(host):
        address = _source_address(ANYWHERE) or address
    return next((name for name, own in ipv4_addresses() if own == address), None)


def ipv4_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) of every IPv4 address of this machine; empty where the system does not say."""
    if sys.platform != "linux" or struct.calcsize("P") != 8:
        return []
    import fcntl

    buffer = array.array("B", bytes(RECORD * 256))
    address, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, SIOCGIFCONF, struct.pack("iL", size, address))
        except OSError:
            return []
    used = struct.unpack("iL", answer)[0]
    found = buffer.tobytes()
    return [
        (found[at : at + 16].split(b"\0", 1)[0].decode(), socket.inet_ntoa(found[at + 20 : at + 24]))
        for at in range(0, used, RECORD)
    ]


def _source_address(host: str) -> str | None:
    """Return this machine's IPv4 address on the way to a host; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
    return None


def _is_loopback_by_name(host: str) -> bool:
    if host.lower() in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
