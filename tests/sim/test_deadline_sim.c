/*
 * A training that has to end: steps, saves and an upload at random speeds, in virtual time, under
 * the plan of agent/deadline.c as its shell drives it. Each seed is one life. MOBULA_SIM_SEED
 * replays one seed, MOBULA_SIM_SEEDS sets how many are run.
 *
 * What no life may show: something asked beyond the deadline; a save that was under way ended
 * before its time; a save that had the time and was not done; in a life without surprises, a last
 * save that is not durable, or work that is given up long before it must be; a rate above that of
 * the link.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "agent/deadline.h"

enum { TICK_MS = 50, START_MS = 1000000, KILL_MS = 1500 };

enum trouble { STEADY, SLOWER, STALL, DEAD, N_TROUBLES };

struct life {
    uint64_t rng, seed, now_ms;
    /* what the world is */
    uint64_t step_ms, save_ms, bytes, rate, part, commit_ms, interval;
    enum trouble trouble;
    uint64_t trouble_at_ms, trouble_ends_ms;
    uint64_t deadline_ms, told_at_ms; /* told_at_ms: when the plan hears of it */
    int leaves;
    uint64_t earlier_ms, earlier_at_ms; /* a second deadline; 0: none */
    /* the trainer */
    int64_t iteration, saved;
    uint64_t step_ends_ms, save_ends_ms; /* save_ends_ms: 0, it does not save */
    uint64_t save_asked_ms;
    int wants_save, wants_end, ended, was_killed;
    /* the uploader: newest first */
    int64_t uploading, durable;
    uint64_t sent, acked_total, last_byte_ms, commits_at_ms;
    uint64_t seen_rate_max;
    /* the plan */
    struct mb_deadline deadline;
    struct mb_deadline_state state;
    struct mb_deadline_facts facts;
    struct mb_deadline_plan plan;
    struct mb_rate measured;
    int asked_end, local_only, was_end;
    uint64_t asked_end_ms;
};

static uint64_t rnd(struct life *l)
{
    l->rng += 0x9e3779b97f4a7c15u;
    uint64_t z = l->rng;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t between(struct life *l, uint64_t low, uint64_t high)
{
    return low + rnd(l) % (high - low + 1);
}

static void broken(const struct life *l, const char *what)
{
    fail_msg("seed %llu at %llu ms, deadline %llu: %s (step %llu save %llu bytes %llu rate %llu "
             "commit %llu, iteration %lld saved %lld durable %lld)",
             (unsigned long long)l->seed, (unsigned long long)(l->now_ms - START_MS),
             (unsigned long long)(l->deadline_ms - START_MS), what, (unsigned long long)l->step_ms,
             (unsigned long long)l->save_ms, (unsigned long long)l->bytes,
             (unsigned long long)l->rate, (unsigned long long)l->commit_ms, (long long)l->iteration,
             (long long)l->saved, (long long)l->durable);
}

/* ---- the world ---- */

static uint64_t rate_now(const struct life *l)
{
    if (l->now_ms < l->trouble_at_ms || l->trouble == STEADY)
        return l->rate;
    if (l->trouble == SLOWER)
        return l->rate / 3;
    if (l->trouble == STALL && l->now_ms >= l->trouble_ends_ms)
        return l->rate;
    return 0;
}

static uint64_t about(struct life *l, uint64_t ms)
{
    return ms * between(l, 90, 105) / 100;
}

static void save_done(struct life *l)
{
    mb_measured_note(&l->facts.save, l->save_ends_ms - l->save_asked_ms);
    l->saved = l->iteration;
    l->facts.saved = l->saved;
    l->facts.checkpoint_bytes = l->bytes;
    l->uploading = l->saved;
    l->sent = 0;
    l->commits_at_ms = 0;
    l->save_ends_ms = 0;
    if (l->wants_end)
        l->ended = 1;
}

static void train(struct life *l)
{
    if (l->ended)
        return;
    if (l->save_ends_ms != 0) {
        if (l->now_ms >= l->save_ends_ms) {
            save_done(l);
            l->step_ends_ms = l->now_ms + about(l, l->step_ms);
        }
        return;
    }
    if (l->now_ms < l->step_ends_ms)
        return;
    l->iteration++;
    l->facts.iteration = l->iteration;
    mb_measured_note(&l->facts.step, l->step_ms);
    if (l->wants_save || l->wants_end ||
        (l->interval > 0 && (uint64_t)l->iteration % l->interval == 0)) {
        l->wants_save = 0;
        l->save_asked_ms = l->now_ms;
        l->save_ends_ms = l->now_ms + about(l, l->save_ms);
        return;
    }
    l->step_ends_ms = l->now_ms + about(l, l->step_ms);
}

static void send(struct life *l)
{
    uint64_t acked = l->sent / l->part, add = rate_now(l) * TICK_MS / 1000;

    if (l->uploading < 0)
        return;
    if (l->sent < l->bytes) {
        l->sent = l->sent + add < l->bytes ? l->sent + add : l->bytes;
        l->acked_total += (l->sent / l->part - acked) * l->part;
        if (l->sent == l->bytes) {
            l->acked_total += l->bytes % l->part;
            l->last_byte_ms = l->now_ms;
            l->commits_at_ms = l->now_ms + about(l, l->commit_ms);
        }
    } else if (l->now_ms >= l->commits_at_ms) {
        mb_measured_note(&l->facts.commit, l->now_ms - l->last_byte_ms);
        l->durable = l->uploading;
        l->uploading = -1;
    }
}

/* ---- the shell ---- */

static void look(struct life *l)
{
    struct mb_deadline_facts *f = &l->facts;
    const char *what;

    if (l->now_ms >= l->told_at_ms)
        mb_deadline_add(&l->deadline, l->leaves ? MB_DEADLINE_SIGTERM : MB_DEADLINE_RUN,
                        l->deadline_ms);
    if (l->earlier_at_ms != 0 && l->now_ms >= l->earlier_at_ms &&
        mb_deadline_add(&l->deadline, MB_DEADLINE_NOTICE, l->earlier_ms))
        l->deadline_ms = l->earlier_ms;
    mb_rate_note(&l->measured, l->now_ms, l->acked_total, l->uploading >= 0 && l->sent < l->bytes);
    f->now_ms = l->now_ms;
    f->deadline = l->deadline;
    f->ranks_run = !l->ended;
    f->rate_bytes_per_s = mb_rate_bytes_per_s(&l->measured);
    f->pending_bytes = l->uploading >= 0 ? l->bytes - l->sent : 0;
    mb_deadline_step(&l->state, f, &l->plan);
    what = mb_deadline_invariant(f, &l->plan);
    if (what != NULL)
        broken(l, what);
    /* Bytes of one tick may be told with the next one, which is up to a twentieth of a window. */
    if (f->rate_bytes_per_s > l->rate + l->rate * TICK_MS / MB_RATE_WINDOW_MS)
        broken(l, "a rate above that of the link");
}

static void obey(struct life *l)
{
    switch (l->plan.action) {
    case MB_DEADLINE_SAVE_NOW:
        l->wants_save = 1;
        break;
    case MB_DEADLINE_SAVE_AND_END:
        if (l->asked_end)
            broken(l, "asked twice to end");
        l->asked_end = l->wants_end = 1;
        l->asked_end_ms = l->now_ms;
        l->local_only = l->plan.is_local_only;
        break;
    case MB_DEADLINE_END:
        if (l->asked_end && l->now_ms + KILL_MS < l->deadline_ms)
            broken(l, "a save was ended before its time");
        if (!l->asked_end && l->facts.save.is_known &&
            l->now_ms + l->facts.step.ms + l->facts.save.ms + KILL_MS <= l->deadline_ms)
            broken(l, "a save that fits is not done");
        l->ended = l->was_killed = 1;
        l->was_end = 1;
        break;
    default:
        break;
    }
}

/* ---- a life ---- */

static void be_born(struct life *l, uint64_t seed)
{
    uint64_t needs;

    *l = (struct life){.rng = seed, .seed = seed, .now_ms = START_MS};
    l->saved = l->durable = l->uploading = -1;
    l->step_ms = between(l, 1, 100) * (rnd(l) % 3 == 0 ? 50 : 5);
    l->save_ms = rnd(l) % 8 == 0 ? 0 : between(l, 1, 20000);
    l->bytes = between(l, 1, 1000) * (rnd(l) % 2 == 0 ? 1000000 : 20000);
    l->rate = between(l, 1, 200) * 1000000;
    l->part = rnd(l) % 2 == 0 ? 16 << 20 : 1 << 20;
    l->commit_ms = between(l, 50, 1000);
    l->interval = rnd(l) % 2 == 0 ? 0 : between(l, 1, 200);
    needs = 2 * l->step_ms + l->save_ms + l->bytes * 1000 / l->rate + l->commit_ms;
    l->deadline_ms = START_MS + 10000 + between(l, 1, 12) * needs;
    l->told_at_ms = START_MS;
    l->trouble = rnd(l) % 2 == 0 ? STEADY : (enum trouble)(rnd(l) % N_TROUBLES);
    l->trouble_at_ms = START_MS + rnd(l) % (l->deadline_ms - START_MS);
    l->trouble_ends_ms = l->trouble_at_ms + rnd(l) % 30000;
    if (rnd(l) % 3 == 0) { /* the node goes */
        l->leaves = 1;
        l->told_at_ms = START_MS + rnd(l) % (l->deadline_ms - START_MS);
    }
    if (rnd(l) % 4 == 0) {
        l->earlier_at_ms = START_MS + rnd(l) % (l->deadline_ms - START_MS);
        l->earlier_ms = l->earlier_at_ms + rnd(l) % (l->deadline_ms - l->earlier_at_ms + 1) + 1;
    }
    l->facts = (struct mb_deadline_facts){.can_save_now = 1,
                                          .measures = 1,
                                          .saves = 1,
                                          .has_store = rnd(l) % 5 != 0,
                                          .iteration = 0,
                                          .saved = -1,
                                          .stop_grace_ms = 60000};
    l->step_ends_ms = l->now_ms + l->step_ms;
}

/* A clock that was known from the start, and nothing that changed since. */
static int is_without_surprises(const struct life *l)
{
    return l->trouble == STEADY && !l->leaves && l->earlier_at_ms == 0;
}

static void judge(const struct life *l, uint64_t born_deadline_ms)
{
    uint64_t save = 2 * l->step_ms + l->save_ms * 105 / 100;
    uint64_t upload = l->bytes * 1000 / l->rate + l->commit_ms * 105 / 100;
    uint64_t had = l->deadline_ms - START_MS;

    if (!l->ended)
        broken(l, "the ranks live on after the deadline");
    if (l->was_end && !l->asked_end && !l->leaves && l->earlier_at_ms == 0 &&
        had > 4 * save + 10000)
        broken(l, "a save is dropped because its upload does not fit");
    if (is_without_surprises(l) && l->facts.has_store && had > 10 * (save + upload) + 20000) {
        if (l->was_killed || l->saved != l->iteration)
            broken(l, "the last iteration is not saved");
        if (l->durable != l->saved)
            broken(l, "the last save is not durable");
        /* What the plan keeps in reserve has a bound: a half, and some seconds; a quarter of all
         * the time where nothing could be measured before. */
        if (l->asked_end_ms + (save + upload) * 3 / 2 + had / 4 + 5000 < born_deadline_ms)
            broken(l, "ended long before it had to be");
    }
    if (is_without_surprises(l) && !l->facts.has_store && had > 4 * save + 10000 &&
        (l->was_killed || l->saved != l->iteration))
        broken(l, "the last iteration is not saved on the disk");
    if (l->leaves && l->earlier_at_ms == 0 && l->told_at_ms + save + 2000 < l->deadline_ms &&
        !l->was_end && l->saved != l->iteration)
        broken(l, "the node went without a save that had its time");
    if (l->asked_end && !l->local_only && l->trouble == STEADY && l->earlier_at_ms == 0 &&
        l->facts.has_store && l->facts.rate_bytes_per_s > 0 &&
        l->asked_end_ms + save + l->step_ms + upload * 5 / 4 + 2000 < l->deadline_ms &&
        l->durable != l->saved)
        broken(l, "the upload was promised");
}

static void live(uint64_t seed, unsigned counts[8])
{
    struct life l;
    uint64_t born_deadline_ms;

    be_born(&l, seed);
    born_deadline_ms = l.deadline_ms;
    for (; l.now_ms < l.deadline_ms + 2 * TICK_MS; l.now_ms += TICK_MS) {
        train(&l);
        if (l.facts.has_store)
            send(&l);
        look(&l);
        obey(&l);
    }
    judge(&l, born_deadline_ms);
    counts[0] += is_without_surprises(&l) ? 1 : 0;
    counts[1] += l.asked_end && l.durable == l.iteration;
    counts[2] += l.local_only ? 1 : 0;
    counts[3] += l.was_end ? 1 : 0;
}

static uint64_t from_env(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);

    return text != NULL ? strtoull(text, NULL, 10) : otherwise;
}

static void test_lives(void **state)
{
    uint64_t one = from_env("MOBULA_SIM_SEED", 0), n = from_env("MOBULA_SIM_SEEDS", 20000);
    unsigned counts[8] = {0};

    (void)state;
    if (one != 0) {
        live(one, counts);
        return;
    }
    for (uint64_t seed = 1; seed <= n; seed++)
        live(seed, counts);
    printf("%llu lives: %u without surprises, %u ended durable, %u on the disk only, %u killed\n",
           (unsigned long long)n, counts[0], counts[1], counts[2], counts[3]);
    assert_true(counts[1] > n / 3 && counts[2] > n / 100 && counts[3] > n / 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_lives)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
