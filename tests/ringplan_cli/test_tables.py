"""Tables: drawn on a terminal, plain elsewhere, and nothing in them acts on the terminal."""

from io import StringIO

import pytest
from rich.console import Console

from ringplan_cli.tables import Column, build_lines, make_printable, print_figures, print_table

COLUMNS = (Column("name", is_figure=False), Column("count"))
ROWS = (("a", "1,000"), ("long name", "7"))


def _print(*, is_terminal: bool, rows: object = ROWS, width: int = 80) -> str:
    console = Console(file=StringIO(), force_terminal=is_terminal, width=width, highlight=False)
    print_table(console, "things", COLUMNS, rows)  # type: ignore[arg-type]
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_lines_are_aligned_columns() -> None:
    """Words stand to the left and figures to the right, under their headings, without spaces at the end."""
    assert build_lines(COLUMNS, ROWS) == [
        "name       count",
        "a          1,000",
        "long name      7",
    ]
    assert build_lines((Column("a"), Column("b", is_figure=False)), [("1", "x" * 9)])[0] == "a  b"


def test_table_is_plain_where_nobody_looks_at_it() -> None:
    """Piped output has a title line and columns, no escape sequence, and is not cut at any width."""
    wide = [("x" * 200, "1")]
    assert _print(is_terminal=False).splitlines() == ["things", *build_lines(COLUMNS, ROWS)]
    assert _print(is_terminal=False, rows=wide).splitlines()[2] == f"{'x' * 200}      1"


def test_table_on_a_terminal_fits_it() -> None:
    """Nothing is lost on a narrow terminal: long texts go on in the next line."""
    text = _print(is_terminal=True, rows=[("x" * 100, "1")], width=40)
    assert "\x1b[" in text
    assert text.count("x") == 100


@pytest.mark.parametrize("is_terminal", [True, False])
def test_figures_are_names_and_values(is_terminal: bool) -> None:
    """One name and one value a line, on a terminal and elsewhere; markup in them is text."""
    console = Console(file=StringIO(), force_terminal=is_terminal, width=80, highlight=False, no_color=True)
    print_figures(console, "s[1]", [("pages", "[7] of 9"), ("ring", "2")])
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert "s[1]" in lines[0]
    assert "[7] of 9" in lines[1]
    assert is_terminal or lines == ["s[1]", "pages: [7] of 9", "ring: 2"]


def test_control_characters_show_as_question_marks() -> None:
    """A name that an engine chose cannot move the cursor or start a new line."""
    assert make_printable("a\x1b[31mb\nc") == "a?[31mb?c"
    assert "\x1b" not in _print(is_terminal=False, rows=[("\x1b[2J", "1")])
