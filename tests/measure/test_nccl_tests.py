"""Rows of nccl-tests are read, heads and totals are not; written by hand in the documented form."""

from labkit.measure.nccl_tests import parse

PRINTED = """# nThread 1 nGpus 2 minBytes 8 maxBytes 1048576
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    10.00    0.00    0.00      0    12.50    0.00    0.00      0
     1048576        262144     float    none      -1    20.00   52.43   26.21    N/A    25.00   41.94   20.97      3
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 11.795
"""


def test_each_size_has_a_row_out_of_place_and_one_in_place() -> None:
    rows = parse(PRINTED)
    assert [(row["bytes"], row["in_place"]) for row in rows] == [
        (8, False), (8, True), (1048576, False), (1048576, True)
    ]  # fmt: skip
    assert rows[2] == {
        "bytes": 1048576, "in_place": False, "time_us": 20.0, "algbw_gb_s": 52.43, "busbw_gb_s": 26.21, "wrong": None,
    }  # fmt: skip
    assert rows[3]["wrong"] == 3


def test_what_is_no_table_has_no_rows() -> None:
    assert parse("all_reduce_perf: error while loading shared libraries") == []
