"""Every registered layout against what the module computes: gradients say which rows reach the softmax."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lit_cond.errors import UnknownAttentionError
from lit_cond.functional import condition_number
from lit_cond.surgery import WeightRule, bake_, condition_, find_attention, unbake_, uncondition_
from lit_cond.surgery.apply import effective_matrix

PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")


class Operands(TorchFunctionMode):
    """Records the query, key and value operands of attention while a module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.products = []
        self.found = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention" and self.found is None:
            self.found = dict(zip(("query", "key", "value"), args, strict=False))
        if name in PRODUCTS and self.found is None:
            a, b = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            self.products.append((a, b))
        result = func(*args, **kwargs)
        if name == "softmax" and self.found is None:
            self.products = [*self.products[:1], None]
        if name in PRODUCTS and self.products[1:2] == [None] and self.found is None:
            (query, key), _, (_, value) = self.products
            self.found = {"query": query, "key": key, "value": value}
        return result


def rows_that_reach(model, site, run):
    """Return for each role the sorted rows of its parameter with a gradient from the operand of that role."""
    calls = []
    handle = site.module.register_forward_pre_hook(lambda m, a, k: calls.append((a, k)), with_kwargs=True)
    run(model)
    handle.remove()
    args, kwargs = calls[0]
    args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    saved = {
        k: getattr(F, k) for k in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    }
    try:
        for name in saved:  # functions inside F.multi_head_attention_forward must reach the mode as well
            setattr(F, name, lambda *a, **k: False)
        with torch.enable_grad(), Operands() as operands:
            site.module(*args, **kwargs)
    finally:
        for name, value in saved.items():
            setattr(F, name, value)
    result = {}
    generator = torch.Generator().manual_seed(0)
    for role, view in site:
        operand = operands.found[role]
        seed = torch.randn(operand.shape, generator=generator)
        (gradient,) = torch.autograd.grad(operand, view.parameter, seed, retain_graph=True)
        oriented = gradient.t() if view.layout.transposed else gradient.flatten(1)
        result[role] = oriented.abs().sum(1).nonzero().flatten()
    return result


def image(size, channels=3):
    return lambda model: model(torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1)))


def ids(model):
    return model(torch.arange(14).reshape(2, 7))


def timm_model(name, **kwargs):
    def build():
        timm = pytest.importorskip("timm")
        return timm.create_model(name, num_classes=3, **kwargs)

    return build


def transformers_model(kind, **kwargs):
    def build():
        transformers = pytest.importorskip("transformers")
        return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **kwargs))

    return build


def torchvision_vit():
    models = pytest.importorskip("torchvision.models")
    return models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=3)


def torchvision_swin(**kwargs):
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    return swin.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=3, **kwargs)


def torchvision_swin_v2():
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    return torchvision_swin(block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2)


def torchvision_maxvit():
    models = pytest.importorskip("torchvision.models")
    return models.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=3)


def torchvision_mvit():
    mvit = pytest.importorskip("torchvision.models.video.mvit")
    block = mvit.MSBlockConfig(1, 16, 16, [3, 3, 3], [1, 2, 2], [1, 1, 1], [1, 1, 1])
    return mvit.MViT(
        (16, 32),
        4,
        [block, block],
        residual_pool=False,
        residual_with_cls_embed=True,
        rel_pos_embed=False,
        proj_after_attn=False,
        num_classes=3,
    )


def video(model):
    return model(torch.randn(1, 3, 4, 16, 32, generator=torch.Generator().manual_seed(1)))


def tokens(model):
    return model(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)))


class Encoder(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        if kwargs:
            layer.self_attn = nn.MultiheadAttention(16, 2, batch_first=True, **kwargs)
        self.layers = nn.ModuleList([layer])

    def forward(self, x):
        return self.layers[0].self_attn(
            x, x[..., : self.layers[0].self_attn.kdim], x[..., : self.layers[0].self_attn.vdim], need_weights=False
        )


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "hidden_size": 32}
TINY = {"embed_dim": 64, "num_heads": 4}
STAGES = {"embed_dim": 32, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
CONVIT = {"exclude": r"blocks\.0\..*"}  # its first block mixes a positional map into the softmax
TWINS = {"include": r"blocks\.0\.0\.attn"}  # its global attention is not known
MODELS = {
    # name: (builder, how to run it, number of attention layers, arguments of find_attention)
    "timm vit": (timm_model("vit_tiny_patch16_224", img_size=32, depth=2), image(32), 2, {}),
    "timm beit": (timm_model("beit_base_patch16_224", img_size=32, depth=2, **TINY), image(32), 2, {}),
    "timm cait": (timm_model("cait_xxs24_224", img_size=32, depth=2), image(32), 4, {}),
    "timm convit": (timm_model("convit_tiny", img_size=32, depth=3, local_up_to_layer=1), image(32), 2, CONVIT),
    "timm davit": (
        timm_model("davit_tiny", depths=(1, 1), embed_dims=(32, 64), num_heads=(2, 4)),
        image(64),
        4,
        {},
    ),
    "timm davit v2": (
        timm_model("davit_tiny", depths=(1, 1), embed_dims=(32, 64), num_heads=(2, 4), channel_attn_v2=True),
        image(64),
        4,
        {},
    ),
    "timm eva fused": (timm_model("eva02_base_patch14_224", img_size=28, depth=2, **TINY), image(28), 2, {}),
    "timm eva separate": (timm_model("eva02_tiny_patch14_224", img_size=28, depth=2, **TINY), image(28), 2, {}),
    "timm rope": (
        timm_model("vit_pe_core_tiny_patch16_384", img_size=32, depth=2, global_pool="avg", **TINY),
        image(32),
        2,
        {},
    ),
    "timm hiera": (
        timm_model("hiera_tiny_224", img_size=(64, 64), stages=(1, 1, 1, 1), embed_dim=32),
        image(64),
        4,
        {},
    ),
    "timm mvitv2": (timm_model("mvitv2_tiny", img_size=64), image(64), 10, {}),
    "timm swin": (timm_model("swin_tiny_patch4_window7_224", img_size=56, **STAGES), image(56), 4, {}),
    "timm swinv2": (timm_model("swinv2_tiny_window8_256", img_size=64, **STAGES), image(64), 4, {}),
    "timm swinv2_cr": (timm_model("swinv2_cr_tiny_ns_224", img_size=64, window_size=2, **STAGES), image(64), 4, {}),
    "timm twins": (timm_model("twins_svt_small", depths=(1, 1, 1, 1), img_size=64), image(64), 1, TWINS),
    "timm relpos": (timm_model("vit_relpos_small_patch16_224", img_size=32, depth=2, **TINY), image(32), 2, {}),
    "timm sam": (timm_model("samvit_base_patch16_224", img_size=32, depth=2, **TINY), image(32), 2, {}),
    "timm xcit": (timm_model("xcit_nano_12_p16_224", depth=2), image(64), 4, {}),
    "torchvision vit": (torchvision_vit, image(32), 2, {}),
    "torchvision swin": (torchvision_swin, image(32), 2, {}),
    "torchvision swin v2": (torchvision_swin_v2, image(32), 2, {}),
    "torchvision maxvit": (torchvision_maxvit, image(64), 4, {}),
    "torchvision mvit": (torchvision_mvit, video, 2, {}),
    "transformers vit": (transformers_model("vit", image_size=32, patch_size=8, **SMALL), image(32), 2, {}),
    "transformers bert": (transformers_model("bert", vocab_size=100, **SMALL), ids, 2, {}),
    "transformers gpt2": (transformers_model("gpt2", vocab_size=100, n_embd=32, n_layer=2, n_head=4), ids, 2, {}),
    "transformers llama": (transformers_model("llama", num_key_value_heads=2, vocab_size=100, **SMALL), ids, 2, {}),
    "torch fused": (Encoder, tokens, 1, {}),
    "torch separate": (lambda: Encoder(kdim=12, vdim=8), tokens, 1, {}),
}


def build(name):
    torch.manual_seed(0)
    builder, run, count, selection = MODELS[name]
    model = builder().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # some models start with zeros, which let no gradient through
            nn.init.trunc_normal_(parameter, std=0.02)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model, run, count, selection


@pytest.fixture(scope="module", params=MODELS)
def known(request):
    """A model of one family, how to run it and its selection; each test leaves the model as it was."""
    model, run, count, selection = build(request.param)
    return model, run, count, selection


def test_rows_are_those_that_the_module_computes_with(known):
    model, run, count, selection = known
    sites = find_attention(model, **selection)
    assert len(sites) == count
    for site in sites[:4]:
        reached = rows_that_reach(model, site, run)
        for role, view in site:
            assert reached[role].tolist() == sorted(view.layout.rows.indices().tolist()), (site.name, role)


def test_every_view_is_conditioned_to_two(known):
    model, _, _, selection = known
    for granularity in ("matrix", "head"):
        condition_(model, WeightRule(granularity=granularity, **selection))
        for site in find_attention(model, **selection)[:4]:
            for role, view in site:
                matrix = effective_matrix(view)
                blocks = matrix if granularity == "matrix" else matrix.unflatten(0, (site.heads(role), -1))
                assert float(condition_number(blocks).max()) <= 2.0001, (site.name, role, granularity)
        uncondition_(model)


def test_the_identity_shifts_the_diagonal_of_the_right_rows_and_nothing_else(known):
    model, _, _, selection = known
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for granularity in ("matrix", "head"):
        condition_(model, WeightRule("identity", scale=3.0, granularity=granularity, **selection))
        for site in find_attention(model, **selection):
            for role, view in site:
                heads = site.heads(role) if granularity == "head" else 1
                rows, width = view.matrix().shape
                expected = torch.eye(rows // heads, width).repeat(heads, 1) * 3.0
                assert torch.allclose(effective_matrix(view) - view.matrix(), expected, atol=1e-6), (site.name, role)
        uncondition_(model)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_the_scoped_forward_computes_what_merged_weights_compute(known):
    model, run, _, selection = known

    @torch.no_grad()
    def answer():
        out = run(model)
        out = getattr(out, "last_hidden_state", out)
        return out[0] if isinstance(out, tuple) else out

    before = answer()
    condition_(model, WeightRule("identity", scale=0.3, **selection))
    scoped = answer()
    bake_(model)
    merged = answer()
    unbake_(model)
    # Equal up to the rounding of kernels that depend on how memory is aligned.
    assert float((answer() - scoped).abs().max()) <= 1e-6
    uncondition_(model)
    assert float((scoped - merged).abs().max()) <= 1e-5
    assert float((scoped - before).abs().max()) > 1e-6
    assert float((answer() - before).abs().max()) <= 1e-6


def test_e1_expected_names():
    model, *_ = build("transformers vit")
    assert [s.name for s in find_attention(model)] == ["layers.0.attention", "layers.1.attention"]
    model, *_ = build("transformers bert")
    assert [s.name for s in find_attention(model)] == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    model, *_ = build("transformers gpt2")
    assert [s.name for s in find_attention(model)] == ["h.0.attn", "h.1.attn"]
    assert all(s.causal for s in find_attention(model))
    model, *_ = build("timm vit")
    assert [s.name for s in find_attention(model)] == ["blocks.0.attn", "blocks.1.attn"]
    model, *_ = build("torchvision vit")
    assert [s.name for s in find_attention(model)] == [
        f"encoder.layers.encoder_layer_{i}.self_attention" for i in range(2)
    ]


def test_e2_the_transposed_weight_of_gpt2_is_corrected_along_its_columns():
    model, *_ = build("transformers gpt2")
    weight = model.h[0].attn.c_attn.weight.detach()
    x = torch.randn(3, 32)
    bias = model.h[0].attn.c_attn.bias
    condition_(model, WeightRule("identity", scale=2.0, roles=["key"]))
    by_hand = torch.cat([torch.zeros(32, 32), 2.0 * torch.eye(32), torch.zeros(32, 32)], dim=1)
    assert torch.allclose(model.h[0].attn.c_attn(x), x @ (weight + by_hand) + bias, atol=1e-5)


class Riddle(nn.Module):
    """A fused weight of a class that nobody has described, in a model that says nothing of its input."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3)).unbind(-1)
        return F.scaled_dot_product_attention(q, k, v)


def test_unknown_attention_that_no_pass_has_reached_is_an_error_that_names_the_layer():
    model = nn.Sequential(Riddle())
    with pytest.raises(UnknownAttentionError, match=r"'0'.*qkv.*leave it out with `exclude`"):
        find_attention(model)
    (site,) = find_attention(model, sample=torch.randn(2, 4, 8))
    assert [str(view.layout.rows) for _, view in site] == [f"[{i}:{i + 1}) + 3i, i<8" for i in range(3)]
