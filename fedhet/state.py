"""A strategy's state as a value: what is saved after every round, and all that a resumed run needs."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedhet.errors import FedhetError
from fedhet.store import read_tensors, write_arrays
from fedhet.wire import Arrays, to_arrays


@dataclass
class ClientRecord:
    """What the server knows of a client.

    Attributes:
        examples: number of its training examples.
        architecture: name of its architecture, empty where it does not disclose it.
        trained: last round whose training by this client counted; -1 for none.
    """

    examples: int
    architecture: str = ""
    trained: int = -1


@dataclass
class State:
    """Everything of a strategy that outlives a round.

    Attributes:
        round: the last round that is complete; 0 before the first.
        arrays: groups of named arrays; `"model"` is the global model (or what of it is shared).
        values: plain JSON values of the method.
        clients: what is known of each client, by name.
    """

    round: int = 0
    arrays: dict[str, Arrays] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    clients: dict[str, ClientRecord] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the state to a folder. The JSON file comes last and names the array file, so that both fit."""
        name = f"{self.round}.safetensors"
        groups = self.arrays.items()
        write_arrays(
            folder / name,
            {f"{group}/{key}": array for group, arrays in groups for key, array in arrays.items()},
        )
        clients = {name: vars(client) for name, client in self.clients.items()}
        text = json.dumps({"round": self.round, "arrays": name, "values": self.values, "clients": clients})
        temporary = folder / ".state.json"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / "state.json")
        for path in folder.glob("*.safetensors"):
            if path.name != name:
                path.unlink()

    @classmethod
    def load(cls, folder: Path) -> "State":
        """Read what `save` wrote.

        Raises:
            FedhetError: there is no checkpoint in the folder, or it is damaged.
        """
        try:
            saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            tensors = read_tensors(folder / saved["arrays"])
            clients = {name: ClientRecord(**record) for name, record in saved["clients"].items()}
            round, values = saved["round"], saved["values"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FedhetError(f"{folder} holds no checkpoint that can be read: {error!r}") from error
        if tensors is None:
            raise FedhetError(f"{folder}: the checkpoint's arrays {saved['arrays']} are missing")
        arrays: dict[str, Arrays] = {}
        for name, array in to_arrays(tensors).items():
            group, _, key = name.partition("/")
            arrays.setdefault(group, {})[key] = array
        return cls(round, arrays, values, clients)
