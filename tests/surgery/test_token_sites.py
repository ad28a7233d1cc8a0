"""Where embedded tokens enter: models of many layouts against places chosen by hand; towers, prefixes, passes."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lit_cond import TokenRule, condition_, uncondition_
from lit_cond.callbacks import ConditionedTokens
from lit_cond.errors import ConfigurationError, NoMatchingTargetError
from lit_cond.functional import condition_number
from lit_cond.surgery import find_token_sites
from lit_cond.surgery.checkpoint import restore_tokens_, to_effective
from lit_cond.surgery.masks import leaks_from_future, valid_tokens
from lit_cond.surgery.tokens import TokenForward, token_forwards
from scripts.token_site_check import Reference, check_token_site
from scripts.token_site_references import cases
from tests.tiny import ATTENTION, TinyModule, TinyTransformer, largest_difference, make_loader, make_trainer

WIDTH = 32
# Name of the site, axis of the channels, batch first, learned tokens in front; one for each tower.
EXPECTED = {
    "transformers/bert": [("encoder.layer.0", -1, True, 0)],
    "transformers/albert": [("encoder.albert_layer_groups.0.albert_layers.0", -1, True, 0)],
    "transformers/xlnet": [("layer.0", -1, False, 0)],
    "transformers/t5": [("encoder.block.0.layer.0", -1, True, 0), ("decoder.block.0.layer.0", -1, True, 0)],
    "transformers/clip": [
        ("vision_model.encoder.layers.0", -1, True, 1),
        ("text_model.encoder.layers.0", -1, True, 0),
    ],
    "transformers/llava": [("language_model.layers.0", -1, True, 0), ("vision_tower.encoder.layers.0", -1, True, 1)],
    "transformers/dinov2_with_registers": [("encoder.layer.0", -1, True, 5)],
    "transformers/swin": [("encoder.layers.0.blocks.0", -1, True, 0)],
    "transformers/deepseek_v3": [("layers.0", -1, True, 0)],  # latent attention: a projection behind another
    "transformers/deepseek_v4": [("layers.0", -1, True, 0)],
    "transformers/qwen2_vl": [("language_model.layers.0", -1, True, 0), ("visual.blocks.0", -1, True, 0)],
    "timm/vit_tiny_patch16_224": [("blocks.0", -1, True, 1)],
    "timm/swin_tiny_patch4_window7_224": [("layers.0.blocks.0", -1, True, 0)],
    "timm/davit_tiny": [("stages.0.blocks.0.0", 1, True, 0)],
    "timm/crossvit_9_240": [("blocks.0.blocks.0.0", -1, True, 1), ("blocks.0.blocks.1.0", -1, True, 1)],
    "timm/coatnet_0_224": [("stages.2.blocks.0", 1, True, 0)],
    "torchvision/swin_t": [("features.1.0", -1, True, 0)],
    "torchvision/mvit_v2_s": [("blocks.0", -1, True, 1)],
    "torch/encoder": [("encoder.layers.0", -1, True, 0)],
    "torch/encoder:tokens_first": [("encoder.layers.0", -1, False, 0)],
    "torch/encoder_decoder": [
        ("transformer.encoder.layers.0", -1, True, 0),
        ("transformer.decoder.layers.0", -1, True, 0),
    ],
}
CASES = {case.name: case for case in cases()}


def load(name):
    library = name.partition("/")[0]
    pytest.importorskip(library)
    entry = CASES[name].load()
    model = entry.build().eval()
    return model, entry.samples(model)


@pytest.mark.parametrize("name", EXPECTED)
def test_numbers_added_at_the_site_and_at_the_place_chosen_by_hand_give_equal_outputs(name):
    model, samples = load(name)
    verdict = check_token_site(model, samples, CASES[name].reference)
    assert verdict.verdict == "right", verdict
    assert verdict.differences == [0.0] * len(EXPECTED[name])
    assert min(verdict.effects) > 1e-3
    sites = find_token_sites(model, sample=samples)
    assert [(s.name, s.channel_axis, s.batch_first, s.prefix) for s in sites] == EXPECTED[name]


def test_the_check_sees_a_wrong_place_layout_or_prefix():
    model, samples = load("torch/encoder")
    right = CASES["torch/encoder"].reference[0]
    assert check_token_site(model, samples, [right]).verdict == "right"
    for wrong in (
        [Reference("encoder.layers.1", 0)],
        [Reference("embed", layout="nbc")],
        [Reference("embed", prefix=1)],
        [Reference("encoder")],
        [right, right],
        [],
    ):
        assert check_token_site(model, samples, wrong).verdict == "wrong", wrong


def test_tokens_that_are_parameters_are_no_embedded_tokens():
    model, samples = load("torch/own_queries")
    with pytest.raises(NoMatchingTargetError, match="made of parameters"):
        find_token_sites(model, sample=samples)


class Repeated(nn.Module):
    """One block for three layers, with the embedding added again before each."""

    def __init__(self, inner=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList([TinyTransformer(depth=1).blocks[0]])
        self.example_input_array = torch.randn(2, 6, 12)
        self.checkpointing = False

    def forward(self, x):
        tokens = embedded = self.embed(x)
        for _ in range(3):
            if self.checkpointing:
                tokens = checkpoint(self.blocks[0], tokens, use_reentrant=False) + embedded
            else:
                tokens = self.blocks[0](tokens) + embedded
        return tokens


class Twins(Repeated):
    """One block for two inputs that know nothing of each other."""

    def forward(self, x):
        return self.blocks[0](self.embed(x)) + self.blocks[0](self.embed(2 * x))


@pytest.mark.parametrize(("kind", "expected"), [(Repeated, 1), (Twins, 2)])
def test_a_shared_block_corrects_what_enters_and_not_its_own_output(kind, expected):
    model = kind()
    condition_(model, TokenRule())
    [(_, forward)] = token_forwards(model)
    calls = []
    original = forward.correct
    forward.correct = lambda *a: (calls.append(1), original(*a))[1]
    for _ in range(2):
        calls.clear()
        model(torch.randn(2, 6, 12))
        assert len(calls) == expected
    uncondition_(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_shared_block_under_gradient_checkpointing_is_refused():
    model = Repeated().train()
    condition_(model, TokenRule())
    model.checkpointing = True
    with pytest.raises(ConfigurationError, match="turn gradient checkpointing off"):
        model(torch.randn(2, 6, 12)).sum().backward()
    model.checkpointing = False
    model(torch.randn(2, 6, 12)).sum().backward()


class Classed(nn.Module):
    """Two learned tokens before those of the input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = TinyTransformer()
        self.first = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.example_input_array = torch.randn(2, 6, 12)

    def forward(self, x):
        tokens = torch.cat([self.first.expand(len(x), -1, -1), self.body.embed(x)], dim=1)
        for block in self.body.blocks:
            tokens = block(tokens)
        return tokens


def entering(model, x):
    """The tokens that the first block gets before and after their correction."""
    [(_, forward)] = token_forwards(model)
    seen = []
    handles = [
        forward.module.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach())),
        forward.module.norm1.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach())),
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("prefix", [2, "auto"])
def test_leading_tokens_are_left_out_of_the_matrix_and_stay_as_they_are(prefix):
    model = Classed()
    condition_(model, TokenRule(prefix_tokens=prefix))
    raw, corrected = entering(model, torch.randn(2, 6, 12))
    assert largest_difference(raw[:, :2], corrected[:, :2]) == 0
    assert float(condition_number(raw[:, 2:]).min()) > 2.1
    assert float(condition_number(corrected[:, 2:]).max()) <= 2.001


def test_without_a_prefix_learned_tokens_belong_to_the_matrix():
    model = Classed()
    condition_(model, TokenRule())
    raw, corrected = entering(model, torch.randn(2, 6, 12))
    assert float(condition_number(corrected).max()) <= 2.001
    assert largest_difference(raw[:, :2], corrected[:, :2]) > 1e-2


def test_the_identity_counts_from_behind_the_prefix_whatever_comes_later():
    model = Classed()
    condition_(model, TokenRule("identity", scale=0.5, prefix_tokens=2))
    short, long = torch.randn(2, 4, 12), torch.randn(2, 6, 12)
    for x in (short, long):
        raw, corrected = entering(model, x)
        added = (corrected - raw)[0]
        expected = torch.zeros_like(added)
        for k in range(x.shape[1]):
            expected[2 + k, k] = 0.5
        assert largest_difference(added, expected) < 1e-6


@pytest.mark.parametrize("correction", ["exact", "identity"])
def test_padding_in_front_is_no_prefix(correction):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer)
    condition_(model, TokenRule(correction, prefix_tokens=1))
    [(_, forward)] = token_forwards(model)
    x = torch.randn(1, 5, 16)
    padded = torch.cat([torch.full((1, 3, 16), 7.0), x], dim=1)
    mask = torch.tensor([[True] * 3 + [False] * 5])

    def correct(tokens, **masks):
        return forward.correct(tokens, forward.find_mask((tokens,), masks, tokens))

    alone, together = correct(x), correct(padded, src_key_padding_mask=mask)
    assert largest_difference(together[:, 3:], alone) < 1e-5
    assert largest_difference(alone[:, :1], x[:, :1]) == 0
    assert largest_difference(alone, x) > 1e-2


def test_a_prefix_that_is_not_known_or_not_possible_is_refused():
    with pytest.raises(ConfigurationError, match="`prefix_tokens` must be 'auto' or a whole number >= 0, got -1"):
        TokenRule(prefix_tokens=-1)
    with pytest.raises(ConfigurationError, match="give a number for `prefix_tokens`"):
        condition_(TinyTransformer(), TokenRule(prefix_tokens="auto"))
    model, samples = load("torchvision/swin_t")
    [site] = find_token_sites(model, sample=samples)
    forward = TokenForward(site, TokenRule(prefix_tokens=1), torch.tensor(1.0))
    tokens = torch.randn(2, 14, 14, site.channels)
    with pytest.raises(ConfigurationError, match="stand in a grid"):
        forward.find_mask((tokens,), {}, tokens)


def test_a_checkpoint_of_before_there_was_a_prefix_loads():
    model = Classed()
    condition_(model, TokenRule())
    _, record = to_effective(model, model.state_dict(), resumable=True)
    for entry in record["tokens"].values():
        assert entry["rule"].pop("prefix_tokens") == 0
    fresh = Classed()
    restore_tokens_(fresh, record, add=True)
    [(name, forward)] = token_forwards(fresh)
    assert (name, forward.prefix) == ("body.blocks.0", 0)


def test_a_checkpoint_keeps_the_prefix():
    model = Classed()
    condition_(model, TokenRule(prefix_tokens="auto"))
    _, record = to_effective(model, model.state_dict(), resumable=True)
    fresh = Classed()
    restore_tokens_(fresh, record, add=True)
    [(_, forward)] = token_forwards(fresh)
    assert (forward.prefix, forward.rule.prefix_tokens) == (2, "auto")


def test_a_causal_tower_is_refused_by_name_and_nothing_is_changed():
    model, _ = load("transformers/clip")
    with pytest.raises(ConfigurationError) as caught:
        condition_(model, TokenRule())
    assert "'text_model.encoder.layers.0'" in str(caught.value)
    assert "include=['vision_model.encoder.layers.0']" in str(caught.value)
    assert not list(token_forwards(model))
    condition_(model, TokenRule(include=["vision_model.encoder.layers.0"], prefix_tokens="auto"))
    assert [(name, f.prefix) for name, f in token_forwards(model)] == [("vision_model.encoder.layers.0", 1)]
    uncondition_(model)
    condition_(model, TokenRule("identity", scale=0.5))
    assert len(list(token_forwards(model))) == 2


def test_hooks_that_a_model_installs_in_its_first_pass_are_installed_once():
    model, samples = load("transformers/llava")
    find_token_sites(model, sample=samples)
    for sample in samples:
        sample.run(model)
    assert {len(layer._forward_hooks) for layer in model.vision_tower.encoder.layers} == {1}


def test_a_later_block_gets_its_tokens_as_the_first_one_does():
    model, samples = load("transformers/xlnet")
    [site] = find_token_sites(model, include=["layer.1"], sample=samples)
    assert (site.argument, site.channel_axis, site.batch_first) == (0, -1, False)


class Keyword(nn.Module):
    """Calls its block by position or by name, with another tensor of the same width in front."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Positioned()])
        self.example_input_array = torch.randn(2, 6, WIDTH)
        self.by_name = False

    def forward(self, x):
        position = torch.zeros(6, WIDTH)
        tokens = nn.functional.gelu(x)
        return self.blocks[0](position, tokens=tokens) if self.by_name else self.blocks[0](position, tokens)


class Positioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = ATTENTION["fused"]()

    def forward(self, position, tokens):
        return tokens + self.attn(tokens + position)


def test_the_argument_is_the_traced_one_by_position_or_by_name():
    model = Keyword()
    x = torch.randn(2, 6, WIDTH)
    plain = model(x)
    [site] = find_token_sites(model)
    assert site.argument == 1
    condition_(model, TokenRule())
    first = model(x)
    model.by_name = True
    assert largest_difference(model(x).detach(), first.detach()) == 0
    assert largest_difference(plain.detach(), first.detach()) > 1e-2


class Turned(nn.Module):
    """Swaps batch and tokens for its attention."""

    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(0)
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=batch_first)

    def forward(self, x):
        turned = x.transpose(0, 1)
        return x + self.attn(turned, turned, turned, need_weights=False)[0].transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_pass_shows_whether_a_block_turns_its_tokens_round(batch_first):
    model = nn.Sequential(Turned(batch_first))
    [site] = find_token_sites(model, sample=torch.randn(2, 6, WIDTH))
    assert site.batch_first is not batch_first


def test_towers_that_no_pass_has_reached_have_a_site_each():
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True, device="meta")
    sites = find_token_sites(model)
    assert [site.name for site in sites] == ["encoder.layers.0", "decoder.layers.0"]
    assert [site.prefix for site in sites] == [None, None]
    assert [site.name for site in find_token_sites(TinyTransformer())] == ["blocks.0"]


def test_several_streams_for_each_sample_are_refused():
    model = TinyTransformer()
    x = torch.randn(2, 6, 12)
    [site] = find_token_sites(model, sample=x)
    stacked = type(site)(site.name, site.module, site.attention, 0, -1, batch_first=False)
    forward = TokenForward(stacked, TokenRule(), torch.tensor(1.0))
    with pytest.raises(ConfigurationError, match="a stack of several streams"):
        forward.correct(torch.randn(4, 2, 6, WIDTH))


def test_sequences_one_behind_the_other_are_corrected_each_for_itself():
    model = TinyTransformer()
    [site] = find_token_sites(model, sample=torch.randn(2, 6, 12))
    forward = TokenForward(site, TokenRule(), torch.tensor(1.0))
    x = torch.randn(11, WIDTH)
    starts = torch.tensor([0, 4, 11])
    corrected = forward._correct_call(x, (x,), {"cu_seqlens": starts})
    same = forward._correct_call(x[None], (x[None],), {"cu_seqlens": starts})
    for a, b in ((0, 4), (4, 11)):
        alone = forward.correct(x[None, a:b])[0]
        assert largest_difference(corrected[a:b], alone) < 1e-5
        assert largest_difference(same[0, a:b], alone) < 1e-5


class Joined(nn.Module):
    """Puts all samples into one sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = TinyTransformer()
        self.example_input_array = torch.randn(2, 6, 12)

    def forward(self, x):
        tokens = self.body.embed(x).reshape(1, -1, WIDTH)
        for block in self.body.blocks:
            tokens = block(tokens)
        return tokens


def test_samples_joined_without_a_word_on_where_each_begins_are_refused():
    model = Joined()
    condition_(model, TokenRule())
    with pytest.raises(ConfigurationError, match="no `cu_seqlens` says where each begins"):
        model(torch.randn(2, 6, 12))


class Between(nn.Module):
    """A learned token in the middle, or in front of tokens that are cut apart and joined around more of them."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.body = TinyTransformer()
        self.token, self.more = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 3, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 7, WIDTH))

    def forward(self, x):
        x = self.body.embed(x)
        token, more = self.token.expand(len(x), -1, -1), self.more.expand(len(x), -1, -1)
        with_token = torch.cat([token, x], dim=1) + self.position
        if self.how == "middle":
            tokens = torch.cat([x, with_token], dim=1)
        elif self.how == "behind":
            tokens = torch.cat([with_token, more], dim=1)
        elif self.how == "registers":
            tokens = torch.cat([with_token[:, :1], more, with_token[:, 1:]], dim=1)
        else:
            tokens = torch.cat([more, with_token], dim=1)
        for block in self.body.blocks:
            tokens = block(tokens)
        return tokens


@pytest.mark.parametrize(("how", "prefix"), [("middle", 0), ("behind", 1), ("registers", 4), ("front", 4)])
def test_the_prefix_ends_where_tokens_of_the_input_begin(how, prefix):
    [site] = find_token_sites(Between(how), sample=torch.randn(2, 6, 12))
    assert site.prefix == prefix


def test_learned_tokens_that_can_not_be_followed_are_asked_for():
    class Folded(Between):
        def forward(self, x):
            tokens = torch.cat([self.token.expand(len(x), -1, -1), self.body.embed(x)], dim=1)
            tokens = torch.cat([tokens[:, 0].unsqueeze(1), tokens[:, 1:].reshape(len(x), 2, 3, WIDTH).flatten(1, 2)], 1)
            return self.body.blocks[0](tokens)

    model = Folded("")
    model.example_input_array = torch.randn(2, 6, 12)
    [site] = find_token_sites(model)
    assert site.prefix is None
    with pytest.raises(ConfigurationError, match="give a number for `prefix_tokens`"):
        condition_(model, TokenRule(prefix_tokens="auto"))
    condition_(model, TokenRule(prefix_tokens=1))


def test_a_thousand_operations_between_the_class_token_and_the_first_block_are_no_problem():
    class Far(Between):
        def forward(self, x):
            tokens = torch.cat([self.token.expand(len(x), -1, -1), self.body.embed(x)], dim=1)
            for _ in range(2000):
                tokens = tokens + 0.001
            return self.body.blocks[0](tokens)

    [site] = find_token_sites(Far(""), sample=torch.randn(2, 6, 12))
    assert site.prefix == 1


class TwoTimescales(nn.Module):
    """A second tower that gets what the first has made and the embedding that has entered there before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.low, self.high = TinyTransformer(), TinyTransformer()

    def forward(self, x):
        embedded = tokens = self.low.embed(x)
        for block in self.low.blocks:
            tokens = block(tokens)
        tokens = tokens + embedded
        for block in self.high.blocks:
            tokens = block(tokens)
        return tokens


class Staged(nn.Module):
    """A stage whose first layers add to a stream, and whose last attention does not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(12, WIDTH)
        self.stages = nn.ModuleList([Stage()])

    def forward(self, x):
        return self.stages[0](self.embed(x))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = TinyTransformer().blocks
        self.groups = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.last = Positionless()

    def forward(self, x):
        x = torch.cat([x, self.groups.expand(len(x), -1, -1)], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Positionless(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = ATTENTION["fused"]()

    def forward(self, x):
        return self.attn(x)


def test_a_stage_whose_last_attention_adds_to_nothing_has_one_site():
    assert [s.name for s in find_token_sites(Staged(), sample=torch.randn(2, 6, 12))] == ["stages.0.layers.0"]


def test_what_has_entered_before_opens_no_second_tower():
    assert [s.name for s in find_token_sites(TwoTimescales(), sample=torch.randn(2, 6, 12))] == ["low.blocks.0"]


def test_boolean_masks_are_read_by_their_diagonal():
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1).expand(2, 1, 5, 5)
    for mask in (hidden, ~hidden):
        assert bool(valid_tokens({"attention_mask": mask}, 2, 5).all())
        assert leaks_from_future({"attention_mask": mask})
    padded = (~hidden).clone()
    padded[..., 3:] = False
    assert valid_tokens({"attention_mask": padded}, 2, 5)[0].tolist() == [True] * 3 + [False] * 2


def test_the_callback_takes_a_prefix_and_says_so(tmp_path):
    class Module(TinyModule):
        def __init__(self):
            super().__init__()
            self.net.first = nn.Parameter(torch.randn(1, 2, WIDTH))
            self.example_input_array = torch.randn(2, 6, 12)

        def forward(self, x):
            tokens = torch.cat([self.net.first.expand(len(x), -1, -1), self.net.embed(x)], dim=1)
            for block in self.net.blocks:
                tokens = block(tokens)
            return self.net.head(tokens.mean(1))

    module, callback = Module(), ConditionedTokens(prefix_tokens="auto")
    trainer = make_trainer(tmp_path, [callback])
    trainer.fit(module, make_loader())
    [(name, forward)] = token_forwards(module)
    assert (name, forward.prefix) == ("net.blocks.0", 2)
    assert "input of 'net.blocks.0', 32 channels, behind the first 2 tokens" in callback.describe(module)
