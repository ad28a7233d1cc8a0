"""Programs of several processes: `python -m tests.process_cases CASE FOLDER`, run by callbacks/test_processes.py."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lit_cond.callbacks import ConditionedTokens, ConditionNumberMonitor, SpectralConditioning
from lit_cond.errors import LitCondError
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import TinyModule, TinyTransformer, largest_difference, make_loader, make_module, make_trainer, outputs


class Keep(pl.Callback):
    """Stores what the first process computes when training ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer, pl_module):
        result = outputs(pl_module)
        if trainer.is_global_zero:
            torch.save(result, self.path)


def launched(case: str, folder: Path) -> None:
    """Launchers that train in other processes and hand the weights back (trap 10, problem B3)."""
    module = make_module()
    kinds = {"devices": 2, "strategy": case}
    trainer = make_trainer(folder, [SpectralConditioning(), Keep(folder / "worker.pt")], **kinds)
    trainer.fit(module, make_loader())
    worker = torch.load(folder / "worker.pt")
    assert largest_difference(outputs(module), worker) == 0, "the main process got other weights"
    assert all(not torch.equal(a, b) for a, b in zip(make_module().parameters(), module.parameters(), strict=True))
    trainer.save_checkpoint(folder / "main.ckpt")
    plain = TinyModule.load_from_checkpoint(folder / "main.ckpt")
    assert largest_difference(outputs(plain), worker) == 0
    with pytest.raises(LitCondError, match="well conditioned"):
        make_trainer(folder, [SpectralConditioning()]).fit(module, make_loader())


def ddp(folder: Path) -> None:
    """Resume with two processes is exact; every process reports the same condition number."""

    def run(epochs: int, checkpoint: Path | None = None):
        module = make_module()
        callbacks = [SpectralConditioning(), ConditionedTokens(), ConditionNumberMonitor(every_n_steps=1)]
        trainer = make_trainer(folder, callbacks, devices=2, strategy="ddp", max_epochs=epochs)
        trainer.fit(module, make_loader(), ckpt_path=checkpoint)
        return module, trainer

    whole, trainer = run(3)
    for key in ("cond/query/mean", "cond/tokens/mean"):
        value = float(trainer.callback_metrics[key])
        assert trainer.strategy.reduce(torch.tensor(value), reduce_op="max") == value, key
    _, trainer = run(2)
    trainer.save_checkpoint(folder / "ddp.ckpt")
    trainer.strategy.barrier()
    rest, _ = run(3, folder / "ddp.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))


class Sharded(TinyModule):
    """Builds and shards its network in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            self.net = TinyTransformer()
            if isinstance(self.trainer.strategy, ModelParallelStrategy):
                for block in self.net.blocks:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


def model_parallel(folder: Path) -> None:
    """Sharded parameters give what whole ones give; full and sharded checkpoints resume (trap 11)."""

    def run(epochs: int, sharded: bool, whole_file: bool = True, checkpoint: Path | None = None):
        module = Sharded()
        kinds = {"devices": 1}
        if sharded:
            strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=not whole_file)
            kinds = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
        trainer = make_trainer(folder, [SpectralConditioning()], max_epochs=epochs, **kinds)
        seen = []

        class Look(pl.Callback):
            def on_train_end(self, trainer, pl_module):
                for name, weight in conditioned_weights(pl_module):
                    value = weight.current_effective
                    seen.append((name, value.full_tensor() if sharded else value))
                if epochs == 1:
                    trainer.save_checkpoint(folder / f"{'full' if whole_file else 'parts'}.ckpt")

        trainer.callbacks.append(Look())
        # Both processes see the same batches, so one process that sees them is the reference.
        trainer.fit(module, make_loader(), ckpt_path=checkpoint)
        return dict(seen), trainer

    reference, _ = run(2, sharded=False)
    straight, _ = run(2, sharded=True)
    for whole_file in (True, False):
        run(1, sharded=True, whole_file=whole_file)
        resumed, _ = run(2, sharded=True, checkpoint=folder / f"{'full' if whole_file else 'parts'}.ckpt")
        for name, value in reference.items():
            assert largest_difference(straight[name], value) < 1e-5, name
            assert largest_difference(resumed[name], value) < 1e-5, (name, whole_file)


if __name__ == "__main__":
    case, folder = sys.argv[1], Path(sys.argv[2])
    if case in ("ddp_spawn", "ddp_fork"):
        launched(case, folder)
    else:
        {"ddp": ddp, "model_parallel": model_parallel}[case](folder)
    print("case passed")
