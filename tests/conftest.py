"""What every test shares: an environment that is the same everywhere and never looks outside this machine."""

import os

# Before anything imports torch or transformers: workers share the cores, and no test downloads anything.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import pytest
from hypothesis import HealthCheck, settings

# Examples are the same in every run, and no example fails for being slow: tests look at results, not at clocks.
settings.register_profile("ringplan", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ringplan")


@pytest.fixture(autouse=True)
def _no_outer_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps settings of the person who runs the tests out of them."""
    for name in list(os.environ):
        if name.startswith(("RINGPLAN_PLANNER_", "RINGPLAN_ENGINE_")):
            monkeypatch.delenv(name)
