"""{source}`labs.gpipe.Stage.forward`: a link to the line that defines a name of labs/.

The link leads to a page of this book that shows the module. Names are looked up in the
text of the module, which is not run; one that is not there is an error (under -W).
"""

import ast
from pathlib import Path

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

log = logging.getLogger(__name__)

BODY = """<h1>{0}</h1>
<p>The file as it was when this book was built.</p>
<div class="highlight-python notranslate">{1}</div>"""


def find(folder, name):
    """Return the (file, line) that define a dotted name; (None, None): nothing does."""
    parts = name.split(".")
    for n in reversed(range(1, len(parts) + 1)):
        path = folder.joinpath(*parts[:n]).with_suffix(".py")
        if path.is_file():
            line = line_of(ast.parse(path.read_text("utf-8")), parts[n:])
            return (path, line) if line else (None, None)
    return None, None


def line_of(node, names):
    """Go from a module into its classes, name by name; return the line of the last."""
    for name in names:
        inside = getattr(node, "body", [])
        node = next((one for one in inside if name in defined(one)), None)
    return 1 if isinstance(node, ast.Module) else getattr(node, "lineno", None)


def defined(statement):
    """Return the names that a statement gives a meaning: def, class, or assignment."""
    if isinstance(statement, ast.Assign):
        parts = [part for target in statement.targets for part in ast.walk(target)]
        return {part.id for part in parts if isinstance(part, ast.Name)}
    if isinstance(statement, ast.AnnAssign):
        return {ast.unparse(statement.target)}
    return {getattr(statement, "name", None)}


class Source(SphinxRole):
    def run(self):
        folder = Path(self.env.srcdir)
        path, line = find(folder, self.text)
        if path is None:
            words = "no such name in labs/: %s"
            log.warning(words, self.text, location=self.get_location())
            return [nodes.literal(text=self.text)], []
        self.env.note_dependency(str(path))
        module = path.relative_to(folder).with_suffix("").as_posix()
        page = self.env.app.builder.get_relative_uri(
            self.env.docname, f"source/{module}"
        )
        shown = self.text.removeprefix("labs.").removeprefix("kit.")
        link = nodes.reference("", "", nodes.literal(text=shown), internal=True)
        link["refuri"], link["module"] = f"{page}#line-{line}", module
        return [link], []


def note_modules(app, doctree, docname):
    """Remember which modules the pages of this build link to."""
    links = doctree.findall(nodes.reference)
    app.linked |= {link["module"] for link in links if "module" in link}


def pages(app):
    """Yield a page for each of these modules: its text, with an anchor on each line."""
    for module in sorted(app.linked):
        text = (Path(app.srcdir) / f"{module}.py").read_text("utf-8")
        code = app.builder.highlighter.highlight_block(
            text, "python", linenos="inline", linespans="line"
        )
        name = f"{module}.py"
        context = {"title": name, "pagetitle": name, "body": BODY.format(name, code)}
        yield f"source/{module}", context, "page.html"


def setup(app):
    app.linked = set()
    app.add_role("source", Source())
    app.connect("doctree-resolved", note_modules)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": True}
