"""Writes the Prometheus rules as a plain file and as a PrometheusRule, both from deploy/prometheus/*.py.

Usage: `python scripts/rules.py` writes both files; `--check` changes nothing and fails when one differs from what the
rules give; `--print plain` or `--print kubernetes` writes one to the standard output, with `--runbook-url URL` and
`--grafana-url URL` for the links in its annotations.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy.prometheus.alerts import ALERTS
from deploy.prometheus.recording_rules import RECORDING_GROUPS

ROOT = Path(__file__).resolve().parent.parent
RUNBOOK_URL = "docs/runbook.md"
# A text without line breaks stays on one line.
_WIDTH = 10_000
HEADER = "# Made by `make rules` from deploy/prometheus/*.py.\n"


class _Dumper(yaml.SafeDumper):
    """Writes queries of several lines as they are."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def build_plain(runbook_url: str = RUNBOOK_URL, grafana_url: str = "") -> dict[str, Any]:
    """Returns the rules as Prometheus reads them.

    Args:
        runbook_url: where the runbook is.
        grafana_url: where Grafana is, without a slash at the end.
    """
    return {"groups": [group.build(runbook_url, grafana_url) for group in (*RECORDING_GROUPS, ALERTS)]}


def build_kubernetes(runbook_url: str = RUNBOOK_URL, grafana_url: str = "") -> dict[str, Any]:
    """Returns the rules as the Prometheus Operator reads them; the arguments are those of `build_plain`."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "ringplan", "labels": {"app.kubernetes.io/name": "ringplan"}},
        "spec": build_plain(runbook_url, grafana_url),
    }


BUILDERS = {"plain": build_plain, "kubernetes": build_kubernetes}
FILES = {
    "plain": ROOT / "deploy/prometheus/rules.yaml",
    "kubernetes": ROOT / "deploy/kubernetes/components/monitoring/prometheusrule.yaml",
}


def write(document: dict[str, Any]) -> str:
    """Returns a document as YAML."""
    return HEADER + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=_WIDTH, allow_unicode=True)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Writes the Prometheus rules.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is out of date")
    parser.add_argument("--print", choices=BUILDERS, help="write one to the standard output instead")
    parser.add_argument("--runbook-url", default=RUNBOOK_URL, help="where the runbook is")
    parser.add_argument("--grafana-url", default="", help="where Grafana is")
    options = parser.parse_args()
    if options.print:
        document = BUILDERS[options.print](options.runbook_url, options.grafana_url.rstrip("/"))
        sys.stdout.write(write(document))
        return
    for kind, path in FILES.items():
        text = write(BUILDERS[kind]())
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path.relative_to(ROOT)} is out of date: run `make rules`")


if __name__ == "__main__":
    main()
