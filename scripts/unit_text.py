"""Figures with their units, as Grafana writes them."""

import math

_SHORT_STEPS = ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K"))
_BYTE_STEPS = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"))
_SECOND_STEPS = ((3600.0, " hour"), (60.0, " min"), (1.0, " s"), (1e-3, " ms"), (1e-6, " µs"))
_SUFFIXES = {"ops": " ops/s", "reqps": " req/s", "short": "", "none": ""}
_SUFFIX_MARK = "suffix:"


def write_figure(value: float, unit: str, decimals: int | None = None) -> str:
    """Writes a figure.

    Args:
        value: the figure.
        unit: one of Grafana's names that the dashboards use.
        decimals: how many to write; by default three digits that count.

    Returns:
        The figure with its unit.

    Raises:
        ValueError: no such unit is known here.
    """
    if unit == "percentunit":
        return f"{_write_number(value * 100, decimals)}%"
    if unit == "s":
        return _write_in_steps(value, _SECOND_STEPS, " s", decimals)
    if unit == "bytes":
        return _write_in_steps(value, _BYTE_STEPS, " B", decimals)
    if unit == "none":
        return _write_number(value, 0 if float(value).is_integer() else decimals)
    if unit.startswith(_SUFFIX_MARK):
        return _write_in_steps(value, _SHORT_STEPS, "", decimals) + unit.removeprefix(_SUFFIX_MARK)
    if unit not in _SUFFIXES:
        raise ValueError(f"unit {unit!r} is not known: write it in scripts/unit_text.py")
    return _write_in_steps(value, _SHORT_STEPS, "", decimals) + _SUFFIXES[unit]


def _write_in_steps(value: float, steps: tuple[tuple[float, str], ...], base: str, decimals: int | None) -> str:
    for factor, name in steps:
        # A little below, so that what rounds to the next step is written in it.
        if abs(value) >= factor * (1 - 1e-9):
            return _write_number(value / factor, decimals) + name
    return _write_number(value, decimals) + base


def _write_number(value: float, decimals: int | None) -> str:
    if decimals is None:
        digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:.{min(digits, 6)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.{decimals}f}"
