"""What this book asks of Jupyter Book beyond its settings.

Pages ask no other host; a change in labs/ runs the chapters again; a picture without
alternative text is an error; two labels that the theme forgets are added.
"""

import hashlib
import importlib.util
import os
import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx.util import logging

log = logging.getLogger(__name__)


def key_the_cache(app, config):
    """Notebook results are cached by their cells; let the labs' code count too."""
    os.environ["LABS_STATIC"] = "1"  # sliders show their fixed figure
    labs = sorted((Path(app.srcdir) / "labs").rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in labs)).hexdigest()
    cache = Path(app.outdir).parent / ".jupyter_cache" / digest[:12]
    config.nb_execution_cache_path = str(cache)


def ask_for_alt_text(app, doctree, docname):
    """Warn (an error, under -W) of each picture that a screen reader cannot read."""
    for image in doctree.findall(nodes.image):
        if not image.get("alt"):
            log.warning("picture without alternative text: %s", image["uri"],
                        location=image)
    for raw in doctree.findall(nodes.raw):
        for tag in re.findall(r"<img\b[^>]*>", raw.astext()):
            if not re.search(r"""\balt=["'][^"']""", tag):
                log.warning("picture without alternative text: %.80s", tag,
                            location=docname)


def drop_thebe(app, config):
    """sphinx-thebe would add scripts to every page, for buttons that we do not have."""
    for listeners in app.events.listeners.values():
        listeners[:] = [
            one for one in listeners if not one.handler.__module__ == "sphinx_thebe"
        ]
    files = app.registry.css_files
    files[:] = [(name, options) for name, options in files if "thebe" not in name]


def serve_mathjax(app, exception):
    """Copy the part of MathJax that formulas need, so that no page asks a host."""
    if exception or app.builder.format != "html":
        return
    package = importlib.util.find_spec("sphinx-mathjax-offline")
    source = Path(package.origin).parent / "static" / "mathjax"
    target = Path(app.outdir) / "_static" / "mathjax"
    fonts = Path("output") / "chtml" / "fonts" / "woff-v2"
    shutil.copytree(source / fonts, target / fonts, dirs_exist_ok=True)
    shutil.copy(source / "tex-mml-chtml.js", target)


MENDS = [
    # Icons come from a font: drop the icon script (1.5 MB), and the fonts' preloading,
    # which a browser refuses for pages opened from disk.
    (r"<script[^>]*fontawesome\.js[^>]*></script>", ""),
    (r'<link rel="preload" as="font"[^>]*>', ""),
    # Screen readers: a landmark for the logo, names for folds and search, a real list.
    (
        r'(class="sidebar-primary-items__start sidebar-primary__section")>',
        r'\1 role="region" aria-label="Book">',
    ),
    (r"<summary>(?=<span class=.toctree-toggle)", '<summary aria-label="Pages below">'),
    (r'(<button class="btn search-button-field[^>]*) aria-label="Search"', r"\1"),
    ("doc-biblioentry", "listitem"),
]


def finish_pages(app, exception):
    """Mend what the theme writes into every page."""
    if exception or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        old = text = page.read_text("utf-8")
        for pattern, better in MENDS:
            text = re.sub(pattern, better, text)
        if text != old:
            page.write_text(text, "utf-8")
    for unused in (Path(app.outdir) / "_static" / "scripts").glob("fontawesome.js*"):
        unused.unlink()


def setup(app):
    app.connect("config-inited", key_the_cache)
    app.connect("config-inited", drop_thebe)
    app.connect("doctree-resolved", ask_for_alt_text)
    app.connect("build-finished", serve_mathjax)
    app.connect("build-finished", finish_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
