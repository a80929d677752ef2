"""Build both notebooks of a topic from one source.

    solutions/<key>.py  ->  solutions/<key>.ipynb   the answers in full
    labs/<key>.py       ->  labs/<key>.ipynb        the answers left to the student

The source is in jupytext's percent format. An exercise is two cells:

    # %% tags=["exercise"] exercise="double" points=2
    def double(x):
        '''Return twice x.'''
        return 2 * x

    # %% tags=["check"] exercise="double"
    check("double", double)

A practice exercise takes its answer from the lab module instead:

    # %% tags=["exercise"] exercise="forward" practice=true
    from labs.gpipe import forward

Other tags: `expected` (the student sees the solution's output, such as a figure),
`solution` (only in the solution notebook), `nbval-ignore-output` (differs between
machines, so no output is stored). `id="name"` gives a cell a name of its own.
CONTRIBUTING.md says more. Both notebooks are run; building twice changes no byte.
"""

import argparse
import ast
import copy
import hashlib
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
CELL_SECONDS = 300
YOUR_TURN = '    raise NotImplementedError("your turn")'
ROLES = {"exercise": "answer", "check": "check", "solution": "hidden"}
EVERYDAY = re.compile(r"(for \w+ in range\(\w+\):|from .* import .*|import .*)")


class BuildError(Exception):
    """Says in one sentence what is wrong with a source and what to do."""


# ---- the source ------------------------------------------------------------------


def read_source(root, key):
    """Return the cells of solutions/<key>.py, each with its id, role and exercise."""
    path = root / "solutions" / f"{key}.py"
    if not path.exists():
        raise BuildError(f"{path} is missing; a topic's notebooks are built from it.")
    cells = jupytext.read(path, fmt="py:percent").cells
    cells = [cell for cell in cells if cell.cell_type != "raw" and cell.source.strip()]
    exercises = {}
    for cell in cells:
        label(cell)
        if cell.metadata.lab.role == "answer":
            exercises[cell.metadata.lab.exercise] = cell
    for cell in cells:
        if cell.metadata.lab.role in ("answer", "check"):
            finish_exercise(root, cell, exercises)
    check_sources(key, cells)
    return cells


def label(cell):
    """Move what the source says about a cell into `cell.metadata.lab` and its tags."""
    said = cell.metadata
    tags = said.get("tags", [])
    roles = [ROLES[tag] for tag in tags if tag in ROLES] or ["given"]
    lab = {"role": roles[0]}
    for name in ("exercise", "points", "practice", "rtol", "atol"):
        if name in said:
            lab[name] = said[name]
    if roles[0] in ("answer", "check") and "exercise" not in lab:
        raise BuildError(f'A cell tagged {tags} needs exercise="name": {cell.source!r}')
    cell.id = said.get("id", "")
    kept = [tag for tag in tags if tag not in ROLES]
    cell.metadata = nbformat.from_dict({"lab": lab} | ({"tags": kept} if kept else {}))


def finish_exercise(root, cell, exercises):
    """Fill in an answer's source and first line, and a check's marker and points."""
    lab = cell.metadata.lab
    answer = exercises.get(lab.exercise)
    if answer is None:
        raise BuildError(f"The check of {lab.exercise} has no exercise cell.")
    lab.points = answer.metadata.lab.get("points", 0)
    if lab.role == "check":
        cell.source = f"# NBVAL_CHECK_OUTPUT\n{cell.source}"
        return
    if lab.get("practice"):
        module = ast.parse(cell.source).body[0].module
        text = (root / (module.replace(".", "/") + ".py")).read_text("utf-8")
        node, lines = find_function(text, lab.exercise)
        cell.source = "\n".join(lines[first_line(node) : node.end_lineno])
    cell.source = f"# lab: answer {lab.exercise}\n{cell.source}"


def check_sources(key, cells):
    """Give the cells their ids; refuse doubled ids and exercises without one check."""
    seen = Counter()
    for cell in cells:
        lab = cell.metadata.lab
        kind = "text" if cell.cell_type == "markdown" else lab.role
        stem = f"{lab.exercise}-{kind}" if "exercise" in lab else kind
        if not cell.id:
            seen[stem] += 1
            first = "exercise" in lab and seen[stem] == 1
            cell.id = stem if first else f"{stem}-{seen[stem]}"
    for name, count in Counter(cell.id for cell in cells).items():
        if count > 1:
            raise BuildError(f"solutions/{key}.py has {count} cells called {name}.")
    answers, checks = (
        [c.metadata.lab.exercise for c in cells if c.metadata.lab.role == role]
        for role in ("answer", "check")
    )
    if sorted(answers) != sorted(checks) or len(set(answers)) < len(answers):
        raise BuildError(
            f"solutions/{key}.py: every exercise needs one exercise cell and one check "
            f"cell; found exercises {answers} and checks {checks}."
        )


def find_function(source, name):
    """Return the ast node of the function `name` and the source's lines."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node, source.splitlines()
    raise BuildError(f"There is no function {name} where exercise {name} needs it.")


def first_line(node):
    return min(n.lineno for n in [node, *node.decorator_list]) - 1


def stub(source, name):
    """Return the function `name` with signature and docstring, and nothing else."""
    node, lines = find_function(source, name)
    if not ast.get_docstring(node):
        raise BuildError(f"Exercise {name} needs a docstring: it is the task's text.")
    return "\n".join([*lines[first_line(node) : node.body[0].end_lineno], YOUR_TURN])


def telling_lines(cell):
    """Return the lines of a graded answer that would give it away."""
    released = stub(cell.source, cell.metadata.lab.exercise)
    shown = {line.strip() for line in released.splitlines()}
    lines = (line.strip() for line in cell.source.splitlines()[1:])
    return [
        line
        for line in lines
        if line not in shown and len(line) >= 20 and not EVERYDAY.fullmatch(line)
    ]


# ---- the two notebooks -----------------------------------------------------------


def solution_cells(cells):
    return copy.deepcopy(cells)


def student_cells(cells):
    cells = [copy.deepcopy(c) for c in cells if c.metadata.lab.role != "hidden"]
    for cell in cells:
        lab = cell.metadata.lab
        if lab.role == "answer":
            marker = cell.source.splitlines()[0]
            cell.source = f"{marker}\n{stub(cell.source, lab.exercise)}"
    return cells


def run(cells, root, path):
    """Execute the cells in one fresh kernel, in the notebook's folder."""
    notebook = nbformat.v4.new_notebook(cells=cells)
    env = dict(os.environ, PYTHONPATH=str(root), LABS_STATIC="1")
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_SECONDS,
        extra_arguments=["--log-level=ERROR"],
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute(env=env)
    except (CellControlSignal, DeadKernelError) as error:
        ran = [cell.id for cell in cells if cell.get("execution_count")]
        where = f"{path.relative_to(root)}, cell {ran[-1] if ran else cells[0].id}"
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()[-1]
        raise BuildError(f"{where}: {reason}") from None
    for cell in cells:
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            cell.outputs = []


def refuse_wrong_answers(solution):
    """A check of labs.checks says "right", "not yet ..." or "your turn"."""
    for cell in solution:
        verdict = stored_text(cell) if cell.metadata.lab.role == "check" else ""
        if "not yet" in verdict or "your turn" in verdict:
            raise BuildError(f"The solution fails its own check: {verdict.strip()}")


def share_outputs(student, solution):
    """Leave in the student's cells only what may stand there.

    A check or an `expected` cell shows what the solution gives. Any other cell keeps
    its output if the answers do not change it.
    """
    solved = {cell.id: cell.get("outputs") for cell in solution}
    for cell in student:
        if cell.cell_type != "code":
            continue
        wanted = cell.metadata.lab.role == "check"
        wanted = wanted or "expected" in cell.metadata.get("tags", [])
        if wanted or cell.outputs == solved[cell.id]:
            cell.outputs = copy.deepcopy(solved[cell.id])
        else:
            cell.outputs = []


def release_hash(cells):
    """Name what was released: sources, metadata and the outputs of checks."""
    released = [
        (c.id, c.source, c.metadata, c.metadata.lab.role == "check" and c.outputs)
        for c in cells
    ]
    text = json.dumps(released, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dump(key, cells, release):
    """Return the bytes of a notebook; equal cells give equal bytes."""
    metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "lab": {"schema": 1, "lab": key, "release": release},
        "language_info": {"name": "python"},
    }
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.validate(notebook)
    return (nbformat.writes(notebook).rstrip("\n") + "\n").encode()


# ---- what must not be stored ------------------------------------------------------


def stored_text(cell):
    """Return the text of a cell's outputs, embedded pictures left out."""
    texts = [output.get("text", "") for output in cell.outputs]
    for output in cell.outputs:
        texts += [t for t in output.get("data", {}).values() if isinstance(t, str)]
    return re.sub(r"base64,[A-Za-z0-9+/=]+", "", "\n".join(texts))


def faults(notebook):
    """Return a sentence for each thing in a notebook that would mislead nbval."""
    found = []
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("the kernel must be called python3")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            found += [f"cell {cell.id}: {fault}" for fault in cell_faults(cell)]
    return found


def cell_faults(cell):
    lines = cell.source.rstrip().splitlines() or [""]
    kinds = {output.output_type for output in cell.outputs}
    streams = {output.get("name") for output in cell.outputs}
    types = {kind for output in cell.outputs for kind in output.get("data", {})}
    is_check = cell.metadata.get("lab", {}).get("role") == "check"
    tests = {
        "ends in `;`, which nbval does not obey": lines[-1].endswith(";"),
        "has a magic, which may hide what follows": any(
            line.lstrip().startswith(("%", "!")) for line in lines
        ),
        "stores an address (0x…)": re.search("0x[0-9a-f]{6,}", stored_text(cell)),
        "stores text on stderr": "stderr" in streams,
        "stores a progress bar": re.search(r"\r|it/s\b", stored_text(cell)),
        "stores an error": "error" in kinds,
        "may raise": "raises-exception" in cell.metadata.get("tags", []),
        "has no execution count, so nbval would compare nothing": (
            not cell.execution_count
        ),
        "is a check that shows more than plain text; draw in an `expected` cell": (
            is_check and types - {"text/plain"}
        ),
    }
    return [fault for fault, holds in tests.items() if holds]


def leaks(cells, texts):
    """Return a sentence for each line of a graded answer found in `texts`.

    cells: of read_source. texts: dict of a file's name -> its text.
    """
    return [
        f"{name} contains a line of the answer to {cell.metadata.lab.exercise}: {line}"
        for cell in cells
        if cell.metadata.lab.role == "answer" and not cell.metadata.lab.get("practice")
        for line in telling_lines(cell)
        for name, text in texts.items()
        if line in text
    ]


# ---- building --------------------------------------------------------------------


def build(root, key):
    """Return {path: bytes} of both notebooks of a topic."""
    cells = read_source(root, key)
    solution, student = solution_cells(cells), student_cells(cells)
    paths = root / "solutions" / f"{key}.ipynb", root / "labs" / f"{key}.ipynb"
    texts = {
        str(path.relative_to(root)): path.read_text("utf-8")
        for path in sorted((root / "labs").rglob("*.py"))
    }
    texts[f"labs/{key}.ipynb"] = "\n".join(cell.source for cell in student)
    problems = leaks(cells, texts)
    if problems:
        raise BuildError("\n".join(problems))
    run(solution, root, paths[0])
    refuse_wrong_answers(solution)
    run(student, root, paths[1])
    share_outputs(student, solution)
    release = release_hash(student)
    built = {}
    for path, part in zip(paths, (solution, student)):
        built[path] = dump(key, part, release)
        for fault in faults(nbformat.reads(built[path].decode(), as_version=4)):
            problems.append(f"{path.relative_to(root)}, {fault}.")
    if problems:
        raise BuildError("\n".join(problems))
    return built


def difference(path, data):
    """Return which cell of the file at `path` differs first from `data`, or ''."""
    if not path.exists():
        return "is missing"
    if path.read_bytes() == data:
        return ""
    try:
        old = nbformat.read(path, as_version=4).cells
    except Exception as error:
        return f"cannot be read ({type(error).__name__})"
    new = nbformat.reads(data.decode(), as_version=4).cells
    for was, now in zip(old, new):
        if was != now:
            return f"differs in cell {now.id}"
    return "differs in its length or metadata"


def write(path, data):
    """Write all or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def main(arguments=None, root=ROOT):
    parser = argparse.ArgumentParser(description="Build the notebooks of each topic.")
    parser.add_argument("topics", nargs="*", help="default: every solutions/*.py")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    keys = options.topics or sorted(p.stem for p in (root / "solutions").glob("*.py"))
    stale = []
    try:
        for key in keys:
            stale += refresh(root, key, options.check)
    except BuildError as error:
        stale.append(str(error))
    for sentence in stale:
        print(sentence, file=sys.stderr)
    return 1 if stale else 0


def refresh(root, key, check):
    """Build a topic; write what changed or, to check, return sentences about it."""
    start = time.perf_counter()
    stale = []
    for path, data in build(root, key).items():
        name = path.relative_to(root)
        changed = difference(path, data)
        if changed and check:
            stale.append(f'{name} {changed}; run "make notebooks".')
        elif changed:
            write(path, data)
        state = "as built" if not changed else "stale" if check else "written"
        print(f"{name}: {state}, {time.perf_counter() - start:.0f} s", flush=True)
    return stale


if __name__ == "__main__":
    sys.exit(main())
