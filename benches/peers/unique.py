"""numpy.unique on batches of ids, for `cargo xtask bench ps`.

    PYTHON unique.py FILE

FILE holds batches of 4096 records with 26 ids each, 8 bytes an id. The last line
of stdout is {"ids":…, "unique":…, "million_ids_per_second":…}: the time that this
thread was on a core, over all batches, without the first round.
"""

import json
import sys
import time

import numpy

BATCH = 4096 * 26
ROUNDS = 10


def main() -> None:
    batches = numpy.fromfile(sys.argv[1], dtype="<u8").reshape(-1, BATCH)
    unique = [len(numpy.unique(ids, return_inverse=True)[0]) for ids in batches]
    start = time.thread_time()
    for _ in range(ROUNDS):
        for ids in batches:
            numpy.unique(ids, return_inverse=True)
    seconds = time.thread_time() - start
    rate = ROUNDS * batches.size / seconds / 1e6
    print(json.dumps({"ids": BATCH, "unique": unique[-1], "million_ids_per_second": rate}))


if __name__ == "__main__":
    main()
