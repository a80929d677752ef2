"""Tables and refusals that pages show."""

import pytest

from labs.kit import page


def test_a_table_has_the_same_cells_as_text_and_as_html():
    table = page.Table([{"m": 1, "bubble": 0.75}, {"m": 32, "bubble": 3 / 35}], "d = 4")
    assert repr(table) == "d = 4\n m   bubble\n 1     0.75\n32  0.08571"
    html = table._repr_mimebundle_()["text/html"]
    assert "<caption>d = 4</caption>" in html
    assert "<tr><td>32</td><td>0.08571</td></tr>" in html


def test_a_table_may_be_empty_and_hides_no_markup():
    assert "<tr></tr>" in page.Table([])._repr_mimebundle_()["text/html"]
    html = page.Table([{"<b>": "a & b"}])._repr_mimebundle_()["text/html"]
    assert "&lt;b&gt;" in html and "a &amp; b" in html


def test_the_ledger_writes_units():
    shown = page.ledger([("bubble", 0.75, 0.75, "%"), ("sent", [1000, 0], [1, 0], "B")])
    assert shown.rows[0] == {"": "bubble", "predicted": "75.00 %", "counted": "75.00 %"}
    assert shown.rows[1]["counted"] != shown.rows[1]["predicted"]


def test_numbers_are_read_as_numbers(tmp_path):
    (tmp_path / "rows.csv").write_text("table,K,value\n2,8,3.48\ntorchgpipe,2,1\n")
    assert page.read(tmp_path / "rows.csv") == [
        {"table": 2, "K": 8, "value": 3.48},
        {"table": "torchgpipe", "K": 2, "value": 1},
    ]


def test_what_must_fail_is_shown_and_what_does_not_is_an_error():
    assert page.refused(int, "x").startswith("ValueError: invalid literal")
    with pytest.raises(AssertionError, match="did not refuse"):
        page.refused(len, "x")
