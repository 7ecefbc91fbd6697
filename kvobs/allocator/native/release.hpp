// Giving memory back to the device.
#pragma once

#include "allocator.hpp"

namespace kvobs {

// Free segments at least as old as the average, before the device is asked; only with a memory fraction.
inline void Allocator::collect_garbage() {
    if (!limited() || settings_.garbage_collection_threshold <= 0.0) return;
    const uint64_t threshold =
        static_cast<uint64_t>(settings_.garbage_collection_threshold * static_cast<double>(allowed()));
    while (static_cast<uint64_t>(stats_.reserved) > threshold && collect_oldest()) continue;
}

// Free the large free segments that are at least as old as their average; false: there are none.
inline bool Allocator::collect_oldest() {
    const Pool &pool = default_.large;
    std::vector<Block *> candidates;
    int64_t total_age = 0;
    for (const FreeKey &key : pool.free) {
        if (key.block->split() || key.block->range) continue;
        candidates.push_back(key.block);
        total_age += pool.lookups - key.block->freed_at;
    }
    const double limit = static_cast<double>(total_age) / static_cast<double>(candidates.size());
    for (Block *block : candidates)
        if (static_cast<double>(pool.lookups - block->freed_at) >= limit) release(block);
    return !candidates.empty();
}

// Return oversize blocks, just enough for the request; only with a max_split_size. What was released before it turned
// out not to be enough stays released.
inline bool Allocator::release_available(Pool &pool, uint64_t rounded, int64_t stream) {
    const uint64_t limit = settings_.max_split_size, on = static_cast<uint64_t>(stream);
    if (limit == KVOBS_UNLIMITED) return false;
    const uint64_t wanted = std::max(limit, rounded);
    auto place = pool.free.lower_bound(FreeKey{on, wanted, 0, nullptr});
    // A part of a segment cannot be released. One that large exists only where the limit was lowered meanwhile.
    const auto whole = [](const Block *block) { return !block->range && !block->split(); };
    if (place != pool.free.end() && place->stream == on && whole(place->block)) {
        release(place->block);
        return true;
    }
    uint64_t released = 0;
    while (released < wanted && place != pool.free.begin()) {
        --place;
        if (place->stream != on || place->size < limit) break;
        Block *block = place->block;
        if (!whole(block)) continue;
        ++place;  // past the block, which ends with its memory
        released += block->size;
        release(block);
    }
    return released >= wanted;
}

// Wait for every stream, then return all that is wholly free.
inline void Allocator::release_cached() {
    synchronize();
    release_unsplit(default_.large);
    release_unsplit(default_.small);
    for (auto &entry : private_) {
        if (!entry.second.releasable()) continue;
        release_unsplit(entry.second.small);
        release_unsplit(entry.second.large);
    }
}

inline void Allocator::release_unsplit(Pool &pool) {
    std::vector<Block *> whole, expandable;
    for (const FreeKey &key : pool.free) {
        if (key.block->range) expandable.push_back(key.block);
        else if (!key.block->split()) whole.push_back(key.block);
    }
    for (Block *block : whole) release(block);
    for (Block *block : expandable) unmap_block(block);
}

inline void Allocator::release(Block *block) {
    remove(block);
    device_.free(block->address, block->size);
    shrank(*block->pool, block->stream, block->address, block->size);
    drop(block);
}

}  // namespace kvobs
