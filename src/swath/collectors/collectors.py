"""The collectors under the module in which old scripts look for them."""

from swath.collectors import *  # noqa: F403
from swath.collectors import __all__ as __all__
from swath.collectors import __getattr__ as __getattr__
