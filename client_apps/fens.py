"""Client side of FENS: trains and sends its network once, then trains an aggregator of all clients' networks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.errors import DataError
from fedhet.messages import Payload, check, load_into, spec_of, to_arrays, to_tensor
from fedhet.models.copies import load_state
from fedhet.strategies.families.ensembles import Aggregated
from fedhet.strategies.fens import Keys
from fedhet.training import Optimisation, Phase


class FENS(ClientSide[Keys]):
    remembers = True
    fens: Aggregated | None = None

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_scores("which the aggregator reads", numbers=True)
        self.examples(held_out=True)
        return Payload()

    def begin(self, payload: Payload) -> None:
        self.client.memory |= {name: to_tensor(array) for name, array in payload.arrays.get("members", {}).items()}
        if aggregator := payload.arrays.get("aggregator"):
            tensors = self.client.remembered | {name: to_tensor(array) for name, array in aggregator.items()}
            self.fens = self.loaded(tensors)
            check(aggregator, spec_of(self.fens.aggregator.state_dict(prefix="aggregator.")), "the server's aggregator")
            load_state(self.fens, {name: tensors[name] for name in self.fens.state_dict()})

    def loaded(self, beside: Mapping[str, Tensor]) -> Aggregated:
        client = self.client
        inputs = client.data.train.inputs[:2]
        fens = Aggregated.of(beside, client.transform(inputs), client.read(inputs).shape[-1], client.model)
        return fens.to(client.device).eval()

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
        order = torch.randperm(len(train), generator=client.generator("held out", lasting=True)).to(train.labels.device)
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
