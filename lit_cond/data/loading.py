"""A training loader whose batches are a function of seed, epoch and position, so that a run can go on anywhere."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lit_cond.errors import LitCondWarning

__all__ = ["EpochShuffle", "ResumableLoader", "SeededSamples", "isolated_random"]


class EpochShuffle(DistributedSampler[Any]):
    """A permutation of the data set that is a function of a seed and the epoch.

    The order does not depend on random numbers that the model draws in between, so two models are compared on the
    same batches. Lightning calls `set_epoch`. Of several processes each takes every n-th sample, so that a batch of all
    of them together is the batch of one process; the first samples are taken twice where the processes do not divide
    their number.

    Args:
        length: Number of samples.
        seed: Any integer.
        num_replicas: Number of processes.
        rank: Which of them this is.
    """

    def __init__(self, length: int, seed: int, num_replicas: int = 1, rank: int = 0) -> None:
        # A subclass of torch's own, so that Lightning puts no other sampler in its place.
        super().__init__(cast(Dataset[Any], range(length)), num_replicas, rank, shuffle=True, seed=seed)
        self.length = length
        self.skip = 0

    def __iter__(self) -> Iterator[int]:
        """Yield ``epoch * length + index``, which `SeededSamples` takes apart; `skip` samples less, once."""
        generator = torch.Generator().manual_seed((self.seed + self.epoch) % 2**63)
        order = torch.randperm(self.length, generator=generator)
        order = order.repeat(-(-self.total_size // self.length))[: self.total_size][self.rank :: self.num_replicas]
        skip, self.skip = self.skip, 0
        return iter((order[skip:] + self.epoch * self.length).tolist())


class SeededSamples(Dataset[Any]):
    """A data set whose random augmentation is a function of seed, epoch and sample.

    Whatever draws random numbers of Python, NumPy or torch while a sample is made draws them from generators of that
    sample alone, in whichever process; the generators of the run stay as they were.

    Args:
        dataset: The data set. Where it has `__getitems__`, a batch is made at once, seeded by its first sample.
        seed: Any integer.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        if hasattr(dataset, "__getitems__"):
            # On the instance: torch asks whether there is one.
            self.__getitems__ = self._batch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with isolated_random(self.seed, index):
            return self.dataset[index % len(self.dataset)]

    def _batch(self, indices: Sequence[int]) -> Any:
        with isolated_random(self.seed, indices[0]):
            return self.dataset.__getitems__([index % len(self.dataset) for index in indices])


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that goes on within an epoch where a checkpoint was written.

    Lightning stores and loads its state. What was given before is skipped without being read. Its iterators draw
    nothing from the generators of the run if it has one of its own, and begin to work when the first batch is
    asked for.
    """

    _given = 0
    _goes_on_at = 0

    def __iter__(self) -> Any:
        # The state holds for this iterator alone, even if nothing is asked of it: an epoch may end where it goes on.
        start, self._goes_on_at = self._goes_on_at, 0
        self._given = start
        return self._batches(start)

    def _batches(self, start: int) -> Iterator[Any]:
        read_again = start
        if isinstance(self.sampler, EpochShuffle):
            self.sampler.skip = start * cast(int, self.batch_size)
            read_again = 0
        for batch in islice(super().__iter__(), read_again, None):
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return how many batches of the epoch were given, and of how many samples of all processes together."""
        return {"batches": self._given, "batch_size": self._batch_of_all()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that were given, at the next iteration."""
        self._goes_on_at = state["batches"]
        before, now = state["batch_size"], self._batch_of_all()
        if before != now:
            self._goes_on_at = state["batches"] * before // now
            rank_zero_warn(
                f"the checkpoint was written within an epoch with batches of {before} samples on all processes, now "
                f"there are {now}: the epoch goes on after {self._goes_on_at * now} of its samples, not exactly where "
                "it was; give the same batch_size and number of devices, or a checkpoint of the end of an epoch",
                category=LitCondWarning,
            )

    def _batch_of_all(self) -> int:
        return cast(int, self.batch_size) * getattr(self.sampler, "num_replicas", 1)


@contextmanager
def isolated_random(*key: int) -> Iterator[None]:
    """Seed the random numbers of Python, NumPy (where imported) and torch's CPU for a block, and put them back.

    Args:
        key: Integers; equal ones give equal random numbers.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big")
    numpy = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = None if numpy is None else numpy.random.get_state()
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
