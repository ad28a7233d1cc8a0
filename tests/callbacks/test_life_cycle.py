"""Invariants 1 to 7 of the design and the problems of sections A and B, on a user's own LightningModule."""

import contextlib
import copy
import gc
import weakref

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import lit_cond
from lit_cond.callbacks import ConditionedTokens, ConditionNumberMonitor, SpectralConditioning, StrengthSchedule
from lit_cond.errors import (
    AlreadyConditionedError,
    LitCondWarning,
    LostTargetError,
    NoMatchingTargetError,
)
from lit_cond.surgery.scope import InstanceForward
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import (
    ATTENTION,
    TinyModule,
    largest_difference,
    make_loader,
    make_module,
    make_trainer,
    outputs,
)

# A correction of 2 saturates the softmax of this small model, on purpose here.
SATURATED = pytest.mark.filterwarnings("ignore:the softmax will be saturated")

# Weights of 32 x 32: a random one is far from the limit of the check for conditioned checkpoints.
RULES = {
    "spectral": lambda: SpectralConditioning(),
    "identity": lambda: SpectralConditioning("identity", scale=0.5),
    "head": lambda: SpectralConditioning(granularity="head"),
}


def fit(tmp_path, module, callbacks, **kwargs):
    trainer = make_trainer(tmp_path, callbacks, **kwargs)
    trainer.fit(module, make_loader(), make_loader())
    return trainer


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weights_only", [False, True])
def test_invariant_1_a_checkpoint_loads_into_a_plain_model_a1(tmp_path, attention, rule, weights_only):
    module = make_module(attention=attention)
    saver = ModelCheckpoint(tmp_path, save_weights_only=weights_only, save_last=True)
    # Validate with the live correction, so that what is compared is what training computed.
    seen = []

    class Look(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            seen.append(outputs(pl_module))

    fit(tmp_path, module, [RULES[rule](), Look(), saver], enable_checkpointing=True)
    plain = TinyModule.load_from_checkpoint(saver.last_model_path, strict=True)
    assert not list(conditioned_weights(plain))
    assert largest_difference(outputs(plain), seen[0]) == 0
    # The live model holds effective weights once fit has ended.
    fresh = TinyModule(attention=attention)
    fresh.load_state_dict(module.state_dict(), strict=True)
    assert largest_difference(outputs(fresh), seen[0]) == 0
    assert largest_difference(outputs(module), seen[0]) == 0
    # And it is not what the raw weights compute.
    lit_cond.uncondition_(module)
    assert largest_difference(outputs(module), seen[0]) > 1e-3


def test_invariant_1_a_token_checkpoint_refuses_a_plain_model_by_name(tmp_path):
    module = make_module()
    trainer = fit(tmp_path, module, [ConditionedTokens()])
    trainer.save_checkpoint(tmp_path / "tokens.ckpt")
    with pytest.raises(RuntimeError, match=r"net\.blocks\.0\.conditioned_tokens"):
        TinyModule.load_from_checkpoint(tmp_path / "tokens.ckpt", strict=True)
    loaded = lit_cond.load_checkpoint(TinyModule, tmp_path / "tokens.ckpt")
    assert largest_difference(outputs(loaded), outputs(module)) == 0


def all_callbacks():
    return [
        SpectralConditioning(refresh_every_n_steps=3),
        ConditionedTokens(),
        StrengthSchedule("linear", start=0.2, end=1.0, num_steps=10, applies_to="tokens"),
        ConditionNumberMonitor(every_n_steps=2),
        StrengthSchedule(
            "measured", start=0.5, every_n_steps=2, monitor="cond/query/mean", target=3.0, applies_to="weights"
        ),
    ]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_invariant_2_resume_is_exact(tmp_path, precision, accumulate):
    settings = {"precision": precision, "accumulate_grad_batches": accumulate}
    whole = make_module()
    fit(tmp_path, whole, all_callbacks(), max_epochs=4, **settings)
    first = make_module()
    fit(tmp_path, first, all_callbacks(), max_epochs=2, **settings).save_checkpoint(tmp_path / "half.ckpt")
    second = make_module(seed=5)
    trainer = make_trainer(tmp_path, all_callbacks(), max_epochs=4, **settings)
    trainer.fit(second, make_loader(), make_loader(), ckpt_path=tmp_path / "half.ckpt")
    assert first.losses + second.losses == whole.losses
    for (name, a), (_, b) in zip(whole.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_invariant_2_a_checkpoint_within_an_epoch_resumes_exactly(tmp_path):
    whole = make_module()
    saver = ModelCheckpoint(tmp_path, filename="mid", every_n_train_steps=5)
    fit(tmp_path, whole, [*all_callbacks(), saver], max_epochs=2, enable_checkpointing=True)
    second = make_module(seed=5)
    trainer = make_trainer(tmp_path, all_callbacks(), max_epochs=2)
    trainer.fit(second, make_loader(), make_loader(), ckpt_path=tmp_path / "mid.ckpt")
    assert second.losses == whole.losses[5:]


@SATURATED
@pytest.mark.parametrize("new_trainer", [False, True])
def test_invariant_3_conditioning_happens_once_b1(tmp_path, new_trainer):
    module = make_module(lr=0.0)
    raw = module.net.blocks[0].attn.qkv.weight.detach().clone()
    callbacks = [SpectralConditioning("identity", scale=2.0), ConditionedTokens()]
    trainer = make_trainer(tmp_path, callbacks)
    for stage in (trainer.fit, trainer.validate, trainer.test, trainer.predict, trainer.fit):
        if new_trainer:
            stage = getattr(make_trainer(tmp_path, callbacks), stage.__name__)
        stage(module, make_loader())
        offset = module.net.blocks[0].attn.qkv.weight.detach()[:32].diagonal() - raw[:32].diagonal()
        assert torch.allclose(offset, torch.full((32,), 2.0), atol=1e-6)
    assert [k for k in module.state_dict() if "conditioned" in k] == ["net.blocks.0.conditioned_tokens"]


def test_invariant_3_the_test_metric_is_the_last_validation_metric(tmp_path):
    module = make_module()
    trainer = fit(tmp_path, module, [SpectralConditioning(), ConditionedTokens()])
    validated = trainer.callback_metrics["val_loss"]
    trainer.test(module, make_loader(), verbose=False)
    assert trainer.callback_metrics["test_loss"] == validated


def test_invariant_3_evaluation_adds_no_correction(tmp_path):
    module = make_module()
    before = outputs(module)
    trainer = make_trainer(tmp_path, [SpectralConditioning()])
    for stage in (trainer.validate, trainer.test, trainer.predict):
        stage(module, make_loader())
        assert largest_difference(outputs(module), before) == 0
    with pytest.warns(LitCondWarning, match="changes nothing in this evaluation"):
        make_trainer(tmp_path, [ConditionedTokens()]).test(module, make_loader(), verbose=False)


def test_invariant_3_a_second_fit_goes_on_from_the_raw_weights(tmp_path):
    whole = make_module()
    callback = SpectralConditioning()
    trainer = make_trainer(tmp_path, [callback], max_epochs=1)
    trainer.fit(whole, make_loader())
    raw = {n: w.current_raw.clone() for n, w in conditioned_weights(whole)}
    trainer.test(whole, make_loader(), verbose=False)
    seen = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.update({n: w.parameter.detach().clone() for n, w in conditioned_weights(pl_module)})

    make_trainer(tmp_path, [SpectralConditioning(), Look()]).fit(whole, make_loader())
    assert seen.keys() == raw.keys()
    assert all(torch.equal(seen[n], raw[n]) for n in raw)


@SATURATED
@pytest.mark.parametrize("rule", ["spectral", "identity"])
def test_invariant_3_a_conditioned_checkpoint_loaded_plain_is_refused(tmp_path, rule):
    callback = SpectralConditioning() if rule == "spectral" else SpectralConditioning("identity", scale=2.0)
    trainer = fit(tmp_path, make_module(), [callback])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    plain = TinyModule.load_from_checkpoint(tmp_path / "a.ckpt")
    before = outputs(plain)
    with pytest.raises(AlreadyConditionedError, match="well conditioned before any correction"):
        fit(tmp_path, plain, [callback])
    assert largest_difference(outputs(plain), before) == 0
    fit(tmp_path, plain, [SpectralConditioning("identity", scale=2.0, allow_conditioned=True)])


def test_load_checkpoint_lets_a_later_fit_go_on_exactly(tmp_path):
    whole = make_module()
    trainer = fit(tmp_path, whole, [SpectralConditioning(), ConditionedTokens()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = lit_cond.load_checkpoint(TinyModule, tmp_path / "a.ckpt")
    assert largest_difference(outputs(loaded), outputs(whole)) == 0
    raw = dict(conditioned_weights(whole))
    for name, weight in conditioned_weights(loaded):
        assert torch.equal(weight.current_raw, raw[name].current_raw)
    fit(tmp_path, loaded, [SpectralConditioning(), ConditionedTokens()])


def test_invariant_4_nothing_matched_raises(tmp_path):
    with pytest.raises(NoMatchingTargetError, match=r"include='atn'.*nearest: net\.blocks"):
        fit(tmp_path, make_module(), [SpectralConditioning(include="atn")])

    class Flat(TinyModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(72, 5))

    with pytest.raises(NoMatchingTargetError, match="found no attention layers"):
        fit(tmp_path, Flat(), [SpectralConditioning()])


def test_invariant_4_a_replaced_module_raises(tmp_path):
    class Replace(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.net.blocks[0].attn.qkv = nn.Linear(32, 96)

    with pytest.raises(LostTargetError, match=r"net\.blocks\.0\.attn\.qkv\.weight.*was lost"):
        fit(tmp_path, make_module(), [Replace(), SpectralConditioning()])


def test_invariant_4_a_table_is_printed(tmp_path, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fit(
            tmp_path,
            make_module(),
            [SpectralConditioning(roles=["query"], include=r".*blocks\.1\..*"), ConditionedTokens()],
        )
    lines = caplog.text.splitlines()
    changed = [line for line in lines if "net.blocks" in line and "spectral x 1" in line]
    left = [line for line in lines if "left alone" in line]
    assert len(changed) == 1
    assert "net.blocks.1.attn" in changed[0]
    assert "query" in changed[0]
    assert len(left) == 5
    assert any("input of 'net.blocks.0'" in line for line in lines)


def test_invariant_5_parameters_keep_identity_name_and_order_b4(tmp_path):
    module = make_module()
    before = [(name, id(p)) for name, p in module.named_parameters()]
    during = []

    class Look(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            during.extend((name, id(p)) for name, p in pl_module.named_parameters())
            grouped = [id(p) for g in trainer.optimizers[0].param_groups for p in g["params"]]
            assert sorted(grouped) == sorted(id(p) for p in pl_module.parameters())

    fit(tmp_path, module, [SpectralConditioning(), ConditionedTokens(), Look()])
    assert before == during == [(name, id(p)) for name, p in module.named_parameters()]


def test_invariant_6_strength_zero_is_the_function_before(tmp_path):
    plain, zero = make_module(), make_module()
    fit(tmp_path, plain, [])
    fit(tmp_path, zero, [SpectralConditioning(strength=0.0), ConditionedTokens(strength=0.0)])
    assert plain.losses == zero.losses


@pytest.mark.parametrize("conditioned", [False, True])
def test_invariant_7_measuring_changes_nothing_d9(tmp_path, conditioned):
    extra = [SpectralConditioning(), ConditionedTokens()] if conditioned else []
    plain, measured = make_module(), make_module()
    fit(tmp_path, plain, copy.deepcopy(extra), max_epochs=2)
    fit(tmp_path, measured, [*extra, ConditionNumberMonitor(every_n_steps=1)], max_epochs=2)
    assert plain.losses == measured.losses
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in measured.modules())


def test_d9_a_monitor_leaves_nothing_after_an_exception(tmp_path):
    class Fail(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            raise RuntimeError("stop here")

    def interrupted():
        module = make_module()
        with contextlib.suppress(RuntimeError):
            fit(tmp_path, module, [ConditionNumberMonitor(every_n_steps=1), Fail()])
        assert len(module.losses) == 1
        assert not any(m._forward_pre_hooks for m in module.modules())
        return weakref.ref(module.net)

    gone = interrupted()
    gc.collect()
    assert gone() is None


def test_trap_20_an_exception_leaves_a_usable_model(tmp_path):
    class Fail(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            raise RuntimeError("stop here")

    module = make_module()
    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, module, [SpectralConditioning(), Fail()])
    assert not any(isinstance(m.__dict__.get("forward"), InstanceForward) for m in module.modules())
    assert not any("weight" in m.__dict__ for m in module.modules())
    fit(tmp_path, module, [SpectralConditioning()])
