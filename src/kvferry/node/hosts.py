"""Where this process listens, and what address peers are told."""

from __future__ import annotations

import ipaddress
import socket

from kvferry.config import Config
from kvferry.errors import AddressError, ConfigError


def bound_address(config: Config) -> str:
    """The numeric address of `bind_host`, which may be a name.

    Raises:
        AddressError: the name does not resolve.
        ConfigError: other hosts could reach it, and `insecure` is not set.
    """
    host = _bare(config.bind_host)
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise AddressError(
            f"bind_host {config.bind_host!r} does not resolve: {getattr(error, 'strerror', None) or error}",
            hint="use an address of this host, e.g. 127.0.0.1 or ::1",
        ) from None
    if not ipaddress.ip_address(address).is_loopback and not config.insecure:
        raise ConfigError(
            f"bind_host {config.bind_host!r} is not loopback, and the control plane has no keys in this version",
            hint="pass insecure=True (--insecure) on a network where every host is trusted, or bind to 127.0.0.1",
        )
    return address


def advertised_host(config: Config) -> str:
    """The host that peers are told: a name or an address, without brackets.

    Raises:
        ConfigError: it is a wildcard, to which nobody can connect.
    """
    host = _bare(config.advertised)
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = False
    if wildcard:
        raise ConfigError(
            f"{'advertise_host' if config.advertise_host else 'bind_host'} {config.advertised!r} is a wildcard: "
            "no peer can connect to it",
            hint="set advertise_host to the address at which peers reach this host",
        )
    return host


def tcp_endpoint(host: str, port: int) -> str:
    """The address as ZeroMQ writes it, with brackets around IPv6."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
