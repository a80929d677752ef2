"""How many bytes of activations a process keeps for its backward passes.

    meter = Meter(model)
    with meter:
        loss = model(x).sum()
    meter.bytes     what autograd keeps now; 0 again after loss.backward()
    meter.peak      the most it kept at any moment

The count is of storages, so it is exact and the same on CPU and GPU; what an allocator
rounds up or caches is not in it.
"""

from weakref import WeakValueDictionary

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class OutOfMemory(MemoryError):
    """A device of `budget` bytes cannot hold what is `fixed` and the `activations`."""

    def __init__(self, budget, fixed, activations):
        super().__init__(
            f"a device holds {budget:,} B, but this rank needs {fixed:,} B for its "
            "parameters, gradients and optimizer state, and by now "
            f"{activations:,} B for activations: split the model over more ranks, or "
            "make the batch smaller."
        )
        self._args = budget, fixed, activations

    def __reduce__(self):
        return type(self), self._args


class Meter(saved_tensors_hooks):
    """Counts the tensors that autograd saves inside `with meter:`, until it frees them.

    Tensors that share a storage count once, and a view counts as its whole storage,
    for that is what it keeps alive. Parameters and buffers of `modules` do not count:
    they would stay anyway. What an algorithm keeps by itself it reports with `hold`
    and `drop`. Above what `allow` allows it raises OutOfMemory. Only the innermost
    hooks see a tensor, so what `torch.utils.checkpoint` recomputes under its own hooks
    does not count.
    """

    def __init__(self, *modules):
        super().__init__(self._pack, self._unpack)
        self.bytes = self.peak = 0
        self.limit, self.fixed = None, 0
        self._modules = modules
        self._weights = set()
        self._kept = WeakValueDictionary()
        self._held = {}

    def __enter__(self):
        self._weights = {
            _address(tensor)
            for module in self._modules
            for tensor in (*module.parameters(), *module.buffers())
        }
        super().__enter__()
        return self

    def hold(self, key, *tensors):
        """Count `tensors` too, under `key`, until `drop(key)`."""
        self._held.setdefault(key, []).extend(map(self._keep, tensors))

    def drop(self, key):
        """Stop counting what was held under `key`; ValueError if nothing was."""
        if key not in self._held:
            raise ValueError(f"nothing is held under {key!r}: hold it before drop.")
        del self._held[key]

    def watch(self, stage):
        """Count what a stage keeps in `stage.live` between its forward and backward."""
        forward, backward = stage.forward, stage.backward

        def hold(microbatch, *args):
            output = forward(microbatch, *args)
            kept = [t for t in stage.live[microbatch] if isinstance(t, Tensor)]
            self.hold(microbatch, *kept)
            return output

        def drop(microbatch, *args):
            gradient = backward(microbatch, *args)
            self.drop(microbatch)
            return gradient

        stage.forward, stage.backward = hold, drop
        return stage

    def allow(self, budget, fixed=0):
        """From now on, at most `budget` bytes, of which `fixed` are taken for good."""
        self.limit, self.fixed = budget - fixed, fixed
        self.check()

    def check(self):
        if self.limit is not None and self.bytes > self.limit:
            raise OutOfMemory(self.limit + self.fixed, self.fixed, self.bytes)

    def reset_peak(self):
        """Let `peak` start again from what is kept now."""
        self.peak = self.bytes

    def _keep(self, tensor):
        address = _address(tensor)
        kept = self._kept.get(address)
        if kept is None:
            counts = address not in self._weights
            kept = self._kept[address] = _Kept(self, tensor, counts)
        return kept

    def _pack(self, tensor):
        # Detached, since an operation's own result would keep that operation alive.
        return self._keep(tensor), tensor.detach(), tensor._version

    def _unpack(self, packed):
        _, tensor, version = packed
        if tensor._version != version:  # autograd itself does not look behind hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was "
                "changed in place after forward: change it later, or change a copy."
            )
        return tensor


class _Kept:
    """One storage on the meter. Python's reference count says when it goes."""

    def __init__(self, meter, tensor, counts):
        self.meter = meter
        self.tensor = tensor.detach()  # keeps the storage, and so its address, taken
        self.nbytes = tensor.untyped_storage().nbytes() if counts else 0
        meter.bytes += self.nbytes
        meter.peak = max(meter.peak, meter.bytes)
        meter.check()

    def __del__(self):
        self.meter.bytes -= self.nbytes


def _address(tensor):
    return tensor.untyped_storage().data_ptr()
