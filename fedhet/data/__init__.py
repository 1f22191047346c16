"""Data sets by name, data of users, and partitions of data among clients."""

from fedhet.data import chestxray as chestxray
from fedhet.data import images as images
from fedhet.data import text as text
from fedhet.data.examples import ClientData as ClientData
from fedhet.data.examples import DataSet as DataSet
from fedhet.data.examples import Examples as Examples
from fedhet.data.examples import PublicDataset as PublicDataset
from fedhet.data.examples import resident as resident
from fedhet.data.partitions import Part as Part
from fedhet.data.partitions import partition as partition
from fedhet.data.partitions import partitions as partitions
from fedhet.data.partitions import proportional_sample as proportional_sample
from fedhet.data.registry import LOADED as LOADED
from fedhet.data.registry import keys_without_effect as keys_without_effect
from fedhet.data.registry import load as load
from fedhet.data.registry import names as names
from fedhet.data.registry import register_dataset as register_dataset
from fedhet.data.split import hold_out as hold_out
from fedhet.data.split import with_drawn_test_set as with_drawn_test_set
from fedhet.data.split import with_validation as with_validation
