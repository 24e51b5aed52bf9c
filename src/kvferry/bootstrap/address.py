"""Addresses of the bootstrap server, in every form that people write them."""

from __future__ import annotations

import ipaddress
import re

from kvferry.errors import AddressError

DEFAULT_PORT = 8998
"""The port that routers of disaggregated serving expect."""

_HINT = "write host:port, http://host:port or [ipv6]:port"
_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?", re.ASCII | re.DOTALL)


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Split an address into host (IPv6 without brackets) and port.

    Args:
        text: "host", "host:port", "http://host:port", "[::1]", "[::1]:port" or a bare IPv6 literal.
        default_port: what to take where no port is written.

    Raises:
        AddressError: the text is none of these forms.
    """
    if not isinstance(text, str):
        raise AddressError(f"bootstrap address {text!r} is no text", hint=_HINT)
    rest = text.strip().removeprefix("http://").removesuffix("/")
    if "://" in rest:
        raise AddressError(f"bootstrap address {text!r} is not plain http", hint=_HINT)
    bracketed = _BRACKETED.fullmatch(rest)
    if bracketed:
        host, port = bracketed.group(1), bracketed.group(2)
    elif rest.count(":") > 1:  # an IPv6 literal can't carry a port without brackets
        host, port = rest, None
    else:
        host, colon, tail = rest.partition(":")
        port = tail if colon else None
    if not (_is_ipv6(host) if bracketed or ":" in host else _NAME.fullmatch(host)):
        raise AddressError(f"bootstrap address {text!r} has no valid host ({host!r})", hint=_HINT)
    return host, default_port if port is None else _parse_port(port, text)


def join_address(host: str, port: int) -> str:
    """Write host and port as one text, with brackets around an IPv6 literal."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _parse_port(port: str, text: str) -> int:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise AddressError(f"bootstrap address {text!r}: port {port!r} is not within 1 and 65535", hint=_HINT)
    return int(port)
