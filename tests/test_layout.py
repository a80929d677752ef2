"""The house keeps its rooms: which files there are, who imports whom, how long."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("labs", "solutions", "tools", "tests", "book")
PYTHON = sorted(
    path.relative_to(ROOT)
    for pattern in ["*.py", *(f"{folder}/**/*.py" for folder in FOLDERS)]
    for path in ROOT.glob(pattern)
)
LABS = [path for path in PYTHON if path.parts[0] == "labs"]
KIT = [path for path in LABS if path.parent.name == "kit"]
NO_TOPIC = {"__init__", "doctor", "choosing"}
TOPICS = [p.stem for p in LABS if len(p.parts) == 2 and p.stem not in NO_TOPIC]

# What a module of the kit may import of the kit; the rest must only be free of circles.
BELOW = {
    "timeline": set(),
    "toy": set(),
    "meter": set(),
    "simulate": {"timeline"},
    "draw": {"timeline"},
    "clock": {"timeline"},
    "messages": {"aside", "clock", "timeline"},
    "aside": set(),
}


@cache
def tree(path):
    return ast.parse((ROOT / path).read_text("utf-8"))


def imports(path):
    """Return the modules that a file imports, wherever in it, as dotted names."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found.add(node.module)
    return found


def kit_imports(path):
    ours = [name.split(".") for name in imports(path) if name.startswith("labs.kit.")]
    return {name[2] for name in ours} & {p.stem for p in KIT}


def functions(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree(path)) if isinstance(node, kinds)]


def body_lines(function):
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


# ---- a topic's files -----------------------------------------------------------------


def test_there_is_a_topic():
    assert TOPICS, "labs/ holds no topic"


@pytest.mark.parametrize("key", TOPICS)
def test_a_topic_has_its_full_set_of_files(key):
    wanted = (
        f"labs/{key}.ipynb labs/checks/{key}.py solutions/{key}.py "
        f"solutions/{key}.ipynb book/{key}.md tests/test_{key}.py"
    )
    assert [name for name in wanted.split() if not (ROOT / name).exists()] == []


def test_nothing_belongs_to_no_topic():
    patterns = "labs/*.ipynb solutions/*.ipynb solutions/*.py labs/checks/*.py"
    found = {path.stem for p in patterns.split() for path in ROOT.glob(p)}
    assert found - {"__init__"} == set(TOPICS)


def test_the_contents_list_each_topic_and_no_solution():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))

    def files(entries):
        for entry in entries:
            yield entry["file"]
            yield from files(entry.get("sections", []))

    listed = [file for part in toc["parts"] for file in files(part["chapters"])]
    assert {f"{f}/{key}" for key in TOPICS for f in ("book", "labs")} <= set(listed)
    assert not [file for file in listed if file.startswith("solutions")]


# ---- imports go one way --------------------------------------------------------------


@pytest.mark.parametrize("path", LABS, ids=str)
def test_imports_go_one_way(path):
    """torch, stdlib <- labs.kit <- labs.<key> <- labs.checks.<key>; choosing composes
    the labs, and nobody else in labs/ imports it."""
    allowed = {"labs.kit"}
    if path == Path("labs/choosing.py"):
        allowed |= {f"labs.{key}" for key in TOPICS}
    if path.parent.name != "kit":
        allowed |= {f"labs.{path.stem}"}  # checks import their lab; a lab its own name
    if path.parent.name == "checks":
        allowed |= {"labs.checks"}
    ours = {name for name in imports(path) if name.split(".")[0] == "labs"}
    wrong = {
        name
        for name in ours - {"labs"}
        if not any(f"{name}.".startswith(f"{base}.") for base in allowed)
    }
    assert wrong == set()


@pytest.mark.parametrize("path", KIT, ids=str)
def test_the_kit_has_layers(path):
    allowed = BELOW.get(path.stem, {p.stem for p in KIT})
    assert kit_imports(path) - allowed == set()


def test_the_kit_has_no_circle():
    needs = {path.stem: kit_imports(path) for path in KIT}
    while needs:
        free = {name for name, below in needs.items() if not below & needs.keys()}
        assert free, f"these modules import each other in a circle: {needs}"
        needs = {name: below for name, below in needs.items() if name not in free}


@pytest.mark.parametrize("path", LABS, ids=str)
def test_heavy_libraries_stay_in_their_room(path):
    roots = {name.split(".")[0] for name in imports(path)}
    if path.name != "draw.py":
        assert "matplotlib" not in roots
    if path.name in ("timeline.py", "simulate.py"):
        assert "torch" not in roots


# ---- size and words ------------------------------------------------------------------


def test_ruff_is_content():
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "."]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", PYTHON, ids=str)
def test_lines_and_functions_are_short(path):
    lines = (ROOT / path).read_text("utf-8").splitlines()
    assert [i for i, line in enumerate(lines, 1) if len(line) > 88] == []
    long = {f.name: body_lines(f) for f in functions(path) if body_lines(f) > 30}
    assert long == {}


@pytest.mark.parametrize("key", [*TOPICS, "choosing"])
def test_a_lab_fits_in_200_lines(key):
    assert len((ROOT / f"labs/{key}.py").read_text("utf-8").splitlines()) <= 200


@pytest.mark.parametrize("path", LABS, ids=str)
def test_names_are_the_words_of_the_glossary(path):
    names = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(tree(path)) if isinstance(node, ast.arg)}
    names |= {function.name for function in functions(path)}
    assert names & {"world_size", "mb", "n_mb", "num_stages", "gpu"} == set()


def test_whatever_names_the_book_tool_pins_it():
    """An open requirement brings version 2, which cannot read this book (<2)."""
    files = [*ROOT.glob("*.*"), ROOT / "Makefile", ROOT / ".ci/run"]
    files += [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.*")]
    kinds = {"", ".md", ".py", ".sh", ".toml", ".txt", ".yml"}
    files = [path for path in files if path.suffix in kinds and path.is_file()]
    texts = {path: path.read_text("utf-8") for path in files}
    named = {path: text for path, text in texts.items() if "jupyter-book" in text}
    assert ROOT / "requirements.txt" in named
    assert [str(path) for path, text in named.items() if "<2" not in text] == []
