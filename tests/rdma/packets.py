"""What the RDMA device has sent: a transport that falls back to TCP or shared memory does not move this counter."""

from pathlib import Path

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
MOST_PAYLOAD_BYTES = 4096
"""The largest path MTU that verbs have; the lab's own is smaller."""


def sent_packets():
    return int((COUNTERS / "sent_pkts").read_text())


def least_packets(nbytes):
    """How many packets so many bytes are at least."""
    return nbytes // MOST_PAYLOAD_BYTES
