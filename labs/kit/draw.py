"""Pictures: `draw` for timelines, `curve` for series, `explorer` for sliders.

All return a picture that a notebook shows as SVG, with alternative text and a table
for those who do not see it. This is the only file that imports matplotlib; it builds
its figures apart from pyplot, so nothing leaks and no setting of the reader's changes.
"""

import base64
import html
import io
import math
import os
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.textpath import text_to_path
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

# White text has a contrast of 4.5:1 or more on each; distinct to the colour-blind.
PALETTE = {
    "forward": "#2f6db3",
    "backward": "#b6510a",
    "weight gradient": "#774455",
    "optimizer update": "#6600cc",
    "data loading": "#4b5563",
}
INK, GREY, GRID, SHADE = "#1f2933", "#4b5763", "#d5dce4", "#dfe5ec"
WIDTH = 7.2  # inches; the text column of the book

# Operation: its name, and where its box has a light band, for prints in grey.
KINDS = {
    "F": ("forward", ()),
    "B": ("backward", (0.8,)),
    "W": ("weight gradient", (0.0,)),
    "U": ("optimizer update", (0.0, 0.8)),
    "L": ("data loading", (0.4,)),
}
IDLE = {"facecolor": SHADE, "zorder": 0.5}
WAIT = {"facecolor": SHADE, "edgecolor": "#aeb9c6", "hatch": "////", "zorder": 0.6}
TRANSFER = {"facecolor": "none", "edgecolor": "#6b7885", "linewidth": 0.7}
COLOURS = [*[*PALETTE.values()][:4], INK]
LINES = {
    "line": [{"linestyle": dash} for dash in ("-", "--", "-.", ":")],
    "points": [{"linestyle": "", "marker": m, "markersize": 5} for m in "os^D"],
}


class Picture:
    """A figure and its text: `alt` in words, `table` as a list of dicts (one a row)."""

    def __init__(self, figure, alt, table=()):
        self.figure, self.alt, self.table = figure, alt, list(table)

    @cached_property
    def svg(self):
        """The figure as SVG: the same bytes every time."""
        metadata = dict.fromkeys(["Date", "Creator", "Format", "Type"])
        return self._render(format="svg", metadata=metadata)

    def save(self, path):
        """Write an .svg, or a .png on white; an earlier file is replaced as a whole."""
        path = Path(path)
        if path.suffix not in (".svg", ".png"):
            raise ValueError(f"cannot write {path.name!r}: name it .svg or .png")
        png = {"format": "png", "dpi": 200, "facecolor": "white"}
        data = self.svg if path.suffix == ".svg" else self._render(**png)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _render(self, **options):
        buffer = io.BytesIO()
        with _style():
            self.figure.savefig(buffer, **options)
        return buffer.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/html": self._html(), "text/plain": self.alt}

    def _html(self):
        """On a narrow screen the figure scrolls, so that its text stays readable."""
        width = round(96 * self.figure.get_figwidth())
        data = base64.b64encode(self.svg).decode()
        alt = html.escape(self.alt)
        return (
            '<figure class="lab-figure" style="margin:0">'
            '<div class="lab-scroll" style="overflow-x:auto" tabindex="0" role="group" '
            'aria-label="Figure; it scrolls where the screen is narrow">'
            f'<img class="dark-light drawing" alt="{alt}" '
            f'style="background:#fff;width:100%;height:auto;max-width:{width}px;'
            f'min-width:{round(0.9 * width)}px" src="data:image/svg+xml;base64,{data}">'
            "</div><details><summary>The figure as text</summary>"
            f"<p>{alt}</p>{_html_table(self.table)}</details></figure>"
        )


def _html_table(rows):
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{html.escape(str(name))}</th>' for name in rows[0])
    body = [[html.escape(_cell(cell)) for cell in row.values()] for row in rows]
    lines = [head, *("".join(f"<td>{cell}</td>" for cell in row) for row in body)]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(value):
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


@contextmanager
def _style():
    """matplotlib's own defaults and ours, whatever the reader has set."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({
            "font.family": "DejaVu Sans", "font.size": 8, "text.color": INK,
            "axes.edgecolor": GREY, "axes.labelcolor": INK, "axes.linewidth": 0.7,
            "xtick.color": GREY, "ytick.color": GREY, "figure.dpi": 72,
            "figure.facecolor": "none", "axes.facecolor": "none", "grid.color": GRID,
            "hatch.linewidth": 0.5, "svg.fonttype": "path", "svg.hashsalt": "labs",
        })  # fmt: skip
        yield


@cache
def _text_width(text, size=8):
    """The width of a text in points."""
    font = FontProperties(family="DejaVu Sans", size=size)
    return text_to_path.get_text_width_height_descent(text, font, False)[0]


def _wrap(text, points):
    """Break a text into lines that are no wider than `points`."""
    lines = []
    for word in text.split():
        if lines and _text_width(f"{lines[-1]} {word}") <= points:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def draw(*timelines, titles=None, width=WIDTH, shade_bubble=True):
    """Draw timelines one above the other on one shared time axis, rank 0 on top.

    A box per operation with its letter and microbatch, where they fit; transfers in a
    thin lane below the rank that they reach; idle time shaded, and hatched while a rank
    waits for a peer. titles: one per timeline. width: inches.
    Layout after Huang et al. 2019, GPipe, figure 2c.
    """
    titles = list(titles or [""] * len(timelines))
    if len(titles) != len(timelines) or not timelines:
        raise ValueError(
            f"{len(timelines)} timelines and {len(titles)} titles: give at least one "
            "timeline, and a title for each or none"
        )
    if len({timeline.unit for timeline in timelines}) > 1:
        raise ValueError(
            "timelines in units of F and in seconds share no time axis: draw them "
            "apart, or simulate with the measured times"
        )
    with _style():
        chart = _Chart(timelines, width, shade_bubble)
        chart.legend()
        for timeline, title in zip(timelines, titles):
            chart.panel(timeline, title)
        chart.time_axis(titles)
    alt, table = "Timeline of compute per rank, rank 0 on top.", []
    for timeline, title in zip(timelines, titles):
        alt += f" {title and title + ': '}{timeline.describe()}"
        name = {"timeline": title} if len(timelines) > 1 else {}
        table += [{**name, **row} for row in timeline.table()]
    return Picture(chart.finish(), alt, table)


class _Chart:
    """A sheet measured in points; y grows downwards, and the sheet with it."""

    LEFT, RIGHT, ROW, LANE, GAP = 46, 12, 17, 5, 5

    def __init__(self, timelines, width, shade):
        self.timelines, self.shade, self.width, self.y = timelines, shade, 72 * width, 0
        self.figure = Figure(figsize=(width, 1))
        self.axes = self.figure.add_axes([0, 0, 1, 1])
        self.axes.set_axis_off()
        self.end = max(timeline.makespan for timeline in timelines) or 1
        self.scale = (self.width - self.LEFT - self.RIGHT) / self.end  # points per time
        self.spans = [span for timeline in timelines for span in timeline.spans]
        self.labels = _labels(self.spans, self.scale)
        widest = min(_widest_gap(timeline)[0] for timeline in timelines)
        self.bubble_inside = widest * self.scale > 80
        self.unit, factor = _time_unit(self.end, timelines[0].unit)
        ticks = MaxNLocator(8, steps=[1, 2, 5, 10]).tick_values(0, self.end * factor)
        self.ticks = {n: n / factor for n in ticks if n / factor <= self.end * 1.0001}

    def x(self, time):
        return self.LEFT + time * self.scale

    def text(self, x, y, text, size=8, **style):
        """Text whose baseline is at y."""
        self.axes.text(x, y, text, size=size, **style)

    def text_in_row(self, x, text, size=8, **style):
        self.text(x, self.y + self.ROW / 2 + 0.365 * size, text, size, **style)

    def line(self, x, y, **style):
        self.axes.plot(x, y, linewidth=0.6, **style)

    def boxes(self, boxes, bands=(), **look):
        """All boxes (x, y, width, height) of one look, as a single path."""
        corners = [
            corner
            for x, y, w, h in boxes
            for corner in ((x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y))
        ]
        if not corners:
            return
        codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(boxes)
        patch = PathPatch(Outline(corners, codes), **{"linewidth": 0, **look})
        self.axes.add_artist(patch)
        for top in bands:
            light = [0.5 + 0.5 * c for c in mpl.colors.to_rgb(look["facecolor"])]
            stripes = [(x, y + top * h, w, h / 5) for x, y, w, h in boxes]
            self.boxes(stripes, facecolor=light)

    def bars(self, times, height, **look):
        """A box from each start to its end, at the current y."""
        bars = [(self.x(a), self.y, (b - a) * self.scale, height) for a, b in times]
        self.boxes(bars, **look)

    def legend(self):
        """One entry per look that occurs, from left to right."""
        x, self.y = self.LEFT, 14
        for label, look in self.looks():
            if x + 16 + _text_width(label) > self.width:
                x, self.y = self.LEFT, self.y + 13
            height = self.LANE if look is TRANSFER else 8
            self.boxes([(x, self.y - 3 - height / 2, 12, height)], **look)
            self.text(x + 16, self.y, label, color=GREY)
            x += 16 + _text_width(label) + 14
        self.y += 6

    def looks(self):
        names = {span.name for span in self.spans if span.lane == "compute"}
        for name in [*KINDS, *sorted(names - set(KINDS))]:
            if name in names:
                yield _look(name)
        if any(_transfers(timeline) for timeline in self.timelines):
            yield "transfer", TRANSFER
        if self.shade:
            alone = len(self.timelines) == 1 and not self.bubble_inside
            yield _bubble(self.timelines[0]) if alone else "bubble", IDLE
            if any(span.lane == "wait" for span in self.spans):
                yield "waiting", WAIT

    def panel(self, timeline, title):
        """A heading, then a row per rank; the bubble is named inside if it has room."""
        above = self.shade and not self.bubble_inside and len(self.timelines) > 1
        for line in _wrap(title, 0.85 * (self.width - 150)) or [""] * above:
            self.y += 13
            self.text(self.LEFT, self.y, line, weight="bold")
        if above:
            self.text(self.width - self.RIGHT, self.y, _bubble(timeline), ha="right")
        self.y += 6
        top = self.y
        _, widest, middle = _widest_gap(timeline)
        for rank in range(timeline.n_ranks):
            if self.shade and self.bubble_inside and rank == widest:
                plate = {"facecolor": SHADE, "edgecolor": "none", "pad": 2}
                x = self.x(middle)
                self.text_in_row(x, _bubble(timeline), ha="center", bbox=plate)
            self.row(timeline, rank)
        for time in self.ticks.values():
            self.line([self.x(time)] * 2, [top, self.y], color=GRID, zorder=0)

    def row(self, timeline, rank):
        self.text_in_row(self.LEFT - 6, f"rank {rank}", ha="right")
        if self.shade:
            waits = [(span.start, span.end) for span in timeline.lane(rank, "wait")]
            self.bars(timeline.gaps(rank), self.ROW, **IDLE)
            self.bars(waits, self.ROW, **WAIT)
        boxes = {}
        for span in timeline.ops(rank):
            boxes.setdefault(span.name, []).append(self.operation(span))
        for name, places in boxes.items():
            self.boxes(places, **_look(name)[1])
        self.y += self.ROW
        transfers = _transfers(timeline)
        if transfers:
            self.y += 2
            self.bars(transfers.get(rank, []), self.LANE, **TRANSFER)
            self.y += self.LANE
        self.y += self.GAP

    def operation(self, span):
        """Label an operation; return its box, inset so that neighbours stay apart."""
        x, width = self.x(span.start), (span.end - span.start) * self.scale
        label, needed = self.labels[span.op]
        if needed <= width:
            self.text_in_row(x + width / 2, label, 7.5, color="white", ha="center")
        inset = min(0.4, 0.1 * width)
        return x + inset, self.y, width - 2 * inset, self.ROW

    def time_axis(self, titles):
        self.line([self.LEFT, self.x(self.end)], [self.y] * 2, color=GREY)
        for number, time in self.ticks.items():
            x = self.x(time)
            self.line([x, x], [self.y, self.y + 3], color=GREY)
            self.text(x, self.y + 12, f"{number:,.10g}", color=GREY, ha="center")
        self.y += 15
        for label in _time_labels(self.unit, self.timelines, titles):
            for line in _wrap(label, self.width - self.LEFT - self.RIGHT):
                self.y += 12
                self.text(self.LEFT, self.y, line)
        self.y += 6

    def finish(self):
        self.axes.set(xlim=(0, self.width), ylim=(self.y, 0))
        self.figure.set_size_inches(self.width / 72, self.y / 72)
        return self.figure


def _look(name):
    """Legend label and style of an operation."""
    label, bands = KINDS.get(name, (name, ()))
    return label, {"facecolor": PALETTE.get(label, GREY), "bands": bands}


def _labels(spans, scale):
    """Operation -> (label, points it needs): "F0", or "0" if that fits more boxes."""

    def labels(text, margin):
        need = {}
        for op in ops:
            width = _text_width(text(op), 7.5) + margin
            need[op.kind] = max(need.get(op.kind, 0), width)
        return {op: (text(op), need[op.kind]) for op in ops}

    def fit(labels):
        return sum(labels[s.op][1] <= (s.end - s.start) * scale for s in spans)

    def number(op):
        return op.kind if op.microbatch is None else str(op.microbatch)

    spans = [span for span in spans if span.lane == "compute"]
    ops = {span.op for span in spans}
    return max(labels(str, 3), labels(number, 1), key=fit)


def _transfers(timeline):
    """Rank -> (start, end) of what it receives, or of collectives that it is in;
    overlapping transfers become one. A send is drawn where it is received."""
    ranks = {}
    for span in timeline.spans:
        moves = span.lane == "transfer" and span.name != "send"
        if moves and span.start < span.end:
            times = ranks.setdefault(span.rank, [])
            if times and span.start < times[-1][1]:
                start, end = times.pop()
                times.append((start, max(end, span.end)))
            else:
                times.append((span.start, span.end))
    return ranks


def _widest_gap(timeline):
    """(length, rank, middle) of the longest idle time."""
    gaps = [
        (end - start, rank, (start + end) / 2)
        for rank in range(timeline.n_ranks)
        for start, end in timeline.gaps(rank)
    ]
    return max(gaps, key=lambda gap: gap[0], default=(0, 0, 0))


def _bubble(timeline):
    return f"bubble {100 * max(0, timeline.bubble()):.1f} %"


def _time_unit(end, unit):
    """The unit to print, and how many of it make one of the timeline's."""
    if unit != "s":
        return unit or "units of F", 1
    return ("µs", 1e6) if end < 1e-3 else ("ms", 1e3) if end < 1 else ("s", 1)


def _time_labels(unit, timelines, titles):
    """Lines below the axis: unit, clock and hardware; one a timeline if they differ."""
    clocks = [", ".join(filter(None, (t.clock, t.hardware))) for t in timelines]
    unit = f"time in {unit}" + ", one axis for all" * (len(timelines) > 1)
    if len(set(clocks)) == 1:
        return [" · ".join(filter(None, [unit, clocks[0]]))]
    return [unit, *(": ".join(filter(None, pair)) for pair in zip(titles, clocks))]


def curve(series, xlabel, ylabel, title, alt, log="", width=WIDTH, height=3.2):
    """Plot series, each labelled beside its last point.

    series: list of dict(label=, x=, y=, style="line" or "points"); those of one label,
    such as a formula and its measurements, share a colour. log: the axes that are
    logarithmic, "", "x", "y" or "xy". width, height: inches.
    """
    for one in series:
        if not 0 < len(one["x"]) == len(one["y"]):
            raise ValueError(f"x and y of {one['label']!r} need one length, not 0")
    labels = list(dict.fromkeys(one["label"] for one in series))
    with _style():
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
        heading = "\n".join(_wrap(title, 55 * width))
        axes.set_title(heading, loc="left", size=8.5, weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(linewidth=0.6)
        ends = {}
        for one in series:
            i = labels.index(one["label"])
            look = LINES[one.get("style", "line")][i % 4]
            [line] = axes.plot(one["x"], one["y"], color=COLOURS[i % 5], **look)
            ends.setdefault(one["label"], line)
        _scale(axes, series, log)
        _label_ends(figure, axes, ends)
    return Picture(figure, alt, _curve_table(series, labels, xlabel))


def _curve_table(series, labels, xlabel):
    """A row for each x, a column for each series."""
    rows = {}
    for one in series:
        name = one["label"]
        if len(labels) < len(series):
            name += f" ({one.get('style', 'line')})"
        for x, y in zip(one["x"], one["y"]):
            rows.setdefault(x, {})[name] = y
    names = dict.fromkeys((name for row in rows.values() for name in row), "")
    return [{xlabel: x, **names, **rows[x]} for x in sorted(rows)]


def _scale(axes, series, log):
    """Linear heights begin at 0 where they can; log axes end at whole powers."""
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        values = [value for one in series for value in one[name]]
        low, high = min(values), max(values)
        if name in log:
            if low <= 0:
                raise ValueError(f"{name} reaches {low}: log axes begin above 0")
            base = 2 if high < 1024 * low else 10
            first = math.floor(round(math.log(low, base), 9))
            last = max(first + 1, math.ceil(round(math.log(high, base), 9)))
            ends = {f"{name}lim": (base ** (first - 0.1), base ** (last + 0.1))}
            axes.set(**{f"{name}scale": "log"}, **ends)
            axis.set_major_locator(LogLocator(base))
            axis.set_minor_locator(NullLocator())
        elif name == "y" and low >= 0:
            axes.set_ylim(bottom=0)
        axis.set_major_formatter("{x:,.10g}")


def _label_ends(figure, axes, lines):
    """Labels right of the axes, at the heights of the last points but moved apart."""
    figure.draw_without_rendering()  # only then is the layout known
    box, points = axes.bbox, {}
    for label, line in lines.items():
        points[label] = axes.transData.transform(line.get_xydata()[-1])
    labels = sorted(points, key=lambda label: points[label][1])
    texts = ["\n".join(_wrap(label, 130)) for label in labels]
    heights = [points[label][1] for label in labels]
    apart = [5.5 * (a.count("\n") + b.count("\n") + 2) for a, b in pairwise(texts)]
    for i, space in enumerate(apart):
        heights[i + 1] = max(heights[i + 1], heights[i] + space)
    heights[-1] = min(heights[-1], box.y1)
    for i, space in reversed(list(enumerate(apart))):
        heights[i] = min(heights[i], heights[i + 1] - space)
    for label, text, height in zip(labels, texts, heights):
        colour = lines[label].get_color()
        axes.annotate(
            text, lines[label].get_xydata()[-1], va="center", color=colour,
            xytext=(1.03, (height - box.y0) / box.height), textcoords="axes fraction",
            annotation_clip=False, arrowprops={
                "arrowstyle": "-", "relpos": (0, 0.5), "shrinkB": 4,
                "color": colour, "linewidth": 0.5,
            },
        )  # fmt: skip


def explorer(function, title="", **choices):
    """Sliders for `function(**values) -> Picture`, under a title.

    choices: name=(lowest, highest, default) for numbers, or name=[option, ...], the
    first of which is the default. The output always holds the default picture; it is
    all there is where ipywidgets is missing or LABS_STATIC is 1, as in the book.
    """
    picture = function(**{name: _default(name, choices[name]) for name in choices})
    if os.environ.get("LABS_STATIC") == "1":
        return picture
    try:
        import ipywidgets
    except ImportError:
        return picture
    return _Explorer(ipywidgets, function, title, choices, picture)


def _default(name, choice):
    if isinstance(choice, list) and choice:
        return choice[0]
    if isinstance(choice, tuple) and len(choice) == 3:
        return choice[2]
    raise ValueError(
        f"{name}={choice!r} is no choice: give (lowest, highest, default) or a list"
    )


def _slider(widgets, name, choice):
    about = {
        "value": _default(name, choice), "description": name.replace("_", " "),
        "continuous_update": False, "style": {"description_width": "initial"},
    }  # fmt: skip
    if isinstance(choice, list):
        return widgets.SelectionSlider(options=choice, **about)
    low, high, _ = choice
    if all(isinstance(number, int) for number in choice):
        return widgets.IntSlider(min=low, max=high, **about)
    return widgets.FloatSlider(min=low, max=high, step=(high - low) / 100, **about)


class _Explorer:
    """Live sliders; the output holds the static picture too, for pages without them."""

    def __init__(self, widgets, function, title, choices, picture):
        from IPython.display import display

        def show(**values):
            try:
                display(function(**values))
            except ValueError as error:  # values that do not go together
                print(error)

        self.picture = picture
        self.sliders = {n: _slider(widgets, n, choice) for n, choice in choices.items()}
        heading = widgets.HTML(f"<b>{html.escape(title)}</b>")
        output = widgets.interactive_output(show, self.sliders)
        self.box = widgets.VBox([heading, *self.sliders.values(), output])

    def _repr_mimebundle_(self, include=None, exclude=None):
        model = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        view = {"application/vnd.jupyter.widget-view+json": model}
        return {**self.picture._repr_mimebundle_(), **view}
