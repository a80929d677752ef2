"""The formula beside the numbers that papers report, misses included."""

from pathlib import Path

import pytest

from labs import gpipe
from labs.kit import page

ROWS = page.read(Path(__file__).parent.parent / "book" / "published" / "gpipe.csv")
BASE = {2: (2, 1), 3: (2, 32), "torchgpipe": (2, 1)}  # what a table is normalised to


def devices(stages, microbatches):
    return stages * (1 - gpipe.bubble_fraction(stages, microbatches))


def off(row):
    """By which part of the reported number the formula misses it."""
    formula = devices(row["K"], row["M"]) / devices(*BASE[row["table"]])
    return formula / row["value"] - 1


def rows(table, model, microbatches=None):
    chosen = [r for r in ROWS if (r["table"], r["model"]) == (table, model)]
    return [r for r in chosen if microbatches in (None, r["M"])]


@pytest.mark.parametrize(
    "chosen",
    [
        rows(2, "Transformer", 32),
        rows(3, "Transformer"),
        rows("torchgpipe", "AmoebaNet"),
    ],
    ids=["table 2", "table 3", "torchgpipe"],
)
def test_equal_stages_and_many_microbatches_fit_within_a_tenth(chosen):
    assert len(chosen) >= 3
    assert all(abs(off(row)) < 0.1 for row in chosen)


def test_the_ratio_without_a_base_fits_within_four_percent():
    two, _, eight = (row["value"] for row in rows(2, "Transformer", 32))
    assert devices(8, 32) / devices(2, 32) == pytest.approx(eight / two, rel=0.04)


def test_the_chapter_tells_the_misses_as_they_are():
    few = [off(row) for row in rows(2, "Transformer", 4)]
    assert min(few) == pytest.approx(-0.394, abs=5e-4)
    unequal = [off(row) for row in rows(2, "AmoebaNet", 32)]
    assert min(unequal) == pytest.approx(0.603, abs=5e-4)
    assert max(unequal) == pytest.approx(0.988, abs=5e-4)


@pytest.mark.parametrize("stages, bubble", [(2, 1 / 9), (8, 7 / 39), (10**6, 0.2)])
def test_four_times_as_many_microbatches_leave_11_to_20_percent(stages, bubble):
    assert gpipe.bubble_fraction(stages, 4 * stages) == pytest.approx(bubble, abs=1e-6)
