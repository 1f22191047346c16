"""The state of a run and of its current round at the server, and the names of run directories."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedhet.config import configuration
from fedhet.config.flower_names import FlowerOptions
from fedhet.data import PublicDataset
from fedhet.data.own import as_public_dataset
from fedhet.errors import ConfigError, FedhetError, ModelError
from fedhet.flower import Grid, Message
from fedhet.flower.grid import LocalGrid
from fedhet.flower.insides import PrivateWrapper
from fedhet.flower.privacy import PrivacyLedger, mod_ledger, wrapper_ledger
from fedhet.messages import Arrays, Reply, difference, spec_of
from fedhet.methods import registry
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import OWN, Config, OwnPart
from fedhet.models.copies import without_memory
from fedhet.results.state import State
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo, ModelFunction
from fedhet.utils.files import expanded
from fedhet.utils.randomness import seeded
from fedhet.utils.statistics import grouped
from fedhet.utils.text import log

GIVE_MODELS = "give the server the clients' models: make_server_app(model=...), or model=... of the strategy"


@dataclass
class Round:
    """The state of round `number`, the current round.

    Attributes:
        closing, final: whether this is the closing round (`closing-epochs`), or the evaluation after the last round.
        started: start time in seconds (`time.perf_counter`).
        training, lost: clients that train, and clients that reported the loss of their stored state.
        sent: messages that await a reply, by node id.
        failures: a dict with entries `client` and `reason` for each failure.
        cuts: a dict for each clipped update: the `client`, the update's `norm` and the norm after clipping (`to`).
        down, up: bytes sent to each node, and received from it, by node id.
    """

    number: int = 0
    final: bool = False
    closing: bool = False
    started: float = field(default_factory=time.perf_counter)
    training: frozenset[str] = frozenset()
    sent: dict[int, Message] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cuts: list[dict[str, Any]] = field(default_factory=list)
    down: Counter[int] = field(default_factory=Counter)
    up: Counter[int] = field(default_factory=Counter)

    def fail(self, client: str, reason: str) -> None:
        """Record that a client failed in this round; `reason` is a text for the log."""
        self.failures.append({"client": client, "reason": reason})

    def lines(self) -> list[str]:
        """Return a line of text for each reason of failure, such as "2 clients (0, 3): REASON"."""
        hit = grouped((failure["reason"], failure["client"]) for failure in self.failures)
        return [f"{named(clients)}: {reason}" for reason, clients in hit.items()]

    def reasons(self, otherwise: str = "") -> str:
        """Return why clients failed, one indented line per reason, or `otherwise`, indented, if no client failed."""
        return "\n".join(f"  {line}" for line in self.lines() or [otherwise])


@dataclass
class Run:
    """The configuration, data and state of a run, which the objects of a strategy share.

    Attributes:
        method: the declaration of the method: its name, its configuration keys, and what it needs and exchanges.
        state: the method's state, which is saved in checkpoints.
        public: the public dataset, if the server has it.
        model: function that returns a client's network, if clients use a user's own models.
        round: the current round: its number, its messages and failures, and the bytes sent.
        task, metric: names of the clients' task, and of the metric that counts.
        devices: descriptions of the devices on which clients compute.
        own_data: whether clients have data other than the configured data set.
        replaced: what all clients have in place of configuration keys.
        classes: in a simulation, each client's numbers of training examples by name of the class.
        initial: `initial_arrays` of `FederatedStrategy.start`, until the shared arrays are set to them.
        clients: the name of each admitted client by the id of its node; nodes that have left are included.
        flower_options: arguments of Flower's `FedAvg` that are not configuration keys, such as `min_train_nodes`.
        train_config, evaluate_config: entries for the clients' own functions and mods, which are sent unchanged.
        told: texts of the warnings logged so far, in order, each with the clients that it is about.
        noise: noise multiplier of each client's `LocalDpMod` (Flower's local differential privacy); 0 without it.
        private_wrapper: the Flower strategy for differential privacy around the strategy, if any.
        privacy: record of the privacy budget spent; None without Flower's differential privacy.
    """

    method: Method
    config: Config
    state: State
    public: PublicDataset | None = None
    model: ModelFunction | None = None
    round: Round = field(default_factory=Round)
    task: str = "classification"
    metric: str = "accuracy"
    own_data: bool = False
    replaced: Set[OwnPart] = frozenset()
    devices: list[str] = field(default_factory=list)
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    initial: Arrays = field(default_factory=dict)
    clients: dict[int, str] = field(default_factory=dict)
    flower_options: FlowerOptions = field(default_factory=FlowerOptions)
    train_config: dict[str, Any] = field(default_factory=dict)
    evaluate_config: dict[str, Any] = field(default_factory=dict)
    told: dict[str, list[str]] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    private_wrapper: PrivateWrapper | None = None
    privacy: PrivacyLedger | None = None

    @property
    def traits(self) -> Traits:
        """The properties of the method that depend on its configuration, such as the arrays that clients share."""
        return self.method.traits_of(self.config.options)

    @property
    def training_rounds(self) -> int:
        """The number of training rounds: the configured number, or fewer if an observer ended training."""
        return self.state.stopped or self.config.rounds

    @property
    def last_round(self) -> int:
        """The number of the last round: the closing round after the training rounds, if `closing-epochs` is set."""
        return self.training_rounds + bool(self.config.closing_epochs)

    def evaluates(self, round: int) -> bool:
        """Return whether clients are evaluated in this training round, as `evaluate-every` determines."""
        return round % self.config.evaluate_every == 0

    @property
    def evaluates_now(self) -> bool:
        """Whether clients are evaluated in the current round, which may be the closing round."""
        return self.round.closing or self.evaluates(self.round.number)

    @contextmanager
    def calling(self, hook: str) -> Iterator[None]:
        """Context manager around a call of the method's `hook`, which seeds generators for the hook.

        An exception in it becomes a FedhetError that names the hook.
        """
        number = self.round.number
        try:
            with seeded(self.config.seed, hook, number):
                yield
        except FedhetError:
            raise
        except Exception as error:
            raise FedhetError(
                f"round {number}: {hook} of {self.method.name} failed ({type(error).__name__}: {error}); fix the "
                f"cause and resume the run, which continues after round {number - 1}"
            ) from error

    @property
    def only_describes(self) -> bool:
        """Whether the run only describes the clients' data: it has no rounds, and no networks of an earlier run."""
        return not (self.config.rounds or self.config.start_from or self.method.settles_rounds)

    def override(self, settings: Mapping[str, Any]) -> None:
        """Replace values in the configuration; `settings` has new values by key, such as `rounds`."""
        if settings:
            changed = configuration.changed(self.config, settings, "code")
            self.config = changed.replace(origins=self.config.origins, remarks=self.config.remarks)

    def open_ledger(self, *, mean: bool) -> None:
        """Set `privacy`, the record of the budget that this and the strategy's earlier runs spend.

        `mean` says whether the server takes the weighted mean of models, without clipping.
        """
        earlier = self.privacy
        if self.private_wrapper:
            self.privacy = wrapper_ledger(self.private_wrapper, self.traits, mean=mean, earlier=earlier)
        elif any(self.noise.values()):
            self.privacy = mod_ledger(self.noise, self.traits, 0 if earlier else self.state.round, earlier)
        elif earlier:
            reason = "a later run adds no noise"
            self.privacy = PrivacyLedger(earlier.name, self.traits, lambda *_: reason, earlier=earlier)

    def check_that_rounds_counted(self, *, has_global_model: bool) -> None:
        """Raise a FedhetError if the last 3 rounds (or the last half, if that is fewer) had too few valid replies."""
        last = self.last_round
        counted = max([0, *(client.trained for client in self.state.clients.values())])
        if last - counted >= min(3, math.ceil(last / 2)) > 0:
            raise FedhetError(
                f"all rounds after round {counted} of {last} had fewer than {self.config.min_clients} valid replies; "
                f"correct the causes, or lower min-clients:\n{self.round.reasons('no client was asked')}"
            )
        if last and self.traits.whole and not has_global_model:
            raise FedhetError(
                f"method {self.method.name} has no global model after round {last}, since rounds had too few valid "
                "replies: correct what their warnings say, and resume the run with more rounds"
            )

    def warn_once(self, line: str, clients: Sequence[str] = ()) -> None:
        """Log the warning `line`, after the names of `clients` (if any), unless it was logged before in the run."""
        repeated = line in self.told
        about = self.told.setdefault(line, [])
        about += [client for client in clients if client not in about]
        if not repeated:
            log.warning("%s%s", f"{named(clients)}: " if clients else "", line)

    def network_like(self, client: str, *, adapted: bool = False) -> nn.Module:
        """Return a new network of a client's architecture; raise a FedhetError if the server cannot build it.

        With `adapted`, it has the form in which clients train it (see `ClientSide.adapt`), such as a projection head.
        """
        record = self.state.clients[client]
        network = self._build_network(client, record.architecture, record.partition)
        return registry.client_side(self.method.name).adapt(network, self.config) if adapted else network

    def check_network(self, reply: Reply) -> None:
        """Check that the server can build the network described in a handshake reply; raise a FedhetError otherwise."""
        report = reply.report
        build = partial(self._build_network, report.client, report.architecture, report.partition)
        if not self.model:
            client_setup.dataset_of(self.config)  # it is cached, and cannot be read on the meta device
        built = build() if self.model else without_memory(build)
        if (spec := spec_of(built.state_dict())) != report.spec:
            raise FedhetError(
                f"the client's network differs from the one that the server builds ({difference(report.spec, spec)}): "
                f"{GIVE_MODELS}"
            )

    def _build_network(self, client: str, architecture: str, place: tuple[int, int] | None) -> nn.Module:
        model = self.model
        partition, partitions = place or (None, None)
        node = {"architecture": architecture} if architecture and not model else {}
        if partition is None and not node and not model:
            raise FedhetError(
                f"client {client} discloses neither its architecture nor its partition-id, but the server must build "
                "its network: set disclose-architecture = true in its node config"
            )
        info = ClientInfo(client, partition, partitions, self.config, node)
        try:
            return client_setup.network_of(info, model)
        except ModelError as error:
            if model:
                raise
            raise FedhetError(
                f"the server cannot build a network like client {client}'s ({error}): {GIVE_MODELS}"
            ) from error


def public_for(config: Config, public: Any) -> PublicDataset | None:
    """Return a user's public dataset (see `FederatedStrategy`) without what the method does not need.

    The training inputs of all clients (see `Options.public_union`) are those of the configured data set. Without a
    user's dataset, those that `public-samples` holds out of it are public, if the user chose both keys.
    """
    dataset = as_public_dataset(public)
    if config.options.public_union:
        union = None if config.dataset == OWN else client_setup.public_dataset(config)
        if union is None or (dataset and dataset.unlabelled.digest != union.digest):
            raise ConfigError(no_union(config))
        return union
    need = registry.traits(config).public
    chosen = {"dataset", "public-samples"} <= config.chosen and config.dataset != OWN
    if dataset is None and chosen and need != "none":
        dataset = client_setup.public_dataset(config)
    if dataset and need == "labelled" and dataset.labels is None:
        name = config.method_name
        raise ConfigError(f"{name} needs labels of the public dataset, which has only inputs: add labels")
    if dataset and need != "labelled":
        return dataset.unlabelled if need == "inputs" else None
    return dataset


def no_union(config: Config) -> str:
    """Return the message that a public dataset of all clients' training inputs needs a configured data set."""
    return (
        f"{config.family}.{config.options.public_union} takes the public examples from the training examples of all "
        "clients, which must be of a configured data set: change it to use your own data or public dataset"
    )


def named(clients: Sequence[str], most: int = 3) -> str:
    """Return the clients in words: "client NAME", or their number and the names of the first `most` of them."""
    clients = [*dict.fromkeys(clients)]
    if len(clients) == 1:
        return f"client {clients[0]}"
    return f"{len(clients)} clients ({', '.join(clients[:most])}{', ...' if len(clients) > most else ''})"


def new_folder(parent: Path, config: Config) -> Path:
    """Return an unused path in `parent` for a run directory, named after method, data set and time."""
    folder = parent / f"{config.method_name}-{config.dataset}-{time.strftime('%Y%m%d-%H%M%S')}"
    return numbered(folder, Path.exists)


def run_folder(config: Config, grid: Grid) -> Path:
    """Return the path of the run directory: the key `out`, or a new directory in `runs/` if it is not set.

    If there is a run in `out` and `resume` is not set, a number is appended: `out-2`, `out-3`, ... A relative path is
    in the current directory if `grid` is that of the local engine; otherwise, it is in `~/.fedhet`.
    """
    home = Path() if isinstance(grid, LocalGrid) else expanded("~/.fedhet")
    if not config.out:
        return new_folder(home / "runs", config).resolve()
    folder = (home / expanded(config.out)).resolve()
    return folder if config.resume else numbered(folder, lambda place: (place / "config.toml").exists())


def numbered(folder: Path, taken: Callable[[Path], bool]) -> Path:
    """Return the first path among `folder`, `folder-2`, `folder-3`, ... for which `taken` returns False."""
    names = (folder.name if number == 1 else f"{folder.name}-{number}" for number in range(1, 100_000))
    return next(place for name in names if not taken(place := folder.with_name(name)))
