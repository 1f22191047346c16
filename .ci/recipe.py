"""Print the recipe of conda-forge for a released sdist, from the dependencies in pyproject.toml.

python .ci/recipe.py dist/fedhet-0.1.0.tar.gz [MAINTAINER...]    # accounts of GitHub
"""

import hashlib
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = {
    "flwr[simulation]": "flwr",
    "torch": "pytorch",
    "torch-geometric": "pytorch_geometric",
    "matplotlib": "matplotlib-base",
}
"""Names of conda-forge that are not those of PyPI."""

SIMULATION = "ray-core >=2.55"
"""What the extra `simulation` of Flower adds."""

TEMPLATE = """\
schema_version: 1

context:
  version: "{version}"
  python_min: "{oldest}"

package:
  name: fedhet
  version: ${{{{ version }}}}

source:
  url: https://pypi.org/packages/source/f/fedhet/fedhet-${{{{ version }}}}.tar.gz
  sha256: {digest}

build:
  noarch: python
  number: 0
  script: ${{{{ PYTHON }}}} -m pip install . -vv --no-deps --no-build-isolation
  python:
    entry_points:
      - fedhet = fedhet.cli:main

requirements:
  host:
    - python ${{{{ python_min }}}}.*
    - hatchling >=1.26
    - pip
  run:
    - python >=${{{{ python_min }}}},<{newest}
{requirements}

tests:
  - python:
      imports:
        - fedhet
      python_version: ${{{{ python_min }}}}.*
  - script:
      - fedhet keys
      - fedhet run --set rounds=1

about:
  summary: {summary}
  license: Apache-2.0
  license_file: LICENSE
{maintainers}"""


def recipe(sdist: Path, maintainers: list[str]) -> str:
    """Return the text of recipe.yaml for a file as PyPI has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    matches = [re.fullmatch(r"([\w\-\[\]]+)(.*)", line) for line in project["dependencies"]]
    lines = [f"{NAMES.get(match[1], match[1])} {match[2]}" for match in matches if match]
    listed = "".join(f"\n    - {name}" for name in maintainers)
    return TEMPLATE.format(
        version=project["version"],
        digest=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        oldest=project["requires-python"].removeprefix(">=").partition(",")[0],
        newest=project["requires-python"].rpartition("<")[2],
        requirements="\n".join(f"    - {line}" for line in sorted([*lines, SIMULATION])),
        summary=project["description"],
        maintainers=f"\nextra:\n  recipe-maintainers:{listed}\n" if maintainers else "",
    )


if __name__ == "__main__":
    print(recipe(Path(sys.argv[1]), sys.argv[2:]), end="")
