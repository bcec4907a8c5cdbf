"""The rules and the runbook as they are shipped."""

import re
from pathlib import Path

import yaml

from scripts.rules import ROOT
from tests.deploy.rule_selectors import list_selectors

FOLDER = Path(ROOT, "deploy/prometheus")
RUNBOOK = Path(ROOT, "docs/runbook.md").read_text()

RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = {rule["record"] for rule in RULES if "record" in rule}
# Each with the rule that asks for it.
SELECTORS = [(rule.get("alert") or rule["record"], item) for rule in RULES for item in list_selectors(rule["expr"])]


def list_runbook_blocks(language: str) -> list[str]:
    """Returns what stands in the runbook to be pasted.

    Args:
        language: `console` or `promql`.
    """
    return re.findall(rf"```{language}\n(.*?)```", RUNBOOK, flags=re.DOTALL)


def list_runbook_queries() -> list[str]:
    """Returns the queries of the runbook; each stands on a line of its own."""
    lines = [line.strip() for block in list_runbook_blocks("promql") for line in block.splitlines()]
    return [line for line in lines if line]
