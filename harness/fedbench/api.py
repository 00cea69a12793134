"""What a method imports of fedbench, beside the blocks of `fedbench.toolkit` and the backbones of `fedbench.models`.

`fedbench.core.method` has the hooks and what they are handed, with shapes and units.
"""

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.federation import Federation
from fedbench.core.method.base import Method, NoParams
from fedbench.core.method.hooks import hookimpl
from fedbench.core.method.hyper import hyper
from fedbench.core.method.labelling import LabelTask
from fedbench.core.method.measuring import MeasureTask
from fedbench.core.method.tasks import (
    AggregationTask,
    BroadcastTask,
    ClientTask,
    EvaluationTask,
    LocalStep,
    ModelSetup,
    ReportedTask,
    StartTask,
)
from fedbench.core.partition import ClientShard
from fedbench.core.randomness import numpy_generator, torch_generator
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import (
    Broadcast,
    GlobalModel,
    InputSource,
    LabelledBatch,
    LinearHead,
    Model,
    Outputs,
    Predictions,
    Tensors,
    UnlabelledBatch,
    Update,
)

__all__ = [
    "AggregationTask",
    "Broadcast",
    "BroadcastTask",
    "ClientShard",
    "ClientTask",
    "EvaluationTask",
    "FedbenchError",
    "Federation",
    "GlobalModel",
    "InputSource",
    "LabelTask",
    "LabelledBatch",
    "LinearHead",
    "LocalStep",
    "MeasureTask",
    "Method",
    "Model",
    "ModelSetup",
    "NoParams",
    "Outputs",
    "Predictions",
    "ReportedTask",
    "RoundRecord",
    "RunInfo",
    "RunResult",
    "RunSpec",
    "StartTask",
    "Tensors",
    "Training",
    "UnlabelledBatch",
    "Unworkable",
    "Update",
    "hookimpl",
    "hyper",
    "numpy_generator",
    "torch_generator",
]
