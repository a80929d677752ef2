"""What the finished pages hold: pictures with words, no foreign host, no answer."""

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup

from tools import build_notebooks as builder

ROOT = Path(__file__).resolve().parents[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


@pytest.fixture(scope="module")
def pages(html):
    """Return {path: parsed page}; the theme leaves some templates in _static."""
    return {
        path: BeautifulSoup(path.read_text("utf-8"), "html.parser")
        for path in sorted(html.rglob("*.html"))
        if "_static" not in path.parts
    }


def listed(entries):
    for entry in entries:
        yield entry["file"]
        yield from listed(entry.get("sections", []))


def test_every_page_of_the_contents_is_there(html):
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    files = [f for part in toc["parts"] for f in listed(part["chapters"])]
    missing = [f for f in [toc["root"], *files] if not (html / f"{f}.html").exists()]
    assert missing == []


def test_pages_ask_no_other_host(pages, html):
    asked = {
        (str(path.relative_to(html)), tag[attribute])
        for path, page in pages.items()
        for name, attribute in LOADED.items()
        for tag in page.find_all(name)
        if re.match(r"(\w+:)?//", tag.get(attribute, ""))
    }
    asked |= {
        (path.name, url)
        for path in html.rglob("*.css")
        for url in re.findall(r"url\(['\"]?((?:\w+:)?//[^)]*)", path.read_text("utf-8"))
    }
    assert asked == set()


def test_what_a_page_loads_and_links_is_there(pages, html):
    lost = set()
    for path, page in pages.items():
        for tag in page.find_all(["a", "script", "img", "link"]):
            url = urlsplit(tag.get("href") or tag.get("src") or "")
            target = path.parent / unquote(url.path)
            if not url.scheme and not target.exists():
                lost.add((str(path.relative_to(html)), url.path))
    assert lost == set()


def test_links_to_code_lead_to_a_definition(pages):
    found = set()
    for path, page in pages.items():
        for link in page.select('article a[href*="source/labs/"]'):
            target, _, line = link["href"].partition("#")
            there = Path(os.path.normpath(path.parent / target))
            code = pages[there].find(id=line).get_text().lstrip(" 0123456789")
            name = link.get_text().rpartition(".")[2]
            found.add((name, bool(re.search(rf"\b{name}\b", code))))
    modules = {path.stem for path in ROOT.glob("labs/**/*.py")}  # their first line
    assert {name for name, right in found if not right} <= modules
    assert len(found) > 50


def test_every_picture_has_words(pages, html):
    silent = [
        (str(path.relative_to(html)), str(image)[:80])
        for path, page in pages.items()
        for image in page.find_all("img")
        if not image.get("alt", "").strip()
        or image["alt"].startswith(("_images", "../_images"))
    ]
    assert silent == []


def test_formulas_are_formulas(pages):
    """No dollar is left in the text, outside code."""
    for path, page in pages.items():
        article = page.find("article")
        for code in article.find_all(["pre", "code", "script"]) if article else []:
            code.decompose()
        text = article.get_text() if article else ""
        assert "$" not in text, f"{path}: {text[max(0, text.find('$') - 40):][:80]}"


def test_chapters_have_formulas_figures_and_no_raw_output(pages, html):
    for path in sorted((html / "book").glob("*.html")):
        if (ROOT / "labs" / f"{path.stem}.py").exists():
            page = BeautifulSoup(path.read_text("utf-8"), "html.parser")
            assert page.select(".math"), f"{path.name} shows no formula"
            assert page.select("figure.lab-figure img"), f"{path.name} shows no figure"
            assert "object at 0x" not in page.get_text()


def test_no_answer_is_published(html):
    kinds = {".html", ".md", ".ipynb", ".js"}
    files = [path for path in html.rglob("*") if path.suffix in kinds]
    files = [path for path in files if "_static" not in path.parts]
    assert [path for path in html.rglob("*") if "solutions" in path.parts] == []
    texts = {str(p.relative_to(html)): p.read_text("utf-8") for p in files}
    texts |= {
        name: BeautifulSoup(text, "html.parser").get_text()
        for name, text in texts.items()
        if name.endswith(".html")
    }
    for source in ROOT.glob("solutions/*.py"):
        cells = builder.read_source(ROOT, source.stem)
        assert builder.leaks(cells, texts) == []


def test_no_button_leads_to_another_project(pages):
    buttons = ".dropdown-launch-buttons, .btn-source-repository-button"
    for path, page in pages.items():
        assert not page.select(buttons), path
        links = [a["href"] for a in page.find_all("a", href=True)]
        assert not [link for link in links if "executablebooks" in link], path
        assert "thebe" not in str(page)
