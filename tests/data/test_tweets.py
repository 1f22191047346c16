"""Sentiment140: made-up files, and the sample of `FEDHET_DATA` (skipped without it)."""

import lzma
from pathlib import Path

import pytest
import torch

from fedhet import data, models
from fedhet.data import text as tweets
from fedhet.errors import DataError

NAME = tweets.TWEETS[0]


def write(folder: Path, rows: list[tuple[str, str, str]], suffix: str = "") -> Path:
    """The original layout, of (polarity, user, text)."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f'"{polarity}","7","Mon Apr 06","NO_QUERY","{user}","{text}"' for polarity, user, text in rows]
    content = "\r\n".join(lines).encode("latin-1")
    path = folder / f"{NAME}{suffix}"
    path.write_bytes(lzma.compress(content) if suffix else content)
    return path


def rows(users: dict[str, int]) -> list[tuple[str, str, str]]:
    """So many tweets of each user, the negative ones first as in the original, all saying `bad` or `good`."""
    return [
        (polarity, user, f"{word} day, {user}!")
        for polarity, word in (("0", "bad"), ("4", "good"))
        for user, count in users.items()
        for _ in range(count // 2)
    ]


@pytest.mark.parametrize(("place", "suffix"), [("", ""), ("sentiment140", ".xz")])
def test_natural_clients(tmp_path: Path, place: str, suffix: str) -> None:
    write(tmp_path / place, rows({"ann": 20, "bob": 2, "cleo": 30}), suffix)
    dataset = tweets.sentiment140(tmp_path, min_tweets=10)
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (42, 10, 2)
    parts = data.partition(dataset, "natural", clients=2, seed=0)
    assert [(len(part.train), len(part.test)) for part in parts] == [(16, 4), (24, 6)]
    for part in parts:
        assert set(dataset.test.labels[part.test].tolist()) == {0, 1}
    with pytest.raises(DataError, match="has 2 natural clients, not 3"):
        data.partition(dataset, "natural", clients=3, seed=0)
    assert sum(len(part.train) for part in data.partition(dataset, "iid", clients=3, seed=0)) == 42
    with pytest.raises(DataError, match="sentiment140 has no natural clients"):
        data.partition(tweets.sentiment140(tmp_path), "natural", clients=1, seed=0)


def test_words_are_indices_in_a_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["b a b", "b a c é", "b", "b", "never x"]  # the last one is for testing
    write(tmp_path, [("0", "ann", text) for text in texts])
    dataset = tweets.sentiment140(tmp_path)
    assert dataset.train.inputs.shape == (4, tweets.WORDS)
    assert dataset.train.inputs[:, -4:].tolist() == [[0, 2, 3, 2], [2, 3, 4, 5], [0, 0, 0, 2], [0, 0, 0, 2]]
    assert dataset.test.inputs[0, -3:].tolist() == [tweets.PADDING, tweets.UNKNOWN, tweets.UNKNOWN]
    assert dataset.transform(dataset.test.inputs[:]).dtype == torch.int64
    write(tmp_path, [("4", "ann", " ".join(map(str, range(40))))] * 5)
    assert tweets.sentiment140(tmp_path).train.inputs[0].tolist() == list(range(2, 2 + tweets.WORDS)), "the first words"
    monkeypatch.setattr(tweets, "VOCABULARY", 4)
    write(tmp_path, [("0", "ann", text) for text in ["rare b", "a b", "a b", "a b", "x"]])
    assert tweets.sentiment140(tmp_path).train.inputs[:2, -2:].tolist() == [[1, 2], [3, 2]], "the most frequent words"


def test_links_names_and_marks() -> None:
    assert tweets.words_of("@Ann_1 It's &lt;3 at http://x.y/z?a=1, www.b.de") == [
        *("<user>", "it's", "3", "at", "<url>", "<url>")
    ]
    assert tweets.words_of("No!! why?") == ["no", "!", "!", "why", "?"]


def test_frozen_vectors_stand_for_words(tmp_path: Path) -> None:
    write(tmp_path, [("0", "ann", "good day é x")] * 5)
    (tmp_path / "glove.6B.50d.txt").write_text("the 1 1 1\nday 1 2 3\né .5 0 -1\ngood 4 5 6\n", encoding="utf-8")
    dataset = tweets.sentiment140_glove(tmp_path)
    batch = dataset.transform(dataset.train.inputs[:2])
    assert dataset.input_shape == tuple(batch.shape[1:]) == (tweets.WORDS, 3)
    assert batch.dtype == torch.float32
    assert batch[0, -4:].tolist() == [[4, 5, 6], [1, 2, 3], [0.5, 0, -1], [0, 0, 0]]
    assert not batch[0, :-4].any()
    names = set(dict(models.build("word-lstm-1", dataset.input_shape, 2).named_parameters()))
    assert not {name for name in names if name.startswith("embedding")}, "they are not learnt"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("day 1 2\ngood 1\n", r"line 2 of .*glove\.6B\.50d\.txt is not a word and 2 numbers"),
        ("night 1 2\n", "has none of the 2 words of the tweets"),
        ("day 1 nan\n", "numbers that are not finite"),
    ],
)
def test_a_damaged_file_of_vectors_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    write(tmp_path, [("0", "ann", "good day")] * 5)
    with pytest.raises(DataError, match=r"no word vectors in .*put glove\.6B\.300d\.txt"):
        tweets.sentiment140_glove(tmp_path)
    (tmp_path / "glove.6B.50d.txt").write_text(content)
    with pytest.raises(DataError, match=message) as refused:
        tweets.sentiment140_glove(tmp_path)
    assert len(str(refused.value).splitlines()) == 1
    (tmp_path / "glove.6B.50d.txt").unlink()
    (tmp_path / "glove.6B.50d.txt.xz").write_bytes(lzma.compress(b"good 1 2\nday 3 4\n" * 99)[:-20])
    with pytest.raises(DataError, match=r"50d\.txt\.xz is damaged"):
        tweets.sentiment140_glove(tmp_path)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a folder with training\.1600000"):
        data.load("sentiment140")
    with pytest.raises(DataError, match=r"no sentiment140 in .*put training\.1600000"):
        data.load("sentiment140", tmp_path)
    path = write(tmp_path, [("0", "ann", "day"), ("2", "bob", "neutral")])
    with pytest.raises(DataError, match=r"row 2 of .* is damaged \(a row must have polarity"):
        data.load("sentiment140", tmp_path)
    path.write_bytes(path.read_bytes()[:-25])
    with pytest.raises(DataError, match=r"row 2 of .* is damaged"):
        data.load("sentiment140", tmp_path)
