"""Messages: exact values for every case of collectives and point to point.

What needs ranks is a function marked `on(n)`. All that need n ranks run in one launch,
when the first of them is asked for; the tests look at what each rank returned.
"""

import contextlib
import os
import pickle
import sys
import weakref

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labs.kit import clock, messages
from labs.kit.messages import (
    Inbox,
    PeerGone,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    chunk_sizes,
    exchange,
    finish,
    isend,
    receive,
    send,
)
from labs.kit.watchdog import Deadlock, RankFailed
from labs.kit.world import launch

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need no pytest

PROGRAMS, RESULTS = {}, {}


def on(*sizes):
    """Mark a function (rank, n_ranks) as one to run on worlds of these sizes."""

    def mark(function):
        for n in sizes:
            PROGRAMS.setdefault(n, []).append(function)
        return function

    return mark


def run_all(rank, n_ranks, functions):
    results = {}
    for function in functions:
        results[function.__name__] = function(rank, n_ranks)
        finish()
        barrier()
    return results


def ran(function, n_ranks=2):
    """Return what `function` returned on each of n_ranks ranks."""
    if n_ranks not in RESULTS:
        try:
            RESULTS[n_ranks] = launch(run_all, n_ranks, PROGRAMS[n_ranks], limit=60)
        except RankFailed as failure:
            RESULTS[n_ranks] = failure
    if isinstance(RESULTS[n_ranks], RankFailed):
        raise RESULTS[n_ranks]
    return [result[function.__name__] for result in RESULTS[n_ranks]]


def error(call, *args, **kwargs):
    """Return the error of a call, as text."""
    try:
        call(*args, **kwargs)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "no error"


def same(a, b):
    """Same dtype, shape and bits?"""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (torch.stack([one.detach()]).flatten().view(torch.uint8) for one in (a, b))
    return torch.equal(a, b)


# ---- C01: another order on another rank ----------------------------------------------


@on(2)
def fixed_order(rank, n_ranks):
    a, b = torch.tensor(1.0 + rank), torch.tensor(10.0 + rank)
    all_reduce(a, name="a")
    all_reduce(b, name="b")
    return a.item(), b.item()


@on(2)
def another_order(rank, n_ranks):
    a, b = torch.tensor(1.0 + rank), torch.tensor(10.0 + rank)
    first, second = (("a", a), ("b", b))[:: 1 if rank == 0 else -1]
    return error(all_reduce, first[1], name=first[0]), a.item(), b.item()


def test_c01_fixed_order():
    assert ran(fixed_order) == [(3.0, 21.0), (3.0, 21.0)]


def test_c01_another_order_is_told_on_every_rank():
    text = (
        "TypeError: the ranks do not call the same thing: rank 0 comes with "
        "all_reduce sum a of float32[], rank 1 with all_reduce sum b of float32[]."
    )
    assert ran(another_order) == [(text, 1.0, 10.0), (text, 2.0, 11.0)]


# ---- C02: half precision, integers, averages -----------------------------------------


@on(2)
def reductions(rank, n_ranks):
    ones, pair = torch.ones(2), torch.tensor([1.0, 2.0]) * (rank + 1)
    return {
        "bf16": all_reduce(ones.bfloat16() * (rank + 1)),
        "avg": all_reduce(pair.clone(), "avg"),
        "avg of int64": error(all_reduce, pair.long(), "avg"),
        "256 + 1": all_reduce(torch.tensor((256.0, 1.0)[rank]).bfloat16()),
        "60000 twice": all_reduce(torch.tensor(60000.0).half(), "avg"),
        "int16": all_reduce(torch.tensor([300, -7], dtype=torch.int16)),
        "complex": all_reduce(torch.tensor([1 + 2j]) * (rank + 1), "avg"),
        "max": all_reduce(pair.clone(), "max"),
        "min": all_reduce(pair.bfloat16(), "min"),
        "bad op": error(all_reduce, ones, "mean"),
    }


@on(3)
def sum_of_three(rank, n_ranks):
    """In bf16, 256 + 1 is 256: in any order a sum in bf16 would lose one of these."""
    mine = torch.ones(3)
    mine[rank] = 256
    return all_reduce(mine.bfloat16()).tolist()


@on(3)
def average_of_three(rank, n_ranks):
    return all_reduce(torch.ones(2) * (rank + 1), "avg").tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_c02_two_ranks(rank):
    got = ran(reductions)[rank]
    assert same(got["bf16"], torch.tensor([3.0, 3.0]).bfloat16())
    assert same(got["avg"], torch.tensor([1.5, 3.0]))
    assert "no average in torch.int64" in got["avg of int64"]
    assert same(got["256 + 1"], torch.tensor(256.0).bfloat16())
    assert same(got["60000 twice"], torch.tensor(60000.0).half())  # the sum is no half
    assert same(got["int16"], torch.tensor([600, -14], dtype=torch.int16))
    assert same(got["complex"], torch.tensor([1.5 + 3j]))
    assert same(got["max"], torch.tensor([2.0, 4.0]))
    assert same(got["min"], torch.tensor([1.0, 2.0]).bfloat16())
    assert got["bad op"].startswith("ValueError: op must be sum, avg, max or min")


def test_c02_half_precision_is_summed_in_float32():
    assert ran(sum_of_three, 3) == [[258.0] * 3] * 3


def test_c02_an_average_divides_by_ranks_not_by_elements():
    assert ran(average_of_three, 3) == [[2.0, 2.0]] * 3


# ---- C04: tensors that are not contiguous --------------------------------------------


@on(2)
def views(rank, n_ranks):
    """Every helper, on a slice and on a transposed tensor, with its neighbours."""
    got, other = {}, 1 - rank

    def fresh():
        return torch.arange(8) + 100 * rank

    base = fresh()
    broadcast(base[::2], 0)
    got["broadcast"] = base.tolist()
    base = fresh()
    all_reduce(base[::2])
    got["all_reduce"] = base.tolist()
    got["all_gather"] = [part.tolist() for part in all_gather(fresh()[::2])]
    got["exchange"] = exchange(fresh()[::2], other).tolist()
    base = fresh()
    exchange(fresh()[::2], other, into=base[1::2])
    got["exchange into"] = base.tolist()
    matrix = (torch.arange(6) + 100 * rank).reshape(2, 3).t()
    if rank == 0:
        send(matrix, 1)
    else:
        got["receive"] = receive(0).tolist()
    got["sum of transposed"] = all_reduce(matrix.clone().t().contiguous().t()).tolist()
    return got


def test_c04_views():
    zero, one = ran(views)
    assert zero["broadcast"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert one["broadcast"] == [0, 101, 2, 103, 4, 105, 6, 107]
    assert zero["all_reduce"] == [100, 1, 104, 3, 108, 5, 112, 7]
    assert one["all_reduce"] == [100, 101, 104, 103, 108, 105, 112, 107]
    gathered = [[0, 2, 4, 6], [100, 102, 104, 106]]
    assert zero["all_gather"] == one["all_gather"] == gathered
    assert [zero["exchange"], one["exchange"]] == gathered[::-1]
    assert zero["exchange into"] == [0, 100, 2, 102, 4, 104, 6, 106]
    assert one["exchange into"] == [100, 0, 102, 2, 104, 4, 106, 6]
    assert one["receive"] == [[0, 3], [1, 4], [2, 5]]
    total = [[100, 106], [102, 108], [104, 110]]
    assert zero["sum of transposed"] == one["sum of transposed"] == total


ODD_VIEWS = {
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "negative and contiguous": lambda: torch.tensor([1 + 2j]).conj().imag,
    "one of two": lambda: torch.tensor([1.0, 2.0])[1::2],  # contiguous, with stride 2
    "expanded": lambda: torch.tensor([1.0, 2.0]).expand(3, 2),
    "channels last": lambda: torch.arange(16.0).reshape(1, 2, 2, 4).contiguous(
        memory_format=torch.channels_last
    ),
    "tail": lambda: torch.arange(10)[7:],
}  # fmt: skip


@on(2)
def odd_views(rank, n_ranks):
    def kept(make):
        plain = torch.stack([make()])[0]
        into = make().clone().zero_()
        exchange(make(), 1 - rank, into=into)
        got = [exchange(make(), 1 - rank), *all_gather(make()), into]
        return [same(one, plain) for one in got] == [True] * 4

    return {name: kept(make) for name, make in ODD_VIEWS.items()}


def test_views_that_are_lazy_or_laid_out_in_another_way():
    assert ran(odd_views) == [dict.fromkeys(ODD_VIEWS, True)] * 2


@on(2)
def into_lazy_views(rank, n_ranks):
    """What comes must be stored so that the view shows it."""
    mine = torch.zeros(2, dtype=torch.complex64)
    exchange(torch.tensor([1 + 2j, 3 - 4j]), 1 - rank, into=mine.conj())
    return mine.tolist()


def test_into_a_conjugate_view():
    assert ran(into_lazy_views) == [[1 - 2j, 3 + 4j]] * 2


# ---- C05: a rank that does not come --------------------------------------------------


def alone_in_all_reduce(rank, n_ranks):
    if rank == 0:
        all_reduce(torch.ones(1))


def test_c05_who_did_not_come():
    with pytest.raises(Deadlock) as caught:
        launch(alone_in_all_reduce, 2, limit=30)
    assert "rank 0" in str(caught.value) and "all_reduce" in str(caught.value)
    assert "rank 1 has already returned" in str(caught.value)


@on(2)
def another_call(rank, n_ranks):
    return error(barrier) if rank else error(all_reduce, torch.ones(3))


def test_c05_another_collective_on_another_rank():
    for text in ran(another_call):
        assert "rank 0 comes with all_reduce sum of float32[3]" in text
        assert "rank 1 with barrier of float32[0]" in text


# ---- C06: both send first; odd rings -------------------------------------------------


@on(2, 3, 4, 5)
def shift(rank, n_ranks):
    """Everybody sends to the right."""
    mine = torch.full((4,), float(rank))
    right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks
    return exchange(mine, right, left).tolist()


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 5])
def test_c06_ring_shift(n_ranks):
    expected = [[float((rank - 1) % n_ranks)] * 4 for rank in range(n_ranks)]
    assert ran(shift, n_ranks) == expected


def both_send_first(rank, n_ranks):
    send(torch.full((4,), float(rank)), 1 - rank)
    return receive(1 - rank)


def test_c06_both_send_first_ends_in_words():
    with pytest.raises(Deadlock, match="everyone sends and nobody receives"):
        launch(both_send_first, 2, limit=30)


@on(2)
def swap_in_place(rank, n_ranks):
    """Into the very tensor that is being sent; larger than any socket's buffer."""
    mine = torch.full((1 << 21,), float(rank))
    got = exchange(mine, 1 - rank, into=mine)
    return got is mine, mine.unique().tolist()


def test_exchange_into_what_is_sent():
    assert ran(swap_in_place) == [(True, [1.0]), (True, [0.0])]


# ---- C07: sizes that no world divides ------------------------------------------------

SHAPES = [(0,), (1,), (2,), (3,), (4,), (5,), (10,), (17,), (1, 0, 2), ()]


def ring_all_reduce(tensor, rank, n_ranks):
    """Reduce-scatter, then all-gather: 2 (n - 1) exchanges of one chunk each."""
    flat = tensor.reshape(-1)
    chunks = list(flat.split(chunk_sizes(len(flat), n_ranks)))
    right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks
    for step in range(2 * (n_ranks - 1)):
        out = (rank - step) % n_ranks
        got = exchange(chunks[out], right, left)
        into = chunks[out - 1]
        into.add_(got) if step < n_ranks - 1 else into.copy_(got)
    return flat.reshape(tensor.shape)


@on(4)
def all_sizes(rank, n_ranks):
    def mine(shape):
        return torch.arange(torch.Size(shape).numel()).reshape(shape) + 100.0 * rank

    return [
        (
            all_reduce(mine(shape)),
            ring_all_reduce(mine(shape), rank, n_ranks),
            sum(all_gather(mine(shape))),
            broadcast(mine(shape), 3) * n_ranks - 600,
        )
        for shape in SHAPES
    ]


@on(4)
def gathered(rank, n_ranks):
    return [len(all_gather(torch.ones(shape))) for shape in SHAPES]


@on(4)
def ring_traffic(rank, n_ranks):
    """Bytes sent, as a clock hears them."""
    with clock.recording(clock.Virtual(clock.Unit()), rank) as recorder:
        ring_all_reduce(torch.ones(1000), rank, n_ranks)
    return sum(span.nbytes for span in recorder.spans if span.name == "send")


def test_c07_all_sizes_and_shapes():
    for results in ran(all_sizes, 4):
        for shape, found in zip(SHAPES, results):
            n = torch.Size(shape).numel()
            expected = torch.arange(n).reshape(shape) * 4.0 + 600
            assert [same(one, expected) for one in found] == [True] * 4, shape


def test_c07_all_gather_returns_a_part_per_rank():
    assert ran(gathered, 4) == [[4] * len(SHAPES)] * 4


def test_c07_traffic_of_a_ring():
    assert ran(ring_traffic, 4) == [6000] * 4  # 2 (w - 1) / w * 4000 bytes


@pytest.mark.parametrize(
    "n, parts, sizes",
    [
        (10, 4, [3, 3, 2, 2]),
        (5, 4, [2, 1, 1, 1]),
        (2, 4, [1, 1, 0, 0]),
        (0, 3, [0, 0, 0]),
        (7, 1, [7]),
    ],
)
def test_chunk_sizes(n, parts, sizes):
    assert chunk_sizes(n, parts) == sizes


@pytest.mark.parametrize("n, parts", [(-1, 2), (3, 0)])
def test_chunk_sizes_refuses(n, parts):
    with pytest.raises(ValueError, match="cannot be cut"):
        chunk_sizes(n, parts)


# ---- any tensor ----------------------------------------------------------------------


def of(dtype, *shape):
    """Bytes that no conversion would keep; no NaN is needed to see that."""
    numel = torch.Size(shape).numel()
    raw = torch.arange(numel * dtype.itemsize, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


@on(2)
def all_dtypes(rank, n_ranks):
    def kept(dtype):
        mine = of(dtype, 2, 3)
        other = exchange(mine, 1 - rank)
        given = broadcast(mine if rank else torch.zeros_like(mine), source=1)
        parts = all_gather(mine)
        return all(same(one, mine) for one in [other, given, *parts])

    return {dtype: kept(dtype) for dtype in messages._DTYPES}


def test_all_dtypes():
    for kept in ran(all_dtypes):
        assert kept == dict.fromkeys(messages._DTYPES, True)


@on(2)
def with_gradients(rank, n_ranks):
    weight = torch.ones(3, requires_grad=True)
    leaf = torch.zeros(3, requires_grad=True)
    got = exchange(weight * (rank + 1), 1 - rank)
    exchange(weight * (rank + 1), 1 - rank, into=leaf)
    all_reduce(weight)
    return got.requires_grad, got.tolist(), leaf.tolist(), weight.tolist()


def test_tensors_that_require_gradients():
    assert ran(with_gradients) == [
        (False, [2.0] * 3, [2.0] * 3, [2.0] * 3),
        (False, [1.0] * 3, [1.0] * 3, [2.0] * 3),
    ]


SIZES = [3, 5000, 5000, 3, 0, 20000, 1024, 1025, 17000, 1, 300_000, 300_000, 0, 2]
SIZES += [300_000, 300_001, 299_999, 20_000, 1]


@on(2)
def growing_and_shrinking(rank, n_ranks):
    """The room of a block follows the sizes, tag by tag, and both sides agree."""
    wrong = []
    for tag, size in [(tag, size) for size in SIZES for tag in (None, 0, 1)]:
        mine = torch.arange(size) + rank
        got = exchange(mine, 1 - rank, tag=tag if rank else tag or 0)
        into = exchange(mine, 1 - rank, tag=tag, into=torch.empty_like(mine))
        if not (same(got, mine - rank + (1 - rank)) and same(into, got)):
            wrong.append((tag, size))
    return wrong


def test_sizes_that_grow_and_shrink():
    assert ran(growing_and_shrinking) == [[], []]


@on(3)
def without_headers(rank, n_ranks):
    """Any size and layout; the line stays in order with messages that have headers."""
    right, left = (rank + 1) % 3, (rank - 1) % 3
    seen = []
    for size in (0, 1, 5, 100_000):
        into = torch.zeros(2 * size, dtype=torch.int32)[::2]
        mine = torch.full((2 * size,), rank, dtype=torch.int32)[::2]
        with messages.trusted():
            same_one = exchange(mine, right, left, into=into) is into
        seen.append(same_one and bool((into == left).all()))
        seen.append(exchange(torch.tensor(rank), right, left).item() == left)
    return all(seen)


def test_exchanges_without_headers():
    assert ran(without_headers, 3) == [True] * 3


@on(2)
def a_hundred_megabytes(rank, n_ranks):
    big = torch.arange(25_000_000, dtype=torch.int32)
    if rank == 0:
        send(big, 1)
    return rank == 0 or torch.equal(receive(0), big)


def test_a_hundred_megabytes():
    assert ran(a_hundred_megabytes) == [True, True]


@on(2)
def received_is_its_own(rank, n_ranks):
    """What arrives holds no other memory alive than its own."""
    got = [exchange(torch.ones(size), 1 - rank) for size in (5, 50_000, 20_000)]
    return [one.untyped_storage().nbytes() for one in got]


def test_what_arrives_is_no_larger_than_itself():
    assert ran(received_is_its_own) == [[20, 200_000, 80_000]] * 2


# ---- order, buffers, many at once ----------------------------------------------------


@on(2)
def tags_out_of_order(rank, n_ranks):
    if rank == 0:
        for tag in (1, 2, 1):
            isend(torch.tensor([tag, len(messages._unfinished)]), 1, tag=tag)
        return None
    return [receive(0, tag=tag)[0].item() for tag in (2, 1, 1)]


def test_tags_out_of_order():
    assert ran(tags_out_of_order)[1] == [2, 1, 1]


@on(2)
def changed_after_isend(rank, n_ranks):
    """A copy is sent of what is not contiguous; the rest may change after wait."""
    if rank == 1:
        barrier()
        return [receive(0).unique().tolist() for _ in range(2)]
    columns, flat = torch.ones(600, 300).t(), torch.ones(180_000)
    first = isend(columns, 1)
    columns.zero_()
    second = isend(flat, 1)
    barrier()
    first.wait()
    second.wait()
    flat.zero_()
    second.wait()  # a second time does nothing
    return None


def test_isend_and_what_becomes_of_the_tensor():
    assert ran(changed_after_isend)[1] == [[1.0], [1.0]]


@on(2)
def kept_until_taken(rank, n_ranks):
    """A send keeps its tensor alive exactly as long as it must."""
    if rank == 1:
        barrier()
        return receive(0).unique().tolist()
    tensor = torch.ones(100_000)
    alive = weakref.ref(tensor)
    pending = isend(tensor, 1)
    storage = weakref.ref(pending._buffers[1])
    del tensor
    barrier()
    before = storage() is not None
    pending.wait()
    return alive() is None, before, storage() is None, len(messages._unfinished)


def test_a_send_keeps_what_it_sends_and_no_longer():
    assert ran(kept_until_taken) == [(True, True, True, 0), [1.0]]


@on(2)
def many_in_flight(rank, n_ranks):
    """Both sides send 200 before anyone receives."""
    sent = [isend(torch.full((2000,), 1000 * rank + i), 1 - rank) for i in range(200)]
    got = [receive(1 - rank)[0].item() for _ in sent]
    under_way = len(messages._unfinished)
    finish()
    return got, under_way, len(messages._unfinished)


@on(2)
def never_waits(rank, n_ranks):
    """A sender that never waits keeps no more than the limit."""
    if rank == 1:
        return [receive(0).item() for _ in range(600)]
    for i in range(600):
        isend(torch.tensor(i), 1)
    return len(messages._unfinished)


def test_many_in_flight():
    zero, one = ran(many_in_flight)
    assert zero == ([1000 + i for i in range(200)], 200, 0)
    assert one == (list(range(200)), 200, 0)


def test_who_never_waits_keeps_a_limited_number():
    assert ran(never_waits) == [messages._MAX_UNFINISHED, list(range(600))]


# ---- mismatches ----------------------------------------------------------------------


@on(2)
def misfits(rank, n_ranks):
    """Shape, dtype, and a large one whose bytes must not be left in the line."""
    sent = [torch.ones(4), torch.ones(4), torch.ones(50_000)]
    into = [torch.zeros(3), torch.zeros(4, dtype=torch.int32), torch.zeros(50_001)]
    if rank == 0:
        for tensor in sent:
            send(tensor, 1)
        send(torch.tensor(7), 1)
        return None
    return [error(receive, 0, into=one) for one in into] + [receive(0).item()]


def test_a_misfit_names_both_sides_and_the_line_stays_usable():
    begin = "TypeError: rank 1 expects "
    assert ran(misfits)[1] == [
        begin + "float32[3] from rank 0, but rank 0 sends float32[4].",
        begin + "int32[4] from rank 0, but rank 0 sends float32[4].",
        begin + "float32[50001] from rank 0, but rank 0 sends float32[50000].",
        7,
    ]


def one_misfit(rank, n_ranks):
    if rank == 0:
        send(torch.ones(1 << 20), 1)
    else:
        receive(0, into=torch.ones(3))


def test_a_misfit_ends_the_run():
    with pytest.raises(RankFailed, match=r"expects float32\[3\] .* float32\[1048576\]"):
        launch(one_misfit, 2, limit=30)


@on(2)
def collective_misfits(rank, n_ranks):
    return [
        error(all_reduce, torch.ones(2 + rank)),
        error(all_reduce, torch.ones(2, dtype=(torch.int32, torch.float32)[rank])),
        error(all_reduce, torch.ones(2), ("sum", "max")[rank], name="w"),
        error(broadcast, torch.ones(2), rank),
        error(all_gather, torch.ones(2, 1 + rank)),
        all_reduce(torch.ones(2)).tolist(),
    ]


def test_collective_misfits_are_told_on_every_rank():
    zero, one = ran(collective_misfits)
    assert zero == one
    shape, dtype, op, source, gather, still = zero
    assert "all_reduce sum of float32[2], rank 1 with all_reduce sum of float" in shape
    assert "of int32[2], rank 1 with all_reduce sum of float32[2]" in dtype
    assert "all_reduce sum w of" in op and "all_reduce max w of" in op
    assert "broadcast from rank 0 of" in source and "from rank 1 of" in source
    assert "all_gather of float32[2, 1], rank 1 with" in gather
    assert still == [2.0, 2.0]


@on(2)
def raw_send(rank, n_ranks):
    """Sent with the library alone; an empty one must not pass for the last header."""
    if rank == 0:
        send(torch.ones(1), 1)
        dist.send(torch.ones(4), 1)
        dist.send(torch.ones(0), 1)
        return None
    receive(0)
    return [error(receive, 0), error(receive, 0)]


def test_what_the_kit_did_not_send():
    for text in ran(raw_send)[1]:
        assert text.startswith("TypeError: what rank 0 sent was not sent by labs.kit")


# ---- beside the computation ----------------------------------------------------------


@on(3)
def reductions_under_way(rank, n_ranks):
    """Any tensor; a collective meanwhile does not mix with those under way."""
    tensors = [
        torch.ones(1000),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones((), dtype=torch.bfloat16),
        torch.empty(0),
    ]
    tensors[0] *= rank
    started = [messages.iall_reduce(t, name=str(i)) for i, t in enumerate(tensors)]
    average = all_reduce(torch.tensor(float(rank)), "avg").item()
    for one, tensor in zip(started, tensors):
        assert one.wait() is tensor
    messages.iall_reduce(torch.ones(3))  # nobody waits for this one
    return average, tensors[0][0].item(), tensors[1].tolist(), tensors[2].item()


def test_reductions_under_way():
    assert (
        ran(reductions_under_way, 3)
        == [(1.0, 3.0, [[0, 9], [3, 12], [6, 15]], 3.0)] * 3
    )


def reductions_in_another_order(rank, n_ranks):
    started = [messages.iall_reduce(torch.ones(2), name="ab"[rank])]
    started.append(messages.iall_reduce(torch.ones(2), name="ba"[rank]))
    return [error(one.wait) for one in started] + [error(messages.barrier)]


def test_c01_another_order_is_told_of_reductions_under_way():
    told = "rank 0 comes with all_reduce sum a of float32[2], rank 1 with all_reduce"
    with pytest.raises(RankFailed) as failed:
        launch(reductions_in_another_order, 2, limit=30)
    assert told in str(failed.value)


def one_rank_reduces(rank, n_ranks):
    if rank == 0:
        messages.iall_reduce(torch.ones(2)).wait()
    else:
        receive(0)


def test_c05_a_reduction_that_one_rank_started_ends_in_words():
    with pytest.raises(RankFailed, match="all_reduce"):
        launch(one_rank_reduces, 2, limit=30)


@on(1)
def a_reduction_alone(rank, n_ranks):
    return messages.iall_reduce(torch.ones(2)).wait().tolist()


def test_a_reduction_alone():
    assert ran(a_reduction_alone, 1) == [[1.0, 1.0]]
    with pytest.raises(TypeError, match="no average in torch.int64"):
        messages.iall_reduce(torch.tensor(1), "avg")


# ---- refusals ------------------------------------------------------------------------


@on(2)
def bad_peers(rank, n_ranks):
    peers = [rank, 2, -1, "1", None, 1.0]
    return [
        (error(send, torch.ones(1), peer), error(receive, peer)) for peer in peers
    ] + [error(broadcast, torch.ones(1), 2), error(broadcast, torch.ones(1), "0")]


def test_bad_peers():
    for rank, texts in enumerate(ran(bad_peers)):
        for peer, (sending, receiving) in zip([rank, 2, -1, "'1'", None, 1.0], texts):
            begin, end = f"ValueError: rank {rank} cannot", f"peers are [{1 - rank}]."
            assert sending == f"{begin} send to rank {peer}: its {end}"
            assert receiving == f"{begin} receive from rank {peer}: its {end}"
        assert texts[-2:] == [
            "ValueError: no rank 2: there are ranks 0 to 1.",
            "ValueError: no rank '0': there are ranks 0 to 1.",
        ]


NO_MESSAGES = {
    "[1.0]": lambda: [1.0],
    "None": lambda: None,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.ones(2, device="meta"),
    "nine dimensions": lambda: torch.ones([1] * 9),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
}


@on(2)
def no_messages(rank, n_ranks):
    calls = [lambda x: send(x, 1 - rank), lambda x: exchange(x, 1 - rank)]
    calls += [all_reduce, all_gather, broadcast]
    return {
        name: [error(call, make()) for call in calls]
        for name, make in NO_MESSAGES.items()
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_a_message():
    for rank in ran(no_messages):
        for name, texts in rank.items():
            assert len(set(texts)) == 1, texts
            kind = "is a tensor, not" if name in ("[1.0]", "None") else "cannot be"
            assert texts[0].startswith(f"TypeError: a message {kind}"), texts[0]


@on(2)
def bad_words(rank, n_ranks):
    return [
        error(isend, torch.ones(1), 1 - rank, tag=-1),
        error(receive, 1 - rank, tag="a"),
        error(receive, 1 - rank, into=[0.0]),
        error(exchange, torch.ones(1), 1 - rank, into=[0.0]),
        error(all_reduce, torch.ones(1), name="x" * 200),
    ]


def test_bad_tags_and_names():
    for texts in ran(bad_words):
        assert texts[0] == "ValueError: a tag is a whole number from 0 up, not -1."
        assert texts[1] == "ValueError: a tag is a whole number from 0 up, not 'a'."
        assert texts[2] == texts[3]
        assert "a message is a tensor, not list" in texts[2]
        assert texts[4].startswith("ValueError: the name is too long")


# ---- a world of one, and no world ----------------------------------------------------


def alone(rank, n_ranks):
    one, into = torch.tensor([1.0, 2.0]), torch.zeros(2)
    same_one = exchange(one, 0, into=into)
    return {
        "rank": (messages.rank(), messages.n_ranks()),
        "all_reduce": all_reduce(one.clone(), "avg").tolist(),
        "broadcast": broadcast(one.clone()).tolist(),
        "all_gather": [part.tolist() for part in all_gather(one)],
        "own copy": all_gather(one)[0].data_ptr() != one.data_ptr(),
        "exchange": exchange(one, 0).tolist(),
        "exchange into": (same_one is into, into.tolist()),
        "onto itself": exchange(one, 0, into=one).tolist(),
        "misfit": error(exchange, one, 0, into=torch.zeros(3)),
        "barrier": barrier(),
        "send": error(send, one, 1),
        "receive": error(receive, 0),
        "avg": error(all_reduce, one.long(), "avg"),
    }


@pytest.mark.parametrize("launched", [True, False])
def test_one_rank_is_a_world_and_so_is_none(launched):
    found = launch(alone, 1, limit=30)[0] if launched else alone(0, 1)
    assert found == {
        "rank": (0, 1),
        "all_reduce": [1.0, 2.0],
        "broadcast": [1.0, 2.0],
        "all_gather": [[1.0, 2.0]],
        "own copy": True,
        "exchange": [1.0, 2.0],
        "exchange into": (True, [1.0, 2.0]),
        "onto itself": [1.0, 2.0],
        "misfit": "TypeError: rank 0 expects float32[3] from rank 0, but rank 0 sends "
        "float32[2].",
        "barrier": None,
        "send": "ValueError: rank 0 is alone and cannot send to rank 1: launch more.",
        "receive": "ValueError: rank 0 is alone and cannot receive from rank 0: launch "
        "more.",
        "avg": "TypeError: no average in torch.int64: convert it to float.",
    }


# ---- first come, first served --------------------------------------------------------


@on(3)
def whoever_comes(rank, n_ranks):
    """Ranks 1 and 2 send when rank 0 says so: it cannot wait for a certain one."""
    inbox = Inbox(tag=3)
    if rank == 0:
        send(torch.ones(()), 2)
        took = [inbox.take([1, 2])]
        send(torch.ones(()), 1)
        took.append(inbox.take([1, 2]))  # a receive from rank 2 is open meanwhile
        send(torch.ones(()), 2)
        took.append(inbox.take([2]))
        return [(source, tensor.tolist()) for source, tensor in took]
    for _ in range(rank):
        receive(0)
        send(torch.arange(rank), 0, tag=3)
    return None


def test_an_inbox_gives_what_has_come():
    assert ran(whoever_comes, 3)[0] == [(2, [0, 1]), (1, [0]), (2, [0, 1])]


@on(3)
def by_time_sent(rank, n_ranks):
    """Rank 1 sends at 2, 4 and 6, rank 2 at 3 and 6; which is there first differs."""
    clk = clock.Virtual(clock.Unit(lambda rank, name, microbatch: 1.0 + rank))
    with clock.recording(clk, rank):
        if rank == 0:
            inbox = Inbox()
            took = [inbox.take([1, 2])[0] for _ in range(4)]
            return took + [inbox.take([2])[0]], clk.now()
        for step in range(4 - rank):
            clk.run("F", step, lambda: None)
            isend(torch.ones(()), 0)
    return None


def test_in_virtual_time_what_was_sent_first_is_taken_first():
    """Of two at the same time, that of the lower rank."""
    assert ran(by_time_sent, 3)[0] == ([1, 2, 1, 1, 2], 6.0)


@on(2)
def nobody(rank, n_ranks):
    return error(Inbox().take, []), error(Inbox().take, [rank])


def test_an_inbox_needs_somebody_else():
    assert ran(nobody)[1] == (
        "ValueError: an inbox takes from at least one rank: name it.",
        "ValueError: rank 1 cannot receive from rank 1: its peers are [0].",
    )


def ends_early(rank, n_ranks, recorded):
    """Rank 1 ends; rank 0 hears so from receive and inbox, and rank 2's message."""
    clk = clock.Virtual(clock.Unit()) if recorded else clock.Clock()
    if rank == 1:
        receive(0)
        os._exit(3)
    if rank == 2:
        receive(0)
        return send(torch.ones(2), 0)
    send(torch.ones(()), 1)
    found, inbox = [error(receive, 1)], Inbox()
    with clock.recording(clk, rank) if recorded else contextlib.nullcontext():
        found.append(error(inbox.take, [1, 2]))
        send(torch.ones(()), 2)
        found.append(inbox.take([2])[1].tolist())
    return found


@pytest.mark.parametrize("recorded", [False, True])
def test_who_has_ended_is_named_and_the_others_messages_stay(recorded):
    found, ended, _ = launch(ends_early, 3, recorded, may_fail=[1], limit=60)
    gone = "PeerGone: rank 1 is gone: its connection was closed."
    assert found == [gone, gone, [1.0, 1.0]]
    assert (ended.rank, ended.kind) == (1, "exited")


def test_a_peer_that_is_gone_can_be_told_to_another_process():
    again = pickle.loads(pickle.dumps(PeerGone(4, "it had pushed 2 times")))
    assert again.peer == 4 and str(again) == "rank 4 is gone: it had pushed 2 times."


# ---- what the watchdog reads ---------------------------------------------------------


@on(2)
def moves(rank, n_ranks):
    """Every call counts as a movement, and none is left open, errors included."""
    before = messages.moved
    exchange(torch.ones(1), 1 - rank)
    error(all_reduce, torch.ones(1 + rank))
    return messages.moved > before + 1, messages.doing


def test_the_watchdog_sees_movement():
    assert ran(moves) == [(True, None), (True, None)]


# ---- clocks of hosts -----------------------------------------------------------------


@on(2, 3)
def offset(rank, n_ranks):
    """Return the estimate, and the best round trip that it was made of."""
    asked, now = [], clock.Wall.now

    def noted(self):
        asked.append(now(self))
        return asked[-1]

    clock.Wall.now = noted
    try:
        estimate = messages.clock_offset()
    finally:
        clock.Wall.now = now
    trips = [end - start for start, end in zip(asked[::2], asked[1::2])]
    return estimate, min(trips)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_clock_offset_is_zero_on_one_host_within_half_a_round_trip(n_ranks):
    (first, _), *others = ran(offset, n_ranks)
    assert first == 0.0
    for estimate, best in others:
        assert 0 < best and abs(estimate) <= best / 2
