"""Networks with each family of methods: a cell works, or is refused by a sentence that names a layer.

`networks.csv` has what is expected, from which the table on the methods' page is generated. After a change that is
meant, `python -m tests.networks.test_table` writes it again.
"""

import csv
import re
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from fedhet.errors import FedhetError

from .cells import FAMILIES, Network
from .listed import NETWORKS

TABLE = Path(__file__).with_name("networks.csv")
QUICK = ("convnext", "gpt", "padded transformer", "series", "swin", "vit", "edge gcn")
"""Networks of the quick suite, with the families that take the least time for them."""
LONG = {
    *("efficientnet", "googlenet", "maxvit", "mnasnet", "mobilenet_v3", "regnet", "resnext", "shufflenet"),
    *("timm/edgenext", "timm/ghostnet", "timm/mobilevit", "timm/nf_regnet", "timm/res2net", "timm/skresnet"),
}
"""Networks that take most time, each with a like one in the slow tests."""
FOREIGN = re.compile(r"RuntimeError|shape '|size of tensor|expected input|NestedTensor|invalid for input|\n")
"""Words of PyTorch's messages, which a refusal does not quote."""

# One thread: results do not depend on the machine, and cells run beside each other.
pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def network(name: str) -> Network:
    """Return a network of the table, whose families run one after the other."""
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    return Network(name, *NETWORKS[name])


def outcome(name: str, family: str) -> str:
    """Check a cell; return `yes`, or the sentence with which the network is refused."""
    try:
        FAMILIES[family](network(name))
    except FedhetError as error:
        return str(error)
    return "yes"


def expected() -> dict[tuple[str, str], str]:
    """Return the word of each cell of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {(row["network"], family): row[family] for row in csv.DictReader(file) for family in FAMILIES}


def cells() -> list[object]:
    """Return the cells of the table, of which a tenth belongs to the quick suite."""
    cells = []
    for name in NETWORKS:
        for family in FAMILIES:
            mark = pytest.mark.long if name in LONG else pytest.mark.slow
            quick = name in QUICK and family != "hypernetworks"
            cells.append(pytest.param(name, family, marks=[] if quick else [mark]))
    return cells


@pytest.mark.parametrize(("name", "family"), cells())
def test_a_network_works_or_is_refused_by_a_sentence_that_names_a_layer(name: str, family: str) -> None:
    found = outcome(name, family)
    assert ("yes" if found == "yes" else "refused") == expected()[name, family], found
    if found != "yes":
        model = network(name).model
        named = {each for each, _ in (*model.named_modules(), *model.named_parameters()) if each}
        assert named & {*re.findall(r"[\w.\-]+\w|\w", found)}, found
        assert not FOREIGN.search(found), found


def write() -> None:
    """Write the table as it is now."""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["network", *FAMILIES])
        for name in NETWORKS:
            rows.writerow([name, *("yes" if outcome(name, each) == "yes" else "refused" for each in FAMILIES)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(write())
