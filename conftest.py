"""Make the plain commands safe, such as `pytest -n 2 --nbval-lax labs/gpipe.ipynb`."""

import os

import pytest

# Doctest would import each of these as one module "conftest".
collect_ignore_glob = ["tests/*conftest.py"]

# Files that workers share topic by topic.
APART = [f"tests/test_{name}.py" for name in ("checks", "labs", "notebooks")]

# Threads of several workers would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Cells with a slider show their fixed figure, as in the stored notebooks.
os.environ.setdefault("LABS_STATIC", "1")


def pytest_configure(config):
    options = config.option
    # Cells of one notebook belong to one worker: they share a kernel.
    if getattr(options, "dist", "no") == "load":
        options.dist = "loadscope"
    # nbval waits 2000 s for a cell unless told otherwise.
    if getattr(options, "nbval_cell_timeout", 0) == 2000:
        options.nbval_cell_timeout = 300


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep together what shares a fixture: the tests of a file, of the built book."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            if file.startswith("tests/book/"):
                return "tests/book"
            _, _, parameters = test.partition("[")  # the topic is the first of them
            topic = parameters.rstrip("]").partition("-")[0]
            return file + topic if file in APART else file

    if config.option.dist == "loadscope":
        return Together(config, log)
    return None
