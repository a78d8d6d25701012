"""Counting and timing what the loop does."""

from swath.observe.counts import CountOf
from swath.observe.episodes import Episodes
from swath.observe.timing import Shares

__all__ = ["CountOf", "Episodes", "Shares"]
