"Float8 layers whose weights are sharded."


def test_shards_give_the_gradients_of_one_process(python, root):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    r = python(*command, root / "tests/tools/float8_shards.py", cwd=root)
    assert r.returncode == 0 and "fine" in r.stdout, r.stderr[-3000:]
