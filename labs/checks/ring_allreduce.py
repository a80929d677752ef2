"""What a right answer to each exercise of the all-reduce notebook is, without answers.

    check("mended", mended)                        prints the verdict on an answer
    chunks_after(mended, 3)                        what the ranks then hold
    times_of(pipelined_broadcast, 4, 48, [1, 6])   what it takes, for a figure

Answers that send messages run on 1 to 6 ranks, on a link in virtual time. Values, bytes
and times are compared, so that any code which does the same is right.
"""

from functools import cache, partial
from itertools import chain
from random import Random

import torch

from labs import ring_allreduce as lab
from labs.checks import (
    Exercise,
    OnRanks,
    Trouble,
    ask,
    equal,
    everywhere,
    judge,
    number,
    show,
    unfit,
    usual,
)
from labs.kit import clock, messages, world
from labs.kit.messages import chunk_sizes
from labs.kit.timeline import Link
from labs.kit.watchdog import RankFailed

ELEMENT = 4  # bytes of a float32
LINK = Link(latency=1.0, bandwidth=2.0 * ELEMENT)
SENT = "bytes sent by each rank"
TIME = "time (latency 1, then 8 bytes in a unit)"
NOTHING_SENT = "No message went from rank to rank; collectives do not count."


def check(name, answer, seed=0):
    """Print the verdict on an answer to the exercise `name`."""
    print(judge(EXERCISES[name], answer, seed))


def chunks_after(function, n_ranks, *more):
    """Return what each rank's chunks hold after function(chunks, *more).

    There is a chunk of one element for each rank; rank r begins with 10**r in all.
    """

    def on_rank(rank, n_ranks):
        tensor = torch.full((n_ranks,), 10.0**rank, device=messages.device)
        function(list(tensor.split(1)), *more)
        return [int(x) for x in tensor]

    return world.launch(on_rank, n_ranks)


def times_of(broadcast, n_ranks, n_elements, counts):
    """Return what broadcast(chunks, 0) takes with each number of chunks, on the link of
    the checks. If it does not come to its end, say so and return None."""

    def on_rank(rank, n_ranks):
        cuts = [[[1.0] * size for size in chunk_sizes(n_elements, k)] for k in counts]
        runs = [_run_on_chunks(broadcast, chunks, 0)[0] for chunks in cuts]
        return [_traffic(spans)[1] for spans in runs]

    try:
        return world.launch(on_rank, n_ranks)[0]
    except RankFailed:
        print("No figure yet: the check says why.")
        return None


# ---- answers that send messages --------------------------------------------------


def _run(answer, *arguments):
    """Call an answer on this rank, in virtual time; return its messages' spans."""
    clk = clock.Virtual(clock.Unit(), LINK)
    with clock.recording(clk, messages.rank()):
        ask(answer, *arguments, read=lambda value: value)
    return clk.spans


def _sent(spans, peers=None):
    """Return the bytes of the messages sent, to some ranks or to all."""
    sends = [span for span in spans if span.name == "send"]
    return sum(s.nbytes for s in sends if peers is None or s.peer in peers)


def _traffic(spans):
    """Return the bytes that each rank has sent, and when the last message was over."""
    end = max((span.end for span in spans), default=0.0)
    return [int(n) for n in everywhere(_sent(spans))], max(everywhere(end))


# ---- chunks ----------------------------------------------------------------------

WHOLE = "chunks that are whole, on each rank"
HELD = "what rank 0 holds"
OWN = "the chunk of each rank that has to be whole"


def _drawn(number, n_ranks, sizes):
    """Return what each rank holds at first: chunks of positive whole numbers."""
    random = Random(number)
    return [
        [[random.randint(1, 99) for _ in range(size)] for size in sizes]
        for _ in range(n_ranks)
    ]


def _flat(chunks):
    return list(chain.from_iterable(chunks))


def _sums(held):
    """Return the chunks of the sum over all ranks."""
    return [[sum(numbers) for numbers in zip(*chunks)] for chunks in zip(*held)]


def _view(chunks):
    """Return chunks as views of one tensor on this rank's device, and that tensor."""
    flat = torch.tensor(_flat(chunks), dtype=torch.float32, device=messages.device)
    return list(flat.split([len(chunk) for chunk in chunks])), flat


def _run_on_chunks(answer, chunks, *more):
    """Run an answer on this rank's chunks; return spans and what each rank then holds,
    chunk by chunk."""
    views, flat = _view(chunks)
    given = list(views)
    spans = _run(answer, given, *more)
    if len(given) != len(views) or any(a is not b for a, b in zip(given, views)):
        raise Trouble(
            "it puts other tensors into the list. Change the values of the chunks "
            "themselves, with add_ or copy_."
        )
    sizes = [len(chunk) for chunk in chunks]
    everyones = [torch.tensor(numbers) for numbers in everywhere(flat.tolist())]
    return spans, [
        [chunk.tolist() for chunk in numbers.split(sizes)] for numbers in everyones
    ]


def _whole(held, truth):
    """Return which chunks of each rank are those of the truth, empty ones aside."""
    return [
        [i for i, chunk in enumerate(chunks) if chunk and equal(chunk, truth[i])]
        for chunks in held
    ]


def _around(held, first, put):
    """Return what ranks hold after turns around a ring: rank r sends chunk r + first,
    then the ones before it, and puts what comes to its own."""
    n, held = len(held), [list(chunks) for chunks in held]
    for step in range(n - 1):
        going = [held[r][(r + first - step) % n] for r in range(n)]
        for r in range(n):
            theirs = (r + first - step - 1) % n
            held[r][theirs] = put(held[r][theirs], going[r - 1])
    return held


def _add(mine, theirs):
    return [a + b for a, b in zip(mine, theirs)]


def _copy(mine, theirs):
    return theirs


class Ring(OnRanks):
    """Half a ring all-reduce: n_ranks - 1 steps with a chunk each.

    A subclass says what ranks hold at the start, at the end, and after mistakes.
    """

    unsent = 0  # rank r has no need to send chunk r + unsent
    lost = "What comes belongs to the chunk of the same number, on either rank."

    def cases(self, random):
        def case(n_ranks, n_elements):
            return n_ranks, n_elements, random.randint(0, 10**6)

        return [
            case(3, 3 * random.randint(2, 3)),
            case(5, random.choice([11, 12, 13])),
            case(4, random.randint(2, 3)),
        ]

    def arguments(self, n_ranks, n_elements, number):
        return f"chunks of {show(chunk_sizes(n_elements, n_ranks))}, {_on(n_ranks)}"

    def more(self, chunks):
        """Return the arguments beside the chunks."""
        return ()

    def facts(self, answer, n_ranks, n_elements, number):
        start, truth = self.task(n_ranks, n_elements, number)
        mine = start[messages.rank()]
        spans, held = _run_on_chunks(answer, mine, *self.more(mine))
        sent, end = _traffic(spans)
        found = self.told(held, truth) | {SENT: sent}
        equal_chunks = n_elements % n_ranks == 0  # else several times are right
        return found | ({TIME: end} if equal_chunks else {})

    def expected(self, n_ranks, n_elements, number):
        start, truth = self.task(n_ranks, n_elements, number)
        sizes = [len(chunk) for chunk in truth]
        kept = [sizes[(rank + self.unsent) % n_ranks] for rank in range(n_ranks)]
        found = {SENT: [ELEMENT * (n_elements - size) for size in kept]}
        if n_elements % n_ranks == 0:
            found[TIME] = (n_ranks - 1) * LINK.seconds(ELEMENT * sizes[0])
        return self.told(self.end(start, truth), truth) | found

    def hint(self, found, *case):
        start, truth = self.task(*case)
        right = self.expected(*case)
        if not any(found[SENT]):
            return NOTHING_SENT
        if sum(found[SENT]) < sum(right[SENT]):
            return "That is too little: every rank sends a chunk in n_ranks - 1 steps."
        if found[WHOLE] != right[WHOLE]:
            for text, held in self.mistakes(start, truth).items():
                told = self.told(held, truth)
                if all(equal(told[fact], found[fact]) for fact in told):
                    return text
            return self.lost
        if found[SENT] != right[SENT]:
            return "In each of n_ranks - 1 steps, a rank sends one chunk to the right."
        if found[TIME] < right[TIME]:
            return "A rank sends to its right neighbour alone."
        return "All can send at once, in every step: use shift."


def _on(n_ranks):
    return f"on {n_ranks} rank{'s' * (n_ranks > 1)}"


class ReduceScatter(Ring):
    name = "reduce_scatter"
    own = unsent = 1  # rank r ends with chunk r + own

    def more(self, chunks):
        return (_view(chunks[:1])[1],)  # the largest chunk is room enough

    def task(self, n_ranks, n_elements, number):
        held = _drawn(number, n_ranks, chunk_sizes(n_elements, n_ranks))
        return held, _sums(held)

    def end(self, start, truth):
        n, end = len(start), [list(chunks) for chunks in start]
        for rank in range(n):
            end[rank][(rank + self.own) % n] = truth[(rank + self.own) % n]
        return end

    def told(self, held, truth):
        """Only one chunk of each rank counts; the others may hold anything."""
        n = len(held)
        own = [held[rank][(rank + self.own) % n] for rank in range(n)]
        return {WHOLE: _whole(held, truth), OWN: own}

    def mistakes(self, start, truth):
        n, first = len(start), self.own - 1
        others = {
            self.of_chunk(k): _around(start, k - 1, _add)
            for k in range(n)
            if k != self.own
        }
        mean = [[[x / n for x in c] for c in held] for held in self.end(start, truth)]
        return others | {
            "Nothing has changed here: add to the chunks themselves.": start,
            "What comes is added to a rank's own numbers; it does not replace them.":
                _around(start, first, _copy),
            "A sum is asked for, no mean.": mean,
            "That is an all-reduce: it is enough that each rank has one whole chunk.":
                [truth] * n,
        }  # fmt: skip

    def of_chunk(self, k):
        return f"Rank r ends with chunk r + {k}. Which chunk must it send first?"


class Mended(ReduceScatter):
    name, points = "mended", 2
    own = unsent = 0

    def more(self, chunks):
        return ()

    def of_chunk(self, k):
        if k == 1:
            return "That is chunk r + 1: let every rank begin one chunk earlier."
        return super().of_chunk(k)


class AllGather(Ring):
    name, unsent = "all_gather", 2

    def task(self, n_ranks, n_elements, number):
        """Rank r has chunk r + 1; the others hold what is left of the first half."""
        held = _drawn(number, n_ranks, chunk_sizes(n_elements, n_ranks))
        truth = _sums(held)
        for rank in range(n_ranks):
            held[rank][(rank + 1) % n_ranks] = truth[(rank + 1) % n_ranks]
        return held, truth

    def end(self, start, truth):
        return [truth] * len(start)

    def told(self, held, truth):
        return {WHOLE: _whole(held, truth), HELD: _flat(held[0])}

    def mistakes(self, start, truth):
        return {
            "Nothing has changed here: write into the chunks themselves.": start,
            "Rank r comes with chunk r + 1: that is what it sends first.":
                _around(start, 0, _copy),
            "What comes is whole: it replaces what a rank has, and is not added.":
                _around(start, 1, _add),
        }  # fmt: skip


# ---- a broadcast in chunks -------------------------------------------------------


def _chain(n_ranks, sizes):
    """Return when the last of a chain of ranks has all chunks, if each hands on every
    chunk once it has come: ports carry one message at a time."""
    ready = [0.0] * len(sizes)
    for _ in range(n_ranks - 1):
        out_free = in_free = 0.0
        for i, size in enumerate(sizes):
            begun, busy = max(ready[i], out_free), ELEMENT * size / LINK.bandwidth
            out_free = begun + busy
            ready[i] = in_free = max(begun + LINK.latency, in_free) + busy
    return ready[-1]


class PipelinedBroadcast(OnRanks):
    name, points = "pipelined_broadcast", 3

    def cases(self, random):
        def case(n_ranks, sizes, source):
            return n_ranks, sizes, source, random.randint(0, 10**6)

        return [
            case(4, [2] * random.randint(3, 5), 0),
            case(4, [2] * 3, random.randint(1, 3)),
            case(3, [random.randint(3, 5), 2, 3, 1], 2),
            case(5, [4], random.randint(1, 4)),
            case(1, [2, 2], 0),
        ]

    def arguments(self, n_ranks, sizes, source, number):
        return f"chunks of {show(sizes)}, {source}, {_on(n_ranks)}"

    def facts(self, answer, n_ranks, sizes, source, number):
        start = _drawn(number, n_ranks, sizes)
        spans, held = _run_on_chunks(answer, start[messages.rank()], source)
        sent, end = _traffic(spans)
        return {WHOLE: _whole(held, start[source]), SENT: sent, TIME: end}

    def expected(self, n_ranks, sizes, source, number):
        sent = [ELEMENT * sum(sizes)] * n_ranks
        sent[source - 1] = 0  # the last one has nobody to tell
        whole = [list(range(len(sizes)))] * n_ranks
        return {WHOLE: whole, SENT: sent, TIME: _chain(n_ranks, sizes)}

    def hint(self, found, n_ranks, sizes, source, number):
        whole, sent, end = self.expected(n_ranks, sizes, source, number).values()
        total = ELEMENT * sum(sizes)
        if not any(found[SENT]):
            return NOTHING_SENT
        if found[WHOLE][source] != whole[source]:
            return f"Rank {source} is the source: its chunks stay as they are."
        if found[WHOLE] != whole:
            return "What comes has to be written into the chunks, one after the other."
        if found[SENT] != sent:
            return self.hint_about_bytes(found[SENT], n_ranks, source, total)
        if equal(found[TIME], _chain(n_ranks, [sum(sizes)])):
            return "Hand a chunk on as soon as it has come, before the next one comes."
        return "Hand chunk i on before you receive chunk i + 1."

    def hint_about_bytes(self, sent, n_ranks, source, total):
        last = (source - 1) % n_ranks
        if sent[source] == (n_ranks - 1) * total:
            return "The source tells its right neighbour alone; that one hands on."
        if sent[last] == total and sent[(source + 1) % n_ranks] == 0:
            return "Chunks go to the right, to rank + 1."
        if sent[last]:
            return f"Rank {last} is the last: the source has what it could hand on."
        return "Every rank but the last sends each chunk once."

    def advice(self, trouble, n_ranks, sizes, source, number):
        last, told = (source - 1) % n_ranks, trouble.replace("stuck in", "in")
        if f"rank {last} is in send to rank {source}" in told:
            return f"Rank {last} is the last: the source has what it could hand on."
        if f"rank {source} is in receive" in told:
            return f"Rank {source} is the source: it has nothing to receive."
        if n_ranks == 1:
            return "A rank alone is the source and the last: it has nobody to tell."
        return ""


# ---- two levels ------------------------------------------------------------------

SUMMED = "elements that are the sum, on each rank"
TOTAL = "sum of all that rank 0 holds"
ACROSS, INSIDE = "bytes sent to other nodes", "bytes sent within nodes"


class TwoLevel(OnRanks):
    name, points = "two_level", 3

    def cases(self, random):
        def case(n_ranks, per_node, n_elements):
            return n_ranks, per_node, n_elements, random.randint(0, 10**6)

        return [
            case(4, 2, 4 * random.randint(2, 4)),
            case(6, 3, 6 * random.randint(1, 3)),
            case(6, 2, random.choice([7, 9, 11])),
            case(3, 3, 6),
        ]

    def arguments(self, n_ranks, per_node, n_elements, number):
        return f"{n_elements} elements, per_node={per_node}, {_on(n_ranks)}"

    def facts(self, answer, n_ranks, per_node, n_elements, number):
        start = _drawn(number, n_ranks, [n_elements])
        rank, [truth] = messages.rank(), _sums(start)
        _, tensor = _view(start[rank])
        spans = _run(answer, tensor, per_node)
        held, first = everywhere(tensor.tolist()), rank - rank % per_node
        node = range(first, first + per_node)
        inside = everywhere(_sent(spans, node))
        across = everywhere(_sent(spans, set(range(n_ranks)) - set(node)))
        if n_elements % n_ranks:  # chunks are not equal: who sends more may differ
            inside, across = sum(inside), sum(across)
        right = [sum(map(equal, numbers, truth)) for numbers in held]
        return {SUMMED: right, TOTAL: sum(held[0]), ACROSS: across, INSIDE: inside}

    def expected(self, n_ranks, per_node, n_elements, number):
        [truth] = _sums(_drawn(number, n_ranks, [n_elements]))
        nbytes, n_nodes = ELEMENT * n_elements, n_ranks // per_node
        across = 2 * (n_nodes - 1) * nbytes  # a ring over the nodes for every chunk
        inside = 2 * (per_node - 1) * nbytes * n_nodes
        if n_elements % n_ranks == 0:
            inside, across = [inside / n_ranks] * n_ranks, [across / n_ranks] * n_ranks
        summed = {SUMMED: [n_elements] * n_ranks, TOTAL: sum(truth)}
        return summed | {ACROSS: across, INSIDE: inside}

    def hint(self, found, n_ranks, per_node, n_elements, number):
        case = n_ranks, per_node, n_elements, number
        right, start = self.expected(*case), _drawn(number, n_ranks, [n_elements])
        if not any(map(any, (_list(found[ACROSS]), _list(found[INSIDE])))):
            return NOTHING_SENT
        if found[SUMMED] == right[SUMMED]:
            return self.hint_about_bytes(found, right, per_node, ELEMENT * n_elements)
        if not any(_list(found[ACROSS])) and any(_list(right[ACROSS])):
            return "Other nodes have numbers too: meet the ranks of your place there."
        return usual(found[TOTAL], {
            "A sum is asked for, no mean.": right[TOTAL] / n_ranks,
            "Nothing has changed here: sum in place.": sum(start[0][0]),
        }) or self.lost(found[SUMMED], n_elements)  # fmt: skip

    def lost(self, summed, n_elements):
        if any(0 < count < n_elements for count in summed):
            return "Only chunks are whole: a node's ranks gather them at the end."
        return "Sum within a node, then over the nodes, chunk by chunk; then gather."

    def hint_about_bytes(self, found, right, per_node, nbytes):
        if found[ACROSS] == right[ACROSS]:
            return "Within a node: a reduce-scatter before, an all-gather after."
        if [found[ACROSS], found[INSIDE]] == [right[INSIDE], right[ACROSS]]:
            return "Ranks of a node follow each other: node 0 has rank 0, rank 1, ..."
        across = _list(found[ACROSS])
        places = {rank % per_node for rank, sent in enumerate(across) if sent}
        if len(across) > 1 and len(places) < per_node:
            return "One rank carries all that leaves a node: let each take a chunk."
        if min(across) >= nbytes:
            return "Each rank takes its own chunk to other nodes, not the whole tensor."
        return "To other nodes goes a node's sum, a chunk from each of its ranks."


def _list(value):
    return value if isinstance(value, list) else [value]


# ---- to the last bit -------------------------------------------------------------


def _read_numbers(n_elements, value):
    """Return the elements of a tensor, or of a list of numbers, as a list."""
    try:
        found = [number(x) for x in torch.as_tensor(value).flatten().tolist()]
    except (TypeError, ValueError, RuntimeError):
        raise unfit(value, "a tensor") from None
    if len(found) != n_elements:
        raise Trouble(f"it returned {len(found)} elements, not {n_elements}.")
    return found


def _tensors(rows):
    return [torch.tensor(row, dtype=torch.float32) for row in rows]


@cache
def _run_ring(rows):
    """Return what the ring of the lab gives: it runs, on as many ranks as rows."""
    return world.launch(_ring_of, len(rows), rows)[0]


def _ring_of(rank, n_ranks, rows):
    return lab.ring(_tensors(rows)[rank].to(messages.device)).tolist()


def _added(rows, first=0, way=1, cut=torch.tensor_split):
    """Add chunk c in float32 from rank c + first on, to the right or the left."""
    n, sums = len(rows), []
    parts = [cut(row, n) for row in _tensors(rows)]
    for c in range(min(map(len, parts))):
        total = parts[(c + first) % n][c]
        for k in range(1, n):
            total = total + parts[(c + first + way * k) % n][c]
        sums += total.tolist()
    return sums


def _in_rank_order(rows):
    return sum(_tensors(rows)).tolist()


def _exactly(rows):
    return torch.stack(_tensors(rows)).double().sum(0).tolist()


ORDERS = {
    "That is the order of ranks for every chunk; a chunk begins its way on one rank.":
        _in_rank_order,
    "That is the exact sum: float32 rounds after each addition.": _exactly,
    "Chunk c begins on rank c, not on the one after.": partial(_added, first=1),
    "Chunks go to the right: after rank c, rank c + 1 adds its own.":
        partial(_added, way=-1),
    "Chunks are balanced, as tensor_split cuts them: [3, 2, 2], not [3, 3, 1].":
        partial(_added, cut=torch.chunk),
}  # fmt: skip


def _rounding(random, n_ranks, n_elements):
    """Tensors whose sum depends on the order; no two ways to add them agree."""
    while True:
        columns = [
            random.sample([1e8, -1e8, 1.0, *(3.0, 5.0)[: n_ranks - 3]], n_ranks)
            for _ in range(n_elements)
        ]
        rows = tuple(zip(*columns))
        ways = {tuple(way(rows)) for way in ORDERS.values()} | {tuple(_added(rows))}
        if len(ways) == len(ORDERS) + 1:
            return rows


class RingSum(Exercise):
    name, points = "ring_sum", 2

    def cases(self, random):
        return [
            ((1e8,) * 3, (1.0,) * 3, (-1e8,) * 3),
            _rounding(random, 3, 7),
            _rounding(random, 4, 10),
            ((1e8, 1.0), (1.0, 1e8), (-1e8, 1.0), (1.0, -1e8), (1.0, 1.0)),
            ((1.0, 2.0, 3.0),),
        ]

    def arguments(self, *rows):
        return show(rows) if len(rows) * len(rows[0]) < 10 else _sizes(rows)

    def facts(self, answer, *rows):
        read = partial(_read_numbers, len(rows[0]))
        return {"sums": ask(answer, _tensors(rows), read=read)}

    def expected(self, *rows):
        return {"sums": _run_ring(rows)}

    def hint(self, found, *rows):
        ways = {text: way(rows) for text, way in ORDERS.items()}
        return usual(found["sums"], ways) or "Follow one chunk from rank to rank."

    def advice(self, trouble, *rows):
        if len(rows[0]) < len(rows):
            return "With fewer elements than ranks, some chunks are empty."
        return ""


def _sizes(rows):
    return f"{len(rows)} tensors of {len(rows[0])} elements"


# ---- bandwidth -------------------------------------------------------------------


class Busbw(Exercise):
    name = "busbw"

    def cases(self, random):
        def case(n_ranks):
            return 1000 * random.randint(1, 9), random.randint(1, 9) / 8, n_ranks

        return [case(n_ranks) for n_ranks in (4, random.randint(5, 9), 2, 1)]

    def facts(self, answer, *case):
        return {"bandwidth": ask(answer, *case, read=number)}

    def expected(self, nbytes, time, n_ranks):
        chunk = nbytes / n_ranks  # one leaves the port in each step of the ring
        return {"bandwidth": sum(chunk / time for _ in range(2 * (n_ranks - 1)))}

    def hint(self, found, nbytes, time, n_ranks):
        right = self.expected(nbytes, time, n_ranks)["bandwidth"]
        return usual(found["bandwidth"], {
            "That is n / t; the bytes through a rank's port are asked for.":
                nbytes / time,
            "That is half of an all-reduce: a reduce-scatter, or an all-gather.":
                right / 2,
            "A chunk is 1/n_ranks of the tensor.": 2 * (n_ranks - 1) * nbytes / time,
            "That is the traffic, in bytes: divide by the time.": right * time,
        }) or "Count the bytes that a rank sends in 2 (n_ranks - 1) steps."  # fmt: skip


class BucketBytes(Exercise):
    name, points = "bucket_bytes", 2

    def cases(self, random):
        def case(n_ranks, share):
            latency = random.randint(2, 90) * 1e-6
            return n_ranks, latency, random.randint(2, 99) * 1e9, share

        return [
            case(4, 0.5),
            case(random.randint(5, 9), 0.9),
            case(2, random.choice([0.6, 0.7, 0.8])),
            case(random.randint(100, 999), 0.25),
        ]

    def facts(self, answer, *case):
        return {"bytes": ask(answer, *case, read=number)}

    def expected(self, n_ranks, latency, bandwidth, share):
        """Halve an interval around the size until it is known."""
        link, low, high = Link(latency, bandwidth), 0.0, 1e15
        for _ in range(200):
            nbytes = (low + high) / 2
            time = lab.seconds("ring", n_ranks, nbytes, link)
            enough = lab.busbw(nbytes, time, n_ranks) >= share * bandwidth
            low, high = (low, nbytes) if enough else (nbytes, high)
        return {"bytes": high}

    def hint(self, found, n_ranks, latency, bandwidth, share):
        right = self.expected(n_ranks, latency, bandwidth, share)["bytes"]
        by_tensor = 2 * (n_ranks - 1) / n_ranks * share  # as if n / t were the busbw
        return usual(found["bytes"], {
            "That is one chunk; the bucket holds n_ranks of them.": right / n_ranks,
            "That gives half of the bandwidth, whatever the share.":
                n_ranks * latency * bandwidth,
            "That is the size for 1 - share.": right * ((1 - share) / share) ** 2,
            "That is n / t; busbw counts what goes through a port.":
                by_tensor * n_ranks * latency * bandwidth / (1 - by_tensor),
            "That is the time, in seconds, not a size.": right / bandwidth,
        }) or "Of each step, the transfer must take `share`."  # fmt: skip


EXERCISES = {
    exercise.name: exercise
    for exercise in (
        ReduceScatter(),
        AllGather(),
        Mended(),
        PipelinedBroadcast(),
        TwoLevel(),
        RingSum(),
        Busbw(),
        BucketBytes(),
    )
}
