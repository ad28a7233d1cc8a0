"""Decomposing many matrices on the cores of a CPU: LAPACK itself hardly uses more than one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["side_by_side"]

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(function: Callable[[T], R], items: Sequence[T], tensors: Sequence[Tensor]) -> list[R]:
    """Return the results of a function, computed on as many cores as torch may use, one item on each.

    Args:
        function: Called with each item; it must not communicate with other processes.
        items: What it is called with.
        tensors: What it computes with. Where one is on another device than the CPU, or sharded, items take turns.
    """
    threads = torch.get_num_threads()
    alone = any(isinstance(t, DTensor) or t.device.type != "cpu" for t in tensors)
    if alone or threads < 2 or len(items) < 2:
        return [function(item) for item in items]
    # The number is the process's own: it is given back even when an item fails.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)
