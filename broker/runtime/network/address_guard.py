"""Restricts connections to public addresses. The check runs when a socket is created, on the address to connect to.

Therefore a second DNS answer, an odd spelling or a literal address in the URL cannot evade the check.
"""

import errno
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

NOT_PUBLIC = "is not a public address"
AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[str | int, ...]]

REFUSED_V4 = tuple(
    IPv4Network(network)
    for network in (
        "100.64.0.0/10",  # shared by a provider's customers (CGNAT)
        "168.63.129.16/32",  # Azure's host, though it looks public
        "192.0.0.0/24",  # protocol assignments, among them a cloud's metadata
        "192.88.99.0/24",  # 6to4 relays
    )
)
GLOBAL_V6 = IPv6Network("2000::/3")
"""Allocated IPv6 addresses. Excludes ::, mapped and compatible IPv4, NAT64, unique and link local, and multicast."""
REFUSED_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, among them Teredo, which carries an IPv4 address
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which carries an IPv4 address too
        "3fff::/20",  # documentation
    )
)


class AddressRefused(OSError):
    """The host's address is not on the public Internet."""

    def __init__(self, address: str) -> None:
        super().__init__(errno.EACCES, f"{address} {NOT_PUBLIC}")


def public(text: str) -> bool:
    """Return True for an address of the public Internet in its usual form; otherwise False."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in REFUSED_V4)
    return _public_v6(address)


def _public_v6(address: IPv6Address) -> bool:
    if address.scope_id is not None or address not in GLOBAL_V6:
        return False
    return not any(address in network for network in REFUSED_V6)


def public_socket(info: AddressInfo) -> socket.socket:
    """Return the socket for a resolved address. Raises AddressRefused."""
    family, kind, protocol, _, address = info
    if not public(str(address[0])):
        raise AddressRefused(str(address[0]))
    return socket.socket(family, kind, protocol)
