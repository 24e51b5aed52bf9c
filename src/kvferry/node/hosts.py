"""Where this process listens, and what address peers are told."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from kvferry.config import Config
from kvferry.errors import AddressError, ConfigError


class Plane(NamedTuple):
    """Where one plane listens.

    Attributes:
        bind: the numeric address to listen on.
        advertised: the host that peers are told: a name or an address, without brackets.
    """

    bind: str
    advertised: str


def control_plane(config: Config) -> Plane:
    """The control plane's addresses.

    Raises:
        AddressError: a name does not resolve.
        ConfigError: other hosts could reach it and `insecure` is not set, or peers would be told a wildcard.
    """
    return _plane(config, "bind_host", "advertise_host")


def data_plane(config: Config) -> Plane:
    """The data plane's addresses: its own settings, else those of the control plane. Raises like control_plane."""
    bind = "data_bind_host" if config.data_bind_host else "bind_host"
    told = "advertise_host" if bind == "bind_host" else bind
    return _plane(config, bind, "data_advertise_host" if config.data_advertise_host else told)


def _plane(config: Config, bind: str, told: str) -> Plane:
    if not getattr(config, told):
        told = bind
    address = _bound_address(getattr(config, bind), bind, insecure=config.insecure)
    return Plane(address, _advertised_host(getattr(config, told), told))


def _bound_address(given: str, setting: str, *, insecure: bool) -> str:
    """The numeric address of a host to bind to, which may be a name."""
    host = _bare(given)
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise AddressError(
            f"{setting} {given!r} does not resolve: {getattr(error, 'strerror', None) or error}",
            hint="use an address of this host, e.g. 127.0.0.1 or ::1",
        ) from None
    if not ipaddress.ip_address(address).is_loopback and not insecure:
        raise ConfigError(
            f"{setting} {given!r} is not loopback, and the control plane has no keys in this version",
            hint="pass insecure=True (--insecure) on a network where every host is trusted, or bind to 127.0.0.1",
        )
    return address


def _advertised_host(given: str, setting: str) -> str:
    """The host that peers are told; a wildcard is refused, because nobody can connect to it."""
    host = _bare(given)
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = False
    if wildcard:
        raise ConfigError(
            f"{setting} {given!r} is a wildcard: no peer can connect to it",
            hint="set advertise_host (data_advertise_host) to the address at which peers reach this host",
        )
    return host


def tcp_endpoint(host: str, port: int) -> str:
    """The address as ZeroMQ writes it, with brackets around IPv6."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
