"""What a Prometheus rule is, as the rules files write it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any

# Pages somebody; the other severity can wait for office hours.
CRITICAL = "critical"
WARNING = "warning"


@dataclass(frozen=True)
class RecordingRule:
    """A series that Prometheus computes and keeps.

    Args:
        record: its name, `level:metric:operations`.
        expr: the query; indentation that its lines share is taken off.
        labels: labels to set.
    """

    record: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def build(self) -> dict[str, Any]:
        """Returns the rule as a rules file has it."""
        rule: dict[str, Any] = {"record": self.record, "expr": write_expr(self.expr)}
        if self.labels:
            rule["labels"] = dict(self.labels)
        return rule


@dataclass(frozen=True)
class Alert:
    """A condition that somebody is told of.

    Args:
        alert: its name, which is also the heading of its section in the runbook.
        expr: the query; it has a result where the condition holds.
        hold: how long it must hold first, as Prometheus writes it; "0m" for none.
        severity: `CRITICAL` or `WARNING`.
        summary: one line, with `{{ $labels... }}` and `{{ $value }}`.
        description: what it means and what to look at first.
        dashboard: uid of the dashboard to open.
        variables: labels of the alert that the dashboard has variables for.
    """

    alert: str
    expr: str
    hold: str
    severity: str
    summary: str
    description: str
    dashboard: str
    variables: tuple[str, ...] = ("namespace", "pod")

    def build(self, runbook_url: str, grafana_url: str) -> dict[str, Any]:
        """Returns the rule as a rules file has it.

        Args:
            runbook_url: where the runbook is.
            grafana_url: where Grafana is, without a slash at the end; empty for links within it.
        """
        # A variable that is empty would show nothing; one that is left out shows all.
        first, *others = self.variables
        query = f"var-{first}={{{{ $labels.{first} }}}}" + "".join(
            f"{{{{ with $labels.{name} }}}}&var-{name}={{{{ . }}}}{{{{ end }}}}" for name in others
        )
        return {
            "alert": self.alert,
            "expr": write_expr(self.expr),
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": " ".join(dedent(self.description).split()),
                "runbook_url": f"{runbook_url}#{self.alert.lower()}",
                "dashboard_url": f"{grafana_url}/d/{self.dashboard}?{query}",
            },
        }


@dataclass(frozen=True)
class Group:
    """Rules that are evaluated one after the other.

    Args:
        name: names the group.
        rules: in order: a rule sees what those before it recorded.
        interval: how often, as Prometheus writes it; None for Prometheus's own.
    """

    name: str
    rules: tuple[RecordingRule | Alert, ...]
    interval: str | None = None

    def build(self, runbook_url: str, grafana_url: str) -> dict[str, Any]:
        """Returns the group as a rules file has it; the arguments are those of `Alert.build`."""
        group: dict[str, Any] = {"name": self.name}
        if self.interval is not None:
            group["interval"] = self.interval
        group["rules"] = [
            rule.build(runbook_url, grafana_url) if isinstance(rule, Alert) else rule.build() for rule in self.rules
        ]
        return group


def write_expr(expr: str) -> str:
    """Returns a query without the indentation that its lines share, and without empty lines around it."""
    return dedent(expr).strip()
