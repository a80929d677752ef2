"""Make the plain commands safe, such as `pytest -n 2 --nbval-lax labs/gpipe.ipynb`."""

import os

import pytest

# Doctest would import each of these as one module "conftest".
collect_ignore_glob = ["tests/*conftest.py"]

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


def pytest_itemcollected(item):
    """Say which tests stay together when several workers share them (loadgroup): those
    of a file, of the built book, of a topic's exercises."""
    group = item.path.parent if item.path.parent.name == "book" else item.path
    key = getattr(item, "callspec", None) and item.callspec.params.get("key", "")
    item.add_marker(pytest.mark.xdist_group(f"{group.name}-{key or ''}"))
