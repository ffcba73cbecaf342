/*
 * Messages as text: a word that names the type, then its fields. Parsing is strict: what does not
 * read as exactly one message is refused, and the caller closes the connection.
 */
#include "agent/supervise/protocol.h"

#include <stdio.h>
#include <string.h>

size_t mb_sup_msg_format(const struct mb_sup_msg *m, char out[MB_SUP_PACKET_MAX])
{
    const size_t cap = MB_SUP_PACKET_MAX;
    int n = 0;

    switch (m->type) {
    case MB_SUP_MSG_HELLO:
        n = snprintf(out, cap, "hello %u %lld %llu %u", m->version, (long long)m->pid,
                     (unsigned long long)m->ticks, m->child);
        break;
    case MB_SUP_MSG_STARTED:
        n = snprintf(out, cap, "started %u %lld %llu", m->child, (long long)m->pid,
                     (unsigned long long)m->ticks);
        break;
    case MB_SUP_MSG_START_FAILED:
        n = snprintf(out, cap, "failed %u %s", m->child, m->text);
        break;
    case MB_SUP_MSG_EXIT:
        n = snprintf(out, cap, "exit %u %d %d", m->child, m->code, m->signal);
        break;
    case MB_SUP_MSG_ENDING:
        n = snprintf(out, cap, "ending %s", m->text);
        break;
    case MB_SUP_MSG_ALL_EXITED:
        n = snprintf(out, cap, "all-exited %s", m->text);
        break;
    case MB_SUP_MSG_REPLAYED:
        n = snprintf(out, cap, "replayed");
        break;
    case MB_SUP_MSG_FD:
        n = snprintf(out, cap, "fd %u", m->child);
        break;
    case MB_SUP_MSG_FDS:
        n = snprintf(out, cap, "fds");
        break;
    case MB_SUP_MSG_STOP:
        n = snprintf(out, cap, "stop %u %d", m->grace_ms, m->signal);
        break;
    case MB_SUP_MSG_KILL:
        n = snprintf(out, cap, "kill");
        break;
    case MB_SUP_MSG_RELEASE:
        n = snprintf(out, cap, "release");
        break;
    }
    return (size_t)n;
}

/* The text after "WORD " (or after "WORD I "), cut at the bound. */
static void take_text(struct mb_sup_msg *m, const char *text)
{
    size_t n = strnlen(text, sizeof(m->text) - 1);

    memcpy(m->text, text, n);
    m->text[n] = '\0';
}

int mb_sup_msg_parse(const char *p, size_t n, struct mb_sup_msg *out)
{
    char s[MB_SUP_PACKET_MAX + 1];
    struct mb_sup_msg m = {0};
    unsigned long long ticks = 0;
    long long pid = 0;
    int end = -1;

    if (n > MB_SUP_PACKET_MAX || memchr(p, '\0', n) != NULL)
        return -1;
    memcpy(s, p, n);
    s[n] = '\0';
    if (sscanf(s, "hello %u %lld %llu %u%n", &m.version, &pid, &ticks, &m.child, &end) == 4) {
        m.type = MB_SUP_MSG_HELLO;
    } else if (sscanf(s, "started %u %lld %llu%n", &m.child, &pid, &ticks, &end) == 3) {
        m.type = MB_SUP_MSG_STARTED;
    } else if (sscanf(s, "exit %u %d %d%n", &m.child, &m.code, &m.signal, &end) == 3) {
        m.type = MB_SUP_MSG_EXIT;
    } else if (sscanf(s, "stop %u %d%n", &m.grace_ms, &m.signal, &end) == 2) {
        m.type = MB_SUP_MSG_STOP;
    } else if (sscanf(s, "fd %u%n", &m.child, &end) == 1) {
        m.type = MB_SUP_MSG_FD;
    } else if (sscanf(s, "failed %u%n", &m.child, &end) == 1 && s[end] == ' ') {
        m.type = MB_SUP_MSG_START_FAILED;
        take_text(&m, s + end + 1);
        end = (int)n;
    } else if (strncmp(s, "ending ", 7) == 0) {
        m.type = MB_SUP_MSG_ENDING;
        take_text(&m, s + 7);
        end = (int)n;
    } else if (strncmp(s, "all-exited ", 11) == 0) {
        m.type = MB_SUP_MSG_ALL_EXITED;
        take_text(&m, s + 11);
        end = (int)n;
    } else {
        static const struct {
            const char *word;
            enum mb_sup_type type;
        } bare[] = {{"replayed", MB_SUP_MSG_REPLAYED},
                    {"fds", MB_SUP_MSG_FDS},
                    {"kill", MB_SUP_MSG_KILL},
                    {"release", MB_SUP_MSG_RELEASE}};

        end = -1; /* a field may have matched above */
        for (size_t i = 0; i < sizeof(bare) / sizeof(bare[0]); i++) {
            if (strcmp(s, bare[i].word) == 0) {
                m.type = bare[i].type;
                end = (int)n;
            }
        }
    }
    if (end < 0 || (size_t)end != n)
        return -1;
    m.pid = pid;
    m.ticks = ticks;
    *out = m;
    return 0;
}
