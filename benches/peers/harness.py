"""What both peers share: their options, the clock, and the result line.

The clock starts after two batches, so imports, tracing, compilation and first
touches of memory are not counted, and reading and parsing are. That is to the
peers' advantage.
"""

import argparse
import ctypes
import glob
import json
import time

WARM_UP_BATCHES = 2
DENSE_FIELDS = 13
SPARSE_FIELDS = 26
BINS = 1_000_000
LEARNING_RATE = 0.01
# Both frameworks start the accumulator here; torch's own default is 0.
INITIAL_ACCUMULATOR = 0.1


def options(description: str) -> argparse.Namespace:
    """The command line, with `paths` (expanded from --data) and `hidden` (as a list)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", required=True, help="glob of the files to train on")
    parser.add_argument(
        "--format",
        required=True,
        choices=["csv", "parquet", "memory"],
        help="csv: Criteo layout, tab-separated, string ids; parquet: integer ids; "
        "memory: the Parquet files as arrays in memory before the clock starts",
    )
    parser.add_argument("--hidden", default="400,400,400", help="widths of the hidden layers")
    parser.add_argument("--dim", type=int, default=16, help="width of the embedding vectors")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--records", type=int, help="stop after so many (default: one pass)")
    parser.add_argument("--seconds", type=float, help="stop after so long (default: one pass)")
    parser.add_argument("--seed", type=int, default=7)
    parsed = parser.parse_args()
    parsed.hidden = [int(width) for width in parsed.hidden.split(",")]
    parsed.paths = sorted(glob.glob(parsed.data))
    if not parsed.paths:
        parser.error(f"no file matches --data {parsed.data}")
    # A limit may ask for more than one pass.
    parsed.repeat = parsed.records is not None or parsed.seconds is not None
    return parsed


def keep_large_blocks() -> None:
    """Has malloc keep blocks of some MB instead of returning each to the kernel.

    Tensors of a batch are that large, and their pages would be faulted in again
    at every step. Where a deployment preloads jemalloc or tcmalloc for that,
    this needs no further package. On one thread it made no difference.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_threshold, 32 << 20)
    libc.mallopt(m_trim_threshold, 1 << 30)


class Clock:
    """Counts records and time after the warm-up, and says when to stop."""

    def __init__(self, parsed: argparse.Namespace):
        self.batch = parsed.batch
        self.records_max = parsed.records
        self.seconds_max = parsed.seconds
        self.batches = 0
        self.started = 0.0
        self.ended = 0.0

    def batch_done(self) -> bool:
        """Whether to go on."""
        self.batches += 1
        now = time.perf_counter()
        if self.batches <= WARM_UP_BATCHES:
            self.started = now
        self.ended = now
        if self.records_max is not None and self.records >= self.records_max:
            return False
        return self.seconds_max is None or self.seconds < self.seconds_max

    @property
    def records(self) -> int:
        return max(0, self.batches - WARM_UP_BATCHES) * self.batch

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def report(self, losses: list[float]) -> None:
        """Prints the result as the last line of stdout."""
        if self.records == 0:
            raise SystemExit(f"error: the data holds no more than {WARM_UP_BATCHES} batches")
        tail = losses[-max(1, len(losses) // 5) :]
        print(
            json.dumps(
                {
                    "records": self.records,
                    "seconds": round(self.seconds, 4),
                    "records_per_second": round(self.records / self.seconds, 1),
                    "logloss": round(sum(tail) / len(tail), 5),
                }
            ),
            flush=True,
        )
