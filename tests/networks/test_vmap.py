"""The vmapped runner: any network's own code for all members at once, and the functions that it puts in other words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.ensemble.runners.member_size import convolves
from multitudes.ensemble.runners.selection import INDEPENDENT, Workload, runners_for
from multitudes.networks import vmap as module
from multitudes.networks.vmap import products, vmap_level

# -- networks ----------------------------------------------------------------------------------------------

TEXT = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 24, "num_labels": 5,
}  # fmt: skip


def texts() -> dict[str, Tensor]:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.randint(5, 40, (3, 9)).masked_fill(mask == 0, 1), "attention_mask": mask}


def images(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, size, size)}


def hugging_face(name: str, head: str = "ForImageClassification", **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(num_labels=5, **settings))


def vit() -> nn.Module:
    return hugging_face(
        "ViT", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16,
        patch_size=4,
    )  # fmt: skip


def text_model(name: str, **settings: Any) -> nn.Module:
    return hugging_face(name, "ForSequenceClassification", **{k: v for k, v in TEXT.items() if k != "num_labels"},
                        pad_token_id=1, **settings)  # fmt: skip


def distilbert() -> nn.Module:
    return hugging_face(
        "DistilBert", "ForSequenceClassification", vocab_size=40, dim=16, n_layers=1, n_heads=2, hidden_dim=32,
        max_position_embeddings=24,
    )  # fmt: skip


def gpt2() -> nn.Module:
    return hugging_face(
        "GPT2", "ForSequenceClassification", vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=24,
        pad_token_id=1, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip


def swin() -> nn.Module:
    return hugging_face("Swin", image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4)


def segformer() -> nn.Module:
    return hugging_face(
        "Segformer", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    )  # fmt: skip


def convnext() -> nn.Module:
    return hugging_face("ConvNext", num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], patch_size=2)


class Encoder(nn.Module):
    """Torch's own encoder, of sequences of which the last tokens of the second are padding."""

    def __init__(self, norm_first: bool, batch_first: bool, padded: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.fc = nn.Linear(16, 5)
        self.batch_first, self.padded = batch_first, padded

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[1, 4:] = True
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.encoder(x, src_key_padding_mask=padding if self.padded else None)
        return self.fc(y.mean(1 if self.batch_first else 0))


class Block(nn.Module):
    """Attention written by hand, with grouped queries."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.q, self.kv = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.fc, self.dropout = nn.Linear(16, 5), dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        query = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        key, value = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True, enable_gqa=True)
        return self.fc(y.transpose(1, 2).flatten(2).mean(1))


def sequences() -> Tensor:
    return torch.randn(3, 6, 16)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "vit": (vit, images),
    "bert": (lambda: text_model("Bert"), texts),
    "roberta": (lambda: text_model("Roberta"), texts),
    "distilbert": (distilbert, texts),
    "gpt2": (gpt2, texts),
    "llama": (lambda: text_model("Llama", num_key_value_heads=1), texts),
    "swin": (swin, images),
    "segformer": (segformer, images),
    "convnext": (convnext, images),
    "library": (lambda: mt.models.vit(width=32, depth=1, heads=2, size=16), lambda: torch.randn(3, 3, 16, 16)),
    "block": (Block, sequences),
    **{
        f"encoder, norm_first={norm_first}, batch_first={batch_first}, padded={padded}": (
            lambda args=(norm_first, batch_first, padded): Encoder(*args),
            sequences,
        )
        for norm_first in (False, True)
        for batch_first in (False, True)
        for padded in (False, True)
    },
}  # fmt: skip
SLOW = ("swin", "segformer", "roberta", "distilbert")
every_network = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in NETWORKS]
)


def several(name: str, members: int = 2) -> tuple[mt.Members, Any]:
    build, batch = NETWORKS[name]
    torch.manual_seed(0)
    return mt.fuse([build() for _ in range(members)]), batch()


# -- members at once are members alone -----------------------------------------------------------------------


@pytest.mark.quick(7)
@every_network
def test_each_member_predicts_and_learns_as_it_does_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` compares predictions, gradients and buffers with those of `net.member(i)`, in both modes."""
    monkeypatch.setattr(module, "ONE_BY_ONE_ABOVE", 0)  # as for large batches
    compared = mt.check(*several(name)).compared
    assert any(line.startswith("vmapped: predictions and gradients of 2 members") for line in compared)
    assert "vmapped: no prediction depends on another member's weights" in compared


def test_a_deep_ensemble_of_a_pretrained_model_runs_vmapped() -> None:
    model, x = text_model("Bert"), texts()
    net = mt.deep_ensemble(model, members=3, init="heads", seed=0).eval()
    net.runner = "vmapped"
    together = net(x)
    for index in range(3):
        torch.testing.assert_close(together[index], net.member(index).eval()(**x).logits, rtol=1e-4, atol=1e-5)


def test_a_text_with_other_padding_is_not_mistaken_for_the_first() -> None:
    """A network is proven once for each kind of input; what follows is still its own code."""
    net, x = several("bert")
    net.eval()
    longer = torch.ones(4, 11, dtype=torch.long)
    longer[2, 3:] = longer[0, 7:] = 0
    y = {"input_ids": torch.randint(5, 40, (4, 11)), "attention_mask": longer}
    net.runner = "vmapped"
    net(x)
    together = net(y)
    for index in range(2):
        torch.testing.assert_close(together[index], net.member(index).eval()(**y).logits, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_get_no_gradient() -> None:
    net, x = several("bert")
    for member in net.network:
        member.base_model.embeddings.requires_grad_(False)
    net.runner = "vmapped"
    net.eval()(x).square().sum().backward()
    got = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad()
    net.runner = "loop"
    net(x).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert (got[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Block(dropout=0.5),
        lambda: text_model("Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5),
        lambda: text_model("Bert", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0),
        lambda: Encoder(True, True, True),
    ],
    ids=["attention by hand", "attention", "hidden", "encoder"],
)
def test_equal_members_draw_different_dropout_in_training(build: Callable[[], nn.Module]) -> None:
    model = build()
    x = sequences() if isinstance(model, (Block, Encoder)) else texts()
    net = mt.fuse([model, model])
    net.runner = "vmapped"
    one, other = net.train()(x)
    assert not torch.allclose(one, other)
    one, other = net.eval()(x)
    assert torch.equal(one, other)


def test_the_second_derivative_is_that_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BY_ONE_ABOVE", 0)
    net = mt.fuse([nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)) for _ in range(2)])
    x, found = torch.randn(5, 4), {}
    for runner in ("loop", "vmapped"):
        net.runner = runner
        weights = list(net.parameters())
        slope = torch.autograd.grad(net(x).square().sum(), weights, create_graph=True)
        found[runner] = torch.autograd.grad(sum(g.square().sum() for g in slope), weights)
    torch.testing.assert_close(found["vmapped"], found["loop"], rtol=1e-4, atol=1e-4)


def test_code_that_looks_at_values_is_refused() -> None:
    class Looks(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if y.sum() > 0 else 2 * y

    net = mt.fuse([Looks(), Looks()])
    net.runner = "vmapped"
    with pytest.raises(ValueError, match="runner 'vmapped' cannot run this network"):
        net(sequences())
    net.runner = "auto"
    assert net(sequences()).shape == (2, 3, 5)


def usual(network: nn.Module, device: str, training: bool = False) -> str:
    return runners_for(INDEPENDENT, Workload(device, training, 8, False, convolves=convolves(network)))[0]


def test_auto_takes_vmap_for_transformers_and_packs_convolutions_on_a_gpu() -> None:
    assert usual(several("library")[0].template, "cuda") == "vmapped"
    assert usual(several("bert")[0].template, "cuda") == "vmapped"
    assert usual(mt.models.resnet18(), "cuda") == "packed"
    assert usual(mt.models.resnet18(), "cpu", training=True) == "loop"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert", "swin", "library", "encoder, norm_first=False, batch_first=True, padded=True"]
)
@pytest.mark.parametrize("training", [False, True])
def test_compiled_as_one_graph_it_is_the_loop(name: str, training: bool) -> None:
    net, x = several(name)
    for part in net.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    if hasattr(net.template, "config"):
        for member in net.network:
            member.config.attention_probs_dropout_prob = 0.0
        for part in net.modules():
            vars(part).update({key: 0.0 for key in ("dropout_prob", "drop_prob") if key in vars(part)})
            vars(part).update({key: 0.0 for key, v in vars(part).items() if key == "dropout" and isinstance(v, float)})
    net.train(training)
    net.runner = "loop"
    weights = [p for p in net.parameters() if p.requires_grad]
    want = net(x)
    slopes = torch.autograd.grad(want.square().sum(), weights, allow_unused=True)
    net.runner = "vmapped"
    net(x)
    torch.compiler.reset()  # it makes eight versions of a function and no more
    got = torch.compile(net, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(got.square().sum(), weights, allow_unused=True)
    for one, other in zip(found, slopes, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


# -- functions in other words --------------------------------------------------------------------------------


def each(function: Callable[..., Any], *args: Any, shared: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """A function of stacked arguments by members at once, and one member after the other; arguments may be shared."""
    count = len(args[0])
    with vmap_level(count) as members:
        own = [members.own(arg) if isinstance(arg, Tensor) and i not in shared else arg for i, arg in enumerate(args)]
        together = members.whole(function(*own))
    alone = [
        function(*(arg[m] if isinstance(arg, Tensor) and i not in shared else arg for i, arg in enumerate(args)))
        for m in range(count)
    ]
    return together, torch.stack(alone)


def compare(function: Callable[..., Any], *args: Any, shared: tuple[int, ...] = ()) -> None:
    """Values and gradients."""
    leaves = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    together, alone = each(function, *args, shared=shared)
    torch.testing.assert_close(together, alone)
    mixture = torch.randn_like(alone)
    slopes = [torch.autograd.grad((y * mixture).sum(), leaves, allow_unused=True) for y in (together, alone)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("above", [0, 2**22])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [(), (0,)])
def test_a_linear_layer(above: int, bias: bool, shared: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BY_ONE_ABOVE", above)
    x, weight = torch.randn(3, 2, 5, 4), torch.randn(3, 6, 4)
    x = x[0] if shared else x
    args = (weight, x, torch.randn(3, 6)) if bias else (weight, x)
    compare(lambda w, x, *b: F.linear(x, w, *b), *args, shared=(1,) if shared else ())


def test_a_product_is_each_members_in_half_precision_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BY_ONE_ABOVE", 0)
    rows, weight, bias = torch.randn(3, 5, 4), torch.randn(3, 6, 4), torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        got = products(rows, weight, bias)
        want = torch.stack([F.linear(*own) for own in zip(rows, weight, bias, strict=True)])
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_a_table_of_embeddings(padding_idx: int | None) -> None:
    index = torch.tensor([[0, 2, 6], [6, 6, 1]])
    compare(lambda w, i: F.embedding(i, w, padding_idx), torch.randn(3, 7, 4), index, shared=(1,))
    compare(lambda w, i: F.embedding(i, w, padding_idx), torch.randn(3, 7, 4), torch.randint(7, (3, 2, 5)))


@pytest.mark.parametrize("wrong", [7, -1])
def test_an_index_beyond_the_table_is_an_error_not_another_members_row(wrong: int) -> None:
    with pytest.raises((IndexError, RuntimeError)), vmap_level(3) as members:
        F.embedding(torch.tensor([0, wrong]), members.own(torch.randn(3, 7, 4)))


MASKS: dict[str, Callable[[], Tensor]] = {
    "tokens": lambda: torch.randn(5, 5),
    "of the batch": lambda: torch.rand(2, 1, 1, 5) > 0.3,
    "of every row": lambda: torch.randn(2, 4, 5, 5),
    "of one row": lambda: torch.randn(1, 1, 5, 5),
    "of heads": lambda: torch.randn(4, 5, 5),
}


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("own", [True, False])
def test_attention_with_masks(mask: str, own: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 3, 2, 4, 5, 8)
    hidden = torch.stack([MASKS[mask]() for _ in range(3)]) if own else MASKS[mask]()
    compare(F.scaled_dot_product_attention, query, key, value, hidden, shared=() if own else (3,))


def test_attention_of_any_rank_with_shared_keys_and_grouped_queries() -> None:
    compare(F.scaled_dot_product_attention, *torch.randn(3, 3, 5, 8))
    compare(F.scaled_dot_product_attention, *torch.randn(3, 3, 2, 5, 8))
    compare(F.scaled_dot_product_attention, *torch.randn(3, 3, 2, 2, 2, 5, 8))
    query, key, value = torch.randn(3, 2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(1, 4, 7, 8)
    compare(F.scaled_dot_product_attention, query, key, value, shared=(1, 2))
    grouped = torch.randn(2, 3, 2, 2, 5, 8)
    compare(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), query, *grouped)


FUTURE = nn.Transformer.generate_square_subsequent_mask(5)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of itself": ({}, {"need_weights": False}),
    "with weights": ({}, {}),
    "batch second": ({"batch_first": False}, {"need_weights": False}),
    "without bias": ({"bias": False}, {"need_weights": False}),
    "causal": ({}, {"need_weights": False, "attn_mask": FUTURE, "is_causal": True}),
    "masked": ({}, {"need_weights": False, "attn_mask": torch.randn(5, 5)}),
    "each head masked": ({}, {"need_weights": False, "attn_mask": torch.randn(4, 5, 5)}),
    "hidden": ({}, {"need_weights": False, "attn_mask": FUTURE < 0, "key_padding_mask": torch.eye(5)[3:] > 0}),
    "with extra keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"need_weights": False}),
    "of other widths": ({"kdim": 8, "vdim": 8}, {"need_weights": False}),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("crossed", [False, True])
def test_torchs_attention(call: str, crossed: bool) -> None:
    torch.manual_seed(0)
    settings, options = CALLS[call]

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, **{"batch_first": True} | settings)

        def forward(self, x: Tensor) -> Tensor:
            other = x.flip(-1) if crossed else x
            swap = (lambda t: t) if self.attention.batch_first else (lambda t: t.transpose(0, 1))
            return swap(self.attention(swap(x), swap(other), swap(other), **options)[0])

    compared = mt.check(mt.fuse([Attends(), Attends()]), torch.randn(2, 5, 8)).compared
    assert any(line.startswith("vmapped") for line in compared)
    assert any(line.startswith("packed") for line in compared)


def test_draws_of_members_run_under_two_vmaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_BY_ONE_ABOVE", 0)  # as for products that are large
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))
    net, x = mt.deep_ensemble(mt.mc_dropout(network), 2).eval(), torch.randn(5, 6)
    drawn = {}
    for runner in ("loop", "vmapped"):
        net.runner = runner
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # one says so where draws have to run one after the other
            drawn[runner] = net(x, draws=4, seed=0)
    torch.testing.assert_close(drawn["vmapped"], drawn["loop"])
