"""The formulas beside the numbers that papers report."""

from pathlib import Path

import pytest

from labs.kit import page
from labs.single_gpu import RULES, memory, mfu, training_time, transformer_flops

ROWS = page.read(Path(__file__).parent.parent / "book" / "published" / "single_gpu.csv")
DAY, YEAR = 86400, 365.25 * 86400


def rows(table):
    chosen = [row for row in ROWS if row["table"] == table]
    assert chosen, table
    return chosen


def days(row):
    return training_time(row["P"], row["T"], row["n"] * row["X"], factor=8) / DAY


@pytest.mark.parametrize("row", rows("days"), ids=lambda row: row["model"])
def test_days_of_training_in_the_text_of_the_paper(row):
    assert days(row) == pytest.approx(row["value"], abs=0.5)


@pytest.mark.parametrize("row", rows("days 2"), ids=lambda row: f"{row['n']}")
def test_days_of_training_in_table_2_are_some_percent_more(row):
    """Equation 4 leaves out attention's and the output layer's share."""
    assert 0.01 < row["value"] / days(row) - 1 < 0.03


def test_6nd_gives_the_flops_of_gpt_3():
    [row] = rows("flops")
    assert 6 * row["P"] * row["T"] == pytest.approx(row["value"], rel=2e-3)
    [row] = rows("pf-days")
    seconds = training_time(row["P"], row["T"], 1e15)
    assert seconds / DAY == pytest.approx(row["value"], rel=2e-3)


def test_the_rate_behind_288_years():
    [row] = rows("years")
    rate = 6 * row["P"] * row["T"] / (row["value"] * YEAR)
    assert rate == pytest.approx(34.66e12, rel=1e-3)
    assert rate / row["peak"] == pytest.approx(0.277, abs=1e-3)
    assert 8 / 6 * rate == pytest.approx(46.2e12, rel=1e-3)  # with recompute
    assert training_time(row["P"], row["T"], rate) / YEAR == pytest.approx(288)


@pytest.mark.parametrize("row", rows("mfu"), ids=lambda row: row["model"])
def test_utilisation_from_the_time_of_a_step(row):
    flops = transformer_flops(2048 * row["B"], row["L"], row["h"], 51200, 2048)
    found = mfu(flops, row["seconds"], row["n"] * row["peak"])
    assert 100 * found == pytest.approx(row["value"], abs=0.2)


@pytest.mark.parametrize("row", rows("mfu 6n"), ids=lambda row: row["model"])
def test_utilisation_from_tokens_per_second(row):
    flops = row["T"] * (6 * row["P"] + 12 * row["L"] * row["h"] * 2048)
    found = mfu(flops, row["seconds"], row["n"] * row["peak"])
    assert 100 * found == pytest.approx(row["value"], abs=0.06)


@pytest.mark.parametrize("row", rows("GB"), ids=lambda row: row["model"])
def test_memory_of_the_model_states(row):
    assert sum(memory(row["P"], "mixed, 16-bit gradients")) == row["value"] * 1e9


def test_the_largest_model_on_one_gpu():
    [row], [measured] = rows("largest"), rows("largest measured")
    assert row["peak"] / sum(RULES["mixed, 16-bit gradients"]) == row["value"]
    assert measured["value"] / row["value"] == 0.65


@pytest.mark.parametrize(
    "who, rule",
    [
        ("ZeRO", "mixed, 16-bit gradients"),
        ("Hugging Face", "mixed, fp32 gradients"),
        ("Megatron fp32 parameters", "Adam"),
        ("Megatron fp32 gradients", "mixed, fp32 gradients"),
        ("Megatron 16-bit gradients", "mixed, gradients in both"),
    ],
)
def test_bytes_per_parameter(who, rule):
    [value] = [row["value"] for row in rows("bytes") if row["model"] == who]
    assert sum(RULES[rule]) == value
