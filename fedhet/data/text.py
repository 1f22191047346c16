"""Shakespeare by speaking role, with LEAF's next-character task."""

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhet.data.examples import DataSet, Examples, Groups, Indices
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
_SPEECH = re.compile(r"  ([A-Za-z][A-Za-z ]*)\. (.*)")
_CONTINUED = re.compile(r"    (.*)")
# One play of the complete works has its roles at the left margin, and anything below is their speech.
_MARGIN_PLAY = "THE COMEDY OF ERRORS"
_MARGIN_SPEECH = re.compile(r"([A-Za-z][A-Za-z ]*)\. (.*)")
_MARGIN_CONTINUED = re.compile(r"([^<].*)")
# Verses that end a sentence in mid-line look like speeches.
_POEMS = ("THE SONNETS", "A LOVER'S COMPLAINT")
_TINY_SPEECH = re.compile(r"([^:]+):")


def encode(text: str) -> Tensor:
    """A text as indices into `CHARACTERS`, (characters,) uint8, runs of white space as one space (as LEAF does)."""
    plain = " ".join(text.split()).encode("latin-1", "replace")
    return torch.from_numpy(_CODES[np.frombuffer(plain, np.uint8)])


def speeches(text: str) -> Speeches:
    """Lines of every role, in the order of the text.

    Understands the complete works (Project Gutenberg's Etext 100 of 1994, which LEAF reads; roles are `play: role`) and
    tiny-shakespeare (roles under `ROLE:`; it does not mark plays, so a name in two plays is one role).

    Raises:
        DataError: The text has neither layout.
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
    speech, continued = _SPEECH, _CONTINUED
    for number, line in enumerate(lines):
        if _BY_LINE in line:
            title = next((above.strip() for above in reversed(lines[max(0, number - 8) : number]) if above.strip()), "")
            role = ""
            margin = title == _MARGIN_PLAY
            speech, continued = (_MARGIN_SPEECH, _MARGIN_CONTINUED) if margin else (_SPEECH, _CONTINUED)
        elif not title:
            continue
        elif opening := speech.match(line):
            # Some roles are written in different cases; acts look like roles where those stand at the margin.
            role = "" if opening[1].startswith("ACT ") else opening[1].upper()
            if role:
                plays[title][role].append(opening[2])
        elif role:
            if more := continued.match(line):
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
        opening = None if above.strip() else _TINY_SPEECH.fullmatch(line)
        if opening:
            role = opening[1]
        elif role:
            roles[role].append(line)
    return dict(roles)


def _windows(text: Tensor, stride: int) -> Tensor:
    """Every `stride`-th window of a text with the character after it, (n, WINDOW + 1), without copying the text."""
    return text.unfold(0, WINDOW + 1, stride) if len(text) > WINDOW else text.new_empty(0, WINDOW + 1)


def _examples(windows: list[Tensor]) -> Examples:
    together = torch.cat(windows)
    return Examples(together[:, :WINDOW].contiguous(), together[:, WINDOW].long())


def _owners(windows: list[Tensor]) -> Indices:
    return np.repeat(np.arange(len(windows)), [len(window) for window in windows])


@register_dataset("shakespeare")
def shakespeare(folder: Path | None, *, min_characters: int = 10_000, stride: int = 1) -> DataSet:
    """Shakespeare's plays, one natural client a speaking role; 80 characters in, the next one out (LEAF; FedMA, 4).

    Each role's text is cut in two, the first 80 % for training, so that no window of the test part overlaps one that
    was trained on.

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
    train, test = [], []
    for text in texts.values():
        cut = int(0.8 * len(text))
        train.append(_windows(text[:cut], stride))
        test.append(_windows(text[cut:], stride))
    if not any(map(len, train)) or not any(map(len, test)):
        raise DataError(f"{path}: no role of {len(roles)} says enough for min-characters {min_characters}")
    return DataSet(
        name="shakespeare",
        train=_examples(train),
        test=_examples(test),
        classes=len(CHARACTERS),
        task=get_task("next-character"),
        input_shape=(WINDOW,),
        transform=torch.Tensor.long,  # which embeddings take
        groups=Groups(tuple(texts), _owners(train), _owners(test)),
    )
