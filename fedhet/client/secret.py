"""Protection of a node's training examples from the server, by a secret random seed and fixed groups of examples.

Against an honest server that is curious, groups help; against one that steers, only noise (`dp-noise`) does.

A server chooses the seed of a run. If a node drew its batches from that seed, the server would know which examples are
in which step, and could compute single examples from differences between rounds. A node whose config limits what is
sent (`allow`) therefore draws from a secret seed, trains on fixed groups of at least `min-examples` examples, and uses
the same examples in all runs. Any linear combination of updates is then a sum over whole groups. But a server that
chooses what the network learns decides which examples of a group have a gradient, so this sum can be one example.
"""

import json
import math
import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from fedhet.client.policy import Policy
from fedhet.data import ClientData
from fedhet.data.examples import digest
from fedhet.data.reading import LazyInputs
from fedhet.errors import ConfigError, FedhetError, Refused, damage, in_words
from fedhet.setup.client_setup import ClientInfo
from fedhet.tasks import Outputs
from fedhet.utils.files import file_name, locked, write_whole
from fedhet.utils.randomness import SecretStream, permutation
from fedhet.utils.statistics import grouped
from fedhet.utils.text import log

DELTA = 1e-5
"""Default of the delta of differential privacy at which epsilon is computed."""

LARGEST_EPSILON = 1e6  # an epsilon beyond this is no privacy
MOST_KINDS, MOST_STEPS = 16, 10**6  # beyond them, epsilon is only from Renyi divergences of these orders
ORDERS = [*range(2, 65), 128, 256, 512, 1024]
FOLDER = "nodes"  # folder in a node's `state-dir` with a file for each client
ACCOUNT = "account.json"  # file in a node's `state-dir` with the privacy budget that all its clients have spent


class NodeSecret:
    """The secret seed of a client and the settings that choose its examples, stored in `state-dir`/nodes/NAME.json.

    The privacy budget that all clients of the node have spent together is in `state-dir`/account.json, since two names
    can have the same examples. The attribute `seed` is the seed of all streams that decide which private examples are
    in which training step. The argument `data` is the name of the data set. Raises a FedhetError if a file is damaged.
    """

    def __init__(self, state_folder: Path, client: str, data: str) -> None:
        self._path = self.path(state_folder, client)
        self._account = state_folder / ACCOUNT
        self._reply = self._path.with_suffix(".reply")
        self._client = client
        self._data = data
        self._message = ""  # the open message of this process; another process can begin another one
        self._repeated = 0  # number of its charges that were made again
        with locked(self._path.parent, wait=True):
            if not self._path.is_file():
                log.info("client %s: its new secret seed is stored in %s", client, self._path)
                # A client with another name can have the same examples, whose groups must be the same.
                others = [self._read(path)["seed"] for path in sorted(self._path.parent.glob("*.json"))]
                self._write({"seed": others[0] if others else secrets.randbits(256), "examples": {}})
            self.seed = int(self._read()["seed"])

    @staticmethod
    def path(state_folder: Path, client: str) -> Path:
        """Return the file with a client's secret."""
        return state_folder / FOLDER / f"{file_name(client)}.json"

    def keep(self, choice: Mapping[str, Any], *, store: bool = True) -> None:
        """Compare settings that decide which examples are used with the stored ones, and `store` new ones.

        `choice` has the settings by key. Raises `Refused` if one differs from the stored value: sums over two sets of
        examples could differ by a single example, and disclose it.
        """
        with locked(self._path.parent, wait=True):
            content = self._read()
            kept = content["examples"].setdefault(self._data, {})
            if changed := [key for key, value in choice.items() if kept.get(key, value) != value]:
                key = changed[0]
                # A run has no key split-seed: its seed splits the data unless the node config has one.
                restored = f"{'seed' if key == 'split-seed' else key} in the run, or {key} in the node config"
                if key == "seed":
                    restored = "seed in the run, which draws public-samples, test-split and a common validation part"
                elif key == "min-examples":
                    restored = f"it to {kept[key]} in the node config"
                elif key.endswith(("labels", "inputs", "files")):
                    restored = "the data"
                raise Refused(
                    f"this node must use the same examples as in its first run with {self._data}, but {key} changed "
                    f"({FOLDER}/{self._path.name}): restore {restored}, or let the node's owner run fedhet node "
                    f"accept-data {shlex.quote(self._client)}, which keeps the privacy account"
                )
            if store and not choice.keys() <= kept.keys():
                kept.update(choice)
                self._write(content)

    @classmethod
    def accept(cls, state_folder: Path, client: str) -> None:
        """Forget the settings that choose a client's examples, so that its next run stores new ones."""
        names = sorted(unquote(path.stem) for path in state_folder.glob(f"{FOLDER}/*.json"))
        if client not in names:
            there = ", ".join(names) or "none"
            raise ConfigError(f"{state_folder} has no client {client} (there: {there}): give the node's --state-dir")
        node = cls(state_folder, client, "")
        with locked(node._path.parent, wait=True):
            node._write(node._read() | {"examples": {}})

    def alone(self) -> AbstractContextManager[None]:
        """Return a context manager in which no other process trains the client, from another state with equal noise."""
        return locked(self._path.with_suffix(""), wait=True)

    def begin(self, message: str) -> tuple[SecretStream, bytes | None]:
        """Begin a training message (its digest): return the stream of its noise, and the reply if there was one.

        A message that was not answered, since the node was stopped or failed, has the same noise and charges again,
        unless another message began meanwhile: a client of another name can have trained the state that it starts from.
        """
        self._message = message
        self._repeated = 0
        with locked(self._path.parent, wait=True):
            content = self._reply.read_bytes() if self._reply.is_file() else b""
            if content.startswith(f"{message}\n".encode()):
                return SecretStream(), content.partition(b"\n")[2]
            account = self._read(self._account)
            begun = account["open"].get(self._client, {})
            if begun.get("message") != message:
                begun = {"message": message, "key": secrets.token_hex(32), "charges": []}
                account["open"] = {self._client: begun}
                self._write(account, self._account)
        return SecretStream(bytes.fromhex(begun["key"])), None

    def answer(self, message: str, reply: bytes) -> None:
        """Store the reply to a message, so that the same message gets the same reply and no second noise."""
        content = f"{message}\n".encode() + reply
        with locked(self._path.parent, wait=True):
            write_whole(self._reply, lambda path: path.write_bytes(content))
            account = self._read(self._account)
            if account["open"].get(self._client, {}).get("message") == message:
                del account["open"][self._client]
                self._write(account, self._account)

    def spend(self, noise: float, rate: float, steps: int, budget: float, delta: float = DELTA) -> float:
        """Charge `steps` of differentially private training to the node's budget; return epsilon over all its runs.

        `noise` is the noise multiplier, `rate` the probability of each example to be in a step, and `budget` the
        largest epsilon at `delta`. The charge is stored before training, so that lost work counts, too. Raises
        `Refused`, and charges nothing, if epsilon would exceed the budget.
        """
        charge = [noise, rate, steps]
        with locked(self._path.parent, wait=True):
            account = self._read(self._account)
            begun = account["open"].get(self._client, {})
            charges = begun["charges"] if begun.get("message") == self._message else []
            again = charges[self._repeated : self._repeated + 1] == [charge]
            spent = account["spent"] if again else [*account["spent"], charge]
            epsilon = epsilon_of(spent, delta)
            if not again and not epsilon <= min(budget, LARGEST_EPSILON):
                limit = f"dp-epsilon = {budget:g}" if budget < LARGEST_EPSILON else f"{LARGEST_EPSILON:g}"
                raise Refused(
                    f"this node's privacy budget is spent: epsilon would be {epsilon:.4g} at delta = {delta:.4g}, but "
                    f"is limited to {limit}; leave the node out, or let its owner raise dp-noise or dp-epsilon"
                )
            if not again:
                charges.append(charge)
                self._write(account | {"spent": spent}, self._account)
            self._repeated += 1
        return epsilon

    def epsilon(self, delta: float, *charges: Sequence[float]) -> float:
        """Return the epsilon at `delta` that all clients of the node have spent, with further `charges`."""
        return epsilon_of([*self._read(self._account)["spent"], *charges], delta)

    def grouped(self, data: ClientData, least: int, outputs: Outputs) -> ClientData:
        """Return the client's data with its training examples in fixed groups of at least `least` examples.

        If the task's `outputs` are class scores, a group has examples of one class; of survival data, it has at least
        `least` with an event. Examples without a group are removed, because running statistics or means over a few
        examples would disclose them. If no group can be formed, no example is removed, and the client does not train.
        """
        labels = data.train.labels
        # Reading all images of a large folder for a digest would take seconds in each message.
        files = data.dataset.files if data.dataset else ""
        choice: dict[str, Any] = {"min-examples": least} | ({"files": files} if files else {})
        for kind, part in (("training", data.train), ("validation", data.validation), ("test", data.test)):
            if part is None:
                continue
            choice[f"{kind} labels"] = digest(part.labels)
            # A user's Dataset, whose inputs are read on demand, may transform them at random.
            if not files and not isinstance(part.inputs, LazyInputs):
                choice[f"{kind} inputs"] = digest(part.inputs)
        self.keep(choice)
        by_class = outputs.places == "one" and outputs.meaning != "numbers"
        source = SecretStream.of(self.seed, "groups")
        groups = groups_of(labels, least, source, by_class=by_class, counting=outputs.counting(labels))
        if left := len(labels) - sum(map(len, groups)):
            log.warning(
                "client %s: %d training examples are left out of training, since their classes have fewer than %d "
                "examples (min-examples)",
                *(self._client, left, least),
            )
        if not groups or not left:  # the examples need no copy, which each message would cost
            return replace(data, train=replace(data.train, groups=groups))
        rows = torch.cat(groups).sort().values
        places = tuple(torch.searchsorted(rows, group) for group in groups)
        return replace(data, train=replace(data.train.subset(rows.cpu()), groups=places))

    def _read(self, path: Path | None = None) -> dict[str, Any]:
        path = path or self._path
        if path == self._account and not path.is_file():
            return {"spent": [], "open": {}}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if path == self._account:
                spent = [[float(noise), float(rate), int(steps)] for noise, rate, steps in content["spent"]]
                return {"spent": spent, "open": dict(content["open"])}
            return {"seed": int(content["seed"]), "examples": dict(content["examples"])}
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            reason = in_words(error) if isinstance(error, OSError) else damage(error)
            raise FedhetError(
                f"{path} is damaged: {reason}; restore it from a backup. Without it, the privacy account would begin "
                "at 0, or other groups would disclose examples, so remove it only together with the data"
            ) from error

    def _write(self, content: Mapping[str, Any], path: Path | None = None) -> None:
        path = path or self._path

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                file.write(json.dumps(content).encode())
                file.flush()
                os.fsync(file.fileno())

        write_whole(path, write)
        path.chmod(0o600)
        if os.name == "posix":  # else a charge could be lost with the machine's power, after the reply was sent
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)


def epsilon_of(spent: Sequence[Sequence[float]], delta: float = DELTA) -> float:
    """Return epsilon at `delta` for steps of the Gaussian mechanism with Poisson sampling.

    `spent` has a tuple (noise multiplier, sampling rate, number of steps) for each training. The neighbouring relation
    is replacing one example by a blank one, whose gradient is zero (`REPLACE_SPECIAL`), so the number of examples is
    public. Raises a ConfigError if the package dp-accounting is missing.
    """
    # A server can ask for any number of steps, with other batch sizes in each message: equal ones are counted, all that
    # use every example are together one of less noise, and many rates are rounded up.
    merged = sum(steps / noise / noise for noise, rate, steps in spent if rate == 1)
    kinds = grouped(((noise, rate), steps) for noise, rate, steps in spent if rate < 1)
    if len(kinds) > MOST_KINDS:
        kinds = grouped(((n, 2 ** (math.ceil(4 * math.log2(rate)) / 4)), sum(k)) for (n, rate), k in kinds.items())
    drawn = [(noise, rate, sum(steps)) for (noise, rate), steps in kinds.items()]
    return _epsilon((*drawn, *([(merged**-0.5, 1.0, 1)] if merged else [])), delta)


@lru_cache(maxsize=8)
def _epsilon(spent: tuple[tuple[float, float, int], ...], delta: float) -> float:
    try:
        from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
        from dp_accounting.pld import PLDAccountant
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise ConfigError("dp-noise needs the missing package dp-accounting: pip install 'fedhet[dp]'") from error
    # About the largest privacy loss of a step, and the sum of all, which spreads by its root: a finer grid needs GBs.
    loss = max((0.5 / noise / noise + 10 / noise for noise, _, _ in spent), default=0.0)
    total = sum(steps * rate / noise / noise for noise, rate, steps in spent)
    if max(loss, total) > LARGEST_EPSILON:
        return max(loss, total)
    relation = NeighboringRelation.REPLACE_SPECIAL
    accountants: list[Any] = [RdpAccountant(ORDERS, neighboring_relation=relation)]  # a larger epsilon, but in seconds
    if len(spent) <= MOST_KINDS + 1 and sum(steps for *_, steps in spent) <= MOST_STEPS:
        grid = max(1e-4, 1e-5 * max(loss, total**0.5))
        accountants.append(PLDAccountant(relation, value_discretization_interval=grid))
    for accountant in accountants:
        for noise, rate, steps in spent:
            accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    # Both are bounds. The smaller one, so that epsilon never falls where a step leaves only the first.
    return min(float(accountant.get_epsilon(delta)) for accountant in accountants)


def check_partition(info: ClientInfo, policy: Policy) -> None:
    """Raise `Refused` if a server deals out examples by class, so that a client's number of them is that of a class."""
    chosen = "partition" in info.node_config and not policy.noise
    # With prototypes, numbers of examples by class are sent anyway.
    limited = policy.noise or not (policy.allowed is None or {"statistics", "prototypes"} & policy.allowed)
    if limited and not chosen and info.config.partition in ("classes", "dirichlet"):
        consent = "" if policy.noise else ", or let its owner set partition in the node config"
        raise Refused(
            f"partition = {info.config.partition} makes the number of the client's examples depend on their classes, "
            f"which this node does not disclose: set partition = iid{consent}"
        )


def groups_of(
    labels: Tensor,
    least: int,
    source: torch.Generator | SecretStream,
    *,
    by_class: bool,
    counting: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return random groups of at least `least`, and fewer than 2 * `least`, examples, as index tensors (k,) int64.

    Of the examples, all or those that are `counting` (n,) are counted, and others, which have no term of the loss, are
    dealt to the groups. With `by_class`, all examples of a group have the same label, and labels with too few examples
    are left out: the gradient of a linear layer separates classes, so a mixed group would disclose sums over few
    examples.
    """
    order = permutation(len(labels), source)
    if counting is not None and not counting.all():
        drawn = counting.cpu()[order]
        number = int(counting.sum()) // least
        split = (part.to(labels.device).tensor_split(number) for part in (order[drawn], order[~drawn]))
        return tuple(map(torch.cat, zip(*split, strict=True))) if number else ()
    kinds = torch.zeros(len(labels), dtype=torch.int64)
    if by_class:
        kinds = torch.unique(labels.cpu(), dim=0, return_inverse=True)[1]
    order = order[kinds[order].argsort(stable=True)].to(labels.device)
    parts = order.split(torch.bincount(kinds).tolist())
    return tuple(group for part in parts if len(part) >= least for group in part.tensor_split(len(part) // least))
