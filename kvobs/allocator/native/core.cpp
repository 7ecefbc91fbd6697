// The C ABI over the allocator: checks arguments, keeps exceptions inside, finds blocks by address.
#include "kvobs_core.h"

#include <new>
#include <unordered_map>
#include <vector>

#include "allocator.hpp"

using kvobs::Allocator;
using kvobs::Block;

struct kvobs_core {
    Allocator allocator;
    std::unordered_map<uint64_t, Block *> live;  // allocated, or deferred and not completed
    bool broken = false;

    kvobs_core(const kvobs_settings &settings, uint64_t capacity, const kvobs_device *device)
        : allocator(settings, capacity, device) {}

    Block *allocated(uint64_t address) const {
        const auto found = live.find(address);
        return found != live.end() && found->second->allocated ? found->second : nullptr;
    }
};

namespace {

bool valid_size(int64_t size) { return size >= 0 && static_cast<uint64_t>(size) < kvobs::SIZE_LIMIT; }

// Run a change; if the host runs out of memory in the middle of it, the instance can no longer be trusted.
template <class Change> int guarded(kvobs_core *core, Change change) {
    if (!core) return KVOBS_INVALID;
    if (core->broken) return KVOBS_BROKEN;
    try {
        return change(core->allocator);
    } catch (...) {
        core->broken = true;
        return KVOBS_BROKEN;
    }
}

// The columns of a program and of its outcome, and the allocations by their names.
struct Run {
    const uint8_t *op;
    const int64_t *handle, *size, *stream;
    const int32_t *pool;
    const kvobs_settings *settings;
    int64_t count, settings_count;
    uint64_t *address;
    std::vector<Block *> blocks;
    std::vector<char> used;

    // The block of an operation on a handle: null where its allocation failed.
    bool on_block(int64_t index, Block *&block) const {
        const int64_t name = handle[index];
        if (name < 0 || name >= count || !used[name]) return false;
        block = blocks[name];
        return used[name] != FREED;
    }

    int step(Allocator &allocator, int64_t index) {
        Block *block = nullptr;
        switch (op[index]) {
        case KVOBS_ALLOC: {
            const int64_t name = handle[index];
            if (name < 0 || name >= count || used[name] || !valid_size(size[index])) return KVOBS_INVALID;
            block = allocator.alloc(static_cast<uint64_t>(size[index]), stream[index], pool[index]);
            used[name] = TAKEN;
            blocks[name] = block;
            if (block) address[index] = block->address;
            return KVOBS_OK;
        }
        case KVOBS_FREE:
            if (!on_block(index, block)) return KVOBS_INVALID;
            if (!block) return KVOBS_OK;
            used[handle[index]] = FREED;
            blocks[handle[index]] = nullptr;
            allocator.free(block);
            return KVOBS_OK;
        case KVOBS_RECORD_STREAM:
            if (!on_block(index, block)) return KVOBS_INVALID;
            if (block) allocator.record_stream(block, stream[index]);
            return KVOBS_OK;
        case KVOBS_ADVANCE:
            allocator.advance(stream[index]);
            return KVOBS_OK;
        case KVOBS_EMPTY_CACHE:
            allocator.empty_cache();
            return KVOBS_OK;
        case KVOBS_RELEASE_POOL:
            allocator.release_pool(pool[index]);
            return KVOBS_OK;
        case KVOBS_SET:
            if (handle[index] < 0 || handle[index] >= settings_count || !kvobs::valid(settings[handle[index]]))
                return KVOBS_INVALID;
            allocator.set(settings[handle[index]]);
            return KVOBS_OK;
        default:
            return KVOBS_INVALID;
        }
    }

    static constexpr char TAKEN = 1, FREED = 2;
};

}  // namespace

extern "C" {

int kvobs_abi(void) { return KVOBS_ABI; }

kvobs_core *kvobs_create(const kvobs_settings *settings, uint64_t capacity, const kvobs_device *device) {
    if (!settings || !kvobs::valid(*settings) || capacity >= kvobs::SIZE_LIMIT) return nullptr;
    if (device && !(device->malloc && device->free && device->reserve && device->map && device->unmap)) return nullptr;
    try {
        return new kvobs_core(*settings, capacity, device);
    } catch (...) {
        return nullptr;
    }
}

void kvobs_destroy(kvobs_core *core) { delete core; }

int kvobs_alloc(kvobs_core *core, int64_t stream, int64_t pool, int64_t size, uint64_t *address) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!address || !valid_size(size)) return KVOBS_INVALID;
        Block *block = allocator.alloc(static_cast<uint64_t>(size), stream, pool);
        if (!block) return KVOBS_OUT_OF_MEMORY;
        core->live[block->address] = block;
        *address = block->address;
        return KVOBS_OK;
    });
}

int kvobs_free(kvobs_core *core, uint64_t address) {
    return guarded(core, [&](Allocator &allocator) -> int {
        Block *block = core->allocated(address);
        if (!block) return KVOBS_UNKNOWN;
        core->live.erase(address);
        allocator.free(block);
        return KVOBS_OK;
    });
}

int kvobs_defer(kvobs_core *core, uint64_t address) {
    return guarded(core, [&](Allocator &allocator) -> int {
        Block *block = core->allocated(address);
        if (!block) return KVOBS_UNKNOWN;
        allocator.defer(block);
        return KVOBS_OK;
    });
}

int kvobs_complete(kvobs_core *core, uint64_t address) {
    return guarded(core, [&](Allocator &allocator) -> int {
        const auto found = core->live.find(address);
        if (found == core->live.end() || !found->second->pending) return KVOBS_UNKNOWN;
        Block *block = found->second;
        core->live.erase(found);
        allocator.complete(block);
        return KVOBS_OK;
    });
}

int kvobs_record_stream(kvobs_core *core, uint64_t address, int64_t stream) {
    return guarded(core, [&](Allocator &allocator) -> int {
        Block *block = core->allocated(address);
        if (!block) return KVOBS_UNKNOWN;
        allocator.record_stream(block, stream);
        return KVOBS_OK;
    });
}

int kvobs_advance(kvobs_core *core, int64_t stream) {
    return guarded(core, [&](Allocator &allocator) -> int {
        allocator.advance(stream);
        return KVOBS_OK;
    });
}

int kvobs_empty_cache(kvobs_core *core) {
    return guarded(core, [&](Allocator &allocator) -> int {
        allocator.empty_cache();
        return KVOBS_OK;
    });
}

int kvobs_open_pool(kvobs_core *core, int64_t pool) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (pool == 0) return KVOBS_INVALID;
        allocator.open_pool(pool);
        return KVOBS_OK;
    });
}

int kvobs_release_pool(kvobs_core *core, int64_t pool) {
    return guarded(core, [&](Allocator &allocator) -> int {
        return allocator.release_pool(pool) ? KVOBS_OK : KVOBS_UNKNOWN;
    });
}

int kvobs_set(kvobs_core *core, const kvobs_settings *settings) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!settings || !kvobs::valid(*settings)) return KVOBS_INVALID;
        allocator.set(*settings);
        return KVOBS_OK;
    });
}

int kvobs_get_stats(kvobs_core *core, kvobs_stats *stats) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!stats) return KVOBS_INVALID;
        *stats = allocator.stats();
        return KVOBS_OK;
    });
}

int kvobs_snapshot_size(kvobs_core *core, int64_t *segments, int64_t *blocks) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (!segments || !blocks) return KVOBS_INVALID;
        *segments = *blocks = 0;
        for (const Block *head : allocator.heads()) {
            ++*segments;
            for (const Block *block = head; block && block->mapped; block = block->next) ++*blocks;
        }
        return KVOBS_OK;
    });
}

int kvobs_snapshot(kvobs_core *core, kvobs_segment *segments, kvobs_block *blocks) {
    return guarded(core, [&](Allocator &allocator) -> int {
        const std::vector<Block *> heads = allocator.heads();
        if (!heads.empty() && (!segments || !blocks)) return KVOBS_INVALID;
        for (const Block *head : heads) {
            kvobs_segment &segment = *segments++;
            segment = {static_cast<int64_t>(head->address), 0, head->stream, head->pool->id, head->pool->small,
                       head->range != nullptr, 0};
            for (const Block *block = head; block && block->mapped; block = block->next) {
                segment.size += static_cast<int64_t>(block->size);
                ++segment.blocks;
                *blocks++ = {static_cast<int64_t>(block->address), static_cast<int64_t>(block->size),
                             block->idle() ? 0 : static_cast<int64_t>(block->requested),
                             block->allocated ? KVOBS_ALLOCATED : block->pending ? KVOBS_PENDING : KVOBS_INACTIVE};
            }
        }
        return KVOBS_OK;
    });
}

int kvobs_run(kvobs_core *core, int64_t count, const uint8_t *op, const int64_t *handle, const int64_t *size,
              const int64_t *stream, const int32_t *pool, const kvobs_settings *settings, int64_t settings_count,
              uint64_t *address, int64_t *reserved, int64_t *allocated, int64_t *done) {
    return guarded(core, [&](Allocator &allocator) -> int {
        if (count < 0 || settings_count < 0 || !done || (settings_count && !settings)) return KVOBS_INVALID;
        *done = 0;
        if (count && !(op && handle && size && stream && pool && address && reserved && allocated))
            return KVOBS_INVALID;
        Run run{op, handle, size, stream, pool, settings, count, settings_count, address, {}, {}};
        run.blocks.resize(static_cast<std::size_t>(count));
        run.used.resize(static_cast<std::size_t>(count));
        int code = KVOBS_OK;
        const kvobs_stats &stats = allocator.stats();
        for (int64_t index = 0; index < count && code == KVOBS_OK; ++index) {
            address[index] = 0;
            code = run.step(allocator, index);
            reserved[index] = stats.reserved;
            allocated[index] = stats.allocated;
            *done = code == KVOBS_OK ? index + 1 : index;
        }
        for (Block *block : run.blocks)
            if (block) core->live[block->address] = block;
        return code;
    });
}

}  // extern "C"

#include "forced_abi.hpp"
