"""The table of four questions about every method (fedhet/methods/README.md), from the code and from handshakes."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedhet import make_client_app
from fedhet.config import client_setup
from fedhet.config import configuration as configuration
from fedhet.config.client_setup import ClientInfo
from fedhet.errors import FedhetError
from fedhet.flower.grid import LocalGrid
from fedhet.methods import registry
from fedhet.methods.method import Traits
from tests.small import SMALL

PAGE = Path(__file__).resolve().parents[1] / "fedhet" / "methods" / "README.md"
HEADING = (
    "| method | public dataset? | networks | heads | the server learns of a client |\n| --- | --- | --- | --- | --- |\n"
)
NETWORKS = {"any": "any", "equal": "equal", "widths": "one graph, any widths"}
SHARED = {"everything": "its weights", "nothing": "weights of a shared network"}
WORDS = {
    "features": "representations of public examples",
    "prototypes": "mean representations and numbers of examples by class",
    "descriptors": "activations for public examples",
    "hypernetwork": "weights of a hypernetwork",
}
OF_METHOD: dict[str, dict[str, Any]] = SMALL | {
    "fedharm": {"fedharm.blocks": "0,2,6,7", "fedharm.slots": "8,8,8,10"},
    "inclusivefl": {"inclusivefl.depths": "2,1", "inclusivefl.blocks": "4"},
    "flha-ghn": {"flha-ghn.head": "tiled"},
    "fedma": {"rounds": 0},
}


def lines(heads: dict[str, str]) -> list[str]:
    """The table, with these answers about heads."""
    table = []
    for name in registry.own_methods():
        method = registry.method(name)
        traits = method.traits_of(method.Parameters())
        public = {"none": "no", "inputs": "unlabelled", "labelled": "labelled"}[traits.public]
        networks = "one, in parts" if traits.shares.units else NETWORKS[traits.networks]
        table.append(f"| `{name}` | {public} | {networks} | {heads[name]} | {learnt(traits)} |")
    return table


def learnt(traits: Traits) -> str:
    """Return in words what arrays tell the server of a client."""
    keys = traits.shares.keys
    words = WORDS | {
        "weights": SHARED.get(keys, "") if isinstance(keys, str) else "weights that it shares",
        "statistics": "which classes it has" if traits.shares.units else "numbers of examples by class",
        "posteriors": "scores of public examples",
    }
    if traits.public == "none":
        words["posteriors"] = "mean scores and numbers of examples by class"
    return ", ".join(words[kind] for kind in sorted(traits.kinds & words.keys(), reverse=True)) or "nothing"


def answers() -> dict[str, str]:
    """The heads of the page's table, by method."""
    rows = PAGE.read_text(encoding="utf-8").split(HEADING)[1].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {name.strip("`"): heads for _, name, _, _, heads, *_ in cells}


def test_the_table_of_four_questions_has_the_methods_traits() -> None:
    heads = dict.fromkeys(registry.own_methods(), "?") | answers()
    table = PAGE.read_text(encoding="utf-8").split(HEADING)[1].split("\n\n")[0].splitlines()
    assert table == lines(heads), "\n".join(lines(heads))


def refused(method: str, folder: Path, *, width: int, outputs: int) -> bool:
    """Whether a client is refused whose head has so many more inputs and outputs than the other client's."""

    def model(client: ClientInfo) -> nn.Module:
        second = client.partition_id or 0
        wide = 8 + second * width
        body = nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, wide), nn.ReLU()
        return nn.Sequential(*body, nn.Linear(wide, 10 + second * outputs))

    settings = {"dataset": "digits", "clients": 2, "samples-per-client": 32, "public-samples": 32, "test-on": "local"}
    settings |= {"method": method, "rounds": 1, "closing-epochs": 0, **OF_METHOD.get(method, {})}
    config = configuration.resolve(settings, strict=False).but(state_dir=str(folder))
    strategy = registry.strategy(method)(config, public=client_setup.public_dataset(config), model=model)
    try:
        strategy.handshake(LocalGrid(make_client_app(model), 2))
    except FedhetError as error:
        if "refusals leave" not in str(error):  # the first client is refused, too
            raise
        return True
    return bool(strategy.run.round.failures)


@pytest.mark.slow
def test_the_handshake_takes_heads_as_the_table_says(tmp_path: Path) -> None:
    words = {(False, False): "any", (True, False): "equal widths", (False, True): "as many classes"}
    heads = {}
    for method in registry.own_methods():
        wider, more = (refused(method, tmp_path / method, width=w, outputs=o) for w, o in ((1, 0), (0, 1)))
        heads[method] = words.get((wider, more), "equal")
    assert heads == answers(), "\n".join(lines(heads))
