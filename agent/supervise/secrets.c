#include "agent/supervise/secrets.h"

#include <stdlib.h>
#include <string.h>

int mb_is_store_key(const char *var)
{
    static const char *const names[] = {
        "BUCKET_STORAGE_ACCESS_KEY", "BUCKET_STORAGE_SECRET_KEY",
        "AWS_ACCESS_KEY_ID",         "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",         "AWS_CONTAINER_AUTHORIZATION_TOKEN"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        size_t n = strlen(names[i]);

        if (strncmp(var, names[i], n) == 0 && (var[n] == '=' || var[n] == '\0'))
            return 1;
    }
    return 0;
}

int mb_has_store_keys(char *const *env)
{
    for (; *env != NULL; env++) {
        if (mb_is_store_key(*env))
            return 1;
    }
    return 0;
}

char **mb_without_store_keys(char *const *env)
{
    size_t n = 0;
    char **kept;

    while (env[n] != NULL)
        n++;
    kept = malloc((n + 1) * sizeof(*kept));
    if (kept == NULL)
        return NULL;
    n = 0;
    for (; *env != NULL; env++) {
        if (!mb_is_store_key(*env))
            kept[n++] = *env;
    }
    kept[n] = NULL;
    return kept;
}
