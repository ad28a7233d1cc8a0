"""Configuration and hyperparameters of runs, and in what they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_cond.extras import optional_imports

__all__ = ["flatten", "read_settings", "setting_differences"]

_FILES = ("config.yaml", "hparams.yaml")
# Where a run has written, not what it was.
_NOT_TOLD = ("trainer.logger", "trainer.default_root_dir", "_instantiator", "_class_path")


def read_settings(folder: Path, notes: list[str]) -> Mapping[str, Any]:
    """Read the configuration file of a run beside its log, else its hyperparameters.

    Args:
        folder: Where the log lies.
        notes: Gets a note about a file that can not be read.

    Returns:
        The nested values; empty without a file.
    """
    with optional_imports("reading the settings of a run"):
        import yaml

    class Plain(yaml.SafeLoader):
        """Objects of Python become their names; none is made."""

    def name(loader: Any, suffix: str, node: Any) -> str:
        return suffix.rsplit(":", 1)[-1]

    Plain.add_multi_constructor("", name)
    for file in (folder / name for name in _FILES):
        if not file.is_file():
            continue
        try:
            values = yaml.load(file.read_text(), Loader=Plain)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            notes.append(f"{file.name} can not be read: {' '.join(str(error).split())[:160]}")
            continue
        if isinstance(values, dict) and values:
            return values
    return {}


def flatten(values: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and plain values; the level `init_args` of Lightning's configurations is left out."""
    for key, value in values.items():
        name = start if key == "init_args" else f"{start}.{key}" if start else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, name)
        else:
            yield name, value


def setting_differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the settings in which runs differ.

    A group that some run has not, such as a callback that is off, is one line instead of one for each option.

    Args:
        settings: The nested values of each run.

    Returns:
        One text for each run, by dotted key; a dash where a run does not have it.
    """
    flat = [dict(flatten(values)) for values in settings]
    keys = dict.fromkeys(key for values in flat for key in values)
    off = [key for key in keys if any(key in values and values[key] is None for values in flat)]
    rows: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith(_NOT_TOLD):
            continue
        group = next((group for group in off if key.startswith(f"{group}.")), None)
        name = group or key
        if name not in rows:
            shown = [_shown(values, name) for values in flat]
            if len(set(shown)) > 1:
                rows[name] = shown
    return rows


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key in values:
        return "null" if values[key] is None else str(values[key])
    below = {name.removeprefix(f"{key}."): value for name, value in values.items() if name.startswith(f"{key}.")}
    if not below:
        return "—"
    title = str(below.pop("class_path", "")).rsplit(".", 1)[-1]
    options = ", ".join(f"{name} {value}" for name, value in below.items() if value is not None)
    return f"{title} ({options})" if title and options else title or options
