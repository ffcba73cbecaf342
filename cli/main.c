/*
 * mobula VERB ...: finds the verb and runs it. Called as `ray` (a link of that name), it answers
 * the part of Ray's command line that KubeRay and scripts use, and passes over flags it does not
 * know with one warning.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include "base/secret.h"
#include "cli/options.h"

static int run_verb(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct mb_err err;
    const struct mb_verb *sub;

    if (verb->subverbs == NULL)
        return verb->run(cli, verb, argc, argv);
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        mb_options_help(cli, verb, argc < 2 ? stderr : stdout);
        return argc < 2 ? mb_exit_status(MB_EINVAL) : 0;
    }
    sub = mb_options_find_verb(verb->subverbs, argv[1], &err);
    if (sub == NULL) {
        mb_cli_look_for_json(cli, argc - 1, argv + 1, 0);
        mb_err_wrap(&err, "%s", verb->name);
        return mb_cli_fail(cli, &err);
    }
    cli->parent = verb->name;
    return run_verb(cli, sub, argc - 1, argv + 1);
}

static const struct mb_verb *find_verb(const struct mb_verb *const *verbs, const char *name,
                                       struct mb_err *err)
{
    for (const char *const *absent = mb_absent_verbs; *absent != NULL; absent++) {
        if (strcmp(*absent, name) == 0) {
            mb_err_set(err, MB_EUNSUPPORTED,
                       "this is the client; `mobula %s` needs the full package", name);
            return NULL;
        }
    }
    return mb_options_find_verb(verbs, name, err);
}

static int is_ray(const char *argv0)
{
    const char *slash = argv0 != NULL ? strrchr(argv0, '/') : NULL;

    return argv0 != NULL && strcmp(slash != NULL ? slash + 1 : argv0, "ray") == 0;
}

int main(int argc, char **argv)
{
    struct mb_cli cli = {.program = "mobula"};
    const struct mb_verb *const *verbs = mb_verbs;
    const struct mb_verb *verb;
    struct mb_err err;

    mb_secret_shut_process_with_keys();
    signal(SIGPIPE, SIG_IGN); /* a peer that went away is an error code, not an end */
    signal(SIGXFSZ, SIG_IGN); /* and so is a file that may not grow */
    if (is_ray(argv[0])) {
        cli.program = "ray";
        cli.ray_mode = 1;
        verbs = mb_ray_verbs;
    }
    if (argc < 2) {
        mb_options_help_all(&cli, verbs, stderr);
        return mb_exit_status(MB_EINVAL);
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        (strcmp(argv[1], "help") == 0 && argc == 2)) {
        mb_options_help_all(&cli, verbs, stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0)
        return mb_verb_version.run(&cli, &mb_verb_version, 1, argv + 1);
    if (strcmp(argv[1], "__complete") == 0) { /* cli/completion.bash asks */
        mb_options_complete(verbs, argv + 2, argc - 2, stdout);
        return 0;
    }
    if (strcmp(argv[1], "help") == 0) {
        char *help[] = {argv[2], (char[]){"--help"}, NULL};

        verb = find_verb(verbs, argv[2], &err);
        return verb != NULL ? run_verb(&cli, verb, 2, help) : mb_cli_fail(&cli, &err);
    }
    verb = find_verb(verbs, argv[1], &err);
    if (verb != NULL)
        return run_verb(&cli, verb, argc - 1, argv + 1);
    mb_cli_look_for_json(&cli, argc - 1, argv + 1, 0);
    return mb_cli_fail(&cli, &err);
}
