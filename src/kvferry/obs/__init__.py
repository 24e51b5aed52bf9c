"""What can be observed: events as plain records, written as JSON lines."""

from kvferry.obs.events import Event, EventWriter, read_event

__all__ = ["Event", "EventWriter", "read_event"]
