"""Pure functions, tensors to tensors: corrections, condition numbers, schedules. Needs torch alone."""

from lit_cond.functional.attention import (
    attention_entropy,
    attention_probabilities,
    predicted_attention_entropy,
    row_entropy,
    saturated_share,
)
from lit_cond.functional.condition_number import condition_number, condition_of_spectrum, singular_values
from lit_cond.functional.corrections import identity_correction, spectral_correction
from lit_cond.functional.extremes import extreme_singular_values
from lit_cond.functional.jacobian import (
    JacobianSpectrum,
    attention_jacobian_gram,
    attention_jacobian_singular_values,
)
from lit_cond.functional.jacobian_bound import JacobianBound, jacobian_bound
from lit_cond.functional.jacobian_heads import attention_jacobian_spectra
from lit_cond.functional.polar import PolarBackend, largest_singular_value, polar_factor
from lit_cond.functional.schedules import (
    ScheduleName,
    constant_schedule,
    cosine_schedule,
    linear_schedule,
    measured_strength,
    scheduled_strength,
    step_schedule,
    warmup_hold_schedule,
)
from lit_cond.functional.spectrum import effective_rank, numerical_rank, stable_rank
from lit_cond.functional.tokens import TokenBackend, TokenCorrection, is_prefix_safe, token_correction

__all__ = [
    "JacobianBound",
    "JacobianSpectrum",
    "PolarBackend",
    "ScheduleName",
    "TokenBackend",
    "TokenCorrection",
    "attention_entropy",
    "attention_jacobian_gram",
    "attention_jacobian_singular_values",
    "attention_jacobian_spectra",
    "attention_probabilities",
    "condition_number",
    "condition_of_spectrum",
    "constant_schedule",
    "cosine_schedule",
    "effective_rank",
    "extreme_singular_values",
    "identity_correction",
    "is_prefix_safe",
    "jacobian_bound",
    "largest_singular_value",
    "linear_schedule",
    "measured_strength",
    "numerical_rank",
    "polar_factor",
    "predicted_attention_entropy",
    "row_entropy",
    "saturated_share",
    "scheduled_strength",
    "singular_values",
    "spectral_correction",
    "stable_rank",
    "step_schedule",
    "token_correction",
    "warmup_hold_schedule",
]
