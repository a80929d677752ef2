"""Numbers that others have published, from the formulas of the lab."""

from pathlib import Path

import pytest

from labs import parameter_server, ring_allreduce
from labs.kit import messages, page

ROWS = page.read(
    Path(__file__).parent.parent / "book" / "published" / "parameter_server.csv"
)
ONE = 4 << 20  # bytes of all gradients


def rows(source, what=""):
    return [row for row in ROWS if row["source"] == source and what in row["what"]]


@pytest.mark.parametrize("row", rows("BytePS", "all-reduce"), ids=str)
def test_a_worker_sends_almost_twice_the_gradients_around_a_ring(row):
    sent = ring_allreduce.traffic("ring", row["n_workers"], ONE)
    assert {nbytes / ONE for nbytes in sent} == {row["value"]}


@pytest.mark.parametrize("row", rows("BytePS", "to servers"), ids=str)
def test_a_worker_sends_the_gradients_once_to_servers(row):
    """And each server, for its range, as much as its share of the workers needs."""
    n, n_servers, n_steps = row["n_workers"], row["n_servers"], 1000
    ranges = messages.chunk_sizes(ONE, n_servers)
    sent = parameter_server.traffic(n, ranges, n_steps)
    assert len(sent) == n_servers + n
    for nbytes in sent[n_servers:]:
        assert nbytes / n_steps / ONE == pytest.approx(row["value"], rel=1e-4)
    for nbytes in sent[:n_servers]:
        assert nbytes / n_steps / ONE == pytest.approx(n / n_servers, rel=2e-3)


def test_what_one_server_or_few_must_carry():
    """With fewer servers than workers, the servers' ports carry more than a ring's."""
    per_server = {
        n_servers: parameter_server.traffic(32, [ONE // n_servers] * n_servers, 1000)[0]
        / (1001 * ONE)
        for n_servers in (1, 4, 16, 32)
    }
    expected = {1: 32, 4: 8, 16: 2, 32: 1}
    assert per_server == pytest.approx(expected, rel=1e-4)
    ring = ring_allreduce.traffic("ring", 32, ONE)[0] / ONE
    assert per_server[16] > ring > per_server[32]
