"""Changing modules in place: find attention, condition it, undo it, fold it. Needs torch only."""

from lit_cond.surgery.apply import (
    bake_,
    condition_,
    effective_state_dict,
    fold_,
    refresh_,
    set_strength_,
    strengths,
    unbake_,
    uncondition_,
)
from lit_cond.surgery.families import register_family, register_fused
from lit_cond.surgery.find import find_attention
from lit_cond.surgery.report import WeightReport, format_table, measure_weights
from lit_cond.surgery.rules import Rule, TokenRule, WeightRule
from lit_cond.surgery.sites import AttentionSite, MatrixLayout, RowSet, WeightView
from lit_cond.surgery.token_sites import TokenSite, find_token_sites

__all__ = [
    "AttentionSite",
    "MatrixLayout",
    "RowSet",
    "Rule",
    "TokenRule",
    "TokenSite",
    "WeightReport",
    "WeightRule",
    "WeightView",
    "bake_",
    "condition_",
    "effective_state_dict",
    "find_attention",
    "find_token_sites",
    "fold_",
    "format_table",
    "measure_weights",
    "refresh_",
    "register_family",
    "register_fused",
    "set_strength_",
    "strengths",
    "unbake_",
    "uncondition_",
]
