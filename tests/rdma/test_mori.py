"""MORI over its RDMA backend."""

from typing import ClassVar

from fenced import FencedWriters
from verbs_suite import VerbsSuite
from whole_run import carry

from engine_here import need

need("mori")
OPTIONS = {"backend": "rdma", "qp_retry_count": "3", "attach_timeout_s": "60", "transfer_timeout_s": "60"}


class TestMori(FencedWriters, VerbsSuite):
    engine_name = "mori"
    options: ClassVar = OPTIONS
    label = "MORI verbs"


def test_a_whole_run():
    carry("mori", OPTIONS)
