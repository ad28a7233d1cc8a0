"""Numbers of samples, averaged over processes that may each lack some of them."""

import math
from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import Trainer

__all__ = ["mean_over_processes"]


def mean_over_processes(trainer: Trainer, values: Mapping[str, float], shared: Sequence[str]) -> dict[str, float]:
    """Return numbers with those of samples averaged over all processes that have a finite one.

    Call it in every process. Without a finite one, a number is inf if any process has inf, NaN if any has that, and
    left out if none has any.

    Args:
        trainer: Its strategy does the sum.
        values: Numbers of this process.
        shared: Keys of the numbers that differ between processes, the same keys in the same order in each.
    """
    if trainer.world_size == 1 or not shared:
        return dict(values)
    columns = []
    for key in shared:
        value = values.get(key)
        finite = value is not None and math.isfinite(value)
        columns.append((value if finite else 0.0, finite, value == math.inf, value is not None and math.isnan(value)))
    device = trainer.strategy.root_device
    local = torch.tensor(columns, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    total = trainer.strategy.reduce(local, reduce_op="sum").tolist()
    result = {key: value for key, value in values.items() if key not in set(shared)}
    for key, (amount, count, infinite, unknown) in zip(shared, total, strict=True):
        if count:
            result[key] = amount / count
        elif infinite or unknown:
            result[key] = math.inf if infinite else math.nan
    return result
