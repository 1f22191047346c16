from fedhet.utils.randomness import derive_seed, numpy_generator, torch_generator


def test_random_streams_are_named_and_do_not_depend_on_the_process():
    # Fixed for good: results would change with it.
    assert derive_seed(0, "batches", "3", 7) == 613_364_499_641_429_145
    streams = [derive_seed(0, "batches", "3", 7), derive_seed(1, "batches", "3", 7), derive_seed(0, "batches", "37")]
    assert len({*streams, derive_seed(0, "batches", "3", 8), derive_seed(0, "dropout", "3", 7)}) == 5
    assert all(0 <= seed < 2**63 for seed in streams)
    assert numpy_generator(0, "a").integers(1000) == numpy_generator(0, "a").integers(1000)
    assert torch_generator(0, "a").initial_seed() == derive_seed(0, "a")
