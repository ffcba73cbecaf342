/*
 * sim --seeds N [--first K] [--cpu-s S]   every seed must keep every promise, all of them within
 *                                S seconds of this process's CPU time: no load makes that later
 * sim --seed K [--trace [--trace]]   one life, told
 * sim --planted [--seeds N] [--cpu-s S]   every planted bug must be caught by one of the seeds, and
 *                                by a promise that it broke: not by a bound of the simulation
 * sim ... --plant NAME           with one planted bug
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "tests/sim/sim.h"

struct options {
    uint64_t first, n;
    uint64_t cpu_s; /* 0: no bound */
    int trace, planted;
    enum sim_plant plant;
};

static void add(struct stats *to, const struct stats *s)
{
    const uint64_t *from = (const uint64_t *)s;

    for (size_t i = 0; i < sizeof(*s) / sizeof(uint64_t); i++)
        ((uint64_t *)to)[i] += from[i];
}

static void print_stats(uint64_t seeds, const struct stats *s)
{
    printf("%llu seeds: events %llu, messages %llu (lost %llu), faults %llu, kills of agents %llu, "
           "torn records %llu\n",
           (unsigned long long)seeds, (unsigned long long)s->events,
           (unsigned long long)s->messages, (unsigned long long)s->lost,
           (unsigned long long)s->faults, (unsigned long long)s->crashes,
           (unsigned long long)s->torn);
    printf(
        "jobs: SUCCEEDED %llu, FAILED %llu, STOPPED %llu; restarts of gangs %llu (on fewer nodes "
        "%llu, on more again %llu), commits of checkpoints %llu (put aside %llu); durable when "
        "their job SUCCEEDED %llu, given up %llu\n",
        (unsigned long long)s->succeeded, (unsigned long long)s->failed,
        (unsigned long long)s->stopped, (unsigned long long)s->restarts,
        (unsigned long long)s->shrunk, (unsigned long long)s->grown, (unsigned long long)s->commits,
        (unsigned long long)s->aside, (unsigned long long)s->sealed,
        (unsigned long long)s->lost_saves);
}

/* 0: it kept every promise, and was worth its time. */
static int one_seed(struct life *l)
{
    if (sim_life(l) != 0)
        return -1;
    if (l->stats.events >= 200 && l->stats.faults >= 2 && l->stats.gangs >= MIN_GANGS)
        return 0;
    snprintf(l->why, sizeof(l->why), "only %llu events, %llu faults and %llu gangs",
             (unsigned long long)l->stats.events, (unsigned long long)l->stats.faults,
             (unsigned long long)l->stats.gangs);
    return -1;
}

static double cpu_used_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int is_over_time(const struct options *o)
{
    return o->cpu_s > 0 && cpu_used_s() > (double)o->cpu_s;
}

static int run_seeds(const struct options *o)
{
    struct stats sum = {0};
    uint64_t fewest = UINT64_MAX;
    int bad = 0;

    for (uint64_t seed = o->first; seed < o->first + o->n && bad < 10; seed++) {
        struct life l = {.seed = seed, .plant = o->plant, .trace = o->trace};

        if (one_seed(&l) != 0) {
            printf("seed %llu: %s\n  again: sim --seed %llu --trace%s%s\n",
                   (unsigned long long)seed, l.why, (unsigned long long)seed,
                   o->plant ? " --plant " : "", o->plant ? sim_plant_names[o->plant] : "");
            bad++;
        }
        add(&sum, &l.stats);
        fewest = l.stats.faults < fewest ? l.stats.faults : fewest;
        if (is_over_time(o)) {
            printf("%.1f s of CPU after %llu of %llu seeds: all of them have %llu s\n",
                   cpu_used_s(), (unsigned long long)(seed - o->first + 1),
                   (unsigned long long)o->n, (unsigned long long)o->cpu_s);
            return 1;
        }
    }
    print_stats(o->n, &sum);
    printf("no seed had fewer than %llu faults that acted; %.1f s of CPU\n",
           (unsigned long long)fewest, cpu_used_s());
    /* Faults must not be so many that nothing ever goes well. */
    if ((o->n >= 100 && (sum.succeeded < o->n / 2 || sum.commits < o->n / 2 || sum.torn == 0 ||
                         sum.aside == 0 || sum.sealed < sum.succeeded)) ||
        (o->n >= 1000 && (sum.shrunk == 0 || sum.lost_saves == 0))) {
        printf("the seeds do not reach what they are for\n");
        bad++;
    }
    return bad != 0;
}

static int run_planted(const struct options *o)
{
    int missed = 0;

    for (int p = PLANT_NONE + 1; p < N_PLANTS; p++) {
        uint64_t seed = o->first, n_full = 0;
        struct life l = {0};
        int caught = 0;

        for (; seed < o->first + o->n && !caught; seed++) {
            l = (struct life){.seed = seed, .plant = (enum sim_plant)p};
            caught = sim_life(&l) != 0 && !l.is_out_of_room;
            n_full += (uint64_t)l.is_out_of_room;
            if (is_over_time(o)) {
                printf("%.1f s of CPU at seed %llu of %s: all planted bugs have %llu s\n",
                       cpu_used_s(), (unsigned long long)seed, sim_plant_names[p],
                       (unsigned long long)o->cpu_s);
                return 1;
            }
        }
        if (caught)
            printf("%-22s seed %4llu: %s\n", sim_plant_names[p], (unsigned long long)seed - 1,
                   l.why);
        else
            printf("%-22s NOT CAUGHT by %llu seeds, %llu of which ran out of room (%s)\n",
                   sim_plant_names[p], (unsigned long long)o->n, (unsigned long long)n_full,
                   sim_plant_texts[p]);
        missed += !caught;
    }
    printf("%d planted bugs, %d not caught; %.1f s of CPU\n", N_PLANTS - 1, missed, cpu_used_s());
    return missed != 0;
}

static enum sim_plant plant_of(const char *name)
{
    for (int p = 0; p < N_PLANTS; p++)
        if (strcmp(sim_plant_names[p], name) == 0)
            return (enum sim_plant)p;
    fprintf(stderr, "sim: no planted bug is called %s\n", name);
    exit(64);
}

int main(int argc, char **argv)
{
    struct options o = {.first = 1, .n = 200};

    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";

        if (strcmp(argv[i], "--trace") == 0) {
            o.trace++;
        } else if (strcmp(argv[i], "--planted") == 0) {
            o.planted = 1;
        } else if (strcmp(argv[i], "--seeds") == 0) {
            o.n = strtoull(value, NULL, 10);
            i++;
        } else if (strcmp(argv[i], "--first") == 0) {
            o.first = strtoull(value, NULL, 10);
            i++;
        } else if (strcmp(argv[i], "--cpu-s") == 0) {
            o.cpu_s = strtoull(value, NULL, 10);
            i++;
        } else if (strcmp(argv[i], "--seed") == 0) {
            o.first = strtoull(value, NULL, 10);
            o.n = 1;
            i++;
        } else if (strcmp(argv[i], "--plant") == 0) {
            o.plant = plant_of(value);
            i++;
        } else {
            fprintf(stderr, "usage: sim [--seeds N] [--first K] [--cpu-s S] [--seed K] [--trace] "
                            "[--planted] [--plant NAME]\n");
            return 64;
        }
    }
    return o.planted ? run_planted(&o) : run_seeds(&o);
}
