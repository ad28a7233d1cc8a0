"""What Lightning's training loop knows of the loaders and does not store (written for 2.6, as `loop_state`)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from torch.utils.data import IterableDataset

__all__ = [
    "drop_loader_states",
    "give_no_more_batches",
    "last_reload",
    "load_generators",
    "load_skipped_loader_states",
    "load_sources",
    "make_iterators_anew",
    "note_fetches",
    "put_given_states",
    "set_last_reload",
    "sources",
]

_FETCHED: WeakKeyDictionary[Trainer, list[dict[str, Any]]] = WeakKeyDictionary()


def drop_loader_states(loops: dict[str, Any]) -> list[Any] | None:
    """Change the state of the fit loop in a checkpoint so that the loaders begin anew; return what they had."""
    states: list[Any] | None = loops["state_dict"].pop("combined_loader", None)
    return states


def give_no_more_batches(trainer: Trainer) -> None:
    """Let the epoch that goes on end without another batch."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None:
        fetcher.done = True
        if isinstance(fetcher, _PrefetchDataFetcher):
            fetcher.batches.clear()  # the first one of a loader without a length


def load_skipped_loader_states(trainer: Trainer) -> None:
    """Load the states of the training loaders where they were made before Lightning had read the states.

    That is so for every module that asks for `trainer.estimated_stepping_batches` in `configure_optimizers`.
    """
    loop = trainer.fit_loop
    states, fetcher = loop._combined_loader_states_to_load, loop._data_fetcher
    if states and loop.restarting and loop._combined_loader is not None and fetcher is not None:
        loop._load_combined_loader_states()
        iter(fetcher)


def last_reload(trainer: Trainer) -> float:
    """Return the epoch in which the training loaders were made."""
    return trainer.fit_loop._last_train_dl_reload_epoch


def make_iterators_anew(trainer: Trainer) -> None:
    """Let the epoch that begins make its iterators as any epoch does, and not take those made before the training."""
    trainer.fit_loop.epoch_loop.restarting = False
    trainer.fit_loop._resuming_from_checkpoint = False


def set_last_reload(trainer: Trainer, epoch: float) -> None:
    """Let loaders be made anew when they would have been (`reload_dataloaders_every_n_epochs`)."""
    trainer.fit_loop._last_train_dl_reload_epoch = epoch


def sources(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what the next epoch of each training loader depends on.

    That is the states of the random number generators of the loader and its samplers, and that of an iterable data set
    with `state_dict` and `load_state_dict`.
    """
    return [
        {
            "generators": {name: one.get_state() for name, one in _generators(loader).items()},
            "dataset": [deepcopy(data.state_dict()) for data in _stateful_data(loader)],
        }
        for loader in _loaders(trainer)
    ]


def load_sources(trainer: Trainer, saved: list[dict[str, Any]]) -> None:
    """Put back what `sources` has returned, before the next epoch begins."""
    load_generators(trainer, saved)
    for loader, states in zip(_loaders(trainer), saved, strict=False):
        for data, state in zip(_stateful_data(loader), states["dataset"], strict=False):
            data.load_state_dict(state)


def load_generators(trainer: Trainer, saved: list[dict[str, Any]]) -> None:
    """Put back the random number generators of what `sources` has returned."""
    for loader, states in zip(_loaders(trainer), saved, strict=False):
        for name, generator in _generators(loader).items():
            if name in states["generators"]:
                generator.set_state(states["generators"][name].cpu())


def _loaders(trainer: Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def _generators(loader: Any) -> dict[str, torch.Generator]:
    batches = getattr(loader, "batch_sampler", None)
    samplers = {"sampler": getattr(loader, "sampler", None), "batches": getattr(batches, "sampler", None)}
    found = {name: getattr(owner, "generator", None) for name, owner in {"loader": loader, **samplers}.items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Generator)}


def _stateful_data(loader: Any) -> list[Any]:
    data = getattr(loader, "dataset", None)
    return [data] if isinstance(data, IterableDataset) and isinstance(data, _Stateful) else []


def note_fetches(trainer: Trainer) -> None:
    """Keep the states of loaders without a length from before each fetch: Lightning fetches one batch ahead."""
    loop, combined = trainer.fit_loop.epoch_loop, trainer.fit_loop._combined_loader
    fetcher = trainer.fit_loop._data_fetcher
    loop.__dict__.pop("_on_before_fetch", None)
    _FETCHED.pop(trainer, None)
    if combined is None or not isinstance(fetcher, _PrefetchDataFetcher) or fetcher.length is not None:
        return
    if not any(isinstance(loader, _Stateful) for loader in combined.flattened):
        return
    begin = loop._on_before_fetch

    def note() -> None:
        combined_now = trainer.fit_loop._combined_loader
        if combined_now is not None:
            _FETCHED[trainer] = deepcopy(combined_now._state_dicts())
        begin()

    loop.__dict__["_on_before_fetch"] = note


def put_given_states(trainer: Trainer, loops: dict[str, Any]) -> None:
    """Change the state of loaders without a length in a checkpoint so that the batch fetched ahead is still to come."""
    if trainer in _FETCHED and "combined_loader" in loops["state_dict"]:
        loops["state_dict"]["combined_loader"] = _FETCHED[trainer]
