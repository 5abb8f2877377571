"""Last-layer Laplace on networks of every kind, in everything else that the library does, and its bad inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.lab.study.spec.method_rows import METHODS
from multitudes.methods.laplace.layers import LaplaceConv, LaplaceLinear
from tests.zoo.cases import NETWORKS
from tests.zoo.of_parts import Of

STRUCTURES = ("full", "kron", "diag")


def model(outputs: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).eval()


def data(classes: int = 3, rows: int = 40, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randint(classes, (rows,), generator=generator)


def same_posterior(one: mt.Multitude, other: mt.Multitude) -> None:
    """Alike but for rounding, whatever the signs of eigenvectors."""
    rows = torch.randn(
        9, one.layer.weight.shape[1] + (one.layer.bias is not None), generator=torch.Generator().manual_seed(3)
    )
    torch.testing.assert_close(one.prior, other.prior, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(one.log_marginal_likelihood, other.log_marginal_likelihood, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.layer.variances(rows), other.layer.variances(rows), rtol=1e-3, atol=1e-6)


def ending(end: Callable[[Tensor], Tensor], outputs: int = 3) -> nn.Module:
    """A network that changes the outputs of its last layer."""
    return Of(lambda net, x: end(net.body(x)), body=model(outputs))


# -- every kind of network ---------------------------------------------------------------------------------


@pytest.mark.quick(4)
@pytest.mark.parametrize("network", ["mlp", "transformer", "hugging_face", "tabular", "resnet", "cnn"])
def test_every_network_keeps_its_prediction_and_does_not_change(network: str) -> None:
    case = NETWORKS[network]
    own, (x, y) = case.model(), case.batch(20)
    before = copy.deepcopy(own.state_dict())
    net = mt.laplace(own, (x, y))
    assert torch.equal(net(x, draws=0)[0], own(x))
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
    mt.check(net, x)
    assert net.draws == 20 and net(x).shape == (20, 20, 5)
    assert {name for name, layer in net.network.named_modules() if isinstance(layer, LaplaceLinear)} == set(net.notes)


def test_the_trunk_runs_once_for_all_draws() -> None:
    own, (x, y) = model(), data()
    calls = []
    own[0].register_forward_hook(lambda *_: calls.append(1))
    net = mt.laplace(own, (x, y))
    net(x, draws=2)  # the first draws are proven
    calls.clear()
    net(x, draws=30)
    assert len(calls) == 1


def test_the_pass_over_data_runs_the_network_once_for_a_batch_and_once_more_to_observe_it() -> None:
    own, (x, y) = model(), data()
    calls = []
    own[0].register_forward_hook(lambda *_: calls.append(1))
    mt.laplace(own, [(x, y)] * 10)
    assert len(calls) == 10 + 2  # the output layer is found, and its outputs are numbered, on the first


def test_a_network_that_is_its_output_layer() -> None:
    x, y = data()
    layer = nn.Linear(4, 3)
    net = mt.laplace(layer, (x, y))
    assert torch.equal(net(x, draws=0)[0], layer(x)) and type(net.network) is LaplaceLinear
    values = mt.laplace(nn.Linear(4, 1), (x, x[:, :1] + 0.1 * x[:, 1:2]), task="regression").eval()
    assert values(x).shape == (20, 40, 2) and len(values(x, draws=3, seed=0).unique(dim=0)) == 3


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_computed_weight_is_used_by_its_value() -> None:
    x, y = data()
    want = mt.laplace(model(), (x, y))
    for norm in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
        own = model()
        norm(own[2])
        net = mt.laplace(own, (x, y))
        torch.testing.assert_close(net(x, draws=0)[0], own(x))
        same_posterior(net, want)


def test_dropout_of_the_trunk_stays_on() -> None:
    x, y = data()
    own = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).eval()
    net = mt.laplace(mt.mc_dropout(own), (x, y))
    torch.testing.assert_close(net(x, draws=0)[0], own(x))
    alone = mt.laplace(own, (x, y))
    same_posterior(net, alone)
    assert net.predict(x, draws=500, seed=0).variance.mean() > alone.predict(x, draws=500, seed=0).variance.mean()


def test_pixels_are_rows_and_ignored_ones_are_left_out() -> None:
    torch.manual_seed(0)
    own = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    x, y = torch.randn(5, 2, 6, 6), torch.randint(3, (5, 6, 6))
    y[0] = -100
    net = mt.laplace(own, (x, y), task="classification")
    assert isinstance(net.layer, LaplaceConv)
    assert torch.equal(net(x, draws=0)[0], own(x)) and net(x, draws=3).shape == (3, 5, 3, 6, 6)
    rows = own[:2](x[1:]).movedim(1, -1).reshape(-1, 4).detach()
    linear = nn.Linear(4, 3)
    linear.weight.data, linear.bias.data = own[2].weight.data[:, :, 0, 0], own[2].bias.data
    same_posterior(net, mt.laplace(linear, (rows, y[1:].flatten())))
    net.approximation = "probit"
    flat = mt.laplace(linear, (rows, y[1:].flatten()), approximation="probit").predict(rows).probs
    torch.testing.assert_close(net.predict(x[1:]).probs.movedim(1, -1).reshape(-1, 3), flat, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mt.freeze(net)(x), net(x), rtol=1e-4, atol=1e-5)
    net.approximation = "draws"
    frozen = mt.freeze(net, draws=4, seed=0)
    torch.testing.assert_close(frozen.eval()(x), net(x, draws=4, seed=0), rtol=1e-4, atol=1e-5)


def test_a_log_softmax_after_the_layer_is_the_same_likelihood() -> None:
    x, y = data()
    net = mt.laplace(ending(lambda z: z.log_softmax(1)), (x, y))
    same_posterior(net, mt.laplace(model(), (x, y)))
    torch.testing.assert_close(net.predict(x, seed=0).probs, mt.laplace(model(), (x, y)).predict(x, seed=0).probs)


def test_values_in_another_shape_are_the_same_values() -> None:
    x, _ = data()
    y = torch.randn(40, 3, 2)
    net = mt.laplace(ending(lambda z: z.unflatten(1, (3, 2)), 6), (x, y), task="regression", noise=0.5)
    want = mt.laplace(model(6), (x, y.flatten(1)), task="regression", noise=0.5)
    same_posterior(net, want)
    assert net.predict(x).mean.shape == (40, 3, 2)
    turned = mt.laplace(
        ending(lambda z: z.unflatten(1, (3, 2)).mT, 6), (x, y.mT.contiguous()), task="regression", noise=0.5
    )
    same_posterior(turned, want)
    one = mt.laplace(ending(lambda z: z.squeeze(1), 1), (x, y[:, 0, 0]), task="regression")
    assert one.predict(x).mean.shape == (40, 1) and one(x, draws=0).shape == (1, 40, 2)


# -- transformers ------------------------------------------------------------------------------------------

TEXT = {"vocab_size": 50, "num_labels": 3, "pad_token_id": 0}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 2}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def texts() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (12, 9), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(6):
        mask[row, 3 + row :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}, torch.randint(3, (12,), generator=generator)


def hugging(kind: str, config: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()


@pytest.mark.parametrize(
    ("kind", "config", "options", "layer"),
    [
        ("BertForSequenceClassification", "BertConfig", BERT, "classifier"),
        ("RobertaForSequenceClassification", "RobertaConfig", BERT, "classifier.out_proj"),
        ("GPT2ForSequenceClassification", "GPT2Config", GPT, "score"),
    ],
)  # fmt: skip
def test_a_text_classifier_has_the_posterior_of_its_output_layer_on_its_features(
    kind: str, config: str, options: dict[str, Any], layer: str
) -> None:
    own, (x, y) = hugging(kind, config, **TEXT, **options), texts()
    seen: list[Tensor] = []
    handle = own.get_submodule(layer).register_forward_hook(lambda _, args, z: seen.append(args[0].detach()))
    logits = own(**x).logits.detach()
    handle.remove()
    net = mt.laplace(own, [(x, y)])
    assert list(net.notes) == [layer] and torch.equal(net(x, draws=0)[0], logits)
    rows = seen[0]
    if rows.dim() == 3:  # GPT-2 scores all tokens, and the last one that is no padding counts
        rows = rows[torch.arange(12), x["attention_mask"].sum(1) - 1]
    linear = copy.deepcopy(own.get_submodule(layer))
    torch.testing.assert_close(linear(rows), logits)
    same_posterior(net, mt.laplace(linear, (rows, y)))
    mt.check(net, x)


def test_tokens_are_rows_and_padding_is_left_out() -> None:
    own, (x, _) = hugging("BertForTokenClassification", "BertConfig", **TEXT, **BERT), texts()
    y = torch.randint(3, (12, 9), generator=torch.Generator().manual_seed(2))
    y[x["attention_mask"] == 0] = -100
    with torch.no_grad():
        rows = own.bert(**x).last_hidden_state[y != -100]
    net = mt.laplace(own, [(x, y)])
    same_posterior(net, mt.laplace(copy.deepcopy(own.classifier), (rows, y[y != -100])))
    assert net.predict(x).probs.shape == (12, 9, 3)


def test_a_causal_language_model_learns_from_the_next_token() -> None:
    own, (x, _) = hugging("GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=16,
                          bos_token_id=1, eos_token_id=2, tie_word_embeddings=False), texts()  # fmt: skip
    with torch.no_grad():
        rows = own.transformer(**x).last_hidden_state[:, :-1].flatten(0, 1)
    net = mt.laplace(own, [(x, x["input_ids"])], structure="kron")
    want = mt.laplace(copy.deepcopy(own.lm_head), (rows, x["input_ids"][:, 1:].flatten()), structure="kron")
    same_posterior(net, want)
    tied = hugging("GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=16,
                   bos_token_id=1, eos_token_id=2)  # fmt: skip
    with pytest.raises(ValueError, match="'lm_head' and 'transformer.wte' share a weight"):
        mt.laplace(tied, [(x, x["input_ids"])])


def test_an_image_transformer_and_a_head_of_one_value() -> None:
    sizes = {**BERT, "image_size": 8, "patch_size": 4, "num_labels": 3}
    vit = hugging("ViTForImageClassification", "ViTConfig", **sizes)
    x, y = {"pixel_values": torch.randn(6, 3, 8, 8)}, torch.randint(3, (6,))
    assert torch.equal(mt.laplace(vit, [(x, y)])(x, draws=0)[0], vit(**x).logits)
    bert, (x, _) = hugging("BertForSequenceClassification", "BertConfig", **{**TEXT, "num_labels": 1}, **BERT), texts()
    net = mt.laplace(bert, [(x, torch.randn(12, 1))])
    assert net.task == "gaussian" and net.predict(x).std.shape == (12, 1)


# -- members -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_members_are_a_mixture_of_laplaces_each_with_its_own_posterior(structure: str) -> None:
    x, y = data()
    networks = [model(seed=seed) for seed in range(3)]
    net = mt.laplace(mt.fuse(networks), (x, y), structure=structure, draws=5)
    assert isinstance(net, mt.Members) and net.members == 3 and net(x).shape == (15, 40, 3)
    assert len(net.prior) == len(net.log_marginal_likelihood) == 3 and len(net.prior.unique()) == 3
    for index, own in enumerate(networks):
        alone = mt.laplace(own, (x, y), structure=structure)
        same_posterior(net.member(index), alone)
        assert float(net.prior[index]) == pytest.approx(float(alone.prior))
    if structure == "kron":
        mt.check(net, x)
    net.approximation = "probit"
    assert net(x).shape == (3, 40, 3)
    alone.approximation = "probit"
    torch.testing.assert_close(net(x)[2], alone(x)[0], rtol=1e-4, atol=1e-5)
    assert "prior precision" in net.summary() and " to " in net.summary()


def test_members_that_predict_values_have_noises_of_their_own() -> None:
    x, _ = data()
    y = torch.randn(40, 2)
    net = mt.laplace(mt.fuse([model(2, seed) for seed in range(2)], task="regression"), (x, y))
    assert net.task == "gaussian" and net(x).shape == (40, 40, 4)
    noises = torch.stack([network.target_noise for network in net.network])
    assert noises.shape == (2, 2) and not torch.equal(*noises)
    net.approximation = "exact"
    p = net.predict(x)
    means = torch.stack([own(x) for own in (model(2, 0), model(2, 1))])
    inside = torch.stack([net.member(i).predict(x).epistemic_variance for i in range(2)])
    torch.testing.assert_close(p.mean, means.mean(0).detach(), rtol=1e-4, atol=1e-5)
    want = means.var(0, correction=0) + inside.mean(0)  # the spread of the members, and that inside of them
    torch.testing.assert_close(p.epistemic_variance, want.detach(), rtol=1e-3, atol=1e-5)


def test_members_that_share_weights_are_errors() -> None:
    x, y = data()
    shared = mt.batch_ensemble(model(), members=2)
    with pytest.raises(ValueError, match=r"members that share weights.*mt.fuse\(\[net.member\(i\)"):
        mt.laplace(shared, (x, y))
    assert mt.laplace(mt.fuse([shared.member(i) for i in range(2)]), (x, y)).members == 2


# -- in everything else ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "structure"), [("regression", "kron"), ("classification", "diag")])
def test_posteriors_are_saved_and_frozen(task: str, structure: str, tmp_path: Path) -> None:
    x, y = data()
    y = y if task == "classification" else torch.randn(40, 3)
    net = mt.laplace(mt.fuse([model(seed=seed) for seed in range(2)], task=task), (x, y), structure=structure)
    frozen = mt.freeze(net, draws=4, seed=1)
    torch.testing.assert_close(frozen(x), net(x, draws=4, seed=1), rtol=1e-4, atol=1e-5)
    assert not any(isinstance(layer, LaplaceLinear) for layer in frozen.network.modules())
    net.approximation = "probit" if task == "classification" else "exact"
    loaded = mt.load(mt.save(net, tmp_path / "net.safetensors"))
    assert torch.equal(loaded(x), net(x)) and torch.equal(loaded.prior, net.prior)
    assert (loaded.approximation, loaded.structure) == (net.approximation, structure)
    assert torch.equal(loaded.log_marginal_likelihood, net.log_marginal_likelihood)
    loaded.approximation = net.approximation = "draws"
    assert torch.equal(loaded(x, seed=0), net(x, seed=0))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("members", [1, 2])
def test_frozen_without_draws_it_predicts_the_same(members: int, structure: str, tmp_path: Path) -> None:
    x, y = data()
    own = model() if members == 1 else mt.fuse([model(seed=seed) for seed in range(members)])
    net = mt.laplace(own, (x, y), structure=structure, approximation="probit")
    frozen = mt.freeze(net)
    assert frozen.members == members and not any(isinstance(m, LaplaceLinear) for m in frozen.network.modules())
    torch.testing.assert_close(frozen(x), net(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        mt.load(mt.save(frozen, tmp_path / "frozen.safetensors"))(x), net(x), rtol=1e-5, atol=1e-6
    )
    values = torch.randn(40, 3)
    exact = mt.laplace(
        mt.Multitude(model()), (x, values), task="regression", structure=structure, approximation="exact"
    )
    p, q = exact.predict(x), mt.freeze(exact, draws=6).predict(x)
    assert q.members == 6
    for quantity in ("mean", "epistemic_variance", "aleatoric_variance"):
        torch.testing.assert_close(getattr(p, quantity), getattr(q, quantity), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "approximation"), [("classification", "probit"), ("regression", "exact")])
def test_closed_forms_are_exported_to_onnx(task: str, approximation: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    x, y = data()
    y = y if task == "classification" else torch.randn(40, 3)
    net = mt.laplace(model(), (x, y), task=task, approximation=approximation)
    assert mt.to_onnx(net, tmp_path / "net.onnx", x[:4], draws=3).is_file()


def test_it_is_calibrated_evaluated_and_has_sets() -> None:
    x, y = data(rows=200)
    net = mt.laplace(model(), (x, y))
    assert {"accuracy", "nll"} <= set(mt.evaluate(net, [(x, y)], seed=0).table())
    calibrated = mt.calibrate(net, (x, y), seed=0)
    assert calibrated.predict(x, seed=0).set(0.9).shape == (200, 3)
    values = torch.randn(200, 3)
    net = mt.laplace(model(), (x, values), task="regression", approximation="exact")
    low, high = mt.calibrate(net, (x, values), seed=0).predict(x).interval(0.9)
    assert 0.8 < float(((low <= values) & (values <= high)).float().mean()) < 0.97
    assert "log_density" in mt.evaluate(net, [(x, values)]).table()


def test_half_precision_and_gradients() -> None:
    x, y = data()
    net = mt.laplace(model().to(torch.bfloat16), (x.bfloat16(), y))
    assert net(x.bfloat16()).dtype == torch.bfloat16
    loss = mt.laplace(model(), (x, y)).train().loss(x, y)
    loss.backward()
    assert loss.isfinite()


def test_approximations_are_those_of_the_task_and_make_no_draws() -> None:
    x, y = data()
    net = mt.laplace(model(), (x, y))
    with pytest.raises(ValueError, match="approximation must be one of draws, probit, got 'exact'"):
        net.approximation = "exact"
    net.approximation = "probit"
    assert torch.equal(net(x, draws=0)[0], model()(x))
    with pytest.raises(ValueError, match="draws=3 needs approximation='draws'"):
        net(x, draws=3)
    with pytest.raises(ValueError, match="draws='auto' needs approximation='draws'"):
        net.predict(x, draws="auto")
    net.approximation = "draws"
    assert net.predict(x, draws="auto", tolerance=0.05).draws is not None


# -- bad input ---------------------------------------------------------------------------------------------

X, Y = data()
NAN = X.clone()
NAN[0, 0] = torch.nan


TWO = Of(
    lambda net, x: net.one(net.body(x)) + net.other(net.body(x)),
    body=nn.Linear(4, 6), one=nn.Linear(6, 3), other=nn.Linear(6, 3),
)  # fmt: skip

BAD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "no model": (3, (X, Y), {}, "model must be a trained network, got int"),
    "no batches": (model(), [], {}, "data must hold at least one batch, got none"),
    "no targets": (model(), [X], {}, "batch 0 of data: a Laplace posterior needs targets"),
    "another shape": (model(), (X, Y[:, None]), {}, r"y must have one class for each prediction, \[40\]"),
    "a class too many": (model(), [(X, Y), (X, Y + 1)], {}, "batch 1 of data: y must hold classes 0 to 2, got 3"),
    "only ignored": (model(), (X, Y * 0 - 100), {}, "y must hold at least one target that is not ignored"),
    "NaN inputs": (model(), (NAN, Y), {}, r"the inputs of layer '2' \(Linear\) must be finite"),
    "NaN targets": (model(), (X, NAN[:, :3]), {"task": "regression"}, "y must be finite, got NaN"),
    "values": (model(), (X, X[:, :3]), {}, "batch 0 of data: y must hold classes"),
    "another size": (model(), (X[:, :2], Y), {}, "x of shape .40, 2. .* does not fit the network"),
    "structure": (model(), (X, Y), {"structure": "block"}, "structure must be one of auto, full, kron, diag, got"),
    "prior": (model(), (X, Y), {"prior": 0.0}, "prior must be above 0, got 0.0"),
    "a prior's name": (model(), (X, Y), {"prior": "best"}, "prior must be one of marginal, validation, got 'best'"),
    "no validation": (model(), (X, Y), {"prior": "validation"}, "need each other, got no validation"),
    "validation": (model(), (X, Y), {"validation": (X, Y)}, "need each other, got prior='marginal'"),
    "noise": (model(), (X, Y), {"noise": 1.0}, "noise=1.0 is for task 'regression', but the task is 'classification'"),
    "noise below": (model(), (X, X[:, :3]), {"noise": -1.0, "task": "regression"}, "noise must be above 0, got -1.0"),
    "noises": (model(), (X, X[:, :3]), {"noise": torch.ones(2), "task": "regression"}, "one for each of 3 outputs"),
    "no error": (model(), (X, model()(X).detach()), {"task": "regression"}, "noise must be given"),
    "quantiles": (model(), (X, Y.float()), {"task": "quantiles"}, "task 'quantiles' has none"),
    "draws": (model(), (X, Y), {"draws": 0}, "draws must be a whole number, 1 or more, got 0"),
    "memory": (model(), (X, Y), {"memory": "much"}, "memory must be a size"),
    "approximation": (model(), (X, Y), {"approximation": "exact"}, "approximation must be 'draws' or 'probit' for"),
    "two layers": (TWO, (X, Y), {}, r"layers must select the one layer .*, got 'one', 'other'"),
    "a sum": (TWO, (X, Y), {"layers": ["one"]}, r"the predictions are not the outputs of layer 'one' \(Linear\)"),
    "no such layer": (model(), (X, Y), {"layers": ["head"]}, "no layer is named 'head'"),
    "a scale": (ending(lambda z: 2 * z), (X, Y), {}, r"are not the outputs of layer 'body.2' \(Linear\)"),
    "a softmax": (ending(lambda z: z.softmax(1)), (X, Y), {}, "the predictions are not the outputs of layer"),
    "a relu": (ending(lambda z: z.relu()), (X, Y), {}, "the predictions are not the outputs of layer"),
    "an order": (ending(lambda z: z.flip(1)), (X, Y), {}, "in their order, got 3 in another order"),
    "posterior twice": (mt.laplace(model(), (X, Y)), (X, Y), {}, "already draws its weights"),
    "no linear layer": (nn.Sequential(nn.Conv1d(1, 3, 4), nn.Flatten()), (X[:, None], Y), {}, "for linear layers and"),
    "calibrated": (mt.calibrate(model(), (X, Y), seed=0), (X, Y), {}, "got a Calibrated: pass its network"),
    "zero weights": (nn.utils.skip_init(nn.Linear, 4, 3), (X, Y), {}, "all weights of the output layer are 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_errors(case: str) -> None:
    given, batches, options, message = BAD[case]
    if case == "zero weights":
        given = copy.deepcopy(given)
        for parameter in given.parameters():
            nn.init.zeros_(parameter)
    with pytest.raises(ValueError, match=message):
        mt.laplace(given, batches, **options)


# -- in studies --------------------------------------------------------------------------------------------


def test_a_study_chooses_the_prior_by_held_out_data_if_there_are_any() -> None:
    row, held = METHODS["laplace"], data(seed=8)
    net = mt.Multitude(model())
    chosen = row.after(net, [(X, Y)], [held], row.complete(), 0)
    assert chosen.prior == mt.laplace(net, (X, Y), prior="validation", validation=held).prior
    assert row.after(net, [(X, Y)], None, row.complete(), 0).prior == mt.laplace(net, (X, Y)).prior
    given = row.complete({"prior": 3.0, "structure": "diag", "approximation": "probit"})
    fixed = row.after(net, [(X, Y)], [held], given, 0)
    assert fixed.prior == 3.0 and fixed.structure == "diag" and fixed.predict(X).members == 1
