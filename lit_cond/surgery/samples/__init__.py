"""Small inputs for a model, made from what it says of itself: one forward pass of each kind reaches all its towers."""

from lit_cond.surgery.samples.base import Sample

__all__ = ["Sample"]
