"""Which Ringplan this is."""

from importlib import metadata

import pytest

from engine_service.version import UNKNOWN_VERSION, read_version


def test_the_version_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package says is what the engine says."""
    monkeypatch.setattr(metadata, "version", {"ringplan": "4.5.6"}.__getitem__)
    assert read_version() == "4.5.6"


def test_sources_that_are_not_installed_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running from a checkout works, with a version that cannot be mistaken for a release."""

    def fail(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", fail)
    assert read_version() == UNKNOWN_VERSION
