"""Shakespeare's plays, divided by speaking role, with the next-character task of LEAF."""

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhet.data.examples import DataSet, Examples, Indices, Owners
from fedhet.data.files import locate_one, read
from fedhet.data.registry import register_dataset
from fedhet.errors import DataError
from fedhet.tasks import Task

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's vocabulary of 80. As in LEAF, other characters are read as the last one."""

WINDOW = 80
"""Number of characters from which the next one is predicted."""

FILES = ("t8.shakespeare.txt", "raw_data.txt", "tinyshakespeare-input.txt", "input.txt")
"""Names of the text: of the complete works (the second is LEAF's), then of the excerpt."""

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
    """Convert a text to indices into `CHARACTERS`, (characters,) uint8; white space becomes one space, as in LEAF."""
    plain = " ".join(text.split()).encode("latin-1", "replace")
    return torch.from_numpy(_CODES[np.frombuffer(plain, np.uint8)])


def speeches(text: str) -> Speeches:
    """Return the lines of each role from the complete works or tiny-shakespeare; else raise a `DataError`.

    The complete works are Project Gutenberg's Etext 100 of 1994, as in LEAF; their roles are named `play: role`.
    """
    # The complete works repeat a copyright notice in every play, in lines that would be read as speeches.
    lines = re.sub("<<.*?>>", "", text, flags=re.DOTALL).splitlines()
    roles = _of_complete_works(lines) if any(_BY_LINE in line for line in lines) else _of_tiny(lines)
    if not roles:
        raise DataError(
            f"this is neither the complete works (plays start with a line {_BY_LINE!r}, speeches with two spaces, role "
            "and full stop) nor tiny-shakespeare (speeches start with a line 'Role:'): download one of them"
        )
    return roles


def _of_complete_works(lines: list[str]) -> Speeches:
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
    return {
        f"{play}: {role}": said for play, roles in plays.items() if play not in _POEMS for role, said in roles.items()
    }


def _of_tiny(lines: list[str]) -> Speeches:
    roles: Speeches = defaultdict(list)
    role = ""
    for above, line in zip(["", *lines], lines, strict=False):
        if not above.strip() and (opening := re.fullmatch(r"([^:]+):", line)):
            role = opening[1]
        elif role:
            roles[role].append(line)
    return dict(roles)


def _windows(texts: list[Tensor]) -> tuple[Examples, Indices]:
    windows = [text.unfold(0, WINDOW + 1, 1) for text in texts if len(text) > WINDOW]
    owners = [number for number, text in enumerate(texts) if len(text) > WINDOW]
    together = torch.cat([torch.empty(0, WINDOW + 1, dtype=torch.uint8), *windows])
    examples = Examples(together[:, :WINDOW].contiguous(), together[:, WINDOW].long())
    return examples, np.repeat(np.array(owners, np.int64), [len(each) for each in windows])


@register_dataset("shakespeare")
def shakespeare(folder: Path | None, *, min_characters: int = 10_000) -> DataSet:
    """Load Shakespeare's plays as in LEAF and in FedMA, section 4: windows of 80 characters and the next character.

    Each role is a natural client, and the first 80 % of its text are training data. Roles with fewer than
    `min_characters` (10,000 in FedMA) are left out. Raises a `DataError` if the text is missing or has another layout,
    or if no role has enough text.
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
    if not len(train) or not len(test):
        raise DataError(f"{path}: none of {len(roles)} roles has {min_characters} characters: use the whole text")
    return DataSet(
        name="shakespeare",
        train=train,
        test=test,
        classes=len(CHARACTERS),
        task=Task("next-character"),
        input_shape=(WINDOW,),
        transform=torch.Tensor.long,  # which embeddings take
        groups=Owners(train_owners, test_owners),
    )
