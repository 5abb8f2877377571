"""Many heads on one trunk."""

from __future__ import annotations

import itertools
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
from multitudes.surgery.own_layers import Own, OwnBlock
from tests.zoo.cases import CLASSES, NETWORKS
from tests.zoo.of_parts import Of
from tests.zoo.shared_cases import FAMILIES, bert, gpt2, rows_through, swin, tokens, vit


def moved(net: Any) -> Any:
    """Move the parameters away from any special start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return net


@pytest.mark.parametrize("network", ["mlp", "resnet", "hugging_face"])
def test_the_trunk_keeps_its_weights_and_each_head_is_reset(network: str) -> None:
    model, (x, _) = NETWORKS[network].model(), NETWORKS[network].batch(5)
    net = mt.heads(model, 4, example=x, seed=0).eval()
    (name,) = [name for name, module in net.network.named_modules() if isinstance(module, Own)]
    own = model.get_submodule(name)
    kept = {key: value for key, value in net.state_dict().items() if not key.startswith(f"{name}.")}
    for key, value in model.state_dict().items():
        assert key.startswith(f"{name}.") or torch.equal(kept[key], value)
    weights = net.network.get_submodule(name).weights.detach()
    assert weights.shape == (4, *own.weight.shape)
    for i in range(4):
        assert not torch.allclose(weights[i], own.weight)
        assert all(not torch.allclose(weights[i], weights[j]) for j in range(i))
    if network == "hugging_face":  # its own rule
        assert 0.5 < float(weights.std()) / model.model.config.initializer_range < 2
    else:
        bound = 1 / own.weight[0].numel() ** 0.5  # of torch's own rule
        assert bool((weights.abs() <= bound).all()) and float(weights.abs().max()) > 0.8 * bound
    mt.check(moved(net), x)


def test_each_head_is_a_layer_on_the_output_of_the_trunk() -> None:
    trunk, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)
    net = mt.heads(nn.Sequential(trunk, head), 5, seed=0)
    x = torch.randn(7, 4)
    own = net.get_submodule("1")
    want = torch.stack([F.linear(trunk(x), own.weights[i], own.biases[i]) for i in range(5)])
    torch.testing.assert_close(net(x), want)
    torch.testing.assert_close(net.eval()(x[:1]), want[:, :1])


@pytest.mark.quick(2)
@pytest.mark.parametrize("model", [bert, vit, gpt2, *FAMILIES])
def test_the_trunk_of_a_hugging_face_model_runs_once(model: Callable[[], nn.Module]) -> None:
    net = mt.heads(model(), 4, seed=0)
    x: Any = torch.randn(5, 3, 16, 16) if model in (vit, swin) else tokens(5)
    one = x[:1] if isinstance(x, Tensor) else {key: value[:1] for key, value in x.items()}
    for training, (batch, rows) in itertools.product((True, False), ((x, 5), (one, 1))):
        net.train(training)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(batch)
        assert rows_through(net, net.network.base_model_prefix, batch) == rows
    mt.check(moved(net), x)


# -- whole blocks ------------------------------------------------------------------------------------------


def test_from_layer_selects_all_later_layers() -> None:
    case = NETWORKS["resnet"]
    x, _ = case.batch(6)
    net = mt.heads(case.model(), 3, from_layer="layer4", seed=0)
    kinds = {name: type(m) for name, m in net.network.named_modules() if isinstance(m, (Own, OwnBlock))}
    assert kinds == {"layer4": OwnBlock, "fc": Own}
    for training in (True, False):
        net.train(training)(x)
        assert rows_through(net, "layer3", x) == 6
    mt.check(moved(net), x)
    by_layers = mt.heads(case.model(), 3, layers=["layer4", "fc"], seed=0)
    torch.testing.assert_close(by_layers.eval()(x), mt.heads(case.model(), 3, from_layer="layer4", seed=0).eval()(x))


def test_a_batch_norm_in_a_block_has_each_members_own_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 2))
    net = mt.heads(model, 3, layers=["1", "2"], seed=0).train()
    x = torch.randn(9, 4)
    alone = [net.member(i).train() for i in range(3)]
    for _ in range(2):
        predictions = net(x)
        for i, member in enumerate(alone):
            torch.testing.assert_close(predictions[i], member(x))
    norm = net.get_submodule("1")
    assert norm.get_buffer("1_running_mean").shape == (3, 6)
    for i, member in enumerate(alone):
        torch.testing.assert_close(norm.get_buffer("1_running_mean")[i], member[1][1].running_mean)
        torch.testing.assert_close(net.member(i)[1][1].running_var, member[1][1].running_var)
        assert int(norm.get_buffer("1_num_batches_tracked")[i]) == 2


def test_members_that_run_one_by_one_have_separate_statistics() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        net.seen = net.head(net.body(x))  # what each member would have to write for itself
        return net.seen - net.seen[:1]

    head = nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2))
    model = Of(run, body=nn.Linear(4, 6), head=head)
    net = mt.heads(model, 3, layers=["head"], seed=0).train()
    x = torch.randn(9, 4)
    alone = [net.member(i).train() for i in range(3)]
    with pytest.warns(UserWarning, match="one after the other"):
        predictions = net(x)
    for i, member in enumerate(alone):
        torch.testing.assert_close(predictions[i], member(x))
        torch.testing.assert_close(net.member(i).head[1].running_mean, member.head[1].running_mean)


def test_a_block_with_attention_and_a_mask_of_its_rows() -> None:
    x = tokens(6)
    net = mt.heads(bert(), 3, from_layer="bert.encoder.layer.1", example=x, seed=0)
    names = {name for name, module in net.network.named_modules() if isinstance(module, (Own, OwnBlock))}
    assert names == {"bert.encoder.layer.1", "bert.pooler", "classifier"}
    assert rows_through(net.eval(), "bert.encoder.layer.0", x) == 6
    assert rows_through(net.train(), "bert.encoder.layer.0", x) == 6
    mt.check(moved(net), x)
    same = {"input_ids": x["input_ids"][:3], "attention_mask": torch.ones(3, 3, dtype=torch.int64)}
    same["input_ids"] = same["input_ids"][:, :3]  # as many rows as positions
    predictions = net.eval()(same)
    for i in range(3):
        torch.testing.assert_close(predictions[i], net.member(i)(**same).logits, rtol=1e-4, atol=1e-5)


# -- training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [False, True])
def test_on_a_frozen_trunk_each_member_learns_as_it_would_alone(blocks: bool) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), head if blocks else nn.Linear(8, 3))
    model[0].requires_grad_(False)
    net = mt.heads(model, 4, layers=["2"], seed=0).train()
    alone = [net.member(i).train() for i in range(4)]
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    together = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.5, momentum=0.9)
    apart = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.5, momentum=0.9) for m in alone]
    for _ in range(5):
        together.zero_grad()
        net.loss(x, y).backward()
        norms = net.clip_grad_norm_(0.05)
        for i, (member, optimizer) in enumerate(zip(alone, apart, strict=True)):
            optimizer.zero_grad()
            F.cross_entropy(member(x), y).backward()
            own = nn.utils.clip_grad_norm_(member.parameters(), 0.05)
            torch.testing.assert_close(norms[i], own)
            optimizer.step()
        together.step()
    for i, member in enumerate(alone):
        for one, other in zip(net.member(i).parameters(), member.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    assert net.independent
    mt.check(net, x)


def test_on_a_trunk_that_is_trained_the_loss_is_the_mean() -> None:
    net = mt.heads(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), 4, seed=0)
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    want = torch.stack([F.cross_entropy(net.member(i)(x), y) for i in range(4)]).mean()
    torch.testing.assert_close(net.loss(x, y), want)
    assert not net.independent and net.clip_grad_norm_(1.0).dim() == 0


def test_frozen_parameters_stay_frozen_in_every_member() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    model[1][0].requires_grad_(False)
    net = mt.heads(model, 3, layers=["1"], seed=0)
    for i in range(3):
        member = net.member(i)
        assert torch.equal(member[1][0].weight, model[1][0].weight)
        assert [p.requires_grad for p in member.parameters()] == [p.requires_grad for p in model.parameters()]


def test_fresh_draws_the_trunk_as_well_and_pretrained_is_the_network_itself() -> None:
    model, (x, _) = NETWORKS["cnn"].model(), NETWORKS["cnn"].batch(5)
    fresh = mt.heads(model, 2, init="fresh", seed=0)
    assert not torch.allclose(fresh.network.conv1.weight, model.conv1.weight)
    one = mt.heads(model, 1, init="pretrained")
    torch.testing.assert_close(one.eval()(x)[0], model(x))
    with pytest.raises(ValueError, match=r"init='pretrained' keeps the weights, so all members would be the same"):
        mt.heads(model, 2, init="pretrained")


# -- with the rest of the library --------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after"])
def test_composes_with_dropout_that_stays_on(where: str) -> None:
    parts = [nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 16), nn.Linear(16, CLASSES)]
    if where == "after":
        parts = [nn.Linear(4, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 16), nn.Dropout(0.5)), nn.Linear(16, CLASSES)]
    model = nn.Sequential(*parts)
    net = mt.heads(mt.mc_dropout(model), 3, layers=["4"] if where == "before" else ["2", "3"], seed=0).eval()
    x = torch.randn(6, 4)
    drawn = net(x, draws=200, seed=0).unflatten(0, (3, 200))
    assert not torch.allclose(drawn[:, 0], drawn[:, 1])
    torch.testing.assert_close(net(x, draws=200, seed=0).unflatten(0, (3, 200)), drawn)
    for i in range(3):
        alone = net.member(i).eval()(x, draws=400, seed=1)
        error = (drawn[i].var(0) / 200 + alone.var(0) / 400).sqrt()
        assert bool(((drawn[i].mean(0) - alone.mean(0)).abs() < 6 * error).all())
        assert bool((drawn[i].std(0) < 1.5 * alone.std(0)).all())
    # members have noise of their own
    others = torch.corrcoef(drawn[:2, :, 0, 0].detach())[0, 1]
    assert abs(float(others)) < 0.35
    mt.check(net, x)


def test_a_saved_block_of_the_users_own_class_is_loaded_with_their_network(tmp_path: Path) -> None:
    net = moved(mt.heads(vit(), 3, from_layer="vit.layers.1", example=torch.randn(2, 3, 16, 16), seed=0)).eval()
    x = torch.randn(5, 3, 16, 16)
    loaded = mt.load(mt.save(net, tmp_path / "net.safetensors"), vit())
    assert torch.equal(loaded(x), net(x))


# -- bad input ---------------------------------------------------------------------------------------------


def causal() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


CNN, IMAGES, ROWS = NETWORKS["cnn"], {"example": NETWORKS["cnn"].batch(2)[0]}, {"example": torch.randn(2, 4)}
PARTS = {"body": nn.Linear(4, 4), "head": nn.Linear(4, 4)}
UNUSED, TWICE = Of(lambda net, x: net.body(x), **PARTS), Of(lambda net, x: net.body(net.head(net.body(x))), **PARTS)
ZERO = Of(lambda net, x: x @ net.weight.T, weight=nn.Parameter(torch.zeros(2, 4)))  # no rule resets it


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (CNN.model(), {"from_layer": "fc9"}, "from_layer: no layer is named 'fc9'; there are: conv1, conv2, fc1, fc2"),
        (CNN.model(), {"layers": ["fc2"], "from_layer": "fc1"}, r"layers=\['fc2'\] and from_layer='fc1' exclude"),
        (CNN.model(), {"layers": ["fc9"]}, "layers: no layer is named 'fc9'"),
        (CNN.model(), {"members": 0}, "members must be a whole number"),
        (CNN.model(), {"init": "random"}, "init must be one of"),
        (UNUSED, {"from_layer": "head", **ROWS}, "from_layer='head' does not run"),
        (
            CNN.model().requires_grad_(False),
            IMAGES,
            "layers must have trainable weights, and those of 'fc2' are frozen",
        ),
        (
            CNN.model().requires_grad_(False),
            {"from_layer": "fc1", **IMAGES},
            "'fc1', 'fc2' must have trainable weights",
        ),
        (TWICE, {"from_layer": "head", **ROWS}, "layer 'body' runs both before and after from_layer='head'"),
        (mt.deep_ensemble(nn.Linear(3, 2), 2), {}, "a multitude of members already"),
        (causal(), {}, "layers: 'lm_head' would get new weights, and so would 'weight' of layer"),  # its embedding
        (nn.Sequential(nn.Linear(4, 4), ZERO), {}, "no rule resets '1', so all members would stay the same network"),
    ],
)
def test_bad_arguments_are_errors(model: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mt.heads(model, **{"members": 2} | options)


def test_a_member_with_its_own_recurrent_layer_is_plain_after_a_step() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 5, 4), torch.randint(3, (6,))
    model = Of(
        lambda net, x: net.fc(net.gru(net.embed(x))[0][:, -1]),
        embed=nn.Linear(4, 6), gru=nn.GRU(6, 5, batch_first=True), fc=nn.Linear(5, 3),
    )  # fmt: skip
    net = mt.heads(model, 3, from_layer="gru", example=x, seed=0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net.train().loss(x, y).backward()
    optimizer.step()
    for index in range(3):
        torch.testing.assert_close(net.member(index).eval()(x), net.eval()(x)[index])


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(4, 3, 1)], ids=["linear", "convolution"])
def test_hooks_of_an_output_layer_see_each_member(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, args, y: 2 * y)
    x = torch.randn(5, 4) if isinstance(layer, nn.Linear) else torch.randn(5, 4, 6)
    net = mt.heads(nn.Sequential(nn.Identity(), layer), 2, layers=["1"], seed=0).eval()
    for index in range(2):
        weight, bias = net.network[1].weights[index], net.network[1].biases[index]
        plain = F.linear(x, weight, bias) if isinstance(layer, nn.Linear) else F.conv1d(x, weight, bias)
        torch.testing.assert_close(net(x)[index], 2 * plain)
        torch.testing.assert_close(net.member(index)(x), 2 * plain)
