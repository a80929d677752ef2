"""What a right answer to each exercise on a single GPU is, without the answers.

    check("adamw", adamw)    prints the verdict on an answer

Optimizers are judged beside those of torch.optim, accumulated gradients beside one step
on the whole batch, data loading beside a simulation that goes tick by tick.
"""

import math
import operator
import weakref
from bisect import bisect_left
from itertools import accumulate

import torch
from torch import nn

from labs import single_gpu as lab
from labs.checks import (
    Exercise,
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
from labs.kit import messages, toy
from labs.kit.split import chunk_sizes


def check(name, answer, seed=0):
    """Print the verdict on an answer to the exercise `name`."""
    print(judge(EXERCISES[name], answer, seed))


# ---- an optimizer's update -------------------------------------------------------

ONE, MORE, EPS, DECAY, NO_GRADIENT = (
    "one step",
    "three steps",
    "three steps with a large eps",
    "one step with weight decay",
    "two steps, the second parameter without a gradient",
)
BETAS = 0.8, 0.99
IN_PLACE = "are what they were: change the tensors in place."


class OptimizerStep(Exercise):
    """An update of the weights by hand, in place, beside an optimizer of torch.

    kept: what a verdict calls the tensors that an optimizer keeps -> torch's name.
    """

    def settings(self, kind):
        """Return (how many steps, torch's options)."""
        raise NotImplementedError

    def mistakes(self, kind, seed, right):
        """Return a dict: sentence -> the facts that this mistake gives, as a list."""
        raise NotImplementedError

    def cases(self, random):
        return [(kind, random.randint(0, 10**6)) for kind in self.kinds]

    def arguments(self, kind, seed):
        return kind

    def problem(self, kind, seed):
        """Return two parameters, and a function that gives them new gradients."""
        random = torch.Generator().manual_seed(seed)

        def draw():
            values = torch.randn(2, 1, generator=random, dtype=torch.float64)
            return values.to(messages.device)

        def backward():
            for parameter in parameters:
                parameter.grad = 3 * draw()
            if kind == NO_GRADIENT:
                parameter.grad = None

        parameters = [nn.Parameter(draw()) for _ in range(2)]
        return parameters, backward

    def facts(self, answer, kind, seed):
        parameters, backward = self.problem(kind, seed)
        kept = [[torch.zeros_like(w) for w in parameters] for _ in self.kept]
        n_steps, options = self.settings(kind)
        for step in range(1, n_steps + 1):
            backward()
            given = self.given(step, **options)
            lists = map(list, [parameters, *kept])  # what an answer puts in is its own
            ask(answer, *lists, *given, read=lambda value: None)
        found = {name: flat(*tensors) for name, tensors in zip(self.kept, kept)}
        return {**found, "weights": flat(*parameters)}

    def expected(self, kind, seed, optimizer=None, since=0, **other):
        """The truth; or, of a mistake, what comes of it: with another optimizer of
        torch, with other options, or with steps that count on from `since`."""
        parameters, backward = self.problem(kind, seed)
        n_steps, options = self.settings(kind)
        optimizer = (optimizer or self.optimizer)(parameters, **{**options, **other})
        for w in parameters:
            zeros = {name: torch.zeros_like(w) for name in self.kept.values()}
            optimizer.state[w] = {"step": torch.tensor(float(since)), **zeros}
        for _ in range(n_steps):
            backward()
            optimizer.step()
        kept = {
            name: flat(*(optimizer.state[w][torchs] for w in parameters))
            for name, torchs in self.kept.items()
        }
        return {**kept, "weights": flat(*parameters)}

    def hint(self, found, kind, seed):
        right = self.expected(kind, seed)
        untouched = {name: [0.0] * len(right[name]) for name in self.kept}
        untouched["weights"] = flat(*self.problem(kind, seed)[0])
        for name in right:
            if equal(found[name], untouched[name]):
                return f"The {name} {IN_PLACE}"
        wrong = next(name for name in right if not equal(found[name], right[name]))
        known = usual(list(found.values()), self.mistakes(kind, seed, right))
        return known or self.remedy(wrong, kind)

    def advice(self, trouble, kind, seed):
        if "leaf" in trouble:
            return "Autograd watches the weights: change them under torch.no_grad()."
        return ""

    def of(self, kind, seed, **mistake):
        return list(self.expected(kind, seed, **mistake).values())

    def moved(self, kind, seed, right, factor):
        """Return the right facts, but weights that went `factor` times as far."""
        pairs = zip(flat(*self.problem(kind, seed)[0]), right["weights"])
        weights = [old + factor * (new - old) for old, new in pairs]
        return [*(right[name] for name in self.kept), weights]


class Update(OptimizerStep):
    name = "update"
    kinds = ONE, MORE
    kept = {"momenta": "momentum_buffer"}
    optimizer = torch.optim.SGD

    def settings(self, kind):
        return {ONE: 1, MORE: 3}[kind], {"lr": 0.1, "momentum": 0.7}

    def given(self, step, lr, momentum):
        return lr, momentum

    def mistakes(self, kind, seed, right):
        pure = self.expected(kind, seed, momentum=0)["weights"]
        return {
            "That goes uphill: subtract.": self.moved(kind, seed, right, -1),
            "That forgets lr.": self.moved(kind, seed, right, 10),
            "The gradient is added as it is, not 1 - momentum of it.":
                self.of(kind, seed, dampening=0.7),
            "The momenta are right; weights follow them, not the gradients alone.":
                [right["momenta"], pure],
            "That looks one step ahead (Nesterov); here weights follow the momenta.":
                self.of(kind, seed, nesterov=True),
        }  # fmt: skip

    def remedy(self, wrong, kind):
        if wrong == "momenta":
            return "Of the old momenta the part `momentum` stays; add the gradient."
        return "A weight moves by lr times its momentum, as it is after this gradient."


class AdamW(OptimizerStep):
    name, points = "adamw", 3
    kinds = ONE, MORE, EPS, DECAY, NO_GRADIENT
    kept = {"first moments": "exp_avg", "second moments": "exp_avg_sq"}
    optimizer = torch.optim.AdamW

    def settings(self, kind):
        return {ONE: 1, DECAY: 1, NO_GRADIENT: 2}.get(kind, 3), {
            "lr": 0.1,
            "betas": BETAS,
            "eps": 0.5 if kind == EPS else 1e-9,
            "weight_decay": 0.3 if kind in (DECAY, NO_GRADIENT) else 0.0,
        }

    def given(self, step, lr, betas, eps, weight_decay):
        return step, lr, betas, eps, weight_decay

    def mistakes(self, kind, seed, right):
        if kind == DECAY:
            return self.decayed(kind, seed)
        divide = "divide by 1 - beta**step"
        factors = {
            f"Both moments begin at zero and are too small at first: {divide}.":
                (1 - BETAS[0]) / (1 - BETAS[1]) ** 0.5,
            f"The second moments begin at zero too: {divide}.": (1 - BETAS[1]) ** -0.5,
            f"The first moments begin at zero too: {divide}.": 1 - BETAS[0],
            "That goes uphill: subtract.": -1,
        }  # fmt: skip
        return {
            "This step has the number `step`, as it is given: the first is 1.":
                self.of(kind, seed, since=1),
            **{
                text: self.moved(kind, seed, right, factor)
                for text, factor in factors.items()
            },
        }  # fmt: skip

    def decayed(self, kind, seed):
        lr, decay = 0.1, 0.3
        *kept, weights = pure = self.of(kind, seed, weight_decay=0)
        before = flat(*self.problem(kind, seed)[0])
        return {
            "That is Adam, with decay as a part of the gradient; in AdamW the "
            "moments do not see it.": self.of(kind, seed, optimizer=torch.optim.Adam),
            "The weights do not decay.": pure,
            "Weights lose the part lr * weight_decay of themselves, not weight_decay.":
                self.of(kind, seed, weight_decay=decay / lr),
            "Decay makes weights smaller: subtract it.":
                [*kept, [w + lr * decay * old for w, old in zip(weights, before)]],
            "What decays are the weights as they were before this step.":
                [*kept, [w - lr * decay * w for w in weights]],
        }  # fmt: skip

    def hint(self, found, kind, seed):
        if not all(map(math.isfinite, found["weights"])):
            return "The first step has the number 1: from 0 the correction is 0/0."
        return super().hint(found, kind, seed)

    def remedy(self, wrong, kind):
        if kind == NO_GRADIENT:
            return "A parameter whose .grad is None stays as it is, moments too."
        if wrong == "first moments":
            return "The part beta of a mean stays; 1 - beta of the gradient comes in."
        if wrong == "second moments":
            return "Of the square of each number in the gradient, 1 - beta comes in."
        return {
            ONE: "The first moment over the root of the second, both corrected.",
            EPS: "eps is added last: to the root of the corrected second moment.",
            DECAY: "The weights before this step decay, by lr * weight_decay of them.",
        }.get(kind, "One step is right, three are not: it is 1 - beta**step, not beta.")

    def advice(self, trouble, kind, seed):
        if kind == NO_GRADIENT:
            return "A parameter whose .grad is None stays as it is."
        return super().advice(trouble, kind, seed)


# ---- gradients of microbatches ---------------------------------------------------

ALIVE = "microbatches alive at once"


class Gradient(Exercise):
    """The gradient of a batch from its microbatches, beside one step on all of it.

    A case has a pair for each microbatch: its samples, and how many have a target.
    """

    def arguments(self, shapes, seed):
        valid = ", ".join(f"{valid} of {size}" for size, valid in shapes)
        return f"microbatches with {valid} targets valid"

    def problem(self, shapes, seed):
        """Return the model and the microbatches, [(inputs, targets)]."""
        torch.manual_seed(seed)
        model = nn.Linear(1, 2).to(messages.device, torch.float64)
        microbatches = []
        for size, valid in shapes:
            inputs = torch.randn(size, 1, dtype=torch.float64)
            targets = torch.randint(2, (size,))
            targets[: size - valid] = toy.IGNORE
            pair = inputs.to(messages.device), targets.to(messages.device)
            microbatches.append(pair)
        return model, microbatches

    def expected(self, shapes, seed):
        model, microbatches = self.problem(shapes, seed)
        loss = toy.reference_step(model, *map(torch.cat, zip(*microbatches)))
        return {ALIVE: 1, "gradient": _gradient(model), "loss": loss}

    def hint(self, found, shapes, seed):
        if found[ALIVE] != 1:
            return self.one_by_one
        if found["gradient"] is None:
            return self.nothing
        right = self.expected(shapes, seed)
        if equal(found["gradient"], right["gradient"]):
            return "The gradient is right: the loss is a mean over the same targets."
        return usual(found["gradient"], self.mistakes(shapes, seed)) or self.remedy

    def mistakes(self, shapes, seed):
        sums = [self.of_sum(shapes, seed, i) for i in range(len(shapes))]
        valid = [max(valid, 1) for _, valid in shapes]
        so_far = list(accumulate(valid for _, valid in shapes))
        n, total, size = len(shapes), so_far[-1], sum(size for size, _ in shapes)

        def gradient(divisors, sums=sums):
            return sum(s / d for s, d in zip(sums, divisors)).tolist()

        return {
            "That is of the sum over the targets, not of their mean.":
                gradient([1] * n),
            "That is the sum of a mean for each microbatch.": gradient(valid),
            "That is the mean of the microbatches' means: where few targets are valid, "
            "each weighs more.": gradient([n * v for v in valid]),
            "Targets that are masked do not count.": gradient([size] * n),
            "Divided by the count so far, what comes first weighs more.":
                gradient([max(c, 1) for c in so_far]),
            "That is of the last microbatch alone: gradients add up in .grad.":
                gradient([total], sums[-1:]),
        }  # fmt: skip

    def of_sum(self, shapes, seed, i):
        """Return the gradient of the loss summed over one microbatch."""
        model, microbatches = self.problem(shapes, seed)
        inputs, targets = microbatches[i]
        toy.loss_sum(model(inputs), targets).backward()
        return torch.tensor(_gradient(model))


def _gradient(model):
    return flat(*(weights.grad for weights in model.parameters()))


class Accumulate(Gradient):
    name = "accumulate"
    one_by_one = "The backward of each microbatch comes before the next one's forward."
    nothing = "Nothing has gone backward: each microbatch has a backward."
    remedy = "Divide each sum by the count of valid targets of the whole batch."

    def cases(self, random):
        shapes = [
            [(random.randint(3, 5), 3)],
            [(4, 4), (4, 4)],
            [(4, 3), (3, 1), (3, 2)],
            [(3, 0), (3, 2)],
        ]
        return [(one, random.randint(0, 10**6)) for one in shapes]

    def facts(self, answer, shapes, seed):
        model, microbatches = self.problem(shapes, seed)
        inputs, targets = map(torch.cat, zip(*microbatches))
        trainer, alive = lab.Trainer(model, None, 0.1, 0.9), [1]
        forward = trainer.forward

        def noted(*arguments):
            loss = forward(*arguments)
            alive.append(len(trainer.live))
            return loss

        trainer.forward = noted
        loss = ask(answer, trainer, inputs, targets, len(shapes), read=number)
        return {ALIVE: max(alive), "gradient": _gradient(model), "loss": loss}

    def advice(self, trouble, shapes, seed):
        if "needs at least one valid" in trouble:
            return "A microbatch may have none: count those of the whole batch."
        return ""


class AccumulateStream(Gradient):
    name, points = "accumulate_stream", 3
    one_by_one = "The backward of each comes before you ask for the next one."
    nothing = "Nothing has gone backward: an iterator can be read only once."
    remedy = "Gradients are linear: what divides all of them can do so at the end."

    def cases(self, random):
        more = random.randint(4, 6)
        shapes = [
            [(3, 3)],
            [(3, 3), (more, more)],
            [(5, 4), (4, 1), (more, 3)],
            [(2, 0), (4, 3), (3, 2)],
        ]
        return [(one, random.randint(0, 10**6)) for one in shapes]

    def facts(self, answer, shapes, seed):
        model, microbatches = self.problem(shapes, seed)
        alive = [1]
        loss = ask(answer, model, _stream(microbatches, alive), read=number)
        return {ALIVE: max(alive), "gradient": _gradient(model), "loss": loss}

    def advice(self, trouble, shapes, seed):
        if "nan" in trouble:
            return "A microbatch may have no valid target: its mean would be 0/0."
        return ""


def _stream(microbatches, alive):
    """Hand out microbatches and forget them; note how many are kept elsewhere."""
    given = []
    while microbatches:
        given.append(weakref.ref(microbatches[0][0]))
        yield microbatches.pop(0)
        alive.append(sum(inputs() is not None for inputs in given))


# ---- plan a run ------------------------------------------------------------------


class Throughput(Exercise):
    """A case has times, for a batch of samples; the answer is given rates."""

    name = "throughput"

    def cases(self, random):
        def draw(prefetch):
            load, train = random.sample(range(2, 10), 2)
            return 8 * random.randint(2, 8), load / 2, train / 2, prefetch

        return [draw(False), draw(True), draw(False), draw(True)]

    def arguments(self, batch, load, train, prefetch):
        return f"{batch / load:g}, {batch / train:g}, {prefetch}"

    def facts(self, answer, batch, load, train, prefetch):
        given = batch / load, batch / train, prefetch
        return {"samples per time": ask(answer, *given, read=number)}

    def expected(self, batch, load, train, prefetch):
        time = max(load, train) if prefetch else load + train
        return {"samples per time": batch / time}

    def hint(self, found, batch, load, train, prefetch):
        return usual(found["samples per time"], {
            "With prefetch, loading and training go on side by side." if prefetch else
            "In turn, the times of a sample add up.": batch / (load + train),
            "The slower one sets the pace with prefetch; in turn, times add up.":
                batch / max(load, train),
            "The faster one has to wait for the slower.": batch / min(load, train),
            "Rates do not add up: the same samples pass both.":
                batch / load + batch / train,
            "Rates have another mean: what adds up is time per sample.":
                (batch / load + batch / train) / 2,
            "That is time per sample; samples per time are asked for.":
                (max(load, train) if prefetch else load + train) / batch,
        })  # fmt: skip


def _search(batch, budget, n_parameters, rule, per_sample, fits=operator.le):
    """Try 1, 2, 3, ... microbatches; return their sizes, or None."""
    kept = n_parameters * sum(lab.RULES[rule])
    for n_microbatches in range(1, batch + 1):
        sizes = chunk_sizes(batch, n_microbatches)
        if fits(kept + sizes[0] * per_sample, budget):
            return sizes
    return None


class MicrobatchSizes(Exercise):
    name, points = "microbatch_sizes", 2

    def cases(self, random):
        def plan(batch, samples):
            """A budget for so many samples, beside what a rule keeps."""
            rule = random.choice(list(lab.RULES))
            n_parameters = random.randint(10, 40) * 10**3
            per_sample = random.randint(60, 99) * 10**3
            budget = n_parameters * sum(lab.RULES[rule]) + int(samples * per_sample)
            return batch, budget, n_parameters, rule, per_sample

        def tight():
            """A plan of which every mistake gives another number."""
            while True:
                tried = plan(24, 5)
                counts = {len(_search(*tried)), *self.mistakes(*tried).values()}
                if len(counts) == 1 + len(self.mistakes(*tried)):
                    return tried

        k = random.randint(5, 9)
        easy, odd = plan(k, 10 * k), plan(4 * k + 1, k + 0.5)
        return [tight(), easy, odd, plan(k, 0.5), plan(k, -3), tight()]

    def arguments(self, batch, budget, n_parameters, rule, per_sample):
        return f"{batch}, {budget}, {n_parameters}, {rule!r}, {per_sample}"

    def facts(self, answer, *plan):
        def read(value):
            if value is None:
                return None
            if not isinstance(value, (list, tuple)):
                raise unfit(value, "a list of sizes")
            return [whole(size) for size in value]

        return {"sizes": ask(answer, *plan, read=read)}

    def expected(self, *plan):
        return {"sizes": _search(*plan)}

    def mistakes(self, batch, budget, n_parameters, rule, per_sample):
        """Return sentence -> how many microbatches this mistake gives."""
        plan = batch, budget, n_parameters, rule, per_sample
        alone = budget + n_parameters * sum(lab.RULES[rule][1:])
        sizes = {
            "Parameters and what belongs to them are in the same memory.":
                _search(batch, budget, 0, rule, per_sample),
            "The parameters have gradients and optimizer states beside them.":
                _search(batch, alone, n_parameters, rule, per_sample),
            "What needs exactly the budget is within it.":
                _search(*plan, fits=operator.lt),
        }  # fmt: skip
        return {text: len(sizes or []) for text, sizes in sizes.items()}

    def hint(self, found, *plan):
        sizes, right, batch = found["sizes"], _search(*plan), plan[0]
        if not right:
            return "Not even one sample fits beside the parameters: return None."
        if not sizes:
            return "There is a way: try 1 microbatch, then 2, 3, ..."
        if sum(sizes) != batch:
            return f"These are {sum(sizes)} samples; the batch has {batch}."
        if sorted(sizes, reverse=True) == right:
            return "The larger ones come first."
        if len(sizes) == len(right):
            return "The number is right; the sizes may differ by one sample, not more."
        known = usual(len(sizes), self.mistakes(*plan))
        return known or "Take as few as will do: try 1, 2, 3, ..."


def _tick_by_tick(loads, train, n_loaders, ahead, held=False, early=True, turns=False):
    """Simulate an epoch in whole time steps; the last three can be a mistake.

    held: a batch keeps its place while it trains. early: it has its place from the
    moment on when its loading begins. turns: loaders take batches in turn.
    """

    def loader_free():
        if turns:
            return all((begun - batch) % n_loaders for batch in left)
        return len(left) < n_loaders

    def place_free():
        return early * len(left) + len(loaded) + (held and busy > 0) < ahead

    left, loaded = {}, set()  # batch -> time until it is loaded; those that are
    begun = taken = busy = now = 0
    while taken < len(loads):
        loaded |= {batch for batch in left if not left[batch]}
        left = {batch: time for batch, time in left.items() if time}
        if taken in loaded and not busy:
            loaded.remove(taken)
            taken, busy = taken + 1, train
        while begun < len(loads) and loader_free() and place_free():
            left[begun] = loads[begun]
            begun += 1
        left = {batch: time - 1 for batch, time in left.items()}
        now, busy = now + 1, max(0, busy - 1)
    return now + busy


def _slips(loads, train, n_loaders, ahead):
    """Return the usual mistakes in an epoch's time: sentence -> what it gives."""
    plan, training = (loads, train, n_loaders, ahead), len(loads) * train
    pace = max(sum(loads[1:]) / n_loaders + train, training)
    return {
        "Loading and training go on side by side.": sum(loads) + training,
        "The slower one sets the pace; besides there is a first loading, or a last "
        "training.": max(sum(loads) / n_loaders, training),
        "The slower one sets the pace only where all batches are alike and there are "
        "many places.": loads[0] + pace,
        "That is the time with one loader.": _tick_by_tick(loads, train, 1, ahead),
        "Loaders may not run ahead that far: at most `ahead` batches have a place.":
            _tick_by_tick(loads, train, n_loaders, len(loads)),
        "A batch gives its place back when training takes it, not when it is done.":
            _tick_by_tick(*plan, held=True),
        "A batch has its place from the moment on when its loading begins.":
            _tick_by_tick(*plan, early=False),
        "Loaders do not take turns: whoever is free begins the next batch.":
            _tick_by_tick(*plan, turns=True),
        "That is one place too many.":
            _tick_by_tick(loads, train, n_loaders, ahead + 1),
        "That is one place too few.":
            _tick_by_tick(loads, train, n_loaders, ahead - 1) if ahead > 1 else None,
    }  # fmt: skip


def _uneven(random):
    """An epoch with some slow batches, of which every mistake gives another time."""
    while True:
        loads = [random.randint(2, 12) for _ in range(14)]
        loads[2::5] = [random.randint(20, 30) for _ in loads[2::5]]
        plan = loads, random.randint(4, 7), 2, 3
        times = {_tick_by_tick(*plan), *_slips(*plan).values()}
        if len(times) == 1 + len(_slips(*plan)):
            return plan


class EpochTime(Exercise):
    name, points = "epoch_time", 2

    def cases(self, random):
        n, time = random.randint(3, 5), random.randint(2, 4)
        return [
            ([time + 2] * n, time, 1, 2),
            _uneven(random),
            ([time] * n, time + 2, 1, 1),
            ([5 * time] * n, time, 4, 2),
            _uneven(random),
            ([time], 2, 3, 2),
        ]

    def facts(self, answer, loads, *plan):
        return {"time": ask(answer, list(loads), *plan, read=number)}

    def expected(self, *plan):
        return {"time": _tick_by_tick(*plan)}

    def hint(self, found, *plan):
        return usual(found["time"], _slips(*plan)) or (
            "Note of each batch when a loader begins it, and when training takes it."
        )


ENOUGH = 10**9  # tokens; if so many do not fill a device, no number does


def _fewest(n_in, n_out, peak, bandwidth, nbytes, moved=(1, 1, 1), work=2):
    """Search the fewest tokens that fill a device; the last two can be a mistake.

    moved: how often inputs, weights and outputs are read or written. work: FLOPs of a
    multiply-add.
    """

    def fills(n):
        values = (n * n_in, n_in * n_out, n * n_out)
        traffic = nbytes * sum(v * times for v, times in zip(values, moved))
        return work * n * n_in * n_out / peak >= traffic / bandwidth

    if not fills(ENOUGH):
        return None
    return 1 + bisect_left(range(1, ENOUGH), True, key=fills)


def _overlooked(*layer):
    """Return the usual mistakes in how many tokens fill a device."""
    *shape, nbytes = layer
    return {
        "Inputs and outputs go through memory too, not the weights alone.":
            _fewest(*layer, moved=(0, 1, 0)),
        "The outputs have to be written.": _fewest(*layer, moved=(1, 1, 0)),
        "The inputs have to be read.": _fewest(*layer, moved=(0, 1, 1)),
        "The weights have to be read.": _fewest(*layer, moved=(1, 0, 1)),
        "A multiply-add is two FLOPs, and each value moves once.":
            _fewest(*layer, work=1),
        "A value has `nbytes` bytes.": _fewest(*shape, 1),
    }  # fmt: skip


ALMOST = 0.999999, 1.000001


def _layer(random, nbytes):
    """A layer and a device for which every mistake gives another number, and no number
    of tokens takes just as long in both ways, where rounding would decide."""
    while True:
        n_in, n_out = random.randint(8, 64) * 64, random.randint(8, 64) * 64
        rate, bandwidth = random.randint(50, 200) * 10**12 + 3 * 10**11, 10**12
        layer = n_in, n_out, rate, bandwidth, nbytes
        n, others = _fewest(*layer), _overlooked(*layer).values()
        nearly = {_fewest(n_in, n_out, rate * x, bandwidth, nbytes) for x in ALMOST}
        if nearly == {n} and len({n - 1, n, n + 1, *others}) == 3 + len(others):
            return layer


class TokensToFill(Exercise):
    name, points = "tokens_to_fill", 2

    def cases(self, random):
        return [
            _layer(random, 2),
            (64, 64, 312 * 10**12, 2 * 10**12, 2),
            _layer(random, 4),
            (4096, 4096, 10**12, 2 * 10**12, 1),
        ]

    def arguments(self, n_in, n_out, peak, bandwidth, nbytes):
        return f"{n_in}, {n_out}, {peak:g}, {bandwidth:g}, {nbytes}"

    def facts(self, answer, *layer):
        def read(value):
            return None if value is None else whole(value)

        return {"tokens": ask(answer, *layer, read=read)}

    def expected(self, *layer):
        return {"tokens": _fewest(*layer)}

    def hint(self, found, *layer):
        tokens, right = found["tokens"], _fewest(*layer)
        if tokens is None:
            return "There is a number: the more tokens, the more FLOPs to a byte."
        if right is None:
            return "With more tokens, inputs and outputs grow too: no number will do."
        return usual(tokens, {
            "For that many, memory still takes longer: round up.": right - 1,
            "One fewer will do.": right + 1,
            **_overlooked(*layer),
        }) or "Arithmetic: FLOPs / peak. Memory: bytes / bandwidth."  # fmt: skip


# ---- figures ---------------------------------------------------------------------


def values_of(answer, *cases):
    """Return what an answer gives in each case, for a figure.

    If it gives nothing of use, say so and return None.
    """
    found = look(_value, answer, cases)
    if "trouble" in found[-1]:
        print(f"No figure yet: {found[-1]['trouble'].rstrip('.')}.")
        return None
    return [facts["value"] for facts in found]


def _value(answer, *case):
    return {"value": ask(answer, *case, read=lambda v: v if v is None else number(v))}


EXERCISES = {
    exercise.name: exercise
    for exercise in (
        Throughput(),
        Update(),
        Accumulate(),
        AdamW(),
        AccumulateStream(),
        MicrobatchSizes(),
        EpochTime(),
        TokensToFill(),
    )
}
