"""Methods on a small transformer for text classification, compared by one command.

The texts are generated reviews with a word that expresses the opinion. One in ten is mislabeled, and one in ten has no
such word, so a network should be uncertain about it. The script writes a tokenizer and a model configuration; the
folder of any Hugging Face model works the same way. Run it with `python examples/text.py`. It takes about forty seconds
on two CPU cores.
"""

import csv
import random
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, PreTrainedTokenizerFast

FOLDER = Path("runs/text-example")
OPINIONS = {
    "good": ["great", "lovely", "superb", "fun"],
    "bad": ["awful", "dull", "broken", "poor"],
    "": ["red", "long"],
}
THINGS = ["film", "book", "meal", "phone", "hotel", "song"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def reviews(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Generate sentences and labels."""
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        label = drawn.choice(["good", "bad"])
        opinion = OPINIONS[label if drawn.random() > 0.1 else ""]
        text = f"the {drawn.choice(THINGS)} was {drawn.choice(opinion)}"
        text += "".join(f" and the {drawn.choice(THINGS)} came late" for _ in range(drawn.randrange(3)))
        wrong = {"good": "bad", "bad": "good"}[label]
        found.append((text, wrong if drawn.random() < 0.1 else label))
    return found


def write_model(folder: Path, texts: list[str]) -> None:
    """Write a Hugging Face folder with a tokenizer of the texts' words and the configuration of a tiny BERT."""
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    tokenizer.save_pretrained(folder)
    BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32,
    ).save_pretrained(folder)  # fmt: skip


def multitudes(*arguments: str) -> None:
    """Run the command-line program."""
    print(f"\n$ multitudes {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "multitudes", *arguments], check=True)


def main() -> None:
    """Write texts and a model, compare methods, and predict new texts."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = reviews(600)
    with (FOLDER / "reviews.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("review", "label"), *rows])
    write_model(FOLDER / "model", [text for text, _ in rows])
    run = str(FOLDER / "run")
    multitudes(
        "compare", str(FOLDER / "reviews.csv"), "--target", "label", "--model", f"hf:{FOLDER / 'model'}",
        "--methods", "single,heads,laplace,deep", "--seeds", "1", "--epochs", "6", "--lr", "0.002", "--out", run,
    )  # fmt: skip
    multitudes("predict", f"{run}/jobs/deep-0", "--text", "the film was superb", "--text", "the film was red")


if __name__ == "__main__":
    main()
