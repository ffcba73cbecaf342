/*
 * One line per fact: `2026-11-21T08:00:00.123Z INFO node job=ID rank=R module: text key=value`.
 * Threads: any; a line is one write(2). Never pass a secret: nothing is filtered here.
 */
#ifndef MOBULA_BASE_LOG_H
#define MOBULA_BASE_LOG_H

#include <stdarg.h>

enum mb_log_level { MB_LOG_DEBUG = 0, MB_LOG_INFO = 1, MB_LOG_WARN = 2, MB_LOG_ERROR = 3 };

/* fd is borrowed (2 until called). Lines below min_level are dropped before formatting. */
void mb_log_init(int fd, enum mb_log_level min_level);
enum mb_log_level mb_log_level(void);
/* Accepts debug|info|warn|error; MB_EINVAL otherwise. */
int mb_log_level_parse(const char *s, enum mb_log_level *out);
/* Words between level and module on every line of this process, e.g. "node=ab12" or "rank=3";
 * copied, cut at 95 bytes. */
void mb_log_context(const char *words);

void mb_log(enum mb_log_level level, const char *module, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#define mb_debug(module, ...) mb_log(MB_LOG_DEBUG, module, __VA_ARGS__)
#define mb_info(module, ...)  mb_log(MB_LOG_INFO, module, __VA_ARGS__)
#define mb_warn(module, ...)  mb_log(MB_LOG_WARN, module, __VA_ARGS__)
#define mb_error(module, ...) mb_log(MB_LOG_ERROR, module, __VA_ARGS__)

#endif
