"""The command that writes the Prometheus rules."""

import sys
from pathlib import Path

import pytest
import yaml

from scripts import rules


def test_check_passes_on_what_was_written_and_fails_on_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that somebody edited by hand is found, and stays as it is."""
    files = {kind: tmp_path / "deploy" / path.name for kind, path in rules.FILES.items()}
    monkeypatch.setattr(rules, "FILES", files)
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["rules.py"])
    rules.main()
    monkeypatch.setattr(sys, "argv", ["rules.py", "--check"])
    rules.main()
    edited = files["kubernetes"].read_text().replace("> 0.05", "> 0.5")
    files["kubernetes"].write_text(edited)
    with pytest.raises(SystemExit, match=r"deploy/prometheusrule.yaml is out of date: run `make rules`"):
        rules.main()
    assert files["kubernetes"].read_text() == edited


def test_links_of_what_is_printed_lead_where_one_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runbook and Grafana are at the addresses that were given; queries are as ever."""
    addresses = ["--runbook-url", "https://wiki/ringplan", "--grafana-url", "https://grafana/"]
    monkeypatch.setattr(sys, "argv", ["rules.py", "--print", "plain", *addresses])
    rules.main()
    groups = yaml.safe_load(capsys.readouterr().out)["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    for alert in alerts:
        assert alert["annotations"]["runbook_url"] == f"https://wiki/ringplan#{alert['alert'].lower()}"
        assert alert["annotations"]["dashboard_url"].startswith("https://grafana/d/ringplan-")
    assert [group["name"] for group in groups] == [group["name"] for group in rules.build_plain()["groups"]]
