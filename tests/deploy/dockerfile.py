"""Reads Dockerfiles, as far as those of deploy/docker go."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "deploy" / "docker"
DOCKERFILES = tuple(sorted(FOLDER.glob("*.Dockerfile")))


class Instruction(NamedTuple):
    """An instruction: its keyword, and the rest of it on one line."""

    keyword: str
    text: str


def read_instructions(path: Path) -> list[Instruction]:
    """Returns all instructions; variables of `ARG` before the first stage are filled in."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    instructions = [Instruction(*line.split(None, 1)) for line in joined.splitlines()]
    arguments: dict[str, str] = {}
    for instruction in instructions:
        if instruction.keyword == "ARG" and "=" in instruction.text:
            name, _, value = instruction.text.partition("=")
            arguments[name] = value
    return [
        Instruction(keyword, re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], text))
        for keyword, text in instructions
    ]


def split_stages(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Returns the instructions of each stage, `FROM` first."""
    stages: list[list[Instruction]] = []
    for instruction in instructions:
        if instruction.keyword == "FROM":
            stages.append([])
        if stages:
            stages[-1].append(instruction)
    return stages


def read_environment(stage: list[Instruction]) -> dict[str, str]:
    """Returns what a stage's `ENV` instructions set."""
    pairs = [pair for keyword, text in stage if keyword == "ENV" for pair in shlex.split(text)]
    return dict(pair.split("=", 1) for pair in pairs)


def find_value(stage: list[Instruction], keyword: str) -> str:
    """Returns the rest of a stage's last instruction of a kind."""
    return [text for found, text in stage if found == keyword][-1]


def read_command(stage: list[Instruction]) -> list[str]:
    """Returns the command of a container without arguments of its own."""
    return [*json.loads(find_value(stage, "ENTRYPOINT")), *json.loads(find_value(stage, "CMD"))]


def list_copied(stages: list[list[Instruction]]) -> Iterator[str]:
    """Yields every path that is copied from the build's context."""
    for stage in stages:
        for keyword, text in stage:
            if keyword == "COPY" and not text.startswith("--from"):
                yield from text.split()[:-1]


def is_ignored(path: str) -> bool:
    """Whether .dockerignore, which lists what is not, leaves a path out of the build's context."""
    patterns = (REPOSITORY / ".dockerignore").read_text().split("\n")
    kept = [line.removeprefix("!/") for line in patterns if line.startswith("!/")]
    assert "*" in patterns
    return not any(path == name.rstrip("/") or (name.endswith("/") and f"{path}/".startswith(name)) for name in kept)
