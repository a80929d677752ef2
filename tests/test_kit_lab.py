import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from labs import gpipe
from labs.kit import clock, draw, lab, toy, training, world
from labs.kit import plan as planning
from labs.kit.lab import ledger, show
from labs.kit.timeline import Link, Op, Span, Timeline

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).resolve().parent.parent


# ---- the ledger ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (0.272727, "%", "27.27 %"),
        (0, "%", "0.00 %"),
        ([0.5, 0.25], "%", "50.00, 25.00 %"),
        ([1 / 3, 0.1 + 0.7 / 3], "%", "33.33 % each"),
        ([8, 8, 8], "", "8 each"),
        ([4, 3, 2, 1], "", "4, 3, 2, 1"),
        ([5], "", "5"),
        (123456, "", "123456"),
        (5.36621, "", "5.366"),
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (262144, "B", "262.1 kB"),
        ([4_499_000, 500_000], "B", "4.499, 0.5 MB"),
        (2.5e9, "B", "2.5 GB"),
        (0.00123, "s", "1.23 ms"),
        (12.5, "s", "12.5 s"),
        (4e-6, "s", "4 µs"),
        ("below 1e-06", "", "below 1e-06"),
        (None, "%", "-"),
        (float("nan"), "", "nan"),
        (float("nan"), "%", "nan %"),
    ],
)
def test_show(value, unit, text):
    assert show(value, unit) == text


def test_the_ledger_is_aligned():
    rows = [
        ("bubble", 0.2727, 0.5936, "%"),
        ("idle per stage", [0.2727] * 3, [0.0558, 0.869, 0.8559], "%"),
        ("sent", 1000, None, "B"),
    ]
    table = """
                   predicted |              counted
bubble               27.27 % |              59.36 %
idle per stage  27.27 % each | 5.58, 86.90, 85.59 %
sent                    1 kB |                    -"""
    assert "\n" + ledger(rows) == table


# ---- the command line, without ranks -------------------------------------------------


def main(*argv, measure=gpipe.measure):
    """Run the command line in this process; return its exit code."""
    try:
        lab.main("gpipe", gpipe.__doc__, gpipe.Config, measure, list(argv))
    except SystemExit as error:
        return error.code
    return 0


@pytest.fixture
def no_ranks(monkeypatch):
    monkeypatch.setattr(world, "launch", None)


@pytest.mark.parametrize(
    "options, words",
    [
        ("--batch 0", "batch must be a whole number from 1 up, not 0"),
        ("--batch 4", "4 samples cannot make 8 microbatches: choose 1 to 4"),
        ("--steps 0", "steps must be a whole number from 1 up, not 0"),
        ("--steps -3", "steps must be a whole number from 1 up, not -3"),
        ("--steps many", "invalid int value: 'many'"),
        ("--stages 1000", "8 layers cannot make 1000 stages: choose 1 to 8"),
        ("--stages 0", "n_stages must be a whole number from 1 up, not 0"),
        ("--microbatches 0", "n_microbatches must be a whole number from 1 up, not 0"),
        ("--model image", "no model 'image': choose one of text, digits"),
        ("--schedule odd", "no schedule 'odd': choose one of gpipe"),
        ("--partition odd", "no partition 'odd': choose one of even, cost"),
        ("--clock sun", "argument --clock: invalid choice: 'sun'"),
        ("--bandwidth 0", "a link needs latency >= 0 and bandwidth > 0"),
        ("--bandwidth -1", "a link needs latency >= 0 and bandwidth > 0"),
        ("--bandwidth nan", "a link needs latency >= 0 and bandwidth > 0"),
        ("--latency -1", "a link needs latency >= 0 and bandwidth > 0"),
        ("--latency inf", "a link needs latency >= 0 and bandwidth > 0"),
        ("--clock wall --latency 1", "wall time has the links of this machine"),
        ("--out /dev/null/x", "cannot write into '/dev/null/x' (Not a directory)"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_what_cannot_run_is_one_sentence(
    no_ranks, tmp_path, monkeypatch, capsys, options, words
):
    monkeypatch.chdir(tmp_path)
    assert main(*options.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err
    assert err.startswith("labs.gpipe: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_teaches(capsys):
    assert main("--help") == 0
    text = capsys.readouterr().out
    assert gpipe.__doc__.strip() in text
    for name in "--stages --microbatches --recompute --clock --latency --out".split():
        assert name in text
    assert "(default: 8)" in text


def parsed(*argv):
    return lab.parse(gpipe.Config, "gpipe", gpipe.__doc__, argv)


def test_options_make_a_config_and_a_clock():
    config, clk, folder = parsed("--clock", "unit", "--stages", "3", "--out", "here")
    assert config == gpipe.Config(n_stages=3) and folder == "here"
    assert clk.phrase == clock.Virtual(clock.Unit()).phrase
    config, clk, _ = parsed("--recompute", "--clock", "unit", "--model", "digits")
    assert config == gpipe.Config("digits", recompute=True)
    assert "unit costs (F = 1, B = 3)" in clk.phrase
    _, clk, folder = parsed("--clock", "flops", "--latency", "1", "--bandwidth", "8")
    assert clk.link == Link(1.0, 8.0) and isinstance(clk.cost, clock.Flops)
    assert folder == "out"
    _, clk, _ = parsed("--clock", "wall")
    assert isinstance(clk, clock.Wall)


@pytest.mark.parametrize("gpus, kind", [(0, "timed"), (1, "timed"), (4, "wall")])
def test_auto_is_wall_time_where_each_rank_has_a_gpu(monkeypatch, gpus, kind):
    monkeypatch.setattr(world, "plan", lambda n: planning.plan(n, gpus, cores=8))
    monkeypatch.setattr(world, "cores", lambda: 8)
    clk = lab.make_clock("auto", gpipe.Config())
    assert isinstance(clk, clock.Wall if kind == "wall" else clock.Virtual)
    if kind == "timed":
        assert isinstance(clk.cost, clock.Timed) and clk.cost.slots == (gpus or 4)
    clk = lab.make_clock("auto", gpipe.Config(), Link(latency=1e-3))
    assert isinstance(clk.cost, clock.Timed)  # a link is modelled in virtual time


# ---- what is published ---------------------------------------------------------------


def report(remarks=(), losses=(2.0, 1.0)):
    spans = [
        [Span(0, "compute", "F", 0, 0.0, 1.0), Span(0, "compute", "B", 0, 1.0, 3.0)]
    ]
    timeline = Timeline.merge(spans, clock="virtual time", hardware="CPU")
    made = training.Report(
        gpipe.Config(n_stages=1), timeline, list(losses), [2.0, 1.0], [10], [0], 1e-9,
        list(remarks),
    )  # fmt: skip
    made.hardware = "CPU"
    made.predicted = training.predict([[Op("F", 0), Op("B", 0)]], timeline)
    made.rows = [("bubble", 0.0, timeline.bubble(), "%")]
    return made


def test_publish_prints_and_writes_a_figure_and_one_trace(tmp_path, capsys):
    lab.publish("gpipe", report(), str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["gpipe.svg", "gpipe.trace.json"]
    assert json.loads((tmp_path / "gpipe.trace.json").read_text())["traceEvents"]
    text = capsys.readouterr().out
    assert "virtual time" in text and "1 rank ·" in text
    assert "weights off by (relative)  below 1e-06 | below 1e-06" in text
    assert f"trace   {tmp_path / 'gpipe.trace.json'}" in text


def test_remarks_are_printed_and_nothing_is_claimed(tmp_path, capsys):
    lab.publish("gpipe", report(["BatchNorm is not the same."]), str(tmp_path))
    text = capsys.readouterr().out
    assert "\n\nBatchNorm is not the same.\n\n" in text
    assert "weights off by (relative)  (no claim) | below 1e-06" in text


def test_under_torchrun_only_rank_0_speaks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "1")
    lab.publish("gpipe", report(), str(tmp_path))
    assert main("--batch", "0") == 2
    assert capsys.readouterr() == ("", "") and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    assert main("--batch", "0") == 2
    assert "batch must be" in capsys.readouterr().err


def test_failures_have_exit_codes(tmp_path, capsys, monkeypatch):
    def fails(error):
        def measure(config, clk, progress):
            raise error

        return main("--out", str(tmp_path), measure=measure)

    failure = world.Failure(1, "raised", "KeyError: 'w'")
    assert fails(world.RankFailed(failure)) == 1
    assert capsys.readouterr().err == "labs.gpipe: rank 1 raised KeyError: 'w'\n"
    assert fails(OSError("disk full")) == 1
    assert fails(KeyboardInterrupt()) == 130
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_half_written_when_drawing_fails(tmp_path, monkeypatch, capsys):
    def no(*args, **kwargs):
        raise ValueError("no picture")

    monkeypatch.setattr(draw, "draw", no)
    code = main("--out", str(tmp_path), measure=lambda *args, progress: report())
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert capsys.readouterr().out == ""


# ---- training ------------------------------------------------------------------------


def test_distance_is_relative_and_shows_what_is_no_number():
    theirs = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
    ours = {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor(4.0)}
    assert training.distance(ours, theirs) == pytest.approx(0.1)
    assert training.distance(theirs, theirs) == 0
    ours["b"] = torch.tensor(float("nan"))
    assert training.distance(ours, theirs) != training.distance(ours, theirs)


def test_the_reference_is_plain_training():
    config = gpipe.Config("digits", batch=4, steps=3)
    losses, weights = training.reference(config)
    assert losses == toy.reference_run("digits", 3, 4)
    assert weights.keys() == toy.build("digits").state_dict().keys()


def test_a_module_without_weights_has_no_optimizer():
    assert training.sgd(nn.Tanh(), "text") is None


def test_loss_gap_does_not_pass_over_nan():
    made = report(losses=[2.5, 1.0])
    assert made.loss_gap == 0.5
    nan = float("nan")
    for losses in ([nan, 1.0], [2.0, nan]):
        assert report(losses=losses).loss_gap != report(losses=losses).loss_gap


@pytest.mark.parametrize(
    "steps, shown", [(1, 1), (3, 3), (10, 10), (19, 19), (20, 10), (300, 10)]
)
def test_progress_comes_about_ten_times_and_at_the_end(steps, shown):
    due = [step for step in range(steps) if training._due(step, steps)]
    assert len(due) == shown and due[-1] == steps - 1


def test_progress_is_off_unless_asked(capfd):
    config = gpipe.Config("digits", n_stages=2, n_microbatches=2, batch=4, steps=2)
    clk = clock.Virtual(clock.Unit())
    quiet = gpipe.measure(config, clk)
    assert capfd.readouterr() == ("", "")
    told = gpipe.measure(config, clk, progress=True)
    assert capfd.readouterr() == (
        "",
        f"[rank 0] step 1 of 2: loss {quiet.losses[0]:.4f}\n"
        f"[rank 0] step 2 of 2: loss {quiet.losses[1]:.4f}\n"
        "and the same steps in one process, to compare\n",
    )
    assert told.losses == quiet.losses and told.sent == quiet.sent
    assert told.timeline.spans == quiet.timeline.spans


# ---- the command line as a reader calls it -------------------------------------------

DIGITS = "--model digits --stages 2 --microbatches 3 --clock unit".split()


def call(*command, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=200
    )


def test_python_and_torchrun_print_the_same(tmp_path):
    module = ["-m", "labs.gpipe", *DIGITS]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    plain = call(sys.executable, *module, cwd=tmp_path)
    figure = (tmp_path / "out/gpipe.svg").read_bytes()
    trace = (tmp_path / "out/gpipe.trace.json").read_bytes()
    started = call(sys.executable, *torchrun, *module, cwd=tmp_path)
    assert plain.returncode == started.returncode == 0, plain.stderr + started.stderr
    assert plain.stdout == started.stdout
    assert sorted(os.listdir(tmp_path / "out")) == ["gpipe.svg", "gpipe.trace.json"]
    assert (tmp_path / "out/gpipe.svg").read_bytes() == figure
    assert (tmp_path / "out/gpipe.trace.json").read_bytes() == trace
    steps = [line for line in plain.stderr.splitlines() if "step" in line]
    assert [line[:21] for line in steps[:3]] == [
        f"[rank 0] step {i} of 3:" for i in (1, 2, 3)
    ]
    said = started.stderr.splitlines()
    assert [line for line in said if line.startswith("step")] == [
        line.removeprefix("[rank 0] ") for line in steps[:3]
    ]


def test_ctrl_c_ends_a_long_run_at_once(tmp_path):
    command = [sys.executable, "-m", "labs.gpipe", *DIGITS, "--steps", "1000000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not (tmp_path / "out").exists():  # made before the ranks start
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "")
    assert os.listdir(tmp_path / "out") == []
