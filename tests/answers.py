"""For tests of exercises: the answers of a topic's solution, and wrong ones."""

import importlib
import sys
from functools import cache
from pathlib import Path

import cloudpickle

from labs.checks import judge
from tools import build_notebooks as builder

# Answers of this file go to ranks as those of a notebook do; ranks need not import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).resolve().parent.parent
KEYS = sorted(path.stem for path in (ROOT / "solutions").glob("*.py"))


@cache
def answers(key):
    """The names that the set-up and answer cells of a topic's solution define."""
    notebook = {"__name__": "notebook"}
    for cell in builder.read_source(ROOT, key):
        if cell.id == "setup" or cell.metadata.lab.role == "answer":
            exec(cell.source, notebook)
    return notebook


def exercises(key):
    return importlib.import_module(f"labs.checks.{key}").EXERCISES


def exercise(key, name):
    return exercises(key)[name]


def wrong(key):
    """Wrong answers: (exercise, answer, words of its verdict)."""
    module = importlib.import_module(f"wrong.{key}")
    cloudpickle.register_pickle_by_value(module)  # ranks need not import it either
    return module.WRONG


ALL = [(key, name) for key in KEYS for name in exercises(key)]


def unanswered(*arguments):
    raise NotImplementedError("your turn")


def verdict(key, name, answer, seed=0):
    return judge(exercise(key, name), answer, seed)


def worth(key, name):
    points = exercise(key, name).points
    return f"({points} point{'s' * (points > 1)})" if points else "(practice)"
