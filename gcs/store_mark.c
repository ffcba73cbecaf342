/*
 *  1. number, boot id, CRC32C (hex) of both and the blanks that fill them; a line feed.
 *  2. The line of before had no checksum, was as long, and is told by its blanks:
 *     "%-20lld %-40s\n". Damage to a few bytes makes neither the other.
 *  3. What is neither is damage, also by its length; an older program reads the line of 1, too.
 */
#include "gcs/store_mark.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/checksum.h"

enum {
    NUMBER = 15,
    BOOT_ID_AT = NUMBER + 1,
    SUMMED = BOOT_ID_AT + STORE_BOOT_ID_SIZE - 1,
    OLD_BOOT_ID_AT = 21,
    OLD_BOOT_ID_END = OLD_BOOT_ID_AT + STORE_BOOT_ID_SIZE - 1
};

/* As text. Its length; -1: errno says why it cannot be read. */
static ssize_t read_small(const char *path, char *out, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, out, size - 1) : -1;
    int e = errno;

    out[n > 0 ? n : 0] = '\0';
    if (fd >= 0)
        close(fd);
    errno = e;
    return n;
}

void store_boot_id(char out[STORE_BOOT_ID_SIZE])
{
    read_small("/proc/sys/kernel/random/boot_id", out, STORE_BOOT_ID_SIZE);
}

static void format_sum(const char *line, char out[STORE_MARK_BYTES - SUMMED + 1])
{
    snprintf(out, STORE_MARK_BYTES - SUMMED + 1, " %08x\n", (unsigned)mb_crc32c(0, line, SUMMED));
}

void store_mark_format(int64_t batch, const char *boot_id, char out[STORE_MARK_BYTES + 1])
{
    snprintf(out, STORE_MARK_BYTES + 1, "%-*lld %-*s", NUMBER, (long long)batch,
             STORE_BOOT_ID_SIZE - 1, boot_id);
    format_sum(out, out + SUMMED);
}

static int is_blank(const char *text, size_t from, size_t to)
{
    while (from < to && text[from] == ' ')
        from++;
    return from == to;
}

static int is_old(const char *line)
{
    return is_blank(line, NUMBER, OLD_BOOT_ID_AT) &&
           is_blank(line, OLD_BOOT_ID_END, STORE_MARK_BYTES - 1) &&
           line[STORE_MARK_BYTES - 1] == '\n';
}

int store_mark_parse(const char *text, size_t n, int64_t *batch, char boot_id[STORE_BOOT_ID_SIZE])
{
    char line[STORE_MARK_BYTES + 1], sum[STORE_MARK_BYTES - SUMMED + 1], *end;
    const char *id;

    if (n != STORE_MARK_BYTES)
        return MB_ECORRUPT;
    memcpy(line, text, n);
    line[n] = '\0';
    format_sum(line, sum);
    if (memcmp(line + SUMMED, sum, STORE_MARK_BYTES - SUMMED) == 0)
        id = line + BOOT_ID_AT;
    else if (is_old(line))
        id = line + OLD_BOOT_ID_AT;
    else
        return MB_ECORRUPT;
    int64_t number = strtoll(line, &end, 10);
    if (!isdigit((unsigned char)line[0]) || !is_blank(line, (size_t)(end - line), BOOT_ID_AT))
        return MB_ECORRUPT;
    *batch = number;
    snprintf(boot_id, STORE_BOOT_ID_SIZE, "%.*s", (int)strcspn(id, " "), id);
    return 0;
}

int store_mark_read(const char *path, int64_t *batch, char boot_id[STORE_BOOT_ID_SIZE],
                    struct mb_err *err)
{
    char text[STORE_MARK_BYTES + 2]; /* one more than there should be */
    ssize_t n = read_small(path, text, sizeof text);

    *batch = -1;
    boot_id[0] = '\0';
    if (n < 0 && errno != ENOENT)
        return mb_err_sys(err, errno, "%s", path);
    if (n > 0 && store_mark_parse(text, (size_t)n, batch, boot_id) != 0)
        return mb_err_set(err, MB_ECORRUPT, "%s is damaged", path);
    return 0;
}
