"""Notebooks: what students get, what nbval finds in it, and how both are built."""

import ast
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from tools import build_notebooks as builder
from tools.build_notebooks import BuildError

ROOT = Path(__file__).resolve().parent.parent
TOPICS = sorted(path.stem for path in (ROOT / "solutions").glob("*.py"))
BOTH = [f"{folder}/{key}.ipynb" for key in TOPICS for folder in ("labs", "solutions")]


def run(*command, cwd=ROOT):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=env, text=True, capture_output=True
    )


def nbval(*arguments, report, cwd=ROOT):
    """Run pytest with nbval; return its text and {number of the cell: passed}."""
    options = ["-p", "no:cacheprovider", "--nbval-current-env", f"--junitxml={report}"]
    done = run("-m", "pytest", *options, *arguments, cwd=cwd)
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return done, {int(c.get("name").split()[-1]): len(c) == 0 for c in cases}


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


# ---- the course's own notebooks ----------------------------------------------------


def test_there_is_a_topic():
    assert TOPICS, "solutions/ holds no topic"


@pytest.mark.parametrize("key", TOPICS)
def test_a_fresh_build_changes_no_byte(key):
    done = run("tools/build_notebooks.py", "--check", key)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("key", TOPICS)
def test_the_solution_passes_every_cell(key, tmp_path):
    path = f"solutions/{key}.ipynb"
    done, passed = nbval("--nbval", path, report=tmp_path / "report.xml")
    assert done.returncode == 0, done.stdout
    assert passed == dict.fromkeys(range(len(code_cells(ROOT / path))), True)


@pytest.mark.parametrize("key", TOPICS)
def test_the_released_notebook_fails_its_checks_and_nothing_else(key, tmp_path):
    path = f"labs/{key}.ipynb"
    done, passed = nbval("--nbval-lax", path, report=tmp_path / "report.xml")
    roles = [cell.metadata.lab.role for cell in code_cells(ROOT / path)]
    assert "check" in roles
    assert passed == {i: role != "check" for i, role in enumerate(roles)}, done.stdout


@pytest.mark.parametrize("key", TOPICS)
def test_every_answer_is_left_to_the_student(key):
    answers = [
        cell.source
        for cell in code_cells(ROOT / f"labs/{key}.ipynb")
        if cell.metadata.lab.role == "answer"
    ]
    assert answers
    for source in answers:
        (function,) = ast.parse(source).body
        docstring, statement = function.body
        assert ast.get_docstring(function)
        assert ast.unparse(statement) == "raise NotImplementedError('your turn')"
        assert source.startswith(f"# lab: answer {function.name}\n")


@pytest.mark.parametrize("key", TOPICS)
def test_no_line_of_an_answer_reaches_the_student(key):
    cells = builder.read_source(ROOT, key)
    paths = [*ROOT.glob("labs/**/*.py"), *ROOT.glob("book/**/*.md")]
    texts = {str(path): path.read_text("utf-8") for path in paths}
    texts[f"labs/{key}.ipynb"] = "\n".join(
        cell.source for cell in read(ROOT / f"labs/{key}.ipynb").cells
    )
    assert builder.leaks(cells, texts) == []


@pytest.mark.parametrize("path", BOTH)
def test_nothing_stored_misleads_nbval(path):
    notebook = read(ROOT / path)
    assert builder.faults(notebook) == []
    assert notebook.metadata.lab.schema == 1
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


# ---- what must not be stored, one case each ------------------------------------------


def cell_with(source="1", text=None, data=None, count=1, tags=(), name="stdout"):
    outputs = []
    if text is not None:
        outputs.append(nbformat.v4.new_output("stream", name=name, text=text))
    if data is not None:
        outputs.append(nbformat.v4.new_output("display_data", data=data))
    metadata = {"tags": list(tags), "lab": {"role": "check" if data else "given"}}
    return nbformat.v4.new_code_cell(
        source, outputs=outputs, execution_count=count, metadata=metadata
    )


@pytest.mark.parametrize(
    "words, cell",
    [
        ("magic", cell_with("%notmagic\nraise TypeError")),
        ("magic", cell_with("x = 1\n!ls")),
        ("address", cell_with(text="<object at 0x7f3a5c>")),
        ("stderr", cell_with(text="UserWarning", name="stderr")),
        ("ends in `;`", cell_with("plot();")),
        ("progress bar", cell_with(text="50%|###  | 5/10 [00:01, 9.99it/s]")),
        ("progress bar", cell_with(text="1\r2")),
        ("execution count", cell_with(count=None)),
        ("may raise", cell_with(tags=["raises-exception"])),
        ("plain text", cell_with(data={"text/html": "<b>1</b>"})),
    ],
)
def test_a_fault_is_named(words, cell):
    (fault,) = builder.cell_faults(cell)
    assert words in fault


def test_a_picture_holds_no_address_and_a_good_cell_no_fault():
    picture = "<img alt='x' src='data:image/svg+xml;base64,0xabcdef00'>"
    cell = cell_with("x = 1;  y = 2\nx", text="0.3\n")
    cell.outputs += cell_with(data={"text/html": picture}).outputs
    assert builder.cell_faults(cell) == []


def test_another_kernel_is_a_fault():
    kernel = {"name": "my-env", "display_name": "Mine"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    assert builder.faults(notebook) == ["the kernel must be called python3"]


# ---- the builder, on a topic of ten lines --------------------------------------------

LAB = '''
def double(x):
    """Return twice x."""
    return x + x
'''
SOLUTION = '''
# %% [markdown]
# # Tiny

# %% [markdown] exercise="triple"
# ## Three times

# %% tags=["exercise"] exercise="triple" points=2
def helper_of_the_answer(x):
    return x + x

def triple(x):
    """Return three times x."""
    sum_of_three_terms = x + helper_of_the_answer(x)
    return sum_of_three_terms

# %%
import os
def attempt(f):
    try:
        return f(2)
    except NotImplementedError as error:
        return str(error)

# %% tags=["check"] exercise="triple"
print(attempt(triple))

# %% tags=["expected"] id="picture"
print("picture of", attempt(triple))

# %%
print("yours:", attempt(triple))

# %% tags=["nbval-ignore-output"]
print("process", os.getpid())

# %%
print("given")

# %% [markdown] tags=["solution"]
# Why this is right.

# %% tags=["exercise"] exercise="double" practice=true
from labs.tiny import double

# %% tags=["check"] exercise="double"
attempt(double)
'''


def write_topic(folder, solution=SOLUTION):
    for name, text in (("labs", LAB), ("solutions", solution)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "tiny.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_topic(tmp_path_factory.mktemp("tiny"))
    assert builder.main([], folder) == 0
    solution, student = (folder / f"{n}/tiny.ipynb" for n in ("solutions", "labs"))
    cells = {cell.id: cell for cell in read(student).cells}
    answers = {cell.id: cell for cell in read(solution).cells}
    return SimpleNamespace(
        folder=folder, solution=solution, student=student, cells=cells, answers=answers
    )


def text_of(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def test_ids_say_what_a_cell_is(tiny):
    shared = (
        "text-1 triple-text triple-answer given-1 triple-check picture given-2 given-3 "
        "given-4 {}double-answer double-check"
    )
    assert " ".join(tiny.cells) == shared.format("")
    assert " ".join(tiny.answers) == shared.format("text-2 ")


def test_a_student_gets_signature_and_docstring(tiny):
    assert tiny.cells["triple-answer"].source == (
        "# lab: answer triple\n"
        "def triple(x):\n"
        '    """Return three times x."""\n'
        '    raise NotImplementedError("your turn")'
    )
    assert "helper_of_the_answer" not in tiny.student.read_text()


def test_practice_is_cut_from_the_lab(tiny):
    source = tiny.answers["double-answer"].source
    assert source == f"# lab: answer double\n{LAB.strip()}"


def test_metadata_tells_a_grader_what_it_needs(tiny):
    for cells in (tiny.cells, tiny.answers):
        check = cells["triple-check"].metadata.lab
        assert check == {"role": "check", "exercise": "triple", "points": 2}
    assert read(tiny.student).metadata.lab == read(tiny.solution).metadata.lab
    assert read(tiny.student).metadata.lab.lab == "tiny"


def test_outputs_show_what_is_expected_and_nothing_else(tiny):
    shown = {name: text_of(c) for name, c in tiny.cells.items() if c.get("outputs")}
    assert shown == {
        "triple-check": "6\n",
        "picture": "picture of 6\n",
        "given-4": "given\n",
        "double-check": "",  # a value, not a print
    }
    assert tiny.cells["double-check"].outputs[0].data == {"text/plain": "4"}
    assert text_of(tiny.answers["given-2"]) == "yours: 6\n"
    assert not tiny.answers["given-3"].outputs


def test_building_again_changes_no_byte_and_check_names_the_cell(tiny, capsys):
    before = tiny.solution.read_bytes(), tiny.student.read_bytes()
    assert builder.main(["--check"], tiny.folder) == 0
    tiny.student.write_text(tiny.student.read_text().replace("# Tiny", "# Tinier"))
    assert builder.main(["--check"], tiny.folder) == 1
    sentence = 'labs/tiny.ipynb differs in cell text-1; run "make notebooks".\n'
    assert capsys.readouterr().err == sentence
    assert builder.main([], tiny.folder) == 0
    assert (tiny.solution.read_bytes(), tiny.student.read_bytes()) == before
    assert len(list(tiny.folder.rglob("*tiny.ipynb*"))) == 2  # no half-written file


def test_a_student_who_answers_passes(tiny, tmp_path):
    notebook = read(tiny.student)
    for cell in notebook.cells:
        if cell.metadata.lab.role == "answer":
            cell.source = tiny.answers[cell.id].source
    nbformat.write(notebook, tmp_path / "tiny.ipynb")
    done, passed = nbval(
        "--nbval-lax", "tiny.ipynb", report=tmp_path / "report.xml", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert len(passed) == 9


def test_cells_of_one_notebook_stay_on_one_worker(tiny, tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(tiny.solution, tmp_path)
    done, passed = nbval("--nbval", "-n2", report=tmp_path / "r.xml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert all(passed.values()) and len(passed) == 9


CHECK = '# %% tags=["check"] exercise="f"\n'
EXERCISE = '# %% tags=["exercise"] exercise="f"\n'
F = 'def f():\n    """Say."""\n    return "something long enough"\n\n'


@pytest.mark.parametrize(
    "source, words",
    [
        (EXERCISE + F, "needs one exercise cell and one check"),
        (CHECK + "1", "has no exercise cell"),
        ('# %% tags=["check"]\n1', 'needs exercise="name"'),
        (EXERCISE + "def f(): return 1\n\n" + CHECK + "1", "needs a docstring"),
        (EXERCISE + F.replace("f()", "g()") + CHECK + "1", "no function f"),
        (EXERCISE + F + CHECK + "f()", "cell f-check: NotImplementedError: your turn"),
        (EXERCISE + F + CHECK + "'f: not yet.'", "fails its own check: 'f: not yet.'"),
        (EXERCISE + F + CHECK + "print(1);", "ends in `;`"),
        (EXERCISE + F + CHECK + "1\n\n# %%\n" + F, "a line of the answer to f: return"),
        ('# %% id="a"\n1\n\n# %% id="a"\n2', "2 cells called a"),
        ("# %%\nimport warnings\nwarnings.warn('w')", "given-1: stores text on stderr"),
    ],
)
def test_a_bad_source_is_refused_in_a_sentence(source, words, tmp_path):
    write_topic(tmp_path, source)
    with pytest.raises(BuildError, match=words.replace("(", r"\(")):
        builder.build(tmp_path, "tiny")
    assert not list(tmp_path.rglob("*.ipynb"))
