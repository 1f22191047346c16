"""Contents of messages as plain values: arrays, their specifications, requests and replies."""

from fedhet.messages.arrays import DTYPES as DTYPES
from fedhet.messages.arrays import Arrays as Arrays
from fedhet.messages.arrays import Payload as Payload
from fedhet.messages.arrays import Spec as Spec
from fedhet.messages.arrays import WireError as WireError
from fedhet.messages.arrays import as_declared as as_declared
from fedhet.messages.arrays import by_position as by_position
from fedhet.messages.arrays import check as check
from fedhet.messages.arrays import check_finite as check_finite
from fedhet.messages.arrays import difference as difference
from fedhet.messages.arrays import load_into as load_into
from fedhet.messages.arrays import spec_of as spec_of
from fedhet.messages.arrays import to_arrays as to_arrays
from fedhet.messages.arrays import to_tensor as to_tensor
from fedhet.messages.fields import Fields as Fields
from fedhet.messages.protocol import LostState as LostState
from fedhet.messages.protocol import Reply as Reply
from fedhet.messages.protocol import Report as Report
from fedhet.messages.protocol import Request as Request
from fedhet.messages.protocol import check_room as check_room
