"""A copy of a module for each thread, since clients that train side by side must not share one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import chain
from typing import TypeVar

from torch import nn

Net = TypeVar("Net", bound=nn.Module)


def per_thread(net: Net) -> Callable[[], Net]:
    """A function that returns the calling thread's own ``net``: the original in the creating thread, a copy in others.

    `functional_call` puts the caller's tensors into the module for the duration of a call, and train or eval mode is
    set on the module. A copy shares parameters and buffers with the original, since callers bring their own.
    """
    own = threading.local()
    own.net = net

    def of_this_thread() -> Net:
        if not hasattr(own, "net"):
            shared = {id(tensor): tensor for tensor in chain(net.parameters(), net.buffers())}
            own.net = copy.deepcopy(net, shared)
        net_of_thread: Net = own.net
        return net_of_thread

    return of_this_thread
