import re
import sys
from html.parser import HTMLParser

import cloudpickle
import pytest
import torch

from labs.kit import messages, world
from labs.kit.steps import Steps, record

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = Steps(
    "Two <workers>",
    [
        ("Before.", [["", "a", "b"], ["chunk 0", ("a0", "leaves"), "b0"]]),
        ("After.", [["", "a", "b"], ["chunk 0", "a0", ("a0 + b0", "leaves")]]),
        ("End.", [["", "a", "b"], ["chunk 0", ("a0 + b0", "done"), "b0"]]),
    ],
)


class Page(HTMLParser):
    """The tags of a page, with their attributes, and its text outside of styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "input":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] != "style":
            self.text += data


def test_each_state_has_a_radio_button_and_one_more_plays():
    page = Page(STEPS.html())
    inputs = [tag for name, tag in page.tags if name == "input"]
    labels = [tag["for"] for name, tag in page.tags if name == "label"]
    assert page.open == [] and len(inputs) == 3 + 1
    assert {tag["name"] for tag in inputs} == {STEPS.name}
    assert [tag["id"] for tag in inputs] == labels
    assert ["checked" in tag for tag in inputs] == [True, False, False, False]
    assert not [tag for tag, _ in page.tags if tag in ("script", "img", "details")]


def test_the_style_shows_the_chosen_state_and_no_other():
    style = re.search("<style>(.*)</style>", STEPS.html(), re.S)[1]
    for i in range(3):
        assert f"#{STEPS.name}-{i}:checked~.frames>.frame:nth-child({i + 1})" in style
    assert f":nth-child({4})" not in style
    assert ".lab-steps .frame{grid-area:1/1;visibility:hidden}" in style
    assert "http" not in STEPS.html()


def test_marks_are_words_and_markup_is_hidden():
    page = Page(STEPS.html())
    assert "Two <workers>" in page.text and "a0 →, leaves" in page.text
    assert repr(STEPS).splitlines() == [
        "Two <workers>", "",
        "0. Before.", "         a            b", "chunk 0  a0 (leaves)  b0", "",
        "1. After.", "         a   b", "chunk 0  a0  a0 + b0 (leaves)", "",
        "2. End.", "         a               b", "chunk 0  a0 + b0 (done)  b0",
    ]  # fmt: skip
    with pytest.raises(KeyError):
        Steps("", [("", [["a"], ["b", ("c", "lost")]])]).html()


def test_two_steppers_on_one_page_do_not_share_buttons():
    other = Steps("Other", STEPS.states)
    assert other.name != STEPS.name == Steps(STEPS.title, STEPS.states).name


def swap(tensor):
    """Swap the first half, and then all of it, with the other rank."""
    half = tensor[: len(tensor) // 2]
    messages.exchange(half, 1 - messages.rank(), into=half)
    tensor += messages.exchange(tensor.clone() * 10, 1 - messages.rank())


def recorded(rank, n_ranks):
    states = record(swap, torch.tensor([1, 2, 3, 4]) + 4 * rank)
    return states, messages.exchange.__name__


def test_a_run_is_recorded_state_by_state():
    assert world.launch(recorded, 2) == [
        (
            [
                ([1, 2, 3, 4], (0, 2)),
                ([5, 6, 3, 4], [50, 60, 30, 40]),
                ([15, 26, 73, 84], None),
            ],
            "exchange",
        ),
        (
            [
                ([5, 6, 7, 8], (0, 2)),
                ([1, 2, 7, 8], [10, 20, 70, 80]),
                ([51, 62, 37, 48], None),
            ],
            "exchange",
        ),
    ]
