"""Wrong answers to the model-parallel exercises, and what each hears."""

import sys
from itertools import accumulate

import torch
from wrong.notes import notes

from labs import model_parallel as lab
from labs.kit import messages, split
from labs.kit.messages import chunk_sizes
from labs.kit.timeline import Link

WRONG, told = notes()


# ---- any exercise ----------------------------------------------------------------


@told("idle_fraction", "returned None, not a number")
@told("in_turn", "on rank 2, it returned None, not a number")
@told("step_time", "returned None, not a number")
@told("fewest_stages", "returned None, not a list of layers per stage")
@told("skip_step", "on rank 2, it returned None, not a number")
@told("step_with_recompute", "returned None, not a number")
@told("split_mlp", "returned None, not a pair")
@told("three_ways", "returned None, not a dict of data, tensor, model")
def nothing(*arguments):
    pass


@told("fewest_stages", "Does a loop never end?")
def endless(*arguments):
    while True:
        pass


@told("split_mlp", "called sys.exit(1)")
def leaving(*arguments):
    sys.exit(1)


@told("step_with_recompute", "raised ZeroDivisionError: division by zero (")
@told("split_mlp", "raised ZeroDivisionError: division by zero (")
def broken(*arguments):
    return 1 / 0


@told("three_ways", "raised TypeError")
@told("in_turn", "raised TypeError")
def no_parameters():
    return {}


@told("three_ways", "returned list, not a dict")
@told("step_with_recompute", "returned list, not a number")
def a_list(*arguments):
    return [1, 2, 3]


# ---- idle_fraction ---------------------------------------------------------------


@told("idle_fraction", "busy part")
def busy(n_stages, computing=1.0):
    return computing / n_stages


@told("idle_fraction", "percentage")
def in_percent(n_stages, computing=1.0):
    return 100 * (1 - computing / n_stages)


@told("idle_fraction", "idle over busy time")
def over_busy(n_stages, computing=1.0):
    return n_stages / computing - 1


@told("idle_fraction", "all stages are idle, not all but one")
def without_messages(n_stages, computing=1.0):
    return 1 - 1 / n_stages


@told("idle_fraction", "the others are idle too")
def of_messages(n_stages, computing=None):
    return 1 - 1 / n_stages if computing is None else 1 - computing


@told("idle_fraction", "the stage whose turn it is idles as well")
def part_of_the_part(n_stages, computing=1.0):
    return computing * (1 - 1 / n_stages)


@told("idle_fraction", "There may be one stage alone")
def two_or_more(n_stages, computing=1.0):
    return 1 - computing / n_stages if n_stages > 1 else 1 / 0


# ---- in_turn ---------------------------------------------------------------------


def turn(stage, inputs, start=torch.ones_like, forwards=1, back=True):
    """A right in_turn, but for what its caller changes."""
    rank, last = messages.rank(), messages.n_ranks() - 1
    x = lab.receive(rank - 1) if rank > 0 else (inputs,)
    for _ in range(forwards):
        y = stage.forward(0, x)
    if rank < last:
        lab.send(y, rank + 1)
    gradients = lab.receive(rank + 1) if rank < last else (start(y[0]),)
    gradients = stage.backward(0, gradients)
    if rank > 0 and back:
        lab.send(gradients, rank - 1)
    return y[0]


@told("in_turn", "Stage 0 alone reads the inputs")
def all_read_inputs(stage, inputs):
    rank, last = messages.rank(), messages.n_ranks() - 1
    y = stage.forward(0, (inputs,))
    gradients = lab.receive(rank + 1) if rank < last else (torch.ones_like(y[0]),)
    gradients = stage.backward(0, gradients)
    if rank > 0:
        lab.send(gradients, rank - 1)
    return y[0]


@told("in_turn", "begin with is 1, not the loss")
def begins_with_the_loss(stage, inputs):
    return turn(stage, inputs, start=torch.clone)


@told("in_turn", "A stage sends back what the one before waits for")
def sends_nothing_back(stage, inputs):
    return turn(stage, inputs, back=False)


@told("in_turn", "Every stage goes backward")
def forward_alone(stage, inputs):
    rank, last = messages.rank(), messages.n_ranks() - 1
    x = lab.receive(rank - 1) if rank > 0 else (inputs,)
    y = stage.forward(0, x)
    if rank < last:
        lab.send(y, rank + 1)
    return y[0]


@told("in_turn", "goes forward once and backward once")
def forward_twice(stage, inputs):
    return turn(stage, inputs, forwards=2)


@told("in_turn", "have a neighbour on one side alone")
def last_receives_too(stage, inputs):
    rank = messages.rank()
    x = lab.receive(rank - 1) if rank > 0 else (inputs,)
    y = stage.forward(0, x)
    lab.send(y, rank + 1)
    lab.send(stage.backward(0, lab.receive(rank + 1)), rank - 1)
    return y[0]


@told("in_turn", "from the gradients that it receives")
def without_the_others_gradients(stage, inputs):
    rank, last = messages.rank(), messages.n_ranks() - 1
    x = lab.receive(rank - 1) if rank > 0 else (inputs,)
    y = stage.forward(0, x)
    if rank < last:
        lab.send(y, rank + 1)
        lab.receive(rank + 1)
    gradients = stage.backward(0, (torch.ones_like(y[0]),))
    if rank > 0:
        lab.send(gradients, rank - 1)
    return y[0]


@told("in_turn", "returned Tensor, not a number")
def returns_the_inputs(stage, inputs):
    turn(stage, inputs)
    return inputs


@told("in_turn", "return it as a number")
def returns_another_number(stage, inputs):
    turn(stage, inputs)
    return 0.0


@told("in_turn", "each of them once")
def sends_the_loss_too(stage, inputs):
    loss = turn(stage, inputs)
    if messages.rank() == messages.n_ranks() - 1 > 0:
        messages.send(loss, 0)
    elif messages.rank() == 0 and messages.n_ranks() > 1:
        loss = messages.receive(messages.n_ranks() - 1)
    return loss


# ---- step_time -------------------------------------------------------------------


@told("step_time", "the computation alone")
def computing_alone(computing, boundary, link):
    return computing


@told("step_time", "each counts twice")
def one_way(computing, boundary, link):
    return computing + sum(map(link.seconds, boundary[1:]))


@told("step_time", "leave out boundary[0]")
def with_the_inputs(computing, boundary, link):
    return computing + 2 * sum(map(link.seconds, boundary))


@told("step_time", "not the last one")
def without_the_last(computing, boundary, link):
    return computing + 2 * sum(map(link.seconds, boundary[:-1]))


@told("step_time", "takes the latency too")
def no_latency(computing, boundary, link):
    return computing + 2 * sum(boundary[1:]) / link.bandwidth


@told("step_time", "not all of them together once")
def one_latency(computing, boundary, link):
    return computing + 2 * link.seconds(sum(boundary[1:]))


@told("step_time", "add them all up")
def largest_message(computing, boundary, link):
    return computing + 2 * max(map(link.seconds, boundary[1:]), default=0.0)


@told("step_time", "what all stages take together")
def times_stages(computing, boundary, link):
    messages = 2 * sum(map(link.seconds, boundary[1:]))
    return len(boundary) * computing + messages


@told("step_time", "one stage alone")
def needs_a_boundary(computing, boundary, link):
    return computing + 2 * sum(map(link.seconds, boundary[1:])) + 0 * boundary[1]


# ---- fewest_stages ---------------------------------------------------------------


def filled(needs, budget, refuse=True):
    """Fill stage after stage, as a right answer does."""
    if refuse and max(needs) > budget:
        raise ValueError("a layer does not fit")
    sizes, room = [], 0
    for nbytes in needs:
        if not sizes or nbytes > room:
            sizes.append(0)
            room = budget
        sizes[-1] += 1
        room -= nbytes
    return sizes


def needed(weights, activations, copies=4):
    return [copies * w + a for w, a in zip(weights, activations)]


@told("fewest_stages", "a gradient and two numbers of Adam")
def weights_once(weights, activations, budget):
    return filled(needed(weights, activations, 1), budget)


@told("fewest_stages", "Adam keeps two numbers for each weight, beside")
def no_adam(weights, activations, budget):
    return filled(needed(weights, activations, 2), budget)


@told("fewest_stages", "make four")
def as_with_momentum(weights, activations, budget):
    return filled(needed(weights, activations, 3), budget)


@told("fewest_stages", "Activations count")
def no_activations(weights, activations, budget):
    return filled([4 * w for w in weights], budget)


@told("fewest_stages", "not activations alone")
def no_weights(weights, activations, budget):
    return filled(activations, budget)


@told("fewest_stages", "exactly the budget fits")
def strictly_below(weights, activations, budget):
    return filled(needed(weights, activations), budget - 1)


@told("fewest_stages", "Fill a stage with as many layers as fit")
def one_layer_each(weights, activations, budget):
    return [1] * len(weights)


@told("fewest_stages", "no equal numbers of bytes")
def by_the_sum(weights, activations, budget):
    n_stages = -(-sum(needed(weights, activations)) // budget)
    return chunk_sizes(len(weights), n_stages)


@told("fewest_stages", "room for one more layer")
def two_stages_too_many(weights, activations, budget):
    needs = needed(weights, activations)
    n_stages = len(filled(needs, budget)) + 2
    return split.by_cost(needs, min(n_stages, len(needs)))


@told("fewest_stages", "sizes add up to 4")
def drops_the_last_stage(weights, activations, budget):
    return filled(needed(weights, activations), budget)[:-1]


@told("fewest_stages", "a stage has at least one layer")
def opens_an_empty_stage(weights, activations, budget):
    return [0, *filled(needed(weights, activations), budget)]


@told("fewest_stages", "No cut helps a layer that does not fit")
def refuses_nothing(weights, activations, budget):
    return filled(needed(weights, activations), budget, refuse=False)


@told("fewest_stages", "raise ValueError")
def fails_an_assertion(weights, activations, budget):
    assert max(needed(weights, activations)) <= budget
    return filled(needed(weights, activations), budget)


@told("fewest_stages", "Each layer fits, so there is a cut")
def refuses_too_much(weights, activations, budget):
    if sum(needed(weights, activations)) > budget:
        raise ValueError("the model does not fit")
    return [len(weights)]


@told("fewest_stages", "A layer may hold nothing at all")
def starts_with_the_first_bytes(weights, activations, budget):
    sizes, room = [], 0
    for nbytes in needed(weights, activations):
        if nbytes > budget:
            raise ValueError
        if nbytes > room:
            sizes.append(0)
            room = budget
        sizes[-1] += 1
        room -= nbytes
    return sizes


@told("fewest_stages", "returned int, not a list")
def how_many(weights, activations, budget):
    return len(filled(needed(weights, activations), budget))


# ---- skip_step -------------------------------------------------------------------


def skip(module, x, meet=lambda module, z, y: module(z, y), sum_of=torch.add):
    """A right skip_step, but for what its caller changes."""
    rank, last = messages.rank(), messages.n_ranks() - 1
    if rank == 0:
        y = module(x)
        messages.isend(y, 1)
        messages.isend(y, last)
        on = messages.receive(1)
        y.backward(sum_of(on, messages.receive(last)))
        return None
    x = messages.receive(rank - 1).requires_grad_()
    if rank < last:
        z = module(x)
        messages.send(z, rank + 1)
        z.backward(messages.receive(rank + 1))
        messages.send(x.grad, rank - 1)
        return None
    y = messages.receive(0).requires_grad_()
    loss = meet(module, x, y)
    loss.backward()
    for tensor, to in ((x, rank - 1), (y, 0)):
        gradient = torch.zeros_like(x) if tensor.grad is None else tensor.grad
        messages.send(gradient, to)
    return loss.item()


@told("skip_step", "by way of the skip is lost")
def forgets_the_skip(module, x):
    return skip(module, x, sum_of=lambda on, skipped: on)


@told("skip_step", "by way of the skip is lost")
def skipped_is_a_constant(module, x):
    return skip(module, x, meet=lambda module, z, y: module(z, y.detach()))


@told("skip_step", "That is the skip's gradient alone")
def the_skip_alone(module, x):
    return skip(module, x, sum_of=lambda on, skipped: skipped)


@told("skip_step", "they are not averaged")
def averages(module, x):
    return skip(module, x, sum_of=lambda on, skipped: (on + skipped) / 2)


@told("skip_step", "from what is sent back")
def subtracts(module, x):
    return skip(module, x, sum_of=torch.sub)


@told("skip_step", "not z twice")
def z_twice(module, x):
    return skip(module, x, meet=lambda module, z, y: module(z, z))


@told("skip_step", "not y twice")
def y_twice(module, x):
    return skip(module, x, meet=lambda module, z, y: module(y, y))


@told("skip_step", "module(z, y)")
def swapped(module, x):
    return skip(module, x, meet=lambda module, z, y: module(y, z))


@told("skip_step", "The last rank computes module(z, y)")
def a_mean(module, x):
    return skip(module, x, meet=lambda module, z, y: module(z, y) / len(y))


@told("skip_step", "isend does not wait")
def waits_for_each_other(module, x):
    """Rank 0 waits for rank 1 first; the last rank gives its gradient to 0 first."""
    rank, last = messages.rank(), messages.n_ranks() - 1
    if rank == 0:
        y = module(x)
        messages.send(y, 1)
        messages.send(y, last)
        y.backward(messages.receive(1) + messages.receive(last))
        return None
    x = messages.receive(rank - 1).requires_grad_()
    if rank < last:
        z = module(x)
        messages.send(z, rank + 1)
        z.backward(messages.receive(rank + 1))
        messages.send(x.grad, rank - 1)
        return None
    y = messages.receive(0).requires_grad_()
    loss = module(x, y)
    loss.backward()
    messages.send(y.grad, 0)
    messages.send(x.grad, rank - 1)
    return loss.item()


@told("skip_step", "Rank 0 adds both gradients up, and goes backward once")
def backward_twice(module, x):
    rank, last = messages.rank(), messages.n_ranks() - 1
    if rank > 0:
        return skip(module, x)
    y = module(x).tanh()
    messages.isend(y, 1)
    messages.isend(y, last)
    y.backward(messages.receive(1))
    y.backward(messages.receive(last))
    return None


@told("skip_step", "before requires_grad_()")
def no_graph_at_the_input(module, x):
    rank = messages.rank()
    if rank != 1:
        return skip(module, x)
    x = messages.receive(0)
    z = module(x)
    messages.send(z, 2)
    z.backward(messages.receive(2))
    messages.send(x.grad, 0)
    return None


@told("skip_step", "Every rank goes backward")
def no_way_back(module, x):
    rank, last = messages.rank(), messages.n_ranks() - 1
    if rank == last:
        return module(messages.receive(rank - 1), messages.receive(0))
    y = module(x if rank == 0 else messages.receive(rank - 1))
    messages.isend(y, rank + 1)
    if rank == 0:
        messages.isend(y, last)
    return None


@told("skip_step", "send it past them")
def handed_on(module, x):
    """y travels from rank to rank, beside z, and its gradient comes back so."""
    rank, last = messages.rank(), messages.n_ranks() - 1
    if rank == 0:
        y = module(x)
        lab.send((y.detach(), y.detach()), 1)
        y.backward(sum(lab.receive(1)))
        return None
    z, y = (tensor.requires_grad_() for tensor in lab.receive(rank - 1))
    if rank == last:
        loss = module(z, y)
        loss.backward()
        lab.send((z.grad, y.grad), last - 1)
        return loss.item()
    out = module(z)
    lab.send((out.detach(), y.detach()), rank + 1)
    of_out, of_y = lab.receive(rank + 1)
    out.backward(of_out)
    lab.send((z.grad, of_y), rank - 1)
    return "done"


@told("skip_step", "Rank 0 sends y twice")
def sends_x_too(module, x):
    if messages.rank() == 0:
        messages.isend(x, 1, tag=5)
    elif messages.rank() == 1:
        messages.receive(0, tag=5)
    return skip(module, x)


@told("skip_step", "There may be more than three ranks")
def three_ranks(module, x):
    if messages.n_ranks() != 3:
        raise IndexError("rank 2 is the last")
    return skip(module, x)


# ---- step_with_recompute ---------------------------------------------------------


def times(forwards, backwards, boundary, link):
    moves = [link.seconds(nbytes) for nbytes in boundary[1:]]
    return sum(forwards) + sum(moves), moves


@told("step_with_recompute", "a long forward is not hidden")
def always_hidden(forwards, backwards, boundary, link):
    there, moves = times(forwards, backwards, boundary, link)
    return there + sum(backwards) + sum(moves)


@told("step_with_recompute", "it may begin earlier")
def when_the_gradient_is_there(forwards, backwards, boundary, link):
    plain = always_hidden(forwards, backwards, boundary, link)
    return plain + sum(forwards[:-1])


@told("step_with_recompute", "a stage recomputes while it waits")
def every_forward_twice(forwards, backwards, boundary, link):
    return always_hidden(forwards, backwards, boundary, link) + sum(forwards)


@told("step_with_recompute", "it computes nothing again")
def the_last_too(forwards, backwards, boundary, link):
    return right_time(forwards, backwards, boundary, link) + forwards[-1]


def right_time(forwards, backwards, boundary, link):
    time, moves = times(forwards, backwards, boundary, link)
    for s, move in enumerate(moves):
        time += max(forwards[s], backwards[s + 1] + move)
    return time + backwards[0]


@told("step_with_recompute", "While the gradient is on its way")
def not_during_the_message(forwards, backwards, boundary, link):
    time, moves = times(forwards, backwards, boundary, link)
    for s, move in enumerate(moves):
        time += max(forwards[s], backwards[s + 1]) + move
    return time + backwards[0]


@told("step_with_recompute", "Messages take time")
def free_messages(forwards, backwards, boundary, link):
    return right_time(forwards, backwards, boundary, Link())


@told("step_with_recompute", "leave out boundary[0]")
def sends_the_inputs(forwards, backwards, boundary, link):
    time = right_time(forwards, backwards, boundary, link)
    return time + link.seconds(boundary[0])


@told("step_with_recompute", "not during its own")
def behind_its_own_backward(forwards, backwards, boundary, link):
    time, moves = times(forwards, backwards, boundary, link)
    for s, move in enumerate(moves):
        time += max(forwards[s], backwards[s] + move)
    return time + backwards[-1]


@told("step_with_recompute", "after the next stage's backward and its message")
def the_longest_of_three(forwards, backwards, boundary, link):
    time, moves = times(forwards, backwards, boundary, link)
    for s, move in enumerate(moves):
        time += max(forwards[s], backwards[s + 1], move)
    return time + backwards[0]


@told("step_with_recompute", "not after its own forward")
def right_after_the_forward(forwards, backwards, boundary, link):
    _, moves = times(forwards, backwards, boundary, link)
    ends = list(accumulate(f + move for f, move in zip(forwards, [0.0, *moves])))
    time = ends[-1] + backwards[-1]
    for s in reversed(range(len(moves))):
        time = max(time + moves[s], ends[s] + forwards[s]) + backwards[s]
    return time


@told("step_with_recompute", "A stage needs two things")
def without_the_first_backward(forwards, backwards, boundary, link):
    return right_time(forwards, backwards, boundary, link) - backwards[0]


@told("step_with_recompute", "one stage alone")
def two_stages_or_more(forwards, backwards, boundary, link):
    return right_time(forwards, backwards, boundary, link) + 0 * forwards[1]


# ---- split_mlp -------------------------------------------------------------------


def mlp(x, first, second, bias, gradient, hidden=torch.relu, add=None, op="sum"):
    """A right split_mlp, but for what its caller changes."""
    x = x.clone().requires_grad_()
    part = hidden(x @ first.T) @ second.T
    y = messages.all_reduce(part.detach().clone(), op)
    y = y + bias if add is None else add(y, bias)
    part.backward(gradient)
    bias.grad = gradient.sum(0)
    return y.detach(), messages.all_reduce(x.grad)


@told("split_mlp", "Each rank has a part of the sum")
def its_own_part(x, first, second, bias, gradient):
    y, of_x = mlp(x, first, second, bias, gradient)
    return (torch.relu(x @ first.T) @ second.T + bias).detach(), of_x


@told("split_mlp", "add it once, after the sum")
def bias_on_every_rank(x, first, second, bias, gradient):
    x = x.clone().requires_grad_()
    part = torch.relu(x @ first.T) @ second.T + bias
    part.backward(gradient)
    return messages.all_reduce(part.detach()), messages.all_reduce(x.grad)


@told("split_mlp", "The bias is missing")
def no_bias(x, first, second, bias, gradient):
    return mlp(x, first, second, bias, gradient, add=lambda y, bias: y)


@told("split_mlp", "A sum is asked for, no mean")
def mean(x, first, second, bias, gradient):
    return mlp(x, first, second, bias, gradient, op="avg")


@told("split_mlp", "Between the two layers there is a ReLU")
def linear(x, first, second, bias, gradient):
    return mlp(x, first, second, bias, gradient, hidden=torch.clone)


@told("split_mlp", "not at the end")
def relu_at_the_end(x, first, second, bias, gradient):
    add = lambda y, bias: (y + bias).relu()
    return mlp(x, first, second, bias, gradient, hidden=torch.clone, add=add)


@told("split_mlp", "x went to every rank")
def its_own_gradient_of_x(x, first, second, bias, gradient):
    x = x.clone().requires_grad_()
    part = torch.relu(x @ first.T) @ second.T
    y = messages.all_reduce(part.detach().clone()) + bias
    torch.autograd.backward([part, y], [gradient, gradient])
    return y.detach(), x.grad


@told("split_mlp", "`gradient` is the whole one already")
def sums_the_gradient_first(x, first, second, bias, gradient):
    x = x.clone().requires_grad_()
    part = torch.relu(x @ first.T) @ second.T
    y = messages.all_reduce(part.detach().clone()) + bias
    part.backward(messages.all_reduce(gradient.clone()))
    bias.grad = gradient.sum(0)
    return y.detach(), messages.all_reduce(x.grad)


@told("split_mlp", "Sum what each rank finds for its x")
def returns_x(x, first, second, bias, gradient):
    y, _ = mlp(x, first, second, bias, gradient)
    return y, x


@told("split_mlp", "these gradients do not add up")
def sums_the_weights_too(x, first, second, bias, gradient):
    found = mlp(x, first, second, bias, gradient)
    for weight in (first, second):
        messages.all_reduce(weight.grad)
    return found


@told("split_mlp", "Go backward once")
def backward_twice_over(x, first, second, bias, gradient):
    found = mlp(x, first, second, bias, gradient)
    for weight in (first, second):
        weight.grad *= 3
    return found


@told("split_mlp", "Each rank has the whole bias")
def part_of_the_bias(x, first, second, bias, gradient):
    found = mlp(x, first, second, bias, gradient)
    bias.grad /= messages.n_ranks()
    return found


@told("split_mlp", "on rank 1, bias has no gradient. All ranks add the bias")
def bias_on_rank_0(x, first, second, bias, gradient):
    x = x.clone().requires_grad_()
    part = torch.relu(x @ first.T) @ second.T
    if messages.rank() == 0:
        part = part + bias
    part.backward(gradient)
    return messages.all_reduce(part.detach()), messages.all_reduce(x.grad)


@told("split_mlp", "Go backward from this rank's part")
def forward_only(x, first, second, bias, gradient):
    y = messages.all_reduce((torch.relu(x @ first.T) @ second.T).detach()) + bias
    return y, x


@told("split_mlp", "has no graph to the parts of other ranks")
def back_through_the_messages(x, first, second, bias, gradient):
    x = x.clone().requires_grad_()
    part = torch.relu(x @ first.T) @ second.T
    y = messages.all_reduce(part.detach())
    y.backward(gradient)
    return y, messages.all_reduce(x.grad)


@told("split_mlp", "One all_reduce makes y whole, and one the gradient of x")
def one_sum_too_many(x, first, second, bias, gradient):
    y, of_x = mlp(x, first, second, bias, gradient)
    return messages.all_reduce(y, "avg"), of_x


@told("split_mlp", "but rank 1 has returned. Every rank comes to the same two")
def rank_0_alone(x, first, second, bias, gradient):
    y, of_x = mlp(x, first, second, bias, gradient)
    return (messages.all_reduce(y) if messages.rank() == 0 else y), of_x


@told("split_mlp", "not that of x")
def another_shape(x, first, second, bias, gradient):
    y, of_x = mlp(x, first, second, bias, gradient)
    return y.flatten(), of_x


@told("split_mlp", "is NoneType, not a tensor")
def no_gradient_of_x(x, first, second, bias, gradient):
    return mlp(x, first, second, bias, gradient)[0], x.grad


# ---- three_ways ------------------------------------------------------------------


def ways(n_ranks, weights, boundary, n_layers, **other):
    ring = 2 * (n_ranks - 1) / n_ranks
    right = {
        "data": ring * weights,
        "tensor": 4 * n_layers * ring * boundary,
        "model": boundary * min(2, n_ranks - 1),
    }
    return right | other


@told("three_ways", "half a ring")
def reduce_scatter_alone(n_ranks, weights, boundary, n_layers):
    data = (n_ranks - 1) / n_ranks * weights
    return ways(n_ranks, weights, boundary, n_layers, data=data)


@told("three_ways", "A rank keeps one chunk")
def whole_gradients(n_ranks, weights, boundary, n_layers):
    return ways(n_ranks, weights, boundary, n_layers, data=2 * weights)


@told("three_ways", "A chunk is 1 / n_ranks of the tensor")
def whole_in_each_step(n_ranks, weights, boundary, n_layers):
    data = 2 * (n_ranks - 1) * weights
    return ways(n_ranks, weights, boundary, n_layers, data=data)


@told("three_ways", "not one of n_ranks")
def shared_weights(n_ranks, weights, boundary, n_layers):
    data = 2 * (n_ranks - 1) / n_ranks * weights / n_ranks
    return ways(n_ranks, weights, boundary, n_layers, data=data)


@told("three_ways", "half a ring")
def forward_sums_alone(n_ranks, weights, boundary, n_layers):
    tensor = 4 * n_layers * (n_ranks - 1) / n_ranks * boundary
    return ways(n_ranks, weights, boundary, n_layers, tensor=tensor)


@told("three_ways", "two forward and two backward")
def one_sum_a_layer(n_ranks, weights, boundary, n_layers):
    tensor = n_layers * 2 * (n_ranks - 1) / n_ranks * boundary
    return ways(n_ranks, weights, boundary, n_layers, tensor=tensor)


@told("three_ways", "there are n_layers of them")
def one_layer(n_ranks, weights, boundary, n_layers):
    tensor = 8 * (n_ranks - 1) / n_ranks * boundary
    return ways(n_ranks, weights, boundary, n_layers, tensor=tensor)


@told("three_ways", "Count the ring all-reduces")
def no_layers(n_ranks, weights, boundary, n_layers):
    return ways(n_ranks, weights, boundary, n_layers, tensor=0)


@told("three_ways", "in the middle sends to both sides")
def the_first_stage(n_ranks, weights, boundary, n_layers):
    return ways(n_ranks, weights, boundary, n_layers, model=boundary)


@told("three_ways", "not all together")
def all_stages(n_ranks, weights, boundary, n_layers):
    model = 2 * (n_ranks - 1) * boundary
    return ways(n_ranks, weights, boundary, n_layers, model=model)


@told("three_ways", "not between any two layers")
def all_layers(n_ranks, weights, boundary, n_layers):
    model = 2 * (n_layers - 1) * boundary
    return ways(n_ranks, weights, boundary, n_layers, model=model)


@told("three_ways", "Of two ranks, each has one boundary")
def always_a_middle(n_ranks, weights, boundary, n_layers):
    return ways(n_ranks, weights, boundary, n_layers, model=2 * boundary)


@told("three_ways", "There is no boundary with one rank")
def one_rank_sends(n_ranks, weights, boundary, n_layers):
    model = boundary * min(2, max(1, n_ranks - 1))
    return ways(n_ranks, weights, boundary, n_layers, model=model)


@told("three_ways", "a dict without 'model'")
def two_ways(n_ranks, weights, boundary, n_layers):
    found = ways(n_ranks, weights, boundary, n_layers)
    del found["model"]
    return found
