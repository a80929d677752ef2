"""What a right answer to each exercise of the GPipe notebook is, without the answers.

    check("gpipe", gpipe)             prints the verdict on an answer
    timeline_of(one_f_one_b, 4, 8)    the timeline of an answer's schedule, for a figure

Schedules are simulated; those of four stages also train a small model on four ranks.
"""

import copy
import operator
from collections import Counter
from collections.abc import Iterable
from functools import partial
from statistics import mean, median

import torch
from torch import nn

from labs import gpipe as lab
from labs.checks import (
    Exercise,
    Trouble,
    ask,
    equal,
    flat,
    judge,
    look,
    number,
    show,
    unfit,
    usual,
    whole,
)
from labs.kit import clock, messages
from labs.kit.simulate import ScheduleDeadlock, simulate
from labs.kit.split import chunk_sizes
from labs.kit.timeline import Link, Op, Timeline

COST = {"F": 1, "B": 2}
PERCENTAGE = "That is a percentage; a fraction lies between 0 and 1."
EQUAL_STAGES = "That is (d-1)/(m+d-1), which holds for equal stages."


def check(name, answer, seed=0):
    """Print the verdict on an answer to the exercise `name`."""
    print(judge(EXERCISES[name], answer, seed))


def timeline_of(answer, *sizes):
    """Return the timeline of the schedule that an answer gives, with unit costs.

    sizes: what the answer takes. If it gives no schedule, say so and return None.
    """
    [found] = look(_simulated, answer, [sizes])
    if "trouble" in found:
        print(f"No figure yet: {found['trouble'].rstrip('.')}.")
    return found.get("timeline")


# ---- schedules: what an answer returns -------------------------------------------


def _read_schedule(n_stages, n_microbatches, value):
    """Return a schedule as lists of Op that hold each stage's operations once."""
    if not isinstance(value, Iterable) or isinstance(value, (str, dict, torch.Tensor)):
        raise unfit(value, "a list of Op per stage")
    rows = list(value)
    if rows and all(isinstance(row, Op) for row in rows):
        raise Trouble("it returned one list of Op; each stage needs a list of its own.")
    if len(rows) != n_stages:
        raise Trouble(f"it returned {len(rows)} lists for {n_stages} stages.")
    return [_read_order(stage, row, n_microbatches) for stage, row in enumerate(rows)]


def _read_order(stage, row, n_microbatches):
    if not isinstance(row, Iterable):
        raise Trouble(f"stage {stage} has {type(row).__name__}, not a list of Op.")
    order = [_read_op(stage, op) for op in row]
    wanted = [Op(kind, i) for kind in COST for i in range(n_microbatches)]
    for op in order:
        if op not in wanted:
            last = n_microbatches - 1
            raise Trouble(f"stage {stage} lists {op}; microbatches are 0 to {last}.")
    count = Counter(order)
    for op in wanted:
        if count[op] != 1:
            times = f"{count[op]} times" if count[op] else "never"
            raise Trouble(f"stage {stage} does {op} {times}.")
    return order


def _read_op(stage, value):
    try:
        kind, microbatch = value
        op = Op(str(kind), operator.index(microbatch))
    except (TypeError, ValueError):
        op = None
    if op is None or op.kind not in COST:
        raise Trouble(f"stage {stage} lists {value!r}; write Op('F', 0) or Op('B', 0).")
    return op


# ---- schedules: what they do -----------------------------------------------------

ALIVE, MAKESPAN = "microbatches alive on each stage", "makespan"


def _simulated(answer, n_stages, n_microbatches, *more):
    read = partial(_read_schedule, n_stages, n_microbatches)
    order = ask(answer, n_stages, n_microbatches, *more, read=read)
    phrase = "virtual time, unit costs (F = 1, B = 2)"
    try:
        return {"timeline": simulate(order, COST, clock=phrase)}
    except ScheduleDeadlock as error:
        raise Trouble(f"the schedule cannot finish: {error}.") from None


def _train(order, n_microbatches):
    """Train one step on the ranks; return what was alive, the makespan, the gap.

    The gap is the largest difference of a gradient to that of a single process.
    """
    rank, n_ranks = messages.rank(), messages.n_ranks()
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(n_ranks)]
    ).to(messages.device, torch.float64)
    x = torch.randn(2 * n_microbatches + 1, 3).to(messages.device, torch.float64)
    stage = lab.Stage(copy.deepcopy(model[rank]))
    if rank == n_ranks - 1:
        stage.loss = lambda y, i: y.square().sum() / len(x)
    clk = clock.Virtual(clock.Unit())
    with clock.recording(clk, rank):
        clock.watch(stage, forward="F", backward="B")
        parts = [part.clone() for part in x.tensor_split(n_microbatches)]
        lab.run(order[rank], stage, parts)
    (model(x).square().sum() / len(x)).backward()
    pairs = zip(stage.module.parameters(), model[rank].parameters())
    gap = max((ours.grad - truth.grad).abs().max() for ours, truth in pairs)
    done = Timeline(clk.spans, n_ranks)
    mine = torch.tensor([done.peak_live(rank), done.makespan, gap])
    all_ranks = messages.all_gather(mine.to(messages.device))
    alive, ends, gaps = torch.stack(all_ranks).T.tolist()
    return [int(n) for n in alive], max(ends), max(gaps)


class Schedule(Exercise):
    """Schedules are judged by what they do: any order that does the same is right."""

    n_ranks = 4

    def facts(self, answer, n_stages, n_microbatches, *more):
        planned = _simulated(answer, n_stages, n_microbatches, *more)["timeline"]
        stages = range(n_stages)
        alive = [planned.peak_live(stage) for stage in stages]
        makespan, gap = planned.makespan, 0.0
        if n_stages == self.n_ranks:
            order = [planned.order(stage) for stage in stages]
            alive, makespan, gap = _train(order, n_microbatches)
        return {ALIVE: alive, MAKESPAN: makespan, "gradients off by": gap}

    def expected(self, *case):
        alive, makespan = self.goal(*case)
        return {ALIVE: alive, MAKESPAN: makespan, "gradients off by": 0.0}


class GPipe(Schedule):
    name = "gpipe"

    def cases(self, random):
        return [
            (2, random.randint(4, 6)),
            (1, random.randint(2, 4)),
            (random.randint(5, 6), random.randint(1, 3)),
            (4, random.randint(5, 7)),
        ]

    def facts(self, answer, n_stages, n_microbatches):
        rows = _simulated(answer, n_stages, n_microbatches)["timeline"].table()
        orders = {f"order of stage {row['rank']}": row["order"] for row in rows}
        return orders | super().facts(answer, n_stages, n_microbatches)

    def expected(self, n_stages, n_microbatches):
        orders = {
            f"order of stage {stage}": " ".join(map(str, order))
            for stage, order in enumerate(lab.gpipe(n_stages, n_microbatches))
        }
        return orders | super().expected(n_stages, n_microbatches)

    def goal(self, n_stages, n_microbatches):
        return [n_microbatches] * n_stages, 3 * (n_microbatches + n_stages - 1)

    def hint(self, found, n_stages, n_microbatches):
        if found["order of stage 0"].startswith("F0 B0"):
            return "All forwards come before the first backward."
        return "Forwards run from the oldest on, backwards from the newest back."

    def advice(self, trouble, n_stages, n_microbatches):
        if "cannot finish" in trouble:
            return "A forward comes before its backward, and all stages use one order."
        return ""


class OneFOneB(Schedule):
    name, points = "one_f_one_b", 3

    def cases(self, random):
        return [
            (3, random.randint(5, 8)),
            (1, random.randint(2, 4)),
            (random.randint(5, 6), random.randint(2, 3)),
            (4, random.randint(5, 9)),
        ]

    def goal(self, n_stages, n_microbatches):
        alive = [min(n_stages - stage, n_microbatches) for stage in range(n_stages)]
        return alive, simulate(lab.gpipe(n_stages, n_microbatches), COST).makespan

    def hint(self, found, n_stages, n_microbatches):
        alive, (allowed, _) = found[ALIVE], self.goal(n_stages, n_microbatches)
        if alive == allowed:
            return "The memory is right, but a stage waits where it could work."
        if alive == [n_microbatches] * n_stages:
            return "That is GPipe's memory: go back sooner, one B for each further F."
        if alive == [1] * n_stages:
            return "One microbatch at a time: while it is elsewhere, begin the next."
        if len(set(alive)) == 1:
            return "Every stage runs equally far ahead, and later stages need less."
        if all(a >= b for a, b in zip(alive, allowed)):
            return "One forward too many comes before the first backward."
        return "A stage runs ahead too little: it could begin another forward."

    def advice(self, trouble, n_stages, n_microbatches):
        if n_microbatches < n_stages:
            return "There may be fewer microbatches than stages."
        return ""


class Flushes(Schedule):
    name, points = "flushes", 3

    def cases(self, random):
        k = random.randint(2, 3)
        return [
            (3, 2 * k, k),
            (2, random.randint(2, 3) * k + 1, k),
            (random.randint(2, 3), random.randint(2, 4), random.randint(5, 9)),
            (1, random.randint(2, 4), 1),
            (4, 2 * k + random.randint(1, k - 1), k),
        ]

    def goal(self, n_stages, n_microbatches, k):
        n_flushes = len(range(0, n_microbatches, k))
        makespan = 3 * (n_microbatches + n_flushes * (n_stages - 1))
        return [min(k, n_microbatches)] * n_stages, makespan

    def hint(self, found, n_stages, n_microbatches, k):
        _, makespan = self.goal(n_stages, n_microbatches, k)
        if max(found[ALIVE]) > k:
            return f"At most {k} may be alive: flush before the next one begins."
        if found[MAKESPAN] < makespan:
            return "That is no flush: all of it must be back before the next begins."
        return "Fill each flush with k microbatches; only the last may hold fewer."

    def advice(self, trouble, n_stages, n_microbatches, k):
        if n_microbatches % k:
            return "k need not divide n_microbatches: the last flush may hold fewer."
        return ""


# ---- the stage -------------------------------------------------------------------

OF_X, OF_WEIGHTS = "gradient of x", "gradients of the weights"


def _stage_at_work(kind, number):
    """Yield (weights, x, y, gradient) of two microbatches on one small stage."""
    torch.manual_seed(number)
    of_tokens = kind.startswith("tokens")
    module = nn.Embedding(3, 2) if of_tokens else nn.Linear(2, 2)
    for token in (0, 2):
        x = torch.tensor([token]) if of_tokens else torch.randn(1, 2)
        x = x.requires_grad_(not of_tokens)
        y = module(x).tanh()
        gradient = torch.randn(1, 2)
        if kind == "x, loss":
            y, gradient = y.square().sum(), None
        yield list(module.parameters()), x, y, gradient


class Backward(Exercise):
    name = "backward"

    def cases(self, random):
        kinds = "x, y, gradient", "x, loss", "tokens, y, gradient"
        return [(kind, random.randint(0, 10**6)) for kind in kinds]

    def arguments(self, kind, number):
        return kind

    def facts(self, answer, kind, number):
        def read(value):
            if value is not None and not isinstance(value, torch.Tensor):
                raise unfit(value, "a tensor")
            return value

        for work in _stage_at_work(kind, number):
            weights, *arguments = work if work[-1] is not None else work[:-1]
            returned = ask(answer, *arguments, read=read)
        return {OF_X: flat(returned), OF_WEIGHTS: flat(*(w.grad for w in weights))}

    def expected(self, kind, number, replaced=False, ignored=False):
        """The truth; or, of two common mistakes, what comes of them."""
        total = 0
        for weights, x, y, gradient in _stage_at_work(kind, number):
            if ignored and gradient is not None:
                gradient = torch.ones_like(gradient)
            inputs = [x, *weights] if x.requires_grad else weights
            grads = torch.autograd.grad(y, inputs, gradient)
            new = torch.tensor(flat(*grads[-len(weights) :]))
            total = new if replaced else total + new
        of_x = grads[0] if x.requires_grad else None
        return {OF_X: flat(of_x), OF_WEIGHTS: flat(total)}

    def hint(self, found, kind, number):
        of_weights = found[OF_WEIGHTS]
        if of_weights is None:
            return "Autograd has to go from y back to the weights too."
        if equal(of_weights, self.expected(kind, number)[OF_WEIGHTS]):
            return "Autograd has put the gradient of x into x.grad: return that."
        return usual(of_weights, {
            "The first microbatch's are lost: gradients add up in .grad.":
                self.expected(kind, number, replaced=True)[OF_WEIGHTS],
            "That comes of a gradient of ones: use the one that was sent.":
                self.expected(kind, number, ignored=True)[OF_WEIGHTS],
        }) or "Give autograd the gradient as it came, once; scale nothing."  # fmt: skip

    def advice(self, trouble, kind, number):
        if "only for scalar" in trouble:
            return "Where y is no loss, autograd needs the gradient that was sent."
        if kind.startswith("tokens"):
            return "Tokens have no gradient: return None."
        return ""


# ---- timelines to read -----------------------------------------------------------


def _timeline(costs, n_microbatches):
    """A GPipe run: stage s takes costs[s] for a forward and twice that to go back."""
    order = lab.gpipe(len(costs), n_microbatches)
    link = Link(latency=0.5)
    return simulate(order, lambda stage, op: costs[stage] * COST[op.kind], link)


def _unequal(random, n_stages):
    """Costs: one stage is slow, another one a little, the others are equal."""
    costs = [1.0] * (n_stages - 2) + [1.25, random.choice([1.75, 2.0, 2.25, 2.5])]
    random.shuffle(costs)
    return costs


class IdleFraction(Exercise):
    name = "idle_fraction"

    def cases(self, random):
        return [
            (_unequal(random, n), random.randint(3, 5), random.randrange(n))
            for n in (3, 4, 5)
        ]

    def arguments(self, costs, n_microbatches, stage):
        return f"timeline with forwards of {show(costs)}, {stage}"

    def facts(self, answer, costs, n_microbatches, stage):
        timeline = _timeline(costs, n_microbatches)
        return {"idle": ask(answer, timeline, stage, read=number)}

    def expected(self, costs, n_microbatches, stage):
        return {"idle": _timeline(costs, n_microbatches).idle(stage)}

    def hint(self, found, costs, n_microbatches, stage):
        timeline = _timeline(costs, n_microbatches)
        busy, ops = timeline.compute(stage), timeline.ops(stage)
        waits = sum(span.end - span.start for span in timeline.lane(stage, "wait"))
        return usual(found["idle"], {
            "That is the busy part.": busy / timeline.makespan,
            PERCENTAGE: 100 * timeline.idle(stage),
            "That is the bubble, of all stages; this stage is asked for.":
                timeline.bubble(),
            "Wait spans are not all: transfers, the begin and the end are idle too.":
                waits / timeline.makespan,
            "Time ends with the makespan, when the last of all stages is done.":
                1 - busy / ops[-1].end,
            "Time begins at 0, not with this stage's first operation.":
                1 - busy / (timeline.makespan - ops[0].start),
            EQUAL_STAGES: lab.bubble_fraction(len(costs), n_microbatches),
        })  # fmt: skip


class SlowStage(Exercise):
    name, points = "slow_stage", 2

    def cases(self, random):
        return [(_unequal(random, n), random.randint(3, 5)) for n in (4, 3, 6)]

    def arguments(self, costs, n_microbatches):
        return f"timeline with forwards of {show(costs)}"

    def facts(self, answer, costs, n_microbatches):
        def read(value):
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise unfit(value, "a pair (stage, factor)")
            return {"stage": whole(value[0]), "factor": number(value[1])}

        return ask(answer, _timeline(costs, n_microbatches), read=read)

    def expected(self, costs, n_microbatches):
        slow = costs.index(max(costs))
        others = costs[:slow] + costs[slow + 1 :]
        return {"stage": slow, "factor": costs[slow] / median(others)}

    def hint(self, found, costs, n_microbatches):
        slow, factor = self.expected(costs, n_microbatches).values()
        timeline = _timeline(costs, n_microbatches)
        idle = [timeline.idle(stage) for stage in range(len(costs))]
        if found["stage"] == slow + 1:
            return "Stages are numbered from 0."
        if found["stage"] == idle.index(max(idle)):
            return "The stage that waits most is not slow: it waits for the slow one."
        if found["stage"] != slow:
            return "Compare how long the operations of each stage take."
        others = costs[:slow] + costs[slow + 1 :]
        return usual(found["factor"], {
            "That is the inverse.": 1 / factor,
            "That is how much slower; how many times is asked for.": factor - 1,
            "Those of the others are asked for: leave out the slow stage itself.":
                costs[slow] / median(costs),
            "That compares with the mean of all stages.": costs[slow] / mean(costs),
            "That compares with the mean of the others.": costs[slow] / mean(others),
            "That compares with the fastest stage.": costs[slow] / min(others),
        }) or "Compare its operations with those of the other stages."  # fmt: skip


# ---- plan a run ------------------------------------------------------------------


class BubbleOf(Exercise):
    name, points = "bubble_of", 2

    def cases(self, random):
        def unequal(n_stages):
            """The stage with the slowest forward does not have the slowest backward."""
            forward = [n / 2 for n in random.sample(range(2, 10), n_stages)]
            return forward, [2 * time for time in forward[1:] + forward[:1]]

        return [
            ([1, 1, 1], [2, 2, 2], random.randint(3, 5)),
            (*unequal(random.randint(3, 5)), random.randint(4, 8)),
            (*unequal(2), 1),
            ([1.5], [3.5], random.randint(2, 4)),
            (*unequal(6), random.randint(9, 12)),
        ]

    def facts(self, answer, forward, backward, n_microbatches):
        given = list(forward), list(backward), n_microbatches
        return {"bubble": ask(answer, *given, read=number)}

    def expected(self, forward, backward, n_microbatches):
        times = {"F": forward, "B": backward}
        order = lab.gpipe(len(forward), n_microbatches)
        run = simulate(order, lambda stage, op: times[op.kind][stage])
        return {"bubble": run.bubble()}

    def hint(self, found, forward, backward, n_microbatches):
        d, m, once = len(forward), n_microbatches, sum(forward) + sum(backward)
        right = self.expected(forward, backward, m)["bubble"]
        both = max(f + b for f, b in zip(forward, backward))
        slowest = max(forward) + max(backward)

        def bubble(makespan):
            return 1 - m * once / (d * makespan)

        return usual(found["bubble"], {
            EQUAL_STAGES: lab.bubble_fraction(d, m),
            PERCENTAGE: 100 * right,
            "That is the busy part.": 1 - right,
            "That is idle over busy time; the bubble is a part of all time.":
                right / (1 - right),
            "That is (d-1)/m, idle over busy time of equal stages.": (d - 1) / m,
            "The slowest forward and the slowest backward may be on different stages.":
                bubble(once + (m - 1) * both),
            "The first microbatch takes each stage's own time, not the slowest's.":
                bubble((m + d - 1) * slowest),
            "The slowest stage is in the first microbatch's way already: m - 1 follow.":
                bubble(once + m * slowest),
        }) or "Find the makespan first: which stage sets the pace?"  # fmt: skip


def _peak(sizes, inside, boundary):
    """Walk a stage's GPipe order with recompute and count what it keeps, in bytes."""
    kept = peak = 0
    for kind, i in lab.gpipe(1, len(sizes))[0]:
        if kind == "F":
            kept += boundary * sizes[i]
        else:
            peak = max(peak, kept + (inside - boundary) * sizes[i])
            kept -= boundary * sizes[i]
    return peak


def _search(n_stages, batch, inside, boundary, budget, limit=0.1,
            peak=_peak, fits=operator.le, under=operator.lt):  # fmt: skip
    """Try all numbers of microbatches; the last three can be replaced by a mistake."""
    good = [
        n
        for n in range(1, batch + 1)
        if under(lab.bubble_fraction(n_stages, n), limit)
        and fits(peak(chunk_sizes(batch, n), inside, boundary), budget)
    ]
    return min(good, default=None)


WRONG_SEARCHES = {
    "A bubble of exactly the limit is not under it.": {"under": operator.le},
    "The bubble has a limit too.": {"under": lambda bubble, limit: True},
    "The activations have a budget too.": {"fits": lambda peak, budget: True},
    "A peak of exactly the budget is within it.": {"fits": operator.lt},
    "With recompute, the microbatches that wait keep their inputs alone.":
        {"peak": lambda sizes, inside, boundary: inside * sum(sizes)},
    "The input of the microbatch under way is part of `inside`: count it once.":
        {"peak": lambda sizes, i, b: b * sum(sizes) + i * sizes[0]},
    "Microbatches hold whole samples, so some are larger than the mean.":
        {"peak": lambda sizes, i, b: b * sum(sizes) + (i - b) * mean(sizes)},
    "The last microbatch is the smallest: the peak may come at an earlier one.":
        {"peak": lambda sizes, i, b: b * sum(sizes) + (i - b) * sizes[-1]},
}  # fmt: skip


def _tight_plan(random):
    """A plan that the budget decides, and for which no two ways to count agree."""
    ways = [way for way in WRONG_SEARCHES.values() if "under" not in way]
    while True:
        batch, inside = random.randint(60, 99), random.randint(300, 600)
        boundary, wanted = random.randint(4, 30), random.randint(5, 25)
        budget = _peak(chunk_sizes(batch, wanted), inside, boundary)
        plan = 2, batch, inside, boundary, budget, 0.2
        found = {_search(*plan), *(_search(*plan, **way) for way in ways)}
        if len(found) == 1 + len(ways):
            return plan


class FewestMicrobatches(Exercise):
    name, points = "fewest_microbatches", 2

    def cases(self, random):
        enough = 10**9
        return [
            (random.randint(2, 5), 64, 500, 10, enough),
            _tight_plan(random),
            (1, random.randint(2, 9), 500, 10, enough),
            (2, 12, 500, 10, enough, 0.05),
            (2, 30, 500, 10, 300),
            _tight_plan(random),
        ]

    def facts(self, answer, *plan):
        def read(value):
            return None if value is None else whole(value)

        return {"n_microbatches": ask(answer, *plan, read=read)}

    def expected(self, *plan):
        return {"n_microbatches": _search(*plan)}

    def hint(self, found, *plan):
        n, batch = found["n_microbatches"], plan[1]
        if n is not None and not 1 <= n <= batch:
            return f"A batch of {batch} makes 1 to {batch} microbatches; else say None."
        ways = {text: _search(*plan, **way) for text, way in WRONG_SEARCHES.items()}
        return usual(n, ways) or "Try 1, 2, 3, ...: the first that keeps both limits."


EXERCISES = {
    exercise.name: exercise
    for exercise in (
        IdleFraction(),
        GPipe(),
        Backward(),
        OneFOneB(),
        Flushes(),
        SlowStage(),
        BubbleOf(),
        FewestMicrobatches(),
    )
}
