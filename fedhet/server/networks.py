"""Networks like the clients', for methods that hold client models at the server."""

from contextlib import nullcontext

import torch
from torch import nn, random

from fedhet import population
from fedhet.errors import FedhetError, ModelError
from fedhet.options import Config
from fedhet.population import ClientInfo, ModelFunction
from fedhet.wire import Report, difference, spec_of


def network_like(
    client: str,
    architecture: str,
    place: tuple[int, int] | None,
    config: Config,
    model: ModelFunction | None,
    way_out: str,
) -> nn.Module:
    """A network of a client's architecture, built from what the client told; its weights mean nothing.

    Args:
        client: its name.
        architecture: as it told, empty where it does not.
        place: its partition and the number of partitions; None where it has none.
        config: the run's.
        model: the user's own model function, if there is one.
        way_out: what to do where the network cannot be built, for the error.

    Raises:
        FedhetError: the client says neither which architecture it has nor which partition, or it cannot be built.
    """
    partition, partitions = place or (None, None)
    node = {"architecture": architecture} if architecture and not model else {}
    if partition is None and not node and not model:
        raise FedhetError(
            f"client {client} tells neither its architecture (disclose-architecture) nor its partition-id, and the "
            f"server needs a network like its own"
        )
    info = ClientInfo(client, partition, partitions, config, node)
    with random.fork_rng(devices=[]):
        if model:
            return model(info)
        try:
            return population.model_of(info)
        except ModelError as error:
            raise FedhetError(
                f"the server cannot build a network like client {client}'s ({error}): {way_out}"
            ) from error


def check_like(report: Report, config: Config, model: ModelFunction | None, way_out: str) -> None:
    """Find out whether `network_like` gives the network of a client, all of which is shared, from what it told.

    Raises:
        FedhetError: it does not, and the way out.
    """
    told = report.client, report.architecture, report.partition, config, model, way_out
    if not model:
        population.dataset_of(config)  # which is kept, and so is not to be read where there are no values
    try:
        # Without its weights, which nobody has asked for before they are known to be those of the client.
        with nullcontext() if model else torch.device("meta"):
            built = network_like(*told)
    except (NotImplementedError, RuntimeError):  # it computes while it is built
        built = network_like(*told)
    if (spec := spec_of(built.state_dict())) != report.spec:
        raise FedhetError(
            f"its {difference(report.spec, spec)} unlike in the network that the server would build for it: {way_out}"
        )
