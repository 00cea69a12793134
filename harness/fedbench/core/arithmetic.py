"""How CUDA computes products of float32: as IEEE has it, or with the 10 bits of mantissa of TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Within the block matrix products and convolutions on CUDA may use TF32 where ``precision`` is ``tf32`` alone.

    By torch's default convolutions always may. The switches are of the whole process, of all its threads.
    """
    # torch 2.9 has newer names (fp32_precision); once these are set, reading the older ones is an error, and
    # torch.backends.cudnn.flags reads them
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
