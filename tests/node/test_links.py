"""libzmq's descriptor speaks once of what a socket has: whatever is done to a socket meanwhile, it is not forgotten."""

import time

import pytest
import zmq

from kvferry.node.links import Links

LONG_S = 30.0


@pytest.fixture
def listening():
    links = Links("127.0.0.1", (0, 0), LONG_S, LONG_S)
    yield links
    links.close()


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def peer(context, links, name):
    """A raw connection to it, which has said its name."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.connect(f"tcp://127.0.0.1:{links.port}")
    socket.send(name)
    return socket


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def heard(links):
    """What came, once something has come and all that there is was taken."""
    found = []

    def take():
        if links.has_news():
            found.extend((received.link, received.data) for received in links.take())
        return found and not links.has_news()

    until(take)
    return found


def met(context, links, name):
    """A connection that was heard, from both ends."""
    socket = peer(context, links, name)
    ((link, data),) = heard(links)
    assert data == name
    return socket, link


def test_a_first_frame_is_heard_though_a_send_to_someone_who_is_gone_came_before_it_was_read(listening, context):
    """What a rank dials again after its connection was cut was left unanswered for ever, once in some 150 times."""
    gone, gone_link = met(context, listening, b"gone")
    gone.close(0)
    until(lambda: not listening.send(gone_link, b""))
    while listening.has_news():
        assert [*listening.take()] == []
    with peer(context, listening, b"new") as new:
        time.sleep(0.3)  # its frame waits, and nobody has asked for it
        assert not listening.send(gone_link, b"still there?")
        assert [data for _, data in heard(listening)] == [b"new"]
        new.send(b"more")
        assert [data for _, data in heard(listening)] == [b"more"]


def test_a_frame_is_heard_though_a_send_took_place_before_it_was_read(listening, context):
    socket, link = met(context, listening, b"one")
    with socket:
        socket.send(b"word")
        time.sleep(0.3)
        assert listening.send(link, b"answer")
        assert [data for _, data in heard(listening)] == [b"word"]


@pytest.mark.parametrize("stays", [True, False])
def test_last_words_are_heard_though_a_send_found_the_queue_full_or_gone(listening, context, stays):
    """A connection that this side made."""
    with context.socket(zmq.ROUTER) as far:
        far.setsockopt(zmq.RCVHWM, 1)
        port = far.bind_to_random_port("tcp://127.0.0.1")
        link = listening.dial(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}", b"here")
        listening.send(link, b"hello")
        name, _ = far.recv_multipart()
        while listening.has_news():
            assert [*listening.take()] == []
        far.send_multipart([name, b"last words"])
        time.sleep(0.3)
        if not stays:
            far.close(0)
            time.sleep(0.3)
        for _ in range(4):
            assert listening.send(link, b"?")  # a lost connection is news, later
        words = heard(listening)
        assert words[0] == (link, b"last words")
        assert ((link, None) in words) is not stays


def test_connections_that_come_and_go_on_one_side_take_nothing_from_the_others(listening, context):
    with context.socket(zmq.ROUTER) as far, peer(context, listening, b"one"):
        port = far.bind_to_random_port("tcp://127.0.0.1")
        time.sleep(0.3)
        link = listening.dial(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}", b"here")
        listening.send(link, b"hello")
        listening.drop(link)
        assert [data for _, data in heard(listening)] == [b"one"]
