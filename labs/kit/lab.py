"""What the command lines of all labs share: the ledger, the files, errors in words."""

import argparse
import dataclasses
import os
import sys
from typing import get_args, get_type_hints

from labs.kit import clock, draw, torchrun, world
from labs.kit.simulate import explain
from labs.kit.timeline import Link
from labs.kit.watchdog import RankFailed


def ledger(rows):
    """Return rows as an aligned table: quantity, predicted | counted.

    A row is (quantity, what a formula says, what the run counted, unit): numbers, or
    lists of one number per rank; unit "%", "B", "s" or "".
    """
    cells = [("", "predicted", "counted")]
    cells += [(q, show(p, unit), show(c, unit)) for q, p, c, unit in rows]
    name, left, right = (max(map(len, column)) for column in zip(*cells))
    return "\n".join(
        f"{a:<{name}}  {b:>{left}} | {c:>{right}}".rstrip() for a, b, c in cells
    )


def show(value, unit=""):
    """Return a value as a reader wants it: 27.3 %, 1.5 MB, [4, 3, 2, 1]."""
    if isinstance(value, (list, tuple)):
        if len(set(value)) == 1 and len(value) > 1:
            return f"{show(value[0], unit)} each"
        return ", ".join(show(one, unit) for one in value)
    if value is None or isinstance(value, str):
        return value or "-"
    if unit == "%":
        return f"{100 * value:.2f} %"
    if unit == "B":
        return _bytes(value)
    if unit == "s" and value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.4g}{' ' * bool(unit)}{unit}"


def _bytes(value):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.0f} B"


def parse(config, key, text, argv=None):
    """Read a command line; return (a Config, a clock, the folder for files).

    config: the lab's Config class; each of its fields is an option, with its help.
    """
    options = argparse.ArgumentParser(
        prog=f"python -m labs.{key}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        kind, text = get_args(hints[field.name])
        name = "--" + field.name.removeprefix("n_").replace("_", "-")
        more = {"action": "store_true"} if kind is bool else {"type": kind}
        more.update(dest=field.name, default=field.default)
        options.add_argument(name, help=f"{text} (default: {field.default})", **more)
    add = options.add_argument
    add("--clock", default="auto", choices=["auto", "wall", *_COSTS],
        help="wall time, or virtual time with unit, counted or timed costs; "
        "auto: wall where each rank has a GPU, else timed")  # fmt: skip
    add("--latency", type=float, default=0.0, help="of the link in virtual time")
    add("--bandwidth", type=float, default=float("inf"), help="of the link, bytes/s")
    add("--out", default="out", help="folder for the figure and the trace")
    given = vars(options.parse_args(argv))
    name, out = given.pop("clock"), given.pop("out")
    link = Link(given.pop("latency"), given.pop("bandwidth"))
    made = config(**given)
    return made, make_clock(name, made.n_ranks(), link), out


_COSTS = {
    "unit": lambda plan: clock.Unit(),
    "flops": lambda plan: clock.Flops(),
    "timed": lambda plan: clock.Timed(
        plan.n_gpus or max(1, world.cores() // plan.threads)
    ),
}


def make_clock(name, n_ranks, link=Link()):  # noqa: B008 (immutable)
    """Return the clock that `--clock` names, for this many ranks on this machine."""
    plan = world.plan(n_ranks)
    if name == "auto":
        name = "wall" if plan.place == "own" else "timed"
    if name == "wall":
        return clock.Wall()
    return clock.Virtual(_COSTS[name](plan), link)


def choose(what, name, choices):
    """Raise ValueError unless `name` is one of `choices`."""
    if name not in choices:
        raise ValueError(f"no {what} {name!r}: choose one of {', '.join(choices)}.")


def speaks():
    """Should this process print and save? Under torchrun only rank 0 does."""
    return not torchrun.started_us() or os.environ["RANK"] == "0"


def publish(key, report, folder="out"):
    """Print the ledger, and write the figure and one Perfetto file into `folder`."""
    if not speaks():
        return
    os.makedirs(folder, exist_ok=True)
    figure = os.path.join(folder, f"{key}.svg")
    trace = os.path.join(folder, f"{key}.trace.json")
    draw.draw(*report.timelines(), titles=["predicted", "run"]).save(figure)
    report.timeline.to_chrome_trace(trace)
    plan = world.plan(report.timeline.n_ranks).describe(report.timeline.hardware)
    print(f"{plan} · {report.timeline.clock}\n")
    print(ledger(report.rows + report.invariant()) + "\n")
    print(f"{explain(report.predicted, report.timeline)}\n")
    print(f"figure  {figure}\ntrace   {trace}  (open it in ui.perfetto.dev)")


def main(key, text, config, measure, argv=None):
    """The command line of a lab: measure, and publish what was measured.

    Ends with one sentence and an exit code where it cannot go on.
    """
    try:
        made, clock, folder = parse(config, key, text, argv)
        report = measure(made, clock)
        publish(key, report, folder)
    except (ValueError, RankFailed, OSError) as error:
        if speaks():
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
