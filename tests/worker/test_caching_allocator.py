"""The played allocator, on sequences whose outcome follows from the rules by hand."""

from pipeline.worker.caching_allocator import CachingAllocator

MIB = 1024**2


def test_sizes_are_rounded_up_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1)
    allocator.allocate(513)
    assert allocator.allocated == 512 + 1024


def test_small_blocks_share_a_segment_of_2_mib() -> None:
    allocator = CachingAllocator()
    allocator.allocate(MIB)
    allocator.allocate(MIB)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(512)
    assert allocator.reserved == 4 * MIB


def test_middling_blocks_share_a_segment_of_20_mib_and_large_ones_have_their_own() -> None:
    allocator = CachingAllocator()
    allocator.allocate(9 * MIB)
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(11 * MIB)
    assert allocator.reserved == 32 * MIB


def test_rest_of_a_large_block_stays_with_it_up_to_1_mib() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(12 * MIB)
    allocator.release(first)
    allocator.allocate(11 * MIB)
    assert allocator.allocated == 12 * MIB
    assert allocator.reserved == 12 * MIB


def test_freed_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(9 * MIB), allocator.allocate(9 * MIB)]
    for block in blocks:
        allocator.release(block)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    wide, narrow = allocator.allocate(40 * MIB), allocator.allocate(14 * MIB)
    allocator.release(wide)
    allocator.release(narrow)
    allocator.allocate(13 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 54 * MIB


def test_expandable_segment_grows_by_what_is_missing() -> None:
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.release(first)
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 60 * MIB
    assert allocator.allocated == 50 * MIB


def test_expandable_segment_cuts_blocks_exactly() -> None:
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(12 * MIB)
    allocator.release(first)
    allocator.allocate(11 * MIB + 512)
    assert allocator.allocated == 11 * MIB + 512


def test_nothing_is_left_when_all_is_released() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB // 7) for size in range(1, 200)]
    reserved = allocator.reserved
    for block in blocks[::2] + blocks[1::2]:
        allocator.release(block)
    assert allocator.allocated == 0
    allocator.allocate(20 * MIB)
    assert allocator.reserved == reserved
