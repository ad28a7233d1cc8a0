"""LightningModules for training, and the backbones they train."""

from lit_cond.tasks.backbones import build_backbone
from lit_cond.tasks.base import Task
from lit_cond.tasks.image_classification import ImageClassification

__all__ = ["Task", "ImageClassification", "build_backbone"]
