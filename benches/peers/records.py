"""Reads CSV and Parquet with pyarrow into batches of numpy arrays.

A batch is (label float32 [B], dense float32 [B, 13], ids int64 [B, 26]). An id
is already a row of the table: hashed with its field into the bins; a missing
value is an id of its own in each field. pyarrow and numpy release the GIL, so a
thread that runs these generators works beside the one that trains.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from harness import BINS, DENSE_FIELDS, SPARSE_FIELDS

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]

LABEL = "label"
DENSE = [f"I{i}" for i in range(1, DENSE_FIELDS + 1)]
SPARSE = [f"C{i}" for i in range(1, SPARSE_FIELDS + 1)]

# Large enough to amortise the per-column calls, small enough to stay in the cache.
CSV_BLOCK_BYTES = 2 << 20
PARQUET_CHUNK_RECORDS = 16_384
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)


def batches(paths: list[str], format: str, batch: int, repeat: bool) -> Iterator[Batch]:
    """Full batches only: a short one would make a framework trace or plan again."""
    left: list[Batch] = []
    left_records = 0
    for chunk in chunks(paths, format, repeat):
        left.append(chunk)
        left_records += len(chunk[0])
        if left_records < batch:
            continue
        joined = left[0] if len(left) == 1 else tuple(map(np.concatenate, zip(*left)))
        end = left_records - left_records % batch
        for start in range(0, end, batch):
            yield tuple(array[start : start + batch] for array in joined)
        left = [tuple(array[end:] for array in joined)]
        left_records -= end


def in_memory(paths: list[str], batch: int, batches_max: int) -> list[Batch]:
    """The first batches of Parquet files, for measuring without any reading."""
    found = []
    for one in batches(paths, "parquet", batch, repeat=False):
        found.append(tuple(np.ascontiguousarray(array) for array in one))
        if len(found) == batches_max:
            break
    return found


def chunks(paths: list[str], format: str, repeat: bool) -> Iterator[Batch]:
    tables = csv_tables if format == "csv" else parquet_tables
    while True:
        for path in paths:
            for table in tables(path):
                yield features(table)
        if not repeat:
            return


def csv_tables(path: str) -> Iterator[pa.RecordBatch]:
    types = {LABEL: pa.float32()}
    types |= {name: pa.float32() for name in DENSE}
    types |= {name: pa.string() for name in SPARSE}
    reader = pyarrow.csv.open_csv(
        path,
        pyarrow.csv.ReadOptions(
            column_names=[LABEL, *DENSE, *SPARSE], block_size=CSV_BLOCK_BYTES, use_threads=False
        ),
        pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
        pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    )
    yield from reader


def parquet_tables(path: str) -> Iterator[pa.RecordBatch]:
    with pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(
            PARQUET_CHUNK_RECORDS, columns=[LABEL, *DENSE, *SPARSE], use_threads=False
        )


def features(table: pa.RecordBatch) -> Batch:
    records = table.num_rows
    label = table.column(LABEL).to_numpy(zero_copy_only=False).astype(np.float32)
    dense = np.empty((records, DENSE_FIELDS), np.float32)
    for field, name in enumerate(DENSE):
        column = table.column(name)
        if column.null_count:
            column = column.fill_null(0)
        dense[:, field] = column.to_numpy(zero_copy_only=False)
    np.maximum(dense, 0, out=dense)
    np.log1p(dense, out=dense)
    ids = np.empty((records, SPARSE_FIELDS), np.int64)
    for field, name in enumerate(SPARSE):
        ids[:, field] = bins(table.column(name), field)
    return label, dense, ids


def bins(column: pa.Array, field: int) -> np.ndarray:
    """The rows of one field's values: multiplicative hashing, then a range reduction."""
    if pa.types.is_string(column.type):
        values = string_keys(column)
    else:
        whole = column if column.type == pa.int64() else column.cast(pa.int64(), safe=False)
        whole = whole.fill_null(-1) if whole.null_count else whole
        values = whole.to_numpy().view(np.uint64)
    # A salt per field, so that equal values of two fields are different ids.
    hashed = values + np.uint64(((field + 1) * int(GOLDEN)) & ((1 << 64) - 1))
    hashed ^= hashed >> HALF
    hashed *= GOLDEN
    hashed >>= HALF
    hashed *= np.uint64(BINS)
    hashed >>= HALF
    return hashed.view(np.int64)


def string_keys(column: pa.Array) -> np.ndarray:
    """A 64-bit key per string: padded to whole words, the words combined.

    A missing value gets the key of the empty string.
    """
    whole = column.fill_null("") if column.null_count else column
    longest = pc.max(pc.binary_length(whole)).as_py() or 0
    words = max(1, -(-longest // 8))
    padded = pc.ascii_rpad(whole, width=8 * words, padding="\0")
    data = np.frombuffer(padded.buffers()[2], np.uint64, count=len(padded) * words)
    if words == 1:
        return data
    data = data.reshape(-1, words)
    keys = data[:, 0].copy()
    for word in range(1, words):
        keys *= GOLDEN
        keys ^= keys >> HALF
        keys += data[:, word]
    return keys
