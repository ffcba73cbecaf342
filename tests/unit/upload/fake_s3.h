/* An S3 server in this process, for tests that look at every request: objects with conditions,
 * multipart uploads, listings. Bodies above 1 MiB are counted, not kept. What it should not answer
 * yet is held. Fails the test on what it does not know. */
#ifndef MOBULA_TESTS_UNIT_UPLOAD_FAKE_S3_H
#define MOBULA_TESTS_UNIT_UPLOAD_FAKE_S3_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>

struct fake_s3;
struct mb_http_req;

enum fake_verdict { FAKE_ANSWER, FAKE_HOLD, FAKE_FAIL /* 503, without effect */ };

/* method, key (relative to the store's prefix; "" of the bucket), part: number, 0 for none. */
typedef enum fake_verdict (*fake_judge_cb)(void *arg, const char *method, const char *key,
                                           int part);

struct fake_s3 *fake_open(uv_loop_t *loop, fake_judge_cb judge, void *arg); /* sets BUCKET_... */
#define FAKE_URL "s3://bucket/p"
void fake_release(struct fake_s3 *s); /* what is held is judged again */
void fake_close(struct fake_s3 *s);   /* what is held is answered 503 */

int fake_has_object(const struct fake_s3 *s, const char *key);
/* The bytes of a small one; NULL: none is there. */
const char *fake_object(const struct fake_s3 *s, const char *key);
/* Unfinished uploads of the key; NULL: of all. */
size_t fake_count_uploads(const struct fake_s3 *s, const char *key);
/* An upload that somebody began whose answer was lost. */
const char *fake_begin_upload(struct fake_s3 *s, const char *key);
int fake_has_upload(const struct fake_s3 *s, const char *id);

#endif
