"""Plug-in files (``--plugin file.py``): modules in development, and the classes that they define."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from fedbench.core.errors import FedbenchError
from fedbench.kinds.importing import importing

PLUGIN_FILES: ContextVar[tuple[Path, ...]] = ContextVar("PLUGIN_FILES", default=())
"""Files whose plug-ins are known whoever looks for them; see `plugins_everywhere`."""


@contextmanager
def plugins_everywhere(plugin_files: Iterable[Path]) -> Iterator[None]:
    """Within the block the plug-ins of ``plugin_files`` are known whoever looks for them."""
    token = PLUGIN_FILES.set(tuple(dict.fromkeys((*PLUGIN_FILES.get(), *plugin_files))))
    try:
        yield
    finally:
        PLUGIN_FILES.reset(token)


def classes_of(path: Path) -> list[type]:
    """The classes that the file defines, in its order, each once; it is run when it is first read."""
    module = _module(path)
    return list({c: None for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__})


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise FedbenchError(f"plugin file {str(path)!r} does not exist; give the path of a Python file.")
    # two files may have one name
    name = f"fedbench_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module = sys.modules.get(name)
    if module is not None:
        return module
    location = importlib.util.spec_from_file_location(name, path)
    if location is None or location.loader is None:
        raise FedbenchError(f"plugin file {str(path)!r} is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(location)
    # dataclasses look their module up in sys.modules while the file is being executed
    sys.modules[name] = module
    try:
        with importing(f"plugin file {str(path)!r}", "mend it"):
            location.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
