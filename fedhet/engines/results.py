"""A Flower app that sends the files of a run from the server's machine, in its log (`fedhet results`).

Whoever may start runs may read them: a ServerApp can read all that the SuperLink's user can.
"""

import subprocess
import tempfile
import time
from base64 import b64decode, b64encode
from pathlib import Path

from fedhet.config.toml import toml_value
from fedhet.engines import superlink
from fedhet.engines.flower import check_connection, make_app
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import Context, Grid, ServerApp
from fedhet.results.recorder import check_folder
from fedhet.utils.machine import ended_by_signals

FILES = ("config.toml", "summary.json", "history.jsonl", "clients.csv", "models/global.safetensors")
MARK = "fedhet-results"  # first word of the lines of the log that have a file

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Print name and content, in base64, of each file of the run in the folder `out`."""
    for name in FILES:
        path = Path(str(context.run_config["out"])) / name
        if path.is_file():
            content = path.read_bytes()
            print(MARK, name, b64encode(content).decode())
            time.sleep(len(content) / 1e7)  # Flower sends its log meanwhile, and for three seconds after the end
    print(MARK, "end", "")


def fetch(run: str, engine: str, folder: Path) -> None:
    """Write the files of a run, in the folder `run` of the server's machine, to a new `folder` of this machine.

    `engine` is the name of the SuperLink connection. Raises a FedhetError if the run has no files, or not all arrived.
    """
    if engine in ("local", superlink.SIMULATION):
        raise ConfigError(f"--engine {engine}: a run on this machine has its files in its folder: read them there")
    check_connection(engine)
    check_folder(folder)
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="fedhet-") as temporary:
        words = ["run", str(make_app(Path(temporary) / "app", server="fedhet.engines.results:app")), engine, "--stream"]
        words = [superlink.command("flwr"), *words, "--run-config", f"out={toml_value(run)}"]
        place, environment = superlink.flwr_home(), superlink.environment_of_commands()
        done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, check=False)
    ending = (done.stdout + done.stderr)[-1000:]
    lines = [line.split(" ") for line in done.stdout.splitlines() if line.startswith(f"{MARK} ")]
    if not lines:
        raise FedhetError(f"nothing arrived from the run that reads {run} on the server's machine:\n{ending}")
    sent = {words[1]: words[2] for words in lines if len(words) == 3}  # the last one can be cut
    if "end" not in sent or "config.toml" not in sent:
        raise FedhetError(
            f"the folder {run} on the server's machine has no run, or its files did not arrive: give the folder that "
            f"fedhet run has printed, or copy it\n{ending}"
        )
    for name in FILES:
        if name in sent:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b64decode(sent[name]))
