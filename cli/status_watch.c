/*
 *  1. On a terminal: the alternate screen, without cursor and line wrap, is redrawn in place every
 *     second and when the window changes. No input is read, so the terminal's modes stay.
 *  2. Elsewhere: a block, or with --json a line, whenever anything but a clock has changed.
 *  3. Ctrl-C, SIGTERM, SIGHUP: the handler itself puts the screen back and ends the process, also
 *     while a request is under way. Ctrl-Z puts it back too, and `fg` draws it again.
 *  4. The head does not answer: the last picture stays, with a line that says so; five minutes
 *     later the verb gives up.
 */
#include "cli/status_watch.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/printable.h"
#include "cli/status_view.h"

enum { EVERY_MS = 1000, GIVE_UP_MS = 5 * 60 * 1000, LOOK_TIMEOUT_MS = 5000 };

static const char enter[] = "\x1b[?1049h\x1b[?25l\x1b[?7l",
                  leave[] = "\x1b[?7h\x1b[?25h\x1b[?1049l";

static volatile sig_atomic_t on_terminal, must_redraw;

static void write_now(const char *bytes, size_t n)
{
    while (n > 0) {
        ssize_t k = write(STDOUT_FILENO, bytes, n);

        if (k < 0 && errno != EINTR && errno != EAGAIN)
            return;
        if (k > 0) {
            bytes += k;
            n -= (size_t)k;
        }
    }
}

static void on_end(int signum)
{
    if (on_terminal)
        write_now(leave, sizeof(leave) - 1);
    _exit(128 + signum);
}

static void on_window(int signum)
{
    (void)signum;
    must_redraw = 1;
}

static void on_pause(int signum)
{
    int saved = errno;

    (void)signum;
    write_now(leave, sizeof(leave) - 1);
    raise(SIGSTOP);
    write_now(enter, sizeof(enter) - 1); /* somebody said SIGCONT */
    must_redraw = 1;
    errno = saved;
}

static void catch (int signum, void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler};

    sigfillset(&action.sa_mask);
    sigaction(signum, &action, NULL);
}

/* SIGWINCH comes only inside of pause_until(), so that none is lost between look and sleep. */
static void catch_signals(sigset_t *while_waiting)
{
    sigset_t window;

    sigemptyset(&window);
    sigaddset(&window, SIGWINCH);
    sigprocmask(SIG_BLOCK, &window, while_waiting);
    sigdelset(while_waiting, SIGWINCH);
    catch (SIGINT, on_end);
    catch (SIGTERM, on_end);
    catch (SIGHUP, on_end);
    if (!on_terminal)
        return;
    catch (SIGWINCH, on_window);
    catch (SIGTSTP, on_pause);
}

static void pause_until(uint64_t until_ms, const sigset_t *mask)
{
    uint64_t now = mb_mono_ms();
    uint64_t left = until_ms > now ? until_ms - now : 0;
    struct timespec wait = {.tv_sec = (time_t)(left / 1000),
                            .tv_nsec = (long)(left % 1000) * 1000000};

    (void)ppoll(NULL, 0, &wait, mask);
}

static const char *clock_text(char out[32])
{
    time_t now = time(NULL);
    struct tm tm;

    localtime_r(&now, &tm);
    strftime(out, 32, "%Y-%m-%d %H:%M:%S", &tm);
    return out;
}

static int draw(const struct mb_rest *rest, const json_t *status, const struct mb_err *trouble)
{
    struct winsize size = {0};
    struct mb_buf text = {0}, screen = {0};
    char now[32];
    int rc;

    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0)
        size = (struct winsize){.ws_row = 24, .ws_col = 80};
    rc = mb_buf_printf(&text, "mobula status  %s  %s  (Ctrl-C ends)\n", clock_text(now),
                       rest->base_url);
    if (trouble->code != 0)
        rc |= mb_buf_printf(&text, "the head does not answer, asking again: %s\n", trouble->text);
    rc |= mb_buf_puts(&text, "\n");
    rc |= mb_status_view(status, 1, &text);
    rc |= mb_status_screen(mb_buf_str(&text), size.ws_row, size.ws_col, &screen);
    if (rc == 0)
        write_now((const char *)screen.data, screen.len);
    mb_buf_close(&text);
    mb_buf_close(&screen);
    return rc == 0 ? 0 : MB_ENOMEM;
}

/* *last is what was printed before. */
static int print_change(const json_t *status, int json, char **last)
{
    char *essence = mb_status_essence(status), now[32];
    struct mb_buf text = {0};
    int rc = essence == NULL;

    if (rc == 0 && *last != NULL && strcmp(essence, *last) == 0) {
        free(essence);
        return 0;
    }
    if (rc == 0 && json) {
        rc = mb_printable_json(status, JSON_COMPACT, stdout);
        putchar('\n');
    } else if (rc == 0) {
        rc = mb_status_view(status, 0, &text);
        printf("---- %s\n%s", clock_text(now), mb_buf_str(&text));
    }
    mb_buf_close(&text);
    free(*last);
    *last = essence;
    if (fflush(stdout) != 0 || ferror(stdout))
        return MB_EIO;
    return rc != 0 ? MB_ENOMEM : 0;
}

static int show(const struct mb_rest *rest, const json_t *status, int json, char **last,
                const struct mb_err *trouble, struct mb_err *err)
{
    int rc = on_terminal                   ? draw(rest, status, trouble)
             : trouble->code != 0 && *last ? 0
                                           : print_change(status, json, last);

    if (rc == MB_EIO)
        return mb_err_set(err, rc, "what reads this output has closed it");
    return rc != 0 ? mb_err_set(err, rc, "out of memory") : 0;
}

int mb_status_watch(struct mb_rest *rest, mb_status_fetch_fn fetch, int json, struct mb_err *err)
{
    const char *term = getenv("TERM");
    struct mb_err trouble = {0};
    json_t *status = NULL;
    char *last = NULL;
    sigset_t mask;
    uint64_t next_ms = mb_mono_ms(), seen_ms = next_ms;
    int rc = fetch(rest, &status, err);

    if (rc != 0)
        return rc;
    on_terminal = !json && isatty(STDOUT_FILENO) && term != NULL && strcmp(term, "dumb") != 0;
    rest->timeout_ms = LOOK_TIMEOUT_MS;
    catch_signals(&mask);
    if (on_terminal)
        write_now(enter, sizeof(enter) - 1);
    while ((rc = show(rest, status, json, &last, &trouble, err)) == 0) {
        must_redraw = 0;
        next_ms += EVERY_MS;
        pause_until(next_ms, &mask);
        if (must_redraw && mb_mono_ms() < next_ms) { /* the same facts in another size */
            next_ms -= EVERY_MS;
            continue;
        }
        json_t *newer = NULL;
        struct mb_err e = {0};
        if (fetch(rest, &newer, &e) == 0) {
            json_decref(status);
            status = newer;
            seen_ms = mb_mono_ms();
        } else if (!on_terminal && trouble.code == 0) {
            fprintf(stderr, "mobula: the head does not answer, asking again: %s\n", e.text);
        }
        trouble = e;
        if (mb_mono_ms() - seen_ms >= GIVE_UP_MS) {
            rc = mb_err_set(err, MB_EUNAVAIL, "the head was away for 5 minutes: %.700s", e.text);
            break;
        }
        if (mb_mono_ms() > next_ms + EVERY_MS) /* a slow answer is not made up for */
            next_ms = mb_mono_ms();
    }
    if (on_terminal)
        write_now(leave, sizeof(leave) - 1);
    json_decref(status);
    free(last);
    return rc;
}
