"""Imported by the server that workers are forked from, and nowhere else: what a worker needs, however it was asked for.

None of it starts threads or touches an accelerator.
"""

import atexit
import gc
import os

# a million imported objects would set off a second of collections, and be taken apart for another at the end
gc.disable()
import fedbench.cli.app  # noqa: E402
import fedbench.models.clip.loading  # noqa: E402
import fedbench.models.clip.tokens  # noqa: E402
import fedbench.runs.job  # noqa: E402
import fedbench.runs.looking  # noqa: E402
import fedbench.scenarios.build  # noqa: E402

fedbench.models.clip.tokens.byte_pairs()  # a fifth of a second for whoever is first to encode a text
gc.enable()
gc.freeze()  # nor looked through by every collection of every worker
atexit.register(os._exit, 0)
