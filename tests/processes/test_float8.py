"Float8 layers whose weights are sharded."

import float8_shards
from forked import fork, wait


def test_shards_give_the_gradients_of_one_process():
    assert wait(fork(float8_shards.check, 2)) == [0, 0]
