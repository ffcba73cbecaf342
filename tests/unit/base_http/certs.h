/* Certificates of a group of tests: made before it for 127.0.0.1, removed after it. One program,
 * one thread; who includes it has cmocka and links mobula_base. */
#ifndef MOBULA_TESTS_UNIT_BASE_HTTP_CERTS_H
#define MOBULA_TESTS_UNIT_BASE_HTTP_CERTS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/fs.h"

static char dir[64]; /* where they are */

static int make_certs(void **state)
{
    char command[256];
    (void)state;
    strcpy(dir, "/tmp/mobula-tls-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(command, sizeof command, "%s %s 127.0.0.1", MAKE_CERTS, dir);
    return system(command);
}

static int remove_certs(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

#endif
