"""How CUDA computes products of float32: as IEEE has it, or with the 10 bits of mantissa of TF32."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedbench.core.errors import FedbenchError

# torch 2.9 has newer names of the switches (fp32_precision), and some versions since warn of the older ones, once a
# process. Older versions lack the newer ones, and once these are set, reading the older ones is an error;
# torch.backends.cudnn.flags reads them
warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Within the block matrix products and convolutions on CUDA may use TF32 where ``precision`` is ``tf32`` alone.

    By torch's default convolutions always may. The switches are of the whole process, of all its threads.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        before = matmul.allow_tf32, cudnn.allow_tf32
    except RuntimeError:
        if torch.cuda.is_available():
            raise FedbenchError(
                "this process has set torch's newer switches for TF32 (fp32_precision), which a run can't set back; "
                "leave them as they are, and say precision=tf32 where a run is to use it."
            ) from None
        yield
        return
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
