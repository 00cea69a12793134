"""Tables of stored results. Called, ``fedbench.leaderboard(...)`` of the Python API, it gives them as a data frame."""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    # the API's function and this package have one name, and importing a package puts it where the function would be
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """See `fedbench.leaderboard.frame.leaderboard`."""
        from fedbench.leaderboard.frame import leaderboard

        return leaderboard(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
