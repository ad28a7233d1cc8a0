"""The problems of sections A, B and D that real users of such tools met, on a user's own LightningModule."""

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import nn

import lit_cond
from lit_cond.callbacks import ConditionedTokens, ConditionNumberMonitor, SpectralConditioning
from lit_cond.errors import (
    AlreadyConditionedError,
    CheckpointMismatchError,
    ConfigurationError,
    LitCondWarning,
)
from lit_cond.surgery import effective_state_dict, strengths
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import (
    TinyModule,
    TinyTransformer,
    largest_difference,
    make_loader,
    make_module,
    make_trainer,
    outputs,
)


def fit(tmp_path, module, callbacks, **kwargs):
    trainer = make_trainer(tmp_path, callbacks, **kwargs)
    trainer.fit(module, make_loader(), make_loader())
    return trainer


@pytest.mark.parametrize("when", ["before", "after"])
def test_a2_pickle_deepcopy_and_torch_save(tmp_path, when):
    module, callback = make_module(), SpectralConditioning()
    if when == "after":
        fit(tmp_path, module, [callback, ConditionedTokens()])
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert largest_difference(outputs(twin), outputs(module)) == 0
    torch.save(module, tmp_path / "module.pt")
    twin = torch.load(tmp_path / "module.pt", weights_only=False)
    assert largest_difference(outputs(twin), outputs(module)) == 0
    assert pickle.loads(pickle.dumps(callback)).rule == callback.rule
    assert copy.deepcopy(callback).rule == callback.rule


@pytest.mark.parametrize(
    "averaging", [lambda: EMAWeightAveraging(decay=0.5), lambda: StochasticWeightAveraging(1e-3, 1)]
)
@pytest.mark.parametrize("first", [True, False])
def test_a3_averaging_in_both_orders(tmp_path, averaging, first):
    module = make_module()
    callbacks = [SpectralConditioning(), averaging()]
    trainer = fit(tmp_path, module, callbacks if first else callbacks[::-1], max_epochs=3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    plain = TinyModule.load_from_checkpoint(tmp_path / "a.ckpt")
    assert largest_difference(outputs(plain), outputs(module)) == 0


@pytest.mark.parametrize("first", [True, False])
def test_a3_resume_with_averaging_is_exact(tmp_path, first):
    def callbacks():
        pair = [SpectralConditioning(), EMAWeightAveraging(decay=0.5)]
        return pair if first else pair[::-1]

    whole, half, rest = make_module(), make_module(), make_module(seed=3)
    fit(tmp_path, whole, callbacks(), max_epochs=2)
    saver = ModelCheckpoint(tmp_path, save_last=True)
    fit(tmp_path, half, [*callbacks(), saver], max_epochs=1, enable_checkpointing=True)
    trainer = make_trainer(tmp_path, callbacks(), max_epochs=2)
    trainer.fit(rest, make_loader(), make_loader(), ckpt_path=saver.last_model_path)
    assert half.losses + rest.losses == whole.losses
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))


def test_a3_averaging_before_tokens_is_refused_with_the_fix(tmp_path):
    with pytest.raises(ConfigurationError, match="list ConditionedTokens first"):
        fit(tmp_path, make_module(), [EMAWeightAveraging(), ConditionedTokens()])
    module = make_module()
    trainer = fit(tmp_path, module, [ConditionedTokens(), EMAWeightAveraging(decay=0.5)])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = lit_cond.load_checkpoint(TinyModule, tmp_path / "a.ckpt")
    assert largest_difference(outputs(loaded), outputs(module)) == 0


@pytest.mark.parametrize("where", ["init", "setup", "configure_model"])
def test_b7_models_built_late(tmp_path, where):
    class Late(TinyModule):
        def build(self):
            torch.manual_seed(1)
            self.net = TinyTransformer()

        def __init__(self):
            super().__init__(lr=0.0)
            self.net = None
            if where == "init":
                self.build()

        def setup(self, stage):
            if where == "setup" and self.net is None:
                self.build()

        def configure_model(self):
            if where == "configure_model" and self.net is None:
                self.build()

    module = Late()
    fit(tmp_path, module, [SpectralConditioning("identity", scale=1.5)])
    torch.manual_seed(1)
    fresh = TinyTransformer().blocks[1].attn.qkv.weight.detach()
    offset = module.net.blocks[1].attn.qkv.weight.detach() - fresh
    expected = 1.5 * torch.eye(32).repeat(3, 1)
    assert torch.allclose(offset, expected, atol=1e-6)


def test_a12_a_module_that_initialises_itself_in_setup_is_corrected_on_top(tmp_path):
    class Pretrained(TinyModule):
        def setup(self, stage):
            torch.manual_seed(7)
            self.load_state_dict(TinyModule().state_dict())

    module = Pretrained(lr=0.0)
    fit(tmp_path, module, [SpectralConditioning("identity", scale=1.0)])
    torch.manual_seed(7)
    start = TinyModule().net.blocks[0].attn.qkv.weight.detach()
    assert torch.allclose(module.net.blocks[0].attn.qkv.weight.detach() - start, torch.eye(32).repeat(3, 1), atol=1e-6)


def test_b2_plain_and_conditioned_checkpoints_in_all_four_ways(tmp_path):
    plain, weights, tokens = make_module(), make_module(), make_module()
    fit(tmp_path, plain, []).save_checkpoint(tmp_path / "plain.ckpt")
    fit(tmp_path, weights, [SpectralConditioning()]).save_checkpoint(tmp_path / "weights.ckpt")
    fit(tmp_path, tokens, [ConditionedTokens()]).save_checkpoint(tmp_path / "tokens.ckpt")

    def resume(callbacks, name):
        make_trainer(tmp_path, callbacks, max_epochs=2).fit(make_module(), make_loader(), ckpt_path=tmp_path / name)

    resume([], "plain.ckpt")
    with pytest.warns(LitCondWarning, match="made without a correction of 2 weights"):
        resume([SpectralConditioning()], "plain.ckpt")
    with pytest.raises(CheckpointMismatchError, match="the checkpoint was made without"):
        resume([ConditionedTokens()], "plain.ckpt")
    resume([], "weights.ckpt")
    resume([SpectralConditioning()], "weights.ckpt")
    with pytest.warns(LitCondWarning, match="other settings of the correction"):
        resume([SpectralConditioning("identity", scale=0.5)], "weights.ckpt")
    with pytest.raises(CheckpointMismatchError, match="add ConditionedTokens"):
        resume([SpectralConditioning()], "tokens.ckpt")
    with pytest.raises(RuntimeError, match="conditioned_tokens"):
        resume([], "tokens.ckpt")
    resume([ConditionedTokens()], "tokens.ckpt")


def test_b2_other_settings_undo_the_old_correction_exactly(tmp_path):
    module = make_module(lr=0.0)
    raw = module.net.blocks[0].attn.qkv.weight.detach().clone()
    fit(tmp_path, module, [SpectralConditioning()]).save_checkpoint(tmp_path / "a.ckpt")
    other = make_module(seed=4, lr=0.0)
    with pytest.warns(LitCondWarning, match="other settings"):
        make_trainer(tmp_path, [SpectralConditioning("identity", scale=0.5)], max_epochs=2).fit(
            other, make_loader(), ckpt_path=tmp_path / "a.ckpt"
        )
    offset = other.net.blocks[0].attn.qkv.weight.detach() - raw
    assert torch.allclose(offset, 0.5 * torch.eye(32).repeat(3, 1), atol=1e-6)


def test_b2_the_strength_of_the_callback_wins_over_the_checkpoint(tmp_path):
    fit(tmp_path, make_module(), [SpectralConditioning(), ConditionedTokens()]).save_checkpoint(tmp_path / "a.ckpt")
    module = make_module()
    trainer = make_trainer(tmp_path, [SpectralConditioning(strength=0.5), ConditionedTokens()], max_epochs=2)
    with pytest.warns(LitCondWarning, match=r"was at strength 1 and goes on with 0\.5"):
        trainer.fit(module, make_loader(), ckpt_path=tmp_path / "a.ckpt")
    assert sorted(strengths(module)) == [0.5, 0.5, 1.0]


def test_the_best_checkpoint_of_a_token_model_is_tested_by_a_new_trainer(tmp_path):
    module = make_module()
    fit(tmp_path, module, [ConditionedTokens(), SpectralConditioning()]).save_checkpoint(tmp_path / "a.ckpt")
    fresh = make_module(seed=9)
    trainer = make_trainer(tmp_path, [ConditionedTokens(), SpectralConditioning()])
    trainer.test(fresh, make_loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert largest_difference(outputs(fresh), outputs(module)) == 0


def test_b6_two_callbacks_of_one_kind(tmp_path):
    def callbacks():
        return [
            SpectralConditioning(roles=["query", "key"], strength=0.5),
            SpectralConditioning("identity", scale=0.3, roles=["value"]),
            ConditionNumberMonitor(every_n_steps=1, quantities=["query"]),
            ConditionNumberMonitor(every_n_steps=2, quantities=["value"]),
        ]

    module = make_module()
    trainer = fit(tmp_path, module, callbacks())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert sorted(strengths(module)) == [0.5, 0.5, 1.0, 1.0]
    make_trainer(tmp_path, callbacks(), max_epochs=2).fit(make_module(), make_loader(), ckpt_path=tmp_path / "a.ckpt")
    with pytest.raises(ConfigurationError, match="in the list of callbacks twice"):
        fit(tmp_path, make_module(), [SpectralConditioning(strength=0.5), SpectralConditioning()])
    with pytest.raises(AlreadyConditionedError, match="conditioned already by another rule"):
        fit(
            tmp_path,
            make_module(),
            [SpectralConditioning(), SpectralConditioning("identity", scale=0.3, roles=["key"])],
        )


def test_a5_bf16_mixed_computes_the_correction_in_float32(tmp_path):
    seen = []

    class Look(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            qkv = pl_module.net.blocks[0].attn.qkv
            with torch.autocast("cpu", dtype=torch.bfloat16):
                qkv.register_forward_pre_hook(lambda m, a: seen.append(None))
            weight = dict(conditioned_weights(pl_module))["net.blocks.0.attn.qkv.weight"]
            term = weight.terms[0]
            reference = weight.parameter.detach() + term.correction
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = weight.effective(weight.parameter.detach())
            assert value.dtype == torch.float32
            assert torch.equal(value, reference)

    module = make_module()
    fit(tmp_path, module, [SpectralConditioning(), ConditionedTokens(), Look()], precision="bf16-mixed")
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert module.losses[-1] < 10


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "bf16-mixed", "64-true"])
def test_d2_monitoring_in_every_precision(tmp_path, precision):
    class Module(TinyModule):
        def configure_optimizers(self):
            # AdamW's epsilon is zero in float16.
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    module = Module()
    trainer = fit(
        tmp_path,
        module,
        [SpectralConditioning(), ConditionedTokens(), ConditionNumberMonitor(1)],
        precision=precision,
        max_steps=3,
    )
    for quantity in ("query", "key", "value", "tokens"):
        value = float(trainer.callback_metrics[f"cond/{quantity}/mean"])
        assert 1 <= value < 2.5


def test_a8_compile_without_break_and_without_recompile_when_the_strength_moves():
    model = TinyTransformer(depth=12)
    lit_cond.condition_(model, lit_cond.WeightRule())
    compiles = []

    def backend(graph, inputs):
        compiles.append(1)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(2, 6, 12)
    for step in range(20):
        lit_cond.surgery.set_strength_(model, step / 20)
        assert largest_difference(compiled(x), model(x)) < 1e-6
    assert len(compiles) == 1


def test_a8_a_compiled_module_is_conditioned_and_its_checkpoint_loads(tmp_path):
    plain, compiled = make_module(), make_module()
    fit(tmp_path, plain, [SpectralConditioning()])
    trainer = make_trainer(tmp_path, [SpectralConditioning()])
    trainer.fit(torch.compile(compiled, backend="aot_eager"), make_loader(), make_loader())
    assert plain.losses == pytest.approx(compiled.losses, rel=1e-5)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert largest_difference(outputs(TinyModule.load_from_checkpoint(tmp_path / "a.ckpt")), outputs(plain)) < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trap_19_gradient_checkpointing_changes_nothing(tmp_path, checkpointing):
    reference, module = make_module(), make_module(checkpointing=checkpointing)
    fit(tmp_path, reference, [SpectralConditioning(), ConditionedTokens()])
    fit(tmp_path, module, [SpectralConditioning(), ConditionedTokens()])
    assert reference.losses == module.losses


def test_pytorch_lightning_trainer(tmp_path):
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = TinyTransformer()

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    callbacks = [SpectralConditioning(), ConditionedTokens(), ConditionNumberMonitor(every_n_steps=2)]
    trainer = pytorch_lightning.Trainer(
        default_root_dir=tmp_path,
        callbacks=callbacks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(module, make_loader())
    assert 1 <= float(trainer.callback_metrics["cond/query/mean"]) < 2.5
    fresh = TinyTransformer()
    lit_cond.condition_(fresh, lit_cond.TokenRule())
    fresh.load_state_dict(module.net.state_dict(), strict=True)
    x = torch.randn(3, 6, 12)
    assert largest_difference(fresh(x), module.net(x)) == 0


def test_effective_state_dict_during_training(tmp_path):
    class Look(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            twin = TinyModule()
            twin.load_state_dict(effective_state_dict(pl_module), strict=True)
            assert largest_difference(outputs(twin), outputs(pl_module)) == 0
            name = "net.blocks.0.attn.qkv.weight_without_correction"
            with pytest.raises(RuntimeError, match=rf'Unexpected key.*"{name}"'):
                twin.load_state_dict(pl_module.state_dict(), strict=True)

    fit(tmp_path, make_module(), [SpectralConditioning(), Look()])


def test_the_saturated_softmax_is_warned_of(tmp_path):
    with pytest.warns(LitCondWarning, match="the softmax will be saturated"):
        fit(tmp_path, make_module(), [SpectralConditioning("identity", scale=10.0)])


def test_a1_save_pretrained_after_fit_gives_effective_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, hidden_size=32, num_labels=5
    )

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.bert = transformers.BertForSequenceClassification(config)

        def training_step(self, batch, batch_idx):
            return self.bert(input_ids=batch[0], labels=batch[1]).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    ids, labels = torch.randint(0, 20, (32, 7)), torch.randint(0, 5, (32,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, labels), batch_size=8)
    module = Classifier()
    make_trainer(tmp_path, [SpectralConditioning()]).fit(module, loader)
    module.bert.save_pretrained(tmp_path / "bert")
    loaded, report = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "bert", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        expected = module.bert.eval()(input_ids=ids).logits
        assert largest_difference(loaded.eval()(input_ids=ids).logits, expected) == 0
    lit_cond.uncondition_(module)
    with torch.no_grad():
        assert largest_difference(module.bert(input_ids=ids).logits, expected) > 1e-4
