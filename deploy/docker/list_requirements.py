"""Prints what an installation of Ringplan needs, for pip: a layer of its own in an image, which source changes keep."""

import sys
import tomllib
from pathlib import Path


def list_requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Returns the requirements of the project and of some of its extras.

    Args:
        pyproject: the project's pyproject.toml.
        extras: names of extras; those that they bring are followed.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    own = f"{project['name']}["
    requirements = list(project["dependencies"])
    pending = list(extras)
    while pending:
        for requirement in project["optional-dependencies"][pending.pop(0)]:
            if requirement.startswith(own):
                pending += requirement.removeprefix(own).removesuffix("]").split(",")
            else:
                requirements.append(requirement)
    return requirements


if __name__ == "__main__":
    print("\n".join(list_requirements(Path(sys.argv[1]), sys.argv[2:])))  # noqa: T201  # It is what the script is for.
