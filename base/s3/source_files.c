/*
 * The two shared files.
 *
 * 1. Both are read as INI; the profile is [NAME] in the credentials file, [profile NAME] or, of
 *    "default", [default] in the config file. What the first says wins.
 * 2. A role with a web identity's token goes to STS; else keys are taken.
 * 3. Ways that this program does not go are refused by their name, instead of going on to the next
 *    source and failing there with someone else's keys.
 * Failures: see source.h. A line that is no pair is passed over, as AWS's tools do.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/s3/source.h"
#include "base/str.h"

enum { MAX_VALUE_BYTES = 16 * 1024 };

/* ---- INI ---- */

static int is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

static void trim(const char **s, size_t *n)
{
    while (*n > 0 && is_blank((*s)[0])) {
        (*s)++;
        (*n)--;
    }
    while (*n > 0 && is_blank((*s)[*n - 1]))
        (*n)--;
}

/* A comment begins with # or ; behind a blank. */
static size_t without_comment(const char *s, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        if ((s[i] == '#' || s[i] == ';') && is_blank(s[i - 1]))
            return i;
    }
    return n;
}

int mb_s3_ini_parse(const char *text, size_t n, mb_s3_ini_cb cb, void *arg)
{
    struct mb_s3_ini_pair pair = {.section = "", .n_section = 0};
    const char *end = text + n;
    int rc = 0;
    while (rc >= 0 && text < end) {
        const char *line = text;
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        size_t len = (size_t)((newline ? newline : end) - line);
        text = newline ? newline + 1 : end;
        if (len == 0 || line[0] == '#' || line[0] == ';' || is_blank(line[0]))
            continue;
        if (line[0] == '[') {
            const char *close = memchr(line, ']', len);
            pair.section = line + 1;
            pair.n_section = close ? (size_t)(close - line) - 1 : 0;
            trim(&pair.section, &pair.n_section);
            continue;
        }
        const char *equals = memchr(line, '=', len);
        if (!equals)
            continue;
        pair.name = line;
        pair.n_name = (size_t)(equals - line);
        pair.value = equals + 1;
        pair.n_value = without_comment(pair.value, len - pair.n_name - 1);
        trim(&pair.name, &pair.n_name);
        trim(&pair.value, &pair.n_value);
        rc = cb(arg, &pair);
    }
    return rc < 0 ? rc : 0;
}

/* ---- the profile ---- */

enum field {
    ACCESS_KEY,
    SECRET_KEY,
    SESSION_TOKEN,
    ROLE_ARN,
    TOKEN_FILE,
    SESSION_NAME,
    REGION,
    N_FIELDS
};

struct profile {
    const char *name;
    int is_config; /* sections are "profile NAME" */
    int found;
    struct mb_secret *field[N_FIELDS]; /* each may be a secret's half */
    char refused[32];
};

static int is_section(const struct profile *p, const struct mb_s3_ini_pair *pair)
{
    static const char prefix[] = "profile";
    const char *s = pair->section;
    size_t n = pair->n_section;
    size_t len = strlen(p->name);
    if (p->is_config && n > sizeof prefix - 1 && strncmp(s, prefix, sizeof prefix - 1) == 0 &&
        is_blank(s[sizeof prefix - 1])) {
        s += sizeof prefix - 1;
        n -= sizeof prefix - 1;
        trim(&s, &n);
    } else if (p->is_config && strcmp(p->name, "default") != 0) {
        return 0;
    }
    return n == len && strncmp(s, p->name, len) == 0;
}

static int is_name(const struct mb_s3_ini_pair *pair, const char *name)
{
    return pair->n_name == strlen(name) && strncasecmp(pair->name, name, pair->n_name) == 0;
}

static int on_pair(void *arg, const struct mb_s3_ini_pair *pair)
{
    static const char *const names[N_FIELDS] = {"aws_access_key_id",
                                                "aws_secret_access_key",
                                                "aws_session_token",
                                                "role_arn",
                                                "web_identity_token_file",
                                                "role_session_name",
                                                "region"};
    static const char *const others[] = {"source_profile", "credential_source",
                                         "credential_process", "sso_session", "sso_start_url"};
    struct profile *p = arg;
    if (!is_section(p, pair))
        return 0;
    p->found = 1;
    for (size_t i = 0; i < N_FIELDS; i++) {
        if (!is_name(pair, names[i]) || p->field[i] || pair->n_value == 0 ||
            pair->n_value > MAX_VALUE_BYTES)
            continue;
        p->field[i] = mb_secret_create(pair->value, pair->n_value);
        if (!p->field[i])
            return MB_ENOMEM;
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (is_name(pair, others[i]))
            snprintf(p->refused, sizeof p->refused, "%s", others[i]);
    }
    return 0;
}

static const char *field(const struct profile *p, enum field f)
{
    return mb_secret_text(p->field[f]);
}

static int take_profile(struct mb_s3_source *io, const struct profile *p, mb_s3_env_fn env,
                        void *arg, const char *region, struct mb_err *err)
{
    if (field(p, REGION)) {
        io->region = mb_strdup(field(p, REGION));
        if (!io->region)
            return mb_err_set(err, MB_ENOMEM, "out of memory");
        region = io->region;
    }
    if (field(p, ROLE_ARN) && field(p, TOKEN_FILE)) {
        const char *url = env(arg, "AWS_ENDPOINT_URL_STS");
        if (!url || !*url)
            url = env(arg, "AWS_ENDPOINT_URL");
        io->kind = MB_S3_FROM_ROLE;
        io->role_arn = mb_strdup(field(p, ROLE_ARN));
        io->token_file = mb_strdup(field(p, TOKEN_FILE));
        io->session_name = mb_strdup(field(p, SESSION_NAME) ? field(p, SESSION_NAME) : "mobula");
        io->url = url && *url ? mb_strdup(url)
                              : mb_asprintf("https://sts.%s.%s", region, mb_s3_aws_domain(region));
        return io->role_arn && io->token_file && io->session_name && io->url
                   ? 0
                   : mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    if (p->refused[0] && (field(p, ROLE_ARN) || !field(p, ACCESS_KEY)))
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "profile \"%.60s\" uses %s, which mobula does not do: give it keys, or a "
                          "role_arn with a web_identity_token_file",
                          io->profile, p->refused);
    if (field(p, ACCESS_KEY) && field(p, SECRET_KEY)) {
        io->kind = MB_S3_FROM_KEYS;
        return mb_s3_keys_set(&io->keys, field(p, ACCESS_KEY), field(p, SECRET_KEY),
                              field(p, SESSION_TOKEN)) == 0
                   ? 0
                   : mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    if (field(p, ACCESS_KEY) || field(p, SECRET_KEY))
        return mb_err_set(err, MB_EDENIED, "profile \"%.60s\" has one half of a pair of keys",
                          io->profile);
    return 0;
}

int mb_s3_source_read_files(struct mb_s3_source *io, mb_s3_env_fn env, void *arg,
                            const char *region, const char *credentials, size_t n_credentials,
                            const char *config, size_t n_config, struct mb_err *err)
{
    struct profile p = {.name = io->profile};
    int rc = credentials ? mb_s3_ini_parse(credentials, n_credentials, on_pair, &p) : 0;
    p.is_config = 1;
    if (rc == 0 && config)
        rc = mb_s3_ini_parse(config, n_config, on_pair, &p);
    if (rc != 0)
        mb_err_set(err, rc, "out of memory");
    else if (!p.found && io->is_named)
        rc = mb_err_set(err, MB_EDENIED,
                        "profile \"%.60s\" (AWS_PROFILE) is neither in %s nor in %s", io->profile,
                        io->credentials_file, io->config_file);
    else if (p.found)
        rc = take_profile(io, &p, env, arg, region, err);
    for (size_t i = 0; i < N_FIELDS; i++)
        mb_secret_destroy(p.field[i]);
    return rc;
}
