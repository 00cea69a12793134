"""Imported by the server that workers are forked from, and nowhere else: what a worker needs, however it was asked for.

None of it starts threads or touches an accelerator.
"""

import atexit
import gc
import os

# a million imported objects would set off a second of collections, and be taken apart for another at the end
gc.disable()
import fedbench.cli.app  # noqa: E402
import fedbench.models.checkpoints  # noqa: E402
import fedbench.runs  # noqa: E402, F401

gc.enable()
atexit.register(os._exit, 0)
