"""Small matters of wording."""


def count(number: int, what: str) -> str:
    """A number with its noun: "1 room", "2 rooms"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
