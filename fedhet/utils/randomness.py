"""Random streams derived from (seed, client, round, purpose), so that no result depends on order or process."""

import hashlib
import random
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.random import mtrand
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data import dataset as datasets

from fedhet.utils.process import one_at_a_time, settings_restored


class SecretStream:
    """Random numbers from the cipher AES-256 in counter mode, which cannot be computed without the 32 bytes of the key.

    Torch's generators keep 32 bits of a seed, so whoever sees a few of their numbers can find all others. By default,
    the key is drawn by the operating system.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._cipher = Cipher(algorithms.AES(key or secrets.token_bytes(32)), modes.CTR(bytes(16))).encryptor()

    @classmethod
    def of(cls, secret: int, *purpose: object) -> "SecretStream":
        """Return the stream of a `secret` for a `purpose` such as `("batches", 3, 1)`."""
        text = "\x1f".join([str(secret), *(str(part) for part in purpose)])
        return cls(hashlib.blake2b(text.encode(), digest_size=32).digest())

    def permutation(self, count: int) -> torch.Tensor:
        """Return 0 to `count` - 1 in random order, as an int64 tensor."""
        return torch.from_numpy(self._bits(count).argsort(kind="stable"))

    def seed(self) -> int:
        """Return a 63-bit seed for random numbers that protect nothing, such as masks of dropout."""
        return int(self._bits(1)[0]) >> 1

    def sample(self, count: int, rate: float) -> torch.Tensor:
        """Return the indices below `count` of which each is drawn with probability `rate`, as an int64 tensor."""
        drawn = (self._bits(count) >> np.uint64(11)) * 2.0**-53 < rate
        return torch.from_numpy(drawn.nonzero()[0])

    def normal(self, shape: torch.Size) -> torch.Tensor:
        """Return a float64 tensor of independent standard normal numbers, by inversion of the distribution function.

        A bit gives the sign, and 63 bits the tail probability, so that large numbers are as dense as others.
        """
        from scipy.special import ndtri  # imported here, because the import is slow

        bits = self._bits(shape.numel())
        sizes = -ndtri(((bits >> np.uint64(1)) + 0.5) * 2.0**-64)
        return torch.from_numpy(np.where(bits & np.uint64(1), sizes, -sizes)).reshape(shape)

    def _bits(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(self._cipher.update(bytes(8 * count)), np.uint64)


def permutation(count: int, source: torch.Generator | SecretStream) -> torch.Tensor:
    """Return 0 to `count` - 1 in random order, drawn from a generator or stream, as an int64 tensor."""
    if isinstance(source, SecretStream):
        return source.permutation(count)
    return torch.randperm(count, generator=source)


def derive_seed(seed: int, *purpose: object) -> int:
    """Return a 63-bit seed, equal on all machines, from a run's `seed` and a `purpose` such as `("batches", 3, 1)`."""
    text = "\x1f".join([str(seed), *(str(part) for part in purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, *purpose: object) -> torch.Generator:
    """Return a torch generator on the CPU for one purpose, such as `("batches", client, round)`."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def numpy_generator(seed: int, *purpose: object) -> np.random.Generator:
    """Return a NumPy generator for one purpose, such as `("batches", client, round)`."""
    return np.random.default_rng(derive_seed(seed, *purpose))


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python, from which user code may draw."""
    # `torch.manual_seed` formats a stack trace at every call if CUDA is not initialised.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def global_states() -> tuple[object, ...]:
    """Return the states of the global generators of torch (on the CPU), NumPy and Python, to compare them."""
    numpy: Any = np.random.get_state()
    return torch.default_generator.get_state().numpy().tobytes(), numpy[1].tobytes(), numpy[2], random.getstate()


_spare: list[np.random.MT19937] = []
_default_rng = np.random.default_rng


def _seeded_default_rng(seed: Any = None) -> np.random.Generator:
    return _default_rng(np.random.randint(2**32, dtype=np.uint64) if seed is None else seed)


@contextmanager
def seeded(seed: int, *purpose: object) -> Iterator[None]:
    """Context manager that seeds the global generators for one purpose (see `derive_seed`) and then restores them.

    It also restores settings of the process, which user code may change, and other threads that seed generators wait.
    Within the context, NumPy's global generator is replaced, which is faster than saving its state, and
    `np.random.default_rng()` is seeded, too.
    """
    with one_at_a_time(), settings_restored():
        generators = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
        states = [generator.get_state() for generator in generators]
        python = random.getstate()
        numpy = mtrand.get_bit_generator()
        default_rng = np.random.default_rng
        spare = _spare.pop() if _spare else np.random.MT19937()
        mtrand.set_bit_generator(spare)
        setattr(np.random, "default_rng", _seeded_default_rng)  # noqa: B010 - mypy accepts no other function
        seed_everything(derive_seed(seed, *purpose))
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            random.setstate(python)
            mtrand.set_bit_generator(numpy)
            setattr(np.random, "default_rng", default_rng)  # noqa: B010
            _spare.append(spare)


@contextmanager
def splitting_alike(seed: int, then: int) -> Iterator[None]:
    """Context manager in which a user's training function splits its data in the same way at every call.

    NumPy's and Python's global generators are seeded with `seed`, torch's with a number that depends on `then`, and all
    with `then` as soon as a `DataLoader` shuffles or an optimiser takes a step. Before that, a permutation
    (`torch.randperm`, `random_split`) depends only on `seed` and its length, not on other draws such as initial
    weights. Seeds that the function sets itself take precedence.
    """
    loading = True
    permutation = torch.randperm
    batches = DataLoader.__iter__
    first = derive_seed(then, "first")

    def begin(*_: object) -> None:
        nonlocal loading
        if loading and torch.initial_seed() == first:
            seed_everything(then)
        loading = False

    def permuted(*sizes: int, generator: torch.Generator | None = None, **further: Any) -> torch.Tensor:
        unseeded = generator in (None, torch.default_generator) and torch.initial_seed() == first
        if loading and unseeded and torch.device(further.get("device") or torch.get_default_device()).type == "cpu":
            generator = torch.Generator().manual_seed(seed)
        return permutation(*sizes, generator=generator, **further)

    def iterated(loader: DataLoader[Any]) -> Any:
        if not isinstance(loader.sampler, SequentialSampler):
            begin()
        return batches(loader)

    replaced = [(torch, "randperm", permuted), (datasets, "randperm", permuted), (DataLoader, "__iter__", iterated)]
    before = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    seed_everything(seed)
    torch.manual_seed(first)
    hook = register_optimizer_step_pre_hook(begin)
    try:
        for place, name, function in replaced:
            setattr(place, name, function)
        yield
    finally:
        hook.remove()
        for place, name, function in before:
            setattr(place, name, function)


@contextmanager
def reseeded(values: Iterable[object]) -> Iterator[None]:
    """Context manager that seeds the random generators among `values` and their attributes, and then restores them.

    A generator's new seed depends on its state, which a user may have seeded, and on torch's initial seed.
    """
    generators = _generators(values)
    restores = restoring(generators)
    try:
        for generator in generators:
            _reseed(generator, torch.initial_seed())
        yield
    finally:
        for restore in restores:
            restore()


def restoring(values: Iterable[object]) -> list[Callable[[], object]]:
    """Return functions that restore the present states of the random generators among `values` and attributes."""
    restores: list[Callable[[], object]] = []
    for generator in _generators(values):
        if isinstance(generator, torch.Generator):
            restores.append(partial(generator.set_state, generator.get_state()))
        elif isinstance(generator, random.Random):
            restores.append(partial(generator.setstate, generator.getstate()))
        else:
            source = _source(generator)
            restores.append(partial(setattr, source, "state", source.state))
    return restores


def _generators(values: Iterable[object]) -> list[Any]:
    held = ((value, {} if isinstance(value, ModuleType) else getattr(value, "__dict__", {})) for value in values)
    nested = (inner for holder, attributes in held for inner in (holder, *attributes.values()))
    kinds = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
    return [*{id(generator): generator for generator in nested if isinstance(generator, kinds)}.values()]


def _source(generator: Any) -> Any:
    """Return the bit generator of a generator of NumPy."""
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else generator.bit_generator


def _reseed(generator: Any, seed: int) -> None:
    """Reseed a torch, NumPy or Python generator by `seed` and its next number."""
    if isinstance(generator, torch.Generator):
        drawn = torch.empty((), dtype=torch.int64, device=generator.device)
        generator.manual_seed(derive_seed(seed, int(drawn.random_(generator=generator))))
    elif isinstance(generator, random.Random):
        generator.seed(derive_seed(seed, generator.getrandbits(62)))
    else:
        source = _source(generator)
        source.state = type(source)(derive_seed(seed, int(source.random_raw()))).state
