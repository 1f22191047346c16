"""FENS (Allouah et al., NeurIPS 2024): clients send their networks once, then train an aggregator of all outputs.

    client i:  f_i = argmin_f L_i(f) on most of its examples, and sends f_i in the first round
    server:    sends f_1, ..., f_M to all clients, once, and A(z) = mean_i z_i + V ReLU(U z + u) + v in each round
    client i:  A_i = A - grad_A CE(A(f_1(x), ..., f_M(x)), y) for the examples that f_i has not seen
    server:    a step of Adam for A with the gradient A - sum_i n_i A_i / sum_i n_i                         (FedAdam)

V and v are 0 at first.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from fedhet.errors import FedhetError, ModelError
from fedhet.messages import Reply, check, to_arrays
from fedhet.methods.sharing import Sharing
from fedhet.models.registry import expand
from fedhet.server import Arrays, Common, FederatedStrategy, Options, Payload, State, Traits, method, option

from .families.at_server import build_at_server
from .families.by_class import outputs_of
from .families.ensembles import Aggregated


@dataclass(frozen=True)
class Keys(Options):
    without = ("batch-norm",)  # Clients always send whole networks.
    held_out: float = option(0.1, "fraction of a client's examples for the aggregator only", above=0, below=1)
    server_learning_rate: float = option(0.001, "learning rate of the server's Adam, for the aggregator", above=0)


@dataclass
class Members(State):
    """The state of FENS: arrays of an `Aggregated`, the round that `collected` its `members`, and Adam's moments."""

    members: Arrays = field(default_factory=dict)
    collected: int = 0
    aggregator: Arrays = field(default_factory=dict)
    first: Arrays = field(default_factory=dict)
    second: Arrays = field(default_factory=dict)


@method(
    "fens",
    Traits(
        shares=Sharing("everything", averaged=False),
        keeps="model",
        other_arrays="entries",
        sends={"aggregator": "weights"},
        predicts="an aggregator of all clients' networks, which are disclosed to all clients",
        inside="",
    ),
    Keys,
    client="fedhet.client_apps.fens:FENS",
    own={"local-epochs": 100},
)
class FENS(FederatedStrategy[Keys, Members]):
    """FENS: all clients' networks, sent once, and an aggregator of their outputs that clients train together."""

    def common(self, reply: Reply) -> Mapping[str, Common]:
        network = reply.report.architecture
        if not network:
            raise FedhetError("fens sends each client's network to all clients: set disclose-architecture = true")
        with suppress(ModelError):
            network = "of fedhet" if expand(network) else ""
        outputs = Common(outputs_of(reply), "all clients need an output for each of the same classes")
        remedy = "clients build the networks of others, so use fedhet's networks, or equal ones of your own"
        return {"number of outputs": outputs, "network": Common(network, remedy)}

    def payload_for(self, client: str) -> Payload:
        members = {} if self.federation.keeps(client, after=self.state.collected) else {"members": self.state.members}
        return Payload({"aggregator": self.state.aggregator, **members} if self.state.collected else {})

    def check_reply(self, reply: Reply) -> None:
        if self.state.collected:
            expected = {name: (array.shape, array.dtype.name) for name, array in self.state.aggregator.items()}
            check(reply.arrays.get("aggregator", {}), expected, "the client's aggregator")
        else:
            super().check_reply(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        if self.state.collected:
            self.step_of_adam(replies)
        else:
            self.collect_members(replies)
            self.state.collected = round
        return {}

    def collect_members(self, replies: Mapping[str, Reply]) -> None:
        names = [self.state.clients[client].architecture for client in replies]
        outputs = 1 if self.run.task == "binary" else int(self.state.common["number of outputs"])  # 1 for two scores
        fens = build_at_server(lambda: Aggregated({}, names, outputs), self.config.seed)
        self.state.aggregator = to_arrays(fens.state_dict())
        self.state.members = {"architectures": self.state.aggregator.pop("architectures")}
        for place, reply in enumerate(replies.values()):
            self.state.members |= {f"members.{place}.{name}": array for name, array in reply.arrays["model"].items()}

    def step_of_adam(self, replies: Mapping[str, Reply]) -> None:
        state = self.state
        sent = {client: reply.arrays["aggregator"] for client, reply in replies.items()}
        mean = self.aggregator.average(sent, self.aggregator.weights(replies), before=state.aggregator)
        for name, before in state.aggregator.items():
            gradient = before - mean[name]
            state.first[name] = 0.9 * state.first.get(name, 0) + 0.1 * gradient
            state.second[name] = 0.99 * state.second.get(name, 0) + 0.01 * gradient**2
            step = state.first[name] / (state.second[name] ** 0.5 + 1e-3)
            state.aggregator[name] = before - self.options.server_learning_rate * step
