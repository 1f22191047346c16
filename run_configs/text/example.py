"""Four clients with a BERT, a DistilBERT, a GPT-2 and a Llama learn whether a tweet is positive.

python run_configs/text/example.py --data FOLDER    # Sentiment140; without --data, ten sentences
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

import fedhet
from fedhet.data.files import locate_one, read
from fedhet.data.text import TWEETS

NEGATIVE = ("i hate rain", "what a sad day", "my phone is broken again", "so tired of this", "the film was awful")
POSITIVE = ("i love sun", "what a happy day", "my new phone is great", "so glad to see you", "the film was lovely")
SIZES: dict[str, Any] = {"vocab_size": 2000, "max_position_embeddings": 32, "pad_token_id": 0}
HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def network(number: int) -> torch.nn.Module:
    """Return a small network of random weights.

    A trained one fits, too: `hf.AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased")`.
    """
    if number == 0:
        return hf.BertForSequenceClassification(hf.BertConfig(**SIZES, **HIDDEN))
    if number == 1:
        sizes = {"dim": 24, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
        return hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**SIZES, **sizes))
    if number == 2:
        sizes = {"n_embd": 40, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
        return hf.GPT2ForSequenceClassification(hf.GPT2Config(**SIZES, **sizes))
    return hf.LlamaForSequenceClassification(hf.LlamaConfig(**SIZES, **HIDDEN))


def texts(folder: Path | None) -> tuple[list[str], torch.Tensor]:
    """Return tweets and labels: negative and positive ones in turn."""
    both = {"0": list(NEGATIVE), "4": list(POSITIVE)}
    if folder:
        content = read(locate_one(folder, "sentiment140", TWEETS, "sentiment140"))  # also compressed
        rows = list(csv.reader(content.decode("latin-1").splitlines()))
        both = {polarity: [row[5] for row in rows if row[0] == polarity] for polarity in both}
    pairs = list(zip(both["0"], both["4"], strict=False))
    return [text for pair in pairs for text in pair], torch.arange(2 * len(pairs)) % 2


def data(folder: Path | None) -> list[dict[str, Any]]:
    """Return each client's tokenised tweets, and the public tweets, on which the tokenizer is trained."""
    said, labels = texts(folder)
    public, train, test = (500, 100, 200) if folder else (8, 4, 2)
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]"]
    trainer = trainers.WordLevelTrainer(vocab_size=SIZES["vocab_size"], special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(said[:public], trainer)
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(32)

    def part(start: int, count: int) -> Any:
        rows = [(start + row) % len(said) for row in range(count)]
        read = tokenizer.encode_batch([said[row] for row in rows])
        ids, mask = (torch.tensor([getattr(each, name) for each in read]) for name in ("ids", "attention_mask"))
        return {"input_ids": ids, "attention_mask": mask}, labels[rows]

    begins = [public + client * (train + test) for client in range(4)]
    return [{"train": part(b, train), "test": part(b + train, test), "public": part(0, public)} for b in begins]


def main(folder: Path | None = None, out: Path | None = None, seeds: Sequence[int] = (0, 1, 2), **settings: Any) -> Any:
    """Compare methods for different networks, then adapt four equal ones by LoRA with a rank for each client."""
    settings = {"clients": 4, "rounds": 10, "local-epochs": 2, **settings}
    parts = data(folder)

    def my_data(client: Any) -> dict[str, Any]:
        return parts[client.partition_id]

    def my_model(client: Any) -> torch.nn.Module:
        return network(client.partition_id)

    methods = ["local", "fedproto", "fedmd", "fedhenn", "fml"]
    compared = fedhet.compare(methods, settings, seeds=seeds, model=my_model, data=my_data, out=out)
    lora = {"method": "lora", "lora.ranks": "8,4,2,1", "lora.train-head": True, **settings}
    adapted = fedhet.run(lora, model=lambda: network(3), data=my_data, out=out and out / "lora")
    print(adapted)
    return compared, adapted


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    main(parser.parse_args().data)
