"""What pages show beside figures: small tables, and mistakes that are refused."""

import csv
import html

from labs.kit.lab import show


class Table:
    """Rows that a notebook shows as a table, and a terminal as aligned text.

    rows: dicts with the same keys; numbers are shown with up to four digits.
    """

    def __init__(self, rows, caption=""):
        self.rows, self.caption = list(rows), caption

    def cells(self):
        """Return the header and the rows, as text."""
        head = list(self.rows[0]) if self.rows else []
        return [head, *[[_text(row[key]) for key in head] for row in self.rows]]

    def __repr__(self):
        widths = [max(map(len, column)) for column in zip(*self.cells())]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths))
            for row in self.cells()
        ]
        return "\n".join([self.caption, *lines] if self.caption else lines)

    def _repr_mimebundle_(self, include=None, exclude=None):
        head, *body = self.cells()
        rows = [_row(head, "th"), *[_row(row, "td") for row in body]]
        caption = f"<caption>{html.escape(self.caption)}</caption>" * bool(self.caption)
        table = f'<table class="lab-table">{caption}{"".join(rows)}</table>'
        return {"text/html": table, "text/plain": repr(self)}


def _row(cells, tag):
    return f"<tr>{''.join(f'<{tag}>{html.escape(c)}</{tag}>' for c in cells)}</tr>"


def _text(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def ledger(rows):
    """Return a lab's ledger as a Table: what a formula says beside what was counted."""
    return Table(
        {"": what, "predicted": show(predicted, unit), "counted": show(counted, unit)}
        for what, predicted, counted, unit in rows
    )


def read(path):
    """Return the rows of a CSV file as dicts; what looks like a number is one."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def _number(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def refused(function, *args):
    """Return what a call that must fail says; if it does not fail, that is an error."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{function.__name__} did not refuse what it should refuse.")
