/*
 * What one endpoint can do, learnt from its answers and kept for the life of the process, so that
 * each thing is asked once and not by every store anew. s3_sum_is_refused() is pure; the table may
 * be used by any thread.
 */
#ifndef MOBULA_BASE_S3_S3_FACTS_H
#define MOBULA_BASE_S3_S3_FACTS_H

/* Checksums of what is sent, the best first. Multipart uploads know CRC64NVME, MD5 per part, none.
 */
enum s3_sum { S3_SUM_CRC64NVME, S3_SUM_CRC32C, S3_SUM_MD5, S3_SUM_NONE };

struct s3_facts {
    enum s3_sum sum;
    int sum_is_proven; /* a request with it was accepted: a later refusal has another reason */
    int no_conditions; /* If-Match and If-None-Match are not implemented, or not heeded */
    int conditions_are_proven; /* one of them has failed as it should */
};

/* Zeroes for an endpoint that nothing is known of. */
void s3_facts_load(const char *endpoint, struct s3_facts *out);
/* Of more than 64 endpoints the last ones are not kept. */
void s3_facts_store(const char *endpoint, const struct s3_facts *facts);
void s3_facts_forget_all(void); /* tests: ports come again */

/* The answer to a request with a checksum: 1 if it may have been refused for that, so that the same
 * request with the next weaker one says more. */
int s3_sum_is_refused(const struct s3_facts *facts, enum s3_sum sent, long status,
                      const char *code);
const char *s3_sum_name(enum s3_sum sum);

#endif
