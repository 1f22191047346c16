"""FedDF (Lin et al., 2020): the server's network learns the mean of the clients' logits of public examples.

    client i:  sends its logits f_i(x) for public examples x
    server:    w = argmin_w  mean_x KL(softmax(1/m sum_i f_i(x)) || softmax(f_w(x))), by Adam, for m clients

With `teach = true`, clients then learn the logits f_w(x) for an epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from fedhet import models
from fedhet.data import Examples
from fedhet.messages import Reply, load_into, to_arrays
from fedhet.server import METRICS, Traits, method, option
from fedhet.training import Optimisation, Phase, Step, learning_rate, read, soft_divergence
from fedhet.utils.process import standard_settings

from .families.at_server import PublicAtServer, build_at_server
from .families.scores import Scores, ScoresKeys, ScoresState, distance_metric


@dataclass(frozen=True)
class Keys(ScoresKeys):
    uses = ("architectures",)  # The server's network is one of them.
    public_batch = 128
    public_at_server = True
    server_model: str = option("", "the server's network; empty: the first of architectures, mlp-20 for tabular data")
    server_steps: int = option(1000, "number of mini-batches per round on which the server trains", at_least=1)
    server_learning_rate: float = option(0.001, "initial learning rate of the server's Adam, in each round", above=0)
    teach: bool = option(False, "clients first train for an epoch on the server's scores", at_need=True)


@dataclass
class ServerModel(ScoresState):
    """The state of FedDF: the `shape` of an input of the server's network, and whether it consists of `integers`."""

    serves = True
    shape: list[int] = field(default_factory=list)
    integers: bool = False


@method(
    "feddf",
    lambda keys: Traits(
        keeps="model",
        public="inputs",
        serves_clients=keys.teach,  # Otherwise, clients do not use the server's network.
        other_arrays="mean",
        sends={"scores": "posteriors", "distance": METRICS},
        inside="",
    ),
    Keys,
    client="fedhet.client_apps.feddf:FedDF",
    common={"test-on": "both"},
    own={"feddf.server-steps": 100},
)
class FedDF(Scores[Keys, ServerModel], PublicAtServer[Keys, ServerModel]):
    """FedDF: the global model learns the mean of clients' logits; if `teach = true`, clients then learn its logits."""

    def admit(self, reply: Reply) -> None:
        super().admit(reply)
        state = self.state
        if not state.model:
            example = self.transform(own_data=reply.report.own_data)(self.public.inputs[:1])
            state.shape = [*example.shape[1:]]
            state.integers = not example.is_floating_point()
            state.model = to_arrays(self.network().state_dict())

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        network = self.network()
        inputs = self.public.inputs[torch.from_numpy(self.rows(round + 1)).long()]
        examples = Examples(inputs, self.mean(replies))
        many_labels = self.run.task == "multi-label"
        rate = self.options.server_learning_rate
        schedule = partial(learning_rate, "cosine", rate)
        steps = Optimisation("adam", rate, batch_size=self.options.public_batch, schedule=schedule)

        def divergence(step: Step) -> Tensor:
            return soft_divergence(step.outputs, step.labels.to(step.outputs.dtype), 1.0, many_labels=many_labels)

        phase = Phase(0, steps, steps=self.options.server_steps, terms=(divergence,), task_weight=0.0)
        self.state.model, trained = self.train_on_public(network, self.state.model, phase, examples, round)
        if self.options.teach and trained:
            with standard_settings():
                self.teach(round, read(network, inputs.to(self.device), self.transform(network)).cpu())
        return distance_metric(replies.values(), "distance") | trained

    def global_model(self) -> nn.Module | None:
        return self.network() if self.has_global_model else None

    def network(self) -> nn.Module:
        dtype = torch.int64 if self.state.integers else torch.float32
        name = self.options.server_model
        example = torch.zeros(1, *self.state.shape, dtype=dtype)
        build = partial(models.build_auxiliary, name, self.config.architectures, example, self.state.classes)
        network = build_at_server(build, self.config.seed)
        load_into(network.state_dict(), self.state.model)
        return network
