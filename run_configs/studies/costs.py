"""Measure what a round costs a client under a method, and write the table of costs in `run_configs/grid/README.md`.

    python run_configs/studies/costs.py fedhenn   # measures, and replaces its rows in results/grid/costs.csv
    python run_configs/studies/costs.py           # only writes the table

Four clients train with the settings of the grid's `digits-72-iid-equal`. Of the last but one, the message of the
second round (of a one-shot method the first) is measured in three runs: seconds that the process computed;
multiplications, half of what `torch.utils.flop_counter` counts; and the peak of the memory that torch allocates while
a new ClientApp answers, its network included. Under methods whose clients have parts of a network, every second one
has half of it, and the last client is measured, too.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fedhet.client.app import make_client_app
from fedhet.comparing.settings import shared_settings, variants_of
from fedhet.engines.running import run_locally
from fedhet.flower import ClientApp, Context, Message, MessageType
from fedhet.flower.messages import read_request
from fedhet.methods.options import Config
from fedhet.methods.registry import module_of
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.utils.files import csv_lines, write_text

comparisons = module_of(str(Path(__file__).resolve().parent / "comparisons.py"))

COLUMNS = ("method", "part", "bytes_up", "bytes_down", "multiplications", "memory", "seconds")
HALVES = {
    "heterofl": {"heterofl.widths": "1,0.5"},
    "fedrolex": {"fedrolex.widths": "1,0.5"},
    "fjord": {"fjord.widths": "1,0.5"},
    "depthfl": {"depthfl.depths": "4,2"},
}
"""Settings under which every second client has half of the network, by method."""

CLIENTS = {2: "whole", 3: "half"}
"""The clients that are measured, after the others have warmed up the process, and what they have of the network."""


def peak_memory(function: Callable[[], None]) -> int:
    """Call a function, and return the peak of the memory in bytes that PyTorch allocated during the call."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes to the terminal
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        function()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in changes), default=0)


@dataclass
class Meter(Observer):
    """A ClientApp that measures how clients answer the message of a round, and an observer that ends the run after it.

    Attributes:
        what: `seconds`, `multiplications` or `memory`.
        last: the round.
        clients: partition ids of the clients that are measured.
        values: the measurements by partition id.
        bytes: bytes up and down in the round, by partition id.
    """

    what: str
    last: int
    clients: Container[int]
    app: ClientApp = field(default_factory=make_client_app)
    values: dict[int, float] = field(default_factory=dict)
    bytes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message as the ClientApp does."""
        client = int(context.node_config["partition-id"])
        trains = message.metadata.message_type == MessageType.TRAIN
        if not trains or read_request(message.content)[0].round != self.last or client not in self.clients:
            return self.app(message, context)
        if self.what == "seconds":
            start = time.process_time()
            reply = self.app(message, context)
            self.values[client] = time.process_time() - start
        elif self.what == "multiplications":
            with FlopCounterMode(display=False) as counter:
                reply = self.app(message, context)
            self.values[client] = counter.get_total_flops() / 2
        else:
            app, replies = make_client_app(), list[Message]()
            self.values[client] = peak_memory(lambda: replies.append(app(message, context)))
            (reply,) = replies
        return reply

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Keep the bytes of the measured round, and end the run."""
        if report.row["failures"]:
            raise RuntimeError(report.row["failures"])
        if report.row["round"] == self.last:
            self.bytes = {int(row.client): (row.bytes_up, row.bytes_down) for row in report.clients}
            run.state.stopped = self.last


def measured(config: Config, what: str) -> Meter:
    """Run the first rounds of a federation, and measure some of its clients in the last one."""
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(what, min(2, config.rounds), CLIENTS)
        run_locally(config.replace(workers=1), Path(folder) / "run", observers=[meter], app=meter)  # type: ignore[arg-type]
    return meter


def settings_of(method: str) -> Config:
    """Return the settings of the four clients with a method."""
    comparison = comparisons.Page("grid").comparisons["digits-72-iid-equal"]
    texts = dict(zip((each.name for each in variants_of(comparison.variants)), comparison.variants, strict=True))
    settings = {"preset": "", **comparison.set, "clients": 4, "evaluate-every": 10, "report": False}
    settings = {key: value for key, value in settings.items() if value != ""} | {"preset": ""}
    variants = variants_of([texts.get(method, method)])
    shared = shared_settings(variants, seeds=[0], config=settings | HALVES.get(method, {}), strict=False)
    config: Config = shared.settings(method, 0)
    return config


def rows_of(method: str) -> Iterator[dict[str, Any]]:
    """Yield a method's rows of the csv file: one, or a second one for half of a network."""
    config = settings_of(method)
    meters = [measured(config, what) for what in ("seconds", "multiplications", "memory")]
    for client, part in (CLIENTS if method in HALVES else {min(CLIENTS): ""}).items():
        up, down = meters[0].bytes[client]
        values = {meter.what: f"{meter.values[client]:.3g}" for meter in meters}
        yield {"method": method, "part": part, "bytes_up": up, "bytes_down": down, **values}


def table(rows: list[Mapping[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [["method", "bytes up", "bytes down", "multiplications (M)", "memory (kB)", "seconds"]]
    for row in rows:
        sizes = (f"{int(row[name]):,}" for name in ("bytes_up", "bytes_down"))
        multiplications, memory = float(row["multiplications"]) / 1e6, float(row["memory"]) / 1e3
        cells = (*sizes, f"{multiplications:.1f}", f"{memory:,.0f}", row["seconds"])
        lines.append([f"`{row['method']}`{row['part'] and ', ' + row['part']}", *cells])
    return str(comparisons.markdown(lines))


def main() -> None:
    """Measure methods, and write the table."""
    parser = argparse.ArgumentParser(description="Measure what a round costs a client under a method.")
    parser.add_argument("methods", nargs="*", help="none: only write the table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    page = comparisons.Page("grid").file
    file = comparisons.Page("grid").results / "costs.csv"
    rows: list[Mapping[str, Any]] = list(comparisons.read_csv(file))
    for method in given.methods:
        rows = [row for row in rows if row["method"] != method] + list(rows_of(method))
    write_text(file, csv_lines([COLUMNS, *([row[name] for name in COLUMNS] for row in rows)]))
    write_text(page, comparisons.replaced(page.read_text(encoding="utf-8"), "costs", table(rows)))


if __name__ == "__main__":
    main()
