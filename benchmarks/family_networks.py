"""Small networks of every family: Hugging Face models with tiny configurations, and plain torch networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.campaigns.random_networks import Case, in_double, run

CLASSES = 3
BATCH = 4
DROPOUT = 0.2

TEXT = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8,
         "patch_size": 4}  # fmt: skip
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
SPEECH = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 8,
          "conv_dim": [8, 8], "conv_stride": [4, 2], "conv_kernel": [8, 3], "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8,
          "layerdrop": 0.0, "apply_spec_augment": False}  # fmt: skip
DECODER = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}  # fmt: skip

Settings = dict[str, Any]
SEQUENCE, TOKENS, IMAGES, SOUNDS = (
    "ForSequenceClassification", "ForTokenClassification", "ForImageClassification", "ForAudioClassification"
)  # fmt: skip
GPT2 = TEXT | {"n_embd": 16, "n_layer": 2, "n_head": 2}
GROUPS = {f"{name}_groups": 2 for name in ("q", "k", "v", "intermediate", "output")} | {"post_attention_groups": 1}
TWO_STAGES = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
              "strides": [2, 2]}  # fmt: skip
HUGGING_FACE: dict[str, dict[str, tuple[str, str, Settings]]] = {
    "text": {
        "BERT": ("Bert", SEQUENCE, TEXT),
        "BERT, tokens": ("Bert", TOKENS, TEXT),
        "RoBERTa": ("Roberta", SEQUENCE, TEXT),
        "DistilBERT": ("DistilBert", SEQUENCE, TEXT | {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}),
        "ALBERT": ("Albert", SEQUENCE, TEXT | {"embedding_size": 8}),
        "ELECTRA": ("Electra", SEQUENCE, TEXT | {"embedding_size": 8}),
        "DeBERTa-v2": ("DebertaV2", SEQUENCE, TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
        "MPNet": ("MPNet", SEQUENCE, TEXT),
        "ConvBERT": ("ConvBert", SEQUENCE, TEXT | {"embedding_size": 16, "conv_kernel_size": 3}),
        "SqueezeBERT": ("SqueezeBert", SEQUENCE, TEXT | GROUPS | {"embedding_size": 16}),
        "FNet": ("FNet", SEQUENCE, TEXT),
        "GPT-2": ("GPT2", SEQUENCE, GPT2),
        "GPT-2, language model": ("GPT2", "LMHeadModel", GPT2),
        "OPT": ("OPT", SEQUENCE, TEXT | {"ffn_dim": 24, "word_embed_proj_dim": 16}),
        "GPT-NeoX": ("GPTNeoX", SEQUENCE, TEXT),
        "BLOOM": ("Bloom", SEQUENCE, TEXT | {"n_layer": 2, "n_head": 2}),
        "Llama": ("Llama", SEQUENCE, TEXT | {"num_key_value_heads": 1}),
        "Mistral": ("Mistral", SEQUENCE, TEXT | {"num_key_value_heads": 1}),
        "T5, encoder": (
            "T5", TOKENS, {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        ),
        "BART": ("Bart", SEQUENCE, TEXT | DECODER),
        "XLNet": ("XLNet", SEQUENCE, {"vocab_size": 32, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}),
        "Mamba, language model": (
            "Mamba", "ForCausalLM", {"vocab_size": 32, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1}
        ),
    },
    "vision": {
        "ViT": ("ViT", IMAGES, IMAGE),
        "DeiT": ("DeiT", IMAGES, IMAGE),
        "BEiT": ("Beit", IMAGES, IMAGE),
        "DINOv2": ("Dinov2", IMAGES, IMAGE),
        "Swin": (
            "Swin", IMAGES, {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
                             "window_size": 2}
        ),
        "SegFormer": (
            "Segformer", IMAGES, TWO_STAGES | {"sr_ratios": [2, 1], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
        ),
        "ConvNeXt": ("ConvNext", IMAGES, STAGES | {"patch_size": 2}),
        "PoolFormer": ("PoolFormer", IMAGES, TWO_STAGES | {"padding": [1, 1]}),
        "ResNet": ("ResNet", IMAGES, STAGES | {"embedding_size": 8, "layer_type": "basic"}),
        "RegNet": ("RegNet", IMAGES, STAGES | {"embedding_size": 8, "groups_width": 4}),
        "MobileNetV2": ("MobileNetV2", IMAGES, {"depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4}),
        "EfficientNet": (
            "EfficientNet", IMAGES, {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}
        ),
    },
    "audio": {
        "Wav2Vec2": ("Wav2Vec2", SEQUENCE, SPEECH),
        "HuBERT": ("Hubert", SEQUENCE, SPEECH),
        "WavLM": ("WavLM", SEQUENCE, SPEECH),
        "AST": (
            "AST", SOUNDS, IMAGE | {"num_mel_bins": 8, "max_length": 16, "frequency_stride": 4, "time_stride": 4}
        ),
        "Whisper, encoder": (
            "Whisper", SOUNDS, DECODER | {"num_mel_bins": 8, "max_source_positions": 8, "classifier_proj_size": 8}
        ),
    },
}  # fmt: skip


SOURCES = ("attention", "other layers")
"""Sources of dropout that configurations name."""


def hugging_face(kind: str, head: str, settings: Settings, rates: dict[str, float]) -> nn.Module:
    """Build a Hugging Face model with these dropout rates."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, **settings)
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float) and name != "layerdrop":
            setattr(config, name, 0.0 if "path" in name else rates[SOURCES["att" not in name]])
    config.use_cache = False
    config.pad_token_id = 0 if getattr(config, "vocab_size", None) else None
    return getattr(transformers, kind + head)(config)


def inputs_of(group: str, name: str) -> Any:
    if group == "text":
        words = torch.randint(3, 32, (BATCH, 6))
        if name in ("BART", "Mamba, language model", "FNet"):
            return {"input_ids": torch.cat([words, torch.full((BATCH, 1), 2)], 1)}
        mask = torch.ones_like(words)
        mask[1, 4:] = 0
        return {"input_ids": torch.where(mask.bool(), words, 0), "attention_mask": mask}
    if group == "vision":
        size = {"MobileNetV2": 32, "EfficientNet": 32, "SegFormer": 16, "PoolFormer": 16, "ResNet": 16, "RegNet": 16}
        return {"pixel_values": torch.randn(BATCH, 3, *[size.get(name, 8)] * 2)}
    if name == "AST":
        return {"input_values": torch.randn(BATCH, 16, 8)}
    if name == "Whisper, encoder":
        return {"input_features": torch.randn(BATCH, 8, 16)}
    return {"input_values": torch.randn(BATCH, 200)}


# -- plain networks ----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(32, 8), layer, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x))[0][:, -1])


class Transformer(nn.Module):
    """A torch encoder, batch-first or sequence-first."""

    def __init__(self, first: bool, rate: float) -> None:
        super().__init__()
        self.first = first
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, CLASSES)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=rate, batch_first=not first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.encoder(x.transpose(0, 1)).mean(0) if self.first else self.encoder(x).mean(1))


class Temporal(nn.Module):
    """A temporal convolutional network."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(6, 6, 3, dilation=2**i) for i in range(2))
        self.dropout, self.head = nn.Dropout(rate), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(layer(F.pad(x, (2 * layer.dilation[0], 0))).relu())
        return self.head(x[:, :, -1])


class GraphNetwork(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.one, self.two, self.dropout = nn.Linear(6, 8), nn.Linear(8, CLASSES), nn.Dropout(rate)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            messages = layer(self.dropout(x))
            x = torch.zeros_like(messages).index_add(0, edge_index[1], messages[edge_index[0]]).tanh()
        return x


class Mixture(nn.Module):
    """A mixture of experts; the best expert computes each row."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.gate, self.dropout = nn.Linear(6, 3), nn.Dropout(rate)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(self.dropout(x)).softmax(-1)
        best, out = gates.argmax(-1), x.new_zeros(len(x), CLASSES)
        for index, expert in enumerate(self.experts):
            mine = (best == index).nonzero().squeeze(-1)
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]) * gates[mine, index, None])
        return out


def perceptron(rate: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    )


def convolutional(rate: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(), nn.Dropout2d(rate), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.last, self.dropout = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Dropout(rate)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.two(self.dropout(self.norm(self.one(x)).relu())))


def residual(rate: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Residual(rate), nn.ReLU(), nn.AvgPool2d(2), Residual(rate), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.into, self.inside = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.down = nn.MaxPool2d(2)
        self.up, self.out = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Conv2d(12, CLASSES, 1)
        self.norm, self.dropout = nn.BatchNorm2d(8), nn.Dropout2d(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x).relu()
        y = self.dropout(self.norm(self.inside(self.down(x))).relu())
        return self.out(torch.cat([x, self.up(y)], 1))


def _words() -> Tensor:
    return torch.randint(32, (BATCH, 6))


PLAIN: dict[str, tuple[Callable[[float], nn.Module], Callable[[], Any]]] = {
    "perceptron": (perceptron, lambda: torch.randn(BATCH, 6)),
    "CNN": (convolutional, lambda: torch.randn(BATCH, 3, 8, 8)),
    "residual network": (residual, lambda: torch.randn(BATCH, 3, 8, 8)),
    "U-Net": (UNet, lambda: torch.randn(BATCH, 3, 8, 8)),
    "LSTM": (lambda rate: Recurrent(nn.LSTM(8, 8, 2, batch_first=True, dropout=rate)), _words),
    "GRU": (lambda rate: Recurrent(nn.GRU(8, 8, 2, batch_first=True, dropout=rate)), _words),
    "temporal convolutions": (Temporal, lambda: torch.randn(BATCH, 6, 7)),
    "transformer": (lambda rate: Transformer(False, rate), _words),
    "transformer, sequence-first": (lambda rate: Transformer(True, rate), _words),
    "graph network": (GraphNetwork, lambda: (torch.randn(8, 6), torch.randint(8, (2, 20)))),
    "mixture of experts": (Mixture, lambda: torch.randn(BATCH, 6)),
}

FAMILIES = {**{name: "plain" for name in PLAIN}, **{n: group for group, of in HUGGING_FACE.items() for n in of}}
"""The group of each family, by name."""


def family(name: str, noise: Sequence[int] | None = None, weights: int = 0) -> Case:
    """Build a small network of a family. `noise` selects its sources of dropout; by default all. `weights` is a seed.

    Other sources have a tiny rate that never drops anything, or rate 0 if `noise` is empty.
    """
    group, number = FAMILIES[name], list(FAMILIES).index(name)
    sources = _sources(name)
    on = range(len(sources)) if noise is None else noise
    rates = {s: DROPOUT if i in on else 1e-9 if on else 0.0 for i, s in enumerate(sources)}
    model = _built(name, rates, weights)
    with in_double(number):
        x = PLAIN[name][1]() if group == "plain" else inputs_of(group, name)
        prediction = run(model, x).detach()
        dense = prediction.dim() > 2
        y = torch.randn_like(prediction) if dense else torch.randint(CLASSES, (len(prediction),))
    return Case(number, model, x, y, "regression" if dense else "classification", (group, name), sources)


def _built(name: str, rates: dict[str, float], weights: int) -> nn.Module:
    group, number = FAMILIES[name], list(FAMILIES).index(name)
    with in_double(1_000_003 * weights + number):
        if group == "plain":
            return PLAIN[name][0](rates.get("other layers", 0.0)).double().eval()
        return hugging_face(*HUGGING_FACE[group][name], {s: rates.get(s, 0.0) for s in SOURCES}).double().eval()


@cache
def _sources(name: str) -> tuple[str, ...]:
    """Return the sources of dropout that a family has: those with which two runs in training mode differ."""
    with in_double(0):
        x = PLAIN[name][1]() if FAMILIES[name] == "plain" else inputs_of(FAMILIES[name], name)
        found = []
        for source in SOURCES:
            model = _built(name, {source: DROPOUT}, 0).train()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
            with torch.no_grad():
                if not torch.equal(run(model, x), run(model, x)):
                    found.append(source)
    return tuple(found)
