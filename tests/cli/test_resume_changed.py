"""A resume with something switched off that the checkpoint was made with."""

import pytest
import torch

from lit_cond.cli import LitCondCLI
from lit_cond.errors import LitCondWarning
from lit_cond.surgery.tokens import token_forwards
from lit_cond.surgery.weights import conditioned_weights
from lit_cond.tasks import ImageClassification
from tests.cli.helpers import write_config

RESUME = ("--ckpt_path=last", "--trainer.max_epochs=2")
GROUPS = {
    "task": {"conditioning": {}, "tokens": {}},
    "own": {
        "conditioning": {},
        "tokens": {},
        "model": {"class_path": "tests.tiny.TinyModule"},
        "data": {"class_path": "tests.cli.helpers.SequenceData"},
    },
}


@pytest.fixture(params=GROUPS)
def job(request, tmp_path, run):
    config = write_config(tmp_path / "job.yaml", test_after_fit=False, **GROUPS[request.param])
    words = ("fit", "--config", config)
    outcome = run(*words)
    assert outcome.code == 0, outcome.err
    return words


def saved(tmp_path):
    (path,) = tmp_path.rglob("*.ckpt")
    return path, torch.load(path, weights_only=True)


@pytest.mark.parametrize("others", [(), ("--conditioning=null",)], ids=["alone", "with the weights"])
def test_corrected_tokens_switched_off_are_refused(others, job, run, tmp_path):
    outcome = run(*job, *RESUME, "--tokens=null", *others)
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) == 1
    assert "the checkpoint was made with corrected tokens" in outcome.err
    assert "ConditionedTokens" in outcome.err
    assert saved(tmp_path)[1]["global_step"] in (1, 2)  # as it was


def test_corrected_weights_switched_off_go_on_as_they_are_with_a_warning(job, tmp_path):
    before = saved(tmp_path)[1]
    assert before["lit_cond"]["weights"]
    first = next(iter(before["lit_cond"]["weights"]))
    with pytest.warns(LitCondWarning, match=rf"'{first}'.*SpectralConditioning.*--conditioning null"):
        cli = LitCondCLI([*job, "--ckpt_path=last", "--trainer.max_epochs=2", "--conditioning=null"])
    assert not any(conditioned_weights(cli.model))
    after = torch.load(cli.trainer.checkpoint_callback.best_model_path, weights_only=True)
    assert after["global_step"] > before["global_step"]
    assert not after["lit_cond"]["weights"]
    assert after["lit_cond"]["tokens"]


def test_an_evaluation_and_load_from_checkpoint_still_restore(tmp_path, run):
    config = write_config(tmp_path / "job.yaml", test_after_fit=False, **GROUPS["task"])
    assert run("fit", "--config", config).code == 0
    path, _ = saved(tmp_path)
    cli = LitCondCLI(["test", "--config", config, f"--ckpt_path={path}", "--tokens=null", "--conditioning=null"])
    assert any(token_forwards(cli.model))
    assert any(token_forwards(ImageClassification.load_from_checkpoint(path)))
