/*
 * The memory plan of this gang: printed, compared with what there is, refused.
 *
 *  1. Every rank plans for its node and asks what its device and its host have left, before any of
 *     them takes anything.
 *  2. They tell each other need and room, estimates left out of the need: a run that would work is
 *     not refused for a guess. Where it does not fit all of them know, and make the same
 *     line of the numbers of the node that lacks most; rank 0 prints it, and all end, none before
 *     the others know.
 * Failures: a layout that the model cannot have; a peer that is gone.
 */
#include "worker/trainer.h"

#include <stdio.h>
#include <stdlib.h>
#include "base/alloc.h"
#include "base/memory.h"
#include "base/str.h"
#include "worker/memory_plan.h"

/* What a rank tells of its node; doubles, of which nothing is summed but with zeros. */
enum { NEED_DEVICE, NEED_HOST, ROOM_DEVICE, ROOM_HOST, FIRST_LOCAL, N_LOCAL, N_TOLD };

static uint32_t number_of_environment(const char *name, uint32_t fallback, uint32_t max)
{
    const char *text = getenv(name);
    int64_t n = 0;
    return text != NULL && mb_parse_i64(text, 0, max, name, &n, NULL) == 0 ? (uint32_t)n : fallback;
}

/* Agents number a node's ranks one after the other. */
static struct mb_plan_gang gang_of(struct mb_trainer *t)
{
    const uint32_t n = number_of_environment("LOCAL_WORLD_SIZE", 1, t->world_size);
    const uint32_t local = number_of_environment("LOCAL_RANK", 0, t->world_size);
    struct mb_plan_gang g = {&t->dev, t->vocab_size, t->world_size, t->rank, 1};
    if (n > 1 && local < n && local <= t->rank && t->rank - local + n <= t->world_size) {
        g.first_local = t->rank - local;
        g.n_local = n;
    }
    return g;
}

/* As text; what nobody knows, UINT64_MAX, too. */
static const char *human(double bytes, char out[16])
{
    return mb_human_bytes(bytes < 0x1p64 ? (uint64_t)bytes : UINT64_MAX, out);
}

static void ask_room(struct mb_trainer *t, struct mb_plan_room *room)
{
    const uint64_t host = mb_memory_available("");
    size_t used = 0, total = 0;
    *room = (struct mb_plan_room){.host_bytes = (double)host};
    if (t->dev.ops->memory != NULL) {
        t->dev.ops->memory(t->dev.ctx, &used, &total);
        room->device_bytes = total == 0     ? (double)UINT64_MAX /* it does not say */
                             : total > used ? (double)(total - used)
                                            : 0;
    }
}

static double lacks(const double *told)
{
    const double device = told[NEED_DEVICE] - told[ROOM_DEVICE];
    const double host = told[NEED_HOST] - told[ROOM_HOST];
    return device > host ? device : host;
}

static int refuse(struct mb_trainer *t, const double *told, struct mb_err *err)
{
    const struct mb_plan_room room = {told[ROOM_DEVICE], told[ROOM_HOST]};
    const struct mb_plan_gang g = {&t->dev, t->vocab_size, t->world_size,
                                   (uint32_t)told[FIRST_LOCAL], (uint32_t)told[N_LOCAL]};
    const int of_device = told[NEED_DEVICE] > room.device_bytes;
    const double need = of_device ? told[NEED_DEVICE] : told[NEED_HOST];
    struct mb_buf advice = {0};
    char size[16], have[16], whose[64] = "";
    int rc = mb_plan_advise(&g, &t->args, &room, &advice);
    if (g.n_local > 1 && !of_device) {
        snprintf(whose, sizeof whose, " for the %u ranks of a node", g.n_local);
    }
    t->everybody_knows = 1;
    rc = mb_err_set(err, MB_ENOMEM, "the memory plan needs %s of %s memory%s, %s are available; %s",
                    human(need, size), of_device ? "device" : "host", whose,
                    human(of_device ? room.device_bytes : room.host_bytes, have),
                    rc == 0 ? mb_buf_str(&advice) : "out of memory to look for what would fit");
    mb_buf_close(&advice);
    return rc;
}

/* Collective. */
static int compare(struct mb_trainer *t, const double *own, struct mb_err *err)
{
    const size_t n = (size_t)t->world_size * N_TOLD;
    double *all = mb_calloc(n, sizeof *all);
    const double *worst;
    if (all == NULL) {
        return mb_err_set(err, MB_ENOMEM, "out of memory for the memory plans of %u ranks",
                          t->world_size);
    }
    for (size_t i = 0; i < N_TOLD; i++) {
        all[t->rank * N_TOLD + i] = own[i];
    }
    mb_comm_allreduce(t->comm, NULL, all, n, MB_COMM_F64, MB_COMM_SUM);
    int rc = mb_comm_synchronize(t->comm, err);
    worst = all;
    for (uint32_t r = 1; r < t->world_size && rc == 0; r++) {
        worst = lacks(all + r * N_TOLD) > lacks(worst) ? all + r * N_TOLD : worst;
    }
    if (rc == 0 && lacks(worst) > 0) {
        struct mb_err ignored; /* whoever is through may leave */
        mb_comm_barrier(t->comm);
        (void)mb_comm_synchronize(t->comm, &ignored);
        rc = refuse(t, worst, err);
    }
    mb_free(all);
    return rc;
}

static void print(const struct mb_trainer *t, const struct mb_plan_gang *g,
                  const struct mb_plan *own)
{
    struct mb_buf text = {0};
    if (mb_plan_print(g, own, &text) == 0) {
        mb_trainer_say_of_stage(t, "%s", mb_buf_str(&text));
    }
    mb_buf_close(&text);
}

int mb_trainer_plan(struct mb_trainer *t, struct mb_err *err)
{
    const struct mb_plan_gang g = gang_of(t);
    struct mb_plan own;
    struct mb_plan_room need, certain, room;
    char size[16], there[16], before[16];
    int rc = mb_plan_rank(&g, &t->args, t->rank, &own, err);
    if (rc == 0) {
        rc = mb_plan_need(&g, &t->args, &need, &certain, err);
    }
    if (rc != 0) {
        return rc;
    }
    print(t, &g, &own);
    ask_room(t, &room);
    mb_trainer_say(t,
                   " > host memory: %s planned for %u rank%s of this node, %s available, %s taken "
                   "by this rank so far\n",
                   human(need.host_bytes, size), g.n_local, g.n_local == 1 ? "" : "s",
                   human(room.host_bytes, there), mb_human_bytes(mb_memory_resident(), before));
    if (t->dev.ops->memory != NULL) {
        mb_trainer_say(t, " > device memory: %s planned, %s available\n",
                       human(need.device_bytes, size), human(room.device_bytes, there));
    }
    const double told[N_TOLD] = {certain.device_bytes, certain.host_bytes, room.device_bytes,
                                 room.host_bytes,      g.first_local,      g.n_local};
    return compare(t, told, err);
}
