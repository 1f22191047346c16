"""A node's audit file, `state-dir`/audit.jsonl: what each message asked for and what was sent, as lines of JSON.

A server must not fill the disk by messages that are refused: equal refusals of an hour, between two replies, have one
line, which counts them (`times`), and so have all that are not among the first `MOST` of a day.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fedhet.client.client import AnySide
from fedhet.errors import ConfigError, Refused
from fedhet.flower import ArrayRecord, Message, RecordDict
from fedhet.flower.insides import hash_of_app, to_bytes
from fedhet.messages import Reply
from fedhet.messages.protocol import DESCRIBE, WHOLE
from fedhet.methods.method import METRICS, STRUCTURE
from fedhet.utils.files import locked, private_files, writing
from fedhet.utils.statistics import grouped

FILE = "audit.jsonl"
DAYS = {"today": 0, "yesterday": 1}
NOTHING = {**dict.fromkeys(("time", "client", "run", "flower-run", "app"), "?"), "sent": {}, "epsilon": 0.0, "times": 1}
MOST = 200  # largest number of lines a day for refusals
TAIL = 2**20  # bytes at the end of the file in which they are counted
FURTHER = "one of many refusals, which have no lines of their own; the node's log has each reason"
FAILED = "the client failed; the reason is in its node's log, since it could disclose data"


def kind_of(group: str, name: str, side: AnySide) -> str:
    """Return the kind (`KINDS`) of the array `name` in a `group` of arrays of a reply by the client side `side`."""
    if group == DESCRIBE:
        return "statistics"
    kind = side.traits.sends.get(group, "weights" if group in ("model", WHOLE) else f"an undeclared kind ({group})")
    return "statistics" if kind == "weights" and side.kinds.get(name) == "statistic" else kind


def sizes_of(reply: Reply, content: RecordDict, side: AnySide) -> dict[str, int]:
    """Return bytes by kind in a `reply` of the client side `side`, whose message has this `content`.

    Numbers of examples are part of the metrics, if these are sent.
    """
    sizes: Counter[str] = Counter()
    for group, arrays in reply.payload.arrays.items():
        for name, array in arrays.items():
            sizes[kind_of(group, name, side)] += array.nbytes
    counts = "numbers of examples"
    if reply.measured or reply.further or reply.evaluated or reply.train_loss is not None:
        counts = METRICS
    values = [side.traits.sends.get(name, STRUCTURE) for name in reply.payload.values]
    kinds = {"metrics": counts, "values": min(values, default=STRUCTURE)}
    for name, record in content.items():
        if not isinstance(record, ArrayRecord):
            sizes[kinds.get(name, STRUCTURE)] += len(to_bytes(RecordDict({name: record})))
    if reply.report.scales:
        sizes["scales of the data"] = len(reply.report.scales.encode())
    return dict(sorted(sizes.items()))


def in_words(sizes: Mapping[str, int]) -> str:
    """Return kinds and bytes of what was sent, for the log."""
    return ", ".join(f"{kind} ({size} bytes)" if size else kind for kind, size in sizes.items())


def keep(folder: Path, message: Message, *, check: Callable[[Path], None] | None = None, **entry: Any) -> str:
    """Append an entry about a message to the audit file in `folder`; return time, Flower's run and app for the log.

    No other process appends one between `check`, a function of `folder` that may raise an error, and this entry.

    The entry has the client's name, what was `asked`, fedhet's `run`, and either bytes `sent` by kind and the node's
    `epsilon`, or the reason why the message was `refused`. Raises a WriteError if the file cannot be written, so that
    no reply is sent without an entry.
    """
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = {"time": now, "flower-run": message.metadata.run_id, "app": hash_of_app()}
    path = folder / FILE
    with private_files(), writing(path), locked(folder, wait=True):
        if check:
            check(folder)
        path.touch()
        with path.open("r+b") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            lines = file.read().splitlines(keepends=True)
            line = origin | entry
            place = _counted(lines, line) if "refused" in entry else len(lines)
            file.seek(size - sum(map(len, lines[place:])))
            damaged = bool(lines) and not lines[-1].endswith(b"\n")  # the machine stopped while it was written
            file.write(b"\n" * damaged + b"".join(lines[place + 1 :]) + json.dumps(line).encode() + b"\n")
            file.truncate()
    return f" [{now}, Flower's run {origin['flower-run']}, app {origin['app']}]"


def _counted(lines: Sequence[bytes], entry: dict[str, Any]) -> int:
    """Return the place of the line among the last `lines` of the file that a refusal's entry replaces, or their number.

    The entry then counts the earlier ones. No line of what was sent is written again.
    """
    earlier = [_read(line) for line in lines]
    day, hour = entry["time"][:10], entry["time"][:13]
    if sum("refused" in other and other["time"].startswith(day) for other in earlier) >= MOST:
        entry |= {"asked": "", "run": "", "refused": FAILED if entry["refused"] == FAILED else FURTHER}
    for place, other in reversed([*enumerate(earlier)]):
        if "refused" not in other:
            break
        if other["time"].startswith(hour) and other | {"time": "", "times": 1} == entry | {"time": "", "times": 1}:
            entry["times"] = other["times"] + 1
            return place
    return len(lines)


def _read(line: str | bytes) -> dict[str, Any]:
    """Return the entry in a line, with a time in a zone; an empty one if the line is damaged."""
    try:
        entry: dict[str, Any] = {"times": 1} | json.loads(line)
        zone = datetime.fromisoformat(entry["time"]).tzinfo
        return entry if zone and isinstance(entry["times"], int) else {}
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}


def refuse(
    folder: Path, message: Message, reason: str, *, check: Callable[[Path], None], **entry: Any
) -> tuple[str, str]:
    """Append an entry about a refusal (see `keep`); return the reason for the server, and time, run and app.

    The reason is that of `check`, if this raises `Refused` for a message that failed.
    """
    try:
        return reason, keep(folder, message, check=check if reason == FAILED else None, **entry, refused=reason)
    except Refused as error:  # others were answered meanwhile
        return refuse(folder, message, str(error), check=check, **entry)
    except OSError:  # a full disk can be the reason
        return reason, ""


def entries(folder: Path, begin: datetime) -> Iterator[dict[str, Any]]:
    """Yield the entries of the audit file in `folder` from a time on."""
    path = folder / FILE
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        entry = _read(line)
        if not entry:  # the machine stopped while it was written
            yield NOTHING | {"client": f"unknown (a line of {path} is damaged)"}
        elif datetime.fromisoformat(entry["time"]) >= begin:
            yield NOTHING | entry


def answered(folder: Path, begin: datetime) -> int:
    """Return how many messages the node answered since `begin`, also by `FAILED`, which can depend on an example."""
    counted = (entry for entry in entries(folder, begin) if entry["sent"] or entry.get("refused") == FAILED)
    return sum(entry["times"] for entry in counted)


def summary(folder: Path, begin: datetime) -> list[str]:
    """Return two lines for each run since `begin`: whose it is, and kinds, bytes and epsilon of all that was sent.

    Raises a ConfigError without a file, since another folder's silence is no answer.
    """
    if not (folder / FILE).is_file():
        raise ConfigError(
            f"{folder} has no {FILE}: its node has had no message yet, or its state is elsewhere; give its --state-dir"
        )
    origin = "client {client}, run {run} (Flower's {flower-run}), app {app}"
    lines = []
    for heading, answers in grouped((origin.format_map(entry), entry) for entry in entries(folder, begin)).items():
        sizes = Counter[str]()
        for entry in answers:
            sizes.update(entry["sent"])
        refused = sum(entry["times"] for entry in answers if "refused" in entry)
        messages = sum(entry["times"] for entry in answers)
        epsilon = max(entry["epsilon"] for entry in answers)
        spent = f"; epsilon {epsilon:.4g} over all runs of the node" if epsilon else ""
        lines.append(heading)
        lines.append(
            f"  {answers[0]['time']} to {answers[-1]['time']}: {messages} messages, of which {refused} were "
            f"refused; sent {in_words(sizes) or 'nothing'}{spent}"
        )
    return lines


def since(text: str) -> datetime:
    """Return the beginning of a day: `today`, `yesterday` or a date such as 2026-11-28; raises a ConfigError else."""
    if text in DAYS:
        day = datetime.now() - timedelta(days=DAYS[text])
        return day.replace(hour=0, minute=0, second=0, microsecond=0).astimezone()
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise ConfigError(f"--since {text}: write today, yesterday or a date such as 2026-11-28") from None
