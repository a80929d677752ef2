"""What the command lines of all labs share: the ledger, the files, errors in words."""

import argparse
import dataclasses
import os
import sys
import tempfile
from math import inf
from typing import get_args, get_type_hints

from labs.kit import clock, torchrun, world
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
    """Return a value as a reader wants it: 27.27 %, 1.5 MB; of a list 4, 3, 2, 1."""
    if value is None or isinstance(value, str):
        return value or "-"
    values = value if isinstance(value, (list, tuple)) else [value]
    size, unit = _scale(unit, values)
    texts = [_number(one / size if size != 1 else one, unit) for one in values]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{texts[0]}{unit} each"
    return ", ".join(texts) + unit


def _scale(unit, values):
    """Return (size, name) of the unit in which the largest value reads well."""
    if unit not in _SCALES:
        return 1, f" {unit}" if unit else ""
    largest = max(map(abs, values), default=0)
    fitting = [pair for pair in _SCALES[unit] if largest >= pair[0]]
    size, name = fitting[-1] if fitting else _SCALES[unit][0]
    return size, f" {name}"


_SCALES = {
    "%": [(0.01, "%")],
    "B": [(1, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB")],
    "s": [(1e-6, "µs"), (1e-3, "ms"), (1, "s")],
}


def _number(value, unit):
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}" if unit == " %" else f"{value:.4g}"


class _Options(argparse.ArgumentParser):
    def error(self, message):
        """One sentence is enough; `main` prints it."""
        raise ValueError(f"{message}; --help lists what there is.")


def parse(config, key, text, argv=None):
    """Read a command line; return (a Config, a clock, the folder for files).

    config: the lab's Config class; each of its fields is an option, with its help.
    Raises ValueError for what cannot run.
    """
    options = _Options(
        prog=f"python -m labs.{key}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        kind, words = get_args(hints[field.name])
        name = "--" + field.name.removeprefix("n_").replace("_", "-")
        more = {"action": "store_true", "help": words}
        if kind is not bool:
            words = f"{words} (default: {field.default})"
            more = {"type": kind, "metavar": _METAVAR[kind], "help": words}
        options.add_argument(name, dest=field.name, default=field.default, **more)
    _add_common(options)
    given = vars(options.parse_args(argv))
    name, folder = given.pop("clock"), given.pop("out")
    link = Link(given.pop("latency"), given.pop("bandwidth"))
    made = config(**given)
    made.check()
    return made, make_clock(name, made, link), folder


def _add_common(options):
    add = options.add_argument
    add("--clock", default="auto", choices=["auto", "wall", "unit", "flops", "timed"],
        help="wall time, or virtual time with unit, counted (flops) or timed costs; "
        "auto: wall where each rank has a GPU, else timed")  # fmt: skip
    add("--latency", type=float, default=0.0, metavar="X",
        help="of a message, in virtual time (default: 0)")  # fmt: skip
    add("--bandwidth", type=float, default=inf, metavar="X",
        help="of the links, in bytes per time (default: no limit)")  # fmt: skip
    add("--out", default="out", metavar="FOLDER",
        help="for the figure and the trace (default: out)")  # fmt: skip


_METAVAR = {int: "N", float: "X", str: "NAME"}


def make_clock(name, config, link=Link()):  # noqa: B008 (immutable)
    """Return the clock that `--clock` names, for this run on this machine."""
    if not (0 <= link.latency < inf and link.bandwidth > 0):
        raise ValueError(f"a link needs latency >= 0 and bandwidth > 0: {link}.")
    plan = world.plan(config.n_ranks())
    if name == "auto":
        real = plan.place == "own" and link == Link() and not config.slow()
        name = "wall" if real else "timed"
    if name == "wall":
        if link != Link():
            raise ValueError("wall time has the links of this machine, no others.")
        if config.slow():
            raise ValueError("a slow rank needs virtual time: choose another clock.")
        return clock.Wall()
    cost = {
        "unit": lambda: clock.Unit(config.costs(), config.within),
        "flops": lambda: clock.Flops(),
        "timed": lambda: clock.Timed(plan.n_gpus or world.cores() // plan.threads or 1),
    }
    return clock.Virtual(cost[name](), link, config.slow())


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
    from labs.kit import draw  # ranks import this module too, and draw nothing

    figure = os.path.join(folder, f"{key}.svg")
    trace = os.path.join(folder, f"{key}.trace.json")
    plan = world.plan(report.timeline.n_ranks).describe(report.hardware)
    text = [
        f"{plan} · {report.timeline.clock}",
        ledger(report.rows + report.invariant()),
        *report.remarks,
        str(report.explain(*report.timelines())),
        f"figure  {figure}\ntrace   {trace}  (open it in ui.perfetto.dev)",
    ]
    draw.draw(*report.timelines(), titles=["predicted", "run"]).save(figure)
    report.timeline.to_chrome_trace(trace)
    print("\n\n".join(text))


def _make(folder):
    """Make a folder; ValueError, before any rank starts, if it cannot be written to."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"cannot write into {folder!r} ({error.strerror})"
        raise ValueError(f"{reason}: choose another --out.") from None


def main(key, text, config, measure, argv=None):
    """The command line of a lab: measure, and publish what was measured.

    Where it cannot go on it ends with the reason in words: exit code 2 for what was
    asked, 1 for what happened.
    """
    try:
        made, clk, folder = parse(config, key, text, argv)
        _make(folder)
        publish(key, measure(made, clk, progress=True), folder)
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, RankFailed, OSError) as error:
        if speaks():
            print(f"labs.{key}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
