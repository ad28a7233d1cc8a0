"""The correction is computed in float32 and rounded once, whatever the precision; compiled code is compiled once."""

import shutil

import pytest
import torch
from torch import nn

import lit_cond
from lit_cond.callbacks import ConditionedTokens, SpectralConditioning
from lit_cond.surgery import set_strength_
from lit_cond.surgery.tokens import token_forwards
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import TinyModule, TinyTransformer, largest_difference, make_loader, make_trainer

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
X = torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(2))


def make(depth=2):
    torch.manual_seed(0)
    return TinyTransformer(depth=depth)


def roundings(value, reference, *terms):
    """The largest distance from a float64 reference: in half units of its last place, and of those of what is summed.

    Half precision is rounded once from a float32 sum; float32 and float64 sums round their products too.
    """
    info = torch.finfo(value.dtype)
    size = reference.abs() if info.bits == 16 else sum(term.abs() for term in terms)
    spacing = info.eps * torch.exp2(size.clamp_min(info.smallest_normal).log2().floor())
    return float(((value.double() - reference).abs() / (spacing / 2)).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_a5_the_corrected_weight_is_rounded_once(dtype, strength):
    model = make().to(dtype)
    lit_cond.condition_(model, lit_cond.WeightRule(strength=strength))
    for _, weight in conditioned_weights(model):
        (term,) = weight.terms
        assert term.correction.dtype == torch.promote_types(dtype, torch.float32)
        summands = weight.parameter.detach().double(), term.correction.double() * float(term.strength)
        value, reference = weight.current_effective, sum(summands)
        assert value.dtype == dtype
        assert roundings(value, reference, *summands) <= (1.01 if value.dtype.itemsize == 2 else 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_correction_of_a_half_precision_weight_is_that_of_its_float64_values(dtype):
    model = make().to(dtype)
    lit_cond.condition_(model, lit_cond.WeightRule())
    for site in lit_cond.surgery.find_attention(model):
        for _, view in site:
            weight = dict(conditioned_weights(view.module))[view.tensor_name]
            raw = view.layout.matrix(weight.parameter.detach()).double()
            u, s, vh = torch.linalg.svd(raw, full_matrices=False)
            got = view.layout.matrix(weight.terms[0].correction).double()
            assert largest_difference(got, s[0] * (u @ vh)) < 1e-5 * float(s[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_corrected_tokens_are_rounded_once(dtype):
    model = make().to(dtype)
    lit_cond.condition_(model, lit_cond.TokenRule())
    (_, forward), tokens = next(token_forwards(model)), torch.randn(3, 6, 32, dtype=torch.float64)
    tokens = tokens.to(dtype)
    u, s, vh = torch.linalg.svd(tokens.double(), full_matrices=False)
    reference = tokens.double() + s[:, :1, None] * (u @ vh)
    value = forward.correct(tokens)
    assert value.dtype == dtype
    error = float((value.double() - reference).abs().max()) / float(reference.abs().max())
    assert error < {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 0.51 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("rule", [lit_cond.WeightRule(), lit_cond.TokenRule()])
def test_a5_conditioning_within_autocast_computes_as_without(rule):
    model, reference = make(), make()
    lit_cond.condition_(reference, rule)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lit_cond.condition_(model, rule)
        lit_cond.surgery.refresh_(model)
    for (_, a), (_, b) in zip(conditioned_weights(model), conditioned_weights(reference), strict=True):
        assert torch.equal(a.terms[0].correction, b.terms[0].correction)
    for (_, a), (_, b) in zip(token_forwards(model), token_forwards(reference), strict=True):
        tokens = torch.randn(3, 6, 32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = a.correct(tokens)
        assert torch.equal(inside, b.correct(tokens))


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true"])
def test_what_a_training_reads_in_each_precision(tmp_path, precision):
    """Within a fit: the weight that the projection multiplies with is the float64 sum, rounded once to its dtype."""
    seen = []

    class Look(TinyModule):
        def on_train_start(self):
            qkv = self.net.blocks[0].attn.qkv
            weight = dict(conditioned_weights(self))["net.blocks.0.attn.qkv.weight"]
            (term,) = weight.terms
            summands = weight.parameter.detach().double().clone(), term.correction.double()
            inner = type(qkv).forward

            def watch(module, x):
                if module is qkv and not seen:
                    seen.append((module.weight.detach(), *summands))
                return inner(module, x)

            self.restore = (nn.Linear, inner)
            nn.Linear.forward = watch

        def on_train_batch_end(self, *args):
            nn.Linear.forward = self.restore[1]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, [SpectralConditioning(), ConditionedTokens()], precision=precision, max_steps=2)
    trainer.fit(Look(), make_loader())
    ((value, *summands),) = seen
    dtype = {"64": torch.float64, "bf16-true": torch.bfloat16, "16": torch.float16}
    expected = dtype.get(precision, dtype.get(precision[:2] if precision.endswith("true") else "", torch.float32))
    assert value.dtype == expected
    assert roundings(value, sum(summands), *summands) <= (1.01 if value.dtype.itemsize == 2 else 3)


def counting(compiles):
    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    return backend


@pytest.mark.parametrize("kind", ["weights", "tokens", "both"])
@pytest.mark.parametrize("whole", [True, False])
def test_a8_no_graph_break_and_no_recompile_as_the_strength_moves(kind, whole):
    model = make(depth=3)
    if kind != "tokens":
        lit_cond.condition_(model, lit_cond.WeightRule())
    if kind != "weights":
        lit_cond.condition_(model, lit_cond.TokenRule())
    reference = make(depth=3)
    torch._dynamo.reset()
    compiles = []
    settings = {"backend": counting(compiles), "fullgraph": True}
    if whole:
        compiled = torch.compile(model, **settings)
    else:
        compiled = model
        for block in model.blocks:
            block.compile(**settings)
    for rule, wanted in ((lit_cond.WeightRule(), kind != "tokens"), (lit_cond.TokenRule(), kind != "weights")):
        if wanted:
            lit_cond.condition_(reference, rule)
    after_first = None
    for step in range(6):
        for each in (model, reference):
            set_strength_(each, step / 5)
        assert largest_difference(compiled(X).detach(), reference(X).detach()) < 1e-5
        after_first = after_first or len(compiles)
    assert len(compiles) == after_first
    # Blocks of one class share code; the first one differs where it corrects tokens.
    assert after_first <= (1 if whole else 3)


@pytest.mark.parametrize("kind", ["weights", "tokens"])
def test_a8_gradients_of_compiled_corrections(kind):
    model, reference = make(), make()
    for each in (model, reference):
        lit_cond.condition_(each, lit_cond.WeightRule() if kind == "weights" else lit_cond.TokenRule())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for run in (compiled, reference):
            run(X).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_a8_inductor_computes_the_same_at_every_strength(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, reference = make(depth=1), make(depth=1)
    for each in (model, reference):
        lit_cond.condition_(each, lit_cond.WeightRule())
        lit_cond.condition_(each, lit_cond.TokenRule())
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for strength in (0.0, 0.5, 1.0):
        for each in (model, reference):
            set_strength_(each, strength)
        assert largest_difference(compiled(X).detach(), reference(X).detach()) < 1e-5
