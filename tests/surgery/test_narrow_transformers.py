"""Narrowing Hugging Face's models: by their own configurations, with the model's own weights, and true ever after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import multitudes as mt
from multitudes.surgery.narrowing.cuts import GroupedLinear
from multitudes.surgery.narrowing.huggingface_configs import narrowed_config
from multitudes.surgery.narrowing.narrow import narrowed_copy
from tests.surgery.test_narrow_attention import rows_of
from tests.surgery.transformer_networks import MODELS, STRANGE, Beside, build, hugging_face

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

QUICK = ("vit", "bert", "gpt2_language", "llama", "swin", "segformer_maps", "convnext")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in STRANGE]


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def logits(network: nn.Module, x: Any) -> torch.Tensor:
    with torch.no_grad():
        return network.eval()(**x).logits


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
@pytest.mark.parametrize("init", ["fresh", "pretrained"])
def test_members_are_narrow_models_of_their_class_that_are_saved_and_loaded(
    name: str, init: str, tmp_path: Path
) -> None:
    model, x = build(name)
    net = mt.packed(model, 2, 1, example=x, init=init, seed=0).eval()
    net.runner = "loop"
    members = [net.member(index) for index in range(2)]
    with torch.no_grad():
        torch.testing.assert_close(net(x), torch.stack([logits(member, x) for member in members]))
    assert type(members[1]) is type(model)
    for key, value in MODELS[name][3].items() if name in MODELS else ():
        assert getattr(members[1].config, key) == value, key
    members[1].save_pretrained(tmp_path)
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path), x), logits(members[1], x))
    assert 0.5 < parameters(net) / parameters(model) < 1.1  # where one head of one, or two of three, are kept
    assert logits(net.member(0), x).shape == logits(model, x).shape


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_a_member_of_full_width_predicts_as_the_model(name: str) -> None:
    model, x = build(name)
    net = mt.packed(model, 1, 1, example=x, init="pretrained").eval()
    with torch.no_grad():
        assert torch.equal(net(x)[0], logits(model, x))
    assert net.member(0).config.to_dict() == model.config.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_every_runner_is_right(name: str) -> None:
    model, x = build(name)
    assert "gradients of 2 members" in str(mt.check(mt.packed(model, 2, 1, example=x, seed=0), x))


# -- which weights -----------------------------------------------------------------------------------------


def test_a_narrow_gpt_without_norms_is_the_model_with_the_other_heads_and_channels_at_zero() -> None:
    """Brute force: norms see all channels, so they are taken out; then what is dropped adds nothing when it is zero."""
    model, x = build("gpt2_language")
    model.double()
    for block in model.transformer.h:
        block.ln_1, block.ln_2 = nn.Identity(), nn.Identity()
    model.transformer.ln_f = nn.Identity()
    small, _ = narrowed_copy(model, 0.5, 1, 64, None, x)
    kept = rows_of(small.transformer.wte.weight.T, model.transformer.wte.weight.T)
    assert len(kept) == 16 and all(kept[i] + 1 == kept[i + 1] for i in range(16) if i % 8 != 7)
    dropped = [channel for channel in range(32) if channel not in kept]
    with torch.no_grad():
        for table in (model.transformer.wte, model.transformer.wpe):
            table.weight[:, dropped] = 0
        for block, cut in zip(model.transformer.h, small.transformer.h, strict=True):
            block.attn.c_proj.weight[dropped] = 0
            lost = [i for i in range(128) if i not in rows_of(cut.mlp.c_fc.weight.T, block.mlp.c_fc.weight[kept].T)]
            block.mlp.c_proj.weight[lost] = 0
            for layer in (block.attn.c_proj, block.mlp.c_proj):
                layer.weight[:, dropped], layer.bias[dropped] = 0, 0
    torch.testing.assert_close(logits(small, x), logits(model, x))


def test_the_heads_of_a_llama_stay_with_their_keys() -> None:
    config = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 40}
    small_text = {"vocab_size": 50, "max_position_embeddings": 16, "pad_token_id": 0, "num_hidden_layers": 1}
    model = hugging_face("LlamaForSequenceClassification", "LlamaConfig", {**config, **small_text})
    x = {"input_ids": torch.randint(1, 50, (2, 6))}
    small, _ = narrowed_copy(model, 0.5, 1, 64, None, x)
    inputs = rows_of(small.model.embed_tokens.weight.T, model.model.embed_tokens.weight.T)
    whole, cut = model.model.layers[0].self_attn, small.model.layers[0].self_attn
    queries = [row // 4 for row in rows_of(cut.q_proj.weight, whole.q_proj.weight[:, inputs])[::4]]
    keys, values = (
        [row // 4 for row in rows_of(getattr(cut, each).weight, getattr(whole, each).weight[:, inputs])[::4]]
        for each in ("k_proj", "v_proj")
    )
    assert keys == values and len(keys) == 2 and len(queries) == 6
    assert [query // 3 for query in queries] == [key for key in keys for _ in range(3)]
    assert small.config.head_dim == 4 and small.config.num_key_value_heads == 2


def test_a_table_of_relative_positions_loses_whole_heads() -> None:
    model, x = build("swin")
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" in name:
            nn.init.normal_(parameter)
    small, cuts = narrowed_copy(model, 2 / 3, 1, 64, None, x)
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" not in name:
            continue
        kept = rows_of(small.get_parameter(name).T, parameter.T)
        inside = [other for other in cuts if other.startswith(name.split("relative")[0])]
        query = next(other for other in inside if other.endswith(("query", "q_proj")))
        assert kept == [channel // 8 for channel in cuts[query].outputs.tolist()[::8]]


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_activations_stay_as_large_as_they_were(name: str) -> None:
    model, x = build(name)
    small = mt.narrow(model, 0.5, init="pretrained", example=x, seed=0)
    sizes: dict[str, list[float]] = {}
    for network in (model, small):
        for layer_name, layer in network.named_modules():
            if layer_name.endswith(("q_proj", "o_proj", "fc1", "up_proj")):
                layer.register_forward_hook(
                    lambda m, _, y, n=layer_name: sizes.setdefault(n, []).append(
                        (y if m.bias is None else y - m.bias).square().mean().sqrt().item()
                    )
                )
        logits(network, x)
    assert sizes
    for whole, narrow in sizes.values():
        assert 0.7 < narrow / whole < 1.4


def test_new_output_layers_are_drawn_for_each_member() -> None:
    model, x = build("vit")
    net = mt.packed(model, 2, 2, example=x, init="heads", seed=0)
    one, other = net.member(0), net.member(1)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)
    assert torch.equal(one.vit.layers[0].attention.q_proj.weight, model.vit.layers[0].attention.q_proj.weight)


# -- as a part of another network --------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["fresh", "pretrained"])
def test_a_model_inside_a_network_is_narrowed_by_its_configuration(init: str) -> None:
    trunk, x = build("bert")
    model = Beside(trunk.bert, 32, lambda answer: answer.last_hidden_state[:, 0]).eval()
    model.trunk.pooler = None
    net = mt.packed(model, 2, 1, example=x["input_ids"], init=init, seed=0).eval()
    member = net.member(1)
    assert member.trunk.config.hidden_size == 16 and member.trunk.config.num_attention_heads == 2
    assert (member.hidden.in_features, member.hidden.out_features) == (16, 10)
    assert model.trunk.config.hidden_size == 32
    net.runner = "loop"
    torch.testing.assert_close(net(x["input_ids"])[1], member(x["input_ids"]))


def test_a_frozen_trunk_is_kept_whole_and_one_that_is_frozen_in_part_is_refused() -> None:
    trunk, x = build("vit")
    model = Beside(trunk.vit, 32, lambda answer: answer.last_hidden_state[:, 0])
    model.trunk.requires_grad_(False)
    member = mt.packed(model, 2, 1, example=x["pixel_values"]).member(0)
    assert member.trunk.config.hidden_size == 32 and member.hidden.out_features == 10
    model, _ = build("vit")
    model.vit.embeddings.requires_grad_(False)
    with pytest.raises(ValueError, match=r"has frozen parameters, such as 'vit.embeddings.cls_token'"):
        mt.packed(model, 2, 1, example=x)


def test_a_model_that_was_changed_by_hand_is_narrowed_by_observation() -> None:
    model, x = build("vit")
    model.classifier = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 7))
    net = mt.packed(model, 2, 1, example=x, init="pretrained").eval()
    member = net.member(0)
    assert (member.classifier[0].out_features, member.vit.layers[0].attention.q_proj.out_features) == (12, 16)
    assert member.vit.layers[0].attention.num_attention_heads == 2
    assert (member.config.hidden_size, member.config.num_attention_heads, member.config.intermediate_size) == (
        16,
        2,
        32,
    )


@pytest.mark.filterwarnings("default")
def test_a_configuration_that_cannot_tell_the_widths_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a configuration has no names for its widths, layers are narrowed by observation, and it stays as it was."""
    model, x = build("convnext")
    monkeypatch.setattr(
        "multitudes.surgery.narrowing.huggingface_configs.narrowed_config", lambda config, factor: config
    )
    with pytest.warns(
        UserWarning, match="the configuration of ConvNextForImageClassification cannot express the narrowed"
    ):
        small = mt.narrow(model, 0.5, example=x, init="pretrained")
    assert parameters(small) < 0.4 * parameters(model)


def test_an_output_layer_of_ones_own_stays_whole() -> None:
    """Seven classes where the configuration tells of five: whoever sets a classifier often leaves that as it is."""
    model, x = build("vit")
    model.classifier = nn.Linear(32, 7)
    member = mt.packed(model, 2, 1, example=x, init="pretrained").member(0)
    assert (member.classifier.in_features, member.classifier.out_features) == (16, 7)
    assert (member.config.hidden_size, member.config.num_attention_heads) == (16, 2)


def test_the_last_layer_of_a_mobile_network_is_narrowed_with_the_others() -> None:
    config = transformers.MobileNetV2Config(depth_multiplier=1.0)
    small = narrowed_config(config, 0.5)
    assert (small.depth_multiplier, small.finegrained_output, small.min_depth) == (0.5, False, 4)
    assert config.depth_multiplier == 1.0


# -- the rest of the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_members_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, x = build(name)
    net = mt.packed(model, 2, 1, example=x, seed=0)
    again = mt.load(mt.save(net, tmp_path / "net.safetensors"), build(name)[0])
    assert again.member(1).config.hidden_size == 16
    with torch.no_grad():
        assert torch.equal(again.eval()(x), net.eval()(x))


def test_gamma_groups_the_layers_of_a_built_model() -> None:
    model, x = build("vit")
    net = mt.packed(model, 2, 1, 2, min_channels=4, example=x, seed=0).eval()
    assert isinstance(net.member(0).vit.layers[0].attention.q_proj, GroupedLinear)
    net.runner = "loop"
    torch.testing.assert_close(net(x)[1], logits(net.member(1), x))
    assert "gamma 2" in net.notes["vit.layers.0.mlp.fc1"]


def test_a_model_whose_channels_cannot_be_followed_is_fresh_by_its_configuration_and_refused_with_its_weights() -> None:
    config = {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64, "vocab_size": 50, "num_labels": 5}
    model = hugging_face("XLNetForSequenceClassification", "XLNetConfig", {**config, "pad_token_id": 0})
    x = {"input_ids": torch.randint(1, 50, (2, 6))}
    member = mt.packed(model, 2, 1, example=x).member(0)
    assert (member.config.d_model, member.config.n_head, member.config.d_head) == (16, 2, 8)
    with pytest.raises(
        ValueError,
        match=r"channels are mixed before layer '.*' by einsum in layer '.*rel_attn' \(XLNetRelativeAttention\)",
    ):
        mt.packed(model, 2, 1, example=x, init="pretrained")


def test_a_function_of_the_width_packs_what_cannot_be_followed() -> None:
    """A Fourier transform mixes all channels."""

    def build(width: float) -> nn.Module:
        sizes = {"hidden_size": round(32 * width), "intermediate_size": round(64 * width), "num_hidden_layers": 1}
        return hugging_face("FNetForSequenceClassification", "FNetConfig", sizes | {"vocab_size": 50, "num_labels": 5})

    x = {"input_ids": torch.randint(5, 50, (2, 7))}
    with pytest.raises(ValueError, match=r"channels are mixed before.*packed\(build, \.\.\.\), where build\(width\)"):
        mt.packed(build(1.0), 2, 1, example=x, init="pretrained")
    with pytest.raises(ValueError, match="builds the same network in every call"):  # `hugging_face` sets a seed
        mt.packed(build, 2, 1, example=x)
    seeds = iter(range(9))

    def seeded(width: float) -> nn.Module:
        network = build(width)
        torch.manual_seed(next(seeds))
        network.classifier.reset_parameters()
        return network

    net = mt.packed(seeded, 2, 1, example=x).eval()
    net.runner = "loop"
    torch.testing.assert_close(net(x), torch.stack([logits(net.member(index), x) for index in range(2)]))
    assert net.member(1).config.hidden_size == 16


@pytest.mark.slow
def test_a_packed_vit_s_has_the_parameters_of_one() -> None:
    config = {
        "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536,
        "image_size": 32, "patch_size": 4, "num_labels": 10,
    }  # fmt: skip
    model = hugging_face("ViTForImageClassification", "ViTConfig", config)
    net = mt.packed(model, 4, 2, example={"pixel_values": torch.randn(1, 3, 32, 32)})
    assert abs(parameters(net) / parameters(model) - 1) < 0.02
    assert net.member(0).config.num_attention_heads == 3


@pytest.mark.slow
def test_a_packed_bert_has_the_parameters_of_one_but_for_its_tables() -> None:
    """A table of embeddings narrows one way alone: four of half the width are twice the table."""
    model = hugging_face("BertForSequenceClassification", "BertConfig", {"num_hidden_layers": 2})
    net = mt.packed(model, 4, 2, example={"input_ids": torch.randint(5, 90, (1, 6))})
    members = [net.member(index).bert for index in range(4)]
    encoders = sum(parameters(member.encoder) for member in members)
    assert abs(encoders / parameters(model.bert.encoder) - 1) < 0.02
    tables = sum(parameters(member.embeddings) for member in members) / parameters(model.bert.embeddings)
    assert abs(tables / 2 - 1) < 0.02
    assert "of which embedding tables are" in net.notes["total"]


def test_models_of_texts_need_no_example() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=30, num_labels=3))
    config = mt.packed(model, members=4, alpha=2, init="fresh", seed=0).member(0).config
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (8, 2, 16)
