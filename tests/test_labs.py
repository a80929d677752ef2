"""What the command of every lab does, whatever its topic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labs.kit import toy

ROOT = Path(__file__).resolve().parent.parent
TOPICS = sorted(path.stem for path in (ROOT / "solutions").glob("*.py"))
STAGES = ["--stages", "2"]
RANKS = {"single_gpu": [], "gpipe": STAGES, "model_parallel": STAGES}  # else workers
RANKS["parameter_server"] = ["--workers", "2", "--servers", "1"]
TORCHRUN = ["-m", "torch.distributed.run"]


def call(*command, cwd):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("key", TOPICS)
@pytest.mark.parametrize("model", toy.MODELS)
def test_a_lab_prints_its_ledger_and_leaves_a_figure_and_a_trace(key, model, tmp_path):
    """Under torchrun it prints the same."""
    ranks = RANKS.get(key, ["--workers", "2"])
    options = ["--model", model, *ranks, "--steps", "2", "--batch", "8"]
    module = ["-m", f"labs.{key}", *options, "--clock", "unit"]
    plain = call(*module, cwd=tmp_path)
    assert "predicted |" in plain and "below 1e-06" in plain
    n_ranks = sum(map(int, ranks[1::2])) or 1
    if model == "digits":
        command = [*TORCHRUN, "--nproc-per-node", str(n_ranks), *module]
        assert call(*command, cwd=tmp_path) == plain
    out = tmp_path / "out"
    assert sorted(os.listdir(out)) == [f"{key}.svg", f"{key}.trace.json"]
    trace = json.loads((out / f"{key}.trace.json").read_text())
    assert len({e["pid"] for e in trace["traceEvents"]}) == n_ranks
    assert "</svg>" in (out / f"{key}.svg").read_text()
