// Requests and frees.
#pragma once

#include <algorithm>

#include "allocator.hpp"

namespace kvobs {

// Four words, the tree's links and colour, come before a key in a set's node.
inline Allocator::Allocator(const Settings &settings, uint64_t capacity, const kvobs_device *callbacks)
    : settings_(settings), device_(capacity, callbacks), nodes_(sizeof(FreeKey) + 4 * sizeof(void *)),
      blocks_(sizeof(Block)), default_(0, &nodes_) {}

inline Allocator::~Allocator() {
    for (const Block *block = all_; block; block = block->after)
        if (!block->prev) delete block->range;  // once for each chain
    while (all_) drop(all_);
}

inline Block *Allocator::new_block(Pool &pool, int64_t stream, uint64_t address, uint64_t size, Range *range) {
    Block *block = new (blocks_.take()) Block(address, size, stream, &pool);
    block->range = range;
    block->after = all_;
    if (all_) all_->before = block;
    all_ = block;
    return block;
}

inline void Allocator::drop(Block *block) {
    (block->before ? block->before->after : all_) = block->after;
    if (block->after) block->after->before = block->before;
    block->~Block();
    blocks_.give(block);
}

inline void Allocator::add_free(Block *block) {
    block->freed_at = block->pool->lookups;
    block->place = block->pool->free.insert(
        FreeKey{static_cast<uint64_t>(block->stream), block->size, block->address, block});
}

inline void Allocator::add_unmapped(Block *block) {
    block->place = block->pool->unmapped.insert(
        FreeKey{static_cast<uint64_t>(block->stream), 0, block->address, block});
}

inline Block *Allocator::alloc(uint64_t size, int64_t stream, int64_t pool) {
    // Into a private pool means during a capture, when neither events may be asked nor the device be waited for.
    const bool capturing = pool != 0;
    if (!capturing) process_events();
    const uint64_t rounded = round_size(settings_, size);
    Pool &home = pool_of(pool, rounded);
    Block *block = find(home, rounded, stream);
    if (block) {
        remove(block);
    } else {
        collect_garbage();
        block = from_device(home, rounded, stream);
        if (!block && release_available(home, rounded, stream)) block = from_device(home, rounded, stream);
        if (!block && !capturing) {
            release_cached();
            ++stats_.retries;
            block = from_device(home, rounded, stream);
        }
        if (!block) {
            ++stats_.ooms;
            return nullptr;
        }
    }
    return hand_out(block, size, rounded);
}

inline Pool &Allocator::pool_of(int64_t pool, uint64_t rounded) {
    PoolPair *pair = &default_;
    if (pool != 0) {
        pair = &private_.try_emplace(pool, pool, &nodes_).first->second;
        if (pair->releasable()) pair->uses = 1;
    }
    return rounded <= SMALL_SIZE ? pair->small : pair->large;
}

// The smallest free block that is large enough, of equal ones that at the lowest address.
inline Block *Allocator::find(Pool &pool, uint64_t rounded, int64_t stream) {
    if (settings_.memory_fraction >= 0.0 && settings_.garbage_collection_threshold > 0.0) ++pool.lookups;
    const uint64_t on = static_cast<uint64_t>(stream);
    const FreeSet &free = pool.free;
    auto place = free.lower_bound(FreeKey{on, rounded, 0, nullptr});
    const auto ours = [&](FreeSet::const_iterator at) { return at != free.end() && at->stream == on; };
    if (!ours(place)) return nullptr;
    if (place->block->range) {
        if (expands(pool)) {
            // A block in front of unmapped addresses counts with the size that it can grow to.
            const auto growth = [](const Block *block) {
                return block->size + (block->next && !block->next->mapped ? block->next->size : 0);
            };
            for (auto next = std::next(place); place->block->range && ours(next) &&
                                               growth(next->block) < growth(place->block); ++next)
                place = next;
        } else {
            do ++place;
            while (ours(place) && place->block->range);
            if (!ours(place)) return nullptr;
        }
    }
    Block *block = place->block;
    const uint64_t limit = settings_.max_split_size;
    if (rounded < limit && block->size >= limit) return nullptr;
    if (rounded >= limit && block->size >= rounded + settings_.max_non_split_rounding) return nullptr;
    return block;
}

inline bool Allocator::splits(const Block *block, uint64_t rounded) const {
    const uint64_t remaining = block->size - rounded;
    if (block->pool->small || expands(*block->pool)) return remaining >= MIN_BLOCK;
    return rounded < settings_.max_split_size && remaining > SMALL_SIZE;
}

// Cut the first `size` bytes off a block; the rest goes to the free list.
inline Block *Allocator::cut(Block *rest, uint64_t size) {
    Block *block = new_block(*rest->pool, rest->stream, rest->address, size, rest->range);
    block->insert_before(rest);
    rest->address += size;
    rest->size -= size;
    add_free(rest);
    return block;
}

inline Block *Allocator::hand_out(Block *block, uint64_t size, uint64_t rounded) {
    const bool was_split = block->split();
    uint64_t rest = 0;
    if (splits(block, rounded)) {
        rest = block->size - rounded;
        block = cut(block, rounded);
    }
    block->allocated = true;
    block->requested = size;
    stats_.allocated += static_cast<int64_t>(block->size);
    stats_.active += static_cast<int64_t>(block->size);
    stats_.requested += static_cast<int64_t>(size);
    stats_.peak_allocated = std::max(stats_.peak_allocated, stats_.allocated);
    stats_.peak_active = std::max(stats_.peak_active, stats_.active);
    if (listener_) listener_->taken(*block, was_split, rest);
    return block;
}

inline Block *Allocator::from_device(Pool &pool, uint64_t rounded, int64_t stream) {
    const uint64_t size = segment_size(settings_, rounded);
    if (limited() && static_cast<uint64_t>(stats_.reserved) + size > allowed()) return nullptr;
    if (expands(pool)) return expand(pool, rounded, stream);
    const uint64_t address = device_.malloc(size);
    if (!address) return nullptr;
    grew(pool, stream, address, size);
    return new_block(pool, stream, address, size);
}

inline void Allocator::take_back(Block *block) {
    block->allocated = false;
    stats_.allocated -= static_cast<int64_t>(block->size);
    if (listener_) listener_->given_back(*block);
}

inline void Allocator::free(Block *block) {
    take_back(block);
    if (block->uses.empty()) return free_block(block);
    block->pending = true;
    for (int64_t stream : block->uses) {
        ++block->waits;
        queued_[stream].push_back(block);
    }
    block->uses.clear();
}

inline void Allocator::defer(Block *block) {
    take_back(block);
    block->uses.clear();
    block->pending = true;
}

inline void Allocator::record_stream(Block *block, int64_t stream) {
    if (stream == block->stream) return;
    if (std::find(block->uses.begin(), block->uses.end(), stream) == block->uses.end()) block->uses.push_back(stream);
}

// Blocks whose last stream has caught up become free at the next request, not before.
inline void Allocator::advance(int64_t stream) {
    const auto found = queued_.find(stream);
    if (found == queued_.end()) return;
    for (Block *block : found->second)
        if (--block->waits == 0) ready_.push_back(block);
    queued_.erase(found);
}

inline void Allocator::process_events() {
    for (Block *block : ready_) free_block(block);
    ready_.clear();
}

inline void Allocator::synchronize() {
    ++stats_.syncs;
    for (auto &entry : queued_)
        for (Block *block : entry.second)
            if (--block->waits == 0) ready_.push_back(block);
    queued_.clear();
    process_events();
}

inline void Allocator::free_block(Block *block) {
    block->pending = false;
    stats_.active -= static_cast<int64_t>(block->size);
    stats_.requested -= static_cast<int64_t>(block->requested);
    const uint64_t address = block->address, size = block->size;
    const uint64_t before = merge(block, block->prev), behind = merge(block, block->next);
    add_free(block);
    if (listener_) {
        const int64_t whole = block->split() ? static_cast<int64_t>(block->size) : 0;
        listener_->freed(*block, address, size, (whole > 0) - (before > 0) - (behind > 0),
                         whole - static_cast<int64_t>(before + behind));
    }
}

// Take in a neighbour that is free and of the same kind; its size, 0 if it is not.
inline uint64_t Allocator::merge(Block *block, Block *other) {
    if (!other || !other->idle() || other->mapped != block->mapped) return 0;
    const uint64_t size = other->size;
    remove(other);
    if (block->prev == other) {
        block->address = other->address;
        block->prev = other->prev;
        if (other->prev) other->prev->next = block;
    } else {
        block->next = other->next;
        if (other->next) other->next->prev = block;
    }
    block->size += size;
    drop(other);
    return size;
}

inline void Allocator::open_pool(int64_t pool) {
    const auto [found, made] = private_.try_emplace(pool, pool, &nodes_);
    if (!made) ++found->second.uses;
}

inline bool Allocator::release_pool(int64_t pool) {
    const auto found = private_.find(pool);
    if (found == private_.end()) return false;
    if (found->second.uses > 0) --found->second.uses;
    return true;
}

inline void Allocator::grew(const Pool &pool, int64_t stream, uint64_t address, uint64_t size, bool mapped) {
    ++stats_.device_allocs;
    stats_.reserved += static_cast<int64_t>(size);
    stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
    if (listener_) listener_->grew(pool, stream, address, size, mapped);
}

inline void Allocator::shrank(const Pool &pool, int64_t stream, uint64_t address, uint64_t size, bool mapped) {
    ++stats_.device_frees;
    stats_.reserved -= static_cast<int64_t>(size);
    if (listener_) listener_->shrank(pool, stream, address, size, mapped);
}

inline uint64_t Allocator::largest_free() const {
    uint64_t found = 0;
    const auto look = [&found](const FreeSet &free) {
        for (auto end = free.end(); end != free.begin();) {
            const auto last = std::prev(end);
            found = std::max(found, last->size);
            end = free.lower_bound(FreeKey{last->stream, 0, 0, nullptr});
        }
    };
    const auto both = [&look](const PoolPair &pair) {
        look(pair.small.free);
        look(pair.large.free);
    };
    both(default_);
    for (const auto &entry : private_) both(entry.second);
    return found;
}

inline std::vector<Block *> Allocator::heads() const {
    std::vector<Block *> found;
    for (Block *block = all_; block; block = block->after)
        if (block->mapped && (!block->prev || !block->prev->mapped)) found.push_back(block);
    std::sort(found.begin(), found.end(), [](const Block *one, const Block *two) {
        return one->address < two->address;
    });
    return found;
}

}  // namespace kvobs
