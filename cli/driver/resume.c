#include "cli/driver/resume.h"

#include <inttypes.h>
#include <string.h>

int mb_resume_parse(const char *text, enum mb_resume *out, struct mb_err *err)
{
    static const char *const names[] = {"never", "auto", "required"};

    *out = MB_RESUME_NEVER;
    for (size_t i = 0; text && i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = (enum mb_resume)i;
            return MB_OK;
        }
    }
    return text ? mb_err_set(err, MB_EINVAL, "--resume %s: must be auto, never or required", text)
                : MB_OK;
}

int mb_resume_decide(enum mb_resume how, const char *url, int64_t latest, int64_t newest_whole,
                     struct mb_err *err)
{
    if (newest_whole >= 0)
        return 1;
    if (latest == -1)
        return how == MB_RESUME_AUTO
                   ? 0
                   : mb_err_set(err, MB_ENOENT, "--resume required: there is no checkpoint in %s",
                                url);
    if (latest < 0)
        return mb_err_set(err, MB_ECORRUPT,
                          "--resume: the pointer in %s is damaged; mobula checkpoint ls shows what "
                          "is there, --resume never begins anew",
                          url);
    return mb_err_set(err, MB_ECORRUPT,
                      "--resume: %s names iteration %" PRId64 ", and none up to it is whole; "
                      "mobula checkpoint verify says what is wrong, --resume never begins anew",
                      url, latest);
}
