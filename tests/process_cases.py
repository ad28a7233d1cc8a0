"""Programs of several processes: `python -m tests.process_cases CASE FOLDER`, run by callbacks/test_processes.py."""

import math
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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


def monitored(folder: Path) -> None:
    """D6, D11: equal numbers in every process, also where one of them has nothing to measure; checkpoints by a key."""
    module = make_module()
    samples = make_loader()
    # The second process begins with samples whose tokens are all the same: singular.
    samples.dataset.tensors[0][1::2][:16] = 0.0
    seen: list[dict[str, float]] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("cond")})

    monitor = ConditionNumberMonitor(every_n_steps=1, intervals={"jacobian": 2})
    saver = ModelCheckpoint(folder, monitor="cond/jacobian/max", save_top_k=2, every_n_train_steps=2, filename="{step}")
    trainer = make_trainer(
        folder, [monitor, Look(), saver], devices=2, strategy="ddp", max_epochs=2, enable_checkpointing=True
    )
    trainer.fit(module, samples)
    assert len(seen) == 4
    for row in seen:
        numbers = torch.tensor([row[key] for key in sorted(row)])
        for operation in ("max", "min"):
            assert torch.equal(trainer.strategy.reduce(numbers, reduce_op=operation).float(), numbers), row
        for quantity in ("query", "tokens", "scores", "jacobian"):
            assert math.isfinite(row[f"cond/{quantity}/mean"]), quantity
    assert len(saver.best_k_models) == 2
    assert float(saver.best_model_score) == min(float(score) for score in saver.best_k_models.values())


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
        monitor = ConditionNumberMonitor(every_n_steps=3, quantities=["query", "scores", "jacobian"])
        trainer = make_trainer(folder, [SpectralConditioning(), monitor], max_epochs=epochs, **kinds)
        seen = []

        class Look(pl.Callback):
            def on_train_end(self, trainer, pl_module):
                for key in ("cond/query/mean", "cond/scores/mean", "cond/jacobian/max"):
                    seen.append((key, trainer.callback_metrics[key].reshape(1)))
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
            # Condition numbers in parts of themselves; they magnify rounding.
            scale = float(value) * 10 if name.startswith("cond") else 1.0
            assert largest_difference(straight[name], value) < 1e-5 * scale, name
            assert largest_difference(resumed[name], value) < 1e-5 * scale, (name, whole_file)


if __name__ == "__main__":
    case, folder = sys.argv[1], Path(sys.argv[2])
    if case in ("ddp_spawn", "ddp_fork"):
        launched(case, folder)
    else:
        {"ddp": ddp, "monitored": monitored, "model_parallel": model_parallel}[case](folder)
    print("case passed")
