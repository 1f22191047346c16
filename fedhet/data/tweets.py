"""Sentiment140: tweets by user, as words of a vocabulary or as frozen word vectors."""

import csv
import html
import io
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhet.data.examples import DataSet, Examples, Owners
from fedhet.data.files import locate_one, read, rows_of
from fedhet.data.registry import register_dataset
from fedhet.errors import DataError
from fedhet.models.text import VOCABULARY
from fedhet.task import get_task

WORDS = 25
"""Words of a tweet that a network reads, the first ones; as in LEAF."""

FILES = tuple(f"training.1600000.processed.noemoticon{part}.csv" for part in ("", ".subset20000"))
"""Names under which the tweets are looked for: all of them, or a sample."""

VECTORS = tuple(
    f"glove.{corpus}.{width}d.txt"
    for corpus, widths in {"6B": (300, 200, 100, 50), "twitter.27B": (200, 100, 50, 25)}.items()
    for width in widths
)
"""Names under which word vectors are looked for, in this order."""

MIN_TWEETS = 50
"""The fewest tweets of a natural client."""

POLARITIES = {"0": 0, "4": 1}
PADDING, UNKNOWN = 0, 1
"""Indices before the first word of a short tweet, and of a word that is not in the vocabulary; words come behind."""

_WORD = re.compile(r"https?://\S+|www\.\S+|@\w+|[\w']+|[.,!?;]")


def words_of(tweet: str) -> list[str]:
    """The words and marks of a tweet in lower case; a link is `<url>` and a name `<user>`, as in GloVe for Twitter."""
    found = _WORD.findall(html.unescape(tweet).lower())
    return [
        "<user>" if word[0] == "@" else "<url>" if "://" in word or word.startswith("www.") else word for word in found
    ]


@register_dataset("sentiment140")
def sentiment140(folder: Path | None, *, min_tweets: int = MIN_TWEETS) -> DataSet:
    """Tweets with two sentiments (Go et al., 2009: 1,600,000), as indices of their words in a vocabulary.

    A natural client is a user with enough tweets; the others' are for other partitions. Of the tweets sorted by user,
    every fifth is for testing, so a user's are both early and late, positive and negative ones. The vocabulary has the
    most frequent words of the training part (`VOCABULARY`, with padding and unknown).

    Args:
        folder: Where the file is; see `FILES`, also packed.
        min_tweets: The fewest tweets of a natural client, as LEAF's `-k`.

    Raises:
        DataError: The file is missing, damaged or has another layout.
    """
    return _tweets(folder, min_tweets)[0]


@register_dataset("sentiment140-glove")
def sentiment140_glove(folder: Path | None, *, min_tweets: int = MIN_TWEETS) -> DataSet:
    """Sentiment140 as frozen vectors of its words (25, width), from a file in GloVe's text format.

    Words without a vector, unknown ones and padding are zeros. Arguments and errors are those of `sentiment140`; the
    vectors are in the same folder (see `VECTORS`, also packed).
    """
    dataset, vocabulary = _tweets(folder, min_tweets)
    vectors = read_vectors(locate_one(folder, "sentiment140", VECTORS, "word vectors"), vocabulary)
    shape = (WORDS, vectors.shape[1])
    return replace(dataset, name="sentiment140-glove", input_shape=shape, transform=WordVectors(vectors))


class WordVectors:
    """The vectors (n, words, width) float32 of words (n, words), given as indices."""

    def __init__(self, vectors: Tensor) -> None:
        """Take the vector of each index, (indices, width)."""
        self._vectors = vectors

    def __call__(self, indices: Tensor) -> Tensor:
        """Look the vectors up, on the indices' device."""
        self._vectors = self._vectors.to(indices.device)  # they stay where indices are
        return self._vectors[indices.long()]


def read_vectors(file: Path, vocabulary: Iterable[str]) -> Tensor:
    """The vectors (2 + words, width) float32 of a vocabulary, after zeros for padding and unknown words.

    Raises a `DataError` if the file, in GloVe's text format (a word and its numbers a line), is damaged or has none of
    the words.
    """
    numbers = {word: number for number, word in enumerate(vocabulary, UNKNOWN + 1)}
    vectors, found, width = np.zeros((0, 0), np.float32), 0, 0
    for row, line in enumerate(rows_of(file), 1):
        word, *values = line.rstrip().split(" ")
        if row == 1:
            width = len(values)
            vectors = np.zeros((UNKNOWN + 1 + len(numbers), width), np.float32)
        if word not in numbers:
            continue
        try:
            vectors[numbers[word]] = np.array(values, np.float32).reshape(width)  # one number would stand for all
        except ValueError as error:
            raise DataError(f"{file}: line {row} is not a word and {width} numbers, as line 1 is") from error
        found += 1
    if not found or not np.isfinite(vectors).all():
        what = "is not finite" if found else f"has none of the {len(numbers)} words of the tweets"
        raise DataError(f"{file} {what}: word vectors in GloVe's text format are needed")
    return torch.from_numpy(vectors)


def _tweets(folder: Path | None, min_tweets: int) -> tuple[DataSet, list[str]]:
    """The data set, and its vocabulary from index 2 on."""
    path = locate_one(folder, "sentiment140", FILES, "sentiment140")
    numbers: dict[str, int] = {}  # of a word, from 1 in order of appearance, until words are counted
    labels, users, texts = [], [], []
    for polarity, user, tweet in _rows(path):
        labels.append(POLARITIES[polarity])
        users.append(user)
        texts.append([numbers.setdefault(word, len(numbers) + 1) for word in words_of(tweet)[:WORDS]])
    owners = np.unique(users, return_inverse=True)[1].astype(np.int64)
    tested = np.zeros(len(owners), bool)
    tested[np.argsort(owners, kind="stable")[4::5]] = True
    codes = np.zeros((len(texts), WORDS), np.int32)
    for row, text in zip(codes, texts, strict=True):
        row[WORDS - len(text) :] = text
    counts = np.bincount(codes[~tested].ravel(), minlength=len(numbers) + 1)
    counts[PADDING] = 0
    frequent = np.argsort(-counts, kind="stable")[: VOCABULARY - UNKNOWN - 1]
    frequent = frequent[counts[frequent] > 0]
    indices = np.full(len(counts), UNKNOWN, np.int16)
    indices[PADDING], indices[frequent] = PADDING, np.arange(len(frequent)) + UNKNOWN + 1
    examples = Examples(torch.from_numpy(indices[codes]), torch.tensor(labels))
    natural = np.where(np.bincount(owners)[owners] >= min_tweets, owners, -1)
    train, test = np.flatnonzero(~tested), np.flatnonzero(tested)
    dataset = DataSet(
        name="sentiment140",
        train=examples.subset(train),
        test=examples.subset(test),
        classes=len(POLARITIES),
        task=get_task("classification"),
        input_shape=(WORDS,),
        transform=Tensor.long,  # which embeddings take
        groups=Owners(natural[train], natural[test]),
    )
    known = list(numbers)
    return dataset, [known[number - 1] for number in frequent]


def _rows(path: Path) -> Iterable[tuple[str, str, str]]:
    """Polarity, user and text of each tweet."""
    number = 0
    try:
        for row in csv.reader(io.StringIO(read(path).decode("latin-1"), newline="")):
            number += 1
            if len(row) != 6 or row[0] not in POLARITIES:
                raise csv.Error("polarity (0 or 4), id, date, query, user and text are expected")
            yield row[0], row[4], row[5]
    except csv.Error as error:
        raise DataError(f"{path}: row {number} is damaged ({error}): get the file again") from error
    if number < 5:
        raise DataError(f"{path} has {number} tweets, too few for a training and a test part")
