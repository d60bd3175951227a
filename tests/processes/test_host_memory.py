"""Host memory while two ranks load a model of several GB: about one copy per node."""

import shutil

import pytest
from host_memory import GIB, measured


@pytest.mark.slow
def test_two_ranks_share_one_copy(tmp_path):
    """Sharded engines keep each weight once per node and read it once.

    DDP holds one copy per rank and loading adds nothing to it.
    """
    size, rows = measured(tmp_path, 2.5)
    shutil.rmtree(tmp_path / "wide")
    print(size, rows)
    assert 2 * GIB < size < 3 * GIB
    totals = {round(r["total"], 2) for r in rows.values()}
    assert len(totals) == 1, "all load the same weights, each once"
    for name in ("fsdp", "zero3"):
        assert rows[name]["kept"] < 1.1 * size
    assert rows["ddp"]["kept"] < 2.1 * size
    assert rows["fsdp"]["peak"] < 1.15 * size and rows["ddp"]["peak"] < 2.4 * size
    # each rank fills one block, the heap holds pieces of another
    assert rows["zero3"]["peak"] < size + 4 * rows["zero3"]["block"]
    assert all(r["file"] < 1.1 * size for r in rows.values())
