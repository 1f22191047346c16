"""Contents of messages as plain values: arrays, their specifications, requests and replies."""

from fedhet.wire.arrays import DTYPES as DTYPES
from fedhet.wire.arrays import Arrays as Arrays
from fedhet.wire.arrays import Payload as Payload
from fedhet.wire.arrays import Spec as Spec
from fedhet.wire.arrays import WireError as WireError
from fedhet.wire.arrays import as_declared as as_declared
from fedhet.wire.arrays import bytes_of as bytes_of
from fedhet.wire.arrays import cast as cast
from fedhet.wire.arrays import check as check
from fedhet.wire.arrays import check_finite as check_finite
from fedhet.wire.arrays import difference as difference
from fedhet.wire.arrays import load_into as load_into
from fedhet.wire.arrays import narrowed as narrowed
from fedhet.wire.arrays import spec_of as spec_of
from fedhet.wire.arrays import to_arrays as to_arrays
from fedhet.wire.arrays import to_tensor as to_tensor
from fedhet.wire.arrays import without_widths as without_widths
from fedhet.wire.fields import Fields as Fields
from fedhet.wire.protocol import LostReply as LostReply
from fedhet.wire.protocol import Refusal as Refusal
from fedhet.wire.protocol import Reply as Reply
from fedhet.wire.protocol import Report as Report
from fedhet.wire.protocol import Request as Request
from fedhet.wire.protocol import check_room as check_room
