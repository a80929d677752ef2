"""Which scheme? What a training step costs on a cluster, by the formulas of the labs.

A scheme is three numbers: so many replicas of the model, each cut into so many stages,
each layer spread over so many devices. This is no topic: it alone composes labs.
"""

from dataclasses import dataclass, replace
from math import ceil

from labs import gpipe, model_parallel, parameter_server, ring_allreduce, single_gpu
from labs.kit import simulate, split
from labs.kit.timeline import Link, Op


@dataclass(frozen=True)
class Model:
    """What a step's cost depends on. FLOPs and bytes are those of one sample."""

    parameters: float
    n_layers: int
    flops: float  # forward and backward
    activations: float  # bytes kept for the backward
    boundary: float  # bytes that a layer hands to the next
    rule: str = "mixed, 16-bit gradients"  # bytes per parameter, of single_gpu.RULES
    heads: int = 1  # at most so many devices share a layer
    whole: float = 0.0  # of the activations: bytes that each of these devices keeps


def transformer(n_layers, width, heads, vocab=51200, context=2048):
    """A GPT whose samples are sequences of `context` tokens, in 16 bits. Parameters:
    Narayanan et al. 2021, eq. 2. A layer keeps sbh (34 + 5as/h) bytes, 10sbh of them
    on each device that shares it: Korthikanti et al. 2023, eqs. 2 and 3."""
    n, vectors = n_layers, context * width
    parameters = width * (n * (12 * width + 13) + vocab + context)
    flops = single_gpu.transformer_flops(context, n, width, vocab, context)
    kept, whole = n * (34 * vectors + 5 * heads * context**2), n * 10 * vectors
    return Model(parameters, n, flops, kept, 2 * vectors, heads=heads, whole=whole)


# Images of 224 x 224, 32 bits; outputs of convolutions are kept, and again normalised.
RESNET50 = Model(25.6e6, 16, 3 * 8.2e9, 2 * 4 * 11.1e6, 3.2e6, "SGD with momentum")


@dataclass(frozen=True)
class Cluster:
    """Devices, numbered node by node; those of a node share its link to the others."""

    n_devices: int
    memory: float  # bytes of a device
    peak: float  # FLOP/s of a device
    reached: float  # the part of the peak that it reaches while it computes
    inside: Link  # of a device with the others of its node
    between: Link = Link()  # of a whole node with the other nodes
    per_node: int = 8

    def link(self, n, apart=1):
        """The slowest link between n devices whose numbers are `apart` apart."""
        if n * apart <= self.per_node:
            return self.inside
        mine = self.between.bandwidth / min(apart, self.per_node)  # all use it
        return Link(self.between.latency, min(mine, self.inside.bandwidth))


@dataclass(frozen=True)
class Scheme:
    """How devices share a step."""

    replicas: int = 1
    stages: int = 1
    tensor: int = 1  # devices that share a layer
    microbatches: int = 1  # of each replica
    order: str = "1f1b"  # of stages; or "gpipe"; or "in turn", one after the other
    servers: int = 0  # that sum the gradients; 0: a ring
    beside: bool = False  # exchange beside the backward, not after it
    recompute: bool = False  # keep no more than the inputs of layers


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, by what a device does in them; bytes of the busiest device."""

    compute: float
    idle: float
    exposed: float  # communication, with nothing computed beside it
    sent: float
    memory: list  # parameters, gradients, optimizer states, activations

    @property
    def seconds(self):
        return self.compute + self.idle + self.exposed


class Step:
    """The parts of a step on its busiest device, each by the formula of a lab."""

    def __init__(self, model, cluster, batch, scheme):
        self.model, self.cluster, self.scheme = model, cluster, scheme
        s, self.m = scheme, scheme.microbatches
        parts = split.even(batch, s.replicas * self.m, "samples", "microbatches")
        heads = split.even(model.heads, s.tensor, "heads", "shares")[0]
        self.samples, self.layers = parts[0], split.even(model.n_layers, s.stages)[0]
        self.part = self.layers / model.n_layers * heads / model.heads
        slot = self.part * model.flops * self.samples / cluster.peak / cluster.reached
        self.forward, self.backward = slot / 3, slot * (3 if s.recompute else 2) / 3
        self.output = model.boundary * self.samples  # bytes

    def share_layers(self):
        """Seconds and bytes of a microbatch's all-reduces between the devices of a
        layer: two in a forward and two in a backward (Shoeybi et al. 2019, fig. 4)."""
        n, times = self.scheme.tensor, self.layers * (6 if self.scheme.recompute else 4)
        seconds = ring_allreduce.seconds("ring", n, self.output, self.cluster.link(n))
        sent, *_ = ring_allreduce.traffic("ring", n, self.output)
        return times * seconds, times * sent

    def hand_over(self):
        """Seconds in which stages wait for messages, and bytes. In a pipeline the first
        microbatch waits at each boundary, the others where messages are the slower."""
        d, t = self.scheme.stages, self.scheme.tensor
        link, boundary = self.cluster.link(d, apart=t), [self.output / t] * d
        seconds = model_parallel.step_time(0, boundary, link)
        sent = self.m * max(gpipe.traffic(boundary))
        if self.scheme.order == "in turn" or d == 1:
            return self.m * seconds, sent
        late = [boundary[0] / link.bandwidth - t for t in (self.forward, self.backward)]
        return seconds + (self.m - 1) * sum(max(0, t) for t in late), sent

    def exchange(self):
        """Seconds that the exchange of gradients adds to a step, and bytes."""
        s, n, nbytes = self.scheme, self.scheme.replicas, self.memory()[1]
        link = self.cluster.link(n, apart=s.stages * s.tensor)
        if s.servers:  # more machines; workers are in one node, or each in its own
            seconds = parameter_server.step_seconds(n, s.servers, nbytes, 0, link)
            return seconds, max(n / s.servers, 1) * nbytes
        k = ceil(nbytes / 25e6) if s.beside else 1  # buckets, as large as torch's
        each = ring_allreduce.seconds("ring", n, nbytes / k, link)
        buckets = [("", self.backward * (i + 1) / k, each, 0) for i in range(k)]
        end = simulate.replicas(1, [(Op("B"), self.backward)], buckets).makespan
        return end - self.backward, ring_allreduce.traffic("ring", n, nbytes)[0]

    def memory(self):
        """Bytes of parameters, gradients, optimizer states, and most activations."""
        s, model = self.scheme, self.model
        alive = {"gpipe": self.m, "1f1b": min(self.m, s.stages), "in turn": 1}[s.order]
        kept = model.whole + (model.activations - model.whole) / s.tensor
        layer = kept * self.samples / model.n_layers
        inputs = self.layers * self.output
        inside = inputs + layer if s.recompute else self.layers * layer
        most = gpipe.memory([inside] * alive, [inputs] * alive, s.recompute)
        *own, states = single_gpu.memory(self.part * model.parameters, model.rule)
        return [*own, 0.0 if s.servers else states, most]


def cost(model, cluster, batch, scheme):
    """Return the Cost of a step on `batch` samples; ValueError for no such scheme."""
    n, m = scheme.replicas * scheme.stages * scheme.tensor, scheme.microbatches
    if n > cluster.n_devices:
        raise ValueError(f"this scheme needs {n} devices, not {cluster.n_devices}.")
    step = Step(model, cluster, batch, scheme)
    within, hand_over, exchange = step.share_layers(), step.hand_over(), step.exchange()
    busy, spread = m * (step.forward + step.backward), m * within[0]
    compute = busy / step.part / scheme.stages / scheme.tensor  # of a device on average
    idle = (busy + spread) / (1 - gpipe.bubble_fraction(scheme.stages, m))
    idle = max(0.0, idle - compute - spread)
    if scheme.order == "in turn":  # one works and the others wait, however it is cut
        idle = (scheme.stages - 1) * (compute + spread)
    exposed, sent = (m * a + b + c for a, b, c in zip(within, hand_over, exchange))
    return Cost(compute, idle, exposed, sent, step.memory())


def schemes(n, batch, size):
    """The schemes of this book on n devices, with microbatches of `size` samples."""
    m, own = max(1, batch // size), max(1, batch // size // n)
    return {
        "single device": Scheme(microbatches=m),
        "data parallel": Scheme(n, microbatches=own),
        "... beside the backward": Scheme(n, microbatches=own, beside=True),
        "one parameter server": Scheme(n, microbatches=own, servers=1),
        f"{n} parameter servers": Scheme(n, microbatches=own, servers=n),
        "model parallel": Scheme(stages=n, microbatches=m, order="in turn"),
        "GPipe": Scheme(stages=n, microbatches=m, order="gpipe"),
        "tensor parallel": Scheme(tensor=n, microbatches=m),
    }


def row(name, model, cluster, batch, scheme):
    """Return a scheme's cost as a row of a table; it recomputes if it must, to fit."""
    found = cost(model, cluster, batch, scheme)
    if sum(found.memory) > cluster.memory:
        name, scheme = f"{name}, recompute", replace(scheme, recompute=True)
        found = cost(model, cluster, batch, scheme)
    parts = {"compute": found.compute, "idle": found.idle, "link": found.exposed}
    fits = sum(found.memory) <= cluster.memory
    return {
        "scheme": name,
        "step in s": found.seconds,
        **{what: f"{100 * t / found.seconds:.0f}\u00a0%" for what, t in parts.items()},
        "sent, GB": found.sent / 1e9,
        "memory, GB": sum(found.memory) / 1e9,
        "limit": max(parts, key=parts.get) if fits else "memory",
    }
