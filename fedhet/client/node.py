"""The check of a node before any run (`fedhet node check`)."""

import importlib.util
import os
import shutil
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from fedhet.client.policy import NODE_KEYS, Policy, number_in, part_in, settings_at_node, with_data
from fedhet.client.secret import LARGEST_EPSILON, NodeSecret, check_partition, epsilon_of
from fedhet.client.state import CACHE
from fedhet.data.files import nothing_downloaded
from fedhet.errors import ConfigError, FedhetError, in_words, nearest
from fedhet.methods import registry
from fedhet.methods.options import Config
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo
from fedhet.training.privacy import cost_of_sums
from fedhet.training.training import ends
from fedhet.utils.files import check_place, expanded, plain_name, private_files, state_folder
from fedhet.utils.machine import describe, device_of
from fedhet.utils.text import __version__

AHEAD, BEHIND = 4, 300  # seconds; Flower ends a node whose clock is 5 s ahead of the SuperLink's, or 305 s behind
DISK, DAYS = 2, 30  # free GB, and days of a certificate, below which a fault is reported
Checks = Iterator[tuple[bool, str]]


def check_node(node: Mapping[str, Any], config: Config, superlink: str | None, certificate: Path | None) -> Checks:
    """Yield pairs (passed, sentence) for a node config and a run's configuration.

    `superlink` is the SuperLink's address HOST:PORT, and `certificate` the file of its CA.
    """
    checks: list[Callable[[], Checks]] = [partial(_superlink, superlink, certificate)]
    try:
        policy = Policy.of(node, deployed=True)
        if part_in(node)[1] is None:  # as in a run, it shares its examples with no other
            node = {"partition": "iid", **node}
        config = settings_at_node(config.text, with_data(node), here=False)
        check_owner(state_folder(config.state_dir, "").resolve())
        checks = [partial(_machine, node, config, policy), partial(_examples, node, config, policy), *checks]
        yield True, f"fedhet {__version__}, as all others need; policy: the node {policy}"
    except FedhetError as error:
        yield False, str(error)
    for check in checks:
        try:
            yield from check()
        except (FedhetError, OSError) as error:
            yield False, in_words(error) if isinstance(error, OSError) else str(error)


def check_owner(state: Path) -> None:
    """Check that the node's state, if it exists, belongs to this process's user; raise a ConfigError otherwise."""
    # A command of another user, such as root, would leave files that the node cannot read, and would not notice images
    # that the node cannot read.
    if os.name != "posix" or not state.is_dir() or state.stat().st_uid == os.geteuid():
        return
    owner = str(state.stat().st_uid)
    with suppress(KeyError):  # in a container, the user can have no name
        owner = state.owner()
    raise ConfigError(f"state-dir {state} belongs to the user {owner}: run this command, and the node, as that user")


def _machine(node: Mapping[str, Any], config: Config, policy: Policy) -> Checks:
    name = str(node.get("name", "node"))
    yield plain_name(name), f"name: {name!r}, which must be a valid file name"
    for key in sorted(node.keys() - NODE_KEYS):
        yield (
            False,
            f"{nearest('key in the node config', key, NODE_KEYS)}; rename it, unless your own functions read it",
        )
    if policy.allowed == frozenset():
        yield False, "allow is empty, with which the node serves no message: list the kinds of values that may be sent"
    for key in ("data", "data-path", "state-dir"):
        if node.get(key) and not Path(place := expanded(str(node[key]))).is_absolute():
            yield False, f"{key}: {place} depends on the folder in which the node starts: give its path from / on"
        elif node.get(key) and key != "state-dir" and not os.access(place, os.R_OK):
            yield (
                False,
                f"{key}: {place} does not exist, or this user cannot read it: correct the path or its permissions",
            )
    number_in(node, "memory-limit", 1, at_least=1, at_most=1e9)  # fedhet alone takes nearly 1 GB
    info = ClientInfo("", 0, 1, config, dict(node))
    if "architecture" in node:
        client_setup.architecture_of(info)
    side = registry.client_side(config.method_name)
    if side.parts:
        client_setup.width_of(info)
    if policy.allowed != frozenset():
        policy.check_kinds(config.method_name, registry.traits(config).kinds, noisy_sums=side.noisy_sums)
    if policy.noise and importlib.util.find_spec("dp_accounting") is None:
        yield False, "dp-noise needs the missing package dp-accounting: pip install 'fedhet[dp]'"
    yield True, f"device: {describe(device_of(config.device))}"
    state = state_folder(config.state_dir, "").resolve()
    check_place(state)
    free = shutil.disk_usage(next(path for path in (state, *state.parents) if path.is_dir())).free / 1e9
    yield free >= DISK, f"disk: {free:.1f} GB are free for state-dir {state}; at least {DISK} are needed"


def _examples(node: Mapping[str, Any], config: Config, policy: Policy) -> Checks:
    place, parts = part_in(node)
    info = ClientInfo("", place, parts or 1, config, dict(node))
    check_partition(info, policy)
    with private_files(), nothing_downloaded(state_folder(config.state_dir, CACHE)):
        data = client_setup.data_of(info)
    assert data.dataset is not None
    name = str(node.get("name", node.get("partition-id", "node")))
    secret = None
    if NodeSecret.path(state := state_folder(config.state_dir, ""), name).is_file():
        secret = NodeSecret(state, name, config.dataset.partition("-")[0])
        secret.keep({"files": data.dataset.files} if data.dataset.files else {}, store=False)
    labels, numbers = data.train.labels.unique(return_counts=True, dim=0)
    counts = dict(zip(labels.tolist(), numbers.tolist(), strict=True)) if labels.ndim == 1 else {}
    grouped = policy.keeps_secret and not policy.noise
    few = {label: count for label, count in counts.items() if grouped and count < policy.least}
    used = len(data.train) - sum(few.values())
    whole = len(data.dataset.train)
    named = data.dataset.class_names or [str(label) for label in range(data.dataset.classes)]
    by_class = ", ".join(f"{named[label]}: {count}" for label, count in counts.items())
    yield used >= policy.least, f"data: {config.dataset}; the node trains on {used} of {whole} examples ({by_class})"
    if used >= policy.least:
        policy.check_examples(used, config.batch_size)
    if policy.noise:
        rate = min(config.batch_size / len(data.train), 1.0)
        delta = policy.delta_of(max(len(data.train), whole // (parts or 1)))  # as in a run
        epochs = config.options.first_epochs or config.local_epochs
        steps = epochs * len(ends(len(data.train), config.batch_size, policy.least))
        charges = [(policy.noise, rate, steps)]
        if "prototypes" in registry.traits(config).kinds:
            charges.append(cost_of_sums(policy.noise, len(data.train), config.batch_size))
        epsilon = secret.epsilon(delta, *charges) if secret else epsilon_of(charges, delta)
        limit = min(policy.budget, LARGEST_EPSILON)
        key = "with" if policy.budget < LARGEST_EPSILON else "without"
        spent = f"epsilon = {epsilon:.4g} at delta = {delta:.4g}; {key} dp-epsilon, {limit:g} is allowed"
        before = ", with earlier runs," if secret else ""
        training = f"(epochs = {epochs}, batch-size = {config.batch_size})"
        yield epsilon <= limit, f"privacy: a first round {training}{before} spends {spent}"
    for label, count in few.items():
        examples = f"class {named[label]} has {count} training examples, fewer than min-examples = {policy.least}"
        yield False, f"{examples}, and is not trained on: add examples, or reduce min-examples"


def _superlink(address: str | None, certificate: Path | None) -> Checks:
    if address is None:
        yield True, "clock and certificate: not checked; add --superlink HOST:PORT --root-certificates ca.crt"
        return
    if certificate is not None and not certificate.is_file():
        yield False, f"certificate: {certificate} does not exist: correct the path of ca.crt"
        return
    try:
        connection = HTTPSConnection(address, timeout=10, context=ssl.create_default_context(cafile=certificate))
        connection.connect()
        presented: Any = connection.sock.getpeercert()
        before = time.time()
        connection.request("GET", "/health")
        date = connection.getresponse().headers["Date"]
        between = (before + time.time()) / 2
    except ssl.SSLCertVerificationError as error:
        yield False, f"certificate of {address}: {error.verify_message}: renew it, or correct the path of ca.crt"
        return
    except (OSError, ValueError, HTTPException) as error:
        yield False, f"https://{address} is not reachable ({error}): correct the address, the firewall or ca.crt"
        return
    days = (ssl.cert_time_to_seconds(presented["notAfter"]) - time.time()) / 86400
    yield days >= DAYS, f"certificate: valid from {presented['notBefore']} to {presented['notAfter']}, {days:.0f} days"
    if date is not None:  # in whole seconds
        ahead = between - (parsedate_to_datetime(date).timestamp() + 0.5)
        yield (
            -BEHIND < ahead < AHEAD,
            f"clock: {ahead:+.0f} s from the SuperLink's; Flower ends nodes beyond -305 and +5 s",
        )
