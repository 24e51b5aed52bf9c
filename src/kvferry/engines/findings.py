"""What an engine finds out about the host that it runs on, as plain records for people and programs.

An engine may have a method `tryout() -> list[Finding]`; it needs no `open`, may take seconds, and raises nothing.
`kvferry engines` shows what it returns.
"""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing that was tried or read.

    Attributes:
        key: what, as a stable name.
        works: whether it works here; None for a plain fact.
        text: how it was tried, why it does not work, or the fact in words.
        value: the fact as a number or name, if it is one.
    """

    key: str
    works: bool | None
    text: str
    value: int | str | None = None
