// Blocks, the sets of free ones, and where both are stored.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <set>
#include <vector>

#include "settings.hpp"

namespace kvobs {

// Cells of one size, handed out again most recently freed first; given back to the host only all at once.
class Cells {
public:
    explicit Cells(std::size_t size) : size_((size + alignof(std::max_align_t) - 1) / alignof(std::max_align_t) *
                                             alignof(std::max_align_t)) {}
    std::size_t size() const { return size_; }

    void *take() {
        if (!free_) grow();
        void *cell = free_;
        free_ = *static_cast<void **>(cell);
        return cell;
    }

    void give(void *cell) {
        *static_cast<void **>(cell) = free_;
        free_ = cell;
    }

private:
    static constexpr std::size_t CHUNK = 512;

    void grow() {
        chunks_.emplace_back(new std::max_align_t[size_ * CHUNK / sizeof(std::max_align_t)]);
        char *base = reinterpret_cast<char *>(chunks_.back().get());
        for (std::size_t index = CHUNK; index-- > 0;) give(base + index * size_);
    }

    std::size_t size_;
    void *free_ = nullptr;
    std::vector<std::unique_ptr<std::max_align_t[]>> chunks_;
};

// A standard allocator over Cells, for the nodes of sets.
template <class T> struct CellAllocator {
    using value_type = T;
    Cells *cells;

    explicit CellAllocator(Cells *from) : cells(from) {}
    template <class U> CellAllocator(const CellAllocator<U> &other) : cells(other.cells) {}

    T *allocate(std::size_t count) {
        if (count == 1 && sizeof(T) <= cells->size()) return static_cast<T *>(cells->take());
        return static_cast<T *>(::operator new(count * sizeof(T)));
    }
    void deallocate(T *cell, std::size_t count) {
        if (count == 1 && sizeof(T) <= cells->size()) cells->give(cell);
        else ::operator delete(cell);
    }
    template <class U> bool operator==(const CellAllocator<U> &other) const { return cells == other.cells; }
    template <class U> bool operator!=(const CellAllocator<U> &other) const { return cells != other.cells; }
};

struct Block;

// The order in which free blocks are searched. Streams compare as pointers do.
struct FreeKey {
    uint64_t stream, size, address;
    Block *block;
    bool operator<(const FreeKey &other) const {
        if (stream != other.stream) return stream < other.stream;
        if (size != other.size) return size < other.size;
        return address < other.address;
    }
};

// Unmapped ranges are searched by address: their keys have size 0. Keys are unique, except after a load of a state in
// which segments overlap.
using FreeSet = std::multiset<FreeKey, std::less<FreeKey>, CellAllocator<FreeKey>>;

struct Pool {
    Pool(bool is_small, int64_t pool_id, Cells *cells)
        : small(is_small), id(pool_id), free(CellAllocator<FreeKey>(cells)), unmapped(CellAllocator<FreeKey>(cells)) {}
    const bool small;
    const int64_t id;
    bool plain = false;   // its memory comes from an allocator of its own, which knows no pages
    int64_t lookups = 0;  // searches of this pool, counted only while garbage collection is on
    FreeSet free;
    FreeSet unmapped;
};

// A reserved range of addresses, of which whole pages are mapped.
struct Range {
    uint64_t base, size, page;
};

struct Block {
    uint64_t address, size, requested = 0;
    int64_t stream;
    Pool *pool;
    Block *prev = nullptr, *next = nullptr;  // neighbours of the same segment, mapped or not
    Block *before = nullptr, *after = nullptr;  // neighbours in the allocator's list of all blocks
    Range *range = nullptr;                  // of an expandable segment
    FreeSet::iterator place;                 // in pool->free or pool->unmapped while it is in one of them
    int64_t freed_at = 0;                    // pool->lookups when it became free
    int64_t waits = 0;                       // streams that keep it pending
    bool allocated = false, mapped = true, pending = false;
    std::vector<int64_t> uses;               // other streams that recorded a use

    Block(uint64_t at, uint64_t bytes, int64_t on, Pool *in) : address(at), size(bytes), stream(on), pool(in) {}
    bool split() const { return prev || next; }
    bool idle() const { return !allocated && !pending; }

    // Become the link in front of another block of the segment, or behind it.
    void insert_before(Block *other) {
        prev = other->prev;
        next = other;
        if (prev) prev->next = this;
        other->prev = this;
    }
    void insert_after(Block *other) {
        prev = other;
        next = other->next;
        if (next) next->prev = this;
        other->next = this;
    }
};

// Two sets of one pool id: requests up to 1 MiB, and larger ones.
struct PoolPair {
    PoolPair(int64_t id, Cells *cells) : small(true, id, cells), large(false, id, cells) {}
    Pool small, large;
    int64_t uses = 1;
    bool releasable() const { return uses == 0; }
};

}  // namespace kvobs
