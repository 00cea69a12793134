"""What a run gave, read-only for whoever is notified of it: mappings and arrays that refuse to be changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict that refuses to be changed; unlike `types.MappingProxyType` it can be sent to another process."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("what a run gave is read-only; change a copy of it: dict(...)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return FrozenDict, (dict(self),)


@dataclass(frozen=True)
class ReadOnly:
    """A frozen dataclass whose mappings and arrays are read-only as well, those inside of mappings included."""

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, frozen(value))


def frozen(value: Any) -> Any:
    """A read-only copy of a mapping, a read-only view of an array, and anything else as it is."""
    if isinstance(value, Mapping):
        return FrozenDict({key: frozen(each) for key, each in value.items()})
    if isinstance(value, np.ndarray):
        view = value.view()
        view.flags.writeable = False
        return view
    return value
