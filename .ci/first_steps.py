"""Take a new user's first steps with the installed package, in an empty folder.

    python .ci/first_steps.py

They are the README's first run, its example of own models and data, and both programs that `fedhet new` writes.
"""

import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import metadata
from pathlib import Path

import fedhet
from fedhet.engines.superlink import environment_of_commands, superlink

FEDERATION = "num-supernodes=3 client-resources-num-cpus=1"


def call(*words: str, folder: str = ".", environment: dict[str, str] | None = None) -> None:
    """Run a command and print how long it takes; raises CalledProcessError if it fails."""
    print("$", *words, flush=True)
    begin = time.monotonic()
    subprocess.run(words, cwd=folder, env=environment or environment_of_commands(), check=True)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)


def own_program() -> None:
    """Run the README's program and load a model of its run."""
    page = metadata("fedhet")
    text = page["Description"] or str(page.get_payload())
    (code,) = re.findall(r"```python\n(# own\.py\n.*?)```", text, re.DOTALL)
    Path("own.py").write_text(code, encoding="utf-8")
    call(sys.executable, "own.py")
    settings = {"method": "fedhenn", "clients": 10, "rounds": 2, "public-samples": 300}
    run = f'fedhet.run({settings}, model=my_model, data=my_data, out="runs/own")'
    load = 'print(fedhet.load_model("runs/own", 3, model=my_model))'
    program = f'import fedhet\nfrom own import my_data, my_model\n\nif __name__ == "__main__":\n    {run}\n    {load}\n'
    Path("load.py").write_text(program, encoding="utf-8")
    call(sys.executable, "load.py")


def new_programs() -> None:
    """Run what `fedhet new` writes: a program, and an app by `flwr run`."""
    call("fedhet", "new", "program")
    call(sys.executable, "run.py", folder="program")
    call("fedhet", "new", "app", "--flower")
    home = Path("flower").resolve()
    environment = environment_of_commands() | {"FLWR_HOME": str(home), "HOME": str(Path.cwd())}
    with superlink(home, Path("place").resolve(), environment, Path("superlink.log")):
        words = ["flwr", "run", ".", "--stream", "--run-config", "num-server-rounds=2"]
        call(*words, "--federation-config", FEDERATION, folder="app", environment=environment)
    summary = json.loads(Path(".fedhet/runs/first/summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "completed", summary


if __name__ == "__main__":
    assert not os.listdir(), "begin in an empty folder"
    assert "site-packages" in fedhet.__file__, f"{fedhet.__file__} is not the installed package"
    call("fedhet", "run")
    call("fedhet", "keys", "fedhenn")
    call("fedhet", "list")
    own_program()
    new_programs()
