"""The state of a strategy, which is saved after every round and from which a run can be resumed.

A method may add fields: plain JSON values, `Arrays` (a dictionary of arrays by name), or `ArraysBy` (a dictionary of
such dictionaries, for example by client).
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

from fedhet.errors import FedhetError, damage
from fedhet.messages import Arrays
from fedhet.utils.files import plain_name, read_arrays, write_arrays

ArraysBy = dict[str, Arrays]
"""Dictionaries of arrays (`Arrays`) by name, such as one for each client by client name."""


@dataclass
class ClientRecord:
    """The values that the server keeps for a client; `architecture` is empty if it is not disclosed.

    `examples` is the number of training examples. `trained` is the last round of successful training, or -1.
    `partition` has partition id and number of partitions. `node` is the Flower node id, or 0 for a simulated client.
    `scales` are those of its inputs, if it tells them (see `fedhet.messages.protocol.scales_in`). `lost` is whether
    stored data were lost since it trained, `failed` whether it was asked to train, and each training failed.
    """

    examples: int
    architecture: str = ""
    trained: int = -1
    partition: tuple[int, int] | None = None
    node: int = 0
    scales: str = ""
    lost: bool = False
    failed: bool = False


@dataclass
class State:
    """All values of a strategy that are kept between rounds.

    Attributes:
        serves: whether `model` is a global model that the server trains, while clients share no network.
        round: the last complete round; 0 before the first round.
        clients: the admitted clients by name.
        run: random identifier of the run, under which clients store their state; "" if it is in the run directory.
        public: digest of the public dataset, empty without one; `public_size` is its number of examples.
        common: values that must be equal for all clients, such as the task, by name.
        names: order of the clients' classes and columns (see `fedhet.messages.protocol.names_in`).
        model: shared arrays by name; if whole networks are shared, the global model.
        best: by client, the round of the evaluation with the best validation metric, and this metric's value; under "",
            those of the weighted mean.
        best_scores: by client, values and weights of the metric behind the best weighted mean.
        best_model: the global model of the best round.
        without_better: number of evaluations since the best weighted mean.
        stopped: the last round of training, if an observer or `patience` ended training early; else 0.
    """

    serves: ClassVar[bool] = False

    round: int = 0
    clients: dict[str, ClientRecord] = field(default_factory=dict)
    run: str = ""
    public: str = ""
    public_size: int = 0
    common: dict[str, int | str] = field(default_factory=dict)
    names: str = ""
    model: Arrays = field(default_factory=dict)
    best: dict[str, list[Any]] = field(default_factory=dict)
    best_scores: dict[str, list[Any]] = field(default_factory=dict)
    best_model: Arrays = field(default_factory=dict)
    without_better: int = 0
    stopped: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        # A checkpoint has fields only: another attribute would be lost when the run is resumed.
        if name not in type(self).__dataclass_fields__ and not hasattr(getattr(type(self), name, None), "__set__"):
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}, which is lost when a run is resumed: declare it with "
                "its type in your subclass of State, under @dataclass"
            )
        super().__setattr__(name, value)

    def aside(self) -> Self:
        """Return a copy with new dictionaries and lists; it shares arrays and `clients` with this state."""
        values = vars(self) | {"clients": ()}  # which may be many
        copies: dict[str, Any] = {n: value.copy() for n, value in values.items() if isinstance(value, dict | list)}
        return replace(self, **copies)

    def save(self, path: Path, **further: str) -> None:
        """Write the state atomically to a safetensors file, with plain values and texts (`further`) as metadata."""
        arrays: Arrays = {}
        values: dict[str, Any] = {}
        for name, kind in _kinds(type(self)).items():
            value = getattr(self, name)
            if kind is None:
                if not _plain(value):
                    raise FedhetError(
                        f"{type(self).__name__}.{name} cannot be saved and read again unchanged: give it plain JSON "
                        "values (text keys, no NumPy numbers or tensors), or the type Arrays or ArraysBy"
                    )
                values[name] = value
                continue
            for member, group in (value if kind == ArraysBy else {"": value}).items():
                arrays |= {f"{name}/{member}/{key}": array for key, array in group.items()}
        clients = {name: vars(client) for name, client in self.clients.items()}
        text = json.dumps({"round": self.round, "values": values, "clients": clients, "arrays": list(arrays)})
        write_arrays(path, arrays, metadata={"state": text, **further})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a state that `save` wrote; raises a FedhetError if the file is missing, damaged or of another method."""
        try:
            arrays, text = read_arrays(path)
            saved = json.loads(text["state"])
            kinds = _kinds(cls)
            values = saved["values"]
            state = cls(**{name: values[name] for name, kind in kinds.items() if kind is None and name in values})
            for place in saved["arrays"]:  # in their order, which the file does not keep
                name, member, key = place.split("/", 2)
                if kinds.get(name) is None:
                    raise FedhetError(
                        f"its arrays {name!r} are of another method: if you changed method in config.toml, undo that"
                    )
                groups = getattr(state, name)
                group = groups.setdefault(member, {}) if kinds[name] == ArraysBy else groups
                group[key] = arrays[place]
            state.round = saved["round"]
            for name in filter(None, (state.run, *saved["clients"])):  # folders and files are named after them
                if not plain_name(name):
                    raise FedhetError(f"the run or a client in it has the name {name!r}, which no file can have")
            for name, record in saved["clients"].items():
                place = record.get("partition")
                state.clients[name] = ClientRecord(**record | {"partition": tuple(place) if place else None})
            return state
        except (FedhetError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FedhetError(
                f"{path} cannot be read as a checkpoint: {damage(error)}; restore it from a copy"
            ) from error


def _plain(value: object) -> bool:
    """Return whether JSON keeps `value`, in which tuples become lists."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(member) for key, member in value.items())
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, str | int | float)


def _kinds(state: type[State]) -> dict[str, Any]:
    hints = get_type_hints(state)
    names = [field.name for field in fields(state) if field.name not in ("round", "clients")]
    return {name: hints[name] if hints[name] in (Arrays, ArraysBy) else None for name in names}
