"""Names that a suite file may give, and the versions that it may say of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

LONGEST_NAME = 100


def _shown(name: str) -> str:
    """``name``, if it can stand in a table, a file's name and a terminal."""
    if not name.isprintable() or name != name.strip():
        raise ValueError("it must be printable, without spaces at its ends")
    if name and not any(character.isalnum() for character in name):
        raise ValueError("it must have a letter or a digit")
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(f"it must have at most {LONGEST_NAME} bytes")
    return name


def plain(name: str) -> str:
    """``name``, if it is that of a file in a folder and leads nowhere else."""
    if name and (Path(name).name != name or name.startswith(".")):
        raise ValueError("it must be the name of a file, without folders and ending")
    return name


def of_versions(changes: Mapping[int, str], version: int) -> Mapping[int, str]:
    """``changes``, if every one of them is of a version from 2 to ``version``."""
    stray = sorted(number for number in changes if not 2 <= number <= version)
    if stray:
        raise ValueError(f"version {stray[0]} is none from 2 to the suite's version, {version}")
    return changes


Name = Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(_shown)]
