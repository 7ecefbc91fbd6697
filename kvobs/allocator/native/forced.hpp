// Changes that no program makes: loading a state, and putting the allocator where a recording says it was.
#pragma once

#include "allocator.hpp"

namespace kvobs {

constexpr uint64_t NOWHERE = uint64_t{1} << 60;  // from here on addresses are invented; no device has such

// One cudaMalloc, or the mapped runs of one expandable segment, whose addresses are [base, base + span). Pending
// blocks wait for complete(). False, and nothing loaded, where blocks do not fill their segment.
inline bool Allocator::load(uint64_t base, uint64_t span, const kvobs_segment *segments, int64_t count,
                            const kvobs_block *blocks, std::vector<Block *> &live) {
    int64_t parts = 0;
    uint64_t end = base;
    for (int64_t at = 0; at < count; ++at) {
        const uint64_t start = static_cast<uint64_t>(segments[at].address);
        uint64_t place = start;
        for (int64_t part = 0; part < segments[at].blocks; ++part, ++parts) {
            if (static_cast<uint64_t>(blocks[parts].address) != place || blocks[parts].size <= 0) return false;
            place += static_cast<uint64_t>(blocks[parts].size);
        }
        if (start < end || place != start + static_cast<uint64_t>(segments[at].size)) return false;
        end = place;
    }
    const kvobs_segment &first = segments[0];
    Pool &home = pool_of(first.pool, first.small ? 1 : SMALL_SIZE + 1);
    if (first.expandable && end > base + span) return false;
    Range *range = first.expandable ? new Range{base, span, page_size(settings_, home.small)} : nullptr;
    Block *last = nullptr;
    uint64_t until = base;
    const kvobs_block *told = blocks;
    for (int64_t at = 0; at < count; ++at) {
        const kvobs_segment &segment = segments[at];
        if (range && until < static_cast<uint64_t>(segment.address))
            last = load_unmapped(home, last, segment.stream, until, static_cast<uint64_t>(segment.address), range);
        for (int64_t part = 0; part < segment.blocks; ++part, ++told) {
            Block *block = new_block(home, segment.stream, static_cast<uint64_t>(told->address),
                                     static_cast<uint64_t>(told->size), range);
            if (last) block->insert_after(last);
            last = block;
            if (told->state == KVOBS_INACTIVE) {
                add_free(block);
                continue;
            }
            block->requested = static_cast<uint64_t>(told->requested);
            block->allocated = told->state == KVOBS_ALLOCATED;
            block->pending = !block->allocated;
            stats_.requested += told->requested;
            stats_.active += told->size;
            if (block->allocated) stats_.allocated += told->size;
            live.push_back(block);
        }
        stats_.reserved += segment.size;
        until = static_cast<uint64_t>(segment.address + segment.size);
    }
    if (range && until < base + span) load_unmapped(home, last, first.stream, until, base + span, range);
    stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
    stats_.peak_allocated = std::max(stats_.peak_allocated, stats_.allocated);
    stats_.peak_active = std::max(stats_.peak_active, stats_.active);
    return true;
}

inline Block *Allocator::load_unmapped(Pool &home, Block *last, int64_t stream, uint64_t from, uint64_t until,
                                       Range *range) {
    Block *block = new_block(home, stream, from, until - from, range);
    block->mapped = false;
    if (last) block->insert_after(last);
    add_unmapped(block);
    return block;
}

inline bool Allocator::fits(uint64_t size, int64_t stream, int64_t pool) {
    const uint64_t rounded = round_size(settings_, size);
    return find(pool_of(pool, rounded), rounded, stream) != nullptr;
}

// Serve a request from the cache if that is where it would go; null, and nothing done, if it would not.
inline Block *Allocator::alloc_at(uint64_t address, uint64_t size, int64_t stream, int64_t pool) {
    const uint64_t rounded = round_size(settings_, size);
    Pool &home = pool_of(pool, rounded);
    const int64_t lookups = home.lookups;
    Block *block = ready_.empty() ? find(home, rounded, stream) : nullptr;
    if (!block || block->address != address) {
        home.lookups = lookups;
        return nullptr;
    }
    remove(block);
    return hand_out(block, size, rounded);
}

// Serve a request with memory of the device although the cache could.
inline Block *Allocator::alloc_from_device(uint64_t size, int64_t stream, int64_t pool) {
    const uint64_t rounded = round_size(settings_, size);
    Block *block = from_device(pool_of(pool, rounded), rounded, stream);
    return block ? hand_out(block, size, rounded) : nullptr;
}

// Put an allocation at this address; null: that is not within a free block of the stream.
inline Block *Allocator::place(uint64_t address, uint64_t size, int64_t stream) {
    Block *block = free_at(address);
    const uint64_t rounded = round_size(settings_, size);
    if (!block || block->stream != stream || block->address + block->size < address + rounded) return nullptr;
    remove(block);
    split_front(block, address);
    return hand_out(block, size, rounded);
}

// Leave what lies before an address as a free block of its own. The block is in no list, before and after.
inline void Allocator::split_front(Block *block, uint64_t address) {
    if (address == block->address) return;
    add_free(cut(block, address - block->address));
    remove(block);
}

inline void Allocator::release_for(uint64_t size, int64_t stream, int64_t pool) {
    const uint64_t rounded = round_size(settings_, size);
    release_available(pool_of(pool, rounded), rounded, stream);
}

// Move a range that was reserved where no recording told (and never mapped) to where it must have been.
inline void Allocator::settle(uint64_t address, int64_t stream, int64_t pool, bool small) {
    const auto found = private_.find(pool);
    if (pool != 0 && found == private_.end()) return;
    PoolPair &pair = pool == 0 ? default_ : found->second;
    for (const FreeKey &key : (small ? pair.small : pair.large).unmapped) {
        Block *block = key.block;
        if (block->stream != stream || block->address < NOWHERE || block->split()) continue;
        remove(block);
        block->address = block->range->base = address;
        add_unmapped(block);
        return;
    }
}

inline void Allocator::empty_pool(int64_t pool) {
    const auto found = private_.find(pool);
    if (found == private_.end() || !found->second.releasable()) return;
    release_unsplit(found->second.small);
    release_unsplit(found->second.large);
}

inline void Allocator::own_allocator(int64_t pool, bool has) {
    PoolPair &pair = private_.try_emplace(pool, pool, &nodes_).first->second;
    pair.small.plain = pair.large.plain = has;
}

inline bool Allocator::reserved_at(uint64_t address) const {
    for (const Block *block = all_; block; block = block->after)
        if (block->range && block->range->base <= address && address < block->range->base + block->range->size)
            return true;
    return false;
}

// The free block that this address lies in.
inline Block *Allocator::free_at(uint64_t address) const {
    for (Block *block = all_; block; block = block->after)
        if (block->mapped && block->idle() && block->address <= address && address < block->address + block->size)
            return block;
    return nullptr;
}

inline void Allocator::install(uint64_t address, uint64_t size, int64_t stream, int64_t pool, bool small) {
    add_free(new_block(pool_of(pool, small ? 1 : SMALL_SIZE + 1), stream, address, size));
    stats_.reserved += static_cast<int64_t>(size);
    stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
}

// Take away a segment that is wholly free; false: there is no such.
inline bool Allocator::remove_segment(uint64_t address, uint64_t size) {
    Block *block = free_at(address);
    if (!block || block->address != address || block->size != size || block->split() || block->range) return false;
    remove(block);
    stats_.reserved -= static_cast<int64_t>(size);
    drop(block);
    return true;
}

// Map pages of an expandable segment, of a new one if need be; false: they are mapped already.
inline bool Allocator::install_pages(uint64_t address, uint64_t size, int64_t stream, int64_t pool, bool small) {
    Pool &home = pool_of(pool, small ? 1 : SMALL_SIZE + 1);
    Block *block = nullptr;
    for (const FreeKey &key : home.unmapped) {
        Block *found = key.block;
        if (found->stream == stream && found->address <= address && address + size <= found->address + found->size) {
            block = found;
            break;
        }
    }
    if (!block) {
        if (reserved_at(address)) return false;
        const uint64_t page = page_size(settings_, small), span = round_up(UNLIMITED_RANGE, page);
        block = load_unmapped(home, nullptr, stream, address, address + span, new Range{address, span, page});
    }
    if (address > block->address) {
        remove(block);
        Block *front = new_block(home, stream, block->address, address - block->address, block->range);
        front->mapped = false;
        front->insert_before(block);
        block->address = address;
        block->size -= front->size;
        add_unmapped(front);
        add_unmapped(block);
    }
    return map_block(block, size);
}

// Unmap pages of an expandable segment that lie in a free block; false: they do not.
inline bool Allocator::remove_pages(uint64_t address, uint64_t size) {
    Block *block = free_at(address);
    if (!block || !block->range || block->address + block->size < address + size) return false;
    remove(block);
    split_front(block, address);
    if (block->size > size) block = cut(block, size);
    add_free(block);
    return unmap_block(block);
}

}  // namespace kvobs
