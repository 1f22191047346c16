"""A node's settings and its policy, which decides what requests the node answers and which values it may send.

Paths in a server's request are used only if the server runs on the same machine or cluster (a simulation). Otherwise,
the node config names the folders for data and state.
"""

import hashlib
import hmac
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from fedhet.client.audit import FAILED, answered, kind_of
from fedhet.client.client import AnySide
from fedhet.client.state import ClientStore
from fedhet.config import configuration
from fedhet.errors import ConfigError, Refused, in_words, nearest
from fedhet.flower import Context, Message, MessageType
from fedhet.flower.insides import hash_of_app
from fedhet.flower.messages import LONGEST_REASON, name_of, read_request
from fedhet.messages import LostState, Payload, Request, WireError
from fedhet.messages.protocol import HANDSHAKE, MOST_PARTITIONS
from fedhet.methods import registry
from fedhet.methods.method import KINDS, METRICS, STRUCTURE
from fedhet.methods.options import Config, keys_about, keys_that, listed
from fedhet.setup.client_setup import ClientInfo
from fedhet.tasks import Task
from fedhet.utils.files import plain_name, private_files, state_folder
from fedhet.utils.machine import out_of_memory, proof
from fedhet.utils.statistics import Metric
from fedhet.utils.text import log

NOISY = frozenset({*KINDS} - {"statistics", "prototypes", "projections"} | {STRUCTURE})
"""Kinds of values that depend on training examples only through a network, whose training gets noise (`dp-noise`)."""

LEAST = 10
"""Default of `min-examples`, the minimum number of examples behind every number sent, if `Policy.deployed` is set."""

POLICY_KEYS = (
    *("allow", "allow-apps", "min-examples", "max-bytes", "max-per-hour"),
    *("dp-noise", "dp-clip", "dp-epsilon", "dp-delta"),
)
"""The keys of a node config that limit what the node sends."""

NODE_KEYS = frozenset(
    {*POLICY_KEYS, *keys_that("at_node"), "memory-limit"}
    | {"name", "partition-id", "num-partitions", "split-seed", "data-path", "architecture", "width", "depth", "rank"}
)
"""The keys of a node config."""

DIGITS = 4  # significant digits of metrics that a node sends if `Policy.deployed` is set


@dataclass(frozen=True)
class Policy:
    """The rules of one node: which kinds of values it sends, and from how many examples.

    Attributes:
        allowed: kinds of values (`KINDS`) that may be sent; None allows all.
        least: minimum number of examples behind every number that is sent.
        deployed: whether the node config sets what may be sent (`allow`), or the server runs on another machine or as
            another user. Then metrics are rounded, nothing is downloaded, and failure reasons that could disclose data
            stay in the node's log.
        noise: standard deviation of the noise in differentially private training, as a multiple of `clip`; else 0.
        clip: largest norm of an example's gradient in differentially private training.
        budget: largest epsilon of all the node's runs together, beyond which it refuses to train.
        delta: the delta of epsilon; 0 for 1 / (10 n), where n is the number of the node's training examples.
        largest: largest number of bytes of a reply.
        hourly: largest number of messages in an hour that the node answers.
    """

    allowed: frozenset[str] | None = None
    least: int = 1
    deployed: bool = False
    noise: float = 0.0
    clip: float = 0.0
    budget: float = math.inf
    delta: float = 0.0
    largest: float = math.inf
    hourly: float = math.inf

    @classmethod
    def of(cls, node_config: Mapping[str, Any], *, deployed: bool) -> "Policy":
        """Return the policy that a node config sets; raise a ConfigError if a key is misspelt or a value invalid."""
        for key in node_config:
            if close := misspelt(key):
                raise ConfigError(f"the node config has the unknown key {key!r}; did you mean {close!r}? Rename it")
        allowed = None
        if "allow" in node_config:
            allowed = frozenset(listed(str(node_config["allow"])))
            if unknown := sorted(allowed - {*KINDS}):
                raise ConfigError(nearest("kind in the node's allow", unknown[0], KINDS))
        least = int(number_in(node_config, "min-examples", LEAST if deployed else 1, at_least=1, whole=True))
        noise, clip = (number_in(node_config, key, 0.0, at_most=1e9) for key in ("dp-noise", "dp-clip"))
        budget = number_in(node_config, "dp-epsilon", math.inf)
        delta = number_in(node_config, "dp-delta", 0.0, at_least=1e-12, at_most=0.5)
        if (noise > 0) != (clip > 0) or (not noise and {"dp-epsilon", "dp-delta"} & node_config.keys()):
            raise ConfigError(
                "the node config has only some of the settings for differential privacy: set both dp-noise and "
                "dp-clip, or remove dp-noise, dp-clip, dp-epsilon and dp-delta"
            )
        largest, hourly = (number_in(node_config, key, math.inf) for key in ("max-bytes", "max-per-hour"))
        return cls(allowed, least, deployed, noise, clip, budget, delta, largest, hourly)

    def __str__(self) -> str:
        """Return the effective policy in words, for the node's log."""
        kinds = "all kinds of values" if self.allowed is None else ", ".join(sorted(self.allowed)) or "nothing"
        budget = f"epsilon at most {self.budget:g}" if self.budget < math.inf else "no limit of epsilon (dp-epsilon)"
        noise = f"dp-noise {self.noise:g}, {budget}" if self.noise else "without dp-noise"
        return f"may send {kinds}, from at least {self.least} examples, {noise}"

    def delta_of(self, examples: int) -> float:
        """Return the delta of differential privacy for a number of training examples."""
        return self.delta or 1 / (10 * examples)

    @property
    def tells_metrics(self) -> bool:
        """Whether metrics and losses may be sent."""
        return self.allowed is None or METRICS in self.allowed

    @property
    def audits(self) -> bool:
        """Whether the node's audit file has each message, from which their number is known."""
        return self.deployed or min(self.largest, self.hourly) < math.inf

    @property
    def keeps_secret(self) -> bool:
        """Whether the node draws its mini-batches with a secret seed instead of the run's seed."""
        return self.noise > 0 or (self.deployed and self.allowed is not None)

    def admit(self, node_config: Mapping[str, Any], state: Path) -> None:
        """Raise `Refused` if the node answers nothing, not this app, or not now; its audit file is in `state`."""
        if self.allowed is not None and not self.allowed:
            raise Refused(
                "this node allows nothing to be sent (allow = '' in its node config), so it cannot take part in a run: "
                "set allow to the kinds of values that may be sent, such as allow = 'weights,metrics'"
            )
        app = hash_of_app() if "allow-apps" in node_config else ""
        if app and app not in listed(str(node_config["allow-apps"])):
            raise Refused(
                f"this node runs only the apps that its owner has listed (allow-apps), and not {app}: let the owner "
                "read the app's files, and add this hash"
            )
        self.check_rate(state)

    def check_rate(self, state: Path) -> None:
        """Raise `Refused` if the node, with its audit file in `state`, has answered `max-per-hour` messages."""
        if self.hourly < math.inf and answered(state, datetime.now().astimezone() - timedelta(hours=1)) >= self.hourly:
            raise Refused(
                f"this node answers at most {self.hourly:g} messages in an hour (max-per-hour in its node config): "
                "wait, or let its owner raise the limit"
            )

    def check_size(self, sizes: Mapping[str, int]) -> None:
        """Raise `Refused` if a reply with bytes `sizes` by kind has more than `max-bytes`."""
        if (size := sum(sizes.values())) > self.largest:
            raise Refused(
                f"the reply has {size} bytes, but its node sends at most {self.largest:g} (max-bytes in its node "
                "config): choose a method that sends less, or let its owner raise the limit"
            )

    def check_shared(self, side: AnySide) -> None:
        """Raise `Refused` if the client shares arrays of a kind that the key `allow` of its node config lacks."""
        if self.allowed is not None:
            kinds = {kind_of("model", name, side) for name in side.shared()}
            remedy = "choose another method" if "weights" in kinds - self.allowed else "set batch-norm = local"
            self.check_kinds(side.client.config.method_name, kinds, remedy=remedy)

    def check_examples(self, count: int, batch_size: int) -> None:
        """Raise `Refused` if `count` training examples or a batch of `batch_size` are fewer than `min-examples`."""
        if count < self.least:
            raise Refused(
                f"the client has {count} training examples, but its node requires at least {self.least} examples "
                "behind every number that it sends (min-examples): add training examples, or leave the client out"
            )
        # Weights can depend on the last step alone. A secret seed implies steps on whole groups of examples.
        if batch_size < self.least and not self.keeps_secret:
            raise Refused(
                f"batch-size is {batch_size}, but the client's node requires at least {self.least} examples in every "
                "training step (min-examples): increase batch-size"
            )

    def outgoing(self, payload: Payload, side: AnySide) -> Payload:
        """Return the `payload` of the client side `side` with metrics rounded, or removed if they may not be sent.

        Raises `Refused` if the payload has arrays or other values of a kind (see `KINDS`) that may not be sent.
        """
        if self.allowed is not None or self.noise:
            kinds = {kind_of(group, name, side) for group, arrays in payload.arrays.items() for name in arrays}
            kinds |= {side.traits.sends.get(name, f"an undeclared kind ({name})") for name in payload.values}
            self.check_kinds(side.client.config.method_name, kinds, noisy_sums=side.noisy_sums)
        values = {}
        for name, value in payload.values.items():
            if side.traits.sends.get(name) != METRICS:
                values[name] = value
            elif self.tells_metrics:
                values[name] = self.rounded(value)
        return Payload(payload.arrays, values)

    def check_metrics(self, task: Task) -> None:
        """Raise `Refused` if a metric has numbers of examples by class as weights, which `allow` does not include."""
        names = [name for name in task.metrics if task.counts_classes(name) and task.outputs.places == "one"]
        if names and self.tells_metrics and self.allowed is not None and "statistics" not in self.allowed:
            which = f"the metric {names[0]}, which also sends numbers of examples by class,"
            self.check_kinds(which, {"statistics"}, remedy="choose another metric, such as accuracy or auc")

    def metric(self, metric: Metric, *, by_class: bool = False) -> Metric:
        """Return a metric in the form that may be sent: rounded, without values from too few examples.

        `by_class` says whether its weights are numbers of examples by class.
        """
        weights = metric.weights
        if metric.behind:
            pairs = zip(weights, metric.behind, strict=True)
            weights = tuple(weight if count >= self.least else 0.0 for weight, count in pairs)
            if by_class:
                weights = self._without_rest(weights, metric.behind)
            weights = tuple(map(self.rounded, weights))
        weighed = zip(metric.values, weights, strict=True)
        values = tuple(self.rounded(value) if weight > 0 else math.nan for value, weight in weighed)
        return Metric(values, weights)

    def _without_rest(self, kept: tuple[float, ...], behind: tuple[int, ...]) -> tuple[float, ...]:
        """Return the weights of classes to keep, without the smallest if those left out are of too few examples.

        The number of all examples is sent, so the number of those left out is known. `behind` has those of each class.
        """
        for _ in kept:
            rest = sum(count for weight, count in zip(kept, behind, strict=True) if not weight)
            if not 0 < rest < self.least or not any(kept):
                break
            smallest = min((place for place, weight in enumerate(kept) if weight), key=kept.__getitem__)
            kept = tuple(0.0 if place == smallest else weight for place, weight in enumerate(kept))
        return kept

    def loss_weight(self, task: Task, labels: Tensor) -> float:
        """Return the weight of a loss, in examples; 0 if it is their number, or would tell that few have a class."""
        weight = (task.weight(labels) or 0.0) / labels[0].numel()
        few = weight and self.least > 1 and int(labels.unique(return_counts=True)[1].min()) < self.least
        return 0.0 if few or weight == len(labels) else self.rounded(weight)

    def rounded(self, value: float) -> float:
        """Return a metric or a loss, rounded to `DIGITS` significant digits if `deployed` is set."""
        return float(f"{value:.{DIGITS}g}") if self.deployed else value

    def reason(self, client: str, error: Exception) -> str:
        """Return a failure's reason for the server; if `deployed`, reasons that could disclose data are only logged."""
        if not self.deployed or isinstance(error, Refused | LostState | WireError):
            return (in_words(error) if isinstance(error, OSError) else str(error))[:LONGEST_REASON]
        log.error("client %s failed", client, exc_info=error)
        return FAILED

    @contextmanager
    def hiding(self, client: str) -> Iterator[None]:
        """Context manager in which an exception becomes a `Refused` with its `reason`, if `deployed`."""
        try:
            yield
        except Exception as error:
            if not self.deployed:
                raise
            raise Refused(self.reason(client, error)) from error

    def check_kinds(self, method: str, kinds: Collection[str], *, noisy_sums: bool = False, remedy: str = "") -> None:
        """Raise `Refused` with a `remedy` if a `method` or an app sends `kinds`, except metrics, that are not allowed.

        `noisy_sums` says whether its sums over examples have noise.
        """
        allowed = kinds if self.allowed is None else self.allowed
        if refused := sorted({*kinds} - {METRICS, STRUCTURE, *allowed}):
            out, sent = ", ".join(sorted(allowed)), ", ".join(refused)
            raise Refused(
                f"this node allows only {out} (allow in its node config), but {method} needs {sent}: "
                + (remedy or "choose another method")
            )
        if self.noise and {*kinds} - NOISY - ({"prototypes"} if noisy_sums else set()):
            raise Refused(
                f"this node trains with differential privacy (dp-noise), but {method} also sends means or numbers of "
                "the client's examples that get no noise: "
                + (remedy or "choose another method, such as fedavg, fedrep or fedhenn")
            )


def limiting_keys(node_config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a node config that limit what the node sends, misspelt ones included."""
    return [key for key in node_config if key in POLICY_KEYS or misspelt(key)]


@lru_cache(1000)
def misspelt(key: str) -> str:
    """Return the key of a node config that `key` resembles; "" if it is one, or is for the user's own functions."""
    plain = key.lower().replace("_", "-")
    close = get_close_matches(plain, NODE_KEYS, n=1, cutoff=0.0 if plain.startswith(("allow", "dp-", "min-")) else 0.86)
    return close[0] if close and key not in NODE_KEYS else ""


def number_in(
    node: Mapping[str, Any],
    key: str,
    default: float,
    *,
    at_least: float = 0,
    at_most: float = math.inf,
    whole: bool = False,
) -> float:
    """Return a node config's number `key` (integer if `whole`), or `default`; raise a ConfigError if out of range."""
    value = node.get(key, default)
    kinds = int if whole else (int, float)
    valid = not isinstance(value, bool) and isinstance(value, kinds) and at_least <= value <= at_most
    if key in node and not (valid and (math.isfinite(value) or value == default)):  # infinity can be no limit
        limits = f"at least {at_least:g}" + (f" and at most {at_most:g}" if at_most < math.inf else "")
        raise ConfigError(f"the node's {key} is {value!r}, but must be a {'whole ' * whole}number of {limits}")
    return value


def part_in(node: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return `partition-id` and `num-partitions` of a node config, or None; raise a ConfigError if one is invalid."""
    limits = {"partition-id": (0, MOST_PARTITIONS), "num-partitions": (1, MOST_PARTITIONS), "split-seed": (0, 2**63)}
    read = {
        key: int(number_in(node, key, least, at_least=least, at_most=most, whole=True))
        for key, (least, most) in limits.items()
        if key in node
    }
    place, partitions = read.get("partition-id"), read.get("num-partitions")
    if place is not None and partitions is not None and place >= partitions:
        raise ConfigError(f"the node's partition-id is {place}, but must be below num-partitions = {partitions}")
    return place, partitions


@contextmanager
def memory_limited(context: Context) -> Iterator[None]:
    """Context manager that limits memory to the node's `memory-limit` (GB, on Linux); raises `Refused` beyond it."""
    if "memory-limit" not in context.node_config:
        yield
        return
    import resource  # which not every system has

    limit = number_in(context.node_config, "memory-limit", 0, at_least=1e-6, at_most=1e9)
    most = int(1e9 * limit)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    except Exception as error:  # of whichever library runs out of memory
        if not out_of_memory(error):
            raise
        raise Refused(
            f"the client needs more memory than its node allows (memory-limit = {limit} GB): raise the limit or choose "
            "a smaller model"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# ---- reading a message


def opened(
    message: Message, context: Context, *, in_cluster: bool, settings: Callable[[ClientInfo], dict[str, Any]] | None
) -> tuple[ClientInfo, Request, Policy]:
    """Read a message: return the client's identity and configuration, the server's request, and the node's policy.

    Nothing is loaded or computed for a message that the policy refuses. `in_cluster` says whether this process
    simulates clients on a Ray cluster, and `settings` returns a client's own settings. Raises a WireError if a message
    is not from fedhet's server, a ConfigError if the node config is invalid or the client's state folder is missing,
    and `Refused` if the policy refuses the method, or the settings that split the node's data changed in this run.
    """
    request, text = read_request(message.content)
    if request.question and message.metadata.message_type != MessageType.QUERY:  # a handshake fixes no settings
        raise WireError("only a query can have a question: install the server's version of fedhet on this node")
    proven = hmac.compare_digest(request.here.encode(), proof(f"{message.metadata.run_id} {text}").encode())
    here = proven or in_cluster  # the server has started this process
    policy = Policy.of(context.node_config, deployed=not here or "allow" in context.node_config)
    if not here and not request.run:  # a server elsewhere that relies on a folder of its own choice
        request = replace(request, run=hashlib.sha256(text.encode()).hexdigest()[:12])
    node, name = with_data(context.node_config), name_of(context)
    if not plain_name(name):
        raise ConfigError(f"this node's name {name!r} is not a valid file name: set another name in the node config")
    place, partitions = part_in(node)
    if partitions is None and (place is None or not here):  # the node shares its examples with no other
        partitions, node["partition"] = 1, node.get("partition", "iid")
    info = ClientInfo(name, place, partitions, settings_at_node(text, node, here=here), node)
    if settings is not None:
        with policy.hiding(name):  # a user's function can read the client's examples
            node |= settings(info)
        info = replace(info, config=settings_at_node(text, node, here=here))
    config = info.config
    if message.metadata.message_type == MessageType.TRAIN:  # by the settings, which are fixed and can be the node's own
        request = replace(request, epochs=config.closing_epochs if request.closing else config.local_epochs)
    if in_cluster and not (folder := state_folder(config.state_dir, request.run)).is_dir():
        raise ConfigError(
            f"the folder {folder} for the clients' state does not exist on this machine: a simulation on several "
            "machines needs a run directory (--out) that all of them share"
        )
    policy.admit(node, state_folder(config.state_dir, ""))
    side = registry.client_side(config.method_name)
    policy.check_kinds(config.method_name, registry.traits(config).kinds, noisy_sums=side.noisy_sums)
    if policy.deployed or policy.noise:
        with private_files(policy.deployed), policy.hiding(name):
            _fix(info, request, policy)
    return info, request, policy


def settings_at_node(text: str, node: Mapping[str, Any], *, here: bool) -> Config:
    """Return a run's configuration (`text`) with a node's own settings; see `configuration.at_node`."""
    chosen = tuple((key, node[key]) for key in keys_that("at_node") if key in node)
    config, server = configuration.at_node(text, chosen, here=here), configuration.parse(text)
    if config.local_epochs > (most := max(server.local_epochs, server.max_local_epochs)):
        raise ConfigError(
            f"this node's local-epochs = {config.local_epochs} is above the server's bound of {most}: reduce it, or "
            "ask for a run with a larger max-local-epochs"
        )
    return config


def with_data(node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node config with `data` and `data-path`, two names of one key; raise a ConfigError if they differ."""
    places = [node_config[name] for name in ("data", "data-path") if name in node_config]
    if len({*places}) > 1:
        raise ConfigError("the node config has different folders for data and data-path: set only one of them")
    return {**node_config, **{name: path for path in places for name in ("data", "data-path")}}


def _fix(info: ClientInfo, request: Request, policy: Policy) -> None:
    """Raise `Refused` if settings or public dataset are not those of the first message of the run.

    Without `allow`, and in handshakes, after which the server completes its settings, only the split is fixed.
    """
    fixed = {*keys_about("data"), "seed"}
    if policy.allowed is not None and request.question != HANDSHAKE:
        fixed = {*info.config.flat()} - {*keys_about("output", "place", "node")}
    now = {key: value for key, value in info.config.flat().items() if key in fixed - {*keys_that("resumable")}}
    now |= {"public dataset": request.public} if "method" in fixed and request.public else {}
    # A network that was trained without noise, or on single examples, must not be sent later in the run.
    now |= {"dp-noise": policy.noise > 0, "allow": policy.allowed is not None}
    kept = ClientStore(info.config.state_dir, request.run, request.called or info.name).first("settings", now)
    if changed := [key for key, value in now.items() if kept[key] != value]:
        key = changed[0]
        values = "" if key in keys_that("path") else f" from {kept[key]!r} to {now[key]!r}"  # of the node's own paths
        raise Refused(
            f"the first message of a run fixes its settings at this node, but {key} has changed{values}: "
            "start another run"
        )
