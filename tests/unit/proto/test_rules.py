"""The tables themselves: each row has a test, nothing leads out of an end, and each action exists."""

import pathlib
import re

import pytest

from kvferry.errors import ProtocolError
from kvferry.proto import rules
from kvferry.proto.claim import Claim
from kvferry.proto.offer import Offer
from kvferry.proto.rules import CLAIM, OFFER, PEER, ClaimState, OfferEvent, OfferState, PeerState

TABLES = {"offer": OFFER, "claim": CLAIM, "peer": PEER}
ENDS = {OfferState.DELIVERED, OfferState.QUIET, ClaimState.SUCCESS, ClaimState.QUIET, PeerState.GONE}


def test_each_row_of_each_table_has_a_test():
    marked = set()
    for path in pathlib.Path(__file__).parent.glob("test_*.py"):
        found = re.findall(r"@pytest\.mark\.row\((\w+)\.(\w+), (\w+)\.(\w+)\)", path.read_text())
        marked |= {(getattr(rules, kind)[state], getattr(rules, what)[event]) for kind, state, what, event in found}
    assert marked == {row for table in TABLES.values() for row in table}


@pytest.mark.parametrize("name", TABLES)
def test_nothing_leads_out_of_an_end(name):
    assert not [state for state, _ in TABLES[name] if state in ENDS]
    assert {row.next for row in TABLES[name].values()} & ENDS


@pytest.mark.parametrize("name", TABLES)
def test_a_failed_room_never_succeeds(name):
    good = {OfferState.DELIVERED, ClaimState.SUCCESS, PeerState.READY}
    bad = rules.FAILED_OFFERS | rules.FAILED_CLAIMS | {PeerState.REFUSED, PeerState.LOST, PeerState.GONE}
    assert not [state for (state, _), row in TABLES[name].items() if state in bad and row.next in good]


@pytest.mark.parametrize(("name", "kind"), [("offer", Offer), ("claim", Claim)])
def test_each_action_is_a_method_that_says_what_it_does(name, kind):
    actions = {action for row in TABLES[name].values() for action in row.actions}
    assert all(getattr(kind, action).__doc__ for action in actions)


def test_only_ways_into_an_end_that_frees_pages_release_them():
    for table in (OFFER, CLAIM):
        for row in table.values():
            frees = row.next in ENDS - {ClaimState.SUCCESS}
            assert ("release" in row.actions) == frees


class Door:
    state = OfferState.WAITING

    def __init__(self):
        self.calls = []

    def join(self, link):
        self.calls.append((self.state, link))

    def pump(self, link):
        self.calls.append(("pump", link))


def test_a_transition_sets_the_state_and_then_runs_its_actions_in_order():
    door = Door()
    assert rules.fire(OFFER, door, OfferEvent.JOIN, "link")
    assert door.calls == [(OfferState.WAITING, "link"), ("pump", "link")]


def test_an_event_without_a_row_is_late_where_the_room_has_ended():
    door = Door()
    door.state = OfferState.QUIET
    assert not rules.fire(OFFER, door, OfferEvent.JOIN, "link")
    assert door.calls == []


def test_an_event_without_a_row_is_a_mistake_elsewhere():
    with pytest.raises(ProtocolError, match="door in state 'waiting' has no event 'drained'"):
        rules.fire(OFFER, Door(), OfferEvent.DRAINED)
