"""Adapters in PEFT's files, with PEFT as the judge."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import multitudes as mt
from tests.methods.lora.test_lora import mlp, moved
from tests.zoo.shared_cases import FAMILIES, bert, gpt2, swin, tokens, vit

peft = pytest.importorskip("peft")

TARGETS = {bert: ["query", "value"], gpt2: ["c_attn", "c_proj"], vit: ["q_proj", "v_proj"]}
MODELS = pytest.mark.parametrize("model", list(TARGETS), ids=["bert", "gpt2", "vit"])


def batch(model: Callable[[], nn.Module]) -> Any:
    return torch.randn(5, 3, 16, 16) if model in (vit, swin) else tokens(5)


def logits(model: nn.Module, x: Any) -> Tensor:
    with torch.no_grad():
        return (model(x) if isinstance(x, Tensor) else model(**x)).logits


def trained(folder: Path, model: Callable[[], nn.Module], seed: int = 0, **options: Any) -> tuple[Path, Any]:
    """An adapter that PEFT has written, and PEFT's own network."""
    torch.manual_seed(seed)
    head = "score" if model is gpt2 else "classifier"
    given = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS[model], "modules_to_save": [head]} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = peft.get_peft_model(model(), peft.LoraConfig(**given))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    net.eval().save_pretrained(folder)
    return folder, net


@pytest.mark.parametrize("model", [bert, gpt2, vit, *FAMILIES])
def test_peft_loads_saved_adapters_and_predicts_the_same(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    x = batch(model)
    net = moved(mt.lora(model(), 3, rank=2, alpha=5, seed=0)).eval()
    folders = net.save_adapters(tmp_path / "adapters")
    assert [folder.name for folder in folders] == ["member-0", "member-1", "member-2"]
    predictions = net(x)
    for folder, prediction in zip(folders, predictions, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = peft.PeftModel.from_pretrained(model(), folder).eval()
        torch.testing.assert_close(logits(loaded, x), prediction, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits(loaded.merge_and_unload(), x), prediction, rtol=1e-4, atol=1e-5)
    again = mt.lora(model(), adapters=folders).eval()
    assert torch.equal(again(x), predictions)


@pytest.mark.quick(2)
@MODELS
@pytest.mark.parametrize("rslora", [False, True])
def test_members_can_be_loaded_from_adapters_of_peft(
    model: Callable[[], nn.Module], rslora: bool, tmp_path: Path
) -> None:
    x = batch(model)
    written = [trained(tmp_path / str(seed), model, seed, use_rslora=rslora) for seed in range(3)]
    net = mt.lora(model(), adapters=[folder for folder, _ in written]).eval()
    assert net.members == 3
    for prediction, (_, theirs) in zip(net(x), written, strict=True):
        torch.testing.assert_close(prediction, logits(theirs, x), rtol=1e-4, atol=1e-5)
    folders = net.save_adapters(tmp_path / "again")
    for folder, (_, theirs) in zip(folders, written, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = peft.PeftModel.from_pretrained(model(), folder).eval()
        torch.testing.assert_close(logits(loaded, x), logits(theirs, x), rtol=1e-4, atol=1e-5)


def test_ranks_alphas_and_layers_may_differ_from_adapter_to_adapter(tmp_path: Path) -> None:
    x = batch(bert)
    written = [
        trained(tmp_path / "a", bert, 0, r=2, lora_alpha=3),
        trained(tmp_path / "b", bert, 1, r=6, lora_alpha=3, target_modules=["query", "key", "dense"]),
        trained(tmp_path / "c", bert, 2, rank_pattern={"query": 3}, alpha_pattern={"layer.1.attention.self.value": 9}),
        trained(tmp_path / "d", bert, 3, modules_to_save=None),
    ]
    net = mt.lora(bert(), adapters=[folder for folder, _ in written]).eval()
    for prediction, (_, theirs) in zip(net(x), written, strict=True):
        torch.testing.assert_close(prediction, logits(theirs, x), rtol=1e-4, atol=1e-5)
    again = mt.lora(bert(), adapters=net.save_adapters(tmp_path / "again")).eval()
    torch.testing.assert_close(again(x), net(x))
    for folder, (_, theirs) in zip(sorted((tmp_path / "again").iterdir()), written, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = peft.PeftModel.from_pretrained(bert(), folder).eval()
        torch.testing.assert_close(logits(loaded, x), logits(theirs, x), rtol=1e-4, atol=1e-5)
    net.train().loss(x, torch.tensor([0, 1, 2, 0, 1])).backward()
    query = net.network.bert.encoder.layer[0].attention.self.query
    assert not query.A.grad[0, 2:].any() and not query.B.grad[0, :, 2:].any()  # what is padded stays zero


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 4)], (3, 8, 8)),
        ([nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)], (4,)),  # also a "1.0"
    ],
    ids=["convolution", "same last name"],
)
def test_peft_loads_the_adapter_of_layer_0_alone(
    layers: list[nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    model, x = nn.Sequential(*layers), torch.randn(5, *shape)
    net = moved(mt.lora(model, 2, rank=2, layers=lambda name, _: name == "0", seed=0)).eval()
    for folder, prediction in zip(net.save_adapters(tmp_path), net(x), strict=True):
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
        torch.testing.assert_close(loaded(x), prediction, rtol=1e-4, atol=1e-5)


def test_a_language_models_adapter_has_no_head(tmp_path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config).eval()

    x = tokens(3)
    net = moved(mt.lora(build(), 2, rank=2, seed=0)).eval()
    folders = net.save_adapters(tmp_path)
    config = json.loads((folders[0] / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"], config["fan_in_fan_out"]) == ("CAUSAL_LM", None, True)
    loaded = peft.PeftModel.from_pretrained(build(), folders[1]).eval()
    torch.testing.assert_close(logits(loaded, x), net(x)[1], rtol=1e-4, atol=1e-5)


def test_the_configuration_is_one_that_peft_reads(tmp_path: Path) -> None:
    (folder, *_) = mt.lora(bert(), 2, rank=2, alpha=5, dropout=0.1).save_adapters(tmp_path)
    config = peft.PeftConfig.from_pretrained(folder)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (2, 5, 0.1, "SEQ_CLS")
    assert set(config.target_modules) == {"query", "key", "value", "dense"}
    assert mt.lora(bert(), adapters=[folder]).network.bert.pooler.dense.dropout == 0.1


# -- what cannot be read -----------------------------------------------------------------------------------


def rewritten(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def test_unsupported_kinds_of_adapters_are_errors(tmp_path: Path) -> None:
    folder, _ = trained(tmp_path / "a", bert)
    for settings, message in (
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number, got 'much'"),
        (
            {"modules_to_save": None},
            r"tensor 'base_model.model.classifier.*' belongs neither to an adapter nor to a layer",
        ),
    ):
        before = (folder / "adapter_config.json").read_text()
        with pytest.raises(ValueError, match=message):
            mt.lora(bert(), adapters=[rewritten(folder, **settings)])
        (folder / "adapter_config.json").write_text(before)
    dora, _ = trained(tmp_path / "dora", bert, use_dora=True)
    with pytest.raises(ValueError, match="use_dora=True"):
        mt.lora(bert(), adapters=[dora])


def test_broken_folders_are_errors(tmp_path: Path) -> None:
    folder, _ = trained(tmp_path / "a", bert)
    with pytest.raises(ValueError, match="nowhere' must be a folder written by PEFT, but it contains no adapter_con"):
        mt.lora(bert(), adapters=[tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="adapters must be a list of folders"):
        mt.lora(bert(), adapters=[])
    with pytest.raises(ValueError, match="adapters must be a list of folders"):
        mt.lora(bert(), adapters=str(folder))
    with pytest.raises(ValueError, match=r"rank=4 cannot be combined with adapters \(1 members\)"):
        mt.lora(bert(), rank=4, adapters=[folder])
    with pytest.raises(
        ValueError, match="adapts layer 'bert.encoder.layer.0.*', but the model has no layer of this name"
    ):
        mt.lora(vit(), adapters=[folder])
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(key for key in tensors if "query.lora_A" in key)
    for changed, message in (
        (
            {name: tensors[name][:, :3].contiguous()},
            r"has shapes \[4, 3\] and \[16, 4\], but the layer has 16 inputs",
        ),
        ({"base_model.model.classifier.bias": torch.zeros(9)}, r"layer 'classifier' has tensors .*\[9\]"),
        ({f"{name}.magnitude": torch.zeros(3)}, "belongs neither to an adapter nor to a layer in"),
    ):
        save_file(tensors | changed, folder / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            mt.lora(bert(), adapters=[folder])
    save_file({key: value for key, value in tensors.items() if key != name}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="contains only lora_B of layer '.*query'"):
        mt.lora(bert(), adapters=[folder])
    (folder / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read"):
        mt.lora(bert(), adapters=[folder])
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config.json is not JSON"):
        mt.lora(bert(), adapters=[folder])


def test_adapters_that_peft_does_not_support_are_not_saved(tmp_path: Path) -> None:
    encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    net = mt.lora(nn.Sequential(encoder, nn.Linear(16, 2)), 2, rank=2, example=torch.randn(2, 3, 16))
    with pytest.raises(ValueError, match=r"PEFT's format does not support .* '0.self_attn' \(MultiheadAttention\)"):
        net.save_adapters(tmp_path)
    mt.lora(mlp(), 3, rank=2).save_adapters(tmp_path)
    with pytest.raises(ValueError, match="contains 'member-2', but there are only 2 members"):
        mt.lora(mlp(), 2, rank=2).save_adapters(tmp_path)
