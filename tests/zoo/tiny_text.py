"""Generated texts with a learnable rule, and tiny Hugging Face models with a tokenizer."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

GOOD, BAD = ("great", "fine", "lovely", "superb"), ("awful", "poor", "dull", "broken")
THINGS = ("film", "book", "meal", "phone", "hotel", "song")


def reviews(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Generate sentences of different lengths, labeled good or bad; one of the words determines the label."""
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        good = drawn.random() < 0.5
        parts = [f"the {drawn.choice(THINGS)} was {drawn.choice(GOOD if good else BAD)}"]
        parts += [f"and the {drawn.choice(THINGS)} came late" for _ in range(drawn.randrange(3))]
        found.append((" ".join(parts), "good" if good else "bad"))
    return found


def write_csv(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str] = ("review", "label")) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def tokenizer(folder: Path, special: bool = True) -> Any:
    """Write a tokenizer of the reviews' words; if `special`, it adds tokens before and after a text, like BERT's."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    words.normalizer = tokenizers.normalizers.Lowercase()
    words.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] if special else ["[END]", "[UNK]"]
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=names, show_progress=False)
    words.train_from_iterator([text for text, _ in reviews(300)], trainer)
    told = {"unk_token": "[UNK]", "model_max_length": 32}
    if special:
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        told |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        told |= {"eos_token": "[END]"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **told)
    fast.save_pretrained(folder)
    return fast


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def text_config(kind: str, vocabulary: int) -> Any:
    if kind == "bert":
        return transformers.BertConfig(vocab_size=vocabulary, max_position_embeddings=32, **SMALL)
    if kind == "roberta":
        return transformers.RobertaConfig(vocab_size=vocabulary, max_position_embeddings=34, pad_token_id=0, **SMALL)
    if kind == "distilbert":
        return transformers.DistilBertConfig(
            vocab_size=vocabulary, max_position_embeddings=32, dim=16, n_layers=1, n_heads=2, hidden_dim=32
        )
    assert kind == "gpt2"
    return transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )


def text_model(folder: Path, kind: str = "bert", weights: bool = False) -> Path:
    """Write a folder with a tiny model and its tokenizer, and with weights if `weights`."""
    fast = tokenizer(folder, special=kind != "gpt2")
    config = text_config(kind, len(fast))
    config.save_pretrained(folder)
    if weights:
        transformers.AutoModel.from_config(config).save_pretrained(folder)
    return folder


def vit_model(folder: Path, size: int = 8, channels: int = 1, weights: bool = False) -> Path:
    config = transformers.ViTConfig(image_size=size, patch_size=4, num_channels=channels, **SMALL)
    config.save_pretrained(folder)
    if weights:
        transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder
