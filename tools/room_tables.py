"""Print docs/room-tables.md from the tables in kvferry.proto.rules (`make docs` writes it)."""

from kvferry.proto import rules

HEAD = """# The room tables

Written by `make docs` from `kvferry.proto.rules`; the code has no other transitions. An event that a row does not
list is ignored and counted in the states that say "late: ignored", and a mistake of the caller elsewhere. The actions
are methods of `Offer` and `Claim`; ARCHITECTURE.md says what the states mean.
"""


def table(title: str, rows: dict) -> str:
    lines = [f"\n## {title}\n", "| state | event | next state | actions |", "|---|---|---|---|"]
    for (state, event), row in rows.items():
        lines.append(f"| {state.value} | {event.value} | {row.next.value} | {', '.join(row.actions)} |")
    lines += [f"| {state.value} | anything else | {state.value} | late: ignored |"
              for state in type(next(iter(rows))[0]) if state in rules.LATE]  # fmt: skip
    return "\n".join(lines)


def render() -> str:
    parts = [
        table("Offer: the sender's room", rules.OFFER),
        table("Claim: the receiver's room", rules.CLAIM),
        table("Peer: one connection epoch of another process", rules.PEER),
    ]
    return HEAD + "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(render(), end="")
