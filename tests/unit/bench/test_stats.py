"""What is said of a series of times."""

import pytest

from kvferry.bench.stats import Times, added_percent, gb_per_s, times_of


def test_percentiles_of_a_series_are_interpolated():
    found = times_of([second / 100 for second in range(101)])
    assert found == Times(median_s=0.5, best_decile_s=pytest.approx(0.1), p99_s=pytest.approx(0.99), samples=101)


def test_the_order_of_the_samples_does_not_matter():
    assert times_of([3.0, 1.0, 2.0]) == times_of([1.0, 2.0, 3.0])


def test_a_single_time_is_all_three():
    assert times_of([0.25]) == Times(0.25, 0.25, 0.25, 1)


def test_no_time_is_an_error():
    with pytest.raises(ValueError, match="no time was measured"):
        times_of([])


def test_gigabytes_are_powers_of_ten():
    assert gb_per_s(3_000_000_000, 2.0) == 1.5


def test_what_was_added_is_the_median_of_the_pairs_not_the_ratio_of_the_medians():
    base = [1.0, 10.0, 100.0]
    assert added_percent(base, [1.1, 11.0, 500.0]) == pytest.approx(10)
    assert added_percent(base, [0.9, 9.0, 1.0]) == pytest.approx(-10)


def test_series_of_different_length_have_no_pairs():
    with pytest.raises(ValueError, match="argument 2"):
        added_percent([1.0, 2.0], [1.0])
