"""Which strategies train in which precisions, in the tests and in the docs; what is refused, and in which words."""

import json
from pathlib import Path

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_cond.callbacks import ConditionedTokens, SpectralConditioning
from lit_cond.errors import ConfigurationError
from tests.callbacks.test_processes import ROOT, run_processes
from tests.process_cases import PRECISIONS
from tests.tiny import largest_difference, make_loader, make_module, make_trainer, outputs

ROWS = {
    "auto": "one process",
    "ddp": "`ddp`",
    "fsdp": "`FSDPStrategy`",
    "fully_shard": "`ModelParallelStrategy` with `fully_shard`",
}
LIGHTNING = {"64-true": ("fsdp", "fully_shard"), "16-mixed": ("fully_shard",)}


def documented() -> dict[str, list[str]]:
    """The table of the docs page, by the first column."""
    lines = (ROOT / "docs" / "checkpoints_and_strategies.md").read_text().splitlines()
    start = lines.index("| strategy | " + " | ".join(PRECISIONS) + " |")
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (part.strip() for part in line.strip("|").split("|"))
        rows[name] = cells
    return rows


@pytest.mark.slow
def test_the_table_of_strategies_and_precisions_is_what_the_docs_say(tmp_path):
    run_processes("table", tmp_path)
    answers = json.loads(Path(tmp_path / "table.json").read_text())
    table = documented()
    assert set(table) == set(ROWS.values())
    for strategy, row in ROWS.items():
        for precision, said in zip(PRECISIONS, table[row], strict=True):
            answer = answers[f"{strategy} {precision}"]
            if said == "Lightning refuses":
                assert strategy in LIGHTNING[precision]
                assert answer.startswith("ValueError: "), answer
                assert precision in answer
                assert "support" in answer
            else:
                assert said == ("as bf16-mixed" if precision == "16-mixed" else "works")
                assert answer == "works", (strategy, precision, answer)


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Has the name that counts; the package deepspeed is not there."""


class OwnDeepSpeed(DeepSpeedStrategy):
    pass


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, OwnDeepSpeed])
@pytest.mark.parametrize("callback", [SpectralConditioning, ConditionedTokens])
def test_deepspeed_is_refused_with_what_to_do(tmp_path, strategy, callback):
    module = make_module()
    before = outputs(module)
    trainer = make_trainer(tmp_path, [callback()], strategy=strategy(device="cpu"))
    with pytest.raises(ConfigurationError, match=r"does not work with DeepSpeed: .*use strategy='fsdp'"):
        trainer.fit(module, make_loader())
    assert largest_difference(outputs(module), before) == 0
