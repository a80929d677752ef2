"""The pages in a browser without a network: quiet, typeset, readable on a phone."""

import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
if CHROMIUM is None:
    pytest.skip("needs Chromium or Chrome", allow_module_level=True)

PAGES = ["book/index", "book/gpipe", "book/glossary", "labs/gpipe", "search"]
PAGES += ["source/labs/parameter_server"]  # code that the glossary links to


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as library:
        browser = library.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


def visit(chromium, html, name, **options):
    """Open a page offline; return it and what went wrong on the way."""
    context = chromium.new_context(offline=True, **options)
    page, trouble = context.new_page(), []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("requestfailed", lambda request: trouble.append(request.url))
    page.on("console", lambda m: m.type == "error" and trouble.append(m.text))
    page.goto((html / f"{name}.html").as_uri(), wait_until="load")
    return page, trouble


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_quiet_and_fits_a_phone(chromium, html, name):
    page, trouble = visit(
        chromium, html, name, viewport={"width": 390, "height": 800}
    )
    page.wait_for_timeout(300)
    assert trouble == []
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390, f"the page is {width} pixels wide: something pushes it"


def test_formulas_are_typeset(chromium, html):
    page, _ = visit(chromium, html, "book/gpipe")
    page.wait_for_selector("mjx-container", timeout=20_000)


def test_figures_have_no_plate_in_the_dark(chromium, html):
    page, _ = visit(chromium, html, "book/gpipe", color_scheme="dark")
    page.wait_for_selector("html[data-theme=dark]")
    style = page.evaluate(
        "(({filter, backgroundColor}) => [filter, backgroundColor])"
        "(getComputedStyle(document.querySelector('.lab-figure img')))"
    )
    assert style == ["invert(1) hue-rotate(180deg)", "rgba(0, 0, 0, 0)"]


def test_search_finds_the_bubble(chromium, html):
    page, _ = visit(chromium, html, "search")
    page.goto(page.url + "?q=bubble")
    page.wait_for_selector("#search-results li", timeout=20_000)
