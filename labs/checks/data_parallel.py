"""What a right answer to each exercise of the data-parallel notebook is, without them.

    check("average", average)     prints the verdict on an answer
    times_of(step_time, plans)    what an answer says of plans, for a figure

Answers that communicate run on two to four ranks. A rank that is done meets the others;
if one of them is still in a message, both say so and nobody waits.
"""

import json
import re
from collections.abc import Iterable
from functools import partial
from itertools import chain
from random import Random

import torch

from labs.checks import (
    Exercise,
    Trouble,
    ask,
    equal,
    flat,
    judge,
    look,
    number,
    unfit,
    usual,
    whole,
)
from labs.kit import carry, clock, messages
from labs.kit.clock import ring_seconds
from labs.kit.simulate import replicas
from labs.kit.timeline import Link, Op

MESSAGES = "messages of each rank"
ONE = "One all_reduce is enough: put all that has to travel into one tensor."
EVERY_RANK = "Every rank must come to the same messages, in the same order."


def check(name, answer, seed=0):
    """Print the verdict on an answer to the exercise `name`."""
    print(judge(EXERCISES[name], answer, seed))


def times_of(answer, plans):
    """Return what an answer to step_time gives for a list of plans, for a figure.

    If it gives nothing, say so and return None.
    """
    found = look(EXERCISES["step_time"].facts, answer, plans)
    if "trouble" in found[-1]:
        print(f"No figure yet: {found[-1]['trouble'].rstrip('.')}.")
        return None
    return [facts["end"] for facts in found]


# ---- answers that communicate ----------------------------------------------------

_DONE = "done"
_MEETING = f"all_reduce max {_DONE} of int64[]"
_TRIES = 100  # a rank may be in several messages before it comes


class OnRanks(Exercise):
    """An answer that runs on several ranks at once. Facts are lists in rank order.

    Each case is a launch of its own, so that a deadlock is the verdict on that case.
    """

    def ranks(self, first, *rest):
        """Return how many ranks a case needs: its first part has an entry for each."""
        return len(first)

    def probe(self, answer, seed):
        found = []
        for case in self.cases(Random(seed)):
            found += look(self.facts, answer, [case], self.ranks(*case))
            if "trouble" in found[-1]:
                return [*found[:-1], {"trouble": _stuck(found[-1]["trouble"])}]
        return found

    def advice(self, trouble, *case):
        if "every rank must call" in trouble or "the same thing" in trouble:
            return EVERY_RANK
        if "wait for each other" in trouble:
            return "Each receive needs a send on the other side; all_reduce needs none."
        return ""


class _Tally(clock.Clock):
    """Counts the messages of this rank, by name."""

    records = True

    def begin(self, rank):
        self.names = []

    def finish(self):
        pass

    def sent(self, *message):
        self.names.append("send")
        return super().sent(*message)

    def together(self, name, *call):
        self.names.append(name)

    def overlapped(self, name, *call):
        self.names.append(name)


def on_all(answer, *arguments, read):
    """Ask on every rank; return, in rank order, what was read and the messages' names.

    Raises Trouble on all ranks if one of them has it: the cause, not what follows.
    """
    tally = _Tally()
    mine = {"rank": messages.rank()}
    try:
        with clock.recording(tally, mine["rank"]):
            mine["value"] = ask(answer, *arguments, read=read)
    except Trouble as trouble:
        mine["trouble"] = str(trouble)
    everyone = _meet({**mine, "messages": tally.names})
    troubles = {one["rank"]: one["trouble"] for one in everyone if "trouble" in one}
    if troubles:
        raise Trouble(_cause(troubles, len(everyone)))
    return [one["value"] for one in everyone], [one["messages"] for one in everyone]


def _meet(mine):
    """Return what all ranks come with, in rank order.

    A rank that is in another message hears that this one is done, and comes later.
    """
    data = torch.tensor(list(json.dumps(mine).encode()), dtype=torch.uint8)
    for attempt in range(_TRIES):
        try:
            size = messages.all_reduce(torch.tensor(len(data)), "max", _DONE).item()
            break
        except TypeError:
            if attempt == _TRIES - 1:
                raise
    room = torch.full((size,), ord(" "), dtype=torch.uint8)
    room[: len(data)] = data
    return [json.loads(bytes(part.tolist())) for part in messages.all_gather(room)]


def _cause(troubles, n_ranks):
    """Return, of {rank: trouble}, the one that has led to the others, in words."""
    causes = {r: text for r, text in troubles.items() if _MEETING not in text}
    rank, text = next(iter((causes or troubles).items()))
    if causes:
        alike = len(causes) == n_ranks and len(set(causes.values())) == 1
        return text if alike else f"on rank {rank}, {text}"
    calls = r"rank 0 comes with (.+), rank (\d+) with (.+?\])\.(.*)\.$"
    [(ours, other, theirs, place)] = re.findall(calls, text)
    inside, call, gone = (other, theirs, 0) if _MEETING in ours else (0, ours, other)
    return (
        f"rank {inside} is in {call}{place}, which every rank must call, and rank "
        f"{gone} has returned."
    )


def _stuck(trouble):
    """Say of a deadlock where each rank is; ranks that wait in `_meet` are done."""
    if "nothing has moved" not in trouble:
        return trouble
    ranks = re.findall(
        r"rank (\d+) (waits in .+?|has returned)(?= rank \d+ (?:waits|has|is stuck))",
        trouble.partition(" s. ")[2],
    )
    said = [
        f"rank {rank} {'has returned' if carry.label(__file__) in where else where}"
        for rank, where in ranks
    ]
    return f"the ranks wait for each other: {'; '.join(said)}."


# ---- which samples ---------------------------------------------------------------

DEALT, EACH = "samples that were dealt out", "samples per rank"
PADDED = "dealt in turns, from one order that begins again at its end"
AGAIN, EPOCH, SEED = (f"order in another {what}" for what in ("call", "epoch", "seed"))
LONG = 20  # samples, of which two random orders are equal once in 20!


class Indices(Exercise):
    name = "indices"

    def cases(self, random):
        epoch, seed = random.randint(1, 9), random.randint(1, 99)
        return [
            (8, 2, epoch, seed),
            (10, 4, epoch, seed),
            (3, 7, epoch, seed),
            (LONG + random.randint(1, 2), 3, epoch, seed),
        ]

    def arguments(self, n_samples, n_ranks, epoch, seed):
        return f"{n_samples}, {n_ranks}, rank, {epoch}, {seed}"

    def facts(self, answer, n_samples, n_ranks, epoch, seed):
        def dealt(epoch, seed):
            """The samples of each rank."""
            arguments = [(n_samples, n_ranks, r, epoch, seed) for r in range(n_ranks)]
            return [ask(answer, *each, read=_read_samples) for each in arguments]

        shards = dealt(epoch, seed)
        order = [shard[i] for i in range(max(map(len, shards))) for shard in shards
                 if i < len(shard)]  # fmt: skip
        again = [order[i % n_samples] for i in range(len(order))]
        found = {
            EACH: [len(shard) for shard in shards],
            DEALT: sorted(set(order)),
            PADDED: order == again,
            AGAIN: _compared(dealt(epoch, seed), shards),
        }
        if n_samples >= LONG:
            found[EPOCH] = _compared(dealt(epoch + 1, seed), shards)
            found[SEED] = _compared(dealt(epoch, seed + 100), shards)
        return found

    def expected(self, n_samples, n_ranks, epoch, seed):
        wanted = {
            EACH: [-(-n_samples // n_ranks)] * n_ranks,
            DEALT: list(range(n_samples)),
            PADDED: True,
            AGAIN: "the same",
        }
        if n_samples >= LONG:
            wanted |= {EPOCH: "different", SEED: "different"}
        return wanted

    def hint(self, found, n_samples, n_ranks, epoch, seed):
        wanted = self.expected(n_samples, n_ranks, epoch, seed)
        if found[EACH] == [n_samples // n_ranks] * n_ranks != wanted[EACH]:
            return "Nothing is dropped: the order is made longer until it deals evenly."
        if found[EACH] == [n_samples] * n_ranks != wanted[EACH]:
            return "Each rank takes its part alone."
        if len(set(found[EACH])) > 1:
            return "All ranks get equally many: repeat the beginning of the order."
        if found[EACH] != wanted[EACH]:
            return "Repeat as few samples as will do."
        if found[DEALT] != wanted[DEALT]:
            return "Do all ranks draw the same order, and take turns?"
        if not found[PADDED]:
            return "Deal one order, sample after sample: rank, rank + n_ranks, ..."
        if found[AGAIN] == "different":
            return "Only epoch and seed may decide: use a torch.Generator of your own."
        return "Seed the generator with both, epoch and seed."


def _compared(order, other):
    return "the same" if order == other else "different"


def _read_samples(value):
    if not isinstance(value, Iterable) or isinstance(value, (str, dict)):
        raise unfit(value, "a list of samples")
    return [whole(sample) for sample in value]


# ---- gradients -------------------------------------------------------------------

GRADIENT = "gradient on each rank"
SHAPES = {"w": (1,), "b": (1,), "m": (2, 1)}
PATTERN = torch.tensor([[1.0], [2.0]])


def _losses(names, samples):
    """Return parameters of zeros, and each rank's losses: one for each of its samples.

    A sample x is to be mapped to itself, by w x + b + (m * PATTERN).sum() x. Rank 0
    alone uses b: on the others it has no gradient.
    """
    parameters = {name: torch.zeros(SHAPES[name], requires_grad=True) for name in names}
    w, b, m = (parameters.get(name, torch.zeros(SHAPES[name])) for name in SHAPES)
    losses = []
    for rank, mine in enumerate(samples):
        x = torch.tensor(mine, dtype=torch.float32)
        y = (w + (m * PATTERN).sum()) * x
        losses.append((y + b if rank == 0 else y).sub(x).square())
    return list(parameters.values()), losses


def _gradients(names, samples, rank):
    """Return parameters with the gradients of the mean over one rank's samples."""
    parameters, losses = _losses(names, samples)
    if samples[rank]:
        losses[rank].mean().backward()
    return parameters


def _weighted(names, samples, weights):
    """Return a weighted sum of all ranks' gradients, flat; a missing one is zero."""
    total = 0
    for rank, weight in enumerate(weights):
        grads = [p.grad if p.grad is not None else torch.zeros_like(p)
                 for p in _gradients(names, samples, rank)]  # fmt: skip
        total = total + weight * torch.tensor(flat(*grads))
    return total.tolist()


class Averages(OnRanks):
    """Gradients that ranks have found by themselves become those of the batch."""

    def arguments(self, samples, names):
        return f"[{', '.join(names)}], samples {samples}"

    def facts(self, answer, samples, names):
        rank = messages.rank()
        parameters = _gradients(names, samples, rank)
        given = self.given(parameters, samples[rank])
        read = lambda _: flat(*[p.grad for p in parameters])
        gradients, sent = on_all(answer, *given, read=read)
        return {GRADIENT: gradients, MESSAGES: sent}

    def expected(self, samples, names):
        parameters, losses = _losses(names, samples)
        torch.cat(losses).mean().backward()
        gradient = flat(*[p.grad for p in parameters])
        n_ranks = len(samples)
        return {GRADIENT: [gradient] * n_ranks, MESSAGES: [["all_reduce"]] * n_ranks}

    def hint(self, found, samples, names):
        n, truth = len(samples), self.expected(samples, names)[GRADIENT]
        own = [_weighted(names, samples, [r == one for r in range(n)])
               for one in range(n)]  # fmt: skip
        if equal(found[GRADIENT], truth):
            return ONE
        if any(gradient is None for gradient in found[GRADIENT]):
            return "A parameter that a rank did not use has no gradient: take zeros."
        mistakes = {
            "This is what was there before: leave the result in its place.": own,
            "That is one average too many: it is divided by n_ranks twice.":
                [[g / n for g in one] for one in truth],
            "That is the result times n_ranks: add up, and divide once.":
                [[g * n for g in one] for one in truth],
            **self.mistakes(samples, names),
        }  # fmt: skip
        return usual(found[GRADIENT], mistakes) or self.otherwise


class Average(Averages):
    name = "average"
    otherwise = "Give each tensor its own part back, in the order of flattening."

    def cases(self, random):
        draw = partial(_drawn, random)
        return [
            ([[1], [2]], "w"),
            ([draw(1), draw(1), draw(1)], "bw"),
            ([draw(2), draw(2), draw(2), draw(2)], "wbm"),
        ]

    def arguments(self, samples, names):
        return f"gradients of {', '.join(names)}; samples {samples}"

    def given(self, parameters, samples):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return ([parameter.grad for parameter in parameters],)

    def mistakes(self, samples, names):
        if set(names) != {"w", "b"}:
            return {}
        n = len(samples)
        own = [_weighted(names, samples, [r == one for r in range(n)])
               for one in range(n)]  # fmt: skip
        turned = [own[0], *[one[::-1] for one in own[1:]]]
        mixed = [sum(column) / n for column in zip(*turned)]
        text = "All ranks have to send the same things in the same order."
        return {text: [mixed] + [mixed[::-1]] * (n - 1)}


def _drawn(random, n_samples):
    return [random.randint(1, 9) for _ in range(n_samples)]


class AverageUnequal(Averages):
    name, points = "average_unequal", 2
    otherwise = "Weight each rank's gradient with its part of all samples."

    def cases(self, random):
        draw = partial(_drawn, random)
        return [
            ([[1, 2], [3]], "w"),
            ([draw(3), draw(1), draw(2)], "wbm"),
            ([draw(4), [], draw(1), draw(2)], "wb"),
        ]

    def given(self, parameters, samples):
        return parameters, len(samples)

    def facts(self, *case):
        return {GRADIENT: super().facts(*case)[GRADIENT]}  # messages are free

    def expected(self, *case):
        return {GRADIENT: super().expected(*case)[GRADIENT]}

    def mistakes(self, samples, names):
        sizes = [len(mine) for mine in samples]
        n, total = len(samples), sum(sizes)

        def of(*weights):
            return [_weighted(names, samples, weights)] * n

        return {
            "That is the mean of the ranks' means: more samples have to count more.":
                of(*[1 / n] * n),
            "That is the sum over the samples: divide by the number of all of them.":
                of(*sizes),
            "Divide by the number of all samples, not by that of the ranks.":
                of(*[size / n for size in sizes]),
            "Multiply by each rank's number of samples: it is in the mean already.":
                of(*[1 / total] * n),
        }  # fmt: skip

    def advice(self, trouble, samples, names):
        if "ZeroDivisionError" in trouble or "has returned" in trouble:
            return "A rank may have no samples, and must take part all the same."
        if "NoneType" in trouble:
            return "Where a rank has no gradient, .grad is None: count it as zero."
        return super().advice(trouble)


# ---- padded shards ---------------------------------------------------------------


class Accuracy(OnRanks):
    name, points = "accuracy", 2

    def cases(self, random):
        def flags(n):
            """About half are right, the first ones among them: those come twice."""
            return [1, 1, 0, *(random.randint(0, 1) for _ in range(n - 3))]

        return [
            self.dealt([1, 1, 0, 1, 0, 0, 1, 0, 1], 2),
            self.dealt([1, 1] + [0] * 8, 4),
            self.dealt(flags(random.randint(9, 11)), 4),
            self.dealt([1, 0, 0], 4),
        ]

    def dealt(self, flags, n_ranks):
        """Return a case: what each rank gets, and how many samples there are."""
        n_dealt = -(-len(flags) // n_ranks) * n_ranks
        order = [flags[i % len(flags)] for i in range(n_dealt)]
        return [order[rank::n_ranks] for rank in range(n_ranks)], len(flags)

    def arguments(self, shards, n_samples):
        return f"one of {shards}, {n_samples}"

    def facts(self, answer, shards, n_samples):
        correct = [flag == 1 for flag in shards[messages.rank()]]
        values, _ = on_all(answer, correct, n_samples, read=number)
        return {"accuracy on each rank": values}

    def expected(self, shards, n_samples):
        order = [flag for turn in zip(*shards) for flag in turn][:n_samples]
        return {"accuracy on each rank": [sum(order) / n_samples] * len(shards)}

    def hint(self, found, shards, n_samples):
        n_ranks, hits = len(shards), [sum(shard) for shard in shards]
        dealt = sum(map(len, shards))
        [truth, *_] = self.expected(shards, n_samples)["accuracy on each rank"]
        kept = [shard[: len(range(rank, n_samples, n_ranks))]
                for rank, shard in enumerate(shards)]  # fmt: skip
        own = [sum(shard) / len(shard) if shard else 0.0 for shard in kept]
        alone = [sum(shard) / n_samples for shard in kept]
        everywhere = {
            "Repeated samples count once: the order holds n_samples, then repeats.":
                sum(hits) / dealt,
            "The repeats are still among the hits.": sum(hits) / n_samples,
            "The repeats are still in the number that you divide by.":
                truth * n_samples / dealt,
            "That is the mean of the ranks' own: they may hold unequally many.":
                sum(own) / n_ranks,
            "That is the number of hits: divide by that of the samples.":
                truth * n_samples,
            "That is divided by n_ranks once too often.": truth / n_ranks,
            "That is a percentage; a fraction lies between 0 and 1.": 100 * truth,
        }  # fmt: skip
        mistakes = {text: [value] * n_ranks for text, value in everywhere.items()}
        ones = "Each rank tells of its own samples: add up the hits of all."
        mistakes |= {ones: own, f"{ones} ": alone}
        return usual(found["accuracy on each rank"], mistakes) or (
            "Which places of the order does this rank hold? rank, rank + n_ranks, ..."
        )

    def advice(self, trouble, shards, n_samples):
        if "ZeroDivisionError" in trouble:
            return "With fewer samples than ranks, a rank may hold repeats alone."
        if "None" in trouble:
            return "Every rank returns the accuracy of all."
        return super().advice(trouble)


# ---- batch norm ------------------------------------------------------------------

OUTPUT = "output on each rank"


class SyncBatchNorm(OnRanks):
    name, points = "sync_batch_norm", 3

    def cases(self, random):
        return [
            ([3, 2], 1, 1e-5, random.randint(0, 999)),
            ([3, 1, 2], 2, 0.25, random.randint(0, 999)),
            ([2, 0, 1, 2], 3, 1e-5, random.randint(0, 999)),
        ]

    def arguments(self, sizes, n_features, eps, number):
        return f"x, {eps}; ranks have {sizes} samples, features: {n_features}"

    def batches(self, sizes, n_features, eps, number):
        """Return each rank's x. Ranks differ in their means, so that it matters."""
        numbers, n_samples = Random(number), sum(sizes)
        values = [[numbers.randint(-4, 4) + 3 * i for _ in range(n_features)]
                  for i in range(n_samples)]  # fmt: skip
        return torch.tensor(values, dtype=torch.float32).split(sizes)

    def facts(self, answer, sizes, n_features, eps, number):
        x = self.batches(sizes, n_features, eps, number)[messages.rank()]

        def read(value):
            if not isinstance(value, torch.Tensor):
                raise unfit(value, "a tensor")
            if value.shape != x.shape:
                shapes = list(value.shape), list(x.shape)
                raise Trouble("it returned shape {}; x has {}.".format(*shapes))
            return flat(value)

        outputs, sent = on_all(answer, x, eps, read=read)
        return {OUTPUT: outputs, MESSAGES: sent}

    def expected(self, sizes, n_features, eps, number):
        x = torch.cat(self.batches(sizes, n_features, eps, number))
        y = torch.nn.functional.batch_norm(x, None, None, training=True, eps=eps)
        outputs = [flat(part) for part in y.split(sizes)]
        return {OUTPUT: outputs, MESSAGES: [["all_reduce"]] * len(sizes)}

    def hint(self, found, *case):
        sizes, _, eps, _ = case
        if 0 in sizes and any(one != one for one in chain(*found[OUTPUT])):
            return "The mean of no sample is nan: send sums and numbers, not means."
        if equal(found[OUTPUT], self.expected(*case)[OUTPUT]):
            return ONE
        batches = self.batches(*case)
        mistakes = {}
        for text, wrong in WRONG_NORMS.items():
            statistics = zip(batches, wrong(batches, eps))
            mistakes[text] = [
                flat((x - m) / (v + e).sqrt()) for x, (m, v, e) in statistics
            ]
        return usual(found[OUTPUT], mistakes) or (
            "Which three sums over all samples give the mean and the variance?"
        )

    def advice(self, trouble, sizes, *rest):
        if 0 in sizes and "has returned" in trouble:
            return "A rank without samples must take part all the same."
        return super().advice(trouble)


def _own(batches, eps):
    return [(x.mean(0), x.var(0, correction=0), eps) for x in batches]


def _of_all(batches, eps, correction=0, factor=1.0):
    x = torch.cat(batches)
    return [(x.mean(0), x.var(0, correction=correction), factor * eps)] * len(batches)


def _mean_of_means(batches, eps):
    means, variances, _ = zip(*_own(batches, eps))
    mean, variance = torch.stack(means).mean(0), torch.stack(variances).mean(0)
    return [(mean, variance, eps)] * len(batches)


def _mean_of_variances(batches, eps):
    x = torch.cat(batches)
    variance = sum(len(part) * part.var(0, correction=0) for part in batches) / len(x)
    return [(x.mean(0), variance, eps)] * len(batches)


def _mean_of_squares(batches, eps):
    x = torch.cat(batches)
    return [(x.mean(0), x.square().mean(0), eps)] * len(batches)


WRONG_NORMS = {
    "That is this rank's own mean and variance: use those of all ranks' samples.": _own,
    "Divide the variance by the number of samples, not by one less.":
        partial(_of_all, correction=1),
    "eps is missing under the root.": partial(_of_all, factor=0.0),
    "Means of the ranks' means and variances are not the batch's.": _mean_of_means,
    "That is the mean of the ranks' variances: their means differ too.":
        _mean_of_variances,
    "The variance is the mean of the squares, less the square of the mean.":
        _mean_of_squares,
}  # fmt: skip


# ---- an optimizer whose state is dealt out ---------------------------------------

WEIGHTS, KEPT = "weights on each rank", "momentum kept on each rank"


class ShardedStep(OnRanks):
    name, points = "sharded_step", 3
    n_steps = 3

    def cases(self, random):
        return [
            (2, 3, random.randint(0, 999), 0.5, 0.5),
            (3, 4, random.randint(0, 999), 0.25, 0.75),
            (4, 2, random.randint(0, 999), 0.5, 0.25),
        ]

    def ranks(self, n_ranks, *rest):
        return n_ranks

    def arguments(self, n_ranks, n_parameters, number, lr, momentum):
        return f"{n_parameters} parameters on {n_ranks} ranks, state, {lr}, {momentum}"

    def steps(self, n_parameters, number):
        """Return the parameters, and a generator that sets their gradients."""
        numbers = Random(number)

        def drawn(i):
            values = [numbers.randint(-8, 8) for _ in range(i + 1)]
            return torch.tensor(values, dtype=torch.float32)

        parameters = [drawn(i).requires_grad_() for i in range(n_parameters)]

        def go():
            for step in range(self.n_steps):
                for i, parameter in enumerate(parameters):
                    parameter.grad = drawn(i)
                yield step

        return parameters, go()

    def facts(self, answer, n_ranks, n_parameters, number, lr, momentum):
        parameters, steps = self.steps(n_parameters, number)
        state = {}

        def read(_):
            return flat(*parameters), sorted(map(whole, state))

        for _ in steps:
            found, _ = on_all(answer, parameters, state, lr, momentum, read=read)
        weights, kept = zip(*found)
        return {WEIGHTS: list(weights), KEPT: list(kept)}

    def expected(self, n_ranks, n_parameters, number, lr, momentum, wrong=None):
        parameters, steps = self.steps(n_parameters, number)
        sgd = torch.optim.SGD(
            parameters, **{"lr": lr, "momentum": momentum, **(wrong or {})}
        )
        for _ in steps:
            sgd.step()
        kept = [list(range(r, n_parameters, n_ranks)) for r in range(n_ranks)]
        return {WEIGHTS: [flat(*parameters)] * n_ranks, KEPT: kept}

    def hint(self, found, *case):
        n_ranks, n_parameters, _, lr, momentum = case
        wanted = self.expected(*case)
        if equal(found[WEIGHTS], wanted[WEIGHTS]):
            if all(len(kept) == n_parameters for kept in found[KEPT]):
                return "Every rank keeps it all: keep that of its own parameters."
            return "Rank i % n_ranks() keeps the momentum of parameter i, under i."
        if any(one != found[WEIGHTS][0] for one in found[WEIGHTS]):
            return "The ranks differ: who updates a parameter gives it to all others."

        def weights(**wrong):
            return self.expected(*case, wrong)[WEIGHTS]

        return usual(found[WEIGHTS], {
            "That is SGD without momentum.": weights(momentum=0),
            "That is Nesterov's momentum.": weights(nesterov=True),
            "The gradient enters the momentum in full, not times 1 - momentum.":
                weights(dampening=momentum),
            "Weights go down the gradient: subtract.": weights(maximize=True),
            "Nothing has been updated.": weights(lr=0.0),
            "What other ranks have updated is lost: a broadcast has a source.":
                self.of_rank_0(*case),
        }) or "Is it velocity = momentum * velocity + gradient, from 0 on?"  # fmt: skip

    def of_rank_0(self, n_ranks, n_parameters, number, lr, momentum):
        """Return the weights if those of rank 0 alone are updated."""
        ends, steps = self.steps(n_parameters, number)
        sgd = torch.optim.SGD(ends[::n_ranks], lr, momentum)
        for _ in steps:
            sgd.step()
        return [flat(*ends)] * n_ranks

    def advice(self, trouble, *case):
        if "leaf Variable" in trouble:
            return "Autograd watches parameters: change them under torch.no_grad()."
        return super().advice(trouble)


# ---- buckets, and when they are over ---------------------------------------------

BUCKETS = "parameters in each bucket"


def _filled(sizes, nbytes, fits=lambda total, nbytes: total <= nbytes):
    """Return numbers of parameters in buckets: each takes as many as fit, at least one.

    sizes: of the parameters, in the order in which they come.
    """
    groups, rest = [], list(enumerate(sizes))
    while rest:
        n = 1
        while n < len(rest) and fits(sum(size for _, size in rest[: n + 1]), nbytes):
            n += 1
        groups.append([i for i, _ in rest[:n]])
        rest = rest[n:]
    return groups


class Buckets(Exercise):
    name = "buckets"

    def cases(self, random):
        return [
            ([1, 2, 2, 1, 2], 16),
            ([3, 1, 2, 2, 1], 16),
            ([1, 1, 9, 1, 1], 12),
            ([random.randint(1, 6) for _ in range(12)], 40),
        ]

    def arguments(self, elements, nbytes):
        return f"parameters of {elements} elements (float32), {nbytes}"

    def facts(self, answer, elements, nbytes):
        parameters = [torch.nn.Parameter(torch.zeros(n)) for n in elements]
        number = {id(parameter): i for i, parameter in enumerate(parameters)}

        def read(value):
            if not isinstance(value, Iterable) or isinstance(value, (str, dict)):
                raise unfit(value, "a list of lists of parameters")
            return [read_bucket(bucket) for bucket in value]

        def read_bucket(bucket):
            if isinstance(bucket, torch.Tensor) or not isinstance(bucket, Iterable):
                raise Trouble("each bucket is a list of parameters.")
            bucket = list(bucket)
            if any(id(one) not in number for one in bucket):
                raise Trouble("a bucket holds something else than the parameters.")
            return [number[id(one)] for one in bucket]

        return {BUCKETS: ask(answer, parameters, nbytes, read=read)}

    def expected(self, elements, nbytes):
        return {BUCKETS: self.turned([4 * n for n in elements], nbytes)}

    def turned(self, sizes, nbytes, **way):
        last = len(sizes) - 1
        groups = _filled(sizes[::-1], nbytes, **way)
        return [[last - i for i in group] for group in groups]

    def hint(self, found, elements, nbytes):
        sizes = [4 * n for n in elements]
        wanted = self.expected(elements, nbytes)[BUCKETS]
        mistakes = {
            "The backward reaches the last parameter first.": _filled(sizes, nbytes),
            "nbytes are bytes: an element of float32 takes four.":
                self.turned(elements, nbytes),
            "A bucket of exactly nbytes is not too large.":
                self.turned(sizes, nbytes, fits=lambda total, n: total < n),
            "One is in no bucket: a parameter that is too large has its own.":
                [group for group in wanted if sum(sizes[i] for i in group) <= nbytes],
            "The last bucket is missing: it need not be full.": wanted[:-1],
            "Every bucket takes as many parameters as fit.":
                [[i] for i in reversed(range(len(sizes)))],
            "An empty bucket has nothing to send.": [[], *wanted],
            "That is from the first to the last: begin at the end.":
                [group[::-1] for group in wanted[::-1]],
        }  # fmt: skip
        said = usual(found[BUCKETS], mistakes)
        shared = [bucket for bucket in found[BUCKETS] if len(bucket) > 1]
        if not said and any(sum(sizes[i] for i in one) > nbytes for one in shared):
            return "A bucket may not become larger than nbytes: look before you add."
        return said or "Go from the last to the first, once."


def _step(backward, nbytes, bucket, n_ranks, link, seconds=ring_seconds, least=1):
    """Return (end of the backward, [when a bucket is ready], [how long it takes]).

    least: bytes that a layer must have to be in a bucket.
    """
    layers = [i for i in reversed(range(len(nbytes))) if nbytes[i] >= least]
    ready, times = [], []
    for group in _filled([nbytes[i] for i in layers], bucket):
        group = [layers[i] for i in group]
        ready.append(sum(backward[group[-1] :]))
        size = sum(nbytes[i] for i in group)
        times.append(seconds(link, "all_reduce", n_ranks, size))
    return sum(backward), ready, times


def _over(end, ready, times):
    """Return when the backward and all messages are over: each in its turn."""
    after = [begin + sum(times[i:]) for i, begin in enumerate(ready)]
    return max(end, *after)


WRONG_TIMES = {
    "A bucket leaves as soon as it is ready, not after the backward.":
        lambda end, ready, times: end + sum(times),
    "One bucket is on its way at a time: the others wait for it.":
        lambda end, ready, times: max(end, *(r + t for r, t in zip(ready, times))),
    "A step is not over before its backward.":
        lambda end, ready, times: _over(0.0, ready, times),
    "That is the time of the messages alone.":
        lambda end, ready, times: sum(times),
    "That is the time of the backward alone.":
        lambda end, ready, times: end,
    "Earlier buckets may still be on their way when the last one is ready.":
        lambda end, ready, times: max(end, ready[-1] + times[-1]),
}  # fmt: skip


def _once(link, name, n_ranks, nbytes):
    return link.seconds(2 * (n_ranks - 1) / n_ranks * nbytes)


def _whole(link, name, n_ranks, nbytes):
    return link.seconds(nbytes)


def _no_latency(link, name, n_ranks, nbytes):
    return ring_seconds(Link(0.0, link.bandwidth), name, n_ranks, nbytes)


WRONG_SECONDS = {
    "Each of the 2 (N - 1) passes around the ring pays the latency.": _once,
    "An all-reduce goes around the ring: 2 (N - 1) passes, each with 1/N.": _whole,
    "The latency is missing.": _no_latency,
}


class StepTime(Exercise):
    name, points = "step_time", 2

    def cases(self, random):
        def layers(n):
            """Backward times and gradient bytes; a first layer without weights."""
            times = [random.randint(1, 9) for _ in range(n)]
            return times, [0, *(8 * random.randint(1, 9) for _ in range(n - 1))]

        return [
            ([1, 4, 1, 4, 5], [8, 0, 8, 40, 24], 48, 3, Link(0.25, 8.0)),
            ([2, 3, 1, 4], [8, 0, 160, 0], 40, 2, Link(0.5, 32.0)),
            ([5, 2, 1], [0, 8, 16], 16, 2, Link(0.5, 32.0)),
            (*layers(12), 100, 3, Link(0.5, 16.0)),
            ([3, 1, 2], [40, 8, 24], 32, 1, Link(1.0, 8.0)),
        ]

    def facts(self, answer, backward, nbytes, bucket, n_ranks, link):
        given = list(backward), list(nbytes), bucket, n_ranks, link
        return {"end": ask(answer, *given, read=number)}

    def expected(self, backward, nbytes, bucket, n_ranks, link):
        _, ready, times = _step(backward, nbytes, bucket, n_ranks, link)
        ops = [(Op("B", i), time) for i, time in enumerate(reversed(backward))]
        transfers = [("all_reduce", *each, 0) for each in zip(ready, times)]
        return {"end": replicas(n_ranks, ops, transfers).makespan}

    def hint(self, found, backward, nbytes, bucket, n_ranks, link):
        def end(backward, nbytes, bucket, *more):
            return _over(*_step(backward, nbytes, bucket, n_ranks, link, *more))

        plan = backward, nbytes, bucket
        step = _step(*plan, n_ranks, link)
        return usual(found["end"], {
            **{text: wrong(*step) for text, wrong in WRONG_TIMES.items()},
            **{text: end(*plan, wrong) for text, wrong in WRONG_SECONDS.items()},
            "The backward begins at the last layer.":
                end(backward[::-1], nbytes[::-1], bucket),
            "Layers share a bucket while they fit.": end(backward, nbytes, 1),
            "That is one message for all: a bucket holds `bucket` bytes at most.":
                end(backward, nbytes, sum(nbytes)),
            "A layer without weights is in no bucket, and delays none.":
                end(*plan, ring_seconds, 0),
        }) or "When is each bucket ready, and when is the link free?"  # fmt: skip


EXERCISES = {
    exercise.name: exercise
    for exercise in (
        Indices(),
        Average(),
        Buckets(),
        AverageUnequal(),
        Accuracy(),
        SyncBatchNorm(),
        ShardedStep(),
        StepTime(),
    )
}
