"""Imported first by every Python process of a chaos run: ends it when an order says so.

An order is an empty file named after a module, in the folder `UNDERSTUDY_CHAOS_ORDERS`: whoever is
started as `python -m MODULE` ends with exit status 1, as with a broken environment.
"""

import os
import sys

_orders = os.environ.get("UNDERSTUDY_CHAOS_ORDERS")
if _orders and os.path.isdir(_orders):  # noqa: PTH112 - no imports beyond these two
    for _module in os.listdir(_orders):  # noqa: PTH208
        if _module in sys.orig_argv:
            os.write(2, f"ImportError: {_module} is broken by order\n".encode())
            os._exit(1)
