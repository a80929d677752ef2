"""A stepper: what an algorithm does to its tensors, one state at a time.

It needs no kernel, no network and no script: radio buttons choose the state that the
style sheet shows, so a keyboard works and a screen reader reads the words.
"""

import hashlib
import html

from labs.kit import messages

SECONDS = 2  # per state, when it plays


def record(algorithm, tensor):
    """Run algorithm(tensor) on this rank; return its states, a list of (numbers, sent).

    numbers: those of the flat tensor before each exchange, and at the end.
    sent: the (start, end) of what leaves in this exchange, as far as it is a part of
    the tensor, else the numbers themselves; None at the end.
    """
    states, exchange = [], messages.exchange

    def recorded(leaving, *args, **kwargs):
        start = (leaving.data_ptr() - tensor.data_ptr()) // tensor.element_size()
        within = 0 <= start and start + leaving.numel() <= tensor.numel()
        sent = (start, start + leaving.numel()) if within else leaving.tolist()
        states.append((tensor.tolist(), sent))
        return exchange(leaving, *args, **kwargs)

    messages.exchange = recorded
    try:
        algorithm(tensor)
    finally:
        messages.exchange = exchange
    return [*states, (tensor.tolist(), None)]


class Steps:
    """States to go through, each a sentence and a table.

    states: a list of (sentence, rows); rows: lists of cells, the first row and the
    first column of which are headings. A cell is a text or (text, mark); the mark, one
    of MARKS, is shown as a colour, a sign and a word.
    """

    MARKS = {"leaves": "→", "done": "✓"}

    def __init__(self, title, states):
        self.title, self.states = title, states
        digest = hashlib.sha256(repr((title, states)).encode())
        self.name = f"steps-{digest.hexdigest()[:8]}"

    def __repr__(self):
        return "\n\n".join([self.title, *map(self._text, range(len(self.states)))])

    def _text(self, number):
        sentence, rows = self.states[number]
        words = [[" ".join(filter(None, _cell(cell))) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*words)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in words]
        return "\n".join([f"{number}. {sentence}", *lines])

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/html": self.html(), "text/plain": repr(self)}

    def html(self):
        n, choices = len(self.states), [*map(str, range(len(self.states))), "play"]
        inputs = "".join(
            f'<input type="radio" name="{self.name}" id="{self.name}-{choice}"'
            f'{" checked" * (choice == "0")}><label for="{self.name}-{choice}">'
            f"{'<span>step </span>' * choice.isdigit()}{choice}</label>"
            for choice in choices
        )
        frames = "".join(self._frame(number) for number in range(n))
        return (
            f'<fieldset class="lab-steps" id="{self.name}">'
            f"<style>{self._style()}</style>"
            f"<legend>{html.escape(self.title)}</legend>{inputs}"
            f'<div class="frames" tabindex="0" role="group" '
            f'aria-label="The chosen step; it scrolls where the screen is narrow">'
            f"{frames}</div></fieldset>"
        )

    def _frame(self, number):
        sentence, (head, *body) = self.states[number]
        rows = [[_th(cell, "col") for cell in head]]
        rows += [[_th(first, "row"), *map(_td, rest)] for first, *rest in body]
        rows = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
        text = f"<p><b>{number}.</b> {html.escape(sentence)}</p>"
        return f'<div class="frame">{text}<table>{rows}</table></div>'

    def _style(self):
        """The rules that all steppers share, and those that name this one's states."""
        me, n = f"#{self.name}", len(self.states)
        chosen = ",".join(
            f"{me}-{i}:checked~.frames>.frame:nth-child({i + 1})" for i in range(n)
        )
        delays = "".join(
            f"{me}-play:checked~.frames>.frame:nth-child({i + 1})"
            f"{{animation:{self.name} {n * SECONDS}s step-end {i * SECONDS}s infinite}}"
            for i in range(n)
        )
        turn = (
            f"@keyframes {self.name}{{0%{{visibility:visible}}"
            f"{100 / n:.4f}%,100%{{visibility:hidden}}}}"
        )
        return f"{STYLE}{chosen}{{visibility:visible}}{turn}{delays}"


def _cell(cell):
    """Return (text, word) of a cell."""
    return (cell, "") if isinstance(cell, str) else (cell[0], f"({cell[1]})")


def _th(text, scope):
    return f'<th scope="{scope}">{html.escape(text)}</th>'


def _td(cell):
    if isinstance(cell, str):
        return f"<td>{html.escape(cell)}</td>"
    text, mark = cell
    sign = f'<i aria-hidden="true">{Steps.MARKS[mark]}</i><span>, {mark}</span>'
    return f'<td class="{mark}">{html.escape(text)} {sign}</td>'


STYLE = """
.lab-steps{border:1px solid #8a96a3;border-radius:4px;padding:.5rem .8rem;margin:1rem 0}
.lab-steps legend{float:none;width:auto;font-size:1em;padding:0 .4rem;margin:0}
.lab-steps input{position:absolute;opacity:0}
.lab-steps label{display:inline-block;min-width:2.2em;text-align:center;cursor:pointer;
border:1px solid #8a96a3;border-radius:4px;padding:.1rem .5rem;margin:0 .3rem .3rem 0}
.lab-steps label>span,.lab-steps td>span{position:absolute;width:1px;height:1px;
overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.lab-steps input:checked+label{background:#2f6db3;border-color:#2f6db3;color:#fff}
.lab-steps input:focus-visible+label{outline:3px solid #b6510a;outline-offset:1px}
.lab-steps .frames{display:grid;overflow-x:auto}
.lab-steps .frame{grid-area:1/1;visibility:hidden}
.lab-steps p{margin:.3rem 0}
.lab-steps table{display:table;width:100%;margin:0;border-collapse:collapse;
font-size:.95em;table-layout:fixed}
.lab-steps td,.lab-steps th{border:1px solid #8a96a3;padding:.25rem .4rem;
text-align:left;color:inherit;background:transparent}
.lab-steps td{position:relative;overflow-wrap:break-word}
.lab-steps tr>:first-child{width:5em}
@media(max-width:30em){.lab-steps tr>:first-child{width:3.8em}
.lab-steps table{font-size:.85em}.lab-steps td,.lab-steps th{padding:.2rem}}
html[data-theme="dark"] .bd-content div.cell_output .text_html:has(.lab-steps){
background:transparent!important;color:inherit!important;padding:0!important}
.lab-steps td.leaves{background:#2f6db3;color:#fff}
.lab-steps td.done{box-shadow:inset 0 0 0 2px #2f6db3;font-weight:bold}
.lab-steps td i{float:right;font-style:normal}
@media print{.lab-steps .frames{display:block}.lab-steps .frame{visibility:visible}
.lab-steps input,.lab-steps label{display:none}}
""".replace("\n", "")
