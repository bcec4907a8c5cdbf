"""Tables for people: drawn on a terminal, plain columns elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and whether it holds figures, which are set to the right."""

    name: str
    is_figure: bool = True


def print_table(console: Console, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table with headings.

    Args:
        console: where to.
        title: what it is about.
        columns: its columns.
        rows: a text for each column each.
    """
    rows = [[make_printable(text) for text in row] for row in rows]
    if not console.is_terminal:
        _print_lines(console, [title, *build_lines(columns, rows)])
        return
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            column.name, justify="right" if column.is_figure else "left", header_style="dim", overflow="fold"
        )
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table, soft_wrap=False)


def print_figures(console: Console, title: str, figures: Sequence[tuple[str, str]]) -> None:
    """Prints names and their values, one a line.

    Args:
        console: where to.
        title: what they are about.
        figures: a name and a value each.
    """
    figures = [(name, make_printable(value)) for name, value in figures]
    if not console.is_terminal:
        _print_lines(console, [title, *(f"{name}: {value}" for name, value in figures)])
        return
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.show_header = False
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in figures:
        table.add_row(name, escape(value))
    console.print(table, soft_wrap=False)


def build_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table as lines of aligned columns, the headings first.

    Args:
        columns: its columns.
        rows: a text for each column each.
    """
    names = [column.name for column in columns]
    widths = [max(map(len, texts)) for texts in zip(names, *rows, strict=True)]
    return [
        GAP.join(
            text.rjust(width) if column.is_figure else text.ljust(width)
            for text, column, width in zip(texts, columns, widths, strict=True)
        ).rstrip()
        for texts in (names, *rows)
    ]


def make_printable(text: str) -> str:
    """Returns a text with a question mark for every character that would act on a terminal instead of showing.

    Args:
        text: to be shown; it may come from somebody else's program.
    """
    return "".join(character if character.isprintable() else "?" for character in text)


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
