"""Pictures: what they show, that they read well, that they never change by chance."""

import subprocess
import sys
from itertools import combinations

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import PathPatch
from matplotlib.text import Text

from labs.kit.draw import GREY, PALETTE, Picture, curve, draw, explorer
from labs.kit.simulate import simulate
from labs.kit.timeline import Link, Op, Span, Timeline

UNIT = {"F": 1, "B": 2}
CLOCK = "virtual time, unit costs (F = 1, B = 2)"


def gpipe(n_stages, n_microbatches):
    order = range(n_microbatches)
    stage = [Op("F", i) for i in order] + [Op("B", i) for i in reversed(order)]
    return [stage] * n_stages


def one_f_one_b(n_stages, n_microbatches):
    stages = []
    for stage in range(n_stages):
        ahead = min(n_stages - stage, n_microbatches)
        ops = [Op("F", i) for i in range(ahead)]
        for i in range(n_microbatches):
            ops += [Op("B", i)] + [Op("F", i + ahead)] * (i + ahead < n_microbatches)
        stages.append(ops)
    return stages


def predicted(schedule):
    return simulate(schedule, UNIT, clock=CLOCK)


def measured(schedule):
    """Uneven, slower, with transfers; times in seconds."""

    def cost(stage, op):
        return 1e-3 * UNIT[op.kind] * (1, 1.6, 0.7, 1.2)[(stage + op.microbatch) % 4]

    link = Link(latency=1e-4, bandwidth=1e6)
    timeline = simulate(schedule, cost, link, 200, clock="wall clock", unit="s")
    timeline.hardware = "4 × NVIDIA H200, messages staged through host memory"
    return timeline


def drawn_texts(picture):
    """(text, extent) of everything that is really drawn."""
    found = []
    original = Text.draw

    def recording(self, renderer):
        if self.get_visible() and self.get_text():
            extent = Text.get_window_extent(self, renderer)  # without an arrow
            found.append((self.get_text(), extent))
        original(self, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", recording)
        FigureCanvasAgg(picture.figure).draw()
    return found


def words(picture):
    return [text for text, _ in drawn_texts(picture)]


def rows(picture):
    """The texts of a picture line by line, as one reads them."""
    lines = {}
    for text, box in drawn_texts(picture):
        lines.setdefault(round((box.y0 + box.y1) / 4), []).append((box.x0, text))
    return [" ".join(text for _, text in sorted(lines[y])) for y in sorted(lines)][::-1]


def boxes(picture, colour):
    """(left, right) of the boxes of one colour, in points."""
    found = []
    for patch in picture.figure.findobj(PathPatch):
        if mpl.colors.to_hex(patch.get_facecolor()) == colour:
            corners = patch.get_path().vertices.reshape(-1, 5, 2)
            found += [(box[0, 0], box[1, 0]) for box in corners]
    return found[1:]  # the first is the legend's


def assert_readable(picture):
    texts = drawn_texts(picture)
    width, height = picture.figure.bbox.size
    for text, box in texts:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert inside, f"{text!r} leaves the figure"
    for (text, box), (other, other_box) in combinations(texts, 2):
        apart = (
            box.x1 <= other_box.x0 or other_box.x1 <= box.x0
            or box.y1 <= other_box.y0 or other_box.y1 <= box.y0
        )  # fmt: skip
        assert apart, f"{text!r} and {other!r} overlap"


GRID = [(n, m) for n in (1, 2, 4, 8) for m in (1, 4, 8, 32)]


@pytest.mark.parametrize(("n", "m"), GRID)
def test_no_text_overlaps_or_is_clipped(n, m):
    assert_readable(draw(predicted(gpipe(n, m))))
    assert_readable(draw(measured(one_f_one_b(n, m)), titles=["uneven stages"]))


@pytest.mark.parametrize(("n", "m"), GRID)
def test_predicted_above_measured_is_readable(n, m):
    both = simulate(gpipe(n, m), {"F": 1e-3, "B": 2e-3}, clock=CLOCK, unit="s")
    pair = draw(both, measured(gpipe(n, m)), titles=["predicted", "measured"])
    assert_readable(pair)


def test_picture_reads_like_its_schedule():
    assert rows(draw(predicted(gpipe(2, 2)))) == [
        "forward backward bubble waiting",
        "rank 0 F0 F1 bubble 33.3 % B1 B0",
        "rank 1 F0 F1 B1 B0",
        "0 2 4 6 8",
        f"time in units of F · {CLOCK}",
    ]


def test_letters_go_first_and_numbers_next():
    assert {"F7", "B7"} <= set(words(draw(predicted(gpipe(4, 8)))))
    narrow = words(draw(predicted(gpipe(8, 8))))
    assert "7" in narrow and "F7" not in narrow
    dense = words(draw(predicted(gpipe(8, 32))))
    assert not {"31", "F31", "B31"} & set(dense)
    assert "31" in words(draw(predicted(gpipe(8, 32)), width=20))


def test_each_box_stands_at_its_time():
    timeline = predicted(gpipe(2, 2))
    picture = draw(timeline)
    left, right = 46, 72 * 7.2 - 12
    scale = (right - left) / 9
    forwards = [(0, 1), (1, 2), (1, 2), (2, 3)]
    backwards = [(5, 7), (7, 9), (3, 5), (5, 7)]
    for kind, times in (("forward", forwards), ("backward", backwards)):
        expected = [left + scale * time for pair in sorted(times) for time in pair]
        found = [x for pair in sorted(boxes(picture, PALETTE[kind])) for x in pair]
        assert found == pytest.approx(expected, abs=0.5)


def test_timelines_share_one_axis():
    short, long = predicted(gpipe(1, 1)), predicted(gpipe(1, 4))
    pair = draw(short, long, titles=["short", "long"])
    above, *below = boxes(pair, PALETTE["forward"])
    assert below == boxes(draw(long), PALETTE["forward"])
    assert above == below[0]
    assert rows(pair)[-1] == f"time in units of F, one axis for all · {CLOCK}"


def test_axis_names_each_clock_and_hardware():
    plan = simulate(gpipe(1, 2), {"F": 1e-3, "B": 2e-3}, clock="flops", unit="s")
    pair = draw(plan, measured(gpipe(1, 2)), titles=["predicted", "measured"])
    assert rows(pair)[-3:] == [
        "time in ms, one axis for all",
        "predicted: flops",
        "measured: wall clock, 4 × NVIDIA H200, messages staged through host memory",
    ]


def test_transfer_lane_only_where_there_are_transfers():
    assert "transfer" not in words(draw(predicted(gpipe(2, 2))))
    with_transfers = draw(measured(gpipe(2, 2)))
    assert "transfer" in words(with_transfers)
    without = draw(predicted(gpipe(2, 2)))
    assert with_transfers.figure.get_figheight() > without.figure.get_figheight()


def test_each_transfer_is_drawn_once_at_its_receiver_and_overlaps_become_one():
    times = [("send", 0, 0, 2), ("receive", 1, 0, 2), ("receive", 1, 1, 3)]
    spans = [Span(rank, "transfer", name, 0, *time) for name, rank, *time in times]
    spans += [Span(1, "transfer", "receive", 0, 3, 4)]
    picture = draw(Timeline(spans))
    outlines = [
        patch.get_path().vertices
        for patch in picture.figure.findobj(PathPatch)
        if patch.get_linewidth() > 0
    ]
    _legend, lane = outlines
    scale = (72 * 7.2 - 12 - 46) / 4
    ends = [(box[0, 0] - 46, box[1, 0] - 46) for box in lane.reshape(-1, 5, 2)]
    assert ends == [
        (0, pytest.approx(3 * scale)),
        (pytest.approx(3 * scale), 4 * scale),
    ]


def test_a_collective_is_a_transfer_of_each_rank_and_touching_ones_stay_apart():
    times = [(0, 0, 1), (0, 1, 4), (1, 0, 1), (1, 1, 4)]
    spans = [Span(rank, "transfer", "all_reduce", None, *t) for rank, *t in times]
    picture = draw(Timeline(spans))
    assert "transfer" in words(picture)
    _legend, *lanes = [
        patch.get_path().vertices.reshape(-1, 5, 2)
        for patch in picture.figure.findobj(PathPatch)
        if patch.get_linewidth() > 0
    ]
    assert [len(lane) for lane in lanes] == [2, 2]


def test_other_kinds_get_a_legend_and_letters_of_their_own():
    spans = [
        Span(0, "compute", "W", 0, 0, 1),
        Span(0, "compute", "U", None, 1, 2),
        Span(0, "compute", "recompute", 3, 2, 5),
    ]
    assert rows(draw(Timeline(spans)))[:2] == [
        "weight gradient optimizer update recompute bubble 0.0 %",
        "rank 0 W0 U recompute3",
    ]


def test_shade_can_be_left_out():
    shown = " ".join(words(draw(predicted(gpipe(4, 4)), shade_bubble=False)))
    assert "bubble" not in shown and "waiting" not in shown


def test_long_texts_are_broken():
    timeline = predicted(gpipe(2, 2))
    timeline.hardware = "several words about hardware " * 9
    assert_readable(draw(timeline, timeline, titles=["a long title " * 12, "short"]))


def test_empty_timelines_are_drawn():
    assert_readable(draw(Timeline([]), Timeline([], n_ranks=2), titles=["a", "b"]))


def test_what_cannot_be_drawn_is_refused_in_words():
    with pytest.raises(ValueError, match="0 timelines and 0 titles"):
        draw()
    with pytest.raises(ValueError, match="1 timelines and 2 titles"):
        draw(predicted(gpipe(1, 1)), titles=["a", "b"])
    with pytest.raises(ValueError, match="share no time axis"):
        draw(predicted(gpipe(1, 1)), measured(gpipe(1, 1)))


def test_alt_and_table_say_what_the_picture_shows():
    timeline = predicted(gpipe(2, 2))
    picture = draw(timeline, timeline, titles=["predicted", "measured"])
    assert f"predicted: {timeline.describe()}" in picture.alt
    assert f"measured: {timeline.describe()}" in picture.alt
    assert [row["timeline"] for row in picture.table] == ["predicted"] * 2 + [
        "measured"
    ] * 2
    assert picture.table[3]["order"] == "F0 F1 B1 B0"


def test_bytes_are_the_same_every_time(tmp_path):
    first = draw(measured(gpipe(2, 3)))
    curves = two_curves().svg
    with mpl.rc_context({"font.size": 20, "lines.linewidth": 7, "axes.grid": False}):
        assert draw(measured(gpipe(2, 3))).svg == first.svg
        assert two_curves().svg == curves
    first.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == first.svg
    first.save(tmp_path / "a.png"), first.save(tmp_path / "b.png")
    png = (tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG") and png == (tmp_path / "b.png").read_bytes()


def test_bytes_do_not_depend_on_the_process():
    code = (
        "import sys; from labs.kit.draw import draw;"
        "from labs.kit.timeline import Span, Timeline;"
        "kinds = ['F', 'B', 'x', 'y', 'z'];"
        "spans = [Span(0, 'compute', k, i, i, i + 1) for i, k in enumerate(kinds)];"
        "sys.stdout.buffer.write(draw(Timeline(spans)).svg)"
    )
    one, two = (
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed},
            capture_output=True, check=True,
        ).stdout
        for seed in "12"
    )  # fmt: skip
    assert one == two and one.startswith(b"<?xml")


def test_svg_is_small():
    assert len(draw(predicted(gpipe(4, 8))).svg) < 60_000
    assert len(draw(measured(one_f_one_b(8, 32))).svg) < 300_000


def test_matplotlib_is_left_as_it_was():
    with mpl.rc_context({"font.size": 20, "hatch.linewidth": 7}):
        before = dict(mpl.rcParams)
        assert draw(predicted(gpipe(2, 2))).svg and two_curves().svg
        assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == []


def luminance(colour):
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in mpl.colors.to_rgb(colour)
    ]
    return sum(c * w for c, w in zip(linear, (0.2126, 0.7152, 0.0722)))


@pytest.mark.parametrize("colour", [*PALETTE.values(), GREY])
def test_white_text_has_enough_contrast(colour):
    assert 1.05 / (luminance(colour) + 0.05) >= 4.5


def test_bands_tell_the_kinds_apart_in_grey():
    kinds = ["F", "B", "W", "U"]
    spans = [Span(0, "compute", kind, 0, i, i + 1) for i, kind in enumerate(kinds)]
    bands = {}
    for patch in draw(Timeline(spans)).figure.findobj(PathPatch):
        x, y = patch.get_path().vertices.min(axis=0)
        if y > 20:  # below the legend
            bands.setdefault(round(x), []).append((round(y), patch.get_facecolor()))
    (f, b, w, u) = ([y - band[0][0] for y, _ in band] for band in bands.values())
    assert (f, b, w, u) == ([0], [0, 14], [0, 0], [0, 0, 14])
    for box, *stripes in bands.values():
        for stripe in stripes:
            assert luminance(stripe[1]) > 2 * luminance(box[1])


def test_notebook_output_is_an_image_with_text():
    timeline = predicted(gpipe(1, 2))
    bundle = draw(timeline, titles=['<"A" & B>'])._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert '<"A" & B>' in bundle["text/plain"]
    page = bundle["text/html"]
    assert page.startswith('<figure class="lab-figure"')
    assert '<div class="lab-scroll"' in page
    assert 'alt="Timeline of compute per rank' in page
    assert "&lt;&quot;A&quot; &amp; B&gt;" in page and '<"A"' not in page
    assert 'src="data:image/svg+xml;base64,PD94bWw' in page
    assert "<details><summary>The figure as text</summary>" in page
    assert '<th scope="col">rank</th>' in page and "<td>F0 F1 B1 B0</td>" in page


def test_save_refuses_other_suffixes(tmp_path):
    with pytest.raises(ValueError, match="cannot write 'a.pdf': name it .svg or .png"):
        draw(predicted(gpipe(1, 1))).save(tmp_path / "a.pdf")
    assert list(tmp_path.iterdir()) == []


def test_save_replaces_whole_files_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.svg"
    path.write_text("earlier")

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        draw(predicted(gpipe(1, 1))).save(path)
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


def two_curves(**options):
    x = [1, 2, 4, 8, 16, 32]
    series = [
        {"label": "4 stages", "x": x, "y": [100 * 3 / (m + 3) for m in x]},
        {"label": "4 stages", "x": x[:3], "y": [76, 61, 44], "style": "points"},
        {"label": "5 stages", "x": x, "y": [100 * 4 / (m + 4) for m in x]},
    ]
    title = "The bubble shrinks as the number of microbatches grows"
    return curve(series, "microbatches", "bubble in %", title, "two curves", **options)


@pytest.mark.parametrize("log", ["", "x", "y", "xy"])
def test_curve_is_readable(log):
    assert_readable(two_curves(log=log))


def test_labels_of_ends_that_meet_are_moved_apart():
    for last in (0, 50, 100):
        series = [
            {"label": f"a label of some {i} words", "x": [1, 2], "y": [100, last]}
            for i in range(5)
        ]
        picture = curve(series, "x", "y", "title", "alt")
        assert_readable(picture)
        axes = picture.figure.axes[0]
        assert all(-0.01 < label.xyann[1] < 1.01 for label in axes.texts)


def test_curve_of_wide_ranges_is_readable():
    x = [2**i for i in range(10, 28)]
    series = [{"label": "predicted", "x": x, "y": [5e-6 + n / 1e10 for n in x]}]
    assert_readable(curve(series, "bytes", "seconds", "A message", "alt", log="xy"))


def test_curve_has_one_label_and_colour_for_a_formula_and_its_points():
    picture = two_curves()
    assert words(picture).count("4 stages") == 1
    formula, points, other = picture.figure.axes[0].lines
    assert formula.get_color() == points.get_color() != other.get_color()
    assert picture.figure.axes[0].get_ylim()[0] == 0


def test_curve_as_a_table():
    table = two_curves().table
    assert table[0] == {
        "microbatches": 1,
        "4 stages (line)": 75.0,
        "4 stages (points)": 76,
        "5 stages (line)": 80.0,
    }
    assert table[-1]["4 stages (points)"] == ""
    assert "<td>75</td><td>76</td><td>80</td>" in two_curves()._html()


def test_curve_refuses_what_it_cannot_plot():
    with pytest.raises(ValueError, match="x and y of 'a' need one length"):
        curve([{"label": "a", "x": [1, 2], "y": [1]}], "x", "y", "title", "alt")
    with pytest.raises(ValueError, match="x reaches 0: log axes begin above 0"):
        curve([{"label": "a", "x": [0, 1], "y": [1, 1]}], "", "", "", "", log="x")


def pipeline(d, ratio="1:2"):
    if d == 3:
        raise ValueError("no pipeline of three")
    backward = int(ratio[-1])
    return draw(simulate(gpipe(d, 2), {"F": 1, "B": backward}, clock=CLOCK))


def test_explorer_without_ipywidgets_is_the_default_picture(monkeypatch):
    monkeypatch.delenv("LABS_STATIC", raising=False)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    picture = explorer(pipeline, title="GPipe", d=(1, 8, 4), ratio=["1:3", "1:2"])
    assert isinstance(picture, Picture)
    assert picture.svg == pipeline(4, "1:3").svg


def test_explorer_in_the_book_is_the_default_picture(monkeypatch):
    monkeypatch.setenv("LABS_STATIC", "1")
    picture = explorer(pipeline, d=(1, 8, 2))
    assert isinstance(picture, Picture) and picture.svg == pipeline(2).svg


def test_live_explorer_has_sliders_and_the_static_picture(monkeypatch, capsys):
    pytest.importorskip("ipywidgets")
    monkeypatch.delenv("LABS_STATIC", raising=False)
    seen = []

    def function(**values):
        seen.append(values)
        return pipeline(**values)

    live = explorer(function, title="<GPipe>", d=(1, 8, 4), ratio=["1:2", "1:3"])
    bundle = live._repr_mimebundle_()
    assert bundle["text/html"] == pipeline(4)._repr_mimebundle_()["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle
    heading, d, ratio, _ = live.box.children
    assert heading.value == "<b>&lt;GPipe&gt;</b>"
    assert (d.description, d.min, d.max, d.value) == ("d", 1, 8, 4)
    assert (ratio.description, ratio.options) == ("ratio", ("1:2", "1:3"))
    d.value = 2
    assert seen[-1] == {"d": 2, "ratio": "1:2"}
    d.value = 3
    assert "no pipeline of three" in capsys.readouterr().out


def test_live_explorer_takes_fractions(monkeypatch):
    pytest.importorskip("ipywidgets")
    monkeypatch.delenv("LABS_STATIC", raising=False)
    live = explorer(lambda backward_cost: pipeline(1), backward_cost=(1, 3, 1.5))
    slider = live.sliders["backward_cost"]
    assert (slider.description, slider.value) == ("backward cost", 1.5)
    assert slider.step == pytest.approx(0.02)


def test_explorer_refuses_other_choices():
    with pytest.raises(ValueError, match=r"d=\(1, 8\) is no choice"):
        explorer(pipeline, d=(1, 8))
