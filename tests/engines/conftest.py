"""Commands as pages print them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import fedhet

ROOT = Path(fedhet.__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def printed() -> Callable[[str, str], list[str]]:
    """The commands of a page's blocks, in order, that begin with a word; without comments."""

    def printed(page: str, word: str) -> list[str]:
        if not (ROOT / page).is_file():
            pytest.skip("fedhet is installed; only a checkout has this page")
        blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
        lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
        commands = [re.split(r"\s\s+#", line)[0] for line in lines]
        return [each for each in commands if re.match(rf"(\w+=\S+ )*{word}\b", each)]

    return printed
