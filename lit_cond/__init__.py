"""Conditioned attention for PyTorch Lightning: callbacks that condition, monitor and schedule."""

from typing import TYPE_CHECKING, Any

from lit_cond.surgery import TokenRule, WeightRule, condition_, fold_, uncondition_

if TYPE_CHECKING:
    from lit_cond.checkpoint import load_checkpoint

__all__ = ["TokenRule", "WeightRule", "__version__", "condition_", "fold_", "load_checkpoint", "uncondition_"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The functional interface is for people without Lightning; they do not wait for its import.
    if name == "load_checkpoint":
        from lit_cond.checkpoint import load_checkpoint

        return load_checkpoint
    raise AttributeError(f"module 'lit_cond' has no attribute {name!r}")
