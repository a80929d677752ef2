"""Wrong answers to the GPipe exercises, as students give them, and what each hears."""

import os
import statistics
import sys
import time

import torch
from wrong.notes import notes

from labs import gpipe as lab
from labs.kit.simulate import simulate
from labs.kit.split import chunk_sizes
from labs.kit.timeline import Op

WRONG, told = notes()


# ---- any exercise ----------------------------------------------------------------


@told("idle_fraction", "returned None, not a number")
@told("gpipe", "returned None, not a list of Op per stage")
@told("backward", "Autograd has to go from y back")
@told("one_f_one_b", "returned None, not a list of Op per stage")
@told("flushes", "returned None, not a list of Op per stage")
@told("slow_stage", "returned None, not a pair")
@told("bubble_of", "returned None, not a number")
@told("fewest_microbatches", "Try 1, 2, 3")
def nothing(*arguments):
    pass


@told("idle_fraction", "returned str, not a number")
@told("gpipe", "returned str, not a list")
@told("backward", "returned str, not a tensor")
@told("flushes", "returned str, not a list")
@told("slow_stage", "returned str, not a pair")
@told("fewest_microbatches", "returned str, not a whole number")
def text(*arguments):
    return "0.5"


@told("bubble_of", "Does a loop never end?")
@told("one_f_one_b", "Does a loop never end?")
def endless(*arguments):
    while True:
        pass


@told("fewest_microbatches", "Does a loop never end?")
def endless_and_deaf(*arguments):
    while True:
        try:
            time.sleep(0)
        except:  # noqa: E722
            pass


@told("slow_stage", "Does a loop never end?")
def asleep(*arguments):
    time.sleep(1000)


@told("flushes", "more than 1 GB of memory")
def hungry(*arguments):
    return bytearray(1 << 34)


@told("idle_fraction", "os._exit(0)")
def gone(*arguments):
    os._exit(0)


@told("bubble_of", "called sys.exit(1)")
def leaving(*arguments):
    sys.exit(1)


@told("one_f_one_b", "raised ZeroDivisionError: division by zero (")
def broken(*arguments):
    return 1 / 0


@told("flushes", "raised TypeError")
def too_few_parameters():
    return []


@told("bubble_of", "returned nan, not a finite number")
def not_a_number(*arguments):
    return float("nan")


@told("slow_stage", "returned generator, not a pair")
@told("bubble_of", "returned generator, not a number")
def lazy(*arguments):
    yield 1


@told("bubble_of", "not a number")
def vector(*arguments):
    return torch.ones(2)


# ---- idle_fraction ---------------------------------------------------------------


@told("idle_fraction", "busy part")
def busy(timeline, stage):
    return timeline.compute(stage) / timeline.makespan


@told("idle_fraction", "percentage")
def in_percent(timeline, stage):
    return 100 * timeline.idle(stage)


@told("idle_fraction", "this stage is asked for")
def of_all_stages(timeline, stage):
    return timeline.bubble()


@told("idle_fraction", "Wait spans are not all")
def waits_only(timeline, stage):
    waits = timeline.lane(stage, "wait")
    return sum(span.end - span.start for span in waits) / timeline.makespan


@told("idle_fraction", "when the last of all stages is done")
def until_its_own_end(timeline, stage):
    return 1 - timeline.compute(stage) / timeline.ops(stage)[-1].end


@told("idle_fraction", "equal stages")
def by_formula(timeline, stage):
    d, m = timeline.n_ranks, len(timeline.ops(stage)) // 2
    return (d - 1) / (m + d - 1)


@told("idle_fraction", "expected")
def always_stage_zero(timeline, stage):
    return timeline.idle(0)


# ---- gpipe -----------------------------------------------------------------------


@told("gpipe", "from the newest back")
def oldest_backward_first(n_stages, n_microbatches):
    numbers = range(n_microbatches)
    return [[Op(kind, i) for kind in "FB" for i in numbers]] * n_stages


@told("gpipe", "All forwards come before the first backward")
def one_at_a_time(n_stages, n_microbatches):
    return [[Op(k, i) for i in range(n_microbatches) for k in "FB"]] * n_stages


@told("gpipe", "; microbatches are 0 to")
def numbered_from_one(n_stages, n_microbatches):
    numbers = range(1, n_microbatches + 1)
    forwards = [Op("F", i) for i in numbers]
    return [forwards + [Op("B", i) for i in reversed(numbers)]] * n_stages


@told("gpipe", "does B0 never")
def forgets_the_last_backward(n_stages, n_microbatches):
    return [order[:-1] for order in lab.gpipe(n_stages, n_microbatches)]


@told("gpipe", "it returned 4 lists for 2 stages")
def four_stages_always(n_stages, n_microbatches):
    return lab.gpipe(4, n_microbatches)


@told("gpipe", "a list of its own")
def one_list(n_stages, n_microbatches):
    return lab.gpipe(1, n_microbatches)[0]


@told("gpipe", "write Op('F', 0)")
def words_for_operations(n_stages, n_microbatches):
    return [list(map(str, order)) for order in lab.gpipe(n_stages, n_microbatches)]


@told("gpipe", "cannot finish: stage 0 is at B0 and has not yet done its own F0")
def stage_zero_begins_backward(n_stages, n_microbatches):
    forwards, *rest = lab.gpipe(n_stages, n_microbatches)
    return [forwards[::-1], *rest]


# ---- backward --------------------------------------------------------------------


@told("backward", "into x.grad: return that")
def returns_nothing(x, y, gradient=None):
    y.backward(gradient)


@told("backward", "gradient of ones: use the one that was sent")
def of_the_sum(x, y, gradient=None):
    y.sum().backward()
    return x.grad


@told("backward", "needs the gradient that was sent")
def without_gradient(x, y, gradient=None):
    y.backward()
    return x.grad


@told("backward", "go from y back to the weights too")
def input_alone(x, y, gradient=None):
    return torch.autograd.grad(y, x, gradient)[0]


@told("backward", "Tokens have no gradient")
def tokens_too(x, y, gradient=None):
    y.backward(gradient)
    return x.grad.clone()


@told("backward", "scale nothing")
def scaled(x, y, gradient=None):
    y.backward(gradient / 2 if gradient is not None else None)
    return x.grad


@told("backward", "scale nothing")
def twice(x, y, gradient=None):
    y.backward(gradient, retain_graph=True)
    y.backward(gradient)
    return x.grad


@told("backward", "gradients add up in .grad")
def replaces(x, y, gradient=None):
    weights, todo = [], [y.grad_fn]
    while todo:
        node = todo.pop()
        todo += [parent for parent, _ in node.next_functions if parent]
        if hasattr(node, "variable") and node.variable is not x:
            weights.append(node.variable)
    for weight in weights:
        weight.grad = None
    y.backward(gradient)
    return x.grad


# ---- one_f_one_b -----------------------------------------------------------------


def ahead_by(n_stages, n_microbatches, ahead_of):
    """A 1F1B whose stage s runs ahead_of(s) forwards ahead."""
    schedule = []
    for stage in range(n_stages):
        ahead = min(ahead_of(stage), n_microbatches)
        order = [Op("F", i) for i in range(ahead)]
        for i in range(n_microbatches):
            forward = [Op("F", ahead + i)] if ahead + i < n_microbatches else []
            order += [*forward, Op("B", i)]
        schedule.append(order)
    return schedule


@told("one_f_one_b", "That is GPipe's memory")
def gpipe_again(n_stages, n_microbatches):
    return lab.gpipe(n_stages, n_microbatches)


@told("one_f_one_b", "One forward too many")
def one_too_many(n_stages, n_microbatches):
    return ahead_by(n_stages, n_microbatches, lambda stage: n_stages - stage)


@told("one_f_one_b", "runs ahead too little")
def one_too_few(n_stages, n_microbatches):
    ahead_of = lambda stage: max(0, n_stages - stage - 2)
    return ahead_by(n_stages, n_microbatches, ahead_of)


@told("one_f_one_b", "later stages need less")
def all_as_stage_zero(n_stages, n_microbatches):
    return ahead_by(n_stages, n_microbatches, lambda stage: n_stages - 1)


@told("one_f_one_b", "One microbatch at a time")
def no_pipeline(n_stages, n_microbatches):
    return one_at_a_time(n_stages, n_microbatches)


@told("one_f_one_b", "cannot finish")
def mirrored(n_stages, n_microbatches):
    return ahead_by(n_stages, n_microbatches, lambda stage: stage)


@told("one_f_one_b", "fewer microbatches than stages")
def enough_microbatches(n_stages, n_microbatches):
    schedule = []
    for stage in range(n_stages):
        ahead = n_stages - stage - 1
        order = [Op("F", i) for i in range(ahead)]
        for i in range(ahead, n_microbatches):
            order += [Op("F", i), Op("B", i - ahead)]
        order += [Op("B", i) for i in range(n_microbatches - ahead, n_microbatches)]
        schedule.append(order)
    return schedule


@told("one_f_one_b", "lists F")
def hard_coded(n_stages, n_microbatches):
    return ahead_by(n_stages, 8, lambda stage: n_stages - stage - 1)


@told("one_f_one_b", "a stage waits where it could work")
def backward_before_forward(n_stages, n_microbatches):
    """Stage 0 lets B0 pass first, and so runs ahead by one less than it may."""
    schedule = ahead_by(n_stages, n_microbatches, lambda stage: n_stages - stage - 1)
    order = schedule[0]
    i = order.index(Op("F", n_microbatches - 1))
    order[i : i + 2] = order[i : i + 2][::-1]
    return schedule


# ---- flushes ---------------------------------------------------------------------


def groups(sizes):
    """One stage's flushes of the given sizes."""
    order, first = [], 0
    for size in sizes:
        numbers = range(first, first + size)
        order += [Op("F", i) for i in numbers] + [Op("B", i) for i in reversed(numbers)]
        first += size
    return order


@told("flushes", "may be alive: flush")
def no_flush(n_stages, n_microbatches, k):
    return lab.gpipe(n_stages, n_microbatches)


@told("flushes", "the last flush may hold fewer")
def drops_the_rest(n_stages, n_microbatches, k):
    return [groups([k] * (n_microbatches // k))] * n_stages


@told("flushes", "; microbatches are 0 to")
def overfull_last_flush(n_stages, n_microbatches, k):
    return [groups([k] * (n_microbatches // k + 1))] * n_stages


@told("flushes", "may be alive: flush")
def rest_in_the_last_full_flush(n_stages, n_microbatches, k):
    full = max(n_microbatches // k - 1, 0)
    return [groups([k] * full + [n_microbatches - k * full])] * n_stages


@told("flushes", "Fill each flush with k")
def balanced(n_stages, n_microbatches, k):
    n_flushes = -(-n_microbatches // k)
    return [groups(chunk_sizes(n_microbatches, n_flushes + 1))] * n_stages


@told("flushes", "Fill each flush with k")
def one_by_one(n_stages, n_microbatches, k):
    return [groups([1] * n_microbatches)] * n_stages


@told("flushes", "That is no flush")
def sliding_window(n_stages, n_microbatches, k):
    ahead_of = lambda stage: min(k, n_stages - stage) - 1
    return ahead_by(n_stages, n_microbatches, ahead_of)


@told("flushes", "may be alive: flush")
def off_by_one(n_stages, n_microbatches, k):
    sizes = [k + 1] * (n_microbatches // (k + 1))
    return [groups([*sizes, n_microbatches - sum(sizes)])] * n_stages


# ---- slow_stage ------------------------------------------------------------------


def times(timeline):
    return [timeline.compute(stage) for stage in range(timeline.n_ranks)]


def slowest(timeline):
    return times(timeline).index(max(times(timeline)))


def others(timeline):
    return [t for s, t in enumerate(times(timeline)) if s != slowest(timeline)]


@told("slow_stage", "it waits for the slow one")
def the_idle_one(timeline):
    stage = max(range(timeline.n_ranks), key=timeline.idle)
    return stage, 2.0


@told("slow_stage", "expected")
def hard_coded_stage(timeline):
    return 2, 1.5


@told("slow_stage", "numbered from 0")
def from_one(timeline):
    return slowest(timeline) + 1, max(times(timeline)) / min(times(timeline))


@told("slow_stage", "leave out the slow stage itself")
def median_of_all(timeline):
    return slowest(timeline), max(times(timeline)) / statistics.median(times(timeline))


@told("slow_stage", "mean of all")
def mean_of_all(timeline):
    return slowest(timeline), max(times(timeline)) / statistics.mean(times(timeline))


@told("slow_stage", "mean of the others")
def mean_of_others(timeline):
    return slowest(timeline), max(times(timeline)) / statistics.mean(others(timeline))


@told("slow_stage", "inverse")
def inverse(timeline):
    return slowest(timeline), statistics.median(others(timeline)) / max(times(timeline))


@told("slow_stage", "how many times")
def excess(timeline):
    factor = max(times(timeline)) / statistics.median(others(timeline))
    return slowest(timeline), factor - 1


@told("slow_stage", "not a pair")
def stage_alone(timeline):
    return slowest(timeline)


# ---- bubble_of -------------------------------------------------------------------


@told("bubble_of", "which holds for equal stages")
def as_if_equal(forward, backward, n_microbatches):
    return (len(forward) - 1) / (n_microbatches + len(forward) - 1)


def bubble(forward, backward, n_microbatches, makespan):
    work = n_microbatches * (sum(forward) + sum(backward))
    return 1 - work / (len(forward) * makespan)


@told("bubble_of", "on different stages")
def slowest_pair(forward, backward, n_microbatches):
    both = [f + b for f, b in zip(forward, backward)]
    makespan = sum(both) + (n_microbatches - 1) * max(both)
    return bubble(forward, backward, n_microbatches, makespan)


@told("bubble_of", "each stage's own time")
def all_as_the_slowest(forward, backward, n_microbatches):
    slots = n_microbatches + len(forward) - 1
    makespan = slots * (max(forward) + max(backward))
    return bubble(forward, backward, n_microbatches, makespan)


@told("bubble_of", "m - 1 follow")
def one_microbatch_more(forward, backward, n_microbatches):
    once, pace = sum(forward) + sum(backward), max(forward) + max(backward)
    makespan = once + n_microbatches * pace
    return bubble(forward, backward, n_microbatches, makespan)


@told("bubble_of", "idle over busy time")
def idle_over_busy(forward, backward, n_microbatches):
    right = true_bubble(forward, backward, n_microbatches)
    return right / (1 - right)


@told("bubble_of", "busy part")
def busy_part(forward, backward, n_microbatches):
    return 1 - true_bubble(forward, backward, n_microbatches)


@told("bubble_of", "percentage")
def bubble_in_percent(forward, backward, n_microbatches):
    return 100 * true_bubble(forward, backward, n_microbatches)


def true_bubble(forward, backward, n_microbatches):
    cost = lambda stage, op: (forward if op.kind == "F" else backward)[stage]
    return simulate(lab.gpipe(len(forward), n_microbatches), cost).bubble()


@told("bubble_of", "Find the makespan first")
def rounded(forward, backward, n_microbatches):
    return round(true_bubble(forward, backward, n_microbatches), 2)


# ---- fewest_microbatches ---------------------------------------------------------


def first_fit(n_stages, batch, budget, limit, peak):
    for n in range(1, batch + 1):
        if (n_stages - 1) / (n + n_stages - 1) < limit and peak(n) <= budget:
            return n


@told("fewest_microbatches", "exactly the limit is not under it")
def bubble_at_the_limit(n_stages, batch, inside, boundary, budget, limit=0.1):
    plan = n_stages, batch, budget, limit + 1e-12
    return first_fit(*plan, lambda n: lab_peak(batch, inside, boundary, n))


def lab_peak(batch, inside, boundary, n):
    sizes = chunk_sizes(batch, n)
    kept = [inside * size for size in sizes], [boundary * size for size in sizes]
    return lab.memory(*kept, recompute=True)


@told("fewest_microbatches", "The activations have a budget too")
def no_budget(n_stages, batch, inside, boundary, budget, limit=0.1):
    return first_fit(n_stages, batch, budget, limit, lambda n: 0)


@told("fewest_microbatches", "The bubble has a limit too")
def no_limit(n_stages, batch, inside, boundary, budget, limit=0.1):
    plan = n_stages, batch, budget, 2.0
    return first_fit(*plan, lambda n: lab_peak(batch, inside, boundary, n))


@told("fewest_microbatches", "keep their inputs alone")
def no_recompute(n_stages, batch, inside, boundary, budget, limit=0.1):
    return first_fit(n_stages, batch, budget, limit, lambda n: inside * batch)


@told("fewest_microbatches", "whole samples")
def fractions_of_samples(n_stages, batch, inside, boundary, budget, limit=0.1):
    peak = lambda n: boundary * batch + (inside - boundary) * batch / n
    return first_fit(n_stages, batch, budget, limit, peak)


@told("fewest_microbatches", "count it once")
def input_twice(n_stages, batch, inside, boundary, budget, limit=0.1):
    peak = lambda n: boundary * batch + inside * -(-batch // n)
    return first_fit(n_stages, batch, budget, limit, peak)


@told("fewest_microbatches", "the peak may come at an earlier one")
def last_microbatch_only(n_stages, batch, inside, boundary, budget, limit=0.1):
    peak = lambda n: boundary * batch + (inside - boundary) * (batch // n)
    return first_fit(n_stages, batch, budget, limit, peak)


@told("fewest_microbatches", "exactly the budget")
def below_the_budget(n_stages, batch, inside, boundary, budget, limit=0.1):
    plan = n_stages, batch, budget - 1, limit
    return first_fit(*plan, lambda n: lab_peak(batch, inside, boundary, n))


@told("fewest_microbatches", "1 to 12 microbatches")
def more_than_samples(n_stages, batch, inside, boundary, budget, limit=0.1):
    n = 1
    while (n_stages - 1) / (n + n_stages - 1) >= limit or (
        n < batch and lab_peak(batch, inside, boundary, n) > budget
    ):
        n += 1
    return n


@told("fewest_microbatches", "returned float, not a whole number")
def by_division(n_stages, batch, inside, boundary, budget, limit=0.1):
    return (n_stages - 1) * (1 - limit) / limit
