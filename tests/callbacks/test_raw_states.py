"""States of a module that trains raw weights: they say so, and loads of Lightning go on as they did."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder

import lit_cond
from lit_cond.callbacks import ConditionedTokens, SpectralConditioning
from lit_cond.errors import CheckpointMismatchError
from lit_cond.surgery.weight_state import SUFFIX
from tests.tiny import TinyModule, largest_difference, make_loader, make_module, make_trainer, outputs

NAME = "net.blocks.0.attn.qkv.weight_without_correction"


class TryToLoad(pl.Callback):
    """Gives the module states that it must not take, in one hook."""

    def __init__(self, hook="on_train_batch_start"):
        self.tried = 0
        setattr(self, hook, self.load)

    def load(self, trainer, pl_module, *args):
        raw = {name: value.clone() for name, value in pl_module.state_dict().items()}
        assert NAME in raw
        with pytest.raises(RuntimeError, match=rf'Missing key.*"{NAME}"'):
            pl_module.load_state_dict(lit_cond.effective_state_dict(pl_module))
        with pytest.raises(RuntimeError, match=rf'Unexpected key.*"{NAME}"'):
            TinyModule().load_state_dict(raw)
        pl_module.load_state_dict(raw)
        self.tried += 1


def fit(tmp_path, module, callbacks, ckpt_path=None, **kwargs):
    trainer = make_trainer(tmp_path, callbacks, **{"max_epochs": 2, **kwargs})
    trainer.fit(module, make_loader(), make_loader(), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_start", "on_validation_start", "on_train_end"])
def test_loads_are_strict_from_the_start_of_training_on(tmp_path, hook):
    attempt, plain, module = TryToLoad(hook), make_module(), make_module()
    fit(tmp_path, plain, [SpectralConditioning()])
    trainer = fit(tmp_path, module, [SpectralConditioning(), attempt])
    assert attempt.tried >= 1
    assert module.losses == plain.losses  # the attempts have changed nothing
    assert not any(name.endswith(SUFFIX) for name in module.state_dict())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert not any(name.endswith(SUFFIX) for name in torch.load(tmp_path / "a.ckpt")["state_dict"])


@pytest.mark.parametrize("average", [None, "before", "after"])
def test_a_resume_is_exact_and_strict_afterwards(tmp_path, average):
    def callbacks():
        mine = [SpectralConditioning(refresh_every_n_steps=3), ConditionedTokens()]
        if average is None:
            return mine
        # ConditionedTokens asks to be listed before the average.
        averaging = EMAWeightAveraging(decay=0.5)
        return [mine[1], averaging, mine[0]] if average == "before" else [*mine, averaging]

    whole, first, second = make_module(), make_module(), make_module(seed=5)
    fit(tmp_path, whole, callbacks(), max_epochs=4)
    fit(tmp_path, first, [Save(tmp_path), *callbacks()])
    attempt = TryToLoad("on_train_end")
    fit(tmp_path, second, [attempt, *callbacks()], ckpt_path=tmp_path / "half.ckpt", max_epochs=4)
    assert attempt.tried == 1
    assert first.losses + second.losses == whole.losses
    for (name, a), (_, b) in zip(whole.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


class Save(pl.Callback):
    """Saves within `fit`, where averages are still apart from the weights that are trained."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / "half.ckpt")
        state = torch.load(self.folder / "half.ckpt", weights_only=True)
        for part in ("state_dict", "current_model_state", "averaging_state"):
            assert not any(name.endswith(SUFFIX) for name in state.get(part, {})), part


def test_a_finder_that_loads_in_the_middle_of_training(tmp_path):
    class Milestone(LearningRateFinder):
        def on_fit_start(self, *args):
            pass

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                self.lr_find(trainer, pl_module)

    finder, attempt = Milestone(num_training_steps=5, update_attr=False), TryToLoad("on_train_end")
    plain, module = make_module(), make_module()
    fit(tmp_path, plain, [SpectralConditioning()])
    fit(tmp_path, module, [finder, SpectralConditioning(), attempt])
    assert attempt.tried == 1
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True))


class Own(TinyModule):
    """A module that conditions itself, without any callback."""

    def __init__(self, attention="fused", lr=1e-2, checkpointing=False, seed=0, **rule):
        super().__init__(attention, lr, checkpointing)
        torch.manual_seed(seed)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        lit_cond.condition_(self.net, lit_cond.WeightRule(**rule))


def test_a_module_that_conditions_itself(tmp_path):
    """Its checkpoints hold raw weights, which fail by name unless the correction is the same."""
    module = Own()
    fit(tmp_path, module, []).save_checkpoint(tmp_path / "own.ckpt")
    assert largest_difference(outputs(Own.load_from_checkpoint(tmp_path / "own.ckpt")), outputs(module)) == 0
    with pytest.raises(RuntimeError, match=r"'net\.blocks\.0\.attn\.qkv\.weight' .*another correction"):
        Own.load_from_checkpoint(tmp_path / "own.ckpt", seed=1)
    with pytest.raises(RuntimeError, match=rf'Unexpected key.*"{NAME}"'):
        TinyModule.load_from_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(CheckpointMismatchError, match=rf"'{NAME}' and 1 more are unknown.*effective_state_dict"):
        lit_cond.load_checkpoint(TinyModule, tmp_path / "own.ckpt")
    identity = Own(correction="identity", scale=0.5)
    fit(tmp_path, identity, []).save_checkpoint(tmp_path / "identity.ckpt")
    again = Own.load_from_checkpoint(tmp_path / "identity.ckpt", seed=1, correction="identity", scale=0.5)
    assert largest_difference(outputs(again), outputs(identity)) == 0


def test_a_checkpoint_with_effective_weights_in_a_module_that_conditions_itself(tmp_path):
    fit(tmp_path, make_module(), [SpectralConditioning()]).save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match=rf'Missing key.*"{NAME}"'):
        Own.load_from_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointMismatchError, match=rf"'{NAME}' and 1 more are missing.*uncondition_"):
        lit_cond.load_checkpoint(Own, tmp_path / "a.ckpt")
