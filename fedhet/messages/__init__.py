"""Contents of messages between server and clients: arrays with shapes and dtypes, requests and replies."""

from fedhet.messages.payload import DTYPES as DTYPES
from fedhet.messages.payload import Arrays as Arrays
from fedhet.messages.payload import Fields as Fields
from fedhet.messages.payload import Payload as Payload
from fedhet.messages.payload import Spec as Spec
from fedhet.messages.payload import WireError as WireError
from fedhet.messages.payload import as_declared as as_declared
from fedhet.messages.payload import by_position as by_position
from fedhet.messages.payload import check as check
from fedhet.messages.payload import check_finite as check_finite
from fedhet.messages.payload import check_places as check_places
from fedhet.messages.payload import difference as difference
from fedhet.messages.payload import load_into as load_into
from fedhet.messages.payload import spec_of as spec_of
from fedhet.messages.payload import to_arrays as to_arrays
from fedhet.messages.payload import to_tensor as to_tensor
from fedhet.messages.protocol import LostState as LostState
from fedhet.messages.protocol import Reply as Reply
from fedhet.messages.protocol import Report as Report
from fedhet.messages.protocol import Request as Request
from fedhet.messages.protocol import check_room as check_room
