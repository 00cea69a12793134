"""A module of each thread's own: clients that train side by side must not share one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import chain
from typing import TypeVar

from torch import nn

Net = TypeVar("Net", bound=nn.Module)


def per_thread(net: Net) -> Callable[[], Net]:
    """A function that gives the calling thread its own ``net``: the thread that made it the original, others a copy.

    `functional_call` puts the caller's tensors into the module for as long as a call lasts, and train or eval mode
    stands on the module. A copy shares parameters and buffers with the original, since callers bring their own.
    """
    own = threading.local()
    own.net = net

    def of_this_thread() -> Net:
        if not hasattr(own, "net"):
            shared = {id(tensor): tensor for tensor in chain(net.parameters(), net.buffers())}
            own.net = copy.deepcopy(net, shared)
        found: Net = own.net
        return found

    return of_this_thread
