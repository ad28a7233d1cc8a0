"""The states of the random number generators of a process, as tensors and plain values."""

import random
import sys
from typing import Any

import torch

__all__ = ["random_state", "set_random_state"]


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the random number generators of this process, as tensors and plain values."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, place, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "kind": str(kind),
            "keys": torch.tensor(keys.tolist(), dtype=torch.int64),
            "rest": [int(place), int(has_gauss), float(cached)],
        }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the random number generators of this process to what `random_state` has returned."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state and "numpy" in sys.modules:
        numpy, saved = sys.modules["numpy"], state["numpy"]
        keys = numpy.asarray(saved["keys"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((saved["kind"], keys, *saved["rest"]))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
