"""A token of its own for each peer: who was told one of them can't pass for another peer."""

import pytest

from kvferry.engines.grants import GrantTable
from kvferry.engines.local import LocalEngine, blob
from kvferry.engines.seam import EngineConfig, Outcome, Region
from kvferry.ids import PeerId
from kvferry.pool import allocate_pool
from kvferry.testing.faulty import Faulty

WRITER, TARGET = 1, 2


@pytest.fixture(params=["cma", "shm", "tcp"])
def ends(request):
    made = []
    pool = allocate_pool(1 << 16, kind="memfd")
    for incarnation in (WRITER, TARGET):
        engine = LocalEngine()
        engine.open(EngineConfig(PeerId(incarnation), GrantTable(), options={"mechanism": request.param}))
        engine.register([Region(pool.address, pool.nbytes)])
        made.append(engine)
    yield made
    for engine in made:
        engine.close()
    pool.close()


def attached(writer, target, epoch, said):
    ticket = writer.attach(PeerId(TARGET, epoch), said)
    for _ in range(100):
        for done in writer.poll(0.1):
            if done.ticket == ticket:
                return done
        target.poll(0)
    raise AssertionError("no answer")


def test_a_peer_attaches_with_the_token_of_its_connection(ends):
    writer, target = ends
    for epoch in (0, 1, 7):
        said = target.personal(target.describe(), epoch)
        assert attached(writer, target, epoch, said).outcome is Outcome.LANDED


@pytest.mark.parametrize(("told", "claims"), [(5, 6), (5, 0), (0, 5)])
def test_a_token_of_another_connection_opens_nothing(ends, told, claims):
    writer, target = ends
    said = target.personal(target.describe(), told)
    done = attached(writer, target, claims, said)
    assert done.outcome is Outcome.FAILED_QUIET


def test_every_connection_is_told_another_token_and_the_rest_is_the_same(ends):
    _, target = ends
    said = [blob.decode(target.personal(target.describe(), epoch)) for epoch in range(4)]
    assert len({each.token for each in said}) == 4
    assert len({(each.unix, each.tcp_port, each.host, each.nonce_digest) for each in said}) == 1


def test_a_wrapper_hands_it_on():
    class Plain:
        name = "plain"

    assert Faulty(Plain()).personal(b"blob", 3) == b"blob"
    engine = LocalEngine()
    engine.open(EngineConfig(PeerId(WRITER), GrantTable(), options={"mechanism": "tcp"}))
    said = engine.describe()
    assert Faulty(engine).personal(said, 3) == engine.personal(said, 3) != said
    engine.close()
