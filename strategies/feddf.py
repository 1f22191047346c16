"""FedDF, server side: a network at the server is distilled from the clients' mean class scores (Lin et al., 2020).

In round t, on the public examples X(t), the server's network w takes steps of Adam on

    KL(softmax(1/m sum_k f_k(x)) || softmax(f_w(x)))

where f_k are the logits that client k sends after its local training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from fedhet import models
from fedhet.config import client_setup
from fedhet.data import Examples
from fedhet.data.own import as_input
from fedhet.errors import FedhetError
from fedhet.messages import Reply, load_into, to_arrays
from fedhet.methods.included.distillation import FedDFOptions, feddf
from fedhet.models.representation import fitted, precision
from fedhet.training import Optimisation, Phase, Step, learning_rate, read, soft_divergence
from fedhet.utils.machine import device_of, one_thread

from ._common import build_at_server, train_at_server  # noqa: TID251 - this folder is fedhet.strategies
from .fedmd import Scores, ScoresState  # noqa: TID251


@dataclass
class FedDFState(ScoresState):
    """The state of FedDF: `model` has the weights of the server's network, and `shape` is the shape of one input."""

    serves = True
    shape: list[int] = field(default_factory=list)


class FedDF(Scores[FedDFOptions, FedDFState]):
    """Trains the global model at the server; with the key `teach`, clients then learn the global model's scores."""

    method = feddf
    state_class = FedDFState

    @property
    def public(self) -> Tensor:
        """The inputs of the public dataset; raises a FedhetError if only the clients have it."""
        if self.run.public is None:
            raise FedhetError(
                "the server of feddf trains on the public dataset, but only clients have it: set public-samples, or "
                "give make_server_app(public=...) or FedDF(public=...)"
            )
        return self.run.public.inputs

    def admit(self, reply: Reply) -> None:
        """Keep the numbers of classes and tokens as in FedMD; initialise the server's network for the first client."""
        super().admit(reply)
        state, own_data = self.state, self.run.own_data or reply.report.own_data
        if not state.model:
            state.shape = [*self._transform(None, own_data=own_data)(self.public[:1]).shape[1:]]
            state.model = to_arrays(self.network().state_dict())

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Train the server's network on the clients' mean scores; it is unchanged if training diverges."""
        network, device = self.network(), device_of("cpu" if self.config.device == "cpu" else "auto")
        network.to(device)
        inputs = self.public[torch.from_numpy(self.rows(round + 1)).long()].to(device)
        examples = Examples(inputs, self.mean(replies).to(device))
        transform, metrics = self._transform(network, own_data=self.run.own_data), self.distance(replies)
        trained = train_at_server(network, self._phase(), examples, self.config.seed, round, transform)
        if trained is None:
            return metrics
        self.state.model = to_arrays(network.state_dict())
        if self.options.teach:
            with one_thread():
                self.teach(round, read(network, inputs, transform).cpu())
        return metrics | trained

    def global_model(self) -> nn.Module | None:
        """Return the server's network; None before a client is admitted."""
        return self.network() if self.has_global_model else None

    def network(self) -> nn.Module:
        """Return the server's network with its current weights."""
        name, example = self.options.server_model, torch.zeros(1, *self.state.shape)
        build = partial(models.build_auxiliary, name, self.config.architectures, example, self.state.classes)
        network = build_at_server(build, self.config.seed)
        load_into(network.state_dict(), self.state.model)
        return network

    def _phase(self) -> Phase:
        keys, many_labels = self.options, self.run.metric == "auc"
        rate = keys.server_learning_rate
        schedule = partial(learning_rate, "cosine", rate)
        steps = Optimisation("adam", rate, batch_size=keys.public_batch, schedule=schedule)

        def divergence(step: Step) -> Tensor:
            return soft_divergence(step.outputs, step.labels.to(step.outputs.dtype), 1.0, many_labels=many_labels)

        return Phase(0, steps, steps=keys.server_steps, terms=(divergence,), task_weight=0.0)

    def _transform(self, network: nn.Module | None, *, own_data: bool) -> Callable[[Tensor], Tensor]:
        dtype = None if network is None else precision(network)
        transform = as_input if own_data else client_setup.dataset_of(self.config).transform
        return fitted(transform, dtype)
