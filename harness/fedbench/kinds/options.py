"""Options behind the question mark of a name, as fields with types and ranges, for the harness's own plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbench.core.errors import FedbenchError, shortened

MOST = 100
"""Characters of a name or value that an error repeats."""


class Options(BaseModel):
    """Parameters of a plug-in. Those of other packages are dataclasses of ``hyper(...)`` fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Limited(Options):
    """The option that every data set has."""

    limit: int | None = Field(None, ge=1, le=10**9)


Model = TypeVar("Model", bound=Options)


def read_options(model: type[Model], values: Mapping[str, str], where: str) -> Model:
    """``values`` as they were typed, checked; an error begins with ``where`` they stand."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        which = "".join(f"option {name}={shortened(repr(values[str(name)]), MOST)}: " for name in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise FedbenchError(f"{shortened(where, MOST)}: {which}{reason[0].lower()}{reason[1:]}.") from None
