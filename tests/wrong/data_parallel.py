"""Wrong answers to the data-parallel exercises, as students give them, and what each
hears."""

import random
import sys

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from wrong.notes import notes

from labs import data_parallel as lab
from labs.kit import messages
from labs.kit.clock import ring_seconds

WRONG, told = notes()


# ---- any exercise ----------------------------------------------------------------


@told("indices", "returned None, not a list of samples")
@told("average", "leave the result in its place")
@told("buckets", "returned None, not a list of lists of parameters")
@told("accuracy", "returned None, not a number")
@told("average_unequal", "leave the result in its place")
@told("sync_batch_norm", "returned None, not a tensor")
@told("sharded_step", "Nothing has been updated")
@told("step_time", "returned None, not a number")
def nothing(*arguments):
    pass


@told("indices", "returned str, not a list of samples")
@told("buckets", "returned str, not a list")
@told("accuracy", "returned str, not a number")
@told("sync_batch_norm", "returned str, not a tensor")
@told("step_time", "returned str, not a number")
def text(*arguments):
    return "0.5"


@told("accuracy", "Does a loop never end?")
def endless(*arguments):
    while True:
        pass


@told("average_unequal", "Does a loop never end?")
def endless_on_one_rank(parameters, n_samples):
    while messages.rank() == 1:
        pass
    lab.average_flat(parameters)


@told("sharded_step", "called sys.exit(3)")
def exits(*arguments):
    sys.exit(3)


@told("average", "it raised KeyError: 'w'")
def breaks(tensors):
    return {}["w"]


@told("average", "on rank 1, it raised ValueError: no")
def breaks_on_one_rank(tensors):
    if messages.rank() == 1:
        raise ValueError("no")
    lab.average(tensors)


@told("average", "which every rank must call, and rank 1 has returned")
def rank_0_alone(tensors):
    if messages.rank() == 0:
        lab.average(tensors)


@told("average", "which every rank must call, and rank 0 has returned")
def all_but_rank_0(tensors):
    if messages.rank() != 0:
        lab.average(tensors)


@told("average", "rank 1 has returned. Each receive needs a send")
def nobody_sends(tensors):
    if messages.rank() == 0:
        messages.receive(1)


@told("average", "Every rank must come to the same messages")
def different_calls(tensors):
    flat = parameters_to_vector(tensors)
    if messages.rank() == 0:
        messages.all_reduce(flat)
    else:
        messages.broadcast(flat)


# ---- indices ---------------------------------------------------------------------


def order_of(n_samples, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n_samples, generator=generator).tolist()


def padded(order, n_ranks):
    while len(order) % n_ranks:
        order = order + order[: n_ranks - len(order) % n_ranks]
    return order


@told("indices", "All ranks get equally many")
def not_padded(n_samples, n_ranks, rank, epoch=0, seed=0):
    return order_of(n_samples, seed + epoch)[rank::n_ranks]


@told("indices", "Nothing is dropped")
def drops_the_rest(n_samples, n_ranks, rank, epoch=0, seed=0):
    each = n_samples // n_ranks
    return order_of(n_samples, seed + epoch)[rank::n_ranks][:each]


@told("indices", "order in another epoch: expected different, found the same")
def forgets_the_epoch(n_samples, n_ranks, rank, epoch=0, seed=0):
    return padded(order_of(n_samples, seed), n_ranks)[rank::n_ranks]


@told("indices", "order in another seed: expected different, found the same")
def forgets_the_seed(n_samples, n_ranks, rank, epoch=0, seed=0):
    return padded(order_of(n_samples, epoch), n_ranks)[rank::n_ranks]


@told("indices", "Do all ranks draw the same order")
def an_order_per_rank(n_samples, n_ranks, rank, epoch=0, seed=0):
    return padded(order_of(n_samples, seed + epoch + rank), n_ranks)[rank::n_ranks]


@told("indices", "Only epoch and seed may decide")
def without_a_generator(n_samples, n_ranks, rank, epoch=0, seed=0):
    if rank == 0:
        without_a_generator.order = random.sample(range(n_samples), n_samples)
    return padded(without_a_generator.order, n_ranks)[rank::n_ranks]


@told("indices", "Deal one order")
def in_blocks(n_samples, n_ranks, rank, epoch=0, seed=0):
    order = padded(order_of(n_samples, seed + epoch), n_ranks)
    each = len(order) // n_ranks
    return order[rank * each :][:each]


@told("indices", "Each rank takes its part alone")
def all_of_them(n_samples, n_ranks, rank, epoch=0, seed=0):
    return order_of(n_samples, seed + epoch)


@told("indices", "Repeat as few samples as will do")
def one_round_too_many(n_samples, n_ranks, rank, epoch=0, seed=0):
    order = order_of(n_samples, seed + epoch)
    return (order * n_ranks)[: (n_samples // n_ranks + 1) * n_ranks][rank::n_ranks]


@told("indices", "not a whole number")
def as_fractions(n_samples, n_ranks, rank, epoch=0, seed=0):
    return [i / 2 for i in range(rank, n_samples, n_ranks)]


# ---- average ---------------------------------------------------------------------


@told("average", "add up, and divide once")
def sum_only(tensors):
    flat = messages.all_reduce(parameters_to_vector(tensors))
    vector_to_parameters(flat, tensors)


@told("average", "divided by n_ranks twice")
def divides_twice(tensors):
    flat = messages.all_reduce(parameters_to_vector(tensors), "avg")
    vector_to_parameters(flat / messages.n_ranks(), tensors)


@told("average", "leave the result in its place")
def keeps_it_to_itself(tensors):
    return messages.all_reduce(parameters_to_vector(tensors), "avg")


@told("average", "leave the result in its place")
def new_tensors(tensors):
    for i, tensor in enumerate(tensors):
        tensors[i] = messages.all_reduce(tensor.clone(), "avg")


@told("average", "One all_reduce is enough")
def one_for_each(tensors):
    for tensor in tensors:
        messages.all_reduce(tensor, "avg")


@told("average", "One all_reduce is enough")
def number_of_ranks_by_message(tensors):
    n_ranks = messages.all_reduce(torch.tensor(1.0))
    flat = messages.all_reduce(parameters_to_vector(tensors))
    vector_to_parameters(flat / n_ranks, tensors)


@told("average", "Every rank must come to the same messages")
def only_what_is_not_zero(tensors):
    used = [tensor for tensor in tensors if tensor.any()]
    lab.average(used)


@told("average", "All ranks have to send the same things in the same order")
def another_order_on_each_rank(tensors):
    lab.average(tensors if messages.rank() == 0 else tensors[::-1])


@told("average", "in the order of flattening")
def gives_back_in_reverse(tensors):
    flat = messages.all_reduce(parameters_to_vector(tensors), "avg")
    vector_to_parameters(flat.flip(0), tensors)


# ---- buckets ---------------------------------------------------------------------


def filled(parameters, fits):
    groups = []
    for parameter in parameters:
        if groups and fits([*groups[-1], parameter]):
            groups[-1].append(parameter)
        else:
            groups.append([parameter])
    return groups


def size(group):
    return sum(map(messages.nbytes, group))


@told("buckets", "The backward reaches the last parameter first")
def from_the_first(parameters, nbytes):
    return filled(parameters, lambda group: size(group) <= nbytes)


@told("buckets", "an element of float32 takes four")
def counts_elements(parameters, nbytes):
    elements = lambda group: sum(parameter.numel() for parameter in group)
    return filled(parameters[::-1], lambda group: elements(group) <= nbytes)


@told("buckets", "A bucket of exactly nbytes is not too large")
def strictly_less(parameters, nbytes):
    return filled(parameters[::-1], lambda group: size(group) < nbytes)


@told("buckets", "look before you add")
def closes_when_it_is_over(parameters, nbytes):
    return filled(parameters[::-1], lambda group: size(group[:-1]) < nbytes)


@told("buckets", "The last bucket is missing")
def forgets_the_last(parameters, nbytes):
    return filled(parameters[::-1], lambda group: size(group) <= nbytes)[:-1]


@told("buckets", "as many parameters as fit")
def one_each(parameters, nbytes):
    return [[parameter] for parameter in reversed(parameters)]


@told("buckets", "An empty bucket has nothing to send")
def begins_empty(parameters, nbytes):
    return [[], *filled(parameters[::-1], lambda group: size(group) <= nbytes)]


@told("buckets", "a parameter that is too large has its own")
def drops_what_is_too_large(parameters, nbytes):
    small = [p for p in reversed(parameters) if messages.nbytes(p) <= nbytes]
    groups = []
    for parameter in reversed(parameters):
        if messages.nbytes(parameter) > nbytes:
            groups.append([])
        elif groups and size([*groups[-1], parameter]) <= nbytes:
            groups[-1].append(parameter)
        else:
            groups.append([parameter])
    assert sum(map(len, groups)) == len(small)
    return [group for group in groups if group]


@told("buckets", "begin at the end")
def turned_round(parameters, nbytes):
    groups = filled(parameters[::-1], lambda group: size(group) <= nbytes)
    return [group[::-1] for group in groups[::-1]]


@told("buckets", "each bucket is a list of parameters")
def one_flat_list(parameters, nbytes):
    return list(reversed(parameters))


@told("buckets", "something else than the parameters")
def copies(parameters, nbytes):
    return [[parameter.detach().clone()] for parameter in reversed(parameters)]


# ---- accuracy --------------------------------------------------------------------


def total(value):
    return messages.all_reduce(torch.tensor(float(value))).item()


def first(correct, n_samples):
    places = range(messages.rank(), n_samples, messages.n_ranks())
    return correct[: len(places)]


@told("accuracy", "Repeated samples count once")
def with_repeats(correct, n_samples):
    return total(sum(correct)) / total(len(correct))


@told("accuracy", "The repeats are still among the hits")
def repeats_as_hits(correct, n_samples):
    return total(sum(correct)) / n_samples


@told("accuracy", "still in the number that you divide by")
def divides_by_what_was_dealt(correct, n_samples):
    return total(sum(first(correct, n_samples))) / total(len(correct))


@told("accuracy", "add up the hits of all")
def of_this_rank(correct, n_samples):
    mine = first(correct, n_samples)
    return sum(mine) / len(mine) if mine else 0.0


@told("accuracy", "add up the hits of all")
def of_this_rank_by_all(correct, n_samples):
    return sum(first(correct, n_samples)) / n_samples


@told("accuracy", "they may hold unequally many")
def mean_of_accuracies(correct, n_samples):
    mine = first(correct, n_samples)
    return total(sum(mine) / max(1, len(mine))) / messages.n_ranks()


@told("accuracy", "a rank may hold repeats alone")
def weighted_mean_of_accuracies(correct, n_samples):
    mine = first(correct, n_samples)
    return total(sum(mine) / len(mine) * len(mine)) / n_samples


@told("accuracy", "That is the number of hits")
def hits(correct, n_samples):
    return total(sum(first(correct, n_samples)))


@told("accuracy", "That is a percentage")
def in_percent(correct, n_samples):
    return 100 * total(sum(first(correct, n_samples))) / n_samples


@told("accuracy", "divided by n_ranks once too often")
def divides_by_ranks(correct, n_samples):
    return total(sum(first(correct, n_samples))) / n_samples / messages.n_ranks()


@told("accuracy", "Every rank returns the accuracy of all")
def rank_0_returns(correct, n_samples):
    n = total(sum(first(correct, n_samples)))
    return n / n_samples if messages.rank() == 0 else None


@told("accuracy", "which every rank must call")
def without_those_who_hold_repeats(correct, n_samples):
    mine = first(correct, n_samples)
    return total(sum(mine)) / n_samples if len(mine) == len(correct) else 0.0


@told("accuracy", "Which places of the order does this rank hold?")
def off_by_one(correct, n_samples):
    return total(sum(correct[: n_samples // messages.n_ranks()])) / n_samples


# ---- average_unequal -------------------------------------------------------------


def scale(parameters, factor):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * factor


@told("average_unequal", "That is the mean of the ranks' means")
def plain_average(parameters, n_samples):
    lab.average_flat(parameters)


@told("average_unequal", "That is the sum over the samples")
def sum_over_samples(parameters, n_samples):
    scale(parameters, n_samples * messages.n_ranks())
    lab.average_flat(parameters)


@told("average_unequal", "not by that of the ranks")
def divides_by_ranks_only(parameters, n_samples):
    scale(parameters, n_samples)
    lab.average_flat(parameters)


@told("average_unequal", "divided by n_ranks twice")
def weights_and_averages(parameters, n_samples):
    scale(parameters, n_samples / total(n_samples))
    lab.average_flat(parameters)


@told("average_unequal", "it is in the mean already")
def divides_by_all_samples(parameters, n_samples):
    scale(parameters, messages.n_ranks() / total(n_samples))
    lab.average_flat(parameters)


@told("average_unequal", "must take part all the same")
def without_the_empty(parameters, n_samples):
    if n_samples:
        scale(parameters, n_samples * messages.n_ranks() / total(n_samples))
        lab.average_flat(parameters)


@told("average_unequal", "must take part all the same")
def divides_by_its_own_number(parameters, n_samples):
    scale(parameters, messages.n_ranks() / (total(n_samples) * (1 / n_samples)))
    lab.average_flat(parameters)


@told("average_unequal", ".grad is None: count it as zero")
def forgets_missing_gradients(parameters, n_samples):
    n = total(n_samples)
    for parameter in parameters:
        parameter.grad *= n_samples * messages.n_ranks() / n
    lab.average_flat(parameters)


@told("average_unequal", "take zeros")
def leaves_missing_gradients(parameters, n_samples):
    n = total(n_samples)
    for parameter in parameters:
        grad = parameter.grad
        grad = torch.zeros_like(parameter) if grad is None else grad.clone()
        messages.all_reduce(grad.mul_(n_samples / n))
        if parameter.grad is not None:
            parameter.grad.copy_(grad)


@told("average_unequal", "leave the result in its place")
def lost_result(parameters, n_samples):
    flat = parameters_to_vector([torch.zeros(len(p)) for p in parameters[:1]])
    return messages.all_reduce(flat)


# ---- sync_batch_norm -------------------------------------------------------------


def normalised(x, mean, variance, eps):
    return (x - mean) / (variance + eps).sqrt()


def sums(x):
    n = torch.full((x.shape[1],), float(len(x)))
    return messages.all_reduce(torch.stack([n, x.sum(0), x.square().sum(0)]))


@told("sync_batch_norm", "this rank's own mean and variance")
def own_statistics(x, eps=1e-5):
    return normalised(x, x.mean(0), x.var(0, correction=0), eps)


@told("sync_batch_norm", "are not the batch's")
def means_of_means(x, eps=1e-5):
    both = torch.stack([x.mean(0), x.var(0, correction=0)])
    return normalised(x, *messages.all_reduce(both, "avg"), eps)


@told("sync_batch_norm", "The mean of no sample is nan")
def weighted_means(x, eps=1e-5):
    n = torch.full((x.shape[1],), float(len(x)))
    parts = [n, n * x.mean(0), n * x.square().mean(0)]
    n, mean, squares = messages.all_reduce(torch.stack(parts))
    return normalised(x, mean / n, squares / n - (mean / n).square(), eps)


@told("sync_batch_norm", "not by one less")
def unbiased(x, eps=1e-5):
    n, total, squares = sums(x)
    variance = (squares - total.square() / n) / (n - 1)
    return normalised(x, total / n, variance, eps)


@told("sync_batch_norm", "eps is missing")
def without_eps(x, eps=1e-5):
    n, total, squares = sums(x)
    return normalised(x, total / n, squares / n - (total / n).square(), 0.0)


@told("sync_batch_norm", "less the square of the mean")
def mean_of_squares(x, eps=1e-5):
    n, total, squares = sums(x)
    return normalised(x, total / n, squares / n, eps)


@told("sync_batch_norm", "One all_reduce is enough")
def two_messages(x, eps=1e-5):
    n, total, _ = sums(x)
    variance = messages.all_reduce((x - total / n).square().sum(0)) / n
    return normalised(x, total / n, variance, eps)


@told("sync_batch_norm", "their means differ too")
def mean_of_variances(x, eps=1e-5):
    n, total, _ = sums(x)
    inside = x.var(0, correction=0) * len(x) if len(x) else torch.zeros(x.shape[1])
    return normalised(x, total / n, messages.all_reduce(inside) / n, eps)


@told("sync_batch_norm", "Every rank must come to the same messages")
def gathers_unequal_batches(x, eps=1e-5):
    batch = torch.cat(messages.all_gather(x))
    return normalised(x, batch.mean(0), batch.var(0, correction=0), eps)


@told("sync_batch_norm", "must take part all the same")
def empty_returns_at_once(x, eps=1e-5):
    if not len(x):
        return x
    n, total, squares = sums(x)
    return normalised(x, total / n, squares / n - (total / n).square(), eps)


@told("sync_batch_norm", "it returned shape [1, 1]; x has [3, 1]")
def returns_the_mean(x, eps=1e-5):
    return x.mean(0, keepdim=True)


@told("sync_batch_norm", "Which three sums")
def sums_not_means(x, eps=1e-5):
    n, total, squares = sums(x)
    return normalised(x, total, squares - total.square(), eps)


# ---- sharded_step ----------------------------------------------------------------


def own(parameters):
    n_ranks, rank = messages.n_ranks(), messages.rank()
    return [(i, p) for i, p in enumerate(parameters) if i % n_ranks == rank]


def hand_out(parameters):
    for i, parameter in enumerate(parameters):
        messages.broadcast(parameter, i % messages.n_ranks())


@told("sharded_step", "keep that of its own parameters")
def everybody_keeps_it(parameters, state, lr, momentum):
    for i, parameter in enumerate(parameters):
        state[i] = momentum * state.get(i, 0) + parameter.grad
        parameter.data -= lr * state[i]


@told("sharded_step", "who updates a parameter gives it to all others")
def without_a_message(parameters, state, lr, momentum):
    for i, parameter in own(parameters):
        state[i] = momentum * state.get(i, 0) + parameter.grad
        parameter.data -= lr * state[i]


@told("sharded_step", "Every rank must come to the same messages")
def owner_broadcasts_alone(parameters, state, lr, momentum):
    without_a_message(parameters, state, lr, momentum)
    for i, parameter in own(parameters):
        messages.broadcast(parameter, i % messages.n_ranks())


@told("sharded_step", "Nothing has been updated")
def own_copy(parameters, state, lr, momentum):
    for i, parameter in own(parameters):
        state[i] = momentum * state.get(i, 0) + parameter.grad
        parameter = parameter - lr * state[i]
    hand_out(parameters)


@told("sharded_step", "without momentum")
def no_momentum(parameters, state, lr, momentum):
    for i, parameter in own(parameters):
        state[i] = parameter.grad
        parameter.data -= lr * state[i]
    hand_out(parameters)


@told("sharded_step", "not times 1 - momentum")
def running_mean(parameters, state, lr, momentum):
    for i, parameter in own(parameters):
        grad = parameter.grad
        state[i] = momentum * state[i] + (1 - momentum) * grad if i in state else grad
        parameter.data -= lr * state[i]
    hand_out(parameters)


@told("sharded_step", "subtract")
def uphill(parameters, state, lr, momentum):
    for i, parameter in own(parameters):
        state[i] = momentum * state.get(i, 0) + parameter.grad
        parameter.data += lr * state[i]
    hand_out(parameters)


@told("sharded_step", "keeps the momentum of parameter i, under i")
def shards_in_blocks(parameters, state, lr, momentum):
    each = -(-len(parameters) // messages.n_ranks())
    for i, parameter in enumerate(parameters):
        if i // each == messages.rank():
            state[i] = momentum * state.get(i, 0) + parameter.grad
            parameter.data -= lr * state[i]
        messages.broadcast(parameter, i // each)


@told("sharded_step", "a broadcast has a source")
def always_from_rank_0(parameters, state, lr, momentum):
    without_a_message(parameters, state, lr, momentum)
    for parameter in parameters:
        messages.broadcast(parameter)


@told("sharded_step", "under torch.no_grad()")
def watched_by_autograd(parameters, state, lr, momentum):
    for i, parameter in own(parameters):
        state[i] = momentum * state.get(i, 0) + parameter.grad
        parameter -= lr * state[i]
    hand_out(parameters)


@told("sharded_step", "from 0 on?")
def lr_in_the_momentum(parameters, state, lr, momentum):
    for i, parameter in own(parameters):
        state[i] = momentum * state.get(i, 0) + lr * parameter.grad
        parameter.data -= lr * state[i]
    hand_out(parameters)


# ---- step_time -------------------------------------------------------------------


def plan(backward, nbytes, bucket):
    """Return (end of the backward, [when a bucket is ready], [its bytes])."""
    now, ready, sizes = 0.0, [], []
    for time, nbytes_of_layer in zip(backward[::-1], nbytes[::-1]):
        now += time
        if nbytes_of_layer and sizes and sizes[-1] + nbytes_of_layer <= bucket:
            ready[-1] = now
            sizes[-1] += nbytes_of_layer
        elif nbytes_of_layer:
            ready.append(now)
            sizes.append(nbytes_of_layer)
    return now, ready, sizes


def queued(ready, times):
    free = 0.0
    for begin, time in zip(ready, times):
        free = max(free, begin) + time
    return free


def around(link, n_ranks, sizes):
    return [ring_seconds(link, "all_reduce", n_ranks, nbytes) for nbytes in sizes]


@told("step_time", "A bucket leaves as soon as it is ready")
def no_overlap(backward, nbytes, bucket, n_ranks, link):
    now, _, sizes = plan(backward, nbytes, bucket)
    return now + sum(around(link, n_ranks, sizes))


@told("step_time", "One bucket is on its way at a time")
def no_queue(backward, nbytes, bucket, n_ranks, link):
    now, ready, sizes = plan(backward, nbytes, bucket)
    times = around(link, n_ranks, sizes)
    return max(now, *(begin + time for begin, time in zip(ready, times)))


@told("step_time", "A step is not over before its backward")
def messages_only(backward, nbytes, bucket, n_ranks, link):
    _, ready, sizes = plan(backward, nbytes, bucket)
    return queued(ready, around(link, n_ranks, sizes))


@told("step_time", "That is the time of the messages alone")
def sum_of_messages(backward, nbytes, bucket, n_ranks, link):
    return sum(around(link, n_ranks, plan(backward, nbytes, bucket)[2]))


@told("step_time", "That is the time of the backward alone")
def backward_only(backward, nbytes, bucket, n_ranks, link):
    return sum(backward)


@told("step_time", "Earlier buckets may still be on their way")
def last_bucket_only(backward, nbytes, bucket, n_ranks, link):
    now, ready, sizes = plan(backward, nbytes, bucket)
    return max(now, ready[-1] + around(link, n_ranks, sizes)[-1])


@told("step_time", "pays the latency")
def one_latency(backward, nbytes, bucket, n_ranks, link):
    now, ready, sizes = plan(backward, nbytes, bucket)
    part = 2 * (n_ranks - 1) / n_ranks
    return max(now, queued(ready, [link.seconds(part * size) for size in sizes]))


@told("step_time", "An all-reduce goes around the ring")
def one_message(backward, nbytes, bucket, n_ranks, link):
    now, ready, sizes = plan(backward, nbytes, bucket)
    return max(now, queued(ready, [link.seconds(size) for size in sizes]))


@told("step_time", "The latency is missing")
def free_latency(backward, nbytes, bucket, n_ranks, link):
    now, ready, sizes = plan(backward, nbytes, bucket)
    return max(now, queued(ready, around(link._replace(latency=0), n_ranks, sizes)))


@told("step_time", "begins at the last layer")
def from_the_first_layer(backward, nbytes, bucket, n_ranks, link):
    now, ready, sizes = plan(backward[::-1], nbytes[::-1], bucket)
    return max(now, queued(ready, around(link, n_ranks, sizes)))


@told("step_time", "Layers share a bucket while they fit")
def a_bucket_per_layer(backward, nbytes, bucket, n_ranks, link):
    now, ready, sizes = plan(backward, nbytes, 0)
    return max(now, queued(ready, around(link, n_ranks, sizes)))


@told("step_time", "That is one message for all")
def all_in_one(backward, nbytes, bucket, n_ranks, link):
    now, ready, sizes = plan(backward, nbytes, sum(nbytes))
    return max(now, queued(ready, around(link, n_ranks, sizes)))


@told("step_time", "A layer without weights is in no bucket")
def waits_for_layers_without_weights(backward, nbytes, bucket, n_ranks, link):
    now, ready, sizes = plan(backward, [n or 1e-9 for n in nbytes], bucket)
    return max(now, queued(ready, around(link, n_ranks, map(round, sizes))))


@told("step_time", "When is each bucket ready")
def rounded(backward, nbytes, bucket, n_ranks, link):
    now, ready, sizes = plan(backward, nbytes, bucket)
    return round(max(now, queued(ready, around(link, n_ranks, sizes)))) + 0.1
