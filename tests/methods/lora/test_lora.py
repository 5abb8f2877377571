"""Low-rank adapters as members of one frozen network."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import multitudes as mt
from multitudes.lab.study.spec.method_rows import METHODS
from multitudes.methods.lora.layers import Lora
from tests.zoo.cases import NETWORKS
from tests.zoo.shared_cases import FAMILIES, bert, gpt2, rows_through, swin, tokens, vit


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3))


def moved(net: Any) -> Any:
    """Move the trained parameters, since adapters add nothing at the start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return net


# -- the equation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 6), (7, 5, 6), (7, 2, 5, 6)])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_an_adapted_layer_is_the_papers_equation(kind: str, shape: tuple[int, ...]) -> None:
    base: Any = nn.Linear(6, 8) if kind == "linear" else transformers.pytorch_utils.Conv1D(8, 6)
    layer = moved(Lora(base, 3, rank=2, alpha=5.0))
    x = torch.randn(shape)
    tiled = layer(x.repeat(3, *[1] * (x.dim() - 1))).unflatten(0, (3, 7))
    for i in range(3):
        want = base(x) + 5 / 2 * (x @ layer.A[i].T) @ layer.B[i].T
        torch.testing.assert_close(tiled[i], want)
        torch.testing.assert_close(layer.fold(i)(x), want)
        assert type(layer.fold(i)) is type(base)
        layer.member = i
        torch.testing.assert_close(layer(x), want)
        layer.member = None


@pytest.mark.parametrize("groups", [1, 2])
def test_the_adapter_of_a_convolution_is_two_convolutions(groups: int) -> None:
    base = nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=groups)
    layer = moved(Lora(base, 2, rank=2, alpha=2.0))
    x = torch.randn(5, 4, 8, 8)
    tiled = layer(x.repeat(2, 1, 1, 1)).unflatten(0, (2, 5))
    for i in range(2):
        weight = (layer.B[i] @ layer.A[i]).view(base.weight.shape)
        want = base(x) + F.conv2d(x, weight, None, 2, 1, 1, groups)
        torch.testing.assert_close(tiled[i], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.fold(i)(x), want, rtol=1e-4, atol=1e-5)


def test_adapters_start_as_pefts_do_and_members_differ() -> None:
    net = mt.lora(nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 5)), 4, rank=8, seed=0)
    layer = net.get_submodule("0")
    assert layer.A.shape == (4, 8, 400) and layer.B.shape == (4, 300, 8)
    assert not layer.B.any()
    bound = 1 / 400**0.5
    assert float(layer.A.detach().abs().max()) <= bound and layer.A.detach().abs().max() > 0.99 * bound
    torch.testing.assert_close(layer.A.std(), torch.tensor(bound / 3**0.5), rtol=0.03, atol=0)
    x = torch.randn(5, 400)
    predictions = net(x)
    assert all(not torch.allclose(predictions[i], predictions[j]) for i in range(4) for j in range(i))


def test_only_adapters_and_heads_are_trained() -> None:
    net = mt.lora(bert(), 3, rank=2)
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"A", "B", "weights", "biases"}
    assert {name for name in trained if not name.endswith((".A", ".B"))} == {"classifier.weights", "classifier.biases"}
    adapted = {name for name, module in net.network.named_modules() if isinstance(module, Lora)}
    linear = {name for name, module in bert().named_modules() if isinstance(module, nn.Linear)}
    assert adapted == linear - {"classifier"}
    base = dict(bert().named_parameters())
    held = {name.replace(".layer.weight", ".weight"): p for name, p in net.named_parameters()}
    assert torch.equal(held["bert.encoder.layer.0.attention.self.query.weight"], base[
        "bert.encoder.layer.0.attention.self.query.weight"
    ])  # fmt: skip
    count = sum(p.numel() for p in net.parameters() if p.requires_grad)
    sizes = [sum(base[f"{name}.weight"].shape) for name in adapted]
    assert count == 3 * (2 * sum(sizes) + 3 * 16 + 3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", [bert, vit, gpt2, *FAMILIES])
def test_members_of_a_transformer_predict_and_learn_as_each_alone(model: Callable[[], nn.Module]) -> None:
    x: Any = torch.randn(6, 3, 16, 16) if model in (vit, swin) else tokens(6)
    net = moved(mt.lora(model(), 3, rank=2, alpha=4, seed=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.check(net, x)
        net.train()(x)
    one = x[:1] if isinstance(x, Tensor) else {key: value[:1] for key, value in x.items()}
    torch.testing.assert_close(net.eval()(one), net(x)[:, :1], rtol=1e-4, atol=1e-5)
    for i in range(3):
        member = net.member(i)
        assert {type(module) for module in member.modules()} == {type(module) for module in model().modules()}
        answer = member(x) if isinstance(x, Tensor) else member(**x)
        torch.testing.assert_close(answer.logits, net(x)[i], rtol=1e-4, atol=1e-5)


def test_layers_before_the_first_adapted_one_run_once() -> None:
    x = tokens(6)
    net = mt.lora(bert(), 4, rank=2, layers=lambda name, _: "layer.1." in name, seed=0).train()
    for batch in (x, {key: value[:1] for key, value in x.items()}):
        assert rows_through(net, "bert.encoder.layer.0", batch) == len(batch["input_ids"])
    for batch in (x, {key: value[:1] for key, value in x.items()}):  # more than a quarter of it comes before
        assert rows_through(net.eval(), "bert.encoder.layer.0", batch) == len(batch["input_ids"])


def test_attention_is_adapted_as_a_whole() -> None:
    case = NETWORKS["transformer"]
    net, (x, _) = moved(mt.lora(case.model(), 3, rank=2, seed=0)), case.batch(6)
    assert {module.several for module in net.network.modules() if isinstance(module, Lora)} == {False, True}
    mt.check(net, x)
    whole, base = net.network.encoder.self_attn, case.model().encoder.self_attn
    added = whole.in_proj_weight_B[1] @ whole.in_proj_weight_A[1]
    torch.testing.assert_close(net.member(1).encoder.self_attn.in_proj_weight, base.in_proj_weight + added)


# -- training ----------------------------------------------------------------------------------------------


def test_each_member_learns_exactly_as_it_would_alone() -> None:
    net = moved(mt.lora(mlp(), 4, rank=2, alpha=3, seed=0)).train()
    alone = [mt.lora(mlp(), 1, rank=2, alpha=3) for _ in range(4)]
    for i, other in enumerate(alone):
        own = dict(net.named_parameters())
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter.copy_(own[name][i : i + 1] if parameter.requires_grad else own[name])
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    optimizers = [torch.optim.Adam([p for p in n.parameters() if p.requires_grad], 0.01) for n in (net, *alone)]
    for _ in range(5):
        for one, optimizer in zip((net, *alone), optimizers, strict=True):
            optimizer.zero_grad()
            one.loss(x, y).backward()
            one.clip_grad_norm_(0.1)
            optimizer.step()
    assert net.independent
    for i, other in enumerate(alone):
        torch.testing.assert_close(net(x)[i], other(x)[0])
        plain = [nn.utils.clip_grad_norm_([p], 1e9) for p in other.parameters() if p.grad is not None]
        assert all(norm > 0 for norm in plain)


def test_dropout_applies_to_the_inputs_of_adapters_in_training() -> None:
    layer = moved(Lora(nn.Linear(6, 8), 2, rank=2, alpha=2.0, dropout=0.5))
    x = torch.randn(4, 6).repeat(2, 1)
    still = layer.eval()(x)
    torch.manual_seed(0)
    means = torch.stack([layer.train()(x) for _ in range(4000)])
    error = 6 * means.std(0) / 4000**0.5
    assert bool(((means.mean(0) - still).abs() <= error + 1e-6).all())
    assert means.std(0).max() > 0


def test_half_precision_bases_have_adapters_in_float32() -> None:
    net = mt.lora(mlp().to(torch.bfloat16), 2, rank=2, seed=0)
    assert net.get_submodule("0").A.dtype == torch.float32
    assert net(torch.randn(5, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert moved(mt.lora(mlp(), 2, rank=2)).train()(torch.randn(5, 4)).shape == (2, 5, 3)


# -- output layers -----------------------------------------------------------------------------------------


def test_a_language_model_keeps_its_output_layer() -> None:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    net, x = mt.lora(model, 2, rank=2, seed=0).eval(), tokens(3)
    for prediction in net(x):  # adapters add nothing yet
        torch.testing.assert_close(prediction, model(**x).logits, rtol=1e-4, atol=1e-5)
    moved(net)
    assert not torch.allclose(net(x)[0], net(x)[1])
    mt.check(net, x)
    assert net.network.lm_head.weight is net.network.transformer.wte.weight


def test_heads_can_be_shared_kept_or_selected() -> None:
    model, x = mlp(), torch.randn(5, 4)
    shared = mt.lora(model, 2, rank=2, heads=[])
    torch.testing.assert_close(shared(x), model(x).expand(2, -1, -1))
    kept = mt.lora(model, 2, rank=2, init="pretrained")
    torch.testing.assert_close(kept(x), model(x).expand(2, -1, -1))
    assert kept.get_submodule("4").weights.requires_grad
    two = mt.lora(model, 2, rank=2, heads=["2", "4"])
    assert two.get_submodule("2").weights.shape == (2, 10, 12)
    fresh = mt.lora(model, 2, rank=2, init="fresh", seed=0)
    assert not torch.allclose(fresh.get_submodule("0").layer.weight, model[0].weight)


# -- with the rest of the library --------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    x, y = tokens(4), torch.tensor([0, 1, 2, 1])
    gradients = []
    for again in (False, True):
        net = moved(mt.lora(bert(), 3, rank=2, seed=0)).train()
        if again:
            net.network.gradient_checkpointing_enable({"use_reentrant": reentrant})
        net.loss(x, y).backward()
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_loaded_network_is_frozen_and_independent_as_before(tmp_path: Path) -> None:
    net = mt.lora(mlp(), 3, rank=2)
    loaded = mt.load(mt.save(net, tmp_path / "net.safetensors"))
    assert type(loaded) is type(net) and loaded.independent
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in net.parameters()]


# -- bad input ---------------------------------------------------------------------------------------------


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[2].weight
    return model


class Quantized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.round(), self.bias)


QUANTIZED = nn.Sequential(Quantized(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
NORMED = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        *((mlp(), {"rank": rank}, "rank must be a whole number, 1 or more") for rank in (0, -1, 2.5, True)),
        (mlp(), {"rank": 5}, r"rank=5 must be at most 4 for layer '0' \(Linear\) with 4"),
        (mlp(), {"alpha": 0}, "alpha must be above 0, got 0"),
        (mlp(), {"dropout": 1}, "dropout must be 0 or more and below 1, got 1"),
        (mlp(), {"members": 0}, "members must be a whole number"),
        (mlp(), {"layers": ["fc9"]}, "layers: no layer is named 'fc9'"),
        (mlp(), {"layers": ["4"]}, r"layers=\['4'\] selects only output layers"),
        (mlp().requires_grad_(False), {}, "heads must have trainable weights, and those of '4' are frozen"),
        (NORMED, {"example": torch.randn(4, 6)}, "has no linear layer or convolution besides .* only .*Batch"),
        (tied(), {"layers": ["1"], "heads": []}, "share a weight"),
        (QUANTIZED, {"layers": ["0"], "heads": ["2"]}, "layer '0' is a Quantized, which this method cannot convert"),
    ],
)
def test_bad_arguments_are_errors(model: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mt.lora(model, **{"members": 2, "rank": 2} | options)


def test_frozen_and_convolutional_networks_can_be_adapted() -> None:
    assert mt.lora(mlp().requires_grad_(False), 2, rank=2, heads=[]).independent
    case = NETWORKS["separable"]  # its convolutions are adapted, as it has no other linear layer
    mt.check(moved(mt.lora(case.model(), 2, rank=1, seed=0)), case.batch(4)[0])


def test_studies_train_adapters_at_ten_times_the_learning_rate() -> None:
    row = METHODS["lora"]
    given = {"lr": 5e-5, "epochs": 3}
    assert row.train(mt.Multitude(mlp()), given, row.complete()) == {"lr": pytest.approx(5e-4), "epochs": 3}
    assert row.train(mt.Multitude(mlp()), given, row.complete({"lr": 1e-3}))["lr"] == 1e-3
    assert given["lr"] == 5e-5
