"""The files of a client: its state after each round, public datasets, and models, from which another run can start.

The server names the round whose state it expects. If a client's reply is lost, the client returns to the state before
that round. If a client stops within a round, it repeats the round from the same state.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

import numpy as np
from torch import Tensor, nn

from fedhet.algorithms.graphs import resize
from fedhet.algorithms.graphs.blocks import EXITS
from fedhet.config import configuration
from fedhet.config.toml import from_json, load
from fedhet.data import PublicDataset
from fedhet.data.examples import digest
from fedhet.data.names import CLASSES, Names, alike, permuted, shown
from fedhet.errors import ConfigError, FedhetError, ModelError, check_kinds
from fedhet.messages import LostState, WireError, difference, spec_of
from fedhet.methods import registry
from fedhet.methods.options import Config
from fedhet.models.copies import copied, described, kinds_of, load_state
from fedhet.models.estimators import Estimator
from fedhet.models.representation import precision
from fedhet.results.history import names_of_model, read_clients, run_of
from fedhet.setup import client_setup, user_functions
from fedhet.setup.client_setup import ClientInfo
from fedhet.utils.files import expanded, file_name, locked, read_tensors, state_folder, write_tensors, write_text
from fedhet.utils.inputs import from_parts, parts_of
from fedhet.utils.randomness import seeded
from fedhet.utils.text import log

LEAST_FREE, LEAST_FILES = 1e9, 10_000  # bytes, and files, for which runs leave room on a node's disk

KEPT_DAYS = 90  # number of days after which a new run removes unused runs and public datasets from a node's folder

BEGINNING = "beginning"  # folder with hashes of each client's task, network and examples at the start of a run

EVALUATE = "run fedhet evaluate on the earlier run"  # where `start-from` is not enough

CACHE = "cache"  # folder with a node's decoded images

GLOBAL = "global"  # file name of the global model, without extension, among the models of a run

BESIDE = "method/"  # prefix of tensors in a personal model's file that are not the network's
PREDICTOR = f"{BESIDE}tensors/"  # prefix of those that predictions need, such as prototypes
EXAMPLE, WIDTH, ROUND = (f"{BESIDE}{name}" for name in ("example", "width", "round"))  # inputs' shape, submodel, round


class ClientStore:
    """The files of one client in one run, written atomically.

    `client` is the client's name, and `run` the run's subfolder of `state_dir`; empty if no other run uses `state_dir`.
    """

    def __init__(self, state_dir: str | Path, run: str, client: str) -> None:
        self._base, self._run, self._client = state_folder(state_dir, ""), run, client
        self._states = self._base / run / "clients" / file_name(client)

    def make_room(self) -> None:
        """Remove runs and public datasets that were not used for `KEPT_DAYS`, if runs share the state folder."""
        if self._run:
            for path in remove_old(self._base, KEPT_DAYS):
                log.info("removed %s: this run or public dataset was not used for %d days", path, KEPT_DAYS)

    def save(self, round: int, tensors: dict[str, Tensor], *, after: int, closing: bool = False) -> None:
        """Save `tensors` as the client's state after `round`; remove other states except the one after round `after`.

        If the client's reply is lost, the server asks for the state after round `after` again. A `closing` round, after
        the last one, removes no states: a run that is resumed with more rounds continues from the state before it.
        """
        if round == after:  # a repeated message would train from another state, with the same noise
            raise WireError(f"the server asks for round {round} after round {after}: use one version of fedhet")
        self._write(self._states / f"{round}.safetensors", tensors, packed=True)
        for path in self._states.glob("*.safetensors"):
            if not closing and path.stem not in (str(round), str(after)):
                path.unlink(missing_ok=True)

    def load(self, round: int) -> dict[str, Tensor] | None:
        """Return the state after `round`, or None if it is missing or damaged."""
        try:
            return read_tensors(self._states / f"{round}.safetensors")
        except FedhetError as error:
            log.warning("%s", error)
            return None

    def first(self, kind: str, now: Mapping[str, Any], *, anew: bool = False) -> dict[str, Any]:
        """Return the values of this `kind` that the run began with, by key; keys without a value get that in `now`.

        `anew` replaces all values. Raises a ConfigError if the file is damaged.
        """
        path = self._base / self._run / BEGINNING / kind / f"{file_name(self._client)}.json"
        kept = _beginning(path) if path.is_file() and not anew else {}
        if now.keys() <= kept.keys():
            return kept
        self._check_disk(len(json.dumps({**now, **kept})))
        with locked(path.parent, wait=True):  # another process can answer a message of the same run
            kept = {**now, **(_beginning(path) if path.is_file() and not anew else {})}
            write_text(path, json.dumps(kept))
        return kept

    def write_model(self, tensors: dict[str, Tensor], folder: str, names: str) -> None:
        """Save the client's personal model in a subfolder of the run's models, with the order of its `names`.

        `folder` is `round-N`, `best`, or empty at the end of the run.
        """
        path = self._base / self._run / "models" / folder / f"{file_name(self._client)}.safetensors"
        self._write(path, tensors, names=names)
        if self._run:  # else the server collects it
            log.info("client %s: its personal model is %s", self._client, path)

    def keep(self, public: PublicDataset) -> None:
        """Save a public dataset that the server sent."""
        try:
            self.public_dataset(public.digest)
        except LostState:
            labels = {} if public.labels is None else {"labels": public.labels}
            self._write(self._public(public.digest), {**parts_of(public.inputs, "public"), **labels})

    def _write(self, path: Path, tensors: Mapping[str, Tensor], **options: Any) -> None:
        """Write a file (see `write_tensors`); raise a FedhetError if it would fill the disk of a node."""
        self._check_disk(sum(tensor.nbytes for tensor in tensors.values()))
        write_tensors(path, tensors, **options)

    def _check_disk(self, size: int) -> None:
        if not self._run:
            return
        self._base.mkdir(parents=True, exist_ok=True)
        files = math.inf
        if hasattr(os, "statvfs") and (disk := os.statvfs(self._base)).f_files:  # 0 without a limit
            files = disk.f_favail
        if shutil.disk_usage(self._base).free - size < LEAST_FREE or files < LEAST_FILES:
            raise FedhetError(
                f"the node's disk would have less than {LEAST_FREE / 1e9:g} GB, or room for {LEAST_FILES:,} files, "
                "left: make room for its state-dir, for example with fedhet clean"
            )

    def public_dataset(self, digest: str) -> PublicDataset:
        """Return the stored public dataset with this digest; raises `LostState` if it is missing."""
        path = self._public(digest)
        try:
            return _read_public(path, path.stat().st_mtime_ns)
        except (FileNotFoundError, FedhetError, KeyError, ValueError) as error:
            if path.is_file():
                log.warning("the public dataset's file is removed, and the server sends it again: %s", error)
                path.unlink(missing_ok=True)
            raise LostState(f"client {self._client} has no public dataset {digest}: the server resends it") from error

    def _public(self, digest: str) -> Path:
        return self._base / "public" / f"{digest}.safetensors"


@lru_cache(maxsize=4)
def _read_public(path: Path, modified: int) -> PublicDataset:
    tensors = read_tensors(path) or {}
    return PublicDataset(from_parts(tensors, "public"), tensors.get("labels"))


def remove_old(base: Path, days: float, others: Iterable[Path] = ()) -> list[Path]:
    """Remove runs and public datasets unused for `days` days from a node's folder `base`; return the removed paths.

    The files and folders `others` are removed, too.
    """
    oldest = time.time() - 86400 * days
    removed = []
    runs = {path.parent for name in (BEGINNING, "clients") for path in base.glob(f"*/{name}")}
    parts, root = {BEGINNING, "clients", "models"}, base.resolve()  # folders with other files are not removed
    ours = [run for run in runs if not run.is_symlink() and {path.name for path in run.iterdir()} <= parts]
    for path in sorted([*base.glob("public/*.safetensors"), *ours]):
        if not path.resolve().is_relative_to(root):  # behind a link to another place
            continue
        files = [file for file in (path, *path.rglob("*")) if file.is_file()]
        # A run without files has just begun in another process, which may also replace files meanwhile.
        with suppress(FileNotFoundError):
            if max(file.stat().st_mtime for file in files or [path]) < oldest:
                removed.append(path)
    removed += [path for path in others if path.exists() and not path.is_symlink()]
    for path in removed:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return removed


def _beginning(path: Path) -> dict[str, Any]:
    return from_json(path.read_text(encoding="utf-8"), str(path))


# ---- models of a run


def load_model(run: Any, client: str | int, *, model: Any = None, data: Any = None) -> nn.Module:
    """Return a module that predicts as a client of a finished run was scored, in evaluation mode.

        network = fedhet.load_model("runs/try", 3, model=my_model)

    It is the client's trained network or, if the method predicts in another way, a module that contains this network:
    for example, FedProto's returns minus the squared distances to the prototypes. If columns or classes have names, a
    line of the log has the order of its inputs and outputs.

    Args:
        run: the run directory, the result of `fedhet.run`, or a run's folder `models/round-N` (`save-every`).
        client: the client's name or number; a client without a personal model has the global model.
        model: the clients' models as they were passed to the run; by default the configured architectures.
        data: the clients' data as they were passed to the run; only needed for a part of a saved global model.

    Raises:
        ConfigError: the folder has no such model, `model` or `data` is needed, or the method trains no network.
        ModelError: the network that `model` returns does not fit the saved arrays.
    """
    run = getattr(run, "folder", run)
    check_kinds(run=(run, (str, Path)), client=(client, (str, int)))
    models = expanded(run or "")
    name = str(client)
    folder = run_of(models)
    if folder is None:
        raise ConfigError(f"{models} has no config.toml: give the directory of a run, or the result of fedhet.run")
    noted = load(folder / "config.toml").get("own", {})
    if "model" in noted and model is None:
        raise ConfigError(f"the run in {folder} used your own model ({noted['model']}): call load_model with model=...")
    config = configuration.of_run(folder, ("model", "data", "client_settings"))
    info = ClientInfo(name, _partition(folder, name, config.method_name), config.clients, config)
    function = user_functions.model_function(model)
    side = registry.client_side(config.method_name)
    traits = registry.traits(config)
    if not side.trains_network:
        raise ConfigError(
            f"the run in {folder} has no networks: {config.method_name} predicts by {traits.predicts}; load a "
            "model of another method's run, or fit such a classifier with scikit-learn"
        )
    simulated = name.isdecimal() and int(name) < config.clients
    took_part = simulated or name in {row.client for row in read_clients(folder)}
    try:
        tensors, path, beside = _saved(models, name, name)
        if path.stem == GLOBAL and not (took_part and traits.whole):
            reason = f"no model of client {name}" if took_part else f"no client {name}"
            raise ConfigError(f"the run in {folder} has {reason}: give a name from its clients.csv")
    except ConfigError:
        if took_part and function and isinstance(network := client_setup.network_of(info, function), Estimator):
            raise ConfigError(
                f"client {name} has an estimator, {network.title}, of which runs save no file: fit it again to the "
                "client's examples"
            ) from None
        raise
    classes = names_of_model(path).get(CLASSES, ())
    of_images = (
        partial(client_setup.model_of_images, classes=len(classes)) if config.dataset == "folder" and classes else None
    )
    with seeded(config.seed, "loading", name):
        network = client_setup.network_of(info, function or of_images)
        if function and (difference := other_model(folder, name, described(network))):
            log.warning("%s", difference)
        if _misfit(network, tensors) or (side.parts and path.stem == GLOBAL) or float(beside.get(WIDTH, 1)) < 1:
            configured = _data_needed if "data" in noted else client_setup.data_of
            data_of = user_functions.data_function(data) or configured
            network, formed = _formed(network, info, tensors, beside, data_of)
            tensors = dict(formed)
        _load(network, tensors, path, name)
        predictor = network.eval()
        if more := {key.removeprefix(PREDICTOR): tensor for key, tensor in beside.items() if key.startswith(PREDICTOR)}:
            saved = side.of_saved(name, config, network, int(beside[ROUND]), from_parts(beside, EXAMPLE))
            predictor = saved.loaded(more).eval()
            _load(predictor, predictor.state_dict() | more, path, name)
    if orders := [f"its {kind} have the order {shown(names)}" for kind, names in names_of_model(path).items()]:
        log.info("client %s: %s: %s", name, path, "; ".join(orders))
    return user_functions.as_given(predictor) if function else predictor


def _data_needed(info: ClientInfo) -> NoReturn:
    raise ConfigError(f"client {info.name} has a part of the global model, for its data: call load_model with data=...")


def check_order(info: ClientInfo, names: Names) -> str:
    """Raise a ConfigError if the client's network in `start-from` has another order of `names` than its data now.

    Return a note, or an empty string, if it has other names, such as without a new class. A run without rounds, which
    only evaluates the network, raises a ConfigError for these, too.
    """
    notes = []
    files = [f"{inner}{file_name(name)}.safetensors" for inner in ("", "models/") for name in (info.name, GLOBAL)]
    for file in files:
        for kind, theirs in names_of_model(expanded(info.config.start_from) / file).items():
            ours = names.get(kind, theirs)
            if ours == theirs:
                continue
            differ = f"are {shown(theirs, ours)}, but this run's are {shown(ours, theirs)}"
            note = f"start-from: the {kind} of the network in {file} {differ}"
            if permuted(ours, theirs) or not (info.config.rounds or alike(kind, ours, theirs)):
                raise ConfigError(f"{note}: repeat that run with these {kind} in this order, or leave start-from out")
            notes.append(note)
    return "; ".join(notes)


def other_model(folder: Path, client: str, model: str) -> str:
    """Return a warning if a client's own model, `described`, is not that of the run to which `folder` belongs."""
    path = (run_of(folder) or folder) / "state" / BEGINNING / "digests" / f"{file_name(client)}.json"
    if not path.is_file() or _beginning(path).get("model", "") in ("", digest(model)):
        return ""
    return (
        f"client {client}'s model has other modules, options or functions, such as activations, than in the run in "
        f"{folder}: pass the model of that run"
    )


def only_evaluates(config: Config) -> bool:
    """Return whether a run evaluates the networks of `start-from`, and trains none."""
    return bool(config.start_from) and not (config.rounds or registry.method(config.method_name).settles_rounds)


def only_describes(config: Config) -> bool:
    """Return whether a run describes data, which may have missing values, and reads no network."""
    return config.method_name == "local" and not (config.rounds or config.start_from)


def start(model: nn.Module, info: ClientInfo, owner: str) -> nn.Module:
    """Load the weights of an earlier run (`start-from`) into a new network; return it, adapted to the method.

    `model` is the new network and `info` the client. If `owner` is `all`, the weights are the global model's, otherwise
    the client's. Raises a ConfigError if the folder has no such model, and a ModelError if the network does not fit.
    """
    config = info.config
    folder = expanded(config.start_from)
    if owner == "all" and "start-from" in info.node_config and only_evaluates(config) and not _has_global(folder):
        side = registry.client_side(config.method_name)
        if registry.traits(config).whole and config.batch_norm != "local" and not side.parts:
            return side.adapt(model, config)  # The server sends the global model of its own start-from.
    tensors, path, beside = _saved(folder, info.name, owner)
    if float(beside.get(WIDTH, 1)) < 1:
        tensors, path, _ = _saved(folder, info.name, "all")
        # The whole network has new statistics in place of those of the client's part.
        new = {name: model.state_dict()[name] for name, kind in kinds_of(model).items() if kind == "statistic"}
        units = registry.traits(info.config).shares.units
        other = units is None or units(1, 2, 0) != units(1, 2, 1)
        if only_evaluates(info.config) and (other or new.keys() - tensors.keys()):
            raise ConfigError(f"rounds = 0 evaluates whole networks, but the client has a part: {EVALUATE}")
        tensors = new | tensors
    # Early exits are the method's, not the network's; a method that has them adds new ones.
    names = model.state_dict().keys()
    exits = {name for name in tensors.keys() - names if name.startswith(f"{EXITS}.")}
    if only_evaluates(info.config) and (exits or any(name.startswith(PREDICTOR) for name in beside)):
        raise ConfigError(f"rounds = 0 evaluates networks, but {path} predicts by more: {EVALUATE}")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in exits}
    if plain := not _misfit(model, tensors):
        _load(model, tensors, path, info.name)
    model = registry.client_side(info.config.method_name).adapt(model, info.config)
    if not plain:
        _load(model, tensors, path, info.name)
    return model


def _has_global(folder: Path) -> bool:
    return any((place / f"{GLOBAL}.safetensors").is_file() for place in (folder, folder / "models"))


def _saved(folder: Path, client: str, owner: str) -> tuple[dict[str, Tensor], Path, dict[str, Tensor]]:
    """Return tensors and file of the model of `client`; if it is missing or `owner` is `all`, of the global model.

    The second dict has tensors of the file that are not the network's (see `BESIDE`).
    """
    folder = folder / "models" if (folder / "models").is_dir() else folder
    personal, common = (folder / f"{file_name(name)}.safetensors" for name in (client, GLOBAL))
    if owner == "all" and not common.is_file():
        raise ConfigError(
            f"{folder} has no {common.name}, but the method starts all clients from one network: give a run with a "
            "global model, such as of fedavg, or set shared-init = false (unless clients train parts of one network)"
        )
    path = common if owner == "all" or not os.path.isfile(personal) else personal  # a name may be too long for a file
    if not path.is_file():
        there = ", ".join(sorted(unquote(each.stem) for each in folder.glob("*.safetensors"))) or "none"
        raise ConfigError(f"{folder} has no model of client {client} (there: {there}): give another run's directory")
    mine = (read_tensors(personal) if path == common else {}) or {}  # running statistics that clients keep
    part = {WIDTH: mine[WIDTH]} if float(mine.get(WIDTH, 1)) < 1 else {}
    tensors = {**({} if part else mine), **(read_tensors(path) or {})}
    beside = {name: tensors.pop(name) for name in list(tensors) if name.startswith(BESIDE)}
    return tensors, path, beside if path == personal else part


def _partition(folder: Path, client: str, method: str) -> int | None:
    """Return the partition of a client in the run in `folder`: as in its checkpoint, or else the client's number."""
    for path in folder.glob("checkpoint/*.safetensors"):
        record = registry.strategy(method).state_class.load(path).clients.get(client)
        if record and record.partition:
            return record.partition[0]
    return int(client) if client.isdecimal() else None


def _misfit(network: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    expected = spec_of(network.state_dict())
    there = spec_of(tensors)
    return "" if expected == there else difference(expected, there)


def _load(network: nn.Module, tensors: Mapping[str, Tensor], path: Path, client: str) -> None:
    if misfit := _misfit(network, tensors):
        raise ModelError(
            f"client {client}'s {network._get_name()} does not fit {path}: {misfit}; use the model of that run, or "
            "read the file with safetensors.torch.load_file"
        )
    load_state(network, tensors)


def _formed(
    network: nn.Module,
    info: ClientInfo,
    tensors: Mapping[str, Tensor],
    beside: Mapping[str, Tensor],
    data_of: user_functions.DataFunction,
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    side = registry.client_side(info.config.method_name)
    network = side.adapt(network, info.config)
    if side.parts:
        if WIDTH in beside:
            width = float(beside[WIDTH])
            inputs = from_parts(beside, EXAMPLE)
        else:
            width = client_setup.width_of(info)
            data = data_of(info)
            inputs = client_setup.transform_of(data.dataset, precision(network))(data.train.inputs[:2])
        part = side.parts(width, side.parts.groups_of(network, inputs))
        whole = replace(part, width=1.0).cut(copied(network))
        network = part.cut(network)
        if _misfit(network, tensors) and not _misfit(whole, tensors):  # the global model, of which it has a part
            load_state(whole, tensors)
            rounds = info.config.rounds + bool(info.config.closing_epochs)
            units = part.units
            if choose := registry.traits(info.config).shares.units:  # those that the client has after the last round
                few = {group: len(kept) for group, kept in units.items()}
                units = {g.index: np.array(choose(few[g.index], g.width, rounds)) for g in part.groups}
            tensors = part.state(whole, units)
    elif registry.traits(info.config).networks == "widths" and tensors.keys() == network.state_dict().keys():
        network = resize(network, dict(tensors))
    return network, tensors
