"""The four callback groups: every option from the command line, on top of a file."""

import contextlib
import inspect
import io
import json

import pytest
import yaml

from lit_cond import cli
from lit_cond.callbacks import (
    ConditionedTokens,
    ConditionNumberMonitor,
    SpectralConditioning,
    StrengthSchedule,
)
from lit_cond.cli import LitCondCLI
from lit_cond.cli_parser import CALLBACK_GROUPS
from tests.cli.helpers import write_config

GIVEN = {
    "conditioning": {"correction": "identity", "scale": 0.5},
    "tokens": {"correction": "identity"},
    "schedule": {"schedule": "constant", "end": 0.5},
    "monitor": {"every_n_steps": 7},
}
# A value for each option that differs from its default and from GIVEN.
OTHER = {
    "conditioning": {
        "correction": "spectral", "scale": 0.25, "strength": 0.5, "granularity": "head", "roles": ["query"],
        "include": "blocks.*", "exclude": ["a", "b"], "layers": [0], "kinds": ["self"],
        "refresh_every_n_steps": 3, "allow_conditioned": True,
    },
    "tokens": {
        "correction": "exact", "scale": 2.0, "strength": 0.5, "detach": False, "backend": "svd",
        "include": ["blocks.0"], "channel_axis": 1, "prefix_tokens": "auto",
    },
    "schedule": {
        "schedule": "cosine", "start": 0.1, "end": 0.9, "num_steps": 10, "every_n_steps": 5, "monitor": "train/loss",
        "target": 2.0, "gain": 0.2, "applies_to": "weights",
    },
    "monitor": {
        "every_n_steps": 3, "quantities": ["key"], "intervals": {"key": 5}, "statistics": ["sigma_min"], "raw": False,
        "include": "blocks.*", "exclude": "a", "histogram": False, "heatmap": False, "per_head": True,
        "max_samples": 2, "matrix_samples": 2, "max_queries": 64, "jacobian_rows": 100,
        "stop_when": "cond/key/max > 1e6", "prog_bar": "cond/key/mean",
    },
}  # fmt: skip


def printed_config(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit_info:
        cli.main(["fit", *words, "--print_config"])
    assert exit_info.value.code == 0
    return yaml.safe_load(out.getvalue())


def test_every_option_is_listed():
    for key, callback in CALLBACK_GROUPS.items():
        assert list(OTHER[key]) == list(inspect.signature(callback).parameters)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("job") / "job.yaml", **GIVEN)


@pytest.fixture(scope="module")
def before(job):
    return printed_config("--config", job)


@pytest.mark.parametrize(("key", "option"), [(key, option) for key in OTHER for option in OTHER[key]])
def test_c1_one_option_from_the_command_line(key, option, before, job):
    value = OTHER[key][option]
    word = value if isinstance(value, str) else json.dumps(value)
    after = printed_config("--config", job, f"--{key}.{option}={word}")
    assert after[key]["init_args"] == before[key]["init_args"] | {option: value}
    assert after == before | {key: {**before[key], "init_args": after[key]["init_args"]}}


@pytest.mark.parametrize("key", CALLBACK_GROUPS)
def test_c1_option_switches_a_group_on_and_null_off(key, config):
    assert printed_config("--config", config)[key] is None
    option, value = next(iter(OTHER[key].items()))
    on = printed_config("--config", config, f"--{key}.{option}", str(value))
    assert on[key]["init_args"][option] == value
    assert printed_config("--config", config, f"--{key}.{option}", str(value), f"--{key}", "null")[key] is None


def test_c1_saved_config_shows_the_values_used(tmp_path):
    config = write_config(tmp_path / "job.yaml", **GIVEN)
    job = LitCondCLI(["fit", "--config", config, "--conditioning.scale", "0.25", "--tokens", "null"])
    saved = yaml.safe_load((tmp_path / "lightning_logs/version_0/config.yaml").read_text())
    assert saved["conditioning"]["init_args"]["correction"] == "identity"
    assert saved["conditioning"]["init_args"]["scale"] == 0.25
    assert saved["tokens"] is None
    (callback,) = [c for c in job.trainer.callbacks if isinstance(c, SpectralConditioning)]
    assert callback.rule.scale == 0.25


def test_groups_come_before_the_list_of_the_trainer(tmp_path):
    config = write_config(tmp_path / "job.yaml", **GIVEN)
    job = LitCondCLI(["fit", "--config", config, "--trainer.callbacks", "LearningRateMonitor"])
    names = [type(callback).__name__ for callback in job.trainer.callbacks]
    assert names[:5] == [
        "SpectralConditioning",
        "ConditionedTokens",
        "StrengthSchedule",
        "ConditionNumberMonitor",
        "LearningRateMonitor",
    ]


def test_short_names_in_the_list_of_the_trainer(tmp_path):
    callbacks = [
        {"class_path": "SpectralConditioning", "init_args": {"strength": 0.5}},
        {"class_path": "StrengthSchedule", "init_args": {"schedule": "constant"}},
        "ConditionedTokens",
    ]
    config = write_config(tmp_path / "job.yaml")
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    words = ["--trainer.callbacks+=ConditionNumberMonitor", "--trainer.callbacks.every_n_steps=3"]
    shown = printed_config("--config", config, "--config", "more.yaml", *words)["trainer"]["callbacks"]
    classes = (SpectralConditioning, StrengthSchedule, ConditionedTokens, ConditionNumberMonitor)
    assert [one["class_path"] for one in shown] == [f"lit_cond.callbacks.{cls.__name__}" for cls in classes]
    assert shown[0]["init_args"]["strength"] == 0.5
    assert shown[3]["init_args"]["every_n_steps"] == 3


def test_printed_config_can_be_loaded(run, tmp_path):
    config = write_config(tmp_path / "job.yaml", **GIVEN)
    first = run("fit", "--config", config, "--print_config").out
    (tmp_path / "printed.yaml").write_text(first)
    assert run("fit", "--config", "printed.yaml", "--print_config").out == first
