"""Messages between ranks: any tensor, with a checked header.

gloo alone fills a buffer of another type in silence, aborts on a wrong size, and takes
no CUDA tensor from point to point. Here every message begins with a header (shape,
dtype, time), so that a mismatch is an error in words; views, empty tensors, scalars and
bf16 arrive as they were. From point to point a GPU's tensors travel through the host's
memory: NCCL knows no tags, and its sends hold up receives from the same rank.
"""

import contextlib
import queue
import re
import struct
import threading

import torch
import torch.distributed as dist

from labs.kit import aside, clock

_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
    torch.complex128,
]  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_SUMMED_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,  # gloo does not know int16
}
_MAX_DIMS = 8
_MAX_TITLE = 128
_MAGIC = 0x6C616273  # "labs"
# magic, dtype, number of dims, dims, title; then time sent, port time, number
_HEADER = struct.Struct(f"<3q{_MAX_DIMS}q{_MAX_TITLE}s3d")
_SMALL, _LARGE = 1 << 12, 1 << 16  # bytes: least and most room beside a header
_BARE = 1 << 30  # the tag of messages without a header
_MAX_UNFINISHED = 256  # sends that nobody waits for: gloo does not say that one is over
_CLOSED = re.compile("[Cc]losed|[Rr]eset|[Bb]roken pipe|remote process exited")

device = torch.device("cpu")  # where this rank computes; set when the rank starts
staged = False  # do collectives, too, travel through host memory?
doing = None  # (call, peer, detail) while this rank is in a call, for the watchdog
moved = 0  # calls finished, for the watchdog
_trusting = False  # do exchanges go without headers?
_unfinished = {}  # Pending -> None, oldest first: they keep what is not yet taken
_last = {}  # ("to" or "from", peer, tag) -> bytes of the last message


def rank():
    """Return this process's rank; 0 outside `launch`."""
    group = dist.group.WORLD
    return group.rank() if group else 0


def n_ranks():
    """Return how many ranks there are; 1 outside `launch`."""
    group = dist.group.WORLD
    return group.size() if group else 1


def nbytes(tensor):
    """Return the bytes that a tensor's elements take on the wire."""
    return tensor.numel() * tensor.element_size()


def chunk_sizes(n, parts):
    """Return the sizes of `parts` balanced chunks of n elements, the larger ones first.

    >>> chunk_sizes(10, 4), chunk_sizes(2, 4)
    ([3, 3, 2, 2], [1, 1, 0, 0])
    """
    if n < 0 or parts < 1:
        raise ValueError(f"{n} elements cannot be cut into {parts} chunks.")
    return [n // parts + (i < n % parts) for i in range(parts)]


@contextlib.contextmanager
def _call(name, peer=None, detail=""):
    """Say what this rank is doing while it may have to wait."""
    global doing, moved
    outer = doing
    doing = outer or (name, peer, detail)
    try:
        yield
    finally:
        doing = outer
        moved += 1


# ---- point to point ----------------------------------------------------------------


class PeerGone(RuntimeError):
    """Rank `peer` has ended: it neither sends nor receives any more."""

    def __init__(self, peer, text="its connection was closed"):
        super().__init__(f"rank {peer} is gone: {text}.")
        self.peer, self._args = peer, (peer, text)

    def __reduce__(self):
        return type(self), self._args


@contextlib.contextmanager
def _with_peer(peer):
    """Raise PeerGone for what the library says when a connection has closed."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerGone) or not _CLOSED.search(str(error)):
            raise
        raise PeerGone(peer) from None


class Pending:
    """A send under way. It keeps what it sends until `wait` has returned."""

    def __init__(self, to, works, buffers):
        self._to, self._works, self._buffers = to, works, buffers
        _unfinished[self] = None

    def wait(self):
        """Wait until the receiver has taken the message."""
        if not self._works:
            return
        since, works, self._works = clock.current.now(), self._works, []
        del _unfinished[self]  # also of a peer that is gone
        with _call("send", self._to), _with_peer(self._to):
            for work in reversed(works):  # then only the first has to wait
                work.wait()
        clock.current.waited(self._to, since)
        self._buffers = []


def isend(tensor, to, tag=None):
    """Start to send `tensor` to rank `to`; return a Pending. Does not block.

    tag: a number that the receiver must name, such as the microbatch. The tensor may
    be changed only after `wait`. Whoever never waits has at most 256 sends under way.
    """
    _check(tensor)
    _check_peer(to, tag, "send to")
    since, size = clock.current.ready(), nbytes(tensor)
    expected, (data, block) = _expected("to", to, tag), _block("to", to, tag)
    _last["to", to, tag or 0] = size
    parts = [block]
    if expected and not _room(data) < size <= expected:
        parts.append(block[:1])  # for the receive that expects other data
    if size <= _room(data):
        _inside(data, tensor.shape, tensor.dtype).copy_(tensor.detach())
    else:
        parts.append(_to_wire(tensor))
    _write_header(data, tensor, clock.current.sent(to, size, tag, since))
    send = dist.group.WORLD.send
    with _with_peer(to):
        works = [send([part], to, tag or 0) for part in parts]
    pending = Pending(to, works, parts)
    if len(_unfinished) > _MAX_UNFINISHED:
        next(iter(_unfinished)).wait()
    return pending


def send(tensor, to, tag=None):
    """Send `tensor` to rank `to` and wait until it has been received."""
    with _call("send", to, _tagged(tag)):
        isend(tensor, to, tag).wait()


def receive(source, tag=None, into=None):
    """Return the tensor that rank `source` sends next under `tag`.

    into: a tensor to receive into; then its shape and dtype must be those sent, or a
    TypeError names both. Without it, a new tensor on this rank's device.
    """
    if into is not None:
        _check(into)
    _check_peer(source, tag, "receive from")
    since = clock.current.ready()
    with _call("receive", source, _tagged(tag)):
        return _Posted(source, tag, into).take(since)


def exchange(tensor, to, source=None, tag=None, into=None):
    """Send to rank `to` while receiving from `source` (default `to`); return what came.

    It cannot deadlock, whatever the order of ranks: the send does not block. into: as
    for receive; it may be `tensor` itself, but must not overlap it in another way.
    """
    _check(tensor)
    if into is not None:
        _check(into)
        if into.data_ptr() == tensor.data_ptr():
            tensor = tensor.clone()  # what comes must not overwrite what is leaving
    source = to if source is None else source
    if to == source == rank():
        return _to_self(tensor, into)
    _check_peer(to, tag, "send to")
    _check_peer(source, tag, "receive from")
    with _call("exchange", source, _tagged(tag)):
        if _trusting and into is not None and not clock.current.records:
            return _exchange_bare(tensor, to, source, into)
        posted = _Posted(source, tag, into)  # before the send: gloo is faster so
        pending = isend(tensor, to, tag)
        received = posted.take(clock.current.ready())
        pending.wait()
    return received


@contextlib.contextmanager
def trusted(yes=True):
    """In this block an exchange into a tensor goes without its header, if `yes`.

    That saves up to a fifth of the time of a megabyte. Only where all ranks do so, and
    are known to send what the others expect: another size ends in a crash or a hang.
    """
    global _trusting
    outer, _trusting = _trusting, yes
    try:
        yield
    finally:
        _trusting = outer


def _exchange_bare(tensor, to, source, into):
    plain = _is_plain(into)
    host = into if plain else _host_tensor(into.shape, into.dtype, into.is_cuda)
    receiving = dist.group.WORLD.recv([_bytes(host)], source, _BARE)
    sending = dist.group.WORLD.send([_to_wire(tensor)], to, _BARE)
    receiving.wait()
    _put(host, into)
    sending.wait()
    return into


class _Posted:
    """A receive under way: of the header and, where data are expected, of these too."""

    def __init__(self, source, tag, into):
        self.source, self.tag, self.into = source, tag, into
        self.expected = _expected("from", source, tag)
        self.data, block = _block("from", source, tag)
        with _with_peer(source):
            self.works = [self._post(block)]
            if self.expected:
                self.works.append(self._post_data(self.expected))

    def wait(self):
        """Wait until it has come; of large data, only the header need be there."""
        with _with_peer(self.source):
            for work in reversed(self.works):  # then only the first has to wait
                work.wait()
        self.works = []

    def header(self):
        """Return (shape, dtype, title, stamp), once it has come."""
        return _read_header(self.data, self.source)

    def take(self, since):
        """Return the tensor, once it has come; the rank called for it at `since`."""
        self.wait()
        shape, dtype, _, stamp = self.header()
        with _with_peer(self.source):
            tensor = self._come(shape, dtype)
        into = tensor if self.into is None else self.into
        if (into.shape, into.dtype) != (shape, dtype):
            raise _misfit(into, shape, dtype, self.source)
        clock.current.received(self.source, stamp, since, nbytes(tensor), self.tag)
        if self.into is None:
            return tensor.to(device)
        _put(tensor, into)
        return into

    def _come(self, shape, dtype):
        """Return what has come, in host memory, or in `into` where that is possible."""
        size = shape.numel() * dtype.itemsize
        _last["from", self.source, self.tag or 0] = size
        if size <= _room(self.data):
            return _inside(self.data, shape, dtype)
        if size > self.expected:
            self._post_data(size).wait()
        data = self.buffer[:size]
        if size < len(self.buffer):
            data = data.clone()  # or all of the buffer stays in memory
        return data.view(dtype).view(shape)

    def _post_data(self, size):
        into = self.into
        if into is not None and _is_plain(into) and nbytes(into) >= size:
            self.buffer = _bytes(into)
        else:
            where = device if into is None else into.device
            self.buffer = _host_tensor((size,), torch.uint8, where.type == "cuda")
        return self._post(self.buffer[:size])

    def _post(self, buffer):
        return dist.group.WORLD.recv([buffer], self.source, self.tag or 0)


class Inbox:
    """Messages of several ranks, first come, first served: one pending per rank.

    In virtual time it takes, of one message from each rank, the one that was sent
    first, so a run is the same every time (ties: the lower rank).
    """

    def __init__(self, tag=None):
        self._tag, self._posted = tag, {}
        self._come = queue.SimpleQueue()

    def take(self, among):
        """Return (source, tensor), the next message of one of the ranks `among`.

        Raises PeerGone if one of them has ended; the others' messages stay.
        """
        if not among:
            raise ValueError("an inbox takes from at least one rank: name it.")
        for source in among:
            _check_peer(source, self._tag, "receive from")
        since = clock.current.ready()
        names = " from any of ranks " + ", ".join(map(str, among))
        with _call("receive", None, names + _tagged(self._tag)):
            source = self._next(among)
            return source, self._posted.pop(source).take(since)

    def _next(self, among):
        for source in among:
            if source not in self._posted:
                self._post(source)
        if not clock.current.in_order:
            return self._first_come()
        for source in among:
            try:
                self._posted[source].wait()
            except PeerGone:
                del self._posted[source]
                raise
        return min(among, key=lambda s: (self._posted[s].header()[3][0], s))

    def _post(self, source):
        posted = self._posted[source] = _Posted(source, self._tag, None)
        if not clock.current.in_order:
            threading.Thread(target=self._watch, args=(posted,), daemon=True).start()

    def _watch(self, posted):
        """A thread per message: the library cannot wait for the first of several."""
        try:
            posted.wait()
            self._come.put((posted.source, None))
        except RuntimeError as error:
            self._come.put((posted.source, error))

    def _first_come(self):
        source, error = self._come.get()
        if error:
            del self._posted[source]
            raise error
        return source


def finish():
    """Wait for all that nobody waited for; a rank does this when it returns.

    A peer that is gone takes nothing any more: whoever needs it has noticed.
    """
    aside.finish()
    for pending in list(_unfinished):
        with contextlib.suppress(PeerGone):
            pending.wait()


def _to_self(tensor, into):
    if into is None:
        return tensor.detach().clone()
    if (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
        raise _misfit(into, tensor.shape, tensor.dtype, rank())
    into.detach().copy_(tensor)
    return into


def _misfit(into, shape, dtype, source):
    return TypeError(
        f"rank {rank()} expects {_kind(into.shape, into.dtype)} from rank {source}, "
        f"but rank {source} sends {_kind(shape, dtype)}."
    )


def _check(tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a message is a tensor, not {type(tensor).__name__}: use torch.tensor()."
        )
    dense = tensor.layout is torch.strided and tensor.device.type != "meta"
    if not dense or tensor.dtype not in _CODES or tensor.dim() > _MAX_DIMS:
        raise TypeError(
            f"a message cannot be {_kind(tensor.shape, tensor.dtype)} with layout "
            f"{tensor.layout} on {tensor.device}: send a dense tensor of at most "
            f"{_MAX_DIMS} dimensions, of numbers that are not quantised."
        )


def _check_peer(peer, tag, verb):
    me, n = rank(), n_ranks()
    if n == 1:
        raise ValueError(f"rank 0 is alone and cannot {verb} rank {peer}: launch more.")
    if not isinstance(peer, int) or not 0 <= peer < n or peer == me:
        peers = [other for other in range(n) if other != me]
        raise ValueError(
            f"rank {me} cannot {verb} rank {peer!r}: its peers are {peers}."
        )
    if tag is not None and not (isinstance(tag, int) and tag >= 0):
        raise ValueError(f"a tag is a whole number from 0 up, not {tag!r}.")


# A message is a block: the header, and the tensor's bytes if there is room; otherwise
# they follow by themselves. The room is what the last message of the same peer and tag
# needed, within limits, so that equal messages take one transfer each. After a large
# message, a receive of as many bytes is under way before the next header is read.


def _expected(way, peer, tag):
    """Return how many bytes beside the block the receiver makes room for, or 0."""
    last = _last.get((way, peer, tag or 0), 0)
    return last if last > _LARGE else 0


def _block(way, peer, tag):
    """Return an empty block of the size that both sides expect."""
    last = _last.get((way, peer, tag or 0), 0)
    return _buffer(_HEADER.size + (last if _SMALL < last <= _LARGE else _SMALL))


def _buffer(size):
    """Return `size` zero bytes twice: as a bytearray, and as a tensor on the same."""
    data = bytearray(size)
    return data, torch.frombuffer(data, dtype=torch.uint8)


def _room(data):
    return len(data) - _HEADER.size


def _inside(data, shape, dtype):
    """Return the room of a block as a tensor, in the block's own memory."""
    numel, start = shape.numel(), _HEADER.size
    if not numel:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=numel, offset=start).view(shape)


def _to_wire(tensor):
    """Return the tensor's bytes, flat, in host memory; a copy only where needed."""
    if _is_plain(tensor):
        return _bytes(tensor)
    host = _host_tensor(tensor.shape, tensor.dtype, tensor.is_cuda)
    host.copy_(tensor.detach())  # waits for the GPU
    return _bytes(host)


def _is_plain(tensor):
    """Do the tensor's bytes lie in host memory just as they are sent?"""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy


def _host_tensor(shape, dtype, pinned):
    if pinned:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.empty(shape, dtype=dtype)


def _bytes(dense):
    flat = dense.detach().as_strided((dense.numel(),), (1,))  # [1::2] has stride 2
    return flat.view(torch.uint8)


def _write_header(data, tensor, stamp, title=b""):
    dims = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
    kind = _CODES[tensor.dtype], tensor.dim(), *dims
    _HEADER.pack_into(data, 0, _MAGIC, *kind, title, *stamp)


def _read_header(data, source):
    """Return (shape, dtype, title, stamp)."""
    magic, code, n_dims, *rest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise TypeError(
            f"what rank {source} sent was not sent by labs.kit.messages: use its send "
            "and receive on both sides."
        )
    title, begun, busy, number = rest[_MAX_DIMS:]
    shape, title = torch.Size(rest[:n_dims]), title.rstrip(b"\0").decode()
    return shape, _DTYPES[code], title, (begun, busy, int(number))


def _kind(shape, dtype):
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _tagged(tag):
    return "" if tag is None else f" (tag {tag})"


# ---- all ranks together ------------------------------------------------------------


def all_reduce(tensor, op="sum", name=""):
    """Combine `tensor` over all ranks, in place, and return it.

    op: "sum", "avg", "max" or "min". Half-precision tensors are summed in float32 and
    keep their dtype. name: says what is reduced, so that ranks which reduce tensors in
    different orders are told (the library would add them up in silence).
    """
    _check_op(tensor, op)
    with _together("all_reduce", tensor, f"{op} {name}") as work:
        if work:
            _reduce(tensor, op)
    return tensor


def iall_reduce(tensor, op="sum", name=""):
    """Start an all_reduce; return a Reduction. Does not block.

    The tensor may be read or changed only after `wait`. All ranks start and wait in the
    same order; another collective begins when those under way are over.
    """
    _check_op(tensor, op)
    return Reduction(tensor, op, name)


class Reduction:
    """An all_reduce under way, beside whatever this rank computes."""

    def __init__(self, tensor, op, name):
        self.tensor, self._op = tensor, op
        self._title = f"all_reduce {op} {name}".strip()
        self._mark, self._end = clock.current.mark(), None
        if n_ranks() > 1:
            self._job = aside.start(self._run, tensor.device)

    def _run(self):
        _agree(self._title, self.tensor, 0.0)
        if self.tensor.numel():
            _reduce(self.tensor, self._op)
        if not self.tensor.is_cuda:
            self._end = clock.current.now()

    def wait(self):
        """Wait until it is over; return the tensor, which is then combined."""
        if n_ranks() > 1:
            with _call("all_reduce"):
                aside.finish()
                self._job.join()
                if clock.current.records:
                    times, size = self._times(), nbytes(self.tensor)
                    clock.current.overlapped("all_reduce", times, size, self._end)
        return self.tensor

    def _times(self):
        """Return when each rank was ready to begin."""
        mine = torch.tensor(clock.current.time_of(self._mark), dtype=torch.float64)
        times = [torch.empty_like(mine) for _ in range(n_ranks())]
        dist.all_gather(times, mine)
        return [time.item() for time in times]


def _check_op(tensor, op):
    if op not in ("sum", "avg", "max", "min"):
        raise ValueError(f"op must be sum, avg, max or min, not {op!r}.")
    _check(tensor)
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"no average in {tensor.dtype}: convert it to float.")


def _reduce(tensor, op):
    total = _dense(tensor, _SUMMED_IN.get(tensor.dtype, tensor.dtype))
    how = "SUM" if op == "avg" else op.upper()
    dist.all_reduce(total, getattr(dist.ReduceOp, how))
    if op == "avg":
        total /= n_ranks()
    _put(total, tensor)


def broadcast(tensor, source=0, name=""):
    """Give every rank, in place, the tensor of rank `source`; return it."""
    if not isinstance(source, int) or not 0 <= source < n_ranks():
        raise ValueError(f"no rank {source!r}: there are ranks 0 to {n_ranks() - 1}.")
    with _together("broadcast", tensor, f"from rank {source} {name}") as work:
        if work:
            copy = _dense(tensor, tensor.dtype)
            dist.broadcast(_bytes(copy), source)
            _put(copy, tensor)
    return tensor


def all_gather(tensor, name=""):
    """Return the list of all ranks' tensors, in rank order."""
    with _together("all_gather", tensor, name) as work:
        mine = _dense(tensor, tensor.dtype)
        parts = [mine.clone() for _ in range(n_ranks())]
        if work:
            dist.all_gather([_bytes(part) for part in parts], _bytes(mine))
    return [part.to(tensor.device) for part in parts]


def barrier():
    """Wait until every rank has come here."""
    with _together("barrier", torch.empty(0)):
        pass  # comparing headers is a meeting of all ranks


@contextlib.contextmanager
def _together(call, tensor, detail=""):
    """Meet all ranks, who must come with the same call and the same kind of tensor.

    Yields whether there is work: not in a world of one, nor for an empty tensor.
    """
    _check(tensor)
    if n_ranks() == 1:
        yield False
        return
    since = clock.current.ready()
    with _call(call):
        aside.finish()
        times = _agree(f"{call} {detail}".strip(), tensor, since)
        yield tensor.numel() > 0
    clock.current.together(call, times, nbytes(tensor), since)


def _agree(title, tensor, since):
    """Raise on every rank if the ranks differ; return when each of them came."""
    excess = len(title.encode()) - _MAX_TITLE
    if excess > 0:
        raise ValueError(f"the name is too long: leave out {excess} bytes.")
    data, mine = _buffer(_HEADER.size)
    _write_header(data, tensor, (since, 0.0, 0), title.encode())
    buffers = [_buffer(_HEADER.size) for _ in range(n_ranks())]
    dist.all_gather([header for _, header in buffers], mine)
    seen = [_read_header(data, peer) for peer, (data, _) in enumerate(buffers)]
    for peer, (shape, dtype, title, _) in enumerate(seen):
        if (shape, dtype, title) != seen[0][:3]:
            raise TypeError(
                f"the ranks do not call the same thing: rank 0 comes with {seen[0][2]} "
                f"of {_kind(*seen[0][:2])}, rank {peer} with {title} of "
                f"{_kind(shape, dtype)}."
            )
    return [stamp[0] for *_, stamp in seen]


def _dense(tensor, dtype):
    """Return the tensor itself, or a copy, where and as the backend can take it."""
    dense = tensor.detach().to("cpu" if staged else tensor.device, dtype)
    return dense.resolve_conj().resolve_neg().contiguous()


def _put(dense, tensor):
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)


def clock_offset(rounds=8):
    """Return seconds to add to this host's clock to get rank 0's (Cristian 1989).

    Each rank asks rank 0 for its time; the round trip that took least bounds the error.
    """
    best = (float("inf"), 0.0)
    for peer in range(1, n_ranks()):
        for _ in range(rounds if rank() in (0, peer) else 0):
            start = clock.Wall().now()
            if rank() == 0:
                receive(peer)
                send(torch.tensor(clock.Wall().now(), dtype=torch.float64), peer)
                continue
            send(torch.empty(0), 0)
            theirs = receive(0).item()
            end = clock.Wall().now()
            best = min(best, (end - start, theirs - (start + end) / 2))
    return best[1]
