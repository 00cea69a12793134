"""fedbench: an honest benchmark of federated-learning methods, above all those on vision-language models.

The Python API, imported when it is used, since a command that shows its help needs no torch:

    suite = fedbench.load_suite("longtail")
    specs = fedbench.expand(suite, fedbench.Overrides(methods=("fedavg", "fedprox"), seeds=(0,)))
    result = fedbench.run_spec(specs[0], fedbench.Settings(Path("data"), Path("cache")))
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_API = {
    "load_suite": "fedbench.suites.suite",
    "Overrides": "fedbench.suites.resolve",
    "expand": "fedbench.suites.expand",
    "Settings": "fedbench.runs.prepare",
    "run_spec": "fedbench.runs.job",
    "load_runs": "fedbench.leaderboard.results",
}
"""Name -> the module that defines it. Methods import `fedbench.api` instead."""


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'fedbench' has no attribute {name!r}")
    return getattr(import_module(_API[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
