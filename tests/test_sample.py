"""The bundled data: the right files and sizes, and no sentence in two splits."""

import pyarrow.parquet as parquet
from conftest import ROOT

COUNTS = {"train": 6666, "validation": 300, "test": 300}


def test_the_splits_are_whole_and_share_no_sentence():
    pairs = []
    for split, count in COUNTS.items():
        table = parquet.read_table(ROOT / "sample" / f"{split}-00000-of-00001.parquet")
        assert table.schema.names == ["translation"]
        assert str(table.schema.field("translation").type) == "struct<zh: string, en: string>"
        assert table.num_rows == count
        pairs += [(row["zh"], row["en"]) for row in table.column("translation").to_pylist()]
    assert len({zh for zh, _ in pairs}) == len({en for _, en in pairs}) == len(pairs)
