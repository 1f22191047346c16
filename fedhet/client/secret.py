"""Protection of a node's training examples from the server, by a secret random seed and fixed groups of examples.

A server chooses the seed of a run. If a node drew its batches from that seed, the server would know which examples are
in which step, and could compute single examples from differences between rounds. A node whose config limits what is
sent (`allow`) therefore draws from a secret seed, trains on fixed groups of at least `min-examples` examples, and uses
the same examples in all runs. Any linear combination of updates is then a sum over whole groups.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedhet.data import ClientData
from fedhet.data.examples import digest
from fedhet.errors import ConfigError, FedhetError, Refused, damage, in_words
from fedhet.tasks import Outputs
from fedhet.utils.files import file_name, locked, write_text
from fedhet.utils.randomness import torch_generator
from fedhet.utils.statistics import grouped
from fedhet.utils.text import log

DELTA = 1e-5
"""The delta of differential privacy at which epsilon is computed."""

FOLDER = "nodes"  # folder in a node's `state-dir` with a file for each client


class NodeSecret:
    """The secret seed of a client and the settings that choose its examples, stored in `state-dir`/nodes/NAME.json.

    The attribute `seed` is the seed of all random streams that decide which private examples are in which training
    step. The argument `data` is the name of the data set. Raises a FedhetError if the file is damaged.
    """

    def __init__(self, state_folder: Path, client: str, data: str) -> None:
        self._path, self._client, self._data = state_folder / FOLDER / f"{file_name(client)}.json", client, data
        with locked(self._path.parent, wait=True):
            if not self._path.is_file():
                log.info("client %s: its new secret seed and privacy budget are stored in %s", client, self._path)
                self._write({"seed": secrets.randbits(62), "examples": {}, "spent": []})
            self.seed = int(self._read()["seed"])

    def keep(self, choice: Mapping[str, Any]) -> None:
        """Store settings that decide which examples are used, or compare them with the stored settings.

        `choice` has the settings by key. Raises `Refused` if one differs from the stored value: sums over two sets of
        examples could differ by a single example, and disclose it.
        """
        with locked(self._path.parent, wait=True):
            content = self._read()
            kept = content["examples"].setdefault(self._data, {})
            if changed := [key for key, value in choice.items() if kept.get(key, value) != value]:
                raise Refused(
                    f"this node must use the same examples as in its first run with {self._data}, but {changed[0]} has "
                    f"changed: restore {changed[0]} in the run or in the node config, or let the node's owner remove "
                    f"{FOLDER}/{self._path.name} in the node's state-dir"
                )
            if not choice.keys() <= kept.keys():
                kept.update(choice)
                self._write(content)

    def spend(self, noise: float, rate: float, steps: int, budget: float) -> float:
        """Charge `steps` of differentially private training to the node's budget; return epsilon over all its runs.

        `noise` is the noise multiplier, `rate` the probability of each example to be in a step, and `budget` the
        largest epsilon. The charge is stored before training, so that lost and repeated work counts, too. Raises
        `Refused`, and charges nothing, if epsilon would exceed the budget.
        """
        with locked(self._path.parent, wait=True):
            content = self._read()
            spent = [*content["spent"], [noise, rate, steps]]
            if (epsilon := epsilon_of(spent)) > budget:
                raise Refused(
                    f"this node's privacy budget is spent: epsilon would be {epsilon:.4g} at delta = {DELTA:g}, but is "
                    f"limited to dp-epsilon = {budget:g}; leave the node out, or let its owner raise dp-epsilon"
                )
            self._write(content | {"spent": spent})
        return epsilon

    def grouped(self, data: ClientData, least: int, outputs: Outputs) -> ClientData:
        """Return the client's data with its training examples in fixed groups of at least `least` examples.

        If the task's `outputs` are class scores, a group has examples of one class. Examples without a group are
        removed, because running statistics or means over a few examples would disclose them. If no group can be formed,
        no example is removed, and the client does not train.
        """
        labels = data.train.labels
        self.keep({"min-examples": least, "training labels": digest(labels)})
        by_class = outputs.places == "one" and outputs.meaning != "numbers"
        groups = groups_of(labels, least, torch_generator(self.seed, "groups"), by_class=by_class)
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

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            spent = [[float(noise), float(rate), int(steps)] for noise, rate, steps in content.get("spent", [])]
            return {"seed": int(content["seed"]), "examples": dict(content["examples"]), "spent": spent}
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            why = in_words(error) if isinstance(error, OSError) else damage(error)
            raise FedhetError(f"{self._path} is damaged: {why}; restore it from a backup, or remove it") from error

    def _write(self, content: Mapping[str, Any]) -> None:
        write_text(self._path, json.dumps(content))
        self._path.chmod(0o600)


def epsilon_of(spent: Iterable[Sequence[float]]) -> float:
    """Return epsilon at `DELTA` for steps of the Gaussian mechanism with Poisson sampling.

    `spent` has a tuple (noise multiplier, sampling rate, number of steps) for each training. The neighbouring relation
    is adding or removing one example. Raises a ConfigError if the package dp-accounting is missing.
    """
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise ConfigError("dp-noise needs the missing package dp-accounting: pip install 'fedhet[dp]'") from error
    accountant = RdpAccountant(orders=(*range(2, 65), 128, 256, 512))  # its formula does not converge for some others
    steps_of = grouped(((noise, rate), int(steps)) for noise, rate, steps in spent)  # rounds are mostly alike
    for (noise, rate), steps in steps_of.items():
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), sum(steps))
    return float(accountant.get_epsilon(DELTA))


def groups_of(labels: Tensor, least: int, generator: torch.Generator, *, by_class: bool) -> tuple[Tensor, ...]:
    """Return random groups of at least `least`, and fewer than 2 * `least`, examples, as index tensors (k,) int64.

    With `by_class`, all examples of a group have the same label, and labels with too few examples are left out: the
    gradient of a linear layer separates classes, so a mixed group would disclose sums over few examples.
    """
    order = torch.randperm(len(labels), generator=generator)
    kinds = torch.zeros(len(labels), dtype=torch.int64)
    if by_class:
        kinds = torch.unique(labels.cpu(), dim=0, return_inverse=True)[1]
    order = order[kinds[order].argsort(stable=True)].to(labels.device)
    parts = order.split(torch.bincount(kinds).tolist())
    return tuple(group for part in parts if len(part) >= least for group in part.tensor_split(len(part) // least))
