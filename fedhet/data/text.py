"""Shakespeare by speaking role, with LEAF's next-character task."""

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
from fedhet.task import get_task

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's vocabulary of 80; a character outside of it is read as the last one, as LEAF's lookup does."""

WINDOW = 80
"""Characters that the next one is predicted from."""

FILES = ("t8.shakespeare.txt", "raw_data.txt", "tinyshakespeare-input.txt", "input.txt")
"""Names under which the text is looked for: complete works (the second is LEAF's name for it), then the excerpt."""

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
    """A text as indices into `CHARACTERS`, (characters,) uint8, runs of white space as one space (as LEAF does)."""
    plain = " ".join(text.split()).encode("latin-1", "replace")
    return torch.from_numpy(_CODES[np.frombuffer(plain, np.uint8)])


def speeches(text: str) -> Speeches:
    """Lines of every role of the complete works or of tiny-shakespeare, in the order of the text, else a `DataError`.

    The complete works are Project Gutenberg's Etext 100 of 1994, which LEAF reads; there roles are `play: role`.
    """
    # The complete works repeat a copyright notice in every play, in lines that would be read as speeches.
    lines = re.sub("<<.*?>>", "", text, flags=re.DOTALL).splitlines()
    roles = _of_complete_works(lines) if any(_BY_LINE in line for line in lines) else _of_tiny(lines)
    if not roles:
        raise DataError(
            f"neither the complete works (plays opened by a line {_BY_LINE!r}, speeches by two spaces, role and full "
            "stop) nor tiny-shakespeare (speeches opened by a line 'Role:')"
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


def _windows(texts: list[Tensor], stride: int) -> tuple[Examples, Indices]:
    """Every `stride`-th window of each text and the character after it; and the index of its text, (n,)."""
    windows = [text.unfold(0, WINDOW + 1, stride) for text in texts if len(text) > WINDOW]
    owners = [index for index, text in enumerate(texts) if len(text) > WINDOW]
    together = torch.cat([torch.empty(0, WINDOW + 1, dtype=torch.uint8), *windows])
    examples = Examples(together[:, :WINDOW].contiguous(), together[:, WINDOW].long())
    return examples, np.repeat(np.array(owners, np.int64), [len(each) for each in windows])


@register_dataset("shakespeare")
def shakespeare(folder: Path | None, *, min_characters: int = 10_000, stride: int = 1) -> DataSet:
    """Shakespeare's plays, one natural client a speaking role; 80 characters in, the next one out (LEAF; FedMA, 4).

    The first 80 % of each role's text are for training, so that windows of both parts do not overlap.

    Args:
        folder: Where the text is; see `FILES`.
        min_characters: Roles that say less are left out (10,000 in FedMA).
        stride: Characters from one window to the next; 1 makes an example of every character.

    Raises:
        DataError: The text is missing, damaged or has another layout, or no role says enough.
    """
    path = locate_one(folder, "shakespeare", FILES, "shakespeare")
    try:
        roles = speeches(read(path).decode("latin-1"))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    texts = {role: encode(" ".join(said)) for role, said in roles.items()}
    texts = {role: text for role, text in texts.items() if len(text) >= max(min_characters, WINDOW + 1)}
    cuts = [int(0.8 * len(text)) for text in texts.values()]
    train, train_owners = _windows([text[:cut] for text, cut in zip(texts.values(), cuts, strict=True)], stride)
    test, test_owners = _windows([text[cut:] for text, cut in zip(texts.values(), cuts, strict=True)], stride)
    if not len(train) or not len(test):
        raise DataError(f"{path}: no role of {len(roles)} says enough for min-characters {min_characters}")
    return DataSet(
        name="shakespeare",
        train=train,
        test=test,
        classes=len(CHARACTERS),
        task=get_task("next-character"),
        input_shape=(WINDOW,),
        transform=torch.Tensor.long,  # which embeddings take
        groups=Owners(train_owners, test_owners),
    )
