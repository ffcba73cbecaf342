/* The checksum header of one request: which kind, and its computing in the pool. */
#ifndef MOBULA_BASE_S3_S3_SUM_H
#define MOBULA_BASE_S3_S3_SUM_H

#include "base/s3/s3.h"
#include "base/s3/s3_facts.h"

enum { S3_SUM_TEXT_BYTES = 32 };

/* 1 if r carries or announces a checksum. */
int s3_sum_is_in(const struct s3_request *r);
/* The kind whose header r gets when sum is what the endpoint takes; NONE: no header. */
enum s3_sum s3_sum_of_request(const struct s3_request *r, enum s3_sum sum);
/* 1 if header i of r is left out, since it speaks of a checksum that the endpoint does not take. */
int s3_sum_hides(const struct s3_request *r, size_t i, enum s3_sum sum);
/* Blocking, for the pool: CRC32C or MD5 of r's body in base64. 0, MB_ESTATE: the file is shorter,
 * MB_EIO, MB_ENOMEM. */
int s3_sum_compute(const struct s3_request *r, enum s3_sum kind, char out[S3_SUM_TEXT_BYTES]);
/* The same: is the etag the MD5 of these bytes? One that is no MD5 at all costs no reading. */
int s3_sum_is_etag(int fd, uint64_t offset, uint64_t n, const char *etag, int *out);
const char *s3_sum_header(enum s3_sum kind);

#endif
