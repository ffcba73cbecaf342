#include "tests/unit/worker/comm_world.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

atomic_int comm_world_wrong;

struct member {
    const struct comm_world *w;
    struct mb_comm_listener *l;
    const char *const *endpoints;
    int rc;
};

static void *member_main(void *arg)
{
    struct member *m = arg;
    struct mb_comm *c = NULL;
    struct mb_err err;
    m->rc = mb_comm_connect(m->l, m->endpoints, m->w->n, &c, &err);
    if (m->rc != 0) {
        fprintf(stderr, "connect: %s\n", err.text);
        return NULL;
    }
    m->w->body(c, m->w->arg);
    if (!m->w->body_destroys) {
        mb_comm_destroy(c);
    }
    return NULL;
}

int comm_world_run(const struct comm_world *w)
{
    struct member members[8];
    const char *endpoints[8];
    pthread_t threads[8];
    memset(members, 0, sizeof members);
    for (uint32_t r = 0; r < w->n; r++) {
        struct mb_comm_options o = {.rank = r,
                                    .world_size = w->n,
                                    .timeout_ms = w->timeout_ms,
                                    .no_shared_memory = (int)(w->tcp_only >> r & 1)};
        struct mb_err err;
        members[r].w = w;
        members[r].endpoints = endpoints;
        if (mb_comm_listen(&o, &members[r].l, &err) != 0) {
            fprintf(stderr, "listen: %s\n", err.text);
            return -1;
        }
        endpoints[r] = mb_comm_listener_endpoint(members[r].l);
    }
    int rc = 0;
    for (uint32_t r = 0; r < w->n; r++) {
        pthread_create(&threads[r], NULL, member_main, &members[r]);
    }
    for (uint32_t r = 0; r < w->n; r++) {
        pthread_join(threads[r], NULL);
        mb_comm_listener_destroy(members[r].l);
        rc |= members[r].rc;
    }
    return rc == 0 ? 0 : -1;
}

/* The thread sanitizer has one of its own from the first other one on. */
#if defined(__SANITIZE_THREAD__)
enum { THREADS_ALONE = 2 };
#else
enum { THREADS_ALONE = 1 };
#endif

int comm_world_is_alone(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/task");
    CHECK(d != NULL);
    for (struct dirent *e = d != NULL ? readdir(d) : NULL; e != NULL; e = readdir(d)) {
        n += e->d_name[0] != '.';
    }
    if (d != NULL) {
        closedir(d);
    }
    return n <= THREADS_ALONE;
}
