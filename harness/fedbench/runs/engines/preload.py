"""Imported by the server that workers are forked from, and nowhere else: what a run needs, whatever its method.

None of it starts threads or uses an accelerator.
"""

import atexit
import gc
import os
import warnings

import numpy.ma  # noqa: F401 - numpy.unique imports it when it is first called
import torchvision.transforms.v2.functional  # noqa: F401

import fedbench.models.clip.loading
import fedbench.runs.engines.engine
import fedbench.runs.engines.worker
import fedbench.runs.inspection
import fedbench.scenarios.build

fedbench.runs.engines.worker.adopt_what_is_left()  # of a worker that dies; whoever notices that ends it
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
fedbench.models.clip.loading.byte_pairs()  # a fifth of a second for whoever is first to encode a text
gc.freeze()  # a collection in a worker would else write to every imported object, and so copy the memory it shares
atexit.register(os._exit, 0)  # to free what was imported takes seconds, in which a pipe behind the command stays open
