/* C ABI of the allocator core. Sizes and addresses in bytes; streams and pools are the caller's own numbers.

   One instance belongs to one thread at a time: a caller with many threads holds its own mutex. Nothing is global and
   nothing is thrown. Every function that returns int returns one of the codes below. */
#ifndef KVOBS_CORE_H
#define KVOBS_CORE_H

#include <stdint.h>

#define KVOBS_ABI 2
#define KVOBS_INTERVALS 16
#define KVOBS_UNLIMITED UINT64_MAX

#ifdef __cplusplus
extern "C" {
#endif

enum kvobs_code {
    KVOBS_OK = 0,
    KVOBS_OUT_OF_MEMORY = 1,  /* the modelled device has no room; the instance stays usable */
    KVOBS_INVALID = -1,       /* an argument out of range; nothing was done */
    KVOBS_UNKNOWN = -2,       /* no such live address, or no such pool; nothing was done */
    KVOBS_BROKEN = -3         /* the host ran out of memory in the middle of a change: only destroy remains */
};

/* The operations of a program, as kvobs/allocator/program.py numbers them. */
enum kvobs_op {
    KVOBS_ALLOC, KVOBS_FREE, KVOBS_RECORD_STREAM, KVOBS_ADVANCE, KVOBS_EMPTY_CACHE, KVOBS_RELEASE_POOL, KVOBS_SET
};

/* kvobs/allocator/state.py numbers them. */
enum kvobs_state { KVOBS_INACTIVE, KVOBS_PENDING, KVOBS_ALLOCATED };

typedef struct {
    uint64_t max_split_size;          /* KVOBS_UNLIMITED: none */
    uint64_t max_non_split_rounding;
    uint64_t large_segment_size;
    double garbage_collection_threshold;
    double memory_fraction;           /* negative: not set */
    int64_t expandable_segments;      /* 0 or 1 */
    uint64_t roundup_power2_divisions[KVOBS_INTERVALS];
} kvobs_settings;

/* Where memory comes from. malloc and reserve return 0, and map returns 0, where there is none left; map takes all of
   the range or nothing. unreserve may be NULL. A callback must not call back into the same instance. */
typedef struct {
    void *user;
    uint64_t (*malloc)(void *user, uint64_t size);
    void (*free)(void *user, uint64_t address, uint64_t size);
    uint64_t (*reserve)(void *user, uint64_t size);
    void (*unreserve)(void *user, uint64_t address, uint64_t size);
    int (*map)(void *user, uint64_t address, uint64_t size);
    void (*unmap)(void *user, uint64_t address, uint64_t size);
} kvobs_device;

typedef struct {
    int64_t reserved, allocated, active, requested;
    int64_t peak_reserved, peak_allocated, peak_active;
    int64_t device_allocs, device_frees, retries, ooms, syncs;
} kvobs_stats;

typedef struct {
    int64_t address, size, stream, pool, small, expandable, blocks;
} kvobs_segment;

typedef struct {
    int64_t address, size, requested, state;
} kvobs_block;

typedef struct kvobs_core kvobs_core;

/* capacity: bytes of the device, 0 without limit. device NULL: a simulated one. NULL where an argument is out of
   range or the host has no memory. */
kvobs_core *kvobs_create(const kvobs_settings *settings, uint64_t capacity, const kvobs_device *device);
/* Device memory that is still held is not given back. */
void kvobs_destroy(kvobs_core *core);
int kvobs_abi(void);

int kvobs_alloc(kvobs_core *core, int64_t stream, int64_t pool, int64_t size, uint64_t *address);
int kvobs_free(kvobs_core *core, uint64_t address);
/* Free, but completed only by kvobs_complete. */
int kvobs_defer(kvobs_core *core, uint64_t address);
int kvobs_complete(kvobs_core *core, uint64_t address);
int kvobs_record_stream(kvobs_core *core, uint64_t address, int64_t stream);
int kvobs_advance(kvobs_core *core, int64_t stream);
int kvobs_empty_cache(kvobs_core *core);
int kvobs_open_pool(kvobs_core *core, int64_t pool);
int kvobs_release_pool(kvobs_core *core, int64_t pool);
int kvobs_set(kvobs_core *core, const kvobs_settings *settings);
int kvobs_get_stats(kvobs_core *core, kvobs_stats *stats);

/* The state in order of address: first ask for the numbers, then have the arrays filled. */
int kvobs_snapshot_size(kvobs_core *core, int64_t *segments, int64_t *blocks);
int kvobs_snapshot(kvobs_core *core, kvobs_segment *segments, kvobs_block *blocks);

/* A whole program (kvobs/allocator/program.py) on an instance. The last three columns are written, one entry an
   operation. *done tells how many operations were executed: on KVOBS_INVALID, the number of the refused one. */
int kvobs_run(kvobs_core *core, int64_t count, const uint8_t *op, const int64_t *handle, const int64_t *size,
              const int64_t *stream, const int32_t *pool, const kvobs_settings *settings, int64_t settings_count,
              uint64_t *address, int64_t *reserved, int64_t *allocated, int64_t *done);

/* What follows puts an instance where a recording says it was (kvobs/allocator/_forced.py says what each does).
   KVOBS_UNKNOWN: there is no such block, segment or page, and nothing was done.

   kvobs_load: one segment, or all mapped runs of one expandable segment, into an instance that has nothing there. */
int kvobs_load(kvobs_core *core, uint64_t base, uint64_t span, const kvobs_segment *segments, int64_t count,
               const kvobs_block *blocks);
int kvobs_finish(kvobs_core *core, uint64_t address);
int kvobs_fits(kvobs_core *core, int64_t stream, int64_t pool, int64_t size, int *fits);
int kvobs_alloc_from_device(kvobs_core *core, int64_t stream, int64_t pool, int64_t size, uint64_t *address);
int kvobs_place(kvobs_core *core, uint64_t address, int64_t size, int64_t stream);
int kvobs_release_for(kvobs_core *core, int64_t stream, int64_t pool, int64_t size);
int kvobs_settle(kvobs_core *core, uint64_t address, int64_t stream, int64_t pool, int small);
int kvobs_collect(kvobs_core *core, int *freed);
int kvobs_empty_pool(kvobs_core *core, int64_t pool);
int kvobs_own_allocator(kvobs_core *core, int64_t pool, int has);
int kvobs_install(kvobs_core *core, uint64_t address, int64_t size, int64_t stream, int64_t pool, int small);
int kvobs_remove(kvobs_core *core, uint64_t address, int64_t size);
int kvobs_install_pages(kvobs_core *core, uint64_t address, int64_t size, int64_t stream, int64_t pool, int small);
int kvobs_remove_pages(kvobs_core *core, uint64_t address, int64_t size);

/* kvobs/allocator/script.py numbers them. */
enum kvobs_step { KVOBS_STEP_ALLOC, KVOBS_STEP_FREE, KVOBS_STEP_DEFER, KVOBS_STEP_COMPLETE };

/* Replay the steps of a script (its columns, from their beginning) from `start` until `stop`, or until the first one
   that is more than taking from and giving to the cache exactly as recorded: *reached is that step, of which nothing
   was done. *placed counts the requests. The last three columns are written, from their
   beginning: bytes reserved, allocated and active after each of these steps. */
int kvobs_follow(kvobs_core *core, int64_t start, int64_t stop, const uint8_t *step, const uint64_t *address,
                 const int64_t *size, const int64_t *stream, const int32_t *pool, const int64_t *first,
                 int64_t *reserved, int64_t *allocated, int64_t *active, int64_t *reached, int64_t *placed);

#ifdef __cplusplus
}
#endif
#endif
