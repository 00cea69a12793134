"""The program that runs this process, kept out of the processes that this one starts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_main() -> Iterator[None]:
    """Processes started inside the block do not import the program that runs this one.

    They need nothing of it, and a script without a main guard would run again in each of them.
    """
    main = vars(sys.modules["__main__"])
    before: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.pop("__spec__")
        main.update(before)
