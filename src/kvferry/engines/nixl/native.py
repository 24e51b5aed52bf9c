"""What the library's exceptions mean: the one table from its errors to ours."""

from __future__ import annotations

from typing import NamedTuple

ERRORS = {
    "nixlNotFoundError": "the memory or the peer is not known to the library",
    "nixlInvalidParamError": "the library does not take these arguments",
    "nixlMismatchError": "the metadata is not an agent's, or both sides' lists differ",
    "nixlBackendError": "the backend failed",
    "nixlRemoteDisconnectError": "the connection is gone: the peer's process ended, or the network is cut",
    "nixlRepostActiveError": "the transfer is under way already",
    "nixlNotAllowedError": "the library does not allow it",
    "nixlNotPostedError": "the transfer was never posted",
    "nixlNotSupportedError": "the backend can't do it",
    "nixlCancelledError": "the transfer was cancelled",
    "nixlUnknownError": "the library does not say why",
    "TransferFailed": "the transfer ended in the state ERR",
}
"""By the name of the exception's class; its text is the native code."""


class TransferFailed(Exception):
    """A transfer's state is ERR, for which the library has no exception."""

    def __init__(self) -> None:
        super().__init__("NIXL_XFER_ERR")


class NativeError(NamedTuple):
    """An error in words, and its native code."""

    cause: str
    native: str


def explain(error: Exception) -> NativeError:
    """Say what an exception means; one that is not in the table speaks for itself."""
    name = type(error).__name__
    words = ERRORS.get(name)
    if words is None:
        return NativeError(f"{name}: {error}", name)
    return NativeError(words, str(error) or name)
