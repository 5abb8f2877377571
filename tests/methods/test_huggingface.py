"""Hugging Face models, built from tiny configurations: called with keyword arguments, answering with `logits`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from tests.zoo.cases import stacked_parameters
from tests.zoo.of_parts import Of

transformers = pytest.importorskip("transformers")


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).eval()


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config).eval()


def mobilenet() -> nn.Module:
    config = transformers.MobileNetV1Config(depth_multiplier=0.25, num_labels=5)
    return transformers.MobileNetV1ForImageClassification(config).eval()


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, 8, 8)}


def texts() -> dict[str, Tensor]:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.randint(40, (3, 9)), "attention_mask": mask}


MODELS = {"vit": (vit, images), "bert": (bert, texts), "resnet": (resnet, images)}
every_model = pytest.mark.parametrize("name", list(MODELS))


@every_model
@pytest.mark.parametrize("runner", ["auto", "loop", "packed", "vmapped"])
def test_fused_models_equal_the_models(name: str, runner: str) -> None:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    models, x = [build() for _ in range(3)], batch()
    net = mt.fuse(models)
    try:
        net.runner = runner
        together = net(x)
    except ValueError:
        assert runner in ("packed", "vmapped")  # their code branches on values, which the loop does not mind
        return
    for index, model in enumerate(models):
        torch.testing.assert_close(together[index], model(**x).logits, rtol=1e-4, atol=1e-5)


@every_model
def test_an_ensemble_trains_and_predicts(name: str) -> None:
    build, batch = MODELS[name]
    net, x, y = mt.deep_ensemble(build(), members=2).train(), batch(), torch.tensor([0, 1, 4])
    net.loss(x, y).backward()
    unused = {n for n, p in build().named_parameters() if "pooler" in n and name == "vit"}
    assert all(p.grad is not None for n, p in net.named_parameters() if n not in unused)
    predictive = net.predict(x)
    torch.testing.assert_close(mt.predict(net, [x, x]).probs[3:], predictive.probs)


@every_model
def test_fresh_members_are_initialised_as_the_model_itself_is(name: str) -> None:
    """The standard deviation of every tensor is that of newly built models."""
    build, _ = MODELS[name]
    torch.manual_seed(0)
    net = mt.deep_ensemble(build(), members=8, seed=0)
    built = mt.fuse([build() for _ in range(8)])
    others = stacked_parameters(built)
    for parameter_name, parameter in stacked_parameters(net).items():
        other = others[parameter_name]
        if parameter[0].numel() < 64:
            continue
        torch.testing.assert_close(parameter.std().item(), other.std().item(), rtol=0.15, atol=1e-8)
        if other[0].std() > 0:
            assert not torch.allclose(parameter[0], parameter[1]), parameter_name


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("build", "convert"),
    [
        (mobilenet, lambda model, x: mt.masksembles(model, 2, example=x)),  # it reads its layers' strides
        (resnet, lambda model, x: mt.packed(model, 2, alpha=1, example=x)),
        (resnet, lambda model, x: mt.batch_ensemble(model, 2)),
    ],
)
def test_convolutional_models_are_converted(build: Callable[[], nn.Module], convert: Callable[..., Any]) -> None:
    x = images()
    net = convert(build(), x)
    assert net(x).shape == (2, 3, 5)
    mt.check(net, x)


def test_models_that_cannot_be_narrowed_are_errors() -> None:
    """A Fourier transform mixes all channels: new weights may have any, but nobody can say which the model's are."""
    config = transformers.FNetConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, intermediate_size=32, max_position_embeddings=16,
        num_labels=5, tpu_short_seq_length=9,
    )  # fmt: skip
    model, x = transformers.FNetForSequenceClassification(config), {"input_ids": texts()["input_ids"]}
    assert mt.packed(model, members=2, alpha=1, example=x).member(0).config.hidden_size == 8
    with pytest.raises(ValueError, match="cannot narrow|cannot be narrowed"):
        mt.packed(model, members=2, alpha=1, example=x, init="pretrained")


# -- whose weights a member starts from --------------------------------------------------------------------


def pretrained(build: Callable[[], nn.Module]) -> nn.Module:
    """A model like those of `from_pretrained`: with a source, and with weights that no initializer draws."""
    model = build()
    model.config._name_or_path = "someone/something"
    with torch.no_grad():
        for parameter in model.base_model.parameters():
            parameter.add_(0.3)
    return model


@every_model
def test_heads_keeps_a_pretrained_backbone(name: str) -> None:
    build, batch = MODELS[name]
    model = pretrained(build)
    for method in (mt.deep_ensemble, mt.batch_ensemble):
        net = method(model, 2, init="heads", seed=0)
        own = stacked_parameters(net) if isinstance(net, mt.Members) else dict(net.named_parameters())
        for parameter, value in model.base_model.named_parameters(prefix=model.base_model_prefix):
            kept = own.get(parameter, own.get(parameter.replace(".weight", ".layer.weight")))
            if kept is not None:  # else it is a bias that each member has for itself
                assert torch.equal(kept, value.expand_as(kept)), parameter
        heads = [head for key, head in own.items() if key.startswith("classifier") and "weight" in key]
        assert heads
        assert net(batch()).shape == (2, 3, 5)
    net = mt.deep_ensemble(model, 2, init="heads", seed=0)
    first, second = (dict(net.member(i).named_parameters()) for i in range(2))
    different = {key for key in first if not torch.equal(first[key], second[key])}
    classifier = {key for key in first if key.startswith("classifier")}
    assert {key for key in classifier if key.endswith("weight")} <= different <= classifier


@every_model
def test_resetting_a_pretrained_model_warns_unless_init_is_given(name: str) -> None:
    model = pretrained(MODELS[name][0])
    with pytest.warns(UserWarning, match=r"model looks trained .*'someone/something'.*init='heads'") as told:
        mt.deep_ensemble(model, 2)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.deep_ensemble(model, 2, init="fresh")
        mt.deep_ensemble(model, 2, init="heads")
        mt.deep_ensemble(MODELS[name][0](), 2)


def test_each_of_several_models_in_one_is_initialised_by_its_own_rule() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    text = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, initializer_range=0.5, **sizes)
    image = transformers.ViTConfig(image_size=8, patch_size=4, initializer_range=0.005, **sizes)
    model = Of(
        lambda net, ids, pixels: net.head(torch.cat([net.text(ids).pooler_output, net.image(pixels).pooler_output], 1)),
        text=transformers.BertModel(text), image=transformers.ViTModel(image), head=nn.Linear(64, 5),
    )  # fmt: skip
    own = stacked_parameters(mt.deep_ensemble(model, 2, seed=0))
    for prefix, std in (("text.", 0.5), ("image.", 0.005)):
        weights = [p for key, p in own.items() if key.startswith(prefix) and p.dim() == 3 and p.std() > 0]
        assert len(weights) >= 6
        for weight in weights:
            torch.testing.assert_close(weight.std().item(), std, rtol=0.25, atol=0)
            assert not torch.isclose(weight[0], weight[1]).all()
    heads = mt.deep_ensemble(model, 2, init="heads", heads="head", seed=0)
    assert torch.equal(heads.member(1).text.pooler.dense.weight, model.text.pooler.dense.weight)


def test_a_language_model_that_shares_its_embedding_with_its_head_keeps_both() -> None:
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ValueError, match=r"heads: 'lm_head' would get new weights, and so would .*'transformer.wte'"):
        mt.deep_ensemble(model, 2, init="heads")
    net = mt.deep_ensemble(model, 2, seed=0)
    for member in net.network:
        assert member.lm_head.weight is member.transformer.wte.weight
        torch.testing.assert_close(member.lm_head.weight.std().item(), 0.02, rtol=0.1, atol=0)
