"""A node's policy for Flower apps that are not fedhet's (`fedhet.guard`)."""

from collections import Counter
from collections.abc import Mapping

from fedhet.client import audit
from fedhet.client.policy import Policy, limiting_keys, memory_limited
from fedhet.errors import ConfigError, FedhetError, Refused, UserCodeError, nearest
from fedhet.flower import ArrayRecord, ClientApp, Context, Message, MetricRecord, RecordDict
from fedhet.flower.insides import failure, to_bytes
from fedhet.flower.messages import is_request, name_of
from fedhet.messages.protocol import COUNT
from fedhet.methods.method import KINDS, METRICS, TEACHING
from fedhet.utils.files import state_folder
from fedhet.utils.text import log


def guard(app: ClientApp, kinds: Mapping[str, str] | None = None) -> ClientApp:
    """Return a ClientApp that calls your own one, and sends only what the node config allows.

        app = fedhet.guard(app)  # your own ClientApp, below its functions with @app.train() and @app.evaluate()

    At a node without a policy (`fedhet.client.policy.POLICY_KEYS`), messages pass unchanged. At others, replies need
    the metric `num-examples`, of at least `min-examples`. A reply with a kind that is not in `allow`, or beyond
    `max-bytes`, is refused; metrics are left out instead, and have four digits. Reasons of failures stay in the node's
    log, which has a line for each message. What your functions put into an allowed record is not checked. For fedhet's
    strategies, too, pass the result to `fedhet.wrap`.

    Args:
        app: your ClientApp.
        kinds: the kind (`fedhet.client.policy.KINDS`) of each `ArrayRecord` and `ConfigRecord` in replies, by name. By
            default, an `ArrayRecord` has `weights`, and nodes with `allow` refuse a `ConfigRecord`.

    Raises:
        ConfigError: `app` is not a ClientApp, or a kind does not exist.
    """
    if not isinstance(app, ClientApp):
        raise ConfigError(f"app must be a flwr.clientapp.ClientApp, not {type(app).__name__}")
    arrays = [kind for kind in KINDS if kind not in (METRICS, TEACHING)]
    if unknown := {*(kinds or {}).values()} - {*arrays}:
        raise ConfigError(nearest("kind of a record", min(unknown), arrays))
    return Guarded(app, kinds or {})


class Guarded(ClientApp):
    """A ClientApp that calls the user's own app (`own`) under the node's policy; `kinds` are as for `guard`.

    Messages of fedhet's strategies go to `answers` instead, if it is given (`fedhet.wrap`).
    """

    def __init__(self, own: ClientApp, kinds: Mapping[str, str], answers: ClientApp | None = None) -> None:
        super().__init__()
        self.own = own
        self.kinds = kinds
        self._answers = answers

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the app's reply, or an error without private details if the policy refuses message or reply."""
        if self._answers is not None and is_request(message):
            return self._answers(message, context)
        if not limiting_keys(context.node_config):
            return self.own(message, context)
        name = name_of(context)
        asked = message.metadata.message_type
        home = state_folder(str(context.node_config.get("state-dir", "")), "")
        entry = {"client": name, "asked": asked, "run": "of another app"}
        policy = Policy(deployed=True)
        try:
            policy = Policy.of(context.node_config, deployed=True)
            policy.admit(context.node_config, home)
            if policy.noise:
                raise Refused("this node trains with dp-noise: create the app with fedhet.make_client_app")
            if is_request(message):
                raise Refused("fedhet's strategies need fedhet.wrap(app, model)")
            with memory_limited(context):
                content, sizes, examples = self._allowed(self.own(message, context), policy)
            reply = Message(content, reply_to=message)
            # Others can have been answered meanwhile.
            origin = audit.keep(home, message, check=policy.check_rate, **entry, sent=sizes)
            outcome = f"sent {audit.in_words(sizes)} of {examples} examples"
        except Exception as raised:
            reason = policy.reason(name, UserCodeError.within(raised))
            reason, origin = audit.refuse(home, message, reason, check=policy.check_rate, **entry)
            reply = failure(message, reason)
            outcome = f"refused: {reason}"
        log.info("client %s: %s: %s%s", name, asked, outcome, origin)
        return reply

    def _allowed(self, reply: Message, policy: Policy) -> tuple[RecordDict, Counter[str], float]:
        """Return what may be sent of a reply, its bytes by kind, and the number of examples behind it.

        Raises `Refused` if the reply may not be sent.
        """
        if reply.has_error():
            raise FedhetError(f"the app failed: {reply.error.reason}")
        counts = [record.get(COUNT) for record in reply.content.metric_records.values()]
        numbers = [count if isinstance(count, int | float) else 0 for count in counts]
        least = min(numbers, default=0)
        if not all(number >= policy.least for number in (least, *numbers)):  # one may be NaN
            raise Refused(
                f"the app's reply is of {least} examples, but its node requires at least {policy.least} "
                f"(min-examples): return the metric {COUNT}, and add examples if they are fewer"
            )
        content = RecordDict()
        sizes = Counter[str]()
        for name, record in reply.content.items():
            default = "weights" if isinstance(record, ArrayRecord) else f"an undeclared kind ({name})"
            kind = METRICS if isinstance(record, MetricRecord) else self.kinds.get(name, default)
            policy.check_kinds("the app", (kind,), remedy=f"leave out {name}, or let the node's owner allow its kind")
            content[name] = _metrics(record, policy) if isinstance(record, MetricRecord) else record
            sizes[kind] += len(to_bytes(RecordDict({name: content[name]})))
        policy.check_size(sizes)
        return content, sizes, least


def _metrics(record: MetricRecord, policy: Policy) -> MetricRecord:
    counts = MetricRecord({COUNT: record[COUNT]})
    for name, value in record.items():
        if name != COUNT and policy.tells_metrics:
            counts[name] = [*map(policy.rounded, value)] if isinstance(value, list) else policy.rounded(value)
    return counts
