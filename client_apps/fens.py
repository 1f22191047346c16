"""Client side of FENS: trains and sends its network once, then trains an aggregator of all clients' networks."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedhet import models
from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.errors import DataError, ModelError
from fedhet.messages import Payload, WireError, load_into, to_arrays, to_tensor
from fedhet.models.copies import without_memory
from fedhet.strategies.fens import Fens, Keys, Silent
from fedhet.training import Optimisation, Phase
from fedhet.utils.randomness import torch_generator


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
            members = self.client.remembered
            # Memory grows with the square of the number of names, of which a server could send many in a few bytes.
            names = members.get("architectures", torch.empty(0))
            count = 1 + int((names == ord(",")).sum())
            outputs = self.client.read(self.client.data.train.inputs[:2]).shape[-1]
            first = aggregator.get("aggregator.0.weight")
            if names.dtype != torch.uint8 or first is None or first.shape != (2 * count, count * outputs):
                raise WireError(
                    "the server sent an aggregator of other networks than it named: use one version of fedhet"
                )
            self.fens = self.loaded(members)
            tensors = self.fens.state_dict()
            arrays = to_arrays(members) | aggregator
            load_into(tensors, {name: arrays[name] for name in tensors})

    def loaded(self, beside: Mapping[str, Tensor]) -> Fens:
        names = bytes(beside["architectures"].tolist()).decode().split(",")
        outputs = self.client.read(self.client.data.train.inputs[:2]).shape[-1]
        members = []
        for place, name in enumerate(names):
            prefix = f"members.{place}."
            shapes = {key.removeprefix(prefix): value.shape for key, value in beside.items() if key.startswith(prefix)}
            members.append(self.built(name, shapes, outputs))
        return Fens(members, names, outputs).to(self.client.device).eval()

    def built(self, name: str, shapes: Mapping[str, torch.Size], outputs: int) -> nn.Module:
        """Return a network by the name of its architecture, or a `Silent` one if its arrays have other `shapes`."""
        inputs = self.client.transform(self.client.data.train.inputs[:2])

        def network() -> nn.Module:
            try:
                return models.build_auxiliary(name, name, inputs, outputs)
            except ModelError:  # Networks of the clients' own are equal.
                return deepcopy(self.client.model)

        state = without_memory(network).state_dict()
        fits = {key: tensor.shape for key, tensor in state.items()} == shapes
        return network() if fits else Silent(outputs)

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
        least = max(client.least, 1)
        count = max(round(self.options.held_out * len(train)), least)
        if len(train) - count < least:
            raise DataError(f"client {client.name}: {len(train)} examples cannot be divided by fens.held-out: add some")
        generator = torch_generator(client.root, "held out", client.name)
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
