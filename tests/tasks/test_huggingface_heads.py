"""Hugging Face's heads set the task and have Hugging Face's own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from tests.tasks.task_cases import SMALL, bert, classes, texts

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def vit(**options: Any) -> nn.Module:
    config = transformers.ViTConfig(image_size=8, patch_size=4, **SMALL, **options)
    return transformers.ViTForImageClassification(config).eval()


HEADS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: bert("TokenClassification", num_labels=5), "tokens"),
    (lambda: bert("MaskedLM"), "tokens"),
    (gpt2, "tokens"),
    (lambda: bert("SequenceClassification", num_labels=5), "classification"),
    (lambda: bert("SequenceClassification", num_labels=1), "regression"),
    (lambda: bert("SequenceClassification", num_labels=3, problem_type="regression"), "regression"),
    (lambda: bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"), "multilabel"),
    (lambda: vit(num_labels=4), "classification"),
    (lambda: vit(num_labels=4, problem_type="multi_label_classification"), "multilabel"),
]


@pytest.mark.parametrize(("build", "task"), HEADS)
def test_a_head_sets_the_task_of_every_kind_of_multitude(build: Callable[[], nn.Module], task: str) -> None:
    model = build()
    nets = [mt.Multitude(model), mt.deep_ensemble(model, 2, init="fresh"), mt.fuse([model, model])]
    nets += [mt.deep_ensemble(mt.Multitude(model), 2, init="fresh")]
    assert [net.task for net in nets] == [task] * len(nets)
    nets[0].task = "quantiles"
    assert nets[0].task == "quantiles"  # an explicit one wins


@pytest.mark.parametrize("members", [1, 2])
def test_token_classifiers_and_language_models_have_hugging_faces_loss(members: int) -> None:
    for model, x in (
        (bert("TokenClassification", num_labels=5), texts()),
        (gpt2(), texts()),
        (bert("MaskedLM"), texts()),
    ):
        y = classes(3, 7, high=5)
        y[0, 4:] = y[1, 0] = -100
        net = mt.fuse([model] * members)
        want = model(**x, labels=y).loss  # shifted by one position where it is a causal language model
        torch.testing.assert_close(net.loss(x, y), members * want)
        p = net.predict(x)
        torch.testing.assert_close(p.probs, model(**x).logits.softmax(-1))
        result = mt.evaluate(net, [({**x, "labels": y})])
        assert result["nll"] == pytest.approx(want.item(), rel=1e-5)
        assert result["perplexity"] == pytest.approx(want.exp().item(), rel=1e-5)
        shifts = isinstance(model, transformers.GPT2LMHeadModel)
        assert net.next_tokens == p.next_tokens == shifts
        assert result.counts["nll"] == int((y[:, 1:] != -100).sum() if shifts else (y != -100).sum())
        calibrated = mt.calibrate(net, [({**x, "labels": y})], conformal=None)
        assert mt.evaluate(calibrated, [({**x, "labels": y})])["nll"] <= result["nll"] + 1e-6
        if shifts:
            net.next_tokens = False
            moved = torch.cat([y[:, 1:], torch.full_like(y[:, :1], -100)], 1)
            torch.testing.assert_close(net.loss(x, moved), members * want)


def test_texts_of_several_lengths_are_calibrated_and_scored() -> None:
    net = mt.Multitude(gpt2())
    batches = [{"input_ids": classes(3, length, high=11)} for length in (7, 5, 9)]
    batches = [batch | {"labels": batch["input_ids"]} for batch in batches]
    calibrated = mt.calibrate(net, batches, conformal=None)
    counts = mt.evaluate(calibrated, batches).counts
    assert counts["nll"] == 3 * (6 + 4 + 8)
    logits = [net.predict({"input_ids": batch["input_ids"]}).log_probs[:, :-1].flatten(0, 1) for batch in batches]
    y = torch.cat([batch["labels"][:, 1:].flatten() for batch in batches])
    best = min(F.cross_entropy(torch.cat(logits) / t, y).item() for t in torch.logspace(-2, 2, 2001))
    assert mt.evaluate(calibrated, batches)["nll"] == pytest.approx(best, rel=1e-5)


def test_training_a_language_model_to_copy_its_input_warns() -> None:
    net = mt.Multitude(nn.Embedding(11, 11))
    net.task = "tokens"
    x = classes(3, 7, high=11)
    with pytest.warns(UserWarning, match=r"y holds the tokens of x, .*set net.next_tokens = True"):
        net.loss(x, x)
    net.next_tokens = True
    want = F.cross_entropy(net.network(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(net.loss(x, x), want)


def test_multilabel_and_regression_heads_have_hugging_faces_loss() -> None:
    x = texts()
    model = bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification")
    y = classes(3, 3, high=2)
    torch.testing.assert_close(mt.Multitude(model).loss(x, y), model(**x, labels=y.float()).loss)
    model = bert("SequenceClassification", num_labels=1)
    values = torch.randn(3, 1)
    torch.testing.assert_close(mt.Multitude(model).loss(x, values), model(**x, labels=values).loss)


def decoder(**options: Any) -> dict[str, Any]:
    layers = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
              (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return {"vocab_size": 40, "d_model": 16, "max_position_embeddings": 32, **layers, **special, **options}


T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
XLNET = {"vocab_size": 40, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}
LLAMA = {**{key: SMALL[key] for key in list(SMALL)[:4]}, "vocab_size": 40, "num_key_value_heads": 2}
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether labels are those of the next position
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)), True),
    "bert as a decoder": (
        lambda: transformers.BertLMHeadModel(transformers.BertConfig(vocab_size=40, is_decoder=True, **SMALL)), True,
    ),
    "bart's decoder": (lambda: transformers.BartForCausalLM(transformers.BartConfig(**decoder())), False),
    "xlnet": (lambda: transformers.XLNetLMHeadModel(transformers.XLNetConfig(**XLNET)), False),
    "bart": (lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**decoder())), False),
    "t5": (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_labels_are_shifted_if_hugging_faces_loss_shifts_them(name: str) -> None:
    build, shifts = MODELS[name]
    torch.manual_seed(0)
    model, x, y = build().eval(), texts(), classes(3, 7, high=40)
    if name in ("bart", "t5"):
        x["decoder_input_ids"] = x["input_ids"]
    y[0, 3:] = -100
    net = mt.Multitude(model)
    assert net.task == "tokens" and net.next_tokens == shifts
    torch.testing.assert_close(net.loss(x, y), model(**x, labels=y).loss)


def test_segmentation_heads_need_logits_of_the_labels_size() -> None:
    sizes = {"hidden_sizes": [8, 8, 8, 8], "depths": [1] * 4, "decoder_hidden_size": 8, "num_attention_heads": [1] * 4}
    model = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**sizes, num_labels=3)).eval()
    x, y = {"pixel_values": torch.randn(2, 3, 32, 32)}, classes(2, 32, 32, high=3)
    net = mt.Multitude(model)
    assert net.task == "classification" and net.predict(x).probs.shape == (2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"of size \[8, 8\] and y of size \[32, 32\].*output="):
        net.loss(x, y)

    def enlarged(answer: Any) -> Tensor:
        return F.interpolate(answer.logits, size=(32, 32), mode="bilinear", align_corners=False)

    net = mt.Multitude(model, output=enlarged)
    torch.testing.assert_close(net.loss(x, y), model(**x, labels=y).loss)
    assert net.predict(x).label.shape == (2, 32, 32)
