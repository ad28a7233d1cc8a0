"""Programs of several processes: `python -m tests.process_cases CASE+CASE FOLDER`, run by callbacks/test_processes.py.

In those that compare losses, two processes share the batches of the one-process run: each takes every other sample.
"""

import json
import math
import sys
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset, Subset

import lit_cond
from lit_cond.callbacks import ConditionedTokens, ConditionNumberMonitor, SpectralConditioning, StrengthSchedule
from lit_cond.errors import ConfigurationError, LitCondError
from lit_cond.surgery import find_attention, strengths
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import (
    Block,
    TinyModule,
    TinyTransformer,
    largest_difference,
    make_loader,
    make_module,
    make_trainer,
    outputs,
)

PLACES = ("init", "setup", "configure_model")


class Shared(TinyModule):
    """Builds its network in one of three places, and shards it where the strategy leaves that to the module."""

    def __init__(self, where: str = "init", own_units: bool = False, **kwargs) -> None:
        super().__init__(lr=1e-3, **kwargs)
        self.where, self.own_units, self.net = where, own_units, None
        self.build("init")

    def build(self, place: str) -> None:
        if self.where == place and self.net is None:
            torch.manual_seed(0)
            self.net = TinyTransformer(self.hparams.attention)

    def setup(self, stage):
        self.build("setup")

    def configure_model(self):
        self.build("configure_model")
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            self.shard(self.device_mesh)

    def shard(self, mesh):
        for block in self.net.blocks:
            if self.own_units:
                fully_shard(block.attn.qkv, mesh=mesh["data_parallel"])
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self.net, mesh=mesh["data_parallel"])

    def train_dataloader(self):
        rank, world = (0, 1) if self.trainer.strategy.world_size == 1 else self.place()
        whole = make_loader().dataset
        return DataLoader(Subset(whole, range(rank, len(whole), world)), batch_size=16 // world)

    def place(self) -> tuple[int, int]:
        return self.trainer.global_rank, self.trainer.world_size

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, foreach=False)


class TensorParallel(Shared):
    """Every process sees all samples and computes a part of each projection."""

    def shard(self, mesh):
        plan = {f"{name}_proj": ColwiseParallel(output_layouts=Replicate()) for name in "qkv"}
        for block in self.net.blocks:
            parallelize_module(block.attn, mesh["tensor_parallel"], plan)

    def place(self):
        return 0, 1


class CpuFSDP(FSDPStrategy):
    """Lightning's FSDP strategy without its demand for a GPU."""

    def _setup_model(self, model):
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return model
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(
            model, device_id=cpu, mixed_precision=self.mixed_precision_config, **self.kwargs
        )


class Keep(pl.Callback):
    """Stores what the model computes when training ends, and the losses over all processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer, pl_module):
        # Through the strategy's wrapper, which makes sharded weights whole.
        result = outputs(trainer.model)
        losses = trainer.strategy.reduce(torch.tensor(pl_module.losses, dtype=torch.float64), reduce_op="mean")
        if trainer.is_global_zero:
            torch.save({"outputs": result, "losses": losses}, self.path)
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:  # raw weights say so, under every strategy; the checkpoint holds effective ones
            corrected = sum(1 for _ in conditioned_weights(pl_module))
            assert sum(name.endswith("_without_correction") for name in state) == corrected, list(state)
        trainer.save_checkpoint(self.path.with_suffix(".ckpt"))


def train(folder, module, callbacks=(), name="kept", checkpoint=None, **kinds):
    """Train for two epochs; return the trainer and what was stored."""
    path = folder / f"{name}.pt"
    settings = {"max_epochs": 2, "use_distributed_sampler": False, **kinds}
    trainer = make_trainer(folder, [*callbacks, Keep(path)], **settings)
    trainer.fit(module, ckpt_path=checkpoint)
    return trainer, torch.load(path)


def shares(folder: Path, strategy, places=PLACES, kind=Shared, reference_kind=Shared, **kwargs) -> None:
    """Two processes compute the losses of one; their last checkpoint is a plain one (B3, B7, A4)."""
    _, reference = train(folder, reference_kind(**kwargs), [SpectralConditioning()])
    for where in places:
        module = kind(where, **kwargs)
        chosen = strategy() if callable(strategy) else strategy
        trainer, shared = train(folder, module, [SpectralConditioning()], where, devices=2, strategy=chosen)
        difference = largest_difference(shared["losses"], reference["losses"])
        assert len(shared["losses"]) == 8
        assert difference < 1e-6, (where, difference)
        assert largest_difference(shared["outputs"], reference["outputs"]) < 1e-5, where
        paths = [folder / f"{where}.ckpt"]
        if strategy in ("ddp_spawn", "ddp_fork"):
            # The main process has no network to take the weights unless it was built there.
            if where == "init":
                assert largest_difference(outputs(module), shared["outputs"]) == 0, "other weights came back"
                trainer.save_checkpoint(folder / "main.ckpt")
                paths.append(folder / "main.ckpt")
                with pytest.raises(LitCondError, match="well conditioned"):
                    train(folder, module, [SpectralConditioning()])
        else:
            paths.append(folder / f"{where}_after_fit.ckpt")
            trainer.save_checkpoint(paths[-1])
            trainer.strategy.barrier()
        for path in paths:
            plain = TinyModule(module.hparams.attention)
            plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
            # Products of parts are rounded in other places than whole ones.
            assert largest_difference(outputs(plain), shared["outputs"]) < 1e-6, path
            assert not list(conditioned_weights(plain))


def ddp_spawn(folder: Path) -> None:
    """Processes that start anew, train, and hand the weights back (trap 10, problem B3)."""
    shares(folder, "ddp_spawn", places=["init"])


def ddp_fork(folder: Path) -> None:
    """The same for copies of the process, as notebooks use them (`ddp_notebook`)."""
    shares(folder, "ddp_fork")


def ddp(folder: Path) -> None:
    """Losses of one process; resume is exact; every process reports the same condition number and strength."""
    shares(folder, "ddp")

    class Apart(pl.Callback):
        """Logs another value in each process."""

        def on_train_batch_end(self, trainer, pl_module, *args):
            pl_module.log("apart", 1.0 + trainer.global_rank, sync_dist=False)

    def run(epochs: int, checkpoint: Path | None = None):
        module = make_module()
        callbacks = [
            Apart(),
            SpectralConditioning(),
            ConditionedTokens(),
            ConditionNumberMonitor(every_n_steps=1),
            StrengthSchedule("measured", 0.5, every_n_steps=1, monitor="apart", target=0.5, applies_to="weights"),
        ]
        trainer = make_trainer(folder, callbacks, devices=2, strategy="ddp", max_epochs=epochs)
        trainer.fit(module, make_loader(), ckpt_path=checkpoint)
        return module, trainer

    whole, trainer = run(3)
    assert [site.name for site in find_attention(trainer.model)] == [f"net.blocks.{i}.attn" for i in (0, 1)]  # A9
    values = [float(trainer.callback_metrics[key]) for key in ("cond/query/mean", "cond/tokens/mean")]
    moved = strengths(whole, "weights")
    assert moved[0] > 0.5, "the schedule did not move"
    for value in (*values, *moved):
        for operation in ("max", "min"):
            assert float(trainer.strategy.reduce(torch.tensor(value), reduce_op=operation)) == value
    _, trainer = run(2)
    trainer.save_checkpoint(folder / "ddp.ckpt")
    trainer.strategy.barrier()
    rest, _ = run(3, folder / "ddp.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))


def siamese(folder: Path) -> None:
    """A10: a module called twice before backward, and what only the first process logs, are no trouble."""

    class Twice(TinyModule):
        def training_step(self, batch, batch_idx):
            first, second = self(batch[0]), self(batch[0].flip(0))
            if self.global_rank == 0:
                self.log("first", 2.0, rank_zero_only=True)
            return torch.nn.functional.mse_loss(first, second.detach()) + second.square().mean()

    torch.manual_seed(0)
    module = Twice()
    schedule = StrengthSchedule("measured", 0.5, every_n_steps=1, monitor="first", target=1.0)
    callbacks = [SpectralConditioning(), ConditionedTokens(), schedule]
    trainer = make_trainer(folder, callbacks, devices=2, strategy="ddp", max_epochs=2)
    trainer.fit(module, make_loader())
    for value in strengths(module):
        assert value > 0.5
        for operation in ("max", "min"):
            assert float(trainer.strategy.reduce(torch.tensor(value), reduce_op=operation)) == value
    for parameter in module.parameters():
        mean = trainer.strategy.reduce(parameter.detach().clone(), reduce_op="mean")
        assert torch.equal(mean, parameter)


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


def fully_sharded(full_file: bool = True):
    return ModelParallelStrategy(2, 1, save_distributed_checkpoint=not full_file)


def model_parallel(folder: Path) -> None:
    """Sharded parameters give what whole ones give; full and sharded checkpoints resume (trap 11)."""
    shares(folder, fully_sharded)
    # Where the projection is a unit of its own, the block's forward begins before its weight is whole.
    shares(folder, fully_sharded, places=["init"], own_units=True)

    def run(epochs: int, sharded: bool, whole_file: bool = True, checkpoint: Path | None = None):
        kinds = {"devices": 2, "strategy": fully_sharded(whole_file)} if sharded else {"devices": 1}
        monitor = ConditionNumberMonitor(every_n_steps=3, quantities=["query", "scores", "jacobian"])
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

        callbacks = [SpectralConditioning(), monitor, Look()]
        trainer = make_trainer(folder, callbacks, max_epochs=epochs, use_distributed_sampler=False, **kinds)
        # Both processes see the same batches, so one process that sees them is the reference.
        trainer.fit(Shared("configure_model"), make_loader(), ckpt_path=checkpoint)
        return dict(seen)

    reference = run(2, sharded=False)
    straight = run(2, sharded=True)
    for whole_file in (True, False):
        run(1, sharded=True, whole_file=whole_file)
        resumed = run(2, sharded=True, checkpoint=folder / f"{'full' if whole_file else 'parts'}.ckpt")
        for name, value in reference.items():
            # Condition numbers in parts of themselves; they magnify rounding.
            scale = float(value) * 10 if name.startswith("cond") else 1.0
            assert largest_difference(straight[name], value) < 1e-5 * scale, name
            assert largest_difference(resumed[name], value) < 1e-5 * scale, (name, whole_file)


def again(folder: Path) -> None:
    """B1: fit, test and fit of one sharded module correct it once; a module that shards nothing is refused."""

    class Once(Shared):
        sharded = False

        def configure_model(self):
            if not self.sharded:
                self.sharded = True
                super().configure_model()

    def run(kind, **kinds):
        module = kind()
        losses = []
        for stage in ("fit", "test", "fit"):
            callbacks = [SpectralConditioning(), ConditionedTokens()]
            strategy = {"strategy": fully_sharded()} if kinds["devices"] == 2 else {}
            trainer = make_trainer(folder, callbacks, use_distributed_sampler=False, **kinds, **strategy)
            getattr(trainer, stage)(module, make_loader())
            losses.append(float(trainer.callback_metrics["test_loss" if stage == "test" else "loss"]))
        return torch.tensor(losses)

    assert largest_difference(run(Once, devices=2), run(Shared, devices=1)) < 1e-6
    callbacks = [SpectralConditioning(), ConditionedTokens()]
    trainer = make_trainer(folder, callbacks, devices=2, strategy=fully_sharded())
    with pytest.raises(TypeError, match="configure_model"):
        trainer.fit(make_module(), make_loader())


def tensor_parallel(folder: Path) -> None:
    """Weights in parts by columns are corrected as a whole (trap 12)."""
    shares(folder, lambda: ModelParallelStrategy(1, 2, False), kind=TensorParallel, attention="separate")


def flat_sharded(folder: Path) -> None:
    """The same under FSDP's first version, whose shards are pieces of one vector (A4); both kinds of files resume."""

    def strategy(state_dict_type: str = "full"):
        return CpuFSDP(auto_wrap_policy={Block}, state_dict_type=state_dict_type)

    shares(folder, strategy)

    class Look(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.started = outputs(trainer.model)

        def on_train_end(self, trainer, pl_module):
            self.conditions = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("cond/")}

    def run(name, checkpoint=None, **kinds):
        look = Look()
        callbacks = [
            SpectralConditioning(refresh_every_n_steps=3),
            ConditionedTokens(),
            ConditionNumberMonitor(every_n_steps=1, quantities=["query", "key", "value", "tokens"]),
            look,
        ]
        _, kept = train(folder, Shared(), callbacks, name, checkpoint, **kinds)
        return look, kept

    look, reference = run("single")
    shared, straight = run("straight", devices=2, strategy=strategy())
    assert largest_difference(straight["losses"], reference["losses"]) < 1e-6
    for key in ("cond/query/mean", "cond/query/max", "cond/value/max"):
        assert shared.conditions[key] == pytest.approx(look.conditions[key], rel=1e-4), key
    for kind in ("full", "sharded"):
        first = {"devices": 2, "strategy": strategy(kind), "max_epochs": 1}
        _, half = run(f"half_{kind}", **first)
        rest, resumed = run(f"rest_{kind}", folder / f"half_{kind}.ckpt", devices=2, strategy=strategy(kind))
        assert largest_difference(rest.started, half["outputs"]) < 1e-6, kind
        # Without any callback too, Lightning 2.6 resumes from a full file with another state of the optimizer.
        count = 4 if kind == "sharded" else 1
        assert largest_difference(resumed["losses"][:count], straight["losses"][4 : 4 + count]) < 1e-6, kind


def evaluated(folder: Path) -> None:
    """A new process group tests a sharded model from the checkpoint of a conditioned one, tokens included."""
    strategies = {
        "full": fully_sharded,
        "parts": lambda: fully_sharded(full_file=False),
        "flat": lambda: CpuFSDP(auto_wrap_policy={Block}),
        "flat_parts": lambda: CpuFSDP(auto_wrap_policy={Block}, state_dict_type="sharded"),
    }

    class Look(pl.Callback):
        def on_test_end(self, trainer, pl_module):
            self.computed = outputs(trainer.model)

    for name, strategy in strategies.items():
        callbacks = [SpectralConditioning(), ConditionedTokens(strength=0.5)]
        _, kept = train(folder, Shared(), callbacks, name, devices=2, strategy=strategy(), max_epochs=1)
        if name in ("full", "flat"):
            loaded = lit_cond.load_checkpoint(TinyModule, folder / f"{name}.ckpt")
            assert largest_difference(outputs(loaded), kept["outputs"]) < 1e-6, name
        look, fresh = Look(), Shared()
        torch.nn.init.zeros_(fresh.net.head.weight)
        callbacks = [SpectralConditioning(), ConditionedTokens(strength=0.5), look]
        trainer = make_trainer(folder, callbacks, devices=2, strategy=strategy())
        path = str(folder / f"{name}.ckpt")
        if name.startswith("flat"):
            # This strategy loads before any hook could add what the checkpoint records.
            message = r"net\.blocks\.0\.conditioned_tokens" if name == "flat" else r"'net\.blocks\.0'.*load_checkpoint"
            with pytest.raises(RuntimeError, match=message):
                trainer.test(fresh, make_loader(), ckpt_path=path, verbose=False)
            continue
        trainer.test(fresh, make_loader(), ckpt_path=path, verbose=False)
        assert largest_difference(look.computed, kept["outputs"]) < 1e-6, name


class Stream(IterableDataset):
    """Samples without a length; the second process has more of them."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.batches):
            yield torch.randn(4, 6, 12, generator=generator), torch.zeros(4, dtype=torch.long)


def unequal(folder: Path) -> None:
    """H7: 10 and 11 batches are an error by name where loaders have a length."""

    class Uneven(TinyModule):
        def train_dataloader(self):
            return make_loader(16 * (10 + self.global_rank))

        def val_dataloader(self):
            return make_loader(16 * (10 + self.global_rank))

    kinds = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    for callback in (SpectralConditioning(), ConditionedTokens(), ConditionNumberMonitor()):
        with pytest.raises(ConfigurationError, match=r"10, 11 training batches .* limit_train_batches=10"):
            make_trainer(folder, [callback], **kinds).fit(Uneven())
    with pytest.raises(ConfigurationError, match=r"10, 11 validation batches .* limit_val_batches=10"):
        make_trainer(folder, [SpectralConditioning()], limit_train_batches=10, **kinds).fit(Uneven())
    make_trainer(folder, [SpectralConditioning()], limit_train_batches=10, limit_val_batches=10, **kinds).fit(Uneven())


def unequal_streams(folder: Path) -> None:
    """H7: without a length, more batches in one process are the error of the strategy's timeout at the epoch's end."""

    class Streaming(TinyModule):
        def train_dataloader(self):
            return DataLoader(Stream(10 + self.global_rank), batch_size=None)

    strategy = DDPStrategy(timeout=timedelta(seconds=5))
    trainer = make_trainer(folder, [SpectralConditioning()], devices=2, strategy=strategy, max_epochs=2)
    with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout|closed|reset"):
        trainer.fit(Streaming())
    assert trainer.current_epoch == 0


def flat_refusals(folder: Path) -> None:
    """What can not be right under FSDP's first version is refused with what to do."""

    class Flat(Shared):
        def configure_optimizers(self):
            return torch.optim.SGD(self.trainer.model.parameters(), lr=1e-2)

    class Wrapped(Shared):
        def configure_model(self):
            self.net.blocks[0] = FullyShardedDataParallel(self.net.blocks[0], device_id=torch.device("cpu"))

    for module, kinds, message in (
        (Flat(), {"use_orig_params": False}, "use_orig_params"),
        (Wrapped(), {}, r"let the strategy wrap it afterwards: FSDPStrategy\(auto_wrap_policy"),
    ):
        with pytest.raises(LitCondError, match=message):
            train(folder, module, [SpectralConditioning()], devices=2, strategy=CpuFSDP(**kinds))


PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")


class Simple(Shared):
    """With an optimizer that is at home in every precision: AdamW's epsilon is zero in float16."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2, foreach=False)


def table(folder: Path) -> None:
    """Which strategies train in which precisions; the answers as JSON, for test_strategies.py to compare."""
    strategies = {
        "auto": lambda: "auto",
        "ddp": lambda: "ddp",
        "fsdp": lambda: CpuFSDP(auto_wrap_policy={Block}),
        "fully_shard": fully_sharded,
    }
    answers: dict[str, str] = {}
    for name, strategy in strategies.items():
        for precision in PRECISIONS:
            places = PLACES if precision in ("32-true", "bf16-true") else PLACES[:1]
            found = {cell(folder, strategy(), precision, where, 1 if name == "auto" else 2) for where in places}
            answers[f"{name} {precision}"] = " / ".join(sorted(found))
    (folder / "table.json").write_text(json.dumps(answers))


def cell(folder: Path, strategy, precision: str, where: str, devices: int) -> str:
    module = Simple(where)
    seen = []

    class Look(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            with trainer.precision_plugin.forward_context():
                x = trainer.precision_plugin.convert_input(next(iter(make_loader()))[0])
                seen.append(trainer.model.eval()(x).detach())
            trainer.save_checkpoint(folder / "cell.ckpt")
            trainer.strategy.barrier()

    try:
        trainer = make_trainer(
            folder,
            [SpectralConditioning(), Look()],
            devices=devices,
            strategy=strategy,
            precision=precision,
            use_distributed_sampler=False,
        )
        trainer.fit(module)
    except (ValueError, TypeError, RuntimeError, LitCondError) as error:
        return f"{type(error).__name__}: {error}"
    if not all(math.isfinite(loss) for loss in module.losses):
        return "not finite"
    state = torch.load(folder / "cell.ckpt", weights_only=True)["state_dict"]
    dtype = state["net.blocks.0.attn.qkv.weight"].dtype
    plain = TinyModule().to(dtype)
    plain.load_state_dict(state, strict=True)
    worst = max(report.effective for report in lit_cond.surgery.measure_weights(plain))
    with trainer.precision_plugin.forward_context():
        x = trainer.precision_plugin.convert_input(next(iter(make_loader()))[0])
        difference = float((plain.eval()(x.to(dtype)).detach() - seen[0]).abs().max())
    limit = {"3": 1e-6, "6": 1e-12, "b": 0.04, "1": 0.01}[precision[0]]
    trainer.strategy.barrier()
    if worst > 2.05 or difference > limit:
        return f"wrong: condition number {worst:.3f}, outputs differ by {difference:.1e}"
    return "works"


if __name__ == "__main__":
    cases, folder = sys.argv[1].split("+"), Path(sys.argv[2])
    for case in cases:
        globals()[case](folder)
    print("case passed")
