"""The network interface by which this machine reaches another one: nothing listens elsewhere.

"Another one" may be this machine itself: its loopback address, or its address in a cluster.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # request of Linux's ioctl: the address of an interface
DISCARD_PORT = 9  # port of RFC 863; nothing is sent to it


def listen_at(host: str, port: int = 0, *, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at an address or name, of IPv4 where the name has both.

    Args:
        port: 0: any that is free.
        backlog: connections that wait to be accepted; None: the system's default.

    Raises:
        OSError: the address is not available. OverflowError: there is no such port.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = [family for family, *_ in found]
    if socket.AF_INET in families:
        family = socket.AF_INET
    else:
        family = families[0]
    listening = socket.create_server((host, port), family=family, backlog=backlog)
    # Its connections inherit it; asyncio sets it only on sockets that were made with the protocol's
    # number. Without it the body of an answer waits 40 ms for the client's acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def http_url(host: str, port: int) -> str:
    """Return the URL of a server.

    Example:
        >>> http_url("::1", 80)
        'http://[::1]:80'
    """
    if ":" in host:
        return f"http://[{host}]:{port}"
    return f"http://{host}:{port}"


def address_towards(address: str) -> str:
    """Return this machine's IPv4 address from which it reaches another one; OSError if none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, DISCARD_PORT))
        return str(probe.getsockname()[0])


def interface_to(address: str) -> str:
    """Return the network interface by which this machine reaches an address; OSError if none."""
    mine = address_towards(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == mine:
                    return name
    raise OSError(f"no network interface has the address {mine}")
