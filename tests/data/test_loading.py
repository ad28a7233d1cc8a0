"""Training batches are a function of seed, epoch and position, whoever loads them."""

import random

import numpy
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lit_cond.data import Augmentation, DigitsDataModule, ImageFolderDataModule
from lit_cond.data.loading import EpochShuffle, ResumableLoader, SeededSamples, isolated_random
from lit_cond.errors import LitCondWarning


class Noisy(Dataset):
    """Draws from every generator, and notes what was read."""

    def __init__(self, length=20):
        self.length = length
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        noise = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        return torch.tensor([index, *noise], dtype=torch.float64)


def loader_of(dataset=None, seed=0, batch_size=3, workers=0, **share):
    dataset = Noisy() if dataset is None else dataset
    order = EpochShuffle(len(dataset), seed, **share)
    samples = SeededSamples(dataset, seed)
    return ResumableLoader(
        samples, batch_size=batch_size, sampler=order, num_workers=workers, generator=torch.Generator().manual_seed(0)
    )


def epoch_of(loader, epoch):
    loader.sampler.set_epoch(epoch)
    return list(loader)


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_epoch_is_the_same_whatever_was_drawn_before_and_with_workers():
    first, again = loader_of(), loader_of(workers=2)
    expected = [epoch_of(first, epoch) for epoch in (0, 1)]
    torch.rand(9), random.random()
    assert equal(expected[1], epoch_of(again, 1))
    assert equal(expected[0], epoch_of(again, 0))
    assert not torch.equal(torch.cat(expected[0]).sort(0).values, torch.cat(expected[1]).sort(0).values)
    assert [len(batch) for batch in expected[0]] == [3] * 6 + [2]
    assert not equal(expected[0], epoch_of(loader_of(seed=1), 0))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", [1, 6, 7])
def test_going_on_within_an_epoch(given, workers):
    whole = loader_of(workers=workers)
    expected = [epoch_of(whole, epoch) for epoch in (0, 1, 2)]
    loader = loader_of(workers=workers)
    loader.sampler.set_epoch(1)
    batches = iter(loader)
    for _ in range(given):
        next(batches)
    state = loader.state_dict()
    assert state == {"batches": given, "batch_size": 3}
    dataset = Noisy()
    resumed = loader_of(dataset, workers=workers)
    resumed.load_state_dict(state)
    assert equal(expected[1][given:], epoch_of(resumed, 1))
    if not workers:
        assert len(dataset.read) == len(torch.cat(expected[1][given:])) if given < 7 else dataset.read == []
    assert resumed.state_dict()["batches"] == 7
    assert equal(expected[2], epoch_of(resumed, 2))


def test_an_epoch_that_ends_where_it_goes_on_does_not_shorten_the_next():
    loader = loader_of()
    loader.load_state_dict({"batches": 5, "batch_size": 3})
    iter(loader)  # of which nothing is asked
    assert loader.state_dict()["batches"] == 5
    assert len(epoch_of(loader, 1)) == 7


def test_two_processes_share_the_batch_of_one():
    one = epoch_of(loader_of(batch_size=4), 3)
    shares = [epoch_of(loader_of(batch_size=2, num_replicas=2, rank=rank), 3) for rank in (0, 1)]
    for whole, *parts in zip(one, *shares, strict=True):
        assert torch.equal(whole, torch.stack(parts, 1).flatten(0, 1))
    odd = [epoch_of(loader_of(Noisy(5), num_replicas=2, rank=rank), 0) for rank in (0, 1)]
    assert [sum(map(len, share)) for share in odd] == [3, 3]
    assert set(torch.cat([*odd[0], *odd[1]])[:, 0].tolist()) == set(range(5))


def test_going_on_with_another_batch_size_is_said():
    loader = loader_of(batch_size=6)
    with pytest.warns(
        LitCondWarning, match=r"batches of 3 samples .* now there are 6: .* goes on after 12 of its samples"
    ):
        loader.load_state_dict({"batches": 4, "batch_size": 3})
    assert sum(map(len, epoch_of(loader, 0))) == 8


def test_nothing_moves_the_generators_of_the_run():
    def states():
        return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002

    before = states()
    epoch_of(loader_of(), 0)
    with pytest.raises(ZeroDivisionError), isolated_random(1):
        torch.rand(1), random.random(), 1 / 0
    data = DigitsDataModule(augment=True)
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        list(loader)
    assert states() == before


def test_another_sampler_in_its_place_is_skipped_batch_by_batch():
    dataset = TensorDataset(torch.arange(10))
    loader = ResumableLoader(dataset, batch_size=2)
    loader.load_state_dict({"batches": 3, "batch_size": 2})
    assert [batch.tolist() for (batch,) in loader] == [[6, 7], [8, 9]]


def test_the_seed_of_the_batches_goes_with_the_checkpoint():
    torch.manual_seed(5)
    first = DigitsDataModule(augment=True)
    first.setup("fit")
    expected = list(first.train_dataloader())
    torch.manual_seed(6)
    other = DigitsDataModule(augment=True)
    other.setup("fit")
    other.load_state_dict(first.state_dict())
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(expected, other.train_dataloader(), strict=True))


def test_random_augmentation_of_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part, label in (("train", "a"), ("train", "b"), ("val", "a")):
        (tmp_path / part / label).mkdir(parents=True)
        for number in range(4):
            pixels = numpy.random.default_rng(number).integers(0, 255, (20, 20, 3), dtype=numpy.uint8)
            image.fromarray(pixels).save(tmp_path / part / label / f"{number}.png")

    def batches(workers, start=0):
        torch.manual_seed(1)
        data = ImageFolderDataModule(str(tmp_path), 2, 16, Augmentation(color_jitter=0.3), num_workers=workers)
        data.setup("fit")
        loader = data.train_dataloader()
        if start:
            loader.load_state_dict({"batches": start, "batch_size": 2})
        loader.sampler.set_epoch(4)
        return [images for images, _ in loader]

    expected = batches(0)
    assert equal(expected, batches(2))
    assert equal(expected[1:], batches(0, 1))
