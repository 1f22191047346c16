"""Loaders of texts: Shakespeare's plays by speaking role, and the tweets of Sentiment140 by user."""

import csv
import html
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhet.data.examples import DataSet, Examples, Indices, Owners, register_dataset
from fedhet.data.files import locate_one, read, rows_of
from fedhet.errors import DataError, shown
from fedhet.models.networks import VOCABULARY
from fedhet.tasks import Task

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's vocabulary of 80 characters. As in LEAF, any other character is read as the last one."""

WINDOW = 80  # number of characters from which the next one is predicted
FILES = ("t8.shakespeare.txt", "raw_data.txt")  # names of the text of the complete works; the second is LEAF's

Speeches = dict[str, list[str]]

_CODES = np.full(256, len(CHARACTERS) - 1, dtype=np.uint8)
_CODES[np.frombuffer(CHARACTERS.encode("ascii"), np.uint8)] = np.arange(len(CHARACTERS))

_BY_LINE = "by William Shakespeare"
# A line that opens a speech and one that continues it. The Comedy of Errors has its roles at the left margin, and
# anything below is their speech.
_PATTERNS = (re.compile(r"  ([A-Za-z][A-Za-z ]*)\. (.*)"), re.compile(r"    (.*)"))
_MARGIN_PATTERNS = (re.compile(r"([A-Za-z][A-Za-z ]*)\. (.*)"), re.compile(r"([^<].*)"))
# Verses that end a sentence in mid-line look like speeches.
_POEMS = ("THE SONNETS", "A LOVER'S COMPLAINT")


def encode(text: str) -> Tensor:
    """Convert a text to indices (n,) uint8 into `CHARACTERS`; any white space becomes one space, as in LEAF."""
    plain = " ".join(text.split()).encode("latin-1", "replace")
    return torch.from_numpy(_CODES[np.frombuffer(plain, np.uint8)])


def speeches(text: str) -> Speeches:
    """Return a dict that maps each role in Shakespeare's plays, as `PLAY: ROLE`, to the lines that it speaks.

    The text must be Project Gutenberg's Etext 100 of 1994, as in LEAF; raises a `DataError` if it has no plays.
    """
    # A copyright notice is in every play, in lines that would be read as speeches.
    lines = re.sub("<<.*?>>", "", text, flags=re.DOTALL).splitlines()
    plays: dict[str, Speeches] = defaultdict(lambda: defaultdict(list))
    title = role = ""
    for number, line in enumerate(lines):
        speech, continued = _MARGIN_PATTERNS if title == "THE COMEDY OF ERRORS" else _PATTERNS
        if _BY_LINE in line:
            title = next((above.strip() for above in reversed(lines[max(0, number - 8) : number]) if above.strip()), "")
            role = ""
        elif title and (opening := speech.match(line)):
            # Some roles are written in different cases; acts look like roles where those stand at the margin.
            role = "" if opening[1].startswith("ACT ") else opening[1].upper()
            if role:
                plays[title][role].append(opening[2])
        elif role and (more := continued.match(line)):
            plays[title][role].append(more[1])
        elif line.startswith("<"):
            role = ""
    speeches = {
        f"{play}: {role}": said for play, roles in plays.items() if play not in _POEMS for role, said in roles.items()
    }
    if not speeches:
        raise DataError(f"the text has no plays, which start with {_BY_LINE!r}: use Gutenberg's Etext 100 of 1994")
    return speeches


def _windows(texts: list[Tensor]) -> tuple[Examples, Indices]:
    windows = [text.unfold(0, WINDOW + 1, 1) for text in texts if len(text) > WINDOW]
    owners = [number for number, text in enumerate(texts) if len(text) > WINDOW]
    together = torch.cat([torch.empty(0, WINDOW + 1, dtype=torch.uint8), *windows])
    examples = Examples(together[:, :WINDOW].contiguous(), together[:, WINDOW].long())
    return examples, np.repeat(np.array(owners, np.int64), [len(starts) for starts in windows])


@register_dataset("shakespeare")
def shakespeare(folder: Path | None, *, min_characters: int = 10_000) -> DataSet:
    """Load Shakespeare's plays as in LEAF and in FedMA, section 4: windows of 80 characters and the next character.

    `folder`, which is required, contains the text of the complete works. Each role is a natural client, and the first
    80 % of its text are training data. Roles with fewer than `min_characters` characters (10,000 in FedMA) are left
    out. Raises a `DataError` if the text is missing or unknown.
    """
    path = locate_one(folder, "shakespeare", FILES, "shakespeare")
    try:
        roles = speeches(read(path).decode("latin-1"))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    texts = {role: encode(" ".join(said)) for role, said in roles.items()}
    texts = {role: text for role, text in texts.items() if len(text) >= max(min_characters, WINDOW + 1)}
    train, train_owners = _windows([text[: int(0.8 * len(text))] for text in texts.values()])
    test, test_owners = _windows([text[int(0.8 * len(text)) :] for text in texts.values()])
    task = Task("next-character")
    owners = Owners(train_owners, test_owners)
    return DataSet("shakespeare", train, test, len(CHARACTERS), task, (WINDOW,), Tensor.long, groups=owners)


WORDS = 25  # number of words at the start of a tweet that a network reads, as in LEAF
TWEETS = tuple(f"training.1600000.processed.noemoticon{part}.csv" for part in ("", ".subset20000"))
VECTORS = tuple(  # names of files of word vectors, in order of preference
    f"glove.{corpus}.{width}d.txt"
    for corpus, widths in {"6B": (300, 200, 100, 50), "twitter.27B": (200, 100, 50, 25)}.items()
    for width in widths
)
MIN_TWEETS = 50  # smallest number of tweets of a natural client
POLARITIES = {"0": 0, "4": 1}
PADDING, UNKNOWN = 0, 1  # indices that pad a short tweet at its start and represent unknown words; known words follow

_WORD = re.compile(r"https?://\S+|www\.\S+|@\w+|[\w']+|[.,!?;]")


def words_of(tweet: str) -> list[str]:
    """Split a tweet into lower-case words and punctuation; as in GloVe, links become `<url>`, user names `<user>`."""
    words = _WORD.findall(html.unescape(tweet).lower())
    return [
        "<user>" if word[0] == "@" else "<url>" if "://" in word or word.startswith("www.") else word for word in words
    ]


@register_dataset("sentiment140")
def sentiment140(folder: Path | None, *, min_tweets: int = MIN_TWEETS) -> DataSet:
    """Load Sentiment140 (Go et al., 2009): 1,600,000 positive or negative tweets, as indices into a vocabulary.

    Natural clients are users with at least `min_tweets` tweets (LEAF's option `-k`). Every fifth tweet, sorted by user,
    is a test example. The vocabulary has the most frequent words of the training examples. `folder`, which is required,
    contains `training.1600000.processed.noemoticon.csv`; raises a `DataError` if it is missing or damaged.
    """
    return _tweets(folder, min_tweets)[0]


@register_dataset("sentiment140-glove")
def sentiment140_glove(folder: Path | None) -> DataSet:
    """Load Sentiment140 (see `sentiment140`) with each tweet as 25 frozen GloVe vectors, (25, width) float32.

    Vectors are read from a file such as `glove.6B.300d.txt` in `folder`; words without a vector become zeros.
    """
    dataset, vocabulary = _tweets(folder, MIN_TWEETS)
    vectors = read_vectors(locate_one(folder, "sentiment140", VECTORS, "word vectors"), vocabulary)

    def look_up(indices: Tensor) -> Tensor:
        return vectors.to(indices.device)[indices.long()]

    return replace(dataset, name="sentiment140-glove", input_shape=(WORDS, vectors.shape[1]), transform=look_up)


def read_vectors(file: Path, vocabulary: Iterable[str]) -> Tensor:
    """Read the vectors of the words in `vocabulary`, (2 + words, width) float32, from a file in GloVe's text format.

    The first two, for padding and unknown words, are zeros. Raises a `DataError` for a damaged file or no known word.
    """
    numbers = {word: number for number, word in enumerate(vocabulary, UNKNOWN + 1)}
    vectors = np.zeros((0, 0), np.float32)
    lines = 0
    width = 0
    for row, line in enumerate(rows_of(file), 1):
        word, *values = line.rstrip().split(" ")
        if row == 1:
            width = len(values)
            vectors = np.zeros((UNKNOWN + 1 + len(numbers), width), np.float32)
        if word not in numbers:
            continue
        try:
            vectors[numbers[word]] = np.array(values, np.float32).reshape(width)  # not broadcast
        except ValueError as error:
            raise DataError(f"line {row} of {file} is not a word and {width} numbers: download it again") from error
        lines += 1
    if not lines or not np.isfinite(vectors).all():
        what = "has numbers that are not finite" if lines else f"has none of the {len(numbers)} words of the tweets"
        raise DataError(f"the file of word vectors {file} {what}: use a file in GloVe's text format")
    return torch.from_numpy(vectors)


def _tweets(folder: Path | None, min_tweets: int) -> tuple[DataSet, list[str]]:
    """Return Sentiment140 (see `sentiment140`) and the list of its vocabulary's words, the first with index 2."""
    path = locate_one(folder, "sentiment140", TWEETS, "sentiment140")
    objects: dict[str, str] = {}  # one object for each word
    labels, users, texts = [], [], []
    for polarity, user, tweet in _rows(path):
        labels.append(POLARITIES[polarity])
        users.append(user)
        texts.append([objects.setdefault(word, word) for word in words_of(tweet)[:WORDS]])
    owners = np.unique(users, return_inverse=True)[1].astype(np.int64)
    tested = np.zeros(len(owners), bool)
    tested[np.argsort(owners, kind="stable")[4::5]] = True
    counts = Counter(dict.fromkeys(objects, 0))  # so that equally frequent words are in order of appearance
    for text, test in zip(texts, tested, strict=True):
        counts.update([] if test else text)
    vocabulary = [word for word, count in counts.most_common(VOCABULARY - UNKNOWN - 1) if count]
    numbers = {word: number for number, word in enumerate(vocabulary, UNKNOWN + 1)}
    indices = np.full((len(texts), WORDS), PADDING, np.int16)
    for row, text in zip(indices, texts, strict=True):
        row[WORDS - len(text) :] = [numbers.get(word, UNKNOWN) for word in text]
    examples = Examples(torch.from_numpy(indices), torch.tensor(labels))
    natural = np.where(np.bincount(owners)[owners] >= min_tweets, owners, -1)
    parts = examples.subset(~tested), examples.subset(tested)
    task = Task("classification")
    people = Owners(natural[~tested], natural[tested])
    return DataSet("sentiment140", *parts, len(POLARITIES), task, (WORDS,), Tensor.long, groups=people), vocabulary


def _rows(path: Path) -> Iterable[tuple[str, str, str]]:
    number = 0
    try:
        for row in csv.reader(io.StringIO(read(path).decode("latin-1"), newline="")):
            number += 1
            if len(row) != 6 or row[0] not in POLARITIES:
                raise csv.Error(f"a row must have polarity (0 or 4), id, date, query, user, text, not {shown(row)}")
            yield row[0], row[4], row[5]
    except csv.Error as error:
        raise DataError(f"row {number} of {path} is damaged ({error}): download the file again") from error
