"""The server side of a run: the base of every strategy. It does what all methods share.

It greets clients, draws who takes part, sends, waits, checks every reply, keeps order, counts bytes, and tells its
observers of every round. A method defines `configure_fit` (what each client receives) and `aggregate_fit` (what the
server learns). One round is one exchange: evaluation rides in the training reply.
"""

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedhet import config as configuration
from fedhet import population
from fedhet.config import Config, Value
from fedhet.data.own import as_input
from fedhet.errors import ConfigError, FedhetError
from fedhet.exchange import Spec, load_into
from fedhet.population import ClientInfo
from fedhet.randomness import numpy_generator
from fedhet.replies import LostReply, Reply, difference, name_in, open_reply, spec_in, weighted_average
from fedhet.results.history import client_order
from fedhet.rounds import Round, RoundReport, metric_record, statistics
from fedhet.state import ClientRecord, State
from fedhet.wire import (
    Encoder,
    Payload,
    WireError,
    cast,
    check,
    check_finite,
    decode_arrays,
    encode_arrays,
)

log = logging.getLogger("flwr").getChild("fedhet")

GRACE = 10.0
"""Seconds to wait for nodes that must be there and are only just starting."""

ModelFunction = Callable[[ClientInfo], nn.Module]
EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]


class Observer(Protocol):
    """Watches a run: writes its files, shows its progress."""

    def started(self, strategy: "FederatedStrategy", first: int, last: int) -> None:
        """The rounds from `first` to `last` are about to run."""

    def round(self, strategy: "FederatedStrategy", report: RoundReport) -> None:
        """A round is complete and in the strategy's state."""

    def finished(self, strategy: "FederatedStrategy") -> None:
        """All rounds and the evaluation at the end are complete."""

    def failed(self, strategy: "FederatedStrategy", error: BaseException) -> None:
        """The run ended before its end."""


class FederatedStrategy(Strategy):
    """Base of all strategies of fedhet; a `flwr.serverapp.strategy.Strategy` that starts on any Grid.

    Args:
        config: a complete configuration; or else
        settings: single keys by keyword, with `_` for `-`: the method's own (`eta0=0.01`) and shared ones
            (`learning_rate=0.05`).
        shared: raw inputs of a pool that all clients share, (n, ...); sent to each once.
        model: the clients' models, where a method needs them at the server and they are not the configured ones.
        observers: told of every round.

    Raises:
        ConfigError: unknown or wrong settings, all at once.
    """

    name: ClassVar[str]
    Parameters: ClassVar[type]
    common: ClassVar[Mapping[str, Value]] = {}
    """The paper's values of keys that all methods share."""
    equal_architectures: bool = False
    """Whether all clients must have the same architecture."""
    global_model: bool = False
    """Whether `state.arrays["model"]` is a whole model."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        shared: Tensor | None = None,
        model: ModelFunction | None = None,
        observers: Sequence[Observer] = (),
        **settings: Value,
    ) -> None:
        self.config = config or configuration.resolve(self._keys(settings))
        self.parameters = self.config.parameters
        self.shared, self.model = shared, model
        self.observers = list(observers)
        self.state = State(values={"run": "" if self.config.state_dir else uuid.uuid4().hex[:12]})
        self.specs: dict[str, Spec] = {}
        self.metric, self.personal = "accuracy", False
        self._nodes: dict[str, int] = {}
        self._refused: dict[int, str] = {}  # nodes that cannot take part, and whose name bars them, if one does
        self._grid: Grid | None = None
        self._settings = self.config.text()
        self._round = Round()
        self._rides = False
        self._on_common_test: MetricRecord | None = None

    @classmethod
    def _keys(cls, settings: Mapping[str, Value]) -> dict[str, Value]:
        own = {f.name for f in fields(cls.Parameters)}
        keys = {f"{cls.name}.{key}" if key in own else key: value for key, value in settings.items()}
        return {"method": cls.name, **{key.replace("_", "-"): value for key, value in keys.items()}}

    # ---- what a method defines

    def greeting(self) -> Payload:
        """What every client is sent once, when it appears."""
        return Payload()

    def welcome(self, client: str, reply: Reply) -> None:
        """Take in what a client answered to its first greeting.

        Raises:
            FedhetError: why this client cannot take part.
        """

    def transform(self, inputs: Tensor) -> Tensor:
        """A model's batch of raw inputs of the shared pool, at the server."""
        return as_input(inputs) if self.model else population.dataset_of(self.config).transform(inputs)

    def received_by_all(self) -> Payload:
        """What any client receives, to train on or only to be evaluated; by default the shared model."""
        model = self.state.arrays.get("model")
        return Payload({"model": cast(model, self.config.wire_dtype)} if model else {})

    def received_by(self, clients: Sequence[str]) -> dict[str, Payload]:
        """What each of these clients receives only to be evaluated."""
        return dict.fromkeys(clients, self.received_by_all())

    def prepare(self) -> None:
        """Settle what depends on the clients, once they are there and before the first round, also of a resumed run."""

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """What each chosen client receives in this round.

        Not the method of this name in Flower's older API: it maps client names to payloads.

        Args:
            round: from 1.
            clients: the chosen clients that are there, in order of name.
        """
        payload = self.received_by_all()
        return dict.fromkeys(clients, payload)

    def check_reply(self, reply: Reply) -> None:
        """Check what a method's own groups of arrays hold, after training or in an answer to `ask`.

        That all arrays are finite, and the names and shapes of the model's, are checked already. By default the model
        must be there, if it travels.

        Raises:
            WireError: what is wrong with them.
        """
        if self.specs[reply.client] and "model" not in reply.arrays:
            raise WireError("its model is missing")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Learn from the valid replies of a round; returns metrics for the history.

        Not the method of this name in Flower's older API: it maps client names to replies, in order of name, and
        changes `state`. By default what travels of the models is averaged by numbers of examples.
        """
        models = {client: reply.arrays["model"] for client, reply in replies.items() if "model" in reply.arrays}
        if models:
            weights = [replies[client].examples for client in models]
            self.state.arrays["model"] = weighted_average(
                list(models.values()), weights, self.specs[next(iter(models))]
            )
        return {}

    def conclude(self, replies: Mapping[str, Reply]) -> None:
        """Take in what clients sent back at the evaluation at the end."""

    @property
    def present(self) -> list[str]:
        """The clients that are there, in order of name."""
        return list(self._nodes)

    def in_order(self, clients: Iterable[str]) -> list[str]:
        """Clients in order of name, "2" before "10"."""
        return sorted(clients, key=client_order)

    def network_of(self, client: str) -> nn.Module:
        """A network of a client's configured architecture, for methods that hold client models at the server."""
        index = self.in_order(self.state.clients).index(client)
        info = population.ClientInfo(client, index, len(self.state.clients), self.config)
        with torch.random.fork_rng(devices=[]):
            return self.model(info) if self.model else population.model_of(info)

    @property
    def has_global_network(self) -> bool:
        """Whether there is a `global_network` (by now)."""
        return self.global_model and "model" in self.state.arrays

    def global_network(self) -> nn.Module | None:
        """The global model as a network, None without one; needs the configured architecture to be at the server."""
        if not self.has_global_network:
            return None
        model = self.network_of(self.in_order(self.state.clients)[0])
        load_into(model.state_dict(), self.state.arrays["model"])
        return model

    def matrices(self) -> dict[str, Any]:
        """Named matrices between clients for the report, as JSON values."""
        return {}

    # ---- the round loop

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
    ) -> Result:
        """Run all rounds, the closing round if there is one, and the evaluation at the end.

        Takes what Flower's own `start` takes; what is left out comes from the configuration. A strategy whose `state`
        was loaded goes on after `state.round`. With the key `out` and no observers, a run directory is written.

        Args:
            grid: the clients.
            initial_arrays: the shared model before the first round, for methods that have one and when nothing is
                resumed; by default the first client's initial weights.
            num_rounds: rounds of training.
            timeout: seconds to wait for replies.
            train_config: keys of the configuration to change, for training and the evaluation that rides with it.
            evaluate_config: likewise; where both name a key, `train_config` wins.
            evaluate_fn: evaluates the global model at the server, before the first round and after each.

        Raises:
            FedhetError: no client can serve, or none answered the first round; with their reasons.
        """
        overrides = {"rounds": num_rounds, "timeout": None if timeout is None else float(timeout)}
        self._override({key: value for key, value in overrides.items() if value is not None})
        self._override({**(evaluate_config or {}), **(train_config or {})})
        self._grid, self._rides = grid, True
        if self.config.out and not self.observers:
            self._record(Path(self.config.out))
        if initial_arrays and self.equal_architectures and not self.state.round:
            self.state.arrays["model"] = decode_arrays(initial_arrays)
        try:
            result = self._run(grid, evaluate_fn)
        except BaseException as error:  # told and raised again, Ctrl-C included
            for observer in self.observers:
                observer.failed(self, error)
            raise
        for observer in self.observers:
            observer.finished(self)
        return result

    def _run(self, grid: Grid, evaluate_fn: EvaluateFunction | None) -> Result:
        result = Result()
        self._gather(grid)
        self.prepare()
        last = self.config.rounds + bool(self.config.closing_epochs)
        for observer in self.observers:
            observer.started(self, self.state.round + 1, last)
        self._evaluate_globally(self.state.round, evaluate_fn, result)
        for round in range(self.state.round + 1, last + 1):
            messages = self.configure_train(round, ArrayRecord(), ConfigRecord(), grid)
            _, metrics = self.aggregate_train(round, self._send(messages))
            result.train_metrics_clientapp[round] = metrics or MetricRecord()
            self._evaluate_globally(round, evaluate_fn, result)
        result.evaluate_metrics_clientapp[last] = self._evaluate_at_the_end(last + 1, grid)
        result.arrays = encode_arrays(self.state.arrays.get("model", {}))
        return result

    def _record(self, folder: Path) -> None:
        from fedhet.results.recorder import RunDirectory

        directory = RunDirectory(folder.resolve(), self.config, "flwr", resume=self.config.resume)
        self.state = directory.state or self.state
        self.observers = [directory]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's hook: the messages of a round. Within `start`, clients that do not train are evaluated with it."""
        self._grid, self._round = grid, Round(server_round)
        self._override(config)
        if arrays and self.equal_architectures:
            self.state.arrays["model"] = decode_arrays(arrays)
        self._greet(grid)
        self._fetch_first_model()
        closing = server_round > self.config.rounds and self.config.closing_epochs > 0
        drawn = list(self.state.clients) if closing else self._schedule(server_round)
        for client in drawn:
            if client not in self._nodes:
                self._round.fail(client, "is not there")
        payloads = self.configure_fit(server_round, [client for client in self._nodes if client in drawn])
        # A client may turn out to be lost when it is asked something on the way.
        payloads = {client: payload for client, payload in payloads.items() if client in self._nodes}
        self._round.training = frozenset(payloads)
        evaluate = self._rides and (closing or self._evaluates(server_round))
        epochs = self.config.closing_epochs if closing else self.config.local_epochs
        messages = self._messages(MessageType.TRAIN, payloads, epochs=epochs, evaluate=evaluate)
        if evaluate:
            others = [client for client in self._nodes if client not in payloads]
            messages += self._messages(MessageType.EVALUATE, self.received_by(others))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Flower's hook: checks the replies of a round, learns from them and completes the round."""
        valid = self._collect(replies, self._round.training)
        trained = {client: reply for client, reply in valid.items() if client in self._round.training}
        metrics: dict[str, float] = {}
        if trained and len(trained) >= min(self.config.min_clients, len(self._round.training)):
            metrics = self.aggregate_fit(server_round, trained)
            for client in trained:
                self.state.clients[client].trained = server_round
        elif self._round.training:
            log.warning("round %d does not count: it has %d valid replies", server_round, len(trained))
            if server_round == 1 and not trained:
                raise FedhetError(f"no client did its part in the first round:\n{self._round.reasons()}")
        self.state.round = server_round
        record = self._complete(valid, metrics)
        model = self.state.arrays.get("model")
        return (encode_arrays(model) if model else None), record

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Flower's hook, for its own loop: an evaluation of all clients, an exchange of its own."""
        self._override(config)
        if not self._evaluates(server_round):
            return []
        return self._messages(MessageType.EVALUATE, self.received_by(self.present))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Flower's hook, for its own loop."""
        valid = self._collect(replies)
        return metric_record(statistics(valid, None)) if valid else None

    def summary(self) -> None:
        """Log what this strategy is."""
        log.info("%s: %s", self.name, self.parameters)

    def ask(self, question: str, payloads: Mapping[str, Payload]) -> dict[str, Reply]:
        """Ask clients a question of the method's own, an exchange of its own within a round.

        Returns:
            The valid answers, in order of client name; a client without one counts as failed in this round.
        """
        return self._collect(self._send(self._messages(MessageType.QUERY, payloads, question=question)), payloads)

    def _evaluate_at_the_end(self, number: int, grid: Grid) -> MetricRecord:
        self._round = Round(number, final=True)
        self._greet(grid)
        messages = self._messages(MessageType.EVALUATE, self.received_by(self.present))
        replies = self._collect(self._send(messages))
        self.conclude(replies)
        return self._complete(replies, {})

    def _evaluate_globally(self, round: int, function: EvaluateFunction | None, result: Result) -> None:
        """The global model after a round, on the common test set: part of the next row, as what clients receive."""
        last = round == self.config.rounds + bool(self.config.closing_epochs)
        self._on_common_test = None
        if function and self.has_global_network and (last or self._evaluates(round + 1)):
            self._on_common_test = function(round, encode_arrays(self.state.arrays.get("model", {})))
            if self._on_common_test is not None:
                result.evaluate_metrics_serverapp[round] = self._on_common_test

    def _evaluates(self, round: int) -> bool:
        return round % self.config.evaluate_every == 0

    def _schedule(self, round: int) -> list[str]:
        """The clients of a round, drawn from the seed among all that were ever here; who is missing is not replaced."""
        known = sorted(self.state.clients, key=client_order)
        count = max(1, math.floor(self.config.fraction_train * len(known) + 0.5))
        drawn = numpy_generator(self.config.seed, "participation", round).permutation(len(known))[:count]
        return [known[index] for index in sorted(drawn)]

    def _override(self, settings: Mapping[str, Any]) -> None:
        if settings:
            chosen = {key: value for key, value in self.config.flat().items() if value != ""}
            self.config = configuration.resolve({**chosen, **settings}).but(chosen=self.config.chosen)
            self.parameters, self._settings = self.config.parameters, self.config.text()

    # ---- clients

    def _gather(self, grid: Grid) -> None:
        """Wait for clients and greet them: round 0."""
        exact = "clients" in self.config.chosen
        wanted = self.config.clients if exact else self.config.min_clients
        patience = time.monotonic() + self.config.wait_for_clients
        grace = time.monotonic() + GRACE
        while True:
            count = len(list(grid.get_node_ids()))
            if count >= wanted and (exact or time.monotonic() >= patience):
                break
            if time.monotonic() >= max(patience, grace):
                break
            time.sleep(0.1)
        if exact and count != wanted:
            raise ConfigError(
                f"clients = {wanted}, but there are {count} nodes: leave the key out, start as many nodes (in a "
                "simulation: num-supernodes), or give them time to come (wait-for-clients, in seconds)"
            )
        if count < wanted:
            raise FedhetError(f"there are {count} nodes, and {wanted} are needed (min-clients)")
        fresh = not self.state.clients
        self._round = Round()
        self._greet(grid)
        self._fetch_first_model()
        if fresh:
            self._complete({}, {})

    def _greet(self, grid: Grid) -> None:
        """Learn who is there; ask newcomers for their names and what they have."""
        present = set(grid.get_node_ids())
        self._nodes = {client: node for client, node in self._nodes.items() if node in present}
        self._refused = {node: name for node, name in self._refused.items() if not name or name in self._nodes}
        if new := sorted(present - set(self._nodes.values()) - self._refused.keys()):
            self._welcome_nodes(new)
        if not self._nodes:
            raise FedhetError(f"no client can serve:\n{self._round.reasons() or '  there are no nodes'}")

    def _welcome_nodes(self, new: Sequence[int]) -> None:
        greeting = self.greeting()
        encoder = Encoder()
        messages = [self._message(MessageType.QUERY, node, encoder(greeting), question="greet") for node in new]
        self._round.sent = dict(zip(new, messages, strict=True))
        for node, message in self._by_node(self._send(messages)).items():
            name = name_in(message)
            try:
                reply, report = open_reply(message)
                self._admit(node, reply, report)
            except FedhetError as error:
                if not message.has_error():  # one that only failed is asked again
                    self._refused[node] = name if name in self._nodes else ""
                self._round.fail(name or f"at node {node}", str(error))
                continue
            self._round.down[name] += greeting.nbytes
            self._round.up[name] += reply.payload.nbytes
            if name not in self.state.clients:
                self.state.clients[name] = ClientRecord(reply.examples, str(report.get("architecture", "")))
        self._nodes = {client: self._nodes[client] for client in sorted(self._nodes, key=client_order)}

    def _admit(self, node: int, reply: Reply, report: Mapping[str, Any]) -> None:
        if reply.client in self._nodes:
            raise FedhetError("another node goes by this name as well; each needs a partition-id (or name) of its own")
        if reply.client in ("", ".", "..") or "/" in reply.client:
            raise FedhetError(f"its name {reply.client!r} cannot be that of a file: give the node another name")
        spec = spec_in(report)
        if self.equal_architectures and self.specs:
            first = min(self.specs, key=client_order)
            if spec != self.specs[first]:
                raise FedhetError(
                    f"{self.name} needs equal architectures, and this one's {difference(spec, self.specs[first])} "
                    f"unlike that of client {first}"
                )
        if reply.client not in self.state.clients:
            reply.payload.values |= {key: report[key] for key in ("pool", "pool-size") if key in report}
            self.welcome(reply.client, reply)
        self._nodes[reply.client], self.specs[reply.client] = node, spec
        self.metric, self.personal = str(report["metric"]), bool(report["personal"])

    def _fetch_first_model(self) -> None:
        """What is shared starts as the first client's initial weights, unless each starts from its own."""
        travels = any(self.specs[client] for client in self._nodes)
        if not (self.equal_architectures and self.config.shared_init and travels) or self.state.arrays.get("model"):
            return
        for client in self.present:  # all would give the same: they are drawn from the seed, not from the client
            question = self._messages(MessageType.QUERY, {client: Payload()}, question="first")
            answer = self._collect(self._send(question)).get(client)
            if answer is not None and "model" in answer.arrays:
                self.state.arrays["model"] = weighted_average([answer.arrays["model"]], [1.0], self.specs[client])
                return
        raise FedhetError(f"no client gave the first weights:\n{self._round.reasons()}")

    # ---- messages

    def _messages(
        self, kind: str, payloads: Mapping[str, Payload], *, epochs: int = 0, evaluate: bool = True, question: str = ""
    ) -> list[Message]:
        encoder, messages = Encoder(), []
        for client, payload in payloads.items():
            node = self._nodes[client]
            trained = self.state.clients[client].trained
            message = self._message(
                kind, node, encoder(payload), expected=trained, epochs=epochs, evaluate=evaluate, question=question
            )
            self._round.sent[node] = message
            self._round.down[client] += payload.nbytes
            messages.append(message)
        return messages

    def _message(self, kind: str, node: int, content: RecordDict, **request: Any) -> Message:
        current = self._round
        common = {"round": current.number, "final": current.final, "run": self.state.values["run"]}
        content["request"] = ConfigRecord({"settings": self._settings, "request": json.dumps({**common, **request})})
        return Message(content, dst_node_id=node, message_type=kind, group_id=str(current.number))

    def _send(self, messages: Iterable[Message]) -> Iterable[Message]:
        assert self._grid is not None, "a strategy talks to its clients only after start or configure_train"
        return self._grid.send_and_receive(messages, timeout=self.config.timeout)

    def _by_node(self, replies: Iterable[Message]) -> dict[int, Message]:
        """Replies by the node that was asked; one that does not answer is a failure."""
        sent, self._round.sent = self._round.sent, {}
        # The SuperLink itself answers for a node that is gone, so only the message replied to tells which.
        asked = {message.metadata.message_id: node for node, message in sent.items()}
        found: dict[int, Message] = {}
        for reply in replies:
            source = reply.metadata.src_node_id
            node = source if source in sent else asked.get(reply.metadata.reply_to_message_id)
            if node is not None:
                found[node] = reply
        names = {node: client for client, node in self._nodes.items()}
        for node in sent.keys() - found.keys():
            self._round.fail(names.get(node, f"at node {node}"), f"no reply within {self.config.timeout:g} s")
        return {node: found[node] for node in sent if node in found}

    def _collect(self, replies: Iterable[Message], worked: Container[str] = ()) -> dict[str, Reply]:
        """The valid replies, in order of client name; whatever is wrong with the others is noted.

        Args:
            replies: what came.
            worked: clients whose reply holds the method's own arrays, which the method checks.
        """
        names = {node: client for client, node in self._nodes.items()}
        valid: dict[str, Reply] = {}
        for node, message in self._by_node(replies).items():
            client = names[node]
            try:
                reply, report = open_reply(message)
                self._round.up[client] += reply.payload.nbytes
                self._check(client, reply)
                if client in worked:
                    self.check_reply(reply)
            except LostReply as error:
                del self._nodes[client]
                self._round.fail(client, f"{error}; it is greeted again")
                continue
            except FedhetError as error:
                self._round.fail(client, str(error))
                continue
            if "lost-state" in report:
                log.warning("client %s lost its state of round %s and started afresh", client, report["lost-state"])
            valid[client] = reply
        self._round.failures.sort(key=lambda failure: client_order(failure["client"]))
        return {client: valid[client] for client in sorted(valid, key=client_order)}

    def _check(self, client: str, reply: Reply) -> None:
        if reply.client != client:
            raise WireError(f"answers as client {reply.client}")
        for name, group in reply.arrays.items():
            if name == "model":
                narrow = self.config.wire_dtype
                spec = {
                    key: (shape, narrow if np.dtype(dtype).kind == "f" else dtype)
                    for key, (shape, dtype) in self.specs[client].items()
                }
                check(group, spec, "its model")
            else:
                check_finite(group, f"its {name}")

    # ---- results

    def _complete(self, replies: Mapping[str, Reply], metrics: Mapping[str, float]) -> MetricRecord:
        """Tell the observers of the round."""
        report = self._round.report(
            replies,
            metrics,
            clients=self.state.clients,
            personal=self.personal,
            on_common_test=self._on_common_test,
        )
        for observer in self.observers:
            observer.round(self, report)
        return metric_record(report.row)
