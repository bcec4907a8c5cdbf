"""How the tests' Prometheus is fetched. apt is replaced, since tests do not look outside this machine."""

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import install_prometheus


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it but what a test puts there, and an empty folder to unpack into."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(install_prometheus, "FOLDER", tmp_path / "tools")
    return folder


def add_program(folder: Path, name: str, script: str) -> None:
    """Puts a shell script on the PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_programs_on_the_path_are_taken_and_nothing_is_fetched(
    bare_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever has Prometheus needs no second one."""
    for name in install_prometheus.PROGRAMS:
        add_program(bare_path, name, "")
    add_program(bare_path, "apt-get", f"touch {bare_path}/called")
    install_prometheus.main()
    assert install_prometheus.find_program("promtool") == bare_path / "promtool"
    assert capsys.readouterr().out == ""
    assert not (bare_path / "called").exists()


def test_without_apt_it_says_so_and_goes_on(bare_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`make test` works on every machine: what cannot be had only costs the tests that need it."""
    install_prometheus.main()
    shown = capsys.readouterr().out
    assert "No prometheus and promtool: tests that need them are skipped." in shown
    assert "apt-get" in shown


def test_package_that_is_not_there_is_named(bare_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person sees apt's own reason, once apt's lists have been tried as well."""
    add_program(bare_path, "apt-get", 'echo "E: Unable to locate package"; exit 100')
    install_prometheus.main()
    assert "apt-get: E: Unable to locate package" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb to make a package")
def test_package_is_unpacked_where_the_tests_look(tmp_path: Path, bare_path: Path) -> None:
    """A real package, of programs that say which one they are."""
    dpkg_deb = shutil.which("dpkg-deb", path="/usr/bin:/bin")
    tree = tmp_path / "tree"
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "DEBIAN").mkdir()
    for name in install_prometheus.PROGRAMS:
        add_program(tree / "usr/bin", name, f"echo {name}")
    control = "Package: prometheus\nVersion: 1\nArchitecture: all\nMaintainer: tests\nDescription: for tests\n"
    (tree / "DEBIAN/control").write_text(control)
    subprocess.run(
        [dpkg_deb, "--build", tree, tmp_path / "prometheus_1_all.deb"], check=True, env={"PATH": "/usr/bin:/bin"}
    )
    add_program(bare_path, "apt-get", f"/bin/cp {tmp_path}/prometheus_1_all.deb .")
    add_program(bare_path, "dpkg-deb", f'PATH=/usr/bin:/bin exec {dpkg_deb} "$@"')
    install_prometheus.main()
    found = install_prometheus.find_program("promtool")
    assert found == install_prometheus.FOLDER / "usr/bin/promtool"
    assert subprocess.run([found], capture_output=True, text=True, check=True).stdout == "promtool\n"
