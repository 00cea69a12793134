"""What a plug-in imports of fedbench, beside the blocks of `fedbench.toolkit` and the backbones of `fedbench.models`.

`fedbench.core.method` has the hooks of methods and what they are handed, with shapes and units; `fedbench.kinds` has
the base classes of data sets, partitions, backbones, text encoders and metrics, and what they are asked for.
"""

from fedbench.core.errors import FedbenchError, NotHere, Unworkable, diverged
from fedbench.core.federation import ClientShard, Dataset, Federation, ImageSource, Split, TensorImages
from fedbench.core.method.base import Method, NoParams
from fedbench.core.method.hooks import hookimpl, wrapper
from fedbench.core.method.hyper import hyper
from fedbench.core.method.tasks import (
    AggregationTask,
    BroadcastTask,
    ClientTask,
    EvaluationTask,
    LabelTask,
    LocalStep,
    MeasureTask,
    ModelSetup,
    ReportedTask,
    StartTask,
)
from fedbench.core.randomness import numpy_generator, torch_generator
from fedbench.core.records import RoundRecord, RunInfo, RunResult
from fedbench.core.scenario import Scenario
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import (
    Backbone,
    Broadcast,
    GlobalModel,
    InputSource,
    LabelledBatch,
    LinearHead,
    Model,
    Outputs,
    Predictions,
    StepGradients,
    Tensors,
    UnlabelledBatch,
    Update,
)
from fedbench.datasets.content import dataset
from fedbench.kinds.kinds import (
    BackboneFamily,
    BackboneRequest,
    ClientSamples,
    DatasetRequest,
    DatasetSource,
    Metric,
    MetricTask,
    Partition,
    PartitionTask,
    Samples,
    TextEncoder,
    TextRequest,
)
from fedbench.models import image_network
from fedbench.scenarios.groups import reporting_groups

__all__ = [
    "AggregationTask",
    "Backbone",
    "BackboneFamily",
    "BackboneRequest",
    "Broadcast",
    "BroadcastTask",
    "ClientSamples",
    "ClientShard",
    "ClientTask",
    "Dataset",
    "DatasetRequest",
    "DatasetSource",
    "EvaluationTask",
    "FedbenchError",
    "Federation",
    "GlobalModel",
    "ImageSource",
    "InputSource",
    "LabelTask",
    "LabelledBatch",
    "LinearHead",
    "LocalStep",
    "MeasureTask",
    "Method",
    "Metric",
    "MetricTask",
    "Model",
    "ModelSetup",
    "NoParams",
    "NotHere",
    "Outputs",
    "Partition",
    "PartitionTask",
    "Predictions",
    "ReportedTask",
    "RoundRecord",
    "RunInfo",
    "RunResult",
    "RunSpec",
    "Samples",
    "Scenario",
    "Split",
    "StartTask",
    "StepGradients",
    "TensorImages",
    "Tensors",
    "TextEncoder",
    "TextRequest",
    "Training",
    "UnlabelledBatch",
    "Unworkable",
    "Update",
    "dataset",
    "diverged",
    "hookimpl",
    "hyper",
    "image_network",
    "numpy_generator",
    "reporting_groups",
    "torch_generator",
    "wrapper",
]
