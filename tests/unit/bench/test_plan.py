"""`kvferry bench plan`: its cases make the rows that they name, whatever else is measured."""

import pytest

from kvferry.bench.plan import CASES, CONTACT, PlanSpec, measure
from kvferry.errors import InputError

ROWS = {
    "61 layers x 2048 pages, scattered": 61 * 2048,
    "TP 4 -> 1 NHD, 4096 pages": 32 * 2 * 4096 * 16,
    "16 -> 64, prefix 37, 128k tokens": 32 * 2 * 8190,
    "interleaved deal, 128k tokens": 32 * 2 * (1 << 17) // 4,
    "interleaved, 16 -> 64, prefix 37": 32 * 2 * ((1 << 17) // 4 - 10),
}


@pytest.fixture(scope="module")
def report():
    said = []
    found = measure(PlanSpec(repeats=1), said.append)
    assert said == [*ROWS, CONTACT]
    return found


def test_each_case_makes_its_rows(report):
    # pages that follow each other by chance on both sides are one row
    assert {case.case: case.rows for case in report.cases[:-1]} == pytest.approx(ROWS, rel=1e-3)
    assert report.cases[-1].case == CONTACT
    assert [case.name for case in CASES] == list(ROWS)
    for case in report.cases[:-1]:
        assert case.rows_per_s == pytest.approx(case.rows / case.seconds)


def test_memory_does_not_grow_with_the_rows(report):
    """A row is 24 bytes in its batch: 4 million of them are made in the memory of a few batches."""
    rows = {case.case: case for case in report.cases}
    assert rows["TP 4 -> 1 NHD, 4096 pages"].peak_bytes < 8 << 20


@pytest.mark.parametrize("spec", [PlanSpec(repeats=0), PlanSpec(seed=-1)])
def test_numbers_that_make_no_sense_are_refused(spec):
    with pytest.raises(InputError, match="is below"):
        measure(spec, print)
