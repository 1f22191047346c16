"""The interface to Flower; other packages of fedhet import Flower's public classes from here."""

from flwr.app import Array as Array
from flwr.app import ArrayRecord as ArrayRecord
from flwr.app import ConfigRecord as ConfigRecord
from flwr.app import Context as Context
from flwr.app import Error as Error
from flwr.app import Message as Message
from flwr.app import MessageType as MessageType
from flwr.app import MetricRecord as MetricRecord
from flwr.app import RecordDict as RecordDict
from flwr.clientapp import ClientApp as ClientApp
from flwr.serverapp import Grid as Grid
from flwr.serverapp import ServerApp as ServerApp
from flwr.serverapp.strategy import Result as Result
from flwr.serverapp.strategy import Strategy as Strategy

from fedhet.flower.messages import STYPE as STYPE
from fedhet.flower.messages import Encoder as Encoder
from fedhet.flower.messages import ask_app as ask_app
from fedhet.flower.messages import decode as decode
from fedhet.flower.messages import decode_arrays as decode_arrays
from fedhet.flower.messages import encode_arrays as encode_arrays
from fedhet.flower.messages import is_request as is_request
from fedhet.flower.messages import name_in as name_in
from fedhet.flower.messages import read_reply as read_reply
from fedhet.flower.messages import read_request as read_request
from fedhet.flower.messages import sent_along as sent_along
from fedhet.flower.messages import write_refusal as write_refusal
from fedhet.flower.messages import write_reply as write_reply
from fedhet.flower.messages import write_request as write_request
