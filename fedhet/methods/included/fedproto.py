"""FedProto (Tan et al., AAAI 2022): clients share prototypes, the mean representations of their classes."""

from dataclasses import dataclass

from fedhet.methods.method import STRUCTURE, Method, Traits
from fedhet.methods.options import Options, Value, option


@dataclass(frozen=True)
class WidthOptions(Options):
    """Configuration keys of methods that need representations of the same width from all clients."""

    width: int = option(
        0,
        "width to which a linear layer before the head projects representations; 0: no such layer",
        at_least=0,
        at_most=2**16,
        at_need=(64,),
    )

    def suited(self, *, own_models: bool, unlabelled: bool) -> dict[str, tuple[Value, str]]:
        """Keep the preset's `width`, with a remark, since it adds a layer to the user's models."""
        if not own_models or not self.width:
            return {}
        why = (
            "to which a further layer before the head brings each client's representations, which must be equally wide"
        )
        return {"width": (self.width, f"{why} (0: no such layer)")}

    @property
    def changes_heads(self) -> bool:
        """Return whether `width` adds a projection layer, and with it new heads."""
        return self.width > 0


@dataclass(frozen=True)
class FedProtoOptions(WidthOptions):
    """FedProto's own configuration keys."""

    weight: float = option(1.0, "lambda, the weight of the distance to the global prototypes", at_least=0)
    predict: str = option(
        "prototype",
        "prediction by the nearest prototype of the client's classes or of all classes, or by the head",
        choices=("prototype", "all-prototypes", "head"),
    )


method = Method(
    "fedproto",
    traits=Traits(
        keeps="model", scored="trained", other_arrays="entries", sends={"prototypes": "prototypes", "width": STRUCTURE}
    ),
    Options=FedProtoOptions,
    own={"fedproto.width": 32},
)
