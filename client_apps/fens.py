"""Client side of FENS: trains and sends its network once, then trains an aggregator of all clients' networks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fedhet import models
from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.errors import DataError, ModelError
from fedhet.messages import Payload, WireError, check, load_into, spec_of, to_arrays, to_tensor
from fedhet.models.copies import load_state, separated, without_memory
from fedhet.strategies.fens import Fens, Keys
from fedhet.training import Optimisation, Phase


class FENS(ClientSide[Keys]):
    remembers = True
    fens: Fens | None = None

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_scores("which the aggregator reads", numbers=True)
        self.examples(held_out=True)
        return Payload()

    def begin(self, payload: Payload) -> None:
        self.client.memory |= {name: to_tensor(array) for name, array in payload.arrays.get("members", {}).items()}
        if aggregator := payload.arrays.get("aggregator"):
            tensors = self.client.remembered | {name: to_tensor(array) for name, array in aggregator.items()}
            self.fens = self.loaded(tensors)
            state = self.fens.state_dict()
            expected = spec_of({name: tensor for name, tensor in state.items() if name.startswith("aggregator.")})
            check(aggregator, expected, "the server's aggregator")
            load_state(self.fens, {name: tensors[name] for name in state})

    def loaded(self, beside: Mapping[str, Tensor]) -> Fens:
        client = self.client
        inputs = client.data.train.inputs[:2]
        outputs = client.read(inputs).shape[-1]
        shape = tuple(client.transform(inputs).shape[1:])
        absent = torch.empty(0)
        encoded = beside.get("architectures", absent).flatten().to(torch.uint8)
        names = bytes(encoded.tolist()).decode(errors="replace").split("\n")
        # Memory grows with the square of the number of names, of which a server could send many in a few bytes.
        if beside.get("aggregator.0.weight", absent).shape != (2 * len(names), len(names) * outputs):
            raise WireError("the server sent an aggregator of other networks than it named: use one version of fedhet")
        members = {}
        for place, name in enumerate(names):
            build = partial(self.built, name, shape, outputs)
            prefix = f"members.{place}."
            needed = {key: tensor.shape for key, tensor in without_memory(build).state_dict(prefix=prefix).items()}
            received = {key: tensor.shape for key, tensor in beside.items() if key.startswith(prefix)}
            if received == needed:
                members[str(place)] = build()
        return Fens(members, names, outputs).to(client.device).eval()

    def built(self, name: str, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Return a new network by the name of its architecture, for examples of the given shape."""
        try:
            return models.build(name, shape, outputs)
        except ModelError:  # Networks of the clients' own are equal.
            return separated(self.client.model)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        client = self.client
        client.data = replace(client.data, train=self.examples(held_out=self.fens is not None))
        if not self.fens:
            return super().phases(payload)
        step = Optimisation("sgd", 1.0, batch_size=len(client.data.train), least=client.least)
        return [Phase(1, step, module=self.fens, trains=payload.arrays["aggregator"].__contains__)]

    def examples(self, *, held_out: bool) -> Examples:
        """Return the training examples for the aggregator (`held_out`) or the network; at a node with groups, all."""
        client = self.client
        train = client.data.train
        if train.groups is not None:
            return train
        count = max(round(self.options.held_out * len(train)), client.least)
        if len(train) - count < client.least:
            raise DataError(f"client {client.name}: {len(train)} examples cannot be divided by fens.held-out: add some")
        generator = client.generator("held out", lasting=True)
        order = torch.randperm(len(train), generator=generator).to(train.labels.device)
        return train.subset(order[:count] if held_out else order[count:])

    def end(self, payload: Payload) -> Payload:
        if not self.fens:
            return self.share()
        received = payload.arrays["aggregator"]
        tensors = self.fens.state_dict()
        trained = to_arrays({name: tensors[name].clone() for name in received})
        load_into(tensors, received)  # Predictions are by the server's aggregator.
        return Payload({"aggregator": trained})

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor]:
        return self.fens or self.client.model
