/*
 * The log line.
 *
 *  1. A line below the level costs one atomic load.
 *  2. The line is built on the stack and written with one write(2), so lines of threads and of
 *     processes that share the descriptor do not mix.
 *  3. A text longer than the line is cut and ends in "..."; control bytes become spaces, so that
 *     text from outside cannot forge a line.
 *  4. When the descriptor refuses the line there is nobody left to tell: the line is lost.
 */
#include "base/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/err.h"
#include "base/str.h"

enum { LINE_MAX_BYTES = 4096, CONTEXT_MAX_BYTES = 96 };

static atomic_int log_fd = 2;
static atomic_int log_level = MB_LOG_INFO;

static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;
static char context[CONTEXT_MAX_BYTES]; /* guarded by context_lock */

static const char *const level_names[] = {"DEBUG", "INFO", "WARN", "ERROR"};

void mb_log_init(int fd, enum mb_log_level min_level)
{
    atomic_store(&log_fd, fd);
    atomic_store(&log_level, (int)min_level);
}

enum mb_log_level mb_log_level(void)
{
    return (enum mb_log_level)atomic_load_explicit(&log_level, memory_order_relaxed);
}

int mb_log_level_parse(const char *s, enum mb_log_level *out)
{
    static const char *const words[] = {"debug", "info", "warn", "error"};

    for (int i = 0; i < 4; i++) {
        if (strcmp(s, words[i]) == 0) {
            *out = (enum mb_log_level)i;
            return 0;
        }
    }
    return MB_EINVAL;
}

void mb_log_context(const char *words)
{
    size_t len = strnlen(words, sizeof(context) - 1);

    len = mb_utf8_floor(words, len);
    pthread_mutex_lock(&context_lock);
    memcpy(context, words, len);
    context[len] = '\0';
    pthread_mutex_unlock(&context_lock);
}

/* Timestamp, level, context and module; the number of bytes written, below size. */
static size_t format_head(char *line, size_t size, enum mb_log_level level, const char *module)
{
    uint64_t now_unix_ms = mb_unix_ms();
    time_t now_s = (time_t)(now_unix_ms / 1000u);
    char words[CONTEXT_MAX_BYTES];
    struct tm tm;
    int n;

    gmtime_r(&now_s, &tm);
    pthread_mutex_lock(&context_lock);
    memcpy(words, context, sizeof(words));
    pthread_mutex_unlock(&context_lock);
    n = snprintf(line, size,
                 "%04d-%02d-%02dT%02d:%02d:%02d.%03uZ %s %s%s%.64s: ", tm.tm_year + 1900,
                 tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec,
                 (unsigned)(now_unix_ms % 1000u), level_names[level], words,
                 words[0] == '\0' ? "" : " ", module);
    return n < 0 ? 0 : (size_t)n;
}

static void write_line(const char *line, size_t len)
{
    int fd = atomic_load(&log_fd);

    while (len > 0) {
        ssize_t n = write(fd, line, len);

        if (n < 0) {
            if (errno == EINTR)
                continue;
            return;
        }
        line += n;
        len -= (size_t)n;
    }
}

void mb_log(enum mb_log_level level, const char *module, const char *fmt, ...)
{
    char line[LINE_MAX_BYTES];
    size_t room = sizeof(line) - 1; /* the newline */
    size_t head;
    size_t len;
    va_list ap;
    int n;

    if (level < mb_log_level())
        return;
    head = format_head(line, room, level, module);
    va_start(ap, fmt);
    n = vsnprintf(line + head, room - head, fmt, ap);
    va_end(ap);
    len = head + (n < 0 ? 0 : (size_t)n);
    if (len >= room) {
        len = head + mb_utf8_floor(line + head, room - 4 - head);
        memcpy(line + len, "...", 3);
        len += 3;
    }
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)line[i];

        if (c < 0x20 || c == 0x7f)
            line[i] = ' ';
    }
    line[len++] = '\n';
    write_line(line, len);
}
