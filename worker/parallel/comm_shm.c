/*
 * The pipe of comm_shm.h.
 *
 *  1. head counts bytes written, tail bytes read; both only grow; head - tail is what lies inside.
 *  2. Who finds the pipe empty (full) sets its waiting flag, looks again, and only then sleeps. Who
 *     moves bytes publishes its counter first and looks at the flag after. Both orders are
 *     sequentially consistent, so one of the two sees the other: no wake-up is lost.
 *  3. A peer that ends keeps the memory alive until both have unmapped it; its death is seen on
 *     the socket, never here.
 * Failures: no memfd or no memory is the caller's to handle (it falls back to TCP); a memfd that
 * cannot be opened, has another size, or lacks the cookie is refused. The memfd is sealed against
 * shrinking, so that a peer cannot make a mapped page vanish.
 */
#include "worker/parallel/comm_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"

enum { CAPACITY = 1 << 20, LINE = 64 };

struct pipe_mem {
    _Atomic uint64_t head;
    uint8_t pad0[LINE - sizeof(uint64_t)];
    _Atomic uint64_t tail;
    uint8_t pad1[LINE - sizeof(uint64_t)];
    _Atomic uint32_t reader_waits;
    _Atomic uint32_t writer_waits;
    uint8_t pad2[LINE - 2 * sizeof(uint32_t)];
    uint8_t data[CAPACITY];
};

struct shared {
    uint8_t cookie[MB_SHM_COOKIE_BYTES];
    uint8_t pad[LINE - MB_SHM_COOKIE_BYTES];
    struct pipe_mem dir[2]; /* dir[i]: written by side i */
};

struct mb_shm {
    struct shared *mem;
    int side;
};

static int map(int fd, int side, struct mb_shm **out, struct mb_err *err)
{
    struct mb_shm *s = mb_calloc(1, sizeof *s);
    if (s == NULL) {
        return mb_err_set(err, MB_ENOMEM, "shared memory: out of memory");
    }
    void *p = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        mb_free(s);
        return mb_err_sys(err, errno, "shared memory: mmap");
    }
    s->mem = p;
    s->side = side;
    *out = s;
    return 0;
}

int mb_shm_create(struct mb_shm **out, int *fd, uint8_t cookie[MB_SHM_COOKIE_BYTES],
                  struct mb_err *err)
{
    int f = memfd_create("mobula-comm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (f < 0) {
        return mb_err_sys(err, errno, "shared memory: memfd_create");
    }
    if (ftruncate(f, sizeof(struct shared)) != 0 ||
        fcntl(f, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        int rc = mb_err_sys(err, errno, "shared memory: sizing the memfd");
        close(f);
        return rc;
    }
    int rc = map(f, 0, out, err);
    if (rc != 0) {
        close(f);
        return rc;
    }
    mb_random_bytes(cookie, MB_SHM_COOKIE_BYTES);
    memcpy((*out)->mem->cookie, cookie, MB_SHM_COOKIE_BYTES);
    *fd = f;
    return 0;
}

int mb_shm_attach(int64_t pid, int fd, const uint8_t cookie[MB_SHM_COOKIE_BYTES],
                  struct mb_shm **out, struct mb_err *err)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%d", (long long)pid, fd);
    int f = open(path, O_RDWR | O_CLOEXEC);
    if (f < 0) {
        return mb_err_set(err, MB_EUNAVAIL, "shared memory: %s: %s", path, strerror(errno));
    }
    struct stat st;
    int seals = fcntl(f, F_GET_SEALS);
    int rc = 0;
    if (fstat(f, &st) != 0 || st.st_size != (off_t)sizeof(struct shared) || seals < 0 ||
        !(seals & F_SEAL_SHRINK)) {
        rc = mb_err_set(err, MB_EUNAVAIL, "shared memory: %s is not a pipe of this program", path);
    } else {
        rc = map(f, 1, out, err);
    }
    close(f);
    if (rc != 0) {
        return rc;
    }
    if (memcmp((*out)->mem->cookie, cookie, MB_SHM_COOKIE_BYTES) != 0) {
        mb_shm_destroy(*out);
        *out = NULL;
        return mb_err_set(err, MB_EUNAVAIL, "shared memory: %s belongs to another gang", path);
    }
    return 0;
}

void mb_shm_destroy(struct mb_shm *s)
{
    if (s != NULL) {
        munmap(s->mem, sizeof *s->mem);
        mb_free(s);
    }
}

size_t mb_shm_try_write(struct mb_shm *s, const void *p, size_t n, int *ring)
{
    struct pipe_mem *m = &s->mem->dir[s->side];
    uint64_t head = atomic_load_explicit(&m->head, memory_order_relaxed);
    uint64_t tail = atomic_load(&m->tail);
    size_t room = CAPACITY - (size_t)(head - tail);
    if (room > CAPACITY || (n = n < room ? n : room) == 0) {
        return 0;
    }
    size_t at = (size_t)(head % CAPACITY);
    size_t first = n < CAPACITY - at ? n : CAPACITY - at;
    memcpy(m->data + at, p, first);
    memcpy(m->data, (const uint8_t *)p + first, n - first);
    atomic_store(&m->head, head + n);
    if (atomic_load(&m->reader_waits) != 0 && atomic_exchange(&m->reader_waits, 0) != 0) {
        *ring = 1;
    }
    return n;
}

size_t mb_shm_try_read(struct mb_shm *s, void *p, size_t n, int *ring)
{
    struct pipe_mem *m = &s->mem->dir[1 - s->side];
    uint64_t tail = atomic_load_explicit(&m->tail, memory_order_relaxed);
    uint64_t head = atomic_load(&m->head);
    size_t inside = (size_t)(head - tail);
    if (inside > CAPACITY || (n = n < inside ? n : inside) == 0) {
        return 0;
    }
    size_t at = (size_t)(tail % CAPACITY);
    size_t first = n < CAPACITY - at ? n : CAPACITY - at;
    memcpy(p, m->data + at, first);
    memcpy((uint8_t *)p + first, m->data, n - first);
    atomic_store(&m->tail, tail + n);
    if (atomic_load(&m->writer_waits) != 0 && atomic_exchange(&m->writer_waits, 0) != 0) {
        *ring = 1;
    }
    return n;
}

int mb_shm_arm_write(struct mb_shm *s)
{
    struct pipe_mem *m = &s->mem->dir[s->side];
    atomic_store(&m->writer_waits, 1);
    return atomic_load(&m->head) - atomic_load(&m->tail) < CAPACITY;
}

int mb_shm_arm_read(struct mb_shm *s)
{
    struct pipe_mem *m = &s->mem->dir[1 - s->side];
    atomic_store(&m->reader_waits, 1);
    return atomic_load(&m->head) != atomic_load(&m->tail);
}
