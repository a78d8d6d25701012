"""What connects a worker with the process that uses it; knows nothing of environments."""

from swath.links.bell import Bell
from swath.links.channel import Channel, StalledError
from swath.links.launch import Launched, launch
from swath.links.limits import in_words
from swath.links.link import Link, end_all
from swath.links.parcels import pack, unpack
from swath.links.process import ProcessLink, ProcessPort

__all__ = [
    "Bell",
    "Channel",
    "Launched",
    "Link",
    "ProcessLink",
    "ProcessPort",
    "StalledError",
    "end_all",
    "in_words",
    "launch",
    "pack",
    "unpack",
]
