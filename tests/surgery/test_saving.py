"""`save_pretrained` of a conditioned model of transformers."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn

from lit_cond import TokenRule, WeightRule, condition_, effective_state_dict, fold_, uncondition_
from lit_cond.errors import CheckpointMismatchError
from lit_cond.surgery import bake_, unbake_

CONFIG = transformers.ViTConfig(
    image_size=16, patch_size=4, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
)


class Task(nn.Module):
    """Knows of no save_pretrained, its part does."""

    def __init__(self):
        super().__init__()
        self.part = transformers.ViTForImageClassification(CONFIG).eval()

    def forward(self, x):
        return self.part(x).logits


@pytest.fixture
def task():
    torch.manual_seed(0)
    return Task()


@torch.no_grad()
def computed(model):
    return model(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)))


def reloaded(folder):
    return computed(transformers.ViTForImageClassification.from_pretrained(folder).eval()).logits


def test_live_baked_folded_and_plain_weights_are_saved_as_they_compute(task, tmp_path):
    plain = computed(task)
    condition_(task, WeightRule())
    conditioned = computed(task)
    assert not torch.equal(conditioned, plain)
    raw = task.part.state_dict()
    task.part.save_pretrained(tmp_path / "live")
    assert all(torch.equal(value, raw[name]) for name, value in task.part.state_dict().items())
    bake_(task)
    task.part.save_pretrained(tmp_path / "baked")
    unbake_(task)
    copy.deepcopy(task).part.save_pretrained(tmp_path / "copied")
    pickle.loads(pickle.dumps(task)).part.save_pretrained(tmp_path / "pickled")
    fold_(task)
    assert "save_pretrained" not in task.part.__dict__
    task.part.save_pretrained(tmp_path / "folded")
    for state in ("live", "baked", "copied", "pickled", "folded"):
        assert torch.equal(reloaded(tmp_path / state), conditioned), state


def test_a_given_state_is_saved_as_it_is(task, tmp_path):
    condition_(task, WeightRule())
    conditioned = computed(task)
    task.part.save_pretrained(tmp_path / "given", state_dict=effective_state_dict(task.part))
    assert torch.equal(reloaded(tmp_path / "given"), conditioned)


def test_a_given_state_of_uncorrected_weights_is_refused(task, tmp_path):
    condition_(task, WeightRule())
    with pytest.raises(CheckpointMismatchError, match=r"'vit\.layers\.0\..*weight' without its correction"):
        task.part.save_pretrained(tmp_path / "given", state_dict=task.part.state_dict())
    assert not (tmp_path / "given").exists()


def test_a_model_with_corrected_tokens_is_not_saved(task, tmp_path):
    plain = computed(task)
    condition_(task, WeightRule())
    condition_(task, TokenRule())
    for model in (task, copy.deepcopy(task)):
        with pytest.raises(CheckpointMismatchError, match=r"tokens at 'vit\.layers\.0' are corrected.*torch\.save"):
            model.part.save_pretrained(tmp_path / "out")
        assert not (tmp_path / "out").exists()
    uncondition_(task)
    assert "save_pretrained" not in task.part.__dict__
    task.part.save_pretrained(tmp_path / "out")
    assert torch.equal(reloaded(tmp_path / "out"), plain)
