"""Wrong answers to the exercises on a single GPU, and what each hears."""

import math
import os
import sys
import time

import torch
import torch.nn.functional as F
from wrong.notes import notes

from labs import single_gpu as lab
from labs.kit import toy
from labs.kit.split import chunk_sizes

WRONG, told = notes()


# ---- any exercise ----------------------------------------------------------------


@told("throughput", "returned None, not a number")
@told("update", "The momenta are what they were")
@told("accumulate", "returned None, not a number")
@told("adamw", "The first moments are what they were")
@told("accumulate_stream", "returned None, not a number")
@told("microbatch_sizes", "There is a way")
@told("epoch_time", "returned None, not a number")
@told("tokens_to_fill", "There is a number")
def nothing(*arguments):
    pass


@told("throughput", "returned str, not a number")
@told("accumulate", "returned str, not a number")
@told("accumulate_stream", "returned str, not a number")
@told("microbatch_sizes", "returned str, not a list of sizes")
@told("epoch_time", "returned str, not a number")
@told("tokens_to_fill", "returned str, not a whole number")
def text(*arguments):
    return "12"


@told("epoch_time", "Does a loop never end?")
def endless(*arguments):
    while True:
        pass


@told("microbatch_sizes", "Does a loop never end?")
def asleep(*arguments):
    time.sleep(1000)


@told("accumulate_stream", "more than 1 GB of memory")
def hungry(*arguments):
    return bytearray(1 << 34)


@told("adamw", "os._exit(0)")
def gone(*arguments):
    os._exit(0)


@told("tokens_to_fill", "called sys.exit(1)")
def leaving(*arguments):
    sys.exit(1)


@told("adamw", "raised ZeroDivisionError: division by zero (")
@told("throughput", "raised ZeroDivisionError: division by zero (")
def broken(*arguments):
    return 1 / 0


@told("epoch_time", "raised TypeError")
def too_few_parameters():
    return 0


@told("accumulate", "returned nan, not a finite number")
def not_a_number(*arguments):
    return float("nan")


@told("microbatch_sizes", "returned generator, not a list of sizes")
@told("epoch_time", "returned generator, not a number")
def lazy(*arguments):
    yield 1


# ---- throughput ------------------------------------------------------------------


@told("throughput", "Rates do not add up")
def added(load, train, prefetch=False):
    return load + train


@told("throughput", "another mean")
def mean(load, train, prefetch=False):
    return (load + train) / 2


@told("throughput", "in turn, times add up")
def always_the_slower(load, train, prefetch=False):
    return min(load, train)


@told("throughput", "go on side by side")
def always_in_turn(load, train, prefetch=False):
    return 1 / (1 / load + 1 / train)


@told("throughput", "has to wait for the slower")
def the_faster(load, train, prefetch=False):
    return max(load, train) if prefetch else lab.throughput(load, train)


@told("throughput", "That is time per sample")
def time_per_sample(load, train, prefetch=False):
    return 1 / load + 1 / train


# ---- update ----------------------------------------------------------------------


def sgd(into_momenta, step):
    """An update from two formulas: the new momentum, and how the weight moves."""

    @torch.no_grad()
    def answer(parameters, momenta, lr, momentum):
        for w, v in zip(parameters, momenta):
            v.copy_(into_momenta(v, w.grad, momentum, lr))
            w.add_(step(v, w.grad, momentum, lr))

    return answer


def good_momenta(v, g, momentum, lr):
    return momentum * v + g


def good_step(v, g, momentum, lr):
    return -lr * v


told("update", "uphill")(sgd(good_momenta, lambda v, g, m, lr: lr * v))
told("update", "not the gradients alone")(
    sgd(good_momenta, lambda v, g, m, lr: -lr * g)
)
told("update", "Nesterov")(sgd(good_momenta, lambda v, g, m, lr: -lr * (g + m * v)))
told("update", "That forgets lr")(sgd(good_momenta, lambda v, g, m, lr: -v))
told("update", "not 1 - momentum of it")(
    sgd(lambda v, g, m, lr: m * v + (1 - m) * g, good_step)
)
told("update", "add the gradient")(sgd(lambda v, g, m, lr: g, good_step))
told("update", "add the gradient")(sgd(lambda v, g, m, lr: v + g, good_step))


@told("update", "under torch.no_grad()")
def watched_by_autograd(parameters, momenta, lr, momentum):
    for w, v in zip(parameters, momenta):
        v *= momentum
        v += w.grad
        w -= lr * v


@told("update", "The weights are what they were: change the tensors in place")
@torch.no_grad()
def new_weights(parameters, momenta, lr, momentum):
    for i, (w, v) in enumerate(zip(parameters, momenta)):
        v.mul_(momentum).add_(w.grad)
        parameters[i] = w - lr * v


@told("update", "The momenta are what they were")
@torch.no_grad()
def new_momenta(parameters, momenta, lr, momentum):
    for w, v in zip(parameters, momenta):
        v = momentum * v + w.grad
        w -= lr * v


# ---- accumulate ------------------------------------------------------------------


def cut(inputs, targets, n):
    return list(enumerate(zip(inputs.tensor_split(n), targets.tensor_split(n))))


def by_parts(trainer, inputs, targets, n_microbatches, divisor):
    """Accumulate, with another divisor of each microbatch's sum."""
    loss = 0.0
    for i, (x, t) in cut(inputs, targets, n_microbatches):
        loss += trainer.forward(i, x, t, divisor(t))
        trainer.backward(i)
    return loss


@told("accumulate", "count those of the whole batch")
def weighted_means(trainer, inputs, targets, n_microbatches):
    """Right but for a microbatch without a valid target."""
    weight = lambda t: toy.n_valid(t) / toy.n_valid(targets)
    divisor = lambda t: toy.n_valid(t) / weight(t)
    return by_parts(trainer, inputs, targets, n_microbatches, divisor)


@told("accumulate", "each weighs more")
def mean_of_means(trainer, inputs, targets, n_microbatches):
    divisor = lambda t: toy.n_valid(t) * n_microbatches
    return by_parts(trainer, inputs, targets, n_microbatches, divisor)


@told("accumulate", "a mean for each microbatch")
def sum_of_means(trainer, inputs, targets, n_microbatches):
    return by_parts(trainer, inputs, targets, n_microbatches, toy.n_valid)


@told("accumulate", "of the sum over the targets")
def sum_of_sums(trainer, inputs, targets, n_microbatches):
    return by_parts(trainer, inputs, targets, n_microbatches, lambda t: 1)


@told("accumulate", "masked do not count")
def all_targets(trainer, inputs, targets, n_microbatches):
    divisor = lambda t: len(targets)
    return by_parts(trainer, inputs, targets, n_microbatches, divisor)


@told("accumulate", "comes before the next one's forward")
def forwards_first(trainer, inputs, targets, n_microbatches):
    valid, loss = toy.n_valid(targets), 0.0
    for i, (x, t) in cut(inputs, targets, n_microbatches):
        loss += trainer.forward(i, x, t, valid)
    for i in range(n_microbatches):
        trainer.backward(i)
    return loss


@told("accumulate", "each microbatch has a backward")
def never_back(trainer, inputs, targets, n_microbatches):
    return trainer.forward(0, inputs, targets, toy.n_valid(targets))


@told("accumulate", "of the last microbatch alone")
def cleared_each_time(trainer, inputs, targets, n_microbatches):
    valid, loss = toy.n_valid(targets), 0.0
    for i, (x, t) in cut(inputs, targets, n_microbatches):
        trainer.module.zero_grad()
        loss += trainer.forward(i, x, t, valid)
        trainer.backward(i)
    return loss


@told("accumulate", "The gradient is right")
def last_loss(trainer, inputs, targets, n_microbatches):
    lab.accumulate(trainer, inputs, targets, n_microbatches)
    x, t = (part.tensor_split(n_microbatches)[-1] for part in (inputs, targets))
    return toy.loss_sum(trainer.module(x), t) / max(int((t != toy.IGNORE).sum()), 1)


@told("accumulate", "of the whole batch")
def drops_the_rest(trainer, inputs, targets, n_microbatches):
    size, valid, loss = len(inputs) // n_microbatches, toy.n_valid(targets), 0.0
    for i in range(n_microbatches):
        part = slice(i * size, (i + 1) * size)
        loss += trainer.forward(i, inputs[part], targets[part], valid)
        trainer.backward(i)
    return loss


# ---- adamw -----------------------------------------------------------------------


def adam(length=None, first=0, decay="before", means=None, squares=None, skip=True,
         correct=(True, True), power=True, sign=1):  # fmt: skip
    """An AdamW with mistakes.

    length: of (corrected square, eps). first: what is added to the step's number.
    correct: which of the means. power: beta**step, not beta.
    """

    @torch.no_grad()
    def answer(parameters, mean_list, square_list, step, lr, betas, eps, weight_decay):
        k = step + first if power else 1
        for w, mean, square in zip(parameters, mean_list, square_list):
            if w.grad is None and skip:
                continue
            g = torch.zeros_like(w) if w.grad is None else w.grad
            if decay == "gradient":
                g = g + weight_decay * w
            mean.copy_((means or good_mean)(mean, g, betas[0]))
            square.copy_((squares or good_mean)(square, g**2, betas[1]))
            corrections = [
                1 - beta**k if needed else 1 for beta, needed in zip(betas, correct)
            ]
            root = (length or good_length)(square / corrections[1], eps)
            move = sign * lr * mean / corrections[0] / root
            if decay == "before":
                w *= 1 - lr * weight_decay
            elif decay == "without lr":
                w *= 1 - weight_decay
            elif decay == "growing":
                w *= 1 + lr * weight_decay
            w -= move
            if decay == "after":
                w *= 1 - lr * weight_decay

    return answer


def good_mean(mean, new, beta):
    return beta * mean + (1 - beta) * new


def good_length(square, eps):
    return square.sqrt() + eps


for words, mistake in [
    ("Both moments begin at zero", {"correct": (False, False)}),
    ("The second moments begin at zero too", {"correct": (True, False)}),
    ("The first moments begin at zero too", {"correct": (False, True)}),
    ("uphill", {"sign": -1}),
    ("from 0 the correction is 0/0", {"first": -1}),
    ("This step has the number `step`", {"first": 1}),
    ("it is 1 - beta**step, not beta", {"power": False}),
    ("eps is added last", {"length": lambda square, eps: (square + eps).sqrt()}),
    ("eps is added last", {"length": lambda square, eps: (square + eps**2).sqrt()}),
    ("over the root of", {"length": lambda square, eps: square + eps}),
    ("with decay as a part of the gradient", {"decay": "gradient"}),
    ("do not decay", {"decay": "never"}),
    ("not weight_decay", {"decay": "without lr"}),
    ("subtract it", {"decay": "growing"}),
    ("as they were before this step", {"decay": "after"}),
    ("stays as it is, moments too", {"skip": False}),
    ("1 - beta of the gradient comes in", {"means": lambda m, g, beta: beta * m + g}),
    (
        "1 - beta of the gradient comes in",
        {"means": lambda m, g, beta: (1 - beta) * m + beta * g},
    ),
    (
        "in the gradient, 1 - beta comes in",
        {"squares": lambda s, g2, beta: beta * s + (1 - beta) * g2.sqrt()},
    ),
    (
        "in the gradient, 1 - beta comes in",
        {"squares": lambda s, g2, beta: good_mean(s, g2.mean(), beta)},
    ),
]:
    told("adamw", words)(adam(**mistake))


@told("adamw", "The weights are what they were: change the tensors in place")
@torch.no_grad()
def returns_new_weights(parameters, means, squares, step, lr, betas, eps, decay):
    copies = [w.clone() for w in parameters]
    for copy, w in zip(copies, parameters):
        copy.grad = w.grad
    adam()(copies, means, squares, step, lr, betas, eps, decay)
    return copies


@told("adamw", "The second moments are what they were")
@torch.no_grad()
def forgets_the_squares(parameters, means, squares, step, lr, betas, eps, decay):
    copies = [square.clone() for square in squares]
    adam()(parameters, means, copies, step, lr, betas, eps, decay)


@told("adamw", "under torch.no_grad()")
def with_autograd(parameters, means, squares, step, lr, betas, eps, decay):
    for w, mean, square in zip(parameters, means, squares):
        mean += (1 - betas[0]) * (w.grad - mean)
        square += (1 - betas[1]) * (w.grad**2 - square)
        w -= lr * mean


@told("adamw", "whose .grad is None stays")
@torch.no_grad()
def needs_every_gradient(parameters, means, squares, step, lr, betas, eps, decay):
    for w in parameters:
        w.grad *= 1
    adam()(parameters, means, squares, step, lr, betas, eps, decay)


# ---- accumulate_stream -----------------------------------------------------------


def summed(model, inputs, targets):
    return toy.loss_sum(model(inputs), targets)


def count(targets):
    return int((targets != toy.IGNORE).sum())


def scale(model, divisor):
    for weights in model.parameters():
        weights.grad /= divisor


@told("accumulate_stream", "before you ask for the next one")
def all_at_once(model, microbatches):
    inputs, targets = map(torch.cat, zip(*microbatches))
    loss = summed(model, inputs, targets) / count(targets)
    loss.backward()
    return loss


@told("accumulate_stream", "before you ask for the next one")
def backward_at_the_end(model, microbatches):
    loss = n = 0
    for x, t in microbatches:
        loss, n = loss + summed(model, x, t), n + count(t)
    (loss / n).backward()
    return loss / n


@told("accumulate_stream", "can be read only once")
def counts_first(model, microbatches):
    n, loss = sum(count(t) for _, t in microbatches), 0.0
    for x, t in microbatches:
        part = summed(model, x, t) / n
        part.backward()
        loss += part.item()
    return loss


@told("accumulate_stream", "each weighs more")
def means_of_microbatches(model, microbatches):
    loss = n = 0
    for x, t in microbatches:
        part = summed(model, x, t) / max(count(t), 1)
        part.backward()
        loss, n = loss + part.item(), n + 1
    scale(model, n)
    return loss / n


@told("accumulate_stream", "a mean for each microbatch")
def means_added(model, microbatches):
    loss = 0.0
    for x, t in microbatches:
        part = summed(model, x, t) / max(count(t), 1)
        part.backward()
        loss += part.item()
    return loss


@told("accumulate_stream", "of the sum over the targets")
def never_divided(model, microbatches):
    loss = n = 0
    for x, t in microbatches:
        part = summed(model, x, t)
        part.backward()
        loss, n = loss + part.item(), n + count(t)
    return loss / n


@told("accumulate_stream", "masked do not count")
def divided_by_samples(model, microbatches):
    loss = n = 0
    for x, t in microbatches:
        part = summed(model, x, t)
        part.backward()
        loss, n = loss + part.item(), n + len(t)
    scale(model, n)
    return loss / n


@told("accumulate_stream", "what comes first weighs more")
def divided_by_the_count_so_far(model, microbatches):
    loss = n = 0
    for x, t in microbatches:
        n += count(t)
        part = summed(model, x, t) / max(n, 1)
        part.backward()
        loss += part.item()
    return loss


@told("accumulate_stream", "can do so at the end")
def scaled_each_time(model, microbatches):
    loss = n = 0
    for x, t in microbatches:
        n += count(t)
        part = summed(model, x, t)
        part.backward()
        scale(model, max(n, 1))
        loss += part.item()
    return loss / n


@told("accumulate_stream", "The gradient is right")
def sum_of_losses(model, microbatches):
    loss = n = 0
    for x, t in microbatches:
        part = summed(model, x, t)
        part.backward()
        loss, n = loss + part.item(), n + count(t)
    scale(model, n)
    return loss


@told("accumulate_stream", "its mean would be 0/0")
def mean_by_torch(model, microbatches):
    """Right but for a microbatch without a target: 0/0 times 0 is no number."""
    loss = n = 0
    for x, t in microbatches:
        part = F.cross_entropy(model(x), t, ignore_index=toy.IGNORE) * count(t)
        part.backward()
        loss, n = loss + part.item(), n + count(t)
    scale(model, n)
    return loss / n


# ---- microbatch_sizes ------------------------------------------------------------


def first_fit(batch, room, per_sample):
    for n in range(1, batch + 1):
        if chunk_sizes(batch, n)[0] * per_sample <= room:
            return chunk_sizes(batch, n)
    return None


def room_of(budget, n_parameters, rule):
    return budget - sum(lab.memory(n_parameters, rule))


@told("microbatch_sizes", "are in the same memory")
def forgets_parameters(batch, budget, n_parameters, rule, per_sample):
    return first_fit(batch, budget, per_sample)


@told("microbatch_sizes", "have gradients and optimizer states beside them")
def parameters_alone(batch, budget, n_parameters, rule, per_sample):
    room = budget - lab.memory(n_parameters, rule)[0]
    return first_fit(batch, room, per_sample)


@told("microbatch_sizes", "exactly the budget")
def below_the_budget(batch, budget, n_parameters, rule, per_sample):
    return first_fit(batch, room_of(budget, n_parameters, rule) - 1, per_sample)


@told("microbatch_sizes", "may differ by one sample")
def filled_up(batch, budget, n_parameters, rule, per_sample):
    largest = min(batch, room_of(budget, n_parameters, rule) // per_sample)
    if largest < 1:
        return None
    full, rest = divmod(batch, largest)
    return [largest] * full + [rest] * (rest > 0)


@told("microbatch_sizes", "The larger ones come first")
def smaller_first(batch, budget, n_parameters, rule, per_sample):
    sizes = first_fit(batch, room_of(budget, n_parameters, rule), per_sample)
    return sizes and sizes[::-1]


@told("microbatch_sizes", "samples; the batch has")
def without_the_rest(batch, budget, n_parameters, rule, per_sample):
    largest = min(batch, room_of(budget, n_parameters, rule) // per_sample)
    return [largest] * (batch // largest) if largest > 0 else None


@told("microbatch_sizes", "as few as will do")
def one_by_one(batch, budget, n_parameters, rule, per_sample):
    return [1] * batch if room_of(budget, n_parameters, rule) >= per_sample else None


@told("microbatch_sizes", "Not even one sample fits")
def one_sample_at_least(batch, budget, n_parameters, rule, per_sample):
    sizes = first_fit(batch, room_of(budget, n_parameters, rule), per_sample)
    return sizes or [1] * batch


@told("microbatch_sizes", "raised ZeroDivisionError")
def always_divides(batch, budget, n_parameters, rule, per_sample):
    largest = min(batch, room_of(budget, n_parameters, rule) // per_sample)
    return chunk_sizes(batch, -(-batch // largest))


@told("microbatch_sizes", "returned int, not a list of sizes")
def the_largest(batch, budget, n_parameters, rule, per_sample):
    return room_of(budget, n_parameters, rule) // per_sample


# ---- epoch_time ------------------------------------------------------------------


def epoch(loads, train, n_loaders, ahead, loader=None, gives_back="taken"):
    """An epoch with mistakes. loader: of a batch's number and when loaders are free."""
    free, taken, done = [0] * n_loaders, [], [0]
    loader = loader or (lambda i, free: free.index(min(free)))
    for i, load in enumerate(loads):
        back = taken if gives_back == "taken" else done[1:]
        k = loader(i, free)
        free[k] = max(free[k], back[i - ahead] if i >= ahead else 0) + load
        taken.append(max(free[k], done[-1]))
        done.append(taken[-1] + train)
    return done[-1]


@told("epoch_time", "go on side by side")
def in_turn(loads, train, n_loaders, ahead):
    return sum(loads) + len(loads) * train


@told("epoch_time", "a first loading, or a last training")
def by_the_pace(loads, train, n_loaders, ahead):
    return max(sum(loads) / n_loaders, len(loads) * train)


@told("epoch_time", "only where all batches are alike")
def pace_after_the_first(loads, train, n_loaders, ahead):
    rest = max(sum(loads[1:]) / n_loaders + train, len(loads) * train)
    return loads[0] + rest


@told("epoch_time", "with one loader")
def one_loader(loads, train, n_loaders, ahead):
    return epoch(loads, train, 1, ahead)


@told("epoch_time", "may not run ahead that far")
def endless_shelf(loads, train, n_loaders, ahead):
    return epoch(loads, train, n_loaders, len(loads))


@told("epoch_time", "when training takes it")
def place_until_the_end(loads, train, n_loaders, ahead):
    return epoch(loads, train, n_loaders, ahead, gives_back="done")


@told("epoch_time", "one place too many")
def one_place_more(loads, train, n_loaders, ahead):
    return epoch(loads, train, n_loaders, ahead + 1)


@told("epoch_time", "one place too few")
def one_place_fewer(loads, train, n_loaders, ahead):
    return epoch(loads, train, n_loaders, max(1, ahead - 1))


@told("epoch_time", "do not take turns")
def loaders_in_rotation(loads, train, n_loaders, ahead):
    """As PyTorch does it: batch i goes to loader i modulo their number."""
    turn = lambda i, free: i % len(free)
    return epoch(loads, train, n_loaders, ahead, loader=turn)


@told("epoch_time", "a first loading, or a last training")
def begin_of_the_last(loads, train, n_loaders, ahead):
    return epoch(loads, train, n_loaders, ahead) - train


# ---- tokens_to_fill --------------------------------------------------------------


def fewest(n_in, n_out, peak, bandwidth, nbytes, moved=(1, 1, 1), work=2, up=math.ceil):
    """The fewest tokens, of a count with mistakes."""
    inputs, weights, outputs = moved
    per_token = nbytes * (inputs * n_in + outputs * n_out) / bandwidth
    saved = work * n_in * n_out / peak - per_token
    once = weights * nbytes * n_in * n_out / bandwidth
    return up(once / saved) if saved > 0 else None


@told("tokens_to_fill", "not the weights alone")
def weights_alone(n_in, n_out, peak, bandwidth, nbytes=2):
    return fewest(n_in, n_out, peak, bandwidth, nbytes, moved=(0, 1, 0))


@told("tokens_to_fill", "outputs have to be written")
def no_outputs(n_in, n_out, peak, bandwidth, nbytes=2):
    return fewest(n_in, n_out, peak, bandwidth, nbytes, moved=(1, 1, 0))


@told("tokens_to_fill", "inputs have to be read")
def no_inputs(n_in, n_out, peak, bandwidth, nbytes=2):
    return fewest(n_in, n_out, peak, bandwidth, nbytes, moved=(0, 1, 1))


@told("tokens_to_fill", "weights have to be read")
def no_weights(n_in, n_out, peak, bandwidth, nbytes=2):
    n = fewest(n_in, n_out, peak, bandwidth, nbytes, moved=(1, 0, 1))
    return n if n is None else max(1, n)


@told("tokens_to_fill", "A multiply-add is two FLOPs")
def one_flop(n_in, n_out, peak, bandwidth, nbytes=2):
    return fewest(n_in, n_out, peak, bandwidth, nbytes, work=1)


@told("tokens_to_fill", "A value has `nbytes` bytes")
def values_for_bytes(n_in, n_out, peak, bandwidth, nbytes=2):
    return fewest(n_in, n_out, peak, bandwidth, 1)


@told("tokens_to_fill", "expected")
def two_bytes_always(n_in, n_out, peak, bandwidth, nbytes=2):
    return fewest(n_in, n_out, peak, bandwidth, 2)


@told("tokens_to_fill", "round up")
def rounded_down(n_in, n_out, peak, bandwidth, nbytes=2):
    return fewest(n_in, n_out, peak, bandwidth, nbytes, up=math.floor)


@told("tokens_to_fill", "One fewer will do")
def one_more(n_in, n_out, peak, bandwidth, nbytes=2):
    return fewest(n_in, n_out, peak, bandwidth, nbytes, up=lambda n: math.floor(n) + 2)


@told("tokens_to_fill", "no number will do")
def negative(n_in, n_out, peak, bandwidth, nbytes=2):
    saved = 2 * n_in * n_out / peak - nbytes * (n_in + n_out) / bandwidth
    return math.ceil(nbytes * n_in * n_out / bandwidth / saved)


@told("tokens_to_fill", "returned float, not a whole number")
def not_rounded(n_in, n_out, peak, bandwidth, nbytes=2):
    return fewest(n_in, n_out, peak, bandwidth, nbytes, up=float)
