import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_monitors.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmark_monitors", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their types up
    spec.loader.exec_module(module)
    for name, small in {"NUMBER": 2, "SIZE": 330, "LAYERS": 1, "HEADS": 2, "TOKENS": 5, "CHANNELS": 4}.items():
        monkeypatch.setattr(module, name, small)
    return module


@pytest.mark.parametrize(("part", "tolerance"), [("weights", 1e-2), ("jacobian", 1e-6)])
def test_both_ways_lead_to_the_same_numbers(script, part, tolerance):
    for comparison in script.PARTS[part](1):
        assert comparison.error < tolerance
        assert len(comparison.ours) == len(comparison.other) == 1


def test_table(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark_monitors.py", "--only", "jacobian", "--rounds", "2"])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["other", "ms", "ours", "ms", "ratio", "worst", "error", "other's"]
    assert all(len(line.rsplit(maxsplit=6)) == 7 for line in lines[2:])
    assert "kappa" in lines[2]


def test_the_monitor_in_a_training(script, capsys, monkeypatch):
    arguments = ["--only", "monitor", "--model", "test_vit", "--batch-size", "2", "--rounds", "1", "--conditioned"]
    monkeypatch.setattr(sys, "argv", ["benchmark_monitors.py", *arguments])
    monkeypatch.setattr(script, "GROUPS", {"tokens": ("tokens",), "jacobian": ("jacobian",)})
    script.main()
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines[0].startswith("test_vit, batch 2: a step takes")
    assert lines[1].split()[0] == "tokens"
    assert "every   100 steps" in lines[1]
    assert "every  1000 steps" in lines[2]
    assert lines[3].startswith("all, at default intervals")
