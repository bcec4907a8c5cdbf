"""The series that a query asks for."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_STRING = r'"(?:[^"\\]|\\.)*"'
# A name, perhaps with matchers; without what follows it in brackets.
_SELECTOR = re.compile(rf"\b([a-zA-Z_:][a-zA-Z0-9_:]*)\b\s*(\{{(?:{_STRING}|[^}}\"])*\}})?")
_MATCHER = re.compile(rf"(\w+)\s*(=~|!~|!=|=)\s*({_STRING})")
# Words after which a list of labels comes.
_LABEL_LISTS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_DURATIONS = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")
_KEYWORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right"}


class Matcher(NamedTuple):
    """One condition on a label."""

    label: str
    operator: str
    value: str


class Selector(NamedTuple):
    """A series' name and conditions; `text` is how the query has them."""

    name: str
    matchers: tuple[Matcher, ...]
    text: str

    def __str__(self) -> str:
        """Returns it as the query has it."""
        return self.text


def list_selectors(expr: str) -> list[Selector]:
    """Lists the series that a query asks for, each once, in its order.

    Args:
        expr: the query, in PromQL.
    """
    return list(dict.fromkeys(_find(_DURATIONS.sub(" ", _LABEL_LISTS.sub(" ", expr)))))


def _find(expr: str) -> Iterator[Selector]:
    for match in _SELECTOR.finditer(expr):
        name, braces = match.groups()
        is_function = expr[match.end() :].lstrip().startswith("(")
        if name.lower() in _KEYWORDS or is_function:
            continue
        matchers = tuple(
            Matcher(label, operator, value[1:-1]) for label, operator, value in _MATCHER.findall(braces or "")
        )
        yield Selector(name, matchers, f"{name}{braces or ''}")
