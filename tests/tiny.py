"""Small models and data that the tests share."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lit_cond.surgery import register_fused

WIDTH, HEADS, DEPTH, TOKENS, INPUTS, CLASSES = 32, 4, 2, 6, 12, 5


class FusedAttention(nn.Module):
    """Query, key and value in one Linear, called as a module."""

    def __init__(self, width: int = WIDTH, num_heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def project(self, x):
        return self.qkv(x)

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.project(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0))
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class FunctionalAttention(FusedAttention):
    """Reads the fused weight instead of calling the Linear, as BEiT and Swin do."""

    def project(self, x):
        return F.linear(x, self.qkv.weight, self.qkv.bias)


class SeparateAttention(nn.Module):
    """Three Linear layers."""

    def __init__(self, width: int = WIDTH, num_heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class TorchAttention(nn.Module):
    """torch's own multi-head attention."""

    def __init__(self, width: int = WIDTH, num_heads: int = HEADS) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(width, num_heads, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x, need_weights=False)[0]


ATTENTION = {
    "fused": FusedAttention,
    "functional": FunctionalAttention,
    "separate": SeparateAttention,
    "torch": TorchAttention,
}
register_fused(FusedAttention, "qkv")
register_fused(FunctionalAttention, "qkv")


class Block(nn.Module):
    def __init__(self, attention: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = ATTENTION[attention]()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyTransformer(nn.Module):
    """Two blocks on sequences of six tokens with twelve features."""

    def __init__(self, attention: str = "fused", depth: int = DEPTH, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.checkpointing = checkpointing

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x).mean(1))


class TinyModule(pl.LightningModule):
    """The kind of LightningModule that a user has; knows nothing of lit_cond."""

    def __init__(self, attention: str = "fused", lr: float = 1e-2, checkpointing: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = TinyTransformer(attention, checkpointing=checkpointing)
        self.losses: list[float] = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.1)


class ResumableLoader(DataLoader):
    """A loader that knows how many batches it has given, which Lightning needs to resume within an epoch."""

    given = 0
    resume_at = 0

    def __iter__(self):
        start, self.resume_at = self.resume_at, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= start:
                self.given = index + 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.resume_at = state["given"]


def make_loader(samples: int = 64, batch_size: int = 16, seed: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, TOKENS, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    return ResumableLoader(TensorDataset(x, y), batch_size=batch_size)


def make_trainer(tmp_path, callbacks=(), **kwargs) -> pl.Trainer:
    settings = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "accelerator": "cpu",
        "devices": 1,
        **kwargs,
    }
    return pl.Trainer(default_root_dir=tmp_path, callbacks=list(callbacks), **settings)


def make_module(seed: int = 0, **kwargs) -> TinyModule:
    torch.manual_seed(seed)
    return TinyModule(**kwargs)


@torch.no_grad()
def outputs(model: nn.Module) -> torch.Tensor:
    """The model's outputs on the first batch, in evaluation mode."""
    was_training = model.training
    model.eval()
    result = model(next(iter(make_loader()))[0])
    model.train(was_training)
    return result


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())
