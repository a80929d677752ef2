"""What a right answer to each exercise of the model-parallel notebook is, without them.

    check("in_turn", in_turn)                     prints the verdict on an answer
    gradients_of(skip_step, [1, 3, 5], 2)         what its run gives, for the page
    traffic_of(three_ways, 8, 9e9, 1e6, 4, [1])   bytes by batch, for a figure

Answers that send messages run on 1 to 4 ranks. Losses, gradients and messages are
compared with those of one process, so that any code which does the same is right.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import prod

import torch
from torch import nn

from labs import model_parallel as lab
from labs.checks import (
    Exercise,
    OnRanks,
    Trouble,
    ask,
    equal,
    everywhere,
    flat,
    judge,
    look,
    look_on_ranks,
    number,
    show,
    unfit,
    usual,
    whole,
)
from labs.kit import clock, messages, split
from labs.kit.messages import chunk_sizes
from labs.kit.simulate import pipeline_needs, simulate
from labs.kit.timeline import Link, Op

LOSS = "loss"
GRADIENTS = "gradient of each rank's weight"
ALONE = "There may be one stage alone."
PERCENTAGE = "That is a percentage; a fraction lies between 0 and 1."


def check(name, answer, seed=0):
    """Print the verdict on an answer to the exercise `name`."""
    print(judge(EXERCISES[name], answer, seed))


def gradients_of(skip_step, weights, x):
    """Return what skip_step gives on a rank for each weight: the loss and the gradients
    of the weights. If it gives nothing, say so and return None."""
    facts, weights = EXERCISES["skip_step"].facts, [float(w) for w in weights]
    [found] = look_on_ranks(facts, skip_step, [(len(weights), weights, [float(x)])])
    if "trouble" in found:
        print(f"No result yet: {found['trouble'].rstrip('.')}.")
        return None
    return found[LOSS], found[GRADIENTS]


def traffic_of(three_ways, n_ranks, weights, per_sample, n_layers, batches):
    """Return {way: bytes for each size of a batch}; per_sample: of a layer's output.

    If three_ways gives nothing, say so and return None.
    """
    cases = [(n_ranks, weights, per_sample * batch, n_layers) for batch in batches]
    found = look(EXERCISES["three_ways"].facts, three_ways, cases)
    if "trouble" in found[-1]:
        print(f"No figure yet: {found[-1]['trouble'].rstrip('.')}.")
        return None
    return {way: [facts[way] for facts in found] for way in WAYS}


# ---- time of a step --------------------------------------------------------------


def _halves(random, n, least=1, most=9):
    return [random.randint(2 * least, 2 * most) / 2 for _ in range(n)]


def _link(random):
    return Link(random.randint(1, 8) / 4, 2.0 ** random.randint(2, 5))


def _simulated(forwards, backwards, boundary, link):
    """Return the timeline of a step; times by stage, bytes of each stage's input."""
    times = {"F": forwards, "B": backwards}
    return simulate(
        lab.order(len(forwards)),
        lambda stage, op: times[op.kind][stage],
        link,
        lambda stage, op: boundary[stage + (op.kind == "F")],
    )


class IdleFraction(Exercise):
    name = "idle_fraction"

    def cases(self, random):
        """Stages and a link whose step is simulated; the answer hears less of it."""

        def case(n, link):
            sizes = [16 * random.randint(1, 9) for _ in range(n)]
            return _halves(random, n), _halves(random, n), sizes, link

        return [
            case(random.randint(3, 5), Link()),
            case(2, Link()),
            case(random.randint(3, 5), _link(random)),
            case(1, Link()),
            case(random.randint(6, 9), _link(random)),
        ]

    def given(self, *step):
        """Return (n_stages, computing); without the second if it is all the time."""
        run = _simulated(*step)
        computing = run.compute() / run.makespan
        return (run.n_ranks,) if equal(computing, 1.0) else (run.n_ranks, computing)

    def arguments(self, *step):
        return ", ".join(map(show, self.given(*step)))

    def facts(self, answer, *step):
        return {"idle": ask(answer, *self.given(*step), read=number)}

    def expected(self, *step):
        return {"idle": _simulated(*step).bubble()}

    def hint(self, found, *step):
        n, *computing = self.given(*step)
        computing, right = (computing or [1.0])[0], self.expected(*step)["idle"]
        return usual(found["idle"], {
            "That is the busy part.": 1 - right,
            PERCENTAGE: 100 * right,
            "That is idle over busy time; a part of all time is asked for.":
                right / (1 - right),
            "While a message is on its way, all stages are idle, not all but one.":
                1 - 1 / n,
            "Of the time in which one stage computes, the others are idle too.":
                1 - computing,
            "In the time of messages the stage whose turn it is idles as well.":
                computing * (1 - 1 / n),
        }) or "One of n_stages computes, in a part of the time."  # fmt: skip

    def advice(self, trouble, *step):
        return ALONE if len(step[0]) == 1 else ""


class StepTime(Exercise):
    name = "step_time"

    def cases(self, random):
        def case(n):
            times = _halves(random, n), _halves(random, n)
            sizes = [16 * size for size in random.sample(range(1, 30), n)]
            return *times, sizes, _link(random)

        return [case(random.randint(3, 4)), case(2), case(1), case(6)]

    def given(self, forwards, backwards, boundary, link):
        return sum(forwards) + sum(backwards), boundary, link

    def arguments(self, *step):
        computing, boundary, link = self.given(*step)
        return f"{show(computing)}, {boundary}, {link}"

    def facts(self, answer, *step):
        return {"time": ask(answer, *self.given(*step), read=number)}

    def expected(self, *step):
        return {"time": _simulated(*step).makespan}

    def hint(self, found, *step):
        computing, boundary, link = self.given(*step)
        moves = [link.seconds(nbytes) for nbytes in boundary]
        wires = sum(boundary[1:]) / link.bandwidth
        return usual(found["time"], {
            "That is the computation alone: messages take time as well.": computing,
            "Gradients go back over the same boundaries: each counts twice.":
                computing + sum(moves[1:]),
            "Nobody sends stage 0 its input: leave out boundary[0].":
                computing + 2 * sum(moves),
            "boundary[0] is the one to leave out, not the last one.":
                computing + 2 * sum(moves[:-1]),
            "Each message takes the latency too.": computing + 2 * wires,
            "Each message takes the latency, not all of them together once.":
                computing + 2 * (wires + link.latency),
            "The messages come one after the other: add them all up.":
                computing + 2 * max(moves[1:], default=0.0),
            "`computing` is what all stages take together: add the messages to it.":
                len(boundary) * computing + 2 * sum(moves[1:]),
        }) or "Add every message, on and back, to `computing`."  # fmt: skip

    def advice(self, trouble, *step):
        return ALONE if len(step[0]) == 1 else ""


def _told_to_recompute(forwards, backwards, boundary, link):
    """Simulate: R may start with the next stage's backward, which S announces."""
    n = len(forwards)
    F, R, S, B = (Op(kind, 0) for kind in "FRSB")
    times = {"F": forwards, "R": forwards, "B": backwards, "S": [0.0] * n}

    def needs(n_stages, stage, op):
        if op == R:
            return [(stage + 1, S)]
        if op == S:  # a backward begins when its gradient is there
            return [(stage + 1, B)] if stage < n - 1 else []
        return pipeline_needs(n_stages, stage, op) if op == F else []

    def delay(stage, op):
        bytes_of = {F: boundary[stage], S: boundary[(stage + 1) % n]}
        return link.seconds(bytes_of[op]) if op in bytes_of else 0.0

    early = [[F, R, S, B]] * (n - 1) + [[F, S, B]]
    cost = lambda stage, op: times[op.kind][stage]
    return simulate(early, cost, delay=delay, needs=needs).makespan


def _recompute_at_once(forwards, backwards, moves):
    """Return the seconds of a step whose stages recompute after their first forward."""
    ends = list(accumulate(f + move for f, move in zip(forwards, [0.0, *moves])))
    time = ends[-1] + backwards[-1]
    for stage in reversed(range(len(moves))):
        ready = ends[stage] + forwards[stage]
        time = max(time + moves[stage], ready) + backwards[stage]
    return time


class StepWithRecompute(Exercise):
    name, points = "step_with_recompute", 2

    def cases(self, random):
        def case(n, link, most=9):
            forwards, backwards = _halves(random, n, most=most), _halves(random, n)
            sizes = [16 * size for size in random.sample(range(1, 9), n)]
            return forwards, backwards, sizes, link

        return [
            ([1.5] * 4, [3.0] * 4, [64] * 4, Link()),
            case(3, Link(), most=20),
            case(2, _link(random)),
            case(random.randint(5, 7), _link(random), most=20),
            case(1, _link(random)),
            ([9.0, 1.0], [2.0, random.randint(3, 5)], [48, 32], Link(1.0, 16.0)),
        ]

    def arguments(self, forwards, backwards, boundary, link):
        return f"{show(forwards)}, {show(backwards)}, {boundary}, {link}"

    def facts(self, answer, forwards, backwards, boundary, link):
        given = list(forwards), list(backwards), list(boundary), link
        return {"seconds": ask(answer, *given, read=number)}

    def expected(self, *step):
        return {"seconds": float(_told_to_recompute(*step))}

    def hint(self, found, forwards, backwards, boundary, link):
        moves = [link.seconds(nbytes) for nbytes in boundary[1:]]
        plain = sum(forwards) + sum(backwards) + 2 * sum(moves)
        right = self.expected(forwards, backwards, boundary, link)["seconds"]
        last = forwards[-1]
        waits = list(zip(forwards, backwards[1:], moves))
        ahead = plain - sum(b + move for _, b, move in waits)
        return usual(found["seconds"], {
            "That is a step without recompute: a long forward is not hidden.": plain,
            "That waits for the gradient, and then begins: it may begin earlier.":
                plain + sum(forwards) - last,
            "All forwards come on top there; a stage recomputes while it waits.":
                plain + sum(forwards),
            "The last stage goes backward at once: it computes nothing again.":
                right + last,
            "While the gradient is on its way, a stage can recompute too.":
                ahead + sum(max(f, b) + move for f, b, move in waits),
            "Messages take time, on and back.":
                _told_to_recompute(forwards, backwards, boundary, Link()),
            "Nobody sends stage 0 its input: leave out boundary[0].":
                right + link.seconds(boundary[0]),
            "A stage recomputes during the next stage's backward, not during its own.":
                ahead + backwards[-1] - backwards[0]
                + sum(max(f, b + m) for f, b, m in zip(forwards, backwards, moves)),
            "The gradient arrives after the next stage's backward and its message.":
                ahead + sum(max(f, b, move) for f, b, move in waits),
            "It begins with the next stage's backward, not after its own forward.":
                _recompute_at_once(forwards, backwards, moves),
        }) or "A stage needs two things; the later one counts."  # fmt: skip

    def advice(self, trouble, forwards, *rest):
        return ALONE if len(forwards) == 1 else ""


# ---- memory ----------------------------------------------------------------------

REFUSED = "it raises"
LAYERS, STAGES = "layers in all", "stages"
TOO_LARGE = "bytes of stages that do not fit"


def _needs(weights, activations, copies=4):
    return [copies * w + a for w, a in zip(weights, activations)]


def _fewest(needs, budget):
    """Return the sizes of the fewest stages that fit, by trying all numbers."""
    for n_stages in range(1, len(needs) + 1):
        sizes = split.by_cost(needs, n_stages)
        if max(_held(needs, sizes)) <= budget:
            return sizes
    return None


def _held(needs, sizes):
    """Return the bytes of each stage."""
    ends = [0, *accumulate(sizes)]
    return [sum(needs[start:end]) for start, end in zip(ends, ends[1:])]


def _layers(random, n):
    """Return bytes of weights and activations; some layers have no weights."""
    weights = [random.choice([0, *[10 * random.randint(1, 9)] * 3]) for _ in range(n)]
    return weights, [10 * random.randint(1, 40) for _ in range(n)]


# What a usual mistake counts: copies of the weights, and the activations or not.
COUNTED = {
    "For each weight there are a gradient and two numbers of Adam.": (1, 1),
    "A weight, its gradient and two numbers of Adam make four.": (3, 1),
    "Adam keeps two numbers for each weight, beside its gradient.": (2, 1),
    "Weights count, not activations alone.": (0, 1),
    "Activations count, not weights alone.": (4, 0),
}


def _mistakes(weights, activations, budget):
    """Return {sentence: what is to be said of the cut that this mistake gives}."""
    needs = _needs(weights, activations)
    cuts = {
        text: _filled(_needs(weights, [kept * a for a in activations], copies), budget)
        for text, (copies, kept) in COUNTED.items()
    }
    cuts["A stage that needs exactly the budget fits."] = _filled(needs, budget - 1)
    return {text: _about(cut, needs, budget) for text, cut in cuts.items()}


def _tight(random, n):
    """Return layers and a budget with which each mistake gives another cut."""
    while True:
        weights, activations = _layers(random, n)
        needs = _needs(weights, activations)
        budget = max(_held(needs, split.by_cost(needs, n // 3)))
        if max(needs) < budget:
            right = _about(_fewest(needs, budget), needs, budget)
            found = [right, *_mistakes(weights, activations, budget).values()]
            if len(set(map(str, found))) == len(found):
                return weights, activations, budget


class FewestStages(Exercise):
    name, points = "fewest_stages", 2

    def cases(self, random):
        weights, activations = _layers(random, 4)
        large = max(_needs(weights, activations))
        return [
            ([10, 20, 20, 10], [30, 0, 5, 0], 275),
            _tight(random, random.randint(9, 12)),
            _tight(random, random.randint(13, 16)),
            (*_layers(random, 5), 10**6),
            ([0, 20, 0, 0], [0, 20, 5, 0], 100),
            (weights, activations, large - 1),
        ]

    def facts(self, answer, *case):
        weights, activations, budget = case
        given = list(weights), list(activations), budget
        needs = _needs(weights, activations)
        if max(needs) > budget:
            return {REFUSED: ask(_raised(answer), *given, read=str)}
        return _about(ask(answer, *given, read=_read_sizes), needs, budget)

    def expected(self, weights, activations, budget):
        needs = _needs(weights, activations)
        if max(needs) > budget:
            return {REFUSED: "ValueError"}
        return _about(_fewest(needs, budget), needs, budget)

    def hint(self, found, weights, activations, budget):
        if REFUSED in found:
            return "No cut helps a layer that does not fit by itself: refuse it."
        n, needs = len(weights), _needs(weights, activations)
        if found[LAYERS] != n:
            return f"Each layer belongs to one stage: sizes add up to {n}."
        for text, told in _mistakes(weights, activations, budget).items():
            if told == found:
                return text
        if found[STAGES] == n:
            return "Fill a stage with as many layers as fit, then begin another."
        if found[TOO_LARGE]:
            if found == _about(chunk_sizes(n, found[STAGES]), needs, budget):
                return "Equal numbers of layers are no equal numbers of bytes."
            return "A stage holds 4 times its weights, and all its activations."
        return "Fewer will do: is there room for one more layer in a stage?"

    def advice(self, trouble, weights, activations, budget):
        if max(_needs(weights, activations)) > budget:
            return "A layer alone does not fit here: raise ValueError."
        if "ValueError" in trouble:
            return "Each layer fits, so there is a cut."
        return "A layer may hold nothing at all." if 0 in weights else ""


def _raised(answer):
    """Return a function that says whether an answer raises ValueError."""

    def call(*given):
        try:
            answer(*given)
        except ValueError:
            return "ValueError"
        return "nothing"

    return call


def _read_sizes(value):
    if not isinstance(value, Iterable) or isinstance(value, (str, dict)):
        raise unfit(value, "a list of layers per stage")
    sizes = [whole(size) for size in value]
    if any(size < 1 for size in sizes):
        raise Trouble(f"it returned {sizes}; a stage has at least one layer.")
    return sizes


def _about(sizes, needs, budget):
    held = _held(needs, sizes)
    too_large = [nbytes for nbytes in held if nbytes > budget]
    return {LAYERS: sum(sizes), TOO_LARGE: too_large, STAGES: len(sizes)}


def _filled(needs, budget):
    """Return the cut that puts layers into a stage while there is room."""
    ends = [0]
    while ends[-1] < len(needs):
        start = ends[-1]
        held = list(accumulate(needs[start:]))
        ends.append(start + max(1, sum(nbytes <= budget for nbytes in held)))
    return [end - start for start, end in zip(ends, ends[1:])]


# ---- answers that send messages --------------------------------------------------

FREE = clock.Unit({"F": 1, "B": 2})
ELEMENT = 4  # bytes of a float32
SENT = "bytes sent by each rank"
TIME = "time of the step (F = 1, B = 2)"


def _here(numbers):
    """Return numbers as a tensor on this rank's device."""
    return torch.tensor(numbers, device=messages.device)


class Scale(nn.Module):
    """A stage with one weight w: tanh(w x), or just w x."""

    def __init__(self, w, curved=False):
        super().__init__()
        self.w, self.curved = nn.Parameter(_here(w)), curved

    def forward(self, x):
        return (self.w * x).tanh() if self.curved else self.w * x


class Meet(Scale):
    """The last stage of a model with a skip connection: the sum of w z + y."""

    def forward(self, z, y):
        return (self.w * z + y).sum()


def _run(answer, *arguments, read=lambda value: value):
    """Call an answer on this rank, in virtual time; return what is read, and spans."""
    clk = clock.Virtual(FREE)
    with clock.recording(clk, messages.rank()):
        value = ask(answer, *arguments, read=read)
    return value, clk.spans


def _gradients(module):
    """Return the gradient of each rank's weight."""
    gradient = module.w.grad
    found = everywhere([gradient is None, 0.0 if gradient is None else gradient.item()])
    lacking = [rank for rank, (none, _) in enumerate(found) if none]
    if lacking and messages.rank() == 0:  # one rank is enough to say so
        raise Trouble(f"the weight of rank {lacking[0]} has no gradient.")
    return [gradient for _, gradient in found]


def _sent(spans):
    """Return the bytes that each rank has sent."""
    sends = [span.nbytes for span in spans if span.name == "send"]
    return [int(nbytes) for nbytes in everywhere(sum(sends))]


def _on_last(read):
    """Read what the last rank returns; the others may return anything."""
    last = messages.rank() == messages.n_ranks() - 1
    return lambda value: read(value) if last else 0.0


def _loss_and_gradients(weights, forward):
    """Return what one process finds: the loss, and the gradient of each weight."""
    weights = [torch.tensor(w, requires_grad=True) for w in weights]
    loss = forward(weights)
    loss.backward()
    return {LOSS: loss.item(), GRADIENTS: [w.grad.item() for w in weights]}


def _drawn(random, n_ranks):
    """Return a case: n_ranks, a weight for each, inputs."""
    signs = [random.choice([-1, 1]) for _ in range(n_ranks)]
    weights = [sign * random.choice([2, 3, 5, 6, 7]) / 4 for sign in signs]
    return n_ranks, weights, [random.randint(2, 9) / 4 for _ in range(3)]


def _called(n_ranks, weights, x):
    return f"weights {show(weights)}, inputs {show(x)}, {_on(n_ranks)}"


def _on(n_ranks):
    return f"on {n_ranks} rank{'s' * (n_ranks > 1)}"


class InTurn(OnRanks):
    name = "in_turn"

    def cases(self, random):
        return [_drawn(random, n_ranks) for n_ranks in (3, 2, 1, 4)]

    def arguments(self, n_ranks, weights, x):
        return f"stage, {show(x)}, {_on(n_ranks)}"

    def facts(self, answer, n_ranks, weights, x):
        rank, last = messages.rank(), n_ranks - 1
        stage = lab.Stage(Scale(weights[rank], curved=True))
        if rank == last:
            stage.loss = lambda y: y.square().mean()
        clock.watch(stage, forward="F", backward="B")
        loss, spans = _run(answer, stage, _here(x), read=_on_last(number))
        gradients = _gradients(stage.module)
        end = max(everywhere(max((span.end for span in spans), default=0.0)))
        found = {LOSS: everywhere(loss)[-1], GRADIENTS: gradients}
        return found | {SENT: _sent(spans), TIME: end}

    def expected(self, n_ranks, weights, x, start=1.0):
        def forward(weights):
            y = torch.tensor(x)
            for w in weights:
                y = (w * y).tanh()
            return y.square().mean()

        nbytes = ELEMENT * len(x)
        sent = [nbytes * ((rank > 0) + (rank < n_ranks - 1)) for rank in range(n_ranks)]
        found = _loss_and_gradients(weights, forward)
        return found | {SENT: sent, TIME: 3.0 * n_ranks}

    def hint(self, found, n_ranks, weights, x):
        right, n = self.expected(n_ranks, weights, x), n_ranks
        if not equal(found[LOSS], right[LOSS]):
            alone = self.expected(1, weights[-1:], x)[LOSS]
            if n > 1 and equal(found[LOSS], alone):
                return "Stage 0 alone reads the inputs; the others receive theirs."
            return "The loss is the output of the last stage: return it as a number."
        if not equal(found[GRADIENTS], right[GRADIENTS]):
            scaled = [found[LOSS] * gradient for gradient in right[GRADIENTS]]
            if equal(found[GRADIENTS], scaled):
                return "The gradient to begin with is 1, not the loss."
            return "Each stage goes back once, from the gradients that it receives."
        if found[SENT] != right[SENT]:
            return "Outputs go to the next stage and gradients back, each of them once."
        return "Each stage goes forward once and backward once."

    def advice(self, trouble, n_ranks, weights, x):
        if "has no gradient" in trouble:
            return "Every stage goes backward, from the last one to the first."
        if "cannot receive from" in trouble or "cannot send to" in trouble:
            return "The first and the last stage have a neighbour on one side alone."
        if "deadlocks" in trouble:
            return "A stage sends back what the one before waits for."
        return ""


class SkipStep(OnRanks):
    name, points = "skip_step", 3

    def cases(self, random):
        return [_drawn(random, n_ranks) for n_ranks in (3, 4)]

    def arguments(self, n_ranks, weights, x):
        return _called(n_ranks, weights, x)

    def facts(self, answer, n_ranks, weights, x):
        rank, last = messages.rank(), n_ranks - 1
        module = (Meet if rank == last else Scale)(weights[rank])
        given = _here(x) if rank == 0 else None
        loss, spans = _run(answer, module, given, read=_on_last(number))
        found = {LOSS: everywhere(loss)[-1], GRADIENTS: _gradients(module)}
        return found | {SENT: _sent(spans)}

    def expected(self, n_ranks, weights, x, on=1.0, skip=1.0):
        """The truth; or what comes if rank 0 takes these parts of both gradients."""

        def forward(weights):
            first, *between, last = weights
            y = first * torch.tensor(x)
            by_stages, skipped = _scaled(y, on), _scaled(y, skip)
            return (last * prod(between) * by_stages + skipped).sum()

        found = _loss_and_gradients(weights, forward)
        return found | {SENT: [2 * ELEMENT * len(x)] * n_ranks}

    def hint(self, found, *case):
        right, (_, weights, x) = self.expected(*case), case
        y, through = weights[0] * sum(x), prod(weights[1:-1])
        if not equal(found[LOSS], right[LOSS]):
            return usual(found[LOSS], {
                "The last rank needs y as it left rank 0, not z twice.":
                    (weights[-1] + 1) * through * y,
                "z comes first and then y: module(z, y).": (weights[-1] + through) * y,
                "The last rank needs z from its neighbour, and y: not y twice.":
                    (weights[-1] + 1) * y,
            }) or "The last rank computes module(z, y)."  # fmt: skip
        if equal(found[GRADIENTS], right[GRADIENTS]):
            if sum(found[SENT][1:-1]) > sum(right[SENT][1:-1]):
                return "The ranks between need not know of y: send it past them."
            return "Rank 0 sends y twice, the last rank a gradient to either of them."
        return usual(found[GRADIENTS], {
            "The gradient of y that comes by way of the skip is lost: two come to "
            "rank 0, and they add up.": self.expected(*case, skip=0.0)[GRADIENTS],
            "That is the skip's gradient alone: another comes to rank 0, through the "
            "stages.": self.expected(*case, on=0.0)[GRADIENTS],
            "Two gradients of one tensor add up; they are not averaged.":
                self.expected(*case, on=0.5, skip=0.5)[GRADIENTS],
        }) or "Go back stage by stage, from what is sent back."  # fmt: skip

    def advice(self, trouble, n_ranks, weights, x):
        if "not NoneType" in trouble or "does not require grad" in trouble:
            return "What has been received has no gradient before requires_grad_()."
        if "second time" in trouble:
            return "Rank 0 adds both gradients up, and goes backward once."
        if "has no gradient" in trouble:
            return "Every rank goes backward, from the last to the first."
        if "deadlocks" in trouble:
            return "Compare who sends with who receives; isend does not wait."
        if n_ranks > 3:
            return "There may be more than three ranks."
        return ""


def _scaled(y, factor):
    """Return y; its gradient is worth `factor` of it."""
    return factor * y + (1 - factor) * y.detach()


# ---- inside the layers -----------------------------------------------------------

Y, OF_X, OF_BIAS = "y", "gradient of x", "gradient of bias"
OF_FIRST, OF_SECOND = "gradients of first, by rank", "gradients of second, by rank"
CALLS = "messages of each rank"
SAMPLES, WIDTH, HIDDEN = 2, 2, 2  # hidden units on each rank


def _same(rows):
    """Return what all ranks hold; if they differ, what each of them holds."""
    return rows[0] if all(equal(row, rows[0]) for row in rows) else rows


def _matrices(n_ranks, seed):
    """Return x, W1, W2, bias and the gradient of the output: small whole numbers.

    Some hidden units of each rank are above 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def whole_numbers(low, high, *size):
        return torch.randint(low, high + 1, size, generator=generator).float()

    hidden = n_ranks * HIDDEN
    first = whole_numbers(-4, 4, hidden, WIDTH)
    first[::HIDDEN] = first[::HIDDEN].abs() + 1
    second = whole_numbers(-4, 4, WIDTH, hidden)
    x, gradient = (whole_numbers(1, 9, SAMPLES, WIDTH) for _ in range(2))
    return x, first, second, whole_numbers(1, 9, WIDTH), gradient


class SplitMLP(OnRanks):
    name, points = "split_mlp", 3

    def cases(self, random):
        return [(n_ranks, random.randint(0, 10**6)) for n_ranks in (2, 3, 1)]

    def arguments(self, n_ranks, seed):
        return f"{n_ranks * HIDDEN} hidden units, {_on(n_ranks)}"

    def facts(self, answer, n_ranks, seed):
        matrices = [matrix.to(messages.device) for matrix in _matrices(n_ranks, seed)]
        x, first, second, bias, gradient = matrices
        mine = slice(HIDDEN * messages.rank(), HIDDEN * (messages.rank() + 1))
        parts = first[mine], second[:, mine], bias
        weights = [part.clone().requires_grad_() for part in parts]
        (y, of_x), spans = _run(answer, x, *weights, gradient, read=_read_pair)
        if any(weight.grad is None for weight in weights):
            names = "first", "second", "bias"
            lacking = [name for name, w in zip(names, weights) if w.grad is None]
            raise Trouble(f"{lacking[0]} has no gradient.")
        of_first, of_second, of_bias = (flat(weight.grad) for weight in weights)
        calls = [span for span in spans if span.lane == "transfer"]
        return {
            Y: _same(everywhere(y)),
            OF_X: _same(everywhere(of_x)),
            OF_FIRST: everywhere(of_first),
            OF_SECOND: everywhere(of_second),
            OF_BIAS: _same(everywhere(of_bias)),
            CALLS: [int(n) for n in everywhere(float(len(calls)))],
        }

    def expected(self, n_ranks, seed):
        x, first, second, bias, gradient = _matrices(n_ranks, seed)
        hidden = (x @ first.T).clamp(min=0)
        of_hidden = gradient @ second * (hidden > 0)  # by hand, without autograd
        of_first, of_second = of_hidden.T @ x, gradient.T @ hidden
        return {
            Y: flat(hidden @ second.T + bias),
            OF_X: flat(of_hidden @ first),
            OF_FIRST: [flat(part) for part in of_first.split(HIDDEN)],
            OF_SECOND: [flat(part) for part in of_second.split(HIDDEN, 1)],
            OF_BIAS: flat(gradient.sum(0)),
            CALLS: [2 * (n_ranks > 1)] * n_ranks,
        }

    def hint(self, found, n_ranks, seed):
        right = self.expected(n_ranks, seed)
        wrong = next(fact for fact in right if not equal(found[fact], right[fact]))
        tell = {Y: self.hint_about_y, OF_X: self.hint_about_x}.get(wrong)
        if tell:
            return tell(found[wrong], right[wrong], n_ranks, seed)
        if wrong == CALLS:
            return "One all_reduce makes y whole, and one the gradient of x."
        if wrong == OF_BIAS:
            return "Each rank has the whole bias, so its gradient is the whole one."
        total = [sum(numbers) for numbers in zip(*right[wrong])]
        many = [[n_ranks * g for g in row] for row in right[wrong]]
        return usual(found[wrong], {
            "Ranks have parts of their own here: these gradients do not add up.":
                [total] * n_ranks,
            "That is n_ranks times as much: `gradient` is the whole one already.": many,
        }) or "Go backward once, from `gradient`."  # fmt: skip

    def hint_about_y(self, y, right, n_ranks, seed):
        x, first, second, bias, _ = _matrices(n_ranks, seed)
        hidden = (x @ first.T).relu()
        product = hidden @ second.T
        if len(y) == n_ranks and isinstance(y[0], list):
            return "Each rank has a part of the sum: y is the sum over all ranks."
        return usual(y, {
            "The bias is whole on each rank: add it once, after the sum.":
                flat(product + n_ranks * bias),
            "The bias is missing.": flat(product),
            "A sum is asked for, no mean.": flat(product / n_ranks + bias),
            "Between the two layers there is a ReLU.":
                flat(x @ first.T @ second.T + bias),
            "The ReLU is between the layers, not at the end.":
                flat((x @ first.T @ second.T + bias).relu()),
        }) or "Sum the products of all ranks, then add the bias."  # fmt: skip

    def hint_about_x(self, of_x, right, n_ranks, seed):
        if len(of_x) == n_ranks and isinstance(of_x[0], list):
            return "x went to every rank, so its gradient is the sum of theirs."
        return usual(of_x, {
            "A sum is asked for, no mean.": [g / n_ranks for g in right],
            "That is n_ranks times as much: `gradient` is the whole one already.":
                [n_ranks * g for g in right],
        }) or "Sum what each rank finds for its x."  # fmt: skip

    def advice(self, trouble, n_ranks, seed):
        if "bias has no gradient" in trouble:
            return "All ranks add the bias, so that all have its gradient."
        if "has no gradient" in trouble:
            return "Go backward from this rank's part, with the gradient of y."
        if "does not require grad" in trouble:
            return "What all_reduce returns has no graph to the parts of other ranks."
        if "has returned" in trouble or "do not call the same thing" in trouble:
            return "Every rank comes to the same two all_reduces."
        return ""


def _read_pair(value):
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise unfit(value, "a pair (y, gradient of x)")
    for name, tensor in zip((Y, "the gradient of x"), value):
        if not isinstance(tensor, torch.Tensor):
            raise Trouble(f"{name} is {type(tensor).__name__}, not a tensor.")
        if tensor.shape != (SAMPLES, WIDTH):
            raise Trouble(f"{name} has the shape {list(tensor.shape)}, not that of x.")
    return [flat(tensor) for tensor in value]


# ---- three ways ------------------------------------------------------------------

WAYS = "data", "tensor", "model"


class ThreeWays(Exercise):
    name, points = "three_ways", 2

    def cases(self, random):
        def case(n_ranks):
            sizes = random.sample(range(1, 60), 2)
            return n_ranks, *[n_ranks * 100 * s for s in sizes], random.randint(11, 40)

        return [case(n) for n in (random.randint(5, 9), 2, 3, 1)]

    def facts(self, answer, *case):
        def read(value):
            if not isinstance(value, Mapping):
                raise unfit(value, f"a dict of {', '.join(WAYS)}")
            for way in WAYS:
                if way not in value:
                    raise Trouble(f"it returned a dict without {way!r}.")
            return {way: number(value[way]) for way in WAYS}

        return ask(answer, *case, read=read)

    def expected(self, n_ranks, weights, boundary, n_layers):
        """Add up one message after the other."""

        def ring(nbytes):
            return sum(nbytes / n_ranks for _ in range(2 * (n_ranks - 1)))

        sent = [0.0] * n_ranks
        for rank in range(n_ranks - 1):
            sent[rank] += boundary  # on
            sent[rank + 1] += boundary  # and back
        sums = [boundary for _ in range(n_layers) for _ in ("F", "F", "B", "B")]
        return dict(zip(WAYS, (ring(weights), sum(map(ring, sums)), max(sent))))

    def hint(self, found, n_ranks, weights, boundary, n_layers):
        right = self.expected(n_ranks, weights, boundary, n_layers)
        way = next(way for way in WAYS if not equal(found[way], right[way]))
        value, truth = found[way], right[way]
        if way == "model":
            return usual(value, {
                "There is no boundary with one rank.": boundary if n_ranks == 1 else -1,
                "Of two ranks, each has one boundary.": 2 * boundary * (n_ranks < 3),
                "A rank in the middle sends to both sides.": boundary,
                "One rank is asked for, not all together.":
                    2 * (n_ranks - 1) * boundary,
                "A boundary is between two stages, not between any two layers.":
                    2 * (n_layers - 1) * boundary,
            }) or "Which stage sends most, on and back?"  # fmt: skip
        every = n_ranks * truth / (n_ranks - 1) if n_ranks > 1 else -1
        return usual(value, {
            "That is half a ring: chunks are summed, and then handed on.": truth / 2,
            "A rank keeps one chunk: in a ring it sends n_ranks - 1 of n_ranks, twice.":
                every,
            "A chunk is 1 / n_ranks of the tensor.": n_ranks * truth,
            "All are asked for, not one of n_ranks.": truth / max(n_ranks, 2),
            "That is one sum a layer; there are two forward and two backward.":
                truth / 4,
            "That is one layer: there are n_layers of them.": truth / n_layers,
        }) or "Count the ring all-reduces, and the bytes of each."  # fmt: skip


EXERCISES = {
    exercise.name: exercise
    for exercise in (
        IdleFraction(),
        InTurn(),
        StepTime(),
        FewestStages(),
        SkipStep(),
        StepWithRecompute(),
        SplitMLP(),
        ThreeWays(),
    )
}
