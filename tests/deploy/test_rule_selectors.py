"""The reader of queries that other tests rely on."""

import pytest

from tests.deploy.rule_selectors import Matcher, list_selectors


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ("a", ["a"]),
        ("rate(a_total[5m] offset 1h) / on (x, y) group_left (z) sum by (b) (c:d:rate5m)", ["a_total", "c:d:rate5m"]),
        ("histogram_quantile(0.5, sum by (le) (rate(a_bucket[5m])))", ["a_bucket"]),
        ("a > bool 0.05 and b unless c or a", ["a", "b", "c"]),
        ("max by (pod) (a) == 0", ["a"]),
        ('a{b="c(d)", e!~"f|g"}', ["a"]),
    ],
)
def test_names_of_series_are_found_and_nothing_else(expr: str, names: list[str]) -> None:
    """Functions, operators, numbers, durations and labels are no series."""
    assert [selector.name for selector in list_selectors(expr)] == names


def test_matchers_are_read_with_their_operators() -> None:
    """Also where a value has what looks like the end of them."""
    [selector] = list_selectors('rate(a_total{b="c}", d=~"e|f", g!="", h!~"i"}[5m])')
    assert selector.matchers == (
        Matcher("b", "=", "c}"),
        Matcher("d", "=~", "e|f"),
        Matcher("g", "!=", ""),
        Matcher("h", "!~", "i"),
    )
    assert selector.text == 'a_total{b="c}", d=~"e|f", g!="", h!~"i"}'
