// Expandable segments: reserved ranges of addresses whose pages are mapped and unmapped as needed.
#pragma once

#include "allocator.hpp"

namespace kvobs {

// A free block of at least `size` bytes at the lowest address where one can be made; null: out of memory. Pages that
// were mapped before the device gave out stay mapped.
inline Block *Allocator::expand(Pool &pool, uint64_t size, int64_t stream) {
    Block *block = room(pool, size, stream);
    if (!block || (!block->mapped && !map_block(block, std::min(block->size, size)))) return nullptr;
    while (block->size < size) {
        Block *following = block->next;
        if (!following || following->mapped) return nullptr;  // more than all the addresses of a range
        if (!map_block(following, std::min(size - block->size, following->size))) return nullptr;
        block = following;
    }
    remove(block);
    return block;
}

// Where `size` bytes can be had by mapping: an unmapped range, or a free block in front of one.
inline Block *Allocator::room(Pool &pool, uint64_t size, int64_t stream) {
    const uint64_t on = static_cast<uint64_t>(stream);
    for (auto place = pool.unmapped.lower_bound(FreeKey{on, 0, 0, nullptr});
         place != pool.unmapped.end() && place->stream == on; ++place) {
        Block *first = place->block;
        if (first->prev && first->prev->idle()) first = first->prev;
        uint64_t found = 0;
        for (const Block *block = first; found < size && block && block->idle(); block = block->next)
            found += block->size;
        if (found >= size) return first;
    }
    const uint64_t page = page_size(settings_, pool.small), space = round_up(device_.range(), page);
    const uint64_t base = device_.reserve(space);
    if (!base) return nullptr;
    Block *block = new_block(pool, stream, base, space, new Range{base, space, page});
    block->mapped = false;
    add_unmapped(block);
    return block;
}

// Put memory behind the first `size` bytes (whole pages) of an unmapped range; the block becomes free.
inline bool Allocator::map_block(Block *block, uint64_t size) {
    size = round_up(size, block->range->page);
    const uint64_t address = block->address;
    if (!device_.map(address, size)) return false;
    remove(block);
    block->mapped = true;
    if (size < block->size) {
        Block *rest = new_block(*block->pool, block->stream, block->address + size, block->size - size, block->range);
        rest->mapped = false;
        rest->insert_after(block);
        block->size = size;
        add_unmapped(rest);
    }
    merge(block, block->prev);
    merge(block, block->next);
    add_free(block);
    grew(*block->pool, block->stream, address, size, true);
    return true;
}

// Return the whole pages inside a free block, if it has any; a range without any page is given up.
inline bool Allocator::unmap_block(Block *block) {
    Range *range = block->range;
    const uint64_t end = block->address + block->size;
    const uint64_t first = range->base + round_up(block->address - range->base, range->page);
    const uint64_t last = range->base + (end - range->base) / range->page * range->page;
    if (first >= last) return false;
    remove(block);
    if (first > block->address) {
        Block *rest = new_block(*block->pool, block->stream, block->address, first - block->address, range);
        rest->insert_before(block);
        add_free(rest);
    }
    if (last < end) {
        Block *rest = new_block(*block->pool, block->stream, last, end - last, range);
        rest->insert_after(block);
        add_free(rest);
    }
    block->address = first;
    block->size = last - first;
    block->mapped = false;
    device_.unmap(first, last - first);
    shrank(*block->pool, block->stream, first, last - first, true);
    merge(block, block->prev);
    merge(block, block->next);
    if (block->split()) {
        add_unmapped(block);
        return true;
    }
    device_.unreserve(range->base, range->size);
    delete range;
    drop(block);
    return true;
}

}  // namespace kvobs
