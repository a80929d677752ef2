"""Messages between ranks: any tensor, with a checked header.

gloo itself fills a buffer of the wrong type silently, aborts on a wrong size and takes no
CUDA tensor from point to point. Here every message begins with a header (shape, dtype,
tag, time), so that a mismatch is an error in words; views, empty tensors, scalars and
bf16 arrive as they were; and a rank that shares its GPU sends from host memory.
"""

import contextlib
import struct

import torch
import torch.distributed as dist

from labs.kit import clock

_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip
_MAX_DIMS = 8
_MAGIC = 0x6C616273  # "labs"
# magic, tag, dtype, number of dims, dims, name; then time sent, port time, number
_HEADER = struct.Struct(f"<4q{_MAX_DIMS}q40s3d")

device = torch.device("cpu")  # where this rank computes; set when the rank starts
staged = False  # do its tensors travel through host memory?
doing = None  # (call, peer, detail) while this rank is in a call; the watchdog reads it
moved = 0  # calls finished; the watchdog sees movement
_unfinished = []  # sends whose buffers must live until they are taken


def rank():
    """Return this process's rank; 0 outside `launch`."""
    return dist.get_rank() if dist.is_initialized() else 0


def n_ranks():
    """Return how many ranks there are; 1 outside `launch`."""
    return dist.get_world_size() if dist.is_initialized() else 1


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


class Pending:
    """A send under way. Its buffers are kept until `wait` has returned."""

    def __init__(self, to, works, buffers):
        self._to, self._works, self._buffers = to, works, buffers

    def wait(self):
        """Wait until the receiver has taken the message."""
        with _call("send", self._to):
            for work in self._works:
                work.wait()
        self._works, self._buffers = [], []

    def done(self):
        return all(work.is_completed() for work in self._works)


def isend(tensor, to, tag=0):
    """Start to send `tensor` to rank `to`; return a Pending. Does not block.

    The tensor may be changed at once if it is not contiguous or not on the CPU (a copy
    is sent); otherwise only after `wait`.
    """
    _check(tensor, to, "send to")
    wire = _to_wire(tensor)
    now = clock.current
    stamp = now.sent(to, wire.numel(), tag) if now else (0.0, 0.0, 0)
    header = _header(tensor, tag, stamp)
    works = [dist.isend(header, to, tag=tag)]
    if wire.numel():
        works.append(dist.isend(wire, to, tag=tag))
    _unfinished[:] = [pending for pending in _unfinished if not pending.done()]
    _unfinished.append(Pending(to, works, (header, wire)))
    return _unfinished[-1]


def send(tensor, to, tag=0):
    """Send `tensor` to rank `to` and wait until it has been received."""
    with _call("send", to, _tagged(tag)):
        isend(tensor, to, tag).wait()


def receive(source, tag=0, into=None):
    """Return the tensor that rank `source` sends next under `tag`.

    into: a tensor to receive into; then its shape and dtype must be those sent, or a
    TypeError names both. Without it, a new tensor on this rank's device.
    """
    _check(into, source, "receive from")
    called = clock.current.now() if clock.current else 0.0
    with _call("receive", source, _tagged(tag)):
        header = torch.empty(_HEADER.size, dtype=torch.uint8)
        dist.recv(header, source, tag=tag)
        shape, dtype, _, stamp = _read(header, source)
        if into is not None and (into.shape != shape or into.dtype != dtype):
            raise TypeError(
                f"rank {rank()} expects {_kind(into.shape, into.dtype)} from rank "
                f"{source}, but rank {source} sends {_kind(shape, dtype)}."
            )
        tensor = _from_wire(shape, dtype, source, tag, into)
    if clock.current:
        clock.current.received(source, stamp, called, nbytes(tensor), tag)
    return tensor


def exchange(tensor, to, source=None, tag=0, into=None):
    """Send to rank `to` while receiving from `source` (default `to`); return what came.

    It cannot deadlock, whatever the order of ranks: the send does not block.
    """
    source = to if source is None else source
    if to == source == rank():
        return tensor.clone()
    with _call("exchange", source, _tagged(tag)):
        pending = isend(tensor, to, tag)
        received = receive(source, tag, into)
        pending.wait()
    return received


def finish():
    """Wait for all sends that nobody waited for; a rank does this when it returns."""
    while _unfinished:
        _unfinished.pop(0).wait()


def nbytes(tensor):
    """Return the bytes that a tensor's elements take on the wire."""
    return tensor.numel() * tensor.element_size()


def _check(tensor, peer, verb):
    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a message is a tensor, not {type(tensor).__name__}: use torch.tensor()."
        )
    if n_ranks() == 1:
        raise ValueError(f"rank 0 is alone and cannot {verb} rank {peer}.")
    if not isinstance(peer, int) or not 0 <= peer < n_ranks() or peer == rank():
        others = [other for other in range(n_ranks()) if other != rank()]
        raise ValueError(
            f"rank {rank()} cannot {verb} rank {peer!r}: its peers are {others}."
        )


def _to_wire(tensor):
    """Return the tensor's bytes, flat and contiguous, where the backend can send them."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_cuda and staged:
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host.copy_(flat, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        flat = host
    return flat.view(torch.uint8)


def _from_wire(shape, dtype, source, tag, into):
    """Receive the bytes that follow a header, straight into `into` where possible."""
    where = into.device if into is not None else device
    direct = into is not None and into.is_contiguous()
    direct = direct and not (where.type == "cuda" and staged)
    on = "cpu" if where.type == "cuda" and staged else where
    buffer = into if direct else torch.empty(shape, dtype=dtype, device=on)
    if buffer.numel():
        wire = buffer.detach().reshape(-1).view(torch.uint8)
        dist.recv(wire, source, tag=tag)
    if into is None:
        return buffer.to(where)
    if not direct:
        into.detach().copy_(buffer)
    return into


def _header(tensor, tag=0, stamp=(0.0, 0.0, 0), name=""):
    if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS or tensor.is_sparse:
        raise TypeError(
            f"a message cannot be {_kind(tensor.shape, tensor.dtype)}: send a dense "
            f"tensor of up to {_MAX_DIMS} dimensions, quantised ones as integers."
        )
    dims = [*tensor.shape, *[-1] * (_MAX_DIMS - tensor.dim())]
    fields = _MAGIC, tag, _DTYPES.index(tensor.dtype), tensor.dim(), *dims
    packed = _HEADER.pack(*fields, name.encode()[:40], *stamp)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _read(header, source):
    """Return (shape, dtype, name, stamp) of a header."""
    magic, _, dtype, n_dims, *rest = _HEADER.unpack(header.numpy().tobytes())
    if magic != _MAGIC:
        raise TypeError(
            f"what rank {source} sent was not sent by labs.kit.messages: use its send "
            "and receive on both sides."
        )
    name = rest[_MAX_DIMS].rstrip(b"\0").decode(errors="replace")
    sent, busy, number = rest[_MAX_DIMS + 1 :]
    shape = torch.Size(rest[:n_dims])
    return shape, _DTYPES[dtype], name, (sent, busy, int(number))


def _kind(shape, dtype):
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _tagged(tag):
    return f" (tag {tag})" if tag else ""


# ---- all ranks together ------------------------------------------------------------


def all_reduce(tensor, op="sum", name=""):
    """Combine `tensor` over all ranks, in place, and return it.

    op: "sum", "avg", "max" or "min". Half-precision tensors are summed in float32 and
    keep their dtype. name: says what is reduced, so that ranks which reduce tensors in
    different orders are told (the library would add them up in silence).
    """
    if op not in ("sum", "avg", "max", "min"):
        raise ValueError(f"op must be sum, avg, max or min, not {op!r}.")
    if op == "avg" and not tensor.is_floating_point():
        raise TypeError(f"there is no average in {tensor.dtype}: convert it to float.")
    with _together("all_reduce", tensor, name or op) as total:
        if total is not None:
            reduce = {"avg": "sum"}.get(op, op).upper()
            dist.all_reduce(total, getattr(dist.ReduceOp, reduce))
            total = total / n_ranks() if op == "avg" else total
            tensor.detach().copy_(total)
    return tensor


def broadcast(tensor, source=0, name=""):
    """Give every rank, in place, the tensor of rank `source`; return it."""
    with _together("broadcast", tensor, name or f"from rank {source}") as copy:
        if copy is not None:
            dist.broadcast(copy, source)
            tensor.detach().copy_(copy)
    return tensor


def all_gather(tensor, name=""):
    """Return the list of all ranks' tensors, in rank order."""
    parts = [tensor.detach().clone()]
    with _together("all_gather", tensor, name, widen=False) as mine:
        if mine is not None:
            parts = [torch.empty_like(mine) for _ in range(n_ranks())]
            dist.all_gather(parts, mine)
    return [part.to(tensor.device) for part in parts]


def barrier():
    """Wait until every rank has come here."""
    with _together("barrier", torch.zeros(0), ""):
        pass  # comparing headers is a meeting of all ranks


@contextlib.contextmanager
def _together(call, tensor, name, widen=True):
    """Compare the ranks' headers, then yield a dense host copy to work on; None for a
    world of one or an empty tensor, where there is nothing to do."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{call} takes a tensor, not {type(tensor).__name__}.")
    if n_ranks() == 1:
        yield None
        return
    called = clock.current.now() if clock.current else 0.0
    with _call(call):
        times = _agree(call, tensor, name, called)
        if not tensor.numel():
            yield None
        else:
            half = widen and tensor.dtype in (torch.float16, torch.bfloat16)
            copy = tensor.detach().to("cpu" if staged else tensor.device)
            copy = copy.to(torch.float32) if half else copy
            yield copy.clone(memory_format=torch.contiguous_format)
    if clock.current:
        clock.current.together(call, called, times, nbytes(tensor))


def _agree(call, tensor, name, called):
    """Raise on every rank if the ranks do not come with the same call and tensor."""
    header = _header(tensor, 0, (called, 0.0, 0), f"{call} {name}")
    headers = [torch.empty_like(header) for _ in range(n_ranks())]
    dist.all_gather(headers, header)
    seen = [_read(other, peer) for peer, other in enumerate(headers)]
    for peer, (shape, dtype, title, _) in enumerate(seen):
        if (shape, dtype, title) != seen[0][:3]:
            raise TypeError(
                f"the ranks do not call the same thing: rank 0 comes with "
                f"{seen[0][2].strip()} of {_kind(*seen[0][:2])}, rank {peer} with "
                f"{title.strip()} of {_kind(shape, dtype)}."
            )
    return [stamp[0] for *_, stamp in seen]


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
            send(torch.zeros(0), 0)
            theirs = receive(0).item()
            end = clock.Wall().now()
            best = min(best, (end - start, theirs - (start + end) / 2))
    return best[1]
