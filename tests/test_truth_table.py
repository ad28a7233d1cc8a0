"""Which file of a trained model loads where: it predicts the same, or fails by name. The table of the docs page."""

import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch import Callback
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lit_cond import (
    TokenRule,
    WeightRule,
    condition_,
    effective_state_dict,
    load_checkpoint,
    uncondition_,
)
from lit_cond.callbacks import ConditionedTokens, SpectralConditioning
from lit_cond.errors import CheckpointMismatchError
from lit_cond.export import export_model
from lit_cond.surgery.tokens import token_forwards
from tests.tiny import make_trainer

DOCS = Path(__file__).parents[1] / "docs" / "checkpoints_and_strategies.md"
RULES = {"weights": [WeightRule()], "tokens": [TokenRule()], "both": [WeightRule(), TokenRule()], "none": []}
CALLBACKS = {WeightRule: SpectralConditioning, TokenRule: ConditionedTokens}

PLAIN, CONDITIONED, OURS = "the plain model", "a conditioned model", "with what lit_cond offers"
FULL, LIGHT = "Lightning checkpoint", "Lightning checkpoint of weights only"
LIVE, AFTER = "`state_dict()` during `fit`", "`state_dict()` after `fit`"
EFFECTIVE = "`effective_state_dict(model)` during `fit`"
HF_LIVE, HF_AFTER = "`save_pretrained` during `fit`", "`save_pretrained` after `fit`"
SAFE = "`model.safetensors` of `export`"

# What was corrected in training:       weights    tokens     both       none
EXPECTED = {
    (FULL, PLAIN):                     ("same",    "refused", "refused", "same"),
    (FULL, CONDITIONED):               ("same",    "same",    "same",    "refused"),
    (FULL, OURS):                      ("same",    "same",    "same",    "same"),
    (LIGHT, PLAIN):                    ("same",    "refused", "refused", "same"),
    (LIGHT, CONDITIONED):              ("same",    "same",    "same",    "refused"),
    (LIGHT, OURS):                     ("same",    "same",    "same",    "same"),
    (LIVE, PLAIN):                     ("refused", "refused", "refused", "same"),
    (LIVE, CONDITIONED):               ("refused", "same",    "refused", "refused"),
    (EFFECTIVE, PLAIN):                ("same",    "refused", "refused", "same"),
    (EFFECTIVE, OURS):                 ("same",    "same",    "same",    "same"),
    (AFTER, PLAIN):                    ("same",    "refused", "refused", "same"),
    (AFTER, CONDITIONED):              ("refused", "same",    "refused", "refused"),
    (AFTER, OURS):                     ("same",    "same",    "same",    "same"),
    (HF_LIVE, PLAIN):                  ("same",    "refused", "refused", "same"),
    (HF_AFTER, PLAIN):                 ("same",    "refused", "refused", "same"),
    (SAFE, PLAIN):                     ("same",    "refused", "refused", "same"),
    (SAFE, CONDITIONED):               ("refused", "same",    "refused", "refused"),
    (SAFE, OURS):                      ("same",    "same",    "same",    "same"),
}  # fmt: skip


class Classifier(pl.LightningModule):
    """A user's module around a model of transformers; knows nothing of lit_cond."""

    def __init__(self):
        super().__init__()
        config = transformers.ViTConfig(
            image_size=8, patch_size=2, num_channels=1, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_labels=10,
        )  # fmt: skip
        self.net = transformers.ViTForImageClassification(config)

    def forward(self, images):
        return self.net(images).logits

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def digits(samples=96):
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images[:samples], dtype=torch.float32)[:, None] / 16
    return DataLoader(TensorDataset(images, torch.tensor(data.target[:samples])), batch_size=32)


@torch.no_grad()
def predictions(module):
    return module.eval()(next(iter(digits()))[0])


class SaveInFit(Callback):
    """Saves at the end of training, before `fit` has ended."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        torch.save(pl_module.state_dict(), self.folder / "live.pt")
        torch.save(effective_state_dict(pl_module), self.folder / "effective.pt")
        save_pretrained(pl_module, self.folder / "hf_live")


def save_pretrained(module, folder):
    try:
        module.net.save_pretrained(folder)
    except CheckpointMismatchError as error:
        folder.with_suffix(".refused").write_text(str(error))


@pytest.fixture(scope="module", params=list(RULES))
def trained(request, tmp_path_factory):
    """The kind of training, the folder of all files, and what the model predicts."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    module = Classifier()
    callbacks = [*(CALLBACKS[type(rule)]() for rule in RULES[request.param]), SaveInFit(folder)]
    trainer = make_trainer(folder, callbacks, max_epochs=2)
    trainer.fit(module, digits())
    trainer.save_checkpoint(folder / "full.ckpt")
    trainer.save_checkpoint(folder / "light.ckpt", weights_only=True)
    torch.save(module.state_dict(), folder / "after.pt")
    save_pretrained(module, folder / "hf_after")
    export_model(module, folder / "out", formats=["safetensors"], backbone="")
    return request.param, folder, predictions(module)


FILES = {
    FULL: "full.ckpt", LIGHT: "light.ckpt", LIVE: "live.pt", EFFECTIVE: "effective.pt", AFTER: "after.pt",
    HF_LIVE: "hf_live", HF_AFTER: "hf_after", SAFE: "out/model.safetensors",
}  # fmt: skip


def read_state(path):
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def load(path, target, kind):
    """Load a file into a model that was initialised differently."""
    torch.manual_seed(9)
    if path.name.startswith("hf"):
        refusal = path.with_suffix(".refused")
        if refusal.exists():
            raise CheckpointMismatchError(refusal.read_text())
        module = Classifier()
        module.net = transformers.ViTForImageClassification.from_pretrained(path)
        return module
    if path.suffix == ".ckpt":
        if target == PLAIN:
            return Classifier.load_from_checkpoint(path, strict=True)
        if target == OURS:
            return load_checkpoint(Classifier, path)
        module, callbacks = Classifier(), [CALLBACKS[type(rule)]() for rule in RULES[kind] or RULES["both"]]
        if RULES[kind]:
            make_trainer(path.parent, callbacks).validate(module, digits(), ckpt_path=path, verbose=False)
        else:  # an evaluation adds no correction, so that only a fit can meet the difference
            make_trainer(path.parent, callbacks).fit(module, digits(), ckpt_path=path)
        return module
    module = Classifier()
    wanted = {PLAIN: [], CONDITIONED: RULES[kind] or RULES["both"], OURS: RULES[kind]}[target]
    for rule in wanted:
        # Weights in such a file are effective: only tokens have to be corrected again.
        if target == CONDITIONED or isinstance(rule, TokenRule):
            condition_(module, rule)
    module.load_state_dict(read_state(path), strict=True)
    return module


def outcome(path, target, kind, expected):
    try:
        module = load(path, target, kind)
    except (RuntimeError, CheckpointMismatchError) as error:
        return "refused" if "vit.layers.0" in str(error) else f"fails, and not by name: {error}"
    return "same" if torch.equal(predictions(module), expected) else "loads and predicts something else"


def test_every_file_predicts_the_same_or_fails_by_name(trained):
    kind, folder, expected = trained
    column = list(RULES).index(kind)
    found = {cell: outcome(folder / FILES[cell[0]], cell[1], kind, expected) for cell in EXPECTED}
    assert found == {cell: row[column] for cell, row in EXPECTED.items()}


def test_models_that_were_compared_differ(trained):
    """What predicts the same does so because of what was loaded."""
    kind, folder, expected = trained
    torch.manual_seed(9)
    assert not torch.equal(predictions(Classifier()), expected)
    if kind != "none":
        loaded = load_checkpoint(Classifier, folder / "full.ckpt")
        assert any(token_forwards(loaded)) == (kind != "weights")
        uncondition_(loaded)
        assert not torch.equal(predictions(loaded), expected)


def test_the_docs_page_has_this_table():
    section = re.search(r"## Which file loads where\n(.*?)\n## ", DOCS.read_text(), re.DOTALL)[1]
    table = section[section.index("| file") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["file", "loaded into", *RULES]
    assert {(row[0], row[1]): tuple(row[2:]) for row in rows[2:]} == EXPECTED


if __name__ == "__main__":
    print("\n".join(f"| {file} | {target} | {' | '.join(row)} |" for (file, target), row in EXPECTED.items()))
