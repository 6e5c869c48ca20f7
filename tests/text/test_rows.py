"""Token ids in flat arrays: what is written is read, and no id wraps around."""

import pickle

import numpy as np
import pytest

from engine.errors import UserError
from text.rows import TokenizedPairs, TokenWriter, flatten


def test_token_store_round_trip(tmp_path):
    pairs = [([5, 6], [7]), ([8], [9, 10, 11]), ([300, 3], [4])]
    writer = TokenWriter(tmp_path / "store", {"source": range(400), "target": range(70000)})
    writer.write("source", flatten([source for source, _ in pairs]))
    writer.write("target", flatten([target for _, target in pairs[:2]]))
    writer.write("target", flatten([pairs[2][1]]))
    writer.close()
    stored = TokenizedPairs(tmp_path / "store")
    assert [tuple(ids.tolist() for ids in stored[row]) for row in range(len(stored))] == pairs
    # As small as the vocabulary allows.
    assert stored[0][0].dtype == np.uint16 and stored[0][1].dtype == np.int32
    # As a DataLoader worker gets it.
    assert pickle.loads(pickle.dumps(stored))[1][1].tolist() == [9, 10, 11]
    assert all(isinstance(ids.base, np.memmap) for ids in stored._ids.values())  # not in memory
    chunks = [chunk[0].ids.tolist() for chunk in stored.chunks(size=2)]
    assert chunks == [[5, 6, 8], [300, 3]]


def test_ids_beyond_the_vocabulary_do_not_wrap(tmp_path):
    writer = TokenWriter(tmp_path / "store", {"source": range(60_000), "target": range(60_000)})
    writer.write("source", flatten([[1, 59_999]]))
    with pytest.raises(UserError, match="the target tokenizer gives the id 65537, but has 60000"):
        writer.write("target", flatten([[65_537]]))
