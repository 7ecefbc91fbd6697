// The C ABI over forced.hpp; a part of core.cpp.
#pragma once

namespace {

bool valid_range(uint64_t address, int64_t size) {
    return valid_size(size) && size > 0 && address < kvobs::ADDRESS_LIMIT;
}

}  // namespace

extern "C" {

int kvobs_load(kvobs_core *core, uint64_t base, uint64_t span, const kvobs_segment *segments, int64_t count,
               const kvobs_block *blocks) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!segments || count < 1 || !blocks || base >= kvobs::ADDRESS_LIMIT || span >= kvobs::ADDRESS_LIMIT)
            return KVOBS_INVALID;
        std::vector<Block *> live;
        if (!allocator.load(base, span, segments, count, blocks, live)) return KVOBS_INVALID;
        for (Block *block : live) core->live[block->address] = block;
        return KVOBS_OK;
    });
}

int kvobs_finish(kvobs_core *core, uint64_t address) {
    return guarded(core, [&](Allocator &allocator) -> int {
        const auto found = core->live.find(address);
        if (found == core->live.end()) return KVOBS_UNKNOWN;
        Block *block = found->second;
        core->live.erase(found);
        if (block->allocated) allocator.defer(block);
        allocator.complete(block);
        return KVOBS_OK;
    });
}

int kvobs_fits(kvobs_core *core, int64_t stream, int64_t pool, int64_t size, int *fits) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!fits || !valid_size(size)) return KVOBS_INVALID;
        *fits = allocator.fits(static_cast<uint64_t>(size), stream, pool);
        return KVOBS_OK;
    });
}

int kvobs_alloc_from_device(kvobs_core *core, int64_t stream, int64_t pool, int64_t size, uint64_t *address) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!address || !valid_size(size)) return KVOBS_INVALID;
        Block *block = allocator.alloc_from_device(static_cast<uint64_t>(size), stream, pool);
        if (!block) return KVOBS_OUT_OF_MEMORY;
        core->live[block->address] = block;
        *address = block->address;
        return KVOBS_OK;
    });
}

int kvobs_place(kvobs_core *core, uint64_t address, int64_t size, int64_t stream) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!valid_size(size)) return KVOBS_INVALID;
        Block *block = allocator.place(address, static_cast<uint64_t>(size), stream);
        if (!block) return KVOBS_UNKNOWN;
        core->live[block->address] = block;
        return KVOBS_OK;
    });
}

int kvobs_release_for(kvobs_core *core, int64_t stream, int64_t pool, int64_t size) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!valid_size(size)) return KVOBS_INVALID;
        allocator.release_for(static_cast<uint64_t>(size), stream, pool);
        return KVOBS_OK;
    });
}

int kvobs_settle(kvobs_core *core, uint64_t address, int64_t stream, int64_t pool, int small) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (address >= kvobs::ADDRESS_LIMIT) return KVOBS_INVALID;
        allocator.settle(address, stream, pool, small != 0);
        return KVOBS_OK;
    });
}

int kvobs_collect(kvobs_core *core, int *freed) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!freed) return KVOBS_INVALID;
        *freed = allocator.collect();
        return KVOBS_OK;
    });
}

int kvobs_empty_pool(kvobs_core *core, int64_t pool) {
    return guarded(core, [&](Allocator &allocator) -> int {
        allocator.empty_pool(pool);
        return KVOBS_OK;
    });
}

int kvobs_own_allocator(kvobs_core *core, int64_t pool, int has) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (pool == 0) return KVOBS_INVALID;
        allocator.own_allocator(pool, has != 0);
        return KVOBS_OK;
    });
}

int kvobs_install(kvobs_core *core, uint64_t address, int64_t size, int64_t stream, int64_t pool, int small) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!valid_range(address, size)) return KVOBS_INVALID;
        allocator.install(address, static_cast<uint64_t>(size), stream, pool, small != 0);
        return KVOBS_OK;
    });
}

int kvobs_remove(kvobs_core *core, uint64_t address, int64_t size) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!valid_size(size)) return KVOBS_INVALID;
        return allocator.remove_segment(address, static_cast<uint64_t>(size)) ? KVOBS_OK : KVOBS_UNKNOWN;
    });
}

int kvobs_install_pages(kvobs_core *core, uint64_t address, int64_t size, int64_t stream, int64_t pool, int small) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!valid_range(address, size)) return KVOBS_INVALID;
        return allocator.install_pages(address, static_cast<uint64_t>(size), stream, pool, small != 0) ? KVOBS_OK
                                                                                                       : KVOBS_UNKNOWN;
    });
}

int kvobs_remove_pages(kvobs_core *core, uint64_t address, int64_t size) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!valid_range(address, size)) return KVOBS_INVALID;
        return allocator.remove_pages(address, static_cast<uint64_t>(size)) ? KVOBS_OK : KVOBS_UNKNOWN;
    });
}

int kvobs_follow(kvobs_core *core, int64_t start, int64_t stop, const uint8_t *step, const uint64_t *address,
                 const int64_t *size, const int64_t *stream, const int32_t *pool, const int64_t *first,
                 int64_t *reserved, int64_t *allocated, int64_t *active, int64_t *reached, int64_t *placed) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!reached || !placed || start < 0 || stop < start) return KVOBS_INVALID;
        *reached = start;
        *placed = 0;
        if (stop > start && !(step && address && size && stream && pool && first && reserved && allocated && active))
            return KVOBS_INVALID;
        const kvobs_stats &stats = allocator.stats();
        for (int64_t at = start; at < stop; ++at) {
            if (step[at] == KVOBS_STEP_ALLOC) {
                if (first[at] != first[at + 1] || !valid_size(size[at])) return KVOBS_OK;
                Block *block =
                    allocator.alloc_at(address[at], static_cast<uint64_t>(size[at]), stream[at], pool[at]);
                if (!block) return KVOBS_OK;
                core->live[address[at]] = block;
                ++*placed;
            } else {
                const auto found = core->live.find(address[at]);
                if (found == core->live.end()) return KVOBS_OK;
                Block *block = found->second;
                if (step[at] == KVOBS_STEP_COMPLETE) {
                    core->live.erase(found);
                    if (block->allocated) allocator.defer(block);
                    allocator.complete(block);
                } else if (!block->allocated) {
                    return KVOBS_OK;
                } else if (step[at] == KVOBS_STEP_FREE) {
                    core->live.erase(found);
                    allocator.free(block);
                } else if (step[at] == KVOBS_STEP_DEFER) {
                    allocator.defer(block);
                } else {
                    return KVOBS_OK;
                }
            }
            reserved[at - start] = stats.reserved;
            allocated[at - start] = stats.allocated;
            active[at - start] = stats.active;
            *reached = at + 1;
        }
        return KVOBS_OK;
    });
}

}  // extern "C"
