"""Random streams derived from (seed, client, round, purpose), so that no result depends on order or process."""

import hashlib

import numpy as np
import torch


def derive_seed(seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose of a run's seed, the same on every machine, process and Python version.

    A purpose, such as `("batches", client, round)`, is known by its text.
    """
    text = "\x1f".join([str(seed), *(str(part) for part in purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, *purpose: object) -> torch.Generator:
    """A CPU generator for one purpose; see `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def numpy_generator(seed: int, *purpose: object) -> np.random.Generator:
    """A NumPy generator for one purpose; see `derive_seed`."""
    return np.random.default_rng(derive_seed(seed, *purpose))


def seed_everything(seed: int) -> None:
    """Seed torch's global generators, as `torch.manual_seed` does.

    Until CUDA is used, that one formats a stack trace at every call, which takes half a small client's training.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
