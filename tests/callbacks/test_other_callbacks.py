"""Lightning's own callbacks together with those of lit_cond, in either order of the list."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch.utils.checkpoint import checkpoint

import lit_cond
from lit_cond.callbacks import ConditionedTokens, SpectralConditioning, StrengthSchedule
from lit_cond.errors import AlreadyConditionedError, ConfigurationError
from lit_cond.surgery.tokens import token_forwards
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import TinyModule, largest_difference, make_loader, make_module, make_trainer, outputs

CALLBACKS = {"weights": SpectralConditioning, "tokens": ConditionedTokens}
EITHER_ORDER = pytest.mark.parametrize("first", [True, False])
BOTH_KINDS = pytest.mark.parametrize("kind", CALLBACKS)


class Module(TinyModule):
    """Trains what is not frozen; its batch size can be searched."""

    def __init__(self, batch_size: int = 16, lr: float = 1e-2) -> None:
        super().__init__(lr=lr)
        self.batch_size = batch_size

    @property
    def backbone(self):
        return self.net.blocks

    def train_dataloader(self):
        return make_loader(64, self.batch_size)

    def val_dataloader(self):
        return make_loader(64, self.batch_size)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr)


def make():
    torch.manual_seed(0)
    return Module()


def fit(tmp_path, module, callbacks, first=True, **kwargs):
    trainer = make_trainer(tmp_path, callbacks if first else callbacks[::-1], **{"max_epochs": 2, **kwargs})
    trainer.fit(module)
    return trainer


def computed_by_a_plain_load(trainer, path, kind):
    trainer.save_checkpoint(path)
    return outputs(Module.load_from_checkpoint(path) if kind == "weights" else lit_cond.load_checkpoint(Module, path))


class HalfFrozen(BaseFinetuning):
    """Trains the blocks from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer)


FINETUNING = {
    "own": HalfFrozen,
    "backbone": lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False, verbose=False),
}


@EITHER_ORDER
@BOTH_KINDS
@pytest.mark.parametrize("finetuning", FINETUNING)
def test_finetuning_trains_the_raw_weights_from_its_epoch_on(tmp_path, finetuning, kind, first):
    module = make()
    raw = module.net.blocks[0].attn.qkv.weight.detach().clone()
    moved = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            moved.append(not torch.equal(pl_module.net.blocks[0].attn.qkv.weight, raw))

    trainer = fit(tmp_path, module, [CALLBACKS[kind](), FINETUNING[finetuning](), Look()], first)
    assert moved == [False, True]
    assert largest_difference(computed_by_a_plain_load(trainer, tmp_path / "a.ckpt", kind), outputs(module)) == 0


@EITHER_ORDER
def test_b5_a_resume_after_groups_were_added_on_the_way_starts_right(tmp_path, first):
    def callbacks():
        return [SpectralConditioning(), ConditionedTokens(), HalfFrozen()]

    whole, half, rest = make(), make(), Module()
    fit(tmp_path, whole, callbacks(), first, max_epochs=3)
    saver = ModelCheckpoint(tmp_path, save_last=True)
    fit(tmp_path, half, [*callbacks(), saver], first, enable_checkpointing=True)
    trainer = make_trainer(tmp_path, callbacks() if first else callbacks()[::-1], max_epochs=3)
    trainer.fit(rest, ckpt_path=saver.last_model_path)
    # Lightning 2.6's BaseFinetuning resumes with another state of the optimizer, without any callback of ours too.
    assert [*half.losses, rest.losses[0]] == whole.losses[:9]
    assert len(trainer.optimizers[0].param_groups) == 2


@EITHER_ORDER
def test_a3_stochastic_weight_averaging_of_a_model_with_corrected_tokens(tmp_path, first):
    module = make()
    callbacks = [SpectralConditioning(), ConditionedTokens(), StochasticWeightAveraging(1e-3, 1)]
    trainer = fit(tmp_path, module, callbacks, first, max_epochs=3)
    assert [name for name, _ in token_forwards(module)] == ["net.blocks.0"]
    assert largest_difference(computed_by_a_plain_load(trainer, tmp_path / "a.ckpt", "tokens"), outputs(module)) == 0


@EITHER_ORDER
@BOTH_KINDS
def test_accumulation_that_changes_by_epoch(tmp_path, kind, first):
    module = make()
    trainer = fit(tmp_path, module, [CALLBACKS[kind](), GradientAccumulationScheduler({0: 1, 1: 2})], first)
    assert trainer.global_step == 4 + 2
    assert largest_difference(computed_by_a_plain_load(trainer, tmp_path / "a.ckpt", kind), outputs(module)) == 0


@EITHER_ORDER
def test_the_learning_rate_finder_leaves_the_run_as_it_is(tmp_path, first):
    def run(*extra):
        module = make()
        schedule = StrengthSchedule("linear", 0.2, 1.0)
        callbacks = [SpectralConditioning(refresh_every_n_steps=3), ConditionedTokens(), schedule, *extra]
        fit(tmp_path, module, callbacks, first)
        return module

    plain, found = run(), run(LearningRateFinder(num_training_steps=5, update_attr=False))
    assert found.losses[-8:] == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), found.parameters(), strict=True))


@EITHER_ORDER
@pytest.mark.parametrize(
    "finder", [lambda: LearningRateFinder(num_training_steps=5), lambda: BatchSizeFinder(max_trials=1)]
)
def test_conditioned_weights_are_refused_with_a_finder_too(tmp_path, finder, first):
    """Finders load a checkpoint before the first step: their own one, which is no resume."""
    fit(tmp_path, make(), [SpectralConditioning()]).save_checkpoint(tmp_path / "a.ckpt")
    plain = Module.load_from_checkpoint(tmp_path / "a.ckpt")
    before = outputs(plain)
    with pytest.raises(AlreadyConditionedError, match="well conditioned before any correction"):
        fit(tmp_path, plain, [SpectralConditioning(), finder()], first)
    assert largest_difference(outputs(plain), before) == 0


@EITHER_ORDER
@BOTH_KINDS
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_batch_size_finder_leaves_one_correction(tmp_path, mode, kind, first):
    reference, module = make(), make()
    finder = BatchSizeFinder(mode=mode, max_trials=2, steps_per_trial=2, init_val=8)
    trainer = fit(tmp_path, module, [CALLBACKS[kind](), finder], first)
    reference.batch_size = module.batch_size
    fit(tmp_path, reference, [CALLBACKS[kind]()])
    assert module.losses[-len(reference.losses) :] == reference.losses
    assert largest_difference(computed_by_a_plain_load(trainer, tmp_path / "a.ckpt", kind), outputs(module)) == 0


@EITHER_ORDER
def test_pruning_of_corrected_weights_is_refused_with_the_fix(tmp_path, first):
    module = make()
    before = outputs(module)
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(
        ConfigurationError, match=r"ModelPruning prunes 'net\.blocks\.0\.attn\.qkv.*parameters_to_prune"
    ):
        fit(tmp_path, module, [SpectralConditioning(), pruning], first)
    assert largest_difference(outputs(module), before) == 0


@EITHER_ORDER
@BOTH_KINDS
def test_pruning_of_other_weights_works(tmp_path, kind, first):
    module = make()
    pruned = module.net.blocks[0].mlp[0] if kind == "weights" else module.net.blocks[0].attn.qkv
    pruning = ModelPruning(
        "l1_unstructured", amount=0.5, parameters_to_prune=[(pruned, "weight")], use_lottery_ticket_hypothesis=False
    )
    trainer = fit(tmp_path, module, [CALLBACKS[kind](), pruning], first)
    assert float((pruned.weight == 0).float().mean()) == pytest.approx(0.75, abs=0.01)
    assert largest_difference(computed_by_a_plain_load(trainer, tmp_path / "a.ckpt", kind), outputs(module)) == 0


@BOTH_KINDS
@pytest.mark.parametrize("reentrant", [True, False])
def test_trap_19_gradient_checkpointing_of_both_kinds_changes_nothing(tmp_path, reentrant, kind):
    class Checkpointed(Module):
        def forward(self, x):
            x = self.net.embed(x)
            for block in self.net.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.net.head(self.net.norm(x).mean(1))

    reference = make()
    torch.manual_seed(0)
    module = Checkpointed()
    for each in (reference, module):
        fit(tmp_path, each, [CALLBACKS[kind]()])
    assert reference.losses == module.losses


@BOTH_KINDS
@pytest.mark.parametrize("version", ["ModelEmaV2", "ModelEmaV3"])
@pytest.mark.parametrize("place", ["module", "callback"])
def test_averages_of_timm_are_corrected_or_fail(tmp_path, version, place, kind):
    """A3: as a part of the module an average made before fit is corrected too; one kept elsewhere does not fit."""
    utils = pytest.importorskip("timm.utils")
    average_of = getattr(utils, version)

    class Averaging(pl.Callback):
        def __init__(self, average):
            self.average = average

        def on_train_batch_end(self, trainer, pl_module, *args):
            self.average.update(pl_module.net)

    module = make_module()
    average = average_of(module.net, decay=0.5)
    if place == "module":
        module.average = average
        make_trainer(tmp_path, [CALLBACKS[kind](), Averaging(average)]).fit(module, make_loader())
        corrected = [*token_forwards(average.module), *conditioned_weights(average.module)]
        assert len(corrected) == {"tokens": 1, "weights": 2}[kind]
        assert largest_difference(outputs(average.module), outputs(module.net)) > 0
    else:
        with pytest.raises(RuntimeError, match="size of tensor"):
            make_trainer(tmp_path, [CALLBACKS[kind](), Averaging(average)]).fit(module, make_loader())


def test_an_average_of_timm_made_when_fit_starts_carries_corrected_tokens(tmp_path):
    utils = pytest.importorskip("timm.utils")

    class Averaging(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.average = utils.ModelEmaV3(pl_module.net, decay=0.5)

        def on_train_batch_end(self, trainer, pl_module, *args):
            self.average.update(pl_module.net)

    averaging, module = Averaging(), make_module()
    make_trainer(tmp_path, [ConditionedTokens(), SpectralConditioning(), averaging]).fit(module, make_loader())
    assert [name for name, _ in token_forwards(averaging.average.module)] == ["blocks.0"]
    assert len(list(conditioned_weights(averaging.average.module))) == 2
