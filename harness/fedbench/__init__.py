"""fedbench: an honest benchmark of federated-learning methods, above all those on vision-language models.

The Python API, imported when it is used, since a command that shows its help needs no torch:

    results = fedbench.run("fedavg", "fedprox", scenario="label-skew", rounds=5, seeds=[0, 1])
    results.table(), results.rounds(), results.predictions(), results.plot()
    fedbench.load(), fedbench.leaderboard(), fedbench.tune("longtail"), fedbench.federation("label-skew")

Methods import `fedbench.api`.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbench.core.version import __version__ as __version__

if TYPE_CHECKING:
    from fedbench.core.errors import FedbenchError as FedbenchError
    from fedbench.core.spec import RunSpec as RunSpec
    from fedbench.workflow.federation import federation as federation
    from fedbench.workflow.results import Results as Results
    from fedbench.workflow.results import load as load
    from fedbench.workflow.running import run as run
    from fedbench.workflow.tuning import tune as tune
    from fedbench_boards.leaderboard.reading import leaderboard as leaderboard

_API = {
    "FedbenchError": "fedbench.core.errors",
    "Results": "fedbench.workflow.results",
    "RunSpec": "fedbench.core.spec",
    "federation": "fedbench.workflow.federation",
    "leaderboard": "fedbench_boards.leaderboard.reading",
    "load": "fedbench.workflow.results",
    "run": "fedbench.workflow.running",
    "tune": "fedbench.workflow.tuning",
}
"""Name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'fedbench' has no attribute {name!r}")
    with warnings.catch_warnings():
        # MLflow imports a bar that warns where a notebook has no widgets; fedbench shows its own
        warnings.filterwarnings("ignore", "IProgress not found")
        return getattr(import_module(_API[name]), name)


def __dir__() -> list[str]:
    return sorted([*_API, "__version__"])
