"""Random data in the files of data sets that are not at hand, of the shapes that are asked for."""

from pathlib import Path

import numpy as np
from PIL import Image


def shakespeare(folder: Path, *, roles: int, characters: int) -> None:
    """Write roles of one speech each."""
    rng = np.random.default_rng(0)
    speeches = ("".join(rng.choice(list("abcdefgh ,.!"), size=characters)) for _ in range(roles))
    lines = "\n".join(f"  R{'x' * role}. {text}\n" for role, text in enumerate(speeches))
    (folder / "t8.shakespeare.txt").write_text(f"A PLAY\n\nby William Shakespeare\n\n{lines}")


def sentiment140(folder: Path, *, users: int, tweets: int, vocabulary: int, words: int, width: int) -> None:
    """Write tweets of so many words each, and vectors of the words of the vocabulary, of this width."""
    rng, known = np.random.default_rng(0), [f"w{number}" for number in range(vocabulary)]
    said = (" ".join(rng.choice(known, words)) for _ in range(tweets))
    lines = (f'"{n % 8 // 4 * 4}","{n}","","","{n % users}","{text}"' for n, text in enumerate(said))
    (folder / "training.1600000.processed.noemoticon.csv").write_text("\n".join(lines))
    vectors = (" ".join((word, *map(str, rng.normal(size=width).round(3)))) for word in known)
    (folder / "glove.6B.50d.txt").write_text("\n".join(vectors))


def chestxray14(folder: Path, *, patients: int, side: int) -> None:
    """Write an image for each patient, and their table."""
    rng = np.random.default_rng(0)
    lines = ["Image Index,Finding Labels,Patient ID,Patient Age,Patient Gender"]
    for patient in range(1, patients + 1):
        name = f"{patient:08d}_000.png"
        Image.fromarray(rng.integers(256, size=(side, side), dtype=np.uint8)).save(folder / name)
        lines.append(f"{name},{('Mass', 'Mass|Hernia', 'No Finding')[patient % 3]},{patient},{patient % 90},F")
    (folder / "Data_Entry_2017_v2020.csv").write_text("\n".join(lines))
