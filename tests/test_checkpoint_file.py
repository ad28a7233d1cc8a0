"""One line for each way in which a file can be no checkpoint; the file stays as it is and nothing in it runs."""

import contextlib
import os
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch
from lightning.pytorch import __version__ as lightning_version
from safetensors.torch import save_file

from lit_cond.checkpoint_file import read_checkpoint
from lit_cond.errors import CheckpointFileError

GOOD = {"pytorch-lightning_version": lightning_version, "state_dict": {"weight": torch.arange(5000.0)}, "epoch": 3}


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def good(tmp_path):
    torch.save(GOOD, tmp_path / "good.ckpt")
    return tmp_path / "good.ckpt"


def refusal(path, **kwargs):
    before = path.read_bytes() if path.is_file() else None
    messages = []
    for mmap in (False, True):
        with pytest.raises(CheckpointFileError) as caught:
            read_checkpoint(path, mmap=mmap, **kwargs)
        messages.append(str(caught.value))
    assert (path.read_bytes() if path.is_file() else None) == before
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    assert str(path) in messages[0]
    return messages[0]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_checkpoint_is_read(tmp_path, mmap, zipped):
    torch.save(GOOD, tmp_path / "a.ckpt", _use_new_zipfile_serialization=zipped)
    checkpoint = read_checkpoint(tmp_path / "a.ckpt", mmap=mmap)
    assert checkpoint["epoch"] == 3
    assert torch.equal(checkpoint["state_dict"]["weight"], torch.arange(5000.0))


def test_a_url_is_read_as_lightning_reads_it(good):
    assert read_checkpoint(f"file://{good}")["epoch"] == 3


def test_missing(tmp_path):
    assert "there is no checkpoint" in refusal(tmp_path / "a.ckpt")


def test_folder(tmp_path):
    assert "is a folder" in refusal(tmp_path)


def test_zero_length(tmp_path):
    (tmp_path / "a.ckpt").touch()
    assert "an empty file" in refusal(tmp_path / "a.ckpt")


@pytest.mark.parametrize("kept", [0.01, 0.5, 0.99])
def test_truncated(good, kept):
    content = good.read_bytes()
    good.write_bytes(content[: int(len(content) * kept)])
    assert "cut off or damaged" in refusal(good)


@pytest.mark.parametrize("kept", [0.01, 0.5, 0.99])
def test_truncated_in_the_old_format(tmp_path, kept):
    torch.save(GOOD, tmp_path / "a.ckpt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "a.ckpt").write_bytes(content[: int(len(content) * kept)])
    assert "not a checkpoint" in refusal(tmp_path / "a.ckpt")


def flip_a_bit_of_the_weight(path):
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(5000.0).numpy().tobytes()) + 402] ^= 64
    path.write_bytes(content)


def test_a_flipped_bit_in_a_weight(good):
    flip_a_bit_of_the_weight(good)
    assert not torch.equal(torch.load(good)["state_dict"]["weight"], torch.arange(5000.0))  # torch is silent
    with pytest.raises(CheckpointFileError, match="does not match its checksum"):
        read_checkpoint(good)


def test_a_file_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(GOOD, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_checkpoint(tmp_path / "a.ckpt")["epoch"] == 3


def test_other_files(tmp_path):
    contents = {
        b"epochs: 3\nmodel: x\n": "text that begins with 'epochs: 3'",
        b"\x89PNG\r\n\x1a\n" + bytes(40): "a PNG image",
        b"\x93NUMPY\x01\x00": "a NumPy array",
        b"version https://git-lfs.github.com/spec/v1\n": "git lfs pull",
        b"\xde\xad\xbe\xef" * 9: "the bytes de ad be ef",
    }
    for content, expected in contents.items():
        (tmp_path / "a.ckpt").write_bytes(content)
        message = refusal(tmp_path / "a.ckpt")
        assert "not a checkpoint that torch.save has written" in message
        assert expected in message
    save_file({"a": torch.ones(2)}, tmp_path / "b.ckpt")
    assert "safetensors.torch.load_file" in refusal(tmp_path / "b.ckpt")


def test_other_archives(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    assert "another zip archive" in refusal(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "empty.ckpt", "w"):
        pass
    assert "another zip archive" in refusal(tmp_path / "empty.ckpt")
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "script.ckpt")
    assert "TorchScript" in refusal(tmp_path / "script.ckpt")


def write_torch(value, path):
    torch.save(value, path)


def write_old_torch(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)


def write_pickle(value, path):
    path.write_bytes(pickle.dumps(value))


@pytest.mark.parametrize("write", [write_torch, write_old_torch, write_pickle])
def test_a_pickle_that_would_run_something_is_named_and_does_not_run(tmp_path, write):
    write({**GOOD, "extra": Touch(tmp_path / "ran")}, tmp_path / "a.ckpt")
    message = refusal(tmp_path / "a.ckpt")
    assert "unpickling it would call posix.mkdir, which was not done" in message
    assert not (tmp_path / "ran").exists()
    if write is write_torch:  # the file is what it claims to be
        read_checkpoint(tmp_path / "a.ckpt", weights_only=False)
        assert (tmp_path / "ran").exists()


def test_values_that_are_no_checkpoint(tmp_path):
    values = {
        "a tensor of shape (3,)": torch.ones(3),
        "a value of the type list": [1, 2],
        "a bare state_dict ('weight', ...)": {"weight": torch.ones(3), "bias": torch.ones(2)},
        "it holds 'model', 'epoch' and no 'state_dict'": {"model": {"weight": torch.ones(3)}, "epoch": 3},
        "and no 'pytorch-lightning_version'": {"state_dict": {"weight": torch.ones(3)}, "epoch": 3},
        "it holds nothing and no 'state_dict'": {},
    }
    for expected, value in values.items():
        torch.save(value, tmp_path / "a.ckpt")
        message = refusal(tmp_path / "a.ckpt")
        assert expected in message
        assert "not a checkpoint of Lightning" in message


@pytest.mark.parametrize("key", ["hyper_parameters", "callbacks"])
@pytest.mark.parametrize("value", [None, "x", 3, [], torch.ones(2)], ids=lambda value: type(value).__name__)
def test_parts_that_are_no_dictionaries(tmp_path, key, value):
    torch.save({**GOOD, key: value}, tmp_path / "a.ckpt")
    assert f"is damaged: its '{key}' is a " in refusal(tmp_path / "a.ckpt")


def test_a_version_that_is_none(tmp_path):
    torch.save({**GOOD, "pytorch-lightning_version": "newest"}, tmp_path / "a.ckpt")
    assert "'newest' is no version" in refusal(tmp_path / "a.ckpt")


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return a == b


def damage(content, generator):
    """Return a file that one of the usual accidents has happened to."""
    place = generator.randrange(len(content))
    if generator.random() < 0.5:  # in the lists of what the file holds, at its end
        place = len(content) - generator.randrange(1, 1500)
    kind = generator.choice(["bit", "end", "zeros", "more", "less"])
    if kind == "bit":
        return content[:place] + bytes([content[place] ^ 1 << generator.randrange(8)]) + content[place + 1 :]
    after = {"end": b"", "zeros": bytes(512), "more": b"x", "less": b""}[kind]
    skipped = {"end": len(content), "zeros": 512, "more": 0, "less": 7}[kind]
    return content[:place] + after + content[place + skipped :]


def test_accidents_are_found(good):
    """What is read is what was written, or nothing; looking at the surroundings alone fails in one way only."""
    content, generator, refused = good.read_bytes(), random.Random(0), 0
    for number in range(200):
        good.write_bytes(damage(content, generator))
        try:
            found = read_checkpoint(good)
        except CheckpointFileError:
            refused += 1
        else:
            assert equal(found, GOOD), number
        with contextlib.suppress(CheckpointFileError):
            read_checkpoint(good, mmap=True)
    assert refused > 150
