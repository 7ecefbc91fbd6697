// PyTorch's CUDA caching allocator as a model; kvobs/allocator/twin.py is the same in Python, and readable.
#pragma once

#include <map>
#include <unordered_map>

#include "blocks.hpp"
#include "device.hpp"

namespace kvobs {

// Told of every change, at the moment when PyTorch's allocator counts and records it. It must not call back.
struct Listener {
    virtual ~Listener() = default;
    // Handed out; it was a part of a segment before, and so many bytes were cut off behind it (0: none).
    virtual void taken(const Block &block, bool was_split, uint64_t rest) = 0;
    virtual void given_back(const Block &block) = 0;
    // Free, and merged with its neighbours; address and size are those before. Bytes and number of inactive parts of
    // segments changed by this much.
    virtual void freed(const Block &block, uint64_t address, uint64_t size, int64_t parts, int64_t part_bytes) = 0;
    virtual void grew(const Pool &pool, int64_t stream, uint64_t address, uint64_t size, bool mapped) = 0;
    virtual void shrank(const Pool &pool, int64_t stream, uint64_t address, uint64_t size, bool mapped) = 0;
};

class Allocator {
public:
    Allocator(const Settings &settings, uint64_t capacity, const kvobs_device *callbacks);
    ~Allocator();
    Allocator(const Allocator &) = delete;
    Allocator &operator=(const Allocator &) = delete;

    // Null: out of memory.
    Block *alloc(uint64_t size, int64_t stream, int64_t pool);
    void free(Block *block);
    void defer(Block *block);
    void complete(Block *block) { free_block(block); }
    void record_stream(Block *block, int64_t stream);
    void advance(int64_t stream);
    void empty_cache() { release_cached(); }
    void open_pool(int64_t pool);
    bool release_pool(int64_t pool);
    void set(const Settings &settings) { settings_ = settings; }
    void listen(Listener *listener) { listener_ = listener; }
    const Settings &settings() const { return settings_; }
    // The largest free block of any stream and pool.
    uint64_t largest_free() const;

    // forced.hpp: told instead of asked
    bool load(uint64_t base, uint64_t span, const kvobs_segment *segments, int64_t count, const kvobs_block *blocks,
              std::vector<Block *> &live);
    bool fits(uint64_t size, int64_t stream, int64_t pool);
    Block *alloc_at(uint64_t address, uint64_t size, int64_t stream, int64_t pool);
    Block *alloc_from_device(uint64_t size, int64_t stream, int64_t pool);
    Block *place(uint64_t address, uint64_t size, int64_t stream);
    void release_for(uint64_t size, int64_t stream, int64_t pool);
    void settle(uint64_t address, int64_t stream, int64_t pool, bool small);
    bool collect() { return collect_oldest(); }
    void empty_pool(int64_t pool);
    void own_allocator(int64_t pool, bool has);
    void install(uint64_t address, uint64_t size, int64_t stream, int64_t pool, bool small);
    bool remove_segment(uint64_t address, uint64_t size);
    bool install_pages(uint64_t address, uint64_t size, int64_t stream, int64_t pool, bool small);
    bool remove_pages(uint64_t address, uint64_t size);

    const kvobs_stats &stats() const { return stats_; }
    // The first blocks of every mapped run, in order of address.
    std::vector<Block *> heads() const;

private:
    // alloc.hpp
    Pool &pool_of(int64_t pool, uint64_t rounded);
    Block *find(Pool &pool, uint64_t rounded, int64_t stream);
    bool expands(const Pool &pool) const { return settings_.expandable_segments && !pool.plain; }
    bool splits(const Block *block, uint64_t rounded) const;
    Block *cut(Block *rest, uint64_t size);
    Block *hand_out(Block *block, uint64_t size, uint64_t rounded);
    Block *from_device(Pool &pool, uint64_t rounded, int64_t stream);
    void take_back(Block *block);
    void free_block(Block *block);
    uint64_t merge(Block *block, Block *other);
    void process_events();
    void synchronize();

    // release.hpp
    bool limited() const { return settings_.memory_fraction >= 0.0 && device_.capacity(); }
    uint64_t allowed() const {
        return static_cast<uint64_t>(settings_.memory_fraction * static_cast<double>(device_.capacity()));
    }
    void collect_garbage();
    bool collect_oldest();
    bool release_available(Pool &pool, uint64_t rounded, int64_t stream);
    void release_cached();
    void release_unsplit(Pool &pool);
    void release(Block *block);

    // expandable.hpp
    Block *expand(Pool &pool, uint64_t size, int64_t stream);
    Block *room(Pool &pool, uint64_t size, int64_t stream);
    bool map_block(Block *block, uint64_t size);
    bool unmap_block(Block *block);

    Block *free_at(uint64_t address) const;
    bool reserved_at(uint64_t address) const;
    void split_front(Block *block, uint64_t address);
    Block *load_unmapped(Pool &home, Block *last, int64_t stream, uint64_t from, uint64_t until, Range *range);

    Block *new_block(Pool &pool, int64_t stream, uint64_t address, uint64_t size, Range *range = nullptr);
    void drop(Block *block);
    void add_free(Block *block);
    void add_unmapped(Block *block);
    static void remove(Block *block) {
        (block->mapped ? block->pool->free : block->pool->unmapped).erase(block->place);
    }
    void grew(const Pool &pool, int64_t stream, uint64_t address, uint64_t size, bool mapped = false);
    void shrank(const Pool &pool, int64_t stream, uint64_t address, uint64_t size, bool mapped = false);

    Settings settings_;
    Device device_;
    kvobs_stats stats_{};
    Listener *listener_ = nullptr;
    Cells nodes_;  // of the sets below: it must outlive them
    Cells blocks_;
    Block *all_ = nullptr;  // every block, mapped or not
    PoolPair default_;
    std::map<int64_t, PoolPair> private_;
    std::unordered_map<int64_t, std::vector<Block *>> queued_;  // per stream, blocks that wait for it
    std::vector<Block *> ready_;  // pending blocks whose streams have caught up
};

}  // namespace kvobs

#include "alloc.hpp"
#include "expandable.hpp"
#include "forced.hpp"
#include "release.hpp"
