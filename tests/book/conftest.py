"""Build the book once for all tests of this folder, away from the author's _build."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def jupyter_book():
    """Return a function that builds as `make book` does (jupyter-book<2)."""
    program = Path(sys.executable).with_name("jupyter-book")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}

    def build(source, output, *options):
        """Return the exit code and everything that was printed."""
        command = [program, "build", source, "--path-output", output, "-W", "-n"]
        done = subprocess.run(
            [*command, *options],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout

    return build


@pytest.fixture(scope="session")
def html(tmp_path_factory, jupyter_book):
    """Return the folder of the finished pages."""
    output = tmp_path_factory.mktemp("book")
    code, text = jupyter_book(ROOT, output)
    assert code == 0, text[-5000:]
    return output / "_build" / "html"
