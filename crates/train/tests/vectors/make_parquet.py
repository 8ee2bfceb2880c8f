"""Writes the Parquet files of this folder with pyarrow, which has an implementation of its own: pip install pyarrow; python3 make_parquet.py

Forty rows in groups of sixteen, under each codec: a text, a prompt and its answer, a number, a list, and a text within a structure.
"""

import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 40
HERE = pathlib.Path(__file__).parent

table = pa.table(
    {
        "id": pa.array(range(ROWS), pa.int64()),
        "text": [f"text {i}: «{'word ' * (i % 5)}»\n" for i in range(ROWS)],
        "prompt": [f"what is {i}? " for i in range(ROWS)],
        "answer": [None if i == 33 else f"it is {i}\n" for i in range(ROWS)],
        "list": [["a", "b"]] * ROWS,
        "inner": [{"text": f"inner {i}\n"} for i in range(ROWS)],
    }
)
for codec in ["none", "snappy", "gzip", "brotli", "lz4", "zstd"]:
    pq.write_table(table, HERE / f"{codec}.parquet", compression=codec, row_group_size=16)
pq.write_table(
    table, HERE / "v2.parquet", compression="snappy", row_group_size=16, data_page_version="2.0", use_dictionary=False
)
