/* Any bytes as the API server's answer: no RayJob, or one whose times are before the year 10001 and
 * whose verdict is the same every time. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "agent/deadline.h"
#include "agent/rayjob.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint64_t max_ms = 253433923200000u, day_ms = 86400000u;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_rayjob_self self = {"mini-abcde", "", (int64_t)day_ms, day_ms};
    struct mb_rayjob_verdict v, again;
    struct mb_rayjob job;
    struct mb_err err = {0};
    int rc = mb_rayjob_read((const char *)data, size, &job, &err);

    if (rc != MB_OK) {
        if (rc != MB_EPROTO || err.text[0] == '\0')
            abort();
        return 0;
    }
    if (job.uid[0] == '\0' || job.start_unix_ms > max_ms || job.end_unix_ms > max_ms)
        abort();
    mb_rayjob_judge(&job, &self, &v);
    self.uid = job.uid; /* seen before, and the same still */
    mb_rayjob_judge(&job, &self, &again);
    if (v.deadline_unix_ms != 0 && v.deadline_unix_ms != MB_DEADLINE_NEVER &&
        (v.deadline_unix_ms + day_ms < job.start_unix_ms + job.active_deadline_ms ||
         v.deadline_unix_ms < job.start_unix_ms + job.active_deadline_ms / 2 ||
         v.deadline_unix_ms > job.start_unix_ms + job.active_deadline_ms))
        abort();
    if (v.deadline_unix_ms != again.deadline_unix_ms || v.leaves != again.leaves ||
        v.delete_at_unix_ms != again.delete_at_unix_ms || v.is_ours != again.is_ours ||
        (v.delete_at_unix_ms != 0 && v.delete_at_unix_ms != job.end_unix_ms + day_ms) ||
        (!v.is_ours && (v.deadline_unix_ms != 0 || v.delete_at_unix_ms != 0 || v.leaves == NULL)))
        abort();
    return 0;
}
