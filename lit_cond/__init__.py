"""Conditioned attention for PyTorch Lightning: callbacks that condition, monitor and schedule."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_cond.checkpoint import load_checkpoint
    from lit_cond.runs import load_run
    from lit_cond.surgery import TokenRule, WeightRule, condition_, effective_state_dict, fold_, uncondition_

__all__ = [
    "TokenRule",
    "WeightRule",
    "__version__",
    "condition_",
    "effective_state_dict",
    "fold_",
    "load_checkpoint",
    "load_run",
    "uncondition_",
]

__version__ = "0.1.0"

# Imported on first use: the functional interface works without Lightning, and `--help` does not wait for torch.
_HOMES = {
    "TokenRule": "lit_cond.surgery",
    "WeightRule": "lit_cond.surgery",
    "condition_": "lit_cond.surgery",
    "effective_state_dict": "lit_cond.surgery",
    "fold_": "lit_cond.surgery",
    "load_checkpoint": "lit_cond.checkpoint",
    "load_run": "lit_cond.runs",
    "uncondition_": "lit_cond.surgery",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_cond' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
