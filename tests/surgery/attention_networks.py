"""Networks with attention, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUT = (5, 6)


class Fused(nn.Module):
    """One layer for queries, keys and values, taken apart in one of the usual ways."""

    def __init__(self, dim: int = 32, heads: int = 4, way: str = "chunk") -> None:
        super().__init__()
        self.heads, self.way, self.dim = heads, way, dim
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        y, each = self.qkv(x), width // self.heads
        if self.way == "chunk":
            q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in y.chunk(3, -1))
        elif self.way == "split":
            q, k, v = (t.view(rows, length, self.heads, each).transpose(1, 2) for t in y.split(self.dim, dim=2))
        elif self.way == "reshape":
            q, k, v = y.reshape(rows, length, 3, self.heads, each).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = y.reshape(rows, length, self.heads, 3, each).permute(3, 0, 2, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(rows, length, width))


class Softmax(nn.Module):
    """A softmax of products, heads in an axis of their own or in the batch, by `matmul`, `bmm` or `einsum`."""

    def __init__(self, dim: int = 32, heads: int = 4, way: str = "matmul", inner: int | None = None) -> None:
        super().__init__()
        inner = inner or dim
        self.num_heads, self.head_dim, self.way = heads, inner // heads, way
        self.q, self.k, self.v = (nn.Linear(dim, inner) for _ in range(3))
        self.out = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], self.num_heads, self.head_dim) for f in (self.q, self.k, self.v))
        if self.way == "einsum":
            scores = torch.einsum("bthd,bshd->bhts", q, k) * self.head_dim**-0.5
            return self.out(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(*x.shape[:2], -1))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.way == "bmm":
            q, k, v = (t.reshape(-1, x.shape[1], self.head_dim) for t in (q, k, v))
            y = torch.bmm(F.softmax(torch.bmm(q, k.mT) * self.head_dim**-0.5, -1), v)
            y = y.view(len(x), self.num_heads, x.shape[1], self.head_dim)
        else:
            y = (q @ k.mT * self.head_dim**-0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class OwnNorm(nn.Module):
    """A norm that holds a power of its width."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale, self.gain = dim**0.5, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * self.gain


class Grouped(nn.Module):
    """Query heads in groups that share keys and values, and a norm of each head's queries."""

    def __init__(self, dim: int = 32, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim, self.n_rep = heads, shared, dim // heads, heads // shared
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = (nn.Linear(dim, shared * self.head_dim, bias=False) for _ in range(2))
        self.norm = OwnNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.wq(x).view(*x.shape[:2], self.n_head, self.head_dim)).transpose(1, 2)
        k, v = (f(x).view(*x.shape[:2], self.n_kv_head, self.head_dim).transpose(1, 2) for f in (self.wk, self.wv))
        k, v = (t.repeat_interleave(self.n_rep, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Own(nn.Module):
    """Torch's attention of a sequence with itself."""

    def __init__(self, dim: int = 32, heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.attention.batch_first else x.transpose(0, 1)
        y: Tensor = self.attention(x, x, x)[0]
        return y if self.attention.batch_first else y.transpose(0, 1)


class Parts(nn.Module):
    """The sizes of the parts are a list, and other numbers look like widths."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.sizes, self.h, self.max_length, self.block_size = [dim] * 3, heads, dim, dim
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Held(nn.Module):
    """The numbers are in a configuration, and a buffer is the causal mask."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_head=heads, n_embd=dim, block_size=dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("bias", torch.ones(dim, dim).tril().view(1, 1, dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.c_attn(x).split(self.config.n_embd, dim=2)
        heads = self.config.n_head
        q, k, v = (t.view(rows, length, heads, width // heads).transpose(1, 2) for t in parts)
        scores = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5
        weights = scores.masked_fill(self.bias[:, :, :length, :length] == 0, -torch.inf).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).contiguous().view(rows, length, width))


class Rearranged(nn.Module):
    """Heads are taken apart by einops, which computes the sizes itself."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange

        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in self.to_qkv(x).chunk(3, -1))
        y = torch.matmul((torch.matmul(q, k.mT) * self.scale).softmax(-1), v)
        return self.to_out(rearrange(y, "b h n d -> b n (h d)"))


class Relative(nn.Module):
    """A table of relative positions with an entry for each head."""

    def __init__(self, dim: int = 32, heads: int = 4, length: int = 5) -> None:
        super().__init__()
        self.num_heads, self.length = heads, length
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.randn(2 * length - 1, heads))
        steps = torch.arange(length)
        self.register_buffer("index", steps.unsqueeze(1) - steps + length - 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * k.shape[-1] ** -0.5 + self.table[self.index].permute(2, 0, 1)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width))


class Keyed(Relative):
    """A number that is held is the key of a table."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * {5: 0.5, 6: 1.0}[self.length]
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 8)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, dim: int = 32, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.one, self.two, self.attention = norm(dim), norm(dim), attention
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.one(x))
        return x + self.mlp(self.two(x))


class Net(nn.Module):
    """Blocks over an embedded sequence with positions."""

    def __init__(
        self, build: Callable[[], nn.Module], dim: int = 32, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(6, dim), nn.Parameter(torch.randn(1, 5, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(build(), dim, norm) for _ in range(2)])
        self.norm, self.head = norm(dim), nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.position)).mean(1))


class Translator(nn.Module):
    """Torch's encoder and decoder, with masks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.read, self.write, self.head = nn.Linear(6, 32), nn.Linear(6, 32), nn.Linear(32, 3)
        encoder = nn.TransformerEncoderLayer(32, 4, 64, **options)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, **options), 2)
        self.batch_first = options.get("batch_first", False)

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.read(x), self.write(x)
        if not self.batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        padding = torch.zeros(len(x), 5, dtype=torch.bool)
        padding[:, 4] = True
        memory = self.encoder(source, src_key_padding_mask=padding)
        y = self.decoder(target, memory, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=padding)
        return self.head((y if self.batch_first else y.transpose(0, 1)).mean(1))


class Padded(nn.Module):
    """Torch's encoder, which in evaluation may take padded positions out."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = nn.Linear(6, 32), nn.Linear(32, 3)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, 3:] = True
        y = self.encoder(self.read(x), src_key_padding_mask=padding)
        return self.head((y * ~padding.unsqueeze(-1)).sum(1))


class TwoSizes(nn.Module):
    """Heads of two sizes over the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = nn.Linear(6, 32), nn.Linear(32, 3)
        self.few, self.many = Block(Softmax(heads=4)), Block(Softmax(heads=8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.many(self.few(self.read(x))).mean(1))


class Maps(nn.Module):
    """Attention between the places of a feature map, made by convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.first, self.norm = 4, nn.Conv1d(5, 32, 3, padding=1), nn.BatchNorm1d(32)
        self.qkv, self.out, self.head = nn.Conv1d(32, 96, 1), nn.Conv1d(32, 32, 1), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        rows, width, places = x.shape
        q, k, v = self.qkv(x).reshape(rows, 3, self.heads, width // self.heads, places).unbind(1)
        y = v @ (q.mT @ k * (width // self.heads) ** -0.5).softmax(-1).mT
        return self.head((x + self.out(y.reshape(rows, width, places))).mean(-1))


class Cross(nn.Module):
    """Attention to a memory of another width, with learned extra keys."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.memory, self.head = nn.Linear(6, 32), nn.Linear(6, 20), nn.Linear(32, 3)
        options: dict[str, Any] = {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True}
        self.attention = nn.MultiheadAttention(32, 4, kdim=20, vdim=20, **options)

    def forward(self, x: Tensor) -> Tensor:
        y, memory = self.read(x), self.memory(x)
        return self.head((y + self.attention(y, memory, memory, need_weights=False)[0]).mean(1))


class Language(nn.Module):
    """A language model whose head shares the embedding's weight."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(8, 32)
        self.block, self.norm, self.head = Block(Fused(way="split")), nn.LayerNorm(32), nn.Linear(32, 50, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.block(x)))


ATTENTION: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "chunk": (lambda: Net(Fused), {"blocks.1.attention.heads": 2, "blocks.1.attention.qkv.out_features": 48}),
    "split": (lambda: Net(lambda: Fused(way="split")), {"blocks.0.attention.heads": 2, "blocks.0.attention.dim": 16}),
    "reshape": (lambda: Net(lambda: Fused(way="reshape")), {"blocks.0.attention.heads": 2}),
    "heads_first": (lambda: Net(lambda: Fused(way="heads")), {"blocks.0.attention.heads": 2}),
    "one_head": (lambda: Net(lambda: Fused(heads=1)), {"blocks.0.attention.heads": 1, "embed.out_features": 32}),
    "softmax": (lambda: Net(Softmax), {"blocks.0.attention.num_heads": 2, "blocks.0.attention.head_dim": 8}),
    "bmm": (lambda: Net(lambda: Softmax(way="bmm")), {"blocks.1.attention.num_heads": 2}),
    "einsum": (lambda: Net(lambda: Softmax(way="einsum")), {"blocks.0.attention.num_heads": 2}),
    "wide": (lambda: Net(lambda: Softmax(inner=64)), {"blocks.0.attention.q.out_features": 32}),
    "small": (lambda: Net(lambda: Softmax(inner=16)), {"blocks.0.attention.q.out_features": 8}),
    "three_heads": (
        lambda: Net(lambda: Softmax(48, 3), 48), {"blocks.0.attention.num_heads": 2, "embed.out_features": 32},
    ),
    "grouped": (lambda: Net(Grouped), {"blocks.0.attention.n_head": 2, "blocks.0.attention.n_kv_head": 1}),
    "own_norm": (lambda: Net(Grouped, norm=OwnNorm), {"blocks.0.attention.wk.out_features": 8}),
    "rms_norm": (lambda: Net(Grouped, norm=nn.RMSNorm), {"blocks.0.attention.wq.out_features": 16}),
    "torch": (lambda: Net(lambda: Own(batch_first=True)), {"blocks.0.attention.attention.num_heads": 2}),
    "length_first": (lambda: Net(Own), {"blocks.0.attention.attention.embed_dim": 16}),
    "no_bias": (lambda: Net(lambda: Own(bias=False)), {"blocks.0.attention.attention.head_dim": 8}),
    "translator": (lambda: Translator(batch_first=True), {"decoder.layers.1.multihead_attn.num_heads": 2}),
    "norm_first": (lambda: Translator(norm_first=True), {"encoder.layers.0.self_attn.num_heads": 2}),
    "parts": (
        lambda: Net(Parts),
        {"blocks.0.attention.h": 2, "blocks.0.attention.max_length": 32, "blocks.1.attention.block_size": 32},
    ),
    "held": (
        lambda: Net(Held), {"blocks.0.attention.config.n_head": 2, "blocks.0.attention.config.block_size": 32},
    ),
    "relative": (lambda: Net(Relative), {"blocks.1.attention.num_heads": 2}),
    "keyed": (lambda: Net(Keyed), {"blocks.0.attention.length": 5}),
    "padded": (Padded, {"encoder.layers.1.self_attn.num_heads": 2}),
    "two_sizes": (TwoSizes, {"few.attention.num_heads": 2, "many.attention.num_heads": 4}),
    "maps": (Maps, {"heads": 2, "qkv.out_channels": 48}),
    "cross": (Cross, {"attention.num_heads": 2, "attention.kdim": 10, "attention.embed_dim": 16}),
}  # fmt: skip
"""How a network is built, and what of it is what in a member of half its width."""
