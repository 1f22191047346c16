"""Initial values of the arrays that clients share: from `initial_arrays`, or from clients."""

import math
from collections import Counter
from collections.abc import Callable, Mapping

from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import ArrayRecord
from fedhet.messages import Arrays, Payload, Reply, as_declared, by_position
from fedhet.messages.protocol import FIRST
from fedhet.server.aggregation import average_shared, distance
from fedhet.server.federation import Federation
from fedhet.server.run import Run
from fedhet.utils.files import expanded, read_arrays
from fedhet.utils.statistics import in_order
from fedhet.utils.text import log


def check_initial_arrays(run: Run, initial_arrays: object) -> None:
    """Raise a ConfigError if the argument `initial_arrays` is of another type, or the method has no use for it."""
    if initial_arrays is not None and not isinstance(initial_arrays, ArrayRecord):
        kind = type(initial_arrays).__name__
        raise ConfigError(
            f"initial_arrays must be a flwr.app.ArrayRecord, such as ArrayRecord(model.state_dict()), not a {kind}"
        )
    if initial_arrays and run.traits.shares.keys != "nothing" and not run.traits.shares.averaged:
        raise ConfigError(
            f"method {run.method.name} has no shared model that initial_arrays could set: leave them out, and let "
            "the clients' model function set initial weights"
        )


def global_model_in(folder: str) -> Arrays:
    """Return the global model in the folder of a run, or of its models, on this machine; {} if there is none."""
    places = [expanded(folder) / inner / "global.safetensors" for inner in ("models", "")]
    return next((read_arrays(path)[0] for path in places if path.is_file()), {})


def take_initial_arrays(run: Run, federation: Federation) -> None:
    """Set the shared arrays to `run.initial`, whose arrays without names are taken by position."""
    shared = _shared(federation)
    run.initial = by_position(run.initial, shared)
    unknown = sorted(run.initial.keys() - shared.keys())
    named_alike = run.traits.networks != "any"  # else methods may share arrays under names of their own
    if named_alike and unknown and len(unknown) == len(run.initial):
        raise ConfigError(
            f"initial_arrays has none of the arrays that clients share ({', '.join([*shared][:3])}, ...), but has "
            f"{', '.join(unknown[:3])}: pass ArrayRecord(model.state_dict()) of the clients' model"
        )
    if unknown and not run.state.round:
        log.warning("initial arrays that no client shares are ignored: %s", ", ".join(unknown[:3]))
    if run.initial:
        run.state.model = run.state.model | {key: array for key, array in run.initial.items() if key in shared}
        run.initial = {}


def request_missing_arrays(run: Run, federation: Federation, first_model: Callable[[Reply], Arrays]) -> None:
    """With `shared-init`, request from clients the initial values of shared arrays that the model lacks.

    `first_model` returns the initial weights in a client's reply, and raises a WireError if they are invalid.
    """
    state = run.state
    wanted = run.traits.shares.averaged and run.traits.common_init and run.config.shared_init
    if not wanted or not _shared(federation).keys() - state.model.keys():
        return
    model = _from_clients(run, federation, first_model)
    state.model = as_declared(model, federation.specs.values()) | state.model
    if not state.model:
        raise FedhetError(f"no client sent its initial weights; remove the causes:\n{run.round.reasons()}")


def _shared(federation: Federation) -> dict[str, None]:
    return dict.fromkeys(key for client in federation.nodes for key in federation.specs[client])


def _from_clients(run: Run, federation: Federation, first_model: Callable[[Reply], Arrays]) -> Arrays:
    """Return the initial weights that the shared model lacks, from two clients, and a third if these disagree.

    Clients with one architecture draw equal weights from the seed, so weights of a client that agrees with another one
    come first. With a robust aggregation rule, all clients are asked, and Krum selects one.
    """
    sent: dict[str, Arrays] = {}
    missing = {client: federation.specs[client].keys() - run.state.model.keys() for client in federation.nodes}

    def keep(reply: Reply) -> None:
        sent[reply.client] = first_model(reply)

    def lacking(senders: float) -> list[str]:
        """Return clients to ask so that each array is sent by this number of clients, or by all that have it."""
        having = Counter(key for arrays in sent.values() for key in arrays)
        clients = []
        for client in in_order(missing.keys() & federation.nodes.keys()):
            if any(having[key] < senders for key in missing[client]):
                having.update(missing.pop(client))
                clients.append(client)
        return clients

    robust = run.config.aggregation != "mean"
    for senders in (math.inf,) if robust else (2, 3):
        while clients := lacking(senders):
            federation.ask(FIRST, dict.fromkeys(clients, Payload()), keep)
        if not any(_distances(sent).values()):
            break
    if robust:
        return average_shared(sent, dict.fromkeys(sent, 1.0), "krum", run.config.byzantine)
    distances = _distances(sent)
    model: Arrays = {}
    for client in sorted(sent, key=distances.__getitem__):
        model = sent[client] | model
    return model


def _distances(sent: Mapping[str, Arrays]) -> dict[str, float]:
    """Return, by client, the sum over arrays of the L2 distance to another client's nearest array of that name."""
    total = dict.fromkeys(sent, 0.0)
    for client, arrays in sent.items():
        for name, array in arrays.items():
            others = [group[name] for other, group in sent.items() if other != client and name in group]
            total[client] += min((distance({name: array}, {name: other}) for other in others), default=0.0)
    return total
