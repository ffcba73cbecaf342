/*
 * The table is an array that is filled and never emptied. What servers say to a checksum that they
 * do not know: 501 NotImplemented, or a 400 with one of a few codes that mean many other things as
 * well. So nothing is concluded from the refusal itself, only from the success of a weaker one.
 */
#include "base/s3/s3_facts.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { MAX_ENDPOINTS = 64, ENDPOINT_BYTES = 300 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char endpoint[ENDPOINT_BYTES];
    struct s3_facts facts;
} table[MAX_ENDPOINTS];
static size_t n_endpoints;

/* NULL: not there. Under the lock. */
static struct s3_facts *find(const char *endpoint)
{
    for (size_t i = 0; i < n_endpoints; i++) {
        if (strcmp(table[i].endpoint, endpoint) == 0)
            return &table[i].facts;
    }
    return NULL;
}

void s3_facts_load(const char *endpoint, struct s3_facts *out)
{
    pthread_mutex_lock(&lock);
    const struct s3_facts *known = find(endpoint);
    *out = known ? *known : (struct s3_facts){.sum = S3_SUM_CRC64NVME};
    pthread_mutex_unlock(&lock);
}

void s3_facts_store(const char *endpoint, const struct s3_facts *facts)
{
    pthread_mutex_lock(&lock);
    struct s3_facts *known = find(endpoint);
    if (!known && n_endpoints < MAX_ENDPOINTS && strlen(endpoint) < ENDPOINT_BYTES) {
        snprintf(table[n_endpoints].endpoint, ENDPOINT_BYTES, "%s", endpoint);
        known = &table[n_endpoints++].facts;
    }
    if (known)
        *known = *facts;
    pthread_mutex_unlock(&lock);
}

void s3_facts_forget_all(void)
{
    pthread_mutex_lock(&lock);
    n_endpoints = 0;
    pthread_mutex_unlock(&lock);
}

int s3_sum_is_refused(const struct s3_facts *facts, enum s3_sum sent, long status, const char *code)
{
    static const char *const codes[] = {"InvalidRequest", "InvalidArgument", "NotImplemented",
                                        "UnsupportedArgument"};
    if (facts->sum_is_proven || sent == S3_SUM_NONE)
        return 0;
    for (size_t i = 0; status == 400 && i < sizeof codes / sizeof *codes; i++) {
        if (strcmp(code, codes[i]) == 0)
            return 1;
    }
    return status == 501;
}

const char *s3_sum_name(enum s3_sum sum)
{
    static const char *const names[] = {"CRC64NVME", "CRC32C", "Content-MD5", "none"};
    return names[sum];
}
