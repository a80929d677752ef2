"""The formulas beside numbers that others report."""

from pathlib import Path

import pytest

from labs import model_parallel as lab
from labs.kit import page
from labs.kit.timeline import Link

PUBLISHED = Path(__file__).parent.parent / "book" / "published"
ROWS = page.read(PUBLISHED / "model_parallel.csv")
GIB, DEVICE = 2**30, 16  # a TPUv3 core of 16 GB


def parameters(n_layers, width=2048, hidden=8192, vocab=32_000):
    """Of GPipe's Transformer: matrices, biases and norms, and the vocabulary twice."""
    layer = 4 * width**2 + 2 * width * hidden + 9 * width + hidden
    return 2 * vocab * width + n_layers * layer


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['K']} devices")
def test_twelve_bytes_per_parameter_as_in_gpipes_table_1(row):
    n = parameters(row["layers"])
    assert n == pytest.approx(row["parameters"], rel=6e-3)
    weights = 4 * n  # and as much for each of two copies
    said = row["parameter_memory"]
    assert abs(lab.memory(weights) / GIB - said) <= max(0.1, 1e-3 * said)


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: f"{row['K']} devices")
def test_each_device_is_nearly_full_however_large_the_model(row):
    held = lab.memory(4 * parameters(row["layers"]) / GIB, row["activations"])
    assert (
        13 < held / row["K"] < 14 < DEVICE < held
    )  # split it fits, on one it does not


def test_a_cut_in_two_makes_nothing_faster():
    """PyTorch's tutorial: ResNet-50 takes 3.75 s on one GPU, 4.02 s in two halves."""
    transfers = Link(bandwidth=2 / 0.27)
    assert lab.step_time(3.75, [0, 1], transfers) == pytest.approx(4.02)
    assert lab.idle_fraction(2, 3.75 / 4.02) == pytest.approx(0.534, abs=5e-4)


@pytest.mark.parametrize("table, off", [("torchgpipe", 0.07), (2, 0.38)])
def test_more_devices_make_nothing_faster(table, off):
    """One microbatch, as a multiple of the throughput of two devices: the formula says
    1 for any number. GPipe reports up to 1.38; see its chapter."""
    rows = page.read(PUBLISHED / "gpipe.csv")
    rows = [r for r in rows if (r["table"], r["M"]) == (table, 1) and r["K"] > 2]
    assert len(rows) == {"torchgpipe": 2, 2: 4}[table]
    assert max(abs(row["value"] - 1) for row in rows) == pytest.approx(off, abs=5e-3)


def test_what_a_boundary_costs_per_microbatch():
    """b s h numbers each way (Narayanan et al. 2021, section 3.2)."""
    b, s, h = 4, 2048, 6144
    first, *inner, last = lab.traffic([2 * b * s * h] * 4)
    assert first == last == 2 * b * s * h
    assert inner == [2 * first] * 2
