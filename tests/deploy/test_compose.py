"""The compose file, and what Grafana loads at its start."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from engine_service.config import EngineSettings
from planner_service.config import PlannerSettings
from scripts.dashboard_files import FOLDER

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
# What the image of Grafana reads, and where deploy/compose puts the dashboards.
GRAFANA_PROVISIONING = "/etc/grafana/provisioning"


def load(path: Path) -> dict[str, Any]:
    """Returns what a YAML file holds."""
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


SERVICES = load(COMPOSE)["services"]


def list_mounts(service: str) -> dict[str, str]:
    """Returns where a service has what: sources by target."""
    volumes = [volume.split(":") for volume in SERVICES[service]["volumes"]]
    return {volume[1]: volume[0] for volume in volumes}


def test_everything_that_belongs_together_is_brought_up() -> None:
    """One command gives a model, both processes, Prometheus and Grafana."""
    assert set(SERVICES) == {"model", "planner", "engine", "prometheus", "grafana"}


def test_files_that_are_mounted_or_built_from_exist() -> None:
    """Compose would make an empty folder of a mount that is not there."""
    volumes = load(COMPOSE)["volumes"]
    for name, service in SERVICES.items():
        for source in list_mounts(name).values():
            assert source in volumes or (COMPOSE.parent / source).is_dir(), source
        if "build" in service:
            context = COMPOSE.parent / service["build"]["context"]
            assert context.resolve() == ROOT
            assert (context / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize(
    ("service", "settings_class"), [("planner", PlannerSettings), ("engine", EngineSettings)], ids=["planner", "engine"]
)
def test_settings_are_ones_that_the_processes_have(
    service: str, settings_class: type[BaseSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelled variable would stop the process at its start."""
    defaults = {"${CACHE_MODE:-on}": "on", "${ALLOW_DRILLS:-false}": "false"}
    environment = {name: defaults.get(value, value) for name, value in SERVICES[service]["environment"].items()}
    prefix = str(settings_class.model_config["env_prefix"])
    assert all(name.startswith(prefix) for name in environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = settings_class()
    for name, value in environment.items():
        assert str(getattr(settings, name.removeprefix(prefix).lower())).lower().endswith(value.lower())


def test_engine_and_planner_share_a_folder_in_memory() -> None:
    """Socket and ring lie in one volume that is memory, and belongs to the images' user alone."""
    for service in ("planner", "engine"):
        assert list_mounts(service)["/run/ringplan"] == "shared"
    options = load(COMPOSE)["volumes"]["shared"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert {"mode=0700", "uid=10001", "gid=10001"} <= set(options["o"].split(","))
    planner, engine = SERVICES["planner"]["environment"], SERVICES["engine"]["environment"]
    assert engine["RINGPLAN_ENGINE_PLANNER"] == f"unix:{planner['RINGPLAN_PLANNER_SOCKET']}"
    for name in ("RINGPLAN_PLANNER_SOCKET", "RINGPLAN_PLANNER_RING_DIR"):
        assert planner[name].startswith("/run/ringplan/")


def test_no_process_has_more_rights_than_it_needs() -> None:
    """A root file system that is only read, no capability, no way to gain one."""
    for service in SERVICES.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_ports_are_open_to_this_machine_alone() -> None:
    """Neither the engine nor Grafana asks who is there."""
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_are_pinned() -> None:
    """What worked yesterday works today."""
    images = [service["image"] for service in SERVICES.values() if "image" in service]
    assert len(images) == 2
    assert all(image.rpartition(":")[2].removeprefix("v").count(".") == 2 for image in images)


def test_prometheus_scrapes_both_services_where_they_serve() -> None:
    """Targets are services of the compose file with the ports of the settings' defaults."""
    folder = (COMPOSE.parent / list_mounts("prometheus")["/etc/prometheus"]).resolve()
    (scrape,) = load(folder / "prometheus.yml")["scrape_configs"]
    targets = {config["labels"]["container"]: config["targets"] for config in scrape["static_configs"]}
    assert targets == {
        "planner": [f"planner:{PlannerSettings().metrics_port}"],
        "engine": [f"engine:{EngineSettings().metrics_port}"],
    }


def test_grafana_finds_its_data_source_and_its_dashboards() -> None:
    """The provisioning files lead to the Prometheus of the compose file and to the folder of dashboards."""
    mounts = list_mounts("grafana")
    assert (COMPOSE.parent / mounts[GRAFANA_PROVISIONING]).resolve() == PROVISIONING
    (source,) = load(PROVISIONING / "datasources" / "prometheus.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["isDefault"] is True
    (provider,) = load(PROVISIONING / "dashboards" / "ringplan.yaml")["providers"]
    assert (COMPOSE.parent / mounts[provider["options"]["path"]]).resolve() == FOLDER
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (FOLDER / home.name).is_file()
    assert mounts[str(home.parent)] == mounts[provider["options"]["path"]]


def test_rates_look_back_over_four_scrapes() -> None:
    """Grafana takes its window for rates from the data source's interval, which is the one of the scrapes."""
    (source,) = load(PROVISIONING / "datasources" / "prometheus.yaml")["datasources"]
    scrapes = load(ROOT / "deploy" / "prometheus" / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrapes


def test_dashboards_are_json_that_grafana_can_import() -> None:
    """Each file has the fields that an import asks for, and no number that only one installation knows."""
    for path in FOLDER.glob("*.json"):
        dashboard = json.loads(path.read_text())
        assert dashboard["title"]
        assert dashboard["schemaVersion"] >= 36
        assert dashboard.get("id") is None
