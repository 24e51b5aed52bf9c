"""Mooncake over its RDMA transport."""

from typing import ClassVar

from fenced import FencedWriters
from verbs_suite import VerbsSuite
from whole_run import carry

from engine_here import need

need("mooncake")
OPTIONS = {"protocol": "rdma", "devices": "rxe0", "timeout_s": "5"}


class TestMooncake(FencedWriters, VerbsSuite):
    engine_name = "mooncake"
    options: ClassVar = OPTIONS
    label = "Mooncake verbs"


def test_a_whole_run():
    carry("mooncake", OPTIONS)
