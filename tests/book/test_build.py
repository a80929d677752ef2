"""A slip in the book stops the build, with a message, every time."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CELL = """---
file_format: mystnb
kernelspec: {{name: python3, display_name: Python 3}}
---
# Chapter

```{{code-cell}} python
{code}
```
"""


@pytest.fixture
def small(tmp_path):
    """A book of two pages, with the settings and the extension of the real one."""
    for folder in ("book", "labs"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "_config.yml", tmp_path)
    for folder in ("_ext", "_static"):
        shutil.copytree(ROOT / "book" / folder, tmp_path / "book" / folder)
    shutil.copy(ROOT / "book/references.bib", tmp_path / "book")
    (tmp_path / "labs/number.py").write_text("NUMBER = 6\n")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nchapters: [{file: book/chapter}]\n"
    )
    (tmp_path / "book/index.md").write_text("# Home\n")
    write(tmp_path, "import runpy\nrunpy.run_path('../labs/number.py')['NUMBER'] * 7")
    return tmp_path


def write(folder, code):
    (folder / "book/chapter.md").write_text(CELL.format(code=code))


@pytest.fixture
def build(small, jupyter_book):
    return lambda *options: jupyter_book(small, small, *options)


def test_a_change_in_labs_runs_the_chapters_again(small, build):
    page = small / "_build/html/book/chapter.html"
    assert build()[0] == 0
    assert "42" in page.read_text()
    (small / "labs/number.py").write_text("NUMBER = 9\n")
    assert build()[0] == 0
    assert "63" in page.read_text()


def test_a_failing_cell_fails_twice(small, build):
    write(small, "raise TypeError('the bubble burst')")
    for _ in range(2):
        code, text = build()
        assert code != 0 and "the bubble burst" in text


SLIPS = {
    "![](_static/ladder.svg)": "alternative text: book/_static/ladder.svg",
    '<img src="raw.svg">': 'alternative text: <img src="raw.svg">',
    "{term}`no such word`": "no such word",
    "{cite}`nobody1900`": "nobody1900",
    "[elsewhere](nowhere.md)": "nowhere.md",
    "{source}`labs.number.NUMBERS`": "labs.number.NUMBERS",
    "{source}`labs.numbers`": "no such name in labs/: labs.numbers",
}


def test_slips_on_a_page_are_errors(small, build):
    write(small, "1")
    (small / "book/index.md").write_text("# Home\n\n" + "\n\n".join(SLIPS))
    code, text = build("--keep-going")
    assert code != 0
    assert [words for words in SLIPS.values() if words not in text] == []


def test_a_link_to_code_follows_the_line_and_breaks_with_the_name(small, build):
    write(small, "1")
    module, html = small / "labs/number.py", small / "_build/html"
    (small / "book/index.md").write_text("# Home\n\n{source}`labs.number.NUMBER`\n")
    for text, line in (("NUMBER = 6\n", 1), ("A, B = 1, 2\nNUMBER: int = 6\n", 2)):
        module.write_text(text)
        assert build()[0] == 0
        home = (html / "book/index.html").read_text()
        assert f'href="../source/labs/number.html#line-{line}"' in home
        page = (html / "source/labs/number.html").read_text()
        shown = re.findall(r'id="line-(\d)">.*NUMBER', page)
        assert shown == [str(line)]
    module.write_text("A, B = 1, 2\n")
    for _ in range(2):
        code, text = build()
        assert code != 0 and "no such name in labs/: labs.number.NUMBER" in text


def test_a_misspelt_entry_of_the_contents_is_an_error(small, build):
    toc = small / "_toc.yml"
    toc.write_text(toc.read_text().replace("chapter}", "chaptre}"))
    code, text = build()
    assert code != 0 and "chaptre" in text


def test_stray_and_solution_notebooks_are_neither_run_nor_published(small, build):
    for folder in ("book", "solutions"):
        (small / folder).mkdir(exist_ok=True)
        page = CELL.format(code=f"open('../{folder}-was-run', 'w')")
        (small / folder / "stray.md").write_text(page)
    code, text = build()
    assert code == 0, text
    assert not list(small.glob("*-was-run"))
    assert not list((small / "_build/html").rglob("stray*"))
