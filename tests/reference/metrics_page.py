"""docs/metrics.md as a reader sees it: the names in its tables."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def list_documented_metrics() -> tuple[set[str], set[str]]:
    """Returns the names in the planner's table and in the engine's."""
    text = PAGE.read_text()
    planner, engine = (text.partition(f"\n## {title}\n")[2].partition("\n## ")[0] for title in ("Planner", "Engine"))
    pattern = re.compile(r"^\| `(ringplan_\w+)`", re.MULTILINE)
    return set(pattern.findall(planner)), set(pattern.findall(engine))
