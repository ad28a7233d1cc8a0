"""Callbacks for any Lightning project: condition, monitor, schedule. Needs torch and lightning only."""

from lit_cond.callbacks.condition_number_monitor import ConditionNumberMonitor
from lit_cond.callbacks.conditioned_tokens import ConditionedTokens
from lit_cond.callbacks.exact_resume import ExactResume
from lit_cond.callbacks.spectral_conditioning import SpectralConditioning
from lit_cond.callbacks.strength_schedule import StrengthSchedule

__all__ = ["ConditionNumberMonitor", "ConditionedTokens", "ExactResume", "SpectralConditioning", "StrengthSchedule"]
