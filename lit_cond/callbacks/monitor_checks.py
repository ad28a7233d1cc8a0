"""What the monitor can not work with: compiled code, and callbacks that it would disagree with."""

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cond.callbacks.strength_schedule import StrengthSchedule
from lit_cond.errors import ConfigurationError
from lit_cond.measuring.install import compiled_method

__all__ = ["check_order", "compiled_code"]

_COMPILED = (
    "attention and tokens can not be looked at inside compiled code, and {compiled} is compiled; compile the network "
    "in it (self.net = torch.compile(self.net)), or measure quantities=['query', 'key', 'value']"
)


def check_order(trainer: Trainer, monitor: Callback) -> None:
    """Refuse callbacks that the monitor would disagree with.

    Raises:
        ConfigurationError: If a schedule moves the strength after the monitor has read it, or another monitor writes
            numbers under the same keys.
    """
    callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
    later = callbacks[callbacks.index(monitor) + 1 :]
    # A measured schedule answers what was measured, and moves the strength after that.
    if any(isinstance(callback, StrengthSchedule) and callback.schedule != "measured" for callback in later):
        raise ConfigurationError(
            "StrengthSchedule moves the strength after ConditionNumberMonitor has measured; list StrengthSchedule first"
        )
    for other in callbacks:
        if other is not monitor and type(other) is type(monitor):
            shared = sorted(set(other.quantities) & set(monitor.quantities))  # type: ignore[attr-defined]
            if shared:
                raise ConfigurationError(
                    f"two ConditionNumberMonitors measure {', '.join(shared)}, and would log both under the same keys; "
                    "give each its own `quantities`, or one of them all layers"
                )


def compiled_code(pl_module: LightningModule) -> str | None:
    """Return why attention can not be looked at, None if it can.

    That the training step itself is compiled Lightning (2.6) notes in a private attribute only.
    """
    whole = getattr(pl_module, "_compiler_ctx", None) is not None
    compiled = "the LightningModule as a whole" if whole else compiled_method(pl_module)
    return None if compiled is None else _COMPILED.format(compiled=compiled)
