"""Damaged, foreign and malicious checkpoints: one line, exit code 2, the file as it was, nothing executed."""

import copy
import os
import pickle

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from lit_cond import __main__, load_checkpoint
from lit_cond.atomic_io import AtomicCheckpointIO
from lit_cond.callbacks import ConditionedTokens, SpectralConditioning
from lit_cond.errors import CheckpointFileError, CheckpointMismatchError, DataError, LitCondError
from lit_cond.runs import find_checkpoint, load_run
from tests.cli.helpers import TINY
from tests.tiny import TinyModule, make_loader, make_module, make_trainer, outputs

CALLBACKS = (SpectralConditioning, ConditionedTokens)


class Touch:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.makedirs, (self.path, 0o777, True)


def missing(path, checkpoint):
    path.unlink()


def empty(path, checkpoint):
    path.write_bytes(b"")


def truncated(path, checkpoint):
    path.write_bytes(path.read_bytes()[:-1000])


def flipped(path, checkpoint):
    content = bytearray(path.read_bytes())
    value = next(v for k, v in checkpoint["state_dict"].items() if k.endswith("qkv.weight"))
    content[content.index(value.numpy().tobytes()) + 7] ^= 8
    path.write_bytes(content)


def text(path, checkpoint):
    path.write_text("model: large\n")


def image(path, checkpoint):
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))


def bare_state_dict(path, checkpoint):
    torch.save(checkpoint["state_dict"], path)


def foreign(path, checkpoint):
    torch.save({"model": checkpoint["state_dict"], "epoch": 3}, path)


def malicious(path, checkpoint):
    torch.save({**checkpoint, "extra": Touch(path.parent / "ran")}, path)


def malicious_pickle(path, checkpoint):
    path.write_bytes(pickle.dumps({"state_dict": Touch(path.parent / "ran")}))


def wrong_model(path, checkpoint):
    state = dict(checkpoint["state_dict"])
    name = next(name for name in state if name.endswith("head.weight"))
    state[name.replace("head", "other")] = state.pop(name)
    torch.save({**checkpoint, "state_dict": state}, path)


def damaged_record(path, checkpoint):
    torch.save({**checkpoint, "lit_cond": {**checkpoint["lit_cond"], "version": 99}}, path)


KINDS = {
    missing: "there is no checkpoint",
    empty: "an empty file",
    truncated: "cut off or damaged",
    flipped: "does not match its checksum",
    text: "text that begins with 'model: large'",
    image: "a PNG image",
    bare_state_dict: "a bare state_dict",
    foreign: "it holds 'model', 'epoch' and no 'state_dict'",
    malicious: "would call os.makedirs",
    malicious_pickle: "would call os.makedirs",
    wrong_model: "head.weight' is missing in the checkpoint; 'backbone.other.weight' is unknown to the model",
    damaged_record: "record of corrections has version 99",
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of the command line with corrected weights and tokens."""
    folder = tmp_path_factory.mktemp("run")
    trainer = {**TINY["trainer"], "default_root_dir": str(folder), "logger": False}
    trainer["callbacks"] = [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(folder), "filename": "a"}}]
    job = {**TINY, "trainer": trainer, "conditioning": {}, "tokens": {}, "test_after_fit": False}
    (folder / "config.yaml").write_text(yaml.safe_dump(job))
    __main__.main(["fit", "--config", str(folder / "config.yaml")])
    return folder


@pytest.fixture
def damaged(run_folder, tmp_path):
    """Write a damaged copy of the run's checkpoint; return its path."""

    def make(kind):
        content = (run_folder / "a.ckpt").read_bytes()
        (tmp_path / "config.yaml").write_bytes((run_folder / "config.yaml").read_bytes())
        (tmp_path / "a.ckpt").write_bytes(content)
        kind(tmp_path / "a.ckpt", torch.load(run_folder / "a.ckpt", weights_only=True))
        return tmp_path / "a.ckpt"

    return make


def name_of(value):
    return value.__name__ if callable(value) else value


EVERY, SOME = ("fit", "inspect", "export"), ("validate", "test", "predict")
CASES = [(kind, command) for kind in KINDS for command in EVERY] + [
    (kind, command) for kind in (missing, truncated, malicious, wrong_model) for command in SOME
]


@pytest.mark.parametrize(("kind", "command"), CASES, ids=name_of)
def test_every_command_refuses_in_one_line(damaged, capsys, monkeypatch, kind, command):
    path = damaged(kind)
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr("sys.argv", ["lit_cond"])
    monkeypatch.delenv("LIT_COND_TRACEBACK", raising=False)
    before = path.read_bytes() if path.exists() else None
    files = set(path.parent.iterdir())
    words = {"inspect": [str(path)], "export": [str(path), "out", "--formats", "safetensors"]}
    with pytest.raises(SystemExit) as caught:
        __main__.main([command, *words.get(command, ["--config", "config.yaml", "--ckpt_path", str(path)])])
    assert caught.value.code == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lit_cond: error: ")]
    assert len(error) == 1
    assert ("there is no" if kind is missing else KINDS[kind]) in error[0]
    assert (path.read_bytes() if path.exists() else None) == before
    assert not (path.parent / "ran").exists()
    assert not (path.parent / "out").exists()
    assert set(path.parent.iterdir()) - files <= {path.parent / "lightning_logs"}


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_load_checkpoint_and_load_run(damaged, kind):
    from lit_cond.tasks import ImageClassification

    path = damaged(kind)
    with pytest.raises((CheckpointFileError, CheckpointMismatchError)) as caught:
        load_checkpoint(ImageClassification, path)
    assert KINDS[kind] in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(LitCondError):
        load_run(path.parent, path)
    assert not (path.parent / "ran").exists()


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in (missing, wrong_model, damaged_record)], ids=name_of)
def test_a_damaged_checkpoint_beside_whole_ones(damaged, run_folder, kind):
    bad = damaged(kind)
    if kind is flipped:  # looking for a checkpoint reads no weights
        assert find_checkpoint(bad.parent) == bad
        return
    with pytest.raises(DataError):
        find_checkpoint(bad.parent)
    (bad.parent / "good.ckpt").write_bytes((run_folder / "a.ckpt").read_bytes())
    assert find_checkpoint(bad.parent).name == "good.ckpt"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A checkpoint of a user's module with corrected weights and tokens, and what it predicts."""
    folder = tmp_path_factory.mktemp("tiny")
    trainer = make_trainer(folder, [callback() for callback in CALLBACKS])
    module = make_module()
    trainer.fit(module, make_loader())
    trainer.save_checkpoint(folder / "a.ckpt")
    return torch.load(folder / "a.ckpt", weights_only=True), outputs(module)


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not wrong_model], ids=name_of)
def test_fit_in_python_with_our_checkpoint_io(tiny, tmp_path, kind):
    torch.save(tiny[0], tmp_path / "a.ckpt")
    kind(tmp_path / "a.ckpt", tiny[0])
    trainer = make_trainer(tmp_path, [callback() for callback in CALLBACKS], plugins=[AtomicCheckpointIO()])
    with pytest.raises(LitCondError) as caught:
        trainer.fit(make_module(), make_loader(), ckpt_path=tmp_path / "a.ckpt")
    assert KINDS[kind] in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_lightning_alone_runs_no_code_either(tiny, tmp_path):
    malicious(tmp_path / "a.ckpt", tiny[0])
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    with pytest.raises(pickle.UnpicklingError):
        trainer.fit(make_module(), make_loader(), ckpt_path=tmp_path / "a.ckpt")
    assert not (tmp_path / "ran").exists()


def test_weights_only_false_is_for_trusted_files(tiny, tmp_path):
    malicious(tmp_path / "a.ckpt", tiny[0])
    loaded = load_checkpoint(TinyModule, tmp_path / "a.ckpt", weights_only=False)
    assert torch.equal(outputs(loaded), tiny[1])
    assert (tmp_path / "ran").exists()


def test_names_of_what_differs(tiny, tmp_path):
    class Other(TinyModule):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.net.head = torch.nn.Linear(32, 7)

    state = tiny[0]["state_dict"]
    cases = {
        "'net.embed.bias' is missing in the checkpoint": {k: v for k, v in state.items() if k != "net.embed.bias"},
        "'net.embed.weight' and 1 more are missing": {k: v for k, v in state.items() if "embed" not in k},
        "'net.more' is unknown to the model": {**state, "net.more": torch.ones(1)},
        "shapes differ: 'net.embed.bias' ([3] in the checkpoint, [32] in the model)": {
            **state,
            "net.embed.bias": torch.ones(3),
        },
    }
    for message, weights in cases.items():
        torch.save({**tiny[0], "state_dict": weights}, tmp_path / "a.ckpt")
        with pytest.raises(CheckpointMismatchError) as caught:
            load_checkpoint(TinyModule, tmp_path / "a.ckpt")
        assert f"does not fit TinyModule: {message}" in str(caught.value)
    torch.save(tiny[0], tmp_path / "a.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"'net\.head\.weight' \(\[5, 32\] in .* and 1 more"):
        load_checkpoint(Other, tmp_path / "a.ckpt")


def places(value, path=()):
    """Yield the path of every entry below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(record, path, change):
    record = copy.deepcopy(record)
    parent = record
    for key in path[:-1]:
        parent = parent[key]
    if change == "deleted":
        del parent[path[-1]]
    else:
        parent[path[-1]] = change
    return record


@pytest.mark.parametrize("change", ["deleted", None, [], torch.ones(3)], ids=["deleted", "None", "list", "tensor"])
def test_every_entry_of_the_record_may_be_damaged(tiny, tmp_path, change):
    """The damage is named, or the model computes what it computed."""
    checkpoint, expected = tiny
    refused = 0  # in one line
    for place in places(checkpoint["lit_cond"]):
        if place[1:2] == ("net.blocks.1.attn.qkv.weight",):  # one weight is enough
            continue
        torch.save({**checkpoint, "lit_cond": changed(checkpoint["lit_cond"], place, change)}, tmp_path / "a.ckpt")
        try:
            loaded = load_checkpoint(TinyModule, tmp_path / "a.ckpt")
        except CheckpointMismatchError as error:
            refused += "\n" not in str(error)
        else:
            assert torch.equal(outputs(loaded), expected), place
    assert refused > 10


@pytest.mark.parametrize("change", ["deleted", "x"])
def test_a_resume_from_a_damaged_record_is_refused_by_name(tiny, tmp_path, change):
    record = tiny[0]["lit_cond"]
    name = "net.blocks.0.attn.qkv.weight"
    for place in (
        ("weights", name, "terms"),
        ("weights", name, "terms", 0, "rule"),
        ("tokens", "net.blocks.0", "rule"),
    ):
        torch.save({**tiny[0], "lit_cond": changed(record, place, change)}, tmp_path / "a.ckpt")
        trainer = make_trainer(tmp_path, [callback() for callback in CALLBACKS], max_epochs=2)
        with pytest.raises(CheckpointMismatchError, match=place[1]):
            trainer.fit(make_module(), make_loader(), ckpt_path=tmp_path / "a.ckpt")
