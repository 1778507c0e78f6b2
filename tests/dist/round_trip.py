"""Run by the Python of an environment that has kvpool's wheel: puts a value into each store that is named, and gets it.

    python -I round_trip.py URL ...

Prints where kvpool lies, and what it is.
"""

import sys

import kvpool
from kvpool import _native

print(kvpool.__file__, kvpool.__version__, _native.checksum_isa())
key = kvpool.Namespace("tenant", {"model": "m"}).key(b"\1" * 32, 0, 0)
sent = bytes(range(250)) * 400
for url in sys.argv[1:]:
    into = bytearray(len(sent))
    with kvpool.open_store(url) as store:
        if store.put_many([key], [sent]) != [True] or store.get_many_into([key], [into]) != [True]:
            sys.exit("a value was not kept")
    if into != sent:
        sys.exit("a value came back otherwise")
